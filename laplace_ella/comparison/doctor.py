"""The check-up: the installation, which derivatives work for a model, what fits."""

from __future__ import annotations

import copy
import importlib.metadata
import platform
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from laplace import Laplace
from torch import nn

from laplace_ella.comparison.compare import check_likelihood, check_network
from laplace_ella.comparison.estimates import batch_within, measure
from laplace_ella.comparison.methods import Kind, default_methods
from laplace_ella.comparison.run import describe_error, reproducible, split
from laplace_ella.derivatives.modes import ComputeOptions, FeatureMode
from laplace_ella.fitting.data import training_data
from laplace_ella.support.batches import take, to_device
from laplace_ella.support.memory import budget_of, free_bytes, human_bytes
from laplace_ella.support.preserve import seeded_iteration, undisturbed

__all__ = ["check_installation", "check_model"]

PACKAGES = {
    "torch": "required",
    "laplace-torch": "required",
    "torchmetrics": "required",
    "jinja2": "required",
    "matplotlib": 'figures: pip install "laplace-ella[plots]"',
    "scikit-learn": 'demo: pip install "laplace-ella[demo]"',
}


def check_installation() -> list[str]:
    """Print versions and devices; return what is missing or broken."""
    problems = []
    print(f"Python {platform.python_version()} on {platform.platform()}")
    for name, role in PACKAGES.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = f"not installed ({role})"
            if role == "required":
                problems.append(f"{name} is not installed: pip install {name}")
        print(f"  {name:<16} {found}")
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        free = free_bytes(device)
        print(f"  {device!s:<16} {'?' if free is None else human_bytes(free)} free")
    try:
        Laplace(nn.Linear(1, 1), "regression", "all", "nystrom")
    except Exception as error:  # a check-up reports anything
        problems.append(f'hessian_structure="nystrom" fails: {error}')
    return problems


def check_model(
    arguments: Mapping[str, Any], memory_budget: int | float | str | None = None
) -> list[str]:
    """Print which derivatives work for a model, and the memory of every method.

    Parameters
    ----------
    arguments : mapping
        of `compare`: model, likelihood and train_loader, and optionally dict_key_x,
        dict_key_y, output_layout and memory_budget; others are not looked at
    memory_budget : int or str, optional
        bytes, or a text like "8 GB"; by default a share of what is free

    Returns
    -------
    list of str
        what is wrong
    """
    model, loader = arguments["model"], arguments["train_loader"]
    likelihood = check_likelihood(arguments["likelihood"])
    check_network(model)
    device = next(model.parameters()).device
    budget = budget_of(device, memory_budget or arguments.get("memory_budget"))
    names = ("dict_key_x", "dict_key_y", "output_layout")
    options = {name: arguments[name] for name in names if name in arguments}
    key_x = options.get("dict_key_x", "input_ids")
    key_y = options.get("dict_key_y", "labels")
    works = []
    with undisturbed(model), reproducible(0, device, loader):
        n_data = training_data(loader, key_x, key_y).n_examples or 0
        batch = next(seeded_iteration(loader))
        x = to_device(split(batch, key_y)[0], device)
        sizes = measure(copy.deepcopy(model), x, n_data, key_x)
        outputs = " × ".join(map(str, sizes.output_shape))
        print(
            f"\n{type(model).__name__}: P = {sizes.n_params:,} trainable parameters, "
            f"C = {outputs} outputs, N = {n_data:,} examples\n\nWays of computing "
            "features, tried on one example:"
        )
        one: Any = [take(batch, slice(0, 1), sizes.batch)]
        for mode in list(FeatureMode)[1:]:  # all but the choice between them
            compute = ComputeOptions(feature_mode=mode, memory_budget=budget)
            ella = {"subsample_size": 2, "n_eigenvalues": 2, "compute": compute}
            try:
                la: Any = Laplace(
                    model, likelihood, "all", "nystrom", **ella, **options
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # one example has few directions
                    la.fit(one)
                    la.features(take(x, slice(0, 1), sizes.batch))
                works.append(mode)
                text = "works"
            except Exception as error:  # a model may fail in any way
                text = describe_error(error)
            print(f"  {mode.value:<18} {text}")
        print(f"\nEstimated memory (budget {human_bytes(budget)}):")
        for method in default_methods(likelihood, validation=False):
            if method.kind is not Kind.LAPLACE:
                continue
            try:
                if method.is_ella:
                    compute = ComputeOptions(memory_budget=budget)
                    kwargs = {**method.kwargs, **options, "compute": compute}
                    la = Laplace(model, likelihood, **kwargs)
                    needs = la.estimate_memory(loader)
                    text = human_bytes(needs.total if needs.fits else needs.needed)
                    text += "" if needs.fits else ": does not fit"
                else:
                    size, needed = batch_within(method, sizes, budget)
                    text = human_bytes(needed)
                    text += f", batches of {size}" if size else ": does not fit"
            except Exception as error:
                text = describe_error(error)
            print(f"  {method.name:<18} {text}")
    if works:
        return []
    return ["No way to differentiate this model was found; see the table above."]
