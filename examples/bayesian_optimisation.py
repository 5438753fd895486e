"""Bayesian optimisation: minimise an expensive function by Thompson sampling.

You learn `functional_samples(..., joint=True)`: each sample is one function, seen at
all candidates at once. Evaluating where a sampled function is lowest balances what
looks good with what is unknown. The function is Branin's, with the minimum 0.398.
"""

import math

import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella

MINIMUM = 0.397887


def branin(u: torch.Tensor) -> torch.Tensor:
    """Values (N, 1) at points of the unit square (N, 2)."""
    a, b = 15 * u[:, :1] - 5, 15 * u[:, 1:]
    parabola = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return parabola**2 + 10 * (1 - 1 / (8 * math.pi)) * a.cos() + 10


def surrogate(x: torch.Tensor, y: torch.Tensor) -> laplace_ella.ELLALaplace:
    """A network trained on the observations, and its exact linearised Laplace: one
    direction per gradient, and the prior's variance outside of them."""
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                          nn.Linear(64, 1))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    la = Laplace(
        model,
        "regression",
        subset_of_weights="all",
        hessian_structure="nystrom",
        n_eigenvalues=len(x),
        complement="prior",
        sigma_noise=0.05,
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    # The standardised data have variance one; so has the prior predictive.
    la.prior_precision = la.basis.trace / len(x)
    return la


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # gradients at close points are almost equal
x = torch.rand(6, 2)
values = branin(x)
print(f"{len(x)} random points: best {values.min() - MINIMUM:.3f} above the minimum")
for step in range(6):
    la = surrogate(x, (values - values.mean()) / values.std())
    candidates = torch.rand(400, 2)
    # (4, 400, 1): four functions; each proposes the candidate where it is lowest
    functions = la.functional_samples(candidates, n_samples=4, joint=True)
    chosen = candidates[functions.squeeze(-1).argmin(1).unique()]
    x, values = torch.cat([x, chosen]), torch.cat([values, branin(chosen)])
    print(
        f"round {step + 1}: {len(x)} evaluations, {values.min() - MINIMUM:.3f} above it"
    )
by_chance = branin(torch.rand(1000, len(x), 2).flatten(0, 1)).reshape(1000, -1)
regret = (by_chance.min(1).values - MINIMUM).median()
print(f"{len(x)} random points would typically end {regret:.3f} above it")
