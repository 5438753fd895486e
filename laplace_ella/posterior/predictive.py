"""Predictive distributions of B inputs from a low-rank Gaussian over functions.

f_var = AAᵀ (+ a residual where the complement of the subspace is kept). Every link
needs row norms, row sums or samples of it: the C×C matrix is formed where the caller
asks for it, and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from laplace_ella.posterior.likelihood import Family
from laplace_ella.support.batches import chunks
from laplace_ella.support.checks import member
from laplace_ella.support.links import Link

__all__ = [
    "FunctionValues",
    "bridge",
    "centered_probit",
    "class_probabilities",
    "draw",
    "probit",
]

#: Floats that one chunk of Monte-Carlo samples may hold.
SAMPLE_BUDGET = 2**24


@dataclass(frozen=True)
class FunctionValues:
    """Gaussian over the function values at B inputs.

    Attributes
    ----------
    mean : torch.Tensor
        `(B, C)`
    factor : torch.Tensor
        A `(B, C, K)`
    residual : torch.Tensor, optional
        `(B, C, C)`, positive semi-definite; the covariance is AAᵀ + residual
    """

    mean: torch.Tensor
    factor: torch.Tensor
    residual: torch.Tensor | None = None

    @classmethod
    def of_outputs(
        cls,
        mean: torch.Tensor,
        factor: torch.Tensor,
        residual: torch.Tensor | None,
        outputs: torch.Tensor | None,
    ) -> FunctionValues:
        """Where factor `(B, c, K)` and residual `(B, c, c)` are of c `outputs` `(B, c)`
        only, the others vary not at all."""
        if outputs is None:
            return cls(mean, factor, residual)
        # Narrow first, then wide: C×K numbers of many classes would cost more than
        # the roots of small matrices. Those have no safe gradient.
        if not factor.requires_grad:
            factor, residual = cls(mean, factor, residual).root(), None
        wide = factor.new_zeros(*mean.shape, factor.shape[-1])
        wide = wide.scatter(1, outputs.unsqueeze(-1).expand_as(factor), factor)
        if residual is None:
            return cls(mean, wide)
        C = mean.shape[-1]
        columns = residual.new_zeros(*residual.shape[:-1], C)
        columns = columns.scatter(2, outputs.unsqueeze(1).expand_as(residual), residual)
        square = residual.new_zeros(len(mean), C, C)
        rows = outputs.unsqueeze(-1).expand_as(columns)
        return cls(mean, wide, square.scatter(1, rows, columns))

    def variance(self) -> torch.Tensor:
        """Marginal variances `(B, C)`."""
        variance = self.factor.square().sum(-1)
        if self.residual is not None:
            variance = variance + self.residual.diagonal(dim1=-2, dim2=-1)
        return variance

    def covariance(self) -> torch.Tensor:
        """f_var `(B, C, C)`."""
        covariance = self.factor @ self.factor.mT
        return covariance if self.residual is None else covariance + self.residual

    def row_sums(self) -> torch.Tensor:
        """f_var · 1 `(B, C)`, as A(Aᵀ1)."""
        sums = (self.factor @ self.factor.sum(1).unsqueeze(-1)).squeeze(-1)
        return sums if self.residual is None else sums + self.residual.sum(-1)

    def divided_by(self, scale: float) -> FunctionValues:
        """The Gaussian of f/scale; by 1 the very same numbers."""
        if scale == 1:
            return self
        residual = None if self.residual is None else self.residual / scale**2
        return FunctionValues(self.mean / scale, self.factor / scale, residual)

    def centered(self) -> FunctionValues:
        """The Gaussian of f − mean_c f, which has the same softmax.

        The factor is centred, not the covariance: nothing cancels where the common
        shift has nearly all of the variance, and no C×C matrix is formed.
        """
        mean = self.mean - self.mean.mean(-1, keepdim=True)
        factor = self.factor - self.factor.mean(-2, keepdim=True)
        residual = self.residual
        if residual is not None:
            residual = residual - residual.mean(-1, keepdim=True)
            residual = residual - residual.mean(-2, keepdim=True)
        return FunctionValues(mean, factor, residual)

    def root(self) -> torch.Tensor:
        """R `(B, C, min(K, C))` with RRᵀ = f_var.

        Samples need as much noise as the root has columns: of the low-rank factor and
        the root of the C×C covariance the narrower one is taken.
        """
        if self.residual is None and self.factor.shape[-1] <= self.factor.shape[-2]:
            return self.factor
        return psd_root(self.covariance())


def psd_root(matrix: torch.Tensor) -> torch.Tensor:
    """The symmetric root of positive semi-definite matrices that may be singular.

    It is continuous in the matrix, so that the same noise gives samples that vary
    smoothly with prior and temperature; eigenvectors alone change sign and order.
    """
    eigenvalues, Q = torch.linalg.eigh(matrix.double())
    root = eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
    return ((Q * root) @ Q.mT).to(matrix.dtype)


def draw(
    f: FunctionValues,
    n_samples: int,
    generator: torch.Generator | None,
    diagonal_output: bool = False,
) -> torch.Tensor:
    """Samples `(S, B, C)`, independent between inputs.

    `diagonal_output` samples the outputs independently, by their marginal variances.
    """
    B, C = f.mean.shape

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(
            *shape, generator=generator, dtype=f.mean.dtype, device=f.mean.device
        )

    if diagonal_output:
        return f.mean + f.variance().sqrt() * noise(n_samples, B, C)
    root = f.root()
    # (B, C, R) @ (B, R, S) → (B, C, S): one batched product for all samples
    return f.mean + (root @ noise(B, root.shape[-1], n_samples)).permute(2, 0, 1)


def probit(f: FunctionValues, family: Family = Family.CATEGORICAL) -> torch.Tensor:
    """Probit approximation: logits scaled by 1/√(1 + π/8·var) before the link."""
    return _moderated(f.mean, f.variance(), family)


def _moderated(
    mean: torch.Tensor, variance: torch.Tensor, family: Family = Family.CATEGORICAL
) -> torch.Tensor:
    kappa = torch.rsqrt(1 + math.pi / 8 * variance)
    return family.probabilities(kappa * mean)


def centered_probit(f: FunctionValues, diagonal_output: bool = False) -> torch.Tensor:
    """Probit of f − mean_c f: a common shift of the logits is no uncertainty.

    The variance of a logit is that of its distance from the mean of the others,
    (f_c − mean f)·C/(C − 1): of two classes the variance of f₁ − f₂, with which
    MacKay's approximation of the sigmoid is met. `diagonal_output` takes the logits
    for independent, by their marginal variances.
    """
    centered = f.centered()
    variance = centered.variance()
    C = f.mean.shape[-1]
    if diagonal_output:
        marginal = f.variance()
        variance = marginal * (1 - 2 / C) + marginal.sum(-1, keepdim=True) / C**2
    others = max(C - 1, 1)
    return _moderated(centered.mean, variance * (C / others) ** 2)


def bridge(f: FunctionValues, normalize: bool) -> torch.Tensor:
    """Laplace bridge to a Dirichlet; `normalize` corrects the variance first."""
    C = f.mean.shape[-1]
    tiny = torch.finfo(f.mean.dtype).tiny
    # Condition on Σ_c f_c = 0, from row sums of f_var alone.
    rows = f.row_sums()  # (B, C)
    total = rows.sum(-1, keepdim=True).clamp_min(tiny)
    mean = f.mean - rows * f.mean.sum(-1, keepdim=True) / total
    var = (f.variance() - rows.square() / total).clamp_min(tiny)
    if normalize:
        c = var.mean(-1, keepdim=True) / math.sqrt(C / 2)
        mean, var = mean / c.sqrt(), var / c
    # α = (1 − 2/C + e^f Σ_j e^{-f_j} / C²) / var, in logarithms: e^f may overflow
    log_ratio = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(C)
    offset = torch.full_like(log_ratio, max(1 - 2 / C, 0.0)).log()
    return torch.softmax(torch.logaddexp(offset, log_ratio) - var.log(), dim=-1)


def class_probabilities(
    f: FunctionValues,
    link_approx: Link | str,
    n_samples: int = 100,
    diagonal_output: bool = False,
    generator: torch.Generator | None = None,
    family: Family = Family.CATEGORICAL,
) -> torch.Tensor:
    """Probabilities (B, C) of classes or labels by one of the links."""
    link = member(Link, "link_approx", link_approx)
    if link is Link.PROBIT:
        return probit(f, family)
    if link is Link.PROBIT_CENTERED:
        return centered_probit(f, diagonal_output)
    if link in (Link.BRIDGE, Link.BRIDGE_NORM):
        return bridge(f, normalize=link is Link.BRIDGE_NORM)
    if not diagonal_output:  # the root is taken once for all chunks
        f = FunctionValues(f.mean, f.root())
    total = torch.zeros_like(f.mean)
    per_sample = f.mean.shape[0] * max(f.factor.shape[1:])
    for part in chunks(n_samples, SAMPLE_BUDGET // max(1, per_sample)):
        samples = draw(f, part.stop - part.start, generator, diagonal_output)
        total = total + family.probabilities(samples).sum(0)
    return total / n_samples
