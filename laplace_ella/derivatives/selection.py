"""Which outputs of each example are differentiated: all, or the largest ones.

Index legend: B batch, S positions, C outputs at each, c of them selected, O = S·C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from laplace_ella.support.layout import Positions

__all__ = ["Cotangents", "Selection", "largest"]

#: Combinations of outputs (o, O), from the outputs (O,) of the example.
Cotangents = Callable[[torch.Tensor], torch.Tensor]


def largest(f: torch.Tensor, n: int) -> torch.Tensor:
    """Where the n largest of the last dimension are, the largest first.

    Stable: equal outputs, batched or not, are always taken in the same order.
    """
    return f.detach().argsort(dim=-1, descending=True, stable=True)[..., :n]


@dataclass(frozen=True)
class Selection:
    """The outputs of one example that are wanted, c at each of its positions.

    Attributes
    ----------
    positions : Positions
    top : int, optional
        so many outputs at each position, the largest first; all by default
    """

    positions: Positions
    top: int | None = None

    @property
    def is_all(self) -> bool:
        return self.top is None or self.top >= self.positions.n_channels

    @property
    def limit(self) -> int | None:
        """`top` where it matters, None where that is all."""
        return None if self.is_all else self.top

    @property
    def n_channels(self) -> int:
        """c."""
        return self.limit or self.positions.n_channels

    @property
    def size(self) -> int:
        """S·c, the number of outputs of one example."""
        return self.positions.n_positions * self.n_channels

    def order(self, device: torch.device) -> torch.Tensor:
        """Numbers (S, c) of the outputs at each position; see `cotangents`."""
        if self.is_all:
            return self.positions.rows(torch.arange(self.size, device=device)[None])
        return torch.arange(self.size, device=device).unflatten(
            0, (-1, self.n_channels)
        )

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """`(B, S·c, ...)`, by their numbers, as rows `(B·S, c, ...)`."""
        if self.is_all:
            return self.positions.rows(outputs)
        return outputs.unflatten(1, (-1, self.n_channels)).flatten(0, 1)

    def channels(self, f: torch.Tensor) -> torch.Tensor | None:
        """Which outputs of the rows `(B·S, C)` were selected, `(B·S, c)`."""
        return None if self.is_all else largest(f, self.n_channels)

    def cotangents(self, numbers: torch.Tensor, dtype: torch.dtype) -> Cotangents:
        """Unit vectors for the outputs of these numbers `(o,)`.

        All outputs are numbered in the model's order, the largest ones position by
        position. `dtype` is the one in which outputs are compared.
        """

        def units(f: torch.Tensor) -> torch.Tensor:
            outputs = torch.arange(f.shape[0], device=f.device)
            if self.is_all:
                chosen = numbers
            else:
                at = self.positions.rows(f.to(dtype).unsqueeze(0))  # (S, C)
                of = self.positions.rows(outputs.unsqueeze(0))
                among = of.gather(1, largest(at, self.n_channels)).flatten()
                chosen = among[numbers]
            # One-hot vectors, without a look at the values: f may be one of many.
            return (chosen.unsqueeze(1) == outputs).to(f.dtype)

        return units
