"""Prior precision and softmax temperature of classifiers, from the training data alone.

`linear_model` leaves examples out of the linearised model, at its mode for a prior
precision δ. The same step from the parameters of the network tells how the network
itself errs on new data, with the precision of the regulariser for which these are
stationary, δ_train = −gᵀ(θ̂ − μ₀)/‖θ̂ − μ₀‖², g the gradient of the summed loss. It is
the number of data times the weight decay, where the network was trained to the end.

Index legend: N examples, S positions, C outputs, K features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from laplace_ella.posterior.observation import FunctionValues, Link
from laplace_ella.support.batches import Positions
from laplace_ella.tuning.linear_model import (
    LinearModel,
    Mode,
    curvature_at,
    find_mode,
    leave_one_out,
    mode_at,
)

__all__ = [
    "LeftOut",
    "LinkLoss",
    "PriorChoice",
    "PriorMethod",
    "choose_prior",
    "predict_left_out",
]

#: log δ, less that of MacKay's fixed point: what is searched, and in which steps.
WIDTH, STEP = 4.5, 1.5

#: Softmax temperatures: of the network's own outputs, and those that are chosen. Few
#: examples that are all right are no reason to be surer than the network.
ALONE, CHOSEN = (0.05, 50.0), (1.0, 50.0)

#: Above this τ_loo one step from θ̂ does not tell how the network errs.
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


@dataclass(frozen=True)
class LinkLoss:
    """Mean negative log likelihood of predictions from Gaussian outputs.

    Attributes
    ----------
    model : LinearModel
    link : Link
    n_samples : int
        of the link 'mc'
    fresh_generator : callable
        returns the same random numbers for every candidate
    """

    model: LinearModel
    link: Link
    n_samples: int
    fresh_generator: Callable[[], torch.Generator | None]

    def rows(
        self, values: FunctionValues, tau: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss of every row, zero where there is no target, `(N·S,)`, and
        probabilities `(N·S, C)`, None for regression; for the softmax temperature τ, or
        the one that is set."""
        observation, y = self.model.observation, self.model.rows.y.flatten(0, 1)
        probabilities, parts = None, (values.mean, values.variance())
        if not observation.family.is_regression:
            if tau is not None:
                observation = replace(observation, softmax_temperature=tau)
            generator = self.fresh_generator()
            probabilities = observation.probabilities(
                values, self.link, self.n_samples, generator=generator
            )
            parts = (probabilities,)
        known, losses = self.model.known, observation.example_losses()
        if known is None:
            return losses(*parts, y), probabilities
        known, each = known.flatten(), values.mean.new_zeros(len(y))
        each[known] = losses(*(part[known] for part in parts), y[known]).to(each)
        return each, probabilities

    def __call__(self, values: FunctionValues, tau: float = 1.0) -> float:
        """Return the mean loss, infinite where it is undefined."""
        known, losses = self.model.known, self.rows(values, tau)[0]
        n = len(losses) if known is None else int(known.sum())
        loss = float(losses.sum()) / n
        return math.inf if math.isnan(loss) else loss

    def best_temperature(
        self, values: FunctionValues, within: tuple[float, float]
    ) -> tuple[float, float]:
        """Return τ with the lowest loss, and this loss."""
        low, high = map(math.log, within)
        found: Any = minimize_scalar(
            lambda log_tau: self(values, math.exp(log_tau)),
            bounds=(low, high),
            method="bounded",
            options={"xatol": 1e-3},
        )
        at_low = self(values, within[0])  # which the search does not reach
        if at_low <= found.fun:
            return within[0], at_low
        return math.exp(found.x), float(found.fun)


# The choice


def mackay(
    model: LinearModel, start: float = 1.0, n_rounds: int = 30, rtol: float = 0.03
) -> Mode:
    """Return the mode at MacKay's fixed point δ = γ/‖z* + d‖², γ the effective number
    of parameters; each round goes half the way, in logarithms."""
    mode = mode_at(model, torch.zeros_like(model.shift), start)
    mode = mode_at(model, -model.shift / 2, start) if not mode.H.any() else mode
    for _ in range(n_rounds):
        mode = find_mode(model, mode.precision, mode)
        inverse = torch.cholesky_inverse(mode.root)
        freedom = len(inverse) - mode.precision * float(inverse.trace())
        square = float((mode.z + model.shift).square().sum())
        if not (freedom > 0 and square > 0):
            break
        following = math.sqrt(mode.precision * freedom / square)
        if abs(math.log(following / mode.precision)) < rtol:
            break
        mode = replace(mode, precision=following)
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
        prior precisions of MacKay's fixed point, and with the lowest leave-one-out
        loss of the linear model
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


