"""Try the modes of differentiation on the first batch, and keep the fastest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from laplace_ella.derivatives.backends import BACKEND_OF, ROWS, check_rows
from laplace_ella.derivatives.jacobians import FEATURES, one_hot
from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.derivatives.model_function import ModelFunction, clearer_errors
from laplace_ella.derivatives.modes import ComputeOptions, FeatureMode, Modes, RowMode
from laplace_ella.errors import NotDifferentiableError
from laplace_ella.support.batches import Batch, OutputLayout, check_outputs
from laplace_ella.support.preserve import autocast_enabled, differentiation

logger = logging.getLogger("laplace_ella")

#: Examples of a trial at least, since a first batch may be smaller than those to come;
#: examples of a way that takes them one by one; and directions at most.
FEWEST_EXAMPLES, FEW_EXAMPLES, MOST_DIRECTIONS = 16, 2, 256

#: A first run longer than this many seconds is not repeated; shorter ones are, since
#: the first one also builds kernels and gets memory from the system.
WARM_UP = 8.0

#: Seconds after which nothing is repeated any more, and how often it is at most.
LONG_ENOUGH, RUNS = 0.1, 6


def linearize(
    fn: ModelFunction,
    layout: OutputLayout,
    dict_key_x: str,
    options: ComputeOptions,
    x_first: Any,
) -> Linearizer:
    """Return the linearisation of a model for inputs like those of a first batch.

    The model runs once on one example, which tells the shape of its outputs and what
    memory it takes; nothing is differentiated yet.
    """
    for module in fn.model.modules():
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if norm and module.running_mean is None:
            raise ValueError(
                "A batch normalisation uses the statistics of the batch in evaluation "
                "mode, too, as with track_running_stats=False: outputs depend on the "
                "other examples and have no derivative of their own. Give it running "
                "statistics, or use nn.GroupNorm or nn.InstanceNorm2d."
            )
    one = Batch.of(x_first, dict_key_x).take(slice(0, 1))
    with clearer_errors(one.inputs, ()), differentiation():
        f, largest, total = fn.activation_bytes(one.inputs)
        shape = tuple(check_outputs(f, layout, one.size).shape[1:])
    known = shape, one.example_shapes, largest, total
    return Linearizer(fn, layout, dict_key_x, options, *known, Modes())


def decide(linearizer: Linearizer, x: Any, rank: int) -> Linearizer:
    """Return the linearizer with the fastest modes for K directions, tried on x."""
    (batch, positions), fn = linearizer.batch(x), linearizer.fn
    device, dtype, options = linearizer.device, linearizer.dtype, linearizer.options
    n_values, size = positions.n_values, max(batch.size, FEWEST_EXAMPLES)
    batch = batch.take(torch.arange(size, device=device) % batch.size)
    # The values of the directions do not matter: one for all takes no memory.
    rank = min(rank, MOST_DIRECTIONS)
    directions = fn.flat().to(dtype).expand(rank, -1)

    def rows(
        mode: RowMode, n: int = 1, directions: torch.Tensor | None = None
    ) -> float:
        """Differentiate in one pass n outputs of as many examples as fit."""
        examples, together = linearizer.pass_sizes(batch, positions, mode, n)
        examples = FEW_EXAMPLES if mode is RowMode.LOOP else min(examples, size)
        numbers = torch.arange(together, device=device)
        units = one_hot(numbers.expand(examples, -1), n_values, dtype)
        ROWS[mode](fn, batch.take(slice(0, examples)), units, directions)
        return examples * (together + 1) / (n + 1)

    def features(mode: FeatureMode) -> float:
        examples, together = linearizer.pass_sizes(batch, positions, mode, rank)
        some, V = batch.take(slice(0, examples)), directions[:together]
        FEATURES[mode](fn, some, V)
        return some.size * together / rank

    with torch.no_grad():
        asked = options.row_mode
        if asked in BACKEND_OF:
            with differentiation():
                check_rows(asked, fn, batch, n_values)
        tried = (RowMode.VMAP, RowMode.LOOP) if asked is RowMode.AUTO else (asked,)
        way = fastest({way: partial(rows, way) for way in tried}, device)
        ways = {
            FeatureMode.FORWARD: partial(features, FeatureMode.FORWARD),
            FeatureMode.DOUBLE_REVERSE: partial(features, FeatureMode.DOUBLE_REVERSE),
            FeatureMode.REVERSE: partial(rows, way, n_values, directions),
        }
        if options.feature_mode in ways:  # not AUTO
            ways = {options.feature_mode: ways[options.feature_mode]}
        mode = fastest(ways, device)
    logger.info("rows of the Jacobian by %s, features by %s", way.value, mode.value)
    return replace(
        linearizer, modes=Modes(mode, way), autocast=autocast_enabled(device)
    )


def fastest(ways: Mapping[Any, Callable[[], float]], device: torch.device) -> Any:
    """Return the fastest way that works, or raise an error with what each one said.

    A trial is one pass, and returns how much work it did, in units that can be
    compared. The double-reverse mode is tried where forward mode failed.
    """
    seconds: dict[Any, float] = {}
    failures: dict[str, Exception] = {}
    for way, trial in ways.items():
        if way == FeatureMode.DOUBLE_REVERSE and FeatureMode.FORWARD in seconds:
            continue
        try:
            seconds[way] = _seconds(trial, device, repeat=len(ways) > 1)
        except torch.cuda.OutOfMemoryError:
            raise  # it is not a matter of the way
        except Exception as error:  # whatever an unsupported operator raises
            failures[way.value] = error
    if not seconds:
        said = [f"{w}: {type(e).__name__}: {e}".strip() for w, e in failures.items()]
        lines = "; ".join(text.splitlines()[0] for text in said)
        raise NotDifferentiableError(
            f"The model could not be differentiated. {lines}. Options: another "
            "feature_mode (forward, reverse, double_vjp) or row_mode (vmap, loop), "
            "freezing the layers with the unsupported operator "
            "(requires_grad_(False)), or subset_of_weights='last_layer'."
        ) from next(iter(failures.values()))
    return min(seconds, key=seconds.__getitem__)


def _seconds(trial: Callable[[], float], device: torch.device, repeat: bool) -> float:
    """Return seconds per unit of work. The best run counts: what else the machine does
    can only make one slower."""
    runs: list[float] = []
    spent, on_gpu = 0.0, device.type == "cuda" and torch.cuda.is_available()
    # On a CPU this thread takes part in all work; while others have its core it does
    # not count.
    clock = time.perf_counter if on_gpu else time.thread_time
    while True:
        start = clock()
        with differentiation():
            work = trial()
        if on_gpu:
            torch.cuda.synchronize(device)
        took = clock() - start
        spent += took
        runs.append(took / work)
        done = len(runs) > 1 and (spent > LONG_ENOUGH or len(runs) == RUNS)
        if not repeat or done or took > WARM_UP:
            return min(runs)
