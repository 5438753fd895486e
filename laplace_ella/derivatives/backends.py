"""What the curvature backends of laplace-torch mean for ELLA, and rows by them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
from laplace import curvature

from laplace_ella.derivatives.jacobians import pull_back, rows_by_loop, rows_by_vmap
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.modes import RowMode
from laplace_ella.errors import UnsupportedLayerError
from laplace_ella.support.batches import Batch, has_values
from laplace_ella.support.preserve import full_precision

#: A parameter's gradient this much smaller than the whole row may be rounding error.
NEGLIGIBLE = 1e-3


class Curvature(str, Enum):
    """What stands for the Hessian of the loss."""

    GGN = "ggn"
    """Σ J(x)ᵀΛ(x)J(x), from the outputs alone: C or K passes per example, or as many
    as `stochastic` says."""

    EMPIRICAL_FISHER = "empirical_fisher"
    """Σ ggᵀ, g the gradient of the loss of one example: one backward pass each."""


#: How the backends that are accepted take gradients, and what they make of them.
BACKENDS = {
    "CurvlinopsGGN": (RowMode.AUTO, Curvature.GGN),
    "BackPackGGN": (RowMode.BACKPACK, Curvature.GGN),
    "AsdlGGN": (RowMode.ASDL, Curvature.GGN),
    "CurvlinopsEF": (RowMode.AUTO, Curvature.EMPIRICAL_FISHER),
    "BackPackEF": (RowMode.BACKPACK, Curvature.EMPIRICAL_FISHER),
    "AsdlEF": (RowMode.ASDL, Curvature.EMPIRICAL_FISHER),
}

#: The backend whose Jacobians are asked for by a row mode, the package's name, what is
#: imported and what is installed. The distribution "asdl" is another project.
BACKEND_OF = {
    RowMode.BACKPACK: ("BackPackGGN", "BackPACK", "backpack", "backpack-for-pytorch"),
    RowMode.ASDL: ("AsdlGGN", "ASDL", "asdl", "asdfghjkl"),
}


def resolve(
    backend: Any,
    backend_kwargs: Mapping[str, Any] | None,
    asdl_fisher_kwargs: Mapping[str, Any] | None,
    row_mode: RowMode,
    stochastic: bool | int,
) -> tuple[type | None, RowMode, Curvature, bool | int]:
    """Return what a backend and its arguments ask for: its class, also where an
    instance was given, how rows are taken, the kind of curvature, and sampled
    cotangents per example instead of the exact GGN. What is asked for by the
    posterior's own arguments, `row_mode` and `stochastic`, comes first.
    """
    kwargs = dict(backend_kwargs or {})
    if isinstance(backend, curvature.CurvatureInterface):
        # `la.backend` is one: clients copy a posterior attribute by attribute.
        kwargs.setdefault("stochastic", getattr(backend, "stochastic", False))
        backend = type(backend)
    kind, name = Curvature.GGN, ""
    if backend is not None:
        (asked, kind), name = _meaning(backend), backend.__name__
        row_mode = asked if row_mode is RowMode.AUTO else row_mode
    if row_mode in BACKEND_OF:
        _, library, module, distribution = BACKEND_OF[row_mode]
        try:
            __import__(module)
        except ImportError as error:
            raise ImportError(
                f"Rows by {library} need the package {distribution!r}: pip "
                f"install {distribution}, or use backend=None."
            ) from error
    given = kwargs.pop("stochastic", False)
    ignored = sorted({*kwargs, *(asdl_fisher_kwargs or {})})
    if ignored:
        raise ValueError(
            "backend_kwargs may only have 'stochastic', and asdl_fisher_kwargs, which "
            f"are for a Fisher that ELLA does not use, nothing; got {ignored}. "
            "Everything else is an argument of the posterior itself."
        )
    stochastic = stochastic or given or False
    if stochastic and kind is Curvature.EMPIRICAL_FISHER:
        raise ValueError(
            f"stochastic={stochastic!r} samples targets from the model, backend={name} "
            "takes those of the data. Leave stochastic out, or use backend="
            f"{name.removesuffix('EF')}GGN."
        )
    return backend, row_mode, kind, stochastic


def _meaning(backend: Any) -> tuple[RowMode, Curvature]:
    """Return how a backend takes gradients and what it makes of them; subclasses count
    as what they are made from."""
    for name, meaning in BACKENDS.items():
        known = getattr(curvature, name, None)  # missing without its package
        if known and isinstance(backend, type) and issubclass(backend, known):
            return meaning
    raise ValueError(
        f"backend must be a class of laplace.curvature, {', '.join(BACKENDS)}, or "
        f"None, got {backend!r}. ELLA's curvature is the GGN or the empirical Fisher, "
        "not the Hessian."
    )


# Rows


def rows_by_backend(
    mode: RowMode,
    fn: ModelFunction,
    batch: Batch,
    cotangents: torch.Tensor,
    directions: torch.Tensor | None = None,
    create_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `rows_by_vmap`, from the Jacobians of laplace-torch.

    Its backends leave hooks and attributes on the model that they work on, which is
    therefore a copy. What has to be differentiated in the inputs is left to autograd.
    """
    if create_graph:
        return rows_by_loop(fn, batch, cotangents, directions, create_graph)
    model = copy.deepcopy(fn.model).requires_grad_(True)
    model = model if fn.asked_dtype is None else model.to(fn.asked_dtype)
    model.output_size = cotangents.shape[-1]  # pyright: ignore[reportArgumentType]
    backend = getattr(curvature, BACKEND_OF[mode][0])(model, "classification")
    with torch.enable_grad():
        J, f = (t.detach() for t in backend.jacobians(batch.inputs))  # (B, O, all)
    named = dict(model.named_parameters())
    sizes = [p.numel() for p in named.values()]
    if J.shape[-1] != sum(sizes):
        raise ValueError(f"got gradients of {J.shape[-1]} of {sum(sizes)} parameters")
    columns = dict(zip(named, J.split(sizes, dim=-1), strict=True))
    J = torch.cat([columns[name] for name in fn.names], dim=-1).to(cotangents)
    with full_precision(J.device):
        rows = cotangents @ J
        return f.to(J), rows if directions is None else rows @ directions.T


