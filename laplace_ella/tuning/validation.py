"""The loss of posteriors on validation data whose features are cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchmetrics

from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.predictive import FunctionValues
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.links import Link
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.eigenbasis import EigenPosterior, turn

__all__ = [
    "DEFAULT_LINK",
    "Loss",
    "Validator",
    "check_loss",
    "score",
]

Loss = torchmetrics.Metric | Callable[..., Any]

#: Link where none is given, when tuning as when predicting.
DEFAULT_LINK = Link.PROBIT


def check_loss(loss: Any) -> None:
    """A loss must be something that can be evaluated."""
    if loss is not None and not callable(loss):
        raise TypeError(
            "loss must be a torchmetrics.Metric or a callable, got "
            f"{type(loss).__name__}."
        )


def score(outputs: Iterable[tuple[Any, torch.Tensor]], loss: Loss) -> float:
    """A loss over batches (prediction, targets).

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
    link_approx : Link
    n_samples : int
        of the link 'mc'
    fresh_generator : callable
        the same random numbers for every candidate
    """

    cache: FeatureCache
    loss: Loss | None
    observation: ObservationModel
    link_approx: Link
    n_samples: int
    fresh_generator: Callable[[], torch.Generator | None]

    def for_scalars(
        self, posterior: SubspacePosterior
    ) -> tuple[SubspacePosterior | EigenPosterior, Validator]:
        """Posterior and validator with which other factors and priors are cheap.

        They stay as they are with a prior that is not scalar, and where the outputs
        outnumber the directions: there the links cost most, the turned features would
        be a large copy, and Monte-Carlo samples would differ from those of predictions.
        """
        n_outputs, rank = self.cache.phi.shape[1], posterior.rank
        if not posterior.is_scalar or rank <= n_outputs:
            return posterior, self
        turned, cache = turn(posterior, self.cache)
        return turned, replace(self, cache=cache)

    def __call__(self, posterior: SubspacePosterior | EigenPosterior) -> float:
        """The loss to minimise; infinite where it is undefined."""
        value = self.score(posterior)
        return math.inf if math.isnan(value) else value

    @torch.no_grad()
    def score(self, posterior: SubspacePosterior | EigenPosterior) -> float:
        """The loss as it is."""
        loss = self.loss or self.observation.default_loss()
        return score(self._predictions(posterior), loss)

    @torch.no_grad()
    def example_losses(
        self, posterior: SubspacePosterior | EigenPosterior
    ) -> torch.Tensor:
        """Negative log likelihood of every example, `(N,)`, in float64."""
        losses = self.observation.example_losses()
        parts = []
        for prediction, y in self._predictions(posterior):
            if not isinstance(prediction, tuple):
                prediction = (prediction,)
            parts.append(losses(*prediction, y))
        return torch.cat(parts)

    def values(
        self, posterior: SubspacePosterior | EigenPosterior
    ) -> Iterator[tuple[FunctionValues, torch.Tensor]]:
        """Gaussians over the function and targets, batch by batch."""
        cache = self.cache
        if isinstance(posterior, SubspacePosterior):  # else turned with its features
            cache = cache.serving(posterior)
        for part in cache.batches():
            values = posterior.function_values(
                part.f_mu, part.phi, part.residual, part.unseen, part.outputs
            )
            yield values, part.targets

    def _predictions(
        self, posterior: SubspacePosterior | EigenPosterior
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        generator = self.fresh_generator()
        for values, targets in self.values(posterior):
            if self.observation.family.is_regression:
                spread = values.variance if self.loss is None else values.covariance
                yield (values.mean, spread()), targets
                continue
            probabilities = self.observation.probabilities(
                values, self.link_approx, self.n_samples, generator=generator
            )
            yield probabilities, targets
