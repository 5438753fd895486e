"""Uses that once gave wrong numbers, or an error far from its cause."""

import copy
import dataclasses
import pickle
import threading
import warnings
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from laplace_ella import (
    EarlyStopping,
    ELLALaplace,
    ELLALLLaplace,
    FeatureCache,
    SoftmaxWarning,
    augmented_validation,
    decompose,
)
from tests.cases import DictModel, make, mlp, priors
from tests.fitting import assert_close, build, fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.RankWarning")


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def loader_of(x, y, size=5, **kwargs):
    return DataLoader(TensorDataset(x, y), size, **kwargs)


def attributes(la):
    """What a failed call must leave as it was, as comparable values."""
    return {
        "fitted": id(la.fitted),
        "prior": la.prior_precision.tolist(),
        "prior_mean": torch.as_tensor(la.prior_mean).tolist(),
        "noise": la.sigma_noise.tolist(),
        "temperature": float(la.temperature),
        "complement": la.complement,
        "enable_backprop": la.enable_backprop,
        "plan": la.plan,
        "options": la.options,
        "n_outputs": la.n_outputs,
        "n_data": la.n_data,
        "mean": la.mean.tolist(),
        "H": la.H.tolist(),
        "loss": la.loss.tolist(),
        "rank": la.rank,
        "history": la.history,
    }


# --- searches on losses that are not defined ---------------------------------------

SEARCHES = {
    "prior": lambda la, data, **kw: la.optimize_prior_precision(
        method="gridsearch", val_loader=data, grid_size=5, **kw
    ),
    "prior_nn": lambda la, data, **kw: la.optimize_prior_precision(
        "nn",
        "gridsearch",
        val_loader=data,
        grid_size=3,
        **{"link_approx": "mc", "n_samples": 3} | kw,
    ),
    "temperature": lambda la, data, **kw: la.optimize_temperature(data, **kw),
    "both": lambda la, data, **kw: la.optimize_temperature(data, tune_prior=True, **kw),
    "rank": lambda la, data, **kw: la.optimize_rank("gridsearch", data, **kw),
    "stopping": lambda la, data, **kw: la.fit(
        data, val_loader=data, early_stopping=EarlyStopping(every=3, **kw)
    ),
}

LIKELIHOODS = ("classification_mlp", "regression_3")


def undefined(*args):
    return float("nan")


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_loss_that_is_never_defined_chooses_nothing(name, search):
    """An error, and every setting as before; once the first candidate won."""
    case = make(name)
    la = fit(case, prior_precision=3.0, temperature=2.0)
    before = attributes(la)
    with pytest.raises(ValueError, match=r"(?i)loss.*NaN or infinite"):
        SEARCHES[search](la, case.loader(), loss=undefined)
    assert attributes(la) == before


@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_undefined_validation_data_choose_nothing(name, search, where):
    """NaN among the inputs, or targets that are none, are an error."""
    case = make(name)
    la = fit(case, prior_precision=3.0, temperature=2.0)
    before = attributes(la)
    x, y = case.x.clone(), case.y.clone()
    if where == "inputs":
        x[7] = torch.nan
    else:
        y[7] = torch.nan if y.is_floating_point() else 17
    with pytest.raises(ValueError, match=r"(?i)NaN|infinite|class indices"):
        SEARCHES[search](la, loader_of(x, y))
    assert attributes(la) == before


@pytest.mark.parametrize("n_samples", [0, -1, 2.5])
@pytest.mark.parametrize("search", SEARCHES)
def test_searches_need_samples(search, n_samples):
    """No samples have no mean."""
    case = make("classification_mlp")
    la = fit(case, prior_precision=3.0, temperature=2.0)
    before = attributes(la)
    with pytest.raises(ValueError, match=rf"n_samples.*{n_samples}"):
        SEARCHES[search](la, case.loader(), n_samples=n_samples, link_approx="mc")
    assert attributes(la) == before


def test_a_loss_that_is_sometimes_defined_chooses_among_those():
    """Candidates without a loss lose, whichever place they have."""
    case = make("classification_mlp")
    la = fit(case)
    values = iter([float("nan"), 3.0, float("nan"), 2.0, float("nan")])
    SEARCHES["prior"](la, case.loader(), loss=lambda p, y: next(values))
    assert la.prior_precision.item() == pytest.approx(100.0)


def test_evidence_that_is_not_defined_changes_nothing():
    """The search by evidence does not return NaN either."""
    case = make("regression_3")
    la = fit(case, prior_precision=3.0)
    sums = dataclasses.replace(la.fitted.sums, loss=la.fitted.sums.loss * torch.nan)
    la._adopt(dataclasses.replace(la.fitted, sums=sums))
    for optimize in (la.optimize_sigma_noise, la.optimize_prior_precision):
        with pytest.raises(ValueError, match=r"evidence is NaN or infinite"):
            optimize(n_steps=3)
        assert la.prior_precision.tolist() == [3.0]


# --- batches -----------------------------------------------------------------------


