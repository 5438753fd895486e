"""Data without indices: a reservoir for the basis, one pass for the curvature."""

from itertools import count

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_ella import EarlyStopping, ELLALaplace, ELLALLLaplace
from laplace_ella.fitting.streams import Reservoir
from laplace_ella.support.batches import Batch
from tests.cases import mlp
from tests.fitting import assert_close

N, D, C = 40, 3, 2


class Shards(IterableDataset):
    """Examples one after the other, without a length."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __iter__(self):
        return zip(*self.tensors, strict=True)


def regression(n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g, dtype=torch.float64)
    return x, torch.randn(n, C, generator=g, dtype=torch.float64)


def classification(n=N):
    x, _ = regression(n)
    return x, torch.arange(n) % C


DATA = {"regression": regression, "classification": classification}


def fitted(loader, likelihood="regression", cls=ELLALaplace, fit=None, **settings):
    torch.manual_seed(0)
    la = cls(mlp(D, 5, C).double(), likelihood, **settings)
    la.fit(loader, **(fit or {}))
    return la


@pytest.mark.parametrize("likelihood", DATA)
@pytest.mark.parametrize("settings", [{"n_eigenvalues": "exact"}, {"n_eigenvalues": 6}])
@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_same_as_indices_when_all_is_kept(likelihood, settings, cls):
    """With room for every pair a stream has the posterior of a map-style data set."""
    tensors = DATA[likelihood]()
    indexed = fitted(
        DataLoader(TensorDataset(*tensors), 7), likelihood, cls, **settings
    )
    stream = fitted(DataLoader(Shards(*tensors), 7), likelihood, cls, **settings)
    assert stream.n_data == N
    assert_close(stream.basis.eigenvalues, indexed.basis.eigenvalues)
    assert_close(stream.log_marginal_likelihood(), indexed.log_marginal_likelihood())
    x = torch.randn(4, D, dtype=torch.float64)
    if likelihood == "regression":  # directions are known up to their signs
        assert_close(stream(x, joint=True), indexed(x, joint=True))
    else:
        assert_close(stream(x), indexed(x))


def test_every_kind_of_stream():
    """Prebatched data sets, mappings and plain lists of batches."""
    x, y = regression()
    expected = fitted(DataLoader(TensorDataset(x, y), 7))
    prebatched = DataLoader(Shards(x.split(9), y.split(9)), batch_size=None)
    batches = list(zip(x.split(9), y.split(9), strict=True))
    arrays = [(a, b.numpy()) for a, b in batches]
    for loader in (prebatched, batches, arrays):
        assert_close(fitted(loader).H, expected.H)

    class OfMapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(D, 5, C).double()

        def forward(self, batch):
            return self.net(batch["input_ids"])

    torch.manual_seed(0)
    la = ELLALaplace(OfMapping(), "regression")
    la.fit([{"input_ids": a, "labels": b, "words": ["x"] * len(a)} for a, b in batches])
    assert_close(la.H, expected.H)


def test_sampled_basis_depends_on_the_seed_alone():
    """Not on how the stream is cut into batches; other seeds draw other pairs."""
    tensors = regression(200)
    settings = {"n_eigenvalues": 4, "subsample_size": 20}
    few, many = (
        fitted(DataLoader(Shards(*tensors), size), **settings) for size in (7, 64)
    )
    other = fitted(DataLoader(Shards(*tensors), 7), seed=1, **settings)
    assert few.basis.n_samples == 20
    assert_close(few.basis.eigenvalues, many.basis.eigenvalues)
    assert_close(few(tensors[0])[1], many(tensors[0])[1])
    assert not torch.allclose(few.basis.eigenvalues, other.basis.eigenvalues)


def test_reservoir_is_uniform():
    """Every pair is equally likely, also within the first m of a larger reservoir."""
    n, capacity, m, draws = 12, 9, 4, 3000
    counts = np.zeros((2, n * C))
    batches = [Batch.of(t, "x") for t in torch.arange(n).split(5)]
    for seed in range(draws):
        reservoir = Reservoir(C, capacity, np.random.default_rng(seed))
        for batch in batches:
            reservoir.add(batch)
        reservoir.prune()
        for row, size in zip(counts, (capacity, m), strict=True):
            examples, outputs = reservoir.sample(0, size)
            assert len(examples) == size
            assert np.all(np.diff(examples * C + outputs) > 0)
            row[examples * C + outputs] += 1
        for example, kept in reservoir.kept.items():
            assert kept.inputs.tolist() == [example]
    for row, size in zip(counts, (capacity, m), strict=True):
        share = size / (n * C)
        deviation = (draws * share * (1 - share)) ** 0.5
        assert np.all(abs(row - draws * share) < 4.5 * deviation)


def test_memory_is_that_of_the_reservoir():
    """A long stream leaves behind no more than the pairs that are kept."""
    reservoir = Reservoir(1, 10, np.random.default_rng(0))
    for start in range(0, 5000, 50):
        reservoir.add(Batch.of(torch.arange(start, start + 50), "x"))
        assert len(reservoir.kept) <= 50 + 2 * 10
    for kept in reservoir.kept.values():
        assert all(leaf.untyped_storage().nbytes() == 8 for leaf in kept.leaves)


def test_max_data_ends_an_endless_stream():
    """The first so many examples, whatever the batches; also of data with indices."""
    x, y = regression()

    class Endless(IterableDataset):
        def __iter__(self):
            return ((x[i % N], y[i % N]) for i in count())

    for size in (7, 23):
        la = fitted(DataLoader(Endless(), size), fit={"max_data": 23})
        expected = fitted(DataLoader(TensorDataset(x[:23], y[:23]), 7))
        assert la.n_data == 23
        assert_close(la.H, expected.H)
    la = fitted(
        DataLoader(TensorDataset(x, y), 7), fit={"max_data": 23}, n_eigenvalues="exact"
    )
    assert la.n_data == 23
    assert_close(la.loss, expected.loss)
    with pytest.raises(ValueError, match="max_data"):
        la.fit(DataLoader(TensorDataset(x, y), 7), max_data=0)


def test_tuning_and_stopping_with_streams():
    """Validation data may be streams as well."""
    tensors = classification(80)
    train, val = (DataLoader(Shards(*tensors), size) for size in (8, 16))
    la = fitted(
        train,
        "classification",
        fit={"val_loader": val, "early_stopping": EarlyStopping(every=16)},
    )
    assert la.history[0]["n_data"] == 16
    la.fit(train)
    la.optimize_calibration(val)
    assert la(tensors[0]).shape == (80, C)


def test_streams_that_cannot_be_read():
    """What is read only once, empty, too large or to be balanced is told so."""
    x, y = regression()
    la = ELLALaplace(mlp(D, 5, C).double(), "regression")
    with pytest.raises(TypeError, match=r"(?s)generator.*only once.*__iter__"):
        la.fit((x, y) for _ in range(3))
    last = ELLALLLaplace(mlp(D, 5, C).double(), "regression")
    for empty in (la, last):
        with pytest.raises(ValueError, match="no batch"):
            empty.fit(DataLoader(Shards(x[:0], y[:0]), 7))
    exact = ELLALaplace(
        mlp(D, 5, C).double(),
        "regression",
        n_eigenvalues="exact",
        memory_budget="40 kB",
    )
    with pytest.raises(MemoryError, match=f"all {N * C} gradients"):
        exact.fit(DataLoader(Shards(x, y), 7))
    assert exact.estimate_memory(DataLoader(Shards(x, y), 7)).n_samples == N * C
    x, y = classification()
    la = ELLALaplace(mlp(D, 5, C).double(), "classification")
    with pytest.raises(ValueError, match=r"(?s)balanced.*stream \(Shards\)"):
        la.fit(DataLoader(Shards(x, y), 7), balanced=True)
    assert la.estimate_memory(DataLoader(Shards(x, y), 7)).fits
