"""Rows of the Jacobian, features and residuals: cases and ways against dense ones."""

from collections import UserDict, namedtuple
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn

from laplace_ella import ComputeOptions
from laplace_ella.derivatives.jacobians import GradientSplit
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.modes import FeatureMode, RowMode
from laplace_ella.derivatives.trials import decide, fastest, linearize
from laplace_ella.errors import InsufficientMemoryError, NotDifferentiableError
from laplace_ella.support.batches import OutputLayout
from tests import dense
from tests.cases import ARCHITECTURES, CASES, CNN, make, mlp
from tests.fitting import assert_close

WAYS = {
    "forward": {"feature_mode": "forward"},
    "reverse by vmap": {"feature_mode": "reverse", "row_mode": "vmap"},
    "reverse by loop": {"feature_mode": "reverse", "row_mode": "loop"},
    "double": {"feature_mode": "double_vjp", "row_mode": "loop"},
    "chunks of 2": {"chunk_size": 2},
    "little memory": {"memory_budget": 20_000},
    "auto": {},
}

#: Ways that an architecture does not support: transforms, or forward mode.
UNSUPPORTED = {
    ("lstm", "reverse by vmap"),
    ("gru", "reverse by vmap"),
    ("weight_norm", "forward"),
}


def linearizer_of(
    model, x, layout="flat", rank=3, names=None, key="input_ids", dtype=None, **options
):
    """Decided derivatives of a model in eval mode."""
    if names is None:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
    fn = ModelFunction(model.eval(), names, dtype)
    options = ComputeOptions(**options)
    return decide(linearize(fn, OutputLayout(layout), key, options, x), x, rank)


def directions(n_params, rank=3):
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(n_params, rank, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(A)[0].T


def check(linearizer, x, f, Js):
    """Everything a linearizer computes at inputs x with outputs and Jacobians."""
    V, n = directions(Js.shape[-1]), Js.shape[1]
    out = linearizer.features(x, V)
    assert_close(out.f, f)
    assert_close(out.phi, Js @ V.T)
    assert_close(linearizer.outputs(x)[0], f)
    outputs, J, positions = linearizer.jacobian(x)
    assert_close(outputs, f)
    assert_close(J, Js)
    assert positions.n_values == n
    # rows of numbers, of combinations, and of all outputs of some examples
    examples = torch.tensor([len(f) - 1, 0, 0, 1])
    numbers = torch.tensor([0, n - 1, 0, 0])
    rows = torch.cat(list(linearizer.row_parts(x, examples, numbers, 3)))
    assert_close(rows, Js[examples, numbers])
    c = torch.randn(4, n, dtype=f.dtype)
    rows = torch.cat(list(linearizer.row_parts(x, examples, c)))
    assert_close(rows, torch.einsum("mo,mop->mp", c, Js[examples]))
    examples = torch.tensor([1, 0]).repeat_interleave(n)
    parts = list(linearizer.row_parts(x, examples, torch.arange(n).repeat(2), n))
    assert all(len(part) <= n for part in parts)
    assert_close(torch.cat(parts), Js[[1, 0]].flatten(0, 1))
    c = torch.randn(len(f), 2, n, dtype=f.dtype)
    assert_close(linearizer.project(x, c, V), c @ Js @ V.T)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*CASES, *ARCHITECTURES])
def test_every_way_on_every_case(name, way):
    case = make(name)
    if (name, way) in UNSUPPORTED:
        with pytest.raises(NotDifferentiableError, match="Options"):
            linearizer_of(case.model, case.x_test, **WAYS[way])
        return
    linearizer = linearizer_of(case.model, case.x_test, **WAYS[way])
    if (name, "forward") in UNSUPPORTED and way != "reverse by loop":
        assert linearizer.modes.features is not FeatureMode.FORWARD
    if (name, "reverse by vmap") in UNSUPPORTED:
        assert linearizer.modes.rows is RowMode.LOOP
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    check(linearizer, case.x_test, f, Js)