class Shared(nn.Module):
    """Reads a table, which all examples share, at the positions of each example."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 4, 2)

    def forward(self, batch):
        table = batch["table"][: batch["input_ids"].shape[1]].sum(-1)
        return self.net(batch["input_ids"] * table)


def test_a_shared_tensor_as_long_as_a_chunk():
    """Whether a tensor belongs to the examples is not read off a part of the batch."""
    torch.manual_seed(0)
    model, table = Shared().double(), torch.rand(64, 3).double()
    data = [
        {"input_ids": torch.randn(3).double(), "labels": torch.tensor(i % 2)}
        for i in range(130)
    ]

    def collate(items):
        batch = torch.utils.data.default_collate(items)
        return {"table": table, **batch}

    spectra, curvatures = [], []
    for chunk_size in (64, 50, 1):
        for mode in ("forward", "reverse"):
            la = ELLALaplace(
                model,
                "classification",
                n_eigenvalues=6,
                chunk_size=chunk_size,
                feature_mode=mode,
            )
            la.fit(DataLoader(data, batch_size=65, collate_fn=collate))
            spectra.append(la.basis.eigenvalues)
            curvatures.append(torch.linalg.eigvalsh(la.H))
    for spectrum, curvature in zip(spectra[1:], curvatures[1:], strict=True):
        assert_close(spectrum, spectra[0])
        assert_close(curvature, curvatures[0])


# --- caches ------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["scalar", "layerwise", "diag"])
@pytest.mark.parametrize("used", ["scalar", "layerwise", "diag"])
def test_cache_of_another_prior(made, used):
    """Where features depend on the prior, a cache serves that prior alone."""
    case = make("regression_3")
    la = fit(case, complement="prior")
    la.prior_precision = priors(case)[made]
    cache = FeatureCache.from_loader(la, case.loader())
    la.prior_precision = priors(case)[used]
    if made == used:
        mean, var = la.predict_from_cache(cache)
        expected = la(case.x)
        assert_close(mean, expected[0])
        assert_close(var, expected[1])
        la.prior_precision = 2 * priors(case)[used]
        if used != "scalar":
            with pytest.raises(ValueError, match="make the cache again"):
                la.predict_from_cache(cache)
        return
    with pytest.raises(ValueError, match="make the cache again"):
        la.predict_from_cache(cache)
    with pytest.raises(ValueError, match="make the cache again"):
        la.optimize_temperature(cache)


def test_cache_of_another_basis():
    """Neither a cache of another basis nor one of fewer directions is taken."""
    case = make("classification_mlp")
    la, other = fit(case), fit(case, subsample_size=20)
    cache = FeatureCache.from_loader(la, case.loader())
    uses = {
        "predict": lambda la, cache: la.predict_from_cache(cache),
        "fit": lambda la, cache: la.fit_features(cache),
        "tune": lambda la, cache: la.optimize_prior_precision(
            method="gridsearch", val_loader=cache, grid_size=2
        ),
        "temper": lambda la, cache: la.optimize_temperature(cache),
        "rank": lambda la, cache: la.optimize_rank("gridsearch", cache),
    }
    for use in uses.values():
        before = attributes(other)
        with pytest.raises(ValueError, match="another basis"):
            use(other, cache)
        with pytest.raises(ValueError, match=r"4 directions, 6 were"):
            use(other, FeatureCache.truncate(cache, 4))
        assert attributes(other) == before


# --- targets -----------------------------------------------------------------------


def refuse_derivatives(model):
    """Fail at the first backward pass or tangent."""

    def hook(module, inputs, output):
        assert not output.requires_grad
        assert torch.autograd.forward_ad.unpack_dual(output).tangent is None

    model.register_forward_hook(hook)
    return model


BAD_TARGETS = {
    "regression_nan": ("regression", torch.full((6, 2), torch.nan), "NaN"),
    "regression_inf": ("regression", torch.full((6, 2), torch.inf), "infinite"),
    "soft_large": ("classification", torch.full((6, 2), 5.0), r"0.*1.*5"),
    "soft_negative": ("classification", torch.tensor([[-1.0, 2.0]] * 6), "-1"),
    "soft_nan": ("classification", torch.full((6, 2), torch.nan), "NaN"),
    "soft_sum": ("classification", torch.full((6, 2), 0.2), r"sum to one.*0\.6"),
    "label": ("classification", torch.full((6,), 2), r"0\.\.1.*2\.\.2"),
}


@pytest.mark.parametrize("kind", BAD_TARGETS)
def test_targets_are_checked_before_anything_is_differentiated(kind):
    """What is wrong is told before the basis is sampled."""
    likelihood, y, match = BAD_TARGETS[kind]
    la = ELLALaplace(refuse_derivatives(mlp(3, 4, 2)), likelihood, n_eigenvalues=2)
    with pytest.raises(ValueError, match=f"(?s){match}"):
        la.fit(loader_of(torch.randn(6, 3), y, 4))
    assert la.fitted is None


class Grid(nn.Module):
    """Outputs at 4 x 5 positions, in either layout."""

    def __init__(self, layout, n_out=3):
        super().__init__()
        self.conv, self.layout = nn.Conv2d(1, n_out, 3, padding=1), layout

    def forward(self, x):
        f = self.conv(x)
        return f.movedim(1, -1) if self.layout == "channels_last" else f


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_a_mark_of_ones_own_for_missing_pixels(layout):
    """Masks often have 255 where nothing was observed; the message has the remedy."""
    la = ELLALaplace(Grid(layout), "classification", output_layout=layout)
    y = torch.randint(3, (6, 4, 5))
    y[:, 0] = 255
    data = loader_of(torch.randn(6, 1, 4, 5), y)
    with pytest.raises(ValueError, match=r"(?s)-100.*y\[y == 255\] = -100"):
        la.fit(data)


@pytest.mark.parametrize("mark", [-1, -2])
def test_a_negative_mark_for_missing_pixels(mark):
    """The remedy names the value that is out of range, at whichever end."""
    la = ELLALaplace(Grid(None), "classification", output_layout="channels_first")
    y = torch.randint(3, (6, 4, 5))
    y[:, 0] = mark
    with pytest.raises(ValueError, match=rf"y\[y == {mark}\] = -100"):
        la.fit(loader_of(torch.randn(6, 1, 4, 5), y))


@pytest.mark.parametrize(
    ("layout", "dim"), [("flat", 1), ("channels_first", 1), ("channels_last", 3)]
)
def test_the_dimension_that_targets_lack(layout, dim):
    """Targets of one output without its dimension: the message says which, and it
    helps."""
    flat = layout == "flat"
    model = nn.Linear(3, 1) if flat else Grid(layout, 1)
    x = torch.randn(6, 3) if flat else torch.randn(6, 1, 4, 5)
    y = torch.randn(6) if flat else torch.randn(6, 4, 5)
    la = ELLALaplace(model, "regression", output_layout=layout)
    with pytest.raises(ValueError, match=rf"y\.unsqueeze\({dim}\)"):
        la.fit(loader_of(x, y))
    la.fit(loader_of(x, y.unsqueeze(dim)))


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_the_dimension_that_targets_lack_where_sizes_are_one(layout):
    """A grid of one column: the dimension of the outputs, not that of the column."""
    la = ELLALaplace(Grid(layout, 1), "regression", output_layout=layout)
    x, y = torch.randn(6, 1, 4, 1), torch.randn(6, 4, 1)
    dim = 1 if layout == "channels_first" else 3
    with pytest.raises(ValueError, match=rf"y\.unsqueeze\({dim}\)"):
        la.fit(loader_of(x, y))


# --- threads -----------------------------------------------------------------------


@pytest.mark.parametrize("objects", [1, 2])
def test_two_threads(objects):
    """Threads that share one model get the numbers they would get alone."""
    case = make("classification_cnn")
    case.model.train()
    case.model.bn.eval()
    posteriors = [fit(case, n_eigenvalues=3 + i) for i in range(objects)]
    modes = [m.training for m in case.model.modules()]
    calls = [
        lambda la: la(case.x_test),
        lambda la: la(case.x_test, link_approx="mc", n_samples=20),
        lambda la: la(case.x_test, "nn", link_approx="mc", n_samples=4),
        lambda la: la.features(case.x_test)[1],
    ]
    expected = [[call(la) for call in calls] for la in posteriors]
    # The random stream of unseeded network samples starts anew in every call.
    errors = []

    def work(i):
        try:
            for _ in range(4):
                la = posteriors[i % objects]
                for call, value in zip(calls, expected[i % objects], strict=True):
                    assert_close(call(la), value)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert [m.training for m in case.model.modules()] == modes


# --- outputs that are probabilities ------------------------------------------------


@pytest.mark.parametrize(
    ("end", "likelihood", "options", "warned"),
    [
        (nn.Softmax(-1), "classification", {}, True),
        (nn.Identity(), "classification", {}, False),
        (nn.LogSoftmax(-1), "classification", {}, False),
        (nn.Softmax(-1), "regression", {}, False),
        (nn.Softmax(-1), "classification", {"multi_label": True}, False),
    ],
)
@pytest.mark.parametrize("size", [1, 4])
def test_probabilities_for_logits(end, likelihood, options, warned, size):
    """A softmax at the end of a classifier is told of, nothing else is."""
    model = nn.Sequential(mlp(3, 4, 3), end)
    y = torch.randint(3, (6,))
    if likelihood == "regression" or options:
        y = nn.functional.one_hot(y, 3).float()
    la = ELLALaplace(model, likelihood, n_eigenvalues=2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.fit(loader_of(torch.randn(6, 3), y, size))
    told = [w for w in caught if w.category is SoftmaxWarning]
    assert len(told) == warned
    assert all(w.filename == __file__ for w in told)


# --- memory ------------------------------------------------------------------------


def test_regression_searches_take_variances():
    """300 outputs at 300 examples: no covariance (N, C, C) is formed."""
    N = C = 300
    torch.manual_seed(0)
    x, y = torch.randn(N, 3), torch.randn(N, C)
    model = mlp(3, 2, C)
    la = ELLALaplace(model, "regression", n_eigenvalues=4, complement="drop")
    la.fit(loader_of(x, y, 100))
    cache = FeatureCache.from_loader(la, loader_of(x, y, 100))
    searches = {
        "prior": lambda: la.optimize_prior_precision(
            method="gridsearch", val_loader=cache, grid_size=3
        ),
        "temperature": lambda: la.optimize_temperature(cache),
        "rank": lambda: la.optimize_rank("gridsearch", cache),
    }
    for search in searches.values():
        with Largest() as largest:
            search()
        assert largest.numel <= N * C * 8


def test_the_complement_of_a_thousand_outputs_in_blocks():
    """No Jacobian of all outputs is formed: blocks of them, and their products."""
    C = 1000
    torch.manual_seed(0)
    # P = 97,000: one example's Jacobian has 97 million numbers, 388 MB
    model = nn.Sequential(nn.Linear(20, 95), nn.Tanh(), nn.Linear(95, C))
    x, y = torch.randn(6, 20), torch.randint(C, (6,))
    la = ELLALaplace(
        model,
        "classification",
        n_eigenvalues=4,
        subsample_size=30,
        complement="prior",
        feature_mode="forward",
    )
    la.fit(loader_of(x, y, 3))
    n_params = sum(p.numel() for p in model.parameters())
    with Largest() as largest:
        probabilities = la(x[:1])
    assert probabilities.shape == (1, C)
    assert largest.numel < C * n_params / 2


def test_the_complement_that_cannot_fit_is_refused_with_numbers():
    """Residuals (C, C) of a large batch: what they take, and what there is."""
    C = 1000
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, C))
    x, y = torch.randn(100, 3), torch.randint(C, (100,))
    la = ELLALaplace(
        model,
        "classification",
        n_eigenvalues=2,
        subsample_size=20,
        memory_budget="300MB",
        complement="prior",
    )
    la.fit(loader_of(x, y, 50))
    with pytest.raises(MemoryError, match=r"(?s)400\.0 MB.*300\.0 MB"):
        la(x)


# --- layouts of parameters, and failing fits ---------------------------------------


class Strided(nn.Module):
    """Convolutions in channels_last, and a transposed weight."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.head = nn.Linear(12, 2)
        self.head.weight = nn.Parameter(torch.randn(12, 2).T)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).flatten(1))


