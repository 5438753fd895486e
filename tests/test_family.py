"""What every member of the Laplace family does, ours do: calls, shapes and names."""

import subprocess
import sys

import pytest
import torch
from laplace import FullLaplace, Laplace
from laplace.utils.enums import Likelihood, LinkApprox, PredType, SubsetOfWeights
from torch.distributions import Categorical, Normal

from laplace_ella import ComputeOptions, ELLALaplace, ELLALLLaplace, register_structure
from tests import dense
from tests.cases import (
    Batch,
    Case,
    DictModel,
    RewardModel,
    make,
    mapping_loader,
    mlp,
)
from tests.fitting import assert_close, build, fit

REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"
both = pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])
flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")


def test_laplace_builds_our_classes():
    model = mlp(3, 4, 2)
    for subset, cls in (("all", ELLALaplace), ("last_layer", ELLALLLaplace)):
        for name in (subset, SubsetOfWeights(subset)):
            la = Laplace(model, Likelihood.REGRESSION, name, "nystrom")
            assert type(la) is cls
            options = {"subset_of_weights": name, "hessian_structure": "nystrom"}
            assert Laplace(model, "classification", seed=7, **options).seed == 7
    default = Laplace(model, "classification", hessian_structure="nystrom")
    assert type(default) is ELLALLLaplace
    for combination in (("all", "nystroem"), ("subnetwork", "nystrom")):
        with pytest.raises((ValueError, KeyError)):
            Laplace(model, "classification", *combination)


IMPORT = """
import random, warnings
warnings.simplefilter("ignore")
import numpy as np, torch, laplace
from laplace.laplace import _all_subclasses as subclasses

def keys():
    found = (c for c in subclasses(laplace.BaseLaplace) if hasattr(c, "_key"))
    return {c._key: c.__name__ for c in found}

def state():
    return (torch.get_rng_state().sum().item(), random.getstate(),
            np.random.get_state()[1].sum(), torch.get_default_dtype(),
            torch.get_num_threads())

before, found = state(), keys()
import laplace_ella
assert state() == before
added = keys()
assert {k: added[k] for k in found} == found, (found, added)
names = {name for _, name in added.keys() - found.keys()}
assert names == {"nystrom", "ella"}, names
"""


def test_import_changes_nothing_else():
    run = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("subset", "cls"), [("all", ELLALaplace), ("last_layer", ELLALLLaplace)]
)
def test_a_registered_name_stands_for_settings(subset, cls):
    """What is given goes first, by name or by place; the class is the one known."""
    name = register_structure("mine", n_eigenvalues=4, seed=7, prior_precision=2.0)
    case = make(CLASSIFICATION)
    la = Laplace(case.model, "classification", subset, name, seed=8)
    assert isinstance(la, cls)
    assert (la.n_eigenvalues, la.seed) == (4, 8)
    la = Laplace(case.model, "classification", subset, name, 1.0, 3.0)
    la.fit(case.loader())
    assert float(la.prior_precision) == 3.0
    plain = cls(case.model, "classification", n_eigenvalues=4, seed=7)
    plain.load_state_dict(la.state_dict())
    assert torch.equal(plain(case.x), la(case.x))
    register_structure(name, n_eigenvalues=5)
    la = Laplace(case.model, "classification", subset, name)
    assert (la.n_eigenvalues, la.seed) == (5, 1234)
    assert type(Laplace(case.model, "classification", subset, "nystrom")) is cls
    for taken in ("nystrom", "kron", "", 3):
        with pytest.raises(ValueError, match="name must be a text other than"):
            register_structure(taken, n_eigenvalues=4)
    with pytest.raises(TypeError, match=r"no argument 'rank'"):
        register_structure("other", rank=4)


def test_positional_order_is_that_of_the_base():
    la = ELLALaplace(mlp(3, 4, 2), "regression", 0.3, 2.0, 0.5, 1.5, True, "x", "y")
    found = la.sigma_noise, la.prior_precision, la.prior_mean, la.temperature
    assert tuple(map(float, found)) == pytest.approx((0.3, 2.0, 0.5, 1.5))
    assert (la.enable_backprop, la.dict_key_x, la.dict_key_y) == (True, "x", "y")


SETTINGS = {
    "prior_precision": 5.0,
    "prior_mean": 0.5,
    "sigma_noise": 2.0,
    "temperature": 3.0,
}


@flavours
@pytest.mark.parametrize("attribute", SETTINGS)
def test_changes_take_effect_at_once(cls, attribute):
    """A change after the fit gives what fitting with that value gives, by K×K work."""
    case = make(REGRESSION)
    la, before = fit(case, cls), fit(case, cls)(case.x_test)[1]
    la(case.x_test), la.log_marginal_likelihood(), la.posterior_covariance
    setattr(la, attribute, SETTINGS[attribute])
    other = fit(case, cls, **{attribute: SETTINGS[attribute]})
    assert_close(la(case.x_test)[1], other(case.x_test)[1])
    assert torch.allclose(la(case.x_test)[1], before) == (attribute == "prior_mean")
    forward, case.model.forward = case.model.forward, None  # would raise if called
    assert_close(la.posterior_precision, other.posterior_precision)
    assert_close(la.posterior_covariance, other.posterior_covariance)
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    case.model.forward = forward


