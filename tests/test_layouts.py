"""Outputs at many positions, several labels, several noises, named parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from laplace import Laplace
from laplace.utils import ParamNameSubnetMask
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
from laplace_ella import ELLALaplace, FeatureCache, OutputLayout, decompose
from tests import dense
from tests.cases import mlp

N, T, C, H, W = 6, 3, 4, 2, 3
ALL = 10_000  # more gradients than there are: the basis spans them all


class Tokens(nn.Module):
    """Logits (B, T, C) that depend on all tokens."""

    def __init__(self, n_out=C):
        super().__init__()
        self.mix, self.head = nn.Linear(T, T), nn.Linear(2, n_out)

    def forward(self, x):
        return self.head(torch.tanh(self.mix(x.mT)).mT)


class Pixels(nn.Module):
    """Logits (B, C, H, W)."""

    def __init__(self, n_out=C):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.head = nn.Conv2d(2, n_out, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)))


LAYOUTS = {
    "channels_last": (Tokens, (T, 2), (T,)),
    "channels_first": (Pixels, (1, H, W), (H, W)),
}


def channels_last(f, layout):
    """Outputs as (B, S, C), by another way than the package's."""
    f = torch.movedim(f, 1, -1) if "first" in layout else f
    return f.reshape(len(f), -1, f.shape[-1])


def problem(layout, likelihood, seed=0):
    """A model, inputs, targets in torch's conventions, and test inputs, float64."""
    torch.manual_seed(seed)
    build, shape, positions = LAYOUTS[layout]
    model = build().double().eval()
    x = torch.randn(N, *shape, dtype=torch.float64)
    if likelihood == "regression":
        y = torch.randn_like(model(x)).detach()
    else:
        y = torch.randint(C, (N, *positions))
    return model, x, y, torch.randn(2, *shape, dtype=torch.float64)


def loader(x, y, size=4):
    return DataLoader(TensorDataset(x, y), size)


