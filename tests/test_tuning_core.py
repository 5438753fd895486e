"""The prior precision by the evidence and by grid search."""

import copy

import pytest
import torch
import torchmetrics
from laplace.utils.enums import PredType, PriorStructure, TuningMethod
from laplace.utils.metrics import RunningNLLMetric

from laplace_ella import ELLALaplace, ELLALLLaplace
from tests import dense
from tests.cases import PRIORS, make, priors
from tests.fitting import assert_close, fit

REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"
both = pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])


def reference(case, la):
    return dense.Reference(case, la.basis.vectors, sigma=la.sigma_noise)


# --- marginal likelihood -----------------------------------------------------------


@both
@pytest.mark.parametrize("structure", PRIORS)
def test_marglik_follows_the_dense_evidence(name, structure):
    """Tuning takes the steps that Adam takes on the dense evidence."""
    case = make(name)
    la = fit(case)
    expected = reference(case, la)
    log_prior = torch.zeros_like(priors(case)[structure]).requires_grad_()
    optimizer = torch.optim.Adam([log_prior], lr=0.1)
    for _ in range(40):
        optimizer.zero_grad()
        (-expected.evidence(log_prior.exp())).backward()
        optimizer.step()
    la.optimize_prior_precision(
        method="marglik", prior_structure=structure, n_steps=40, lr=0.1
    )
    assert la.prior_precision.shape == log_prior.shape
    assert not la.prior_precision.requires_grad
    assert_close(la.prior_precision, log_prior.exp().detach(), rtol=1e-6)


@both
@pytest.mark.parametrize("structure", PRIORS)
def test_marglik_gradient_by_finite_differences(name, structure):
    """The gradient of the evidence in the prior is right to second order."""
    case = make(name)
    la = fit(case)
    prior = priors(case)[structure].requires_grad_()
    assert torch.autograd.gradcheck(la.log_marginal_likelihood, (prior,))


@both
def test_marglik_raises_the_evidence(name):
    """The tuned evidence beats the start; diag ≥ layerwise ≥ scalar."""
    la = fit(make(name))
    values = [la.log_marginal_likelihood().item()]
    for structure in PRIORS:
        la.optimize_prior_precision(prior_structure=structure, n_steps=150)
        values.append(la.log_marginal_likelihood().item())
    assert values == sorted(values)


def test_marglik_keeps_a_given_structure():
    """A tensor as start decides the structure; enums work as strings do."""
    case = make(REGRESSION)
    la = fit(case)
    la.optimize_prior_precision(
        PredType.GLM,
        TuningMethod.MARGLIK,
        n_steps=3,
        init_prior_prec=priors(case)["layerwise"],
        prior_structure=PriorStructure.SCALAR,
    )
    assert la.prior_precision.shape == (len(case.params),)


def test_marglik_twice_is_the_same():
    """Tuning starts from `init_prior_prec`, whatever the current prior is."""
    la = fit(make(CLASSIFICATION))
    la.optimize_prior_precision(n_steps=20)
    first = la.prior_precision.clone()
    la.optimize_prior_precision(n_steps=20)
    assert_close(la.prior_precision, first, rtol=0, atol=0)


def test_noise_and_prior_together():
    """A user's own loop over log prior and log noise, as in the Laplace examples."""
    la = fit(make(REGRESSION))
    log_prior = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    log_sigma = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=0.1)
    values = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < values[0]
    assert torch.isfinite(torch.tensor(values)).all()


# --- grid search -------------------------------------------------------------------

GRID = torch.logspace(-2, 2, 9)


def gridsearch(la, case, **kwargs):
    options = {
        "method": "gridsearch",
        "val_loader": validation(case),
        "log_prior_prec_min": -2,
        "log_prior_prec_max": 2,
        "grid_size": 9,
    }
    la.optimize_prior_precision(**(options | kwargs))
    return la.prior_precision


