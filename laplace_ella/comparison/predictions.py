"""Predictions of a fitted method over a whole loader.

Index legend: N data, C outputs, B batch, S positions.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from laplace_ella import metrics
from laplace_ella.comparison.loaders import reproducible, split
from laplace_ella.comparison.settings import Settings
from laplace_ella.errors import BorderWarning, NumericalWarning, RankWarning
from laplace_ella.posterior.predictive import FunctionValues, class_probabilities
from laplace_ella.support import batches

__all__ = [
    "Fitted",
    "Gaussian",
    "Predictions",
    "Said",
    "collected_warnings",
    "join_notes",
    "link_probabilities",
    "moments",
    "output_rows",
    "predict",
    "target_rows",
    "with_noise",
]


@dataclass(frozen=True)
class Gaussian:
    """Function values of a regression: mean and variance `(N, C)`, without noise.

    `covariance (N, C, C)` is there only where it was asked for.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    covariance: torch.Tensor | None = None


@dataclass(frozen=True)
class Fitted:
    """A method that is ready to predict with the link that it was tuned for.

    Attributes
    ----------
    predict : callable
        x → class probabilities in the shape of the model's output, or for regression
        the mean in that shape and its variances, or covariances `(B, ..., C, C)`,
        without noise
    batch : int
        examples to predict at once
    noise : torch.Tensor
        standard deviation of the observation noise, `()` or `(C,)`
    costs : dict of str to float
        seconds, numbers kept, peak memory
    settings : dict
        what tuning chose, and by what
    note : str
        what a reader of the row should know
    """

    predict: Callable[[Any], Any]
    batch: int
    noise: torch.Tensor = field(default_factory=lambda: torch.ones(()))
    costs: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Predictions:
    """Predictions over a whole loader, on the CPU; one row per example and position.

    `probs (N, C)` for classification, `values` for regression. `targets`, `(N,)` or
    `(N, C)`, are None for data without labels; rows with class -100 are left out.
    """

    targets: torch.Tensor | None
    seconds: float
    probs: torch.Tensor | None = None
    values: Gaussian | None = None
    note: str = ""

    def uncertainty(self) -> torch.Tensor:
        """`(N,)`: 1 − max p, or the total variance of the function values."""
        if self.values is not None:
            return self.values.variance.sum(-1)
        assert self.probs is not None
        return 1.0 - self.probs.max(-1).values


# --- positions -----------------------------------------------------------------------


