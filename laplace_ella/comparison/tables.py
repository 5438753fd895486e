"""The table of a report: as text, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laplace_ella.comparison.resampling import Difference
from laplace_ella.comparison.results import Row, best_row, differences

__all__ = [
    "SYMBOLS",
    "SYMBOL_LEGEND",
    "TO_BEST",
    "as_csv",
    "as_markdown",
    "as_text",
    "best_columns",
    "error_legend",
    "format_difference",
    "format_mean",
    "format_setting",
    "format_settings",
    "format_value",
    "heading",
    "mark_legend",
]

#: A column of this ending is the distance of a metric from the best row's.
TO_BEST = "_to_best"

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
    if column.endswith(TO_BEST):
        return f"{heading(column.removesuffix(TO_BEST))} − best"
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


def format_difference(column: str, found: Difference | None) -> str:
    """A distance from the best row with half of its 95 % interval."""
    if found is None:
        return "–"
    text = format_value(column, found.value)
    if found.value == 0 or found.half_width is None:
        return text
    return f"{text} ± {format_value(column, found.half_width)}"


#: Settings that are chosen, by the symbol and the digits with which they are shown.
SYMBOLS = {
    "prior_precision": ("δ", "{:.3g}"),
    "temperature": ("T", "{:.3g}"),
    "softmax_temperature": ("τ", "{:.3g}"),
    "sigma_noise": ("σ", "{:.3g}"),
    "n_data": ("N", "{:,}"),
}

SYMBOL_LEGEND = (
    "δ prior precision, T temperature of the likelihood, τ of the softmax, σ noise, "
    "N training data; a star where a search ended at the border of its range"
)


def format_settings(settings: Mapping[str, Any]) -> tuple[str, str]:
    """By what settings were chosen, and the chosen ones with their values."""
    names = settings.get("chosen", [])
    if not names:
        return "–", "–"
    by = "evidence" if settings.get("tuning") == "marglik" else "validation NLL"
    values = [f"{SYMBOLS[n][0]} = {format_setting(n, settings[n])}" for n in names]
    return by, ", ".join(values) + ("*" if settings.get("at_border") else "")


def format_setting(name: str, value: float) -> str:
    """The value of a setting, with the digits in which it is shown."""
    return SYMBOLS[name][1].format(value)


def _shortened(text: str, length: int = 80) -> str:
    """For a cell of the table; `to_dict` and `to_csv` have the whole text."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _short_count(value: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f}"


# --- cells ---------------------------------------------------------------------------


def best_columns(rows: Sequence[Row], metrics: Sequence[str]) -> list[set[str]]:
    """For each row the metrics in which it is best, or cannot be told from the best.

    Compared as printed: equal digits are equally good, and where all are equal there is
    nothing to be best of.
    """
    marked: list[set[str]] = [set() for _ in rows]
    for column in metrics:
        texts = [format_value(column, row.mean.get(column)) for row in rows]
        winner = best_row(rows, column)
        printed = {
            text
            for row, text in zip(rows, texts, strict=True)
            if row.ok and column in row.mean
        }
        if winner is None or len(printed) < 2:
            continue
        best = format_value(column, winner.mean[column])
        found = differences(rows, column)
        for names, text, difference in zip(marked, texts, found, strict=True):
            if difference is not None and (text == best or not difference.is_clear):
                names.add(column)
    return marked


def format_mean(row: Row, column: str, metrics: Sequence[str]) -> str:
    """A row's value, with the standard error over seeds of a metric."""
    text = format_value(column, row.mean.get(column))
    if column in row.error and column in metrics:
        text = f"{text} ± {format_value(column, row.error[column])}"
    return text


def _cells(
    rows: Sequence[Row],
    columns: Sequence[str],
    metrics: Sequence[str],
    mark: Callable[[str], str],
) -> tuple[list[str], list[list[str]]]:
    """Header and body of the table, the best of each metric marked, and what cannot be
    told from it.

    Rows without numbers are [method, link, status]; without any link there is no such
    column.
    """
    with_links = any(row.link for row in rows)
    to_best = {name: differences(rows, name) for name in metrics}
    best = best_columns(rows, metrics)
    body: list[list[str]] = []
    for index, row in enumerate(rows):
        cells = [row.method, row.link] if with_links else [row.method]
        if not row.ok:
            body.append([*cells, _shortened(row.status)])
            continue
        for column in columns:
            if column.endswith(TO_BEST):
                metric = column.removesuffix(TO_BEST)
                cells.append(format_difference(metric, to_best[metric][index]))
                continue
            text = format_mean(row, column, metrics)
            cells.append(mark(text) if column in best[index] else text)
        body.append(cells)
    names = ["method", "link"] if with_links else ["method"]
    return [*names, *map(heading, columns)], body


