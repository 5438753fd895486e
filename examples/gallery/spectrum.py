"""Spectrum, and what K buys: how many directions bring you to exact Laplace.

The data are those of regression_gap.py. A few directions carry nearly all of the
kernel, but the variance in the gap lies in the small ones: K directions alone have to
reach them, K directions and an account of the rest (the default) do not.

    python examples/gallery/spectrum.py"""

import style
import torch
from laplace import Laplace
from regression_gap import GRID, NOISE, network, observations
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella  # noqa: F401, registers "nystrom"

RANKS = (2, 8, 16)
COMPLEMENTS = {"drop": "K directions alone", "matched": "K and the rest"}
SHOWN = 24

args = style.arguments()
x, y = observations(seed=0)
model = network(x, y, steps=50 if args.smoke else 1000)


def fitted(**options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eigenvalues (K,), and mean and standard deviation on the grid, each (N,)."""
    la = Laplace(model, "regression", "all", "nystrom", sigma_noise=NOISE,
                 subsample_size=len(x), **options)  # fmt: skip
    la.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    f_mu, f_var = (part.detach().flatten() for part in la(GRID))
    return la.basis.eigenvalues, f_mu, f_var.sqrt()


eigenvalues, mean, exact = fitted(n_eigenvalues="exact")
gap = (GRID.flatten() > -1) & (GRID.flatten() < 0.9)
with style.drawing(args.out / "spectrum.png", size=(7.2, 6.6)) as figure:
    top, bottom = figure.subfigures(2, height_ratios=(2, 3))
    ax = top.subplots()
    ax.bar(range(1, SHOWN + 1), eigenvalues[:SHOWN], color=style.BLUE)
    for k in RANKS:
        ax.axvline(k + 0.5, color=style.ORANGE, linestyle="--", linewidth=2)
        ax.text(k + 0.6, 1e5, f"K = {k}", color=style.ORANGE, weight="bold")
    ax.set(title="how much of the kernel each direction carries", xlabel="direction")
    ax.set(yscale="log", xlim=(0.4, SHOWN + 0.6), ylim=(1e-8, 1e6))
    ax.set(yticks=[1e-6, 1, 1e6])
    rows = bottom.subplots(2, 3, sharex=True, sharey=True)
    for row, (complement, title) in zip(rows, COMPLEMENTS.items(), strict=True):
        for ax, k in zip(row, RANKS, strict=True):
            _, _, std = fitted(n_eigenvalues=k, complement=complement)
            style.interval(ax, GRID, mean, std, train=(x, y))
            for sign, label in ((-2, "exact ± 2 std"), (2, "")):
                ax.plot(GRID, mean + sign * exact, "k--", label=label, zorder=1.5)
            width = (std / exact)[gap].mean()
            style.bare(ax, f"K = {k}", f"{width:.0%} of exact's width")
        row[0].set_ylabel(title, color="black")
    style.legend(bottom, ax)
