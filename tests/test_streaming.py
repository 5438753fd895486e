"""The basis from a sketch of bounded size, and from exactly M backward passes."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace
from laplace_ella.posterior.basis import RowSketch, basis_from_rows
from tests.cases import mlp
from tests.fitting import assert_close
from tests.real_models import cifar10, resnet20

K = 10
KEEP, CAPACITY = 5 * K, 10 * K
"""The sizes that a fit takes for K directions if memory allows."""


def decaying_rows(m=600, p=300, power=1.0, seed=0, dtype=torch.float64):
    """Rows (M, P) with singular values k^-power, in random directions."""
    g = torch.Generator().manual_seed(seed)
    size = min(m, p)
    U = torch.linalg.qr(torch.randn(m, size, generator=g).double())[0]
    V = torch.linalg.qr(torch.randn(p, size, generator=g).double())[0]
    singular = torch.arange(1, size + 1).double() ** -power
    return (U * singular @ V.T).to(dtype)


def sketch_of(rows, capacity, keep, block=64):
    sketch = RowSketch((rows.shape[1],), capacity, keep, rows.dtype, rows.device)
    for part in rows.split(block):
        sketch.add(part)
    return sketch


def angle(V, W):
    """Largest principal angle between the spans of V and W (P, K), in degrees."""
    cosine = torch.linalg.svdvals(V.double().T @ W.double()).min().clamp(max=1)
    return torch.rad2deg(torch.arccos(cosine)).item()


# --- RowSketch ---------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
@pytest.mark.parametrize("capacity", [90, 91, 300])
def test_exact_while_it_fits(capacity, block):
    """With room for all rows the basis is their singular value decomposition."""
    rows = decaying_rows(90, 40)
    sketch = sketch_of(rows, capacity, 20, block)
    basis = sketch.basis(K)
    _, singular, Vh = torch.linalg.svd(rows, full_matrices=False)
    assert not sketch.compressed
    assert basis.method == "svd"
    assert basis.n_samples == 90
    assert_close(basis.eigenvalues, singular[:K].square())
    assert_close(basis.vectors @ basis.vectors.T, Vh[:K].T @ Vh[:K])


def test_one_row_more_compresses():
    """The buffer is compressed when the first row does not fit, not before."""
    rows = decaying_rows(91, 40)
    sketch = sketch_of(rows[:90], 90, 20)
    assert not sketch.compressed
    sketch.add(rows[90:])
    assert sketch.compressed
    assert sketch.filled == 21
    assert sketch.basis(K).method == "streaming"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("power", [0.75, 1.0, 2.0])
def test_streaming_eigenvalues(power, dtype, record_property):
    """On a decaying spectrum the top eigenvalues are within 1 % of the exact ones."""
    rows = decaying_rows(power=power, dtype=dtype)
    basis = sketch_of(rows, CAPACITY, KEEP).basis(K)
    exact = basis_from_rows(rows, K)
    assert basis.method == "streaming"
    relative = (basis.eigenvalues / exact.eigenvalues - 1).abs().max().item()
    degrees = angle(basis.vectors, exact.vectors)
    record_property("largest_relative_error", relative)
    record_property("subspace_angle_degrees", degrees)
    print(f"power {power}: error {relative:.2e}, angle {degrees:.3f} degrees")
    assert relative < 0.01
    # By sin Θ the angle is about error × λ_K/(λ_K − λ_{K+1}); neighbours of k^-1.5
    # at K = 10 are 13 % apart.
    assert degrees < 5


@pytest.mark.parametrize("block", [1, 64, 1000])
def test_streaming_never_overestimates(block):
    """What is dropped is energy: no eigenvalue exceeds the exact one."""
    rows = decaying_rows(power=0.5)
    basis = sketch_of(rows, 40, 20, block).basis(K)
    exact = torch.linalg.svdvals(rows).square()[:K]
    assert (basis.eigenvalues <= exact * (1 + 1e-12)).all()


def test_streaming_is_exact_for_low_rank():
    """Rows whose rank is at most `keep` lose nothing."""
    g = torch.Generator().manual_seed(1)
    rows = (
        torch.randn(500, 8, generator=g).double()
        @ torch.randn(8, 60, generator=g).double()
    )
    basis = sketch_of(rows, 30, 15).basis(8)
    exact = basis_from_rows(rows, 8)
    assert basis.method == "streaming"
    assert_close(basis.eigenvalues, exact.eigenvalues)
    assert_close(
        basis.vectors @ basis.vectors.T, exact.vectors @ exact.vectors.T, rtol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("capacity", "keep"), [(700, 50), (100, 50), (12, 11)])
def test_orthonormal_and_nested(capacity, keep, dtype):
    """VᵀV = I to the dtype's accuracy, and smaller bases are leading columns."""
    sketch = sketch_of(decaying_rows(dtype=dtype), capacity, keep)
    V = sketch.basis(K).vectors
    # Sums of P = 300 products, each rounded.
    accuracy = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(V.T @ V, torch.eye(K).to(V), rtol=0, atol=accuracy)
    small = sketch.basis(4).vectors
    overlap = (V[:, :4] * small).sum(0).abs()
    torch.testing.assert_close(overlap, torch.ones(4).to(V), rtol=0, atol=accuracy)


