"""Classification with few data and no validation data: which method predicts best.

    python examples/paper/few_data.py

Small networks on up to 300 training examples, trained long with weight decay and short
without, with clean and with noisy labels. Every method is fitted, tuned by its own
`optimize_prior_precision()` from the training data, and predicts with the probit link.
Results are kept in the cache folder, one file per network: a run that is stopped goes
on when it is started again.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import runs
from common.data import mnist, uci_table
from laplace import Laplace
from scipy.optimize import minimize_scalar
from sklearn import datasets
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella

#: Methods by the arguments of Laplace; the first row is the network itself.
METHODS: dict[str, dict[str, Any]] = {
    "KFAC": {"subset_of_weights": "all", "hessian_structure": "kron"},
    "diag": {"subset_of_weights": "all", "hessian_structure": "diag"},
    "last layer": {"subset_of_weights": "last_layer", "hessian_structure": "full"},
    "K = 20": {
        "subset_of_weights": "all",
        "hessian_structure": "nystrom",
        "n_eigenvalues": 20,
    },
    "nystrom": {"subset_of_weights": "all", "hessian_structure": "nystrom"},
}
OTHERS = ("MAP", "KFAC", "diag", "last layer")

#: Test data, at most.
MOST = 1000


@dataclass(frozen=True)
class Problem:
    """Data, network and training of one row."""

    data: str
    n: int
    act: str = "relu"
    decay: float = 0.0
    steps: int = 300
    noisy: bool = False
    norm: bool | None = None

    @property
    def title(self) -> str:
        noise = ", 10 % wrong labels" * self.noisy
        decay = "decay" if self.decay else "no decay"
        act = self.act if self.norm is None else f"BatchNorm: {self.norm}"
        return f"{self.data} ({self.n}){noise}, {act}, {decay}, {self.steps} steps"


LONG = {"decay": 5e-4, "steps": 1000}

MLPS = [
    Problem("wine", 80, "tanh", **LONG),
    Problem("wine", 80, "relu", **LONG),
    Problem("wine", 80, "relu", steps=1000),
    Problem("wine", 80, "relu", noisy=True),
    Problem("breast_cancer", 150, "tanh", **LONG),
    Problem("breast_cancer", 150, "relu"),
    Problem("iris", 75, "tanh", **LONG),
    Problem("iris", 75, "tanh", steps=1000),
    Problem("moons", 100, "tanh", **LONG),
    Problem("moons", 100, "relu"),
    Problem("digits", 100, "tanh", **LONG),
    Problem("digits", 100, "relu", **LONG),
    Problem("digits", 100, "tanh", noisy=True, **LONG),
    Problem("MNIST", 100, "relu", **LONG),
    Problem("concrete", 200, "tanh", **LONG),
    Problem("energy", 150, "relu"),
    Problem("autompg", 150, "relu", **LONG),
    Problem("protein", 300, "tanh"),
    Problem("yacht", 100, "relu", **LONG),
    Problem("wine quality", 300, "relu"),
]

CNNS = [
    Problem("digits images", 100, noisy=noisy, norm=norm, **LONG)
    for norm in (False, True)
    for noisy in (False, True)
]
CNNS += [
    Problem("digits images", 100, noisy=noisy, norm=True, steps=steps)
    for noisy, steps in ((False, 300), (False, 1000), (True, 300))
]


def table(root: Path, name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs `(N, ...)` and classes `(N,)`, in random order."""
    rng = np.random.default_rng(seed)
    if name == "moons":
        x, y = datasets.make_moons(MOST + 100, noise=0.3, random_state=seed)
    elif name == "MNIST":
        images = mnist(root, "test")
        x = F.avg_pool2d(images.x, 2).flatten(1).numpy()
        y = images.y.numpy()
    elif name.startswith("digits"):
        x, y = datasets.load_digits(return_X_y=True)
        x = x / 16 if name == "digits" else x.reshape(-1, 1, 8, 8) / 16
    elif name in ("wine", "iris", "breast_cancer"):
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    else:  # the target of a regression, cut into thirds
        both = uci_table(root, "wine" if name == "wine quality" else name)
        x, target = both[:, :-1], both[:, -1]
        y = np.searchsorted(np.quantile(target, [1 / 3, 2 / 3]), target)
    order = rng.permutation(len(x))
    return x[order], y[order]


