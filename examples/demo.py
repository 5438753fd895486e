"""The demo: three questions about a trained network, on data of scikit-learn.

    python examples/demo.py [folder]     # or: make demo; under two minutes on two cores

1. Few data and none to spare for validation: breast cancer, by a small network.
2. Regression with a gap in the data: a curve with one input, and diabetes.
3. A convolutional network with BatchNorm, and validation data to calibrate on.

Tables and two figures are written into the folder. Conclusions are computed from them.
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from laplace import Laplace
from sklearn import datasets
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import Report, available_methods, compare, plotting

KNOWN = available_methods()
K20 = {**KNOWN["exact"].kwargs, "n_eigenvalues": 20}
#: The members of the family by the names in the tables; `ours` are this package's.
FAMILY = {
    "MAP": KNOWN["map"],
    "KFAC": KNOWN["kron"],
    "diag": KNOWN["diag"],
    "last layer": KNOWN["last-layer-full"],
    "laplace-torch's ELLA": KNOWN["gp-ella"],
    "ours, exact": KNOWN["exact"],
    "ours, K = 20": replace(KNOWN["exact"], kwargs=K20),
}
SCALING = "temperature scaling (needs validation data)"
NOISE = 0.2  # of the curve
HEAD = """# The demo's tables

`make demo` writes these tables, with the times of your machine. Classification: link
probit; regression: all rows have the noise that exact Laplace chose. A star marks the
rows that are not significantly worse than the best of those tuned on the same data. KL
is the divergence from exact linearised Laplace.

"""
FIGURES = """![Intervals of four posteriors around a gap](gap.png)

![Test NLL against the time of predictions](cost.png)
"""
STARTED = time.perf_counter()


def say(text: str) -> None:
    """Print one line with the seconds so far; a log file keeps it as it is."""
    print(f"[{time.perf_counter() - STARTED:4.0f} s] {text}", flush=True)


def train(model: nn.Module, x, y, loss, steps: int, decay: float = 0.0) -> nn.Module:
    """Minimise the mean loss by Adam with all data at once."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def mlp(n_in: int, n_out: int, act: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(n_in, 20), act(), nn.Linear(20, 20), act(),
                         nn.Linear(20, n_out))  # fmt: skip


def loader(x: torch.Tensor, y: torch.Tensor) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=100)


