"""A report as one page for a browser: the template, and what it is filled with.

Template, style and script are the files of the folder `page`. Everything from the user
(names, reasons, numbers) is escaped by the template; a content security policy inside
the page forbids it to load anything, or to run any script but its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from laplace_ella.comparison.page_figures import figure_groups
from laplace_ella.comparison.page_tables import (
    differences_table,
    failures_table,
    results_table,
    settings_table,
)
from laplace_ella.comparison.provenance import Provenance
from laplace_ella.comparison.report import Report
from laplace_ella.comparison.tables import (
    SYMBOL_LEGEND,
    error_legend,
    format_value,
    heading,
    mark_legend,
)
from laplace_ella.support.resources import human_bytes

__all__ = ["render"]

#: What the columns mean, for readers who were sent the page.
COLUMNS = {
    "accuracy": "share of test examples whose class is right, in per cent",
    "nll": "negative log-likelihood of the test data, in nats per example; lower is "
    "better, and it counts both accuracy and calibration",
    "ece": "expected calibration error: mean distance of confidence from accuracy",
    "brier": "squared distance of the probabilities from the truth",
    "rmse": "root mean squared error of the mean",
    "coverage_50": "share of targets inside 50 % intervals; 50 is best",
    "coverage_90": "share of targets inside 90 % intervals; 90 is best",
    "coverage_95": "share of targets inside 95 % intervals; 95 is best",
    "calibration": "mean distance of coverage from its nominal level",
    "kl_to_lla": "divergence of the function values from exact linearised Laplace's",
    "fit_s": "seconds to fit",
    "tune_s": "seconds to tune",
    "predict_s": "seconds to predict the test set",
    "peak_mb": "memory on top of what was used before, at its highest",
    "floats": "numbers that are kept besides the network's weights",
}

_AUROC = "how well uncertainty tells test data from “{}”: 1 always, 0.5 not at all"

NO_FIGURES = (
    "The figures need matplotlib, which is not installed here: "
    'pip install "laplace-ella[plots]", then write the page again.'
)


def render(report: Report, title: str) -> str:
    """The text of the page."""
    script, style = _file("report.js"), _file("report.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    try:
        groups, no_figures = figure_groups(report), ""
    except ImportError:
        groups, no_figures = [], NO_FIGURES
    by_id = {group.id: group for group in groups}
    rows = report.rows()
    tables = [
        results_table(report),
        differences_table(report),
        settings_table(report),
        failures_table(report),
    ]
    page = _template().render(
        title=title,
        script=Markup(script),
        script_digest=digest,
        style=Markup(style),
        summary=_summary(report),
        tables={table.id: table for table in tables if table.rows},
        groups=by_id,
        svg=_svg,
        no_figures=no_figures,
        mark_legend=mark_legend(rows),
        error_legend=error_legend(rows),
        symbol_legend=SYMBOL_LEGEND.rsplit(";", 1)[0],
        glossary={heading(name): _meaning(name) for name in report.columns},
        remarks=report.remarks(),
        origin=_origin(report),
        csv="data:text/csv;charset=utf-8," + quote(report.to_csv()),
    )
    return page.lstrip()


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(_file("report.html"))


def _file(name: str) -> str:
    folder = resources.files("laplace_ella.comparison") / "page"
    return (folder / name).read_text(encoding="utf-8")


def _svg(figure: Any) -> Markup:
    """Our own drawing; matplotlib and ElementTree have escaped the texts in it."""
    return Markup(figure.svg)


def _meaning(column: str) -> str:
    if column.startswith("auroc:"):
        return _AUROC.format(column.removeprefix("auroc:"))
    return COLUMNS.get(column, "")


# --- in words ------------------------------------------------------------------------


def _summary(report: Report) -> list[str]:
    """What a reader should know first."""
    lines = []
    if "nll" in report.metric_columns:
        best = report.best("nll")
        name = f"{best.method} ({best.link})" if best.link else best.method
        found = [d for d in report.differences("nll").values() if d is not None]
        close = sum(not d.is_clear for d in found) - 1
        lines.append(f"Lowest NLL: {name}, {format_value('nll', best.mean['nll'])}.")
        if close > 0:
            lines.append(
                f"{close} of the {len(found) - 1} other rows cannot be told from it "
                "on these test data."
            )
    n_failed = sum(not row.ok for row in report.rows())
    if n_failed:
        lines.append(
            f"{n_failed} row{'s have' if n_failed > 1 else ' has'} no numbers; the "
            "reasons are below."
        )
    if report.interrupted:
        lines.append("The run was interrupted before all methods were done.")
    return lines or ["No row has numbers; the reasons are below."]


def _origin(report: Report) -> dict[str, dict[str, str]]:
    """Model, data, settings and versions as text, by group."""
    seeds = sorted({result.seed for result in report})
    known = report.provenance or Provenance()
    options: Mapping[str, Any] = {
        "likelihood": report.likelihood,
        **known.options,
        "seeds": seeds,
    }
    # What has no meaning for this likelihood, or for the reader of the numbers.
    idle = {"dict_key_x", "dict_key_y"} | (
        {"links", "n_samples", "n_bins"}
        if report.likelihood == "regression"
        else {"sigma_noise"}
    )
    sizes = {"class": known.model} if known.model else {}
    if known.n_params:
        sizes["trainable parameters P"] = f"{known.n_params:,}"
    if known.output_shape:
        sizes["outputs C"] = " × ".join(f"{n:,}" for n in known.output_shape)
    groups = {
        "Model": sizes,
        "Examples": {role: f"{n:,}" for role, n in known.n_data.items()},
        "Settings": {
            name: text
            for name, value in options.items()
            if name not in idle and (text := _option(name, value))
        },
        "Versions": {
            **known.versions,
            **({"device": known.device} if known.device else {}),
            **({"date": known.date} if known.date else {}),
        },
    }
    return {name: entries for name, entries in groups.items() if entries}


def _option(name: str, value: Any) -> str:
    if name == "memory_budget" and isinstance(value, (int, float)):
        return human_bytes(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
