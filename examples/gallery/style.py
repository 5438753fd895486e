"""What the scripts of the gallery share: the look of the pictures, and where they go.

Every script takes `--smoke` (a small problem, to see that it runs) and `--out` (another
folder than that of the documentation)."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from laplace_ella import plotting

ROOT = Path(__file__).resolve().parents[2]

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "0.45"
#: White in the middle; blue and orange differ for every kind of colour vision.
TWO_SIDES = LinearSegmentedColormap.from_list("two sides", [BLUE, "white", ORANGE])

#: Large letters, since pages show pictures small; white paper, since pages may be dark.
LOOK = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": GREY,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "legend.frameon": False,
    "savefig.dpi": 120,
    "savefig.pad_inches": 0.1,
    "savefig.bbox": "tight",
}


def arguments() -> argparse.Namespace:
    """`smoke`, whether the problem is to be small, and `out`, where to write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "images" / "gallery"
    )
    return parser.parse_args()


@contextmanager
def drawing(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """A new figure, written to `path` at the end."""
    with plt.rc_context(LOOK):
        figure = plt.figure(figsize=size)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        # Equal pictures are equal files, whichever matplotlib has drawn them.
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)
    print(f"wrote {path}")


def bare(ax: Any, title: str, caption: str = "") -> None:
    """A panel without numbers: a title, and a line below that says what to see."""
    ax.set(title=title, xlabel=caption, ylabel="", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def interval(ax: Any, x: Any, mean: Any, std: Any, **known: Any) -> None:
    """Mean ± 2 standard deviations, drawn to be seen in a small picture."""
    plotting.plot_regression(x, mean, std, ax, widths=(2,), **known)
    ax.collections[-1].set_alpha(0.35)
    plt.setp(ax.lines, markersize=6, linewidth=1.8)


def legend(figure: Any, ax: Any) -> None:
    """Names of what is in one panel, below all of them."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels),
                  columnspacing=1.2, handletextpad=0.5)  # fmt: skip


def train(
    model: torch.nn.Module,
    negative_log_likelihood: Callable[[], torch.Tensor],
    steps: int,
    prior_precision: float = 0.0,
) -> None:
    """Move the parameters to their maximum a posteriori, by Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        weights = sum(p.square().sum() for p in model.parameters())
        (negative_log_likelihood() + prior_precision / 2 * weights).backward()
        optimizer.step()
