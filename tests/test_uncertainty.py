"""Total = aleatoric + epistemic, and how far a posterior is from the exact one."""

import math

import pytest
import torch
from laplace import Laplace

import laplace_ella
from laplace_ella import decompose, diagnose
from laplace_ella.errors import NotFittedError
from laplace_ella.metrics import entropy
from tests import dense
from tests.cases import CASES, make, priors
from tests.fitting import assert_close, build, fit

CLASSIFIERS = [name for name in CASES if name.startswith("classification")]
FAMILY = [("all", "kron"), ("last_layer", "full"), ("all", "nystrom")]


def by_hand(f_mu, f_var, n_samples=20_000):
    """Entropies in nats from samples drawn through an eigendecomposition of f_var."""
    values, Q = torch.linalg.eigh(f_var)
    root = Q * values.clamp_min(0).sqrt()[:, None, :]
    generator = torch.Generator().manual_seed(3)
    eps = torch.randn(n_samples, *f_mu.shape, generator=generator, dtype=torch.float64)
    p = (f_mu + torch.einsum("bcd,sbd->sbc", root, eps)).softmax(-1)
    mean = p.mean(0)
    total = -(mean * mean.log()).sum(-1)
    aleatoric = -(p * p.clamp_min(1e-300).log()).sum(-1).mean(0)
    return mean, total, aleatoric, total - aleatoric


def check(parts, expected, atol=0.02):
    found = (parts.mean, parts.total, parts.aleatoric, parts.epistemic)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classification_against_many_samples(name, complement):
    """All parts against a large sample from the dense covariance."""
    case = make(name)
    la = fit(case, prior_precision=0.3, complement=complement)
    reference = dense.Reference(case, la.basis.directions.T)
    predictive = reference.predict(case.x_test, 0.3, complement)
    parts = decompose(la, case.x_test, n_samples=20_000)
    check(parts, by_hand(*predictive))
    assert parts.measure == "entropy"
    for n_samples in (1, 7):
        parts = decompose(la, case.x_test, n_samples)
        for part in (parts.total, parts.aleatoric, parts.epistemic):
            assert (part >= 0).all()
            assert (part <= math.log(parts.mean.shape[1]) + 1e-9).all()
        assert_close(parts.total, parts.aleatoric + parts.epistemic)
        assert_close(parts.total, entropy(parts.mean))
        assert_close(parts.mean, la(case.x_test, link_approx="mc", n_samples=n_samples))


def test_limits_of_the_prior():
    """A concentrated posterior has no epistemic part; a wide one is all epistemic."""
    case = make("classification_mlp")
    la = fit(case)
    la.prior_precision = 1e12
    sure = decompose(la, case.x_test)
    p = case.model(case.x_test).detach().softmax(-1)
    torch.testing.assert_close(sure.total, entropy(p), rtol=1e-5, atol=0)
    assert (sure.epistemic < 1e-8).all()
    la.fit_basis(case.loader())  # no data: the prior
    la.prior_precision = 1e-8
    unsure = decompose(la, case.x_test)
    assert (unsure.aleatoric < 0.02).all()
    assert (unsure.epistemic > 0.5 * unsure.total).all()


@pytest.mark.parametrize("structure", FAMILY, ids="-".join)
def test_of_the_family(structure):
    """Variances and noise add up; entropies are those of the covariance; batch after
    batch the same."""
    case = make("regression_3")
    la = Laplace(case.model, "regression", *structure, sigma_noise=0.4)
    la.fit(case.loader())
    mean, covariance = la(case.x_test)
    variances = covariance.diagonal(dim1=1, dim2=2)
    expected = (mean, variances + 0.16, torch.full_like(mean, 0.16), variances)
    for x in (case.x_test, case.x_test.split(3)):
        check(decompose(la, x), expected, 1e-8)
    assert decompose(la, case.loader()).measure == "variance"
    case = make("classification_mlp")
    la = Laplace(case.model, "classification", *structure, prior_precision=3.0)
    la.fit(case.loader())
    predictive = (t.detach() for t in la._glm_predictive_distribution(case.x_test))
    check(decompose(la, case.x_test, n_samples=20_000), by_hand(*predictive), 0.03)


