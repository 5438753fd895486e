"""Intervals in a gap: what each posterior says where it has seen nothing.

The data and the network are those of examples/gap.py.

    python examples/gallery/regression_gap.py"""

import style
from gap import GRID, intervals, observations, truth

TITLES = {
    "MAP": "the network alone (MAP)",
    "last layer": "Laplace, last layer",
    "KFAC": "Laplace, KFAC",
    "exact": "Laplace, exact",
}

args = style.arguments()
x, y = observations(seed=0)
bands = intervals(x, y, steps=50 if args.smoke else 1000)
start, end = x[x < 0].max(), x[x > 0].min()
gap = (start < GRID) & (end > GRID)
covered = {}
with style.drawing(args.out / "regression_gap.png", size=(7.2, 5.6)) as figure:
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for ax, (name, (mean, std)) in zip(panels.flat, bands.items(), strict=True):
        ax.axvspan(start, end, color="0.93", linewidth=0)
        known = {"train": (x, y), "truth": truth(GRID)}
        style.interval(ax, GRID, mean, std, **known)
        inside = (truth(GRID) - mean).abs() < 2 * std
        covered[name] = inside[gap].double().mean().item()
        style.bare(ax, TITLES[name], f"truth inside for {covered[name]:.0%} of the gap")
        ax.set(xlim=(-3, 3), ylim=(-3.5, 3.5))
    panels[0, 0].text((start + end) / 2, -3.2, "no data here", ha="center", color="0.3")
    style.legend(figure, panels[0, 0])
