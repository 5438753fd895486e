"""Features, curvature, predictive, evidence and links against the dense reference."""

import pytest
import torch

from laplace_ella import ELLALaplace, ELLALLLaplace
from tests import dense
from tests.cases import ARCHITECTURES, CASES, PRIORS, make, priors
from tests.fitting import assert_close, fit

CLASSIFICATION = ("classification_mlp", "classification_cnn", "frozen")
REGRESSION = ("regression_1", "regression_3")


@pytest.fixture(params=CASES)
def case(request):
    return make(request.param)


def reference(case, la, **kwargs):
    """The dense reference on the directions and the noise of a fitted `la`."""
    kwargs = {"sigma": la.sigma_noise, "temperature": la.temperature} | kwargs
    return dense.Reference(case, la.basis.vectors, **kwargs)


def all_rows(case):
    """Every row of the training Jacobian (N·C, P)."""
    return dense.jacobians(case.model, case.x, case.params)[1].flatten(0, 1)


# --- basis -------------------------------------------------------------------------


def test_basis_is_the_truncated_svd_of_the_rows(case):
    """V spans the top-K right singular vectors of J̃; eigenvalues and trace agree."""
    la = fit(case, n_eigenvalues=5)
    V, eigenvalues = dense.nystrom(all_rows(case), 5)
    basis = la.basis
    assert basis.n_samples == len(eigenvalues)
    assert la.rank == 5
    assert basis.eigenvalues.dtype == torch.float64
    assert_close(basis.eigenvalues, eigenvalues[:5])
    assert float(basis.trace) == pytest.approx(eigenvalues.sum().item(), rel=1e-12)
    assert_close(basis.vectors @ basis.vectors.T, V @ V.T, rtol=1e-6, atol=1e-8)


def test_basis_is_orthonormal(case):
    """VᵀV = I, also where the samples are fewer than the pairs."""
    V = fit(case, subsample_size=8, n_eigenvalues=5).basis.vectors
    assert_close(V.T @ V, torch.eye(5, dtype=torch.float64))


def test_basis_is_nested(case):
    """The first k columns of a rank-K basis are the rank-k basis, up to sign."""
    large, small = (fit(case, n_eigenvalues=k).basis.vectors for k in (6, 3))
    overlap = (large[:, :3] * small).sum(0).abs()
    assert_close(overlap, torch.ones(3, dtype=torch.float64), rtol=1e-6)


# --- features and curvature --------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse", "double_vjp"])
def test_features(case, mode):
    """φ(x) = J(x)V and the outputs, by every way of differentiating."""
    la = fit(case, feature_mode=mode)
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    f_mu, phi = la.features(case.x_test)
    assert_close(f_mu, f)
    assert_close(phi, Js @ la.basis.vectors)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_features_of_architectures(name):
    """The default finds a way to differentiate attention, recurrence, weight norm."""
    case = make(name)
    la = fit(case)
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    f_mu, phi = la.features(case.x_test)
    assert_close(f_mu, f)
    assert_close(phi, Js @ la.basis.vectors)
    assert_close(la.H, reference(case, la).H)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_chunks_change_nothing(case, chunk_size):
    """`chunk_size` bounds memory, not values."""
    la, chunked = fit(case), fit(case, chunk_size=chunk_size)
    assert_close(
        chunked.features(case.x_test)[1].abs(), la.features(case.x_test)[1].abs()
    )
    assert_close(chunked.H.diagonal(), la.H.diagonal())


@pytest.mark.parametrize("subsample_size", [7, 10**6])
def test_curvature(case, subsample_size):
    """H = Σ φᵀΛφ in float64; loss, n_data, n_outputs and mean as Laplace sets them."""
    la = fit(case, subsample_size=subsample_size)
    expected = reference(case, la)
    assert la.H.dtype == torch.float64
    assert_close(la.H, expected.H)
    assert_close(torch.as_tensor(la.loss).double(), expected.loss)
    assert la.n_data == len(case.x)
    assert la.n_outputs == expected.f.shape[1]
    assert la.n_params == case.n_params
    assert_close(la.mean, expected.theta)


# --- posterior and evidence --------------------------------------------------------


