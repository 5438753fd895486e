"""Where a fit keeps its progress: one file, written at intervals that follow its cost.

The file holds tensors and plain types, is replaced as a whole, and is never in between.
What is in it is the matter of `progress`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from laplace_ella.errors import CheckpointWarning, warn_caller
from laplace_ella.support.batches import map_tensors, tensors_of
from laplace_ella.support.files import remove_leftovers, replace_file

__all__ = ["Checkpoint", "Journal"]

#: Of what the files hold; others are refused.
FORMAT = 1

#: Bytes per second that a disk is expected to write until that is known, and how many
#: bytes tell it.
USUAL_SPEED, ENOUGH_BYTES = 2e8, 2**24

START_OVER = "to start over, delete the file"


@dataclass(frozen=True)
class Checkpoint:
    """The file in which a fit keeps its progress, and how often it is written.

    A save takes place after a batch, not before `every` seconds have passed since the
    last one, and not before its expected duration is `share` of the time since.

    Parameters
    ----------
    path : str or path-like
        a file, in a folder that exists
    every : float, default=60
        seconds; 0 for whenever `share` allows
    share : float, default=0.05
        of the time of a fit that saving may take, in (0, 1]; 1 for all

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> data = TensorDataset(torch.randn(20, 2), torch.randint(3, (20,)))
    >>> la = Laplace(torch.nn.Linear(2, 3), "classification", "all", "nystrom",
    ...              n_eigenvalues=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     every_ten_minutes = laplace_ella.Checkpoint(f"{folder}/fit.pt", every=600)
    ...     la.fit(DataLoader(data, batch_size=5), checkpoint=every_ten_minutes)
    """

    path: str | os.PathLike[str]
    every: float = 60.0
    share: float = 0.05

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise TypeError(
                "checkpoint must be a path or a Checkpoint(path, ...), got "
                f"{type(self.path).__name__}."
            )
        if not (self.every >= 0 and math.isfinite(self.every)):  # also refuses NaN
            raise ValueError(
                f"every must be a number of seconds of at least 0, got {self.every}."
            )
        if not 0 < self.share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {self.share}.")
        folder = self.file.parent
        if not folder.is_dir():
            raise FileNotFoundError(
                f"The folder {folder} of the checkpoint does not exist. Create it."
            )
        if self.file.is_dir():
            raise IsADirectoryError(
                f"checkpoint must be a file, and {self.file} is a folder. Add a name, "
                "for example 'fit.pt'."
            )
        if not self.file.exists() and not os.access(folder, os.W_OK):
            raise PermissionError(
                f"No file can be made in the folder {folder} of the checkpoint."
            )

    @classmethod
    def of(cls, checkpoint: Any) -> Checkpoint | None:
        """What `checkpoint=` of a fit stands for."""
        if checkpoint is None or isinstance(checkpoint, cls):
            return checkpoint
        return cls(checkpoint)

    @property
    def file(self) -> Path:
        """The file of this process. The only place where its name is made."""
        return Path(self.path).expanduser().resolve()


class Journal:
    """Reads and writes the file of a `Checkpoint`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.file
        self._every, self._share = checkpoint.every, checkpoint.share
        self._last, self._cost = time.monotonic(), 0.0
        self._bytes_per_second = USUAL_SPEED
        self._warned = False

    def load(self) -> dict[str, Any]:
        """What was saved last, nothing if there is no file; tensors are read when they
        are used. Removes what interrupted saves left behind."""
        remove_leftovers(self.path)
        if not self.path.exists():
            return {}
        self.path.open("rb").close()  # whatever forbids reading is told as it is
        try:
            state = torch.load(
                self.path, map_location="cpu", weights_only=True, mmap=True
            )
        except Exception as error:  # torch raises whatever its readers do
            raise ValueError(
                f"{self.path} is not the checkpoint of a fit, or it is damaged "
                f"({type(error).__name__}: {error}). Pass another path, or, "
                f"{START_OVER}."
            ) from error
        if not isinstance(state, dict) or "format" not in state:
            raise ValueError(
                f"{self.path} is not the checkpoint of a fit. Pass another path."
            )
        if state["format"] != FORMAT:
            raise ValueError(
                f"{self.path} has version {state['format']} of the format of "
                f"checkpoints, this package reads version {FORMAT}. Use the package "
                f"that wrote it, or, {START_OVER}."
            )
        return state

    def due(self, n_bytes: int) -> bool:
        """Whether it is time for a save of about so many bytes."""
        expected = max(self._cost, n_bytes / self._bytes_per_second)
        pause = max(self._every, expected * (1 / self._share - 1))
        return time.monotonic() - self._last >= pause

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the file. Where that fails, what was saved before stays, with a
        warning the first time."""
        started = time.monotonic()
        state = map_tensors(_compact, {"format": FORMAT, **state})
        try:
            replace_file(self.path, lambda file: _write(state, file))
        except OSError as error:
            self._warn(error)
        self._last = time.monotonic()
        self._cost = self._last - started
        n_bytes = sum(t.numel() * t.element_size() for t in tensors_of(state))
        if n_bytes >= ENOUGH_BYTES:
            self._bytes_per_second = n_bytes / max(self._cost, 1e-6)

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        before = (
            "what was saved before stays" if self.path.exists() else "none is there"
        )
        warn_caller(
            f"The checkpoint {self.path} could not be written ({error}); {before}. The "
            "fit goes on, and so do attempts to save it.",
            CheckpointWarning,
        )


def _write(state: Mapping[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch finds its file too short, and says so instead of the cause.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with a storage of their own size, in the same memory if they
    are together there: torch saves whole storages, of which a tensor may be a part."""
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() == size:
        return tensor
    if not size:
        return tensor.clone()
    flat = tensor.flatten().view(torch.uint8).numpy()
    return torch.from_numpy(flat).view(tensor.dtype).view(tensor.shape)
