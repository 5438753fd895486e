"""The loss of posteriors on validation data whose features are cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchmetrics

from laplace_ella.posterior.observation import (
    Family,
    FunctionValues,
    Link,
    ObservationModel,
)
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.tuning.cache import FeatureCache

Loss = torchmetrics.Metric | Callable[..., Any]


def check_loss(loss: Any) -> None:
    """Refuse a loss that cannot be evaluated."""
    if loss is not None and not callable(loss):
        raise TypeError(
            "loss must be a torchmetrics.Metric or a callable, got "
            f"{type(loss).__name__}."
        )


def score(outputs: Iterable[tuple[Any, torch.Tensor]], loss: Loss) -> float:
    """Return a loss over batches (prediction, targets).

    As in Laplace, a metric is updated batch by batch (with mean and variance, or the
    mean alone if it takes only two arguments), a callable gets everything at once. A
    metric is cloned, so that the caller's keeps its state.
    """
    metric = None
    if isinstance(loss, torchmetrics.Metric):
        metric = loss.clone()
        metric.reset()
    collected = []
    for prediction, y in outputs:
        parts = prediction if isinstance(prediction, tuple) else (prediction,)
        if metric is None:
            collected.append((*parts, y))
            continue
        metric = metric.to(y.device)
        try:
            metric.update(*parts, y)
        except TypeError:
            metric.update(parts[0], y)
    if metric is not None:
        return float(torch.as_tensor(metric.compute()).double().mean())
    return float(
        loss(*(torch.cat(tensors) for tensors in zip(*collected, strict=True)))
    )


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

    def __call__(self, posterior: SubspacePosterior) -> float:
        """Return the loss to minimise, infinite where it is undefined."""
        if self.loss is None:
            return float(self.example_losses(posterior).mean())
        with torch.no_grad():
            value = score(self._predictions(posterior), self.loss)
        return math.inf if math.isnan(value) else value

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
        losses, parts, others = self.observation.example_losses(), [], []
        regression = self.observation.family.is_regression
        for prediction, y in self._predictions(posterior):
            given = prediction if isinstance(prediction, tuple) else (prediction,)
            if not all(bool(part.isfinite().all()) for part in given):
                y = torch.full(
                    (len(y),), math.inf, dtype=torch.float64, device=y.device
                )
                parts, others = [*parts, y], [*others, y]
                continue
            parts.append(losses(*given, y))
            if unseen and not regression:
                labels = self.observation.family is Family.BERNOULLI
                even = 0.5 if labels else 1 / given[0].shape[-1]
                others.append(losses(*given, torch.full_like(given[0], even)))
        if unseen:
            parts.append(torch.cat(others or parts).mean().reshape(1))
        return torch.cat(parts)

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
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        generator = self.fresh_generator()
        for values, targets in self.values(posterior):
            if self.observation.family.is_regression:
                spread = values.variance if self.loss is None else values.covariance
                yield (values.mean, spread()), targets
                continue
            probabilities = self.observation.probabilities(
                values, self.link, self.n_samples, generator=generator
            )
            yield probabilities, targets
