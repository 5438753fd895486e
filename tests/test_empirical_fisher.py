"""`backend=...EF`: the empirical Fisher is Laplace's, in the basis's directions."""

import copy
from importlib.metadata import version

import pytest
import torch
from laplace import DiagLaplace, FullLaplace, Laplace, marglik_training
from laplace.curvature import (
    AsdlEF,
    BackPackEF,
    CurvlinopsEF,
    CurvlinopsGGN,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace, ELLALLLaplace, RowMode
from laplace_ella.derivatives.backends import Curvature
from laplace_ella.posterior import likelihood
from laplace_ella.posterior.likelihood import Family
from tests.cases import CASES, DictModel, make, mapping_loader, mlp
from tests.fitting import assert_close, build, fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.RankWarning")

BACKENDS = {
    CurvlinopsEF: RowMode.VMAP,
    BackPackEF: RowMode.BACKPACK,
    AsdlEF: RowMode.ASDL,
}
backends = pytest.mark.parametrize("backend", BACKENDS)
FULL_RANK = 10**4

OLD = version("curvlinops-for-pytorch").startswith("2.")
PRECISE = {CurvlinopsEF: BackPackEF} if OLD else {}
"""Who takes the reference's place: before version 3 curvlinops computes in float32."""


@pytest.fixture
def float64():
    """As default, which decides how precise curvlinops is behind Laplace."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def loss_gradients(model, x, y, loss, params=None):
    """Gradient of the loss of each example, (N, P), by one backward pass each."""
    params = list(model.parameters()) if params is None else params
    rows = []
    for i in range(len(x)):
        value = loss(model(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(value, params, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten()
                    for g, p in zip(grads, params, strict=True)
                ]
            )
        )
    return torch.stack(rows)


def dense_fisher(case):
    """Laplace's: ½ of the outer products of the square error's gradients."""
    if case.likelihood == "regression":
        loss, factor = nn.MSELoss(reduction="sum"), 0.5
    else:
        loss, factor = nn.CrossEntropyLoss(reduction="sum"), 1.0
    G = loss_gradients(case.model, case.x, case.y, loss, case.params)
    return factor * G.T @ G


def directions(la):
    """V (P, K)."""
    return la.basis.directions.T.double()


# --- against laplace-torch and the dense reference -----------------------------------


@backends
@pytest.mark.parametrize("name", CASES)
def test_is_the_dense_one(name, backend):
    case = make(name)
    la = fit(case, backend=backend)
    V = directions(la)
    assert la.curvature is Curvature.EMPIRICAL_FISHER
    assert_close(la.H, V.T @ dense_fisher(case) @ V)


@backends
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_is_that_of_full_laplace(name, backend, float64):
    """All of it: the precision at full rank, the loss and the evidence."""
    case = make(name)
    kwargs = {"prior_precision": 0.7, "temperature": 1.5} | case.kwargs
    la = fit(case, backend=backend, n_eigenvalues=FULL_RANK, **kwargs)
    theirs = FullLaplace(
        copy.deepcopy(case.model),
        case.likelihood,
        backend=PRECISE.get(backend, backend),
        **kwargs,
    )
    theirs.fit(case.loader())
    V = directions(la)
    projected = V.T @ theirs.posterior_precision @ V
    assert_close(la.posterior_precision, projected, rtol=1e-6, atol=1e-9)
    assert_close(la.loss, torch.as_tensor(theirs.loss))
    # The Fisher lies within the gradients, which the basis spans.
    assert_close(la.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    la.complement = "prior"
    mean, var = la._glm_predictive_distribution(case.x_test)
    expected_mean, expected_var = theirs._glm_predictive_distribution(case.x_test)
    assert_close(mean, expected_mean)
    assert_close(var, expected_var, rtol=1e-6, atol=1e-9)


@backends
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_is_that_of_diagonal_laplace(name, backend):
    """Where the basis spans the Fisher, its diagonal is that of VHVᵀ."""
    case = make(name)
    la = fit(case, backend=backend, n_eigenvalues=FULL_RANK)
    theirs = DiagLaplace(
        copy.deepcopy(case.model), case.likelihood, backend=backend, **case.kwargs
    )
    theirs.fit(case.loader())
    V = directions(la)
    assert_close((V @ la.H @ V.T).diag(), theirs.H, rtol=1e-6, atol=1e-9)


@backends
def test_last_layer(backend):
    case = make("classification_mlp")
    la = fit(case, ELLALLLaplace, backend=backend)
    params = list(case.model[-1].parameters())
    loss = nn.CrossEntropyLoss(reduction="sum")
    G = loss_gradients(case.model, case.x, case.y, loss, params)
    V = directions(la)
    assert_close(la.H, V.T @ G.T @ G @ V)


# --- other targets -------------------------------------------------------------------


@pytest.mark.parametrize("family", Family)
def test_cotangents_are_gradients_of_the_loss(family):
    """Of the loss that is added up, by autograd."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    probabilities = torch.randn(6, 3, generator=generator).double().softmax(-1)
    classes = torch.tensor([0, 2, likelihood.IGNORED, 1, 1, 0])
    targets = [probabilities]
    if family is Family.CATEGORICAL:
        targets.append(classes)
    scale = 2**0.5 if family.is_regression else 1.0
    for y in targets:
        leaf = f.clone().requires_grad_()
        (expected,) = torch.autograd.grad(
            likelihood.losses(leaf, y, family).sum(), leaf
        )
        assert_close(likelihood.target_cotangents(f, y, family), scale * expected)


def test_multi_label():
    case = make("classification_mlp")
    case.y = torch.nn.functional.one_hot(case.y, 3).double()
    la = fit(case, backend=CurvlinopsEF, multi_label=True)
    loss = nn.BCEWithLogitsLoss(reduction="sum")
    G = loss_gradients(case.model, case.x, case.y, loss)
    V = directions(la)
    assert_close(la.H, V.T @ G.T @ G @ V)


def test_class_probabilities():
    case = make("classification_mlp")
    generator = torch.Generator().manual_seed(0)
    case.y = torch.rand(12, 3, generator=generator, dtype=torch.float64).softmax(-1)
    la = fit(case, backend=CurvlinopsEF)
    V = directions(la)
    assert_close(la.H, V.T @ dense_fisher(case) @ V)


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
def test_positions(layout):
    """One gradient per example, over all its observed positions."""
    torch.manual_seed(0)
    last = layout == "channels_last"
    net = mlp(3, 4, 2) if last else nn.Conv1d(3, 2, 1)
    net.double()
    x = torch.randn(6, *((5, 3) if last else (3, 5)), dtype=torch.float64)
    y = torch.randint(2, (6, 5))
    y[0, 3:] = y[4] = likelihood.IGNORED
    la = ELLALaplace(
        net, "classification", backend=CurvlinopsEF, output_layout=layout, seed=0
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=4))

    def loss(f, y):
        f = f.flatten(0, 1) if last else f.transpose(1, 2).flatten(0, 1)
        return nn.functional.cross_entropy(f, y.flatten(), reduction="sum")

    G = loss_gradients(net, x, y, loss)
    V = directions(la)
    assert_close(la.H, V.T @ G.T @ G @ V)


