"""Which of several settings to take, when their validation losses are known.

Index legend: N data, C outputs, S settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

#: Share of the posterior where the validation data do not ask for another one.
USUAL_SHARE = 0.1


def standard_errors(
    losses: torch.Tensor, reference: int, unseen: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the standard errors `(S,)` of the mean losses' differences to one of them.

    The differences scatter as they do among the N examples, and by one example more:
    that N predictions are right does not tell that the next one is. `unseen` has its
    loss, the mean over the inputs and over all C labels alike. It is the pseudo-example
    of Laplace's rule of succession (and of Platt's scaling): a setting that would be
    ruined by one example in N + 1 is not told from others by N that are right.

    Parameters
    ----------
    losses : torch.Tensor
        `(S, N)`, per setting and example
    reference : int
        the setting that the others are compared with
    unseen : torch.Tensor, optional
        `(S,)`, the loss of the example more; none for regression
    """
    if unseen is not None:
        losses = torch.cat([losses, unseen.unsqueeze(-1)], -1)
    n = losses.shape[-1]
    differences = losses - losses[reference]
    if n < 2:
        return torch.full_like(losses[:, 0], math.inf)
    return differences.std(-1) / math.sqrt(n)


def choose(
    losses: torch.Tensor,
    taus: Sequence[float],
    shares: Sequence[float],
    temperatures: Sequence[float],
    unseen: torch.Tensor | None = None,
    at_most: float = math.inf,
) -> int:
    """Return the index of the setting to take, of S whose losses are known.

    Of the settings within one standard error of the best, and with a mean loss of at
    most `at_most`: the one that sharpens predictions least (a scale below 1), then with
    the posterior's share nearest to `USUAL_SHARE`, then with T nearest to 1.

    Examples
    --------
    >>> losses = torch.tensor([[0.2, 0.4, 0.2, 0.4], [0.21, 0.38, 0.22, 0.41]])
    >>> choose(losses, taus=[1.0, 1.1], shares=[0.0, 0.1], temperatures=[1.0, 1.0])
    1
    """
    mean = losses.mean(-1)
    if not mean.isfinite().any():
        raise ValueError(
            f"The validation loss is NaN or infinite for all {len(losses)} settings, "
            "so none can be chosen; nothing was changed. Check the validation data."
        )
    best = int(mean.nan_to_num(math.inf).argmin())
    errors = standard_errors(losses, best, unseen)
    good = (mean - mean[best] <= errors) & (mean <= at_most)
    keys = [
        (max(0.5 * math.log((1 - s) / tau**2), 0.0), abs(s - USUAL_SHARE), abs(log_T))
        for tau, s, log_T in zip(taus, shares, map(math.log, temperatures), strict=True)
    ]
    return min({best, *good.nonzero().flatten().tolist()}, key=keys.__getitem__)