@pytest.mark.parametrize(("capacity", "keep"), [(700, 50), (100, 50), (12, 11)])
@pytest.mark.parametrize("block", [1, 64])
def test_trace_is_exact(capacity, keep, block):
    """The trace counts every row, also those that were compressed away."""
    rows = decaying_rows()
    basis = sketch_of(rows, capacity, keep, block).basis(K)
    assert basis.trace == pytest.approx(rows.square().sum().item(), rel=1e-12)
    assert basis.n_samples == 600
    assert 0 < basis.explained[-1] < 1


def test_memory_does_not_grow():
    """Ten times the rows use the same buffer, in the same place."""
    sketch = RowSketch((50,), 30, 15, torch.float64, torch.device("cpu"))
    place, shape = sketch.buffer.data_ptr(), sketch.buffer.shape
    for m in (100, 1000):
        for part in decaying_rows(m, 50).split(64):
            sketch.add(part)
            assert sketch.filled <= 30
        assert sketch.buffer.shape == shape == (30, 50)
        assert sketch.buffer.data_ptr() == place
    assert sketch.n_samples == 1100


def test_one_block_larger_than_the_buffer():
    """A block of any size may be added at once, with the result of single rows."""
    rows = decaying_rows(200, 40)
    at_once = sketch_of(rows, 30, 15, 200).basis(5)
    one_by_one = sketch_of(rows, 30, 15, 1).basis(5)
    assert_close(at_once.eigenvalues, one_by_one.eigenvalues)
    V, W = at_once.vectors, one_by_one.vectors
    assert_close(V @ V.T, W @ W.T, rtol=1e-6, atol=1e-8)


def test_capacity_must_exceed_what_is_kept():
    """A buffer that a compression cannot make room in is refused."""
    with pytest.raises(ValueError, match=r"capacity=5 .*keep=5"):
        RowSketch((10,), 5, 5, torch.float64, torch.device("cpu"))


# --- fits --------------------------------------------------------------------------


class _CountBackward(torch.autograd.Function):
    """The identity; counts for how many examples it was run."""

    calls = 0

    @staticmethod
    def forward(grad):
        _CountBackward.calls += 1
        return grad.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, grad):
        _CountBackward.calls += info.batch_size
        return grad.clone(), in_dims[0]


class _Counted(torch.autograd.Function):
    """The identity, whose backward pass is counted."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return _CountBackward.apply(grad)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.clone()

    @staticmethod
    def vmap(info, in_dims, x):
        return _Counted.apply(x), in_dims[0]


class CountedModel(nn.Module):
    """A model that counts the backward passes through its outputs, by example."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return _Counted.apply(self.net(x))


def backward_passes(work):
    """How many examples' backward passes `work()` makes."""
    before = _CountBackward.calls
    work()
    return _CountBackward.calls - before


