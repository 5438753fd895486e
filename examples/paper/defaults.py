"""What the defaults give, against other settings, where nothing else is set.

Regression (UCI, random splits): `fit`, then noise and prior by the evidence
(`optimize_sigma_noise`) and, as the family's own flow has it, the prior alone
(`optimize_prior_precision`). Classification (digits, CIFAR-10 with ResNet-20): `fit`,
then `optimize_prior_precision`, predictions by the default link. Writes
`results/defaults/README.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from common.data import cifar10
from common.mlp import mlp, train
from common.models import cifar_resnet
from common.uci import UCI, load, random_split
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
from laplace_ella import metrics

HERE = Path(__file__).parent

#: Keyword arguments of Laplace(..., "all", "nystrom", ...); {} is what a user writes.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "the paper's": laplace_ella.PAPER,
    "K = 20": {"n_eigenvalues": 20},
    "K = 20, complement kept": {"n_eigenvalues": 20, "complement": "prior"},
    "K = 128, complement dropped": {"n_eigenvalues": 128, "complement": "drop"},
    "exact": {"n_eigenvalues": "exact"},
}


def regression(x, y, x_test, y_test, steps: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    model = mlp(x.shape[1], 1)
    train(model, x, y, nn.functional.mse_loss, steps)
    loader = DataLoader(TensorDataset(x, y), batch_size=128)
    rows = {}
    for name, settings in SETTINGS.items():
        la = Laplace(model, "regression", "all", "nystrom", **settings)
        la.fit(loader)
        row = {"K": la.rank}
        for flow, tune in (
            ("noise", la.optimize_sigma_noise),
            ("prior", la.optimize_prior_precision),
        ):
            if flow == "prior":
                la.sigma_noise = 1.0
            tune()
            mean, var = la(x_test, diagonal_output=True)
            total = var + la.sigma_noise**2
            row[f"nll_{flow}"] = metrics.gaussian_nll(mean, total, y_test)
            coverage = metrics.interval_coverage(mean, total.sqrt(), y_test, [0.95])
            row[f"coverage_{flow}"] = coverage[0]
        rows[name] = row
    return rows


def classification(model, train_loader, x_test, y_test, names) -> dict[str, Any]:
    rows = {}
    with torch.no_grad():
        logits = torch.cat([model(part) for part in x_test.split(100)])
    probs = logits.softmax(-1)
    nll, ece = metrics.nll(probs, y_test), metrics.ece(probs, y_test)
    rows["MAP"] = {"K": math.nan, "nll_probit": nll, "ece_probit": ece}
    test_loader = DataLoader(TensorDataset(x_test, y_test), batch_size=50)
    for name in names:
        la = Laplace(model, "classification", "all", "nystrom", **SETTINGS[name])
        la.fit(train_loader)
        la.optimize_prior_precision()
        rows[name] = {"K": la.rank}
        cache = laplace_ella.FeatureCache.from_loader(la, test_loader)
        for link in ("probit", "mc"):
            probs = la.predict_from_cache(cache, link_approx=link, n_samples=512)
            rows[name][f"nll_{link}"] = metrics.nll(probs, y_test)
            rows[name][f"ece_{link}"] = metrics.ece(probs, y_test)
    return rows


def digits(steps: int) -> dict[str, Any]:
    from sklearn.datasets import load_digits

    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    torch.manual_seed(0)
    model = mlp(64, 10)
    train(model, x[:240], y[:240], nn.functional.cross_entropy, steps)
    loader = DataLoader(TensorDataset(x[:240], y[:240]), batch_size=80)
    return classification(model, loader, x[1000:], y[1000:], SETTINGS)


def cifar(data: Path, n_train: int, n_test: int) -> dict[str, Any]:
    model = cifar_resnet("resnet20", data)
    fit, test = cifar10(data, "train")[:n_train], cifar10(data, "test")[:n_test]
    names = ["default", "K = 20, complement kept"]
    return classification(model, fit.loader(64), test.x, test.y, names)


def table(title: str, rows: dict[str, dict[str, float]]) -> str:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [
        f"| {title} | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, row in rows.items():
        cells = [
            "" if math.isnan(row.get(c, math.nan)) else f"{row[c]:.4g}" for c in columns
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def short(results: dict[str, Any]) -> str:
    """Regression in one table: NLL and coverage, noise and prior by the evidence."""
    names = ["default", "the paper's", "K = 20", "K = 20, complement kept"]
    lines = ["| test NLL (coverage of 95 % intervals) | " + " | ".join(names) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for data, rows in results.items():
        if "nll_noise" in rows["default"]:
            cells = [
                f"{rows[n]['nll_noise']:.2f} ({rows[n]['coverage_noise']:.2f})"
                for n in names
            ]
            lines.append(f"| {data} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="one small data set")
    args = parser.parse_args()
    if args.out is None:  # a small run does not write over published results
        published = HERE / "results" / "defaults"
        args.out = Path(tempfile.mkdtemp()) if args.smoke else published
    data = Path(os.environ["LAPLACE_ELLA_DATA"])
    steps = 50 if args.smoke else 2000
    results = {
        f"{name} (UCI)": regression(*random_split(load(data, name), 0), steps)
        for name in UCI[: 1 if args.smoke else 5]  # protein has too many
    }
    results["digits (240 images)"] = digits(steps)
    results["CIFAR-10 (ResNet-20)"] = cifar(
        data, *((20, 20) if args.smoke else (1000, 1000))
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    text = "\n\n".join(table(name, rows) for name, rows in results.items())
    command = "python examples/paper/defaults.py"
    notes = (
        "`nll_noise`, `coverage_noise`: after `optimize_sigma_noise()`; `..._prior`: "
        "after `optimize_prior_precision()` with `sigma_noise=1`, as the constructor "
        'has it. Targets are standardised. `coverage`: of 95 % intervals. "K = 20" '
        'has the matched complement in regression, none in classification; "kept" is '
        "at the prior."
    )
    (args.out / "short.md").write_text(short(results))
    page = f"# Defaults\n\nWritten by `{command}`. {notes}\n\n{text}\n"
    (args.out / "README.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
