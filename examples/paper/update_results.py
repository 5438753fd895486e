"""Fill the tables and figures of all pages from the files in results/.

    python examples/paper/update_results.py

Between `<!-- begin NAME -->` and `<!-- end -->` stands the file results/NAME, or, for a
name that ends in `environment.json`, its contents in one line. Between `<!-- cell NAME;
ROW; COLUMN -->` and `<!-- end -->` stands one cell of a table in it. Nothing is typed
in.

A row is named by its first cell, or by its first cells with ' / ' between them; a
column by its head, of several with the same head the second as 'head #2'. Where a file
has many tables, a fourth part names the bold line above the one that is meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
CELL = re.compile(r"(<!-- cell ([^>]*?) -->)[^<]*(<!-- end -->)")


def contents(name: str) -> str:
    path = HERE / "results" / name
    if not path.exists():
        return "*not run yet*\n"
    if path.suffix == ".json":
        values = json.loads(path.read_text())
        return ", ".join(f"{k} {v}" for k, v in values.items()) + "\n"
    return path.read_text().strip() + "\n"


def tables(text: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Of every table the bold line above it, its heads and its rows."""
    title = ""
    for paragraph in text.split("\n\n"):
        lines = paragraph.strip().splitlines()
        if lines and lines[0].startswith("|"):
            heads, _, *rows = (
                [cell.strip().strip("*") for cell in line.strip("|").split("|")]
                for line in lines
                if line.startswith("|")
            )
            yield title, heads, rows
        elif lines and lines[-1].startswith("**"):
            title = lines[-1].strip("*")


def cell(name: str, row: str, column: str, title: str | None = None) -> str:
    """One cell of the tables in results/NAME; an error unless there is exactly one."""
    head, _, number = column.partition(" #")
    found = [
        values[[i for i, h in enumerate(heads) if h == head][int(number or 1) - 1]]
        for above, heads, rows in tables(contents(name))
        if title in (None, above) and head in heads
        for values in rows
        if row in (" / ".join(values[:n]) for n in range(1, len(values)))
    ]
    if len(found) != 1:
        raise LookupError(
            f"{name} has {len(found)} cells in row {row!r} and column {column!r}"
            + (f" under {title!r}." if title else ".")
        )
    return found[0]


def fill(text: str) -> str:
    text = BLOCK.sub(lambda m: m[1] + "\n" + contents(m[2]) + "\n" + m[3], text)
    return CELL.sub(lambda m: m[1] + cell(*m[2].split("; ")) + m[3], text)


def pages() -> list[Path]:
    """Every page that may have results in it."""
    return [
        HERE / "RESULTS.md",
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def main() -> None:
    for page in pages():
        page.write_text(fill(page.read_text()))


if __name__ == "__main__":
    main()
