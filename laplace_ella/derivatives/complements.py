"""The parts of a gradient within the basis, outside it, and outside the data's span.

In whitened weights D^{1/2}θ the prior is standard normal, and the basis V spans the
orthonormal Q = D^{-1/2}VR⁻¹ with RᵀR = VᵀD⁻¹V: a gradient row J becomes JD^{-1/2} =
JD^{-1/2}QQᵀ + rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from laplace_ella.support.batches import chunks
from laplace_ella.support.preserve import full_precision

#: Columns whose products are added up in the matrices' own precision.
BLOCK = 2**14


def accurate_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return abᵀ `(..., m, n)` for a `(..., m, P)` and b `(..., n, P)`, whatever P.

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
class GradientSplit:
    """Splits gradients into features and what is left of them.

    Attributes
    ----------
    directions : torch.Tensor
        Vᵀ `(K, P)`, orthonormal rows
    weights : torch.Tensor, optional
        D⁻¹ `(P,)` of a prior precision that is not the same for all weights; None for
        D = 1, whose parts serve every scalar prior
    inverse_gram : torch.Tensor, optional
        (VᵀD⁻¹V)⁻¹ `(K, K)`, with `weights`
    parts : callable, optional
        cuts a rest `(..., P)` into parts, see `Span`; for D = 1
    n_parts : int
        how many parts there are
    """

    directions: torch.Tensor
    weights: torch.Tensor | None = None
    inverse_gram: torch.Tensor | None = None
    parts: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] | None = None
    n_parts: int = 1

    def to(self, device: torch.device, dtype: torch.dtype) -> GradientSplit:
        """Return the same for gradients on a device: directions are moved once."""
        return replace(self, directions=self.directions.to(device, dtype))

    def __call__(self, J: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return features φ = JD⁻¹V `(..., K)` and the whitened rest `(..., P)` of rows
        J `(..., P)`, or the rest's parts.

        The rest is formed from the rows themselves, as in Gram-Schmidt: its products
        are positive semi-definite and do not cancel, which JD⁻¹Jᵀ less the part within
        the basis would for inputs like the training data.
        """
        V = self.directions.to(J)
        with full_precision(J.device):
            if self.weights is None or self.inverse_gram is None:
                phi = accurate_product(J, V)
                rest = J - phi @ V
                return phi, *((rest,) if self.parts is None else self.parts(rest))
            weights = self.weights.to(J)
            phi = accurate_product(J * weights, V)
            within = phi @ self.inverse_gram.to(phi) @ V
            return phi, (J - within) * weights.sqrt()
