"""Fit and tune one method on its own copy of the model.

Index legend: N data, C outputs, P parameters, B batch.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from laplace_ella import metrics
from laplace_ella.comparison.loaders import rebatched, reproducible
from laplace_ella.comparison.memory import (
    Estimate,
    Problem,
    preferred_batch,
    stored_floats,
)
from laplace_ella.comparison.methods import Kind, Method, Tuning
from laplace_ella.comparison.predictions import (
    Fitted,
    collected_warnings,
    join_notes,
    output_rows,
    target_rows,
    with_noise,
)
from laplace_ella.comparison.settings import Settings
from laplace_ella.support import batches
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.links import Link
from laplace_ella.support.resources import Stopwatch
from laplace_ella.tuning.calibration import temperature_scaling

__all__ = ["NotRun", "build_laplace", "fit_method"]

#: Bytes of temporary memory that a batch may take before it is split for speed.
BATCH_TARGET = 5 * 10**7


class NotRun(Exception):
    """A method that was not tried; the message is the status of its row."""


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
        collected_warnings() as said,
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
    asked = Tuning(method.tune)
    if tune is not asked and asked not in (Tuning.DEFAULT, Tuning.SUITED):
        notes.append(f"no val_loader, so {asked.value} was left out")
    return replace(fitted, note=join_notes(*notes))


def _tuning(method: Method, settings: Settings, val_loader: Any) -> Tuning:
    """The tuning that will be used; NotRun if it cannot."""
    if method.kind is Kind.TEMPERATURE:
        if settings.is_regression:
            raise NotRun("not supported: temperature scaling needs classification")
        if val_loader is None:
            raise NotRun("skipped: needs a val_loader")
        return Tuning(method.tune)
    if method.kind is Kind.MAP:
        return Tuning(method.tune)
    tune = settings.tune if method.tune is Tuning.DEFAULT else Tuning(method.tune)
    if tune is Tuning.SUITED:
        by_evidence = settings.is_regression or val_loader is None
        tune = Tuning.MARGLIK if by_evidence else Tuning.GRIDSEARCH
    if tune.needs_validation and val_loader is None:
        if method.fallback is None:
            raise NotRun(f"skipped: tuning by {tune.value} needs a val_loader")
        return Tuning(method.fallback)
    return tune


def _fit_map(model: nn.Module, settings: Settings, problem: Problem) -> Fitted:
    def predict(x: Any, link: str) -> Any:
        f = model(x)
        if settings.is_regression:
            return f, torch.zeros_like(f)
        return torch.softmax(f, _class_dim(settings))

    costs = {"fit_s": 0.0, "tune_s": 0.0, "floats": 0.0}
    noise = torch.tensor(settings.sigma_noise)
    return Fitted(predict, problem.batch, noise, costs)


def _class_dim(settings: Settings) -> int:
    """Dimension of the C classes in the model's output."""
    return 1 if settings.output_layout is OutputLayout.CHANNELS_FIRST else -1


def _fit_temperature(
    model: nn.Module, settings: Settings, problem: Problem, val_loader: Any
) -> Fitted:
    device = next(model.parameters()).device
    logits: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    with Stopwatch(device) as watch, torch.no_grad():
        for batch in val_loader:
            x, y = batches.split_batch(batch, settings.dict_key_y)
            f = model(batches.to_device(x, device)).double().cpu()
            logits.append(output_rows(f, settings))
            targets.append(target_rows(y, settings).cpu())
        temperature = temperature_scaling(torch.cat(logits), torch.cat(targets))

    def predict(x: Any, link: str) -> torch.Tensor:
        return torch.softmax(model(x) / temperature, _class_dim(settings))

    costs = {"fit_s": 0.0, "tune_s": watch.seconds, "floats": 1.0, **_peak(watch)}
    chosen = {"temperature": temperature}
    return Fitted(predict, problem.batch, costs=costs, settings=chosen)


# --- Laplace -------------------------------------------------------------------------


def build_laplace(
    method: Method,
    model: nn.Module,
    settings: Settings,
    problem: Problem,
    seed: int,
    **more: Any,
) -> Any:
    """`Laplace(...)` with the arguments of a method; `more` where it has none."""
    import laplace

    return laplace.Laplace(
        model,
        settings.likelihood,
        **{**more, **_laplace_arguments(method, settings, problem, seed)},
    )


