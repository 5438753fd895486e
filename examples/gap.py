"""Between the data: what each posterior says where it has seen nothing.

You learn which approximation keeps a gap open. One network, four predictive intervals:
of the network alone (MAP), of Laplace on its last layer, KFAC on all layers, and exact
linearised Laplace on all layers. Noise known, prior precision by each one's evidence.

    python examples/gap.py [folder]  # by default where the README's figure is"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import plotting

NOISE, SEEDS = 0.1, range(5)
METHODS = {
    "last layer": ("last_layer", "full", {}),
    "KFAC": ("all", "kron", {}),
    "exact": ("all", "nystrom", {"n_eigenvalues": "exact"}),
}
GRID = torch.linspace(-3, 3, 301).unsqueeze(1)


def truth(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(3 * x) + 0.3 * x


def observations(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy values of the truth on both sides of a gap, x and y (80, 1)."""
    torch.manual_seed(seed)
    x = torch.cat([-2.2 + 1.2 * torch.rand(40, 1), 0.9 + 1.2 * torch.rand(40, 1)])
    return x, truth(x) + NOISE * torch.randn_like(x)


def intervals(x: torch.Tensor, y: torch.Tensor, steps: int = 1000) -> dict[str, tuple]:
    """Mean and standard deviation of an observation on the grid, for each method."""
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(),
                          nn.Linear(50, 1))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):  # maximum a posteriori, prior precision 1
        optimizer.zero_grad()
        squares = (model(x) - y).square().sum() / NOISE**2
        (squares + sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()
    found = {"MAP": (model(GRID).detach(), torch.full_like(GRID, NOISE))}
    for name, (subset, structure, options) in METHODS.items():
        la = Laplace(model, "regression", subset, structure, **options)
        la.sigma_noise = NOISE
        la.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
        la.optimize_prior_precision(method="marglik")
        f_mu, f_var = (part.detach() for part in la(GRID))
        found[name] = (f_mu, (f_var.squeeze(-1) + NOISE**2).sqrt())
    return found


if __name__ == "__main__":
    figure, panels = plt.subplots(1, 4, figsize=(12, 2.8), sharey=True, layout="tight")
    covered = {name: [] for name in ["MAP", *METHODS]}
    for seed in SEEDS:
        x, y = observations(seed)
        gap = (GRID > x[x < 0].max()) & (GRID < x[x > 0].min())
        for ax, (name, band) in zip(panels, intervals(x, y).items(), strict=True):
            inside = (truth(GRID) - band[0]).abs() < 2 * band[1]
            covered[name].append(float(inside[gap].double().mean()))
            if seed == 0:
                known = {"train": (x, y), "truth": truth(GRID)}
                plotting.plot_regression(GRID, *band, ax, title=name, **known)
                ax.set(ylim=(-3.5, 3.5), ylabel="")
    rows = [f"| {k} | {torch.tensor(v).mean():.0%} |" for k, v in covered.items()]
    head = f"|  | truth within ±2 std in the gap, {len(SEEDS)} data sets |\n|---|---:|"
    print(table := "\n".join([head, *rows]))
    folder = Path(*sys.argv[1:2] or [Path(__file__).parent / "paper/results/gap"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gap.md").write_text(table + "\n")
    figure.savefig(folder / "gap.png", dpi=110)
