"""How far ELLA is from the exact linearised Laplace: Fig. 2 (a) and (b) of the paper.

Deng, Zhou and Zhu (NeurIPS 2022), Sec. 5.1: 2,000 MNIST images, 256 others for
validation, their ConvNet with 29,034 parameters and its checkpoint. For every M and K
with K ≤ M, ε_Nyström is the relative error of the approximated kernel matrix of the
training data, ε_ELLA the mean relative error of the predictive covariance on the
validation data, both in spectral norm.

    python examples/paper/approximation_error.py --data-root DATA
    python examples/paper/approximation_error.py --smoke             # seconds

DATA (default: the environment variable LAPLACE_ELLA_DATA) holds mnist/*.gz and
weights/mnist_convnet.ckpt. The full size takes about 7 GB of memory.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from common import data, models, runs
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
from laplace_ella import FeatureCache, prior_precision_from_weight_decay
from laplace_ella.diagnostics import ExactLaplace, relative_errors

SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2000)


@dataclass(frozen=True)
class Point:
    """Both errors at one M and K."""

    M: int
    K: int
    eps_nystrom: float
    trace_missed: float
    eps_ella: float
    eps_ella_complement: float


ERRORS = {
    "eps_nystrom": "ε_Nyström",
    "eps_ella": "ε_ELLA",
    "eps_ella_complement": 'ε_ELLA, complement="prior"',
}


# Data


def load(root: Path | None, seed: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The network, and training images and labels in random order.

    Without a folder: a random network and random images, enough to run the code.
    """
    if root is None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(256, 1, 28, 28, generator=generator)
        y = torch.randint(10, (256,), generator=generator)
        return models.ConvNet().eval(), x, y
    images = data.mnist(root, "train")
    order = np.random.default_rng(seed).permutation(len(images))[:4096]
    chosen = images[torch.from_numpy(order)]
    return models.mnist_convnet(root), chosen.x, chosen.y


# The study


def study(
    model: nn.Module,
    train: DataLoader,
    val: DataLoader,
    sizes: Iterable[int],
    prior_precision: float,
    max_bytes: int,
    seed: int,
    log: Callable[[str], None],
) -> list[Point]:
    """Both errors at every M and K ≤ M of `sizes`."""
    exact = kappa = None
    points = []
    for M in sizes:
        la = Laplace(
            model,
            "classification",
            "all",
            "nystrom",
            prior_precision=prior_precision,
            subsample_size=M,
            n_eigenvalues=M,
            seed=seed,
        )
        la.fit(train)
        if exact is None:  # it depends on the model, the data and the prior only
            log("exact linearised Laplace ...")
            exact = ExactLaplace.from_loader(la, train, max_bytes)
            log(f"Jacobians of {exact.n_data} images, {exact.n_params} parameters")
            kappa = exact.covariances(la, val)
            log("exact covariance of the validation images")
        # The basis is nested: all K come from one fit.
        ranks = sorted({min(k, la.rank) for k in sizes if k <= M})
        nystrom = exact.nystrom_errors(la.basis.directions, ranks)
        la.complement = "prior"
        features = FeatureCache.from_loader(la, val)
        features = replace(  # rounding counts where the error is small
            features,
            f_mu=features.f_mu.double(),
            phi=features.phi.double(),
            residual=features.residual.double(),
        )
        for k, error in zip(ranks, nystrom, strict=True):
            ella = []
            for la.complement in ("drop", "prior"):
                posterior = la.posterior.truncate(k)
                part = features.serving(posterior)
                values = posterior.function_values(
                    part.f_mu, part.phi, part.residual, part.unseen
                )
                errors = relative_errors(values.covariance(), kappa)
                ella.append(float(errors.mean()))
            points.append(Point(M, k, error.relative, error.relative_trace, *ella))
        last = points[-1]
        log(
            f"M={M}: K={last.K} ε_Nyström {last.eps_nystrom:.3g}, "
            f"ε_ELLA {last.eps_ella:.3g}, complement {last.eps_ella_complement:.3g}"
        )
    return points


# What the paper observed


def table(points: list[Point], name: str) -> dict[tuple[int, int], float]:
    return {(p.M, p.K): getattr(p, name) for p in points}


