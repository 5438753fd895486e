"""How many examples, and how many vectors of each, go through one pass together.

Sizes follow the network: a pass that is too small spends its time on the overhead of
single operators, one that is too large falls out of the processor's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laplace_ella.derivatives.modes import FeatureMode, RowMode
from laplace_ella.support.memory import parse_bytes

#: Bytes that one pass may take, and as much again its results; the share of a memory
#: budget that they may take where one is given.
PASS_BYTES = {"cpu": 2**28, "cuda": 2**31}
PASS_SHARE = 0.13

#: Bytes that a pass need not save on: at least, and at most where what every pass reads
#: takes as much. Measured with nine networks on a CPU with 32 MB of cache.
ENOUGH_BYTES = {"cpu": (2**26, 3 * 2**25), "cuda": (2**31, 2**31)}

#: Vectors that are worth a pass, whatever they take: fewer spend their time on
#: computing the outputs over and over.
ENOUGH_VECTORS = 32

#: Intermediate results that are alive at once in a forward-mode pass.
LIVE_RESULTS = 4


def pass_limit(device: torch.device, budget: int | float | str | None) -> int:
    """Return the bytes that one pass may take, and as much again its results."""
    limit = PASS_BYTES["cuda" if device.type == "cuda" else "cpu"]
    return (
        limit if budget is None else min(limit, int(PASS_SHARE * parse_bytes(budget)))
    )


@dataclass(frozen=True)
class PassCost:
    """Bytes that a pass takes: b(base + v·each) + v·shared for b examples with v
    vectors each, tangents of forward mode or cotangents of reverse mode."""

    base: int
    each: int = 0
    shared: int = 0

    @classmethod
    def of(
        cls, mode: FeatureMode | RowMode | None, largest: float, total: float, row: int
    ) -> PassCost:
        """Return what a mode takes, or outputs alone if it is None: `largest` and
        `total` bytes of what a backward pass of one example needs, `row` of a row."""
        largest, total = max(1, int(largest)), max(1, int(total))
        if mode is None:
            return cls(LIVE_RESULTS * largest)
        if mode is FeatureMode.FORWARD:
            return cls(LIVE_RESULTS * largest, LIVE_RESULTS * largest, row)
        if mode is FeatureMode.DOUBLE_REVERSE:
            return cls(LIVE_RESULTS * total, shared=row)
        # Each row has a gradient and a copy, and its way back through the layers.
        return cls(2 * total, 2 * (row + largest))

    def bytes(self, n_examples: int, n_vectors: int) -> int:
        """Return the bytes of such a pass."""
        each = self.base + n_vectors * self.each
        return n_examples * each + n_vectors * self.shared

    def sizes(
        self, n_vectors: int, device: torch.device, budget: int | float | str | None
    ) -> tuple[int, int]:
        """Return how many examples, with how many of their vectors, make one pass."""
        limit = pass_limit(device, budget)
        least, most = ENOUGH_BYTES["cuda" if device.type == "cuda" else "cpu"]
        free, shared = limit - self.base, self.shared
        if budget is None:  # as much as the activations, which every pass makes anew
            free, shared = max(free, self.base), 0
        # As much for examples as for what they share.
        fitting = free // max(1, self.each + 2 * shared)
        useful = max(ENOUGH_VECTORS, most // max(1, self.each))
        vectors = max(1, min(n_vectors, fitting, useful))
        # Passes of one size: the rest of an uneven division costs a pass of its own.
        vectors = -(-n_vectors // -(-n_vectors // vectors))
        one = self.base + vectors * self.each
        enough = max(least, min(most, LIVE_RESULTS * vectors * self.shared))
        examples = max(ENOUGH_VECTORS // vectors, enough // one)
        return max(1, min(examples, (limit - vectors * shared) // one)), vectors
