"""Memory that stays with the process while a computation frees and asks for it.

The C library of Linux gives what is free at the top of its heap back to the system, and
large blocks at once. A network that is differentiated pass after pass gets the same
memory again, page by page, each time by way of the kernel: a fifth of the time that
features of EfficientNet-Lite0 take. The settings that prevent this belong to the whole
process and cannot be read, so they are left alone. Instead something lies on top.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["kept_memory", "large_tensor"]

#: Bytes of one piece of the heap. Once a piece that came from the system was freed,
#: glibc takes others of its size from the heap; it learns so up to 32 MiB.
PIECE = 24 * 2**20

#: Bytes that glibc keeps at the top of the heap after that: twice a piece.
KEPT_ANYHOW = 2 * PIECE

#: What is kept at the moment, by thread.
_thread = threading.local()


@contextmanager
def kept_memory(n_bytes: int) -> Iterator[None]:
    """Up to so many bytes that are freed in the block are used again in it.

    Afterwards the system gets what does not lie below something that is still in use.
    With other C libraries, and in other threads than the first, nothing changes.
    """
    kept = getattr(_thread, "kept", 0)
    if n_bytes <= max(kept, KEPT_ANYHOW) or sys.platform != "linux":
        yield
        return
    on_top = _reserve(n_bytes)
    _thread.kept = n_bytes  # what is in the block need not do the same
    try:
        yield
    finally:
        _thread.kept = kept
        del on_top


def _reserve(n_bytes: int) -> torch.UntypedStorage | None:
    """Enlarge the heap by so many bytes, below the piece that is returned.

    That takes addresses; memory is taken only as it is written to.
    """
    # Storages, since tensors may be filled to make their use deterministic; the objects
    # first, so that none of them comes to lie above the last piece.
    n_pieces = -(-n_bytes // PIECE) + 1
    pieces = [torch.UntypedStorage(0, device="cpu") for _ in range(n_pieces)]
    try:
        for size in (PIECE, 0, PIECE):  # from wherever, freed, and from the heap
            for piece in pieces:
                piece.resize_(size)
    except RuntimeError:  # a limit of the process: then as it is without
        return None
    return pieces[-1]


def large_tensor(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An empty matrix; on a CPU, if large, in huge pages where Linux has them.

    The first write to a gigabyte of ordinary pages takes a second, to huge ones a
    tenth of it.
    """
    n_bytes = shape[0] * shape[1] * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if device.type != "cpu" or advice is None or n_bytes <= PIECE:
        return torch.empty(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, n_bytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{n_bytes} bytes cannot be allocated.") from error
    try:
        pages.madvise(advice)
    except OSError:  # a kernel without huge pages
        pass
    return torch.frombuffer(pages, dtype=dtype).view(shape)
