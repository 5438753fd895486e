"""Exceptions and warnings of the package, each with the remedy in its message."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "BorderWarning",
    "CheckpointWarning",
    "InsufficientMemoryError",
    "NotDifferentiableError",
    "NotFittedError",
    "NumericalWarning",
    "OtherProcessError",
    "RankWarning",
    "SoftmaxWarning",
    "UnsupportedLayerError",
    "warn_caller",
]


class NotFittedError(AttributeError, RuntimeError):
    """A posterior was asked for before `fit()` or `load_state_dict()`."""


class UnsupportedLayerError(RuntimeError):
    """A backend has no, or wrong, gradients for a layer; the message names it."""


class NotDifferentiableError(RuntimeError):
    """No way to differentiate the model works; the message has what each one said.

    Parameters
    ----------
    failures : mapping of str to Exception
        what each way raised, by its name
    """

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self.failures = dict(failures)
        super().__init__(
            f"The model could not be differentiated. {self.said}. Options: another "
            "feature_mode (forward, reverse, double_vjp) or row_mode (vmap, loop), "
            "freezing the layers with the unsupported operator "
            "(requires_grad_(False)), or subset_of_weights='last_layer'."
        )

    @property
    def said(self) -> str:
        """The first line of every failure."""
        return "; ".join(
            f"{name}: {_first_line(error)}" for name, error in self.failures.items()
        )

    def __reduce__(self) -> tuple[type, tuple[dict[str, Exception]]]:
        return type(self), (self.failures,)


def _first_line(error: Exception) -> str:
    if isinstance(error, NotDifferentiableError):
        return error.said
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class InsufficientMemoryError(MemoryError):
    """The work cannot fit; the message says what is needed, there, and changeable."""


class OtherProcessError(RuntimeError):
    """Work of several processes ended because of another one; the message has its rank
    and what it said."""


class RankWarning(UserWarning):
    """The sampled gradients span fewer directions than were asked for."""


class BorderWarning(UserWarning):
    """A search ended at the border of its range; the message has the value."""


class CheckpointWarning(UserWarning):
    """The progress of a fit could not be saved, or could not be used as it is; the
    message has the cause.

    Examples
    --------
    >>> import warnings
    >>> import laplace_ella
    >>> with warnings.catch_warnings():
    ...     # A fit that cannot be saved should stop, instead of going on.
    ...     warnings.simplefilter("error", laplace_ella.CheckpointWarning)
    ...     # la.fit(train_loader, checkpoint="fit.pt")
    """


class NumericalWarning(UserWarning):
    """Rounding matters: a matrix was regularised to be factorised, or variances have
    lost digits; the message has the amount."""


class SoftmaxWarning(UserWarning):
    """A classifier seems to return probabilities, where logits are expected."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line outside the package that led here, however deep it was found."""
    package = str(Path(__file__).parent)
    level, outermost, frame = 1, 1, sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(package):
            outermost = level
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=outermost + 1)
