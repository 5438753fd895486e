"""The methods that can be compared: named keyword arguments of `Laplace(...)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from laplace_ella.support.checks import member
from laplace_ella.support.presets import PAPER

__all__ = [
    "Kind",
    "Method",
    "Tuning",
    "available_methods",
    "default_methods",
    "plain_value",
    "resolve_methods",
]

# --- what a method is ----------------------------------------------------------------


PRED_TYPES = ("glm", "nn", "gp")


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

    SUITED = "suited"
    """What suits the likelihood: the evidence for regression; for classification, where
    it is no guide to exact Laplace, a grid search on the validation set."""

    NONE = "none"
    """Not at all: the prior precision stays as given."""

    MARGLIK = "marglik"
    """Prior precision by marginal likelihood: `n_steps` steps, no data needed."""

    GRIDSEARCH = "gridsearch"
    """Prior precision by validation NLL: `grid_size` passes over `val_loader` for all
    links together; one pass for `hessian_structure="nystrom"`, which keeps the
    features."""

    EARLY_STOPPING = "early_stopping"
    """Stop the pass over the training data at the best validation NLL (Deng et al.
    2022, Sec. 5.2): a fit for every link. `hessian_structure="nystrom"` only."""

    TEMPERATURE = "temperature"
    """Temper the curvature to the effective number of data with the best validation
    NLL, `optimize_temperature`: one pass over `val_loader`, whose features are kept.
    `hessian_structure="nystrom"` only."""

    CALIBRATION = "calibration"
    """Prior precision, temperature and softmax temperature (for regression the noise)
    together by validation NLL, at the cost of GRIDSEARCH."""

    @property
    def needs_validation(self) -> bool:
        """Whether there is nothing to choose by without a `val_loader`; the choice is
        then made for a link."""
        return self in (
            Tuning.GRIDSEARCH,
            Tuning.EARLY_STOPPING,
            Tuning.TEMPERATURE,
            Tuning.CALIBRATION,
        )


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
    pred_type : {'glm', 'nn', 'gp'}, optional
        default 'gp' for `hessian_structure='gp'`, otherwise 'glm'. Samples of weights,
        'nn', know no link: one row instead of one per link
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
        object.__setattr__(self, "kind", member(Kind, "kind", self.kind))
        object.__setattr__(self, "tune", member(Tuning, "tune", self.tune))
        if self.fallback is not None:
            fallback = member(Tuning, "fallback", self.fallback)
            object.__setattr__(self, "fallback", fallback)
        if plain_value(self.pred_type) not in (None, *PRED_TYPES):
            raise ValueError(
                f"pred_type must be one of {list(PRED_TYPES)}, got {self.pred_type!r}."
            )

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
        """`pred_type` of predictions, with the default of the method's structure."""
        default = "gp" if self.structure[1] == "gp" else "glm"
        return str(plain_value(self.pred_type)) if self.pred_type else default

    @property
    def is_ella(self) -> bool:
        """Whether this package does the work."""
        return self.kind is Kind.LAPLACE and self.structure[1] == "nystrom"

    @property
    def has_links(self) -> bool:
        """Whether class probabilities depend on a link."""
        return self.kind is Kind.LAPLACE and self.prediction_type != "nn"


# --- the methods that have a name ----------------------------------------------------


def _laplace(subset: str, structure: str, **kwargs: Any) -> dict[str, Any]:
    return {"subset_of_weights": subset, "hessian_structure": structure, **kwargs}


#: ELLA with settings enough to be calibrated by.
CALIBRATED: dict[str, Any] = {
    "subsample_size": 2000,
    "n_eigenvalues": 128,
    "complement": "prior",
}

_BY_DEFAULT = (
    Method("map", kind=Kind.MAP, about="the network as trained"),
    Method(
        "temperature",
        kind=Kind.TEMPERATURE,
        about="temperature scaling on the validation set",
    ),
    Method(
        "exact",
        _laplace("all", "nystrom", n_eigenvalues="exact"),
        tune=Tuning.SUITED,
        about="exact linearised Laplace: every gradient, where they fit in memory",
    ),
    Method(
        "ella",
        _laplace("all", "nystrom", **PAPER),
        tune=Tuning.EARLY_STOPPING,
        fallback=Tuning.NONE,
        about="ELLA as in the paper: given prior, early stopping on the validation set",
    ),
    Method(
        "ella-calibrated",
        _laplace("all", "nystrom", **CALIBRATED),
        tune=Tuning.CALIBRATION,
        about="ELLA with K = 128 and the prior kept outside its subspace, calibrated",
    ),
    Method("kron", _laplace("all", "kron"), about="KFAC, all layers"),
    Method("diag", _laplace("all", "diag"), about="diagonal, all layers"),
    Method("last-layer-kron", _laplace("last_layer", "kron"), about="KFAC, last layer"),
    Method(
        "last-layer-full",
        _laplace("last_layer", "full"),
        about="exact, last layer only",
    ),
    Method(
        "gp-ella",
        _laplace(
            "all",
            "gp",
            functional_approximation="nystrom",
            subsample_size=2000,
            n_eigenvalues=20,
        ),
        tune=Tuning.GRIDSEARCH,
        fallback=Tuning.NONE,
        about="laplace-torch 0.3's own ELLA",
    ),
)

