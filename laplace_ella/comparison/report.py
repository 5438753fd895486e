"""The outcome of a comparison: results, their means over seeds, tables and the page.

>>> report = Report([
...     Result("map", metrics={"nll": 0.30}, costs={"fit_s": 0.0}),
...     Result("ella", "mc", metrics={"nll": 0.25}, costs={"fit_s": 1.5}),
... ])
>>> report.best("nll").method
'ella'
>>> print(report.to_csv().splitlines()[0])
method,link,tuned on,nll,fit_s,nll_to_best,nll_to_best_ci95,settings,status,note
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from laplace_ella.comparison.bootstrap import Difference, difference

__all__ = ["Report", "Result", "Row", "replace_file", "result_of"]

OK = "ok"

#: A column of this ending is the distance of a metric from the best row's.
TO_BEST = "_to_best"

HEADINGS = {
    "accuracy": "acc. %",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "rmse": "RMSE",
    "coverage_50": "50 %",
    "coverage_90": "90 %",
    "coverage_95": "95 %",
    "width_95": "width",
    "calibration": "cal. err.",
    "kl_to_lla": "KL",
    "fit_s": "fit s",
    "tune_s": "tune s",
    "predict_s": "predict s",
}

SYMBOLS = {
    "prior_precision": "δ",
    "temperature": "T",
    "softmax_temperature": "τ",
    "sigma_noise": "σ",
    "n_data": "N",
}
LEGEND = (
    "δ prior precision, T temperature of the likelihood, τ of the softmax, σ noise, N "
    "training data; * a search that ended at the border of its range"
)
STARS = (
    "* not significantly worse than the best of its group: the 95 % interval of the "
    "difference (paired bootstrap over the test examples) has zero in it"
)


@dataclass(frozen=True)
class Result:
    """One method with one link and one seed.

    Attributes
    ----------
    method, link : str
        link is '' where there is none to choose
    seed : int
    status : str
        'ok', or the reason why there are no numbers
    metrics, costs : dict of str to float
        scores on the test data, and seconds
    settings : dict
        hyperparameters; 'chosen' names those that were chosen, 'tuning' says on what
        data, 'at_border' whether a search ended at the border of its range
    curves : dict
        of the figures
    replicates : dict of str to list of float
        metrics on draws of the test examples, the same draws for every row
    note : str
        what a reader of the row should know
    left_out : str
        types of the layers whose parameters have no posterior
    on_validation : bool
        whether it was tuned on validation data
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
    left_out: str = ""
    on_validation: bool = False

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def label(self) -> str:
        """The method's name in tables and figures."""
        return (
            f"{self.method} (without {self.left_out})" * bool(self.left_out)
            or self.method
        )


@dataclass(frozen=True)
class Row:
    """The results of one method and link: means and standard errors over the seeds.

    `error` has entries only where there are two seeds or more; settings and label are
    those of the first seed.
    """

    method: str
    link: str
    label: str
    status: str
    note: str
    on_validation: bool
    n_seeds: int
    mean: dict[str, float]
    error: dict[str, float]
    settings: dict[str, Any]
    replicates: dict[str, list[float]]

    @property
    def ok(self) -> bool:
        return self.status == OK

    @classmethod
    def of(cls, results: Sequence[Result]) -> Row:
        """Return the row of results that differ in their seeds."""
        done = [r for r in results if r.ok]
        failed = [r for r in results if not r.ok]
        first, notes = (done or results)[0], [next((r.note for r in done), "")]
        if done and failed:
            notes.append(f"{len(failed)} of {len(results)} seeds: {failed[0].status}")
        mean, error, replicates = {}, {}, {}
        for column in columns_of(done):
            found = [{**r.metrics, **r.costs}.get(column) for r in done]
            values = [v for v in found if v is not None and math.isfinite(v)]
            if not values:
                continue
            mean[column] = sum(values) / len(values)
            if len(values) > 1:
                squares = sum((v - mean[column]) ** 2 for v in values)
                error[column] = math.sqrt(squares / (len(values) - 1) / len(values))
            draws = [r.replicates.get(column, []) for r in done]
            if len({len(each) for each in draws}) == 1 and draws[0]:
                sums = map(sum, zip(*draws, strict=True))
                replicates[column] = [total / len(draws) for total in sums]
        return cls(
            first.method, first.link, first.label, first.status,
            "; ".join(filter(None, notes)), first.on_validation, len(done), mean, error,
            dict(first.settings), replicates,
        )  # fmt: skip


