"""Jacobians of examples, pass by pass: as many outputs and examples as fit.

Index legend: B batch, O outputs of one example, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.row_passes import vmap_or_loop
from laplace_ella.derivatives.rows import RowMode, jacobian_by_loop, jacobian_by_vmap
from laplace_ella.derivatives.selection import Selection
from laplace_ella.derivatives.sizes import PassSizes
from laplace_ella.derivatives.trials import FEWEST_EXAMPLES, Trial, attempt, repeated
from laplace_ella.support.batches import Batch, chunks
from laplace_ella.support.heap import watched_passes
from laplace_ella.support.preserve import differentiable_kernels

__all__ = ["JacobianPasses"]

#: Outputs of a trial, at most.
FEW_OUTPUTS = 64


@dataclass(frozen=True)
class JacobianPasses:
    """How Jacobians are computed for one kind of inputs.

    Attributes
    ----------
    fn : ModelFunction
    sizes : PassSizes
    selection : Selection
        outputs that are wanted
    asked : RowMode
        what the user wants
    """

    fn: ModelFunction
    sizes: PassSizes
    selection: Selection
    asked: RowMode

    @property
    def outputs_at_once(self) -> int:
        """Rows of one Jacobian in one pass: all, unless one example is too large."""
        return self.sizes.outputs_at_once(self.selection.size)

    def example_parts(self, batch: Batch) -> Iterator[Batch]:
        """Examples whose Jacobians are taken in one pass."""
        sizes, n_outputs = self.sizes, self.selection.size
        parts = chunks(batch.size, sizes.rows_at_once(n_outputs))
        for part in watched_passes(parts, sizes.row_heap(batch.size, n_outputs)):
            yield batch.take(part)

    def run(
        self, mode: RowMode, batch: Batch, numbers: torch.Tensor, create_graph: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, O), and the rows of J(x) (B, o, P) that belong to the selected
        outputs of these numbers (o,)."""
        fn = self.fn
        cotangents = self.selection.cotangents(numbers.to(fn.device), fn.dtype)
        with differentiable_kernels():
            if mode is RowMode.LOOP:
                return jacobian_by_loop(fn, batch, cotangents, create_graph)
            with torch.set_grad_enabled(create_graph):
                return jacobian_by_vmap(fn, batch, cotangents)

    def whole(
        self, mode: RowMode, batch: Batch, create_graph: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of examples that are taken in one pass, in as many as it takes."""
        order = torch.arange(self.selection.size, device=self.fn.device)
        blocks = [
            self.run(mode, batch, numbers, create_graph)
            for numbers in order.split(self.outputs_at_once)
        ]
        rows = [J for _, J in blocks]
        return blocks[0][0], rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def fastest(self, batch: Batch) -> RowMode:
        """The fastest way that works on as many examples as it will be."""
        few = min(FEW_OUTPUTS, self.outputs_at_once)
        numbers = torch.arange(few, device=self.fn.device)

        def trial(mode: RowMode, n: int) -> Trial:
            many = repeated(batch, n, self.fn.device)
            return attempt(
                lambda m: self.run(mode, many.take(slice(0, m)), numbers, False),
                n,
                self.fn.has_values,
            )

        at_once = self.sizes.rows_at_once(self.selection.size)
        n = min(at_once, max(batch.size, FEWEST_EXAMPLES))
        return vmap_or_loop(self.asked, trial, n)
