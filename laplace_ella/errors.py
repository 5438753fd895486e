"""Exceptions and warnings of the package, each with the remedy in its message."""

from __future__ import annotations

__all__ = [
    "BorderWarning",
    "NotFittedError",
    "NumericalWarning",
    "RankWarning",
    "UnsupportedLayerError",
]


class NotFittedError(AttributeError, RuntimeError):
    """A posterior was asked for before `fit()` or `load_state_dict()`."""


class UnsupportedLayerError(RuntimeError):
    """A backend has no, or wrong, gradients for a layer; the message names it."""


class RankWarning(UserWarning):
    """The sampled gradients span fewer directions than were asked for."""


class BorderWarning(UserWarning):
    """A search ended at the border of its range; the message has the value."""


class NumericalWarning(UserWarning):
    """A matrix was regularised to be factorised; the message has the amount."""
