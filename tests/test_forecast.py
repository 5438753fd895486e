"""The doctor's arithmetic: what is counted, and what is chosen."""

from __future__ import annotations

import math

import pytest
import torch

from laplace_ella.comparison import forecast as module
from laplace_ella.comparison.forecast import Forecast, Line, Way, choose, forecast
from laplace_ella.comparison.memory import Problem

PROBLEM = Problem(
    n_data=1000,
    output_shape=(10,),
    n_params=500,
    n_params_last=50,
    n_activations=100,
    batch=50,
    itemsize=4,
    kron_floats=0,
    kron_floats_last=0,
)


@pytest.fixture
def _free_algebra(monkeypatch):
    """Matrices cost nothing, so that what remains can be counted by hand."""
    monkeypatch.setattr(module, "basis_seconds", lambda *_: 0.0)
    monkeypatch.setattr(module, "product_seconds", lambda *_: 0.0)


@pytest.mark.usefixtures("_free_algebra")
@pytest.mark.parametrize(
    ("n_eigenvalues", "regression", "rows", "rank"),
    [(20, False, 2000, 20), ("exact", False, 10_000, 500), (20, True, 2256, 20)],
)
def test_counts(n_eigenvalues, regression, rows, rank):
    forward = Way(Line(0.5, 0.25), Line(1.0, 0.5), 3.0, False, torch.float32)
    fit, predict = forecast(
        n_eigenvalues, [forward], PROBLEM, 2000, regression, torch.device("cpu"), 0.1
    )
    read = 0.1 * 2 * 1000  # once for gradients, once for features
    assert fit == pytest.approx(read + rows * 3.0 + 1000 * (0.5 + 0.25 * rank))
    assert predict == pytest.approx(1.0 + 0.5 * rank)


@pytest.mark.usefixtures("_free_algebra")
def test_the_fastest_way_counts():
    forward = Way(Line(0.0, 1.0), Line(0.0, 1.0), 0.0, False, torch.float32)
    reverse = Way(Line(30.0, 0.0), Line(30.0, 0.0), 0.0, True, torch.float32)
    ways = [forward, reverse]

    def predict(rank):
        return forecast(rank, ways, PROBLEM, 2000, False, torch.device("cpu"))[1]

    assert (predict(20), predict(128)) == (20.0, 30.0)


def test_best_within_memory_and_time_is_chosen():
    found = [
        Forecast("exact", 10, False, math.nan, math.nan),
        Forecast(512, 8, True, 100.0, 0.001),
        Forecast(128, 4, True, 30.0, 0.05),  # 50 s for a thousand predictions
        Forecast(20, 2, True, 10.0, 0.001),
    ]
    assert choose(found, 1000).n_eigenvalues == 512
    assert choose(found, 60).n_eigenvalues == 128
    assert choose(found, 40).n_eigenvalues == 20
    assert choose(found, 1e-3).n_eigenvalues == 20
    assert choose(found[:1], 1000) is None
