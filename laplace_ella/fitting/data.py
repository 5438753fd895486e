"""The way to the data: the batches of a loader, and which gradients make the basis.

What a loader yields is what is fitted. Examples are known by their position in it, for
every kind of loader; data sets are never indexed, and samplers never guessed about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torch.utils.data import IterableDataset as Iterable_
from tqdm.auto import tqdm

from laplace_ella.support.batches import Batch, batch_size, split_batch, to_device
from laplace_ella.support.checks import positive_int
from laplace_ella.support.preserve import seeded_iteration

__all__ = [
    "Pairs",
    "TrainingData",
    "check_loader",
    "draw_others",
    "draw_pairs",
    "known_length",
    "loader_batches",
    "training_data",
]


def loader_batches(
    loader: Iterable[Any],
    device: torch.device,
    dict_key_y: str,
    description: str = "",
    progress_bar: bool = False,
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield inputs on the device, and targets as the loader gives them."""
    batches = seeded_iteration(loader)
    if progress_bar:
        try:
            total = len(loader)  # pyright: ignore[reportArgumentType]
        except (TypeError, AttributeError, NotImplementedError):  # it is not known
            total = None
        batches = tqdm(batches, description, total)
    for batch in batches:
        x, y = split_batch(batch, dict_key_y)
        yield to_device(x, device), y


def check_loader(loader: Any) -> None:
    """Refuse, before any work, what cannot be read, or not more than once."""
    if not isinstance(loader, Iterable) or isinstance(loader, (torch.Tensor, Mapping)):
        raise TypeError(
            "train_loader must be a torch.utils.data.DataLoader, or yield batches "
            f"whenever it is iterated over; got {type(loader).__name__}."
        )
    if isinstance(loader, Iterator):
        raise TypeError(
            f"train_loader is a {type(loader).__name__}, which can be read only once; "
            "a fit reads the data twice, for the basis and for the curvature. Pass the "
            "loader itself, or an object whose __iter__ starts anew."
        )


