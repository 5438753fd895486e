"""How many examples are differentiated at once, and the memory that takes.

Sizes follow the network. A pass that is too small spends its time on the overhead of
single operators; one that is too large falls out of the processor's cache.

Index legend: P parameters, K rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Activations", "PassSizes", "activation_bytes"]

L = TypeVar("L")

#: Bytes of the largest intermediate result of one forward-mode pass, all tangents
#: together: at least, and at most where the tangents of the parameters, which every
#: pass reads, take as much. Measured with nine networks on a CPU with 32 MB of cache:
#: the fastest passes have 5 to 26 MB.
TANGENT_BYTES = {"cpu": (2**23, 3 * 2**23), "cuda": (2**29, 2**29)}

#: Bytes of gradients and activations that one reverse-mode pass need not save on.
GRADIENT_BYTES = {"cpu": 2**25, "cuda": 2**30}

#: Gradients of a reverse-mode pass that are worth more memory than that: ResNet-20
#: takes as long by 80 of them, and longer by 160.
ENOUGH_GRADIENTS = 40

#: Tangents of one example that are worth more than that, and how much: fewer would
#: spend their time on computing the outputs over and over. With 24 instead of 48 MB
#: EfficientNet-Lite0 took 1.12 times as long, ConvNeXt-Atto 1.05, ResNet-18 0.93.
ENOUGH_TANGENTS = 32
FEWEST_TANGENTS = 4
ONE_EXAMPLE_BYTES = {"cpu": 6 * 2**23, "cuda": 2**29}

#: Bytes that gradients, tangents and activations of one pass may take.
PASS_BYTES = {"cpu": 2**28, "cuda": 2**31}

#: Share of a memory budget that one pass may take, where one is given.
PASS_SHARE = 0.25

#: Intermediate results that are alive at once in a forward-mode pass.
LIVE_RESULTS = 4

#: How much of the heap is kept for a pass, by what it is expected to take.
SPARE = 2

#: Bytes of results that glibc does not keep at the top of its heap, two of them.
LARGE_RESULT = 2**24


@dataclass(frozen=True)
class Activations:
    """Bytes of the largest and of all intermediate results of one example."""

    largest: int
    total: int


class _Allocations(TorchDispatchMode):
    """Bytes of the largest and of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "is_view", False):  # of something that was counted, or weights
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                size = leaf.numel() * leaf.element_size()
                self.total += size
                self.largest = max(self.largest, size)
        return result


def activation_bytes(
    model: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Activations]:
    """The model's output for one example, and the memory of its forward pass."""
    with torch.no_grad(), _Allocations() as allocations:
        f = model(*args, **kwargs)
    return f, Activations(allocations.largest, allocations.total)


