"""Early stopping: what is restored is the fit on a prefix of the data."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import EarlyStopping, ELLALaplace, ELLALLLaplace, augmented_validation
from tests import dense
from tests.cases import CASES, make
from tests.fitting import assert_close, build, fit

REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"
both = pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])
FOREVER = 10**6
"""A patience that no pass over the data exhausts."""


@pytest.fixture(params=CASES)
def case(request):
    return make(request.param)


def validation(case, n=24):
    """Other inputs, with targets that the model gets wrong now and then."""
    g = torch.Generator().manual_seed(8)
    x = 1.5 * torch.randn(n, *case.x.shape[1:], generator=g).double()
    f = case.model(x).detach()
    if case.likelihood == "regression":
        y = f + 0.6 * torch.randn(f.shape, generator=g).double()
    else:
        y = torch.multinomial((3 * f).softmax(-1), 1, generator=g).squeeze(1)
    return DataLoader(TensorDataset(x, y), batch_size=7)


def stopped(case, stopping, loader=None, val_loader=None, **kwargs):
    """A fit of a case that was stopped early."""
    la = build(case, n_eigenvalues=5, **kwargs)
    la.fit(
        case.loader() if loader is None else loader,
        val_loader=validation(case) if val_loader is None else val_loader,
        early_stopping=stopping,
    )
    return la


def prefix(case, n, skip=0):
    """The case with the examples skip..n of its training data alone."""
    shorter = copy.copy(case)
    shorter.x, shorter.y = case.x[skip:n], case.y[skip:n]
    return shorter


def best(la, maximize=False):
    """The entry of the history that should have been restored."""
    pick = max if maximize else min
    return pick(la.history, key=lambda entry: entry["loss"])


def scripted(values):
    """A loss that ignores the predictions and returns given values in turn."""
    values = iter(values)
    return lambda *args: next(values)


class RecordingLoader(DataLoader):
    """Keeps the batches that were taken from it, not those for the basis."""

    def __iter__(self):
        self.batches = []
        for batch in super().__iter__():
            self.batches.append(batch)
            yield batch

    @property
    def taken(self):
        return len(self.batches)


def recording(case, batch_size, **kwargs):
    return RecordingLoader(TensorDataset(case.x, case.y), batch_size, **kwargs)


def dense_loss(case, la, n, loader):
    """The validation loss of the dense posterior of the first n data, by probit."""
    x, y = loader.dataset.tensors
    reference = dense.Reference(
        prefix(case, n), la.basis.vectors, la.sigma_noise, la.temperature
    )
    mean, var = reference.predict(x, la.prior_precision)
    if case.likelihood != "regression":
        return torch.nn.functional.nll_loss(dense.probit(mean, var).log(), y)
    total = var.diagonal(dim1=1, dim2=2) + la.sigma_noise**2
    normal = torch.distributions.Normal(mean, total.sqrt())
    return -normal.log_prob(y).sum(-1).mean()


# --- the restored posterior --------------------------------------------------------


def assert_is_fit_of(la, examples, before=None):
    """H, loss and n_data are the dense sums over the examples (and those before)."""
    reference = dense.Reference(examples, la.basis.vectors)
    H, loss, n = reference.H, reference.loss, len(examples.x)
    if before is not None:
        H, loss, n = H + before.H, loss + before.loss, n + before.n_data
    assert la.n_data == n
    assert_close(la.H, H)
    assert_close(torch.as_tensor(la.loss).double(), torch.as_tensor(loss).double())


@pytest.mark.parametrize(("every", "batch_size"), [(5, 5), (2, 5), (3, 4), (1, 12)])
def test_restored_equals_a_fit_on_the_prefix(case, every, batch_size):
    """H, loss and n_data are those of the prefix, also if it ends within a batch."""
    stopping = EarlyStopping(every=every, patience=FOREVER)
    la = stopped(case, stopping, case.loader(batch_size))
    assert la.n_data == best(la)["n_data"]
    assert_is_fit_of(la, prefix(case, la.n_data))


@pytest.mark.parametrize("n", [1, 4, 6, 9])
def test_every_prefix_can_be_restored(case, n):
    """Whichever checkpoint is best, inside a batch of five or at its end."""
    values = [1.0] * 20
    values[n - 1] = 0.5
    stopping = EarlyStopping(every=1, patience=FOREVER, loss=scripted(values))
    la = stopped(case, stopping)
    assert_is_fit_of(la, prefix(case, n))


def test_basis_is_that_of_all_data(case):
    """The directions come from the whole loader, however early the pass ends."""
    whole = fit(case, n_eigenvalues=5)
    la = stopped(
        case, EarlyStopping(every=2, patience=1, loss=scripted(itertools.count()))
    )
    assert la.n_data == 2
    assert_close(la.basis.vectors, whole.basis.vectors)
    assert_close(la.basis.eigenvalues, whole.basis.eigenvalues)
    assert la.basis.trace == pytest.approx(whole.basis.trace, rel=1e-12)
    assert la.basis.n_samples == whole.basis.n_samples


@both
def test_restored_predicts_as_a_fit_on_the_prefix(name):
    """Predictions, evidence and samples are those of a second fit on the prefix."""
    case = make(name)
    la = stopped(case, EarlyStopping(every=3, loss=scripted([3, 1, 2, 2])))
    other = build(case, n_eigenvalues=5)
    other.fit_basis(case.loader())
    assert other.n_data == 0
    other.fit(prefix(case, 6).loader(), override=False)
    assert la.n_data == other.n_data == 6
    for first, second in zip(
        _parts(la(case.x_test)), _parts(other(case.x_test)), strict=True
    ):
        assert_close(first, second)
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    assert_close(la.sample(3), other.sample(3))


def _parts(output):
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.parametrize(("every", "batch_size"), [(2, 3), (3, 3)])
def test_restored_without_override(case, every, batch_size):
    """With override=False the prefix is added to what was there, on its basis."""
    la = build(case, n_eigenvalues=5)
    la.fit(prefix(case, 4).loader())
    before = copy.copy(la)
    rest = prefix(case, None, skip=4)
    la.fit(
        rest.loader(batch_size),
        override=False,
        val_loader=validation(case),
        early_stopping=EarlyStopping(every=every, patience=FOREVER),
    )
    assert la.basis is before.basis
    assert all(4 < entry["n_data"] <= len(case.x) for entry in la.history)
    assert la.n_data == best(la)["n_data"]
    assert_is_fit_of(la, prefix(case, la.n_data, skip=4), before)


def test_first_fit_without_override(case):
    """override=False on an unfitted object is a plain fit."""
    la, other = build(case), build(case)
    options = {
        "val_loader": validation(case),
        "early_stopping": EarlyStopping(every=2),
    }
    la.fit(case.loader(), override=False, **options)
    other.fit(case.loader(), **options)
    assert la.n_data == other.n_data
    assert_close(la.H, other.H)


@both
def test_prefix_of_a_shuffled_loader(name):
    """The prefix is one of the order in which the loader yields its examples."""
    case = make(name)
    loader = recording(case, 5, shuffle=True)
    stopping = EarlyStopping(every=2, patience=1, loss=scripted([2, 1, 2]))
    la = stopped(case, stopping, loader)
    x, y = (torch.cat(parts) for parts in zip(*loader.batches, strict=True))
    assert not torch.equal(x, case.x[: len(x)])
    shuffled = copy.copy(case)
    shuffled.x, shuffled.y = x[:4], y[:4]
    assert_is_fit_of(la, shuffled)


@pytest.mark.parametrize("options", [{"complement": "prior"}, {"stochastic": 2}])
def test_other_posteriors_stop_too(options):
    """With the complement kept or a sampled curvature, the best entry is restored."""
    case = make(CLASSIFICATION)
    stopping = EarlyStopping(every=2, patience=FOREVER, link_approx="mc")
    la = stopped(case, stopping, **options)
    assert la.n_data == best(la)["n_data"]
    x, y = validation(case).dataset.tensors
    probs = la(x, link_approx="mc", n_samples=512)
    nll = torch.nn.functional.nll_loss(probs.log(), y).item()
    # The metric of the default loss sums in float32.
    assert nll == pytest.approx(best(la)["loss"], rel=1e-6)


def test_last_layer():
    """The last-layer class stops as well."""
    case = make(CLASSIFICATION)
    la = build(case, ELLALLLaplace, n_eigenvalues=5)
    la.fit(
        case.loader(),
        val_loader=validation(case),
        early_stopping=EarlyStopping(every=2, loss=scripted([3, 2, 1, 2, 2, 2])),
    )
    layer = copy.copy(case)
    layer.model = copy.deepcopy(case.model)
    for p in layer.model[:-1].parameters():
        p.requires_grad_(False)
    assert_is_fit_of(la, prefix(layer, 6))


# --- history -----------------------------------------------------------------------


@pytest.mark.parametrize("early_stopping", [None, False, "on"])
def test_history_is_the_loss_of_every_prefix(case, early_stopping):
    """Each entry is the validation loss of the dense posterior of that prefix."""
    loader = validation(case)
    stopping = EarlyStopping(every=3, patience=FOREVER, link_approx="probit")
    if early_stopping == "on":
        early_stopping = stopping
    la = build(case, n_eigenvalues=5)
    la.fit(case.loader(), val_loader=loader, early_stopping=early_stopping)
    n = len(case.x)
    if early_stopping is not stopping:  # the default settings start at 32 examples
        assert [entry["n_data"] for entry in la.history] == [n]
        return
    expected_n = [*range(3, n + 1, 3)] + [n] * (n % 3 > 0)
    assert [entry["n_data"] for entry in la.history] == expected_n
    for entry in la.history:
        expected = dense_loss(case, la, entry["n_data"], loader).item()
        # The metric of the default loss sums in float32.
        assert entry["loss"] == pytest.approx(expected, rel=1e-6)


@both
def test_best_loss_is_the_loss_of_the_predictions(name):
    """The smallest entry is what the restored posterior scores, by Monte Carlo too."""
    case = make(name)
    loader = validation(case)
    stopping = EarlyStopping(every=2, patience=FOREVER, link_approx="mc")
    la = stopped(case, stopping, val_loader=loader)
    x, y = loader.dataset.tensors
    if name == REGRESSION:
        mean, var = la(x)
        total = var.diagonal(dim1=1, dim2=2) + la.sigma_noise**2
        normal = torch.distributions.Normal(mean, total.sqrt())
        loss = -normal.log_prob(y).sum(-1).mean()
    else:
        probs = la(x, link_approx="mc", n_samples=512)
        loss = torch.nn.functional.nll_loss(probs.log(), y)
    assert loss.item() == pytest.approx(best(la)["loss"], rel=1e-6)


def test_history_is_of_the_last_fit():
    """A fit without validation data empties the history."""
    case = make(CLASSIFICATION)
    la = stopped(case, EarlyStopping(every=3))
    assert la.history
    la.fit(case.loader())
    assert la.history == []


@both
def test_validation_without_stopping_only_records(name):
    """A val_loader alone changes nothing of the fit."""
    case = make(name)
    plain, recorded = fit(case), build(case)
    recorded.fit(case.loader(), val_loader=validation(case))
    assert recorded.n_data == len(case.x)
    assert len(recorded.history) == 1
    assert_close(recorded.H, plain.H)
    assert_close(recorded.loss, plain.loss)


def test_validation_without_stopping_never_ends_early():
    """However bad the loss becomes, without early_stopping all data are added."""
    torch.manual_seed(1)
    case = make(CLASSIFICATION)
    case.x = torch.randn(400, 3).double()
    case.y = torch.randint(3, (400,))
    la = build(case)
    la.fit(case.loader(50), val_loader=validation(case))
    assert la.n_data == 400
    steps = [entry["n_data"] for entry in la.history]
    assert steps[0] == 32
    assert steps[-1] == 400
    growth = [b / a for a, b in itertools.pairwise(steps[:-1])]
    # Geometric with ratio 1.25, rounded up to whole examples.
    assert all(1.25 <= g <= 1.25 + 1 / 32 for g in growth)


# --- when it ends ------------------------------------------------------------------


@pytest.mark.parametrize("patience", [1, 2, 3])
@both
def test_patience_ends_the_pass(name, patience):
    """No batch is taken after `patience` checkpoints without a better one."""
    case = make(name)
    loader = recording(case, 1)
    loss = scripted([5, 3, 4, 2, *itertools.repeat(9, 20)])
    if patience == 1:  # 4 after 3 ends it already
        expected, taken = 2, 3
    else:
        expected, taken = 4, 4 + patience
    la = stopped(case, EarlyStopping(every=1, patience=patience, loss=loss), loader)
    assert la.n_data == expected
    assert loader.taken == taken
    assert len(la.history) == taken


def test_equal_losses_are_not_better():
    """A constant loss restores the first checkpoint and ends after the patience."""
    case = make(CLASSIFICATION)
    loader = recording(case, 2)
    stopping = EarlyStopping(every=2, patience=3, loss=lambda *args: 1.0)
    la = stopped(case, stopping, loader)
    assert la.n_data == 2
    assert loader.taken == 4


def test_waiting_starts_anew():
    """Every new best value resets the patience."""
    case = make(CLASSIFICATION)
    loader = recording(case, 1)
    values = [9, 10, 8, 10, 7, 10, 6, 10, 5, 10, 4, 10]
    la = stopped(
        case, EarlyStopping(every=1, patience=2, loss=scripted(values)), loader
    )
    assert la.n_data == 11
    assert loader.taken == 12


def test_whole_pass_if_the_loss_keeps_falling():
    """A loss that falls to the end keeps all data."""
    case = make(CLASSIFICATION)
    la = stopped(case, EarlyStopping(every=5, loss=scripted(itertools.count(0, -1))))
    assert la.n_data == len(case.x)
    assert [entry["n_data"] for entry in la.history] == [5, 10, 12]


def test_true_means_the_defaults():
    """early_stopping=True is EarlyStopping()."""
    torch.manual_seed(1)
    case = make(CLASSIFICATION)
    case.x = torch.randn(200, 3).double()
    case.y = torch.randint(3, (200,))
    first = stopped(case, True, case.loader(50))
    second = stopped(case, EarlyStopping(), case.loader(50))
    for a, b in zip(first.history, second.history, strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    assert_close(first.H, second.H)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 7}, [7, 14, 21, 28]),
        ({"start": 4, "growth": 2.0}, [4, 8, 16, 32]),
        ({}, [32, 40, 50, 63]),
        ({"start": 1, "growth": 1.01}, [1, 2, 3, 4]),
    ],
)
def test_checkpoints(options, expected):
    """Equidistant, or geometric and always increasing."""
    found = itertools.islice(EarlyStopping(**options).checkpoints(), 4)
    assert list(found) == expected


# --- losses ------------------------------------------------------------------------


def test_maximize():
    """With maximize=True the largest value is restored."""
    case = make(CLASSIFICATION)
    values = [1, 4, 2, 8, 5, 7]
    for maximize, n in ((False, 2), (True, 8)):
        stopping = EarlyStopping(
            every=2, patience=FOREVER, loss=scripted(values), maximize=maximize
        )
        assert stopped(case, stopping).n_data == n


@pytest.mark.parametrize("maximize", [False, True])
def test_undefined_losses_never_win(maximize):
    """A checkpoint whose loss is not a number is not the best one."""
    case = make(CLASSIFICATION)
    stopping = EarlyStopping(
        every=4, loss=scripted([1.0, float("nan"), 1.0]), maximize=maximize
    )
    assert stopped(case, stopping).n_data == 4


METRICS = {
    "accuracy": (torchmetrics.Accuracy, True),
    "ece": (torchmetrics.CalibrationError, False),
}


@pytest.mark.parametrize("name", METRICS)
def test_metric(name):
    """A metric is evaluated for every prefix; the caller's keeps its state."""
    case = make(CLASSIFICATION)
    kind, maximize = METRICS[name]
    metric = kind("multiclass", num_classes=3)
    metric.update(torch.eye(3), torch.tensor([0, 1, 1]))
    before = float(metric.compute())
    loader = validation(case)
    stopping = EarlyStopping(
        every=3, patience=FOREVER, loss=metric, maximize=maximize, link_approx="probit"
    )
    la = stopped(case, stopping, val_loader=loader)
    x, y = loader.dataset.tensors
    for entry in la.history:
        posterior = dense.Reference(prefix(case, entry["n_data"]), la.basis.vectors)
        fresh = kind("multiclass", num_classes=3)
        fresh.update(dense.probit(*posterior.predict(x, la.prior_precision)), y)
        # Metrics work in float32.
        assert entry["loss"] == pytest.approx(float(fresh.compute()), abs=1e-6)
    assert la.n_data == best(la, maximize)["n_data"]
    metric._computed = None
    assert float(metric.compute()) == before


