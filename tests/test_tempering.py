"""Tempering: Laplace's `temperature`, and choosing it on validation data."""

import copy
import math

import pytest
import torch
import torchmetrics
from laplace import FullLaplace
from laplace.utils.enums import LinkApprox
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace, ELLALLLaplace, FeatureCache
from laplace_ella.tuning.eigenbasis import EigenPosterior
from laplace_ella.tuning.search import VALLEY
from laplace_ella.tuning.validation import Validator
from tests import dense
from tests.cases import PRIORS, Case, make, mlp, priors
from tests.fitting import assert_close, fit

LIKELIHOODS = ("classification", "regression")
TEMPERATURES = (0.2, 1.0, 7.5)
LOG_GRID = torch.linspace(-2, 2.5, 91, dtype=torch.float64)
"""log10 of the temperatures of the brute-force curves, 0.05 apart."""


def problem(likelihood):
    """A network that is too sure of itself, with N·C well above P."""
    g = torch.Generator().manual_seed(5)
    model = mlp(2, 4, 3).double().eval()
    for p in model.parameters():
        p.data = 2.5 * torch.randn(p.shape, generator=g).double()
    x = torch.randn(60, 2, generator=g).double()
    x_test = 1.5 * torch.randn(80, 2, generator=g).double()
    y, kwargs = _targets(model, x, likelihood, g), {}
    if likelihood == "regression":
        kwargs = {"sigma_noise": 0.3}
    return Case(model, likelihood, x, y, x_test, kwargs)


def _targets(model, x, likelihood, generator):
    f = model(x).detach()
    if likelihood == "regression":
        return f + 0.5 * torch.randn(f.shape, generator=generator).double()
    y = torch.multinomial((f / 1.5).softmax(-1), 1, generator=generator)
    return y.squeeze(1)


def validation(case, batch_size=30):
    g = torch.Generator().manual_seed(6)
    y = _targets(case.model, case.x_test, case.likelihood, g)
    return DataLoader(TensorDataset(case.x_test, y), batch_size=batch_size)


def nll(case, prediction, y, sigma):
    """Mean negative log likelihood of a predictive."""
    if case.likelihood == "classification":
        return torch.nn.functional.nll_loss(prediction.log(), y).item()
    mean, var = prediction
    scale = (var.diagonal(dim1=1, dim2=2) + sigma**2).sqrt()
    return -torch.distributions.Normal(mean, scale).log_prob(y).sum(-1).mean().item()


class Curve:
    """The validation loss as a function of temperature and prior, by dense algebra."""

    def __init__(self, case, la, loader):
        self.case, self.sigma = case, la.sigma_noise
        self.prior = la.prior_precision.clone()
        self.x, self.y = loader.dataset.tensors
        self.f, self.Js = dense.jacobians(case.model, self.x, case.params)
        self.reference = dense.Reference(case, la.basis.vectors, la.sigma_noise)
        self.complement = la.complement.value

    def __call__(self, temperature, prior=None):
        prior = self.prior if prior is None else prior
        reference = copy.copy(self.reference)
        reference.factor = self.reference.factor / temperature
        Sigma = reference.covariance(prior, self.complement)
        var = dense.marginal(self.Js, Sigma)
        if self.case.likelihood == "classification":
            return nll(self.case, dense.probit(self.f, var), self.y, self.sigma)
        return nll(self.case, (self.f, var), self.y, self.sigma)

    def values(self):
        return torch.tensor([self(10**t) for t in LOG_GRID])


