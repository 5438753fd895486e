"""`n_eigenvalues="exact"` is linearised Laplace itself, at every prior precision."""

from __future__ import annotations

import copy
import io
import logging
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from laplace import FullLaplace
from laplace.curvature import BackPackGGN
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import (
    ELLALaplace,
    ELLALLLaplace,
    InsufficientMemoryError,
    NumericalWarning,
    RankWarning,
)
from laplace_ella.fitting import plan
from laplace_ella.fitting.fit import Fitter
from laplace_ella.posterior.basis import RowSketch
from laplace_ella.tuning.cache import FeatureCache
from tests import dense
from tests.cases import mlp


@dataclass
class Problem:
    """A network in float64 with data, and what the dense reference needs of it."""

    model: nn.Module
    likelihood: str
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)
    cls: type = ELLALaplace
    uncertain: tuple[str, ...] | None = None  # names; all if None
    channels_first: bool = False

    @property
    def params(self):
        named = dict(self.model.named_parameters())
        if self.uncertain is not None:
            return [named[name] for name in self.uncertain]
        return [p for p in named.values() if p.requires_grad]

    @property
    def sigma(self):
        return torch.as_tensor(self.kwargs.get("sigma_noise", 1.0)).double()

    def fit(self, dtype=torch.float64, **kwargs):
        """An exact fit of the network in this precision; no warning is allowed."""
        model = copy.deepcopy(self.model).to(dtype)
        y = self.y.to(dtype) if self.y.is_floating_point() else self.y
        options = {"n_eigenvalues": "exact"} | self.kwargs | kwargs
        la = self.cls(model, self.likelihood, **options)
        loader = DataLoader(TensorDataset(self.x.to(dtype), y), batch_size=5)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RankWarning)
            la.fit(loader)
        return la

    def jacobians(self, x):
        """Outputs (B, O) and Jacobians (B, O, P) in the model's order."""
        flat = nn.Sequential(self.model, nn.Flatten())
        f, Js = dense.jacobians(flat, x, self.params)
        return f, Js

    def rows(self, outputs, x):
        """`(B, O, ...)` in the model's order as `(B·S, C, ...)`."""
        shape = self.model(x[:1]).shape[1:]
        if self.channels_first:
            return outputs.unflatten(1, (shape[0], -1)).transpose(1, 2).flatten(0, 1)
        return outputs.unflatten(1, (-1, shape[-1])).flatten(0, 1)

    def reference(self):
        f, Js = self.jacobians(self.x)
        y = self.y
        if self.channels_first:
            y = y.flatten(2).transpose(1, 2).flatten(0, 1)
        elif self.y.is_floating_point():
            y = y.flatten(0, -2)
        else:
            y = y.flatten()
        kind = "multi_label" if self.kwargs.get("multi_label") else self.likelihood
        theta = torch.cat([p.detach().flatten() for p in self.params])
        return dense.Exact(self.rows(f, self.x), self.rows(Js, self.x), y, kind, theta)


def data(model, likelihood, n, *shape, **kwargs):
    x, x_test = torch.randn(n, *shape).double(), torch.randn(4, *shape).double()
    model = model.double().eval()
    with torch.no_grad():
        f = model(x)
    if likelihood == "regression":
        y = f + 0.3 * torch.randn_like(f)
    elif kwargs.get("kwargs", {}).get("multi_label"):
        y = (torch.rand_like(f) < f.sigmoid()).double()
    else:
        y = torch.distributions.Categorical(logits=f).sample()
    return Problem(model, likelihood, x, y, x_test, **kwargs)


def frozen(model):
    model[0].weight.requires_grad_(False)
    return model


