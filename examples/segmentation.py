"""Segmentation: maps of aleatoric and epistemic uncertainty.

Shows `output_layout` for logits of shape (B, C, H, W), the target -100 for pixels
without a label, and `decompose`, which splits the uncertainty of every pixel into the
noise of the data (aleatoric) and the uncertainty of the weights (epistemic).
"""

import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella


def scenes(n: int, brightness: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images (n, 1, 16, 16) of a square, and its mask (n, 16, 16)."""
    mask = torch.zeros(n, 16, 16, dtype=torch.long)
    for scene in mask:
        row, column = torch.randint(0, 10, (2,))
        scene[row : row + 6, column : column + 6] = 1
    return (brightness * mask + 0.5 * torch.randn(n, 16, 16)).unsqueeze(1), mask


torch.manual_seed(0)
x, y = scenes(30)
y[:, 0] = -100  # nobody labelled the first row: it counts for nothing
model = nn.Sequential(
    nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(),
    nn.Conv2d(8, 2, 1),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(150):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

la = Laplace(
    model,
    "classification",
    subset_of_weights="all",
    hessian_structure="nystrom",
    output_layout="channels_first",
    subsample_size=500,
)
la.fit(DataLoader(TensorDataset(x, y), batch_size=20))

# Squares as in training, and squares half as bright, which the network never saw.
bright, dim = scenes(50)[0], scenes(50, brightness=0.5)[0]
parts = {
    "bright": laplace_ella.decompose(la, bright),  # every part (50, 16, 16)
    "dim": laplace_ella.decompose(la, dim),
}
probs = la(dim, link_approx="mc")  # (50, 2, 16, 16)


def picture(values: torch.Tensor) -> list[str]:
    """Rows (16,) of characters, dark for 0 and bright for the maximum."""
    levels = (values / values.max() * 9).round().long()
    return ["".join(" .:-=+*#%@"[level] for level in row) for row in levels.tolist()]


titles = ("image", "P(square)", "aleatoric", "epistemic")
first = parts["dim"].aleatoric[0], parts["dim"].epistemic[0]
maps = (dim[0, 0].clamp(0), probs[0, 1], *first)
print("  ".join(f"{title:16}" for title in titles))
for rows in zip(*map(picture, maps), strict=True):
    print("  ".join(rows))
print("\nmean over 50 images, in nats per pixel:")
for name, part in parts.items():
    share = part.epistemic.mean() / part.total.mean()
    print(f"{name:6} squares: total {part.total.mean():.4f}, of which ", end="")
    print(f"epistemic {part.epistemic.mean():.4f} ({share:.0%})")