class Announced(NamedTuple):
    """What a loader says of itself: examples per pass, without the padding of a
    `DistributedSampler`, and the sizes of its batches."""

    n_examples: int
    length: int
    batch_size: int

    @classmethod
    def of(cls, loader: Any) -> Announced | None:
        """Ask a plain torch loader over a data set with indices; None of others."""
        plain = isinstance(loader, DataLoader) and (
            type(loader).__iter__ is DataLoader.__iter__
            and type(loader.batch_sampler) is BatchSampler
            and not isinstance(loader.dataset, Iterable_)
        )
        if not plain:
            return None
        batches: Any = loader.batch_sampler
        sampler: Any = batches.sampler
        try:
            length = len(sampler)
        except (TypeError, AttributeError, NotImplementedError):
            return None
        n = length
        if type(sampler) is DistributedSampler and not sampler.drop_last:
            n = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
            n = -(-(n - sampler.rank) // sampler.num_replicas)
        if batches.drop_last:
            length -= length % batches.batch_size
        return cls(max(0, min(n, length)), length, batches.batch_size)


def known_length(loader: Any) -> int | None:
    """Return how many examples a loader yields, where it is sure; else None."""
    announced = Announced.of(loader)
    return None if announced is None else announced.n_examples


@dataclass(frozen=True)
class TrainingData:
    """N examples, known by their positions 0 … N − 1 in what a loader yields.

    Attributes
    ----------
    loader : iterable
        yields batches, whenever it is iterated over
    dict_key_x, dict_key_y : str
        where a mapping has its inputs and targets
    n_examples : int, optional
        N; None where it does not matter
    announced : Announced, optional
        what batches are checked against
    labels : np.ndarray, optional
        class of each example `(N,)`, for balanced draws
    """

    loader: Any
    dict_key_x: str
    dict_key_y: str
    n_examples: int | None = None
    announced: Announced | None = None
    labels: np.ndarray | None = None

    def batches(
        self,
        device: torch.device,
        description: str = "",
        progress_bar: bool = False,
        stop: int | None = None,
    ) -> Iterator[tuple[slice, Any, torch.Tensor]]:
        """Yield positions, inputs on the device and targets of batches, up to position
        `stop` or the end of the data; the last batch may be cut."""
        end = self.n_examples if stop is None else stop
        seen = 0
        for x, y in loader_batches(
            self.loader, device, self.dict_key_y, description, progress_bar
        ):
            size = batch_size(x, self.dict_key_x)
            if self.announced is not None:
                self._check_size(seen, size, self.announced)
            if self.n_examples is not None and seen + size > self.n_examples:
                size = self.n_examples - seen
                x = Batch.of(x, self.dict_key_x).take(slice(0, size)).inputs
                y = y[:size]
            yield slice(seen, seen + size), x, y
            seen += size
            if end is not None and seen >= end:
                return
        if seen < (stop or 1):
            raise ValueError(
                f"The loader yielded {seen} examples, and at least {stop or 1} were "
                "expected from a pass before. Pass a loader whose every pass starts "
                "anew."
            )

    @staticmethod
    def _check_size(seen: int, size: int, announced: Announced) -> None:
        expected = min(announced.batch_size, announced.length - seen)
        if size != expected:
            raise ValueError(
                f"The loader announces {announced.length} examples in batches of "
                f"{announced.batch_size}, and the batch after {seen} examples has "
                f"{size} instead of {expected}. A collate function must return one "
                "example for each index: filter the data set instead, or pass an "
                "object whose __iter__ yields the batches, which are then counted."
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

    Where the loader does not announce it, and for labels, a pass that only loads counts
    them.
    """
    check_loader(loader)
    if max_data is not None:
        positive_int("max_data", max_data)
    announced = Announced.of(loader)
    data = TrainingData(loader, dict_key_x, dict_key_y, max_data, announced)
    if announced is not None:
        n = min(announced.n_examples, max_data or announced.n_examples)
        data = replace(data, n_examples=n)
    n = data.n_examples
    if balanced or (counted and announced is None):
        n, labels = 0, []
        cpu = torch.device("cpu")
        for where, _, y in data.batches(cpu, "[Counting]", progress_bar):
            n = where.stop
            if balanced:
                labels.append(_as_classes(y))
        if balanced:
            data = replace(data, labels=np.concatenate(labels))
    if n == 0:
        raise ValueError(
            "The loader yields no example, and ELLA needs at least one. Check the data "
            "set, the sampler and drop_last."
        )
    return replace(data, n_examples=n)


def _as_classes(y: torch.Tensor) -> np.ndarray:
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


@dataclass(frozen=True)
class Pairs:
    """Pairs (x, i) of an example and an output, sorted by example.

    Attributes
    ----------
    examples, outputs : np.ndarray
        positions in range(N) and in range(C), `(M,)` each
    """

    examples: np.ndarray
    outputs: np.ndarray

    def within(self, positions: slice) -> Pairs:
        """Return those of a batch, with examples counted from its first."""
        ends = np.searchsorted(self.examples, (positions.start, positions.stop))
        here = slice(*ends)
        return Pairs(self.examples[here] - positions.start, self.outputs[here])


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
        N, C and M
    rng : np.random.Generator
        of the host, so that the draw is the same on every device
    labels : np.ndarray, optional
        class of each example `(N,)`; if given, the classes take turns
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
        outputs = rng.integers(n_outputs, size=n_samples)
    else:  # the uses of one example take different outputs
        # Example by example: all outputs of all examples may not fit into memory.
        drawn = [
            rng.choice(n_outputs, min(n_rounds, n_outputs), replace=False)
            for _ in range(n_examples)
        ]
        outputs = np.stack(drawn)[slots, rounds]
    order = np.argsort(slots, kind="stable")
    return Pairs(slots[order], outputs[order])


def draw_others(
    n_examples: int,
    n_outputs: int,
    drawn: Pairs,
    n_samples: int,
    rng: np.random.Generator,
) -> Pairs:
    """Draw at most so many of the pairs that were not drawn."""
    n_pairs = n_examples * n_outputs
    taken = np.sort(drawn.examples * n_outputs + drawn.outputs)
    if n_pairs <= 4 * (len(taken) + n_samples):
        others = np.setdiff1d(np.arange(n_pairs), taken, assume_unique=True)
        others = rng.permutation(others)[:n_samples]
    else:  # few of many: those drawn by chance are left out
        others = np.unique(rng.integers(n_pairs, size=n_samples))
        others = np.setdiff1d(others, taken, assume_unique=True)
    return Pairs(*np.divmod(np.sort(others), n_outputs))
