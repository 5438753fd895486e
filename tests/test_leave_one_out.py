"""Hyperparameters from the training data: leaving examples out of the linear model.

The reference is the linearised model itself, with all weights, in float64: its mode by
Newton's method, and again without each of the examples.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from laplace import Laplace
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ComputeOptions, ELLALaplace, ELLALLLaplace
from tests import dense
from tests.cases import Case, make, mlp, priors
from tests.fitting import assert_close, fit


class LinearModel:
    """f̂ + J(θ − θ̂) with θ ~ N(μ₀, D⁻¹): f (N, S, C), J (N, S, C, P), y (N, S, ...)."""

    def __init__(self, f, J, y, likelihood, theta, D, mean=0.0, weight=1.0):
        self.f, self.J, self.y, self.likelihood = f, J, y, likelihood
        self.offset, self.D, self.weight = theta - mean, D, weight

    def loss(self, step, keep):
        f = self.f[keep] + self.J[keep] @ step
        y = self.y[keep]
        if self.likelihood == "regression":
            loss = 0.5 * (f - y).square().sum()
        elif self.likelihood == "multi_label":
            loss = F.binary_cross_entropy_with_logits(f, y, reduction="sum")
        else:
            loss = F.cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum")
        prior = 0.5 * (self.D * (step + self.offset) ** 2).sum()
        return self.weight * loss + prior

    def derivatives(self, step, keep):
        grad = torch.func.grad(self.loss)(step, keep)
        return grad, torch.func.hessian(self.loss)(step, keep)

    def mode(self, keep=None):
        """θ* − θ̂ (P,) by damped Newton steps."""
        keep = torch.arange(len(self.f)) if keep is None else keep
        step = -self.offset.clone()
        for _ in range(100):
            grad, hessian = self.derivatives(step, keep)
            if grad.norm() < 1e-7:
                return step
            direction, size = torch.linalg.solve(hessian, grad), 1.0
            now = self.loss(step, keep) + 1e-10
            while self.loss(step - size * direction, keep) > now:
                size /= 2
                if size < 1e-9:
                    return step
            step = step - size * direction
        raise AssertionError("no mode")

    def without(self, i, one_step_from=None):
        """Outputs (S, C) and covariance (SC, SC) of example i without it: refitted, or
        after one Newton step."""
        keep = torch.tensor([j for j in range(len(self.f)) if j != i])
        step = self.mode(keep) if one_step_from is None else one_step_from
        grad, hessian = self.derivatives(step, keep)
        if one_step_from is not None:
            step = step - torch.linalg.solve(hessian, grad)
        J = self.J[i].flatten(0, 1)
        covariance = J @ torch.linalg.solve(hessian, J.T)
        return self.f[i] + self.J[i] @ step, covariance


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


def reference(case, D, likelihood=None, mean=0.0, weight=1.0):
    f, J = dense.jacobians(case.model, case.x, case.params)
    theta = flat(case.params)
    y = case.y.unsqueeze(1)
    D = dense.expand_prior(D, case.params)
    likelihood = likelihood or case.likelihood
    f, J = f.unsqueeze(1), J.unsqueeze(1)
    return LinearModel(f, J, y, likelihood, theta, D, mean, weight)


def exact(case, cls=ELLALaplace, **kwargs):
    options = {"n_eigenvalues": "exact", **case.kwargs, **kwargs}
    la = cls(case.model, case.likelihood, **options)
    la.fit(case.loader())
    return la


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diag"])
@pytest.mark.parametrize("name", ["regression_1", "regression_3"])
def test_regression_is_refitting(name, prior):
    case = make(name)
    D, sigma = priors(case)[prior], case.kwargs.get("sigma_noise", 1.0)
    la = exact(case, prior_precision=D, prior_mean=0.1, temperature=2.0)
    found = la.leave_one_out()
    linear = reference(case, D, mean=0.1, weight=1 / sigma**2 / 2)
    for i in range(len(case.x)):
        mean, covariance = linear.without(i)
        assert_close(found.mean[i], mean[0], rtol=1e-6, atol=1e-7)
        variance = covariance.diagonal()
        assert_close(found.variance[i], variance, rtol=1e-6, atol=1e-7)
        noisy = torch.distributions.Normal(mean[0], (variance + sigma**2).sqrt())
        nll = -noisy.log_prob(case.y[i]).sum()
        assert_close(found.nll[i], nll, rtol=1e-6, atol=1e-7)
    assert found.probabilities is None


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diag"])
@pytest.mark.parametrize("name", ["classification_mlp", "classification_cnn"])
def test_classification_is_one_newton_step(name, prior):
    """From the mode with all data; and nearly what refitting gives."""
    case = make(name)
    D = 2 * priors(case)[prior]
    la = exact(case, prior_precision=D, softmax_temperature=1.5)
    found = la.leave_one_out()
    linear = reference(case, D)
    mode, moved, off = linear.mode(), 0.0, 0.0
    for i in range(len(case.x)):
        f, covariance = linear.without(i, mode)
        assert_close(found.mean[i], f[0], rtol=1e-5, atol=1e-6)
        assert_close(found.variance[i], covariance.diagonal(), rtol=1e-5, atol=1e-6)
        p = dense.probit(f / 1.5, covariance.unsqueeze(0) / 1.5**2)[0]
        assert_close(found.probabilities[i], p, rtol=1e-5, atol=1e-6)
        assert_close(found.nll[i], -p[case.y[i]].log(), rtol=1e-5, atol=1e-6)
        refitted = linear.without(i)[0]
        moved += float((refitted - linear.f[i] - linear.J[i] @ mode).square().sum())
        off += float((refitted - f).square().sum())
    assert off < 0.05 * moved


def test_few_directions_are_a_linear_model_of_their_own():
    """Of one pass, of two halves, and without those directions that are cut off."""
    case = make("classification_mlp")
    kept = {"n_eigenvalues": 6, "prior_precision": 0.7, "prior_mean": 0.1}
    la = exact(case, **kept)
    halves = ELLALaplace(case.model, "classification", **kept)
    halves.fit_basis(case.loader())
    for part in (slice(None, 5), slice(5, None)):
        data = TensorDataset(case.x[part], case.y[part])
        halves.fit(DataLoader(data, 4), override=False)
    assert_close(halves.leave_one_out().nll, la.leave_one_out().nll)
    la.truncate(4)
    f, J = dense.jacobians(case.model, case.x, case.params)
    V, f = la.basis.vectors, f.unsqueeze(1)
    J, D = (J @ V).unsqueeze(1), torch.full((4,), 0.7, dtype=V.dtype)
    given = case.y.unsqueeze(1), case.likelihood, V.T @ (flat(case.params) - 0.1), D
    linear, found = LinearModel(f, J, *given), la.leave_one_out()
    mode = linear.mode()
    for i in range(len(case.x)):
        mean, covariance = linear.without(i, mode)
        assert_close(found.mean[i], mean[0], rtol=1e-5, atol=1e-6)
        assert_close(found.variance[i], covariance.diagonal(), rtol=1e-5, atol=1e-6)


def test_of_the_network():
    """One step from its own parameters, with δ_train; variances are those of before."""
    case = make("classification_mlp")
    la, theta = exact(case, prior_precision=3.0), flat(case.params)
    loss = F.cross_entropy(case.model(case.x), case.y, reduction="sum")
    grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, case.params)])
    training = max(float(-(grad @ theta) / theta.square().sum()), 1e-6)
    found, linear = la.leave_one_out(network=True), reference(case, training)
    # the regulariser makes θ̂ stationary: the step is by the example's loss alone
    linear.offset = 0 * theta
    for i in range(len(case.x)):
        keep = torch.tensor([j for j in range(len(case.x)) if j != i])
        hessian = linear.derivatives(torch.zeros_like(theta), keep)[1]
        r = F.softmax(linear.f[i, 0], -1) - F.one_hot(case.y[i], 3)
        step = torch.linalg.solve(hessian, linear.J[i, 0].T @ r)
        expected = linear.f[i, 0] + linear.J[i, 0] @ step
        assert_close(found.mean[i], expected, rtol=1e-4, atol=1e-5)
    assert_close(found.variance, la.leave_one_out().variance)


def test_examples_of_many_positions_are_left_out_as_a_whole():
    g = torch.Generator().manual_seed(0)
    model = mlp(3, 4, 3).double()
    x = torch.randn(6, 4, 3, generator=g).double()
    y = torch.randint(3, (6, 4), generator=g)
    params = list(model.parameters())
    seen = y.clone()
    seen[0, 1] = -100
    options = {"n_eigenvalues": "exact", "prior_precision": 4.0}
    options["output_layout"] = "channels_last"
    la = ELLALaplace(model, "classification", **options)
    la.fit(DataLoader(TensorDataset(x, seen), 3))
    found = la.leave_one_out()
    f, J = dense.jacobians(lambda v: model(v).flatten(1), x, params)
    f, J = f.view(6, 4, 3), J.view(6, 4, 3, -1)
    theta = flat(params)
    D = torch.full_like(theta, 4.0)
    linear = LinearModel(f, J, seen, "classification", theta, D)
    mode = linear.mode()
    for i in range(6):
        expected, covariance = linear.without(i, mode)
        variance = covariance.diagonal().view(4, 3)
        assert_close(found.mean[i], expected, rtol=1e-5, atol=1e-6)
        p = (expected / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
        nll = F.nll_loss(p.log(), seen[i], reduction="sum")
        assert_close(found.nll[i], nll, rtol=1e-5, atol=1e-6)
    choice = la.optimize_prior_precision()
    assert choice.prior_precision == pytest.approx(float(la.prior_precision))


@pytest.fixture(scope="module")
def blobs():
    """A network trained too long on few data of three overlapping classes."""
    return problem(steps=600, decay=0.0)


def problem(steps, decay, seed=0, normalised=False):
    g = torch.Generator().manual_seed(seed)
    centers = 1.2 * torch.randn(3, 4, generator=g)
    y = torch.randint(3, (360,), generator=g)
    x = centers[y] + torch.randn(360, 4, generator=g)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = mlp(4, 16, 3)
        if normalised:
            model.insert(1, torch.nn.BatchNorm1d(16))
        adam = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=decay)
        for _ in range(steps):
            adam.zero_grad()
            F.cross_entropy(model(x[:60]), y[:60]).backward()
            adam.step()
    model, x = model.eval().double(), x.double()
    return model, x[:60], y[:60], x[60:], y[60:]


def fitted(problem, cls=ELLALaplace, **kwargs):
    model, x, y, *_ = problem
    la = cls(model, "classification", **{"n_eigenvalues": "exact"} | kwargs)
    la.fit(DataLoader(TensorDataset(x, y), 20))
    return la


def nll(la, problem):
    *_, x, y = problem
    return float(F.nll_loss(la(x).log(), y))


def network_nll(problem):
    model, *_, x, y = problem
    return float(F.cross_entropy(model(x), y).detach())


def linear_model(problem, D):
    model, x, y, *_ = problem
    case = Case(model, "classification", x, y, x, {})
    return reference(case, torch.as_tensor(D).double())


@pytest.mark.parametrize("n_eigenvalues", ["exact", 12])
def test_default_is_better_than_the_network(blobs, caplog, n_eigenvalues):
    la = fitted(blobs, n_eigenvalues=n_eigenvalues)
    with caplog.at_level(logging.INFO, "laplace_ella"):
        choice = la.optimize_prior_precision()
    assert choice.rule in ("larger", "calibrated")
    assert f"{choice.prior_precision}" in caplog.text
    assert float(la.prior_precision) == pytest.approx(choice.prior_precision)
    assert la.softmax_temperature == choice.softmax_temperature
    assert nll(la, blobs) < 0.75 * network_nll(blobs)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_predictions_have_the_curvature_at_the_mode(blobs, temperature):
    """la(x), samples and covariances are those of the dense posterior at θ*."""
    la = fitted(blobs, temperature=temperature)
    choice = la.optimize_prior_precision(method="larger")
    model, *_, x, _ = blobs
    linear = linear_model(blobs, choice.prior_precision)
    linear.weight = 1 / temperature
    hessian = linear.derivatives(linear.mode(), torch.arange(60))[1]
    f, J = dense.jacobians(model, x[:20], list(model.parameters()))
    f_var = dense.marginal(J, torch.linalg.inv(hessian))
    assert_close(la(x[:20]), dense.probit(f, f_var), rtol=1e-4, atol=1e-5)
    assert_close(la.functional_variance(J), f_var, rtol=1e-4, atol=1e-5)
    joint = dense.joint(J, torch.linalg.inv(hessian))
    assert_close(la.functional_covariance(J), joint, rtol=1e-4, atol=1e-5)
    variance = la.functional_samples(x[:3], n_samples=4000).var(0)
    expected = f_var[:3].diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(variance, expected, rtol=0.15, atol=0)


def test_the_parts(blobs):
    """MacKay's equation holds, no other prior precision has a lower leave-one-out
    loss, and the rule takes the larger."""
    la = fitted(blobs)
    choice = la.optimize_prior_precision(method="mackay")
    delta = float(la.prior_precision)
    assert delta == pytest.approx(choice.mackay)
    linear = linear_model(blobs, delta)
    mode = linear.mode()
    hessian = linear.derivatives(mode, torch.arange(60))[1]
    freedom = len(hessian) - delta * float(torch.linalg.inv(hessian).trace())
    found = freedom / float((mode + linear.offset).square().sum())
    assert found == pytest.approx(delta, rel=0.1)
    choice = la.optimize_prior_precision(method="loo")
    assert la.softmax_temperature == 1
    lowest = la.leave_one_out().nll.mean()
    for factor in (0.3, 0.7, 1.4, 3.0):
        la.prior_precision = choice.loo * factor
        assert la.leave_one_out().nll.mean() > lowest - 0.01
    larger = la.optimize_prior_precision(method="larger")
    assert larger.prior_precision == max(choice.mackay, choice.loo)


def test_calibrated_by_the_network(blobs):
    """No other temperature or prior has a lower loss of the network's outputs."""
    problem_ = problem(steps=1000, decay=3e-3)
    la = fitted(problem_)
    choice = la.optimize_prior_precision()
    assert choice.rule == "calibrated"
    assert choice.training_precision == pytest.approx(60 * 3e-3, rel=0.02)
    best = la.leave_one_out(network=True).nll.mean()
    assert choice.network_loss == pytest.approx(float(best), rel=2e-3)
    prior, tau = float(la.prior_precision), la.softmax_temperature
    for factor, scale in ((0.5, 1.0), (2.0, 1.0), (1.0, 1.2), (1.0, 0.9)):
        la.prior_precision = prior * factor
        la.softmax_temperature = max(tau * scale, 1.0)
        assert la.leave_one_out(network=True).nll.mean() > best - 2e-3
    la.prior_precision, la.softmax_temperature = prior, tau
    assert nll(la, problem_) < network_nll(problem_)


