"""CIFAR-10 with pretrained ResNets: every method and link (Table 3 of the paper).

    python examples/paper/cifar10.py --network resnet20 --seeds 0 1 2
    python examples/paper/cifar10.py --network resnet56 --rank 256 --ranks 20 256

Hyperparameters are chosen in three ways, see `common.protocols`, each reported on all
test images; the third, of `augmented_validation`, for the main methods only.

The first of --seeds gives the whole table. Further ones draw another basis and fit
other images, and repeat ELLA's settings only, of --seed-ranks. Where the --seed-n-*
sizes are smaller, the first seed is evaluated at these sizes once more, so that the
spread is over seeds alone.

laplace-torch's posteriors over all layers, which need a Jacobian for each image, are
compared with the others on the first --n-subset test images.

Interrupt and start again at will: features, predictions and rows are kept. Rows that
`mfvi.py` found are taken into the table; --tables writes the tables again from the
published rows, and computes nothing.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ella, facts, figures, runs
from common.all_layers import AllLayers, Sizes, attempts
from common.cifar import HEAD_WEIGHTS, PAPER_PRIOR, Cifar
from common.data import Images
from common.ella import Setting
from common.evaluation import COLUMNS, Evaluation
from common.last_layer import LastLayer
from common.models import CIFAR_RESNETS, CIFAR_TRAIN_SIZE
from common.protocols import PROTOCOLS, TITLES, Fold, Outcome, sources
from common.spread import spread, with_errors

from laplace_ella import FeatureCache, metrics

LINKS = ("mc", "probit")

#: A link that calibrated posteriors are tried with as well.
CALIBRATED_LINK = "probit_centered"

#: ELLA of the whole network and of its last layer.
EITHER = "ELLA or last-layer ELLA"

#: Links of methods that have none.
NO_LINK = "–"

#: Settings that rows of one table have in common.
SAME_IMAGES = ("n_validation", "n_test", "strength")

SCORES = {k: COLUMNS[k] for k in ("nll", "ece", "brier")}
SPREAD_COLUMNS = {k: COLUMNS[k] for k in list(COLUMNS)[:6]}

LAST_LAYER = {"evidence": "prior by evidence", "both": "tempered, prior chosen"}
STRUCTURES = ("full", "kron", "diag")

#: The full posterior of the last layer, with as many settings chosen as of ELLA.
CALIBRATED_LAST_LAYER = "last layer, full, calibrated"


# --- one method on one fold -----------------------------------------------------------


def ella_settings(ranks: list[int], smoke: bool = False) -> list[Setting]:
    """Everything for the first rank, the main ones for the rest."""
    if smoke:  # every kind of search once
        searches = ("stop", "temperature", "evidence", "calibrated")
        settings = [Setting(ranks[0], s) for s in searches]
        settings.append(Setting(ranks[0], "both", "prior"))
        return settings + [Setting(rank, "prior") for rank in ranks[1:]]
    settings = [
        Setting(ranks[0], "none"),
        Setting(ranks[0], "stop"),
        Setting(ranks[0], "temperature"),
        Setting(ranks[0], "evidence"),
        Setting(ranks[0], "calibrated"),
        Setting(ranks[0], "calibrated", "prior"),
    ]
    for rank in ranks[1:]:
        settings += [
            Setting(rank, "none"),
            Setting(rank, "prior"),
            Setting(rank, "both", "prior"),
            Setting(rank, "calibrated"),
            Setting(rank, "calibrated", "prior"),
        ]
    return settings


def run_last_layer(
    last: LastLayer, structure: str, search: str, link: str, fold: Fold
) -> Outcome:
    """The same for a Laplace posterior of the last layer."""
    x, y = (data[fold.where][fold.choose] for data in (last.embeddings, last.targets))
    chosen = last.choose(structure, search, link, x, y)
    val_nll = metrics.nll(last.predict(structure, x, link, chosen), y)
    test = last.embeddings["test"][fold.predict]
    return Outcome(last.predict(structure, test, link, chosen), val_nll, chosen)


# --- families of methods --------------------------------------------------------------


def is_main(method: str) -> bool:
    """Whether a method is shown under all protocols, and beside the slow ones."""
    if method.startswith("last layer"):
        return method.startswith(("last layer, full", "last layer, diag"))
    searches = ("early stopping", "tempered, prior chosen", "calibrated")
    return method in ("MAP", "temperature scaling") or any(
        search in method for search in searches
    )


def links_of(args: Any, method: str) -> list[str]:
    """Links of a method of ELLA; of the last layer only probit, which suits it best."""
    of_last_layer = method.startswith(("last-layer", CALIBRATED_LAST_LAYER))
    links = args.links[-1:] if of_last_layer else args.links
    return [*links, CALIBRATED_LINK] if "calibrated" in method else links


def protocols_of(evaluation: Evaluation, method: str) -> list[str]:
    given = evaluation.protocols
    return given if is_main(method) else without_augmented(given)


def without_augmented(protocols: list[str]) -> list[str]:
    return [protocol for protocol in protocols if protocol != "augmented"]


def expected_rows(args: Any, evaluation: Evaluation, methods: list[str]) -> list[str]:
    """Keys of the rows of methods with links, for the time left."""
    return [
        f"{protocol} | {method} | {link}"
        for method in methods
        for link in links_of(args, method)
        for protocol in protocols_of(evaluation, method)
    ]


def embeddings_of(evaluation: Evaluation, setup: Cifar) -> dict[str, torch.Tensor]:
    """What the last layer sees of the images that settings are chosen and tested on."""
    names = sources(evaluation.protocols)
    return {which: setup.embeddings(which, setup.images(which)) for which in names}


def simple_methods(evaluation: Evaluation, setup: Cifar) -> None:
    embeddings = embeddings_of(evaluation, setup)
    with torch.no_grad():
        logits = {w: setup.model.linear(e) for w, e in embeddings.items()}
    evaluation.add(
        "MAP", NO_LINK, lambda fold: Outcome(logits["test"][fold.predict].softmax(-1))
    )
    evaluation.add(
        "temperature scaling",
        NO_LINK,
        lambda fold: ella.scale_on_fold(logits, evaluation.targets, fold),
    )


def last_layer_name(structure: str, search: str) -> str:
    return f"last layer, {structure}, {LAST_LAYER[search]}"


def last_layer_methods(args: Any, evaluation: Evaluation, setup: Cifar) -> None:
    train = setup.train[: args.n_fit] if args.smoke else setup.train
    embeddings = embeddings_of(evaluation, setup)
    embeddings["train"] = setup.embeddings("train", train)
    targets = {**evaluation.targets, "train": train.y}
    last = LastLayer(setup.model.linear, embeddings, targets, args.smoke)
    pairs = [*((structure, "evidence") for structure in STRUCTURES), ("full", "both")]
    names = [last_layer_name(*pair) for pair in pairs]
    evaluation.results.expect(expected_rows(args, evaluation, names))
    for (structure, search), name in zip(pairs, names, strict=True):
        for link in args.links:
            evaluation.add(
                name,
                link,
                lambda fold, s=structure, how=search, li=link: run_last_layer(
                    last, s, how, li, fold
                ),
                protocols_of(evaluation, name),
            )


def ella_methods(
    args: Any, evaluation: Evaluation, setup: Cifar, ranks: list[int]
) -> None:
    def load() -> tuple[ella.Study, dict[str, FeatureCache]]:
        features = {w: setup.features(w) for w in sources(evaluation.protocols)}
        return ella.Study(setup.la, setup.features("fit")), features

    settings = ella_settings(ranks, args.smoke)
    add_settings(args, evaluation, {str(s): s for s in settings}, load)


def last_layer_ella(args: Any, evaluation: Evaluation, setup: Cifar) -> None:
    """ELLA of the last layer: of as few directions as of the network, and of all.

    With all of them, and nothing outside, it is the layer's full posterior.
    """
    few = Setting(args.ranks[0], "both")
    full = Setting(min(HEAD_WEIGHTS, args.subsample_size), "calibrated")
    names = {f"last-layer {few}": few, CALIBRATED_LAST_LAYER: full}

    def load() -> tuple[ella.Study, dict[str, FeatureCache]]:
        train = setup.train[: args.n_fit] if args.smoke else setup.train
        embedded = {
            which: Images(x, evaluation.targets[which])
            for which, x in embeddings_of(evaluation, setup).items()
        }
        embedded["fit"] = Images(setup.embeddings("train", train), train.y)
        return setup.head_study(embedded)

    add_settings(args, evaluation, names, load)


def add_settings(
    args: Any,
    evaluation: Evaluation,
    settings: dict[str, Setting],
    load: Callable[[], tuple[ella.Study, dict[str, FeatureCache]]],
) -> None:
    """Rows of ELLA's settings by name, of the study and the features of `load`."""
    keys = expected_rows(args, evaluation, list(settings))
    if all(key in evaluation.results.rows for key in keys):
        return
    study, features = load()
    evaluation.results.expect(keys)
    for name, setting in settings.items():
        for link in links_of(args, name):
            evaluation.add(
                name,
                link,
                lambda fold, s=setting, li=link: ella.on_fold(
                    study, s, li, fold, features, PAPER_PRIOR, CIFAR_TRAIN_SIZE
                ),
                protocols_of(evaluation, name),
            )


