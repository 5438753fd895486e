"""The outcome of a comparison: one `Result` a method, link and seed, one `Report`.

>>> report = Report([
...     Result("map", metrics={"nll": 0.30}, costs={"fit_s": 0.0}),
...     Result("ella", "mc", metrics={"nll": 0.25}, costs={"fit_s": 1.5}),
... ])
>>> report.best("nll").method
'ella'
>>> print(report.to_csv().splitlines()[0])
method,link,nll,fit_s,status,note
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = ["Report", "Result", "Row"]

OK = "ok"

#: Layout version of the cache file.
FORMAT = 1

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
        what tuning chose: prior_precision, temperature, rank, …
    curves : dict
        lists for the plots: reliability and error versus confidence
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
    note: str = ""
    key: str = ""

    @property
    def ok(self) -> bool:
        return self.status == OK


@dataclass(frozen=True)
class Row:
    """Results of one method and link over all seeds: mean and standard error.

    `error` has an entry only where there are at least two seeds.
    """

    method: str
    link: str
    status: str
    note: str
    mean: dict[str, float]
    error: dict[str, float]
    n_seeds: int

    @property
    def ok(self) -> bool:
        return self.status == OK


# --- pure functions ------------------------------------------------------------------


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


def _aggregate(results: Sequence[Result]) -> Row:
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
    for column in _columns(done):
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
    return Row(first.method, first.link, status, note, mean, error, len(done))


def _columns(results: Sequence[Result], group: str | None = None) -> list[str]:
    """Columns in order of first appearance, metrics before costs."""
    names: dict[str, None] = {}
    for which in ("metrics", "costs"):
        if group in (None, which):
            for result in results:
                names.update(dict.fromkeys(getattr(result, which)))
    return list(names)


def _finite_or_none(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {k: _finite_or_none(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_none(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- the report ----------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What `compare` returns. `print(report)` shows the table.

    Attributes
    ----------
    results : sequence of Result
    likelihood : str
    interrupted : bool
        whether the run was stopped before all methods were done
    """

    results: Sequence[Result]
    likelihood: str = ""
    interrupted: bool = False

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __getitem__(self, method: str) -> list[Result]:
        """All results of one method, over links and seeds."""
        found = [r for r in self.results if r.method == method]
        if not found:
            names = ", ".join(dict.fromkeys(r.method for r in self.results))
            raise KeyError(f"No method {method!r} in this report; it has {names}.")
        return found

    @property
    def columns(self) -> list[str]:
        """Metrics, then costs, in the order of the table."""
        return _columns([r for r in self.results if r.ok])

    @property
    def metric_columns(self) -> list[str]:
        return _columns([r for r in self.results if r.ok], "metrics")

    def rows(self) -> list[Row]:
        """One `Row` a method and link, in the order of the run."""
        groups: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            groups.setdefault((result.method, result.link), []).append(result)
        return [_aggregate(group) for group in groups.values()]

    def best(self, column: str) -> Row:
        """The row with the best value of a metric."""
        rows = [row for row in self.rows() if column in row.mean]
        if not rows:
            raise KeyError(
                f"No result has the metric {column!r}; there are "
                f"{', '.join(self.metric_columns) or 'none'}."
            )
        return min(rows, key=lambda row: distance_from_best(column, row.mean[column]))

    def curves(self, name: str, link: str | None = None) -> dict[str, Any]:
        """Curves of the first seed, by a label that names method and link.

        Parameters
        ----------
        name : str
            'reliability', 'error_below', 'error_above'; the latter two with
            ':<OOD set>' appended where there is one
        link : str, optional
            only this link (and methods that have none)
        """
        found: dict[str, Any] = {}
        for result in self.results:
            if name not in result.curves or (link and result.link not in ("", link)):
                continue
            label = result.method
            if result.link and link is None:
                label = f"{label} ({result.link})"
            found.setdefault(label, result.curves[name])
        return found

    # --- as text ---------------------------------------------------------------------

    def __str__(self) -> str:
        header, body = self._cells(mark=lambda text: f"{text}*")
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
        legend = ["* best of its column" + self._error_legend()]
        return "\n".join([*lines, *legend, *self._remarks()])

    def to_markdown(self) -> str:
        """The table as GitHub Markdown, best values in bold."""
        header, body = self._cells(mark=lambda text: f"**{text}**")
        align = ["---" if name in ("method", "link") else "---:" for name in header]
        lines = [header, align]
        for cells in body:
            escaped = [cell.replace("|", "\\|") for cell in cells]
            lines.append(escaped + [""] * (len(header) - len(cells)))
        if len(header) < max(map(len, lines)):  # nothing but statuses
            lines[:2] = [[*header, "status"], [*align, "---"]]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        remarks = "".join(f"\n- {line}" for line in self._remarks())
        return f"{table}\n{remarks}" if remarks else table

    _repr_markdown_ = to_markdown

    def to_csv(self) -> str:
        """Means (and standard errors, as `<column>_se`) with all digits."""
        rows = self.rows()
        columns: list[str] = []
        for column in self.columns:
            columns.append(column)
            if any(column in row.error for row in rows):
                columns.append(f"{column}_se")
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["method", "link", *columns, "status", "note"])
        for row in rows:
            values = {**row.mean, **{f"{k}_se": v for k, v in row.error.items()}}
            cells = [values.get(column, "") for column in columns]
            writer.writerow([row.method, row.link, *cells, row.status, row.note])
        return out.getvalue()

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, one line a method, link and seed."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "to_pandas() needs pandas: pip install pandas. "
                "to_csv() and to_dict() do without."
            ) from error
        return pd.DataFrame(
            [
                {
                    "method": r.method,
                    "link": r.link,
                    "seed": r.seed,
                    **r.metrics,
                    **r.costs,
                    "status": r.status,
                    "note": r.note,
                }
                for r in self.results
            ]
        )

    def _cells(self, mark: Any) -> tuple[list[str], list[list[str]]]:
        """Header and body of the table, the best of each metric marked.

        Rows without numbers are [method, link, status]; without any link there is no
        such column.
        """
        columns, rows = self.columns, self.rows()
        with_links = any(row.link for row in rows)
        best: dict[str, str] = {}
        for column in self.metric_columns:
            printed = {
                format_value(column, r.mean[column]) for r in rows if column in r.mean
            }
            # Where all are equal there is nothing to be best of.
            if len(printed) > 1:
                best[column] = format_value(column, self.best(column).mean[column])
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
                if column in row.error and column in self.metric_columns:
                    text = f"{text} ± {format_value(column, row.error[column])}"
                cells.append(mark(text) if is_best else text)
            body.append(cells)
        names = ["method", "link"] if with_links else ["method"]
        return [*names, *map(heading, columns)], body

    def _error_legend(self) -> str:
        n = max((row.n_seeds for row in self.rows()), default=1)
        return f"; mean ± standard error over {n} seeds" if n > 1 else ""

    def _remarks(self) -> list[str]:
        """What the reader of a row should know besides its numbers."""
        lines = [f"{row.method}: {row.note}" for row in self.rows() if row.note]
        if self.interrupted:
            lines.append("Interrupted: the methods marked so have not been run.")
        return list(dict.fromkeys(lines))

    # --- as data ---------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`; `Report.from_dict` reads it."""
        return {
            "format": FORMAT,
            "likelihood": self.likelihood,
            "interrupted": self.interrupted,
            "results": [_finite_or_none(asdict(r)) for r in self.results],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that `to_dict` was called on."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(
                f"Expected a comparison report of format {FORMAT}, got {got!r}. "
                "Delete the file or choose another."
            )
        names = {f.name for f in fields(Result)}
        results = [
            Result(**{k: v for k, v in entry.items() if k in names})
            for entry in data["results"]
        ]
        return cls(results, data.get("likelihood", ""), data.get("interrupted", False))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, replacing the file only when it is complete."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_dict(), file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{os.fspath(path)} is not a comparison report (JSON expected): "
                f"{error}. Delete the file or choose another."
            ) from error
        return cls.from_dict(data)

    def merge(self, other: Report) -> Report:
        """Both reports' results; where both have one, `other`'s."""
        merged = {_identity(r): r for r in self.results}
        merged.update({_identity(r): r for r in other.results})
        return Report(
            list(merged.values()),
            other.likelihood or self.likelihood,
            other.interrupted,
        )


def _identity(result: Result) -> tuple[str, str, str, int]:
    return result.key, result.method, result.link, result.seed


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
