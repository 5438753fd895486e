"""The methods that can be compared: named keyword arguments of `Laplace(...)`.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from laplace_ella.comparison.memory import (
    Estimate,
    Problem,
    describe_problem,
    estimate,
    stored_floats,
)
from laplace_ella.comparison.method import Kind, Method, Tuning, plain_value

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
    if str(plain_value(likelihood)) == "regression":
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