def validation(case, batch_size=3):
    """Other inputs, with targets that the model does not expect."""
    case = copy.copy(case)
    g = torch.Generator().manual_seed(8)
    case.x = 1.5 * torch.randn(9, *case.x.shape[1:], generator=g).double()
    f = case.model(case.x).detach()
    if case.likelihood == "regression":
        case.y = f + 0.42 * torch.randn(f.shape, generator=g).double()
    else:
        case.y = torch.randint(f.shape[1], (9,), generator=g)
        case.y[:6] = f.argmax(1)[:6]
    return case.loader(batch_size)


def nll(probs, y):
    return torch.nn.functional.nll_loss(probs.log(), y)


@pytest.mark.parametrize("pred_type", ["glm", "gp"])
@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_gridsearch_classification(link, pred_type):
    """The chosen prior minimises the validation NLL of that very link."""
    case = make(CLASSIFICATION)
    la = fit(case)
    x, y = validation(case).dataset.tensors
    expected = reference(case, la)
    scores = [nll(dense.LINKS[link](*expected.predict(x, prior)), y) for prior in GRID]
    best = GRID[torch.stack(scores).argmin()]
    chosen = gridsearch(la, case, link_approx=link, pred_type=pred_type)
    assert chosen.shape == (1,)
    assert chosen.item() == pytest.approx(best.item(), rel=1e-5)


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@both
def test_gridsearch_by_sampling(name, pred_type, cls):
    """Sampled predictions can be searched too, reproducibly."""
    case = make(name)
    la = fit(case, cls)
    options = {"pred_type": pred_type, "link_approx": "mc", "n_samples": 20}
    first = gridsearch(la, case, **options).clone()
    torch.manual_seed(5)
    assert_close(gridsearch(la, case, **options), first, rtol=0, atol=0)
    assert torch.isclose(GRID.double(), first.double()).any()


def gaussian_nll(mean, var, y):
    total = var.diagonal(dim1=1, dim2=2) + 0.16
    return torch.nn.functional.gaussian_nll_loss(mean, y, total)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_gridsearch_regression_with_a_callable(link):
    """A callable loss of regression gets means, covariances and targets."""
    case = make(REGRESSION)
    la = fit(case)
    x, y = validation(case).dataset.tensors
    expected = reference(case, la)
    scores = [gaussian_nll(*expected.predict(x, prior), y) for prior in GRID]
    best = GRID[torch.stack(scores).argmin()]
    chosen = gridsearch(la, case, loss=gaussian_nll, link_approx=link)
    assert chosen.item() == pytest.approx(best.item(), rel=1e-5)
    assert GRID[0] < best < GRID[-1]


def test_gridsearch_classification_with_a_callable():
    """A callable loss of classification gets probabilities and targets."""
    case = make(CLASSIFICATION)
    shapes = []

    def loss(probs, y):
        shapes.append((tuple(probs.shape), tuple(y.shape)))
        return nll(probs, y)

    la = fit(case)
    expected = gridsearch(la, case).clone()
    assert_close(gridsearch(la, case, loss=loss), expected)
    assert set(shapes) == {((9, 3), (9,))}


def test_gridsearch_regression_default_finds_an_inner_prior():
    """The default loss of regression depends on the prior."""
    case = make(REGRESSION)
    chosen = gridsearch(fit(case), case)
    assert torch.isclose(GRID.double(), chosen.double()).any()


METRICS = {
    "nll": lambda: RunningNLLMetric(),
    "accuracy": lambda: torchmetrics.Accuracy("multiclass", num_classes=3),
    "ece": lambda: torchmetrics.CalibrationError("multiclass", num_classes=3),
}


@pytest.mark.parametrize("metric", METRICS)
def test_gridsearch_with_a_metric(metric):
    """Any torchmetrics metric is minimised over the grid and left as it was."""
    case = make(CLASSIFICATION)
    la = fit(case)
    x, y = validation(case).dataset.tensors
    user = METRICS[metric]()
    user.update(torch.full((2, 3), 1 / 3), torch.tensor([0, 1]))
    before = copy.deepcopy(user.metric_state)
    chosen = gridsearch(la, case, loss=user)
    after = user.metric_state
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value)
    assert user._update_count == 1
    expected = reference(case, la)
    scores = []
    for prior in GRID:
        fresh = METRICS[metric]()
        fresh.update(dense.probit(*expected.predict(x, prior)), y)
        scores.append(fresh.compute())
    at_chosen = (GRID.double() - chosen.double()).abs().argmin()
    assert scores[at_chosen] == pytest.approx(min(scores).item(), abs=1e-6)


