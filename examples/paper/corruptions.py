"""CIFAR-10 corruptions: 19 types × 5 severities (Fig. 3 of the paper).

    python examples/paper/cifar10.py    # whose basis and features are read
    python examples/paper/corruptions.py --n-images 300

The corruptions of Hendrycks and Dietterich (2019), see `common.corruptions`, are
applied to the first test images. Settings are chosen on clean images and are not
touched: on training images, moved ('train') or changed by `augmented_validation`
('augmented'), or on test images that are not among the corrupted ones ('halves': as
`cifar10.py`, from its cached features).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ella, facts, figures, models, runs
from common.cifar import PAPER_PRIOR, Cifar
from common.corruptions import CORRUPTIONS, corrupt
from common.data import Images, cifar10_pixels, normalize_cifar
from common.ella import Setting
from common.last_layer import LastLayer
from common.protocols import CHOSEN_ON, PROTOCOLS, TITLES, sources

from laplace_ella import FeatureCache, metrics, temperature_scaling

#: Search and link of laplace-torch's last-layer posteriors.
LAST_LAYER = {
    "last layer, full, prior by evidence, probit": ("evidence", "probit"),
    "last layer, full, tempered, prior chosen, probit": ("both", "probit"),
}

SCALING = "temperature scaling"


@dataclass(frozen=True)
class Nystrom:
    """A posterior of features, of the 'network' or of its 'head', and its link."""

    where: str
    setting: Setting
    link: str


@dataclass
class Methods:
    """Everything that predicts, with its settings by protocol.

    Attributes
    ----------
    setup, last : the network and laplace-torch's posteriors of its last layer
    studies : dict
        posteriors of features, of the 'network' and of its 'head'
    nystrom : dict
        those among them that are shown, by name
    scaling : dict
        softmax temperature by protocol
    chosen : dict
        settings by protocol and method
    """

    setup: Cifar
    last: LastLayer
    studies: dict[str, ella.Study]
    nystrom: dict[str, Nystrom]
    scaling: dict[str, float]
    chosen: dict[str, dict[str, dict[str, float]]]

    def predict(
        self, protocol: str, test: dict[str, FeatureCache], embedded: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Class probabilities of every method."""
        logits = test["network"].f_mu
        probs = {
            "MAP": logits.softmax(-1),
            SCALING: (logits / self.scaling[protocol]).softmax(-1),
        }
        chosen = self.chosen[protocol]
        for label, (_, link) in LAST_LAYER.items():
            probs[label] = self.last.predict("full", embedded, link, chosen[label])
        for label, how in self.nystrom.items():
            study = self.studies[how.where]
            la = study.chosen(how.setting, chosen[label], PAPER_PRIOR)
            probs[label] = ella.predict(la, test[how.where], how.link)
        return probs


def nystrom_methods(args: Any, head_rank: int) -> dict[str, Nystrom]:
    """ELLA as in the paper, tempered and calibrated; the last layer calibrated."""
    few, many = args.ranks[0], args.ranks[-1]
    settings = (
        Setting(few, "stop"),
        Setting(many, "both", "prior"),
        Setting(few, "calibrated"),
        Setting(many, "calibrated"),
        Setting(many, "calibrated", "prior"),
    )
    head = Nystrom("head", Setting(head_rank, "calibrated"), "probit")
    return {
        "last layer, full, calibrated, probit": head,
        **{f"{setting}, mc": Nystrom("network", setting, "mc") for setting in settings},
    }


