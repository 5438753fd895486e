"""Try several ways to do the same thing, and keep the fastest that works."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from laplace_ella.support.batches import has_values

__all__ = ["NotDifferentiableError", "Trial", "attempt", "winner"]

#: How much faster than the way that should be cheaper another one must be.
HANDICAP = 1.25


class NotDifferentiableError(RuntimeError):
    """No way to differentiate the model works; the message has what each one said."""

    def __init__(self, trials: dict[Any, Trial]) -> None:
        self.said = "; ".join(
            f"{_name(way)}: {_first_line(trial.error)}" for way, trial in trials.items()
        )
        super().__init__(
            f"The model could not be differentiated. {self.said}. Options: another "
            "feature_mode (forward, reverse, double_vjp) or row_mode (vmap, loop), "
            "freezing the layers with the unsupported operator "
            "(requires_grad_(False)), or subset_of_weights='last_layer'."
        )


@dataclass(frozen=True)
class Trial:
    """What came of one way: seconds an example, or the exception it raised."""

    seconds: float
    error: Exception | None = None

    def handicapped(self) -> Trial:
        """Timings are noisy: what should be dearer must be clearly faster to win."""
        return Trial(HANDICAP * self.seconds, self.error)


def attempt(way: Callable[[int], object], n: int, measure: bool) -> Trial:
    """Run a way on one example, then, if that was quick, time it on n.

    The better of two runs: what else the machine does can only make them slower.
    """

    def timed(n: int) -> float:
        start = time.perf_counter()
        _synchronize(way(n))
        return time.perf_counter() - start

    try:
        seconds = timed(1)
        if measure and seconds < 0.5:  # the first run also warms up
            seconds = min(timed(n), timed(n)) / n
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever an unsupported operator raises
        return Trial(float("inf"), error)
    return Trial(seconds)


def _synchronize(result: Any) -> None:
    """Wait for the GPU, so that a timing means something."""
    tensor = result[0] if isinstance(result, tuple) else result
    if has_values(tensor) and tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def winner(trials: dict[Any, Trial]) -> Any:
    """The fastest way that worked, or an error that tells what each way said."""
    best = min(trials, key=lambda way: trials[way].seconds)
    if trials[best].error is None:
        return best
    raise NotDifferentiableError(trials) from trials[best].error


def _name(way: Any) -> str:
    return (way[0] if isinstance(way, tuple) else way).value


def _first_line(error: Exception | None) -> str:
    if isinstance(error, NotDifferentiableError):
        return error.said
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