#: Ways to compute rows, by their modes.
ROWS = {
    RowMode.VMAP: rows_by_vmap,
    RowMode.LOOP: rows_by_loop,
    RowMode.BACKPACK: partial(rows_by_backend, RowMode.BACKPACK),
    RowMode.ASDL: partial(rows_by_backend, RowMode.ASDL),
}


def check_rows(mode: RowMode, fn: ModelFunction, batch: Batch, n_outputs: int) -> None:
    """Compare rows with autograd's, and refuse layers on which they differ.

    Neither package tells reliably what it does not support: a layer may be skipped, or
    give wrong numbers. Two rows in one pass, because with one a layer that confuses the
    examples goes unnoticed; every output is in both, so that no layer is left out.
    """
    refusal = (
        f"{BACKEND_OF[mode][1]} does not support %s as this model uses it: %s. Use "
        "backend=CurvlinopsGGN or None (CurvlinopsEF for the empirical Fisher), which "
        "work for every layer."
    )
    two = batch.take(torch.tensor([0, batch.size - 1], device=fn.device))
    slope = torch.linspace(1, 2, n_outputs, device=fn.device, dtype=fn.dtype)
    combinations = torch.stack([slope, slope.flip(0) - 3 * slope])
    try:
        _, rows = rows_by_backend(mode, fn, two, combinations.unsqueeze(1))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        said = "one of the layers", f"{type(error).__name__}: {error}"
        raise UnsupportedLayerError(refusal % said) from error
    if not has_values(rows):
        return
    # Both rows from one forward pass: one per example rounds differently, and a unit
    # close to its kink then has another derivative.
    each = torch.diag_embed(combinations.T).movedim(0, -1)  # (2, 2, O)
    gradients = [g.flatten(1).to(fn.dtype) for g in pull_back(fn, two.inputs, each)[1]]
    eps = max([torch.finfo(p.dtype).eps for p in fn.parameters()])
    tolerance = eps ** (1 / 3)  # far above rounding, far below a wrong gradient
    least = NEGLIGIBLE * torch.cat(gradients, 1).norm(dim=1)
    pieces = rows.squeeze(1).split(fn.numels, 1)
    for name, a, e in zip(fn.names, pieces, gradients, strict=True):
        # Not the other way round: a NaN is different.
        if not ((a - e).norm(dim=1) <= tolerance * (e.norm(dim=1) + least)).all():
            owner = name.rpartition(".")[0]
            layer = f"{type(fn.model.get_submodule(owner)).__name__} ({owner!r})"
            said = layer, f"the gradient of {name!r} differs from autograd's"
            raise UnsupportedLayerError(refusal % said)
