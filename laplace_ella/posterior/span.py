"""The span of the sampled gradients, outside of which the data say next to nothing.

Projecting on all M sampled gradients takes all of them, M·P numbers. The squared norm
of what is left needs fewer: sums of the parameters in p ≈ 3M groups, with random signs,
keep the geometry of a subspace of M dimensions nearly as it is, and what is left of a
gradient outside that subspace by the known factor (p − r)/p for r dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from laplace_ella.posterior.basis import NystromBasis, RowBuffer, nystrom_basis
from laplace_ella.support.batches import chunks, has_values
from laplace_ella.support.preserve import full_precision

#: Up to so many parameters per row all are kept, beyond them this many groups per row:
#: fewer scatter more, groups of two or three parameters are biased. Measured norms: 5
#: to 15 % too large on most networks, 30 % too small on one, scattered by 5 to 10 %.
ALL_PER_ROW, GROUPS_PER_ROW = 4, 3

#: Share of the data's gradients that have no more outside the span than `largest`.
MOST = 0.99


@dataclass(frozen=True)
class Sketch:
    """Sums of the parameters in p groups, with signs ±1 `(P,)`, int8; or all p = P
    parameters as they are."""

    signs: torch.Tensor | None
    size: int

    @classmethod
    def of(cls, n_params: int, n_rows: int, seed: int, device: torch.device) -> Sketch:
        """Return the sketch for the span of so many rows, equal for equal seeds."""
        size = cls.size_for(n_params, n_rows)
        if size == n_params:
            return cls(None, n_params)
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(0, 2, (n_params,), generator=generator, dtype=torch.int8)
        return cls((2 * bits - 1).to(device), size)

    @staticmethod
    def size_for(n_params: int, n_rows: int) -> int:
        """Return p for the span of so many rows."""
        few = n_params <= ALL_PER_ROW * n_rows
        return n_params if few else GROUPS_PER_ROW * n_rows

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum rows `(..., P)` to `(..., p)`: parameter j belongs to group j mod p."""
        if self.signs is None:
            return rows
        signs = self.signs.to(rows)
        sums = rows.new_zeros(*rows.shape[:-1], self.size)
        for group in chunks(rows.shape[-1], self.size):
            width = group.stop - group.start
            sums[..., :width] += rows[..., group] * signs[group]
        return sums


def decades(eigenvalues: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return by how many powers of ten eigenvalues `(r,)` are below the largest one."""
    return (largest / eigenvalues.clamp_min(1e-300)).log10().floor().long()


@dataclass(frozen=True)
class Span:
    """The directions of the sampled gradients, by decade of their eigenvalue.

    Within a decade the data know all directions alike, and one precision for them is
    next to exact for every prior and noise.

    Attributes
    ----------
    directions : torch.Tensor
        of the sketched gradients `(r, p)`, orthonormal rows, by descending eigenvalue
    sizes : tuple of int
        how many of them belong to each decade
    usual, largest : float
        squared norm outside of gradients of the data that were not sampled: its mean,
        None if all were, and what hardly any of them exceeds
    """

    directions: torch.Tensor
    sketch: Sketch
    sizes: tuple[int, ...]
    usual: float | None = None
    largest: float = 0.0

    def parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return vectors with the products that the parts of gradients `(..., P)` have:
        of each decade, and outside the span."""
        inside, outside = self._split(self.sketch(rows))
        if self.sketch.signs is not None:
            # The sketch takes some of what is outside for inside.
            norms = rows.square().sum(-1) - outside.square().sum(-1)
            tiny = torch.finfo(rows.dtype).tiny
            gain = norms.clamp_min(tiny) / inside.square().sum(-1).clamp_min(tiny)
            inside = inside * gain.sqrt().unsqueeze(-1)
        return *inside.split(self.sizes, -1), outside

    def _split(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is inside `(..., r)` and outside `(..., p)` of sketched
        gradients, the latter as long as it was."""
        directions, size = self.directions.to(sums), self.sketch.size
        with full_precision(sums.device):
            inside = sums @ directions.mT
            outside = sums - inside @ directions
        kept = 1.0 if self.sketch.signs is None else (size - len(directions)) / size
        return inside, outside / kept**0.5

    def compared_with(self, others: torch.Tensor) -> Span:
        """Return the same, knowing other gradients of the data by their sketches
        `(n, p)`."""
        if not has_values(others):
            return self
        norms = self._split(others)[1].double().square().sum(-1)
        usual, largest = float(norms.mean()), float(norms.quantile(MOST))
        return replace(self, usual=usual, largest=largest)


def sampled_span(groups: torch.Tensor, sketch: Sketch, basis: NystromBasis) -> Span:
    """Return the span of the rows that a basis was made from, all of them, by their
    sums in groups `(M, p)`."""
    buffer = RowBuffer(
        (groups.shape[1],), len(groups) + 1, 0, groups.dtype, groups.device
    )
    buffer.append(groups)
    directions, sizes = nystrom_basis(buffer, None).directions, None
    if has_values(directions):
        eigenvalues = basis.all_eigenvalues[: len(directions)]
        sizes = decades(eigenvalues, eigenvalues[0]).bincount().tolist()
    return Span(directions, sketch, tuple(sizes or [len(directions)]))
