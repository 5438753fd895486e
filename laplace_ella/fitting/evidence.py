"""Densities of `ELLALaplace`: precisions, determinants, the evidence."""

from __future__ import annotations

import math

import torch

__all__ = ["Evidence"]


class Evidence:
    """The part of `ELLALaplace` that tells how probable weights and data are."""

    @property
    def posterior_precision(self) -> torch.Tensor:
        """G = H/(σ²T) + VᵀDV `(K, K)`, the precision of z in θ = θ̂ + Vz, float64."""
        return self._build_posterior().precision

    @property
    def posterior_scale(self) -> torch.Tensor:
        """S `(K, K)` with SSᵀ = G⁻¹, float64."""
        return self.posterior.scale

    @property
    def posterior_covariance(self) -> torch.Tensor:
        """Covariance of z = Vᵀ(θ − θ̂), `(K, K)`, float64."""
        return self.posterior.covariance

    @property
    def log_det_prior_precision(self) -> torch.Tensor:
        """log det VᵀDV; log det D where the complement is kept."""
        return self._build_posterior().log_det_prior.to(self._dtype)

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """log det G; of the whole D + VHVᵀ/(σ²T) where the complement is kept."""
        posterior = self._build_posterior()
        return (posterior.log_det_prior + posterior.log_det_ratio).to(self._dtype)

    @property
    def log_det_ratio(self) -> torch.Tensor:
        """log det of the posterior precision less that of the prior precision."""
        return self._build_posterior().log_det_ratio.to(self._dtype)

    @property
    def scatter(self) -> torch.Tensor:
        """(θ̂ − μ₀)ᵀD(θ̂ − μ₀), over all P parameters."""
        delta = (self.mean - self.prior_mean).double()
        return (delta.square() * self.prior_precision_diag).sum().to(self._dtype)

    def square_norm(self, value: torch.Tensor) -> torch.Tensor:
        """ΔᵀPΔ for Δ = value − θ̂ `(P,)` and the posterior precision P.

        With the complement dropped only the part of Δ within the subspace counts.
        """
        delta = value - self.mean
        return self._build_posterior().square_norm(delta).to(self._dtype)

    def log_prob(self, value: torch.Tensor, normalized: bool = True) -> torch.Tensor:
        """Log density at `value`: of z = Vᵀ(value − θ̂), or of all weights where the
        complement is kept."""
        log_prob = -self.square_norm(value) / 2
        if normalized:
            constant = self.posterior.dimension * math.log(2 * math.pi)
            log_prob = log_prob + (self.log_det_posterior_precision - constant) / 2
        return log_prob

    def log_marginal_likelihood(
        self,
        prior_precision: torch.Tensor | None = None,
        sigma_noise: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Evidence log p(D|θ̂) − ½ log det ratio − ½ scatter.

        Differentiable in `prior_precision` and `sigma_noise`; passing one sets it.
        """
        self._check_fitted()
        return super().log_marginal_likelihood(prior_precision, sigma_noise)
