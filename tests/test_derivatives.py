"""Derivatives on their own: rows, Jacobians, features and kernels of any inputs."""

import pickle
import weakref
from collections import UserDict, namedtuple
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace_ella.derivatives import (
    feature_passes,
    features,
    jacobian_passes,
    row_passes,
    sizes,
)
from laplace_ella.derivatives.features import (
    FeatureMode,
    by_forward,
    by_forward_loop,
    by_reverse,
    by_reverse_forgetting,
)
from laplace_ella.derivatives.folding import FoldedFunction
from laplace_ella.derivatives.jacobian_passes import JacobianPasses
from laplace_ella.derivatives.linearizer import Linearizer, Probe
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.modes import Modes
from laplace_ella.derivatives.options import ComputeOptions
from laplace_ella.derivatives.rows import RowMode, pull_back
from laplace_ella.derivatives.sizes import Activations, PassSizes
from laplace_ella.derivatives.trials import FEWEST_EXAMPLES, attempt
from laplace_ella.errors import InsufficientMemoryError, NotDifferentiableError
from laplace_ella.support.batches import Batch, take
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.metric import Metric
from tests import dense
from tests.cases import CNN, mlp
from tests.fitting import assert_close

WAYS = [
    {"feature_mode": "forward"},
    {"feature_mode": "reverse", "row_mode": "vmap"},
    {"feature_mode": "reverse", "row_mode": "loop"},
    {"feature_mode": "double_vjp"},
    {},
]
"""Options under which features are computed; the last decides itself."""


def function(model, dtype=None):
    return ModelFunction(model, [name for name, _ in model.named_parameters()], dtype)


def linearize(model, layout="flat", dtype=None, dict_key_x="input_ids", **options):
    return Linearizer(
        function(model.eval(), dtype),
        OutputLayout(layout),
        dict_key_x,
        ComputeOptions(**options),
    )


def directions(model, k, seed=0):
    """Orthonormal directions (k, P)."""
    P = sum(p.numel() for p in model.parameters())
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(P, k, generator=g, dtype=torch.float64)
    return torch.linalg.qr(A)[0].T.to(next(model.parameters()).dtype)


def small():
    torch.manual_seed(0)
    return mlp(3, 5, 4).double()


# --- options -----------------------------------------------------------------------


def test_options_accept_names():
    """Strings become what they name."""
    options = ComputeOptions(
        feature_mode="reverse", row_mode="loop", basis_device="cpu", chunk_size=3
    )
    assert options.feature_mode is FeatureMode.REVERSE
    assert options.row_mode is RowMode.LOOP
    assert options.basis_device == torch.device("cpu")
    assert options == ComputeOptions("reverse", "loop", 3, basis_device="cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("feature_mode", "sideways"),
        ("row_mode", "sideways"),
        ("chunk_size", 0),
        ("memory_budget", "much"),
        ("memory_budget", -1),
        ("basis_dtype", torch.int64),
    ],
)
def test_options_refuse_other_values(name, value):
    """The error names the option and the value."""
    with pytest.raises(ValueError, match=name) as error:
        ComputeOptions(**{name: value})
    assert str(value) in str(error.value)


# --- inputs ------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "scale"])


class Immutable(nn.Module):
    """Of whatever container, the entries `get(container)`."""

    def __init__(self, get):
        super().__init__()
        self.net, self.get = mlp(3, 5, 4).double(), get

    def forward(self, data):
        x, scale = self.get(data)
        return self.net(x) * scale.sum()


def by_key(data):
    return data["x"], data["scale"]


