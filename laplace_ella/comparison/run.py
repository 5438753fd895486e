"""The rows of one method: predictions, scores and divergence, or the error.

Index legend: N data, C outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from laplace_ella import metrics
from laplace_ella.comparison import bootstrap
from laplace_ella.comparison.fitted import (
    Fitted,
    NotRun,
    Task,
    clock,
    fit_method,
    reproducible,
)
from laplace_ella.comparison.methods import Method
from laplace_ella.comparison.report import Result
from laplace_ella.errors import BorderWarning
from laplace_ella.support.batches import (
    batch_size,
    chunks,
    split_batch,
    take,
    to_device,
)
from laplace_ella.support.preserve import seeded_iteration


def split(batch: Any, dict_key_y: str) -> tuple[Any, Any]:
    """Return inputs and targets of a batch; None for targets where there are none."""
    if isinstance(batch, torch.Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0], None
    if hasattr(batch, "keys") and dict_key_y not in batch:
        return batch, None
    return split_batch(batch, dict_key_y)


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
    empty = Result(method.name, "", seed, on_validation=task.on_validation(method))
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
            with watched(task, seed) as said:
                fitted = tuned(link)
                test = predict(task, fitted, task.test, seed)
                row = scored(task, fitted, test, row)
                kl, notes = divergence(task, method, test, seed, references)
            # Those of other packages are routine.
            caught = [w for w in (*at_fit, *said) if w.category.__module__ == OURS]
            border = any(issubclass(w.category, BorderWarning) for w in caught)
            lines = [str(w.message).splitlines()[0] for w in caught]
            yield replace(
                row,
                metrics={**row.metrics, **kl},
                note="; ".join(dict.fromkeys([*lines, *fitted.notes, *notes])),
                settings={**row.settings, "at_border": border},
            )
        except Exception as error:
            yield replace(empty, link=link, status=describe_error(error))


#: Where the warnings are defined that become notes of a row.
OURS = BorderWarning.__module__


@contextmanager
def watched(task: Task, seed: int) -> Iterator[list[warnings.WarningMessage]]:
    """Seed a block, and keep its warnings."""
    loaders = [each for each in (task.train, task.val) if each is not None]
    kept = warnings.catch_warnings(record=True)
    with reproducible(seed, task.device, *loaders), kept as caught:
        warnings.simplefilter("always")
        yield caught


@dataclass(frozen=True)
class Predictions:
    """Predictions over a loader, on the CPU, one row per example and position.

    `values` are probabilities or means `(N, C)`; `variance` of the targets `(N, C)` and
    `covariance` of the function `(N, C, C)` are those of a regression; `targets` are
    None for data without labels.
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
def predict(task: Task, fitted: Fitted, loader: Any, seed: int) -> Predictions:
    """Predict over a loader; the predictions are timed, not the loading.

    The data and their order are the same for every seed, which is that of random
    numbers in predictions: rows are compared on the same examples.
    """
    values, spreads, targets, seconds = [], [], [], 0.0
    with reproducible(0, task.device, loader):
        for index, batch in enumerate(seeded_iteration(loader)):
            x, y = split(batch, task.dict_key_y)
            x, n = to_device(x, task.device), batch_size(x, task.dict_key_x)
            torch.manual_seed(seed + 1000 * index)
            for part in chunks(n, fitted.batch):
                start = clock(task.device)
                found = fitted.predict(take(x, part, n))
                seconds += clock(task.device) - start
                mean, *spread = found if isinstance(found, tuple) else (found,)
                values.append(task.rows(mean.detach()).cpu())
                spreads += [each.detach().flatten(0, -3).cpu() for each in spread]
            targets.append(None if y is None else task.targets(y).cpu())
    covariance = torch.cat(spreads) if spreads else None
    variance = None
    if covariance is not None:
        marginal = covariance.diagonal(dim1=-2, dim2=-1).double()
        variance = marginal + fitted.noise.square()
    y = torch.cat(targets) if all(t is not None for t in targets) else None
    return Predictions(torch.cat(values), variance, covariance, y, seconds)


def scored(task: Task, fitted: Fitted, test: Predictions, row: Result) -> Result:
    """Return the row with scores on test and out-of-distribution data."""
    y, values = test.targets, test.values
    if task.is_regression:
        observed = values.double(), test.variance, y.double()
        scores = metrics.regression_metrics(*observed)
        replicates = bootstrap.regression_replicates(*observed)
        levels, std = list(metrics.CALIBRATION_LEVELS), test.variance.sqrt()
        shares = metrics.interval_coverage(observed[0], std, observed[2], levels)
        curves = {"coverage": {"nominal": levels, "observed": shares}}
    else:
        values, y = values[y != metrics.IGNORED], y[y != metrics.IGNORED]
        scores = metrics.classification_metrics(values, y)
        replicates = bootstrap.classification_replicates(values, y)
        curves = {"reliability": asdict(metrics.reliability_curve(values, y))}
    for name, loader in task.ood.items():
        far = predict(task, fitted, loader, row.seed)
        scores[f"auroc:{name}"] = metrics.ood_auroc(test.entropy(), far.entropy())
        draws = bootstrap.auroc_replicates(test.entropy(), far.entropy())
        replicates[f"auroc:{name}"] = draws
    seconds = (fitted.fit_s, fitted.tune_s, test.seconds)
    return replace(
        row,
        metrics=scores,
        costs=dict(zip(("fit_s", "tune_s", "predict_s"), seconds, strict=True)),
        settings=fitted.settings,
        curves=curves,
        replicates={k: [float(f"{v:.6g}") for v in r] for k, r in replicates.items()},
        left_out=fitted.left_out,
    )


def divergence(
    task: Task, method: Method, test: Predictions, seed: int, references: dict
) -> tuple[dict[str, float], list[str]]:
    """Return the KL divergence of a regression's function values from the reference's,
    and why there is none where that did not run."""
    wanted = task.reference
    if wanted is None or method.kind != "laplace" or not task.is_regression:
        return {}, []
    if seed not in references:
        try:
            if replace(wanted, name="", about="") == replace(method, name="", about=""):
                references[seed] = test
            else:
                fitted = fit_method(task, wanted, seed)("")
                references[seed] = predict(task, fitted, task.test, seed)
        except Exception as error:
            references[seed] = f"no KL: {wanted.name} {describe_error(error)}"
    found = references[seed]
    if isinstance(found, str):
        return {}, [found]
    parts = (test.values, test.covariance, found.values, found.covariance)
    return {"kl_to_lla": metrics.gaussian_kl(*(p.double() for p in parts))}, []
