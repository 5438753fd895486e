"""Features φ(x) = J(x)V in the cheaper direction of differentiation.

Forward mode pushes K tangents through one forward pass; reverse mode takes the C rows
of J(x) and multiplies them by V. The numbers agree; the costs do not.

The functions return outputs (B, O) and features (B, O, K), O = S·C in the model's
order; `Features` has them as rows, one position of one example each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import jvp, vjp, vmap

from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.rows import jacobian_by_loop, map_jacobians
from laplace_ella.derivatives.selection import Cotangents
from laplace_ella.support.batches import Batch
from laplace_ella.support.layout import Positions
from laplace_ella.support.preserve import full_precision

__all__ = [
    "FeatureMode",
    "Features",
    "Tangents",
    "by_double_vjp",
    "by_forward",
    "by_forward_loop",
    "by_reverse",
    "by_reverse_forgetting",
    "by_reverse_loop",
]

#: Numbers of a parameter whose gradients are worth a product of their own.
LARGE_PARAMETER = 1024


class FeatureMode(str, Enum):
    """Ways to compute the features of B examples; costs in forward passes.

    Examples
    --------
    >>> import torch
    >>> import laplace_ella
    >>> la = laplace_ella.ELLALaplace(
    ...     torch.nn.Linear(2, 3), "classification", feature_mode="reverse"
    ... )
    >>> la.options.feature_mode is FeatureMode.REVERSE
    True
    """

    AUTO = "auto"
    """Decide once, at fit: by cost, and by a measurement where the costs are close."""

    FORWARD = "forward"
    """Forward-mode AD: about 2K + 1 passes, whatever C. Best for many outputs."""

    REVERSE = "reverse"
    """Rows of the Jacobian times V: about 2C + 1 passes and a product of C·P·K
    multiplications. Best for few outputs and large K."""

    DOUBLE_VJP = "double_vjp"
    """The derivative of a vector-Jacobian product: about 3K + 2 passes. For models
    with operators that have no forward-mode derivative (LSTM, weight_norm)."""


@dataclass(frozen=True)
class Features:
    """Outputs and features of B inputs at S positions each, as rows.

    Attributes
    ----------
    f : torch.Tensor
        outputs `(B·S, C)`
    phi : torch.Tensor
        J(x)V, or J(x)D⁻¹V where the prior's metric was asked for, `(B·S, C, K)`
    positions : Positions
        of these inputs, to restore the model's shapes
    residual : torch.Tensor, optional
        the part of JD⁻¹Jᵀ outside the basis at each position, `(B·S, C, C)`; see
        `split_gradients`
    unseen : torch.Tensor, optional
        the part of JJᵀ outside a span of gradients, `(B·S, L, C, C)` at each of its
        levels, see `Span`
    outputs : torch.Tensor, optional
        `(B·S, c)`, where features and residuals are of c of the C outputs: which ones
    """

    f: torch.Tensor
    phi: torch.Tensor
    positions: Positions
    residual: torch.Tensor | None = None
    unseen: torch.Tensor | None = None
    outputs: torch.Tensor | None = None

    def is_finite(self) -> torch.Tensor:
        """Whether no number is NaN or infinite, without waiting for the device."""
        tensors = (self.f, self.phi, self.residual, self.unseen)
        flags = [torch.isfinite(t).all() for t in tensors if t is not None]
        return torch.stack(flags).all()


#: Directions as changes of the parameters of a `ModelFunction`, `(K, *shape)` each.
Tangents = tuple[torch.Tensor, ...]


def by_forward(
    fn: ModelFunction, x: Any, tangents: Tangents
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tangents in one batched forward pass.

    The primal is not batched over the tangents, so it is computed once.
    """
    params, dtype = fn.parameters(), fn.dtype

    def push(tangent: Tangents) -> tuple[torch.Tensor, torch.Tensor]:
        f, column = jvp(lambda *p: fn(p, x).flatten(1), params, tangent)[:2]
        return f, column

    out_dims: Any = (None, -1)
    f, phi = vmap(push, out_dims=out_dims, randomness="same")(_like(tangents, params))
    return f.to(dtype), phi.to(dtype)


