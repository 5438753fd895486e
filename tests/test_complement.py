"""What is outside the basis: at the prior, at a number, matched; evidence of it all."""

from math import log

import pytest
import torch
from laplace import FullLaplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace, FeatureCache
from tests import dense
from tests.cases import make, mlp
from tests.fitting import assert_close, build, fit

REGRESSION = ("regression_1", "regression_3")


def matched_covariance(case, la, prior, temperature=1.0):
    """Dense reference: every training gradient, explicit projections, float64."""
    _, J = dense.jacobians(case.model, case.x, case.params)
    J, V = J.flatten(0, 1), la.basis.vectors
    f = 1 / float(la.sigma_noise) ** 2 / temperature
    eye, gram = torch.eye(len(V), dtype=V.dtype), J.T @ J
    values = torch.linalg.eigvalsh(gram).flip(0)
    top = values[0].clone()
    U, s, _ = torch.linalg.svd(J.T, full_matrices=False)
    U = U[:, s > 1e-6 * s[0]]
    values[: la.rank] = 0  # these are in the basis
    decade = (top / values[: U.shape[1]].clamp_min(1e-300)).log10().floor()
    G = f * V.T @ gram @ V + prior * eye[: la.rank, : la.rank]
    Sigma, outside = V @ torch.linalg.inv(G) @ V.T, eye - V @ V.T
    rest = (eye - U @ U.T) @ outside  # no direction of the basis
    for d in decade[la.rank :].unique():
        Q, tail = U[:, decade == d], values[: U.shape[1]][decade == d]
        Sigma = Sigma + Q @ Q.T / (tail.sum() / (tail / (f * tail + prior)).sum())
    return Sigma + rest / prior


def trained(n=400, width=40):
    """A regression network in float64, its loader and its inputs."""
    torch.manual_seed(3)
    x = torch.randn(n, 4).double()
    y = x[:, :1].sin() + x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(n, 1)
    model = mlp(4, width, width, 1).double()
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        adam.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        adam.step()
    return model.eval(), DataLoader(TensorDataset(x, y), 100), x


def fitted(model, loader, likelihood="regression", **kwargs):
    la = ELLALaplace(model, likelihood, **kwargs)
    la.fit(loader)
    return la


def log_ratio(la, exact, x):
    """Of the variances at x, on average."""
    both = la(x, diagonal_output=True)[1] / exact(x, diagonal_output=True)[1]
    return abs(float(both.log().mean()))


@pytest.mark.parametrize("name", REGRESSION)
def test_matched_covariance(name):
    """Precision α in the directions that the data know, the prior's outside; for
    every prior, noise and temperature, also from a cache."""
    case = make(name)
    la = fit(case, complement="matched", n_eigenvalues=3)
    cache = FeatureCache.from_loader(la, case.loader())
    _, J = dense.jacobians(case.model, case.x, case.params)
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    close = {"rtol": 1e-5, "atol": 1e-8}
    for la.prior_precision, la.sigma_noise, la.temperature in (
        (0.1, 0.5, 1.0),
        (3.0, 0.5, 1.0),
        (3.0, 0.1, 4.0),
    ):
        Sigma = matched_covariance(case, la, float(la.prior_precision), la.temperature)
        marginal, joint = dense.marginal(Js, Sigma), dense.joint(Js, Sigma)
        assert_close(la.functional_variance(Js), marginal, **close)
        assert_close(la.functional_covariance(Js), joint, **close)
        assert_close(la(case.x_test)[1], marginal, **close)
        assert_close(la(case.x_test, joint=True)[1], joint, **close)
        cached = la.predict_from_cache(cache)[1]
        assert_close(cached, dense.marginal(J, Sigma), **close)
    samples = la.functional_samples(case.x_test, n_samples=40_000)
    expected = marginal.diagonal(dim1=1, dim2=2)
    assert_close(samples.var(0), expected, rtol=0.1, atol=1e-6)


