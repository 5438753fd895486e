"""`compare`: many methods on one trained network, one table."""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from laplace_ella.comparison.estimates import measure
from laplace_ella.comparison.methods import Method, resolve_methods
from laplace_ella.comparison.report import (
    Report,
    Result,
    finite,
    number,
    replace_file,
    result_of,
)
from laplace_ella.comparison.run import Task, reproducible, results, split
from laplace_ella.posterior.observation import Link
from laplace_ella.support.batches import (
    OutputLayout,
    batch_size,
    check_outputs,
    split_batch,
    to_device,
)
from laplace_ella.support.checks import check_positive, member, positive_int
from laplace_ella.support.identity import digest, model_identity
from laplace_ella.support.memory import budget_of, parse_bytes
from laplace_ella.support.preserve import seeded_iteration, undisturbed

__all__ = ["compare"]


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
    prior_precision: float = 1.0,
    sigma_noise: float | None = None,
    grid_size: int = 21,
    n_steps: int = 100,
    n_bins: int = 15,
    reference: str | Method | None = "full",
    memory_budget: int | float | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress_bar: bool = True,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    output_layout: OutputLayout | str = OutputLayout.FLAT,
) -> Report:
    """Fit, tune and evaluate many methods on the same network and the same data.

    Every method gets its own copy of the model and the same seeds, and is tuned for
    each link that it is evaluated with. Rows form two groups: those tuned on the
    training data alone, and those tuned on validation data. A method that fails is a
    row with the reason. The model, the random states and the loaders are left as they
    were. Ctrl-C keeps the rows that are finished.

    Parameters
    ----------
    model : torch.nn.Module
        trained network, x → logits or means `(B, C)`, or at many positions, see
        `output_layout`
    likelihood : {'classification', 'regression'}
    train_loader, test_loader, val_loader : DataLoader or iterable
        yield batches `(x, y)` or mappings whenever they are iterated over. Without
        `val_loader`, methods that are tuned on it are skipped
    ood_loaders : mapping of str to DataLoader, optional
        out-of-distribution data by name; labels are ignored. Each adds an AUROC
    methods : names, `Method` objects, or {name: arguments of Laplace(...)}, optional
        default `default_methods(likelihood)`
    links : sequence of str
        of class probabilities; each is a row per method, tuned for it
    n_samples : int
        of the link 'mc'
    seeds : sequence of int
        of sampled bases and predictions; with several, the table has standard errors
    prior_precision : float
        for all methods, before tuning. For weight decay γ on the mean loss of N data it
        is N·γ, see `prior_precision_from_weight_decay`
    sigma_noise : float, optional
        noise of a regression, for all methods; by default each maximises its evidence
        for it, and the network alone has the root mean squared error on the training
        data
    grid_size, n_steps : int
        values of every grid search, and steps of every search by the evidence
    n_bins : int
        of the expected calibration error
    reference : str or Method, optional
        regression: the method to which the KL divergence of function values is
        measured; it is fitted if it fits in memory
    memory_budget : int or str, optional
        bytes, or a text like "8 GB"; methods that need more are skipped. By default a
        share of what is free
    cache : path, optional
        folder with a file for every finished row. A row is read if model (its state,
        and its outputs on the first batch), data, settings and versions are the same
    progress_bar : bool
        one line on stderr for every finished row
    dict_key_x, dict_key_y : str
        as for `Laplace`, when batches are mappings
    output_layout : OutputLayout or str
        of models that predict at many positions, as for `ELLALaplace`. Every position
        counts as one prediction. laplace-torch's methods do not take such models

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
    ...                  methods=["map", "kron"], links=["probit"],
    ...                  progress_bar=False)
    >>> [row.method for row in report.rows()]
    ['map', 'kron']
    """
    check_network(model)
    likelihood = check_likelihood(likelihood)
    chosen = resolve_methods(methods, likelihood, val_loader is not None)
    links = _distinct("links", [links] if isinstance(links, str) else links)
    seeds = _distinct("seeds", [seeds] if isinstance(seeds, int) else seeds)
    options = {"grid_size": grid_size, "n_steps": n_steps, "n_bins": n_bins}
    options |= {"n_samples": n_samples, "prior_precision": prior_precision}
    for name, value in options.items():
        check_positive(name, value)
        if name != "prior_precision":
            positive_int(name, value)
    check_positive("sigma_noise", sigma_noise)
    wanted = None
    if reference is not None and likelihood == "regression":
        named = {method.name: method for method in chosen}
        own = named.get(reference) if isinstance(reference, str) else None
        wanted = own or resolve_methods([reference], likelihood, True)[0]
    folder = None if cache is None else Path(cache)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"cache must be a folder, {folder} is a file.")
    if memory_budget is not None:
        memory_budget = parse_bytes(memory_budget)
    layout = member(OutputLayout, "output_layout", output_layout)
    far = {f"ood_loaders[{n!r}]": each for n, each in (ood_loaders or {}).items()}
    loaders = {"train_loader": train_loader, "test_loader": test_loader}
    loaders |= {} if val_loader is None else {"val_loader": val_loader}
    device = next(model.parameters()).device
    with undisturbed(model), reproducible(0, device, *loaders.values(), *far.values()):
        own = copy.deepcopy(model)
        surveys = {
            name: _survey(name, loader, dict_key_x, dict_key_y, cache is not None)
            for name, loader in {**loaders, **far}.items()
        }
        x, _ = split(surveys["train_loader"].first, dict_key_y)
        x = to_device(x, device)
        identity = model_identity(model, x) if folder is not None else {}
        check_outputs(own(x), layout)
        n_data = surveys["train_loader"].n_data
        task = Task(
            model, likelihood, train_loader, test_loader, val_loader,
            dict(ood_loaders or {}), measure(own, x, n_data, dict_key_x),
            tuple(member(Link, "links", link).value for link in links), n_samples,
            prior_precision, sigma_noise, 1.0, grid_size, n_steps, n_bins, wanted,
            memory_budget, budget_of(device, memory_budget), dict_key_x, dict_key_y,
            layout,
        )  # fmt: skip
        for name in loaders:
            _check_targets(name, surveys[name], task)
        if task.is_regression and sigma_noise is None:
            task = replace(task, residual=_residual(task))
    origin = _origin(task, surveys, seeds)
    key = digest(
        identity, [p.requires_grad for p in model.parameters()], type(model).__name__,
        {name: (seen.n_data, seen.key) for name, seen in surveys.items()},
        {k: v for k, v in options.items()}, sigma_noise, memory_budget, layout,
        None if wanted is None else vars(wanted), origin["Versions"], device.type,
        dict_key_x, dict_key_y, likelihood,
    )  # fmt: skip
    jobs = [(method, int(seed)) for method in chosen for seed in seeds]
    return _run(task, jobs, folder, key, origin, progress_bar)


