"""Fit, tuning and every predictive path on a GPU: a fake one, and a real one if any.

Every tensor that comes out is on the device of the model, nothing mixes devices on the
way, and the numbers are those of the CPU.
"""

import contextlib
import copy
from collections import namedtuple

import pytest
import torch

from laplace_ella import ComputeOptions, ELLALaplace, ELLALLLaplace, decompose
from tests.cases import RewardModel, make, mlp, priors
from tests.fake_cuda import FakeCuda, fake, module_to_cuda
from tests.fitting import fit as fit_case

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")

flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])


def fit(case, cls=ELLALaplace, **kwargs):
    """A rank that divides by C: last-layer eigenvalues come in groups of C."""
    return fit_case(case, cls, **({"n_eigenvalues": 12} | kwargs))


Device = namedtuple("Device", ["context", "module", "tensor"])
FAKE = Device(FakeCuda, module_to_cuda, fake)
REAL = Device(contextlib.nullcontext, torch.nn.Module.cuda, torch.Tensor.cuda)


@pytest.fixture(params=[FAKE, pytest.param(REAL, marks=pytest.mark.cuda)])
def device(request):
    return request.param


def on_device(case, device):
    """A copy of a case with model and queries on the device, data on the host."""
    case = copy.copy(case)
    case.model = device.module(copy.deepcopy(case.model))
    case.x_test = device.tensor(case.x_test)
    return case


def leaves(out):
    return out if isinstance(out, (tuple, list)) else (out,)


def assert_matches(out, expected, atol=1e-9):
    for a, b in zip(leaves(out), leaves(expected), strict=True):
        assert a.device.type == "cuda"
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=atol)


MC = {"link_approx": "mc", "n_samples": 4}
PREDICTIONS = (
    {},
    {"pred_type": "gp"},
    {"joint": True},
    {"diagonal_output": True},
    {"link_approx": "bridge"},
    {"link_approx": "bridge_norm"},
)
SAMPLED = (
    lambda la, x: la(x, **MC),
    lambda la, x: la(x, diagonal_output=True, **MC),
    lambda la, x: la(x, pred_type="nn", **MC),
    lambda la, x: la.sample(4),
    lambda la, x: la.functional_samples(x, n_samples=4),
    lambda la, x: la.functional_samples(x, n_samples=4, joint=True),
    lambda la, x: la.functional_samples(x, n_samples=4, diagonal_output=True),
    lambda la, x: la.functional_samples(x, n_samples=4, pred_type="nn"),
    lambda la, x: la.predictive_samples(x, n_samples=4),
)
NAMES = pytest.mark.parametrize(
    "name", ["regression_3", "classification_mlp", "classification_cnn"]
)


@flavours
@NAMES
def test_fit(name, cls, device):
    """Fitting from host data: H, basis and mean are on the device, as on the CPU."""
    host = make(name)
    expected = fit(host, cls)
    with device.context():
        la = fit(on_device(host, device), cls)
        assert_matches((la.H.diagonal(),), (expected.H.diagonal(),))
        assert_matches((la.basis.eigenvalues,), (expected.basis.eigenvalues,), 1e-7)
        assert la.basis.vectors.device.type == "cuda"
        assert_matches((la.mean,), (expected.mean,))
        assert_matches(
            (la.log_marginal_likelihood(),), (expected.log_marginal_likelihood(),)
        )


@pytest.mark.parametrize("mode", ["forward", "reverse", "double_vjp"])
@pytest.mark.parametrize("backprop", [False, True])
def test_modes(mode, backprop, device):
    host = make("regression_3")
    compute = ComputeOptions(mode)
    expected = fit(host, compute=compute)(host.x_test)
    with device.context():
        case = on_device(host, device)
        la = fit(case, compute=compute, enable_backprop=backprop)
        x = case.x_test.detach().requires_grad_(backprop)
        out = la(x)
        if backprop:
            (grad,) = torch.autograd.grad(out[0].sum() + out[1].sum(), x)
            assert grad.device.type == "cuda"
            out = tuple(t.detach() for t in out)
        assert_matches(out, expected)


