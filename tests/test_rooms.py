"""The package is built of rooms, and imports point one way: from later to earlier."""

import ast
from pathlib import Path

import pytest

import laplace_ella

ROOT = Path(laplace_ella.__file__).parent

#: A module may import from its own room and from those above it in this list.
ROOMS = (
    ("errors", "metrics"),
    ("support",),
    ("derivatives",),
    ("posterior",),
    ("tuning",),
    ("fitting",),
    ("interface",),
    ("ella", "last_layer"),
    ("acquisition", "diagnostics", "structures"),
    ("comparison", "plotting"),
    ("cli", "__main__", "__init__"),
)
FLOOR = {name: floor for floor, names in enumerate(ROOMS) for name in names}

#: What the comparison sees of the package besides its public names.
SEEN_BY_COMPARISON = {
    "comparison",
    "errors",
    "metrics",
    "plotting",
    "posterior",
    "support",
    "tuning",
}

MODULES = sorted(ROOT.rglob("*.py"))


def room_of(path):
    """The folder, or the module itself at the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def imported(path):
    """Dotted names of the package's modules that a module imports, not for types."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [alias.name for alias in node.names]
            if node.module == "laplace_ella":
                yield from (f"laplace_ella.{name}" for name in names)
            elif node.module.startswith("laplace_ella."):
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("laplace_ella"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    """No module looks into a room that is built on top of its own."""
    own = room_of(path)
    for name in imported(path):
        other = name.split(".")[1] if "." in name else "__init__"
        if other not in FLOOR:  # a public name of the package, as a user imports it
            assert FLOOR[own] >= FLOOR["comparison"], f"{own} imports {name}"
            continue
        assert FLOOR[other] <= FLOOR[own], f"{own} imports {name}"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if room_of(p) == "comparison"], ids=lambda p: p.stem
)
def test_comparison_uses_the_public_api(path):
    """The table is made with what every user has."""
    names = [*laplace_ella.__all__, "__version__"]
    public = {f"laplace_ella.{name}" for name in names}
    for name in imported(path):
        if name == "laplace_ella" or name in public:
            continue
        assert name.split(".")[1] in SEEN_BY_COMPARISON, name


def test_every_room_is_known():
    """A new folder or module at the root has its place in the order."""
    assert {room_of(path) for path in MODULES} == set(FLOOR)
