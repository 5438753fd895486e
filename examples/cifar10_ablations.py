"""What N, M, K and the complement do to the test NLL, and what a prediction costs.

    python examples/cifar10_ablations.py            # from the features of cifar10.py
    python examples/cifar10_ablations.py --subsample-sizes 125 250 500 1000
    python examples/cifar10_ablations.py --timing

* NLL against the number of fitted data N (Fig. 2c), for several K, with and without the
  complement: K × N × complement. Up to --n-fit images N is the number of images fitted;
  beyond, their mean curvature is scaled to N images.
* NLL against M and K (Table 6, Fig. 4b): every M has its own basis and features.
* seconds a prediction against K (Fig. 4c), in CPU time of this process.

Nothing is chosen here: curves are of the test images themselves, for fixed priors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from common import ella, models, runs
from common.cifar import PAPER_PRIOR, Cifar

from laplace_ella import FeatureCache, metrics

SIZES = (32, 64, 125, 250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 50_000)
PRIORS = (PAPER_PRIOR, 50.0, 500.0)


def make_setup(args: Any, subsample_size: int, rank: int) -> Cifar:
    return Cifar(
        args,
        args.network,
        rank,
        args.n_fit,
        args.n_validation,
        args.n_test,
        args.seed,
        subsample_size,
    )


def scores(la: Any, test: Any, link: str) -> dict[str, float]:
    probs = ella.predict(la, test, link, n_samples=128)
    return metrics.classification_metrics(probs, test.targets)


def study_n(args: Any, results: runs.Results, setup: Cifar) -> None:
    """K × N × complement × prior × link."""
    test, study = setup.features("test"), ella.Study(setup.la, setup.features("fit"))
    base = scores_of_map(test)
    results.compute("MAP", lambda: {"study": "MAP", **base})
    for rank in args.ranks:
        for complement in ("drop", "prior"):
            for prior in PRIORS:
                for n in args.sizes:
                    for link in args.links:

                        def row(
                            k: int = rank,
                            c: str = complement,
                            p: float = prior,
                            n: int = n,
                            link: str = link,
                        ) -> dict[str, Any]:
                            fitted = min(n, len(study.train))
                            la = study.posterior(
                                k,
                                fitted,
                                prior_precision=p,
                                complement=c,
                                n_effective=n,
                            )
                            return {
                                "study": "N",
                                "M": setup.subsample_size,
                                "K": k,
                                "N": n,
                                "fitted": fitted,
                                "complement": c,
                                "prior": p,
                                "link": link,
                                **scores(la, test, link),
                            }

                        key = f"N {rank} {complement} {prior} {n} {link}"
                        results.compute(key, row)


def scores_of_map(test: Any) -> dict[str, float]:
    return metrics.classification_metrics(test.f_mu.softmax(-1), test.targets)


def study_m(args: Any, results: runs.Results) -> None:
    """M × K, each tempered on validation images, with the paper's prior."""
    for m in args.subsample_sizes:
        ranks = [k for k in args.ranks if k <= m]
        if all(f"M {m} {k}" in results.rows for k in ranks):
            continue
        setup = make_setup(args, m, min(m, args.rank))
        caches = {w: setup.features(w) for w in ("validation", "test")}
        study = ella.Study(setup.la, setup.features("fit"))
        for rank in ranks:
            results.compute(
                f"M {m} {rank}",
                lambda study=study, caches=caches, m=m, k=rank: {
                    "study": "M",
                    "M": m,
                    "K": k,
                    **tempered_scores(study, k, **caches),
                },
            )


def tempered_scores(
    study: ella.Study, rank: int, validation: FeatureCache, test: FeatureCache
) -> dict[str, Any]:
    setting = ella.Setting(rank, "temperature")
    la, chosen = ella.choose(
        study, setting, "mc", validation, PAPER_PRIOR, models.CIFAR_TRAIN_SIZE
    )
    return {"link": "mc", **chosen, **scores(la, test, "mc")}


