"""UCI regression with random and gap splits: which posterior predicts best.

    python examples/paper/uci.py --splits 10 --gaps 11

MLP 2×50 (tanh), prior precision and noise of every method from the training data.
Random splits of 90 % and 10 %; gap splits have the middle third by one input as test
data (Foong et al. 2019). Splits are taken in turn from all data sets, and their reports
are kept in the cache folder: a run that is stopped has measured all data sets alike,
and goes on when it is started again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from common import runs
from common.data import UCI, Split, gap_split, random_split, uci_table
from common.models import mlp, train_mlp
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
from laplace_ella import Report, available_methods, compare

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KNOWN = available_methods()
OURS = {"subset_of_weights": "all", "hessian_structure": "nystrom"}

#: Rows by name. Ranks are of a basis of all gradients, at most 2,000.
METHODS: dict[str, Any] = {
    "MAP": KNOWN["map"],
    "exact": KNOWN["exact"],
    "ELLA as in the paper": {**OURS, **laplace_ella.PAPER},
    **{
        f"K = {rank}, {complement}": {
            **OURS,
            "subsample_size": 2000,
            "n_eigenvalues": rank,
            "complement": complement,
        }
        for rank in (20, 128, 512)
        for complement in ("drop", "prior", "matched")
    },
    "KFAC": KNOWN["kron"],
    "diag": KNOWN["diag"],
    "last layer": KNOWN["last-layer-full"],
}

#: A difference of NLL that is never worth a row.
NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class Task:
    """One split of a data set."""

    data: str
    kind: str
    index: int
    split: Callable[[], Split]


def tasks(args: Any) -> Iterator[Task]:
    """Yield one split of every data set after the other, then the next ones."""
    for index in range(max(args.splits, args.gaps)):
        for name in args.data:
            table = uci_table(args.data_root, name)
            if index < args.splits:
                split = partial(random_split, table, index, args.most)
                yield Task(name, "random", index, split)
            if index < min(args.gaps, table.shape[1] - 1):
                split = partial(gap_split, table, index, args.most)
                yield Task(name, "gap", index, split)


def measure(args: Any, task: Task) -> Report:
    """Train a network and compare the methods on it, or read what was found before."""
    path = args.cache_dir / f"{task.data}_{task.kind}_{task.index}.json"
    if path.exists():
        return Report.load(path)
    x, y, x_test, y_test = task.split()
    torch.manual_seed(0)
    model = mlp(x.shape[1], 1)
    train_mlp(model, x, y, args.steps)
    report = compare(
        model,
        "regression",
        DataLoader(TensorDataset(x, y), batch_size=256),
        DataLoader(TensorDataset(x_test, y_test), batch_size=256),
        methods=METHODS,
        reference=None,
        progress_bar=False,
    )
    report.save(path)
    nll = {row.method: row.mean["nll"] for row in report.rows() if row.ok}
    best = min(nll, key=nll.__getitem__)
    print(
        f"{path.stem}: exact {nll['exact']:.3f}, best {best} {nll[best]:.3f}",
        flush=True,
    )
    return report


# Tables


@dataclass(frozen=True)
class Found:
    """What one method did on one split: its NLL less that of exact, and whether it is
    within a standard error (of the paired bootstrap) of exact and of the best."""

    task: Task
    method: str
    values: dict[str, float]
    excess: float
    near_exact: bool
    near_best: bool


def judged(task: Task, report: Report) -> list[Found]:
    rows = {row.method: row for row in report.rows() if row.ok}
    best = min(rows.values(), key=lambda row: row.mean["nll"])

    def excess(row: Any, other: Any) -> tuple[float, bool]:
        draws = [torch.tensor(r.replicates["nll"]) for r in (row, other)]
        difference = row.mean["nll"] - other.mean["nll"]
        error = float((draws[0] - draws[1]).std())
        return difference, difference <= max(error, NEGLIGIBLE)

    found = []
    for name, row in rows.items():
        beyond, near_exact = excess(row, rows["exact"])
        near_best = excess(row, best)[1]
        found.append(Found(task, name, row.mean, beyond, near_exact, near_best))
    return found


def mean_and_error(values: list[float]) -> str:
    """Return mean ± standard error, and the median where the mean says little."""
    x = torch.tensor(values)
    if len(x) == 1:
        return f"{values[0]:.2f}"
    error = float(x.std()) / math.sqrt(len(x))
    text = f"{float(x.mean()):.2f} ± {error:.2f}"
    return f"{text} ({float(x.median()):.2f})" if error > 0.2 else text


def summary(found: list[Found], methods: list[str]) -> str:
    """Return a row per method: shares of splits, median excess, coverage and width."""
    rows = []
    for name in methods:
        row: dict[str, Any] = {"method": name}
        for kind in ("random", "gap"):
            mine = [f for f in found if f.method == name and f.task.kind == kind]
            if not mine:
                continue
            best = sum(f.near_best for f in mine) / len(mine)
            exact = sum(f.near_exact for f in mine) / len(mine)
            beyond = float(torch.tensor([f.excess for f in mine]).median())
            row[f"{len(mine)} {kind}: near the best"] = f"{best:.0%}"
            row[f"{kind}: near exact"] = f"{exact:.0%}"
            row[f"{kind}: median NLL beyond exact"] = f"{beyond:.2f}"
            for key in ("coverage_95", "width_95"):
                if key in mine[0].values:
                    value = sum(f.values[key] for f in mine) / len(mine)
                    row[f"{kind}: {key}"] = f"{value:.3f}"
        rows.append(row)
    return runs.markdown(rows)


def by_data(found: list[Found], methods: list[str], kind: str, key: str) -> str:
    """Return a row per method and a column per data set."""
    names = list(dict.fromkeys(f.task.data for f in found))
    rows = []
    for method in methods:
        row: dict[str, Any] = {"method": method}
        for name in names:
            values = [
                f.values[key]
                for f in found
                if (f.method, f.task.data, f.task.kind) == (method, name, kind)
            ]
            row[name] = mean_and_error(values) if values else "–"
        rows.append(row)
    return runs.markdown(rows)


def draw_ranks(found: list[Found], path: Path) -> None:
    """Draw the median NLL beyond exact against K, for each complement."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="tight")
    for ax, kind in zip(panels, ("random", "gap"), strict=True):
        for complement in ("drop", "prior", "matched"):
            points = {}
            for rank in (20, 128, 512):
                name = f"K = {rank}, {complement}"
                mine = [
                    f.excess for f in found if (f.method, f.task.kind) == (name, kind)
                ]
                points[rank] = float(torch.tensor(mine or [math.nan]).median())
            ax.plot(points.keys(), points.values(), "o-", label=complement)
        ax.axhline(0, color="0.5", linewidth=1)
        ax.set(xscale="log", xlabel="K", title=f"{kind} splits", ylim=(-0.3, 2))
    panels[0].set_ylabel("median NLL beyond exact")
    panels[0].legend(title="complement", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


ABOUT = """# UCI regression: random and gap splits

`python examples/paper/uci.py --splits {splits} --gaps {gaps}`; MLP with two hidden
layers of 50 tanh units, {steps} steps of Adam; inputs and targets are standardised by
the training data, of which there are at most {most}. All methods have the same network,
so the same mean; prior precision and noise come from the training data. {environment}.

Near the best (near exact): share of splits on which the NLL exceeds that of the best
method (of exact Laplace) by no more than one standard error of the paired difference
over the test data, or 0.01 nats. `drop`, `prior`, `matched`: what is assumed of the
variance outside the K directions.
"""


def write_page(args: Any, found: list[Found]) -> str:
    methods = list(dict.fromkeys(f.method for f in found))
    sizes = {k: getattr(args, k) for k in ("splits", "gaps", "steps", "most")}
    parts = [
        ABOUT.format(**sizes, environment=runs.environment(args.threads)),
        summary(found, methods),
        "![NLL against K](rank.png)\n",
    ]
    for kind in ("random", "gap"):
        for key, title in (("nll", "NLL"), ("coverage_95", "Coverage of 95 %")):
            table = by_data(found, methods, kind, key)
            parts.append(f"## {title}, {kind} splits\n\n{table}")
    notes = args.out / "notes.md"  # written by hand
    text = "\n".join(parts + ([notes.read_text()] if notes.exists() else []))
    (args.out / "README.md").write_text(text)
    return text


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("uci", __doc__)
    parser.add_argument("--splits", type=int, default=10, help="random splits")
    parser.add_argument("--gaps", type=int, default=11, help="gap splits, at most")
    parser.add_argument("--data", nargs="*", choices=UCI, default=UCI)
    parser.add_argument("--most", type=int, default=2000, help="data, at most")
    parser.add_argument("--steps", type=int, default=2000, help="of Adam")
    args = runs.start(parser, argv)
    if args.smoke:
        args.splits, args.gaps, args.data = 1, 1, ("yacht",)
        args.most, args.steps = 60, 50
    found: list[Found] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # K above the rank of few data, and others'
        for task in tasks(args):
            found += judged(task, measure(args, task))
    draw_ranks(found, args.out / "rank.png")
    print(write_page(args, found))


if __name__ == "__main__":
    main()
