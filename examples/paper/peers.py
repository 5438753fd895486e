"""What else could be picked: other people's methods on the same networks and data.

    pip install laplace-ella[peers]
    python examples/paper/peers.py --checkouts DIR

Three tasks: UCI regression, classification from few data, ResNet-20 on CIFAR-10 with
corruptions. On each, all methods have the same trained network and the same data, and
choose their settings twice: on the training data, by what they offer for it, and on the
same validation data, out of the same number of settings. A method that fails is a row
with its reason. DIR holds checkouts of what is not on PyPI, by the names in `METHODS`.
Every row is measured in a process of its own and kept in the cache folder.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from common import adapters as ad
from common import checkouts as px
from common import peers_page, runs
from common.adapters import Adapter, Fitted, Problem
from common.corruptions import corrupt
from common.data import (
    as_cifar,
    cifar10,
    cifar10_pixels,
    gap_split,
    mnist,
    normalize_cifar,
    random_split,
    uci_table,
)
from common.models import cifar_resnet
from torch import Tensor, nn

from laplace_ella import metrics

#: Settings that are tried on validation data.
PRIORS, IMAGE_PRIORS = (0.1, 1.0, 10.0), (10.0, 100.0, 1000.0)
STEPS = (3e-4, 1e-3, 3e-3)

#: Softmax temperatures; without bounds a few data that are all right ask for none.
HEATS = tuple(2 ** (i / 2) for i in range(-2, 5))

#: Memory that a row may take.
MEMORY_GB = 4


@dataclass(frozen=True)
class Method:
    """An adapter, its source (of PyPI, or the folder of a checkout), what is chosen on
    the training data, and the settings that are tried on validation data."""

    adapt: Adapter
    source: str = "laplace-ella"
    alone: str = "–"
    knob: str = "prior precision:"
    settings: tuple[Any, ...] = PRIORS


EXACT, TWENTY = {"n_eigenvalues": "exact"}, {"n_eigenvalues": 20}
NYSTROM = {"subsample_size": 500, "n_eigenvalues": 20}
GP = {"functional_approximation": "nystrom", **NYSTROM}
INDUCING = {"inducing_locations": "kmeans", "num_inducing": 50}
VARIATIONAL = {"functional_approximation": "variational", **INDUCING}

#: What chooses on training data in regression / in classification.
EVIDENCE = "noise and prior / prior by the evidence"
OURS = "noise and prior by the evidence / prior and temperature by leave-one-out"
LT, LR, TU, PS = "laplace-torch", "learning rate:", "torch-uncertainty", "posteriors"
SCALE, ALL = "noise or temperature alone:", ("optimize_calibration",)

#: Methods by name.
METHODS = {
    "MAP": Method(ad.network, "–", "–", "–", ()),
    "temperature scaling": Method(ad.network, "–", knob=SCALE, settings=(None,)),
    "ours, exact": Method(ad.linearised("all", "nystrom", **EXACT), alone=OURS),
    "ours, K = 20": Method(ad.linearised("all", "nystrom", **TWENTY), alone=OURS),
    "ours, exact, calibrated": Method(
        ad.calibrated(**EXACT), knob="all by:", settings=ALL
    ),
    "ours, K = 20, calibrated": Method(
        ad.calibrated(**TWENTY), knob="all by:", settings=ALL
    ),
    "laplace-torch KFAC": Method(ad.linearised("all", "kron"), LT, EVIDENCE),
    "laplace-torch diag": Method(ad.linearised("all", "diag"), LT, EVIDENCE),
    "laplace-torch last layer": Method(
        ad.linearised("last_layer", "full"), LT, EVIDENCE
    ),
    "laplace-torch ELLA, K = 20": Method(ad.linearised("all", "gp", **GP), LT),
    "laplace-torch VaLLA": Method(
        ad.linearised("all", "gp", **VARIATIONAL), LT, "prior and noise by its bound"
    ),
    "laplax": Method(px.laplax("full"), "laplax", "prior by its evidence"),
    "SUQ": Method(px.suq, "SUQ", EVIDENCE + ", then its scale"),
    "posteriors SGHMC": Method(ad.posteriors("sghmc"), PS, knob=LR, settings=STEPS),
    "posteriors VI": Method(ad.posteriors("vi"), PS, knob=LR, settings=STEPS),
    "deep ensemble of 5": Method(ad.ensemble, TU, "–", "weight decay, times:", PRIORS),
    "MC dropout": Method(ad.dropout, TU, "–", "rate:", (0.03, 0.1, 0.3)),
    "SWAG": Method(ad.swag, TU, "–", LR, (0.001, 0.01, 0.1)),
    "IVON": Method(ad.ivon, "ivon-opt", "–", "hess_init:", PRIORS),
    "NUQLS": Method(px.nuqls, "NuqlsPackage", "–", "scale:", (0.0025, 0.05, 1.0)),
    "VaLLA, its own": Method(
        px.valla, "Variational-LLA", "prior and noise by its bound"
    ),
    "sketched Lanczos": Method(px.slu, "uncertainty_quantification", "–", "–", ()),
}


# Tasks

#: Corruptions of the images that are tested on, severity 4.
CORRUPTED = ("gaussian_noise", "contrast", "jpeg_compression")


@dataclass(frozen=True)
class Case:
    """One network: what it is trained on, and what it is tested on."""

    task: str
    name: str
    held_out: bool
    make: Callable[[], tuple[Problem, dict[str, tuple[Tensor, Tensor]], Tensor]]


def small(
    x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], held_out: bool, args: Any
) -> tuple[Problem, dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Train a network with two hidden tanh layers; foreign inputs have their columns
    shuffled and lie twice as far from the mean."""
    regression = y.is_floating_point()
    kind = "regression" if regression else "classification"
    width, C = (50, 1) if regression else (32, len(y.unique()))

    def fresh(rate: float) -> nn.Module:
        drop = [nn.Dropout(rate)] if rate else []
        first = [nn.Linear(x.shape[1], width), nn.Tanh(), *drop]
        return nn.Sequential(
            *first, nn.Linear(width, width), nn.Tanh(), *drop, nn.Linear(width, C)
        )

    torch.manual_seed(0)
    foreign = [2 * column[torch.randperm(len(column))] for column in test[0].T]
    order, n = torch.randperm(len(x)), round(0.8 * len(x)) if held_out else len(x)
    train, val = ((x[part], y[part]) for part in (order[:n], order[n:]))
    decay = 1e-5 if regression else 5e-4
    problem = Problem(
        kind, fresh(0), train, val if held_out else None, fresh, decay, args.steps
    )
    problem.model = problem.optimise(problem.model)
    return problem, {"test": test}, torch.stack(foreign, 1)


