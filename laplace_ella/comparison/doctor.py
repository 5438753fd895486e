"""The check-up: versions, devices, and what works for a given model.

Nothing is tried that would not fit into the free memory.

Index legend: C outputs, P parameters, K rank, S positions.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella.comparison.compare import MEMORY_SHARE
from laplace_ella.comparison.evaluation import estimate_method
from laplace_ella.comparison.loaders import is_map_style, split, survey
from laplace_ella.comparison.memory import Problem, describe_problem
from laplace_ella.comparison.methods import Tuning, resolve_methods
from laplace_ella.comparison.settings import Settings, check_likelihood
from laplace_ella.support import batches, resources
from laplace_ella.support.checks import member
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.preserve import evaluation_mode, random_states
from laplace_ella.support.resources import human_bytes

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


def check_model(arguments: Mapping[str, Any]) -> list[str]:
    """Print which derivatives work and what each method would need.

    Parameters
    ----------
    arguments : mapping
        of `compare`: model, likelihood and train_loader, and optionally dict_key_x,
        dict_key_y and output_layout

    Returns
    -------
    list of str
        what is wrong
    """
    model, train = arguments["model"], arguments["train_loader"]
    settings = _settings(arguments)
    device = next(model.parameters()).device
    free = resources.available_memory(device)
    limit = None if free is None else int(MEMORY_SHARE * free)
    with evaluation_mode(model), random_states(device, train):
        batch = next(iter(train), None)
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
        one = _first_example(batch, settings)
        problems = _check_derivatives(model, one, settings, problem, limit)
        _print_memory(model, train, settings, problem, limit)
    return problems


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


def _first_example(batch: Any, settings: Settings) -> Any:
    """A batch of one."""
    x, y = batches.split_batch(batch, settings.dict_key_y)
    size = batches.batch_size(x, settings.dict_key_x)
    one = batches.take(x, slice(0, 1), size)
    return one if isinstance(batch, Mapping) else (one, y[:1])


def _check_derivatives(
    model: nn.Module, one: Any, settings: Settings, problem: Problem, limit: int | None
) -> list[str]:
    """Try each way of computing features on one example, if it fits into memory."""
    from laplace_ella import ELLALaplace, FeatureMode

    # A data set of one index, which stands for the example.
    index = TensorDataset(torch.zeros(1))
    loader = DataLoader(index, batch_size=1, collate_fn=lambda _: one)
    works, too_large = [], []
    print("Ways of computing features J(x)V:")
    for mode in FeatureMode:
        if mode is FeatureMode.AUTO:
            continue
        try:
            la = ELLALaplace(
                model,
                settings.likelihood,
                dict_key_x=settings.dict_key_x,
                dict_key_y=settings.dict_key_y,
                subsample_size=2,
                n_eigenvalues=2,
                chunk_size=1,
                feature_mode=mode,
                output_layout=settings.output_layout,
            )
            needed = la.estimate_memory(loader).needed
            if mode is FeatureMode.REVERSE:
                # all rows of the Jacobian of one example, (S·C, P), and a copy
                itemsize = max(problem.itemsize, torch.float32.itemsize)
                needed += 2 * problem.n_outputs * problem.n_params * itemsize
            if limit is not None and needed > limit:
                too_large.append(mode.value)
                text = (
                    f"not tried: needs {human_bytes(needed)} for one example, "
                    f"{human_bytes(limit)} may be used"
                )
            else:
                text = f"works, {1e3 * _seconds(la, loader, settings):.0f} ms"
                works.append(mode.value)
        except Exception as error:  # a model may fail in any way
            first = (str(error).splitlines() or [""])[0]
            text = f"fails: {type(error).__name__}: {first}"
        print(f"  {mode.value:<12} {text}")
    if works:
        return []
    if too_large:
        return [
            "No way to differentiate this model that fits into the free memory was "
            f"found; {', '.join(too_large)} would need more."
        ]
    return ["No way to differentiate this model was found."]


def _seconds(la: Any, loader: Any, settings: Settings) -> float:
    """Time for the features of one example, after a fit to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one example has few directions
        la.fit(loader)
    x, _ = batches.split_batch(next(iter(loader)), settings.dict_key_y)
    start = time.perf_counter()
    la.features(x)
    return time.perf_counter() - start


def _print_memory(
    model: nn.Module,
    train: Any,
    settings: Settings,
    problem: Problem,
    limit: int | None,
) -> None:
    print("\nEstimated memory, in the batches that would be used:")
    methods = resolve_methods(None, settings.likelihood)
    # Rows that differ in their tuning alone need the same.
    distinct = {(m.kind, repr(m.kwargs)): m for m in reversed(methods)}
    for method in reversed(distinct.values()):
        try:
            needs = estimate_method(method, model, settings, problem, train, limit)
        except Exception as error:  # a model may fail in any way
            first = (str(error).splitlines() or [""])[0]
            print(f"  {method.name:<18} fails: {type(error).__name__}: {first}")
            continue
        if needs.unsupported:
            text = needs.unsupported
        elif needs.batch is None:
            text = f"{human_bytes(needs.bytes)}: does not fit"
        else:
            text = f"{human_bytes(needs.bytes)}, batches of {needs.batch}"
        print(f"  {method.name:<18} {text}")
