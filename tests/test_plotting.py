"""What the figures contain: lines, labels, marks; and that they set no global style."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace as Row

import numpy as np
import pytest
import torch

from laplace_ella import metrics, plotting

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

BINS = {"confidence": [0.6, 0.9], "accuracy": [0.5, 0.95], "count": [3, 7]}


@pytest.fixture(autouse=True)
def _clean_figures():
    style = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == style, "a plot changed the global style"
    plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots()[1]


class Report:
    """Curves and rows, by the names that those of `compare` have."""

    def curves(self, name, link=None):
        names = ["map", *(f"ella ({k})" for k in ("mc", "probit") if link in (None, k))]
        return dict.fromkeys(names, BINS) if name == "reliability" else {}

    def rows(self):
        known = [("map", "", 0.4, 0.0), ("ella", "mc", 0.3, 2.0)]
        rows = [Row(label="kron", link="", mean={}, error={})]
        for label, link, nll, seconds in [*known, ("ella", "probit", 0.35, 1.0)]:
            mean = {"nll": nll, "predict_s": seconds}
            rows.append(Row(label=label, link=link, mean=mean, error={}))
        return rows


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
    for label, expected in (("mean", mean), ("truth", x), ("training data", [1.0])):
        np.testing.assert_allclose(line(ax, label).get_ydata(), expected, atol=1e-6)
    outer, inner = ax.collections
    assert (outer.get_label(), inner.get_label()) == ("± 2 std", "± 1 std")
    for band, width in ((outer, 2.0), (inner, 1.0)):
        heights = band.get_paths()[0].vertices[:, 1]
        assert heights.max() == pytest.approx(1.0 + width * 0.5)
        assert heights.min() == pytest.approx(0.0 - width * 0.5)


def test_reliability_shows_the_gap(ax):
    plotting.plot_reliability(Report(), ax, link="mc")
    assert labels(ax) == ["map", "ella (mc)"]
    ella = line(ax, "ella (mc)")
    np.testing.assert_allclose(ella.get_xdata(), [0.6, 0.9])
    np.testing.assert_allclose(ella.get_ydata(), [-0.1, 0.05])
    assert ax.get_ylabel() == "accuracy − confidence"
    few = plotting.plot_reliability({"few": BINS}, min_count=5)  # bins of 3 and 7
    np.testing.assert_allclose(line(few, "few").get_xdata(), [0.9])
    probs = torch.tensor([[0.8, 0.2], [0.3, 0.7]])
    curve = metrics.reliability_curve(probs, torch.tensor([0, 0]))
    one = plotting.plot_reliability({"mine": curve})
    np.testing.assert_allclose(line(one, "mine").get_ydata(), [-0.7, 0.2], atol=1e-6)


def test_coverage_and_differences(ax):
    curve = {"nominal": [0.5, 0.9], "observed": [0.4, 0.95]}
    plotting.plot_coverage({"exact": curve}, ax)
    np.testing.assert_allclose(line(ax, "exact").get_ydata(), [-0.1, 0.05])
    with pytest.raises(ValueError, match="no curve 'coverage'"):
        plotting.plot_coverage({})
    one = Row(value=0.0, half_width=0.0, is_clear=False)
    other = Row(value=0.2, half_width=0.1, is_clear=True)
    ax = plotting.plot_differences({"map": other, "kron": None, "ella": one})
    assert [t.get_text() for t in ax.get_yticklabels()] == ["ella", "map"]
    faces = [container[0].get_markerfacecolor() for container in ax.containers]
    assert faces == ["none", plotting.COLOURS[0]]


def test_cost_against_quality(ax):
    plotting.plot_cost_quality(Report(), ax)
    assert labels(ax) == ["map", "ella (mc)", "ella (probit)"]
    assert ax.get_xscale() == "log"
    assert ax.get_xlabel() == "prediction time on the test set (s)"
    points = [container[0].get_xydata()[0].tolist() for container in ax.containers]
    assert points == [[1e-3, 0.4], [2.0, 0.3], [1.0, 0.35]]
    one_link = plotting.plot_cost_quality(Report().rows(), link="mc")
    assert labels(one_link) == ["map", "ella"]
    with pytest.raises(ValueError, match="columns are nll, predict_s"):
        plotting.plot_cost_quality(Report(), ax, quality="rmse")


def test_lines_differ_without_colour():
    styles = [plotting.line_style(i) for i in range(12)]
    assert len({(str(s["linestyle"]), s["marker"]) for s in styles}) == 12
    # Neighbours differ in lightness or dash, so grey is enough.
    dashes = [str(s["linestyle"]) for s in styles]
    assert all(a != b for a, b in pairwise(dashes))


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install "laplace-ella\[plots\]"'):
        plotting.plot_reliability({"network": BINS})
