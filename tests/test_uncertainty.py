"""Total = aleatoric + epistemic, against closed forms, quadrature and brute force."""

import math
import random

import numpy as np
import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import NotFittedError
from laplace_ella.diagnostics.uncertainty import UncertaintyMeasure, decompose
from laplace_ella.metrics import entropy
from laplace_ella.posterior import predictive
from tests import dense
from tests.cases import CASES, PRIORS, RewardModel, make, mlp, priors
from tests.fitting import build, fit

CLASSIFIERS = [name for name in CASES if name.startswith("classification")]
REGRESSIONS = [name for name in CASES if name.startswith("regression")]


def by_hand(f_mu, f_var, n_samples, seed=3):
    """Entropies in nats from samples drawn through an eigendecomposition of f_var."""
    values, Q = torch.linalg.eigh(f_var)
    root = Q * values.clamp_min(0).sqrt()[:, None, :]
    generator = torch.Generator().manual_seed(seed)
    eps = torch.randn(n_samples, *f_mu.shape, generator=generator, dtype=torch.float64)
    p = (f_mu + torch.einsum("bcd,sbd->sbc", root, eps)).softmax(-1)
    mean = p.mean(0)
    total = -(mean * mean.log()).sum(-1)
    aleatoric = -(p * p.clamp_min(1e-300).log()).sum(-1).mean(0)
    return mean, total, aleatoric


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classification_against_many_samples(name, complement):
    """All parts against a large sample from the dense covariance."""
    case = make(name)
    la = fit(case, prior_precision=0.3, complement=complement)
    reference = dense.Reference(case, la.basis.vectors)
    mean, total, aleatoric = by_hand(
        *reference.predict(case.x_test, 0.3, complement), 20_000
    )
    parts = decompose(la, case.x_test, n_samples=20_000)
    assert parts.measure is UncertaintyMeasure.ENTROPY
    close = {"rtol": 0, "atol": 0.02}
    torch.testing.assert_close(parts.mean, mean, **close)
    torch.testing.assert_close(parts.total, total, **close)
    torch.testing.assert_close(parts.aleatoric, aleatoric, **close)
    torch.testing.assert_close(parts.epistemic, total - aleatoric, **close)


def test_two_classes_by_quadrature():
    """With two classes only the difference of the logits matters: a 1-d integral."""
    case = make("classification_mlp")
    case.model[-1] = nn.Linear(5, 2).double()
    case.y = case.y % 2
    la = fit(case, prior_precision=0.2)
    reference = dense.Reference(case, la.basis.vectors)
    f, f_var = reference.predict(case.x_test, 0.2)
    mu = f[:, 0] - f[:, 1]
    contrast = torch.tensor([1.0, -1.0], dtype=torch.float64)
    sd = torch.einsum("c,bcd,d->b", contrast, f_var, contrast).sqrt()
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite.hermgauss(80))
    p = (mu[:, None] + math.sqrt(2) * sd[:, None] * nodes).sigmoid()
    weights = weights / math.sqrt(math.pi)

    def binary(q):
        return -(q * q.log() + (1 - q) * (1 - q).log())

    total = binary((p * weights).sum(1))
    aleatoric = (binary(p) * weights).sum(1)
    parts = decompose(la, case.x_test, n_samples=100_000)
    torch.testing.assert_close(parts.total, total, rtol=0, atol=5e-3)
    torch.testing.assert_close(parts.aleatoric, aleatoric, rtol=0, atol=5e-3)
    torch.testing.assert_close(parts.epistemic, total - aleatoric, rtol=0.05, atol=5e-3)


@pytest.mark.parametrize("n_samples", [1, 7, 512])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_identities(name, n_samples):
    """Parts add up, none is negative, nothing exceeds log C."""
    case = make(name)
    la = fit(case, prior_precision=0.1)
    parts = decompose(la, case.x_test, n_samples)
    B, C = parts.mean.shape
    for part in (parts.total, parts.aleatoric, parts.epistemic):
        assert part.shape == (B,)
        assert (part >= 0).all()
        assert (part <= math.log(C) + 1e-9).all()
    torch.testing.assert_close(parts.total, parts.aleatoric + parts.epistemic)
    torch.testing.assert_close(parts.total, entropy(parts.mean))
    torch.testing.assert_close(parts.mean.sum(1), torch.ones(B, dtype=torch.float64))
    if n_samples == 1:  # one sample cannot disagree with itself
        assert (parts.epistemic < 1e-12).all()


