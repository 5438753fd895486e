"""Choosing prior, temperature, noise and rank from one fit.

Every search here works on immutable posteriors and cached features: a candidate costs
a K×K factorisation and small products, and an exception leaves the fit as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torchmetrics
from laplace.utils.enums import LinkApprox
from scipy.optimize import minimize, minimize_scalar
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from laplace_ella.errors import BorderWarning
from laplace_ella.posterior import predictive
from laplace_ella.posterior.likelihood import Family
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.batches import split_batch
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.eigenbasis import EigenPosterior, turn

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace

__all__ = [
    "Validator",
    "gaussian_nll",
    "prior_precision_from_weight_decay",
    "score",
]

Loss = torchmetrics.Metric | Callable[..., torch.Tensor | float]


def prior_precision_from_weight_decay(weight_decay: float, n_data: int) -> float:
    """The Gaussian prior that weight decay γ stood for: 1/σ0² = Nγ.

    Training minimised the mean loss over N data plus γ/2·‖θ‖². Times N that is the
    negative log posterior with prior precision Nγ (Deng et al. 2022, Sec. 5.1).

    Examples
    --------
    >>> prior_precision_from_weight_decay(1e-4, 50_000)
    5.0
    """
    if not weight_decay > 0 or not n_data >= 1:  # also refuses NaN
        raise ValueError(
            "weight_decay must be positive and n_data at least 1, got "
            f"{weight_decay} and {n_data}."
        )
    return weight_decay * n_data


def gaussian_nll(
    f_mu: torch.Tensor, f_var: torch.Tensor, y: torch.Tensor, sigma_noise: torch.Tensor
) -> torch.Tensor:
    """Mean negative log likelihood of targets `(N, C)`, summed over the outputs.

    `f_var` holds covariances `(N, C, C)` or variances `(N, C)` of the function.
    """
    if f_var.ndim == 3:
        f_var = f_var.diagonal(dim1=-2, dim2=-1)
    variance = f_var + sigma_noise**2
    nll = (y - f_mu).square() / variance + variance.log() + np.log(2 * np.pi)
    return 0.5 * nll.sum(-1).mean()


def categorical_nll(probabilities: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood of classes `(N,)` or probabilities `(N, C)`."""
    if y.dtype.is_floating_point:
        return -torch.xlogy(y.to(probabilities), probabilities).sum(-1).mean()
    return F.nll_loss(probabilities.log(), y)


