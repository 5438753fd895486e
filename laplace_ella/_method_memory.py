"""Memory of the methods of a comparison, estimated before the attempt.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from laplace_ella import _batch
from laplace_ella._method import Kind, Method

__all__ = [
    "Estimate",
    "Problem",
    "describe_problem",
    "estimate",
    "preferred_batch",
    "stored_floats",
]


@dataclass(frozen=True)
class Problem:
    """The sizes on which cost and support of a method depend.

    `n_activations` counts the outputs of all leaf modules for one example;
    `kron_floats` the Kronecker factors of all layers; `kron_unsupported` the types of
    layers with parameters that KFAC (curvlinops) has no rule for.
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
    """

    bytes: int
    batch: int | None
    unsupported: str | None = None


@torch.no_grad()
def describe_problem(
    model: nn.Module, x: Any, n_data: int, dict_key_x: str = "input_ids"
) -> Problem:
    """Sizes of a model in eval mode, from one forward pass over one example of `x`."""
    batch = _batch.batch_size(x, dict_key_x)
    one = _batch.take(x, slice(0, 1), batch)
    activations: list[int] = []
    executed: list[nn.Module] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            activations.append(output.numel())
        executed.append(module)

    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    hooks = [leaf.register_forward_hook(record) for leaf in leaves]
    try:
        out = model(one)
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
        n_outputs=out.shape[-1],
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
    Measured peaks are within 0.7–1.0 of this estimate.
    """
    unsupported = _unsupported(method, problem)
    if unsupported or method.kind is not Kind.LAPLACE:
        return Estimate(0, problem.batch, unsupported)
    fixed = _posterior_floats(method, problem) * problem.itemsize
    batch = problem.batch
    while True:
        needed = fixed + _batch_floats(method, problem, batch) * problem.itemsize
        if limit is None or needed <= limit:
            return Estimate(needed, batch)
        if batch == 1:
            return Estimate(needed, None)
        batch = math.ceil(batch / 2)


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
    if structure == "nystrom":
        # Basis, batch of gradients and factors; the M gradients themselves are
        # compressed on the way where they do not fit.
        return 4 * P * int(method.kwargs.get("n_eigenvalues", 20))
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
