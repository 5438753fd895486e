"""Bayesian optimisation with BoTorch through ELLA's predictive, against random search.

The surrogate is a small network. ELLA gives its predictive: with one direction for
every gradient of the data (K = N) and the prior kept outside of them
(complement="prior") it is the exact linearised Laplace, at the cost of N×N algebra.
BoTorch maximises the expected improvement of two points at a time over the joint
posterior, by gradients that flow through features and covariance to the inputs.

    python examples/paper/bayesopt.py            # minutes
    python examples/paper/bayesopt.py --smoke    # seconds

Both methods start from the same points and get the same number of evaluations. Reported
is the simple regret: the lowest value found less the minimum of the function.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import version

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Branin, Hartmann
from common import runs
from gpytorch.distributions import MultivariateNormal
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella

FUNCTIONS = {"Branin": lambda: Branin(), "Hartmann-6": lambda: Hartmann(dim=6)}


@dataclass(frozen=True)
class Budget:
    """How much is evaluated, trained and repeated."""

    n_start: int = 10
    n_rounds: int = 15
    q: int = 2
    n_seeds: int = 5
    n_epochs: int = 300
    n_restarts: int = 4
    n_raw: int = 64

    @property
    def n_evaluations(self) -> int:
        return self.n_start + self.n_rounds * self.q


SMOKE = Budget(n_start=4, n_rounds=1, n_seeds=1, n_epochs=50, n_restarts=2, n_raw=16)


class LaplaceSurrogate(Model):
    """A fitted Laplace approximation of one output as a model of BoTorch.

    Parameters
    ----------
    la : laplace_ella.ELLALaplace
        regression, with `enable_backprop=True`
    """

    def __init__(self, la: laplace_ella.ELLALaplace) -> None:
        super().__init__()
        self.la = la

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size()

    def posterior(
        self,
        X: torch.Tensor,
        output_indices=None,
        observation_noise=False,
        posterior_transform=None,
    ) -> GPyTorchPosterior:
        """Joint posterior of the q points in each of the batches X (..., q, D)."""
        *batch, q, D = X.shape
        f_mu, f_cov = self.la(X.reshape(-1, D), pred_type="glm", joint=True)
        b = len(f_mu) // q
        # (b·q, b·q) → the b blocks (q, q) on its diagonal
        blocks = f_cov.reshape(b, q, b, q).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        jitter = 1e-8 * torch.eye(q, dtype=X.dtype)
        f_dist = MultivariateNormal(
            f_mu.reshape(*batch, q), (blocks + jitter).reshape(*batch, q, q)
        )
        posterior = GPyTorchPosterior(f_dist)
        if posterior_transform is not None:
            return posterior_transform(posterior)
        return posterior


def fit_surrogate(x: torch.Tensor, y: torch.Tensor, n_epochs: int) -> LaplaceSurrogate:
    """Train a network on N observations (N, D), (N, 1), then ELLA with K = N."""
    model = nn.Sequential(
        nn.Linear(x.shape[-1], 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(),
        nn.Linear(50, 1),
    ).to(x)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_epochs)
    for _ in range(n_epochs):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    la = Laplace(
        model,
        "regression",
        "all",
        "nystrom",
        subsample_size=len(x),
        n_eigenvalues=len(x),
        complement="prior",
        row_mode="vmap",
        enable_backprop=True,
        sigma_noise=0.05,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", laplace_ella.RankWarning)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    # The standardised data have variance one; so has the prior predictive, Σ‖J‖²/(Nδ).
    la.prior_precision = la.basis.trace / len(x)
    return LaplaceSurrogate(la)


def bayesian_optimization(function, start: torch.Tensor, budget: Budget, seed: int):
    """Values (n_evaluations,) in the order in which they were evaluated."""
    torch.manual_seed(seed)
    x, bounds = (
        start,
        torch.stack([torch.zeros(function.dim), torch.ones(function.dim)]),
    )
    values = evaluate(function, x)
    for round_ in range(budget.n_rounds):
        # maximise the negative, standardised
        y = -(values - values.mean()) / values.std()
        surrogate = fit_surrogate(x, y.unsqueeze(-1), budget.n_epochs)
        sampler = SobolQMCNormalSampler(torch.Size([128]), seed=seed + round_)
        improvement = qLogExpectedImprovement(surrogate, y.max(), sampler=sampler)
        candidates, _ = optimize_acqf(
            improvement,
            bounds.to(x),
            q=budget.q,
            num_restarts=budget.n_restarts,
            raw_samples=budget.n_raw,
            options={"maxiter": 30, "seed": seed + round_},
        )
        x = torch.cat([x, candidates.detach()])
        values = torch.cat([values, evaluate(function, candidates.detach())])
    return values


def random_search(function, start: torch.Tensor, budget: Budget, seed: int):
    """Values (n_evaluations,) at the start and at uniform points."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    n = budget.n_rounds * budget.q
    rest = torch.rand(n, function.dim, generator=generator, dtype=start.dtype)
    return evaluate(function, torch.cat([start, rest]))