def _laplace_arguments(
    method: Method, settings: Settings, problem: Problem, seed: int
) -> dict[str, Any]:
    """Keyword arguments for `Laplace`, sizes capped by the data, with the seed set."""
    kwargs = dict(method.kwargs)
    kwargs.setdefault("prior_precision", settings.prior_precision)
    kwargs.setdefault("dict_key_y", settings.dict_key_y)
    kwargs.setdefault("dict_key_x", settings.dict_key_x)
    if settings.is_regression:
        kwargs.setdefault("sigma_noise", settings.sigma_noise)
    if method.structure[1] in ("nystrom", "gp"):
        kwargs.setdefault("seed", seed)
    if method.is_ella:
        kwargs.setdefault("output_layout", settings.output_layout)
    if method.structure[1] == "gp":
        for name in ("n_subset", "subsample_size", "num_inducing"):
            if isinstance(kwargs.get(name), int):
                kwargs[name] = min(kwargs[name], problem.n_data)
        if "n_eigenvalues" in kwargs and "subsample_size" in kwargs:
            kwargs["n_eigenvalues"] = min(
                kwargs["n_eigenvalues"], kwargs["subsample_size"]
            )
    return kwargs


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
    from laplace_ella import EarlyStopping

    device = next(model.parameters()).device
    batch = preferred_batch(method, problem, BATCH_TARGET)
    batch = batch if needs.batch is None else min(needs.batch, batch)
    budget = {} if needs.budget is None else {"memory_budget": needs.budget}
    fit_kwargs = dict(method.fit_kwargs)
    if tune is Tuning.EARLY_STOPPING:
        plan = EarlyStopping(**_link_options(method, settings), **method.tune_kwargs)
        fit_kwargs = {"val_loader": val_loader, "early_stopping": plan, **fit_kwargs}
    # KFAC averages its factors over a batch, so its fit keeps the user's batches.
    if method.structure[1] != "kron":
        train_loader = rebatched(train_loader, batch)

    with Stopwatch(device) as fitting:
        la = build_laplace(method, model, settings, problem, seed, **budget)
        la.fit(train_loader, **fit_kwargs)
    with Stopwatch(device) as tuning:
        if val_loader is not None:
            val_loader = rebatched(val_loader, batch)
        _tune_laplace(la, method, tune, settings, val_loader)

    def predict(x: Any, link: str) -> Any:
        # Sampled weights are averaged behind the link; Laplace calls that 'mc'.
        link = "mc" if method.prediction_type == "nn" else link
        if link == Link.PROBIT_CENTERED and not method.is_ella:
            raise NotImplementedError(f"laplace-torch has no link {link!r}")
        return la(
            x,
            pred_type=method.prediction_type,
            n_samples=settings.n_samples,
            **({"link_approx": link} if link else {}),
        )

    noise = torch.as_tensor(la.sigma_noise).detach().cpu().double()
    return Fitted(
        predict,
        batch,
        noise,
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
    link = _link_options(method, settings)
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
            noisy_nll(la.sigma_noise) if settings.is_regression else categorical_nll
        )
        la.optimize_prior_precision(**{**options, **method.tune_kwargs})
    elif tune is Tuning.TEMPERATURE:
        la.optimize_temperature(val_loader, **{**link, **method.tune_kwargs})


def _link_options(method: Method, settings: Settings) -> dict[str, Any]:
    """The link with which methods are tuned; regression needs none but for 'nn'."""
    if method.prediction_type == "nn":
        return {"link_approx": "mc", "n_samples": settings.n_samples}
    if settings.is_regression:
        return {}
    # laplace-torch knows all links but one.
    known = [k for k in settings.links if method.is_ella or k != Link.PROBIT_CENTERED]
    return {"link_approx": (*known, "mc")[0], "n_samples": settings.n_samples}


def categorical_nll(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss for a grid search: the NLL of the report, as the tensor Laplace expects."""
    return torch.tensor(metrics.nll(probs, targets))


def noisy_nll(sigma: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Loss for a grid search: the NLL of the report, with the observation noise."""

    def loss(
        mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        if variance.ndim == 3:
            variance = variance.diagonal(dim1=-2, dim2=-1)
        noisy = with_noise(variance, sigma)
        return torch.tensor(metrics.gaussian_nll(mean, noisy, targets))

    return loss


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
