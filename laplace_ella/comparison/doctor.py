"""Checks of the installation and of a model before a fit: sizes, derivatives, memory.

Index legend: N data, C outputs, P parameters, B batch.
"""

from __future__ import annotations

import copy
import math
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from laplace import Laplace
from torch import nn

from laplace_ella.comparison.methods import Method, default_methods
from laplace_ella.derivatives.modes import ComputeOptions, FeatureMode
from laplace_ella.fitting.data import training_data
from laplace_ella.support.batches import batch_size, split_batch, take, to_device
from laplace_ella.support.memory import budget_of, free_bytes, human_bytes
from laplace_ella.support.preserve import seeded_iteration, undisturbed

#: Bytes of a batch's temporary numbers from which it is split, to be faster.
FAST = 5 * 10**7


def check_task(model: Any, likelihood: Any) -> str:
    """Return the likelihood's name; refuse what cannot be compared."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"The model ({type(model).__name__}) has no trainable parameters, so there "
            "is nothing to be uncertain about. Set requires_grad of some."
        )
    name = str(getattr(likelihood, "value", likelihood))
    if name not in ("classification", "regression"):
        raise ValueError(
            "likelihood must be 'classification' or 'regression' in a comparison, got "
            f"{name!r}."
        )
    return name


# Sizes and memory


@dataclass(frozen=True)
class Sizes:
    """The sizes on which the memory of a method depends: N, B of the training loader,
    the output's shape for one example, P of the network and of its last layer, outputs
    of all its modules for one example, numbers in the Kronecker factors of each layer,
    and bytes of a number."""

    n_data: int
    batch: int
    output_shape: tuple[int, ...]
    n_params: int
    last_params: int
    n_activations: int
    factors: tuple[int, ...]
    itemsize: int


def plain_layers(model: nn.Module) -> list[Any]:
    """Return the layers that every structure and backend supports."""
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


@torch.no_grad()
def measure(model: nn.Module, x: Any, n_data: int, dict_key_x: str) -> Sizes:
    """Return the sizes of a copy of the model, by a forward pass over one example."""
    batch, counts = batch_size(x, dict_key_x), []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and not len(list(module.children())):
            counts.append(output.numel())

    for module in model.modules():
        module.register_forward_hook(record)
    output = model(take(x, slice(0, 1), batch))
    parameters = [p for p in model.parameters() if p.requires_grad]
    layers, factors = plain_layers(model), []
    for layer in layers:
        factors.append(sum(n**2 for n in layer.weight.flatten(1).shape))
    last = list(layers[-1].parameters()) if layers else parameters
    n_params, last_params = (sum(p.numel() for p in ps) for ps in (parameters, last))
    sizes = (n_data, batch, tuple(output.shape[1:]), n_params, last_params, sum(counts))
    return Sizes(*sizes, tuple(factors), parameters[0].element_size())


def batch_within(method: Method, sizes: Sizes, limit: int) -> tuple[int, int]:
    """Return how many examples to take at once, and the bytes of that; 0 examples
    where not even one is within the limit.

    laplace-torch propagates each of B·C outputs through the whole batch, which takes
    about 2·B²·C numbers per activation beside the B·C·P of the Jacobian; peaks that
    were measured are .7 to 1 of the estimate. ELLA splits its batches itself.
    """
    if method.kind != "laplace" or method.is_ella:
        return sizes.batch, 0
    (subset, structure), C = method.structure, math.prod(sizes.output_shape)
    last = subset == "last_layer"
    P = sizes.last_params if last else sizes.n_params
    kept = 3 * P
    if structure == "full":
        kept = 4 * P**2  # sum, batch, identity and factor
    elif structure == "kron":
        kept = 3 * sum(sizes.factors[-1:] if last else sizes.factors)
    elif structure == "gp":
        names = ("subsample_size", "n_subset")
        rows, pairs = (min(method.kwargs.get(n, 0), sizes.n_data) for n in names)
        kept = 3 * (P * rows + (C * pairs) ** 2)
    batch = sizes.batch
    while True:
        passing = 2 * batch * C * (P + (0 if last else batch * sizes.n_activations))
        needed = (kept + passing) * sizes.itemsize
        if needed <= limit and (passing * sizes.itemsize <= FAST or batch == 1):
            return batch, needed
        if batch == 1:
            return 0, needed
        batch = math.ceil(batch / 2)


# The check-up


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


def check_model(arguments: Mapping[str, Any], memory_budget: Any = None) -> list[str]:
    """Print which derivatives work for a model, and the memory of every method; return
    what is wrong. `arguments` are those of `compare`, of which the model, likelihood
    and train_loader must be there."""
    model, loader = arguments["model"], arguments["train_loader"]
    likelihood = check_task(model, arguments["likelihood"])
    device, works = next(model.parameters()).device, False
    budget = budget_of(device, memory_budget or arguments.get("memory_budget"))
    compute = ComputeOptions(memory_budget=budget)
    names = ("dict_key_x", "dict_key_y", "output_layout")
    options = {name: arguments[name] for name in names if name in arguments}
    keys = {"dict_key_x": "input_ids", "dict_key_y": "labels", **options}
    keys = keys["dict_key_x"], keys["dict_key_y"]

    def tried(name: str, check: Any) -> bool:
        try:
            text, good = check(), True
        except Exception as error:  # a model may fail in any way
            text, good = f"fails: {type(error).__name__}: {error}", False
        print(f"  {name:<18} {text.splitlines()[0]}")
        return good

    def ella(**kwargs: Any) -> Any:
        kwargs = {"hessian_structure": "nystrom", "compute": compute, **kwargs}
        return Laplace(model, likelihood, **kwargs, **options)

    def features(mode: FeatureMode) -> str:
        way = ComputeOptions(feature_mode=mode, memory_budget=budget)
        sizes = {"subsample_size": 2, "n_eigenvalues": 2}
        la = ella(subset_of_weights="all", compute=way, **sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one example has few directions
            la.fit([take(batch, slice(0, 1), measured.batch)])
            la.features(take(x, slice(0, 1), measured.batch))
        return "works"

    def memory(method: Method) -> str:
        if method.is_ella:
            needs = ella(**method.kwargs).estimate_memory(loader)
            text = human_bytes(needs.total if needs.fits else needs.needed)
            return text if needs.fits else f"{text}: does not fit"
        size, needed = batch_within(method, measured, budget)
        fits = f", batches of {size}" if size else ": does not fit"
        return human_bytes(needed) + fits

    with undisturbed(model):
        n_data = training_data(loader, *keys).n_examples or 0
        batch = next(seeded_iteration(loader))
        x = to_device(split_batch(batch, keys[1])[0], device)
        measured = measure(copy.deepcopy(model), x, n_data, keys[0])
        outputs = " × ".join(map(str, measured.output_shape))
        sizes = f"P = {measured.n_params:,}, C = {outputs}, N = {n_data:,}"
        print(f"\n{type(model).__name__}: {sizes}\nFeatures of one example:")
        for mode in list(FeatureMode)[1:]:  # the first one chooses between them
            works |= tried(mode.value, lambda mode=mode: features(mode))
        print(f"Estimated memory (budget {human_bytes(budget)}):")
        for method in default_methods(likelihood, validation=False)[1:]:
            tried(method.name, lambda method=method: memory(method))
    return [] if works else ["No way to differentiate this model was found."]