# Checks before the first fit


def check_network(model: Any) -> None:
    """Refuse what is no network that can be trained."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"The model ({type(model).__name__}) has no trainable parameters, so there "
            "is nothing to be uncertain about. Set requires_grad of some."
        )


def check_likelihood(likelihood: Any) -> str:
    """Return the name of a likelihood that a comparison has scores for."""
    name = str(getattr(likelihood, "value", likelihood))
    if name not in ("classification", "regression"):
        raise ValueError(
            "likelihood must be 'classification' or 'regression' in a comparison, got "
            f"{name!r}."
        )
    return name


def _distinct(name: str, values: Iterable[Any]) -> list[Any]:
    """Return values of which there is at least one, and none twice."""
    found = [v.item() if isinstance(v, np.generic) else v for v in values]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{name} must be different and at least one, got {found}.")
    return found


@dataclass(frozen=True)
class _Survey:
    """What one pass over a loader showed: examples, digest, first and last batch."""

    n_data: int
    key: str
    first: Any
    last: Any


def _survey(name: str, loader: Any, key_x: str, key_y: str, digested: bool) -> _Survey:
    """Look at every batch of a loader once."""
    if loader is None or isinstance(loader, Iterator):
        raise ValueError(
            f"{name} must be a DataLoader, or yield batches whenever it is iterated "
            f"over; got {type(loader).__name__}."
        )
    n_data, key, first, last = 0, "", None, None
    for batch in seeded_iteration(loader):
        n_data += batch_size(split(batch, key_y)[0], key_x)
        key = digest(key, batch) if digested else ""
        first, last = batch if first is None else first, batch
    if first is None:
        raise ValueError(f"{name} yielded no batch; it needs at least one.")
    return _Survey(n_data, key, first, last)


def _check_targets(name: str, seen: _Survey, task: Task) -> None:
    """Refuse targets that are missing or of a wrong shape, before they fail each
    row."""
    positions = task.layout.of(task.sizes.output_shape)
    shape = positions.output_shape if task.is_regression else positions.shape
    what = "values" if task.is_regression else "integer class indices"
    for batch in (seen.first, seen.last):
        y = split(batch, task.dict_key_y)[1]
        flat = task.layout is OutputLayout.FLAT
        if (
            y is None
            or y.ndim != 1 + len(shape)
            or (flat and tuple(y.shape[1:]) != shape)
            or (
                not task.is_regression
                and (y.is_floating_point() or y.dtype == torch.bool)
            )
        ):
            wanted = ", ".join(map(str, ("N", *shape)))
            got = "none" if y is None else f"{y.dtype} of shape {tuple(y.shape)}"
            raise ValueError(
                f"Targets of {name} must be {what} of shape ({wanted}), got {got}. "
                "Batches are (x, y), or mappings with the targets under dict_key_y."
            )


@torch.no_grad()
def _residual(task: Task) -> float:
    """Return the network's root mean squared error on the training data."""
    total, n = 0.0, 0
    for batch in seeded_iteration(task.train):
        x, y = split_batch(batch, task.dict_key_y)
        error = task.model(to_device(x, task.device)).double().cpu() - y.cpu()
        total, n = total + float(error.square().sum()), n + error.numel()
    # A network that interpolates leaves nothing to call noise.
    return max(math.sqrt(total / n), 1e-3)


