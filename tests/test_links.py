"""Probit on centred logits, and the softmax temperature, against dense float64."""

import copy

import numpy as np
import pytest
import torch
from laplace.utils.enums import LinkApprox

import laplace_ella
from laplace_ella import ELLALaplace, ELLALLLaplace, FeatureCache, Link
from laplace_ella.posterior.predictive import (
    FunctionValues,
    centered_probit,
    class_probabilities,
    probit,
)
from laplace_ella.tuning.validation import Validator
from tests import dense
from tests.cases import Case, make, mlp
from tests.fitting import assert_close, fit

CLOSED = ("probit", "probit_centered", "bridge", "bridge_norm")
TAU = 2.3


def values(C=4, K=3, residual=False, shift=0.0, seed=0):
    """Gaussians over C logits at five inputs, with a common shift of variance shift²"""
    g = torch.Generator().manual_seed(seed)
    draw = {"generator": g, "dtype": torch.float64}
    factor = torch.randn(5, C, K, **draw)
    factor = torch.cat([factor, torch.full((5, C, 1), shift).double()], -1)
    root = torch.randn(5, C, C, **draw)
    rest = root @ root.mT if residual else None
    return FunctionValues(2 * torch.randn(5, C, **draw), factor, rest)


def fitted(name="classification_mlp", cls=ELLALaplace, **kwargs):
    case = make(name)
    la = fit(case, cls, **kwargs)
    reference = dense.Reference(case, la.basis.vectors) if cls is ELLALaplace else None
    return case, la, reference


# --- probit on centred logits --------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("C", [1, 2, 7])
def test_centred_probit_is_probit_of_the_centred_gaussian(C, residual):
    f = values(C, residual=residual)
    assert_close(
        class_probabilities(f, "probit_centered"),
        dense.centered_probit(f.mean, f.covariance()),
    )


def test_a_common_shift_of_the_logits_changes_nothing():
    """In float32 too, where the shift has all but a millionth of the variance."""
    f, shifted = values(), values(shift=1e3)
    assert_close(centered_probit(shifted), centered_probit(f))
    single = FunctionValues(shifted.mean.float(), shifted.factor.float())
    expected = centered_probit(f).float()
    assert_close(centered_probit(single), expected, rtol=1e-4, atol=1e-5)
    assert (probit(shifted) - probit(f)).abs().max() > 0.1


@pytest.mark.parametrize("C", [2, 4, 10])
def test_it_is_closer_to_the_integral_where_logits_vary_together(C):
    """Against very many samples."""
    f = values(C, shift=10.0)
    exact = class_probabilities(
        f, "mc", 100_000, generator=torch.Generator().manual_seed(0)
    )

    def distance(link):
        return (class_probabilities(f, link) - exact).abs().sum(-1).mean().item()

    assert distance("probit_centered") < 0.7 * distance("probit")


def test_two_classes_are_a_sigmoid_of_the_difference():
    """By quadrature: f₁ − f₂ is a Gaussian, and probit is known to be close there."""
    f = values(2, shift=3.0)
    contrast = torch.tensor([1.0, -1.0]).double()
    mean, var = f.mean @ contrast, contrast @ f.covariance() @ contrast
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    z = torch.as_tensor(nodes) * var.sqrt().unsqueeze(-1) + mean.unsqueeze(-1)
    exact = z.sigmoid() @ torch.as_tensor(weights / weights.sum())
    mackay = (mean / (1 + torch.pi / 8 * var).sqrt()).sigmoid()
    assert_close(centered_probit(f)[:, 0], mackay)
    assert (mackay - exact).abs().max() < 0.02
    assert (probit(f)[:, 0] - exact).abs().max() > 0.02


def test_independent_outputs():
    f = values(residual=True)
    expected = dense.centered_probit(f.mean, torch.diag_embed(f.variance()))
    assert_close(centered_probit(f, diagonal_output=True), expected)


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("n_eigenvalues", [6, "exact"])
def test_predictions_and_caches(n_eigenvalues, complement):
    if n_eigenvalues == "exact" and complement == "drop":
        pytest.skip("exact keeps the complement")
    case, la, reference = fitted(n_eigenvalues=n_eigenvalues, complement=complement)
    f_mu, f_var = reference.predict(case.x_test, 1.0, complement)
    expected = dense.centered_probit(f_mu, f_var)
    for link in ("probit_centered", Link.PROBIT_CENTERED):
        assert_close(la(case.x_test, link_approx=link), expected)
    loader = Case(case.model, "", case.x_test, case.y[:7], None).loader()
    cache = FeatureCache.from_loader(la, loader)
    found = la.predict_from_cache(cache, link_approx="probit_centered")
    assert_close(found, expected)


