"""What a fit costs on many devices: passes, bytes in memory, bytes sent.

Plain arithmetic in the notation of docs/guide/scale.md, without PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """Rows of the summary where the gradients do not fit, 10 K or as many as do; else
    None."""
    budget = 0.7 * m.memory
    if memory(p, m.W) <= budget:
        return None
    return min(10 * p.K, int((budget - memory(p, m.W, 0)) / (p.itemsize * p.P)))


def busiest(p: Problem, m: Machine) -> float:
    """Bytes through the busiest process: a part of its gradients to each of the others,
    2(W − 1)/W of every sum, the directions once. Of summaries half the rows from each
    to the first process."""
    W = m.W
    if W == 1:
        return 0.0
    basis = p.itemsize * p.K * p.P
    if (rows := summary(p, m)) is not None:
        return basis + p.itemsize * rows // 2 * p.P * (W - 1)
    exchange = p.itemsize * p.M * p.P / W * (W - 1) / W
    return exchange + basis + 8 * (p.M**2 + 2 * p.K**2) * 2 * (W - 1) / W


def seconds(p: Problem, m: Machine) -> dict[str, float]:
    """Wall-clock seconds of the steps."""
    work, rows = passes(p), summary(p, m)
    if rows is None:
        products = 2 * p.M * (p.M + p.K) * p.P / m.W
        eigen = 25 * p.M**3
    else:  # whenever half of the rows are new, a Gram matrix and a product
        once = 2 * rows * (rows + rows // 2) * p.P
        products = (p.M / m.W / (rows / 2) + m.W) * once  # W in the first process
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


# --- tables --------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


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
