"""Nothing of the user's changes: weights, gradients, modes, hooks, random states."""

import copy
import io
import random
from collections import OrderedDict
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from laplace_ella import ELLALaplace, ELLALLLaplace, decompose
from tests import dense
from tests.cases import Case, mlp
from tests.fitting import assert_close, build

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.RankWarning")


class Broken(RuntimeError):
    """What the model raises when it is told to."""


class Net(nn.Module):
    """Has everything that could be disturbed, and breaks after some calls."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 6)
        self.out = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.breaks_after = None

    def forward(self, x):
        if self.breaks_after is not None:
            self.breaks_after -= 1
            if self.breaks_after < 0:
                raise Broken
        h = self.drop(torch.relu(self.bn(self.conv(x)))).flatten(1)
        return self.out(torch.tanh(self.frozen(h)))


def make_case():
    """A model in mixed modes with gradients, hooks and a frozen layer."""
    model = Net().double()
    model.train()
    model.drop.eval()
    model.frozen.requires_grad_(False)
    x, y = torch.randn(9, 1, 4, 4).double(), torch.randint(3, (9,))
    model(x).square().sum().backward()
    model.conv.bias.grad = None
    model.out.register_forward_hook(lambda *args: None)
    model.bn.register_forward_pre_hook(lambda *args: None)
    model.conv.register_full_backward_hook(lambda *args: None)
    return Case(model, "classification", x, y, x[:4])


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def snapshot(model):
    """Everything that must be the same, as comparable values."""
    modules = OrderedDict(model.named_modules())
    return {
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "identity": {n: id(p) for n, p in model.named_parameters()},
        "storage": {n: p.data_ptr() for n, p in model.named_parameters()},
        "grads": {
            n: None if p.grad is None else p.grad.clone()
            for n, p in model.named_parameters()
        },
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "training": {n: m.training for n, m in modules.items()},
        "hooks": {
            (n, h): len(getattr(m, h)) for n, m in modules.items() for h in HOOKS
        },
        "forward": {n: "forward" in vars(m) for n, m in modules.items()},
        "rng": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),  # noqa: NPY002
        "numpy_position": np.random.get_state()[2],  # noqa: NPY002
        "python": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "grad_enabled": torch.is_grad_enabled(),
        "sdp": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
    }


def assert_same(after, before):
    assert after.keys() == before.keys()
    for key, value in before.items():
        if isinstance(value, dict):
            assert after[key].keys() == value.keys(), key
            pairs = [(after[key][k], v) for k, v in value.items()]
        else:
            pairs = [(after[key], value)]
        for a, b in pairs:
            if isinstance(b, torch.Tensor):
                assert torch.equal(a, b), key
            elif isinstance(b, np.ndarray):
                assert (a == b).all(), key
            else:
                assert a == b, key


CALLS = {
    "init": lambda la, case: type(la)(case.model, "classification"),
    "fit": lambda la, case: la.fit(case.loader(4, shuffle=True)),
    "fit_balanced": lambda la, case: la.fit(case.loader(4), balanced=True),
    "fit_online": lambda la, case: la.fit(case.loader(4), override=False),
    "features": lambda la, case: la.features(case.x_test),
    "probit": lambda la, case: la(case.x_test),
    "mc": lambda la, case: la(case.x_test, link_approx="mc", n_samples=3),
    "bridge": lambda la, case: la(case.x_test, link_approx="bridge"),
    "gp": lambda la, case: la(case.x_test, pred_type="gp"),
    "nn": lambda la, case: la(
        case.x_test, pred_type="nn", link_approx="mc", n_samples=3
    ),
    "functional_samples": lambda la, case: la.functional_samples(
        case.x_test, n_samples=3, joint=True
    ),
    "nn_samples": lambda la, case: la.predictive_samples(
        case.x_test, pred_type="nn", n_samples=3
    ),
    "gridsearch": lambda la, case: la.optimize_prior_precision(
        method="gridsearch", val_loader=case.loader(4, shuffle=True), grid_size=3
    ),
    "gridsearch_nn": lambda la, case: la.optimize_prior_precision(
        pred_type="nn",
        method="gridsearch",
        val_loader=case.loader(4),
        grid_size=3,
        link_approx="mc",
        n_samples=2,
    ),
}
"""Public calls that run the model."""

QUIET_CALLS = {
    "sample": lambda la, case: la.sample(3),
    "marglik": lambda la, case: la.optimize_prior_precision(n_steps=2),
    "evidence": lambda la, case: la.log_marginal_likelihood(torch.tensor([2.0])),
    "state": lambda la, case: la.load_state_dict(la.state_dict()),
    "setters": lambda la, case: setattr(la, "prior_precision", 3.0),
}
"""Public calls that do not."""

flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])


def fitted(cls, case, **kwargs):
    la = build(case, cls, **kwargs)
    la.fit(case.loader(4))
    return la


@flavours
@pytest.mark.parametrize("call", [*CALLS, *QUIET_CALLS])
def test_untouched(cls, call):
    """The snapshot of model and process is the same after every public call."""
    case = make_case()
    la = fitted(cls, case)
    before = snapshot(case.model)
    (CALLS | QUIET_CALLS)[call](la, case)
    assert_same(snapshot(case.model), before)


@flavours
@pytest.mark.parametrize("backprop", [False, True])
@pytest.mark.parametrize("mode", ["forward", "reverse", "double_vjp"])
@pytest.mark.parametrize("call", ["fit", "features", "probit", "nn"])
def test_untouched_by_every_mode(cls, call, mode, backprop):
    """Nor does any way of differentiating leave traces, with or without a graph."""
    case = make_case()
    la = fitted(cls, case, feature_mode=mode, enable_backprop=backprop)
    before = snapshot(case.model)
    CALLS[call](la, case)
    assert_same(snapshot(case.model), before)


@flavours
@pytest.mark.parametrize("breaks_after", [None, 3, 4, 6])
@pytest.mark.parametrize("mode", ["loop", "backpack", "asdl"])
def test_untouched_by_every_row_mode(cls, mode, breaks_after):
    """Nor does anyone who takes the rows, also where the model raises on the way."""
    case = make_case()
    la = build(case, cls, row_mode=mode)
    before = snapshot(case.model)
    case.model.breaks_after = breaks_after
    with nullcontext() if breaks_after is None else pytest.raises(Exception) as error:
        la.fit(case.loader(4))
    assert_same(snapshot(case.model), before)
    # What tries several ways tells what each of them said.
    assert error is None or "Broken" in f"{error.type.__name__} {error.value}"


@pytest.mark.parametrize("breaks_after", [None, 1, 3, 6])
def test_untouched_by_positions_labels_and_named_parameters(breaks_after):
    """Nor by what came on top: one token of three labels, two uncertain layers."""
    case = make_case()
    net, case.model = case.model, nn.Sequential(case.model, nn.Unflatten(1, (1, 3)))
    case.y = torch.randint(2, (9, 1, 3))
    before = snapshot(case.model)
    net.breaks_after = breaks_after
    with nullcontext() if breaks_after is None else pytest.raises(Exception):
        la = build(
            case,
            output_layout="channels_last",
            multi_label=True,
            parameter_names=["0.out.*", "0.frozen.*"],
        )
        la.fit(case.loader(4))
        la(case.x_test, link_approx="mc", n_samples=3)
        decompose(la, case.x_test, n_samples=3)
    assert_same(snapshot(case.model), before)


@flavours
@pytest.mark.parametrize("breaks_after", [0, 1, 2, 4])
@pytest.mark.parametrize("call", CALLS)
def test_untouched_when_the_model_raises(cls, call, breaks_after):
    """Also when the model raises in its n-th call; its own error comes out."""
    case = make_case()
    la = fitted(cls, case)
    before = snapshot(case.model)
    case.model.breaks_after = breaks_after
    raised = False
    try:
        CALLS[call](la, case)
    except Broken:
        raised = True
    assert_same(snapshot(case.model), before)
    assert raised or call == "init" or breaks_after > 0


@flavours
def test_a_failed_fit_keeps_the_posterior(cls):
    """After a fit that raises, predictions are those of the fit before."""
    case = make_case()
    la = fitted(cls, case)
    expected = la(case.x_test)
    case.model.breaks_after = 3
    with pytest.raises(Broken):
        la.fit(case.loader(2))
    case.model.breaks_after = None
    assert_close(la(case.x_test), expected)


@flavours
def test_predictions_are_those_of_eval_mode(cls):
    """A model left in train mode predicts as in eval mode: no dropout, no batch
    statistics."""
    case = make_case()
    la = fitted(cls, case)
    expected = la(case.x_test)
    case.model.eval()
    assert_close(fitted(cls, case)(case.x_test), expected)
    f_mu, _ = la.features(case.x_test)
    assert_close(f_mu, case.model(case.x_test).detach())


def test_inputs_and_loader_are_untouched():
    """Inputs, targets and a query mapping are not changed in place."""
    case = make_case()
    x, y, x_test = case.x.clone(), case.y.clone(), case.x_test.clone()
    la = fitted(ELLALaplace, case)
    for link in ("probit", "bridge", "bridge_norm", "mc"):
        la(case.x_test, link_approx=link)
    assert torch.equal(case.x, x)
    assert torch.equal(case.y, y)
    assert torch.equal(case.x_test, x_test)


def test_under_no_grad():
    """Fitting and predicting work with gradients switched off outside."""
    case = Case(
        mlp(3, 4, 2).double(),
        "classification",
        torch.randn(8, 3).double(),
        torch.randint(2, (8,)),
        torch.randn(4, 3).double(),
    )
    expected = fitted(ELLALaplace, case)(case.x_test)
    with torch.no_grad():
        la = fitted(ELLALaplace, case)
        assert_close(la(case.x_test), expected)
        assert not torch.is_grad_enabled()


def test_default_dtype_does_not_matter():
    """A float64 default dtype neither breaks a float32 model nor is changed."""
    case = Case(
        mlp(3, 4, 2),
        "classification",
        torch.randn(8, 3),
        torch.randint(2, (8,)),
        torch.randn(4, 3),
    )
    expected = fitted(ELLALaplace, case)(case.x_test)
    torch.set_default_dtype(torch.float64)
    la = fitted(ELLALaplace, case)
    assert torch.get_default_dtype() == torch.float64
    assert la(case.x_test).dtype == torch.float32
    assert_close(la(case.x_test), expected, rtol=1e-5, atol=1e-6)


class Remembering(nn.Module):
    """A forward pass counts, stores an activation and makes a new attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.n_calls, self.last = 0, None

    def forward(self, x):
        self.n_calls += 1
        self.last = self.latest = self.first(x).tanh()
        return self.second(self.last)


