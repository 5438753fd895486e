"""Checkpoints of posteriors: plain, small, safe to load, refused elsewhere."""

import copy
import functools
import operator
import pickle

import numpy as np
import pytest
import torch
from laplace import Laplace

from laplace_ella import ELLALaplace, ELLALLLaplace
from laplace_ella.support.batches import tensors_of
from tests.cases import make, mlp, priors
from tests.fitting import assert_close, build, fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")

REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"
both = pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])
flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])


def roundtrip(la, path, **kwargs):
    torch.save(la.state_dict(), path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True, **kwargs)


def described(la):
    """Every setting and result of a posterior, as comparable values."""
    names = ("temperature", "softmax_temperature", "top_outputs", "complement", "rank")
    names += ("evidence", "enable_backprop", "seed", "n_data", "n_outputs", "history")
    tensors = ("prior_precision", "prior_mean", "sigma_noise", "mean", "H", "loss")
    values = {name: getattr(la, name) for name in (*names, "link_approx")}
    return values | {
        n: torch.as_tensor(getattr(la, n)).flatten().tolist() for n in tensors
    }


@flavours
@both
@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
def test_a_loaded_posterior_is_the_saved_one(cls, name, structure, tmp_path):
    case, g = make(name), torch.Generator()
    la = fit(case, cls, temperature=1.3, prior_mean=0.2, complement="prior")
    la.optimize_prior_precision(n_steps=5, prior_structure=structure)
    if name == REGRESSION:
        la.sigma_noise = 0.9
    else:
        la.softmax_temperature, la.top_outputs = 2.3, 2
    loaded = cls(case.model, case.likelihood, seed=5, n_eigenvalues=3)
    loaded.load_state_dict(roundtrip(la, tmp_path, map_location="cpu"))
    assert described(loaded) == described(la)
    exact = {"rtol": 0, "atol": 0}
    for options in ({}, {"link_approx": "mc"}, {"pred_type": "nn", "n_samples": 9}):
        expected = la(case.x_test, generator=g.manual_seed(0), **options)
        found = loaded(case.x_test, generator=g.manual_seed(0), **options)
        torch.testing.assert_close(found, expected, **exact)
    first = la.sample(3, generator=g.manual_seed(0))
    assert torch.equal(loaded.sample(3, generator=g.manual_seed(0)), first)
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    for posterior in (la, loaded):
        posterior.optimize_prior_precision(n_steps=5)
        posterior.fit(case.loader(), override=False)
    assert described(loaded) == described(la)


def test_the_file_is_small_and_stays_as_it_is():
    """It grows with (P + N·C)·K, holds no weights, and no later fit changes it."""
    case = make(CLASSIFICATION)
    la = fit(case, n_eigenvalues=2)
    state = la.state_dict()
    weights = {p.detach().numpy().tobytes() for p in case.model.parameters()}
    tensors = list(tensors_of(state))
    assert not any(t.numpy().tobytes() in weights for t in tensors)
    rows = len(case.y) * 3 * (la.rank + 2)  # features, outputs, targets
    assert sum(t.numel() for t in tensors) <= la.n_params * (la.rank + 1) + rows + 100
    before = copy.deepcopy(state)
    la.fit(case.loader(), override=False)
    la.prior_precision = 9.0
    assert str(state["settings"]) == str(before["settings"])
    H, H_before = (s["fit"]["sums"]["H"] for s in (state, before))
    assert torch.equal(H, H_before)


def another_width(case, cls):
    case.model = mlp(3, 9, 3).double()
    return build(case, cls)


def other_weights(case, cls):
    list(case.model.parameters())[-1].data.add_(1e-3)
    return build(case, cls)


def another_forward(case, cls):
    class Doubled(type(case.model)):
        def forward(self, x):
            return 2 * super().forward(x)

    case.model.__class__ = Doubled
    return build(case, cls)


REFUSED = {
    "shape": (another_width, r"(?s)another model.*0\.weight"),
    "weights": (other_weights, r"(?s)another model"),
    "forward": (another_forward, r"(?s)another model.*output"),
    "likelihood": (
        lambda case, cls: cls(case.model, "classification"),
        r"(?s)regression.*classification",
    ),
    "class": (
        lambda case, cls: build(
            case, {ELLALaplace, ELLALLLaplace}.difference({cls}).pop()
        ),
        r"(?s)ELLA.*Laplace.*ELLA.*Laplace.*subset_of_weights",
    ),
}


@flavours
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_where_it_does_not_belong(cls, kind):
    case = make(REGRESSION)
    state = fit(case, cls).state_dict()
    other, match = REFUSED[kind]
    la = other(case, cls)
    with pytest.raises(ValueError, match=match):
        la.load_state_dict(state)
    assert la.fitted is None


