"""At full rank ELLA is FullLaplace; below it the error falls as K and M grow."""

import copy
import itertools

import pytest
import torch
from laplace import FullLaplace, FullLLLaplace
from laplace.curvature import BackPackGGN

from laplace_ella import ELLALaplace, ELLALLLaplace
from tests import dense
from tests.cases import PRIORS, Case, mlp, priors
from tests.fitting import assert_close, fit


def problem(likelihood, n_out):
    """N·C well above P, so that the gradients span the whole weight space."""
    torch.manual_seed(5)
    model = mlp(2, 3, n_out).double().eval()
    for p in model.parameters():
        p.data.mul_(1.5)
    x, x_test = 2 * torch.randn(40, 2).double(), 2 * torch.randn(6, 2).double()
    if likelihood == "regression":
        y = model(x).detach() + 0.3 * torch.randn(40, n_out).double()
    else:
        y = torch.distributions.Categorical(logits=model(x).detach()).sample()
    kwargs = {"sigma_noise": 0.5} if likelihood == "regression" else {}
    return Case(model, likelihood, x, y, x_test, kwargs)


PROBLEMS = {
    "regression_1": lambda: problem("regression", 1),
    "regression_2": lambda: problem("regression", 2),
    "classification_3": lambda: problem("classification", 3),
}


@pytest.fixture(params=PROBLEMS)
def case(request):
    return PROBLEMS[request.param]()


def fit_full(case, cls=FullLaplace, **kwargs):
    """laplace-torch's own, by explicit Jacobians: not all its backends are float64.

    BackPACK extends the model it is given, so it gets a copy.
    """
    exact = cls(
        copy.deepcopy(case.model),
        case.likelihood,
        backend=BackPackGGN,
        **(case.kwargs | kwargs),
    )
    exact.fit(case.loader(10))
    return exact


def pair(case, ella=ELLALaplace, full=FullLaplace, **kwargs):
    """ELLA at full rank and laplace-torch's FullLaplace on the same problem."""
    exact = fit_full(case, full, **kwargs)
    ours = fit(case, ella, n_eigenvalues=exact.n_params, **kwargs)
    assert ours.rank == exact.n_params
    return ours, exact


def latent(la, case, joint=False):
    """Covariance of the outputs at the test inputs, before any link."""
    Js = dense.jacobians(case.model, case.x_test)[1]
    return la.functional_covariance(Js) if joint else la.functional_variance(Js)


@pytest.mark.parametrize("structure", PRIORS)
def test_equals_full_laplace(case, structure):
    """Variance, covariance, evidence and determinants agree to float64 accuracy."""
    prior = priors(case)[structure]
    mean = torch.linspace(-0.5, 0.5, case.n_params).double()
    ours, exact = pair(case, prior_precision=prior, prior_mean=mean, temperature=1.3)
    for joint in (False, True):
        expected = latent(exact, case, joint)
        assert_close(latent(ours, case, joint), expected, rtol=1e-7)
    V = ours.basis.vectors
    assert_close(V @ ours.posterior_precision @ V.T, exact.posterior_precision)
    assert_close(ours.log_likelihood, exact.log_likelihood)
    assert_close(ours.scatter, exact.scatter)
    assert_close(ours.log_det_posterior_precision, exact.log_det_posterior_precision)
    assert_close(ours.log_det_prior_precision, exact.log_det_prior_precision)
    assert_close(ours.log_marginal_likelihood(), exact.log_marginal_likelihood())
    value = exact.mean + 0.1 * torch.randn(case.n_params).double()
    assert_close(ours.log_prob(value), exact.log_prob(value))


@pytest.mark.parametrize("structure", PRIORS)
def test_tuned_prior_equals_full_laplace(case, structure):
    """The prior tuned by the marginal likelihood is that of FullLaplace."""
    ours, exact = pair(case)
    for la in (ours, exact):
        la.optimize_prior_precision(
            method="marglik", prior_structure=structure, n_steps=60, lr=0.1
        )
    assert_close(ours.prior_precision, exact.prior_precision, rtol=1e-6)
    assert_close(
        ours.log_marginal_likelihood(), exact.log_marginal_likelihood(), rtol=1e-7
    )


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_links_equal_full_laplace(link):
    """The closed-form links are those of laplace-torch."""
    case = PROBLEMS["classification_3"]()
    ours, exact = pair(case, prior_precision=0.6)
    expected = exact(case.x_test, link_approx=link)
    assert_close(ours(case.x_test, link_approx=link), expected, rtol=1e-7)


def test_regression_predictive_equals_full_laplace():
    """`la(x)` and `la(x, joint=True)` return what FullLaplace returns."""
    case = PROBLEMS["regression_2"]()
    ours, exact = pair(case, prior_precision=0.6)
    for joint in (False, True):
        predictions = [la(case.x_test, joint=joint) for la in (ours, exact)]
        for a, b in zip(*predictions, strict=True):
            assert_close(a, b, rtol=1e-7)


@pytest.mark.parametrize("name", ["regression_2", "classification_3"])
def test_last_layer_equals_full_last_layer(name):
    """The last-layer class at full rank is FullLLLaplace."""
    case = PROBLEMS[name]()
    ours, exact = pair(case, ELLALLLaplace, FullLLLaplace, prior_precision=0.6)
    assert_close(ours.log_marginal_likelihood(), exact.log_marginal_likelihood())
    a, b = ours(case.x_test), exact(case.x_test)
    if isinstance(b, tuple):
        assert_close(a[0], b[0])
        assert_close(a[1], b[1], rtol=1e-7)
    else:
        assert_close(a, b, rtol=1e-7)


def relative_error(ours, exact, case):
    a, b = latent(ours, case), latent(exact, case)
    return ((a - b).norm() / b.norm()).item()


def test_error_falls_with_rank(case):
    """The error to FullLaplace never grows with K, and ends at zero."""
    exact = fit_full(case)
    ranks = [1, 2, 4, 8, case.n_params]
    errors = [relative_error(fit(case, n_eigenvalues=k), exact, case) for k in ranks]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(errors)), errors
    assert errors[0] > 0.05
    assert errors[-1] < 1e-7


def test_error_falls_with_samples(case):
    """The error to FullLaplace, averaged over seeds, falls with M and ends at zero."""
    exact = fit_full(case)

    def error(m):
        fits = (
            fit(case, n_eigenvalues=case.n_params, subsample_size=m, seed=seed)
            for seed in range(4)
        )
        return sum(relative_error(la, exact, case) for la in fits) / 4

    errors = [error(m) for m in (2, 6, 10, 10**6)]
    assert all(b < a for a, b in itertools.pairwise(errors)), errors
    assert errors[-1] < 1e-7
