"""Passes over a loader: batches of inputs on the device, and their targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from tqdm.auto import tqdm

from laplace_ella.support.batches import split_batch, to_device

__all__ = ["Rest", "loader_batches", "with_bar"]


def loader_batches(
    loader: Iterable[Any],
    device: torch.device,
    dict_key_y: str,
    description: str = "",
    progress_bar: bool = False,
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Inputs on the device, and targets as the loader gives them.

    The bar estimates the time that is left from the first batch on, and starts where a
    pass goes on; of loaders without a length it counts.
    """
    for batch in with_bar(loader, description, progress_bar):
        x, y = split_batch(batch, dict_key_y)
        yield to_device(x, device), y


def with_bar(
    loader: Iterable[Any], description: str = "", progress_bar: bool = False
) -> Iterable[Any]:
    """The batches of one pass over a loader, with a progress bar if it is wanted."""
    try:
        total = len(loader)  # pyright: ignore[reportArgumentType]
    except (TypeError, AttributeError, NotImplementedError):  # it is not known
        total = None
    # An iterator, because tqdm asks for one twice: of a loader it would start the
    # workers twice, and draw two seeds.
    return tqdm(
        iter(loader),
        description,
        total,
        disable=not progress_bar,
        initial=loader.n_batches if isinstance(loader, Rest) else 0,
    )


class Rest:
    """What is left of a pass over a loader that goes on elsewhere.

    The batches that were worked on are loaded once more, so that those to come are the
    same: their order and augmentation depend on the random numbers drawn before.

    Parameters
    ----------
    loader : iterable
        in the random state in which the pass started
    n_batches : int
        that were worked on

    Attributes
    ----------
    last : Any
        the last of them; None where the loader has fewer
    """

    def __init__(self, loader: Iterable[Any], n_batches: int) -> None:
        self.loader, self.n_batches = loader, n_batches
        self._batches = iter(loader)
        self.last = None
        for number, batch in enumerate(islice(self._batches, n_batches), start=1):
            if number == n_batches:
                self.last = batch

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __len__(self) -> int:
        """Of the whole pass, as a progress bar counts."""
        return len(self.loader)  # pyright: ignore[reportArgumentType]
