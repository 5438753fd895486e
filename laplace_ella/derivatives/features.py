"""Features φ(x) = J(x)V in the cheaper direction of differentiation.

Forward mode pushes K tangents through one forward pass; reverse mode takes the C rows
of J(x) and multiplies them by V. The numbers agree; the costs do not.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch.func import jvp, vmap

from laplace_ella.derivatives.model_function import ModelFunction

__all__ = ["FeatureMode", "by_double_vjp", "by_forward", "by_forward_loop"]


class FeatureMode(str, Enum):
    """Ways to compute the features of B examples; costs in forward passes."""

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


def _tangents(fn: ModelFunction, directions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Directions `(K, P)` as parameters `(K, *shape)`, in the parameters' dtypes."""
    params = fn.parameters()
    return tuple(
        t.to(device=p.device, dtype=p.dtype)
        for t, p in zip(fn.split(directions), params, strict=True)
    )


def by_forward(
    fn: ModelFunction, x: Any, directions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, C) and J(x)V (B, C, K): all tangents in one batched forward pass.

    The primal is not batched over the tangents, so it is computed once.
    """
    params = fn.parameters()

    def push(tangents: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return jvp(lambda *p: fn(p, x), params, tangents)

    return vmap(push, out_dims=(None, -1), randomness="same")(_tangents(fn, directions))


def by_forward_loop(
    fn: ModelFunction, x: Any, directions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one tangent after the other, for models that `vmap` refuses."""
    params = fn.parameters()
    f, columns = None, []
    for tangents in zip(*_tangents(fn, directions), strict=True):
        f, column = jvp(lambda *p: fn(p, x), params, tangents)
        columns.append(column)
    return f, torch.stack(columns, dim=-1)


def by_double_vjp(
    fn: ModelFunction, x: Any, directions: torch.Tensor, create_graph: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as the derivative of u ↦ uᵀJ, which is linear in u, at v_k."""
    with torch.enable_grad():
        params = [p.requires_grad_() for p in fn.parameters()]
        f = fn(params, x)
        u = torch.zeros_like(f, requires_grad=True)
        # uᵀJ (P,), with the graph that leads back to u
        pulled = torch.autograd.grad(
            f, params, u, create_graph=True, materialize_grads=True
        )
        used = [i for i, g in enumerate(pulled) if g.requires_grad]
        columns = []
        for tangents in zip(*_tangents(fn, directions), strict=True):
            (column,) = torch.autograd.grad(
                [pulled[i] for i in used],
                u,
                [tangents[i] for i in used],
                retain_graph=True,
                create_graph=create_graph,
            )
            columns.append(column)
    phi = torch.stack(columns, dim=-1)
    return (f, phi) if create_graph else (f.detach(), phi.detach())
