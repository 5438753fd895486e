"""The guide's code runs as printed, page by page, and its commands are understood."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path

import pytest

from laplace_ella.cli.parser import build_parser

PAGES = sorted((Path(__file__).parents[1] / "docs" / "guide").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, block in enumerate(blocks(page, "python")):
            exec(compile(block, f"{page.name} block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_understood(page, capsys):
    for line in "".join(blocks(page, "bash")).splitlines():
        program, *arguments = shlex.split(line)
        if program == "laplace-ella" and "--list" not in arguments:
            build_parser().parse_args(arguments)
