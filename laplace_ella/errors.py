"""Exceptions and warnings of the package, each with the remedy in its message."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path


class NotFittedError(AttributeError, RuntimeError):
    """A posterior was asked for before `fit()` or `load_state_dict()`."""


class UnsupportedLayerError(RuntimeError):
    """A backend has no, or wrong, gradients for a layer; the message names it."""


class NotDifferentiableError(RuntimeError):
    """The model cannot be differentiated; the message lists what each way raised."""


class InsufficientMemoryError(MemoryError):
    """A computation does not fit; the message has what it needs and what there is."""


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
    """A matrix was regularised, or variances lost digits; with the amount."""


class SoftmaxWarning(UserWarning):
    """A classifier seems to return probabilities, where logits are expected."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line outside the package that led here, however deep it was found."""
    package = str(Path(__file__).parent)
    files, frame = [], sys._getframe()
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    outermost = max(i for i, file in enumerate(files) if file.startswith(package))
    warnings.warn(message, category, stacklevel=outermost + 2)
