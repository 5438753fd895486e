"""The exact linearised Laplace of small problems, and the distance of ELLA from it.

`ExactLaplace` says what can be asked; the two ways to compute it are in `_kernel_side`
and `_weight_side`.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from laplace_ella.diagnostics.jacobians import (
    count,
    jacobians,
    kappa_ella,
    products,
    working,
)
from laplace_ella.diagnostics.nystrom_error import (
    NystromError,
    nystrom_error,
    relative_errors,
)
from laplace_ella.diagnostics.spectral import (
    lanczos,
    orthonormal_directions,
    residual_norms,
    spectral_norms,
)
from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.posterior.likelihood import largest_curvature
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.resources import human_bytes, parse_bytes

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace

__all__ = [
    "MEMORY_BUDGET",
    "ExactLaplace",
    "NystromError",
    "dense_bytes",
    "largest_curvature",
    "nystrom_error",
    "relative_errors",
]

#: Memory that dense work may take unless told: N·C of about 10,000 for a small model.
MEMORY_BUDGET = "2 GiB"

#: Up to this order all eigenvalues are computed, above it the leading ones.
EIGH_LIMIT = 4096

#: How many eigenvalues Lanczos iteration is used for.
LANCZOS_LIMIT = 256

#: Rows, and columns, that enter one product of the kernel matrix.
BLOCK_ROWS, BLOCK_COLUMNS = 2048, 8192


def dense_bytes(
    n_data: int, n_outputs: int, n_params: int, itemsize: int = 4, n_val: int = 0
) -> int:
    """Peak memory of dense work, about: Jacobians, matrices and work space.

    With n = N·C: all Jacobians and an n×n matrix if n ≤ P, else three P×P matrices; two
    more matrices while all eigenvalues are computed, up to an order of 4,096.
    """
    n = n_data * n_outputs
    order = min(n, n_params)
    matrices = (1 if n <= n_params else 3) + (2 if order <= EIGH_LIMIT else 0)
    jacobians = n * n_params * itemsize if n <= n_params else 0
    at_once = 16 * order * min(n_val, 64) * n_outputs  # products with validation data
    work = 4 * min(BLOCK_ROWS, n) * n_params * itemsize
    return jacobians + 8 * matrices * order**2 + at_once + work


def needed_bytes(la: ELLALaplace, n_data: int, n_val: int = 0) -> int:
    itemsize = la.fitter.linearizer.dtype.itemsize
    return dense_bytes(n_data, la.n_outputs, la.n_params, itemsize, n_val)


def too_large(la: ELLALaplace, n_data: int, needed: int, budget: int) -> str:
    return (
        f"Dense diagnostics of N={n_data}, C={la.n_outputs}, P={la.n_params} need "
        f"about {needed} bytes ({human_bytes(needed)}), more than "
        f"memory_budget={budget} ({human_bytes(budget)}). Pass a larger "
        "memory_budget=, a loader over fewer examples, or diagnose(..., "
        "method='stochastic') without val_loader."
    )


class ExactLaplace(ABC):
    """The exact linearised Laplace of a small problem, as a yardstick.

    Made by `from_loader`, from one pass over the data. It works with the smaller of the
    kernel matrix `(N·C, N·C)` and the weight precision `(P, P)`, and depends on the
    model, the data, the prior, the noise and the temperature, not on any basis: one
    object serves all M and K.

    Attributes
    ----------
    n_data, n_outputs, n_params : int
        N, C and P
    trace, c_kappa : float
        trace and largest diagonal entry of JJᵀ
    curvature : float
        largest ‖Λ(x)‖, without noise and temperature
    factor : float
        1/(σ²T)
    prior : torch.Tensor
        prior precision, `(1,)` or `(P,)`

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> from laplace_ella.diagnostics import ExactLaplace
    >>> model = torch.nn.Linear(2, 1)
    >>> loader = DataLoader(TensorDataset(torch.randn(9, 2), torch.randn(9, 1)), 3)
    >>> la = Laplace(model, "regression", "all", "nystrom", n_eigenvalues=2)
    >>> la.fit(loader)
    >>> exact = ExactLaplace.from_loader(la, loader)
    >>> [error.relative < 1 for error in exact.nystrom_errors(la.basis.directions)]
    [True]
    """

    n_data: int
    n_outputs: int
    n_params: int
    trace: float
    c_kappa: float
    curvature: float
    factor: float
    prior: torch.Tensor

    @staticmethod
    def from_loader(
        la: ELLALaplace,
        loader: DataLoader,
        memory_budget: int | float | str = MEMORY_BUDGET,
        progress_bar: bool = False,
    ) -> ExactLaplace:
        """Compute the Jacobians of all data, and what is needed of them.

        Raises
        ------
        InsufficientMemoryError
            if that takes more than `memory_budget`
        """
        n_data = count(la, loader)
        needed = needed_bytes(la, n_data)
        budget = parse_bytes(memory_budget)
        if needed > budget:
            raise InsufficientMemoryError(too_large(la, n_data, needed, budget))
        # The sides are subclasses of this class, so they can only be imported later.
        from laplace_ella.diagnostics.kernel_side import KernelSide
        from laplace_ella.diagnostics.weight_side import WeightSide

        side = KernelSide if n_data * la.n_outputs <= la.n_params else WeightSide
        with working(la, loader):
            return side(la, loader, n_data, progress_bar)

    def _start(self, la: ELLALaplace, n_data: int) -> None:
        self.n_data, self.n_outputs = n_data, la.n_outputs
        self.n_params = la.n_params
        self.trace = self.c_kappa = self.curvature = 0.0
        posterior = la.posterior
        self.family = la.fitter.observation.family
        self.factor = float(posterior.factor)
        self.prior = posterior.prior_diagonal().detach().double()

    def _see(self, f: torch.Tensor, J: torch.Tensor) -> None:
        """Take in outputs (b, C) and Jacobians (b, C, P) of a few examples."""
        diagonal = J.double().square().sum(-1)
        self.trace += float(diagonal.sum())
        self.c_kappa = max(self.c_kappa, float(diagonal.max()))
        self.curvature = max(self.curvature, largest_curvature(f, self.family))

    @property
    def c_lambda(self) -> float:
        """c_Λ, with noise and temperature."""
        return self.factor * self.curvature

    # What the two sides compute in their own way

    @abstractmethod
    def apply(self, v: torch.Tensor) -> torch.Tensor:
        """v ↦ JᵀJv for rows `(S, P)`."""

    @abstractmethod
    def energies(self, directions: torch.Tensor) -> torch.Tensor:
        """‖Jv_k‖² of directions `(K, P)`: `(K,)`, float64."""

    @abstractmethod
    def projected_curvature(self, directions: torch.Tensor) -> torch.Tensor:
        """Σ φᵀΛφ `(K, K)` for directions `(K, P)`, float64."""

    @abstractmethod
    def kappa(self, Js: torch.Tensor) -> torch.Tensor:
        """κ_LLA(x, x) `(B, C, C)`, float64, for Jacobians `(B, C, P)`."""

    @abstractmethod
    def covariance(self) -> torch.Tensor:
        """Σ `(P, P)`, float64."""

    @abstractmethod
    def gram(self) -> torch.Tensor:
        """Lower triangle of the smaller of JJᵀ and JᵀJ, float64."""

    # What follows from it

    def nystrom_errors(
        self,
        directions: torch.Tensor,
        ranks: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
    ) -> list[NystromError]:
        """ε_Nyström of the first k directions of Vᵀ `(K, P)`, for every k of `ranks`.

        The spectral norms come from Lanczos iteration with the stored matrices, run
        until the residual is at the rounding error of the Jacobians.
        """
        ranks = [len(directions)] if ranks is None else list(ranks)
        directions = orthonormal_directions(directions, self.prior.device)
        tol = 1e-9 if directions.dtype == torch.float64 else 1e-5
        norms, errors = residual_norms(
            self.apply, directions, [*ranks, 0], generator, n_steps=200, tol=tol
        )
        within = self.energies(directions).cumsum(0)
        return [
            NystromError(
                float(norms[i]),
                float(norms[-1]),
                max(0.0, self.trace - float(within[k - 1])),
                self.trace,
                float(errors[i]),
            )
            for i, k in enumerate(ranks)
        ]

    def eigenvalue(self, index: int) -> float | None:
        """The eigenvalue of JJᵀ with this index, from 0 in descending order.

        None where it is too costly: matrices above an order of 4,096 give only their
        leading eigenvalues, by Lanczos iteration.
        """
        order = min(self.n_data * self.n_outputs, self.n_params)
        if index >= order:
            return 0.0
        if order <= EIGH_LIMIT:
            eigenvalues = torch.linalg.eigvalsh(self.gram())  # of the lower triangle
            return max(0.0, float(eigenvalues[order - 1 - index]))
        if index >= LANCZOS_LIMIT:
            return None
        device = self.prior.device
        start = torch.randn(
            1,
            self.n_params,
            generator=torch.Generator(device).manual_seed(0),
            dtype=torch.float64,
            device=device,
        )
        values, _ = lanczos(self.apply, start, index + 1, 3 * index + 100, tol=1e-4)
        return float(values[0, index])

    def covariances(self, la: ELLALaplace, loader: DataLoader) -> torch.Tensor:
        """κ_LLA(x, x) of all inputs of a loader, `(N_val, C, C)`, float64."""
        with working(la, loader):
            return torch.cat([self.kappa(Js) for _, Js in jacobians(la, loader)])

    def ella_errors(
        self,
        posterior: SubspacePosterior,
        la: ELLALaplace,
        loader: DataLoader,
        progress_bar: bool = False,
    ) -> torch.Tensor:
        """The terms of ε_ELLA for a posterior, `(N_val,)`."""
        with working(la, loader):
            parts = [
                relative_errors(kappa_ella(posterior, Js), self.kappa(Js))
                for _, Js in jacobians(la, loader, progress_bar)
            ]
        return torch.cat(parts)

    def refit(self, posterior: SubspacePosterior) -> SubspacePosterior:
        """The posterior with the curvature of this object's data."""
        return posterior.with_(H=self.projected_curvature(posterior.basis.directions))

    def weight_error(self, posterior: SubspacePosterior) -> float:
        """ℰ = ‖Σ' − Σ‖; P×P matrices."""
        eye = torch.eye(self.n_params, dtype=torch.float64, device=self.prior.device)
        approximate = posterior.joint_covariance(*products(posterior, eye))
        return float(spectral_norms(approximate - self.covariance()))