@pytest.mark.parametrize("name", REGRESSION)
def test_evidence_of_few_directions_is_that_of_all(name):
    """With all pairs sampled the evidence equals FullLaplace's at every rank; that of
    the basis does not."""
    case = make(name)
    prior, sigma = torch.tensor([0.3]).double(), torch.tensor(0.7).double()
    full = FullLaplace(case.model, "regression", sigma_noise=0.7, prior_precision=0.3)
    full.fit(case.loader())
    for complement in ("drop", "prior", "matched"):
        la = fit(case, n_eigenvalues=4, complement=complement, evidence="whole")
        values = []
        for model in (full, la):
            p, s = prior.clone().requires_grad_(), sigma.clone().requires_grad_()
            value = model.log_marginal_likelihood(p, s)
            values.append((value.detach(), *torch.autograd.grad(value, (p, s))))
        for ours, theirs in zip(values[1], values[0], strict=True):
            assert_close(ours.reshape(-1), theirs.reshape(-1), rtol=1e-6)
        la.prior_precision, la.sigma_noise = 0.3, 0.7
        ratios = la.posterior.log_det_ratios()
        assert_close(ratios, la.posterior.log_det_ratio.expand(4), rtol=1e-6)
        la.evidence = "basis"
        assert abs(la.log_marginal_likelihood() - values[0][0]) > 0.1


def test_near_exact_from_a_quarter_of_the_gradients():
    """K = 10 of M = 100 gradients of 400: noise and prior within 20 % of the exact
    ones, intervals within a factor of 1.6, where 'drop' and 'prior' are off by five."""
    model, loader, _ = trained()
    new = torch.randn(200, 4).double()
    exact = fitted(model, loader, n_eigenvalues="exact")
    la = fitted(model, loader, subsample_size=100, n_eigenvalues=10)
    for each in (exact, la):
        each.optimize_sigma_noise()
    assert la.complement == "matched"
    assert_close(la.sigma_noise, exact.sigma_noise, rtol=0.2)
    assert_close(la.prior_precision, exact.prior_precision, rtol=0.2)
    assert log_ratio(la, exact, new) < 0.9
    far = 30 * torch.randn(50, 4).double()
    assert log_ratio(la, exact, far) < log(2)  # the prior holds, as for exact Laplace
    for la.complement in ("drop", "prior"):
        assert log_ratio(la, exact, new) > 3.2


@pytest.mark.parametrize("n", [100, 200])
def test_decades_stand_for_all_directions(n):
    """Ten directions of all gradients, of which sums in groups or all weights are kept,
    have the variance of exact Laplace for every prior, at new inputs and far away."""
    model, loader, _ = trained(n, 20)  # 541 weights
    exact = fitted(model, loader, n_eigenvalues="exact", sigma_noise=0.1)
    la = fitted(model, loader, n_eigenvalues=10, sigma_noise=0.1)
    assert (la.fitted.span.sketch.signs is None) == (n == 200)
    new, far = torch.randn(100, 4).double(), 10 * torch.randn(50, 4).double()
    for prior in (1e-2, 1.0, 1e2, 1e4):
        la.prior_precision = exact.prior_precision = prior
        for x in (new, far):
            assert log_ratio(la, exact, x) < 0.3, prior


@pytest.mark.parametrize("rank", [5, 20, 50])
def test_a_strong_prior_and_few_sampled_gradients(rank):
    """Where the data know less than the prior its variance is that of exact Laplace,
    also far away: what other gradients usually have is not counted twice."""
    model, loader, x = trained()
    exact = fitted(model, loader, n_eigenvalues="exact")
    la = fitted(model, loader, n_eigenvalues=rank, subsample_size=100)
    exact.prior_precision = la.prior_precision = 3000.0
    for inputs in (x[:50], 6 * x[:50]):
        assert 0.9 < float(la(inputs)[1].mean() / exact(inputs)[1].mean()) < 1.1


def test_more_directions_of_a_sample_are_not_worse():
    """With all M directions of a sample in the basis the rest is still matched."""
    model, loader, _ = trained(300, 20)
    new = torch.randn(100, 4).double()
    exact = fitted(model, loader, sigma_noise=0.1)
    for rank in (10, 28, 30):
        options = {"subsample_size": 30, "n_eigenvalues": rank}
        la = fitted(model, loader, sigma_noise=0.1, **options)
        assert log_ratio(la, exact, new) < 1.2


def test_joint_covariance_with_a_sample_is_positive():
    """Gradients whose part outside the span is scaled one by one stay a Gaussian, and
    the marginals are the joint's diagonal."""
    model, loader, _ = trained(120, 20)
    la = fitted(model, loader, subsample_size=30, n_eigenvalues=5)
    new = torch.cat([torch.randn(20, 4), 5 * torch.randn(20, 4)]).double()
    joint = la(new, joint=True)[1]
    assert torch.linalg.eigvalsh(joint).min() > -1e-9 * joint.diagonal().max()
    marginal = la(new, diagonal_output=True)[1]
    assert_close(joint.diagonal(), marginal.squeeze(1), rtol=1e-7)


