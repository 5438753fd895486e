"""Recognise data, settings and models: by content, and by what a model computes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn


def digest(*values: Any) -> str:
    """Return 32 hexadecimal digits that are equal for equal content.

    Tensors and arrays count with every number, wherever they are; containers with what
    they hold, mappings in any order; functions and classes by their names, and other
    objects as they are written. A running digest of a stream of tensors is
    `running = digest(running, tensor)`.

    >>> digest({"a": 1, "b": [2.0]}) == digest({"b": [2.0], "a": 1})
    True
    >>> digest(torch.zeros(2000)) == digest(torch.zeros(2000).index_fill(
    ...     0, torch.tensor([999]), 1.0))
    False
    """
    content = hashlib.sha256()
    for value in values:
        _feed(content, value)
    return content.hexdigest()[:32]


def _feed(content: Any, value: Any) -> None:
    """Add a value to a hash, after its type and size, which keep parts apart."""
    if isinstance(value, torch.Tensor):
        _tag(content, "tensor", value.dtype, tuple(value.shape))
        if not value.is_meta:
            dense = value.detach().cpu()
            dense = dense if dense.layout is torch.strided else dense.to_dense()
            dense = dense.contiguous().flatten()
            content.update(dense.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        _tag(content, "array", value.dtype, value.shape)
        content.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        parts = sorted((digest(key), digest(item)) for key, item in value.items())
        _tag(content, "mapping", parts)
    elif isinstance(value, (list, tuple)):
        _tag(content, "list", len(value))
        for item in value:
            _feed(content, item)
    elif isinstance(value, Enum):
        _feed(content, value.value)
    else:
        name = getattr(value, "__qualname__", None)
        # Addresses of objects are others in every process.
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)) if name is None else name
        _tag(content, type(value).__name__, text)


def _tag(content: Any, *words: Any) -> None:
    for word in map(str, words):
        content.update(f"{len(word)}:{word}".encode())


def model_identity(model: nn.Module, x: Any) -> dict[str, Any]:
    """Return what a model is known by, in tensors and plain types: "state" with dtype,
    shape and digest of every tensor, and "outputs" for inputs `x` on the model's
    device, which stand for its code.

    To be called with the user's state preserved, see `preserve.undisturbed`.
    """
    state = {
        name: f"{t.dtype} {tuple(t.shape)} {digest(t)}"
        for name, t in sorted(model.state_dict(keep_vars=True).items())
        if isinstance(t, torch.Tensor)
    }
    with torch.no_grad():
        outputs = None if x is None else model(x)
    outputs = getattr(outputs, "logits", outputs)  # of Hugging Face's models
    if not isinstance(outputs, torch.Tensor):
        return {"state": state, "outputs": None}
    return {"state": state, "outputs": outputs.detach().cpu()}


def same_model(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how two models differ, in words; nothing where they are the same.

    Their tensors must be equal, their outputs up to rounding.
    """
    theirs, ours = saved["state"], now["state"]
    found = [
        f"{name} is {ours.get(name, 'missing')}, saved {theirs.get(name, 'missing')}"
        for name in sorted({**theirs, **ours})
        if ours.get(name) != theirs.get(name)
    ]
    if found:
        return [*found[:3], f"and {len(found) - 3} more"][: len(found)]
    before, after = saved["outputs"], now["outputs"]
    if before is None or after is None:
        return []
    if before.shape != after.shape:
        return [f"outputs have shape {tuple(after.shape)}, saved {tuple(before.shape)}"]
    tolerance = torch.finfo(before.dtype).eps ** 0.5 if before.numel() else 1.0
    scale = float(before.double().abs().nan_to_num().max()) if before.numel() else 0.0
    if torch.allclose(
        after.double(), before.double(), tolerance, tolerance * scale, equal_nan=True
    ):
        return []
    difference = float((after.double() - before.double()).abs().max())
    return [f"outputs differ by up to {difference:.3g}, with equal weights"]
