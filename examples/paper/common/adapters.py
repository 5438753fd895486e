"""Every method of the comparison of peers behind one small function.

An adapter takes a `Problem`, does what all settings share, and returns a function from
a setting (None: what the method chooses on the training data) to `Fitted`. What a peer
needs is imported inside its adapter: one that is missing costs its own row only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella

DRAWS, MEMBERS = 20, 5  # of a posterior over weights, of an ensemble

NEEDS_VALIDATION = "needs validation data"
NO_TRAINING = "trains networks, which was not done on images"


@dataclass
class Problem:
    """A trained network and its data. `val` is None where all data were trained on."""

    likelihood: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor] | None
    fresh: Callable[[float], nn.Module] | None  # a new network, from a dropout rate
    weight_decay: float
    steps: int
    checkouts: Path = field(default_factory=Path)

    def __post_init__(self) -> None:
        self.regression = self.likelihood == "regression"
        self.n = len(self.train[0])
        self.batch = 100 if self.fresh else 10

    def loader(self, batch_size: int = 256, shuffle: bool = False) -> DataLoader:
        return DataLoader(TensorDataset(*self.train), batch_size, shuffle)

    def network(self) -> Any:
        return copy.deepcopy(self.model).eval()

    def untrained(self, dropout: float = 0.0) -> nn.Module:
        if self.fresh is None:
            raise ValueError(NO_TRAINING)
        return self.fresh(dropout)

    def noise(self) -> float:
        """Return the mean square of the residuals: noise where a method has none."""
        with torch.no_grad():
            x, y = self.train
            return float(F.mse_loss(self.model(x), y)) if self.regression else 1.0

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the square error that networks are trained by, or cross entropy."""
        return F.mse_loss(f, y) if self.regression else F.cross_entropy(f, y)

    def nll(self, f: Tensor, y: Tensor, noise: float) -> Tensor:
        """Return the mean negative log likelihood, up to a constant."""
        return self.loss(f, y) / (2 * noise if self.regression else 1)

    def optimise(self, model: nn.Module, decay: float = 1.0) -> nn.Module:
        """Train as the network itself was: Adam on all data, cosine schedule."""
        rate = decay * self.weight_decay
        optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        for _ in range(self.steps):
            optimizer.zero_grad()
            self.loss(model(self.train[0]), self.train[1]).backward()
            optimizer.step()
            schedule.step()
        return model.eval()


@dataclass
class Fitted:
    """What a method gives: in regression `predict` returns means and variances `(N, 1)`
    of the function, in classification probabilities `(N, C)`. `stored` counts the
    numbers kept besides the network, `noise` is the variance of the observations."""

    predict: Callable[[Tensor], Any] | None
    stored: float
    noise: float | None = None
    score: Callable[[Tensor], Tensor] | None = None  # of methods that give only this


Choose = Callable[[Any], Fitted]
Adapter = Callable[[Problem], Choose]


def count(parts: Iterable[Tensor]) -> int:
    return sum(part.numel() for part in parts)


def by_samples(problem: Problem, draw: Callable, stored: float) -> Fitted:
    """Return predictions from a function to the outputs `(S, N, C)` of S networks."""

    @torch.no_grad()
    def predict(x: Tensor) -> Any:
        f = draw(x)
        return (f.mean(0), f.var(0)) if problem.regression else f.softmax(-1).mean(0)

    return Fitted(predict, stored)


def network(problem: Problem) -> Choose:
    def draw(x: Tensor) -> Tensor:
        return problem.model(x).expand(2, -1, -1)

    return lambda setting: by_samples(problem, draw, 0)


# --- this package and laplace-torch ---------------------------------------------------


def tuned(
    problem: Problem, subset: str, structure: str, **options: Any
) -> Callable[[float | None], Any]:
    """Return a function from a prior precision, or None, to a fitted posterior."""
    if "subsample_size" in options:
        options["subsample_size"] = min(options["subsample_size"], problem.n)
    net, kind, noise = problem.network(), problem.likelihood, problem.noise()
    fitted: Any = Laplace(net, kind, subset, structure, **options)
    learns = options.get("functional_approximation") == "variational"
    if not learns:
        fitted.fit(problem.loader(problem.batch))

    def choose(prior: float | None) -> Any:
        la = copy.deepcopy(fitted) if learns else copy.copy(fitted)
        if prior is not None or structure == "gp":
            la.prior_precision = prior or 1.0
            if problem.regression:
                la.sigma_noise = noise**0.5
            if learns:
                la.fit(problem.loader(problem.batch), lr=1e-2)
        elif not problem.regression:
            la.optimize_prior_precision()
        elif structure == "nystrom":
            la.optimize_sigma_noise()
        else:
            by_evidence(la)
        return la

    return choose


def by_evidence(la: Any, steps: int = 100) -> None:
    """Ascend the evidence in prior and noise, as laplace-torch's examples do."""
    logs = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam(logs, lr=1e-1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-la.log_marginal_likelihood(*(value.exp() for value in logs))).backward()
        optimizer.step()
    la.prior_precision, la.sigma_noise = (value.exp().item() for value in logs)


def of_posterior(la: Any, batch: int = 100) -> Fitted:
    regression = la.likelihood == "regression"

    def predict(x: Tensor) -> Any:
        found = [la(part) for part in x.split(batch)]
        if not regression:
            return torch.cat(found).detach()
        mean, variance = (torch.cat(side).detach() for side in zip(*found, strict=True))
        return mean, variance.squeeze(-1)

    if isinstance(la, laplace_ella.ELLALaplace):
        stored = la.rank * (la.n_params + la.rank)
    elif hasattr(la, "inducing_locations"):
        stored = count([la.inducing_locations, la.L])
    elif hasattr(la, "dual_directions"):
        stored = count([la.dual_directions, la.feature_gram])
    elif isinstance(la.H, Tensor):
        stored = la.H.numel()
    else:
        stored = count(part for block in la.H.eigenvectors for part in block)
    noise = float(torch.as_tensor(la.sigma_noise)) ** 2 if regression else None
    return Fitted(predict, stored, noise)


