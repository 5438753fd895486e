"""Rows of one method: fit it, tune it for every link, predict, compute the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from laplace_ella import metrics
from laplace_ella.comparison.laplace_run import NotRun, build_laplace
from laplace_ella.comparison.loaders import is_map_style
from laplace_ella.comparison.memory import Estimate, Problem, estimate, estimate_ella
from laplace_ella.comparison.methods import Kind, Method
from laplace_ella.comparison.predictions import (
    Fitted,
    Gaussian,
    Predictions,
    join_notes,
    predict,
    with_noise,
)
from laplace_ella.comparison.resampling import (
    auroc_replicates,
    classification_replicates,
    regression_replicates,
)
from laplace_ella.comparison.results import Result
from laplace_ella.comparison.runner import fit_method
from laplace_ella.comparison.settings import Settings
from laplace_ella.support.resources import Stopwatch, human_bytes

__all__ = ["Data", "Evaluation", "describe_error", "estimate_method"]


@dataclass(frozen=True)
class Data:
    """The loaders of a comparison."""

    train: Any
    test: Any
    val: Any
    ood: dict[str, Any]

    def named(self) -> dict[str, Any]:
        """The loaders that there are, by the names of the arguments of `compare`."""
        loaders = {
            "train_loader": self.train,
            "test_loader": self.test,
            "val_loader": self.val,
            **{f"ood_loaders[{name!r}]": loader for name, loader in self.ood.items()},
        }
        return {name: loader for name, loader in loaders.items() if loader is not None}


def estimate_method(
    method: Method,
    model: nn.Module,
    settings: Settings,
    problem: Problem,
    train_loader: Any,
    limit: int | None,
    seed: int = 0,
) -> Estimate:
    """What a method would need; ELLA is asked for its own estimate."""
    needs = estimate(method, problem, limit)
    if method.functional is not None and not is_map_style(train_loader):
        why = (
            "not supported: laplace-torch's gp draws training examples by index and "
            "needs a map-style data set (with __getitem__ and __len__)"
        )
        return replace(needs, unsupported=why)
    if needs.unsupported or not method.is_ella:
        return needs

    def build(**more: Any) -> Any:
        if method.structure[0] == "last_layer" and problem.last_layer is not None:
            more = {"last_layer_name": problem.last_layer, **more}
        return build_laplace(method, model, settings, problem, seed, **more)

    device = next(model.parameters()).device
    return estimate_ella(method, build, train_loader, device, problem.batch, limit)


@dataclass
class Evaluation:
    """The model, the data and what is known about both."""

    model: nn.Module
    device: torch.device
    settings: Settings
    problem: Problem
    data: Data
    limit: int | None
    reference_method: Method | None = None
    reference: Gaussian | None = None

    def links(self, method: Method) -> tuple[str, ...]:
        """Links that make a difference for `method`; ('',) if none does."""
        if self.settings.is_regression or not method.has_links:
            return ("",)
        return self.settings.links

    def fit(self, method: Method, seed: int) -> Callable[[str], Fitted]:
        """Fit a method; call what comes back with a link to tune it for that."""
        needs = estimate_method(
            method,
            self.model,
            self.settings,
            self.problem,
            self.data.train,
            self.limit,
            seed,
        )
        if needs.unsupported:
            raise NotRun(needs.unsupported)
        if needs.batch is None:
            limit = "" if self.limit is None else f" (limit {human_bytes(self.limit)})"
            raise NotRun(f"skipped: would need {human_bytes(needs.bytes)}{limit}")
        return fit_method(
            method,
            self.model,
            self.settings,
            self.problem,
            needs,
            self.data.train,
            self.data.val,
            seed,
        )

    def results(self, method: Method, seed: int, key: str) -> Iterator[Result]:
        """Rows of one method and seed; errors become their status."""
        empty = Result(method.name, seed=seed, key=key)
        try:
            tuned_for = self.fit(method, seed)
        except Exception as error:
            yield replace(empty, status=describe_error(error))
            return
        for link in self.links(method):
            row = replace(empty, link=link)
            try:
                yield self.evaluate(tuned_for(link), row, method)
            except Exception as error:
                yield replace(row, status=describe_error(error))

    def evaluate(self, fitted: Fitted, empty: Result, method: Method) -> Result:
        """Predict on test and OOD data and compute the metrics."""
        seed = empty.seed
        with Stopwatch(self.device) as watch:
            test = self._predict(fitted, self.data.test, seed, method)
        values, curves, replicates = self._scores(test, fitted)
        values.update(self._kl(test.values, method, seed))
        notes = [fitted.note, test.note]
        for name, loader in self.data.ood.items():
            ood = self._predict(fitted, loader, seed)
            scores = test.uncertainty(), ood.uncertainty()
            values[f"auroc:{name}"] = metrics.ood_auroc(*scores)
            replicates[f"auroc:{name}"] = auroc_replicates(*scores)
            curves.update(_confidence_curves(test, ood, f":{name}"))
            notes.append(ood.note)
        costs = {
            "fit_s": fitted.costs["fit_s"],
            "tune_s": fitted.costs["tune_s"],
            "predict_s": test.seconds,
            "floats": fitted.costs["floats"],
        }
        if watch.peak_bytes is not None:
            earlier = fitted.costs.get("peak_mb", 0.0)
            costs["peak_mb"] = max(earlier, watch.peak_bytes / 1e6)
        return replace(
            empty,
            metrics=values,
            costs=costs,
            settings=fitted.settings,
            curves=curves,
            replicates={k: _rounded(v) for k, v in replicates.items()},
            note=join_notes(*notes),
        )

    def _predict(
        self,
        fitted: Fitted,
        loader: Any,
        seed: int,
        method: Method | None = None,
    ) -> Predictions:
        """Predictions; with covariances if the method's KL will be computed."""
        covariance = (
            self.reference_method is not None
            and method is not None
            and method.kind is Kind.LAPLACE
        )
        return predict(fitted, loader, self.device, self.settings, seed, covariance)

    def _scores(
        self, test: Predictions, fitted: Fitted
    ) -> tuple[dict[str, float], dict[str, Any], dict[str, list[float]]]:
        """Metrics and curves on the test data, and metrics on draws from them."""
        if test.targets is None:
            raise ValueError("test_loader has batches without targets")
        if test.values is not None:
            noisy = with_noise(test.values.variance, fitted.noise)
            observed = test.values.mean, noisy, test.targets
            values = metrics.regression_metrics(*observed)
            curves = {"coverage": _coverage_curve(*observed)}
            return values, curves, regression_replicates(*observed)
        assert test.probs is not None
        bins = self.settings.n_bins
        predicted = test.probs, test.targets, bins
        curve = metrics.reliability_curve(*predicted)
        return (
            metrics.classification_metrics(*predicted),
            {"reliability": asdict(curve), **_confidence_curves(test)},
            classification_replicates(*predicted),
        )

    def _kl(
        self, values: Gaussian | None, method: Method, seed: int
    ) -> dict[str, float]:
        """KL to the reference, for methods that have a covariance to compare."""
        reference = self.reference_method
        if values is None or reference is None or method.kind is not Kind.LAPLACE:
            return {}
        if method.name == reference.name:
            self.reference = values
            return {}
        if self.reference is None:
            try:
                fitted = self.fit(reference, seed)("")
                test = self._predict(fitted, self.data.test, seed, reference)
            except Exception:
                # The reference is an extra; where it does not run there is no column.
                self.reference_method = None
                return {}
            self.reference = test.values
        pair = [_covariance(v) for v in (values, self.reference)]
        if self.reference is None or pair[0] is None or pair[1] is None:
            return {}
        return {
            "kl_to_lla": metrics.gaussian_kl(
                values.mean, pair[0], self.reference.mean, pair[1]
            )
        }


