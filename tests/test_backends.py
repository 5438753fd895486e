"""`backend=`: rows by BackPACK and ASDL are those of torch.func and of the dense
reference, what they cannot do is refused, and the model is left as it was."""

import copy
import logging
import pickle
import sys

import pytest
import torch
from laplace import Laplace
from laplace.curvature import (
    AsdlGGN,
    AsdlHessian,
    BackPackGGN,
    CurvatureInterface,
    CurvlinopsGGN,
    CurvlinopsHessian,
    GGNInterface,
)
from torch import nn

from laplace_ella import (
    ELLALaplace,
    ELLALLLaplace,
    FeatureMode,
    Method,
    RowMode,
    UnsupportedLayerError,
    compare,
)
from laplace_ella.comparison.report import OK
from tests import dense
from tests.cases import ARCHITECTURES, CASES, Case, make, mapping_loader, mlp
from tests.fitting import assert_close, build, fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.RankWarning")

LIBRARIES = {BackPackGGN: RowMode.BACKPACK, AsdlGGN: RowMode.ASDL}
libraries = pytest.mark.parametrize("backend", LIBRARIES)
flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])

UNSUPPORTED = {
    ("attention", BackPackGGN): "MultiheadAttention",
    ("attention", AsdlGGN): "MultiheadAttention",
    ("gru", BackPackGGN): "GRU",
    ("gru", AsdlGGN): "GRU",
    ("lstm", AsdlGGN): "LSTM",
    ("weight_norm", BackPackGGN): "ParametrizationList",
    ("weight_norm", AsdlGGN): "ParametrizationList",
}
"""Layers that a library has no gradients for, by the case that has them."""


def supported(names):
    return [
        pytest.param(name, backend, id=f"{name}-{backend.__name__}")
        for name in names
        for backend in LIBRARIES
        if (name, backend) not in UNSUPPORTED
    ]


# --- models ------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """Two linear layers; subclasses use them in ways that confuse the libraries."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).mean(1))


class Flattened(TwoLayers):
    """The first layer sees (B·T, 3)."""

    def forward(self, x):
        h = torch.tanh(self.first(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        return self.second(h.mean(1))


class SequenceFirst(TwoLayers):
    """The first layer sees (T, B, 3): the first dimension is not the examples."""

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.transpose(0, 1))).mean(0))


class Bypassed(TwoLayers):
    """Uses the first layer's weight without calling the layer."""

    def forward(self, x):
        h = nn.functional.linear(x.mean(1), self.first.weight, self.first.bias)
        return self.second(torch.tanh(h))


class OwnParameter(TwoLayers):
    """Has a parameter that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x):
        return super().forward(x * self.scale)


class HalfUsed(TwoLayers):
    """Has a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


