"""What README and site say holds: their code runs, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import textwrap
import warnings
from pathlib import Path

import pytest
from laplace_ella.cli import build_parser

ROOT = Path(__file__).parents[1]
SITE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "examples").rglob("*.md"))
FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    """Python code of a page, in order."""
    return [textwrap.dedent(match[2]) for match in FENCE.finditer(page.read_text())]


def missing(code: str) -> bool:
    """Whether a piece of code imports a package that is not installed."""
    packages = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
    return any(importlib.util.find_spec(package) is None for package in packages)


@pytest.mark.parametrize("page", [p for p in SITE if blocks(p)], ids=name)
def test_code_runs(page, tmp_path, monkeypatch):
    """Every python block of a page executes, in order, up to the first that needs a
    package which is not here (make test-clients has all)."""
    monkeypatch.chdir(tmp_path)  # pages may write files
    namespace: dict[str, object] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, code in enumerate(blocks(page), start=1):
            if missing(code):
                break
            exec(compile(code, f"{name(page)}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", SITE, ids=name)
def test_commands_are_understood(page):
    """Every `laplace-ella` line of a page parses."""
    shells = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    for line in "".join(shells).splitlines():
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program == "laplace-ella" and "--list" not in arguments:
            build_parser().parse_args(arguments)


@pytest.mark.parametrize("page", [*SITE, ROOT / "CHANGELOG.md", *RESULTS], ids=name)
def test_links_exist(page):
    """Relative links lead to files."""
    links = re.findall(r"\]\((?!http|#)([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
