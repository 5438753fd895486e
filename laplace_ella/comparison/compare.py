"""`compare`: many methods on one trained network, one table."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from laplace_ella import metrics
from laplace_ella.comparison.cache_keys import method_key, problem_key
from laplace_ella.comparison.evaluation import Data, Evaluation
from laplace_ella.comparison.laplace_run import NotRun
from laplace_ella.comparison.loaders import (
    CountedLoader,
    Survey,
    is_map_style,
    reproducible,
    split,
    survey,
)
from laplace_ella.comparison.memory import Problem, describe_problem
from laplace_ella.comparison.methods import (
    Method,
    Tuning,
    plain_value,
    resolve_methods,
)
from laplace_ella.comparison.predictions import output_rows, target_rows
from laplace_ella.comparison.progress import BAR_FORMAT, Sizes, expected_work
from laplace_ella.comparison.provenance import (
    Provenance,
    describe_device,
    now,
    versions,
)
from laplace_ella.comparison.report import Report
from laplace_ella.comparison.results import Result
from laplace_ella.comparison.runner import tuning_of
from laplace_ella.comparison.settings import Settings, check_seeds, make_settings
from laplace_ella.comparison.tables import format_value, heading
from laplace_ella.support import batches
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.preserve import evaluation_mode
from laplace_ella.support.resources import available_memory, parse_bytes

__all__ = ["MEMORY_SHARE", "check_network", "compare"]

#: Share of the free memory that a method may be estimated to need.
MEMORY_SHARE = 0.8


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
    memory_budget: int | float | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress_bar: bool = True,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    output_layout: OutputLayout | str = OutputLayout.FLAT,
) -> Report:
    """Fit, tune and evaluate many methods on the same network and the same data.

    Every method gets its own copy of the model and the same seeds, and is tuned for
    each link that it is evaluated with. The report says for every row which settings
    were chosen, by the evidence or by the validation NLL, their values, and whether a
    search ended at the border of its range. Rows with as many settings are peers: the
    "…-calibrated" ones have three (prior precision, temperature, softmax temperature),
    chosen on the same images, by the same loss, link and search.

    What is best is marked, together with all that cannot be told from it: the 95 %
    interval of the difference, by a paired bootstrap over the test examples, has zero
    in it. See `Report.differences`.

    A method that cannot run is a row that says why. The model, the random states and
    the loaders are left as they were. Ctrl-C keeps what is finished.

    All data are read once before the first fit, to check them and to recognise them in
    the cache; that costs less than a fit.

    Parameters
    ----------
    model : torch.nn.Module
        trained network, x → logits or means `(B, C)`, or at many positions, see
        `output_layout`
    likelihood : {'classification', 'regression'}
    train_loader, test_loader, val_loader : DataLoader
        batches `(x, y)` or mappings, also of iterable data without a length; ELLA needs
        training data that can be indexed, and its rows say so where they cannot.
        Without `val_loader`, methods that are tuned on it are skipped or run without
        that tuning; their rows say so
    ood_loaders : mapping of str to DataLoader, optional
        out-of-distribution sets by name; labels are ignored. Each adds an AUROC column
    methods : names, `Method` objects, or {name: kwargs of Laplace(...)}, optional
        default `default_methods(likelihood)`
    links : sequence of Link or str
        each gives a row per method, tuned for it. Fits and passes over the validation
        data serve all links, but for early stopping. Links that laplace-torch does not
        have are applied to its means and covariances
    n_samples : int
        of the Monte-Carlo link
    seeds : sequence of int
        of sampled bases, subsets and Monte-Carlo predictions; with several, the table
        has standard errors
    tune : {'marglik', 'gridsearch', 'none'}
        for the methods without a tuning of their own: laplace-torch's
    prior_precision : float
        for all methods, before tuning. For weight decay γ on the mean loss of N data
        the matching value is N·γ (Deng et al. 2022, Sec. 5.1)
    sigma_noise : float, optional
        regression noise for all methods; default the RMSE of the network on
        `val_loader`, or else on `train_loader`
    grid_size, n_steps : int
        budget of every grid search, calibrations of laplace-torch's methods among them,
        and of marginal-likelihood optimisation
    n_bins : int
        of the expected calibration error
    reference : str or Method, optional
        regression: the method to which `kl_to_lla` is measured, averaged over the test
        inputs; it is fitted if it fits into memory, also when not in `methods`. The KL
        is between function values, without the noise that all share
    memory_budget : int or str, optional
        bytes, or a text like "8 GB"; methods that are estimated to need more are
        skipped, and ELLA is fitted within it. Default 80 % of what is free
    cache : path, optional
        JSON file. Finished methods are read from it and new ones added. A row is read
        only if everything is the same on which it depends: the model's structure, code,
        weights, buffers and trainable parameters; every input and target of every
        loader (augmented data are drawn from a fixed seed); the method with all its
        tensors; the settings; the device and the versions of this package,
        laplace-torch, torch and Python
    progress_bar : bool
        a bar with the time left, and each row as it is done, on stderr
    dict_key_x, dict_key_y : str
        as for `Laplace`, when batches are mappings
    output_layout : OutputLayout or str
        of models that predict at many positions (tokens, pixels), as for `ELLALaplace`.
        Every position counts as one prediction, those with class -100 do not count.
        laplace-torch's own methods do not take such models; their rows say so

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
    settings = make_settings(
        likelihood=likelihood,
        links=links,
        n_samples=n_samples,
        tune=tune,
        prior_precision=prior_precision,
        sigma_noise=sigma_noise,
        grid_size=grid_size,
        n_steps=n_steps,
        n_bins=n_bins,
        dict_key_x=dict_key_x,
        dict_key_y=dict_key_y,
        output_layout=output_layout,
        val_loader=val_loader,
    )
    chosen = resolve_methods(methods, settings.likelihood)
    exact = _reference(reference, chosen, settings)
    seed_list = check_seeds(seeds)
    asked = None if memory_budget is None else parse_bytes(memory_budget)
    stored = _stored(cache)

    for name, loader in {"train": train_loader, "test": test_loader}.items():
        if loader is None:
            raise ValueError(f"{name}_loader is needed: pass a DataLoader, got None.")
    data = Data(train_loader, test_loader, val_loader, dict(ood_loaders or {}))
    device = next(model.parameters()).device
    with evaluation_mode(model), reproducible(0, device, *data.named().values()):
        surveys = {
            name: survey(name, loader, dict_key_x, dict_key_y)
            for name, loader in data.named().items()
        }
        problem = _problem(model, data.train, surveys["train_loader"], settings, device)
        for name in ("train_loader", "test_loader", "val_loader"):
            if name in surveys:
                _check_targets(name, surveys[name], problem, settings)
        if settings.is_regression and sigma_noise is None:
            held_out = data.train if data.val is None else data.val
            noise = _residual_rmse(model, held_out, settings, device)
            settings = replace(settings, sigma_noise=noise)
        base_key = problem_key(model, surveys, settings, exact, asked)
    data = replace(
        data,
        train=_with_length(data.train, surveys["train_loader"]),
        val=_with_length(data.val, surveys.get("val_loader")),
    )

    limit = asked
    if limit is None and (free := available_memory(device)) is not None:
        limit = int(MEMORY_SHARE * free)
    run = Evaluation(model, device, settings, problem, data, limit, exact)
    origin = _provenance(run, surveys, seed_list, asked)
    return _loop(run, chosen, seed_list, stored, base_key, cache, progress_bar, origin)


