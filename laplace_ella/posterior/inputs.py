"""What a posterior needs of inputs: their outputs, features and residuals."""

from __future__ import annotations

from typing import Any

from laplace_ella.derivatives.features import Features
from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.posterior.subspace import SubspacePosterior

__all__ = ["features_for"]


def features_for(
    posterior: SubspacePosterior,
    linearizer: Linearizer,
    x: Any,
    create_graph: bool = False,
    top: int | None = None,
    every_level: bool = False,
) -> Features:
    """Outputs and features of inputs on the device and, where the complement is kept,
    the part of their gradients outside the basis; of the `top` outputs, or all.

    `every_level` is for use with other priors and noises than the posterior's."""
    directions = posterior.basis.directions
    if not posterior.needs_residual:
        return linearizer.features(x, directions, create_graph, top)
    span = posterior.levels if every_level else posterior.span
    return linearizer.features_and_residual(
        x, directions, posterior.metric, create_graph, span, top
    )
