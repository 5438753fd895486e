"""Curvature, posterior, evidence and predictions against the dense reference."""

import pytest
import torch
from laplace import FullLaplace
from laplace.curvature import BackPackGGN

from laplace_ella import ELLALLLaplace
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.likelihood import (
    curvature_root,
    losses,
    sample_cotangents,
    target_cotangents,
)
from laplace_ella.posterior.observation import Family, psd_root
from laplace_ella.posterior.posterior import SubspacePosterior
from tests import dense
from tests.cases import CASES, PRIORS, make, priors
from tests.fitting import assert_close, fit

structures = pytest.mark.parametrize("structure", PRIORS)


@pytest.fixture(params=CASES)
def case(request):
    return make(request.param)


def reference(case, la, **kwargs):
    """The dense reference on the directions and the noise of a fitted `la`."""
    kwargs = {"sigma": la.sigma_noise, "temperature": la.temperature} | kwargs
    return dense.Reference(case, la.basis.vectors, **kwargs)


def posterior_of(case, prior, complement):
    """The posterior of a fit with another prior, and its dense reference."""
    la = fit(case, temperature=0.6)
    if complement != 3.0:
        complement = Complement(complement)
    posterior = la.posterior.with_(prior=prior, complement=complement)
    return posterior, reference(case, la)


@structures
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_densities_and_samples_without_chance(case, structure, complement):
    """Precision, covariance and scale are of z = Vᵀ(θ − θ̂), for every prior; samples
    are θ − θ̂ = Aᵀε with AᵀA = Σ; quadratic form and determinants are those of Σ⁻¹."""
    prior = priors(case)[structure]
    posterior, expected = posterior_of(case, prior, complement)
    V = posterior.basis.vectors
    Sigma = expected.covariance(prior, complement)
    assert_close(posterior.covariance, V.T @ Sigma @ V)
    assert_close(posterior.precision, torch.linalg.inv(V.T @ Sigma @ V))
    assert_close(posterior.scale @ posterior.scale.mT, V.T @ Sigma @ V)
    K, P = posterior.rank, posterior.n_params
    D, H = expected.prior(prior), expected.H
    eye = torch.eye(K + P, dtype=torch.float64)
    if complement == "drop":
        A = posterior.sample_offsets(eye[:K, :K], None)
        before, after = V.T @ (D[:, None] * V), expected.precision(prior)
        delta = V @ torch.randn(K).double()
        norm = (V.T @ delta) @ after @ (V.T @ delta)
    else:
        A = posterior.sample_offsets(*eye.split([K, P], dim=1))
        before, after = D.diag(), torch.linalg.inv(Sigma)
        delta = torch.randn(P).double()
        norm = delta @ after @ delta
    assert_close(A.T @ A, Sigma)
    assert_close(posterior.square_norm(delta), norm)
    assert_close(posterior.log_det_prior, before.logdet())
    assert_close(posterior.log_det_precision, after.logdet())
    assert_close(posterior.log_det_ratio, after.logdet() - before.logdet())
    assert posterior.dimension == len(before)
    ratios = posterior.log_det_ratios()
    for k in (1, 3, K):
        small = posterior.truncate(k)
        assert_close(ratios[k - 1], small.log_det_ratio)
        assert_close(small.H, H[:k, :k])


@structures
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_log_determinants_are_differentiable(case, structure, complement):
    prior = priors(case)[structure].requires_grad_()
    posterior, expected = posterior_of(case, prior, complement)
    D, V, f = expected.prior(prior), expected.V, expected.factor
    if complement == "drop":
        before = V.T @ (D[:, None] * V)
        ratio = torch.logdet(before + f * expected.H) - torch.logdet(before)
    else:
        inner = torch.eye(len(expected.H)).double()
        inner = inner + f * expected.H @ (V.T / D) @ V
        ratio = torch.logdet(inner)
    firsts = [
        torch.autograd.grad(value, prior, create_graph=True)[0]
        for value in (posterior.log_det_ratio, ratio)
    ]
    assert_close(*firsts)
    seconds = [torch.autograd.grad(g.sin().sum(), prior)[0] for g in firsts]
    assert_close(*seconds, rtol=1e-6)


