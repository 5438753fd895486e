"""The methods that can be compared: named keyword arguments of `Laplace(...)`.

Each comes with an estimate of its memory, made before the attempt.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from laplace_ella import _batch

__all__ = [
    "Estimate",
    "Kind",
    "Method",
    "Problem",
    "Tuning",
    "available_methods",
    "default_methods",
    "describe_problem",
    "estimate",
    "resolve_methods",
    "stored_floats",
]


# --- types ---------------------------------------------------------------------------


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
            str(_value(self.kwargs.get("subset_of_weights", "last_layer"))),
            str(_value(self.kwargs.get("hessian_structure", "kron"))),
        )

    @property
    def functional(self) -> str | None:
        """`functional_approximation` of a 'gp' method, None otherwise."""
        if self.structure[1] != "gp":
            return None
        return str(_value(self.kwargs.get("functional_approximation", "sod")))

    @property
    def prediction_type(self) -> str:
        return self.pred_type or ("gp" if self.structure[1] == "gp" else "glm")


@dataclass(frozen=True)
class Problem:
    """The sizes on which cost and support of a method depend.

    `n_activations` counts the outputs of all leaf modules for one example;
    `kron_floats` the Kronecker factors of all layers; `kron_unsupported` the types of
    layers with parameters that KFAC (curvlinops) has no rule for.
    """

    n_data: int
    n_outputs: int
    n_params: int
    n_params_last: int
    n_activations: int
    batch: int
    itemsize: int
    kron_floats: int
    kron_floats_last: int
    kron_unsupported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """What a method needs, before it is tried.

    Attributes
    ----------
    bytes : int
        in batches of `batch`
    batch : int or None
        the largest batch that stays inside the limit; None if not even one example
    unsupported : str or None
        why the method cannot run at all
    """

    bytes: int
    batch: int | None
    unsupported: str | None = None


# --- the list ------------------------------------------------------------------------


def _laplace(subset: str, structure: str, **kwargs: Any) -> dict[str, Any]:
    return {"subset_of_weights": subset, "hessian_structure": structure, **kwargs}


_ALL = (
    Method("map", kind=Kind.MAP, about="the network as trained"),
    Method(
        "temperature",
        kind=Kind.TEMPERATURE,
        about="temperature scaling on the validation set",
    ),
    Method(
        "ella",
        _laplace("all", "nystrom"),
        tune=Tuning.EARLY_STOPPING,
        fallback=Tuning.NONE,
        about="ELLA as in the paper: given prior, early stopping on the validation set",
    ),
    Method(
        "ella-marglik",
        _laplace("all", "nystrom"),
        tune=Tuning.MARGLIK,
        about="ELLA, prior by marginal likelihood",
    ),
    Method(
        "ella-tempered",
        _laplace("all", "nystrom"),
        tune=Tuning.TEMPERATURE,
        tune_kwargs={"tune_prior": True},
        about="ELLA tempered to an effective number of data",
    ),
    Method(
        "ella-complement",
        _laplace("all", "nystrom", complement="prior"),
        tune=Tuning.TEMPERATURE,
        tune_kwargs={"tune_prior": True},
        about="tempered ELLA that keeps the prior outside its subspace",
    ),
    Method("kron", _laplace("all", "kron"), about="KFAC, all layers"),
    Method("diag", _laplace("all", "diag"), about="diagonal, all layers"),
    Method("full", _laplace("all", "full"), about="exact linearised Laplace"),
    Method(
        "last-layer-full",
        _laplace("last_layer", "full"),
        about="exact, last layer only",
    ),
    Method("last-layer-kron", _laplace("last_layer", "kron"), about="KFAC, last layer"),
    Method(
        "last-layer-diag", _laplace("last_layer", "diag"), about="diagonal, last layer"
    ),
    Method(
        "last-layer-ella",
        _laplace("last_layer", "nystrom"),
        tune=Tuning.MARGLIK,
        about="ELLA on the last layer, prior by marginal likelihood",
    ),
    Method(
        "gp-subset",
        _laplace("all", "gp", n_subset=100),
        about="laplace-torch's GP on a subset of the data",
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
        # It takes no other link, number of samples or loss: it scores by probit NLL.
        tune_kwargs={"link_approx": "probit", "n_samples": 100, "loss": None},
        fallback=Tuning.NONE,
        about="laplace-torch 0.3's own ELLA",
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

#: Not in the default list: a variant that few need.
_ON_REQUEST = ("last-layer-ella",)


def available_methods() -> dict[str, Method]:
    """Every method that `compare` knows by name."""
    return {method.name: method for method in _ALL}


def default_methods(likelihood: str) -> list[Method]:
    """What `compare` runs when it is not told.

    Temperature scaling has no meaning for regression and is left out there.
    """
    skip = set(_ON_REQUEST)
    if str(_value(likelihood)) == "regression":
        skip.add("temperature")
    return [method for method in _ALL if method.name not in skip]


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
        methods = [_from_mapping(name, spec) for name, spec in methods.items()]
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


# --- sizes ---------------------------------------------------------------------------


@torch.no_grad()
def describe_problem(
    model: nn.Module, x: Any, n_data: int, dict_key_x: str = "input_ids"
) -> Problem:
    """Sizes of a model in eval mode, from one forward pass over one example of `x`."""
    batch = _batch.batch_size(x, dict_key_x)
    one = _batch.take(x, slice(0, 1), batch)
    activations: list[int] = []
    executed: list[nn.Module] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            activations.append(output.numel())
        executed.append(module)

    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    hooks = [leaf.register_forward_hook(record) for leaf in leaves]
    try:
        out = model(one)
    finally:
        for hook in hooks:
            hook.remove()

    with_parameters = [m for m in executed if any(p.requires_grad for p in _own(m))]
    last = with_parameters[-1] if with_parameters else None
    trainable = [p for p in model.parameters() if p.requires_grad]
    owners = [
        m for m in model.modules() if any(p.requires_grad for p in _own(m))
    ]  # parameters may also belong to inner modules (class tokens)
    return Problem(
        n_data=n_data,
        n_outputs=out.shape[-1],
        n_params=sum(p.numel() for p in trainable),
        n_params_last=sum(p.numel() for p in _own(last)) if last is not None else 0,
        n_activations=sum(activations),
        batch=batch,
        itemsize=next(model.parameters()).element_size(),
        kron_floats=sum(_kron_floats(m) for m in owners),
        kron_floats_last=_kron_floats(last) if last is not None else 0,
        kron_unsupported=tuple(
            sorted(
                {
                    type(m).__name__
                    for m in owners
                    if not isinstance(m, (nn.Linear, nn.Conv2d))
                }
            )
        ),
    )


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _kron_floats(module: nn.Module) -> int:
    """Entries of the two Kronecker factors of a linear or convolutional layer."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim < 2:
        return 0
    n_out, n_in = weight.shape[0], weight[0].numel()
    return n_out**2 + n_in**2


