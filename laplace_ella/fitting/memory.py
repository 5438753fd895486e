"""What a fit will need of memory, told before anything is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.support.resources import human_bytes

__all__ = [
    "MemoryEstimate",
    "check_memory",
    "estimate_memory",
    "exact_memory",
    "sketch_sizes",
    "too_large_for_exact",
]

#: Rows of a sketch that survive a full buffer, as multiples of K. Measured on ResNet-20
#: (K=20, M=2000): eigenvalues within 0.4 % of exact ones, subspace angle 1.2°.
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

    @property
    def method(self) -> str:
        """'exact' if all gradients fit, else 'streaming'."""
        return "exact" if self.capacity >= self.n_samples else "streaming"

    @property
    def needed(self) -> int:
        """Bytes of the leanest way."""
        return self.basis + min(self.rows, self.sketch) + self.pass_

    @property
    def total(self) -> int:
        """Bytes of the way that will be taken."""
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
) -> MemoryEstimate:
    """Memory of a fit with M gradients of P numbers and K directions.

    The directions are computed in the place of the rows, and stay in `basis_itemsize`
    bytes per number.
    """
    row = n_params * itemsize
    basis = rank * n_params * (basis_itemsize or itemsize)
    least = min(n_samples, rank + 5)
    free_for_rows = max(0, budget - basis - pass_bytes)
    # The largest m with m rows and their Gram matrix within that.
    root = math.isqrt(row**2 + 4 * GRAM_BYTES * free_for_rows)
    capacity = max(least, min(n_samples, (root - row) // (2 * GRAM_BYTES)))
    if capacity < n_samples:  # a larger buffer makes the sketch slower, not better
        capacity = min(capacity, 2 * SKETCH_FACTOR * max(rank, 8))
    return MemoryEstimate(
        basis=basis,
        rows=_rows_bytes(n_samples, row),
        sketch=_rows_bytes(least, row),
        pass_=pass_bytes,
        budget=budget,
        capacity=capacity,
        n_samples=n_samples,
    )


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
    n_params: int, n_pairs: int, itemsize: int, pass_bytes: int, budget: int
) -> MemoryEstimate:
    """Memory of a fit with the gradients of all pairs, replaced by their directions."""
    row = n_params * itemsize
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
        f"{largest}; or use fewer data, freeze parameters, or raise memory_budget."
    )


def sketch_sizes(memory: MemoryEstimate, rank: int) -> tuple[int, int]:
    """Capacity and rows kept of the sketch within the estimate's budget."""
    if memory.method == "exact":
        return memory.n_samples + 1, memory.n_samples
    capacity = memory.capacity
    keep = min(SKETCH_FACTOR * rank, max(rank + 2, capacity // 2), capacity - 1)
    return capacity, keep
