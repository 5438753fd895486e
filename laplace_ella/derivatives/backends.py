"""What the curvature backends of laplace-torch mean for ELLA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laplace import curvature

from laplace_ella.derivatives.libraries import LIBRARIES, require
from laplace_ella.derivatives.rows import RowMode

__all__ = ["resolve"]

#: Backends whose curvature is the GGN, and how their gradients are taken.
ROW_MODES = {
    "CurvlinopsGGN": RowMode.AUTO,
    "BackPackGGN": RowMode.BACKPACK,
    "AsdlGGN": RowMode.ASDL,
}

#: What a backend computes instead of the GGN, by the end of its name.
OTHER_CURVATURES = {"EF": "the empirical Fisher", "Hessian": "the Hessian"}


def resolve(
    backend: Any,
    backend_kwargs: Mapping[str, Any] | None,
    asdl_fisher_kwargs: Mapping[str, Any] | None,
    row_mode: RowMode,
    stochastic: bool | int,
) -> tuple[RowMode, bool | int]:
    """The row mode and `stochastic` that a backend and its arguments ask for.

    Anything that would have no effect, or another than it says, is refused.
    """
    asked = RowMode.AUTO if backend is None else _row_mode(backend)
    if backend is not None and asked is not RowMode.AUTO:
        if row_mode not in (RowMode.AUTO, asked):
            raise ValueError(
                f"backend={backend.__name__} takes rows by {asked.value!r}, row_mode "
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
    return row_mode, _stochastic(dict(backend_kwargs or {}), stochastic)


def _row_mode(backend: Any) -> RowMode:
    """How a backend takes gradients; subclasses count as what they are made from."""
    accepted = f"{', '.join(ROW_MODES)} or None"
    if not isinstance(backend, type):
        raise TypeError(
            f"backend must be a class, {accepted}, got {backend!r}. Import it from "
            "laplace.curvature."
        )
    for name, mode in ROW_MODES.items():
        known = getattr(curvature, name, None)  # missing without its package
        if known is not None and issubclass(backend, known):
            return mode
    for end, other in OTHER_CURVATURES.items():
        if backend.__name__.endswith(end):
            ours = f"{backend.__name__.removesuffix(end)}GGN"
            use = ours if ours in ROW_MODES else accepted
            raise ValueError(
                f"backend={backend.__name__} stands for {other}; ELLA's curvature is "
                f"the GGN. Use backend={use}."
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
