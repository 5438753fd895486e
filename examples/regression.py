"""Regression: intervals that are wide where there are no data.

Noise and prior precision are chosen by the evidence, without validation data. With so
few data the default is exact linearised Laplace; with more than 4,000 pairs of an
example and an output it takes at most 128 directions, and estimates the variance
outside them from the spectrum of the sampled gradients.
"""

import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella  # noqa: F401, registers hessian_structure="nystrom"

# A noisy sine with nothing between -1 and 1.
torch.manual_seed(0)
x = torch.cat([torch.linspace(-3, -1, 40), torch.linspace(1, 3, 40)]).unsqueeze(-1)
y = torch.sin(2 * x) + 0.2 * torch.randn_like(x)

model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(1000):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="nystrom")
la.fit(DataLoader(TensorDataset(x, y), batch_size=20))
la.optimize_sigma_noise()  # and the prior precision with it
print(f"noise {la.sigma_noise.item():.3f} (the data have 0.2), ", end="")
print(f"prior precision {la.prior_precision.item():.3g}")
print(f"log evidence {la.log_marginal_likelihood().item():.1f}\n")

grid = torch.linspace(-4, 4, 17).unsqueeze(-1)
lower, upper = la.interval(grid, level=0.95)  # (17, 1) each
print("     x   truth   95 % of new observations")
for point, low, high in zip(grid, lower.squeeze(), upper.squeeze(), strict=True):
    truth = torch.sin(2 * point).item()
    where = "" if ((x - point).abs() < 0.2).any() else "   no data here"
    print(f"{point.item():6.1f}{truth:8.2f}   {low:6.2f} to {high:5.2f}{where}")
