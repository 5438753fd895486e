"""Losses and likelihood curvature, without any C×C matrix.

The conventions are Laplace's: classification loss is the summed cross-entropy, the
regression loss half the summed square error; noise and temperature enter later,
through `_H_factor`.
"""

from __future__ import annotations

import torch
from laplace.utils.enums import Likelihood
from torch.nn import functional as F

__all__ = [
    "check_classes",
    "check_outputs",
    "check_targets",
    "curvature_root",
    "is_regression",
    "loss",
    "sample_cotangents",
]


def is_regression(likelihood: Likelihood | str) -> bool:
    """Reward models are fitted as classifiers of the preferred input."""
    return likelihood == Likelihood.REGRESSION


def check_outputs(f: torch.Tensor) -> None:
    """A model output must be a floating-point matrix (B, C)."""
    if not isinstance(f, torch.Tensor):
        raise TypeError(
            f"The model must return a tensor (B, C), got {type(f).__name__}. Wrap it "
            "in a module that returns the logits or means."
        )
    if f.ndim != 2:
        raise ValueError(
            f"The model must return a matrix (B, C), got shape {tuple(f.shape)}. "
            "Flatten or index its output in a wrapping module; for one output, return "
            "shape (B, 1)."
        )


def check_targets(
    f: torch.Tensor, y: torch.Tensor, likelihood: Likelihood | str
) -> torch.Tensor:
    """Targets in the form the loss takes, or an error that names both shapes."""
    if is_regression(likelihood):
        if y.shape != f.shape:
            raise ValueError(
                f"Regression targets must have the shape of the model's output, "
                f"{tuple(f.shape)}, got {tuple(y.shape)}. Reshape the targets, for "
                "example with y.unsqueeze(-1) for one output."
            )
        return y
    if y.shape == f.shape and y.dtype.is_floating_point:
        return y  # class probabilities, as torch's cross-entropy takes them
    if y.shape not in ((f.shape[0],), (f.shape[0], 1)) or y.dtype.is_floating_point:
        raise ValueError(
            f"Classification targets must be class indices of shape ({f.shape[0]},) "
            f"or probabilities of shape {tuple(f.shape)}, got shape {tuple(y.shape)} "
            f"and dtype {y.dtype}."
        )
    return y.reshape(-1).long()


def check_classes(f: torch.Tensor, y: torch.Tensor) -> None:
    """Class indices must lie in range(C)."""
    if not y.dtype.is_floating_point and y.numel():
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= f.shape[-1]:
            raise ValueError(
                f"Class indices must lie in 0..{f.shape[-1] - 1} for a model with "
                f"{f.shape[-1]} outputs, got {low}..{high}."
            )


def loss(
    f: torch.Tensor, y: torch.Tensor, likelihood: Likelihood | str
) -> torch.Tensor:
    """Summed loss of outputs (B, C) and checked targets, a float64 scalar."""
    f = f.double()
    if is_regression(likelihood):
        return 0.5 * (f - y.double()).square().sum()
    y = y.double() if y.dtype.is_floating_point else y
    return F.cross_entropy(f, y, reduction="sum")


def curvature_root(
    f: torch.Tensor, phi: torch.Tensor, likelihood: Likelihood | str
) -> torch.Tensor:
    """ψ `(B, C, K)` in float64 with Σ_c ψ_cψ_cᵀ = φᵀΛφ for every example.

    For the softmax Λ = diag(p) − ppᵀ, so φᵀΛφ = Σ_c p_c φ̃_c φ̃_cᵀ with φ̃ = φ − Σ_c
    p_c φ_c: a sum of squares, positive semi-definite also in floating point.

    Parameters
    ----------
    f : torch.Tensor
        outputs `(B, C)`
    phi : torch.Tensor
        features `(B, C, K)`
    """
    phi = phi.double()
    if is_regression(likelihood):
        return phi
    p = f.double().softmax(-1).unsqueeze(-1)  # (B, C, 1)
    return p.sqrt() * (phi - (p * phi).sum(1, keepdim=True))


def sample_cotangents(
    f: torch.Tensor,
    likelihood: Likelihood | str,
    n_samples: int,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Gradients of the log likelihood at sampled targets, `(B, S, C)`.

    Their covariance is Λ, so the outer products of cᵀJ(x) are an unbiased estimate of
    JᵀΛJ: the Monte-Carlo Fisher of Laplace's backends. Scaled by 1/√S.
    """
    B, C = f.shape
    if is_regression(likelihood):
        noise = torch.randn(
            B, n_samples, C, generator=generator, dtype=f.dtype, device=f.device
        )
        return noise / n_samples**0.5
    p = f.softmax(-1)
    labels = torch.multinomial(p, n_samples, replacement=True, generator=generator)
    return (F.one_hot(labels, C) - p.unsqueeze(1)) / n_samples**0.5