def best_rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    """What would be used of each family, by validation NLL."""
    either = ("ELLA", "last-layer ELLA")
    return [
        *evaluation.best("last layer"),
        *evaluation.best("ELLA"),
        *evaluation.best(EITHER, prefixes=either),
    ]


# --- seeds ----------------------------------------------------------------------------


def make_evaluation(
    args: Any, setup: Cifar, name: str, protocols: list[str]
) -> Evaluation:
    sizes = ("rank", "n_fit", "n_validation", "n_test", "subsample_size", "seed")
    settings = {k: getattr(setup, k) for k in ("network", *sizes)}
    settings["strength"] = setup.strength
    results = runs.Results(args.out / f"{name}.json", settings)
    word = f"predictions_{setup.n_fit}_{setup.n_validation}_{setup.n_test}"
    targets = {which: setup.images(which).y for which in sources(protocols)}
    return Evaluation(results, setup.folder / word, targets, protocols)


def first_setup(args: Any) -> Cifar:
    return Cifar(
        args,
        args.network,
        args.rank,
        args.n_fit,
        args.n_validation,
        args.n_test,
        args.seeds[0],
        args.subsample_size,
    )


def seed_setup(args: Any, seed: int) -> Cifar:
    """The set-up of a seed in the table of seeds."""
    # The first seed's basis is there already, with its own rank.
    rank = args.rank if seed == args.seeds[0] else args.seed_rank
    return Cifar(
        args,
        args.network,
        rank,
        args.seed_n_fit,
        args.seed_n_validation,
        args.seed_n_test,
        seed,
        args.subsample_size,
    )


