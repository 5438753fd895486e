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

from laplace_ella.errors import BorderWarning, warn_caller
from laplace_ella.metrics import IGNORED
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
from laplace_ella.tuning.calibration import search_calibration
from laplace_ella.tuning.validation import Validator


@torch.no_grad()
def moments(la: Any, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean `(B, C)` and covariance `(B, C, C)` of the function values, for which
    laplace-torch has no public name in its parametric classes."""
    public = getattr(la, "predictive_moments", None)
    return public(x) if public else la._glm_predictive_distribution(x)


@dataclass(frozen=True)
class GridPosterior:
    """Settings for which a `GridValidator` has values: 1/(σ²T), δ and, as eigenvalues
    `(2, 2)`, the range of their ratio."""

    H: torch.Tensor
    factor: torch.Tensor
    prior: torch.Tensor
    complement: Any = Complement.DROP  # all directions are in the values
    with_ = replace


@dataclass(frozen=True)
class GridValidator(Validator):
    """Validation losses by function values that were computed on a grid: roots
    `(N, C, C)` of their covariances for prior precisions u and T = 1, by u, and 1/σ² of
    these."""

    roots: Mapping[float, torch.Tensor] = field(default_factory=dict)
    factor_at_one: float = 1.0

    def rotated(self, posterior: Any) -> tuple[Any, Validator]:
        """Return both as they are: no candidate costs more than another."""
        return posterior, self

    def nearest(self, factor: float, prior: float) -> float:
        """Return the u of the grid with nearly this ratio of data and prior."""
        wanted = self.factor_at_one * prior / factor
        return min(self.roots, key=lambda u: abs(math.log(u / wanted)))

    def values(self, posterior: Any) -> Iterator[tuple[FunctionValues, torch.Tensor]]:
        """Yield the Gaussians over all examples, and the targets."""
        prior = float(posterior.prior)
        u = self.nearest(float(posterior.factor), prior)
        # δ⁻¹(rH + 1)⁻¹: for a given ratio r the prior is a factor
        root = self.roots[u] * math.sqrt(u / prior)
        yield FunctionValues(self.cache.f_mu, root), self.cache.targets

    def settings(self, u: float) -> Any:
        """Return those of T = 1 and δ = u. Searches go from 1 % of the reach of the
        largest eigenvalue to 100 times that of the smallest, which is the grid."""
        one = self.factor_at_one
        H = torch.tensor([0.01 * max(self.roots), 100 * min(self.roots)]).double()
        return GridPosterior(H.diag() / one, torch.tensor([one]), torch.tensor([u]))


@torch.no_grad()
def compute_grid(
    la: Any,
    batches: Iterable[tuple[Any, torch.Tensor]],
    grid: list[float],
    n_samples: int,
    seed: int,
) -> GridValidator:
    """Return the validation losses of a fitted posterior, whose prior precision and
    temperature are changed, from batches of inputs and targets on the device."""
    batches, roots, means = list(batches), {}, []
    targets = torch.cat([y for _, y in batches])
    regression = la.likelihood == "regression"
    known = slice(None) if regression else targets != IGNORED
    la.temperature = 1.0
    for u in grid:
        la.prior_precision = u
        try:
            means, covariances = zip(*(moments(la, x) for x, _ in batches), strict=True)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            continue  # not positive definite: no candidate
        roots[u] = torch.cat([psd_root(each) for each in covariances])[known]
    if not roots:
        raise ValueError("The posterior is not defined for any prior of the grid.")
    f_mu, noise = torch.cat(means)[known], torch.as_tensor(la.sigma_noise).detach()
    family = Family.GAUSSIAN if regression else Family.CATEGORICAL
    return GridValidator(
        FeatureCache(f_mu, f_mu.new_zeros(*f_mu.shape, 0), targets[known]),
        None,
        ObservationModel(family, OutputLayout.FLAT, noise, 1.0),
        Link.PROBIT,
        n_samples,
        lambda: torch.Generator(f_mu.device).manual_seed(seed),
        roots,
        float(1 / noise**2),
    )


def search_prior(validator: GridValidator, link: str) -> dict[str, float]:
    """Return the prior precision of the grid with the lowest validation loss."""
    validator = replace(validator, link=Link(link))
    losses = {u: validator(validator.settings(u)) for u in validator.roots}
    best = min(losses, key=losses.__getitem__)
    if not math.isfinite(losses[best]):
        raise ValueError("The validation loss is infinite for every prior.")
    if len(losses) > 1 and best in (min(losses), max(losses)):
        warn_caller(
            f"The best prior precision, {best:.3g}, is at the border of the grid.",
            BorderWarning,
        )
    return {"prior_precision": best}


def calibrate(validator: GridValidator, link: str) -> dict[str, float]:
    """Return prior precision, temperature and softmax temperature, or noise, that
    calibrate best; nothing where those before are kept. The product of the first two is
    one of the grid."""
    validator = replace(validator, link=Link(link))
    found = search_calibration(validator.settings(1.0), validator)
    if found.kept:
        return {}
    delta, tau = found.prior_precision, found.softmax_temperature
    chosen = {"prior_precision": delta, "softmax_temperature": tau}
    if found.sigma_noise:
        chosen["sigma_noise"] = found.sigma_noise[0]
    variance = chosen.get("sigma_noise", 1.0) ** 2
    u = validator.nearest(1 / (variance * found.temperature), delta)
    return {**chosen, "temperature": u / (validator.factor_at_one * variance * delta)}
