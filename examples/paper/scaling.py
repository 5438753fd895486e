"""What a fit costs on many devices: a model of the cost, and how it compares.

    python examples/paper/scaling.py            # seconds; measures on 1, 2, 3 processes
    python examples/paper/scaling.py --smoke    # fewer sizes, into a temporary folder

The model counts passes, bytes in memory and bytes sent. It is compared with fits by 1,
2 and 3 processes of this machine: CPU seconds of each step, and the bytes that the
exchanges of the fit report. Then it is asked about networks and machines that are not
here; the time of a pass and the bandwidths are inputs of that calculation, not
measured. Writes the tables of examples/paper/results/scaling and docs/guide/scale.md.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import platform
import socket
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common.costs import Problem, inputs_table, large_table, sent, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from update_results import fill

from laplace_ella import ELLALaplace

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "scaling"
PAGE = HERE.parents[1] / "docs" / "guide" / "scale.md"


# --- measurements --------------------------------------------------------------------


class Sent(logging.Handler):
    """Adds up the bytes that exchanges report."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.bytes: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("exchange: "):
            what, n = record.args  # type: ignore[misc]
            self.bytes[str(what)] = self.bytes.get(str(what), 0) + int(n)


#: Which exchange belongs to which step.
STEPS = {
    "rows of the basis": "gradients",
    "Gram matrix": "basis",
    "products of directions": "basis",
    "eigenvalues": "basis",
    "eigenvectors": "basis",
    "directions": "basis",
    "curvature and loss": "curvature",
}


def measure(rank: int, W: int, port: int, problem: Problem, folder: str) -> None:
    """One process: fit, and write down CPU seconds and bytes of its exchanges."""
    torch.set_num_threads(1)
    if W > 1:
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=W
        )
    torch.manual_seed(0)
    x, y = torch.randn(problem.N, 32), torch.arange(problem.N) % problem.C
    width = hidden_width(problem.P, problem.C)
    model = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, problem.C))
    la = ELLALaplace(
        model,
        "classification",
        subsample_size=problem.M,
        n_eigenvalues=problem.K,
        feature_mode="reverse",
        row_mode="vmap",
        chunk_size=32,
    )
    data = TensorDataset(x[rank::W], y[rank::W])
    listener, logger = Sent(), logging.getLogger("laplace_ella")
    logger.addHandler(listener)
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    la.fit(DataLoader(TensorDataset(*data[:64]), 32))  # warms up
    listener.bytes.clear()
    start = time.process_time()
    la.fit_basis(DataLoader(data, 32))
    basis = time.process_time() - start
    start = time.process_time()
    la.fit(DataLoader(data, 32), override=False)
    curvature = time.process_time() - start
    result = {"basis": basis, "curvature": curvature, "sent": listener.bytes}
    torch.save(result, f"{folder}/{rank}.pt")
    if W > 1:
        dist.destroy_process_group()


def hidden_width(P: int, C: int) -> int:
    return max(1, (P - C) // (33 + C))


def run(problem: Problem, W: int) -> list[dict]:
    """What each of W processes measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["laplace_ella"])
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=measure, args=(rank, W, port, problem, folder))
            for rank in range(W)
        ]
        for one in started:
            one.start()
        for one in started:
            one.join()
        files = [f"{folder}/{rank}.pt" for rank in range(W)]
        return [torch.load(file, weights_only=True) for file in files]


# --- tables --------------------------------------------------------------------------


def measured_table(problems: tuple[Problem, ...], sizes: tuple[int, ...]) -> str:
    rows = []
    for p in problems:
        alone = None
        for W in sizes:
            found = run(p, W)
            cpu = {s: max(r[s] for r in found) for s in ("basis", "curvature")}
            alone = alone or cpu
            total: dict[str, int] = {}
            for result in found:
                for what, n in result["sent"].items():
                    step = STEPS.get(what)
                    if step is not None:
                        total[step] = total.get(step, 0) + n
            model = sent(p, W)
            ratios = [
                f"{total.get(s, 0) / model[s]:.3f}" if model[s] else "–" for s in model
            ]
            rows.append(
                [
                    f"{p.N}, {p.C}, {p.P}, {p.M}, {p.K}",
                    str(W),
                    f"{cpu['basis'] / alone['basis']:.2f}",
                    f"{cpu['curvature'] / alone['curvature']:.2f}",
                    f"{1 / W:.2f}",
                    f"{sum(total.values()) / 1e6:.1f}",
                    f"{sum(model.values()) / 1e6:.1f}",
                    *ratios,
                ]
            )
    head = ["N, C, P, M, K", "W", "basis, CPU s", "curvature, CPU s", "1/W"]
    head += ["MB sent", "model", "gradients", "basis ", "curvature"]
    return table(head, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="seconds, for a test")
    parser.add_argument("--out", type=Path, default=None, help="folder of the tables")
    options = parser.parse_args(arguments)
    problems = (
        Problem("small", 1200, 4, 60_000, 300, 10),
        Problem("wide", 600, 4, 240_000, 120, 20),
    )
    sizes: tuple[int, ...] = (1, 2, 3)
    folder = options.out or RESULTS
    if options.smoke:
        problems, sizes = (Problem("tiny", 200, 2, 40_000, 60, 4),), (1, 2)
        folder = options.out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    # P as the network has it.
    problems = tuple(
        Problem(p.name, p.N, p.C, hidden_width(p.P, p.C) * (33 + p.C) + p.C, p.M, p.K)
        for p in problems
    )
    tables = {
        "measured.md": measured_table(problems, sizes),
        "large.md": large_table(),
        "inputs.md": inputs_table(),
    }
    for name, text in tables.items():
        (folder / name).write_text(text)
        print(f"{name}\n{text}")
    if not options.smoke and options.out is None:
        facts = f"torch {torch.__version__}, {platform.machine()}, gloo\n"
        (folder / "environment.md").write_text(facts)
        PAGE.write_text(fill(PAGE.read_text()))


if __name__ == "__main__":
    main()
