"""`ComputeOptions`, the options of differentiation, and `Modes`, what was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from laplace_ella.support.checks import member, positive_int
from laplace_ella.support.memory import parse_bytes


class FeatureMode(str, Enum):
    """Ways to compute the features of B examples; costs in forward passes."""

    AUTO = "auto"
    """Choose at the fit: by cost, and by a measurement where the costs are close."""

    FORWARD = "forward"
    """Forward-mode AD: about 2K + 1 passes, whatever C. Best for many outputs."""

    REVERSE = "reverse"
    """Rows of the Jacobian times V: about 2C + 1 passes and a product of C·P·K
    multiplications. Best for few outputs and large K."""

    DOUBLE_REVERSE = "double_vjp"
    """The derivative of a vector-Jacobian product: about 3K + 2 passes. For models
    with operators that have no forward-mode derivative (LSTM, weight_norm)."""


class RowMode(str, Enum):
    """How the gradients of B examples are computed; all modes give the same rows."""

    AUTO = "auto"
    """Try `vmap` and `loop` on one batch and keep the fastest that works."""

    VMAP = "vmap"
    """`vmap(grad)`: one batched backward pass. Grouped convolutions may be slow."""

    LOOP = "loop"
    """One backward pass per row. Works for every model that autograd supports."""

    BACKPACK = "backpack"
    """Jacobians by laplace-torch's `BackPackGGN`, for the layers that BackPACK knows:
    C backward passes for all rows of an example."""

    ASDL = "asdl"
    """The same by laplace-torch's `AsdlGGN`."""


@dataclass(frozen=True)
class ComputeOptions:
    """How derivatives are computed and where their results are kept.

    Strings are accepted for modes and devices, and become what they name.

    Attributes
    ----------
    feature_mode : FeatureMode
        direction of differentiation of the features
    row_mode : RowMode
        how the gradients of single outputs are taken
    chunk_size : int, optional
        examples that are differentiated at once; chosen by the network if None
    memory_budget : int, float or str, optional
        bytes, or a text like "8 GB", that may be used; a share of what is free if None
    basis_dtype : torch.dtype, optional
        precision of the directions; that of the gradients if None
    basis_device : torch.device, optional
        where the directions are kept; the model's device if None

    Examples
    --------
    >>> from laplace_ella import ComputeOptions
    >>> options = ComputeOptions(feature_mode="reverse", memory_budget="8 GB")
    >>> options.feature_mode
    <FeatureMode.REVERSE: 'reverse'>
    """

    feature_mode: FeatureMode = FeatureMode.AUTO
    row_mode: RowMode = RowMode.AUTO
    chunk_size: int | None = None
    memory_budget: int | float | str | None = None
    basis_dtype: torch.dtype | None = None
    basis_device: torch.device | None = None

    def __post_init__(self) -> None:
        settle, dtype = partial(object.__setattr__, self), self.basis_dtype
        settle("feature_mode", member(FeatureMode, "feature_mode", self.feature_mode))
        settle("row_mode", member(RowMode, "row_mode", self.row_mode))
        if self.chunk_size is not None:
            positive_int("chunk_size", self.chunk_size)
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget)
        if not (dtype is None or getattr(dtype, "is_floating_point", False)):
            raise ValueError(
                "basis_dtype must be a floating-point dtype such as torch.bfloat16, "
                f"got {dtype!r}."
            )
        if self.basis_device is not None:
            settle("basis_device", torch.device(self.basis_device))


@dataclass(frozen=True)
class Modes:
    """The modes that were chosen, `la.modes`, or None: of features, and of gradients,
    which are also those of features in reverse mode.

    Examples
    --------
    >>> import torch
    >>> from laplace_ella import ELLALaplace
    >>> la = ELLALaplace(torch.nn.Linear(2, 3), "regression")
    >>> la.fit([(torch.randn(50, 2), torch.randn(50, 3))])
    >>> la.modes.rows.value in {"vmap", "loop"}
    True
    """

    features: FeatureMode | None = None
    rows: RowMode | None = None
