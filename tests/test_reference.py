"""Every public name is in the reference, with a docstring and an example that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest

import laplace_ella

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

#: Modules that users import by name, besides the package itself.
MODULES = ("acquisition", "metrics", "plotting")


def constants() -> dict[str, str]:
    """Docstrings below the public constants, which Python does not keep."""
    path = Path(laplace_ella.__file__).parent / "support" / "presets.py"
    body = ast.parse(path.read_text()).body
    return {
        node.target.id: ast.literal_eval(text.value)
        for node, text in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(text, ast.Expr)
    }


def documented() -> dict[str, str]:
    """Docstrings of all public names."""
    found = {}
    modules = [laplace_ella]
    modules += [importlib.import_module(f"laplace_ella.{name}") for name in MODULES]
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                continue
            text = constants().get(name) or inspect.getdoc(value)
            found[f"{module.__name__}.{name}".removeprefix("laplace_ella.")] = text
    return found


DOCUMENTED = documented()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_has_an_example(name):
    """Examples of functions and classes are run by pytest, those of constants here."""
    text = DOCUMENTED[name]
    assert text
    assert ">>> " in text
    if name in constants():
        test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
        assert doctest.DocTestRunner().run(test).failed == 0


def test_is_in_the_reference():
    """Each name by itself, those of a public module with the module."""
    pages = [page.read_text() for page in REFERENCE.glob("*.md")]
    listed = [name for text in pages for name in re.findall(r"::: (\S+)", text)]
    assert len(listed) == len(set(listed))
    names = {name for name in laplace_ella.__all__ if name not in MODULES}
    assert set(listed) == {f"laplace_ella.{name}" for name in {*names, *MODULES}}
