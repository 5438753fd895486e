"""Losses, calibration errors and out-of-distribution scores of predictions.

Searches and reports use the same definitions. NaN, probabilities that do not sum to one
and classes out of range are errors; class indices of -100 are not observed, as in
`torch.nn.CrossEntropyLoss`, and left out. Index legend: N data, C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

#: Class index of targets that are not observed.
IGNORED = -100

#: A probability of zero counts as this, the smallest normal float32 (87.3 nats).
SMALLEST = torch.finfo(torch.float32).tiny

#: Nominal levels of the reported central intervals, and of their mean error.
COVERAGE_LEVELS = (0.5, 0.9, 0.95)
CALIBRATION_LEVELS = tuple(i / 20 for i in range(1, 20))

#: Sums of probabilities may differ from one by this: half precision does.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class ReliabilityCurve:
    """Mean confidence, accuracy and number of predictions per non-empty bin."""

    confidence: list[float]
    accuracy: list[float]
    count: list[int]


# --- classification: probs (N, C), targets (N,) ------------------------------------


def accuracy(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the share of correct predictions."""
    return classification_metrics(probs, targets)["accuracy"]


def nll(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the mean negative log-probability of the targets.

    Targets are class indices `(N,)`, or class probabilities `(N, C)`, for which this is
    the cross-entropy. A probability of zero counts as 87.3 nats, so that one underflow
    does not make the mean infinite.

    >>> round(nll(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])), 4)
    0.5108
    """
    return float(nll_per_example(probs, targets).mean())


def nll_per_example(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the terms of `nll`, `(N,)` less those not observed, float64."""
    if targets.shape == probs.shape and targets.is_floating_point():
        _check_probabilities("targets", targets)
        _check_probabilities("probs", probs)
        return -(targets.double() * _log(probs)).sum(-1)
    probs, targets = _observed(probs, targets)
    return -_log(probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1))


