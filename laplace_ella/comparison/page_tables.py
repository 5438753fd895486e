"""The tables of a report's page: cells with a text to read and a value to sort by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from laplace_ella.comparison.report import Report
from laplace_ella.comparison.results import Result, Row, differences
from laplace_ella.comparison.tables import (
    SYMBOLS,
    best_columns,
    format_difference,
    format_mean,
    format_setting,
    format_settings,
    heading,
)

__all__ = [
    "Cell",
    "Column",
    "Table",
    "differences_table",
    "failures_table",
    "results_table",
    "settings_table",
]


@dataclass(frozen=True)
class Cell:
    """What stands in a table.

    Attributes
    ----------
    text : str
    value : float or str or None
        to sort by; None is last in either direction
    best : bool
        best of its column, or not to be told from it
    muted : bool
        of lesser interest
    """

    text: str
    value: float | str | None = None
    best: bool = False
    muted: bool = False


@dataclass(frozen=True)
class Column:
    """Heading of a column.

    `largest_first` is the order of the first click, where large values are the good
    ones; `wide` lets a text run over several lines.
    """

    heading: str
    numeric: bool = True
    largest_first: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; the first cell of a row is its name."""

    id: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


_LARGE_IS_GOOD = ("accuracy", "auroc")


def results_table(report: Report) -> Table:
    """Metrics and costs of every row that ran, the best marked."""
    rows, metrics = report.rows(), report.metric_columns
    best = best_columns(rows, metrics)
    names = _Names(rows)
    body = [
        [
            *names.cells(row.method, row.link),
            *(
                Cell(
                    format_mean(row, column, metrics),
                    row.mean.get(column),
                    best=column in marked,
                    muted=column not in metrics,
                )
                for column in report.columns
            ),
        ]
        for row, marked in zip(rows, best, strict=True)
        if row.ok
    ]
    columns = [
        Column(heading(name), largest_first=name.startswith(_LARGE_IS_GOOD))
        for name in report.columns
    ]
    return Table("results", "Metrics and costs", [*names.columns, *columns], body)


def differences_table(report: Report) -> Table:
    """Distances from the best row of each metric, with their intervals."""
    rows = report.rows()
    names = _Names(rows)
    # The accuracy of a coverage or of a KL has no replicates: nothing is paired there.
    metrics = [
        name
        for name in report.metric_columns
        if any(name in row.replicates for row in rows)
    ]
    found = {name: differences(rows, name) for name in metrics}
    body = []
    for index, row in enumerate(rows):
        if not row.ok:
            continue
        cells = names.cells(row.method, row.link)
        for name in metrics:
            to_best = found[name][index]
            value = None if to_best is None else to_best.value
            same = to_best is not None and not to_best.is_clear
            cells.append(Cell(format_difference(name, to_best), value, best=same))
        body.append(cells)
    columns = [Column(heading(name)) for name in metrics]
    return Table(
        "differences", "Distance from the best row", [*names.columns, *columns], body
    )


def settings_table(report: Report) -> Table:
    """What each row was tuned to, for every seed; given values are muted."""
    results = [r for r in report if r.ok and r.settings]
    names = _Names(results, with_seeds=True)
    shown = [
        name
        for name in SYMBOLS
        if any(name in result.settings.get("chosen", ()) for result in results)
    ]
    with_rank = any("rank" in result.settings for result in results)
    body = []
    for result in results:
        settings = result.settings
        chosen = settings.get("chosen", [])
        by, _ = format_settings(settings)
        cells = [
            *names.cells(result.method, result.link, result.seed),
            Cell(by, by, muted=not chosen),
        ]
        for name in shown:
            value = settings.get(name)
            text = "–" if value is None else format_setting(name, value)
            cells.append(Cell(text, value, muted=name not in chosen))
        if with_rank:
            rank = settings.get("rank")
            text = "–" if rank is None else f"{rank:,}"
            cells.append(Cell(text, rank, muted=True))
        border = "at a border" if settings.get("at_border") else "–"
        cells.append(Cell(border, border, muted=border == "–"))
        body.append(cells)
    columns = [
        *names.columns,
        Column("chosen by", numeric=False),
        *(Column(SYMBOLS[name][0]) for name in shown),
        *([Column("K")] if with_rank else []),
        Column("search ended", numeric=False),
    ]
    return Table("settings", "Tuned settings", columns, body)


def failures_table(report: Report) -> Table:
    """What did not run, with the whole reason."""
    failed = [result for result in report if not result.ok]
    names = _Names(failed, with_seeds=True)
    body = [
        [
            *names.cells(result.method, result.link, result.seed),
            Cell(result.status, result.status),
        ]
        for result in failed
    ]
    columns = [*names.columns, Column("reason", numeric=False, wide=True)]
    return Table("failures", "Rows without numbers", columns, body)


class _Names:
    """The first columns: method, and link and seed where there are several."""

    def __init__(
        self, rows: Iterable[Row] | Iterable[Result], with_seeds: bool = False
    ) -> None:
        entries: list[Any] = list(rows)
        seeds = {getattr(entry, "seed", None) for entry in entries}
        self.with_links = any(entry.link for entry in entries)
        self.with_seeds = with_seeds and len(seeds) > 1

    @property
    def columns(self) -> list[Column]:
        return [
            Column("method", numeric=False),
            *([Column("link", numeric=False)] if self.with_links else []),
            *([Column("seed")] if self.with_seeds else []),
        ]

    def cells(self, method: str, link: str, seed: int = 0) -> list[Cell]:
        return [
            Cell(method, method),
            *([Cell(link or "–", link or None)] if self.with_links else []),
            *([Cell(str(seed), seed)] if self.with_seeds else []),
        ]