def uci(args: Any, name: str, kind: str, index: int, held_out: bool) -> Any:
    split = {"random": random_split, "gap": gap_split}[kind]
    x, y, *test = split(uci_table(args.data_root, name), index, args.most)
    return small(x, y, tuple(test), held_out, args)


#: Training data of each set of scikit-learn.
FEW = {"wine": 80, "breast cancer": 150, "digits": 300, "moons": 100}


def few(args: Any, name: str, kind: str, seed: int, held_out: bool) -> Any:
    """Few training data of scikit-learn's sets, the others for the test."""
    from sklearn import datasets

    n = FEW[name]
    if name == "moons":
        x, y = datasets.make_moons(600, noise=0.25, random_state=0)
    else:
        x, y = getattr(datasets, f"load_{name.replace(' ', '_')}")(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))[: n + 1000]
    x, y = torch.tensor(x[order]).float(), torch.tensor(y[order])
    x = (x - x[:n].mean(0)) / x[:n].std(0).clamp_min(1e-6)
    return small(x[:n], y[:n], (x[n:], y[n:]), held_out, args)


def cifar(args: Any) -> Any:
    """Fit to n training images; choose on 2n test images, test on 4n others."""
    n = args.images
    train = cifar10(args.data_root, "train", n)
    test = cifar10(args.data_root, "test", 6 * n)
    pixels, classes = cifar10_pixels(args.data_root, "test")
    changed = [corrupt(pixels[2 * n : 3 * n], name, 4) for name in CORRUPTED]
    targets = torch.tensor(classes[2 * n : 3 * n]).long().repeat(len(CORRUPTED))
    fashion = as_cifar(mnist(args.data_root, "test", fashion=True)[: 2 * n])
    problem = Problem(
        "classification",
        cifar_resnet("resnet20", args.data_root),
        (train.x, train.y),
        (test.x[: 2 * n], test.y[: 2 * n]),
        None,
        1e-4,
        0,
    )
    tests = {
        "test": (test.x[2 * n :], test.y[2 * n :]),
        "corrupted": (normalize_cifar(np.concatenate(changed)), targets),
    }
    return problem, tests, fashion.x


