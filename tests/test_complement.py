"""`complement="prior"`: the directions outside V keep the prior."""

import inspect

import pytest
import torch
from laplace import FullLaplace

from laplace_ella import ELLALaplace
from tests import dense
from tests.cases import CASES, PRIORS, make, priors
from tests.fitting import assert_close, fit

pytestmark = pytest.mark.skipif(
    "complement" not in inspect.signature(ELLALaplace).parameters,
    reason="this version of ELLALaplace has no argument complement=",
)


def reference(case, la):
    return dense.Reference(case, la.basis.vectors, sigma=la.sigma_noise)


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("name", CASES)
def test_covariance(name, structure):
    """Σ = (D + VHVᵀ)⁻¹ in every prior structure, marginal and joint."""
    case = make(name)
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior, complement="prior")
    Sigma = reference(case, la).covariance(prior, "prior")
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    assert_close(la.functional_variance(Js), dense.marginal(Js, Sigma))
    assert_close(la.functional_covariance(Js), dense.joint(Js, Sigma))


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("mode", ["forward", "reverse", "double_vjp"])
def test_regression_predictive(mode, structure):
    """Predictions, marginal and joint, by every way of computing the features."""
    case = make("regression_3")
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior, complement="prior", feature_mode=mode)
    expected = reference(case, la)
    f, f_var = expected.predict(case.x_test, prior, "prior")
    f_mu, var = la(case.x_test)
    assert_close(f_mu, f)
    assert_close(var, f_var)
    _, joint = expected.predict_joint(case.x_test, prior, "prior")
    assert_close(la(case.x_test, joint=True)[1], joint)


@pytest.mark.parametrize("link", dense.LINKS)
def test_links(link):
    """Every link from the covariance with the complement."""
    case = make("classification_mlp")
    la = fit(case, prior_precision=0.5, complement="prior")
    f, f_var = reference(case, la).predict(case.x_test, 0.5, "prior")
    probs = la(case.x_test, link_approx=link, n_samples=100_000)
    atol = 1e-2 if link == "mc" else 1e-9
    assert_close(probs, dense.LINKS[link](f, f_var), rtol=0, atol=atol)


def test_exact_below_the_number_of_parameters():
    """Once V spans the training gradients, predictions are those of FullLaplace."""
    case = make("regression_1")
    exact = FullLaplace(case.model, "regression", prior_precision=0.6)
    exact.fit(case.loader())
    ours = fit(case, prior_precision=0.6, complement="prior", n_eigenvalues=12)
    assert ours.rank <= 12 < case.n_params
    for a, b in zip(ours(case.x_test), exact(case.x_test), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-8)
    assert_close(
        ours.log_marginal_likelihood(), exact.log_marginal_likelihood(), rtol=1e-6
    )


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("name", CASES)
def test_weight_samples_without_chance(name, structure):
    """Samples are linear in their noise: θ − θ̂ = Aᵀε with AᵀA = (D + VHVᵀ)⁻¹."""
    case = make(name)
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior, complement="prior")
    Sigma = reference(case, la).covariance(prior, "prior")
    eye = torch.eye(la.rank + la.n_params, dtype=Sigma.dtype)
    A = la.posterior.sample_offsets(*eye.split([la.rank, la.n_params], dim=1))
    assert_close(A.T @ A, Sigma)


def test_weight_samples():
    """Weight samples have covariance (D + VHVᵀ)⁻¹."""
    case = make("regression_1")
    la = fit(case, prior_precision=0.6, complement="prior")
    Sigma = reference(case, la).covariance(0.6, "prior")
    samples = la.sample(100_000)
    scale = Sigma.diagonal().max().item()
    assert_close(samples.T.cov(), Sigma, rtol=0, atol=0.03 * scale)
    assert torch.isfinite(samples).all()
