"""Adapters: a posterior over the weights that were fine-tuned.

The posterior covers the parameters that require gradients, or those that
`parameter_names` lists; its cost decreases with their number. Here a network that was
trained on one task is frozen, and low-rank adapters (LoRA) and a head are trained on
another. The script compares posteriors over the adapters, the head, and both.
"""

import copy

import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella  # noqa: F401, registers hessian_structure="nystrom"
from laplace_ella import metrics


class LoRA(nn.Module):
    """A frozen linear layer plus a low-rank correction that is trained."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # starts as the frozen layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, n_steps: int) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=1e-2)
    for _ in range(n_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


# A large data set for the body, and a small one of a related task: other labels.
torch.manual_seed(0)
x = torch.randn(2400, 10)
angle = torch.atan2(x[:, 0] + 0.5 * torch.randn(2400), x[:, 1])
old, new = (angle > 0).long(), ((angle + 1.5).div(2.1).floor() % 3).long()
body = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
train(nn.Sequential(body, nn.Linear(128, 2)), x[:2000], old[:2000], 100)

body = copy.deepcopy(body)
body[0], body[2] = LoRA(body[0]), LoRA(body[2])
model = nn.Sequential(body, nn.Linear(128, 3))
train(model, x[:150], new[:150], 100)
train_loader = DataLoader(TensorDataset(x[:150], new[:150]), batch_size=50)
val_loader = DataLoader(TensorDataset(x[2000:2200], new[2000:2200]), batch_size=50)
x_test, y_test = x[2200:], new[2200:]

print(f"{'posterior of':24}{'parameters':>11}{'NLL':>8}{'ECE':>8}")
with torch.no_grad():
    probs = model(x_test).softmax(-1)
rows = {"nothing (MAP)": (0, metrics.classification_metrics(probs, y_test))}
for label, names in {
    "adapters and head": None,  # all that require gradients
    "adapters": ["*.down.*", "*.up.*"],
    "head": ["1.*"],
}.items():
    la = Laplace(model, "classification", "all", "nystrom", parameter_names=names)
    la.fit(train_loader)
    la.optimize_prior_precision(method="gridsearch", val_loader=val_loader)
    rows[label] = la.n_params, metrics.classification_metrics(la(x_test), y_test)
for label, (n_params, scores) in rows.items():
    print(f"{label:24}{n_params:11,}{scores['nll']:8.3f}{scores['ece']:8.3f}")
total = sum(p.numel() for p in model.parameters())
print(f"\nThe network has {total:,} weights; the frozen ones cost a forward pass only.")
