"""The outcome of a comparison: results, their means over seeds, tables and the page."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from laplace_ella import plotting
from laplace_ella.comparison.bootstrap import Difference

#: A column of this ending is the distance of a metric from the best row's.
TO_BEST = "_to_best"

HEADINGS = {
    "accuracy": "acc. %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "rmse": "RMSE",
    "coverage_50": "50 %", "coverage_90": "90 %", "coverage_95": "95 %",
    "width_95": "width", "calibration": "cal. err.", "kl_to_lla": "KL",
    "fit_s": "fit s", "tune_s": "tune s", "predict_s": "predict s",
}  # fmt: skip

SYMBOLS = {
    "prior_precision": "δ", "temperature": "T", "softmax_temperature": "τ",
    "sigma_noise": "σ", "n_data": "N",
}  # fmt: skip

#: The distance of a row without the metric.
NOT_KNOWN = Difference(math.nan, None)

#: What the rows of a group are tuned on, by `on_validation`.
GROUPS = ("training data", "validation data")

LEGEND = (
    "δ prior precision (the mean of several), T temperature of the likelihood, τ of "
    "the softmax, σ noise, N training data; a star marks a search that ended at the "
    "border of its range."
)
STARS = (
    "A star marks rows that are not significantly worse than the best of their group: "
    "the 95 % interval of the difference (paired bootstrap over the test examples) has "
    "zero in it."
)


@dataclass(frozen=True)
class Result:
    """One method with one link ('' where there is none to choose), for one seed or,
    with means and standard errors, for several.

    `status` is 'ok', or the reason why there are no numbers. `metrics` are scores on
    the test data, `replicates` the same on draws of these data, `costs` seconds. Of the
    `settings` 'chosen' names those that were chosen, 'tuning' says on what data, and
    'at_border' whether a search ended at the border of its range. `left_out` has the
    types of layers without a posterior.
    """

    method: str
    link: str = ""
    seed: int = 0
    status: str = "ok"
    metrics: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Any] = field(default_factory=dict)
    replicates: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""
    left_out: str = ""
    on_validation: bool = False
    error: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> dict[str, float]:
        """Metrics and costs."""
        return {**self.metrics, **self.costs}

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def label(self) -> str:
        """The method's name in tables and figures."""
        without = f" (without {self.left_out})" if self.left_out else ""
        return self.method + without

    @property
    def full_label(self) -> str:
        """The label with the link."""
        return f"{self.label} ({self.link})" if self.link else self.label


def over_seeds(results: Sequence[Result]) -> Result:
    """Return the row of results that differ in their seeds."""
    done, failed = [r for r in results if r.ok], [r for r in results if not r.ok]
    first = (done or results)[0]
    mean, error, replicates = {}, {}, {}
    for name in first.mean:
        found = [r.mean.get(name, math.nan) for r in done]
        values = [v for v in found if math.isfinite(v)]
        if values:
            mean[name] = fmean(values)
        if len(values) > 1:
            error[name] = stdev(values) / math.sqrt(len(values))
        draws = [r.replicates.get(name, []) for r in done]
        if len({len(each) for each in draws}) == 1:
            replicates[name] = [fmean(each) for each in zip(*draws, strict=True)]
    note = first.note
    if done and failed:
        note += f"; {len(failed)} of {len(results)} seeds: {failed[0].status}"
    costs = {name: mean.pop(name) for name in first.costs if name in mean}
    known = {"costs": costs, "error": error, "replicates": replicates}
    return replace(first, metrics=mean, note=note.strip("; "), **known)