@pytest.mark.parametrize("mode", ["forward", "reverse", "double_vjp"])
def test_attributes_that_a_forward_pass_writes(mode):
    """They are as before, also when the model raises: not tensors of a transform,
    which can be neither saved nor copied."""
    torch.manual_seed(0)
    model = Remembering().double()
    x, y = torch.randn(9, 3).double(), torch.randint(2, (9,))
    with torch.no_grad():
        model(x)
    del model.latest
    last = model.last
    case = Case(model, "classification", x, y, x[:4])
    la = build(case, ELLALaplace, feature_mode=mode)
    la.fit(case.loader())
    la(case.x_test)
    with pytest.raises(RuntimeError, match="shapes"):
        la(torch.randn(2, 5).double())
    assert model.n_calls == 1
    assert model.last is last
    assert not hasattr(model, "latest")
    torch.save(model, io.BytesIO())
    copy.deepcopy(la)


@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_submodules_with_buffers(how):
    """They work, and their buffers are as before."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    scripted = (
        torch.jit.script(part)
        if how == "script"
        else torch.jit.trace(part, torch.randn(2, 3))
    )
    model = nn.Sequential(scripted, nn.Tanh(), nn.Linear(4, 2)).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x, y = torch.randn(9, 3), torch.randint(2, (9,))
    case = Case(model, "classification", x, y, x[:4])
    la = build(case, ELLALaplace)
    la.fit(case.loader())
    plain = nn.Sequential(part, *model[1:])
    _, Js = dense.jacobians(plain, case.x_test)
    phi = la.features(case.x_test)[1]
    assert_close(phi, Js @ la.basis.vectors, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_parameter_that_is_a_buffer_elsewhere():
    """It has gradients by both."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder, self.encoder = nn.Module(), nn.Linear(3, 3)
            self.decoder.register_buffer("weight", self.encoder.weight)

        def forward(self, x):
            return self.encoder(x).tanh() @ self.decoder.weight

    torch.manual_seed(0)
    model = Tied().double()
    x, y = torch.randn(9, 3).double(), torch.randint(3, (9,))
    case = Case(model, "classification", x, y, x[:4])
    la = build(case, ELLALaplace, n_eigenvalues=12)
    la.fit(case.loader())
    _, Js = dense.jacobians(model, x)
    expected = torch.linalg.svdvals(Js.flatten(0, 1)).square()
    assert_close(la.basis.eigenvalues, expected[: la.basis.rank])


@pytest.mark.parametrize("shared", ["module", "weight"])
@pytest.mark.parametrize("row_mode", ["vmap", "loop"])
def test_a_layer_in_two_places(shared, row_mode):
    """Its parameters are still the user's, and count once."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    if shared == "module":
        second = first
    else:
        second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(3, 2)).double()
    parameters = {id(p) for p in model.parameters()}
    x, y = torch.randn(9, 3).double(), torch.randint(2, (9,))
    case = Case(model, "classification", x, y, x[:4])
    la = build(case, ELLALaplace, row_mode=row_mode, feature_mode="reverse")
    la.fit(case.loader())
    la(case.x_test)
    assert {id(p) for p in model.parameters()} == parameters
    assert all(isinstance(p, nn.Parameter) for p in (first.weight, second.weight))
    assert first.weight is second.weight
    _, Js = dense.jacobians(model, case.x_test)
    assert_close(la.features(case.x_test)[1], Js @ la.basis.vectors)
    model.float()
