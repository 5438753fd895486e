"""Losses and likelihood curvature, without any C×C matrix.

The conventions are Laplace's: classification loss is the summed cross-entropy, the
regression loss half the summed square error; noise and temperature enter later,
through `_H_factor`. A row is one position of one example, see `layout`.
"""

from __future__ import annotations

from enum import Enum

import torch
from laplace.utils.enums import Likelihood
from torch.nn import functional as F

from laplace_ella.support.batches import has_values
from laplace_ella.support.layout import OutputLayout, Positions

__all__ = [
    "IGNORED",
    "Family",
    "curvature_root",
    "largest_curvature",
    "losses",
    "observed",
    "sample_cotangents",
    "target_cotangents",
    "target_rows",
]

#: Class index of positions that are not observed, as in torch's cross-entropy.
IGNORED = -100


class Family(str, Enum):
    """Distribution of the targets given the outputs."""

    GAUSSIAN = "gaussian"
    """Regression: Λ = I, the noise is a factor of its own."""

    CATEGORICAL = "categorical"
    """One of C classes, by the softmax: Λ = diag(p) − ppᵀ."""

    BERNOULLI = "bernoulli"
    """C labels, each there or not, by the sigmoid: Λ = diag(p(1 − p))."""

    @classmethod
    def of(cls, likelihood: Likelihood | str, multi_label: bool = False) -> Family:
        """Laplace's likelihood; reward models are fitted as classifiers."""
        if likelihood == Likelihood.REGRESSION:
            return cls.GAUSSIAN
        return cls.BERNOULLI if multi_label else cls.CATEGORICAL

    @property
    def is_regression(self) -> bool:
        return self is Family.GAUSSIAN

    def probabilities(self, logits: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The inverse link of classes or labels."""
        if self is Family.BERNOULLI:
            return logits.sigmoid()
        return logits.softmax(dim)


def target_rows(
    y: torch.Tensor, size: int, positions: Positions, family: Family
) -> torch.Tensor:
    """Targets of `size` examples as rows `(size·S, ...)`, checked.

    An error names what was expected and what came.
    """
    y = torch.as_tensor(y)
    per_output = (size, *positions.output_shape)
    per_position = (size, *positions.shape)
    floating = y.dtype.is_floating_point
    if family is not Family.CATEGORICAL:
        if tuple(y.shape) != per_output:
            kind = "Regression" if family.is_regression else "Multi-label"
            raise ValueError(
                f"{kind} targets must have the shape of the model's output, "
                f"{per_output}, got {tuple(y.shape)}. {_reshaped(y, size, positions)}"
            )
        rows = positions.rows(y.flatten(1))
    elif tuple(y.shape) == per_output and floating:
        # class probabilities, as torch's cross-entropy takes them
        rows = positions.rows(y.flatten(1))
    elif tuple(y.shape) in (per_position, (*per_position, 1)) and not floating:
        rows = y.reshape(-1).long()
    else:
        raise ValueError(
            f"Classification targets must be class indices of shape {per_position} "
            f"or probabilities of shape {per_output}, got shape {tuple(y.shape)} "
            f"and dtype {y.dtype}."
        )
    if has_values(rows):
        _check_values(rows, positions, family)
    return rows


def _reshaped(y: torch.Tensor, size: int, positions: Positions) -> str:
    """How targets of the right number of values get the right shape, if they can."""
    shape = (size, *positions.output_shape)
    first = positions.layout is OutputLayout.CHANNELS_FIRST
    channels = 1 if first else len(shape) - 1
    # Most likely that of the channels is missing; others may have length one as well.
    for dim in (channels, *range(1, len(shape))):
        if y.ndim == len(shape) - 1 and y.unsqueeze(dim).shape == shape:
            return f"Reshape the targets with y.unsqueeze({dim})."
    return "Reshape the targets, or return this shape from the model."


def _check_values(rows: torch.Tensor, positions: Positions, family: Family) -> None:
    """Targets must be finite, labels lie in [0, 1], probabilities sum to one, class
    indices lie in range(C)."""
    if not rows.numel():
        return
    if rows.dtype.is_floating_point and not bool(torch.isfinite(rows).all()):
        raise ValueError(
            f"{int((~torch.isfinite(rows)).sum())} of {rows.numel()} target values are "
            "NaN or infinite. Leave these examples out, or fill in their targets."
        )
    if family is Family.GAUSSIAN:
        return
    if family is Family.BERNOULLI or rows.dtype.is_floating_point:
        low, high = float(rows.min()), float(rows.max())
        if low < 0 or high > 1:
            kind = "Multi-label targets" if family is Family.BERNOULLI else "Classes"
            raise ValueError(
                f"{kind} must be 0 or 1 (or probabilities), got values from {low:g} to "
                f"{high:g}."
            )
        if family is Family.CATEGORICAL:
            off = float((rows.double().sum(-1) - 1).abs().max())
            if off > 1e-3:
                raise ValueError(
                    "Class probabilities as targets must sum to one over the classes, "
                    f"got a sum that is off by {off:.3g}. Normalise them."
                )
        return
    known = rows[rows != IGNORED] if positions.shape else rows
    if not known.numel():
        return
    low, high, C = int(known.min()), int(known.max()), positions.n_channels
    if low < 0 or high >= C:
        mark = high if high >= C else low
        ignore = (
            f" Positions without a target have the class {IGNORED} here, as in torch's "
            "cross-entropy; replace your own mark of them, for example "
            f"y[y == {mark}] = {IGNORED}."
            if positions.shape
            else ""
        )
        raise ValueError(
            f"Class indices must lie in 0..{C - 1} for a model with {C} outputs, got "
            f"{low}..{high}.{ignore}"
        )


def observed(y: torch.Tensor, family: Family) -> torch.Tensor | None:
    """Which rows have a target, or None where all rows do by their form."""
    if family is not Family.CATEGORICAL or y.dtype.is_floating_point:
        return None
    return y != IGNORED


def losses(f: torch.Tensor, y: torch.Tensor, family: Family) -> torch.Tensor:
    """Loss of outputs (R, C) and checked targets, summed over the rows, float64.

    One value per output, `(C,)`, for regression, whose outputs may differ in noise;
    a scalar otherwise.
    """
    f = f.double()
    if family.is_regression:
        return 0.5 * (f - y.double()).square().sum(0)
    if family is Family.BERNOULLI:
        return F.binary_cross_entropy_with_logits(f, y.double(), reduction="sum")
    y = y.double() if y.dtype.is_floating_point else y
    return F.cross_entropy(f, y, reduction="sum", ignore_index=IGNORED)


def curvature_root(f: torch.Tensor, phi: torch.Tensor, family: Family) -> torch.Tensor:
    """ψ `(R, C, K)` in float64 with Σ_c ψ_cψ_cᵀ = φᵀΛφ for every row.

    For the softmax Λ = diag(p) − ppᵀ, so φᵀΛφ = Σ_c p_c φ̃_c φ̃_cᵀ with φ̃ = φ − Σ_c
    p_c φ_c: a sum of squares, positive semi-definite also in floating point.

    Parameters
    ----------
    f : torch.Tensor
        outputs `(R, C)`
    phi : torch.Tensor
        features `(R, C, K)`
    """
    phi = phi.double()
    if family.is_regression:
        return phi
    f = f.double().unsqueeze(-1)  # (R, C, 1)
    if family is Family.BERNOULLI:
        return (f.sigmoid() * (-f).sigmoid()).sqrt() * phi
    p = f.softmax(1)
    return p.sqrt() * (phi - (p * phi).sum(1, keepdim=True))


def largest_curvature(f: torch.Tensor, family: Family | Likelihood | str) -> float:
    """c_Λ without noise and temperature: the largest ‖Λ(x)‖ over outputs `(B, C)`.

    `family` may also be the name of a likelihood of Laplace, as users know it.
    1 for regression, the largest p(1 − p) for labels. For the softmax Λ = diag(p) −
    ppᵀ, whose largest eigenvalue lies between the two largest probabilities and is the
    root there of the secular equation Σ_c p_c²/(p_c − λ) = 1, found by bisection
    without any C×C matrix. It is at most ½.
    """
    if not isinstance(family, Family):
        family = Family.of(Likelihood(family))
    if family.is_regression:
        return 1.0
    if family is Family.BERNOULLI:
        p = f.double().sigmoid()
        return float((p * (1 - p)).max())
    p = f.double().softmax(-1)
    if p.shape[-1] == 1:
        return 0.0
    top = p.topk(2, dim=-1).values
    low, high = top[:, 1], top[:, 0]
    for _ in range(60):
        middle = (low + high) / 2
        gaps = p - middle.unsqueeze(-1)
        terms = torch.where(gaps == 0, 0.0, p.square() / gaps)
        below = terms.sum(-1) < 1
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return float(high.max())


def sample_cotangents(
    f: torch.Tensor,
    family: Family,
    n_samples: int,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """n random cotangents c of every row with E[ccᵀ] = Λ/n and mean zero, `(R, C, n)`.

    The outer products of cᵀJ(x) are then an unbiased estimate of JᵀΛJ, a Monte-Carlo
    Fisher; of rows that belong to one example, c may be added up. Laplace's backends
    draw labels from p; a confident network then hardly ever meets the classes that the
    curvature comes from. Here a label is drawn in proportion to its share of tr Λ, and
    weighted to make up for it, so that every c is as long as every other.
    """
    R, C = f.shape
    f = f.double()
    drawn = {"generator": generator, "dtype": f.dtype, "device": f.device}
    if family.is_regression:
        return torch.randn(R, C, n_samples, **drawn) / n_samples**0.5
    p = family.probabilities(f)
    if family is Family.BERNOULLI:
        signs = torch.rand(R, C, n_samples, **drawn).sub(0.5).sign()
        root = (p * (-f).sigmoid()).sqrt().unsqueeze(-1)
        return root * signs / n_samples**0.5
    # Λ = Σ_c p_c (e_c − p)(e_c − p)ᵀ; ‖e_c − p‖² without cancellation at p_c ≈ 1.
    squares = p.square()
    others = squares.sum(-1, keepdim=True) - squares
    share = p * ((1 - p).square() + others)
    share = share.clamp_min(torch.finfo(share.dtype).tiny)
    labels = torch.multinomial(share, n_samples, replacement=True, generator=generator)
    weight = p.gather(1, labels) * share.sum(1, keepdim=True) / share.gather(1, labels)
    signs = torch.rand(R, n_samples, **drawn).sub(0.5).sign()  # for mean zero
    scale = signs * (weight / n_samples).sqrt()
    return (F.one_hot(labels, C) - p.unsqueeze(1)).mT * scale.unsqueeze(1)


def target_cotangents(f: torch.Tensor, y: torch.Tensor, family: Family) -> torch.Tensor:
    """c `(R, C)` in float64 with ccᵀ the empirical Fisher of every row.

    c is the gradient of the loss by the outputs; of rows that belong to one example, c
    adds up in cᵀJ(x). Regression has a factor of √2: Laplace halves the outer product
    of the gradients 2(f − y) of the square error, not those of half of it.

    Parameters
    ----------
    f : torch.Tensor
        outputs `(R, C)`
    y : torch.Tensor
        checked targets `(R, C)` or classes `(R,)`
    """
    f = f.double()
    if family.is_regression:
        return 2**0.5 * (f - y.double())
    p = family.probabilities(f)
    if family is Family.BERNOULLI:
        return p - y.double()
    if y.dtype.is_floating_point:
        return p * y.double().sum(-1, keepdim=True) - y.double()
    known = (y != IGNORED).unsqueeze(-1)
    return (p - F.one_hot(y.clamp_min(0), f.shape[-1])) * known
