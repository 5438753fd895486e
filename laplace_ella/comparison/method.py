"""What a method of a comparison is: named keyword arguments of `Laplace(...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Kind", "Method", "Tuning", "plain_value"]


def plain_value(name: Any) -> Any:
    """The string of a `str` enum, anything else as it is."""
    return name.value if isinstance(name, Enum) else name


class Kind(str, Enum):
    """What a method does with the trained network."""

    MAP = "map"
    """The network as it is."""

    TEMPERATURE = "temperature"
    """Logits divided by one number that minimises the validation NLL."""

    LAPLACE = "laplace"
    """`Laplace(model, likelihood, **kwargs)`."""


class Tuning(str, Enum):
    """How the free scale of a posterior is chosen, and what it costs."""

    DEFAULT = "default"
    """What `compare(..., tune=...)` says."""

    NONE = "none"
    """Not at all: the prior precision stays as given."""

    MARGLIK = "marglik"
    """Prior precision by marginal likelihood: `n_steps` steps, no data needed."""

    GRIDSEARCH = "gridsearch"
    """Prior precision by validation NLL: `grid_size` passes over `val_loader`; one
    pass for `hessian_structure="nystrom"`, which keeps the features."""

    EARLY_STOPPING = "early_stopping"
    """Stop the pass over the training data at the best validation NLL (Deng et al.
    2022, Sec. 5.2). `hessian_structure="nystrom"` only."""

    TEMPERATURE = "temperature"
    """Temper the curvature to the effective number of data with the best validation
    NLL, `optimize_temperature`: one pass over `val_loader`, whose features are kept.
    `hessian_structure="nystrom"` only."""

    @property
    def needs_validation(self) -> bool:
        return self in (Tuning.GRIDSEARCH, Tuning.EARLY_STOPPING, Tuning.TEMPERATURE)


@dataclass(frozen=True)
class Method:
    """One row of the comparison.

    Parameters
    ----------
    name : str
    kwargs : mapping
        keyword arguments of `Laplace(model, likelihood, ...)`
    kind : Kind or str
    tune : Tuning or str
    tune_kwargs : mapping
        overrides for the tuning call
    fallback : Tuning or str, optional
        tuning to use when `tune` needs a `val_loader` and there is none; without it
        the method is skipped
    fit_kwargs : mapping
        further keyword arguments of `fit`
    pred_type : str, optional
        default 'gp' for `hessian_structure='gp'`, otherwise 'glm'
    about : str
        one line for the list of methods

    Examples
    --------
    >>> Method("kron, layerwise prior", {"hessian_structure": "kron",
    ...     "subset_of_weights": "all"}, tune="marglik",
    ...     tune_kwargs={"prior_structure": "layerwise"}).structure
    ('all', 'kron')
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind | str = Kind.LAPLACE
    tune: Tuning | str = Tuning.DEFAULT
    tune_kwargs: Mapping[str, Any] = field(default_factory=dict)
    fallback: Tuning | str | None = None
    fit_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pred_type: str | None = None
    about: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))
        object.__setattr__(self, "tune", Tuning(self.tune))
        if self.fallback is not None:
            object.__setattr__(self, "fallback", Tuning(self.fallback))

    @property
    def structure(self) -> tuple[str, str]:
        """(subset_of_weights, hessian_structure), with the defaults of `Laplace`."""
        return (
            str(plain_value(self.kwargs.get("subset_of_weights", "last_layer"))),
            str(plain_value(self.kwargs.get("hessian_structure", "kron"))),
        )

    @property
    def functional(self) -> str | None:
        """`functional_approximation` of a 'gp' method, None otherwise."""
        if self.structure[1] != "gp":
            return None
        return str(plain_value(self.kwargs.get("functional_approximation", "sod")))

    @property
    def prediction_type(self) -> str:
        return self.pred_type or ("gp" if self.structure[1] == "gp" else "glm")
