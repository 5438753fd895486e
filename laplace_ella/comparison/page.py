"""The report as a page for a browser: one template, everything in it escaped."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import jinja2

from laplace_ella import plotting
from laplace_ella.comparison.report import LEGEND, STARS, Report

__all__ = ["render"]


def render(report: Report, title: str) -> str:
    """Return the text of the page."""
    text = (resources.files("laplace_ella.comparison") / "report.html").read_text(
        encoding="utf-8"
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.from_string(text).render(
        title=title,
        table=report.table(),
        choices=report.choices(),
        figures=list(_figures(report)),
        remarks=report.remarks(),
        origin=report.origin,
        stars=STARS,
        legend=LEGEND,
    )


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    """Yield captions and data addresses of the figures; none without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return
    drawn: dict[str, Callable[[Any], Any]] = {}
    if "nll" in report.columns:
        apart = {
            f"{method} ({link})" if link else method: found
            for (method, link), found in report.differences().items()
        }
        drawn["Distance from the best NLL of the group, with 95 % intervals"] = (
            lambda ax: plotting.plot_differences(apart, ax)
        )
        if "predict_s" in report.columns:
            drawn["Cost against quality"] = lambda ax: plotting.plot_cost_quality(
                report, ax
            )
    if report.curves("reliability"):
        drawn["Reliability"] = lambda ax: plotting.plot_reliability(report, ax)
    if report.curves("coverage"):
        drawn["Coverage of central intervals"] = lambda ax: plotting.plot_coverage(
            report, ax
        )
    for caption, draw in drawn.items():
        figure = Figure(figsize=(7.5, 4), layout="constrained")
        draw(figure.add_subplot())
        svg = io.BytesIO()
        # Without salt and date the same report would be another file each time.
        with matplotlib.rc_context({"svg.hashsalt": "laplace-ella"}):
            figure.savefig(svg, format="svg", metadata={"Date": None})
        encoded = base64.b64encode(svg.getvalue()).decode()
        yield caption, f"data:image/svg+xml;base64,{encoded}"