@pytest.mark.parametrize("structure", PRIORS)
def test_posterior(case, structure):
    """G = H·factor + VᵀDV, its inverse, its determinants, its quadratic form."""
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior, temperature=1.7)
    expected = reference(case, la)
    G = expected.precision(prior)
    assert_close(la.posterior_precision, G)
    assert_close(la.posterior_covariance, torch.linalg.inv(G))
    assert_close(la.log_det_posterior_precision, G.logdet())
    prior_logdet = (G - expected.factor * expected.H).logdet()
    assert_close(la.log_det_prior_precision, prior_logdet)
    assert_close(la.log_det_ratio, G.logdet() - prior_logdet)
    z = torch.randn(la.rank).double()
    value = expected.theta + la.basis.vectors @ z
    assert_close(la.square_norm(value), z @ G @ z)
    normal = torch.distributions.MultivariateNormal(0 * z, precision_matrix=G)
    assert_close(la.log_prob(value), normal.log_prob(z))
    assert_close(la.log_prob(value, normalized=False), -0.5 * z @ G @ z)


@pytest.mark.parametrize("structure", PRIORS)
def test_evidence(case, structure):
    """log_marginal_likelihood, with prior mean and temperature, set then passed."""
    prior = priors(case)[structure]
    mean = torch.linspace(-1, 1, case.n_params).double()
    la = fit(case, prior_precision=prior, prior_mean=mean, temperature=0.6)
    expected = reference(case, la, prior_mean=mean)
    assert_close(la.log_likelihood.double(), expected.log_likelihood)
    assert_close(la.scatter, (expected.delta * expected.prior(prior)) @ expected.delta)
    assert_close(la.log_marginal_likelihood(), expected.evidence(prior))
    other = 3.1 * prior
    assert_close(la.log_marginal_likelihood(other), expected.evidence(other))


@pytest.mark.parametrize("structure", PRIORS)
def test_evidence_gradient(case, structure):
    """The evidence is differentiable in the prior precision, in all its structures."""
    la = fit(case)
    prior = priors(case)[structure].requires_grad_()
    (grad,) = torch.autograd.grad(la.log_marginal_likelihood(prior), prior)
    (expected,) = torch.autograd.grad(reference(case, la).evidence(prior), prior)
    assert_close(grad, expected)


@pytest.mark.parametrize("name", REGRESSION)
def test_evidence_gradient_noise(name):
    """The evidence is differentiable in the noise of the observations."""
    case = make(name)
    la = fit(case, prior_precision=0.3)

    def evidence(sigma):
        return reference(case, la, sigma=sigma).evidence(0.3)

    sigma = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    value = la.log_marginal_likelihood(sigma_noise=sigma)
    assert_close(value, evidence(sigma))
    (grad,) = torch.autograd.grad(value, sigma)
    (expected,) = torch.autograd.grad(evidence(sigma), sigma)
    assert_close(grad, expected)


# --- predictive --------------------------------------------------------------------


