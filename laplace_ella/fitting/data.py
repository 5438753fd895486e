"""Read loaders, count their examples, and draw the pairs whose gradients are taken.

What a loader yields is what is fitted. Examples are known by their position in it, for
every kind of loader; data sets are never indexed, and samplers never guessed about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    default_collate,
)
from tqdm.auto import tqdm

from laplace_ella.support.batches import Batch, batch_size, split_batch, to_device
from laplace_ella.support.checks import positive_int
from laplace_ella.support.identity import digest
from laplace_ella.support.preserve import seeded_iteration


def loader_batches(
    loader: Iterable[Any],
    device: torch.device,
    dict_key_y: str,
    description: str = "",
    progress_bar: bool = False,
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield inputs on the device, and targets as the loader gives them; refuse what
    cannot be read, or not more than once."""
    refused = (torch.Tensor, Mapping, Iterator)
    if not isinstance(loader, Iterable) or isinstance(loader, refused):
        raise TypeError(
            "A loader must be a torch.utils.data.DataLoader, or yield batches whenever "
            f"it is iterated over; got {type(loader).__name__}. What can be read only "
            "once, like iter(loader), will not do: a fit reads its data twice."
        )
    batches = seeded_iteration(loader)
    if progress_bar:
        batches = tqdm(batches, description, length_hint(loader) or None)
    for batch in batches:
        x, y = split_batch(batch, dict_key_y)
        yield to_device(x, device), y


