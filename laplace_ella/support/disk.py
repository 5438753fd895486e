"""Tensors that live in a file, for what does not fit in memory."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.support.resources import human_bytes

__all__ = ["check_folder", "copy_on_disk", "tensor_on_disk"]


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder that can be written to."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise TypeError(f"scratch_dir must be the path of a folder, got {folder!r}.")
    path = Path(folder).expanduser().resolve()
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise ValueError(
            f"scratch_dir must be a folder that can be written to, got {str(folder)!r}."
        )
    return path


def tensor_on_disk(
    shape: tuple[int, ...], dtype: torch.dtype, folder: Path
) -> torch.Tensor:
    """A tensor in a memory-mapped temporary file, which goes when the tensor goes.

    The system moves parts of it in and out as they are used. The room on the disk is
    taken at once: a disk that is full later on would end the process.
    """
    n_bytes = max(1, math.prod(shape) * dtype.itemsize)
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise InsufficientMemoryError(
            f"The sampled gradients take {human_bytes(n_bytes)} on disk, "
            f"{human_bytes(free)} are free in scratch_dir={str(folder)!r}. Use another "
            "folder, fewer data, or freeze parameters."
        )
    with tempfile.TemporaryFile(dir=folder, prefix="laplace_ella_") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(n_bytes,))
    flat = torch.from_numpy(mapped)[: math.prod(shape) * dtype.itemsize]
    return flat.view(dtype).view(shape)


def copy_on_disk(
    tensor: torch.Tensor, dtype: torch.dtype, folder: Path
) -> torch.Tensor:
    """A copy in a file, in that precision; row by row, so that it needs no memory."""
    copy = tensor_on_disk(tuple(tensor.shape), dtype, folder)
    for row, source in zip(copy, tensor, strict=True):
        row.copy_(source)
    return copy
