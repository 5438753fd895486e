"""Checkpoints: plain, small, safe to load, and refused where they do not belong."""

import copy

import pytest
import torch
from laplace import Laplace

from laplace_ella import ELLALaplace, ELLALLLaplace
from tests.cases import DictModel, make, mapping_loader, mlp, priors
from tests.fitting import assert_close, build, fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.RankWarning")

REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"
both = pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])
flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])


def roundtrip(la, path, **kwargs):
    torch.save(la.state_dict(), path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True, **kwargs)


@flavours
@both
def test_plain_types(cls, name, tmp_path):
    """Values are tensors, numbers, strings, lists of them or None, never mappings."""
    state = roundtrip(fit(make(name), cls), tmp_path)
    assert type(state) is dict
    for key, value in state.items():
        assert type(key) is str
        assert value is None or type(value) in (
            torch.Tensor,
            int,
            float,
            bool,
            str,
            list,
            tuple,
        ), key


@flavours
@both
def test_predictions_are_identical(cls, name, tmp_path):
    """A loaded posterior predicts, samples and scores exactly as the saved one."""
    case = make(name)
    la = fit(case, cls, temperature=1.3, prior_mean=0.2)
    la.optimize_prior_precision(n_steps=5)
    if name == REGRESSION:
        la.sigma_noise = 0.9
    loaded = build(case, cls)
    loaded.load_state_dict(roundtrip(la, tmp_path))
    exact = {"rtol": 0, "atol": 0}
    x = case.x_test
    torch.testing.assert_close(loaded(x), la(x), **exact)
    mc = {"link_approx": "mc", "n_samples": 9}
    torch.testing.assert_close(loaded(x, **mc), la(x, **mc), **exact)
    nn = {"pred_type": "nn"} | mc
    torch.testing.assert_close(loaded(x, **nn), la(x, **nn), **exact)
    g = torch.Generator()
    first = la.sample(3, generator=g.manual_seed(0))
    torch.testing.assert_close(
        loaded.sample(3, generator=g.manual_seed(0)), first, **exact
    )
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    for name in ("n_data", "n_outputs", "rank", "temperature"):
        assert getattr(loaded, name) == getattr(la, name)
    for name in ("prior_precision", "prior_mean", "sigma_noise", "mean", "H"):
        a, b = getattr(loaded, name), getattr(la, name)
        torch.testing.assert_close(a.flatten(), b.flatten(), **exact)


@pytest.mark.parametrize("structure", ["layerwise", "diag"])
def test_structured_priors(structure, tmp_path):
    """Layerwise and diagonal priors survive."""
    case = make(REGRESSION)
    la = fit(case, prior_precision=priors(case)[structure])
    loaded = build(case)
    loaded.load_state_dict(roundtrip(la, tmp_path))
    assert_close(loaded.prior_precision, priors(case)[structure])
    assert_close(loaded.log_marginal_likelihood(), la.log_marginal_likelihood())


@flavours
def test_no_copy_of_the_model(cls, tmp_path):
    """No weights inside: the checkpoint grows with P·K, not with the model."""
    case = make(CLASSIFICATION)
    la = fit(case, cls, n_eigenvalues=2)
    state = roundtrip(la, tmp_path)
    weights = {p.detach().numpy().tobytes() for p in case.model.parameters()}
    total = 0
    for value in state.values():
        if isinstance(value, torch.Tensor):
            total += value.numel()
            assert value.numpy().tobytes() not in weights
    assert total <= la.n_params * (la.rank + 1) + 100


def test_does_not_change_after_saving():
    """A state dict is a snapshot: refitting later does not change it."""
    case = make(CLASSIFICATION)
    la = fit(case)
    state = la.state_dict()
    H, prior = state["H"].clone(), state["prior_precision"].clone()
    la.fit(case.loader(), override=False)
    la.prior_precision = 9.0
    assert_close(state["H"], H)
    assert_close(state["prior_precision"], prior)


@flavours
@both
def test_refuses_another_model(cls, name):
    """Another architecture or other weights are refused, naming what differs."""
    case = make(name)
    state = fit(case, cls).state_dict()
    other = make(name)
    other.model = mlp(3, 9, 3).double()
    with pytest.raises(ValueError, match=r"(?i)model|parameter"):
        build(other, cls).load_state_dict(state)
    other.model = copy.deepcopy(case.model)
    with torch.no_grad():
        list(other.model.parameters())[-1].add_(1e-3)
    with pytest.raises(ValueError, match=r"(?i)weights|values|differ"):
        build(other, cls).load_state_dict(state)


def test_names_the_parameter_that_differs():
    """The message names the first parameter whose shape is another."""
    case = make(REGRESSION)
    state = fit(case).state_dict()
    case.model = mlp(3, 9, 3).double()
    with pytest.raises(ValueError, match=r"0\.weight"):
        build(case).load_state_dict(state)


