"""Loaders of a comparison: seeded passes, smaller batches, data without a length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from laplace_ella.support.batches import batch_size, split_batch
from laplace_ella.support.fingerprint import digest
from laplace_ella.support.preserve import random_states

__all__ = [
    "CountedLoader",
    "Survey",
    "is_map_style",
    "rebatched",
    "reproducible",
    "split",
    "survey",
]


@contextmanager
def reproducible(seed: int, device: torch.device, *loaders: Any) -> Iterator[None]:
    """Seeded inside, and everything as before outside.

    Every pass over a shuffled or augmented loader thus has the same order and the same
    draws, for all methods: torch's, numpy's and Python's generators are seeded, and
    those that the loaders have of their own.
    """
    with random_states(device, *loaders):
        seed_all(seed, *loaders)
        yield


def seed_all(seed: int, *loaders: Any) -> None:
    """Seed all generators from which a pass over the loaders may draw."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002, augmentations draw from it
    random.seed(seed)
    for loader in loaders:
        for owner in (loader, getattr(loader, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)


def split(batch: Any, dict_key_y: str) -> tuple[Any, torch.Tensor | None]:
    """Inputs and targets of a batch; targets None where there are none."""
    if isinstance(batch, torch.Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0], None
    if hasattr(batch, "keys") and dict_key_y not in batch:
        return batch, None
    return split_batch(batch, dict_key_y)


# --- what a loader holds -------------------------------------------------------------


@dataclass(frozen=True)
class Survey:
    """What one pass over a loader showed.

    Attributes
    ----------
    n_data, n_batches : int
        examples and batches of a pass
    key : str
        digest of all inputs and targets, in order and by batches
    targets : list of torch.Tensor, or None
        targets of the first and of the last batch, for checks; None if any batch has
        none
    """

    n_data: int
    n_batches: int
    key: str
    targets: Sequence[torch.Tensor] | None


def survey(name: str, loader: Any, dict_key_x: str, dict_key_y: str) -> Survey:
    """Look at every batch of a loader once, from a fixed seed.

    Raises
    ------
    ValueError
        if there is no batch, or if the loader can be iterated only once
    """
    if isinstance(loader, Iterator):
        raise ValueError(
            f"{name} is a {type(loader).__name__}, which can be iterated only once; "
            "every method needs its own pass. Pass a DataLoader or a list of batches."
        )
    seed_all(0, loader)
    n_data, digests, targets, labelled = 0, [], [], True
    for batch in loader:
        x, y = split(batch, dict_key_y)
        n_data += batch_size(x, dict_key_x)
        digests.append(digest(batch))
        labelled = labelled and y is not None
        targets = [*targets[:1], y]
    if not digests:
        raise ValueError(f"{name} yielded no batch; it needs at least one.")
    return Survey(n_data, len(digests), digest(digests), targets if labelled else None)


def is_map_style(loader: Any) -> bool:
    """Whether single examples can be drawn by their index."""
    dataset = getattr(loader, "dataset", None)
    return not isinstance(dataset, IterableDataset) and all(
        hasattr(dataset, name) for name in ("__getitem__", "__len__")
    )


@dataclass(frozen=True)
class _Counted:
    """A data set of which only the length is known."""

    n_data: int

    def __len__(self) -> int:
        return self.n_data


class CountedLoader:
    """A loader of data without a length, with the numbers of one pass over it.

    laplace-torch reads N from `len(loader.dataset)`, and a loader without a length is
    neither true nor false.
    """

    def __init__(self, loader: Any, seen: Survey) -> None:
        self.loader = loader
        self.dataset = _Counted(seen.n_data)
        self.n_batches = seen.n_batches
        self.generator = getattr(loader, "generator", None)

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def rebatched(loader: Any, size: int) -> Any:
    """The loader with batches of `size`, where that changes nothing else.

    Loaders with their own batch sampler, of iterable data or that drop the last batch
    are returned as they are.
    """
    if (
        not isinstance(loader, DataLoader)
        or loader.batch_size is None
        or loader.batch_size <= size
        or loader.drop_last
        or isinstance(loader.dataset, IterableDataset)
    ):
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=size,
        sampler=loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
    )
