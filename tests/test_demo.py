"""The demo's tables are those of its report, and the code still gives them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laplace_ella.comparison.report import Report

DEMO = Path(__file__).parents[1] / "examples" / "paper" / "results" / "demo"

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