CONTAINERS = {
    "dict": (lambda x, s: {"x": x, "scale": s, "name": "a"}, by_key),
    "user_dict": (lambda x, s: UserDict(x=x, scale=s), by_key),
    "proxy": (lambda x, s: MappingProxyType({"x": x, "scale": s}), by_key),
    "tuple": (lambda x, s: (x, s, None), lambda d: d[:2]),
    "list": (lambda x, s: [x, s], lambda d: d),
    "namedtuple": (Pair, lambda d: (d.x, d.scale)),
    "nested": (
        lambda x, s: {"x": x, "more": (1, [s])},
        lambda d: (d["x"], d["more"][1][0]),
    ),
}


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_shared_tensors_as_long_as_a_chunk(name, options):
    """What has a batch dimension is decided on the whole batch: a tensor that all
    examples share stays whole, also where it is as long as a chunk."""
    make, get = CONTAINERS[name]
    torch.manual_seed(0)
    model = Immutable(get)
    x, scale = torch.randn(7, 3).double(), torch.randn(4).double()
    V = directions(model, 3)
    f, Js = dense.jacobians(model, make(x, scale))
    linearizer = linearize(model, dict_key_x="x", chunk_size=4, **options)
    out = linearizer.features(make(x, scale), V)
    assert_close(out.f, f)
    assert_close(out.phi, Js @ V.T)
    _, J, _ = linearizer.jacobian(make(x, scale))
    assert_close(J, Js)
    examples, cotangents = torch.tensor([6, 1, 1, 0, 5]), torch.randn(5, 4).double()
    rows = linearizer.rows(make(x, scale), examples, cotangents)
    assert_close(rows, torch.einsum("mc,mcp->mp", cotangents, Js[examples]))


def test_parts_of_a_batch():
    """Parts keep class, order and shared entries of the container."""
    x = Pair(torch.arange(6.0), torch.arange(2.0))
    batch = Batch.of(x, "input_ids")
    part = batch.take(slice(1, 3))
    assert isinstance(part.inputs, Pair)
    assert part.size == 2
    assert part.inputs.x.tolist() == [1, 2]
    # of the length of the part, and shared nevertheless
    assert part.take(torch.tensor([1])).inputs.scale.tolist() == [0, 1]
    assert take(x, slice(0, 1), 6).x.tolist() == [0]
    assert batch.take(slice(4, 100)).size == 2


def test_inputs_without_a_batch_dimension():
    """One example without the batch is an error that says so."""
    linearizer = linearize(small())
    with pytest.raises(ValueError, match=r"x\.unsqueeze\(0\)"):
        linearizer.features(torch.randn(3).double(), directions(small(), 2))
    wide = linearize(mlp(1, 5, 4).double())  # whose first layer takes one number
    with pytest.raises(ValueError, match=r"x\.unsqueeze\(0\)"):
        wide.outputs(torch.randn(1).double())
    with pytest.raises(ValueError, match="batch dimension"):
        linearizer.probe(torch.tensor(1.0).double())


def test_outputs_of_another_number_of_examples():
    """A model must return one output per example."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(3, 4)

        def forward(self, x):
            return self.net(x).repeat(2, 1)

    with pytest.raises(ValueError, match="one output per example"):
        linearize(Mean()).probe(torch.randn(5, 3))


def test_graphs_are_refused_with_a_remedy():
    """A batch of PyTorch Geometric cannot be split into examples."""
    graphs = SimpleNamespace(num_graphs=3, to_data_list=list, x=torch.randn(9, 2))
    calls = []
    model = mlp(2, 3)
    model.register_forward_hook(lambda *args: calls.append(args))
    with pytest.raises(TypeError, match=r"Wrap the model.*mapping of tensors"):
        linearize(model).probe(graphs)
    assert not calls


class Keywords(nn.Module):
    """Called by keywords, returns an object with logits, as Hugging Face models."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 5, 4).double()

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=self.net(input_ids * attention_mask))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.hf = Keywords()

    def forward(self, batch):
        return self.hf(**batch)


def test_a_model_that_takes_keywords():
    """The error shows the wrapper, and the wrapped model's logits are its outputs."""
    x = {k: torch.randn(6, 3).double() for k in ("input_ids", "attention_mask")}
    with pytest.raises(TypeError, match=r"self\.hf\(\*\*batch\)\.logits") as error:
        linearize(Keywords()).probe(x)
    assert error.value.__cause__ is not None
    model = Wrapped()
    f, positions = linearize(model).outputs(x)
    assert_close(f, model(x).logits.detach())
    assert positions.output_shape == (4,)


