"""Inputs of models, and the layout of their outputs.

Inputs are tensors, or mappings, tuples and lists of tensors. A model that returns C
outputs at each of S positions (tokens, pixels) has O = S·C outputs per example, which
is all that differentiation needs to know. The likelihood factorises over positions, so
losses, curvature and links see rows: one position of one example, C outputs.

Index legend of the package: N data, C outputs, P parameters, M Nyström samples,
K rank, B batch, S positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` holds numbers; fake and meta ones have shapes alone."""
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
        x, y = batch
        return x, torch.as_tensor(y) if isinstance(y, (list, tuple, np.ndarray)) else y
    length = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise ValueError(
        "Expected batches (inputs, targets) or a mapping, got a "
        f"{type(batch).__name__}{length}. Change the data set or the collate function "
        "of the loader."
    )


# Containers of tensors


def tensors_of(x: Any) -> list[torch.Tensor]:
    """Return the tensors of `x`, which may be one, or a container of more."""
    if isinstance(x, torch.Tensor):
        return [x]
    parts: list[torch.Tensor] = []
    if isinstance(x, (Mapping, tuple, list)):
        for value in x.values() if isinstance(x, Mapping) else x:
            parts += tensors_of(value)
    return parts


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """Return `x` with `function(t)` in place of its tensors t, in the order of
    `tensors_of`; containers are copied, all else is shared."""
    if isinstance(x, torch.Tensor):
        return function(x)
    if isinstance(x, Mapping):
        changed = {key: map_tensors(function, value) for key, value in x.items()}
        if type(x) is dict or not isinstance(x, MutableMapping):
            return changed
        same = copy.copy(x)  # of its own class, with its other attributes
        for key, value in changed.items():
            same[key] = value
        return same
    if isinstance(x, (tuple, list)):
        parts = [map_tensors(function, value) for value in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def cast(
    tensor: torch.Tensor, dtype: torch.dtype | None, copy: bool = False
) -> torch.Tensor:
    """Return the tensor in another dtype, if that is given and it holds floating-point
    numbers."""
    wanted = dtype if tensor.is_floating_point() else None
    return tensor.to(wanted or tensor.dtype, copy=copy)


def to_device(x: Any, device: torch.device) -> Any:
    """Move every tensor of `x` to `device`; containers are copied, not changed."""
    # Tensors made in inference mode cannot be saved for a backward pass.
    return map_tensors(lambda t: t.to(device, copy=t.is_inference()), x)


# Examples


def batch_size(x: Any, dict_key_x: str) -> int:
    """Return the number of examples in model inputs `x`: the length of the tensor
    `x[dict_key_x]` of a mapping, of the first tensor otherwise."""
    tensors = tensors_of(x)
    if isinstance(x, Mapping):
        named = tensors_of(x.get(dict_key_x))
        tensors = named or [t for t in tensors if t.ndim]
    if not tensors:
        raise TypeError(
            f"Expected inputs (B, ...) in a tensor, a mapping or a tuple, got a "
            f"{type(x).__name__} without any. Wrap the model in a module that takes a "
            "tensor or a mapping of tensors with the batch as first dimension (of "
            "graphs, padded to one size), and let the loader yield (inputs, targets)."
        )
    if tensors[0].ndim == 0:
        raise ValueError(
            "Expected inputs with a batch dimension, got a scalar. Pass "
            "x.reshape(1, ...) for one example."
        )
    return len(tensors[0])


@dataclass(frozen=True)
class Batch:
    """Inputs of B examples, and leaves, those of their tensors with one entry for each:
    which these are is decided once, on the whole batch.

    A part of a batch may happen to be as long as a tensor that all examples share, so
    the sizes of a part say nothing.
    """

    inputs: Any
    leaves: list[torch.Tensor]
    size: int

    @classmethod
    def of(cls, x: Any, dict_key_x: str, size: int | None = None) -> Batch:
        """Describe inputs `x`, whose size is that of `x[dict_key_x]` of a mapping."""
        size = batch_size(x, dict_key_x) if size is None else size
        return cls(x, [t for t in tensors_of(x) if t.ndim and len(t) == size], size)

    def with_leaves(self, leaves: list[torch.Tensor]) -> Batch:
        """Return other examples; what they share stays."""
        others = dict(zip(map(id, self.leaves), leaves, strict=True))
        inputs = map_tensors(lambda t: others.get(id(t), t), self.inputs)
        return Batch(inputs, leaves, len(leaves[0]))

    def take(self, index: slice | torch.Tensor) -> Batch:
        """Return the examples `index`, a slice or positions `(m,)`."""
        return self.with_leaves([leaf[index] for leaf in self.leaves])

    @property
    def example_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one example's tensors, without the batch dimension."""
        return tuple([tuple(leaf.shape[1:]) for leaf in self.leaves])


def take(x: Any, index: slice | torch.Tensor, size: int) -> Any:
    """Return examples `index` of inputs `x` that hold `size` of them.

    For whole batches only: of parts, it cannot tell what has a batch dimension.
    """
    return Batch.of(x, "", size).take(index).inputs


def chunks(size: int, chunk: int) -> Iterator[slice]:
    """Yield slices that cover range(size), each of at most `chunk` elements."""
    for start in range(0, size, max(1, chunk)):
        yield slice(start, min(start + max(1, chunk), size))


# Outputs


class OutputLayout(str, Enum):
    """Which dimension of the model's output holds the C classes or values."""

    FLAT = "flat"
    """`(B, C)`: one position per example."""

    CHANNELS_LAST = "channels_last"
    """`(B, ..., C)`: for example `(B, T, C)`, T tokens."""

    CHANNELS_FIRST = "channels_first"
    """`(B, C, ...)`: for example `(B, C, H, W)`, H·W pixels."""

    def of(self, shape: torch.Size | tuple[int, ...]) -> Positions:
        """Return the positions of outputs of this shape, without batch dimension."""
        if self is OutputLayout.CHANNELS_FIRST:
            channels, *positions = shape
        else:
            *positions, channels = shape
        S, n_values = math.prod(positions), math.prod(shape)
        return Positions(self, tuple(shape), tuple(positions), channels, S, n_values)


@dataclass(frozen=True)
class Positions:
    """The S·C outputs of one example: C channels at each of S positions, which have a
    shape; made by `OutputLayout.of`."""

    layout: OutputLayout
    output_shape: tuple[int, ...]
    shape: tuple[int, ...]
    n_channels: int
    n_positions: int
    n_values: int

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return `(B, S·C, ...)` in the model's order as rows `(B·S, C, ...)`."""
        S, C = self.n_positions, self.n_channels
        if self.layout is OutputLayout.CHANNELS_FIRST:
            return outputs.unflatten(1, (C, S)).transpose(1, 2).flatten(0, 1)
        return outputs.unflatten(1, (S, C)).flatten(0, 1)

    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows `(B·S, C, ...)` as `(B, S·C, ...)`, the inverse of `rows`."""
        rows = rows.unflatten(0, (-1, self.n_positions))
        if self.layout is OutputLayout.CHANNELS_FIRST:
            rows = rows.transpose(1, 2)
        return rows.flatten(1, 2)

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows `(B·S, C, ...)` in the shape of the model's output."""
        return self.outputs(rows).unflatten(1, self.output_shape)

    def restore_positions(self, rows: torch.Tensor) -> torch.Tensor:
        """Return one entry per position, `(B·S, ...)`, as `(B, *positions, ...)`."""
        return rows.unflatten(0, (-1, *self.shape))


def check_outputs(
    f: Any, layout: OutputLayout = OutputLayout.FLAT, size: int | None = None
) -> torch.Tensor:
    """Return a model output for `size` examples if it has the layout's shape."""
    if not isinstance(f, torch.Tensor):
        raise TypeError(
            f"The model must return a tensor (B, C), got {type(f).__name__}. Wrap it "
            "in a module that returns the logits or means."
        )
    flat = layout is OutputLayout.FLAT
    if f.ndim < 2 or (flat and f.ndim > 2):
        expected = "a matrix (B, C)" if flat else "a batch and a channel dimension"
        raise ValueError(
            f"The model must return {expected}, got shape {tuple(f.shape)} with "
            f"output_layout={layout.value!r}. For outputs at many positions pass "
            "output_layout='channels_last' (B, ..., C) or 'channels_first' "
            "(B, C, ...); for one output, return shape (B, 1)."
        )
    if size is not None and len(f) != size:
        raise ValueError(
            f"The model must return one output per example, got shape "
            f"{tuple(f.shape)} for {size} examples. The first dimension of inputs and "
            "outputs must be the batch; of a mapping, dict_key_x names the tensor that "
            "tells how many examples there are."
        )
    return f
