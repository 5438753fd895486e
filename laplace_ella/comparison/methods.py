"""The methods that can be compared: named keyword arguments of `Laplace(...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from laplace_ella.settings import PAPER
from laplace_ella.support.checks import member

__all__ = [
    "Kind",
    "Method",
    "Tuning",
    "available_methods",
    "default_methods",
    "resolve_methods",
]


class Kind(str, Enum):
    """What a method does with the trained network."""

    MAP = "map"
    """The network as it is."""

    TEMPERATURE = "temperature"
    """Logits divided by the number that minimises the validation NLL."""

    LAPLACE = "laplace"
    """`Laplace(model, likelihood, **kwargs)`."""


class Tuning(str, Enum):
    """How the hyperparameters of a posterior are chosen."""

    DEFAULT = "default"
    """`optimize_prior_precision()` of the training data, as the class does it by
    default; of regressions the prior and the noise that maximise the evidence."""

    MARGLIK = "marglik"
    """The same with `method="marglik"`, also where the class has another default."""

    NONE = "none"
    """Not at all: prior and noise stay as given."""

    GRIDSEARCH = "gridsearch"
    """Prior precision with the lowest validation NLL on a grid. Without validation
    data the prior stays as given."""

    EARLY_STOPPING = "early_stopping"
    """Stop the pass over the training data at the lowest validation NLL (Deng et al.
    2022, Sec. 5.2): a fit for every link. `hessian_structure="nystrom"` only."""

    TEMPERATURE = "temperature"
    """`optimize_temperature` with the prior, by validation NLL.
    `hessian_structure="nystrom"` only."""

    CALIBRATION = "calibration"
    """Prior precision, temperature and softmax temperature (for regression the noise)
    together, by validation NLL."""

    @property
    def needs_validation(self) -> bool:
        """Whether the choice is made on validation data, for one link."""
        return self not in (Tuning.DEFAULT, Tuning.MARGLIK, Tuning.NONE)


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
        how its hyperparameters are chosen: 'default', 'marglik' and 'none' need no
        validation data; 'gridsearch', 'early_stopping', 'temperature' and
        'calibration' do
    tune_kwargs : mapping
        further arguments of the tuning call
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
    about: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", member(Kind, "kind", self.kind))
        object.__setattr__(self, "tune", member(Tuning, "tune", self.tune))

    @property
    def structure(self) -> tuple[str, str]:
        """(subset_of_weights, hessian_structure), with the defaults of `Laplace`."""
        defaults = {"subset_of_weights": "last_layer", "hessian_structure": "kron"}
        found = [self.kwargs.get(name, value) for name, value in defaults.items()]
        subset, structure = (v.value if isinstance(v, Enum) else v for v in found)
        return str(subset), str(structure)

    @property
    def is_ella(self) -> bool:
        """Whether this package does the work."""
        return self.kind is Kind.LAPLACE and self.structure[1] == "nystrom"


def _laplace(subset: str, structure: str, **kwargs: Any) -> dict[str, Any]:
    return {"subset_of_weights": subset, "hessian_structure": structure, **kwargs}


#: ELLA with settings enough to be calibrated.
CALIBRATED = {"subsample_size": 2000, "n_eigenvalues": 128, "complement": "prior"}

_EXACT = _laplace("all", "nystrom", n_eigenvalues="exact")
_GP_ELLA = _laplace(
    "all", "gp", functional_approximation="nystrom",
    subsample_size=2000, n_eigenvalues=20,
)  # fmt: skip
_VALLA = _laplace(
    "all", "gp", functional_approximation="variational",
    inducing_locations="kmeans", num_inducing=20,
)  # fmt: skip

#: Tuned without validation data, in the order of the table.
_BY_DEFAULT = (
    Method("map", kind="map", about="the network as trained"),
    Method("exact", _EXACT, about="exact linearised Laplace, by all gradients"),
    Method(
        "ella",
        _laplace("all", "nystrom", n_eigenvalues=20),
        about="ELLA with K = 20 directions",
    ),
    Method("full", _laplace("all", "full"), about="exact, by a P×P matrix"),
    Method("kron", _laplace("all", "kron"), about="KFAC, all layers"),
    Method("diag", _laplace("all", "diag"), about="diagonal, all layers"),
    Method("last-layer-full", _laplace("last_layer", "full"), about="full, last layer"),
    Method("last-layer-kron", _laplace("last_layer", "kron"), about="KFAC, last layer"),
    Method("last-layer-diag", _laplace("last_layer", "diag"), about="diag, last layer"),
    Method(
        "gp-ella",
        _GP_ELLA,
        tune="gridsearch",
        about="laplace-torch's own ELLA (0.3); prior as given without validation data",
    ),
)

_CALIBRATED_TWINS = ("exact", "kron", "diag", "last-layer-kron", "last-layer-full")

#: Tuned on validation data.
_ON_VALIDATION = (
    Method("temperature", kind="temperature", about="temperature scaling"),
    Method(
        "ella-paper",
        _laplace("all", "nystrom", **PAPER),
        tune="early_stopping",
        about="ELLA as in the paper: given prior, early stopping",
    ),
    Method(
        "ella-calibrated",
        _laplace("all", "nystrom", **CALIBRATED),
        tune="calibration",
        about="ELLA with K = 128 and the prior kept outside its basis, calibrated",
    ),
    *(
        replace(
            method,
            name=f"{method.name}-calibrated",
            tune="calibration",
            about=f"{method.about}; calibrated",
        )
        for method in _BY_DEFAULT
        if method.name in _CALIBRATED_TWINS
    ),
)

#: Not in the default list: variants that few need.
_ON_REQUEST = (
    Method(
        "ella-tempered",
        _laplace("all", "nystrom", **PAPER),
        tune="temperature",
        about="ELLA tempered to an effective number of data",
    ),
    Method(
        "last-layer-ella",
        _laplace("last_layer", "nystrom", **PAPER),
        about="ELLA with K = 20 directions, last layer",
    ),
    Method(
        "gp-subset",
        _laplace("all", "gp", n_subset=100),
        about="laplace-torch's GP on a subset of the data",
    ),
    Method(
        "gp-valla",
        _VALLA,
        tune="none",
        about="laplace-torch's VaLLA (0.3); learns its prior while it is fitted",
    ),
)


def available_methods() -> dict[str, Method]:
    """Return every method that `compare` knows, by name.

    Examples
    --------
    >>> {"ella-calibrated", "kron", "last-layer-full"} <= set(available_methods())
    True
    """
    return {m.name: m for m in (*_BY_DEFAULT, *_ON_VALIDATION, *_ON_REQUEST)}


def default_methods(likelihood: str, validation: bool = True) -> list[Method]:
    """Return what `compare` runs if `methods` is not given.

    These are all members of the family: the network, exact Laplace, ELLA, and KFAC,
    diagonal, full and last-layer posteriors; with `validation` data also those that are
    tuned on them. Temperature scaling has no meaning for regression.

    Examples
    --------
    >>> "temperature" in [method.name for method in default_methods("regression")]
    False
    """
    rows = [*_BY_DEFAULT, *(_ON_VALIDATION if validation else ())]
    scaling = likelihood == "classification"
    return [m for m in rows if scaling or m.kind is not Kind.TEMPERATURE]


def resolve_methods(methods: Any, likelihood: str, validation: bool) -> list[Method]:
    """Return methods of names, `Method` objects or a mapping of name to arguments.

    >>> [m.name for m in resolve_methods(["map", "kron"], "classification", True)]
    ['map', 'kron']
    >>> mine = {"K=5": {"subset_of_weights": "all", "hessian_structure": "nystrom",
    ...                 "n_eigenvalues": 5}}
    >>> resolve_methods(mine, "classification", True)[0].structure
    ('all', 'nystrom')
    """
    if methods is None:
        return default_methods(likelihood, validation)
    if isinstance(methods, (str, Method)):
        methods = [methods]
    if isinstance(methods, Mapping):
        methods = [_named(name, spec) for name, spec in methods.items()]
    known, resolved = available_methods(), []
    for method in methods:
        if isinstance(method, str) and method not in known:
            raise ValueError(
                f"Unknown method {method!r}. Known: {', '.join(known)}. For your own, "
                "pass Method(name, kwargs) or {name: kwargs of Laplace(...)}."
            )
        method = known[method] if isinstance(method, str) else method
        if not isinstance(method, Method):
            raise TypeError(
                "A method is a name, a Method or an entry of a mapping, got "
                f"{type(method).__name__}."
            )
        resolved.append(method)
    names = [method.name for method in resolved]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        got = f"{', '.join(twice)} more than once" if twice else "none"
        raise ValueError(f"Pass one method or more of different names, got {got}.")
    return resolved


def _named(name: str, spec: Any) -> Method:
    if isinstance(spec, Method):
        return replace(spec, name=name)
    if not isinstance(spec, Mapping):
        raise TypeError(
            f"methods[{name!r}] must be a mapping of keyword arguments of Laplace(...) "
            f"or a Method, got {type(spec).__name__}."
        )
    return Method(name, dict(spec))
