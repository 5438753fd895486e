"""From gradients to the Nyström basis, and the spectrum of what was not sampled."""

import itertools
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ComputeOptions, ELLALaplace
from laplace_ella.errors import RankWarning
from laplace_ella.posterior import basis as basis_module
from laplace_ella.posterior.basis import (
    RowBuffer,
    exact_basis,
    extend_exact,
    nystrom_basis,
)
from laplace_ella.posterior.span import Sketch, sampled_span
from laplace_ella.posterior.spectrum import Spectrum
from tests import dense
from tests.cases import CASES, make, mlp
from tests.fitting import assert_close, build, fit


def buffer_of(rows, capacity=None, keep=None):
    """A buffer of all rows, or a summary of them."""
    capacity = capacity or len(rows) + 1
    keep = len(rows) if keep is None else keep
    shape = (rows.shape[1],), capacity, keep
    buffer = RowBuffer(*shape, rows.dtype, rows.device)
    for some in rows.split(7):
        buffer.append(some)
    return buffer


def eye(n):
    return torch.eye(n, dtype=torch.float64)


@pytest.fixture(params=["svd", "gram"])
def method(request, monkeypatch):
    """Every way of decomposing."""
    if request.param == "gram":
        monkeypatch.setattr(basis_module, "SVD_LIMIT", 0)
    return request.param


@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_basis_is_the_truncated_svd(method, shape):
    """Top right singular vectors, nested; eigenvalues, tail and trace of J̃J̃ᵀ."""
    J = torch.randn(*shape).double()
    V, values = dense.nystrom(J, 12)
    basis = nystrom_basis(buffer_of(J), 5)
    assert (basis.rank, basis.method, basis.n_samples) == (5, method, len(J))
    assert basis.eigenvalues.dtype == torch.float64
    assert basis.trace == pytest.approx(float(J.square().sum()), rel=1e-12)
    assert basis.tail is not None
    both = torch.cat([basis.eigenvalues, basis.tail])
    assert_close(both[:12], values[:12])
    assert_close(basis.vectors @ basis.directions, V[:, :5] @ V[:, :5].T)
    assert_close(basis.directions @ basis.vectors, eye(5))
    smaller = basis.truncate(3)
    assert_close(smaller.vectors @ smaller.directions, V[:, :3] @ V[:, :3].T)
    assert smaller.tail is not None
    assert_close(smaller.tail[:2], basis.eigenvalues[3:])


def test_fits_take_the_basis_of_their_rows():
    """So does a fit of every case, whatever the ways that gradients are taken."""
    for name in CASES:
        case = make(name)
        la = fit(case, n_eigenvalues=5)
        J = dense.jacobians(case.model, case.x, case.params)[1].flatten(0, 1)
        V, values = dense.nystrom(J, 5)
        assert la.basis.n_samples == len(J)
        assert_close(la.basis.eigenvalues, values[:5])
        close = {"rtol": 1e-6, "atol": 1e-8}
        assert_close(la.basis.vectors @ la.basis.directions, V @ V.T, **close)


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (30, 31)])
@pytest.mark.parametrize("rank", [4, 12])
def test_exact_basis_has_the_coefficients_of_its_rows(method, shape, rank):
    """rows = coefficients @ directions, with all usable directions and no other."""
    J = torch.randn(shape[0], rank).double() @ torch.randn(rank, shape[1]).double()
    basis, coefficients = exact_basis(buffer_of(J.clone()))
    assert basis.rank == min(rank, *shape)
    assert coefficients.shape == (len(J), basis.rank)
    scale = {"rtol": 0, "atol": 1e-11 * float(J.abs().max())}
    assert_close(coefficients @ basis.directions, J, **scale)
    assert_close(basis.directions @ basis.vectors, eye(basis.rank), atol=1e-12)
    assert_close(coefficients.square().sum(0), basis.eigenvalues, rtol=1e-6)


