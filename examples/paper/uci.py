"""UCI regression with random and gap splits: which posterior predicts best.

    python examples/paper/uci.py --data-root DATA --splits 10 --gaps 11

MLP 2×50 (tanh), prior precision and noise of every method by its own evidence. Random
splits of 90 % and 10 %; gap splits have the middle third by one input as test data
(Foong et al. 2019). Splits are taken in turn from all data sets, and finished ones are
kept in the cache folder: a run that is stopped has measured all data sets alike, and
goes on when it is started again. `--tables` only writes the page anew, from the CSV
files.
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.mlp import mlp, train
from common.runs import Results, arguments, environment, start, stopwatch, write_csv
from common.uci import UCI, Split, gap_split, load, random_split
from common.uci_page import write_page
from common.uci_tables import NEGLIGIBLE
from laplace import Laplace
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
from laplace_ella import metrics
from laplace_ella.posterior.spectrum import Spectrum

Row = dict[str, Any]

#: laplace-torch's own classes: which weights, which structure.
FAMILY = {
    "KFAC": ("all", "kron"),
    "diag": ("all", "diag"),
    "last layer": ("last_layer", "full"),
    "gp": ("all", "gp"),
}

#: `gp` solves a system of N equations for every value of the evidence: up to so many.
GP_DATA = 400

#: Steps of Adam on the logarithms of prior precision and noise, and its rate.
STEPS, RATE = 200, 0.1

#: Where the search by values for the two logarithms starts.
SIMPLEX = ((0.0, 0.0), (2.0, 0.0), (0.0, -1.0))

#: Shares of the data that are sampled, and multiples of the exact fit's ridge δσ².
SHARES, RIDGES = (1 / 8, 1 / 4, 1 / 2), (0.1, 1.0, 10.0)

#: Width of a central 95 % interval in standard deviations.
WIDTH_95 = 2 * 1.959964


@dataclass(frozen=True)
class Study:
    """A data set, a network and the methods compared on it.

    Attributes
    ----------
    name : str
    data : str
        one of `UCI`
    others : tuple of str
        of "exact", "paper" and the names in `FAMILY`
    ranks : tuple of int
        K of ELLA with every complement, from one fit
    most : int, optional
        training data, and test data, at most
    width : int
        of the two hidden layers
    samples : bool
        whether fits of fewer sampled gradients are compared as well
    splits : int, optional
        at most so many of each kind
    """

    name: str
    data: str
    others: tuple[str, ...] = ("exact", "paper", *FAMILY)
    ranks: tuple[int, ...] = (20, 128, 512)
    most: int | None = 2000
    width: int = 50
    samples: bool = True
    splits: int | None = None


STUDIES = [Study(name, name) for name in UCI]
STUDIES += [
    Study(
        "protein, all data",
        "protein",
        ("paper", "KFAC", "diag", "last layer"),
        (20, 128),
        most=None,
        samples=False,
        splits=2,
    ),
    *(
        Study(
            f"{name}, 2×300",
            name,
            ("exact", "KFAC", "last layer"),
            (20, 128),
            width=300,
            samples=False,
            splits=3,
        )
        for name in ("yacht", "concrete")
    ),
]
SMOKE = [Study("yacht", "yacht", ranks=(8, 20), most=60)]


# Predictions and their scores


@dataclass(frozen=True)
class Predictions:
    """Gaussian predictions of one method for test data, and how it came to them."""

    method: str
    mean: torch.Tensor
    variance: torch.Tensor
    about: Row

    def losses(self, y: torch.Tensor) -> torch.Tensor:
        """−log N(y) of every target `(N,)`."""
        normal = torch.distributions.Normal(self.mean, self.variance.sqrt())
        return -normal.log_prob(y.double()).squeeze(-1)

    def scores(self, y: torch.Tensor) -> Row:
        std = self.variance.sqrt()
        return {
            "nll": metrics.gaussian_nll(self.mean, self.variance, y.double()),
            "rmse": metrics.rmse(self.mean, y.double()),
            "coverage": metrics.interval_coverage(self.mean, std, y, [0.95])[0],
            "width": float(WIDTH_95 * std.mean()),
        }


def predict(method: str, la: Any, x: torch.Tensor, **about: Any) -> Predictions:
    """By a fitted and tuned posterior, with the observation noise."""
    la(x[:500])  # the first call also finds the fastest way
    means, variances = [], []
    with stopwatch() as time:
        for part in x.split(500):
            mean, variance = la(part)
            means.append(mean.detach().double().reshape(-1, 1))
            variances.append(variance.detach().double().reshape(-1, 1))
    sigma, prior = float(la.sigma_noise), float(la.prior_precision)
    about |= {"sigma": sigma, "prior": prior, "predict": time["cpu"]}
    return Predictions(method, torch.cat(means), torch.cat(variances) + sigma**2, about)


def compared(found: list[Predictions], y: torch.Tensor) -> list[Row]:
    """Scores; the loss beyond the exact posterior's with its standard error over the
    test data; whether it is within one standard error of the best, and of exact."""
    losses = {p.method: p.losses(y) for p in found}
    best = min(losses.values(), key=lambda values: float(values.mean()))
    rows = []
    for p in found:
        row = {"method": p.method, **p.scores(y), **p.about}
        row["near_best"] = int(_excess(losses[p.method], best)[2])
        if "exact" in losses:
            excess, error, near = _excess(losses[p.method], losses["exact"])
            row |= {"excess": excess, "error": error, "near_exact": int(near)}
        rows.append(row)
    return rows


def _excess(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, bool]:
    """Mean of a − b, its standard error, and whether it is within that."""
    difference = a - b
    mean, error = float(difference.mean()), float(difference.std() / len(a) ** 0.5)
    return mean, error, mean <= max(error, NEGLIGIBLE)


# Methods


def ella(loader: DataLoader, model: nn.Module, **settings: Any) -> tuple[Any, float]:
    """A fit of ours, and its CPU seconds."""
    la = Laplace(model, "regression", "all", "nystrom", **settings)
    with stopwatch() as time:
        la.fit(loader)
    return la, time["cpu"]


def tune(la: Any) -> float:
    """Prior precision and noise by the evidence, from one; CPU seconds."""
    la.prior_precision, la.sigma_noise = 1.0, 1.0
    with stopwatch() as time:
        la.optimize_sigma_noise()
    return time["cpu"]


def by_adam(la: Any) -> None:
    """The same for laplace-torch's classes, as its documentation does it."""
    log_prior = torch.zeros(1, requires_grad=True)
    log_sigma = torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([log_prior, log_sigma], RATE)
    for _ in range(STEPS):
        adam.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        adam.step()
    la.prior_precision = log_prior.detach().exp()
    la.sigma_noise = log_sigma.detach().exp()


