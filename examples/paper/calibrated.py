"""Calibrated posteriors against temperature scaling, in distribution and corrupted.

    python examples/paper/calibrated.py

ResNet-20 on CIFAR-10 and a small network on digits. Every method's settings are chosen
on the same clean validation images by the same loss, with the link that it is judged
with: none (MAP), τ (temperature scaling), prior and temperature, these and τ
(calibrated), these and the precision outside the basis. `links` compares links. Writes
`results/calibrated/`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.corruptions import CORRUPTIONS, corrupt
from common.data import Images, cifar10_pixels, normalize_cifar
from common.models import cifar_resnet
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import nn

import laplace_ella
from laplace_ella import FeatureCache, metrics

HERE = Path(__file__).parent
PUBLISHED = HERE / "results" / "calibrated"


def posterior(model: nn.Module, train: Images, subset: str, **settings: Any) -> Any:
    la = Laplace(model, "classification", subset, "nystrom", **settings)
    la.fit(train.loader(100))
    return la


def ways(la: Any, last: Any, link: str) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Posterior and search of every method that has them."""

    def prior_and_temperature(la: Any, val: FeatureCache) -> None:
        la.softmax_temperature = 1.0
        la.optimize_temperature(val, link_approx=link, tune_prior=True)

    def calibrated(la: Any, val: FeatureCache, complement: Any = None) -> None:
        if complement is not None:
            la.complement = complement
        outside = complement == 1.0
        la.optimize_calibration(val, link, tune_complement=outside)

    def few(search: Callable[..., Any]) -> Callable[..., Any]:
        def of_few(la: Any, val: FeatureCache) -> None:
            la.complement = "drop"
            search(la, val)

        return of_few

    return {
        "ELLA, complement dropped: prior, T": (la, few(prior_and_temperature)),
        "ELLA, complement dropped: prior, T, τ": (la, few(calibrated)),
        "ELLA, complement at the prior: prior, T, τ": (
            la,
            lambda la, val: calibrated(la, val, "prior"),
        ),
        "ELLA, complement α: prior, T, τ, α": (
            la,
            lambda la, val: calibrated(la, val, 1.0),
        ),
        "last layer (exact): prior, T": (last, prior_and_temperature),
        "last layer (exact): prior, T, τ": (last, calibrated),
    }


