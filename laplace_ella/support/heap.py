"""Memory that stays with the process while a computation frees and asks for it.

The C library of Linux gives what is free at the top of its heap back to the system. A
network that is differentiated pass after pass asks for the same memory again and gets
it page by page, each by way of the kernel: a fifth of the time that features of
EfficientNet-Lite0 take. The settings that prevent this belong to the whole process and
cannot be read, so they are left alone. Instead something lies on top of the heap.

Whether memory of a moderate size goes back depends on what else the process has done
before: ResNet-20 takes 28 or 38 ms per image. So the passes are watched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

__all__ = ["kept_memory", "large_tensor", "watched_passes"]

T = TypeVar("T")

#: Bytes of one piece of the heap. After a piece that came from the system was freed,
#: glibc takes others of its size from the heap; that goes up to 32 MiB.
PIECE = 24 * 2**20

#: Bytes that are worth the trouble: glibc keeps about as much by itself.
LEAST = 64 * 2**20

#: Where a process has a limit, so many times the bytes must be left of its addresses.
HEADROOM = 4

#: Bytes that one pass gets from the system, if it had to return them before. The first
#: pass of a process gets all that it needs; one after the other tells.
LOST = 16 * 2**20
PASSES_THAT_TELL = 2

#: Linux's advice to use huge pages, where Python knows it.
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)

#: Whether the C library is the one that this is about.
IS_GLIBC = platform.libc_ver()[0] == "glibc"

#: Bytes of the contexts that are active.
_active: list[int] = []

#: Bytes that the last passes got from the system, as long as they were too many.
_lost: list[int] = []


@contextmanager
def kept_memory(n_bytes: int) -> Iterator[None]:
    """Up to so many bytes that are freed in the block are used again in it.

    Afterwards the system gets what does not lie below something that is in use; the
    rest serves later allocations. This is about the main thread with glibc; elsewhere
    nothing changes.
    """
    on_top = _reserve(n_bytes) if _is_worthwhile(n_bytes) else None
    if on_top is None:
        yield
        return
    _active.append(n_bytes)
    try:
        yield
    finally:
        _active.remove(n_bytes)
        _libc().free(on_top)  # and glibc gives back what is free below it


def watched_passes(parts: Iterable[T], n_bytes: int) -> Iterator[T]:
    """Parts of a computation that takes about so many bytes for each of them, which are
    kept as soon as the process was seen to lose them, here or in an earlier call.

    To keep them unasked would be a waste: what is kept for a few passes only has to be
    got from the system as well.
    """
    with ExitStack() as context:
        watching = True
        for part in parts:
            if watching and len(_lost) >= PASSES_THAT_TELL:
                context.enter_context(kept_memory(n_bytes))
                watching = False
            before = _bytes_from_system() if watching and _is_worthwhile(n_bytes) else 0
            yield part
            if before:
                got = _bytes_from_system() - before
                _lost[:] = [*_lost, got] if got > LOST else []


def _bytes_from_system() -> int:
    """Bytes that this process has got page by page."""
    assert resource is not None
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return faults * mmap.PAGESIZE


def _is_worthwhile(n_bytes: int) -> bool:
    return (
        n_bytes >= max([LEAST, *(n + 1 for n in _active)])
        and IS_GLIBC
        and threading.current_thread() is threading.main_thread()
        and _addresses_left() >= HEADROOM * n_bytes
    )


def _addresses_left() -> float:
    """Bytes by which the process may grow."""
    assert resource is not None  # glibc runs on systems that have it
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return float("inf")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limit - pages * os.sysconf("SC_PAGE_SIZE")


def _reserve(n_bytes: int) -> int | None:
    """Enlarge the heap by so many bytes: the address of the piece that lies on them, or
    None if there is no room. They are taken only as they are written to."""
    libc = _libc()
    n_pieces = -(-n_bytes // PIECE) + 1
    first = [libc.malloc(PIECE) for _ in range(n_pieces)]  # from wherever
    for piece in first:
        libc.free(piece)
    pieces = [libc.malloc(PIECE) for _ in range(n_pieces)]  # from the heap
    for piece in pieces[:-1]:
        if piece is not None and MADV_HUGEPAGE is not None:  # fewer pages to get once
            start = -(-piece // mmap.PAGESIZE) * mmap.PAGESIZE
            libc.madvise(start, PIECE - mmap.PAGESIZE, MADV_HUGEPAGE)
        libc.free(piece)
    return pieces[-1]


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def large_tensor(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An empty matrix; a large one on a CPU by NumPy, which asks for huge pages.

    The first write to a gigabyte of ordinary pages takes a second, to huge ones a
    tenth of it.
    """
    n_bytes = shape[0] * shape[1] * dtype.itemsize
    if device.type != "cpu" or n_bytes < PIECE:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(n_bytes, np.uint8)).view(dtype).view(shape)
