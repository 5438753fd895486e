"""Command lines, result files that survive an interruption, and progress."""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

import laplace_ella
from laplace_ella.support.heap import kept_memory

RESULTS = Path(__file__).resolve().parents[1] / "results"

PACKAGES = ("laplace-torch", "torch", "torchvision", "numpy", "scipy")


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """The options that every script has."""
    parser = argparse.ArgumentParser(
        name, description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        default=os.environ.get("LAPLACE_ELLA_DATA"),
        help="folder with the data and weights (default: $LAPLACE_ELLA_DATA)",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=Path.home() / ".cache" / "laplace_ella_examples",
        help="folder for features, which a second run reads instead of computing them",
    )
    add_output(parser)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser


def add_output(parser: argparse.ArgumentParser) -> None:
    """Options that say where results go, for `output_folder`."""
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for tables and figures (default: among the published results, "
        "or with --smoke a new temporary folder)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny size: does the script run?"
    )


def output_folder(name: str, args: Any) -> Path:
    """The folder for the results of the script `name`, made if it is not there.

    A smoke run never writes over published results.
    """
    folder = args.out
    if folder is None and args.smoke:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}_smoke_"))
        print(f"results of this smoke run go to {folder}", flush=True)
    elif folder is None:
        folder = RESULTS / name
    if args.smoke and folder.resolve().is_relative_to(RESULTS):
        raise SystemExit(
            f"--smoke would write over the published results in {folder}; pass "
            "another --out, or none for a temporary folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def best_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """CPU seconds of the quickest of some runs, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        began = process_time()
        work()
        times.append(process_time() - began)
    return min(times)


def forward_seconds(model: torch.nn.Module, x: torch.Tensor) -> float:
    """CPU seconds of one forward pass per image, without asking the system for memory:
    the unit of all costs."""
    with torch.no_grad(), kept_memory(2**30):
        return best_seconds(lambda: model(x)) / len(x)


def start(parser: argparse.ArgumentParser, argv: list[str] | None) -> Any:
    """Parse, check and apply the common options."""
    args = parser.parse_args(argv)
    if args.data_root is None:
        parser.error("pass --data-root, or set LAPLACE_ELLA_DATA")
    torch.set_num_threads(args.threads)
    args.out = output_folder(parser.prog, args)
    if args.smoke:  # never mixed with the features of a full run
        args.cache_dir = args.cache_dir / "smoke"
    args.cache_dir.mkdir(parents=True, exist_ok=True)
    return args


def environment(args: Any, more_packages: Iterable[str] = ()) -> dict[str, Any]:
    """Versions and machine, for the head of a result file."""

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "laplace-ella": laplace_ella.__version__,
        **{package: installed(package) for package in (*PACKAGES, *more_packages)},
        "machine": f"{cpu}, {os.cpu_count()} cores, {args.threads} used",
    }


def write_environment(path: Path, args: Any, more_packages: Iterable[str] = ()) -> None:
    path.write_text(json.dumps(environment(args, more_packages), indent=1) + "\n")


class Results:
    """Rows by key in a JSON file, written after every row.

    A run that is started again computes only the rows that are not there.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        # Through JSON, so that it compares equal to what is read back.
        self.settings = json.loads(json.dumps(settings, default=str))
        if path.exists():
            stored = json.loads(path.read_text())
            if stored["settings"] == self.settings:
                self.rows = stored["rows"]
        self.expected: int | None = None
        self._began, self._computed = perf_counter(), 0

    def expect(self, keys: Iterable[str]) -> None:
        """Rows that will be computed next, so that the time left can be told."""
        self.expected = len({key for key in keys if key not in self.rows})
        self._began, self._computed = perf_counter(), 0

    def _progress(self) -> str:
        """How many of the expected rows are there, and the time left."""
        self._computed += 1
        if self.expected is None or self._computed > self.expected:
            return ""
        left = self.expected - self._computed
        seconds = (perf_counter() - self._began) / self._computed * left
        return f"[{self._computed}/{self.expected}, {seconds / 60:.0f} min left] "

    def compute(
        self, key: str, row: Callable[[], dict[str, Any]], again: bool = False
    ) -> dict[str, Any]:
        """The stored row, or a new one."""
        if again or key not in self.rows:
            began = perf_counter()
            self.rows[key] = row()
            self.save()
            seconds = f"({perf_counter() - began:.0f} s)"
            brief = _brief(self.rows[key])
            print(f"{self._progress()}{key}: {brief} {seconds}", flush=True)
        return self.rows[key]

    def save(self) -> None:
        text = json.dumps({"settings": self.settings, "rows": self.rows}, indent=1)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(self.path)


def _brief(row: dict[str, Any]) -> str:
    shown = [(k, v) for k, v in row.items() if isinstance(v, (int, float, str))]
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown
    )


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows as CSV, numbers with five digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            writer.writerow([_cell(row.get(name, ""), ".5g") for name in names])


def markdown(
    rows: list[dict[str, Any]], columns: dict[str, str], digits: dict[str, str]
) -> str:
    """A markdown table of `columns` (key: heading), numbers by `digits`."""
    lines = [" | ".join(columns.values()), "|".join("---" for _ in columns)]
    for row in rows:
        lines.append(
            " | ".join(_cell(row.get(k, ""), digits.get(k, ".4f")) for k in columns)
        )
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "–"
    return format(value, form) if isinstance(value, float) else str(value)


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Wall-clock and CPU seconds of a block; the latter ignore other programs."""
    times: dict[str, float] = {}
    wall, cpu = perf_counter(), process_time()
    yield times
    times["wall"], times["cpu"] = perf_counter() - wall, process_time() - cpu
