"""The command line, as a user calls it: in a process of its own."""

from __future__ import annotations

import csv
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from laplace_ella import cli
from laplace_ella.comparison.report import Report, Result

ROOT = Path(__file__).resolve().parents[1]

SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

def setup():
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    y = (x[:, 0] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    return dict(model=model, likelihood="classification", train_loader=loader,
                test_loader=loader, val_loader=loader, n_samples=16, n_steps=3)

def as_tuple():
    s = setup()
    return s["model"], s["likelihood"], s["train_loader"], s["test_loader"]

def incomplete():
    return {"model": setup()["model"]}

def number():
    return 3

def extra():
    return {**setup(), "epochs": 3}

def no_model():
    return {**setup(), "model": 3}

def frozen():
    s = setup()
    s["model"].requires_grad_(False)
    return s

def without_test():
    s = setup()
    del s["test_loader"]
    return s

def broken():
    raise ZeroDivisionError("in the user's code")

def slow():
    import time
    class Slow(nn.Linear):
        def forward(self, x):
            print("predicting", flush=True)
            time.sleep(60)
            return super().forward(x)
    s = setup()
    s["model"] = Slow(2, 2)
    return s

def pixels():
    # 32x32 positions: the Jacobian of one example has 27 million numbers
    torch.manual_seed(0)
    x, y = torch.randn(4, 1, 32, 32), torch.randint(3, (4, 32, 32))
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    model = nn.Sequential(nn.Conv2d(1, 300, 5, padding=2), nn.Conv2d(300, 3, 1))
    return dict(model=model, likelihood="classification", train_loader=loader,
                test_loader=loader, output_layout="channels_first")

def pixels_without_layout():
    s = pixels()
    del s["output_layout"]
    return s

def stream():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(s["test_loader"].dataset)
    s = setup()
    s["train_loader"] = DataLoader(Stream(), batch_size=20)
    return s

not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(SETUP)
    return tmp_path


def environment():
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    )
    return env


def run(folder, *args):
    return subprocess.run(
        [sys.executable, "-m", "laplace_ella", *args],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def call(monkeypatch, capsys, folder, *args):
    """The same without a new process, for the many small mistakes."""
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "task", raising=False)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    try:
        code = cli.main(args)
    except SystemExit as error:  # argparse
        code = error.code
    out, err = capsys.readouterr()
    monkeypatch.delitem(sys.modules, "task", raising=False)
    return code, out, err


