"""The rows of one method: predictions, scores and divergence, or the error.

Index legend: N data, C outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from laplace_ella import metrics
from laplace_ella.comparison import bootstrap
from laplace_ella.comparison.fitted import (
    Fitted,
    NotRun,
    Task,
    clock,
    fit_method,
    parts,
    reproducible,
)
from laplace_ella.comparison.methods import Method
from laplace_ella.comparison.report import Result
from laplace_ella.errors import BorderWarning

#: Where the warnings are defined that become notes of a row.
OURS = BorderWarning.__module__


def describe_error(error: BaseException) -> str:
    """Return one line for the status of a row."""
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if isinstance(error, NotRun):
        return text
    # The CPU allocator has no exception type of its own.
    exhausted = "can't allocate memory" in text or "out of memory" in text.lower()
    if exhausted or isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return f"out of memory: {text}"
    if isinstance(error, NotImplementedError):
        return f"not supported: {text}"
    return f"failed: {type(error).__name__}: {text}"


def results(
    task: Task, method: Method, seed: int, links: Sequence[str], references: dict
) -> Iterator[Result]:
    """Yield a row per link; an error becomes the status of its row.

    `references` keeps the predictions to which divergences are measured, by seed.
    """
    if not links:
        return
    empty = Result(method.name, "", seed, on_validation=method.needs_validation)
    try:
        with watched(task, seed) as at_fit:
            tuned = fit_method(task, method, seed)
    except Exception as error:
        status = describe_error(error)
        yield from (replace(empty, link=link, status=status) for link in links)
        return
    for link in links:
        row = replace(empty, link=link)
        try:
            with watched(task, seed) as at_link:
                fitted = tuned(link)
                test = predict(task, fitted, task.test, seed)
                row = scored(task, fitted, test, replace(row, **fitted.row))
                if task.is_regression and method.kind == "laplace":
                    row = compared(task, method, test, row, references)
        except Exception as error:
            yield replace(empty, link=link, status=describe_error(error))
            continue
        # Warnings of other packages are routine.
        caught = [w for w in (*at_fit, *at_link) if w.category.__module__ == OURS]
        border = any(issubclass(w.category, BorderWarning) for w in caught)
        lines = [str(w.message).splitlines()[0] for w in caught]
        note = "; ".join(dict.fromkeys([*lines, row.note])).strip("; ")
        yield replace(row, note=note, settings={**row.settings, "at_border": border})


@contextmanager
def watched(task: Task, seed: int) -> Iterator[list[warnings.WarningMessage]]:
    """Seed a block, and keep its warnings."""
    loaders = [each for each in (task.train, task.val) if each is not None]
    kept = warnings.catch_warnings(record=True)
    with reproducible(seed, task.device, *loaders), kept as caught:
        warnings.simplefilter("always")
        yield caught


class Predictions(NamedTuple):
    """Predictions over a loader, on the CPU, one row per example and position.

    `values` are probabilities or means `(N, C)`; `variance` of the targets `(N, C)` is
    that of a regression, `covariance` `(N, C, C)` that of its function, if it has one;
    `targets` are None for data whose labels do not matter.
    """

    values: torch.Tensor
    variance: Any
    covariance: Any
    targets: Any
    seconds: float

    def entropy(self) -> torch.Tensor:
        """Return the entropy of each prediction `(N,)`, up to a constant."""
        if self.variance is None:
            return metrics.entropy(self.values.double())
        return self.variance.log().sum(-1)


@torch.no_grad()
def predict(
    task: Task, fitted: Fitted, loader: Any, seed: int, labelled: bool = True
) -> Predictions:
    """Predict over a loader; the predictions are timed, not the loading.

    The data and their order are the same for every seed, which is that of random
    numbers in predictions: rows are compared on the same examples.
    """
    values, spreads, targets, seconds = [], [], [], 0.0
    with reproducible(0, task.device, loader):
        for index, (x, y) in enumerate(parts(task, loader, fitted.batch)):
            torch.manual_seed(seed + 1000 * index)
            start = clock(task.device)
            found = fitted.predict(x)
            seconds += clock(task.device) - start
            mean, *spread = found if isinstance(found, tuple) else (found,)
            values.append(task.rows(mean.detach()).cpu())
            spreads += [each.detach().flatten(0, -3).cpu() for each in spread]
            targets += [task.targets(y).cpu()] if labelled else []
    mean, covariance = torch.cat(values), torch.cat(spreads) if spreads else None
    variance = None
    if task.is_regression:
        variance = fitted.noise.square().expand(mean.shape)
        if covariance is not None:
            variance = variance + covariance.diagonal(dim1=-2, dim2=-1)
    y = torch.cat(targets) if targets else None
    return Predictions(mean, variance, covariance, y, seconds)


def scored(task: Task, fitted: Fitted, test: Predictions, row: Result) -> Result:
    """Return the row with scores on test and out-of-distribution data."""
    values, variance, _, y, seconds = test
    if task.is_regression:
        observed = values.double(), variance, y.double()
        scores = metrics.regression_metrics(*observed)
        terms = metrics.regression_terms(*observed)
        levels, std = list(metrics.CALIBRATION_LEVELS), variance.sqrt()
        shares = metrics.interval_coverage(observed[0], std, observed[2], levels)
        curves = {"coverage": {"nominal": levels, "observed": shares}}
    else:
        scores = metrics.classification_metrics(values, y)
        terms = metrics.classification_terms(values, y)
        curves = {"reliability": asdict(metrics.reliability_curve(values, y))}
    replicates = bootstrap.replicates(terms)
    for name, loader in task.ood.items():
        far = predict(task, fitted, loader, row.seed, labelled=False)
        pair = test.entropy(), far.entropy()
        scores[f"auroc:{name}"] = metrics.ood_auroc(*pair)
        replicates[f"auroc:{name}"] = bootstrap.auroc_replicates(*pair)
    return replace(
        row,
        metrics=scores,
        costs={**row.costs, "predict_s": seconds},
        curves=curves,
        replicates={k: [float(f"{v:.6g}") for v in r] for k, r in replicates.items()},
    )


def compared(
    task: Task, method: Method, test: Predictions, row: Result, references: dict
) -> Result:
    """Return the row with the KL divergence of a regression's function values from the
    reference's, or with a note why that did not run."""
    wanted, seed = task.reference, row.seed
    if wanted is None:
        return row
    if seed not in references:
        try:
            if wanted == method:
                references[seed] = test
            else:
                fitted = fit_method(task, wanted, seed)("")
                references[seed] = predict(task, fitted, task.test, seed)
            if references[seed].covariance is None:
                raise NotRun("has no covariance")
        except Exception as error:
            references[seed] = f"no KL: {wanted.name} {describe_error(error)}"
    found = references[seed]
    if isinstance(found, str):
        return replace(row, note=f"{row.note}; {found}".strip("; "))
    pair = (test.values, test.covariance, found.values, found.covariance)
    kl = metrics.gaussian_kl(*(each.double() for each in pair))
    return replace(row, metrics={**row.metrics, "kl_to_lla": kl})
