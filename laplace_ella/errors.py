"""Exceptions and warnings of the package, each with the remedy in its message."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "BorderWarning",
    "CheckpointWarning",
    "CompileWarning",
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
    """A posterior was asked for before `fit()` or `load_state_dict()`.

    Examples
    --------
    >>> import torch
    >>> import laplace_ella
    >>> la = laplace_ella.ELLALaplace(torch.nn.Linear(2, 3), "classification")
    >>> try:
    ...     la(torch.randn(4, 2))
    ... except laplace_ella.NotFittedError as error:
    ...     print(error)
    This ELLALaplace is not fitted: call fit(train_loader) or load_state_dict() first.
    """


class UnsupportedLayerError(RuntimeError):
    """A backend has no, or wrong, gradients for a layer; the message names it.

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from laplace.curvature import BackPackGGN
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)
    ... )
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", backend=BackPackGGN)
    >>> try:
    ...     la.fit(DataLoader(data, batch_size=25))
    ... except laplace_ella.UnsupportedLayerError as error:
    ...     print("LayerNorm" in str(error))
    True
    """


class NotDifferentiableError(RuntimeError):
    """No way to differentiate the model works; the message has what each one said.

    Parameters
    ----------
    failures : mapping of str to Exception
        what each way raised, by its name

    Examples
    --------
    >>> import laplace_ella
    >>> error = laplace_ella.NotDifferentiableError(
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
    """The work cannot fit; the message says what is needed, there, and changeable.

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", memory_budget="1 kB")
    >>> try:
    ...     la.fit(DataLoader(data, batch_size=25))
    ... except laplace_ella.InsufficientMemoryError as error:
    ...     print("memory_budget" in str(error))
    True
    """


class OtherProcessError(RuntimeError):
    """Work of several processes ended because of another one; the message has its rank
    and what it said.

    Examples
    --------
    >>> import laplace_ella
    >>> def fit_or_tell(la, train_loader):
    ...     try:
    ...         la.fit(train_loader)
    ...     except laplace_ella.OtherProcessError as error:
    ...         print(error)  # names the rank that failed, and why
    """


class RankWarning(UserWarning):
    """The sampled gradients span fewer directions than were asked for.

    Examples
    --------
    >>> import warnings
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=100)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     la.fit(DataLoader(data, batch_size=25))
    >>> [w.category.__name__ for w in caught], la.rank
    (['RankWarning'], 9)
    """


class BorderWarning(UserWarning):
    """A search ended at the border of its range; the message has the value.

    Examples
    --------
    >>> import warnings
    >>> import torch
    >>> import laplace_ella
    >>> logits, targets = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     tau = laplace_ella.temperature_scaling(logits, targets)  # all are right
    >>> caught[0].category.__name__
    'BorderWarning'
    """


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


class CompileWarning(UserWarning):
    """`torch.compile` failed, so that features are computed without it; the message has
    the cause.

    Examples
    --------
    >>> import warnings
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> def backend(graph, inputs):
    ...     raise RuntimeError("no compiler here")
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(
    ...     torch.nn.Linear(2, 3),
    ...     "classification",
    ...     "all",
    ...     "nystrom",
    ...     n_eigenvalues=2,
    ...     feature_mode="forward",
    ...     compile={"backend": backend},
    ... )
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     la.fit(DataLoader(data, batch_size=25))
    >>> any(w.category is laplace_ella.CompileWarning for w in caught)
    True
    """


class NumericalWarning(UserWarning):
    """Rounding matters: a matrix was regularised to be factorised, or variances have
    lost digits; the message has the amount.

    Examples
    --------
    >>> import warnings
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(20, 3).double()
    >>> data = TensorDataset(torch.randn(50, 20).double(), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=60)
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> la.prior_precision = 1e-30
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     probs = la(torch.randn(4, 20).double())
    >>> caught[0].category.__name__
    'NumericalWarning'
    """


class SoftmaxWarning(UserWarning):
    """A classifier seems to return probabilities, where logits are expected.

    Examples
    --------
    >>> import warnings
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Softmax(-1))
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=2)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     la.fit(DataLoader(data, batch_size=25))
    >>> any(w.category is laplace_ella.SoftmaxWarning for w in caught)
    True
    """


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line outside the package that led here, however deep it was found."""
    package = str(Path(__file__).parent)
    level, outermost, frame = 1, 1, sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(package):
            outermost = level
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=outermost + 1)