def seed_rows(
    args: Any, first: Evaluation, seed: int
) -> tuple[Evaluation, list[dict[str, Any]]]:
    """ELLA's settings with the basis and the fitted images of one seed."""
    same = ("n_fit", "n_validation", "n_test")
    if seed == args.seeds[0] and all(
        getattr(args, k) == getattr(args, f"seed_{k}") for k in same
    ):
        evaluation = first
    else:
        setup = seed_setup(args, seed)
        name = f"{args.network}_seed{seed}"
        protocols = without_augmented(args.protocols)
        evaluation = make_evaluation(args, setup, name, protocols)
        ella_methods(args, evaluation, setup, args.seed_ranks)
    settings = {str(s) for s in ella_settings(args.seed_ranks, args.smoke)}
    among = {(s, link) for s in settings for link in links_of(args, s)}
    rows = [
        r
        for r in evaluation.results.rows.values()
        if (r.get("method"), r.get("link")) in among
    ]
    return evaluation, rows


def seeds_table(args: Any, first: Evaluation) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, for settings that all of them have."""
    found = [seed_rows(args, first, seed) for seed in args.seeds]
    pairs = [{(r["method"], r["link"]) for r in rows} for _, rows in found]
    common = set.intersection(*pairs)
    # The choice of a seed is among the settings that every seed has.
    tables = [rows + e.best("ELLA", common) for e, rows in found]
    first.best("ELLA")  # its file is of all settings again
    return spread(tables)


# --- posteriors over all layers, on a subset ------------------------------------------


def subset_table(
    args: Any, main_evaluation: Evaluation, setup: Cifar
) -> list[dict[str, Any]]:
    """laplace-torch's all-layer posteriors, and the others on the same images."""
    sizes = subset_sizes(args)
    validation = setup.validation[: args.n_subset_validation]
    test = setup.test[: args.n_subset]
    slow = AllLayers(
        setup.model,
        setup.train,
        setup.folder.parent / f"all_layers_{sizes.n_fit}_{sizes.subsample_size}",
        sizes,
        CIFAR_TRAIN_SIZE,
        PAPER_PRIOR,
    )
    print(f"laplace-torch's posteriors over all layers: {sizes}", flush=True)
    settings = {"sizes": vars(sizes), "n": len(test), "n_validation": len(validation)}
    results = runs.Results(args.out / f"{args.network}_subset.json", settings)
    targets = {"validation": validation.y, "test": test.y}
    folder = slow.folder / f"predictions_{len(test)}"
    protocols = without_augmented(args.protocols)
    evaluation = Evaluation(results, folder, targets, protocols)
    names = {
        ("diag", "fixed"): "all layers, diag, prior by evidence",
        ("diag", "tuned"): "all layers, diag, tempered, prior chosen",
        ("ella", "fixed"): "laplace-torch's ELLA, all data",
        ("ella", "tuned"): "laplace-torch's ELLA, tempered, prior chosen",
    }
    keys = expected_rows(args, evaluation, list(names.values()))
    if not all(key in results.rows for key in keys):
        data = {
            "validation": slow.covariances("validation", validation),
            "test": slow.covariances("test", test),
        }
        results.expect(keys)
        for (name, how), label in names.items():
            for link in args.links:

                def run(
                    fold: Fold, name: str = name, how: str = how, link: str = link
                ) -> Outcome:
                    if how == "fixed":
                        return slow.fixed(name, link, fold, data)
                    return slow.tuned(name, link, fold, data, targets)

                evaluation.add(label, link, run)
    references = reference_rows(main_evaluation, test.y)
    rows = [r for r in references if r["protocol"] in protocols]
    return rows + list(results.rows.values())


