"""Normalisations folded into convolutions: the same features, found by what a forward
pass does."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from laplace_ella.derivatives import feature_passes, row_passes
from laplace_ella.derivatives.folding import FoldedFunction
from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.options import ComputeOptions
from laplace_ella.posterior.basis import RowSketch
from tests import dense
from tests.fitting import assert_close

WAYS = [
    {"feature_mode": "forward"},
    {"feature_mode": "reverse", "row_mode": "vmap"},
    {"feature_mode": "reverse", "row_mode": "loop"},
    {"feature_mode": "double_vjp"},
]


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Folded although the networks are too small for it to pay."""
    for passes in (feature_passes, row_passes):
        monkeypatch.setattr(passes, "WORTH_FOLDING", 0.0)


class Block(nn.Module):
    """Two normalised convolutions beside a shortcut, one of them depthwise."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 1)
        self.norm2 = nn.BatchNorm2d(4, eps=0.1)

    def forward(self, x):
        inside = self.norm2(self.second(self.norm1(self.first(x)).relu()))
        inside += x
        return inside.relu_()


class Peeking(nn.Module):
    """The output of the convolution is looked at before it is normalised."""

    def __init__(self, peek):
        super().__init__()
        self.conv, self.norm, self.peek = nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), peek

    def forward(self, x):
        z = self.conv(x)
        return self.norm(z) + self.peek(self, z)


class Twice(nn.Module):
    """One convolution with two normalisations."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x):
        return self.norms[0](self.conv(x)).relu() + self.norms[1](self.conv(2 * x))


def head(*layers):
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


MODELS = {
    "plain": (
        lambda: head(nn.Conv2d(2, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        1,
    ),
    "bias": (lambda: head(nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4)), 1),
    "without scale": (
        lambda: head(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4, affine=False)),
        1,
    ),
    "blocks": (lambda: head(nn.Conv2d(2, 4, 2), Block(), Block()), 4),
    "one dimension": (
        lambda: head(nn.Flatten(2), nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3)),
        1,
    ),
    "three dimensions": (
        lambda: head(nn.Unflatten(1, (1, 2)), nn.Conv3d(1, 3, 2), nn.BatchNorm3d(3)),
        1,
    ),
    "before the convolution": (
        lambda: head(nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 4, 2)),
        0,
    ),
    "linear": (lambda: head(nn.Flatten(), nn.Linear(32, 5), nn.BatchNorm1d(5)), 0),
    "something between": (
        lambda: head(nn.Conv2d(2, 4, 2), nn.ReLU(), nn.BatchNorm2d(4)),
        0,
    ),
    "shared convolution": (lambda: head(Twice()), 0),
    "output used elsewhere": (lambda: head(Peeking(lambda m, z: 0.1 * z.sin())), 0),
    "values read": (lambda: head(Peeking(lambda m, z: z.detach().cos())), 0),
    "weight used elsewhere": (
        lambda: head(Peeking(lambda m, z: 0.1 * m.conv.weight.sum())),
        0,
    ),
    "shape asked for": (lambda: head(Peeking(lambda m, z: 1 / z.shape[1])), 1),
}


def make(name, dtype=torch.float64):
    """A model with statistics and scales as training leaves them, and inputs."""
    torch.manual_seed(0)
    build, n_folds = MODELS[name]
    model, x = build().to(dtype), torch.randn(5, 2, 4, 4, dtype=dtype)
    model.eval()(x)  # the size of the last layer
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                for tensor in (module.running_mean, module.bias):
                    if tensor is not None:
                        tensor.normal_()
                for tensor in (module.running_var, module.weight):
                    if tensor is not None:
                        tensor.uniform_(0.2, 2.0)
                if module.weight is not None:
                    module.weight[0] = 0.0  # a channel that was switched off
    return model, x, n_folds


def linearize(model, names=None, **options):
    names = names or [name for name, _ in model.named_parameters()]
    return Linearizer(ModelFunction(model, names), options=ComputeOptions(**options))


