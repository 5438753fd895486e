"""Passes over a loader: batches of inputs on the device, and their targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tqdm.auto import tqdm

from laplace_ella.support.batches import split_batch, to_device

__all__ = ["loader_batches"]


def loader_batches(
    loader: Iterable[Any],
    device: torch.device,
    dict_key_y: str,
    description: str = "",
    progress_bar: bool = False,
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Inputs on the device, and targets as the loader gives them."""
    for batch in tqdm(loader, desc=description, disable=not progress_bar):
        x, y = split_batch(batch, dict_key_y)
        yield to_device(x, device), y
