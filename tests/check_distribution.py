"""What `make build` asks of the files that are about to be released.

python tests/check_distribution.py contents dist   # nothing missing, nothing stray
python tests/check_distribution.py installed       # in an environment with the wheel
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What building adds to a source distribution.
MADE = re.compile(r"PKG-INFO|setup\.cfg|laplace_ella\.egg-info/.*")


def tracked() -> set[str]:
    """Files of the repository."""
    listing = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    return set(listing.splitlines())


def check_contents(folder: Path) -> None:
    """The sdist is the repository, the wheel its package; no other file is in them."""
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sdist) as archive:
        members = {m.name.partition("/")[2] for m in archive if m.isfile()}
    found = {name for name in members if not MADE.fullmatch(name)}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {name for name in tracked() if name.startswith("laplace_ella/")}
    pairs = (("sdist", tracked(), found), ("wheel", package, packed))
    for kind, expected, got in pairs:
        missing, stray = sorted(expected - got), sorted(got - expected)
        if missing or stray:
            sys.exit(f"The {kind} lacks {missing or 'nothing'}; stray: {stray}.")
    print(f"{sdist.name}: {len(found)} files; {wheel.name}: {len(packed)} files")


def check_installed() -> None:
    """Every module imports, and the first example of the README runs as it stands."""
    package = importlib.import_module("laplace_ella")
    if Path(package.__file__).is_relative_to(ROOT / "laplace_ella"):
        sys.exit(f"{package.__file__} is the source tree, not the installed wheel.")
    metadata = importlib.metadata.metadata("laplace-ella")
    if package.__version__ != metadata["Version"]:
        sys.exit(f"__version__ is {package.__version__}, not {metadata['Version']}.")
    for module in pkgutil.walk_packages(package.__path__, "laplace_ella."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    readme = metadata.get_payload()
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(example, "README", "exec"), {})
    print(f"laplace-ella {package.__version__} works from {package.__file__}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["contents", folder]:
            check_contents(Path(folder))
        case ["installed"]:
            check_installed()
        case _:
            sys.exit(__doc__)
