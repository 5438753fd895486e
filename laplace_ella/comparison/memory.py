"""Memory of the methods of a comparison, estimated before the attempt.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from laplace_ella.comparison.method import Kind, Method
from laplace_ella.derivatives.sizes import Activations, PassSizes, activation_bytes
from laplace_ella.ella import ELLALaplace
from laplace_ella.fitting import memory
from laplace_ella.fitting.fit import AUTO_MAX_RANK
from laplace_ella.support import batches

__all__ = [
    "Estimate",
    "Problem",
    "describe_problem",
    "estimate",
    "nystrom_memory",
    "preferred_batch",
    "stored_floats",
]


#: Activations of a model that was never run.
NOT_COUNTED = Activations(0, 0)


@dataclass(frozen=True)
class Problem:
    """The sizes on which cost and support of a method depend.

    `n_activations` counts the outputs of all leaf modules for one example;
    `kron_floats` the Kronecker factors of all layers; `kron_unsupported` the types of
    layers with parameters that KFAC (curvlinops) has no rule for; `activations` what
    the operators of a forward pass of one example return, on a `device` of that type.
    """

    n_data: int
    n_outputs: int
    n_params: int
    n_params_last: int
    n_activations: int
    batch: int
    itemsize: int
    kron_floats: int
    kron_floats_last: int
    kron_unsupported: tuple[str, ...] = ()
    activations: Activations = NOT_COUNTED
    device: str = "cpu"


@dataclass(frozen=True)
class Estimate:
    """What a method needs, before it is tried.

    Attributes
    ----------
    bytes : int
        in batches of `batch`
    batch : int or None
        the largest batch that stays inside the limit; None if not even one example
    unsupported : str or None
        why the method cannot run at all
    budget : int or None
        the `memory_budget` that the fit has to keep for the estimate to hold
    """

    bytes: int
    batch: int | None
    unsupported: str | None = None
    budget: int | None = None


@torch.no_grad()
def describe_problem(
    model: nn.Module, x: Any, n_data: int, dict_key_x: str = "input_ids"
) -> Problem:
    """Sizes of a model in eval mode, from one forward pass over one example of `x`."""
    batch = batches.batch_size(x, dict_key_x)
    one = batches.take(x, slice(0, 1), batch)
    activations: list[int] = []
    executed: list[nn.Module] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            activations.append(output.numel())
        executed.append(module)

    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    hooks = [leaf.register_forward_hook(record) for leaf in leaves]
    try:
        out, allocated = activation_bytes(model, one)
    finally:
        for hook in hooks:
            hook.remove()

    with_parameters = [m for m in executed if any(p.requires_grad for p in _own(m))]
    last = with_parameters[-1] if with_parameters else None
    trainable = [p for p in model.parameters() if p.requires_grad]
    owners = [
        m for m in model.modules() if any(p.requires_grad for p in _own(m))
    ]  # parameters may also belong to inner modules (class tokens)
    return Problem(
        n_data=n_data,
        n_outputs=math.prod(out.shape[1:]),
        n_params=sum(p.numel() for p in trainable),
        n_params_last=sum(p.numel() for p in _own(last)) if last is not None else 0,
        n_activations=sum(activations),
        batch=batch,
        itemsize=next(model.parameters()).element_size(),
        kron_floats=sum(_kron_floats(m) for m in owners),
        kron_floats_last=_kron_floats(last) if last is not None else 0,
        kron_unsupported=tuple(
            sorted(
                {
                    type(m).__name__
                    for m in owners
                    if not isinstance(m, (nn.Linear, nn.Conv2d))
                }
            )
        ),
        activations=allocated,
        device=out.device.type,
    )


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _kron_floats(module: nn.Module) -> int:
    """Entries of the two Kronecker factors of a linear or convolutional layer."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim < 2:
        return 0
    n_out, n_in = weight.shape[0], weight[0].numel()
    return n_out**2 + n_in**2


def estimate(method: Method, problem: Problem, limit: int | None) -> Estimate:
    """Memory of `method`, and the batch size with which it stays below `limit` bytes.

    The posterior counts with the copies that laplace-torch makes of it. Methods that
    take Jacobians of all layers with `torch.func.jacrev` over a whole batch need
    besides the B·C·P Jacobian about 2·B²·C floats for every activation of the network,
    since each of the B·C outputs is propagated through the whole batch and kept.
    Measured peaks are within 0.7–1.0 of this estimate. ELLA splits its batches itself
    and has an estimate of its own, see `nystrom_memory`.
    """
    unsupported = _unsupported(method, problem)
    if unsupported or method.kind is not Kind.LAPLACE:
        return Estimate(0, problem.batch, unsupported)
    if method.structure[1] == "nystrom":
        return _estimate_nystrom(method, problem, limit)
    fixed = _posterior_floats(method, problem) * problem.itemsize
    batch = problem.batch
    while True:
        needed = fixed + _batch_floats(method, problem, batch) * problem.itemsize
        if limit is None or needed <= limit:
            return Estimate(needed, batch)
        if batch == 1:
            return Estimate(needed, None)
        batch = math.ceil(batch / 2)


