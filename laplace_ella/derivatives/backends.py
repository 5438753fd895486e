"""What the curvature backends of laplace-torch mean for ELLA."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from laplace import curvature

from laplace_ella.derivatives.libraries import LIBRARIES, require
from laplace_ella.derivatives.rows import RowMode

__all__ = ["Curvature", "Request", "resolve"]

logger = logging.getLogger("laplace_ella")


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


@dataclass(frozen=True)
class Request:
    """What a backend and its arguments ask for.

    Attributes
    ----------
    backend : type, optional
        the class, also where an instance was given
    row_mode : RowMode
    curvature : Curvature
    stochastic : bool or int
        sampled cotangents per example, instead of the exact GGN
    """

    backend: type | None
    row_mode: RowMode
    curvature: Curvature
    stochastic: bool | int


def resolve(
    backend: Any,
    backend_kwargs: Mapping[str, Any] | None,
    asdl_fisher_kwargs: Mapping[str, Any] | None,
    row_mode: RowMode,
    stochastic: bool | int,
    model: Any = None,
) -> Request:
    """What a backend and its arguments ask of the posterior of `model`.

    Anything that would have no effect, or another than it says, is refused.
    """
    kwargs = dict(backend_kwargs or {})
    if isinstance(backend, curvature.CurvatureInterface):
        backend, kwargs = _class_of(backend, kwargs, model)
    asked, kind, name = RowMode.AUTO, Curvature.GGN, ""
    if backend is not None:
        asked, kind = _meaning(backend)
        name = backend.__name__
    if asked is not RowMode.AUTO:
        if row_mode not in (RowMode.AUTO, asked):
            raise ValueError(
                f"backend={name} takes rows by {asked.value!r}, row_mode "
                f"asks for {row_mode.value!r}. Leave one of them out."
            )
        row_mode = asked
    if row_mode in LIBRARIES:
        require(LIBRARIES[row_mode])
    if asdl_fisher_kwargs:
        raise ValueError(
            f"asdl_fisher_kwargs={dict(asdl_fisher_kwargs)} are for ASDL's Fisher, "
            "which ELLA does not use. Leave them out."
        )
    stochastic = _stochastic(kwargs, stochastic)
    if stochastic and kind is Curvature.EMPIRICAL_FISHER:
        raise ValueError(
            f"stochastic={stochastic!r} samples targets from the model, backend={name} "
            "takes those of the data. Leave stochastic out, or use backend="
            f"{name.removesuffix('EF')}GGN."
        )
    return Request(backend, row_mode, kind, stochastic)


def _class_of(
    backend: curvature.CurvatureInterface, kwargs: dict[str, Any], model: Any
) -> tuple[type, dict[str, Any]]:
    """The class of an instance, and the arguments that it was made with.

    `la.backend` is one: clients that copy a posterior, attribute by attribute, pass it
    on with the model it was made for.
    """
    if model is not None and backend.model is not model:
        logger.info(
            "backend is a %s of another model; its class alone is used",
            type(backend).__name__,
        )
    stochastic = getattr(backend, "stochastic", False)  # GGN backends have it
    if stochastic:
        kwargs = {"stochastic": stochastic, **kwargs}
    return type(backend), kwargs


def _meaning(backend: Any) -> tuple[RowMode, Curvature]:
    """How a backend takes gradients and what it makes of them; subclasses count as
    what they are made from."""
    accepted = f"{', '.join(BACKENDS)} or None"
    if not isinstance(backend, type):
        raise TypeError(
            f"backend must be a class, {accepted}, got {backend!r}. Import it from "
            "laplace.curvature."
        )
    for name, meaning in BACKENDS.items():
        known = getattr(curvature, name, None)  # missing without its package
        if known is not None and issubclass(backend, known):
            return meaning
    if backend.__name__.endswith("Hessian"):
        ours = f"{backend.__name__.removesuffix('Hessian')}GGN"
        raise ValueError(
            f"backend={backend.__name__} stands for the Hessian; ELLA's curvature is "
            f"the GGN. Use backend={ours if ours in BACKENDS else accepted}."
        )
    raise ValueError(f"backend must be {accepted}, got {backend.__name__}.")


def _stochastic(kwargs: dict[str, Any], stochastic: bool | int) -> bool | int:
    """`stochastic`, which GGN backends take as an argument of their own."""
    asked = kwargs.pop("stochastic", None)
    if kwargs:
        raise ValueError(
            "backend_kwargs may only have 'stochastic', got "
            f"{sorted(kwargs)} as well. Everything else is an argument of the "
            "posterior itself."
        )
    if asked is None:
        return stochastic
    if not stochastic:
        return asked
    if asked is True or asked == stochastic:  # a number of samples says more
        return stochastic
    raise ValueError(
        f"backend_kwargs has stochastic={asked!r}, the posterior stochastic="
        f"{stochastic!r}. Leave one of them out."
    )