def bernoulli_nll(probabilities: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood of labels `(N, C)`, summed over the labels."""
    nll = F.binary_cross_entropy(probabilities, y.to(probabilities), reduction="sum")
    return nll / len(y)


def score(outputs: Iterator[tuple[Any, torch.Tensor]], loss: Loss) -> float:
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
        # some metrics give one value an output
        return float(torch.as_tensor(metric.compute()).sum())
    tensors = (torch.cat(parts) for parts in zip(*collected, strict=True))
    return float(loss(*tensors))


def _never_best(value: float) -> float:
    """Infinity for an undefined loss, so that no search chooses it."""
    return float("inf") if np.isnan(value) else value


@dataclass(frozen=True)
class Validator:
    """The loss of any posterior on one validation set.

    Monte-Carlo links draw the same numbers for every posterior, so that candidates are
    compared by what differs, and the loss is a smooth function of them.
    """

    cache: FeatureCache
    loss: Loss
    family: Family
    link_approx: LinkApprox | str
    n_samples: int
    fresh_generator: Callable[[], torch.Generator | None]

    @classmethod
    def for_laplace(
        cls,
        la: ELLALaplace,
        val_loader: DataLoader | FeatureCache,
        loss: Loss | None = None,
        link_approx: LinkApprox | str = LinkApprox.MC,
        n_samples: int = 512,
        progress_bar: bool = False,
        posterior: SubspacePosterior | None = None,
    ) -> Validator:
        """Compute the features of the validation data, unless they are there."""
        check_loss(loss)
        if isinstance(val_loader, FeatureCache):
            cache = val_loader
        elif val_loader is None:
            raise ValueError(
                "This search compares predictions on validation data: pass val_loader=."
            )
        else:
            cache = FeatureCache.from_loader(la, val_loader, progress_bar, posterior)
        return cls(
            cache,
            default_loss(la) if loss is None else loss,
            la._family,
            link_approx,
            n_samples,
            la._fresh_generator,
        )

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
        return _never_best(self.score(posterior))

    @torch.no_grad()
    def score(self, posterior: SubspacePosterior | EigenPosterior) -> float:
        """The loss as it is."""
        generator = self.fresh_generator()

        def predictions() -> Iterator[tuple[Any, torch.Tensor]]:
            for part in self.cache.truncate(posterior.rank).batches():
                values = posterior.function_values(part.f_mu, part.phi, part.kernel)
                if self.family.is_regression:
                    yield (values.mean, values.covariance()), part.targets
                    continue
                probabilities = predictive.class_probabilities(
                    values,
                    self.link_approx,
                    self.n_samples,
                    generator=generator,
                    family=self.family,
                )
                yield probabilities, part.targets

        return score(predictions(), self.loss)


def default_loss(la: ELLALaplace) -> Loss:
    """Negative log likelihood of whatever the likelihood is."""
    if la._family.is_regression:
        return lambda mean, var, y: gaussian_nll(mean, var, y, la.sigma_noise)
    return bernoulli_nll if la.multi_label else categorical_nll


def check_loss(loss: Any) -> None:
    if loss is not None and not callable(loss):
        raise TypeError(
            "loss must be a torchmetrics.Metric or a callable, got "
            f"{type(loss).__name__}."
        )


def search_prior(
    posterior: SubspacePosterior,
    grid: torch.Tensor,
    validator: Validator,
    progress_bar: bool = False,
) -> torch.Tensor:
    """The scalar prior precision of the grid with the lowest validation loss."""
    posterior, validator = validator.for_scalars(posterior)

    def loss(prior: torch.Tensor) -> float:
        return validator(posterior.with_(prior=prior.reshape(1).to(posterior.prior)))

    return _argmin(grid, loss, progress_bar)


def search_prior_by_sampling(
    la: ELLALaplace,
    grid: torch.Tensor,
    val_loader: DataLoader,
    loss: Loss | None,
    n_samples: int,
    progress_bar: bool = False,
) -> torch.Tensor:
    """The same for predictions with sampled weights, which no features shorten."""
    check_loss(loss)
    loss = default_loss(la) if loss is None else loss

    def predictions() -> Iterator[tuple[Any, torch.Tensor]]:
        for batch in val_loader:
            x, y = split_batch(batch, la.dict_key_y)
            output = la(x, "nn", link_approx="mc", n_samples=n_samples, fitting=True)
            yield la._prediction_rows(output, y)

    def evaluate(prior: torch.Tensor) -> float:
        la.prior_precision = prior
        return _never_best(score(predictions(), loss))

    with la._undisturbed(val_loader):
        return _argmin(grid, evaluate, progress_bar)


def _argmin(
    grid: torch.Tensor, loss: Callable[[torch.Tensor], float], progress_bar: bool
) -> torch.Tensor:
    losses = []
    bar = tqdm(grid, disable=not progress_bar)
    for candidate in bar:
        losses.append(loss(candidate))
        if progress_bar:
            bar.set_description(
                f"[Grid search | prior_prec: {candidate:.3e}, loss: {losses[-1]:.3f}]"
            )
    return grid[int(np.argmin(losses))]


def _warn_at_border(name: str, log_value: float, bounds: tuple[float, float]) -> None:
    """Tell that a search may have been cut short."""
    if min(abs(log_value - bounds[0]), abs(log_value - bounds[1])) < 0.05:
        warnings.warn(
            f"The best {name}, {10**log_value:.3g}, lies at the border of the range "
            f"{10 ** bounds[0]:.3g} to {10 ** bounds[1]:.3g} that was searched: the "
            "prior precision may not suit the data. Tune both (tune_prior=True) or "
            "widen the range of the prior.",
            BorderWarning,
            stacklevel=4,
        )


def search_temperature(
    posterior: SubspacePosterior, n_data: int, validator: Validator
) -> float:
    """The factor t by which to divide the likelihood's curvature.

    A coarse logarithmic grid brackets the minimum, Brent's method refines it.
    """
    posterior, validator = validator.for_scalars(posterior)

    def loss(log_t: float) -> float:
        return validator(posterior.with_(factor=posterior.factor / 10**log_t))

    grid = np.linspace(-2, max(np.log10(n_data), 0) + 1, 25)
    losses = [loss(log_t) for log_t in grid]
    best = int(np.argmin(losses))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    refined = minimize_scalar(
        loss, bounds=(low, high), method="bounded", options={"xatol": 1e-3}
    )
    log_t = refined.x if refined.fun < losses[best] else grid[best]
    _warn_at_border("temperature", log_t, (grid[0], grid[-1]))
    return float(10**log_t)


def search_temperature_and_prior(
    posterior: SubspacePosterior,
    n_data: int,
    validator: Validator,
    log_prior_range: tuple[float, float],
) -> tuple[float, float]:
    """Factor t and scalar prior precision together: a coarse grid, then a simplex."""
    posterior, validator = validator.for_scalars(posterior)

    def loss(point: np.ndarray) -> float:
        log_t, log_prior = point
        prior = torch.full_like(posterior.prior, 10**log_prior)
        factor = posterior.factor / 10**log_t
        return validator(posterior.with_(factor=factor, prior=prior))

    times = np.linspace(-2, max(np.log10(n_data), 0) + 1, 13)
    priors = np.linspace(*log_prior_range, 13)
    points = [np.array([t, p]) for t in times for p in priors]
    start = min(points, key=loss)
    # A first simplex of half a grid step, towards the middle of the range.
    bounds = np.array([[times[0], times[-1]], log_prior_range])
    steps = np.array([times[1] - times[0], priors[1] - priors[0]]) / 2
    steps *= np.where(start > bounds.mean(1), -1, 1)
    refined = minimize(
        loss,
        start,
        method="Nelder-Mead",
        bounds=bounds,
        options={
            "initial_simplex": start + np.vstack([np.zeros(2), np.diag(steps)]),
            "xatol": 1e-2,
            "fatol": 1e-6,
        },
    )
    log_t, log_prior = refined.x
    _warn_at_border("temperature", log_t, (times[0], times[-1]))
    _warn_at_border("prior precision", log_prior, log_prior_range)
    return float(10**log_t), float(10**log_prior)


def maximize_evidence(
    la: ELLALaplace, n_steps: int, lr: float, tune_prior: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """sigma_noise and prior precision that maximise the evidence.

    Adam on their logarithms, from their current values, finds the neighbourhood of the
    maximum, L-BFGS the maximum; whichever was better counts.
    """
    log_sigma = la.sigma_noise.detach().double().log().requires_grad_()
    log_prior = la.prior_precision.detach().double().log().requires_grad_(tune_prior)
    variables = [log_sigma] + [log_prior] * tune_prior
    best: tuple[float, torch.Tensor, torch.Tensor] | None = None

    def closure() -> torch.Tensor:
        nonlocal best
        for variable in variables:
            variable.grad = None
        loss = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        loss.backward()
        value = float(loss.detach())
        if np.isfinite(value) and (best is None or value < best[0]):
            best = value, log_sigma.detach().clone(), log_prior.detach().clone()
        return loss

    with torch.enable_grad():
        adam = torch.optim.Adam(variables, lr=lr)
        for _ in range(n_steps):
            adam.step(closure)
        with torch.no_grad():
            log_sigma.copy_(best[1])
            log_prior.copy_(best[2])
        torch.optim.LBFGS(
            variables, max_iter=n_steps, line_search_fn="strong_wolfe"
        ).step(closure)
    return best[1].exp(), best[2].exp()


def rank_by_evidence(posterior: SubspacePosterior, share: float) -> int:
    """The smallest rank whose log determinant ratio has reached a share of rank K's.

    At fixed θ̂ every direction can only add to the Occam factor, so that the evidence
    falls with k and its maximum says nothing; where it levels off does: the directions
    beyond are ones the data say nothing about.
    """
    ratios = posterior.log_det_ratios()
    return int((ratios < share * ratios[-1]).sum()) + 1


def rank_by_validation(
    posterior: SubspacePosterior, ranks: list[int], validator: Validator
) -> tuple[int, list[float]]:
    """The rank with the lowest validation loss, and all the losses."""
    losses = [validator(posterior.truncate(k)) for k in ranks]
    return ranks[int(np.argmin(losses))], losses