PROBLEMS = {
    "regression": lambda: data(
        mlp(1, 16, 1), "regression", 30, 1, kwargs={"sigma_noise": 0.1}
    ),
    "two_noises": lambda: data(
        mlp(2, 6, 2),
        "regression",
        11,
        2,
        kwargs={"sigma_noise": torch.tensor([0.3, 0.7]).double()},
    ),
    "classification": lambda: data(mlp(3, 8, 3), "classification", 12, 3),
    "multi_label": lambda: data(
        mlp(3, 7, 2), "classification", 12, 3, kwargs={"multi_label": True}
    ),
    "channels_last": lambda: data(
        mlp(2, 6, 2),
        "classification",
        5,
        3,
        2,
        kwargs={"output_layout": "channels_last"},
    ),
    "channels_first": lambda: data(
        nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1)),
        "regression",
        5,
        1,
        3,
        3,
        kwargs={"output_layout": "channels_first", "sigma_noise": 0.4},
        channels_first=True,
    ),
    "frozen": lambda: data(frozen(mlp(3, 6, 2)), "classification", 9, 3),
    "parameter_names": lambda: data(
        mlp(3, 4, 4, 1),
        "regression",
        9,
        3,
        kwargs={"sigma_noise": 0.5, "parameter_names": ["2.*"]},
        uncertain=("2.weight", "2.bias"),
    ),
    "last_layer": lambda: data(
        mlp(3, 8, 3),
        "classification",
        9,
        3,
        cls=ELLALLLaplace,
        uncertain=("2.weight", "2.bias"),
    ),
}


def make(name):
    torch.manual_seed(sum(map(ord, name)))
    return PROBLEMS[name]()


def structures(problem):
    """A scalar, a layerwise and a diagonal prior precision, float64."""
    sizes = [p.numel() for p in problem.params]
    generator = torch.Generator().manual_seed(3)
    return [
        0.2 + 3 * torch.rand(n, generator=generator, dtype=torch.float64)
        for n in (1, len(sizes), sum(sizes))
    ]


def close(actual, expected, rtol):
    """Equal up to a fraction of the largest value."""
    atol = rtol * expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


# Against the dense posterior


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["64", "32"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_variance_and_evidence(name, dtype):
    """Marginal and joint covariances, evidence and its gradients, for every prior."""
    problem = make(name)
    exact = problem.reference()
    la = problem.fit(dtype)
    x = torch.cat([problem.x_test, problem.x[:2]])
    _, Js = problem.jacobians(x)
    rows = problem.rows(Js, x)
    rtol = 1e-7 if dtype == torch.float64 else 1e-5
    noise = problem.sigma.to(dtype)
    for prior in structures(problem):
        D = dense.expand_prior(prior, problem.params)
        la.prior_precision = prior.to(dtype)
        joint = exact.covariance(Js.flatten(0, 1), D, problem.sigma)
        close(la._glm_predictive_distribution(x.to(dtype), joint=True)[1], joint, rtol)
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
        for ours, theirs in zip(
            torch.autograd.grad(value, [p for p, _ in pairs]),
            torch.autograd.grad(expected, [p for _, p in pairs]),
            strict=True,
        ):
            close(ours, theirs, 10 * rtol)
        la.prior_precision, la.sigma_noise = prior.to(dtype), noise


@pytest.mark.parametrize("name", ["regression", "two_noises", "classification"])
def test_agrees_with_full_laplace(name):
    """laplace-torch's own, in float64 and with priors at which it is accurate."""
    problem = make(name)
    if name == "two_noises":  # FullLaplace has one noise
        problem.kwargs["sigma_noise"] = 0.4
    full = FullLaplace(
        copy.deepcopy(problem.model),
        problem.likelihood,
        backend=BackPackGGN,
        **problem.kwargs,
    )
    full.fit(DataLoader(TensorDataset(problem.x, problem.y), batch_size=5))
    la = problem.fit()
    for prior in (0.1, 1.0, 10.0):
        la.prior_precision = full.prior_precision = prior
        for joint in (False, True):
            expected = full._glm_predictive_distribution(problem.x_test, joint=joint)
            actual = la._glm_predictive_distribution(problem.x_test, joint=joint)
            for a, b in zip(actual, expected, strict=True):
                close(a, b.detach(), 1e-6)
        close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), 1e-6)