@flavours
@both
def test_log_likelihood_and_evidence(cls, name):
    case = make(name)
    la = fit(case, cls, prior_precision=0.7)
    f = case.model(case.x).detach()
    if name == REGRESSION:
        assert_close(la.log_likelihood, Normal(f, 0.4).log_prob(case.y).sum())
        la.log_marginal_likelihood(torch.tensor([2.5]), torch.tensor(0.9))
        assert_close(la.log_likelihood, Normal(f, 0.9).log_prob(case.y).sum(), 1e-6)
        assert la.prior_precision.item() == pytest.approx(2.5)
    else:
        expected = Categorical(logits=f).log_prob(case.y).sum()
        assert_close(la.log_likelihood, expected)
        with pytest.raises(ValueError, match="regression"):
            la.log_marginal_likelihood(sigma_noise=torch.tensor(2.0))
    parts = la.log_likelihood - 0.5 * (la.log_det_ratio + la.scatter)
    assert_close(la.log_marginal_likelihood(), parts)


PREDICTIONS = [
    {},
    {"joint": True},
    {"pred_type": PredType.GLM, "diagonal_output": True},
    {"link_approx": LinkApprox.MC, "n_samples": 5},
    {"link_approx": "bridge"},
    {"link_approx": "bridge_norm"},
    {"pred_type": "nn", "link_approx": "mc", "n_samples": 5},
]


@flavours
@both
@pytest.mark.parametrize("options", PREDICTIONS, ids=str)
def test_shapes_are_those_of_full_laplace(cls, name, options):
    """Of seven inputs and of none; probabilities sum to one."""
    case = make(name)
    full = FullLaplace(case.model, case.likelihood)
    full.fit(case.loader())
    for complement in ("drop", "prior"):
        la = fit(case, cls, complement=complement)
        for x in (case.x_test, case.x_test[:0]):
            theirs, found = full(x, **options), la(x, **options)
            if isinstance(theirs, torch.Tensor):
                assert_close(found.sum(-1), torch.ones(len(x)).double())
                theirs, found = (theirs,), (found,)
            assert [t.shape for t in found] == [t.shape for t in theirs]
            assert [t.dtype for t in found] == [t.dtype for t in theirs]
            samples = la.functional_samples(x, n_samples=4)
            assert samples.shape == (4, len(x), 3)


def test_nn_predictive():
    """The network at sampled weights, by one generator; at a tight posterior MAP."""
    case, g = make(REGRESSION), torch.Generator()
    la = fit(case, prior_precision=2.0)
    named = dict(case.model.named_parameters())
    options = {"pred_type": "nn", "n_samples": 6}
    g.manual_seed(3)
    samples = la.functional_samples(case.x_test, generator=g, **options)
    g.manual_seed(3)
    for sample in samples:
        parts = la.sample(1, generator=g)[0].split([p.numel() for p in case.params])
        given = zip(named.items(), parts, strict=True)
        given = {name: part.view_as(p) for (name, p), part in given}
        output = torch.func.functional_call(case.model, given, case.x_test)
        assert_close(sample, output.detach())
    mean, var = la(case.x_test, generator=g.manual_seed(3), **options)
    assert_close(mean, samples.mean(0))
    assert_close(var, samples.var(0))
    assert samples.shape == (6, 7, 3)
    la.prior_precision = 1e10
    assert_close(la(case.x_test, "nn")[0], case.model(case.x_test).detach(), 0, 1e-3)


@flavours
@both
@pytest.mark.parametrize("pred_type", ["glm", "gp", "nn"])
def test_samples(cls, name, pred_type):
    case, g = make(name), torch.Generator()
    la = fit(case, cls)
    options = {"pred_type": pred_type, "n_samples": 9}
    f = la.functional_samples(case.x_test, generator=g.manual_seed(1), **options)
    p = la.predictive_samples(case.x_test, generator=g.manual_seed(1), **options)
    assert f.shape == p.shape == (9, 7, 3)
    assert_close(p, f.softmax(-1) if case.likelihood == "classification" else f)


DRAWS = {
    "mc": lambda la, x, g: la(x, link_approx="mc", n_samples=7, generator=g),
    "nn": lambda la, x, g: la(x, "nn", n_samples=7, generator=g),
    "sample": lambda la, x, g: la.sample(7, generator=g),
    "functional": lambda la, x, g: la.functional_samples(x, n_samples=7, generator=g),
    "joint": lambda la, x, g: la.functional_samples(
        x, n_samples=7, generator=g, joint=True
    ),
    "predictive": lambda la, x, g: la.predictive_samples(x, n_samples=7, generator=g),
}


