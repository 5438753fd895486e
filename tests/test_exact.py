"""`n_eigenvalues="exact"` is linearised Laplace itself, at every prior precision."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace, ELLALLLaplace
from laplace_ella.errors import NumericalWarning, RankWarning
from tests import dense
from tests.cases import Case, mlp, priors


@dataclass
class Problem(Case):
    """A case with the class that fits it, and the names of the uncertain parameters."""

    cls: type = ELLALaplace
    uncertain: tuple[str, ...] | None = None  # all if None

    @property
    def params(self):
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.uncertain or named]

    @property
    def sigma(self):
        return torch.as_tensor(self.kwargs.get("sigma_noise", 1.0)).double()

    def fit(self, dtype=torch.float64, **kwargs):
        """An exact fit of the network in this precision; no warning is allowed."""
        model = copy.deepcopy(self.model).to(dtype)
        options = {"n_eigenvalues": "exact"} | self.kwargs | kwargs
        la = self.cls(model, self.likelihood, **options)
        y = self.y.to(dtype) if self.y.is_floating_point() else self.y
        with warnings.catch_warnings():
            warnings.simplefilter("error", RankWarning)
            la.fit(DataLoader(TensorDataset(self.x.to(dtype), y), 5))
        return la

    def jacobians(self, x):
        """Outputs (B, O) and Jacobians (B, O, P) in the model's order."""
        return dense.jacobians(nn.Sequential(self.model, nn.Flatten()), x, self.params)

    def rows(self, outputs, x):
        """`(B, O, ...)` in the model's order as `(B·S, C, ...)`."""
        shape = self.model(x[:1]).shape[1:]
        if self.kwargs.get("output_layout") == "channels_first":
            return outputs.unflatten(1, (shape[0], -1)).transpose(1, 2).flatten(0, 1)
        return outputs.unflatten(1, (-1, shape[-1])).flatten(0, 1)

    def reference(self):
        f, Js = self.jacobians(self.x)
        if self.y.is_floating_point():
            y = self.rows(self.y.flatten(1), self.x)
        else:
            y = self.y.flatten()
        kind = "multi_label" if self.kwargs.get("multi_label") else self.likelihood
        theta = torch.cat([p.detach().flatten() for p in self.params])
        return dense.Exact(self.rows(f, self.x), self.rows(Js, self.x), y, kind, theta)


def data(model, likelihood, n, shape, cls=ELLALaplace, uncertain=None, **kwargs):
    x, x_test = torch.randn(n, *shape).double(), torch.randn(4, *shape).double()
    model = model.double().eval()
    with torch.no_grad():
        f = model(x)
    if likelihood == "regression":
        y = f + 0.3 * torch.randn_like(f)
    elif kwargs.get("multi_label"):
        y = (torch.rand_like(f) < f.sigmoid()).double()
    else:
        y = torch.distributions.Categorical(logits=f).sample()
    return Problem(model, likelihood, x, y, x_test, kwargs, cls, uncertain)


def conv():
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1))


REG, CLASS, SECOND = "regression", "classification", ("2.weight", "2.bias")
NOISES = torch.tensor([0.3, 0.7]).double()
FIRST = {"output_layout": "channels_first", "sigma_noise": 0.4}
NAMES = {"parameter_names": ["2.*"], "uncertain": SECOND, "sigma_noise": 0.5}
PROBLEMS = {
    "regression": lambda: data(mlp(1, 16, 1), REG, 30, (1,), sigma_noise=0.1),
    "two_noises": lambda: data(mlp(2, 6, 2), REG, 11, (2,), sigma_noise=NOISES),
    "classification": lambda: data(mlp(3, 8, 3), CLASS, 12, (3,)),
    "multi_label": lambda: data(mlp(3, 7, 2), CLASS, 12, (3,), multi_label=True),
    "channels_last": lambda: data(
        mlp(2, 6, 2), CLASS, 5, (3, 2), output_layout="channels_last"
    ),
    "channels_first": lambda: data(conv(), REG, 5, (1, 3, 3), **FIRST),
    "parameter_names": lambda: data(mlp(3, 4, 4, 1), REG, 9, (3,), **NAMES),
    "last_layer": lambda: data(mlp(3, 8, 3), CLASS, 9, (3,), ELLALLLaplace, SECOND),
}


def make(name):
    torch.manual_seed(sum(map(ord, name)))
    return PROBLEMS[name]()


