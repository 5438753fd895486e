"""Recognise models, data and settings by their content.

`fingerprint` and `differences` compare a checkpoint's model with another one by its
tensors. `digest` and `model_digest` tell whether two computations would give the same
numbers: they read values, structure and code, and what they cannot read is never the
same twice.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import pickle
import types
import uuid
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["differences", "digest", "fingerprint", "model_digest"]

# --- a model's tensors ---------------------------------------------------------------


def fingerprint(model: nn.Module) -> list[list[str]]:
    """[name, shape, dtype, digest of the values] of every parameter and buffer.

    The same on every device; plain types only.
    """
    return [
        [name, str(tuple(t.shape)), str(t.dtype), digest(t)]
        for name, t in sorted(model.state_dict(keep_vars=True).items())
        if isinstance(t, torch.Tensor)
    ]


def differences(saved: list[list[str]], model: nn.Module) -> str | None:
    """The first differences in words, or None where the models are the same."""
    theirs = {name: rest for name, *rest in saved}
    ours = {name: rest for name, *rest in fingerprint(model)}
    found = [f"{name} is missing in this model" for name in theirs if name not in ours]
    found += [f"{name} is only in this model" for name in ours if name not in theirs]
    for name in theirs.keys() & ours.keys():
        labels = ("shape", "dtype", "values")
        for label, old, new in zip(labels, theirs[name], ours[name], strict=True):
            if old != new:
                what = "" if label == "values" else f": saved {old}, here {new}"
                found.append(f"{label} of {name} differ{what}")
                break
    if not found:
        return None
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(sorted(found)[:3]) + more


# --- anything ------------------------------------------------------------------------


def digest(*values: Any) -> str:
    """32 hexadecimal digits that are equal for equal content.

    Tensors and arrays count with every number, wherever they are; containers with what
    they hold, mappings in any order; functions and classes with their code, and other
    objects with their attributes. An object that shows none of these has another digest
    in every call: it is better to compute again than to take something for the same
    that is not.

    >>> digest({"a": 1, "b": [2.0]}) == digest({"b": [2.0], "a": 1})
    True
    >>> digest(torch.zeros(2000)) == digest(torch.zeros(2000).index_fill(
    ...     0, torch.tensor([999]), 1.0))
    False
    """
    reader = _Reader()
    for value in values:
        reader.read(value)
    return reader.result()


def model_digest(model: nn.Module) -> str:
    """Digest of everything on which the outputs and gradients of a model depend.

    The classes of its modules with their code and configuration, forward hooks, values
    of parameters and all buffers, which parameters are trainable and which are shared.
    Not its device and not its training mode.
    """
    reader = _Reader()
    for name, module in model.named_modules(remove_duplicate=False):
        reader.read(name)
        reader.read_module(module)
    owners: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        reader.read((name, owners.setdefault(id(p), name), p.requires_grad, p))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        reader.read((name, buffer))
    return reader.result()


#: Attributes that every module has: parameters, children, hooks and flags.
_COMMON = frozenset(vars(nn.Module()))

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice)

#: Code of a class, and its constants; descriptors and caches are left out.
_CODE = (types.FunctionType, staticmethod, classmethod, property)
_CONSTANTS = (*_PLAIN, torch.Tensor, list, tuple, dict)


class _Reader:
    """Feeds values into one hash, each with a tag of its type."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._open: set[int] = set()  # objects that are being read
        self._code: set[Any] = set()  # functions and classes that were read
        self._helpers: list[Any] = []  # those that they use, to be read at the end

    def result(self) -> str:
        # Not where they are met: a file of many functions would be a deep recursion.
        while self._helpers:
            self.read(self._helpers.pop(0))
        return self._hash.hexdigest()[:32]

    def read(self, value: Any) -> None:
        if isinstance(value, Enum):
            self._tag("enum", _name(type(value)), repr(value.value))
        elif isinstance(value, (*_PLAIN, torch.dtype, torch.device)):
            self._tag("plain", type(value).__name__, repr(value))
        elif isinstance(value, torch.Tensor):
            self._read_tensor(value)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._read_array(np.asarray(value))
        elif id(value) in self._open:
            self._tag("cycle", _name(type(value)))
        else:
            self._open.add(id(value))
            try:
                self._read_object(value)
            finally:
                self._open.remove(id(value))

    def _tag(self, *words: str) -> None:
        for word in words:
            encoded = word.encode()
            # The length keeps ("ab", "c") and ("a", "bc") apart.
            self._hash.update(f"{len(encoded)}:".encode() + encoded)

    def _read_tensor(self, tensor: torch.Tensor) -> None:
        self._tag("tensor", str(tensor.dtype), str(tuple(tensor.shape)))
        if tensor.is_meta:
            return
        dense = tensor.detach().cpu()
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        if dense.is_quantized:
            self.read([dense.q_scale(), dense.q_zero_point()])
            dense = dense.int_repr()
        flat = dense.resolve_conj().resolve_neg().contiguous().flatten()
        self._hash.update(flat.view(torch.uint8).numpy().data)

    def _read_array(self, array: np.ndarray) -> None:
        self._tag("array", str(array.dtype), str(array.shape))
        if array.dtype.hasobject:
            self.read(array.tolist())
        else:
            self._hash.update(np.ascontiguousarray(array).tobytes())

    def _read_object(self, value: Any) -> None:
        self._tag(_name(type(value)))
        if isinstance(value, Mapping):
            self._read_unordered([(k, v) for k, v in value.items()])
        elif isinstance(value, Set):
            self._read_unordered(list(value))
        elif isinstance(value, (list, tuple)):
            self._tag(str(len(value)))
            for item in value:
                self.read(item)
        elif isinstance(value, types.CodeType):
            self._read_code(value)
        elif isinstance(value, functools.partial):
            self.read([value.func, value.args, value.keywords])
        elif isinstance(value, types.MethodType):
            self.read([value.__func__, value.__self__])
        elif isinstance(value, types.FunctionType):
            self._read_function(value)
        elif isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
            self._tag(getattr(value, "__qualname__", value.__name__))
        elif isinstance(value, (staticmethod, classmethod)):
            self.read(value.__func__)
        elif isinstance(value, property):
            self.read([value.fget, value.fset])
        elif isinstance(value, nn.Module):
            self._tag(model_digest(value))
        elif isinstance(value, type):
            self._read_classes(value)
        elif isinstance(value, torch.Generator):
            self.read(value.get_state())
        elif callable(value) and hasattr(value, "__wrapped__"):
            self.read(getattr(value, "__wrapped__"))  # noqa: B009, lru_cache and other decorators
        else:
            self._read_instance(value)

    def _read_unordered(self, items: list[Any]) -> None:
        parts = []
        for item in items:
            part = _Reader()
            part._open = self._open
            part.read(item)
            parts.append(part.result())
        self._tag(*sorted(parts))

    def _read_instance(self, value: Any) -> None:
        """An object of a class that is not known here."""
        self._read_classes(type(value))
        if getattr(value, "__dict__", None):
            self._read_unordered(list(vars(value).items()))
            return
        try:
            self._hash.update(pickle.dumps(value, protocol=4))
        except Exception:  # a class may refuse in any way
            self._tag(uuid.uuid4().hex)

    # Code

    def _read_code(self, code: types.CodeType) -> None:
        """What a function does, not where it stands."""
        self._tag("code", code.co_code.hex(), *code.co_names, *code.co_varnames)
        for constant in code.co_consts:
            self.read(constant)

    def _read_function(self, function: types.FunctionType) -> None:
        self._tag("function", function.__qualname__)
        # The version of torch stands for its functions.
        if _is_torch(function.__module__) or function in self._code:
            return
        self._code.add(function)
        self.read(function.__code__)
        self.read([function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            try:
                self.read(cell.cell_contents)
            except ValueError:  # not filled yet
                self._tag("empty")
        for name in sorted(set(_global_names(function.__code__))):
            used = function.__globals__.get(name)
            # Constants and helpers of the same file; a library is known by its name.
            if isinstance(used, (*_PLAIN, torch.Tensor)):
                self.read((name, used))
            elif isinstance(used, (types.FunctionType, type)):
                self._tag(name)
                if used.__module__ == function.__module__:
                    self._helpers.append(used)

    def _read_classes(self, cls: type) -> None:
        """Code and constants of a class and its bases, as far as users wrote them."""
        for base in cls.__mro__:
            self._tag(_name(base))
            written = not (base.__module__ == "builtins" or _is_torch(base.__module__))
            if not written or base in self._code:
                continue
            self._code.add(base)
            for name, member in sorted(vars(base).items()):
                if isinstance(member, functools.cached_property):
                    member = member.func
                # __doc__, __annotations__, __firstlineno__, … change no number.
                constant = isinstance(member, _CONSTANTS) and not name.startswith("__")
                if constant or isinstance(member, _CODE):
                    self.read((name, member))

    # Modules

    def read_module(self, module: nn.Module) -> None:
        """Class and configuration of one module, without its children and tensors."""
        cls = type(module)
        self._tag("module", _name(cls), module.extra_repr())
        if isinstance(module, torch.jit.ScriptModule):
            self._tag(str(getattr(module, "code", "")))
            return
        self._read_classes(cls)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for hook in hooks.values():  # their keys count all hooks of the process
                self.read(hook)
        for name, value in sorted(vars(module).items()):
            if name in _COMMON:
                continue
            if _is_torch(cls.__module__) and not _is_configuration(value):
                continue  # caches and compilers of torch's own classes
            self.read((name, value))


def _is_configuration(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_configuration(v) for v in value)
    functions = (types.FunctionType, types.BuiltinFunctionType, type, functools.partial)
    return isinstance(value, (*_PLAIN, *functions, torch.Tensor, torch.dtype))


def _is_torch(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "torch"


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Names that a function and those inside it look up outside."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