def directions(n_params, k=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    A = torch.randn(n_params, k, generator=g, dtype=torch.float64)
    return torch.linalg.qr(A)[0].T.to(dtype)


def all_rows(linearizer, x, n_outputs):
    """Gradients of all outputs of all examples, (B, C, P)."""
    examples = torch.arange(len(x)).repeat_interleave(n_outputs)
    units = torch.eye(n_outputs).repeat(len(x), 1)
    return linearizer.rows(x, examples, units).unflatten(0, (len(x), n_outputs))


@pytest.mark.parametrize("name", MODELS)
def test_found_and_the_same_features(name):
    """What can be folded is, and features are the dense J(x)V in every mode."""
    model, x, n_folds = make(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    f, Js = dense.jacobians(model, x)
    V = directions(Js.shape[-1])
    for way in WAYS:
        linearizer = linearize(model, **way)
        assert len(linearizer.probe(x).folds) == n_folds
        features = linearizer.features(x, V)
        assert_close(features.f, f, rtol=1e-10, atol=1e-10)
        assert_close(features.phi, Js @ V.T, rtol=1e-9, atol=1e-10)
    rows = all_rows(linearize(model, row_mode="vmap"), x, f.shape[-1])
    assert_close(rows, Js, rtol=1e-9, atol=1e-10)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("chosen", "n_folds"),
    [
        (["1.second.weight"], 4),  # its bias and normalisation are constants
        (["1.first.weight", "1.norm1.bias"], 4),
        (["1.norm1.weight", "1.norm2.bias"], 2),  # stays a posterior of a few numbers
        (["0.weight", "5.weight"], 4),
    ],
)
def test_some_parameters(chosen, n_folds):
    """Folded where the weight has a posterior, or nothing of the layer has."""
    model, x, _ = make("blocks")
    linearizer = linearize(model, chosen, feature_mode="reverse")
    folded = FoldedFunction(linearizer.fn, linearizer.probe(x).folds)
    assert len(folded.folds) == n_folds
    params = [dict(model.named_parameters())[name] for name in chosen]
    _, Js = dense.jacobians(model, x, params)
    V = directions(Js.shape[-1], 2)
    for way in WAYS:
        phi = linearize(model, chosen, **way).features(x, V).phi
        assert_close(phi, Js @ V.T, rtol=1e-9, atol=1e-10)
    rows = all_rows(linearize(model, chosen, row_mode="vmap"), x, Js.shape[1])
    assert_close(rows, Js, rtol=1e-9, atol=1e-10)


def test_directions_are_pushed_by_the_derivative():
    """By hand as by torch.func, and shapes belong to the folded parameters."""
    model, x, _ = make("blocks")
    fn = linearize(model).fn
    folded = FoldedFunction(fn, linearize(model).probe(x).folds)
    V = directions(sum(fn.numels()), 3)
    pushed = folded.push(V)
    for k in range(3):
        _, expected = torch.func.jvp(
            lambda *p: folded._fold(p), fn.parameters(), fn.split(V[k])
        )
        for have, want in zip(pushed, expected, strict=True):
            assert_close(have[k], want, rtol=1e-12, atol=1e-12)
    # ⟨g, push(v)⟩ = ⟨pull(g), v⟩ for all g and v
    gradients = [torch.randn(2, *shape).double() for shape in folded.shapes()]
    pulled = torch.empty(2, fn.n_params).double()
    folded.pull(gradients, pulled)
    pairs = zip(gradients, pushed, strict=True)
    products = sum(g.flatten(1) @ p.flatten(1).T for g, p in pairs)
    assert_close(pulled @ V.T, products, rtol=1e-12, atol=1e-12)
    assert [p.shape for p in folded.parameters()] == folded.shapes()
    assert [p.shape[1:] for p in pushed] == folded.shapes()


def test_a_model_that_changed_is_not_folded():
    """A hook that comes later sees what the convolution returns, and one after the
    normalisation has its effect."""
    model, x, _ = make("plain")
    linearizer = linearize(model, feature_mode="reverse", row_mode="loop")
    V = directions(linearizer.n_params)
    before = linearizer.features(x, V)
    assert linearizer.probe(x).folds
    seen = []
    handle = model[0].register_forward_hook(lambda *args: seen.append(args[2]))
    assert_close(linearizer.features(x, V).phi, before.phi, rtol=1e-9, atol=1e-10)
    handle.remove()
    assert_close(torch.cat(seen[-5:]), model[0](x), rtol=1e-10, atol=1e-10)

    handle = model[1].register_forward_hook(lambda m, i, o: o + i[0].sin())
    _, Js = dense.jacobians(model, x)
    features = linearizer.features(x, V)
    assert not FoldedFunction(linearizer.fn, linearizer.probe(x).folds).folds
    handle.remove()
    assert_close(features.phi, Js @ V.T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("where", ["pre", "after", "everywhere"])
def test_hooks_see_what_the_convolution_returns(where):
    """Also one that only stores what the normalisation gets."""
    model, x, _ = make("plain")
    linearizer = linearize(model, feature_mode="reverse", row_mode="loop")
    V, seen = directions(linearizer.n_params), []

    def store(module, inputs, *output):
        if module is model[1]:
            seen.append(inputs[0])

    register = {
        "pre": model[1].register_forward_pre_hook,
        "after": model[1].register_forward_hook,
        "everywhere": nn.modules.module.register_module_forward_hook,
    }[where]
    handle = register(store)
    linearizer.features(x, V)
    handle.remove()
    assert_close(torch.cat(seen[-5:]), model[0](x), rtol=1e-10, atol=1e-10)


def test_a_unit_on_its_kink(monkeypatch):
    """Rounding decides on which side it is, which is no reason not to fold: in double
    precision both agree."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1)
    model = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)).eval()
    model.float()
    for _ in range(200):
        w, mean, scale, shift = torch.rand(4).add(0.5).float()
        with torch.no_grad():
            conv.weight.fill_(w)
            norm.running_mean.fill_(mean)
            norm.weight.fill_(scale)
            norm.bias.fill_(shift)
            kink = (mean - shift / scale * (1 + norm.eps) ** 0.5) / w
        x = kink.expand(1, 1, 2, 2)
        units = torch.eye(2)[:1].float()
        linearizer = linearize(model, row_mode="vmap")
        rows = linearizer.rows(x, torch.arange(1), units)
        assert linearizer.probe(x).folds  # the check was passed
        with monkeypatch.context() as patch:
            patch.setattr(row_passes, "WORTH_FOLDING", math.inf)
            plain = linearizer.rows(x, torch.arange(1), units)
        if float((rows - plain).abs().max()) > 1e-2:
            return
    pytest.fail("no input was found that rounding decides on")


def test_gradients_of_inputs_that_require_grad():
    """Rows are no functions of the inputs: they are those of other inputs."""
    model, x, _ = make("plain")
    units = torch.eye(3)[:1].expand(len(x), -1)
    expected = dense.jacobians(model, x)[1][:, 0]
    rows = linearize(model, row_mode="vmap").rows(
        x.clone().requires_grad_(), torch.arange(len(x)), units
    )
    assert_close(rows, expected, rtol=1e-9, atol=1e-10)


def test_gradients_of_a_model_that_changes_on_the_way():
    """Those that are there stay, the rest is not folded, and all are written where they
    are gathered."""
    model, x, _ = make("plain")
    linearizer = linearize(model, row_mode="vmap", chunk_size=2)
    f, Js = dense.jacobians(model, x)
    n, P = len(x), Js.shape[-1]
    sketch = RowSketch((P,), n + 1, n, torch.float64, torch.device("cpu"))
    units = torch.eye(f.shape[1])[:1].expand(n, -1)
    chunks = linearizer.row_chunks(x, torch.arange(n), units, room=sketch.room)
    sketch.add(next(chunks))
    assert linearizer.probe(x).folds
    seen = []  # sums of what the convolution returns, which nothing else may use
    handle = model[0].register_forward_hook(lambda *args: seen.append(args[2].sum()))
    for rows in chunks:
        assert rows.data_ptr() == sketch.buffer[sketch.filled].data_ptr()
        sketch.add(rows)
    handle.remove()
    assert seen
    assert not linearizer.probe(x).folds
    assert sketch.n_samples == n
    assert_close(sketch.buffer[:n], Js[:, 0], rtol=1e-9, atol=1e-10)
    assert_close(sketch.energy, Js[:, 0].square().sum(), rtol=1e-12, atol=0)


class Hidden(nn.Module):
    """Does what no mode sees."""

    def __init__(self, run):
        super().__init__()
        self.conv, self.norm, self.run = nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), run
        self.kept = None

    def forward(self, x):
        return self.run(self, x)


def recomputed(m, x):
    return checkpoint(lambda x: m.norm(m.conv(x)).relu(), x, use_reentrant=False)


def kept_aside(m, x):
    z = m.conv(x)
    m.kept = m.norm(z)
    return z


def half_without_graph(m, x):
    with torch.no_grad():
        z = m.conv(x)
    return m.norm(z)


@pytest.mark.parametrize("run", [recomputed, kept_aside, half_without_graph])
def test_what_cannot_be_seen_is_compared(run):
    """One example's features tell, before any others are used."""
    torch.manual_seed(0)
    last = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    model = nn.Sequential(Hidden(run), *([] if run is kept_aside else [nn.Tanh()]))
    model = model.extend(last).double().eval()
    x = torch.randn(5, 2, 4, 4).double()
    model(x)
    f, Js = dense.jacobians(model, x)
    V = directions(Js.shape[-1])
    for way in ({"feature_mode": "reverse", "row_mode": "loop"}, {}):
        if run is half_without_graph and not way:
            continue  # forward mode goes through no_grad, folded or not
        features = linearize(model, **way).features(x, V)
        assert_close(features.f, f, rtol=1e-10, atol=1e-10)
        assert_close(features.phi, Js @ V.T, rtol=1e-9, atol=1e-10)
    mode = "loop" if run is recomputed else "vmap"  # which cannot recompute
    rows = all_rows(linearize(model, row_mode=mode), x, f.shape[-1])
    assert_close(rows, Js, rtol=1e-9, atol=1e-10)


def test_every_output_is_compared():
    """What one output does shows, whichever gradients are asked for first."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4))
            self.second = Hidden(half_without_graph)

        def forward(self, x):
            heads = [h(x).sin().flatten(1).mean(1) for h in (self.first, self.second)]
            return torch.stack(heads, 1)

    torch.manual_seed(0)
    model, x = Heads().double().eval(), torch.randn(5, 2, 4, 4).double()
    _, Js = dense.jacobians(model, x)
    rows = all_rows(linearize(model, row_mode="vmap"), x, 2)
    assert_close(rows, Js, rtol=1e-9, atol=1e-10)


def test_precision_inside_is_left_as_it_is():
    """Frozen layers in low precision, and autocast that the model switches on."""
    torch.manual_seed(0)
    x = torch.randn(5, 2, 4, 4)

    class Mixed(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4)).to(dtype)
            self.head, self.dtype = nn.Linear(36, 3), dtype

        def forward(self, x):
            autocast = self.dtype is torch.float32
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                x = self.body(x.to(self.dtype))
            return self.head(x.float().flatten(1))

    for dtype in (torch.bfloat16, torch.float32):
        model = Mixed(dtype).eval()
        linearizer = linearize(model, ["head.weight", "head.bias"])
        V = directions(linearizer.n_params, 3, torch.float32)
        assert torch.equal(linearizer.features(x, V).f, model(x))


class Switch(nn.Module):
    """Does something else with a tensor that is folded where its inputs are large."""

    def __init__(self, other):
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), other

    def forward(self, x):
        if float(x.detach().sum()) < 10:
            return self.norm(self.conv(x))
        return self.other(self, x)


def used_before(m, x):
    z = m.conv(x)
    return z.sin() + m.norm(z)


def used_after(m, x):
    z = m.conv(x)
    y = m.norm(z)
    return y + z.sin()


def other_eps(m, x):
    norm, y = m.norm, m.conv(x)
    stats = norm.running_mean, norm.running_var, norm.weight, norm.bias
    return nn.functional.batch_norm(y, *stats, eps=0.5)


OTHERS = {
    "not normalised": lambda m, x: m.conv(x),
    "used before": used_before,
    "used after": used_after,
    "convolved twice": lambda m, x: m.norm(m.conv(x)) + m.norm(m.conv(x.flip(-1))),
    "another convolution's": lambda m, x: m.norm(m.conv(x) + m.conv(x.flip(-1))),
    "weight read": lambda m, x: m.norm(m.conv(x)) + m.conv.weight.square().sum(),
    "scale read": lambda m, x: m.norm(m.conv(x)) + m.norm.weight.square().sum(),
    "other eps": other_eps,
    "other bias": lambda m, x: m.norm(nn.functional.conv2d(x, m.conv.weight)),
    "by keywords": lambda m, x: m.norm(
        nn.functional.conv2d(input=x, weight=m.conv.weight, bias=m.conv.bias)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_goes_by_its_inputs(name):
    """What the first pass did not do is right, too, and other inputs afterwards."""
    torch.manual_seed(0)
    model = head(Switch(OTHERS[name])).double().eval()
    x = torch.randn(5, 2, 4, 4).double()
    model(x)
    low, high = x - x.mean(), x + 5.0
    for way in ({"feature_mode": "forward"}, {"feature_mode": "double_vjp"}):
        linearizer = linearize(model, **way)
        for inputs in (low, high, low):
            f, Js = dense.jacobians(model, inputs)
            V = directions(Js.shape[-1])
            features = linearizer.features(inputs, V)
            assert_close(features.f, f, rtol=1e-10, atol=1e-10)
            assert_close(features.phi, Js @ V.T, rtol=1e-9, atol=1e-10)
        assert bool(linearizer.probe(low).folds) == (name == "convolved twice")


def test_gradients_in_the_inputs():
    """Features of a folded model can be differentiated."""
    model, x, _ = make("blocks")
    for way in WAYS:
        results = []
        for folded in (True, False):
            inputs = x.clone().requires_grad_()
            linearizer = linearize(model, **way)
            if not folded:  # something that reads the output of every convolution
                hooks = [
                    m.register_forward_hook(lambda *args: (args[2].sum(), None)[1])
                    for m in model.modules()
                    if isinstance(m, nn.Conv2d)
                ]
            V = directions(linearizer.n_params)
            phi = linearizer.features(inputs, V, create_graph=True).phi
            assert bool(linearizer.probe(inputs).folds) == folded
            results.append(torch.autograd.grad(phi.sin().sum(), inputs)[0])
        for hook in hooks:
            hook.remove()
        assert_close(*results, rtol=1e-9, atol=1e-10)


def test_low_precision_is_left_as_it_is(monkeypatch):
    """Half the digits are those of the model's own weights, and autocast's too."""
    made = []
    original = FoldedFunction.__init__

    def noted(self, *args):
        made.append(self)
        original(self, *args)

    monkeypatch.setattr(FoldedFunction, "__init__", noted)
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        model, x, _ = make("blocks", dtype)
        linearizer = linearize(model, feature_mode="reverse", row_mode="loop")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            linearizer.features(x, directions(linearizer.n_params, 2, torch.float32))
        assert not made
    model, x, _ = make("blocks", torch.float32)
    linearizer = linearize(model, feature_mode="forward")
    linearizer.features(x, directions(linearizer.n_params, 2, torch.float32))
    assert made


def test_folded_where_it_pays(monkeypatch):
    """Few inputs of a network with large weights are not worth another form of all
    directions."""
    monkeypatch.undo()
    model = head(nn.Conv2d(2, 32, 3, padding=1), nn.BatchNorm2d(32)).eval()
    x = torch.randn(64, 2, 4, 4)
    model(x)
    linearizer = linearize(model, feature_mode="forward")
    V = directions(linearizer.n_params, 3, torch.float32)
    pushed, original = [], FoldedFunction.push
    monkeypatch.setattr(
        FoldedFunction, "push", lambda *args: pushed.append(1) or original(*args)
    )
    single = linearizer.features(x[:1], V)
    assert len(pushed) == 1  # to compare
    many = linearizer.features(x, V)
    assert len(pushed) == 2
    assert_close(many.phi[:1], single.phi, rtol=1e-4, atol=1e-5)
    # Gradients go by the activations of one example.
    pulled, pull = [], FoldedFunction.pull
    monkeypatch.setattr(
        FoldedFunction, "pull", lambda *args: pulled.append(1) or pull(*args)
    )
    for size, pays in ((1, False), (8, True)):
        wide = head(nn.Conv2d(2, 32, size), nn.BatchNorm2d(32), nn.AvgPool2d(2)).eval()
        inputs = torch.randn(3, 2, size + 1, size + 1)
        wide(inputs)
        all_rows(linearize(wide, row_mode="vmap"), inputs, 3)
        assert bool(pulled) is not pays  # 8×8 weights for four positions
        pulled.clear()
    # Nor is a copy of the directions that does not fit.
    linearizer = linearize(model, feature_mode="reverse", memory_budget=40_000)
    pushed.clear()
    linearizer.features(x, V)
    assert len(pushed) == 1