def test_refuses_other_frozen_parameters():
    """The same model with another set of trainable parameters is refused."""
    case = make(CLASSIFICATION)
    state = fit(case).state_dict()
    next(case.model.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match=r"(?i)requires_grad|trainable|parameters"):
        build(case).load_state_dict(state)


def test_refuses_another_likelihood():
    """The message has both likelihoods."""
    case = make(REGRESSION)
    state = fit(case).state_dict()
    la = ELLALaplace(case.model, "classification")
    with pytest.raises(ValueError, match=r"(?s)regression.*classification"):
        la.load_state_dict(state)


@pytest.mark.parametrize(
    "pair", [(ELLALaplace, ELLALLLaplace), (ELLALLLaplace, ELLALaplace)]
)
def test_refuses_another_class(pair):
    """The message has both classes."""
    case = make(REGRESSION)
    state = fit(case, pair[0]).state_dict()
    names = rf"(?s)\b{pair[0].__name__}\b.*\b{pair[1].__name__}\b"
    with pytest.raises(ValueError, match=names):
        build(case, pair[1]).load_state_dict(state)


def test_refuses_checkpoints_of_laplace_torch():
    """A checkpoint of another member of the family is refused by its class name."""
    case = make(REGRESSION)
    full = Laplace(case.model, "regression", "all", "full")
    full.fit(case.loader())
    with pytest.raises(ValueError, match="FullLaplace"):
        build(case).load_state_dict(full.state_dict())
    with pytest.raises(ValueError):
        full.load_state_dict(fit(case).state_dict())


def test_a_refused_checkpoint_changes_nothing():
    """After a refusal the object is what it was."""
    case = make(CLASSIFICATION)
    la = fit(case)
    expected = la(case.x_test)
    state = fit(make(REGRESSION)).state_dict()
    with pytest.raises(ValueError):
        la.load_state_dict(state)
    assert_close(la(case.x_test), expected)


@both
def test_online_fit_after_loading(name, tmp_path):
    """`override=False` goes on with the loaded basis."""
    case = make(name)
    la = fit(case)
    loaded = build(case)
    loaded.load_state_dict(roundtrip(la, tmp_path))
    loaded.fit(case.loader(), override=False)
    assert_close(loaded.H, 2 * la.H)
    assert loaded.n_data == 2 * la.n_data
    assert_close(loaded.basis.vectors, la.basis.vectors, rtol=0, atol=0)


def test_tuning_after_loading(tmp_path):
    """Tuning a loaded posterior gives what tuning the saved one gives."""
    case = make(CLASSIFICATION)
    la = fit(case)
    loaded = build(case)
    loaded.load_state_dict(roundtrip(la, tmp_path))
    for posterior in (la, loaded):
        posterior.optimize_prior_precision(prior_structure="layerwise", n_steps=10)
    assert_close(loaded.prior_precision, la.prior_precision, rtol=0, atol=0)


def test_unfitted():
    """There is nothing to save before fitting."""
    with pytest.raises(AttributeError, match=r"fit\("):
        build(make(CLASSIFICATION)).state_dict()


def test_last_layer_name():
    """The last layer found at fit is found again; another name is refused."""
    case = make(REGRESSION)
    la = fit(case, ELLALLLaplace)
    loaded = ELLALLLaplace(case.model, "regression", last_layer_name="2")
    loaded.load_state_dict(la.state_dict())
    assert_close(loaded(case.x_test)[1], la(case.x_test)[1])
    other = ELLALLLaplace(case.model, "regression", last_layer_name="0")
    with pytest.raises(ValueError, match=r"(?s)2.*0"):
        other.load_state_dict(la.state_dict())


def test_mapping_model(tmp_path):
    """A model that takes mappings: nothing of the data is in the checkpoint."""
    case = make(CLASSIFICATION)
    case.model = DictModel(case.model)
    la = fit(case, loader=mapping_loader(case.x, case.y))
    loaded = build(case)
    loaded.load_state_dict(roundtrip(la, tmp_path))
    query = {"input_ids": case.x_test}
    assert_close(loaded(query), la(query), rtol=0, atol=0)


def test_moves_to_the_device_of_the_model(tmp_path):
    """Loaded tensors go to the device of the model, whatever `map_location` was."""
    case = make(REGRESSION)
    la = fit(case)
    loaded = build(case)
    loaded.load_state_dict(roundtrip(la, tmp_path, map_location="cpu"))
    assert loaded.H.device == la.H.device
    assert loaded(case.x_test)[1].device == case.x_test.device


def test_constructor_options_may_differ():
    """K, M and seed of the receiving object give way to those of the checkpoint."""
    case = make(CLASSIFICATION)
    la = fit(case, n_eigenvalues=4)
    loaded = ELLALaplace(case.model, "classification")
    loaded.load_state_dict(la.state_dict())
    assert loaded.rank == 4
    mc = {"link_approx": "mc", "n_samples": 9}
    assert_close(loaded(case.x_test, **mc), la(case.x_test, **mc), rtol=0, atol=0)