class Flat(nn.Module):
    """A model with its outputs in one dimension, for the dense reference."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).flatten(1)


def dense_jacobians(model, x, layout):
    """Outputs (B, S, C) and Jacobians (B, S, C, P)."""
    shape = model(x).shape[1:]
    f, J = dense.jacobians(Flat(model), x, list(model.parameters()))
    f = channels_last(f.unflatten(1, shape), layout)
    P = J.shape[-1]
    J = J.unflatten(1, shape)
    J = J.movedim(1, -2) if "first" in layout else J
    return f, J.reshape(*f.shape, P)


def dense_posterior(model, x, layout, likelihood, prior, observed=None, noise=None):
    """Σ (P, P) of the exact linearised Laplace, from explicit Jacobians."""
    f, J = dense_jacobians(model, x, layout)
    if likelihood == "multi_label":
        p = f.sigmoid()
        Lam = torch.diag_embed(p * (1 - p))
    elif likelihood == "regression":
        noise = torch.ones(f.shape[-1]) if noise is None else noise
        Lam = torch.diag(noise.double() ** -2).expand(*f.shape, -1)
    else:
        p = f.softmax(-1)
        Lam = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    if observed is not None:
        Lam = Lam * observed.flatten(1)[..., None, None]
    GGN = torch.einsum("bscp,bscd,bsdq->pq", J, Lam, J)
    return torch.linalg.inv(GGN + prior * torch.eye(len(GGN), dtype=GGN.dtype))


def fit(model, likelihood, data, **kwargs):
    la = ELLALaplace(
        model,
        likelihood,
        prior_precision=1.7,
        subsample_size=ALL,
        n_eigenvalues=ALL,
        **{"complement": "prior", **kwargs},
    )
    la.fit(data)
    return la


def close(a, b, tol=1e-9):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


pytestmark = pytest.mark.filterwarnings(
    "ignore::laplace_ella.RankWarning", "ignore::laplace_ella.BorderWarning"
)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_regression_equals_the_exact_posterior(layout, mode):
    """Mean, covariance at each position, variances and joint covariance."""
    model, x, y, x_test = problem(layout, "regression")
    la = fit(model, "regression", loader(x, y), output_layout=layout, feature_mode=mode)
    Sigma = dense_posterior(model, x, layout, "regression", 1.7)
    _f, J = dense_jacobians(model, x_test, layout)
    covariance = torch.einsum("bscp,pq,bsdq->bscd", J, Sigma, J)
    mean, var = la(x_test)
    assert mean.shape == model(x_test).shape
    close(mean, model(x_test).detach())
    close(var.reshape(covariance.shape), covariance)
    _, variances = la(x_test, diagonal_output=True)
    assert variances.shape == mean.shape
    close(channels_last(variances, layout), covariance.diagonal(dim1=-2, dim2=-1))
    joint_mean, joint = la(x_test, joint=True)
    _, flat = dense.jacobians(Flat(model), x_test, list(model.parameters()))
    close(joint_mean, model(x_test).detach().flatten())
    close(joint, dense.joint(flat, Sigma))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_classification_equals_the_exact_posterior(layout):
    """Probit probabilities and evidence, some targets not observed."""
    model, x, y, x_test = problem(layout, "classification")
    y.flatten()[::4] = -100
    la = fit(model, "classification", loader(x, y), output_layout=layout)
    Sigma = dense_posterior(model, x, layout, "classes", 1.7, y != -100)
    f, J = dense_jacobians(model, x_test, layout)
    variance = torch.einsum("bscp,pq,bscq->bsc", J, Sigma, J)
    expected = (f / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)
    got = la(x_test)
    assert got.shape == model(x_test).shape
    close(channels_last(got, layout), expected)
    logits = channels_last(model(x), layout).flatten(0, 1)
    loss = F.cross_entropy(logits, y.flatten(), reduction="sum", ignore_index=-100)
    close(torch.as_tensor(la.loss), loss.detach())
    P = len(Sigma)
    delta = torch.cat([p.detach().flatten() for p in model.parameters()])
    ratio = -torch.logdet(Sigma) - P * torch.tensor(1.7, dtype=torch.float64).log()
    evidence = -loss - 0.5 * ratio - 0.5 * 1.7 * delta.square().sum()
    close(la.log_marginal_likelihood(), evidence.detach())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_monte_carlo_link_agrees_with_sampled_reference(layout):
    model, x, y, x_test = problem(layout, "classification")
    la = fit(model, "classification", loader(x, y), output_layout=layout)
    Sigma = dense_posterior(model, x, layout, "classes", 1.7)
    f, J = dense_jacobians(model, x_test, layout)
    covariance = torch.einsum("bscp,pq,bsdq->bscd", J, Sigma, J)
    expected = dense.sampled_probs(f.flatten(0, 1), covariance.flatten(0, 1), 40_000)
    got = la(x_test, link_approx="mc", n_samples=40_000)
    close(channels_last(got, layout).flatten(0, 1), expected, 0.02)
    for pred_type in ("glm", "nn"):
        samples = la.predictive_samples(x_test, pred_type, n_samples=7)
        assert samples.shape == (7, *model(x_test).shape)
        dim = 2 if "first" in layout else -1
        close(samples.sum(dim), torch.ones_like(samples.sum(dim)))
    probs = la(x_test, pred_type="nn", link_approx="mc", n_samples=5)
    assert probs.shape == model(x_test).shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_model_with_the_same_outputs_agrees(layout):
    """Regression does not care how the outputs are arranged."""
    model, x, y, x_test = problem(layout, "regression")
    shaped = fit(model, "regression", loader(x, y), output_layout=layout)
    flat = fit(Flat(model), "regression", loader(x, y.flatten(1)))
    close(shaped.log_marginal_likelihood(), flat.log_marginal_likelihood())
    close(shaped(x_test, joint=True)[1], flat(x_test, joint=True)[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_searches_and_caches_see_observed_positions(layout):
    model, x, y, x_test = problem(layout, "classification")
    y.flatten()[::4] = -100
    data = loader(x, y)
    la = fit(model, "classification", data, output_layout=layout, complement="drop")
    cache = FeatureCache.from_loader(la, data)
    observed = int((y != -100).sum())
    assert cache.phi.shape == (observed, C, la.rank)
    probs = la.predict_from_cache(cache)
    full = channels_last(la(x), layout).flatten(0, 1)[y.flatten() != -100]
    close(probs, full)
    la.optimize_temperature(data, n_samples=16)
    la.optimize_prior_precision(method="gridsearch", val_loader=data, grid_size=5)
    la.fit(data, val_loader=data, early_stopping=True)
    assert la.history
    assert la.history[-1]["n_data"] <= N
    parts = decompose(la, x_test, n_samples=64)
    assert parts.total.shape == (2, *LAYOUTS[layout][2])
    close(parts.total, parts.aleatoric + parts.epistemic)
    assert parts.mean.shape == model(x_test).shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_curvature_is_unbiased_over_positions(layout):
    model, x, y, _ = problem(layout, "classification")
    y.flatten()[::4] = -100
    exact = fit(model, "classification", loader(x, y), output_layout=layout)
    sampled = fit(
        model, "classification", loader(x, y), output_layout=layout, stochastic=3000
    )
    error = (sampled.H - exact.H).norm() / exact.H.norm()
    assert error < 0.08


def test_many_positions_need_no_square_of_them():
    """131,072 outputs per example: their square would take 64 GiB."""
    model = nn.Conv2d(1, 2, 1)
    x = torch.randn(2, 1, 256, 256)
    la = ELLALaplace(
        model,
        "classification",
        output_layout="channels_first",
        subsample_size=5,  # more than examples: outputs are drawn for each
        n_eigenvalues=2,
    )
    la.fit(loader(x, (x[:, 0] > 0).long()))
    probs = la(x[:1])
    close(probs.sum(1), torch.ones(1, 256, 256), 1e-5)


def test_early_stopping_counts_examples():
    """The restored posterior is that of the first examples, not positions."""
    model, x, y, _ = problem("channels_first", "classification")
    la = fit(
        model,
        "classification",
        loader(x, y),
        output_layout="channels_first",
        complement="drop",
    )
    basis = la.basis
    stopping = laplace_ella.EarlyStopping(every=1, patience=1, n_samples=8)
    la.fit(loader(x, y), val_loader=loader(x, y), early_stopping=stopping)
    f, J = dense_jacobians(model, x[: la.n_data], "channels_first")
    p = f.softmax(-1)
    Lam = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    phi = J @ basis.vectors
    close(la.H, torch.einsum("bsck,bscd,bsdl->kl", phi, Lam, phi))


def test_checkpoint_keeps_the_layout(tmp_path):
    model, x, y, x_test = problem("channels_first", "classification")
    la = fit(model, "classification", loader(x, y), output_layout="channels_first")
    torch.save(la.state_dict(), tmp_path / "la.pt")
    state = torch.load(tmp_path / "la.pt", weights_only=True)
    again = ELLALaplace(model, "classification", output_layout="channels_first")
    again.load_state_dict(state)
    close(again(x_test), la(x_test))
    other = ELLALaplace(model, "classification", output_layout="channels_last")
    with pytest.raises(ValueError, match="output_layout='channels_first'"):
        other.load_state_dict(state)


def test_wrong_shapes_are_named():
    model, x, y, _ = problem("channels_first", "classification")
    with pytest.raises(ValueError, match="output_layout='channels_last'"):
        ELLALaplace(model, "classification").fit(loader(x, y))
    la = ELLALaplace(model, "classification", output_layout="channels_first")
    with pytest.raises(ValueError, match=r"shape \(4, 2, 3\).*got shape \(4,\)"):
        la.fit(loader(x, y[:, 0, 0]))
    with pytest.raises(ValueError, match=r"0\.\.3.*-100"):
        flat = mlp(3, 4).double()
        targets = torch.tensor([0, 1, -100])
        ELLALaplace(flat, "classification").fit(
            loader(torch.randn(3, 3, dtype=torch.float64), targets)
        )
    with pytest.raises(ValueError, match="output_layout must be one of"):
        ELLALaplace(model, "classification", output_layout="middle")


@pytest.mark.parametrize("kwargs", [{}, {"stochastic": 2}, {"row_mode": "loop"}])
def test_batches_with_other_numbers_of_positions_are_refused(kwargs):
    """In the sample of the basis, in the pass over the data, and in data added."""
    torch.manual_seed(0)
    model = Pixels().double()

    def square(length):
        return torch.randn(1, length, length).double(), torch.randint(C, (length,) * 2)

    def fitted(lengths, subsample_size=ALL):
        la = ELLALaplace(
            model,
            "classification",
            output_layout="channels_first",
            n_eigenvalues=3,
            subsample_size=subsample_size,
            **kwargs,
        )
        la.fit(DataLoader([square(n) for n in lengths], 2))
        return la

    refused = pytest.raises(ValueError, match=r"(?s)positions, got 4 and 9.*Pad all")
    with refused:
        fitted([2, 2, 3, 3])
    with refused:  # one gradient, of one of the small images: the pass finds out
        fitted([2] * 20 + [3, 3], subsample_size=1)
    la = fitted([2, 2])
    with refused:
        la.fit(DataLoader([square(3)]), override=False)
    with pytest.raises(ValueError, match="got 9 and 4"):
        la.fit(DataLoader([square(3), square(2)]))
    la.fit(DataLoader([square(2)]), override=False)  # failures left nothing behind
    assert (la.n_data, la.n_outputs) == (3, 4 * C)


@pytest.mark.parametrize("kwargs", [{}, {"complement": "drop"}])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_predictions_at_another_size(mode, kwargs):
    """A model that takes any size predicts at any, with the same posterior."""
    model, x, y, _ = problem("channels_first", "regression")
    la = fit(
        model,
        "regression",
        loader(x, y),
        output_layout="channels_first",
        feature_mode=mode,
        **kwargs,
    )
    larger = torch.randn(1, 1, 4, 5, dtype=torch.float64)
    cov = dense_posterior(model, x, "channels_first", "regression", 1.7)
    _, J = dense_jacobians(model, larger, "channels_first")
    if kwargs:
        V = la.basis.vectors
        cov = V @ torch.linalg.inv(V.T @ torch.linalg.inv(cov) @ V) @ V.T
    mean, var = la(larger)
    close(mean, model(larger).detach())
    close(var, (J @ cov @ J.mT).unflatten(1, (4, 5)), 1e-7)
    samples = la.functional_samples(larger, n_samples=2, joint=True)
    assert samples.shape == (2, 1, C, 4, 5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kwargs", [{}, {"stochastic": 2}, {"complement": "drop"}])
def test_gradients_with_respect_to_inputs(layout, kwargs):
    """Also where the way to differentiate is chosen at the first prediction."""
    model, x, y, x_test = problem(layout, "classification")
    la = fit(
        model,
        "classification",
        loader(x, y),
        output_layout=layout,
        enable_backprop=True,
        **kwargs,
    )
    query = x_test.requires_grad_()
    (gradient,) = torch.autograd.grad(la(query).square().sum(), query)
    direction, step = torch.randn_like(x_test), 1e-5
    with torch.no_grad():
        up, down = (
            la(x_test + sign * step * direction).square().sum() for sign in (1, -1)
        )
    close((gradient * direction).sum(), (up - down) / (2 * step), 1e-6)


def test_class_probabilities_as_targets_can_be_searched_with():
    """The default loss of a search is the cross-entropy that the fit has."""
    model, x, y, _ = problem("channels_first", "classification")
    la = fit(model, "classification", loader(x, y), output_layout="channels_first")
    one_hot = F.one_hot(y, C).movedim(-1, 1).double()
    chosen = []
    for targets in (y, one_hot):
        la.temperature = 1.0
        la.optimize_temperature(loader(x, targets), link_approx="probit")
        chosen.append(la.temperature)
    assert chosen[0] == pytest.approx(chosen[1])


def test_validation_without_any_target_is_refused():
    model, x, y, _ = problem("channels_last", "classification")
    la = fit(model, "classification", loader(x, y), output_layout="channels_last")
    with pytest.raises(ValueError, match="No position has a target"):
        la.optimize_temperature(loader(x, torch.full_like(y, -100)))


# Several labels


@pytest.mark.parametrize("layout", ["flat", *LAYOUTS])
def test_multi_label_equals_the_exact_posterior(layout):
    """Λ = p(1 − p): variances, probit probabilities, loss and evidence."""
    if layout == "flat":
        torch.manual_seed(0)
        model = mlp(2, 5, C).double()
        x, x_test = torch.randn(N, 2).double(), torch.randn(2, 2).double()
    else:
        model, x, _, x_test = problem(layout, "classification")
    y = (torch.rand_like(model(x)) < 0.4).long()
    la = fit(
        model, "classification", loader(x, y), output_layout=layout, multi_label=True
    )
    Sigma = dense_posterior(model, x, layout, "multi_label", 1.7)
    f, J = dense_jacobians(model, x_test, layout)
    variance = torch.einsum("bscp,pq,bscq->bsc", J, Sigma, J)
    expected = (f / (1 + torch.pi / 8 * variance).sqrt()).sigmoid()
    got = la(x_test)
    assert got.shape == model(x_test).shape
    close(channels_last(got, layout), expected)
    loss = F.binary_cross_entropy_with_logits(model(x), y.double(), reduction="sum")
    close(torch.as_tensor(la.loss), loss.detach())
    noise = torch.randn(50_000, *f.shape, dtype=torch.float64)
    expected = (f + variance.sqrt() * noise).sigmoid().mean(0)
    got = la(x_test, link_approx="mc", n_samples=50_000)
    close(channels_last(got, layout), expected, 0.02)


def test_multi_label_searches_and_uncertainty():
    torch.manual_seed(1)
    model = mlp(2, 5, C).double()
    x = torch.randn(20, 2).double()
    y = (torch.rand_like(model(x)) < model(x).sigmoid()).double()
    data = loader(x, y)
    la = fit(model, "classification", data, multi_label=True, complement="drop")
    la.optimize_temperature(data, link_approx="probit")
    la.optimize_prior_precision(
        method="gridsearch", val_loader=data, grid_size=5, pred_type="nn", n_samples=3
    )
    cache = FeatureCache.from_loader(la, data)
    la.fit(data, val_loader=data, early_stopping=True)
    assert cache.targets.shape == (20, C)
    parts = decompose(la, x, n_samples=64)
    assert parts.total.shape == (20, C)
    p = parts.mean
    close(parts.total, -(p * p.log() + (1 - p) * (1 - p).log()))
    assert (parts.epistemic >= 0).all()
    sampled = fit(model, "classification", data, multi_label=True, stochastic=3000)
    exact = fit(model, "classification", data, multi_label=True)
    assert (sampled.H - exact.H).norm() / exact.H.norm() < 0.08


def test_multi_label_nll_is_the_default_loss():
    """The grid search takes the candidate with the lowest Bernoulli likelihood."""
    torch.manual_seed(2)
    model = mlp(2, 5, C).double()
    x = torch.randn(20, 2).double()
    y = (torch.rand_like(model(x)) < 0.5).double()
    data = loader(x, y)
    la = fit(model, "classification", data, multi_label=True, complement="drop")
    losses = {}
    for prior in torch.logspace(-2, 2, 5):
        la.prior_precision = prior
        p = la(x)
        losses[prior] = float(F.binary_cross_entropy(p, y, reduction="sum"))
    la.optimize_prior_precision(
        method="gridsearch",
        val_loader=data,
        grid_size=5,
        log_prior_prec_min=-2,
        log_prior_prec_max=2,
    )
    close(la.prior_precision[0].float(), min(losses, key=losses.get))


def test_multi_label_errors():
    model = mlp(2, C).double()
    x = torch.randn(5, 2).double()
    with pytest.raises(ValueError, match="multi_label=True is for likelihood='class"):
        ELLALaplace(model, "regression", multi_label=True)
    la = ELLALaplace(model, "classification", multi_label=True)
    with pytest.raises(ValueError, match=r"Multi-label targets.*\(4, 4\), got \(4,\)"):
        la.fit(loader(x, torch.zeros(5).long()))
    with pytest.raises(ValueError, match=r"0 or 1.*from 0 to 2"):
        la.fit(loader(x, 2 * torch.eye(5)[:, :C]))
    la.fit(loader(x, torch.eye(5)[:, :C]))
    with pytest.raises(ValueError, match="'probit' or 'mc'"):
        la(x, link_approx="bridge")
    with pytest.raises(ValueError, match="no single class"):
        la.fit(loader(x, torch.eye(5)[:, :C]), balanced=True)


# One noise per output


@pytest.mark.parametrize("layout", ["flat", *LAYOUTS])
def test_noise_of_each_output(layout):
    """Variances and evidence with one noise per output, against explicit matrices."""
    if layout == "flat":
        torch.manual_seed(0)
        model = mlp(2, 5, C).double()
        x, x_test = torch.randn(N, 2).double(), torch.randn(2, 2).double()
        y = torch.randn(N, C).double()
    else:
        model, x, y, x_test = problem(layout, "regression")
    sigma = torch.tensor([0.3, 1.0, 2.0, 0.7], dtype=torch.float64)
    la = fit(model, "regression", loader(x, y), output_layout=layout, sigma_noise=sigma)
    Sigma = dense_posterior(model, x, layout, "regression", 1.7, noise=sigma)
    _f, J = dense_jacobians(model, x_test, layout)
    covariance = torch.einsum("bscp,pq,bsdq->bscd", J, Sigma, J)
    close(la(x_test)[1].reshape(covariance.shape), covariance)
    residual = channels_last((model(x) - y).detach(), layout)
    log_lik = torch.distributions.Normal(0, sigma).log_prob(residual).sum()
    close(la.log_likelihood, log_lik)
    delta = torch.cat([p.detach().flatten() for p in model.parameters()])
    P = len(Sigma)
    ratio = -torch.logdet(Sigma) - P * torch.tensor(1.7, dtype=torch.float64).log()
    evidence = log_lik - 0.5 * ratio - 0.5 * 1.7 * delta.square().sum()
    close(la.log_marginal_likelihood(), evidence)
    parts = decompose(la, x_test)
    shaped = channels_last(parts.aleatoric, layout)
    close(shaped, sigma.square().expand_as(shaped))
    # another noise needs no second fit, and no noise can be told apart at T=2
    la.sigma_noise = 2 * sigma
    Sigma = dense_posterior(model, x, layout, "regression", 1.7, noise=2 * sigma)
    covariance = torch.einsum("bscp,pq,bsdq->bscd", J, Sigma, J)
    close(la(x_test)[1].reshape(covariance.shape), covariance)
    la.sigma_noise, la.temperature = sigma, 4.0
    close(la(x_test)[1].reshape(covariance.shape), covariance)


def test_equal_noises_are_one_noise():
    model, x, y, x_test = problem("channels_last", "regression")
    kwargs = {"output_layout": "channels_last", "complement": "drop"}
    one = fit(model, "regression", loader(x, y), sigma_noise=0.5, **kwargs)
    each = fit(
        model, "regression", loader(x, y), sigma_noise=torch.full((C,), 0.5), **kwargs
    )
    close(one.log_marginal_likelihood(), each.log_marginal_likelihood())
    close(one(x_test)[1], each(x_test)[1])
    each.truncate(3), one.truncate(3)
    close(one(x_test)[1], each(x_test)[1])


def test_noise_of_each_output_by_evidence():
    """The data's own noises are found, and the evidence is at a maximum."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 400, dtype=torch.float64).unsqueeze(-1)
    true = torch.tensor([0.1, 0.6], dtype=torch.float64)
    model = nn.Linear(1, 2).double()
    y = model(x).detach() + true * torch.randn(400, 2, dtype=torch.float64)
    la = fit(model, "regression", loader(x, y, 100), sigma_noise=torch.ones(2))
    la.optimize_sigma_noise()
    assert torch.allclose(la.sigma_noise, true, rtol=0.15)
    best = la.log_marginal_likelihood()
    for factor in (torch.tensor([1.05, 1.0]), torch.tensor([1.0, 0.95])):
        sigma = la.sigma_noise
        assert la.log_marginal_likelihood(sigma_noise=factor * sigma) < best
        la.sigma_noise = sigma