def test_metric_of_regression():
    """A metric of means and targets alone works for regression."""
    case = make(REGRESSION)
    loader = validation(case)
    stopping = EarlyStopping(every=3, loss=torchmetrics.MeanSquaredError())
    la = stopped(case, stopping, val_loader=loader)
    x, y = loader.dataset.tensors
    expected = (case.model(x) - y).square().mean().item()
    assert [e["loss"] for e in la.history] == pytest.approx(
        [expected] * len(la.history), rel=1e-5
    )
    assert la.n_data == 3


@both
def test_callable_gets_everything_at_once(name):
    """Probabilities and targets, or means, covariances and targets, of all data."""
    case = make(name)
    shapes = set()

    def loss(*args):
        shapes.add(tuple(tuple(a.shape) for a in args))
        return args[1].sum() if name == REGRESSION else args[0][:, 0].mean()

    la = stopped(case, EarlyStopping(every=4, loss=loss, link_approx="bridge"))
    expected = {
        REGRESSION: ((24, 3), (24, 3, 3), (24, 3)),
        CLASSIFICATION: ((24, 3), (24,)),
    }[name]
    assert shapes == {expected}
    assert all(isinstance(entry["loss"], float) for entry in la.history)


def test_features_of_the_validation_data_are_computed_once():
    """Twelve checkpoints call the model on the validation data as often as one."""
    case = make(CLASSIFICATION)
    calls = []
    forward = case.model.forward

    def counted(x):
        calls[-1] += 1
        return forward(x)

    loader = validation(case)
    case.model.forward = counted
    for every in (12, 1):
        calls.append(0)
        la = build(case, n_eigenvalues=5, feature_mode="reverse", row_mode="vmap")
        la.fit(
            case.loader(12),
            val_loader=loader,
            early_stopping=EarlyStopping(every=every, patience=FOREVER),
        )
    assert calls[0] == calls[1]


