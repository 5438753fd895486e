"""From sampled gradients to the Nyström basis V (Deng et al. 2022, Sec. 3.3).

v_k = J̃ᵀu_k/√λ_k for the top eigenpairs of J̃J̃ᵀ: the top right singular vectors of
J̃ (M, P), orthonormal and nested in K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from laplace_ella.errors import RankWarning, warn_caller
from laplace_ella.posterior.davidson import leading_eigenpairs
from laplace_ella.posterior.products import energy, gram, multiply, orthonormalize_
from laplace_ella.support.batches import has_values
from laplace_ella.support.disk import tensor_on_disk
from laplace_ella.support.heap import large_tensor

__all__ = ["NystromBasis", "RowSketch", "basis_from_rows", "few_are_wanted"]

#: Up to so many entries of J̃ a float64 singular value decomposition is used, which is
#: more accurate than the Gram matrix because it does not square the condition number.
SVD_LIMIT = 2_000_000

#: Gradients per direction from which on only the directions are computed, where the
#: rest of the spectrum is not used.
FEW_RATIO = 50


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
        how it was computed: "svd", "gram", "davidson" or "streaming"
    numels : tuple of int
        sizes of the L parameter tensors that make up the P columns
    tail : torch.Tensor, optional
        the other eigenvalues of J̃J̃ᵀ, descending, float64; None where they are not
        known: a summary of the gradients was kept, or only the directions were wanted

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
    >>> la.basis.truncate(3).rank
    3
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
        return self.directions.shape[0]

    @property
    def vectors(self) -> torch.Tensor:
        """V `(P, K)`, orthonormal columns."""
        return self.directions.T

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
        """The basis of the first `rank` directions."""
        tail = self.tail
        if tail is not None:
            tail = torch.cat([self.eigenvalues[rank:], tail])
        truncated = replace(
            self,
            directions=self.directions[:rank],
            eigenvalues=self.eigenvalues[:rank],
            tail=tail,
        )
        if "layer_grams" in self.__dict__:  # computed already: a leading block serves
            truncated.__dict__["layer_grams"] = self.layer_grams[:, :rank, :rank]
        return truncated


class RowSketch:
    """Gradients as they come, all of them or a summary of bounded size.

    Rows are kept until `capacity` is reached. A full buffer is replaced by its `keep`
    leading singular directions, scaled by their singular values: a truncated
    incremental singular value decomposition. What is lost each time is the smallest
    part of the buffer's energy; with fewer rows than `capacity` nothing is.

    Parameters
    ----------
    numels : sequence of int
        sizes of the parameter tensors that make up the P columns
    capacity : int
        rows in memory, more than `keep`
    keep : int
        rows that survive a full buffer
    folder : Path, optional
        where a file is made to hold the rows, instead of memory; they are used a block
        of columns at a time
    """

    def __init__(
        self,
        numels: Sequence[int],
        capacity: int,
        keep: int,
        dtype: torch.dtype,
        device: torch.device,
        folder: Path | None = None,
    ) -> None:
        if capacity <= keep:
            raise ValueError(f"capacity={capacity} must exceed keep={keep}.")
        self.numels = tuple(numels)
        self.folder = folder
        shape = (capacity, sum(numels))
        if folder is None:
            self.buffer = large_tensor(shape, dtype, device)
        else:
            self.buffer = tensor_on_disk(shape, dtype, folder)
        self.keep = keep
        self.filled = 0
        self.n_samples = 0
        self.compressed = False
        self.energy = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def capacity(self) -> int:
        """Rows in memory at most."""
        return len(self.buffer)

    def empty(self, numels: Sequence[int], n_rows: int) -> RowSketch:
        """Room for so many rows of other numbers, all of which are kept."""
        like = self.buffer
        return RowSketch(numels, n_rows + 1, n_rows, like.dtype, like.device)

    def room(self, n: int) -> torch.Tensor | None:
        """Where n rows may be written before they are added, to save a copy: `(n, P)`,
        or None where there is no such place."""
        place = self.buffer[self.filled : self.filled + n]
        return place if self.folder is None and len(place) == n else None

    def add(self, rows: torch.Tensor) -> None:
        """Take in rows `(m, P)`."""
        self.n_samples += len(rows)
        while len(rows):
            if self.filled == len(self.buffer):
                self._compress()
            fitting = rows[: len(self.buffer) - self.filled]
            place = self.buffer[self.filled : self.filled + len(fitting)]
            if not _same_memory(rows, place):
                place.copy_(fitting)
            self.energy += energy(fitting, self.buffer.numel() <= SVD_LIMIT)
            self.filled += len(fitting)
            rows = rows[len(fitting) :]

    def _compress(self) -> None:
        U = torch.linalg.eigh(gram(self.buffer))[1].flip(1)[:, : self.keep]
        multiply(U.T, self.buffer, out=self.buffer)
        self.filled, self.compressed = self.keep, True

    def basis(self, n_eigenvalues: int | None, accurate: bool = False) -> NystromBasis:
        """Top right singular vectors of all rows taken in; all usable ones for None.

        `accurate` is for those who need the small eigenvalues as well. Fewer usable
        directions than `n_eigenvalues` truncate, with a `RankWarning`. The directions
        may take the place of the rows in memory: the sketch is used up.
        """
        rows = self.buffer[: self.filled]
        wanted = min(n_eigenvalues or len(rows), *rows.shape)
        # All usable directions: small eigenvalues count, so products in float64.
        accurate = accurate or n_eigenvalues is None
        precision = torch.float64 if accurate else rows.dtype
        method, found = "gram", None
        if rows.numel() <= SVD_LIMIT:
            method, found = "svd", _by_svd(rows, wanted)
        elif (
            not accurate
            and few_are_wanted(len(rows), rows.shape[1], wanted, rows.dtype)
            and self.folder is None  # which is read once only
            and has_values(rows)
        ):
            method, found = "davidson", _by_davidson(rows, wanted)
        if found is None:  # not to be had more cheaply
            method, found = "gram", _by_gram(rows, wanted, precision)
        eigenvalues, directions = found
        rank = usable_rank(eigenvalues, rows, None if method == "svd" else precision)
        check_rank(rank, n_eigenvalues, self.n_samples)
        rank = min(rank, wanted)
        if method != "svd":
            orthonormalize_(directions[:rank])
        known = has_values(self.energy)
        directions = directions[:rank]
        if n_eigenvalues is not None and rank < 0.8 * len(self.buffer):
            # Frees most of the buffer; where all directions were asked for there may
            # be no room for a copy, and little to free.
            directions = directions.clone()
        return NystromBasis(
            directions,
            eigenvalues[:rank],
            self.n_samples,
            float(self.energy) if known else float("nan"),
            "streaming" if self.compressed else method,
            self.numels,
            None if self.compressed or method == "davidson" else eigenvalues[rank:],
        )


def check_rank(rank: int, n_eigenvalues: int | None, n_samples: int) -> None:
    """Refuse gradients without a usable direction, warn of fewer than asked for."""
    if rank == 0:
        raise ValueError(
            f"All {n_samples} sampled gradients are zero: the outputs do not depend on "
            "the parameters. Check that the right parameters require gradients."
        )
    if n_eigenvalues is not None and rank < n_eigenvalues:
        warn_caller(
            f"n_eigenvalues={n_eigenvalues} exceeds the usable rank {rank} of the "
            f"{n_samples} sampled gradients; using {rank}.",
            RankWarning,
        )


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both begin at the same place, where a tensor tells."""
    return has_values(a) and a.data_ptr() == b.data_ptr() != 0