def load(root: Path, problem: Problem, seed: int) -> tuple[torch.Tensor, ...]:
    """Return training and test inputs and classes; wrong labels are in both."""
    x, y = table(root, problem.data, seed)
    n = min(problem.n, len(x) // 2)
    if problem.noisy:
        rng = np.random.default_rng(seed)
        wrong = rng.random(len(y)) < 0.1
        y = np.where(wrong, rng.integers(0, y.max() + 1, len(y)), y)
    if problem.data not in ("digits", "digits images", "MNIST"):
        x = (x - x[:n].mean(0)) / (x[:n].std(0) + 1e-9)
    x, y = torch.tensor(x).float(), torch.tensor(y).long()
    return x[:n], y[:n], x[n : n + MOST], y[n : n + MOST]


def network(problem: Problem, x: torch.Tensor, n_classes: int) -> nn.Module:
    act = {"tanh": nn.Tanh, "relu": nn.ReLU}[problem.act]
    if problem.norm is None:
        return nn.Sequential(
            *(nn.Linear(x.shape[1], 32), act(), nn.Linear(32, 32), act()),
            nn.Linear(32, n_classes),
        )

    def block(n_in: int, n_out: int) -> list[nn.Module]:
        norm = [nn.BatchNorm2d(n_out)] if problem.norm else []
        return [nn.Conv2d(n_in, n_out, 3, padding=1), *norm, act(), nn.MaxPool2d(2)]

    body = [*block(1, 8), *block(8, 16), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(64, n_classes))


def train(problem: Problem, x: torch.Tensor, y: torch.Tensor, seed: int) -> nn.Module:
    """Return a network trained by Adam on all data at once."""
    torch.manual_seed(seed)
    model = network(problem, x, int(y.max()) + 1)
    adam = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=problem.decay)
    for _ in range(problem.steps):
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
    return model.eval()


# What is measured


