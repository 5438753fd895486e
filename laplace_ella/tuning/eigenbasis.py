"""One fit under many scalar priors and temperatures, in its curvature's eigenbasis.

G = f·H + δI has the eigenvectors of H = UΛUᵀ, whatever f and δ are. With features
turned to φU once, a candidate costs K products an output where φG^{-1/2} costs K², and
what the complement adds, (k − φφᵀ)/δ, is there once up to the factor 1/δ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from laplace_ella.posterior.predictive import FunctionValues
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.tuning.cache import FeatureCache

__all__ = ["EigenPosterior", "turn"]


@dataclass(frozen=True)
class EigenPosterior:
    """A posterior with a scalar prior, for features that `turn` has turned.

    Attributes
    ----------
    eigenvalues : torch.Tensor
        Λ `(K,)`, float64
    factor : torch.Tensor
        f = 1/(σ²T), a scalar
    prior : torch.Tensor
        δ `(1,)`
    needs_kernel : bool
        whether the complement is kept at the prior
    """

    eigenvalues: torch.Tensor
    factor: torch.Tensor
    prior: torch.Tensor
    needs_kernel: bool

    @property
    def rank(self) -> int:
        return len(self.eigenvalues)

    def with_(self, **changes: torch.Tensor) -> EigenPosterior:
        """The same posterior with another prior or factor."""
        return replace(self, **changes)

    def function_values(
        self, f_mu: torch.Tensor, phi: torch.Tensor, kernel: torch.Tensor | None
    ) -> FunctionValues:
        """Gaussian over f(x) from outputs, turned features and their residual."""
        precision = self.factor.double() * self.eigenvalues + self.prior.double()
        factor = phi * precision.rsqrt().to(phi)
        if not self.needs_kernel:
            return FunctionValues(f_mu, factor)
        return FunctionValues(f_mu, factor, kernel / self.prior.to(kernel))


def turn(
    posterior: SubspacePosterior, cache: FeatureCache
) -> tuple[EigenPosterior, FeatureCache]:
    """Posterior and features in the eigenbasis; the prior must be scalar.

    The features are copied. Where the complement is kept, what takes the place of the
    kernel is its part outside of the subspace.
    """
    eigenvalues, U = torch.linalg.eigh(posterior.H.double())
    turned = EigenPosterior(
        eigenvalues.clamp_min(0),
        posterior.factor,
        posterior.prior,
        posterior.needs_kernel,
    )
    cache = cache.truncate(turned.rank)
    phi = cache.phi @ U.to(cache.phi)
    kernel = None
    if posterior.needs_kernel:
        kernel = posterior.check_kernel(cache.kernel) - phi @ phi.mT
    return turned, FeatureCache(cache.f_mu, phi, cache.targets, kernel)
