"""The check-up: versions, devices, and what is best for a given model.

Which derivatives work, what fits into memory, how long fits and predictions will take,
and which n_eigenvalues to choose. Nothing is tried that would not fit.

Index legend: N data, C outputs, P parameters, M samples, K rank, S positions.
"""

from __future__ import annotations

import copy
import importlib.metadata
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from laplace_ella.comparison.compare import MEMORY_SHARE, check_network
from laplace_ella.comparison.evaluation import estimate_method
from laplace_ella.comparison.forecast import (
    RANKS,
    Forecast,
    Inputs,
    Way,
    choose,
    forecast,
    measure_way,
    seconds,
)
from laplace_ella.comparison.loaders import is_map_style, split, survey
from laplace_ella.comparison.memory import Problem, describe_problem
from laplace_ella.comparison.methods import Tuning, resolve_methods
from laplace_ella.comparison.progress import BAR_FORMAT
from laplace_ella.comparison.settings import Settings, check_likelihood
from laplace_ella.support import batches, resources
from laplace_ella.support.checks import check_positive, member
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.preserve import evaluation_mode, random_states
from laplace_ella.support.presets import PAPER
from laplace_ella.support.resources import human_bytes, human_seconds

__all__ = ["check_installation", "check_model"]

#: Distribution → whether the package needs it, or the extra it belongs to.
_PACKAGES = {
    "laplace-ella": "required",
    "torch": "required",
    "laplace-torch": "required",
    "torchmetrics": "required",
    "curvlinops-for-pytorch": "required",
    "backpack-for-pytorch": "required",
    "asdfghjkl": "required",
    "jinja2": "required",
    "matplotlib": 'plots: pip install "laplace-ella[plots]"',
    "scikit-learn": 'demo: pip install "laplace-ella[demo]"',
    "pandas": "only for Report.to_pandas()",
}


# --- the installation ----------------------------------------------------------------


def check_installation() -> list[str]:
    """Print versions and devices; return what is missing or broken."""
    problems = _check_packages()
    _print_devices()
    return problems + _check_registration()


def _check_packages() -> list[str]:
    print(f"Python {platform.python_version()} on {platform.platform()}")
    problems: list[str] = []
    for name, role in _PACKAGES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
            # A source tree on the path works without a distribution of that name.
            if role == "required" and name != "laplace-ella":
                problems.append(f"{name} is not installed: pip install {name}")
            elif role != "required":
                version += f" ({role})"
        print(f"  {name:<24} {version}")
    return problems


def _print_devices() -> None:
    free = _free_text(torch.device("cpu"))
    print(f"CPU: {torch.get_num_threads()} threads, {free} free")
    for i in range(torch.cuda.device_count()):
        device = torch.device("cuda", i)
        name = torch.cuda.get_device_name(device)
        print(f"CUDA {i}: {name}, {_free_text(device)} free")
    if not torch.cuda.device_count():
        print("CUDA: none")


def _free_text(device: torch.device) -> str:
    free = resources.available_memory(device)
    return "unknown" if free is None else human_bytes(free)


def _check_registration() -> list[str]:
    from laplace import Laplace

    from laplace_ella import ELLALaplace

    try:
        la = Laplace(nn.Linear(1, 1), "regression", "all", "nystrom")
    except Exception as error:  # the point of a check-up is to report anything
        return [f'Laplace(..., hessian_structure="nystrom") fails: {error}']
    if not isinstance(la, ELLALaplace):
        return [f'hessian_structure="nystrom" gives {type(la).__name__}']
    print('Laplace(..., hessian_structure="nystrom") is registered')
    return []


# --- a model -------------------------------------------------------------------------

#: Seconds that a fit, or a thousand predictions, may take to be recommended.
TIME_BUDGET = 600.0

#: Outputs up to which the variance outside the directions is recommended.
FEW_OUTPUTS = 100


