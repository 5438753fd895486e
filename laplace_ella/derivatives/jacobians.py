"""Rows of the Jacobian J(x) and features J(x)V, one pure function for each way.

There are three lists of functions, each with one signature: single rows
(`rows_by_...`), all rows or their products with V (`jacobians_by_...`, reverse mode),
and features without rows (`features_by_...`, forward mode and its replacement).
`PassSizes` says how much goes through them at once. Sizes follow the network: a pass
that is too small spends its time on the overhead of single operators, one that is too
large falls out of the processor's cache.

Index legend: B batch, S positions, C outputs at each, O = S·C outputs of one example in
the model's order, P parameters, K rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vjp, vmap

from laplace_ella.derivatives.complements import accurate_product
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.support.batches import Batch, Positions
from laplace_ella.support.preserve import full_precision

__all__ = [
    "Cotangents",
    "Features",
    "PassSizes",
    "Tangents",
    "features_by_double_vjp",
    "features_by_forward",
    "features_by_forward_loop",
    "fill_residuals",
    "jacobians_by_loop",
    "jacobians_by_vmap",
    "largest",
    "pull_back",
    "rows_by_loop",
    "rows_by_vmap",
    "unit_vectors",
]

#: Directions as changes of the parameters of a `ModelFunction`, `(K, *shape)` each.
Tangents = tuple[torch.Tensor, ...]

#: Combinations of outputs (o, O) of one example, from its outputs (O,).
Cotangents = Callable[[torch.Tensor], torch.Tensor]


#: Bytes of the largest intermediate result of one forward-mode pass, all tangents
#: together: at least, and at most where the tangents of the parameters, which every
#: pass reads, take as much. Measured with nine networks on a CPU with 32 MB of cache:
#: the fastest passes have 5 to 26 MB.
TANGENT_BYTES = {"cpu": (2**23, 3 * 2**23), "cuda": (2**29, 2**29)}

#: Tangents of one example that are worth more than that, and how much: fewer would
#: spend their time on computing the outputs over and over. With 24 instead of 48 MB
#: EfficientNet-Lite0 took 1.12 times as long, ConvNeXt-Atto 1.05, ResNet-18 0.93.
FEWEST_TANGENTS, ENOUGH_TANGENTS = 4, 32
ONE_EXAMPLE_BYTES = {"cpu": 6 * 2**23, "cuda": 2**29}

#: Bytes of gradients and activations that one reverse-mode pass need not save on, and
#: gradients that are worth more: ResNet-20 takes as long by 80, and longer by 160.
GRADIENT_BYTES = {"cpu": 2**26, "cuda": 2**31}
ENOUGH_GRADIENTS = 40

#: Bytes that one pass may take, and as much again its results; the share of a memory
#: budget that they may take where one is given.
PASS_BYTES = {"cpu": 2**28, "cuda": 2**31}
PASS_SHARE = 0.25

#: Intermediate results that are alive at once in a forward-mode pass.
LIVE_RESULTS = 4


@dataclass(frozen=True)
class PassSizes:
    """How many examples, outputs and tangents one pass of differentiation takes.

    Attributes
    ----------
    n_params, itemsize : int
        P, and bytes of one number of a gradient
    largest, total : int
        bytes of the largest and of all intermediate results of one example
    device : str
        "cpu" or "cuda"
    chunk_size : int, optional
        examples that are differentiated at once; chosen by the network if None
    budget : int, optional
        bytes that all work together may take, if the user has set a limit
    """

    n_params: int
    itemsize: int
    largest: int
    total: int
    device: str = "cpu"
    chunk_size: int | None = None
    budget: int | None = None

    @property
    def limit(self) -> int:
        """Return the bytes of one pass."""
        limit = PASS_BYTES[self.device]
        budget = self.budget
        return limit if budget is None else min(limit, int(PASS_SHARE * budget))

    def plain(self) -> int:
        """Return how many examples go through the model without derivatives."""
        return self.chunk_size or max(1, self.limit // (LIVE_RESULTS * self.largest))

    def reverse(self, n_outputs: int = 1) -> tuple[int, int]:
        """Return how many examples, and how many of their outputs, are differentiated
        in one reverse-mode pass."""
        limit, gradient = self.limit, self.n_params * self.itemsize
        # Each row has a gradient, a cotangent and its way back through the layers.
        row = 2 * (gradient + n_outputs * self.itemsize + self.largest)
        free = limit - 2 * self.total
        if self.budget is None:
            # As much as the activations, which every pass computes anew.
            free = max(free, 2 * self.total)
        outputs = max(1, min(n_outputs, free // row))
        if outputs < n_outputs:
            return 1, outputs
        if self.chunk_size is not None:
            return self.chunk_size, outputs
        each = self.reverse_bytes(n_outputs)
        enough = max(ENOUGH_GRADIENTS // n_outputs, GRADIENT_BYTES[self.device] // each)
        return max(1, min(enough, limit // each)), outputs

    def reverse_bytes(self, n_outputs: int = 1) -> int:
        """Return bytes of gradients and saved activations of one example."""
        gradients = n_outputs * self.n_params * self.itemsize
        return 2 * (gradients + (n_outputs - 1) * self.largest + self.total)

    def forward(self, rank: int) -> tuple[int, int]:
        """Return how many examples, with how many tangents each, take one forward-mode
        pass."""
        limit, tangent = self.limit, self.n_params * self.itemsize
        least, most = TANGENT_BYTES[self.device]
        enough = min(ENOUGH_TANGENTS, ONE_EXAMPLE_BYTES[self.device] // self.largest)
        cached = max(least, min(most, tangent)) // self.largest
        fitting = limit // (LIVE_RESULTS * self.largest) - 1
        if self.budget is not None:  # products copy the tangents of the parameters
            fitting = min(fitting, limit // (tangent + LIVE_RESULTS * self.largest))
        tangents = max(1, min(max(FEWEST_TANGENTS, enough, cached), fitting))
        # Blocks of one size: the rest of an uneven division costs a pass of its own.
        tangents = -(-rank // -(-rank // tangents))
        if self.chunk_size is not None:
            return self.chunk_size, tangents
        cached = max(least, min(most, tangents * tangent)) // (tangents * self.largest)
        fitting = limit // self.forward_bytes(tangents)
        return max(1, min(cached, fitting)), tangents

    def forward_bytes(self, tangents: int) -> int:
        """Return bytes of the intermediate results of one example."""
        return LIVE_RESULTS * (tangents + 1) * self.largest


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
        the part of JD⁻¹Jᵀ outside the basis at each position, `(B·S, c, c)`; see
        `split_gradients`
    outside_span : torch.Tensor, optional
        the part of JJᵀ outside a span of gradients, `(B·S, L, c, c)` at each of its
        levels, see `Span`
    outputs : torch.Tensor, optional
        `(B·S, c)`, where features and residuals are of c of the C outputs: which ones
    """

    f: torch.Tensor
    phi: torch.Tensor
    positions: Positions
    residual: torch.Tensor | None = None
    outside_span: torch.Tensor | None = None
    outputs: torch.Tensor | None = None

    def is_finite(self) -> torch.Tensor:
        """Return whether no number is NaN or infinite, without waiting for the
        device."""
        tensors = (self.f, self.phi, self.residual, self.outside_span)
        flags = [torch.isfinite(t).all() for t in tensors if t is not None]
        return torch.stack(flags).all()


