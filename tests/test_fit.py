"""What the loader yields is what is fitted: data, draws, passes and early stopping."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from laplace_ella import EarlyStopping, ELLALaplace, augmented_validation
from laplace_ella.fitting.data import draw_pairs, known_length, pairs_within
from laplace_ella.support.preserve import seeded_iteration
from tests import dense
from tests.cases import make
from tests.fitting import assert_close, build, fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")

REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"
both = pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])
N = 12


def problem(name):
    """A case with twelve examples."""
    case = make(name)
    x = torch.randn(N - len(case.x), *case.x.shape[1:]).double()
    y = torch.randn(len(x), *case.y.shape[1:]).to(case.y.dtype)
    case.x, case.y = torch.cat([case.x, x]), torch.cat([case.y, y])
    return case


def part(case, index):
    """The case with some examples of its training data."""
    other = copy.copy(case)
    other.x, other.y = case.x[index], case.y[index]
    return other


def assert_exact(la, case, index):
    """Exact linearised Laplace of these examples, at new inputs and at theirs."""
    used = part(case, index)
    f, Js = dense.jacobians(case.model, used.x, case.params)
    delta = torch.cat([p.detach().flatten() for p in case.params])
    exact = dense.Exact(f, Js, used.y, case.likelihood, delta)
    D, sigma = torch.ones(case.n_params).double(), la.sigma_noise.double()
    assert la.n_data == len(used.x)
    for x in (case.x_test, used.x):
        J = dense.jacobians(case.model, x, case.params)[1].flatten(0, 1)
        covariance = la.joint_predictive(x[None])[1][0]
        assert_close(covariance, exact.covariance(J, D, sigma), rtol=1e-7, atol=1e-9)


class Wrapped:
    """A loader around a loader, which transforms what it yields."""

    def __init__(self, loader, order):
        self.loader, self.order = loader, order
        self.dataset, self.batch_size = loader.dataset, loader.batch_size

    def __iter__(self):
        x, y = (torch.cat(parts) for parts in zip(*self.loader, strict=True))
        x, y = x[self.order], y[self.order]
        return iter([(x[:5], y[:5]), (x[5:], y[5:])])


class Reversing(DataLoader):
    """Yields the examples of each batch in the opposite order, and the first twice."""

    def __iter__(self):
        for x, y in super().__iter__():
            order = [0, *reversed(range(len(x)))]
            yield x[order], y[order]


class OneByOne(IterableDataset):
    """Examples one after the other, without a length, or without an end."""

    def __init__(self, x, y, endless=False):
        self.x, self.y, self.endless = x, y, endless

    def __iter__(self):
        pairs = zip(self.x, self.y, strict=True)
        return itertools.cycle(pairs) if self.endless else pairs


class Reading(DataLoader):
    """Notes in every pass how many calls there were before each batch."""

    def __init__(self, *args, calls=()):
        super().__init__(*args)
        self.calls, self.passes = calls, []

    def __iter__(self):
        self.passes.append([])
        for batch in super().__iter__():
            self.passes[-1].append(len(self.calls))
            yield batch


class Drawn(Sampler):
    """Says that it has so many examples, and yields what the n-th pass draws."""

    def __init__(self, length, draw):
        self.length, self.draw, self.n_passes = length, draw, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        self.n_passes += 1
        return iter(self.draw(self.n_passes))


def anew(n):
    """Indices from a generator of their own, which nobody can put back."""
    return torch.randint(N, (8,), generator=torch.Generator().manual_seed(n)).tolist()


def drops(items):
    """A collate function that leaves out the first example of a batch."""
    return default_collate(items[1:])


def data(case):
    return TensorDataset(case.x, case.y)


WEIGHTED = WeightedRandomSampler(range(1, N + 1), 9)
LOADERS = {
    "plain": lambda case: DataLoader(data(case), 5),
    "shuffled": lambda case: DataLoader(data(case), 5, shuffle=True),
    "drop_last": lambda case: DataLoader(data(case), 5, drop_last=True),
    "wrapper": lambda case: Wrapped(DataLoader(data(case), 4), [3, 1, 1, 7, 0, 9, 9]),
    "subclass": lambda case: Reversing(data(case), 4),
    "list": lambda case: [(case.x[:7], case.y[:7]), (case.x[2:4], case.y[2:4])],
    "stream": lambda case: DataLoader(OneByOne(case.x, case.y), 5),
    "collate": lambda case: DataLoader(data(case), 5, collate_fn=drops),
    "batches": lambda case: DataLoader(data(case), batch_sampler=[[0, 3], [4], [3, 5]]),
    "weighted": lambda case: DataLoader(data(case), 5, sampler=WEIGHTED),
}


@both
@pytest.mark.parametrize("kind", LOADERS)
def test_what_the_loader_yields_is_what_is_fitted(kind, name):
    case = problem(name)
    loader = LOADERS[kind](case)
    x = torch.cat([x for x, _ in seeded_iteration(loader)])
    index = [int((case.x == row).flatten(1).all(1).nonzero()[0]) for row in x]
    for settings in (
        {"n_eigenvalues": "exact", "complement": "prior"},
        {"n_eigenvalues": 100, "subsample_size": 10**6, "complement": "prior"},
    ):
        la = build(case, **settings)
        la.fit(loader)
        assert_exact(la, case, index)


@both
def test_a_sampler_that_draws_anew(name):
    """An exact fit takes basis and curvature from one pass, and is exact for what that
    pass yielded; a sampled one does not take the sample of a pass for all data."""
    case = problem(name)
    sampler = Drawn(8, anew)
    la = build(case, n_eigenvalues="exact", complement="prior")
    la.fit(DataLoader(data(case), 3, sampler=sampler))
    assert sampler.n_passes == 1
    assert_exact(la, case, anew(1))
    sampled = build(case, complement="prior")
    sampled.fit(DataLoader(data(case), 3, sampler=sampler))
    assert sampler.n_passes == 3
    assert not sampled.fitted.complete


def test_whether_the_sample_is_all_data():
    """Told from the curvature that was added up, and not from the number of pairs."""
    case = problem(REGRESSION)
    loader = case.loader()
    la = fit(case, complement=None)
    assert la.fitted.complete
    la.fit(loader, max_data=7)
    assert (la.n_data, la.basis.n_samples, la.fitted.complete) == (7, 21, True)
    la.fit(loader, override=False)
    assert (la.n_data, la.fitted.complete) == (7 + len(case.x), False)
    stopping = EarlyStopping(every=3, patience=1, loss=scripted(range(9)))
    la.fit(loader, val_loader=loader, early_stopping=stopping)
    assert (la.n_data, la.fitted.complete) == (3, False)
    la.fit_basis(loader)
    assert not la.fitted.complete


@both
def test_more_data_for_an_exact_fit(name):
    """The basis is extended, also one without data."""
    case = problem(name)
    first, second = part(case, slice(0, 5)), part(case, slice(5, None))
    la = build(case, n_eigenvalues="exact", complement="prior")
    la.fit(first.loader())
    la.fit(second.loader(), override=False)
    assert_exact(la, case, slice(None))
    la.fit_basis(first.loader())
    la.fit(second.loader(), override=False)
    assert la.n_data == len(second.x)


@pytest.mark.parametrize("kind", ["sampler", "stream", "list"])
def test_max_data_ends_what_does_not_end(kind):
    """The first examples, in order, the last batch cut."""
    case = problem(CLASSIFICATION)
    endless = Drawn(None, lambda _: itertools.cycle(range(N)))
    loader = {
        "sampler": lambda: DataLoader(data(case), 5, sampler=endless),
        "stream": lambda: DataLoader(OneByOne(case.x, case.y, endless=True), 5),
        "list": lambda: [(case.x, case.y)] * 4,
    }[kind]()
    la = build(case, n_eigenvalues="exact", complement="prior")
    la.fit(loader, max_data=17)
    assert_exact(la, case, [i % N for i in range(17)])
    with pytest.raises(ValueError, match="max_data must be a positive integer"):
        la.fit(loader, max_data=0)


def test_workers():
    case = problem(CLASSIFICATION)
    la = build(case, n_eigenvalues=4)
    la.fit(DataLoader(data(case), 5, num_workers=1))
    assert_close(la.H, fit(case, n_eigenvalues=4).H)


def test_counted_without_the_network_and_read_to_the_last_pair():
    """A loader that does not tell its length is read once more, by itself; the pass of
    the basis ends at the last pair that was drawn."""
    case = problem(CLASSIFICATION)
    calls = []
    case.model.register_forward_hook(lambda *_: calls.append(1))
    la = build(case, n_eigenvalues=1, subsample_size=1, seed=1)
    loader = Reading(data(case), 1, calls=calls)
    la.fit(loader)
    counting, sampling, adding = loader.passes
    assert len(counting) == len(adding) == N
    assert counting[0] == counting[-1] == 0
    assert len(sampling) < N


def test_fewer_than_announced():
    case, short = problem(CLASSIFICATION), Drawn(N, lambda _: range(4))
    la = build(case)
    with pytest.raises(ValueError, match=r"yields 4 example.* at least 12"):
        la.fit(DataLoader(data(case), 5, sampler=short))
    assert la.fitted is None


def test_padding_of_torchs_sampler_alone_is_known():
    """Each of three processes reads its own examples of 13 and not the repeated ones;
    other samplers mean what they say."""
    case, Other = problem(CLASSIFICATION), type("Other", (DistributedSampler,), {})
    whole = TensorDataset(torch.cat([case.x, case.x[:1]]))
    for shuffle, drop_last in itertools.product((False, True), repeat=2):
        kw = {"shuffle": shuffle, "drop_last": drop_last}
        for cls, expected in ((DistributedSampler, [5, 4, 4]), (Other, [5] * 3)):
            samplers = [cls(whole, 3, rank, **kw) for rank in range(3)]
            lengths = [known_length(DataLoader(whole, 2, sampler=s)) for s in samplers]
            assert lengths == ([4] * 3 if drop_last else expected)


@pytest.mark.parametrize("m", [1, 5, 20, 21, 45, 59, 60, 10**6])
def test_pairs(m):
    """No pair twice, each example as often as the others, prefixes are draws too."""
    n, c = 20, 3
    pairs = draw_pairs(n, c, m, np.random.default_rng(0))
    M = min(m, n * c)
    assert len({*map(tuple, pairs)}) == len(pairs) == M
    for k in (M, M // 2):
        used = np.bincount(pairs[:k, 0], minlength=n)
        assert used.max() - used.min() <= 1
    ordered, found = pairs[pairs[:, 0].argsort(kind="stable")], []
    for where in (slice(0, 7), slice(7, 8), slice(8, 20)):
        found.append(np.add(pairs_within(ordered, where), [where.start, 0]))
        assert ((found[-1][:, 0] >= where.start) & (found[-1][:, 0] < where.stop)).all()
    assert np.array_equal(np.concatenate(found), ordered)


@pytest.mark.parametrize("m", [6, 9, 24])
def test_balanced(m):
    """Classes take turns while they last, for labels and one-hot rows."""
    labels = np.array([0] * 14 + [1] * 4 + [2] * 2)
    pairs = draw_pairs(20, 3, m, np.random.default_rng(0), labels)
    used = np.bincount(labels[pairs[:, 0]], minlength=3)
    assert used.tolist() == {6: [2, 2, 2], 9: [4, 3, 2], 24: [12, 8, 4]}[m]
    case = problem(CLASSIFICATION)
    case.y = torch.tensor([0] * 9 + [1, 1, 2])
    la = build(case, subsample_size=6, n_eigenvalues=6)
    la.fit(case.loader(), balanced=True)
    case.y = torch.eye(3).double()[case.y]
    other = build(case, subsample_size=6, n_eigenvalues=6)
    other.fit(case.loader(), balanced=True)
    assert_close(la.basis.eigenvalues, other.basis.eigenvalues)
    with pytest.raises(ValueError, match="balanced=True draws classes evenly"):
        build(problem(REGRESSION)).fit(case.loader(), balanced=True)


def scripted(values):
    """A loss that ignores the predictions and returns given values in turn."""
    values = iter(values)
    return lambda *args: float(next(values))


def validation(case):
    g = torch.Generator().manual_seed(8)
    x = 1.5 * torch.randn(24, *case.x.shape[1:], generator=g).double()
    f = case.model(x).detach()
    if case.likelihood == "regression":
        return DataLoader(TensorDataset(x, f + 0.6 * torch.randn_like(f)), 7)
    y = torch.multinomial((3 * f).softmax(-1), 1, generator=g).squeeze(1)
    return DataLoader(TensorDataset(x, y), 7)


@both
@pytest.mark.parametrize("settings", [{}, {"n_eigenvalues": "exact"}])
@pytest.mark.parametrize(("every", "batch_size"), [(5, 5), (2, 5), (1, 12)])
def test_restored_is_the_fit_of_the_best_prefix(name, settings, every, batch_size):
    """Also where it ends within a batch; the history is the loss of every prefix."""
    case, stopping = problem(name), EarlyStopping(every=every, patience=10**6)
    options = {"n_eigenvalues": 5, "complement": "prior", **settings}
    la, val = build(case, **options), validation(case)
    la.fit(case.loader(batch_size), val_loader=val, early_stopping=stopping)
    points = [point["n_data"] for point in la.history]
    assert points == [*range(every, N, every), N][: len(points)]
    assert points[-1] == N
    best = min(la.history, key=lambda point: point["loss"])
    assert la.n_data == best["n_data"]
    if settings:  # whose directions are those of all data
        assert_exact(la, case, slice(0, la.n_data))
        return
    prefix = dense.Reference(part(case, slice(0, la.n_data)), la.basis.vectors)
    assert_close(la.H, prefix.H)
    assert_close(la.loss, prefix.loss)
    again, last = build(case, **options), EarlyStopping(every=10**6)
    again.fit_basis(case.loader())
    kw = {"max_data": la.n_data, "val_loader": val, "early_stopping": last}
    again.fit(case.loader(), override=False, **kw)
    assert again.history[-1]["loss"] == pytest.approx(best["loss"], rel=1e-8)


@pytest.mark.parametrize(
    ("values", "patience", "maximize", "taken", "kept"),
    [
        ([3, 2, 1, 2, 2, 0], 2, False, 5, 3),
        ([1, 2, 3, 2, 2, 9], 2, True, 5, 3),
        ([1, 1, 1, 1], 3, False, 4, 1),
        ([5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6], 1, False, 12, 12),
        ([float("nan"), 2, float("inf"), 1, 3, 3], 2, False, 6, 4),
    ],
)
@pytest.mark.parametrize("n_eigenvalues", [3, "exact"])
def test_patience(values, patience, maximize, taken, kept, n_eigenvalues):
    case, plan = problem(REGRESSION), {"patience": patience, "maximize": maximize}
    stopping = EarlyStopping(every=1, loss=scripted(values), **plan)
    la = build(case, n_eigenvalues=n_eigenvalues, complement="prior")
    loader = Reading(data(case), 1)
    la.fit(loader, val_loader=case.loader(), early_stopping=stopping)
    assert (len(la.history), la.n_data) == (taken, kept)
    assert len(loader.passes[-1]) == (taken if n_eigenvalues == 3 else N)


def test_validation_alone_only_records():
    """Without a finite loss nothing can be stopped by."""
    case = problem(REGRESSION)
    la = build(case)
    la.fit(case.loader(), val_loader=validation(case))
    assert la.n_data == len(case.x)
    assert [point["n_data"] for point in la.history] == [len(case.x)]
    la.fit(case.loader())
    assert la.history == []
    before = la.fitted
    stopping = EarlyStopping(every=4, loss=lambda *_: float("nan"))
    with pytest.raises(ValueError, match="NaN or infinite at all"):
        la.fit(case.loader(), val_loader=case.loader(), early_stopping=stopping)
    assert la.fitted is before


def test_settings_of_early_stopping():
    for name, value in (
        *(("every", 0), ("patience", 0), ("growth", 1.0), ("growth", float("nan"))),
        *(("loss", 3), ("link_approx", "soft")),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            EarlyStopping(**{name: value})
    la, loader = build(problem(REGRESSION)), problem(REGRESSION).loader()
    with pytest.raises(ValueError, match="early_stopping needs val_loader="):
        la.fit(loader, early_stopping=True)
    with pytest.raises(TypeError, match="early_stopping must be True"):
        la.fit(loader, val_loader=loader, early_stopping=5)


def test_augmented_validation():
    """Strongly changed images of the loader, the same for the same seed, without
    touching the random states; as many as asked for or there are."""
    images = TensorDataset(torch.rand(20, 3, 8, 8), torch.arange(20))
    loader = DataLoader(images, 6, shuffle=True)
    state = torch.get_rng_state()
    first, again = (augmented_validation(loader, 7, seed=2) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    x, y = first.dataset.tensors
    assert (x.shape, len(y.unique())) == ((7, 3, 8, 8), 7)
    assert torch.equal(x, again.dataset.tensors[0])
    assert not torch.equal(x, images.tensors[0][y])
    plain = augmented_validation(loader, 50, augment=lambda images: images)
    x, y = plain.dataset.tensors
    assert len(y) == 20
    assert torch.equal(x, images.tensors[0][y])
    with pytest.raises(ValueError, match=r"images \(B, channels, H, W\)"):
        augmented_validation(problem(CLASSIFICATION).loader())
    with pytest.raises(ValueError, match="strength"):
        augmented_validation(loader, strength=0.0)


@both
def test_override_adds(name):
    """H, loss and n_data are sums over all data, on the first basis."""
    case = problem(name)
    la = fit(case)
    H, loss = la.H.clone(), la.loss.clone()
    la.fit(part(case, slice(0, 5)).loader(), override=False)
    more = dense.Reference(part(case, slice(0, 5)), la.basis.vectors)
    assert la.n_data == len(case.x) + 5
    assert_close(la.H, H + more.H)
    assert_close(la.loss, loss + more.loss)
    la.fit_basis(case.loader())
    assert (la.n_data, float(la.H.abs().max())) == (0, 0.0)
    la.fit(case.loader(), override=False)
    assert_close(la.H, H)
    assert_close(la.loss, loss)


def test_stochastic_curvature():
    case = problem(CLASSIFICATION)
    many = build(case, n_eigenvalues=4, stochastic=3000)
    many.fit(case.loader())
    exact = fit(case, n_eigenvalues=4).H
    assert (many.H - exact).norm() < 0.05 * exact.norm()


def test_matched_complement_is_refused_where_it_is_not_known():
    la = fit(problem(CLASSIFICATION))
    with pytest.raises(ValueError, match="complement='matched' needs"):
        la.complement = "matched"
    assert la.complement.value == "drop"


@both
def test_few_data_are_fitted_exactly_by_default(name):
    case = problem(name)
    la = ELLALaplace(case.model, case.likelihood)
    la.fit(case.loader())
    assert la.fitted.spans_all
    assert la.basis.n_samples == len(case.x) * 3
    assert_exact(la, case, slice(None))