def predictions(
    la: Any, last: Any, val: Images, tests: dict[str, Images], links: list[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Class probabilities by method and test set."""

    def caches(one: Any) -> dict[str, FeatureCache]:
        return {
            name: FeatureCache.from_loader(one, images.loader(50))
            for name, images in {"val": val, **tests}.items()
        }

    la.complement = "prior"
    features = {id(la): caches(la), id(last): caches(last)}
    clean = features[id(la)]["val"]
    tau = laplace_ella.temperature_scaling(clean.f_mu, clean.targets)
    probs = {
        f"{name}": {t: (features[id(la)][t].f_mu / s).softmax(-1) for t in tests}
        for name, s in (("MAP", 1.0), ("temperature scaling: τ", tau))
    }
    for link in links:
        for name, (one, search) in ways(la, last, link).items():
            mine = features[id(one)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", laplace_ella.BorderWarning)
                search(one, mine["val"])
            probs[f"{name} ({link})"] = {
                t: one.predict_from_cache(mine[t], link_approx=link, n_samples=512)
                for t in tests
            }
    return probs


def table(
    probs: dict[str, dict[str, torch.Tensor]], groups: dict[str, list[tuple[str, Any]]]
) -> str:
    """NLL/ECE/Brier by method and group of test sets, and the paired difference in NLL
    to temperature scaling with its standard error."""
    lines = [
        "| method: what is chosen (link) | "
        + " | ".join(f"{group} | NLL − temperature scaling's" for group in groups)
        + " |",
        "|---" * (1 + 2 * len(groups)) + "|",
    ]

    def nlls(name: str, tests: list[tuple[str, Any]]) -> torch.Tensor:
        each = [
            -probs[name][t].gather(1, y[:, None]).clamp_min(1e-30).log()
            for t, y in tests
        ]
        return torch.cat(each).double().squeeze(1)

    for name in probs:
        cells = []
        for tests in groups.values():
            p = torch.cat([probs[name][t] for t, _ in tests])
            y = torch.cat([y for _, y in tests])
            each = (metrics.nll(p, y), metrics.ece(p, y), metrics.brier(p, y))
            cells.append("/".join(f"{value:.4f}" for value in each))
            difference = nlls(name, tests) - nlls("temperature scaling: τ", tests)
            error = float(difference.std()) / len(difference) ** 0.5
            cells.append(f"{float(difference.mean()):+.4f} ± {error:.4f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def resnet(args: argparse.Namespace) -> str:
    model = cifar_resnet("resnet20", args.data)
    pixels, classes = cifar10_pixels(args.data, "train")
    n = args.n_fit
    train = Images(normalize_cifar(pixels[:n]), torch.as_tensor(classes[:n]).long())
    pixels, classes = cifar10_pixels(args.data, "test")
    y = torch.as_tensor(classes).long()
    first, last_ = args.n_val, args.n_val + args.n_test
    val = Images(normalize_cifar(pixels[:first]), y[:first])
    tests = {"clean": Images(normalize_cifar(pixels[first:last_]), y[first:last_])}
    shown = slice(last_, last_ + args.n_corrupted)
    names = list(CORRUPTIONS)[:: max(1, len(CORRUPTIONS) // args.n_types)]
    groups = {"clean": [("clean", tests["clean"].y)]}
    for severity in args.severities:
        groups[f"severity {severity}"] = []
        for name in names[: args.n_types]:
            key = f"{name}_{severity}"
            x = normalize_cifar(corrupt(pixels[shown], name, severity))
            tests[key] = Images(x, y[shown])
            groups[f"severity {severity}"].append((key, y[shown]))
    M, K = args.n_samples, args.rank
    la = posterior(
        model, train, "all", subsample_size=M, n_eigenvalues=K, complement="prior"
    )
    last = posterior(
        model, train, "last_layer", n_eigenvalues="exact", subsample_size=M
    )
    head = (
        f"ResNet-20, CIFAR-10: M = {M}, K = {K}, N = {n}; settings chosen on "
        f"{len(val)} test images, NLL/ECE/Brier on {len(tests['clean'])} others and on "
        f"{args.n_corrupted} more with {args.n_types} types of corruption each.\n\n"
    )
    return head + table(predictions(la, last, val, tests, args.links), groups)


def noisy_digits() -> tuple[Images, Images, Images]:
    """Training, validation and test digits, with pixel noise."""
    data, target = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(target))
    x = torch.tensor(data[order] / 16).float()
    x = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    y = torch.tensor(target[order])
    parts = slice(0, 300), slice(300, 600), slice(600, None)
    train, val, test = (Images(x[part], y[part]) for part in parts)
    return train, val, test


def small_network(train: Images, steps: int, act: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 50), act(), nn.Linear(50, 50), act(), nn.Linear(50, 10)
    )
    adam = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-5)
    for _ in range(steps):
        adam.zero_grad()
        nn.functional.cross_entropy(model(train.x), train.y).backward()
        adam.step()
    return model.eval()


def links(args: argparse.Namespace) -> str:
    """NLL by link, with prior 1 as it is and calibrated for the link, and the share of
    the variance that is a common shift of all logits."""
    train, val, test = noisy_digits()
    nets = {
        f"digits, MLP with {act.__name__}": (
            small_network(train, args.steps, act),
            (train, val, test),
        )
        for act in (nn.ReLU, nn.Tanh)
    }
    pixels, classes = cifar10_pixels(args.data, "train")
    y = torch.as_tensor(classes[: args.n_fit]).long()
    images = [Images(normalize_cifar(pixels[: args.n_fit]), y)]
    pixels, classes = cifar10_pixels(args.data, "test")
    for start in (0, args.n_val):
        part = slice(start, start + args.n_val)
        x = normalize_cifar(pixels[part])
        images.append(Images(x, torch.as_tensor(classes[part]).long()))
    nets["CIFAR-10, ResNet-20"] = cifar_resnet("resnet20", args.data), tuple(images)
    names = ("probit", "probit_centered", "mc")
    lines = [
        "| K = 20, prior 1 | common shift | "
        + " | ".join([*names, *(f"{n}, calibrated" for n in names)])
        + " |",
        "|---" * 8 + "|",
    ]
    for name, (model, parts) in nets.items():
        la = posterior(model, parts[0], "all", n_eigenvalues=20)
        val_cache, cache = (
            FeatureCache.from_loader(la, p.loader(50)) for p in parts[1:]
        )
        factor = cache.phi.double() @ la.posterior.scale
        total = factor.square().sum()
        shift = factor.mean(1).square().sum() * factor.shape[1] / total
        cells = []
        for calibrate in (False, True):
            for link in names:
                la.prior_precision, la.temperature, la.softmax_temperature = 1, 1, 1
                if calibrate:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", laplace_ella.BorderWarning)
                        la.optimize_calibration(val_cache, link)
                p = la.predict_from_cache(cache, link_approx=link, n_samples=512)
                cells.append(f"{metrics.nll(p, cache.targets):.4f}")
        lines.append(f"| {name} | {float(shift):.0%} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def digits(args: argparse.Namespace) -> str:
    """A small network, 300 training images, pixel noise as shift."""
    train, val, test = noisy_digits()
    model = small_network(train, args.steps, nn.Tanh)
    more = test.x + 0.3 * torch.randn(
        test.x.shape, generator=torch.Generator().manual_seed(1)
    )
    tests = {"clean": test, "noise": Images(more, test.y)}
    la = posterior(
        model,
        train,
        "all",
        subsample_size=3000,
        n_eigenvalues=args.rank,
        complement="prior",
    )
    last = posterior(model, train, "last_layer", n_eigenvalues="exact")
    groups = {
        "like the validation data": [("clean", test.y)],
        "more noise": [("noise", test.y)],
    }
    head = (
        f"Digits with pixel noise, MLP 64-50-50-10: 300 training images, K = "
        f"{la.rank}; settings chosen on 300 images, NLL/ECE/Brier on {len(test)}.\n\n"
    )
    return head + table(predictions(la, last, val, tests, args.links), groups)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("LAPLACE_ELLA_DATA", str(HERE / "data"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--out", type=Path, default=PUBLISHED)
    parser.add_argument("--n-fit", type=int, default=1500)
    parser.add_argument("--n-val", type=int, default=800)
    parser.add_argument("--n-test", type=int, default=1500)
    parser.add_argument("--n-corrupted", type=int, default=300)
    parser.add_argument("--n-types", type=int, default=10)
    parser.add_argument("--severities", type=int, nargs="*", default=[3, 5])
    parser.add_argument("--n-samples", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--links", nargs="*", default=["mc", "probit_centered"])
    parser.add_argument("--only", choices=["digits", "links", "resnet20"], default=None)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    args = parser.parse_args(argv)
    if args.smoke:
        args.n_fit, args.n_val, args.n_test, args.n_corrupted = 20, 20, 20, 10
        args.n_types, args.n_samples, args.rank, args.steps = 1, 20, 5, 20
        args.severities, args.links = [3], ["probit_centered"]
        if args.out == PUBLISHED:  # a small run does not write over results
            args.out = Path(tempfile.mkdtemp())
    args.out.mkdir(parents=True, exist_ok=True)
    studies = {"digits": digits, "links": links, "resnet20": resnet}
    for name, study in studies.items():
        if args.only in (None, name):
            text = study(args)
            (args.out / f"{name}.md").write_text(text)
            print(text, flush=True)


if __name__ == "__main__":
    main()