@pytest.mark.parametrize("structure", PRIORS)
def test_functional_covariance(case, structure):
    """Marginal and joint covariances of given Jacobians."""
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior)
    Sigma = reference(case, la).covariance(prior)
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    assert_close(la.functional_variance(Js), dense.marginal(Js, Sigma))
    assert_close(la.functional_covariance(Js), dense.joint(Js, Sigma))


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("name", REGRESSION)
def test_regression_predictive(name, structure):
    """Marginal (B, C, C), diagonal (B, C) and joint (B·C, B·C) predictive."""
    case = make(name)
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior, temperature=0.8)
    expected = reference(case, la)
    f, f_var = expected.predict(case.x_test, prior)
    for pred_type in ("glm", "gp"):
        f_mu, var = la(case.x_test, pred_type=pred_type)
        assert_close(f_mu, f)
        assert_close(var, f_var)
    _, diagonal = la(case.x_test, diagonal_output=True)
    assert_close(diagonal, f_var.diagonal(dim1=1, dim2=2))
    f_mu, f_cov = la(case.x_test, joint=True)
    joint_mu, joint_cov = expected.predict_joint(case.x_test, prior)
    assert_close(f_mu, joint_mu)
    assert_close(f_cov, joint_cov)


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
@pytest.mark.parametrize("name", CLASSIFICATION)
def test_closed_form_links(name, link):
    """Probit and the bridges from the factor agree with those from f_var (C×C)."""
    case = make(name)
    prior = priors(case)["layerwise"]
    la = fit(case, prior_precision=prior)
    expected = dense.LINKS[link](*reference(case, la).predict(case.x_test, prior))
    for pred_type in ("glm", "gp"):
        probs = la(case.x_test, pred_type=pred_type, link_approx=link)
        assert_close(probs, expected)


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_mc_link(name):
    """The Monte Carlo link converges to brute-force sampling of N(f_mu, f_var)."""
    case = make(name)
    la = fit(case, prior_precision=0.5)
    f, f_var = reference(case, la).predict(case.x_test, 0.5)
    expected = dense.LINKS["mc"](f, f_var)
    probs = la(case.x_test, link_approx="mc", n_samples=100_000)
    assert_close(probs, expected, rtol=0, atol=1e-2)
    assert_close(probs.sum(-1), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_mc_link_diagonal(name):
    """`diagonal_output` samples the outputs independently."""
    case = make(name)
    la = fit(case, prior_precision=0.5)
    f, f_var = reference(case, la).predict(case.x_test, 0.5)
    diagonal = torch.diag_embed(f_var.diagonal(dim1=1, dim2=2))
    expected = dense.LINKS["mc"](f, diagonal)
    options = {"link_approx": "mc", "n_samples": 100_000, "diagonal_output": True}
    assert_close(la(case.x_test, **options), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_functional_samples(name):
    """Draws (S, B, C) have the predictive mean and the joint covariance."""
    case = make(name)
    la = fit(case, prior_precision=0.5)
    f, f_cov = reference(case, la).predict_joint(case.x_test, 0.5)
    samples = la.functional_samples(case.x_test, n_samples=100_000, joint=True)
    assert samples.shape == (100_000, 7, 3)
    flat = samples.flatten(1)
    scale = f_cov.diagonal().max()
    assert_close(flat.mean(0), f, rtol=0, atol=0.02 * scale.sqrt().item())
    assert_close(flat.T.cov(), f_cov, rtol=0, atol=0.03 * scale.item())
    marginal = la.functional_samples(case.x_test, n_samples=100_000)
    assert_close(marginal.mean(0).flatten(), f, rtol=0, atol=0.02 * scale.sqrt().item())
    assert_close(
        marginal.var(0).flatten(), f_cov.diagonal(), rtol=0, atol=0.03 * scale.item()
    )


@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_weight_samples(name):
    """Samples θ̂ + V L⁻ᵀε have mean θ̂ and covariance V G⁻¹ Vᵀ, for any prior."""
    case = make(name)
    prior = priors(case)["diag"]
    la = fit(case, prior_precision=prior)
    expected = reference(case, la)
    samples = la.sample(100_000)
    assert samples.shape == (100_000, case.n_params)
    Sigma = expected.covariance(prior)
    scale = Sigma.diagonal().max().item()
    assert_close(samples.mean(0), expected.theta, rtol=0, atol=0.02 * scale**0.5)
    assert_close(samples.T.cov(), Sigma, rtol=0, atol=0.03 * scale)


# --- last layer --------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["scalar", "diag"])
@pytest.mark.parametrize("name", ["regression_3", "classification_cnn"])
def test_last_layer(name, structure):
    """The last-layer class is the same mathematics on the last layer's parameters."""
    case = make(name)
    la = fit(case, ELLALLLaplace)
    last = list(case.model.children())[-1]
    for p in case.model.parameters():
        p.requires_grad_(any(p is q for q in last.parameters()))
    prior = priors(case)[structure]
    la.prior_precision = prior
    expected = reference(case, la)
    assert la.n_params == case.n_params
    assert_close(la.mean, expected.theta)
    assert_close(la.H, expected.H)
    assert_close(la.log_marginal_likelihood(), expected.evidence(prior))
    f, f_var = expected.predict(case.x_test, prior)
    if case.likelihood == "regression":
        f_mu, var = la(case.x_test)
        assert_close(f_mu, f)
        assert_close(var, f_var)
    else:
        assert_close(la(case.x_test), dense.probit(f, f_var))
        mc = la(case.x_test, link_approx="mc", n_samples=100_000)
        expected_mc = dense.LINKS["mc"](f, f_var)
        assert_close(mc, expected_mc, rtol=0, atol=1e-2)


# --- the paper's two forms ---------------------------------------------------------


@pytest.mark.parametrize("name", ["regression_1", "classification_cnn"])
def test_equation_8_is_equation_21(name):
    """κ_ELLA through the features and through Σ' agree, with each other and with us."""
    case = make(name)
    n_out = case.model(case.x).shape[1]
    n = min(len(case.x), (case.n_params - 2) // n_out)  # the rows are independent
    case.x, case.y = case.x[:n], case.y[:n]
    rows, prior = all_rows(case), 0.9
    la = fit(case, ELLALaplace, n_eigenvalues=len(rows), prior_precision=prior)
    expected = reference(case, la)
    assert la.rank == len(rows) < case.n_params
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    ours = la.functional_covariance(Js).unflatten(0, (7, -1)).unflatten(2, (7, -1))
    for b, c in ((0, 0), (1, 4)):
        args = (Js[b], Js[c], expected.Js, expected.Lam, rows, prior)
        eq8, eq21 = dense.kappa_eq8(*args), dense.kappa_eq21(*args)
        assert_close(eq8, eq21, rtol=1e-5, atol=1e-7)
        assert_close(ours[b, :, c], eq8, rtol=1e-5, atol=1e-7)