def test_parameters_in_other_memory_formats(tmp_path):
    """Fit, samples and checkpoints do not depend on strides."""
    torch.manual_seed(0)
    strided = Strided().double().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(strided)
    for p in plain.parameters():
        p.data = p.data.contiguous()
    assert not strided.conv.weight.is_contiguous()
    assert not strided.head.weight.is_contiguous()
    x, y = torch.randn(8, 2, 4, 4).double(), torch.randint(2, (8,))
    x_strided = x.to(memory_format=torch.channels_last)
    for options in ({}, {"complement": "prior"}, {"row_mode": "loop"}):
        fits = []
        for model, inputs in ((strided, x_strided), (plain, x)):
            la = ELLALaplace(model, "classification", n_eigenvalues=5, **options)
            la.fit(loader_of(inputs, y))
            fits.append(la)
        a, b = fits
        assert_close(a.basis.eigenvalues, b.basis.eigenvalues)
        assert_close(a(x_strided), b(x))
        weights = torch.cat([p.detach().reshape(-1) for p in strided.parameters()])
        assert_close(a.mean, weights)
        samples = a.sample(4000)
        spread = samples.std(0).max()
        assert (samples.mean(0) - weights).abs().max() < 5 * spread / 4000**0.5
        torch.save(a.state_dict(), tmp_path / "state.pt")
        c = ELLALaplace(strided, "classification", n_eigenvalues=5, **options)
        c.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert_close(c(x_strided), a(x_strided))
        nn_predictions = {"pred_type": "nn", "link_approx": "mc", "n_samples": 3}
        assert_close(c(x_strided, **nn_predictions), a(x_strided, **nn_predictions))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_a_fit_that_fails_at_the_last_step(cls, first):
    """Everything is as before the call: of an unfitted object, and of a fitted one."""
    case = make("classification_mlp")
    la = build(case, cls, prior_precision=3.0)
    if not first:
        la.fit(case.loader())
    before = {**la.__dict__}
    x, y = case.x.clone(), case.y.clone()
    y[-1] = 3  # out of range, in the last batch
    with pytest.raises(ValueError, match="Class indices"):
        la.fit(loader_of(x, y, 1))
    x[-1] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        la.fit(loader_of(x, case.y, 4))
    after = {**la.__dict__}
    assert after.keys() == before.keys()
    changed = [k for k in before if after[k] is not before[k]]
    assert not [k for k in changed if after[k] != before[k]], changed
    assert (la.fitted is None) == first


