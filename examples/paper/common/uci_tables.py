"""Tables about UCI regression from the rows that `uci.py` writes."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

KINDS = {"random": "random splits", "gap": "gap splits"}
COMPLEMENTS = ("drop", "prior", "matched")

#: Shares of the gradients that are sampled.
SHARES = (0.125, 0.25, 0.5, 1.0)

#: A difference of the NLL that is none, in nats, however small its standard error.
NEGLIGIBLE = 0.01

#: Methods without a K, before and after those with one.
FIRST, LAST = (
    ("MAP", "exact", "paper"),
    ("KFAC", "KFAC, maximum", "diag", "last layer", "gp"),
)


def read_csv(path: Path) -> list[Row]:
    """Rows with numbers where there are some, and None for empty cells."""

    def value(text: str) -> Any:
        try:
            return float(text) if text else None
        except ValueError:
            return text

    with path.open(newline="") as file:
        return [{k: value(v) for k, v in row.items()} for row in csv.DictReader(file)]


class Table:
    """Rows of a CSV file, found by some of their columns."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def where(self, **values: Any) -> Table:
        found = [r for r in self.rows if all(r[k] == v for k, v in values.items())]
        return Table(found)

    def distinct(self, column: str) -> list[Any]:
        return list(dict.fromkeys(row[column] for row in self.rows))

    def values(self, column: str) -> np.ndarray:
        return np.array([row[column] for row in self.rows], float)

    def by_split(self, column: str) -> dict[tuple[Any, ...], float]:
        """Values by study, kind and split."""
        keys = ("study", "kind", "split")
        return {tuple(row[k] for k in keys): row[column] for row in self.rows}


def ranks_of(methods: Iterable[str]) -> list[int]:
    """K of the methods that have one."""
    return sorted({int(m[2:].split()[0]) for m in methods if m.startswith("K=")})


def methods_of(table: Table) -> list[str]:
    """Names in the order of the tables: K rising between the others."""
    names = table.distinct("method")
    ours = [f"K={rank} {c}" for rank in ranks_of(names) for c in COMPLEMENTS]
    return [name for name in (*FIRST, *ours, *LAST) if name in names]


def label(method: str) -> str:
    if method == "paper":
        return "ELLA as in the paper"
    if not method.startswith("K="):
        return method
    rank, complement = method[2:].split()
    return f"K = {rank}, {complement}"


