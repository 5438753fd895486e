"""Temperature scaling, and all settings that calibrate chosen together."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import (
    ELLALaplace,
    ELLALLLaplace,
    FeatureCache,
    metrics,
    temperature_scaling,
)
from laplace_ella.errors import BorderWarning
from laplace_ella.tuning.calibration import USUAL_SHARE, choose, standard_errors
from tests.cases import make, mlp
from tests.fitting import fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.errors.BorderWarning")


@pytest.fixture(scope="module")
def overconfident():
    """Logits (300, 4) that are three times what the labels were drawn from."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    return 3 * logits, labels


def minimum(loss):
    """An independent search."""
    options = {"xatol": 1e-10}
    found = minimize_scalar(loss, bounds=(-6, 6), method="bounded", options=options)
    return math.exp(found.x)


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
def test_it_is_the_minimum_of_the_nll(overconfident, scale):
    logits, labels = scale * overconfident[0], overconfident[1]

    def loss(log_tau):
        z = logits.double() / math.exp(log_tau)
        return float(torch.nn.functional.cross_entropy(z, labels))

    given = logits.clone().requires_grad_()
    tau = temperature_scaling(given, labels)
    assert given.grad is None
    assert tau == pytest.approx(minimum(loss), rel=1e-5)
    assert temperature_scaling(logits, labels) == tau  # to the last digit
    shifted = temperature_scaling(logits.double() + 1e4, labels)
    assert shifted == pytest.approx(tau, rel=1e-6)


def test_every_kind_of_target(overconfident):
    logits, labels = overconfident
    expected = temperature_scaling(logits, labels)
    onehot = torch.nn.functional.one_hot(labels, 4).float()
    assert temperature_scaling(logits, onehot) == pytest.approx(expected)
    more = torch.cat([logits, 100 * torch.ones(5, 4)])
    padded = torch.cat([labels, torch.full((5,), -100)])
    assert temperature_scaling(more, padded) == pytest.approx(expected)
    # probabilities that the logits have at τ = 2 are met exactly there
    soft = torch.softmax(logits.double() / 2, -1)
    assert temperature_scaling(logits, soft) == pytest.approx(2, rel=1e-6)
    several = torch.bernoulli(torch.sigmoid(logits / 3))

    def loss(log_tau):
        p = torch.sigmoid(logits.double() / math.exp(log_tau))
        return float(metrics.bernoulli_nll_per_example(p, several).mean())

    tau = temperature_scaling(logits, several, multi_label=True)
    assert tau == pytest.approx(minimum(loss), rel=1e-4)
    assert temperature_scaling(torch.full((3, 2), 7.0), torch.tensor([0, 1, 1])) == 1.0


def test_borders_warn_with_the_value():
    logits = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    with pytest.warns(BorderWarning, match=r"0\.001, the border"):
        assert temperature_scaling(logits, torch.tensor([0, 1])) == 1e-3
    with pytest.warns(BorderWarning, match="1000, the border"):
        assert temperature_scaling(logits, torch.tensor([1, 0])) == 1e3


LOGITS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("logits", "targets", "multi_label", "match"),
    [
        (LOGITS[0], torch.tensor([0]), False, r"numbers \(N, C\), got .* \(2,\)"),
        (LOGITS.long(), torch.tensor([0, 1]), False, r"got torch\.int64"),
        (LOGITS, torch.tensor([0]), False, r"got shape \(1,\)"),
        (LOGITS, torch.tensor([0, 1]), True, r"targets must have the shape .*\(2, 2\)"),
        (LOGITS, torch.tensor([0.0, 1.0]), False, "must be class indices"),
        (LOGITS, torch.tensor([0, 2]), False, r"lie in 0\.\.1"),
        (LOGITS * math.nan, torch.tensor([0, 1]), False, "2 of 2 examples are NaN"),
        (LOGITS, LOGITS * math.nan, False, "4 of 4 target values are NaN"),
        (LOGITS, torch.ones(2, 2), False, "must sum to one"),
        (LOGITS[:0], torch.tensor([], dtype=torch.long), False, "at least one"),
        (LOGITS, torch.tensor([-100, -100]), False, "at least one observed"),
    ],
)
def test_mistakes_say_what_came(logits, targets, multi_label, match):
    with pytest.raises(ValueError, match=match):
        temperature_scaling(logits, targets, multi_label=multi_label)


