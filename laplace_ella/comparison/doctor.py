"""Checks of the installation and of a model before a fit."""

from __future__ import annotations

import copy
import platform
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from laplace import Laplace
from torch import nn

from laplace_ella.comparison.methods import Method, check_task, default_methods, measure
from laplace_ella.derivatives.modes import ComputeOptions, FeatureMode
from laplace_ella.fitting.data import training_data
from laplace_ella.support.batches import batch_size, split_batch, take, to_device
from laplace_ella.support.memory import budget_of, free_bytes, human_bytes
from laplace_ella.support.preserve import seeded_iteration, undisturbed


def check_installation() -> list[str]:
    """Print versions and devices; return what is missing or broken."""
    problems = []
    print(f"Python {platform.python_version()} on {platform.platform()}")
    optional = {"matplotlib": "plots", "scikit-learn": "demo"}
    for name in ("torch", "laplace-torch", "torchmetrics", "jinja2", *optional):
        try:
            found = version(name)
        except PackageNotFoundError:
            found = f'missing: pip install "laplace-ella[{optional.get(name, "")}]"'
            problems += [] if name in optional else [f"{name} is not installed"]
        print(f"  {name:<16} {found}")
    for name in ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))):
        free = free_bytes(torch.device(name))
        print(f"  {name:<16} {'?' if free is None else human_bytes(free)} free")
    try:
        Laplace(nn.Linear(1, 1), "regression", "all", "nystrom")
    except Exception as error:  # a check-up reports anything
        problems.append(f'hessian_structure="nystrom" fails: {error}')
    return problems


def check_model(arguments: Mapping[str, Any], memory_budget: Any = None) -> list[str]:
    """Print which derivatives work for a model, and the memory of every method; return
    what is wrong. `arguments` are those of `compare`, of which the model, likelihood
    and train_loader must be there."""
    model, loader = arguments["model"], arguments["train_loader"]
    likelihood = check_task(model, arguments["likelihood"])
    device, works = next(model.parameters()).device, False
    budget = budget_of(device, memory_budget or arguments.get("memory_budget"))
    names = ("dict_key_x", "dict_key_y", "output_layout")
    options = {name: arguments[name] for name in names if name in arguments}
    key_x = options.get("dict_key_x", "input_ids")
    key_y = options.get("dict_key_y", "labels")

    def ella(mode: FeatureMode = FeatureMode.AUTO, **kwargs: Any) -> Any:
        compute = ComputeOptions(feature_mode=mode, memory_budget=budget)
        kwargs = {"hessian_structure": "nystrom", "compute": compute, **kwargs}
        return Laplace(model, likelihood, **kwargs, **options)

    def features(mode: FeatureMode) -> str:
        sizes = {"subsample_size": 2, "n_eigenvalues": 2}
        la = ella(mode, subset_of_weights="all", **sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one example has few directions
            la.fit([take(batch, slice(0, 1), n)])
            la.features(one)
        return "works"

    def memory(method: Method) -> str:
        if method.is_ella:
            needs = ella(**method.kwargs).estimate_memory(loader)
            text = human_bytes(needs.total if needs.fits else needs.needed)
            return text if needs.fits else f"{text}: does not fit"
        size, needed = method.memory(measured)
        fits = f", batches of {size}" if needed <= budget else ": does not fit"
        return human_bytes(needed) + fits

    def tried(name: str, check: Any, what: Any) -> bool:
        try:
            text, good = check(what), True
        except Exception as error:  # a model may fail in any way
            text, good = f"fails: {type(error).__name__}: {error}", False
        print(f"  {name:<18} {text.splitlines()[0]}")
        return good

    with undisturbed(model):
        n_data = training_data(loader, key_x, key_y).n_examples or 0
        batch = next(seeded_iteration(loader))
        x = to_device(split_batch(batch, key_y)[0], device)
        n = batch_size(x, key_x)
        one = take(x, slice(0, 1), n)
        measured = measure(copy.deepcopy(model), one, n_data, n)
        outputs = " × ".join(map(str, measured.output_shape))
        sizes = f"P = {measured.n_params:,}, C = {outputs}, N = {n_data:,}"
        print(f"\n{type(model).__name__}: {sizes}\nFeatures of one example:")
        for mode in list(FeatureMode)[1:]:  # the first one chooses between them
            works |= tried(mode.value, features, mode)
        print(f"Estimated memory (budget {human_bytes(budget)}):")
        for method in default_methods(likelihood, validation=False)[1:]:
            tried(method.name, memory, method)
    return [] if works else ["No way to differentiate this model was found."]
