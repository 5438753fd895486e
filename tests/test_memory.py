"""The memory estimate, and what is never allocated."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from laplace_ella import (
    EarlyStopping,
    ELLALaplace,
    ELLALLLaplace,
    FeatureCache,
    InsufficientMemoryError,
    MemoryEstimate,
)
from laplace_ella.derivatives.sizes import activation_bytes
from laplace_ella.support.resources import parse_bytes
from tests.cases import CASES, make, mlp
from tests.fitting import assert_close, build, fit

# --- budgets -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8 GB", 8 * 10**9),
        ("8GB", 8 * 10**9),
        ("2GiB", 2 * 2**30),
        ("2 GiB", 2 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5 kB", 1500),
        ("3 TB", 3 * 10**12),
        ("16 MiB", 16 * 2**20),
        ("1000", 1000),
        ("1000 B", 1000),
        (12345, 12345),
        (1e9, 10**9),
    ],
)
def test_parse_bytes(text, expected):
    """Decimal and binary units, and plain numbers of bytes."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "budget",
    [
        *("lots", "", "GB", "8 XB", "1.2.3 GB", "-1 GB", "0 GB"),
        *(-1, 0, 0.0, True, float("nan"), float("inf"), [8]),
    ],
)
def test_invalid_budgets(budget):
    """The constructor refuses them by name, with what came."""
    case = make("classification_mlp")
    with pytest.raises(ValueError, match="memory_budget"):
        build(case, memory_budget=budget)


# --- the estimate ------------------------------------------------------------------


@pytest.fixture(params=CASES)
def case(request):
    return make(request.param)


@pytest.mark.parametrize("m", [7, 10**6])
def test_estimate(case, m):
    """K directions and M gradients of P float64 numbers, counted exactly."""
    la = build(case, subsample_size=m, memory_budget="1 GB")
    memory = la.estimate_memory(case.loader())
    n_pairs = len(case.x) * case.model(case.x[:1]).shape[1]
    assert isinstance(memory, MemoryEstimate)
    assert memory.n_samples == min(m, n_pairs)
    assert memory.basis == 8 * 6 * case.n_params
    assert memory.rows >= 8 * memory.n_samples * case.n_params
    assert memory.pass_ > 0
    assert memory.budget == 10**9
    assert memory.method == "exact"
    assert memory.fits
    assert memory.needed <= memory.total <= memory.budget


def test_estimate_of_another_device(case):
    """A basis kept elsewhere counts there, and the passes do not."""
    here = build(case).estimate_memory(case.loader())
    there = build(case, basis_device="meta").estimate_memory(case.loader())
    assert there.basis == here.basis
    assert here.pass_ > there.pass_ == 0


def test_estimate_is_readable(case):
    """Printed, it has a line for each part and for the whole, in units."""
    text = str(build(case, memory_budget="2 GB").estimate_memory(case.loader()))
    assert "2.0 GB" in text
    assert "exact" in text
    assert len(text.splitlines()) >= 5


def test_estimate_fits_nothing(case):
    """It takes one forward pass of one example and leaves the object unfitted."""
    calls = []
    forward = case.model.forward

    def counted(x):
        calls.append((len(x), torch.is_grad_enabled()))
        return forward(x)

    case.model.forward = counted
    la = build(case)
    state = torch.get_rng_state()
    la.estimate_memory(case.loader(shuffle=True))
    assert calls == [(1, False)]
    assert la.basis is None
    assert torch.equal(torch.get_rng_state(), state)


def test_estimate_grows_as_the_fit_does():
    """Twice the directions, samples or parameters take twice their part."""

    def estimate(width=8, **kwargs):
        model = mlp(4, width, 3)
        x, y = torch.randn(200, 4), torch.randint(3, (200,))
        options = {"subsample_size": 50, "n_eigenvalues": 5} | kwargs
        la = ELLALaplace(model, "classification", **options)
        return la.estimate_memory(DataLoader(TensorDataset(x, y), 20))

    base = estimate()
    assert base.basis == 4 * 5 * 67
    assert estimate(n_eigenvalues=10).basis == 2 * base.basis
    assert estimate(subsample_size=100).basis == base.basis
    assert estimate(subsample_size=100).rows > 1.8 * base.rows
    assert estimate(subsample_size=100).sketch == base.sketch
    # From 8·8+3 to 16·8+3 parameters.
    assert estimate(width=16).basis == 4 * 5 * 131
    assert estimate(chunk_size=1).pass_ < base.pass_


