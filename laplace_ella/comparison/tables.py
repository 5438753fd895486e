"""The table of a report: as text, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence

from laplace_ella.comparison.results import Row, best_row

__all__ = ["as_csv", "as_markdown", "as_text", "format_value", "heading"]

_HEADINGS = {
    "accuracy": "acc.",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "rmse": "RMSE",
    "coverage_50": "50 %",
    "coverage_90": "90 %",
    "coverage_95": "95 %",
    "calibration": "cal. err.",
    "kl_to_lla": "KL to LLA",
    "fit_s": "fit s",
    "tune_s": "tune s",
    "predict_s": "pred. s",
    "peak_mb": "peak MB",
    "floats": "floats",
}


def heading(column: str) -> str:
    """Text above a column of the printed table."""
    if column.startswith("auroc:"):
        return f"AUROC {column.removeprefix('auroc:')}"
    return _HEADINGS.get(column, column)


def format_value(column: str, value: float | None) -> str:
    """A number with the digits that its column deserves; '–' for none."""
    if value is None or math.isnan(value):
        return "–"
    if column == "floats":
        return _short_count(value)
    if column.endswith("_s"):
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    if column == "peak_mb":
        return f"{value:.0f}"
    if column.startswith("coverage_") or column == "accuracy":
        return f"{100 * value:.1f}"
    if column == "ece" or column.startswith("auroc"):
        return f"{value:.3f}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.3g}"


def _shortened(text: str, length: int = 80) -> str:
    """For a cell of the table; `to_dict` and `to_csv` have the whole text."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _short_count(value: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f}"


# --- cells ---------------------------------------------------------------------------


def _cells(
    rows: Sequence[Row],
    columns: Sequence[str],
    metrics: Sequence[str],
    mark: Callable[[str], str],
) -> tuple[list[str], list[list[str]]]:
    """Header and body of the table, the best of each metric marked.

    Rows without numbers are [method, link, status]; without any link there is no such
    column.
    """
    with_links = any(row.link for row in rows)
    best: dict[str, str] = {}
    for column in metrics:
        printed = {
            format_value(column, r.mean[column]) for r in rows if column in r.mean
        }
        winner = best_row(rows, column)
        # Where all are equal there is nothing to be best of.
        if winner is not None and len(printed) > 1:
            best[column] = format_value(column, winner.mean[column])
    body: list[list[str]] = []
    for row in rows:
        cells = [row.method, row.link] if with_links else [row.method]
        if not row.ok:
            body.append([*cells, _shortened(row.status)])
            continue
        for column in columns:
            text = format_value(column, row.mean.get(column))
            # Compared as printed: equal digits are equally good.
            is_best = column in row.mean and text == best.get(column)
            if column in row.error and column in metrics:
                text = f"{text} ± {format_value(column, row.error[column])}"
            cells.append(mark(text) if is_best else text)
        body.append(cells)
    names = ["method", "link"] if with_links else ["method"]
    return [*names, *map(heading, columns)], body


def _error_legend(rows: Sequence[Row]) -> str:
    n = max((row.n_seeds for row in rows), default=1)
    return f"; mean ± standard error over {n} seeds" if n > 1 else ""


# --- formats -------------------------------------------------------------------------


def as_text(
    rows: Sequence[Row],
    columns: Sequence[str],
    metrics: Sequence[str],
    remarks: Sequence[str],
) -> str:
    """The table for a terminal, best values with a star, and what to know about it."""
    header, body = _cells(rows, columns, metrics, lambda text: f"{text}*")
    if not body:
        return "No results."
    n_names = header.index("link") + 1 if "link" in header else 1
    # A status runs across the columns of numbers, so it sets no width.
    complete = [
        cells if len(cells) == len(header) else cells[:n_names] for cells in body
    ]
    widths = [
        max(len(cells[i]) for cells in [header, *complete] if i < len(cells))
        for i in range(len(header))
    ]
    lines = [_padded(header, widths, n_names)]
    lines.append("─" * (sum(widths) + 2 * (len(widths) - 1)))
    lines += [_padded(cells, widths, n_names) for cells in body]
    legend = "* best of its column" + _error_legend(rows)
    return "\n".join([*lines, legend, *remarks])


def _padded(cells: Sequence[str], widths: Sequence[int], n_names: int) -> str:
    """Names to the left, numbers to the right, a status as long as it is."""
    padded = [
        cell.ljust(width)
        if i < n_names or len(cells) < len(widths)
        else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]
    # Where there are no numbers at all the status has no column of its own.
    return "  ".join([*padded, *cells[len(widths) :]]).rstrip()


def as_markdown(
    rows: Sequence[Row],
    columns: Sequence[str],
    metrics: Sequence[str],
    remarks: Sequence[str],
) -> str:
    """The table as GitHub Markdown, best values in bold."""
    header, body = _cells(rows, columns, metrics, lambda text: f"**{text}**")
    align = ["---" if name in ("method", "link") else "---:" for name in header]
    lines = [header, align]
    for cells in body:
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(escaped + [""] * (len(header) - len(cells)))
    if len(header) < max(map(len, lines)):  # nothing but statuses
        lines[:2] = [[*header, "status"], [*align, "---"]]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    listed = "".join(f"\n- {line}" for line in remarks)
    return f"{table}\n{listed}" if listed else table


def as_csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Means (and standard errors, as `<column>_se`) with all digits."""
    names: list[str] = []
    for column in columns:
        names.append(column)
        if any(column in row.error for row in rows):
            names.append(f"{column}_se")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "link", *names, "status", "note"])
    for row in rows:
        values = row.values()
        cells = [values.get(name, "") for name in names]
        writer.writerow([row.method, row.link, *cells, row.status, row.note])
    return out.getvalue()
