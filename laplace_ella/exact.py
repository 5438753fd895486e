"""The exact linearised Laplace of small problems, and the distance of ELLA from it.

ε_Nyström and ε_ELLA are those of Deng et al. 2022, Sec. 5.1. V is orthonormal, so the
error of the Nyström approximation of the kernel JJᵀ is J(I − VVᵀ)Jᵀ.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from laplace_ella import _sampling, likelihood
from laplace_ella._batch import batch_size, chunks, take
from laplace_ella._resources import human_bytes
from laplace_ella._spectral import (
    lanczos,
    orthonormal_directions,
    residual_norms,
    spectral_norms,
)
from laplace_ella.layout import OutputLayout
from laplace_ella.likelihood import Family
from laplace_ella.posterior import SubspacePosterior
from laplace_ella.rows import row_dtype

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace

__all__ = [
    "MAX_BYTES",
    "ExactLaplace",
    "NystromError",
    "dense_bytes",
    "largest_curvature",
    "nystrom_error",
    "relative_errors",
]

#: Bytes that dense work may take unless told: N·C of about 10,000 for a small model.
MAX_BYTES = 2**31

#: Up to this order all eigenvalues are computed, above it the leading ones.
EIGH_LIMIT = 4096

#: How many eigenvalues Lanczos iteration is used for.
LANCZOS_LIMIT = 256

#: Rows, and columns, that enter one product of the kernel matrix.
BLOCK_ROWS, BLOCK_COLUMNS = 2048, 8192


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


def relative_errors(approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """‖κ_ELLA − κ_LLA‖ / ‖κ_LLA‖ in spectral norm `(B,)`; its mean is ε_ELLA.

    Both are covariances `(B, C, C)`. (Deng et al. 2022, Sec. 5.1)
    """
    exact = exact.double()
    return spectral_norms(approximate.double() - exact) / spectral_norms(exact)


def largest_curvature(f: torch.Tensor, family: Family) -> float:
    """c_Λ without noise and temperature: the largest ‖Λ(x)‖ over outputs `(B, C)`.

    1 for regression, the largest p(1 − p) for labels. For the softmax Λ = diag(p) −
    ppᵀ, whose largest eigenvalue lies between the two largest probabilities and is the
    root there of the secular equation Σ_c p_c²/(p_c − λ) = 1, found by bisection
    without any C×C matrix. It is at most ½.
    """
    if family.is_regression:
        return 1.0
    if family is Family.BERNOULLI:
        p = f.double().sigmoid()
        return float((p * (1 - p)).max())
    p = f.double().softmax(-1)
    if p.shape[-1] == 1:
        return 0.0
    top = p.topk(2, dim=-1).values
    low, high = top[:, 1], top[:, 0]
    for _ in range(60):
        middle = (low + high) / 2
        gaps = p - middle.unsqueeze(-1)
        terms = torch.where(gaps == 0, 0.0, p.square() / gaps)
        below = terms.sum(-1) < 1
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return float(high.max())


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
        la: ELLALaplace, loader: DataLoader, max_bytes: int = MAX_BYTES
    ) -> ExactLaplace:
        """Compute the Jacobians of all data, and what is needed of them.

        Raises
        ------
        MemoryError
            if that takes more than `max_bytes`
        """
        n_data = count(la, loader)
        needed = needed_bytes(la, n_data)
        if needed > max_bytes:
            raise MemoryError(too_large(la, n_data, needed, max_bytes))
        side = _KernelSide if n_data * la.n_outputs <= la.n_params else _WeightSide
        with working(la, loader):
            return side(la, loader, n_data)

    def _start(self, la: ELLALaplace, n_data: int) -> None:
        self.n_data, self.n_outputs = n_data, la.n_outputs
        self.n_params = la.n_params
        self.trace = self.c_kappa = self.curvature = 0.0
        posterior = la.posterior
        self.family = la._family
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
        self, posterior: SubspacePosterior, la: ELLALaplace, loader: DataLoader
    ) -> torch.Tensor:
        """The terms of ε_ELLA for a posterior, `(N_val,)`."""
        with working(la, loader):
            parts = [
                relative_errors(kappa_ella(posterior, Js), self.kappa(Js))
                for _, Js in jacobians(la, loader)
            ]
        return torch.cat(parts)

    def refit(self, posterior: SubspacePosterior) -> SubspacePosterior:
        """The posterior with the curvature of this object's data."""
        return posterior.with_(H=self.projected_curvature(posterior.basis.directions))

    def weight_error(self, posterior: SubspacePosterior) -> float:
        """ℰ = ‖Σ' − Σ‖; P×P matrices."""
        eye = torch.eye(self.n_params, dtype=torch.float64, device=self.prior.device)
        phi, kernel = _products(posterior, eye)
        approximate = posterior.joint_covariance(phi, kernel)
        return float(spectral_norms(approximate - self.covariance()))


