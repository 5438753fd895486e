"""The exact linearised Laplace from the precision of all weights.

Index legend: N data, C outputs, P parameters, K rank, B batch.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from laplace_ella.diagnostics import exact
from laplace_ella.diagnostics.dense_algebra import cholesky_in_place
from laplace_ella.diagnostics.jacobians import jacobians, not_all_once
from laplace_ella.posterior.likelihood import curvature_root

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace

__all__ = ["WeightSide"]


class WeightSide(exact.ExactLaplace):
    """P < N·C: only the products JᵀJ and JᵀΛJ (P, P) are kept."""

    def __init__(
        self,
        la: ELLALaplace,
        loader: DataLoader,
        n_data: int,
        progress_bar: bool = False,
    ) -> None:
        self._start(la, n_data)
        zeros = torch.zeros(
            self.n_params,
            self.n_params,
            dtype=torch.float64,
            device=la.fitter.linearizer.device,
        )
        self.JJ, self.JLJ = zeros, zeros.clone()
        seen = 0
        for f, J in jacobians(la, loader, progress_bar):
            flat = J.double().flatten(0, 1)
            self.JJ += flat.T @ flat
            root = curvature_root(f, J, self.family).flatten(0, 1)
            self.JLJ += root.T @ root
            self._see(f, J)
            seen += len(f)
        if seen != n_data:
            raise ValueError(not_all_once(n_data))

    @cached_property
    def _factor(self) -> torch.Tensor:
        """Cholesky factor of f·JᵀΛJ + D (P, P)."""
        matrix = self.factor * self.JLJ
        matrix.diagonal().add_(self.prior)
        return cholesky_in_place(matrix)

    def apply(self, v: torch.Tensor) -> torch.Tensor:
        return v.double() @ self.JJ

    def energies(self, directions: torch.Tensor) -> torch.Tensor:
        v = directions.to(self.JJ)
        return ((v @ self.JJ) * v).sum(1)

    def projected_curvature(self, directions: torch.Tensor) -> torch.Tensor:
        v = directions.to(self.JJ)
        return v @ self.JLJ @ v.T

    def kappa(self, Js: torch.Tensor) -> torch.Tensor:
        flat = Js.double().flatten(0, 1)
        half = torch.linalg.solve_triangular(self._factor, flat.T, upper=False)
        half = half.unflatten(1, Js.shape[:2])
        return torch.einsum("pbc,pbd->bcd", half, half)

    def covariance(self) -> torch.Tensor:
        return torch.cholesky_inverse(self._factor)

    def gram(self) -> torch.Tensor:
        return self.JJ
