"""Calibration on validation data: softmax temperature, posterior and prior together.

A confident prediction is softened by dividing f by τ, and by averaging over a posterior
whose covariance is C(r)/δ: C(r) = φ(1 + rH)⁻¹φᵀ (+ the part outside the basis), with
r = 1/(σ²Tδ) the weight of the data against the prior. In the probit approximation the
two act as one division by √(τ² + π/8·var f). The losses of (τ, T, δ) therefore have
curved valleys, along which these change and predictions hardly do. The coordinates

    scale² = τ² + π/8·v        how much predictions are softened
    share  = π/8·v / scale²    the posterior's share of it, the rest is τ's
    shape  = (r,) or (r, α/δ)  how the posterior distributes it among inputs

straighten them, with v the mean variance of f at the validation inputs, and α the
precision outside the basis where that is a setting of its own. A share of zero is
temperature scaling by τ = scale. For regression, where noise and variance of f add up,
τ is the factor of σ, variances are in units of σ² and π/8 is 1.

Index legend: N data, C outputs, S settings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.optimize import minimize

from laplace_ella.errors import BorderWarning, warn_caller
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.observation import Family, ObservationModel
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.tuning.temperature import HIGHEST, LOWEST, checked, minimum
from laplace_ella.tuning.validation import Validator

#: Share of the posterior where the validation data do not ask for another one.
USUAL_SHARE = 0.1

#: Shares at which the other settings are searched for; the last is the border. The
#: first stands for none: the posterior changes a logit by less than 1e-4 of τ.
NO_SHARE, *SHARES = (1e-8, 0.03, USUAL_SHARE, 0.3, 0.6, 0.9)

#: Factor of a start within which the scale is looked for.
SCALES = 10.0

#: log10 of α/δ: from ten times the prior's variance outside the basis to next to none.
OUTSIDE = (-1.0, 5.0)

#: Relative difference of losses that is rounding.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Calibration:
    """The choice of `optimize_calibration`, and its grounds.

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
    kept : bool
        whether the validation data could not tell: the settings are those before

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
    borders: tuple[str, ...] = ()
    kept: bool = False


def search_calibration(
    posterior: SubspacePosterior, validator: Validator
) -> Calibration:
    """Return the settings that calibrate best, by the validation NLL.

    Parameters
    ----------
    posterior : SubspacePosterior
        with a scalar prior; a number as its complement is chosen, too
    validator : Validator
        with the negative log likelihood as its loss, and features that serve the
        posterior
    """
    H = posterior.H.double()
    eigenvalues = torch.linalg.eigvalsh(H) if H.ndim == 2 else H
    top = float(eigenvalues.max())
    if not top > 0:
        raise ValueError(
            "The posterior has the curvature of no data, so there is nothing to "
            "weigh against the prior. Call fit(train_loader) first."
        )
    # Beyond these ratios the posterior no longer changes its shape.
    lowest = max(float(eigenvalues.min()), 1e-6 * top)
    axes = [("ratio", math.log10(0.01 / top), math.log10(100 / lowest))]
    if not isinstance(posterior.complement, Complement):
        axes.append(("complement", *OUTSIDE))
    factor_at_one = float(posterior.factor * validator.observation.temperature)
    rotated, validator = validator.rotated(posterior)
    return _Search(rotated, validator, tuple(axes), factor_at_one).run()


def standard_errors(
    losses: torch.Tensor, reference: int, unseen: torch.Tensor
) -> torch.Tensor:
    """Return the standard errors `(S,)` of the differences of mean losses `(S, N)` to
    those of the setting `reference`.

    They scatter as they do among the N examples, and by one example more: that N
    predictions are right does not tell that the next one is. Its loss `unseen` `(S,)`
    is the mean over the inputs and, for classification, over all C labels alike. It is
    the pseudo-example of Laplace's rule of succession (and of Platt's scaling): a
    setting that would be ruined by one example in N + 1 is not told from others by N
    that are right.
    """
    losses = torch.cat([losses, unseen.unsqueeze(-1)], -1)
    differences = losses - losses[reference]
    return differences.std(-1) / math.sqrt(losses.shape[-1])


def choose(
    losses: torch.Tensor,
    unseen: torch.Tensor,
    keys: Sequence[tuple[float, ...]],
    at_most: float = math.inf,
) -> int:
    """Return the index of the setting to take, of S with losses `(S, N)` and `(S,)`: of
    those within one standard error of the best, and with a mean loss of at most
    `at_most`, the one with the lowest key."""
    mean = losses.mean(-1)
    if not mean.isfinite().any():
        raise ValueError(
            f"The validation loss is NaN or infinite for all {len(losses)} settings, "
            "so none can be chosen; nothing was changed. Check the validation data."
        )
    best = int(mean.nan_to_num(math.inf).argmin())
    good = mean - mean[best] <= standard_errors(losses, best, unseen)
    good = (good & (mean <= at_most)).nonzero().flatten().tolist()
    return min({best, *good}, key=keys.__getitem__)


