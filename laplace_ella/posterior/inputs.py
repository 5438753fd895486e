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
) -> Features:
    """Outputs and features of inputs on the device and, where the complement is kept,
    the part of their gradients outside the basis; of the `top` outputs, or all."""
    directions = posterior.basis.directions
    if not posterior.needs_residual:
        return linearizer.features(x, directions, create_graph, top)
    return linearizer.features_and_residual(
        x, directions, posterior.metric, create_graph, posterior.span, top
    )