def test_errors_of_a_model_that_takes_a_mapping_stay_its_own():
    """Only where keywords are wanted is the mapping at fault."""

    class Broken(Wrapped):
        def forward(self, batch):
            raise KeyError("of the model")

    with pytest.raises(KeyError, match="of the model"):
        linearize(Broken()).probe({"input_ids": torch.randn(2, 3)})


class Writes(nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 5, 4).double()

    def forward(self, x):
        x.mul_(2)
        return self.net(x)


@pytest.mark.parametrize("options", WAYS)
def test_inputs_that_a_model_writes_to(options):
    """The user's tensor stays, and every pass sees the inputs as they were."""
    torch.manual_seed(0)
    model = Writes()
    x = torch.randn(6, 3).double()
    before, V = x.clone(), directions(model, 3)
    f, Js = dense.jacobians(model.net, 2 * x, list(model.parameters()))
    linearizer = linearize(model, **options)
    for _ in range(2):
        out = linearizer.features(x, V)
        assert_close(out.f, f)
        assert_close(out.phi, Js @ V.T)
    linearizer.outputs(x)
    linearizer.jacobian(x)
    assert torch.equal(x, before)


# --- the function ------------------------------------------------------------------


@pytest.mark.parametrize("options", WAYS)
def test_parameters_of_any_memory_layout(options):
    """channels_last and transposed parameters: order and numbers are the logical."""
    torch.manual_seed(0)
    model = CNN().double().eval().to(memory_format=torch.channels_last)
    model.fc.weight = nn.Parameter(torch.randn(12, 4).double().T)
    assert not model.fc.weight.is_contiguous()
    x = torch.randn(5, 1, 6, 6).double()
    fn, V = function(model), directions(model, 3)
    assert_close(
        fn.flat(), torch.cat([p.detach().flatten() for p in model.parameters()])
    )
    for piece, p in zip(fn.split(fn.flat()), model.parameters(), strict=True):
        assert torch.equal(piece, p)
    f, Js = dense.jacobians(model, x)
    out = linearize(model, **options).features(x, V)
    assert_close(out.f, f)
    assert_close(out.phi, Js @ V.T)


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
    fn = ModelFunction(model, names, torch.float64)
    assert fn.dtype is fn.parameters()[0].dtype is torch.float64
    linearizer = Linearizer(fn, dict_key_x="i")
    f, J, _ = linearizer.jacobian(x)
    assert next(model.parameters()).dtype is torch.float32
    assert ModelFunction(model, names).dtype is torch.float32
    assert ModelFunction(model.half(), names).dtype is torch.float32
    torch.manual_seed(0)
    exact = Embedded().double()
    params = list(exact.net.parameters())
    expected = dense.jacobians(exact, {**x, "v": x["v"].double()}, params)
    assert f.dtype is J.dtype is torch.float64
    assert_close(f, expected[0])
    assert_close(J, expected[1])


def test_pull_back():
    """uᵀJ, summed over the batch, for several u."""
    model, x = small(), torch.randn(6, 3).double()
    f, Js = dense.jacobians(model, x)
    u = torch.randn(2, 6, 4).double()
    outputs, rows = pull_back(function(model), x, lambda f: u)
    assert_close(outputs, f)
    assert_close(rows, torch.einsum("nbc,bcp->np", u, Js))
    assert pull_back(function(model), x, lambda f: u[:0])[1].shape == (0, Js.shape[-1])


# --- decisions ---------------------------------------------------------------------


class Trials:
    """The numbers of examples of all trials."""

    def __init__(self, monkeypatch):
        self.sizes = []

        def noted(way, n, measure):
            self.sizes.append(n)
            return attempt(way, n, measure)

        for user in (feature_passes, jacobian_passes, row_passes):
            monkeypatch.setattr(user, "attempt", noted)


def test_decisions_are_kept_for_each_rank(monkeypatch):
    """One for every rank, none lost; other options start anew."""
    trials = Trials(monkeypatch)
    model, x = small(), torch.randn(20, 3).double()
    linearizer = linearize(model)
    assert linearizer.modes(2) == Modes()
    for k in (2, 5):
        linearizer.features(x, directions(model, k))
    seen = len(trials.sizes)
    for k in (2, 5, 2):
        linearizer.features(x, directions(model, k))
        assert linearizer.modes(k).features is not None
    assert len(trials.sizes) == seen
    assert linearizer.modes(3).features is None
    other = linearizer.with_options(ComputeOptions(feature_mode="double_vjp"))
    other.features(x, directions(model, 2))
    assert other.modes(2).features is FeatureMode.DOUBLE_VJP
    assert other.layout is linearizer.layout


