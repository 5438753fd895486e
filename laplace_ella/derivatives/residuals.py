"""What lies outside the basis, from rows of Jacobians that may be too many at once.

Index legend: B batch, S positions, C outputs at each and c of them selected, O = S·C,
P parameters, K rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from laplace_ella.derivatives.selection import Selection
from laplace_ella.support.batches import chunks
from laplace_ella.support.metric import accurate_product

__all__ = ["residual_parts"]

#: Outputs (B, O) and rows (B, o, P) of the Jacobians, for numbers (o,) of outputs.
RowsOf = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: Gradients (..., P) to their features (..., K) and parts of what is left of them.
Split = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def residual_parts(
    rows_of: RowsOf, split: Split, selection: Selection, at_once: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Outputs (r, C), features (r, c, K) and residuals (r, c, c), one for each part
    that is left, some positions at a time.

    Parameters
    ----------
    rows_of : callable
        differentiates the B examples; one example only, unless all its rows fit
    split : callable
        see `split_gradients` and `Span`
    at_once : int
        rows of one example that may be in memory
    """
    positions = selection.positions
    S, c = positions.n_positions, selection.n_channels
    order = selection.order(torch.device("cpu"))  # (S, c)
    if at_once >= S * c:
        f, J = rows_of(order.flatten())
        J = J.unflatten(1, (S, c)).flatten(0, 1)  # (B·S, c, P)
        yield positions.rows(f), *_square(*split(J))
    elif at_once >= c:
        for part in chunks(S, at_once // c):
            f, J = rows_of(order[part].flatten())
            J = J.unflatten(1, (-1, c)).squeeze(0)  # (s, c, P)
            yield positions.rows(f)[part], *_square(*split(J))
    else:
        for s in range(S):
            blocks = order[s].split(max(1, at_once // 2))
            f, phi, *residuals = _residuals_in_tiles(rows_of, split, blocks)
            yield positions.rows(f)[s : s + 1], phi, *residuals


def _square(phi: torch.Tensor, *rests: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Features as they are, and the products (r, C, C) of the rests (r, C, ...)."""
    return phi, *(accurate_product(rest, rest) for rest in rests)


def _residuals_in_tiles(
    rows_of: RowsOf, split: Split, blocks: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Outputs (1, O), features (1, C, K) and residuals (1, C, C) of one position, whose
    outputs come in blocks: no more than two blocks of rows are in memory."""
    phis: list[torch.Tensor] = []
    tiles: dict[tuple[int, int], list[torch.Tensor]] = {}
    f = None
    for i, block in enumerate(blocks):
        f, J = rows_of(block)
        phi, *lefts = split(J)
        phis.append(phi)
        tiles[i, i] = [accurate_product(left, left) for left in lefts]
        del J
        for j in range(i):
            rights = split(rows_of(blocks[j])[1])[1:]
            tiles[i, j] = [
                accurate_product(left, right)
                for left, right in zip(lefts, rights, strict=True)
            ]
            tiles[j, i] = [tile.mT for tile in tiles[i, j]]
            del rights
    assert f is not None  # there is at least one output
    n = range(len(blocks))
    residuals = [
        torch.cat([torch.cat([tiles[i, j][part] for j in n], -1) for i in n], -2)
        for part in range(len(tiles[0, 0]))
    ]
    return f, torch.cat(phis, dim=1), *residuals
