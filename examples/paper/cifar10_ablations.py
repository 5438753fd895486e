"""What N, M, K and the complement do to the test NLL, and what a prediction costs.

    python examples/paper/cifar10.py    # whose features are read
    python examples/paper/cifar10_ablations.py
    python examples/paper/cifar10_ablations.py --studies N stopping time    # all but M

N         NLL against the number of fitted data (Fig. 2c), for several K, with and
          without the complement: K × N × complement. Up to --n-fit images N is the
          number of images fitted; beyond, their mean curvature is scaled to N images.
          Nothing is chosen: these are curves of the test images, for fixed priors.
stopping  whether large K makes early stopping unnecessary: for each K all data, early
          stopping, tempering, and all data with a chosen prior. Choices are made on
          one half of the images for the other.
M         NLL against M and K (Table 6, Fig. 4b): every M has its own basis and
          features, of --n-images-M test images; choices as in 'stopping'.
time      a prediction against K (Fig. 4c), with the forward pass and other methods.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from common import ella, figures, models, runs
from common.all_layers import AllLayers, Sizes
from common.cifar import PAPER_PRIOR, Cifar
from common.ella import Setting
from common.protocols import folds
from laplace import Laplace

from laplace_ella import FeatureCache, metrics

STUDIES = ("N", "stopping", "M", "time")
SIZES = (32, 64, 125, 250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 50_000)
PRIORS = (PAPER_PRIOR, 50.0, 500.0)

#: What is compared at each K in the study of stopping, and of M and K.
STOPPING = (
    ("none", "drop"),
    ("stop", "drop"),
    ("temperature", "drop"),
    ("prior", "drop"),
    ("both", "drop"),
    ("prior", "prior"),
)
SUBSAMPLES = (("temperature", "drop"), ("both", "drop"))


def make_setup(args: Any, subsample_size: int, rank: int, **sizes: int) -> Cifar:
    return Cifar(
        args,
        args.network,
        rank,
        sizes.get("n_fit", args.n_fit),
        0,
        sizes.get("n_test", args.n_test),
        args.seed,
        subsample_size,
    )


# --- N --------------------------------------------------------------------------------


def study_n(
    args: Any, results: runs.Results, study: ella.Study, test: FeatureCache
) -> None:
    """K × N × complement × prior × link."""
    base = metrics.classification_metrics(test.f_mu.softmax(-1), test.targets)
    results.compute("MAP", lambda: {"study": "MAP", **base})
    grid = [
        (k, complement, prior, n, link)
        for k in args.ranks
        for complement in ("drop", "prior")
        for prior in PRIORS
        for n in args.sizes
        for link in args.links
    ]

    def row(k: int, complement: str, prior: float, n: int, link: str) -> dict[str, Any]:
        fitted = min(n, len(study.train))
        la = study.posterior(
            k, fitted, prior_precision=prior, complement=complement, n_effective=n
        )
        probs = ella.predict(la, test, link, n_samples=128)
        return {
            "study": "N",
            "K": k,
            "N": n,
            "fitted": fitted,
            "complement": complement,
            "prior": prior,
            "link": link,
            **metrics.classification_metrics(probs, test.targets),
        }

    keys = {"N " + " ".join(map(str, point)): point for point in grid}
    results.expect(keys)
    for key, point in keys.items():
        results.compute(key, lambda point=point: row(*point))


def best_over_n(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lowest NLL over N and the NLL on all data, for each other setting."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        if row["study"] == "N":
            key = (row["K"], row["complement"], row["prior"], row["link"])
            groups.setdefault(key, []).append(row)
    table = []
    for (k, complement, prior, link), curve in sorted(groups.items()):
        low, last = min(curve, key=lambda r: r["nll"]), max(curve, key=lambda r: r["N"])
        table.append(
            {
                "K": k,
                "complement": complement,
                "prior": prior,
                "link": link,
                "best_N": low["N"],
                "best_nll": low["nll"],
                "best_ece": low["ece"],
                "all_nll": last["nll"],
                "all_ece": last["ece"],
            }
        )
    return table


N_TABLE = {
    "K": "K",
    "complement": "complement",
    "prior": "prior precision",
    "link": "link",
    "best_N": "best N (of the curve)",
    "best_nll": "its NLL",
    "best_ece": "its ECE",
    "all_nll": "NLL at N = 50,000",
    "all_ece": "its ECE",
}


def plot_n(path: Path, rows: list[dict[str, Any]], link: str) -> None:
    """NLL against N, one panel for each prior and complement."""
    plt = figures.pyplot()
    mine = [r for r in rows if r["study"] == "N" and r["link"] == link]
    base = next(r["nll"] for r in rows if r["study"] == "MAP")
    ranks = sorted({r["K"] for r in mine})
    colors = plt.get_cmap("viridis")(torch.linspace(0, 0.9, len(ranks)).numpy())
    figure, axes = plt.subplots(
        2, len(PRIORS), figsize=(4 * len(PRIORS), 7), sharex=True, sharey=True
    )
    for i, complement in enumerate(("drop", "prior")):
        for j, prior in enumerate(PRIORS):
            axis = axes[i, j]
            axis.axhline(base, color="black", linestyle=":", label="MAP")
            for rank, color in zip(ranks, colors, strict=True):
                curve = sorted(
                    (r["N"], r["nll"])
                    for r in mine
                    if (r["K"], r["complement"], r["prior"])
                    == (rank, complement, prior)
                )
                axis.plot(*zip(*curve, strict=True), color=color, label=f"K={rank}")
            axis.set(xscale="log", yscale="log", ylim=(base * 0.6, base * 8))
            ticks = [t for t in (0.2, 0.3, 0.4, 0.6, 1, 2) if base * 0.6 < t < base * 8]
            axis.set_yticks(ticks, [str(t) for t in ticks])
            axis.minorticks_off()
            word = {"drop": "dropped (paper)", "prior": "kept"}[complement]
            axis.set_title(f"complement {word}, prior precision {prior:g}", fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("number of data N")
    for axis in axes[:, 0]:
        axis.set_ylabel("test NLL")
    figures.save(figure, path, columns=len(ranks) + 1, dpi=100)


# --- stopping, M and K ----------------------------------------------------------------


def halves_row(
    study: ella.Study, setting: Setting, test: FeatureCache
) -> dict[str, Any]:
    """Scores of a setting chosen on one half of the images for the other (MC)."""
    probs = torch.empty_like(test.f_mu)
    chosen = []
    for fold in folds("halves", {"test": len(test)}):
        outcome = ella.on_fold(
            study,
            setting,
            "mc",
            fold,
            {"test": test},
            PAPER_PRIOR,
            models.CIFAR_TRAIN_SIZE,
        )
        probs[fold.predict] = outcome.probs.to(probs)
        chosen.append(ella.describe(outcome.chosen))
    return {
        "K": setting.rank,
        "method": str(setting).split(", ", 1)[1],
        "link": "mc",
        **metrics.classification_metrics(probs, test.targets),
        "chosen": "; ".join(chosen),
    }


def study_stopping(
    args: Any, results: runs.Results, study: ella.Study, test: FeatureCache
) -> None:
    searches = STOPPING[:2] if args.smoke else STOPPING
    settings = [Setting(k, s, c) for k in args.ranks for s, c in searches]
    results.expect(f"stopping {s}" for s in settings)
    for setting in settings:
        results.compute(
            f"stopping {setting}",
            lambda s=setting: {"study": "stopping", **halves_row(study, s, test)},
        )


def study_m(args: Any, results: runs.Results) -> None:
    """M × K."""
    for m in args.subsample_sizes:
        ranks = [k for k in args.ranks if k <= m]
        settings = [Setting(k, s, c) for k in ranks for s, c in SUBSAMPLES]
        keys = [f"M {m} {setting}" for setting in settings]
        if all(key in results.rows for key in keys):
            continue
        print(f"M = {m}: basis and features", flush=True)
        # The basis of cifar10.py is used where it has this M.
        sizes = {"n_fit": args.n_fit_M, "n_test": args.n_images_M}
        setup = make_setup(args, m, min(m, args.rank), **sizes)
        test, study = (
            setup.features("test"),
            ella.Study(setup.la, setup.features("fit")),
        )
        results.expect(keys)
        for key, setting in zip(keys, settings, strict=True):
            # A sample may span fewer directions than it has gradients.
            if setting.rank <= test.phi.shape[-1]:
                results.compute(
                    key,
                    lambda s=setting, m=m, test=test, study=study: {
                        "study": "M",
                        "M": m,
                        **halves_row(study, s, test),
                    },
                )


def across_ranks(
    rows: list[dict[str, Any]], study: str, name: str, metric: str = "nll"
) -> list[dict[str, Any]]:
    """One row for each value of `name`, one column for each K."""
    mine = [r for r in rows if r["study"] == study]
    table: dict[Any, dict[str, Any]] = {}
    for row in mine:
        line = table.setdefault(row[name], {name: row[name]})
        line[f"K={row['K']}"] = row[metric]
    return list(table.values())


def rank_columns(rows: list[dict[str, Any]], name: str, title: str) -> dict[str, str]:
    ranks = sorted({r["K"] for r in rows if r["study"] in ("stopping", "M")})
    return {name: title, **{f"K={k}": f"K={k}" for k in ranks}}


def stopping_tables(rows: list[dict[str, Any]]) -> str:
    columns = rank_columns(rows, "method", "method")
    text = ""
    for metric, title in (("nll", "NLL"), ("ece", "ECE")):
        table = across_ranks(rows, "stopping", "method", metric)
        text += f"**{title}**\n\n{runs.markdown(table, columns, {})}\n"
    return text


def subsample_tables(rows: list[dict[str, Any]]) -> str:
    columns = rank_columns(rows, "M", "M")
    text = ""
    for method in dict.fromkeys(r["method"] for r in rows if r["study"] == "M"):
        mine = [r for r in rows if r["study"] == "M" and r["method"] == method]
        table = sorted(across_ranks(mine, "M", "M"), key=lambda r: r["M"])
        text += f"**NLL, {method}**\n\n{runs.markdown(table, columns, {})}\n"
    return text


def plot_m(path: Path, rows: list[dict[str, Any]]) -> None:
    """NLL against K, a curve for each M, a panel for each method."""
    plt = figures.pyplot()
    mine = [r for r in rows if r["study"] == "M"]
    methods = list(dict.fromkeys(r["method"] for r in mine))
    sizes = sorted({r["M"] for r in mine}, reverse=True)  # the longest curve first
    colors = plt.get_cmap("viridis")(torch.linspace(0.9, 0, len(sizes)).numpy())
    figure, axes = plt.subplots(
        1, len(methods), figsize=(4.5 * len(methods), 4), squeeze=False, sharey=True
    )
    for axis, method in zip(axes[0], methods, strict=True):
        for m, color in zip(sizes, colors, strict=True):
            curve = sorted(
                (r["K"], r["nll"]) for r in mine if (r["M"], r["method"]) == (m, method)
            )
            if curve:
                axis.plot(*zip(*curve, strict=True), "o-", color=color, label=f"M={m}")
        axis.set(xscale="log", xlabel="K", title=method)
        ranks = sorted({r["K"] for r in mine})
        axis.set_xticks(ranks, [str(k) for k in ranks])
        axis.minorticks_off()
    axes[0, 0].set_ylabel("test NLL")
    figures.save(figure, path, columns=len(sizes))


def plot_stopping(path: Path, rows: list[dict[str, Any]]) -> None:
    """NLL against K, a curve for each way to choose."""
    plt = figures.pyplot()
    mine = [r for r in rows if r["study"] == "stopping"]
    base = next((r["nll"] for r in rows if r["study"] == "MAP"), None)
    figure, axis = plt.subplots(figsize=(5.5, 4.5))
    for method in dict.fromkeys(r["method"] for r in mine):
        curve = sorted((r["K"], r["nll"]) for r in mine if r["method"] == method)
        axis.plot(*zip(*curve, strict=True), "o-", markersize=4, label=method)
    axis.set(xscale="log", xlabel="K", ylabel="test NLL")
    if base is not None:  # what is worse than the network may leave the figure
        axis.axhline(base, color="black", linestyle=":", label="MAP")
        axis.set_ylim(top=1.1 * base)
    ranks = sorted({r["K"] for r in mine})
    axis.set_xticks(ranks, [str(k) for k in ranks])
    axis.minorticks_off()
    figures.save(figure, path, columns=2)


# --- time -----------------------------------------------------------------------------


def milliseconds(predict: Any, n_images: int, repeats: int = 3) -> dict[str, float]:
    """Wall-clock and CPU time per image: the lowest of a few, others run here too."""
    times = []
    for _ in range(repeats):
        with runs.stopwatch() as watch:
            predict()
        times.append(watch)
    return {
        "ms": 1000 * min(t["wall"] for t in times) / n_images,
        "cpu_ms": 1000 * min(t["cpu"] for t in times) / n_images,
    }


def study_time(args: Any, results: runs.Results, setup: Cifar) -> None:
    """Predictions that start from images."""
    x = setup.test.x[: 2 if args.smoke else 48]
    few = x[: 2 if args.smoke else 8]

    def add(method: str, predict: Any, n: int, **extra: Any) -> None:
        key = " ".join(["time", method, *map(str, extra.values())])
        results.compute(
            key,
            lambda: {
                "study": "time",
                "method": method,
                **extra,
                **milliseconds(predict, n),
            },
        )

    add("MAP", lambda: ella.forward(setup.model, x), len(x))
    for rank in sorted(args.ranks, reverse=True):
        for complement in ("drop", "prior"):

            def predict(k: int = rank, c: str = complement) -> None:
                la = setup.la
                la.truncate(k)
                la.complement = c
                la(x, link_approx="mc", n_samples=512)

            add("ELLA", predict, len(x), K=rank, complement=complement)
    last = Laplace(setup.model.linear, "classification", "all", "full")
    embedded = ella.forward(setup.model.embed, setup.train.x[:500])
    last.fit(loader_of(embedded, setup.train.y[:500]))
    add(
        "last layer, full",
        lambda: last(setup.model.embed(x).detach(), link_approx="mc", n_samples=512),
        len(x),
    )
    # How long a prediction takes does not depend on what was fitted.
    sizes = Sizes(n_fit=4, subsample_size=2, n_eigenvalues=1)
    if not args.smoke:
        sizes = Sizes(n_fit=24, subsample_size=24, n_eigenvalues=20)
    slow = AllLayers(setup.model, setup.train, Path(), sizes, 1, 1.0)
    add(
        "all layers, diag (laplace-torch)",
        lambda: slow.diag(few, link_approx="mc", n_samples=512),
        len(few),
    )
    add(
        "laplace-torch's ELLA",
        lambda: slow.ella(few, pred_type="gp", link_approx="mc", n_samples=512),
        len(few),
        K=sizes.n_eigenvalues,
    )


def loader_of(x: torch.Tensor, y: torch.Tensor) -> Any:
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, batch_size=100)


TIME_TABLE = {
    "method": "method",
    "K": "K",
    "complement": "complement",
    "ms": "wall-clock ms per image",
    "cpu_ms": "CPU ms per image",
}


def plot_time(path: Path, rows: list[dict[str, Any]]) -> None:
    plt = figures.pyplot()
    mine = [r for r in rows if r["study"] == "time"]
    figure, axis = plt.subplots(figsize=(5.5, 4.5))
    for complement in ("drop", "prior"):
        curve = sorted(
            (r["K"], r["ms"]) for r in mine if r.get("complement") == complement
        )
        word = {"drop": "dropped", "prior": "kept"}[complement]
        axis.plot(*zip(*curve, strict=True), "o-", label=f"ELLA, complement {word}")
    styles = {
        "MAP": (":", "black"),
        "last layer, full": ("--", "C2"),
        "all layers, diag (laplace-torch)": ("--", "C3"),
    }
    for method, (style, color) in styles.items():
        value = next(r["ms"] for r in mine if r["method"] == method)
        label = "MAP (one forward pass)" if method == "MAP" else method
        axis.axhline(value, color=color, linestyle=style, label=label)
    theirs = next(r for r in mine if r["method"] == "laplace-torch's ELLA")
    axis.plot(theirs["K"], theirs["ms"], "x", color="C4", label=theirs["method"])
    axis.set(xscale="log", yscale="log", xlabel="K", ylabel="wall-clock ms per image")
    ranks = sorted({r["K"] for r in mine if "K" in r})
    axis.set_xticks(ranks, [str(k) for k in ranks])
    axis.minorticks_off()
    figures.save(figure, path, columns=2)


# --- the script -----------------------------------------------------------------------


def parse(argv: list[str] | None) -> Any:
    parser = runs.arguments("cifar10_ablations", __doc__)
    parser.add_argument("--network", default="resnet20", choices=models.CIFAR_RESNETS)
    parser.add_argument("--weights", help="path or URL, default in --data-root")
    parser.add_argument("--studies", nargs="+", default=list(STUDIES), choices=STUDIES)
    parser.add_argument("--rank", type=int, default=512, help="of cifar10.py's basis")
    parser.add_argument("--subsample-size", type=int, default=2000, help="the same")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[5, 20, 64, 128, 256, 512]
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument(
        "--subsample-sizes",
        type=int,
        nargs="+",
        default=[125, 250, 500, 1000, 2000, 4000],
    )
    parser.add_argument("--n-fit", type=int, default=3000)
    parser.add_argument("--n-test", type=int, default=5000)
    parser.add_argument("--n-images-M", type=int, default=1000)
    parser.add_argument("--n-fit-M", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--links", nargs="+", default=["mc"], choices=["mc", "probit"])
    args = runs.start(parser, argv)
    if args.smoke:
        args.rank, args.ranks, args.sizes = 6, [2, 6], [16, 50_000]
        args.n_fit, args.n_test, args.n_images_M, args.n_fit_M = 34, 20, 20, 34
        args.subsample_size, args.subsample_sizes = 16, [8]
    return args


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    name = args.network
    keep = ("network", "rank", "n_fit", "n_test", "seed", "n_images_M", "n_fit_M")
    settings = {k: getattr(args, k) for k in (*keep, "subsample_size")}
    results = runs.Results(args.out / f"{name}.json", settings)
    setup = make_setup(args, args.subsample_size, args.rank)
    if "N" in args.studies or "stopping" in args.studies:
        test = setup.features("test")
        study = ella.Study(setup.la, setup.features("fit"))
        if "N" in args.studies:
            study_n(args, results, study, test)
        if "stopping" in args.studies:
            study_stopping(args, results, study, test)
        del test, study  # gigabytes, which the basis of the largest M needs
    if "time" in args.studies:
        study_time(args, results, make_setup(args, args.subsample_size, args.rank))
    if "M" in args.studies:
        study_m(args, results)
    rows = list(results.rows.values())
    runs.write_csv(args.out / f"{name}.csv", rows)
    write(args.out / name, rows, args.links)
    runs.write_environment(args.out / "environment.json", args)
    return rows


def write(path: Path, rows: list[dict[str, Any]], links: list[str]) -> None:
    """Tables and figures of the studies that were made."""
    made = {r["study"] for r in rows}
    tables = {}
    if "N" in made:
        tables[""] = runs.markdown(best_over_n(rows), N_TABLE, {"prior": "g"})
        for link in links:
            plot_n(path.with_name(f"{path.name}_N_{link}.png"), rows, link)
    if "stopping" in made:
        tables["_stopping"] = stopping_tables(rows)
        plot_stopping(path.with_name(f"{path.name}_stopping.png"), rows)
    if "M" in made:
        tables["_M"] = subsample_tables(rows)
        plot_m(path.with_name(f"{path.name}_M.png"), rows)
    if "time" in made:
        times = [r for r in rows if r["study"] == "time"]
        digits = {"ms": ".2f", "cpu_ms": ".2f"}
        tables["_time"] = runs.markdown(times, TIME_TABLE, digits)
        plot_time(path.with_name(f"{path.name}_time.png"), rows)
    for suffix, text in tables.items():
        path.with_name(f"{path.name}{suffix}.md").write_text(text)
        print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
