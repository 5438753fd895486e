"""The report: means over seeds, marks, tables, the page, files."""

from __future__ import annotations

import csv
import io
import math

import pytest

from laplace_ella import Report
from laplace_ella.comparison.bootstrap import Difference
from laplace_ella.comparison.report import Result, badness, number, write

DRAWS = [0.0, 0.1, 0.2, 0.3]


def result(method, nll, *replicates, link="", **kwargs):
    scores = {"accuracy": 0.9, "nll": nll}
    draws = {"nll": list(replicates)} if replicates else {}
    return Result(
        method, link, metrics=scores, costs={"fit_s": 1.0}, replicates=draws, **kwargs
    )


@pytest.fixture
def report():
    settings = {"tuning": "training data", "chosen": ["prior_precision"]}
    settings |= {"prior_precision": 2.0, "at_border": True}
    rows = [
        result("map", 0.16, *(v + 0.01 + 1e-4 * i for i, v in enumerate(DRAWS))),
        result("ella", 0.15, *DRAWS, link="mc", note="rank 13", settings=settings),
        result("ella", 0.155, 0.02, 0.08, 0.24, 0.3, link="probit"),
        result("tau", 0.05, *DRAWS, on_validation=True),
        result("kron", 0.2, *DRAWS, left_out="BatchNorm2d"),
        Result("full", status="skipped: needs 1.2 TB"),
    ]
    origin = {"model": "Sequential"}
    return Report(rows, "classification", origin=origin)


def test_numbers_and_directions():
    ascending = [("nll", 0.1, 0.2), ("accuracy", 0.9, 0.8), ("auroc:far", 0.9, 0.8)]
    ascending += [("coverage_90", 0.91, 0.85), ("coverage_90", 0.89, 0.99)]
    for column, better, worse in ascending:
        assert badness(column, better) < badness(column, worse)
    numbers = [("accuracy", 0.9173, "91.7"), ("nll", 0.27451, "0.2745")]
    numbers += [("nll", 12345.6, "1.23e+04"), ("ece", 0.0081, "0.008")]
    numbers += [("fit_s", 0.123, "0.12"), ("fit_s", 123.4, "123")]
    numbers += [("nll", None, "–"), ("nll", math.nan, "–")]
    for column, value, text in numbers:
        assert number(column, value) == text
    clear = [Difference(*d).is_clear for d in ((0.1, 0.2), (0.3, 0.2), (0.1, None))]
    assert clear == [False, True, True]


def test_rows_are_marked_within_their_group(report):
    """All that cannot be told from the best of its group has a star, and no other."""
    lines = str(report).splitlines()
    names = ["method", "link", "tuned on", "acc. %", "NLL", "fit s"]
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == names
    assert len({line.rindex("|") for line in lines[:6]}) == 1  # aligned
    marked = {line.split()[1] for line in lines[2:8] if "*" in line}
    assert marked == {"ella", "tau"}
    assert "90.0*" not in str(report)  # all are equal
    assert any(line.startswith("| full") and "1.2 TB" in line for line in lines)
    assert any(line.startswith("| kron (without BatchNorm2d)") for line in lines)
    assert "δ = 2*" in str(report)
    assert "- ella (mc): rank 13" in lines
    found = report.differences()
    assert found["ella", "mc"] == Difference(0.0, 0.0)
    assert found["tau", ""].value == 0
    assert found["map", ""].value == pytest.approx(0.01)
    assert found["map", ""].half_width < 0.001
    assert ("full", "") not in found
    best = report.best("nll")
    assert (best.method, best.label, best.mean["nll"]) == ("tau", "tau", 0.05)


def test_lookups_and_their_errors(report):
    assert [r.link for r in report["ella"]] == ["mc", "probit"]
    assert len(list(report)) == 6
    with pytest.raises(KeyError, match="it has map, ella, tau, kron, full"):
        report["diag"]
    with pytest.raises(KeyError, match="there are accuracy, nll, fit_s"):
        report.best("rmse")
    with pytest.raises(KeyError, match="ece"):
        report.differences("ece")
    with pytest.raises(ValueError, match=r"columns must be among .* got 'ece'"):
        report.to_markdown(["ece"])
    assert str(Report([])) == "No results."


def test_means_and_errors_over_seeds():
    rows = [result("ella", nll, nll, 2 * nll, seed=i) for i, nll in enumerate((1, 3))]
    rows.append(Result("ella", seed=2, status="out of memory"))
    (row,) = Report(rows).rows()
    assert (row.mean["nll"], row.error["nll"]) == (2.0, 1.0)
    assert row.replicates["nll"] == [2.0, 4.0]
    assert row.note == "1 of 3 seeds: out of memory"
    text = str(Report(rows))
    assert "2.0000 ± 1.0000" in text
    assert "standard errors over 3 seeds" in text
    assert "nll_se" in Report(rows).to_csv()


def test_markdown_and_csv(report):
    text = report.to_markdown()
    for table in text.split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
    assert str(report) == text
    some = report.to_markdown(["nll", "nll_to_best"]).splitlines()
    names = ["method", "link", "tuned on", "NLL", "NLL − best"]
    assert [cell.strip() for cell in some[0].split("|")[1:-1]] == names
    assert "a\\|b" in Report([Result("a|b", metrics={"nll": 1.0})]).to_markdown()
    lines = list(csv.DictReader(io.StringIO(report.to_csv())))
    names = "map", "ella", "ella", "kron (without BatchNorm2d)", "full", "tau"
    assert tuple(line["method"] for line in lines) == names
    assert float(lines[0]["nll"]) == 0.16
    assert lines[4]["nll"] == ""
    assert lines[4]["status"] == "skipped: needs 1.2 TB"


def test_files(report, tmp_path):
    path = tmp_path / "new" / "report.json"
    report.save(path)
    assert list(path.parent.iterdir()) == [path]
    assert Report.load(path) == report
    for content in ("not json", "[]", '{"format": 99}', '{"format": 2}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="is not a comparison report"):
            Report.load(path)
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "new", "text")
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]  # nothing half-written


def test_the_page_is_complete_escaped_and_the_same_each_time(report, tmp_path):
    pytest.importorskip("matplotlib")
    evil = "<script>alert(1)</script>"
    curve = {"confidence": [0.6], "accuracy": [0.5], "count": [3]}
    rows = [
        *report,
        Result(evil, status=evil, note=evil),
        result(f"{evil}$x$", 1.0, note=evil, curves={"reliability": curve}),
    ]
    page = Report(rows, "classification", origin={evil: evil})
    path = page.to_html(tmp_path / "deep" / "page.html", title=evil)
    text = path.read_text("utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert text.count("data:image/svg+xml;base64,") == 2  # no predict_s: no cost
    assert "default-src 'none'" in text
    for part in ("skipped: needs 1.2 TB", "δ = 2*", "rank 13", "BatchNorm2d"):
        assert part in text
    assert page.to_html(tmp_path / "again.html", evil).read_text("utf-8") == text
