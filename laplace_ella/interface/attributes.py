"""Attributes that read frozen values, so that nothing is kept twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from laplace_ella.posterior.fit import Fit

__all__ = ["from_fit", "setting"]


def setting(holder: str) -> Any:
    """An attribute that is a field of the frozen value `holder` of its object."""
    return _Setting(holder)


def from_fit(read: Callable[[Fit], Any]) -> Any:
    """An attribute of Laplace's interface that a fit determines, and nobody else."""
    return _FromFit(read)


class _Setting:
    """An attribute that is a field of one of the frozen values a posterior holds.

    Setting it replaces the value, which checks it; it takes effect at the next use.
    """

    def __init__(self, holder: str) -> None:
        self.holder = holder

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, la: Any, owner: type | None = None) -> Any:
        return self if la is None else getattr(getattr(la, self.holder), self.name)

    def __set__(self, la: Any, value: Any) -> None:
        changed = replace(getattr(la, self.holder), **{self.name: value})
        setattr(la, self.holder, changed)


class _FromFit:
    """An attribute of Laplace's interface that a fit determines, and nobody else.

    Before a fit it has the value that laplace-torch's constructor gave it.
    """

    def __init__(self, read: Callable[[Fit], Any]) -> None:
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, la: Any, owner: type | None = None) -> Any:
        if la is None:
            return self
        if la.fitted is not None:
            return self.read(la.fitted)
        if self.name not in la.__dict__:
            raise AttributeError(self.name)
        return la.__dict__[self.name]

    def __set__(self, la: Any, value: Any) -> None:
        if la.fitted is not None:
            raise AttributeError(
                f"{self.name} is what the fit found and cannot be set. Use fit(), "
                "fit_basis(), fit_features(), truncate() or load_state_dict()."
            )
        la.__dict__[self.name] = value