# --- loaders -----------------------------------------------------------------------


class Stream(IterableDataset):
    """Examples without a length."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return iter(zip(self.x, self.y, strict=True))


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("search", SEARCHES)
def test_streams_as_validation_data(name, search):
    """Data without a length serve wherever nothing is drawn by index."""
    case = make(name)
    stream = DataLoader(Stream(case.x_test, case.y[:7]), 3)
    with pytest.raises(TypeError):
        len(stream)
    results = []
    for data in (stream, loader_of(case.x_test, case.y[:7], 3)):
        # in one way, so that the numbers agree to the last digit
        la = fit(case, feature_mode="reverse", row_mode="vmap")
        if search == "stopping":
            stopping = EarlyStopping(every=3)
            la.fit(case.loader(), val_loader=data, early_stopping=stopping)
        else:
            SEARCHES[search](la, data)
        results.append(attributes(la) | {"fitted": None})
    assert results[0] == results[1]


def test_cache_of_a_stream():
    """A cache is made of a stream, with a progress bar too."""
    case = make("regression_3")
    la = fit(case)
    stream = DataLoader(Stream(case.x, case.y), 3)
    cache = FeatureCache.from_loader(la, stream, progress_bar=True)
    expected = FeatureCache.from_loader(la, case.loader())
    assert_close(cache.phi, expected.phi)


class Counting(nn.Module):
    """Puts another tensor in the place of its buffer at every forward pass."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(8, 3)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("in_place", torch.zeros(2))

    def forward(self, x):
        self.n = self.n + 1
        self.in_place += 1
        return self.head(self.conv(x).flatten(1))


def images(n=12):
    return torch.randn(n, 1, 4, 4), torch.randint(3, (n,))


def sampled_loaders():
    """Loaders with generators of their own, by the places they may be kept in."""
    data = TensorDataset(*images())
    weights = torch.ones(12).tolist()

    def generator():
        return torch.Generator().manual_seed(5)

    weighted, random, nested, own = (generator() for _ in range(4))
    sampler = WeightedRandomSampler(weights, 12, generator=weighted)
    batches = BatchSampler(RandomSampler(data, generator=random), 4, False)
    inner = BatchSampler(WeightedRandomSampler(weights, 12, generator=nested), 4, False)
    return {
        "sampler": (DataLoader(data, 4, sampler=sampler), weighted),
        "batch_sampler": (DataLoader(data, batch_sampler=batches), random),
        "nested": (DataLoader(data, batch_sampler=inner), nested),
        "loader": (DataLoader(data, 4, shuffle=True, generator=own), own),
    }


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
@pytest.mark.parametrize("place", sampled_loaders())
def test_generators_of_loaders(cls, place):
    """The loader yields the same after a call as it would have before."""
    loader, generator = sampled_loaders()[place]
    model = Counting()
    state, torch_state = generator.get_state(), torch.get_rng_state()
    la = cls(model, "classification", n_eigenvalues=3, subsample_size=10)
    calls = [
        lambda: la.estimate_memory(loader),
        lambda: la.fit(loader),
        lambda: la.fit(loader, val_loader=loader, early_stopping=True),
        lambda: la.fit(loader, balanced=True),
        lambda: la.fit_basis(loader),
        lambda: la.fit(loader),
        lambda: la.cache_features(loader),
        lambda: la.optimize_temperature(loader),
        lambda: la.optimize_prior_precision(
            "nn", "gridsearch", val_loader=loader, grid_size=2, n_samples=2
        ),
        lambda: augmented_validation(loader, 5, augment=lambda x: x + torch.rand(1)),
    ]
    for call in calls:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
        assert torch.equal(generator.get_state(), state)
        assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_buffers_that_are_replaced(cls):
    """A forward pass that replaces or changes its buffers leaves no trace."""
    model = Counting()
    x, y = images()
    loader = loader_of(x, y)
    buffers = dict(model.named_buffers())
    la = cls(model, "classification", n_eigenvalues=3, subsample_size=10)
    calls = [
        lambda: la.estimate_memory(loader),
        lambda: la.fit(loader),
        lambda: la(x),
        lambda: la(x, link_approx="mc", n_samples=3),
        lambda: la(x, "nn", link_approx="mc", n_samples=3),
        lambda: decompose(la, x, n_samples=3),
        lambda: la.features(x),
        lambda: la.functional_samples(x, n_samples=3),
        lambda: la.cache_features(loader),
    ]
    for call in calls:
        call()
        assert all(b is buffers[name] for name, b in model.named_buffers())
        assert all(not b.any() for b in model.buffers())


