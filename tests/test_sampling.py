"""Which pairs (x, i) enter the basis, seen through the public `la.basis`.

The model is linear without bias and the inputs are unit vectors, so that the gradient
of output i at x_n is the unit vector of the weight (i, n): J̃ᵀJ̃ = V diag(λ) Vᵀ is
diagonal, and its entries say how often each pair was drawn.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from laplace_ella import ELLALaplace, RankWarning
from tests import dense
from tests.cases import make, mapping_loader
from tests.fitting import assert_close, fit

N, C = 12, 3


class Recorded(Dataset):
    """Unit vectors with labels; counts how often each input is loaded."""

    def __init__(self, n=N, n_classes=C, labels=None):
        self.x = torch.eye(n, dtype=torch.float64)
        self._y = torch.arange(n) % n_classes if labels is None else labels
        self.loads = torch.zeros(n, dtype=torch.long)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.loads[index] += 1
        return self.x[index], self._y[index]


class WithTargets(Recorded):
    """The same with a `targets` attribute, as torchvision's data sets have."""

    @property
    def targets(self):
        return self._y.tolist()


def counts(loader, m, n=N, likelihood="classification", fit_kwargs=None, **kwargs):
    """How often each pair was drawn, (N, C)."""
    model = nn.Linear(n, C, bias=False, dtype=torch.float64)
    la = ELLALaplace(model, likelihood, subsample_size=m, n_eigenvalues=n * C, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        la.fit(loader, **(fit_kwargs or {}))
    V, eigenvalues = la.basis.vectors, la.basis.eigenvalues
    drawn = (V.square() * eigenvalues).sum(1).reshape(C, n).T
    assert_close(drawn, drawn.round())
    return drawn.round().long()


def loader(dataset=None, batch_size=5, **kwargs):
    return DataLoader(dataset or Recorded(), batch_size, **kwargs)


# --- how many, and of what ---------------------------------------------------------


@pytest.mark.parametrize("m", [1, 5, N])
def test_without_replacement(m):
    """While M ≤ N, M different examples enter, one output each."""
    drawn = counts(loader(), m)
    assert drawn.sum() == m
    assert drawn.sum(1).max() == 1


@pytest.mark.parametrize("m", [N * C, N * C + 1, 10**6])
def test_every_pair_once(m):
    """When M ≥ N·C, every pair enters exactly once."""
    assert (counts(loader(), m) == 1).all()


@pytest.mark.parametrize("m", [N + 1, 2 * N, N * C - 1])
def test_in_between(m):
    """Between N and N·C, M pairs enter and every example is used."""
    drawn = counts(loader(), m)
    assert drawn.sum() == m
    assert drawn.sum(1).min() >= 1


def test_examples_and_outputs_are_uniform():
    """Over many seeds every example and every output is drawn equally often."""
    drawn = sum(counts(loader(), 6, seed=seed) for seed in range(60))  # 360 draws
    per_example, per_output = drawn.sum(1).double(), drawn.sum(0).double()
    assert ((per_example - 30).abs() < 5 * 30**0.5).all()
    assert ((per_output - 120).abs() < 5 * 80**0.5).all()


def test_n_samples_is_what_was_used():
    """`basis.n_samples` is min(M, N·C)."""
    case = make("regression_3")
    assert fit(case, subsample_size=7).basis.n_samples == 7
    assert fit(case, subsample_size=2000).basis.n_samples == 30


@pytest.mark.parametrize("n", [1, 2])
def test_tiny_data(n):
    """The defaults work from one example up, and truncate with a warning."""
    data = Recorded(n=n)
    la = ELLALaplace(nn.Linear(n, C, bias=False, dtype=torch.float64), "classification")
    with pytest.warns(RankWarning, match=rf"20.*\b{n * C}\b"):
        la.fit(loader(data))
    assert la.rank == n * C
    assert la(data.x).shape == (n, C)


# --- reproducibility ---------------------------------------------------------------


def test_seed_reproduces():
    """One seed, one basis, whatever the global random state; another seed, another."""
    first = counts(loader(), 5, seed=3)
    torch.manual_seed(99)
    assert (counts(loader(), 5, seed=3) == first).all()
    others = [counts(loader(), 5, seed=s) for s in (4, 5, 6)]
    assert any((other != first).any() for other in others)


def test_shuffling_does_not_change_the_basis():
    """Shuffling and batch size of the loader do not change which pairs are drawn."""
    first = counts(loader(), 5)
    assert (counts(loader(shuffle=True), 5) == first).all()
    assert (counts(loader(batch_size=2), 5) == first).all()


def test_refit_is_the_same():
    """Fitting twice gives the same posterior, also from a shuffled loader."""
    case = make("classification_mlp")
    la = fit(case, loader=case.loader(shuffle=True), subsample_size=8)
    H, vectors = la.H.clone(), la.basis.vectors.clone()
    la.fit(case.loader(shuffle=True))
    assert_close(la.basis.vectors, vectors)
    assert_close(la.H, H)


# --- balance -----------------------------------------------------------------------

SKEWED = torch.tensor([0] * 8 + [1, 1, 2, 2])


@pytest.mark.parametrize("m", [3, 6])
@pytest.mark.parametrize("where", ["constructor", "fit"])
def test_balanced(m, where):
    """`balanced=True` draws the classes evenly."""
    option = {"balanced": True}
    drawn = counts(
        loader(Recorded(labels=SKEWED)),
        m,
        **(option if where == "constructor" else {"fit_kwargs": option}),
    )
    per_class = [int(drawn[c == SKEWED].sum()) for c in range(C)]
    assert per_class == [m // 3] * 3
    assert drawn.sum(1).max() == 1


def test_balanced_with_exhausted_classes():
    """A class with too few examples gives what it has, without repetition."""
    labels = torch.tensor([0] * 10 + [1, 2])
    drawn = counts(loader(Recorded(labels=labels)), 8, balanced=True)
    assert drawn.sum() == 8
    assert drawn.sum(1).max() == 1
    assert drawn[10:].sum() == 2


DATASETS = {
    "targets": lambda data: data,
    "subset": lambda data: Subset(data, list(range(N))),
    "concat": lambda data: ConcatDataset(
        [Subset(data, list(range(6))), Subset(data, list(range(6, N)))]
    ),
}


@pytest.mark.parametrize("wrap", DATASETS)
def test_balanced_reads_labels_without_inputs(wrap):
    """Where the data set holds its labels, balancing loads no input for them."""
    loads = []
    for balanced in (False, True):
        data = WithTargets(labels=SKEWED)
        drawn = counts(loader(DATASETS[wrap](data)), 6, balanced=balanced)
        loads.append(int(data.loads.sum()))
    assert [int(drawn[c == SKEWED].sum()) for c in range(C)] == [2, 2, 2]
    assert loads[1] <= loads[0] + 1


def test_balanced_tensor_dataset():
    """A TensorDataset is balanced by its second tensor."""
    data = TensorDataset(torch.eye(N, dtype=torch.float64), SKEWED)
    drawn = counts(loader(data), 6, balanced=True)
    assert [int(drawn[c == SKEWED].sum()) for c in range(C)] == [2, 2, 2]


# --- loaders -----------------------------------------------------------------------


def test_loads_only_what_it_needs():
    """The basis loads the M examples that it draws, not the whole data set."""
    data = Recorded()
    counts(loader(data), 3)
    extra = int(data.loads.sum()) - N  # beyond the one pass for the curvature
    assert extra <= 3 + 8  # the samples, and a few to see the outputs


@pytest.mark.parametrize("m", [3, 10**6])
@pytest.mark.parametrize(
    "make_loader",
    [
        lambda idx: loader(sampler=SubsetRandomSampler(idx)),
        lambda idx: loader(Subset(Recorded(), idx)),
        lambda idx: loader(
            batch_size=1, batch_sampler=BatchSampler(SubsetRandomSampler(idx), 2, False)
        ),
        lambda idx: loader(batch_size=1, batch_sampler=[idx[:2], idx[2:]]),
    ],
    ids=["sampler", "subset", "batch_sampler", "list_of_batches"],
)
def test_subset_samplers(make_loader, m):
    """Only the examples that the loader gives are drawn."""
    chosen = [1, 4, 5, 9, 11]
    drawn = counts(make_loader(chosen), m)
    assert drawn.sum() == min(m, len(chosen) * C)
    assert drawn.sum() == drawn[chosen].sum()


@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last(shuffle):
    """With `drop_last` the posterior is that of the batches that come."""
    case = make("regression_1")  # 12 examples: one of them is dropped
    seen = []

    def collate(batch):
        x, y = torch.utils.data.default_collate(batch)
        seen.append(x)
        return x, y

    data = case.loader(drop_last=True, shuffle=shuffle, collate_fn=collate)
    assert len(case.x) % 5
    la = fit(case, loader=data)
    if not shuffle:
        case.x, case.y = case.x[:10], case.y[:10]
        assert_close(la.H, dense.Reference(case, la.basis.vectors).H)
    assert la.H.shape == (la.rank, la.rank)
    assert la.n_data in (10, 12)


def test_drop_last_keeps_the_log_likelihood_right():
    """The log-likelihood counts the examples that were seen, no others."""
    case = make("regression_1")
    la = fit(case, loader=case.loader(drop_last=True), sigma_noise=0.5)
    case.x, case.y = case.x[:10], case.y[:10]
    expected = dense.Reference(case, la.basis.vectors, sigma=0.5)
    assert_close(la.log_likelihood, expected.log_likelihood)


def test_custom_collate():
    """Examples of the basis pass through the collate function of the loader."""

    def twice(batch):
        x, y = torch.utils.data.default_collate(batch)
        return 2 * x, y

    drawn = counts(loader(collate_fn=twice), 10**6)
    assert (drawn == 4).all()  # squared norms of the gradients


def test_workers():
    """Several worker processes give the same posterior."""
    case = make("classification_mlp")
    alone = fit(case, subsample_size=8)
    workers = fit(case, subsample_size=8, loader=case.loader(num_workers=2))
    assert_close(workers.basis.vectors, alone.basis.vectors)
    assert_close(workers.H, alone.H)


@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_batch_size_does_not_matter(batch_size):
    """The posterior does not depend on how the data is batched."""
    case = make("classification_cnn")
    a, b = fit(case), fit(case, loader=case.loader(batch_size))
    assert_close(b.H.diagonal(), a.H.diagonal())
    assert_close(b(case.x_test), a(case.x_test))


def test_sampler_with_replacement():
    """A sampler that repeats examples works; a pair still enters at most once."""
    data = Recorded()
    sampler = RandomSampler(data, replacement=True, num_samples=20)
    drawn = counts(loader(data, sampler=sampler), 10**6)
    assert drawn.max() == 1


def test_mapping_batches():
    """Mapping examples are drawn as tuples are."""
    case = make("regression_1")

    class Model(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, batch):
            return self.net(batch["x"])

    plain = fit(case, subsample_size=6)
    case.model = Model(case.model)
    keys = {"dict_key_x": "x", "dict_key_y": "y"}
    data = mapping_loader(case.x, case.y, "x", "y", batch_size=5)
    mapped = fit(case, subsample_size=6, loader=data, **keys)
    assert_close(mapped.basis.vectors, plain.basis.vectors)
    assert_close(mapped.H, plain.H)


def test_sequential_sampler_in_a_batch_sampler():
    """A batch sampler that covers everything is as good as none."""
    batches = BatchSampler(SequentialSampler(range(N)), 7, False)
    drawn = counts(DataLoader(Recorded(), batch_sampler=batches), 10**6)
    assert (drawn == 1).all()
