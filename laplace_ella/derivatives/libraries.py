"""Rows of the Jacobian by the batch gradients of BackPACK or ASDL.

Both libraries turn the input of a layer and the gradient at its output into the
gradients of its parameters, one per example. They would put hooks and attributes on the
model; here they get stand-ins that share its weights instead. The model itself has
plain forward hooks while it runs, and none afterwards.

Neither library tells reliably what it does not support: a layer may be skipped, or
give wrong numbers. So `check_rows` compares with autograd before rows are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.rows import RowMode, empty_rows, pull_back
from laplace_ella.errors import UnsupportedLayerError
from laplace_ella.support.batches import Batch, has_values

__all__ = ["LIBRARIES", "Library", "check_rows", "require", "rows_by_backend"]

#: A parameter's gradient this much smaller than the whole row may be rounding error.
NEGLIGIBLE = 1e-3


@dataclass(frozen=True)
class _Layer:
    """A module that holds uncertain parameters, and what the libraries work on."""

    name: str
    module: nn.Module
    stand_in: nn.Module
    uncertain: dict[str, int]
    """Own name of each uncertain parameter, and its place among all of them."""

    def __str__(self) -> str:
        kind = type(self.module).__name__
        return f"{kind} ({self.name!r})" if self.name else kind


@dataclass(frozen=True)
class _Call:
    """One use of a layer in a forward pass."""

    layer: _Layer
    input: Any
    output: Any
    edge: GradientEdge
    """Where the gradient at the output arrives, also if that is changed in place."""


def batch_gradients_by_backpack(
    call: _Call, grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Gradients of a layer's parameters by BackPACK's BatchGrad, `(m, *shape)` each."""
    from backpack.extensions import BatchGrad

    module: Any = call.layer.stand_in
    module.input0, module.output = call.input, call.output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a skipped layer is an error of ours
        no_input_gradients: Any = ()
        BatchGrad()(module, no_input_gradients, (grad,))
    del module.input0, module.output
    gradients = {}
    for name in call.layer.uncertain:
        parameter = getattr(module, name)
        if hasattr(parameter, "grad_batch"):
            gradients[name] = parameter.grad_batch
            del parameter.grad_batch
    return gradients