class InPlace(nn.Module):
    """Changes the outputs of its layers in place, as residual networks do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.bn = nn.BatchNorm2d(2)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(2, 3)
        nn.init.uniform_(self.bn.running_var, 0.5, 2.0)

    def forward(self, x):
        h = self.act(self.bn(self.conv(x)))
        out = self.bn(self.conv(h[:, :1]))
        out += h
        return self.head(self.act(out).mean((2, 3)))


def convolution(**kwargs):
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, **kwargs), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)
    )


def problem(model, shape, n_out=2, n=7):
    """A classification case in float64."""
    model.double().eval()
    x = torch.randn(n, *shape).double()
    model(x)  # lazy layers take their shape
    return Case(model, "classification", x, torch.randint(n_out, (n,)), x[:4])


def everything(model):
    """All that a library could leave on a model: attributes, hooks, gradients."""
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    hooks = {
        (name, kind): list(getattr(module, kind))
        for name, module in model.named_modules()
        for kind in vars(module)
        if "hooks" in kind and hasattr(getattr(module, kind), "keys")
    }
    parameters = {
        name: (id(p), p.data_ptr(), sorted(vars(p)), p.grad is None, p.requires_grad)
        for name, p in model.named_parameters()
    }
    return attributes, hooks, parameters


def row_modes(la):
    return la.row_mode, la.linearizer.modes(0).rows  # whatever the rank


# --- the same numbers --------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), supported([*CASES, *ARCHITECTURES]))
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_rows(name, backend, chunk_size):
    """Rows for any cotangents are those of the dense Jacobian."""
    case = make(name)
    la = build(case, backend=backend, chunk_size=chunk_size)
    _, Js = dense.jacobians(case.model, case.x, case.params)
    examples = torch.tensor([0, 4, 4, 1, 5, 3, 0])
    cotangents = torch.randn(7, Js.shape[1]).double()
    rows = la.linearizer.rows(case.x, examples, cotangents)
    assert_close(rows, torch.einsum("mc,mcp->mp", cotangents, Js[examples]))
    assert row_modes(la) == (LIBRARIES[backend], LIBRARIES[backend])


@pytest.mark.parametrize(("name", "backend"), supported([*CASES, *ARCHITECTURES]))
def test_posterior(name, backend):
    """Basis, curvature, evidence and predictions are those of torch.func."""
    case = make(name)
    expected, la = fit(case, backend=CurvlinopsGGN), fit(case, backend=backend)
    own = (RowMode.VMAP, RowMode.LOOP)
    assert expected.modes.rows in own
    assert la.modes.jacobians in (None, *own)
    assert_close(la.basis.eigenvalues, expected.basis.eigenvalues)
    for a, e in zip(
        la._glm_predictive_distribution(case.x_test),
        expected._glm_predictive_distribution(case.x_test),
        strict=True,
    ):
        assert_close(a, e)
    assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())
    assert_close(la(case.x_test)[0], expected(case.x_test)[0])
    sigma = la.sigma_noise.double()
    reference = dense.Reference(case, la.basis.vectors, sigma=sigma)
    assert_close(la.H, reference.H)
    _, f_var = reference.predict(case.x_test, 1.0)
    assert_close(la._glm_predictive_distribution(case.x_test)[1], f_var)


@libraries
@pytest.mark.parametrize("name", ["regression_3", "classification_cnn"])
def test_last_layer(name, backend):
    """The last layer alone, which needs nothing of the layers below it; it has every
    eigenvalue once for each of its three or four outputs."""
    case = make(name)
    K = 3 if name == "regression_3" else 4
    expected = fit(case, ELLALLLaplace, n_eigenvalues=K)
    la = fit(case, ELLALLLaplace, n_eigenvalues=K, backend=backend)
    assert row_modes(la) == (LIBRARIES[backend], LIBRARIES[backend])
    assert_close(la.basis.eigenvalues, expected.basis.eigenvalues)
    assert_close(la(case.x_test)[0], expected(case.x_test)[0])


@libraries
def test_last_layer_above_an_unsupported_one(backend):
    """Layers below the last one may be anything."""
    case = make("gru")
    expected, la = fit(case, ELLALLLaplace), fit(case, ELLALLLaplace, backend=backend)
    assert_close(la(case.x_test)[1], expected(case.x_test)[1])


@libraries
@pytest.mark.parametrize(
    ("model", "shape", "n_out"),
    [
        (TwoLayers, (5, 3), 2),
        (Flattened, (5, 3), 2),
        (HalfUsed, (5, 3), 2),
        (InPlace, (1, 4, 4), 3),
    ],
)
def test_ways_of_using_a_layer(model, shape, n_out, backend):
    """At many positions, twice, not at all, and with its output changed in place."""
    case = problem(model(), shape, n_out)
    la = build(case, backend=backend)
    _, Js = dense.jacobians(case.model, case.x, case.params)
    examples, cotangents = torch.arange(7), torch.randn(7, n_out).double()
    rows = la.linearizer.rows(case.x, examples, cotangents)
    assert_close(rows, torch.einsum("mc,mcp->mp", cotangents, Js))


@libraries
def test_frozen_layer_that_is_not_supported(backend):
    """What has no posterior needs no support, and Laplace's own refusal of frozen
    layers with BackPACK is not needed."""
    case = make("gru")
    case.model.body.requires_grad_(False)
    assert_close(fit(case, backend=backend).H, fit(case).H)


@libraries
def test_hooks_that_change_outputs(backend):
    """A layer's gradient is taken at its own output, before a hook of the user's."""
    case = make("classification_mlp")
    case.model[0].register_forward_hook(lambda module, args, out: 2 * out)
    assert_close(fit(case, backend=backend).H, fit(case).H)


@libraries
def test_stochastic_curvature(backend):
    """The sampled curvature's gradients go the same way; so does its seed."""
    case = make("classification_mlp")
    expected, la = fit(case, stochastic=3), fit(case, stochastic=3, backend=backend)
    assert_close(la.H, expected.H)