def _covariance(values: Gaussian | None) -> torch.Tensor | None:
    """`(N, C, C)`; None where only variances of several outputs are known."""
    if values is None or values.covariance is not None:
        return None if values is None else values.covariance
    return values.variance.unsqueeze(-1) if values.variance.shape[-1] == 1 else None


def _coverage_curve(
    mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
) -> dict[str, list[float]]:
    """How much of the data central intervals hold, at every nominal level."""
    levels = list(metrics.CALIBRATION_LEVELS)
    observed = metrics.interval_coverage(mean, variance.sqrt(), targets, levels)
    return {"nominal": levels, "observed": list(observed)}


def _confidence_curves(
    test: Predictions, ood: Predictions | None = None, suffix: str = ""
) -> dict[str, Any]:
    if test.probs is None or test.targets is None:
        return {}
    ood_probs = None if ood is None else ood.probs
    return {
        f"error_{side}{suffix}": asdict(
            metrics.error_versus_confidence(
                test.probs, test.targets, ood_probs, side=side
            )
        )
        for side in ("below", "above")
    }


def _rounded(values: Sequence[float]) -> list[float]:
    """Six digits: noise of draws needs no more, and reports stay small."""
    return [float(f"{value:.6g}") for value in values]


def describe_error(error: Exception) -> str:
    """One line for the status of a row."""
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if isinstance(error, NotRun):
        return text
    # The CPU allocator has no exception type of its own.
    exhausted = "can't allocate memory" in text or "out of memory" in text.lower()
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or exhausted:
        return "out of memory"
    if isinstance(error, NotImplementedError):
        return f"not supported: {text}"
    if isinstance(error, ImportError):
        return f"not available: {text}"
    return f"failed: {type(error).__name__}: {text}"