@pytest.mark.parametrize("name", ["regression", "classification", "two_noises"])
def test_any_prior_precision(name):
    """float32 models, priors of 1e-4 to 1e4: within 1 %, also at training inputs,
    where the variance is a small difference, and in samples."""
    problem = make(name)
    exact = problem.reference()
    la = problem.fit(torch.float32)
    x = torch.cat([problem.x, problem.x_test, 10 * problem.x_test])
    _, Js = problem.jacobians(x)
    layers = torch.tensor([1.0, 3.0, 0.5, 2.0]).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (1e-4, 1e-2, 1.0, 1e2, 1e4):
            for prior in (scale * torch.ones(1).double(), scale * layers):
                la.prior_precision = prior.float()
                D = dense.expand_prior(prior.float(), problem.params)
                expected = torch.stack(
                    [exact.covariance(J, D, problem.sigma).diagonal() for J in Js]
                )
                _, variance = la._glm_predictive_distribution(
                    x.float(), diagonal_output=True
                )
                assert (variance > 0).all()
                relative = (variance.double() / expected - 1).abs().max()
                assert relative < 1e-4, (scale, relative)
            for joint in (False, True):
                samples = la.functional_samples(x.float(), n_samples=3, joint=joint)
                assert torch.isfinite(samples).all()


@pytest.mark.parametrize("name", ["regression", "classification", "channels_first"])
def test_moments_of_samples(name):
    """Functions, at each input and jointly, and weights."""
    problem = make(name)
    exact = problem.reference()
    prior = structures(problem)[1]
    la = problem.fit(prior_precision=prior)
    D = dense.expand_prior(prior, problem.params)
    x = problem.x_test
    f, Js = problem.jacobians(x)
    n = 40_000

    def check(samples, mean, covariance):
        """Within six standard errors of a mean and of a covariance."""
        scale = covariance.diagonal().sqrt()
        assert ((samples.mean(0) - mean).abs() < 6 * scale / n**0.5).all()
        error = (samples.T.cov() - covariance).abs()
        assert (error < 6 * 2**0.5 * scale[:, None] * scale / n**0.5).all()

    joint = exact.covariance(Js.flatten(0, 1), D, problem.sigma)
    samples = la.functional_samples(x, n_samples=n, joint=True)
    check(samples.flatten(1), f.flatten(), joint)
    # Inputs are independent; so are positions.
    rows, means = problem.rows(Js, x), problem.rows(f, x)
    samples = la.functional_samples(x, n_samples=n).flatten(2)
    samples = problem.rows(samples.movedim(0, -1), x)  # (B·S, C, n)
    for i in range(2):
        check(samples[i].T, means[i], exact.covariance(rows[i], D, problem.sigma))
    weights = la.sample(n)
    theta = torch.cat([p.detach().flatten() for p in problem.params])
    eye = torch.eye(len(D)).double()
    check(weights, theta, exact.covariance(eye, D, problem.sigma))


def test_more_gradients_than_parameters(monkeypatch):
    """Where there are more pairs than weights, and where a Gram matrix is used."""
    monkeypatch.setattr("laplace_ella.posterior.basis.SVD_LIMIT", 0)
    torch.manual_seed(1)
    for n in (8, 60):  # 25 weights
        problem = data(mlp(2, 6, 1), "regression", n, 2, kwargs={"sigma_noise": 0.2})
        la = problem.fit(prior_precision=0.01)
        assert la.rank == min(n, 25)
        assert la.basis.method == "gram"
        V = la.basis.vectors
        close(V.T @ V, torch.eye(la.rank).double(), 1e-10)
        Js = problem.jacobians(problem.x_test)[1]
        expected = problem.reference().covariance(
            Js.flatten(0, 1), torch.full((25,), 0.01).double(), problem.sigma
        )
        close(la(problem.x_test, joint=True)[1], expected, 1e-6)


