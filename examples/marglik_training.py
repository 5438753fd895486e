"""Online evidence training: weights, prior and noise together, no validation data.

Shows laplace-torch's `marglik_training` with `hessian_structure="nystrom"`: every few
epochs the posterior is fitted anew, and noise and prior precision of each layer follow
the gradient of its evidence. With so few data it is the evidence of exact linearised
Laplace. The script compares it with KFAC's and with fixed hyperparameters.
"""

import laplace
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella

NOISE = 0.3


def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = 6 * torch.rand(n, 1) - 3
    return x, torch.sin(2 * x) + NOISE * torch.randn(n, 1)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(),
                         nn.Linear(50, 1))  # fmt: skip


def scores(mean: torch.Tensor, variance: torch.Tensor) -> dict[str, float]:
    """Test NLL and coverage of the predictive with the learned noise."""
    return laplace_ella.metrics.regression_metrics(mean, variance, y_test)


torch.manual_seed(0)
x, y = sample(60)
x_test, y_test = sample(1000)
loader = DataLoader(TensorDataset(x, y), batch_size=len(x))

rows = {}
for name, structure in {"exact": "nystrom", "KFAC": "kron"}.items():
    la, model, margliks, _ = laplace.marglik_training(
        network(),
        loader,
        "regression",
        hessian_structure=structure,
        # Of several settings make a name: register_structure("mine", n_eigenvalues=64)
        optimizer_kwargs={"lr": 1e-2},
        n_epochs=600,
        n_epochs_burnin=50,
        marglik_frequency=10,
    )
    print(
        f"{name}: log evidence {-margliks[0]:.1f} at first, {-min(margliks):.1f} best"
    )
    priors = ", ".join(f"{p:.2g}" for p in la.prior_precision)
    print(f"  noise {float(la.sigma_noise):.3f} (true {NOISE}), priors {priors}")
    f_mu, f_var = la(x_test)
    variance = f_var.squeeze(-1) + la.sigma_noise**2
    rows[name] = scores(f_mu.detach(), variance.detach())

plain = network()
optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
for _ in range(600):
    optimizer.zero_grad()
    nn.functional.mse_loss(plain(x), y).backward()
    optimizer.step()
error = nn.functional.mse_loss(plain(x), y).item()
rows["no prior, noise by the training error"] = scores(
    plain(x_test).detach(), torch.full_like(y_test, error)
)
for name, row in rows.items():
    print(
        f"{name}: test NLL {row['nll']:.3f}, error {row['rmse']:.3f}, "
        f"95 % intervals cover {row['coverage_95']:.1%}"
    )
