"""The linear model of which linearised Laplace is the posterior, and leaving one out.

Linearised Laplace is exact Bayesian inference in the model f = f̂ + φz with the prior
z ~ N(−d, δ⁻¹), where f̂ are the outputs of the network, z = Vᵀ(θ − θ̂) and
d = Vᵀ(θ̂ − μ₀). Its log posterior is concave. At its mode z*, with outputs f, residuals
r = ∇loss(f) and curvature H* = Σ φᵀΛφ, leaving out example i is one Newton step:

    A_i = φ_i(H* + δ)⁻¹φ_iᵀ,   V_i = A_i(I − Λ_iA_i)⁻¹,   f_i without i ≈ f_i + V_i r_i

and V_i is its covariance; for regression this is exact.

Index legend: N examples, S positions, C outputs, K features, Q = S·C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from laplace_ella.errors import NumericalWarning, warn_caller
from laplace_ella.posterior import likelihood
from laplace_ella.posterior.fit import TrainingRows
from laplace_ella.posterior.observation import FunctionValues, ObservationModel

__all__ = [
    "LeaveOneOut",
    "LinearModel",
    "Mode",
    "find_mode",
    "leave_one_out",
    "mode_at",
]

#: Norm of the gradient at a mode, relative to that of its two parts.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class LinearModel:
    """The training data of the linear model, float64.

    Attributes
    ----------
    rows : TrainingRows
        outputs f̂ `(N, S, C)`, features φ `(N, S, C, K)` and targets `(N, S, ...)`, in
        coordinates in which the prior is scalar
    shift : torch.Tensor
        d `(K,)`: the prior of z is N(−d, δ⁻¹)
    square_distance : float
        (θ̂ − μ₀)ᵀD(θ̂ − μ₀) over all parameters, for D with δ = 1
    observation : ObservationModel
    scale : torch.Tensor, optional
        L `(K, K)`: z is Lᵀ times the coordinates in the basis; the identity if None
    """

    rows: TrainingRows
    shift: torch.Tensor
    square_distance: float
    observation: ObservationModel
    scale: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: TrainingRows,
        shift: torch.Tensor,
        square_distance: float,
        observation: ObservationModel,
        precision: torch.Tensor | None = None,
    ) -> LinearModel:
        """Return the model whose prior has δ times this precision `(K, K)` in the
        coordinates of the features; the identity by default."""
        phi, shift, L = rows.phi.double(), shift.double(), None
        if precision is not None:  # z → Lᵀz, LLᵀ = precision
            L = torch.linalg.cholesky(precision.double())
            phi = torch.linalg.solve_triangular(L.mT, phi, upper=True, left=False)
            shift = L.mT @ shift
        rows = TrainingRows(rows.f.double(), phi, rows.y)
        return cls(rows, shift, square_distance, observation, L)

    @property
    def factor(self) -> torch.Tensor:
        """1/(σ²T), a scalar or one per output `(C,)`."""
        observation = self.observation
        return 1 / (observation.sigma_noise.double().square() * observation.temperature)

    @property
    def known(self) -> torch.Tensor | None:
        """Which positions have a target, `(N, S)`; None for all."""
        y = self.rows.y
        known = likelihood.observed(y.flatten(0, 1), self.observation.family)
        return None if known is None else known.unflatten(0, y.shape[:2])

    def outputs(self, z: torch.Tensor) -> torch.Tensor:
        """Return f̂ + φz `(N, S, C)`."""
        return self.rows.f + self.rows.phi @ z

    def loss(self, f: torch.Tensor) -> torch.Tensor:
        """Return the negative log likelihood of outputs, up to a constant."""
        f, y = f.flatten(0, 1), self.rows.y.flatten(0, 1)
        losses = likelihood.losses(f, y, self.observation.family)
        return (self.factor * losses).sum()

    def residuals(self, f: torch.Tensor) -> torch.Tensor:
        """Return its derivative by the outputs, `(N, S, C)`."""
        y, family = self.rows.y, self.observation.family
        if family.is_regression:
            return self.factor * (f - y.double())
        r = likelihood.target_cotangents(f.flatten(0, 1), y.flatten(0, 1), family)
        return self.factor * r.view_as(f)

    def gradient(self, f: torch.Tensor) -> torch.Tensor:
        """Return its derivative by z, `(K,)`."""
        return self.rows.phi.flatten(0, 2).mT @ self.residuals(f).flatten()

    def curvature(self, f: torch.Tensor) -> torch.Tensor:
        """Return H = Σ φᵀΛφ/(σ²T) `(K, K)` at outputs."""
        family, rows = self.observation.family, f.flatten(0, 1)
        psi = likelihood.curvature_root(rows, self.rows.phi.flatten(0, 1), family)
        psi = psi * self.factor.sqrt().reshape(-1, 1)
        if (known := self.known) is not None:
            psi = psi * known.flatten()[:, None, None]
        psi = psi.flatten(0, 1)
        return psi.mT @ psi

    def in_the_basis(self, H: torch.Tensor) -> torch.Tensor:
        """Return Σ φᵀΛφ `(K, K)` in the coordinates of the basis; one noise."""
        H = H / self.factor
        return H if self.scale is None else self.scale @ H @ self.scale.mT

    def blocks(self, f: torch.Tensor) -> torch.Tensor:
        """Return Λ of every example, `(N, Q, Q)`; positions do not mix."""
        N, S, C = f.shape
        eye = torch.eye(C, dtype=f.dtype, device=f.device).expand(N * S, C, C)
        root = likelihood.curvature_root(f.flatten(0, 1), eye, self.observation.family)
        blocks = (self.factor * (root.mT @ root)).view(N, S, C, C)
        if (known := self.known) is not None:
            blocks = blocks * known[..., None, None]
        if S == 1:
            return blocks.squeeze(1)
        apart = torch.eye(S, dtype=f.dtype, device=f.device)
        return torch.einsum("nscd,st->nsctd", blocks, apart).reshape(N, S * C, S * C)

    @property
    def training_precision(self) -> float:
        """δ_train; at least 1e-6, as a network without a regulariser has none."""
        if not self.square_distance:
            return 1e-6
        found = -float(self.gradient(self.rows.f) @ self.shift) / self.square_distance
        return max(found, 1e-6)


# The mode


@dataclass(frozen=True)
class Mode:
    """The mode of the linear model for a prior precision.

    Attributes
    ----------
    precision : float
        δ
    z : torch.Tensor
        `(K,)`
    f : torch.Tensor
        outputs `(N, S, C)`
    H : torch.Tensor
        curvature there, times 1/(σ²T), `(K, K)`
    """

    precision: float
    z: torch.Tensor
    f: torch.Tensor
    H: torch.Tensor

    @cached_property
    def root(self) -> torch.Tensor:
        """L `(K, K)` with LLᵀ = H + δ."""
        eye = torch.eye(len(self.H), dtype=self.H.dtype, device=self.H.device)
        return torch.linalg.cholesky(self.H + self.precision * eye)


def mode_at(model: LinearModel, z: torch.Tensor, precision: float) -> Mode:
    """Return z as if it were the mode: that of the network is z = 0."""
    f = model.outputs(z)
    return Mode(precision, z, f, model.curvature(f))


def find_mode(
    model: LinearModel, precision: float, start: Mode, n_steps: int = 100
) -> Mode:
    """Return the mode for a prior precision δ.

    L-BFGS in the coordinates in which H + δ of the start is the identity, then Newton
    steps. Where the start's H is far from the curvature on the way, it is computed
    anew.
    """
    error, scale = math.inf, 1.0
    for _ in range(4):
        z = _descend(model, replace(start, precision=precision), n_steps)
        start = mode_at(model, z, precision)
        L, f = start.root, start.f
        for step in range(4):
            slope = model.gradient(f)
            gradient = slope + precision * (z + model.shift)
            error, scale = float(gradient.norm()), float(slope.norm()) + 1e-3
            if error <= TOLERANCE * scale:
                return replace(start, z=z, f=f) if step else start
            z = z - torch.cholesky_solve(gradient.unsqueeze(-1), L).squeeze(-1)
            f = model.outputs(z)
    if error > 100 * TOLERANCE * scale:
        warn_caller(
            f"The mode of the linearised model for prior precision {precision:.3g} was "
            f"not found to full accuracy: the gradient's norm is {error:.2g}, that of "
            f"the loss alone {scale:.2g}.",
            NumericalWarning,
        )
    return start


def _descend(model: LinearModel, start: Mode, n_steps: int) -> torch.Tensor:
    """Return z after L-BFGS."""
    L, delta, d = start.root, start.precision, model.shift

    def back(u: torch.Tensor) -> torch.Tensor:  # z = z₀ + L⁻ᵀu
        step = torch.linalg.solve_triangular(L.mT, u.unsqueeze(-1), upper=True)
        return start.z + step.squeeze(-1)

    u = torch.zeros_like(start.z)
    optimizer = torch.optim.LBFGS(
        [u],
        max_iter=n_steps,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        z = back(u)
        f = model.outputs(z)
        gradient = model.gradient(f) + delta * (z + d)
        column = torch.linalg.solve_triangular(L, gradient.unsqueeze(-1), upper=False)
        u.grad = column.squeeze(-1)
        return model.loss(f) + 0.5 * delta * (z + d).square().sum()

    optimizer.step(closure)
    return back(u.detach())


# Leaving out


@dataclass(frozen=True)
class LeaveOneOut:
    """What each training example is predicted without it.

    Attributes
    ----------
    logits : torch.Tensor
        outputs `(N, S, C)`
    covariance : torch.Tensor
        V of each example `(N, Q, Q)`, outputs of all its positions
    """

    logits: torch.Tensor
    covariance: torch.Tensor

    def function_values(self) -> FunctionValues:
        """Return the Gaussian over the outputs of every position, `(N·S, C)`."""
        N, S, C = self.logits.shape
        covariance = self.covariance
        if S > 1:
            covariance = covariance.view(N, S, C, S, C)
            covariance = torch.einsum("nscsd->nscd", covariance)
        covariance = covariance.reshape(N * S, C, C)
        none = covariance.new_zeros(N * S, C, 0)
        return FunctionValues(self.logits.flatten(0, 1), none, covariance)


def leave_one_out(model: LinearModel, mode: Mode) -> LeaveOneOut:
    """Return outputs and covariances of each example without it, by one Newton step."""
    N, S, C = mode.f.shape
    phi = model.rows.phi.flatten(0, 2)
    half = torch.linalg.solve_triangular(mode.root, phi.mT, upper=False).mT
    half = half.unflatten(0, (N, S * C))
    A = half @ half.mT
    eye = torch.eye(S * C, dtype=A.dtype, device=A.device)
    V, _ = torch.linalg.solve_ex(eye - A @ model.blocks(mode.f), A)
    V = (V + V.mT) / 2
    r = model.residuals(mode.f).flatten(1).unsqueeze(-1)
    return LeaveOneOut(mode.f + (V @ r).view_as(mode.f), V)
