"""Two moons: where each posterior is sure, and where it says that it does not know.

One network, one prior (that of its weight decay), four predictions. Deep colour: at
least 95 % sure of a class; white: undecided.

    python examples/gallery/two_moons.py"""

import style
import torch
from laplace import Laplace
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella  # noqa: F401, registers "nystrom"

PRIOR_PRECISION = 0.1
METHODS = {
    "Laplace, last layer": ("last_layer", "full", {}),
    "Laplace, KFAC": ("all", "kron", {}),
    "Laplace, exact": ("all", "nystrom", {"n_eigenvalues": "exact"}),
}
CLASSES = (("#00334f", "o"), ("#5f2a00", "s"))  # darker than their areas
LEVELS = (0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1)
SHADES = style.TWO_SIDES([0.02, 0.27, 0.39, 0.5, 0.61, 0.73, 0.98])

args = style.arguments()
torch.manual_seed(0)
points, classes = make_moons(30 if args.smoke else 80, noise=0.1, random_state=1)
x, y = torch.tensor(points).float(), torch.tensor(classes)
model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(),
                      nn.Linear(30, 2))  # fmt: skip
style.train(
    model,
    lambda: nn.functional.cross_entropy(model(x), y, reduction="sum"),
    steps=50 if args.smoke else 1500,
    prior_precision=PRIOR_PRECISION,
)

side = 15 if args.smoke else 70
across, down = torch.linspace(-3.2, 4.2, side), torch.linspace(-2.5, 3, side)
grid = torch.cartesian_prod(down, across).flip(1)  # (side², 2), row by row
probs = {"the network alone (MAP)": model(grid).softmax(-1).detach()}
for name, (subset, structure, options) in METHODS.items():
    la = Laplace(model, "classification", subset, structure,
                 prior_precision=PRIOR_PRECISION, **options)  # fmt: skip
    la.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    probs[name] = torch.cat([la(part).detach() for part in grid.split(500)])

far = torch.cdist(grid, x).min(1).values > 1
sure = {k: (p[far].max(1).values > 0.95).float().mean() for k, p in probs.items()}
with style.drawing(args.out / "two_moons.png", size=(7.2, 6.6)) as figure:
    panels = figure.subplots(2, 2)
    for ax, (name, p) in zip(panels.flat, probs.items(), strict=True):
        values = p[:, 1].reshape(side, side)
        areas = ax.contourf(across, down, values, LEVELS, colors=SHADES)
        ax.contour(across, down, values, [0.5], colors="black", linewidths=1)
        for label, (colour, marker) in enumerate(CLASSES):
            ax.scatter(*x[y == label].T, s=26, color=colour, marker=marker,
                       edgecolors="white", linewidths=0.9)  # fmt: skip
        style.bare(ax, name, f"sure of {sure[name]:.0%} of what is far from data")
    bar = figure.colorbar(areas, ax=panels, location="bottom", aspect=50, pad=0.03)
    bar.set_ticks([0.025, 0.5, 0.975], labels=["surely ●", "undecided", "surely ■"])
