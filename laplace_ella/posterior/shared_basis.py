"""One basis of the gradients that several processes hold.

No process has all gradients J̃ (M, P) in memory, unless they are few. Each gets all rows
of its slice of the P columns, the Gram matrix J̃J̃ᵀ is the sum of those of the slices,
and each makes its slice of the directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from laplace_ella.posterior import basis
from laplace_ella.posterior.basis import (
    NystromBasis,
    RowSketch,
    check_rank,
    usable_rank,
)
from laplace_ella.posterior.products import gram, multiply, orthonormalize_
from laplace_ella.support.collective import Collective

__all__ = ["SharedRowSketch"]


class SharedRowSketch(RowSketch):
    """Gradients of one process, whose basis is that of the gradients of all.

    Parameters
    ----------
    collective : Collective
    n_rows : int
        how many gradients this process will have
    numels, capacity, keep, dtype, device
        as for `RowSketch`, which this is in every process
    """

    def __init__(
        self,
        collective: Collective,
        n_rows: int,
        numels: Sequence[int],
        capacity: int,
        keep: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.collective, self.limits = collective, (capacity, keep)
        capacity, keep = min(capacity, n_rows + 1), min(keep, n_rows)
        super().__init__(numels, capacity, keep, dtype, device)

    def empty(self, numels: Sequence[int], n_rows: int) -> SharedRowSketch:
        like, limits = self.buffer, (n_rows + 1, n_rows)
        return SharedRowSketch(
            self.collective, n_rows, numels, *limits, like.dtype, like.device
        )

    def basis(self, n_eigenvalues: int | None, accurate: bool = False) -> NystromBasis:
        """Top right singular vectors of the rows of all processes, the same in all;
        otherwise as that of `RowSketch`."""
        own = (self.filled, self.n_samples, self.compressed, float(self.energy))
        filled, samples, compressed, energies = zip(
            *self.collective.meet("sampled gradients", own), strict=True
        )
        n_rows, width = sum(filled), self.buffer.shape[1]
        n_samples, trace = sum(samples), sum(energies)
        accurate = accurate or n_eigenvalues is None
        precision = torch.float64 if accurate else self.buffer.dtype
        small = n_rows * width <= basis.SVD_LIMIT
        found = None
        if any(compressed) or small:
            limits = self.limits if any(compressed) else (n_rows + 1, n_rows)
            whole = self._in_first(limits)
            if whole is not None:
                whole.n_samples, whole.compressed = n_samples, any(compressed)
                found = RowSketch.basis(whole, n_eigenvalues, accurate)
            return self._told(found, n_samples, trace)
        if n_rows > width:
            found = self._by_parameters(n_eigenvalues, precision, n_rows)
            return self._told(found, n_samples, trace)
        directions, eigenvalues = self._by_slices(n_eigenvalues, precision, n_rows)
        rank = len(directions)
        return NystromBasis(
            directions,
            eigenvalues[:rank],
            n_samples,
            trace,
            "gram",
            self.numels,
            eigenvalues[rank:],
        )

    def _in_first(self, limits: tuple[int, int]) -> RowSketch | None:
        """In the first process all rows, or a summary of the processes' summaries."""
        own, like = self.buffer[: self.filled], self.buffer
        whole = None
        if self.collective.rank == 0:
            whole = self
            if not self.compressed:  # it has room for its own rows only
                whole = RowSketch(self.numels, *limits, like.dtype, like.device)
                whole.add(own)
        for rows in self.collective.to_first("rows of the basis", own):
            assert whole is not None
            whole.add(rows)
        return whole

    def _by_parameters(
        self, n_eigenvalues: int | None, precision: torch.dtype, n_rows: int
    ) -> NystromBasis | None:
        """The eigenvectors of J̃ᵀJ̃ (P, P), which is smaller than the rows."""
        own = self.buffer[: self.filled]
        total = self.collective.sum("Gram matrix", gram(own.T, precision))
        if self.collective.rank > 0:
            return None
        eigenvalues, vectors = torch.linalg.eigh(total)
        eigenvalues = eigenvalues.flip(0).clamp_min(0)
        rank = self._rank(eigenvalues, n_eigenvalues, precision, n_rows)
        directions = vectors.flip(1)[:, :rank].T.to(own.dtype).contiguous()
        orthonormalize_(directions)
        return NystromBasis(
            directions,
            eigenvalues[:rank],
            n_rows,
            0.0,
            "gram",
            self.numels,
            eigenvalues[rank:],
        )

    def _by_slices(
        self, n_eigenvalues: int | None, precision: torch.dtype, n_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Directions `(K, P)` and all eigenvalues, from slices of the columns."""
        collective, device = self.collective, self.buffer.device
        width, dtype = self.buffer.shape[1], self.buffer.dtype
        own = collective.columns("rows of the basis", self.buffer[: self.filled])
        self.buffer = self.buffer[:0].clone()  # frees the rows
        total = collective.sum("Gram matrix", gram(own, precision))
        scaled = eigenvalues = None
        if collective.rank == 0:
            eigenvalues, U = torch.linalg.eigh(total)
            eigenvalues, U = eigenvalues.flip(0).clamp_min(0), U.flip(1)
            rank = self._rank(eigenvalues, n_eigenvalues, precision, n_rows, width)
            scaled = (U[:, :rank] / eigenvalues[:rank].sqrt()).T.contiguous()
        del total
        eigenvalues = collective.broadcast("eigenvalues", eigenvalues, device)
        scaled = collective.broadcast("eigenvectors", scaled, device)  # (K, M)
        rank = len(scaled)
        multiply(scaled, own, out=own)
        own = own[:rank]
        # Dividing by √λ_k loses digits for small λ_k; as in `orthonormalize_`.
        total = collective.sum("products of directions", gram(own))
        factor, info = torch.linalg.cholesky_ex(total)
        failed = bool(info.any())
        if not failed:
            eye = torch.eye(rank, dtype=factor.dtype, device=device)
            inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
            multiply(inverse, own, out=own)
        directions = torch.empty(rank, width, dtype=dtype, device=device)
        parts = collective.everyones("directions", own.T)
        for columns, part in zip(collective.column_slices(width), parts, strict=True):
            assert part is not None
            directions[:, columns] = part.T
        if failed:  # too close to singular for a Gram matrix
            orthonormalize_(directions)
            directions = collective.broadcast("directions", directions, device)
        return directions, eigenvalues

    def _rank(
        self,
        eigenvalues: torch.Tensor,
        n_eigenvalues: int | None,
        precision: torch.dtype,
        n_rows: int,
        width: int | None = None,
    ) -> int:
        """K, of so many rows."""
        width = width or self.buffer.shape[1]
        rows = torch.empty(n_rows, width, dtype=self.buffer.dtype, device="meta")
        rank = usable_rank(eigenvalues, rows, precision)
        check_rank(rank, n_eigenvalues, n_rows)
        return min(rank, n_eigenvalues or n_rows)

    def _told(
        self, found: NystromBasis | None, n_samples: int, trace: float
    ) -> NystromBasis:
        """The basis of the first process, for all of them."""
        collective, device = self.collective, self.buffer.device
        method, complete = collective.first(
            "basis", None if found is None else (found.method, found.tail is not None)
        )

        def tensor(name: str) -> torch.Tensor:
            value = None if found is None else getattr(found, name)
            return collective.broadcast(name, value, device)

        return NystromBasis(
            tensor("directions"),
            tensor("eigenvalues"),
            n_samples,
            trace,
            method,
            self.numels,
            tensor("tail") if complete else None,
        )
