"""The command line: `laplace-ella compare` and `laplace-ella doctor`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TASK = """\
TARGET is module:function; modules of the current folder are found. The function takes
no arguments and returns arguments of laplace_ella.compare. For example, mytask.py:

  import torch
  from torch.utils.data import DataLoader, TensorDataset

  def setup():
      torch.manual_seed(0)
      x = torch.randn(200, 2)
      y = (x[:, 0] * x[:, 1] > 0).long()
      model = torch.nn.Sequential(                   # your trained network
          torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

      def loader(part):
          return DataLoader(TensorDataset(x[part], y[part]), batch_size=50)

      return dict(model=model, likelihood="classification",  # or "regression"
                  train_loader=loader(slice(0, 100)),
                  val_loader=loader(slice(100, 150)),
                  test_loader=loader(slice(150, 200)))

  laplace-ella doctor mytask:setup
  laplace-ella compare mytask:setup --html report.html
"""


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


#: Options of `compare` by name: how they are read, and what they are.
OPTIONS: dict[str, tuple[Any, str]] = {
    "methods": (_words, "names separated by commas, see --list"),
    "links": (_words, "for class probabilities, such as mc,probit"),
    "seeds": (
        lambda text: [int(word) for word in _words(text)],
        "such as 0,1,2; several give standard errors",
    ),
    "n_samples": (int, "samples of the link mc"),
    "prior_precision": (float, "of all methods, before tuning"),
    "sigma_noise": (float, "regression: noise of all methods"),
    "grid_size": (int, "values of each grid search"),
    "n_steps": (int, "steps of each search by the evidence"),
    "reference": (str, "regression: method to measure divergences to, or none"),
    "memory_budget": (str, 'bytes, or a text like "8 GB"'),
    "cache": (Path, "folder of finished rows, which are read the next time"),
    "dict_key_x": (str, "key of the inputs, where batches are mappings"),
    "dict_key_y": (str, "key of the targets, where batches are mappings"),
    "output_layout": (str, "flat, channels_last or channels_first"),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": TASK}
    parser = argparse.ArgumentParser(
        "laplace-ella",
        description="Linearised Laplace for trained networks: compare methods on your "
        "model, and check what works for it.",
        **raw,
    )
    parser.add_argument("--debug", action="store_true", help="show stack traces")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    compare = commands.add_parser("compare", help="compare methods on a model", **raw)
    compare.add_argument("target", metavar="TARGET", nargs="?")
    compare.add_argument("--list", action="store_true", help="list the methods and end")
    for name, (kind, text) in OPTIONS.items():
        option = {"type": kind, "metavar": name.upper(), "default": argparse.SUPPRESS}
        compare.add_argument(f"--{name.replace('_', '-')}", help=text, **option)
    compare.add_argument("--html", type=Path, help="write the report as a page")
    compare.add_argument("--out", type=Path, help="folder for report.md, .csv, .json")
    compare.add_argument("--quiet", action="store_true", help="no progress on stderr")
    doctor = commands.add_parser("doctor", help="check installation or model", **raw)
    doctor.add_argument("target", metavar="TARGET", nargs="?")
    doctor.add_argument("--memory-budget", help=OPTIONS["memory_budget"][1])
    return parser


def arguments_of(target: str | None, *needed: str) -> dict[str, Any]:
    """Return what the function `module:function` of the user returns."""
    from laplace_ella import compare

    module, colon, name = (target or "").partition(":")
    if not colon:
        raise ValueError(f"TARGET must be module:function, got {target!r}; see --help.")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ValueError(f"There is no module {module!r} in {os.getcwd()}.") from error
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise ValueError(f"{module} has no function {name!r}.")
    found, known = function(), inspect.signature(compare).parameters
    if not isinstance(found, dict) or not found.keys() <= known.keys():
        wrong = found.keys() - known.keys() if isinstance(found, dict) else type(found)
        raise ValueError(f"{target} must return a dict of {list(known)}, got {wrong}.")
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{target} must return {missing} as well.")
    return found


def _compare(args: argparse.Namespace) -> int:
    from laplace_ella import available_methods, compare

    if args.list:
        for name, method in available_methods().items():
            print(f"{name:<28} {method.about}")
        return 0
    needed = "model", "likelihood", "train_loader", "test_loader"
    task = {**arguments_of(args.target, *needed), "progress_bar": not args.quiet}
    task |= {name: value for name, value in vars(args).items() if name in OPTIONS}
    if task.get("reference") == "none":
        task["reference"] = None
    report = compare(**task)
    print(report)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.md").write_text(report.to_markdown() + "\n")
        (args.out / "report.csv").write_text(report.to_csv())
        report.save(args.out / "report.json")
    if args.html is not None:
        where = report.to_html(args.html, title=f"Comparison of {args.target}")
        print(f"wrote {where.resolve()}", file=sys.stderr)
    if report.interrupted:
        return 130
    return 0 if any(result.ok for result in report) else 1


def _doctor(args: argparse.Namespace) -> int:
    from laplace_ella.comparison.doctor import check_installation, check_model

    wrong = check_installation()
    if args.target is not None:
        needed = "model", "likelihood", "train_loader"
        wrong += check_model(arguments_of(args.target, *needed), args.memory_budget)
    for line in wrong:
        print(f"Problem: {line}")
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0 (done), 1 (nothing succeeded), 2 (invalid arguments) or
    130 (interrupted)."""
    args = build_parser().parse_args(argv)
    try:
        return {"compare": _compare, "doctor": _doctor}[args.command](args)
    except KeyboardInterrupt:
        return 130
    except (TypeError, ValueError) as error:
        if args.debug:
            raise
        print(f"laplace-ella: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