@pytest.mark.parametrize("link", ["probit_centered", "mc"])
def test_links(blobs, link):
    """And validation data that are ignored are pointed out."""
    la, (*_, x, y) = fitted(blobs), blobs
    loader, options = DataLoader(TensorDataset(x, y)), {"n_samples": 50}
    with pytest.warns(UserWarning, match="ignores val_loader") as record:
        la.optimize_prior_precision(link_approx=link, val_loader=loader, **options)
    assert [w.filename for w in record] == [__file__]
    p = la(x, link_approx=link, n_samples=200)
    assert float(F.nll_loss(p.log(), y)) < network_nll(blobs)


def test_common_factor_of_other_priors(blobs):
    """Of a layerwise and of a diagonal prior; all values equal are one."""
    la = fitted(blobs)
    one = la.optimize_prior_precision()
    H = la.H
    for n in (la.n_layers, la.n_params):
        la.prior_precision = torch.full((n,), 0.5).double()
        several = la.optimize_prior_precision()
        expected = torch.full((n,), one.prior_precision).double()
        assert several.rule == one.rule
        assert_close(la.prior_precision, expected, rtol=0.06, atol=0)
        torch.testing.assert_close(la.H, H, rtol=0.06, atol=0.06 * float(H.max()))


def test_normalisation_layers():
    """Weights before them are small, and the prior variance of each tensor is in
    proportion to its mean square: equal to the dense posterior with that prior."""
    problem_ = problem(steps=600, decay=3e-3, normalised=True)
    la = fitted(problem_)
    choice = la.optimize_prior_precision()
    assert choice.rule == "calibrated"
    assert nll(la, problem_) < network_nll(problem_)
    model, *_, x, _ = problem_
    params = list(model.parameters())
    squares = torch.stack([p.detach().square().mean() for p in params])
    assert squares[1] < 1e-6 * squares.max()  # the bias before the normalisation
    scales = 1 / squares.clamp_min(1e-6 * squares.max())
    assert_close(la.prior_precision, choice.prior_precision * scales)
    D = la.prior_precision.repeat_interleave(torch.tensor([p.numel() for p in params]))
    linear = linear_model(problem_, D)
    precision = linear.derivatives(linear.mode(), torch.arange(60))[1]
    J = dense.jacobians(model, x[:7], params)[1]
    expected = J @ torch.linalg.solve(precision, J.mT)
    assert_close(la.predictive_moments(x[:7])[1], expected, rtol=1e-4)
    chosen = la.prior_precision
    la.optimize_prior_precision()  # the common factor, from here on
    assert_close(la.prior_precision, chosen, rtol=0.05)
    last = fitted(problem_, ELLALLLaplace)  # which has no normalisation layer
    last.optimize_prior_precision()
    assert last.prior_precision.numel() == 1


