"""The curvature of all data, inside the basis and outside it, from a sample of rows.

N rows of the Jacobian (example and output) make the curvature JᵀJ; M of them were
sampled, and the eigenvalues of their Gram matrix are known. Where all were sampled so
is log det(I + JJᵀ/μ). Where not, the sample says less than it seems to: M rows have at
most M eigenvalues, N rows more, and multiplying by N/M adds none.

Random matrix theory relates the two. Rows drawn from a distribution with second moment
Σ, n of them with the ridge nμ, have as many degrees of freedom as Σ itself has with a
larger ridge κ (Silverstein's equation):

    df(κ) = tr Σ(Σ + κ)⁻¹,    μ = κ(1 − df/n),
    log det(I + JᵀJ/(nμ)) = log det(I + Σ/κ) − n log(1 − df/n) − df.

The sample's eigenvalues give df and log det of Σ for every κ at which df is well below
M; the same equation with n = N leads to those of all data. Below that κ the logit of
df/P is continued along a straight line in log κ, which it is close to for networks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.integrate import cumulative_trapezoid

#: Up to this share of M the degrees of freedom of a sample are trusted; the line that
#: continues them is fitted where they exceed the lower share.
TRUSTED, FITTED = 0.6, 0.3

#: Points of the table, and how far its ridges reach below the largest eigenvalue.
N_POINTS, REACH = 1200, 45.0


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the curvature of N rows, from those of M sampled ones.

    The `eigenvalues` are those of the sample's Gram matrix, descending, in float64.
    Only the caller knows whether the sample is `complete`, all N rows: as many other
    rows may have been sampled.
    """

    eigenvalues: torch.Tensor
    n_samples: int
    n_rows: int
    n_params: int
    complete: bool = False

    @property
    def scaled(self) -> torch.Tensor:
        """The sample's eigenvalues, as if all rows were like it."""
        return self.eigenvalues * (self.n_rows / self.n_samples)

    @property
    def trace(self) -> torch.Tensor:
        """tr JᵀJ, without bias."""
        return self.scaled.sum()

    def log_det(self, ridge: torch.Tensor) -> torch.Tensor:
        """Return log det(I + JᵀJ/ridge), differentiable."""
        if self.complete:
            return torch.log1p(self.eigenvalues / ridge.double()).sum()
        return self._interpolate(ridge)[0]

    def degrees_of_freedom(self, ridge: torch.Tensor) -> torch.Tensor:
        """Return tr JᵀJ(JᵀJ + ridge)⁻¹, the effective number of parameters."""
        if self.complete:
            return (self.eigenvalues / (self.eigenvalues + ridge.double())).sum()
        return -self._interpolate(ridge)[1]

    def log_det_beyond(self, rank: int, ridge: torch.Tensor) -> torch.Tensor:
        """Return what directions after the first `rank` add to the log determinant."""
        ridge = ridge.double()
        if self.complete:
            return torch.log1p(self.eigenvalues[rank:] / ridge).sum()
        within = torch.log1p(self.scaled[:rank] / ridge).sum()
        return (self.log_det(ridge) - within).clamp_min(0)

    @cached_property
    def _table(self) -> torch.Tensor:
        """Increasing log ridge, log det and its derivative there, `(3, n)`."""
        eigenvalues = self.eigenvalues.cpu().numpy()
        table = _tabulate(eigenvalues, self.n_samples, self.n_rows, self.n_params)
        with torch.inference_mode(False):  # it is kept, and differentiated later
            return torch.tensor(table, device=self.eigenvalues.device)

    def _interpolate(self, ridge: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log det and its derivative by the logarithm t of the ridge: cubic
        between the points, straight below them, trace/ridge above them."""
        if not self.n_rows:
            nothing = torch.zeros_like(self.eigenvalues[0])
            return nothing, nothing
        t, (x, y, slope) = ridge.double().log().reshape(()), self._table
        inside = torch.maximum(torch.minimum(t, x[-1]), x[0])
        i = torch.searchsorted(x, inside.detach()).clamp(1, len(x) - 1)
        width = x[i] - x[i - 1]
        s = (inside - x[i - 1]) / width
        y0, y1, d0, d1 = y[i - 1], y[i], slope[i - 1] * width, slope[i] * width
        a, b = 3 * (y1 - y0) - 2 * d0 - d1, d0 + d1 - 2 * (y1 - y0)
        derivative = (d0 + s * (2 * a + 3 * b * s)) / width
        value = y0 + s * (d0 + s * (a + b * s)) + derivative * (t - inside)
        weak = y[-1] * torch.exp(x[-1] - t.clamp_min(x[-1]))
        above = t > x[-1]
        return torch.where(above, weak, value), torch.where(above, -weak, derivative)


def _tabulate(
    eigenvalues: np.ndarray, n_samples: int, n_rows: int, n_params: int
) -> np.ndarray:
    """Return log ridge, log det(I + JᵀJ/ridge) and its derivative, for all N rows."""
    # First log κ (descending), degrees of freedom and log det(I + Σ/κ) of the
    # distribution that the sample was drawn from.
    values = eigenvalues[eigenvalues > 0] / n_samples
    highest = math.log(values.sum() * 1e4)
    log_mu = np.linspace(highest, math.log(values[0]) - REACH, N_POINTS)
    ratios = values / np.exp(log_mu)[:, None]
    freedom = (ratios / (1 + ratios)).sum(1)
    # 1 − df/M without cancellation
    left = ((1 / (1 + ratios)).sum(1) + (n_samples - len(values))) / n_samples
    trusted = freedom <= TRUSTED * n_samples
    log_det = np.log1p(ratios).sum(1) + n_samples * np.log(left) + freedom
    population = np.stack([log_mu - np.log(left), freedom, log_det])[:, trusted]
    if not trusted.all():
        population = _continued(population, FITTED * n_samples, n_params)
    # Of N rows from it, by increasing ridge.
    population = population[:, population[1] < n_rows * (1 - 1e-9)]
    log_kappa, freedom, log_det = population[:, ::-1]
    left = np.log1p(-freedom / n_rows)  # log(1 − df/N)
    log_ridge = log_kappa + left + math.log(n_rows)
    return np.stack([log_ridge, log_det - n_rows * left - freedom, -freedom])


def _continued(
    population: np.ndarray, fitted_above: float, n_params: int
) -> np.ndarray:
    """Continue all three below the last κ, by a straight line for the logit of df/P."""
    log_kappa, freedom, log_det = population
    # A sample of more rows than there are parameters has nothing to continue.
    limit = max(n_params, freedom[-1] * (1 + 1e-9))
    logit = np.log(freedom / (limit - freedom))
    fitted = freedom >= fitted_above
    slope = min(np.polyfit(log_kappa[fitted], logit[fitted], 1)[0], 0.0)
    below = np.linspace(0, -REACH, N_POINTS)
    further = limit / (1 + np.exp(-(logit[-1] + slope * below)))
    # d log det/d log κ = −df
    added = cumulative_trapezoid(further, -below)
    more = np.stack([log_kappa[-1] + below[1:], further[1:], log_det[-1] + added])
    return np.concatenate([population, more], 1)