@dataclass(frozen=True)
class _Patient:
    """The model to check, with what is known about it."""

    model: nn.Module
    train: Any
    settings: Settings
    problem: Problem
    inputs: Inputs
    limit: int | None
    device: torch.device
    load_seconds: float

    def build(self, **kwargs: Any) -> Any:
        """An `ELLALaplace` of the model that is not fitted."""
        from laplace_ella import ELLALaplace

        model = kwargs.pop("model", self.model)
        return ELLALaplace(
            model,
            self.settings.likelihood,
            dict_key_x=self.settings.dict_key_x,
            dict_key_y=self.settings.dict_key_y,
            output_layout=self.settings.output_layout,
            **kwargs,
        )

    @property
    def complement(self) -> dict[str, str]:
        """What a recommended posterior keeps outside its directions.

        Regressions match it to the spectrum by themselves. Of many outputs it would
        take a gradient each, more than all directions.
        """
        many = self.problem.n_outputs > FEW_OUTPUTS
        if many or self.settings.is_regression:
            return {}
        return {"complement": "prior"}


def check_model(
    arguments: Mapping[str, Any],
    *,
    memory_budget: int | float | str | None = None,
    time_budget: float = TIME_BUDGET,
    progress_bar: bool = False,
) -> list[str]:
    """Print what works for a model, what fits, how long it takes, and what to choose.

    Parameters
    ----------
    arguments : mapping
        of `compare`: model, likelihood and train_loader, and optionally dict_key_x,
        dict_key_y, output_layout and memory_budget; others are not looked at
    memory_budget : int or str, optional
        bytes, or a text like "8 GB"; default 80 % of what is free
    time_budget : float
        seconds that a fit, or a thousand predictions, may take to be recommended
    progress_bar : bool
        on stderr, with the time left

    Returns
    -------
    list of str
        what is wrong
    """
    check_positive("time_budget", float(time_budget))
    model, train = arguments["model"], arguments["train_loader"]
    check_network(model)
    settings = _settings(arguments)
    device = next(model.parameters()).device
    asked = arguments.get("memory_budget") if memory_budget is None else memory_budget
    free = resources.available_memory(device)
    limit = None if free is None else int(MEMORY_SHARE * free)
    if asked is not None:
        limit = resources.parse_bytes(asked)
    with evaluation_mode(model), random_states(device, train):
        start = time.perf_counter()
        batch = next(iter(train), None)
        loading = time.perf_counter() - start
        if batch is None:
            return ["train_loader yielded no batch; it needs at least one."]
        x, y = split(batch, settings.dict_key_y)
        if y is None:
            return [
                "train_loader has batches without targets, so nothing can be fitted."
            ]
        x = batches.to_device(x, device)
        problem = describe_problem(
            model, x, _n_data(train, settings), settings.dict_key_x
        )
        shape = " × ".join(map(str, problem.output_shape))
        print(
            f"\nModel: {type(model).__name__}, P = {problem.n_params:,} trainable "
            f"parameters, C = {shape} outputs, N = {problem.n_data:,} data, "
            f"batches of {problem.batch}"
        )
        positions = len(problem.output_shape) > 1
        if positions and settings.output_layout is OutputLayout.FLAT:
            return [
                f"The model returns {problem.output_shape} per example. Return "
                "output_layout='channels_last' for (B, ..., C) or 'channels_first' for "
                "(B, C, ...) from the function as well."
            ]
        inputs = Inputs(batch, settings)
        # Processes beside this one read while it computes.
        alone = not getattr(train, "num_workers", 0)
        patient = _Patient(
            model,
            train,
            settings,
            problem,
            inputs,
            limit,
            device,
            loading / problem.batch if alone else 0.0,
        )
        with tqdm(
            total=3 + 4 + 1 + len(RANKS),
            disable=not progress_bar,
            file=sys.stderr,
            leave=False,
            bar_format=BAR_FORMAT,
        ) as bar:
            works, problems = _check_derivatives(patient, bar)
            _print_memory(patient)
            if works:
                found = _forecasts(patient, works, bar)
                problems += _recommend(patient, found, float(time_budget))
    return problems


def _say(text: str) -> None:
    """Print above the progress bar."""
    tqdm.write(text, file=sys.stdout)


