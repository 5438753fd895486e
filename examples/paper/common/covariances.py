"""Temperature and prior of any Gaussian posterior, from output covariances.

A posterior with curvature H, temperature T and prior precision δ has the covariance
(H/T + δ)⁻¹ = T·(H + γ)⁻¹ with γ = δT. So output covariances are needed for a few γ
only, and the temperature scales them: both are chosen without another pass through
Jacobians, alike for full, Kronecker, diagonal and low-rank posteriors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from scipy.optimize import minimize_scalar

from laplace_ella import metrics
from laplace_ella.posterior.predictive import (
    FunctionValues,
    class_probabilities,
    psd_root,
)

#: log10 of the temperatures searched.
LOG_T = (-3.0, 5.0)


def root(f_mu: torch.Tensor, f_var: torch.Tensor) -> FunctionValues:
    """The Gaussian N(f_mu `(N, C)`, f_var `(N, C, C)`), with a root of f_var."""
    return FunctionValues(f_mu, psd_root(f_var))


def probabilities(
    values: FunctionValues, temperature: float, link: str, n_samples: int = 512
) -> torch.Tensor:
    """Class probabilities `(N, C)` with the covariance times the temperature."""
    scaled = FunctionValues(values.mean, temperature**0.5 * values.factor)
    generator = torch.Generator().manual_seed(0)
    return class_probabilities(scaled, link, n_samples, generator=generator)


def choose(
    f_mu: torch.Tensor,
    f_vars: Iterable[tuple[float, torch.Tensor]],
    targets: torch.Tensor,
    link: str,
) -> tuple[float, float]:
    """γ and temperature with the lowest NLL, of pairs of γ and f_var `(N, C, C)`."""
    best = (float("inf"), 0.0, 0.0)
    for gamma, f_var in f_vars:
        values = root(f_mu, f_var)

        def loss(log_t: float, values: FunctionValues = values) -> float:
            return metrics.nll(probabilities(values, 10**log_t, link, 128), targets)

        found = minimize_scalar(
            loss, bounds=LOG_T, method="bounded", options={"xatol": 0.02}
        )
        best = min(best, (float(found.fun), gamma, 10**found.x))
    return best[1:]
