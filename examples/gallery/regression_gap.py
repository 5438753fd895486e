"""Intervals in a gap: what each posterior says where it has seen nothing.

One network, four predictive intervals: of the network alone (MAP), of Laplace on its
last layer, KFAC on all layers, and exact linearised Laplace on all layers. The noise is
known, the prior precision is that of each one's evidence. The table is over five data
sets.

    python examples/gallery/regression_gap.py"""

import style
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import metrics

NOISE, SEEDS = 0.1, range(5)
GRID = torch.linspace(-3, 3, 301).unsqueeze(1)
METHODS = {
    "Laplace, last layer": ("last_layer", "full", {}),
    "Laplace, KFAC": ("all", "kron", {}),
    "Laplace, exact": ("all", "nystrom", {"n_eigenvalues": "exact"}),
}
ALONE = "the network alone (MAP)"


def truth(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(3 * x) + 0.3 * x


def observations(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy values of the truth on both sides of a gap, x and y (80, 1)."""
    torch.manual_seed(seed)
    x = torch.cat([-2.2 + 1.2 * torch.rand(40, 1), 0.9 + 1.2 * torch.rand(40, 1)])
    return x, truth(x) + NOISE * torch.randn_like(x)


def network(x: torch.Tensor, y: torch.Tensor, steps: int = 1000) -> nn.Module:
    """Return a network at its maximum a posteriori, with prior precision 1."""
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(),
                          nn.Linear(50, 1))  # fmt: skip

    def loss() -> torch.Tensor:
        return (model(x) - y).square().sum() / (2 * NOISE**2)

    style.train(model, loss, steps, prior_precision=1.0)
    return model


def intervals(x: torch.Tensor, y: torch.Tensor, steps: int) -> dict[str, tuple]:
    """Return mean and standard deviation of an observation on the grid, by method."""
    model = network(x, y, steps)
    found = {ALONE: (model(GRID).detach(), torch.full_like(GRID, NOISE))}
    for name, (subset, structure, options) in METHODS.items():
        la = Laplace(model, "regression", subset, structure, **options)
        la.sigma_noise = NOISE
        la.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
        la.optimize_prior_precision(method="marglik")
        f_mu, f_var = (part.detach() for part in la(GRID))
        found[name] = (f_mu, (f_var.squeeze(-1) + NOISE**2).sqrt())
    return found


def main() -> None:
    args = style.arguments()
    scores = {name: [] for name in (ALONE, *METHODS)}
    with style.drawing(args.out / "regression_gap.png", size=(7.2, 5.6)) as figure:
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for seed in SEEDS[: 1 if args.smoke else None]:
            x, y = observations(seed)
            bands = intervals(x, y, steps=50 if args.smoke else 1000)
            start, end = x[x < 0].max(), x[x > 0].min()
            gap = ((start < GRID) & (end > GRID)).flatten()
            new = truth(GRID)[gap] + NOISE * torch.randn(int(gap.sum()), 1)
            for ax, (name, (mean, std)) in zip(panels.flat, bands.items(), strict=True):
                at = mean[gap], std[gap]
                found = metrics.regression_metrics(at[0], at[1].square(), new)
                width = 2 * 1.96 * at[1].mean().item()
                scores[name].append((found["nll"], found["coverage_95"], width))
                if seed == 0:
                    ax.axvspan(start, end, color="0.93", linewidth=0)
                    known = {"train": (x, y), "truth": truth(GRID)}
                    style.interval(ax, GRID, mean, std, **known)
                    caption = (
                        f"{found['coverage_95']:.0%} of new data in 95 % intervals"
                    )
                    style.bare(ax, name, caption)
                    ax.set(xlim=(-3, 3), ylim=(-3.5, 3.5))
        panels[0, 0].text((start + end) / 2, -3.2, "no data here", ha="center")
        style.legend(figure, panels[0, 0])
    folder = args.out if args.smoke else style.ROOT / "examples/paper/results/gap"
    rows = [f"| {name} | {nll:.2f} | {inside:.0%} | {width:.2f} |"
            for name, values in scores.items()
            for nll, inside, width in [torch.tensor(values).mean(0)]]  # fmt: skip
    head = (
        "| in the gap | NLL | in 95 % intervals | their width |\n|---|---:|---:|---:|"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gap.md").write_text("\n".join([head, *rows]) + "\n")


if __name__ == "__main__":
    main()