# --- refusal -----------------------------------------------------------------------


def refuse_gradients(model):
    """Make every backward pass through the model an error."""

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            raise AssertionError("a backward pass was made")

        @staticmethod
        def jvp(ctx, tangent):
            raise AssertionError("a tangent was pushed")

        @staticmethod
        def vmap(info, in_dims, x):
            return Refusing.apply(x), in_dims[0]

    forward = model.forward
    model.forward = lambda x: Refusing.apply(forward(x))


REMEDIES = ("n_eigenvalues", "chunk_size", "basis_dtype", "basis_device")


def test_refused_before_any_derivative(case):
    """The error tells need, budget and remedies; nothing was differentiated."""
    refuse_gradients(case.model)
    la = build(case, memory_budget="1 kB")
    needed = la.estimate_memory(case.loader()).needed
    with pytest.raises(InsufficientMemoryError) as error:
        la.fit(case.loader())
    message = str(error.value)
    assert isinstance(error.value, MemoryError)
    unit = f"{needed / 1e6:.1f} MB" if needed >= 1e6 else f"{needed / 1e3:.0f} kB"
    assert unit in message
    assert "1 kB" in message
    assert "memory_budget" in message
    for remedy in REMEDIES:
        assert remedy in message
    assert la.basis is None


def test_a_refused_fit_loses_nothing(case):
    """The posterior of the fit before is still there."""
    la = fit(case)
    basis, expected = la.basis, la.H.clone()
    la.memory_budget = "1 kB"
    with pytest.raises(InsufficientMemoryError):
        la.fit(case.loader())
    assert la.basis is basis
    assert_close(la.H, expected, rtol=0, atol=0)


def test_what_is_needed_is_enough(case):
    """A fit within exactly the bytes that the estimate calls needed is not refused."""
    la = build(case)
    for _ in range(10):  # passes shrink with the budget
        la.memory_budget = la.estimate_memory(case.loader()).needed
    assert la.estimate_memory(case.loader()).fits
    la.fit(case.loader())
    la.memory_budget -= 1
    with pytest.raises(InsufficientMemoryError):
        la.fit(case.loader())


@pytest.mark.parametrize(
    ("remedy", "base"),
    [
        ({"chunk_size": 1}, {}),
        ({"n_eigenvalues": 2}, {"chunk_size": 1}),
        ({"basis_dtype": torch.bfloat16}, {"chunk_size": 1}),
    ],
    ids=["chunk_size", "n_eigenvalues", "basis_dtype"],
)
def test_remedies_help(remedy, base):
    """What the error advises lowers the need."""
    model = mlp(4, 32, 3)
    x, y = torch.randn(100, 4), torch.randint(3, (100,))
    loader = DataLoader(TensorDataset(x, y), 20)

    def needed(**kwargs):
        la = ELLALaplace(model, "classification", **kwargs)
        return la.estimate_memory(loader).needed

    assert needed(**base, **remedy) < needed(**base)


def test_views_of_weights_are_no_activations():
    """A wide linear layer's activations are its outputs, not its weights."""
    model = mlp(500, 500, 3)
    _, activations = activation_bytes(model, torch.randn(1, 500))
    # Two outputs of 500 numbers and one of 3, in float32; some operators return copies.
    assert 4 * 500 <= activations.largest <= 2 * 4 * 500
    assert activations.total <= 5 * 4 * 1003


def test_freezing_helps():
    """Fewer trainable parameters need less."""
    model = mlp(4, 32, 3)
    x, y = torch.randn(100, 4), torch.randint(3, (100,))
    loader = DataLoader(TensorDataset(x, y), 20)
    before = ELLALaplace(model, "classification").estimate_memory(loader)
    model[0].requires_grad_(False)
    after = ELLALaplace(model, "classification").estimate_memory(loader)
    assert after.basis == before.basis * 99 // 259
    assert after.needed < before.needed


def test_default_budget_is_what_is_free():
    """Without a budget it is positive, and no more than the machine has free."""
    import os

    case = make("classification_mlp")
    budget = build(case).estimate_memory(case.loader()).budget
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < budget <= total


# --- many outputs ------------------------------------------------------------------

B, C, K, WIDTH = 32, 1000, 5, 8
SAMPLES_AT_ONCE = 2**24
"""Numbers that Monte-Carlo samples may take at once, whatever S, B and C are."""


