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

import torch
from scipy.optimize import minimize_scalar

from laplace_ella.errors import NumericalWarning, warn_caller
from laplace_ella.posterior.observation import FunctionValues, Link
from laplace_ella.support.batches import Positions
from laplace_ella.tuning.linear_model import (
    LinearModel,
    Mode,
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

#: Steps in log δ from MacKay's fixed point on, and how many there are at most.
STEP, N_STEPS = 1.25, 4

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
    model: LinearModel, mode: Mode, n_rounds: int = 30, tolerance: float = 0.02
) -> Mode:
    """Return the mode at MacKay's fixed point δ = γ/‖z* + d‖², γ the effective number
    of parameters, by the secant method for log δ from a first mode."""
    previous: tuple[float, float] | None = None
    for _ in range(n_rounds):
        mode = find_mode(model, mode.precision, mode)
        inverse = torch.cholesky_inverse(mode.root)
        freedom = len(inverse) - mode.precision * float(inverse.trace())
        square = float((mode.z + model.shift).square().sum())
        if not (freedom > 0 and square > 0):
            return mode
        here, off = math.log(mode.precision), math.log(freedom / square)
        off -= here
        if abs(off) < tolerance:
            return mode
        slope = -1.0
        if previous is not None and here != previous[0]:
            slope = (off - previous[1]) / (here - previous[0])
        step = -off / min(max(slope, -2.0), -0.3)
        previous = here, off
        mode = replace(mode, precision=math.exp(here + min(max(step, -3.0), 3.0)))
    warn_caller(
        f"MacKay's fixed point was not found in {n_rounds} rounds: the prior precision "
        f"is {mode.precision:.3g}. Set one, or use validation data.",
        NumericalWarning,
    )
    return find_mode(model, mode.precision, mode)


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

    def surpasses(self, other: PriorChoice) -> bool:
        """Return whether the network's leave-one-out outputs can be trusted with this
        choice of 'auto' and not with another, or the leave-one-out loss is lower."""
        if self.rule is not other.rule:
            return self.rule is PriorMethod.CALIBRATED
        if self.rule is PriorMethod.CALIBRATED:
            return self.network_loss < other.network_loss
        return self.linear_loss < other.linear_loss


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
    if method is PriorMethod.AUTO:
        trusted = tau_loo <= TRUSTED_TEMPERATURE
        method = PriorMethod.CALIBRATED if trusted else PriorMethod.LARGER
    mode = fixed = mackay(model, replace(origin, precision=start))

    def judge(mode: Mode) -> tuple[float, float, float]:
        """Return the losses of linear model and network, and the network's τ."""
        without = leave_one_out(model, mode)
        values = replace(network, covariance=without.covariance).function_values()
        tau, network_loss = loss.best_temperature(values, CHOSEN)
        return loss(without.function_values()), network_loss, tau

    # From MacKay's precision upwards; downwards only where that is asked for.
    which = 1 if method is PriorMethod.CALIBRATED else 0
    judged = {0: judge(fixed)}
    for sign in (1, -1) if method is PriorMethod.LOO else (1,):
        mode = fixed
        for i in range(sign, sign * (N_STEPS + 1), sign):
            mode = find_mode(model, fixed.precision * math.exp(i * STEP), mode)
            judged[i] = judge(mode)
            if judged[i][which] > judged[i - sign][which]:
                break
    linear, by_network = ({i: judged[i][k] for i in sorted(judged)} for k in (0, 1))
    loo = fixed.precision * math.exp(STEP * lowest(linear))
    chosen = {
        PriorMethod.LARGER: loo,
        PriorMethod.CALIBRATED: fixed.precision * math.exp(STEP * lowest(by_network)),
        PriorMethod.LOO: loo,
        PriorMethod.MACKAY: fixed.precision,
    }[method]
    mode = find_mode(model, chosen, fixed)
    return PriorChoice(
        method,
        chosen,
        judge(mode)[2] if method is PriorMethod.CALIBRATED else 1.0,
        model.in_the_basis(mode.H),
        fixed.precision,
        loo,
        precision,
        tau_loo,
        min(linear.values()),
        min(by_network.values()),
    )


def lowest(losses: dict[int, float]) -> float:
    """Return the place of the minimum, by a parabola through it and its neighbours."""
    i = min(losses, key=losses.__getitem__)
    left, here, right = (losses.get(k, math.nan) for k in (i - 1, i, i + 1))
    bend = left - 2 * here + right
    return i + (left - right) / (2 * bend) if 0 < bend < math.inf else float(i)


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
    dtype: torch.dtype,
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
    values = without.function_values()
    losses, probabilities = loss.rows(values)
    return LeftOut(
        positions.restore(values.mean).to(dtype),
        positions.restore(values.variance()).to(dtype),
        None if probabilities is None else positions.restore(probabilities).to(dtype),
        losses.view(len(model.rows.f), -1).sum(-1),
    )
