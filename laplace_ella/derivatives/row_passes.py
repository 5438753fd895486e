"""Gradients of single combinations of outputs, pass by pass.

Index legend: B batch, O outputs of one example, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from laplace_ella.derivatives.folding import FoldedFunction
from laplace_ella.derivatives.libraries import LIBRARIES, check_rows, rows_by_backend
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.rows import (
    RowMode,
    empty_rows,
    rows_by_loop,
    rows_by_vmap,
)
from laplace_ella.derivatives.sizes import PassSizes
from laplace_ella.derivatives.trials import FEWEST_EXAMPLES, Trial, attempt, winner
from laplace_ella.support.batches import Batch, chunks
from laplace_ella.support.heap import watched_passes
from laplace_ella.support.preserve import differentiable_kernels

__all__ = ["Room", "RowPasses", "agrees", "no_room", "vmap_or_loop"]

#: Numbers of activations per parameter at which it pays to fold: what is saved on the
#: activations, against gradients that are brought back to the model's own parameters.
#: Faster by a tenth on ResNet-20 (2.5), by a quarter with 16 channels throughout (24),
#: level with 64 channels of 8×8 (0.4), slower by a seventh on ResNet-18 (0.1). One
#: backward pass after the other is never faster.
WORTH_FOLDING = 0.5

#: Memory `(n, P)` for the next n rows; None where the receiver has none.
Room = Callable[[int], torch.Tensor | None]


def no_room(n: int) -> None:
    """The rows get memory of their own."""


@dataclass(frozen=True)
class RowPasses:
    """How rows of the Jacobian are computed for one kind of inputs.

    Attributes
    ----------
    fn : ModelFunction
    folded : FoldedFunction, optional
        the same in other parameters, where that may be cheaper
    sizes : PassSizes
    asked : RowMode
        what the user wants
    """

    fn: ModelFunction
    folded: FoldedFunction | None
    sizes: PassSizes
    asked: RowMode

    def folds(self, mode: RowMode) -> bool:
        """Whether normalisations are folded."""
        sizes = self.sizes
        activations = sizes.activations.total / sizes.itemsize
        pays = activations >= WORTH_FOLDING * sizes.n_params
        return self.folded is not None and mode is RowMode.VMAP and pays

    def run(
        self,
        mode: RowMode,
        batch: Batch,
        examples: torch.Tensor,
        cotangents: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """cᵀJ(x) for `cotangents[m]` (O,) at example `examples[m]`, into `out` (m, P),
        which is returned."""
        ways = {RowMode.VMAP: rows_by_vmap, RowMode.LOOP: rows_by_loop}
        way = ways[mode] if mode in ways else partial(rows_by_backend, LIBRARIES[mode])
        fn = self.folded if self.folded is not None and self.folds(mode) else self.fn
        with differentiable_kernels():
            return way(fn, batch, examples, cotangents, out)

    def chunks(
        self,
        mode: RowMode,
        batch: Batch,
        examples: torch.Tensor,
        cotangents: torch.Tensor,
        at_once: int,
        room: Room,
    ) -> Iterator[torch.Tensor]:
        """The same, some rows at a time. Those for which there is no room are there
        only until the next ones are asked for."""
        own = None
        parts = chunks(len(examples), at_once)
        for part in watched_passes(parts, self.sizes.row_heap(len(examples))):
            n = part.stop - part.start
            out = room(n)
            if out is None:
                if own is None:
                    own = empty_rows(self.fn, min(at_once, len(examples)))
                out = own[:n]
            yield self.run(mode, batch, examples[part], cotangents[part], out)

    def fastest(
        self, batch: Batch, examples: torch.Tensor, cotangents: torch.Tensor, n: int
    ) -> RowMode:
        """The fastest way that works on n rows; a library that was asked for is not
        timed but checked."""
        if self.asked in LIBRARIES:
            with differentiable_kernels():
                library, n_outputs = LIBRARIES[self.asked], cotangents.shape[-1]
                check_rows(library, self.fn, batch, examples, n_outputs)
            return self.asked

        def trial(mode: RowMode, n: int) -> Trial:
            index = torch.arange(n, device=examples.device) % len(examples)
            out = empty_rows(self.fn, n)

            def rows(m: int) -> torch.Tensor:
                few = index[:m]
                return self.run(mode, batch, examples[few], cotangents[few], out[:m])

            return attempt(rows, n, self.fn.has_values)

        return vmap_or_loop(
            self.asked, trial, min(n, max(len(examples), FEWEST_EXAMPLES))
        )

    def agree(self, mode: RowMode, batch: Batch, n_outputs: int) -> bool:
        """Whether one example's gradient of all outputs together is the same without
        folding."""
        device = self.fn.device
        first = torch.zeros(1, dtype=torch.long, device=device)
        slope = torch.linspace(1, 2, n_outputs, device=device).unsqueeze(0)

        def row(passes: RowPasses) -> tuple[torch.Tensor]:
            out = empty_rows(passes.fn, 1)
            return (passes.run(mode, batch, first, slope, out),)

        return agrees(self, row, lambda passes: row(replace(passes, folded=None)))


def vmap_or_loop(
    asked: RowMode, trial: Callable[[RowMode, int], Trial], n: int
) -> RowMode:
    """The faster of both on n examples, of which a loop needs to see but a few."""
    if asked in (RowMode.VMAP, RowMode.LOOP):  # tried, but not timed
        return winner({asked: trial(asked, 1)})
    return winner(
        {
            RowMode.VMAP: trial(RowMode.VMAP, n),
            RowMode.LOOP: trial(RowMode.LOOP, min(n, 2)).handicapped(),
        }
    )


def agrees(
    passes: Any,
    folded: Callable[[Any], tuple[torch.Tensor, ...]],
    plain: Callable[[Any], tuple[torch.Tensor, ...]],
) -> bool:
    """Whether both give the same numbers, up to rounding, of passes (of rows or of
    features) through a model that may be folded.

    Rounding decides about a unit that lies on the kink of its activation, and two plain
    ways may differ by it, too. In double precision it does not.
    """
    if _agrees(passes, folded, plain):
        return True
    if passes.fn.dtype is torch.float64:
        return False
    double = passes.folded.in_dtype(torch.float64)
    precise = replace(passes, fn=double.unfolded, folded=double)
    return _agrees(precise, folded, plain)


def _agrees(
    passes: Any,
    folded: Callable[[Any], tuple[torch.Tensor, ...]],
    plain: Callable[[Any], tuple[torch.Tensor, ...]],
) -> bool:
    with torch.no_grad():
        try:
            ours, theirs = folded(passes), plain(passes)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # only one of them works: then it is not the same
            return False
    if not passes.fn.has_values:
        return True
    tolerance = torch.finfo(passes.fn.dtype).eps ** 0.5
    return all(
        float((a - b).abs().max()) <= tolerance * float(b.abs().max())
        for a, b in zip(ours, theirs, strict=True)
    )
