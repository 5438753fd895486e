"""Fit, tune and predict with one method on its own copy of the model.

Index legend: N data, C outputs, B batch.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from laplace_ella import metrics
from laplace_ella.comparison.loaders import rebatched, reproducible, split
from laplace_ella.comparison.memory import preferred_batch
from laplace_ella.comparison.methods import (
    Estimate,
    Kind,
    Method,
    Problem,
    Tuning,
    fitted_to,
    stored_floats,
)
from laplace_ella.errors import NumericalWarning, RankWarning
from laplace_ella.support import batches
from laplace_ella.support.resources import Stopwatch, budget_of

__all__ = [
    "Fitted",
    "NotRun",
    "Predictions",
    "Settings",
    "fit_method",
    "predict",
    "with_noise",
]

#: Bytes of temporary memory that a batch may take before it is split for speed.
BATCH_TARGET = 5 * 10**7


class NotRun(Exception):
    """A method that was not tried; the message is the status of its row."""


@dataclass(frozen=True)
class Settings:
    """What all methods have in common; the arguments of `compare`."""

    likelihood: str
    links: tuple[str, ...]
    n_samples: int
    tune: Tuning
    prior_precision: float
    sigma_noise: float
    grid_size: int
    n_steps: int
    n_bins: int
    dict_key_x: str
    dict_key_y: str

    @property
    def is_regression(self) -> bool:
        return self.likelihood == "regression"


@dataclass(frozen=True)
class Fitted:
    """A method that is ready to predict.

    Attributes
    ----------
    predict : callable
        (x, link) → probabilities `(B, C)`, or for regression the mean `(B, C)` and
        the covariance `(B, C, C)` of the function values, without noise
    batch : int
        examples to predict at once
    noise : float
        standard deviation of the observation noise
    """

    predict: Callable[[Any, str], Any]
    batch: int
    noise: float = 1.0
    costs: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Predictions:
    """Predictions over a whole loader, on the CPU.

    `probs (N, C)` for classification; `mean (N, C)` and `covariance (N, C, C)` of the
    function values for regression. `targets` is None for data without labels.
    """

    targets: torch.Tensor | None
    seconds: float
    probs: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    covariance: torch.Tensor | None = None

    def uncertainty(self) -> torch.Tensor:
        """`(N,)`: 1 − max p, or the total variance of the function values."""
        if self.probs is not None:
            return 1.0 - self.probs.max(-1).values
        return self.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)


# --- one method ----------------------------------------------------------------------


def fit_method(
    method: Method,
    model: nn.Module,
    settings: Settings,
    problem: Problem,
    needs: Estimate,
    train_loader: Any,
    val_loader: Any,
    seed: int,
) -> Fitted:
    """Fit and tune `method` on a copy of `model`, which stays as it is.

    Raises
    ------
    NotRun
        if the method does not apply or its tuning lacks the data
    """
    tune = _tuning(method, settings, val_loader)
    device = next(model.parameters()).device
    gc.collect()  # the posterior of the method before, which may sit in a cycle
    own = copy.deepcopy(model).eval()
    with (
        reproducible(seed, device, train_loader, val_loader),
        _collected_warnings() as said,
    ):
        if method.kind is Kind.MAP:
            fitted = _fit_map(own, settings, problem)
        elif method.kind is Kind.TEMPERATURE:
            fitted = _fit_temperature(own, settings, problem, val_loader)
        else:
            fitted = _fit_laplace(
                method,
                tune,
                own,
                settings,
                problem,
                needs,
                train_loader,
                val_loader,
                seed,
            )
    notes = [fitted.note, *said]
    if tune is not method.tune and method.tune is not Tuning.DEFAULT:
        notes.append(f"no val_loader, so {method.tune.value} was left out")
    note = "; ".join(dict.fromkeys(n for n in notes if n))
    return Fitted(**{**vars(fitted), "note": note})


def _tuning(method: Method, settings: Settings, val_loader: Any) -> Tuning:
    """The tuning that will be used; NotRun if it cannot."""
    if method.kind is Kind.TEMPERATURE:
        if settings.is_regression:
            raise NotRun("not supported: temperature scaling needs classification")
        if val_loader is None:
            raise NotRun("skipped: needs a val_loader")
        return method.tune
    if method.kind is Kind.MAP:
        return method.tune
    tune = settings.tune if method.tune is Tuning.DEFAULT else method.tune
    if tune.needs_validation and val_loader is None:
        if method.fallback is None:
            raise NotRun(f"skipped: tuning by {tune.value} needs a val_loader")
        return method.fallback
    return tune


def _fit_map(model: nn.Module, settings: Settings, problem: Problem) -> Fitted:
    def predict(x: Any, link: str) -> Any:
        f = model(x)
        if not settings.is_regression:
            return torch.softmax(f, -1)
        return f, f.new_zeros(*f.shape, f.shape[-1])

    costs = {"fit_s": 0.0, "tune_s": 0.0, "floats": 0.0}
    return Fitted(predict, problem.batch, settings.sigma_noise, costs)


def _fit_temperature(
    model: nn.Module, settings: Settings, problem: Problem, val_loader: Any
) -> Fitted:
    device = next(model.parameters()).device
    with Stopwatch(device) as watch:
        with torch.no_grad():
            pairs = [
                (model(batches.to_device(x, device)).double().cpu(), y)
                for x, y in (split(b, settings.dict_key_y) for b in val_loader)
            ]
        logits = torch.cat([f for f, _ in pairs])
        targets = torch.cat([y for _, y in pairs])
        temperature = best_temperature(logits, targets)

    def predict(x: Any, link: str) -> torch.Tensor:
        return torch.softmax(model(x) / temperature, -1)

    costs = {"fit_s": 0.0, "tune_s": watch.seconds, "floats": 1.0, **_peak(watch)}
    chosen = {"temperature": temperature}
    return Fitted(predict, problem.batch, costs=costs, settings=chosen)


def best_temperature(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """T > 0 that minimises the NLL of softmax(logits/T) (Guo et al. 2017).

    Parameters
    ----------
    logits : torch.Tensor
        `(N, C)`
    targets : torch.Tensor
        `(N,)`
    """
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [log_t], max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        # Bounded, since data that are all classified correctly ask for T → 0.
        scaled = logits.double() / log_t.clamp(-5.0, 5.0).exp()
        loss = nn.functional.cross_entropy(scaled, targets)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return float(log_t.detach().clamp(-5.0, 5.0).exp())


def _fit_laplace(
    method: Method,
    tune: Tuning,
    model: nn.Module,
    settings: Settings,
    problem: Problem,
    needs: Estimate,
    train_loader: Any,
    val_loader: Any,
    seed: int,
) -> Fitted:
    import laplace

    from laplace_ella.fitting.stopping import EarlyStopping

    device = next(model.parameters()).device
    batch = min(needs.batch, preferred_batch(method, problem, BATCH_TARGET))
    kwargs = fitted_to(method, problem, seed)
    kwargs.setdefault("prior_precision", settings.prior_precision)
    kwargs.setdefault("dict_key_y", settings.dict_key_y)
    kwargs.setdefault("dict_key_x", settings.dict_key_x)
    if settings.is_regression:
        kwargs.setdefault("sigma_noise", settings.sigma_noise)
    if needs.budget is not None:  # never more than ELLA would allow itself
        budget = min(needs.budget, budget_of(device, None))
        kwargs.setdefault("memory_budget", budget)
    fit_kwargs = dict(method.fit_kwargs)
    if tune is Tuning.EARLY_STOPPING:
        plan = EarlyStopping(**_link_options(settings), **method.tune_kwargs)
        fit_kwargs = {"val_loader": val_loader, "early_stopping": plan, **fit_kwargs}
    # KFAC averages its factors over a batch, so its fit keeps the user's batches.
    if method.structure[1] != "kron":
        train_loader = rebatched(train_loader, batch)

    with Stopwatch(device) as fitting:
        la = laplace.Laplace(model, settings.likelihood, **kwargs)
        la.fit(train_loader, **fit_kwargs)
    with Stopwatch(device) as tuning:
        val_loader = val_loader and rebatched(val_loader, batch)
        _tune_laplace(la, method, tune, settings, val_loader)

    def predict(x: Any, link: str) -> Any:
        choice = {} if settings.is_regression else {"link_approx": link}
        out = la(
            x, pred_type=method.prediction_type, n_samples=settings.n_samples, **choice
        )
        if not settings.is_regression:
            return out.detach()
        mean, covariance = out[0].detach(), out[1].detach()
        if covariance.ndim == 2:  # pred_type="nn" gives variances (B, C)
            covariance = torch.diag_embed(covariance)
        return mean, covariance

    return Fitted(
        predict,
        batch,
        float(la.sigma_noise) if settings.is_regression else 1.0,
        {
            "fit_s": fitting.seconds,
            "tune_s": tuning.seconds,
            "floats": float(stored_floats(la)),
            **_peak(fitting, tuning),
        },
        _chosen(la, tune),
    )


def _tune_laplace(
    la: Any, method: Method, tune: Tuning, settings: Settings, val_loader: Any
) -> None:
    link = _link_options(settings)
    if tune is Tuning.MARGLIK:
        la.optimize_prior_precision(
            **{
                "pred_type": method.prediction_type,
                "method": "marglik",
                "n_steps": settings.n_steps,
                "prior_structure": "scalar",
                **method.tune_kwargs,
            }
        )
    elif tune is Tuning.GRIDSEARCH:
        options = {
            "pred_type": method.prediction_type,
            "method": "gridsearch",
            "val_loader": val_loader,
            "grid_size": settings.grid_size,
            **link,
        }
        # Laplace's own defaults do not tell priors apart: the MSE, which no prior
        # changes, and a running NLL that is never reset between the candidates.
        options["loss"] = (
            noisy_nll(float(la.sigma_noise))
            if settings.is_regression
            else categorical_nll
        )
        la.optimize_prior_precision(**{**options, **method.tune_kwargs})
    elif tune is Tuning.TEMPERATURE:
        la.optimize_temperature(val_loader, **{**link, **method.tune_kwargs})


def _link_options(settings: Settings) -> dict[str, Any]:
    """The link with which methods are tuned; regression has none."""
    if settings.is_regression:
        return {}
    return {"link_approx": settings.links[0], "n_samples": settings.n_samples}


def noisy_nll(sigma: float) -> Callable[..., torch.Tensor]:
    """Loss for Laplace's grid search: Gaussian NLL with the observation noise."""

    def loss(
        mean: torch.Tensor, covariance: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        noisy = with_noise(covariance, sigma)
        return torch.as_tensor(metrics.gaussian_nll(mean, noisy, targets))

    return loss


def categorical_nll(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss for Laplace's grid search: NLL of probabilities (N, C)."""
    return torch.as_tensor(metrics.nll(probs, targets))


def with_noise(covariance: torch.Tensor, sigma: float) -> torch.Tensor:
    """Covariance (N, C, C) of the observations: of the function values, plus σ²I."""
    eye = torch.eye(covariance.shape[-1], dtype=torch.float64)
    return covariance.double() + sigma**2 * eye.to(covariance.device)


def _peak(*watches: Stopwatch) -> dict[str, float]:
    peaks = [w.peak_bytes for w in watches if w.peak_bytes is not None]
    return {"peak_mb": max(peaks) / 1e6} if peaks else {}


def _chosen(la: Any, tune: Tuning) -> dict[str, Any]:
    """What the posterior ended up with, for the report."""
    prior = torch.as_tensor(la.prior_precision).detach().flatten()
    chosen: dict[str, Any] = {
        "tuning": tune.value,
        "prior_precision": float(prior.mean()),
        "temperature": float(la.temperature),
        "n_data": int(la.n_data),
    }
    rank = getattr(la, "rank", None)
    return {**chosen, "rank": int(rank)} if isinstance(rank, int) else chosen


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Warnings of this package go into the row's note; laplace-torch's are routine."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    for warning in caught:
        if issubclass(warning.category, (RankWarning, NumericalWarning)):
            said.append(str(warning.message).splitlines()[0])


# --- prediction ----------------------------------------------------------------------


def predict(
    fitted: Fitted,
    loader: Any,
    link: str,
    device: torch.device,
    settings: Settings,
    seed: int,
) -> Predictions:
    """Predict over a whole loader; only the predictions are timed, not the loading."""
    outputs: list[Any] = []
    targets: list[torch.Tensor | None] = []
    seconds = 0.0
    with (
        reproducible(seed, device, loader),
        _collected_warnings(),
        torch.no_grad(),
    ):
        for batch in loader:
            x, y = split(batch, settings.dict_key_y)
            x = batches.to_device(x, device)
            size = batches.batch_size(x, settings.dict_key_x)
            start = _now(device)
            for part in batches.chunks(size, fitted.batch):
                outputs.append(fitted.predict(batches.take(x, part, size), link))
            seconds += _now(device) - start
            targets.append(y)
    y = None if any(t is None for t in targets) else torch.cat(targets).cpu()
    if not settings.is_regression:
        probs = torch.cat([p.cpu() for p in outputs])
        _check_finite(probs)
        return Predictions(y, seconds, probs=probs)
    mean = torch.cat([m.cpu() for m, _ in outputs])
    covariance = torch.cat([c.cpu() for _, c in outputs])
    _check_finite(mean, covariance)
    return Predictions(y, seconds, mean=mean, covariance=covariance)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _check_finite(*tensors: torch.Tensor) -> None:
    bad = sum(int((~t.isfinite()).flatten(1).any(1).sum()) for t in tensors)
    if bad:
        raise ValueError(f"{bad} of {len(tensors[0])} predictions are NaN or infinite")
