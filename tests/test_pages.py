"""What README and site say holds: their code runs, their links lead somewhere, and
their tables and figures are those of the result files."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import textwrap
import warnings
from pathlib import Path

import pytest

from laplace_ella.cli.parser import build_parser

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "examples" / "paper"
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
    PAPER / "RESULTS.md",
    *SITE,
]

FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --- code ----------------------------------------------------------------------------


def blocks(page: Path) -> list[str]:
    """Python code of a page, in order."""
    return [textwrap.dedent(match[2]) for match in FENCE.finditer(page.read_text())]


def imported(code: str) -> set[str]:
    """Packages that a piece of code imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    "page", [page for page in (PAGES[0], *SITE) if blocks(page)], ids=name
)
def test_code_runs(page, tmp_path, monkeypatch):
    """Every python block of a page executes, in order, in one namespace."""
    codes = blocks(page)
    needed = {package for code in codes for package in imported(code)}
    missing = sorted(p for p in needed if importlib.util.find_spec(p) is None)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: run by make test-clients")
    monkeypatch.chdir(tmp_path)  # pages may write files
    namespace: dict[str, object] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, code in enumerate(codes, start=1):
            exec(compile(code, f"{name(page)}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", [PAGES[0], *SITE], ids=name)
def test_commands_are_understood(page):
    """Every `laplace-ella` line of a page parses."""
    shells = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    for line in "".join(shells).splitlines():
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program == "laplace-ella" and "--list" not in arguments:
            build_parser().parse_args(arguments)


# --- links ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_exist(page):
    """Relative links lead to files; those within the site are tested there."""
    links = re.findall(r"\]\((?!http|#)([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


# --- results -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def update_results():
    spec = importlib.util.spec_from_file_location(
        "update_results", PAPER / "update_results.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_are_those_of_the_result_files(update_results):
    """`examples/paper/update_results.py` has nothing to change."""
    filled = 0
    for page in update_results.pages():
        text = page.read_text()
        filled += "<!-- end -->" in text
        assert update_results.fill(text) == text, name(page)
        # Markdown would begin a new paragraph there.
        assert not re.search(r"^ *<!-- cell", text, re.MULTILINE), name(page)
    assert filled >= 3


def test_one_cell_of_a_result_file(update_results):
    """The cell of a page is the one that was asked for, or an error."""
    where = "<!-- cell uci/short.md; KFAC; {} -->?<!-- end -->"
    columns = ("near exact", "near exact #2")
    first, second = (update_results.fill(where.format(column)) for column in columns)
    line = next(
        line
        for line in (PAPER / "results" / "uci" / "short.md").read_text().splitlines()
        if line.startswith("| KFAC |")
    )
    values = [cell.strip() for cell in line.strip("|").split("|")]
    assert f">{values[2]}<" in first
    assert f">{values[6]}<" in second
    with pytest.raises(LookupError, match="0 cells"):
        update_results.fill(where.format("no such column"))