@libraries
def test_mapping_inputs(backend):
    """Batches as mappings work too: only layers see tensors."""
    case = make("classification_mlp")

    class Keyed(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, data):
            return self.net(data["input_ids"])

    loader = mapping_loader(case.x, case.y)
    keyed = Case(Keyed(case.model), "classification", case.x, case.y, case.x_test)
    assert_close(fit(keyed, loader=loader, backend=backend).H, fit(case).H)


@libraries
def test_embedding(backend):
    """Both libraries make an embedding's gradients in float32."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.words(x).mean(1))

    model, x = Words(), torch.randint(5, (6, 4))
    names = [name for name, _ in model.named_parameters()]
    _, Js = dense.jacobians(model, x)
    la = ELLALaplace(model, "classification", backend=backend)
    assert list(la.linearizer.fn.names) == names
    cotangents = torch.randn(6, 2)
    rows = la.linearizer.rows(x, torch.arange(6), cotangents)
    expected = torch.einsum("mc,mcp->mp", cotangents, Js)
    assert_close(rows, expected, rtol=1e-4, atol=1e-6)


# --- what is left behind -----------------------------------------------------------


@flavours
@libraries
@pytest.mark.parametrize("stochastic", [False, True])
def test_nothing_is_left(cls, backend, stochastic):
    """No hook, attribute or gradient on any module or parameter."""
    case = make("classification_cnn")
    before = everything(case.model)
    la = fit(case, cls, backend=backend, stochastic=stochastic)
    la(case.x_test)
    assert everything(case.model) == before


@libraries
def test_nothing_is_left_in_the_library(backend):
    """Nor does BackPACK keep hooks in its global context."""
    from backpack.context import CTX

    before = len(CTX.hook_handles), CTX.get_active_exts()
    fit(make("classification_mlp"), backend=backend)
    assert (len(CTX.hook_handles), CTX.get_active_exts()) == before


@libraries
def test_nothing_is_left_by_an_unsupported_layer(backend):
    case = make("gru")
    before = everything(case.model)
    with pytest.raises(UnsupportedLayerError):
        fit(case, backend=backend)
    assert everything(case.model) == before


@libraries
def test_nothing_is_left_by_a_model_that_raises(backend):
    """The model's own error comes out, from the middle of a forward pass."""

    class Broken(RuntimeError):
        pass

    class Breaks(TwoLayers):
        calls = 0

        def forward(self, x):
            Breaks.calls += 1
            h = self.first(x)
            if Breaks.calls > 5:
                raise Broken
            return self.second(torch.tanh(h).mean(1))

    case = problem(Breaks(), (5, 3))
    before = everything(case.model)
    with pytest.raises(Broken):
        fit(case, backend=backend, chunk_size=2)
    assert everything(case.model) == before


@libraries
@pytest.mark.filterwarnings("ignore:.*[Bb]ackward hook")
def test_an_extended_model_stays_extended(backend):
    """A model with BackPACK's hooks of the user's own keeps them."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    case = make("classification_mlp")
    expected = fit(case).H
    extend(case.model)
    hooks = everything(case.model)[1]
    assert_close(fit(case, backend=backend).H, expected)
    assert everything(case.model)[1] == hooks
    with backpack(BatchGrad()):
        case.model(case.x).sum().backward()
    assert case.model[0].weight.grad_batch.shape == (12, 5, 3)


# --- refusals ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), UNSUPPORTED)
def test_unsupported_layer(name, backend):
    """The error names the layer's type and the remedy; nothing is fitted."""
    case = make(name)
    la = build(case, backend=backend)
    with pytest.raises(UnsupportedLayerError) as error:
        la.fit(case.loader())
    for word in (UNSUPPORTED[name, backend], "CurvlinopsGGN", "None", "freeze"):
        assert word in str(error.value)
    assert la.basis is None


