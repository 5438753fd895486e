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
    "LinkWarning",
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
    """A posterior was asked for before `fit()` or `load_state_dict()`.

    Examples
    --------
    >>> import torch
    >>> import laplace_ella
    >>> la = laplace_ella.ELLALaplace(torch.nn.Linear(2, 3), "classification")
    >>> try:
    ...     la(torch.randn(4, 2))
    ... except laplace_ella.errors.NotFittedError as error:
    ...     print(error)
    This ELLALaplace is not fitted: call fit(train_loader) or load_state_dict() first.
    """


class UnsupportedLayerError(RuntimeError):
    """A backend has no, or wrong, gradients for a layer; the message names it."""


class NotDifferentiableError(RuntimeError):
    """No way to differentiate the model works; the message has what each one said.

    Parameters
    ----------
    failures : mapping of str to Exception
        what each way raised, by its name

    Examples
    --------
    >>> from laplace_ella.errors import NotDifferentiableError
    >>> error = NotDifferentiableError(
    ...     {"forward": NotImplementedError("no forward AD for this operator")}
    ... )
    >>> error.said
    'forward: NotImplementedError: no forward AD for this operator'
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
        """Return the first line of every failure."""
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
    """Another process of a joint fit failed; the message has its rank and its error."""


class RankWarning(UserWarning):
    """The sampled gradients span fewer directions than were asked for."""


class BorderWarning(UserWarning):
    """A search ended at the border of its range; the message has the value."""


class CheckpointWarning(UserWarning):
    """The progress of a fit could not be saved or used; the message has the cause."""


class LinkWarning(UserWarning):
    """A prediction uses another link than the one that its settings were tuned for."""


class NumericalWarning(UserWarning):
    """A matrix was regularised, or variances have lost digits; has the amount."""


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
