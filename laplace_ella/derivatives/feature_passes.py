"""Features of a batch, pass by pass: what goes through the model at once, and how.

Index legend: B batch, O outputs of one example, P parameters, K rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType

import torch
from torch.utils.flop_counter import FlopCounterMode

from laplace_ella.derivatives.features import (
    FeatureMode,
    by_double_vjp,
    by_forward,
    by_forward_loop,
    by_reverse,
    by_reverse_forgetting,
    by_reverse_loop,
)
from laplace_ella.derivatives.folding import FoldedFunction
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.options import ComputeOptions
from laplace_ella.derivatives.row_passes import agrees
from laplace_ella.derivatives.rows import RowMode
from laplace_ella.derivatives.selection import Selection
from laplace_ella.derivatives.sizes import PassSizes
from laplace_ella.derivatives.trials import (
    FEWEST_EXAMPLES,
    Trial,
    attempt,
    repeated,
    winner,
)
from laplace_ella.errors import CompileWarning, warn_caller
from laplace_ella.support.batches import Batch, chunks
from laplace_ella.support.heap import kept_memory, watched_passes
from laplace_ella.support.preserve import differentiable_kernels

__all__ = ["FeaturePasses", "Way"]

#: Directions that are fetched at once from another device.
OFFLOADED_BLOCK = 8

#: Costs further apart than this are not worth a measurement.
CLEAR_RATIO = 3.0

#: Directions of a trial of a way that takes them one after the other.
FEW_DIRECTIONS = 4

#: Numbers of activations, for all derivatives of a batch, at which it pays to bring one
#: number of a direction into another form. ResNet-20 is level at one or two inputs.
WORTH_FOLDING = 2.0

#: Outputs and features of one pass.
Way = Callable[..., tuple[torch.Tensor, torch.Tensor]]

#: Ways that may be compiled: all tangents or outputs together.
COMPILED: dict[FeatureMode, Way] = {
    FeatureMode.FORWARD: by_forward,
    FeatureMode.REVERSE: by_reverse,
}

#: A mode of differentiation, and whether all goes through the model together.
Trials = dict[tuple[FeatureMode, bool], Trial]


@dataclass(frozen=True)
class FeaturePasses:
    """How features of one kind of inputs are computed.

    Attributes
    ----------
    fn : ModelFunction
    folded : FoldedFunction, optional
        the same in other parameters, where that may be cheaper
    sizes : PassSizes
    selection : Selection
        outputs that are wanted
    options : ComputeOptions
    compiled : dict
        ways that were compiled before; compiled ones are added, and those that cannot
        be compiled, as they are
    """

    fn: ModelFunction
    folded: FoldedFunction | None
    sizes: PassSizes
    selection: Selection
    options: ComputeOptions
    compiled: dict[Way, Way]

    def run(
        self,
        mode: FeatureMode,
        together: bool,
        batch: Batch,
        directions: torch.Tensor,
        create_graph: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, O) and features (B, O, K) for directions Vᵀ (K, P); in reverse
        mode features of the selected outputs only."""
        f, columns = None, []
        n_bytes = self.heap_bytes(mode, together, batch.size, len(directions))
        to_watch = self._rows_heap(mode, together, batch.size)
        with kept_memory(n_bytes), differentiable_kernels():
            for block in self._blocks(mode, directions):
                at_once = self._examples_at_once(mode, together, len(block))
                compute = self._function(
                    mode, together, block, batch.size, create_graph
                )
                passes = watched_passes(chunks(batch.size, at_once), to_watch)
                parts = [compute(batch.take(part)) for part in passes]
                f, phi = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
                columns.append(phi)
        assert f is not None  # there is at least one direction
        return f, columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def heap_bytes(
        self, mode: FeatureMode, together: bool, n_examples: int, n_directions: int
    ) -> int:
        """Bytes that are worth keeping from pass to pass, see `kept_memory`."""
        if mode is not FeatureMode.FORWARD or not together:
            return 0
        n_tangents = min(n_directions, self.sizes.tangents_at_once)
        return self.sizes.tangent_heap(n_examples, n_tangents)

    def _rows_heap(self, mode: FeatureMode, together: bool, n_examples: int) -> int:
        """Bytes that are worth keeping if they are lost otherwise."""
        if mode is not FeatureMode.REVERSE or not together:
            return 0
        return self._row_sizes(together).row_heap(n_examples, self.selection.size)

    def _forgets(self, together: bool) -> bool:
        """Whether gradients of a parameter are forgotten before those of the next are
        there: where there is no room for whole ones of all outputs. Hooks cost a
        little."""
        plain = together and not self._compiles(FeatureMode.REVERSE, together)
        n_outputs = self.selection.size
        return plain and self.sizes.outputs_at_once(n_outputs) < n_outputs

    def _row_sizes(self, together: bool) -> PassSizes:
        """Of reverse-mode passes."""
        if not self._forgets(together):
            return self.sizes
        return replace(self.sizes, n_params=max(self.fn.numels()))

    def agree(
        self,
        mode: FeatureMode,
        together: bool,
        batch: Batch,
        directions: torch.Tensor,
    ) -> bool:
        """Whether one example's features are the same without folding."""
        one, few = batch.take(slice(0, 1)).detach(), directions[:FEW_DIRECTIONS]

        def features(passes: FeaturePasses) -> tuple[torch.Tensor, torch.Tensor]:
            return replace(passes, folded=None).run(mode, together, one, few)

        # Folded whatever it costs: what is compared is to be used for larger batches.
        def folded(passes: FeaturePasses) -> tuple[torch.Tensor, torch.Tensor]:
            return features(replace(passes, fn=passes.folded or passes.fn))

        return agrees(self, folded, features)

    def folds(self, mode: FeatureMode, together: bool) -> bool:
        """Whether normalisations may be folded: compilers fuse them by themselves."""
        return self.folded is not None and not self._compiles(mode, together)

    def _compiles(self, mode: FeatureMode, together: bool) -> bool:
        """Whether this way is compiled. Deep networks take long to compile in reverse
        mode: not unasked."""
        way = COMPILED.get(mode)
        asked = mode is FeatureMode.FORWARD or mode is self.options.feature_mode
        wanted = bool(self.options.compile) and asked and together
        return wanted and way is not None and self.compiled.get(way) is not way

    def _cheaper(
        self, mode: FeatureMode, together: bool, block: torch.Tensor, n_examples: int
    ) -> ModelFunction:
        """The function to differentiate for a block of directions (k, P).

        Folding saves work on the activations, and costs a copy of the directions.
        """
        if self.folded is None or not self.folds(mode, together):
            return self.fn
        k, sizes = len(block), self.sizes
        activations = n_examples * sizes.activations.total / sizes.itemsize
        pays = activations * min(k, self.selection.size) >= (
            WORTH_FOLDING * k * sizes.n_params
        )
        fits = k * sizes.n_params * sizes.itemsize <= sizes.pass_limit
        return self.folded if pays and fits else self.fn

    def _blocks(
        self, mode: FeatureMode, directions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Directions that are worked on at once."""
        if directions.device != self.fn.device:
            return directions.split(OFFLOADED_BLOCK)
        if mode is FeatureMode.REVERSE:
            return (directions,)
        n_blocks = max(1, math.ceil(len(directions) / self.sizes.tangents_at_once))
        # Of one size: the rest of an uneven division costs a pass of its own.
        return directions.split(math.ceil(len(directions) / n_blocks))

    def _examples_at_once(
        self, mode: FeatureMode, together: bool, n_directions: int
    ) -> int:
        if mode is FeatureMode.REVERSE:
            return self._row_sizes(together).rows_at_once(self.selection.size)
        together = together and mode is FeatureMode.FORWARD
        return self.sizes.examples_at_once(n_directions if together else 1)

    def _function(
        self,
        mode: FeatureMode,
        together: bool,
        block: torch.Tensor,
        n_examples: int,
        create_graph: bool,
    ) -> Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]:
        """Outputs (b, O) and features (b, O, k) of the examples of one pass, of many
        in all, for directions (k, P); reverse mode has features of the selected outputs
        only."""
        selection, dtype = self.selection, self.fn.dtype
        fn = self._cheaper(mode, together, block, n_examples)
        tangents = fn.push(block.to(fn.device, dtype))

        def forward(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            way = self._maybe_compiled(mode) if together else by_forward_loop
            with torch.set_grad_enabled(create_graph):
                return way(fn, batch.inputs, tangents)

        def reverse(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            batch = fn.ordered(batch)
            order = torch.arange(selection.size, device=self.fn.device)
            at_once = self._row_sizes(together).outputs_at_once(selection.size)
            blocks = [
                selection.cotangents(numbers, dtype) for numbers in order.split(at_once)
            ]
            if together:
                way = self._maybe_compiled(mode)
                with torch.set_grad_enabled(create_graph):
                    parts = [way(fn, batch, tangents, block) for block in blocks]
            else:
                parts = [
                    by_reverse_loop(fn, batch, tangents, block, create_graph)
                    for block in blocks
                ]
            return parts[0][0], torch.cat([phi for _, phi in parts], dim=1)

        def double_vjp(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            return by_double_vjp(fn, batch.inputs, tangents, create_graph)

        ways = {
            FeatureMode.FORWARD: forward,
            FeatureMode.REVERSE: reverse,
            FeatureMode.DOUBLE_VJP: double_vjp,
        }
        return ways[mode]

    def _maybe_compiled(self, mode: FeatureMode) -> Way:
        """All tangents or outputs together, compiled at first use if asked for."""
        way = COMPILED[mode]
        if not self._compiles(mode, True):
            reverse = mode is FeatureMode.REVERSE
            return by_reverse_forgetting if reverse and self._forgets(True) else way
        if way not in self.compiled:
            asked = self.options.compile
            settings = asked if isinstance(asked, dict) else {}
            self.compiled[way] = torch.compile(_twin(way), **settings)
        return self.compiled[way]

    # Which way

    def fastest(
        self, batch: Batch, directions: torch.Tensor
    ) -> tuple[FeatureMode, bool]:
        """The fastest way that works, on as many examples as it will be.

        Where the expected costs are far apart the cheaper way is only tried; where
        they are close both are timed.
        """
        asked = self.options.feature_mode
        forward = partial(self._try_forward, batch, directions)
        reverse = partial(self._try_reverse, batch, directions)
        if asked is FeatureMode.REVERSE:
            trials = reverse()
        elif asked is not FeatureMode.AUTO:
            trials = forward()
        else:
            cost = self._costs(batch, len(directions))
            advantage = cost[FeatureMode.REVERSE] / cost[FeatureMode.FORWARD]
            first, second = (reverse, forward) if advantage < 1 else (forward, reverse)
            trials = first()
            clear = max(advantage, 1 / advantage) > CLEAR_RATIO
            if not clear or all(t.error is not None for t in trials.values()):
                trials |= {way: t.handicapped() for way, t in second().items()}
        return winner(trials)

    def _try_forward(self, batch: Batch, directions: torch.Tensor) -> Trials:
        """Forward mode in both ways and, where it fails, its replacement."""
        asked = self.options.feature_mode
        trials: Trials = {}
        if asked in (FeatureMode.FORWARD, FeatureMode.AUTO):
            # Together is faster for most layers; one after the other for depthwise
            # convolutions, which `vmap` makes slow.
            way = FeatureMode.FORWARD, True
            together = trials[way] = self._try(*way, batch, directions)
            if not self._compiles(*way) or together.error is not None:
                way = FeatureMode.FORWARD, False
                trials[way] = self._try(*way, batch, directions).handicapped()
        if asked is not FeatureMode.FORWARD:
            if all(t.error is not None for t in trials.values()):
                way = FeatureMode.DOUBLE_VJP, True
                trials[way] = self._try(*way, batch, directions)
        return trials

    def _try_reverse(self, batch: Batch, directions: torch.Tensor) -> Trials:
        """Reverse mode in the ways that `row_mode` leaves open."""
        asked, mode = self.options.row_mode, FeatureMode.REVERSE
        trials: Trials = {}
        if asked is not RowMode.LOOP:
            together = trials[mode, True] = self._try(mode, True, batch, directions)
            if self._compiles(mode, True) and together.error is None:
                return trials  # as it was asked for
        if asked is not RowMode.VMAP:
            one_by_one = self._try(mode, False, batch, directions)
            trials[mode, False] = one_by_one.handicapped()
        return trials

    def _try(
        self,
        mode: FeatureMode,
        together: bool,
        batch: Batch,
        directions: torch.Tensor,
    ) -> Trial:
        """Seconds per example of all directions, from the first block of them.

        A way that only fails to compile is taken as it is, with a warning.
        """
        trial = self._timed(mode, together, batch, directions)
        if trial.error is None or not self._compiles(mode, together):
            return trial
        self.compiled[COMPILED[mode]] = COMPILED[mode]
        plain = self._timed(mode, together, batch, directions)
        if plain.error is None:
            warn_caller(
                f"{mode.value}-mode features are not compiled: torch.compile failed "
                f"({type(trial.error).__name__}: {trial.error}). Set compile=False, or "
                "other arguments of torch.compile as a dict.",
                CompileWarning,
            )
        return plain

    def _timed(
        self,
        mode: FeatureMode,
        together: bool,
        batch: Batch,
        directions: torch.Tensor,
    ) -> Trial:
        block = self._blocks(mode, directions)[0]
        one_by_one = mode is FeatureMode.FORWARD and not together
        if one_by_one or mode is FeatureMode.DOUBLE_VJP:
            block = block[:FEW_DIRECTIONS]
        at_once = self._examples_at_once(mode, together, len(block))
        n = min(at_once, max(batch.size, FEWEST_EXAMPLES))
        if mode is FeatureMode.REVERSE and not together:
            n = min(n, 2)  # a loop takes as long per example on a few
        many = repeated(batch, n, self.fn.device)
        compute = self._function(mode, together, block, batch.size, create_graph=False)

        def run(m: int) -> object:
            return compute(many.take(slice(0, m)))

        with kept_memory(self.heap_bytes(mode, together, n, len(block))):
            if self._compiles(mode, together):
                attempt(run, 1, measure=False)  # compiling does not count
            trial = attempt(run, n, measure=self.fn.has_values)
        return trial.times(len(directions) / len(block))

    def _costs(self, batch: Batch, rank: int) -> dict[FeatureMode, float]:
        """Expected costs of one example's features, in forward passes."""
        one = batch.take(slice(0, 1))
        n_outputs, n_params = self.selection.size, self.sizes.n_params
        # Fused attention is one operator, whose multiplications are not counted.
        kernels, counter = differentiable_kernels(), FlopCounterMode(display=False)
        with torch.no_grad(), kernels, counter:
            self.fn(self.fn.parameters(), one.inputs)
        multiplications = max(counter.get_total_flops() / 2, n_params)
        product = n_outputs * n_params * rank / multiplications
        return {
            FeatureMode.FORWARD: 2 * rank + 1,
            FeatureMode.DOUBLE_VJP: 3 * rank + 2,
            FeatureMode.REVERSE: 2 * n_outputs + 1 + product,
        }


_twins = itertools.count()


def _twin(way: Way) -> Way:
    """The same with code of its own. Compilers stop after a few models and shapes per
    piece of code, which all posteriors of a process would share."""
    assert isinstance(way, FunctionType)
    code = way.__code__.replace(co_name=f"{way.__name__}_{next(_twins)}")
    return FunctionType(code, way.__globals__, way.__name__, way.__defaults__)
