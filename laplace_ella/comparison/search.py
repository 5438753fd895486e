"""Settings of laplace-torch's methods, chosen on validation data for a given link.

A posterior with prior precision δ and likelihood temperature T has the covariance

    (H/T + δI)⁻¹ = T (H + uI)⁻¹   with u = δT,

so that one pass over the validation data with prior precision u and temperature 1 gives
the function values of all pairs (δ, T) with that product: their covariances differ by
the factor T. There is one pass for each u of a grid, whatever the number of links. T
and the softmax temperature τ take no further pass, and are chosen by the very search
that `ELLALaplace.optimize_calibration` uses.

Index legend: N data, C outputs, B batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from laplace_ella import metrics
from laplace_ella.comparison.predictions import (
    link_probabilities,
    moments,
    target_rows,
    with_noise,
)
from laplace_ella.comparison.settings import Settings
from laplace_ella.errors import BorderWarning
from laplace_ella.posterior.likelihood import Family
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.predictive import FunctionValues, draw, psd_root
from laplace_ella.support import batches
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.links import Link
from laplace_ella.support.resources import available_memory, human_bytes
from laplace_ella.tuning.joint_calibration import search_calibration
from laplace_ella.tuning.softening import (
    Axis,
    Softening,
    Weights,
    seen_variance,
    softened,
)

__all__ = ["Choice", "GridSearch", "at_border"]

#: A precision that is not positive definite: no candidate.
NoPosterior = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]

#: Floats of Monte-Carlo samples that are kept for candidates to come.
KEPT = 2**26


@dataclass(frozen=True)
class Choice:
    """A candidate and its validation NLL.

    Attributes
    ----------
    loss : float
    prior_precision, temperature : float
    scale : float
        softmax temperature τ, or the standard deviation of a regression's noise
    borders : tuple of str
        a sentence for each search that ended at the border of its range
    """

    loss: float
    prior_precision: float
    temperature: float
    scale: float
    borders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Values:
    """Function values of validation data: mean `(N, C)`, covariance `(N, C, C)`; and
    targets, `(N,)` or `(N, C)`."""

    mean: torch.Tensor
    covariance: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class GridSearch:
    """One pass over the validation data per prior precision, for all links together.

    Attributes
    ----------
    la : Laplace
        fitted, of laplace-torch, with Gaussian function values; its prior precision is
        changed, and its temperature where that is searched too
    loader : DataLoader
        validation data
    links : sequence of str
        ('',) for regression
    settings : Settings
    grid : sequence of float
        prior precisions, ascending
    seed : int
        of Monte-Carlo links: the same random numbers for every candidate
    """

    la: Any
    loader: Any
    links: Sequence[str]
    settings: Settings
    grid: Sequence[float]
    seed: int

    def priors(self) -> dict[str, Choice]:
        """By link, the prior precision of the grid with the lowest validation NLL."""
        temperature = float(self.la.temperature)
        scale = float(self.la.sigma_noise) if self.settings.is_regression else 1.0
        found: dict[str, list[Choice]] = {link: [] for link in self.links}
        for u in self.grid:
            self.la.prior_precision = u
            with suppress(NoPosterior):
                borders = self._border("prior precision", u)
                for link, loss in self._losses().items():
                    found[link].append(Choice(loss, u, temperature, scale, borders))
        return {link: _best(choices) for link, choices in found.items()}

    def calibrations(self) -> dict[str, Choice]:
        """By link, the prior precision, T and τ, or noise, that calibrate best.

        Borders are warned of by the search itself, link by link.
        """
        self.la.temperature = 1.0
        values: dict[float, Values] = {}
        for u in self.grid:
            self.la.prior_precision = u
            with suppress(NoPosterior):
                values[-math.log10(u)] = _joined(list(self._passed()))
            self._check_memory(values)
        _check_some(values)
        return {link: self._calibration(values, link) for link in self.links}

    def _check_memory(self, values: Mapping[float, Values]) -> None:
        """Covariances `(N, C, C)` of all candidates are kept: not of many outputs."""
        free = available_memory(next(self.la.model.parameters()).device)
        size = max((v.covariance.nbytes for v in values.values()), default=0)
        needed = 2 * (len(self.grid) - len(values)) * size  # and their roots
        if free is not None and needed > free:
            raise MemoryError(f"out of memory: {human_bytes(needed)} more are needed")

    def _calibration(self, values: Mapping[float, Values], link: str) -> Choice:
        noise = torch.as_tensor(self.la.sigma_noise).detach()
        candidates = LaplaceCandidates(values, link, self.settings, noise, self.seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BorderWarning)
            # It asks for no more than is defined here.
            found = search_calibration(candidates, 1.0)
        borders = [w for w in caught if issubclass(w.category, BorderWarning)]
        regression = self.settings.is_regression
        return Choice(
            found.loss,
            found.prior_precision,
            found.temperature,
            found.sigma_noise[0] if regression else found.softmax_temperature,
            tuple(str(warning.message) for warning in borders),
        )

    def _border(self, name: str, value: float) -> tuple[str, ...]:
        return at_border(name, value, (self.grid[0], self.grid[-1]))

    # --- passes ----------------------------------------------------------------------

    def _losses(self) -> dict[str, float]:
        """Validation NLL by link, with the current prior precision."""
        if self.settings.is_regression:
            values = _joined(list(self._passed()))
            variance = values.covariance.diagonal(dim1=-2, dim2=-1)
            noisy = with_noise(variance, torch.as_tensor(self.la.sigma_noise))
            return {"": metrics.gaussian_nll(values.mean, noisy, values.targets)}
        probs: dict[str, list[torch.Tensor]] = {link: [] for link in self.links}
        targets: list[torch.Tensor] = []
        noise = {link: _generator(self.la, self.seed) for link in self.links}
        for part in self._passed():  # covariances of one batch at a time
            targets.append(part.targets)
            for link in self.links:
                p = link_probabilities(
                    part.mean,
                    part.covariance,
                    link,
                    self.settings.n_samples,
                    noise[link],
                )
                probs[link].append(p)
        y = torch.cat(targets)
        return {link: metrics.nll(torch.cat(parts), y) for link, parts in probs.items()}

    @torch.no_grad()
    def _passed(self) -> Iterator[Values]:
        """Function values batch by batch; examples without a class are left out."""
        device = next(self.la.model.parameters()).device
        for batch in self.loader:
            x, y = batches.split_batch(batch, self.settings.dict_key_y)
            mean, covariance = moments(self.la, batches.to_device(x, device))
            y = target_rows(y, self.settings).to(device)
            if not self.settings.is_regression:
                known = y != metrics.IGNORED
                mean, covariance, y = mean[known], covariance[known], y[known]
            yield Values(mean, covariance, y)


def _joined(parts: Sequence[Values]) -> Values:
    return Values(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.covariance for part in parts]),
        torch.cat([part.targets for part in parts]),
    )


def _generator(la: Any, seed: int) -> torch.Generator:
    return torch.Generator(next(la.model.parameters()).device).manual_seed(seed)


def _best(choices: Sequence[Choice]) -> Choice:
    _check_some([choice for choice in choices if math.isfinite(choice.loss)])
    return min(choices, key=lambda choice: choice.loss)


def _check_some(candidates: Collection[Any]) -> None:
    if not candidates:
        raise ValueError("the validation NLL is undefined for every prior precision")


def at_border(name: str, value: float, bounds: tuple[float, float]) -> tuple[str, ...]:
    """A sentence if a search may have been cut short by its range, else none."""
    low, high = bounds
    if low * 1.01 < value < high / 1.01 or low == high:
        return ()
    return (
        f"The best {name}, {value:.3g}, lies at the border of the range {low:.3g} to "
        f"{high:.3g} that was searched.",
    )


# --- candidates ----------------------------------------------------------------------


class LaplaceCandidates:
    """Validation losses of laplace-torch's posteriors, as `tuning.softening.Candidates`
    has them for ELLA: with r = 1/u of the grid's values only.

    Parameters
    ----------
    values : mapping of float to Values
        by log10 r, of temperature 1
    link : str
    settings : Settings
    noise : torch.Tensor
        of a regression, for which the values are
    seed : int
    """

    def __init__(
        self,
        values: Mapping[float, Values],
        link: str,
        settings: Settings,
        noise: torch.Tensor,
        seed: int,
    ) -> None:
        self.values, self.link, self.settings, self.seed = values, link, settings, seed
        first = next(iter(values.values()))
        family = Family.GAUSSIAN if settings.is_regression else Family.CATEGORICAL
        self.observation = ObservationModel(family, OutputLayout.FLAT, noise, 1.0)
        self.outputs, self.targets = first.mean, first.targets
        self.axes = (Axis("ratio", min(values), max(values)),)
        self.roots: dict[float, torch.Tensor] = {}
        self.deviations: dict[float, torch.Tensor] = {}
        self.variances: dict[float, float] = {}

    def shapes(self) -> list[tuple[float, ...]]:
        """The ratios for which there was a pass."""
        return [(ratio,) for ratio in self.values]

    def losses(self, point: Softening) -> torch.Tensor:
        """Negative log likelihood of every validation example, `(N,)`."""
        ratio = self._nearest(point)
        observation = softened(self.observation, point.base)
        values = self.values[ratio]
        root_T = math.sqrt(1 / self.weights_at(point).factor)
        f = FunctionValues(values.mean, root_T * self._root(ratio))
        losses = observation.example_losses()
        if self.settings.is_regression:
            return losses(f.mean, f.variance(), values.targets)
        if self.link == Link.MC and self._may_keep_samples():
            samples = values.mean.T + root_T * self._deviations(ratio)
            p = observation.sampled_probabilities(samples, dim=1).mean(0).T
        else:
            p = observation.probabilities(
                f, self.link, self.settings.n_samples, generator=self._generator()
            )
        return losses(p, values.targets)

    def weights_at(self, point: Softening) -> Weights:
        """δ and 1/T for which the mean variance is its share of the softening."""
        unit = 1.0 if self.settings.is_regression else math.pi / 8
        ratio = self._nearest(point)
        T = point.share * point.scale**2 / unit / self._variance(ratio)
        return Weights(10**-ratio / T, 1 / T)

    def _nearest(self, point: Softening) -> float:
        return min(self.values, key=lambda ratio: abs(ratio - point.shape[0]))

    def _root(self, ratio: float) -> torch.Tensor:
        if ratio not in self.roots:
            self.roots[ratio] = psd_root(self.values[ratio].covariance)
        return self.roots[ratio]

    def _generator(self) -> torch.Generator:
        """The same random numbers for every candidate."""
        device = self.outputs.device
        return torch.Generator(device).manual_seed(self.seed)

    def _may_keep_samples(self) -> bool:
        size = self.outputs.numel() * self.settings.n_samples
        return len(self.values) * size <= KEPT

    def _deviations(self, ratio: float) -> torch.Tensor:
        """Samples `(S, C, N)` for T = 1, less their mean: the softmax over the few
        classes is several times faster in this order."""
        if ratio not in self.deviations:
            zero = torch.zeros_like(self.values[ratio].mean)
            f = FunctionValues(zero, self._root(ratio))
            samples = draw(f, self.settings.n_samples, self._generator())
            self.deviations[ratio] = samples.mT.contiguous()
        return self.deviations[ratio]

    def _variance(self, ratio: float) -> float:
        """Mean variance for T = 1."""
        if ratio not in self.variances:
            f = FunctionValues(self.values[ratio].mean, self._root(ratio))
            seen = seen_variance(f, self.observation)
            self.variances[ratio] = float(seen.double().mean())
        return self.variances[ratio]
