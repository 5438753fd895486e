"""One linearisation of a model: rows of J(x) and features J(x)V, batch after batch.

The modes of differentiation were chosen on the first batch, see `decide`. How many
examples, and how many vectors of each, go through one pass together follows the
network: a pass that is too small spends its time on the overhead of single operators,
one that is too large falls out of the processor's cache.

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
from laplace_ella.derivatives.jacobians import (
    FEATURES,
    Features,
    GradientSplit,
    accurate_product,
    largest,
    one_hot,
)
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
from laplace_ella.support.memory import budget_of, human_bytes, parse_bytes
from laplace_ella.support.preserve import autocast_enabled, differentiation

#: How much cheaper reverse mode must be for a few of the outputs, where features of all
#: are better taken in another way.
CLEAR_RATIO = 3.0

#: Layers whose gradients torch differentiates again as if their statistics were
#: constant, in forward mode and below `vmap`.
WRONG = (nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)

#: Bytes of a result that are not compared with a budget.
FEW_BYTES = 2**24

#: Bytes that one pass may take on a CPU and a GPU, and as much again its results; the
#: share of a memory budget that they may take where one is given.
PASS_BYTES, PASS_SHARE = (2**28, 2**31), 0.13

#: Bytes that a pass need not save on: at least, and at most where what every pass reads
#: takes as much. Measured with nine networks on a CPU with 32 MB of cache.
ENOUGH_BYTES = (2**26, 3 * 2**25), (2**31, 2**31)

#: Vectors that are worth a pass, whatever they take: fewer spend their time on
#: computing the outputs over and over.
ENOUGH_VECTORS = 32

#: Intermediate results that are alive at once in a forward-mode pass.
LIVE_RESULTS = 4


@dataclass(frozen=True)
class Linearizer:
    """Derivatives of one model, in the ways that work and are fastest for it.

    Of one example of the first batch it knows the `output_shape`, the shapes of its
    tensors, and the bytes of the `largest` and of all (`total`) results that its
    backward pass needs. `autocast` says whether the modes were decided in mixed
    precision: under it other modes may work.
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
        new = {"device": self.device, "dtype": self.dtype}
        f = torch.empty(batch.size, positions.n_values, **new)
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
        for part in chunks(max(1, batch.size), self._limit // each):
            yield batch.take(part).inputs

    # Sizes of passes

    @property
    def _limit(self) -> int:
        """Return the bytes that one pass may take, and as much again its results."""
        budget, limit = (
            self.options.memory_budget,
            PASS_BYTES[self.device.type == "cuda"],
        )
        share = limit if budget is None else int(PASS_SHARE * parse_bytes(budget))
        return min(limit, share)

    def _pass(
        self, mode: FeatureMode | RowMode | None, n_vectors: int, factor: float = 1.0
    ) -> tuple[int, int, int, int]:
        """Return how many examples b, with how many v of their vectors (tangents of
        forward mode, cotangents of reverse mode), make one pass in a mode, or of
        outputs alone if it is None; and the bytes of an example and of all vectors,
        whatever b, where results are `factor` times as large as on the first batch."""
        row = self.n_params * self.dtype.itemsize
        largest = max(1, int(factor * self.largest))
        total = max(1, int(factor * self.total))
        # Bytes of a pass: b(base + v·each) + v·shared. Each row has a gradient and a
        # copy, and its way back through the layers.
        base, each, shared = 2 * total, 2 * (row + largest), 0
        if mode is None:
            base, each = LIVE_RESULTS * largest, 0
        elif mode is FeatureMode.FORWARD:
            base, each, shared = LIVE_RESULTS * largest, LIVE_RESULTS * largest, row
        elif mode is FeatureMode.DOUBLE_REVERSE:
            base, each, shared = LIVE_RESULTS * total, 0, row
        limit, (least, most) = self._limit, ENOUGH_BYTES[self.device.type == "cuda"]
        # As much for examples as for what they share.
        free, per_vector, kept = limit - base, each + 2 * shared, shared
        if self.options.memory_budget is None:
            # as much as the activations, which every pass makes anew
            free, per_vector, kept = max(free, base), each, 0
        useful = max(ENOUGH_VECTORS, most // max(1, each))
        v = max(1, min(n_vectors, free // max(1, per_vector), useful))
        # Passes of one size: the rest of an uneven division costs a pass of its own.
        v = -(-n_vectors // -(-n_vectors // v))
        one = base + v * each
        enough = max(least, min(most, LIVE_RESULTS * v * shared))
        b = min(max(ENOUGH_VECTORS // v, enough // one), (limit - v * kept) // one)
        return max(1, b), v, one, v * shared

    def pass_sizes(
        self,
        batch: Batch,
        positions: Positions,
        mode: FeatureMode | RowMode | None,
        n_vectors: int,
    ) -> tuple[int, int]:
        """Return how many examples, with how many vectors each, make one pass;
        activations are in proportion to what the inputs have of numbers."""
        here = max(1, sum(map(math.prod, batch.example_shapes)))
        first = max(1, sum(map(math.prod, self.example_shapes)))
        # The libraries give the rows of all outputs.
        wanted = positions.n_values if mode in BACKEND_OF else n_vectors
        examples, vectors, _, _ = self._pass(mode, wanted, here / first)
        if isinstance(mode, RowMode) and vectors < wanted:
            return 1, n_vectors if mode in BACKEND_OF else vectors
        return self.options.chunk_size or examples, min(vectors, n_vectors)

    def pass_bytes(self, rank: int, n_rows: int) -> int:
        """Return bytes of the largest pass of a fit with K directions and so many
        gradients, and of its results."""
        needed = []
        for mode, n_vectors in ((RowMode.VMAP, 1), (FeatureMode.FORWARD, rank)):
            b, _, each, shared = self._pass(mode, n_vectors)
            b = min(self.options.chunk_size or b, n_rows)
            results = 8 * b * math.prod(self.output_shape) * n_vectors
            needed.append(b * each + shared + min(results, self._limit))
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
                how = self.fn, some, cotangents, directions, create_graph
                with differentiation():
                    f, rows = ROWS[mode](*how)
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
        width, new = self.n_params, {"device": self.device, "dtype": self.dtype}
        if directions is not None:
            directions, width = directions.to(**new), len(directions)
        f = torch.empty(batch.size, positions.n_values, **new)
        result = torch.empty(*outputs.shape[:2], width, **new)
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
            how = numbers.flatten(1), directions, create_graph
            f, phi = self._reverse(batch, positions, *how)
            phi = phi.unflatten(1, numbers.shape[1:]).flatten(0, 1)
            return Features(positions.rows(f), phi, positions, outputs=outputs)
        new = {"device": self.device, "dtype": self.dtype}
        f = torch.empty(batch.size, positions.n_values, **new)
        phi = torch.empty(*f.shape, K, **new)
        at_once, together = self.pass_sizes(batch, positions, mode, K)
        for block in chunks(K, together):
            V = directions[block].to(**new)
            for part in chunks(batch.size, at_once):
                how = self.fn, batch.take(part), V, create_graph
                with differentiation():
                    f[part], phi[part, :, block] = FEATURES[mode](*how)
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
        new = {"device": self.device, "dtype": self.dtype}
        f = torch.empty(B, positions.n_values, **new)
        phi = torch.empty(B, S, c, len(split.directions), **new)
        products = torch.empty(B, S, split.n_parts, c, c, **new)
        mode = self._ways(create_graph)[1]
        at_once, together = self.pass_sizes(batch, positions, mode, S * c)
        for part in chunks(B, at_once):
            for at in chunks(S, together // c):
                n, some = numbers[part, at], batch.take(part)
                how = n.flatten(1), None, create_graph
                f[part], J = self._reverse(some, positions, *how)
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