@pytest.mark.parametrize("subsample_size", [40, 10**6])
@pytest.mark.parametrize("prior", [1e-2, 1.0, 30.0, 300.0, 3000.0])
def test_truncated_caches(prior, subsample_size):
    """Directions that leave the basis stay in the span."""
    model, loader, x = trained(60, 8)
    options = {"n_eigenvalues": 12, "subsample_size": subsample_size}
    la = fitted(model, loader, complement="matched", **options)
    la.prior_precision = prior
    cache = FeatureCache.from_loader(la, loader)
    for rank in (12, 7, 2):
        la.truncate(rank)
        var = la(x, diagonal_output=True)[1]
        cached = la.predict_from_cache(cache, diagonal_output=True)[1]
        assert_close(cached, var, rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.5, 20.0])
@pytest.mark.parametrize("name", ["regression_1", "classification_mlp"])
def test_number_as_complement(name, alpha):
    """One precision outside the basis: predictions, samples and densities."""
    case = make(name)
    la = fit(case, prior_precision=0.3, complement=alpha)
    V = la.basis.vectors
    eye = torch.eye(len(V), dtype=V.dtype)
    Sigma = dense.Reference(case, V).covariance(0.3) + (eye - V @ V.T) / alpha
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    assert_close(la.functional_variance(Js), dense.marginal(Js, Sigma))
    noise = torch.eye(la.rank + la.n_params, dtype=Sigma.dtype)
    A = la.posterior.sample_offsets(*noise.split([la.rank, la.n_params], dim=1))
    assert_close(A.T @ A, Sigma)
    value = la.mean + torch.randn(la.n_params).double()
    expected = torch.distributions.MultivariateNormal(la.mean, Sigma).log_prob(value)
    assert_close(la.log_prob(value), expected, rtol=1e-6)
    if name == "regression_1":  # so have samples of weights where it is matched
        matched = fit(case, complement="matched").posterior
        number = matched.with_(complement=float(matched.outside_precision))
        noise = noise.split([la.rank, la.n_params], dim=1)
        assert_close(matched.sample_offsets(*noise), number.sample_offsets(*noise))
        assert_close(matched.log_det_precision, number.log_det_precision)


def test_before_the_data_the_prior_holds():
    """A basis without data knows nothing of the curvature; in inference mode too."""
    case = make("regression_1")
    la = build(case, complement="matched", prior_precision=2.0, evidence="whole")
    la.fit_basis(case.loader())
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    with torch.inference_mode():
        la.log_marginal_likelihood()
        assert_close(la(case.x_test)[1].clone(), Js @ Js.mT / 2.0)
    la.fit(case.loader(), override=False)
    la.optimize_prior_precision(n_steps=2)


def test_defaults():
    """Matched where it can be; the prior for exact fits and priors of several values;
    classification as in the paper."""
    case = make("regression_3")
    la = fitted(case.model, case.loader(), n_eigenvalues=4)
    assert (la.complement, la.evidence) == ("matched", "whole")
    la.prior_precision = torch.ones(la.n_layers)
    assert la.complement == "prior"
    assert torch.isfinite(la(case.x_test)[1]).all()
    noises = {"sigma_noise": torch.tensor([0.1, 0.2, 0.3]), "n_eigenvalues": 4}
    for options in (noises, {"n_eigenvalues": "exact"}):
        assert fitted(case.model, case.loader(), **options).complement == "prior"
    case = make("classification_mlp")
    la = fitted(case.model, case.loader(), "classification", n_eigenvalues=4)
    assert la.complement == "drop"


def test_clear_errors_where_it_cannot_be():
    case = make("regression_1")
    la = fit(case, complement="matched", n_eigenvalues=3)
    la.prior_precision = torch.ones(la.n_layers)
    with pytest.raises(ValueError, match="one prior precision"):
        la(case.x_test)
    noises = {"sigma_noise": torch.tensor([0.1, 0.2, 0.3])}
    for name, options in (("classification_mlp", {}), ("regression_3", noises)):
        with pytest.raises(ValueError, match="needs the spectrum"):
            fit(make(name), complement="matched", **options)
    cache = FeatureCache.from_loader(fit(case, complement="prior"), case.loader())
    la = fit(case, complement="matched")
    with pytest.raises(ValueError, match="make the cache"):
        la.predict_from_cache(cache)
    for bad in ({"complement": "matching"}, {"complement": -1.0}, {"evidence": "all"}):
        with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
            build(case, **bad)
