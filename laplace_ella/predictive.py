"""Predictive distributions from the mean f_mu (B, C) and a factor A (B, C, R).

The function-space covariance is f_var = AAᵀ. Every link needs only A: the C×C
matrix is formed where the caller asks for it, and nowhere else.
"""

from __future__ import annotations

import math

import torch
from laplace.utils.enums import LinkApprox

from laplace_ella._batch import chunks

__all__ = ["bridge", "class_probabilities", "covariance", "draw", "probit", "variance"]

#: Floats that one chunk of Monte-Carlo samples may hold.
SAMPLE_BUDGET = 2**24


def variance(A: torch.Tensor) -> torch.Tensor:
    """Marginal variances (B, C): the squared row norms of A."""
    return A.square().sum(-1)


def covariance(A: torch.Tensor, joint: bool = False) -> torch.Tensor:
    """f_var `(B, C, C)`, or `(B·C, B·C)` over all inputs jointly."""
    A = A.flatten(0, 1) if joint else A
    return A @ A.mT


def draw(
    f_mu: torch.Tensor,
    A: torch.Tensor,
    n_samples: int,
    generator: torch.Generator | None,
    diagonal_output: bool = False,
    joint: bool = False,
) -> torch.Tensor:
    """Samples f = f_mu + Aε of the function values, `(S, B, C)`.

    Parameters
    ----------
    diagonal_output : bool
        sample the outputs independently, with their marginal variances
    joint : bool
        one ε for all inputs: each sample is one function, seen at B inputs
    """
    B, C, R = A.shape

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(
            *shape, generator=generator, dtype=A.dtype, device=A.device
        )

    if diagonal_output:
        return f_mu + variance(A).sqrt() * noise(n_samples, B, C)
    if joint:
        return f_mu + torch.einsum("bcr,sr->sbc", A, noise(n_samples, R))
    # (B, C, R) @ (B, R, S) → (B, C, S): one batched product for all samples
    return f_mu + (A @ noise(B, R, n_samples)).permute(2, 0, 1)


def probit(f_mu: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """Multi-class probit approximation: logits scaled by 1/√(1 + π/8·var)."""
    kappa = torch.rsqrt(1 + math.pi / 8 * variance(A))
    return torch.softmax(kappa * f_mu, dim=-1)


def bridge(f_mu: torch.Tensor, A: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Laplace bridge to a Dirichlet; `normalize` corrects the variance first."""
    C = f_mu.shape[-1]
    tiny = torch.finfo(A.dtype).tiny
    # Condition on Σ_c f_c = 0, from row sums of f_var = AAᵀ alone.
    rows = (A @ A.sum(1).unsqueeze(-1)).squeeze(-1)  # (B, C) = f_var · 1
    total = rows.sum(-1, keepdim=True).clamp_min(tiny)
    f_mu = f_mu - rows * f_mu.sum(-1, keepdim=True) / total
    var = (variance(A) - rows.square() / total).clamp_min(tiny)
    if normalize:
        c = var.mean(-1, keepdim=True) / math.sqrt(C / 2)
        f_mu, var = f_mu / c.sqrt(), var / c
    # α = (1 − 2/C + e^f Σ_j e^{-f_j} / C²) / var, in logarithms: e^f may overflow
    log_ratio = f_mu + torch.logsumexp(-f_mu, -1, keepdim=True) - 2 * math.log(C)
    offset = torch.full_like(log_ratio, max(1 - 2 / C, 0.0)).log()
    return torch.softmax(torch.logaddexp(offset, log_ratio) - var.log(), dim=-1)


def class_probabilities(
    f_mu: torch.Tensor,
    A: torch.Tensor,
    link_approx: LinkApprox | str,
    n_samples: int = 100,
    diagonal_output: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Class probabilities (B, C) by one of Laplace's links."""
    if link_approx == LinkApprox.PROBIT:
        return probit(f_mu, A)
    if link_approx in (LinkApprox.BRIDGE, LinkApprox.BRIDGE_NORM):
        return bridge(f_mu, A, normalize=link_approx == LinkApprox.BRIDGE_NORM)
    if link_approx != LinkApprox.MC:
        raise ValueError(
            f"link_approx must be one of {[link.value for link in LinkApprox]}, "
            f"got {link_approx!r}."
        )
    total = torch.zeros_like(f_mu)
    per_sample = A.shape[0] * max(A.shape[1:])
    for part in chunks(n_samples, SAMPLE_BUDGET // max(1, per_sample)):
        n = part.stop - part.start
        samples = draw(f_mu, A, n, generator, diagonal_output)
        total = total + torch.softmax(samples, dim=-1).sum(0)
    return total / n_samples