@libraries
@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (SequenceFirst, "Linear ('first')"),
        (Bypassed, "Linear ('first')"),
        (OwnParameter, "OwnParameter"),
    ],
)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_wrong_rows_do_not_pass(model, layer, length, backend):
    """A layer that is used as the library does not expect is noticed."""
    if model is SequenceFirst and length == 1:
        pytest.skip("one position: (1, B, 3) and (B, 1, 3) hold the same rows")
    case = problem(model(), (length, 3))
    la = build(case, backend=backend)
    with pytest.raises(UnsupportedLayerError) as error:
        la.fit(case.loader(1))
    assert layer in str(error.value)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        (BackPackGGN, {"padding": "same"}),
        (AsdlGGN, {"padding": "same"}),
        (AsdlGGN, {"groups": 2}),
        (AsdlGGN, {"dilation": 2}),
    ],
)
def test_unsupported_convolution(backend, options):
    """Some of these the libraries compute without a complaint, and wrongly."""
    case = problem(convolution(**options), (2, 4, 4))
    with pytest.raises(UnsupportedLayerError, match="Conv2d"):
        fit(case, backend=backend)


def test_batchnorm_without_scale():
    """ASDL divides by the scale of BatchNorm: NaN does not pass."""
    case = make("classification_cnn")
    with torch.no_grad():
        case.model.bn.weight[0] = 0
    with pytest.raises(UnsupportedLayerError, match="BatchNorm2d"):
        fit(case, backend=AsdlGGN)
    assert_close(fit(case, backend=BackPackGGN).H, fit(case).H)


class Unknown(CurvatureInterface):
    """A backend that ELLA has never heard of."""


@flavours
@pytest.mark.parametrize("backend", [Unknown, GGNInterface, nn.Linear])
def test_unknown_backend(cls, backend):
    """The error lists what is accepted."""
    with pytest.raises(ValueError, match=backend.__name__) as error:
        cls(mlp(2, 3, 1), "regression", backend=backend)
    for name in ("CurvlinopsGGN", "BackPackGGN", "AsdlGGN", "None"):
        assert name in str(error.value)


@pytest.mark.parametrize("backend", ["BackPackGGN", 3])
def test_backend_that_is_no_class(backend):
    with pytest.raises(TypeError, match=r"class.*BackPackGGN.*laplace\.curvature"):
        ELLALaplace(mlp(2, 3, 1), "regression", backend=backend)


@flavours
@pytest.mark.parametrize(
    ("backend", "curvature", "use"),
    [
        (AsdlHessian, "Hessian", "AsdlGGN"),
        (CurvlinopsHessian, "Hessian", "CurvlinopsGGN"),
    ],
)
def test_backend_of_another_curvature(cls, backend, curvature, use):
    """Refused, as a GGN under the name of something else would mislead."""
    with pytest.raises(ValueError, match=f"{curvature}.*GGN.*{use}"):
        cls(mlp(2, 3, 1), "regression", backend=backend)


@pytest.mark.parametrize(
    ("backend", "module", "distribution"),
    [
        (BackPackGGN, "backpack.extensions", "backpack-for-pytorch"),
        (AsdlGGN, "asdl.operations", "asdfghjkl"),
    ],
)
def test_missing_package(monkeypatch, backend, module, distribution):
    """The name on PyPI is not the name that is imported."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {distribution}"):
        ELLALaplace(mlp(2, 3, 1), "regression", backend=backend)


# --- arguments ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, CurvlinopsGGN, BackPackGGN, AsdlGGN])
def test_stochastic_of_the_backend(backend):
    """Laplace's way to ask for a sampled curvature."""
    case = make("classification_mlp")
    la = fit(case, backend=backend, backend_kwargs={"stochastic": True})
    assert la.stochastic is True
    assert_close(la.H, fit(case, stochastic=True).H)


