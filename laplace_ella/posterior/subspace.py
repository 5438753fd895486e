"""The posterior of ELLA as one immutable object: basis, curvature, prior and noise.

Hyperparameter searches make a new one for each candidate, at the cost of K×K algebra,
and change nothing of the fitted model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from laplace_ella.posterior import algebra
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.outside import Complement, Precisions, Tail
from laplace_ella.posterior.predictive import FunctionValues, psd_root
from laplace_ella.support.metric import Metric
from laplace_ella.support.span import Span

__all__ = ["SubspacePosterior", "describe", "fixed_precisions"]


UNKNOWN_SPAN = (
    "complement='matched' needs the spectrum and the span of the sampled gradients, "
    "which this fit does not have. They are kept by a fit with complement='matched' of "
    "regression with the GGN, one sigma_noise and a number of directions, if "
    "memory_budget holds all sampled gradients. Fit again, or use 'prior'."
)


def describe(complement: Complement | float) -> str:
    """As a user would write it."""
    return repr(complement.value if isinstance(complement, Complement) else complement)


def fixed_precisions(complement: Complement | float, prior: torch.Tensor) -> Precisions:
    """Precisions outside the basis that no data decide."""
    if isinstance(complement, Complement):
        return Precisions.all(prior.double().reshape(()))
    return Precisions.all(torch.full_like(prior, complement).double().reshape(()))


@dataclass(frozen=True)
class SubspacePosterior:
    """θ = θ̂ + Vz with z ~ N(0, G⁻¹), and the complement dropped or kept.

    Attributes
    ----------
    basis : NystromBasis
    H : torch.Tensor
        Σ φᵀΛφ `(K, K)`, float64
    factor : torch.Tensor
        f = 1/(σ²T), a scalar
    prior : torch.Tensor
        prior precision: scalar `(1,)`, layerwise `(L,)` or diagonal `(P,)`
    complement : Complement or float
        a number is the precision of all directions outside the basis
    tail : Tail, optional
        what is known of the curvature outside the basis
    whole : bool
        whether the evidence is of the whole spectrum, as far as the tail is known, or
        of the directions in the basis

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=5)
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> posterior = la.posterior
    >>> posterior.precision.shape, posterior.truncate(3).rank
    (torch.Size([5, 5]), 3)
    >>> wider = posterior.with_(prior=torch.tensor([0.5]))  # la stays as it is
    >>> float(wider.prior), float(la.prior_precision)
    (0.5, 1.0)
    """

    basis: NystromBasis
    H: torch.Tensor
    factor: torch.Tensor
    prior: torch.Tensor
    complement: Complement | float = Complement.DROP
    tail: Tail | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if self.complement in (Complement.DROP, Complement.PRIOR):
            return
        tail = self.tail
        if self.complement is Complement.MATCHED and (tail is None or not tail.span):
            raise ValueError(UNKNOWN_SPAN)
        if self.is_scalar:
            return
        raise ValueError(
            f"complement={describe(self.complement)} needs one prior precision for all "
            f"weights, got {self.prior.numel()}. Use complement='prior', or set one "
            "number as prior_precision."
        )

    @property
    def rank(self) -> int:
        return self.basis.rank

    @property
    def n_params(self) -> int:
        return self.basis.directions.shape[1]

    # Variants, each a new posterior

    def with_(self, **changes: Any) -> SubspacePosterior:
        """The same posterior with other curvature, prior or factor."""
        return replace(self, **changes)

    def truncate(self, rank: int) -> SubspacePosterior:
        """The posterior of the first `rank` directions: bases are nested."""
        return replace(self, basis=self.basis.truncate(rank), H=self.H[:rank, :rank])

    # The prior

    @property
    def is_scalar(self) -> bool:
        return self.prior.numel() == 1

    @property
    def is_layerwise(self) -> bool:
        return self.prior.numel() == len(self.basis.numels) != self.n_params

    def _project(self, diagonal: torch.Tensor) -> torch.Tensor:
        """Vᵀ diag(d) V for d structured like the prior."""
        if not self.is_scalar and self.is_layerwise:
            return torch.einsum("l,lij->ij", diagonal.double(), self.basis.layer_grams)
        return algebra.project_prior(self.basis.directions, diagonal)

    def prior_diagonal(self) -> torch.Tensor:
        """D as a vector, `(P,)`, or `(1,)` for a scalar prior."""
        if self.is_scalar or not self.is_layerwise:
            return self.prior
        sizes = torch.as_tensor(self.basis.numels, device=self.prior.device)
        return self.prior.repeat_interleave(sizes, output_size=self.n_params)

    # The precision

    @cached_property
    def prior_on_subspace(self) -> torch.Tensor:
        """VᵀDV `(K, K)`."""
        return self._project(self.prior)

    @cached_property
    def precision(self) -> torch.Tensor:
        """G = f·H + VᵀDV `(K, K)`."""
        return self.factor.double() * self.H + self.prior_on_subspace

    @cached_property
    def scale(self) -> torch.Tensor:
        """S `(K, K)` with SSᵀ = G⁻¹."""
        return algebra.inverse_root(self.precision)

    @cached_property
    def _whitened(self) -> tuple[torch.Tensor, torch.Tensor]:
        """R and T of the complement's formula, see `algebra`."""
        gram = self._project(1 / self.prior)
        return algebra.whiten(self.H, self.factor.double(), gram)

    @cached_property
    def _whitened_roots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """R⁻¹ and T^{-1/2}."""
        R, T = self._whitened
        return algebra.triangular_inverse(R, upper=True), algebra.inverse_root(T)

    @property
    def covariance(self) -> torch.Tensor:
        """Covariance of z = Vᵀ(θ − θ̂), `(K, K)`."""
        if self.complement is Complement.DROP or self.is_scalar:
            return self.scale @ self.scale.mT
        R, _ = self._whitened
        half = R.mT @ self._whitened_roots[1]
        return half @ half.mT

    # Evidence

    @property
    def log_det_prior(self) -> torch.Tensor:
        """log det of the prior precision: on the subspace, or of all of D."""
        if self.complement is Complement.DROP:
            return algebra.log_det(self.prior_on_subspace)
        prior = self.prior_diagonal().double()
        return prior.log().sum() * (self.n_params / prior.numel())

    @property
    def log_det_ratio(self) -> torch.Tensor:
        """log det of the posterior precision less that of the prior precision, over
        the directions that the evidence is of."""
        if self.complement is Complement.DROP or self.is_scalar:
            within = algebra.log_det(self.precision) - algebra.log_det(
                self.prior_on_subspace
            )
            return within + self.log_det_outside
        return algebra.log_det(self._whitened[1])

    @property
    def log_det_outside(self) -> torch.Tensor:
        """What the directions outside the basis add to it; 0 where they are not known
        or not counted."""
        if self.tail is None or not self.whole or not self.is_scalar:
            return torch.zeros_like(self.H[0, 0])
        return self.tail.log_det(self.rank, self.factor, self.prior).reshape(())

    def log_det_ratios(self) -> torch.Tensor:
        """The same for every rank k = 1..K, `(K,)`, from one factorisation.

        The Cholesky factor of a leading block is the leading block of the factor.
        """
        ranks = range(1, self.rank + 1)
        if self.complement is Complement.DROP or self.is_scalar:

            def log_dets(matrix: torch.Tensor) -> torch.Tensor:
                return 2 * algebra.cholesky(matrix).diagonal().log().cumsum(0)

            within = log_dets(self.precision) - log_dets(self.prior_on_subspace)
            if self.tail is None or not self.whole:
                return within
            outside = [self.tail.log_det(k, self.factor, self.prior) for k in ranks]
            return within + torch.stack(outside).reshape(-1)
        return torch.stack([self.truncate(k).log_det_ratio for k in ranks])

    def square_norm(self, delta: torch.Tensor) -> torch.Tensor:
        """ΔᵀPΔ for Δ `(P,)` under the posterior precision P."""
        directions = self.basis.directions.to(delta)
        z = (directions @ delta).double()
        if self.complement is Complement.DROP:
            return z @ self.precision @ z
        square = delta.double().square()
        if self.complement is Complement.PRIOR:
            outside = (square * self.prior_diagonal()).sum()
            return self.factor * (z @ self.H @ z) + outside
        outside = (square.sum() - z.square().sum()) * self.outside.single
        return z @ self.precision @ z + outside

    @property
    def dimension(self) -> int:
        """Dimension of the space the posterior has a density on."""
        return self.rank if self.complement is Complement.DROP else self.n_params

    # Function space

    @property
    def needs_residual(self) -> bool:
        """Whether predictions need the part of J(x) outside the basis."""
        return self.complement is not Complement.DROP

    @property
    def levels(self) -> Span | None:
        """A span outside of which predictions need a part of J(x) as well, at all
        levels: for every prior and noise."""
        if self.complement is not Complement.MATCHED or self.tail is None:
            return None
        return self.tail.span

    @cached_property
    def span(self) -> Span | None:
        """The same at the level of this posterior."""
        levels = self.levels
        return None if levels is None else levels.at(self._level)

    @cached_property
    def _level(self) -> int:
        if self.tail is None:
            return 0
        return self.tail.level(self.rank, self.factor, self.prior)

    @cached_property
    def outside(self) -> Precisions:
        """Precisions outside the basis, for a scalar prior."""
        if self.complement is not Complement.MATCHED or self.tail is None:
            return fixed_precisions(self.complement, self.prior)
        freedom = self.rank - self.prior.double() * self.scale.square().sum()
        return self.tail.precisions(
            self.rank, self.factor, self.prior, freedom.squeeze(), self.H.trace()
        )

    @property
    def weighs_gradients(self) -> bool:
        """Whether features and residuals depend on the prior."""
        return self.needs_residual and not self.is_scalar

    @cached_property
    def metric(self) -> Metric | None:
        """How gradients are measured, see `split_gradients`.

        None stands for weights one: features and residuals that hold for every scalar
        prior.
        """
        if not self.weighs_gradients:
            return None
        inverse_root = self._whitened_roots[0]
        weights = 1 / self.prior_diagonal()
        return Metric(weights.detach(), (inverse_root @ inverse_root.mT).detach())

    def function_values(
        self,
        f_mu: torch.Tensor,
        phi: torch.Tensor,
        residual: torch.Tensor | None = None,
        unseen: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
    ) -> FunctionValues:
        """Gaussian over f(x) from outputs `(B, C)`, features `(B, C, K)` and, where
        the complement is kept, the residual and what is unseen of it `(B, C, C)`, or
        `(B, L, C, C)` at all levels.

        These may be of c `outputs` `(B, c)` of each row only."""
        if unseen is not None and unseen.ndim == 4:  # at all levels, or at this one
            unseen = unseen[:, self._level if unseen.shape[1] > 1 else 0]
        parts = self._factor_and_residual(phi, residual, unseen)
        return FunctionValues.of_outputs(f_mu, *parts, outputs)

    def joint_covariance(
        self,
        phi: torch.Tensor,
        residual: torch.Tensor | None = None,
        unseen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`(n, n)` from features `(n, K)` and, if needed, residuals `(n, n)`."""
        factor, residual = self._factor_and_residual(phi, residual, unseen)
        covariance = factor @ factor.mT
        return covariance if residual is None else covariance + residual

    def joint_root(
        self,
        phi: torch.Tensor,
        residual: torch.Tensor | None = None,
        unseen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """R `(n, ...)` with RRᵀ the joint covariance, for samples of functions."""
        if not self.needs_residual:
            return self._factor_and_residual(phi, None, None)[0]
        return psd_root(self.joint_covariance(phi, residual, unseen))

    def _factor_and_residual(
        self,
        phi: torch.Tensor,
        residual: torch.Tensor | None,
        unseen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A and the residual with JΣJᵀ = AAᵀ + residual.

        With φ = JD⁻¹V for priors that are not scalar: A = φR⁻¹T^{-1/2}.
        """
        if not self.needs_residual:
            return phi @ self.scale.to(phi), None
        if residual is None or (self.levels is not None and unseen is None):
            raise ValueError(
                f"complement={describe(self.complement)} needs the part of J(x) "
                "outside the basis besides the features; make the cache with this "
                "posterior, after setting the complement."
            )
        if self.is_scalar:
            unseen = None if self.levels is None else unseen
            covariance = self.outside.covariance(residual, unseen)
            return phi @ self.scale.to(phi), covariance
        R_inv, T_root = self._whitened_roots
        return phi @ (R_inv @ T_root).to(phi), residual

    # Weight space

    @property
    def log_det_precision(self) -> torch.Tensor:
        """log det of the precision that `square_norm` and samples have."""
        if isinstance(self.complement, Complement) and (
            self.complement in (Complement.DROP, Complement.PRIOR)
        ):
            return self.log_det_prior + self.with_(whole=False).log_det_ratio
        outside = self.n_params - self.rank
        return algebra.log_det(self.precision) + outside * self.outside.single.log()

    def sample_offsets(
        self, noise: torch.Tensor, outside: torch.Tensor | None
    ) -> torch.Tensor:
        """θ − θ̂ `(n, P)` from normal noise `(n, K)` and, for the complement, (n, P)."""
        directions = self.basis.directions.to(noise)
        if outside is None:
            return noise @ self.scale.mT.to(noise) @ directions
        if self.complement is not Complement.PRIOR:
            # One precision outside: single weights do not tell the parts apart.
            outside = outside * self.outside.single.to(noise).rsqrt()
            inside = noise @ self.scale.mT.to(noise) - outside @ directions.mT
            return inside @ directions + outside
        R_inv, T_root = (matrix.to(noise) for matrix in self._whitened_roots)
        root = self.prior_diagonal().rsqrt().to(noise)  # D^{-1/2}
        # D^{-1/2}[(I − QQᵀ)ε + QT^{-1/2}z] with Q = D^{-1/2}VR⁻¹. Q is as large as the
        # basis and takes K²P operations, so only V is multiplied: 2KP for a sample.
        projected = (outside * root) @ directions.mT @ R_inv  # Qᵀε, (n, K)
        inside = noise @ T_root.mT - projected
        return (outside + (inside @ R_inv.mT @ directions) * root) * root