def _origin(task: Task, surveys: Mapping[str, _Survey], seeds: Sequence[int]) -> dict:
    """Return where the numbers come from, as texts by group."""
    import laplace_ella

    names = (
        "links", "n_samples", "prior_precision", "sigma_noise", "grid_size", "n_steps",
        "n_bins",
    )  # fmt: skip
    shown = {name: getattr(task, name) for name in names}
    packages = ("laplace-torch", "torch")
    device = str(task.device)
    if task.device.type == "cuda":
        device = torch.cuda.get_device_name(task.device)
    return {
        "Model": {
            "class": type(task.model).__name__,
            "parameters P": f"{task.sizes.n_params:,}",
            "outputs C": " × ".join(map(str, task.sizes.output_shape)),
        },
        "Examples": {name: f"{seen.n_data:,}" for name, seen in surveys.items()},
        "Settings": {
            "likelihood": task.likelihood,
            "seeds": ", ".join(map(str, seeds)),
            **{name: str(v) for name, v in shown.items() if v is not None},
        },
        "Versions": {
            "laplace-ella": laplace_ella.__version__,
            **{name: version(name) for name in packages},
            "python": platform.python_version(),
        },
        "Run": {
            "device": device,
            "threads": str(torch.get_num_threads()),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        },
    }


# All methods, and the cache


def _run(
    task: Task,
    jobs: Sequence[tuple[Method, int]],
    folder: Path | None,
    key: str,
    origin: dict[str, dict[str, str]],
    progress_bar: bool,
) -> Report:
    """Run what the cache does not have, row by row."""
    found: list[Result] = []
    references: dict[int, Any] = {}
    interrupted, started = False, time.perf_counter()
    for number_, (method, seed) in enumerate(jobs, 1):
        spec = {k: v for k, v in vars(method).items() if k not in ("name", "about")}
        links, paths = list(task.links_of(method)), {}
        if folder is not None:
            names = {link: digest(key, spec, link, seed) for link in links}
            paths = {link: folder / f"{name}.json" for link, name in names.items()}
        known = {link: _read(path, method) for link, path in paths.items()}
        missing = [link for link in links if known.get(link) is None]
        fresh: dict[str, Result] = {}
        try:
            for row in (
                () if interrupted else results(task, method, seed, missing, references)
            ):
                fresh[row.link] = row
                if row.link in paths and row.ok:
                    _write(paths[row.link], row)
                if progress_bar:
                    seconds = time.perf_counter() - started
                    done = f"[{seconds:5.0f} s] {number_} of {len(jobs)}"
                    print(f"{done}: {_summary(row)}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            interrupted = True
        for link in links:
            empty = Result(method.name, link, seed, "interrupted")
            found.append(known.get(link) or fresh.get(link) or empty)
    return Report(found, task.likelihood, interrupted, origin)


def _summary(row: Result) -> str:
    name = f"{row.label} ({row.link})" if row.link else row.label
    if not row.ok:
        return f"{name}: {row.status}"
    nll = number("nll", row.metrics.get("nll"))
    return f"{name}: NLL {nll}, fit {number('fit_s', row.costs['fit_s'])} s"


def _read(path: Path, method: Method) -> Result | None:
    """Return the row of a file by the name that the method has now; None where there
    is no file, or one that is no row."""
    try:
        row = result_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    return replace(row, method=method.name)


def _write(path: Path, row: Result) -> None:
    """Keep a row; that it cannot be kept is no reason to lose it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(finite(asdict(row))))
    except OSError as error:
        warnings.warn(
            f"{row.method} was not stored in the cache: {error}", stacklevel=2
        )
