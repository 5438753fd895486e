"""Choosing prior, temperature and rank on validation data.

Every search works on immutable posteriors and cached features: a candidate costs a K×K
factorisation and small products, and an exception leaves the fit as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from tqdm.auto import tqdm

from laplace_ella.errors import BorderWarning, warn_caller
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.tuning.softening import Candidates
from laplace_ella.tuning.validation import Validator

__all__ = [
    "best",
    "prior_precision_from_weight_decay",
    "rank_by_evidence",
    "search_prior",
    "search_rank",
    "search_temperature",
    "search_temperature_and_prior",
]

T = TypeVar("T")

#: Relative difference of validation losses that does not matter.
VALLEY = 1e-3


def prior_precision_from_weight_decay(weight_decay: float, n_data: int) -> float:
    """The Gaussian prior that weight decay γ stood for: 1/σ0² = Nγ.

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


def best(candidates: Sequence[T], losses: Sequence[float]) -> T:
    """The candidate with the lowest loss; an error if no loss is defined."""
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
    """The scalar prior precision of the grid with the lowest validation loss."""
    candidate, validator = validator.for_scalars(posterior)

    def loss(prior: torch.Tensor) -> float:
        return validator(candidate.with_(prior=prior.reshape(1).to(posterior.prior)))

    return search_grid(grid, loss, progress_bar)


def search_grid(
    grid: torch.Tensor, loss: Callable[[torch.Tensor], float], progress_bar: bool
) -> torch.Tensor:
    """The prior precision of a grid with the lowest loss."""
    losses = []
    bar = tqdm(grid, disable=not progress_bar)
    for candidate in bar:
        losses.append(loss(candidate))
        if progress_bar:
            bar.set_description(
                f"[Grid search | prior_prec: {candidate:.3e}, loss: {losses[-1]:.3f}]"
            )
    return best(list(grid), losses)


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


def search_temperature(
    posterior: SubspacePosterior, n_data: int, validator: Validator
) -> float:
    """The factor t by which to divide the likelihood's curvature.

    A coarse logarithmic grid brackets the minimum, Brent's method refines it.
    """
    candidate, validator = validator.for_scalars(posterior)

    def loss(log_t: float) -> float:
        return validator(candidate.with_(factor=posterior.factor / 10**log_t))

    grid = np.linspace(-2, max(np.log10(n_data), 0) + 1, 25)
    losses = [loss(log_t) for log_t in grid]
    start = best(range(len(grid)), losses)
    low, high = grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)]
    refined = minimize_scalar(
        loss, bounds=(low, high), method="bounded", options={"xatol": 1e-3}
    )
    log_t = refined.x if refined.fun < losses[start] else grid[start]
    _warn_at_border("temperature", log_t, (grid[0], grid[-1]))
    return float(10**log_t)


def search_temperature_and_prior(
    posterior: SubspacePosterior,
    n_data: int,
    validator: Validator,
    log_prior_range: tuple[float, float],
) -> tuple[float, float]:
    """Factor t and scalar prior precision together: a coarse grid, then a simplex.

    Along settings with the same mean variance the loss is often flat to the border of
    the range. Of those that are as good up to `VALLEY`, t nearest to 1 is taken.
    """
    candidates = Candidates.of(posterior, validator)
    candidate, validator = candidates.posterior, candidates.validator

    def loss(point: np.ndarray) -> float:
        log_t, log_prior = point
        prior = torch.full_like(posterior.prior, 10**log_prior)
        factor = posterior.factor / 10**log_t
        return validator(candidate.with_(factor=factor, prior=prior))

    times = np.linspace(-2, max(np.log10(n_data), 0) + 1, 13)
    priors = np.linspace(*log_prior_range, 13)
    points = [np.array([t, p]) for t in times for p in priors]
    start = best(points, [loss(point) for point in points])
    # A first simplex of half a grid step, towards the middle of the range.
    bounds = np.array([[times[0], times[-1]], log_prior_range])
    steps = np.array([times[1] - times[0], priors[1] - priors[0]]) / 2
    steps *= np.where(start > bounds.mean(1), -1, 1)
    refined = minimize(
        loss,
        start,
        method="Nelder-Mead",
        bounds=bounds,
        options={
            "initial_simplex": start + np.vstack([np.zeros(2), np.diag(steps)]),
            "xatol": 1e-2,
            "fatol": 1e-6,
        },
    )
    enough = refined.fun + VALLEY * abs(refined.fun)
    log_t, log_prior = refined.x
    for point in _same_variance(candidates, float(posterior.factor), log_t, log_prior):
        if abs(point[0]) >= abs(log_t):
            break
        within = ((bounds[:, 0] <= point) & (point <= bounds[:, 1])).all()
        if within and loss(point) <= enough:
            log_t, log_prior = point
            break
    _warn_at_border("temperature", log_t, (times[0], times[-1]))
    _warn_at_border("prior precision", log_prior, log_prior_range)
    return float(10**log_t), float(10**log_prior)


def _same_variance(
    candidates: Candidates, factor: float, log_t: float, log_prior: float
) -> list[np.ndarray]:
    """Further (log10 t, log10 prior) with the same mean variance, t near 1 first."""
    ratio = math.log10(factor) - log_t - log_prior
    variance = candidates.unit_variance((ratio,)) / 10**log_prior
    points = []
    for shape in candidates.shapes():
        other = candidates.with_variance(shape, variance)
        t, prior = factor / float(other.factor), float(other.prior)
        points.append(np.log10([t, prior]))
    return sorted(points, key=lambda point: abs(point[0]))


def rank_by_evidence(posterior: SubspacePosterior, share: float) -> int:
    """The smallest rank whose directions have a share of the log determinant ratio: of
    that of all K, or of the whole spectrum's where the evidence is of that.

    At fixed θ̂ every direction can only add to the Occam factor, so that the evidence
    of the basis falls with k and its maximum says nothing; where it levels off does:
    the directions beyond are ones the data say nothing about. The evidence of the
    whole spectrum hardly depends on k.
    """
    within = posterior.with_(whole=False).log_det_ratios()
    reached = share * posterior.log_det_ratio
    return min(int((within < reached).sum()) + 1, posterior.rank)


def search_rank(
    posterior: SubspacePosterior, ranks: Iterable[int], validator: Validator
) -> tuple[int, list[float]]:
    """The rank with the lowest validation loss, and all the losses."""
    ranks = list(ranks)
    losses = [validator(posterior.truncate(k)) for k in ranks]
    return best(ranks, losses), losses