def test_small_directions_of_single_precision_gradients_count(monkeypatch):
    """A Gram matrix of float32 products would lose those below 1e-6 of the largest."""
    monkeypatch.setattr("laplace_ella.posterior.basis.SVD_LIMIT", 0)
    singular = torch.logspace(0, -3.5, 30).double()
    U = torch.linalg.qr(torch.randn(30, 30).double())[0]
    V = torch.linalg.qr(torch.randn(200, 30).double())[0]
    sketch = RowSketch([200], 31, 30, torch.float32, torch.device("cpu"))
    sketch.add((U * singular @ V.T).float())
    basis = sketch.basis(None)
    assert (basis.rank, basis.method) == (30, "gram")
    torch.testing.assert_close(
        basis.eigenvalues, singular.square(), rtol=1e-2, atol=1e-12
    )
    outside = V.T - V.T @ basis.vectors.double() @ basis.vectors.double().T
    # A direction is as uncertain as the rounding of the rows beside its size.
    assert (outside.norm(dim=1) * singular < 1e-6).all()


@pytest.mark.parametrize("name", ["regression", "two_noises", "channels_first"])
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_tuning_follows_the_evidence(name, structure):
    """`optimize_prior_precision` takes Adam's steps on the dense evidence."""
    problem = make(name)
    exact = problem.reference()
    la = problem.fit()
    la.optimize_prior_precision(n_steps=5, prior_structure=structure)
    size = {"scalar": 1, "layerwise": len(problem.params), "diag": la.n_params}
    log_prior = torch.zeros(size[structure]).double().requires_grad_()
    adam = torch.optim.Adam([log_prior], lr=0.1)
    for _ in range(5):
        adam.zero_grad()
        D = dense.expand_prior(log_prior.exp(), problem.params)
        (-exact.evidence(D, problem.sigma)).backward()
        adam.step()
    close(la.prior_precision, log_prior.detach().exp(), 1e-6)


def test_evidence_is_twice_differentiable():
    """Second derivatives in the prior, by differences of the first ones."""
    la = make("two_noises").fit()
    layers = torch.tensor([0.5, 1.0, 2.0, 0.7]).double()

    def gradient(prior):
        prior = prior.clone().requires_grad_()
        value = la.log_marginal_likelihood(prior)
        return prior, torch.autograd.grad(value, prior, create_graph=True)[0]

    prior, first = gradient(layers)
    (second,) = torch.autograd.grad(first[0], prior)
    step = 1e-5
    for i in range(len(layers)):
        shift = step * torch.eye(len(layers)).double()[i]
        upper, lower = gradient(layers + shift)[1], gradient(layers - shift)[1]
        difference = (upper - lower)[0].detach() / (2 * step)
        torch.testing.assert_close(second[i], difference, rtol=1e-5, atol=1e-8)


# Rounding


@pytest.mark.parametrize("name", ["regression", "classification"])
def test_warns_where_single_precision_is_not_enough(name, monkeypatch):
    """Fits that had to stay in float32 under weak priors: the number is about right."""
    problem = make(name)
    precise = problem.fit(torch.float32)
    monkeypatch.setattr(Fitter, "_in_double", lambda self, *_: self)
    la = problem.fit(torch.float32)
    assert (precise.fitted.dtype, la.fitted.dtype) == (torch.float64, torch.float32)
    x = problem.x.float()
    warned = 0
    for prior in (1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 100.0):
        la.prior_precision = precise.prior_precision = prior
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            variance = la._glm_predictive_distribution(x, diagonal_output=True)[1]
            la._glm_predictive_distribution(x)
        told = [w for w in caught if w.category is NumericalWarning]
        expected = precise._glm_predictive_distribution(x, diagonal_output=True)[1]
        error = float((variance / expected - 1).abs().mean())
        assert len(told) <= 1  # once per posterior
        warned += len(told)
        if told:
            message = str(told[0].message)
            assert "float64 model" in message
            assert "larger prior precision" in message
            number = float(re.search(r"of about (\S+):", message)[1])
            assert number / 5 < error < 5 * number
        else:
            assert error < 0.01
    # Softmax ignores a common shift of the logits, which keeps the prior's variance:
    # nothing is small, and nothing is lost.
    assert (warned > 0) == (name == "regression")
    la.truncate(3)  # no longer meant to be exact
    la.prior_precision = 1e-10
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        la._glm_predictive_distribution(x)


