"""CIFAR-10 corruptions: 19 types × 5 severities (Fig. 3 of the paper).

    python examples/paper/cifar10.py    # whose basis and features are read
    python examples/paper/corruptions.py --n-images 200

The corruptions of Hendrycks and Dietterich (2019), see `common.corruptions`, are
applied to the first test images. Settings are chosen on clean images and are not
touched: on moved training images ('train'), or on test images that are not among the
corrupted ones ('halves': as `cifar10.py`, from its cached features).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ella, figures, models, runs
from common.cifar import PAPER_PRIOR, Cifar
from common.corruptions import CORRUPTIONS, corrupt
from common.data import Images, cifar10_pixels, normalize_cifar
from common.ella import Setting
from common.last_layer import LastLayer
from common.protocols import PROTOCOLS

from laplace_ella import FeatureCache, metrics

TITLES = {
    "train": "Settings chosen on training images made as hard as new ones",
    "halves": "Settings chosen on other, clean test images",
}


@dataclass
class Methods:
    """Everything that predicts, with its settings by protocol.

    Attributes
    ----------
    setup, study, last : the network, ELLA's posteriors and the last layer's
    scaling : dict
        softmax temperature by protocol
    chosen : dict
        settings by protocol and method
    """

    setup: Cifar
    study: ella.Study
    last: LastLayer
    settings: dict[str, Setting]
    scaling: dict[str, float]
    chosen: dict[str, dict[str, dict[str, float]]]

    def predict(
        self, protocol: str, test: FeatureCache, embedded: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Class probabilities of every method."""
        probs = {
            "MAP": test.f_mu.softmax(-1),
            "temperature scaling": (test.f_mu / self.scaling[protocol]).softmax(-1),
        }
        chosen = self.chosen[protocol]
        for label, how in LAST_LAYER.items():
            probs[label] = self.last.predict("full", embedded, how[1], chosen[label])
        for label, setting in self.settings.items():
            mine = chosen[label]
            la = self.study.posterior(
                setting.rank,
                mine.get("N"),
                prior_precision=mine.get("prior", PAPER_PRIOR),
                complement=setting.complement,
                n_effective=mine.get("N_eff"),
            )
            probs[label] = ella.predict(la, test, "mc")
        return probs


#: Search and link of the last-layer posteriors.
LAST_LAYER = {
    "last layer, full, prior by evidence, probit": ("evidence", "probit"),
    "last layer, full, tempered, prior chosen, probit": ("both", "probit"),
}


def make_methods(args: Any, setup: Cifar) -> Methods:
    """All settings, chosen on clean images."""
    caches = {"train": setup.features("validation")}
    embeddings = {"train": setup.embeddings("validation", setup.validation)}
    if "halves" in args.protocols:
        # Features of cifar10.py are those of its first images, in files of SHARD.
        positions = torch.arange(args.n_test)[-args.n_validation :]
        if positions[0] < args.n_images:
            raise SystemExit(
                f"--n-test {args.n_test} leaves no {args.n_validation} images beside "
                f"the {args.n_images} corrupted ones; pass a larger --n-test."
            )
        caches["halves"] = setup.features("test")[positions]
        embeddings["halves"] = setup.embeddings("test", setup.test)[positions]
    caches = {p: cache.truncate(args.rank) for p, cache in caches.items()}
    fit = setup.features("fit").truncate(args.rank)
    setup.la.truncate(args.rank)  # features of corrupted images are of this rank too
    study = ella.Study(setup.la, fit)
    train = setup.train[: args.n_fit if args.smoke else None]
    train_embeddings = {"train": setup.embeddings("train", train)}
    last = LastLayer(
        setup.model.linear, train_embeddings, {"train": train.y}, args.smoke
    )
    settings = {
        f"{setting}, mc": setting
        for setting in (
            Setting(args.rank, "stop"),
            Setting(args.rank, "both"),
            Setting(args.rank, "both", "prior"),
        )
    }
    scaling, chosen = {}, {}
    for protocol in args.protocols:
        print(f"choosing settings: {protocol}", flush=True)
        clean = caches[protocol]
        scaling[protocol] = ella.temperature_scaling(clean.f_mu, clean.targets)
        chosen[protocol] = {
            label: last.choose(
                "full", search, link, embeddings[protocol], clean.targets
            )
            for label, (search, link) in LAST_LAYER.items()
        }
        for label, setting in settings.items():
            _, chosen[protocol][label] = ella.choose(
                study, setting, "mc", clean, PAPER_PRIOR, models.CIFAR_TRAIN_SIZE
            )
    return Methods(setup, study, last, settings, scaling, chosen)