# --- before the first fit ------------------------------------------------------------


def check_network(model: Any) -> None:
    """Refuse what is no network that can be trained."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"The model ({type(model).__name__}) has no trainable parameters, so there "
            "is nothing to be uncertain about. Set requires_grad of some."
        )


def _reference(
    reference: str | Method | None, chosen: Sequence[Method], settings: Settings
) -> Method | None:
    """The method to which KLs are measured; one of the user's list is taken from it."""
    if reference is None or not settings.is_regression:
        return None
    own = {method.name: method for method in chosen}
    if isinstance(reference, str) and reference in own:
        return own[reference]
    return resolve_methods([reference], settings.likelihood)[0]


def _stored(cache: str | os.PathLike[str] | None) -> Report:
    """What the cache holds; a file that is none is refused before any work."""
    if cache is None or not Path(cache).exists():
        return Report([])
    if Path(cache).is_dir():
        raise ValueError(f"cache must be a file, {os.fspath(cache)} is a folder.")
    return Report.load(cache)


@torch.no_grad()
def _problem(
    model: nn.Module,
    loader: Any,
    seen: Survey,
    settings: Settings,
    device: torch.device,
) -> Problem:
    """The sizes of the problem; outputs that no method could take are refused."""
    x, _ = split(next(iter(loader)), settings.dict_key_y)
    x = batches.to_device(x, device)
    problem = describe_problem(model, x, seen.n_data, settings.dict_key_x)
    flat = settings.output_layout is OutputLayout.FLAT
    if flat and len(problem.output_shape) != 1:
        raise ValueError(
            "Without output_layout the model must return (B, C), got shape "
            f"{(1, *problem.output_shape)}. Pass output_layout='channels_last' for "
            "(B, ..., C) or 'channels_first' for (B, C, ...): every position then "
            "counts as one prediction."
        )
    return problem