def covariance(case, posterior, turn=None):
    """Of function values at the test inputs, with features turned to another basis."""
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    phi = Js @ posterior.basis.vectors
    rest = Js - phi @ posterior.basis.directions
    residual = (rest @ rest.mT).unsqueeze(1)
    if turn is None:
        return posterior.function_values(f, phi, residual).covariance()
    rotated, Q = turn
    return rotated.function_values(f, phi @ Q, residual).covariance()


@pytest.mark.parametrize("complement", ["drop", "prior", 3.0])
def test_in_the_eigenbasis(case, complement):
    """H (K,), features φQ: the same function values, evidence and covariance."""
    prior = torch.tensor([0.3]).double()
    posterior, _ = posterior_of(case, prior, complement)
    rotated, Q = posterior.rotated()
    assert rotated.H.shape == rotated.precision.shape == (posterior.rank,)
    assert_close(Q * rotated.covariance @ Q.T, posterior.covariance)
    assert_close(rotated.log_det_ratio, posterior.log_det_ratio)
    for candidate in (0.01, 1.0, 100.0):
        a, b = (
            each.with_(prior=torch.tensor([candidate]).double())
            for each in (posterior, rotated)
        )
        assert_close(covariance(case, a), covariance(case, a, (b, Q)))


def test_reduced_posteriors_predict_the_same(case, monkeypatch):
    """Directions with fλ/(fλ + δ) below the tolerance change no variance by more."""
    posterior, _ = posterior_of(case, torch.ones(1).double(), "prior")
    assert posterior.for_predictions is posterior  # few directions
    monkeypatch.setattr("laplace_ella.posterior.posterior.MANY_DIRECTIONS", 0)
    dropped = posterior.with_(complement=Complement.DROP)
    assert dropped.for_predictions is dropped
    ranks = []
    for prior in (1.0, 1e4, 1e7):
        full = posterior.with_(prior=torch.tensor([prior]).double())
        reduced = full.for_predictions
        ranks.append(reduced.rank)
        expected = covariance(case, full)
        diagonal = expected.diagonal(dim1=-2, dim2=-1).sqrt()
        error = (covariance(case, reduced) - expected).abs()
        assert (error <= 1e-4 * diagonal[..., None] * diagonal[:, None]).all()
        V = reduced.basis.vectors
        assert_close(V.T @ V, torch.eye(reduced.rank).double())
    assert ranks[-1] < ranks[0] <= posterior.rank


def test_indefinite_curvature_is_an_error_or_a_warning(case):
    posterior, _ = posterior_of(case, torch.ones(1).double(), "drop")
    with pytest.raises(torch.linalg.LinAlgError, match="not positive definite, even"):
        _ = posterior.with_(H=-10 * posterior.H).scale


@pytest.mark.parametrize("subsample_size", [7, 10**6])
def test_curvature(case, subsample_size):
    """H = Σ φᵀΛφ in float64; loss, n_data, n_outputs and mean as Laplace sets them."""
    la = fit(case, subsample_size=subsample_size)
    expected = reference(case, la)
    assert la.H.dtype == torch.float64
    assert_close(la.H, expected.H)
    assert_close(torch.as_tensor(la.loss).double(), expected.loss)
    sizes = (la.n_data, la.n_outputs, la.n_params)
    assert sizes == (*expected.f.shape, case.n_params)
    assert_close(la.mean, expected.theta)


