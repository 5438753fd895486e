"""Time and memory: what is free, what a block of code took."""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
import time
from pathlib import Path

import torch

__all__ = [
    "Stopwatch",
    "available_memory",
    "budget_of",
    "human_bytes",
    "human_seconds",
    "parse_bytes",
]

#: Share of the free memory that is used if no budget is given.
SHARE_OF_FREE = 0.7

#: Seconds between two readings of the resident set size.
SAMPLING_INTERVAL = 0.005


def human_bytes(n: float) -> str:
    """Bytes in decimal units, as sold: `7.1 TB`, `16.0 GB`, `812 kB`."""
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n / 1e3:.0f} kB"


def human_seconds(t: float) -> str:
    """A time as one says it: `12 ms`, `3.4 s`, `8 min`, `2.5 h`, `3 days`.

    >>> [human_seconds(t) for t in (0.0004, 0.25, 3.44, 75, 90 * 60, 3 * 86_400)]
    ['0.4 ms', '250 ms', '3.4 s', '75 s', '1.5 h', '3 days']
    """
    if t < 1e-2:
        return f"{1e3 * t:.1f} ms"
    if t < 1:
        return f"{1e3 * t:.0f} ms"
    if t < 120:
        return f"{t:.1f} s" if t < 10 else f"{t:.0f} s"
    if t < 5400:
        return f"{t / 60:.0f} min"
    return f"{t / 3600:.1f} h" if t < 48 * 3600 else f"{t / 86_400:.0f} days"


def parse_bytes(budget: int | float | str) -> int:
    """Bytes from a number or a text like '8 GB', '500MB', '2GiB'.

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


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`, or None if that is not known.

    On the CPU the smaller of the machine's available memory and what the control
    group of the process (a container's limit) leaves.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    candidates = [
        value for value in (_meminfo_available(), _cgroup_free()) if value is not None
    ]
    if not candidates and hasattr(os, "sysconf"):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None
    return min(candidates, default=None)


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _resident_bytes() -> int | None:
    """Resident set size of this process, on Linux; None elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _release_freed_memory() -> None:
    """Return freed memory to the system, so that growth shows what is in use."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, TypeError, AttributeError):
        pass  # not glibc: the peak is then a lower bound


def budget_of(device: torch.device, budget: int | float | str | None) -> int:
    """The budget asked for, or a share of what is free on the device."""
    if budget is not None:
        return parse_bytes(budget)
    if device.type == "cuda" and not torch.cuda.is_available():
        return 2**62  # fake tensors take no memory
    free = available_memory(device)
    return 2**62 if free is None else int(SHARE_OF_FREE * free)


class Stopwatch:
    """Wall-clock seconds and peak memory of a block.

    On CUDA the peak is the allocator's own (`torch.cuda.max_memory_allocated`), above
    what was allocated at the start. On the CPU a thread samples the resident set size
    every 5 ms and reports its growth: a shorter spike can be missed, and memory that
    the allocator kept from before and uses again does not count (with glibc, what was
    freed is given back first). `peak_bytes` is None where the system reports neither
    (macOS and Windows without CUDA).

    >>> with Stopwatch(torch.device("cpu")) as watch:
    ...     _ = torch.ones(8).sum()
    >>> watch.seconds < 60
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.peak_bytes: int | None = None

    def __enter__(self) -> Stopwatch:
        _release_freed_memory()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            resident = _resident_bytes()
            self._before = self._peak = resident or 0
            self._done = threading.Event()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            if resident is not None:
                self._thread.start()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
            self.seconds = time.perf_counter() - self._start
            self.peak_bytes = peak - self._before
            return
        self.seconds = time.perf_counter() - self._start
        if self._thread.ident is not None:  # it was started: there is something to read
            self._done.set()
            self._thread.join()
            self._peak = max(self._peak, _resident_bytes() or 0)
            self.peak_bytes = self._peak - self._before

    def _sample(self) -> None:
        while not self._done.wait(SAMPLING_INTERVAL):
            self._peak = max(self._peak, _resident_bytes() or 0)