def close(actual, expected, rtol):
    """Equal up to a fraction of the largest value."""
    atol = rtol * expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["64", "32"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_variance_and_evidence(name, dtype):
    """Marginal and joint covariances, evidence and its gradients, for every prior."""
    problem = make(name)
    exact, la = problem.reference(), problem.fit(dtype)
    x = torch.cat([problem.x_test, problem.x[:2]])
    _, Js = problem.jacobians(x)
    rtol = 1e-7 if dtype == torch.float64 else 1e-5
    noise = problem.sigma.to(dtype)
    for prior in priors(problem).values():
        D = dense.expand_prior(prior, problem.params)
        la.prior_precision = prior.to(dtype)
        joint = exact.covariance(Js.flatten(0, 1), D, problem.sigma)
        close(la._glm_predictive_distribution(x.to(dtype), joint=True)[1], joint, rtol)
        rows = problem.rows(Js, x)
        marginal = torch.stack([exact.covariance(J, D, problem.sigma) for J in rows])
        variance = la._glm_predictive_distribution(x.to(dtype))[1]
        close(variance.flatten(0, -3), marginal, rtol)

        a, s = prior.to(dtype).requires_grad_(), noise.clone().requires_grad_()
        b, t = prior.clone().requires_grad_(), problem.sigma.clone().requires_grad_()
        regression = problem.likelihood == "regression"
        value = la.log_marginal_likelihood(a, s if regression else None)
        expected = exact.evidence(dense.expand_prior(b, problem.params), t)
        close(value, expected.detach(), rtol)
        pairs = [(a, b), (s, t)] if regression else [(a, b)]
        ours, theirs = zip(*pairs, strict=True)
        for g, h in zip(
            torch.autograd.grad(value, ours),
            torch.autograd.grad(expected, theirs),
            strict=True,
        ):
            close(g, h, 10 * rtol)
        la.prior_precision, la.sigma_noise = prior.to(dtype), noise


@pytest.mark.parametrize("name", ["regression", "classification", "last_layer"])
def test_the_coefficients_are_the_features(name):
    """The one pass of an exact fit has outputs, features and targets of its data."""
    problem = make(name)
    la = problem.fit()
    training = la.fitted.training
    assert training is not None
    f, phi = la.features(problem.x)
    N = len(problem.x)
    close(training.f.reshape(N, -1), f, 1e-12)
    close(training.phi.reshape(N, -1, la.rank), phi, 1e-9)
    assert torch.equal(training.y.reshape(N, -1), problem.y.reshape(N, -1))
    f, Js = problem.jacobians(problem.x)
    Lam = dense.loss_hessian(f, problem.likelihood)
    close(la.H, dense.curvature(Js, Lam, la.basis.vectors), 1e-9)


@pytest.mark.parametrize("name", ["regression", "classification", "two_noises"])
def test_any_prior_precision(name):
    """float32 models, priors of 1e-4 to 1e4: the same to 1e-4, also at training
    inputs, where the variance is a small difference, and finite samples."""
    problem = make(name)
    exact, la = problem.reference(), problem.fit(torch.float32)
    x = torch.cat([problem.x, problem.x_test, 10 * problem.x_test])
    _, Js = problem.jacobians(x)
    layers = torch.tensor([1.0, 3.0, 0.5, 2.0]).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (1e-4, 1.0, 1e4):
            for prior in (scale * torch.ones(1).double(), scale * layers):
                la.prior_precision = prior.float()
                D = dense.expand_prior(prior.float(), problem.params)
                expected = torch.stack(
                    [exact.covariance(J, D, problem.sigma).diagonal() for J in Js]
                )
                _, variance = la._glm_predictive_distribution(
                    x.float(), diagonal_output=True
                )
                relative = (variance.double() / expected - 1).abs().max()
                assert relative < 1e-4, (scale, relative)
            for joint in (False, True):
                samples = la.functional_samples(x.float(), n_samples=3, joint=joint)
                assert torch.isfinite(samples).all()


def test_more_gradients_than_parameters(monkeypatch):
    """Where there are more pairs than weights, and where a Gram matrix is used."""
    monkeypatch.setattr("laplace_ella.posterior.basis.SVD_LIMIT", 0)
    for n in (8, 60):  # 25 weights
        problem = data(mlp(2, 6, 1), REG, n, (2,), sigma_noise=0.2)
        la = problem.fit(prior_precision=0.01)
        assert (la.rank, la.basis.method) == (min(n, 25), "gram")
        Js = problem.jacobians(problem.x_test)[1].flatten(0, 1)
        D = torch.full((25,), 0.01).double()
        expected = problem.reference().covariance(Js, D, problem.sigma)
        close(la(problem.x_test, joint=True)[1], expected, 1e-6)


def test_the_error_that_rounding_makes_is_known():
    """Rounding counts for more under weak priors; derivatives are in float64."""
    problem = data(mlp(4, 50, 50, 1), REG, 60, (4,), sigma_noise=0.1)
    la = problem.fit(torch.float32)
    assert la.fitted.dtype == torch.float64
    priors = (torch.tensor([p]).double() for p in (1e-8, 1e-2, 1.0))
    errors = [la.fitted.variance_error(la.posterior.with_(prior=p)) for p in priors]
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        la(problem.x.float())


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_exact_keeps_the_complement(cls):
    with pytest.raises(ValueError, match=re.compile("complement='drop'.*", re.DOTALL)):
        cls(mlp(2, 3), "regression", n_eigenvalues="exact", complement="drop")