def by_values(la: Any) -> None:
    """The same without gradients."""

    def loss(logs: np.ndarray) -> float:
        prior, sigma = torch.tensor(logs, dtype=torch.float32).exp()
        return -float(la.log_marginal_likelihood(prior, sigma))

    options = {"xatol": 1e-2, "fatol": 1e-2, "initial_simplex": SIMPLEX}
    best = minimize(loss, np.zeros(2), method="Nelder-Mead", options=options)
    loss(best.x)  # sets them


def family(
    name: str, loader: DataLoader, model: nn.Module, x_test: torch.Tensor
) -> Iterator[Predictions]:
    """One of laplace-torch's own classes.

    The gradient of KFAC's evidence misses the noise in the log determinant (0.3), so
    that following it leads to the noise of greatest likelihood. The true maximum is a
    method of its own here.
    """
    settings: Row = {"n_subset": len(loader.dataset)} if name == "gp" else {}  # type: ignore
    la = Laplace(model, "regression", *FAMILY[name], **settings)
    with stopwatch() as fitting:
        la.fit(loader)
    ways = {name: by_adam}
    if name == "KFAC":
        ways["KFAC, maximum"] = by_values
    for label, way in ways.items():
        with stopwatch() as tuning:
            try:
                way(la)
            except torch.linalg.LinAlgError:  # float32 is not enough for `gp`
                return
        yield predict(label, la, x_test, fit=fitting["cpu"], tune=tuning["cpu"])


def maximum(model: nn.Module, split: Split) -> Predictions:
    """The network, with the noise of greatest likelihood."""
    with torch.no_grad():
        with stopwatch() as time:
            mean = model(split.x_test).double()
        sigma = (model(split.x) - split.y).double().square().mean().sqrt()
    about = {"sigma": float(sigma), "predict": time["cpu"]}
    return Predictions("MAP", mean, sigma.square().expand_as(mean), about)


def measure(study: Study, split: Split, steps: int) -> dict[str, list[Row]]:
    """Rows of one split: of the methods, of the fits to fewer sampled gradients, and
    of their log determinants."""
    torch.manual_seed(0)
    model = mlp(split.x.shape[1], 1, study.width)
    train(model, split.x, split.y, nn.functional.mse_loss, steps)
    loader = DataLoader(TensorDataset(split.x, split.y), batch_size=256)
    x, y, n_data = split.x_test, split.y_test, len(split.x)
    found = [maximum(model, split)]
    exact = None
    if "exact" in study.others:
        exact, seconds = ella(loader, model, n_eigenvalues="exact")
        found.append(predict("exact", exact, x, tune=tune(exact), fit=seconds))
    if "paper" in study.others:
        la, seconds = ella(loader, model, **laplace_ella.PAPER)
        found.append(predict("paper", la, x, tune=tune(la), fit=seconds))
    n_samples = min(n_data, 2000)
    whole, seconds = ella(
        loader,
        model,
        n_eigenvalues=max(study.ranks),
        subsample_size=n_samples,
        complement="matched",
    )
    for rank in sorted(study.ranks, reverse=True):  # the basis is nested
        whole.truncate(min(rank, whole.rank))
        about = {"K": whole.rank, "fit": seconds, "tune": tune(whole)}
        for complement in ("drop", "prior", "matched"):
            whole.complement = complement
            found.append(predict(f"K={rank} {complement}", whole, x, **about))
    for name in FAMILY:
        if name in study.others and (name != "gp" or n_data <= GP_DATA):
            found += family(name, loader, model, x)
    sizes = {"N": n_data, "P": sum(p.numel() for p in model.parameters())}
    result = {"methods": [sizes | row for row in compared(found, y)]}
    if exact is not None and study.samples:
        result |= fewer_samples(loader, model, split, exact, whole.fitted.tail.spectrum)
    return result