def test_nll(predict: Callable, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        p = torch.cat([predict(part) for part in x.split(250)])
    return float(F.nll_loss(p.clamp_min(1e-30).log(), y))


def oracle(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the NLL of the softmax temperature that is best on the test data."""
    with torch.no_grad():
        f = model(x)
    found: Any = minimize_scalar(
        lambda log_tau: float(F.cross_entropy(f / math.exp(log_tau), y)),
        bounds=(-3, 4),
        method="bounded",
    )
    return float(found.fun)


def measure(args: Any, problem: Problem, seed: int) -> dict[str, Any]:
    """Return the test NLL of every method on one network, and what ours chose."""
    name = "".join(c if c.isalnum() else "_" for c in problem.title)
    path = args.cache_dir / f"{name}_{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    x, y, x_test, y_test = load(args.data_root, problem, seed)
    model = train(problem, x, y, seed)
    loader = DataLoader(TensorDataset(x, y), 50)
    found: dict[str, Any] = {
        "best temperature": oracle(model, x_test, y_test),
        "MAP": test_nll(lambda part: model(part).softmax(-1), x_test, y_test),
    }
    methods = METHODS
    if problem.norm is not None:  # half a minute of predictions each, far behind
        methods = {k: v for k, v in METHODS.items() if k not in ("KFAC", "diag")}
    for method, options in methods.items():
        start = time.process_time()
        try:
            la = Laplace(model, "classification", **options)
            la.fit(loader)
            fitted = time.process_time()
            choice = la.optimize_prior_precision()
            tuned = time.process_time()
            found[method] = test_nll(la, x_test, y_test)
        except Exception as error:
            found[method] = math.nan
            print(f"{name} {seed}: {method}: {error}", flush=True)
            continue
        if method == "nystrom":
            found |= {"fit": fitted - start, "tuning": tuned - fitted}
            if choice is not None:
                found |= {
                    "rule": choice.rule.value,
                    "τ_loo": choice.network_temperature,
                }
    if problem.norm is not None:
        augmented = laplace_ella.augmented_validation(loader)
        la.optimize_calibration(augmented)
        found["augmented images"] = test_nll(la, x_test, y_test)
    path.write_text(json.dumps(found))
    return found


# The page


def summary(args: Any, problems: list[Problem]) -> list[dict[str, Any]]:
    """Return a row per problem: means over the seeds, and the ratio of ours to the best
    of the others'."""
    rows = []
    for problem in problems:
        results = [measure(args, problem, seed) for seed in range(args.seeds)]
        row: dict[str, Any] = {"problem": problem.title}
        for key in (
            "best temperature",
            *OTHERS,
            "augmented images",
            "K = 20",
            "nystrom",
        ):
            if all(key in r for r in results):
                mean = float(np.mean([r[key] for r in results]))
                row[key] = "–" if math.isnan(mean) else mean
        others = [row[key] for key in OTHERS if isinstance(row.get(key), float)]
        row["ratio to the best other"] = row["nystrom"] / min(others)
        row["rule"] = ", ".join(sorted({r.get("rule", "–") for r in results}))
        row["τ_loo"] = float(np.mean([r.get("τ_loo", math.nan) for r in results]))
        rows.append(row)
        print(runs.markdown([row], ".3g"), flush=True)
    return rows


def in_words(rows: list[dict[str, Any]]) -> str:
    """Return geometric means and worst ratios."""

    def ratios(
        denominator: Callable[[dict[str, Any]], float], ours: str = "nystrom"
    ) -> str:
        found = [row[ours] / denominator(row) for row in rows]
        mean, worst = math.exp(float(np.mean(np.log(found)))), max(found)
        at = rows[int(np.argmax(found))]["problem"]
        return f"{mean:.2f} in geometric mean, at worst {worst:.2f} ({at})"

    def best(row: dict[str, Any]) -> float:
        return min(row[k] for k in OTHERS if isinstance(row[k], float))

    lines = [f"- to the best of {', '.join(OTHERS)} on each problem: {ratios(best)}"]
    for key in ("best temperature", *OTHERS):
        if all(isinstance(row[key], float) for row in rows):
            lines.append(f"- to {key}: {ratios(lambda row, k=key: row[k])}")
    few = ratios(lambda row: row["MAP"], "K = 20")
    lines.append(f"- with K = 20 directions, to MAP: {few}")
    return "\n".join(lines) + "\n"


ABOUT = """# Classification with few data and no validation data

`python examples/paper/few_data.py --seeds {seeds}`; mean test NLL of {seeds} networks
per row (up to {most} test examples). MLPs have two hidden layers of 32 units, trained
by Adam (learning rate .01) on all data at once; CNNs have two convolutions. Every
method is tuned by `optimize_prior_precision()` as it comes, from the training data, and
predicts with the probit link. KFAC and diagonal Laplace were left out for CNNs, where
1,000 predictions take them half a minute. *best temperature* is the softmax temperature
with the lowest NLL on the test data, which nobody knows; *K = 20* and *nystrom* are
ours with 20 directions and by default, which is exact here; *rule* is what the default
chose by, see [method](../../../../docs/method.md#leave-one-out). {environment}.
"""


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("few_data", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="networks per problem")
    args = runs.start(parser, argv)
    mlps, cnns = MLPS, CNNS
    if args.smoke:
        args.seeds, mlps, cnns = 1, MLPS[6:8], CNNS[:0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows, images = summary(args, mlps), summary(args, cnns)
        measured = [measure(args, p, s) for p in mlps for s in range(args.seeds)]
    ratio = [r["tuning"] / r["fit"] for r in measured]
    environment = runs.environment(args.threads)
    about = ABOUT.format(seeds=args.seeds, most=MOST, environment=environment)
    parts = [about, "## MLPs", runs.markdown(rows, ".3g"), "NLL of ours relative:\n"]
    parts += [in_words(rows)]
    parts += [
        "The tuning takes "
        f"{float(np.median(ratio)):.2f} times the CPU time of the fit in the median, "
        f"{max(ratio):.2f} times at most.\n"
    ]
    if images:
        parts += ["## CNNs", runs.markdown(images, ".3g")]
    notes = args.out / "notes.md"  # written by hand
    parts += [notes.read_text()] if notes.exists() else []
    text = "\n".join(parts)
    (args.out / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