def cases(args: Any) -> Iterator[Case]:
    for task, names in (("uci", args.data), ("few data", args.few)):
        for held_out, name in product((False, True), names):
            for kind in ("random", "gap") if task == "uci" else ("",):
                for index in range(args.splits if task == "uci" else 1):
                    given = (args, name, kind, index, held_out)
                    make = partial({"uci": uci, "few data": few}[task], *given)
                    label = f"{name} {kind} {index}" if kind else name
                    yield Case(task, label, held_out, make)
    if args.images:
        yield Case("cifar", "resnet20", True, partial(cifar, args))


# Measuring


def crps(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    """Return the mean continuous ranked probability score of Gaussians."""
    std = variance.double().sqrt()
    z, normal = (y - mean).double() / std, torch.distributions.Normal(0.0, 1.0)
    parts = z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp()
    return float((std * (parts - math.pi**-0.5)).mean())


def rescaled(problem: Problem, fitted: Fitted, scale: bool) -> tuple[Any, float]:
    """Return predictions with noise, or with a temperature, and the validation NLL."""
    noise = problem.noise() if fitted.noise is None else fitted.noise
    temperature, loss = 1.0, math.nan
    if scale and problem.val is not None:
        x, y = problem.val
        found = fitted.predict(x)
        if problem.regression:
            grid = [noise * 10 ** (i / 10) for i in range(-20, 21)]
            losses = {v: metrics.gaussian_nll(found[0], found[1] + v, y) for v in grid}
            noise = min(losses, key=losses.__getitem__)
            loss = losses[noise]
        else:
            logits = found.clamp_min(1e-30).log()
            losses = {t: metrics.nll((logits / t).softmax(-1), y) for t in HEATS}
            temperature = min(losses, key=losses.__getitem__)
            loss = losses[temperature]

    def predict(x: Tensor) -> Any:
        found = fitted.predict(x)
        if problem.regression:
            return found[0], (found[1] + noise).clamp_min(1e-12)
        return (found.clamp_min(1e-30).log() / temperature).softmax(-1)

    return predict, loss


def scores(problem: Problem, found: Any, y: Tensor) -> dict[str, float]:
    if not problem.regression:
        return metrics.classification_metrics(found, y)
    return {**metrics.regression_metrics(*found, y), "crps": crps(*found, y)}


def peak_mb() -> float:
    """Return the peak of this process; a forked one begins with what is in use."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(method: Method, case: Case, made: Any) -> dict[str, Any]:
    """Fit with all settings, keep the best, predict."""
    problem, tests, foreign = made
    if not case.held_out and method.settings in ((None,), ALL):
        raise ValueError(ad.NEEDS_VALIDATION)
    tried = (case.held_out and method.settings) or (None,)
    if tried == PRIORS and case.task == "cifar":
        tried = IMAGE_PRIORS
    before, began = peak_mb(), process_time()
    choose, found, errors = method.adapt(problem), {}, []
    for setting in tried:
        try:
            fitted = choose(setting)
            scale = case.held_out and bool(method.settings)
            found[setting] = (fitted, *rescaled(problem, fitted, scale))
        except Exception as error:  # one bad setting of several
            errors.append(error)
    if not found:
        raise errors[0]
    chosen = min(found, key=lambda setting: found[setting][-1])
    fitted, predict, _ = found[chosen]
    row = {"chosen": chosen, "fit_s": process_time() - began, "stored": fitted.stored}
    x_test = tests["test"][0]
    if fitted.score is None:
        if case.task != "cifar":
            predict(x_test)  # compiles what is compiled
        began, n = process_time(), sum(len(y) for _, y in tests.values())
        outputs = {name: predict(x) for name, (x, _) in tests.items()}
        row["predict_ms"] = 1000 * (process_time() - began) / n
        for name, (_, y) in tests.items():
            values = scores(problem, outputs[name], y)
            row |= {f"{name} {key}": value for key, value in values.items()}

        known, unknown = (
            f[1].flatten() if problem.regression else metrics.entropy(f)
            for f in (outputs["test"], predict(foreign))
        )
    else:
        known, unknown = fitted.score(x_test), fitted.score(foreign)
    row["auroc"] = metrics.ood_auroc(known, unknown)
    return row | {"memory_mb": peak_mb() - before}


def row_process(seconds: int, path: Path, *given: Any) -> None:
    """Write a row, or why there is none, within limits of time and memory."""
    torch.manual_seed(0)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    limit = int(MEMORY_GB * 1e9)
    with suppress(OSError):  # besides what is in use; Linux tells
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit += pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with warnings.catch_warnings(), open(os.devnull, "w") as quiet:
        warnings.simplefilter("ignore")
        with redirect_stdout(quiet), redirect_stderr(quiet):
            try:
                row = measure(*given)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                row = {"failed": text.split("\n")[0][:160]}
    path.write_text(json.dumps(row))


def rows(args: Any) -> Iterator[dict[str, Any]]:
    """Measure what is not in the cache, each row in a process of its own."""
    fork = multiprocessing.get_context("fork")
    for case in cases(args):
        made, found = None, []
        for name, method in METHODS.items():
            label = f"{case.task} {case.name} {case.held_out} {name}"
            path = args.cache_dir / f"{label.replace(' ', '_')}.json"
            if not path.exists() and not args.cached:
                if made is None:
                    made = case.make()
                    made[0].checkouts = args.checkouts
                given = (args.seconds, path, method, case, made)
                child = fork.Process(target=row_process, args=given)
                child.start()
                child.join()
                if child.exitcode:
                    late = {"failed": f"stopped after {args.seconds} CPU seconds"}
                    path.write_text(json.dumps(late))
            if path.exists():
                row = json.loads(path.read_text())
                found.append({"method": name, "case": case, **row})
                print(label, row.get("failed", row.get("test nll")), flush=True)
        if len(found) == len(METHODS):
            yield from found


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("peers", __doc__)
    parser.add_argument("--checkouts", type=Path, default=Path("checkouts"))
    parser.add_argument("--splits", type=int, default=1, help="of every kind")
    parser.add_argument("--data", nargs="*", default=("yacht", "energy", "concrete"))
    parser.add_argument("--few", nargs="*", default=tuple(FEW))
    parser.add_argument("--images", type=int, default=50, help="of CIFAR-10")
    parser.add_argument("--most", type=int, default=600, help="data, at most")
    parser.add_argument("--steps", type=int, default=1000, help="of Adam")
    parser.add_argument(
        "--seconds", type=int, default=60, help="of CPU for a row, at most"
    )
    parser.add_argument(
        "--cached", action="store_true", help="measure nothing, show what is complete"
    )
    args = runs.start(parser, argv)
    found = list(rows(args))
    args.sizes = {name: FEW[name] for name in args.few}
    peers_page.write(args, METHODS, found)


if __name__ == "__main__":
    main()