@flavours
@pytest.mark.parametrize("draw", DRAWS)
def test_generators(cls, draw):
    """The generator decides the draws and advances; without one predictions repeat."""
    case, g = make(CLASSIFICATION), torch.Generator()
    la = fit(case, cls)
    first = DRAWS[draw](la, case.x_test, g.manual_seed(1))
    assert not torch.equal(first, DRAWS[draw](la, case.x_test, g))
    assert torch.equal(first, DRAWS[draw](la, case.x_test, g.manual_seed(1)))
    state = torch.get_rng_state()
    unseeded = DRAWS[draw](la, case.x_test, None)
    again = DRAWS[draw](la, case.x_test, None)
    assert torch.equal(unseeded, again) == (draw in ("mc", "nn"))
    assert torch.equal(torch.get_rng_state(), state)


@flavours
@pytest.mark.parametrize("keys", [("input_ids", "labels"), ("x", "target")])
@both
def test_mapping_inputs(cls, keys, name):
    case = make(name)
    expected = fit(case, cls)(case.x_test)
    case.model = DictModel(case.model, keys[0])
    for mapping in (dict, Batch):
        data = mapping_loader(case.x, case.y, *keys, cls=mapping)
        la = fit(case, cls, loader=data, dict_key_x=keys[0], dict_key_y=keys[1])
        query = mapping({keys[0]: case.x_test})
        torch.testing.assert_close(la(query), expected, rtol=1e-7, atol=1e-9)
        samples = la.predictive_samples(query, pred_type="nn", n_samples=3)
        assert samples.shape == (3, 7, 3)
        assert list(query) == [keys[0]]
        loaded = build(case, cls, dict_key_x=keys[0])
        loaded.load_state_dict(la.state_dict())
        assert_close(loaded(query), la(query))
    la.optimize_prior_precision(method="gridsearch", val_loader=data, grid_size=2)


OUT_DTYPE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}


@flavours
@pytest.mark.parametrize("dtype", OUT_DTYPE, ids=str)
@both
def test_dtypes(cls, dtype, name):
    """The algebra stays in float32 or better; outputs in the model's, at least that."""
    case = make(name)
    expected = fit(case, cls, prior_precision=3.0).predictive_moments(case.x_test)
    case.model.to(dtype)
    case.x, case.x_test = case.x.to(dtype), case.x_test.to(dtype)
    if case.y.is_floating_point():
        case.y = case.y.to(dtype)
    la = fit(case, cls, prior_precision=3.0)
    assert la.H.dtype == torch.float64
    for a, b in zip(la.predictive_moments(case.x_test), expected, strict=True):
        assert a.dtype == torch.float32
        atol = OUT_DTYPE[dtype] * b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=atol)
    la.optimize_prior_precision(n_steps=3)
    la.optimize_temperature(case.loader())
    for pred_type in ("glm", "nn"):
        out = la(case.x_test, pred_type, n_samples=5)
        for tensor in out if isinstance(out, tuple) else (out,):
            assert torch.isfinite(tensor).all()


@flavours
@pytest.mark.parametrize("options", [*PREDICTIONS[:3], {"link_approx": "mc"}], ids=str)
@both
def test_backprop(cls, name, options):
    """Gradients of predictions in the input by finite differences, and no graph where
    nobody asked for one."""
    case = make(name)
    la = fit(case, cls, enable_backprop=True)
    x = case.x_test[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: la(x, **options), (x,))
    with torch.no_grad():
        assert not any(t.requires_grad for t in la.features(x))
    la.enable_backprop = False
    for out in (la.predictive_moments(x), la.features(x)):
        assert not any(t.requires_grad for t in out)


@pytest.mark.parametrize("mode", ["forward", "reverse", "double_vjp"])
def test_backprop_of_samples_by_every_mode(mode):
    case, g = make("regression_1"), torch.Generator()
    la = fit(case, enable_backprop=True, compute=ComputeOptions(feature_mode=mode))
    x = case.x_test[:2].clone().requires_grad_()
    how = {"n_samples": 3, "joint": True}
    assert torch.autograd.gradcheck(
        lambda x: la.functional_samples(x, generator=g.manual_seed(0), **how), (x,)
    )


def test_reward_modeling():
    """Fitted as a classifier of pairs, asked as a regression of single inputs."""
    model = RewardModel(mlp(3, 4, 1)).double().eval()
    x, y = torch.randn(9, 2, 3).double(), torch.randint(2, (9,))
    case = Case(model, "reward_modeling", x, y, torch.randn(7, 3).double())
    la = fit(case, prior_precision=0.6)
    as_classifier = Case(model, "classification", x, y, case.x_test)
    expected = dense.Reference(as_classifier, la.basis.directions.T)
    assert_close(la.H, expected.H)
    assert_close(la.log_marginal_likelihood(), expected.evidence(0.6))
    f, f_var = expected.predict(case.x_test, 0.6)
    for ours, theirs in zip(la(case.x_test), (f, f_var), strict=True):
        assert_close(ours, theirs)
    probs = la(x[:4], fitting=True)
    assert_close(probs, dense.probit(*expected.predict(x[:4], 0.6)))
    la.optimize_prior_precision(n_steps=5)
    la.optimize_prior_precision(
        method="gridsearch", val_loader=case.loader(), grid_size=5
    )