def columns_of(results: Sequence[Result]) -> list[str]:
    """Return metrics, then costs, in the order in which they appear."""
    names: dict[str, None] = {}
    for part in ("metrics", "costs"):
        for result in results:
            names |= dict.fromkeys(getattr(result, part))
    return list(names)


def badness(column: str, value: float) -> float:
    """Return what is smaller where the value of a metric is better."""
    if column == "accuracy" or column.startswith("auroc"):
        return -value
    if column.startswith("coverage_"):
        return abs(value - float(column.removeprefix("coverage_")) / 100)
    return value


# The report


@dataclass(frozen=True)
class Report:
    """What `compare` returns. `print(report)` shows the table.

    Attributes
    ----------
    results : sequence of Result
    likelihood : str
    interrupted : bool
        whether the run was stopped before all methods were done
    origin : dict
        model, data, settings and versions, as texts by group

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
    | ella | mc | 0.2500* |
    """

    results: Sequence[Result]
    likelihood: str = ""
    interrupted: bool = False
    origin: dict[str, dict[str, str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __getitem__(self, method: str) -> list[Result]:
        """Return all results of one method, over links and seeds."""
        found = [r for r in self.results if r.method == method]
        if not found:
            names = ", ".join(dict.fromkeys(r.method for r in self.results))
            raise KeyError(f"No method {method!r} in this report; it has {names}.")
        return found

    @property
    def columns(self) -> list[str]:
        """Metrics, then costs, in the order of the table."""
        return columns_of([r for r in self.results if r.ok])

    def rows(self) -> list[Row]:
        """Return one `Row` per method and link: those without validation data, then
        those tuned on them, both in the order of the run."""
        groups: dict[tuple[bool, str, str], list[Result]] = {}
        for r in self.results:
            groups.setdefault((r.on_validation, r.method, r.link), []).append(r)
        ordered = sorted(groups, key=lambda key: key[0])
        return [Row.of(groups[key]) for key in ordered]

    def best(self, column: str) -> Row:
        """Return the row with the best value of a metric."""
        return self._best(self.rows(), column)

    def _best(self, rows: Sequence[Row], column: str) -> Row:
        there = [row for row in rows if column in row.mean]
        if not there:
            known = ", ".join(self.columns) or "none"
            raise KeyError(f"No row has the metric {column!r}; there are {known}.")
        return min(there, key=lambda row: badness(column, row.mean[column]))

    def differences(self, column: str = "nll") -> dict[tuple[str, str], Difference]:
        """Return the distance of each row from the best of its group, by method and
        link, for rows that have the metric.

        Positive is worse. The interval is by a paired bootstrap over the test examples,
        after the mean over the seeds.
        """
        rows, found = self.rows(), {}
        self._best(rows, column)
        for group in (False, True):
            members = [row for row in rows if row.on_validation is group]
            there = [row for row in members if column in row.mean]
            for row in there:
                best = self._best(there, column)
                found[row.method, row.link] = difference(
                    badness(column, row.mean[column]),
                    badness(column, best.mean[column]),
                    row.replicates.get(column),
                    best.replicates.get(column),
                )
        return found

    def curves(self, name: str, link: str | None = None) -> dict[str, Any]:
        """Return curves of the first seed, by a label of method and link.

        Parameters
        ----------
        name : str
            'reliability', 'coverage', 'error_below', 'error_above'; the latter two with
            ':<OOD set>' appended where there is one
        link : str, optional
            only this link, and methods that have none
        """
        found: dict[str, Any] = {}
        for r in self.results:
            if name in r.curves and (link is None or r.link in ("", link)):
                named = f"{r.label} ({r.link})" if r.link and link is None else r.label
                found.setdefault(named, r.curves[name])
        return found

    # As text

    def remarks(self) -> list[str]:
        """Return what a reader should know besides the numbers."""
        lines = [
            f"{row.label}{f' ({row.link})' * bool(row.link)}: {text}"
            for row in self.rows()
            if (text := row.note if row.ok else row.status)
        ]
        if self.interrupted:
            lines.append("Interrupted: the methods marked so have not been run.")
        return list(dict.fromkeys(lines))

    def table(self, columns: Sequence[str] | None = None) -> list[list[str]]:
        """Return the table as texts, its header first; rows without numbers have their
        status there."""
        names = self.columns if columns is None else list(columns)
        known = [*self.columns, *(name + TO_BEST for name in self.columns)]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(
                f"columns must be among {self.columns}, got {unknown[0]!r}."
            )
        rows = self.rows()
        metrics = {name.removesuffix(TO_BEST) for name in names}
        metrics = {name for name in metrics if not name.endswith("_s")}
        found = {name: self.differences(name) for name in sorted(metrics)}
        body = []
        for row in rows:
            cells = []
            for name in names if row.ok else ():
                metric = name.removesuffix(TO_BEST)
                apart = found.get(metric, {}).get((row.method, row.link))
                cells.append(_cell(row, name, apart))
            status = row.status if len(row.status) < 80 else f"{row.status[:79]}…"
            body.append(
                [row.label, row.link, _group(row)] + (cells if row.ok else [status])
            )
        table = [["method", "link", "tuned on", *map(heading, names)], *body]
        # Columns that say nothing are left out: without links, with one group.
        kept = [0]
        kept += [1] * any(row.link for row in rows)
        kept += [2] * (len({row.on_validation for row in rows}) > 1)
        return [[line[i] for i in kept] + line[3:] for line in table]

    def choices(self) -> list[list[str]]:
        """Return the table of settings: distance from the best, what was chosen on
        which data, and its values."""
        found = self.differences() if "nll" in self.columns else {}
        table = [["method", "link", "NLL − best", "chosen on", "settings"]]
        for row in self.rows():
            if row.ok and row.settings:
                apart = found.get((row.method, row.link))
                where, values = chosen(row.settings)
                text = _cell(row, "nll" + TO_BEST, apart)
                table.append([row.label, row.link, text, where, values])
        return table if len(table) > 1 else []

    def __str__(self) -> str:
        if not self.results:
            return "No results."
        lines = [*_aligned(self.table()), STARS + self._seeds()]
        if choices := self.choices():
            lines += ["", *_aligned(choices), LEGEND]
        return "\n".join([*lines, *self.remarks()])

    def _seeds(self) -> str:
        n = max((row.n_seeds for row in self.rows()), default=1)
        return f"; mean ± standard error over {n} seeds" if n > 1 else ""

    def to_markdown(self, columns: Sequence[str] | None = None) -> str:
        """Return the table as GitHub Markdown.

        `columns` picks some of `self.columns`, and distances from the best row of the
        group as '<metric>_to_best'; settings and remarks are left out then.
        """
        table = _markdown(self.table(columns))
        if columns is not None:
            return table
        parts = [table, f"\\{STARS}{self._seeds()}."]
        if choices := self.choices():
            parts += [_markdown(choices), f"{LEGEND.replace('*', chr(92) + '*')}."]
        remarks = "\n".join(f"- {line}" for line in self.remarks())
        return "\n\n".join(filter(None, [*parts, remarks]))

    _repr_markdown_ = to_markdown

    def to_csv(self) -> str:
        """Return means with all digits, standard errors (`_se`), distances from the
        best NLL with half-widths of their 95 % intervals, settings and status."""
        errors = {name for row in self.rows() for name in row.error}
        names = []
        for name in self.columns:
            names += [name, f"{name}_se"] if name in errors else [name]
        found = self.differences() if "nll" in self.columns else {}
        last = ["nll_to_best", "nll_to_best_ci95", "settings", "status", "note"]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["method", "link", "tuned on", *names, *last])
        for row in self.rows():
            values = row.mean | {f"{k}_se": v for k, v in row.error.items()}
            apart = found.get((row.method, row.link))
            gap = ["", ""] if apart is None else [apart.value, apart.half_width]
            numbers = [values.get(name, "") for name in names]
            settings = chosen(row.settings)[1]
            texts = [settings, row.status, row.note]
            writer.writerow([row.label, row.link, _group(row), *numbers, *gap, *texts])
        return out.getvalue()

    def to_html(
        self, path: str | os.PathLike[str], title: str = "Comparison of methods"
    ) -> Path:
        """Write the report as one page for a browser, and return where.

        The file is complete in itself: tables, figures, what was tuned to which value,
        what did not run and why, and where the numbers come from. The figures need
        matplotlib (`pip install "laplace-ella[plots]"`).

        Examples
        --------
        >>> import tempfile
        >>> report = Report([Result("map", metrics={"nll": 0.3})], "classification")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.to_html(Path(folder) / "report.html").name
        'report.html'
        """
        from laplace_ella.comparison.page import render

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, render(self, title))
        return path

    # As data

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for `json.dumps`; `Report.from_dict` reads it."""
        return {
            "format": 2,
            "likelihood": self.likelihood,
            "interrupted": self.interrupted,
            "origin": self.origin,
            "results": [finite(asdict(r)) for r in self.results],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Report:
        """Return the report that `to_dict` was called on."""
        if not isinstance(data, Mapping) or data.get("format") != 2:
            got = data.get("format") if isinstance(data, Mapping) else type(data)
            raise ValueError(f"Expected a comparison report of format 2, got {got}.")
        results = [result_of(entry) for entry in data["results"]]
        origin = data.get("origin", {})
        return cls(results, data["likelihood"], data["interrupted"], origin)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON; the file is replaced when the new one is ready."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), json.dumps(self.to_dict(), indent=0))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Return what `save` wrote."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:  # also what is no JSON
            raise ValueError(
                f"{os.fspath(path)} is not a comparison report: {error} Delete the "
                "file or choose another."
            ) from error


def result_of(entry: Any) -> Result:
    """Return a result from its dict; fields of later versions are left out."""
    if not isinstance(entry, Mapping) or "method" not in entry:
        raise ValueError(f"Expected a result with a 'method', got {entry!r:.80}.")
    return Result(**{f.name: entry[f.name] for f in fields(Result) if f.name in entry})


def finite(value: Any) -> Any:
    """Return the value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    unknown = isinstance(value, float) and not math.isfinite(value)
    return None if unknown else value


