"""CIFAR-10 with pretrained ResNets: every method, both links (Table 3 of the paper).

    python examples/cifar10.py --network resnet20
    python examples/cifar10.py --network resnet56 --rank 64 --ranks 20 64

Hyperparameters are chosen in two ways, each reported on all test images:

train   on 2,000 images of the training file that are kept from fitting. The networks
        were trained on them, so they are moved until they are as hard as new images
        (see `common.cifar.Cifar`).
halves  on new images: settings chosen on one half of the test file predict the other
        half, and the other way round, so that no image takes part in a choice that
        its own prediction depends on.

Interrupt and start again at will: features, predictions and rows are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ella, runs
from common.cifar import PAPER_PRIOR, Cifar
from common.ella import Setting
from common.last_layer import LastLayer
from common.models import CIFAR_RESNETS, CIFAR_TRAIN_SIZE
from laplace import Laplace

from laplace_ella import FeatureCache, metrics

LINKS = ("mc", "probit")
PROTOCOLS = ("train", "halves")

#: Images on which one search is made, for small and for large ranks.
N_SEARCH = {"small": 2000, "large": 1000}

COLUMNS = {
    "method": "method",
    "link": "link",
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "val_nll": "validation NLL",
    "chosen": "chosen",
}


@dataclass(frozen=True)
class Fold:
    """Positions to choose on and to predict: of validation and test, or of test."""

    choose: torch.Tensor
    predict: torch.Tensor
    on_test: bool


@dataclass(frozen=True)
class Outcome:
    """Predictions of one fold, and what was chosen how well."""

    probs: torch.Tensor
    val_nll: float | None = None
    chosen: dict[str, float] = field(default_factory=dict)


def folds(protocol: str, n_validation: int, n_test: int) -> list[Fold]:
    everything = torch.arange(n_test)
    if protocol == "train":
        return [Fold(torch.arange(n_validation), everything, False)]
    first, second = everything[: n_test // 2], everything[n_test // 2 :]
    return [Fold(first, second, True), Fold(second, first, True)]


# --- ELLA -----------------------------------------------------------------------------


def ella_settings(ranks: list[int]) -> list[Setting]:
    small, large = [r for r in ranks if r <= 128], [r for r in ranks if r > 128]
    first = small[0] if small else ranks[0]
    settings = [
        Setting(first, "none"),
        Setting(first, "stop"),
        Setting(first, "temperature"),
        Setting(first, "both", "prior"),
        Setting(first, "both"),
        Setting(first, "temperature", "prior"),
        Setting(first, "evidence"),
    ]
    for rank in [*small[1:], *large]:
        settings += [
            Setting(rank, "none"),
            Setting(rank, "prior"),
            Setting(rank, "temperature"),
            Setting(rank, "both", "prior"),
            Setting(rank, "both"),
        ]
    return settings


def run_ella(
    study: ella.Study,
    setting: Setting,
    link: str,
    fold: Fold,
    validation: FeatureCache,
    test: FeatureCache,
) -> Outcome:
    """Choose on the fold's validation images, predict its test images."""
    size = N_SEARCH["small" if setting.rank <= 128 else "large"]
    chosen_on = (test if fold.on_test else validation)[fold.choose[:size]]
    la, chosen = ella.choose(
        study, setting, link, chosen_on, PAPER_PRIOR, CIFAR_TRAIN_SIZE
    )
    val_nll = metrics.nll(ella.predict(la, chosen_on, link), chosen_on.targets)
    return Outcome(ella.predict(la, test[fold.predict], link), val_nll, chosen)


# --- the last layer, by laplace-torch -------------------------------------------------


def run_last_layer(
    last: LastLayer, structure: str, search: str, link: str, fold: Fold
) -> Outcome:
    """The same for a Laplace posterior of the last layer."""
    where = "test" if fold.on_test else "validation"
    positions = fold.choose[: N_SEARCH["large"]]
    x, y = last.embeddings[where][positions], last.targets[where][positions]
    la, chosen = last.choose(structure, search, link, x, y)
    val_nll = metrics.nll(last.predict(la, x, link), y)
    probs = last.predict(la, last.embeddings["test"][fold.predict], link)
    return Outcome(probs, val_nll, chosen)


