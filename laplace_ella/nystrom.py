"""From sampled gradients to the Nyström basis V (Deng et al. 2022, Sec. 3.3).

v_k = J̃ᵀu_k/√λ_k for the top eigenpairs of J̃J̃ᵀ: the top right singular vectors of
J̃ (M, P), orthonormal and nested in K.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from laplace_ella._batch import chunks, has_values
from laplace_ella._errors import RankWarning

__all__ = ["NystromBasis", "basis_from_rows"]

#: Up to so many entries of J̃ a float64 singular value decomposition is used, which is
#: more accurate than the Gram matrix because it does not square the condition number.
SVD_LIMIT = 2_000_000

#: Columns that enter one product of the Gram matrix.
GRAM_WIDTH = 16_384


@dataclass(frozen=True)
class NystromBasis:
    """Directions of parameter space and the spectrum they came from.

    Attributes
    ----------
    directions : torch.Tensor
        Vᵀ `(K, P)`, orthonormal rows
    eigenvalues : torch.Tensor
        top eigenvalues of J̃J̃ᵀ `(K,)`, descending, float64
    n_samples : int
        M, the number of gradients that were used
    trace : float
        sum of all eigenvalues of J̃J̃ᵀ
    method : str
        how it was computed: "svd", "gram" or "streaming"
    """

    directions: torch.Tensor
    eigenvalues: torch.Tensor
    n_samples: int
    trace: float
    method: str

    @property
    def rank(self) -> int:
        """K."""
        return self.directions.shape[0]

    @property
    def vectors(self) -> torch.Tensor:
        """V `(P, K)`, orthonormal columns."""
        return self.directions.T

    @property
    def explained(self) -> torch.Tensor:
        """Share of the trace in the first k directions, `(K,)`."""
        return self.eigenvalues.cumsum(0) / self.trace

    def truncate(self, rank: int) -> NystromBasis:
        """The basis of the first `rank` directions."""
        return replace(
            self,
            directions=self.directions[:rank],
            eigenvalues=self.eigenvalues[:rank],
        )


def basis_from_rows(
    rows: torch.Tensor, n_eigenvalues: int, method: str | None = None
) -> NystromBasis:
    """Top right singular vectors of the sampled gradients `rows` (M, P).

    Fewer usable directions than `n_eigenvalues` truncate, with a `RankWarning`.
    """
    small = rows.numel() <= SVD_LIMIT
    decompose = _by_svd if small else _by_gram
    eigenvalues, directions = decompose(rows, min(n_eigenvalues, *rows.shape))
    rank = _usable_rank(eigenvalues, rows, squared=not small)
    return finish_basis(
        directions,
        eigenvalues,
        rank,
        n_eigenvalues,
        len(rows),
        method or ("svd" if small else "gram"),
    )


def finish_basis(
    directions: torch.Tensor,
    eigenvalues: torch.Tensor,
    rank: int,
    n_eigenvalues: int,
    n_samples: int,
    method: str,
) -> NystromBasis:
    """Truncate to the usable rank and wrap up."""
    if rank == 0:
        raise ValueError(
            f"All {n_samples} sampled gradients are zero: the outputs do not depend on "
            "the parameters. Check that the right parameters require gradients."
        )
    if rank < n_eigenvalues:
        warnings.warn(
            f"n_eigenvalues={n_eigenvalues} exceeds the usable rank {rank} of the "
            f"{n_samples} sampled gradients; using {rank}.",
            RankWarning,
            stacklevel=2,
        )
    rank = min(rank, n_eigenvalues)
    trace = float(eigenvalues.sum()) if has_values(eigenvalues) else float("nan")
    return NystromBasis(
        directions[:rank].contiguous(), eigenvalues[:rank], n_samples, trace, method
    )


def _usable_rank(eigenvalues: torch.Tensor, rows: torch.Tensor, squared: bool) -> int:
    """Number of directions that stand above the rounding noise of the rows.

    Noise of relative size ε in the entries has spectral norm of about ε√max(M, P)·σ₁;
    a Gram matrix carries its own rounding noise of about ε√M·λ₁.
    """
    if not has_values(eigenvalues):
        return min(rows.shape)
    eps = torch.finfo(rows.dtype).eps
    top = float(eigenvalues[0])
    noise = (10 * eps) ** 2 * max(rows.shape)
    if squared:
        noise = max(noise, eps * len(rows) ** 0.5)
    return int((eigenvalues > top * noise).sum())


def _by_svd(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All eigenvalues (descending) and the top directions `(k, P)`."""
    _, singular, Vh = torch.linalg.svd(rows.double(), full_matrices=False)
    return singular.square(), Vh[:k].to(rows.dtype)


def _by_gram(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through the eigendecomposition of J̃J̃ᵀ in float64."""
    eigenvalues, U = torch.linalg.eigh(gram(rows))
    eigenvalues, U = eigenvalues.flip(0).clamp_min(0), U.flip(1)[:, :k]
    scale = eigenvalues[:k].sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    directions = (U / scale).T.to(rows.dtype) @ rows
    return eigenvalues, orthonormalize(directions)


def gram(rows: torch.Tensor) -> torch.Tensor:
    """J̃J̃ᵀ (M, M): products in the rows' dtype, accumulated in float64."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for part in chunks(rows.shape[1], GRAM_WIDTH):
        block = rows[:, part]
        total += block @ block.T
    return total


def orthonormalize(directions: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows that span the same nested subspaces (Cholesky-QR).

    Dividing by √λ_k loses digits for small λ_k; this restores orthogonality.
    """
    if not has_values(directions):
        return directions
    factor, info = torch.linalg.cholesky_ex(gram(directions))
    if info.any():
        return torch.linalg.qr(directions.double().T)[0].T.to(directions.dtype)
    inverse = torch.linalg.solve_triangular(
        factor,
        torch.eye(len(factor), dtype=factor.dtype, device=factor.device),
        upper=False,
    )
    return inverse.to(directions.dtype) @ directions
