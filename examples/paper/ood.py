"""Out-of-distribution inputs: error against confidence, AUROC (Fig. 4a of the paper).

    python examples/paper/ood.py --pair mnist
    python examples/paper/ood.py --pair cifar10

'mnist' is the paper's MNIST network on MNIST and Fashion-MNIST; 'cifar10' is ResNet-20
on CIFAR-10 and SVHN if torchvision finds it below --data-root, otherwise Fashion-MNIST
resized to 32×32. Predictions on the second set all count as wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ella, figures, models, runs
from common.cifar import PAPER_PRIOR, Cifar
from common.data import Images, as_cifar, mnist, moved, svhn
from common.ella import Setting
from common.last_layer import LastLayer

from laplace_ella import (
    FeatureCache,
    metrics,
    prior_precision_from_weight_decay,
    temperature_scaling,
)

#: The training of the MNIST network is not documented; the usual weight decay.
MNIST_WEIGHT_DECAY = 1e-4
MNIST_TRAIN_SIZE = 60_000

COLUMNS = {
    "method": "method",
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "auroc_entropy": "AUROC (entropy)",
    "auroc_confidence": "AUROC (1 − confidence)",
    "confident_ood": "OOD with confidence > 0.9",
    "chosen": "chosen",
}


@dataclass
class Pair:
    """Two data sets and one network, with what the methods need of them.

    `head_study` makes the last layer's full posterior, where that is small enough.
    """

    title: str
    ood_title: str
    images: dict[str, Images]
    model: torch.nn.Module
    features: dict[str, FeatureCache]
    la: Any
    ranks: list[int]
    prior: float
    n_train: int
    head_study: Callable[..., tuple[ella.Study, dict[str, FeatureCache]]] | None = None


def mnist_pair(args: Any) -> Pair:
    n_fit, n_validation, n_test = (
        (34, 20, 20) if args.smoke else (2000, 2000, args.n_test)
    )
    model = models.mnist_convnet(args.data_root, args.weights)
    train = mnist(args.data_root, "train")
    images = {
        "train": train[:-2000][: n_fit if args.smoke else None],
        # Hardly changed: the network is right on 99 % of new images as well.
        "validation": moved(train[-2000:][:n_validation], 0.5),
        "test": mnist(args.data_root, "test")[:n_test],
        "ood": mnist(args.data_root, "test", fashion=True)[:n_test],
    }
    prior = prior_precision_from_weight_decay(MNIST_WEIGHT_DECAY, MNIST_TRAIN_SIZE)
    folder = args.cache_dir / "mnist" / f"K{args.rank}"
    la = ella.fit_basis(
        model,
        images["train"],
        folder / "ella.pt",
        n_eigenvalues=args.rank,
        subsample_size=16 if args.smoke else 2000,
        prior_precision=prior,
    )
    features = {
        which: ella.cached_features(la, part, folder / which)
        for which, part in {**images, "fit": images["train"][:n_fit]}.items()
        if which != "train"
    }
    return Pair(
        "MNIST",
        "Fashion-MNIST",
        images,
        model,
        features,
        la,
        [args.rank],
        prior,
        MNIST_TRAIN_SIZE,
    )


def cifar_pair(args: Any) -> Pair:
    n_fit, n_validation, n_test = (
        (34, 20, 20) if args.smoke else (args.n_fit, args.n_validation, args.n_test)
    )
    setup = Cifar(
        args,
        args.network,
        max(args.ranks),
        n_fit,
        n_validation,
        n_test,
        subsample_size=16 if args.smoke else 2000,
    )
    other = svhn(args.data_root)
    title = "SVHN" if other is not None else "Fashion-MNIST (resized)"
    if other is None:
        other = as_cifar(mnist(args.data_root, "test", fashion=True))
    other = other[: args.n_ood if not args.smoke else 20]
    features = {w: setup.features(w) for w in ("fit", "validation", "test")}
    name = title.split()[0].lower() + f"_K{setup.rank}"
    features["ood"] = ella.cached_features(setup.la, other, setup.folder / name)
    images = {
        "train": setup.train[: n_fit if args.smoke else None],
        "validation": setup.validation,
        "test": setup.test,
        "ood": other,
    }
    return Pair(
        "CIFAR-10",
        title,
        images,
        setup.model,
        features,
        setup.la,
        args.ranks,
        PAPER_PRIOR,
        models.CIFAR_TRAIN_SIZE,
        setup.head_study,
    )


def predictions(args: Any, pair: Pair) -> dict[str, tuple[dict[str, Any], str]]:
    """Probabilities on 'test' and 'ood' and what was chosen, for each method."""
    f = {which: cache.f_mu for which, cache in pair.features.items()}
    y = pair.features["validation"].targets
    out = {"MAP": ({w: f[w].softmax(-1) for w in ("test", "ood")}, "")}
    t = temperature_scaling(f["validation"], y)
    out["temperature scaling"] = (
        {w: (f[w] / t).softmax(-1) for w in ("test", "ood")},
        ella.describe({"τ": t}),
    )
    embeddings = {
        which: ella.forward(pair.model.embed, images.x)
        for which, images in pair.images.items()
    }
    # A basis for the last layer's many parameters would be a study of its own: the
    # Kronecker factors of laplace-torch are what people use for 1,568 × 10 weights.
    structure = "full" if embeddings["test"].shape[1] < 100 else "kron"
    last = LastLayer(
        models.last_layer(pair.model),
        embeddings,
        {"train": pair.images["train"].y},
        args.smoke,
    )
    for link in ("probit", "mc"):
        chosen = last.choose(structure, "evidence", link, embeddings["validation"], y)
        out[f"last layer, {structure}, prior by evidence, {link}"] = (
            {
                w: last.predict(structure, embeddings[w], link, chosen)
                for w in ("test", "ood")
            },
            ella.describe(chosen),
        )
    if pair.head_study is not None:
        embedded = {w: Images(x, pair.images[w].y) for w, x in embeddings.items()}
        embedded["fit"] = embedded.pop("train")
        head, features = pair.head_study(embedded)
        setting, link = Setting(head.la.rank, "calibrated"), "probit"
        out[f"last layer, full, calibrated, {link}"] = predict(
            head, setting, link, features, pair
        )
    study = ella.Study(pair.la, pair.features["fit"])
    few, many = pair.ranks[0], pair.ranks[-1]
    settings = [
        Setting(few, "none"),
        Setting(few, "stop"),
        Setting(few, "both"),
        Setting(few, "both", "prior"),
        Setting(few, "calibrated"),
        Setting(few, "calibrated", "prior"),
        Setting(many, "calibrated", "prior"),
    ]
    for setting in dict.fromkeys(settings):
        out[f"{setting}, mc"] = predict(study, setting, "mc", pair.features, pair)
    return out


def predict(
    study: ella.Study,
    setting: Setting,
    link: str,
    features: dict[str, FeatureCache],
    pair: Pair,
) -> tuple[dict[str, Any], str]:
    """Probabilities by a setting of ELLA, and what was chosen."""
    la, chosen = ella.choose(
        study, setting, link, features["validation"], pair.prior, pair.n_train
    )
    probs = {w: ella.predict(la, features[w], link) for w in ("test", "ood")}
    return probs, ella.describe(chosen)


def plot(path: Path, pair: Pair, curves: dict[str, metrics.ConfidenceCurve]) -> None:
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(6.5, 5))
    for name, curve in curves.items():
        style = "-" if name.startswith("ELLA") else "--"
        axis.plot(curve.threshold, curve.error, style, label=name, linewidth=1.3)
    axis.set_xlabel("confidence threshold τ")
    axis.set_ylabel("error of predictions with confidence ≥ τ")
    axis.set_title(f"{pair.title} + {pair.ood_title}")
    figures.save(figure, path, columns=2)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("ood", __doc__)
    parser.add_argument("--pair", default="mnist", choices=("mnist", "cifar10"))
    parser.add_argument("--network", default="resnet20", choices=models.CIFAR_RESNETS)
    parser.add_argument("--weights", help="path or URL, default in --data-root")
    parser.add_argument("--rank", type=int, default=20, help="of the pair mnist")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[20, 512],
        help="of the pair cifar10; the largest is that of cifar10.py's features",
    )
    parser.add_argument("--n-fit", type=int, default=3000)
    parser.add_argument("--n-validation", type=int, default=2000)
    parser.add_argument("--n-test", type=int, default=10_000)
    parser.add_argument("--n-ood", type=int, default=2000)
    args = runs.start(parser, argv)
    if args.smoke:
        args.rank, args.ranks = 4, [4, 6]
    pair = {"mnist": mnist_pair, "cifar10": cifar_pair}[args.pair](args)
    targets = pair.features["test"].targets
    rows, curves = [], {}
    for name, (probs, chosen) in predictions(args, pair).items():
        inside, outside = probs["test"], probs["ood"]
        curves[name] = metrics.error_versus_confidence(
            inside, targets, outside, side="above"
        )
        confidence = {w: p.max(-1).values for w, p in probs.items()}
        rows.append(
            {
                "method": name,
                **metrics.classification_metrics(inside, targets),
                "auroc_entropy": metrics.ood_auroc(
                    metrics.entropy(inside), metrics.entropy(outside)
                ),
                "auroc_confidence": metrics.ood_auroc(
                    1 - confidence["test"], 1 - confidence["ood"]
                ),
                "confident_ood": float((confidence["ood"] > 0.9).float().mean()),
                "chosen": chosen,
                "n_test": len(inside),
                "n_ood": len(outside),
            }
        )
    runs.write_csv(args.out / f"{args.pair}.csv", rows)
    table = runs.markdown(rows, COLUMNS, {})
    (args.out / f"{args.pair}.md").write_text(table)
    plot(args.out / f"{args.pair}.png", pair, curves)
    runs.write_environment(args.out / f"{args.pair}_environment.json", args)
    print(table)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
