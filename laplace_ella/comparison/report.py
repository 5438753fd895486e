"""The outcome of a comparison: one `Result` per method, link and seed.

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

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from laplace_ella.comparison import tables
from laplace_ella.comparison.provenance import Provenance
from laplace_ella.comparison.resampling import Difference
from laplace_ella.comparison.results import (
    OK,
    Result,
    Row,
    aggregate,
    best_row,
    column_names,
    differences,
)
from laplace_ella.support.files import replace_file

__all__ = ["OK", "Difference", "Provenance", "Report", "Result", "Row"]

#: Layout version of the cache file.
FORMAT = 1

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
    provenance : Provenance or None
        model, data, settings and versions; None where it is not known

    Examples
    --------
    >>> report = Report([
    ...     Result("map", metrics={"nll": 0.30}, costs={"fit_s": 0.0}),
    ...     Result("ella", "mc", metrics={"nll": 0.25}, costs={"fit_s": 1.5}),
    ... ])
    >>> print(report.to_markdown(["nll"]))
    | method | link | NLL |
    | --- | --- | ---: |
    | map |  | 0.3000 |
    | ella | mc | **0.2500** |
    """

    results: Sequence[Result]
    likelihood: str = ""
    interrupted: bool = False
    provenance: Provenance | None = None

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
        return column_names([r for r in self.results if r.ok])

    @property
    def metric_columns(self) -> list[str]:
        return column_names([r for r in self.results if r.ok], "metrics")

    def rows(self) -> list[Row]:
        """One `Row` per method and link, in the order of the run."""
        groups: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            groups.setdefault((result.method, result.link), []).append(result)
        return [aggregate(group) for group in groups.values()]

    def best(self, column: str) -> Row:
        """The row with the best value of a metric."""
        row = best_row(self.rows(), column)
        if row is None:
            raise KeyError(
                f"No result has the metric {column!r}; there are "
                f"{', '.join(self.metric_columns) or 'none'}."
            )
        return row

    def differences(
        self, column: str = "nll"
    ) -> dict[tuple[str, str], Difference | None]:
        """Distance of every row from the best of a metric, by method and link.

        Positive is worse. The interval is of the luck of the test examples: a paired
        bootstrap with the same draws for all rows. Seeds are averaged over first.
        """
        self.best(column)  # an error if there is none
        rows = self.rows()
        found = differences(rows, column)
        return {
            (row.method, row.link): difference
            for row, difference in zip(rows, found, strict=True)
        }

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
        return tables.as_text(
            self.rows(), self.columns, self.metric_columns, self.remarks()
        )

    def to_markdown(self, columns: Sequence[str] | None = None) -> str:
        """The table as GitHub Markdown, best values in bold.

        `columns` chooses some of `self.columns`, and distances from the best row as
        '<metric>_to_best'; settings and remarks are left out then.
        """
        if columns is None:
            return tables.as_markdown(
                self.rows(), self.columns, self.metric_columns, self.remarks()
            )
        metrics = self.metric_columns
        known = [*self.columns, *(f"{name}{tables.TO_BEST}" for name in metrics)]
        unknown = [name for name in columns if name not in known]
        if unknown:
            raise ValueError(
                f"columns must be among {self.columns}, got {unknown[0]!r}."
            )
        return tables.as_markdown(self.rows(), columns, metrics, None)

    _repr_markdown_ = to_markdown

    def to_csv(self) -> str:
        """Means (and standard errors, as `<column>_se`) with all digits, distances from
        the best NLL, and settings."""
        return tables.as_csv(self.rows(), self.columns)

    def to_html(
        self, path: str | os.PathLike[str], title: str = "Comparison of methods"
    ) -> Path:
        """Write the report as one page for a browser, to send around or to print.

        The file is complete in itself: tables that can be sorted, figures, what was
        tuned to which value, distances from the best row, what did not run and why,
        and where the numbers come from. It loads nothing from anywhere. The figures
        need matplotlib (`pip install "laplace-ella[plots]"`); without it the page has
        the tables, and says so.

        Parameters
        ----------
        path : path
            the file; its folder is made, and the file replaced only when it is complete
        title : str
            above the page

        Returns
        -------
        pathlib.Path
            where it was written

        Examples
        --------
        >>> import tempfile
        >>> report = Report([Result("map", metrics={"nll": 0.3})], "classification")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.to_html(Path(folder) / "report.html").name
        'report.html'
        """
        from laplace_ella.comparison.html import render

        path = Path(path)
        _write(path, render(self, title))
        return path

    def remarks(self) -> list[str]:
        """What the reader of a row should know besides its numbers."""
        rows = self.rows()
        notes: dict[str, set[str]] = {}
        for row in rows:
            notes.setdefault(row.method, set()).add(row.note)
        # What is true of one link only names it.
        lines = [
            f"{_label(row, with_link=len(notes[row.method]) > 1)}: {row.note}"
            for row in rows
            if row.note
        ]
        if self.interrupted:
            lines.append("Interrupted: the methods marked so have not been run.")
        return list(dict.fromkeys(lines))

    # --- as data ---------------------------------------------------------------------

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, one line per method, link and seed."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "to_pandas() needs pandas: pip install pandas. "
                "to_csv() and to_dict() need nothing else."
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

    def to_dict(self, flat: bool = False) -> dict[str, Any]:
        """Everything, ready for `json.dumps`; `Report.from_dict` reads it.

        Parameters
        ----------
        flat : bool, default=False
            only the numbers of the table, the mean over seeds of each metric and cost
            (and its standard error, `_se`) by `<method>/<link>/<column>`, for
            `mlflow.log_metrics(...)` and `wandb.log(...)`. Characters that MLflow
            refuses in a name become '_', the colon of 'auroc:<name>' a '/'

        Examples
        --------
        >>> report = Report([
        ...     Result("map", metrics={"nll": 0.3, "auroc:SVHN": 0.9}),
        ...     Result("ella", "mc", metrics={"nll": 0.12}, costs={"fit_s": 1.5}),
        ...     Result("full", status="out of memory"),
        ... ])
        >>> for name, value in report.to_dict(flat=True).items():
        ...     print(name, value)
        map/nll 0.3
        map/auroc/SVHN 0.9
        ella/mc/nll 0.12
        ella/mc/fit_s 1.5
        """
        if flat:
            return _flat(self.rows())
        known = self.provenance
        return {
            "format": FORMAT,
            "likelihood": self.likelihood,
            "interrupted": self.interrupted,
            **({} if known is None else {"provenance": known.to_dict()}),
            "results": [_finite_or_none(asdict(r)) for r in self.results],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Report:
        """The report that `to_dict` was called on.

        Raises
        ------
        ValueError
            if `data` is not what `to_dict()` returns; the message says in what
        """
        if not isinstance(data, Mapping) or "format" not in data:
            raise ValueError(
                "Expected a dict from Report.to_dict() with 'format' and 'results', "
                f"got {_describe(data)}."
            )
        if data["format"] != FORMAT:
            raise ValueError(
                f"Expected a comparison report of format {FORMAT}, got "
                f"{data['format']!r}, written by another version of the package."
            )
        entries = data.get("results")
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            raise ValueError(
                f"Expected a list under 'results', got {_describe(entries)}."
            )
        return cls(
            [_result(entry) for entry in entries],
            str(data.get("likelihood", "")),
            bool(data.get("interrupted", False)),
            Provenance.from_dict(data.get("provenance")),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, replacing the file only when it is complete."""
        _write(Path(path), _as_json(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            if the file is something else, incomplete or of another version
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # also what is no JSON or no text
            raise ValueError(
                f"{os.fspath(path)} is not a comparison report: {error} Delete the "
                "file or choose another."
            ) from error

    def merge(self, other: Report) -> Report:
        """Both reports' results; where both have one, `other`'s.

        They come from one place only if the reports do: otherwise it is not known.
        """
        merged = {_identity(r): r for r in self.results}
        merged.update({_identity(r): r for r in other.results})
        return Report(
            list(merged.values()),
            other.likelihood or self.likelihood,
            other.interrupted,
            other.provenance
            if not self.results or self.provenance == other.provenance
            else None,
        )


def _label(row: Row, with_link: bool) -> str:
    return f"{row.method} ({row.link})" if with_link and row.link else row.method


def _write(path: Path, text: str) -> None:
    """Replace a file only when the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode()
    replace_file(path, lambda file: file.write(content))


def _as_json(data: Mapping[str, Any]) -> str:
    """One line per result: long lists stay short, and rows can be told apart."""
    head = json.dumps({**data, "results": []})
    lines = ",\n".join(json.dumps(result) for result in data["results"])
    return head.removesuffix("[]}") + f"[\n{lines}\n]}}\n"


def _identity(result: Result) -> tuple[str, str, str, int]:
    return result.key, result.method, result.link, result.seed


#: What each field of a stored result must be.
_STORED_TYPES: dict[str, type] = {
    "method": str,
    "link": str,
    "seed": int,
    "status": str,
    "metrics": dict,
    "costs": dict,
    "settings": dict,
    "curves": dict,
    "replicates": dict,
    "note": str,
    "key": str,
}


def _result(entry: Any) -> Result:
    """A result from its dict; fields of later versions are left out."""
    if not isinstance(entry, Mapping) or "method" not in entry:
        raise ValueError(f"Expected results with a 'method', got {_describe(entry)}.")
    values = {f.name: entry[f.name] for f in fields(Result) if f.name in entry}
    for name, value in values.items():
        if not isinstance(value, _STORED_TYPES[name]):
            raise ValueError(
                f"Expected {name!r} of a result to be of type "
                f"{_STORED_TYPES[name].__name__}, got {_describe(value)}."
            )
    return Result(**values)


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(repr, value)) or 'none'}"
    return f"{type(value).__name__}"


def _flat(rows: Sequence[Row]) -> dict[str, float]:
    """Numbers by names that loggers of experiments accept."""
    flat: dict[str, float] = {}
    for row in rows:
        for column, value in row.values().items():
            parts = [p for p in (row.method, row.link, *column.split(":", 1)) if p]
            name = "/".join(re.sub(r"[^\w\-. ]", "_", part) for part in parts)
            while name in flat:  # two methods whose names differ in other characters
                name += "_"
            flat[name] = value
    return flat


def _finite_or_none(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {k: _finite_or_none(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_none(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
