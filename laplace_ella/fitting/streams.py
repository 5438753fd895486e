"""Training data without indices: read once, for their number and a sample of pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from laplace_ella.fitting.sampling import Pairs
from laplace_ella.support.batches import Batch, map_tensors, with_tensor_targets
from laplace_ella.support.loaders import with_bar

__all__ = ["READ_ONCE", "Reservoir", "Stream"]

READ_ONCE = (
    "The stream yields no example when it is read again. Pass a loader whose every "
    "pass starts anew."
)

#: Examples of a reservoir that make one batch.
TOGETHER = 32


class Reservoir:
    """A uniform sample of the pairs (x, i) of a stream, with the inputs themselves.

    Every pair of an example and an output has a random priority, and those with the
    smallest stay: a sample without replacement whatever the length of the stream, of
    which the first m are a sample again. While everything has room, all is kept.

    Parameters
    ----------
    n_outputs : int
        C
    capacity : int
        pairs that are kept
    rng : np.random.Generator
        draws the same priorities for a stream however it is cut into batches
    """

    def __init__(self, n_outputs: int, capacity: int, rng: np.random.Generator) -> None:
        self.n_outputs, self.capacity, self.rng = n_outputs, capacity, rng
        self.n_examples = 0
        self.kept: dict[int, Batch] = {}
        self.priorities = np.empty(0)
        self.pairs = np.empty(0, dtype=np.int64)  # example · C + output

    def add(self, batch: Batch) -> None:
        """Take in the examples of a batch."""
        priorities = self.rng.random(batch.size * self.n_outputs)
        pairs = np.arange(len(priorities)) + self.n_examples * self.n_outputs
        below = priorities <= self._bound
        self.priorities = np.concatenate([self.priorities, priorities[below]])
        self.pairs = np.concatenate([self.pairs, pairs[below]])
        # The batch as a whole should not stay in memory for one example of it.
        template = map_tensors(lambda t: t.new_empty(0), batch.template)
        bare = replace(batch, template=template)
        for example in np.unique(pairs[below] // self.n_outputs).tolist():
            position = torch.tensor([example - self.n_examples])
            self.kept[example] = bare.take(position)
        self.n_examples += batch.size
        if len(self.pairs) > 2 * self.capacity:
            self.prune()

    @property
    def _bound(self) -> float:
        """No pair with a larger priority can stay."""
        if len(self.priorities) < self.capacity:
            return 1.0
        rank = self.capacity - 1
        return float(np.partition(self.priorities, rank)[rank])

    def prune(self) -> None:
        """Forget what did not stay, pairs and examples."""
        if len(self.pairs) > self.capacity:
            order = np.argpartition(self.priorities, self.capacity - 1)
            stays = np.sort(order[: self.capacity])
            self.priorities, self.pairs = self.priorities[stays], self.pairs[stays]
        needed = set((self.pairs // self.n_outputs).tolist())
        self.kept = {i: batch for i, batch in self.kept.items() if i in needed}

    def sample(self, start: int, stop: int) -> Pairs:
        """The pairs whose priorities have ranks from `start` to `stop`."""
        order = np.argsort(self.priorities, kind="stable")[start:stop]
        return np.divmod(np.sort(self.pairs[order]), self.n_outputs)


@dataclass(frozen=True)
class Stream:
    """The examples that a pass over a loader yields, in whatever order.

    Attributes
    ----------
    loader : iterable
        yields batches; starts anew whenever it is iterated over
    dict_key_x : str
        which entry of a mapping tells how many examples there are
    progress_bar : bool
    reservoir : Reservoir, optional
        what a first pass kept, once the stream is counted
    """

    loader: Any
    dict_key_x: str
    progress_bar: bool = False
    reservoir: Reservoir | None = None

    @property
    def _reservoir(self) -> Reservoir:
        if self.reservoir is None:
            raise ValueError("The stream was not counted yet.")
        return self.reservoir

    @property
    def n_examples(self) -> int | None:
        return None if self.reservoir is None else self.reservoir.n_examples

    def few(self, n: int, batch_size: int) -> Iterator[Any]:
        seen = 0
        for raw in self.loader:
            batch = Batch.of(with_tensor_targets(raw), self.dict_key_x)
            yield batch.take(slice(0, n - seen)).inputs
            seen += batch.size
            if seen >= n:
                return

    def read(self, n_outputs: int, n_pairs: int, rng: np.random.Generator) -> Reservoir:
        """Read the stream once."""
        reservoir = Reservoir(n_outputs, n_pairs, rng)
        for raw in with_bar(self.loader, "[Reading the stream]", self.progress_bar):
            reservoir.add(Batch.of(with_tensor_targets(raw), self.dict_key_x))
        reservoir.prune()
        return reservoir

    def counted(self, n_outputs: int, n_pairs: int, rng: np.random.Generator) -> Stream:
        reservoir = self.read(n_outputs, n_pairs, rng)
        if reservoir.n_examples == 0:
            raise ValueError(READ_ONCE)
        return replace(self, reservoir=reservoir)

    def draw(
        self,
        n_outputs: int,
        n_samples: int,
        rng: np.random.Generator,
        balanced_by: str | None = None,
    ) -> Pairs:
        return self._reservoir.sample(0, n_samples)

    def draw_others(
        self, n_outputs: int, drawn: Pairs, n_samples: int, rng: np.random.Generator
    ) -> Pairs:
        return self._reservoir.sample(len(drawn[0]), len(drawn[0]) + n_samples)

    def own(self, pairs: Pairs) -> Pairs:
        return pairs

    def chosen(self, examples: np.ndarray) -> Iterator[Any]:
        kept = [self._reservoir.kept[i] for i in examples.tolist()]
        # Batches that were padded each to its own length do not go together.
        for _, alike in groupby(kept, key=lambda batch: batch.signature):
            group = list(alike)
            for start in range(0, len(group), TOGETHER):
                some = group[start : start + TOGETHER]
                leaves = zip(*(batch.leaves for batch in some), strict=True)
                yield (
                    some[0]
                    .with_leaves([torch.cat(t) for t in leaves], len(some))
                    .inputs
                )

    def whole(self) -> Any:
        return self.loader
