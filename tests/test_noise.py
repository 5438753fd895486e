"""Observation noise by the evidence, and the prior that weight decay stood for."""

import pytest
import torch
from torch import nn

from laplace_ella import (
    ELLALaplace,
    ELLALLLaplace,
    prior_precision_from_weight_decay,
)
from tests import dense
from tests.cases import PRIORS, Case, make, mlp, priors
from tests.fitting import assert_close, fit

CLOSE = 1e-3
"""How far below the maximum the evidence (a sum over N·C = 80 terms) may end: far
below the 0.5 by which two models must differ to tell them apart; Adam at a constant
rate of 0.1 ends within it."""


def problem(n_out=2):
    """A network with known noise 0.3 around it."""
    g = torch.Generator().manual_seed(4)
    model = mlp(2, 4, n_out).double().eval()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g).double()
    x = torch.randn(40, 2, generator=g).double()
    y = model(x).detach() + 0.3 * torch.randn(40, n_out, generator=g).double()
    return Case(model, "regression", x, y, x[:5])


def dense_evidence(case, la):
    """The evidence as a function of noise and prior, from dense matrices."""
    rows = dense.Reference(case, la.basis.vectors)
    f, H, V = rows.f, rows.H, rows.V

    def evidence(sigma, prior):
        log_lik = dense.log_likelihood(
            rows.loss, *f.shape, "regression", sigma, la.temperature
        )
        D = dense.expand_prior(prior, case.params)
        factor = 1 / torch.as_tensor(sigma).double() ** 2 / la.temperature
        return dense.evidence(log_lik, H, V, D, rows.delta, factor).item()

    return evidence