def basis_from_rows(rows: torch.Tensor, n_eigenvalues: int) -> NystromBasis:
    """Top right singular vectors of gradients `(M, P)` that are all there."""
    numels = (rows.shape[1],)
    sketch = RowSketch(numels, len(rows) + 1, len(rows), rows.dtype, rows.device)
    sketch.add(rows)
    return sketch.basis(n_eigenvalues)


def usable_rank(
    eigenvalues: torch.Tensor, rows: torch.Tensor, gram_dtype: torch.dtype | None
) -> int:
    """Number of directions that stand above the rounding noise of the rows.

    Noise of relative size ε in the entries has spectral norm of about ε√max(M, P)·σ₁;
    a Gram matrix carries its own rounding noise of about ε√M·λ₁, by its products.
    """
    if not has_values(eigenvalues):
        return min(rows.shape)
    eps = torch.finfo(rows.dtype).eps
    top = float(eigenvalues[0])
    noise = (10 * eps) ** 2 * max(rows.shape)
    if gram_dtype is not None:
        noise = max(noise, torch.finfo(gram_dtype).eps * len(rows) ** 0.5)
    return int((eigenvalues > top * noise).sum())


def _by_svd(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All eigenvalues (descending) and the top directions `(k, P)`."""
    _, singular, Vh = torch.linalg.svd(rows.double(), full_matrices=False)
    return singular.square(), Vh[:k].to(rows.dtype)


def _by_gram(
    rows: torch.Tensor, k: int, precision: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through the eigendecomposition of J̃J̃ᵀ in float64, in place; of J̃ᵀJ̃,
    whose eigenvectors are the directions themselves, where that is smaller."""
    if len(rows) > rows.shape[1]:
        eigenvalues, V = torch.linalg.eigh(gram(rows.T, precision))
        return eigenvalues.flip(0).clamp_min(0), V.flip(1)[:, :k].T.to(rows.dtype)
    eigenvalues, U = torch.linalg.eigh(gram(rows, precision))
    eigenvalues, U = eigenvalues.flip(0).clamp_min(0), U.flip(1)[:, :k]
    return eigenvalues, _directions(rows, eigenvalues[:k], U)


def _directions(
    rows: torch.Tensor, eigenvalues: torch.Tensor, U: torch.Tensor
) -> torch.Tensor:
    """v_k = J̃ᵀu_k/√λ_k `(k, P)`, in the place of the first rows; zero for λ_k = 0."""
    scale = eigenvalues.sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    multiply((U / scale * (eigenvalues > 0)).T, rows, out=rows)
    return rows[: len(eigenvalues)]


def few_are_wanted(n_rows: int, n_params: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the top k directions cost less than the Gram matrix of so many rows."""
    large = n_rows * n_params > SVD_LIMIT and n_rows <= n_params
    return large and n_rows >= FEW_RATIO * k and dtype == torch.float32


def _by_davidson(
    rows: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The top eigenvalues alone and their directions, in place, or None."""
    found = leading_eigenpairs(rows, k)
    return None if found is None else (found[0], _directions(rows, *found))