def markdown(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def number(value: float, decimals: int = 2) -> str:
    """So many decimals, or three digits of what is large."""
    text = f"{value:.{decimals}f}" if abs(value) < 100 else f"{value:.3g}"
    return text.replace("-", "−")


def error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


# Tables


def what_was_run(table: Table) -> str:
    """Number of splits and sizes of every study."""
    lines = []
    for study in table.distinct("study"):
        parts = [table.where(study=study, kind=kind) for kind in KINDS]
        sizes = [f"{p.values('N').max():,.0f}" if p.rows else "–" for p in parts]
        n_params = table.where(study=study).values("P").max()
        counts = [str(len(part.distinct("split"))) for part in parts]
        lines.append([study, *counts, *sizes, f"{n_params:,.0f}"])
    return markdown(["", *KINDS.values(), "N, random", "N, gap", "P"], lines)


def nll(table: Table, kind: str, studies: list[str]) -> str:
    """Methods by data sets: mean ± standard error over splits, and the median."""
    part = table.where(kind=kind)
    methods = methods_of(part)
    columns: dict[str, list[str]] = {method: [] for method in methods}
    for study in studies:
        rows = part.where(study=study)
        losses = {m: rows.where(method=m).by_split("nll") for m in methods}
        whole = [m for m in methods if len(losses[m]) == len(rows.distinct("split"))]
        best = min(whole, key=lambda m: np.mean(list(losses[m].values())))
        for method in methods:
            values = np.array(list(losses[method].values()))
            if not len(values):
                columns[method].append("–")
                continue
            excess = np.array([v - losses[best][k] for k, v in losses[method].items()])
            text = f"{number(values.mean())} ± {number(error(values))}"
            within = excess.mean() <= max(error(excess), NEGLIGIBLE)
            if method in whole and within:
                text = f"**{text}**"
            if kind == "gap":
                text += f" ({number(float(np.median(values)))})"
            columns[method].append(text)
    lines = []
    for method in methods:
        mine = part.where(method=method)
        wins = sum(cell.startswith("**") for cell in columns[method])
        near = mine.values("near_best")
        line = [label(method), *columns[method], f"{wins} of {len(studies)}"]
        lines.append([*line, f"{int(near.sum())} of {len(near)}"])
    return markdown(["", *studies, "data sets", "splits"], lines)


def coverage(table: Table, kind: str, studies: list[str]) -> str:
    """Methods by data sets: coverage, and width of the intervals by the exact ones'."""
    part = table.where(kind=kind)
    lines = []
    for method in methods_of(part):
        rows = part.where(method=method)
        cells = [
            f"{v.mean():.3f}" if len(v) else "–"
            for v in (rows.where(study=s).values("coverage") for s in studies)
        ]
        lines.append([label(method), *cells, f"{_ratio(part, method, 'width'):.2f}"])
    return markdown(["", *studies, "width"], lines)


def _ratio(table: Table, method: str, column: str) -> float:
    """Median over splits of a method's value by the exact posterior's."""
    mine = table.where(method=method)
    return float(np.median(_ratios(mine, table.where(method="exact"), column)))


def in_short(table: Table) -> str:
    """Of every method: against the best and against exact Laplace, split by split."""
    lines = []
    for method in methods_of(table):
        line = [label(method)]
        for kind in KINDS:
            rows = table.where(kind=kind, method=method)
            best, exact = rows.values("near_best"), rows.values("near_exact")
            middle = float(np.median(rows.values("excess")))
            line += [
                f"{100 * best.mean():.0f} %",
                f"{100 * exact.mean():.0f} %",
                number(middle),
                f"{rows.values('coverage').mean():.3f}",
            ]
        lines.append(line)
    counts = {k: len(table.where(kind=k, method="exact").rows) for k in KINDS}
    head = [""]
    for kind, name in KINDS.items():
        head += [
            f"{counts[kind]} {name}: near the best",
            "near exact",
            "median NLL beyond exact",
            "coverage",
        ]
    return markdown(head, lines)


def times(table: Table, studies: list[str]) -> str:
    """CPU time by the exact posterior's."""
    head = [""]
    for study in studies:
        n = int(table.where(study=study).values("N").max())
        head += [f"{study} (N up to {n}): fit", "tuning", "prediction"]
    lines = []
    for method in methods_of(table):
        measured = [bool(table.where(study=s, method=method).rows) for s in studies]
        if method == "MAP" or not any(measured):
            continue
        line = [label(method)]
        for study, there in zip(studies, measured, strict=True):
            part = table.where(study=study)
            line += [
                f"{_ratio(part, method, column):.2g}" if there else "–"
                for column in ("fit", "tune", "predict")
            ]
        lines.append(line)
    seconds = ["exact, CPU seconds"]
    for study in studies:
        rows = table.where(study=study, method="exact")
        seconds += [
            f"{np.median(rows.values(c)):.2g}" for c in ("fit", "tune", "predict")
        ]
    return markdown(head, [seconds, *lines])


def sampled(table: Table, samples: Table) -> list[Row]:
    """By study, kind and share of the gradients: medians of the NLL beyond exact, and
    of noise and prior by the exact ones."""
    exact = table.where(method="exact")
    all_sampled = table.where(method="K=20 matched")
    rows = []
    for study in samples.distinct("study"):
        for kind in KINDS:
            losses = exact.where(study=study, kind=kind).by_split("nll")
            here = {"study": study, "kind": kind}
            parts = {s: samples.where(**here, share=s) for s in SHARES[:-1]}
            parts[1.0] = all_sampled.where(**here)
            for share, part in parts.items():
                if not part.rows:
                    continue
                found = part.by_split("nll")
                row = {**here, "share": share}
                row["excess"] = np.median([found[k] - losses[k] for k in found])
                for name in ("sigma", "prior"):
                    row[name] = (
                        np.median(part.values(f"{name}_ratio"))
                        if share < 1
                        else np.median(_ratios(part, exact.where(**here), name))
                    )
                rows.append(row)
    return rows


def _ratios(part: Table, exact: Table, name: str) -> list[float]:
    reference = exact.by_split(name)
    return [value / reference[key] for key, value in part.by_split(name).items()]


def sample_table(rows: list[Row]) -> str:
    lines = []
    for study in dict.fromkeys(row["study"] for row in rows):
        for kind in KINDS:
            here = [r for r in rows if r["study"] == study and r["kind"] == kind]
            if here:
                line = [f"{study}, {kind}"]
                for name in ("excess", "sigma", "prior"):
                    line += [number(float(row[name])) for row in here]
                lines.append(line)
    head = [""]
    for name in ("NLL beyond exact", "σ by the exact one", "δ by the exact one"):
        head += [f"{name}: M = N/8", "N/4", "N/2", "N"]
    return markdown(head, lines)


def log_det_table(log_dets: Table) -> str:
    """Relative errors of the log determinant, in per cent, over all splits."""
    lines = []
    for share in log_dets.distinct("share"):
        for ridge in log_dets.distinct("ridge"):
            part = log_dets.where(share=share, ridge=ridge)
            line = [f"N/{round(1 / share)}", f"{ridge:g} δσ²"]
            for name in ("estimate", "scaled"):
                errors = _errors(part, name)
                line += [
                    number(float(np.median(errors))),
                    number(float(np.abs(errors).mean())),
                    number(float(np.abs(errors).max())),
                ]
            lines.append(line)
    head = ["M", "ridge"]
    for name in ("spectrum", "scaled by N/M"):
        head += [f"{name}: median, %", "mean size, %", "largest, %"]
    return markdown(head, lines)


def log_det_by_data(log_dets: Table) -> str:
    shares = log_dets.distinct("share")
    lines = []
    for study in log_dets.distinct("study"):
        line = [study]
        for name in ("estimate", "scaled"):
            for share in shares:
                part = log_dets.where(study=study, share=share, ridge=1.0)
                line.append(number(float(np.median(_errors(part, name)))))
        lines.append(line)
    columns = [f"M = N/{round(1 / share)}" for share in shares]
    head = [
        "",
        *(f"spectrum: {c}" for c in columns),
        *(f"scaled: {c}" for c in columns),
    ]
    return markdown(head, lines)


def _errors(part: Table, name: str) -> np.ndarray:
    return 100 * (part.values(name) / part.values("exact") - 1)


def few(table: Table, study: str, kind: str) -> str:
    """NLL of every split, mean coverage and CPU seconds of a study with few splits."""
    part = table.where(study=study, kind=kind)
    splits = sorted(part.distinct("split"))
    lines = []
    for method in methods_of(part):
        rows = part.where(method=method)
        losses = {row["split"]: row["nll"] for row in rows.rows}
        near = rows.rows[0].get("near_exact") is not None
        cost = rows.values("fit") + rows.values("tune")
        lines.append(
            [
                label(method),
                *(number(losses[split], 3) for split in splits),
                f"{int(rows.values('near_best').sum())} of {len(splits)}",
                f"{int(rows.values('near_exact').sum())} of {len(splits)}"
                if near
                else "–",
                f"{rows.values('coverage').mean():.3f}",
                "–" if math.isnan(cost[0]) else f"{np.median(cost):.2g}",
                f"{np.median(rows.values('predict')):.2g}",
            ]
        )
    head = ["", *(f"NLL, {int(s)}" for s in splits), "near the best", "near exact"]
    return markdown([*head, "coverage", "fit and tuning, s", "prediction, s"], lines)
