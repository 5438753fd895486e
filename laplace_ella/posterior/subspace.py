"""The posterior of ELLA as one immutable object: basis, curvature, prior and noise.

Hyperparameter searches make a new one for each candidate, at the cost of K×K algebra,
and change nothing of the fitted model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import torch

from laplace_ella.posterior import algebra
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.predictive import FunctionValues, psd_root

__all__ = ["Complement", "SubspacePosterior"]


class Complement(str, Enum):
    """What becomes of the directions of parameter space outside the basis."""

    DROP = "drop"
    """They have no variance, as in the paper. Needs the features only."""

    PRIOR = "prior"
    """They keep the prior's: Σ = (D + VHVᵀ/(σ²T))⁻¹. Equals the exact linearised
    Laplace once V spans the training gradients. Needs J(x)D⁻¹J(x)ᵀ as well, C backward
    passes an example."""


@dataclass(frozen=True)
class SubspacePosterior:
    """θ = θ̂ + Vz with z ~ N(0, G⁻¹), and the complement dropped or at the prior.

    Attributes
    ----------
    basis : NystromBasis
    H : torch.Tensor
        Σ φᵀΛφ `(K, K)`, float64
    factor : torch.Tensor
        f = 1/(σ²T), a scalar
    prior : torch.Tensor
        prior precision: scalar `(1,)`, layerwise `(L,)` or diagonal `(P,)`
    numels : tuple of int
        sizes of the L parameters
    complement : Complement
    """

    basis: NystromBasis
    H: torch.Tensor
    factor: torch.Tensor
    prior: torch.Tensor
    numels: tuple[int, ...]
    complement: Complement = Complement.DROP
    grams: list[torch.Tensor] = field(default_factory=list, repr=False)

    @property
    def rank(self) -> int:
        return self.basis.rank

    # Variants, each a new posterior

    def with_(self, **changes: object) -> SubspacePosterior:
        """The same posterior with other curvature, prior or factor."""
        return replace(self, **changes)

    def truncate(self, rank: int) -> SubspacePosterior:
        """The posterior of the first `rank` directions: bases are nested."""
        grams = [g[:, :rank, :rank] for g in self.grams]
        return replace(
            self,
            basis=self.basis.truncate(rank),
            H=self.H[:rank, :rank],
            grams=grams,
        )

    # The prior

    @property
    def is_scalar(self) -> bool:
        return self.prior.numel() == 1

    def _project(self, diagonal: torch.Tensor) -> torch.Tensor:
        """Vᵀ diag(d) V for d structured like the prior; layers' products are kept."""
        directions = self.basis.directions
        n_layers = len(self.numels)
        if diagonal.numel() == n_layers > 1 and n_layers != directions.shape[1]:
            if not self.grams:  # shared by all variants of this posterior
                grams = algebra.layer_grams(directions, list(self.numels))
                self.grams.append(grams.to(self.H.device))
            return torch.einsum("l,lij->ij", diagonal.double(), self.grams[0])
        return algebra.project_prior(directions, diagonal)

    def prior_diagonal(self) -> torch.Tensor:
        """D as a vector, `(P,)`, or `(1,)` for a scalar prior."""
        prior = self.prior
        if prior.numel() == len(self.numels) and prior.numel() != sum(self.numels):
            sizes = torch.as_tensor(self.numels, device=prior.device)
            return prior.repeat_interleave(sizes, output_size=sum(self.numels))
        return prior

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
        """R and T of the complement's formula, see `lowrank`."""
        S = self._project(1 / self.prior)
        return algebra.whiten(self.H, self.factor.double(), S)

    @cached_property
    def _whitened_roots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """R⁻¹ and T^{-1/2}."""
        R, T = self._whitened
        eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
        R_inv = torch.linalg.solve_triangular(R, eye, upper=True)
        return R_inv, algebra.inverse_root(T)

    @property
    def covariance(self) -> torch.Tensor:
        """Covariance of z = Vᵀ(θ − θ̂), `(K, K)`."""
        if self.complement is Complement.DROP:
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
        return prior.log().sum() * (sum(self.numels) / prior.numel())

    @property
    def log_det_ratio(self) -> torch.Tensor:
        """log det of the posterior precision less that of the prior precision."""
        if self.complement is Complement.DROP:
            return algebra.log_det(self.precision) - self.log_det_prior
        return algebra.log_det(self._whitened[1])

    def log_det_ratios(self) -> torch.Tensor:
        """The same for every rank k = 1..K, `(K,)`, from one factorisation.

        The Cholesky factor of a leading block is the leading block of the factor.
        """
        if self.complement is Complement.DROP or self.is_scalar:

            def log_dets(matrix: torch.Tensor) -> torch.Tensor:
                return 2 * algebra.cholesky(matrix).diagonal().log().cumsum(0)

            return log_dets(self.precision) - log_dets(self.prior_on_subspace)
        ranks = range(1, self.rank + 1)
        return torch.stack([self.truncate(k).log_det_ratio for k in ranks])

    def square_norm(self, delta: torch.Tensor) -> torch.Tensor:
        """ΔᵀPΔ for Δ `(P,)` under the posterior precision P."""
        directions = self.basis.directions.to(delta)
        z = (directions @ delta).double()
        if self.complement is Complement.DROP:
            return z @ self.precision @ z
        outside = (delta.double().square() * self.prior_diagonal()).sum()
        return self.factor * (z @ self.H @ z) + outside

    @property
    def dimension(self) -> int:
        """Dimension of the space the posterior has a density on."""
        drop = self.complement is Complement.DROP
        return self.rank if drop else sum(self.numels)

    # Function space

    @property
    def needs_kernel(self) -> bool:
        """Whether predictions need J(x)D⁻¹J(x)ᵀ besides the features."""
        return self.complement is Complement.PRIOR

    @staticmethod
    def check_kernel(kernel: torch.Tensor | None) -> torch.Tensor:
        """The kernel, if it came with the features."""
        if kernel is None:
            raise ValueError(
                "complement='prior' needs the kernel J(x)J(x)ᵀ besides the features; "
                "make the cache with this posterior, after setting the complement."
            )
        return kernel

    def kernel_weights(self) -> torch.Tensor | None:
        """Weights w `(P,)` in J(x)diag(w)J(x)ᵀ and in J(x)diag(w)V.

        None stands for weights one: features and kernels that hold for every scalar
        prior.
        """
        if not self.needs_kernel or self.is_scalar:
            return None
        return 1 / self.prior_diagonal()

    def function_values(
        self, f_mu: torch.Tensor, phi: torch.Tensor, kernel: torch.Tensor | None
    ) -> FunctionValues:
        """Gaussian over f(x) from outputs `(B, C)`, features `(B, C, K)` and, where
        the complement is kept, the kernel `(B, C, C)`."""
        if not self.needs_kernel:
            return FunctionValues(f_mu, phi @ self.scale.to(phi))
        factor, residual = self._with_complement(phi, kernel)
        return FunctionValues(f_mu, factor, residual)

    def joint_covariance(
        self, phi: torch.Tensor, kernel: torch.Tensor | None
    ) -> torch.Tensor:
        """`(B·C, B·C)` from features `(B·C, K)` and, if needed, kernel `(B·C, B·C)`."""
        if not self.needs_kernel:
            A = phi @ self.scale.to(phi)
            return A @ A.mT
        factor, residual = self._with_complement(phi, kernel)
        return factor @ factor.mT + residual

    def joint_root(
        self, phi: torch.Tensor, kernel: torch.Tensor | None
    ) -> torch.Tensor:
        """R `(B·C, ...)` with RRᵀ the joint covariance, for samples of functions."""
        if not self.needs_kernel:
            return phi @ self.scale.to(phi)
        return psd_root(self.joint_covariance(phi, kernel))

    def _with_complement(
        self, phi: torch.Tensor, kernel: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A = ψT^{-1/2} and J D^{-1/2}(I − QQᵀ)D^{-1/2}Jᵀ, with ψ = J D⁻¹ V R⁻¹."""
        kernel = self.check_kernel(kernel)
        R_inv, T_root = self._whitened_roots
        if self.is_scalar:
            phi, kernel = phi / self.prior.to(phi), kernel / self.prior.to(kernel)
        psi = phi @ R_inv.to(phi)
        return psi @ T_root.to(phi), kernel - psi @ psi.mT

    # Weight space

    def sample_offsets(
        self, noise: torch.Tensor, outside: torch.Tensor | None
    ) -> torch.Tensor:
        """θ − θ̂ `(n, P)` from normal noise `(n, K)` and, for the complement, (n, P)."""
        directions = self.basis.directions.to(noise)
        if not self.needs_kernel:
            return noise @ self.scale.mT.to(noise) @ directions
        R_inv, T_root = (matrix.to(noise) for matrix in self._whitened_roots)
        root = self.prior_diagonal().rsqrt().to(noise)  # D^{-1/2}
        # D^{-1/2}[(I − QQᵀ)ε + QT^{-1/2}z] with Q = D^{-1/2}VR⁻¹. Q is as large as the
        # basis and takes K²P operations, so only V is multiplied: 2KP for a sample.
        projected = (outside * root) @ directions.mT @ R_inv  # Qᵀε, (n, K)
        inside = noise @ T_root.mT - projected
        return (outside + (inside @ R_inv.mT @ directions) * root) * root