NORMALISED = {
    "layer": (nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)),
    "instance": (
        nn.Unflatten(1, (1, 3)),
        nn.Conv1d(1, 2, 1),
        nn.InstanceNorm1d(2, affine=True),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6, 2),
    ),
}


@pytest.mark.parametrize("way", ["forward", "double", "reverse by vmap", "auto"])
@pytest.mark.parametrize(
    "name", ["classification_mlp", "classification_cnn", "tied", *NORMALISED]
)
def test_graphs(name, way):
    """Features can be differentiated in the inputs, in every way; torch's second
    derivatives of normalisations are wrong in every way but one, which is taken."""
    if name in NORMALISED:
        model, x = nn.Sequential(*NORMALISED[name]).double(), torch.randn(2, 3).double()
    else:
        case = make(name)
        model, x = case.model, case.x_test[:2]
    linearizer = linearizer_of(model, x, **WAYS[way])
    V, step = directions(linearizer.n_params), torch.zeros_like(x)
    step[1] = 1e-6

    def total(x):
        features = linearizer.features(x, V, create_graph=True)
        return features.phi.square().sum() + features.f.sum()

    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(x), x)
    numerical = (total(x + step) - total(x - step)).detach() / 2e-6
    assert_close(gradient[1].sum(), numerical, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", ["forward", "reverse by vmap", "reverse by loop"])
@pytest.mark.parametrize("top", [1, 2, 9])
def test_largest_outputs(way, top):
    case = make("classification_cnn")
    linearizer = linearizer_of(case.model, case.x_test, **WAYS[way])
    V = directions(case.n_params)
    everything = linearizer.features(case.x_test, V)
    some = linearizer.features(case.x_test, V, top=top)
    if top > 4:
        assert some.outputs is None
        return assert_close(some.phi, everything.phi)
    largest = everything.f.topk(top).indices
    assert torch.equal(some.outputs, largest)
    assert_close(some.phi, everything.phi.take_along_dim(largest.unsqueeze(-1), 1))


@pytest.mark.parametrize("top", [None, 2])
@pytest.mark.parametrize("budget", [None, 2_000, 400_000])
@pytest.mark.parametrize("layout", ["flat", "channels_first", "channels_last"])
def test_residuals(layout, budget, top):
    """Products of what lies outside the basis, in passes of every size."""
    torch.manual_seed(0)
    net, x = mlp(3, 5, 12).double(), torch.randn(5, 3).double()
    shape = {"flat": (12,), "channels_first": (4, 3), "channels_last": (3, 4)}[layout]
    model = nn.Sequential(net, nn.Unflatten(1, shape))
    linearizer = linearizer_of(model, x, layout, memory_budget=budget)
    V = directions(linearizer.n_params)
    f, Js = (linearizer.batch(x)[1].rows(t) for t in dense.jacobians(net, x))
    if layout == "channels_first":
        expected = dense.jacobians(net, x)[0].unflatten(1, shape).mT.flatten(0, 1)
        assert_close(f, expected)
    rest = Js - Js @ V.T @ V
    found = linearizer.features_and_residual(x, GradientSplit(V), top=top)
    phi, products = Js @ V.T, rest @ rest.mT
    if top is not None:
        chosen = f.topk(top).indices
        assert torch.equal(found.outputs, chosen)
        phi = phi.take_along_dim(chosen[:, :, None], 1)
        products = products.take_along_dim(chosen[:, :, None], 1)
        products = products.take_along_dim(chosen[:, None, :], 2)
    assert_close(found.f, f)
    assert_close(found.phi, phi)
    assert_close(found.residual.sum(1), products)


Pair = namedtuple("Pair", ["x", "scale"])


class Container(nn.Module):
    """Of whatever container, the entries `get(container)`; it writes to its input."""

    def __init__(self, get):
        super().__init__()
        self.net, self.get = mlp(3, 5, 4).double(), get

    def forward(self, data):
        x, scale = self.get(data)
        return self.net(x.mul_(2)) * scale.sum()


def by_key(data):
    return data["x"], data["scale"]


CONTAINERS = {
    "dict": (lambda x, s: {"x": x, "scale": s, "name": "a"}, by_key),
    "user_dict": (lambda x, s: UserDict(x=x, scale=s), by_key),
    "proxy": (lambda x, s: MappingProxyType({"x": x, "scale": s}), by_key),
    "tuple": (lambda x, s: (x, s, None), lambda d: d[:2]),
    "namedtuple": (Pair, lambda d: (d.x, d.scale)),
    "nested": (
        lambda x, s: {"x": x, "more": (1, [s])},
        lambda d: (d["x"], d["more"][1][0]),
    ),
}


@pytest.mark.parametrize("way", ["forward", "reverse by vmap", "reverse by loop"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name, way):
    """A tensor that all examples share stays whole, also where it is as long as a part
    of the batch; what the model writes to is a copy."""
    make_container, get = CONTAINERS[name]
    torch.manual_seed(0)
    model, x, scale = Container(get), torch.randn(7, 3), torch.randn(4).double()
    x = x.double()
    before = x.clone()
    data = make_container(x, scale)
    options = {**WAYS[way], "chunk_size": 4}
    linearizer = linearizer_of(model, data, key="x", **options)
    params = list(model.parameters())
    f, Js = dense.jacobians(model.net, 2 * x, params)
    check(linearizer, data, f * scale.sum(), Js * scale.sum())
    assert torch.equal(x, before)


GRAPHS = SimpleNamespace(num_graphs=3, to_data_list=list, x=torch.ones(9, 2))
WRONG = {
    "a graph": (mlp(2, 3), GRAPHS, r"Wrap the model.*mapping of tensors"),
    "a scalar": (mlp(2, 3), torch.ones(()), "batch dimension"),
    "one example": (mlp(1, 3), torch.ones(1), r"x\.unsqueeze\(0\)"),
    "two outputs": (
        nn.Sequential(mlp(2, 4), nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1)),
        torch.ones(5, 2),
        "one out",
    ),
    "a mapping": (mlp(2, 3), {"input_ids": torch.ones(4, 2)}, r"self\.net\(batch\["),
    "statistics of the batch": (
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        torch.ones(4, 2),
        "running statistics",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs(name):
    model, x, remedy = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=f"(?s){remedy}"):
        linearizer_of(model, x)


def test_one_example_without_the_batch():
    net = mlp(3, 5, 4).double()
    with pytest.raises(ValueError, match=r"x\.unsqueeze\(0\)"):
        linearizer_of(net, torch.randn(6, 3).double()).outputs(torch.randn(3).double())
    convolution = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    x = torch.randn(5, 3, 4, 4)
    with pytest.raises(ValueError, match=r"x\.unsqueeze\(0\)"):
        linearizer_of(convolution, x).outputs(x[0])


def test_no_examples():
    case = make("classification_mlp")
    linearizer = linearizer_of(case.model, case.x)
    x, V = case.x[:0], directions(case.n_params)
    assert linearizer.features(x, V).phi.shape == (0, 3, 3)
    assert linearizer.features(x, V, top=2).phi.shape == (0, 2, 3)
    assert linearizer.jacobian(x)[1].shape == (0, 3, case.n_params)
    none = torch.zeros(0, dtype=torch.long)
    assert not list(linearizer.row_parts(case.x, none, none))


class Tied(nn.Module):
    """A layer in two places, a weight in two modules, a parameter that is a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.third = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second, self.third.weight = self.first, self.first.weight
        self.decoder = nn.Module()
        self.decoder.register_buffer("weight", self.first.weight)

    def forward(self, x):
        for layer in (self.first, self.second, self.third):
            x = layer(x).tanh()
        return x @ self.decoder.weight


@pytest.mark.parametrize("way", WAYS)
def test_parameters_in_memory(way):
    """channels_last and transposed parameters: order and numbers are the logical.
    Shared ones count once, have gradients by every use, and stay the user's."""
    torch.manual_seed(0)
    model = CNN().double().eval().to(memory_format=torch.channels_last)
    model.fc.weight = nn.Parameter(torch.randn(12, 4).double().T)
    x = torch.randn(5, 1, 6, 6).double()
    check(linearizer_of(model, x, **WAYS[way]), x, *dense.jacobians(model, x))
    model, x = Tied().double(), torch.randn(4, 3).double()
    own = list(model.parameters())
    check(linearizer_of(model, x, **WAYS[way]), x, *dense.jacobians(model, x))
    assert all(a is b for a, b in zip(own, model.parameters(), strict=True))
    assert model.second is model.first
    assert model.third.weight is model.decoder.weight is model.first.weight


class Embedded(nn.Module):
    """Integer inputs, a frozen layer and a buffer."""

    def __init__(self):
        super().__init__()
        self.table, self.net = nn.Embedding(7, 3), mlp(3, 5, 4)
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x):
        return self.net(self.table(x["i"]) + self.shift + x["v"])


def test_derivatives_in_float64_of_a_float32_model():
    """As of the model in float64; the model itself stays as it is."""
    torch.manual_seed(0)
    model = Embedded()
    names = [n for n, _ in model.named_parameters() if n != "table.weight"]
    x = {"i": torch.randint(7, (5,)), "v": torch.randn(5, 3)}
    single = linearizer_of(model, x, names=names, key="i")
    linearizer = single.in_dtype(torch.float64)
    torch.manual_seed(0)
    exact, double = Embedded().double(), {**x, "v": x["v"].double()}
    check(linearizer, x, *dense.jacobians(exact, double, list(exact.net.parameters())))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert ModelFunction(model.half(), names).dtype is torch.float32


def test_the_fastest_way_wins(monkeypatch):
    """By seconds per unit of work; a replacement only where the other fails."""
    now = 0.0
    monkeypatch.setattr("time.thread_time", lambda: now)

    def takes(seconds, work=1.0):
        def trial():
            nonlocal now
            now += seconds
            return work

        return trial

    def fails():
        raise NotImplementedError("no forward AD")

    forward, reverse = FeatureMode.FORWARD, FeatureMode.REVERSE
    double, cpu = FeatureMode.DOUBLE_REVERSE, torch.device("cpu")
    ways = {forward: takes(2), double: takes(0.1), reverse: takes(3, 2.0)}
    assert fastest(ways, cpu) is reverse
    ways[reverse] = takes(3)
    assert fastest(ways, cpu) is forward
    ways[forward] = fails
    assert fastest(ways, cpu) is double
    with pytest.raises(NotDifferentiableError, match="no forward AD"):
        fastest({forward: fails}, cpu)


def test_cheaper_direction():
    """Many outputs and few directions go forward, the reverse goes backward."""
    torch.manual_seed(0)
    convolution = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(2048, 1)
    )
    forward = linearizer_of(mlp(6, 16, 400), torch.randn(30, 6), rank=2)
    reverse = linearizer_of(convolution, torch.randn(30, 1, 16, 16), rank=60)
    assert forward.modes.features is FeatureMode.FORWARD
    assert reverse.modes.features is FeatureMode.REVERSE


@pytest.mark.parametrize("way", ["forward", "reverse by vmap", "double"])
def test_mixed_precision_after_a_fit_without_it(way):
    """Batch normalisation: `vmap` works without autocast, and not with it."""
    case = make("classification_cnn")
    model, x = case.model.float(), case.x_test.float()
    linearizer = linearizer_of(model, x, **WAYS[way])
    V = directions(case.n_params).float()
    exact = linearizer.features(x, V)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = linearizer.features(x, V)
    assert rough.phi.dtype == rough.f.dtype == torch.float32
    # Each of three layers has input, weight, result and gradient rounded to 8 bits.
    error = (rough.phi - exact.phi).norm() / exact.phi.norm()
    assert 0 < error < 12 * 2**-7
    assert_close(linearizer.features(x, V).phi, exact.phi)


def test_results_that_cannot_fit():
    model, x = mlp(10, 300, 1000), torch.randn(40, 10)
    linearizer = linearizer_of(model, x, memory_budget="100 MB")
    with pytest.raises(InsufficientMemoryError, match=r"48\.\d GB.*budget is 100"):
        linearizer.jacobian(x)