def test_compare_prints_the_table_and_writes_reports(folder):
    done = run(
        folder, "compare", "task:setup", "--methods", "map,last-layer-diag",
        "--links", "probit", "--out", "results", "--quiet",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["method", "link", "acc."]
    assert lines[2].startswith("map")
    assert lines[3].startswith("last-layer-diag")
    written = {path.name for path in (folder / "results").iterdir()}
    assert written == {"report.md", "report.csv", "report.json"}
    assert "Traceback" not in done.stderr


def example_of(text):
    """The indented task of a help text."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip() == "import torch")
    last = next(i for i, line in enumerate(lines) if "test_loader=loader" in line)
    return textwrap.dedent("\n".join(lines[first : last + 1]))


def test_help_is_enough_and_its_example_runs(monkeypatch, capsys, tmp_path):
    _, out, _ = call(monkeypatch, capsys, tmp_path, "--help")
    for command in ("demo", "compare", "doctor"):
        assert f"laplace-ella {command}" in out
        code, more, _ = call(monkeypatch, capsys, tmp_path, command, "--help")
        assert code == 0
        assert "example" in more
        assert command == "demo" or example_of(more) == example_of(out)
    (tmp_path / "mytask.py").write_text(example_of(out))
    compare = re.search(r"laplace-ella (compare \S+ --html \S+)", out)[1].split()
    code, table, err = call(
        monkeypatch, capsys, tmp_path, *compare, "--methods", "map,temperature"
    )
    assert code == 0, err
    assert "temperature" in table
    assert str(tmp_path / "report.html") in err
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "mytask:setup" in page
    assert "<dt>training</dt><dd>100</dd>" in page


def test_command_line_has_all_options_of_compare(monkeypatch, capsys, folder):
    from laplace_ella import compare
    from laplace_ella.cli.targets import ARGUMENTS, COMPARE_OPTIONS

    of_function = set(inspect.signature(compare).parameters)
    assert of_function == {*ARGUMENTS, *COMPARE_OPTIONS, "progress_bar"}
    _, out, _ = call(monkeypatch, capsys, folder, "compare", "--help")
    for name in COMPARE_OPTIONS:
        assert f"--{name.replace('_', '-')}" in out


def test_options_reach_compare(monkeypatch, capsys, folder):
    from laplace_ella.comparison import compare as module

    seen = {}

    def spy(**arguments):
        seen.update(arguments)
        return Report([Result("map")])

    monkeypatch.setattr(module, "compare", spy)
    code, _, _ = call(
        monkeypatch, capsys, folder, "compare", "task:setup", "--n-samples", "8",
        "--sigma-noise", "0.5", "--grid-size", "3", "--n-bins", "4", "--seeds", "1,2",
        "--reference", "none", "--dict-key-x", "x", "--output-layout", "flat",
    )  # fmt: skip
    assert code == 0
    assert seen["progress_bar"]
    assert seen["n_steps"] == 3  # the function's own
    expected = {
        "n_samples": 8,
        "sigma_noise": 0.5,
        "grid_size": 3,
        "n_bins": 4,
        "seeds": [1, 2],
        "reference": None,
    }
    assert {name: seen[name] for name in expected} == expected


def test_progress_bar_has_the_time_left(monkeypatch, capsys, folder):
    code, out, err = call(
        monkeypatch, capsys, folder, "compare", "task:setup", "--methods", "map,diag"
    )
    assert code == 0
    assert "left" in err
    assert "left" not in out
    assert "100%" in err


def test_interruption_prints_what_is_there_and_exits_130(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "laplace_ella", "compare", "task:slow", "--quiet"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job ignores interrupts, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "predicting\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("style", ["csv", "json", "markdown"])
def test_formats(monkeypatch, capsys, folder, style):
    code, out, _ = call(
        monkeypatch, capsys, folder, "compare", "task:as_tuple", "--methods", "map",
        "--format", style, "--quiet",
    )  # fmt: skip
    assert code == 0
    if style == "csv":
        (row,) = csv.DictReader(io.StringIO(out))
        assert row["method"] == "map"
    elif style == "json":
        assert json.loads(out)["results"][0]["status"] == "ok"
    else:
        assert out.startswith("| method |")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["compare", "task"], "TARGET must be module:function"),
        (["compare", "nothing:setup"], "No module 'nothing'"),
        (["compare", "no.such:setup"], "No module 'no.such'"),
        (["compare", "task:nothing"], "It has: DataLoader"),
        (["compare", "task:not_a_function"], "has no function 'not_a_function'"),
        (["compare", "task:number"], "got int"),
        (["compare", "task:incomplete"], "missing: likelihood, train_loader"),
        (["compare", "task:setup", "--methods", "nope"], "Unknown method 'nope'"),
        (["compare", "task:setup", "--links", "nope"], "links must be among"),
        (["compare", "task:setup", "--seeds", "a"], "expected integers"),
        (["compare", "task:setup", "--n-samples", "0"], "n_samples must be"),
        (["compare", "task:setup", "--n-bins", "x"], "invalid int value"),
        (["compare", "task:setup", "--prior-precision", "-1"], "prior_precision must"),
        (["compare", "task:setup", "--html", "."], "must be a file"),
        (["compare", "task:setup", "--html", "task.py/x.html"], "is not a folder"),
        (["compare", "task:setup", "--out", "task.py"], "is not a folder"),
        (["compare", "task:extra"], "'epochs', which is no argument of compare"),
        (["compare", "task:no_model"], "must be a torch.nn.Module, got int"),
        (["compare", "task:frozen"], "no trainable parameters"),
        (["doctor", "task:no_model"], "must be a torch.nn.Module, got int"),
        (["doctor", "task:setup", "--time-budget", "-1"], "time_budget must be"),
        (["doctor", "task:setup", "--memory-budget", "much"], "memory_budget must be"),
        (["doctor", "nothing:setup"], "No module 'nothing'"),
        (["compare"], "required: TARGET"),
        (["dance"], "invalid choice"),
        ([], "required: COMMAND"),
    ],
)
def test_mistakes_exit_2_without_a_stack_trace(
    monkeypatch, capsys, folder, args, message
):
    code, _, err = call(monkeypatch, capsys, folder, *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    if not err.startswith("usage:"):
        assert len(err.splitlines()) == 1


def test_an_error_in_the_users_function_is_named(monkeypatch, capsys, folder):
    code, _, err = call(monkeypatch, capsys, folder, "compare", "task:broken")
    assert code == 1
    assert "ZeroDivisionError: in the user's code" in err
    assert "--debug" in err
    with pytest.raises(ZeroDivisionError):
        call(monkeypatch, capsys, folder, "--debug", "compare", "task:broken")


def test_exit_code_1_when_no_method_succeeds(monkeypatch, capsys, folder):
    (folder / "task.py").write_text(
        SETUP + "\ndef tiny():\n    return {**setup(), 'memory_budget': 10}\n"
    )
    code, out, _ = call(
        monkeypatch, capsys, folder, "compare", "task:tiny", "--methods", "full",
        "--quiet",
    )  # fmt: skip
    assert code == 1
    assert "skipped: would need" in out


def test_cache_file_is_written_and_reused(monkeypatch, capsys, folder):
    args = ["compare", "task:setup", "--methods", "map", "--cache", "c.json", "--quiet"]
    first = call(monkeypatch, capsys, folder, *args)
    second = call(monkeypatch, capsys, folder, *args)
    assert first == second  # also the times: nothing was run again
    (folder / "c.json").write_text("no json")
    code, _, err = call(monkeypatch, capsys, folder, *args)
    assert code == 2
    assert "Delete the file" in err


def test_list_of_methods(monkeypatch, capsys, folder):
    code, out, _ = call(monkeypatch, capsys, folder, "compare", "--list")
    assert code == 0
    assert any(line.startswith("ella-tempered ") for line in out.splitlines())


def test_doctor_reports_versions_and_the_model(monkeypatch, capsys, folder):
    code, out, err = call(monkeypatch, capsys, folder, "doctor", "task:without_test")
    assert code == 0, out
    assert "left" in err  # the progress bar
    assert "laplace-torch" in out
    assert 'hessian_structure="nystrom") is registered' in out
    assert "P = 22 trainable parameters, C = 2 outputs" in out
    for mode in ("forward", "reverse", "double_vjp"):
        assert any(
            line.strip().startswith(mode) and "works" in line
            for line in out.splitlines()
        )
    assert "last-layer-kron" in out
    # N·C = 120 gradients: all of them fit, and one is told how to use that.
    forecasts = [
        line.split() for line in out.splitlines() if line[:3] in ('  "', "  2")
    ]
    assert [line[0] for line in forecasts] == ['"exact"', "20"]
    assert all(line[-1] in ("ms", "s") for line in forecasts)
    assert "Choose n_eigenvalues='exact'" in out
    assert "la.optimize_calibration(val_loader)" in out


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--time-budget", "1e-9"], "the fastest of them, though it takes more"),
        (["--memory-budget", "100 kB"], "n_eigenvalues=20, complement='prior'"),
    ],
)
def test_doctor_keeps_to_its_budgets(monkeypatch, capsys, folder, options, advice):
    code, out, err = call(
        monkeypatch, capsys, folder, "doctor", "task:setup", "--quiet", *options
    )
    assert code == 0, out
    assert advice in out
    assert err == ""


def doctor_modes(out):
    """Way of computing features → what doctor says about it."""
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    modes = ("forward", "reverse", "double_vjp")
    return {line[0]: line[1] for line in lines if line and line[0] in modes}


def test_doctor_tries_nothing_that_does_not_fit(monkeypatch, capsys, folder):
    from laplace_ella import ELLALaplace
    from laplace_ella.support import resources

    tried = []
    fit = ELLALaplace.fit

    def spy(self, *args, **kwargs):
        tried.append(self.feature_mode.value)
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(ELLALaplace, "fit", spy)
    monkeypatch.setattr(resources, "available_memory", lambda device: 25 * 10**7)
    code, out, _ = call(monkeypatch, capsys, folder, "doctor", "task:pixels")
    assert code == 0, out
    assert "C = 3 × 32 × 32 outputs" in out
    modes = doctor_modes(out)
    assert modes["forward"].startswith("works")
    assert modes["double_vjp"].startswith("works")
    # P = 8,703; 2 copies of 3,072 × 8,703 floats are 214 MB
    assert "not tried: needs" in modes["reverse"]
    assert "MB for one example, 200.0 MB may be used" in modes["reverse"]
    assert set(tried) == {"forward", "double_vjp"}
    assert "diag               not supported: outputs at many positions" in out


def test_doctor_that_can_try_nothing_says_so(monkeypatch, capsys, folder):
    from laplace_ella.support import resources

    monkeypatch.setattr(resources, "available_memory", lambda device: 100)
    code, out, _ = call(monkeypatch, capsys, folder, "doctor", "task:setup")
    assert code == 1
    assert set(doctor_modes(out)) == {"forward", "reverse", "double_vjp"}
    assert all("not tried" in text for text in doctor_modes(out).values())
    assert "No problems found" not in out
    assert "that fits into the free memory was found" in out


def test_doctor_asks_for_the_layout(monkeypatch, capsys, folder):
    code, out, _ = call(
        monkeypatch, capsys, folder, "doctor", "task:pixels_without_layout"
    )
    assert code == 1
    assert "output_layout='channels_last'" in out


def test_doctor_of_iterable_data(monkeypatch, capsys, folder):
    code, out, _ = call(monkeypatch, capsys, folder, "doctor", "task:stream")
    assert code == 0, out
    assert "N = 60 data" in out
    assert "draws training examples by index" not in out.split("gp-ella")[0]
    assert "n_eigenvalues" in out  # what to choose, from times on a few inputs


def test_compare_passes_layout_and_memory_on(monkeypatch, capsys, folder):
    args = ["compare", "task:pixels", "--methods", "map,ella-marglik,diag", "--quiet"]
    code, out, _ = call(
        monkeypatch, capsys, folder, *args, "--memory-budget", "1 MB",
        "--links", "probit",
    )  # fmt: skip
    assert code == 0
    assert "skipped: would need" in out
    assert "not supported: outputs at many positions" in out
    code, _, err = call(monkeypatch, capsys, folder, *args, "--memory-budget", "much")
    assert code == 2
    assert "memory_budget must be bytes or a text like '8 GB'" in err


def test_demo_regression_part(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = call(
        monkeypatch, capsys, tmp_path, "demo", "--part", "regression", "--out", "figs"
    )
    assert code == 0
    assert (tmp_path / "figs" / "regression.png").stat().st_size > 20_000
    assert str(tmp_path / "figs") in out
    rows = [line.rsplit(maxsplit=1) for line in out.splitlines() if line[:2] == "  "]
    values = {name.strip(): float(value) for name, value in rows}
    assert {"KFAC", "diagonal", "last layer"} <= set(values)
    # With all gradients in its span and the complement kept, it is exact LLA.
    assert values["exact"] < 1e-3


def test_demo_classification_problem_is_what_it_says():
    demo = pytest.importorskip("laplace_ella.comparison.demo")
    pytest.importorskip("sklearn")
    problem = demo.load_digits_problem()
    labels = problem.train.dataset.tensors[1]
    assert set(labels.tolist()) == set(range(8))
    assert len(problem.ood["digits 8, 9"].dataset) == 354
    again = demo.load_digits_problem()
    for a, b in zip(problem.model.parameters(), again.model.parameters(), strict=True):
        assert (a == b).all()
