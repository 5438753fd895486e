"""What else could be picked: other people's methods on the same networks and data.

    python examples/paper/peers.py --checkouts DIR      # pip install laplace-ella[peers]

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
import resource
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import matplotlib
import numpy as np
import torch
from common import adapters, runs
from common.adapters import Adapter, Fitted, Problem, linearised
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

from laplace_ella import metrics, temperature_scaling

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PRIORS = (0.1, 1.0, 10.0)
#: Memory that a row may take.
MEMORY_GB = 4
STEPS = (3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Method:
    """An adapter, the settings that it tries on validation data, and its checkout."""

    adapt: Adapter
    knob: str = "prior precision"
    settings: tuple[Any, ...] = PRIORS
    checkout: str = ""


NYSTROM = {"subsample_size": 500, "n_eigenvalues": 20}
GP = {"functional_approximation": "nystrom", **NYSTROM}
INDUCING = {"inducing_locations": "kmeans", "num_inducing": 50}
VARIATIONAL = {"functional_approximation": "variational", **INDUCING}

#: Methods by name.
METHODS = {
    "MAP": Method(adapters.network, "none", ()),
    "temperature scaling": Method(adapters.network, "temperature alone", (None,)),
    "ours, exact": Method(linearised("all", "nystrom", n_eigenvalues="exact")),
    "ours, K = 20": Method(linearised("all", "nystrom", n_eigenvalues=20)),
    "ours, exact, calibrated": Method(
        adapters.calibrated(n_eigenvalues="exact"), "all", (None,)
    ),
    "ours, K = 20, calibrated": Method(
        adapters.calibrated(n_eigenvalues=20), "all", (None,)
    ),
    "laplace-torch KFAC": Method(linearised("all", "kron")),
    "laplace-torch diag": Method(linearised("all", "diag")),
    "laplace-torch last layer": Method(linearised("last_layer", "full")),
    "laplace-torch ELLA, K = 20": Method(linearised("all", "gp", **GP)),
    "laplace-torch VaLLA": Method(linearised("all", "gp", **VARIATIONAL)),
    "laplax full": Method(adapters.laplax("full")),
    "laplax Lanczos 20": Method(adapters.laplax("lanczos", rank=20)),
    "SUQ": Method(adapters.suq, checkout="SUQ"),
    "posteriors SGHMC": Method(adapters.posteriors("sghmc"), "learning rate", STEPS),
    "posteriors VI": Method(adapters.posteriors("vi"), "learning rate", STEPS),
    "deep ensemble of 5": Method(
        adapters.ensemble, "weight decay, factor", (0.1, 1.0, 10.0)
    ),
    "MC dropout": Method(adapters.dropout, "rate", (0.03, 0.1, 0.3)),
    "SWAG": Method(adapters.swag, "learning rate", (0.001, 0.01, 0.1)),
    "IVON": Method(adapters.ivon, "hess_init", (0.1, 1.0, 10.0)),
    "NUQLS": Method(adapters.nuqls, "scale", (0.0025, 0.05, 1.0), "NuqlsPackage"),
    "VaLLA, its own": Method(adapters.valla, checkout="Variational-LLA"),
    "sketched Lanczos": Method(adapters.slu, "none", (), "uncertainty_quantification"),
}


# Tasks


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


def few(args: Any, name: str, kind: str, seed: int, held_out: bool) -> Any:
    """Few training data of scikit-learn's sets, the others for the test."""
    from sklearn import datasets

    n = {"wine": 80, "breast cancer": 150, "digits": 300, "moons": 100}[name]
    if name == "moons":
        x, y = datasets.make_moons(600, noise=0.25, random_state=0)
    else:
        x, y = getattr(datasets, f"load_{name.replace(' ', '_')}")(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))[: n + 1000]
    x, y = torch.tensor(x[order]).float(), torch.tensor(y[order])
    x = (x - x[:n].mean(0)) / x[:n].std(0).clamp_min(1e-6)
    return small(x[:n], y[:n], (x[n:], y[n:]), held_out, args)


