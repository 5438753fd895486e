"""What all figures share: colours, dashes and markers, and axes to draw into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from laplace_ella.comparison.tables import heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLOURS",
    "GREY",
    "HATCHES",
    "axis_label",
    "line_style",
    "new_axes",
    "numbers",
    "plain",
]

#: Okabe and Ito (2008), the palest (yellow) left out.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "p")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo")
GREY = "0.45"


def new_axes(ax: Axes | None) -> Axes:
    """The given axes, or new ones; says how to install matplotlib."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'Plots need matplotlib: pip install "laplace-ella[plots]"'
        ) from error
    return plt.subplots(figsize=(5, 3.6), layout="constrained")[1]


def line_style(i: int, every: int | tuple[int, int] = 1) -> dict[str, Any]:
    """Look of the i-th line; colours repeat after 7, dashes and markers do not align.

    The marker stands on every `every`-th point, or from the first of a pair (start,
    every) on.
    """
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": DASHES[(i + i // len(COLOURS)) % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
        "markevery": every,
        "linewidth": 1.4,
    }


def numbers(values: Any) -> list[float]:
    """A flat list of floats from a tensor, an array or a sequence."""
    return torch.as_tensor(values).detach().double().cpu().flatten().tolist()


def plain(ax: Axes) -> None:
    """No frame above and to the right."""
    ax.spines[["top", "right"]].set_visible(False)


_AXIS_LABELS = {
    "fit_s": "fitting time (s)",
    "tune_s": "tuning time (s)",
    "predict_s": "prediction time on the test set (s)",
    "peak_mb": "peak memory (MB)",
    "floats": "stored numbers",
    "nll": "test NLL",
    "ece": "test ECE",
}


def axis_label(column: str) -> str:
    """What stands at an axis that shows a column of a report."""
    return _AXIS_LABELS.get(column, heading(column))