def test_decisions_under_autocast_are_others():
    """What was found without autocast says nothing about it."""
    model = CNN().eval()
    x, V = torch.randn(4, 1, 6, 6), directions(model, 2)
    linearizer = linearize(model)
    linearizer.features(x, V)
    chosen = linearizer.modes(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linearizer.modes(2) == Modes()
        linearizer.features(x, V)
        assert linearizer.modes(2).features is not None
    assert linearizer.modes(2) == chosen


def test_decisions_can_be_taken_over(monkeypatch):
    """In plain types, and without any trial afterwards."""
    model, x = small(), torch.randn(6, 3).double()
    first = linearize(model)
    first.features(x, directions(model, 2))
    first.jacobian(x)
    first.rows(x, torch.arange(6), torch.randn(6, 4).double())
    modes = first.modes(2)
    assert None not in (modes.features, modes.rows, modes.jacobians)
    assert all(isinstance(v, (str, bool)) for v in modes.to_dict().values())
    trials = Trials(monkeypatch)
    second = linearize(model)
    second.adopt(2, Modes.from_dict(modes.to_dict()))
    second.features(x, directions(model, 2))
    second.jacobian(x)
    second.rows(x, torch.arange(6), torch.randn(6, 4).double())
    assert not trials.sizes
    assert second.modes(2) == modes
    assert Modes.from_dict(Modes().to_dict()) == Modes()


def test_trials_are_as_large_as_the_passes(monkeypatch):
    """Batched ways are slow on one example and fast on hundreds."""
    trials = Trials(monkeypatch)
    model, x = small(), torch.randn(300, 3).double()
    linearize(model, feature_mode="forward").features(x, directions(model, 2))
    assert trials.sizes == [300, 300]
    trials.sizes.clear()
    linearize(model).jacobian(x)
    assert max(trials.sizes) == 300
    trials.sizes.clear()
    # A batch of one example is no hint that all batches are that small.
    linearize(model).jacobian(x[:1])
    assert max(trials.sizes) == FEWEST_EXAMPLES
    trials.sizes.clear()
    # What was asked for is tried, and not timed.
    linearize(model, row_mode="vmap").jacobian(x)
    assert trials.sizes == [1]


def test_sizes_follow_the_network():
    """Thousands of examples of a small network in a pass, a few of a large one."""
    little = PassSizes(101, 4, Activations(80, 400))
    resnet = PassSizes(269_722, 4, Activations(2**16, 3 * 2**20))
    assert little.examples_at_once(20) > 2_000
    assert little.rows_at_once(10) > 1_000
    # The sweet spot on CPUs with 32 MB of cache: 160 to 320 tangents.
    assert 128 <= 20 * resnet.examples_at_once(20) <= 400
    assert 1 <= resnet.examples_at_once(100) <= 4
    assert 4 <= resnet.rows_at_once(10) <= 16
    # One example with more tangents than that has them in blocks.
    assert resnet.tangents_at_once <= 400
    # So has one whose tangents are large: 4.9 MB each in EfficientNet-Lite0.
    efficientnet = PassSizes(4_652_008, 4, Activations(4_903_296, 10**8))
    assert 8 <= efficientnet.tangents_at_once <= 12
    assert PassSizes(10**6, 4, Activations(2**25, 10**9)).tangents_at_once == 1
    assert PassSizes(10**9, 4, Activations(1, 1)).rows_at_once(1000) == 1
    assert PassSizes(10**9, 4, Activations(1, 1)).outputs_at_once(1000) == 1
    assert little.outputs_at_once(10) == 10


def test_passes_without_room_for_gradients():
    resnet18 = PassSizes(11 * 10**6, 4, Activations(2**20, 2**25))
    assert resnet18.outputs_at_once(10) < 10
    # Activations of one example that are too many are so for each of its outputs.
    vit = PassSizes(2_400_000, 4, Activations(2**21, 2**28))
    assert vit.outputs_at_once(10) == 10
    assert replace(vit, budget=2**30).outputs_at_once(10) == 1


class Odd(nn.Module):
    """A weight that is used twice, one that is not used, a normalised layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3)
        self.unused, self.twice = nn.Linear(4, 5), nn.Linear(12, 12)
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        h = torch.tanh(self.norm(self.conv(x))).flatten(1)
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(h)))))


@pytest.mark.parametrize("large", [1, 30, 10**9])
@pytest.mark.parametrize("folds", [False, True])
def test_gradients_that_are_forgotten(large, folds, monkeypatch):
    """Features without whole gradients: those of large parameters, of all, of none."""
    monkeypatch.setattr(features, "LARGE_PARAMETER", large)
    torch.manual_seed(0)
    model = Odd().eval().double()
    model.norm.running_mean.normal_()
    x = torch.randn(3, 1, 4, 4).double()
    fn, V = function(model), directions(model, 4)
    J = dense.jacobians(model, x)[1]
    if folds:
        fn = FoldedFunction(fn, linearize(model).probe(x).folds)
        assert fn.folds
    batch, some = Batch.of(x, "input_ids"), torch.eye(3).double()[1:]
    f, phi = by_reverse_forgetting(fn, batch, fn.push(V), lambda f: some)
    assert_close(f, model(x))
    assert_close(phi, (J @ V.T)[:, 1:])


def test_features_without_whole_gradients_have_derivatives(monkeypatch):
    """A budget without room for them; values as those of the dense reference."""
    monkeypatch.setattr(features, "LARGE_PARAMETER", 1)
    calls = []

    def forgetting(*args):
        calls.append(args)
        return by_reverse_forgetting(*args)

    monkeypatch.setattr(feature_passes, "by_reverse_forgetting", forgetting)
    torch.manual_seed(0)
    model = Odd().eval().double()
    x, V = torch.randn(2, 1, 4, 4).double().requires_grad_(), directions(model, 3)
    derivatives = []
    for budget in (None, 2**10):  # with room and without
        linearizer = linearize(
            model, feature_mode="reverse", row_mode="vmap", memory_budget=budget
        )
        phi = linearizer.features(x, V, create_graph=True).phi
        assert bool(calls) == (budget is not None)
        assert_close(phi, dense.jacobians(model, x)[1] @ V.T)
        derivatives.append(torch.autograd.grad(phi.square().sum(), x)[0])
    assert_close(*derivatives)


class Alive(TorchDispatchMode):
    """How many results of some size are there at once."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.results, self.most = numel, weakref.WeakSet(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            if result.numel() == self.numel:
                self.results.add(result)
            self.most = max(self.most, len(self.results))
        return result


@pytest.mark.parametrize(
    ("way", "least", "most"), [(by_reverse, 12, 24), (by_reverse_forgetting, 1, 3)]
)
def test_gradients_of_one_parameter_at_a_time(way, least, most):
    """The memory of all gradients of a deep network is never taken."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)]
    model = nn.Sequential(*layers).eval()
    fn, V = function(model), directions(model, 3)
    batch, few = Batch.of(torch.randn(4, 64), "input_ids"), torch.eye(64)[:5]
    with torch.no_grad(), Alive(4 * 5 * 64 * 64) as alive:
        way(fn, batch, fn.push(V), lambda f: few)
    assert least <= alive.most <= most


class Convolutions(TorchDispatchMode):
    """Results of convolutions and of their derivatives, as they are in memory."""

    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "convolution" in str(func):
            results = result if isinstance(result, tuple) else (result,)
            self.results += [r for r in results if r is not None and r.ndim == 4]
        return result


def test_channels_last_inside():
    """Activations, tangents and cotangents keep the layout of the network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model.extend([nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(45, 2)])
    model = model.eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 7, 7).to(memory_format=torch.channels_last)
    fn, V = function(model), directions(model, 3)
    folded = FoldedFunction(fn, linearize(model).probe(x).folds)
    assert folded.folds
    batch, units = Batch.of(x, "input_ids"), lambda f: torch.eye(2)
    for way in (
        lambda: by_forward(fn, x, fn.push(V)),
        lambda: by_forward_loop(fn, x, fn.push(V)),
        lambda: by_reverse(fn, batch, fn.push(V), units),
        lambda: by_forward(folded, x, folded.push(V)),
        lambda: by_reverse(folded, batch, folded.push(V), units),
        lambda: by_reverse_forgetting(folded, batch, folded.push(V), units),
    ):
        with torch.no_grad(), Convolutions() as convolutions:
            way()
        # Gradients of weights have 3×3 pixels, as the second layer's outputs: left out.
        activations = [r for r in convolutions.results if r.shape[-1] > 3]
        assert activations
        layout = torch.channels_last
        assert all(r.is_contiguous(memory_format=layout) for r in activations)