def test_mapping_batches():
    case = make("classification_mlp")
    model = DictModel(case.model)
    la = ELLALaplace(model, "classification", backend=CurvlinopsEF)
    la.fit(mapping_loader(case.x, case.y))
    V = directions(la)
    assert_close(la.H, V.T @ dense_fisher(case) @ V)


# --- other ways to the same ----------------------------------------------------------


@backends
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_from_cached_features(name, backend):
    case = make(name)
    la = fit(case, backend=backend)
    expected = la.H
    la.fit_features(la.cache_features(case.loader()))
    assert_close(la.H, expected)
    la.fit_features(la.cache_features(case.loader()), override=False)
    assert_close(la.H, 2 * expected)


@backends
def test_added_in_parts(backend):
    case = make("classification_mlp")
    la = fit(case, backend=backend)
    expected = la.H
    la.fit_basis(case.loader())
    for part in (slice(0, 5), slice(5, None)):
        data = TensorDataset(case.x[part], case.y[part])
        la.fit(DataLoader(data, batch_size=3), override=False)
    assert_close(la.H, expected)


@backends
def test_rows_are_taken_by_the_library(backend):
    la = fit(make("classification_mlp"), backend=backend)
    asked = BACKENDS[backend]
    rows = la._linearizer.modes(la.rank).rows
    assert rows is asked or (asked is RowMode.VMAP and rows is RowMode.LOOP)


@backends
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_through_laplace(backend, subset):
    case = make("classification_mlp")
    la = Laplace(case.model, case.likelihood, subset, "nystrom", backend=backend)
    la.fit(case.loader())
    la.optimize_prior_precision()
    probs = la(case.x_test)
    assert_close(probs.sum(-1), torch.ones(7, dtype=torch.float64))
    assert la._backend_cls is backend


def test_marglik_training():
    case = make("classification_mlp")
    la, *_ = marglik_training(
        case.model,
        case.loader(),
        hessian_structure="nystrom",
        backend=CurvlinopsEF,
        n_epochs=2,
    )
    assert la.curvature is Curvature.EMPIRICAL_FISHER


def test_checkpoint():
    case = make("classification_mlp")
    la = fit(case, backend=CurvlinopsEF)
    loaded = build(case, backend=CurvlinopsEF)
    loaded.load_state_dict(la.state_dict())
    assert_close(loaded(case.x_test), la(case.x_test))
    loaded.fit(case.loader(), override=False)
    assert_close(loaded.H, 2 * la.H)


def test_differs_from_the_ggn():
    case = make("classification_mlp")
    ggn = fit(case, backend=CurvlinopsGGN)
    assert ggn.curvature is Curvature.GGN
    assert not torch.allclose(fit(case, backend=CurvlinopsEF).H, ggn.H)


# --- what does not go together -------------------------------------------------------


@backends
def test_no_sampled_targets(backend):
    """Targets are those of the data."""
    use = backend.__name__.replace("EF", "GGN")
    for kwargs in ({"stochastic": 3}, {"backend_kwargs": {"stochastic": True}}):
        with pytest.raises(ValueError, match=f"stochastic.*{backend.__name__}.*{use}"):
            ELLALaplace(mlp(2, 3, 1), "regression", backend=backend, **kwargs)


def test_one_noise():
    with pytest.raises(ValueError, match=r"empirical Fisher mixes.*got 2 values"):
        ELLALaplace(
            mlp(2, 3, 2),
            "regression",
            sigma_noise=torch.tensor([0.1, 0.2]),
            backend=CurvlinopsEF,
        )
