"""Memory of the methods of a comparison, estimated before the attempt.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from laplace_ella.comparison.methods import Kind, Method
from laplace_ella.support import batches

__all__ = [
    "Estimate",
    "Problem",
    "describe_problem",
    "estimate",
    "estimate_ella",
    "preferred_batch",
    "stored_floats",
]


@dataclass(frozen=True)
class Problem:
    """The sizes on which cost and support of a method depend.

    `output_shape` is that of one example, (C,) for most models; `n_activations` counts
    the outputs of all leaf modules for one example; `kron_floats` the Kronecker factors
    of all layers; `kron_unsupported` the types of layers with parameters that KFAC
    (curvlinops) has no rule for; `last_layer` is the name of the last linear layer that
    is run, if it is the last with parameters.
    """

    n_data: int
    output_shape: tuple[int, ...]
    n_params: int
    n_params_last: int
    n_activations: int
    batch: int
    itemsize: int
    kron_floats: int
    kron_floats_last: int
    kron_unsupported: tuple[str, ...] = ()
    last_layer: str | None = None

    @property
    def n_outputs(self) -> int:
        """C, or S·C of a model with outputs at S positions."""
        return math.prod(self.output_shape)


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
    activations: list[int] = []
    executed: list[nn.Module] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            activations.append(output.numel())
        executed.append(module)

    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    hooks = [leaf.register_forward_hook(record) for leaf in leaves]
    try:
        out = model(batches.take(x, slice(0, 1), batch))
    finally:
        for hook in hooks:
            hook.remove()

    with_parameters = [m for m in executed if any(p.requires_grad for p in _own(m))]
    last = with_parameters[-1] if with_parameters else None
    owners = [
        m for m in model.modules() if any(p.requires_grad for p in _own(m))
    ]  # parameters may also belong to inner modules (class tokens)
    unsupported = {
        type(m).__name__ for m in owners if not isinstance(m, (nn.Linear, nn.Conv2d))
    }
    names = {id(m): name for name, m in model.named_modules()}
    return Problem(
        n_data=n_data,
        output_shape=tuple(out.shape[1:]),
        n_params=sum(p.numel() for p in model.parameters() if p.requires_grad),
        n_params_last=sum(p.numel() for p in _own(last)) if last is not None else 0,
        n_activations=sum(activations),
        batch=batch,
        itemsize=next(model.parameters()).element_size(),
        kron_floats=sum(_kron_floats(m) for m in owners),
        kron_floats_last=_kron_floats(last) if last is not None else 0,
        kron_unsupported=tuple(sorted(unsupported)),
        last_layer=names[id(last)] if isinstance(last, nn.Linear) else None,
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


# --- ELLA: asked ---------------------------------------------------------------------


def estimate_ella(
    method: Method,
    build: Callable[..., Any],
    train_loader: Any,
    device: torch.device,
    batch: int,
    limit: int | None,
) -> Estimate:
    """What ELLA itself says that a fit takes, within `limit` bytes.

    Parameters
    ----------
    method : Method
    build : callable
        further keyword arguments → the method's `ELLALaplace` with these
    train_loader : iterable
    device : torch.device
        of the model; the limit says nothing about a basis on another one
    batch : int
        the loader's; ELLA splits its batches itself
    limit : int, optional
        bytes; a `memory_budget` of the method's own holds besides
    """
    needs = build().estimate_memory(train_loader)
    home = torch.device(method.kwargs.get("basis_device") or device)
    if home.type != device.type or limit is None:
        return Estimate(needs.total, batch if needs.fits else None)
    if method.kwargs.get("memory_budget") is not None:
        fits = needs.fits and needs.total <= limit
        return Estimate(needs.total, batch if fits else None)
    budget = min(limit, needs.budget)  # never more than ELLA would allow itself
    if budget < needs.budget:
        needs = build(memory_budget=budget).estimate_memory(train_loader)
    if not needs.fits:
        return Estimate(needs.needed, None)
    return Estimate(needs.total, batch, budget=budget)


# --- laplace-torch: counted ----------------------------------------------------------


def estimate(method: Method, problem: Problem, limit: int | None) -> Estimate:
    """Memory of `method`, and the batch size with which it stays below `limit` bytes.

    The posterior counts with the copies that laplace-torch makes of it. Methods that
    take Jacobians of all layers with `torch.func.jacrev` over a whole batch need
    besides the B·C·P Jacobian about 2·B²·C floats per activation of the network, since
    each of the B·C outputs is propagated through the whole batch and kept. Measured
    peaks are within 0.7–1.0 of this estimate. Of ELLA, which splits its batches and has
    an estimate of its own (`estimate_ella`), only the support is looked at.
    """
    unsupported = _unsupported(method, problem)
    if unsupported or method.kind is not Kind.LAPLACE or method.is_ella:
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
    if method.kind is not Kind.LAPLACE or method.is_ella:
        return None
    if len(problem.output_shape) != 1:
        return "not supported: outputs at many positions (only ELLA takes them)"
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
    if method.is_ella:
        return 0  # splits its batches itself
    C = problem.n_outputs
    if method.structure[0] == "last_layer":
        return 2 * batch * C * problem.n_params_last
    propagated = 2 * batch**2 * C * problem.n_activations
    return propagated + 2 * batch * C * problem.n_params


# --- what is kept --------------------------------------------------------------------

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