# Which outputs


def largest(f: torch.Tensor, n: int) -> torch.Tensor:
    """Return where the n largest of the last dimension are, the largest first.

    Stable: equal outputs, batched or not, are always taken in the same order.
    """
    return f.detach().argsort(dim=-1, descending=True, stable=True)[..., :n]


def unit_vectors(
    f: torch.Tensor,
    numbers: torch.Tensor,
    positions: Positions,
    top: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return cotangents `(o, O)` that select outputs of one example.

    Parameters
    ----------
    f : torch.Tensor
        its outputs `(O,)`
    numbers : torch.Tensor
        `(o,)`; all outputs are numbered in the model's order, the `top` largest ones
        position by position
    dtype : torch.dtype
        in which outputs are compared
    """
    outputs = torch.arange(f.shape[0], device=f.device)
    if top is not None:
        at = positions.rows(f.to(dtype).unsqueeze(0))  # (S, C)
        of = positions.rows(outputs.unsqueeze(0))
        numbers = of.gather(1, largest(at, top)).flatten()[numbers]
    # One-hot vectors, without a look at the values: f may be one of many.
    return (numbers.unsqueeze(1) == outputs).to(f.dtype)


# Single rows


def pull_back(
    fn: ModelFunction,
    x: Any,
    cotangents: Callable[[torch.Tensor], torch.Tensor],
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uᵀJ(x), summed over the batch, for several u and one forward pass.

    Parameters
    ----------
    x : Any
        inputs of B examples
    cotangents : callable
        u, `(n, B, O)`, from the outputs `(B, O)`

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
    J = torch.stack(rows) if rows else f.new_zeros(0, fn.n_params, dtype=dtype)
    f = f.to(dtype)
    return (f, J) if create_graph else (f.detach(), J.detach())


def rows_by_vmap(
    fn: ModelFunction,
    batch: Batch,
    examples: torch.Tensor,
    cotangents: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Return cᵀJ(x) for `cotangents[m]` (O,) at example `examples[m]` of the batch.

    The rows are written to `out` (m, P), which is returned: put together elsewhere they
    would exist twice.
    """
    selected, params = batch.take(examples), fn.parameters()

    def row(leaves: list[torch.Tensor], cotangent: torch.Tensor) -> Tangents:
        single = selected.with_leaves([v.unsqueeze(0) for v in leaves], 1).inputs

        def combined(params: Tangents) -> torch.Tensor:
            f = fn(params, single).flatten()
            return (f * cotangent.to(f.dtype)).sum()

        return grad(combined)(params)

    gradients = vmap(row, randomness="same")(list(selected.leaves), cotangents)
    for piece, gradient in zip(fn.split(out), gradients, strict=True):
        piece.copy_(gradient)  # flattened, those that are transposed are copied twice
    return out


def rows_by_loop(
    fn: ModelFunction,
    batch: Batch,
    examples: torch.Tensor,
    cotangents: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Return the same as `rows_by_vmap`, by one backward pass per row.

    Rows of one example that stand together share its forward pass.
    """
    start = 0
    for example, group in itertools.groupby(examples.tolist()):
        stop = start + len(list(group))
        its = cotangents[start:stop].unsqueeze(1)
        one = batch.take(slice(example, example + 1)).inputs
        out[start:stop] = pull_back(fn, one, lambda _, its=its: its)[1]
        start = stop
    return out


# All rows, or their products with V: reverse mode


def jacobians_by_vmap(
    fn: ModelFunction,
    batch: Batch,
    cotangents: Cotangents,
    tangents: Tangents | None = None,
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs (B, O) and cᵀJ(x) (B, o, P) for cotangents (o, O) of every
    example, or with tangents cᵀJ(x)V (B, o, K), by one backward pass of all examples.

    Each parameter's gradients are multiplied by its part of V as they are: the copy
    into one matrix would cost more than the products.
    """
    params, dtype = fn.parameters(), fn.dtype

    def single(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        one = batch.with_leaves([v.unsqueeze(0) for v in leaves], 1).inputs
        f, pull = vjp(lambda p: fn(p, one).flatten(), params)[:2]
        (grads,) = vmap(pull)(cotangents(f).to(f))
        pieces = [g.flatten(1).to(dtype) for g in grads]
        rows = torch.cat(pieces, 1) if tangents is None else _times(pieces, tangents)
        return f.to(dtype), rows

    with torch.set_grad_enabled(create_graph):
        return vmap(single, randomness="same")(list(batch.leaves))


def jacobians_by_loop(
    fn: ModelFunction,
    batch: Batch,
    cotangents: Cotangents,
    tangents: Tangents | None = None,
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same, by one backward pass per cotangent and example."""
    outputs, results = [], []
    for b in range(batch.size):
        one = batch.take(slice(b, b + 1)).inputs
        f, J = pull_back(fn, one, lambda f: cotangents(f[0]).unsqueeze(1), create_graph)
        if tangents is not None:
            J = _times(J.split(fn.numels(), dim=-1), tangents)
        outputs.append(f)
        results.append(J)
    return torch.cat(outputs), torch.stack(results)


def _times(
    gradients: list[torch.Tensor] | tuple[torch.Tensor, ...], tangents: Tangents
) -> torch.Tensor:
    """Return Σ_l g_l v_lᵀ `(o, K)` of gradients `(o, p_l)` and parts of V
    `(K, *shape)`."""
    total = None
    with full_precision(tangents[0].device):
        for g, v in zip(gradients, tangents, strict=True):
            product = F.linear(g, v.flatten(1).to(g))
            total = product if total is None else total + product
    assert total is not None  # there is at least one parameter
    return total


# Features without rows: forward mode, and what replaces it


def features_by_forward(
    fn: ModelFunction, batch: Batch, tangents: Tangents, create_graph: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs (B, O) and features (B, O, K) by one batched forward pass.

    The primal is not batched over the tangents, so it is computed once.
    """
    params, dtype, x = fn.parameters(), fn.dtype, batch.inputs

    def push(tangent: Tangents) -> tuple[torch.Tensor, torch.Tensor]:
        f, column = jvp(lambda *p: fn(p, x).flatten(1), params, tangent)[:2]
        return f, column

    out_dims: Any = (None, -1)
    with torch.set_grad_enabled(create_graph):
        tangents = _like(tangents, params)
        f, phi = vmap(push, out_dims=out_dims, randomness="same")(tangents)
        return f.to(dtype), phi.to(dtype)


def features_by_forward_loop(
    fn: ModelFunction, batch: Batch, tangents: Tangents, create_graph: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same, one tangent after the other, for models that `vmap` refuses."""
    params, dtype, x, columns = fn.parameters(), fn.dtype, batch.inputs, []
    f = None
    with torch.set_grad_enabled(create_graph):
        for tangent in zip(*_like(tangents, params), strict=True):
            f, column = jvp(lambda *p: fn(p, x).flatten(1), params, tangent)[:2]
            columns.append(column.to(dtype))
        assert f is not None  # there is at least one tangent
        return f.to(dtype), torch.stack(columns, dim=-1)


def features_by_double_vjp(
    fn: ModelFunction, batch: Batch, tangents: Tangents, create_graph: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as the derivative of u ↦ uᵀJ, which is linear in u, at v_k."""
    dtype, columns = fn.dtype, []
    with torch.enable_grad():
        params = tuple([p.requires_grad_() for p in fn.parameters()])
        f = fn(params, batch.inputs).flatten(1)
        u = torch.zeros_like(f, requires_grad=True)
        # uᵀJ (P,), with the graph that leads back to u
        pulled = torch.autograd.grad(
            f, params, u, create_graph=True, materialize_grads=True
        )
        used = [i for i, g in enumerate(pulled) if g.requires_grad]
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


def _like(tangents: Tangents, params: tuple[torch.Tensor, ...]) -> Tangents:
    """Return tangents in the dtypes of the parameters, which forward mode asks for."""
    pairs = zip(tangents, params, strict=True)
    return tuple([t.to(device=p.device, dtype=p.dtype) for t, p in pairs])


# What lies outside the basis, from rows that may be too many at once


def fill_residuals(
    rows_of: Callable[[torch.Tensor], torch.Tensor],
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    numbers: torch.Tensor,
    at_once: int,
    phi: torch.Tensor,
    products: torch.Tensor,
) -> None:
    """Fill in features (b·S, c, K) and products (n, b·S, c, c) of the rests.

    Parameters
    ----------
    rows_of : callable
        rows (b, o, P) of b examples for numbers (o,) of outputs
    split : callable
        makes features and n rests of rows (..., P), see `split_gradients`
    numbers : torch.Tensor
        of the outputs at each position, (S, c)
    at_once : int
        rows of one example that may be in memory; b is one if these are not all
    """
    S, c = numbers.shape
    if at_once >= c:
        for start in range(0, S, at_once // c):
            some = numbers[start : start + at_once // c]
            rows = rows_of(some.flatten()).unflatten(1, (-1, c)).flatten(0, 1)
            stop = start + len(rows)
            phi[start:stop], *rests = split(rows)
            for product, rest in zip(products, rests, strict=True):
                product[start:stop] = accurate_product(rest, rest)
        return
    # Not even one position: blocks of its outputs, no more than two of them in memory.
    half = max(1, at_once // 2)
    for s in range(S):
        for i in range(0, c, half):
            phi[s, i : i + half], *lefts = split(rows_of(numbers[s, i : i + half])[0])
            for j in range(0, i + 1, half):
                rights = lefts
                if j < i:
                    rights = split(rows_of(numbers[s, j : j + half])[0])[1:]
                for product, left, right in zip(products, lefts, rights, strict=True):
                    tile = accurate_product(left, right)
                    product[s, i : i + half, j : j + half] = tile
                    product[s, j : j + half, i : i + half] = tile.mT