def estimate(method: Method, problem: Problem, limit: int | None) -> Estimate:
    """Memory of `method`, and the batch size with which it stays below `limit` bytes.

    The posterior counts with the copies that laplace-torch makes of it. Methods that
    take Jacobians of all layers with `torch.func.jacrev` over a whole batch need
    besides the B·C·P Jacobian about 2·B²·C floats for every activation of the network,
    since each of the B·C outputs is propagated through the whole batch and kept.
    Measured peaks are within 0.7–1.0 of this estimate.
    """
    unsupported = _unsupported(method, problem)
    if unsupported or method.kind is not Kind.LAPLACE:
        return Estimate(0, problem.batch, unsupported)
    fixed = _posterior_floats(method, problem) * problem.itemsize
    batch = problem.batch
    while True:
        needed = fixed + _batch_floats(method, problem, batch) * problem.itemsize
        if limit is None or needed <= limit:
            return Estimate(needed, batch)
        if batch == 1:
            return Estimate(needed, None)
        batch = math.ceil(batch / 2)


def preferred_batch(method: Method, problem: Problem, target: int) -> int:
    """Batch size at which the temporary memory stays below `target` bytes.

    Whole-batch Jacobians cost time in proportion to B² too, so smaller batches make
    these methods faster. The predictions do not change.
    """
    batch = problem.batch
    while (
        batch > 1 and _batch_floats(method, problem, batch) * problem.itemsize > target
    ):
        batch = math.ceil(batch / 2)
    return batch