def steps(points: list[Point], name: str, along: str) -> list[tuple[str, float]]:
    """Ratios of an error to the one before, along growing K or growing M."""
    values = table(points, name)
    axis = 1 if along == "K" else 0
    found = []
    for cell in values:
        others = [c for c in values if c[1 - axis] == cell[1 - axis]]
        before = [c for c in others if c[axis] < cell[axis]]
        if before:
            previous = max(before, key=lambda c: c[axis])
            label = f"M {previous[0]}→{cell[0]}, K {previous[1]}→{cell[1]}"
            found.append((label, values[cell] / values[previous]))
    return found


def slope(xs: list[int], ys: list[float]) -> float:
    """Exponent b of y ~ x^b, by least squares."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def observations(points: list[Point]) -> list[str]:
    """The three claims of Sec. 5.1, each with the numbers that decide it."""
    lines = []
    for number, claim, along in (
        (1, "the larger K the better", "K"),
        (2, "at fixed K the errors decay as M grows", "M"),
    ):
        for name in ERRORS:
            ratios = steps(points, name, along)
            worse = sorted((r for r in ratios if r[1] > 1), key=lambda r: -r[1])
            text = f"It falls in {len(ratios) - len(worse)} of {len(ratios)} steps"
            if worse:
                text += f"; largest rise {worse[0][1] - 1:.1%} ({worse[0][0]})"
            if along == "M":
                values = table(points, name)
                ends = [
                    (values[max(c for c in values if c[1] == k)], values[first])
                    for k in {c[1] for c in values}
                    if (first := min(c for c in values if c[1] == k))[0]
                    < max(c for c in values if c[1] == k)[0]
                ]
                text += (
                    f"; from the smallest to the largest M it falls for "
                    f"{sum(last < first for last, first in ends)} of {len(ends)} K"
                )
            verdict = "holds" if not worse else "does not hold at every step"
            lines.append(
                f"- ({number}) {claim}, {ERRORS[name]}: **{verdict}**. {text}."
            )
    largest = max(p.M for p in points)
    at_largest = [p for p in points if p.M == largest]
    square = [p for p in points if p.M == p.K]
    for where, chosen in (
        (f"along K at M = {largest}", at_largest),
        ("along K = M", square),
    ):
        ks = [p.K for p in chosen]
        a, b = (
            slope(ks, [getattr(p, name) for p in chosen])
            for name in ("eps_nystrom", "eps_ella")
        )
        verdict = "holds" if a < b else "does not hold"
        lines.append(
            "- (3) ε_Nyström decays more rapidly than ε_ELLA, "
            f"{where}: **{verdict}**. ε_Nyström ~ K^{a:.2f}, ε_ELLA ~ K^{b:.2f}."
        )
    return lines


# Output


def write_csv(points: list[Point], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Point)])
        writer.writeheader()
        for point in points:
            row = asdict(point)
            writer.writerow(
                {k: v if isinstance(v, int) else f"{v:.6g}" for k, v in row.items()}
            )


def markdown_table(points: list[Point], name: str) -> str:
    values = table(points, name)
    Ms, Ks = (sorted({cell[axis] for cell in values}) for axis in (0, 1))
    lines = ["| K \\ M | " + " | ".join(map(str, Ms)) + " |"]
    lines.append("|---" * (len(Ms) + 1) + "|")
    for K in Ks:
        row = [f"{values[M, K]:.3g}" if (M, K) in values else "" for M in Ms]
        lines.append(f"| **{K}** | " + " | ".join(row) + " |")
    return "\n".join(lines)


def heat_maps(points: list[Point], path: Path) -> None:
    """The two panels of Fig. 2, each on its own logarithmic scale of light and dark."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    panels = {
        "eps_nystrom": r"(a)  $\epsilon_\mathrm{Nyström}$",
        "eps_ella": r"(b)  $\epsilon_\mathrm{ELLA}$",
    }
    colours = matplotlib.colormaps["cividis"]  # even in lightness: legible in grey
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained")
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        values = table(points, name)
        Ms, Ks = (sorted({cell[i] for cell in values}) for i in (0, 1))
        grid = np.array([[values.get((M, K), np.nan) for M in Ms] for K in Ks])
        norm = LogNorm(np.nanmin(grid), np.nanmax(grid))
        image = axis.imshow(
            np.ma.masked_invalid(grid), cmap=colours, norm=norm, origin="lower"
        )
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                light = np.dot(colours(norm(value))[:3], (0.299, 0.587, 0.114))
                axis.text(
                    column,
                    row,
                    f"{value:.2g}",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="black" if light > 0.45 else "white",
                )
        axis.set_xticks(range(len(Ms)), Ms, rotation=45)
        axis.set_yticks(range(len(Ks)), Ks)
        axis.set_xlabel("M, sampled gradients")
        axis.set_ylabel("K, directions")
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
        figure.colorbar(image, ax=axis, label="relative error", shrink=0.9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(points: list[Point], setting: str) -> str:
    parts = ["# Approximation error of ELLA (Fig. 2 a, b)", setting]
    parts.append(
        "## The paper's three observations\n\n" + "\n".join(observations(points))
    )
    for name, title in ERRORS.items():
        parts.append(f"## {title}\n\n{markdown_table(points, name)}")
    parts.append("![heat maps](errors.png)")
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = os.environ.get("LAPLACE_ELLA_DATA")
    parser.add_argument("--data-root", type=Path, default=Path(root) if root else None)
    runs.add_output(parser)
    parser.add_argument("--n-train", type=int, default=2000)
    parser.add_argument("--n-val", type=int, default=256)
    parser.add_argument("--weight-decay", type=float, default=5e-4, help="γ")
    parser.add_argument("--max-gb", type=float, default=9.0, help="memory limit")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.smoke:
        args.n_train, args.n_val = 24, 8
    elif args.data_root is None:
        parser.error("pass --data-root, or set LAPLACE_ELLA_DATA, or use --smoke")
    args.out = runs.output_folder("approximation_error", args)
    sizes = [size for size in SIZES if size <= args.n_train]
    started = time.perf_counter()

    def log(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.0f} s] {text}", flush=True)

    torch.manual_seed(args.seed)
    model, x, y = load(args.data_root, args.seed)
    n = args.n_train
    train = DataLoader(TensorDataset(x[:n], y[:n]), batch_size=100)
    val = DataLoader(
        TensorDataset(x[n : n + args.n_val], y[n : n + args.n_val]), batch_size=64
    )
    with torch.no_grad():
        correct = (model(x[n:]).argmax(1) == y[n:]).float().mean()
    prior_precision = prior_precision_from_weight_decay(args.weight_decay, n)
    log(f"accuracy on {len(x) - n} other images {correct:.4f}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", laplace_ella.RankWarning)
        points = study(
            model,
            train,
            val,
            sizes,
            prior_precision,
            int(args.max_gb * 1e9),
            args.seed,
            log,
        )
    seconds = time.perf_counter() - started
    options = sys.argv[1:] if argv is None else argv
    command = " ".join(["python examples/paper/approximation_error.py", *options])
    source = "MNIST, the paper's checkpoint"
    if args.data_root is None:
        source = "random data and net"
    setting = "\n".join(
        [
            f"{source}: {n} training images, {args.n_val} others for validation, P = "
            f"{sum(p.numel() for p in model.parameters()):,}, C = 10. One draw of the "
            "Nyström samples for each M; bases are nested, so all K of one M share it.",
            "",
            f"Prior: precision 1/σ0² = Nγ = {prior_precision:g} with γ = "
            f"{args.weight_decay:g} (the paper's rule; the checkpoint does not tell "
            "its weight decay).",
            "",
            f"Command: `{command}`",
            "",
            f"Versions: laplace-ella {laplace_ella.__version__}, laplace-torch "
            f"{version('laplace-torch')}, torch {torch.__version__}, Python "
            f"{platform.python_version()}; {torch.get_num_threads()} CPU threads, "
            f"{seconds:.0f} s ({time.process_time():.0f} s of CPU time).",
        ]
    )
    write_csv(points, args.out / "errors.csv")
    heat_maps(points, args.out / "errors.png")
    text = report(points, setting)
    (args.out / "README.md").write_text(text)
    print("\n".join(observations(points)))
    log(f"written to {args.out}")


if __name__ == "__main__":
    main()
