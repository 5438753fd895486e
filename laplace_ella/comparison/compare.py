"""`compare`: many methods on one trained network, one table."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from laplace_ella import metrics
from laplace_ella.comparison.loaders import reproducible, split
from laplace_ella.comparison.methods import (
    Kind,
    Method,
    Problem,
    Tuning,
    describe_problem,
    estimate,
    resolve_methods,
)
from laplace_ella.comparison.report import OK, Report, Result, format_value, heading
from laplace_ella.comparison.result_keys import base_key_of, method_key
from laplace_ella.comparison.runner import (
    Fitted,
    NotRun,
    Predictions,
    Settings,
    fit_method,
    predict,
    with_noise,
)
from laplace_ella.support import batches
from laplace_ella.support.preserve import evaluation_mode
from laplace_ella.support.resources import Stopwatch, available_memory, human_bytes

__all__ = ["compare"]

#: Share of the free memory that a method may be estimated to need.
MEMORY_SHARE = 0.8

LINKS = ("mc", "probit", "bridge", "bridge_norm")


def compare(
    model: nn.Module,
    likelihood: str,
    train_loader: Any,
    test_loader: Any,
    val_loader: Any = None,
    ood_loaders: Mapping[str, Any] | None = None,
    methods: Iterable[str | Method] | Mapping[str, Any] | None = None,
    *,
    links: Sequence[str] = ("mc", "probit"),
    n_samples: int = 512,
    seeds: Sequence[int] = (0,),
    tune: Tuning | str = Tuning.MARGLIK,
    prior_precision: float = 1.0,
    sigma_noise: float | None = None,
    grid_size: int = 21,
    n_steps: int = 100,
    n_bins: int = 15,
    reference: str | Method | None = "full",
    max_memory: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
) -> Report:
    """Fit, tune and evaluate many methods on the same network and the same data.

    Every method gets its own copy of the model, the same seeds, links and tuning
    budget. One that cannot run is a row that says why. The model, the random states
    and the loaders are left as they were. Ctrl-C keeps what is finished.

    Parameters
    ----------
    model : torch.nn.Module
        trained network, x → logits or means `(B, C)`
    likelihood : {'classification', 'regression'}
    train_loader, test_loader, val_loader : DataLoader
        batches `(x, y)` or mappings. Without `val_loader`, methods that are tuned on
        it are skipped or run without that tuning; their rows say so
    ood_loaders : mapping of str to DataLoader, optional
        out-of-distribution sets by name; labels are ignored. Adds AUROC columns
    methods : names, `Method` objects, or {name: kwargs of Laplace(...)}, optional
        default `default_methods(likelihood)`
    links : sequence of {'mc', 'probit', 'bridge', 'bridge_norm'}
        each gives a row; the first is used for tuning
    n_samples : int
        of the Monte-Carlo link
    seeds : sequence of int
        of sampled bases, subsets and Monte-Carlo predictions; with several, the table
        has standard errors
    tune : {'marglik', 'gridsearch', 'none'}
        for the methods that do not bring a tuning of their own
    prior_precision : float
        for all methods, before tuning. For weight decay γ on the mean loss of N data
        the matching value is N·γ (Deng et al. 2022, Sec. 5.1)
    sigma_noise : float, optional
        regression noise for all methods; default the RMSE of the network on
        `val_loader`, or else on `train_loader`
    grid_size, n_steps : int
        budget of every grid search and marginal-likelihood optimisation
    n_bins : int
        of the expected calibration error
    reference : str or Method, optional
        regression: the method to which `kl_to_lla` is measured, averaged over the test
        inputs; it is fitted if it fits into memory, also when not in `methods`. The KL
        is between function values, without the noise that all share
    max_memory : int, optional
        bytes; methods that are estimated to need more are skipped, and ELLA is fitted
        within it. Default 80 % of what is free
    cache : path, optional
        JSON file. Finished methods are read from it and new ones added, if model,
        data and settings are the same
    progress : bool
        a bar and each row as it is done, on stderr
    dict_key_x, dict_key_y : str
        as for `Laplace`, when batches are mappings

    Returns
    -------
    Report

    Examples
    --------
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> data = TensorDataset(torch.randn(60, 2), torch.randint(3, (60,)))
    >>> loader = DataLoader(data, batch_size=20)
    >>> report = compare(model, "classification", loader, loader,
    ...                  methods=["map", "kron"], links=["probit"], progress=False)
    >>> [row.method for row in report.rows()]
    ['map', 'kron']
    """
    chosen = resolve_methods(methods, likelihood)
    settings = Settings(
        likelihood=_check_likelihood(likelihood),
        links=_check_links(links),
        n_samples=n_samples,
        tune=_check_tune(tune, val_loader),
        prior_precision=float(prior_precision),
        sigma_noise=1.0 if sigma_noise is None else float(sigma_noise),
        grid_size=grid_size,
        n_steps=n_steps,
        n_bins=n_bins,
        dict_key_x=dict_key_x,
        dict_key_y=dict_key_y,
    )
    data = _Data(train_loader, test_loader, val_loader, dict(ood_loaders or {}))
    device = next(model.parameters()).device
    loaders = [train_loader, test_loader, val_loader, *data.ood.values()]
    with evaluation_mode(model), reproducible(0, device, *loaders):
        problem = _problem(model, data, settings, device)
        if settings.is_regression and sigma_noise is None:
            noise = _residual_rmse(model, val_loader or train_loader, settings, device)
            settings = replace(settings, sigma_noise=noise)
        base_key = base_key_of(model, data.named(), settings)

    limit = max_memory
    if limit is None and (free := available_memory(device)) is not None:
        limit = int(MEMORY_SHARE * free)
    run = _Run(model, device, settings, problem, data, limit)
    if settings.is_regression and reference is not None:
        # A reference of the user's list is taken from there, with its settings.
        own = {method.name: method for method in chosen}
        if isinstance(reference, str) and reference in own:
            reference = own[reference]
        run.reference_method = resolve_methods([reference], likelihood)[0]

    stored = Report.load(cache) if cache and Path(cache).exists() else Report([])
    return _loop(run, chosen, list(seeds), stored, base_key, cache, progress)


# --- checks --------------------------------------------------------------------------


def _check_likelihood(likelihood: Any) -> str:
    name = str(getattr(likelihood, "value", likelihood))
    if name not in ("classification", "regression"):
        raise ValueError(
            "likelihood must be 'classification' or 'regression' in a comparison, got "
            f"{name!r}."
        )
    return name


def _check_links(links: Sequence[str]) -> tuple[str, ...]:
    links = (links,) if isinstance(links, str) else tuple(links)
    unknown = [link for link in links if link not in LINKS]
    if unknown or not links:
        got = unknown[0] if unknown else "none"
        raise ValueError(f"links must be among {', '.join(LINKS)}, got {got!r}.")
    return links


def _check_tune(tune: Tuning | str, val_loader: Any) -> Tuning:
    allowed = (Tuning.MARGLIK, Tuning.GRIDSEARCH, Tuning.NONE)
    names = ", ".join(repr(t.value) for t in allowed)
    if str(getattr(tune, "value", tune)) not in [t.value for t in allowed]:
        raise ValueError(f"tune must be one of {names}, got {tune!r}.")
    if Tuning(tune) is Tuning.GRIDSEARCH and val_loader is None:
        raise ValueError(
            "tune='gridsearch' chooses the prior on validation data: pass val_loader, "
            "or use tune='marglik'."
        )
    return Tuning(tune)


# --- one run -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Data:
    train: Any
    test: Any
    val: Any
    ood: dict[str, Any]

    def named(self) -> dict[str, Any]:
        """The loaders that there are."""
        loaders = {"train": self.train, "test": self.test, "val": self.val, **self.ood}
        return {name: loader for name, loader in loaders.items() if loader is not None}


@dataclass
class _Run:
    """The model, the data and what is known about both."""

    model: nn.Module
    device: torch.device
    settings: Settings
    problem: Problem
    data: _Data
    limit: int | None
    reference_method: Method | None = None
    reference: Predictions | None = None

    def links(self, method: Method) -> tuple[str, ...]:
        """Links that make a difference for `method`; ('',) if none does."""
        if self.settings.is_regression or method.kind is not Kind.LAPLACE:
            return ("",)
        return self.settings.links

    def fit(self, method: Method, seed: int) -> Fitted:
        needs = estimate(method, self.problem, self.limit)
        if needs.unsupported:
            raise NotRun(needs.unsupported)
        if needs.batch is None:
            raise NotRun(
                f"skipped: would need {human_bytes(needs.bytes)}"
                f" (limit {human_bytes(self.limit)})"
            )
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

    def predict(self, fitted: Fitted, loader: Any, link: str, seed: int) -> Predictions:
        return predict(fitted, loader, link, self.device, self.settings, seed)

    def results(self, method: Method, seed: int, key: str) -> Iterator[Result]:
        """Rows of one method and seed; errors become their status."""
        empty = Result(method.name, seed=seed, key=key)
        try:
            fitted = self.fit(method, seed)
        except Exception as error:
            yield replace(empty, status=describe_error(error))
            return
        for link in self.links(method):
            try:
                yield self.evaluate(fitted, replace(empty, link=link), method)
            except Exception as error:
                status = describe_error(error)
                yield replace(empty, link=link, status=status, costs=fitted.costs)

    def evaluate(self, fitted: Fitted, empty: Result, method: Method) -> Result:
        """Predict on test and OOD data and compute the metrics."""
        link, seed, settings = empty.link, empty.seed, self.settings
        with Stopwatch(self.device) as watch:
            test = self.predict(fitted, self.data.test, link, seed)
        curves: dict[str, Any] = {}
        if settings.is_regression:
            noisy = with_noise(test.covariance, fitted.noise)
            values = metrics.regression_metrics(test.mean, noisy, test.targets)
            values.update(self._kl(test, method, seed))
        else:
            values = metrics.classification_metrics(
                test.probs, test.targets, settings.n_bins
            )
            curve = metrics.reliability_curve(test.probs, test.targets, settings.n_bins)
            curves["reliability"] = asdict(curve)
            curves.update(_confidence_curves(test))
        for name, loader in self.data.ood.items():
            ood = self.predict(fitted, loader, link, seed)
            values[f"auroc:{name}"] = metrics.ood_auroc(
                test.uncertainty(), ood.uncertainty()
            )
            if not settings.is_regression:
                curves.update(_confidence_curves(test, ood, f":{name}"))
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
            note=fitted.note,
        )

    def _kl(self, test: Predictions, method: Method, seed: int) -> dict[str, float]:
        """KL to the reference, for methods that have a covariance to compare."""
        if self.reference_method is None or method.kind is not Kind.LAPLACE:
            return {}
        if method.name == self.reference_method.name:
            self.reference = test
            return {}
        if self.reference is None:
            try:
                fitted = self.fit(self.reference_method, seed)
                self.reference = self.predict(fitted, self.data.test, "", seed)
            except Exception:
                # The reference is an extra; where it does not run there is no column.
                self.reference_method = None
                return {}
        exact = self.reference
        return {
            "kl_to_lla": metrics.gaussian_kl(
                test.mean, test.covariance, exact.mean, exact.covariance
            )
        }


def _confidence_curves(
    test: Predictions, ood: Predictions | None = None, suffix: str = ""
) -> dict[str, Any]:
    ood_probs = None if ood is None else ood.probs
    return {
        f"error_{side}{suffix}": asdict(
            metrics.error_versus_confidence(
                test.probs, test.targets, ood_probs, side=side
            )
        )
        for side in ("below", "above")
    }


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


# --- all methods ---------------------------------------------------------------------


def _loop(
    run: _Run,
    methods: Sequence[Method],
    seeds: Sequence[int],
    stored: Report,
    base_key: str,
    cache: str | os.PathLike[str] | None,
    progress: bool,
) -> Report:
    """Run what the cache does not have, row by row."""
    known: dict[tuple[str, str, int], Result] = {
        (r.key, r.link, r.seed): r for r in stored.results if r.ok
    }
    jobs = [(method, seed) for method in methods for seed in seeds]
    results: list[Result] = []
    likelihood = run.settings.likelihood
    interrupted = False
    with tqdm(jobs, disable=not progress, file=sys.stderr, unit="fit") as bar:
        for method, seed in bar:
            key = method_key(base_key, method)
            cached = [known.get((key, link, seed)) for link in run.links(method)]
            if all(cached):
                # The name is not part of the key: renaming a method keeps its results.
                results += [replace(r, method=method.name) for r in cached]
                continue
            if interrupted:
                results.append(Result(method.name, "", seed, "interrupted", key=key))
                continue
            bar.set_description(method.name)
            try:
                for result in run.results(method, seed, key):
                    results.append(result)
                    if progress:
                        bar.write(describe_result(result), file=sys.stderr)
            except KeyboardInterrupt:
                interrupted = True
                results.append(Result(method.name, "", seed, "interrupted", key=key))
            if cache is not None:
                done = [r for r in results if r.ok]
                stored = stored.merge(Report(done, likelihood))
                stored.save(cache)
    return Report(results, likelihood, interrupted)


def describe_result(result: Result) -> str:
    """One line for the terminal, when a row is done."""
    name = f"{result.method} ({result.link})" if result.link else result.method
    if result.status != OK:
        return f"{name:<28} {result.status}"
    values = {**result.metrics, **result.costs}
    shown = [
        f"{heading(column)} {format_value(column, value)}"
        for column, value in values.items()
        if column in ("accuracy", "rmse", "nll", "ece", "kl_to_lla", "fit_s")
        or column == "predict_s"
    ]
    return f"{name:<28} {'  '.join(shown)}"


def _problem(
    model: nn.Module, data: _Data, settings: Settings, device: torch.device
) -> Problem:
    batch = next(iter(data.train), None)
    if batch is None:
        raise ValueError("train_loader yielded no batch; it needs at least one.")
    x, _ = split(batch, settings.dict_key_y)
    x = batches.to_device(x, device)
    _check_flat(model, x, settings.dict_key_x)
    return describe_problem(model, x, len(data.train.dataset), settings.dict_key_x)


@torch.no_grad()
def _check_flat(model: nn.Module, x: Any, dict_key_x: str) -> None:
    """Refuse at once what every method would fail on after its fit."""
    out = model(batches.take(x, slice(0, 1), batches.batch_size(x, dict_key_x)))
    if isinstance(out, torch.Tensor) and out.ndim != 2:
        raise ValueError(
            "compare() is for models that return (B, C), got shape "
            f"{tuple(out.shape)}: metrics and the other methods know no positions. "
            "Compare a wrapped model that returns one position, or use "
            "ELLALaplace(..., output_layout=) alone."
        )


@torch.no_grad()
def _residual_rmse(
    model: nn.Module, loader: Any, settings: Settings, device: torch.device
) -> float:
    pairs = [split(batch, settings.dict_key_y) for batch in loader]
    means = torch.cat([model(batches.to_device(x, device)).cpu() for x, _ in pairs])
    rmse = metrics.rmse(means, torch.cat([y for _, y in pairs]).cpu())
    # A network that interpolates leaves nothing to call noise.
    return max(rmse, 1e-3)
