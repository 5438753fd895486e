"""By what `compare` recognises results that its cache holds already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from torch import nn

from laplace_ella.comparison.loaders import Survey
from laplace_ella.comparison.methods import Method
from laplace_ella.comparison.provenance import versions
from laplace_ella.comparison.settings import Settings
from laplace_ella.support.fingerprint import digest, model_digest

__all__ = ["method_key", "problem_key"]


def problem_key(
    model: nn.Module,
    surveys: Mapping[str, Survey],
    settings: Settings,
    reference: Method | None,
    memory_budget: int | None,
) -> str:
    """Digest of everything but the method on which a result depends.

    The model with its structure and code; all batches of all loaders; the settings; the
    reference of the KL; the memory that was asked for (ELLA summarises gradients that
    do not fit); device and versions.
    """
    # The list of links decides which rows there are and changes none of them.
    options = {**asdict(settings), "links": None}
    return digest(
        model_digest(model),
        next(model.parameters()).device.type,
        options,
        {name: seen.key for name, seen in surveys.items()},
        None if reference is None else method_key("", reference),
        memory_budget,
        versions(),
    )


def method_key(problem: str, method: Method) -> str:
    """The key of a method's rows. Its name is not in it: renaming keeps results."""
    spec = {k: v for k, v in vars(method).items() if k not in ("name", "about")}
    return digest(problem, spec)
