"""What README, site and notebooks say holds: their code runs and prints what is shown,
their links lead to files, and the tables of the package name what there is."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import warnings
from pathlib import Path

import matplotlib
import pytest
import torch

from laplace_ella.cli import build_parser

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "laplace_ella"
SITE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
RESULTS = sorted((ROOT / "examples").rglob("*.md"))
FENCE = re.compile(r"^```(python|output)\n(.*?)^```", re.DOTALL | re.MULTILINE)

MAKEFILE = (ROOT / "Makefile").read_text()
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def cells(notebook: Path) -> list[dict]:
    return json.loads(notebook.read_text())["cells"]


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the Python code of a page or notebook, and the outputs shown, in order."""
    if page.suffix == ".ipynb":
        codes = (cell for cell in cells(page) if cell["cell_type"] == "code")
        return [("python", "".join(cell["source"])) for cell in codes]
    return [(match[1], match[2]) for match in FENCE.finditer(page.read_text())]


def missing(code: str) -> bool:
    """Return whether a piece of code imports a package that is not installed."""
    packages = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
    return any(importlib.util.find_spec(package) is None for package in packages)


def check_output(shown: str, printed: str) -> None:
    """Compare words exactly, and numbers up to what other machines change in them."""
    words = [NUMBER.split(" ".join(text.split())) for text in (shown, printed)]
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in (shown, printed)]
    assert words[1] == words[0]
    assert numbers[1] == pytest.approx(numbers[0], rel=0.1, abs=0.02)


@pytest.mark.parametrize("page", [p for p in SITE + NOTEBOOKS if blocks(p)], ids=name)
def test_code_runs(page, tmp_path, monkeypatch, capsys):
    """The blocks of a page run one after the other, up to the first that needs a
    package which is not installed (`make test-clients` installs all)."""
    monkeypatch.chdir(tmp_path)  # pages may write files
    namespace, printed = {"__name__": "page"}, ""
    threads = torch.get_num_threads()
    if page in NOTEBOOKS:  # which are executed when the site is built
        assert not any(cell.get("outputs") for cell in cells(page))
    try:
        with warnings.catch_warnings(), matplotlib.rc_context({"backend": "agg"}):
            warnings.simplefilter("ignore")
            for number, (kind, code) in enumerate(blocks(page), start=1):
                if kind == "output":
                    check_output(code, printed)
                    continue
                if missing(code):
                    break
                exec(compile(code, f"{name(page)}, block {number}", "exec"), namespace)
                printed = capsys.readouterr().out
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("page", SITE, ids=name)
def test_commands_are_understood(page):
    shells = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    for line in "".join(shells).splitlines():
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program == "laplace-ella" and "--list" not in arguments:
            build_parser().parse_args(arguments)


@pytest.mark.parametrize("page", [*SITE, ROOT / "CHANGELOG.md", *RESULTS], ids=name)
def test_links_exist(page):
    links = re.findall(r"\]\((?!http|#)([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def rows(heading: str) -> list[list[str]]:
    """Return the rows of the table in a section of the page for contributors."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    section = re.search(rf"^## {heading}$(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    lines = (line for line in section[1].splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def sections() -> list[list[str]]:
    """Return the modules of each section of the table, by their paths."""
    found, folder = [[]], ""
    for file, _ in rows("The package on one page"):
        if file.startswith("**"):
            folder = "".join(quoted(file))
            found.append([])
        else:
            found[-1] += [folder + entry for entry in quoted(file)]
    return found


def imported(path: Path) -> set[str]:
    """Return the modules of the package that a module imports, by their paths."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            paths = [name.partition(".")[2].replace(".", "/") + ".py" for name in names]
            found |= {path for path in paths if (PACKAGE / path).is_file()}
    return found


def test_every_file_of_the_package_is_on_the_page():
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    files = {file for file in files if not file.endswith("__init__.py")}
    assert sorted(file for section in sections() for file in section) == sorted(files)


def test_modules_import_from_above():
    """From their own section and those above it, and no two from each other."""
    place = {file: i for i, section in enumerate(sections()) for file in section}
    graph = {file: imported(PACKAGE / file) for file in place}
    upwards = [(f, g) for f in graph for g in graph[f] if place[g] > place[f]]
    assert upwards == []
    assert [(f, g) for f in graph for g in graph[f] if f in graph[g]] == []


def test_files_are_short():
    lengths = {p.name: len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > 500} == {}


def test_every_step_on_the_page_exists():
    steps = rows("From a loader to a prediction") + rows("Where a call goes")
    for step, function, file in steps:
        texts = [(PACKAGE / path).read_text() for path in quoted(file)]
        for call in quoted(function):
            called = call.partition("(")[0].split(".")[-1]
            definition = re.compile(rf"^ *(def|class) {called}\b", re.MULTILINE)
            assert any(map(definition.search, texts)), f"{step} {called} in {file}"


def test_the_makefile_names_tests_that_exist():
    lists = re.findall(r"addprefix tests/test_,(.*?)\)", MAKEFILE, re.DOTALL)
    named = [name for line in lists for name in line.replace("\\", " ").split()]
    assert named
    assert [n for n in named if not (ROOT / "tests" / f"test_{n}").exists()] == []
