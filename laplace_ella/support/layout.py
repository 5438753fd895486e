"""Outputs at many positions: tokens, pixels.

A model that returns C outputs at each of S positions has S·C outputs per example, which
is all that differentiation needs to know. The likelihood factorises over positions, so
losses, curvature and links see rows: one position of one example, C outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

__all__ = ["OutputLayout", "Positions", "check_outputs"]


class OutputLayout(str, Enum):
    """Which dimension of the model's output holds the C classes or values.

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Conv2d(1, 2, 3, padding=1)  # (B, 1, 4, 4) to (B, 2, 4, 4)
    >>> data = TensorDataset(torch.randn(6, 1, 4, 4), torch.randint(2, (6, 4, 4)))
    >>> la = Laplace(
    ...     model, "classification", "all", "nystrom", output_layout="channels_first"
    ... )
    >>> la.fit(DataLoader(data, batch_size=3))
    >>> la(torch.randn(5, 1, 4, 4)).shape
    torch.Size([5, 2, 4, 4])
    """

    FLAT = "flat"
    """`(B, C)`: one position per example."""

    CHANNELS_LAST = "channels_last"
    """`(B, ..., C)`: for example `(B, T, C)`, T tokens."""

    CHANNELS_FIRST = "channels_first"
    """`(B, C, ...)`: for example `(B, C, H, W)`, H·W pixels."""

    def of(self, shape: torch.Size | tuple[int, ...]) -> Positions:
        """The positions of an output of this shape, without the batch dimension."""
        if self is OutputLayout.CHANNELS_FIRST:
            return Positions(self, tuple(shape[1:]), shape[0])
        return Positions(self, tuple(shape[:-1]), shape[-1])


@dataclass(frozen=True)
class Positions:
    """The outputs of one example: positions `(...)` and C outputs at each of them."""

    layout: OutputLayout
    shape: tuple[int, ...]
    n_channels: int

    @property
    def n_positions(self) -> int:
        """S."""
        return math.prod(self.shape)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the model's output without the batch dimension."""
        if self.layout is OutputLayout.CHANNELS_FIRST:
            return (self.n_channels, *self.shape)
        return (*self.shape, self.n_channels)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """`(B, S·C, ...)` in the model's order as rows `(B·S, C, ...)`."""
        S, C = self.n_positions, self.n_channels
        if self.layout is OutputLayout.CHANNELS_FIRST:
            return outputs.unflatten(1, (C, S)).transpose(1, 2).flatten(0, 1)
        return outputs.unflatten(1, (S, C)).flatten(0, 1)

    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse: `(B·S, C, ...)` as `(B, S·C, ...)`."""
        rows = rows.unflatten(0, (-1, self.n_positions))
        if self.layout is OutputLayout.CHANNELS_FIRST:
            rows = rows.transpose(1, 2)
        return rows.flatten(1, 2)

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(B·S, C, ...)` in the shape of the model's output, `(B, *, ...)`."""
        return self.outputs(rows).unflatten(1, self.output_shape)

    def restore_positions(self, rows: torch.Tensor) -> torch.Tensor:
        """One entry per position, `(B·S, ...)`, as `(B, *positions, ...)`."""
        if not self.shape:  # one position: the rows are the examples
            return rows
        return rows.unflatten(0, (-1, *self.shape))


def check_outputs(
    f: Any, layout: OutputLayout = OutputLayout.FLAT, size: int | None = None
) -> torch.Tensor:
    """A model output for `size` examples must be a tensor of the layout's shape."""
    if not isinstance(f, torch.Tensor):
        raise TypeError(
            f"The model must return a tensor (B, C), got {type(f).__name__}. Wrap it "
            "in a module that returns the logits or means."
        )
    if layout is OutputLayout.FLAT and f.ndim != 2:
        raise ValueError(
            f"The model must return a matrix (B, C), got shape {tuple(f.shape)}. "
            "For outputs at many positions pass output_layout='channels_last' "
            "(B, ..., C) or 'channels_first' (B, C, ...); for one output, return "
            "shape (B, 1)."
        )
    if layout is not OutputLayout.FLAT and f.ndim < 2:
        raise ValueError(
            f"output_layout={layout.value!r} expects an output with a batch and a "
            f"channel dimension, got shape {tuple(f.shape)}."
        )
    if size is not None and len(f) != size:
        raise ValueError(
            f"The model must return one output per example, got shape "
            f"{tuple(f.shape)} for {size} examples. The first dimension of inputs and "
            "outputs must be the batch; of a mapping, dict_key_x names the tensor that "
            "tells how many examples there are."
        )
    return f