def problem(n=400, n_in=5, n_out=3, width=12, batch_size=50):
    """A network with a decaying spectrum, and a loader."""
    g = torch.Generator().manual_seed(2)
    model = mlp(n_in, width, n_out).double().eval()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g).double()
    x = torch.randn(n, n_in, generator=g).double()
    y = torch.randint(n_out, (n,), generator=g)
    return model, DataLoader(TensorDataset(x, y), batch_size=batch_size)


def ella(model, m, rows=None, loader=None, k=8, **kwargs):
    """ELLA with forward-mode features; `rows` gradients fit its memory budget."""
    options = {"subsample_size": m, "n_eigenvalues": k, "feature_mode": "forward"}
    la = ELLALaplace(model, "classification", **(options | kwargs))
    if rows is not None:
        row = la.n_params * 8
        for _ in range(10):  # passes shrink with the budget
            passed = la.estimate_memory(loader).pass_
            la.memory_budget = 2 * k * row + passed + rows * row + 32 * rows**2
    return la


@pytest.mark.parametrize("row_mode", ["vmap", "loop"])
@pytest.mark.parametrize("rows", [None, 40], ids=["exact", "streaming"])
def test_exactly_m_backward_passes(rows, row_mode):
    """Each of the M gradients is one backward pass, once the way is known."""
    model, loader = problem(n=120)
    model = CountedModel(model)
    counts = []
    for m in (60, 120):
        la = ella(model, m, rows, loader, k=4, row_mode=row_mode)
        first = backward_passes(lambda la=la: la.fit(loader))
        assert (la.basis.method == "streaming") == (rows is not None)
        counts.append(first)
        # The way of taking rows is known from the first fit on.
        assert backward_passes(lambda la=la: la.fit(loader)) == m
        assert la.basis.n_samples == m
    # Finding the way takes a few rows, however many are sampled.
    assert counts[1] - counts[0] == 60
    assert counts[0] - 60 <= 64


@pytest.mark.parametrize("rows", [None, 100], ids=["exact", "streaming"])
def test_exactly_m_backward_passes_of_repeated_examples(rows):
    """So it is where examples are used several times, and all pairs once."""
    model, loader = problem(n=60, batch_size=20)
    model = CountedModel(model)
    for m, expected in ((150, 150), (10**6, 180)):
        la = ella(model, m, rows, loader, row_mode="vmap")
        la.fit(loader)
        assert backward_passes(lambda la=la: la.fit(loader)) == expected
        assert la.basis.n_samples == expected


def test_memory_budget_chooses():
    """A budget for all gradients gives the exact basis, a smaller one the sketch."""
    model, loader = problem()
    exact, streaming = (ella(model, 300, rows, loader) for rows in (320, 100))
    for la, method in ((exact, "exact"), (streaming, "streaming")):
        assert la.estimate_memory(loader).method == method
        la.fit(loader)
    assert exact.basis.method in ("svd", "gram")
    assert streaming.basis.method == "streaming"
    assert ella(model, 300).estimate_memory(loader).method == "exact"


def test_streaming_fit_equals_the_exact_one(record_property):
    """The streamed basis has the exact one's eigenvalues within 1 %, and its trace."""
    model, loader = problem()
    exact, streaming = ella(model, 400), ella(model, 400, 90, loader)
    exact.fit(loader)
    streaming.fit(loader)
    assert streaming.basis.method == "streaming"
    relative = streaming.basis.eigenvalues / exact.basis.eigenvalues - 1
    degrees = angle(streaming.basis.vectors, exact.basis.vectors)
    record_property("subspace_angle_degrees", degrees)
    print(f"error {relative.abs().max():.2e}, angle {degrees:.3f} degrees")
    assert relative.abs().max() < 0.01
    assert degrees < 5
    assert streaming.basis.trace == pytest.approx(exact.basis.trace, rel=1e-12)
    x = loader.dataset.tensors[0][:50]
    # A subspace within 5° carries features within sin 5° of their size.
    difference = (streaming(x) - exact(x)).abs().max()
    assert difference < 0.05


