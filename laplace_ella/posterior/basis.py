"""From sampled gradients to the Nyström basis V (Deng et al. 2022, Sec. 3.3).

v_k = J̃ᵀu_k/√λ_k for the top eigenpairs of J̃J̃ᵀ: the top right singular vectors of
J̃ (M, P), orthonormal and nested in K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from laplace_ella.derivatives.jacobians import accurate_product
from laplace_ella.errors import RankWarning, warn_caller
from laplace_ella.support.batches import chunks, has_values
from laplace_ella.support.preserve import full_precision

#: Up to so many entries of J̃ a float64 singular value decomposition is used: a Gram
#: matrix would square the condition number.
SVD_LIMIT = 2_000_000

#: Columns that enter one product with all rows, and rows of one block of it.
WIDTH, HEIGHT = 16_384, 256


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
    numels : tuple of int
        sizes of the L parameter tensors that make up the P columns
    tail : torch.Tensor, optional
        the other eigenvalues of J̃J̃ᵀ, descending, float64; None where a summary of the
        gradients was kept, which does not tell them

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
    >>> la.basis.vectors.shape, la.basis.n_samples  # V (P, K), M = N·C
    (torch.Size([9, 5]), 150)
    """

    directions: torch.Tensor
    eigenvalues: torch.Tensor
    n_samples: int
    trace: float
    method: str
    numels: tuple[int, ...] = ()
    tail: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """K."""
        return len(self.eigenvalues)

    @property
    def vectors(self) -> torch.Tensor:
        """V `(P, K)`, orthonormal columns."""
        return self.directions.T

    @property
    def all_eigenvalues(self) -> torch.Tensor:
        """Eigenvalues of J̃J̃ᵀ, all that are known."""
        if self.tail is None:
            return self.eigenvalues
        return torch.cat([self.eigenvalues, self.tail])

    @property
    def explained(self) -> torch.Tensor:
        """Share of the trace in the first k directions, `(K,)`."""
        return self.eigenvalues.cumsum(0) / self.trace

    @cached_property
    def layer_grams(self) -> torch.Tensor:
        """V_lᵀV_l of every parameter tensor l, `(L, K, K)` float64."""
        pieces = self.directions.split(self.numels, dim=1)
        grams = torch.stack([v.double() @ v.double().T for v in pieces])
        return grams.to(self.eigenvalues.device)

    def truncate(self, rank: int) -> NystromBasis:
        """Return the basis of the first `rank` directions."""
        tail = None if self.tail is None else self.all_eigenvalues[rank:]
        directions, eigenvalues = self.directions[:rank], self.eigenvalues[:rank]
        return replace(self, directions=directions, eigenvalues=eigenvalues, tail=tail)


