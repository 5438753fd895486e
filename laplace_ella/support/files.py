"""Files that are there completely or not at all, whatever happens while writing."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["remove_leftovers", "replace_file"]

#: How the names of files that are not complete yet end.
SUFFIX = ".tmp"


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file, and put it in the place of `path` when it is complete.

    Whoever reads `path`, at any moment and after any crash, finds the content before
    or the content after. An error leaves it as it was.
    """
    # A name of its own: two processes that write to one path do not mix.
    temporary = path.with_name(f"{_prefix(path)}{uuid.uuid4().hex[:8]}{SUFFIX}")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            # Before the name changes: else a power cut may leave the new name with
            # content that was never written.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _force_names(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed while writing to `path` left behind."""
    for leftover in _leftovers(path):
        leftover.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name}."


def _leftovers(path: Path) -> Iterator[Path]:
    for other in path.parent.iterdir():
        if other.name.startswith(_prefix(path)) and other.name.endswith(SUFFIX):
            yield other


def _force_names(folder: Path) -> None:
    """Write the names of a folder to the disk, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows does not open folders
        return
    try:
        os.fsync(handle)
    except OSError:  # nor do some network drives force them
        pass
    finally:
        os.close(handle)
