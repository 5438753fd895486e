"""The memory of laplace-torch's methods, estimated before they are tried.

Index legend: N data, C outputs, P parameters, B batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from laplace_ella.comparison.methods import Kind, Method
from laplace_ella.support.batches import batch_size, take

__all__ = ["Sizes", "batch_within", "kfac_layers", "measure"]

#: Bytes of a batch's temporary memory from which it is split: cost grows like B².
FAST = 5 * 10**7


@dataclass(frozen=True)
class Sizes:
    """The sizes on which the memory of a method depends.

    Attributes
    ----------
    n_data, batch : int
        N, and B of the training loader
    output_shape : tuple of int
        of one example, `(C,)` for most models
    n_params, last_params : int
        P, and that of the last layer
    n_activations : int
        outputs of all leaf modules for one example
    kron, last_kron : int
        entries of the Kronecker factors
    itemsize : int
        bytes of a parameter's number
    """

    n_data: int
    batch: int
    output_shape: tuple[int, ...]
    n_params: int
    last_params: int
    n_activations: int
    kron: int
    last_kron: int
    itemsize: int


def kfac_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters every structure and backend supports."""
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


@torch.no_grad()
def measure(model: nn.Module, x: Any, n_data: int, dict_key_x: str) -> Sizes:
    """Return the sizes of a model, by one forward pass over one example of `x`.

    Hooks are put on the model, which should be a copy of the user's.
    """
    batch, outputs = batch_size(x, dict_key_x), []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        outputs.append(output.numel() if isinstance(output, torch.Tensor) else 0)

    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(record)
    found = model(take(x, slice(0, 1), batch))
    factors, layers = [], kfac_layers(model)
    for layer in layers:
        weight: Any = layer.weight
        factors.append(weight.shape[0] ** 2 + weight[0].numel() ** 2)
    parameters = [p for p in model.parameters() if p.requires_grad]
    last = layers[-1].parameters() if layers else parameters
    return Sizes(
        n_data=n_data,
        batch=batch,
        output_shape=tuple(found.shape[1:]),
        n_params=sum(p.numel() for p in parameters),
        last_params=sum(p.numel() for p in last),
        n_activations=sum(outputs),
        kron=sum(factors),
        last_kron=factors[-1] if factors else 0,
        itemsize=parameters[0].element_size(),
    )


def batch_within(method: Method, sizes: Sizes, limit: int | None) -> tuple[int, int]:
    """Return how many examples of a batch to take at once, and the bytes of that.

    None at all, 0, where not even one is within the limit. Structures over all layers
    take Jacobians of B·C outputs, each of which laplace-torch propagates through the
    whole batch: about 2·B²·C numbers per activation, beside the B·C·P of the Jacobian.
    Peaks that were measured are .7 to 1 of this estimate. ELLA splits its batches
    itself, and has an estimate of its own.
    """
    if method.kind is not Kind.LAPLACE or method.is_ella:
        return sizes.batch, 0
    fixed, batch = _posterior(method, sizes), sizes.batch
    while True:
        passing = _passing(method, sizes, batch) * sizes.itemsize
        needed = fixed * sizes.itemsize + passing
        fits = limit is None or needed <= limit
        if fits and (passing <= FAST or batch == 1):
            return batch, needed
        if batch == 1:
            return 0, needed
        batch = math.ceil(batch / 2)


def _posterior(method: Method, sizes: Sizes) -> int:
    """Return the numbers that do not depend on the batch, with laplace-torch's copies
    of them."""
    subset, structure = method.structure
    last = subset == "last_layer"
    P = sizes.last_params if last else sizes.n_params
    if structure == "full":
        return 4 * P**2  # sum, batch, identity and factor
    if structure == "kron":
        return 3 * (sizes.last_kron if last else sizes.kron)
    if structure != "gp":
        return 3 * P
    C = math.prod(sizes.output_shape)
    subset_size, inducing = (
        min(int(method.kwargs.get(name) or 0), sizes.n_data)
        for name in ("n_subset", "num_inducing")
    )
    rows = min(int(method.kwargs.get("subsample_size") or 0), sizes.n_data)
    return 3 * (subset_size * C) ** 2 + 2 * P * inducing * C + 3 * P * rows


def _passing(method: Method, sizes: Sizes, batch: int) -> int:
    """Return the numbers that B examples need besides."""
    C = math.prod(sizes.output_shape)
    if method.structure[0] == "last_layer":
        return 2 * batch * C * sizes.last_params
    propagated = 2 * batch**2 * C * sizes.n_activations
    return propagated + 2 * batch * C * sizes.n_params