# --- inputs and graphs -------------------------------------------------------------


def test_no_graph_under_no_grad():
    """enable_backprop is a permission, as requires_grad is."""
    case = make("regression_3")
    la = fit(case, enable_backprop=True)
    x = case.x_test.clone().requires_grad_()
    with torch.no_grad():
        outputs = [*la(x), *la.features(x), la.functional_samples(x, n_samples=2)]
    assert not any(t.requires_grad for t in outputs)
    mean, var = la(x)
    (grad,) = torch.autograd.grad(var.sum() + mean.sum(), x)
    assert grad.abs().max() > 0


BROKEN_STATES = {
    "prior": {"prior_precision": torch.tensor([-1.0])},
    "prior_shape": {"prior_precision": torch.ones(3)},
    "prior_mean": {"prior_mean": torch.ones(3)},
    "noise": {"sigma_noise": torch.tensor(0.0)},
    "noises": {"sigma_noise": torch.ones(7)},
    "temperature": {"temperature": -2.0},
    "complement": {"complement": "sideways"},
    "seed": {"seed": -3},
    "mode": {"mode_features": "sideways"},
    "dtype": {"dtype": "float7"},
    "H": {"H": torch.zeros(2, 2)},
    "directions": {"directions": torch.zeros(6, 2)},
    "numels": {"basis_numels": (1, 2)},
    "output_shape": {"output_shape": ()},
    "missing": {"H": None},
}


@pytest.mark.parametrize("kind", BROKEN_STATES)
@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_a_broken_checkpoint_changes_nothing(cls, kind):
    """Everything of a checkpoint is taken over, or nothing."""
    case = make("regression_3")
    la, other = fit(case, cls), fit(case, cls, prior_precision=5.0, seed=3)
    state = other.state_dict() | BROKEN_STATES[kind]
    if kind == "missing":
        del state["H"]
    before, predictions = attributes(la), la(case.x_test)
    with pytest.raises((ValueError, KeyError)):
        la.load_state_dict(state)
    assert attributes(la) == before
    for a, b in zip(la(case.x_test), predictions, strict=True):
        assert torch.equal(a, b)


Pair = namedtuple("Pair", ["left", "right"])


class Adds(nn.Module):
    """Takes a namedtuple."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 4, 2)

    def forward(self, pair):
        return self.net(pair.left + pair.right)


@pytest.mark.parametrize("mode", ["forward", "reverse", "double_vjp"])
def test_namedtuples(mode):
    """Inputs that are namedtuples stay what they are."""
    torch.manual_seed(0)
    model = Adds().double()
    x = torch.randn(2, 8, 3).double()
    data = [(Pair(a, b), i % 2) for i, (a, b) in enumerate(zip(*x, strict=True))]
    options = {"n_eigenvalues": 4, "feature_mode": mode}
    la = ELLALaplace(model, "classification", **options)
    la.fit(DataLoader(data, 4))
    plain = ELLALaplace(model.net, "classification", **options)
    plain.fit(loader_of(x.sum(0), torch.arange(8) % 2, 4))
    assert_close(la(Pair(*x)), plain(x.sum(0)))


def test_one_example_without_a_batch_dimension():
    """The message has the remedy."""
    case = make("classification_mlp")
    la = fit(case)
    with pytest.raises(ValueError, match=r"x\.unsqueeze\(0\)"):
        la(case.x_test[0])
    cnn = make("classification_cnn")
    la = fit(cnn)
    with pytest.raises(ValueError, match=r"unsqueeze\(0\)|batch"):
        la(cnn.x_test[0])


class InPlace(nn.Module):
    """Scales its inputs in place."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 4, 2)

    def forward(self, x):
        x -= 1
        return self.net(x.mul_(2))


@pytest.mark.parametrize("mode", ["forward", "reverse", "double_vjp"])
def test_models_that_change_their_inputs(mode):
    """The user's tensors stay, and the numbers are right."""
    torch.manual_seed(0)
    model = InPlace()
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    before = x.clone()
    la = ELLALaplace(model, "classification", n_eigenvalues=4, feature_mode=mode)
    loader = loader_of(x, y, 4)
    calls = [
        lambda: la.estimate_memory(loader),
        lambda: la.fit(loader),
        lambda: la(x),
        lambda: la(x, "nn", link_approx="mc", n_samples=3),
        lambda: decompose(la, x, n_samples=3),
        lambda: la.features(x),
        lambda: la(x[:0]),
    ]
    for call in calls:
        call()
        assert torch.equal(x, before)
    f, _ = la.features(x)
    torch.testing.assert_close(f, model(x.clone()).detach())


