"""What all methods of a comparison have in common, checked before any work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from laplace_ella.comparison.methods import Tuning, plain_value
from laplace_ella.support.checks import check_positive, member, positive_int
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.links import Link

__all__ = ["Settings", "check_likelihood", "check_seeds", "make_settings"]

LINKS = tuple(link.value for link in Link)


@dataclass(frozen=True)
class Settings:
    """What all methods have in common; the arguments of `compare`."""

    likelihood: str
    links: tuple[str, ...]
    n_samples: int
    tune: Tuning
    prior_precision: float
    sigma_noise: float
    grid_size: int
    n_steps: int
    n_bins: int
    dict_key_x: str
    dict_key_y: str
    output_layout: OutputLayout = OutputLayout.FLAT

    @property
    def is_regression(self) -> bool:
        return self.likelihood == "regression"


def make_settings(
    *,
    likelihood: Any,
    links: Any,
    n_samples: int,
    tune: Any,
    prior_precision: float,
    sigma_noise: float | None,
    grid_size: int,
    n_steps: int,
    n_bins: int,
    dict_key_x: str,
    dict_key_y: str,
    output_layout: Any,
    val_loader: Any,
) -> Settings:
    """The arguments of `compare`, each of which is what it should be."""
    noise = 1.0 if sigma_noise is None else _positive("sigma_noise", sigma_noise)
    return Settings(
        likelihood=check_likelihood(likelihood),
        links=_check_links(links),
        n_samples=positive_int("n_samples", n_samples),
        tune=_check_tune(tune, val_loader),
        prior_precision=_positive("prior_precision", prior_precision),
        sigma_noise=noise,
        grid_size=positive_int("grid_size", grid_size),
        n_steps=positive_int("n_steps", n_steps),
        n_bins=positive_int("n_bins", n_bins),
        dict_key_x=dict_key_x,
        dict_key_y=dict_key_y,
        output_layout=member(OutputLayout, "output_layout", output_layout),
    )


def check_likelihood(likelihood: Any) -> str:
    """The name of a likelihood that a comparison has metrics for."""
    name = str(plain_value(likelihood))
    if name not in ("classification", "regression"):
        raise ValueError(
            "likelihood must be 'classification' or 'regression' in a comparison, got "
            f"{name!r}."
        )
    return name


def check_seeds(seeds: Any) -> list[int]:
    """At least one seed, none twice."""
    seeds = [seeds] if isinstance(seeds, (int, np.integer)) else list(seeds)
    wrong = [
        s for s in seeds if isinstance(s, bool) or not isinstance(s, (int, np.integer))
    ]
    if wrong or not seeds:
        got = repr(wrong[0]) if wrong else "none"
        raise ValueError(f"seeds must be one integer or more, got {got}.")
    return [int(s) for s in _distinct("seeds", seeds)]


def _check_links(links: Any) -> tuple[str, ...]:
    links = (links,) if isinstance(links, str) else tuple(links)
    links = tuple(plain_value(link) for link in links)
    unknown = [link for link in links if link not in LINKS]
    if unknown or not links:
        got = repr(unknown[0]) if unknown else "none"
        raise ValueError(f"links must be among {', '.join(LINKS)}, got {got}.")
    return tuple(_distinct("links", links))


def _distinct(name: str, values: Sequence[Any]) -> Sequence[Any]:
    """A row that is there twice would be computed twice and averaged with itself."""
    twice = [v for v in dict.fromkeys(values) if list(values).count(v) > 1]
    if twice:
        raise ValueError(f"{name} must differ, got {twice[0]!r} more than once.")
    return values


def _check_tune(tune: Any, val_loader: Any) -> Tuning:
    allowed = (Tuning.MARGLIK, Tuning.GRIDSEARCH, Tuning.NONE)
    names = ", ".join(repr(t.value) for t in allowed)
    if plain_value(tune) not in [t.value for t in allowed]:
        raise ValueError(f"tune must be one of {names}, got {tune!r}.")
    if Tuning(tune) is Tuning.GRIDSEARCH and val_loader is None:
        raise ValueError(
            "tune='gridsearch' chooses the prior on validation data: pass val_loader, "
            "or use tune='marglik'."
        )
    return Tuning(tune)


def _positive(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name} must be one positive number, got {value!r}.")
    check_positive(name, number)
    return number
