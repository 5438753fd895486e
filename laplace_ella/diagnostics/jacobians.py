"""Jacobians of all data of a loader, and what a fitted posterior makes of them.

Index legend: N data, C outputs, P parameters, K rank, B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from laplace_ella.fitting import sampling
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.batches import batch_size, chunks, take
from laplace_ella.support.layout import OutputLayout

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace

__all__ = [
    "count",
    "jacobians",
    "kappa_ella",
    "not_all_once",
    "products",
    "working",
]


@contextmanager
def working(la: ELLALaplace, *loaders: Any) -> Iterator[None]:
    """The user's model, random states and flags untouched, and no graph."""
    with la._undisturbed(*loaders), torch.no_grad():
        yield


def count(la: ELLALaplace, loader: DataLoader, name: str = "loader") -> int:
    """N, the number of examples of one pass."""
    sampling.check_loader(loader, name)
    if la.output_layout is not OutputLayout.FLAT or la.sigma_noise.numel() > 1:
        raise NotImplementedError(
            "Diagnostics are for outputs (B, C) with one sigma_noise, got "
            f"output_layout={la.output_layout.value!r} and {la.sigma_noise.numel()} "
            "noises. Diagnose a wrapped model that returns one position, or fit with "
            "one sigma_noise."
        )
    with working(la, loader):
        return len(sampling.eligible_indices(loader))


def jacobians(
    la: ELLALaplace, loader: DataLoader
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs (b, C) and Jacobians (b, C, P) of a few examples after the other."""
    linearizer = la._linearizer
    at_once = linearizer.sizes.rows_at_once(rows_per_example=la.n_outputs)
    for x, _ in la._batches(loader, "[Jacobians]", False):
        size = batch_size(x, la.dict_key_x)
        for part in chunks(size, at_once):
            yield linearizer.jacobian(take(x, part, size))


def not_all_once(n_data: int) -> str:
    """Message for a loader whose pass has other than its N examples."""
    return (
        f"The loader did not yield each of its {n_data} examples once. Pass a loader "
        "without replacement and with one example an index."
    )


def products(
    posterior: SubspacePosterior, Js: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the posterior needs of Jacobians (..., C, P), in float64."""
    weights = posterior.kernel_weights()
    weighted = Js if weights is None else Js * weights.to(Js)
    phi = (weighted @ posterior.basis.vectors.to(Js)).double()
    if not posterior.needs_kernel:
        return phi, None
    return phi, (weighted.double() @ Js.double().mT)


def kappa_ella(posterior: SubspacePosterior, Js: torch.Tensor) -> torch.Tensor:
    """κ_ELLA(x, x) (B, C, C) for Jacobians (B, C, P)."""
    phi, kernel = products(posterior, Js)
    return posterior.function_values(phi[..., 0], phi, kernel).covariance()