def _with_length(loader: Any, seen: Survey | None) -> Any:
    """A loader that others may ask how many data it has."""
    if seen is None or is_map_style(loader):
        return loader
    return CountedLoader(loader, seen)


def _check_targets(
    name: str, seen: Survey, problem: Problem, settings: Settings
) -> None:
    """Targets that are missing or of a wrong shape, before they fail every row."""
    if seen.targets is None:
        raise ValueError(
            f"{name} has batches without targets; they are needed to fit, tune and "
            f"judge. Pass batches (x, y), or mappings with {settings.dict_key_y!r} "
            "(dict_key_y)."
        )
    positions = settings.output_layout.of(problem.output_shape)
    wanted = positions.output_shape if settings.is_regression else positions.shape
    what = "values" if settings.is_regression else "integer class indices"
    for y in seen.targets:
        numbers = y.is_floating_point() or y.is_complex() or y.dtype == torch.bool
        same = len(y.shape) == 1 + len(wanted)
        # Positions of a batch may differ in number, outputs may not.
        if settings.output_layout is OutputLayout.FLAT:
            same = same and tuple(y.shape[1:]) == wanted
        if not same or (numbers and not settings.is_regression):
            shape = ", ".join(map(str, ("N", *wanted)))
            raise ValueError(
                f"Targets of {name} must be {what} of shape ({shape}), got {y.dtype} "
                f"of shape {tuple(y.shape)}."
            )


@torch.no_grad()
def _residual_rmse(
    model: nn.Module, loader: Any, settings: Settings, device: torch.device
) -> float:
    means: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for batch in loader:
        x, y = batches.split_batch(batch, settings.dict_key_y)
        means.append(output_rows(model(batches.to_device(x, device)), settings).cpu())
        targets.append(target_rows(y, settings).cpu())
    rmse = metrics.rmse(torch.cat(means), torch.cat(targets))
    # A network that interpolates leaves nothing to call noise.
    return max(rmse, 1e-3)


# --- where the numbers come from -----------------------------------------------------