@structures
def test_posterior_and_evidence_of_a_fit(case, structure):
    """G = H·factor + VᵀDV, its inverse, its determinants, its density; the evidence
    with prior mean and temperature, set then passed, and its gradients."""
    prior = priors(case)[structure]
    mean = torch.linspace(-1, 1, case.n_params).double()
    la = fit(case, prior_precision=prior, prior_mean=mean, temperature=1.7)
    expected = reference(case, la, prior_mean=mean)
    G = expected.precision(prior)
    assert_close(la.posterior_precision, G)
    assert_close(la.posterior_covariance, torch.linalg.inv(G))
    assert_close(la.log_det_posterior_precision, G.logdet())
    prior_logdet = (G - expected.factor * expected.H).logdet()
    assert_close(la.log_det_prior_precision, prior_logdet)
    assert_close(la.log_det_ratio, G.logdet() - prior_logdet)
    z = torch.randn(la.rank).double()
    value = expected.theta + la.basis.vectors @ z
    normal = torch.distributions.MultivariateNormal(0 * z, precision_matrix=G)
    assert_close(la.log_prob(value), normal.log_prob(z))
    assert_close(la.log_prob(value, normalized=False), -0.5 * z @ G @ z)
    assert_close(la.log_likelihood.double(), expected.log_likelihood)
    assert_close(la.scatter, (expected.delta * expected.prior(prior)) @ expected.delta)
    assert_close(la.log_marginal_likelihood(), expected.evidence(prior))
    other = (3.1 * prior).requires_grad_()
    values = la.log_marginal_likelihood(other), expected.evidence(other)
    assert_close(*values)
    assert_close(*(torch.autograd.grad(value, other)[0] for value in values))
    if case.likelihood == "regression":
        sigma = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        expected = reference(case, la, prior_mean=mean, sigma=sigma)
        values = (
            la.log_marginal_likelihood(sigma_noise=sigma),
            expected.evidence(other.detach()),
        )
        assert_close(*values)
        assert_close(*(torch.autograd.grad(value, sigma)[0] for value in values))


@structures
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_functional_covariance(case, structure, complement):
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior, complement=complement, temperature=0.8)
    expected = reference(case, la)
    Sigma = expected.covariance(prior, complement)
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    marginal, joint = dense.marginal(Js, Sigma), dense.joint(Js, Sigma)
    assert_close(la.functional_variance(Js), marginal)
    assert_close(la.functional_covariance(Js), joint)
    if case.likelihood == "classification":
        return
    for pred_type in ("glm", "gp"):
        assert_close(la(case.x_test, pred_type=pred_type), (f, marginal))
    _, diagonal = la(case.x_test, diagonal_output=True)
    assert_close(diagonal, marginal.diagonal(dim1=1, dim2=2))
    assert_close(la(case.x_test, joint=True), (f.flatten(), joint))


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_samples(name, complement, monkeypatch):
    """Functions jointly and at each input, and weights, have mean and covariance; at
    the prior samples are drawn in parts, whatever their number."""
    monkeypatch.setattr("laplace_ella.posterior.predictive.BUDGET", 10**6)
    case, n = make(name), 100_000
    prior = priors(case)["diag"]
    la = fit(case, prior_precision=prior, complement=complement)
    expected = reference(case, la)
    Sigma = expected.covariance(prior, complement)
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    joint = dense.joint(Js, Sigma)

    def check(samples, mean, covariance):
        scale = covariance.diagonal().max().item()
        assert_close(samples.mean(0), mean, rtol=0, atol=0.02 * scale**0.5)
        assert_close(samples.T.cov(), covariance, rtol=0, atol=0.03 * scale)

    for m in (n, 5):  # more samples than function values, and fewer
        samples = la.functional_samples(case.x_test, n_samples=m, joint=True)
        assert samples.shape == (m, 7, 3)
        if m == n:
            check(samples.flatten(1), f.flatten(), joint)
    marginal = la.functional_samples(case.x_test, n_samples=n)
    check(marginal[:, 2], f[2], joint[6:9, 6:9])
    weights = la.sample(n)
    assert weights.shape == (n, case.n_params)
    check(weights, expected.theta, Sigma)


def test_joint_samples_at_the_prior_are_drawn_in_parts(monkeypatch):
    """REBUILD, suspected: (S, P) numbers of weights are never there at once."""
    sizes, draw = [], SubspacePosterior.sample_offsets

    def watched(self, noise, outside):
        sizes.append(len(noise))
        return draw(self, noise, outside)

    case = make("classification_cnn")
    la = fit(case, complement="prior", prior_precision=0.5)
    monkeypatch.setattr(SubspacePosterior, "sample_offsets", watched)
    monkeypatch.setattr("laplace_ella.posterior.predictive.BUDGET", 4 * case.n_params)
    x = case.x_test.repeat(3, 1, 1, 1)
    samples = la.functional_samples(x, n_samples=10, joint=True)
    assert sizes == [4, 4, 2]
    assert samples.shape == (10, 21, 4)
    assert_close(samples[:, :7], samples[:, 7:14])  # one function each


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
        assert_close(la(case.x_test), (f, f_var))
    else:
        assert_close(la(case.x_test), dense.probit(f, f_var))