@flavours
@NAMES
def test_predictions(name, cls, device):
    """Every prediction, from queries on the device or on the host; sampled ones have
    the shape of the CPU's."""
    host = make(name)
    on_host = fit(host, cls)
    with device.context():
        case = on_device(host, device)
        la = fit(case, cls)
        for x in (case.x_test, host.x_test):
            for options in PREDICTIONS:
                expected = on_host(host.x_test, **options)
                assert_matches(la(x, **options), expected)
            for a, b in zip(la.features(x), on_host.features(host.x_test), strict=True):
                assert_matches(a.abs(), b.abs())  # directions are known up to a sign
        for call in SAMPLED:
            out, expected = call(la, case.x_test), call(on_host, host.x_test)
            for a, b in zip(leaves(out), leaves(expected), strict=True):
                assert a.device.type == "cuda"
                assert a.shape == b.shape
                assert torch.isfinite(a).all()


@flavours
def test_generator(cls, device):
    """A generator of the device is taken, one of the host is refused."""
    host = make("classification_mlp")
    with device.context():
        case = on_device(host, device)
        la = fit(case, cls)
        g = torch.Generator("cuda")
        draws = [la(case.x_test, generator=g.manual_seed(1), **MC) for _ in range(2)]
        assert torch.equal(draws[0].cpu(), draws[1].cpu())
        with pytest.raises(ValueError, match=r"(?s)cpu.*cuda"):
            la(case.x_test, generator=torch.Generator("cpu"), **MC)


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_marglik(name, structure, device):
    host = make(name)
    expected = fit(host)
    options = {"prior_structure": structure, "n_steps": 5}
    expected.optimize_prior_precision(**options)
    with device.context():
        la = fit(on_device(host, device))
        la.optimize_prior_precision(**options)
        assert_matches((la.prior_precision,), (expected.prior_precision,))
        la.prior_precision = priors(host)[structure]
        expected.prior_precision = priors(host)[structure]
        evidence = expected.log_marginal_likelihood()
        assert_matches((la.log_marginal_likelihood(),), (evidence,))


@pytest.mark.parametrize(
    "link",
    [
        {"link_approx": "probit"},
        {"link_approx": "bridge"},
        {"link_approx": "mc"},
        {"link_approx": "mc", "pred_type": "nn"},
    ],
)
def test_gridsearch(link, device):
    host = make("classification_mlp")
    options = {"method": "gridsearch", "grid_size": 3, "n_samples": 3, **link}
    with device.context():
        la = fit(on_device(host, device))
        la.optimize_prior_precision(val_loader=host.loader(), **options)
        assert la.prior_precision.device.type == "cuda"
        assert la.prior_precision.item() > 0


@pytest.mark.parametrize("options", [{"override": False}, {"balanced": True}])
def test_further_fits(options, device):
    """`override=False` adds data on the device; balanced sampling reads host labels."""
    host = make("classification_mlp")
    with device.context():
        la = fit(on_device(host, device))
        H = la.H.clone()
        la.fit(host.loader(), **options)
        assert la.H.device.type == la.basis.vectors.device.type == "cuda"
        if "override" in options:
            torch.testing.assert_close(la.H.cpu(), 2 * H.cpu())


@flavours
def test_checkpoints_move(cls, device):
    host = make("regression_3")
    on_host = fit(host, cls)
    expected = on_host(host.x_test)
    with device.context():
        case = on_device(host, device)
        la = cls(case.model, "regression")
        la.load_state_dict(on_host.state_dict())
        assert_matches(la(case.x_test), expected)
        back = cls(host.model, "regression")
        state = fit(case, cls).state_dict()
        back.load_state_dict(state)
    for a, b in zip(back(host.x_test), expected, strict=True):
        assert a.device.type == "cpu"
        torch.testing.assert_close(a, b)