def mark_legend(rows: Sequence[Row]) -> str:
    if not any(row.replicates for row in rows):
        return "best of its column"
    return (
        "best of its column, or not to be told from it: the 95 % interval of the "
        "difference (±, paired bootstrap over test examples) has zero in it"
    )


def error_legend(rows: Sequence[Row]) -> str:
    n = max((row.n_seeds for row in rows), default=1)
    return f"; mean ± standard error over {n} seeds" if n > 1 else ""


def _choices(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """What was chosen for each row, and its distance from the best in NLL."""
    done = [row for row in rows if row.ok and row.settings]
    if not done:
        return [], []
    with_links = any(row.link for row in done)
    to_best = differences(rows, "nll")
    body = [
        [
            *([row.method, row.link] if with_links else [row.method]),
            format_difference("nll", found),
            *format_settings(row.settings),
        ]
        for row, found in zip(rows, to_best, strict=True)
        if row.ok
    ]
    names = ["method", "link"] if with_links else ["method"]
    return [*names, heading(f"nll{TO_BEST}"), "chosen by", "settings"], body


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
    legend = f"* {mark_legend(rows)}{error_legend(rows)}"
    lines = [*_aligned(header, body, n_names), legend]
    header, body = _choices(rows)
    if body:
        lines += ["", *_aligned(header, body, len(header)), SYMBOL_LEGEND]
    return "\n".join([*lines, *remarks])


def _aligned(
    header: Sequence[str], body: Sequence[Sequence[str]], n_names: int
) -> list[str]:
    """Lines of a table; the first `n_names` columns to the left."""
    # A status runs across the columns of numbers, so it sets no width.
    complete = [
        cells if len(cells) == len(header) else cells[:n_names] for cells in body
    ]
    widths = [
        max(len(cells[i]) for cells in [header, *complete] if i < len(cells))
        for i in range(len(header))
    ]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    return [
        _padded(header, widths, n_names),
        rule,
        *(_padded(cells, widths, n_names) for cells in body),
    ]


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
    remarks: Sequence[str] | None,
) -> str:
    """The table as GitHub Markdown, best values in bold.

    What was chosen and the remarks follow, but where `remarks` is None.
    """
    header, body = _cells(rows, columns, metrics, lambda text: f"**{text}**")
    table = _markdown_table(header, body)
    if remarks is None:
        return table
    parts = [table, f"Bold: {mark_legend(rows)}{error_legend(rows)}."]
    header, body = _choices(rows)
    if body:
        parts += [_markdown_table(header, body), f"{SYMBOL_LEGEND}."]
    if remarks:
        parts.append("\n".join(f"- {line}" for line in remarks))
    return "\n\n".join(parts)


def _markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    names = ("method", "link", "chosen by", "settings")
    align = ["---" if name in names else "---:" for name in header]
    lines = [list(header), align]
    for cells in body:
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(escaped + [""] * (len(header) - len(cells)))
    if len(header) < max(map(len, lines)):  # nothing but statuses
        lines[:2] = [[*header, "status"], [*align, "---"]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def as_csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Means (and standard errors, as `<column>_se`) with all digits.

    With distances of the NLL from the best row, half-widths of their 95 % intervals
    (`_ci95`) and settings, where there are any.
    """
    names: list[str] = []
    for column in columns:
        names.append(column)
        if any(column in row.error for row in rows):
            names.append(f"{column}_se")
    distance = f"nll{TO_BEST}"
    more = ["tuning", *SYMBOLS, "at_border"] if any(r.settings for r in rows) else []
    if any(row.replicates for row in rows):
        more = [distance, f"{distance}_ci95", *more]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "link", *names, *more, "status", "note"])
    for row, found in zip(rows, differences(rows, "nll"), strict=True):
        values: dict[str, Any] = {**row.settings, **row.values()}
        if found is not None:
            values[distance] = found.value
            values[f"{distance}_ci95"] = found.half_width
        cells = [values.get(name, "") for name in (*names, *more)]
        writer.writerow([row.method, row.link, *cells, row.status, row.note])
    return out.getvalue()