# --- the rest -------------------------------------------------------------------------


def run_scaling(logits: dict[str, Any], targets: dict[str, Any], fold: Fold) -> Outcome:
    """Temperature scaling of the softmax (Guo et al. 2017)."""
    where = "test" if fold.on_test else "validation"
    f, y = logits[where][fold.choose], targets[where][fold.choose]
    t = ella.scaling_temperature(f, y)
    val_nll = metrics.nll((f / t).softmax(-1), y)
    probs = (logits["test"][fold.predict] / t).softmax(-1)
    return Outcome(probs, val_nll, {"T": t})


def try_all_layers(setup: Cifar) -> list[dict[str, Any]]:
    """What laplace-torch's all-layer approximations say on a network with BatchNorm."""
    rows = []
    images = setup.train[: 2 if setup.args.smoke else 8]
    for structure in ("kron", "diag", "full", "gp"):
        name = {"gp": "laplace-torch's ELLA"}.get(structure, structure)
        extra = {}
        if structure == "gp":
            extra = {
                "functional_approximation": "nystrom",
                "subsample_size": len(images) // 2,
                "n_eigenvalues": max(1, len(images) // 4),
            }
        if structure == "full":
            n = sum(p.numel() for p in setup.model.parameters())
            note = f"not run: {n:,}² floats are {4 * n**2 / 2**30:.0f} GiB"
            rows.append({"method": f"all layers, {name}", "outcome": note})
            continue
        try:
            with runs.stopwatch() as times:
                la = Laplace(setup.model, "classification", "all", structure, **extra)
                la.fit(images.loader(4))
            with runs.stopwatch() as prediction:
                la(images.x[:2], pred_type="gp" if extra else "glm")
            note = (
                f"runs: fit {times['cpu'] / len(images):.2f} s an image, prediction "
                f"{prediction['cpu'] / 2:.2f} s an image (CPU time)"
            )
        except Exception as error:  # whatever it raises is the result
            text = str(error).strip().splitlines() or [""]
            note = f"fails: {type(error).__name__}: {text[0][:200]}"
        rows.append({"method": f"all layers, {name}", "outcome": note})
    return rows


# --- the script -----------------------------------------------------------------------


def parse(argv: list[str] | None) -> Any:
    parser = runs.arguments("cifar10", __doc__)
    parser.add_argument("--network", default="resnet20", choices=CIFAR_RESNETS)
    parser.add_argument("--weights", help="path or URL, default in --data-root")
    parser.add_argument("--rank", type=int, default=512, help="of the cached basis")
    parser.add_argument("--ranks", type=int, nargs="+", default=[20, 128, 256, 512])
    parser.add_argument("--n-fit", type=int, default=3000)
    parser.add_argument("--n-validation", type=int, default=2000)
    parser.add_argument("--n-test", type=int, default=10_000)
    parser.add_argument("--subsample-size", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS)
    parser.add_argument(
        "--protocols", nargs="+", default=list(PROTOCOLS), choices=PROTOCOLS
    )
    parser.add_argument(
        "--only-ella", action="store_true", help="for further seeds of the basis"
    )
    args = runs.start(parser, argv)
    if args.smoke:
        args.rank, args.ranks, args.subsample_size = 6, [4, 6], 16
        args.n_fit, args.n_validation, args.n_test = 34, 20, 20
        args.links = ["mc"]
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
        args.seed,
        args.subsample_size,
    )
    suffix = f"_seed{args.seed}" if args.only_ella else ""
    name = f"{args.network}{suffix}"
    keep = ("network", "rank", "n_fit", "n_validation", "n_test", "subsample_size")
    settings = {k: getattr(args, k) for k in (*keep, "seed")}
    settings["strength"] = setup.strength
    results = runs.Results(args.out / f"{name}.json", settings)
    probs_dir = setup.folder / f"predictions_{args.n_test}"
    probs_dir.mkdir(parents=True, exist_ok=True)
    evaluate = Evaluation(args, setup, results, probs_dir)
    evaluate.simple_methods()
    if not args.only_ella:
        evaluate.last_layer_methods("evidence")
    evaluate.ella_methods()
    if not args.only_ella:
        evaluate.last_layer_methods("both")
    rows = list(results.rows.values())
    rows += evaluate.best("ELLA") + evaluate.best("last layer")
    if not args.only_ella:
        failures = results.compute(
            "all layers", lambda: {"rows": try_all_layers(setup)}
        )
        rows = [r for r in rows if "rows" not in r]
        (args.out / f"{name}_all_layers.md").write_text(
            runs.markdown(
                failures["rows"], {"method": "method", "outcome": "outcome"}, {}
            )
        )
    runs.write_csv(args.out / f"{name}.csv", rows)
    write_tables(args.out / f"{name}.md", rows)
    if not args.only_ella:
        plot_reliability(args.out / f"{name}_reliability.png", evaluate, args.ranks)
    runs.write_environment(args.out / f"{name}_environment.json", args)
    print((args.out / f"{name}.md").read_text())
    return rows