# --- arguments ---------------------------------------------------------------------


def test_evidence_under_no_grad():
    """Searches by evidence switch gradients on for themselves."""
    case = make("regression_3")
    expected, la = fit(case), fit(case)
    calls = [
        lambda la: la.optimize_prior_precision(n_steps=5),
        lambda la: la.optimize_prior_precision(n_steps=5, prior_structure="diag"),
        lambda la: la.optimize_sigma_noise(n_steps=5),
    ]
    for call in calls:
        call(expected)
        with torch.no_grad():
            call(la)
        assert_close(la.prior_precision, expected.prior_precision)
        assert_close(la.sigma_noise, expected.sigma_noise)
    with torch.inference_mode():
        la.optimize_prior_precision(n_steps=2)


REFUSED = {
    "noise_steps": (lambda la: la.optimize_sigma_noise(n_steps=0), "n_steps.*0"),
    "noise_lr": (lambda la: la.optimize_sigma_noise(lr=0), "lr.*0"),
    "prior_steps": (lambda la: la.optimize_prior_precision(n_steps=0), "n_steps.*0"),
    "prior_lr": (lambda la: la.optimize_prior_precision(lr=-1.0), "lr.*-1"),
    "prior_lr_nan": (lambda la: la.optimize_prior_precision(lr=float("nan")), "lr"),
    "init": (lambda la: la.optimize_prior_precision(init_prior_prec=-1), "init.*-1"),
    "every": (lambda la: EarlyStopping(every=10.5), "every.*10.5"),
    "share": (lambda la: la.optimize_rank(share=1.5), "share.*1.5"),
    "share_0": (lambda la: la.optimize_rank(share=0), "share.*0"),
    "temperature": (
        lambda la: setattr(la, "temperature", torch.tensor(-1.0)),
        "temperature.*-1",
    ),
    "temperature_nan": (
        lambda la: setattr(la, "temperature", float("nan")),
        "temperature.*nan",
    ),
    "temperature_numpy": (
        lambda la: setattr(la, "temperature", np.float32(-1)),
        "temperature.*-1",
    ),
    "temperature_text": (
        lambda la: setattr(la, "temperature", "warm"),
        "temperature.*warm",
    ),
    "temperatures": (
        lambda la: setattr(la, "temperature", torch.ones(2)),
        "temperature",
    ),
    "seed": (lambda la: setattr(la, "seed", -1), "seed.*-1"),
    "truncate": (lambda la: la.truncate(0), "rank.*0"),
    "truncate_more": (lambda la: la.truncate(99), "99"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_arguments_that_make_no_sense(kind):
    """Each is refused by name and value, and changes nothing."""
    la = fit(make("regression_3"))
    before = attributes(la)
    call, match = REFUSED[kind]
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        call(la)
    assert attributes(la) == before


REFUSED_SEARCHES = {
    "grid": (
        lambda la, data: la.optimize_prior_precision(
            method="gridsearch", val_loader=data, grid_size=0
        ),
        "grid_size.*0",
    ),
    "no_ranks": (
        lambda la, data: la.optimize_rank("gridsearch", data, ranks=[]),
        r"ranks.*\[\]",
    ),
    "ranks": (
        lambda la, data: la.optimize_rank("gridsearch", data, ranks=[1, 50]),
        "ranks.*50",
    ),
    "fractions": (
        lambda la, data: la.optimize_rank("gridsearch", data, ranks=[1.5, 2]),
        "ranks.*1.5",
    ),
    "range": (
        lambda la, data: la.optimize_temperature(
            data, tune_prior=True, log_prior_prec_min=3, log_prior_prec_max=1
        ),
        "log_prior_prec_min.*3.*1",
    ),
    "no_data": (
        lambda la, data: la.optimize_prior_precision(method="gridsearch"),
        "val_loader",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_SEARCHES)
def test_searches_that_make_no_sense(kind):
    """Refused before the validation data are looked at."""
    case = make("regression_3")
    la = fit(case)
    before = attributes(la)
    call, match = REFUSED_SEARCHES[kind]
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        call(la, case.loader())
    assert attributes(la) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": torch.tensor(-1.0)}, "temperature.*-1"),
        ({"temperature": 0.0}, "temperature.*0"),
        ({"seed": -1}, "seed.*-1"),
        ({"seed": 1.5}, "seed.*1.5"),
        ({"stochastic": 0.5}, "stochastic.*0.5"),
        ({"memory_budget": "many"}, "memory_budget.*many"),
        ({"memory_budget": -1}, "memory_budget.*-1"),
    ],
)
@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_constructor_arguments_that_make_no_sense(cls, options, match):
    """Refused when the object is built."""
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        cls(mlp(3, 4, 2), "regression", **options)


def test_a_large_rank_is_not_allocated():
    """n_eigenvalues is a wish: only the fit knows the rank."""
    with Largest() as largest:
        la = ELLALaplace(mlp(3, 4, 2), "classification", n_eigenvalues=10**6)
    assert largest.numel < 1000
    la.fit(loader_of(torch.randn(6, 3), torch.randint(2, (6,))))
    assert la.rank <= 12


# --- models with other interfaces --------------------------------------------------

Output = namedtuple("Output", ["loss", "logits"])


class Keywords(nn.Module):
    """Called as models of Hugging Face are, returns an object with logits."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 4, 2)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        return Output(None, self.net(input_ids * attention_mask))


class Wrapped(nn.Module):
    """What the error message asks for, but for the logits."""

    def __init__(self, hf):
        super().__init__()
        self.hf = hf

    def forward(self, batch):
        return self.hf(batch["input_ids"], batch["attention_mask"])


def mappings(n=6):
    items = [
        {
            "input_ids": torch.randn(3),
            "attention_mask": torch.ones(3),
            "labels": torch.tensor(i % 2),
        }
        for i in range(n)
    ]
    return DataLoader(items, 3)


def test_models_that_take_keywords():
    """The wrapper is in the message; what it returns works, logits inside or not."""
    model = Keywords()
    with pytest.raises(TypeError, match=r"(?s)keywords.*torch\.nn\.Module.*\*\*batch"):
        ELLALaplace(model, "classification", n_eigenvalues=2).fit(mappings())
    la = ELLALaplace(Wrapped(model), "classification", n_eigenvalues=2)
    la.fit(mappings())
    assert la(next(iter(mappings()))).shape == (3, 2)


def test_mappings_for_a_model_that_takes_a_tensor():
    """The message says that the model got the mapping, and what to write."""
    la = ELLALaplace(mlp(3, 4, 2), "classification", n_eigenvalues=2)
    with pytest.raises(TypeError, match=r"(?s)mapping.*torch\.nn\.Module.*input_ids"):
        la.fit(mappings())
    la = ELLALaplace(DictModel(mlp(3, 4, 2)), "classification", n_eigenvalues=2)
    la.fit(mappings())


# --- attributes --------------------------------------------------------------------

SETTABLE = {
    "feature_mode": "reverse",
    "row_mode": "loop",
    "chunk_size": 3,
    "memory_budget": "1 GB",
    "compile": False,
    "basis_dtype": torch.float32,
    "basis_device": torch.device("cpu"),
    "subsample_size": 7,
    "n_eigenvalues": 3,
    "seed": 5,
    "balanced": True,
    "complement": "prior",
    "temperature": 2.0,
    "prior_precision": torch.tensor([2.0]).double(),
    "sigma_noise": torch.tensor([0.5]).double(),
    "prior_mean": 0.1,
    "enable_backprop": True,
}

READ_ONLY = {
    "H": torch.eye(2),
    "n_data": 3,
    "n_outputs": 2,
    "mean": torch.zeros(3),
    "loss": 1.0,
    "basis": None,
    "history": [],
    "rank": 3,
    "modes": None,
    "output_layout": "flat",
    "posterior": None,
    "posterior_precision": None,
    "effective_n_data": 3.0,
    "fitter": None,
    "linearizer": None,
}


@pytest.mark.parametrize("name", SETTABLE)
@pytest.mark.parametrize("first", [True, False])
def test_attributes_that_can_be_set(name, first):
    """Set before the fit or after it, and used by the next one."""
    case = make("classification_mlp" if name != "sigma_noise" else "regression_3")
    la = build(case)
    if not first:
        la.fit(case.loader())
    setattr(la, name, SETTABLE[name])
    assert getattr(la, name) == SETTABLE[name]
    given = build(case, **{name: SETTABLE[name]})
    for posterior in (la, given):
        posterior.fit(case.loader())
    a, b = (posterior(case.x_test) for posterior in (la, given))
    for value, expected in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert_close(value, expected)


@pytest.mark.parametrize("name", READ_ONLY)
def test_attributes_that_cannot(name):
    """What a fit found is not for setting."""
    la = fit(make("classification_mlp"))
    before = attributes(la)
    with pytest.raises(AttributeError):
        setattr(la, name, READ_ONLY[name])
    assert attributes(la) == before


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_predictions_at_another_number_of_positions(layout, likelihood):
    """Fitted at 4 x 5, used at 8 x 8, and for no example at all."""
    torch.manual_seed(0)
    model = Grid(layout).double()
    y = torch.randint(3, (6, 4, 5))
    if likelihood == "regression":
        y = torch.randn(6, *((3, 4, 5) if layout == "channels_first" else (4, 5, 3)))
    la = ELLALaplace(model, likelihood, output_layout=layout, n_eigenvalues=4)
    la.fit(loader_of(torch.randn(6, 1, 4, 5).double(), y))
    for size in ((4, 5), (8, 8)):
        for n in (2, 0):
            x = torch.randn(n, 1, *size).double()
            outputs = tree_leaves(la(x))
            assert outputs[0].shape == model(x).shape
            diagonal = tree_leaves(la(x, diagonal_output=True))
            assert diagonal[-1].shape == model(x).shape
            samples = la.functional_samples(x, n_samples=3)
            assert samples.shape == (3, *model(x).shape)


# --- odd but legitimate ------------------------------------------------------------

flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])


@flavours
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_half_precision(cls, dtype, likelihood):
    """Models in half precision are fitted, tuned, sampled and saved."""
    torch.manual_seed(0)
    model, x = mlp(3, 5, 2).to(dtype), torch.randn(10, 3).to(dtype)
    y = torch.randint(2, (10,))
    if likelihood == "regression":
        y = torch.randn(10, 2).to(dtype)
    la = cls(model, likelihood, n_eigenvalues=4)
    la.fit(loader_of(x, y))
    la.optimize_prior_precision(n_steps=2)
    la.optimize_temperature(loader_of(x, y), tune_prior=True)
    outputs = tree_leaves(la(x)) + tree_leaves(
        la(x, "nn", link_approx="mc", n_samples=3)
    )
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in outputs)
    assert la.sample(2).isfinite().all()
    other = cls(model, likelihood, n_eigenvalues=4)
    other.load_state_dict(la.state_dict())
    assert torch.equal(tree_leaves(other(x))[0], tree_leaves(la(x))[0])


@flavours
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_small_problems(cls, complement):
    """One class, one example, batches of one, no bias, an incomplete last batch."""
    torch.manual_seed(0)
    x, y = torch.randn(10, 3), torch.zeros(10, dtype=torch.long)
    la = cls(mlp(3, 5, 1), "classification", complement=complement)
    la.fit(loader_of(x, y))
    for link in ("probit", "mc", "bridge", "bridge_norm"):
        torch.testing.assert_close(la(x, link_approx=link), torch.ones(10, 1))
    la = cls(mlp(3, 5, 2), "classification", complement=complement)
    la.fit(loader_of(x[:1], y[:1]))
    la.optimize_prior_precision(n_steps=2)
    assert la(x).isfinite().all()
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False))
    la = cls(model, "classification", complement=complement)
    la.fit(loader_of(x, y, 1))
    assert la.n_data == 10
    la.fit(loader_of(x, y, 4, drop_last=True))
    assert la.n_data == 8


@flavours
def test_settings_from_numpy(cls):
    """Scalars and arrays of numpy are numbers and tensors."""
    case = make("regression_3")
    scalars = (np.float32(2), np.float64(2), np.int64(2), np.array(2.0), np.ones(1) * 2)
    for value in scalars:
        options = dict.fromkeys(
            ("prior_precision", "temperature", "sigma_noise"), value
        )
        la = fit(case, cls, prior_mean=value, **options)
        for name in options:
            setattr(la, name, value)
            assert float(getattr(la, name)) == 2
        la.prior_mean = value
        assert float(la.prior_mean) == 2
        other = build(case, cls)
        other.load_state_dict(la.state_dict())
        assert_close(other(case.x_test)[1], la(case.x_test)[1])
    la.prior_precision = np.linspace(1, 2, la.n_params)
    la.prior_mean = np.linspace(1, 2, la.n_params)
    assert la.log_marginal_likelihood().isfinite()
    with pytest.raises(ValueError, match="prior_precision must be positive"):
        la.prior_precision = np.float32(-1)


def test_noise_of_each_output_in_exact_mode():
    """All gradients, and one noise per output, found by the evidence."""
    case = make("regression_3")
    noises = torch.tensor([0.1, 0.2, 0.3]).double()
    la = ELLALaplace(
        case.model, "regression", n_eigenvalues="exact", sigma_noise=noises
    )
    la.fit(case.loader())
    before = la.log_marginal_likelihood()
    la.optimize_sigma_noise(n_steps=5)
    assert la.log_marginal_likelihood() > before
    assert la.sigma_noise.shape == (3,)
    SEARCHES["prior"](la, case.loader())


@flavours
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_copies_of_a_fitted_object(cls, complement):
    """A deep copy and an unpickled one predict the same, with a model of their own."""
    case = make("classification_mlp")
    la = fit(case, cls, complement=complement)
    la.sample(2)
    expected = la(case.x_test)
    for other in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert_close(other(case.x_test), expected)
        other.model[0].weight.data.zero_()
        assert_close(la(case.x_test), expected)
        other.fit(case.loader())


@flavours
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_a_model_that_changes_its_dtype_after_the_fit(cls, complement):
    """A fit in single precision serves the model in double precision."""
    case = make("classification_mlp")
    case.model.float()
    case.x = case.x.float()
    la = fit(case, cls, complement=complement)
    expected = la(case.x_test.float())
    case.model.double()
    case.x = case.x.double()
    assert_close(la(case.x_test), expected.double(), rtol=1e-4, atol=1e-5)
    la.optimize_prior_precision(n_steps=2)
    la.optimize_temperature(case.loader())
    la.fit(case.loader(), override=False)
    assert la.n_data == 24
    la.fit(case.loader())


def test_the_basis_under_autocast():
    """The model runs in low precision, the algebra of the basis does not."""
    torch.manual_seed(0)
    la = ELLALaplace(
        mlp(30, 60, 3),
        "classification",
        n_eigenvalues=6,
        subsample_size=400,
        memory_budget=10**9,
    )
    with torch.autocast("cpu", torch.bfloat16):
        la.fit(loader_of(torch.randn(800, 30), torch.randint(3, (800,)), 100))
    V = la.basis.vectors
    torch.testing.assert_close(V.T @ V, torch.eye(6), rtol=0, atol=1e-4)


def test_gradients_that_are_not_finite_fill_a_sketch():
    """The batch is named, also where a full sketch is decomposed before its end."""
    x = torch.randn(60, 3)
    x[25] = torch.inf
    la = ELLALaplace(mlp(3, 4, 2), "classification", n_eigenvalues=2)
    la.memory_budget = la.estimate_memory(loader_of(x, torch.zeros(60).long())).needed
    with pytest.raises(ValueError, match=r"(?i)NaN or infinite gradients.*batch 5\b"):
        la.fit(loader_of(x, torch.zeros(60, dtype=torch.long)))


class Live(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, by their storages."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def freed():
            self.seen.discard(key)
            self.now -= size

        weakref.finalize(storage, freed)


def test_statistics_of_the_batch():
    """A model in which examples depend on each other is refused, before any work."""
    norm = nn.BatchNorm2d(2, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Flatten(), nn.Linear(32, 3))
    data = loader_of(torch.randn(10, 1, 6, 6), torch.randint(3, (10,)))
    with pytest.raises(ValueError, match=r"statistics of the batch.*GroupNorm"):
        ELLALaplace(model, "classification").fit(data)


@pytest.mark.parametrize("row_mode", ["loop", "vmap"])
@pytest.mark.parametrize("budget", [20_000_000, 40_000_000])
def test_a_fit_within_its_budget(budget, row_mode):
    """Where the gradients do not fit, what is alive at once does not exceed the budget
    by more than a tenth."""
    torch.manual_seed(0)
    model = mlp(32, 120, 120, 10)  # P = 19,690: 300 gradients take 24 MB
    data = loader_of(torch.randn(600, 32), torch.randint(10, (600,)), 100)
    la = ELLALaplace(
        model,
        "classification",
        n_eigenvalues=60,
        subsample_size=1000,
        memory_budget=budget,
        row_mode=row_mode,
    )
    assert la.estimate_memory(data).method == "streaming"
    with Live() as live:
        la.fit(data)
    assert budget / 4 < live.peak < 1.1 * budget
