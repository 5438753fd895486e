"""Settings of laplace-torch's methods, chosen on validation data for a given link.

A posterior with prior precision δ and likelihood temperature T has the covariance

    (H/T + δI)⁻¹ = T (H + uI)⁻¹   with u = δT,

so that one pass over the validation data with prior precision u and temperature 1 gives
the function values of all pairs (δ, T) with that product: their covariances differ by
the factor T. There is one pass for each u of a grid, whatever the number of links; T
and the softmax temperature τ are found for each u without another one.

Index legend: N data, C outputs, B batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from laplace_ella import metrics
from laplace_ella.comparison.predictions import (
    link_probabilities,
    moments,
    target_rows,
    with_noise,
)
from laplace_ella.comparison.settings import Settings
from laplace_ella.errors import BorderWarning
from laplace_ella.posterior.predictive import (
    FunctionValues,
    class_probabilities,
    psd_root,
)
from laplace_ella.support import batches
from laplace_ella.tuning.calibration import temperature_scaling

__all__ = ["Choice", "GridSearch", "at_border"]

#: A precision that is not positive definite: no candidate.
NoPosterior = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]

#: Where T is looked for: mean variances of the function values that come of it.
VARIANCES = (1e-4, 1e4)

#: Where τ is looked for; the noise relative to what `compare` assumed.
SCALES = (1e-2, 1e2)

#: Floats that the samples of one chunk of examples may hold.
CHUNK = 2**22


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
        """By link, the prior precision, T and τ, or noise, with the lowest NLL.

        With next to no variance this is temperature scaling, from which it starts.
        """
        self.la.temperature = 1.0
        found: dict[str, list[Choice]] = {link: [] for link in self.links}
        points: dict[str, np.ndarray] = {}
        for u in self.grid:
            self.la.prior_precision = u
            with suppress(NoPosterior):
                values = _joined(list(self._passed()))
                borders = self._border("prior precision times temperature", u)
                for link in self.links:
                    scales = Scales(values, link, self.settings, self.seed)
                    # The best point of the neighbour is close to the best one here.
                    points[link] = scales.minimum(points.get(link))
                    choice = scales.choice(u, points[link])
                    borders_here = (*borders, *choice.borders)
                    found[link].append(replace(choice, borders=borders_here))
        return {link: _best(choices) for link, choices in found.items()}

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
    best = min(choices, key=lambda choice: choice.loss, default=None)
    if best is None or not math.isfinite(best.loss):
        raise ValueError("the validation NLL is undefined for every prior precision")
    return best


def at_border(name: str, value: float, bounds: tuple[float, float]) -> tuple[str, ...]:
    """A sentence if a search may have been cut short by its range, else none."""
    low, high = bounds
    if low * 1.01 < value < high / 1.01 or low == high:
        return ()
    return (
        f"The best {name}, {value:.3g}, lies at the border of the range {low:.3g} to "
        f"{high:.3g} that was searched.",
    )


# --- temperature and scale -----------------------------------------------------------


class Scales:
    """The NLL of function values f/τ with f ~ N(mean, T·covariance), by T and τ.

    For regression of y ~ N(mean, T·variance + σ²), by T and σ. Points are
    (log(T·v̄), log τ or log σ), v̄ the mean variance, so that they mean the same for
    every prior precision.
    """

    def __init__(
        self, values: Values, link: str, settings: Settings, seed: int
    ) -> None:
        self.values, self.link, self.settings, self.seed = values, link, settings, seed
        self.variance = values.covariance.diagonal(dim1=-2, dim2=-1)
        self.mean_variance = max(float(self.variance.mean()), 1e-30)
        self.root = psd_root(values.covariance)
        usual = settings.sigma_noise if settings.is_regression else 1.0
        self.bounds = [VARIANCES, (SCALES[0] * usual, SCALES[1] * usual)]

    def minimum(self, start: np.ndarray | None = None) -> np.ndarray:
        """Where descent from `start` ends, unless the network alone is better."""
        low, high = np.log(np.array(self.bounds)).T
        alone = self._network()
        if start is None:
            start = np.array([0.0, alone[1]])
        descent = minimize(
            self.loss_and_slope,
            np.clip(start, low, high),
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(low, high, strict=True)),
            options={"ftol": 1e-7, "maxiter": 30},
        )
        points = descent.x, np.clip(alone, low, high)
        return min(points, key=lambda point: self.loss_and_slope(point)[0])

    def choice(self, u: float, point: np.ndarray) -> Choice:
        """The settings at a point: f_var = T·V(u) is that of δ = u/T."""
        variance, scale = (float(value) for value in np.exp(point))
        T = variance / self.mean_variance
        what = "noise" if self.settings.is_regression else "softmax temperature"
        borders = (
            *at_border("mean variance of the outputs", variance, self.bounds[0]),
            *at_border(what, scale, self.bounds[1]),
        )
        loss = self.loss_and_slope(point)[0]
        return Choice(loss, u / T, T, scale, borders)

    def loss_and_slope(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        """NLL and its gradient at a point, summed up in chunks of examples."""
        x = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        generator = torch.Generator(self.root.device).manual_seed(self.seed)
        N, C = self.values.mean.shape
        total = 0.0
        with torch.enable_grad():
            for part in batches.chunks(N, CHUNK // (C * self.settings.n_samples) + 1):
                T = x[0].exp() / self.mean_variance
                loss = self._losses(part, T, x[1].exp(), generator).sum() / N
                loss.backward()
                total += float(loss)
        assert x.grad is not None
        if not math.isfinite(total):
            return math.inf, np.zeros(2)
        return total, x.grad.numpy()

    def _losses(
        self,
        part: slice,
        T: torch.Tensor,
        scale: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """−log p of every target of a chunk."""
        mean, y = self.values.mean[part], self.values.targets[part]
        if self.settings.is_regression:
            noisy = T * self.variance[part] + scale.square()
            terms = (y - mean).square() / noisy + noisy.log() + math.log(2 * math.pi)
            return 0.5 * terms.sum(-1)
        t, root_T = scale.to(mean), T.sqrt().to(mean)
        f = FunctionValues(mean / t, root_T * self.root[part] / t)
        p = class_probabilities(
            f, self.link, self.settings.n_samples, generator=generator
        )
        chosen = p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return -chosen.clamp_min(metrics.SMALLEST).log()

    def _network(self) -> np.ndarray:
        """Temperature scaling, or the noise of the residuals: next to no variance."""
        mean, y = self.values.mean, self.values.targets
        if self.settings.is_regression:
            scale = max(metrics.rmse(mean, y), 1e-6)
        else:
            with warnings.catch_warnings():  # a border is told of when it is chosen
                warnings.simplefilter("ignore", BorderWarning)
                scale = temperature_scaling(mean, y)
        return np.log(np.array([VARIANCES[0], scale]))