def subset_sizes(args: Any) -> Sizes:
    if args.smoke:
        return Sizes(n_fit=4, subsample_size=2, n_eigenvalues=1, n_steps=3)
    return Sizes()


def reference_rows(
    evaluation: Evaluation, targets: torch.Tensor
) -> list[dict[str, Any]]:
    """Rows of the whole table, scored on its first images."""
    wanted = [
        r
        for r in [*evaluation.results.rows.values(), *best_rows(evaluation)]
        if "nll" in r and (r["link"] in (NO_LINK, "chosen") or is_main(r["method"]))
    ]
    rows = []
    for row in wanted:
        probs = evaluation.probs(row["method"], row["link"], row["protocol"])
        scores = metrics.classification_metrics(probs[: len(targets)], targets)
        rows.append({**row, **scores})
    return rows


def subset_note(n_validation: int, n_test: int, sizes: Sizes) -> str:
    return (
        f"The first {n_test:,} test images. laplace-torch's posteriors over all layers "
        f"are fitted on {sizes.n_fit} images, their curvature scaled to "
        f"{CIFAR_TRAIN_SIZE:,}; its ELLA has M = {sizes.subsample_size} and K = "
        f"{sizes.n_eigenvalues}. Their settings are chosen on {n_validation} moved "
        "training images, or on halves of this subset; those of the other rows are "
        "chosen as in the table of all images.\n\n"
    )


