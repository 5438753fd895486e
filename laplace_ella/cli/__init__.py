"""The command line: `laplace-ella demo | compare | doctor`.

Exit codes: 0 done; 1 it ran, but nothing succeeded (compare) or something is missing
or broken (doctor); 2 a mistake in the call; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from laplace_ella.cli.parser import build_parser
from laplace_ella.cli.targets import (
    ARGUMENTS,
    COMPARE_OPTIONS,
    UsageError,
    load_target,
)

__all__ = ["main"]

DONE, NOTHING_SUCCEEDED, USAGE, INTERRUPTED = 0, 1, 2, 130


# --- commands ------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    from laplace_ella.comparison import demo

    if args.part in ("regression", "all"):
        demo.run_regression_demo(args.out)
    if args.part in ("classification", "all"):
        report = demo.run_classification_demo(args.out)
        if report.interrupted:
            return INTERRUPTED
    print(f"Figures are in {args.out.resolve()}")
    page = args.out.resolve() / demo.PAGE
    if args.part != "regression":
        print(f"The report as a page, for a browser: {page.as_uri()}")
    return DONE


def _compare(args: argparse.Namespace) -> int:
    from laplace_ella.comparison.compare import compare

    _check_file("--html", args.html)
    _check_folder("--out", args.out)
    arguments = load_target(args.target) | _given(args, COMPARE_OPTIONS)
    if str(arguments.get("reference")).lower() == "none":
        arguments["reference"] = None
    arguments["progress_bar"] = not args.quiet
    report = _checked(lambda: compare(**arguments))
    print(_formatted(report, args.format))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.md").write_text(report.to_markdown() + "\n", "utf-8")
        (args.out / "report.csv").write_text(report.to_csv(), "utf-8")
        report.save(args.out / "report.json")
        print(f"Reports are in {args.out.resolve()}", file=sys.stderr)
    if args.html is not None:
        report.to_html(args.html, f"Comparison of methods: {args.target}")
        print(f"The page is {args.html.resolve()}", file=sys.stderr)
    if report.interrupted:
        return INTERRUPTED
    return DONE if any(result.ok for result in report) else NOTHING_SUCCEEDED


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Options that were given on the command line."""
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _check_file(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before any work."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} must be a file, {path} is a folder.")
    _check_folder(option, path.parent)


def _check_folder(option: str, path: Path | None) -> None:
    """Refuse a folder that cannot be made or written to."""
    if path is None:
        return
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise UsageError(f"{option} cannot be written: {there} is not a folder.")
    if not os.access(there, os.W_OK):
        raise UsageError(f"{option} cannot be written: no permission for {there}.")


def _checked(call: Callable[[], Any]) -> Any:
    """Wrong arguments are the user's mistake, not a crash."""
    try:
        return call()
    except (TypeError, ValueError, KeyError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UsageError(" ".join(str(text).split())) from error


def _formatted(report: Any, style: str) -> str:
    if style == "markdown":
        return report.to_markdown()
    if style == "csv":
        return report.to_csv().rstrip("\n")
    if style == "json":
        import json

        return json.dumps(report.to_dict(), indent=1)
    return str(report)


def _doctor(args: argparse.Namespace) -> int:
    from laplace_ella.comparison import doctor

    problems = doctor.check_installation()
    if args.target is not None:
        arguments = load_target(args.target, ARGUMENTS[:3])
        arguments |= _given(args, ("dict_key_x", "dict_key_y", "output_layout"))
        options = _given(args, ("memory_budget", "time_budget"))
        options["progress_bar"] = not args.quiet
        problems += _checked(lambda: doctor.check_model(arguments, **options))
    if problems:
        print("\nProblems:")
        for problem in problems:
            print(f"  {problem}")
        return NOTHING_SUCCEEDED
    print("\nNo problems found.")
    return DONE


# --- entry ---------------------------------------------------------------------------

_COMMANDS = {"demo": _demo, "compare": _compare, "doctor": _doctor}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return _COMMANDS[args.command](args)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except (UsageError, ImportError) as error:
        if args.debug:
            raise
        print(f"laplace-ella: error: {error}", file=sys.stderr)
        return USAGE
    except Exception as error:
        if args.debug:
            raise
        text = (str(error).splitlines() or [""])[0]
        print(
            f"laplace-ella: error: {type(error).__name__}: {text}\n"
            "(laplace-ella --debug … shows where)",
            file=sys.stderr,
        )
        return NOTHING_SUCCEEDED
