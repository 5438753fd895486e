"""The methods that can be compared: named keyword arguments of `Laplace(...)`.

Index legend: N data, C outputs, P parameters, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from laplace_ella.settings import PAPER

#: How hyperparameters are chosen: on the training data, then on validation data.
ON_TRAINING = ("default", "marglik", "none")
ON_VALIDATION = ("gridsearch", "early_stopping", "calibration")

#: Bytes of a batch's temporary numbers from which it is split, to be faster.
FAST = 5 * 10**7


#: The layers that every structure and backend supports.
PLAIN = (nn.Linear, nn.Conv2d)


@dataclass(frozen=True)
class Sizes:
    """The sizes on which the memory of a method depends: N, B of the training loader,
    the output's shape for one example, P, outputs of all modules for one example,
    shapes of the weights of `PLAIN` layers as matrices, and bytes of a number."""

    n_data: int
    batch: int
    output_shape: tuple[int, ...]
    n_params: int
    n_activations: int
    layers: tuple[tuple[int, ...], ...]
    itemsize: int


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
    if name not in (known := ("classification", "regression")):
        raise ValueError(f"likelihood must be one of {known} here, got {name!r}.")
    return name


@torch.no_grad()
def measure(model: nn.Module, one: Any, n_data: int, batch: int) -> Sizes:
    """Return the sizes of a copy of the model, by a forward pass over one example."""
    counts, layers = [], []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        counts.append(output.numel() if isinstance(output, torch.Tensor) else 0)

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(record)
        if isinstance(module, PLAIN):
            layers.append(tuple(module.weight.flatten(1).shape))
    shape = tuple(model(one).shape[1:])
    parameters = [p for p in model.parameters() if p.requires_grad]
    n_params, itemsize = sum(map(torch.numel, parameters)), parameters[0].element_size()
    return Sizes(n_data, batch, shape, n_params, sum(counts), tuple(layers), itemsize)


@dataclass(frozen=True)
class Method:
    """One row of the comparison; name and description make no difference to it.

    Parameters
    ----------
    name : str
    kwargs : mapping
        keyword arguments of `Laplace(model, likelihood, ...)`
    kind : {'laplace', 'map', 'temperature'}
        a posterior, the network as it is, or temperature scaling
    tune : str
        how its hyperparameters are chosen. Without validation data: 'default', which is
        `optimize_prior_precision()` as the class has it, and for regression the prior
        and noise of the highest evidence; 'marglik', by the evidence in any case;
        'none', they stay as given. By the validation NLL: 'gridsearch', the prior
        precision; 'calibration', this, the temperature and the softmax temperature (for
        regression the noise); of ELLA also 'early_stopping' (Deng et al. 2022, Sec.
        5.2)
    about : str
        one line for the list of methods

    Examples
    --------
    >>> kwargs = {"hessian_structure": "kron", "subset_of_weights": "all"}
    >>> Method("KFAC, prior 5", {**kwargs, "prior_precision": 5.0}, tune="none").name
    'KFAC, prior 5'
    """

    name: str = field(compare=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "laplace"
    tune: str = "default"
    about: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        kinds = ("laplace", "map", "temperature")
        allowed = {"kind": kinds, "tune": (*ON_TRAINING, *ON_VALIDATION)}
        for name, valid in allowed.items():
            if (got := getattr(self, name)) not in valid:
                raise ValueError(f"{name} must be one of {valid}, got {got!r}.")

    @property
    def needs_validation(self) -> bool:
        """Whether it is tuned on validation data, for one link."""
        return self.kind == "temperature" or self.tune in ON_VALIDATION

    @property
    def structure(self) -> tuple[str, str]:
        """(subset_of_weights, hessian_structure), with the defaults of `Laplace`."""
        subset = self.kwargs.get("subset_of_weights", "last_layer")
        structure = self.kwargs.get("hessian_structure", "kron")
        return getattr(subset, "value", subset), getattr(structure, "value", structure)

    @property
    def is_ella(self) -> bool:
        """Whether this package does the work."""
        return self.kind == "laplace" and self.structure[1] == "nystrom"

    def memory(self, sizes: Sizes) -> tuple[int, int]:
        """Return how many examples to take at once, and the bytes that are needed.

        laplace-torch propagates each of B·C outputs through the whole batch, which
        takes about 2·B²·C numbers per activation beside the B·C·P of the Jacobian;
        measured peaks are .7 to 1 of it. ELLA splits its batches itself.
        """
        batch, P, layers = sizes.batch, sizes.n_params, sizes.layers
        if self.kind != "laplace" or self.is_ella:
            return batch, 0
        (subset, structure), C = self.structure, math.prod(sizes.output_shape)
        n_activations = sizes.n_activations
        if subset == "last_layer":
            layers, n_activations = layers[-1:], 0
            P = sum(rows * (columns + 1) for rows, columns in layers) or P
        kept = 3 * P
        if structure == "full":
            kept = 4 * P**2  # sum, batch, identity and factor
        elif structure == "kron":
            kept = 3 * sum(rows**2 + columns**2 for rows, columns in layers)
        elif structure == "gp":
            names = ("subsample_size", "n_subset")
            rows, pairs = (min(self.kwargs.get(n, 0), sizes.n_data) for n in names)
            kept = 3 * (P * rows + (C * pairs) ** 2)
        while True:
            passing = 2 * batch * C * (P + batch * n_activations)
            if batch == 1 or passing * sizes.itemsize <= FAST:
                return batch, (kept + passing) * sizes.itemsize
            batch = math.ceil(batch / 2)


def _laplace(name: str, structure: str, about: str, tune: str = "default", **more: Any):
    """Return a posterior of a `subset_of_weights hessian_structure`."""
    subset, _, hessian = structure.partition(" ")
    kwargs = {"subset_of_weights": subset, "hessian_structure": hessian, **more}
    return Method(name, kwargs, tune=tune, about=about)


_GP = {"functional_approximation": "nystrom", "subsample_size": 2000}
_LARGE = {"subsample_size": 2000, "n_eigenvalues": 128, "complement": "prior"}

#: Tuned without validation data (but for "gp-ella"), in the order of the table.
_ON_TRAINING = (
    Method("map", kind="map", about="the network as trained"),
    _laplace("exact", "all nystrom", "exact, by all gradients", n_eigenvalues="exact"),
    _laplace("ella", "all nystrom", "ELLA, K = 20 directions", n_eigenvalues=20),
    _laplace("full", "all full", "exact, by a P×P matrix"),
    _laplace("kron", "all kron", "KFAC, all layers"),
    _laplace("diag", "all diag", "diagonal, all layers"),
    _laplace("last-layer-full", "last_layer full", "full, last layer"),
    _laplace("last-layer-kron", "last_layer kron", "KFAC, last layer"),
    _laplace("last-layer-diag", "last_layer diag", "diagonal, last layer"),
    _laplace("gp-ella", "all gp", "laplace-torch's own ELLA; prior as given without "
             "validation data", "gridsearch", n_eigenvalues=20, **_GP),
)  # fmt: skip

#: Tuned on validation data.
_ON_VALIDATION = (
    Method("temperature", kind="temperature", about="temperature scaling"),
    _laplace("ella-paper", "all nystrom", "ELLA as in the paper: given prior, early "
             "stopping", "early_stopping", **PAPER),
    _laplace("ella-calibrated", "all nystrom", "ELLA, K = 128 and the prior outside of "
             "the basis; calibrated", "calibration", **_LARGE),
    *(
        replace(m, name=f"{m.name}-calibrated", tune="calibration",
                about=f"{m.about}; calibrated")
        for m in _ON_TRAINING
        if m.name in ("exact", "kron", "diag", "last-layer-full", "last-layer-kron")
    ),
)  # fmt: skip


def available_methods() -> dict[str, Method]:
    """Return every method that `compare` knows, by name.

    Examples
    --------
    >>> {"ella-calibrated", "kron", "last-layer-full"} <= set(available_methods())
    True
    """
    return {method.name: method for method in (*_ON_TRAINING, *_ON_VALIDATION)}


def default_methods(likelihood: str, validation: bool = True) -> list[Method]:
    """Return what `compare` runs if `methods` is not given.

    All that it knows: those that are tuned on `validation` data if there are any, and
    temperature scaling for classifiers alone.

    Examples
    --------
    >>> "temperature" in [method.name for method in default_methods("regression")]
    False
    """
    rows = [*_ON_TRAINING, *(_ON_VALIDATION if validation else ())]
    left_out = "temperature" if likelihood == "regression" else None
    return [method for method in rows if method.kind != left_out]


def resolve_methods(methods: Any, likelihood: str, validation: bool) -> list[Method]:
    """Return methods of names, `Method` objects or a mapping of name to arguments.

    Without validation data a prior that would be searched on them stays as given.
    """
    if methods is None:
        methods = default_methods(likelihood, validation)
    if isinstance(methods, (str, Method)):
        methods = [methods]
    known, resolved = available_methods(), {}
    for given in methods:
        method = methods[given] if isinstance(methods, Mapping) else given
        if isinstance(method, str):
            method = known.get(method, method)
        if isinstance(method, Mapping):
            method = Method(given, dict(method))
        if not isinstance(method, Method):
            raise ValueError(
                f"Unknown method {method!r}. Known: {', '.join(known)}. For your own, "
                "pass Method(name, kwargs) or {name: kwargs of Laplace(...)}."
            )
        name = given if isinstance(methods, Mapping) else method.name
        if name in resolved:
            raise ValueError(f"Methods must have different names, got {name!r} twice.")
        if method.tune == "gridsearch" and not validation:
            method = replace(method, tune="none")
        resolved[name] = replace(method, name=name)
    if not resolved:
        raise ValueError("Pass at least one method, or None for the default ones.")
    return list(resolved.values())