def test_normalisation_layers_that_leave_one_out_does_not_understand():
    la = fitted(problem(steps=1500, decay=0.0, normalised=True))
    with pytest.warns(UserWarning, match=r"temperature.* is \d.*optimize_calibration"):
        assert la.optimize_prior_precision().rule == "larger"


def test_labels_and_last_layer(blobs):
    model, x, y, *_ = blobs
    labels = F.one_hot(y, 3).double()
    la = ELLALaplace(model, "classification", n_eigenvalues="exact", multi_label=True)
    la.fit(DataLoader(TensorDataset(x, labels), 20))
    assert la.optimize_prior_precision().prior_precision > 0
    linear = linear_model(blobs, float(la.prior_precision))
    linear.y, linear.likelihood = labels.unsqueeze(1), "multi_label"
    f, _ = linear.without(0, linear.mode())
    assert_close(la.leave_one_out().mean[0], f[0], rtol=1e-4, atol=1e-5)
    last = fitted(blobs, ELLALLLaplace)
    choice = last.optimize_prior_precision()
    assert last.n_params == 16 * 3 + 3
    assert nll(last, blobs) < network_nll(blobs)
    assert choice.H.shape == last.H.shape


def test_state_and_further_data(blobs):
    """A checkpoint has it; more data, and other methods, are those of the network's
    parameters, as in laplace-torch."""
    model, _, _, x_test, y_test = blobs
    la = fitted(blobs)
    before = la.H
    la.optimize_prior_precision()
    assert not torch.equal(la.H, before)
    again = ELLALaplace(model, "classification", n_eigenvalues="exact")
    again.load_state_dict(la.state_dict())
    assert torch.equal(again(x_test), la(x_test))
    assert torch.equal(again.leave_one_out().nll, la.leave_one_out().nll)
    more = fitted(blobs)
    loader = DataLoader(TensorDataset(x_test[:10], y_test[:10]), 10)
    for each in (la, more):
        each.fit(loader, override=False)
    assert_close(la.H, more.H)