def evaluate(function, x: torch.Tensor) -> torch.Tensor:
    """Values at points of the unit cube."""
    low, high = function.bounds.to(x)
    return function(low + (high - low) * x)


METHODS = {"random search": random_search, "ELLA + BoTorch": bayesian_optimization}


def compare(name: str, budget: Budget) -> dict[str, torch.Tensor]:
    """Simple regret (seeds, evaluations) of each method."""
    function = FUNCTIONS[name]()
    regrets = {method: [] for method in METHODS}
    for seed in range(budget.n_seeds):
        generator = torch.Generator().manual_seed(seed)
        start = torch.rand(
            budget.n_start, function.dim, generator=generator, dtype=torch.float64
        )
        for method, run in METHODS.items():
            values = run(function, start, budget, seed)
            best = values.cummin(0).values - function.optimal_value
            regrets[method].append(best)
            print(f"{name}, seed {seed}, {method}: {best[-1]:.4f}", flush=True)
    return {method: torch.stack(best) for method, best in regrets.items()}


def table(results: dict[str, dict[str, torch.Tensor]], budget: Budget) -> str:
    """Markdown: regret at half and at the end, and how many seeds ELLA wins."""
    half = budget.n_start + budget.n_rounds * budget.q // 2
    header = (
        f"| function | method | regret after {half} | after {budget.n_evaluations} "
        "| median | seeds won |"
    )
    lines = [header, "|---|---|---|---|---|---|"]
    for name, regrets in results.items():
        ours, random = regrets["ELLA + BoTorch"][:, -1], regrets["random search"][:, -1]
        won = {"ELLA + BoTorch": ours < random, "random search": random < ours}
        for method, best in regrets.items():
            cells = [
                f"{best[:, n - 1].mean():.3f} ± {spread(best[:, n - 1]):.3f}"
                for n in (half, budget.n_evaluations)
            ]
            median = best[:, -1].median()
            lines.append(
                f"| {name} | {method} | {cells[0]} | {cells[1]} | {median:.3f} "
                f"| {int(won[method].sum())} of {len(best)} |"
            )
    return "\n".join(lines)


def spread(values: torch.Tensor) -> float:
    """Standard error of the mean."""
    if len(values) < 2:
        return 0.0
    return float(values.std() / len(values) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", nargs="+", default=list(FUNCTIONS))
    parser.add_argument("--seeds", type=int, help="number of repetitions")
    runs.add_output(parser)
    args = parser.parse_args()
    args.out = runs.output_folder("bayesopt", args)
    budget = SMOKE if args.smoke else Budget()
    if args.seeds is not None:
        budget = Budget(**{**budget.__dict__, "n_seeds": args.seeds})
    names = args.functions[:1] if args.smoke else args.functions

    start = time.perf_counter()
    results = {name: compare(name, budget) for name in names}
    seconds = time.perf_counter() - start
    text = table(results, budget)
    print(text)
    versions = ", ".join(f"{p} {version(p)}" for p in ("torch", "botorch"))
    about = (
        f"Simple regret, mean ± standard error over {budget.n_seeds} seeds; "
        f"{budget.n_start} common random points, then {budget.n_rounds} rounds of "
        f"{budget.q}. Made by `python examples/paper/bayesopt.py"
        f"{' --smoke' if args.smoke else ''}` in {seconds:.0f} s on "
        f"{platform.machine()}, {torch.get_num_threads()} thread(s), {versions}."
    )
    (args.out / "results.md").write_text(
        f"# Bayesian optimisation with ELLA\n\n{text}\n\n{about}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
