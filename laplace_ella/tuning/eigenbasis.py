"""One fit under many priors and temperatures, in its curvature's eigenbasis.

G = f·H + δI has the eigenvectors of H = UΛUᵀ, whatever f and δ are. With features
turned to φU once, a candidate costs K products per output where φG^{-1/2} costs K²,
and its evidence K operations where a factorisation takes K³. For layerwise priors the
root UΛ^{1/2} saves two of three factorisations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from laplace_ella.posterior import algebra
from laplace_ella.posterior.outside import Complement, Precisions, Tail
from laplace_ella.posterior.predictive import FunctionValues
from laplace_ella.posterior.subspace import SubspacePosterior, fixed_precisions
from laplace_ella.tuning.cache import FeatureCache

__all__ = ["EigenPosterior", "LayerPosterior", "by_layers", "turn", "with_eigenvalues"]


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
    complement : Complement or float
    tail : Tail, optional
    whole : bool
        as of `SubspacePosterior`
    """

    eigenvalues: torch.Tensor
    factor: torch.Tensor
    prior: torch.Tensor
    complement: Complement | float = Complement.DROP
    tail: Tail | None = None
    whole: bool = False

    @property
    def rank(self) -> int:
        return len(self.eigenvalues)

    def with_(self, **changes: Any) -> EigenPosterior:
        """The same posterior with another prior or factor."""
        return replace(self, **changes)

    @property
    def log_det_ratio(self) -> torch.Tensor:
        """log det(f·H + δI) − K log δ, and what the tail adds to it."""
        ratio = self.factor.double() / self.prior.double()
        within = torch.log1p(ratio * self.eigenvalues).sum()
        if self.tail is None or not self.whole:
            return within
        return within + self.tail.log_det(self.rank, self.factor, self.prior)

    @property
    def outside(self) -> Precisions:
        """Precisions outside the basis."""
        if self.complement is not Complement.MATCHED or self.tail is None:
            return fixed_precisions(self.complement, self.prior)
        curvature = self.factor.double() * self.eigenvalues
        freedom = (curvature / (curvature + self.prior.double())).sum()
        return self.tail.precisions(
            self.rank, self.factor, self.prior, freedom, self.eigenvalues.sum()
        )

    def function_values(
        self,
        f_mu: torch.Tensor,
        phi: torch.Tensor,
        residual: torch.Tensor | None = None,
        unseen: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
    ) -> FunctionValues:
        """Gaussian over f(x) from outputs, turned features and their residuals; what
        is unseen of them at all levels."""
        precision = self.factor.double() * self.eigenvalues + self.prior.double()
        factor = phi * precision.rsqrt().to(phi)
        if self.complement is Complement.DROP or residual is None:
            return FunctionValues.of_outputs(f_mu, factor, None, outputs)
        if unseen is not None and self.tail is not None:
            level = self.tail.level(self.rank, self.factor, self.prior)
            unseen = unseen[:, level]
        outside = self.outside.covariance(residual, unseen)
        return FunctionValues.of_outputs(f_mu, factor, outside, outputs)


@dataclass(frozen=True)
class LayerPosterior:
    """The evidence of a posterior with a layerwise prior and the complement kept.

    log det(I + f·RHRᵀ) with RᵀR = Σ_l V_lᵀV_l/δ_l equals log det(I + f·Σ_l A_l/δ_l)
    with A_l = BᵀV_lᵀV_lB and H = BBᵀ.

    Attributes
    ----------
    layers : torch.Tensor
        A_l `(L, K, K)`, float64
    factor : torch.Tensor
        f = 1/(σ²T), a scalar
    prior : torch.Tensor
        δ_l `(L,)`
    """

    layers: torch.Tensor
    factor: torch.Tensor
    prior: torch.Tensor

    def with_(self, **changes: Any) -> LayerPosterior:
        """The same posterior with another prior or factor."""
        return replace(self, **changes)

    @property
    def log_det_ratio(self) -> torch.Tensor:
        """log det of the posterior precision less that of the prior precision."""
        weights = self.factor.double() / self.prior.double()
        T = torch.einsum("l,lij->ij", weights, self.layers)
        eye = torch.eye(len(T), dtype=T.dtype, device=T.device)
        return algebra.log_det(eye + T)


def by_layers(posterior: SubspacePosterior) -> LayerPosterior:
    """The evidence of a posterior with a layerwise prior and the complement kept."""
    eigenvalues, U = torch.linalg.eigh(posterior.H.double())
    root = U * eigenvalues.clamp_min(0).sqrt()
    grams = posterior.basis.layer_grams.to(root)
    return LayerPosterior(root.mT @ grams @ root, posterior.factor, posterior.prior)


def with_eigenvalues(
    posterior: SubspacePosterior, eigenvalues: torch.Tensor | None = None
) -> EigenPosterior:
    """A posterior with a scalar prior by the eigenvalues of its curvature.

    Without their eigenvectors, which features need and the evidence does not, they
    take a third of the time.
    """
    H = posterior.H.double()
    values = torch.linalg.eigvalsh(H) if eigenvalues is None else eigenvalues
    return EigenPosterior(
        values.clamp_min(0),
        posterior.factor,
        posterior.prior,
        posterior.complement,
        posterior.tail,
        posterior.whole,
    )


def turn(
    posterior: SubspacePosterior, cache: FeatureCache
) -> tuple[EigenPosterior, FeatureCache]:
    """Posterior and features in the eigenbasis; the prior must be scalar.

    The features are copied.
    """
    eigenvalues, U = torch.linalg.eigh(posterior.H.double())
    turned = with_eigenvalues(posterior, eigenvalues)
    cache = cache.serving(posterior)
    # The turned features are no longer those of the basis: no spectrum.
    return turned, replace(cache, phi=cache.phi @ U.to(cache.phi), spectrum=None)
