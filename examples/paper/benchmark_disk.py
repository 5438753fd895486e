"""Gradients ten times as large as the memory budget: exact Laplace from a file.

    python examples/paper/benchmark_disk.py

The same regression with `n_eigenvalues="exact"`, once in memory and once with
`memory_budget` at a tenth of the gradients and `scratch_dir`. Every measurement is a
process of its own with one thread. Memory of the process itself (RssAnon) is what it
needs; pages of the file (RssFile) are a cache that the system takes back when others
need the room.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from benchmark_exact import loader, network, width_for
from common.runs import Results, arguments, environment, markdown, start, stopwatch
from laplace import Laplace

#: Data (one output each) and parameters; gradients are in float64.
SIZES = ((500, 5e5),)
SMOKE = ((40, 2e4),)
INPUTS = 200

#: Memory budget, as a share of the gradients.
SHARE = 0.1

#: What every process takes for itself, for one pass and the Gram matrix.
LEAST_BUDGET = 30e6


class Memory:
    """Peak growth of the process' own memory and of its mapped files, in bytes."""

    def __enter__(self) -> Memory:
        self._before, self._done = self._now(), threading.Event()
        self.peak = dict(self._before)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.grown = {k: v - self._before[k] for k, v in self.peak.items()}

    @staticmethod
    def _now() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        named = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
        return {k: int(named[k].split()[0]) * 1024 for k in ("RssAnon", "RssFile")}

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            now = self._now()
            self.peak = {k: max(v, now[k]) for k, v in self.peak.items()}


def work(p: dict[str, Any]) -> dict[str, Any]:
    """Fit, evidence and predictions; times in seconds, memory in MB."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network(10, width_for(p["P"]))
    x, x_test = torch.randn(p["N"], 10), torch.randn(INPUTS, 10)
    with torch.no_grad():
        y = model(x) + 0.3 * torch.randn(p["N"], 1)
    options = {"scratch_dir": p["folder"], "memory_budget": p["budget"]}
    la = Laplace(
        model,
        "regression",
        "all",
        "nystrom",
        sigma_noise=0.3,
        n_eigenvalues="exact",
        **(options if p["folder"] else {}),
    )
    row: dict[str, Any] = {}
    with Memory() as memory:
        with stopwatch() as fit:
            la.fit(loader(x, y))
        with stopwatch() as predict:
            variance = la(x_test)[1]
        row["evidence"] = float(la.log_marginal_likelihood())
    for name, bytes_ in memory.grown.items():
        row[name] = bytes_ / 1e6
    for name, times in (("fit", fit), ("predict", predict)):
        row |= {f"{name}_{clock}": seconds for clock, seconds in times.items()}
    return row | {"rank": la.rank, "variance": float(variance.double().mean())}


def measure(p: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", json.dumps(p)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments("disk", __doc__)
    parser.set_defaults(data_root=Path())
    parser.add_argument("--worker", metavar="JSON", help="internal")
    parser.add_argument("--scratch-dir", type=Path, help="default: a temporary folder")
    args: Namespace = start(parser, argv)
    if args.worker:
        print(json.dumps(work(json.loads(args.worker))))
        return []
    about = environment(args)
    settings = {key: value for key, value in about.items() if key != "date"}
    results = Results(args.out / "disk.json", settings)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.scratch_dir) as folder:
        for n, n_params in SMOKE if args.smoke else SIZES:
            gradients = 8 * n * n_params
            budget = max(LEAST_BUDGET, SHARE * gradients)
            for where, folder_or_none in (("memory", None), ("file", folder)):
                p = {"N": n, "P": n_params, "budget": budget, "folder": folder_or_none}
                key = f"N={n} P={n_params:g} {where}"
                row = results.compute(key, lambda p=p: measure(p))
                about_row = {"N": n, "P": f"{n_params:,.0f}", "where": where}
                about_row["gradients"] = gradients / 1e6
                about_row["budget"] = budget / 1e6 if folder_or_none else None
                rows.append(about_row | row)
    columns = {
        "N": "N·C",
        "P": "P",
        "where": "gradients in",
        "gradients": "gradients, MB",
        "budget": "memory budget, MB",
        "RssAnon": "own memory, MB",
        "RssFile": "pages of the file, MB",
        "fit_cpu": "fit, CPU s",
        "fit_wall": "fit, s",
        "predict_cpu": f"{INPUTS} predictions, CPU s",
        "predict_wall": f"{INPUTS} predictions, s",
        "evidence": "evidence",
        "variance": "mean variance",
    }
    digits = dict.fromkeys(columns, ".0f") | {"evidence": ".4f", "variance": ".6f"}
    digits |= {k: ".1f" for k in columns if k.startswith(("fit", "predict"))}
    head = "# Exact Laplace with gradients in a file\n\n"
    head += "`python examples/paper/benchmark_disk.py`: `n_eigenvalues='exact'`, MLPs "
    head += "in float64, one thread; peak growth of memory during fit and predictions. "
    head += "Pages of the file are the system's cache: it takes them back when there "
    head += "is no room.\n\n"
    head += "\n".join(f"- {key}: {value}" for key, value in about.items())
    text = f"{head}\n\n{markdown(rows, columns, digits)}"
    (args.out / "README.md").write_text(text)
    print(text)
    return rows


if __name__ == "__main__":
    main()