class RowBuffer:
    """Gradients as they come, all of them or a summary of bounded size.

    A full buffer is replaced by its `keep` leading singular directions, scaled by their
    singular values: a truncated incremental singular value decomposition, which loses
    the smallest part of the energy.
    """

    def __init__(
        self,
        numels: Sequence[int],
        capacity: int,
        keep: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.numels = tuple(numels)
        self.capacity = capacity
        self.keep = keep
        self.filled = 0
        self.n_samples = 0
        self.compressed = False
        self.energy = torch.zeros((), dtype=torch.float64, device=device)
        self._buffer = torch.empty(capacity, sum(numels), dtype=dtype, device=device)

    @property
    def rows(self) -> torch.Tensor:
        """The rows that are there, `(filled, P)`, not a copy."""
        return self._buffer[: self.filled]

    def append(self, rows: torch.Tensor) -> None:
        """Take in rows `(m, P)`."""
        self.n_samples += len(rows)
        while len(rows):
            if self.filled == self.capacity:
                U = torch.linalg.eigh(_gram(self._buffer))[1].flip(1)[:, : self.keep]
                _multiply(U.T, self._buffer)
                self.filled, self.compressed = self.keep, True
            some = rows[: self.capacity - self.filled]
            self._buffer[self.filled : self.filled + len(some)] = some
            self.filled += len(some)
            rows = rows[len(some) :]
            # In float64 throughout it takes four times as long.
            parts = some.reshape(-1).split(WIDTH)
            if self._buffer.numel() <= SVD_LIMIT:
                parts = [part.double() for part in parts]
            squares = torch.stack([torch.dot(part, part) for part in parts])
            self.energy += squares.double().sum()


def nystrom_basis(
    buffer: RowBuffer, n_eigenvalues: int | None, accurate: bool = False
) -> NystromBasis:
    """Return the top right singular vectors of all rows; all usable ones for None, and
    with a `RankWarning` where there are fewer than `n_eigenvalues`.

    `accurate` is for those who need the small eigenvalues as well. The directions may
    take the place of the rows in memory: the buffer is used up.
    """
    basis = _decompose(buffer, n_eigenvalues, accurate or n_eigenvalues is None)[0]
    rank = basis.rank
    if n_eigenvalues is not None and rank < n_eigenvalues:
        warn_caller(
            f"n_eigenvalues={n_eigenvalues} exceeds the usable rank {rank} of the "
            f"{buffer.n_samples} sampled gradients; using {rank}.",
            RankWarning,
        )
    if n_eigenvalues is None or rank > 0.8 * buffer.capacity:
        return basis  # there may be no room for a copy, and there is little to free
    return replace(basis, directions=basis.directions.clone())


def exact_basis(buffer: RowBuffer) -> tuple[NystromBasis, torch.Tensor]:
    """Return all usable directions and the coefficients `(M, K)` of the rows in them,
    the features of the training data: rows = coefficients @ directions. The buffer is
    used up."""
    return _decompose(buffer, None, True)


def extend_exact(
    basis: NystromBasis, coefficients: torch.Tensor, new_rows: torch.Tensor
) -> tuple[NystromBasis, torch.Tensor]:
    """Return an exact basis and its coefficients `(M + m, K')` with `new_rows`
    `(m, P)` besides those whose `coefficients` `(M, K)` are given."""
    V, K = basis.directions, basis.rank
    buffer = RowBuffer(basis.numels, K + len(new_rows) + 1, K, V.dtype, V.device)
    # The old rows have the directions and eigenvalues of V, scaled.
    buffer.append(basis.eigenvalues.sqrt().to(V).unsqueeze(1) * V)
    buffer.append(new_rows.to(V))
    buffer.n_samples = basis.n_samples + len(new_rows)
    extended, both = exact_basis(buffer)
    turn = accurate_product(V, extended.directions).double()
    return extended, torch.cat([coefficients.double() @ turn, both[K:]])


def _decompose(
    buffer: RowBuffer, limit: int | None, accurate: bool
) -> tuple[NystromBasis, torch.Tensor]:
    """Return the basis of at most `limit` usable directions, and the coefficients of
    the rows."""
    rows, known = buffer.rows, has_values(buffer.energy)
    k = min(limit or len(rows), *rows.shape)
    precision = torch.float64 if accurate else rows.dtype
    method, left = "gram", None
    if rows.numel() <= SVD_LIMIT:
        method = "svd"
        left, singular, Vh = torch.linalg.svd(rows.double(), full_matrices=False)
        eigenvalues, directions = singular.square(), Vh.to(rows.dtype)
        left = left * singular
    elif len(rows) > rows.shape[1]:  # the eigenvectors of J̃ᵀJ̃ are the directions
        eigenvalues, V = torch.linalg.eigh(_gram(rows.T, precision))
        eigenvalues, directions = eigenvalues.flip(0), V.flip(1).T.to(rows.dtype)
    else:
        eigenvalues, U = torch.linalg.eigh(_gram(rows, precision))
        eigenvalues, U = eigenvalues.flip(0).clamp_min(0), U.flip(1)[:, :k]
        scale = eigenvalues[:k].sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        directions = _multiply((U / scale * (eigenvalues[:k] > 0)).T, rows)
        left = U * scale
    rank = k
    if known:
        # Rounding of relative size ε in the entries has a spectral norm of about
        # ε√max(M, P)·σ₁; that of a Gram matrix's products is about ε√M·λ₁.
        noise = (10 * torch.finfo(rows.dtype).eps) ** 2 * max(rows.shape)
        if method == "gram":
            noise = max(noise, torch.finfo(precision).eps * len(rows) ** 0.5)
        rank = min(k, int((eigenvalues > noise * eigenvalues[0]).sum()))
    if rank == 0:
        raise ValueError(
            f"All {buffer.n_samples} sampled gradients are zero: the outputs do not "
            "depend on the parameters. Check that the right parameters require "
            "gradients."
        )
    directions = directions[:rank]
    if method == "gram":
        factor = _orthonormalize(directions)
        left = None if left is None else left[:, :rank] @ factor
    if left is None:  # the rows are still there
        left = rows.double() @ directions.double().T
    basis = NystromBasis(
        directions,
        eigenvalues[:rank].clamp_min(0),
        buffer.n_samples,
        float(buffer.energy) if known else float("nan"),
        "streaming" if buffer.compressed else method,
        buffer.numels,
        None if buffer.compressed else eigenvalues[rank:].clamp_min(0),
    )
    return basis, left[:, :rank]


def _gram(rows: torch.Tensor, precision: torch.dtype | None = None) -> torch.Tensor:
    """Return J̃J̃ᵀ `(M, M)`, of which only the lower triangle is set: products in the
    rows' dtype unless told, added up in float64."""
    dtype = precision or rows.dtype
    width = WIDTH if dtype == rows.dtype else WIDTH // 8  # copies should be small
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    with full_precision(rows.device):
        for columns in chunks(rows.shape[1], width):
            block = rows[:, columns].to(dtype)
            for part in chunks(len(rows), HEIGHT):
                total[part, : part.stop] += block[part] @ block[: part.stop].T
    return total


def _multiply(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return matrix @ rows, in the place of the first rows."""
    matrix = matrix.to(rows.dtype)
    with full_precision(rows.device):
        for columns in chunks(rows.shape[1], WIDTH // 8):
            rows[: len(matrix), columns] = matrix @ rows[:, columns]
    return rows[: len(matrix)]


def _orthonormalize(directions: torch.Tensor) -> torch.Tensor:
    """Make rows, which lost digits by dividing by √λ_k, orthonormal in place, keeping
    their nested spans (Cholesky-QR); return L `(K, K)` with directions = L·rows."""
    factor, info = torch.linalg.cholesky_ex(_gram(directions))
    if has_values(info) and info.any():  # too close to singular for a Gram matrix
        Q, R = torch.linalg.qr(directions.double().T)
        directions.copy_(Q.T)
        return R.T
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    _multiply(torch.linalg.solve_triangular(factor, eye, upper=False), directions)
    return factor