def test_noise_errors(tmp_path):
    model, x, y, x_test = problem("channels_last", "regression")
    kwargs = {"output_layout": "channels_last"}
    with pytest.raises(ValueError, match="3 values, the model 4 outputs at each"):
        fit(model, "regression", loader(x, y), sigma_noise=torch.ones(3), **kwargs)
    with pytest.raises(ValueError, match=r"one number per output, \(C,\)"):
        ELLALaplace(model, "regression", sigma_noise=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"\(C,\), got shape \(0,\)"):
        ELLALaplace(model, "regression", sigma_noise=torch.ones(0))
    with pytest.raises(ValueError, match="stochastic=True mixes the outputs"):
        ELLALaplace(model, "regression", sigma_noise=torch.ones(4), stochastic=True)
    with pytest.raises(ValueError, match="for regression"):
        ELLALaplace(model, "classification", sigma_noise=torch.ones(4))
    la = fit(model, "regression", loader(x, y), **kwargs)
    before = la(x_test)[1]
    with pytest.raises(ValueError, match="before fit"):
        la.sigma_noise = torch.ones(4)
    close(la(x_test)[1], before)
    la = fit(model, "regression", loader(x, y), sigma_noise=torch.ones(4), **kwargs)
    torch.save(la.state_dict(), tmp_path / "la.pt")
    again = ELLALaplace(model, "regression", **kwargs)
    again.load_state_dict(torch.load(tmp_path / "la.pt", weights_only=True))
    close(again(x_test)[1], la(x_test)[1])
    with pytest.raises(NotImplementedError, match="Diagnostics"):
        laplace_ella.diagnose(la, loader(x, y))
    sampled = ELLALaplace(model, "regression", stochastic=True, **kwargs)
    with pytest.raises(ValueError, match="4 values of sigma_noise"):
        sampled.load_state_dict(la.state_dict())
    assert sampled.basis is None  # refused before anything was taken over


