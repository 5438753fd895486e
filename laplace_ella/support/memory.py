"""What memory is free, and what a fit will need, told before anything is computed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from laplace_ella.errors import InsufficientMemoryError

__all__ = [
    "MemoryEstimate",
    "budget_of",
    "check_memory",
    "estimate_memory",
    "exact_memory",
    "free_bytes",
    "human_bytes",
    "parse_bytes",
    "sketch_sizes",
    "too_large_for_exact",
]

#: Share of the free memory that is used if no budget is given.
SHARE_OF_FREE = 0.7

#: More than any machine has: no limit.
UNLIMITED = 2**62

#: Rows of a sketch that survive a full buffer, as multiples of K: eigenvalues are then
#: within a percent of exact ones, see examples/paper/results/benchmark/streaming.md.
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
    limits = list(_cgroup_free())
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    if not limits and hasattr(os, "sysconf"):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None
    return min(limits, default=None)


def _cgroup_free(of_process: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield what each limited control group of the process leaves, from its own up to
    the root: any of them may have the limit."""
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        lines = []
    groups = [("", "/")]  # in a container the root may be the limited one
    groups += [tuple(line.split(":", 2)[1:]) for line in lines if line.count(":") >= 2]
    seen = set()
    for controllers, path in groups:
        if controllers and "memory" not in controllers.split(","):
            continue
        top = CGROUPS / "memory" if controllers else CGROUPS  # version 1, version 2
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            if folder in seen or top not in (folder, *folder.parents):
                continue
            seen.add(folder)
            free = _free_in(folder, bool(controllers))
            if free is not None:
                yield free


def _free_in(folder: Path, version_1: bool) -> int | None:
    """Return what one control group leaves; None if it has no limit."""
    files = ("memory.max", "memory.current")
    if version_1:
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, used = ((folder / name).read_text().strip() for name in files)
        if limit == "max" or int(limit) >= UNLIMITED:
            return None
        statistics = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    # Pages of files that were read count as used, and are given up when needed.
    match = re.search(r"^(?:total_)?inactive_file (\d+)$", statistics, re.MULTILINE)
    files_kept = int(match[1]) if match else 0
    return max(0, int(limit) - max(0, int(used) - files_kept))


# What a fit needs


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
        """Return 'exact' if all gradients fit, else 'streaming'."""
        return "exact" if self.capacity >= self.n_samples else "streaming"

    @property
    def needed(self) -> int:
        """Return the bytes of the leanest way."""
        return self.basis + min(self.rows, self.sketch) + self.pass_

    @property
    def total(self) -> int:
        """Return the bytes of the way that will be taken."""
        kept, gram = min(self.capacity, self.n_samples), GRAM_BYTES * self.n_samples**2
        row = (self.rows - gram) // max(1, self.n_samples)
        return self.basis + _rows_bytes(kept, row) + self.pass_

    @property
    def fits(self) -> bool:
        """Return whether the leanest way is within the budget."""
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
    """Return the memory of a fit with M gradients of P numbers and K directions.

    The directions are computed in the place of the rows, and stay in `basis_itemsize`
    bytes per number.
    """
    row = n_params * itemsize
    basis = rank * n_params * (basis_itemsize or itemsize)
    least = min(n_samples, rank + 5)
    free = max(0, budget - basis - pass_bytes)
    # The most rows that fit with their Gram matrix: a root of GRAM·m² + row·m = free.
    most = (math.isqrt(row**2 + 4 * GRAM_BYTES * free) - row) // (2 * GRAM_BYTES)
    capacity = max(least, min(n_samples, most))
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


def exact_memory(
    n_params: int, n_pairs: int, itemsize: int, pass_bytes: int, budget: int
) -> MemoryEstimate:
    """Return the memory of a fit with the gradients of all pairs, in whose place are
    their directions."""
    rows = _rows_bytes(n_pairs, n_params * itemsize)
    return MemoryEstimate(0, rows, rows, pass_bytes, budget, n_pairs, n_pairs)


def sketch_sizes(memory: MemoryEstimate, rank: int) -> tuple[int, int]:
    """Return the capacity of the buffer of gradients, and the rows that it keeps."""
    if memory.method != "streaming":
        return memory.n_samples + 1, memory.n_samples
    capacity = memory.capacity
    keep = min(SKETCH_FACTOR * rank, max(rank + 2, capacity // 2), capacity - 1)
    return capacity, keep


def _rows_bytes(n_rows: int, row: int) -> int:
    """Return bytes of so many gradients and of the decomposition of their Gram
    matrix."""
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


def too_large_for_exact(
    memory: MemoryEstimate, n_params: int, largest: int, device: torch.device
) -> InsufficientMemoryError:
    """Return the refusal of an exact fit, which names the largest number of directions
    that fits."""
    return InsufficientMemoryError(
        f"n_eigenvalues='exact' keeps all {memory.n_samples} gradients of {n_params} "
        f"parameters, {human_bytes(memory.needed)} on {device}; the budget is "
        f"{human_bytes(memory.budget)}. The largest n_eigenvalues that fits is "
        f"{largest}; or use fewer data, freeze parameters, or raise memory_budget."
    )
