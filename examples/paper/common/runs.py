"""Command lines, output folders and tables of the studies."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import laplace_ella

RESULTS = Path(__file__).resolve().parents[1] / "results"
PACKAGES = ("laplace-torch", "torch", "numpy")


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every study has."""
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
        help="folder for finished rows, which a second run reads",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for tables and figures (default: the published results, with "
        "--smoke a new temporary folder)",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser


def start(parser: argparse.ArgumentParser, argv: list[str] | None) -> Any:
    """Parse, check and apply the common options; make the folders."""
    args = parser.parse_args(argv)
    if args.data_root is None:
        parser.error("pass --data-root, or set LAPLACE_ELLA_DATA")
    args.data_root = Path(args.data_root)
    torch.set_num_threads(args.threads)
    if args.out is None and args.smoke:
        args.out = Path(tempfile.mkdtemp(prefix=f"{parser.prog}_smoke_"))
    elif args.out is None:
        args.out = RESULTS / parser.prog
    if args.smoke and args.out.resolve().is_relative_to(RESULTS):
        raise SystemExit(
            f"--smoke would write over the published results in {args.out}; pass "
            "another --out, or none for a temporary folder."
        )
    args.out.mkdir(parents=True, exist_ok=True)
    args.cache_dir = args.cache_dir / parser.prog / ("smoke" * args.smoke)
    args.cache_dir.mkdir(parents=True, exist_ok=True)
    return args


def environment(threads: int) -> str:
    """Return date, versions and machine in one line."""
    found = [datetime.now(timezone.utc).strftime("%Y-%m-%d")]
    found += [f"Python {platform.python_version()}"]
    found += [f"laplace-ella {laplace_ella.__version__}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    return ", ".join([*found, f"{cpu}, {os.cpu_count()} cores, {threads} thread(s)"])


def markdown(rows: list[dict[str, Any]], digits: str = ".4g") -> str:
    """Return a table with a column for every key; what is missing stays empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    for row in rows:
        values = (row.get(name, "") for name in names)
        cells = (format(v, digits) if isinstance(v, float) else str(v) for v in values)
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"