def test_no_way_works():
    """The error says what each way said, and survives a process boundary."""

    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(3, 4)

        def forward(self, x):
            if torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack():
                raise RuntimeError("no derivative here")
            return self.net(x)

    model = Opaque()
    with pytest.raises(NotDifferentiableError, match="no derivative here") as error:
        linearize(model).features(torch.randn(2, 3), directions(model, 2))
    assert "forward" in error.value.said
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value)


# --- probes and empty batches ------------------------------------------------------


class Sequence(nn.Module):
    """Outputs at as many positions as there are tokens."""

    def __init__(self, first=False):
        super().__init__()
        self.net, self.first = mlp(3, 5, 4).double(), first

    def forward(self, x):
        f = self.net(x)
        return f.movedim(-1, 1) if self.first else f


def test_one_probe_for_every_kind_of_inputs():
    """Other lengths are other kinds; other numbers of examples are not."""
    model = Sequence()
    calls = []
    model.register_forward_hook(lambda *args: calls.append(args))
    linearizer = linearize(model, "channels_last")
    for B, T in ((4, 6), (2, 6), (3, 5), (4, 6)):
        probe = linearizer.probe(torch.randn(B, T, 3).double())
        assert probe.output_shape == (T, 4)
        assert 0 < probe.activations.largest <= probe.activations.total
    assert len(calls) == 2


