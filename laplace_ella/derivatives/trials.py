"""Try the ways of differentiating a model on one batch, and choose the fastest.

Index legend: B batch, O outputs of one example, P parameters, K rank.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from laplace_ella.derivatives.backends import BACKEND_OF, check_rows, rows_by_backend
from laplace_ella.derivatives.jacobians import (
    PassSizes,
    features_by_double_vjp,
    features_by_forward,
    features_by_forward_loop,
    jacobians_by_loop,
    jacobians_by_vmap,
    rows_by_loop,
    rows_by_vmap,
)
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.modes import ComputeOptions, FeatureMode, Modes, RowMode
from laplace_ella.errors import NotDifferentiableError
from laplace_ella.support.batches import Batch, has_values
from laplace_ella.support.preserve import differentiable_kernels

__all__ = ["FEATURES", "JACOBIANS", "ROWS", "choose_modes"]

logger = logging.getLogger("laplace_ella")

#: The ways by their modes; forward mode takes all tangents together, or not.
ROWS = {
    RowMode.VMAP: rows_by_vmap,
    RowMode.LOOP: rows_by_loop,
    RowMode.BACKPACK: partial(rows_by_backend, RowMode.BACKPACK),
    RowMode.ASDL: partial(rows_by_backend, RowMode.ASDL),
}
JACOBIANS = {RowMode.VMAP: jacobians_by_vmap, RowMode.LOOP: jacobians_by_loop}
FEATURES = {
    (FeatureMode.FORWARD, True): features_by_forward,
    (FeatureMode.FORWARD, False): features_by_forward_loop,
    (FeatureMode.DOUBLE_REVERSE, True): features_by_double_vjp,
}

#: Expected costs further apart than this are not worth a measurement.
CLEAR_RATIO = 3.0

#: Examples of a trial, at least, since a first batch may be smaller than those to come;
#: examples, directions and outputs of a way that takes them one after the other.
FEWEST_EXAMPLES, FEW_EXAMPLES, FEW_DIRECTIONS, FEW_OUTPUTS = 16, 2, 4, 8

#: A first run longer than this many seconds is not done again; shorter ones are, since
#: the first one also builds kernels and gets memory from the system.
WARM_UP = 8.0

#: Every run of a trial has so many times the examples of the one before, as long as it
#: may be expected to take so many seconds.
GROWTH, LONGEST = 8, 0.5

#: Seconds for which the last run is repeated, at most so many times.
REPEATED, REPETITIONS = 0.05, 3

#: Timings are noisy: ways are listed from the one that should be cheapest on, and a
#: later one must be faster by this factor to win.
HANDICAP = 1.1


def choose_modes(
    fn: ModelFunction,
    sizes: PassSizes,
    batch: Batch,
    n_outputs: int,
    options: ComputeOptions,
    rank: int,
) -> Modes:
    """Return the fastest modes that work, tried on examples of a batch.

    Where expected costs are far apart the cheaper way is only tried; where they are
    close both are timed. Nothing is decided by the text of an exception.
    """
    device, measure = fn.device, has_values(next(fn.model.parameters()))
    n_many = max(batch.size, FEWEST_EXAMPLES)
    many = batch.take(torch.arange(n_many, device=device) % batch.size)
    all_units = torch.arange(n_outputs, device=device)
    # The values of the directions do not matter: one for all takes no memory.
    directions = fn.flat().to(fn.dtype).expand(rank, -1)

    def rows(mode: RowMode, n: int) -> tuple[float, int, torch.Tensor]:
        n = min(n, n_many, FEW_EXAMPLES if mode is RowMode.LOOP else sizes.reverse()[0])
        index = torch.arange(n, device=device)
        units = ((index % n_outputs).unsqueeze(1) == all_units).to(fn.dtype)
        out = torch.empty(n, fn.n_params, dtype=fn.dtype, device=device)
        return n, n, ROWS[mode](fn, many, index, units, out)

    def jacobians(
        mode: RowMode, with_features: bool, n: int
    ) -> tuple[float, int, torch.Tensor]:
        examples, outputs = sizes.reverse(n_outputs)
        if mode is RowMode.LOOP:
            examples, outputs = FEW_EXAMPLES, min(outputs, FEW_OUTPUTS)
        n = min(n, examples, n_many)
        units = (all_units[:outputs].unsqueeze(1) == all_units).to(fn.dtype)
        tangents = fn.split(directions) if with_features else None
        few = many.take(slice(0, n))
        f = JACOBIANS[mode](fn, few, lambda f: units, tangents)[0]
        return n * (outputs + 1) / (n_outputs + 1), n, f

    def features(
        way: tuple[FeatureMode, bool], n: int
    ) -> tuple[float, int, torch.Tensor]:
        if way[0] is FeatureMode.REVERSE:
            return jacobians(of_jacobians, True, n)
        examples, tangents = sizes.forward(rank)
        if way != (FeatureMode.FORWARD, True):
            examples, tangents = sizes.forward(1)[0], min(tangents, FEW_DIRECTIONS)
        n = min(n, examples, n_many)
        pieces = fn.split(directions[:tangents])
        f = FEATURES[way](fn, many.take(slice(0, n)), pieces)[0]
        return n * tangents / rank, n, f

    with differentiable_kernels(), torch.no_grad():
        asked, plain = options.row_mode, [RowMode.VMAP, RowMode.LOOP]
        if asked in BACKEND_OF:
            check_rows(asked, fn, batch, n_outputs)
            of_rows = asked
        else:
            plain = plain if asked is RowMode.AUTO else [asked]
            of_rows = fastest({way: partial(rows, way) for way in plain}, measure)
        of_jacobians = fastest(
            {way: partial(jacobians, way, False) for way in plain}, measure
        )
        forward: list[tuple[FeatureMode, bool]] = [
            (FeatureMode.FORWARD, True),
            (FeatureMode.FORWARD, False),
        ]
        reverse = [(FeatureMode.REVERSE, True)]
        double = [(FeatureMode.DOUBLE_REVERSE, True)]
        if options.feature_mode is FeatureMode.FORWARD:
            groups = [forward]
        elif options.feature_mode is FeatureMode.REVERSE:
            groups = [reverse]
        elif options.feature_mode is FeatureMode.DOUBLE_REVERSE:
            groups = [double]
        else:
            ratio = _cost_of_reverse(fn, batch, n_outputs, rank) / (2 * rank + 1)
            if ratio > CLEAR_RATIO:
                groups = [forward, double, reverse]
            elif ratio < 1 / CLEAR_RATIO:
                groups = [reverse, forward, double]
            else:
                both = reverse + forward if ratio < 1 else forward + reverse
                groups = [both, double]
        failures: dict[str, Exception] = {}
        for group in groups:
            try:
                trials = {way: partial(features, way) for way in group}
                mode, together = fastest(trials, measure)
                break
            except NotDifferentiableError as error:
                failures |= error.failures
        else:
            raise NotDifferentiableError(failures) from next(iter(failures.values()))
    logger.info("rows of the Jacobian by %s", of_rows.value)
    logger.info("features by %s", mode.value)
    return Modes(mode, together, of_rows, of_jacobians)


def _cost_of_reverse(
    fn: ModelFunction, batch: Batch, n_outputs: int, rank: int
) -> float:
    """Return the expected cost of one example's features in reverse mode, in forward
    passes: backward passes, and the product with V."""
    with FlopCounterMode(display=False) as counter:
        fn(fn.parameters(), batch.take(slice(0, 1)).inputs)
    multiplications = max(counter.get_total_flops() / 2, fn.n_params)
    return 2 * n_outputs + 1 + n_outputs * fn.n_params * rank / multiplications


W = TypeVar("W", bound=Enum | tuple[Enum, bool])

#: Does some work on so many examples, or fewer, and returns how much that was, in
#: comparable units, on how many examples, and a result.
Trial = Callable[[int], tuple[float, int, torch.Tensor]]


def fastest(ways: Mapping[W, Trial], measure: bool) -> W:
    """Return the fastest way that works, or raise an error with what each one said.

    Parameters
    ----------
    ways : mapping
        modes, and whether all goes through the model together, to a trial of them;
        those that should be cheaper come first
    measure : bool
        otherwise, and where there is one way only, the first that works is taken
    """
    seconds: dict[W, float] = {}
    failures: dict[str, Exception] = {}
    for way, trial in ways.items():
        try:
            seconds[way] = _seconds(trial, measure and len(ways) > 1)
        except torch.cuda.OutOfMemoryError:
            raise  # it is not a matter of the way
        except Exception as error:  # whatever an unsupported operator raises
            mode, together = way if isinstance(way, tuple) else (way, True)
            failures[mode.value + ", one by one" * (not together)] = error
        if seconds and not measure:
            break
    best = None
    for way, took in seconds.items():
        if best is None or HANDICAP * took < seconds[best]:
            best = way
    if best is None:
        raise NotDifferentiableError(failures) from next(iter(failures.values()))
    return best


def _seconds(trial: Trial, measure: bool) -> float:
    """Return seconds per unit of work.

    A way that is slow on one example may be the fastest on hundreds, so the number
    grows as long as a run is short. The best run counts: what else the machine does can
    only make one slower.
    """
    n, runs, repetitions, spent, best = 1, 0, 0, 0.0, math.inf
    while True:
        start, own_start = time.perf_counter(), time.thread_time()
        work, done, result = trial(n)
        if measure and result.device.type == "cuda":
            torch.cuda.synchronize(result.device)
            took = time.perf_counter() - start
        else:
            # On a CPU this thread takes part in all work; while others have its core
            # it does not count.
            took = time.thread_time() - own_start
        runs, best = runs + 1, min(best, took / work)
        if not measure or took > WARM_UP:
            return best
        if runs == 1:
            continue
        larger = min(GROWTH * n, int(LONGEST * n / max(took, 1e-9)))
        if done == n and larger >= 2 * n:
            n = larger
            continue
        repetitions, spent = repetitions + 1, spent + took
        if repetitions > REPETITIONS or spent > REPEATED:
            return best