def test_samples_come_in_chunks(monkeypatch):
    """A small budget changes the draws, not the answer."""
    case = make("classification_mlp")
    la = fit(case, prior_precision=0.3)
    whole = decompose(la, case.x_test, 20_000)
    sizes, draw = [], laplace_ella.uncertainty.draw

    def counting(f, n_samples, **kwargs):
        sizes.append(n_samples)
        return draw(f, n_samples, **kwargs)

    monkeypatch.setattr("laplace_ella.uncertainty.draw", counting)
    monkeypatch.setattr("laplace_ella.uncertainty.SAMPLE_BUDGET", 7 * 3 * 999)
    parts = decompose(la, case.x_test, 20_000)
    assert sum(sizes) == 20_000
    assert max(sizes) <= 999
    torch.testing.assert_close(parts.epistemic, whole.epistemic, rtol=0, atol=0.02)


def test_draws_graphs_and_errors():
    """Repeated without a generator, differentiable on request, refused by name."""
    case = make("classification_cnn")
    la = fit(case, prior_precision=0.1, enable_backprop=True)
    g = torch.Generator()
    first, second = (decompose(la, case.x_test, 16) for _ in range(2))
    assert torch.equal(first.epistemic, second.epistemic)
    third = decompose(la, case.x_test, 16, g.manual_seed(1))
    again = decompose(la, case.x_test, 16, g.manual_seed(1))
    assert torch.equal(third.epistemic, again.epistemic)
    assert not torch.equal(third.epistemic, first.epistemic)
    assert not first.total.requires_grad
    x = case.x_test.clone().requires_grad_()
    decompose(la, x, 64).epistemic.sum().backward()
    assert torch.isfinite(x.grad).all()
    with pytest.raises(ValueError, match="n_samples must be a positive integer"):
        decompose(la, x, 0)
    with pytest.raises(ValueError, match="generator"):
        decompose(la, x, generator=3)
    with pytest.raises(ValueError, match="no batch"):
        decompose(la, [])
    with pytest.raises(NotFittedError):
        decompose(build(case), x)


@pytest.mark.parametrize("structure", ["scalar", "diag"])
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_diagnose(name, structure):
    """Spectrum and effective parameters from dense Jacobians and precisions."""
    case = make(name)
    prior = priors(case)[structure]
    la = fit(case, n_eigenvalues=4, prior_precision=prior)
    found = diagnose(la)
    _, Js = dense.jacobians(case.model, case.x, case.params)
    J = Js.flatten(0, 1)
    spectrum = torch.linalg.eigvalsh(J @ J.T).flip(0)
    assert_close(found.eigenvalues, spectrum[:4], rtol=1e-6)
    explained = (spectrum.cumsum(0) / spectrum.sum())[:4]
    assert_close(found.explained, explained, rtol=1e-6)
    reference = dense.Reference(case, la.basis.directions.T, sigma=la.sigma_noise)
    G = reference.precision(prior)
    freedom = reference.factor * (torch.linalg.inv(G) @ reference.H).trace()
    assert found.effective_dof == pytest.approx(float(freedom))
    assert (found.n_samples, found.rank) == (len(J), 4)
    assert f"{found.effective_dof:.2f} in the basis" in str(found)


def test_diagnose_outside_the_basis():
    """All data determine: with the whole spectrum known, dense effective parameters."""
    case = make("regression_3")
    la = fit(case, n_eigenvalues=4, complement="matched", evidence="whole")
    found = diagnose(la)
    _, Js = dense.jacobians(case.model, case.x, case.params)
    J = Js.flatten(0, 1) / la.sigma_noise
    spectrum = torch.linalg.eigvalsh(J @ J.T)
    total = (spectrum / (spectrum + 1)).sum()
    both = found.effective_dof + found.dof_outside
    assert both == pytest.approx(float(total), rel=1e-4)
    assert found.evidence_estimated == 0