def test_stochastic_twice():
    """A number of samples says more than True; what contradicts is refused."""

    def asked(theirs, ours):
        kwargs = {"stochastic": theirs}
        model = mlp(2, 3, 1)
        la = ELLALaplace(model, "regression", backend_kwargs=kwargs, stochastic=ours)
        return la.stochastic

    assert asked(True, 4) == asked(4, False) == asked(4, 4) == 4
    assert asked(False, False) is False
    for theirs, ours in [(False, True), (False, 4), (3, 4)]:
        with pytest.raises(ValueError, match=r"stochastic.*Leave one"):
            asked(theirs, ours)
    with pytest.raises(ValueError, match="positive integer"):
        asked(-1, False)


@flavours
def test_arguments_without_effect(cls):
    """Refused, not ignored."""
    with pytest.raises(ValueError, match=r"backend_kwargs.*'stochastic'.*num_samples"):
        cls(mlp(2, 3, 1), "regression", backend_kwargs={"num_samples": 3})
    with pytest.raises(ValueError, match="asdl_fisher_kwargs"):
        cls(mlp(2, 3, 1), "regression", asdl_fisher_kwargs={"seed": 3})


def test_row_mode_and_backend():
    """Either may ask for a library; they must not contradict."""
    case = make("classification_mlp")
    for backend, mode in LIBRARIES.items():
        assert row_modes(fit(case, row_mode=mode.value)) == (mode, mode)
        assert row_modes(fit(case, row_mode=mode, backend=backend)) == (mode, mode)
        with pytest.raises(ValueError, match=r"(?s)row_mode.*loop.*Leave one"):
            build(case, row_mode="loop", backend=backend)
    la = fit(case, row_mode="loop", backend=CurvlinopsGGN)
    assert la.modes.rows is RowMode.LOOP


# --- the family --------------------------------------------------------------------


@libraries
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_through_laplace(backend, subset):
    case = make("classification_mlp")
    options = {"subset_of_weights": subset, "hessian_structure": "nystrom"}
    la = Laplace(case.model, case.likelihood, backend=backend, **options)
    la.fit(case.loader())
    expected = Laplace(case.model, case.likelihood, **options)
    expected.fit(case.loader())
    assert la.modes.rows is LIBRARIES[backend]
    assert la._backend_cls is backend
    assert_close(la(case.x_test), expected(case.x_test))


@libraries
def test_is_reported_and_survives(backend, caplog):
    """The log, the checkpoint, pickles and copies say who took the rows."""
    case, mode = make("classification_mlp"), LIBRARIES[backend]
    with caplog.at_level(logging.INFO, "laplace_ella"):
        la = fit(case, backend=backend)
    assert f"rows of the Jacobian by {mode.name}".lower() in caplog.text.lower()
    state = la.state_dict()
    assert state["mode_rows"] == mode.value
    loaded = build(case)
    loaded.load_state_dict(state)
    for other in (loaded, pickle.loads(pickle.dumps(la)), copy.deepcopy(la)):
        assert other.modes.rows is mode
        assert_close(other(case.x_test), la(case.x_test))
        other.fit(case.loader())
        assert_close(other.H, la.H)


@libraries
def test_compare(backend):
    """A method of `compare` may have a backend."""
    case = make("classification_mlp")
    options = {"subset_of_weights": "all", "hessian_structure": "nystrom"}
    options |= {"subsample_size": 20, "n_eigenvalues": 4}
    report = compare(
        case.model,
        case.likelihood,
        case.loader(),
        case.loader(),
        methods=[
            Method("plain", options, tune="none"),
            Method("library", {**options, "backend": backend}, tune="none"),
        ],
        links=("probit",),
        progress_bar=False,
    )
    plain, library = report.results
    assert (plain.status, library.status) == (OK, OK)
    for name, value in plain.metrics.items():
        assert library.metrics[name] == pytest.approx(value, rel=1e-6), name


def test_jacobians_keep_to_torch():
    """Features by reverse mode are torch.func's under every backend."""
    case = make("classification_mlp")
    for backend in LIBRARIES:
        la = fit(case, backend=backend, feature_mode="reverse")
        assert la.modes.features is FeatureMode.REVERSE
        assert la.modes.jacobians in (None, RowMode.VMAP, RowMode.LOOP)
        assert_close(la.H, fit(case, feature_mode="reverse").H)