@pytest.mark.parametrize("first", [False, True])
def test_positions_belong_to_their_call(first):
    """Results of inputs of other lengths are restored each to its own shape."""
    model = Sequence(first)
    layout = "channels_first" if first else "channels_last"
    linearizer, V = linearize(model, layout), directions(model, 2)
    short, long = (torch.randn(2, T, 3).double() for T in (3, 6))
    a, b = linearizer.features(short, V), linearizer.features(long, V)
    assert_close(a.positions.restore(a.f), model(short).detach())
    assert_close(b.positions.restore(b.f), model(long).detach())
    f, positions = linearizer.outputs(short)
    assert_close(f, a.f)
    assert positions == a.positions


def check_empty(linearizer, x, model):
    V = directions(model, 2)
    P = V.shape[1]
    out = linearizer.features_and_residual(x, V)
    assert out.f.shape == (0, 4)
    assert out.phi.shape == linearizer.features(x, V).phi.shape == (0, 4, 2)
    assert out.residual.shape == (0, 4, 4)
    f, J, positions = linearizer.jacobian(x)
    assert f.shape == (0, 4)
    assert J.shape == (0, 4, P)
    assert positions.output_shape == (4,)
    assert linearizer.outputs(x)[0].shape == (0, 4)
    nothing = torch.arange(0), torch.zeros(0, 4).double()
    assert linearizer.rows(x, *nothing).shape == (0, P)
    assert linearizer.project(x, torch.zeros(0, 3, 4), V).shape == (0, 3, 2)


class NeedsExamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(3, 5, 4).double()

    def forward(self, x):
        if not len(x):
            raise RuntimeError("no examples")
        return self.net(x)