def _unsupported(method: Method, problem: Problem) -> str | None:
    subset, structure = method.structure
    if method.kind is not Kind.LAPLACE:
        return None
    if method.functional not in (None, "sod") and not _has_functional_methods():
        return "not available in laplace-torch 0.2"
    own_backend = "backend" in method.kwargs
    if (subset, structure) == ("all", "kron") and not own_backend:
        if problem.kron_unsupported:
            return f"not supported: {', '.join(problem.kron_unsupported)} (KFAC)"
    return None


def _has_functional_methods() -> bool:
    from laplace.utils import enums

    return hasattr(enums, "FunctionalApproximation")


def _posterior_floats(method: Method, problem: Problem) -> int:
    """Floats that do not depend on the batch."""
    subset, structure = method.structure
    last = subset == "last_layer"
    P = problem.n_params_last if last else problem.n_params
    if structure == "full":
        return 4 * P**2  # sum, batch, identity and factor
    if structure == "kron":
        return 3 * (problem.kron_floats_last if last else problem.kron_floats)
    if structure == "nystrom":
        # Basis, batch of gradients and factors; the M gradients themselves are
        # compressed on the way where they do not fit.
        return 4 * P * int(method.kwargs.get("n_eigenvalues", 20))
    if method.functional == "sod":
        M = min(int(method.kwargs.get("n_subset", 0)), problem.n_data)
        return 3 * (M * problem.n_outputs) ** 2
    if method.functional == "nystrom":
        M = min(int(method.kwargs.get("subsample_size", 0)), problem.n_data)
        return P * (2 * M + int(method.kwargs.get("n_eigenvalues", 0)))
    if method.functional == "variational":
        return 2 * P * int(method.kwargs.get("num_inducing") or 1) * problem.n_outputs
    return 3 * P


def _batch_floats(method: Method, problem: Problem, batch: int) -> int:
    """Floats that a batch of `batch` examples needs besides."""
    if method.structure[1] == "nystrom":
        return 0  # splits its batches itself
    C = problem.n_outputs
    if method.structure[0] == "last_layer":
        return 2 * batch * C * problem.n_params_last
    propagated = 2 * batch**2 * C * problem.n_activations
    return propagated + 2 * batch * C * problem.n_params


def fitted_to(method: Method, problem: Problem, seed: int) -> dict[str, Any]:
    """Keyword arguments for `Laplace`, sizes capped by the data, with the seed set."""
    kwargs = dict(method.kwargs)
    if method.structure[1] in ("nystrom", "gp"):
        kwargs.setdefault("seed", seed)
    if method.structure[1] == "gp":
        for name in ("n_subset", "subsample_size", "num_inducing"):
            if isinstance(kwargs.get(name), int):
                kwargs[name] = min(kwargs[name], problem.n_data)
        if "n_eigenvalues" in kwargs:
            kwargs["n_eigenvalues"] = min(
                kwargs["n_eigenvalues"], kwargs["subsample_size"]
            )
    return kwargs


#: Attributes that hold the posterior in the classes of laplace-torch and this package.
_STATE = (
    "H",
    "basis",
    "dual_directions",
    "feature_gram",
    "K_MM",
    "Sigma_inv",
    "inducing_locations",
    "L",
)


def stored_floats(la: Any) -> int:
    """Numbers that a fitted posterior keeps besides the weights of the network."""
    return sum(_count(getattr(la, name, None)) for name in _STATE)


def _count(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(_count(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_count(v) for v in value)
    # laplace's Kron and KronDecomposed, this package's NystromBasis
    parts = ("kfacs", "eigenvalues", "eigenvectors", "directions")
    return sum(_count(getattr(value, part, None)) for part in parts)


def _value(name: Any) -> Any:
    """The string of a `str` enum, anything else as it is."""
    return name.value if isinstance(name, Enum) else name
