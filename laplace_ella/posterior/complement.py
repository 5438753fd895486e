"""The complement, the directions outside the basis: its kinds and its precisions.

A gradient has parts in the basis; outside it, but in the span of the sampled gradients,
one part for each decade of their eigenvalues; and outside of both. Dropping all but the
first is far too narrow, the prior for all others far too wide, as if the data had said
nothing there. Matched precisions give each part the variance that exact linearised
Laplace has on average:

- in each decade α = Σλ / Σ λ/(fλ + δ) over its eigenvalues λ beyond the basis, which
  leaves the effective number of parameters as it is;
- outside this span the prior δ, if all rows were sampled. If not, the other rows touch
  some of it: as much as gradients of the data usually have there gets the precision β
  for which new inputs like the data have their variance df/(f(N − df)) on average, and
  only what exceeds that the prior's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from laplace_ella.posterior.span import Span
from laplace_ella.posterior.spectrum import Spectrum

UNKNOWN_SPAN = (
    "complement='matched' needs the spectrum and the span of the sampled gradients, "
    "which this fit does not have. They are kept by a fit with complement='matched' of "
    "regression with the GGN, one sigma_noise and a number of directions, if "
    "memory_budget holds all sampled gradients. Fit again, or use 'prior'."
)


class Complement(str, Enum):
    """Variance of the directions of parameter space outside the basis.

    Examples
    --------
    >>> import torch
    >>> import laplace_ella
    >>> la = laplace_ella.ELLALaplace(
    ...     torch.nn.Linear(2, 3), "classification", complement="prior"
    ... )
    >>> la.complement
    <Complement.PRIOR: 'prior'>
    >>> la.complement = 12.5  # one precision for all of them
    """

    DROP = "drop"
    """No variance, as in the paper. Predictions need the features only."""

    PRIOR = "prior"
    """The prior's variance: Σ = (D + VHVᵀ/(σ²T))⁻¹. Equals exact linearised Laplace
    if V spans the training gradients. Predictions also need the part of J(x) outside
    the basis: C backward passes per example."""

    MATCHED = "matched"
    """The variance that exact linearised Laplace has there on average, estimated from
    the spectrum of the sampled gradients, and the prior's outside their span. For
    regression with one prior precision and one noise."""


class EvidenceScope(str, Enum):
    """Directions included in the marginal likelihood.

    Examples
    --------
    >>> import torch
    >>> import laplace_ella
    >>> la = laplace_ella.ELLALaplace(torch.nn.Linear(2, 1), "regression")
    >>> la.evidence
    <EvidenceScope.WHOLE: 'whole'>
    >>> la.evidence = "basis"
    """

    WHOLE = "whole"
    """All directions, those outside the basis by the spectrum of the sampled gradients.
    For regression with one prior precision and one noise; otherwise the same as
    'basis'."""

    BASIS = "basis"
    """The directions in the basis: the evidence of the paper's posterior."""


@dataclass(frozen=True)
class Precisions:
    """Matched precisions of the parts of a gradient outside the basis.

    They are α `within` each decade of the span; outside it the `usual` β up to a
    squared norm of `largest`, and the `prior` δ for what exceeds it; and a `single` one
    for all parts, where they cannot be told apart.
    """

    within: torch.Tensor
    usual: torch.Tensor
    prior: torch.Tensor
    single: torch.Tensor
    largest: float

    @classmethod
    def matched(
        cls,
        spectrum: Spectrum,
        span: Span,
        factor: torch.Tensor,
        prior: torch.Tensor,
        rank: int,
        freedom_within: torch.Tensor,
        trace_within: torch.Tensor,
    ) -> Precisions:
        """Return them for f = 1/(σ²T) and δ, both scalars, and a basis of `rank`
        directions with so many effective parameters and this trace of H."""
        f, delta = factor.double().reshape(()), prior.double().reshape(())
        n = max(spectrum.n_rows, 1)  # without data nothing is known: the prior holds

        def ratio(a: Any, b: torch.Tensor, times: int = 1) -> torch.Tensor:
            """Return a/b from δ to δ + fa·times; the latter where b is not positive."""
            most = delta + f * times * a
            found = torch.where(b > 0, a / b.clamp_min(1e-300), most)
            return torch.minimum(torch.maximum(found, delta), most)

        # In each decade by the eigenvalues beyond the basis. Where it has none, what
        # seems to lie there is known as well as the basis is.
        values = spectrum.scaled[: sum(span.sizes)]
        freedoms = values / (f * values + delta)
        within, start = [], 0
        for size in span.sizes:
            known = slice(max(start, min(rank, start + size - 1)), start + size)
            total = values[known].sum()
            within.append(ratio(total, freedoms[known].sum()))
            start += size
        # New inputs like the data: their variance, less what is in basis and span.
        freedom = spectrum.degrees_of_freedom(delta / f)
        variance = freedom / (f * (n - freedom).clamp_min(1e-9 * n))
        variance = variance - freedom_within / (f * n)
        norm = (spectrum.trace - trace_within).clamp_min(0) / n
        single = ratio(norm, variance, spectrum.n_rows)
        known = torch.stack(within)
        if span.usual is None:
            return cls(known, delta, delta, single, span.largest)
        variance = variance - freedoms[rank:].sum() / n
        usual = ratio(span.usual, variance, spectrum.n_rows)
        # Directions that the sample knows are known no less than others.
        known = torch.maximum(known, usual)
        return cls(known, usual, delta, single, span.largest)

    def covariance(self, residual: torch.Tensor) -> torch.Tensor:
        """Return the covariance from products `(..., n, c, c)` of the gradients' parts
        outside the basis."""
        decades, outside = residual[..., :-1, :, :], residual[..., -1, :, :]
        known = (decades / self.within.to(decades)[:, None, None]).sum(-3)
        norms = outside.diagonal(dim1=-2, dim2=-1)
        usual = norms.clamp_max(self.largest) / self.usual.to(norms)
        beyond = (norms - self.largest).clamp_min(0) / self.prior.to(norms)
        # Each gradient's part is scaled, so that the sum is positive semi-definite.
        gain = (usual + beyond) / norms.clamp_min(torch.finfo(norms.dtype).tiny)
        root = gain.clamp_min(0).sqrt()
        return known + root.unsqueeze(-1) * outside * root.unsqueeze(-2)