def cifar(args: Any) -> Any:
    n, shifted = args.images, {}
    model = cifar_resnet("resnet20", args.data_root)
    train = cifar10(args.data_root, "train", n)
    test = cifar10(args.data_root, "test", 2 * n)
    val = test.x[n:], test.y[n:]
    pixels, classes = cifar10_pixels(args.data_root, "test")
    m = n // 4
    for name in ("gaussian_noise", "contrast", "jpeg_compression"):
        x = normalize_cifar(corrupt(pixels[:m], name, 4))
        shifted[name] = (x, torch.tensor(classes[:m]).long())
    joined = tuple(torch.cat(side) for side in zip(*shifted.values(), strict=True))
    fashion = as_cifar(mnist(args.data_root, "test", fashion=True)[: n // 2])
    known = (model, (train.x, train.y), val, None, 1e-4, 0)
    tests = {"test": (test.x[:n], test.y[:n]), "corrupted": joined}
    return Problem("classification", *known), tests, fashion.x


def cases(args: Any) -> Iterator[Case]:
    for task, names in (("uci", args.data), ("few data", args.few)):
        for held_out, name in product((False, True), names):
            for kind in ("random", "gap") if task == "uci" else ("",):
                for index in range(args.splits if task == "uci" else 1):
                    given = (args, name, kind, index, held_out)
                    make = partial({"uci": uci, "few data": few}[task], *given)
                    yield Case(task, f"{name} {kind} {index}", held_out, make)
    if args.images:
        yield Case("cifar", "resnet20", True, partial(cifar, args))


# Measuring


def crps(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    """Return the mean continuous ranked probability score of Gaussians."""
    std = variance.double().sqrt()
    z, normal = (y - mean).double() / std, torch.distributions.Normal(0.0, 1.0)
    parts = z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp()
    return float((std * (parts - math.pi**-0.5)).mean())


class Predictive:
    """What is predicted with the last setting: a noise or a temperature is added."""

    def __init__(self, problem: Problem, fitted: Fitted, scaled: bool) -> None:
        self.problem, self.fitted = problem, fitted
        self.noise = problem.noise() if fitted.noise is None else fitted.noise
        self.temperature, self.loss = 1.0, math.nan
        if not scaled or fitted.predict is None or problem.val is None:
            return
        x, y = problem.val
        found = fitted.predict(x)
        if problem.regression:
            grid = [self.noise * 10 ** (i / 10) for i in range(-20, 21)]
            losses = {v: metrics.gaussian_nll(found[0], found[1] + v, y) for v in grid}
            self.noise = min(losses, key=losses.__getitem__)
            self.loss = losses[self.noise]
        else:
            logits = found.clamp_min(1e-30).log()
            self.temperature = float(temperature_scaling(logits, y))
            self.loss = metrics.nll((logits / self.temperature).softmax(-1), y)

    def __call__(self, x: Tensor) -> Any:
        found = self.fitted.predict(x)
        if self.problem.regression:
            return found[0], (found[1] + self.noise).clamp_min(1e-12)
        if self.temperature == 1:
            return found
        return (found.clamp_min(1e-30).log() / self.temperature).softmax(-1)

    def score(self, x: Tensor) -> Tensor:
        """Return what foreign inputs are told by: variance or entropy."""
        if self.fitted.score is not None:
            return self.fitted.score(x)
        return (
            self(x)[1].squeeze(-1)
            if self.problem.regression
            else metrics.entropy(self(x))
        )

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        found = self(x)
        if not self.problem.regression:
            return metrics.classification_metrics(found, y)
        values = metrics.regression_metrics(*found, y)
        return {**values, "crps": crps(*found, y)}


def memory(name: str) -> float:
    """Return a line of the process' status in MB, or nothing where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return float(line.split()[1]) / 1024
    return math.nan


def measure(method: Method, case: Case, loaded: Any, path: Path) -> None:
    """Fit with all settings, keep the best, predict; write the row."""
    problem, tests, ood = loaded
    torch.manual_seed(0)
    row: dict[str, Any] = {"tried": 0}
    with suppress(OSError):  # Linux has it: the peak of memory begins here
        Path("/proc/self/clear_refs").write_text("5")
    before, began = memory("VmRSS"), process_time()
    try:
        tried: tuple[Any, ...] = (None,)
        if case.held_out:
            tried = method.settings or (None,)
        elif method.knob == "temperature alone":
            raise ValueError("needs validation data")
        choose, found = method.adapt(problem), {}
        for setting in tried:
            with (
                suppress(Exception) if setting != tried[-1] or found else nullcontext()
            ):
                scaled = case.held_out and bool(method.settings)
                found[setting] = Predictive(problem, choose(setting), scaled)
        row["chosen"] = min(found, key=lambda setting: found[setting].loss)
        best = found[row["chosen"]]
        row |= {"tried": len(tried) * case.held_out, "fit_s": process_time() - began}
        row["stored"] = best.fitted.stored
        if best.fitted.predict is not None:
            if case.task != "cifar":
                best(tests["test"][0])  # compiles what is compiled
            began, n = process_time(), sum(len(y) for _, y in tests.values())
            for name, (x, y) in tests.items():
                row |= {f"{name} {k}": v for k, v in best.metrics(x, y).items()}
            row["predict_ms"] = 1000 * (process_time() - began) / n
        scores = (best.score(tests["test"][0]), best.score(ood))
        row["auroc"] = metrics.ood_auroc(*scores)
        row["memory_mb"] = memory("VmHWM") - before
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
    path.write_text(json.dumps(row))


def silenced(seconds: int, *given: Any) -> None:
    quiet = StringIO()
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_DATA, (int(MEMORY_GB * 1e9),) * 2)
    with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        measure(*given)


def rows(args: Any) -> Iterator[dict[str, Any]]:
    """Measure what is not in the cache, each row in a process of its own."""
    fork = multiprocessing.get_context("fork")
    for case in cases(args):
        loaded = None
        for name, method in METHODS.items():
            label = f"{case.task}_{case.name}_{int(case.held_out)}_{name}"
            path = args.cache_dir / f"{label.replace(' ', '_').replace(',', '')}.json"
            if not path.exists() and args.seconds:
                if loaded is None:
                    loaded = case.make()
                    loaded[0].checkouts = args.checkouts
                given = (args.seconds, method, case, loaded, path)
                child = fork.Process(target=silenced, args=given)
                child.start()
                child.join()
                if child.exitcode:
                    late = {"failed": f"stopped after {args.seconds} CPU seconds"}
                    path.write_text(json.dumps(late))
            found = (
                json.loads(path.read_text()) if path.exists() else {"failed": "died"}
            )
            print(label, found.get("failed", found.get("test nll")), flush=True)
            yield {"method": name, "case": case, **found}


# The page

COLUMNS = {
    "uci": ("nll", "coverage_95", "crps"),
    "few data": ("nll", "ece", "brier", "accuracy"),
    "cifar": ("nll", "ece", "brier"),
}
PRICES = ("fit_s", "predict_ms", "memory_mb", "stored", "tried")


def table(found: list[dict[str, Any]], task: str) -> str:
    """Return a row per method: means over the problems, or why it failed."""
    lines = []
    for name, method in METHODS.items():
        mine = [r for r in found if r["method"] == name]
        good = [r for r in mine if "failed" not in r]
        line: dict[str, Any] = {"method": name}
        keys = [f"test {key}" for key in COLUMNS[task]]
        if task == "cifar":
            keys += ["corrupted nll", "corrupted ece", "corrupted brier"]
        for key in (*keys, "auroc", *PRICES):
            values = [r[key] for r in good if r.get(key) is not None]
            value = f"{sum(values) / len(values):.3g}" if values else "–"
            line[key.removeprefix("test ").replace("_", " ")] = value
        bad = sorted({r["failed"] for r in mine if "failed" in r})
        line["remarks"] = "; ".join(bad[:1])
        if bad and good:
            line["remarks"] = f"{len(mine) - len(good)} of {len(mine)}: {bad[0]}"
        lines.append(line)
    return runs.markdown(lines)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw NLL against the seconds of a fit, a panel for each task."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 5), layout="tight")
    for ax, task in zip(panels, COLUMNS, strict=True):
        for held_out, marker in ((False, "o"), (True, "s")):
            for name in METHODS:
                mine = [
                    r
                    for r in found
                    if (r["method"], r["case"].task) == (name, task)
                    and r["case"].held_out == held_out
                ]
                if any("test nll" not in r for r in mine) or not mine:
                    continue
                x, y = (
                    float(np.mean([r[k] for r in mine])) for k in ("fit_s", "test nll")
                )
                color = "C3" if name.startswith("ours") else "C0"
                face = color if held_out else "none"
                ax.plot(x, y, marker, color=color, mfc=face, ms=5)
                if not held_out:
                    ax.annotate(
                        name,
                        (x, y),
                        fontsize=6,
                        xytext=(3, 3),
                        textcoords="offset points",
                    )
        ax.set(
            xscale="log",
            yscale="log" if task != "uci" else "linear",
            title=task,
            xlabel="seconds to fit and choose",
        )
    panels[0].set_ylabel("test NLL (filled: with validation data)")
    figure.savefig(path, dpi=90)
    plt.close(figure)


ABOUT = """# Peers: what else could be picked
"""


def commit(args: Any, folder: str) -> str:
    command = [
        "git",
        "-C",
        str(args.checkouts / folder),
        "rev-parse",
        "--short",
        "HEAD",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "not there"


def write_page(args: Any, found: list[dict[str, Any]]) -> None:
    parts = [ABOUT]
    for task in COLUMNS:
        for held_out in (False, True):
            mine = [
                r
                for r in found
                if (r["case"].task, r["case"].held_out) == (task, held_out)
            ]
            if mine:
                parts.append(f"## {task}, {held_out}\n\n{table(mine, task)}")
    (args.out / "README.md").write_text("\n".join(parts))


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("peers", __doc__)
    parser.add_argument("--checkouts", type=Path, default=Path("checkouts"))
    parser.add_argument("--splits", type=int, default=1, help="of every kind")
    parser.add_argument("--data", nargs="*", default=("yacht", "energy", "concrete"))
    parser.add_argument(
        "--few", nargs="*", default=("wine", "breast cancer", "digits", "moons")
    )
    parser.add_argument("--images", type=int, default=200, help="of CIFAR-10")
    parser.add_argument("--most", type=int, default=600, help="data, at most")
    parser.add_argument("--steps", type=int, default=1000, help="of Adam")
    parser.add_argument("--seconds", type=int, default=200, help="for a row, at most")
    args = runs.start(parser, argv)
    found = list(rows(args))
    draw(found, args.out / "price.png")
    write_page(args, found)


if __name__ == "__main__":
    main()