def test_standard_errors():
    """Of paired differences, with the example unseen as one more of them."""
    losses = torch.tensor([[0.1, 0.2, 0.4], [0.2, 0.1, 0.9]])
    errors = standard_errors(losses, 0, torch.tensor([2.0, 3.0]))
    more = torch.cat([losses[1] - losses[0], torch.ones(1)])
    torch.testing.assert_close(errors[1], more.std() / 2)


def test_the_rule():
    """The lowest key of what is as good as the best, never what is clearly worse."""
    losses = torch.tensor([0.30, 0.31, 0.31, 0.31, 0.9]).unsqueeze(-1).repeat(1, 8)
    noise = 0.1 * torch.randn(5, 8)
    losses = losses + noise - noise.mean(1, keepdim=True)
    unseen, keys = losses.mean(1), [(0.7, 0), (0.1, 0), (0, 0.9), (0, 0.3), (0, 0)]
    assert choose(losses, unseen, keys) == 3
    assert choose(losses, unseen, keys, at_most=0.1) == int(losses.mean(1).argmin())
    with pytest.raises(ValueError, match="infinite for all 5 settings"):
        choose(losses * math.nan, unseen, keys)


@pytest.fixture(scope="module")
def digits():
    """A small network that is too sure of noisy digits, and loaders of three parts."""
    data = load_digits()
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data.data), generator=g)
    x = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    x = x + 0.25 * torch.randn(x.shape, generator=g)
    y = torch.tensor(data.target)[order]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(64, 32, 10)
        optimizer = torch.optim.Adam(model.parameters(), 5e-3)
        for _ in range(300):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[:500]), y[:500]).backward()
            optimizer.step()
    parts = (slice(0, 500), slice(500, 800), slice(800, None))
    return model, [DataLoader(TensorDataset(x[p], y[p]), 100) for p in parts]


def fitted(digits, cls=ELLALaplace, **kwargs):
    model, (train, _, _) = digits
    options = {"n_eigenvalues": 20, "subsample_size": 400} | kwargs
    la = cls(model, "classification", **options)
    la.fit(train)
    return la


def calibrated(digits, link="probit_centered", n_samples=64, **kwargs):
    la = fitted(digits, **kwargs)
    val, test = (la.cache_features(loader) for loader in digits[1][1:])
    return la, la.optimize_calibration(val, link, n_samples), val, test


def loss(la, cache, link, n_samples=64):
    probs = la.predict_from_cache(cache, link_approx=link, n_samples=n_samples)
    return metrics.nll(probs, cache.targets)


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("link", ["probit", "probit_centered", "mc"])
def test_not_above_temperature_scaling(digits, link, complement):
    """Settings are set, and have the losses that the report says."""
    la, chosen, val, _ = calibrated(digits, link, complement=complement)
    tau = temperature_scaling(val.f_mu, val.targets)
    scaling = metrics.nll((val.f_mu / tau).softmax(-1), val.targets)
    assert chosen.scaling_loss == pytest.approx(scaling, rel=1e-5)
    expected = metrics.nll(val.f_mu.softmax(-1), val.targets)
    assert chosen.map_loss == pytest.approx(expected, rel=1e-4)
    assert loss(la, val, link) == pytest.approx(chosen.loss, rel=1e-4)
    assert chosen.loss <= scaling * (1 + 1e-5)
    assert chosen.best_loss <= chosen.loss
    assert chosen.loss <= chosen.best_loss + max(chosen.standard_error, 1e-6)
    assert la.softmax_temperature == chosen.softmax_temperature
    assert la.temperature == pytest.approx(chosen.temperature)
    assert la.prior_precision.item() == pytest.approx(chosen.prior_precision, rel=1e-5)
    assert not chosen.kept


def test_no_better_setting_on_a_grid(digits):
    """Brute force over all three settings; the share is the usual one."""
    la, chosen, val, _ = calibrated(digits, complement="prior")
    assert chosen.share == USUAL_SHARE
    assert set(chosen.borders) <= {"ratio"}  # beyond it is the shape of the prior
    lowest = math.inf
    for la.softmax_temperature in (1.0, 1.3, 1.6, 1.8, 2.0, 2.3):
        for la.temperature in (1e-2, 0.1, 1.0, 10.0, 100.0):
            for la.prior_precision in (1.0, 10.0, 30.0, 100.0, 300.0, 1e3, 1e4):
                lowest = min(lowest, loss(la, val, "probit_centered"))
    assert chosen.best_loss <= lowest + 1e-4 * abs(lowest)