def _settings(arguments: Mapping[str, Any]) -> Settings:
    """As much of the settings as fits and estimates depend on."""
    layout = arguments.get("output_layout", OutputLayout.FLAT)
    return Settings(
        likelihood=check_likelihood(arguments["likelihood"]),
        links=("probit",),
        n_samples=1,
        tune=Tuning.NONE,
        prior_precision=1.0,
        sigma_noise=1.0,
        grid_size=1,
        n_steps=1,
        n_bins=1,
        dict_key_x=arguments.get("dict_key_x", "input_ids"),
        dict_key_y=arguments.get("dict_key_y", "labels"),
        output_layout=member(OutputLayout, "output_layout", layout),
    )


def _n_data(loader: Any, settings: Settings) -> int:
    if is_map_style(loader):
        return len(loader.dataset)
    keys = settings.dict_key_x, settings.dict_key_y
    return survey("train_loader", loader, *keys).n_data


# --- what works, and what fits -------------------------------------------------------


def _check_derivatives(patient: _Patient, bar: Any) -> tuple[list[str], list[str]]:
    """Try each way of computing features on one example, if it fits into memory; those
    that work, and what is wrong."""
    from laplace_ella import FeatureMode

    problem, limit = patient.problem, patient.limit
    loader = patient.inputs.loader(1)
    works, too_large = [], []
    _say("Ways of computing features J(x)V:")
    for mode in FeatureMode:
        if mode is FeatureMode.AUTO:
            continue
        bar.set_description(f"trying {mode.value}")
        try:
            la = patient.build(
                subsample_size=2, n_eigenvalues=2, chunk_size=1, feature_mode=mode
            )
            needed = la.estimate_memory(loader).needed
            if mode is FeatureMode.REVERSE:
                needed += _jacobian_bytes(problem)
            if limit is not None and needed > limit:
                too_large.append(mode.value)
                text = (
                    f"not tried: needs {human_bytes(needed)} for one example, "
                    f"{human_bytes(limit)} may be used"
                )
            else:
                text = f"works, {1e3 * _features_seconds(la, patient):.0f} ms"
                works.append(mode.value)
        except Exception as error:  # a model may fail in any way
            text = f"fails: {_first_line(error)}"
        _say(f"  {mode.value:<12} {text}")
        bar.update()
    if works:
        return works, []
    if too_large:
        return [], [
            "No way to differentiate this model that fits into the free memory was "
            f"found; {', '.join(too_large)} would need more."
        ]
    return [], ["No way to differentiate this model was found."]


def _jacobian_bytes(problem: Problem) -> int:
    """All rows of the Jacobian of one example, (S·C, P), and a copy."""
    itemsize = max(problem.itemsize, torch.float32.itemsize)
    return 2 * problem.n_outputs * problem.n_params * itemsize