def study_time(args: Any, results: runs.Results, setup: Cifar) -> None:
    """CPU seconds an image of predictions that start from images."""
    x = setup.test.x[: 2 if args.smoke else 48]

    def seconds(predict: Any) -> float:
        best = float("inf")
        for _ in range(2):
            with runs.stopwatch() as times:
                predict()
            best = min(best, times["cpu"])
        return best / len(x)

    results.compute(
        "time MAP",
        lambda: {
            "study": "time",
            "method": "MAP",
            "ms": 1000 * seconds(lambda: ella.forward(setup.model, x)),
        },
    )
    for rank in sorted(args.ranks, reverse=True):
        for complement in ("drop", "prior"):

            def row(k: int = rank, c: str = complement) -> dict[str, Any]:
                la = setup.la
                la.truncate(k)
                la.complement = c
                cost = seconds(lambda: la(x, link_approx="mc", n_samples=512))
                return {
                    "study": "time",
                    "method": "ELLA",
                    "K": k,
                    "complement": c,
                    "ms": 1000 * cost,
                }

            results.compute(f"time {rank} {complement}", row)


def plot_n(path: Path, rows: list[dict[str, Any]], link: str) -> None:
    """NLL against N, one panel for each prior and complement."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mine = [r for r in rows if r["study"] == "N" and r["link"] == link]
    base = next(r["nll"] for r in rows if r["study"] == "MAP")
    ranks = sorted({r["K"] for r in mine})
    colors = plt.get_cmap("viridis")(torch.linspace(0, 0.9, len(ranks)).numpy())
    figure, axes = plt.subplots(
        2, len(PRIORS), figsize=(4 * len(PRIORS), 6.5), sharex=True, sharey=True
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
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_time(path: Path, rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mine = [r for r in rows if r["study"] == "time"]
    figure, axis = plt.subplots(figsize=(5, 3.5))
    for complement in ("drop", "prior"):
        curve = sorted(
            (r["K"], r["ms"]) for r in mine if r.get("complement") == complement
        )
        word = {"drop": "dropped", "prior": "kept"}[complement]
        axis.plot(*zip(*curve, strict=True), "o-", label=f"ELLA, complement {word}")
    base = next(r["ms"] for r in mine if r["method"] == "MAP")
    axis.axhline(base, color="black", linestyle=":", label="MAP (one forward pass)")
    axis.set(xscale="log", yscale="log", xlabel="K", ylabel="CPU ms an image")
    ranks = sorted({r["K"] for r in mine if "K" in r})
    axis.set_xticks(ranks, [str(k) for k in ranks])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


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


TABLE = {
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


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("cifar10_ablations", __doc__)
    parser.add_argument("--network", default="resnet20", choices=models.CIFAR_RESNETS)
    parser.add_argument("--weights", help="path or URL, default in --data-root")
    parser.add_argument("--rank", type=int, default=512, help="of cifar10.py's basis")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[5, 20, 64, 128, 256, 512]
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--subsample-sizes", type=int, nargs="*", default=[])
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--n-fit", type=int, default=3000)
    parser.add_argument("--n-validation", type=int, default=2000)
    parser.add_argument("--n-test", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--links", nargs="+", default=["mc", "probit"])
    args = runs.start(parser, argv)
    m = 2000
    if args.smoke:
        args.rank, args.ranks, args.sizes, m = 6, [2, 6], [16, 50_000], 16
        args.n_fit, args.n_validation, args.n_test = 34, 20, 20
        args.subsample_sizes, args.timing = [8], True
    keep = ("network", "rank", "n_fit", "n_test", "seed")
    settings = {k: getattr(args, k) for k in keep}
    results = runs.Results(args.out / f"{args.network}.json", settings)
    setup = make_setup(args, m, args.rank)
    study_n(args, results, setup)
    if args.subsample_sizes:
        study_m(args, results)
    if args.timing:
        study_time(args, results, make_setup(args, m, args.rank))
    rows = list(results.rows.values())
    runs.write_csv(args.out / f"{args.network}.csv", rows)
    table = runs.markdown(best_over_n(rows), TABLE, {"prior": "g"})
    (args.out / f"{args.network}.md").write_text(table)
    for link in args.links:
        plot_n(args.out / f"{args.network}_N_{link}.png", rows, link)
    if args.timing:
        plot_time(args.out / f"{args.network}_time.png", rows)
    runs.write_environment(args.out / "environment.json", args)
    print(table)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
