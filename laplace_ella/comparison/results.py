"""Results of a comparison: one per method, link and seed, and their mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from laplace_ella.comparison.resampling import Difference, difference

__all__ = [
    "OK",
    "Result",
    "Row",
    "aggregate",
    "best_row",
    "column_names",
    "differences",
    "distance_from_best",
    "mean_and_error",
]

OK = "ok"


@dataclass(frozen=True)
class Result:
    """One method with one link and one seed.

    Attributes
    ----------
    method, link : str
        link is '' where there is none to choose
    seed : int
    status : str
        'ok', or the reason why there are no metrics: 'not supported: …',
        'skipped: …', 'out of memory', 'failed: …', 'interrupted'
    metrics, costs : dict of str to float
    settings : dict
        what the method ended up with: prior_precision, temperature, …; 'chosen' has the
        names of those that 'tuning' chose, 'at_border' is there where a search ended at
        the border of its range
    curves : dict
        lists for the plots: reliability and error versus confidence
    replicates : dict of str to list of float
        metrics on draws of the test examples, the same draws for every row
    note : str
        what a reader of the row should know
    key : str
        fingerprint of model, data and settings, by which a cached result is reused
    """

    method: str
    link: str = ""
    seed: int = 0
    status: str = OK
    metrics: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Any] = field(default_factory=dict)
    replicates: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""
    key: str = ""

    @property
    def ok(self) -> bool:
        return self.status == OK


@dataclass(frozen=True)
class Row:
    """Results of one method and link over all seeds: mean and standard error.

    `error` has an entry only where there are at least two seeds. `settings` are those
    of the first seed; `replicates` are means over the seeds.
    """

    method: str
    link: str
    status: str
    note: str
    mean: dict[str, float]
    error: dict[str, float]
    n_seeds: int
    settings: dict[str, Any] = field(default_factory=dict)
    replicates: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == OK

    def values(self) -> dict[str, float]:
        """Means, each followed by its standard error, `<column>_se`, if it has one."""
        found: dict[str, float] = {}
        for column, mean in self.mean.items():
            found[column] = mean
            if column in self.error:
                found[f"{column}_se"] = self.error[column]
        return found


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error s/√n, the latter None for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def distance_from_best(column: str, value: float) -> float:
    """Smaller is better, for any column of metrics."""
    if column == "accuracy" or column.startswith("auroc"):
        return -value
    if column.startswith("coverage_"):
        return abs(value - float(column.removeprefix("coverage_")) / 100)
    return value


def best_row(rows: Sequence[Row], column: str) -> Row | None:
    """The row with the best value of a metric; None if no row has it."""
    there = [row for row in rows if column in row.mean]
    return min(
        there,
        key=lambda row: distance_from_best(column, row.mean[column]),
        default=None,
    )


def aggregate(results: Sequence[Result]) -> Row:
    """One row from the seeds of one method and link."""
    done = [r for r in results if r.ok]
    failed = [r for r in results if not r.ok]
    status, note = OK, next((r.note for r in results if r.note), "")
    if not done:
        status = failed[0].status
    elif failed:
        # Some seeds are there: keep their mean, and say that others are not.
        part = f"{len(failed)} of {len(results)} seeds: {failed[0].status}"
        note = f"{note}; {part}" if note else part
    mean: dict[str, float] = {}
    error: dict[str, float] = {}
    for column in column_names(done):
        values = [
            value
            for r in done
            if (value := {**r.metrics, **r.costs}.get(column)) is not None
            and math.isfinite(value)
        ]
        if values:
            mean[column], spread = mean_and_error(values)
            if spread is not None:
                error[column] = spread
    first = results[0]
    return Row(
        first.method,
        first.link,
        status,
        note,
        mean,
        error,
        len(done),
        dict(done[0].settings) if done else {},
        _mean_replicates(done),
    )


def _mean_replicates(results: Sequence[Result]) -> dict[str, list[float]]:
    """Mean over seeds of the metrics on each draw, where all seeds have them."""
    found: dict[str, list[float]] = {}
    for column in results[0].replicates if results else ():
        lists = [r.replicates.get(column, []) for r in results]
        if len({len(values) for values in lists}) == 1:
            found[column] = [sum(v) / len(v) for v in zip(*lists, strict=True)]
    return found


def differences(rows: Sequence[Row], column: str) -> list[Difference | None]:
    """Each row's distance from the best of a metric, with its interval.

    Positive is worse. None for rows without the metric.
    """
    best = best_row(rows, column)

    def to_best(row: Row) -> Difference | None:
        if best is None or column not in row.mean:
            return None
        return difference(
            distance_from_best(column, row.mean[column]),
            distance_from_best(column, best.mean[column]),
            row.replicates.get(column),
            best.replicates.get(column),
        )

    return [to_best(row) for row in rows]


def column_names(results: Sequence[Result], group: str | None = None) -> list[str]:
    """Columns in order of first appearance, metrics before costs."""
    names: dict[str, None] = {}
    for which in ("metrics", "costs"):
        if group in (None, which):
            for result in results:
                names.update(dict.fromkeys(getattr(result, which)))
    return list(names)
