"""How much of a difference between two rows is luck of the test examples.

The test examples are drawn again with replacement, the same draws for every row. Each
row keeps the values of its metrics on these draws; subtracting those of another row
pairs the two example by example, so that what is hard for both cancels (Efron and
Tibshirani 1993, paired bootstrap). Nothing of the size of the data has to be kept.

Index legend: N data, C outputs, R draws, W times that an example was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

#: Draws. The standard deviation of 200 values is known to 5 %.
N_DRAWS = 200

#: Half-width of a 95 % interval in standard deviations.
WIDTH = 1.96

#: Floats that the weights of one chunk of draws may hold.
CHUNK = 2**22

Replicates = dict[str, list[float]]


@dataclass(frozen=True)
class Difference:
    """A row's value of a metric less the best row's.

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
        """Whether the interval leaves out zero; a difference without one is."""
        return self.half_width is None or abs(self.value) > self.half_width


def difference(
    value: float,
    best: float,
    replicates: Sequence[float] | None,
    best_replicates: Sequence[float] | None,
) -> Difference:
    """Difference of two values, with the interval of their paired replicates."""
    if not replicates or not best_replicates or len(replicates) != len(best_replicates):
        return Difference(value - best, 0.0 if value == best else None)
    pairs = torch.tensor(replicates).double() - torch.tensor(best_replicates).double()
    half_width = WIDTH * float(pairs.std())
    return Difference(value - best, half_width if math.isfinite(half_width) else None)


# --- draws ---------------------------------------------------------------------------


def _weights(n: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Chunks `(r, N)`, R rows in all: how often each example was drawn."""
    generator = torch.Generator().manual_seed(seed)
    left = N_DRAWS
    while left:
        rows = min(left, max(1, CHUNK // n))
        drawn = torch.randint(n, (rows, n), generator=generator)
        ones = torch.ones((), dtype=torch.float64).expand(rows, n)
        yield torch.zeros(rows, n, dtype=torch.float64).scatter_add_(1, drawn, ones)
        left -= rows


def _replicates(
    n: int, values: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
) -> Replicates:
    """Weights `(r, N)` → `(r,)`, by name, for all draws."""
    found: dict[str, list[float]] = {name: [] for name in values}
    for weights in _weights(n):
        for name, value in values.items():
            found[name] += value(weights).tolist()
    return found


# --- metrics of weighted examples ----------------------------------------------------


def classification_replicates(
    probs: torch.Tensor, targets: torch.Tensor, n_bins: int
) -> Replicates:
    """`metrics.classification_metrics` of every draw, by name."""
    n = len(probs)
    p = probs.double()
    confidence, predicted = p.max(-1)
    correct = (predicted == targets).double()
    chosen = p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    surprise = metrics.nll_per_example(probs, targets)
    # Σ_c (p_c − 1[c = y])² = Σ_c p_c² − 2p_y + 1
    distance = p.square().sum(-1) - 2 * chosen + 1
    index = (confidence * n_bins).long().clamp(0, n_bins - 1)
    gap = torch.zeros(n, n_bins, dtype=torch.float64)
    gap.scatter_(1, index.unsqueeze(-1), (correct - confidence).unsqueeze(-1))
    return _replicates(
        n,
        {
            "accuracy": lambda w: w @ correct / n,
            "nll": lambda w: w @ surprise / n,
            "ece": lambda w: (w @ gap).abs().sum(-1) / n,
            "brier": lambda w: w @ distance / n,
        },
    )


def regression_replicates(
    mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
) -> Replicates:
    """nll and rmse of every draw; `variance (N, C)` has the noise in it."""
    n = len(mean)
    squares = (targets - mean).double().square().mean(-1)
    surprise = metrics.gaussian_nll_per_example(mean, variance, targets)
    return _replicates(
        n,
        {
            "nll": lambda w: w @ surprise / n,
            "rmse": lambda w: (w @ squares / n).sqrt(),
        },
    )


def auroc_replicates(score_in: torch.Tensor, score_out: torch.Tensor) -> list[float]:
    """`metrics.ood_auroc` of every draw of test and out-of-distribution examples."""
    n_in, n_out = len(score_in), len(score_out)
    scores = torch.cat([score_in, score_out]).double()
    levels, rank = scores.unique(return_inverse=True)

    def counts(weights: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """How many of the drawn examples have each score, (r, levels)."""
        empty = torch.zeros(len(weights), len(levels), dtype=torch.float64)
        return empty.index_add_(1, ranks, weights)

    found: list[torch.Tensor] = []
    # Draws of the two sets are independent, and each in step with those of other rows.
    pairs = zip(_one_by_one(n_in, 0), _one_by_one(n_out, 1), strict=True)
    for inside, outside in pairs:
        below = counts(inside, rank[:n_in])
        above = counts(outside, rank[n_in:])
        # Pairs in which the outer score is larger; ties count half.
        won = above * (below.cumsum(-1) - below / 2)
        found.append(won.sum(-1) / (n_in * n_out))
    return torch.cat(found).tolist()


def _one_by_one(n: int, seed: int) -> Iterator[torch.Tensor]:
    for weights in _weights(n, seed):
        yield from weights.split(1)