def badness(column: str, value: float) -> float:
    """Return what is smaller where the value of a metric is better."""
    if column == "accuracy" or column.startswith("auroc"):
        return -value
    if column.startswith("coverage_"):
        return abs(value - float(column.removeprefix("coverage_")) / 100)
    return value


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
        model, data, settings and versions, as texts

    Examples
    --------
    >>> report = Report([
    ...     Result("map", metrics={"nll": 0.30}, costs={"fit_s": 0.0}),
    ...     Result("ella", "mc", metrics={"nll": 0.25}, costs={"fit_s": 1.5}),
    ... ])
    >>> print(report.to_markdown(["nll"]))
    | method | link | NLL     |
    | ------ | ---- | ------- |
    | map    |      | 0.3000  |
    | ella   | mc   | 0.2500* |
    """

    results: Sequence[Result]
    likelihood: str = ""
    interrupted: bool = False
    origin: dict[str, str] = field(default_factory=dict)

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
        names = [name for r in self.results for name in r.metrics]
        names += [name for r in self.results for name in r.costs]
        there = {name for row in self.rows() for name in row.mean}
        return [name for name in dict.fromkeys(names) if name in there]

    def rows(self) -> list[Result]:
        """Return one result per method and link: those without validation data, then
        those tuned on them, both in the order of the run."""
        groups: dict[tuple[bool, str, str], list[Result]] = {}
        for r in sorted(self.results, key=lambda r: r.on_validation):
            groups.setdefault((r.on_validation, r.method, r.link), []).append(r)
        return [over_seeds(group) for group in groups.values()]

    def best(self, column: str, rows: Sequence[Result] | None = None) -> Result:
        """Return the row with the best value of a metric, of these or of all."""
        rows = self.rows() if rows is None else rows
        there = [row for row in rows if column in row.mean]
        if not there:
            known = ", ".join(self.columns) or "none"
            raise KeyError(f"No row has the metric {column!r}; there are {known}.")
        return min(there, key=lambda row: badness(column, row.mean[column]))

    def differences(self, column: str = "nll") -> dict[tuple[str, str], Difference]:
        """Return the distance of each row from the best of its group, by method and
        link.

        Positive is worse. The interval is by a paired bootstrap over the test examples,
        after the mean over the seeds.
        """
        rows, found = [row for row in self.rows() if column in row.mean], {}
        self.best(column, rows)
        for row in rows:
            group = [r for r in rows if r.on_validation is row.on_validation]
            best = self.best(column, group)
            bad, least = (badness(column, r.mean[column]) for r in (row, best))
            draws = (r.replicates.get(column, []) for r in (row, best))
            found[row.method, row.link] = Difference.of(bad - least, *draws)
        return found

    def curves(self, name: str, link: str | None = None) -> dict[str, Any]:
        """Return curves of the first seed, by a label of method and link.

        Names are 'reliability' and 'coverage'. `link` picks one link, and methods that
        have none.
        """
        found: dict[str, Any] = {}
        for r in self.results:
            if name in r.curves and (link is None or r.link in ("", link)):
                label = r.label if link is not None else r.full_label
                found.setdefault(label, r.curves[name])
        return found

    # Tables

    def table(self, columns: Sequence[str] | None = None) -> list[list[str]]:
        """Return the table as texts, its header first; a row without numbers is shorter
        and ends with its status. Columns that say nothing are left out."""
        names = self.columns if columns is None else list(columns)
        known = [*self.columns, *(name + TO_BEST for name in self.columns)]
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"columns must be among {known}, got {unknown[0]!r}.")
        rows = self.rows()
        table = [["method", "link", "tuned on", *map(heading, names)]]
        table += [[row.label, row.link, GROUPS[row.on_validation]] for row in rows]
        for name in names:
            metric, to_best = name.removesuffix(TO_BEST), name.endswith(TO_BEST)
            apart = self.differences(metric)
            scored = not (to_best or name.endswith("_s") or name == "width_95")
            means = {row.mean.get(metric) for row in rows if row.ok}
            marked = scored and len(means) > 1
            for row, cells in zip(rows, table[1:], strict=True):
                found = apart.get((row.method, row.link), NOT_KNOWN)
                shown = row.mean.get(metric), row.error.get(metric)
                shown = (found.value, found.half_width) if to_best else shown
                star = marked and not found.is_clear
                cells += [number(metric, *shown) + "*" * star] if row.ok else []
        for row, cells in zip(rows, table[1:], strict=True):
            cells += [] if row.ok else [f"{row.status:.100}"]
        kept = [0, *[1] * any(row.link for row in rows)]
        kept += [2] * (len({row.on_validation for row in rows}) > 1)
        return [[cells[i] for i in kept] + cells[3:] for cells in table]

    def settings(self) -> list[list[str]]:
        """Return the table of distances from the best, and of what was chosen."""
        rows = [row for row in self.rows() if row.settings]
        table = [["method", "link", "NLL − best", "chosen on", "settings"]]
        apart = self.differences() if "nll" in self.columns else {}
        for row in rows:
            found, names = row.settings, row.settings["chosen"]
            texts = [f"{SYMBOLS[name]} = {found[name]:.3g}" for name in names]
            texts = (", ".join(texts) or "–") + "*" * found.get("at_border", False)
            gap = apart.get((row.method, row.link), NOT_KNOWN)
            distance = number("nll", gap.value, gap.half_width)
            where = found["tuning"] if names else "–"
            table.append([row.label, row.link, distance, where, texts])
        return table if rows else []

    def remarks(self) -> list[str]:
        """Return what a reader should know besides the numbers."""
        rows, n = self.rows(), len({r.seed for r in self.results})
        texts = [(row.full_label, row.note if row.ok else row.status) for row in rows]
        lines = [f"{label}: {text}" for label, text in texts if text]
        if n > 1:
            lines.insert(0, f"Means ± standard errors over {n} seeds.")
        if self.interrupted:
            lines.append("Interrupted: the methods marked so have not been run.")
        return lines

    def to_markdown(self, columns: Sequence[str] | None = None) -> str:
        """Return the report as GitHub Markdown, which is what `print` shows.

        `columns` picks some of `self.columns`, and distances from the best row of the
        group as '<metric>_to_best'; settings and remarks are left out then.
        """
        if columns is not None or not self.results:
            return markdown(self.table(columns)) if self.results else "No results."
        parts = [markdown(self.table()), STARS]
        if settings := self.settings():
            parts += [markdown(settings), LEGEND]
        return "\n\n".join([*parts, "\n".join(f"- {each}" for each in self.remarks())])

    __str__ = _repr_markdown_ = to_markdown

    def to_csv(self) -> str:
        """Return means with all digits, standard errors (`_se`), status and notes."""
        out, rows = io.StringIO(), self.rows()
        errors = dict.fromkeys(f"{name}_se" for row in rows for name in row.error)
        names = ["method", "link", "tuned on", *self.columns, *errors, "status", "note"]
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            cells = {"method": row.label, "link": row.link, **row.mean}
            cells |= {f"{name}_se": error for name, error in row.error.items()}
            cells |= {"tuned on": GROUPS[row.on_validation]}
            writer.writerow({**cells, "status": row.status, "note": row.note})
        return out.getvalue()

    # Files

    def to_html(
        self, path: str | os.PathLike[str], title: str = "Comparison of methods"
    ) -> Path:
        """Write the report as one page for a browser, and return where.

        The file loads nothing from anywhere. The figures need matplotlib
        (`pip install "laplace-ella[plots]"`).
        """
        import jinja2

        text = resources.files("laplace_ella.comparison").joinpath("report.html")
        page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(
            text.read_text(encoding="utf-8")
        )
        shown = {"report": self, "figures": dict(figures(self)), "title": title}
        rendered = page.render(**shown, stars=STARS, legend=LEGEND)
        write(Path(path), rendered)
        return Path(path)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for `json.dumps`."""
        return {"format": 2, **vars(self), "results": [asdict(r) for r in self.results]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON; the file is replaced when the new one is ready."""
        write(Path(path), json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Return what `save` wrote."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data.pop("format") != 2:
                raise ValueError("its format is another one")
            return cls(**{**data, "results": [Result(**r) for r in data["results"]]})
        except (ValueError, KeyError, TypeError) as error:  # also what is no JSON
            raise ValueError(
                f"{path} is not a comparison report ({error!r}); choose another file."
            ) from error


def write(path: Path, text: str) -> None:
    """Replace a file when the new one is complete; several processes may do so."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def number(column: str, x: float | None, error: float | None = None) -> str:
    """Return a number with the digits that its column deserves, and its error where
    there is one; '–' for none."""
    if x is None or math.isnan(x):
        return "–"
    if column.endswith("_s"):
        return f"{x:.2f}" if x < 10 else f"{x:.0f}"
    text = f"{x:.4f}" if abs(x) < 100 else f"{x:.3g}"
    if column.startswith("coverage_") or column == "accuracy":
        text = f"{100 * x:.1f}"
    elif column == "ece" or column.startswith("auroc"):
        text = f"{x:.3f}"
    return f"{text} ± {number(column, error)}" if error else text


def markdown(table: list[list[str]]) -> str:
    """Return a table as GitHub Markdown; a status may be longer than its column."""
    table = [[cell.replace("|", "\\|") for cell in cells] for cells in table]
    n, lines = len(table[0]), []
    known = [cells if len(cells) == n else cells[:-1] for cells in table]
    columns = [[cells[i] for cells in known if i < len(cells)] for i in range(n)]
    widths = [max(map(len, column)) for column in columns]
    for cells in [table[0], ["-" * width for width in widths], *table[1:]]:
        cells = [c.ljust(w) for c, w in zip(cells, widths, strict=False)]
        cells += [" " * w for w in widths[len(cells) :]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figures(report: Report) -> Iterator[tuple[str, str]]:
    """Yield captions and data addresses of the figures; none without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return
    rows = [row for row in report.rows() if "nll" in row.mean]
    apart = report.differences() if rows else {}
    near = {row.full_label: apart[row.method, row.link] for row in rows}
    costly = [row for row in rows if "predict_s" in row.mean]
    drawn: Any = (
        ("Distance from the best NLL of the group", plotting.plot_differences, near),
        ("Cost against quality", plotting.plot_cost_quality, costly),
        ("Reliability", plotting.plot_reliability, report.curves("reliability")),
        ("Coverage of intervals", plotting.plot_coverage, report.curves("coverage")),
    )
    for caption, plot, data in drawn:
        if not data:
            continue
        figure, svg = Figure(figsize=(8, 4.5), layout="constrained"), io.BytesIO()
        plot(data, figure.add_subplot())
        # Without salt and date the same report would be another file each time.
        with matplotlib.rc_context({"svg.hashsalt": "laplace-ella"}):
            figure.savefig(svg, format="svg", metadata={"Date": None})
        encoded = base64.b64encode(svg.getvalue()).decode()
        yield caption, f"data:image/svg+xml;base64,{encoded}"
