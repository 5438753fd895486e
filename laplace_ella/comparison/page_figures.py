"""The figures of a report's page: matplotlib's, as SVG in the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from laplace_ella.comparison.plot_style import COLOURS, GREY
from laplace_ella.comparison.report import Report
from laplace_ella.comparison.tables import format_value, heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Figure", "Panels", "figure_groups"]

#: Bins with fewer predictions say more about luck than about calibration.
MIN_COUNT = 10

#: The row that others are drawn in front of.
BASELINE = "map"

#: Inches; two small diagrams fit side by side on a phone.
SMALL, WIDE = (2.5, 1.75), (7.0, 3.8)

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"


@dataclass(frozen=True)
class Figure:
    """An SVG element, its text alternative, and what stands below it."""

    svg: str
    label: str
    caption: str
    score: str = ""


@dataclass(frozen=True)
class Panels:
    """Figures that belong together, under one heading."""

    id: str
    heading: str
    about: str
    figures: list[Figure]
    small: bool


def figure_groups(report: Report) -> list[Panels]:
    """All figures that the results of a report give.

    Raises
    ------
    ImportError
        without matplotlib
    """
    import matplotlib

    style: dict[Any, Any] = {
        "svg.fonttype": "none",  # letters stay letters: they can be read and searched
        "svg.hashsalt": "laplace-ella",  # the same report is the same file
        "text.parse_math": False,  # names of methods are what they are
        "axes.formatter.use_mathtext": False,
        "font.size": 9,
    }
    with matplotlib.rc_context(style):
        groups = [
            *_reliability(report),
            *_coverage(report),
            *_cost_against_quality(report),
            *_distances(report),
        ]
    return [group for group in groups if group.figures]


# --- which figures -------------------------------------------------------------------


def _reliability(report: Report) -> Iterator[Panels]:
    """Classification: accuracy − confidence, a diagram for each row."""
    from laplace_ella.plotting import plot_reliability

    def points(curve: Any) -> list[tuple[float, float]]:
        bins = zip(curve["confidence"], curve["accuracy"], curve["count"], strict=True)
        return [(c, a - c) for c, a, count in bins if count >= MIN_COUNT]

    def draw(label: str, curve: Any, ax: Axes) -> None:
        plot_reliability({label: curve}, ax, min_count=MIN_COUNT)

    curves = report.curves("reliability")
    yield Panels(
        "reliability",
        "Reliability",
        "Accuracy minus confidence, upwards, against confidence, on the test set. On "
        "the zero line predictions are right as often as they say; below it they are "
        f"overconfident. Bins with fewer than {MIN_COUNT} predictions are left out."
        + _about_baseline(curves),
        _small_figures(report, curves, points, draw, "ece"),
        small=True,
    )


def _coverage(report: Report) -> Iterator[Panels]:
    """Regression: observed − nominal coverage, a diagram for each row."""
    from laplace_ella.plotting import plot_coverage

    def points(curve: Any) -> list[tuple[float, float]]:
        pairs = zip(curve["nominal"], curve["observed"], strict=True)
        return [(nominal, observed - nominal) for nominal, observed in pairs]

    def draw(label: str, curve: Any, ax: Axes) -> None:
        plot_coverage({label: curve}, ax)

    curves = report.curves("coverage")
    yield Panels(
        "coverage",
        "Reliability",
        "Share of the test targets inside central intervals, minus the share that "
        "should be, upwards, against that share. On the zero line intervals hold what "
        "they say; below it they are too narrow." + _about_baseline(curves),
        _small_figures(report, curves, points, draw, "calibration"),
        small=True,
    )


def _about_baseline(curves: Mapping[str, Any]) -> str:
    return " In grey: the network alone (map)." if BASELINE in curves else ""


def _small_figures(
    report: Report,
    curves: Mapping[str, Any],
    points: Callable[[Any], list[tuple[float, float]]],
    draw: Callable[[str, Any, Axes], None],
    column: str,
) -> list[Figure]:
    """A diagram for each curve, on the same axes, the baseline behind it.

    Labels of axes and a legend would take the place of the curve: the text above says
    what they would.
    """
    scores = {_label(row): row.mean.get(column) for row in report.rows()}
    heights = [abs(y) for curve in curves.values() for _, y in points(curve)]
    limit = 1.1 * max(heights, default=0.1)

    def one(label: str, curve: Any, ax: Axes) -> None:
        if label != BASELINE and BASELINE in curves and points(curves[BASELINE]):
            x, y = zip(*points(curves[BASELINE]), strict=True)
            ax.plot(x, y, color=GREY, linewidth=1.0, alpha=0.6)
        draw(label, curve, ax)
        for part in (ax.get_legend(), *ax.texts):
            if part is not None:
                part.remove()
        ax.set(xlabel="", ylabel="", xlim=(0.0, 1.0), ylim=(-limit, limit))
        ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        ax.locator_params(axis="y", nbins=5)

    figures = []
    for i, (label, curve) in enumerate(curves.items()):
        score = f"{heading(column)} {format_value(column, scores.get(label))}"

        def into(ax: Axes, label: str = label, curve: Any = curve) -> None:
            one(label, curve, ax)

        svg = _drawn(into, SMALL, f"{column}-{i}")
        about = f"Reliability diagram of {label}, {score}"
        figures.append(Figure(svg, about, label, score))
    return figures


def _cost_against_quality(report: Report) -> Iterator[Panels]:
    from laplace_ella.plotting import plot_cost_quality

    links = list(dict.fromkeys(row.link for row in report.rows() if row.link))
    there = set(report.columns)
    figures = []
    for link in links or [""]:
        for cost, what in (("predict_s", "prediction"), ("fit_s", "fitting")):
            if not {cost, "nll"} <= there:
                continue

            def into(ax: Axes, link: str = link, cost: str = cost) -> None:
                plot_cost_quality(report, ax, cost=cost, link=link or None)

            with_link = f", link {link}" if link else ""
            caption = f"NLL against {what} time{with_link}"
            name = f"cost-{len(figures)}"
            figures.append(Figure(_drawn(into, WIDE, name), caption, caption))
    yield Panels(
        "cost",
        "Cost against quality",
        "Every method's test NLL against the time that it took; the lower left is "
        "best. Nothing to fit counts as a thousandth of a second.",
        figures,
        small=False,
    )


def _distances(report: Report) -> Iterator[Panels]:
    from laplace_ella.plotting import plot_differences

    done = [row for row in report.rows() if "nll" in row.mean]
    figures = []
    if len(done) > 1:
        size = WIDE[0], 0.26 * len(done) + 0.8
        caption = "NLL − best, 95 % intervals; open marks cannot be told from the best"

        def into(ax: Axes) -> None:
            plot_differences(report, ax=ax)

        svg = _drawn(into, size, "nll")
        figures.append(Figure(svg, caption, caption))
    yield Panels("distances", "", "", figures, small=False)


def _label(row: Any) -> str:
    """As `Report.curves` names its curves."""
    return f"{row.method} ({row.link})" if row.link else row.method


# --- SVG -----------------------------------------------------------------------------


def _drawn(draw: Callable[[Axes], None], size: tuple[float, float], name: str) -> str:
    """The SVG element of a figure. No window, no global figure, no date."""
    from matplotlib.figure import Figure as MatplotlibFigure

    figure = MatplotlibFigure(figsize=size, layout="constrained")
    draw(figure.subplots())
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return themed(buffer.getvalue().decode(), name)


def themed(svg: str, prefix: str) -> str:
    """An SVG document as an element inside a page, in the page's colours.

    Black becomes the colour of the text, grey that of lesser text, and the palette
    `--series-…`; identifiers get a prefix, since those of a page must differ.
    """
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in list(parent):
            # matplotlib's style sheet would apply to the whole page.
            if child.tag in (f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"):
                parent.remove(child)
    for element in root.iter():
        for key, value in element.attrib.items():
            element.set(key, _attribute(key, value, prefix))
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, prefix: str) -> str:
    if key == "id":
        return f"{prefix}-{value}"
    if key == f"{{{_XLINK}}}href" or key == "href":
        return f"#{prefix}-{value.removeprefix('#')}"
    value = re.sub(r"url\(#", f"url(#{prefix}-", value)
    if key in ("style", "fill", "stroke"):
        value = re.sub(r"#[0-9a-f]{6}\b", lambda m: _COLOURS.get(m[0], m[0]), value)
        # The page's own letters, in the size of the figure.
        value = re.sub(r"(font: [\d.]+px)[^;]*", r"\1 var(--font)", value)
    return value


def _page_colours() -> Mapping[str, str]:
    series = {colour.lower(): f"var(--series-{i})" for i, colour in enumerate(COLOURS)}
    return {**series, "#000000": "var(--ink)", "#737373": "var(--muted)"}


_COLOURS = _page_colours()
