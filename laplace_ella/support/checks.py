"""Check arguments and results; each error says what was expected and what came."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch

from laplace_ella.support.batches import has_values

E = TypeVar("E", bound=Enum)


def member(enum: type[E], name: str, value: Any) -> E:
    """Return the member of a str enum, or raise an error that lists the valid values.

    A member of another str enum, laplace-torch's for example, stands for its value.
    """
    try:
        return enum(value.value if isinstance(value, Enum) else value)
    except ValueError:
        raise ValueError(
            f"{name} must be one of {[m.value for m in enum]}, got {value!r}."
        ) from None


def positive_int(name: str, value: Any, or_: str = "") -> int:
    """Return the integer; the error says what else (`or_`) may stand there."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        other = f" or {or_}" if or_ else ""
        raise ValueError(f"{name} must be a positive integer{other}, got {value!r}.")
    return int(value)


def check_positive(name: str, value: Any) -> None:
    """Refuse numbers that are not positive and finite; Laplace checks the type."""
    if isinstance(value, torch.Tensor):
        # A tensor that is being optimised is the exponential of something.
        if value.requires_grad or not has_values(value) or value.is_complex():
            return
        good = bool((torch.isfinite(value) & (value > 0)).all())
        shown = f"values from {value.min():.3g} to {value.max():.3g}" * (not good)
    elif isinstance(value, (int, float)):
        good, shown = math.isfinite(value) and value > 0, str(value)
    else:
        return
    if not good:
        raise ValueError(f"{name} must be positive and finite, got {shown}.")


def check_generator(generator: torch.Generator | None, device: torch.device) -> None:
    """Refuse a generator that does not draw where the model is."""
    place = getattr(generator, "device", type(generator).__name__)
    if generator is not None and getattr(place, "type", None) != device.type:
        raise ValueError(
            f"generator must be a torch.Generator of the model's device, got {place}; "
            f"the model is on {device}."
        )


def check_finite(flags: list[torch.Tensor], what: str, where: str) -> None:
    """Refuse NaN, by the flags of all batches at once, so that none waits."""
    if not flags or not has_values(flags[0]):
        return
    bad = torch.stack(flags).logical_not().nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"NaN or infinite {what} {where}, first in batch {bad[0]} (of "
            f"{len(flags)}, counted from 0). Check the inputs of that batch and the "
            "model's weights."
        )


def unknown_argument(owner: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the error of a keyword argument that nobody knows, naming the nearest."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, 1)
    remedy = f"Did you mean {near[0]!r}?" if near else f"It has {known}."
    return TypeError(f"{owner} has no argument {name!r}. {remedy}")


def refuse_arguments(owner: str, function: Callable[..., Any], names: Any) -> None:
    """Refuse keyword arguments that a function would ignore."""
    parameters = inspect.signature(function).parameters.values()
    known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}
    for name in names:
        raise unknown_argument(owner, name, known)