# --- numbers beside the table ---------------------------------------------------------


def paired(
    evaluation: Evaluation, protocol: str, ranks: list[int], link: str
) -> list[dict[str, Any]]:
    """Differences between the main methods on the same images."""
    references = "temperature scaling", "best last layer on validation"
    names = [
        ("MAP", NO_LINK),
        (references[0], NO_LINK),
        (references[1], "chosen"),
        (CALIBRATED_LAST_LAYER, "probit"),
        (str(Setting(ranks[0], "stop")), link),
        (str(Setting(ranks[0], "calibrated")), link),
        (str(Setting(ranks[-1], "both", "prior")), link),
        (str(Setting(ranks[-1], "calibrated")), link),
        (str(Setting(ranks[-1], "calibrated", "prior")), link),
        ("best ELLA on validation", "chosen"),
        (f"best {EITHER} on validation", "chosen"),
    ]
    probs = {}
    for method, its_link in names:
        stored = evaluation.probs(method, its_link, protocol)
        if stored is not None:
            plain = its_link in (NO_LINK, "chosen")
            probs[method if plain else f"{method}, {its_link}"] = stored
    return facts.paired_differences(probs, evaluation.targets["test"], references)


def write_facts(path: Path, args: Any, evaluation: Evaluation, setup: Cifar) -> None:
    images = evaluation.results.compute(
        "images", lambda: {"rows": facts.image_facts(setup)}
    )
    text = "**What the network makes of the images**\n\n"
    text += runs.markdown(images["rows"], facts.IMAGE_COLUMNS, {"T": ".3f"})
    for protocol in args.protocols:
        rows = paired(evaluation, protocol, args.ranks, args.links[0])
        text += f"\n**Paired differences: {TITLES[protocol].lower()}**\n\n"
        text += runs.markdown(rows, facts.PAIR_COLUMNS, facts.PAIR_DIGITS)
    path.write_text(text)


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
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS)
    parser.add_argument(
        "--protocols", nargs="+", default=list(PROTOCOLS), choices=PROTOCOLS
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of basis and fitted images"
    )
    parser.add_argument(
        "--seed-ranks", type=int, nargs="+", help="of the table of seeds: --ranks"
    )
    for name in ("rank", "n-fit", "n-validation", "n-test"):
        parser.add_argument(f"--seed-{name}", type=int, help=f"--{name} of seeds")
    parser.add_argument(
        "--n-subset", type=int, default=1000, help="for all-layer methods, 0: none"
    )
    parser.add_argument("--n-subset-validation", type=int, default=200)
    parser.add_argument(
        "--tables", action="store_true", help="only write the tables of methods again"
    )
    args = runs.start(parser, argv)
    if args.smoke:
        args.rank, args.ranks, args.subsample_size = 6, [4, 6], 16
        args.n_fit, args.n_validation, args.n_test = 34, 20, 20
        args.links = ["mc"]
        args.n_subset, args.n_subset_validation = min(args.n_subset, 4), 4
        args.seed_ranks, args.seed_rank = [4], 4
    args.seed_ranks = args.seed_ranks or args.ranks
    args.seed_rank = args.seed_rank or max(args.seed_ranks)
    for name in ("n_fit", "n_validation", "n_test"):
        if getattr(args, f"seed_{name}") is None:
            setattr(args, f"seed_{name}", getattr(args, name))
    for option, ranks, limit in (
        ("--ranks", args.ranks, args.rank),
        ("--seed-ranks", args.seed_ranks, args.seed_rank),
    ):
        if max(ranks) > limit:
            parser.error(f"{option} go up to {max(ranks)}, the basis only to {limit}")
    return args


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    name = args.network
    if args.tables:
        rows = published_rows(args.out, name)
        write_methods(args, rows)
        return rows
    setup = first_setup(args)
    evaluation = make_evaluation(args, setup, name, args.protocols)
    simple_methods(evaluation, setup)
    last_layer_methods(args, evaluation, setup)
    last_layer_ella(args, evaluation, setup)
    ella_methods(args, evaluation, setup, args.ranks)
    rows = [*method_rows(args.out, name), *best_rows(evaluation)]
    write_methods(args, rows)
    write_facts(args.out / f"{name}_facts.md", args, evaluation, setup)
    plot_reliability(args.out / f"{name}_reliability.png", evaluation, args)
    runs.write_environment(args.out / f"{name}_environment.json", args)
    print((args.out / f"{name}.md").read_text(), flush=True)
    write_attempts(args, evaluation, setup)
    if args.n_subset:
        write_subset(args, evaluation, setup)
    if len(args.seeds) > 1:
        table = seeds_table(args, evaluation)
        runs.write_csv(args.out / f"{name}_seeds.csv", table)
        words = [with_errors(row) for row in table]
        note = (
            f"Mean ± standard deviation over seeds {', '.join(map(str, args.seeds))}; "
            f"{args.seed_n_test:,} test images, {args.seed_n_fit:,} fitted.\n\n"
        )
        write_tables(args.out / f"{name}_seeds.md", words, SPREAD_COLUMNS, note)
    return rows


