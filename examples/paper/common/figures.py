"""What the figures of the scripts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """matplotlib's pyplot, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path, columns: int = 3, dpi: int = 120) -> None:
    """Write a figure, with the legend of its first panel below everything."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    rows = -(-len(labels) // columns)
    height = 0.22 * rows / figure.get_size_inches()[1]
    figure.tight_layout(rect=(0, height + 0.01, 1, 1))
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncol=columns,
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path, dpi=dpi)
    pyplot().close(figure)
