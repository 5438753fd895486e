"""Try the ways of differentiating a model, and keep the fastest that works."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeVar

import torch

from laplace_ella.errors import NotDifferentiableError

__all__ = ["fastest"]

#: A first run longer than this many seconds is not repeated; shorter ones are, since
#: the first one also builds kernels and gets memory from the system.
WARM_UP = 8.0

#: Seconds after which nothing is repeated any more, and how often it is at most.
LONG_ENOUGH, RUNS = 0.1, 6

W = TypeVar("W", bound=Enum)


def fastest(
    ways: Mapping[W, Callable[[], float]],
    device: torch.device,
    instead: Mapping[W, W] | None = None,
) -> W:
    """Return the fastest way that works, or raise an error with what each one said.

    Parameters
    ----------
    ways : mapping
        from each way to a trial of it: one pass, which returns how much work it did, in
        units that can be compared
    instead : mapping, optional
        ways that are only tried where another one before them failed
    """
    seconds: dict[W, float] = {}
    failures: dict[str, Exception] = {}
    for way, trial in ways.items():
        if (instead or {}).get(way) in seconds:
            continue
        try:
            seconds[way] = _seconds(trial, device, repeat=len(ways) > 1)
        except torch.cuda.OutOfMemoryError:
            raise  # it is not a matter of the way
        except Exception as error:  # whatever an unsupported operator raises
            failures[way.value] = error
    if not seconds:
        raise NotDifferentiableError(failures) from next(iter(failures.values()))
    return min(seconds, key=lambda way: seconds[way])


def _seconds(trial: Callable[[], float], device: torch.device, repeat: bool) -> float:
    """Return seconds per unit of work. The best run counts: what else the machine does
    can only make one slower."""
    runs: list[float] = []
    spent, on_gpu = 0.0, device.type == "cuda" and torch.cuda.is_available()
    while True:
        # On a CPU this thread takes part in all work; while others have its core it
        # does not count.
        clock = time.perf_counter if on_gpu else time.thread_time
        start = clock()
        work = trial()
        if on_gpu:
            torch.cuda.synchronize(device)
        took = clock() - start
        spent += took
        runs.append(took / work)
        done = len(runs) > 1 and (spent > LONG_ENOUGH or len(runs) == RUNS)
        if not repeat or done or took > WARM_UP:
            return min(runs)
