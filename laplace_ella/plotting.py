"""Figures of comparisons and of single posteriors.

Every function draws into `ax` (a new one if None), returns it and sets no global
style. Lines differ in dash and marker as well as in colour (Okabe and Ito's palette,
made for colour-blind readers), so that they can be told apart in grey.

matplotlib is an extra: `pip install "laplace-ella[plots]"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from laplace_ella.comparison.plot_style import (
    COLOURS,
    GREY,
    HATCHES,
    axis_label,
    line_style,
    new_axes,
    numbers,
    plain,
)
from laplace_ella.comparison.report import Report
from laplace_ella.comparison.report_plots import plot_coverage, plot_differences

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_boxes",
    "plot_cost_quality",
    "plot_coverage",
    "plot_differences",
    "plot_error_heatmap",
    "plot_error_versus_confidence",
    "plot_history",
    "plot_rank_curves",
    "plot_regression",
    "plot_reliability",
    "plot_spectrum",
]

# --- 1-D regression ------------------------------------------------------------------


def plot_regression(
    x: Any,
    mean: Any,
    std: Any,
    ax: Axes | None = None,
    *,
    train: tuple[Any, Any] | None = None,
    truth: Any = None,
    title: str | None = None,
    widths: Sequence[float] = (1.0, 2.0),
) -> Axes:
    """Mean and bands of a 1-D regression (Deng et al. 2022, Fig. 1).

    Parameters
    ----------
    x, mean, std : array-like
        `(N,)`, x ascending
    train : (x, y), optional
        training data, drawn as dots
    truth : array-like, optional
        `(N,)`, noise-free function
    widths : sequence of float
        half-widths of the bands in standard deviations

    Examples
    --------
    >>> x = torch.linspace(-1, 1, 20)
    >>> ax = plot_regression(x, x.sin(), 0.1 + x.abs(), train=(x[::5], x[::5].sin()))
    >>> ax.get_xlabel()
    'x'
    """
    ax = new_axes(ax)
    x, mean, std = (torch.tensor(numbers(v)) for v in (x, mean, std))
    for i, width in enumerate(sorted(widths, reverse=True)):
        ax.fill_between(
            x.numpy(),
            (mean - width * std).numpy(),
            (mean + width * std).numpy(),
            color=COLOURS[0],
            alpha=min(0.2 + 0.15 * i, 0.6),  # inner bands darker
            linewidth=0,
            label=f"± {width:g} std",
        )
    ax.plot(x.numpy(), mean.numpy(), color=COLOURS[0], linewidth=1.6, label="mean")
    if truth is not None:
        ax.plot(
            x.numpy(),
            numbers(truth),
            color="black",
            linestyle=(0, (4, 2)),
            linewidth=1.0,
            label="truth",
        )
    if train is not None:
        ax.plot(
            numbers(train[0]),
            numbers(train[1]),
            linestyle="none",
            marker="o",
            markersize=4,
            markerfacecolor=COLOURS[1],
            markeredgecolor="white",
            markeredgewidth=0.6,
            label="training data",
        )
    if title:
        ax.set_title(title)
    ax.set_xlabel("x")
    ax.set_ylabel("y")
    plain(ax)
    return ax


# --- classification ------------------------------------------------------------------


def plot_reliability(
    curves: Report | Mapping[str, Any],
    ax: Axes | None = None,
    *,
    link: str | None = None,
    min_count: int = 1,
) -> Axes:
    """Accuracy minus confidence against confidence; the zero line is calibration.

    The gap is drawn rather than the accuracy itself, since the curves of good methods
    lie too close to the diagonal to be told apart.

    Parameters
    ----------
    curves : Report or mapping
        label → `ReliabilityCurve` or its dict
    link : str, optional
        which link of a report
    min_count : int
        bins with fewer predictions are left out, as their accuracy is mostly noise

    Examples
    --------
    >>> from laplace_ella import metrics
    >>> probs, targets = torch.rand(50, 2).softmax(-1), torch.randint(2, (50,))
    >>> ax = plot_reliability({"network": metrics.reliability_curve(probs, targets)})
    >>> ax.get_ylabel()
    'accuracy − confidence'
    """
    ax = new_axes(ax)
    ax.axhline(0.0, color=GREY, linewidth=1.0)
    for i, (label, curve) in enumerate(_curves(curves, "reliability", link).items()):
        bins = zip(curve["confidence"], curve["accuracy"], curve["count"], strict=True)
        points = [(c, a - c) for c, a, count in bins if count >= min_count]
        ax.plot(*zip(*points, strict=True), label=label, **line_style(i))
    ax.set_xlabel("confidence")
    ax.set_ylabel("accuracy − confidence")
    ax.annotate(
        "overconfident",
        (0.02, 0.03),
        xycoords="axes fraction",
        color=GREY,
        fontsize="small",
    )
    ax.annotate(
        "underconfident",
        (0.02, 0.97),
        xycoords="axes fraction",
        va="top",
        color=GREY,
        fontsize="small",
    )
    ax.legend(fontsize="small", frameon=False)
    plain(ax)
    return ax


def plot_error_versus_confidence(
    curves: Report | Mapping[str, Any],
    ax: Axes | None = None,
    *,
    link: str | None = None,
    ood: str | None = None,
    side: str = "below",
) -> Axes:
    """Error rate against a confidence threshold (Deng et al. 2022, Fig. 4a).

    Parameters
    ----------
    curves : Report or mapping
        label → `ConfidenceCurve` or its dict
    link : str, optional
        which link of a report
    ood : str, optional
        name of the OOD set of a report, whose predictions all count as errors
    side : {'below', 'above'}
        predictions with confidence ≤ τ (the paper's) or ≥ τ

    Examples
    --------
    >>> from laplace_ella import metrics
    >>> probs, targets = torch.rand(50, 2).softmax(-1), torch.randint(2, (50,))
    >>> curve = metrics.error_versus_confidence(probs, targets)
    >>> ax = plot_error_versus_confidence({"network": curve})
    >>> ax.get_xlabel()
    'confidence threshold τ'
    """
    ax = new_axes(ax)
    name = f"error_{side}" + (f":{ood}" if ood else "")
    for i, (label, curve) in enumerate(_curves(curves, name, link).items()):
        ax.plot(
            curve["threshold"],
            curve["error"],
            label=label,
            **line_style(i, every=(i, 8)),
        )
    sign = "≤" if side == "below" else "≥"
    ax.set_xlabel("confidence threshold τ")
    ax.set_ylabel(f"error rate at confidence {sign} τ")
    ax.set_xlim(0.0, 1.0)
    ax.legend(fontsize="small", frameon=False)
    plain(ax)
    return ax


def _curves(
    curves: Report | Mapping[str, Any], name: str, link: str | None
) -> dict[str, dict[str, Any]]:
    if isinstance(curves, Report):
        curves = curves.curves(name, link)
        if not curves:
            raise ValueError(
                f"The report has no curve {name!r}"
                + (f" for link {link!r}." if link else ".")
            )
    return {
        label: dict(curve) if isinstance(curve, Mapping) else vars(curve)
        for label, curve in curves.items()
    }


# --- one posterior -------------------------------------------------------------------


def plot_history(
    history: Sequence[Mapping[str, float]],
    ax: Axes | None = None,
    *,
    score: str = "loss",
    baseline: float | None = None,
    label: str = "ELLA",
) -> Axes:
    """Validation NLL against the number of data, with the best point marked.

    Parameters
    ----------
    history : sequence of mappings
        `la.history` after `fit(..., early_stopping=True)`: entries with 'n_data' and
        the score
    score : str
        key of the score
    baseline : float, optional
        score of the network alone, a horizontal line

    Examples
    --------
    >>> history = [{"n_data": 32, "loss": 0.5}, {"n_data": 64, "loss": 0.4}]
    >>> plot_history(history, baseline=0.6).get_xscale()
    'log'
    """
    ax = new_axes(ax)
    if not history:
        raise ValueError(
            "The history is empty: fit with a val_loader and early_stopping=True."
        )
    n = [float(entry["n_data"]) for entry in history]
    scores = [float(entry[score]) for entry in history]
    ax.plot(n, scores, label=label, **line_style(0))
    stop = min(range(len(n)), key=scores.__getitem__)
    ax.axvline(n[stop], color=COLOURS[1], linestyle="--", linewidth=1.2)
    ax.annotate(
        f"stop at N = {n[stop]:.0f}",
        (n[stop], 0.95),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color=COLOURS[1],
        va="top",
        fontsize="small",
    )
    if baseline is not None:
        ax.axhline(baseline, color=GREY, linestyle=":", linewidth=1.2, label="MAP")
    ax.set_xscale("log")
    ax.set_xlabel("training data N")
    ax.set_ylabel("validation NLL")
    ax.legend(fontsize="small", frameon=False)
    plain(ax)
    return ax


def plot_rank_curves(
    ranks: Sequence[int],
    nll: Sequence[float],
    evidence: Sequence[float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """NLL against the rank K, and the log evidence on a second axis to the right.

    Ranks that span a factor of 16 or more get a logarithmic axis.

    Examples
    --------
    >>> ax = plot_rank_curves([1, 2, 4], nll=[0.5, 0.4, 0.4], evidence=[-9, -8, -8])
    >>> ax.get_xlabel()
    'rank K'
    """
    ax = new_axes(ax)
    lines = ax.plot(ranks, numbers(nll), label="validation NLL", **line_style(0))
    ax.set_xlabel("rank K")
    ax.set_ylabel("validation NLL")
    ax.spines["top"].set_visible(False)
    if evidence is None:
        plain(ax)
    else:
        right = ax.twinx()
        lines += right.plot(
            ranks, numbers(evidence), label="log evidence", **line_style(1)
        )
        right.set_ylabel("log evidence")
        right.spines["top"].set_visible(False)
    if min(ranks) > 0 and max(ranks) >= 16 * min(ranks):
        ax.set_xscale("log", base=2)
        if len(ranks) <= 10:
            ax.set_xticks(ranks, [str(k) for k in ranks])
    ax.legend(handles=lines, fontsize="small", frameon=False, loc="center right")
    return ax


def plot_spectrum(
    eigenvalues: Any,
    ax: Axes | None = None,
    *,
    trace: float | None = None,
    label: str | None = None,
) -> Axes:
    """Eigenvalues of the sampled kernel on a logarithmic axis.

    Parameters
    ----------
    eigenvalues : array-like
        `(K,)`, `la.basis.eigenvalues`
    trace : float, optional
        `la.basis.trace`; the title then says which share the K directions carry

    Examples
    --------
    >>> ax = plot_spectrum(torch.tensor([4.0, 2.0, 1.0]), trace=10.0)
    >>> ax.get_title()
    '3 directions: 70% of the trace'
    """
    ax = new_axes(ax)
    values = numbers(eigenvalues)
    index = sum(line.get_label() != "" for line in ax.get_lines())
    ax.plot(range(1, len(values) + 1), values, label=label, **line_style(index))
    ax.set_yscale("log")
    ax.set_xlabel("direction k")
    ax.set_ylabel("eigenvalue")
    if trace is not None:
        share = sum(values) / trace
        ax.set_title(f"{len(values)} directions: {share:.0%} of the trace")
    if label:
        ax.legend(fontsize="small", frameon=False)
    plain(ax)
    return ax


def plot_error_heatmap(
    errors: Any,
    samples: Sequence[int],
    ranks: Sequence[int],
    ax: Axes | None = None,
    *,
    title: str | None = None,
) -> Axes:
    """Approximation errors over M and K (Deng et al. 2022, Fig. 2a–b).

    Parameters
    ----------
    errors : array-like
        `(len(samples), len(ranks))`; NaN (K > M) stays white
    samples, ranks : sequence of int
        the values of M, down, and of K, across

    Examples
    --------
    >>> ax = plot_error_heatmap([[0.5, float("nan")], [0.3, 0.1]], [10, 20], [10, 20])
    >>> ax.get_ylabel()
    'samples M'
    """
    ax = new_axes(ax)
    values = torch.as_tensor(errors).detach().double().cpu()
    if values.shape != (len(samples), len(ranks)):
        raise ValueError(
            f"errors must have shape (len(samples), len(ranks)) = "
            f"({len(samples)}, {len(ranks)}), got {tuple(values.shape)}."
        )
    # Viridis is monotone in lightness, so it survives a black-and-white printer.
    image = ax.imshow(values.numpy(), cmap="viridis", aspect="auto")
    ax.set_xticks(range(len(ranks)), [str(k) for k in ranks])
    ax.set_yticks(range(len(samples)), [str(m) for m in samples])
    ax.set_xlabel("rank K")
    ax.set_ylabel("samples M")
    finite = values[values.isfinite()]
    middle = float((finite.max() + finite.min()) / 2) if len(finite) else 0.0
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if value == value:  # not NaN
                colour = "white" if value < middle else "black"
                ax.text(
                    j,
                    i,
                    f"{value:.2g}",
                    ha="center",
                    va="center",
                    color=colour,
                    fontsize="x-small",
                )
    ax.figure.colorbar(image, ax=ax, label="relative error")
    if title:
        ax.set_title(title)
    return ax


# --- many results --------------------------------------------------------------------


def plot_boxes(
    values: Mapping[str, Mapping[Any, Sequence[float]]],
    ax: Axes | None = None,
    *,
    ylabel: str = "NLL",
    xlabel: str = "skew intensity",
) -> Axes:
    """Boxes of a metric over corruptions, by level and method (Fig. 3 of the paper).

    Parameters
    ----------
    values : mapping
        method → level → values, one per type of corruption

    Examples
    --------
    >>> ax = plot_boxes({"network": {1: [0.3, 0.4], 5: [0.9, 1.2]}})
    >>> [label.get_text() for label in ax.get_xticklabels()]
    ['1', '5']
    """
    ax = new_axes(ax)
    from matplotlib.patches import Patch

    levels = list(dict.fromkeys(level for v in values.values() for level in v))
    width = 0.8 / max(1, len(values))
    handles = []
    for i, (method, by_level) in enumerate(values.items()):
        drawn = ax.boxplot(
            [numbers(by_level[level]) for level in levels if level in by_level],
            positions=[
                j + (i - (len(values) - 1) / 2) * width
                for j, level in enumerate(levels)
                if level in by_level
            ],
            widths=0.85 * width,
            patch_artist=True,
            medianprops={"color": "black"},
            flierprops={"markersize": 3},
            manage_ticks=False,
        )
        look = {
            "facecolor": COLOURS[i % len(COLOURS)],
            "hatch": HATCHES[i % len(HATCHES)],
            "alpha": 0.75,
        }
        for box in drawn["boxes"]:
            box.set(**look)
        handles.append(Patch(edgecolor="black", label=method, **look))
    ax.set_xticks(range(len(levels)), [str(level) for level in levels])
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.legend(handles=handles, fontsize="small", frameon=False)
    plain(ax)
    return ax


def plot_cost_quality(
    report: Report,
    ax: Axes | None = None,
    *,
    cost: str = "predict_s",
    quality: str = "nll",
    link: str | None = None,
) -> Axes:
    """A metric against a cost, one labelled point per method; the lower left is best.

    Parameters
    ----------
    cost, quality : str
        columns of the report
    link : str, optional
        only this link (and methods that have none)

    Examples
    --------
    >>> from laplace_ella.comparison.report import Result
    >>> fast = Result("map", metrics={"nll": 0.30}, costs={"predict_s": 0.1})
    >>> good = Result("ella", "mc", metrics={"nll": 0.25}, costs={"predict_s": 2.0})
    >>> plot_cost_quality(Report([fast, good])).get_xscale()
    'log'
    """
    ax = new_axes(ax)
    rows = [
        row
        for row in report.rows()
        if cost in row.mean
        and quality in row.mean
        and (link is None or row.link in ("", link))
    ]
    if not rows:
        raise ValueError(
            f"No result has both {cost!r} and {quality!r}; columns are "
            f"{', '.join(report.columns) or 'none'}."
        )
    for i, row in enumerate(rows):
        label = row.method if link or not row.link else f"{row.method} ({row.link})"
        # Zero seconds (nothing to fit) has no place on a logarithmic axis.
        position = max(row.mean[cost], 1e-3), row.mean[quality]
        look = line_style(i)
        ax.errorbar(
            *position,
            yerr=row.error.get(quality),
            color=look["color"],
            marker=look["marker"],
            markersize=7,
            linestyle="none",
            label=label,
        )
    ax.set_xscale("log")
    # Seconds as one says them, 0.1 rather than a power of ten.
    seen = [max(row.mean[cost], 1e-3) for row in rows]
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("{x:g}" if max(seen) < 5 * min(seen) else "")
    ax.set_xlabel(axis_label(cost))
    ax.set_ylabel(axis_label(quality))
    ax.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    plain(ax)
    return ax