def fewer_samples(
    loader: DataLoader, model: nn.Module, split: Split, exact: Any, spectrum: Spectrum
) -> dict[str, list[Row]]:
    """Fits with M < N: predictions, hyperparameters, and the log determinant by the
    spectrum of M rows, against those of all."""
    n_data = len(split.x)
    ridge = float(exact.prior_precision * exact.sigma_noise**2)
    samples, log_dets = [], []
    for share in SHARES:
        settings = {"subsample_size": round(share * n_data), "complement": "matched"}
        la, seconds = ella(loader, model, n_eigenvalues=20, **settings)
        tune(la)
        found = predict("matched", la, split.x_test).scores(split.y_test)
        samples.append(
            {
                "share": share,
                "nll": found["nll"],
                "coverage": found["coverage"],
                "sigma_ratio": float(la.sigma_noise / exact.sigma_noise),
                "prior_ratio": float(la.prior_precision / exact.prior_precision),
                "fit": seconds,
            }
        )
        sampled = la.fitted.tail.spectrum
        for factor in RIDGES:
            at = torch.tensor(factor * ridge, dtype=torch.float64)
            log_dets.append(
                {
                    "share": share,
                    "ridge": factor,
                    "exact": float(spectrum.log_det(at)),
                    "estimate": float(sampled.log_det(at)),
                    "scaled": float(torch.log1p(sampled.scaled / at).sum()),
                }
            )
    return {"samples": samples, "log_dets": log_dets}


# Running


@dataclass(frozen=True)
class Task:
    """One split of a study."""

    study: Study
    kind: str
    index: int
    split: Callable[[], Split]

    @property
    def key(self) -> str:
        return f"{self.study.name} {self.kind} {self.index}"


def tasks(args: Namespace) -> Iterator[Task]:
    """One split of every study after the other, then the next ones."""
    for index in range(max(args.splits, args.gaps)):
        for study in SMOKE if args.smoke else STUDIES:
            if study.splits is not None and index >= study.splits:
                continue
            table, most = load(args.data_root, study.data), study.most
            if index < args.splits:
                split = partial(random_split, table, index, most)
                yield Task(study, "random", index, split)
            if index < min(args.gaps, table.shape[1] - 1):
                split = partial(gap_split, table, index, most)
                yield Task(study, "gap", index, split)


def run(args: Namespace) -> None:
    """Measure what is missing, and write the CSV files."""
    about = environment(args)
    settings = {name: value for name, value in about.items() if name != "date"}
    results = Results(args.cache_dir / "uci.json", settings)
    steps = 50 if args.smoke else 2000
    todo = [
        task
        for task in tasks(args)
        if args.studies is None
        or task.study.name in args.studies
        or task.key in results.rows
    ]
    results.expect(task.key for task in todo)
    rows: dict[str, list[Row]] = {"methods": [], "samples": [], "log_dets": []}
    for task in todo:
        result = results.compute(
            task.key, lambda task=task: measure(task.study, task.split(), steps)
        )
        place = {"study": task.study.name, "kind": task.kind, "split": task.index}
        for name, collected in rows.items():
            collected += [place | row for row in result.get(name, [])]
    for name, collected in rows.items():
        write_csv(args.out / f"{name}.csv", collected)


def main(argv: list[str] | None = None) -> None:
    parser = arguments("uci", __doc__)
    parser.add_argument("--splits", type=int, default=10, help="random splits")
    parser.add_argument("--gaps", type=int, default=11, help="gap splits, at most")
    parser.add_argument(
        "--studies",
        nargs="*",
        help="measure these only, or none; the page has all that were measured",
    )
    parser.add_argument(
        "--tables", action="store_true", help="only write the page, from the CSV files"
    )
    args = start(parser, argv)
    args.data_root = Path(args.data_root)
    if args.smoke:
        args.splits, args.gaps = 1, 1
    if not args.tables:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # K above the rank of few data, and others'
            run(args)
    write_page(args.out)


if __name__ == "__main__":
    main()
