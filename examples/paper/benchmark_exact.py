"""Cost of exact linearised Laplace: `n_eigenvalues="exact"` against laplace-torch.

    python examples/paper/benchmark_exact.py --data-root DATA

The same networks, data and steps by this package and by laplace-torch's `full` (P×P)
and `gp` (kernel of all data): fit, 100 steps of the evidence, prediction of 1,000
inputs, and peak memory. Every measurement is a process of its own with one thread;
times are its CPU seconds, which other programs change little. Finished measurements are
kept in a JSON file; a run that is started again goes on.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from common.data import cifar10
from common.models import cifar_resnet
from common.runs import Results, arguments, environment, start
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella.support.resources import Stopwatch, human_bytes

#: What one measurement of laplace-torch may take, and the budget of ours.
LIMIT_SECONDS, LIMIT_BYTES = 120, 8e9

#: Steps of the evidence, and inputs that are predicted.
STEPS, INPUTS = 100, 1000

#: Number of data (one output each), and parameters.
GRID = {200: (1e3, 3e3, 1e4, 1e5, 1e6), 1000: (1e3, 3e3, 1e4, 1e5, 1e6)}
GRID[4000] = (1e3, 3e3, 1e4)

#: P×P matrices that `full` has in memory at once: curvature, precision, its factor,
#: the covariance and what computing them takes.
FULL_MATRICES = 5

SIDES = {
    "exact": {"hessian_structure": "nystrom", "n_eigenvalues": "exact"},
    "full": {"hessian_structure": "full"},
    "gp": {"hessian_structure": "gp"},
}

Measurement = dict[str, Any]


def network(n_inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(n_inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 1),
    ).eval()


def width_for(n_params: float, n_inputs: int = 10) -> int:
    """Width of the two hidden layers that gives about so many parameters."""
    b = n_inputs + 3
    return round((-b + (b * b + 4 * (n_params - 1)) ** 0.5) / 2)


def loader(x: torch.Tensor, y: torch.Tensor) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=100)


class Recorder:
    """Times and memory of named steps, printed as they are known.

    What is printed survives a process that is stopped in the middle.
    """

    def __init__(self) -> None:
        self.row: Measurement = {}

    def __call__(self, name: str, work: Callable[[], Any], scale: float = 1.0) -> Any:
        """Do the work; `scale` is how much more of it there would be in full."""
        began = process_time()
        with Stopwatch(torch.device("cpu")) as watch:
            result = work()
        self.row[name] = (process_time() - began) * scale
        peak = (watch.peak_bytes or 0) / 1e9
        self.row["peak_gb"] = max(peak, self.row.get("peak_gb", 0.0))
        self.note(**{f"{name}_scaled": scale != 1.0})
        return result

    def note(self, **values: Any) -> None:
        self.row |= values
        print(json.dumps(self.row), flush=True)


# Tasks, each run in a process of its own


def compare(args: Namespace, p: Measurement, record: Recorder) -> None:
    """Fit, evidence and predictions of one side on synthetic regression."""
    torch.manual_seed(0)
    n_data, side = p["N"], p["side"]
    model = network(10, width_for(p["P"]))
    x, x_test = torch.randn(n_data, 10), torch.randn(p["inputs"], 10)
    with torch.no_grad():
        y = model(x) + 0.3 * torch.randn(n_data, 1)
    options: Measurement = dict(SIDES[side])
    if side == "exact":
        options["memory_budget"] = LIMIT_BYTES
    if side == "gp":
        options["n_subset"] = n_data
    la = Laplace(model, "regression", "all", sigma_noise=0.3, **options)
    record.note(P=sum(q.numel() for q in model.parameters()))
    record("fit", lambda: la.fit(loader(x, y)))
    if side == "exact":
        record.note(rank=la.rank, dtype=str(la.fitted.dtype).removeprefix("torch."))

    def predict() -> None:
        for part in x_test.split(100):
            la(part)

    record("predict", predict, INPUTS / len(x_test))

    kind = "gp" if side == "gp" else "glm"

    def climb(n_steps: int) -> Callable[[], None]:
        return lambda: la.optimize_prior_precision(
            kind, method="marglik", n_steps=n_steps
        )

    if side == "exact":
        record("evidence", climb(STEPS))
        return
    # One step tells how many can be afforded.
    record("evidence", climb(1), STEPS)
    affordable = int(0.2 * LIMIT_SECONDS * STEPS / max(record.row["evidence"], 1e-3))
    if affordable > 1:
        steps = min(STEPS, affordable)
        record("evidence", climb(steps), STEPS / steps)


def protein(args: Namespace, p: Measurement, record: Recorder) -> None:
    """Exact Laplace on N data of UCI protein, a trained MLP 2×50."""
    torch.manual_seed(0)
    table = np.loadtxt(args.data_root / "uci" / "protein.csv.gz", delimiter=",")
    table = torch.as_tensor((table - table.mean(0)) / table.std(0)).float()
    table = table[torch.randperm(len(table))]
    train, test = table[: p["N"]], table[-INPUTS:]
    model = network(9, 50)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(p["epochs"]):
        adam.zero_grad()
        nn.functional.mse_loss(model(train[:, :-1]), train[:, -1:]).backward()
        adam.step()
    la = Laplace(
        model, "regression", "all", "nystrom", n_eigenvalues="exact", sigma_noise=0.7
    )
    record("fit", lambda: la.fit(loader(train[:, :-1], train[:, -1:])))
    record.note(rank=la.rank, P=la.n_params)
    record("evidence", lambda: la.optimize_prior_precision(n_steps=STEPS))
    record("predict", lambda: [la(part) for part in test[:, :-1].split(100)])


def resnet(args: Namespace, p: Measurement, record: Recorder) -> None:
    """ResNet-20 with as many directions as sampled gradients."""
    images = cifar10(args.data_root, "train")
    model = cifar_resnet("resnet20", args.data_root)
    la = Laplace(
        model,
        "classification",
        "all",
        "nystrom",
        subsample_size=p["M"],
        n_eigenvalues=p["M"],
        prior_precision=5.0,
        memory_budget=LIMIT_BYTES,
    )
    record("basis", lambda: la.fit_basis(images[: p["M"]].loader(50)))
    record.note(rank=la.rank, P=la.n_params)
    few = images[: p["images"]]
    record("curvature", lambda: la.fit(few.loader(20), override=False))
    x = cifar10(args.data_root, "test").x[: p["predicted"]]
    record("predict_drop", lambda: la(x))
    la.complement = "prior"
    record("predict_prior", lambda: la(x))


TASKS = {"compare": compare, "protein": protein, "resnet": resnet}


# Running them


def measure(args: Namespace, task: str, p: Measurement) -> Measurement:
    """One task in a process of its own, limited in time; what it printed last."""
    command = [sys.executable, __file__, f"--data-root={args.data_root}"]
    command += [f"--out={args.out}", f"--cache-dir={args.cache_dir}"]
    command += ["--worker", task, json.dumps(p)]

    def limit() -> None:
        seconds = p.get("limit")
        if seconds:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))

    done = subprocess.run(command, capture_output=True, preexec_fn=limit)
    lines = [x for x in done.stdout.decode().splitlines() if x.startswith("{")]
    row = json.loads(lines[-1]) if lines else {}
    if done.returncode < 0:
        row["stopped"] = f"> {p['limit']} s"
    elif done.returncode:
        row["stopped"] = "failed: " + done.stderr.decode().strip().splitlines()[-1]
    return row


def out_of_reach(
    side: str, n_params: float, before: Measurement | None, limit: float
) -> str | None:
    """Why a side is not run with P parameters: its memory, or its time by the run
    with the next smaller P; `full` grows like P³, `gp` like P."""
    needed = FULL_MATRICES * 4 * n_params**2
    if side == "full" and needed > LIMIT_BYTES:
        return human_bytes(needed)
    if before is None or side == "exact":
        return None
    growth = (n_params / before["P"]) ** (3 if side == "full" else 1)
    seconds = growth * (total(before, evidence="evidence" in before) or 0.0)
    return f"≈ {seconds:,.0f} s" if seconds > limit else None


def comparison(args: Namespace, results: Results) -> str:
    lines = [
        "## Exact Laplace against `full` and `gp` of laplace-torch",
        "",
        "One regression output, MLP with two hidden layers, float32 model. Ratio: fit "
        f"+ {STEPS} steps + prediction of {INPUTS} inputs of laplace-torch to ours. "
        "Without measured steps (–) the ratio leaves them out on both sides. ≈: "
        "scaled up from fewer steps or inputs, or from the cubic growth of a smaller "
        "run; a size in memory is an estimate, and the reason not to run.",
        "",
        f"| N·C | P | method | fit, s | {STEPS} evidence steps, s | predict {INPUTS}, s"
        " | peak, GB | total, s | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    grid = {20: (1e3,)} if args.smoke else GRID
    for n_data, sizes in grid.items():
        # The fewest data are where `full` should be measured, not extrapolated.
        limit = LIMIT_SECONDS * (10 if n_data == min(grid) else 1)
        before: dict[str, Measurement] = {}
        for n_params in sizes:
            rows: dict[str, Measurement] = {}
            for side in SIDES:
                why = out_of_reach(side, n_params, before.get(side), limit)
                if why is not None:
                    rows[side] = {"stopped": why}
                    continue
                p = {"N": n_data, "P": n_params, "side": side, "inputs": INPUTS}
                if args.smoke or n_data * n_params >= 1e9:
                    p["inputs"] = 50
                if side != "exact":
                    p["limit"] = LIMIT_SECONDS
                key = f"{side} N={n_data} P={n_params:g}"
                if args.tables and key not in results.rows:
                    rows[side] = {"stopped": "not measured yet"}
                    continue
                unfinished = "evidence" not in results.rows.get(key, {"stopped": ""})
                rows[side] = results.compute(
                    key,
                    lambda p=p: measure(args, "compare", p),
                    again=unfinished and key in results.rows and not args.tables,
                )
            before |= {side: r for side, r in rows.items() if "predict" in r}
            lines += [table_row(n_data, n_params, side, rows) for side in rows]
    return "\n".join(lines) + "\n"


def total(row: Measurement, evidence: bool) -> float | None:
    names = ["fit", "predict"] + ["evidence"] * evidence
    values = [row.get(name) for name in names]
    return sum(values) if all(isinstance(v, float) for v in values) else None


def table_row(
    n_data: int, n_params: float, side: str, rows: dict[str, Measurement]
) -> str:
    row, ours = rows[side], rows["exact"]
    stopped = row.get("stopped")

    def cell(name: str) -> str:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if value is None:
            return f"not run: {stopped}" if stopped else "–"
        return f"{'≈ ' if row.get(f'{name}_scaled') else ''}{value:.3g}"

    evidence = "evidence" in row
    mine, theirs = total(ours, evidence), total(row, evidence)
    whole = f"{theirs:.3g}" if theirs is not None else "–"
    ratio = "1"
    if side != "exact":
        ratio = f"{theirs / mine:.3g}×" if mine and theirs else "–"
    name = f"exact, K={row.get('rank')}, {row.get('dtype')}" if not stopped else side
    name = name if side == "exact" else f"`{side}`"
    cells = [cell("fit"), cell("evidence"), cell("predict")]
    peak = f"{row['peak_gb']:.2f}" if "peak_gb" in row else "–"
    columns = [str(n_data), f"{n_params:,.0f}", name, *cells, peak, whole, ratio]
    return f"| {' | '.join(columns)} |"


def large_ranks(args: Namespace, results: Results) -> str:
    lines = [
        "## Many directions",
        "",
        f"UCI protein, MLP 2×50, `n_eigenvalues='exact'`, prediction of {INPUTS}:",
        "",
        f"| N | P | K | fit, s | {STEPS} evidence steps, s | predict, s | peak, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for n in (50,) if args.smoke else (2000, 4000):
        if args.tables and f"protein N={n}" not in results.rows:
            continue
        p = {"N": n, "epochs": 2 if args.smoke else 200}
        row = results.compute(f"protein N={n}", lambda p=p: measure(args, "protein", p))
        lines.append(
            f"| {n} | {row['P']:,} | {row['rank']} | {row['fit']:.3g} | "
            f"{row['evidence']:.3g} | {row['predict']:.3g} | {row['peak_gb']:.2f} |"
        )
    p = {"M": 2000, "images": 100, "predicted": 20}
    if args.smoke:
        p = {"M": 20, "images": 2, "predicted": 2}
    if args.tables and "resnet20" not in results.rows:
        return "\n".join(lines) + "\n\nResNet-20: not measured yet.\n"
    row = results.compute("resnet20", lambda: measure(args, "resnet", p))
    lines += [
        "",
        f"ResNet-20 on CIFAR-10, C = 10, K from M = {p['M']} sampled gradients, "
        f"curvature of {p['images']} images, prediction of {p['predicted']}:",
        "",
        "| P | K | basis, s | curvature, s | predict, complement dropped, s | kept, s "
        "| peak, GB |",
        "|---|---|---|---|---|---|---|",
        f"| {row['P']:,} | {row['rank']} | {row['basis']:.3g} | "
        f"{row['curvature']:.3g} | {row['predict_drop']:.3g} | "
        f"{row['predict_prior']:.3g} | {row['peak_gb']:.2f} |",
    ]
    return "\n".join(lines) + "\n"


SECTIONS = {"comparison": comparison, "ranks": large_ranks}


def main(argv: list[str] | None = None) -> None:
    parser = arguments("exact", __doc__)
    parser.add_argument(
        "--tables", action="store_true", help="measure nothing, write what is there"
    )
    parser.add_argument("--only", choices=SECTIONS, help="one of the sections")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "JSON"), help="internal")
    args = start(parser, argv)
    args.data_root = Path(args.data_root)
    if args.worker:
        warnings.simplefilter("ignore")
        TASKS[args.worker[0]](args, json.loads(args.worker[1]), Recorder())
        return
    name = "smoke.json" if args.smoke else "exact.json"
    about = environment(args)
    settings = {key: value for key, value in about.items() if key != "date"}
    results = Results(args.out / name, settings)
    names = [args.only] if args.only else SECTIONS
    sections = [SECTIONS[name](args, results) for name in names]
    command = "python examples/paper/benchmark_exact.py"
    head = f"# What exact linearised Laplace costs\n\n`{command}`"
    head += ", CPU seconds of one thread, peak growth of the resident memory.\n\n"
    head += "\n".join(f"- {key}: {value}" for key, value in about.items())
    text = "\n\n".join([head, *sections])
    (args.out / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
