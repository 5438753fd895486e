"""Jacobians of all data of a loader, and what a fitted posterior makes of them.

Index legend: N data, C outputs, P parameters, K rank, B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from laplace_ella.derivatives.backends import Curvature
from laplace_ella.fitting import sampling
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.metric import split_gradients
from laplace_ella.support.preserve import undisturbed

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
    with undisturbed(la.model, *loaders):
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
    if la.fitter.curvature is not Curvature.GGN:
        raise NotImplementedError(
            "Diagnostics compare with the exact GGN posterior; this one was fitted "
            f"with {la.fitter.curvature.value}. Fit with backend=CurvlinopsGGN."
        )
    with working(la, loader):
        return len(sampling.eligible_indices(loader))


def jacobians(
    la: ELLALaplace, loader: DataLoader, progress_bar: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs (b, C) and Jacobians (b, C, P) of a few examples after the other."""
    for x, _ in la.fitter.batches(loader, "[Jacobians]", progress_bar):
        for f, J, _ in la.fitter.linearizer.jacobian_chunks(x):
            yield f, J


def not_all_once(n_data: int) -> str:
    """Message for a loader whose pass has other than its N examples."""
    return (
        f"The loader did not yield each of its {n_data} examples once. Pass a loader "
        "without replacement and with one example per index."
    )


def kappa_ella(posterior: SubspacePosterior, Js: torch.Tensor) -> torch.Tensor:
    """κ_ELLA(x, x) (B, C, C), float64, for Jacobians (B, C, P)."""
    phi, *residuals = products(posterior, Js)
    return posterior.function_values(phi[..., 0], phi, *residuals).covariance()


def products(
    posterior: SubspacePosterior, Js: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What the posterior needs of Jacobians (..., C, P), in float64."""
    directions = posterior.basis.directions.to(Js)
    phi, *rests = split_gradients(Js, directions, posterior.metric, posterior.span)
    if not posterior.needs_residual:
        return (phi.double(),)
    rests = [rest.double() for rest in rests]
    return phi.double(), *(rest @ rest.mT for rest in rests)
