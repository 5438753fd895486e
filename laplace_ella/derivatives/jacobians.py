"""Rows cᵀJ(x) of the Jacobian and features J(x)V, one pure function for each mode.

All modes of rows have one signature, all modes of features another. Rows times V are
features as well.

Index legend: B batch, O outputs of one example in the model's order, o combinations of
them, P parameters, K rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import jvp, vjp, vmap

from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.modes import FeatureMode
from laplace_ella.support.batches import Batch, Positions, chunks
from laplace_ella.support.preserve import full_precision

#: Columns whose products are added up in the matrices' own precision.
BLOCK = 2**14


@dataclass(frozen=True)
class Features:
    """Outputs f `(B·S, C)` and features φ = J(x)V, or J(x)D⁻¹V in the prior's metric,
    `(B·S, c, K)` of B inputs at S positions each, as rows.

    `residual` `(B·S, n, c, c)` is the part of JD⁻¹Jᵀ outside the basis at each
    position, cut into n parts as by `GradientSplit`; `outputs` `(B·S, c)` says which c
    of the C outputs features and residuals are of, where they are not of all.
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
        f, pull = vjp(partial(fn, x=one), params)[:2]
        cotangents = cotangents.to(f).unflatten(-1, f.shape)
        if len(cotangents) == 1:  # one batched dimension less
            grads = [g.unsqueeze(0) for g in pull(cotangents[0])[0]]
        else:
            (grads,) = vmap(pull)(cotangents)
        return f.flatten().to(fn.dtype), times_directions(grads, tangents, fn.dtype)

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
        pairs = zip(pieces, tangents, strict=True)
        return reduce(torch.add, (F.linear(g, v.flatten(1)) for g, v in pairs))


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
    params, run = fn.parameters(), partial(fn, x=batch.inputs)
    push: Any = vmap(
        lambda tangent: jvp(run, (params,), (tangent,)),
        out_dims=(None, -1),  # pyright: ignore[reportArgumentType]
        randomness="same",
    )
    with torch.set_grad_enabled(create_graph):
        pairs = zip(fn.split(directions), params, strict=True)
        f, phi = push(tuple([v.to(p.dtype) for v, p in pairs]))
        return f.flatten(1).to(fn.dtype), phi.flatten(1, -2).to(fn.dtype)


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


# Parts of given rows


def accurate_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return abᵀ `(..., m, n)` for a `(..., m, P)` and b `(..., n, P)`, whatever P.

    Blocks of columns are multiplied in the precision of a and b and added up in
    float64, so that the rounding error does not grow with P.
    """
    with full_precision(a.device):
        if a.shape[-1] <= BLOCK or a.dtype == torch.float64:
            return a @ b.mT
        total = torch.zeros((), dtype=torch.float64, device=a.device)
        for part in chunks(a.shape[-1], BLOCK):
            total = total + (a[..., part] @ b[..., part].mT).double()
        return total.to(a.dtype)


@dataclass(frozen=True)
class GradientSplit:
    """Splits gradients into features and what is left of them.

    In whitened weights D^{1/2}θ the prior is standard normal, and the basis V spans the
    orthonormal Q = D^{-1/2}VR⁻¹ with RᵀR = VᵀD⁻¹V: a gradient row J becomes
    JD^{-1/2} = JD^{-1/2}QQᵀ + rest.

    Attributes
    ----------
    directions : torch.Tensor
        Vᵀ `(K, P)`, orthonormal rows
    weights, inverse_gram : torch.Tensor, optional
        D⁻¹ `(P,)` and (VᵀD⁻¹V)⁻¹ `(K, K)` of a prior precision that is not the same
        for all weights; None for D = 1, whose parts serve every scalar prior
    parts : callable, optional
        cuts a rest `(..., P)` into `n_parts` parts, see `Span`; for D = 1
    """

    directions: torch.Tensor
    weights: torch.Tensor | None = None
    inverse_gram: torch.Tensor | None = None
    parts: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] | None = None
    n_parts: int = 1

    def to(self, device: torch.device, dtype: torch.dtype) -> GradientSplit:
        """Return the same for gradients on a device: directions are moved once."""
        return replace(self, directions=self.directions.to(device, dtype))

    def __call__(self, J: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return features φ = JD⁻¹V `(..., K)` and the whitened rest `(..., P)` of rows
        J `(..., P)`, or the rest's parts.

        The rest is formed from the rows themselves, as in Gram-Schmidt: its products
        are positive semi-definite and do not cancel, which JD⁻¹Jᵀ less the part within
        the basis would for inputs like the training data.
        """
        V = self.directions.to(J)
        with full_precision(J.device):
            if self.weights is None or self.inverse_gram is None:
                phi = accurate_product(J, V)
                rest = J - phi @ V
                return phi, *((rest,) if self.parts is None else self.parts(rest))
            weights = self.weights.to(J)
            phi = accurate_product(J * weights, V)
            within = phi @ self.inverse_gram.to(phi) @ V
            return phi, (J - within) * weights.sqrt()