def test_extended_exact_basis(method):
    """New rows add their directions; the curvature of old ones is turned."""
    J = torch.randn(9, 30).double()
    J[8] = J[:6].sum(0)  # nothing new
    first, coefficients = exact_basis(buffer_of(J[:6].clone()))
    for new in (J[6:], J[8:]):
        basis, both = extend_exact(first, coefficients, new)
        whole = torch.cat([J[:6], new])
        assert basis.rank == int(torch.linalg.matrix_rank(whole))
        assert_close(both @ basis.directions, whole, atol=1e-11)
        assert_close(basis.directions @ basis.vectors, eye(basis.rank), atol=1e-12)
        values = torch.linalg.svdvals(whole)[: basis.rank].square()
        assert_close(basis.eigenvalues, values)
        assert basis.trace == pytest.approx(float(values.sum()))
        assert basis.n_samples == len(whole)
        R = first.directions @ basis.vectors
        assert_close(R.T @ (coefficients.T @ coefficients) @ R, both[:6].T @ both[:6])


def test_ranks_are_limited_by_what_rounding_leaves():
    J = torch.randn(10, 3).double() @ torch.randn(3, 20).double()
    match = r"n_eigenvalues=8 exceeds .* rank 3 of the 10"
    with pytest.warns(RankWarning, match=match):
        assert nystrom_basis(buffer_of(J.float()), 8).rank == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nystrom_basis(buffer_of(J), None).rank == 3
    with pytest.raises(ValueError, match="All 4 sampled gradients are zero"):
        nystrom_basis(buffer_of(torch.zeros(4, 3)), 2)


def test_small_directions_of_single_precision_gradients_count(monkeypatch):
    """A Gram matrix of float32 products would lose those below 1e-6 of the largest."""
    monkeypatch.setattr(basis_module, "SVD_LIMIT", 0)
    singular = torch.logspace(0, -3.5, 30).double()
    U = torch.linalg.qr(torch.randn(30, 30).double())[0]
    V = torch.linalg.qr(torch.randn(200, 30).double())[0]
    J = (U * singular @ V.T).float()
    basis, coefficients = exact_basis(buffer_of(J.clone()))
    assert basis.rank == 30
    assert_close(basis.eigenvalues, singular.square(), rtol=1e-2, atol=1e-12)
    outside = V.T - V.T @ basis.vectors.double() @ basis.vectors.double().T
    # A direction is as uncertain as the rounding of the rows beside its size.
    assert (outside.norm(dim=1) * singular < 1e-6).all()
    error = coefficients @ basis.directions.double() - J.double()
    assert error.abs().max() < 1e-6


@pytest.mark.parametrize("scale", [1e-24, 1e20])
def test_the_trace_of_very_small_and_large_gradients(scale):
    rows = (torch.randn(5, 40).double() * scale).float()
    basis = nystrom_basis(buffer_of(rows), 5)
    expected = float(rows.double().square().sum())
    assert basis.trace == pytest.approx(expected, rel=1e-12)
    assert float(basis.explained[-1]) == pytest.approx(1.0)


