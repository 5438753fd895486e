"""`compare`: many methods on one trained network, one table."""

from __future__ import annotations

import copy
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from laplace_ella import metrics
from laplace_ella.comparison.fitted import Task, fit_network, reproducible, split
from laplace_ella.comparison.methods import Method, check_task, measure, resolve_methods
from laplace_ella.comparison.report import Report, Result, number, write
from laplace_ella.comparison.run import predict, results
from laplace_ella.posterior.observation import Link
from laplace_ella.support import batches
from laplace_ella.support.batches import OutputLayout, batch_size
from laplace_ella.support.checks import check_positive, member, positive_int
from laplace_ella.support.identity import digest, model_identity
from laplace_ella.support.memory import budget_of
from laplace_ella.support.preserve import seeded_iteration

#: What of a task does not tell its results: data and model are known by their digests.
ASIDE = ("model", "train", "test", "val", "ood", "limit")


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
    row with the reason. Ctrl-C keeps the rows that are finished.

    Parameters
    ----------
    model : torch.nn.Module
        trained network, x → logits or means `(B, C)`, or as `output_layout` says
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
        of all methods, before tuning; see `prior_precision_from_weight_decay`
    sigma_noise : float, optional
        noise of a regression, of all methods; by default each maximises its evidence
        for it, and the network alone has its error on the training data
    grid_size, n_steps : int
        values of every grid search, and steps of every search by the evidence
    reference : str or Method, optional
        regression: the method to which the KL divergence of function values is
        measured, where it fits in memory
    memory_budget : int or str, optional
        bytes, or a text like "8 GB", by default a share of what is free; methods that
        need more are skipped
    cache : path, optional
        folder with a file for every finished row. A row is read if model (its state,
        and its outputs on the first batch), data, settings and versions are the same
    progress_bar : bool
        one line on stderr for every finished row
    dict_key_x, dict_key_y, output_layout : str
        as for `ELLALaplace`. Every position counts as one prediction; laplace-torch's
        methods do not take outputs at many positions

    Returns
    -------
    Report

    Examples
    --------
    >>> model, data = nn.Linear(2, 3), [(torch.randn(60, 2), torch.randint(3, (60,)))]
    >>> report = compare(model, "classification", data, data, progress_bar=False,
    ...                  methods=["map", "kron"], links=["probit"])
    >>> [row.method for row in report.rows()]
    ['map', 'kron']
    """
    likelihood = check_task(model, likelihood)
    chosen = resolve_methods(methods, likelihood, val_loader is not None)
    links = [links] if isinstance(links, str) else links
    links = [member(Link, "links", link).value for link in links]
    seeds = [seeds] if isinstance(seeds, int) else [int(seed) for seed in seeds]
    for name, values in (("links", links), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must differ and be at least one, got {values}.")
    sizes = {"n_samples": n_samples, "grid_size": grid_size, "n_steps": n_steps}
    for name, value in sizes.items():
        positive_int(name, value)
    check_positive("prior_precision", prior_precision)
    check_positive("sigma_noise", sigma_noise)
    wanted = None
    if reference is not None and likelihood == "regression":
        own = {method.name: method for method in chosen}
        wanted = own.get(reference) if isinstance(reference, str) else reference
        wanted = wanted or resolve_methods([reference], likelihood, True)[0]
    folder = None if cache is None else Path(cache)
    if folder is not None and folder.is_file():
        raise ValueError(f"cache must be a folder, {folder} is a file.")
    layout = member(OutputLayout, "output_layout", output_layout)
    model = copy.deepcopy(model).eval()
    device = next(model.parameters()).device
    loaders = {"train_loader": train_loader, "test_loader": test_loader}
    loaders |= {} if val_loader is None else {"val_loader": val_loader}
    far = {f"ood_loaders[{n!r}]": each for n, each in (ood_loaders or {}).items()}
    with torch.no_grad(), reproducible(0, device, *loaders.values(), *far.values()):
        surveys = {
            name: _survey(name, loader, dict_key_x, dict_key_y, folder is not None)
            for name, loader in {**loaders, **far}.items()
        }
        n_data, _, x, _ = surveys["train_loader"]
        x, n = batches.to_device(x, device), batch_size(x, dict_key_x)
        trial = copy.deepcopy(model)  # calls may change it
        identity = folder and model_identity(trial, x)
        batches.check_outputs(trial(x), layout)
        task = Task(
            model=model,
            likelihood=likelihood,
            train=train_loader,
            test=test_loader,
            val=val_loader,
            ood=dict(ood_loaders or {}),
            sizes=measure(trial, batches.take(x, slice(0, 1), n), n_data, n),
            layout=layout,
            prior_precision=prior_precision,
            noise=1.0 if sigma_noise is None else sigma_noise,
            fixed_noise=sigma_noise is not None,
            reference=wanted,
            limit=budget_of(device, memory_budget),
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
            **sizes,
        )
        for name in loaders:
            _check_targets(name, surveys[name].y, task)
        if task.is_regression and sigma_noise is None:
            found = predict(task, fit_network(task, False), train_loader, 0)
            # A network that interpolates leaves nothing to call noise.
            noise = max(metrics.rmse(found.values, found.targets), 1e-3)
            task = replace(task, noise=noise)
    origin = _origin(task, surveys, links=links, seeds=seeds)
    key = folder and digest(
        identity,
        [type(model).__name__, *(p.requires_grad for p in model.parameters())],
        {name: (seen.n_data, seen.key) for name, seen in surveys.items()},
        {name: v for name, v in vars(task).items() if name not in ASIDE},
        [memory_budget, origin["versions"], device.type],
    )
    jobs = [(method, seed) for method in chosen for seed in seeds]
    found, interrupted = _run(task, jobs, links, folder, key or "", progress_bar)
    return Report(found, likelihood, interrupted, origin)


# Before the first fit


class _Survey(NamedTuple):
    """What one pass over a loader showed: examples, their digest, the first batch."""

    n_data: int
    key: str
    x: Any
    y: Any


def _survey(name: str, loader: Any, key_x: str, key_y: str, digested: bool) -> _Survey:
    """Look at every batch of a loader once."""
    if loader is None or isinstance(loader, Iterator):
        raise ValueError(
            f"{name} must be a DataLoader, or yield batches whenever it is iterated "
            f"over; got {type(loader).__name__}."
        )
    n_data, key, first = 0, "", None
    for batch in seeded_iteration(loader):
        n_data += batch_size(split(batch, key_y)[0], key_x)
        key = digest(key, batch) if digested else ""
        first = split(batch, key_y) if first is None else first
    if first is None:
        raise ValueError(f"{name} yielded no batch; it needs at least one.")
    return _Survey(n_data, key, *first)


def _check_targets(name: str, y: Any, task: Task) -> None:
    """Refuse targets of a batch that are missing or of a wrong shape."""
    positions = task.layout.of(task.sizes.output_shape)
    shape = positions.output_shape if task.is_regression else positions.shape
    got = "none" if y is None else f"{y.dtype} of shape {tuple(y.shape)}"
    y = torch.empty(()) if y is None else y
    good = y.ndim == 1 + len(shape)
    if good and task.layout is OutputLayout.FLAT:  # positions may differ in number
        good = tuple(y.shape[1:]) == shape
    if good and not task.is_regression:
        good = not y.is_floating_point() and y.dtype != torch.bool
    if not good:
        what = "values" if task.is_regression else "integer class indices"
        raise ValueError(
            f"Targets of {name} must be {what} of shape "
            f"({', '.join(map(str, ('N', *shape)))}), got {got}. Pass batches (x, y), "
            "or mappings with the targets under dict_key_y."
        )


def _origin(task: Task, surveys: Mapping[str, _Survey], **more: Any) -> dict[str, str]:
    """Return where the numbers come from, as texts by name."""
    from laplace_ella import __version__

    shape = " × ".join(map(str, task.sizes.output_shape))
    sizes = f"P = {task.sizes.n_params:,} trainable parameters, C = {shape} outputs"
    names = ("likelihood", "prior_precision", "n_samples", "grid_size", "n_steps")
    noise = {"sigma_noise": str(task.noise)} if task.fixed_noise else {}
    packages = [f"{name} {version(name)}" for name in ("laplace-torch", "torch")]
    packages += [f"laplace-ella {__version__}", f"Python {platform.python_version()}"]
    return {
        "model": f"{type(task.model).__name__}, {sizes}",
        **{name: f"{seen.n_data:,} examples" for name, seen in surveys.items()},
        **{name: str(getattr(task, name)) for name in names},
        **noise,
        **{name: ", ".join(map(str, each)) for name, each in more.items()},
        "versions": ", ".join(packages),
        "device": f"{task.device.type}, {torch.get_num_threads()} threads",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


# All methods, and the cache


def _run(
    task: Task,
    jobs: Sequence[tuple[Method, int]],
    links: Sequence[str],
    folder: Path | None,
    key: str,
    progress_bar: bool,
) -> tuple[list[Result], bool]:
    """Return the rows, those that the cache does not have run one by one, and whether
    that was interrupted."""
    found: list[Result] = []
    references: dict[int, Any] = {}
    interrupted, started = False, time.perf_counter()
    for index, (method, seed) in enumerate(jobs, 1):
        plain = task.is_regression or method.kind != "laplace"
        rows: dict[str, Result | None] = dict.fromkeys([""] if plain else links)
        paths: dict[str, Path] = {}
        if folder is not None:
            for link in rows:
                name = digest(key, method.kwargs, method.kind, method.tune, link, seed)
                paths[link] = folder / f"{name}.json"
                rows[link] = _read(paths[link], method)
        missing = [link for link in rows if rows[link] is None and not interrupted]
        try:
            for row in results(task, method, seed, missing, references):
                rows[row.link] = row
                if folder is not None and row.ok:
                    _keep(paths[row.link], row)
                if progress_bar:
                    seconds = time.perf_counter() - started
                    place = f"[{seconds:5.0f} s] {index} of {len(jobs)}"
                    nll = f"NLL {number('nll', row.metrics.get('nll'))}"
                    text = f"{place}: {row.full_label}: {nll if row.ok else row.status}"
                    print(text, file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            interrupted = True
        for link, row in rows.items():
            found.append(row or Result(method.name, link, seed, "interrupted"))
    return found, interrupted


def _read(path: Path, method: Method) -> Result | None:
    """Return the row of a file by the name that the method has now; None where there
    is no file, or one that is no row."""
    try:
        row = Result(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return replace(row, method=method.name)


def _keep(path: Path, row: Result) -> None:
    """Write a row; that it cannot be written is no reason to lose it."""
    try:
        write(path, json.dumps(asdict(row)))
    except OSError as error:
        what = f"{row.method} could not be stored in the cache: {error}"
        warnings.warn(what, stacklevel=2)
