"""The leading eigenpairs of G = J̃J̃ᵀ by a few products with vectors, not by G itself.

A block Davidson method: Ritz pairs (θ, u) of a growing space, which their residuals
r = Gu − θu are added to, each as what is nearly missing of u,

    t = (θ − G̃)⁻¹ r,

with another matrix G̃ that is near G and easy to invert (Davidson 1975; Morgan and Scott
1986). Here it is that of the gradients with their parameters summed up in groups, with
random signs, of which some leading eigenpairs are taken. They are the first guess, too.
A block Lanczos method from random vectors took a third longer on ResNet-20.

A space that is spanned by eigenvectors has no residuals, and would never see others. So
a few random vectors go along, multiplied by G in each step: an eigenvector with a large
eigenvalue that was missed comes forward in them.

Index legend: M gradients, P parameters, p groups of them, k wanted eigenpairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from laplace_ella.posterior.products import energy, gram_times
from laplace_ella.support.preserve import full_precision
from laplace_ella.support.span import Sketch

__all__ = ["leading_eigenpairs"]

#: ‖Gu − λu‖/λ of the results, and steps at most.
RESIDUAL = 4e-6
MOST_STEPS = 12

#: ‖Gu − λu‖/λ₁ that the rounding of products leaves, by the rounding of one number. No
#: less is asked of small eigenvalues: some below λ₁/1,000 would not converge.
ROUNDING = 1 / 8

#: Groups of parameters: at most, and per gradient. Parameter j is in group j mod p, and
#: p is odd: the weights of one unit, often 2ⁿ apart, are then in different groups.
MOST_GROUPS = 8191
GROUPS_PER_ROW = 4

#: Per wanted eigenpair, those of the sketch that are used, vectors of the first guess,
#: and random ones. More of the first two take longer to get than they save.
SKETCHED_PAIRS = 8
FIRST_VECTORS = 1.2
RANDOM_VECTORS = 0.15

#: Steps at least, in which the random vectors tell whether something was missed.
LEAST_STEPS = 4

#: Subspace iterations by which the sketch's eigenpairs are found.
ITERATIONS = 3

#: The least difference of θ and an eigenvalue of the sketch, by θ: the sketch does not
#: know the eigenvalues any better.
LEAST_GAP = 0.05


def leading_eigenpairs(
    rows: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Top k eigenvalues of J̃J̃ᵀ, descending, and eigenvectors `(M, k)`, in float64.

    None if those above the rounding noise do not converge, as it is with a flat
    spectrum.
    """
    generator = torch.Generator(rows.device).manual_seed(0)

    def random(n: int) -> torch.Tensor:
        size, like = (len(rows), n), {"dtype": torch.float64, "device": rows.device}
        return torch.randn(size, generator=generator, **like)

    with full_precision(rows.device):
        near = _sketched(rows, random(min(SKETCHED_PAIRS * k, len(rows))))
    companions = random(math.ceil(RANDOM_VECTORS * k))
    new = near.vectors[:, : math.ceil(FIRST_VECTORS * k)]
    Q = GQ = new[:, :0]
    eps = torch.finfo(rows.dtype).eps
    before = math.inf
    for step in range(1, MOST_STEPS + 1):
        new = torch.cat([new, companions], 1)
        for _ in range(3):  # once is not enough in finite precision
            new = torch.linalg.qr(new - Q @ (Q.T @ new))[0]
        Gnew = gram_times(rows, new)
        companions = Gnew[:, -companions.shape[1] :]
        Q, GQ = torch.cat([Q, new], 1), torch.cat([GQ, Gnew], 1)
        T = Q.T @ GQ
        values, S = torch.linalg.eigh((T + T.T) / 2)
        values, S = values.flip(0)[:k], S.flip(1)[:, :k]
        U = Q @ S
        R = GQ @ S - U * values
        allowed = (RESIDUAL * values).clamp_min(ROUNDING * eps * values[0])
        errors = torch.linalg.vector_norm(R, dim=0) / allowed
        # What is below the rounding noise is left out, see `usable_rank`.
        errors = torch.where(values > eps * len(rows) ** 0.5 * values[0], errors, 0)
        worst = float(errors.max())
        if worst <= 1 and step >= LEAST_STEPS:
            return values, U
        pace = worst / before if before else 0.0
        hopeless = worst > 1 and worst * pace ** (MOST_STEPS - step) > 1
        if hopeless and step >= MOST_STEPS / 2:
            return None
        wanting = errors > 1
        new, before = near.correct(R[:, wanting], values[wanting]), worst
    return None


@dataclass(frozen=True)
class _Sketched:
    """Some eigenpairs of a matrix near G, and the mean of its other eigenvalues.

    Attributes
    ----------
    values : torch.Tensor
        `(n,)`, descending
    vectors : torch.Tensor
        `(M, n)`
    rest : torch.Tensor
        a number
    """

    values: torch.Tensor
    vectors: torch.Tensor
    rest: torch.Tensor

    def correct(self, residuals: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        """(θ − G̃)⁻¹r for residuals `(M, m)` and their θ `(m,)`."""
        inside = self.vectors.T @ residuals
        outside = residuals - self.vectors @ inside
        gaps = theta - self.values.unsqueeze(1)  # (n, m)
        least = torch.where(gaps < 0, -LEAST_GAP, LEAST_GAP) * theta
        gaps = torch.where(gaps.abs() < least.abs(), least, gaps)
        gap = (theta - self.rest).clamp_min(LEAST_GAP * theta)
        return self.vectors @ (inside / gaps) + outside / gap


def _sketched(rows: torch.Tensor, start: torch.Tensor) -> _Sketched:
    """Of the gradients with their parameters in groups, by subspace iteration from
    vectors `(M, n)`."""
    (M, P), n = rows.shape, start.shape[1]
    groups = min(GROUPS_PER_ROW * M - 1, MOST_GROUPS)
    S = Sketch.of(P, groups, 0, rows.device).of_many(rows)
    Q = start.to(rows.dtype)
    for _ in range(ITERATIONS):
        Q = torch.linalg.qr(S @ (S.T @ torch.linalg.qr(Q)[0]))[0]
    projected = (Q.T @ S).double()  # (n, p)
    values, W = torch.linalg.eigh(projected @ projected.T)
    rest = (energy(S) - values.sum()).clamp_min(0) / max(1, M - n)
    return _Sketched(values.flip(0), Q.double() @ W.flip(1), rest)
