"""The user's function, module:function, and what it returns."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ARGUMENTS", "COMPARE_OPTIONS", "UsageError", "load_target"]

ARGUMENTS = (
    "model",
    "likelihood",
    "train_loader",
    "test_loader",
    "val_loader",
    "ood_loaders",
    "methods",
)

#: Arguments of `compare` that the command line has options for.
COMPARE_OPTIONS = (
    "methods",
    "links",
    "n_samples",
    "seeds",
    "tune",
    "prior_precision",
    "sigma_noise",
    "grid_size",
    "n_steps",
    "n_bins",
    "reference",
    "memory_budget",
    "cache",
    "dict_key_x",
    "dict_key_y",
    "output_layout",
)


class UsageError(Exception):
    """A mistake in the call; shown without a stack trace."""


def load_target(target: str, required: Sequence[str] = ARGUMENTS[:4]) -> dict[str, Any]:
    """Call module:function and return its result as arguments of `compare`."""
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(
            f"TARGET must be module:function, got {target!r}. "
            "Example: laplace-ella compare mymodule:setup"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:  # of a parent package
        found = None
    if found is None:
        raise UsageError(
            f"No module {module_name!r} in {os.getcwd()} or on the Python path."
        )
    module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [
            n for n in vars(module) if callable(getattr(module, n)) and n[0] != "_"
        ]
        raise UsageError(
            f"Module {module_name!r} has no function {function_name!r}. "
            f"It has: {', '.join(names) or 'none'}."
        )
    return as_arguments(function(), target, required)


def as_arguments(value: Any, target: str, required: Sequence[str]) -> dict[str, Any]:
    """A dict of arguments from what the user's function returned."""
    if isinstance(value, (tuple, list)) and len(value) <= len(ARGUMENTS):
        value = dict(zip(ARGUMENTS, value, strict=False))
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{target} must return a dict or a tuple ({', '.join(ARGUMENTS[:5])}, …), "
            f"got {type(value).__name__}."
        )
    missing = [name for name in required if value.get(name) is None]
    if missing:
        raise UsageError(
            f"{target} must return {', '.join(required)}; missing: "
            f"{', '.join(missing)}."
        )
    known = list(dict.fromkeys((*ARGUMENTS, *COMPARE_OPTIONS)))
    unknown = [name for name in value if name not in known]
    if unknown:
        raise UsageError(
            f"{target} returned {unknown[0]!r}, which is no argument of compare; those "
            f"are {', '.join(known)}."
        )
    return dict(value)
