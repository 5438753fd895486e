"""The loss of posteriors on validation data whose features are cached, and searches.

Every search works on immutable posteriors and cached features: a candidate costs a few
small products, and an exception leaves the fit as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torchmetrics
from scipy.optimize import minimize_scalar
from tqdm.auto import tqdm

from laplace_ella.errors import BorderWarning, warn_caller
from laplace_ella.posterior.observation import (
    Family,
    FunctionValues,
    Link,
    ObservationModel,
)
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.tuning.cache import FeatureCache

Loss = torchmetrics.Metric | Callable[..., Any]
T = TypeVar("T")


def check_loss(loss: Any) -> None:
    """Refuse a loss that cannot be evaluated."""
    if loss is not None and not callable(loss):
        raise TypeError(
            "loss must be a torchmetrics.Metric or a callable, got "
            f"{type(loss).__name__}."
        )


def score(batches: Iterable[Sequence[torch.Tensor]], loss: Loss) -> float:
    """Return a loss over batches (*prediction, targets), infinite if it is undefined.

    As in Laplace, a metric is updated batch by batch (with mean and variance, or the
    mean alone if it takes only two arguments), a callable gets everything at once. A
    metric is cloned, so that the caller's keeps its state.
    """
    if isinstance(loss, torchmetrics.Metric):
        metric = loss.clone()
        metric.reset()
        for prediction, *more, y in batches:
            metric = metric.to(y.device)
            try:
                metric.update(prediction, *more, y)
            except TypeError:
                metric.update(prediction, y)
        value = float(torch.as_tensor(metric.compute()).double().mean())
    else:
        value = float(loss(*map(torch.cat, zip(*batches, strict=True))))
    return math.inf if math.isnan(value) else value


@dataclass(frozen=True)
class Validator:
    """Validation loss of posteriors over cached features.

    Attributes
    ----------
    cache : FeatureCache
    loss : torchmetrics.Metric or callable, optional
        of probabilities and targets; of means, covariances `(N, C, C)` and targets for
        regression, as in Laplace. The negative log likelihood by default, for which
        variances `(N, C)` serve
    observation : ObservationModel
    link : Link
    n_samples : int
        of the link 'mc'
    fresh_generator : callable
        returns the same random numbers for every candidate
    """

    cache: FeatureCache
    loss: Loss | None
    observation: ObservationModel
    link: Link
    n_samples: int
    fresh_generator: Callable[[], torch.Generator | None]

    def rotated(
        self, posterior: SubspacePosterior
    ) -> tuple[SubspacePosterior, Validator]:
        """Return posterior and validator with which other scalar priors are cheap.

        In the eigenbasis of the curvature a candidate costs K products per output where
        the original basis costs K². Both stay as they are with a prior that is not
        scalar, and where the outputs outnumber the directions: there the links cost
        most, the rotated features would be a large copy, and Monte-Carlo samples would
        differ from those of predictions.
        """
        if posterior.prior.numel() > 1 or posterior.rank <= self.cache.phi.shape[1]:
            return posterior, self
        cache = self.cache.serving(posterior)
        posterior, Q = posterior.rotated()
        cache = replace(cache, phi=cache.phi @ Q.to(cache.phi))
        return posterior, replace(self, cache=cache)

    @torch.no_grad()
    def __call__(self, posterior: SubspacePosterior) -> float:
        """Return the loss to minimise, infinite where it is undefined."""
        if self.loss is None:
            return float(self.example_losses(posterior).mean())
        return score(self._predictions(posterior), self.loss)

    @torch.no_grad()
    def example_losses(
        self, posterior: SubspacePosterior, unseen: bool = False
    ) -> torch.Tensor:
        """Return the negative log likelihood of every example, `(N,)`, in float64.

        It is infinite for all examples of a batch whose predictions are not finite.
        With `unseen` there is one value more: of an example that has an input like
        these and any label, the mean over all inputs and labels alike; for regression
        it is their mean.
        """
        losses, family = self.observation.example_losses(), self.observation.family
        known, others = [], []
        for *given, y in self._predictions(posterior):
            if all(bool(part.isfinite().all()) for part in given):
                known.append(losses(*given, y))
            else:
                known.append(given[0].new_full((len(y),), math.inf).double())
            others.append(known[-1])
            if unseen and not family.is_regression and known[-1].isfinite().all():
                even = 0.5 if family is Family.BERNOULLI else 1 / given[0].shape[-1]
                others[-1] = losses(*given, torch.full_like(given[0], even))
        mean = [torch.cat(others).mean().reshape(1)] if unseen else []
        return torch.cat([*known, *mean])

    @torch.no_grad()
    def mean_variance(self, posterior: SubspacePosterior) -> float:
        """Return the mean variance of f, of what matters to the targets.

        For regression in units of the noise; for one class of several without the
        common shift of all logits, which the softmax does not see.
        """
        total, n = 0.0, 0
        for values, _ in self.values(posterior):
            if self.observation.family is Family.CATEGORICAL:
                values = values.centered()
            variance = values.variance().double()
            if self.observation.family.is_regression:
                variance = variance / self.observation.sigma_noise.square().to(variance)
            total, n = total + float(variance.sum()), n + variance.numel()
        return total / n

    def values(
        self, posterior: SubspacePosterior
    ) -> Iterator[tuple[FunctionValues, torch.Tensor]]:
        """Return Gaussians over the function, and targets, batch by batch."""
        cache = self.cache
        if posterior.H.ndim == 2:  # else the features were rotated with it
            cache = cache.serving(posterior)
        for part in cache.batches():
            values = posterior.function_values(
                part.f_mu, part.phi, part.residual, part.outputs
            )
            yield values, part.targets

    def _predictions(
        self, posterior: SubspacePosterior
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Return probabilities, or mean and (co)variance, and targets of batches."""
        generator = self.fresh_generator()
        for values, targets in self.values(posterior):
            if self.observation.family.is_regression:
                spread = values.variance if self.loss is None else values.covariance
                yield values.mean, spread(), targets
                continue
            probabilities = self.observation.probabilities(
                values, self.link, self.n_samples, generator=generator
            )
            yield probabilities, targets