def test_mean_is_the_mc_prediction():
    case = make("classification_mlp")
    la = fit(case)
    expected = la(case.x_test, link_approx="mc", n_samples=512)
    torch.testing.assert_close(decompose(la, case.x_test).mean, expected)


def test_limits_of_the_prior():
    """A concentrated posterior has no epistemic part; a wide one is all epistemic."""
    case = make("classification_mlp")
    la = fit(case)
    la.prior_precision = 1e12
    sure = decompose(la, case.x_test)
    f = dense.jacobians(case.model, case.x_test)[0]
    p = f.softmax(-1)
    torch.testing.assert_close(sure.total, -(p * p.log()).sum(-1), rtol=1e-5, atol=0)
    assert (sure.epistemic < 1e-8).all()
    la.fit_basis(case.loader())  # no data: the prior
    la.prior_precision = 1e-8
    unsure = decompose(la, case.x_test)
    assert (unsure.aleatoric < 0.02).all()
    assert (unsure.epistemic > 0.5 * unsure.total).all()


def test_far_from_the_data_is_more_epistemic():
    """The linear model extrapolates: uncertainty about the parameters grows."""
    case = make("classification_mlp")
    case.model = nn.Linear(3, 3).double()
    la = fit(case, n_eigenvalues=12)
    near, far = decompose(la, case.x), decompose(la, 30 * case.x)
    assert far.epistemic.mean() > 3 * near.epistemic.mean()


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_regression(name, structure, complement):
    """Variance of the function, of the noise, and their sum."""
    case = make(name)
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior, complement=complement)
    la.sigma_noise = 0.7
    reference = dense.Reference(case, la.basis.vectors, sigma=0.7)
    f, f_var = reference.predict(case.x_test, prior, complement)
    parts = decompose(la, case.x_test)
    assert parts.measure is UncertaintyMeasure.VARIANCE
    torch.testing.assert_close(parts.mean, f)
    epistemic = f_var.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(parts.epistemic, epistemic, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(parts.aleatoric, torch.full_like(f, 0.49))
    torch.testing.assert_close(parts.total, parts.epistemic + parts.aleatoric)


def test_reward_model():
    """Rewards have no observation noise."""
    model = RewardModel(mlp(3, 4, 1)).double()
    x, y = torch.randn(8, 2, 3, dtype=torch.float64), torch.randint(2, (8,))
    case = make("classification_mlp")
    case.model, case.likelihood = model, "reward_modeling"
    la = fit(case, loader=DataLoader(TensorDataset(x, y), batch_size=4))
    parts = decompose(la, torch.randn(5, 3, dtype=torch.float64))
    assert parts.total.shape == (5, 1)
    assert (parts.aleatoric == 0).all()
    assert (parts.epistemic > 0).all()


def test_chunks_bound_the_memory(monkeypatch):
    """Samples come in chunks; a small budget changes the draws, not the answer."""
    case = make("classification_mlp")
    la = fit(case, prior_precision=0.3)
    whole = decompose(la, case.x_test, 20_000)
    sizes = []
    draw = predictive.draw

    def counting(f, n_samples, *args, **kwargs):
        sizes.append(n_samples)
        return draw(f, n_samples, *args, **kwargs)

    monkeypatch.setattr(predictive, "draw", counting)
    budget = 7 * 3 * 999  # floats: 999 samples at 7 inputs of 3 outputs
    monkeypatch.setattr(predictive, "SAMPLE_BUDGET", budget)
    parts = decompose(la, case.x_test, 20_000)
    assert sum(sizes) == 20_000
    assert max(sizes) <= 999
    torch.testing.assert_close(parts.epistemic, whole.epistemic, rtol=0, atol=0.02)
    monkeypatch.setattr(predictive, "SAMPLE_BUDGET", 1)
    assert decompose(la, case.x_test, 5).total.shape == (7,)


def test_entropy():
    assert float(entropy(torch.tensor([1.0, 0.0]))) == 0
    quarter = torch.full((3, 4), 0.25)
    torch.testing.assert_close(entropy(quarter), torch.full((3,), math.log(4)))


def test_generator_and_random_state():
    """Deterministic without a generator, its own draws with one, model untouched."""
    case = make("classification_cnn")
    la = fit(case, prior_precision=0.1)
    case.model.train()
    state, python = torch.get_rng_state(), random.getstate()
    first, second = decompose(la, case.x_test, 16), decompose(la, case.x_test, 16)
    assert torch.equal(first.epistemic, second.epistemic)
    generator = torch.Generator().manual_seed(1)
    third = decompose(la, case.x_test, 16, generator)
    fourth = decompose(la, case.x_test, 16, generator)
    assert not torch.equal(third.epistemic, fourth.epistemic)
    again = decompose(la, case.x_test, 16, torch.Generator().manual_seed(1))
    assert torch.equal(third.epistemic, again.epistemic)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert case.model.training


def test_results_are_frozen_and_carry_no_graph():
    case = make("classification_mlp")
    parts = decompose(fit(case), case.x_test)
    assert not parts.total.requires_grad
    with pytest.raises(AttributeError):
        parts.total = 0


def test_backprop_to_the_inputs():
    """With enable_backprop the epistemic part has a gradient in the inputs."""
    case = make("classification_mlp")
    la = fit(case, enable_backprop=True, prior_precision=0.3)
    x = case.x_test.clone().requires_grad_()
    decompose(la, x, 64).epistemic.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad != 0).any()