def output_rows(outputs: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Outputs `(B, C)`, or at positions in the model's layout, as rows `(B·S, C)`."""
    positions = settings.output_layout.of(outputs.shape[1:])
    return positions.rows(outputs.flatten(1))


def target_rows(targets: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Classes `(B·S,)`, or regression targets `(B·S, C)`."""
    if settings.is_regression:
        return output_rows(targets, settings)
    return targets.flatten()


# --- notes ---------------------------------------------------------------------------


@dataclass
class Said:
    """First lines of the warnings of this package, and whether a search ended at the
    border of its range."""

    lines: list[str] = field(default_factory=list)
    at_border: bool = False


@contextmanager
def collected_warnings() -> Iterator[Said]:
    """Warnings of this package go into the row's note; laplace-torch's are routine."""
    said = Said()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    ours = (BorderWarning, NumericalWarning, RankWarning)
    for warning in caught:
        if issubclass(warning.category, ours):
            said.lines.append(str(warning.message).splitlines()[0])
            said.at_border |= issubclass(warning.category, BorderWarning)


def join_notes(*notes: str) -> str:
    """One text, nothing said twice."""
    return "; ".join(dict.fromkeys(note for note in notes if note))


# --- laplace-torch's function values -------------------------------------------------


def moments(la: Any, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean `(B, C)` and covariance `(B, C, C)` of the function values, which
    laplace-torch has no public name for in its parametric classes."""
    public = getattr(la, "predictive_moments", None)
    mean, covariance = public(x) if public else la._glm_predictive_distribution(x)
    return mean.detach(), covariance.detach()


def link_probabilities(
    mean: torch.Tensor,
    covariance: torch.Tensor,
    link: str,
    n_samples: int,
    generator: torch.Generator | None = None,
    softmax_temperature: float = 1.0,
) -> torch.Tensor:
    """Class probabilities `(B, C)` of f/τ, f ~ N(mean, covariance), by any link."""
    tau = softmax_temperature
    empty = mean.new_zeros(*mean.shape, 0)
    f = FunctionValues(mean / tau, empty, covariance / tau**2)
    return class_probabilities(f, link, n_samples, generator=generator)


# --- prediction ----------------------------------------------------------------------


def predict(
    fitted: Fitted,
    loader: Any,
    device: torch.device,
    settings: Settings,
    seed: int,
    covariance: bool = False,
) -> Predictions:
    """Predict over a whole loader; only the predictions are timed, not the loading.

    The data and their order are the same for every seed, which is that of random
    numbers in predictions: differences of rows are those on the same examples.
    Covariances `(N, C, C)` of a regression are kept only if they are asked for.
    """
    outputs: list[Any] = []
    targets: list[torch.Tensor | None] = []
    seconds = 0.0
    with (
        reproducible(0, device, loader),
        collected_warnings() as said,
        torch.no_grad(),
    ):
        for index, batch in enumerate(loader):
            x, y = split(batch, settings.dict_key_y)
            x = batches.to_device(x, device)
            size = batches.batch_size(x, settings.dict_key_x)
            with reproducible(seed + 1000 * index, device):
                for part in batches.chunks(size, fitted.batch):
                    start = _now(device)
                    out = fitted.predict(batches.take(x, part, size))
                    seconds += _now(device) - start
                    outputs.append(_as_rows(out, settings, covariance))
            targets.append(None if y is None else target_rows(y, settings).cpu())
    known = [y for y in targets if y is not None]
    y = torch.cat(known) if len(known) == len(targets) else None
    note = join_notes(*said.lines)
    if settings.is_regression:
        values = _joined(outputs)
        _check_finite(values.mean, values.variance)
        return Predictions(y, seconds, values=values, note=note)
    probs = torch.cat(outputs)
    _check_finite(probs)
    if y is not None and (y == metrics.IGNORED).any():
        probs, y = probs[y != metrics.IGNORED], y[y != metrics.IGNORED]
    return Predictions(y, seconds, probs=probs, note=note)


def _as_rows(out: Any, settings: Settings, covariance: bool) -> Any:
    """A prediction in the model's layout as rows on the CPU."""
    if not settings.is_regression:
        return output_rows(out.detach(), settings).cpu()
    mean, spread = (t.detach() for t in out)
    rows = output_rows(mean, settings).cpu()
    if spread.shape == mean.shape:  # MAP and pred_type="nn"
        return Gaussian(rows, output_rows(spread, settings).cpu())
    spread = spread.flatten(0, -3).cpu()
    variance = spread.diagonal(dim1=-2, dim2=-1).clone()
    return Gaussian(rows, variance, spread if covariance else None)


def _joined(parts: list[Gaussian]) -> Gaussian:
    """All batches in one."""
    covariances = [p.covariance for p in parts if p.covariance is not None]
    return Gaussian(
        torch.cat([p.mean for p in parts]),
        torch.cat([p.variance for p in parts]),
        torch.cat(covariances) if covariances else None,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _check_finite(*tensors: torch.Tensor) -> None:
    values = torch.cat([t.flatten(1) for t in tensors], 1)
    bad = int((~values.isfinite()).any(1).sum())
    if bad:
        raise ValueError(f"{bad} of {len(tensors[0])} predictions are NaN or infinite")


def with_noise(variance: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Variances `(N, C)` of the observations: of the function values, plus σ²."""
    return variance.double() + sigma.detach().to(variance.device).double().square()