class _Largest(TorchDispatchMode):
    """The size of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def largest_of_fit(la, loader):
    with _Largest() as largest:
        la.fit(loader)
    return largest.numel


def test_memory_of_a_streaming_fit_does_not_grow():
    """The largest tensor is the same for four times the samples."""
    sizes = []
    for m in (150, 600):
        model, loader = problem(n=600)
        la = ella(model, m, 100, loader, row_mode="vmap")
        sizes.append(largest_of_fit(la, loader))
        assert la.basis.method == "streaming"
    assert sizes[0] == sizes[1]


def test_memory_of_a_streaming_fit_with_many_samples_an_example():
    """Nor does it grow where one batch holds all examples and gives all samples."""
    sizes = []
    for m in (150, 600):
        model, loader = problem(n=20, n_out=40, width=6, batch_size=20)
        la = ella(model, m, 100, loader, row_mode="vmap")
        sizes.append(largest_of_fit(la, loader))
        assert la.basis.method == "streaming"
        assert la.basis.n_samples == m
    assert sizes[0] == sizes[1]


def test_auto_rank_of_a_sketch():
    """n_eigenvalues="auto" works beside streaming, within the rows that are kept."""
    model, loader = problem()
    la = ella(model, 400, 160, loader, k=128)
    auto = ELLALaplace(
        model,
        "classification",
        subsample_size=400,
        n_eigenvalues="auto",
        memory_budget=la.memory_budget,
    )
    auto.fit(loader)
    assert auto.basis.method == "streaming"
    assert auto.basis.explained[-1] >= 0.9
    assert auto.rank == 1 or auto.basis.explained[-2] < 0.9


# --- real data ---------------------------------------------------------------------


def test_resnet20(data_dir, record_property):
    """ResNet-20 on CIFAR-10, M=100 gradients in a sketch of 60 at most."""
    x, y = cifar10(data_dir, "train_20k", 100)
    loader = DataLoader(TensorDataset(x, y), batch_size=40)
    model = resnet20(data_dir)
    options = {"subsample_size": 100, "n_eigenvalues": 6, "row_mode": "loop"}
    options |= {"feature_mode": "reverse", "chunk_size": 8}
    exact = ELLALaplace(model, "classification", **options)
    estimate = exact.estimate_memory(loader)
    row = 4 * exact.n_params
    budget = 12 * row + estimate.pass_ + 60 * row
    streaming = ELLALaplace(model, "classification", memory_budget=budget, **options)
    # No curvature: the bases are what is compared.
    for la in (exact, streaming):
        la._add_up = lambda loader, basis, start, *args: (start, [])
        la.fit(loader)
    assert streaming.basis.method == "streaming"
    relative = (streaming.basis.eigenvalues / exact.basis.eigenvalues - 1).abs().max()
    degrees = angle(streaming.basis.vectors, exact.basis.vectors)
    record_property("subspace_angle_degrees", degrees)
    print(f"error {relative:.2e}, angle {degrees:.3f} degrees")
    assert relative < 0.01
    assert streaming.basis.trace == pytest.approx(exact.basis.trace, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-24, 1e20])
def test_the_trace_of_very_small_and_large_gradients(scale):
    """As far as the decomposition of a few gradients goes, which is in float64."""
    torch.manual_seed(0)
    rows = (torch.randn(5, 40).double() * scale).float()
    basis = basis_from_rows(rows, 5)
    assert basis.trace == pytest.approx(float(rows.double().square().sum()), rel=1e-12)
    assert float(basis.explained[-1]) == pytest.approx(1.0)


def test_rows_are_copied_unless_they_are_in_place():
    """A wrapper around a tensor, as others than ours make them, has no address."""
    J = torch.randn(5, 40)
    sketch = RowSketch((40,), 6, 5, J.dtype, J.device)
    room = sketch.room(2)
    room.copy_(J[:2])
    sketch.add(room)
    sketch.add(J[2:])
    assert torch.equal(sketch.buffer[:5], J)
    assert sketch.room(2) is None