# --- errors ------------------------------------------------------------------------


@pytest.mark.parametrize("early_stopping", [True, EarlyStopping(every=2)])
def test_needs_validation_data(early_stopping):
    """The error names both remedies and comes before the model is run."""
    case = make(CLASSIFICATION)
    case.model.forward = None
    with pytest.raises(ValueError, match=r"val_loader.*augmented_validation"):
        build(case).fit(case.loader(), early_stopping=early_stopping)


@pytest.mark.parametrize("early_stopping", ["yes", 5, EarlyStopping])
def test_settings_of_another_type(early_stopping):
    """Whatever is not a bool or EarlyStopping is refused by name."""
    case = make(CLASSIFICATION)
    with pytest.raises((TypeError, ValueError), match="early_stopping"):
        build(case).fit(
            case.loader(), val_loader=validation(case), early_stopping=early_stopping
        )


@pytest.mark.parametrize("name", ["every", "start", "patience", "n_samples"])
def test_settings_must_be_positive(name):
    """Each setting is refused by name."""
    with pytest.raises(ValueError, match=f"{name} .*0"):
        EarlyStopping(**{name: 0})


@pytest.mark.parametrize("growth", [1.0, 0.5, float("nan")])
def test_growth_must_exceed_one(growth):
    """Checkpoints that do not move on are refused."""
    with pytest.raises(ValueError, match="growth"):
        EarlyStopping(growth=growth)


