"""Choosing softmax temperature, temperature and prior, or noise, together."""

import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import (
    BorderWarning,
    ELLALaplace,
    ELLALLLaplace,
    FeatureCache,
    metrics,
    temperature_scaling,
)
from laplace_ella.tuning.joint_calibration import USUAL_SHARE
from laplace_ella.tuning.softening import (
    NO_SHARE,
    Candidates,
    Softening,
    seen_variance,
    softened,
)
from tests import dense
from tests.cases import make, mlp
from tests.fitting import fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.BorderWarning")

SETTINGS = (
    "softmax_temperature",
    "temperature",
    "prior_precision",
    "sigma_noise",
)


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


def calibrated(digits, link="probit_centered", cls=ELLALaplace, n_samples=64, **kwargs):
    model, (train, val, test) = digits
    options = {"n_eigenvalues": 20, "subsample_size": 400} | kwargs
    la = cls(model, "classification", **options)
    la.fit(train)
    val, test = la.cache_features(val), la.cache_features(test)
    return la, la.optimize_calibration(val, link, n_samples), val, test


def loss(la, cache, link, n_samples=64):
    probs = la.predict_from_cache(cache, link_approx=link, n_samples=n_samples)
    return metrics.nll(probs, cache.targets)


# --- the coordinates -----------------------------------------------------------------


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("name", ["classification_mlp", "regression_3"])
def test_coordinates_mean_what_they_say(name, complement):
    """Share, scale and ratio of the posterior that they stand for, by dense algebra."""
    case = make(name)
    la = fit(case, complement=complement)
    validator = la._validator(
        la.posterior, case.loader(), None, "probit_centered", 1, False
    )
    candidates = Candidates.of(la.posterior, validator)
    point = Softening(scale=1.7, share=0.3, shape=(-0.4,))
    posterior = candidates.posterior_at(point)
    prior, factor = posterior.prior.item(), posterior.factor.item()
    assert math.log10(factor / prior) == pytest.approx(-0.4)

    reference = dense.Reference(case, la.basis.vectors)
    reference.factor = factor
    f, var = reference.predict(case.x, prior, complement)
    C = f.shape[-1]
    regression = case.likelihood == "regression"
    if regression:
        seen, unit = var.diagonal(dim1=1, dim2=2) / 0.4**2, 1.0
    else:
        centring = torch.eye(C).double() - 1 / C
        seen = (centring @ var @ centring).diagonal(dim1=1, dim2=2)
        unit = math.pi / 8
    v = seen.mean().item()
    assert unit * v == pytest.approx(0.3 * 1.7**2, rel=1e-6)
    assert point.base**2 + unit * v == pytest.approx(1.7**2, rel=1e-6)
    found = candidates.losses(point)
    if regression:
        noise = (0.4 * point.base) ** 2 + var.diagonal(dim1=1, dim2=2)
        normal = torch.distributions.Normal(f, noise.sqrt())
        expected = -normal.log_prob(case.y).sum(-1)
    else:
        probs = dense.centered_probit(f / point.base, var / point.base**2)
        expected = -probs.log().gather(1, case.y[:, None]).squeeze(1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("link", ["probit", "probit_centered", "mc"])
def test_no_share_is_temperature_scaling(digits, link):
    la, _, val, _ = calibrated(digits)
    validator = la._validator(la.posterior, val, None, link, 64, False)
    candidates = Candidates.of(la.posterior, validator)
    found = candidates.losses(Softening(1.9, NO_SHARE, (0.0,)))
    expected = metrics.nll_per_example((val.f_mu / 1.9).softmax(-1), val.targets)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.mean() == pytest.approx(expected.mean().item(), rel=1e-5)


def test_labels_see_every_variance():
    case = make("classification_mlp")
    case.y = torch.nn.functional.one_hot(case.y, 3)
    la = fit(case, multi_label=True)
    cache = la.cache_features(case.loader())
    values = la.posterior.function_values(cache.f_mu, cache.phi, cache.residual)
    assert torch.equal(seen_variance(values, la._observation), values.variance())
    assert softened(la._observation, 2.0).softmax_temperature == 2


# --- the choice ----------------------------------------------------------------------


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("link", ["probit", "probit_centered", "mc"])
def test_not_above_temperature_scaling(digits, link, complement):
    """Settings are set, and have the losses that the report says."""
    la, chosen, val, _ = calibrated(digits, link, complement=complement)
    tau = temperature_scaling(val.f_mu, val.targets)
    scaling = metrics.nll((val.f_mu / tau).softmax(-1), val.targets)
    assert chosen.scaling_loss == pytest.approx(scaling, rel=1e-5)
    assert chosen.map_loss == pytest.approx(
        metrics.nll(val.f_mu.softmax(-1), val.targets), rel=1e-4
    )
    assert loss(la, val, link) == pytest.approx(chosen.loss, rel=1e-4)
    assert chosen.loss <= scaling * (1 + 1e-5)
    assert (
        chosen.best_loss
        <= chosen.loss
        <= chosen.best_loss + max(chosen.standard_error, 1e-6)
    )
    assert la.softmax_temperature == chosen.softmax_temperature
    assert la.temperature == pytest.approx(chosen.temperature)
    assert la.prior_precision.item() == pytest.approx(chosen.prior_precision, rel=1e-5)


def test_no_better_setting_on_a_grid(digits):
    """Brute force over all three settings."""
    la, chosen, val, _ = calibrated(digits, "probit_centered", complement="prior")
    lowest = math.inf
    for la.softmax_temperature in (0.5, 1.0, 1.3, 1.6, 1.8, 2.0, 2.3):
        for la.temperature in (1e-2, 0.1, 1.0, 10.0, 100.0):
            for la.prior_precision in (1.0, 10.0, 30.0, 100.0, 300.0, 1e3, 1e4):
                lowest = min(lowest, loss(la, val, "probit_centered"))
    assert chosen.best_loss <= lowest + 1e-4 * abs(lowest)


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("link", ["probit", "probit_centered"])
def test_the_seed_of_the_basis_does_not_matter(digits, link, complement):
    """To one hundredth of the loss, on validation and test data."""
    runs = [
        calibrated(digits, link, seed=seed, complement=complement, n_eigenvalues=40)
        for seed in range(4)
    ]
    for which in (2, 3):
        losses = torch.tensor([loss(r[0], r[which], link) for r in runs])
        assert losses.max() / losses.min() < 1.01


def test_the_share_is_the_usual_one_where_data_do_not_object(digits):
    _, chosen, _, _ = calibrated(digits, "probit_centered", complement="prior")
    assert chosen.share == USUAL_SHARE
    assert chosen.borders == ()


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
    train, val = (
        DataLoader(TensorDataset(x[p], y[p]), 200)
        for p in (slice(0, 600), slice(600, None))
    )
    la = ELLALaplace(model, "classification", n_eigenvalues=20)
    la.fit(train)
    chosen = la.optimize_calibration(val, "probit_centered")
    effective = chosen.softmax_temperature / math.sqrt(1 - chosen.share)
    assert effective == pytest.approx(scale, rel=0.25)
    assert chosen.loss <= chosen.scaling_loss * (1 + 1e-5)


def test_last_layer_and_loaders(digits):
    model, (train, val, _) = digits
    la = ELLALLLaplace(model, "classification", n_eigenvalues=20)
    la.fit(train)
    chosen = la.optimize_calibration(val, "probit_centered")
    again = la.optimize_calibration(la.cache_features(val), "probit_centered")
    # The start does not depend on the settings so far.
    assert again.loss == pytest.approx(chosen.loss, rel=1e-4)
    assert again.prior_precision == pytest.approx(chosen.prior_precision, rel=1e-2)


def test_labels():
    """Multi-label targets, by the sigmoid."""
    g = torch.Generator().manual_seed(0)
    model = mlp(3, 8, 2)
    x = torch.randn(300, 3, generator=g)
    y = torch.bernoulli((model(x).detach() / 3).sigmoid(), generator=g)
    loader = DataLoader(TensorDataset(x, y), 100)
    la = ELLALaplace(model, "classification", n_eigenvalues=5, multi_label=True)
    la.fit(loader)
    chosen = la.optimize_calibration(loader, "probit")
    tau = temperature_scaling(model(x).detach(), y, multi_label=True)
    expected = metrics.bernoulli_nll((model(x).detach() / tau).sigmoid(), y)
    assert chosen.scaling_loss == pytest.approx(expected, rel=1e-4)
    assert chosen.loss <= expected * (1 + 1e-5)


# --- regression ----------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.05, torch.tensor([0.1, 3.0])])
def test_regression(sigma):
    """Noise, temperature and prior by the validation NLL, whatever the start."""
    g = torch.Generator().manual_seed(0)
    model = mlp(2, 16, 2)
    x = torch.randn(400, 2, generator=g)
    true = torch.tensor([0.2, 6.0]) if isinstance(sigma, torch.Tensor) else 0.3
    y = model(x).detach() + true * torch.randn(400, 2, generator=g)
    train, val = (
        DataLoader(TensorDataset(x[p], y[p]), 100)
        for p in (slice(0, 200), slice(200, None))
    )
    la = ELLALaplace(
        model, "regression", sigma_noise=sigma, n_eigenvalues=10, complement="drop"
    )
    la.fit(train)
    chosen = la.optimize_calibration(val)
    noise = torch.tensor(chosen.sigma_noise)
    torch.testing.assert_close(la.sigma_noise.reshape(-1), noise)
    total = noise / math.sqrt(1 - chosen.share)
    torch.testing.assert_close(
        total, torch.as_tensor(true).reshape(-1).float(), rtol=0.15, atol=0
    )
    cache = FeatureCache.from_loader(la, val)
    mean, var = la.predict_from_cache(cache, diagonal_output=True)
    found = metrics.gaussian_nll(mean, var + la.sigma_noise**2, cache.targets)
    assert found == pytest.approx(chosen.loss, rel=1e-4)
    assert chosen.loss <= chosen.scaling_loss + 1e-5 * abs(chosen.scaling_loss)
    assert chosen.softmax_temperature == 1


# --- borders and mistakes ------------------------------------------------------------


def test_borders_are_told(digits):
    """A posterior that only harms is given up, in so many words."""
    model, (train, val, _) = digits
    la = ELLALaplace(model, "classification", n_eigenvalues=20)
    la.fit(train)
    cache = la.cache_features(val)
    # The calibrated network's own labels: no posterior can help.
    tau = 2.0
    soft = (cache.f_mu / tau).softmax(-1)
    ideal = FeatureCache(cache.f_mu, cache.phi, soft, None, cache.spectrum)
    with pytest.warns(BorderWarning, match="ask for temperature scaling") as record:
        chosen = la.optimize_calibration(ideal, "probit_centered")
    assert [w.filename for w in record] == [__file__]
    assert chosen.borders == ("share",)
    assert chosen.softmax_temperature == pytest.approx(tau, rel=1e-3)
    assert chosen.loss == pytest.approx(chosen.scaling_loss, rel=1e-5)


def test_mistakes_change_nothing(digits):
    model, (train, val, _) = digits
    la = ELLALaplace(model, "classification", n_eigenvalues=5)
    la.fit_basis(train)
    before = [getattr(la, name) for name in SETTINGS]
    with pytest.raises(ValueError, match="curvature of no data"):
        la.optimize_calibration(val)
    la.fit(train)
    for bad in ({"link_approx": "nonsense"}, {"n_samples": 0}):
        with pytest.raises(ValueError, match="must be"):
            la.optimize_calibration(val, **bad)
    assert all(
        a is b for a, b in zip(before, (getattr(la, n) for n in SETTINGS), strict=True)
    )


def test_exact_targets_have_no_noise():
    case = make("regression_1")
    case.y = case.model(case.x).detach()
    la = fit(case)
    with pytest.raises(ValueError, match="meets all validation targets exactly"):
        la.optimize_calibration(case.loader())


# --- the precision outside the basis -------------------------------------------------


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


def test_coordinates_with_a_precision_outside_the_basis():
    """Variances in the basis and outside it scale together."""
    case = make("classification_mlp")
    la = fit(case, complement=1.0)
    validator = la._validator(
        la.posterior, case.loader(), None, "probit_centered", 1, False
    )
    candidates = Candidates.of(la.posterior, validator)
    point = Softening(scale=1.7, share=0.3, shape=(-0.4, 1.3))
    posterior = candidates.posterior_at(point)
    prior, factor = posterior.prior.item(), posterior.factor.item()
    assert posterior.complement / prior == pytest.approx(10**1.3)
    reference = dense.Reference(case, la.basis.vectors)
    reference.factor = factor
    V = la.basis.vectors
    outside = torch.eye(len(V), dtype=V.dtype) - V @ V.T
    Sigma = reference.covariance(prior) + outside / posterior.complement
    _, Js = dense.jacobians(case.model, case.x, case.params)
    centring = torch.eye(3).double() - 1 / 3
    seen = (centring @ dense.marginal(Js, Sigma) @ centring).diagonal(dim1=1, dim2=2)
    assert math.pi / 8 * seen.mean().item() == pytest.approx(0.3 * 1.7**2, rel=1e-6)
