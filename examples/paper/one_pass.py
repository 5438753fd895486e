"""Can a head on the network's own activations predict the variance in one pass?

    python examples/paper/one_pass.py

The log of the mean variance of the logits, by ELLA on ResNet-20, is what a head is
fitted to, on test images without their labels; other test images, and the same with
corruptions, tell how much of its variance the head explains. Ridge, kernel ridge and a
small network, each on several sets of activations that a forward pass has anyhow. The
last columns have the share of inputs that the head would hand over to exact features:
those farther from their nearest fitted neighbour than 95 % of clean images are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import runs
from common.corruptions import CORRUPTIONS, corrupt
from common.data import cifar10, cifar10_pixels, normalize_cifar
from common.models import ResNet, cifar_resnet
from laplace import Laplace
from torch import nn

#: Share of clean images that a threshold of distances lets pass.
PASSED = 0.95

#: Strengths of ridge, and widths of the Gaussian kernel in median distances.
RIDGES = [10.0**power for power in range(-6, 5)]
WIDTHS = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Sizes:
    """Images that the posterior is fitted on, the head is fitted on, and of each test
    set; gradients M and directions K."""

    posterior: int = 300
    head: int = 1500
    test: int = 300
    M: int = 600
    K: int = 20


def image_sets(root: Any, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Inputs to fit the head on, clean ones, and some with every corruption."""
    pixels, _ = cifar10_pixels(root, "test")
    fitted = pixels[: sizes.head]
    held_out = pixels[sizes.head : sizes.head + sizes.test]
    sets = {"fitted": fitted, "clean": held_out}
    names = list(CORRUPTIONS)
    for severity in (1, 3, 5):
        parts = [
            corrupt(held_out[i :: len(names)], name, severity)
            for i, name in enumerate(names)
            if len(held_out[i :: len(names)])
        ]
        sets[f"severity {severity}"] = torch.cat(
            [torch.as_tensor(part) for part in parts]
        ).numpy()
    return {name: normalize_cifar(part) for name, part in sets.items()}


