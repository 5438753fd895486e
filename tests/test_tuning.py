"""Prior, temperature and rank: by the evidence, and by the loss on validation data."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torchmetrics
from laplace.utils.enums import PredType, PriorStructure, TuningMethod
from laplace.utils.metrics import RunningNLLMetric
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace, ELLALLLaplace, FeatureCache
from laplace_ella.errors import BorderWarning
from laplace_ella.posterior.observation import Link
from laplace_ella.tuning.validation import Validator
from tests import dense
from tests.cases import CASES, PRIORS, Case, make, mlp, priors
from tests.fitting import assert_close, fit
from tests.test_state import described

REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"
both = pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])
GRID = torch.logspace(-2, 2, 9)
"""Prior precisions of a search."""
LOG_T = torch.linspace(-2, 2.5, 91, dtype=torch.float64)
"""log10 of the temperatures of the brute-force curves, 0.05 apart."""

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.errors.BorderWarning")


def reference(case, la):
    return dense.Reference(case, la.basis.vectors, la.sigma_noise, la.temperature)


def overconfident(likelihood):
    """A network that is too sure of itself, with N·C well above P; validation data."""
    g = torch.Generator().manual_seed(5)
    model = mlp(2, 4, 3).double().eval()
    for p in model.parameters():
        p.data = 2.5 * torch.randn(p.shape, generator=g).double()
    x = torch.randn(140, 2, generator=g).double()
    f = model(x).detach()
    if likelihood == "regression":
        y = f + 0.5 * torch.randn(f.shape, generator=g).double()
        kwargs = {"sigma_noise": 0.3}
    else:
        y = torch.multinomial((f / 1.5).softmax(-1), 1, generator=g).squeeze(1)
        kwargs = {}
    case = Case(model, likelihood, x[:60], y[:60], x[60:], kwargs)
    return case, DataLoader(TensorDataset(x[60:], y[60:]), 30)


def validation(case, batch_size=3):
    """Other inputs, with targets that the model does not expect."""
    g = torch.Generator().manual_seed(8)
    x = 1.5 * torch.randn(9, *case.x.shape[1:], generator=g).double()
    f = case.model(x).detach()
    if case.likelihood == "regression":
        y = f + 0.42 * torch.randn(f.shape, generator=g).double()
    else:
        y = torch.randint(f.shape[1], (9,), generator=g)
        y[:6] = f.argmax(1)[:6]
    return DataLoader(TensorDataset(x, y), batch_size)


def nll(prediction, y, sigma=None):
    """Mean negative log likelihood, with distributions of torch."""
    if not isinstance(prediction, tuple):
        likely = prediction.clamp_min(torch.finfo(torch.float32).tiny)
        return torch.nn.functional.nll_loss(likely.log(), y).item()
    mean, var = prediction
    scale = (var.diagonal(dim1=1, dim2=2) + sigma**2).sqrt()
    return -torch.distributions.Normal(mean, scale).log_prob(y).sum(-1).mean().item()


class Curve:
    """The validation loss as a function of temperature and prior, by dense algebra."""

    def __init__(self, case, la, loader, link=dense.probit):
        self.case, self.link, self.sigma = case, link, la.sigma_noise
        self.prior, self.complement = la.prior_precision.clone(), la.complement.value
        x, self.y = loader.dataset.tensors
        self.f, self.Js = dense.jacobians(case.model, x, case.params)
        self.reference = dense.Reference(case, la.basis.vectors, la.sigma_noise)

    def __call__(self, temperature=1.0, prior=None):
        prior = self.prior if prior is None else prior
        scaled = copy.copy(self.reference)
        scaled.factor = self.reference.factor / temperature
        var = dense.marginal(self.Js, scaled.covariance(prior, self.complement))
        if self.case.likelihood == "classification":
            return nll(self.link(self.f, var), self.y)
        return nll((self.f, var), self.y, self.sigma)


@both
@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_marglik_follows_the_dense_evidence(name, structure, complement):
    case = make(name)
    la = fit(case, complement=complement)
    expected = reference(case, la)

    def evidence(prior):
        if complement == "drop" or structure == "scalar":
            return expected.evidence(prior)
        D = expected.prior(prior)
        V, H = expected.V, expected.factor * expected.H
        ratio = (torch.diag(D) + V @ H @ V.T).logdet() - D.log().sum()
        return expected.log_likelihood - 0.5 * (
            ratio + (expected.delta * D) @ expected.delta
        )

    log_prior = torch.zeros_like(priors(case)[structure]).requires_grad_()
    optimizer = torch.optim.Adam([log_prior], lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        (-evidence(log_prior.exp())).backward()
        optimizer.step()
    la.optimize_prior_precision(
        method="marglik", prior_structure=structure, n_steps=20, lr=0.1
    )
    assert la.prior_precision.shape == log_prior.shape
    assert not la.prior_precision.requires_grad
    assert_close(la.prior_precision, log_prior.exp().detach(), rtol=1e-6)
    prior = priors(case)[structure].requires_grad_()
    assert torch.autograd.gradcheck(la.log_marginal_likelihood, (prior,))


def test_marglik_starts_from_what_is_given():
    """A tensor as start decides the structure; the current prior plays no part."""
    case, found = make(REGRESSION), []
    la, given = fit(case), (PredType.GLM, TuningMethod.MARGLIK, 3, 0.1)
    for la.prior_precision in (1.0, 20.0):
        start = priors(case)["layerwise"]
        la.optimize_prior_precision(*given, start, PriorStructure.SCALAR)
        found.append(la.prior_precision)
    assert found[0].shape == (len(case.params),)
    assert_close(found[1], found[0], rtol=0, atol=0)


@both
@pytest.mark.parametrize("method", ["marglik", "gridsearch"])
def test_a_failure_changes_nothing(name, method):
    case = make(name)
    la = fit(case, prior_precision=priors(case)["layerwise"])
    expected = la(case.x_test)

    def broken(*args):
        raise RuntimeError("broken loss")

    given = {"val_loader": validation(case), "loss": broken, "init_prior_prec": -1.0}
    with pytest.raises((RuntimeError, ValueError), match=r"broken|init_prior_prec"):
        la.optimize_prior_precision(method=method, **given)
    assert_close(la.prior_precision, priors(case)["layerwise"])
    torch.testing.assert_close(la(case.x_test), expected)


def gridsearch(la, case, **kwargs):
    options = {
        "method": "gridsearch",
        "val_loader": validation(case),
        "log_prior_prec_min": -2,
        "log_prior_prec_max": 2,
        "grid_size": 9,
    }
    la.optimize_prior_precision(**(options | kwargs))
    return la.prior_precision


@pytest.mark.parametrize("pred_type", ["glm", "gp"])
@pytest.mark.parametrize("link", ["probit", "probit_centered", "bridge", "bridge_norm"])
def test_gridsearch_classification(link, pred_type):
    """The chosen prior minimises the validation NLL of that very link."""
    case = make(CLASSIFICATION)
    la = fit(case)
    curve = Curve(case, la, validation(case), dense.LINKS[link])
    best = min(GRID, key=lambda prior: curve(prior=prior))
    chosen = gridsearch(la, case, link_approx=link, pred_type=pred_type)
    assert chosen.shape == (1,)
    assert chosen.item() == pytest.approx(best.item(), rel=1e-5)


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@both
def test_gridsearch_by_sampling(name, pred_type, cls):
    case = make(name)
    la = fit(case, cls)
    options = {"pred_type": pred_type, "link_approx": "mc", "n_samples": 20}
    first = gridsearch(la, case, **options).clone()
    torch.manual_seed(5)
    assert_close(gridsearch(la, case, **options), first, rtol=0, atol=0)
    assert torch.isclose(GRID.double(), first.double()).any()


def test_a_callable_loss_gets_all_data_at_once():
    """Regression: means, covariances and targets; classification: probabilities."""
    shapes = []

    def loss(*args):
        shapes.append(tuple(tuple(a.shape) for a in args))
        return nll(args[:-1] if len(args) > 2 else args[0], args[-1], 0.4)

    for name in (REGRESSION, CLASSIFICATION):
        case = make(name)
        la = fit(case)
        curve = Curve(case, la, validation(case))
        best = min(GRID, key=lambda prior, curve=curve: curve(prior=prior))
        chosen = gridsearch(la, case, loss=loss)
        assert chosen.item() == pytest.approx(best.item(), rel=1e-5)
        assert chosen == gridsearch(la, case)
    assert set(shapes) == {((9, 3), (9, 3, 3), (9, 3)), ((9, 3), (9,))}


METRICS = {
    "nll": lambda: RunningNLLMetric(),
    "accuracy": lambda: torchmetrics.Accuracy("multiclass", num_classes=3),
    "ece": lambda: torchmetrics.CalibrationError("multiclass", num_classes=3),
}


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_is_minimised_and_left_as_it_was(metric):
    case = make(CLASSIFICATION)
    la = fit(case)
    x, y = validation(case).dataset.tensors
    user = METRICS[metric]()
    user.update(torch.full((2, 3), 1 / 3), torch.tensor([0, 1]))
    before = copy.deepcopy(user.metric_state)
    chosen = gridsearch(la, case, loss=user)
    torch.testing.assert_close(user.metric_state, before)
    assert user._update_count == 1
    scores = []
    for prior in GRID:
        fresh = METRICS[metric]()
        fresh.update(dense.probit(*reference(case, la).predict(x, prior)), y)
        scores.append(fresh.compute())
    at_chosen = (GRID.double() - chosen.double()).abs().argmin()
    assert scores[at_chosen] == pytest.approx(min(scores).item(), abs=1e-6)
    # one that takes only predictions and targets serves regression
    case = make(REGRESSION)
    squares = torchmetrics.MeanSquaredError(num_outputs=3)
    assert gridsearch(fit(case), case, loss=squares).shape == (1,)


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_features_are_computed_once(link):
    """The model is called as often for 40 candidates as for 2, in any batches."""
    case = make(CLASSIFICATION)
    la = fit(case)
    counts, forward = [], case.model.forward

    def counted(*args, **kwargs):
        counts[-1] += 1
        return forward(*args, **kwargs)

    case.model.forward = counted
    found = []
    for grid_size in (9, 40):
        counts.append(0)
        found.append(gridsearch(la, case, grid_size=grid_size, link_approx=link))
    assert counts[0] == counts[1] > 0
    other = gridsearch(la, case, val_loader=validation(case, 9), link_approx=link)
    assert_close(other, found[0])
    one = {"log_prior_prec_min": 3, "log_prior_prec_max": 3, "grid_size": 1}
    chosen = gridsearch(la, case, log_prior_prec_base=2.0, **one)
    assert chosen.item() == pytest.approx(8.0, rel=1e-5)


@pytest.mark.parametrize(
    ("search", "kwargs", "match"),
    [
        ("prior_precision", {"method": "gridsearch"}, "val_loader"),
        ("prior_precision", {"method": "magic"}, r"method.*magic"),
        ("prior_precision", {"method": "marglik", "n_steps": 0}, r"n_steps.*0"),
        ("prior_precision", {"method": "marglik", "lr": math.nan}, r"lr.*nan"),
        ("prior_precision", {"init_prior_prec": -1}, r"init.*-1"),
        ("prior_precision", {"pred_type": "linear"}, "linear"),
        ("prior_precision", {"prior_structure": "blockwise"}, "blockwise"),
        ("rank", {"method": "magic"}, r"method.*magic"),
        ("rank", {"method": "gridsearch"}, "val_loader"),
        ("rank", {"method": "gridsearch", "ranks": [0, 2]}, r"ranks.*1\.\.6"),
        ("rank", {"method": "gridsearch", "ranks": [2, 7]}, r"ranks.*1\.\.6"),
        ("rank", {"method": "gridsearch", "ranks": []}, "ranks"),
        ("rank", {"method": "marglik", "share": 1.5}, r"share.*1\.5"),
        ("temperature", {"val_loader": [None], "loss": "nll"}, r"loss.*str"),
        ("calibration", {"val_loader": [None], "n_samples": 0}, "n_samples"),
    ],
)
def test_invalid_arguments_are_named(search, kwargs, match):
    case = make(CLASSIFICATION)
    la = fit(case)
    before = described(la)
    with pytest.raises((ValueError, TypeError), match=match):
        getattr(la, f"optimize_{search}")(**kwargs)
    assert described(la) == before
    unfitted = ELLALaplace(case.model, "classification")
    with pytest.raises(AttributeError, match=r"fit\("):
        getattr(unfitted, f"optimize_{search}")(val_loader=None)


def test_verbose_and_progress_bar(capsys):
    case = make(CLASSIFICATION)
    la, loud = fit(case), {"verbose": True, "progress_bar": True}
    for method, steps in (("gridsearch", "9/9"), ("marglik", "7/7")):
        gridsearch(la, case, method=method, n_steps=7, **loud)
        out = capsys.readouterr()
        assert "prior precision" in out.out.lower()
        assert steps in out.err
    gridsearch(la, case)
    out = capsys.readouterr()
    assert out.out == out.err == ""


@pytest.mark.parametrize(
    ("likelihood", "complement", "prior"),
    [
        ("classification", "drop", 0.2),
        ("classification", "prior", 0.2),
        ("regression", "drop", 1.0),
        ("regression", "prior", 10.0),
        ("classification", "drop", "layerwise"),
        ("classification", "drop", "diag"),
    ],
)
def test_the_temperature_is_the_minimum_of_the_curve(likelihood, complement, prior):
    """No temperature of a fine grid has a lower loss; nothing else changes."""
    case, loader = overconfident(likelihood)
    if isinstance(prior, str):
        prior = priors(case)[prior]
    la = fit(case, complement=complement, prior_precision=prior)
    H, basis, sigma = la.H.clone(), la.basis, la.sigma_noise.clone()
    curve, before = Curve(case, la, loader), la.prior_precision.clone()
    assert la.optimize_temperature(loader) is None
    assert curve(la.temperature) <= min(curve(10**t) for t in LOG_T) + 2e-6
    found = la.temperature
    torch.manual_seed(9)
    state = torch.get_rng_state()
    for la.temperature in (0.01, 30.0):  # the start does not matter
        for data in (loader, la.cache_features(loader)):
            la.optimize_temperature(data)
            assert la.temperature == pytest.approx(found, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert la.basis is basis
    for now, then in ((la.H, H), (la.sigma_noise, sigma), (la.prior_precision, before)):
        assert_close(now, then, rtol=0, atol=0)


@pytest.mark.parametrize("link", ["mc", "probit", "bridge", "bridge_norm"])
@pytest.mark.parametrize("complement", ["drop", "prior", 3.0])
@pytest.mark.parametrize("rank", [2, 9])
def test_searches_see_the_loss_of_predictions(rank, complement, link):
    """For any factor and prior, also in the eigenbasis of the curvature."""
    case, loader = overconfident("classification")
    la = fit(case, n_eigenvalues=rank, complement=complement)
    cache, y = FeatureCache.from_loader(la, loader), loader.dataset.tensors[1]
    observation, generator = la._observation, la._fresh_generator
    validator = Validator(cache, None, observation, Link(link), 32, generator)
    posterior, cheap = validator.rotated(la.posterior)
    assert (posterior.H.ndim == 1) == (rank > 3)
    for temperature, prior in ((1.0, 1.0), (0.05, 30.0), (40.0, 0.02)):
        candidate = posterior.with_(
            factor=posterior.factor / temperature, prior=torch.tensor([prior])
        )
        la.temperature, la.prior_precision = temperature, prior
        probs = la.predict_from_cache(cache, link_approx=link, n_samples=32)
        assert cheap(candidate) == pytest.approx(nll(probs, y), rel=1e-7)


@pytest.mark.parametrize("rank", [2, 9])
def test_monte_carlo_is_smooth_in_the_temperature(rank):
    """Otherwise a search follows the noise. With fewer and more directions than C."""
    case, loader = overconfident("classification")
    la = fit(case, n_eigenvalues=rank)
    cache = la.cache_features(loader)[:6]

    def largest_step(n):
        probs = []
        for temperature in torch.logspace(-2, 2, n):
            la.temperature = temperature.item()
            probs.append(la.predict_from_cache(cache, link_approx="mc", n_samples=32))
        return torch.stack(probs).diff(dim=0).abs().max().item()

    # An eighth of the step gives about an eighth of the change; a jump stays.
    assert largest_step(161) < largest_step(21) / 3


def test_the_border_is_told():
    case, loader = overconfident("classification")
    la = fit(case, prior_precision=1e4)  # too sure of the weights for any temperature
    with pytest.warns(BorderWarning, match="best temperature.*border of the range"):
        la.optimize_temperature(loader)


K = 6
SAMPLES = {"subsample_size": 9, "n_eigenvalues": K}
"""Fewer samples than pairs, so that the seed matters."""


def at_rank(case, k, **kwargs):
    """A fit of its own at rank k, with the same seed and samples."""
    return fit(case, **(SAMPLES | {"n_eigenvalues": k} | kwargs))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("structure", "complement"),
    [("scalar", "drop"), ("scalar", "prior"), ("diag", "drop"), ("diag", "prior")],
)
def test_evidence_of_every_rank(name, structure, complement):
    """One fit tells the evidence of a fit at each lower rank; it falls with the rank,
    and the smallest with its share of the Occam factor is taken."""
    case = make(name)
    options = {
        "prior_precision": priors(case)[structure],
        "complement": complement,
        "temperature": 1.3,
    }
    la = at_rank(case, K, **options)
    table = la.optimize_rank("marglik", share=0.7)
    assert [row["rank"] for row in table] == list(range(1, K + 1))
    values = [row["log_marginal_likelihood"] for row in table]
    assert all(b <= a + 1e-10 for a, b in itertools.pairwise(values))
    ratios = []
    for k, value in enumerate(values, 1):
        single = at_rank(case, k, **options)
        expected = single.log_marginal_likelihood().item()
        assert value == pytest.approx(expected, rel=1e-9)
        ratios.append(single.log_det_ratio.item())
    assert la.rank == next(k for k, r in enumerate(ratios, 1) if r >= 0.7 * ratios[-1])


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
@pytest.mark.parametrize("complement", ["drop", "prior"])
@both
def test_validation_loss_of_every_rank(name, complement, link):
    case = make(name)
    loader = validation(case)
    x, y = loader.dataset.tensors
    options = {"link_approx": link, "n_samples": 50}
    expected = {}
    for k in range(1, K + 1):
        single = at_rank(case, k, complement=complement)
        expected[k] = nll(single(x, **options), y, single.sigma_noise)
    best = min(expected, key=expected.get)
    for ranks in (None, [4, 1, 3], (6.0,)):
        la = at_rank(case, K, complement=complement)
        cache = la.cache_features(loader)
        data = loader if ranks is None else cache
        table = la.optimize_rank("gridsearch", data, ranks=ranks, **options)
        wanted = sorted(ranks or expected)
        assert [row["rank"] for row in table] == wanted
        for row in table:
            if (link, complement, row["rank"]) != ("bridge", "drop", 1):
                # there it conditions on the one direction: what is left is rounding
                assert row["loss"] == pytest.approx(expected[row["rank"]], rel=1e-6)
        assert la.rank == (min(ranks, key=expected.get) if ranks else best)


def test_rank_by_any_loss():
    case = make(REGRESSION)
    la, values = at_rank(case, K), [5.0, 4.0, 1.0, 2.0, 0.0, 3.0]
    rest, judged = iter(values), ("gridsearch", validation(case))
    table = la.optimize_rank(*judged, loss=lambda *args: next(rest))
    assert la.rank == 5
    assert [row["loss"] for row in table] == values
    with pytest.raises(ValueError, match="infinite for all 5 candidates"):
        la.optimize_rank(*judged, loss=lambda *args: math.nan)
    assert la.rank == 5


def test_a_cache_is_saved_moved_and_cut(tmp_path):
    case = make(CLASSIFICATION)
    la = fit(case, complement="prior")
    cache = FeatureCache.from_loader(la, validation(case))
    torch.save(vars(cache), tmp_path / "cache.pt")
    again = FeatureCache(**torch.load(tmp_path / "cache.pt")).to("cpu")
    assert_close(la.predict_from_cache(again), la.predict_from_cache(cache))
    assert [len(part) for part in cache.batches(4)] == [4, 4, 1]
    la.truncate(4)
    x = validation(case).dataset.tensors[0]
    assert_close(la.predict_from_cache(cache), la(x))
    assert_close(la.predict_from_cache(cache.truncate(4)), la(x))


def test_a_cache_of_something_else_is_refused():
    case = make(CLASSIFICATION)
    la, loader = fit(case, complement="prior"), validation(case)
    cache = FeatureCache.from_loader(la, loader)
    with pytest.raises(ValueError, match="features of 6 directions, 7 were"):
        cache.truncate(7)
    other = fit(case, complement="prior", subsample_size=9, seed=3)
    with pytest.raises(ValueError, match="another basis"):
        other.predict_from_cache(cache)
    la.prior_precision = priors(case)["layerwise"]
    with pytest.raises(ValueError, match=r"any scalar prior.*one prior of 4 values"):
        la.predict_from_cache(cache)
    layered = FeatureCache.from_loader(la, loader)
    assert_close(la.predict_from_cache(layered), la(loader.dataset.tensors[0]))
    with pytest.raises(ValueError, match="cannot be truncated"):
        layered.truncate(2)
    with pytest.raises(ValueError, match="yielded no batch"):
        la.cache_features([])
    x = torch.full((2, 3), math.nan).double()
    with pytest.raises(ValueError, match="NaN or infinite outputs or features"):
        la.cache_features(DataLoader(TensorDataset(x, torch.tensor([0, 1]))))
