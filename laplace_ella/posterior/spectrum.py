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

#: Up to this share of M the degrees of freedom of a sample are trusted; the line that
#: continues them is fitted where they exceed the lower share.
TRUSTED, FITTED = 0.6, 0.3

#: Points of the table, and how far its ridges reach below the largest eigenvalue.
N_POINTS, REACH = 1200, 45.0


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the curvature of N rows, from those of M sampled ones.

    Attributes
    ----------
    eigenvalues : torch.Tensor
        of the sample's Gram matrix, descending, float64
    n_samples : int
        M
    n_rows : int
        N
    n_params : int
        P
    complete : bool
        whether the sample is all N rows, which their numbers alone do not tell: other
        rows may have been sampled

    Examples
    --------
    >>> values = torch.tensor([4.0, 1.0], dtype=torch.float64)
    >>> spectrum = Spectrum(values, n_samples=2, n_rows=2, n_params=5, complete=True)
    >>> float(spectrum.degrees_of_freedom(torch.tensor(1.0)))  # 4/5 + 1/2
    1.3
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
        if not self.n_rows:
            return torch.zeros_like(self.eigenvalues[0])
        return self._interpolate(ridge.double().log())[0].reshape(())

    def degrees_of_freedom(self, ridge: torch.Tensor) -> torch.Tensor:
        """Return tr JᵀJ(JᵀJ + ridge)⁻¹, the effective number of parameters."""
        if self.complete:
            return (self.eigenvalues / (self.eigenvalues + ridge.double())).sum()
        if not self.n_rows:
            return torch.zeros_like(self.eigenvalues[0])
        return -self._interpolate(ridge.double().log())[1].reshape(())

    def log_det_beyond(self, rank: int, ridge: torch.Tensor) -> torch.Tensor:
        """Return what directions after the first `rank` add to the log determinant."""
        ridge = ridge.double()
        if self.complete:
            return torch.log1p(self.eigenvalues[rank:] / ridge).sum()
        within = torch.log1p(self.scaled[:rank] / ridge).sum()
        return (self.log_det(ridge) - within).clamp_min(0)

    @cached_property
    def _table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Increasing log ridge, log det and its derivative there."""
        eigenvalues = self.eigenvalues.cpu().numpy()
        table = _tabulate(eigenvalues, self.n_samples, self.n_rows, self.n_params)
        device = self.eigenvalues.device
        with torch.inference_mode(False):  # it is kept, and differentiated later
            x, y, slope = (torch.as_tensor(c.copy(), device=device) for c in table)
        return x, y, slope

    def _interpolate(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log det and its derivative by the logarithm t of the ridge: cubic
        between the points, straight below them, trace/ridge above them."""
        x, y, slope = self._table
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log ridge, log det(I + JᵀJ/ridge) and its derivative, for all N rows."""
    log_kappa, freedom, log_det = _population(eigenvalues, n_samples, n_params)
    possible = freedom < n_rows * (1 - 1e-9)
    log_kappa, freedom, log_det = (
        column[possible][::-1] for column in (log_kappa, freedom, log_det)
    )
    left = np.log1p(-freedom / n_rows)  # log(1 − df/N)
    return (
        log_kappa + left + math.log(n_rows),
        log_det - n_rows * left - freedom,
        -freedom,
    )


def _population(
    eigenvalues: np.ndarray, n_samples: int, n_params: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log κ (descending), degrees of freedom and log det(I + Σ/κ) of the
    distribution that the rows were drawn from."""
    values = eigenvalues[eigenvalues > 0] / n_samples
    highest = math.log(values.sum() * 1e4)
    log_mu = np.linspace(highest, math.log(values[0]) - REACH, N_POINTS)
    ratios = values / np.exp(log_mu)[:, None]
    freedom = (ratios / (1 + ratios)).sum(1)
    # 1 − df/M without cancellation
    left = ((1 / (1 + ratios)).sum(1) + n_samples - len(values)) / n_samples
    trusted = freedom <= TRUSTED * n_samples
    log_mu, ratios, freedom, left = (
        column[trusted] for column in (log_mu, ratios, freedom, left)
    )
    log_kappa = log_mu - np.log(left)
    log_det = np.log1p(ratios).sum(1) + n_samples * np.log(left) + freedom
    if trusted.all():
        return log_kappa, freedom, log_det
    return _continued(log_kappa, freedom, log_det, FITTED * n_samples, n_params)


def _continued(
    log_kappa: np.ndarray,
    freedom: np.ndarray,
    log_det: np.ndarray,
    fitted_above: float,
    n_params: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Continue them with a straight line for the logit of df/P below the last κ."""
    # A sample of more rows than there are parameters has nothing to continue.
    limit = max(n_params, freedom[-1] * (1 + 1e-9))
    logit = np.log(freedom / (limit - freedom))
    fitted = freedom >= fitted_above
    slope = min(np.polyfit(log_kappa[fitted], logit[fitted], 1)[0], 0.0)
    below = np.linspace(0, -REACH, N_POINTS)[1:]
    further = limit / (1 + np.exp(-(logit[-1] + slope * below)))
    # d log det/d log κ = −df, by the trapezoidal rule
    means = (further + np.concatenate([freedom[-1:], further[:-1]])) / 2
    steps = -np.diff(np.concatenate([[0.0], below]))
    return (
        np.concatenate([log_kappa, log_kappa[-1] + below]),
        np.concatenate([freedom, further]),
        np.concatenate([log_det, log_det[-1] + np.cumsum(steps * means)]),
    )
