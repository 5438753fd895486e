"""Paired bootstrap: intervals of the differences between two rows.

The test examples are drawn again with replacement, the same draws for every row, and
each row keeps its metrics on these draws. Subtracting those of another row pairs the
two example by example (Efron and Tibshirani 1993).

Index legend: N data, C outputs, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from laplace_ella import metrics

#: R. The standard deviation of 200 values is known to 5 %.
N_DRAWS = 200


@dataclass(frozen=True)
class Difference:
    """A row's distance from the best row, positive if it is worse, and half of the 95 %
    interval over draws of test examples; None where that is not known."""

    value: float
    half_width: float | None

    @classmethod
    def of(
        cls, value: float, replicates: Sequence[float], others: Sequence[float]
    ) -> Difference:
        """Return a difference with the interval of paired replicates."""
        if not replicates or len(replicates) != len(others):
            return cls(value, 0.0 if value == 0 else None)
        pairs = torch.tensor(replicates).double() - torch.tensor(others).double()
        width = 1.96 * float(pairs.std())
        return cls(value, width if math.isfinite(width) else None)

    @property
    def is_clear(self) -> bool:
        """Whether zero is outside the interval; a difference without one is clear."""
        return self.half_width is None or abs(self.value) > self.half_width


def draws(n: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Yield the examples `(N,)` of each of the R draws."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(N_DRAWS):
        yield torch.randint(n, (n,), generator=generator)


def replicates(terms: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return scores of every draw, by name, from their terms `(N,)` or `(N, k)`."""
    found = {}
    for name, term in terms.items():
        means = [term[drawn].mean(0) for drawn in draws(len(term))]
        found[name] = metrics.score(name, torch.stack(means)).tolist()
    return found


def auroc_replicates(score_in: torch.Tensor, score_out: torch.Tensor) -> list[float]:
    """Return `metrics.ood_auroc` of every draw of both sets, drawn independently."""
    pairs = zip(draws(len(score_in), 0), draws(len(score_out), 1), strict=True)
    return [metrics.ood_auroc(score_in[i], score_out[o]) for i, o in pairs]
