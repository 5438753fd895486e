"""Errors of a Nyström basis and of ELLA's covariances, as pure functions of tensors.

ε_Nyström and ε_ELLA are those of Deng et al. 2022, Sec. 5.1. V is orthonormal, so the
error of the Nyström approximation of the kernel JJᵀ is J(I − VVᵀ)Jᵀ.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laplace_ella.diagnostics.spectral import residual_norms, spectral_norms

__all__ = ["NystromError", "nystrom_error", "relative_errors"]


@dataclass(frozen=True)
class NystromError:
    """Error of JVVᵀJᵀ as an approximation of the kernel matrix JJᵀ `(N·C, N·C)`.

    Attributes
    ----------
    residual_norm : float
        ‖J(I − VVᵀ)Jᵀ‖, ℰ' of Theorem 1 (spectral norm)
    norm : float
        ‖JJᵀ‖
    residual_trace, trace : float
        traces of the same two matrices
    norm_error : float
        of `residual_norm`: there is an eigenvalue within this distance. An estimate
        comes from below; it is a Ritz value
    trace_error : float
        standard error of `residual_trace`; 0 if exact
    exact : bool
        from dense matrices, or estimated from products
    """

    residual_norm: float
    norm: float
    residual_trace: float
    trace: float
    norm_error: float = 0.0
    trace_error: float = 0.0
    exact: bool = True

    @property
    def relative(self) -> float:
        """ε_Nyström (Deng et al. 2022, Sec. 5.1)."""
        return self.residual_norm / self.norm

    @property
    def relative_trace(self) -> float:
        """Share of the trace of JJᵀ that the subspace misses."""
        return self.residual_trace / self.trace

    @property
    def relative_trace_error(self) -> float:
        """Standard error of `relative_trace`.

        Of trace = residual + part within the subspace only the residual is estimated.
        """
        within = self.trace - self.residual_trace
        return self.trace_error * within / self.trace**2


def nystrom_error(J: torch.Tensor, directions: torch.Tensor) -> NystromError:
    """ε_Nyström of Jacobians J `(N·C, P)` and a basis Vᵀ `(K, P)`."""
    norms, errors = residual_norms(
        lambda v: (v.to(J) @ J.T) @ J, directions, [len(directions), 0]
    )
    trace = float(J.double().square().sum())
    within = float((J @ directions.T.to(J)).double().square().sum())
    return NystromError(
        float(norms[0]),
        float(norms[1]),
        max(0.0, trace - within),
        trace,
        float(errors[0]),
    )


def relative_errors(approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """‖κ_ELLA − κ_LLA‖ / ‖κ_LLA‖ in spectral norm `(B,)`; its mean is ε_ELLA.

    Both are covariances `(B, C, C)`. (Deng et al. 2022, Sec. 5.1)
    """
    exact = exact.double()
    return spectral_norms(approximate.double() - exact) / spectral_norms(exact)
