"""Choosing prior, temperature and rank on validation data.

Every search works on immutable posteriors and cached features: a candidate costs a few
small products, and an exception leaves the fit as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from tqdm.auto import tqdm

from laplace_ella.errors import BorderWarning, warn_caller
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.tuning.validation import Validator

T = TypeVar("T")

#: Relative difference of validation losses that does not matter.
VALLEY = 1e-3


def prior_precision_from_weight_decay(weight_decay: float, n_data: int) -> float:
    """Return the Gaussian prior that weight decay γ stood for: 1/σ0² = Nγ.

    Training minimised the mean loss over N data plus γ/2·‖θ‖². Times N that is the
    negative log posterior with prior precision Nγ (Deng et al. 2022, Sec. 5.1).

    Examples
    --------
    >>> prior_precision_from_weight_decay(1e-4, 50_000)
    5.0
    """
    if not weight_decay > 0 or not n_data >= 1:  # also refuses NaN
        raise ValueError(
            "weight_decay must be positive and n_data at least 1, got "
            f"{weight_decay} and {n_data}."
        )
    return weight_decay * n_data


def lowest(candidates: Sequence[T], losses: Sequence[float]) -> T:
    """Return the candidate with the lowest loss; raise if no loss is defined."""
    index = int(np.argmin(losses))
    if not math.isfinite(losses[index]):
        raise ValueError(
            f"The validation loss is NaN or infinite for all {len(losses)} candidates, "
            "so none can be chosen; nothing was changed. Check the loss and the "
            "validation data."
        )
    return candidates[index]


def search_prior(
    posterior: SubspacePosterior,
    grid: torch.Tensor,
    validator: Validator,
    progress_bar: bool = False,
) -> torch.Tensor:
    """Return the scalar prior precision of the grid with the lowest validation loss."""
    candidate, validator = validator.rotated(posterior)
    losses, bar = [], tqdm(grid, disable=not progress_bar)
    for prior in bar:
        prior_precision = prior.reshape(1).to(posterior.prior)
        losses.append(validator(candidate.with_(prior=prior_precision)))
        if progress_bar:
            bar.set_description(
                f"[Grid search | prior_prec: {prior:.3e}, loss: {losses[-1]:.3f}]"
            )
    return lowest(list(grid), losses)


def _warn_at_border(name: str, log_value: float, bounds: tuple[float, float]) -> None:
    """Tell that a search may have been cut short."""
    if min(abs(log_value - bounds[0]), abs(log_value - bounds[1])) < 0.05:
        warn_caller(
            f"The best {name}, {10**log_value:.3g}, lies at the border of the range "
            f"{10 ** bounds[0]:.3g} to {10 ** bounds[1]:.3g} that was searched: the "
            "prior precision may not suit the data. Tune both (tune_prior=True) or "
            "widen the range of the prior.",
            BorderWarning,
        )


def _log_temperatures(n_data: int, n: int) -> np.ndarray:
    """Return log10 of temperatures from 0.01 to that of a tenth of an example."""
    return np.linspace(-2, max(np.log10(n_data), 0) + 1, n)


def search_temperature(
    posterior: SubspacePosterior, n_data: int, validator: Validator
) -> float:
    """Return the factor t by which to divide the likelihood's curvature.

    A coarse logarithmic grid brackets the minimum, Brent's method refines it.
    """
    candidate, validator = validator.rotated(posterior)

    def loss(log_t: float) -> float:
        return validator(candidate.with_(factor=posterior.factor / 10**log_t))

    grid = _log_temperatures(n_data, 25)
    log_t, _ = _refined(loss, grid, [loss(log_t) for log_t in grid])
    _warn_at_border("temperature", log_t, (grid[0], grid[-1]))
    return float(10**log_t)


def _refined(
    loss: Callable[[float], float], grid: np.ndarray, losses: Sequence[float]
) -> tuple[float, float]:
    """Return the minimum between the neighbours of the lowest point of a grid, and its
    loss."""
    start = lowest(range(len(grid)), losses)
    low, high = grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)]
    refined: Any = minimize_scalar(
        loss, bounds=(low, high), method="bounded", options={"xatol": 1e-3}
    )
    if refined.fun < losses[start]:
        return float(refined.x), refined.fun
    return float(grid[start]), losses[start]


def search_temperature_and_prior(
    posterior: SubspacePosterior,
    n_data: int,
    validator: Validator,
    log_prior_range: tuple[float, float],
) -> tuple[float, float]:
    """Return factor t and scalar prior precision, chosen together.

    For each temperature of a grid the best prior is looked for, and between the best
    of them the best temperature. Along settings with the same mean variance the loss is
    often flat to the border of the range: of those that are as good up to `VALLEY`, t
    nearest to 1 is taken.
    """
    rotated, validator = validator.rotated(posterior)
    times = _log_temperatures(n_data, 13)
    priors = np.linspace(*log_prior_range, 13)
    known: dict[float, tuple[float, float]] = {}

    def best_prior(log_t: float) -> tuple[float, float]:
        """Return log δ and its loss."""

        def loss(log_prior: float) -> float:
            prior = torch.full_like(posterior.prior, 10**log_prior)
            factor = posterior.factor / 10**log_t
            return validator(rotated.with_(factor=factor, prior=prior))

        losses = [loss(log_prior) for log_prior in priors]
        if not np.isfinite(losses).any():
            return priors[0], math.inf
        return _refined(loss, priors, losses)

    def profile(log_t: float) -> float:
        known[log_t] = best_prior(log_t)
        return known[log_t][1]

    _refined(profile, times, [profile(log_t) for log_t in times])
    least = min(loss for _, loss in known.values())
    enough = least + VALLEY * abs(least)
    log_t = min((t for t in known if known[t][1] <= enough), key=abs)
    log_prior, _ = known[log_t]
    _warn_at_border("temperature", log_t, (times[0], times[-1]))
    _warn_at_border("prior precision", log_prior, log_prior_range)
    return float(10**log_t), float(10**log_prior)


def rank_by_evidence(posterior: SubspacePosterior, share: float) -> int:
    """Return the smallest rank whose directions have a share of the log det ratio.

    Of that of all K, or of the whole spectrum's where the evidence is of that. At fixed
    θ̂ every direction can only add to the Occam factor, so that the evidence of the
    basis falls with k and its maximum says nothing; where it levels off does: the
    directions beyond are ones the data say nothing about. The evidence of the whole
    spectrum hardly depends on k.
    """
    within = posterior.with_(whole=False).log_det_ratios()
    reached = share * posterior.log_det_ratio
    return min(int((within < reached).sum()) + 1, posterior.rank)


def search_rank(
    posterior: SubspacePosterior, ranks: Iterable[int], validator: Validator
) -> tuple[int, list[float]]:
    """Return the rank with the lowest validation loss, and all the losses."""
    ranks = list(ranks)
    losses = [validator(posterior.truncate(k)) for k in ranks]
    return lowest(ranks, losses), losses