def _features_seconds(la: Any, patient: _Patient) -> float:
    """Time for the features of one example, after a fit to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one example has few directions
        la.fit(patient.inputs.loader(1))
    x = patient.inputs.x(1, patient.device)
    return seconds(lambda: la.features(x), patient.device)


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"


def _print_memory(patient: _Patient) -> None:
    _say("\nEstimated memory, in the batches that would be used:")
    methods = resolve_methods(None, patient.settings.likelihood)
    # Rows that differ in their tuning alone need the same.
    distinct = {(m.kind, repr(m.kwargs)): m for m in reversed(methods)}
    for method in reversed(distinct.values()):
        try:
            needs = estimate_method(
                method,
                patient.model,
                patient.settings,
                patient.problem,
                patient.train,
                patient.limit,
            )
        except Exception as error:  # a model may fail in any way
            _say(f"  {method.name:<18} fails: {_first_line(error)}")
            continue
        if needs.unsupported:
            text = needs.unsupported
        elif needs.batch is None:
            text = f"{human_bytes(needs.bytes)}: does not fit"
        else:
            text = f"{human_bytes(needs.bytes)}, batches of {needs.batch}"
        _say(f"  {method.name:<18} {text}")


# --- how long, and what to choose ----------------------------------------------------


def _forecasts(patient: _Patient, works: list[str], bar: Any) -> list[Forecast]:
    """The exact posterior and some ranks, the best first."""
    problem, device = patient.problem, patient.device
    regression = patient.settings.is_regression
    # The replacement of forward mode is for models that do not have it.
    modes = [m for m in works if m != "double_vjp" or "forward" not in works]

    def measured(name: str, model: nn.Module, inputs: Inputs, **kwargs: Any) -> Way:
        bar.set_description(f"timing {name}")

        def build(**more: Any) -> Any:
            return patient.build(model=model, feature_mode=name, **kwargs, **more)

        return measure_way(build, inputs, problem.n_outputs, name == "reverse")

    ways = []
    for mode in modes:
        ways.append(measured(mode, patient.model, patient.inputs, **patient.complement))
        bar.update()
    found = []
    for rank in (
        "exact",
        *(k for k in RANKS if k < problem.n_data * problem.n_outputs),
    ):
        bar.set_description(f"n_eigenvalues={rank}")
        memory = patient.build(
            n_eigenvalues=rank, memory_budget=patient.limit
        ).estimate_memory(patient.train)
        fits = memory.fits
        used = ways
        if rank == "exact" and fits and "reverse" in works:
            used = [_in_double(patient, measured) or ways[modes.index("reverse")]]
        times = (float("nan"), float("nan"))
        if fits:
            times = forecast(
                rank,
                used,
                problem,
                PAPER["subsample_size"],
                regression,
                device,
                patient.load_seconds,
            )
        size = memory.total if fits else memory.needed
        found.append(Forecast(rank, size, fits, *times))
        bar.update()
    return found


def _in_double(patient: _Patient, measured: Callable[..., Way]) -> Way | None:
    """The way of exact fits, which are in float64; None for models that are not."""
    try:
        model = copy.deepcopy(patient.model).double()
        inputs = patient.inputs.in_double()
        return measured("reverse", model, inputs, complement="prior")
    except Exception:  # a model may fail in any way; the fit stays in its precision
        return None


def _recommend(
    patient: _Patient, found: list[Forecast], time_budget: float
) -> list[str]:
    """Print the forecasts and what to choose; a problem if nothing fits."""
    within = "" if patient.limit is None else f"{human_bytes(patient.limit)} and "
    _say(
        "\nFit and prediction, forecast from measurements on a few inputs "
        f"({within}{human_seconds(time_budget)} may be used):\n"
        "  n_eigenvalues      memory         fit   1,000 predictions"
    )
    for f in found:
        name = f'"{f.n_eigenvalues}"' if f.n_eigenvalues == "exact" else f.n_eigenvalues
        times = "does not fit"
        if f.fits:
            many = human_seconds(1000 * f.predict_seconds)
            times = f"{human_seconds(f.fit_seconds):>10} {many:>19}"
        _say(f"  {name!s:<13} {human_bytes(f.memory):>11}  {times}")
    chosen = choose(found, time_budget)
    if chosen is None:
        return [
            "No posterior of this model fits into memory: freeze parameters, raise "
            "memory_budget, or use the last layer (subset_of_weights='last_layer')."
        ]
    _say(_advice(patient, chosen, time_budget))
    return []


def _advice(patient: _Patient, chosen: Forecast, time_budget: float) -> str:
    """What to choose, why, and the lines to write."""
    likelihood = patient.settings.likelihood
    rank = chosen.n_eigenvalues
    options = {"n_eigenvalues": rank}
    if rank == "exact":
        why = "all gradients fit, so nothing needs to be approximated"
    else:
        options |= patient.complement
        why = "the most directions that fit into memory and time"
    if chosen.longest > time_budget:
        why = (
            "the fastest of them, though it takes more than "
            f"{human_seconds(time_budget)}; fewer data, less of the network "
            "(parameter_names) or, for predictions, fewer outputs (top_outputs) take "
            "less"
        )
    layout = patient.settings.output_layout
    if layout is not OutputLayout.FLAT:
        options["output_layout"] = layout.value
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    tuning = (
        'la.optimize_prior_precision(method="marglik")'
        if patient.settings.is_regression
        else "la.optimize_calibration(val_loader)"
    )
    return (
        f"\nChoose n_eigenvalues={rank!r}: {why}.\n"
        f'  la = Laplace(model, "{likelihood}", "all", "nystrom", {text})\n'
        f"  la.fit(train_loader)  # about {human_seconds(chosen.fit_seconds)}\n"
        f"  {tuning}"
    )
