"""Paired bootstrap: is a difference between two rows luck of the test examples?

The test examples are drawn again with replacement, the same draws for every row. Each
row keeps its metrics on these draws; their differences to those of another row are
paired example by example, so that what is hard for both cancels (Efron and Tibshirani
1993). Nothing of the size of the data has to be kept.

Index legend: N data, C outputs, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from laplace_ella import metrics

__all__ = [
    "Difference",
    "auroc_replicates",
    "classification_replicates",
    "difference",
    "regression_replicates",
]

#: R. The standard deviation of 200 values is known to 5 %.
N_DRAWS = 200

#: Half-width of a 95 % interval in standard deviations.
WIDTH = 1.96


@dataclass(frozen=True)
class Difference:
    """A row's value of a metric less that of the best row.

    Attributes
    ----------
    value : float
    half_width : float or None
        of the 95 % interval over draws of test examples; None where it is not known
    """

    value: float
    half_width: float | None

    @property
    def is_clear(self) -> bool:
        """Whether zero is outside the interval; a difference without one is clear."""
        return self.half_width is None or abs(self.value) > self.half_width


def difference(
    value: float,
    best: float,
    replicates: Sequence[float] | None,
    best_replicates: Sequence[float] | None,
) -> Difference:
    """Return the difference of two values, with the interval of paired replicates."""
    if not replicates or not best_replicates or len(replicates) != len(best_replicates):
        return Difference(value - best, 0.0 if value == best else None)
    pairs = torch.tensor(replicates).double() - torch.tensor(best_replicates).double()
    half_width = WIDTH * float(pairs.std())
    return Difference(value - best, half_width if math.isfinite(half_width) else None)


def draws(n: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Yield the examples `(N,)` of each draw."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(N_DRAWS):
        yield torch.randint(n, (n,), generator=generator)


def _means(terms: torch.Tensor) -> torch.Tensor:
    """Return means of terms `(N,)` or `(N, k)` over each draw, `(R,)` or `(R, k)`."""
    return torch.stack([terms[drawn].mean(0) for drawn in draws(len(terms))])


def classification_replicates(
    probs: torch.Tensor, targets: torch.Tensor, n_bins: int
) -> dict[str, list[float]]:
    """Return `metrics.classification_metrics` of every draw, by name."""
    p = probs.double()
    confidence, predicted = p.max(-1)
    correct = (predicted == targets).double()
    onehot = torch.nn.functional.one_hot(targets, p.shape[-1])
    terms = {
        "accuracy": correct,
        "nll": metrics.nll_per_example(probs, targets),
        "brier": (p - onehot).square().sum(-1),
    }
    index = (confidence * n_bins).long().clamp(0, n_bins - 1)
    gap = torch.zeros(len(p), n_bins, dtype=torch.float64)
    gap.scatter_(1, index.unsqueeze(-1), (correct - confidence).unsqueeze(-1))
    found = {name: _means(values).tolist() for name, values in terms.items()}
    return {**found, "ece": _means(gap).abs().sum(-1).tolist()}


def regression_replicates(
    mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
) -> dict[str, list[float]]:
    """Return nll and rmse of every draw; `variance` `(N, C)` has the noise in it."""
    squares = (targets - mean).double().square().mean(-1)
    losses = metrics.gaussian_nll_per_example(mean, variance, targets)
    return {"nll": _means(losses).tolist(), "rmse": _means(squares).sqrt().tolist()}


def auroc_replicates(score_in: torch.Tensor, score_out: torch.Tensor) -> list[float]:
    """Return `metrics.ood_auroc` of every draw of both sets, drawn independently."""
    pairs = zip(draws(len(score_in), 0), draws(len(score_out), 1), strict=True)
    return [metrics.ood_auroc(score_in[i], score_out[o]) for i, o in pairs]