def method_rows(folder: Path, network: str) -> list[dict[str, Any]]:
    """Rows of single methods, from the files of this script and of `mfvi.py`."""
    rows, images = [], None
    for path in (folder / f"{network}.json", folder / f"{network}_mfvi.json"):
        if not path.exists():
            continue
        stored = json.loads(path.read_text())
        its_images = {name: stored["settings"][name] for name in SAME_IMAGES}
        if images not in (None, its_images):
            print(f"{path.name} is not in the table: {its_images}, not {images}")
            continue
        images = its_images
        rows += [row for row in stored["rows"].values() if "rows" not in row]
    return rows


def published_rows(folder: Path, network: str) -> list[dict[str, Any]]:
    """All rows of the table; the best ones have no file but the table's own."""
    with (folder / f"{network}.csv").open(newline="") as file:
        best = [row for row in csv.DictReader(file) if row["link"] == "chosen"]
    numbers = ("accuracy", "nll", "ece", "brier", "val_nll")
    best = [{**row, **{k: float(row[k]) for k in numbers}} for row in best]
    return [*method_rows(folder, network), *best]


def write_methods(args: Any, rows: list[dict[str, Any]]) -> None:
    """The table of all methods, and that of the main ones."""
    name = args.network
    runs.write_csv(args.out / f"{name}.csv", rows)
    write_tables(args.out / f"{name}.md", rows, COLUMNS)
    write_summary(args.out / f"{name}_summary.md", rows, args)


def summary(rows: list[dict[str, Any]], args: Any) -> list[dict[str, Any]]:
    """The main methods with the link that suits them, all protocols in one row."""
    first, last = args.ranks[0], args.ranks[-1]
    wanted = [
        ("MAP", NO_LINK),
        ("temperature scaling", NO_LINK),
        ("MFVI-BF", "mc"),
        (last_layer_name("full", "evidence"), "probit"),
        (last_layer_name("full", "both"), "probit"),
        (CALIBRATED_LAST_LAYER, "probit"),
        (str(Setting(first, "none")), "mc"),
        (str(Setting(first, "stop")), "mc"),
        (str(Setting(last, "prior")), "mc"),
        (str(Setting(last, "both", "prior")), "mc"),
        (str(Setting(first, "calibrated")), "mc"),
        (str(Setting(last, "calibrated")), "mc"),
        (str(Setting(last, "calibrated", "prior")), "mc"),
        (str(Setting(last, "calibrated", "prior")), CALIBRATED_LINK),
        ("best last layer on validation", "chosen"),
        ("best ELLA on validation", "chosen"),
        (f"best {EITHER} on validation", "chosen"),
    ]
    found = {(r["method"], r["link"], r["protocol"]): r for r in rows}
    table = []
    for method, link in wanted:
        row = {"method": method, "link": link}
        for protocol in args.protocols:
            scores = found.get((method, link, protocol))
            for key in SCORES if scores else ():
                row[f"{key} {protocol}"] = scores[key]
        if len(row) > 2:
            table.append(row)
    return table


