"""The command line."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap

import pytest

from laplace_ella import Report, available_methods, cli, compare

TASK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def setup():
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=20)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    return dict(model=model, likelihood="classification", train_loader=loader,
                test_loader=loader, val_loader=loader, n_samples=16, n_steps=3)

def incomplete(): return {"model": setup()["model"]}
def number(): return 3
def extra(): return {**setup(), "epochs": 3}
def frozen(): return {**setup(), "model": setup()["model"].requires_grad_(False)}
def without_test(): return {k: v for k, v in setup().items() if k != "test_loader"}
class Undifferentiable(nn.Linear):
    def forward(self, x): return torch.tensor(super().forward(x).detach().numpy())
def undifferentiable(): return {**setup(), "model": Undifferentiable(2, 2)}
"""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a command in a folder with tasks; return its code, output and errors."""
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)

    def run(*args):
        for name in ("task", "mytask"):
            sys.modules.pop(name, None)
        try:
            code = cli.main(args)
        except SystemExit as error:  # argparse
            code = error.code
        return code, *capsys.readouterr()

    yield run
    sys.modules.pop("task", None)


def test_compare_prints_and_writes(call, tmp_path):
    code, out, err = call(
        "compare", "task:setup", "--methods", "map,diag", "--links", "probit",
        "--out", "results", "--html", "page.html", "--seeds", "0,1",
    )  # fmt: skip
    assert code == 0
    assert out.splitlines()[0].split()[1:4:2] == ["method", "link"]
    assert "4 of 4: diag (probit): NLL" in err
    names = {"report.md", "report.csv", "report.json"}
    assert {path.name for path in (tmp_path / "results").iterdir()} == names
    assert len(list(Report.load(tmp_path / "results" / "report.json"))) == 4
    assert "task:setup" in (tmp_path / "page.html").read_text()


def test_help_has_all_options_and_an_example_that_runs(call, tmp_path):
    arguments = {"model", "likelihood", "train_loader", "test_loader", "val_loader"}
    arguments |= {"ood_loaders", "progress_bar"}
    assert {*cli.OPTIONS, *arguments} == set(inspect.signature(compare).parameters)
    code, out, _ = call("compare", "--help")
    assert code == 0
    for name in cli.OPTIONS:
        assert f"--{name.replace('_', '-')}" in out
    first = out.index("  import torch")
    last = out.index("  laplace-ella doctor")
    (tmp_path / "mytask.py").write_text(textwrap.dedent(out[first:last]))
    command = re.search(r"laplace-ella (compare \S+ --html \S+)", out)[1].split()
    code, table, err = call(*command, "--methods", "map,temperature")
    assert code == 0, err
    assert "temperature" in table
    assert (tmp_path / "report.html").exists()


def test_list_no_reference_and_no_command(call):
    code, out, _ = call("compare", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(available_methods())
    options = ("--methods", "map", "--reference", "none", "--quiet")
    assert call("compare", "task:setup", *options)[0] == 0
    assert call()[0] == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["compare", "task"], "TARGET must be module:function"),
        (["compare", "nothing:setup"], "no module 'nothing'"),
        (["compare", "task:nothing"], "no function 'nothing'"),
        (["compare", "task:number"], "must return a dict"),
        (["compare", "task:extra"], "epochs"),
        (["compare", "task:incomplete"], "must return ['likelihood', 'train_loader', "),
        (["compare", "task:without_test"], "must return ['test_loader']"),
        (["compare", "task:frozen"], "no trainable parameters"),
        (["compare", "task:setup", "--methods", "nope"], "Unknown method 'nope'"),
        (["compare", "task:setup", "--seeds", "a"], "--seeds"),
        (["nonsense"], "invalid choice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_with_2_and_a_remedy(call, arguments, text):
    code, _, err = call(*arguments)
    assert code == 2
    assert text in err
    assert "Traceback" not in err


def test_exit_codes_of_failures_and_interrupts(call, monkeypatch):
    common = ("compare", "task:setup", "--quiet", "--methods")
    code, out, _ = call(*common, "full", "--memory-budget", "1 kB")
    assert code == 1
    assert "skipped: needs" in out

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("laplace_ella.comparison.run.fit_method", interrupted)
    code, out, _ = call(*common, "map")
    assert code == 130
    assert "interrupted" in out


def test_doctor_checks_installation_and_model(call):
    code, out, _ = call("doctor", "task:without_test", "--memory-budget", "1 GB")
    assert code == 0, out
    for text in ("laplace-torch", "forward", "reverse", "works", "budget 1.0 GB"):
        assert text in out
    assert "P = 22, C = 2, N = 60" in out
    code, out, _ = call("doctor", "task:undifferentiable")
    assert code == 1
    assert "Problem: No way to differentiate this model was found" in out
