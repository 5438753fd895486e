"""Leave-one-out, and by it prior precision and softmax temperature of classifiers.

Linearised Laplace is exact Bayesian inference in the linear model f = f̂ + φz with the
prior z ~ N(−d, δ⁻¹), where f̂ are the outputs of the network, z = Vᵀ(θ − θ̂) and
d = Vᵀ(θ̂ − μ₀). Its log posterior is concave. At its mode z*, with outputs f, residuals
r = ∇loss(f) and curvature H* = Σ φᵀΛφ, leaving out example i is one Newton step:

    A_i = φ_i(H* + δ)⁻¹φ_iᵀ,   V_i = A_i(I − Λ_iA_i)⁻¹,   f_i without i ≈ f_i + V_i r_i

and V_i is its covariance; for regression this is exact. The same step from the
parameters of the network, z = 0, tells how the network itself errs on new data, with
the precision of the regulariser for which these are stationary,
δ_train = −gᵀ(θ̂ − μ₀)/‖θ̂ − μ₀‖², g the gradient of the summed loss. It is the number
of data times the weight decay, where the network was trained to the end.

Index legend: N examples, S positions, C outputs, K features, Q = S·C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar

from laplace_ella.errors import NumericalWarning, warn_caller
from laplace_ella.posterior import likelihood
from laplace_ella.posterior.fit import Fit, TrainingRows
from laplace_ella.posterior.observation import FunctionValues, Link, ObservationModel
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.support.batches import Positions

#: Norm of the gradient at a mode, relative to that of its two parts.
TOLERANCE = 1e-6

#: Steps in log δ from MacKay's fixed point on, and how many there are at most.
STEP, N_STEPS = 1.25, 4

#: Softmax temperatures: of the network's own outputs, and those that are chosen. Few
#: examples that are all right are no reason to be surer than the network.
ALONE, CHOSEN = (0.05, 50.0), (1.0, 50.0)

#: Above this τ_loo one step from θ̂ does not tell how the network errs. In few
#: directions a step hardly moves a network that is right everywhere: nor below 1.
TRUSTED_TEMPERATURE = 7.0


class PriorMethod(str, Enum):
    """How `optimize_prior_precision` chooses.

    Examples
    --------
    >>> PriorMethod("loo")
    <PriorMethod.LOO: 'loo'>
    """

    AUTO = "auto"
    """Classification: 'calibrated' where the network's leave-one-out outputs can be
    trusted, 'larger' elsewhere. Sets the softmax temperature as well, as the following
    do."""

    CALIBRATED = "calibrated"
    """Prior precision and softmax temperature with the lowest loss of the network's
    outputs without each example."""

    LARGER = "larger"
    """The larger prior precision of 'loo' and 'mackay', and softmax temperature 1."""

    LOO = "loo"
    """The prior precision with the lowest loss of the linearised model's predictions
    without each example, and softmax temperature 1."""

    MACKAY = "mackay"
    """MacKay's fixed point at the mode of the linearised model, and softmax temperature
    1."""

    MARGLIK = "marglik"
    """laplace-torch's evidence, at the network's parameters."""

    GRIDSEARCH = "gridsearch"
    """The prior precision with the lowest loss on validation data."""


# The linear model


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
    factor : torch.Tensor
        1/(σ²T), a scalar or one per output `(C,)`
    observation : ObservationModel
    probabilities : callable
        of Gaussian outputs for a softmax temperature, by the same random numbers
    complete : bool
        whether the features are in all directions that the training data determine
    root : torch.Tensor, optional
        L `(K, K)`: z is Lᵀ times the coordinates in the basis; the identity if None
    """

    rows: TrainingRows
    shift: torch.Tensor
    square_distance: float
    factor: torch.Tensor
    observation: ObservationModel
    probabilities: Callable[[FunctionValues, float], torch.Tensor]
    complete: bool = True
    root: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        fit: Fit,
        rows: TrainingRows,
        prior_mean: torch.Tensor,
        observation: ObservationModel,
        probabilities: Callable[[FunctionValues, float], torch.Tensor],
        posterior: SubspacePosterior | None = None,
    ) -> LinearModel:
        """Return the model of a fit; the precision of its prior is δ, or δ times that
        of a posterior."""
        delta = (fit.mean - prior_mean).double()
        square, phi, L = delta.square(), rows.phi.double(), None
        shift = fit.basis.directions.to(delta) @ delta
        if posterior is not None:  # z → Lᵀz, LLᵀ = precision
            L = torch.linalg.cholesky(posterior.prior_on_subspace.double())
            phi = torch.linalg.solve_triangular(L.mT, phi, upper=True, left=False)
            square, shift = square * posterior.prior_diagonal().double(), L.mT @ shift
        rows = TrainingRows(rows.f.double(), phi, rows.y)
        noise = observation.sigma_noise.double().square() * observation.temperature
        found = rows, shift, float(square.sum()), 1 / noise
        return cls(*found, observation, probabilities, fit.spans_all, L)

    def loss(self, f: torch.Tensor) -> torch.Tensor:
        """Return the negative log likelihood of outputs, up to a constant."""
        f, y = f.flatten(0, 1), self.rows.y.flatten(0, 1)
        losses = likelihood.losses(f, y, self.observation.family)
        return (self.factor * losses).sum()

    def residuals(self, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the derivatives of the loss by the outputs, `(N, S, C)`, and by z,
        `(K,)`."""
        r = torch.func.grad(self.loss)(f)
        return r, self.rows.phi.flatten(0, 2).mT @ r.flatten()

    def curvature_roots(self, f: torch.Tensor, phi: torch.Tensor) -> torch.Tensor:
        """Return ψ `(N·S, C, k)` with Σ_c ψ_cψ_cᵀ = φᵀΛφ/(σ²T), zero where there is no
        target, for outputs `(N, S, C)` and φ `(N·S, C, k)`."""
        y, family = self.rows.y.flatten(0, 1), self.observation.family
        psi = likelihood.curvature_root(f.flatten(0, 1), phi, family)
        psi = psi * self.factor.sqrt().reshape(-1, 1)
        known = likelihood.observed(y, family)
        return psi if known is None else psi * known[:, None, None]

    @property
    def training_precision(self) -> float:
        """δ_train; at least 1e-6, as a network without a regulariser has none."""
        if not self.square_distance:
            return 1e-6
        slope = self.residuals(self.rows.f)[1]
        return max(-float(slope @ self.shift) / self.square_distance, 1e-6)


@dataclass(frozen=True)
class Mode:
    """The mode z `(K,)` for a prior precision δ, with the outputs f `(N, S, C)` and the
    curvature H/(σ²T) `(K, K)` there."""

    precision: float
    z: torch.Tensor
    f: torch.Tensor
    H: torch.Tensor

    @classmethod
    def at(cls, model: LinearModel, z: torch.Tensor, precision: float) -> Mode:
        """Return z as if it were the mode: that of the network is z = 0."""
        f = model.rows.f + model.rows.phi @ z
        psi = model.curvature_roots(f, model.rows.phi.flatten(0, 1)).flatten(0, 1)
        return cls(precision, z, f, psi.mT @ psi)

    @cached_property
    def root(self) -> torch.Tensor:
        """L `(K, K)` with LLᵀ = H + δ."""
        eye = torch.eye(len(self.H), dtype=self.H.dtype, device=self.H.device)
        return torch.linalg.cholesky(self.H + self.precision * eye)


def find_mode(model: LinearModel, precision: float, start: Mode) -> Mode:
    """Return the mode for a prior precision δ, by L-BFGS with the curvature of the
    start; where that is far from the curvature on the way, it is computed anew."""
    error, scale = math.inf, 1.0
    for _ in range(4):
        z = _descend(model, replace(start, precision=precision))
        start = Mode.at(model, z, precision)
        slope = model.residuals(start.f)[1]
        error = float((slope + precision * (z + model.shift)).norm())
        scale = float(slope.norm()) + 1e-3
        if error <= TOLERANCE * scale:
            return start
    if not error <= 100 * TOLERANCE * scale:  # nor NaN
        warn_caller(
            f"The mode of the linearised model for prior precision {precision:.3g} was "
            f"not found to full accuracy: the gradient's norm is {error:.2g}, that of "
            f"the loss alone {scale:.2g}.",
            NumericalWarning,
        )
    return start


def _descend(model: LinearModel, start: Mode) -> torch.Tensor:
    """Return z after L-BFGS in the coordinates u, z = z₀ + L⁻ᵀu, in which H + δ of the
    start is the identity."""
    L, delta, d = start.root, start.precision, model.shift

    def back(u: Any) -> torch.Tensor:
        u = torch.as_tensor(u).to(d).unsqueeze(-1)
        return start.z + torch.linalg.solve_triangular(L.mT, u, upper=True).squeeze(-1)

    def objective(u: Any) -> tuple[float, Any]:
        z = back(u)
        f, distance = model.rows.f + model.rows.phi @ z, z + d
        gradient = model.residuals(f)[1] + delta * distance
        value = model.loss(f) + 0.5 * delta * distance.square().sum()
        column = torch.linalg.solve_triangular(L, gradient.unsqueeze(-1), upper=False)
        return float(value), column.squeeze(-1).cpu().numpy()

    how = {"maxcor": 100, "maxiter": 100, "ftol": 1e-15, "gtol": 1e-9}
    zero = np.zeros(len(d))
    found = minimize(objective, zero, jac=True, method="L-BFGS-B", options=how)
    return back(found.x)


def leave_one_out(model: LinearModel, mode: Mode) -> FunctionValues:
    """Return the Gaussian over the outputs at every position `(N·S, C)`, of examples
    that are left out, by one Newton step."""
    (N, S, C), f = mode.f.shape, mode.f
    phi = model.rows.phi.flatten(0, 2)
    half = torch.linalg.solve_triangular(mode.root, phi.mT, upper=False).mT
    half = half.unflatten(0, (N, S * C))
    A = half @ half.mT
    eye = torch.eye(S * C, dtype=A.dtype, device=A.device)
    root = model.curvature_roots(f, eye[:C, :C].expand(N * S, C, C))
    curvature = (root.mT @ root).view(N, S, C, C)  # positions do not mix
    curvature = torch.einsum("nscd,st->nsctd", curvature, eye[:S, :S])
    V, _ = torch.linalg.solve_ex(eye - A @ curvature.reshape_as(A), A)
    V = (V + V.mT) / 2
    f = f + (V @ model.residuals(f)[0].flatten(1).unsqueeze(-1)).view_as(f)
    own = torch.einsum("nscsd->nscd", V.view(N, S, C, S, C)).reshape(N * S, C, C)
    return FunctionValues(f.flatten(0, 1), own[..., :0], own)


# The choice


def mackay(model: LinearModel, mode: Mode) -> Mode:
    """Return the mode at MacKay's fixed point δ = γ/‖z* + d‖², γ the effective number
    of parameters, by the secant method for log δ from a first mode."""
    log_delta, slope, previous = math.log(mode.precision), -1.0, None
    for _ in range(30):
        mode = find_mode(model, math.exp(log_delta), mode)
        inverse = torch.cholesky_inverse(mode.root)
        freedom = len(inverse) - mode.precision * float(inverse.trace())
        square = float((mode.z + model.shift).square().sum())
        # Random labels determine no parameter, and δ would grow without end.
        if not (freedom > 1e-6 and square > 0):
            return mode
        off = math.log(freedom / square) - log_delta
        if abs(off) < 0.02:
            return mode
        if previous is not None and log_delta != previous[0]:
            slope = (off - previous[1]) / (log_delta - previous[0])
        previous = log_delta, off
        log_delta += min(max(-off / min(max(slope, -2.0), -0.3), -3.0), 3.0)
    warn_caller(
        f"MacKay's fixed point was not found in 30 rounds: the prior precision is "
        f"{mode.precision:.3g}. Set one, or use validation data.",
        NumericalWarning,
    )
    return mode


@dataclass(frozen=True)
class PriorChoice:
    """What `optimize_prior_precision` chose from the training data, and its grounds.

    Attributes
    ----------
    rule : PriorMethod
        what it was chosen by
    prior_precision : float
        δ, the factor of the prior precision that was set if that is not scalar
    softmax_temperature : float
        τ
    H : torch.Tensor
        H* `(K, K)`, the curvature at the mode of the linear model
    mackay, loo : float
        prior precisions of MacKay's fixed point, and from there on with the lowest
        leave-one-out loss of the linear model (below it as well for method 'loo')
    training_precision : float
        δ_train, of the regulariser for which the network is stationary
    network_temperature : float
        τ_loo, the best softmax temperature of the network's leave-one-out outputs;
        large where one Newton step does not tell how the network errs
    linear_loss, network_loss : float
        lowest mean leave-one-out losses, of the linear model and of the network
    """

    rule: PriorMethod
    prior_precision: float
    softmax_temperature: float
    H: torch.Tensor = field(repr=False)
    mackay: float
    loo: float
    training_precision: float
    network_temperature: float
    linear_loss: float
    network_loss: float

    @property
    def rank(self) -> tuple[bool, float]:
        """Less is better, of choices of 'auto': whether the network's leave-one-out
        outputs cannot be trusted, then the leave-one-out loss."""
        if self.rule is PriorMethod.CALIBRATED:
            return False, self.network_loss
        return True, self.linear_loss


def best_temperature(
    model: LinearModel, values: FunctionValues, within: tuple[float, float]
) -> tuple[float, float]:
    """Return τ with the lowest loss of Gaussian outputs, and this loss."""
    found: Any = minimize_scalar(
        lambda log_tau: link_loss(model, values, math.exp(log_tau)),
        bounds=np.log(within),
        method="bounded",
        options={"xatol": 1e-3},
    )
    at_low = link_loss(model, values, within[0])  # which the search does not reach
    if at_low <= found.fun:
        return within[0], at_low
    return math.exp(found.x), float(found.fun)


def scaled_probabilities(
    observation: ObservationModel,
    link: Link,
    n_samples: int,
    fresh_generator: Callable[[], torch.Generator | None],
    values: FunctionValues,
    tau: float,
) -> torch.Tensor:
    """Return probabilities of Gaussian outputs for τ, always by the same numbers."""
    observation, how = replace(observation, softmax_temperature=tau), (link, n_samples)
    return observation.probabilities(values, *how, generator=fresh_generator())


def link_loss(model: LinearModel, values: FunctionValues, tau: float = 1.0) -> float:
    """Return the mean negative log likelihood of Gaussian outputs of a classifier,
    infinite where it is undefined."""
    losses, y = model.observation.example_losses(), model.rows.y.flatten(0, 1)
    loss = float(losses(model.probabilities(values, tau), y).mean())
    return math.inf if math.isnan(loss) else loss


def choose_prior(
    model: LinearModel, method: PriorMethod = PriorMethod.AUTO, start: float = 1.0
) -> PriorChoice:
    """Return prior precision, softmax temperature and the curvature at the mode; the
    search starts from the prior precision `start`."""
    training = model.training_precision
    origin = Mode.at(model, torch.zeros_like(model.shift), training)
    network = leave_one_out(model, origin)
    tau_loo, _ = best_temperature(model, replace(network, residual=None), ALONE)
    if method is PriorMethod.AUTO:
        least = 0.0 if model.complete else 1.0
        trusted = least <= tau_loo <= TRUSTED_TEMPERATURE
        method = PriorMethod.CALIBRATED if trusted else PriorMethod.LARGER
    calibrated = method is PriorMethod.CALIBRATED
    mode = fixed = mackay(model, replace(origin, precision=start))

    def judge(mode: Mode) -> tuple[float, float, float]:
        """Return the losses of linear model and network, and the network's τ."""
        linear = leave_one_out(model, mode)
        values = replace(network, residual=linear.residual)
        tau, network_loss = best_temperature(model, values, CHOSEN)
        return link_loss(model, linear), network_loss, tau

    # From MacKay's precision upwards; downwards only where that is asked for.
    judged: dict[int, tuple[float, ...]] = {0: judge(fixed)}
    for sign in (1, -1) if method is PriorMethod.LOO else (1,):
        mode = fixed
        for i in range(sign, sign * (N_STEPS + 1), sign):
            mode = find_mode(model, fixed.precision * math.exp(i * STEP), mode)
            judged[i] = judge(mode)
            if judged[i][calibrated] > judged[i - sign][calibrated]:
                break
    loo, linear_loss = lowest_place(judged, 0)
    by_network, network_loss = lowest_place(judged, 1)
    step = by_network if calibrated else 0.0 if method is PriorMethod.MACKAY else loo
    chosen = fixed.precision * math.exp(STEP * step)
    mode = find_mode(model, chosen, fixed)
    H = mode.H / model.factor
    return PriorChoice(
        rule=method,
        prior_precision=chosen,
        softmax_temperature=judge(mode)[2] if calibrated else 1.0,
        H=H if model.root is None else model.root @ H @ model.root.mT,
        mackay=fixed.precision,
        loo=fixed.precision * math.exp(STEP * loo),
        training_precision=training,
        network_temperature=tau_loo,
        linear_loss=linear_loss,
        network_loss=network_loss,
    )


def lowest_place(
    judged: dict[int, tuple[float, ...]], which: int
) -> tuple[float, float]:
    """Return the place of the minimum of one of the losses, by a parabola through the
    lowest and its neighbours, and the lowest."""
    losses = {i: each[which] for i, each in judged.items()}
    i = min(losses, key=losses.__getitem__)
    left, right = losses.get(i - 1, math.nan), losses.get(i + 1, math.nan)
    bend = left - 2 * losses[i] + right
    place = i + (left - right) / (2 * bend) if 0 < bend < math.inf else float(i)
    return place, losses[i]


@dataclass(frozen=True)
class LeftOut:
    """What each training example is predicted by a posterior without it.

    Attributes
    ----------
    mean : torch.Tensor
        outputs, in the shape of the model's `(N, ..., C)`
    variance : torch.Tensor
        of the outputs, in the same shape
    probabilities : torch.Tensor, optional
        of classes or labels in the same shape, None for regression
    nll : torch.Tensor
        negative log likelihood of each example's targets, `(N,)`; of regression with
        the noise, of several positions their sum
    """

    mean: torch.Tensor
    variance: torch.Tensor
    probabilities: torch.Tensor | None
    nll: torch.Tensor


def predict_left_out(
    model: LinearModel,
    precision: float,
    positions: Positions,
    dtype: torch.dtype,
    network: bool = False,
) -> LeftOut:
    """Return predictions without each example; with the means of the `network`, or of
    the linear model."""
    origin, observation = torch.zeros_like(model.shift), model.observation
    start = Mode.at(model, origin, precision)
    values = leave_one_out(model, find_mode(model, precision, start))
    if network:
        start = replace(start, precision=model.training_precision)
        values = replace(values, mean=leave_one_out(model, start).mean)
    y, found = model.rows.y.flatten(0, 1), (values.mean, values.variance())
    in_shape = [positions.restore(v).to(dtype) for v in found]
    if not observation.family.is_regression:
        found = (model.probabilities(values, observation.softmax_temperature),)
        in_shape.append(positions.restore(found[0]).to(dtype))
    nll, known = (
        values.mean.new_zeros(len(y)),
        likelihood.observed(y, observation.family),
    )
    nll[slice(None) if known is None else known] = observation.example_losses()(
        *found, y
    )
    mean, variance, probabilities = [*in_shape, None][:3]
    nll = nll.view(len(model.rows.y), -1).sum(-1)
    return LeftOut(mean, variance, probabilities, nll)