def test_streamed_basis_is_close_to_the_exact_one():
    """Eigenvalues within 1 %, directions within 5°, the very trace."""
    J = rows_of_decay(400, 300, 3.0, 0)
    exact = nystrom_basis(buffer_of(J), 5)
    buffer = buffer_of(J, capacity=80, keep=40)
    assert buffer.compressed
    assert buffer.filled <= 80
    streamed = nystrom_basis(buffer, 5)
    assert (streamed.method, streamed.tail) == ("streaming", None)
    assert buffer.n_samples == streamed.n_samples == 400
    assert_close(streamed.eigenvalues, exact.eigenvalues, rtol=1e-2)
    cosines = torch.linalg.svdvals(streamed.directions @ exact.vectors)
    assert cosines.clamp_max(1).acos().max().rad2deg() < 5
    assert streamed.trace == pytest.approx(exact.trace, rel=1e-12)
    assert not buffer_of(J[:20], capacity=20, keep=10).compressed  # they just fit


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def test_memory_of_a_summary_does_not_grow():
    """The largest tensor is the same for four times the rows."""
    sizes = []
    for n in (150, 600):
        with Largest() as largest:
            buffer = buffer_of(torch.empty(0, 500), 40, 20)
            for _ in range(n // 10):
                buffer.append(torch.randn(10, 500))
            nystrom_basis(buffer, 5)
        sizes.append(largest.numel)
    assert sizes[0] == sizes[1]


def test_a_fit_streams_where_memory_is_short():
    """A summary of the gradients has nearly the same directions as all of them."""
    data = TensorDataset(torch.randn(100, 4), torch.randint(3, (100,)))
    loader, model, found = DataLoader(data, 20), mlp(4, 30, 3).float(), []
    for method, budget in (("exact", "1 GB"), ("streaming", "100 kB")):
        compute = ComputeOptions(memory_budget=budget, chunk_size=4)
        options = {"subsample_size": 300, "n_eigenvalues": 5, "compute": compute}
        la = ELLALaplace(model, "classification", **options)
        la.fit(loader)
        assert la.estimate_memory(loader).method == method
        found.append(la.basis)
    basis, summary = found
    assert basis.method in ("svd", "gram")
    assert len(basis.tail) + basis.rank == 243  # the spectrum, min(M, P) values
    assert (summary.method, summary.tail) == ("streaming", None)
    assert torch.linalg.svdvals(basis.directions @ summary.vectors).min() > 0.999
    assert_close(summary.eigenvalues, basis.eigenvalues, rtol=1e-4)


def rows_of_decay(n, p, decay, seed):
    """Rows of a distribution whose second moment has eigenvalues i^-decay."""
    scales = torch.arange(1, p + 1).double() ** (-decay / 2)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, p, generator=generator, dtype=torch.float64) * scales


@pytest.mark.parametrize("decay", [0.8, 1.5])
@pytest.mark.parametrize("share", [4, 2])
def test_spectrum_of_a_sample(decay, share):
    """From a part of the rows, log determinant and degrees of freedom of all."""
    J = rows_of_decay(600, 900, decay, 0)
    M, values = len(J) // share, torch.linalg.svdvals(J).square()
    spectrum = Spectrum(torch.linalg.svdvals(J[:M]).square(), M, *J.shape)
    for ridge in values[[10, 40, 150]]:
        exact = torch.log1p(values / ridge).sum()
        freedom = (values / (values + ridge)).sum()
        assert_close(spectrum.log_det(ridge), exact, rtol=0.06)
        assert_close(spectrum.degrees_of_freedom(ridge), freedom, rtol=0.1)
        naive = torch.log1p(spectrum.scaled / ridge).sum()
        assert (spectrum.log_det(ridge) - exact).abs() < (naive - exact).abs() / 3


def test_spectrum_is_smooth_and_consistent():
    """Its derivative is the degrees of freedom; far away it follows the trace; one
    row more than were there says nearly the same as all of them."""
    values = torch.linalg.svdvals(rows_of_decay(80, 300, 1.0, 1)).square()
    spectrum = Spectrum(values, 80, 400, 300)
    ridges = torch.logspace(-6, 8, 29, dtype=torch.float64)
    for ridge in ridges:
        log_ridge = ridge.log().requires_grad_()
        slope = torch.autograd.grad(spectrum.log_det(log_ridge.exp()), log_ridge)[0]
        assert_close(-slope, spectrum.degrees_of_freedom(ridge), rtol=1e-6)
        assert 0 < spectrum.degrees_of_freedom(ridge) < 300
    freedom = [float(spectrum.degrees_of_freedom(r)) for r in ridges]
    assert all(b <= a for a, b in itertools.pairwise(freedom))
    far = 1e7 * values[0]
    assert_close(spectrum.log_det(far), spectrum.trace / far, rtol=1e-3)
    same = Spectrum(values, 80, 80, 300, complete=True)
    almost = Spectrum(torch.cat([values, values.new_zeros(1)]), 81, 80, 300)
    for ridge in ridges[10:20]:
        exact = torch.log1p(values / ridge).sum()
        assert_close(same.log_det(ridge), exact)
        assert_close(almost.log_det(ridge), exact, rtol=0.05)
        # As many sampled rows as there are may be other rows.
        assert Spectrum(values, 80, 80, 300).log_det(ridge) != exact


