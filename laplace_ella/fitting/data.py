"""Training data as a fit sees them: a few to look at, pairs to sample, one pass.

A data set with indices is sampled by index. A stream is read once, for its length and
a reservoir of pairs, see `streams`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from laplace_ella.fitting import sampling
from laplace_ella.fitting.sampling import Pairs
from laplace_ella.fitting.streams import Stream
from laplace_ella.support.batches import Batch, with_tensor_targets
from laplace_ella.support.checks import positive_int

__all__ = [
    "FirstExamples",
    "IndexedData",
    "TrainingData",
    "check_data",
    "training_data",
]


class TrainingData(Protocol):
    """N examples, which are known by their positions 0 … N − 1.

    Loaders that it returns yield batches as the user's loader does.
    """

    @property
    def n_examples(self) -> int | None:
        """N; None of a stream until it is counted."""
        ...

    def few(self, n: int, batch_size: int) -> Iterable[Any]:
        """A loader over at least `n` examples, if there are as many."""
        ...

    def counted(
        self, n_outputs: int, n_pairs: int, rng: np.random.Generator
    ) -> TrainingData:
        """The same with N known, and ready to draw up to `n_pairs` pairs."""
        ...

    def draw(
        self,
        n_outputs: int,
        n_samples: int,
        rng: np.random.Generator,
        balanced_by: str | None = None,
    ) -> Pairs:
        """M pairs, or all; the classes take turns if labels are named."""
        ...

    def draw_others(
        self, n_outputs: int, drawn: Pairs, n_samples: int, rng: np.random.Generator
    ) -> Pairs:
        """At most so many pairs that were not drawn."""
        ...

    def own(self, pairs: Pairs) -> Pairs:
        """Those pairs whose examples this process has."""
        ...

    def chosen(self, examples: np.ndarray) -> Iterable[Any]:
        """A loader over the examples at these positions, in this order."""
        ...

    def whole(self) -> Iterable[Any]:
        """A loader over all examples, in the order of the user's; over those of this
        process, if several have them."""
        ...


def training_data(
    loader: Any,
    dict_key_x: str,
    max_data: int | None = None,
    progress_bar: bool = False,
) -> TrainingData:
    """The data of a loader, up to so many examples; of data with indices the basis is
    drawn from all."""
    first = loader if max_data is None else FirstExamples(loader, max_data, dict_key_x)
    if is_stream(loader):
        return Stream(first, dict_key_x, progress_bar)
    return IndexedData(loader, sampling.eligible_indices(loader), first)


def check_data(loader: Any, balanced: bool = False) -> None:
    """Refuse, before any work, what a fit cannot read."""
    if not is_stream(loader):
        sampling.check_loader(loader)
    elif balanced:
        raise ValueError(
            "balanced=True draws the classes evenly by index, and train_loader is a "
            f"stream ({type(getattr(loader, 'dataset', loader)).__name__}). Use "
            "balanced=False, or a data set with __getitem__ and __len__."
        )


def is_stream(loader: Any) -> bool:
    """Whether examples come in an order of their own and cannot be had by index;
    refuses what can be read only once."""
    dataset = getattr(loader, "dataset", None)
    if dataset is not None and hasattr(dataset, "__getitem__"):
        return isinstance(dataset, IterableDataset)
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
    return True


@dataclass(frozen=True)
class FirstExamples:
    """Batches of a loader up to so many examples; the last one may be a part.

    Attributes
    ----------
    loader : iterable
    max_data : int
    dict_key_x : str
        which entry of a mapping tells how many examples there are
    """

    loader: Any
    max_data: int
    dict_key_x: str

    def __post_init__(self) -> None:
        positive_int("max_data", self.max_data)

    def __iter__(self) -> Iterator[Any]:
        left = self.max_data
        for raw in self.loader:
            raw = with_tensor_targets(raw)
            batch = Batch.of(raw, self.dict_key_x)
            yield raw if batch.size <= left else batch.take(slice(0, left)).inputs
            left -= batch.size
            if left <= 0:
                return

    def __len__(self) -> int:
        size = getattr(self.loader, "batch_size", None)
        if size is None:
            return len(self.loader)  # may be too many, or say that it is not known
        needed = math.ceil(self.max_data / size)
        try:
            return min(needed, len(self.loader))
        except TypeError:
            return needed


@dataclass(frozen=True)
class IndexedData:
    """The examples of a map-style data set that one pass over a loader can yield.

    Attributes
    ----------
    loader : DataLoader
    indices : np.ndarray
        of the examples in the data set, `(N,)`, sorted
    pass_ : iterable
        the loader, or a part of it, in the order in which curvature is added up
    """

    loader: Any
    indices: np.ndarray
    pass_: Any

    @property
    def n_examples(self) -> int:
        return len(self.indices)

    def few(self, n: int, batch_size: int) -> DataLoader:
        return sampling.subset(self.loader, self.indices[:n], batch_size)

    def counted(
        self, n_outputs: int, n_pairs: int, rng: np.random.Generator
    ) -> IndexedData:
        return self

    def draw(
        self,
        n_outputs: int,
        n_samples: int,
        rng: np.random.Generator,
        balanced_by: str | None = None,
    ) -> Pairs:
        labels = None
        if balanced_by is not None:
            labels = sampling.read_labels(
                self.loader.dataset, self.indices, balanced_by
            )
        return sampling.draw_pairs(self.n_examples, n_outputs, n_samples, rng, labels)

    def draw_others(
        self, n_outputs: int, drawn: Pairs, n_samples: int, rng: np.random.Generator
    ) -> Pairs:
        n_pairs = self.n_examples * n_outputs
        return sampling.draw_others(n_outputs, n_pairs, *drawn, n_samples, rng)

    def own(self, pairs: Pairs) -> Pairs:
        return pairs

    def chosen(self, examples: np.ndarray) -> DataLoader:
        return sampling.subset(self.loader, self.indices[examples])

    def whole(self) -> Any:
        return self.pass_
