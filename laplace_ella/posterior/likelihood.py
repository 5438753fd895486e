"""Targets, losses and curvature of a likelihood, without any C×C matrix.

The conventions are Laplace's: classification loss is the summed cross-entropy, the
regression loss half the summed square error; noise and temperature enter later,
through `ObservationModel`. A row is one position of one example, see `Positions`.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from laplace_ella.metrics import IGNORED
from laplace_ella.posterior.observation import Family
from laplace_ella.support.batches import OutputLayout, Positions, has_values


def target_rows(
    y: torch.Tensor, size: int, positions: Positions, family: Family
) -> torch.Tensor:
    """Return targets of `size` examples as rows `(size·S, ...)`, checked."""
    y = torch.as_tensor(y)
    categorical = family is Family.CATEGORICAL
    outputs, classes = (size, *positions.output_shape), (size, *positions.shape)
    floating, shape = y.dtype.is_floating_point, tuple(y.shape)
    if shape == outputs and (floating or not categorical):  # or class probabilities
        rows = positions.rows(y.flatten(1))
    elif categorical and not floating and shape in (classes, (*classes, 1)):
        rows = y.reshape(-1).long()
    elif categorical:
        raise ValueError(
            f"Classification targets must be class indices of shape {classes} or "
            f"probabilities of shape {outputs}, got shape {shape} and dtype {y.dtype}."
        )
    else:
        kind = "Regression" if family.is_regression else "Multi-label"
        dims = range(1, len(outputs) if y.ndim == len(outputs) - 1 else 1)
        lacking = [dim for dim in dims if y.unsqueeze(dim).shape == outputs]
        # Most likely that of the channels; others may have length one as well.
        if positions.layout is OutputLayout.CHANNELS_FIRST:
            lacking.reverse()
        how = f" with y.unsqueeze({lacking[-1]})" if lacking else ""
        raise ValueError(
            f"{kind} targets must have the shape of the model's output, {outputs}, got "
            f"{shape}. Reshape the targets{how}, or return their shape from the model."
        )
    if has_values(rows) and rows.numel():
        _check_values(rows, positions, family)
    return rows


def _check_values(rows: torch.Tensor, positions: Positions, family: Family) -> None:
    """Refuse targets that are not finite, labels outside [0, 1], probabilities that do
    not sum to one, class indices outside range(C)."""
    n_bad = int((~torch.isfinite(rows)).sum())
    if n_bad:
        raise ValueError(
            f"{n_bad} of {rows.numel()} target values are NaN or infinite. Leave these "
            "examples out, or fill in their targets."
        )
    if family.is_regression:
        return
    categorical = family is Family.CATEGORICAL
    classes = categorical and not rows.dtype.is_floating_point
    if classes:
        rows = rows[rows != IGNORED] if positions.shape else rows
        if not rows.numel():
            return
    low, high = rows.min().item(), rows.max().item()
    if classes and not 0 <= low <= high < positions.n_channels:
        C, remedy = positions.n_channels, ""
        if positions.shape:
            mark = high if high >= C else low
            remedy = (
                f" Positions without a target have the class {IGNORED} here, as in "
                "torch's cross-entropy; replace your own mark of them, for example "
                f"y[y == {mark}] = {IGNORED}."
            )
        raise ValueError(
            f"Class indices must lie in 0..{C - 1} for a model with {C} outputs, got "
            f"{low}..{high}.{remedy}"
        )
    if not classes and not 0 <= low <= high <= 1:
        kind = "Multi-label targets" if family is Family.BERNOULLI else "Classes"
        raise ValueError(
            f"{kind} must be 0 or 1 (or probabilities), got values from {low:g} to "
            f"{high:g}."
        )
    if categorical and not classes:
        off = float((rows.double().sum(-1) - 1).abs().max())
        if off > 1e-3:
            raise ValueError(
                "Class probabilities as targets must sum to one over the classes, "
                f"got a sum that is off by {off:.3g}. Normalise them."
            )


def observed(y: torch.Tensor, family: Family) -> torch.Tensor | None:
    """Return which rows have a target, or None where all rows do by their form."""
    if family is not Family.CATEGORICAL or y.dtype.is_floating_point:
        return None
    return y != IGNORED


def losses(f: torch.Tensor, y: torch.Tensor, family: Family) -> torch.Tensor:
    """Return the loss of outputs `(R, C)` and checked targets, summed over the rows.

    Float64; for regression one value per output, `(C,)`, as they may differ in noise;
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
    """Return ψ `(R, C, K)` in float64 with Σ_c ψ_cψ_cᵀ = φᵀΛφ, for every row of outputs
    `(R, C)` and features `(R, C, K)`.

    For the softmax Λ = diag(p) − ppᵀ, so φᵀΛφ = Σ_c p_c φ̃_c φ̃_cᵀ with φ̃ = φ − Σ_c
    p_c φ_c: a sum of squares, positive semi-definite also in floating point.
    """
    phi = phi.double()
    if family.is_regression:
        return phi
    f = f.double().unsqueeze(-1)  # (R, C, 1)
    if family is Family.BERNOULLI:
        return (f.sigmoid() * (-f).sigmoid()).sqrt() * phi
    p = f.softmax(1)
    return p.sqrt() * (phi - (p * phi).sum(1, keepdim=True))


def sample_cotangents(
    f: torch.Tensor,
    family: Family,
    n_samples: int,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Draw n cotangents c of every row with E[ccᵀ] = Λ/n and mean zero, `(R, C, n)`.

    The outer products of cᵀJ(x) are then an unbiased estimate of JᵀΛJ, also where c is
    added up over rows of one example. Labels drawn from p, as by Laplace's backends,
    would hardly ever be those that the curvature of a confident network comes from.
    Here a label is drawn in proportion to its share of tr Λ, and weighted to make up
    for it, so that every c is as long as every other.
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
    """Return c `(R, C)` in float64 with ccᵀ the empirical Fisher, for every row of
    outputs `(R, C)` and checked targets: the gradient of the loss by the outputs.

    Regression has a factor of √2: Laplace halves the outer product of the gradients
    2(f − y) of the square error, not those of half of it.
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