@dataclass(frozen=True)
class _Candidate:
    """How much predictions are softened, and by what, in the module's coordinates; δ,
    α, T, and τ or σ for that; the losses of all examples `(N,)`, and of one unseen."""

    scale: float
    share: float
    shape: tuple[float, ...]
    prior: float
    complement: Complement | float
    temperature: float
    observation: ObservationModel
    losses: torch.Tensor
    unseen: torch.Tensor

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    def error(self, best: _Candidate) -> float:
        """Return the standard error of the difference to the loss of another."""
        losses = torch.stack([best.losses, self.losses])
        unseen = torch.stack([best.unseen, self.unseen])
        return float(standard_errors(losses, 0, unseen)[1])


@dataclass(frozen=True)
class _Search:
    """The search of one posterior's settings.

    `axes` are those of the shape: name, lowest and highest value of its log10. 1/σ² is
    `factor_at_one`, by which the curvature is multiplied for T = 1 and the noise as it
    is. No scale is below `floor`: 1, unless the data insist on less. `unit_variances`
    are the mean variances for the prior precision 1, by shape.
    """

    posterior: SubspacePosterior
    validator: Validator
    axes: tuple[tuple[str, float, float], ...]
    factor_at_one: float
    floor: float = 0.0
    unit_variances: dict[tuple[float, ...], float] = field(default_factory=dict)

    def run(self) -> Calibration:
        # A grid of shapes, about a decade apart.
        grids = (
            np.linspace(low, high, max(3, round(high - low) + 1)).tolist()
            for _, low, high in self.axes
        )
        shapes = list(itertools.product(*grids))
        plain = self.find(1.0, NO_SHARE, shapes[0])
        scaling = self.find(self.scaling(), NO_SHARE, shapes[0])
        start, at_most = scaling, math.inf
        if not self.is_regression:
            start = self.least_sharpening(scaling)
            if start.scale == 1 and scaling.scale in (LOWEST, HIGHEST):
                return self.keep(scaling, plain)
            self = replace(self, floor=min(start.scale, 1.0))
        if start is scaling:
            at_most = scaling.loss * (1 + math.copysign(ROUNDING, scaling.loss))
        found = [start]
        for share in SHARES:  # for each, the best of the rest
            tried = [self.find(found[-1].scale, share, shape) for shape in shapes]
            found.append(self.descend(min(tried, key=lambda each: each.loss)))
        chosen = self.choose(found, at_most)
        # Of the shapes that do as well, the one with T nearest to 1.
        found += [self.find(chosen.scale, chosen.share, shape) for shape in shapes]
        chosen = self.choose(found, at_most)
        best = min(found, key=lambda each: each.loss)
        return self.report(chosen, best, scaling, plain, self.borders(chosen, scaling))

    @property
    def is_regression(self) -> bool:
        return self.validator.observation.family.is_regression

    def find(self, scale: float, share: float, shape: tuple[float, ...]) -> _Candidate:
        """Return the posterior whose mean variance is its share of the softening, and
        its losses; with no less softening than the floor."""
        old, (log_ratio, *log_outside) = self.posterior, shape

        def with_prior(prior: float) -> SubspacePosterior:
            complement = old.complement
            if log_outside:
                complement = 10 ** log_outside[0] * prior
            factor = torch.full_like(old.factor, 10**log_ratio * prior)
            precision = torch.full_like(old.prior, prior)
            return old.with_(factor=factor, prior=precision, complement=complement)

        known, scale = self.unit_variances, max(scale, self.floor)
        if shape not in known:
            known[shape] = self.validator.mean_variance(with_prior(1.0))
        variance = share * scale**2 / (1.0 if self.is_regression else math.pi / 8)
        posterior = with_prior(known[shape] / variance)
        base, observation = scale * math.sqrt(1 - share), self.validator.observation
        temperature = self.factor_at_one / float(posterior.factor)
        if self.is_regression:  # a larger noise leaves less of the factor to T
            temperature /= base**2
            sigma_noise = observation.sigma_noise * base
            observation = replace(observation, sigma_noise=sigma_noise)
        else:
            observation = replace(observation, softmax_temperature=base)
        validator = replace(self.validator, observation=observation)
        losses = validator.example_losses(posterior, unseen=True)
        found = float(posterior.prior), posterior.complement, temperature, observation
        return _Candidate(scale, share, shape, *found, losses[:-1], losses[-1])

    def choose(self, found: Sequence[_Candidate], at_most: float) -> _Candidate:
        """Return the one that sharpens predictions least (a scale below 1; the factor
        of the noise is none), then with the posterior's share nearest to `USUAL_SHARE`,
        then with T nearest to 1, of those that are as good as the best."""
        keys = [
            (
                0.0 if self.is_regression else max(-math.log(each.scale), 0.0),
                abs(each.share - USUAL_SHARE),
                abs(math.log(each.temperature)),
            )
            for each in found
        ]
        losses = torch.stack([each.losses for each in found])
        unseen = torch.stack([each.unseen for each in found])
        return found[choose(losses, unseen, keys, at_most)]

    def scaling(self) -> float:
        """Return the scale of temperature scaling, or of the noise alone."""
        f, targets = self.validator.cache.f_mu, self.validator.cache.targets
        observation = self.validator.observation
        if not self.is_regression:
            labels = observation.family is Family.BERNOULLI
            return minimum(*checked(f, targets, labels), labels)
        noise = observation.sigma_noise.detach()
        errors = (targets - f) / noise.to(f)
        scale = float(errors.double().square().mean().sqrt())
        if not scale > float(f.abs().max() * torch.finfo(f.dtype).eps / noise.min()):
            raise ValueError(
                "The model meets all validation targets exactly, which leaves no "
                "noise to find. Use validation data that it was not trained on."
            )
        return scale

    def least_sharpening(self, scaling: _Candidate) -> _Candidate:
        """Return temperature scaling with τ as near to 1 as the data allow.

        Nearer where τ is below 1, or at the end of its range: a few predictions that
        are all right, or all wrong, are no reason to trust or to distrust the network.
        """
        tau = scaling.scale
        taus = [1.0] if tau == HIGHEST else np.geomspace(1.0, min(tau, 1.0), 12)[:-1]
        for nearer in taus if tau < 1 or tau == HIGHEST else ():
            found = self.find(float(nearer), NO_SHARE, scaling.shape)
            if found.loss - scaling.loss <= found.error(scaling):
                return found
        return scaling

    def descend(self, start: _Candidate) -> _Candidate:
        """Return the lowest loss near a start with the same share, by a simplex."""
        scale, width = math.log(start.scale), math.log(SCALES)
        bounds = [(scale - width, scale + width), *((a, b) for _, a, b in self.axes)]
        first = np.array([scale, *start.shape])
        steps = np.array([0.1, *(0.5 for _ in self.axes)])
        steps = np.where(first + steps > [b for _, b in bounds], -steps, steps)

        def found(z: np.ndarray) -> _Candidate:
            log_scale, *shape = z.tolist()
            return self.find(math.exp(log_scale), start.share, tuple(shape))

        refined = minimize(
            lambda z: found(z).loss,
            first,
            method="Nelder-Mead",
            bounds=bounds,
            options={
                "initial_simplex": first + np.vstack([0 * first, np.diag(steps)]),
                "xatol": 0.02,
                "fatol": 1e-5,
                "maxfev": 25 * len(first),
            },
        )
        return min(start, found(refined.x), key=lambda each: each.loss)

    # Results

    def report(
        self,
        chosen: _Candidate,
        best: _Candidate,
        scaling: _Candidate,
        plain: _Candidate,
        borders: tuple[str, ...],
    ) -> Calibration:
        noise = tuple(chosen.observation.sigma_noise.reshape(-1).tolist())
        return Calibration(
            softmax_temperature=chosen.observation.softmax_temperature,
            temperature=chosen.temperature,
            prior_precision=chosen.prior,
            complement=_number(chosen.complement),
            sigma_noise=noise if self.is_regression else (),
            share=chosen.share,
            loss=chosen.loss,
            best_loss=best.loss,
            standard_error=chosen.error(best),
            map_loss=plain.loss,
            scaling_loss=scaling.loss,
            borders=borders,
        )

    def keep(self, scaling: _Candidate, plain: _Candidate) -> Calibration:
        """Return the settings as they are, with a warning."""
        observation, tau = self.validator.observation, scaling.scale
        what = "are right" if tau == LOWEST else "would be better guessed"
        warn_caller(
            f"The {len(plain.losses)} validation examples cannot tell how sure the "
            f"network should be: their predictions {what}, and a softmax temperature "
            "of 1 does as well within one standard error. All settings are kept. Use "
            "more validation data.",
            BorderWarning,
        )
        return replace(
            self.report(plain, scaling, scaling, plain, ("temperature",)),
            softmax_temperature=observation.softmax_temperature,
            temperature=float(observation.temperature),
            prior_precision=float(self.posterior.prior),
            complement=_number(self.posterior.complement),
            share=math.nan,
            loss=float(self.validator.example_losses(self.posterior).mean()),
            kept=True,
        )

    def borders(self, chosen: _Candidate, scaling: _Candidate) -> tuple[str, ...]:
        """Return what lies at the end of its range, each with a warning."""
        found = {}
        if chosen.share == NO_SHARE:
            found["share"] = "the validation data ask for temperature scaling"
        elif chosen.share == SHARES[-1]:
            found["share"] = "they ask for the posterior alone"
        if abs(math.log(chosen.scale / scaling.scale)) > math.log(SCALES) - 0.05:
            found["scale"] = f"predictions are softened by {chosen.scale:.3g}"
        for (name, low, high), value in zip(self.axes, chosen.shape, strict=True):
            at_end = min(abs(value - low), abs(value - high)) < 0.05
            if chosen.share > NO_SHARE and at_end:
                found[name] = f"it is {10**value:.3g}"
        for name, why in found.items():
            warn_caller(
                f"The {name} of the calibration is at the border of its range: {why}. "
                "No other setting is better on these validation data; more of them may "
                "tell more.",
                BorderWarning,
            )
        return tuple(found)


def _number(complement: Complement | float) -> float | None:
    return None if isinstance(complement, Complement) else complement