def test_marglik_is_that_of_full_laplace(blobs):
    la = fitted(blobs)
    la.optimize_prior_precision()
    la.optimize_prior_precision(method="marglik")
    model, x, y, *_ = blobs
    full = Laplace(model, "classification", "all", "full")
    full.fit(DataLoader(TensorDataset(x, y), 20))
    full.optimize_prior_precision(method="marglik")
    rtol = 1e-4
    assert_close(la.prior_precision, full.prior_precision.double(), rtol=rtol)
    expected = full.log_marginal_likelihood()
    assert_close(la.log_marginal_likelihood(), expected, rtol=rtol)


def test_a_failure_changes_nothing(blobs):
    la = fitted(blobs)
    la.optimize_prior_precision()
    before = la.H, la.prior_precision, la.softmax_temperature
    for bad in ({"link_approx": "nonsense"}, {"init_prior_prec": -1.0}):
        with pytest.raises(ValueError, match=r"(link_approx|prior_prec) must be"):
            la.optimize_prior_precision(**bad)
    after = la.H, la.prior_precision, la.softmax_temperature
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_what_cannot_leave_out_says_so(blobs, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("laplace_ella.fitting.fit.KEPT_SHARE", 1e-12)
        few = fitted(blobs, n_eigenvalues=5)
    with pytest.raises(ValueError, match="method='loo' takes the features of the trai"):
        few.optimize_prior_precision(method="loo")
    with pytest.raises(ValueError, match=r"leave_one_out\(\) takes the features"):
        few.leave_one_out()
    assert few.optimize_prior_precision() is None  # the evidence
    wide = fitted(blobs, n_eigenvalues=5, compute=ComputeOptions(memory_budget="30 kB"))
    wide.fitted = replace(wide.fitted, training=fitted(blobs).fitted.training)
    with pytest.raises(ValueError, match="covariances of 60 examples with 3 outputs"):
        wide.leave_one_out()
    with pytest.raises(ValueError, match="takes the features"):
        fit(make("regression_1"), n_eigenvalues=2).leave_one_out()
    model, x, y, *_ = blobs
    two = ELLALaplace(model, "classification", n_eigenvalues=5)
    monkeypatch.setattr("laplace_ella.fitting.fit.KEPT_BYTES", 4000)  # 3600 each
    for part, kept in (slice(30), True), (slice(30, 60), False):
        two.fit([(x[part], y[part])], override=False)
        assert (two.fitted.training is not None) is kept
    empty = ELLALaplace(model, "classification", n_eigenvalues="exact")
    empty.fit_basis(DataLoader(TensorDataset(x, y), 20))
    with pytest.raises(ValueError, match=r"takes data: call fit\(train_loader\)"):
        empty.optimize_prior_precision(method="loo")
    regression = exact(make("regression_1"))
    with pytest.raises(ValueError, match="'mackay' is for classification"):
        regression.optimize_prior_precision(method="mackay")
    assert regression.optimize_prior_precision() is None


def test_predictions_of_many_directions_are_the_same(monkeypatch):
    """Directions that the data hardly know are predicted with the prior outside."""
    model = mlp(5, 30, 5).double()
    x, y = torch.randn(70, 5).double(), torch.randint(5, (70,))
    la = ELLALaplace(model, "classification", n_eigenvalues="exact")
    la.fit(DataLoader(TensorDataset(x, y), 70))
    la.prior_precision = 20.0
    inputs = torch.randn(6, 5).double()
    J = dense.jacobians(model, inputs, list(model.parameters()))[1]
    predict = {
        "probabilities": lambda: la(inputs),
        "covariances": lambda: la.functional_variance(J),
        "features": lambda: la.features(inputs)[1],
    }
    assert la.rank > la.posterior.for_predictions.rank
    found = {name: f() for name, f in predict.items()}
    monkeypatch.setattr("laplace_ella.posterior.posterior.MANY_DIRECTIONS", 10**6)
    la.prior_precision = 20.0
    for name, f in predict.items():
        torch.testing.assert_close(found[name], f(), rtol=1e-4, atol=1e-6)
