"""Links from Gaussians over logits to probabilities, against dense float64."""

import numpy as np
import pytest
import torch
from laplace.utils.enums import LinkApprox

import laplace_ella
from laplace_ella import ELLALaplace, ELLALLLaplace, FeatureCache
from laplace_ella.posterior.observation import (
    Family,
    FunctionValues,
    Link,
    class_probabilities,
    draw,
)
from tests import dense
from tests.cases import Case, make
from tests.fitting import assert_close, fit

CLOSED = ("probit", "probit_centered", "bridge", "bridge_norm")
TAU = 2.3


def values(C=4, K=3, residual=False, shift=0.0):
    """Gaussians over C logits at five inputs, with a common shift of variance shift²"""
    g = torch.Generator().manual_seed(0)
    drawn = {"generator": g, "dtype": torch.float64}
    factor = torch.randn(5, C, K, **drawn)
    factor = torch.cat([factor, torch.full((5, C, 1), shift).double()], -1)
    root = torch.randn(5, C, C, **drawn)
    rest = root @ root.mT if residual else None
    return FunctionValues(2 * torch.randn(5, C, **drawn), factor, rest)


def fitted(name="classification_mlp", cls=ELLALaplace, **kwargs):
    case = make(name)
    la = fit(case, cls, **kwargs)
    reference = dense.Reference(case, la.basis.vectors) if cls is ELLALaplace else None
    return case, la, reference


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("C", [1, 2, 7])
@pytest.mark.parametrize("link", CLOSED)
def test_closed_forms_are_those_of_the_covariance(link, C, residual):
    if C == 1 and link.startswith("bridge"):
        pytest.skip("a Dirichlet has two classes at least")
    f = values(C, residual=residual)
    expected = dense.LINKS[link](f.mean, f.covariance())
    assert_close(class_probabilities(f, link), expected)


@pytest.mark.parametrize("residual", [False, True])
def test_independent_outputs(residual):
    """`diagonal_output`: the logits by their marginal variances."""
    f = values(residual=residual)
    diagonal = torch.diag_embed(f.variance())
    found = class_probabilities(f, "probit_centered", diagonal_output=True)
    assert_close(found, dense.centered_probit(f.mean, diagonal))
    found = class_probabilities(f, "mc", 100_000, diagonal_output=True)
    assert_close(found, dense.LINKS["mc"](f.mean, diagonal), rtol=0, atol=1e-2)


@pytest.mark.parametrize("K", [2, 9])
@pytest.mark.parametrize("residual", [False, True])
def test_samples(residual, K, monkeypatch):
    """In one chunk or several; their moments are those of the Gaussian."""
    f = values(K=K, residual=residual)
    samples = draw(f, 100_000, torch.Generator().manual_seed(1))
    scale = float(f.variance().max())
    assert_close(samples.mean(0), f.mean, rtol=0, atol=0.02 * scale**0.5)
    for i in range(5):
        error = samples[:, i].T.cov() - f.covariance()[i]
        assert error.abs().max() < 0.03 * scale
    expected = dense.LINKS["mc"](f.mean, f.covariance())
    for budget in (2**24, 10**5):
        monkeypatch.setattr("laplace_ella.posterior.observation.SAMPLE_BUDGET", budget)
        found = class_probabilities(f, "mc", 100_000)
        assert_close(found, expected, rtol=0, atol=1e-2)
    f = values(K=K, residual=residual)
    labels = class_probabilities(f, "mc", 100_000, family=Family.BERNOULLI)
    assert_close(labels, samples.sigmoid().mean(0), rtol=0, atol=1e-2)


def test_a_common_shift_of_the_logits_changes_nothing():
    """In float32 too, where the shift has all but a millionth of the variance."""
    f, shifted = values(), values(shift=1e3)
    expected = class_probabilities(f, "probit_centered")
    assert_close(class_probabilities(shifted, "probit_centered"), expected)
    single = FunctionValues(shifted.mean.float(), shifted.factor.float())
    found = class_probabilities(single, "probit_centered")
    assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
    probit = [class_probabilities(g, "probit") for g in (f, shifted)]
    assert (probit[0] - probit[1]).abs().max() > 0.1


def test_two_classes_are_a_sigmoid_of_the_difference():
    """By quadrature: f₁ − f₂ is a Gaussian, and probit is known to be close there."""
    f = values(2, shift=3.0)
    contrast = torch.tensor([1.0, -1.0]).double()
    mean, var = f.mean @ contrast, contrast @ f.covariance() @ contrast
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    z = torch.as_tensor(nodes) * var.sqrt().unsqueeze(-1) + mean.unsqueeze(-1)
    exact = z.sigmoid() @ torch.as_tensor(weights / weights.sum())
    mackay = (mean / (1 + torch.pi / 8 * var).sqrt()).sigmoid()
    assert_close(class_probabilities(f, "probit_centered")[:, 0], mackay)
    assert (mackay - exact).abs().max() < 0.02
    assert (class_probabilities(f, "probit")[:, 0] - exact).abs().max() > 0.02


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_some_outputs_of_many(residual, create_graph):
    """Factor and residual of c outputs of each row: the others vary not at all."""
    f = values(2, residual=residual)
    outputs = torch.tensor([[3, 1], [0, 4], [2, 1], [4, 0], [1, 2]])
    mean = torch.randn(5, 6).double()
    factor = f.factor.clone().requires_grad_(create_graph)
    wide = FunctionValues.of_outputs(mean, factor, f.residual, outputs).covariance()
    expected = torch.zeros(5, 6, 6).double()
    for i, (a, b) in enumerate(outputs.tolist()):
        for j, row in enumerate((a, b)):
            expected[i, row, a], expected[i, row, b] = f.covariance()[i, j]
    assert_close(wide.detach(), expected)


