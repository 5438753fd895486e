"""Algebra of the K×K posterior, in float64.

ELLA is a Laplace posterior on the subspace θ = θ̂ + Vz (Deng et al. 2022, Eq. 8 in
weight space): z ~ N(0, G⁻¹) with G = f·H + VᵀDV, where f = 1/(σ²T), D the diagonal
prior precision. Where the complement of the subspace is kept at the prior, the
covariance of all weights is Σ = (D + f·VHVᵀ)⁻¹; with VᵀD⁻¹V = RᵀR and the whitened
directions Q = D^{-1/2}VR⁻¹ it is

    Σ = D^{-1/2} [ (I − QQᵀ) + Q(I + f·RHRᵀ)⁻¹Qᵀ ] D^{-1/2}.
"""

from __future__ import annotations

from typing import Any

import torch

from laplace_ella.errors import NumericalWarning, warn_caller
from laplace_ella.support.batches import has_values

__all__ = [
    "cholesky",
    "inverse_root",
    "log_det",
    "project_prior",
    "triangular_inverse",
    "whiten",
]


def project_prior(vectors: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """VᵀDV (K, K) in float64, differentiable in the prior precision.

    Parameters
    ----------
    vectors : torch.Tensor
        Vᵀ `(K, P)`, orthonormal rows
    prior : torch.Tensor
        scalar `(1,)` or diagonal `(P,)` precision
    """
    prior = prior.double()
    if prior.numel() == 1:  # V is orthonormal
        eye = torch.eye(len(vectors), dtype=prior.dtype, device=prior.device)
        return prior.reshape(()) * eye
    v = vectors.to(prior.device).double()
    return (v * prior) @ v.T


def cholesky(matrix: torch.Tensor) -> torch.Tensor:
    """Lower Cholesky factor; a matrix that is not quite definite gets a jitter."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not has_values(info) or not info.any():
        return factor
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = float(diagonal.detach().abs().mean())
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jitter = 0.0
    for exponent in range(-14, -3):
        jitter = scale * 10.0**exponent
        factor, info = torch.linalg.cholesky_ex(matrix + jitter * eye)
        if not info.any():
            warn_caller(
                f"The posterior precision was not positive definite; {jitter:.1e} was "
                "added to its diagonal. A larger prior precision avoids this.",
                NumericalWarning,
            )
            return factor
    raise torch.linalg.LinAlgError(  # pyright: ignore[reportPrivateImportUsage]
        "The posterior precision is not positive definite, even after adding "
        f"{jitter:.1e} to its diagonal. Check the prior precision and the data."
    )


class _LogDet(torch.autograd.Function):
    """log det with its gradient G⁻¹, at a fifth of the cost of the factor's own."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        factor = cholesky(matrix)
        ctx.save_for_backward(matrix, factor)
        return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> torch.Tensor:
        (grad,) = grad_outputs
        matrix, factor = ctx.saved_tensors
        twice = torch.is_grad_enabled()  # the gradient is differentiated in turn
        inverse = torch.linalg.inv(matrix) if twice else torch.cholesky_inverse(factor)
        return grad[..., None, None] * inverse


def log_det(matrix: torch.Tensor) -> torch.Tensor:
    """log det of positive definite matrices `(..., K, K)`, `(...)`."""
    return _LogDet.apply(matrix)  # pyright: ignore[reportReturnType]


def inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    """S (K, K) with SSᵀ = G⁻¹: S = L⁻ᵀ for G = LLᵀ."""
    return triangular_inverse(cholesky(matrix), upper=False).mT


def triangular_inverse(matrix: torch.Tensor, upper: bool) -> torch.Tensor:
    """Inverse of a triangular matrix."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve_triangular(matrix, eye, upper=upper)


def whiten(
    H: torch.Tensor, factor: torch.Tensor, S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """R and T = I + f·RHRᵀ for S = VᵀD⁻¹V = RᵀR, all `(K, K)`."""
    R = cholesky(S).mT
    eye = torch.eye(len(S), dtype=S.dtype, device=S.device)
    return R, eye + factor * (R @ H @ R.mT)