@pytest.mark.parametrize("start", [0.05, 1.0, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_noise_alone(start, temperature):
    """The evidence reaches the maximum of a fine grid; the prior stays."""
    case = problem()
    la = fit(case, sigma_noise=start, prior_precision=0.7, temperature=temperature)
    evidence = dense_evidence(case, la)
    values = torch.tensor([evidence(s, 0.7) for s in torch.logspace(-1.5, 1, 200)])
    assert 0 < values.argmax() < 199
    assert la.optimize_sigma_noise(tune_prior=False) is None
    assert la.prior_precision.item() == pytest.approx(0.7, rel=1e-12)
    assert evidence(la.sigma_noise, 0.7) >= values.max() - CLOSE
    assert la.log_marginal_likelihood().item() == pytest.approx(
        evidence(la.sigma_noise, 0.7), rel=1e-9
    )


def evidence_grid(case, la, sigmas, priors):
    """The evidence for scalar priors (rows) and noise levels (columns)."""
    reference = dense.Reference(case, la.basis.vectors)
    h = torch.linalg.eigvalsh(reference.H)
    factor, delta = 1 / sigmas**2, priors[:, None]
    # log det (H/σ² + δI) − log det δI, from the eigenvalues of H
    ratio = torch.log1p(h * factor[None, :, None] / delta[..., None]).sum(-1)
    log_lik = torch.stack(
        [
            dense.log_likelihood(
                reference.loss, *reference.f.shape, "regression", s, 1.0
            )
            for s in sigmas
        ]
    )
    return log_lik - 0.5 * (ratio + delta * reference.theta.square().sum())


@pytest.mark.parametrize("start", [(1.0, 1.0), (3.0, 30.0), (0.1, 0.05)])
def test_noise_and_prior(start):
    """Together they reach the maximum of a grid of both."""
    case = problem()
    la = fit(case, sigma_noise=start[0], prior_precision=start[1])
    shapes = la.sigma_noise.shape, la.prior_precision.shape
    sigmas = torch.logspace(-1, 0.5, 121, dtype=torch.float64)
    deltas = torch.logspace(-2, 2, 121, dtype=torch.float64)
    values = evidence_grid(case, la, sigmas, deltas)
    row, column = divmod(int(values.argmax()), 121)
    assert 0 < row < 120
    assert 0 < column < 120
    evidence = dense_evidence(case, la)
    at_best = evidence(sigmas[column], deltas[row])
    assert at_best == pytest.approx(values.max().item(), rel=1e-9)
    la.optimize_sigma_noise()
    found = evidence(la.sigma_noise, la.prior_precision)
    assert found >= at_best - CLOSE
    assert (la.sigma_noise.shape, la.prior_precision.shape) == shapes
    assert not la.sigma_noise.requires_grad
    assert not la.prior_precision.requires_grad


@pytest.mark.parametrize("structure", PRIORS)
def test_stationary_for_every_structure(structure):
    """The structure of the prior is kept, and its evidence is stationary."""
    case = problem()
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior)
    before = la.log_marginal_likelihood().item()
    la.optimize_sigma_noise(n_steps=300, lr=0.05)
    assert la.prior_precision.shape == prior.shape
    assert la.log_marginal_likelihood().item() > before
    log_sigma = la.sigma_noise.log().requires_grad_()
    value = la.log_marginal_likelihood(la.prior_precision, log_sigma.exp())
    (slope,) = torch.autograd.grad(value, log_sigma)
    # A slope g at curvature 2·N·C = 160 is g²/320 below the maximum.
    assert slope.abs().item() ** 2 / 320 < CLOSE


def test_finds_the_noise_of_the_data():
    """With much data the noise it was made with is found."""
    case = problem()
    g = torch.Generator().manual_seed(11)
    case.x = torch.randn(500, 2, generator=g).double()
    noise = 0.3 * torch.randn(500, 2, generator=g).double()
    case.y = case.model(case.x).detach() + noise
    la = fit(case, loader=case.loader(100))
    la.optimize_sigma_noise()
    # The standard deviation of 1000 draws is known to 1/√2000 = 2.2 %: 3 of these.
    assert la.sigma_noise.item() == pytest.approx(0.3, rel=0.07)


def test_with_the_complement():
    """The evidence with the complement at the prior is raised as well."""
    case = problem()
    la = fit(case, complement="prior")
    before = la.log_marginal_likelihood().item()
    la.optimize_sigma_noise()
    best = la.log_marginal_likelihood().item()
    assert best > before
    for factor in (0.9, 1.1):
        la.sigma_noise = la.sigma_noise * factor
        assert la.log_marginal_likelihood().item() < best
        la.sigma_noise = la.sigma_noise / factor


def test_last_layer():
    """The last-layer class finds its noise, too."""
    case = problem()
    la = fit(case, ELLALLLaplace)
    la.optimize_sigma_noise()
    best = la.log_marginal_likelihood().item()
    for sigma in la.sigma_noise * torch.logspace(-0.5, 0.5, 21):
        la.sigma_noise = sigma.clone()
        assert la.log_marginal_likelihood().item() <= best + CLOSE


def test_predictions_use_the_new_values():
    """The posterior after tuning is that of the tuned noise and prior."""
    case = problem()
    la = fit(case)
    la(case.x_test)  # a posterior that must not be used again
    la.optimize_sigma_noise()
    reference = dense.Reference(case, la.basis.vectors, la.sigma_noise)
    mean, var = reference.predict(case.x_test, la.prior_precision)
    f_mu, f_var = la(case.x_test)
    assert_close(f_mu, mean)
    assert_close(f_var, var)


def test_restored_if_it_fails(monkeypatch):
    """Noise and prior are as before if the evidence cannot be computed."""
    case = problem()
    la = fit(case, sigma_noise=0.8, prior_precision=0.6)

    def broken(*args):
        raise RuntimeError("broken evidence")

    monkeypatch.setattr("laplace_ella.tuning.evidence.Evidence.__call__", broken)
    with pytest.raises(RuntimeError, match="broken evidence"):
        la.optimize_sigma_noise()
    assert la.sigma_noise.item() == pytest.approx(0.8)
    assert la.prior_precision.item() == pytest.approx(0.6)


def test_regression_only():
    """Classification has no noise, and the error says so."""
    la = fit(make("classification_mlp"))
    with pytest.raises(ValueError, match=r"regression.*classification"):
        la.optimize_sigma_noise()


def test_unfitted():
    """Tuning before fitting says so."""
    case = problem()
    with pytest.raises(AttributeError, match=r"fit\("):
        ELLALaplace(case.model, "regression").optimize_sigma_noise()


# --- weight decay ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight_decay", "n_data", "expected"),
    [(1e-4, 50_000, 5.0), (5e-4, 1000, 0.5), (1.0, 1, 1.0)],
)
def test_prior_precision_from_weight_decay(weight_decay, n_data, expected):
    """1/σ0² = Nγ, a number that every Laplace class takes."""
    prior = prior_precision_from_weight_decay(weight_decay, n_data)
    assert prior == pytest.approx(expected, rel=1e-12)
    case = problem()
    la = ELLALaplace(case.model, "regression", prior_precision=prior)
    assert la.prior_precision.item() == pytest.approx(expected)


def test_weight_decay_and_prior_have_the_same_optimum():
    """The minimum of mean loss + γ/2·‖θ‖² is the mode of that prior's posterior."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=g).double()
    y = torch.randn(30, 1, generator=g).double()
    gamma = 0.05
    gram = x.T @ x / 30 + gamma * torch.eye(4).double()
    theta = torch.linalg.solve(gram, x.T @ y / 30)  # of ½·mean square error
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = theta.T.clone()
    prior = prior_precision_from_weight_decay(gamma, 30)
    log_posterior = -0.5 * (model(x) - y).square().sum()
    log_posterior = log_posterior - 0.5 * prior * model.weight.square().sum()
    (slope,) = torch.autograd.grad(log_posterior, model.weight)
    assert_close(slope, torch.zeros_like(slope))


@pytest.mark.parametrize(
    ("weight_decay", "n_data"),
    [(0.0, 10), (-1e-4, 10), (float("nan"), 10), (1e-4, 0), (1e-4, -5)],
)
def test_invalid_weight_decay(weight_decay, n_data):
    """Without weight decay there is no prior to take over, and the error says so."""
    with pytest.raises(ValueError, match="weight_decay"):
        prior_precision_from_weight_decay(weight_decay, n_data)
