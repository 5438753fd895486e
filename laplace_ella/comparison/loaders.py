"""Loaders of a comparison: seeded passes, smaller batches, batches without targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from laplace_ella.support.batches import split_batch
from laplace_ella.support.preserve import random_states

__all__ = ["rebatched", "reproducible", "split"]


@contextmanager
def reproducible(seed: int, device: torch.device, *loaders: Any) -> Iterator[None]:
    """Seeded inside, and everything as before outside.

    Every pass over a shuffled loader thus has the same order, for all methods.
    """
    with random_states(device, *loaders):
        torch.manual_seed(seed)
        yield


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


def split(batch: Any, dict_key_y: str) -> tuple[Any, torch.Tensor | None]:
    """Inputs and targets of a batch; targets None where there are none."""
    if isinstance(batch, torch.Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0], None
    if hasattr(batch, "keys") and dict_key_y not in batch:
        return batch, None
    return split_batch(batch, dict_key_y)