#: Rows that have a twin, "<name>-calibrated", with the settings of "ella-calibrated".
_ALSO_CALIBRATED = ("exact", "kron", "diag", "last-layer-kron", "last-layer-full")

#: Not in the default list: variants that few need.
_ON_REQUEST = (
    Method(
        "ella-marglik",
        _laplace("all", "nystrom", **PAPER),
        tune=Tuning.MARGLIK,
        about="ELLA, prior by marginal likelihood",
    ),
    Method(
        "ella-tempered",
        _laplace("all", "nystrom", **PAPER),
        tune=Tuning.TEMPERATURE,
        tune_kwargs={"tune_prior": True},
        about="ELLA tempered to an effective number of data",
    ),
    Method(
        "ella-complement",
        _laplace("all", "nystrom", **{**PAPER, "complement": "prior"}),
        tune=Tuning.TEMPERATURE,
        tune_kwargs={"tune_prior": True},
        about="tempered ELLA that keeps the prior outside its subspace",
    ),
    Method(
        "full",
        _laplace("all", "full"),
        about="exact linearised Laplace by a P×P matrix",
    ),
    Method(
        "last-layer-diag", _laplace("last_layer", "diag"), about="diagonal, last layer"
    ),
    Method(
        "last-layer-ella",
        _laplace("last_layer", "nystrom", **PAPER),
        tune=Tuning.MARGLIK,
        about="ELLA on the last layer, prior by marginal likelihood",
    ),
    Method(
        "gp-subset",
        _laplace("all", "gp", n_subset=100),
        about="laplace-torch's GP on a subset of the data",
    ),
    Method(
        "gp-valla",
        _laplace(
            "all",
            "gp",
            functional_approximation="variational",
            inducing_locations="kmeans",
            num_inducing=20,
        ),
        tune=Tuning.NONE,
        about="laplace-torch 0.3's VaLLA; learns its prior while fitting",
    ),
)


def _with_calibrated(methods: Iterable[Method]) -> list[Method]:
    """The methods, some of them followed by their calibrated twins."""
    rows: list[Method] = []
    for method in methods:
        rows.append(method)
        if method.name in _ALSO_CALIBRATED:
            twin = replace(
                method,
                name=f"{method.name}-calibrated",
                tune=Tuning.CALIBRATION,
                about=f"{method.about}; calibrated",
            )
            rows.append(twin)
    return rows


def available_methods() -> dict[str, Method]:
    """Every method that `compare` knows by name.

    Examples
    --------
    >>> {"ella-calibrated", "kron", "last-layer-full"} <= set(available_methods())
    True
    """
    return {m.name: m for m in (*_with_calibrated(_BY_DEFAULT), *_ON_REQUEST)}


def default_methods(likelihood: str) -> list[Method]:
    """What `compare` runs if `methods` is not given.

    The network and temperature scaling; exact Laplace; ELLA as in the paper; KFAC, the
    diagonal and the last layer as laplace-torch tunes them, its own ELLA, and of all
    but the latter the calibrated row. Temperature scaling has no meaning for regression
    and is left out there.

    Examples
    --------
    >>> "temperature" in [method.name for method in default_methods("regression")]
    False
    """
    rows = _with_calibrated(_BY_DEFAULT)
    if str(plain_value(likelihood)) == "regression":
        return [method for method in rows if method.kind is not Kind.TEMPERATURE]
    return rows


def resolve_methods(
    methods: Iterable[str | Method] | Mapping[str, Any] | None, likelihood: str
) -> list[Method]:
    """Methods from names, `Method` objects or a mapping of name to keyword arguments.

    >>> [m.name for m in resolve_methods(["map", "kron"], "classification")]
    ['map', 'kron']
    >>> mine = {"K=5": {"subset_of_weights": "all", "hessian_structure": "nystrom",
    ...                 "n_eigenvalues": 5}}
    >>> resolve_methods(mine, "classification")[0].structure
    ('all', 'nystrom')
    """
    if methods is None:
        return default_methods(likelihood)
    if isinstance(methods, str):
        methods = [methods]
    if isinstance(methods, Mapping):
        named: Mapping[Any, Any] = methods
        methods = [_from_mapping(name, spec) for name, spec in named.items()]
    known = available_methods()
    resolved: list[Method] = []
    for method in methods:
        if isinstance(method, str) and method not in known:
            raise ValueError(
                f"Unknown method {method!r}. Known: {', '.join(known)}. For your own, "
                "pass Method(name, kwargs) or {name: kwargs of Laplace(...)}."
            )
        if isinstance(method, str):
            method = known[method]
        if not isinstance(method, Method):
            raise TypeError(
                "A method is a name, a Method or an entry of a mapping, got "
                f"{type(method).__name__}."
            )
        resolved.append(method)
    names = [method.name for method in resolved]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"Method names must differ, got {', '.join(twice)} more than once."
        )
    return resolved


def _from_mapping(name: str, spec: Any) -> Method:
    if isinstance(spec, Method):
        return replace(spec, name=name)
    if not isinstance(spec, Mapping):
        raise TypeError(
            f"methods[{name!r}] must be a mapping of keyword arguments of Laplace(...) "
            f"or a Method, got {type(spec).__name__}."
        )
    return Method(name, dict(spec))