def choose_prior(
    loss: LinkLoss,
    method: PriorMethod = PriorMethod.AUTO,
    start: float = 1.0,
) -> PriorChoice:
    """Return prior precision, softmax temperature and the curvature at the mode.

    Parameters
    ----------
    loss : LinkLoss
    method : PriorMethod, default="auto"
    start : float, default=1
        first prior precision
    """
    model = loss.model
    precision = model.training_precision
    origin = mode_at(model, torch.zeros_like(model.shift), precision)
    network = leave_one_out(model, origin)
    alone = replace(network, covariance=torch.zeros_like(network.covariance))
    tau_loo, _ = loss.best_temperature(alone.function_values(), ALONE)
    fixed = mode = mackay(model, start)

    def network_values(V: torch.Tensor) -> FunctionValues:
        return replace(network, covariance=V).function_values()

    grid = math.log(fixed.precision) + np.arange(WIDTH, -WIDTH - STEP / 2, -STEP)
    linear_losses, network_losses = [], []
    for log_precision in grid:
        mode = find_mode(model, math.exp(log_precision), mode)
        without = leave_one_out(model, mode)
        linear_losses.append(loss(without.function_values()))
        values = network_values(without.covariance)
        network_losses.append(loss.best_temperature(values, CHOSEN)[1])
    loo, calibrated = lowest(grid, linear_losses), lowest(grid, network_losses)
    if method is PriorMethod.AUTO:
        trusted = tau_loo <= TRUSTED_TEMPERATURE
        method = PriorMethod.CALIBRATED if trusted else PriorMethod.LARGER
    chosen = {
        PriorMethod.LARGER: max(fixed.precision, loo),
        PriorMethod.CALIBRATED: calibrated,
        PriorMethod.LOO: loo,
        PriorMethod.MACKAY: fixed.precision,
    }[method]
    mode, tau = find_mode(model, chosen, fixed), 1.0
    if method is PriorMethod.CALIBRATED:
        V = leave_one_out(model, mode).covariance
        tau, _ = loss.best_temperature(network_values(V), CHOSEN)
    return PriorChoice(
        method,
        chosen,
        tau,
        curvature_at(mode.f, model.given, model.observation),
        fixed.precision,
        loo,
        precision,
        tau_loo,
        min(linear_losses),
        min(network_losses),
    )


def lowest(grid: np.ndarray, losses: list[float]) -> float:
    """Return exp of the place of the minimum, by a parabola through three points."""
    i = int(np.argmin(losses))
    if 0 < i < len(grid) - 1:
        left, here, right = losses[i - 1 : i + 2]
        bend = left - 2 * here + right
        if math.isfinite(bend) and bend > 0:
            step = (left - right) / (2 * bend)
            return math.exp(grid[i] + step * (grid[i + 1] - grid[i]))
    return math.exp(grid[i])


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
    loss: LinkLoss,
    precision: float,
    positions: Positions,
    network: bool = False,
) -> LeftOut:
    """Return predictions without each example, for a prior precision; with the means of
    the `network`, or of the linear model."""
    model = loss.model
    start = mode_at(model, torch.zeros_like(model.shift), precision)
    without = leave_one_out(model, find_mode(model, precision, start))
    if network:
        precision = model.training_precision
        logits = leave_one_out(model, replace(start, precision=precision)).logits
        without = replace(without, logits=logits)
    values, dtype = without.function_values(), model.given.f.dtype
    losses, probabilities = loss.rows(values)
    return LeftOut(
        positions.restore(values.mean).to(dtype),
        positions.restore(values.variance()).to(dtype),
        None if probabilities is None else positions.restore(probabilities).to(dtype),
        losses.view(len(model.rows.f), -1).sum(-1),
    )
