"""Rows of the Jacobian: gradients of one combination of the outputs of each example.

A combination is given by a cotangent over the O = S·C outputs of one example, in the
model's order: a unit vector selects one output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch.func import grad, vjp, vmap

from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.selection import Cotangents
from laplace_ella.support.batches import Batch

__all__ = [
    "RowMode",
    "empty_rows",
    "jacobian_by_loop",
    "jacobian_by_vmap",
    "map_jacobians",
    "pull_back",
    "rows_by_loop",
    "rows_by_vmap",
]


class RowMode(str, Enum):
    """How the gradients of B examples are taken; every way gives the same rows.

    Examples
    --------
    >>> import torch
    >>> import laplace_ella
    >>> la = laplace_ella.ELLALaplace(
    ...     torch.nn.Linear(2, 3), "classification", row_mode="loop"
    ... )
    >>> la.options.row_mode is RowMode.LOOP
    True
    """

    AUTO = "auto"
    """Try `vmap` and `loop` on one batch and keep the fastest that works."""

    VMAP = "vmap"
    """`vmap(grad)`: one batched backward pass. Grouped convolutions may be slow."""

    LOOP = "loop"
    """One backward pass per row. Works for every model autograd works for."""

    BACKPACK = "backpack"
    """BackPACK's `BatchGrad`: one backward pass, for the layers that it knows."""

    ASDL = "asdl"
    """ASDL's batch gradients: the same. Convolutions take the memory of `unfold`."""


def pull_back(
    fn: ModelFunction,
    x: Any,
    cotangents: Callable[[torch.Tensor], Iterable[torch.Tensor]],
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """uᵀJ(x), summed over the batch, for several u and one forward pass.

    Parameters
    ----------
    x : Any
        inputs of B examples
    cotangents : callable
        u, `(B, O)` each, from the outputs `(B, O)`; for rows of one example, zero at
        all others

    Returns
    -------
    tuple
        outputs `(B, O)` and one row per cotangent, `(n, P)`
    """
    dtype, rows = fn.dtype, []
    with torch.enable_grad():
        params = [p.requires_grad_() for p in fn.parameters()]
        f = fn(params, x).flatten(1)
        for cotangent in cotangents(f.detach()):
            grads = torch.autograd.grad(
                f,
                params,
                cotangent.to(f),
                retain_graph=True,
                create_graph=create_graph,
                materialize_grads=True,
            )
            rows.append(torch.cat([g.flatten().to(dtype) for g in grads]))
    # A list without rows has no shape of its own.
    J = torch.stack(rows) if rows else f.new_zeros(0, sum(fn.numels()), dtype=dtype)
    f = f.to(dtype)
    return (f, J) if create_graph else (f.detach(), J.detach())


def empty_rows(fn: ModelFunction, n: int) -> torch.Tensor:
    """Room for n gradients of the model's own parameters, `(n, P)`."""
    return torch.empty(n, fn.n_params, dtype=fn.dtype, device=fn.device)


def rows_by_vmap(
    fn: ModelFunction,
    batch: Batch,
    examples: torch.Tensor,
    cotangents: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """cᵀJ(x) for cotangent `cotangents[m]` at example `examples[m]`, by `vmap(grad)`.

    Parameters
    ----------
    batch : Batch
        B inputs
    examples : torch.Tensor
        positions in the batch, `(m,)`
    cotangents : torch.Tensor
        `(m, O)`
    out : torch.Tensor
        where the rows go, `(m, P)`: put together elsewhere they would exist twice

    Returns
    -------
    torch.Tensor
        `out`
    """
    selected = batch.take(examples)
    params = fn.parameters()

    def row(
        leaves: list[torch.Tensor], cotangent: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        single = selected.with_leaves([v.unsqueeze(0) for v in leaves], 1).inputs

        def combined(params: tuple[torch.Tensor, ...]) -> torch.Tensor:
            f = fn(params, single).flatten()
            return (f * cotangent.to(f.dtype)).sum()

        return grad(combined)(params)

    fn.pull(vmap(row, randomness="same")(list(selected.leaves), cotangents), out)
    return out


def rows_by_loop(
    fn: ModelFunction,
    batch: Batch,
    examples: torch.Tensor,
    cotangents: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """The same as `rows_by_vmap`, one backward pass per row.

    Rows of one example that stand together share its forward pass.
    """
    pairs, filled = zip(examples.tolist(), cotangents, strict=True), 0
    for example, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        its = [cotangent.unsqueeze(0) for _, cotangent in group]
        one = batch.take(slice(example, example + 1)).inputs
        rows = pull_back(fn, one, lambda _, its=its: its)[1]
        fn.pull(fn.split(rows), out[filled : filled + len(rows)])
        filled += len(rows)
    return out


def map_jacobians(
    fn: ModelFunction,
    batch: Batch,
    cotangents: Cotangents,
    reduce: Callable[[tuple[torch.Tensor, ...]], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, O), and what `reduce` makes of the rows of every example.

    It gets the gradients `(o, *shape)` of every parameter, for the cotangents `(o, O)`
    of the example, from one backward pass of all examples together.
    """
    params, dtype = fn.parameters(), fn.dtype

    def single(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        one = batch.with_leaves([v.unsqueeze(0) for v in leaves], 1).inputs
        f, pull = vjp(lambda p: fn(p, one).flatten(), params)[:2]
        (grads,) = vmap(pull)(cotangents(f).to(f))
        return f.to(dtype), reduce(grads)

    return vmap(single, randomness="same")(list(batch.leaves))


def jacobian_by_vmap(
    fn: ModelFunction, batch: Batch, cotangents: Cotangents
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, O) and cᵀJ(x) (B, o, P) for cotangents (o, O) of every example."""
    dtype = fn.dtype
    return map_jacobians(
        fn,
        batch,
        cotangents,
        lambda grads: torch.cat([g.flatten(1).to(dtype) for g in grads], dim=1),
    )


def jacobian_by_loop(
    fn: ModelFunction,
    batch: Batch,
    cotangents: Cotangents,
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one backward pass per cotangent and example."""
    parts = [
        pull_back(
            fn,
            batch.take(slice(b, b + 1)).inputs,
            lambda f: cotangents(f[0]).unsqueeze(1),
            create_graph,
        )
        for b in range(batch.size)
    ]
    f, J = zip(*parts, strict=True)
    return torch.cat(f), torch.stack(J)