def test_gridsearch_regression_metric():
    """A metric that takes only predictions and targets works for regression."""
    case = make(REGRESSION)
    metric = torchmetrics.MeanSquaredError(num_outputs=3)
    chosen = gridsearch(fit(case), case, loss=metric)
    assert torch.isclose(GRID.double(), chosen.double()).any()
    assert metric._update_count == 0


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_gridsearch_computes_features_once(link):
    """The model is called as often for 40 candidates as for 2."""
    case = make(CLASSIFICATION)
    la = fit(case)
    counts = []
    forward = case.model.forward

    def counted(*args, **kwargs):
        counts[-1] += 1
        return forward(*args, **kwargs)

    case.model.forward = counted
    for grid_size in (2, 40):
        counts.append(0)
        gridsearch(la, case, grid_size=grid_size, link_approx=link)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("base", [2.0, 10.0])
def test_gridsearch_base(base):
    """`log_prior_prec_base` is the base of the grid."""
    case = make(CLASSIFICATION)
    options = {"log_prior_prec_min": 3, "log_prior_prec_max": 3, "grid_size": 1}
    chosen = gridsearch(fit(case), case, log_prior_prec_base=base, **options)
    assert chosen.item() == pytest.approx(base**3, rel=1e-5)


@pytest.mark.parametrize("method", ["marglik", "gridsearch"])
def test_prior_is_restored_if_tuning_raises(method):
    """A loss that raises leaves the prior, and the posterior, as they were."""
    case = make(CLASSIFICATION)
    la = fit(case, prior_precision=priors(case)["layerwise"])
    expected = la(case.x_test)

    def broken(*args):
        raise RuntimeError("broken loss")

    with pytest.raises((RuntimeError, ValueError)):
        if method == "gridsearch":
            gridsearch(la, case, loss=broken)
        else:
            la.optimize_prior_precision(init_prior_prec=-1.0)
    assert_close(la.prior_precision, priors(case)["layerwise"])
    assert_close(la(case.x_test), expected)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"method": "gridsearch"}, "val_loader"),
        ({"method": "magic"}, "(?s)magic"),
        ({"pred_type": "linear"}, "linear"),
        ({"prior_structure": "blockwise"}, "blockwise"),
    ],
)
def test_invalid_tuning_arguments(kwargs, match):
    """Each wrong argument is named."""
    la = fit(make(CLASSIFICATION))
    with pytest.raises(ValueError, match=match):
        la.optimize_prior_precision(**kwargs)


def test_verbose_and_progress_bar(capsys):
    """`verbose` prints the prior, `progress_bar` shows one."""
    case = make(CLASSIFICATION)
    la = fit(case)
    gridsearch(la, case, verbose=True, progress_bar=True)
    out = capsys.readouterr()
    assert "prior precision" in out.out.lower()
    assert "9/9" in out.err
    la.optimize_prior_precision(n_steps=7, verbose=True, progress_bar=True)
    out = capsys.readouterr()
    assert "prior precision" in out.out.lower()
    assert "7/7" in out.err
    gridsearch(la, case)
    out = capsys.readouterr()
    assert out.out == out.err == ""


def test_gridsearch_does_not_depend_on_batches():
    """The validation loader's batch size does not change the choice."""
    case = make(CLASSIFICATION)
    la = fit(case)
    first = gridsearch(la, case).clone()
    other = gridsearch(la, case, val_loader=validation(case, 9))
    assert_close(other, first)


def test_tuning_an_unfitted():
    """Tuning before fitting says so."""
    case = make(CLASSIFICATION)
    la = ELLALaplace(case.model, "classification")
    with pytest.raises(AttributeError, match=r"fit\("):
        la.optimize_prior_precision()