def one(
    methods: Methods,
    protocols: list[str],
    pixels: np.ndarray,
    targets: torch.Tensor,
    name: str,
    severity: int,
) -> dict[str, Any]:
    """All methods on one corruption; its features are kept in a file."""
    x = normalize_cifar(corrupt(pixels, name, severity))
    setup, la = methods.setup, methods.study.la
    folder = setup.folder / f"corruptions_K{la.rank}" / f"{name}_{severity}"
    test = ella.cached_features(la, Images(x, targets), folder, quiet=True)
    embedded = ella.forward(setup.model.embed, x)
    return {
        "rows": [
            {
                "protocol": protocol,
                "corruption": name,
                "severity": severity,
                "method": method,
                **metrics.classification_metrics(p, targets),
            }
            for protocol in protocols
            for method, p in methods.predict(protocol, test, embedded).items()
        ]
    }


# --- tables and figures ---------------------------------------------------------------


COLUMNS = {
    "severity": "severity",
    "method": "method",
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
}


def summary(rows: list[dict[str, Any]]) -> str:
    """Means over the types, for each severity."""
    text = ""
    for protocol in dict.fromkeys(r["protocol"] for r in rows):
        groups: dict[tuple, list[dict[str, Any]]] = {}
        for row in rows:
            if row["protocol"] == protocol:
                groups.setdefault((row["severity"], row["method"]), []).append(row)
        table = [
            {
                "severity": severity,
                "method": method,
                **{
                    k: float(np.mean([r[k] for r in group]))
                    for k in ("accuracy", "nll", "ece", "brier")
                },
            }
            for (severity, method), group in sorted(
                groups.items(), key=lambda item: item[0][0]
            )
        ]
        text += f"**{TITLES[protocol]}**\n\n{runs.markdown(table, COLUMNS, {})}\n"
    return text


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """A box over the corruption types for each method and severity."""
    plt = figures.pyplot()
    methods = list(dict.fromkeys(r["method"] for r in rows))
    severities = sorted({r["severity"] for r in rows})
    width = 0.8 / len(methods)
    figure, axes = plt.subplots(1, 2, figsize=(12, 5))
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
    figures.save(figure, path, columns=3)


# --- the script -----------------------------------------------------------------------


def parse(argv: list[str] | None) -> Any:
    parser = runs.arguments("corruptions", __doc__)
    parser.add_argument("--network", default="resnet20", choices=models.CIFAR_RESNETS)
    parser.add_argument("--weights", help="path or URL, default in --data-root")
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument(
        "--cached-rank", type=int, default=512, help="of cifar10.py's features"
    )
    parser.add_argument("--subsample-size", type=int, default=2000, help="the same")
    parser.add_argument("--n-fit", type=int, default=3000)
    parser.add_argument("--n-validation", type=int, default=2000)
    parser.add_argument("--n-test", type=int, default=10_000, help="of cifar10.py")
    parser.add_argument("--n-images", type=int, default=200, help="to corrupt")
    parser.add_argument("--severities", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--protocols", nargs="+", default=list(PROTOCOLS), choices=PROTOCOLS
    )
    args = runs.start(parser, argv)
    args.names = list(CORRUPTIONS)
    if args.smoke:
        args.rank, args.cached_rank, args.subsample_size = 4, 6, 16
        args.n_fit, args.n_validation, args.n_test, args.n_images = 34, 10, 20, 2
        args.names, args.severities = args.names[:2], [3]
    return args


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    setup = Cifar(
        args,
        args.network,
        args.cached_rank,
        args.n_fit,
        args.n_validation,
        args.n_test,
        subsample_size=args.subsample_size,
    )
    pixels, classes = cifar10_pixels(args.data_root, "test")
    pixels = pixels[: args.n_images]
    targets = torch.tensor(classes[: args.n_images]).long()
    keep = ("network", "rank", "n_fit", "n_validation", "n_test", "n_images")
    settings = {k: getattr(args, k) for k in (*keep, "protocols")}
    results = runs.Results(args.out / f"{args.network}.json", settings)
    points = {f"{s} {n}": (n, s) for s in args.severities for n in args.names}
    if not all(key in results.rows for key in points):
        methods = make_methods(args, setup)
        results.expect(points)
        for key, point in points.items():
            results.compute(
                key,
                lambda point=point: one(
                    methods, args.protocols, pixels, targets, *point
                ),
            )
    rows = [r for row in results.rows.values() for r in row["rows"]]
    runs.write_csv(args.out / f"{args.network}.csv", rows)
    table = summary(rows)
    (args.out / f"{args.network}.md").write_text(table)
    for protocol in args.protocols:
        mine = [r for r in rows if r["protocol"] == protocol]
        plot(args.out / f"{args.network}_{protocol}.png", mine)
    runs.write_environment(args.out / "environment.json", args)
    print(table)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
