"""Active learning: does a posterior know which labels to ask for?

A network starts with few labels, asks for a batch, is trained again on all it has, and
so on. Posteriors differ in what they say of the pool, acquisitions in what they make of
it; the network, its training and the first labels are the same for all.

    python examples/paper/active_learning.py            # half an hour
    python examples/paper/active_learning.py --smoke    # seconds

Digits are scikit-learn's 8×8 images; MNIST is left out unless it is in
`$LAPLACE_ELLA_DATA`. Writes tables and learning curves with bands of one standard error
over the seeds. A run that was interrupted goes on where it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import figures, runs
from common.data import Images, mnist
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import nn

from laplace_ella import acquisition, metrics
from laplace_ella.comparison.plot_style import line_style, plain

#: Of the prior that the network is trained with, and the posterior has.
PRIOR_PRECISION = 1.0

#: Priors and acquisitions were settled on seeds 0 to 7 of the digits; these are others.
FIRST_SEED = 100
N_SEEDS = {"digits": 6, "MNIST": 3}

#: Settings of `Laplace(...)`; "tuned" is a prior by the evidence.
POSTERIORS: dict[str, dict[str, Any]] = {
    "exact": {"n_eigenvalues": "exact"},
    "exact, tenfold prior": {
        "n_eigenvalues": "exact",
        "prior_precision": 10 * PRIOR_PRECISION,
    },
    "exact, evidence": {"n_eigenvalues": "exact", "tuned": True},
    "default": {},
    "default, evidence": {"tuned": True},
    "last layer": {"n_eigenvalues": "exact", "subset_of_weights": "last_layer"},
}

#: Posterior and acquisition of each row; the network alone has no posterior.
STRATEGIES = (
    ("network", "random"),
    ("network", "entropy"),
    ("network", "margin"),
    *(("exact", how) for how in ("entropy", "bald", "margin", "joint")),
    ("exact, tenfold prior", "margin"),
    ("exact, evidence", "joint"),
    ("default", "bald"),
    ("default", "margin"),
    ("default, evidence", "bald"),
    *(("last layer", how) for how in ("bald", "margin", "joint")),
)


@dataclass(frozen=True)
class Budget:
    """How much is asked, trained and repeated."""

    n_start: int = 20
    n_rounds: int = 6
    n_queries: int = 10
    n_pool: int = 500
    n_samples: int = 512
    n_configurations: int = 256
    n_hidden: int = 32
    n_steps: int = 200

    @property
    def n_labels(self) -> list[int]:
        return [self.n_start + i * self.n_queries for i in range(self.n_rounds + 1)]


SMOKE = Budget(n_rounds=1, n_queries=3, n_pool=20, n_samples=16, n_steps=20)


def digits(root: Path | None) -> tuple[Images, Images]:
    """Images to ask about, and test images."""
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pixels).float()[order] / 16
    images = Images(x, torch.tensor(classes).long()[order])
    return images[800:], images[:800]


def mnist_images(root: Path | None) -> tuple[Images, Images]:
    """The same; the first 2,000 test images."""
    if root is None:
        raise FileNotFoundError("no folder of data")
    train, test = (mnist(root, split) for split in ("train", "test"))
    flat = [Images(images.x.flatten(1), images.y) for images in (train, test[:2000])]
    return flat[0], flat[1]


DATA = {"digits": digits, "MNIST": mnist_images}


# --- one run --------------------------------------------------------------------------


def trained(images: Images, budget: Budget, seed: int) -> nn.Module:
    """A network at its maximum a posteriori, from the same weights for a seed."""
    torch.manual_seed(seed)
    hidden = nn.Linear(images.x.shape[1], budget.n_hidden)
    model = nn.Sequential(hidden, nn.ReLU(), nn.Linear(budget.n_hidden, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(budget.n_steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.x), images.y, reduction="sum")
        norm = sum(p.square().sum() for p in model.parameters())
        ((loss + PRIOR_PRECISION / 2 * norm) / len(images)).backward()
        optimizer.step()
    return model.eval()


def posterior_samples(
    model: nn.Module, labelled: Images, pool: torch.Tensor, name: str, budget: Budget
) -> torch.Tensor:
    """Class probabilities (S, B, C) of the pool."""
    if name == "network":
        with torch.no_grad():
            return model(pool).softmax(-1).unsqueeze(0)
    options = {
        "subset_of_weights": "all",
        "prior_precision": PRIOR_PRECISION,
        **POSTERIORS[name],
    }
    tuned = options.pop("tuned", False)
    la = Laplace(model, "classification", hessian_structure="nystrom", **options)
    la.fit(labelled.loader(len(labelled)))
    if tuned:
        la.optimize_prior_precision(method="marglik")
    return la.predictive_samples(pool, n_samples=budget.n_samples, joint=True)


def chosen(samples: torch.Tensor, how: str, budget: Budget) -> torch.Tensor:
    """Indices of the batch that is asked for."""
    if how == "joint":
        return acquisition.select_joint(
            samples, budget.n_queries, n_configurations=budget.n_configurations
        ).indices
    return getattr(acquisition, how)(samples).topk(budget.n_queries).indices


def accuracies(
    images: Images, test: Images, name: str, how: str, budget: Budget, seed: int
) -> dict[str, Any]:
    """Test accuracy of the network after each batch of labels."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    order = order[: budget.n_start + budget.n_pool]
    labelled, pool = order[: budget.n_start], order[budget.n_start :]
    found = []
    for round_ in range(budget.n_rounds + 1):
        model = trained(images[labelled], budget, seed)
        with torch.no_grad():
            found.append(metrics.accuracy(model(test.x).softmax(-1), test.y))
        if round_ == budget.n_rounds:
            break
        if how == "random":  # the pool is in random order
            batch = torch.arange(budget.n_queries)
        else:
            samples = posterior_samples(
                model, images[labelled], images.x[pool], name, budget
            )
            batch = chosen(samples, how, budget)
        asked = torch.isin(torch.arange(len(pool)), batch)
        labelled, pool = torch.cat([labelled, pool[asked]]), pool[~asked]
    return {"accuracy": found, "last": found[-1]}