def test_clear_errors():
    case = make("classification_mlp")
    with pytest.raises(NotFittedError):
        decompose(build(case), case.x_test)
    la = fit(case)
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="n_samples must be a positive integer"):
            decompose(la, case.x_test, wrong)
    with pytest.raises(ValueError, match="generator"):
        decompose(la, case.x_test, generator=3)


# --- other members of the family, and loaders ----------------------------------------

FAMILY = [("all", "kron"), ("all", "diag"), ("last_layer", "full"), ("all", "nystrom")]


@pytest.mark.parametrize("structure", FAMILY, ids="-".join)
def test_regression_of_the_family(structure):
    """Variances add up: that of the function, and the noise."""
    case = make("regression_3")
    la = Laplace(case.model, "regression", *structure, sigma_noise=0.4)
    la.fit(case.loader())
    mean, covariance = la(case.x_test)
    parts = decompose(la, case.x_test)
    torch.testing.assert_close(parts.mean, mean)
    variances = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(parts.epistemic, variances)
    torch.testing.assert_close(parts.total, variances + 0.16)
    assert parts.measure is UncertaintyMeasure.VARIANCE


@pytest.mark.parametrize("structure", FAMILY[:3], ids="-".join)
def test_classification_of_the_family(structure):
    """Entropies against a large sample from the covariance that Laplace has."""
    case = make("classification_mlp")
    la = Laplace(case.model, "classification", *structure, prior_precision=3.0)
    la.fit(case.loader())
    f_mu, f_var = la._glm_predictive_distribution(case.x_test)
    mean, total, aleatoric = by_hand(f_mu.detach(), f_var.detach(), 20_000)
    parts = decompose(la, case.x_test, n_samples=20_000)
    close = {"rtol": 0, "atol": 0.03}
    torch.testing.assert_close(parts.mean, mean, **close)
    torch.testing.assert_close(parts.total, total, **close)
    torch.testing.assert_close(parts.epistemic, total - aleatoric, **close)


@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_of_a_loader(name):
    """Batch after batch, the same as all at once; targets play no part."""
    case = make(name)
    la = fit(case)
    state = torch.get_rng_state()
    parts = decompose(la, case.loader(5))
    assert torch.equal(torch.get_rng_state(), state)
    whole = decompose(la, case.x)
    torch.testing.assert_close(parts.mean, whole.mean, rtol=0.2, atol=0.1)
    assert parts.total.shape == whole.total.shape
    if name == "regression_3":
        torch.testing.assert_close(parts.epistemic, whole.epistemic)