def test_empty_batches():
    """From a remembered probe, from the model itself, or an error that says what is
    missing."""
    x = torch.randn(0, 3).double()
    check_empty(linearize(small()), x, small())
    model = NeedsExamples()
    linearizer = linearize(model)
    with pytest.raises(ValueError, match=r"empty batch.*at least one example"):
        linearizer.features(x, directions(model, 2))
    linearizer.probe(torch.randn(2, 3).double())
    check_empty(linearizer, x, model)
    check_empty(linearizer, x.float(), model)  # another kind: as the first one


# --- Jacobians and kernels in blocks -----------------------------------------------


@pytest.fixture(params=["whole", "examples", "positions", "pairs"])
def layout_of_work(request, monkeypatch):
    """From one pass to blocks that are smaller than one position's Jacobian."""
    P, C = 44, 4
    limit = {
        "whole": 2**28,
        "examples": 2 * 8 * P * 3 * C * 3,
        "positions": 2 * 8 * (P + 12) * 2 * C,
        "pairs": 2 * 8 * (P + 12) * 3,
    }[request.param]
    monkeypatch.setitem(sizes.PASS_BYTES, "cpu", limit)
    original = Linearizer.sizes

    def without_activations(self, probe):
        return original(self, Probe(probe.output_shape, Activations(0, 0)))

    monkeypatch.setattr(Linearizer, "sizes", without_activations)
    return request.param


@pytest.mark.parametrize("row_mode", ["vmap", "loop"])
@pytest.mark.parametrize("first", [False, True])
def test_blocks(layout_of_work, row_mode, first, monkeypatch):
    """Jacobians, reverse-mode features and kernels are the dense ones, however they
    are put together, and no pass has more rows than the budget allows."""
    torch.manual_seed(0)
    model = Sequence(first)
    x = torch.randn(3, 3, 3).double()
    layout = "channels_first" if first else "channels_last"
    linearizer = linearize(model, layout, feature_mode="reverse", row_mode=row_mode)
    V = directions(model, 3)
    P = V.shape[1]
    f, Js = dense.jacobians(lambda x: model(x).flatten(1), x, list(model.parameters()))
    most, original = [], JacobianPasses.run

    def run(self, mode, batch, numbers, create_graph):
        most.append(batch.size * len(numbers))
        return original(self, mode, batch, numbers, create_graph)

    monkeypatch.setattr(JacobianPasses, "run", run)
    outputs, J, positions = linearizer.jacobian(x)
    assert_close(outputs, f)
    assert_close(J, Js)
    rows = positions.rows(Js)  # (B·S, C, P)
    out = linearizer.features(x, V)
    assert_close(out.f, positions.rows(f))
    assert_close(out.phi, rows @ V.T)
    assert out.residual is None
    out = linearizer.features_and_residual(x, V)
    outside = rows - rows @ V.T @ V
    assert_close(out.f, positions.rows(f))
    assert_close(out.phi, rows @ V.T)
    assert_close(out.residual, outside @ outside.mT)
    # Of the largest outputs at each position only.
    largest = positions.rows(f).topk(2).indices
    among = rows.take_along_dim(largest.unsqueeze(-1), 1)
    rest = among - among @ V.T @ V
    for out in (
        linearizer.features(x, V, top=2),
        linearizer.features_and_residual(x, V, top=2),
    ):
        assert torch.equal(out.outputs, largest)
        assert_close(out.f, positions.rows(f))
        assert_close(out.phi, among @ V.T)
    assert_close(out.residual, rest @ rest.mT)
    # Under a prior that is not scalar: the part of JD⁻¹Jᵀ that no V explains.
    w = torch.rand(P).double()
    inverse = torch.linalg.inv((V * w) @ V.T)
    out = linearizer.features_and_residual(x, V, Metric(w, inverse))
    phi = (rows * w) @ V.T
    assert_close(out.phi, phi)
    assert_close(out.residual, (rows * w) @ rows.mT - phi @ inverse @ phi.mT)
    expected = {"whole": 36, "examples": 36, "positions": 8, "pairs": 3}
    assert max(most) <= expected[layout_of_work]


