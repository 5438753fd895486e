"""Sampled gradients as they come, and what is known of their span."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laplace_ella.posterior.basis import NystromBasis, RowSketch
from laplace_ella.support.span import Sketch, Span

__all__ = ["Gathered"]


@dataclass(frozen=True)
class Gathered:
    """What is kept of the sampled gradients until all of them are there.

    Attributes
    ----------
    rows : RowSketch
        the gradients, or a summary of them
    sketch : Sketch, optional
        groups of parameters by whose sums their span is known
    groups : RowSketch, optional
        the gradients in these groups, all of them
    """

    rows: RowSketch
    sketch: Sketch | None = None
    groups: RowSketch | None = None

    @classmethod
    def with_span(cls, rows: RowSketch, sketch: Sketch, n_samples: int) -> Gathered:
        """Room for the groups of M gradients as well."""
        return cls(rows, sketch, rows.empty((sketch.size,), n_samples))

    def add(self, rows: torch.Tensor) -> None:
        """Take in gradients `(m, P)`."""
        self.rows.add(rows)
        if self.sketch is not None and self.groups is not None:
            self.groups.add(self.sketch(rows))

    def span(self, basis: NystromBasis) -> Span | None:
        """The span of all gradients, whose basis is known; None where it was not
        kept. Uses up the groups."""
        if self.sketch is None or self.groups is None:
            return None
        assert basis.tail is not None  # all rows were kept
        eigenvalues = torch.cat([basis.eigenvalues, basis.tail])
        return Span.of(self.groups.basis(None).directions, self.sketch, eigenvalues)