@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_the_seed_of_the_basis_does_not_matter(digits, complement):
    """To one hundredth of the loss, on validation and test data."""
    kwargs = {"complement": complement, "n_eigenvalues": 40}
    runs = [calibrated(digits, seed=seed, **kwargs) for seed in range(3)]
    for which in (2, 3):
        losses = [loss(r[0], r[which], "probit_centered") for r in runs]
        assert max(losses) / min(losses) < 1.01


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_under_and_overconfident_networks(scale):
    """Labels drawn from softmax(f): τ and posterior find the scale of the logits."""
    g = torch.Generator().manual_seed(1)
    model = mlp(5, 16, 4)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g) / 2
    x = torch.randn(1200, 5, generator=g)
    y = torch.multinomial(model(x).detach().softmax(-1), 1, generator=g).squeeze(1)
    model[-1].weight.data *= scale
    model[-1].bias.data *= scale
    train, val = (DataLoader(TensorDataset(x[p::2], y[p::2]), 200) for p in (0, 1))
    la = ELLALaplace(model, "classification", n_eigenvalues=20)
    la.fit(train)
    chosen = la.optimize_calibration(val, "probit_centered")
    effective = chosen.softmax_temperature / math.sqrt(1 - chosen.share)
    assert effective == pytest.approx(scale, rel=0.25)
    # A network that is too modest is sharpened no more than the data insist on.
    slack = 0 if scale > 1 else chosen.standard_error + 0.02
    assert chosen.loss <= chosen.scaling_loss * (1 + 1e-5) + slack


def test_last_layer_and_loaders(digits):
    la, val = fitted(digits, ELLALLLaplace), digits[1][1]
    chosen = la.optimize_calibration(val, "probit_centered")
    again = la.optimize_calibration(la.cache_features(val), "probit_centered")
    assert again.loss == pytest.approx(chosen.loss, rel=1e-4)
    assert again.prior_precision == pytest.approx(chosen.prior_precision, rel=1e-2)


def test_labels():
    model, x = mlp(3, 8, 2), torch.randn(300, 3)
    f = model(x).detach()
    y = torch.bernoulli((f / 3).sigmoid())
    loader = DataLoader(TensorDataset(x, y), 100)
    la = ELLALaplace(model, "classification", n_eigenvalues=5, multi_label=True)
    la.fit(loader)
    chosen = la.optimize_calibration(loader)
    tau = temperature_scaling(f, y, multi_label=True)
    expected = metrics.bernoulli_nll_per_example((f / tau).sigmoid(), y).mean()
    assert chosen.scaling_loss == pytest.approx(float(expected), rel=1e-4)
    assert chosen.loss <= chosen.scaling_loss * (1 + 1e-5)


@pytest.mark.parametrize("sigma", [0.05, torch.tensor([0.1, 3.0])])
def test_regression(sigma):
    """Noise, temperature and prior by the validation NLL, whatever the start."""
    model, x = mlp(2, 16, 2), torch.randn(400, 2)
    true = torch.tensor([0.2, 6.0]) if isinstance(sigma, torch.Tensor) else 0.3
    y = model(x).detach() + true * torch.randn(400, 2)
    train, val = (DataLoader(TensorDataset(x[p::2], y[p::2]), 100) for p in (0, 1))
    options = {"sigma_noise": sigma, "n_eigenvalues": 10, "complement": "drop"}
    la = ELLALaplace(model, "regression", **options)
    la.fit(train)
    chosen = la.optimize_calibration(val)
    noise = torch.tensor(chosen.sigma_noise)
    torch.testing.assert_close(la.sigma_noise.reshape(-1), noise)
    total = noise / math.sqrt(1 - chosen.share)
    expected = torch.as_tensor(true).reshape(-1).float()
    torch.testing.assert_close(total, expected, rtol=0.15, atol=0)
    cache = FeatureCache.from_loader(la, val)
    mean, var = la.predict_from_cache(cache, diagonal_output=True)
    found = metrics.gaussian_nll(mean, var + la.sigma_noise**2, cache.targets)
    assert found == pytest.approx(chosen.loss, rel=1e-4)
    assert chosen.loss <= chosen.scaling_loss + 1e-5 * abs(chosen.scaling_loss)
    assert chosen.softmax_temperature == 1


