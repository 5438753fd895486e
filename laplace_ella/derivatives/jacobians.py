"""Rows cᵀJ(x) of the Jacobian and features J(x)V, one pure function for each mode.

Rows times V are features as well. All modes of rows have one signature, all modes of
features another.

Index legend: B batch, O outputs of one example in the model's order, o combinations of
them, P parameters, K rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import jvp, vjp, vmap

from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.modes import FeatureMode
from laplace_ella.support.batches import Batch, Positions
from laplace_ella.support.preserve import full_precision


@dataclass(frozen=True)
class Features:
    """Outputs and features of B inputs at S positions each, as rows.

    Attributes
    ----------
    f : torch.Tensor
        outputs `(B·S, C)`
    phi : torch.Tensor
        J(x)V, or J(x)D⁻¹V where the prior's metric was asked for, `(B·S, c, K)`
    positions : Positions
        of these inputs, to restore the model's shapes
    residual : torch.Tensor, optional
        the part of JD⁻¹Jᵀ outside the basis at each position, cut into n parts,
        `(B·S, n, c, c)`; see `GradientSplit`
    outputs : torch.Tensor, optional
        `(B·S, c)`, where features and residuals are of c of the C outputs: which ones
    """

    f: torch.Tensor
    phi: torch.Tensor
    positions: Positions
    residual: torch.Tensor | None = None
    outputs: torch.Tensor | None = None


def largest(f: torch.Tensor, n: int) -> torch.Tensor:
    """Return where the n largest of the last dimension are, the largest first.

    Stable: equal outputs, batched or not, are always taken in the same order.
    """
    return f.detach().argsort(dim=-1, descending=True, stable=True)[..., :n]


def one_hot(numbers: torch.Tensor, n_outputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return cotangents `(..., O)` that select the outputs of these numbers `(...)`."""
    outputs = torch.arange(n_outputs, device=numbers.device)
    return (numbers.unsqueeze(-1) == outputs).to(dtype)


# Rows: reverse mode


def rows_by_vmap(
    fn: ModelFunction,
    batch: Batch,
    cotangents: torch.Tensor,
    directions: torch.Tensor | None = None,
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `(B, O)` and rows cᵀJ(x) `(B, o, P)` of the Jacobian, for
    cotangents c `(B, o, O)`, by one backward pass of all examples.

    With directions Vᵀ `(K, P)` these are cᵀJ(x)V `(B, o, K)`; with `create_graph` they
    can be differentiated in the inputs.
    """
    params = fn.parameters()
    tangents = None if directions is None else fn.split(directions)

    def single(
        leaves: list[torch.Tensor], cotangents: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        one = batch.with_leaves([leaf.unsqueeze(0) for leaf in leaves]).inputs
        f, pull = vjp(lambda p: fn(p, one).flatten(), params)[:2]
        if len(cotangents) == 1:  # one batched dimension less
            grads = [g.unsqueeze(0) for g in pull(cotangents[0].to(f))[0]]
        else:
            (grads,) = vmap(pull)(cotangents.to(f))
        return f.to(fn.dtype), times_directions(grads, tangents, fn.dtype)

    with torch.set_grad_enabled(create_graph):
        return vmap(single, randomness="same")(batch.leaves, cotangents)


def rows_by_loop(
    fn: ModelFunction,
    batch: Batch,
    cotangents: torch.Tensor,
    directions: torch.Tensor | None = None,
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `rows_by_vmap`, by one backward pass per row."""
    tangents = None if directions is None else fn.split(directions)
    outputs, rows = [], []
    for b in range(batch.size):
        one = batch.take(slice(b, b + 1)).inputs
        f, grads = pull_back(fn, one, cotangents[b].unsqueeze(1), create_graph)
        outputs.append(f)
        rows.append(times_directions(grads, tangents, fn.dtype))
    return torch.cat(outputs), torch.stack(rows)


def pull_back(
    fn: ModelFunction, x: Any, cotangents: torch.Tensor, create_graph: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return outputs `(B, O)` and uᵀJ(x), summed over the batch, for cotangents u
    `(n, B, O)` and one forward pass: gradients `(n, *shape)` of each parameter."""
    how = {"retain_graph": True, "create_graph": create_graph}
    with torch.enable_grad():
        params = [p.requires_grad_() for p in fn.parameters()]
        f = fn(params, x).flatten(1)
        rows = [
            torch.autograd.grad(f, params, u.to(f), materialize_grads=True, **how)
            for u in cotangents
        ]
    f = f.to(fn.dtype)
    gradients = [torch.stack(grads) for grads in zip(*rows, strict=True)]
    return f if create_graph else f.detach(), gradients


def times_directions(
    gradients: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return gradients `(o, *shape)` of each parameter as rows `(o, P)`; with tangents
    `(K, *shape)` their products Σ_l g_l v_lᵀ `(o, K)`.

    Each parameter's gradients are multiplied by its part of V as they are: the copy
    into one matrix would cost more than the products.
    """
    pieces = [g.flatten(1).to(dtype) for g in gradients]
    if tangents is None:
        return torch.cat(pieces, 1)
    with full_precision(tangents[0].device):
        total = F.linear(pieces[0], tangents[0].flatten(1))
        for g, v in zip(pieces[1:], tangents[1:], strict=True):
            total = total + F.linear(g, v.flatten(1))
    return total


# Features without rows: forward mode, and what replaces it


def features_by_forward(
    fn: ModelFunction,
    batch: Batch,
    directions: torch.Tensor,
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `(B, O)` and features `(B, O, K)` for directions Vᵀ `(K, P)`, by
    one batched forward pass.

    The primal is not batched over the tangents, so it is computed once.
    """
    params, x = fn.parameters(), batch.inputs

    def push(tangent: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        f, column = jvp(lambda *p: fn(p, x).flatten(1), params, tangent)[:2]
        return f, column

    out_dims: Any = (None, -1)
    with torch.set_grad_enabled(create_graph):
        pairs = zip(fn.split(directions), params, strict=True)
        tangents = tuple([v.to(p.dtype) for v, p in pairs])
        f, phi = vmap(push, out_dims=out_dims, randomness="same")(tangents)
        return f.to(fn.dtype), phi.to(fn.dtype)


def features_by_double_vjp(
    fn: ModelFunction,
    batch: Batch,
    directions: torch.Tensor,
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as the derivative of u ↦ uᵀJ, which is linear in u, at v_k."""
    columns, how = [], {"retain_graph": True, "create_graph": create_graph}
    with torch.enable_grad():
        params = tuple([p.requires_grad_() for p in fn.parameters()])
        f = fn(params, batch.inputs).flatten(1)
        u = torch.zeros_like(f, requires_grad=True)
        # uᵀJ (P,), with the graph that leads back to u
        pulled = torch.autograd.grad(
            f, params, u, create_graph=True, materialize_grads=True
        )
        used = [i for i, g in enumerate(pulled) if g.requires_grad]
        products = [pulled[i] for i in used]
        for tangent in zip(*fn.split(directions), strict=True):
            v = [tangent[i].to(pulled[i]) for i in used]
            (column,) = torch.autograd.grad(products, u, v, **how)
            columns.append(column.to(fn.dtype))
    f, phi = f.to(fn.dtype), torch.stack(columns, dim=-1)
    return (f, phi) if create_graph else (f.detach(), phi.detach())


#: Ways to compute features without rows, by their modes.
FEATURES = {
    FeatureMode.FORWARD: features_by_forward,
    FeatureMode.DOUBLE_REVERSE: features_by_double_vjp,
}