def norms(span, rows):
    return span.parts(rows)[-1].square().sum(1)


def test_sketch_keeps_what_is_outside_a_span():
    """Norms outside the span of 60 rows of 5,000 parameters, from 180 groups."""
    rows = rows_of_decay(60, 5000, 0.5, 0)
    new = rows[:40] * 3 + 0.1 * rows_of_decay(40, 5000, 0.5, 1)
    Q = torch.linalg.qr(rows.T)[0]
    exact = (new - new @ Q @ Q.T).square().sum(1)
    sketch = Sketch.of(5000, 60, 0, torch.device("cpu"))
    assert sketch.size == Sketch.size_for(5000, 60) == 180
    groups = sketch(rows)
    expected = torch.zeros(60, 28 * 180).double()
    expected[:, :5000] = rows * sketch.signs
    assert_close(groups, expected.unflatten(1, (28, 180)).sum(1))
    span = sampled_span(groups, sketch, nystrom_basis(buffer_of(rows.clone()), 5, True))
    assert sum(span.sizes) == 60
    whole = sum(part.square().sum(1) for part in span.parts(new))
    assert_close(whole, new.square().sum(1))  # nothing is lost
    ratio = norms(span, new) / exact
    assert 0.4 < ratio.min() < ratio.max() < 1.7
    assert_close(ratio.mean(), torch.ones(()).double(), rtol=0.15)
    assert norms(span, rows * 3).max() < 1e-20 * rows.square().sum(1).max()
    compared = span.compared_with(sketch(new))
    assert compared.usual == pytest.approx(float(norms(span, new).mean()))
    everything = Sketch.of(200, 60, 0, torch.device("cpu"))
    assert (everything.signs, everything.size) == (None, 200)


def test_parts_of_a_span():
    """One for each decade of the eigenvalues, and what is outside."""
    U, _, Vh = torch.linalg.svd(torch.randn(30, 50).double(), full_matrices=False)
    J = U * torch.logspace(0, -1.9, 30).double() @ Vh  # eigenvalues from 1 to 10^-3.8
    basis = nystrom_basis(buffer_of(J.clone()), 4)
    span = sampled_span(J, Sketch.of(50, 30, 0, torch.device("cpu")), basis)
    assert span.sizes == (8, 8, 7, 7)
    new = torch.randn(3, 50).double()
    parts = span.parts(new)
    for part, V in zip(parts, Vh.split([8, 8, 7, 7]), strict=False):
        assert_close(part @ part.T, new @ V.T @ V @ new.T)
    assert_close(parts[-1], new - new @ Vh.T @ Vh)


def test_auto_takes_ninety_per_cent_of_the_energy(monkeypatch, recwarn):
    """The least rank with 90 % of the trace, where exact is not affordable."""
    monkeypatch.setattr("laplace_ella.fitting.sampling.AUTO_MAX_PAIRS", 0)
    case = make("classification_mlp")
    la = build(case, n_eigenvalues="auto")
    la.fit(case.loader())
    assert not recwarn.list
    rows = dense.jacobians(case.model, case.x, case.params)[1].flatten(0, 1)
    energy = torch.linalg.svdvals(rows).square().cumsum(0)
    assert la.rank == int((energy < 0.9 * energy[-1]).sum()) + 1
    assert_close(la.basis.explained[-1], energy[la.rank - 1] / energy[-1])
