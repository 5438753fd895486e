"""Try several ways to do the same thing, and keep the fastest that works."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch

from laplace_ella.derivatives.folding import FoldingError
from laplace_ella.errors import NotDifferentiableError
from laplace_ella.support.batches import Batch, has_values
from laplace_ella.support.preserve import differentiable_kernels

__all__ = ["FEWEST_EXAMPLES", "Trial", "attempt", "repeated", "winner"]

W = TypeVar("W", bound=Enum | tuple[Enum, bool])

#: Examples of a trial, at least: a first batch may be smaller than those to come.
FEWEST_EXAMPLES = 16

#: How much faster than the way that should be cheaper another one must be.
HANDICAP = 1.1

#: Seconds that one run of a trial may be expected to take.
LONGEST = 0.5

#: Seconds up to which the first run is done again: it also builds kernels and gets
#: memory from the system, EfficientNet-Lite0's takes twice as long as the second.
WARM_UP = 8.0

#: Every run of a trial has so many times the examples of the one before.
GROWTH = 8

#: Seconds for which the last run is repeated, at most so many times.
REPEATED = 0.1
REPETITIONS = 4


@dataclass(frozen=True)
class Trial:
    """What came of one way: seconds per example, or the exception it raised."""

    seconds: float
    error: Exception | None = None

    def times(self, factor: float) -> Trial:
        """The trial of `factor` times the work."""
        return Trial(factor * self.seconds, self.error)

    def handicapped(self) -> Trial:
        """Timings are noisy: what should be dearer must be clearly faster to win."""
        return self.times(HANDICAP)


def attempt(way: Callable[[int], object], n: int, measure: bool) -> Trial:
    """Run a way on one example, then time it on more of them, up to n.

    Without `measure` it only has to work on one: where tensors have no values there is
    nothing to time.
    """
    try:
        with differentiable_kernels(), torch.no_grad():
            return Trial(_seconds_per_example(way, n, measure))
    except (torch.cuda.OutOfMemoryError, FoldingError):
        raise  # neither is a matter of the way
    except Exception as error:  # whatever an unsupported operator raises
        return Trial(float("inf"), error)


def _seconds_per_example(way: Callable[[int], object], n: int, measure: bool) -> float:
    """A way that is slow on one example may be the fastest on hundreds, so the number
    grows until n, or until a run would take long. Of short runs the best counts: what
    else the machine does can only make them slower."""

    def timed(size: int) -> float:
        start, own_start = time.perf_counter(), time.thread_time()
        if _synchronize(way(size)):
            return time.perf_counter() - start
        # On a CPU this thread takes part in all work; while others have its core it
        # does not count.
        return time.thread_time() - own_start

    size, seconds = 1, timed(1)
    if measure and seconds < WARM_UP:
        seconds = min(seconds, timed(1))
    while measure:
        affordable = int(LONGEST * size / max(seconds, 1e-9))
        larger = min(n, GROWTH * size, affordable)
        if larger < min(n, 2 * size) or larger == size:
            break
        size, seconds = larger, timed(larger)
    # The first run of a size gets its memory from the system; one example ran twice.
    spent, repetitions, least = seconds, 0, int(size > 1)
    while measure and repetitions < (REPETITIONS if spent < REPEATED else least):
        again = timed(size)
        seconds, spent = min(seconds, again), spent + again
        repetitions += 1
    return seconds / size


def repeated(batch: Batch, n: int, device: torch.device) -> Batch:
    """n examples for a trial, over and over again if there are fewer."""
    if n <= batch.size:
        return batch.take(slice(0, n))
    return batch.take(torch.arange(n, device=device) % batch.size)


def _synchronize(result: Any) -> bool:
    """Wait for the GPU, so that a timing means something; whether there is one."""
    tensor = result[0] if isinstance(result, tuple) else result
    on_gpu = has_values(tensor) and tensor.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(tensor.device)
    return on_gpu


def winner(trials: Mapping[W, Trial]) -> W:
    """The fastest way that worked, or an error that tells what each way said."""
    best = min(trials, key=lambda way: trials[way].seconds)
    if trials[best].error is None:
        return best
    failures = {_name(way): trial.error for way, trial in trials.items() if trial.error}
    raise NotDifferentiableError(failures) from trials[best].error


def _name(way: Any) -> str:
    mode, together = way if isinstance(way, tuple) else (way, True)
    return mode.value if together else f"{mode.value}, one by one"