@pytest.mark.parametrize("name", ["regression_1", "classification_cnn"])
def test_equation_21(name):
    """κ_ELLA through Σ', without eigenvectors, is that of all directions (Eq. 8)."""
    case, prior = make(name), 0.9
    n = min(len(case.x), (case.n_params - 2) // case.model(case.x).shape[1])
    case.x, case.y = case.x[:n], case.y[:n]  # the rows are independent
    rows = dense.jacobians(case.model, case.x, case.params)[1].flatten(0, 1)
    la = fit(case, n_eigenvalues=len(rows), prior_precision=prior)
    expected = reference(case, la)
    assert la.rank == len(rows) < case.n_params
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    ours = la.functional_covariance(Js).unflatten(0, (7, -1)).unflatten(2, (7, -1))
    args = (Js[1], Js[4], expected.Js, expected.Lam, rows, prior)
    assert_close(ours[1, :, 4], dense.kappa_eq21(*args), rtol=1e-5, atol=1e-7)


@structures
@pytest.mark.parametrize("temperature", [0.2, 7.5])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_full_rank_equals_full_laplace(name, exact, temperature, structure):
    case = make(name)
    prior = priors(case)[structure]
    case.x = 2 * torch.randn(40, 3).double()  # N·C well above P
    f = case.model(case.x).detach()
    case.y = f + 0.1 if case.likelihood == "regression" else f.argmax(1)
    mean = torch.linspace(-0.5, 0.5, case.n_params).double()
    options = {"prior_precision": prior, "prior_mean": mean}
    how = {"n_eigenvalues": "exact", "complement": "prior"}
    ours = fit(case, **options, **(how if exact else {"n_eigenvalues": case.n_params}))
    ours(case.x_test)  # with a posterior that must not be used again
    ours.temperature = temperature
    options |= case.kwargs | {"backend": BackPackGGN, "temperature": temperature}
    full = FullLaplace(case.model, case.likelihood, **options)
    full.fit(case.loader(10))
    assert ours.effective_n_data == pytest.approx(40 / temperature)
    Js = dense.jacobians(case.model, case.x_test)[1]
    close = {"rtol": 1e-6, "atol": 1e-8}
    for name in ("functional_variance", "functional_covariance"):
        assert_close(getattr(ours, name)(Js), getattr(full, name)(Js), **close)
    for joint in (False, True):
        both = (
            la._glm_predictive_distribution(case.x_test, joint) for la in (ours, full)
        )
        for a, b in zip(*both, strict=True):
            assert_close(a, b.detach(), **close)
    value = full.mean + 0.1 * torch.randn(case.n_params).double()
    assert_close(ours.log_prob(value), full.log_prob(value))
    assert_close(ours.log_marginal_likelihood(), full.log_marginal_likelihood())
    assert_close(ours.log_det_posterior_precision, full.log_det_posterior_precision)


LOGITS = {
    "even": torch.tensor([[0.1, -0.2, 0.0, 0.3], [1.0, 0.0, -1.0, 0.5]]),
    "confident": torch.tensor([[9.0, 0.0, -3.0, 1.0], [-8.0, 2.0, 14.0, 0.0]]),
    "certain": torch.tensor([[200.0, 0.0, 0.0, 0.0], [0.0, 0.0, -300.0, 900.0]]),
}


def hessian(f, family):
    """Λ (B, C, C), without the cancellation of p − p²."""
    C = f.shape[-1]
    if family is Family.GAUSSIAN:
        return torch.eye(C, dtype=f.dtype).expand(len(f), C, C)
    if family is Family.BERNOULLI:
        return torch.diag_embed(f.sigmoid() * (-f).sigmoid())
    p = f.softmax(-1)
    others = p @ (1 - torch.eye(C, dtype=f.dtype))
    off = p[:, :, None] * p[:, None, :] * (1 - torch.eye(C, dtype=f.dtype))
    return torch.diag_embed(p * others) - off


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("family", Family)
def test_roots_and_cotangents_of_the_curvature(family, logits):
    """ψᵀψ = φᵀΛφ; sampled cotangents have E[ccᵀ] = Λ and E[c] = 0."""
    f, n = LOGITS[logits].double(), 200_000
    Lam, phi = hessian(f, family), torch.randn(2, 4, 3).double()
    psi = curvature_root(f, phi, family)
    assert_close(psi.mT @ psi, phi.mT @ Lam @ phi, rtol=1e-7, atol=1e-30)
    c = sample_cotangents(f, family, n, torch.Generator().manual_seed(0))
    scale = Lam.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)[:, None, None]
    assert_close(c @ c.mT / scale, Lam / scale, atol=0.02, rtol=0)
    mean = c.sum(-1, keepdim=True) / n**0.5 / scale.sqrt()
    assert_close(mean, torch.zeros_like(mean), atol=0.02, rtol=0)
    targets = {Family.GAUSSIAN: f + 1, Family.BERNOULLI: (f > 0).double()}
    y = targets.get(family, torch.tensor([1, 3]))
    f.requires_grad_()
    gradient = torch.autograd.grad(losses(f, y, family).sum(), f)[0]
    factor = 2**0.5 if family.is_regression else 1.0  # as in Laplace
    assert_close(target_cotangents(f.detach(), y, family), factor * gradient)


