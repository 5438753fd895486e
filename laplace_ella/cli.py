"""The command line: `laplace-ella demo | compare | doctor`.

Exit codes: 0 done; 1 it ran, but nothing succeeded (compare) or something is missing
or broken (doctor); 2 a mistake in the call; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

DONE, NOTHING_SUCCEEDED, USAGE, INTERRUPTED = 0, 1, 2, 130

_EPILOG = """\
examples:
  laplace-ella demo --out figures
  laplace-ella compare mymodule:setup --methods map,ella-tempered,last-layer-kron
  laplace-ella doctor
  laplace-ella doctor mymodule:setup
"""

_COMPARE_HELP = """\
TARGET is module:function. The function takes no arguments and returns the arguments of
laplace_ella.compare, as a dict (model, likelihood, train_loader, test_loader, and
optionally val_loader, ood_loaders, ...) or as a tuple in that order. Modules of the
current folder are found.

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
        help="names, separated by commas; see --list (default: all that apply)",
    )
    compare.add_argument(
        "--list", action=_ListMethods, help="list the methods and exit"
    )
    compare.add_argument("--links", type=_words, help="mc, probit, bridge, bridge_norm")
    compare.add_argument("--seeds", type=_integers, help="such as 0,1,2")
    compare.add_argument("--tune", choices=("marglik", "gridsearch", "none"))
    compare.add_argument("--prior-precision", type=float)
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
        "work for that model, and the memory that each method would need.",
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

        for name, method in available_methods().items():
            print(f"{name:<18} {method.about}")
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
        "cache": args.cache,
    }
    arguments.update({k: v for k, v in given.items() if v is not None})
    arguments["progress"] = not args.quiet
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


# --- doctor --------------------------------------------------------------------------

#: Distribution → whether the package needs it, or the extra it belongs to.
_PACKAGES = {
    "laplace-ella": "required",
    "torch": "required",
    "laplace-torch": "required",
    "torchmetrics": "required",
    "curvlinops-for-pytorch": "required",
    "backpack-for-pytorch": "required",
    "asdfghjkl": "required",
    "matplotlib": 'plots: pip install "laplace-ella[plots]"',
    "scikit-learn": 'demo: pip install "laplace-ella[demo]"',
    "pandas": "only for Report.to_pandas()",
}


def _doctor(args: argparse.Namespace) -> int:
    problems = _check_packages()
    problems += _check_devices()
    problems += _check_registration()
    if args.target is not None:
        problems += _check_model(load_target(args.target))
    if problems:
        print("\nProblems:")
        for problem in problems:
            print(f"  {problem}")
        return NOTHING_SUCCEEDED
    print("\nNo problems found.")
    return DONE


def _check_packages() -> list[str]:
    print(f"Python {platform.python_version()} on {platform.platform()}")
    problems: list[str] = []
    for name, role in _PACKAGES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
            # A source tree on the path works without a distribution of that name.
            if role == "required" and name != "laplace-ella":
                problems.append(f"{name} is not installed: pip install {name}")
            elif role != "required":
                version += f" ({role})"
        print(f"  {name:<24} {version}")
    return problems


def _check_devices() -> list[str]:
    import torch

    from laplace_ella.support.resources import available_memory, human_bytes

    free = available_memory(torch.device("cpu"))
    print(
        f"CPU: {torch.get_num_threads()} threads, "
        f"{human_bytes(free) if free is not None else 'unknown'} free"
    )
    for i in range(torch.cuda.device_count()):
        device = torch.device("cuda", i)
        print(
            f"CUDA {i}: {torch.cuda.get_device_name(device)}, "
            f"{human_bytes(available_memory(device))} free"
        )
    if not torch.cuda.device_count():
        print("CUDA: none")
    return []


def _check_registration() -> list[str]:
    import torch
    from laplace import Laplace

    import laplace_ella

    try:
        la = Laplace(torch.nn.Linear(1, 1), "regression", "all", "nystrom")
    except Exception as error:  # the point of a check-up is to report anything
        return [f'Laplace(..., hessian_structure="nystrom") fails: {error}']
    if not isinstance(la, laplace_ella.ELLALaplace):
        return [f'hessian_structure="nystrom" gives {type(la).__name__}']
    print('Laplace(..., hessian_structure="nystrom") is registered')
    return []


def _check_model(arguments: dict[str, Any]) -> list[str]:
    """Derivatives that work for the model, and memory of every method."""
    import copy

    from laplace_ella.comparison.loaders import split
    from laplace_ella.comparison.methods import (
        describe_problem,
        estimate,
        resolve_methods,
    )
    from laplace_ella.support import batches
    from laplace_ella.support.resources import available_memory, human_bytes

    model = copy.deepcopy(arguments["model"]).eval()
    train = arguments["train_loader"]
    device = next(model.parameters()).device
    x, _ = split(next(iter(train)), arguments.get("dict_key_y", "labels"))
    x = batches.to_device(x, device)
    key_x = arguments.get("dict_key_x", "input_ids")
    problem = describe_problem(model, x, len(train.dataset), key_x)
    print(
        f"\nModel: {type(model).__name__}, P = {problem.n_params:,} trainable "
        f"parameters, C = {problem.n_outputs} outputs, N = {problem.n_data:,} data, "
        f"batches of {problem.batch}"
    )
    working = _print_derivatives(model, x, key_x)

    free = available_memory(device)
    print("\nEstimated memory, in the batches that would be used:")
    for method in resolve_methods(None, arguments["likelihood"]):
        needs = estimate(method, problem, free)
        if needs.unsupported:
            text = needs.unsupported
        elif needs.batch is None:
            text = f"{human_bytes(needs.bytes)}: does not fit"
        else:
            text = f"{human_bytes(needs.bytes)}, batches of {needs.batch}"
        print(f"  {method.name:<18} {text}")
    return [] if working else ["No way to differentiate this model was found."]


def _print_derivatives(model: Any, x: Any, key_x: str) -> bool:
    """Try each way of computing features on one example; whether any works."""
    import time

    import torch

    from laplace_ella.derivatives.features import FeatureMode
    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.derivatives.model_function import ModelFunction
    from laplace_ella.support import batches

    names = [name for name, p in model.named_parameters() if p.requires_grad]
    function = ModelFunction(model, names)
    one = batches.take(x, slice(0, 1), batches.batch_size(x, key_x))
    weights = next(model.parameters())
    directions = torch.randn(2, sum(function.numels())).to(weights)
    with torch.no_grad():
        n_outputs = function(function.parameters(), one).shape[-1]
    working = False
    print("Ways of computing features J(x)V:")
    for mode in FeatureMode:
        if mode is FeatureMode.AUTO:
            continue
        linearizer = Linearizer(function, key_x, feature_mode=mode)
        linearizer.n_outputs = n_outputs
        start = time.perf_counter()
        try:
            with torch.no_grad():
                linearizer.choose_feature_mode(one, directions)
                linearizer.features(one, directions)
            text = f"works, {1e3 * (time.perf_counter() - start):.0f} ms"
            working = True
        except Exception as error:  # a model may fail in any way
            first = (str(error).splitlines() or [""])[0]
            text = f"fails: {type(error).__name__}: {first}"
        print(f"  {mode.value:<12} {text}")
    return working


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
