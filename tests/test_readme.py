"""The README's code runs as printed, block after block, and its tables are those of the
result files, which the code still gives."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

import laplace_ella
from laplace_ella.comparison.report import Report

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = README.parent / "examples"
PAGES = [README, EXAMPLES / "README.md", EXAMPLES / "paper" / "RESULTS.md"]


def test_code_blocks_run():
    """Every python block of the README executes, in order, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, block in enumerate(blocks):
            exec(compile(block, f"README block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    """Relative links of README and results lead to files."""
    links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
    assert links
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


# --- no table is typed or stale ------------------------------------------------------

DEMO = EXAMPLES / "paper" / "results" / "demo"

#: Rows of the demo that are run again. Platforms differ in the last bits of a float and
#: so, after 40 epochs, in the weights of the network: the tolerance is that of this
#: difference, not of the methods, whose figures agree to six digits on one platform.
AGAIN = ("map", "temperature", "ella", "ella-calibrated", "last-layer-full-calibrated")
TOLERANCE = {"nll": 0.02, "ece": 0.02, "brier": 0.01, "accuracy": 0.02}


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    from laplace_ella.comparison import demo

    return demo


@pytest.mark.parametrize("page", [PAGES[0], PAGES[2]], ids=lambda page: page.name)
def test_tables_are_those_of_the_result_files(page):
    """`examples/paper/update_results.py` has nothing to change."""
    path = EXAMPLES / "paper" / "update_results.py"
    spec = importlib.util.spec_from_file_location("update_results", path)
    update_results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(update_results)
    text = page.read_text()
    assert "<!-- begin" in text
    assert update_results.fill(text) == text


def test_tables_of_the_demo_are_those_of_its_report(demo):
    """The tables, the report that they were written from, and the demo of today."""
    report = Report.load(DEMO / "classification.json")
    short = (DEMO / "classification_short.md").read_text()
    assert short == report.to_markdown(demo.SHORT) + "\n"
    assert (DEMO / "classification.md").read_text() == report.to_markdown() + "\n"
    rows = [(row.method, row.link) for row in report.rows()]
    assert list(dict.fromkeys(name for name, _ in rows)) == [
        *demo.CLASSIFICATION_METHODS
    ]
    assert {link for _, link in rows} == {"", *demo.LINKS}


def test_figures_of_the_demo_are_those_of_a_fresh_run(demo):
    stored = Report.load(DEMO / "classification.json")
    expected = {(r.method, r.link): r for r in stored}
    problem = demo.load_digits_problem()
    for row in demo.compare_on_digits(problem, AGAIN, ["probit"]):
        assert row.ok, row.status
        for name, tolerance in TOLERANCE.items():
            wanted = expected[row.method, row.link].metrics[name]
            assert row.metrics[name] == pytest.approx(wanted, abs=tolerance), row.method


def test_divergences_of_the_demo_are_those_of_a_fresh_run(demo, tmp_path):
    kls = demo.run_regression_demo(tmp_path, echo=lambda text: None)
    rows = re.findall(
        r"\| ([^|]+) \| ([\d.]+) \|", (DEMO / "regression.md").read_text()
    )
    assert [name for name, _ in rows] == list(kls)
    for name, value in rows:
        assert kls[name] == pytest.approx(float(value), rel=0.1, abs=0.005), name


# --- names ---------------------------------------------------------------------------


def test_public_names_are_documented():
    """Every public name has a docstring of its own."""
    for name in laplace_ella.__all__:
        assert getattr(laplace_ella, name).__doc__, name