@dataclass(frozen=True)
class PassSizes:
    """Sizes of one pass of differentiation.

    Attributes
    ----------
    n_params : int
        P
    itemsize : int
        bytes of one number of a gradient
    activations : Activations
        of one example
    device : str
        type of the model's device
    chunk_size : int, optional
        examples that are differentiated at once; chosen by the network if None
    budget : int, optional
        bytes that all work together may take, if the user has set a limit
    """

    n_params: int
    itemsize: int
    activations: Activations
    device: str = "cpu"
    chunk_size: int | None = None
    budget: int | None = None

    # Reverse mode

    def row_bytes(self, rows_per_example: int = 1) -> int:
        """Bytes of gradients and saved activations of one example."""
        rows = self.n_params * self.itemsize * rows_per_example
        # All rows go through the layers together, beside the saved activations.
        passing = self.activations.largest * (rows_per_example - 1)
        return 2 * (rows + passing + self.activations.total)

    def rows_at_once(self, rows_per_example: int = 1) -> int:
        """How many examples' gradients fit into one reverse-mode pass."""
        if self.outputs_at_once(rows_per_example) < rows_per_example:
            return 1
        if self.chunk_size is not None:
            return self.chunk_size
        each = max(1, self.row_bytes(rows_per_example))
        by_cache = 2 * self._limit(GRADIENT_BYTES) // each
        by_memory = self.pass_limit // each
        return max(
            1, min(max(ENOUGH_GRADIENTS // rows_per_example, by_cache), by_memory)
        )

    def outputs_at_once(self, n_outputs: int) -> int:
        """How many of one example's rows fit into one reverse-mode pass.

        Each has a gradient, a cotangent and its way back through the layers. Without a
        limit they may take as much as the activations, which every pass computes anew.
        """
        numbers = self.n_params + n_outputs
        row = 2 * (numbers * self.itemsize + self.activations.largest)
        saved = 2 * self.activations.total
        free = self.pass_limit - saved
        if self.budget is None:
            free = max(free, saved)
        return max(1, min(n_outputs, free // max(1, row)))

    # Forward mode

    def tangent_bytes(self, rank: int) -> int:
        """Bytes of the intermediate results of one example with K tangents."""
        return LIVE_RESULTS * (rank + 1) * self.activations.largest

    @property
    def tangents_at_once(self) -> int:
        """How many tangents one example takes in one forward-mode pass."""
        largest = max(1, self.activations.largest)
        most = self._limit(ONE_EXAMPLE_BYTES)
        enough = max(FEWEST_TANGENTS, min(ENOUGH_TANGENTS, most // largest))
        by_cache = max(enough, self._tangent_limit(1) // largest)
        by_memory = self.pass_limit // (LIVE_RESULTS * largest) - 1
        if self.budget is not None:  # products copy the tangents of the parameters
            tangent = self.n_params * self.itemsize + LIVE_RESULTS * largest
            by_memory = min(by_memory, self.pass_limit // tangent)
        return max(1, min(by_cache, by_memory))

    def examples_at_once(self, rank: int) -> int:
        """How many examples take all K tangents in one forward-mode pass."""
        if self.chunk_size is not None:
            return self.chunk_size
        largest = max(1, self.activations.largest)
        by_cache = self._tangent_limit(rank) // (rank * largest)
        by_memory = self.pass_limit // max(1, self.tangent_bytes(rank))
        return max(1, min(by_cache, by_memory))

    def _tangent_limit(self, rank: int) -> int:
        least, most = self._limit(TANGENT_BYTES)
        return max(least, min(most, rank * self.n_params * self.itemsize))

    def pass_bytes(
        self, rank: int, n_rows: int | None = None, n_examples: int | None = None
    ) -> int:
        """Bytes of the largest pass of a fit with K directions.

        At most, if the number of sampled gradients or the size of the batches is not
        told.
        """
        rows, together = self.rows_at_once(), min(rank, self.tangents_at_once)
        examples = self.examples_at_once(together)
        return max(
            min(rows, n_rows or rows) * self.row_bytes(),
            min(examples, n_examples or examples) * self.tangent_bytes(together),
        )

    # Memory to keep from pass to pass, see `kept_memory`

    def row_heap(self, n_examples: int, rows_per_example: int = 1) -> int:
        """Bytes for reverse-mode passes over so many examples."""
        at_once = min(n_examples, self.rows_at_once(rows_per_example))
        expected = at_once * self.row_bytes(rows_per_example)
        return min(SPARE * expected, self.heap_limit)

    def tangent_heap(self, n_examples: int, n_tangents: int) -> int:
        """Bytes for forward-mode passes: none where the results are so small that the C
        library keeps them anyhow."""
        examples = min(n_examples, self.examples_at_once(n_tangents))
        if examples * n_tangents * self.activations.largest < LARGE_RESULT:
            return 0
        expected = examples * self.tangent_bytes(n_tangents)
        return min(SPARE * expected, self.heap_limit)

    @property
    def heap_limit(self) -> int:
        """Bytes at most. Other devices keep their memory by themselves."""
        if self.device != "cpu":
            return 0
        return self.pass_limit * (SPARE if self.budget is None else 1)

    @property
    def pass_limit(self) -> int:
        """Bytes of one pass."""
        limit = self._limit(PASS_BYTES)
        return (
            limit if self.budget is None else min(limit, int(PASS_SHARE * self.budget))
        )

    def _limit(self, limits: dict[str, L]) -> L:
        return limits.get(self.device, limits["cpu"])
