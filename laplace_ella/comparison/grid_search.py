"""Settings of laplace-torch's posteriors, chosen on validation data for a link.

With prior precision δ and likelihood temperature T the posterior covariance is

    (H/(σ²T) + δI)⁻¹ = T (H/σ² + uI)⁻¹   with u = δT,

so that one pass over the validation data with prior precision u and temperature 1 gives
the function values of all pairs (δ, T) with that product. There is one pass for each u
of a grid, whatever the number of links; T and the softmax temperature τ take no further
pass, and are chosen by the search of `ELLALaplace.optimize_calibration`.

Index legend: N data, C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.observation import (
    Family,
    FunctionValues,
    Link,
    ObservationModel,
    psd_root,
)
from laplace_ella.support.batches import OutputLayout
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.calibration import Calibration, search_calibration
from laplace_ella.tuning.validation import Validator

__all__ = ["GridSearch", "moments"]

#: A precision that is not positive definite is no candidate.
NoPosterior = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def moments(la: Any, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean `(B, C)` and covariance `(B, C, C)` of the function values.

    laplace-torch has no public name for them in its parametric classes.
    """
    public = getattr(la, "predictive_moments", None)
    mean, covariance = public(x) if public else la._glm_predictive_distribution(x)
    return mean.detach(), covariance.detach()


@dataclass(frozen=True)
class GridPosterior:
    """A posterior by its settings, for which the values of a `GridValidator` stand.

    Attributes
    ----------
    H : torch.Tensor
        `(2, 2)`, eigenvalues with which the range of the search is that of the grid
    factor, prior : torch.Tensor
        1/(σ²T) and δ
    complement : Complement
        none: all directions are in the values
    """

    H: torch.Tensor
    factor: torch.Tensor
    prior: torch.Tensor
    complement: Any = Complement.DROP

    def with_(self, **changes: Any) -> GridPosterior:
        """Return the posterior with other settings."""
        return replace(self, **changes)


@dataclass(frozen=True)
class GridValidator(Validator):
    """Validation losses from function values that were computed on a grid.

    Attributes
    ----------
    roots : mapping of float to torch.Tensor
        by u, roots `(N, C, C)` of the covariances for prior precision u and T = 1
    factor_at_one : float
        1/σ² of these
    """

    roots: Mapping[float, torch.Tensor] = field(default_factory=dict)
    factor_at_one: float = 1.0

    def rotated(self, posterior: Any) -> tuple[Any, Validator]:
        """Return both as they are: no candidate costs more than another."""
        return posterior, self

    def nearest(self, ratio: float) -> float:
        """Return the u of the grid whose data weigh most nearly `ratio` times the
        prior."""
        wanted = self.factor_at_one / ratio
        return min(self.roots, key=lambda u: abs(math.log(u / wanted)))

    def values(self, posterior: Any) -> Iterator[tuple[FunctionValues, torch.Tensor]]:
        """Yield the Gaussian over all examples, and their targets."""
        prior = float(posterior.prior)
        u = self.nearest(float(posterior.factor) / prior)
        # δ⁻¹(rH + 1)⁻¹ depends on δ by its factor only, for a given r
        root = self.roots[u] * math.sqrt(u / prior)
        yield FunctionValues(self.cache.f_mu, root), self.cache.targets


@dataclass(frozen=True)
class GridSearch:
    """The function values of validation data, for every prior precision of a grid.

    Attributes
    ----------
    validator : GridValidator
    grid : list of float
        prior precisions, ascending
    """

    validator: GridValidator
    grid: list[float]

    @classmethod
    def of(
        cls,
        la: Any,
        batches: Iterable[tuple[Any, torch.Tensor]],
        grid: list[float],
        n_samples: int,
        seed: int,
    ) -> GridSearch:
        """Compute the values of a fitted posterior, whose prior precision and
        temperature are changed; `batches` has inputs on the device, and targets."""
        batches, roots, means = list(batches), {}, []
        la.temperature = 1.0
        for u in grid:
            la.prior_precision = u
            try:
                values = [moments(la, x) for x, _ in batches]
            except NoPosterior:
                continue
            roots[u] = torch.cat([psd_root(covariance) for _, covariance in values])
            means = [mean for mean, _ in values]
        if not roots:
            raise ValueError("The posterior is not defined for any prior of the grid.")
        f_mu = torch.cat(means)
        targets = torch.cat([y for _, y in batches]).to(f_mu.device)
        regression = la.likelihood == "regression"
        if not regression:  # examples without a class
            known = targets != -100
            f_mu, targets = f_mu[known], targets[known]
            roots = {u: root[known] for u, root in roots.items()}
        noise = torch.as_tensor(la.sigma_noise).detach().cpu().double()
        family = Family.GAUSSIAN if regression else Family.CATEGORICAL
        validator = GridValidator(
            FeatureCache(f_mu, f_mu.new_zeros(*f_mu.shape, 0), targets),
            None,
            ObservationModel(family, OutputLayout.FLAT, noise, 1.0),
            Link.PROBIT,
            n_samples,
            lambda: torch.Generator(f_mu.device).manual_seed(seed),
            roots,
            float(1 / noise**2),
        )
        return cls(validator, grid)

    def _for(self, link: str) -> tuple[GridValidator, GridPosterior]:
        validator = self.validator
        if link:
            validator = replace(validator, link=Link(link))
        one = validator.factor_at_one
        # A search goes from 1 % of the reach of the largest eigenvalue to 100 times
        # that of the smallest.
        ends = torch.tensor([0.01 * self.grid[-1], 100 * self.grid[0]]) / one
        factor, prior = torch.tensor([[one]]), torch.ones(1)
        return validator, GridPosterior(ends.double().diag(), factor, prior)

    def prior(self, link: str) -> tuple[float, tuple[str, ...]]:
        """Return the prior precision with the lowest validation loss, and a sentence
        if it is at the border of the grid."""
        validator, posterior = self._for(link)
        losses = {}
        for u in validator.roots:
            candidate = posterior.with_(prior=torch.tensor([u]))
            losses[u] = float(validator.example_losses(candidate).mean())  # pyright: ignore[reportArgumentType]
        best = min(losses, key=lambda u: losses[u])
        if not math.isfinite(losses[best]):
            raise ValueError("The validation loss is infinite for all priors.")
        if best not in (self.grid[0], self.grid[-1]) or len(self.grid) == 1:
            return best, ()
        border = f"the best prior precision, {best:.3g}, is at the border of the grid"
        return best, (border,)

    def calibration(self, link: str) -> Calibration:
        """Return prior precision, temperature and softmax temperature, or noise, that
        calibrate best. The first two are at a point of the grid."""
        validator, posterior = self._for(link)
        found = search_calibration(posterior, validator)  # pyright: ignore[reportArgumentType]
        if found.kept:
            return found
        noise = found.sigma_noise[0] if found.sigma_noise else 1.0
        factor = 1 / (noise**2 * found.temperature)
        u = validator.nearest(factor / found.prior_precision)
        # u/(1/σ²) is the same at T = 1 and the noise before as with what was found.
        temperature = u * found.prior_precision**-1 / validator.factor_at_one / noise**2
        return replace(found, temperature=temperature)