@pytest.mark.parametrize("link", list(Link))
def test_float32_and_extreme_logits_are_finite(link):
    f = values()
    f = FunctionValues(40 * f.mean.float(), 30 * f.factor.float())
    p = class_probabilities(f, link, 50)
    assert torch.isfinite(p).all()
    assert_close(p.sum(-1), torch.ones(5), rtol=1e-5)


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("name", ["classification_mlp", "classification_cnn", "frozen"])
def test_predictions_and_caches(name, complement):
    """Every link, also by laplace-torch's own names, of inputs and of a cache."""
    options = {"complement": complement, "prior_precision": 0.7}
    case, la, reference = fitted(name, softmax_temperature=TAU, **options)
    f_mu, f_var = reference.predict(case.x_test, 0.7, complement)
    loader = Case(case.model, "", case.x_test, case.y[:7], None).loader()
    cache = FeatureCache.from_loader(la, loader)
    for link in (*LinkApprox, *Link):
        expected = dense.LINKS[link.value](f_mu / TAU, f_var / TAU**2)
        sampled = link.value == "mc"
        close = {"rtol": 0, "atol": 1e-2 if sampled else 1e-8}
        options = {"link_approx": link, "n_samples": 30_000}
        assert_close(la(case.x_test, **options), expected, **close)
        assert_close(la(case.x_test, "gp", **options), expected, **close)
        assert_close(la.predict_from_cache(cache, **options), expected, **close)
    diagonal = torch.diag_embed(f_var.diagonal(dim1=1, dim2=2))
    expected = dense.LINKS["mc"](f_mu / TAU, diagonal / TAU**2)
    options = {"link_approx": "mc", "n_samples": 100_000, "diagonal_output": True}
    assert_close(la(case.x_test, **options), expected, rtol=0, atol=1e-2)


def outputs(la, x, loader):
    """Everything that is a probability."""
    cache = FeatureCache.from_loader(la, loader)
    parts = laplace_ella.decompose(la, x, 64)
    g = torch.Generator()
    # bridge_norm does not see the scale of f
    yield from (la(x, link_approx=link) for link in (*CLOSED[:-1], "mc"))
    yield la(x, "nn", link_approx="mc", generator=g.manual_seed(1))
    yield la.predictive_samples(x, n_samples=8, generator=g.manual_seed(1))
    yield la.predictive_samples(
        x, pred_type="nn", n_samples=8, generator=g.manual_seed(1)
    )
    yield la.predictive_samples(x, n_samples=8, joint=True, generator=g.manual_seed(1))
    yield la.predict_from_cache(cache, link_approx="probit_centered")
    yield from (parts.mean, parts.total, parts.aleatoric, parts.epistemic)


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_softmax_temperature(cls):
    """One changes nothing and another does everywhere but in functions, evidence and
    curvature."""
    case, la, _ = fitted(cls=cls)
    x, loader = case.x_test, case.loader()
    before = list(outputs(la, x, loader))
    same = la.H, la.posterior_precision, la.log_marginal_likelihood()
    g = torch.Generator()
    f = la.functional_samples(x, n_samples=4, generator=g.manual_seed(0))
    weights = la.functional_samples(x, "nn", 16, generator=g.manual_seed(0))
    la.softmax_temperature = 1
    for a, b in zip(before, outputs(la, x, loader), strict=True):
        assert torch.equal(a, b)
    la.softmax_temperature = TAU
    for a, b in zip(before, outputs(la, x, loader), strict=True):
        assert not torch.allclose(a, b)
    now = la.H, la.posterior_precision, la.log_marginal_likelihood()
    assert all(torch.equal(a, b) for a, b in zip(same, now, strict=True))
    again = la.functional_samples(x, n_samples=4, generator=g.manual_seed(0))
    assert torch.equal(again, f)
    probs = la.predictive_samples(x, n_samples=4, generator=g.manual_seed(0))
    assert_close(probs, (f / TAU).softmax(-1))
    options = {"n_samples": 16, "generator": g.manual_seed(0)}
    found = la(x, "nn", link_approx="mc", **options)
    assert_close(found, (weights / TAU).softmax(-1).mean(0))


def test_labels():
    """Sigmoids of each label; a common shift matters to them."""
    case = make("classification_mlp")
    case.y = torch.nn.functional.one_hot(case.y, 3)
    la = fit(case, multi_label=True, softmax_temperature=TAU)
    f, Js = dense.jacobians(case.model, case.x)
    p, V = f.sigmoid(), la.basis.vectors
    H = dense.curvature(Js, torch.diag_embed(p * (1 - p)), V)
    Sigma = dense.subspace_covariance(H, V, torch.ones(len(V)).double())
    mean, Js = dense.jacobians(case.model, case.x_test)
    marginal = dense.marginal(Js, Sigma).diagonal(dim1=1, dim2=2) / TAU**2
    expected = (mean / TAU / (1 + torch.pi / 8 * marginal).sqrt()).sigmoid()
    assert_close(la(case.x_test), expected)
    for link in ("probit_centered", "bridge"):
        with pytest.raises(ValueError, match=rf"'{link}' .* use link_approx='probit'"):
            la(case.x_test, link_approx=link)