def test_one_sample_is_enough_for_a_confident_network():
    """Labels drawn from p miss nearly all the curvature of confident predictions."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    f[:, 0] += 7
    phi = torch.randn(400, 3, 5, generator=generator, dtype=torch.float64)

    def error(cotangents):
        psi = cotangents.mT @ phi  # (R, 1, K)
        sampled = torch.einsum("rsk,rsl->kl", psi, psi)
        root = curvature_root(f, phi, Family.CATEGORICAL)
        exact = torch.einsum("rck,rcl->kl", root, root)
        return float((sampled - exact).norm() / exact.norm())

    p = f.softmax(-1)
    labels = torch.multinomial(p, 1, generator=generator)
    labels = torch.nn.functional.one_hot(labels[:, 0], 3).double()
    ours = error(sample_cotangents(f, Family.CATEGORICAL, 1, generator))
    assert ours < min(0.3, error((labels - p).unsqueeze(-1)) / 2)


def test_roots_of_matrices_with_nan():
    """Issue 32, row n: one bad row leaves the others as they are."""
    A = torch.randn(3, 4, 4).double()
    matrix = A @ A.mT
    expected = psd_root(matrix)
    assert_close(expected @ expected.mT, matrix)
    broken = matrix.clone()
    broken[1, 2], broken[1, :, 2] = torch.nan, torch.nan
    root = psd_root(broken)
    assert_close(root[[0, 2]], expected[[0, 2]])
    assert root[1, 2].isnan().all()
    others = torch.tensor([[0], [1], [3]]), torch.tensor([0, 1, 3])
    assert_close((root[1] @ root[1].T)[others], matrix[1][others])


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_a_nan_among_the_inputs_stays_in_its_row(name, complement):
    """For marginals, links, samples of functions, jointly or not, and covariances."""
    case = make(name)
    la = fit(case, complement=complement, prior_precision=0.5)
    x = case.x_test.clone()
    x[2] = torch.nan
    good = torch.tensor([0, 1, 3, 4, 5, 6])

    def check(predict, dim=0):
        broken, whole = predict(x).transpose(0, dim), predict(case.x_test)
        assert broken[2].isnan().all()
        assert torch.isfinite(broken[good]).all()
        assert broken.shape == whole.transpose(0, dim).shape

    if case.likelihood == "classification":
        for link in ("mc", *dense.LINKS):
            check(lambda x, link=link: la(x, link_approx=link))
        clean = la(case.x_test, link_approx="bridge")
        assert_close(la(x, link_approx="bridge")[good], clean[good])
    else:
        check(lambda x: la(x)[1])
    for n in (4, 50):
        check(lambda x, n=n: la.functional_samples(x, n_samples=n), 1)
        check(lambda x, n=n: la.functional_samples(x, n_samples=n, joint=True), 1)
