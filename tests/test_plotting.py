"""What the figures contain: lines, labels, marks; and that they set no global style."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from laplace_ella import metrics, plotting
from laplace_ella.comparison import plot_style as _plot_style
from laplace_ella.comparison.report import Report, Result

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _clean_figures():
    style = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == style, "a plot changed the global style"
    plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots()[1]


def make_report() -> Report:
    def result(method, link, nll, seconds):
        curve = {"confidence": [0.6, 0.9], "accuracy": [0.5, 0.95], "count": [3, 7]}
        error = {"threshold": [0.0, 0.5], "error": [0.2, 0.1], "fraction": [1.0, 0.5]}
        return Result(
            method,
            link,
            metrics={"nll": nll},
            costs={"predict_s": seconds},
            curves={
                "reliability": curve,
                "error_below": error,
                "error_above:SVHN": error,
            },
        )

    return Report(
        [
            result("map", "", 0.4, 0.0),
            result("ella", "mc", 0.3, 2.0),
            result("ella", "probit", 0.35, 1.0),
            Result("kron", status="out of memory"),
        ]
    )


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def line(ax, label):
    return next(x for x in ax.get_lines() if x.get_label() == label)


def test_regression_bands(ax):
    x = torch.linspace(-1, 1, 5)
    mean, std = x.square(), torch.full((5,), 0.5)
    back = plotting.plot_regression(
        x, mean, std, ax, train=([0.0], [1.0]), truth=x, title="ELLA"
    )
    assert back is ax
    assert ax.get_title() == "ELLA"
    np.testing.assert_allclose(line(ax, "mean").get_ydata(), mean, atol=1e-6)
    np.testing.assert_allclose(line(ax, "truth").get_ydata(), x, atol=1e-6)
    np.testing.assert_allclose(line(ax, "training data").get_ydata(), [1.0])
    outer, inner = ax.collections
    assert (outer.get_label(), inner.get_label()) == ("± 2 std", "± 1 std")
    for band, width in ((outer, 2.0), (inner, 1.0)):
        heights = band.get_paths()[0].vertices[:, 1]
        assert heights.max() == pytest.approx(1.0 + width * 0.5)
        assert heights.min() == pytest.approx(0.0 - width * 0.5)


def test_reliability_shows_the_gap(ax):
    plotting.plot_reliability(make_report(), ax, link="mc")
    assert labels(ax) == ["map", "ella"]
    np.testing.assert_allclose(line(ax, "ella").get_xdata(), [0.6, 0.9])
    np.testing.assert_allclose(line(ax, "ella").get_ydata(), [-0.1, 0.05])
    assert ax.get_ylabel() == "accuracy − confidence"


def test_reliability_leaves_out_small_bins(ax):
    plotting.plot_reliability(make_report(), ax, link="mc", min_count=5)
    np.testing.assert_allclose(line(ax, "ella").get_xdata(), [0.9])


def test_reliability_of_a_metric_curve(ax):
    probs = torch.tensor([[0.8, 0.2], [0.3, 0.7]])
    curve = metrics.reliability_curve(probs, torch.tensor([0, 0]))
    plotting.plot_reliability({"mine": curve}, ax)
    np.testing.assert_allclose(line(ax, "mine").get_ydata(), [-0.7, 0.2], atol=1e-6)


@pytest.mark.parametrize(
    ("side", "ood", "sign"), [("below", None, "≤"), ("above", "SVHN", "≥")]
)
def test_error_versus_confidence(ax, side, ood, sign):
    plotting.plot_error_versus_confidence(make_report(), ax, side=side, ood=ood)
    assert labels(ax) == ["map", "ella (mc)", "ella (probit)"]
    assert sign in ax.get_ylabel()
    np.testing.assert_allclose(line(ax, "map").get_ydata(), [0.2, 0.1])


def test_missing_curves_are_named(ax):
    with pytest.raises(ValueError, match="no curve 'error_below:CIFAR'"):
        plotting.plot_error_versus_confidence(make_report(), ax, ood="CIFAR")


def test_history_marks_the_stopping_point(ax):
    history = [
        {"n_data": n, "loss": v} for n, v in [(100, 0.7), (500, 0.28), (2000, 0.34)]
    ]
    plotting.plot_history(history, ax, baseline=0.387)
    np.testing.assert_allclose(line(ax, "ELLA").get_xdata(), [100, 500, 2000])
    assert any(text.get_text() == "stop at N = 500" for text in ax.texts)
    assert labels(ax) == ["ELLA", "MAP"]
    assert ax.get_xscale() == "log"
    with pytest.raises(ValueError, match="early_stopping=True"):
        plotting.plot_history([], ax)


def test_rank_curves_have_two_axes(ax):
    plotting.plot_rank_curves([1, 2, 4], [0.5, 0.4, 0.3], [-9.0, -8.0, -7.5], ax)
    assert labels(ax) == ["validation NLL", "log evidence"]
    right = next(other for other in ax.figure.axes if other is not ax)
    np.testing.assert_allclose(right.get_lines()[0].get_ydata(), [-9, -8, -7.5])
    assert right.get_ylabel() == "log evidence"


def test_spectra_are_told_apart(ax):
    plotting.plot_spectrum(torch.tensor([4.0, 1.0]), ax, trace=10.0, label="M = 16")
    plotting.plot_spectrum([3.0, 1.0], ax, label="M = 32")
    first, second = ax.get_lines()
    assert first.get_linestyle() != second.get_linestyle()
    assert first.get_color() != second.get_color()
    assert ax.get_yscale() == "log"
    assert ax.get_title() == "2 directions: 50% of the trace"


def test_heatmap_has_values_and_leaves_nan_white(ax):
    errors = [[0.5, float("nan")], [0.4, 0.1]]
    plotting.plot_error_heatmap(errors, [4, 8], [4, 8], ax, title="ε")
    assert [t.get_text() for t in ax.texts] == ["0.5", "0.4", "0.1"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["4", "8"]
    assert ax.get_ylabel() == "samples M"
    with pytest.raises(ValueError, match=r"\(2, 1\), got \(2, 2\)"):
        plotting.plot_error_heatmap(errors, [4, 8], [4], ax)


def test_boxes_by_level_and_method(ax):
    values = {"MAP": {1: [0.1, 0.2], 2: [0.3, 0.4]}, "ELLA": {1: [0.1, 0.1], 2: [0.2]}}
    plotting.plot_boxes(values, ax)
    assert labels(ax) == ["MAP", "ELLA"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "2"]
    hatches = [patch.get_hatch() for patch in ax.get_legend().get_patches()]
    assert len(set(hatches)) == 2
    assert len(ax.patches) == 4


def test_cost_against_quality(ax):
    plotting.plot_cost_quality(make_report(), ax)
    assert labels(ax) == ["map", "ella (mc)", "ella (probit)"]
    assert ax.get_xscale() == "log"
    assert ax.get_xlabel() == "prediction time on the test set (s)"
    points = [container[0].get_xydata()[0].tolist() for container in ax.containers]
    assert points == [[1e-3, 0.4], [2.0, 0.3], [1.0, 0.35]]
    with pytest.raises(ValueError, match="columns are nll, predict_s"):
        plotting.plot_cost_quality(make_report(), ax, quality="rmse")


def test_lines_differ_without_colour():
    styles = [_plot_style.line_style(i) for i in range(12)]
    looks = {(str(s["linestyle"]), s["marker"]) for s in styles}
    assert len(looks) == 12
    # Neighbours differ in lightness or dash, so grey is enough.
    dashes = [str(s["linestyle"]) for s in styles]
    assert all(a != b for a, b in pairwise(dashes))


def test_an_axis_is_made_where_none_is_given():
    ax = plotting.plot_spectrum([2.0, 1.0])
    assert ax.get_lines()


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install "laplace-ella\[plots\]"'):
        plotting.plot_spectrum([1.0])