class _KernelSide(ExactLaplace):
    """N·C ≤ P: the Jacobians (N·C, P) are kept."""

    def __init__(self, la: ELLALaplace, loader: DataLoader, n_data: int) -> None:
        self._start(la, n_data)
        C, P = self.n_outputs, self.n_params
        dtype = row_dtype(la._linearizer.fn)
        self.J = torch.empty(n_data, C, P, dtype=dtype, device=la._device)
        outputs, filled = [], 0
        for f, J in jacobians(la, loader):
            if filled + len(f) > n_data:
                raise ValueError(_not_all_once(n_data))
            self.J[filled : filled + len(f)] = J
            self._see(f, J)
            outputs.append(f)
            filled += len(f)
        if filled != n_data:
            raise ValueError(_not_all_once(n_data))
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
        return list(chunks(self.n_data, max(1, BLOCK_ROWS // self.n_outputs)))

    def _rows(self, part: slice) -> slice:
        """The rows of a matrix of order N·C that belong to examples."""
        return slice(part.start * self.n_outputs, part.stop * self.n_outputs)

    def _lower(self, rows: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Lower triangle of RRᵀ (N·C, N·C), in blocks of rows R."""
        n = self.n_data * self.n_outputs
        out = torch.zeros(n, n, dtype=torch.float64, device=self.J.device)
        for i, first in enumerate(self._blocks):
            left = rows(first)
            for second in self._blocks[: i + 1]:
                right = left if second == first else rows(second)
                out[self._rows(first), self._rows(second)] = _cross(left, right)
        return out

    @cached_property
    def _factor(self) -> torch.Tensor:
        """Cholesky factor of I + f Λ^{1/2}JD⁻¹JᵀΛ^{1/2} (N·C, N·C), in place."""
        matrix = self._lower(lambda part: self._root_rows(part, whiten=True))
        matrix.mul_(self.factor).diagonal().add_(1)
        return _cholesky_in_place(matrix)

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
        cross = torch.cat(
            [_cross(self._root_rows(part, whiten=True), flat) for part in self._blocks]
        )
        half = torch.linalg.solve_triangular(self._factor, cross, upper=False)
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


class _WeightSide(ExactLaplace):
    """P < N·C: only the products JᵀJ and JᵀΛJ (P, P) are kept."""

    def __init__(self, la: ELLALaplace, loader: DataLoader, n_data: int) -> None:
        self._start(la, n_data)
        zeros = torch.zeros(
            self.n_params, self.n_params, dtype=torch.float64, device=la._device
        )
        self.JJ, self.JLJ = zeros, zeros.clone()
        seen = 0
        for f, J in jacobians(la, loader):
            flat = J.double().flatten(0, 1)
            self.JJ += flat.T @ flat
            root = likelihood.curvature_root(f, J, self.family).flatten(0, 1)
            self.JLJ += root.T @ root
            self._see(f, J)
            seen += len(f)
        if seen != n_data:
            raise ValueError(_not_all_once(n_data))

    @cached_property
    def _factor(self) -> torch.Tensor:
        """Cholesky factor of f·JᵀΛJ + D (P, P)."""
        matrix = self.factor * self.JLJ
        matrix.diagonal().add_(self.prior)
        return _cholesky_in_place(matrix)

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


def _cross(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """abᵀ in float64 from products in the dtype whose rounding a and b carry anyway."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for part in chunks(a.shape[1], BLOCK_COLUMNS):
        total += a[:, part] @ b[:, part].T
    return total


def _cholesky_in_place(lower: torch.Tensor) -> torch.Tensor:
    """Cholesky factor in the memory of a matrix whose lower triangle is given."""
    if lower.is_cuda:
        return torch.linalg.cholesky(lower)
    # LAPACK works by columns: it gets the transpose, and of that the upper triangle.
    upper = lower.mT
    info = torch.empty((), dtype=torch.int32, device=lower.device)
    torch.linalg.cholesky_ex(upper, upper=True, out=(upper, info))
    if info.item():
        raise torch.linalg.LinAlgError(
            "The exact posterior precision is not positive definite in float64. A "
            "larger prior precision avoids this."
        )
    return lower


# Work with a fitted posterior


@contextmanager
def working(la: ELLALaplace, *loaders: Any) -> Iterator[None]:
    """The user's model, random states and flags untouched, and no graph."""
    with la._undisturbed(*loaders), torch.no_grad():
        yield


def count(la: ELLALaplace, loader: DataLoader, name: str = "loader") -> int:
    """N, the number of examples of one pass."""
    _sampling.check_loader(loader, name)
    if la.output_layout is not OutputLayout.FLAT or la.sigma_noise.numel() > 1:
        raise NotImplementedError(
            "Diagnostics are for outputs (B, C) with one sigma_noise, got "
            f"output_layout={la.output_layout.value!r} and {la.sigma_noise.numel()} "
            "noises. Diagnose a wrapped model that returns one position."
        )
    with working(la, loader):
        return len(_sampling.eligible_indices(loader))


def needed_bytes(la: ELLALaplace, n_data: int, n_val: int = 0) -> int:
    itemsize = row_dtype(la._linearizer.fn).itemsize
    return dense_bytes(n_data, la.n_outputs, la.n_params, itemsize, n_val)


def too_large(la: ELLALaplace, n_data: int, needed: int, max_bytes: int) -> str:
    return (
        f"Dense diagnostics of N={n_data}, C={la.n_outputs}, P={la.n_params} need "
        f"about {needed} bytes ({human_bytes(needed)}), more than "
        f"max_bytes={max_bytes} ({human_bytes(max_bytes)}). Pass a larger max_bytes=, "
        "a loader over fewer examples, or diagnose(..., method='stochastic') without "
        "val_loader."
    )


def _not_all_once(n_data: int) -> str:
    return (
        f"The loader did not yield each of its {n_data} examples once. Pass a loader "
        "without replacement and with one example an index."
    )


def jacobians(
    la: ELLALaplace, loader: DataLoader
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs (b, C) and Jacobians (b, C, P) of a few examples after the other."""
    linearizer = la._linearizer
    at_once = linearizer._rows_at_once(rows_per_example=la.n_outputs)
    for x, _ in la._batches(loader, "[Jacobians]", False):
        size = batch_size(x, la.dict_key_x)
        for part in chunks(size, at_once):
            yield linearizer.jacobian(take(x, part, size))


def _products(
    posterior: SubspacePosterior, Js: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the posterior needs of Jacobians (..., C, P), in float64."""
    weights = posterior.kernel_weights()
    weighted = Js if weights is None else Js * weights.to(Js)
    phi = (weighted @ posterior.basis.vectors.to(Js)).double()
    if not posterior.needs_kernel:
        return phi, None
    return phi, (weighted.double() @ Js.double().mT)


def kappa_ella(posterior: SubspacePosterior, Js: torch.Tensor) -> torch.Tensor:
    """κ_ELLA(x, x) (B, C, C) for Jacobians (B, C, P)."""
    phi, kernel = _products(posterior, Js)
    return posterior.function_values(phi[..., 0], phi, kernel).covariance()
