"""The README's code runs as printed, block after block."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import laplace_ella

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = README.parent / "examples"
PAGES = [README, EXAMPLES / "README.md", EXAMPLES / "paper" / "RESULTS.md"]


def test_code_blocks_run():
    """Every python block of the README executes, in order, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, block in enumerate(blocks):
            exec(compile(block, f"README block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    """Relative links of README and results lead to files."""
    links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
    assert links
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_public_names_are_documented():
    """Every public name has a docstring of its own."""
    for name in laplace_ella.__all__:
        assert getattr(laplace_ella, name).__doc__, name
