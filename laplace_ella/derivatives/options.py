"""What a user may ask of the computation, without changing any number."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from laplace_ella.derivatives.features import FeatureMode
from laplace_ella.derivatives.rows import RowMode
from laplace_ella.support.checks import member, positive_int
from laplace_ella.support.disk import check_folder
from laplace_ella.support.resources import parse_bytes

__all__ = ["ComputeOptions"]


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
    compile : bool or dict
        compile the forward-mode pass, or with `feature_mode="reverse"` that of reverse
        mode; a dict holds arguments of `torch.compile`
    memory_budget : int, float or str, optional
        bytes, or a text like "8 GB", that may be used; a share of what is free if None
    basis_dtype : torch.dtype, optional
        precision of the directions; that of the gradients if None
    basis_device : torch.device, optional
        where the directions are kept; if None the model's device, or the CPU if there
        is a `scratch_dir`
    scratch_dir : str or PathLike, optional
        folder for a file with gradients that do not fit in memory

    Examples
    --------
    >>> options = ComputeOptions(feature_mode="reverse", memory_budget="8 GB")
    >>> options.feature_mode
    <FeatureMode.REVERSE: 'reverse'>
    """

    feature_mode: FeatureMode = FeatureMode.AUTO
    row_mode: RowMode = RowMode.AUTO
    chunk_size: int | None = None
    compile: bool | dict[str, Any] = False
    memory_budget: int | float | str | None = None
    basis_dtype: torch.dtype | None = None
    basis_device: torch.device | None = None
    scratch_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        def settle(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        settle("feature_mode", member(FeatureMode, "feature_mode", self.feature_mode))
        settle("row_mode", member(RowMode, "row_mode", self.row_mode))
        if self.chunk_size is not None:
            settle("chunk_size", positive_int("chunk_size", self.chunk_size))
        if not isinstance(self.compile, (bool, dict)):
            raise TypeError(
                "compile must be True, False or a dict of arguments of torch.compile, "
                f"got {self.compile!r}."
            )
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget)
        dtype = self.basis_dtype
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point
        ):
            raise ValueError(
                "basis_dtype must be a floating-point dtype such as torch.bfloat16, "
                f"got {dtype!r}."
            )
        if self.scratch_dir is not None:
            settle("scratch_dir", check_folder(self.scratch_dir))
        if self.basis_device is not None:
            settle("basis_device", torch.device(self.basis_device))
            if self.scratch_dir is not None and self.basis_device.type != "cpu":
                raise ValueError(
                    "scratch_dir keeps directions where the CPU reads them, got "
                    f"basis_device={str(self.basis_device)!r}. Leave one of them out."
                )
