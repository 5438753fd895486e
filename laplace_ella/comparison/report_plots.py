"""Figures of whole reports: intervals against their level, distances from the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from laplace_ella.comparison.plot_style import (
    COLOURS,
    GREY,
    line_style,
    new_axes,
    plain,
)
from laplace_ella.comparison.report import Report
from laplace_ella.comparison.tables import heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_coverage", "plot_differences"]


def plot_coverage(
    curves: Report | Mapping[str, Mapping[str, Any]], ax: Axes | None = None
) -> Axes:
    """Observed minus nominal coverage of central intervals, by level.

    The reliability diagram of a regression: the zero line is calibration, and below it
    the intervals are too narrow.

    Parameters
    ----------
    curves : Report or mapping
        label → {'nominal': levels, 'observed': shares of the targets inside}

    Examples
    --------
    >>> curve = {"nominal": [0.5, 0.9], "observed": [0.4, 0.85]}
    >>> plot_coverage({"network": curve}).get_ylabel()
    'observed − nominal'
    """
    ax = new_axes(ax)
    if isinstance(curves, Report):
        curves = curves.curves("coverage")
    if not curves:
        raise ValueError(
            "There is no curve 'coverage'; reports of regressions have one."
        )
    ax.axhline(0.0, color=GREY, linewidth=1.0)
    for i, (label, curve) in enumerate(curves.items()):
        levels = curve["nominal"]
        gaps = [o - n for n, o in zip(levels, curve["observed"], strict=True)]
        ax.plot(levels, gaps, label=label, **line_style(i, every=(i % 3, 3)))
    ax.set_xlabel("nominal coverage")
    ax.set_ylabel("observed − nominal")
    ax.legend(fontsize="small", frameon=False)
    plain(ax)
    return ax


def plot_differences(
    report: Report, column: str = "nll", ax: Axes | None = None
) -> Axes:
    """Distance of every row from the best of a metric, with 95 % intervals.

    The best row is on top. Open marks are rows that cannot be told from it: their
    interval, a paired bootstrap over the test examples, has zero in it.

    Examples
    --------
    >>> from laplace_ella.comparison.report import Report, Result
    >>> report = Report([
    ...     Result("map", metrics={"nll": 0.30}),
    ...     Result("ella", "mc", metrics={"nll": 0.25}),
    ... ])
    >>> plot_differences(report).get_xlabel()
    'NLL − best'
    """
    ax = new_axes(ax)
    found = [
        (method if not link else f"{method} ({link})", difference)
        for (method, link), difference in report.differences(column).items()
        if difference is not None
    ]
    found.sort(key=lambda pair: pair[1].value)
    ax.axvline(0.0, color=GREY, linewidth=1.0)
    for position, (_, difference) in enumerate(found):
        ax.errorbar(
            difference.value,
            position,
            xerr=difference.half_width,
            color=COLOURS[0],
            marker="o",
            markersize=5,
            markerfacecolor=COLOURS[0] if difference.is_clear else "none",
            linewidth=1.4,
        )
    ax.set_yticks(range(len(found)), [label for label, _ in found])
    ax.invert_yaxis()
    ax.set_xlabel(f"{heading(column)} − best")
    plain(ax)
    return ax
