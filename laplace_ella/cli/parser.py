"""The options of the command line, and help that is enough to use it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.links import Link

__all__ = ["EXAMPLE", "build_parser"]

_EPILOG = """\
compare and doctor take your model and data from a function of yours, TARGET, written
module:function. It takes no arguments. For example, in the file mytask.py:

{example}
Then, in the folder of that file:
  laplace-ella doctor mytask:setup
  laplace-ella compare mytask:setup --html report.html
  laplace-ella compare mytask:setup --methods map,exact,last-layer-kron --seeds 0,1,2

More: laplace-ella demo --help, laplace-ella compare --help, laplace-ella doctor --help.
"""

#: A task that runs as it stands.
EXAMPLE = """\
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
"""

_COMPARE_HELP = """\
TARGET is module:function; modules of the current folder are found. The function takes
no arguments and returns a dict of arguments of laplace_ella.compare: model, likelihood,
train_loader and test_loader, optionally val_loader and ood_loaders (a dict by name),
and any of the options here, which the command line overrides. A tuple in the order
model, likelihood, train_loader, test_loader, val_loader, ood_loaders, methods will do.

example, mytask.py:
{example}
  laplace-ella compare mytask:setup --html report.html
  laplace-ella compare mytask:setup --out results --seeds 0,1,2
  laplace-ella compare mytask:setup --cache results/cache.json --format markdown
"""

_DOCTOR_HELP = """\
TARGET is module:function, as for compare; here model, likelihood and train_loader are
enough. Nothing is trained, and nothing tried that would not fit into memory. Times are
forecast from measurements on a few inputs; what else the machine does changes them.

example, mytask.py:
{example}
  laplace-ella doctor mytask:setup
  laplace-ella doctor mytask:setup --memory-budget "8 GB" --time-budget 60
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laplace-ella",
        description="ELLA, Nyström-NTK linearised Laplace: uncertainty of trained "
        "networks. See it work (demo), compare methods on your own model (compare), "
        "and find out what suits it (doctor).",
        epilog=_EPILOG.format(example=EXAMPLE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--debug", action="store_true", help="show stack traces of errors"
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_compare(commands)
    _add_doctor(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="two small experiments on embedded data, with figures and a page",
        description="1-D regression against exact linearised Laplace, and a "
        "classification comparison on scikit-learn's digits, whose report is also "
        "written as a page for a browser.",
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


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="compare methods on your own model and data",
        description="Fit, tune and evaluate many methods and print the table.",
        epilog=_COMPARE_HELP.format(example=EXAMPLE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("target", metavar="TARGET", help="module:function, see below")

    what = compare.add_argument_group("what is compared")
    what.add_argument(
        "--methods",
        type=_words,
        metavar="NAMES",
        help="separated by commas, see --list (default: those that matter)",
    )
    what.add_argument("--list", action=_ListMethods, help="list the methods and exit")
    what.add_argument(
        "--links",
        type=_words,
        metavar="NAMES",
        help=f"for class probabilities, of {', '.join(Link)} (default: mc,probit)",
    )
    what.add_argument(
        "--seeds",
        type=_integers,
        metavar="INTEGERS",
        help="such as 0,1,2; with several the table has standard errors (default: 0)",
    )
    what.add_argument(
        "--reference",
        metavar="NAME",
        help="regression: the method to which KL divergences are measured, or none "
        "(default: full)",
    )

    how = compare.add_argument_group("how it is tuned and judged")
    how.add_argument(
        "--tune",
        choices=("marglik", "gridsearch", "none"),
        help="how laplace-torch's methods are tuned (default: marglik)",
    )
    how.add_argument(
        "--prior-precision",
        type=float,
        metavar="δ",
        help="of all methods, before tuning (default: 1)",
    )
    how.add_argument(
        "--sigma-noise",
        type=float,
        metavar="σ",
        help="regression: standard deviation of the noise (default: the RMSE of the "
        "network on held-out data)",
    )
    how.add_argument(
        "--grid-size", type=int, metavar="N", help="of grid searches (default: 21)"
    )
    how.add_argument(
        "--n-steps",
        type=int,
        metavar="N",
        help="of marginal-likelihood optimisation (default: 100)",
    )
    how.add_argument(
        "--n-samples",
        type=int,
        metavar="N",
        help="of the Monte-Carlo link (default: 512)",
    )
    how.add_argument(
        "--n-bins",
        type=int,
        metavar="N",
        help="of the expected calibration error (default: 15)",
    )

    _add_data(compare)

    resources = compare.add_argument_group("memory and files")
    _add_memory(resources, "methods that need more are skipped")
    resources.add_argument(
        "--cache", type=Path, metavar="FILE", help="JSON file to reuse and add to"
    )
    resources.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the report as one page for a browser",
    )
    resources.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for report.md, report.csv and report.json",
    )
    resources.add_argument(
        "--format",
        choices=("table", "markdown", "csv", "json"),
        default="table",
        help="of what is printed (default: %(default)s)",
    )
    _add_quiet(resources)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="versions, devices, and what is best for a given model",
        description="Without TARGET: versions and devices. With it: which derivatives "
        "work for that model, what each method would need of memory, how long fits "
        "and predictions will take, and which n_eigenvalues to choose.",
        epilog=_DOCTOR_HELP.format(example=EXAMPLE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument(
        "target", metavar="TARGET", nargs="?", help="module:function, see below"
    )
    _add_memory(doctor, "what needs more is not recommended")
    doctor.add_argument(
        "--time-budget",
        type=float,
        metavar="SECONDS",
        help="that a fit, or a thousand predictions, may take to be recommended "
        "(default: 600)",
    )
    _add_quiet(doctor)
    _add_data(doctor)


def _add_data(parser: Any) -> None:
    data = parser.add_argument_group("what batches and outputs look like")
    data.add_argument(
        "--dict-key-x",
        metavar="KEY",
        help="of inputs, where batches are mappings (default: input_ids)",
    )
    data.add_argument(
        "--dict-key-y",
        metavar="KEY",
        help="of targets, where batches are mappings (default: labels)",
    )
    data.add_argument(
        "--output-layout",
        choices=[layout.value for layout in OutputLayout],
        help="of models that predict at many positions, tokens or pixels "
        "(default: flat)",
    )


def _add_memory(parser: Any, consequence: str) -> None:
    parser.add_argument(
        "--memory-budget",
        metavar="BYTES",
        help=f'bytes, or a text like "8 GB"; {consequence} '
        "(default: 80 %% of what is free)",
    )


def _add_quiet(parser: Any) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


class _Version(argparse.Action):
    """Print the version, which takes an import that the help does not need."""

    def __init__(self, option_strings: Any, dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from laplace_ella import __version__

        print(f"laplace-ella {__version__}")
        parser.exit(0)


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
        parser.exit(0)


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
