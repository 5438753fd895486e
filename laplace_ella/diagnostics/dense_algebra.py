"""Products and factors of matrices that nearly fill the memory."""

from __future__ import annotations

import torch

from laplace_ella.support.batches import chunks

__all__ = ["cholesky_in_place", "cross"]


def cross(a: torch.Tensor, b: torch.Tensor, columns: int) -> torch.Tensor:
    """abᵀ in float64 from products in the dtype whose rounding a and b carry anyway."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for part in chunks(a.shape[1], columns):
        total += a[:, part] @ b[:, part].T
    return total


def cholesky_in_place(lower: torch.Tensor) -> torch.Tensor:
    """Cholesky factor in the memory of a matrix whose lower triangle is given."""
    if lower.is_cuda:
        return torch.linalg.cholesky(lower)
    # LAPACK works by columns: it gets the transpose, and of that the upper triangle.
    upper = lower.mT
    info = torch.empty((), dtype=torch.int32, device=lower.device)
    torch.linalg.cholesky_ex(upper, upper=True, out=(upper, info))
    if info.item():
        raise torch.linalg.LinAlgError(  # pyright: ignore[reportPrivateImportUsage]
            "The exact posterior precision is not positive definite in float64. A "
            "larger prior precision avoids this."
        )
    return lower