class Largest(TorchDispatchMode):
    """The shape of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.shape = torch.Size([0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                if leaf.numel() > self.shape.numel():
                    self.shape = leaf.shape
        return result

    def assert_below(self, limit):
        assert 0 < self.shape.numel() < limit, tuple(self.shape)


@pytest.fixture(scope="module")
def many_outputs():
    """A classifier of 1,000 classes with its data; P is 9,040."""
    g = torch.Generator().manual_seed(0)
    model = mlp(4, WIDTH, C).eval()
    x = torch.randn(2 * B, 4, generator=g)
    y = torch.randint(C, (2 * B,), generator=g)
    return model, DataLoader(TensorDataset(x, y), batch_size=B)


def many_outputs_ella(model, **kwargs):
    options = {"subsample_size": 40, "n_eigenvalues": K} | kwargs
    return ELLALaplace(model, "classification", **options)


@pytest.fixture(scope="module")
def many_outputs_fitted(many_outputs):
    model, loader = many_outputs
    la = many_outputs_ella(model)
    la.fit(loader)
    return la


@pytest.mark.parametrize("stochastic", [False, True, 3])
def test_fit_with_many_outputs(many_outputs, stochastic):
    """A fit allocates neither B·C·P nor B·C·C numbers, nor even a tenth of these."""
    model, loader = many_outputs
    la = many_outputs_ella(model, stochastic=stochastic)
    with Largest() as largest:
        la.fit(loader)
    # Sampled gradients, directions, features and the identity (C, C) are smaller.
    largest.assert_below(B * C * C / 10)


def test_stopped_fit_with_many_outputs(many_outputs):
    """Nor does a fit that is stopped early, whose samples are taken in chunks."""
    model, loader = many_outputs
    la = many_outputs_ella(model)
    stopping = EarlyStopping(every=B, n_samples=64)
    with Largest() as largest:
        la.fit(loader, val_loader=loader, early_stopping=stopping)
    assert len(la.history) == 2
    largest.assert_below(B * C * C)


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_links_with_many_outputs(many_outputs, many_outputs_fitted, link):
    """No link allocates B·C·C numbers, nor a tenth of them."""
    x = many_outputs[1].dataset.tensors[0][:B]
    with Largest() as largest:
        probs = many_outputs_fitted(x, link_approx=link)
    largest.assert_below(B * C * C / 10)
    assert probs.shape == (B, C)
    # A sum of 1,000 float32 numbers.
    torch.testing.assert_close(probs.sum(1), torch.ones(B), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("n_samples", "diagonal_output"), [(20, False), (20, True), (600, False)]
)
def test_monte_carlo_with_many_outputs(
    many_outputs, many_outputs_fitted, n_samples, diagonal_output
):
    """Samples are drawn in chunks: 600 of them take no more than the limit."""
    x = many_outputs[1].dataset.tensors[0][:B]
    with Largest() as largest:
        probs = many_outputs_fitted(
            x,
            link_approx="mc",
            n_samples=n_samples,
            diagonal_output=diagonal_output,
        )
    limit = B * C * C / 10 if n_samples == 20 else SAMPLES_AT_ONCE + 1
    largest.assert_below(limit)
    assert SAMPLES_AT_ONCE < 600 * B * C
    assert probs.shape == (B, C)


@pytest.mark.parametrize("call", ["prior", "temperature", "rank", "cache"])
def test_tuning_with_many_outputs(many_outputs, many_outputs_fitted, call):
    """Searches on validation data allocate no B·C·C numbers either."""
    la, loader = copy.copy(many_outputs_fitted), many_outputs[1]
    with Largest() as largest:
        if call == "prior":
            la.optimize_prior_precision(
                method="gridsearch", val_loader=loader, grid_size=3
            )
        elif call == "temperature":
            la.optimize_temperature(loader, link_approx="probit")
        elif call == "rank":
            la.optimize_rank("gridsearch", loader, link_approx="probit")
        else:
            FeatureCache.from_loader(la, loader)
    largest.assert_below(B * C * C / 10)


# --- frozen layers -----------------------------------------------------------------

N_BODY, N_HEAD = 3 * 50 * 50, 50 * 4
"""Multiplications of the layers below, and of the last one, for one example."""


def flops(work):
    """Multiplications that matrix products of `work()` take."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / 2