@pytest.mark.parametrize("link", list(LinkApprox))
def test_links_of_laplace_are_those_of_the_package(link):
    case, la, _ = fitted()
    assert_close(
        la(case.x_test, link_approx=link), la(case.x_test, link_approx=link.value)
    )


def test_searches_take_the_link():
    """The loss they minimise is that of predictions with it."""
    case, la, _ = fitted()
    loader = case.loader()
    for search in (
        lambda: la.optimize_temperature(loader, link_approx="probit_centered"),
        lambda: la.optimize_prior_precision(
            method="gridsearch",
            val_loader=loader,
            grid_size=5,
            link_approx="probit_centered",
        ),
        lambda: la.fit(
            loader,
            val_loader=loader,
            early_stopping=laplace_ella.EarlyStopping(link_approx="probit_centered"),
        ),
    ):
        search()


def multi_label():
    case = make("classification_mlp")
    case.y = torch.nn.functional.one_hot(case.y, 3)
    return case, fit(case, multi_label=True)


@pytest.mark.parametrize("link", ["probit_centered", "bridge"])
def test_labels_have_no_common_shift(link):
    case, la = multi_label()
    with pytest.raises(ValueError, match=rf"'{link}' .* use link_approx='probit'"):
        la(case.x_test, link_approx=link)


def test_compare_takes_the_link_for_methods_that_have_it_not():
    case = make("classification_mlp")
    report = laplace_ella.compare(
        case.model,
        "classification",
        case.loader(),
        case.loader(),
        methods=["map", "ella", "diag"],
        links=["probit_centered", "probit"],
        progress_bar=False,
    )
    status = {(r.method, r.link): r.status for r in report.results}
    assert status["ella", "probit_centered"] == "ok"
    assert status["diag", "probit"] == "ok"
    assert status["diag", "probit_centered"] == "ok"
    nll = {r.link: r.metrics["nll"] for r in report["diag"]}
    assert nll["probit_centered"] != nll["probit"]