def test_loss_must_be_callable():
    """A loss that cannot be called is refused by type."""
    case = make(CLASSIFICATION)
    with pytest.raises(TypeError, match=r"loss.*str"):
        stopped(case, EarlyStopping(loss="nll"))


def test_unknown_link():
    """An unknown link is refused with the known ones."""
    case = make(CLASSIFICATION)
    with pytest.raises(ValueError, match=r"link_approx.*probit"):
        stopped(case, EarlyStopping(every=2, link_approx="magic"))


def test_a_failing_loss_loses_nothing():
    """The posterior of the fit before is still there."""
    case = make(CLASSIFICATION)
    la = fit(case)
    H, basis = la.H.clone(), la.basis

    def broken(*args):
        raise RuntimeError("broken loss")

    with pytest.raises(RuntimeError, match="broken loss"):
        la.fit(
            prefix(case, 6).loader(),
            val_loader=validation(case),
            early_stopping=EarlyStopping(every=2, loss=broken),
        )
    assert la.basis is basis
    assert la.n_data == len(case.x)
    assert_close(la.H, H, rtol=0, atol=0)


# --- augmented validation data -----------------------------------------------------


def images(n=20, channels=3, size=8, **kwargs):
    g = torch.Generator().manual_seed(0)
    x = torch.rand(n, channels, size, size, generator=g)
    options = {"batch_size": 6} | kwargs
    return DataLoader(TensorDataset(x, torch.arange(n)), **options)


