"""One linearisation of a model: rows of J(x) and features J(x)V, batch after batch.

Models differ in which derivatives they support and which are fast. `Linearizer` finds
out once, on one batch, and keeps the answer; nothing is decided by the text of an
exception. Only what is folded is given up afterwards, if the model no longer allows it.

Index legend: B batch, S positions, C outputs at each, O = S·C, P parameters, K rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from laplace_ella.derivatives.feature_passes import FeaturePasses, Way
from laplace_ella.derivatives.features import FeatureMode, Features
from laplace_ella.derivatives.folding import FoldedFunction, FoldFinder, FoldingError
from laplace_ella.derivatives.jacobian_passes import JacobianPasses
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.modes import Decisions, Modes
from laplace_ella.derivatives.options import ComputeOptions
from laplace_ella.derivatives.probe import Probe, checked_outputs
from laplace_ella.derivatives.residuals import residual_parts
from laplace_ella.derivatives.row_passes import Room, RowPasses, no_room
from laplace_ella.derivatives.rows import RowMode, empty_rows, pull_back
from laplace_ella.derivatives.selection import Selection
from laplace_ella.derivatives.sizes import (
    Activations,
    PassSizes,
    activation_bytes,
)
from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.support.batches import Batch
from laplace_ella.support.heap import kept_memory
from laplace_ella.support.layout import OutputLayout, Positions, check_outputs
from laplace_ella.support.metric import Metric, split_gradients
from laplace_ella.support.preserve import (
    autocast_enabled,
    differentiable_kernels,
    full_precision,
)
from laplace_ella.support.resources import budget_of, human_bytes, parse_bytes
from laplace_ella.support.span import Span

__all__ = ["Linearizer", "Probe"]

logger = logging.getLogger("laplace_ella")

#: Everything chosen automatically.
DEFAULT = ComputeOptions()


class Linearizer:
    """Derivatives of one model, in the ways that work and are fastest for it.

    Parameters
    ----------
    fn : ModelFunction
    layout : OutputLayout
        where outputs at many positions have their channels
    dict_key_x : str
        where a mapping holds its inputs
    options : ComputeOptions
    """

    def __init__(
        self,
        fn: ModelFunction,
        layout: OutputLayout = OutputLayout.FLAT,
        dict_key_x: str = "input_ids",
        options: ComputeOptions = DEFAULT,
    ) -> None:
        self.fn = fn
        self.layout = layout
        self.dict_key_x = dict_key_x
        self.options = options
        self._decisions = Decisions()
        self._probes: dict[tuple[Any, ...], Probe] = {}
        self._checked: set[tuple[Any, ...]] = set()
        self._compiled: dict[Way, Way] = {}
        self._in_dtypes: dict[torch.dtype, Linearizer] = {}

    def with_options(self, options: ComputeOptions) -> Linearizer:
        """The same model and layout, computed in another way; nothing is decided."""
        return Linearizer(self.fn, self.layout, self.dict_key_x, options)

    def in_dtype(self, dtype: torch.dtype) -> Linearizer:
        """The same model and layout, computed in another precision."""
        if dtype == self.dtype:
            return self
        if dtype not in self._in_dtypes:
            fn = ModelFunction(self.fn.model, self.fn.names, dtype)
            self._in_dtypes[dtype] = Linearizer(
                fn, self.layout, self.dict_key_x, self.options
            )
        return self._in_dtypes[dtype]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": {}}  # compiled code is not picklable

    @property
    def n_params(self) -> int:
        return self.fn.n_params

    @property
    def device(self) -> torch.device:
        return self.fn.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all results."""
        return self.fn.dtype

    # Decisions

    @property
    def _autocast(self) -> bool:
        return autocast_enabled(self.device)

    def modes(self, rank: int) -> Modes:
        """Decisions so far for `rank` directions, under the current autocast state."""
        return self._decisions.modes(self._autocast, rank)

    def adopt(self, rank: int, modes: Modes) -> None:
        """Take over decisions for `rank` directions, for example from a checkpoint."""
        self._decisions.adopt(self._autocast, rank, modes)

    def decisions(self) -> dict[str, Any]:
        """All that was decided, in every precision, in plain types: work that goes on
        elsewhere rounds as it did here."""
        return {
            "asked": self._asked,
            **self._decisions.to_dict(),
            "in_dtypes": {
                str(dtype).removeprefix("torch."): other.decisions()
                for dtype, other in self._in_dtypes.items()
            },
        }

    def adopt_decisions(self, decisions: Mapping[str, Any]) -> None:
        """Take over what `decisions` returned, unless something else is asked for."""
        if decisions["asked"] == self._asked:
            self._decisions.update(decisions)
        for dtype, others in decisions["in_dtypes"].items():
            self.in_dtype(getattr(torch, dtype)).adopt_decisions(others)

    @property
    def _asked(self) -> list[str]:
        return [self.options.feature_mode.value, self.options.row_mode.value]

    # Outputs

    def outputs(self, x: Any) -> tuple[torch.Tensor, Positions]:
        """Outputs `(B·S, C)` by a plain forward pass, and their positions."""
        batch = self._batch(x)
        if not batch.size:
            positions = self._positions(batch)
            return self._nothing(positions.n_channels), positions
        f = self._run(batch, self.fn.prepare(self.fn.parameters(), batch.inputs))
        positions = self.layout.of(tuple(f.shape[1:]))
        return positions.rows(f.flatten(1).to(self.dtype)), positions

    def n_values(self, x: Any) -> int:
        """How many outputs all examples of x have together, B·O."""
        batch = self._batch(x)
        return batch.size * self._n_outputs(batch)

    def probe(self, x: Any) -> Probe:
        """Shape and memory of the output for one example of x.

        One forward pass for every kind of inputs: their shapes per example, their
        dtypes, and autocast. Later calls remember it.
        """
        return self._probe(self._batch(x))

    def sizes(self, probe: Probe) -> PassSizes:
        """How many inputs of the kind that was probed are differentiated at once."""
        return self._sizes(probe.activations)

    def kept_memory(self) -> AbstractContextManager[None]:
        """In this context what one batch frees serves the next, see `kept_memory`."""
        return kept_memory(self._sizes(Activations(0, 0)).heap_limit)

    def _sizes(self, activations: Activations) -> PassSizes:
        budget = self.options.memory_budget
        return PassSizes(
            self.n_params,
            self.dtype.itemsize,
            activations,
            self.device.type,
            self.options.chunk_size,
            None if budget is None else parse_bytes(budget),
        )

    def _batch(self, x: Any) -> Batch:
        return Batch.of(x, self.dict_key_x)

    def _kind(self, batch: Batch) -> tuple[Any, ...]:
        """Inputs that are alike in what a `Probe` tells."""
        return self._autocast, batch.signature

    def _probe(self, batch: Batch) -> Probe:
        key = self._kind(batch)
        if key not in self._probes:
            if not batch.size:
                return self._probe_of_nothing(batch)
            one = batch.take(slice(0, 1)).detach()
            finders: list[FoldFinder] = []

            def watch(state: dict[str, torch.Tensor]) -> FoldFinder:
                finders.append(FoldFinder(state))
                return finders[-1]

            run = self.fn.watched(one.inputs, watch)
            f, activations = activation_bytes(self._run, one, run)
            if finders[-1].batch_statistics:
                raise ValueError(
                    "A batch normalisation uses the statistics of the batch in "
                    "evaluation mode, too, as with track_running_stats=False: the "
                    "outputs of an example depend on the others in its batch, and have "
                    "no derivative of their own. Give it running statistics, or use "
                    "nn.GroupNorm or nn.InstanceNorm2d."
                )
            folds = finders[-1].folds
            self._probes[key] = Probe(tuple(f.shape[1:]), activations, folds)
        return self._probes[key]

    def _probe_of_nothing(self, batch: Batch) -> Probe:
        """What is known of inputs of a new kind without an example."""
        try:
            with torch.no_grad():
                f = self.fn(self.fn.parameters(), batch.inputs)
            check_outputs(f, self.layout, 0)
            return Probe(tuple(f.shape[1:]), Activations(0, 0))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # many layers refuse an empty batch
            if self._probes:
                return next(iter(self._probes.values()))
            raise ValueError(
                "The shape of the outputs of an empty batch is not known: the model "
                f"cannot run on it ({type(error).__name__}: {error}), and it has not "
                "seen an example yet. Call it with at least one example first."
            ) from error

    def _run(self, batch: Batch, run: Callable[[], Any]) -> torch.Tensor:
        """The model's output in its natural shape, checked."""
        examples = {signature for _, signature in self._probes}
        return checked_outputs(self.fn.model, batch, run, self.layout, examples)

    def _positions(self, batch: Batch) -> Positions:
        return self.layout.of(self._probe(batch).output_shape)

    def _nothing(self, *shape: int) -> torch.Tensor:
        """Results of no example, `(0, *shape)`."""
        return torch.zeros(0, *shape, device=self.device, dtype=self.dtype)

    # Rows of the Jacobian

    def rows(
        self, x: Any, examples: torch.Tensor, cotangents: torch.Tensor
    ) -> torch.Tensor:
        """cᵀJ(x) for `cotangents[m]` (O,) at example `examples[m]` of x: (m, P)."""
        rows, filled = empty_rows(self.fn, len(examples)), 0
        for some in self.row_chunks(x, examples, cotangents):
            rows[filled : filled + len(some)] = some
            filled += len(some)
        return rows

    def row_chunks(
        self,
        x: Any,
        examples: torch.Tensor,
        cotangents: torch.Tensor,
        at_most: int | None = None,
        room: Room = no_room,
    ) -> Iterator[torch.Tensor]:
        """The same in chunks, so that never more than one of them is in memory, and
        until the next is asked for only, unless there is `room` for it elsewhere.

        None has more than `at_most` rows, for receivers without room for more.
        """
        if not len(examples):
            return
        batch, done = self.fn.ordered(self._batch(x)).detach(), 0
        sizes = self.sizes(self._probe(batch))
        at_once = min(sizes.rows_at_once(), at_most or len(examples))
        while done < len(examples):
            rest = examples[done:], cotangents[done:]
            try:
                passes = self._row_passes(batch)
                mode = self._row_mode(passes, batch, *rest, at_once)
                for rows in passes.chunks(mode, batch, *rest, at_once, room):
                    done += len(rows)
                    yield rows
            except FoldingError as error:
                self._unfold(batch, error)

    def _row_passes(self, batch: Batch) -> RowPasses:
        probe = self._probe(batch)
        return RowPasses(
            self.fn, self._folded(probe), self.sizes(probe), self.options.row_mode
        )

    def _row_mode(
        self,
        passes: RowPasses,
        batch: Batch,
        examples: torch.Tensor,
        cotangents: torch.Tensor,
        at_once: int,
    ) -> RowMode:
        """The fastest way that works, found out once; what is folded is checked once
        for every kind of inputs."""
        modes, autocast = self._decisions.rows, self._autocast
        if autocast not in modes:
            modes[autocast] = passes.fastest(batch, examples, cotangents, at_once)
            logger.info("rows of the Jacobian by %s", modes[autocast].value)
        mode = modes[autocast]
        key = (self._kind(batch), mode)
        if passes.folds(mode) and key not in self._checked:
            if not passes.agree(mode, batch, cotangents.shape[-1]):
                modes.pop(autocast)  # it may be one that works in this way only
                raise FoldingError("gradients of one example come out differently.")
            self._checked.add(key)
        return mode

    def project(
        self, x: Any, cotangents: torch.Tensor, directions: torch.Tensor
    ) -> torch.Tensor:
        """cᵀJ(x)V (B, n, K) for n cotangents per example (B, n, O), without keeping
        the gradients."""
        B, n, _ = cotangents.shape
        if not B * n:
            return self._nothing(n, len(directions))
        examples = torch.arange(B, device=cotangents.device).repeat_interleave(n)
        V = directions.T.to(self.device, self.dtype)  # once, not per chunk
        parts = []
        for rows in self.row_chunks(x, examples, cotangents.flatten(0, 1)):
            with full_precision(self.device):
                parts.append(rows @ V)
        return torch.cat(parts).unflatten(0, (B, n))

    # Jacobians

    def jacobian(
        self, x: Any, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, Positions]:
        """Outputs (B, O), J(x) (B, O, P) in the model's order, and the positions.

        The result has B·O·P numbers; the passes that make it are bounded.
        """
        create_graph = create_graph and torch.is_grad_enabled()
        batch = self._batch(x)
        positions = self._positions(batch)
        n_outputs, P = self._n_outputs(batch), self.n_params
        if not batch.size:
            return self._nothing(n_outputs), self._nothing(n_outputs, P), positions
        self._check_result(
            f"Jacobians of {batch.size} examples", batch.size * n_outputs * P
        )
        passes = self._jacobian_passes(batch, Selection(positions))
        mode = self._jacobian_mode(batch)
        parts = [
            passes.whole(mode, part, create_graph)
            for part in passes.example_parts(batch)
        ]
        f, J = zip(*parts, strict=True)
        return torch.cat(f), J[0] if len(J) == 1 else torch.cat(J), positions

    def jacobian_chunks(
        self, x: Any
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Positions]]:
        """The same of as many examples at a time as one pass takes."""
        batch = self._batch(x)
        passes = self._jacobian_passes(batch, Selection(self._positions(batch)))
        for part in passes.example_parts(batch):
            yield self.jacobian(part.inputs)

    def pull_back(self, x: Any, cotangents: torch.Tensor) -> torch.Tensor:
        """uᵀJ(x) summed over the batch, (n, P), for cotangents (B, O, n)."""
        with differentiable_kernels():
            return pull_back(self.fn, x, lambda _: cotangents.unbind(-1))[1]

    def _n_outputs(self, batch: Batch) -> int:
        """O, the number of outputs of one example."""
        return math.prod(self._probe(batch).output_shape)

    def _jacobian_passes(self, batch: Batch, selection: Selection) -> JacobianPasses:
        sizes = self.sizes(self._probe(batch))
        return JacobianPasses(self.fn, sizes, selection, self.options.row_mode)

    def _jacobian_mode(self, batch: Batch) -> RowMode:
        """The fastest way that works, found out once with all outputs."""
        modes, autocast = self._decisions.jacobians, self._autocast
        if autocast not in modes:
            everything = Selection(self._positions(batch))
            passes = self._jacobian_passes(batch, everything)
            modes[autocast] = passes.fastest(batch.detach())
            logger.info("Jacobians by %s", modes[autocast].value)
        return modes[autocast]

    def _check_result(self, what: str, numbers: int) -> None:
        """Refuse a result that cannot fit, before anything is computed."""
        needed = numbers * self.dtype.itemsize
        if needed < 2**28:
            return
        budget = budget_of(self.device, self.options.memory_budget)
        if needed > budget:
            raise InsufficientMemoryError(
                f"{what} take {human_bytes(needed)} on {self.device}, the budget is "
                f"{human_bytes(budget)}. Use smaller batches, complement='drop' (which "
                "needs no kernel), or raise memory_budget."
            )

    # Features

    def features(
        self,
        x: Any,
        directions: torch.Tensor,
        create_graph: bool = False,
        top: int | None = None,
    ) -> Features:
        """Outputs and features J(x)V for directions Vᵀ (K, P); with `top`, features of
        so many outputs at each position, the largest ones.

        Directions that live on another device are fetched in blocks.
        """
        create_graph = create_graph and torch.is_grad_enabled()
        batch = self._batch(x)
        positions = self._positions(batch)
        selection = Selection(positions, top)
        if not batch.size:
            f = self._nothing(positions.n_channels)
            phi = self._nothing(selection.n_channels, len(directions))
            return Features(f, phi, positions, outputs=selection.channels(f))
        passes = self._passes(batch, selection)
        try:
            mode, together = self._feature_mode(passes, batch, directions)
            self._check_folded(passes, mode, together, batch, directions)
            f, phi = passes.run(mode, together, batch, directions, create_graph)
        except FoldingError as error:
            self._unfold(batch, error)
            return self.features(x, directions, create_graph, top)
        f = positions.rows(f)
        outputs = selection.channels(f)
        if mode is FeatureMode.REVERSE or outputs is None:
            return Features(f, selection.rows(phi), positions, outputs=outputs)
        # The other ways have the features of all outputs anyhow.
        phi = positions.rows(phi).take_along_dim(outputs.unsqueeze(-1), 1)
        return Features(f, phi, positions, outputs=outputs)

    def _mode_key(
        self, passes: FeaturePasses, directions: torch.Tensor
    ) -> tuple[bool, int, int | None]:
        return self._autocast, len(directions), passes.selection.limit

    def _feature_mode(
        self, passes: FeaturePasses, batch: Batch, directions: torch.Tensor
    ) -> tuple[FeatureMode, bool]:
        """The fastest way that works, found out once."""
        key, modes = self._mode_key(passes, directions), self._decisions.features
        if key not in modes:
            modes[key] = passes.fastest(batch.detach(), directions)
            logger.info("features by %s", modes[key][0].value)
        return modes[key]

    def _passes(self, batch: Batch, selection: Selection) -> FeaturePasses:
        probe = self._probe(batch)
        return FeaturePasses(
            self.fn,
            self._folded(probe),
            self.sizes(probe),
            selection,
            self.options,
            self._compiled,
        )

    def _folded(self, probe: Probe) -> FoldedFunction | None:
        may = probe.folds and self._may_fold()
        return FoldedFunction(self.fn, probe.folds) if may else None

    def _unfold(self, batch: Batch, error: FoldingError) -> None:
        """Inputs of this kind are not folded any more."""
        logger.info("normalisations are not folded: %s", error)
        self._probes[self._kind(batch)] = replace(self._probe(batch), folds=())

    def _may_fold(self) -> bool:
        """In low precision folded weights would be those of another model."""
        model = self.fn.model
        tensors = (*model.parameters(), *model.buffers())
        dtypes = {t.dtype for t in tensors if t.is_floating_point()}
        own = self.fn.asked_dtype is not None or dtypes == {self.dtype}
        return own and not self._autocast

    def _check_folded(
        self,
        passes: FeaturePasses,
        mode: FeatureMode,
        together: bool,
        batch: Batch,
        directions: torch.Tensor,
    ) -> None:
        """Compare folded features with others, once for every kind of inputs."""
        key = (self._kind(batch), mode, together)
        if passes.folds(mode, together) and key not in self._checked:
            if not passes.agree(mode, together, batch, directions):
                # The mode may be one that works in this way only.
                self._decisions.features.pop(self._mode_key(passes, directions))
                raise FoldingError("features of one example come out differently.")
            self._checked.add(key)

    # Features and residuals

    def features_and_residual(
        self,
        x: Any,
        directions: torch.Tensor,
        metric: Metric | None = None,
        create_graph: bool = False,
        span: Span | None = None,
        top: int | None = None,
    ) -> Features:
        """Outputs, features and what lies outside the basis, by reverse mode.

        Parameters
        ----------
        directions : torch.Tensor
            Vᵀ `(K, P)`, orthonormal rows
        metric : Metric, optional
            in which gradients are measured, see `split_gradients`
        create_graph : bool
            whether the result can be differentiated in x
        span : Span, optional
            outside of which there is a part that is asked for as well, at each level
        top : int, optional
            of so many outputs at each position only, the largest ones
        """
        create_graph = create_graph and torch.is_grad_enabled()
        batch = self._batch(x)
        positions = self._positions(batch)
        selection = Selection(positions, top)
        S, c, K = positions.n_positions, selection.n_channels, len(directions)
        if not batch.size:
            f, phi = self._nothing(positions.n_channels), self._nothing(c, K)
            nothing = self._nothing(c, c)
            n_levels = 0 if span is None else len(span.ranks)
            unseen = None if span is None else self._nothing(n_levels, c, c)
            outputs = selection.channels(f)
            return Features(f, phi, positions, nothing, unseen, outputs)
        self._check_result(
            f"The residuals (C, C) of C={c} outputs at {batch.size * S} positions",
            batch.size * S * c * c,
        )
        directions = directions.to(self.device, self.dtype)  # once, not per chunk
        split = partial(
            split_gradients, directions=directions, metric=metric, span=span
        )
        passes = self._jacobian_passes(batch, selection)
        mode = self._jacobian_mode(batch)
        parts = []
        for part in passes.example_parts(batch):
            rows_of = partial(passes.run, mode, part, create_graph=create_graph)
            parts += residual_parts(rows_of, split, selection, passes.outputs_at_once)
        f, phi, residual, *unseen = (
            torch.cat(tensors) for tensors in zip(*parts, strict=True)
        )
        unseen = torch.stack(unseen, 1) if unseen else None
        outputs = selection.channels(f)
        return Features(f, phi, positions, residual, unseen, outputs)
