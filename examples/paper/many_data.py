"""Classification with more data than an exact fit takes, and no validation data.

    python examples/paper/many_data.py

An exact fit to a random subset chooses prior precision and softmax temperature; a fit
of K directions to all data may use them, with the curvature at the network's parameters
or *softened*: at a temperature of the network's logits for which the curvature of the
subset has the trace that it has at the mode of the linearised model. The exact fit to
all data is the yardstick: the networks are small enough for it.
"""

from __future__ import annotations

import math
import warnings
from itertools import product
from typing import Any

import numpy as np
import torch
from common import runs
from few_data import LONG, Problem, load, oracle, test_nll, train
from laplace import Laplace
from scipy.optimize import brentq
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PROBLEMS = [
    Problem("digits", 800, "tanh", noisy=True, **LONG),
    Problem("protein", 3000, "tanh", steps=1000),
    Problem("digits", 600, "relu", steps=1000),
]

#: Pairs of an example and an output of the subset.
PAIRS = 2000

#: Rows that are tuned by `optimize_prior_precision()`, by the arguments of Laplace.
ROWS: dict[str, dict[str, Any]] = {
    "KFAC, evidence": {"hessian_structure": "kron"},
    "last layer, evidence": {
        "subset_of_weights": "last_layer",
        "hessian_structure": "full",
    },
    "K = 20, evidence": {},
    "K = 20: the default": {},
    "K = 20, complement at the prior": {"complement": "prior"},
    "K = 128": {"n_eigenvalues": 128},
    "K = 128, complement at the prior": {"n_eigenvalues": 128, "complement": "prior"},
    "exact, all data": {"n_eigenvalues": "exact"},
}


class Softened(nn.Module):
    """A network whose logits are divided by a number."""

    def __init__(self, net: nn.Module, tau: float) -> None:
        super().__init__()
        self.net, self.tau = net, tau

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) / self.tau


def softness(la: Any, choice: Any, loader: DataLoader) -> float:
    """Return the temperature at which the curvature has the trace of `choice.H`."""
    cache = la.cache_features(loader)
    f, phi = cache.f_mu.double(), cache.phi.double()

    def excess(log_tau: float) -> float:
        p = (f / math.exp(log_tau)).softmax(-1).unsqueeze(-1)
        centred = phi - (p * phi).sum(1, keepdim=True)
        return float((p * centred.square()).sum() / choice.H.trace()) - 1

    if excess(0.0) >= 0:
        return 1.0
    return math.exp(brentq(excess, 0.0, 8.0)) if excess(8.0) > 0 else math.exp(8.0)


def probit(f: torch.Tensor, variance: torch.Tensor, tau: float) -> torch.Tensor:
    return (f / (tau**2 + math.pi / 8 * variance).sqrt()).softmax(-1)


def measure(args: Any, problem: Problem, seed: int) -> dict[str, float]:
    """Return the test NLL of every method on one network."""
    x, y, x_test, y_test = load(args.data_root, problem, seed)
    if args.smoke:
        x_test, y_test = x_test[:50], y_test[:50]
    model = train(problem, x, y, seed)
    loader = DataLoader(TensorDataset(x, y), 100)
    n = PAIRS // (int(y.max()) + 1)
    subset = DataLoader(TensorDataset(x[:n], y[:n]), 100)  # in random order already

    def fitted(data: DataLoader, net: nn.Module = model, **options: Any) -> Any:
        options = {
            "subset_of_weights": "all",
            "hessian_structure": "nystrom",
            **options,
        }
        la = Laplace(net, "classification", **options)
        la.fit(data)
        return la

    def nll(predict: Any) -> float:
        return test_nll(predict, x_test, y_test)

    found = {
        "best temperature on the test data": oracle(model, x_test, y_test),
        "MAP": nll(lambda part: model(part).softmax(-1)),
    }
    for name, options in ROWS.items():
        la = fitted(loader, **options)
        la.optimize_prior_precision(
            **{"method": "marglik"} if "evidence" in name else {}
        )
        found[name] = nll(la)
    exact = fitted(subset, n_eigenvalues="exact")
    choice = exact.optimize_prior_precision()
    found["exact, 2,000 pairs"] = nll(exact)
    tau, delta = choice.softmax_temperature, choice.prior_precision
    soft = softness(exact, choice, subset)
    for rank, softened in product((20, 128), (False, True)):
        temperature = soft if softened else 1.0
        options = {"n_eigenvalues": rank, "complement": "prior"}
        options["prior_precision"] = delta / temperature**2
        la = fitted(loader, Softened(model, temperature), **options)

        def predict(part: torch.Tensor, la: Any = la) -> torch.Tensor:
            with torch.no_grad():
                variance = la.predictive_moments(part, diagonal_output=True)[1]
                return probit(model(part), variance, tau)

        how = ", softened curvature" * softened
        found[f"K = {rank}, settings of the 2,000 pairs{how}"] = nll(predict)
    return found


ABOUT = """# Classification with more data than an exact fit takes by default

`python examples/paper/many_data.py --seeds {seeds}`; test NLL, mean of {seeds}
networks, link probit, no validation data. *Exact, all data* is asked for by name: these
networks are small enough. *2,000 pairs* are those of so many random examples. *Settings
of the 2,000 pairs*: prior precision and softmax temperature of this exact fit for K
directions of all data, the complement at the prior; *softened*: with the curvature at a
temperature of the logits for which that of the subset has the trace that it has at the
mode of the linearised model. {environment}.
"""


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("many_data", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="networks per problem")
    args = runs.start(parser, argv)
    problems = PROBLEMS
    if args.smoke:
        args.seeds, problems = 1, [Problem("iris", 60, "tanh", noisy=True)]
    means: dict[str, dict[str, float]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for problem in problems:
            found = [measure(args, problem, seed) for seed in range(args.seeds)]
            names = found[0]
            means[problem.title] = {n: np.mean([f[n] for f in found]) for n in names}
            print(problem.title, means[problem.title], flush=True)
    rows = [
        {"method": name} | {title: float(of[name]) for title, of in means.items()}
        for name in next(iter(means.values()))
    ]
    environment = runs.environment(args.threads)
    about = ABOUT.format(seeds=args.seeds, environment=environment)
    text = f"{about}\n{runs.markdown(rows, '.3f')}"
    (args.out / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
