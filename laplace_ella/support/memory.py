"""What memory is free, and what a fit will need, told before anything is computed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

#: Share of the free memory that is used if no budget is given.
SHARE_OF_FREE = 0.7

#: More than any machine has: no limit.
UNLIMITED = 2**62

#: Rows of a sketch that survive a full buffer, as multiples of K: eigenvalues are then
#: within a percent of exact ones (examples/paper/results/benchmark/streaming.md).
SKETCH_FACTOR = 5

#: Bytes per entry of a Gram matrix: it and its eigenvectors in float64, and as much
#: again for the decomposition to work in.
GRAM_BYTES = 4 * 8

CGROUPS = Path("/sys/fs/cgroup")


def human_bytes(n: float) -> str:
    """Return bytes in decimal units, as sold: `7.1 TB`, `16.0 GB`, `812 kB`."""
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n / 1e3:.0f} kB"


def parse_bytes(budget: int | float | str) -> int:
    """Return bytes from a number or a text like '8 GB', '500MB', '2GiB'.

    >>> parse_bytes("8 GB"), parse_bytes("2 KiB"), parse_bytes(1e6)
    (8000000000, 2048, 1000000)
    """
    if isinstance(budget, (int, float)) and not isinstance(budget, bool):
        value = float(budget)
    else:
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([kKMGT]?)(i?)B?\s*", str(budget))
        if match is None:
            raise ValueError(
                f"memory_budget must be bytes or a text like '8 GB', got {budget!r}."
            )
        number, prefix, binary = match.groups()
        exponent = " kMGT".index(prefix.replace("K", "k") or " ")
        value = float(number) * (1024 if binary else 1000) ** exponent
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"memory_budget must be positive, got {budget!r}.")
    return int(value)


# What is free


def budget_of(device: torch.device, asked: int | float | str | None) -> int:
    """Return the budget asked for, or a share of what is free on the device."""
    if asked is not None:
        return parse_bytes(asked)
    free = free_bytes(device)
    return UNLIMITED if free is None else int(SHARE_OF_FREE * free)


def free_bytes(device: torch.device) -> int | None:
    """Return bytes that can still be allocated on `device`, None if not known.

    On the CPU the least of the machine's available memory and what the control groups
    of the process (a container's limit, a job's) leave.
    """
    if device.type == "cuda":  # fake tensors take no memory
        available = torch.cuda.is_available()
        return torch.cuda.mem_get_info(device)[0] if available else None
    try:
        machine = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        own = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.M)
    except OSError:
        return None
    free = [1024 * int(machine[1])] if machine else []
    group = CGROUPS / own[1] if own else CGROUPS
    for folder in (group, *group.parents):
        try:  # any group up to the root may have the limit
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            statistics = (folder / "memory.stat").read_text()
        except (OSError, ValueError):  # "max": no limit
            continue
        # Pages of files that were read count as used, and are given up when needed.
        kept = re.search(r"^inactive_file (\d+)$", statistics, re.M)
        free.append(max(0, limit - used + (int(kept[1]) if kept else 0)))
    return min(free, default=None)


# What a fit needs


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a fit and predictions take on the device that holds the directions.

    Attributes
    ----------
    basis : int
        the directions V, K·P numbers, which stay
    row : int
        one of the sampled gradients
    pass_ : int
        gradients, tangents and activations of one differentiation; 0 if that is made
        on another device
    budget : int
        what may be used
    rank, n_samples : int
        K and M

    Examples
    --------
    >>> from laplace_ella import MemoryEstimate
    >>> estimate = MemoryEstimate(8_000, 400, 10_000, 10**6, rank=20, n_samples=50)
    >>> estimate.fits, estimate.method
    (True, 'exact')
    """

    basis: int
    row: int
    pass_: int
    budget: int
    rank: int
    n_samples: int

    def with_rows(self, n: int) -> int:
        """Return all bytes with n gradients and the decomposition of their Gram
        matrix; the directions of exact fits are computed in their place."""
        return self.basis + n * self.row + GRAM_BYTES * n**2 + self.pass_

    @property
    def capacity(self) -> int:
        """Return how many gradients are kept in memory within the budget."""
        free = max(0, self.budget - self.basis - self.pass_)
        # The most rows with their Gram matrix: a root of GRAM·m² + row·m = free.
        root = math.isqrt(self.row**2 + 4 * GRAM_BYTES * free)
        most = max(self.rank + 5, (root - self.row) // (2 * GRAM_BYTES))
        if most >= self.n_samples:
            return self.n_samples
        # A larger buffer makes the sketch slower, not better.
        return min(most, 2 * SKETCH_FACTOR * max(self.rank, 8))

    @property
    def buffer(self) -> tuple[int, int]:
        """Return the size of the buffer of gradients, and the rows that it keeps."""
        capacity, K = self.capacity, self.rank
        if capacity == self.n_samples:
            return capacity + 1, capacity
        return capacity, min(SKETCH_FACTOR * K, max(K + 2, capacity // 2), capacity - 1)

    @property
    def method(self) -> str:
        """Return 'exact' if all gradients fit, else 'streaming'."""
        return "exact" if self.capacity == self.n_samples else "streaming"

    @property
    def needed(self) -> int:
        """Return the bytes of the leanest way: a summary with K directions."""
        return self.with_rows(min(self.n_samples, self.rank + 5))

    @property
    def total(self) -> int:
        """Return the bytes of the way that will be taken."""
        return self.with_rows(self.capacity)

    @property
    def fits(self) -> bool:
        """Return whether the leanest way is within the budget."""
        return self.needed <= self.budget

    def __str__(self) -> str:
        lines = {
            "basis V (stays)": self.basis,
            f"all {self.n_samples} gradients": self.row * self.n_samples,
            "one pass": self.pass_,
            "least that a fit needs": self.needed,
            "budget": self.budget,
            f"this fit ({self.method})": self.total,
        }
        width = max(map(len, lines))
        return "\n".join(f"{k:<{width}}  {human_bytes(v):>9}" for k, v in lines.items())