def make_methods(args: Any, setup: Cifar) -> Methods:
    """All settings, chosen on clean images."""
    # New images are the last ones of cifar10.py, far from the corrupted first ones.
    first_new = args.n_test - args.n_validation
    if "halves" in args.protocols and first_new < args.n_images:
        raise SystemExit(
            f"--n-test {args.n_test} leaves no {args.n_validation} images beside "
            f"the {args.n_images} corrupted ones; pass a larger --n-test."
        )
    names = sources(args.protocols)
    features = {
        which: setup.features(which, first_new // ella.SHARD if which == "test" else 0)
        for which in names
    }
    embedded = {
        which: Images(setup.embeddings(which, images), images.y)
        for which, images in ((which, setup.images(which)) for which in names)
    }
    train = setup.train[: args.n_fit if args.smoke else None]
    seen = setup.embeddings("train", train)
    head, head_features = setup.head_study({**embedded, "fit": Images(seen, train.y)})
    for parts in (features, embedded, head_features):
        parts["test"] = parts["test"][-args.n_validation :]
    clean = {"network": features, "head": head_features}
    studies = {"network": ella.Study(setup.la, setup.features("fit")), "head": head}
    last = LastLayer(
        setup.model.linear, {"train": seen}, {"train": train.y}, args.smoke
    )
    nystrom = nystrom_methods(args, head.la.rank)
    scaling, chosen = {}, {}
    for protocol in args.protocols:
        print(f"choosing settings: {protocol}", flush=True)
        which = CHOSEN_ON.get(protocol, "test")
        images = embedded[which]
        scaling[protocol] = temperature_scaling(features[which].f_mu, images.y)
        chosen[protocol] = {
            label: last.choose("full", search, link, images.x, images.y)
            for label, (search, link) in LAST_LAYER.items()
        }
        for label, how in nystrom.items():
            _, chosen[protocol][label] = ella.choose(
                studies[how.where],
                how.setting,
                how.link,
                clean[how.where][which],
                PAPER_PRIOR,
                models.CIFAR_TRAIN_SIZE,
            )
    return Methods(setup, last, studies, nystrom, scaling, chosen)


def one(
    methods: Methods,
    protocols: list[str],
    pixels: np.ndarray,
    targets: torch.Tensor,
    name: str,
    severity: int,
) -> dict[str, Any]:
    """All methods on one corruption; its features and predictions are kept in files."""
    x = normalize_cifar(corrupt(pixels, name, severity))
    setup = methods.setup
    folder = corrupted_folder(setup, name, severity)
    embedded = ella.forward(setup.model.embed, x)
    la = methods.studies["network"].posterior(setup.rank)  # with all directions
    head = methods.studies["head"].la
    test = {
        "network": ella.cached_features(la, Images(x, targets), folder, quiet=True),
        "head": FeatureCache.from_loader(head, Images(embedded, targets).loader(100)),
    }
    probs = {p: methods.predict(p, test, embedded) for p in protocols}
    torch.save(probs, folder / "probs.pt")
    return {
        "rows": [
            {
                "protocol": protocol,
                "corruption": name,
                "severity": severity,
                "method": method,
                **metrics.classification_metrics(p, targets),
            }
            for protocol, mine in probs.items()
            for method, p in mine.items()
        ]
    }


def corrupted_folder(setup: Cifar, name: str, severity: int) -> Path:
    return setup.folder / f"corruptions_K{setup.rank}" / f"{name}_{severity}"


# --- differences ----------------------------------------------------------------------


def brier_by_image(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Σ_c (p_c − y_c)² of every image, `(N,)` in double precision."""
    hit = torch.nn.functional.one_hot(targets, probs.shape[1])
    return (probs.double() - hit).square().sum(1)


def differences(
    setup: Cifar, targets: torch.Tensor, names: Sequence[str], severity: int
) -> list[dict[str, Any]]:
    """Differences of NLL and Brier score to temperature scaling, for one severity.

    Every image is shown in all types of corruption: its differences are averaged over
    types first, and the standard error is that of the mean over images.
    """
    stored = [
        torch.load(
            corrupted_folder(setup, name, severity) / "probs.pt", weights_only=True
        )
        for name in names
    ]
    scores = {"nll": facts.nll_by_image, "brier": brier_by_image}
    rows = []
    for protocol in stored[0]:
        for method in stored[0][protocol]:
            if method == SCALING:
                continue
            row = {"protocol": protocol, "severity": severity, "method": method}
            for key, score in scores.items():
                by_type = [
                    score(probs[protocol][method], targets)
                    - score(probs[protocol][SCALING], targets)
                    for probs in stored
                ]
                mean, error = facts.mean_and_error(torch.stack(by_type).mean(0))
                row[key], row[f"{key}_error"] = mean, error
            rows.append(row)
    return rows


def differences_table(rows: list[dict[str, Any]]) -> str:
    """One table per protocol: methods by severities, mean ± standard error."""
    text = ""
    titles = {"nll": "NLL", "brier": "Brier"}
    for protocol in dict.fromkeys(r["protocol"] for r in rows):
        mine = [r for r in rows if r["protocol"] == protocol]
        severities = sorted({r["severity"] for r in mine})
        columns = {"method": "method less temperature scaling"}
        table: dict[str, dict[str, Any]] = {}
        for key, title in titles.items():
            for severity in severities:
                columns[f"{key} {severity}"] = f"{title}, severity {severity}"
        for r in mine:
            row = table.setdefault(r["method"], {"method": r["method"]})
            for key in titles:
                words = f"{r[key]:+.4f} ± {r[f'{key}_error']:.4f}"
                row[f"{key} {r['severity']}"] = words
        text += f"**{title_of(protocol)}**\n\n"
        text += runs.markdown(list(table.values()), columns, {}) + "\n"
    return text


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
        text += f"**{title_of(protocol)}**\n\n{runs.markdown(table, COLUMNS, {})}\n"
    return text


def title_of(protocol: str) -> str:
    halves = "Settings chosen on other, clean test images"
    return halves if protocol == "halves" else TITLES[protocol]


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """A box over the corruption types for each method and severity."""
    plt = figures.pyplot()
    methods = list(dict.fromkeys(r["method"] for r in rows))
    severities = sorted({r["severity"] for r in rows})
    width = 0.8 / len(methods)
    figure, axes = plt.subplots(1, 2, figsize=(12, 5))
    colors = plt.get_cmap("tab20").colors
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
    parser.add_argument(
        "--rank", type=int, default=512, help="of cifar10.py's features"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[20, 512], help="few and many"
    )
    parser.add_argument("--subsample-size", type=int, default=2000, help="the same")
    parser.add_argument("--n-fit", type=int, default=3000)
    parser.add_argument("--n-validation", type=int, default=2000)
    parser.add_argument("--n-test", type=int, default=10_000, help="of cifar10.py")
    parser.add_argument("--n-images", type=int, default=300, help="to corrupt")
    parser.add_argument("--severities", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--protocols", nargs="+", default=list(PROTOCOLS), choices=PROTOCOLS
    )
    args = runs.start(parser, argv)
    args.names = list(CORRUPTIONS)
    if args.smoke:
        args.rank, args.ranks, args.subsample_size = 6, [4, 6], 16
        args.n_fit, args.n_validation, args.n_test, args.n_images = 34, 10, 20, 2
        args.names, args.severities = args.names[:2], [3]
    return args


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    setup = Cifar(
        args,
        args.network,
        args.rank,
        args.n_fit,
        args.n_validation,
        args.n_test,
        subsample_size=args.subsample_size,
    )
    pixels, classes = cifar10_pixels(args.data_root, "test")
    pixels = pixels[: args.n_images]
    targets = torch.tensor(classes[: args.n_images]).long()
    keep = ("network", "ranks", "n_fit", "n_validation", "n_test", "n_images")
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
    paired = [
        row
        for severity in args.severities
        for row in results.compute(
            f"differences {severity}",
            lambda s=severity: {"rows": differences(setup, targets, args.names, s)},
        )["rows"]
    ]
    rows = [r for key in points for r in results.rows[key]["rows"]]
    runs.write_csv(args.out / f"{args.network}.csv", rows)
    table = summary(rows)
    (args.out / f"{args.network}.md").write_text(table)
    words = differences_table(paired)
    (args.out / f"{args.network}_differences.md").write_text(words)
    for protocol in args.protocols:
        mine = [r for r in rows if r["protocol"] == protocol]
        plot(args.out / f"{args.network}_{protocol}.png", mine)
    runs.write_environment(args.out / "environment.json", args)
    print(words)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