class Evaluation:
    """Rows of the table, one method, link and protocol at a time."""

    def __init__(
        self, args: Any, setup: Cifar, results: runs.Results, probs_dir: Path
    ) -> None:
        self.args, self.setup = args, setup
        self.results, self.probs_dir = results, probs_dir
        self.targets = {
            "train": setup.train.y,
            "validation": setup.validation.y,
            "test": setup.test.y,
        }
        self.embeddings = {
            "validation": setup.embeddings("validation", setup.validation),
            "test": setup.embeddings("test", setup.test),
        }

    def add(
        self, method: str, link: str, protocol: str, run: Callable[[Fold], Outcome]
    ) -> None:
        """One row, unless it is there already."""

        def row() -> dict[str, Any]:
            splits = folds(protocol, len(self.targets["validation"]), self.args.n_test)
            outcomes = [run(fold) for fold in splits]
            probs = torch.empty(self.args.n_test, outcomes[0].probs.shape[-1])
            for fold, outcome in zip(splits, outcomes, strict=True):
                probs[fold.predict] = outcome.probs.float()
            torch.save(probs, self.path(method, link, protocol))
            scores = [o.val_nll for o in outcomes]
            return {
                "protocol": protocol,
                "method": method,
                "link": link,
                **metrics.classification_metrics(probs, self.targets["test"]),
                "val_nll": None if None in scores else float(np.mean(scores)),
                "fold_val_nll": scores,
                "chosen": "; ".join(
                    ella.describe(o.chosen) for o in outcomes if o.chosen
                ),
            }

        self.results.compute(f"{protocol} | {method} | {link}", row)

    def path(self, method: str, link: str, protocol: str) -> Path:
        name = "".join(c if c.isalnum() else "_" for c in f"{protocol} {method} {link}")
        return self.probs_dir / f"{name}.pt"

    def simple_methods(self) -> None:
        setup = self.setup
        with torch.no_grad():
            logits = {w: setup.model.linear(e) for w, e in self.embeddings.items()}
        for protocol in self.args.protocols:
            self.add(
                "MAP",
                "–",
                protocol,
                lambda fold: Outcome(logits["test"][fold.predict].softmax(-1)),
            )
            self.add(
                "temperature scaling",
                "–",
                protocol,
                lambda fold: run_scaling(logits, self.targets, fold),
            )

    def last_layer_methods(self, search: str) -> None:
        setup, smoke = self.setup, self.args.smoke
        train = setup.train[: self.args.n_fit] if smoke else setup.train
        embeddings = {**self.embeddings, "train": setup.embeddings("train", train)}
        targets = {**self.targets, "train": train.y}
        last = LastLayer(setup.model.linear, embeddings, targets, smoke)
        how = {"evidence": "prior by evidence", "both": "tempered, prior chosen"}
        structures = {"evidence": ["full", "kron", "diag"], "both": ["full"]}
        for structure in structures[search]:
            for link in self.args.links:
                for protocol in self.args.protocols:
                    self.add(
                        f"last layer, {structure}, {how[search]}",
                        link,
                        protocol,
                        lambda fold, s=structure, li=link: run_last_layer(
                            last, s, search, li, fold
                        ),
                    )

    def ella_methods(self) -> None:
        setup = self.setup
        fit, test = setup.features("fit"), setup.features("test")
        validation = setup.features("validation")
        study = ella.Study(setup.la, fit)
        for setting in ella_settings(self.args.ranks):
            for link in self.args.links:
                for protocol in self.args.protocols:
                    self.add(
                        str(setting),
                        link,
                        protocol,
                        lambda fold, s=setting, li=link: run_ella(
                            study, s, li, fold, validation, test
                        ),
                    )

    def best(self, family: str) -> list[dict[str, Any]]:
        """The setting of a family with the lowest validation NLL, fold by fold."""
        rows = []
        for protocol in self.args.protocols:
            candidates = [
                r
                for r in self.results.rows.values()
                if r.get("protocol") == protocol and r["method"].startswith(family)
            ]
            if not candidates:
                continue
            splits = folds(protocol, len(self.targets["validation"]), self.args.n_test)
            probs = torch.empty(self.args.n_test, 10)
            names, scores = [], []
            for i, fold in enumerate(splits):
                best = min(candidates, key=lambda r: r["fold_val_nll"][i])
                path = self.path(best["method"], best["link"], protocol)
                stored = torch.load(path, weights_only=True)
                probs[fold.predict] = stored[fold.predict]
                names.append(f"{best['method']}, {best['link']}")
                scores.append(best["fold_val_nll"][i])
            rows.append(
                {
                    "protocol": protocol,
                    "method": f"best {family} on validation",
                    "link": "chosen",
                    **metrics.classification_metrics(probs, self.targets["test"]),
                    "val_nll": float(np.mean(scores)),
                    "chosen": "; ".join(dict.fromkeys(names)),
                }
            )
        return rows


