"""Which gradients enter the Nyström basis: M pairs (x, i) of example and output.

The draws use numpy generators made from a seed: indices live on the host, and no
global random state is involved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from laplace_ella.support.batches import split_batch

__all__ = [
    "Pairs",
    "check_loader",
    "draw_others",
    "draw_pairs",
    "eligible_indices",
    "read_labels",
    "subset",
]


#: Positions of examples and outputs `(M,)` each, sorted by example.
Pairs = tuple[np.ndarray, np.ndarray]


def check_loader(loader: Any, name: str = "train_loader") -> None:
    """Refuse, before any work, loaders whose examples cannot be indexed."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        raise TypeError(
            f"{name} must be a torch.utils.data.DataLoader, got "
            f"{type(loader).__name__}, which has no `dataset`."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} wraps the iterable data set {type(dataset).__name__}, and here "
            "examples are drawn by index; wrap the data in a map-style data set (one "
            "with __getitem__ and __len__), for example list(dataset)."
        )
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        raise ValueError(
            f"{name} has automatic batching switched off (batch_size=None); pass "
            "batch_size= so that single examples can be drawn."
        )


def eligible_indices(loader: Any) -> np.ndarray:
    """Indices of the data set that one pass over the loader can yield, sorted.

    Samplers whose index set is known are not iterated; others are, once.
    """
    n = len(loader.dataset)
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
    known_batches = type(batch_sampler) is torch.utils.data.BatchSampler
    if known_batches and type(sampler) is SequentialSampler:
        if batch_sampler.drop_last:
            n -= n % batch_sampler.batch_size
        indices = np.arange(n)
    elif known_batches and type(sampler) is RandomSampler and not sampler.replacement:
        indices = np.arange(n)
    elif known_batches and type(sampler) is SubsetRandomSampler:
        indices = np.asarray(list(sampler.indices), dtype=np.int64)
    elif batch_sampler is not None:
        indices = np.asarray([i for batch in batch_sampler for i in batch])
    else:
        indices = np.arange(n)
    if indices.size == 0:
        raise ValueError(
            f"The loader yields no example (data set of length {len(loader.dataset)}); "
            "ELLA needs at least one. Check the sampler and drop_last."
        )
    return np.unique(indices.astype(np.int64))