# Named parameters


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_named_parameters_equal_laplaces_subnetwork(likelihood):
    """`parameter_names=` is the subnetwork whose mask has the same names."""
    torch.manual_seed(0)
    model = mlp(2, 4, 3).double()
    x, x_test = torch.randn(N, 2).double(), torch.randn(2, 2).double()
    y = (
        torch.randn(N, 3).double()
        if likelihood == "regression"
        else (torch.randint(3, (N,)))
    )
    names = ["0.bias", "2.weight"]
    la = fit(model, likelihood, loader(x, y), parameter_names=names)
    indices = ParamNameSubnetMask(model, parameter_names=names).select()
    theirs = Laplace(
        model,
        likelihood,
        "subnetwork",
        "full",
        subnetwork_indices=indices,
        prior_precision=1.7,
    )
    theirs.fit(loader(x, y))
    assert la.n_params == len(indices)
    _, ours = la._glm_predictive_distribution(x_test)
    _, expected = theirs._glm_predictive_distribution(x_test)
    close(ours, expected)
    assert la.basis.directions.shape[1] == len(indices)


def test_named_parameters_by_pattern_and_prior():
    model = mlp(2, 4, 3).double()
    data = loader(torch.randn(N, 2).double(), torch.randint(3, (N,)))
    la = Laplace(
        model,
        "classification",
        "all",
        "nystrom",
        parameter_names=["2.*"],
        prior_precision=torch.tensor([1.0, 2.0]),
        n_eigenvalues=3,
    )
    la.fit(data)
    assert la.linearizer.fn.names == ("2.weight", "2.bias")
    assert la.sample(2).shape == (2, la.n_params)
    assert la.prior_precision_diag.shape == (la.n_params,)
    last = Laplace(
        model,
        "classification",
        "last_layer",
        "nystrom",
        prior_precision=torch.tensor([1.0, 2.0]),
        n_eigenvalues=3,
    )
    last.fit(data)
    x = torch.randn(2, 2).double()
    close(la(x), last(x))
    assert [p.requires_grad for p in model.parameters()] == [True] * 4


def test_named_parameter_errors():
    model = mlp(2, 3)
    once = ELLALaplace(
        model, "regression", parameter_names=(name for name in ["0.weight"])
    )
    assert once.n_params == model[0].weight.numel()
    with pytest.raises(ValueError, match=r"\['head'\] matches none of \['0.weight'"):
        ELLALaplace(model, "regression", parameter_names=["head"])
    with pytest.raises(ValueError, match="an empty list"):
        ELLALaplace(model, "regression", parameter_names=[])
    with pytest.raises(TypeError, match="list of parameter names"):
        ELLALaplace(model, "regression", parameter_names="0.weight")


def test_layout_enum_is_public():
    assert OutputLayout("channels_first") is OutputLayout.CHANNELS_FIRST
