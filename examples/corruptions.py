"""CIFAR-10 corruptions: 19 types × 5 severities (Fig. 3 of the paper).

    python examples/corruptions.py --n-images 100

The corruptions of Hendrycks and Dietterich (2019), see `common.corruptions`, are
applied to the first test images.

Settings are those that `cifar10.py` chooses on training images, and are not touched.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ella, models, runs
from common.cifar import PAPER_PRIOR, Cifar
from common.corruptions import CORRUPTIONS, corrupt
from common.data import Images, cifar10_pixels, normalize_cifar
from common.ella import Setting
from common.last_layer import LastLayer

from laplace_ella import metrics


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("corruptions", __doc__)
    parser.add_argument("--network", default="resnet20", choices=models.CIFAR_RESNETS)
    parser.add_argument("--weights", help="path or URL, default in --data-root")
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument(
        "--cached-rank", type=int, default=512, help="of cifar10.py's features"
    )
    parser.add_argument("--n-fit", type=int, default=3000)
    parser.add_argument("--n-validation", type=int, default=2000)
    parser.add_argument("--n-images", type=int, default=100)
    parser.add_argument("--severities", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = runs.start(parser, argv)
    names = list(CORRUPTIONS)
    subsample_size = 2000
    if args.smoke:
        args.rank, args.cached_rank, subsample_size = 4, 6, 16
        args.n_fit, args.n_validation, args.n_images = 34, 20, 2
        names, args.severities = names[:2], [3]
    setup = Cifar(
        args,
        args.network,
        args.cached_rank,
        args.n_fit,
        args.n_validation,
        args.n_images,
        subsample_size=subsample_size,
    )
    validation = setup.features("validation").truncate(args.rank)
    study = ella.Study(setup.la, setup.features("fit").truncate(args.rank))
    setup.la.truncate(args.rank)
    study.full = setup.la.state_dict()
    pixels, classes = cifar10_pixels(args.data_root, "test")
    pixels, targets = pixels[: args.n_images], torch.tensor(classes[: args.n_images])
    targets = targets.long()
    train = setup.train[: args.n_fit if args.smoke else None]
    embeddings = {"train": setup.embeddings("train", train)}
    last = LastLayer(setup.model.linear, embeddings, {"train": train.y}, args.smoke)
    t = ella.scaling_temperature(validation.f_mu, validation.targets)
    posteriors = {
        f"{setting}, mc": (setting, None)
        for setting in (
            Setting(args.rank, "stop"),
            Setting(args.rank, "both"),
            Setting(args.rank, "both", "prior"),
        )
    }
    chosen = {}
    for name, (setting, _) in posteriors.items():
        _, chosen[name] = ella.choose(
            study, setting, "mc", validation, PAPER_PRIOR, models.CIFAR_TRAIN_SIZE
        )
    keep = ("network", "rank", "n_fit", "n_validation", "n_images")
    results = runs.Results(
        args.out / f"{args.network}.json", {k: getattr(args, k) for k in keep}
    )
    for severity in args.severities:
        for name in names:
            results.compute(
                f"{severity} {name}",
                lambda name=name, severity=severity: one(
                    setup,
                    study,
                    last,
                    posteriors,
                    chosen,
                    t,
                    pixels,
                    targets,
                    name,
                    severity,
                ),
            )
    rows = [r for row in results.rows.values() for r in row["rows"]]
    runs.write_csv(args.out / f"{args.network}.csv", rows)
    table = summary(rows)
    (args.out / f"{args.network}.md").write_text(table)
    plot(args.out / f"{args.network}.png", rows)
    runs.write_environment(args.out / "environment.json", args)
    print(table)
    return rows


def one(
    setup: Cifar,
    study: ella.Study,
    last: LastLayer,
    posteriors: dict[str, Any],
    chosen: dict[str, dict[str, float]],
    t: float,
    pixels: np.ndarray,
    targets: torch.Tensor,
    name: str,
    severity: int,
) -> dict[str, Any]:
    """All methods on one corruption; only numbers are kept of it."""
    x = normalize_cifar(corrupt(pixels, name, severity))
    images = Images(x, targets)
    study.la.load_state_dict(study.full)
    folder = setup.folder / "corruptions" / f"{name}_{severity}"
    test = ella.cached_features(study.la, images, folder)
    probs = {
        "MAP": test.f_mu.softmax(-1),
        "temperature scaling": (test.f_mu / t).softmax(-1),
    }
    la, _ = last.choose("full", "evidence", "probit", x, targets)
    embedded = ella.forward(setup.model.embed, x)
    probs["last layer, full, probit"] = last.predict(la, embedded, "probit")
    for label, (setting, _) in posteriors.items():
        c = chosen[label]
        la = study.posterior(
            setting.rank,
            c.get("N"),
            prior_precision=c.get("prior", PAPER_PRIOR),
            complement=setting.complement,
            n_effective=c.get("N_eff"),
        )
        probs[label] = ella.predict(la, test, "mc")
    return {
        "rows": [
            {
                "corruption": name,
                "severity": severity,
                "method": method,
                **metrics.classification_metrics(p, targets),
            }
            for method, p in probs.items()
        ]
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Means over the types, for each severity."""
    table = []
    for severity in sorted({r["severity"] for r in rows}):
        for method in dict.fromkeys(r["method"] for r in rows):
            mine = [
                r for r in rows if r["severity"] == severity and r["method"] == method
            ]
            means = {
                k: float(np.mean([r[k] for r in mine]))
                for k in ("accuracy", "nll", "ece", "brier")
            }
            table.append({"severity": severity, "method": method, **means})
    columns = {
        "severity": "severity",
        "method": "method",
        "accuracy": "accuracy",
        "nll": "NLL",
        "ece": "ECE",
        "brier": "Brier",
    }
    return runs.markdown(table, columns, {})


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """A box over the corruption types for each method and severity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(r["method"] for r in rows))
    severities = sorted({r["severity"] for r in rows})
    width = 0.8 / len(methods)
    figure, axes = plt.subplots(1, 2, figsize=(12, 4))
    colors = plt.get_cmap("tab10").colors
    for axis, metric in zip(axes, ("nll", "ece"), strict=True):
        for i, method in enumerate(methods):
            values = [
                [r[metric] for r in rows if (r["severity"], r["method"]) == (s, method)]
                for s in severities
            ]
            boxes = axis.boxplot(
                values,
                positions=[s + (i + 0.5) * width - 0.4 for s in severities],
                widths=0.8 * width,
                patch_artist=True,
                flierprops={"markersize": 2},
                medianprops={"color": "black"},
            )
            for box in boxes["boxes"]:
                box.set_facecolor(colors[i])
            axis.plot([], [], "s", color=colors[i], label=method)
        axis.set_xticks(severities, [str(s) for s in severities])
        axis.set_xlabel("severity")
        axis.set_ylabel({"nll": "NLL", "ece": "ECE"}[metric])
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
