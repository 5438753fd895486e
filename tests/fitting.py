"""How the tests build and fit the class under test."""

from __future__ import annotations

import warnings

import torch

from laplace_ella import ELLALaplace
from laplace_ella.errors import RankWarning

EVERY_PAIR = 10**6
"""A sample size that takes every pair (x, i) of any case exactly once."""


def build(case, cls=ELLALaplace, **kwargs):
    """An unfitted approximation of a case, all pairs sampled unless told."""
    options = {
        "subsample_size": EVERY_PAIR,
        "n_eigenvalues": 6,
        "complement": "drop",
        "evidence": "basis",
    }
    options = options | case.kwargs | kwargs
    return cls(case.model, case.likelihood, **options)


def fit(case, cls=ELLALaplace, loader=None, **kwargs):
    """A fitted approximation of a case; a rank below the request is expected."""
    la = build(case, cls, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        la.fit(case.loader() if loader is None else loader)
    return la


def assert_close(actual, expected, rtol=1e-8, atol=1e-10):
    """Equal values, shapes and dtypes, for values given in float64."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