def linearised(subset: str, structure: str, **options: Any) -> Adapter:
    """Return the adapter of a posterior with laplace-torch's interface."""

    def adapt(problem: Problem) -> Choose:
        choose = tuned(problem, subset, structure, **options)
        return lambda prior: of_posterior(choose(prior), problem.batch)

    return adapt


def calibrated(**options: Any) -> Adapter:
    """Return the adapter of our own choice of all settings on validation data."""

    def adapt(problem: Problem) -> Choose:
        if problem.val is None:
            raise ValueError(NEEDS_VALIDATION)
        la = tuned(problem, "all", "nystrom", **options)(1.0)
        la.optimize_calibration(DataLoader(TensorDataset(*problem.val), 256))
        return lambda setting: of_posterior(la, problem.batch)

    return adapt


# --- networks trained anew, or further ------------------------------------------------


def ensemble(problem: Problem) -> Choose:
    from torch_uncertainty.methods import deep_ensembles

    def choose(decay: float | None) -> Fitted:
        rate = 1.0 if decay is None else decay
        nets = [problem.optimise(problem.untrained(), rate) for _ in range(MEMBERS)]
        net = deep_ensembles(nets, task=problem.likelihood, probabilistic=False)
        stored = (MEMBERS - 1) * count(nets[0].parameters())
        return by_samples(problem, lambda x: net(x).unflatten(0, (MEMBERS, -1)), stored)

    return choose


def dropout(problem: Problem) -> Choose:
    from torch_uncertainty.methods import mc_dropout

    def choose(rate: float | None) -> Fitted:
        net = problem.network()
        if problem.fresh is not None:
            net = problem.optimise(problem.untrained(rate or 0.1).train())
        net = mc_dropout(net, DRAWS, task=problem.likelihood, probabilistic=False)
        net.eval()
        return by_samples(problem, lambda x: net(x).unflatten(0, (DRAWS, -1)), 0)

    return choose


def swag(problem: Problem) -> Choose:
    from torch_uncertainty.methods import SWAG

    def choose(lr: float | None) -> Fitted:
        net = SWAG(problem.network(), cycle_start=0, cycle_length=1)
        parameters, rate = net.core_model.parameters(), problem.weight_decay
        lr = lr or (1e-2 if problem.fresh else 1e-3)
        optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=rate)
        for epoch in range(1, (40 if problem.fresh else 5) + 1):
            net.core_model.train()
            for x, y in problem.loader(32, shuffle=True):
                optimizer.zero_grad()
                problem.loss(net.core_model(x), y).backward()
                optimizer.step()
            net.update_wrapper(epoch)
        net.bn_update(problem.loader(), device="cpu")
        net.eval()
        stored, S = count(net.swag_stats.values()), net.num_estimators
        return by_samples(problem, lambda x: net(x).unflatten(0, (S, -1)), stored)

    return choose


def ivon(problem: Problem) -> Choose:
    from ivon import IVON

    def choose(hess_init: float | None) -> Fitted:
        net, (x, y) = problem.untrained(), problem.train
        optimizer = IVON(
            net.parameters(),
            lr=0.1,
            ess=problem.n,
            weight_decay=problem.weight_decay,
            hess_init=hess_init or 1.0,
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, problem.steps)
        for _ in range(problem.steps):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                problem.loss(net(x), y).backward()
            optimizer.step()
            schedule.step()

        def one(x: Tensor) -> Tensor:
            with optimizer.sampled_params():
                return net(x)

        def draw(x: Tensor) -> Tensor:
            return torch.stack([one(x) for _ in range(DRAWS)])

        return by_samples(problem, draw, count(net.parameters()))

    return choose


def posteriors(method: str) -> Adapter:
    """Return the adapter of a method of posteriors, prior N(0, 1) as in its guides."""

    def adapt(problem: Problem) -> Choose:
        import posteriors
        import torchopt

        if problem.fresh is None:
            raise ValueError(NO_TRAINING)
        net, noise = problem.network(), problem.noise()
        start = {k: v.detach().clone() for k, v in net.named_parameters()}

        def of(params: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(net, params, (x,))

        def log_posterior(params: Any, batch: Any) -> Any:
            f = of(params, batch[0])
            prior = posteriors.diag_normal_log_prob(params, normalize=False)
            return prior / problem.n - problem.nll(f, batch[1], noise), f

        def choose(lr: float | None) -> Fitted:
            kept, lr, heat = [], lr or 1e-3, 1 / problem.n
            if method == "sghmc":
                build = posteriors.sgmcmc.sghmc.build
                moves = build(log_posterior, lr, alpha=0.1, temperature=heat)
            else:
                build, adam = posteriors.vi.diag.build, torchopt.adam(lr=lr)
                moves = build(log_posterior, adam, heat, init_log_sds=-4.0)
            state = moves.init(start)
            for step in range(1, problem.steps + 1):
                state, _ = moves.update(state, problem.train)
                if method == "sghmc" and step % (problem.steps // DRAWS) == 0:
                    kept.append({k: v.detach() for k, v in state.params.items()})
            if method == "vi":
                kept = [posteriors.vi.diag.sample(state) for _ in range(DRAWS)]
            stored = count(start.values()) * (DRAWS if method == "sghmc" else 1)
            draw = lambda x: torch.stack([of(params, x) for params in kept])  # noqa: E731
            return by_samples(problem, draw, stored)

        return choose

    return adapt