def replace_file(path: Path, text: str) -> None:
    """Replace a file when the new one is complete; several processes may do so."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# Cells


def heading(column: str) -> str:
    """Return the text above a column."""
    if column.endswith(TO_BEST):
        return f"{heading(column.removesuffix(TO_BEST))} − best"
    if column.startswith("auroc:"):
        return f"AUROC {column.removeprefix('auroc:')}"
    return HEADINGS.get(column, column)


def number(column: str, value: float | None) -> str:
    """Return a number with the digits that its column deserves; '–' for none."""
    if value is None or math.isnan(value):
        return "–"
    if column.endswith("_s"):
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    if column.startswith("coverage_") or column == "accuracy":
        return f"{100 * value:.1f}"
    if column == "ece" or column.startswith("auroc"):
        return f"{value:.3f}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.3g}"


def _cell(row: Row, column: str, apart: Difference | None) -> str:
    """Return a value with its standard error, starred unless it is clearly worse; or a
    distance with its interval."""
    if column.endswith(TO_BEST):
        metric = column.removesuffix(TO_BEST)
        text = number(metric, None if apart is None else apart.value)
        width = apart.half_width if apart is not None and apart.value else None
        return text if width is None else f"{text} ± {number(metric, width)}"
    text = number(column, row.mean.get(column))
    if column in row.error and not column.endswith("_s"):
        text += f" ± {number(column, row.error[column])}"
    return text if apart is None or apart.is_clear else f"{text}*"


def _group(row: Row) -> str:
    return "validation data" if row.on_validation else "training data"


def chosen(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return on which data settings were chosen, and these with their values."""
    names = settings.get("chosen") or ()
    if not names:
        return "–", "–"
    values = [f"{SYMBOLS[name]} = {settings[name]:.3g}" for name in names]
    return settings["tuning"], ", ".join(values) + "*" * settings["at_border"]


def _aligned(table: list[list[str]]) -> list[str]:
    """Return the lines of a table; a status may be longer than its column."""
    full = [line for line in table if len(line) == len(table[0])]
    widths = [max(len(line[i]) for line in full) for i in range(len(table[0]))]
    for line in table:
        widths[0] = max(widths[0], len(line[0]))
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=False)).rstrip()
        for line in table
    ]
    return [lines[0], "─" * max(len(lines[0]), sum(widths)), *lines[1:]]


def _markdown(table: list[list[str]]) -> str:
    texts = ("method", "link", "tuned on", "chosen on", "settings")
    align = ["---" if name in texts else "---:" for name in table[0]]
    lines = []
    for cells in [table[0], align, *table[1:]]:
        cells = [c.replace("|", "\\|") for c in cells]
        cells += [""] * (len(table[0]) - len(cells))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