def run(*data, methods: dict | None = None, **options) -> Report:
    """Call `compare` as all three parts do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes of the report tell what matters
        return compare(*data, methods=methods or FAMILY, links=["probit"],
                       progress_bar=False, **options)  # fmt: skip


def verdict(report: Report) -> str:
    """Compare our better row with the best other one, and with temperature scaling."""
    rows = {row.method: row for row in report.rows() if row.ok}
    scaling = [name for name in rows if name == SCALING]
    others = [name for name in rows if not name.startswith("ours")]
    mine = min(rows.keys() - others, key=lambda name: rows[name].mean["nll"])
    best = min(set(others) - {SCALING}, key=lambda name: rows[name].mean["nll"])
    said = [f"{mine}: NLL {rows[mine].mean['nll']:.3f}"]
    for other in (best, *scaling):
        draws = [torch.tensor(rows[n].replicates["nll"]) for n in (mine, other)]
        half = 1.96 * float((draws[0] - draws[1]).std())  # a paired bootstrap
        difference = rows[mine].mean["nll"] - rows[other].mean["nll"]
        than = "lower than" if difference < 0 else "higher than"
        clear = than if abs(difference) > half else "not clearly different from"
        said.append(f"{clear} {other} ({difference:+.3f} ± {half:.3f})")
    return ", ".join(said) + "."


def show(report: Report, columns: list[str], title: str, folder: Path) -> None:
    """Print and write a table, and one sentence on it."""
    rows = report.table([name for name in columns if name in report.columns])
    kept = [i for i, name in enumerate(rows[0]) if name != "link"]  # always probit
    rows.insert(1, ["---"] * len(rows[0]))
    table = "\n".join(f"| {' | '.join(row[i] for i in kept)} |" for row in rows)
    print(f"\n**{title}**\n\n{table}\n", flush=True)
    with (folder / "tables.md").open("a") as file:
        file.write(f"**{title}**\n\n{table}\n\n{verdict(report)}\n\n")
    say(verdict(report))


def few_data(folder: Path) -> None:
    """Classify tumours from 100 examples, with nothing held out."""
    data = datasets.load_breast_cancer(return_X_y=True)
    inputs, classes = (torch.tensor(part) for part in data)
    found = []
    for seed in range(3):  # three splits of the data, three networks
        torch.manual_seed(seed)
        order = torch.randperm(len(inputs))
        x, y = inputs.float()[order], classes[order]
        x = (x - x[:100].mean(0)) / x[:100].std(0)
        model = mlp(30, 2, nn.ReLU)
        train(model, x[:100], y[:100], nn.functional.cross_entropy, 1000)
        parts = slice(100), slice(100, 150), slice(150, None)
        fit, spared, test = (loader(x[part], y[part]) for part in parts)
        data = model, "classification", fit, test
        # These 50 labels are data that the other rows do not have.
        scaled = run(*data, spared, methods={SCALING: KNOWN["temperature"]})
        found += [replace(r, seed=seed) for r in (*run(*data), *scaled)]
    report = Report(found, "classification")
    title = "1. Few data: breast cancer, 100 examples, nothing held out; 3 splits"
    show(report, ["accuracy", "nll", "ece", "fit_s", "tune_s"], title, folder)


def draw_gap(path: Path) -> None:
    """Draw the intervals of four posteriors of one network."""
    torch.manual_seed(0)
    x = torch.cat([-2.6 + 1.6 * torch.rand(20, 1), 1.0 + 1.6 * torch.rand(20, 1)])
    y = torch.sin(2 * x) + NOISE * torch.randn_like(x)
    model = train(mlp(1, 1), x, y, nn.functional.mse_loss, 1000, 1e-3)
    grid = torch.linspace(-4, 4, 200).unsqueeze(1)
    names = ("MAP", "last layer", "KFAC", "ours, exact")
    figure, panels = plt.subplots(1, 4, figsize=(13, 3), sharey=True, layout="tight")
    for ax, name in zip(panels, names, strict=True):
        mean, variance = model(grid).detach(), torch.zeros(200)
        if name != "MAP":
            la = Laplace(model, "regression", sigma_noise=NOISE, **FAMILY[name].kwargs)
            la.fit(loader(x, y))
            la.optimize_prior_precision(method="marglik")
            mean, variance = (part.detach() for part in la(grid))
        std = (variance.flatten() + NOISE**2).sqrt()
        known = {"train": (x, y), "truth": torch.sin(2 * grid)}
        plotting.plot_regression(grid, mean, std, ax, title=name, **known)
        ax.set_ylim(-5, 5)
    figure.savefig(path, dpi=110)


def gap(folder: Path) -> None:
    """Predict in a gap of the data, and outside of it."""
    draw_gap(folder / "gap.png")
    data = datasets.load_diabetes(return_X_y=True)
    x, y = (torch.tensor(part).float() for part in data)
    x, y = (x / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1))
    low, inside, high = x[:, 2].argsort().tensor_split(3)  # by the body mass index
    torch.manual_seed(0)
    outside = torch.cat([low, high])[torch.randperm(len(low) + len(high))]
    fit, rest = outside[:200], outside[200:]
    model = train(mlp(10, 1), x[fit], y[fit], nn.functional.mse_loss, 300, 1e-3)
    la = Laplace(model, "regression", **FAMILY["ours, exact"].kwargs)
    la.fit(loader(x[fit], y[fit]))
    la.optimize_sigma_noise()  # by the evidence; all rows have this noise
    columns = ["nll", "coverage_95", "width_95", "kl_to_lla", "fit_s", "predict_s"]
    for where, rows in (("inside the gap", inside), ("outside of it", rest)):
        data = model, "regression", loader(x[fit], y[fit]), loader(x[rows], y[rows])
        report = run(*data, reference="full", sigma_noise=la.sigma_noise.item())
        title = f"2. Diabetes, body mass index with a gap: {len(rows)} tests {where}"
        show(report, columns, title, folder)


def calibrated(folder: Path) -> None:
    """Calibrate a CNN with BatchNorm on validation data."""
    x, y = datasets.load_digits(return_X_y=True)
    torch.manual_seed(0)
    x = torch.tensor(x).float().reshape(-1, 1, 8, 8) / 16
    x, order = x + 0.35 * torch.randn_like(x), torch.randperm(len(x))
    x, y = x[order], torch.tensor(y)[order]
    cnn = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    train(cnn, x[:300], y[:300], nn.functional.cross_entropy, 100)
    rows = slice(300), slice(300, 600), slice(600, 1300)
    fit, val, test = (loader(x[part], y[part]) for part in rows)
    methods = {"MAP": KNOWN["map"], SCALING: KNOWN["temperature"]}
    for name in ("KFAC", "diag", "last layer", "ours, K = 20"):
        methods[name] = replace(FAMILY[name], tune="calibration")
    methods["laplace-torch's ELLA"] = KNOWN["gp-ella"]
    report = run(cnn, "classification", fit, test, val, methods=methods)
    title = "3. Noisy digits, a CNN with BatchNorm, calibrated on 300 images"
    show(report, ["accuracy", "nll", "ece", "fit_s", "predict_s"], title, folder)
    figure, ax = plt.subplots(figsize=(9, 3.5), layout="tight")
    plotting.plot_cost_quality(report, ax)
    figure.savefig(folder / "cost.png", dpi=110)


def main() -> None:
    folder = Path(*sys.argv[1:2] or ["demo"])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # tensors so small gain nothing from more
    (folder / "tables.md").write_text(HEAD)
    for number, part in enumerate((few_data, gap, calibrated), start=1):
        say(f"part {number} of 3: {part.__doc__}")
        part(folder)
    with (folder / "tables.md").open("a") as file:
        file.write(FIGURES)
    say(f"tables and figures are in {folder.resolve()}")


if __name__ == "__main__":
    main()
