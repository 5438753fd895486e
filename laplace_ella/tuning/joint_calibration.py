"""Choosing softmax temperature, temperature and prior together, on validation data.

The validation loss is flat over wide ranges of all three, see `softening`, and where it
is not, its minimum is more often chance than knowledge: with a few hundred examples it
lies at any share of the posterior, while the loss on new inputs is lowest at shares of
0.1 to 0.3 (small networks on digits with noise, for which more is better under shift as
well), or hardly depends on it below that (ResNet-20, for which less is better under
corruption). The search therefore takes from the data what they can tell, and resolves
the rest by two rules:

1. Of all settings whose loss is within one standard error of the lowest (that of the
   paired differences between examples) and not above temperature scaling's, those whose
   share is nearest to `USUAL_SHARE` are taken.
2. Of the shapes that are left by the same measure, the one with T nearest to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import minimize

from laplace_ella.errors import BorderWarning, warn_caller
from laplace_ella.posterior.likelihood import Family
from laplace_ella.tuning.calibration import temperature_scaling
from laplace_ella.tuning.softening import NO_SHARE, SearchSpace, Softening, softened

__all__ = ["Calibration", "search_calibration"]

#: Share of the posterior where the validation data do not ask for another one.
USUAL_SHARE = 0.1

#: Shares at which the other settings are searched for; the last is the border.
SHARES = (USUAL_SHARE, 0.3, 0.9)

#: Factor of temperature scaling's solution within which the scale is looked for.
SCALES = 10.0

#: Halvings of the interval between an admissible share and one that is not.
N_BISECTIONS = 4

#: How each border is called in a warning.
BORDERS = {
    "share": "The posterior's share of the softening is",
    "scale": "The softening is",
    "ratio": "The weight of the data against the prior is",
    "complement": "The precision outside the basis, in units of the prior's, is",
}

#: Relative difference of losses that is rounding.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Calibration:
    """What `optimize_calibration` chose, and on what grounds.

    Attributes
    ----------
    softmax_temperature : float
        τ; 1 for regression
    temperature : float
        T, of the likelihood
    prior_precision : float
    complement : float, optional
        precision outside the basis, where that was chosen
    sigma_noise : tuple of float
        for regression, one number or one per output; else empty
    share : float
        of the softening that is the posterior's, the rest is τ's, or the noise's: near
        0 predictions are those of temperature scaling
    loss : float
        validation loss of the settings: negative log likelihood per example
    best_loss : float
        the lowest that was found
    standard_error : float
        of the difference between the two
    map_loss : float
        without posterior, as the network is
    scaling_loss : float
        without posterior, after temperature scaling, or with the best noise
    borders : tuple of str
        settings at the end of their range; each was warned of

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> x = torch.randn(200, 2)
    >>> y = (model(x) / 2).softmax(-1).multinomial(1).squeeze(-1)  # overconfident
    >>> loader = DataLoader(TensorDataset(x, y), batch_size=25)
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=5)
    >>> la.fit(loader)
    >>> chosen = la.optimize_calibration(loader)
    >>> chosen.loss <= chosen.scaling_loss <= chosen.map_loss
    True
    """

    softmax_temperature: float
    temperature: float
    prior_precision: float
    complement: float | None
    sigma_noise: tuple[float, ...]
    share: float
    loss: float
    best_loss: float
    standard_error: float
    map_loss: float
    scaling_loss: float
    borders: tuple[str, ...]


@dataclass(frozen=True)
class _Found:
    """A softening and its losses.

    Attributes
    ----------
    point : Softening
    losses : torch.Tensor
        `(N,)`, float64
    """

    point: Softening
    losses: torch.Tensor

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    def error(self, other: _Found) -> float:
        """Standard error of the difference of the mean losses."""
        difference = self.losses - other.losses
        return float(difference.std()) / math.sqrt(max(len(difference), 2))


_Rule = Callable[[_Found], bool]


def _distance_to_usual(found: _Found) -> float:
    return abs(found.point.share - USUAL_SHARE)


def search_calibration(candidates: SearchSpace, factor_at_one: float) -> Calibration:
    """The settings by the rules above; `factor_at_one` is f for T = 1 and the noise as
    it is."""
    return _Search(candidates, factor_at_one).run()


@dataclass(frozen=True)
class _Search:
    """The steps of the search.

    Attributes
    ----------
    candidates : SearchSpace
    factor_at_one : float
        f for T = 1
    """

    candidates: SearchSpace
    factor_at_one: float

    def run(self) -> Calibration:
        scaled = self.found(self.scaling())
        profile = list(self.profile(scaled))
        best = min(profile, key=lambda found: found.loss)
        best = self.descend(best.point, free_share=True, at_most=best)
        ceiling = scaled.loss * (1 + math.copysign(ROUNDING, scaled.loss))

        def admissible(found: _Found) -> bool:
            within = found.loss - best.loss <= found.error(best)
            return found is best or (within and found.loss <= ceiling)

        usual = self.nearest(best, profile, admissible)
        chosen = self.plainest(usual, admissible)
        return self.report(chosen, best, scaled)

    # Points and their losses

    def found(self, point: Softening) -> _Found:
        return _Found(point, self.candidates.losses(point))

    def scaling(self) -> Softening:
        """Temperature scaling, the limit of a posterior without variance."""
        f, targets = self.candidates.outputs, self.candidates.targets
        observation = self.candidates.observation
        if observation.family.is_regression:
            noise = observation.sigma_noise.detach()
            errors = (targets - f) / noise.to(f)
            scale = float(errors.double().square().mean().sqrt())
            rounding = torch.finfo(f.dtype).eps / noise.min()
            if not scale > float(f.abs().max() * rounding):
                raise ValueError(
                    "The model meets all validation targets exactly, which leaves no "
                    "noise to find. Use validation data that it was not trained on."
                )
        else:
            scale = temperature_scaling(
                f,
                targets,
                multi_label=observation.family is Family.BERNOULLI,
            )
        middle = tuple((axis.low + axis.high) / 2 for axis in self.candidates.axes)
        return Softening(scale, NO_SHARE, middle)

    def descend(
        self, start: Softening, free_share: bool, at_most: _Found | None = None
    ) -> _Found:
        """The lowest loss near a start, by a simplex; the share may be kept."""
        axes = self.candidates.axes
        centre = math.log(start.scale)
        low = [centre - math.log(SCALES), *(axis.low for axis in axes)]
        high = [centre + math.log(SCALES), *(axis.high for axis in axes)]
        steps = [0.1, *(0.5 for _ in axes)]
        first = [centre, *start.shape]
        if free_share:
            low, high = [*low, NO_SHARE], [*high, SHARES[-1]]
            steps, first = [*steps, 0.05], [*first, start.share]
        first, low, high = (np.array(v) for v in (first, low, high))
        steps = np.where(first + np.array(steps) > high, -np.array(steps), steps)

        def point(z: np.ndarray) -> Softening:
            share = float(z[-1]) if free_share else start.share
            shape = tuple(float(v) for v in z[1 : len(axes) + 1])
            return Softening(math.exp(z[0]), share, shape)

        refined = minimize(
            lambda z: self.found(point(z)).loss,
            first,
            method="Nelder-Mead",
            bounds=list(zip(low, high, strict=True)),
            options={
                "initial_simplex": first + np.vstack([0 * first, np.diag(steps)]),
                "xatol": 0.02,
                "fatol": 1e-5,
                "maxfev": 25 * len(first),
            },
        )
        found = self.found(point(refined.x))
        return found if at_most is None or found.loss < at_most.loss else at_most

    # Steps

    def profile(self, scaled: _Found) -> Iterator[_Found]:
        """For ever larger shares of the posterior, the best that the rest can do.

        It ends where the loss has risen twice by more than its noise.
        """
        yield scaled
        best, scale, rises = scaled, scaled.point.scale, 0
        for share in SHARES:
            shapes = self.candidates.shapes()
            starts = [Softening(scale, share, shape) for shape in shapes]
            start = min(map(self.found, starts), key=lambda found: found.loss)
            found = self.descend(start.point, free_share=False, at_most=start)
            yield found
            scale = found.point.scale
            if found.loss < best.loss:
                best = found
            rises += found.loss - best.loss > 3 * found.error(best)
            if rises == 2:
                return

    def nearest(self, best: _Found, profile: list[_Found], admissible: _Rule) -> _Found:
        """The admissible share nearest to the usual one, by bisection from the best."""
        inside, outside = best, None
        # From the best to the usual share: ever nearer, until one is not admissible.
        between = sorted((best.point.share, USUAL_SHARE))
        on_the_way = (f for f in profile if between[0] <= f.point.share <= between[1])
        for found in sorted(on_the_way, key=_distance_to_usual, reverse=True):
            if not admissible(found):
                outside = found
                break
            inside = found
        for _ in range(0 if outside is None else N_BISECTIONS):
            assert outside is not None
            share = (inside.point.share + outside.point.share) / 2
            start = replace(inside.point, share=share)
            found = self.descend(start, free_share=False)
            if admissible(found):
                inside = found
            else:
                outside = found
        return inside

    def plainest(self, found: _Found, admissible: _Rule) -> _Found:
        """Of the shapes that are admissible as well, the one with T nearest to 1."""
        point = found.point
        others = [replace(point, shape=shape) for shape in self.candidates.shapes()]
        for other in sorted(others, key=self.distance):
            if self.distance(other) >= self.distance(point):
                break
            candidate = self.found(other)
            if admissible(candidate):
                return candidate
        return found

    def distance(self, point: Softening) -> float:
        """|log T|."""
        return abs(math.log(self.temperature(point)))

    def temperature(self, point: Softening) -> float:
        """T; scaling the noise as well leaves less of f to it."""
        factor = self.candidates.weights_at(point).factor
        regression = self.candidates.observation.family.is_regression
        return self.factor_at_one / factor / (point.base**2 if regression else 1)

    def report(self, chosen: _Found, best: _Found, scaled: _Found) -> Calibration:
        candidates, point = self.candidates, chosen.point
        observation = candidates.observation
        regression = observation.family.is_regression
        weights = candidates.weights_at(point)
        noise = softened(observation, point.base).sigma_noise.reshape(-1)
        plain = Softening(1.0, NO_SHARE, point.shape)
        return Calibration(
            softmax_temperature=1.0 if regression else point.base,
            temperature=self.temperature(point),
            prior_precision=weights.prior,
            complement=weights.complement,
            sigma_noise=tuple(noise.tolist()) if regression else (),
            share=point.share,
            loss=chosen.loss,
            best_loss=best.loss,
            standard_error=chosen.error(best),
            map_loss=self.found(plain).loss,
            scaling_loss=scaled.loss,
            borders=tuple(self.borders(point, scaled.point)),
        )

    def borders(self, point: Softening, scaled: Softening) -> Iterator[str]:
        """What lies at the end of its range, each with a warning."""
        found = []
        if point.share < 1e-3:
            found.append(("share", "the validation data ask for temperature scaling"))
        elif point.share > SHARES[-1] - 0.01:
            found.append(("share", "they ask for the posterior alone"))
        if abs(math.log(point.scale / scaled.scale)) > math.log(SCALES) - 0.05:
            found.append(("scale", f"it is {point.scale:.3g}"))
        for axis, value in zip(self.candidates.axes, point.shape, strict=True):
            if point.share >= 1e-3 and axis.is_border(value):
                found.append((axis.name, f"it is {10**value:.3g}"))
        for name, why in found:
            warn_caller(
                f"{BORDERS[name]} at the border of its range: {why}. No other setting "
                "is better on these validation data; more of them may tell more.",
                BorderWarning,
            )
            yield name
