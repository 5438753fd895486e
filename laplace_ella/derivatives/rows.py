"""Rows of the Jacobian: gradients of one combination of the outputs of each example.

A combination is given by a cotangent (C,): a unit vector selects one output.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch.func import grad, vjp, vmap

from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.support.batches import take
from laplace_ella.support.preserve import full_precision

__all__ = [
    "RowMode",
    "jacobian_by_loop",
    "jacobian_by_vmap",
    "projection_by_vmap",
    "row_dtype",
    "rows_by_loop",
    "rows_by_vmap",
]


class RowMode(str, Enum):
    """How the gradients of B examples are taken; every way gives the same rows."""

    AUTO = "auto"
    """Try `vmap` and `loop` on one batch and keep the fastest that works."""

    VMAP = "vmap"
    """`vmap(grad)`: one batched backward pass. Grouped convolutions may be slow."""

    LOOP = "loop"
    """One backward pass an example. Works for every model autograd works for."""

    BACKPACK = "backpack"
    """BackPACK's `BatchGrad`: one backward pass, for the layers that it knows."""

    ASDL = "asdl"
    """ASDL's batch gradients: the same. Convolutions take the memory of `unfold`."""


def row_dtype(fn: ModelFunction) -> torch.dtype:
    """Dtype of rows and basis: the parameters', float32 at least."""
    dtype = torch.float32
    for p in fn.parameters():
        dtype = torch.promote_types(dtype, p.dtype)
    return dtype


def rows_by_vmap(
    fn: ModelFunction,
    x: Any,
    size: int,
    examples: torch.Tensor,
    cotangents: torch.Tensor,
) -> torch.Tensor:
    """cᵀJ(x) for cotangent `cotangents[m]` at example `examples[m]`, by `vmap(grad)`.

    Parameters
    ----------
    x : Any
        inputs of `size` examples
    examples : torch.Tensor
        positions in the batch, `(m,)`
    cotangents : torch.Tensor
        `(m, C)`

    Returns
    -------
    torch.Tensor
        `(m, P)`
    """
    selected = take(x, examples, size)
    leaves = _batched_leaves(selected, len(examples))
    params, dtype = fn.parameters(), row_dtype(fn)

    def row(leaves: list[torch.Tensor], cotangent: torch.Tensor) -> torch.Tensor:
        single = _rebuild(selected, len(examples), [v.unsqueeze(0) for v in leaves])

        def combined(params: tuple[torch.Tensor, ...]) -> torch.Tensor:
            f = fn(params, single)[0]
            return (f * cotangent.to(f.dtype)).sum()

        return torch.cat([g.flatten().to(dtype) for g in grad(combined)(params)])

    return vmap(row, randomness="same")(leaves, cotangents)


def rows_by_loop(
    fn: ModelFunction,
    x: Any,
    size: int,
    examples: torch.Tensor,
    cotangents: torch.Tensor,
) -> torch.Tensor:
    """The same as `rows_by_vmap`, one backward pass a row.

    Rows of one example that stand together share its forward pass.
    """
    dtype = row_dtype(fn)
    rows, last, f = [], None, None
    with torch.enable_grad():
        params = [p.requires_grad_() for p in fn.parameters()]
        for example, cotangent in zip(examples.tolist(), cotangents, strict=True):
            if example != last:
                f = fn(params, take(x, slice(example, example + 1), size))[0]
                last = example
            grads = torch.autograd.grad(
                f,
                params,
                cotangent.to(f.dtype),
                retain_graph=True,
                materialize_grads=True,
            )
            rows.append(torch.cat([g.flatten().to(dtype) for g in grads]))
    return torch.stack(rows)


def jacobian_by_vmap(
    fn: ModelFunction, x: Any, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, C) and the whole Jacobian (B, C, P), one forward pass an example."""
    leaves = _batched_leaves(x, size)
    params, dtype = fn.parameters(), row_dtype(fn)

    def single(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        one = _rebuild(x, size, [v.unsqueeze(0) for v in leaves])
        f, pull = vjp(lambda p: fn(p, one).squeeze(0), params)
        basis = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        (grads,) = vmap(pull)(basis)
        return f, torch.cat([g.flatten(1).to(dtype) for g in grads], dim=1)

    return vmap(single, randomness="same")(leaves)


def projection_by_vmap(
    fn: ModelFunction, x: Any, size: int, directions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, C) and J(x)V (B, C, K) without putting the Jacobian together.

    Each parameter's gradients are multiplied by its part of V as they are: the copy
    into one matrix would cost more than the products.
    """
    leaves = _batched_leaves(x, size)
    params, dtype = fn.parameters(), row_dtype(fn)
    pieces = directions.to(dtype).split(fn.numels(), dim=1)  # (K, p_l) each

    def single(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        one = _rebuild(x, size, [v.unsqueeze(0) for v in leaves])
        f, pull = vjp(lambda p: fn(p, one).squeeze(0), params)
        basis = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        (grads,) = vmap(pull)(basis)
        parts = zip(grads, pieces, strict=True)
        with full_precision(params[0].device):
            return f, sum(g.flatten(1).to(dtype) @ v.T for g, v in parts)

    return vmap(single, randomness="same")(leaves)


def jacobian_by_loop(
    fn: ModelFunction, x: Any, size: int, create_graph: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one backward pass an output and example."""
    dtype = row_dtype(fn)
    outputs, rows = [], []
    with torch.enable_grad():
        params = [p.requires_grad_() for p in fn.parameters()]
        for b in range(size):
            f = fn(params, take(x, slice(b, b + 1), size))[0]
            for output in f:
                grads = torch.autograd.grad(
                    output,
                    params,
                    retain_graph=True,
                    create_graph=create_graph,
                    materialize_grads=True,
                )
                rows.append(torch.cat([g.flatten().to(dtype) for g in grads]))
            outputs.append(f)
    f, J = torch.stack(outputs), torch.stack(rows).reshape(size, len(outputs[0]), -1)
    return (f, J) if create_graph else (f.detach(), J.detach())


def _batched_leaves(x: Any, size: int) -> list[torch.Tensor]:
    """The tensors of `x` that have a batch dimension, in a fixed order."""
    if isinstance(x, torch.Tensor):
        return [x] if x.ndim and x.shape[0] == size else []
    if not isinstance(x, (Mapping, tuple, list)):
        return []
    values = x.values() if isinstance(x, Mapping) else x
    return [leaf for value in values for leaf in _batched_leaves(value, size)]


def _rebuild(x: Any, size: int, leaves: list[torch.Tensor]) -> Any:
    """`x` with its batched tensors replaced, in the order of `_batched_leaves`."""
    remaining = iter(leaves)

    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            batched = value.ndim and value.shape[0] == size
            return next(remaining) if batched else value
        if isinstance(value, Mapping):
            return {key: replace(v) for key, v in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(replace(v) for v in value)
        return value

    return replace(x)