def test_residuals_that_cannot_fit_are_refused_before_any_work():
    """The error has the number, and the model has seen one example."""
    model = mlp(2, 1, 20_000)
    calls = []
    linearizer = linearize(model, memory_budget="1 GB")
    V = directions(model, 1)
    model.register_forward_hook(lambda *args: calls.append(args))
    with pytest.raises(InsufficientMemoryError, match=r"1\.6 GB.*1\.0 GB"):
        linearizer.features_and_residual(torch.randn(1, 2), V)
    with pytest.raises(InsufficientMemoryError, match="Jacobians"):
        linearizer.jacobian(torch.randn(3, 2))
    assert len(calls) == 1


def test_the_residual_does_not_cancel():
    """J nearly in the span of V: the part outside keeps its digits, in float32."""
    torch.manual_seed(0)
    model = nn.Linear(40_000, 1, bias=False)
    V = directions(model, 3)
    x = 100 * torch.randn(4, 3) @ V + 1e-2 * torch.randn(4, 40_000)
    out = linearize(model).features_and_residual(x, V)
    J, V64 = x.double().unsqueeze(1), V.double()
    outside = J - J @ V64.T @ V64
    expected = outside @ outside.mT
    error = (out.residual.double() - expected).abs() / expected
    assert (out.residual > 0).all()
    # of J rounded to float32: ‖J‖ eps against a residual of norm 2
    assert error.max() < 1e-4
    difference = (x * x).sum(-1)[:, None, None] - out.phi @ out.phi.mT
    assert ((difference.double() - expected).abs() / expected).max() > 10 * error.max()


def test_long_sums_keep_their_digits():
    """A residual over many parameters is right to a few float32 roundings."""
    torch.manual_seed(0)
    model = nn.Linear(300_000, 1, bias=False)
    x = torch.rand(3, 300_000)  # nothing cancels, every rounding adds up
    V = torch.zeros(1, 300_000)
    V[0, 0] = 1
    residual = linearize(model).features_and_residual(x, V).residual
    expected = x[:, 1:].double().square().sum(-1)
    error = (residual.double().flatten() - expected).abs() / expected
    assert error.max() < 4 * torch.finfo(torch.float32).eps


# --- graphs ------------------------------------------------------------------------


@pytest.mark.parametrize("options", WAYS)
def test_no_graph_where_the_user_wants_none(options):
    """create_graph has no effect under torch.no_grad()."""
    model, V = small(), directions(small(), 2)
    x = torch.randn(3, 3).double().requires_grad_()
    linearizer = linearize(model, **options)

    def results():
        out = linearizer.features(x, V, create_graph=True)
        kernel = linearizer.features_and_residual(x, V, create_graph=True)
        f, J, _ = linearizer.jacobian(x, create_graph=True)
        return out.f, out.phi, kernel.f, kernel.phi, kernel.residual, f, J

    assert all(t.requires_grad for t in results())
    with torch.no_grad():
        assert not any(t.requires_grad for t in results())


@pytest.mark.parametrize("options", WAYS)
def test_graph_of_the_inputs(options):
    """Features and kernels can be differentiated in x, as the dense ones."""
    model = mlp(2, 3, 2).double()
    V = directions(model, 2)
    linearizer = linearize(model, **options)

    def values(x):
        phi = linearizer.features(x, V, create_graph=True).phi
        return phi, linearizer.features_and_residual(x, V, create_graph=True).residual

    x = torch.randn(2, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(values, (x,))


def test_turned_images():
    """Inputs whose channels come last in memory, of a network whose do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model.extend([nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(45, 2)])
    model = model.double().eval()
    x = torch.randn(3, 7, 7, 3).double().permute(0, 3, 1, 2)
    V, (_, Js) = directions(model, 3), dense.jacobians(model, x)
    for way in WAYS:
        inputs = x.clone().requires_grad_()
        phi = linearize(model, **way).features(inputs, V, create_graph=True).phi
        assert_close(phi, Js @ V.T)
        assert torch.autograd.grad(phi.sum(), inputs)[0].shape == x.shape
    linearizer = linearize(model, feature_mode="reverse", row_mode="vmap")
    linearizer.features(x, V)
    with torch.no_grad(), Convolutions() as convolutions:
        linearizer.features(x, V)
    assert all(r.is_contiguous() for r in convolutions.results if r.shape[-1] > 3)
