"""Gradients in the prior's metric: their parts within and outside the basis.

The posterior that keeps its complement is simplest in whitened weights D^{1/2}θ, whose
prior is standard normal. There the basis V spans the orthonormal Q = D^{-1/2}VR⁻¹ with
RᵀR = VᵀD⁻¹V, and a gradient row J becomes JD^{-1/2} = JD^{-1/2}QQᵀ + rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laplace_ella.support.batches import chunks
from laplace_ella.support.preserve import full_precision
from laplace_ella.support.span import Span

__all__ = ["Metric", "accurate_product", "split_gradients"]

#: Columns whose products are added up in the matrices' own precision.
BLOCK = 2**14


def accurate_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """abᵀ `(..., m, n)` for a `(..., m, P)` and b `(..., n, P)`, whatever P.

    Blocks of columns are multiplied in the precision of a and b and added up in
    float64, so that the rounding error does not grow with P.
    """
    P = a.shape[-1]
    with full_precision(a.device):
        if P <= BLOCK or a.dtype == torch.float64:
            return a @ b.mT
        total = torch.zeros((), dtype=torch.float64, device=a.device)
        for part in chunks(P, BLOCK):
            total = total + (a[..., part] @ b[..., part].mT).double()
        return total.to(a.dtype)


@dataclass(frozen=True)
class Metric:
    """A prior precision that is not the same for all weights.

    Attributes
    ----------
    weights : torch.Tensor
        D⁻¹ `(P,)`
    inverse_gram : torch.Tensor
        (VᵀD⁻¹V)⁻¹ `(K, K)`
    """

    weights: torch.Tensor
    inverse_gram: torch.Tensor


def split_gradients(
    J: torch.Tensor,
    directions: torch.Tensor,
    metric: Metric | None = None,
    span: Span | None = None,
) -> tuple[torch.Tensor, ...]:
    """Features φ = JD⁻¹V `(..., K)` and the whitened rest of the rows `(..., P)`; of
    the rest, what lies outside each level of a span, if there is one.

    The rest is formed from the rows themselves, as in Gram–Schmidt: its products are
    positive semi-definite and do not cancel, which JD⁻¹Jᵀ less the part within the
    basis would for inputs like the training data.

    Parameters
    ----------
    J : torch.Tensor
        gradients `(..., P)`
    directions : torch.Tensor
        Vᵀ `(K, P)`, orthonormal rows, in the dtype and on the device of J
    metric : Metric, optional
        None for a prior precision of one for all weights
    span : Span, optional
        which contains the directions; for a prior precision of one
    """
    with full_precision(J.device):
        if metric is None:
            phi = accurate_product(J, directions)
            rest = J - phi @ directions
            return (phi, rest) if span is None else (phi, rest, *span.outside(rest))
        weights = metric.weights.to(J)
        phi = accurate_product(J * weights, directions)
        within = phi @ metric.inverse_gram.to(phi) @ directions
        return phi, (J - within) * weights.sqrt()
