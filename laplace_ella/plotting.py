"""Figures of predictions and of comparisons.

Every function draws into `ax` (a new one if None), returns it and sets no global style.
Lines differ in dash and marker as well as in colour, so that they can be told apart in
grey. matplotlib is an extra: `pip install "laplace-ella[plots]"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_cost_quality",
    "plot_coverage",
    "plot_differences",
    "plot_regression",
    "plot_reliability",
]

#: Okabe and Ito (2008), for colour-blind readers; the palest (yellow) left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "p")
GREY = "0.45"

#: Labels of axes that show a column of a report.
LABELS = {
    "fit_s": "fitting time (s)",
    "tune_s": "tuning time (s)",
    "predict_s": "prediction time on the test set (s)",
    "nll": "test NLL",
    "ece": "test ECE",
}

LEGEND: dict[str, Any] = {"fontsize": "small", "frameon": False}

#: An array, tensor or sequence of numbers; arguments of matplotlib.
Numbers = Any
Look = dict[str, Any]


def line_style(i: int, every: int | tuple[int, int] = 1) -> Look:
    """Return the look of the i-th line, with a marker on every `every`-th point."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        # Colours repeat after 7; dashes and markers do not align with them.
        "linestyle": DASHES[(i + i // len(COLOURS)) % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
        "markevery": every,
        "linewidth": 1.4,
    }


def _axes(ax: Axes | None, x: str, y: str) -> Axes:
    """Return the given axes, or new ones, with labels and no frame above and right."""
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError(
                'Plots need matplotlib: pip install "laplace-ella[plots]"'
            ) from error
        ax = plt.subplots(figsize=(5, 3.6), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(xlabel=x, ylabel=y)
    return ax


def _numbers(values: Numbers) -> np.ndarray:
    values = torch.as_tensor(values, dtype=torch.float64)
    return values.detach().cpu().flatten().numpy()


def _draw_gaps(
    ax: Axes, curves: Any, kind: str, link: str | None = None, min_count: int = 1
) -> Axes:
    """Draw y − x against x for curves by label, or for those of a report."""
    if not isinstance(curves, Mapping):
        curves = curves.curves(kind) if link is None else curves.curves(kind, link)
    if not curves:
        of_link = f" for link {link!r}" if link else ""
        raise ValueError(f"There is no curve {kind!r}{of_link} to draw.")
    coverage = kind == "coverage"
    names = ("nominal", "observed") if coverage else ("confidence", "accuracy")
    ax.axhline(0.0, color=GREY, linewidth=1.0)
    for i, (label, curve) in enumerate(curves.items()):
        curve = curve if isinstance(curve, Mapping) else vars(curve)
        x, y = (_numbers(curve[name]) for name in names)
        many = _numbers(curve.get("count", min_count + 0 * x)) >= min_count
        look = line_style(i, (i % 3, 3) if coverage else 1)
        ax.plot(x[many], (y - x)[many], label=label, **look)
    ax.legend(**LEGEND)
    return ax


def plot_regression(
    x: Numbers,
    mean: Numbers,
    std: Numbers,
    ax: Axes | None = None,
    *,
    train: tuple[Numbers, Numbers] | None = None,
    truth: Numbers = None,
    title: str | None = None,
    widths: Sequence[float] = (1.0, 2.0),
) -> Axes:
    """Draw mean and bands of a 1-D regression (Deng et al. 2022, Fig. 1).

    `x` `(N,)` ascends; `train` has training data, drawn as dots, `truth` `(N,)` the
    function without noise; `widths` are in standard deviations.

    >>> x = torch.linspace(-1, 1, 20)
    >>> ax = plot_regression(x, x.sin(), 0.1 + x.abs(), train=(x[::5], x[::5].sin()))
    >>> ax.get_xlabel()
    'x'
    """
    ax = _axes(ax, "x", "y")
    x, mean, std = _numbers(x), _numbers(mean), _numbers(std)
    for i, width in enumerate(sorted(widths, reverse=True)):  # inner ones darker
        look: Look = {"alpha": min(0.2 + 0.15 * i, 0.6), "linewidth": 0}
        band = mean - width * std, mean + width * std
        ax.fill_between(x, *band, color=COLOURS[0], label=f"± {width:g} std", **look)
    ax.plot(x, mean, color=COLOURS[0], linewidth=1.6, label="mean")
    if truth is not None:
        dashed: Look = {"color": "black", "linestyle": (0, (4, 2)), "linewidth": 1.0}
        ax.plot(x, _numbers(truth), label="truth", **dashed)
    if train is not None:
        points = (_numbers(values) for values in train)
        look: Look = {"linestyle": "none", "marker": "o", "markersize": 4}
        edge: Look = {"markeredgecolor": "white", "markeredgewidth": 0.6}
        ax.plot(*points, color=COLOURS[1], label="training data", **look, **edge)
    ax.set_title(title or ax.get_title())
    return ax


def plot_reliability(
    curves: Any, ax: Axes | None = None, *, link: str | None = None, min_count: int = 1
) -> Axes:
    """Draw accuracy minus confidence against confidence; zero is calibrated.

    The gap is drawn rather than the accuracy itself, since the curves of good methods
    lie too close to the diagonal to be told apart. `curves` are `ReliabilityCurve`s or
    their dicts by label, or a report, of which `link` picks one link. Bins with fewer
    than `min_count` predictions are left out: their accuracy is mostly noise.

    >>> from laplace_ella import metrics
    >>> probs, targets = torch.rand(50, 2).softmax(-1), torch.randint(2, (50,))
    >>> ax = plot_reliability({"network": metrics.reliability_curve(probs, targets)})
    >>> ax.get_ylabel()
    'accuracy − confidence'
    """
    ax = _axes(ax, "confidence", "accuracy − confidence")
    _draw_gaps(ax, curves, "reliability", link, min_count)
    grey: Look = {"xycoords": "axes fraction", "color": GREY, "fontsize": "small"}
    ax.annotate("overconfident", (0.02, 0.03), **grey)
    ax.annotate("underconfident", (0.02, 0.97), va="top", **grey)
    return ax


def plot_coverage(curves: Any, ax: Axes | None = None) -> Axes:
    """Draw observed minus nominal coverage of central intervals, by level.

    It is the reliability diagram of a regression: zero is calibrated, below it the
    intervals are too narrow. `curves` has dicts of "nominal" levels and "observed"
    shares by label, or is a report.

    >>> curve = {"nominal": [0.5, 0.9], "observed": [0.4, 0.85]}
    >>> plot_coverage({"network": curve}).get_ylabel()
    'observed − nominal'
    """
    ax = _axes(ax, "nominal coverage", "observed − nominal")
    return _draw_gaps(ax, curves, "coverage")


def plot_differences(
    differences: Mapping[str, Any], ax: Axes | None = None, *, xlabel: str = "NLL"
) -> Axes:
    """Draw the distance of each method from the best, with 95 % intervals.

    The best is on top. Open marks are methods that cannot be told from it. Differences
    have `value`, `half_width` and `is_clear`, as those of `Report.differences`.

    >>> from types import SimpleNamespace
    >>> best = SimpleNamespace(value=0.0, half_width=0.0, is_clear=False)
    >>> plot_differences({"ella": best}).get_xlabel()
    'NLL − best'
    """
    ax = _axes(ax, f"{xlabel} − best", "")
    known = [(label, d) for label, d in differences.items() if d is not None]
    known.sort(key=lambda pair: pair[1].value)
    ax.axvline(0.0, color=GREY, linewidth=1.0)
    look: Look = {"color": COLOURS[0], "marker": "o", "markersize": 5, "linewidth": 1.4}
    for position, (_, d) in enumerate(known):
        face = COLOURS[0] if d.is_clear else "none"
        ax.errorbar(d.value, position, xerr=d.half_width, mfc=face, **look)
    ax.set_yticks(range(len(known)), [label for label, _ in known])
    ax.invert_yaxis()
    return ax


def plot_cost_quality(
    report: Any,
    ax: Axes | None = None,
    *,
    cost: str = "predict_s",
    quality: str = "nll",
    link: str | None = None,
) -> Axes:
    """Draw a metric against a cost, one point per method; the lower left is best.

    `report` is a `Report` or its rows, `cost` and `quality` are columns of it; with
    `link` only rows of this link, and of methods that have none, are drawn.

    >>> from types import SimpleNamespace as Row
    >>> fast = Row(label="map", link="", mean={"nll": 0.3, "predict_s": 0.1}, error={})
    >>> plot_cost_quality([fast]).get_xscale()
    'log'
    """
    ax = _axes(ax, LABELS.get(cost, cost), LABELS.get(quality, quality))
    rows = list(report.rows() if hasattr(report, "rows") else report)
    shown = [row for row in rows if {cost, quality} <= row.mean.keys()]
    if link is not None:
        shown = [row for row in shown if row.link in ("", link)]
    if not shown:
        columns = dict.fromkeys(column for row in rows for column in row.mean)
        raise ValueError(
            f"No result has both {cost!r} and {quality!r}; columns are "
            f"{', '.join(columns) or 'none'}."
        )
    # Zero seconds (nothing to fit) has no place on a logarithmic axis.
    costs = [max(row.mean[cost], 1e-3) for row in shown]
    for i, (row, x) in enumerate(zip(shown, costs, strict=True)):
        label = row.label if link or not row.link else f"{row.label} ({row.link})"
        look = line_style(i) | {"markersize": 7, "linestyle": "none"}
        del look["markevery"]
        error = row.error.get(quality)
        ax.errorbar(x, row.mean[quality], yerr=error, label=label, **look)
    ax.set_xscale("log")
    # Seconds as one says them, 0.1 rather than a power of ten.
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("{x:g}" if max(costs) < 5 * min(costs) else "")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), **LEGEND)
    return ax
