"""Adapters of other people's methods: each that is installed fits and predicts."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
from scipy import integrate, stats

PAPER = Path(__file__).resolve().parents[1] / "examples" / "paper"


@pytest.fixture
def peers(monkeypatch):
    """The script, as a module."""
    monkeypatch.syspath_prepend(PAPER)
    yield importlib.import_module("peers")
    for name in [n for n in sys.modules if n.split(".")[0] in ("peers", "common")]:
        del sys.modules[name]


# Those that are trained for seconds are left to the study.
QUICK = ("MAP", "ours", "laplace-torch K", "laplace-torch E", "deep", "MC", "IVON")


@pytest.mark.filterwarnings("ignore")  # so few data have small ranks
@pytest.mark.parametrize("C", [1, 2])
def test_adapters(peers, C):
    """Predictions have the shapes and the meaning that the scores expect."""
    x, x_test = torch.randn(24, 2), torch.randn(7, 2)
    y = x[:, :1].sin() if C == 1 else (x[:, 0] > 0).long()

    def fresh(rate):
        layers = [torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Dropout(rate)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(5, C))

    kind = "regression" if C == 1 else "classification"
    given = peers.Problem(kind, fresh(0), (x, y), (x, y), fresh, 1e-3, 20)
    given.optimise(given.model)
    for name in (name for name in peers.METHODS if name.startswith(QUICK)):
        try:
            fitted = peers.METHODS[name].adapt(given)(None)
        except ImportError:
            continue
        found = fitted.predict(x_test)
        if C == 1:
            assert [part.shape for part in found] == [(7, 1), (7, 1)], name
            assert (found[1] >= 0).all(), name
        else:
            assert found.shape == (7, 2), name
            assert torch.allclose(found.sum(-1), torch.ones(7), atol=1e-4), name


def test_a_method_that_fails_is_a_row(peers, monkeypatch, tmp_path, data_dir):
    """The page has a row for each, with the reason; a second run reads the first."""
    kept = {name: peers.METHODS[name] for name in ("MAP", "ours, K = 20", "SUQ")}
    monkeypatch.setattr(peers, "METHODS", kept)
    places = [f"--data-root={data_dir}", f"--cache-dir={tmp_path / 'cache'}"]
    few = ["--data", "--images=0", "--few", "moons", "--steps=20"]
    command = ["--smoke", f"--out={tmp_path}", *places, *few]
    peers.main(command)
    page = (tmp_path / "README.md").read_text()
    assert "| SUQ | – |" in page
    assert "FileNotFoundError: no checkout SUQ" in page
    assert "few data, with validation data" in page
    peers.main([*command, "--cached"])
    assert (tmp_path / "README.md").read_text() == page


def test_crps(peers):
    """The score is ∫ (F(t) − 1[t ≥ y])² dt."""
    mean, variance, y = (torch.tensor([[v]]).double() for v in (0.3, 0.7, 1.2))
    normal = stats.norm(0.3, math.sqrt(0.7))
    below = integrate.quad(lambda t: normal.cdf(t) ** 2, -9, 1.2)[0]
    above = integrate.quad(lambda t: normal.sf(t) ** 2, 1.2, 9)[0]
    assert peers.crps(mean, variance, y) == pytest.approx(below + above, rel=1e-6)