def _provenance(
    run: Evaluation,
    surveys: Mapping[str, Survey],
    seeds: Sequence[int],
    memory_budget: int | None,
) -> Provenance:
    roles = {
        "train_loader": "training",
        "val_loader": "validation",
        "test_loader": "test",
        **{f"ood_loaders[{name!r}]": f"OOD: {name}" for name in run.data.ood},
    }
    options = {
        **{name: plain_value(value) for name, value in asdict(run.settings).items()},
        "links": list(run.settings.links),
        "seeds": list(seeds),
        "reference": None if (r := run.reference_method) is None else r.name,
        "memory_budget": memory_budget,
    }
    return Provenance(
        model=type(run.model).__name__,
        n_params=run.problem.n_params,
        output_shape=run.problem.output_shape,
        n_data={
            role: surveys[name].n_data
            for name, role in roles.items()
            if name in surveys
        },
        options=options,
        versions=versions(),
        device=describe_device(run.device),
        date=now(),
    )


# --- all methods ---------------------------------------------------------------------


def _loop(
    run: Evaluation,
    methods: Sequence[Method],
    seeds: Sequence[int],
    stored: Report,
    base_key: str,
    cache: str | os.PathLike[str] | None,
    progress_bar: bool,
    origin: Provenance,
) -> Report:
    """Run what the cache does not have, row by row."""
    known = {(r.key, r.link, r.seed): r for r in stored.results if r.ok}
    jobs = [(method, seed) for method in methods for seed in seeds]
    work = {method.name: _work(run, method, origin) for method in methods}
    results: list[Result] = []
    likelihood = run.settings.likelihood
    interrupted = False
    with tqdm(
        total=sum(work[method.name] for method, _ in jobs),
        disable=not progress_bar,
        file=sys.stderr,
        bar_format=BAR_FORMAT,
        smoothing=0.0,  # methods differ: only the mean speed tells of the others
    ) as bar:
        for number, (method, seed) in enumerate(jobs, 1):
            key = method_key(base_key, method)
            wanted = [(key, link, seed) for link in run.links(method)]
            if all(row in known for row in wanted):
                # The name is not part of the key: renaming a method keeps its results.
                results += [replace(known[row], method=method.name) for row in wanted]
                bar.total -= work[method.name]
                continue
            if interrupted:
                results.append(Result(method.name, "", seed, "interrupted", key=key))
                continue
            bar.set_description(f"{method.name} ({number} of {len(jobs)})")
            try:
                for result in run.results(method, seed, key):
                    results.append(result)
                    if progress_bar:
                        bar.write(describe_result(result), file=sys.stderr)
            except KeyboardInterrupt:
                interrupted = True
                results.append(Result(method.name, "", seed, "interrupted", key=key))
            if results[-1].ok:
                bar.update(work[method.name])
            else:  # what was not done took no time, and is not left either
                bar.total -= work[method.name]
            if cache is not None:
                done = [r for r in results if r.ok]
                fresh = Report(done, likelihood, provenance=origin)
                stored = stored.merge(fresh)
                stored.save(cache)
    return Report(results, likelihood, interrupted, origin)


def _work(run: Evaluation, method: Method, origin: Provenance) -> float:
    """What is expected of a method, for the progress bar."""
    n_data = dict(origin.n_data)
    n_train, n_val = n_data.pop("training"), n_data.pop("validation", 0)
    sizes = Sizes(n_train, n_val, sum(n_data.values()), run.problem.n_outputs)
    try:
        tune = tuning_of(method, run.settings, run.data.val)
    except NotRun:
        return 0.0
    grid_size, n_links = run.settings.grid_size, len(run.links(method))
    return expected_work(method, tune, sizes, grid_size, n_links)


def describe_result(result: Result) -> str:
    """One line for the terminal, when a row is done."""
    name = f"{result.method} ({result.link})" if result.link else result.method
    if not result.ok:
        return f"{name:<28} {result.status}"
    shown = (
        "accuracy", "rmse", "nll", "ece", "kl_to_lla", "fit_s", "predict_s",
    )  # fmt: skip
    values = {**result.metrics, **result.costs}
    cells = [f"{heading(c)} {format_value(c, values[c])}" for c in values if c in shown]
    return f"{name:<28} {'  '.join(cells)}"
