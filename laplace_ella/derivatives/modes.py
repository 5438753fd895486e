"""Which ways of differentiating were chosen for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laplace_ella.derivatives.features import FeatureMode
from laplace_ella.derivatives.rows import RowMode

__all__ = ["Modes"]


@dataclass(frozen=True)
class Modes:
    """What was decided; None where nothing was.

    Attributes
    ----------
    features : FeatureMode, optional
    together : bool
        whether all tangents, or all rows in reverse mode, go through the model in
        one pass, not one after the other
    rows : RowMode, optional
        of gradients of single combinations of outputs
    jacobians : RowMode, optional
        of gradients of all outputs

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=5)
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> la.modes.features.value in {"forward", "reverse"}
    True
    >>> Modes.from_dict(la.modes.to_dict()) == la.modes
    True
    """

    features: FeatureMode | None = None
    together: bool = True
    rows: RowMode | None = None
    jacobians: RowMode | None = None

    def to_dict(self) -> dict[str, str | bool | None]:
        """Plain types, for checkpoints."""
        return {
            "features": None if self.features is None else self.features.value,
            "together": self.together,
            "rows": None if self.rows is None else self.rows.value,
            "jacobians": None if self.jacobians is None else self.jacobians.value,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Modes:
        """The inverse of `to_dict`."""
        features, rows = state["features"], state["rows"]
        jacobians = state["jacobians"]
        return cls(
            None if features is None else FeatureMode(features),
            bool(state["together"]),
            None if rows is None else RowMode(rows),
            None if jacobians is None else RowMode(jacobians),
        )
