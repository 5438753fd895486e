"""The exact linearised Laplace from the kernel matrix of all outputs of all data.

Index legend: N data, C outputs, P parameters, K rank, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from laplace_ella.diagnostics import exact
from laplace_ella.diagnostics.dense_algebra import cholesky_in_place, cross
from laplace_ella.diagnostics.jacobians import jacobians, not_all_once
from laplace_ella.posterior.likelihood import Family
from laplace_ella.support.batches import chunks

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace

__all__ = ["KernelSide"]


class KernelSide(exact.ExactLaplace):
    """N·C ≤ P: the Jacobians (N·C, P) are kept."""

    def __init__(
        self,
        la: ELLALaplace,
        loader: DataLoader,
        n_data: int,
        progress_bar: bool = False,
    ) -> None:
        self._start(la, n_data)
        C, P = self.n_outputs, self.n_params
        dtype = la.fitter.linearizer.dtype
        self.J = torch.empty(
            n_data, C, P, dtype=dtype, device=la.fitter.linearizer.device
        )
        outputs, filled = [], 0
        for f, J in jacobians(la, loader, progress_bar):
            if filled + len(f) > n_data:
                raise ValueError(not_all_once(n_data))
            self.J[filled : filled + len(f)] = J
            self._see(f, J)
            outputs.append(f)
            filled += len(f)
        if filled != n_data:
            raise ValueError(not_all_once(n_data))
        self.p = self.family.probabilities(torch.cat(outputs).double())

    def _root_rows(self, part: slice, whiten: bool) -> torch.Tensor:
        """Λ^{1/2}J (b·C, P) of a few examples, times D^{-1/2} if `whiten`.

        For the softmax the rows of a root are √p_c (J_c − Σ_c p_c J_c).
        """
        J = self.J[part]
        p = self.p[part].unsqueeze(-1).to(J)
        if self.family is Family.CATEGORICAL:
            J = p.sqrt() * (J - (p.mT @ J))
        elif self.family is Family.BERNOULLI:
            J = (p * (1 - p)).sqrt() * J
        if whiten and self.prior.numel() > 1:
            J = J * self.prior.rsqrt().to(J)
        elif whiten:
            J = J / math.sqrt(float(self.prior))
        return J.flatten(0, 1)

    @cached_property
    def _blocks(self) -> list[slice]:
        return list(chunks(self.n_data, max(1, exact.BLOCK_ROWS // self.n_outputs)))

    def _rows(self, part: slice) -> slice:
        """The rows of a matrix of order N·C that belong to examples."""
        return slice(part.start * self.n_outputs, part.stop * self.n_outputs)

    def _cross(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return cross(a, b, exact.BLOCK_COLUMNS)

    def _lower(self, rows: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Lower triangle of RRᵀ (N·C, N·C), in blocks of rows R."""
        n = self.n_data * self.n_outputs
        out = torch.zeros(n, n, dtype=torch.float64, device=self.J.device)
        for i, first in enumerate(self._blocks):
            left = rows(first)
            for second in self._blocks[: i + 1]:
                right = left if second == first else rows(second)
                out[self._rows(first), self._rows(second)] = self._cross(left, right)
        return out

    @cached_property
    def _factor(self) -> torch.Tensor:
        """Cholesky factor of I + f Λ^{1/2}JD⁻¹JᵀΛ^{1/2} (N·C, N·C), in place."""
        matrix = self._lower(lambda part: self._root_rows(part, whiten=True))
        matrix.mul_(self.factor).diagonal().add_(1)
        return cholesky_in_place(matrix)

    def apply(self, v: torch.Tensor) -> torch.Tensor:
        J = self.J.flatten(0, 1)
        return (v.to(J) @ J.T) @ J

    def energies(self, directions: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(directions), dtype=torch.float64, device=self.J.device)
        for part in self._blocks:
            phi = self.J[part].flatten(0, 1) @ directions.T.to(self.J)
            total += phi.double().square().sum(0)
        return total

    def projected_curvature(self, directions: torch.Tensor) -> torch.Tensor:
        K = len(directions)
        H = torch.zeros(K, K, dtype=torch.float64, device=self.J.device)
        for part in self._blocks:
            rows = self._root_rows(part, whiten=False)
            phi = (rows @ directions.T.to(rows)).double()
            H += phi.T @ phi
        return H

    def kappa(self, Js: torch.Tensor) -> torch.Tensor:
        # κ = J_xD⁻¹J_xᵀ − f WᵀA⁻¹W, W = Λ^{1/2}JD⁻¹J_xᵀ, A = I + f Λ^{1/2}JD⁻¹JᵀΛ^{1/2}
        B, C, _ = Js.shape
        white = Js * self.prior.rsqrt().to(Js)
        flat = white.flatten(0, 1)
        W = torch.cat(
            [
                self._cross(self._root_rows(part, whiten=True), flat)
                for part in self._blocks
            ]
        )
        half = torch.linalg.solve_triangular(self._factor, W, upper=False)
        half = half.unflatten(1, (B, C))  # (N·C, B, C)
        white = white.double()
        reduction = torch.einsum("nbc,nbd->bcd", half, half)
        return white @ white.mT - self.factor * reduction

    def covariance(self) -> torch.Tensor:
        rows = torch.cat([self._root_rows(part, whiten=True) for part in self._blocks])
        half = torch.linalg.solve_triangular(self._factor, rows.double(), upper=False)
        root = self.prior.rsqrt().expand(self.n_params)
        inner = torch.diag(torch.ones_like(root)) - self.factor * half.T @ half
        return root.unsqueeze(1) * inner * root

    def gram(self) -> torch.Tensor:
        return self._lower(lambda part: self.J[part].flatten(0, 1))