def activations(model: ResNet, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sets of activations `(B, features)` of one forward pass."""
    pooled: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        pooled.append(output.mean((2, 3)))
        pooled.append(output.pow(2).mean((2, 3)))

    stages = (model.layer1, model.layer2, model.layer3)
    handles = [b.register_forward_hook(keep) for stage in stages for b in stage]
    try:
        with torch.no_grad():
            f = model(x)
    finally:
        for handle in handles:
            handle.remove()
    ordered = f.log_softmax(-1).sort(-1, descending=True).values
    outputs = torch.cat([f, f.softmax(-1), ordered, ordered.exp()], 1)
    penultimate, blocks = pooled[-2], torch.cat(pooled, 1)
    return {
        "logits and probabilities": outputs,
        "penultimate layer": penultimate,
        "penultimate layer and outputs": torch.cat([penultimate, outputs], 1),
        "all blocks": blocks,
        "all blocks and outputs": torch.cat([blocks, outputs], 1),
    }


def log_variances(args: Any, sizes: Sizes, sets: dict[str, torch.Tensor]) -> Any:
    """The log of the mean variance of the logits `(N,)` of every set."""
    path = args.cache_dir / f"one_pass_{sizes}.pt".replace(" ", "")
    if path.exists():
        return torch.load(path, weights_only=True)
    model = cifar_resnet("resnet20", args.data_root)
    la = Laplace(
        model,
        "classification",
        "all",
        "nystrom",
        n_eigenvalues=sizes.K,
        subsample_size=sizes.M,
        prior_precision=1.0,
        feature_mode="reverse",
        row_mode="vmap",
    )
    la.fit(cifar10(args.data_root, "train")[: sizes.posterior].loader())
    logs = {}
    for name, x in sets.items():
        covariances = [la._glm_predictive_distribution(part)[1] for part in x.split(48)]
        variances = [c.diagonal(dim1=1, dim2=2).mean(1) for c in covariances]
        logs[name] = torch.cat(variances).log()
        print(name, flush=True)
    torch.save(logs, path)
    return logs


# Heads: each is fitted to standardised activations X (N, F) and centred targets (N,)

Head = Callable[[torch.Tensor], torch.Tensor]


def halves(n: int) -> tuple[slice, slice]:
    """Four fifths to fit with, one fifth to choose with."""
    return slice(0, 4 * n // 5), slice(4 * n // 5, n)


def ridge(X: torch.Tensor, y: torch.Tensor) -> Head:
    fit, choose = halves(len(X))

    def weights(part: slice, strength: float) -> torch.Tensor:
        A = X[part].T @ X[part] + strength * torch.eye(X.shape[1], dtype=X.dtype)
        return torch.linalg.solve(A, X[part].T @ y[part])

    def error(strength: float) -> float:
        left = X[choose] @ weights(fit, strength) - y[choose]
        return float(left.square().mean())

    w = weights(slice(0, len(X)), min(RIDGES, key=error))
    return lambda new: new @ w


def kernel_ridge(X: torch.Tensor, y: torch.Tensor) -> Head:
    fit, choose = halves(len(X))
    median = float(torch.cdist(X[:200], X[:200]).median())

    def kernel(a: torch.Tensor, b: torch.Tensor, width: float) -> torch.Tensor:
        return (-0.5 * (torch.cdist(a, b) / (width * median)).square()).exp()

    def weights(part: slice, width: float, strength: float) -> torch.Tensor:
        A = kernel(X[part], X[part], width)
        A = A + strength * torch.eye(len(A), dtype=A.dtype)
        return torch.linalg.solve(A, y[part])

    def error(setting: tuple[float, float]) -> float:
        width, strength = setting
        predicted = kernel(X[choose], X[fit], width) @ weights(fit, width, strength)
        return float((predicted - y[choose]).square().mean())

    width, strength = min(((w, s) for w in WIDTHS for s in RIDGES[3:7]), key=error)
    w = weights(slice(0, len(X)), width, strength)
    return lambda new: kernel(new, X, width) @ w


def network(X: torch.Tensor, y: torch.Tensor, steps: int = 600) -> Head:
    """Two hidden layers, stopped where the fifth to choose with is predicted best;
    the mean of three."""
    fit, choose = halves(len(X))
    heads = []
    for seed in range(3):
        torch.manual_seed(seed)
        head = nn.Sequential(
            nn.Linear(X.shape[1], 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()
        ).append(nn.Linear(64, 1))
        head = head.to(X.dtype)
        optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.1)
        best, state = float("inf"), head.state_dict()
        for step in range(steps):
            index = torch.randint(fit.stop, (128,))
            optimizer.zero_grad()
            (head(X[index])[:, 0] - y[index]).square().mean().backward()
            optimizer.step()
            if step % 20 == 19:
                with torch.no_grad():
                    left = head(X[choose])[:, 0] - y[choose]
                if (error := float(left.square().mean())) < best:
                    best = error
                    state = {k: v.clone() for k, v in head.state_dict().items()}
        head.load_state_dict(state)
        heads.append(head.requires_grad_(False))
    return lambda new: torch.stack([head(new)[:, 0] for head in heads]).mean(0)


HEADS = {"ridge": ridge, "kernel ridge": kernel_ridge, "network": network}


def explained(predicted: torch.Tensor, y: torch.Tensor) -> float:
    """Explained share of the variance of y."""
    return float(1 - (predicted - y).square().mean() / y.var(unbiased=False))


def nearest(X: torch.Tensor, others: torch.Tensor, own: bool = False) -> torch.Tensor:
    """Distance to the nearest of the others, `(N,)`, without itself."""
    return torch.cdist(X, others).topk(1 + own, largest=False).values[:, -1]


def rows_of(args: Any, sizes: Sizes) -> list[dict[str, Any]]:
    sets = image_sets(args.data_root, sizes)
    targets = log_variances(args, sizes, sets)
    model = cifar_resnet("resnet20", args.data_root)
    inputs = {name: activations(model, x) for name, x in sets.items()}
    y = targets["fitted"].double()
    rows = []
    for kind, fitted in inputs["fitted"].items():
        mean, std = fitted.mean(0), fitted.std(0).clamp_min(1e-6)

        def scaled(name: str, kind=kind, mean=mean, std=std) -> torch.Tensor:
            return ((inputs[name][kind] - mean) / std).double()

        X = scaled("fitted")
        limit = nearest(X, X, own=True).quantile(PASSED)
        for way, fit in HEADS.items():
            head = fit(X, y - y.mean())
            row: dict[str, Any] = {"activations": f"{kind} ({X.shape[1]})", "way": way}
            for name in sets:
                new = targets[name].double()
                predicted = head(scaled(name)) + y.mean()
                if name != "fitted":
                    far = nearest(scaled(name), X) > limit
                    row[name] = explained(predicted, new)
                    row[f"{name} far"] = float(far.double().mean())
            rows.append(row)
            print(row, flush=True)
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = runs.start(runs.arguments("one_pass", __doc__), argv)
    sizes = Sizes(20, 40, 20, 20, 3) if args.smoke else Sizes()
    rows = rows_of(args, sizes)
    sets = ("clean", "severity 1", "severity 3", "severity 5")
    columns = {"activations": "activations (how many)", "way": "head"}
    columns |= {name: f"{name}: explained" for name in sets}
    columns |= {f"{name} far": f"{name}: handed over" for name in sets}
    note = (
        f"Log of the mean variance of the logits, K = {sizes.K}, M = {sizes.M:,}; "
        f"heads fitted on {sizes.head:,} test images, {sizes.test:,} others held "
        "out.\n\n"
    )
    table = note + runs.markdown(rows, columns, dict.fromkeys(columns, ".2f"))
    (args.out / "one_pass.md").write_text(table)
    runs.write_environment(args.out / "environment.json", args)
    print(table)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
