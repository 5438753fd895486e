"""Posteriors and softmax temperatures by what they do to predictions.

A confident prediction is softened by dividing f by τ, and by averaging over a posterior
whose covariance is C(r)/δ: C(r) = φ(1 + rH)⁻¹φᵀ (+ the part outside the basis), with
r = f/δ the weight of the data against the prior. In the probit approximation the two
act as one division by √(τ² + π/8·var f). The losses of (τ, T, δ) therefore have curved
valleys, along which these change and predictions hardly do. They are straightened by

    scale² = τ² + π/8·v       how much predictions are softened
    share  = π/8·v / scale²   the posterior's share of it, the rest is τ's
    shape  = (r,) or (r, α/δ)  how the posterior distributes it among inputs

with v the mean variance of f at the validation inputs, and α the precision outside the
basis where that is a setting of its own. A share of zero is temperature
scaling by τ = scale. For regression, where noise and variance of f add up, τ is the
factor of σ, variances are in units of σ² and π/8 is 1.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from laplace_ella.posterior.likelihood import Family
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.outside import Complement
from laplace_ella.posterior.predictive import FunctionValues
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.tuning.eigenbasis import EigenPosterior
from laplace_ella.tuning.validation import Validator

__all__ = ["Axis", "Candidates", "SearchSpace", "Softening", "Weights"]

#: log10 of α/δ: from ten times the prior's variance outside the basis to next to none.
OUTSIDE = (-1.0, 5.0)

#: Share that stands for none: the posterior changes a logit by less than 1e-4 of τ.
NO_SHARE = 1e-8


@dataclass(frozen=True)
class Axis:
    """One number of the shape, as log10, and where it is looked for.

    Attributes
    ----------
    name : str
    low, high : float
        limits beyond which the posterior no longer changes
    """

    name: str
    low: float
    high: float

    def is_border(self, value: float) -> bool:
        return min(abs(value - self.low), abs(value - self.high)) < 0.05


@dataclass(frozen=True)
class Softening:
    """How much predictions are softened, and by what; see the module's docstring.

    Attributes
    ----------
    scale : float
    share : float
        from `NO_SHARE` to below 1
    shape : tuple of float
        log10 of its numbers, in the order of `Candidates.axes`
    """

    scale: float
    share: float
    shape: tuple[float, ...]

    @property
    def base(self) -> float:
        """τ, or the factor of the noise."""
        return self.scale * math.sqrt(1 - self.share)


@dataclass(frozen=True)
class Weights:
    """What a softening means for the posterior.

    Attributes
    ----------
    prior : float
        δ
    factor : float
        f, by which the curvature is multiplied
    complement : float, optional
        precision outside the basis, where that is a setting of its own
    """

    prior: float
    factor: float
    complement: float | None = None


class SearchSpace(Protocol):
    """What a search needs of a fit: validation data, losses, and their meaning."""

    @property
    def axes(self) -> tuple[Axis, ...]: ...

    @property
    def outputs(self) -> torch.Tensor:
        """Of the network, `(N, C)`."""
        ...

    @property
    def targets(self) -> torch.Tensor: ...

    @property
    def observation(self) -> ObservationModel: ...

    def shapes(self) -> list[tuple[float, ...]]:
        """Some to start from."""
        ...

    def losses(self, point: Softening) -> torch.Tensor:
        """Negative log likelihood of every validation example, `(N,)`."""
        ...

    def weights_at(self, point: Softening) -> Weights: ...


@dataclass(frozen=True)
class Candidates:
    """Validation losses of one fit under any softening.

    Attributes
    ----------
    posterior : SubspacePosterior or EigenPosterior
        with a scalar prior
    validator : Validator
        of the same, see `Validator.for_scalars`
    axes : tuple of Axis
        of the shape
    """

    posterior: SubspacePosterior | EigenPosterior
    validator: Validator
    axes: tuple[Axis, ...]
    _known: dict[tuple[float, ...], float] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, posterior: SubspacePosterior, validator: Validator) -> Candidates:
        """Every scalar prior and temperature of a fit, and precision outside the basis
        if its complement is a number."""
        turned, validator = validator.for_scalars(posterior)
        eigenvalues = (
            turned.eigenvalues
            if isinstance(turned, EigenPosterior)
            else torch.linalg.eigvalsh(posterior.H.double())
        )
        top = float(eigenvalues.max())
        if not top > 0:
            raise ValueError(
                "The posterior has the curvature of no data, so there is nothing to "
                "weigh against the prior. Call fit(train_loader) first."
            )
        low = max(float(eigenvalues.min()), 1e-6 * top)
        ratio = Axis("ratio", math.log10(0.01 / top), math.log10(100 / low))
        if isinstance(posterior.complement, Complement):
            return cls(turned, validator, (ratio,))
        return cls(turned, validator, (ratio, Axis("complement", *OUTSIDE)))

    @property
    def outputs(self) -> torch.Tensor:
        return self.validator.cache.f_mu

    @property
    def targets(self) -> torch.Tensor:
        return self.validator.cache.targets

    @property
    def observation(self) -> ObservationModel:
        return self.validator.observation

    def weights_at(self, point: Softening) -> Weights:
        """Prior, factor and complement of `posterior_at`."""
        posterior = self.posterior_at(point)
        complement = posterior.complement
        fixed = None if isinstance(complement, Complement) else complement
        return Weights(float(posterior.prior), float(posterior.factor), fixed)

    def shapes(self) -> list[tuple[float, ...]]:
        """A grid of shapes, about a decade apart."""
        grids = (
            np.linspace(a.low, a.high, max(3, round(a.high - a.low) + 1)).tolist()
            for a in self.axes
        )
        return list(itertools.product(*grids))

    def losses(self, point: Softening) -> torch.Tensor:
        """Negative log likelihood of every validation example, `(N,)`."""
        observation = softened(self.validator.observation, point.base)
        validator = replace(self.validator, observation=observation)
        return validator.example_losses(self.posterior_at(point))

    def posterior_at(self, point: Softening) -> SubspacePosterior | EigenPosterior:
        """The posterior whose mean variance is its share of the softening."""
        regression = self.validator.observation.family.is_regression
        variance = point.share * point.scale**2 / (1 if regression else math.pi / 8)
        return self.with_variance(point.shape, variance)

    def with_variance(
        self, shape: tuple[float, ...], variance: float
    ) -> SubspacePosterior | EigenPosterior:
        """The posterior of a shape whose mean variance is v."""
        return self._with(shape, self.unit_variance(shape) / variance)

    def unit_variance(self, shape: tuple[float, ...]) -> float:
        """v for the prior precision δ = 1."""
        if shape not in self._known:
            observation = self.validator.observation
            total, n = 0.0, 0
            for values, _ in self.validator.values(self._with(shape, 1.0)):
                total += float(seen_variance(values, observation).double().sum())
                n += values.mean.numel()
            self._known[shape] = total / n
        return self._known[shape]

    def _with(
        self, shape: tuple[float, ...], prior: float
    ) -> SubspacePosterior | EigenPosterior:
        """The posterior of a shape, for a prior precision."""
        log_ratio, *log_outside = shape
        old = self.posterior
        changes: dict[str, Any] = {}
        if log_outside:
            changes["complement"] = 10 ** log_outside[0] * prior
        return old.with_(
            factor=torch.full_like(old.factor, 10**log_ratio * prior),
            prior=torch.full_like(old.prior, prior),
            **changes,
        )


def softened(observation: ObservationModel, base: float) -> ObservationModel:
    """Targets behind f/base, or with base times the noise."""
    if observation.family.is_regression:
        return replace(observation, sigma_noise=observation.sigma_noise * base)
    return replace(observation, softmax_temperature=base)


def seen_variance(
    values: FunctionValues, observation: ObservationModel
) -> torch.Tensor:
    """Variances `(B, C)` that matter to the targets: in units of the noise, or without
    the common shift of logits that a softmax does not see."""
    if observation.family.is_regression:
        variance = values.variance()
        return variance / observation.sigma_noise.detach().square().to(variance)
    if observation.family is Family.CATEGORICAL:
        values = values.centered()
    return values.variance()