def body_and_head(frozen):
    g = torch.Generator().manual_seed(0)
    model = mlp(50, 50, 50, 50, 4).double().eval()
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or name.startswith("6."))
    x = torch.randn(60, 50, generator=g).double()
    y = torch.randint(4, (60,), generator=g)
    return model, DataLoader(TensorDataset(x, y), batch_size=20)


KINDS = {
    "frozen": lambda: (ELLALaplace, body_and_head(frozen=True)),
    "last_layer": lambda: (ELLALLLaplace, body_and_head(frozen=False)),
}


@pytest.fixture(params=KINDS)
def head_only(request):
    """A class, model and loader with a posterior on the last layer alone."""
    cls, (model, loader) = KINDS[request.param]()

    def make_fitted(k, **kwargs):
        options = {"subsample_size": 30, "n_eigenvalues": k} | kwargs
        la = cls(model, "classification", **options)
        la.fit(loader)
        return la

    return make_fitted, loader


def test_basis_of_trainable_parameters(head_only):
    """V has a row for each trainable parameter and no other."""
    la = head_only[0](6)
    assert la.basis.vectors.shape == (204, 6)
    assert la.n_params == len(la.mean) == 204


def test_frozen_layers_carry_no_tangents(head_only):
    """In forward mode the layers below run once, however many directions there are."""
    make_fitted, loader = head_only
    x = loader.dataset.tensors[0][:10]
    counts = {}
    for k in (4, 12):
        la = make_fitted(k, feature_mode="forward")
        counts[k] = flops(lambda la=la: la.features(x))
    # Each direction passes the last layer: two products, one of them with a tangent.
    assert (counts[12] - counts[4]) / 10 <= 2 * 8 * N_HEAD
    assert counts[12] / 10 <= N_BODY + (1 + 2 * 12) * N_HEAD
    assert counts[4] / 10 >= N_BODY


@pytest.mark.parametrize("k", [4, 12])
def test_frozen_layers_are_not_differentiated_backward(head_only, k):
    """In reverse mode too they run once, forward, for all C outputs."""
    make_fitted, loader = head_only
    x = loader.dataset.tensors[0][:10]
    la = make_fitted(k, feature_mode="reverse")
    rows_times_basis = 4 * 204 * k
    limit = N_BODY + (1 + 2 * 4) * N_HEAD + rows_times_basis
    assert N_BODY <= flops(lambda: la.features(x)) / 10 <= limit


@pytest.mark.parametrize("row_mode", ["vmap", "loop"])
def test_rows_of_frozen_models(head_only, row_mode):
    """A sampled gradient costs one forward pass and the last layer's backward."""
    make_fitted, loader = head_only
    la = make_fitted(4, feature_mode="forward", row_mode=row_mode)
    whole = flops(lambda: la.fit(loader))
    # Nine examples to look at outputs, 60 for the curvature, 30 for the rows; the
    # decomposition and the products with features are small and need no network.
    features = flops(lambda: la.features(loader.dataset.tensors[0]))
    curvature = 60 * 4 * 4 * 4
    rest = whole - features - curvature
    assert rest / 30 <= (N_BODY + 3 * N_HEAD) * (1 + 10 / 30)


def test_all_trainable_costs_more():
    """The comparison means something: with all layers trainable tangents do cost."""
    model, loader = body_and_head(frozen=False)
    x = loader.dataset.tensors[0][:10]
    la = ELLALaplace(model, "classification", n_eigenvalues=12, feature_mode="forward")
    la.fit(loader)
    assert flops(lambda: la.features(x)) / 10 > 12 * N_BODY


def test_frozen_body_is_called_once():
    """Each chunk of examples runs the modules below once a call of features."""
    model, loader = body_and_head(frozen=True)
    calls = []
    model[0].register_forward_hook(lambda *args: calls.append(len(args[1][0])))
    la = ELLALaplace(model, "classification", n_eigenvalues=6, feature_mode="forward")
    la.fit(loader)
    calls.clear()
    la.features(loader.dataset.tensors[0][:10])
    assert calls == [10]


def test_frozen_layers_in_the_middle():
    """Only layers below the first trainable one are free; values stay exact."""
    case = make("frozen")
    la = fit(case)
    assert la.basis.vectors.shape[0] == case.n_params
    assert isinstance(case.model[0], nn.Linear)
    assert not case.model[0].weight.requires_grad
