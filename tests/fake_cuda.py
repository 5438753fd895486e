"""A GPU that is not there: real numbers in host memory that claim to be on "cuda:0".

`torch._subclasses.FakeTensorMode` has no autograd for a device that the machine lacks
and no values, so that every rank, norm or finiteness check stops it. Here the values
are real, and what a GPU would refuse is refused: an operation that mixes the two
devices, a host generator for a draw on the device, a silent copy to numpy.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")


class FakeCudaTensor(torch.Tensor):
    """A tensor whose numbers are in `elem`, on the host."""

    @staticmethod
    def __new__(cls, elem):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=elem.device,  # what the C++ side sees, the autograd engine above all
        )

    def __init__(self, elem):
        assert type(elem) is torch.Tensor
        self.elem = elem

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self):
        return 0

    def __repr__(self):
        return f"FakeCudaTensor({self.elem})"

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def __format__(self, spec):
        return format(self.elem, spec)

    def tolist(self):
        return self.elem.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inputs = _tensors((args, kwargs))
        on_host = [t for t in inputs if not isinstance(t, cls)]
        aten, copying = torch.ops.aten, func is torch.ops.aten.copy_.default
        indexing = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
        mixed = any(t.ndim for t in on_host) and not (copying or indexing)
        if mixed or (indexing and not isinstance(inputs[0], cls)):
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but found at "
                "least two devices, cuda:0 and cpu"
            )
        plain = tree_map_only(cls, lambda a: a.elem, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if copying and not isinstance(inputs[0], cls):
            return args[0]
        out = tree_map(lambda o: cls(o) if type(o) is torch.Tensor else o, out)
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


class _Factories(TorchDispatchMode):
    """Tensors that C++ makes out of nothing, for operations on the fake device.

    Forward-mode AD makes zeros, the batching rules ones: on a GPU they are made there.
    """

    def __init__(self, calls):
        super().__init__()
        self.calls = calls  # the open calls from Python: do they have fake inputs?

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        from_python = self.calls and not self.calls[-1]
        if from_python or type(out) is not torch.Tensor or _tensors((args, kwargs)):
            return out
        return FakeCudaTensor(torch.empty_like(out).copy_(out))


def _tensors(tree):
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _on_fake_device(tensor):
    """Also below the wrappers of vmap, vjp and jvp, which know the C++ device alone."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return isinstance(tensor, FakeCudaTensor)


class FakeGenerator(torch.Generator):
    """A host generator that claims to be on the device it was made for."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls, device="cpu")
        self.claimed = CUDA if torch.device(device).type == "cuda" else CPU
        return self

    def __init__(self, device="cpu"):
        pass

    device = property(lambda self: self.claimed)


def _is_device(value):
    return isinstance(value, torch.device) or value in ("cpu", "cuda", "cuda:0")


_MOVES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu)


_DRIVER = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "synchronize": lambda device=None: None,
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device="cuda": None,
    "mem_get_info": lambda device=None: (2**33, 2**34),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
}


class FakeCuda(TorchFunctionMode):
    """Everything made for, or moved to, "cuda" becomes a `FakeCudaTensor`."""

    def __enter__(self):
        self._stack = ExitStack()
        self._stack.enter_context(mock.patch.object(torch, "Generator", FakeGenerator))
        for name, function in _DRIVER.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, function))
        if hasattr(torch, "accelerator"):  # optimisers ask it for streams
            nothing = mock.Mock(return_value=None)
            self._stack.enter_context(
                mock.patch.object(torch.accelerator, "current_accelerator", nothing)
            )
        self._calls = []
        self._factories = _Factories(self._calls)
        self._factories.__enter__()
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self._factories.__exit__(*exc)
        self._stack.close()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        self._calls.append(any(map(_on_fake_device, _tensors((args, kwargs)))))
        try:
            return self._call(func, args, kwargs)
        finally:
            self._calls.pop()

    def _call(self, func, args, kwargs):
        if func == torch.Tensor.device.__get__ and self._calls[-1]:
            return CUDA
        if func in _MOVES:
            return self._move(func, args, kwargs)
        device = kwargs.get("device")
        if device is None or not _is_device(device):
            return func(*args, **kwargs)
        on_cuda = torch.device(device).type == "cuda"
        kwargs["device"] = CPU
        generator = kwargs.get("generator")
        if generator is not None and (generator.device.type == "cuda") != on_cuda:
            raise RuntimeError(
                f"Expected a {device} device type for generator but found "
                f"{generator.device}"
            )
        out = func(*args, **kwargs)
        if on_cuda and type(out) is torch.Tensor:
            return fake(out) if out.requires_grad else FakeCudaTensor(out)
        if not on_cuda and isinstance(out, FakeCudaTensor):
            return real(out)
        return out

    def _move(self, func, args, kwargs):
        tensor, *rest = args
        target = CUDA if func is torch.Tensor.cuda else CPU
        if func is torch.Tensor.to:
            target = kwargs.pop("device", None)
            if rest and isinstance(rest[0], torch.Tensor):
                rest = [rest[0].device, rest[0].dtype]
            if rest and _is_device(rest[0]):
                target = rest.pop(0)
            kwargs.pop("non_blocking", None)
            rest = [value for value in rest if value is not None and value is not False]
            if rest or kwargs:
                tensor = torch.Tensor.to(tensor, *rest, **kwargs)
        if target is None or torch.device(target).type == tensor.device.type:
            return tensor
        return real(tensor) if torch.device(target).type == "cpu" else fake(tensor)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, to_fake):
        ctx.to_fake = to_fake
        copied = (tensor if to_fake else tensor.elem).detach().clone()
        return FakeCudaTensor(copied) if to_fake else copied

    @staticmethod
    def backward(ctx, grad):
        return (real(grad) if ctx.to_fake else fake(grad)), None


def fake(tensor):
    """A host tensor moved to the fake device."""
    return tensor if isinstance(tensor, FakeCudaTensor) else _Moved.apply(tensor, True)


def real(tensor):
    """A tensor of the fake device moved to the host."""
    return _Moved.apply(tensor, False) if isinstance(tensor, FakeCudaTensor) else tensor


def module_to_cuda(module):
    """Move parameters and buffers of a module to the fake device, in place."""
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                m._parameters[name] = torch.nn.Parameter(
                    FakeCudaTensor(p.detach().clone()), p.requires_grad
                )
        for name, b in m._buffers.items():
            if b is not None:
                m._buffers[name] = FakeCudaTensor(b.detach().clone())
    return module
