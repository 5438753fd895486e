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
from laplace_ella.derivatives.chunk_sizes import (
    LIVE_RESULTS,
    ExampleBytes,
    PassCost,
    pass_limit,
)
from laplace_ella.derivatives.complements import GradientSplit, accurate_product
from laplace_ella.derivatives.jacobians import FEATURES, Features, largest, one_hot
from laplace_ella.derivatives.model_function import ModelFunction, clearer_error
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
from laplace_ella.support.memory import budget_of, human_bytes, parse_bytes
from laplace_ella.support.preserve import (
    autocast_enabled,
    differentiation,
)

#: How much cheaper reverse mode must be for a few of the outputs, where features of all
#: are better taken in another way.
CLEAR_RATIO = 3.0


#: Layers whose gradients torch differentiates again as if their statistics were
#: constant, in forward mode and below `vmap`.
WRONG = (nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Linearizer:
    """Derivatives of one model, in the ways that work and are fastest for it.

    Attributes
    ----------
    fn : ModelFunction
    layout : OutputLayout
        where outputs at many positions have their channels
    dict_key_x : str
        where a mapping holds its inputs
    options : ComputeOptions
    output_shape : tuple of int
        of one example of the first batch
    example_bytes : ExampleBytes
    example_shapes : tuple
        shapes of the tensors of that example
    modes : Modes
    autocast : bool
        whether they were decided in mixed precision: under it other ways may work
    """

    fn: ModelFunction
    layout: OutputLayout
    dict_key_x: str
    options: ComputeOptions
    output_shape: tuple[int, ...]
    example_bytes: ExampleBytes
    example_shapes: tuple[tuple[int, ...], ...]
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

    def _ways(self, create_graph: bool = False) -> tuple[FeatureMode, RowMode]:
        """Return the ways for features and rows. Where nothing was decided, or not in
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

    def in_dtype(self, dtype: torch.dtype) -> Linearizer:
        """Return the same model and choice of modes, computed in another precision."""
        factor = dtype.itemsize / self.dtype.itemsize
        fn = ModelFunction(self.fn.model, self.fn.names, dtype)
        return replace(self, fn=fn, example_bytes=self.example_bytes.scaled(factor))

    # Inputs and outputs

    def outputs(self, x: Any) -> tuple[torch.Tensor, Positions]:
        """Return outputs `(B·S, C)` by plain forward passes, and their positions."""
        batch = self.batch(x)
        positions, at_once = self.positions(batch), self.pass_sizes(batch, None, 1)[0]
        f = self._new(batch.size, positions.n_values)
        for part in chunks(batch.size, at_once):
            f[part] = self._run(batch.take(part)).flatten(1)
        return positions.rows(f), positions

    def n_values(self, x: Any) -> int:
        """Return how many outputs all examples of x have together, B·O."""
        batch = self.batch(x)
        return batch.size * self.positions(batch).n_values

    def parts(self, x: Any, numbers_per_output: int) -> Iterator[Any]:
        """Yield x in parts whose results fit the budget: so many numbers for each
        output, in double precision."""
        batch = Batch.of(x, self.dict_key_x)
        numbers = self.positions(batch).n_values * max(1, numbers_per_output)
        at_once = pass_limit(self.device, self._budget) // (8 * numbers)
        if at_once >= batch.size:
            yield x
        else:
            for part in chunks(batch.size, at_once):
                yield batch.take(part).inputs

    def batch(self, x: Any, detach: bool = False) -> Batch:
        """Return the inputs as examples, in memory as the weights want them.

        Images that were turned from (H, W, C) keep their order in memory, and with it
        all activations; ResNet-20's features in reverse mode take a fifth longer.
        """
        batch = Batch.of(x, self.dict_key_x)
        weights = [p for p in self.fn.model.parameters() if p.ndim > 3]
        plain = all([p.is_contiguous() for p in weights])
        leaves = [t.contiguous() if plain else t for t in batch.leaves]
        leaves = [t.detach() if detach else t for t in leaves]
        return batch.with_leaves(leaves, batch.size)

    def _run(self, batch: Batch) -> torch.Tensor:
        """Return the model's output in its natural shape, checked."""
        try:
            f = self.fn(self.fn.parameters(), batch.inputs)
            return check_outputs(f, self.layout, batch.size)
        except Exception as error:
            fn, known = self.fn, self.example_shapes
            better = clearer_error(fn.model, batch.inputs, error, known)
            if better is None:
                raise
            raise better from error

    def positions(self, batch: Batch) -> Positions:
        """Return where the outputs of one example are; for other inputs than those of
        the first batch by a forward pass of one of them."""
        shape = self.output_shape
        if batch.size and batch.example_shapes != self.example_shapes:
            with torch.no_grad():
                shape = self._run(batch.take(slice(0, 1))).shape[1:]
        return self.layout.of(tuple(shape))

    def _new(self, *shape: int) -> torch.Tensor:
        """Return a tensor for results, to be filled."""
        return torch.empty(*shape, device=self.device, dtype=self.dtype)

    # Sizes of passes

    @property
    def budget(self) -> int:
        """Bytes that may be taken: those asked for, or a share of what is free."""
        return budget_of(self.device, self.options.memory_budget)

    @property
    def _budget(self) -> int | None:
        budget = self.options.memory_budget
        return None if budget is None else parse_bytes(budget)

    def _cost(self, mode: FeatureMode | RowMode | None, own: ExampleBytes) -> PassCost:
        """Return what a pass of a way takes; of outputs alone if it is None."""
        row = self.n_params * self.dtype.itemsize
        if mode is None:
            return PassCost(LIVE_RESULTS * own.largest)
        if mode is FeatureMode.FORWARD:
            return PassCost(LIVE_RESULTS * own.largest, LIVE_RESULTS * own.largest, row)
        if mode is FeatureMode.DOUBLE_REVERSE:
            return PassCost(LIVE_RESULTS * own.total, shared=row)
        # Each row has a gradient and a copy, and its way back through the layers.
        return PassCost(2 * own.total, 2 * (row + own.largest))

    def pass_sizes(
        self, batch: Batch, mode: FeatureMode | RowMode | None, n_vectors: int
    ) -> tuple[int, int]:
        """Return how many examples, with how many vectors each, make one pass;
        activations are in proportion to what the inputs have of numbers."""
        own, budget = self.example_bytes, self._budget
        factor = _n_numbers(batch.example_shapes) / _n_numbers(self.example_shapes)
        cost, wanted = self._cost(mode, own.scaled(factor)), n_vectors
        if mode in BACKEND_OF:  # which give the rows of all outputs
            wanted = self.positions(batch).n_values
        examples, vectors = cost.sizes(wanted, self.device, budget)
        if isinstance(mode, RowMode) and vectors < wanted:
            return 1, n_vectors if mode in BACKEND_OF else vectors
        return self.options.chunk_size or examples, min(vectors, n_vectors)

    def pass_bytes(self, rank: int, n_rows: int) -> int:
        """Return bytes of the largest pass of a fit with K directions and so many
        gradients, and of its results."""
        limit = pass_limit(self.device, self._budget)
        needed = []
        for mode, n_vectors in ((RowMode.VMAP, 1), (FeatureMode.FORWARD, rank)):
            cost = self._cost(mode, self.example_bytes)
            b, v = cost.sizes(n_vectors, self.device, self._budget)
            b = min(self.options.chunk_size or b, n_rows)
            numbers = b * math.prod(self.output_shape) * n_vectors
            needed.append(cost.bytes(b, v) + min(8 * numbers, limit))
        return max(needed)

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
        if not len(examples):
            return
        batch = self.batch(x, detach=True)
        mode, n_values = self._ways()[1], self.positions(batch).n_values
        n = _rows_per_example(examples)
        at_once, together = self.pass_sizes(batch, mode, n)
        at_once = min(at_once, (at_most or len(examples)) // n)
        if together < n or not at_once:
            n, at_once = 1, self.pass_sizes(batch, mode, 1)[0]
            at_once = min(at_once, at_most or at_once)
        examples = examples.to(self.device)[::n]
        outputs = outputs.to(self.device).unflatten(0, (-1, n))
        for part in chunks(len(examples), at_once):
            cotangents = self._cotangents(outputs[part], n_values)
            some = batch.take(examples[part])
            with differentiation():
                rows = ROWS[mode](self.fn, some, cotangents)[1].flatten(0, 1)
            yield rows

    def project(
        self, x: Any, cotangents: torch.Tensor, directions: torch.Tensor
    ) -> torch.Tensor:
        """Return cᵀJ(x)V (B, n, K) for n cotangents per example (B, n, O), without
        keeping the gradients."""
        batch = self.batch(x, detach=True)
        directions = directions.to(self.device, self.dtype)
        return self._reverse(batch, cotangents, directions)[1]

    def jacobian(
        self, x: Any, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, Positions]:
        """Return outputs (B, O), J(x) (B, O, P) in the model's order, and positions.

        The result has B·O·P numbers; the passes that make it are bounded.
        """
        create_graph = create_graph and torch.is_grad_enabled()
        batch = self.batch(x)
        positions = self.positions(batch)
        n = positions.n_values
        self._check_result(
            f"Jacobians of {batch.size} examples", batch.size * n * self.n_params
        )
        numbers = torch.arange(n, device=self.device).expand(batch.size, n)
        f, J = self._reverse(batch, numbers, None, create_graph)
        return f, J, positions

    def _cotangents(self, outputs: torch.Tensor, n_values: int) -> torch.Tensor:
        """Return combinations (b, n, O) as they are, numbers (b, n) as unit vectors."""
        if outputs.ndim == 3:
            return outputs
        return one_hot(outputs, n_values, self.dtype)

    def _reverse(
        self,
        batch: Batch,
        outputs: torch.Tensor,
        directions: torch.Tensor | None,
        create_graph: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all outputs (B, O), and rows (B, n, P) or their products with V
        (B, n, K) of outputs given by numbers (B, n) or combinations (B, n, O)."""
        n, n_values = outputs.shape[1], self.positions(batch).n_values
        mode = self._ways(create_graph)[1]
        f = self._new(batch.size, n_values)
        width = self.n_params if directions is None else len(directions)
        result = self._new(batch.size, n, width)
        at_once, together = self.pass_sizes(batch, mode, n)
        for part in chunks(batch.size, at_once):
            some = batch.take(part)
            for block in chunks(n, together):
                cotangents = self._cotangents(outputs[part, block], n_values)
                with differentiation():
                    f[part], result[part, block] = ROWS[mode](
                        self.fn, some, cotangents, directions, create_graph
                    )
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
        batch, K = self.batch(x), len(directions)
        positions = self.positions(batch)
        top = None if top is None or top >= positions.n_channels else top
        n, mode = positions.n_positions * (top or 0), self._ways(create_graph)[0]
        if top is not None and CLEAR_RATIO * (2 * n + 1) < 2 * K + 1:
            mode = FeatureMode.REVERSE  # it was decided for all outputs
        if mode is FeatureMode.REVERSE or not batch.size:
            numbers, outputs = self._selected(batch, positions, top)
            V = directions.to(self.device, self.dtype)
            f, phi = self._reverse(batch, numbers.flatten(1), V, create_graph)
            phi = phi.unflatten(1, numbers.shape[1:]).flatten(0, 1)
            return Features(positions.rows(f), phi, positions, outputs=outputs)
        f, phi = self._forward(mode, batch, directions, create_graph)
        f, phi, outputs = positions.rows(f), positions.rows(phi), None
        if top is not None:
            outputs = largest(f, top)
            phi = phi.take_along_dim(outputs.unsqueeze(-1), 1)
        return Features(f, phi, positions, outputs=outputs)

    def _selected(
        self, batch: Batch, positions: Positions, top: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the numbers (B, S, c) of the outputs at each position in the model's
        order; the `top` largest ones, which are c of the C at (B·S, c), or all."""
        n = positions.n_values
        numbers = torch.arange(n, device=self.device).expand(batch.size, n)
        shape = (batch.size, positions.n_positions)
        numbers = positions.rows(numbers).unflatten(0, shape)
        if top is None or top >= positions.n_channels:
            return numbers, None
        with torch.no_grad():
            outputs = largest(self.outputs(batch.inputs)[0], top)
        return numbers.gather(2, outputs.unflatten(0, shape)), outputs

    def _forward(
        self,
        mode: FeatureMode,
        batch: Batch,
        directions: torch.Tensor,
        create_graph: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs (B, O) and features (B, O, K), tangents and examples in as
        many passes as it takes."""
        n_values, K = self.positions(batch).n_values, len(directions)
        at_once, together = self.pass_sizes(batch, mode, K)
        f, phi = self._new(batch.size, n_values), self._new(batch.size, n_values, K)
        for block in chunks(K, together):
            V = directions[block].to(self.device, self.dtype)
            for part in chunks(batch.size, at_once):
                with differentiation():
                    f[part], phi[part, :, block] = FEATURES[mode](
                        self.fn, batch.take(part), V, create_graph
                    )
        return f, phi

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
        batch = self.batch(x)
        positions = self.positions(batch)
        c = min(top or positions.n_channels, positions.n_channels)
        B, S = batch.size, positions.n_positions
        self._check_result(
            f"The residuals (C, C) of C={c} outputs at {B * S} positions", B * S * c * c
        )
        numbers, outputs = self._selected(batch, positions, top)
        split = split.to(self.device, self.dtype)  # once, not per chunk
        f = self._new(B, positions.n_values)
        phi = self._new(B, S, c, len(split.directions))
        products = self._new(split.n_parts, B, S, c, c)
        # Where not even the rows of one position fit, two blocks of its outputs are in
        # memory at a time.
        at_once, together = self.pass_sizes(batch, self._ways(create_graph)[1], S * c)
        n_positions = max(1, together // c)
        n_outputs = c if together >= c else max(1, together // 2)
        for part in chunks(B, at_once):
            some = batch.take(part)
            for at in chunks(S, n_positions):

                def rests_of(
                    block: slice, some: Batch = some, part: slice = part, at: slice = at
                ) -> list[torch.Tensor]:
                    chosen = numbers[part, at, block]
                    f[part], J = self._reverse(
                        some, chosen.flatten(1), None, create_graph
                    )
                    J = J.unflatten(1, chosen.shape[1:])
                    phi[part, at, block], *rests = split(J)
                    return rests

                for i in chunks(c, n_outputs):
                    lefts = rests_of(i)
                    for j in chunks(i.stop, n_outputs):
                        rights = lefts if j == i else rests_of(j)
                        # By index: a graph does not follow the views of a loop.
                        for r, (left, right) in enumerate(
                            zip(lefts, rights, strict=True)
                        ):
                            tile = accurate_product(left, right)
                            products[r, part, at, i, j] = tile
                            products[r, part, at, j, i] = tile.mT
        products = products.flatten(1, 2)
        return Features(
            positions.rows(f),
            phi.flatten(0, 1),
            positions,
            products.transpose(0, 1),
            outputs,
        )

    def _check_result(self, what: str, numbers: int) -> None:
        """Refuse a result that cannot fit, before anything is computed."""
        needed = numbers * self.dtype.itemsize
        if needed < 2**28:
            return
        budget = self.budget
        if needed > budget:
            raise InsufficientMemoryError(
                f"{what} take {human_bytes(needed)} on {self.device}, the budget is "
                f"{human_bytes(budget)}. Use smaller batches, complement='drop' (which "
                "needs no kernel), or raise memory_budget."
            )


def _n_numbers(shapes: tuple[tuple[int, ...], ...]) -> int:
    return max(1, sum(map(math.prod, shapes)))


def _rows_per_example(examples: torch.Tensor) -> int:
    """Return how often each example occurs, where all occur equally often and in a
    row; else one."""
    if not has_values(examples):
        return 1
    counts = examples.unique_consecutive(return_counts=True)[1]
    return int(counts[0]) if bool((counts == counts[0]).all()) else 1