def known_length(loader: Any) -> int | None:
    """Return how many examples a plain torch loader yields in a pass, without those
    that a `DistributedSampler` repeats; None where only reading it tells."""
    if not (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader.batch_sampler) is BatchSampler
        and loader.collate_fn is default_collate  # others may drop examples
        and not isinstance(loader.dataset, IterableDataset)
    ):
        return None
    sampler: Any = loader.batch_sampler.sampler
    n = own = length_hint(sampler, -1)
    if n < 0:  # it has none
        return None
    if type(sampler) is DistributedSampler and not sampler.drop_last:
        total = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
        own = -(-(total - sampler.rank) // sampler.num_replicas)
    if loader.batch_sampler.drop_last:
        n -= n % loader.batch_sampler.batch_size
    return max(0, min(n, own))


class Read(NamedTuple):
    """A batch: positions and inputs of its examples, targets as the loader gives them,
    and the digest of all targets so far."""

    where: slice
    x: Any
    y: torch.Tensor
    targets: str


@dataclass(frozen=True)
class TrainingData:
    """N examples, known by their positions 0 … N − 1 in what a loader yields.

    `n_examples` is N, None where it does not matter; no more than `max_data` are read.
    `labels` `(N,)` are the classes for balanced draws. A running digest of the targets
    is kept if they are `digested`.
    """

    loader: Any
    dict_key_x: str
    dict_key_y: str
    max_data: int | None = None
    n_examples: int | None = None
    labels: np.ndarray | None = None
    digested: bool = False

    def batches(
        self,
        device: torch.device,
        description: str = "",
        progress_bar: bool = False,
        n_done: int = 0,
        targets: str = "",
    ) -> Iterator[Read]:
        """Yield batches up to the end of the data; the last one may be cut.

        The first `n_done` are only read, and refused where the running digest of their
        targets is not `targets`.
        """
        seen, n, running = 0, self.n_examples, ""
        end = self.max_data if n is None else n
        batches = loader_batches(
            self.loader, device, self.dict_key_y, description, progress_bar
        )
        for i, (x, y) in enumerate(batches, 1):
            size = batch_size(x, self.dict_key_x)
            if end is not None and seen + size > end:
                size = end - seen
                x = Batch.of(x, self.dict_key_x).take(slice(0, size)).inputs
                y = y[:size]
            running = digest(running, y) if self.digested else ""
            if i > n_done:
                yield Read(slice(seen, seen + size), x, y, running)
            elif i == n_done and running != targets:
                raise ValueError(
                    f"The targets of the first {i} batches are not those that the "
                    "checkpoint was made with. Pass the same data in the same order (a "
                    "loader that shuffles needs a generator with a seed), or, to start "
                    "over, delete the file."
                )
            seen += size
            if seen == end:
                return
        if seen < (n or 1):
            raise ValueError(
                f"The loader yields {seen or 'no'} example(s), at least {n or 1} are "
                "expected by its length or a pass before. Check the data set, the "
                "sampler and drop_last, and pass a loader whose every pass starts anew."
            )


def training_data(
    loader: Any,
    dict_key_x: str,
    dict_key_y: str,
    max_data: int | None = None,
    balanced: bool = False,
    counted: bool = True,
    progress_bar: bool = False,
) -> TrainingData:
    """Return the examples of a loader, up to `max_data`, with their number if they are
    to be `counted`.

    Where the loader's type does not tell it, and for labels, a pass that only loads
    counts them.
    """
    if max_data is not None:
        positive_int("max_data", max_data)
    data = TrainingData(loader, dict_key_x, dict_key_y, max_data)
    n, labels = known_length(loader), []
    if n is not None:
        n = min(n, max_data or n)
    if balanced or (counted and not n):
        cpu = torch.device("cpu")
        for read in data.batches(cpu, "[Counting]", progress_bar):
            n = read.where.stop
            labels += [_classes(read.y)] if balanced else []
    return replace(
        data, n_examples=n, labels=np.concatenate(labels) if balanced else None
    )


def _classes(y: torch.Tensor) -> np.ndarray:
    """Return integer classes (B,) of indices, one-hot rows or probabilities."""
    y = y.detach().cpu()
    if y.ndim == 2:
        y = y[:, 0] if y.shape[1] == 1 else y.argmax(1)
    if y.ndim != 1 or y.dtype.is_floating_point:
        raise ValueError(
            "balanced=True needs one class label per example, got targets of shape "
            f"{tuple(y.shape)} and dtype {y.dtype}."
        )
    return y.numpy()


def draw_pairs(
    n_examples: int,
    n_outputs: int,
    n_samples: int,
    rng: np.random.Generator,
    labels: np.ndarray | None = None,
) -> np.ndarray:
    """Draw M pairs (x, i) of an example and an output, `(M, 2)`, never the same pair
    twice (Deng et al. 2022, Sec. 3.3).

    Every example is used ⌊M/N⌋ or ⌈M/N⌉ times, so x is drawn without replacement
    while M ≤ N, and every pair is there exactly once when M ≥ N·C. The first of them
    are such a draw of fewer pairs.
    The classes of `labels` `(N,)` take turns. `rng` is of the host: the draw is the
    same on every device.
    """
    n_samples = min(n_samples, n_examples * n_outputs)
    n_rounds = -(-n_samples // n_examples)  # how often an example is used at most
    # A slot is the r-th use of an example; slots are ordered by round, then at random.
    slots = np.concatenate([rng.permutation(n_examples) for _ in range(n_rounds)])
    rounds = np.repeat(np.arange(n_rounds), n_examples)
    if labels is not None:  # each class keeps its own order
        turns = np.empty(len(slots), dtype=np.int64)
        for label in np.unique(labels):
            members = np.flatnonzero(labels[slots] == label)
            turns[members] = np.arange(len(members))
        order = np.argsort(turns, kind="stable")
        slots, rounds = slots[order], rounds[order]
    slots, rounds = slots[:n_samples], rounds[:n_samples]
    if n_rounds == 1:
        return np.stack([slots, rng.integers(n_outputs, size=n_samples)], 1)
    # The uses of one example take different outputs. Example by example: all outputs
    # of all examples may not fit into memory.
    drawn = [
        rng.choice(n_outputs, min(n_rounds, n_outputs), replace=False)
        for _ in range(n_examples)
    ]
    return np.stack([slots, np.stack(drawn)[slots, rounds]], 1)


def pairs_within(pairs: np.ndarray, where: slice) -> np.ndarray:
    """Return those of pairs `(M, 2)`, in the order of their examples, that belong to a
    batch, with examples counted from its first."""
    first, last = np.searchsorted(pairs[:, 0], (where.start, where.stop))
    return pairs[first:last] - [where.start, 0]