def tensors(loader):
    return tuple(torch.cat(parts) for parts in zip(*loader, strict=True))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("asked", "expected"), [(7, 7), (20, 20), (1000, 20)])
def test_augmented_shapes(channels, asked, expected):
    """As many images as asked for, as far as there are; shape and dtype are kept."""
    loader = augmented_validation(images(channels=channels), asked)
    x, y = tensors(loader)
    assert x.shape == (expected, channels, 8, 8)
    assert x.dtype == torch.float32
    assert torch.isfinite(x).all()
    assert y.shape == (expected,)
    assert len(set(y.tolist())) == expected


def test_augmented_is_deterministic():
    """The same seed gives the same data, at every pass; another seed others."""
    torch.manual_seed(1)
    loader = augmented_validation(images(), 12, seed=3)
    torch.manual_seed(2)
    again = augmented_validation(images(shuffle=True), 12, seed=3)
    other = augmented_validation(images(), 12, seed=4)
    for first, second in zip(tensors(loader), tensors(again), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(tensors(loader)[0], tensors(loader)[0])
    assert not torch.equal(tensors(loader)[0], tensors(other)[0])


def test_augmented_leaves_random_states():
    """No global random state, nor the loader's, is advanced."""
    loader = images(shuffle=True, generator=torch.Generator().manual_seed(5))

    def states():
        return (
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002
            random.getstate(),
            loader.generator.get_state().tolist(),
        )

    before = states()
    augmented_validation(loader, 10)
    assert states() == before


@pytest.mark.parametrize("strength", [0.2, 1.0])
def test_augmented_changes_the_images(strength):
    """Copies of one image come out different: each has a draw of its own."""
    x = torch.rand(1, 3, 32, 32).expand(20, -1, -1, -1)
    loader = DataLoader(TensorDataset(x, torch.arange(20)), batch_size=20)
    augmented, _ = tensors(augmented_validation(loader, strength=strength))
    assert len({image.sum().item() for image in augmented}) > 15
    # By chance a mild augmentation leaves one or the other as it was.
    assert sum(torch.equal(image, x[0]) for image in augmented) < 5


def test_augmented_by_a_callable():
    """A given augmentation gets batches of images, whose labels stay with them."""
    loader = images()
    x, _ = loader.dataset.tensors
    shapes = []

    def negate(batch):
        shapes.append(tuple(batch.shape))
        return -batch

    augmented, labels = tensors(augmented_validation(loader, 14, negate))
    assert torch.equal(augmented, -x[labels])
    assert shapes == [(6, 3, 8, 8), (6, 3, 8, 8), (2, 3, 8, 8)]


def test_augmented_takes_what_the_loader_yields():
    """Examples that the loader's sampler leaves out are left out."""
    sampler = torch.utils.data.SubsetRandomSampler([3, 5, 7, 11])
    _, labels = tensors(augmented_validation(images(sampler=sampler)))
    assert sorted(labels.tolist()) == [3, 5, 7, 11]


def test_augmented_data_can_stop_a_fit():
    """The result is a val_loader."""
    case = make("classification_cnn")
    la = ELLALaplace(case.model, "classification", n_eigenvalues=4)
    loader = case.loader()
    la.fit(
        loader,
        val_loader=augmented_validation(loader),
        early_stopping=EarlyStopping(every=2, patience=FOREVER),
    )
    assert len(la.history) == 6
    assert_is_fit_of(la, prefix(case, la.n_data))


@pytest.mark.parametrize("strength", [0.0, -0.1, 1.1, float("nan")])
def test_augmented_strength(strength):
    """The strength lies in (0, 1]."""
    with pytest.raises(ValueError, match="strength"):
        augmented_validation(images(), strength=strength)


@pytest.mark.parametrize("n_examples", [0, -1])
def test_augmented_number(n_examples):
    """At least one example must be asked for."""
    with pytest.raises(ValueError, match="n_examples"):
        augmented_validation(images(), n_examples)


def test_augmented_needs_images():
    """Other data are refused, with their shape."""
    case = make(CLASSIFICATION)
    with pytest.raises(ValueError, match=r"\(5, 3\)"):
        augmented_validation(case.loader())


def test_augmented_needs_a_loader():
    """A list of batches is refused by type."""
    with pytest.raises(TypeError, match="list"):
        augmented_validation([(torch.zeros(2, 3, 8, 8), torch.zeros(2))])
