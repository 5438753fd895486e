"""Calibration: how sure the network says it is, and how often it is right.

Noisy digits. Every bar is a group of test images by how sure the prediction was; its
height says how many of them were right. Calibrated bars end at the diagonal.

    python examples/gallery/calibration.py"""

import style
import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import metrics

BINS, FEWEST = 8, 20  # the accuracy of fewer images is mostly noise

args = style.arguments()
torch.manual_seed(0)
images, classes = load_digits(return_X_y=True)
order = torch.randperm(len(images))
x = (torch.tensor(images).float() / 16)[order]
x, y = x + 0.3 * torch.randn_like(x), torch.tensor(classes)[order]
sizes = (100, 100, 300) if args.smoke else (400, 300, 1097)
x_train, x_val, x_test = x[: sum(sizes)].split(sizes)
y_train, y_val, y_test = y[: sum(sizes)].split(sizes)

model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
style.train(model, lambda: nn.functional.cross_entropy(model(x_train), y_train), 300)
la = Laplace(
    model, "classification", "all", "nystrom", n_eigenvalues=128, complement="prior"
)
la.fit(DataLoader(TensorDataset(x_train, y_train), batch_size=100))
la.optimize_calibration(DataLoader(TensorDataset(x_val, y_val), batch_size=100))

probs = {
    "before: the network alone": model(x_test).softmax(-1).detach(),
    "after: Laplace, calibrated": la(x_test).detach(),
}
ece = {name: metrics.ece(p, y_test) for name, p in probs.items()}
with style.drawing(args.out / "calibration.png", size=(7.2, 4.6)) as figure:
    panels = figure.subplots(1, 2, sharey=True)
    for ax, (name, p) in zip(panels, probs.items(), strict=True):
        curve = metrics.reliability_curve(p, y_test, n_bins=BINS)
        bins = zip(curve.confidence, curve.accuracy, curve.count, strict=True)
        for said, right, _ in (group for group in bins if group[-1] >= FEWEST):
            at = {"x": (int(said * BINS) + 0.5) / BINS, "width": 0.9 / BINS}
            bar = ax.bar(height=right, color=style.BLUE, **at)
            gap = ax.bar(height=said - right, bottom=right, hatch="////", **at,
                         color="none", edgecolor=style.ORANGE)  # fmt: skip
        (diagonal,) = ax.plot([0, 1], [0, 1], "k--")
        sure, right = p.max(1).values.mean(), metrics.accuracy(p, y_test)
        text = f"{sure:.0%} sure on average,\n{right:.0%} right"
        ax.text(0.04, 0.97, text, va="top", weight="bold", transform=ax.transAxes)
        ax.set(title=name, xlabel="how sure it says it is", aspect="equal")
        ax.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
        ax.xaxis.set_major_formatter("{x:.0%}")
        ax.yaxis.set_major_formatter("{x:.0%}")
    panels[0].set_ylabel("how often it is right")
    labels = {"is right": bar, "gap to what it says": gap, "calibrated": diagonal}
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=3)
