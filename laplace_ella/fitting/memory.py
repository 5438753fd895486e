"""What a fit will need of memory, told before anything is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.posterior.products import working_numbers
from laplace_ella.support.resources import human_bytes

__all__ = [
    "MemoryEstimate",
    "check_memory",
    "estimate_memory",
    "exact_memory",
    "on_disk",
    "sketch_sizes",
    "too_large_for_exact",
]

#: Rows of a sketch that survive a full buffer, as multiples of K: eigenvalues are then
#: within a percent of exact ones, see examples/paper/results/benchmark/streaming.md.
SKETCH_FACTOR = 5

#: Bytes per entry of a Gram matrix: it and its eigenvectors in float64, and as much
#: again for the decomposition to work in.
GRAM_BYTES = 4 * 8


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a fit and predictions take on the device that holds the directions.

    Attributes
    ----------
    basis : int
        the directions V, K·P numbers, which stay
    rows : int
        all M sampled gradients, and their Gram matrix
    sketch : int
        the smallest summary of them that still gives K directions
    pass_ : int
        gradients, tangents and activations of one differentiation; 0 if that is made
        on another device
    budget : int
        what may be used
    capacity : int
        rows that are kept in memory within the budget
    n_samples : int
        M
    disk : int
        all M sampled gradients where they are kept in a file; `rows` is then what they
        take of memory

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=5)
    >>> estimate = la.estimate_memory(DataLoader(data, batch_size=25))
    >>> estimate.fits, estimate.method
    (True, 'exact')
    """

    basis: int
    rows: int
    sketch: int
    pass_: int
    budget: int
    capacity: int
    n_samples: int
    disk: int = 0

    @property
    def method(self) -> str:
        """'exact' if all gradients fit, 'disk' if in a file, else 'streaming'."""
        if self.disk:
            return "disk"
        return "exact" if self.capacity >= self.n_samples else "streaming"

    @property
    def needed(self) -> int:
        """Bytes of the leanest way."""
        return self.basis + min(self.rows, self.sketch) + self.pass_

    @property
    def total(self) -> int:
        """Bytes of memory of the way that will be taken."""
        if self.disk:
            return self.needed
        kept, gram = min(self.capacity, self.n_samples), GRAM_BYTES * self.n_samples**2
        row = (self.rows - gram) // max(1, self.n_samples)
        return self.basis + _rows_bytes(kept, row) + self.pass_

    @property
    def fits(self) -> bool:
        return self.needed <= self.budget

    def __str__(self) -> str:
        lines = {
            "basis V (stays)": self.basis,
            f"all {self.n_samples} gradients": self.rows,
            "least sketch of them": self.sketch,
            "one pass": self.pass_,
            "budget": self.budget,
            f"this fit ({self.method})": self.total,
        }
        if self.disk:
            lines["on disk"] = self.disk
        width = max(map(len, lines))
        return "\n".join(f"{k:<{width}}  {human_bytes(v):>9}" for k, v in lines.items())


def estimate_memory(
    n_params: int,
    n_samples: int,
    rank: int,
    itemsize: int,
    pass_bytes: int,
    budget: int,
    basis_itemsize: int | None = None,
    n_processes: int = 1,
) -> MemoryEstimate:
    """Memory of a fit with M gradients of P numbers and K directions.

    The directions are computed in the place of the rows, and stay in `basis_itemsize`
    bytes per number. Several processes have a part of the rows each, which they
    exchange for a part of the columns of all rows; of summaries each has a whole one.
    """
    row = n_params * itemsize
    part = row if n_processes == 1 else -(-2 * row // n_processes)
    basis = rank * n_params * (basis_itemsize or itemsize)
    least = min(n_samples, rank + 5)
    free_for_rows = max(0, budget - basis - pass_bytes)
    capacity = max(least, min(n_samples, _most_rows(part, free_for_rows)))
    if capacity < n_samples:  # a larger buffer makes the sketch slower, not better
        capacity = max(least, min(n_samples, _most_rows(row, free_for_rows)))
        capacity = min(capacity, 2 * SKETCH_FACTOR * max(rank, 8))
        part = row
    return MemoryEstimate(
        basis=basis,
        rows=_rows_bytes(n_samples, part),
        sketch=_rows_bytes(least, row),
        pass_=pass_bytes,
        budget=budget,
        capacity=capacity,
        n_samples=n_samples,
    )


def on_disk(memory: MemoryEstimate, n_params: int, itemsize: int) -> MemoryEstimate:
    """The same with all gradients in a file: in memory are the decomposition of their
    Gram matrix, and the columns that are worked on."""
    m = memory.n_samples
    needed = GRAM_BYTES * m**2 + 8 * working_numbers(m, n_params)
    filed = (m + 1) * n_params * itemsize
    return replace(memory, rows=needed, sketch=needed, capacity=m, disk=filed)


def _most_rows(row: int, free: int) -> int:
    """The largest number of gradients that fit, with their Gram matrix."""
    root = math.isqrt(row**2 + 4 * GRAM_BYTES * free)
    return (root - row) // (2 * GRAM_BYTES)


def _rows_bytes(n_rows: int, row: int) -> int:
    """Bytes of so many gradients and of the decomposition of their Gram matrix."""
    return n_rows * row + GRAM_BYTES * n_rows**2


def check_memory(memory: MemoryEstimate, device: torch.device) -> None:
    """Refuse work that cannot fit, before anything is computed."""
    if not memory.fits:
        raise InsufficientMemoryError(
            f"The fit needs at least {human_bytes(memory.needed)} on {device}, the "
            f"budget is {human_bytes(memory.budget)}. Lower n_eigenvalues (the basis "
            f"takes {human_bytes(memory.basis)}) or chunk_size (one pass takes "
            f"{human_bytes(memory.pass_)}), freeze parameters, use basis_dtype="
            "torch.bfloat16 or basis_device='cpu', or raise memory_budget."
        )


def exact_memory(
    n_params: int,
    n_pairs: int,
    itemsize: int,
    pass_bytes: int,
    budget: int,
    n_processes: int = 1,
) -> MemoryEstimate:
    """Memory of a fit with the gradients of all pairs, replaced by their directions.

    Several processes have a part of the gradients each, and then all directions.
    """
    row = n_params * itemsize
    row += row // n_processes if n_processes > 1 else 0
    rows = _rows_bytes(n_pairs, row)
    return MemoryEstimate(0, rows, rows, pass_bytes, budget, n_pairs, n_pairs)


def too_large_for_exact(
    memory: MemoryEstimate, n_params: int, largest: int, device: torch.device
) -> InsufficientMemoryError:
    """The refusal of an exact fit, which names the largest number of directions that
    fits."""
    return InsufficientMemoryError(
        f"n_eigenvalues='exact' keeps all {memory.n_samples} gradients of {n_params} "
        f"parameters, {human_bytes(memory.needed)} on {device}; the budget is "
        f"{human_bytes(memory.budget)}. The largest n_eigenvalues that fits is "
        f"{largest}; or use fewer data, freeze parameters, raise memory_budget, or "
        "name a folder with room for them, scratch_dir= (of one process)."
    )


def sketch_sizes(memory: MemoryEstimate, rank: int) -> tuple[int, int]:
    """Capacity and rows kept of the sketch within the estimate's budget."""
    if memory.method != "streaming":
        return memory.n_samples + 1, memory.n_samples
    capacity = memory.capacity
    keep = min(SKETCH_FACTOR * rank, max(rank + 2, capacity // 2), capacity - 1)
    return capacity, keep
