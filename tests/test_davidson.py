"""Only the top directions, without the Gram matrix, against dense references."""

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella.comparison import forecast
from laplace_ella.errors import RankWarning
from laplace_ella.posterior import basis as module
from laplace_ella.posterior.basis import RowSketch, basis_from_rows
from laplace_ella.posterior.davidson import leading_eigenpairs

M, P, K = 720, 9000, 10


def rows(values, dtype=torch.float32):
    """Rows (M, P) with these singular values."""
    torch.manual_seed(0)
    U = torch.linalg.qr(torch.randn(M, len(values), dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(P, len(values), dtype=torch.float64))[0]
    return ((U * values) @ V.T).to(dtype)


def decaying(n=M):
    return torch.arange(1, n + 1, dtype=torch.float64) ** -0.7


def test_directions_are_those_of_a_dense_decomposition():
    J = rows(decaying())
    found = basis_from_rows(J.clone(), K)
    assert (found.method, found.rank, found.tail) == ("davidson", K, None)
    singular, Vh = torch.linalg.svd(J.double(), full_matrices=False)[1:]
    torch.testing.assert_close(
        found.eigenvalues, singular[:K].square(), rtol=1e-6, atol=0
    )
    V = found.directions.double()
    cosines = (V * Vh[:K]).sum(1)
    sines = (V - cosines[:, None] * Vh[:K]).norm(dim=1)
    assert sines.max() < 1e-5
    gram = V @ V.T
    torch.testing.assert_close(gram, torch.eye(K).double(), rtol=0, atol=1e-6)
    assert found.trace == pytest.approx(float(singular.square().sum()), rel=1e-6)


@pytest.mark.parametrize("power", [-0.3, -0.7, -2.0])
def test_residuals_are_those_that_are_stated(power):
    """However fast the spectrum decays: with the sketch as a guess or as a whole."""
    J = rows(torch.arange(1, M + 1, dtype=torch.float64) ** power)
    for few in (J, J[:, :500]):  # of 500 parameters all are kept
        found = leading_eigenpairs(few, K)
        assert found is not None
        values, U = found
        product = few.double() @ (few.double().T @ U)
        residuals = (product - U * values).norm(dim=0) / values
        allowed = (values[0] / values * 2e-8).clamp_min(1e-5)  # rounding of products
        assert (residuals < allowed).all()
        torch.testing.assert_close(U.T @ U, torch.eye(K).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_no_direction_is_missed_among_eigenvectors(seed):
    """Gradients in blocks of their own: every vector of the sketch is an eigenvector,
    whatever the order of the eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    n, width = 64, 256
    blocks = torch.randint(n, (1024,), generator=generator)
    values = torch.randn(n, width, generator=generator).sign()
    J = torch.zeros(len(blocks), n, width)
    J[torch.arange(len(blocks)), blocks] = values[blocks]
    J = J.transpose(1, 2).flatten(1)
    counts = blocks.bincount(minlength=n).sort(descending=True).values[:K]
    found = leading_eigenpairs(J, K)
    assert found is None or torch.allclose(
        found[0], counts.double() * width, rtol=1e-5, atol=0
    )


def test_the_same_every_time_and_random_states_stay():
    J = rows(decaying())
    before = torch.get_rng_state()
    first, second = (basis_from_rows(J.clone(), K) for _ in range(2))
    assert torch.equal(first.directions, second.directions)
    assert torch.equal(torch.get_rng_state(), before)


def test_under_autocast():
    J = rows(decaying())
    plain = basis_from_rows(J.clone(), K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = basis_from_rows(J.clone(), K)
    assert torch.equal(mixed.directions, plain.directions)


def test_a_spectrum_that_does_not_converge(monkeypatch):
    """A few steps say nothing of a flat spectrum: the Gram matrix does."""
    J = rows(torch.linspace(1.0, 0.99, M).double())
    found = basis_from_rows(J.clone(), K)
    assert found.method == "gram"
    assert found.tail is not None
    monkeypatch.setattr(module, "FEW_RATIO", M)
    asked = basis_from_rows(J.clone(), K)
    assert torch.equal(found.directions, asked.directions)


def test_fewer_directions_than_asked_for():
    J = rows(decaying(4))
    with pytest.warns(RankWarning, match="rank 4"):
        found = basis_from_rows(J, K)
    assert found.rank == 4


def test_one_gradient_that_is_not_zero():
    """Its eigenvector is found at once, and there are no others."""
    J = torch.zeros(1000, 3000)
    J[0, 0] = 2
    with pytest.warns(RankWarning, match="rank 1"):
        found = basis_from_rows(J, 20)
    assert found.eigenvalues.tolist() == [4.0]
    assert found.directions.abs().argmax() == 0


def test_without_any_direction():
    with pytest.raises(ValueError, match="gradients are zero"):
        basis_from_rows(torch.zeros(M, P), K)


@pytest.mark.parametrize(
    ("dtype", "k", "accurate"),
    [
        (torch.float64, K, False),
        (torch.float32, M // 10, False),
        (torch.float32, K, True),
        (torch.float32, None, False),
    ],
    ids=["float64", "many directions", "small eigenvalues count", "all"],
)
def test_where_the_gram_matrix_is_used(dtype, k, accurate):
    J = rows(decaying(), dtype)
    sketch = RowSketch((P,), M + 1, M, dtype, torch.device("cpu"))
    sketch.add(J)
    found = sketch.basis(k, accurate)
    assert found.method == "gram"
    assert found.tail is not None


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_a_posterior_with_it(likelihood, monkeypatch):
    """Classification does not use the rest of the spectrum, evidence of regression
    does; predictions and evidence are those by the Gram matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh())
    model.append(nn.Linear(50, 3))
    x = torch.randn(300, 8)
    y = torch.randint(3, (300,)) if likelihood == "classification" else x[:, :3].sin()
    loader = DataLoader(TensorDataset(x, y), batch_size=100)
    settings = {"n_eigenvalues": K, "subsample_size": M, "prior_precision": 3.0}

    def fitted():
        la = Laplace(model, likelihood, "all", "nystrom", **settings)
        la.fit(loader)
        return la

    la = fitted()
    monkeypatch.setattr(module, "FEW_RATIO", M)
    other = fitted()
    classifies = likelihood == "classification"
    assert la.basis.method == ("davidson" if classifies else "gram")
    assert other.basis.method == "gram"
    ours, theirs = la(x[:20]), other(x[:20])
    if classifies:
        ours, theirs = (ours,), (theirs,)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    evidence = [m.log_marginal_likelihood() for m in (la, other)]
    torch.testing.assert_close(*evidence, rtol=1e-5, atol=1e-3)
    la.optimize_prior_precision(method="marglik", n_steps=3)
    la.truncate(4)
    assert la.basis.rank == 4


def test_forecasts_count_its_products(monkeypatch):
    monkeypatch.setattr(forecast, "product_seconds", lambda *sizes: 1.0)
    sizes = (2000, 10**5, 20, False, torch.float32, torch.device("cpu"))
    assert forecast.basis_seconds(*sizes) == 2 * forecast.DAVIDSON_PRODUCTS + 1