# --- the softmax temperature ---------------------------------------------------------


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("link", CLOSED)
@pytest.mark.parametrize("name", ["classification_mlp", "classification_cnn"])
def test_probabilities_are_those_of_the_divided_function(name, link, complement):
    case, la, reference = fitted(
        name, complement=complement, softmax_temperature=TAU, prior_precision=0.7
    )
    f_mu, f_var = reference.predict(case.x_test, 0.7, complement)
    expected = dense.LINKS[link](f_mu / TAU, f_var / TAU**2)
    assert_close(la(case.x_test, link_approx=link), expected)


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("diagonal_output", [False, True])
def test_sampled_link(complement, diagonal_output):
    case, la, reference = fitted(complement=complement)
    la.softmax_temperature = TAU
    f_mu, f_var = reference.predict(case.x_test, 1.0, complement)
    if diagonal_output:
        f_var = torch.diag_embed(f_var.diagonal(dim1=1, dim2=2))
    expected = dense.sampled_probs(f_mu / TAU, f_var / TAU**2, 100_000)
    found = la(
        case.x_test,
        link_approx="mc",
        n_samples=100_000,
        diagonal_output=diagonal_output,
    )
    assert_close(found, expected, rtol=0, atol=6e-3)


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
def test_one_changes_nothing_and_another_does_everywhere(cls):
    case, la, _ = fitted(cls=cls)
    before = list(outputs(la, case.x_test, case.loader()))
    la.softmax_temperature = 1
    for a, b in zip(before, outputs(la, case.x_test, case.loader()), strict=True):
        assert torch.equal(a, b)
    la.softmax_temperature = 3
    for a, b in zip(before, outputs(la, case.x_test, case.loader()), strict=True):
        assert not torch.allclose(a, b)


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_functions_evidence_and_fits_do_not_know_it(cls):
    case, la, _ = fitted(cls=cls)
    _, scaled, _ = fitted(cls=cls, softmax_temperature=TAU)
    assert torch.equal(la.H, scaled.H)
    assert torch.equal(la.posterior_precision, scaled.posterior_precision)
    assert torch.equal(la.log_marginal_likelihood(), scaled.log_marginal_likelihood())
    draws = [
        a.functional_samples(
            case.x_test, n_samples=4, generator=torch.Generator().manual_seed(0)
        )
        for a in (la, scaled)
    ]
    assert torch.equal(*draws)
    probs = scaled.predictive_samples(
        case.x_test, n_samples=4, generator=torch.Generator().manual_seed(0)
    )
    assert_close(probs, (draws[0] / TAU).softmax(-1))


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_sampled_weights(cls):
    case, la, _ = fitted(cls=cls, softmax_temperature=TAU)
    x = case.x_test
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    f = la.functional_samples(x, "nn", 16, generator=generators[0])
    found = la(x, "nn", link_approx="mc", n_samples=16, generator=generators[1])
    assert_close(found, (f / TAU).softmax(-1).mean(0))


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_layouts(layout):
    """Probabilities at every position, from the variances there."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 3, 3, generator=g).double()
    net = torch.nn.Conv2d(2, 4, 2).double()

    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x).movedim(1, -1)

    model = net if layout == "channels_first" else Last()
    y = torch.randint(4, (6, 2, 2), generator=g)
    case = Case(model, "classification", x, y, x[:3])
    la = fit(case, output_layout=layout, softmax_temperature=TAU)
    mean, var = la._glm_predictive_distribution(case.x_test)  # (3, 2, 2, C, C)
    dim = 1 if layout == "channels_first" else -1
    rows = mean.movedim(dim, -1).flatten(0, -2)
    expected = dense.centered_probit(rows / TAU, var.flatten(0, -3) / TAU**2)
    found = la(case.x_test, link_approx="probit_centered").movedim(dim, -1)
    assert_close(found.flatten(0, -2), expected)
    samples = la.predictive_samples(case.x_test, n_samples=3)
    assert_close(
        samples.sum(dim + 1 if dim > 0 else dim), torch.ones(3, 3, 2, 2).double()
    )
    uncertainty = laplace_ella.decompose(la, case.x_test, 64)
    mc = la(case.x_test, link_approx="mc", n_samples=64)
    assert_close(uncertainty.mean, mc)


def test_labels():
    case, la = multi_label()
    la.softmax_temperature = TAU
    f, Js = dense.jacobians(case.model, case.x)
    p, V = f.sigmoid(), la.basis.vectors
    H = dense.curvature(Js, torch.diag_embed(p * (1 - p)), V)
    Sigma = dense.subspace_covariance(H, V, torch.ones(len(V)).double())
    mean, Js = dense.jacobians(case.model, case.x_test)
    marginal = dense.marginal(Js, Sigma).diagonal(dim1=1, dim2=2) / TAU**2
    expected = (mean / TAU / (1 + torch.pi / 8 * marginal).sqrt()).sigmoid()
    assert_close(la(case.x_test), expected)


def test_searches_see_it():
    case, la, _ = fitted()
    cache = FeatureCache.from_loader(la, case.loader())
    la.softmax_temperature = TAU
    fitter = la.fitter
    validator = Validator(
        cache, None, fitter.observation, Link.PROBIT, 1, fitter.fresh_generator
    )
    probs = la.predict_from_cache(cache)
    expected = torch.nn.functional.nll_loss(probs.log(), case.y).item()
    for posterior, score in (
        (la.posterior, validator),
        validator.for_scalars(la.posterior),
    ):
        assert score(posterior) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_checkpoints(cls):
    case, la, _ = fitted(cls=cls, softmax_temperature=TAU)
    state = la.state_dict()
    other = cls(case.model, "classification")
    other.load_state_dict(state)
    assert other.softmax_temperature == TAU
    assert_close(other(case.x_test), la(case.x_test))
    del state["softmax_temperature"]  # as it was before there was one
    other.load_state_dict(state)
    assert other.softmax_temperature == 1


def test_old_pickles():
    _, la, _ = fitted()
    state = la.__getstate__()
    del state["_softmax_temperature"]
    old = copy.copy(la)
    old.__dict__.clear()
    old.__dict__.update(state)
    assert old.softmax_temperature == 1


@pytest.mark.parametrize("value", [2, np.float32(2), torch.tensor([2.0]), np.array(2)])
def test_any_number_is_taken(value):
    la = ELLALaplace(mlp(2, 3), "classification", softmax_temperature=value)
    assert la.softmax_temperature == 2
    assert isinstance(la.softmax_temperature, float)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (0, ValueError, "must be positive and finite, got 0"),
        (-1.0, ValueError, "must be positive"),
        (float("nan"), ValueError, "must be positive"),
        (float("inf"), ValueError, "must be positive"),
        ("2", TypeError, "one number, got '2'"),
        (True, TypeError, "one number, got True"),
        (torch.ones(2), TypeError, "one number"),
    ],
)
def test_other_things_are_refused(value, error, match):
    la = ELLALaplace(mlp(2, 3), "classification")
    with pytest.raises(error, match=match):
        la.softmax_temperature = value
    assert la.softmax_temperature == 1


def test_regression_has_none():
    la = ELLALaplace(mlp(2, 3), "regression", softmax_temperature=1)
    with pytest.raises(ValueError, match=r"is for classification.*sigma_noise"):
        la.softmax_temperature = 2.0
