"""One linearisation of a model: rows of J(x) and features J(x)V, batch after batch.

Models differ in which derivatives they support and which are fast. `linearize` finds
out once, on the first batch; nothing changes afterwards.

Index legend: B batch, S positions, C outputs at each, c of them selected, O = S·C,
P parameters, K rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_ella.derivatives.complements import Metric, Span, split_gradients
from laplace_ella.derivatives.jacobians import (
    Cotangents,
    Features,
    PassSizes,
    fill_residuals,
    largest,
    unit_vectors,
)
from laplace_ella.derivatives.model_function import ModelFunction, clearer_error
from laplace_ella.derivatives.modes import ComputeOptions, FeatureMode, Modes, RowMode
from laplace_ella.derivatives.trials import FEATURES, JACOBIANS, ROWS, choose_modes
from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.support.batches import (
    Batch,
    OutputLayout,
    Positions,
    check_outputs,
    chunks,
)
from laplace_ella.support.memory import budget_of, human_bytes, parse_bytes
from laplace_ella.support.preserve import (
    autocast_enabled,
    differentiable_kernels,
    full_precision,
)

__all__ = ["ExampleBytes", "Linearizer", "linearize"]

#: Directions that are fetched at once from another device.
OFFLOADED_BLOCK = 8

#: How much cheaper reverse mode must be for a few of the outputs, where features of all
#: are better taken in another way.
CLEAR_RATIO = 3.0


@dataclass(frozen=True)
class ExampleBytes:
    """Bytes of the largest and of all intermediate results of one example of the first
    batch, and how many numbers its inputs have."""

    largest: int
    total: int
    elements: int


class _Allocations(TorchDispatchMode):
    """Count bytes of the largest and of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # Views are of something that was counted, or of weights; clones are mostly the
        # copies of buffers that `ModelFunction` makes.
        if not func.is_view and func is not torch.ops.aten.clone.default:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    size = leaf.numel() * leaf.element_size()
                    self.total += size
                    self.largest = max(self.largest, size)
        return result


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

    def in_dtype(self, dtype: torch.dtype) -> Linearizer:
        """Return the same model and choice of modes, computed in another precision."""
        if dtype == self.dtype:
            return self
        own, factor = self.example_bytes, dtype.itemsize / self.dtype.itemsize
        scaled = replace(
            own, largest=int(factor * own.largest), total=int(factor * own.total)
        )
        fn = ModelFunction(self.fn.model, self.fn.names, dtype)
        return replace(self, fn=fn, example_bytes=scaled)

    # Outputs

    def outputs(self, x: Any) -> tuple[torch.Tensor, Positions]:
        """Return outputs `(B·S, C)` by plain forward passes, and their positions."""
        batch = Batch.of(x, self.dict_key_x)
        positions, parts = self._positions(batch), []
        for part in chunks(batch.size, self._sizes(batch).plain()):
            parts.append(self._run(batch.take(part)).flatten(1).to(self.dtype))
        f = torch.cat(parts) if parts else self._new(0, positions.n_values)
        return positions.rows(f), positions

    def n_values(self, x: Any) -> int:
        """Return how many outputs all examples of x have together, B·O."""
        batch = Batch.of(x, self.dict_key_x)
        return batch.size * self._positions(batch).n_values

    def _run(self, batch: Batch) -> torch.Tensor:
        """Return the model's output in its natural shape, checked."""
        try:
            f = self.fn(self.fn.parameters(), batch.inputs)
            return check_outputs(f, self.layout, batch.size)
        except Exception as error:
            better = clearer_error(self.fn.model, batch, error, self.example_shapes)
            if better is None:
                raise
            raise better from error

    def _positions(self, batch: Batch) -> Positions:
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

    def parts(self, x: Any, numbers_per_output: int) -> Iterator[Any]:
        """Yield x in parts whose results fit the budget, so many numbers for each
        output."""
        batch = Batch.of(x, self.dict_key_x)
        numbers = self._positions(batch).n_values * max(1, numbers_per_output)
        at_once = self._sizes(batch).limit // (numbers * self.dtype.itemsize)
        if at_once >= batch.size:
            yield x
        else:
            for part in chunks(batch.size, at_once):
                yield batch.take(part).inputs

    def pass_bytes(self, rank: int, n_rows: int | None = None) -> int:
        """Return bytes of the largest pass of a fit with K directions, and of its
        results."""
        sizes, (examples, tangents) = self._sizes(), self._sizes().forward(rank)
        rows = min(sizes.reverse()[0], n_rows or 2**31) * sizes.reverse_bytes()
        numbers = examples * math.prod(self.output_shape) * rank
        results = min(numbers * self.dtype.itemsize, sizes.limit)
        return max(rows, examples * sizes.forward_bytes(tangents) + results)

    def _sizes(self, batch: Batch | None = None) -> PassSizes:
        """Return the sizes of passes; activations are in proportion to what the inputs
        have of numbers."""
        own, factor = self.example_bytes, 1.0
        if batch is not None and batch.size:
            factor = batch.elements / own.elements
        budget = self.options.memory_budget
        return PassSizes(
            self.n_params,
            self.dtype.itemsize,
            max(1, int(factor * own.largest)),
            int(factor * own.total),
            "cuda" if self.device.type == "cuda" else "cpu",
            self.options.chunk_size,
            None if budget is None else parse_bytes(budget),
        )

    # Rows of the Jacobian

    def rows(
        self, x: Any, examples: torch.Tensor, outputs: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradients (m, P) that `row_parts` yields."""
        rows, start = self._new(len(examples), self.n_params), 0
        for part in self.row_parts(x, examples, outputs):
            rows[start : start + len(part)] = part
            start += len(part)
        return rows

    def row_parts(
        self,
        x: Any,
        examples: torch.Tensor,
        outputs: torch.Tensor,
        at_most: int | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield gradients (m', P) of output `outputs[m]` of example `examples[m]` of x,
        as many as fit into one pass and at most so many.

        Each part is there only until the next one is asked for. `outputs` holds numbers
        (m,) of outputs in the model's order, or combinations (m, O) of them.
        """
        if not len(examples):
            return
        batch = self._ordered(Batch.of(x, self.dict_key_x)).detach()
        ready = self._decided(batch)
        n_outputs = self._positions(batch).n_values
        mode, own = ready.modes.rows, None
        assert mode is not None
        n_rows = 1 if mode in (RowMode.VMAP, RowMode.LOOP) else n_outputs
        at_once, _ = self._sizes(batch).reverse(n_rows)
        at_once = min(at_once, at_most or at_once, len(examples))
        numbers = torch.arange(n_outputs, device=self.device)
        for part in chunks(len(examples), at_once):
            cotangents = outputs[part].to(self.device)
            if outputs.ndim == 1:
                cotangents = (cotangents.unsqueeze(1) == numbers).to(self.dtype)
            own = self._new(at_once, self.n_params) if own is None else own
            out, few = own[: len(cotangents)], examples[part].to(self.device)
            with differentiable_kernels():
                yield ROWS[mode](self.fn, batch, few, cotangents, out)

    def project(
        self, x: Any, cotangents: torch.Tensor, directions: torch.Tensor
    ) -> torch.Tensor:
        """Return cᵀJ(x)V (B, n, K) for n cotangents per example (B, n, O), without
        keeping the gradients."""
        B, n, _ = cotangents.shape
        examples = torch.arange(B, device=cotangents.device).repeat_interleave(n)
        V, start = directions.to(self.device, self.dtype), 0  # once, not per chunk
        phi = self._new(B * n, len(directions))
        for rows in self.row_parts(x, examples, cotangents.flatten(0, 1)):
            with full_precision(self.device):
                phi[start : start + len(rows)] = rows @ V.T
            start += len(rows)
        return phi.unflatten(0, (B, n))

    def _ordered(self, batch: Batch) -> Batch:
        """Return the same inputs, in memory as the weights want them.

        Images that were turned from (H, W, C) keep their order in memory, and with it
        all activations; ResNet-20's features in reverse mode take a fifth longer.
        """
        for p in self.fn.model.parameters():
            if p.ndim > 3 and not p.is_contiguous():
                return batch
        return batch.contiguous()

    # Jacobians and features

    def jacobian(
        self, x: Any, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, Positions]:
        """Return outputs (B, O), J(x) (B, O, P) in the model's order, and positions.

        The result has B·O·P numbers; the passes that make it are bounded.
        """
        create_graph = create_graph and torch.is_grad_enabled()
        batch = Batch.of(x, self.dict_key_x)
        ready, positions = self._decided(batch), self._positions(batch)
        self._check_result(
            f"Jacobians of {batch.size} examples",
            batch.size * positions.n_values * self.n_params,
        )
        f, J = ready._reverse(batch, positions, None, None, create_graph)
        return f, J, positions

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
        batch, K = Batch.of(x, self.dict_key_x), len(directions)
        ready, positions = self._decided(batch, K), self._positions(batch)
        top = None if top is None or top >= positions.n_channels else top
        mode, few = ready.modes.features, positions.n_positions * (top or 0)
        if top is not None and CLEAR_RATIO * (2 * few + 1) < 2 * K + 1:
            mode = FeatureMode.REVERSE  # it was decided for all outputs
        if mode is FeatureMode.REVERSE or not batch.size:
            f, phi = ready._reverse(batch, positions, top, directions, create_graph)
        else:
            f, phi = ready._forward(batch, positions, directions, create_graph)
        f = positions.rows(f)
        if top is None:
            return Features(f, positions.rows(phi), positions)
        outputs = largest(f, top)
        if mode is FeatureMode.REVERSE or not batch.size:
            phi = phi.unflatten(1, (-1, top)).flatten(0, 1)
        else:  # the other ways have the features of all outputs anyhow
            phi = positions.rows(phi).take_along_dim(outputs.unsqueeze(-1), 1)
        return Features(f, phi, positions, outputs=outputs)

    def _forward(
        self,
        batch: Batch,
        positions: Positions,
        directions: torch.Tensor,
        create_graph: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs (B, O) and features (B, O, K), tangents and examples in as
        many passes as it takes."""
        assert self.modes.features is not None
        together, K = self.modes.together, len(directions)
        way = FEATURES[self.modes.features, together]
        at_once, tangents = self._sizes(batch).forward(K)
        if self.modes.features is not FeatureMode.FORWARD or not together:
            at_once, _ = self._sizes(batch).forward(1)
        if directions.device != self.device:
            tangents = OFFLOADED_BLOCK
        f = self._new(batch.size, positions.n_values)
        phi = self._new(batch.size, positions.n_values, K)
        with differentiable_kernels():
            for block in chunks(K, tangents):
                V = directions[block].to(self.device, self.dtype)
                pieces = self.fn.split(V)
                for part in chunks(batch.size, at_once):
                    some = batch.take(part)
                    f[part], phi[part, :, block] = way(
                        self.fn, some, pieces, create_graph
                    )
        return f, phi

    def _reverse(
        self,
        batch: Batch,
        positions: Positions,
        top: int | None,
        directions: torch.Tensor | None,
        create_graph: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs (B, O), and rows (B, o, P) or features (B, o, K) of all
        outputs, or of the `top` ones position by position."""
        assert self.modes.jacobians is not None
        n = positions.n_positions * (top or positions.n_channels)
        tangents, width = None, self.n_params
        if directions is not None:
            tangents = self.fn.split(directions.to(self.device, self.dtype))
            width = len(directions)
        f = self._new(batch.size, positions.n_values)
        result = self._new(batch.size, n, width)
        at_once, outputs = self._sizes(batch).reverse(n)
        way, numbers = JACOBIANS[self.modes.jacobians], torch.arange(n)
        with differentiable_kernels():
            for part in chunks(batch.size, at_once):
                some = self._ordered(batch.take(part))
                for block in chunks(n, outputs):
                    units = self._units(numbers[block], positions, top)
                    f[part], result[part, block] = way(
                        self.fn, some, units, tangents, create_graph
                    )
        return f, result

    def _units(
        self, numbers: torch.Tensor, positions: Positions, top: int | None
    ) -> Cotangents:
        """Return what makes cotangents that select the outputs of these numbers."""
        return partial(
            unit_vectors,
            numbers=numbers.to(self.device),
            positions=positions,
            top=top,
            dtype=self.dtype,
        )

    # Features and residuals

    def features_and_residual(
        self,
        x: Any,
        directions: torch.Tensor,
        metric: Metric | None = None,
        span: Span | None = None,
        create_graph: bool = False,
        top: int | None = None,
    ) -> Features:
        """Return outputs, features and what lies outside the basis, by reverse mode.

        Parameters
        ----------
        directions : torch.Tensor
            Vᵀ `(K, P)`, orthonormal rows
        metric : Metric, optional
            in which gradients are measured, see `split_gradients`
        span : Span, optional
            outside of which there is a part that is asked for as well, at each level
        create_graph : bool
            whether the result can be differentiated in x
        top : int, optional
            of so many outputs at each position only, the largest ones
        """
        create_graph = create_graph and torch.is_grad_enabled()
        batch = Batch.of(x, self.dict_key_x)
        ready, positions = self._decided(batch), self._positions(batch)
        top = None if top is None or top >= positions.n_channels else top
        S, c, K = positions.n_positions, top or positions.n_channels, len(directions)
        self._check_result(
            f"The residuals (C, C) of C={c} outputs at {batch.size * S} positions",
            batch.size * S * c * c,
        )
        directions = directions.to(self.device, self.dtype)  # once, not per chunk
        split = partial(
            split_gradients, directions=directions, metric=metric, span=span
        )
        n_levels = 0 if span is None else len(span.ranks)
        f = self._new(batch.size, positions.n_values)
        phi = self._new(batch.size * S, c, K)
        products = self._new(1 + n_levels, batch.size * S, c, c)
        numbers = torch.arange(S * c).unflatten(0, (S, c))
        if top is None:
            numbers = positions.rows(torch.arange(S * c).unsqueeze(0))
        at_once, outputs = self._sizes(batch).reverse(S * c)
        assert ready.modes.jacobians is not None
        way = JACOBIANS[ready.modes.jacobians]
        with differentiable_kernels():
            for part in chunks(batch.size, at_once):
                some = self._ordered(batch.take(part))

                def rows_of(
                    numbers: torch.Tensor, some: Batch = some, part: slice = part
                ) -> torch.Tensor:
                    """Return rows (b, o, P) of some outputs, and keep f."""
                    units = self._units(numbers, positions, top)
                    f[part], J = way(self.fn, some, units, None, create_graph)
                    return J

                at = slice(part.start * S, part.stop * S)
                fill_residuals(
                    rows_of, split, numbers, outputs, phi[at], products[:, at]
                )
        f = positions.rows(f)
        return Features(
            f,
            phi,
            positions,
            products[0],
            products[1:].transpose(0, 1) if n_levels else None,
            None if top is None else largest(f, top),
        )

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

    # Decisions

    def _decided(self, batch: Batch, rank: int = 1) -> Linearizer:
        """Return this linearizer; where nothing was decided, or not in this precision,
        one that has decided on these inputs."""
        decided = self.modes.features is not None and self.modes.jacobians is not None
        if not batch.size or (
            decided and self.autocast == autocast_enabled(self.device)
        ):
            return self
        return self.decide(batch.inputs, rank)

    def decide(self, x: Any, rank: int) -> Linearizer:
        """Return the same with the fastest modes for K directions, tried on x."""
        batch = self._ordered(Batch.of(x, self.dict_key_x)).detach()
        n_outputs, sizes = self._positions(batch).n_values, self._sizes(batch)
        modes = choose_modes(self.fn, sizes, batch, n_outputs, self.options, rank)
        return replace(self, modes=modes, autocast=autocast_enabled(self.device))


def linearize(
    fn: ModelFunction,
    layout: OutputLayout,
    dict_key_x: str,
    options: ComputeOptions,
    x_first: Any,
    rank: int | None = None,
) -> Linearizer:
    """Return the linearisation of a model for inputs like those of a first batch.

    The model runs once on one example, which tells the shape of its outputs and what
    memory it takes. With the rank K all ways are tried and the fastest are kept;
    without it nothing is differentiated, which is enough for estimates of memory.
    """
    for module in fn.model.modules():
        if (
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.running_mean is None
        ):
            raise ValueError(
                "A batch normalisation uses the statistics of the batch in "
                "evaluation mode, too, as with track_running_stats=False: the "
                "outputs of an example depend on the others in its batch, and have "
                "no derivative of their own. Give it running statistics, or use "
                "nn.GroupNorm or nn.InstanceNorm2d."
            )
    batch = Batch.of(x_first, dict_key_x)
    nothing = ExampleBytes(0, 0, batch.elements)
    linearizer = Linearizer(fn, layout, dict_key_x, options, (), nothing, (), Modes())
    one = batch.take(slice(0, 1)).detach()
    with torch.no_grad(), _Allocations() as counted:
        try:
            f = linearizer._run(one)
        except (torch.cuda.OutOfMemoryError, TypeError):
            raise
        except Exception as error:
            if batch.size:
                raise
            raise ValueError(  # many layers refuse an empty batch
                "The shape of the outputs of an empty batch is not known: the model "
                f"cannot run on it ({type(error).__name__}: {error}), and it has not "
                "seen an example yet. Call it with at least one example first."
            ) from error
    linearizer = replace(
        linearizer,
        output_shape=tuple(f.shape[1:]),
        example_bytes=ExampleBytes(counted.largest, counted.total, batch.elements),
        example_shapes=batch.example_shapes,
    )
    return linearizer if rank is None else linearizer._decided(batch, rank)