def by_forward_loop(
    fn: ModelFunction, x: Any, tangents: Tangents
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one tangent after the other, for models that `vmap` refuses."""
    params, dtype = fn.parameters(), fn.dtype
    pairs = [
        jvp(lambda *p: fn(p, x).flatten(1), params, tangent)[:2]
        for tangent in zip(*_like(tangents, params), strict=True)
    ]
    columns = [column.to(dtype) for _, column in pairs]
    return pairs[0][0].to(dtype), torch.stack(columns, dim=-1)


def by_double_vjp(
    fn: ModelFunction, x: Any, tangents: Tangents, create_graph: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as the derivative of u ↦ uᵀJ, which is linear in u, at v_k."""
    dtype = fn.dtype
    with torch.enable_grad():
        params = tuple(p.requires_grad_() for p in fn.parameters())
        f = fn(params, x).flatten(1)
        u = torch.zeros_like(f, requires_grad=True)
        # uᵀJ (P,), with the graph that leads back to u
        pulled = torch.autograd.grad(
            f, params, u, create_graph=True, materialize_grads=True
        )
        used = [i for i, g in enumerate(pulled) if g.requires_grad]
        columns = []
        for tangent in zip(*_like(tangents, params), strict=True):
            (column,) = torch.autograd.grad(
                [pulled[i] for i in used],
                u,
                [tangent[i] for i in used],
                retain_graph=True,
                create_graph=create_graph,
            )
            columns.append(column.to(dtype))
    f, phi = f.to(dtype), torch.stack(columns, dim=-1)
    return (f, phi) if create_graph else (f.detach(), phi.detach())


def by_reverse(
    fn: ModelFunction, batch: Batch, tangents: Tangents, cotangents: Cotangents
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the Jacobian times V, for combinations of outputs `(o, O)`:
    outputs (B, O) and (B, o, K), without putting the Jacobian together.

    Each parameter's gradients are multiplied by its part of V as they are: the copy
    into one matrix would cost more than the products.
    """
    dtype = fn.dtype
    pieces = [t.flatten(1).to(dtype) for t in tangents]  # (K, p_l) each

    def project(grads: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return _products([g.flatten(1).to(dtype) for g in grads], pieces)

    return map_jacobians(fn, batch, cotangents, project)


def by_reverse_forgetting(
    fn: ModelFunction, batch: Batch, tangents: Tangents, cotangents: Cotangents
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with less memory: the gradients of a large parameter are multiplied as
    soon as they are there, and forgotten. All of them take o·P numbers per example.
    """
    params, dtype = fn.parameters(), fn.dtype
    pieces = [t.flatten(1).to(dtype) for t in tangents]

    def flat(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.flatten().to(dtype)

    def single(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        one = batch.with_leaves([v.unsqueeze(0) for v in leaves], 1).inputs
        products: dict[int, torch.Tensor] = {}  # by the number of the parameter

        def multiply(number: int, gradient: torch.Tensor) -> torch.Tensor:
            products[number] = _products([flat(gradient)], [pieces[number]])
            return gradient.new_zeros(()).expand(gradient.shape)  # takes no memory

        def outputs(params: tuple[torch.Tensor, ...]) -> torch.Tensor:
            for number, p in enumerate(params):
                if p.numel() >= LARGE_PARAMETER:
                    p.register_hook(partial(multiply, number))
            return fn(params, one).flatten()

        f, pull = vjp(outputs, params)[:2]

        def row(cotangent: torch.Tensor) -> torch.Tensor:
            products.clear()
            (grads,) = pull(cotangent)
            rest = [i for i in range(len(params)) if i not in products]
            if rest:  # the small ones
                products[rest[0]] = _products(
                    [flat(grads[i]) for i in rest], [pieces[i] for i in rest]
                )
            return reduce(torch.add, products.values())

        return f.to(dtype), vmap(row)(cotangents(f).to(f))

    return vmap(single, randomness="same")(list(batch.leaves))


def by_reverse_loop(
    fn: ModelFunction,
    batch: Batch,
    tangents: Tangents,
    cotangents: Cotangents,
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one backward pass per combination and example."""
    f, J = jacobian_by_loop(fn, batch, cotangents, create_graph)
    pieces = [t.flatten(1).to(J) for t in tangents]
    return f, _products(J.split(fn.numels(), dim=-1), pieces)


def _products(
    grads: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Σ_l g_l v_lᵀ of gradients `(..., p_l)` and parts of the directions `(K, p_l)`."""
    with full_precision(pieces[0].device):
        products = (F.linear(g, v) for g, v in zip(grads, pieces, strict=True))
        return reduce(torch.add, products)


def _like(tangents: Tangents, params: tuple[torch.Tensor, ...]) -> Tangents:
    """Tangents in the dtypes of the parameters, which forward mode asks for."""
    return tuple(
        t.to(device=p.device, dtype=p.dtype)
        for t, p in zip(tangents, params, strict=True)
    )