def test_reward_modeling(device):
    torch.manual_seed(3)
    model = RewardModel(mlp(3, 4, 1)).double()
    case = make("classification_mlp")
    case.likelihood, case.model = "reward_modeling", model
    case.x, case.y = torch.randn(8, 2, 3).double(), torch.randint(2, (8,))
    expected = fit(case)(case.x_test)
    with device.context():
        moved = on_device(case, device)
        la = fit(moved)
        assert_matches(la(moved.x_test), expected)
        assert la(case.x, fitting=True).device.type == "cuda"


NOISES = {"sigma_noise": torch.tensor([0.5, 1.0, 2.0])}
TOKENS = {"output_layout": "channels_last"}
OBSERVED = {
    "tokens": ("classification", TOKENS),
    "labels": ("classification", {"multi_label": True}),
    "labels_of_tokens": (
        "classification",
        {**TOKENS, "multi_label": True, "stochastic": 2},
    ),
    "noises": ("regression", NOISES),
    "noises_of_tokens": ("regression", {**TOKENS, **NOISES, "complement": "prior"}),
    "named_parameters": ("classification", {"parameter_names": ["2.*"]}),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_targets_of_every_kind(name, device):
    torch.manual_seed(4)
    likelihood, kwargs = OBSERVED[name]
    host = make("classification_mlp")
    host.likelihood, host.model = likelihood, mlp(3, 4, 3).double()
    positions = (2,) if "output_layout" in kwargs else ()
    host.x = torch.randn(8, *positions, 3).double()
    host.x_test = torch.randn(2, *positions, 3).double()
    if likelihood == "regression":
        host.y = torch.randn(8, *positions, 3).double()
    elif kwargs.get("multi_label"):
        host.y = torch.randint(2, (8, *positions, 3))
    else:
        host.y = torch.randint(3, (8, *positions))
    if positions and not kwargs.get("multi_label") and likelihood != "regression":
        host.y[::2, 1] = -100
    expected = fit(host, **kwargs)
    with device.context():
        case = on_device(host, device)
        la = fit(case, **kwargs)
        if "stochastic" not in kwargs:  # another device draws other numbers
            assert_matches(la(case.x_test), expected(host.x_test))
            evidence = expected.log_marginal_likelihood()
            assert_matches((la.log_marginal_likelihood(),), (evidence,))
        parts = decompose(la, case.x_test, n_samples=4)
        assert parts.total.device.type == "cuda"
        assert parts.total.shape == decompose(expected, host.x_test, 4).total.shape
        samples = la.functional_samples(case.x_test, n_samples=2, joint=True)
        assert samples.device.type == "cuda"
        nn_prediction = la(case.x_test, pred_type="nn", **MC)
        assert leaves(nn_prediction)[0].shape == (2, *positions, 3)
        la.optimize_prior_precision(
            method="gridsearch", val_loader=host.loader(), grid_size=2
        )
        la.fit(host.loader(), override=False)
        la.fit(host.loader(), val_loader=host.loader(), early_stopping=True)
        if likelihood == "regression":
            la.optimize_sigma_noise(n_steps=2)
            assert la.sigma_noise.shape == (3,)
        la.load_state_dict(la.state_dict())
        assert la.H.device.type == la.sigma_noise.device.type == "cuda"


def test_the_fake_device_is_strict():
    with FakeCuda():
        a = torch.eye(3, device="cuda", requires_grad=True)
        assert a.device.type == "cuda"
        with pytest.raises(RuntimeError, match="same device"):
            a @ torch.eye(3)
        with pytest.raises(RuntimeError, match="same device"):
            torch.zeros(3, 3) + a.detach()
        with pytest.raises(TypeError, match="numpy"):
            a.detach().numpy()
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(2, device="cuda", generator=torch.Generator())
        (grad,) = torch.autograd.grad((a.to("cpu") ** 2).sum(), a)
        assert grad.device.type == "cuda"
        assert torch.equal(grad.cpu(), 2 * torch.eye(3))
