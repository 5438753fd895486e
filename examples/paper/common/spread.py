"""Means and standard deviations over seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

METRICS = ("accuracy", "nll", "ece", "brier")


def spread(rows_of_seeds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For every method, link and protocol that all seeds have: mean and deviation."""
    tables = [
        {(r["protocol"], r["method"], r["link"]): r for r in rows if "nll" in r}
        for rows in rows_of_seeds
    ]
    table = []
    for key in tables[0]:
        if not all(key in other for other in tables):
            continue
        names = ("protocol", "method", "link")
        row: dict[str, Any] = dict(zip(names, key, strict=True))
        for name in METRICS:
            values = np.array([other[key][name] for other in tables])
            row[name] = float(values.mean())
            row[f"{name}_std"] = float(values.std(ddof=1)) if len(tables) > 1 else None
        table.append({**row, "seeds": len(tables)})
    return table


def with_errors(row: dict[str, Any]) -> dict[str, Any]:
    """A row for reading: `0.2690 ± 0.0012`."""
    words = {
        name: f"{row[name]:.4f}"
        if row[f"{name}_std"] is None
        else f"{row[name]:.4f} ± {row[f'{name}_std']:.4f}"
        for name in METRICS
    }
    return {**row, **words}
