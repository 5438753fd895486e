"""Heads of `one_pass.py`, which predict log variances from activations, and scores.

Each head is fitted to scaled activations X `(N, F)` and centred targets Y `(N, T)`; the
settings of ridge and kernel ridge are chosen by the first target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

__all__ = [
    "MEAN",
    "Head",
    "Heads",
    "explained",
    "explained_error",
    "fitted_line",
    "rms",
]

#: Strengths of ridge; of kernel ridge, and widths in median distances.
RIDGES = [10.0**power for power in range(-2, 6)]
KERNEL_RIDGES = (1e-3, 1e-2, 1e-1)
WIDTHS = (1.0, 2.0, 4.0)

#: Images that the setting of a kernel is chosen with: choosing with all takes minutes.
N_CHOOSE = 2500

#: Standard deviations beyond which activations say no more.
FARTHEST = 8.0

#: What `Heads.predict` calls the mean of its heads.
MEAN = "mean of the three"

Head = Callable[[torch.Tensor], torch.Tensor]


def split(n: int) -> tuple[slice, slice]:
    """Four fifths to fit with, one fifth to choose with."""
    return slice(0, 4 * n // 5), slice(4 * n // 5, n)


def ridge(X: torch.Tensor, Y: torch.Tensor) -> Head:
    fit, choose = split(len(X))

    def weights(part: slice, strength: float) -> torch.Tensor:
        x, y = X[part], Y[part]
        wide = len(x) < x.shape[1]  # (XᵀX + s)⁻¹Xᵀ = Xᵀ(XXᵀ + s)⁻¹
        A = x @ x.T if wide else x.T @ x
        A.diagonal().add_(strength)
        if wide:
            return x.T @ torch.linalg.solve(A, y)
        return torch.linalg.solve(A, x.T @ y)

    def error(strength: float) -> float:
        left = X[choose] @ weights(fit, strength) - Y[choose]
        return float(left[:, 0].square().mean())

    w = weights(slice(0, len(X)), min(RIDGES, key=error))
    return lambda new: new @ w


def kernel_ridge(X: torch.Tensor, Y: torch.Tensor) -> Head:
    fit, choose = split(min(len(X), N_CHOOSE))
    median = float(torch.cdist(X[:300], X[:300]).median())

    def kernel(a: torch.Tensor, b: torch.Tensor, width: float) -> torch.Tensor:
        return (-0.5 * (torch.cdist(a, b) / (width * median)).square()).exp()

    def weights(part: slice, width: float, strength: float) -> torch.Tensor:
        A = kernel(X[part], X[part], width)
        A.diagonal().add_(strength)
        return torch.cholesky_solve(Y[part], torch.linalg.cholesky(A))

    def error(setting: tuple[float, float]) -> float:
        width, strength = setting
        predicted = kernel(X[choose], X[fit], width) @ weights(fit, width, strength)
        return float((predicted - Y[choose])[:, 0].square().mean())

    width, strength = min(((w, s) for w in WIDTHS for s in KERNEL_RIDGES), key=error)
    w = weights(slice(0, len(X)), width, strength)
    return lambda new: kernel(new, X, width) @ w


def network(X: torch.Tensor, Y: torch.Tensor, epochs: int) -> Head:
    """Two hidden layers of 256 units, with dropout."""
    X, Y = X.float(), Y.float()
    scale = Y.std(0)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Sequential(
            *(nn.Linear(X.shape[1], 256), nn.GELU(), nn.Dropout(0.1)),
            *(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)),
            nn.Linear(256, Y.shape[1]),
        )
        optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.05)
        steps = epochs * max(len(X) // 128, 1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-3, total_steps=steps
        )
        for _ in range(steps):
            index = torch.randint(len(X), (128,), generator=generator)
            optimizer.zero_grad()
            (head(X[index]) - Y[index] / scale).square().mean().backward()
            optimizer.step()
            schedule.step()
    head.eval().requires_grad_(False)
    return lambda new: (head(new.float()) * scale).double()


def fitted_line(x: torch.Tensor, y: torch.Tensor) -> Head:
    """The least-squares line y(x)."""
    slope = ((x - x.mean()) * (y - y.mean())).mean() / x.var(unbiased=False)
    return lambda new: y.mean() + slope * (new - x.mean())


@dataclass(frozen=True)
class Heads:
    """Heads of all kinds, on one set of activations.

    Attributes
    ----------
    mean, std : torch.Tensor
        of the activations that were fitted
    offset : torch.Tensor
        mean targets
    heads : dict
    """

    mean: torch.Tensor
    std: torch.Tensor
    offset: torch.Tensor
    heads: dict[str, Head]

    @classmethod
    def fit(
        cls, x: torch.Tensor, Y: torch.Tensor, epochs: int, ways: Sequence[str] = ()
    ) -> Heads:
        mean, std = x.double().mean(0), x.double().std(0).clamp_min(1e-4)
        whole = cls(mean, std, Y.mean(0), {})
        X, Y = whole.scaled(x), Y - Y.mean(0)
        makers: dict[str, Callable[[], Head]] = {
            "ridge": lambda: ridge(X, Y),
            "kernel ridge": lambda: kernel_ridge(X, Y),
            "network": lambda: network(X, Y, epochs),
        }
        for name in ways or makers:
            whole.heads[name] = makers[name]()
        return whole

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.double() - self.mean) / self.std).clamp(-FARTHEST, FARTHEST)

    def predict(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Predictions of each, and their mean."""
        X = self.scaled(x)
        found = {name: head(X) + self.offset for name, head in self.heads.items()}
        if len(found) > 1:
            found[MEAN] = torch.stack(list(found.values())).mean(0)
        return found


# Scores


def explained(predicted: torch.Tensor, y: torch.Tensor) -> float:
    """R², the share of the variance of y that is explained."""
    if len(y) < 2:
        return float("nan")
    return float(1 - (predicted - y).square().mean() / y.var(unbiased=False))


def explained_error(predicted: torch.Tensor, y: torch.Tensor) -> float:
    """Standard error of R², by the bootstrap."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(len(y), (len(y),), generator=generator) for _ in range(200)]
    return float(np.std([explained(predicted[i], y[i]) for i in draws]))


def rms(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt()) if len(errors) else float("nan")