def test_no_warning_in_double():
    problem = make("regression")
    la = problem.fit(torch.float32, prior_precision=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la(problem.x.float())


class OnlySingle(nn.Module):
    """Refuses to run in float64, as kernels for one precision do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel for float64")
        return self.net(x)


def test_models_without_double_stay_single(caplog):
    problem = make("regression")
    problem.model = OnlySingle(problem.model)
    with caplog.at_level(logging.INFO, "laplace_ella"):
        la = problem.fit(torch.float32)
    assert la.fitted.dtype == torch.float32
    assert "no kernel for float64" in caplog.text
    assert torch.isfinite(la(problem.x.float())[1]).all()


# Memory


class Backwards(TorchDispatchMode):
    """Counts the operators of backward passes."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += "backward" in func.__name__
        return func(*args, **(kwargs or {}))


def test_too_many_gradients_are_refused_before_any_is_taken():
    """The error says what is needed, what there is, and a rank that fits."""
    torch.manual_seed(0)
    problem = data(
        mlp(4, 100, 100, 1), "regression", 150, 4, kwargs={"sigma_noise": 0.3}
    )
    options = {"chunk_size": 1}
    with Backwards() as counted:
        with pytest.raises(InsufficientMemoryError) as error:
            problem.fit(torch.float32, memory_budget="4 MB", **options)
    assert counted.n == 0
    message = str(error.value)
    assert "4.0 MB" in message
    assert "150 gradients" in message
    needed = float(re.search(r"parameters, (\S+) MB on cpu", message)[1])
    assert needed > 150 * 10_701 * 4 / 1e6
    largest = int(re.search(r"fits is (\d+)", message)[1])
    assert 10 < largest < 150
    with Backwards() as counted:
        la = problem.fit(
            torch.float32, memory_budget="4 MB", n_eigenvalues=largest, **options
        )
    assert counted.n > 0
    assert la.rank == largest
    with pytest.raises(InsufficientMemoryError):
        problem.fit(
            torch.float32, memory_budget="4 MB", n_eigenvalues=largest + 1, **options
        )


def test_single_precision_where_double_does_not_fit():
    """Between what float32 and what float64 take, derivatives stay in float32."""
    torch.manual_seed(0)
    problem = data(mlp(4, 50, 50, 1), "regression", 60, 4)
    la = problem.fit(torch.float32, chunk_size=1)
    assert la.fitted.dtype == torch.float64
    gradients = 60 * la.n_params
    la = problem.fit(torch.float32, chunk_size=1, memory_budget=6 * gradients)
    assert la.fitted.dtype == torch.float32
    assert la.rank == 60


# "auto"


def test_auto_is_exact_where_that_is_affordable(caplog, monkeypatch):
    """All gradients of small problems, with one line that says so; else the
    spectrum."""
    problem = make("regression")
    with caplog.at_level(logging.INFO, "laplace_ella"):
        exact = problem.fit(n_eigenvalues="auto")
    lines = [m for m in caplog.messages if m.startswith("exact linearised Laplace")]
    assert lines == [
        f"exact linearised Laplace: all 30 gradients, rank {exact.rank}, in float64"
    ]
    asked = problem.fit()
    close(exact(problem.x_test)[1], asked(problem.x_test)[1], 1e-12)
    assert exact.complement == "prior"

    caplog.clear()
    monkeypatch.setattr(plan, "AUTO_MAX_PAIRS", 29)
    with caplog.at_level(logging.INFO, "laplace_ella"):
        spectral = problem.fit(n_eigenvalues="auto")
    assert not any("exact linearised" in m for m in caplog.messages)
    energy = exact.basis.eigenvalues.cumsum(0) / exact.basis.trace
    assert spectral.rank == int((energy < 0.9).sum()) + 1 < exact.rank


def test_auto_is_the_default_of_regression_only():
    assert make("regression").fit(n_eigenvalues=None).n_eigenvalues == "auto"
    la = ELLALaplace(mlp(2, 3), "classification")
    assert (la.n_eigenvalues, la.complement) == (20, None)  # the fit decides


# What is done with fits


@pytest.mark.parametrize("name", ["regression", "last_layer"])
def test_checkpoint(name):
    """The same predictions, in the precision of the fit, from another object."""
    problem = make(name)
    la = problem.fit(torch.float32, prior_precision=1e-3)
    buffer = io.BytesIO()
    torch.save(la.state_dict(), buffer)
    buffer.seek(0)
    other = problem.cls(la.model, problem.likelihood, **problem.kwargs)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.fitted.dtype == torch.float64
    assert other.fitted.spans_all
    assert other.complement == "prior"
    x = torch.cat([problem.x, problem.x_test]).float()
    for a, b in zip(
        other._glm_predictive_distribution(x, joint=True),
        la._glm_predictive_distribution(x, joint=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert other.log_marginal_likelihood() == la.log_marginal_likelihood()


def test_feature_cache(tmp_path):
    """Predictions from cached features, also read back, are those from inputs."""
    problem = make("regression")
    la = problem.fit(torch.float32)
    x = torch.cat([problem.x, problem.x_test]).float()
    loader = DataLoader(TensorDataset(x, torch.zeros(len(x), 1)), batch_size=7)
    cache = la.cache_features(loader)
    assert cache.phi.dtype == torch.float64
    cache.save(tmp_path / "features.pt")
    cache = FeatureCache.load(tmp_path / "features.pt")
    for prior in (1e-4, 1.0, 1e4):
        la.prior_precision = prior
        for a, b in zip(la.predict_from_cache(cache), la(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)


def test_truncate_and_add_data():
    """A truncated exact fit is a fit of that rank; data may be added to an exact
    fit."""
    problem = make("classification")
    la = problem.fit(prior_precision=0.5)
    x = problem.x_test
    # The same data once more: twice the curvature
    loader = DataLoader(TensorDataset(problem.x, problem.y), batch_size=12)
    H = la.H.clone()
    la.fit(loader, override=False)
    torch.testing.assert_close(la.H, 2 * H)
    assert la.n_data == 2 * len(problem.x)
    exact = problem.reference()
    exact.Lam = 2 * exact.Lam
    Js = problem.jacobians(x)[1].flatten(0, 1)
    D = torch.full((la.n_params,), 0.5).double()
    joint = la._glm_predictive_distribution(x, joint=True)[1]
    close(joint, exact.covariance(Js, D, problem.sigma), 1e-7)

    la = problem.fit(prior_precision=0.5)
    la.truncate(5)
    other = problem.fit(
        prior_precision=0.5,
        n_eigenvalues=5,
        subsample_size=10**6,
        complement="prior",
    )
    assert not la.fitted.spans_all
    for joint in (False, True):
        a, b = (
            posterior._glm_predictive_distribution(x, joint=joint)[1]
            for posterior in (la, other)
        )
        close(a, b, 1e-8)


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_exact_keeps_the_complement(cls):
    with pytest.raises(ValueError, match=r"complement='drop'.*Leave complement out"):
        cls(mlp(2, 3), "regression", n_eigenvalues="exact", complement="drop")


def test_user_state_is_untouched():
    """The model keeps its precision, its modes and its random state."""
    problem = make("regression")
    model = copy.deepcopy(problem.model).float().train()
    state = copy.deepcopy(model.state_dict())
    before = torch.get_rng_state()
    la = ELLALaplace(model, "regression", n_eigenvalues="exact")
    la.fit(DataLoader(TensorDataset(problem.x.float(), problem.y.float()), 5))
    la(problem.x_test.float())
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, state[name])
    assert all(p.grad is None for p in model.parameters())
