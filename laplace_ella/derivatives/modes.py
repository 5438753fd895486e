"""Which ways of differentiating were chosen for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from laplace_ella.derivatives.features import FeatureMode
from laplace_ella.derivatives.rows import RowMode

__all__ = ["Decisions", "Modes"]


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


@dataclass
class Decisions:
    """What was decided so far, each by what it depends on.

    Attributes
    ----------
    features : dict
        mode, and whether all goes through the model together, by autocast, the rank
        and the number of outputs that are selected, None for all
    rows, jacobians : dict
        modes by autocast: under it other ways may work (`vmap`, for example, has no
        batch normalisation of mixed precision)
    """

    features: dict[tuple[bool, int, int | None], tuple[FeatureMode, bool]] = field(
        default_factory=dict
    )
    rows: dict[bool, RowMode] = field(default_factory=dict)
    jacobians: dict[bool, RowMode] = field(default_factory=dict)

    def modes(self, autocast: bool, rank: int) -> Modes:
        """Those for `rank` directions and all outputs."""
        features, together = self.features.get((autocast, rank, None), (None, True))
        rows, jacobians = self.rows.get(autocast), self.jacobians.get(autocast)
        return Modes(features, together, rows, jacobians)

    def adopt(self, autocast: bool, rank: int, modes: Modes) -> None:
        """Take over decisions for `rank` directions, for example from a checkpoint."""
        if modes.features is not None:
            self.features[autocast, rank, None] = modes.features, modes.together
        if modes.rows is not None:
            self.rows[autocast] = modes.rows
        if modes.jacobians is not None:
            self.jacobians[autocast] = modes.jacobians

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for checkpoints."""
        return {
            "features": [
                [*key, mode.value, together]
                for key, (mode, together) in self.features.items()
            ],
            "rows": [[key, mode.value] for key, mode in self.rows.items()],
            "jacobians": [[key, mode.value] for key, mode in self.jacobians.items()],
        }

    def update(self, state: Mapping[str, Any]) -> None:
        """Take over what `to_dict` returned."""
        for *key, mode, together in state["features"]:
            self.features[tuple(key)] = FeatureMode(mode), together
        self.rows |= {key: RowMode(mode) for key, mode in state["rows"]}
        self.jacobians |= {key: RowMode(mode) for key, mode in state["jacobians"]}