def test_precision_outside_the_basis_is_chosen_too(digits):
    """It becomes the complement, its losses are those of predictions, and one more
    setting is not worse on the validation data than fewer by more than their noise."""
    la, plain, val, _ = calibrated(digits, complement="prior")
    chosen = la.optimize_calibration(val, "probit_centered", tune_complement=True)
    assert plain.complement is None
    assert la.complement == chosen.complement > 0
    assert loss(la, val, "probit_centered") == pytest.approx(chosen.loss, rel=1e-4)
    assert chosen.best_loss <= plain.best_loss + plain.standard_error
    assert chosen.loss <= chosen.scaling_loss * (1 + 1e-5)
    again = la.optimize_calibration(val, "probit_centered")  # a number is chosen anew
    assert again.complement == pytest.approx(chosen.complement, rel=1e-3)


def of_class(cache, n, right):
    """Positions of the first n examples that the network gets right, or wrong."""
    chosen = (cache.f_mu.argmax(-1) == cache.targets) == right
    return chosen.nonzero().squeeze(1)[:n]


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_sixteen_examples_that_are_all_right_change_nothing(digits, link):
    """τ would run to .001; the settings are kept, with a warning that says so."""
    la = fitted(digits, prior_precision=7.0, temperature=3.0)
    la.softmax_temperature = 1.4
    val, test = (la.cache_features(loader) for loader in digits[1][1:])
    val = val[of_class(val, 16, True)]
    before = loss(la, test, link)
    with pytest.warns(BorderWarning, match="16 validation examples cannot tell") as got:
        chosen = la.optimize_calibration(val, link)
    assert [w.filename for w in got] == [__file__]
    assert chosen.kept
    assert chosen.borders == ("temperature",)
    assert (la.softmax_temperature, la.temperature) == (1.4, 3.0)
    assert (chosen.softmax_temperature, chosen.temperature) == (1.4, 3.0)
    assert float(la.prior_precision) == chosen.prior_precision == 7.0
    assert loss(la, test, link) == before
    assert chosen.loss == pytest.approx(loss(la, val, link, 100), rel=1e-4)


def test_few_examples_do_not_sharpen(digits):
    """Nearly all are right: the predictions become no surer than the network's."""
    la = fitted(digits)
    all_, test = (la.cache_features(loader) for loader in digits[1][1:])
    for n_wrong in (0, 1):
        right, wrong = of_class(all_, 40, True), of_class(all_, n_wrong, False)
        val = all_[torch.cat([right, wrong])]
        chosen = la.optimize_calibration(val)
        scale = chosen.softmax_temperature / math.sqrt(1 - min(chosen.share, 0.99))
        assert scale >= 1 or chosen.kept
        network = metrics.nll(test.f_mu.softmax(-1), test.targets)
        assert loss(la, test, "probit") <= 1.05 * network


def test_a_posterior_that_only_harms_is_given_up(digits):
    la = fitted(digits)
    cache = la.cache_features(digits[1][1])
    # The calibrated network's own labels: no posterior can help.
    soft = (cache.f_mu / 2.0).softmax(-1)
    ideal = FeatureCache(cache.f_mu, cache.phi, soft, None, cache.spectrum)
    with pytest.warns(BorderWarning, match="ask for temperature scaling") as record:
        chosen = la.optimize_calibration(ideal, "probit_centered")
    assert [w.filename for w in record] == [__file__]
    assert chosen.borders == ("share",)
    assert chosen.softmax_temperature == pytest.approx(2.0, rel=1e-3)
    assert chosen.loss == pytest.approx(chosen.scaling_loss, rel=1e-5)


def test_mistakes_change_nothing(digits):
    model, (train, val, _) = digits
    la = ELLALaplace(model, "classification", n_eigenvalues=5)
    names = ("softmax_temperature", "temperature", "prior_precision", "sigma_noise")
    before = [getattr(la, name) for name in names]
    la.fit_basis(train)
    with pytest.raises(ValueError, match="curvature of no data"):
        la.optimize_calibration(val)
    la.fit(train)
    for bad in ({"link_approx": "nonsense"}, {"n_samples": 0}):
        with pytest.raises(ValueError, match="must be"):
            la.optimize_calibration(val, **bad)
    after = [getattr(la, name) for name in names]
    assert all(a is b for a, b in zip(before, after, strict=True))
    case = make("regression_1")
    case.y = case.model(case.x).detach()
    with pytest.raises(ValueError, match="meets all validation targets exactly"):
        fit(case).optimize_calibration(case.loader())