def draw_pairs(
    n_examples: int,
    n_outputs: int,
    n_samples: int,
    rng: np.random.Generator,
    labels: np.ndarray | None = None,
) -> Pairs:
    """Draw M pairs (x, i), never the same pair twice (Deng et al. 2022, Sec. 3.3).

    Every example is used ⌊M/N⌋ or ⌈M/N⌉ times, so x is drawn without replacement
    while M ≤ N, and every pair is there exactly once when M ≥ N·C.

    Parameters
    ----------
    n_examples, n_outputs, n_samples : int
        N, C and M.
    rng : np.random.Generator
    labels : np.ndarray, optional
        class of each example `(N,)`; if given, the classes take turns.

    Returns
    -------
    examples, outputs : np.ndarray
        positions in range(N) and in range(C), `(min(M, N·C),)`, sorted by example
    """
    n_samples = min(n_samples, n_examples * n_outputs)
    n_rounds = -(-n_samples // n_examples)  # how often an example is used at most
    # A slot is the r-th use of an example; slots are ordered by round, then at random.
    slots = np.concatenate([rng.permutation(n_examples) for _ in range(n_rounds)])
    rounds = np.repeat(np.arange(n_rounds), n_examples)
    if labels is not None:
        order = _take_turns(labels[slots])
        slots, rounds = slots[order], rounds[order]
    slots, rounds = slots[:n_samples], rounds[:n_samples]
    if n_rounds == 1:
        outputs = rng.integers(n_outputs, size=n_samples)
    else:  # the uses of one example take different outputs
        # Example by example: all outputs of all examples may not fit into memory.
        drawn = [
            rng.choice(n_outputs, min(n_rounds, n_outputs), replace=False)
            for _ in range(n_examples)
        ]
        outputs = np.stack(drawn)[slots, rounds]
    order = np.argsort(slots, kind="stable")
    return slots[order], outputs[order]


def draw_others(
    n_outputs: int,
    n_pairs: int,
    examples: np.ndarray,
    outputs: np.ndarray,
    n_samples: int,
    rng: np.random.Generator,
) -> Pairs:
    """At most so many of the pairs that were not drawn, sorted by example."""
    taken = np.sort(examples * n_outputs + outputs)
    if n_pairs <= 4 * (len(taken) + n_samples):
        others = np.setdiff1d(np.arange(n_pairs), taken, assume_unique=True)
        others = rng.permutation(others)[:n_samples]
    else:  # few of many: those drawn by chance are left out
        others = np.unique(rng.integers(n_pairs, size=n_samples))
        others = np.setdiff1d(others, taken, assume_unique=True)
    return np.divmod(np.sort(others), n_outputs)


def _take_turns(labels: np.ndarray) -> np.ndarray:
    """Order in which the classes take turns, each keeping its own order."""
    turn = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        turn[members] = np.arange(len(members))
    return np.argsort(turn, kind="stable")


def read_labels(dataset: Any, indices: np.ndarray, dict_key_y: str) -> np.ndarray:
    """Class labels of the chosen examples, without loading inputs where possible."""
    labels = _label_column(dataset, dict_key_y)
    if labels is not None:
        return _as_classes(labels)[indices]
    targets = [split_batch(dataset[int(i)], dict_key_y)[1] for i in indices]
    return _as_classes(torch.stack([torch.as_tensor(t) for t in targets]))


def _label_column(dataset: Any, dict_key_y: str) -> Any | None:
    """All labels of a data set at once, or None where it does not hold them."""
    if isinstance(dataset, Subset):
        labels = _label_column(dataset.dataset, dict_key_y)
        return None if labels is None else _as_classes(labels)[list(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [_label_column(part, dict_key_y) for part in dataset.datasets]
        if any(part is None for part in parts):
            return None
        return np.concatenate([_as_classes(part) for part in parts])
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1] if len(dataset.tensors) == 2 else None
    if dict_key_y in (getattr(dataset, "column_names", None) or ()):
        return dataset[dict_key_y]  # a Hugging Face data set
    for name in ("targets", "labels"):  # torchvision's names
        labels = getattr(dataset, name, None)
        if labels is not None and not isinstance(labels, Mapping):
            if len(labels) == len(dataset):
                return labels
    return None


def _as_classes(labels: Any) -> np.ndarray:
    """Integer classes (N,) from indices, one-hot rows or probabilities."""
    labels = (
        torch.as_tensor(np.asarray(labels)) if not torch.is_tensor(labels) else labels
    )
    labels = labels.detach().cpu()
    if labels.ndim == 2:
        labels = labels[:, 0] if labels.shape[1] == 1 else labels.argmax(1)
    if labels.ndim != 1 or labels.dtype.is_floating_point:
        raise ValueError(
            "balanced=True needs one class label per example, got targets of shape "
            f"{tuple(labels.shape)} and dtype {labels.dtype}."
        )
    return labels.numpy()


def subset(
    loader: Any, indices: np.ndarray, batch_size: int | None = None
) -> DataLoader:
    """A loader over chosen examples, in order, that loads as the user's does.

    A few examples in one batch are loaded without the user's worker processes, whose
    start would take longer.
    """
    size = (
        batch_size
        or getattr(loader, "batch_size", None)
        or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    )
    return DataLoader(
        Subset(loader.dataset, indices.tolist()),
        batch_size=size or 32,
        num_workers=0 if batch_size else getattr(loader, "num_workers", 0),
        collate_fn=getattr(loader, "collate_fn", None),
        worker_init_fn=getattr(loader, "worker_init_fn", None),
        pin_memory=getattr(loader, "pin_memory", False),
    )
