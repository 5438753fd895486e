"""Fit one method on its own copy of the model, and tune it for every link.

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

from laplace_ella.comparison.laplace_run import LaplaceRun, NotRun, peak
from laplace_ella.comparison.loaders import reproducible
from laplace_ella.comparison.memory import Estimate, Problem
from laplace_ella.comparison.methods import Kind, Method, Tuning
from laplace_ella.comparison.predictions import (
    Fitted,
    collected_warnings,
    join_notes,
    output_rows,
    target_rows,
)
from laplace_ella.comparison.settings import Settings
from laplace_ella.support import batches
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.resources import Stopwatch
from laplace_ella.tuning.calibration import temperature_scaling

__all__ = ["fit_method", "tuning_of"]

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
) -> Callable[[str], Fitted]:
    """Fit `method` on a copy of `model`, which stays as it is.

    Returns
    -------
    callable
        link → the method, tuned for that link. Links have one posterior in common:
        predict with one before asking for the next

    Raises
    ------
    NotRun
        if the method does not apply or its tuning lacks the data
    """
    tune = tuning_of(method, settings, val_loader)
    device = next(model.parameters()).device
    gc.collect()  # the posterior of the method before, which may sit in a cycle
    own = copy.deepcopy(model).eval()
    loaders = (train_loader, val_loader)
    with reproducible(seed, device, *loaders), collected_warnings() as at_fit:
        if method.kind is Kind.MAP:
            tuned_for = _map(own, settings, problem)
        elif method.kind is Kind.TEMPERATURE:
            tuned_for = _temperature_scaling(own, settings, problem, val_loader)
        else:
            tuned_for = LaplaceRun(
                method, tune, own, settings, problem, needs, *loaders, seed
            ).tuned_for
    notes = [*at_fit.lines]
    asked = Tuning(method.tune)
    if tune is not asked and asked not in (Tuning.DEFAULT, Tuning.SUITED):
        notes.append(f"no val_loader, so {asked.value} was left out")

    def ready(link: str) -> Fitted:
        with reproducible(seed, device, *loaders), collected_warnings() as said:
            fitted = tuned_for(link)
        note = join_notes(fitted.note, *said.lines, *notes)
        chosen = fitted.settings
        if at_fit.at_border or said.at_border:
            chosen = {**chosen, "at_border": True}
        return replace(fitted, note=note, settings=chosen)

    return ready


def tuning_of(method: Method, settings: Settings, val_loader: Any) -> Tuning:
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


def _map(
    model: nn.Module, settings: Settings, problem: Problem
) -> Callable[[str], Fitted]:
    def predict(x: Any) -> Any:
        f = model(x)
        if settings.is_regression:
            return f, torch.zeros_like(f)
        return torch.softmax(f, _class_dim(settings))

    costs = {"fit_s": 0.0, "tune_s": 0.0, "floats": 0.0}
    noise = torch.tensor(settings.sigma_noise)
    return lambda link: Fitted(predict, problem.batch, noise, costs)


def _class_dim(settings: Settings) -> int:
    """Dimension of the C classes in the model's output."""
    return 1 if settings.output_layout is OutputLayout.CHANNELS_FIRST else -1


def _temperature_scaling(
    model: nn.Module, settings: Settings, problem: Problem, val_loader: Any
) -> Callable[[str], Fitted]:
    device = next(model.parameters()).device
    logits: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    with Stopwatch(device) as watch, torch.no_grad():
        for batch in val_loader:
            x, y = batches.split_batch(batch, settings.dict_key_y)
            f = model(batches.to_device(x, device)).double().cpu()
            logits.append(output_rows(f, settings))
            targets.append(target_rows(y, settings).cpu())
        tau = temperature_scaling(torch.cat(logits), torch.cat(targets))

    def predict(x: Any) -> torch.Tensor:
        return torch.softmax(model(x) / tau, _class_dim(settings))

    costs = {"fit_s": 0.0, "tune_s": watch.seconds, "floats": 1.0, **peak(watch)}
    chosen = {
        "tuning": "temperature scaling",
        "chosen": ["softmax_temperature"],
        "softmax_temperature": tau,
    }
    return lambda link: Fitted(predict, problem.batch, costs=costs, settings=chosen)