def write_tables(path: Path, rows: list[dict[str, Any]]) -> None:
    """One table a protocol."""
    titles = {
        "train": "Settings chosen on training images made as hard as new ones",
        "halves": "Settings chosen on one half of the test file, for the other half",
    }
    text = ""
    for protocol, title in titles.items():
        mine = [r for r in rows if r.get("protocol") == protocol]
        if mine:
            text += f"**{title}**\n\n" + runs.markdown(mine, COLUMNS, {}) + "\n"
    path.write_text(text)


def plot_reliability(path: Path, evaluation: Evaluation, ranks: list[int]) -> None:
    """Accuracy less confidence against confidence."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    wanted = [
        ("MAP", "–"),
        ("temperature scaling", "–"),
        ("last layer, full, prior by evidence", "probit"),
        (str(Setting(ranks[0], "stop")), "mc"),
        (str(Setting(ranks[0], "both", "prior")), "mc"),
    ]
    titles = {
        "train": "settings chosen on training images",
        "halves": "settings chosen on new images",
    }
    protocols = evaluation.args.protocols
    figure, axes = plt.subplots(
        1, len(protocols), figsize=(5 * len(protocols), 3.8), squeeze=False, sharey=True
    )
    for axis, protocol in zip(axes[0], protocols, strict=True):
        axis.axhline(0, color="black", linewidth=0.8)
        for method, link in wanted:
            file = evaluation.path(method, link, protocol)
            if file.exists():
                probs = torch.load(file, weights_only=True)
                curve = metrics.reliability_curve(probs, evaluation.targets["test"], 10)
                # Bins of a few images show only noise.
                shown = np.array(curve.count) >= min(20, len(probs) // 20)
                confidence = np.array(curve.confidence)[shown]
                gap = np.array(curve.accuracy)[shown] - confidence
                label = method if link == "–" else f"{method} ({link})"
                axis.plot(confidence, gap, "o-", markersize=3, label=label)
        axis.set_xlabel("confidence")
        axis.set_title(titles[protocol])
    axes[0, 0].set_ylabel("accuracy − confidence")
    axes[0, 0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
