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
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from update_results import fill

from laplace_ella import ELLALaplace

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "scaling"
PAGE = HERE.parents[1] / "docs" / "guide" / "scale.md"


# --- the model of the cost -----------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A fit, in the notation of the package: N data, C outputs, P uncertain parameters,
    M gradients, K directions.

    Attributes
    ----------
    forward : float
        seconds of a forward pass of one example, on one device
    itemsize : int
        bytes per number of gradients and directions
    frozen : int
        bytes of weights that get no posterior
    """

    name: str
    N: int
    C: int
    P: int
    M: int
    K: int
    forward: float = 0.0
    itemsize: int = 4
    frozen: int = 0


@dataclass(frozen=True)
class Machine:
    """W devices. All but their number is assumed.

    Attributes
    ----------
    bandwidth : float
        bytes per second that each sends and receives
    flops : float
        operations per second of products in the precision of the gradients
    memory : float
        bytes of each, of which a fit takes 70 %
    """

    W: int
    bandwidth: float = 5e10
    flops: float = 5e13
    memory: float = 8e10


def passes(p: Problem) -> dict[str, float]:
    """Forward passes' worth of work in all: a backward pass counts two, and a tangent
    one besides the primal, which all tangents share."""
    rows = 3 * p.M
    features = min(1 + 2 * p.K, 1 + 2 * p.C)
    return {"gradients": rows, "curvature": p.N * features}


def sent(p: Problem, W: int) -> dict[str, int]:
    """Bytes that the processes hand to the exchanges of a fit, all together."""
    if W == 1:
        return {"gradients": 0, "basis": 0, "curvature": 0}
    sums = 8 * (p.M**2 + p.K**2) * W  # Gram matrix, products of directions
    eigen = 8 * (p.M + p.K * p.M)  # from the first process
    return {
        "gradients": p.itemsize * p.M * p.P,
        "basis": sums + eigen + p.itemsize * p.K * p.P,
        "curvature": 8 * (p.K**2 + 3) * W,
    }


def memory(p: Problem, W: int, rows: int | None = None) -> float:
    """Bytes in one process: weights, gradients (all, or a summary of so many rows) and
    directions."""
    kept = p.M * (1 if W == 1 else 2 / W) if rows is None else rows
    gram = 32 * (p.M if rows is None else rows) ** 2
    return p.frozen + p.itemsize * p.P * (1 + kept + p.K) + gram


def summary(p: Problem, m: Machine) -> int | None:
    """Rows of the summary where the gradients do not fit, 10 K; else None."""
    return None if memory(p, m.W) <= 0.7 * m.memory else 10 * p.K


def busiest(p: Problem, m: Machine) -> float:
    """Bytes through the busiest process: a part of its gradients to each of the others,
    2(W − 1)/W of every sum, the directions once. Of summaries 5 K rows from each to the
    first process."""
    W = m.W
    if W == 1:
        return 0.0
    basis = p.itemsize * p.K * p.P
    if summary(p, m) is not None:
        return basis + p.itemsize * 5 * p.K * p.P * (W - 1)
    exchange = p.itemsize * p.M * p.P / W * (W - 1) / W
    return exchange + basis + 8 * (p.M**2 + 2 * p.K**2) * 2 * (W - 1) / W


def seconds(p: Problem, m: Machine) -> dict[str, float]:
    """Wall-clock seconds of the steps."""
    work, rows = passes(p), summary(p, m)
    if rows is None:
        products = 2 * p.M * (p.M + p.K) * p.P / m.W
        eigen = 25 * p.M**3
    else:  # every 5 K new rows the Gram matrix of 10 K and a product with 5 K
        products = p.M / m.W / (5 * p.K) * 2 * rows * (rows + 5 * p.K) * p.P
        products += m.W * 2 * rows * (rows + 5 * p.K) * p.P  # in the first process
        eigen = 25 * rows**3
    return {
        "gradients": work["gradients"] * p.forward / m.W,
        "basis": products / m.flops + eigen / 1e12,  # in float64, on one device
        "curvature": work["curvature"] * p.forward / m.W,
        "exchange": busiest(p, m) / m.bandwidth,
    }


#: Networks that are not here. Seconds of a forward pass are assumed: 2·10¹³ useful
#: operations per second, of which an image of 224 × 224 takes 8·10⁹ and 35·10⁹, and a
#: text of 512 tokens two for every weight and token.
LARGE = (
    Problem("ResNet-50, ImageNet", 1_281_167, 1000, 25_557_032, 2000, 20, 4e-4),
    Problem("ViT-B/16, ImageNet", 1_281_167, 1000, 86_567_656, 2000, 20, 1.75e-3),
    Problem(
        "7B, LoRA r=16, 512 tokens",
        100_000,
        2,
        39_976_960,
        2000,
        20,
        0.36,
        4,
        14_000_000_000,
    ),
)
DEVICES = (1, 8, 64)


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


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


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


def duration(s: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if s >= size:
            return f"{s / size:.1f} {unit}"
    return f"{s:.1f} s"


def large_table() -> str:
    rows = []
    for p in LARGE:
        for W in DEVICES:
            m = Machine(W)
            cost, few = seconds(p, m), summary(p, m)
            rows.append(
                [
                    p.name,
                    str(W),
                    "all" if few is None else "summary",
                    *(duration(value) for value in cost.values()),
                    duration(sum(cost.values())),
                    f"{memory(p, W, few) / 1e9:.0f}",
                    f"{busiest(p, m) / 1e9:.1f}",
                ]
            )
    steps = ["gradients", "basis", "curvature", "exchange", "whole fit"]
    head = ["network", "GPUs", "rows kept", *steps, "GB on a GPU", "GB exchanged"]
    return table(head, rows)


def inputs_table() -> str:
    rows = [
        [
            p.name,
            *(f"{n:,}" for n in (p.N, p.C, p.P, p.M, p.K)),
            f"{1e3 * p.forward:g} ms",
        ]
        for p in LARGE
    ]
    return table(["network", "N", "C", "P", "M", "K", "forward pass"], rows)


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