def batch_gradients_by_asdl(call: _Call, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same by the operation that ASDL has for the layer."""
    from asdl.operations import OP_BATCH_GRADS, get_op_class
    from asdl.utils import record_original_requires_grad

    module = call.layer.stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operation_class = get_op_class(module)
    if operation_class is None:
        return {}
    for parameter in module.parameters(recurse=False):
        record_original_requires_grad(parameter)
    output = call.output
    if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)):
        # ASDL recovers the normalised input from it, after any change in place.
        output = module.forward(call.input)
    operation = operation_class(module, [OP_BATCH_GRADS])
    operation.forward_post_process(call.input.detach(), output.detach())
    operation.backward_pre_process(grad)
    return operation.get_result(OP_BATCH_GRADS, default={}) or {}


@dataclass(frozen=True)
class Library:
    """A package that makes batch gradients layer by layer."""

    name: str
    module: str
    """What is imported."""
    distribution: str
    """What is installed."""
    batch_gradients: Callable[[_Call, torch.Tensor], dict[str, torch.Tensor]]


LIBRARIES = {
    RowMode.BACKPACK: Library(
        "BackPACK",
        "backpack.extensions",
        "backpack-for-pytorch",
        batch_gradients_by_backpack,
    ),
    # The distribution called "asdl" is another project.
    RowMode.ASDL: Library(
        "ASDL", "asdl.operations", "asdfghjkl", batch_gradients_by_asdl
    ),
}
"""The ways that are somebody else's, by the mode that asks for them."""


def require(library: Library) -> None:
    """Import a library now, or say how to install it."""
    try:
        __import__(library.module)
    except ImportError as error:
        raise ImportError(
            f"Rows by {library.name} need the package {library.distribution!r}: pip "
            f"install {library.distribution}, or use backend=None."
        ) from error


def rows_by_backend(
    library: Library,
    fn: ModelFunction,
    batch: Batch,
    examples: torch.Tensor,
    cotangents: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """cᵀJ(x) for `cotangents[m]` at example `examples[m]` of the batch, into `out`
    (m, P).

    One forward and one backward pass over the m examples, as `rows_by_vmap` has.
    """
    with torch.enable_grad():
        params = [p.requires_grad_() for p in fn.parameters()]
        layers = list(_layers(fn, params))
        with _recorded(layers) as calls:
            f = fn(params, batch.take(examples).inputs).flatten(1)
        grads = _output_gradients((f * cotangents.to(f)).sum(), calls)
    pieces: list[torch.Tensor | None] = [None] * len(params)
    with torch.no_grad():
        for call, grad in zip(calls, grads, strict=True):
            if grad is None:
                continue
            gradients = _layer_gradients(library, call, grad, len(examples))
            for name, place in call.layer.uncertain.items():
                seen, new = pieces[place], gradients[name]
                pieces[place] = new if seen is None else seen + new
        for part, g in zip(out.split(fn.numels(), dim=1), pieces, strict=True):
            # A layer that was not used has no gradient.
            part.zero_() if g is None else part.copy_(g)
    return out


def check_rows(
    library: Library,
    fn: ModelFunction,
    batch: Batch,
    examples: torch.Tensor,
    n_outputs: int,
) -> None:
    """Compare two rows with autograd's, and refuse layers on which they differ.

    Every output is in both combinations, so that no layer is left out. Two rows in one
    pass, because with one a layer that confuses the examples goes unnoticed.
    """
    two = torch.stack([examples[0], examples[-1]])
    slope = torch.linspace(1, 2, n_outputs, device=two.device)
    combinations = torch.stack([slope, slope.flip(0) - 3 * slope])
    actual = rows_by_backend(library, fn, batch, two, combinations, empty_rows(fn, 2))
    if not has_values(actual):
        return
    # Both rows from one forward pass: one per example rounds differently, and a unit
    # close to its kink then has another derivative.
    each = torch.diag_embed(combinations.T).movedim(0, -1)  # (2, 2, O)
    _, expected = pull_back(fn, batch.take(two).inputs, lambda _: each)
    different = _different(fn, actual, expected)
    if not different:
        return
    owners = {
        place: layer
        for layer in _layers(fn, fn.parameters())
        for place in layer.uncertain.values()
    }
    raise _unsupported(
        library,
        owners[different[0]],
        f"the gradients of {len(different)} of {len(fn.names)} parameters, first "
        f"{fn.names[different[0]]!r}, differ from autograd's",
    )


def _different(
    fn: ModelFunction, actual: torch.Tensor, expected: torch.Tensor
) -> list[int]:
    """Places of the parameters whose gradients are not the same up to rounding."""
    eps = max(torch.finfo(p.dtype).eps for p in fn.parameters())
    tolerance = eps ** (1 / 3)  # far above rounding, far below a wrong gradient
    least = NEGLIGIBLE * expected.norm(dim=1)
    pairs = zip(
        actual.split(fn.numels(), 1), expected.split(fn.numels(), 1), strict=True
    )
    return [
        place
        for place, (a, e) in enumerate(pairs)
        # Not the other way round: a NaN is different.
        if not ((a - e).norm(dim=1) <= tolerance * (e.norm(dim=1) + least)).all()
    ]


def _layers(fn: ModelFunction, params: Sequence[torch.Tensor]) -> Iterator[_Layer]:
    """The modules that hold uncertain parameters, each with its stand-in."""
    named = dict(fn.model.named_parameters())
    # By identity: a tied parameter has several owners and one name.
    places = {id(named[name]): place for place, name in enumerate(fn.names)}
    for name, module in fn.model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        uncertain = {n: places[id(p)] for n, p in own.items() if id(p) in places}
        if uncertain:
            replaced = {
                **module._parameters,  # None where there is no bias
                **{n: p.detach() for n, p in own.items()},
                **{n: params[place] for n, place in uncertain.items()},
            }
            yield _Layer(name, module, _stand_in(module, replaced), uncertain)


def _stand_in(module: nn.Module, params: dict[str, torch.Tensor | None]) -> nn.Module:
    """A module of the same class and settings, with other parameters.

    What is set on it is not set on `module`. Not `copy`, which some classes refuse.
    """
    stand_in = type(module).__new__(type(module))
    stand_in.__dict__.update({**module.__dict__, "_parameters": params})
    return stand_in


@contextmanager
def _recorded(layers: Sequence[_Layer]) -> Iterator[list[_Call]]:
    """Note the calls of the layers in the block; their hooks are gone afterwards."""
    calls: list[_Call] = []
    handles = []

    def hook(layer: _Layer) -> Callable[..., None]:
        def record(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
        ) -> None:
            out = out[0] if isinstance(out, (tuple, list)) else out
            if isinstance(out, torch.Tensor) and out.requires_grad:
                value = next(iter((*args, *kwargs.values())), None)
                calls.append(_Call(layer, value, out, get_gradient_edge(out)))

        return record

    try:
        for layer in layers:
            handle = layer.module.register_forward_hook(
                hook(layer),
                prepend=True,  # a hook of the user's may change the output
                with_kwargs=True,
            )
            handles.append(handle)
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _output_gradients(
    total: torch.Tensor, calls: Sequence[_Call]
) -> Sequence[torch.Tensor | None]:
    """Gradients at the outputs of the calls; None where the total ignores them."""
    if not calls or not total.requires_grad:
        return [None] * len(calls)
    edges = [call.edge for call in calls]
    return torch.autograd.grad(total, edges, allow_unused=True)


def _layer_gradients(
    library: Library, call: _Call, grad: torch.Tensor, m: int
) -> dict[str, torch.Tensor]:
    """Gradients `(m, p)` of every uncertain parameter of a layer, or an error."""
    try:
        gradients = library.batch_gradients(call, grad)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a library raises
        said = f"{type(error).__name__}: {error}".rstrip(". \n")
        raise _unsupported(library, call.layer, said) from error
    missing = call.layer.uncertain.keys() - gradients.keys()
    if missing:
        raise _unsupported(
            library, call.layer, f"it gives no gradients of {sorted(missing)}"
        )
    return {
        name: _by_example(library, call.layer, gradients[name], m)
        for name in call.layer.uncertain
    }


def _by_example(
    library: Library, layer: _Layer, gradient: torch.Tensor, m: int
) -> torch.Tensor:
    """Sum over the positions at which a layer sees one example: (m·t, …) → (m, p)."""
    if len(gradient) % m:
        raise _unsupported(
            library,
            layer,
            f"its first dimension is {len(gradient)} for {m} examples",
        )
    gradient = gradient.flatten(1)
    if len(gradient) == m:
        return gradient
    return gradient.unflatten(0, (m, -1)).sum(1)


def _unsupported(library: Library, layer: _Layer, why: str) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"{library.name} does not support the layer {layer} as this model uses it: "
        f"{why}. Use backend=CurvlinopsGGN or None (CurvlinopsEF for the empirical "
        "Fisher), which work for every layer, or freeze the layer "
        "(requires_grad_(False))."
    )
