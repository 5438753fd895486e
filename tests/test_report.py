"""The report: aggregation, marks, formats, files."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest

from laplace_ella.comparison.report import Report, Result
from laplace_ella.comparison.results import distance_from_best, mean_and_error
from laplace_ella.comparison.tables import format_value


def make_report() -> Report:
    def row(method, link, nll, accuracy, seed=0, **kwargs):
        return Result(
            method,
            link,
            seed,
            metrics={"accuracy": accuracy, "nll": nll},
            costs={"fit_s": 1.0, "floats": 12_700.0},
            **kwargs,
        )

    return Report(
        [
            row("map", "", 0.30, 0.90),
            row("ella", "mc", 0.25, 0.90, note="rank 13"),
            row("ella", "probit", 0.28, 0.91),
            Result("kron", status="not supported: BatchNorm2d (KFAC)"),
        ],
        "classification",
    )


def test_mean_and_standard_error_by_hand():
    mean, error = mean_and_error([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3)
    # sample variance ((4/3)² + (1/3)² + (5/3)²)/2 = 7/3; s/√3
    assert error == pytest.approx(math.sqrt(7 / 3 / 3))
    assert mean_and_error([1.0]) == (1.0, None)


@pytest.mark.parametrize(
    ("column", "better", "worse"),
    [
        ("nll", 0.1, 0.2),
        ("accuracy", 0.9, 0.8),
        ("auroc:SVHN", 0.9, 0.8),
        ("coverage_90", 0.91, 0.85),
        ("coverage_90", 0.89, 0.99),
    ],
)
def test_direction_of_each_metric(column, better, worse):
    assert distance_from_best(column, better) < distance_from_best(column, worse)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("accuracy", 0.9173, "91.7"),
        ("nll", 0.27451, "0.2745"),
        ("nll", 12345.6, "1.23e+04"),
        ("ece", 0.0081, "0.008"),
        ("fit_s", 0.123, "0.12"),
        ("fit_s", 123.4, "123"),
        ("floats", 269_722.0, "270 k"),
        ("floats", 5.0, "5"),
        ("nll", None, "–"),
        ("nll", math.nan, "–"),
    ],
)
def test_format_value(column, value, text):
    assert format_value(column, value) == text


def test_table_marks_the_best_and_shows_the_status():
    lines = str(make_report()).splitlines()
    assert lines[0].split() == ["method", "link", "acc.", "NLL", "fit", "s", "floats"]
    by_name = {line.split()[0] + line.split()[1]: line for line in lines[2:]}
    assert "0.2500*" in by_name["ellamc"]
    assert "91.0*" in by_name["ellaprobit"]
    assert "*" not in next(line for line in lines if line.startswith("map"))
    assert any("not supported: BatchNorm2d (KFAC)" in line for line in lines)
    assert "ella (mc): rank 13" in lines


def test_no_mark_where_all_are_equal():
    report = Report(
        [Result("a", metrics={"rmse": 1.0}), Result("b", metrics={"rmse": 1.0})]
    )
    assert "1.0000*" not in str(report)


def test_link_column_is_left_out_without_links():
    report = Report(
        [Result("a", metrics={"rmse": 1.0}), Result("b", status="out of memory")]
    )
    assert str(report).splitlines()[0].split() == ["method", "RMSE"]
    assert "out of memory" in str(report)


def test_a_long_status_is_cut_in_the_table_only():
    status = "failed: " + "x" * 300
    report = Report([Result("a", metrics={"nll": 1.0}), Result("b", status=status)])
    assert status not in str(report)
    assert "…" in str(report)
    assert status in report.to_csv()


def test_table_of_nothing_and_of_failures_only():
    assert str(Report([])) == "No results."
    assert "out of memory" in str(Report([Result("full", status="out of memory")]))


def test_markdown_is_rectangular_with_bold_best():
    lines = make_report().to_markdown().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert "**0.2500**" in make_report().to_markdown()
    assert "- ella (mc): rank 13" in lines


def test_csv_has_full_precision_and_status():
    rows = list(csv.DictReader(io.StringIO(make_report().to_csv())))
    assert [row["method"] for row in rows] == ["map", "ella", "ella", "kron"]
    assert float(rows[0]["nll"]) == 0.30
    assert rows[3]["nll"] == ""
    assert rows[3]["status"].startswith("not supported")


def test_pandas_has_one_line_per_result():
    pytest.importorskip("pandas")
    frame = make_report().to_pandas()
    assert list(frame["method"]) == ["map", "ella", "ella", "kron"]
    assert frame["nll"].isna().tolist() == [False, False, False, True]


def test_best_and_getitem():
    report = make_report()
    assert (report.best("nll").method, report.best("nll").link) == ("ella", "mc")
    assert len(report["ella"]) == 2
    with pytest.raises(KeyError, match="it has map, ella, kron"):
        report["diag"]
    with pytest.raises(KeyError, match="there are accuracy, nll"):
        report.best("rmse")


def test_seeds_give_mean_and_standard_error():
    report = Report(
        [
            Result("ella", "mc", seed, metrics={"nll": v})
            for seed, v in enumerate([1, 3])
        ]
    )
    (row,) = report.rows()
    assert (row.mean["nll"], row.error["nll"], row.n_seeds) == (2.0, 1.0, 2)
    assert "2.0000 ± 1.0000" in str(report)
    assert "standard error over 2 seeds" in str(report)
    assert "nll_se" in report.to_csv()


def test_a_failed_seed_is_noted_and_the_others_kept():
    report = Report(
        [
            Result("ella", "mc", 0, metrics={"nll": 1.0}),
            Result("ella", "mc", 1, status="out of memory"),
        ]
    )
    (row,) = report.rows()
    assert row.ok
    assert row.note == "1 of 2 seeds: out of memory"


def test_dict_round_trip_and_strict_json():
    report = Report([Result("a", metrics={"nll": math.nan, "ece": 0.5})], "x", True)
    text = json.dumps(report.to_dict(), allow_nan=False)
    again = Report.from_dict(json.loads(text))
    assert again.interrupted
    assert again.results[0].metrics == {"nll": None, "ece": 0.5}
    assert str(again)


def test_save_load_and_merge(tmp_path):
    path = tmp_path / "new" / "report.json"
    make_report().save(path)
    assert Report.load(path) == Report.load(path)
    assert [r.method for r in Report.load(path)] == ["map", "ella", "ella", "kron"]
    assert list(path.parent.iterdir()) == [path]
    newer = Report([Result("map", metrics={"nll": 9.0}), Result("diag")])
    merged = Report.load(path).merge(newer)
    assert [r.method for r in merged] == ["map", "ella", "ella", "kron", "diag"]
    assert merged["map"][0].metrics == {"nll": 9.0}


def test_load_of_something_else_names_the_remedy(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("not json")
    with pytest.raises(ValueError, match="Delete the file"):
        Report.load(path)
    path.write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 1, got 99"):
        Report.load(path)


def test_curves_by_link():
    report = Report(
        [
            Result("map", curves={"reliability": {"accuracy": [1]}}),
            Result("ella", "mc", curves={"reliability": {"accuracy": [2]}}),
            Result("ella", "probit", curves={"reliability": {"accuracy": [3]}}),
        ]
    )
    assert list(report.curves("reliability", "mc")) == ["map", "ella"]
    assert list(report.curves("reliability")) == ["map", "ella (mc)", "ella (probit)"]


def test_flat_dict_has_scalars_by_method_link_and_column():
    flat = make_report().to_dict(flat=True)
    assert flat == {
        "map/accuracy": 0.90,
        "map/nll": 0.30,
        "map/fit_s": 1.0,
        "map/floats": 12_700.0,
        "ella/mc/accuracy": 0.90,
        "ella/mc/nll": 0.25,
        "ella/mc/fit_s": 1.0,
        "ella/mc/floats": 12_700.0,
        "ella/probit/accuracy": 0.91,
        "ella/probit/nll": 0.28,
        "ella/probit/fit_s": 1.0,
        "ella/probit/floats": 12_700.0,
    }


def test_flat_dict_of_seeds_and_of_names_that_loggers_refuse():
    report = Report(
        [
            Result("K=5", "mc", seed, metrics={"nll": v, "auroc:digits 8, 9": 0.5})
            for seed, v in enumerate([1.0, 3.0])
        ]
        + [Result("K+5", "mc", metrics={"nll": math.nan, "ece": 0.1})]
        + [Result("K+5", "probit", metrics={"nll": 4.0})]
    )
    assert report.to_dict(flat=True) == {
        "K_5/mc/nll": 2.0,
        "K_5/mc/nll_se": 1.0,
        "K_5/mc/auroc/digits 8_ 9": 0.5,
        "K_5/mc/auroc/digits 8_ 9_se": 0.0,
        "K_5/mc/ece": 0.1,
        "K_5/probit/nll": 4.0,
    }


def test_flat_dict_never_overwrites():
    report = Report([Result(name, metrics={"nll": 1.0}) for name in ("a=b", "a+b")])
    assert report.to_dict(flat=True) == {"a_b/nll": 1.0, "a_b/nll_": 1.0}
