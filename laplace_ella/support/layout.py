"""Outputs at many positions: tokens, pixels.

A model that returns C outputs at each of S positions has S·C outputs an example, which
is all that differentiation needs to know. The likelihood factorises over positions, so
losses, curvature and links see rows: one position of one example, C outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["OutputLayout", "Positions"]


class OutputLayout(str, Enum):
    """Which dimension of the model's output holds the C classes or values."""

    FLAT = "flat"
    """`(B, C)`: one position an example."""

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
        """What there is one of a position, `(B·S, ...)`, as `(B, *positions, ...)`."""
        if not self.shape:  # one position: the rows are the examples
            return rows
        return rows.unflatten(0, (-1, *self.shape))
