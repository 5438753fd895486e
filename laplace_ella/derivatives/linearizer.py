"""One linearisation of a model: rows of J(x) and features J(x)V, batch after batch.

Models differ in which derivatives they support and which are fast. `Linearizer` finds
out once, on one batch, and keeps the answer; nothing is decided by the text of an
exception, and nothing is retried afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from laplace_ella.derivatives.features import (
    FeatureMode,
    by_double_vjp,
    by_forward,
    by_forward_loop,
)
from laplace_ella.derivatives.libraries import LIBRARIES, check_rows, rows_by_backend
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.rows import (
    RowMode,
    jacobian_by_loop,
    jacobian_by_vmap,
    projection_by_vmap,
    row_dtype,
    rows_by_loop,
    rows_by_vmap,
)
from laplace_ella.derivatives.sizes import PassSizes
from laplace_ella.derivatives.trials import Trial, attempt, winner
from laplace_ella.fitting.memory import Activations
from laplace_ella.support.batches import batch_size, chunks, detach, has_values, take
from laplace_ella.support.preserve import differentiable_kernels, full_precision

__all__ = ["Linearizer"]

logger = logging.getLogger("laplace_ella")

#: Directions that are fetched at once from another device.
OFFLOADED_BLOCK = 8

#: Costs further apart than this are not worth a measurement.
CLEAR_RATIO = 3.0


class Linearizer:
    """Derivatives of one model, in the ways that work and are fastest for it.

    Parameters
    ----------
    fn : ModelFunction
    dict_key_x : str
        where a mapping holds its inputs
    feature_mode : FeatureMode or str
    row_mode : RowMode or str
    chunk_size : int, optional
        examples that are differentiated at once; chosen automatically if None
    compile : bool or dict, default=False
        compile the forward-mode pass; a dict holds arguments of `torch.compile`
    """

    def __init__(
        self,
        fn: ModelFunction,
        dict_key_x: str = "input_ids",
        feature_mode: FeatureMode | str = FeatureMode.AUTO,
        row_mode: RowMode | str = RowMode.AUTO,
        chunk_size: int | None = None,
        compile: bool | dict[str, Any] = False,
    ) -> None:
        self.fn = fn
        self.dict_key_x = dict_key_x
        self.asked_feature_mode = FeatureMode(feature_mode)
        self.asked_row_mode = RowMode(row_mode)
        self.chunk_size = chunk_size
        self.feature_mode: FeatureMode | None = None
        self.row_mode: RowMode | None = None
        self.jacobian_mode: RowMode | None = None
        self.n_outputs = 0
        self.activations = Activations(0, 0)
        self._vectorized = True  # whether tangents go through the model together
        self.compile = compile
        self._compiled: Callable[..., Any] | None = None
        self._autocast = False

    def _mind_autocast(self) -> None:
        """Decide again under autocast, or without it: other ways may work.

        `vmap`, for example, has no batch normalisation of mixed precision.
        """
        autocast = torch.is_autocast_enabled(self.device.type)
        if autocast is not self._autocast:
            self._autocast = autocast
            self.feature_mode = self.row_mode = self.jacobian_mode = None

    # Shapes and sizes

    @property
    def n_params(self) -> int:
        return sum(self.fn.numels())

    @property
    def device(self) -> torch.device:
        return next(self.fn.model.parameters()).device

    @property
    def sizes(self) -> PassSizes:
        """What one pass takes, with the activations that are known so far."""
        return PassSizes(
            self.n_params,
            row_dtype(self.fn).itemsize,
            self.activations,
            self.device.type,
            self.chunk_size,
        )

    # Rows of the Jacobian

    def rows(
        self, x: Any, examples: torch.Tensor, cotangents: torch.Tensor
    ) -> torch.Tensor:
        """cᵀJ(x) for `cotangents[m]` (C,) at example `examples[m]` of x: (m, P)."""
        return torch.cat(list(self.row_chunks(x, examples, cotangents)))

    def row_chunks(
        self, x: Any, examples: torch.Tensor, cotangents: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """The same in chunks, so that never more than one of them is in memory."""
        self._mind_autocast()
        if self.row_mode is None:
            self._choose_row_mode(x, examples, cotangents)
        compute = self._row_function()
        size = batch_size(x, self.dict_key_x)
        for part in chunks(len(examples), self.sizes.rows_at_once()):
            with differentiable_kernels():  # the flags are not kept between chunks
                rows = compute(self.fn, x, size, examples[part], cotangents[part])
            yield rows

    def _row_function(self) -> Callable[..., torch.Tensor]:
        if self.row_mode in LIBRARIES:
            return partial(rows_by_backend, LIBRARIES[self.row_mode])
        return rows_by_vmap if self.row_mode is RowMode.VMAP else rows_by_loop

    def _choose_row_mode(
        self, x: Any, examples: torch.Tensor, cotangents: torch.Tensor
    ) -> None:
        """Keep the fastest way that works on the first few rows.

        A library that was asked for is not timed but checked.
        """
        size = batch_size(x, self.dict_key_x)
        if self.asked_row_mode in LIBRARIES:
            library = LIBRARIES[self.asked_row_mode]
            with differentiable_kernels():
                check_rows(library, self.fn, x, size, examples, cotangents.shape[-1])
            self.row_mode = self.asked_row_mode
            logger.info("rows of the Jacobian by %s", library.name)
            return

        def way(compute: Callable[..., torch.Tensor]) -> Callable[[int], object]:
            return lambda n: compute(self.fn, x, size, examples[:n], cotangents[:n])

        ways = {RowMode.VMAP: way(rows_by_vmap), RowMode.LOOP: way(rows_by_loop)}
        if self.asked_row_mode is not RowMode.AUTO:
            ways = {self.asked_row_mode: ways[self.asked_row_mode]}
        with differentiable_kernels():
            trials = self._try_row_modes(
                ways, min(len(examples), 16, self.sizes.rows_at_once())
            )
        self.row_mode = winner(trials)
        logger.info("rows of the Jacobian by %s", self.row_mode.value)

    def jacobian(
        self, x: Any, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, C) and J(x) (B, C, P); memory of B·C·P, for small batches."""
        size = batch_size(x, self.dict_key_x)
        if not size:
            return self._nothing(), self._nothing(sum(self.fn.numels()))
        self._mind_autocast()
        if self.jacobian_mode is None:
            self._choose_jacobian_mode(x)
        with differentiable_kernels():
            if self.jacobian_mode is RowMode.LOOP:
                return jacobian_by_loop(self.fn, x, size, create_graph)
            with torch.set_grad_enabled(create_graph):
                return jacobian_by_vmap(self.fn, x, size)

    def _choose_jacobian_mode(self, x: Any) -> None:
        """Keep the fastest way that works on the first few examples."""
        size = batch_size(x, self.dict_key_x)

        def way(compute: Callable[..., Any]) -> Callable[[int], object]:
            return lambda n: compute(self.fn, take(x, slice(0, n), size), n)

        ways = {
            RowMode.VMAP: way(jacobian_by_vmap),
            RowMode.LOOP: way(jacobian_by_loop),
        }
        if self.asked_row_mode in ways:  # the libraries make rows only
            ways = {self.asked_row_mode: ways[self.asked_row_mode]}
        at_once = self.sizes.rows_at_once(rows_per_example=self.n_outputs)
        with differentiable_kernels(), torch.no_grad():
            trials = self._try_row_modes(ways, min(size, 16, at_once))
        self.jacobian_mode = winner(trials)
        logger.info("Jacobians by %s", self.jacobian_mode.value)

    def _try_row_modes(
        self, ways: dict[RowMode, Callable[[int], object]], n: int
    ) -> dict[RowMode, Trial]:
        """Trials on n examples; a loop takes as long an example on a few.

        Larger batches make `vmap` faster still, so the loop must be clearly better.
        """
        trials = {}
        for mode, way in ways.items():
            few = n if mode is RowMode.VMAP else min(n, 2)
            trials[mode] = attempt(way, few, self._has_values())
        if RowMode.LOOP in trials:
            trials[RowMode.LOOP] = trials[RowMode.LOOP].handicapped()
        return trials

    def _has_values(self) -> bool:
        """Whether a timing means anything: not where tensors have no values."""
        return has_values(self.fn.parameters()[0])

    def project(
        self, x: Any, cotangents: torch.Tensor, directions: torch.Tensor
    ) -> torch.Tensor:
        """cᵀJ(x)V (B, S, K) for cotangents (B, S, C), without keeping the gradients."""
        B, S, _ = cotangents.shape
        examples = torch.arange(B, device=cotangents.device).repeat_interleave(S)
        V = directions.T.to(self.device, row_dtype(self.fn))  # once, not a chunk
        parts = []
        for rows in self.row_chunks(x, examples, cotangents.flatten(0, 1)):
            with full_precision(self.device):
                parts.append(rows @ V)
        return torch.cat(parts).unflatten(0, (B, S))

    # Features

    def features(
        self, x: Any, directions: torch.Tensor, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, C) and features J(x)V (B, C, K) for directions Vᵀ (K, P).

        `n_outputs` must be set. Directions that live on another device are fetched in
        blocks.
        """
        size = batch_size(x, self.dict_key_x)
        if not size:
            return self._nothing(), self._nothing(len(directions))
        self._mind_autocast()
        if self.feature_mode is None:
            self.choose_feature_mode(x, directions)
        blocks = [directions]
        if directions.device != self.device:
            blocks = directions.split(OFFLOADED_BLOCK)
        elif self.feature_mode is not FeatureMode.REVERSE:
            blocks = directions.split(self.sizes.tangents_at_once)
        columns = []
        for block in blocks:
            block = block.to(self.device, row_dtype(self.fn))
            compute = self._feature_function(
                self.feature_mode, block, create_graph, self._vectorized
            )
            at_once = (
                self.sizes.rows_at_once(rows_per_example=self.n_outputs)
                if self.feature_mode is FeatureMode.REVERSE
                else self.sizes.examples_at_once(len(block) if self._vectorized else 1)
            )
            with differentiable_kernels():
                parts = [
                    compute(take(x, part, size), part.stop - part.start)
                    for part in chunks(size, at_once)
                ]
            f, phi = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            columns.append(phi)
        return f, columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def _nothing(self, *shape: int) -> torch.Tensor:
        """Outputs of no example `(0, C, *shape)`, without asking the model."""
        return torch.zeros(
            0, self.n_outputs, *shape, device=self.device, dtype=row_dtype(self.fn)
        )

    def features_and_kernel(
        self,
        x: Any,
        directions: torch.Tensor,
        weights: torch.Tensor | None,
        create_graph: bool = False,
        group: Callable[[torch.Tensor], torch.Tensor] = lambda J: J,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """f (B, C), J diag(w) V (B, C, K) and J diag(w) Jᵀ (B, C, C), by reverse mode.

        Weights None stand for ones. `group` rearranges Jacobians (B, C, P) to (·, c, P)
        where only kernels within groups of c outputs are wanted, (·, c, c).
        """
        size = batch_size(x, self.dict_key_x)
        if not size:
            f, J = self.jacobian(x)
            return f, self._nothing(len(directions)), group(J) @ group(J).mT
        V = directions.T.to(self.device, row_dtype(self.fn))  # once, not a chunk
        parts = []
        for part in chunks(
            size, self.sizes.rows_at_once(rows_per_example=self.n_outputs)
        ):
            f, J = self.jacobian(take(x, part, size), create_graph)
            weighted = J if weights is None else J * weights.to(J)
            with full_precision(self.device):
                parts.append((f, weighted @ V, group(weighted) @ group(J).mT))
        f, phi, kernel = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return f, phi, kernel

    def _feature_function(
        self,
        mode: FeatureMode,
        directions: torch.Tensor,
        create_graph: bool,
        vectorized: bool,
    ) -> Callable[[Any, int], tuple[torch.Tensor, torch.Tensor]]:
        def forward(x: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            way = self._push_forward() if vectorized else by_forward_loop
            with torch.set_grad_enabled(create_graph):
                return way(self.fn, x, directions)

        def reverse(x: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            if self.jacobian_mode is None:
                self._choose_jacobian_mode(x)
            if self.jacobian_mode is RowMode.VMAP:
                with torch.set_grad_enabled(create_graph):
                    return projection_by_vmap(self.fn, x, size, directions)
            f, J = self.jacobian(x, create_graph)
            with full_precision(self.device):
                return f, J @ directions.T.to(J)

        def double_vjp(x: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            return by_double_vjp(self.fn, x, directions, create_graph)

        return {
            FeatureMode.FORWARD: forward,
            FeatureMode.REVERSE: reverse,
            FeatureMode.DOUBLE_VJP: double_vjp,
        }[mode]

    def choose_feature_mode(self, x: Any, directions: torch.Tensor) -> None:
        """Find the fastest way that works, on the batch x; `n_outputs` must be set.

        Where the expected costs are far apart the cheaper way is only tried; where
        they are close both are timed.
        """
        x = detach(x)  # counting operations fails on inputs with a graph
        size = batch_size(x, self.dict_key_x)
        few = min(size, 4, self.sizes.examples_at_once(len(directions)))

        def trial(mode: FeatureMode, vectorized: bool = True) -> Trial:
            compute = self._feature_function(mode, directions, False, vectorized)
            with differentiable_kernels():
                return attempt(
                    lambda n: compute(take(x, slice(0, n), size), n),
                    few,
                    self._has_values(),
                )

        def forward_family() -> dict[tuple[FeatureMode, bool], Trial]:
            trials = {}
            if self.asked_feature_mode in (FeatureMode.FORWARD, FeatureMode.AUTO):
                # Together is faster for most layers; one after the other for depthwise
                # convolutions, which `vmap` makes slow.
                together = trials[FeatureMode.FORWARD, True] = trial(
                    FeatureMode.FORWARD
                )
                if not self.compile or together.error is not None:
                    one_by_one = trial(FeatureMode.FORWARD, vectorized=False)
                    trials[FeatureMode.FORWARD, False] = one_by_one.handicapped()
            if all(t.error is not None for t in trials.values()):
                if self.asked_feature_mode is not FeatureMode.FORWARD:
                    trials[FeatureMode.DOUBLE_VJP, True] = trial(FeatureMode.DOUBLE_VJP)
            return trials

        def reverse() -> dict[tuple[FeatureMode, bool], Trial]:
            return {(FeatureMode.REVERSE, True): trial(FeatureMode.REVERSE)}

        if self.asked_feature_mode is FeatureMode.REVERSE:
            trials = reverse()
        elif self.asked_feature_mode is not FeatureMode.AUTO:
            trials = forward_family()
        else:
            cost = self.costs(take(x, slice(0, 1), size), len(directions))
            advantage = cost[FeatureMode.REVERSE] / cost[FeatureMode.FORWARD]
            order = [forward_family, reverse]
            if advantage < 1:
                order.reverse()
            trials = order[0]()
            clear = max(advantage, 1 / advantage) > CLEAR_RATIO
            if not clear or all(t.error is not None for t in trials.values()):
                trials |= {k: t.handicapped() for k, t in order[1]().items()}
        self.feature_mode, self._vectorized = winner(trials)
        logger.info("features by %s", self.feature_mode.value)

    def _push_forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Forward mode, compiled at first use if that was asked for."""
        if not self.compile:
            return by_forward
        if self._compiled is None:
            options = self.compile if isinstance(self.compile, dict) else {}
            self._compiled = torch.compile(by_forward, **options)
        return self._compiled

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # compiled code is not picklable

    def state(self) -> dict[str, str | bool | None]:
        """What was decided, in plain types, so that a loaded posterior does alike."""

        def value(mode: Enum | None) -> str | None:
            return None if mode is None else mode.value

        return {
            "feature_mode": value(self.feature_mode),
            "row_mode": value(self.row_mode),
            "jacobian_mode": value(self.jacobian_mode),
            "vectorized": self._vectorized,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the decisions of `state()`."""
        for name, enum in (
            ("feature_mode", FeatureMode),
            ("row_mode", RowMode),
            ("jacobian_mode", RowMode),
        ):
            setattr(self, name, enum(state[name]) if state[name] else None)
        self._vectorized = state["vectorized"]

    def costs(self, x: Any, rank: int) -> dict[FeatureMode, float]:
        """Expected costs of one example's features, in forward passes."""
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.fn(self.fn.parameters(), x)
        multiplications = max(counter.get_total_flops() / 2, self.n_params)
        product = self.n_outputs * self.n_params * rank / multiplications
        return {
            FeatureMode.FORWARD: 2 * rank + 1,
            FeatureMode.DOUBLE_VJP: 3 * rank + 2,
            FeatureMode.REVERSE: 2 * self.n_outputs + 1 + product,
        }