def write_summary(path: Path, rows: list[dict[str, Any]], args: Any) -> None:
    columns = {"method": "method", "link": "link"}
    for key, title in SCORES.items():
        for protocol in args.protocols:
            columns[f"{key} {protocol}"] = f"{title}, {protocol}"
    path.write_text(runs.markdown(summary(rows, args), columns, {}))


def write_attempts(args: Any, evaluation: Evaluation, setup: Cifar) -> None:
    images = setup.train[: 2 if args.smoke else 8]
    found = evaluation.results.compute(
        "all layers", lambda: {"rows": attempts(setup.model, images)}
    )
    columns = {"method": "method", "outcome": "outcome"}
    text = runs.markdown(found["rows"], columns, {})
    (args.out / f"{args.network}_all_layers.md").write_text(text)


def write_subset(args: Any, evaluation: Evaluation, setup: Cifar) -> None:
    rows = subset_table(args, evaluation, setup)
    path = args.out / f"{args.network}_subset.md"
    note = subset_note(args.n_subset_validation, args.n_subset, subset_sizes(args))
    write_tables(path, rows, COLUMNS, note)
    runs.write_csv(path.with_suffix(".csv"), rows)


def write_tables(
    path: Path, rows: list[dict[str, Any]], columns: dict[str, str], note: str = ""
) -> None:
    """One table per protocol."""
    text = note
    for protocol, title in TITLES.items():
        mine = [r for r in rows if r.get("protocol") == protocol]
        if mine:
            text += f"**{title}**\n\n" + runs.markdown(mine, columns, {}) + "\n"
    path.write_text(text)


def plot_reliability(path: Path, evaluation: Evaluation, args: Any) -> None:
    """Accuracy less confidence against confidence."""
    plt = figures.pyplot()
    wanted = [
        ("MAP", NO_LINK),
        ("temperature scaling", NO_LINK),
        (last_layer_name("full", "evidence"), "probit"),
        ("best last layer on validation", "chosen"),
        (str(Setting(args.ranks[0], "stop")), "mc"),
        (str(Setting(args.ranks[-1], "calibrated", "prior")), "mc"),
    ]
    titles = {
        "train": "settings chosen on moved training images",
        "halves": "settings chosen on new images",
        "augmented": "settings chosen on augmented training images",
    }
    protocols = evaluation.protocols
    figure, axes = plt.subplots(
        1, len(protocols), figsize=(5 * len(protocols), 4.4), squeeze=False, sharey=True
    )
    for axis, protocol in zip(axes[0], protocols, strict=True):
        axis.axhline(0, color="black", linewidth=0.8)
        for i, (method, link) in enumerate(wanted):
            probs = evaluation.probs(method, link, protocol)
            if probs is None:
                continue
            curve = metrics.reliability_curve(probs, evaluation.targets["test"], 10)
            # Bins of a few images show only noise.
            shown = np.array(curve.count) >= min(20, len(probs) // 20)
            confidence = np.array(curve.confidence)[shown]
            gap = np.array(curve.accuracy)[shown] - confidence
            label = method if link in (NO_LINK, "chosen") else f"{method} ({link})"
            axis.plot(confidence, gap, "o-", color=f"C{i}", markersize=3, label=label)
        axis.set_xlabel("confidence")
        axis.set_title(titles[protocol])
    axes[0, 0].set_ylabel("accuracy − confidence")
    figures.save(figure, path, columns=2)


if __name__ == "__main__":
    main(sys.argv[1:])
