"""How many examples are differentiated at once, and the memory that takes.

Index legend: P parameters, K rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from laplace_ella.fitting.memory import Activations

__all__ = ["PassSizes"]

#: Examples × tangents of one forward-mode pass: larger falls out of the CPU's cache.
TANGENTS_AT_ONCE = {"cpu": 256, "cuda": 8192}

#: Bytes that gradients, tangents and activations of one pass may take.
PASS_BYTES = {"cpu": 2**28, "cuda": 2**31}

#: Intermediate results that are alive at once in a forward-mode pass.
LIVE_RESULTS = 4


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
        examples that are differentiated at once; chosen by the memory if None
    """

    n_params: int
    itemsize: int
    activations: Activations
    device: str = "cpu"
    chunk_size: int | None = None

    @property
    def tangents_at_once(self) -> int:
        """Examples × tangents of one forward-mode pass."""
        return self._limit(TANGENTS_AT_ONCE)

    def rows_at_once(self, rows_per_example: int = 1) -> int:
        """How many examples' gradients fit into one reverse-mode pass."""
        if self.chunk_size is not None:
            return self.chunk_size
        per_example = self.row_bytes(rows_per_example)
        return max(1, min(64, self._limit(PASS_BYTES) // max(1, per_example)))

    def row_bytes(self, rows_per_example: int = 1) -> int:
        """Bytes of gradients and saved activations of one example."""
        row = self.n_params * self.itemsize
        return 2 * (row * rows_per_example + self.activations.total)

    def examples_at_once(self, rank: int) -> int:
        """How many examples take all K tangents in one forward-mode pass."""
        if self.chunk_size is not None:
            return self.chunk_size
        by_memory = self._limit(PASS_BYTES) // max(1, self.tangent_bytes(rank))
        return max(1, min(self.tangents_at_once // rank, by_memory))

    def tangent_bytes(self, rank: int) -> int:
        """Bytes of the intermediate results of one example with K tangents."""
        return LIVE_RESULTS * (rank + 1) * self.activations.largest

    def pass_bytes(self, rank: int) -> int:
        """Bytes of the largest pass of a fit with K directions."""
        return max(
            self.rows_at_once() * self.row_bytes(),
            self.examples_at_once(rank) * self.tangent_bytes(rank),
        )

    def _limit(self, limits: dict[str, int]) -> int:
        return limits.get(self.device, limits["cpu"])