def test_refused_for_other_parameters_and_classes():
    case = make(REGRESSION)
    state = fit(case).state_dict()
    full = Laplace(case.model, "regression", "all", "full")
    full.fit(case.loader())
    with pytest.raises(ValueError, match=r"FullLaplace|state_dict"):
        build(case).load_state_dict(full.state_dict())
    with pytest.raises(ValueError):
        full.load_state_dict(state)
    next(case.model.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad"):
        build(case).load_state_dict(state)


@flavours
@pytest.mark.parametrize(
    "path",
    ["fit sums H", "fit basis directions", "settings", "fit sums", "fit history"],
)
def test_damage_changes_nothing(cls, path):
    """A value that is missing or another one: all is taken over, or nothing."""
    case = make(REGRESSION)
    la, other = fit(case, cls), fit(case, cls, prior_precision=5.0, seed=3)
    before, predictions = described(la), la(case.x_test)
    for state in (other.state_dict(), other.state_dict()):
        *folders, name = path.split()
        part = functools.reduce(operator.getitem, folders, state)
        if isinstance(part[name], torch.Tensor):
            part[name] = part[name] * (1 + 1e-6)
        else:
            del part[name]
        with pytest.raises((ValueError, KeyError)):
            la.load_state_dict(state)
        assert described(la) == before
        assert torch.equal(la(case.x_test)[1], predictions[1])
    with pytest.raises(ValueError, match=r"state_dict\(\) of a fitted posterior"):
        la.load_state_dict({"weights": 3})


def test_last_layer_name():
    """The last layer found at fit is found again; another name is refused. A prior that
    was set before stays."""
    case = make(REGRESSION)
    la = build(case, ELLALLLaplace)
    la.prior_precision = 5.0
    la.fit(case.loader())
    assert float(la.prior_precision) == 5
    loaded = ELLALLLaplace(case.model, "regression", last_layer_name="2")
    loaded.load_state_dict(la.state_dict())
    assert_close(loaded(case.x_test)[1], la(case.x_test)[1])
    other = ELLALLLaplace(case.model, "regression", last_layer_name="0")
    with pytest.raises(ValueError, match=r"(?s)'2'.*'0'"):
        other.load_state_dict(la.state_dict())


@flavours
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_copies_of_a_fitted_object(cls, complement, tmp_path):
    case = make(CLASSIFICATION)
    la = fit(case, cls, complement=complement, prior_precision=priors(case)["scalar"])
    la.sample(2)
    expected = la(case.x_test)
    torch.save(la, tmp_path / "la.pt")
    for other in (
        copy.deepcopy(la),
        pickle.loads(pickle.dumps(la)),
        torch.load(tmp_path / "la.pt", weights_only=False),
    ):
        assert torch.equal(other(case.x_test), expected)
        other.model[0].weight.data.zero_()
        assert torch.equal(la(case.x_test), expected)
        other.fit(case.loader())


@flavours
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_a_model_that_changes_its_dtype_after_the_fit(cls, complement):
    """A fit in single precision serves the model in double precision."""
    case = make(CLASSIFICATION)
    case.model.float()
    case.x = case.x.float()
    la = fit(case, cls, complement=complement)
    expected = la(case.x_test.float())
    case.model.double()
    case.x = case.x.double()
    assert_close(la(case.x_test).double(), expected.double(), rtol=1e-4, atol=1e-5)
    la.optimize_prior_precision(n_steps=2)
    la.optimize_temperature(case.loader())
    la.fit(case.loader(), override=False)
    assert la.n_data == 24


@flavours
def test_settings_from_numpy(cls):
    case = make(REGRESSION)
    for value in (np.float32(2), np.int64(2), np.array(2.0), 2 * np.ones(1)):
        names = ("prior_precision", "temperature", "sigma_noise", "prior_mean")
        la = fit(case, cls, **dict.fromkeys(names, value))
        for name in names:
            setattr(la, name, value)
            assert float(getattr(la, name)) == 2
        classifier = build(make(CLASSIFICATION), cls, softmax_temperature=value)
        assert classifier.softmax_temperature == 2
        assert isinstance(classifier.softmax_temperature, float)
    la.prior_precision = np.linspace(1, 2, la.n_params)
    la.prior_mean = np.linspace(1, 2, la.n_params)
    other = build(case, cls)
    other.load_state_dict(la.state_dict())
    assert_close(other(case.x_test)[1], la(case.x_test)[1])
    assert other.log_marginal_likelihood() == la.log_marginal_likelihood()
