"""The command line: `laplace-ella demo | compare | doctor`.

Exit codes: 0 done; 1 it ran, but nothing succeeded (compare) or something is missing
or broken (doctor); 2 a mistake in the call; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from laplace_ella.support.links import Link

__all__ = ["main"]

DONE, NOTHING_SUCCEEDED, USAGE, INTERRUPTED = 0, 1, 2, 130

_EPILOG = """\
examples:
  laplace-ella demo --out figures
  laplace-ella compare mymodule:setup --methods map,ella-calibrated,last-layer-kron
  laplace-ella doctor
  laplace-ella doctor mymodule:setup
"""

_COMPARE_HELP = """\
TARGET is module:function. The function takes no arguments and returns the arguments of
laplace_ella.compare, as a dict (model, likelihood, train_loader, test_loader, and
optionally val_loader, ood_loaders, output_layout, ...) or as a tuple in that order.
Modules of the current folder are found.

example (mymodule.py):
  def setup():
      model, train, val, test, svhn = ...
      return dict(model=model, likelihood="classification", train_loader=train,
                  val_loader=val, test_loader=test, ood_loaders={"SVHN": svhn})

  laplace-ella compare mymodule:setup --out results --seeds 0,1,2
  laplace-ella compare mymodule:setup --cache results/cache.json --format markdown
"""

_ARGUMENTS = (
    "model",
    "likelihood",
    "train_loader",
    "test_loader",
    "val_loader",
    "ood_loaders",
    "methods",
)


class UsageError(Exception):
    """A mistake in the call; shown without a stack trace."""


# --- parser --------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laplace-ella",
        description="ELLA, Nyström-NTK linearised Laplace: demo, comparison, check-up.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--debug", action="store_true", help="show stack traces of errors"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="two small experiments on embedded data, with figures",
        description="1-D regression against exact linearised Laplace, and a "
        "classification comparison on scikit-learn's digits.",
        epilog="example:\n  laplace-ella demo --part regression --out figures",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--part", choices=("regression", "classification", "all"), default="all"
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("laplace_ella_demo"),
        help="folder for the figures (default: %(default)s)",
    )
    demo.set_defaults(run=_demo)

    compare = commands.add_parser(
        "compare",
        help="compare methods on your own model and data",
        description="Fit, tune and evaluate many methods and print the table.",
        epilog=_COMPARE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("target", metavar="TARGET", help="module:function, see below")
    compare.add_argument(
        "--methods",
        type=_words,
        help="names, separated by commas; see --list (default: those that matter)",
    )
    compare.add_argument(
        "--list", action=_ListMethods, help="list the methods and exit"
    )
    compare.add_argument("--links", type=_words, help=", ".join(Link))
    compare.add_argument("--seeds", type=_integers, help="such as 0,1,2")
    compare.add_argument(
        "--tune",
        choices=("marglik", "gridsearch", "none"),
        help="how laplace-torch's methods are tuned (default: marglik)",
    )
    compare.add_argument("--prior-precision", type=float)
    compare.add_argument(
        "--memory-budget",
        metavar="BYTES",
        help='bytes, or a text like "8 GB"; methods that need more are skipped '
        "(default: 80 %% of what is free)",
    )
    compare.add_argument("--cache", type=Path, help="JSON file to reuse and add to")
    compare.add_argument(
        "--format",
        choices=("table", "markdown", "csv", "json"),
        default="table",
        help="of what is printed (default: %(default)s)",
    )
    compare.add_argument(
        "--out", type=Path, help="folder for report.md, report.csv and report.json"
    )
    compare.add_argument("--quiet", action="store_true", help="no progress on stderr")
    compare.set_defaults(run=_compare)

    doctor = commands.add_parser(
        "doctor",
        help="versions, devices, and what works for a given model",
        description="Without TARGET: versions and devices. With it: which derivatives "
        "work for that model, and the memory that each method would need. What would "
        "not fit into the free memory is reported and not tried.",
        epilog="example:\n  laplace-ella doctor mymodule:setup",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument(
        "target", metavar="TARGET", nargs="?", help="module:function, as for compare"
    )
    doctor.set_defaults(run=_doctor)
    return parser


class _ListMethods(argparse.Action):
    """Print the methods without asking for a target."""

    def __init__(self, option_strings: Any, dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from laplace_ella.comparison.methods import available_methods

        methods = available_methods()
        width = max(map(len, methods))
        for name, method in methods.items():
            print(f"{name:<{width}} {method.about}")
        parser.exit(DONE)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _integers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in _words(text)]
    except ValueError:
        numbers = []
    if not numbers:
        raise argparse.ArgumentTypeError(
            f"expected integers separated by commas, got {text!r}"
        )
    return numbers


# --- user functions ------------------------------------------------------------------


def load_target(target: str) -> dict[str, Any]:
    """Call module:function and return its result as arguments of `compare`."""
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(
            f"TARGET must be module:function, got {target!r}. "
            "Example: laplace-ella compare mymodule:setup"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:  # of a parent package
        found = None
    if found is None:
        raise UsageError(
            f"No module {module_name!r} in {os.getcwd()} or on the Python path."
        )
    module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [
            n for n in vars(module) if callable(getattr(module, n)) and n[0] != "_"
        ]
        raise UsageError(
            f"Module {module_name!r} has no function {function_name!r}. "
            f"It has: {', '.join(names) or 'none'}."
        )
    return as_arguments(function(), target)


def as_arguments(value: Any, target: str) -> dict[str, Any]:
    """A dict of arguments from what the user's function returned."""
    if isinstance(value, (tuple, list)) and len(value) <= len(_ARGUMENTS):
        value = dict(zip(_ARGUMENTS, value, strict=False))
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{target} must return a dict or a tuple ({', '.join(_ARGUMENTS[:5])}, …), "
            f"got {type(value).__name__}."
        )
    missing = [name for name in _ARGUMENTS[:4] if value.get(name) is None]
    if missing:
        raise UsageError(
            f"{target} must return {', '.join(_ARGUMENTS[:4])}; missing: "
            f"{', '.join(missing)}."
        )
    return dict(value)


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
    return DONE


def _compare(args: argparse.Namespace) -> int:
    from laplace_ella.comparison.compare import compare

    arguments = load_target(args.target)
    given = {
        "methods": args.methods,
        "links": args.links,
        "seeds": args.seeds,
        "tune": args.tune,
        "prior_precision": args.prior_precision,
        "memory_budget": args.memory_budget,
        "cache": args.cache,
    }
    arguments.update({k: v for k, v in given.items() if v is not None})
    arguments["progress_bar"] = not args.quiet
    report = _checked(lambda: compare(**arguments))
    print(_formatted(report, args.format))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.md").write_text(report.to_markdown() + "\n", "utf-8")
        (args.out / "report.csv").write_text(report.to_csv(), "utf-8")
        report.save(args.out / "report.json")
        print(f"Reports are in {args.out.resolve()}", file=sys.stderr)
    if report.interrupted:
        return INTERRUPTED
    return DONE if any(result.ok for result in report) else NOTHING_SUCCEEDED


def _checked(call: Callable[[], Any]) -> Any:
    """Wrong arguments are the user's mistake, not a crash."""
    try:
        return call()
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(str(error)) from error


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
        arguments = load_target(args.target)
        problems += _checked(lambda: doctor.check_model(arguments))
    if problems:
        print("\nProblems:")
        for problem in problems:
            print(f"  {problem}")
        return NOTHING_SUCCEEDED
    print("\nNo problems found.")
    return DONE


# --- entry ---------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
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