@pytest.fixture(autouse=True)
def _double():
    """The curvature backends of laplace-torch make constants in the default dtype."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture(params=LIKELIHOODS)
def case(request):
    return problem(request.param)


# --- the temperature ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("structure", PRIORS)
def test_dense_formula(case, structure, temperature):
    """G = H/(σ²T) + VᵀDV, set at any time, in the constructor or after a fit."""
    prior, x = priors(case)[structure], case.x_test[:6]
    given = fit(case, prior_precision=prior, temperature=temperature)
    later = fit(case, prior_precision=prior)
    later(x)  # a posterior that must not be used again
    later.temperature = temperature
    for la in (given, later):
        reference = dense.Reference(case, la.basis.vectors, la.sigma_noise, temperature)
        assert_close(la.posterior_precision, reference.precision(prior))
        mean, var = reference.predict(x, prior)
        Js = dense.jacobians(case.model, x)[1]
        assert_close(la.functional_variance(Js), var)
        assert_close(la.log_marginal_likelihood(), reference.evidence(prior))
        if case.likelihood == "classification":
            assert_close(la(x), dense.probit(mean, var))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("structure", PRIORS)
def test_equals_full_laplace(case, structure, temperature):
    """At full rank a temperature does what it does in laplace-torch."""
    x = case.x_test[:6]
    options = {"prior_precision": priors(case)[structure], "temperature": temperature}
    exact = FullLaplace(case.model, case.likelihood, **(case.kwargs | options))
    exact.fit(case.loader(20))
    la = fit(case, n_eigenvalues=exact.n_params, **options)
    assert la.rank == exact.n_params
    Js = dense.jacobians(case.model, x)[1]
    # Precisions of condition 1e4 and more, in other coordinates.
    close = {"rtol": 1e-6, "atol": 1e-9}
    assert_close(la.functional_variance(Js), exact.functional_variance(Js), **close)
    V = la.basis.vectors
    assert_close(V @ la.posterior_precision @ V.T, exact.posterior_precision, **close)
    assert_close(la.log_marginal_likelihood(), exact.log_marginal_likelihood(), **close)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_effective_n_data(case, temperature):
    """N/T: the curvature is that of the mean over the data, times this number."""
    la = fit(case, temperature=temperature)
    assert la.effective_n_data == pytest.approx(60 / temperature)
    reference = dense.Reference(case, la.basis.vectors)
    mean_curvature = reference.H / 60 / la.sigma_noise**2
    eye = torch.eye(la.rank)
    expected = la.effective_n_data * mean_curvature + la.prior_precision * eye
    assert_close(la.posterior_precision, expected)


def test_tempering_to_a_prefix(case):
    """Doubling the data and the temperature changes nothing."""
    twice = copy.copy(case)
    twice.x, twice.y = case.x.repeat(2, 1), torch.cat([case.y, case.y])
    la = fit(case)
    la.fit(case.loader(), override=False)
    assert la.n_data == 120
    la.temperature = 2.0
    once = fit(case)
    assert la.effective_n_data == once.effective_n_data
    assert_close(la.posterior_precision, once.posterior_precision)


# --- its choice --------------------------------------------------------------------


INNER = {
    ("classification", "drop"): 0.2,
    ("classification", "prior"): 0.2,
    ("regression", "drop"): 1.0,
    ("regression", "prior"): 10.0,
}
"""Prior precisions with which the loss has an inner minimum in the temperature."""


@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_finds_the_minimum_of_the_curve(case, complement):
    """No temperature of a fine grid has a lower loss; the minimum is an inner one."""
    prior = INNER[case.likelihood, complement]
    la = fit(case, complement=complement, prior_precision=prior)
    loader = validation(case)
    curve = Curve(case, la, loader)
    values = curve.values()
    best = int(values.argmin())
    assert 0 < best < len(values) - 1
    assert la.optimize_temperature(loader, link_approx="probit") is None
    # Located to 1e-3 in log10(T); the loss is stationary there, so it is right to
    # about 1e-6, the accuracy of a metric in float32.
    assert curve(la.temperature) <= values.min() + 2e-6
    found = torch.tensor(la.temperature).log10()
    assert abs(found - LOG_GRID[best]) <= LOG_GRID[1] - LOG_GRID[0]
    assert la.effective_n_data == pytest.approx(60 / la.temperature)


@pytest.mark.parametrize("structure", PRIORS)
def test_keeps_the_prior(case, structure):
    """With any structure of the prior the minimum is found, and the prior kept."""
    prior = priors(case)[structure]
    la, loader = fit(case, prior_precision=prior), validation(case)
    curve = Curve(case, la, loader)
    la.optimize_temperature(loader, link_approx="probit")
    assert curve(la.temperature) <= curve.values().min() + 2e-6
    assert_close(la.prior_precision, prior)


@pytest.mark.parametrize("link", ["mc", "bridge", "bridge_norm"])
def test_finds_the_minimum_for_every_link(link):
    """The loss that is minimised is that of the predictions with this link."""
    case = problem("classification")
    la, loader = fit(case), validation(case)
    y = loader.dataset.tensors[1]
    options = {"link_approx": link, "n_samples": 64}
    cache = FeatureCache.from_loader(la, loader)

    def loss(temperature):
        la.temperature = float(temperature)
        return nll(case, la.predict_from_cache(cache, **options), y, None)

    values = torch.tensor([loss(10**t) for t in LOG_GRID])
    la.temperature = 1.0
    la.optimize_temperature(loader, **options)
    assert loss(la.temperature) <= values.min() + 2e-6


@pytest.mark.parametrize("link", ["mc", "probit", "bridge"])
@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("rank", [2, 9])
def test_searches_see_the_loss_of_predictions(rank, complement, link):
    """For any factor and prior, also in the eigenbasis of the curvature."""
    case = problem("classification")
    la = fit(case, n_eigenvalues=rank, complement=complement)
    loader = validation(case)
    y = loader.dataset.tensors[1]
    cache = FeatureCache.from_loader(la, loader)
    observation = la.fitter.observation
    validator = Validator(
        cache,
        observation.default_loss(),
        observation,
        LinkApprox(link),
        32,
        la.fitter.fresh_generator,
    )
    posterior, cheap = validator.for_scalars(la.posterior)
    assert isinstance(posterior, EigenPosterior) == (rank > 3)
    for temperature, prior in ((1.0, 1.0), (0.05, 30.0), (40.0, 0.02)):
        candidate = posterior.with_(
            factor=posterior.factor / temperature, prior=torch.tensor([prior])
        )
        la.temperature, la.prior_precision = temperature, prior
        probs = la.predict_from_cache(cache, link_approx=link, n_samples=32)
        assert cheap(candidate) == pytest.approx(nll(case, probs, y, None), rel=1e-9)


@pytest.mark.parametrize("rank", [5, 20])
def test_monte_carlo_is_smooth(rank):
    """Sampled predictions have no jumps as functions of the temperature.

    Otherwise a search follows the noise. With fewer and more directions than outputs.
    """
    g = torch.Generator().manual_seed(0)
    model = mlp(4, 12, 10).double()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g).double()
    x = torch.randn(40, 4, generator=g).double()
    y = torch.randint(10, (40,), generator=g)
    case = Case(model, "classification", x, y, x[:6])
    la = fit(case, n_eigenvalues=rank, feature_mode="reverse")
    cache = FeatureCache.from_loader(la, case.loader())[:6]

    def largest_step(n):
        probs = []
        for temperature in torch.logspace(-2, 2, n):
            la.temperature = temperature.item()
            probs.append(la.predict_from_cache(cache, link_approx="mc", n_samples=32))
        return torch.stack(probs).diff(dim=0).abs().max().item()

    # An eighth of the step gives about an eighth of the change; a jump stays.
    assert largest_step(161) < largest_step(21) / 3


@pytest.mark.parametrize("start", [0.01, 30.0])
def test_start_does_not_matter(case, start):
    """The temperature before the search does not change its result."""
    loader = validation(case)
    found = []
    for temperature in (1.0, start):
        la = fit(case, temperature=temperature)
        la.optimize_temperature(loader, link_approx="probit")
        found.append(la.temperature)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_deterministic_and_undisturbing(case):
    """Twice the same temperature by Monte Carlo, with the random state untouched."""
    la, loader = fit(case), validation(case)
    la.optimize_temperature(loader, n_samples=32)
    first = la.temperature
    torch.manual_seed(9)
    before = torch.get_rng_state()
    la.optimize_temperature(loader, n_samples=32)
    assert la.temperature == first
    assert torch.equal(torch.get_rng_state(), before)


def test_only_the_temperature_changes(case):
    """Basis, curvature, noise and number of data stay as they were fitted."""
    la = fit(case)
    H, n, sigma, basis = la.H.clone(), la.n_data, la.sigma_noise.clone(), la.basis
    la.optimize_temperature(validation(case), tune_prior=True, link_approx="probit")
    assert_close(la.H, H, rtol=0, atol=0)
    assert la.n_data == n
    assert la.basis is basis
    assert_close(la.sigma_noise, sigma, rtol=0, atol=0)


@pytest.mark.parametrize("tune_prior", [False, True])
def test_accepts_a_feature_cache(case, tune_prior):
    """Cached features give the same result without calling the model."""
    la, loader = fit(case), validation(case)
    options = {"link_approx": "probit", "tune_prior": tune_prior}
    la.optimize_temperature(loader, **options)
    expected = la.temperature, la.prior_precision
    la.temperature, la.prior_precision = 1.0, 1.0
    cache = FeatureCache.from_loader(la, loader)
    case.model.forward = None
    la.optimize_temperature(cache, **options)
    assert la.temperature == pytest.approx(expected[0], rel=1e-6)
    assert_close(la.prior_precision, expected[1], rtol=1e-6)


def test_batches_do_not_matter(case):
    """The batch size of the validation loader does not change the result."""
    found = []
    for batch_size in (7, 80):
        la = fit(case)
        la.optimize_temperature(validation(case, batch_size), link_approx="probit")
        found.append(la.temperature)
    # The metric of the default loss sums in float32, batch by batch.
    assert found[0] == pytest.approx(found[1], rel=5e-3)


def test_last_layer(case):
    """The last-layer class is tempered as well."""
    la, loader = fit(case, ELLALLLaplace), validation(case)
    y = loader.dataset.tensors[1]
    cache = FeatureCache.from_loader(la, loader)

    def loss(temperature):
        la.temperature = float(temperature)
        prediction = la.predict_from_cache(cache)
        return nll(case, prediction, y, la.sigma_noise)

    values = torch.tensor([loss(10**t) for t in LOG_GRID])
    la.optimize_temperature(loader, link_approx="probit")
    assert loss(la.temperature) <= values.min() + 2e-6


# --- with the prior ----------------------------------------------------------------


@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_with_the_prior_beats_a_grid(case, complement):
    """Tuned together they are at least as good as a brute-force grid of both."""
    la, loader = fit(case, complement=complement), validation(case)
    curve = Curve(case, la, loader)
    temperatures = torch.logspace(-2, 2.5, 19)
    values = [
        [curve(t, prior) for t in temperatures] for prior in torch.logspace(-2, 4, 19)
    ]
    la.optimize_temperature(loader, link_approx="probit", tune_prior=True)
    assert la.prior_precision.shape == (1,)
    assert not la.prior_precision.requires_grad
    found = curve(la.temperature, la.prior_precision)
    lowest = torch.tensor(values).min()
    assert found <= lowest + 1.01 * VALLEY * abs(lowest)


def test_with_the_prior_is_not_worse_than_without(case):
    """Two numbers can be chosen at least as well as one."""
    la, loader = fit(case), validation(case)
    curve = Curve(case, la, loader)
    la.optimize_temperature(loader, link_approx="probit")
    one = curve(la.temperature)
    la.optimize_temperature(loader, link_approx="probit", tune_prior=True)
    both = curve(la.temperature, la.prior_precision)
    assert both <= one + 1.01 * VALLEY * abs(one)


def test_in_a_flat_valley_the_temperature_stays_near_one(case):
    """Of settings that are equally good no other grid point is a decade nearer to 1."""
    la, loader = fit(case, n_eigenvalues=1), validation(case)
    curve = Curve(case, la, loader)
    grid = torch.linspace(-2, 2.5, 10)
    table = torch.tensor(
        [[curve(10**t, 10**p) for p in torch.linspace(-2, 4, 25)] for t in grid]
    )
    enough = table.min() + 0.5 * VALLEY * abs(table.min())
    nearest = grid[(table <= enough).any(1)].abs().min()
    la.optimize_temperature(loader, link_approx="probit", tune_prior=True)
    assert abs(math.log10(la.temperature)) <= nearest + 1


@pytest.mark.parametrize("bounds", [(2.0, 3.0), (-2.0, -1.5)])
def test_prior_stays_within_its_bounds(case, bounds):
    """The prior precision lies between the bounds given, wherever the optimum is."""
    la = fit(case)
    la.optimize_temperature(
        validation(case),
        link_approx="probit",
        tune_prior=True,
        log_prior_prec_min=bounds[0],
        log_prior_prec_max=bounds[1],
    )
    log_prior = la.prior_precision.log10().item()
    assert bounds[0] - 1e-6 <= log_prior <= bounds[1] + 1e-6


def test_a_structured_prior_becomes_scalar(case):
    """tune_prior replaces a layerwise prior by one number."""
    la = fit(case, prior_precision=priors(case)["layerwise"], complement="prior")
    loader = validation(case)
    curve = Curve(case, la, loader)
    la.optimize_temperature(loader, link_approx="probit", tune_prior=True)
    assert la.prior_precision.shape == (1,)
    assert curve(la.temperature, la.prior_precision) < curve(1.0, torch.ones(1))


# --- losses and errors -------------------------------------------------------------


def test_callable_loss(case):
    """A callable gets all predictions and targets, and is minimised."""
    la, loader = fit(case), validation(case)
    shapes = set()

    def loss(*args):
        shapes.add(tuple(tuple(a.shape) for a in args))
        if case.likelihood == "classification":
            return (args[0].max(1).values.mean() - 0.8).abs()
        return (args[1].diagonal(dim1=1, dim2=2).mean() - 0.5).abs()

    la.optimize_temperature(loader, loss=loss, link_approx="probit")
    assert len(shapes) == 1
    x, y = loader.dataset.tensors
    prediction = la(x)
    parts = prediction if isinstance(prediction, tuple) else (prediction,)
    # A target that can be hit; the temperature is right to 1e-3 in log10.
    assert float(loss(*parts, y)) < 2e-3


def test_metric_loss():
    """A metric is minimised over the temperature and left as it was."""
    case = problem("classification")
    la, loader = fit(case), validation(case)
    metric = torchmetrics.CalibrationError("multiclass", num_classes=3)
    x, y = loader.dataset.tensors

    def ece():
        fresh = torchmetrics.CalibrationError("multiclass", num_classes=3)
        return float(fresh(la(x), y))

    before = ece()
    la.optimize_temperature(loader, loss=metric, link_approx="probit")
    assert metric._update_count == 0
    assert ece() < before


@pytest.mark.parametrize("tune_prior", [False, True])
def test_a_failing_loss_changes_nothing(case, tune_prior):
    """Temperature and prior are as before if the loss raises."""
    la = fit(case, temperature=3.0)

    def broken(*args):
        raise RuntimeError("broken loss")

    with pytest.raises(RuntimeError, match="broken loss"):
        la.optimize_temperature(
            validation(case), loss=broken, tune_prior=tune_prior, n_samples=8
        )
    assert la.temperature == 3.0
    assert_close(la.prior_precision, torch.ones(1))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"val_loader": None}, ValueError, "val_loader"),
        ({"loss": "nll"}, TypeError, r"loss.*str"),
        ({"link_approx": "magic"}, ValueError, r"link_approx.*magic"),
    ],
)
def test_invalid_arguments(case, options, error, match):
    """Each wrong argument is named."""
    la = fit(case)
    with pytest.raises(error, match=match):
        la.optimize_temperature(**({"val_loader": validation(case)} | options))


def test_unfitted():
    """Tempering before fitting says so."""
    case = make("classification_mlp")
    la = ELLALaplace(case.model, "classification")
    with pytest.raises(AttributeError, match=r"fit\("):
        la.optimize_temperature(case.loader())
