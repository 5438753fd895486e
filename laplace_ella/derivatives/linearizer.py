"""One linearisation of a model: rows of J(x) and features J(x)V, batch after batch.

The modes of differentiation were chosen on the first batch, see `decide`.

Index legend: B batch, S positions, C outputs at each, c of them selected, O = S·C,
P parameters, K rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from laplace_ella.derivatives.backends import BACKEND_OF, ROWS
from laplace_ella.derivatives.chunk_sizes import PassCost, pass_limit
from laplace_ella.derivatives.complements import GradientSplit, accurate_product
from laplace_ella.derivatives.jacobians import FEATURES, Features, largest, one_hot
from laplace_ella.derivatives.model_function import ModelFunction, clearer_errors
from laplace_ella.derivatives.modes import ComputeOptions, FeatureMode, Modes, RowMode
from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.support.batches import (
    Batch,
    OutputLayout,
    Positions,
    check_outputs,
    chunks,
    has_values,
)
from laplace_ella.support.memory import budget_of, human_bytes
from laplace_ella.support.preserve import autocast_enabled, differentiation

#: How much cheaper reverse mode must be for a few of the outputs, where features of all
#: are better taken in another way.
CLEAR_RATIO = 3.0

#: Layers whose gradients torch differentiates again as if their statistics were
#: constant, in forward mode and below `vmap`.
WRONG = (nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)

#: Bytes of a result that are not compared with a budget.
FEW_BYTES = 2**24


@dataclass(frozen=True)
class Linearizer:
    """Derivatives of one model, in the ways that work and are fastest for it.

    Attributes
    ----------
    fn : ModelFunction
    layout : OutputLayout
    dict_key_x : str
        where a mapping holds its inputs
    options : ComputeOptions
    output_shape : tuple of int
        of one example of the first batch
    example_shapes : tuple
        shapes of the tensors of that example
    largest, total : int
        bytes of the largest and of all results that its backward pass needs
    modes : Modes
    autocast : bool
        whether they were decided in mixed precision: under it other ways may work
    """

    fn: ModelFunction
    layout: OutputLayout
    dict_key_x: str
    options: ComputeOptions
    output_shape: tuple[int, ...]
    example_shapes: tuple[tuple[int, ...], ...]
    largest: int
    total: int
    modes: Modes
    autocast: bool = False

    @property
    def n_params(self) -> int:
        """Return P."""
        return self.fn.n_params

    @property
    def device(self) -> torch.device:
        """Return the model's device."""
        return self.fn.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all results."""
        return self.fn.dtype

    @property
    def budget(self) -> int:
        """Bytes that may be taken: those asked for, or a share of what is free."""
        return budget_of(self.device, self.options.memory_budget)

    def in_dtype(self, dtype: torch.dtype) -> Linearizer:
        """Return the same model and choice of modes, computed in another precision."""
        factor = dtype.itemsize / self.dtype.itemsize
        largest, total = int(factor * self.largest), int(factor * self.total)
        fn = ModelFunction(self.fn.model, self.fn.names, dtype)
        return replace(self, fn=fn, largest=largest, total=total)

    def _ways(self, create_graph: bool = False) -> tuple[FeatureMode, RowMode]:
        """Return the modes of features and rows. Where nothing was decided, or not in
        this precision, those of plain autograd, which work for nearly every model; they
        alone can be differentiated again where the model has layers of `WRONG`."""
        features, rows = self.modes.features, self.modes.rows
        if create_graph and any(isinstance(m, WRONG) for m in self.fn.model.modules()):
            return FeatureMode.REVERSE, RowMode.LOOP
        if self.autocast == autocast_enabled(self.device) and features and rows:
            return features, rows
        if features is not FeatureMode.REVERSE:
            features = FeatureMode.DOUBLE_REVERSE
        return features, RowMode.LOOP

    # Inputs and outputs

    def batch(self, x: Any) -> tuple[Batch, Positions]:
        """Return the inputs as examples, in memory as the weights want them, and where
        the outputs of one are; for other inputs than those of the first batch by a
        forward pass of one of them.

        Images that were turned from (H, W, C) keep their order in memory, and with it
        all activations; ResNet-20's features in reverse mode take a fifth longer.
        """
        batch, shape = Batch.of(x, self.dict_key_x), self.output_shape
        weights = [p for p in self.fn.model.parameters() if p.ndim > 3]
        if all([p.is_contiguous() for p in weights]):
            batch = batch.with_leaves([leaf.contiguous() for leaf in batch.leaves])
        if batch.size and batch.example_shapes != self.example_shapes:
            with torch.no_grad():
                shape = self._run(batch.take(slice(0, 1)), x).shape[1:]
        return batch, self.layout.of(shape)

    def _run(self, batch: Batch, x: Any) -> torch.Tensor:
        """Return the model's output for a part of x in its natural shape, checked."""
        with clearer_errors(x, self.example_shapes):
            f = self.fn(self.fn.parameters(), batch.inputs)
            return check_outputs(f, self.layout, batch.size)

    def outputs(self, x: Any) -> tuple[torch.Tensor, Positions]:
        """Return outputs `(B·S, C)` by plain forward passes, and their positions."""
        batch, positions = self.batch(x)
        f = self._new(batch.size, positions.n_values)
        for part in chunks(batch.size, self.pass_sizes(batch, positions, None, 1)[0]):
            f[part] = self._run(batch.take(part), x).flatten(1)
        return positions.rows(f), positions

    def n_values(self, x: Any) -> int:
        """Return how many outputs all examples of x have together, B·O."""
        batch, positions = self.batch(x)
        return batch.size * positions.n_values

    def parts(self, x: Any, numbers_per_output: int) -> Iterator[Any]:
        """Yield x in parts whose results fit the budget: so many numbers for each
        output, in double precision."""
        batch, positions = self.batch(x)
        each = 8 * positions.n_values * max(1, numbers_per_output)
        limit = pass_limit(self.device, self.options.memory_budget)
        for part in chunks(max(1, batch.size), limit // each):
            yield batch.take(part).inputs

    def _new(self, *shape: int) -> torch.Tensor:
        """Return a tensor for results, to be filled."""
        return torch.empty(*shape, device=self.device, dtype=self.dtype)

    # Sizes of passes

    def _cost(
        self, mode: FeatureMode | RowMode | None, factor: float = 1.0
    ) -> PassCost:
        row = self.n_params * self.dtype.itemsize
        return PassCost.of(mode, factor * self.largest, factor * self.total, row)

    def pass_sizes(
        self,
        batch: Batch,
        positions: Positions,
        mode: FeatureMode | RowMode | None,
        n_vectors: int,
    ) -> tuple[int, int]:
        """Return how many examples, with how many vectors each, make one pass;
        activations are in proportion to what the inputs have of numbers."""
        shapes, wanted = (batch.example_shapes, self.example_shapes), n_vectors
        here, first = (max(1, sum(map(math.prod, each))) for each in shapes)
        if mode in BACKEND_OF:  # which give the rows of all outputs
            wanted = positions.n_values
        cost, budget = self._cost(mode, here / first), self.options.memory_budget
        examples, vectors = cost.sizes(wanted, self.device, budget)
        if isinstance(mode, RowMode) and vectors < wanted:
            return 1, n_vectors if mode in BACKEND_OF else vectors
        return self.options.chunk_size or examples, min(vectors, n_vectors)

    def pass_bytes(self, rank: int, n_rows: int) -> int:
        """Return bytes of the largest pass of a fit with K directions and so many
        gradients, and of its results."""
        budget, needed = self.options.memory_budget, []
        for mode, n_vectors in ((RowMode.VMAP, 1), (FeatureMode.FORWARD, rank)):
            cost = self._cost(mode)
            b, v = cost.sizes(n_vectors, self.device, budget)
            b = min(self.options.chunk_size or b, n_rows)
            results = 8 * b * math.prod(self.output_shape) * n_vectors
            results = min(results, pass_limit(self.device, budget))
            needed.append(cost.bytes(b, v) + results)
        return max(needed)

    def _check_result(self, what: str, numbers: int) -> None:
        """Refuse a result that cannot fit, before anything is computed."""
        needed = numbers * self.dtype.itemsize
        if needed > FEW_BYTES and needed > self.budget:
            raise InsufficientMemoryError(
                f"{what} take {human_bytes(needed)} on {self.device}, the budget is "
                f"{human_bytes(self.budget)}. Use smaller batches, top_outputs, "
                "complement='drop' (which needs no kernel), or raise memory_budget."
            )

    # Rows of the Jacobian

    def row_parts(
        self,
        x: Any,
        examples: torch.Tensor,
        outputs: torch.Tensor,
        at_most: int | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield gradients (m', P) of output `outputs[m]` of example `examples[m]` of x,
        as many as fit into one pass and at most so many.

        `outputs` holds numbers (m,) of outputs in the model's order, or combinations
        (m, O) of them. Where every example has equally many rows, which stand together,
        these share a forward pass.
        """
        batch, positions = self.batch(x)
        n = _rows_per_example(examples)
        examples = examples.to(self.device)[::n]
        outputs = outputs.to(self.device).unflatten(0, (-1, n))
        passes = self._passes(batch, positions, outputs, None, False, examples, at_most)
        for _, _, _, rows in passes:
            yield rows.flatten(0, 1)

    def project(
        self, x: Any, cotangents: torch.Tensor, directions: torch.Tensor
    ) -> torch.Tensor:
        """Return cᵀJ(x)V (B, n, K) for n cotangents per example (B, n, O), without
        keeping the gradients."""
        return self._reverse(*self.batch(x), cotangents, directions)[1]

    def jacobian(
        self, x: Any, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, Positions]:
        """Return outputs (B, O), J(x) (B, O, P) in the model's order, and positions.

        The result has B·O·P numbers; the passes that make it are bounded.
        """
        create_graph = create_graph and torch.is_grad_enabled()
        batch, positions = self.batch(x)
        B, n = batch.size, positions.n_values
        self._check_result(f"Jacobians of {B} examples", B * n * self.n_params)
        numbers = torch.arange(n, device=self.device).expand(B, n)
        f, J = self._reverse(batch, positions, numbers, None, create_graph)
        return f, J, positions

    def _passes(
        self,
        batch: Batch,
        positions: Positions,
        outputs: torch.Tensor,
        directions: torch.Tensor | None,
        create_graph: bool = False,
        examples: torch.Tensor | None = None,
        at_most: int | None = None,
    ) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        """Yield of each pass in reverse mode its examples, which of their n outputs it
        had, outputs (b, O), and rows (b, n', P) or their products with V (b, n', K).

        Those n are given by numbers (B, n) or as combinations (B, n, O), of all
        examples of the batch or of `examples` (B,); a pass has `at_most` rows.
        """
        mode, n = self._ways(create_graph)[1], outputs.shape[1]
        at_once, together = self.pass_sizes(batch, positions, mode, n)
        if at_most is not None:
            at_once, together = min(at_once, at_most // n), min(together, at_most)
        for part in chunks(len(outputs), at_once):
            some = batch.take(part if examples is None else examples[part])
            for block in chunks(n, together):
                cotangents = outputs[part, block]
                if outputs.ndim == 2:
                    cotangents = one_hot(cotangents, positions.n_values, self.dtype)
                with differentiation():
                    f, rows = ROWS[mode](
                        self.fn, some, cotangents, directions, create_graph
                    )
                yield part, block, f, rows

    def _reverse(
        self,
        batch: Batch,
        positions: Positions,
        outputs: torch.Tensor,
        directions: torch.Tensor | None,
        create_graph: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all outputs (B, O), and rows (B, n, P) or their products with V
        (B, n, K), together; see `_passes`."""
        width = self.n_params
        if directions is not None:
            directions, width = directions.to(self.device, self.dtype), len(directions)
        f = self._new(batch.size, positions.n_values)
        result = self._new(*outputs.shape[:2], width)
        passes = self._passes(batch, positions, outputs, directions, create_graph)
        for part, block, some, rows in passes:
            f[part], result[part, block] = some, rows
        return f, result

    # Features

    def features(
        self,
        x: Any,
        directions: torch.Tensor,
        create_graph: bool = False,
        top: int | None = None,
    ) -> Features:
        """Return outputs and features J(x)V for directions Vᵀ (K, P); with `top`,
        features of so many outputs at each position, the largest ones."""
        create_graph = create_graph and torch.is_grad_enabled()
        (batch, positions), K = self.batch(x), len(directions)
        top = None if top is None or top >= positions.n_channels else top
        n, mode = positions.n_positions * (top or 0), self._ways(create_graph)[0]
        if top is not None and CLEAR_RATIO * (2 * n + 1) < 2 * K + 1:
            mode = FeatureMode.REVERSE  # it was decided for all outputs
        if mode is FeatureMode.REVERSE or not batch.size:
            numbers, outputs = self._selected(batch, positions, top)
            f, phi = self._reverse(
                batch, positions, numbers.flatten(1), directions, create_graph
            )
            phi = phi.unflatten(1, numbers.shape[1:]).flatten(0, 1)
            return Features(positions.rows(f), phi, positions, outputs=outputs)
        f = self._new(batch.size, positions.n_values)
        phi = self._new(*f.shape, K)
        at_once, together = self.pass_sizes(batch, positions, mode, K)
        for block in chunks(K, together):
            V = directions[block].to(self.device, self.dtype)
            for part in chunks(batch.size, at_once):
                with differentiation():
                    f[part], phi[part, :, block] = FEATURES[mode](
                        self.fn, batch.take(part), V, create_graph
                    )
        f, phi, outputs = positions.rows(f), positions.rows(phi), None
        if top is not None:
            outputs = largest(f, top)
            phi = phi.take_along_dim(outputs.unsqueeze(-1), 1)
        return Features(f, phi, positions, outputs=outputs)

    def features_and_residual(
        self,
        x: Any,
        split: GradientSplit,
        create_graph: bool = False,
        top: int | None = None,
    ) -> Features:
        """Return outputs, features and what lies outside the basis, by reverse mode,
        of all outputs or of the `top` largest at each position."""
        create_graph = create_graph and torch.is_grad_enabled()
        batch, positions = self.batch(x)
        c = min(top or positions.n_channels, positions.n_channels)
        B, S = batch.size, positions.n_positions
        # Products at all positions; rows of one, and what is left of them.
        self._check_result(
            f"The residuals (C, C) of C={c} outputs at {B * S} positions",
            split.n_parts * B * S * c * c + 4 * c * self.n_params,
        )
        numbers, outputs = self._selected(batch, positions, top)
        split = split.to(self.device, self.dtype)  # once, not per pass
        f = self._new(B, positions.n_values)
        phi = self._new(B, S, c, len(split.directions))
        products = self._new(B, S, split.n_parts, c, c)
        mode = self._ways(create_graph)[1]
        at_once, together = self.pass_sizes(batch, positions, mode, S * c)
        for part in chunks(B, at_once):
            for at in chunks(S, together // c):
                n = numbers[part, at]
                f[part], J = self._reverse(
                    batch.take(part), positions, n.flatten(1), None, create_graph
                )
                phi[part, at], *rests = split(J.unflatten(1, n.shape[1:]))
                for i, rest in enumerate(rests):
                    products[part, at, i] = accurate_product(rest, rest)
        f, phi, products = positions.rows(f), phi.flatten(0, 1), products.flatten(0, 1)
        return Features(f, phi, positions, products, outputs)

    def _selected(
        self, batch: Batch, positions: Positions, top: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the numbers (B, S, c) of the outputs at each position in the model's
        order; the `top` largest ones, which are c of the C at (B·S, c), or all."""
        n, shape = positions.n_values, (batch.size, positions.n_positions)
        numbers = torch.arange(n, device=self.device).expand(batch.size, n)
        numbers = positions.rows(numbers).unflatten(0, shape)
        if top is None or top >= positions.n_channels:
            return numbers, None
        with torch.no_grad():
            outputs = largest(self.outputs(batch.inputs)[0], top)
        return numbers.gather(2, outputs.unflatten(0, shape)), outputs


def _rows_per_example(examples: torch.Tensor) -> int:
    """Return how often each example occurs, where all occur equally often and in a
    row; else one."""
    if not has_values(examples) or not len(examples):
        return 1
    counts = examples.unique_consecutive(return_counts=True)[1]
    return int(counts[0]) if bool((counts == counts[0]).all()) else 1
