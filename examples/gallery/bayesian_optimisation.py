"""Bayesian optimisation step by step: look next where the function may be lowest.

A network is trained on the values seen so far; exact linearised Laplace says what they
leave open. The next point is where functions that are drawn from it, each seen at all
candidates at once (`functional_samples(..., joint=True)`), improve most on what is
known. For BoTorch's acquisition functions there is `joint_predictive`, the mean and
covariance of groups of points.

    python examples/gallery/bayesian_optimisation.py"""

import style
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella  # noqa: F401, registers "nystrom"

SCALE = 1.0  # of the function, by the prior


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def objective(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(4.5 * x - 0.4) + 0.6 * torch.sin(9 * x + 1.5) + 0.5 * x


args = style.arguments()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # gradients at close points are almost equal
grid = torch.linspace(-1, 1, 41 if args.smoke else 201).unsqueeze(1)


def posterior(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return mean and standard deviation of the function on the grid, each (N, 1), and
    drawn functions (S, N)."""
    model = nn.Sequential(nn.Linear(1, 50), Sine(), nn.Linear(50, 50), Sine(),
                          nn.Linear(50, 1))  # fmt: skip
    for parameter in model[0].parameters():
        parameter.data *= 10  # functions that bend several times between -1 and 1
    steps = 20 if args.smoke else 300
    style.train(model, lambda: nn.functional.mse_loss(model(x), y), steps)
    la = Laplace(model, "regression", "all", "nystrom", n_eigenvalues="exact",
                 sigma_noise=0.03)  # fmt: skip
    la.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    la.prior_precision = la.basis.trace / len(x) / SCALE**2
    f_mu, f_var = (part.detach() for part in la(grid))
    drawn = la.functional_samples(grid, n_samples=512, joint=True)
    return f_mu, f_var.squeeze(-1).sqrt(), drawn.squeeze(-1)


x = torch.tensor([[-0.9], [0.05], [0.8]])
with style.drawing(args.out / "bayesian_optimisation.png", size=(7.2, 5)) as figure:
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for step, ax in enumerate(panels.flat, start=1):
        mean, std, drawn = posterior(x, objective(x))
        known = {"train": (x, objective(x)), "truth": objective(grid)}
        style.interval(ax, grid, mean, std, **known)
        ax.plot(grid, drawn[:2].T, color="0.75", linewidth=1, zorder=0.5)
        # Expected improvement: how far the drawn functions fall below what is known.
        i = (objective(x).min() - drawn).clamp_min(0).mean(0).argmax()
        ax.plot(grid[i], mean[i], "*", color=style.ORANGE, markersize=18,
                clip_on=False, linestyle="none", label="next")  # fmt: skip
        above = objective(x).min() - objective(grid).min()
        style.bare(ax, f"step {step}", f"{above:.2f} above the minimum")
        x = torch.cat([x, grid[i].unsqueeze(0)])
    style.legend(figure, ax)
