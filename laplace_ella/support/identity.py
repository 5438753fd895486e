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
    # Those of the parts are equally long, and need nothing between them.
    return _hexadecimal("".join(map(_digest_of, values)).encode())


def _hexadecimal(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _digest_of(value: Any) -> str:
    data = b""
    if isinstance(value, Enum):
        return _digest_of(value.value)
    if isinstance(value, (list, tuple)):
        return digest("list", *value)
    if isinstance(value, Mapping):
        return digest("mapping", *sorted(map(digest, value, value.values())))
    if isinstance(value, torch.Tensor):
        text = f"tensor {value.dtype} {tuple(value.shape)}"
        if not value.is_meta:
            dense = value.detach().cpu()
            dense = dense if dense.layout is torch.strided else dense.to_dense()
            data = dense.contiguous().flatten().view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        text, data = f"array {value.dtype} {value.shape}", value.tobytes()
    else:  # addresses of objects are others in every process
        name = getattr(value, "__qualname__", None)
        text = name or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
        text = f"{type(value).__name__} {text}"
    return _hexadecimal(text.encode()) + _hexadecimal(data)


def model_identity(model: nn.Module, x: Any) -> dict[str, Any]:
    """Return what a model is known by, in tensors and plain types: "state" with dtype,
    shape and digest of every tensor, and "outputs" for inputs `x` on the model's
    device, which stand for its code.

    To be called with the user's state preserved, see `preserve.undisturbed`.
    """
    state = {
        name: f"{t.dtype} {tuple(t.shape)} {digest(t)}"
        for name, t in model.state_dict(keep_vars=True).items()
        if isinstance(t, torch.Tensor)
    }
    with torch.no_grad():
        outputs = None if x is None else model(x)
    outputs = getattr(outputs, "logits", outputs)  # of Hugging Face's models
    known = isinstance(outputs, torch.Tensor)
    return {"state": state, "outputs": outputs.detach().cpu() if known else None}


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
    before, after = saved["outputs"], now["outputs"]
    if found or before is None or after is None:
        return [*found[:3], f"and {len(found) - 3} more"][: len(found)]
    tolerance = torch.finfo(before.dtype).eps ** 0.5
    before, after = before.double(), after.double()
    if before.shape != after.shape:
        return [f"outputs have shape {tuple(after.shape)}, saved {tuple(before.shape)}"]
    scale = tolerance * float(before.nan_to_num().abs().max())
    if torch.allclose(after, before, tolerance, scale, equal_nan=True):
        return []
    difference = float((after - before).abs().max())
    return [f"outputs differ by up to {difference:.3g}, with equal weights"]
