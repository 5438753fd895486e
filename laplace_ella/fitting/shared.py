"""Data of several processes: which of them has which example, and in what order.

The examples of all processes are one data set. Their common order takes turns between
the processes, which is that of a `DistributedSampler`; an example that several of them
have, as padding or because each has all of the data, counts once and belongs to one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from laplace_ella.fitting import sampling
from laplace_ella.fitting.data import FirstExamples, TrainingData, is_stream
from laplace_ella.fitting.sampling import Pairs
from laplace_ella.fitting.streams import READ_ONCE, Reservoir, Stream
from laplace_ella.support.batches import tensors_of
from laplace_ella.support.checks import positive_int
from laplace_ella.support.collective import Collective
from laplace_ella.support.fingerprint import digest
from laplace_ella.support.preserve import random_states

__all__ = [
    "SharedData",
    "SharedExamples",
    "SharedStream",
    "arranged",
    "joint_order",
    "shared_data",
]

logger = logging.getLogger("laplace_ella")

#: Examples that a process without any looks at instead of its own.
LENT = 8


class SharedData(TrainingData, Protocol):
    """Training data that several processes have together, seen from one of them.

    Positions are those of all N examples. A pass goes over the examples of this
    process, in the common order.
    """

    @property
    def n_pass(self) -> int | None:
        """How many examples a pass of all processes has; None where that is not known
        beforehand."""
        ...

    def share(self, n: int) -> int:
        """How many of the first `n` examples of a pass are this process's."""
        ...

    def places(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """Places in the common order of what each process had in a pass, so many
        examples each."""
        ...


def shared_data(
    loader: Any,
    collective: Collective,
    dict_key_x: str,
    max_data: int | None = None,
    progress_bar: bool = False,
) -> SharedData:
    """The data that the loaders of all processes have together."""
    if max_data is not None:
        positive_int("max_data", max_data)
    # Without a batch sampler an index of the data set is that of a batch.
    streams = is_stream(loader) or getattr(loader, "batch_sampler", loader) is None
    collective.check_same(
        "kinds of data", {"the loader": "a stream" if streams else "indexed data"}
    )
    if streams:
        return _shared_stream(loader, collective, dict_key_x, max_data, progress_bar)
    return _shared_examples(loader, collective, max_data)


# Which process has which example


def joint_order(orders: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Examples of all processes, each once, in turns; and whose each one is.

    >>> order, owner = joint_order([np.array([0, 2, 4]), np.array([1, 3, 0])])
    >>> order.tolist(), owner.tolist()
    ([0, 1, 2, 3, 4], [0, 1, 0, 1, 0])
    """
    size = len(orders)
    turns = np.concatenate([np.arange(len(o)) * size + r for r, o in enumerate(orders)])
    turn = np.argsort(turns)
    examples = np.concatenate(orders).astype(np.int64)[turn]
    owners = turns[turn] % size
    kinds, first, inverse = np.unique(examples, return_index=True, return_inverse=True)
    places = np.sort(first)
    order = examples[places]
    if len(kinds) == len(examples):
        return order, owners
    # Those who have an example take turns as well, so that none has all the work.
    holders = np.unique(inverse.ravel() * size + owners)  # by example, then by process
    start = np.searchsorted(holders, np.arange(len(kinds)) * size)
    n_holders = np.diff(np.append(start, len(holders)))
    kind = np.searchsorted(kinds, order)
    pick = start[kind] + np.arange(len(order)) % n_holders[kind]
    return order, holders[pick] % size


def _turns(lengths: Sequence[int]) -> list[np.ndarray]:
    """Places of the examples of each process if they take turns."""
    starts = np.cumsum([0, *lengths])
    examples = [np.arange(a, b) for a, b in pairwise(starts)]
    _, owner = joint_order(examples)
    return [np.flatnonzero(owner == rank) for rank in range(len(lengths))]


# Data with indices


@dataclass(frozen=True)
class SharedExamples:
    """Map-style data of several processes: one data set, or a shard in each.

    Attributes
    ----------
    loader : DataLoader
        of this process
    collective : Collective
    start : int
        number of the first example of this process's data set among those of all data
        sets; 0 if all have the same
    order : np.ndarray
        numbers of the N examples in their common order
    owner : np.ndarray
        rank of the process that has each of them
    max_data : int, optional
        how many of them, in this order, a pass takes
    lent : sequence
        batches to look at where the process has none
    """

    loader: Any
    collective: Collective
    start: int
    order: np.ndarray
    owner: np.ndarray
    max_data: int | None = None
    lent: Sequence[Any] = ()

    @cached_property
    def _by_number(self) -> np.ndarray:
        """Places of positions 0 … N − 1, which go by number."""
        return np.argsort(self.order)

    @cached_property
    def _own_places(self) -> np.ndarray:
        return self.places(())[self.collective.rank]

    def _indices(self, places: np.ndarray) -> np.ndarray:
        """Indices of own examples in the own data set."""
        return self.order[places] - self.start

    @property
    def _own_positions(self) -> np.ndarray:
        return np.flatnonzero(self.owner[self._by_number] == self.collective.rank)

    @property
    def n_examples(self) -> int:
        return len(self.order)

    @property
    def n_pass(self) -> int:
        return min(self.n_examples, self.max_data or self.n_examples)

    def places(self, lengths: Sequence[int]) -> list[np.ndarray]:
        owner = self.owner[: self.n_pass]
        return [np.flatnonzero(owner == rank) for rank in range(self.collective.size)]

    def share(self, n: int) -> int:
        return int(np.searchsorted(self._own_places, n))

    def few(self, n: int, batch_size: int) -> Iterable[Any]:
        own = self._own_positions[:n]
        if not len(own):
            return self.lent
        return sampling.subset(
            self.loader, self._indices(self._by_number[own]), batch_size
        )

    def counted(
        self, n_outputs: int, n_pairs: int, rng: np.random.Generator
    ) -> SharedExamples:
        return self

    def draw(
        self,
        n_outputs: int,
        n_samples: int,
        rng: np.random.Generator,
        balanced_by: str | None = None,
    ) -> Pairs:
        labels = None if balanced_by is None else self._labels(balanced_by)
        return sampling.draw_pairs(self.n_examples, n_outputs, n_samples, rng, labels)

    def _labels(self, dict_key_y: str) -> np.ndarray:
        """Classes of all examples, each read by the process that has it."""
        own = self._own_positions
        indices = self._indices(self._by_number[own])
        labels = np.empty(0, dtype=np.int64)
        if len(own):
            labels = sampling.read_labels(self.loader.dataset, indices, dict_key_y)
        found = self.collective.meet("labels", (own, labels))
        positions, classes = (
            np.concatenate(parts) for parts in zip(*found, strict=True)
        )
        return classes[np.argsort(positions)]

    def draw_others(
        self, n_outputs: int, drawn: Pairs, n_samples: int, rng: np.random.Generator
    ) -> Pairs:
        n_pairs = self.n_examples * n_outputs
        return sampling.draw_others(n_outputs, n_pairs, *drawn, n_samples, rng)

    def own(self, pairs: Pairs) -> Pairs:
        examples, outputs = pairs
        mine = self.owner[self._by_number[examples]] == self.collective.rank
        return examples[mine], outputs[mine]

    def chosen(self, examples: np.ndarray) -> Iterable[Any]:
        return sampling.subset(self.loader, self._indices(self._by_number[examples]))

    def whole(self) -> Iterable[Any]:
        return sampling.subset(self.loader, self._indices(self._own_places))


def _shared_examples(
    loader: Any, collective: Collective, max_data: int | None
) -> SharedExamples:
    own, length = _loader_order(loader), len(loader.dataset)
    start = 0
    if not _same_data(loader, collective):
        lengths = collective.meet("lengths of data sets", length)
        start = sum(lengths[: collective.rank])
        logger.info("each process has data of its own, %s examples", lengths)
    order, owner = joint_order(collective.meet("examples", own + start))
    if not len(order):
        raise ValueError(
            "The loaders of all processes yield no example; ELLA needs at least one. "
            "Check the samplers and drop_last."
        )
    data = SharedExamples(loader, collective, start, order, owner, max_data)
    without = [rank for rank in range(collective.size) if rank not in owner]
    return replace(data, lent=_lent(data, collective, without)) if without else data


def _lent(
    data: SharedData, collective: Collective, without: Sequence[int]
) -> Sequence[Any]:
    """A few batches of the first process that has examples, for those without."""
    lender = next(r for r in range(collective.size) if r not in without)
    batches = list(data.few(LENT, LENT)) if collective.rank == lender else None
    return collective.meet("examples for those without", batches)[lender]


def _loader_order(loader: Any) -> np.ndarray:
    """Indices that one pass over a loader yields, in its order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None:
        return np.arange(len(loader.dataset))
    indices = [i for batch in batch_sampler for i in batch]
    return np.asarray(indices, dtype=np.int64)


def _same_data(loader: Any, collective: Collective) -> bool:
    """Whether indices mean the same in all processes, or each has data of its own."""
    splits = _splits(loader, collective.size)
    found = collective.meet("data sets", (len(loader.dataset), splits))
    lengths = [length for length, _ in found]
    equal = len(set(lengths)) == 1
    if all(split for _, split in found):
        if not equal:
            raise ValueError(
                "The sampler gives each process a part of one data set, but the data "
                f"sets have the lengths {lengths}. Pass the same data set in all "
                "processes, or shards of it without a distributed sampler."
            )
        return True
    if not equal or not lengths[0]:
        return False
    digests = collective.meet("first, middle and last examples", _some_examples(loader))
    return len(set(digests)) == 1


def _splits(loader: Any, size: int) -> bool:
    """Whether a sampler divides one data set among so many processes, by the attributes
    that PyTorch's (Lightning's) and Accelerate's samplers have."""
    samplers, found = [loader], []
    while samplers:
        sampler = samplers.pop()
        for name in ("sampler", "batch_sampler"):
            inner = getattr(sampler, name, None)
            if inner is not None and all(inner is not other for other in found):
                samplers.append(inner)
                found.append(inner)
    return any(
        getattr(sampler, name, None) == size
        for sampler in found
        for name in ("num_replicas", "num_processes")
    )


def _some_examples(loader: Any) -> str:
    """Digest of a few examples, with the same random numbers in all processes."""
    n = len(loader.dataset)
    with random_states(torch.device("cpu"), loader):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002, augmentations draw from it
        random.seed(0)
        batches = list(sampling.subset(loader, np.array([0, n // 2, n - 1]), 1))
    return digest([[t.cpu() for t in tensors_of(batch)] for batch in batches])


# Streams


@dataclass(frozen=True)
class SharedStream:
    """Streams of several processes, each of which has its own.

    Attributes
    ----------
    stream : Stream
        of this process
    collective : Collective
    lent : sequence
        batches to look at where the process has none
    start : int
        position of its first example, once the streams are counted
    pool : Reservoir, optional
        which pairs of all streams were kept, without their inputs
    """

    stream: Stream
    collective: Collective
    lent: Sequence[Any] = ()
    start: int = 0
    pool: Reservoir | None = None

    @property
    def _pool(self) -> Reservoir:
        if self.pool is None:
            raise ValueError("The streams were not counted yet.")
        return self.pool

    @property
    def n_examples(self) -> int | None:
        return None if self.pool is None else self.pool.n_examples

    @property
    def n_pass(self) -> None:
        return None

    def share(self, n: int) -> int:
        return _turns_of(self.collective, n)

    def places(self, lengths: Sequence[int]) -> list[np.ndarray]:
        return _turns(lengths)

    def few(self, n: int, batch_size: int) -> Iterable[Any]:
        return self.lent or self.stream.few(n, batch_size)

    def counted(
        self, n_outputs: int, n_pairs: int, rng: np.random.Generator
    ) -> SharedStream:
        """Read the streams once; the pairs with the smallest priorities of all stay."""
        collective = self.collective
        seed = [int(rng.integers(2**32)), collective.rank]
        own = self.stream.read(n_outputs, n_pairs, np.random.default_rng(seed))
        found = collective.meet(
            "pairs of the streams", (own.n_examples, own.priorities, own.pairs)
        )
        lengths, priorities, pairs = zip(*found, strict=True)
        starts = np.cumsum([0, *lengths])
        if not starts[-1]:
            raise ValueError(READ_ONCE)
        pool = Reservoir(n_outputs, n_pairs, rng)
        pool.n_examples = int(starts[-1])
        pool.priorities = np.concatenate(priorities)
        pool.pairs = np.concatenate(
            [p + start * n_outputs for p, start in zip(pairs, starts[:-1], strict=True)]
        )
        pool.prune()
        counted = replace(
            self,
            stream=replace(self.stream, reservoir=own),
            start=int(starts[collective.rank]),
            pool=pool,
        )
        examples, outputs = counted.own(np.divmod(pool.pairs, n_outputs))
        own.priorities = own.priorities[:0]  # the pool has them
        own.pairs = (examples - counted.start) * n_outputs + outputs
        own.prune()
        return counted

    def draw(
        self,
        n_outputs: int,
        n_samples: int,
        rng: np.random.Generator,
        balanced_by: str | None = None,
    ) -> Pairs:
        return self._pool.sample(0, n_samples)

    def draw_others(
        self, n_outputs: int, drawn: Pairs, n_samples: int, rng: np.random.Generator
    ) -> Pairs:
        return self._pool.sample(len(drawn[0]), len(drawn[0]) + n_samples)

    def own(self, pairs: Pairs) -> Pairs:
        examples, outputs = pairs
        stop = self.start + (self.stream.n_examples or 0)
        mine = (examples >= self.start) & (examples < stop)
        return examples[mine], outputs[mine]

    def chosen(self, examples: np.ndarray) -> Iterable[Any]:
        return self.stream.chosen(examples - self.start)

    def whole(self) -> Iterable[Any]:
        return self.stream.whole()


def _turns_of(collective: Collective, n: int) -> int:
    """How many of the first n examples are this process's if all take turns."""
    return max(0, -(-(n - collective.rank) // collective.size))


def _shared_stream(
    loader: Any,
    collective: Collective,
    dict_key_x: str,
    max_data: int | None,
    progress_bar: bool,
) -> SharedStream:
    if max_data is not None:
        own = _turns_of(collective, max_data)
        loader = FirstExamples(loader, own, dict_key_x) if own else []
    shown = progress_bar and collective.rank == 0
    data = SharedStream(Stream(loader, dict_key_x, shown), collective)
    empty = next(iter(data.few(1, 1)), None) is None
    found = collective.meet("streams", empty)
    without = [rank for rank, nothing in enumerate(found) if nothing]
    if len(without) == collective.size:
        raise ValueError(
            "The loaders of all processes yielded no batch; ELLA needs at least one "
            "example."
        )
    if not without:
        return data
    lent = _lent(data, collective, without)
    return replace(data, lent=lent) if collective.rank in without else data


# What a pass found, brought together


def arranged(
    data: SharedData,
    collective: Collective,
    tensors: Mapping[str, torch.Tensor],
    counts: np.ndarray,
) -> dict[str, torch.Tensor]:
    """What all processes found in a pass, in the common order of the examples.

    Parameters
    ----------
    data : SharedData
        what the pass was over
    collective : Collective
    tensors : mapping of str to torch.Tensor
        `(R, ...)`, where the pass of this process had an example
    counts : np.ndarray
        how many of the R rows belong to each example of the pass

    Returns
    -------
    dict of str to torch.Tensor
        with the rows of all; empty if there was no example
    """
    found = collective.meet("rows of the examples", (sorted(tensors), counts))
    rows = [count for _, count in found]
    names = next((names for names, count in found if len(count)), [])
    places = data.places([len(count) for count in rows])
    n_rows = np.zeros(sum(len(count) for count in rows), dtype=np.int64)
    for place, count in zip(places, rows, strict=True):
        n_rows[place] = count
    first = np.cumsum(n_rows) - n_rows  # row of the first of each example
    targets = [
        np.repeat(first[place], count) + _within(count)
        for place, count in zip(places, rows, strict=True)
    ]
    result: dict[str, torch.Tensor] = {}
    for name in names:
        parts = collective.everyones(name, tensors.get(name))
        for target, part in zip(targets, parts, strict=True):
            if part is None:
                continue
            if name not in result:
                result[name] = part.new_empty(int(n_rows.sum()), *part.shape[1:])
            result[name][torch.as_tensor(target, device=part.device)] = part
    return result


def _within(counts: np.ndarray) -> np.ndarray:
    """0 … n − 1 for every count n, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