# --- tables and figures ---------------------------------------------------------------

Curves = dict[tuple[str, str], torch.Tensor]


def label(name: str, how: str) -> str:
    return how if how == "random" else f"{name}: {how}"


def mean_and_error(values: torch.Tensor) -> str:
    error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0
    return f"{float(values.mean()):.3f} ± {error:.3f}"


def summary(curves: Curves) -> Iterator[dict[str, Any]]:
    """Accuracy at the end, mean over all batches, and its paired distance to random."""
    random = curves["network", "random"][:, 1:].mean(1)
    for (name, how), accuracy in curves.items():
        mean = accuracy[:, 1:].mean(1)
        yield {
            "posterior": "–" if how == "random" else name,
            "acquisition": how,
            "last": mean_and_error(accuracy[:, -1]),
            "mean": mean_and_error(mean),
            "beyond": "–" if how == "random" else mean_and_error(mean - random),
            "won": "–" if how == "random" else f"{int((mean > random).sum())}",
        }


def figure(by_data: dict[str, Curves], budget: Budget, path: Path) -> None:
    """Acquisitions of the exact posterior, and other posteriors."""
    exact = [("network", "random"), ("network", "margin")]
    exact += [("exact", how) for how in ("entropy", "bald", "joint", "margin")]
    others = [("network", "random"), ("exact, tenfold prior", "margin")]
    others += [("last layer", how) for how in ("bald", "margin")]
    others += [
        ("default", "margin"),
        ("default", "bald"),
        ("default, evidence", "bald"),
    ]
    plt = figures.pyplot()
    fig, axes = plt.subplots(
        len(by_data), 2, figsize=(11, 3.1 * len(by_data)), squeeze=False, sharey="row"
    )
    for row, (data, curves) in zip(axes, by_data.items(), strict=True):
        titles = ("exact posterior", "other posteriors")
        for ax, keys, title in zip(row, (exact, others), titles, strict=True):
            for i, key in enumerate(keys):
                accuracy = curves[key]
                mean, error = accuracy.mean(0), accuracy.std(0) / len(accuracy) ** 0.5
                style = line_style(i)
                ax.plot(budget.n_labels, mean.numpy(), label=label(*key), **style)
                band = (mean - error).numpy(), (mean + error).numpy()
                ax.fill_between(
                    budget.n_labels, *band, color=style["color"], alpha=0.12, lw=0
                )
            ax.set(title=f"{data}, {title}", xlabel="labels")
            ax.legend(
                fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1)
            )
            plain(ax)
        row[0].set_ylabel("test accuracy")
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


COLUMNS = {
    "posterior": "posterior",
    "acquisition": "acquisition",
    "last": "accuracy with all labels",
    "mean": "mean over batches",
    "beyond": "beyond random",
    "won": "seeds better than random",
}


def available(names: list[str], root: Path | None) -> dict[str, tuple[Images, Images]]:
    """The data sets that are there."""
    found = {}
    for name in names:
        try:
            found[name] = DATA[name](root)
        except (FileNotFoundError, RuntimeError, OSError) as error:
            print(f"{name} is left out: {error}", flush=True)
    return found


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("active_learning", __doc__)
    parser.add_argument("--only", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--seeds", type=int, help="number of repetitions")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    args.out = runs.output_folder(parser.prog, args)
    budget = SMOKE if args.smoke else Budget()
    seeds = {
        name: range(FIRST_SEED, FIRST_SEED + (args.seeds or (2 if args.smoke else n)))
        for name, n in N_SEEDS.items()
    }
    data = available(args.only, args.data_root)
    results = runs.Results(args.out / "results.json", asdict(budget))
    keys = [
        (name, *strategy, seed)
        for name in data
        for seed in seeds[name]
        for strategy in STRATEGIES
    ]
    results.expect("{}, {}: {}, seed {}".format(*key) for key in keys)
    by_data = {name: {strategy: [] for strategy in STRATEGIES} for name in data}
    for name, posterior, how, seed in keys:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = results.compute(
                f"{name}, {posterior}: {how}, seed {seed}",
                partial(accuracies, *data[name], posterior, how, budget, seed),
            )
        by_data[name][posterior, how].append(row["accuracy"])
    tensors = {
        name: {key: torch.tensor(values) for key, values in curves.items()}
        for name, curves in by_data.items()
    }
    rows = []
    for name, curves in tensors.items():
        found = list(summary(curves))
        rows += [{"data": name, **row} for row in found]
        table = runs.markdown(found, COLUMNS, {})
        print(f"\n{name}\n\n{table}")
        (args.out / f"{name.lower()}.md").write_text(table, encoding="utf-8")
    figure(tensors, budget, args.out / "curves.png")
    runs.write_environment(args.out / "environment.json", args, ("scikit-learn",))
    return rows


if __name__ == "__main__":
    main()