def bernoulli_nll_per_example(
    probs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the negative log-probability of C labels, `(N,)`, float64: `targets`
    `(N, C)` are 0 or 1, or probabilities between, `probs` `(N, C)` those predicted."""
    _check_values(probs=probs, targets=targets)
    _check_probabilities("probs", probs, sum_to_one=False)
    _check_probabilities("targets", targets, sum_to_one=False)
    # 1 − p in float64: in float32 it would lose all digits of a small p
    absent = _log(1.0 - probs.double())
    y = targets.double()
    return -(y * _log(probs) + (1.0 - y) * absent).sum(-1)


def ece(probs: torch.Tensor, targets: torch.Tensor, n_bins: int = 15) -> float:
    """Return the expected calibration error: equal bins of confidence, ℓ1 norm.

    >>> probs = torch.tensor([[0.8, 0.2]] * 5)
    >>> round(ece(probs, torch.tensor([0, 0, 0, 0, 1])), 4)  # 80 % sure, 80 % right
    0.0
    """
    return classification_metrics(probs, targets, n_bins)["ece"]


def reliability_curve(
    probs: torch.Tensor, targets: torch.Tensor, n_bins: int = 15
) -> ReliabilityCurve:
    """Return the bins behind `ece`, for a reliability diagram."""
    confidence, correct, bins = _confidence(*_observed(probs, targets), n_bins)
    count = bins.sum(0)
    sums = (bins * each.unsqueeze(-1) for each in (confidence, correct))
    mean, share = ((each.sum(0) / count)[count > 0].tolist() for each in sums)
    return ReliabilityCurve(mean, share, count[count > 0].long().tolist())


def _confidence(
    probs: torch.Tensor, targets: torch.Tensor, n_bins: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return confidences `(N,)`, which were right, and bins one-hot `(N, n_bins)`."""
    confidence, predicted = probs.double().max(-1)
    index = (confidence * n_bins).long().clamp(0, n_bins - 1)
    bins = torch.nn.functional.one_hot(index, n_bins).double()
    return confidence, (predicted == targets).double(), bins


def brier(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the mean of Σ_c (p_c − 1[y = c])², in [0, 2]."""
    return classification_metrics(probs, targets)["brier"]


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """Return −Σ_c p_c log p_c in nats over the last dimension, with 0 log 0 = 0.

    In the dtype of its argument, and differentiable where p > 0.

    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    return torch.special.entr(probs).sum(-1)


def binary_entropy(probs: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of each label with probability p, elementwise."""
    return torch.special.entr(probs) + torch.special.entr(1 - probs)


def ood_auroc(score_in: torch.Tensor, score_ood: torch.Tensor) -> float:
    """Return the AUROC of telling out-of-distribution inputs by a score.

    Scores `(N,)` and `(N',)` are larger where predictions are less certain.

    >>> ood_auroc(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.7, 0.9]))
    1.0
    """
    _check_values(score_in=score_in)
    _check_values(score_ood=score_ood)
    inside = score_in.double().sort().values
    ood = score_ood.double().to(inside)
    below, up_to = (torch.searchsorted(inside, ood, right=r) for r in (False, True))
    return float((below + up_to).double().mean() / (2 * len(inside)))  # ties: one half


def classification_metrics(
    probs: torch.Tensor, targets: torch.Tensor, n_bins: int = 15
) -> dict[str, float]:
    """Return accuracy, nll, ece and brier of predictions `(N, C)`."""
    terms = classification_terms(probs, targets, n_bins)
    return {name: float(score(name, term.mean(0))) for name, term in terms.items()}


def classification_terms(
    probs: torch.Tensor, targets: torch.Tensor, n_bins: int = 15
) -> dict[str, torch.Tensor]:
    """Return what these scores are means of, by name: `(N,)`, for the bins of the
    calibration error `(N, n_bins)`; of observed examples, float64."""
    probs, targets = _observed(probs, targets)
    confidence, correct, bins = _confidence(probs, targets, n_bins)
    likely = probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return {
        "accuracy": correct,
        "nll": -_log(likely),
        "ece": bins * (correct - confidence).unsqueeze(-1),
        "brier": probs.double().square().sum(-1) - 2 * likely.double() + 1,
    }


def score(name: str, means: torch.Tensor) -> torch.Tensor:
    """Return a score, given the means of its terms over examples."""
    if name == "ece":
        return means.abs().sum(-1)
    return means.sqrt() if name == "rmse" else means


# --- regression: mean (N, C), variance (N, C) or (N, C, C), targets (N, C) ----------


def rmse(mean: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the root mean squared error over all N·C entries."""
    _check_values(mean=mean, targets=targets)
    return float((mean.double() - targets.double()).square().mean().sqrt())


def gaussian_nll(
    mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
) -> float:
    """Return −log N(y; mean, variance), summed over the outputs, mean over N.

    `variance` has variances `(N, C)` of independent outputs, or covariances
    `(N, C, C)`, with the observation noise in them.

    >>> zero, one = torch.zeros(2, 1), torch.ones(2, 1)
    >>> round(gaussian_nll(mean=zero, variance=one, targets=one), 4)  # ½ log 2π + ½
    1.4189
    """
    return float(gaussian_nll_per_example(mean, variance, targets).mean())


def gaussian_nll_per_example(
    mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the terms of `gaussian_nll`, `(N,)`, float64."""
    _check_values(mean=mean, targets=targets)
    return -_gaussian(mean, variance).log_prob(targets.double())


def interval_coverage(
    mean: torch.Tensor,
    std: torch.Tensor,
    targets: torch.Tensor,
    levels: Sequence[float] = COVERAGE_LEVELS,
) -> list[float]:
    """Return the share of targets inside the central interval of each nominal level.

    `mean`, `std` and `targets` are `(N, C)`; each output counts by its marginal.

    >>> mean, std = torch.zeros(4, 1), torch.ones(4, 1)
    >>> interval_coverage(mean, std, torch.tensor([[-3.0], [-0.1], [0.1], [1.0]]))
    [0.5, 0.75, 0.75]
    """
    _check_values(mean=mean, std=std, targets=targets)
    # y lies in the central interval of level c when |Φ(z) − ½| ≤ c/2,
    # that is, erf(|z|/√2) ≤ c.
    z = (targets.double() - mean.double()).abs() / std.double()
    needed = torch.erf(z / math.sqrt(2.0))
    return [float((needed <= level).double().mean()) for level in levels]


def gaussian_kl(
    mean: torch.Tensor,
    covariance: torch.Tensor,
    ref_mean: torch.Tensor,
    ref_covariance: torch.Tensor,
) -> float:
    """Return the mean over N of KL(N(mean, covariance) ‖ N(ref_mean, ref_covariance)).

    With exact linearised Laplace as the reference this is the approximation error of
    Deng et al. 2022, Table 7.

    >>> mean, covariance = torch.zeros(1, 1), torch.ones(1, 1, 1)
    >>> gaussian_kl(mean, covariance, mean + 2, covariance)  # ½·2²
    2.0
    """
    _check_values(mean=mean, ref_mean=ref_mean)
    _check_values(covariance=covariance, ref_covariance=ref_covariance)
    gaussians = _gaussian(mean, covariance), _gaussian(ref_mean, ref_covariance)
    return float(kl_divergence(*gaussians).mean())


def regression_metrics(
    mean: torch.Tensor,
    variance: torch.Tensor,
    targets: torch.Tensor,
    levels: Sequence[float] = COVERAGE_LEVELS,
) -> dict[str, float]:
    """Return nll, rmse, coverage, width and calibration of Gaussian predictives.

    `width_95` is the mean width of the central 95 % intervals, `calibration` the mean
    distance of observed from nominal coverage over the levels 5 %, …, 95 %.
    """
    terms = regression_terms(mean, variance, targets)
    scores = {name: float(score(name, term.mean(0))) for name, term in terms.items()}
    marginal = variance.diagonal(dim1=-2, dim2=-1) if variance.ndim == 3 else variance
    std = marginal.double().sqrt()
    for level, share in zip(
        levels, interval_coverage(mean, std, targets, levels), strict=True
    ):
        scores[f"coverage_{round(100 * level)}"] = share
    scores["width_95"] = 2 * 1.959964 * float(std.mean())
    observed = interval_coverage(mean, std, targets, CALIBRATION_LEVELS)
    gaps = torch.tensor(observed).double() - torch.tensor(CALIBRATION_LEVELS).double()
    return {**scores, "calibration": float(gaps.abs().mean())}


def regression_terms(
    mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return what nll and rmse are means of, by name, `(N,)`, float64."""
    losses = gaussian_nll_per_example(mean, variance, targets)
    squares = (mean.double() - targets.double()).square().mean(-1)
    return {"nll": losses, "rmse": squares}


# --- checks --------------------------------------------------------------------------


def _log(probs: torch.Tensor) -> torch.Tensor:
    """Return the logarithm in float64, finite for a probability of zero."""
    return probs.double().clamp_min(SMALLEST).log()


def _observed(
    probs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities and classes of the observed rows, checked."""
    integers = not targets.is_floating_point() and not targets.is_complex()
    if probs.ndim != 2 or targets.shape != probs.shape[:1] or not integers:
        raise ValueError(
            "Expected probs (N, C) and integer targets (N,), got shapes "
            f"{tuple(probs.shape)} and {tuple(targets.shape)} of {targets.dtype}."
        )
    _check_probabilities("probs", probs)
    known = targets != IGNORED
    probs, targets = probs[known], targets[known].long()
    if not len(targets):
        raise ValueError("Expected at least one observed target, got none.")
    low, high, C = int(targets.min()), int(targets.max()), probs.shape[-1]
    if low < 0 or high >= C:
        raise ValueError(
            f"targets must be classes 0..{C - 1} (or {IGNORED}, not observed), got "
            f"{low} to {high}."
        )
    return probs, targets


def _check_probabilities(
    name: str, probs: torch.Tensor, sum_to_one: bool = True
) -> None:
    if probs.ndim != 2 or not len(probs):
        raise ValueError(
            f"{name} must be (N, C) with at least one row, got {tuple(probs.shape)}."
        )
    bad = ~((probs >= 0) & (probs <= 1 + TOLERANCE))  # also NaN
    if sum_to_one:
        bad = bad | ((probs.double().sum(-1, keepdim=True) - 1).abs() > TOLERANCE)
    if bad.any():
        what = "between 0 and 1" + " that sum to 1 per row" * sum_to_one
        raise ValueError(
            f"{name} must be probabilities {what}; {int(bad.any(-1).sum())} of "
            f"{len(bad)} rows are not. Pass logits through a softmax or sigmoid, and "
            "look for NaN in the predictions."
        )


def _check_values(**values: torch.Tensor) -> None:
    """Refuse values that are not finite, or not all of one shape."""
    name, first = next(iter(values.items()))
    for other, value in values.items():
        if value.shape != first.shape:
            raise ValueError(
                f"{name} and {other} must have the same shape, got "
                f"{tuple(first.shape)} and {tuple(value.shape)}."
            )
        if not value.numel() or not value.isfinite().all():
            what = "NaN or infinity" if value.numel() else "no values"
            raise ValueError(f"{other} must be finite values, got {what}.")


def _gaussian(
    mean: torch.Tensor, variance: torch.Tensor
) -> Independent | MultivariateNormal:
    """Return a Gaussian for each of N examples, in float64."""
    N, C = mean.shape if mean.ndim == 2 else (0, 0)
    if variance.shape not in ((N, C), (N, C, C)):
        raise ValueError(
            "Expected mean (N, C) and variances (N, C) or covariance (N, C, C), got "
            f"shapes {tuple(mean.shape)} and {tuple(variance.shape)}."
        )
    _check_values(variance=variance)
    mean, variance = mean.double(), variance.double()
    if variance.ndim == 2:
        if not (variance > 0).all():
            raise ValueError(f"variance must be positive, got {float(variance.min())}.")
        return Independent(Normal(mean, variance.sqrt()), 1)
    factor, failed = torch.linalg.cholesky_ex(variance)
    if failed.any():
        raise ValueError(
            f"{int((failed > 0).sum())} of {len(failed)} covariances are not positive "
            "definite. Add the variance of the observation noise to them."
        )
    return MultivariateNormal(mean, scale_tril=factor)
