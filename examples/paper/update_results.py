"""Fill the tables of RESULTS.md, the README and docs/ from the files in results/.

    python examples/paper/update_results.py

Between `<!-- begin NAME -->` and `<!-- end -->` stands the file results/NAME, or, for a
name that ends in `environment.json`, its contents in one line. Nothing is typed in.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def contents(name: str) -> str:
    path = HERE / "results" / name
    if not path.exists():
        return "*not run yet*\n"
    if path.suffix == ".json":
        values = json.loads(path.read_text())
        return ", ".join(f"{k} {v}" for k, v in values.items()) + "\n"
    return path.read_text().strip() + "\n"


def fill(text: str) -> str:
    return BLOCK.sub(lambda m: m[1] + "\n" + contents(m[2]) + "\n" + m[3], text)


def main() -> None:
    root = HERE.parents[1]
    pages = (HERE / "RESULTS.md", root / "README.md", *(root / "docs").rglob("*.md"))
    for page in pages:
        page.write_text(fill(page.read_text()))


if __name__ == "__main__":
    main()