# Searches


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
    progress_bar: bool,
    validator: Validator,
) -> torch.Tensor:
    """Return the scalar prior precision of the grid with the lowest validation loss."""
    candidate, validator = validator.rotated(posterior)
    losses, bar = [], tqdm(grid, disable=not progress_bar)
    for prior in bar:
        prior_precision = prior.reshape(1).to(posterior.prior)
        losses.append(validator(candidate.with_(prior=prior_precision)))
        bar.set_description(
            f"[Grid search | prior_prec: {prior:.3e}, loss: {losses[-1]:.3f}]"
        )
    return lowest(list(grid), losses)


def search_temperature(
    posterior: SubspacePosterior, n_data: int, validator: Validator
) -> float:
    """Return the factor t by which to divide the likelihood's curvature: from 0.01 to
    that of a tenth of an example.

    A coarse logarithmic grid brackets the minimum, Brent's method refines it.
    """
    candidate, validator = validator.rotated(posterior)

    def loss(log_t: float) -> float:
        return validator(candidate.with_(factor=posterior.factor / 10**log_t))

    grid = np.linspace(-2, max(np.log10(n_data), 0) + 1, 25)
    losses = [loss(log_t) for log_t in grid]
    start = lowest(range(len(grid)), losses)
    bounds = grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)]
    refined: Any = minimize_scalar(
        loss, bounds=bounds, method="bounded", options={"xatol": 1e-3}
    )
    log_t = float(refined.x if refined.fun < losses[start] else grid[start])
    if min(log_t - grid[0], grid[-1] - log_t) < 0.05:
        warn_caller(
            f"The best temperature, {10**log_t:.3g}, lies at the border of the range "
            f"{10 ** grid[0]:.3g} to {10 ** grid[-1]:.3g} that was searched: the prior "
            "precision may not suit the data. optimize_calibration() chooses both.",
            BorderWarning,
        )
    return 10**log_t
