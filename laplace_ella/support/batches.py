"""Tuple and mapping batches: splitting, moving, slicing.

Index legend of the package: N data, C outputs, P parameters, M Nyström samples,
K rank, B batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "batch_size",
    "chunks",
    "detach",
    "has_values",
    "split_batch",
    "take",
    "to_device",
]


def has_values(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds numbers; fake and meta tensors have shapes alone."""
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


def split_batch(batch: Any, dict_key_y: str) -> tuple[Any, torch.Tensor]:
    """Split one batch of a loader into model inputs and targets.

    A mapping is its own input (as Hugging Face models expect), its targets stand
    under `dict_key_y`.
    """
    if isinstance(batch, Mapping):
        if dict_key_y not in batch:
            raise KeyError(
                f"The batch is a mapping with keys {sorted(map(str, batch))}, none of "
                f"which is dict_key_y={dict_key_y!r}. Pass dict_key_y= to Laplace."
            )
        return batch, torch.as_tensor(batch[dict_key_y])
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    got = (
        f"a {type(batch).__name__} of length {len(batch)}"
        if isinstance(batch, (tuple, list))
        else f"a {type(batch).__name__}"
    )
    raise ValueError(
        f"Expected batches (inputs, targets) or a mapping, got {got}. "
        "Change the data set or the collate function of the loader."
    )


def to_device(x: Any, device: torch.device) -> Any:
    """Move every tensor of `x` to `device`; containers are copied, not changed."""
    # Tensors made in inference mode cannot be saved for a backward pass.
    return _map_tensors(lambda t: t.to(device, copy=t.is_inference()), x)


def detach(x: Any) -> Any:
    """`x` without the graph of its tensors; containers are copied, not changed."""
    return _map_tensors(torch.Tensor.detach, x)


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return change(x)
    if isinstance(x, MutableMapping):
        changed = copy.copy(x)
        for key, value in x.items():
            changed[key] = _map_tensors(change, value)
        return changed
    if isinstance(x, (tuple, list)):
        return type(x)(_map_tensors(change, value) for value in x)
    return x


def batch_size(x: Any, dict_key_x: str) -> int:
    """Number of examples in model inputs `x`."""
    if isinstance(x, torch.Tensor):
        if x.ndim == 0:
            raise ValueError("Expected inputs with a batch dimension, got a scalar.")
        return x.shape[0]
    if isinstance(x, Mapping):
        value = x.get(dict_key_x)
        if not isinstance(value, torch.Tensor):
            tensors = [v for v in x.values() if isinstance(v, torch.Tensor) and v.ndim]
            if not tensors:
                raise ValueError(
                    f"The input mapping has no tensor (keys {sorted(map(str, x))}); "
                    "pass dict_key_x= to say where the inputs are."
                )
            value = tensors[0]
        return value.shape[0]
    if isinstance(x, (tuple, list)) and len(x):
        return batch_size(x[0], dict_key_x)
    raise TypeError(
        f"Inputs of type {type(x).__name__} are not supported; "
        "expected a tensor, a mapping or a tuple of tensors."
    )


def take(x: Any, index: slice | torch.Tensor, size: int) -> Any:
    """Rows `index` of inputs `x` that hold `size` examples.

    Entries of a mapping that have no batch dimension are kept as they are.
    """
    if isinstance(x, torch.Tensor):
        return x[index] if x.ndim and x.shape[0] == size else x
    if isinstance(x, MutableMapping):
        taken = copy.copy(x)
        for key, value in x.items():
            taken[key] = take(value, index, size)
        return taken
    if isinstance(x, (tuple, list)) and all(isinstance(v, torch.Tensor) for v in x):
        return type(x)(take(value, index, size) for value in x)
    return x


def chunks(size: int, chunk: int) -> Iterator[slice]:
    """Slices that cover range(size), each of at most `chunk` elements."""
    for start in range(0, size, max(1, chunk)):
        yield slice(start, min(start + max(1, chunk), size))