def nystrom_memory(
    method: Method, problem: Problem, limit: int | None
) -> memory.MemoryEstimate:
    """What `ELLALaplace.estimate_memory` says of a method with `memory_budget=limit`.

    As far as sizes tell: named `params` and samplers of a part of the data are not
    known here. A limit of
    None stands for memory without end.
    """
    asked = _ella_arguments(method)
    last = method.structure[0] == "last_layer"
    P = problem.n_params_last if last else problem.n_params
    M = min(asked["subsample_size"], problem.n_data * problem.n_outputs)
    K = asked["n_eigenvalues"]
    K = min(AUTO_MAX_RANK if K == "auto" else K, M)
    itemsize = max(torch.float32.itemsize, problem.itemsize)  # as `rows.row_dtype`
    budget = asked["memory_budget"]
    dtype = asked["basis_dtype"]
    sizes = PassSizes(
        P, itemsize, problem.activations, problem.device, asked["chunk_size"]
    )
    return memory.estimate(
        P,
        M,
        K,
        itemsize,
        sizes.pass_bytes(K) if _basis_is_beside(method, problem) else 0,
        memory.parse_bytes(budget) if budget is not None else _or_endless(limit),
        None if dtype is None else dtype.itemsize,
    )


def _estimate_nystrom(method: Method, problem: Problem, limit: int | None) -> Estimate:
    # The limit is that of the model's device and says nothing about another one.
    beside = _basis_is_beside(method, problem)
    needs = nystrom_memory(method, problem, limit if beside else None)
    if not beside:
        return Estimate(needs.total, problem.batch)
    if _ella_arguments(method)["memory_budget"] is not None:  # the user's holds
        fits = needs.fits and needs.total <= _or_endless(limit)
        return Estimate(needs.total, problem.batch if fits else None)
    if not needs.fits:
        return Estimate(needs.needed, None)
    return Estimate(needs.total, problem.batch, budget=limit)


def _ella_arguments(method: Method) -> dict[str, Any]:
    """Arguments of ELLA that cost memory, with its defaults."""
    defaults = inspect.signature(ELLALaplace.__init__).parameters
    names = (
        "subsample_size",
        "n_eigenvalues",
        "memory_budget",
        "basis_dtype",
        "basis_device",
        "chunk_size",
    )
    return {name: method.kwargs.get(name, defaults[name].default) for name in names}


def _basis_is_beside(method: Method, problem: Problem) -> bool:
    """Whether the directions stay where the model is."""
    device = _ella_arguments(method)["basis_device"]
    return device is None or torch.device(device).type == problem.device


def _or_endless(limit: int | None) -> int:
    return 2**62 if limit is None else limit


def preferred_batch(method: Method, problem: Problem, target: int) -> int:
    """Batch size at which the temporary memory stays below `target` bytes.

    Whole-batch Jacobians cost time in proportion to B² too, so smaller batches make
    these methods faster. The predictions do not change.
    """
    batch = problem.batch
    while (
        batch > 1 and _batch_floats(method, problem, batch) * problem.itemsize > target
    ):
        batch = math.ceil(batch / 2)
    return batch


def _unsupported(method: Method, problem: Problem) -> str | None:
    subset, structure = method.structure
    if method.kind is not Kind.LAPLACE:
        return None
    if method.functional not in (None, "sod") and not _has_functional_methods():
        return "not available in laplace-torch 0.2"
    own_backend = "backend" in method.kwargs
    if (subset, structure) == ("all", "kron") and not own_backend:
        if problem.kron_unsupported:
            return f"not supported: {', '.join(problem.kron_unsupported)} (KFAC)"
    return None


def _has_functional_methods() -> bool:
    from laplace.utils import enums

    return hasattr(enums, "FunctionalApproximation")


def _posterior_floats(method: Method, problem: Problem) -> int:
    """Floats that do not depend on the batch."""
    subset, structure = method.structure
    last = subset == "last_layer"
    P = problem.n_params_last if last else problem.n_params
    if structure == "full":
        return 4 * P**2  # sum, batch, identity and factor
    if structure == "kron":
        return 3 * (problem.kron_floats_last if last else problem.kron_floats)
    if method.functional == "sod":
        M = min(int(method.kwargs.get("n_subset", 0)), problem.n_data)
        return 3 * (M * problem.n_outputs) ** 2
    if method.functional == "nystrom":
        M = min(int(method.kwargs.get("subsample_size", 0)), problem.n_data)
        return P * (2 * M + int(method.kwargs.get("n_eigenvalues", 0)))
    if method.functional == "variational":
        return 2 * P * int(method.kwargs.get("num_inducing") or 1) * problem.n_outputs
    return 3 * P


def _batch_floats(method: Method, problem: Problem, batch: int) -> int:
    """Floats that a batch of `batch` examples needs besides."""
    if method.structure[1] == "nystrom":
        return 0  # splits its batches itself
    C = problem.n_outputs
    if method.structure[0] == "last_layer":
        return 2 * batch * C * problem.n_params_last
    propagated = 2 * batch**2 * C * problem.n_activations
    return propagated + 2 * batch * C * problem.n_params


#: Attributes that hold the posterior in the classes of laplace-torch and this package.
_STATE = (
    "H",
    "basis",
    "dual_directions",
    "feature_gram",
    "K_MM",
    "Sigma_inv",
    "inducing_locations",
    "L",
)


def stored_floats(la: Any) -> int:
    """Numbers that a fitted posterior keeps besides the weights of the network."""
    return sum(_count(getattr(la, name, None)) for name in _STATE)


def _count(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(_count(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_count(v) for v in value)
    # laplace's Kron and KronDecomposed, this package's NystromBasis
    parts = ("kfacs", "eigenvalues", "eigenvectors", "directions")
    return sum(_count(getattr(value, part, None)) for part in parts)
