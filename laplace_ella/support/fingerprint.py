"""Recognise models and data by their tensors, so that files need not contain them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["differences", "digest", "fingerprint"]


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


def digest(value: Any) -> str:
    """Digest of a tensor, or of those in a batch."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:32]
    if isinstance(value, Mapping):
        return json.dumps({str(k): digest(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return json.dumps([digest(v) for v in value])
    return repr(value)
