"""How good predictions are: losses, calibration and out-of-distribution scores.

The one definition of each, for tuning and reports alike, so that what is tuned is what
is judged. Scores are plain floats. Accuracy, calibration error, AUROC and mean squared
error are torchmetrics'; what it lacks is written here. Index legend: N data, C outputs.

Examples
--------
>>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
>>> targets = torch.tensor([0, 0])
>>> accuracy(probs, targets), round(nll(probs, targets), 4)
(0.5, 0.5108)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchmetrics.functional import mean_squared_error
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_calibration_error,
)

__all__ = [
    "ConfidenceCurve",
    "ReliabilityCurve",
    "accuracy",
    "bernoulli_nll",
    "bernoulli_nll_per_example",
    "binary_entropy",
    "brier",
    "classification_metrics",
    "ece",
    "entropy",
    "error_versus_confidence",
    "gaussian_kl",
    "gaussian_nll",
    "gaussian_nll_per_example",
    "interval_calibration_error",
    "interval_coverage",
    "nll",
    "nll_per_example",
    "ood_auroc",
    "regression_metrics",
    "reliability_curve",
    "rmse",
]

#: Class index of targets that are not observed, as in `torch.nn.CrossEntropyLoss`.
IGNORED = -100

#: A probability of zero counts as this, the smallest normal float32 (87.3 nats).
SMALLEST = torch.finfo(torch.float32).tiny

#: Nominal levels of the reported central intervals.
COVERAGE_LEVELS = (0.5, 0.9, 0.95)

#: Nominal levels over which `interval_calibration_error` averages.
CALIBRATION_LEVELS = tuple(i / 20 for i in range(1, 20))


@dataclass(frozen=True)
class ReliabilityCurve:
    """Confidence against accuracy in equal bins of confidence.

    Attributes
    ----------
    confidence, accuracy : list of float
        means of the non-empty bins
    count : list of int
        predictions in each of them

    Examples
    --------
    >>> probs, targets = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([0, 1])
    >>> reliability_curve(probs, targets)
    ReliabilityCurve(confidence=[0.5, 1.0], accuracy=[0.0, 1.0], count=[1, 1])
    """

    confidence: list[float]
    accuracy: list[float]
    count: list[int]


@dataclass(frozen=True)
class ConfidenceCurve:
    """Error of the predictions on one side of a confidence threshold.

    Attributes
    ----------
    threshold : list of float
        τ, only those with at least one prediction on the chosen side
    error : list of float
        error rate of these predictions
    fraction : list of float
        their share of all predictions

    Examples
    --------
    >>> probs, targets = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])
    >>> error_versus_confidence(probs, targets, thresholds=[0.7, 1.0])
    ConfidenceCurve(threshold=[0.7, 1.0], error=[1.0, 0.5], fraction=[0.5, 1.0])
    """

    threshold: list[float]
    error: list[float]
    fraction: list[float]


# --- classification: probs (N, C), targets (N,) ------------------------------------


def accuracy(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Share of correct predictions.

    Examples
    --------
    >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    0.5
    """
    _check_classification(probs, targets)
    return float(multiclass_accuracy(probs, targets, probs.shape[-1], average="micro"))


def nll(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean negative log-probability of the targets.

    A probability of zero counts as the smallest positive float32 (87.3 nats): one
    underflow should be visible in the mean, not replace it by infinity.

    Parameters
    ----------
    probs : torch.Tensor
        `(N, C)`
    targets : torch.Tensor
        class indices `(N,)`, of which -100 are left out, or class probabilities
        `(N, C)`, for which this is the cross-entropy

    Examples
    --------
    >>> round(nll(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])), 4)
    0.5108
    """
    return float(nll_per_example(probs, targets).mean())


def nll_per_example(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The terms of which `nll` is the mean, `(N,)` less those left out, float64.

    Examples
    --------
    >>> nll_per_example(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 0]))
    tensor([0.6931, 1.6094], dtype=torch.float64)
    """
    if targets.shape == probs.shape and targets.is_floating_point():
        _check_some(probs)
        return -(targets.double() * _log(probs)).sum(-1)
    _check_classification(probs, targets)
    observed = targets != IGNORED
    _check_some(targets[observed], "observed target")
    classes = torch.where(observed, targets, 0).long()
    chosen = probs.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    return -_log(chosen[observed])


def bernoulli_nll(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Negative log-probability of C labels, summed over the labels, mean over N.

    Parameters
    ----------
    probs : torch.Tensor
        `(N, C)`, the probability of each label
    targets : torch.Tensor
        `(N, C)`, 0 or 1, or a probability between

    Examples
    --------
    >>> probs, labels = torch.tensor([[0.5, 0.5]]), torch.tensor([[1, 0]])
    >>> round(bernoulli_nll(probs, labels), 4)
    1.3863
    """
    return float(bernoulli_nll_per_example(probs, targets).mean())


def bernoulli_nll_per_example(
    probs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The terms of which `bernoulli_nll` is the mean, `(N,)`, float64.

    Examples
    --------
    >>> probs = torch.tensor([[0.5, 0.5], [1.0, 0.5]])
    >>> bernoulli_nll_per_example(probs, torch.tensor([[1, 0], [1, 0]]))
    tensor([1.3863, 0.6931], dtype=torch.float64)
    """
    _check_same_shape("probs", probs, "targets", targets)
    _check_some(probs)
    # 1 − p in float64: in float32 it would lose all digits of a small p
    absent = _log(1.0 - probs.double())
    y = targets.double()
    return -(y * _log(probs) + (1.0 - y) * absent).sum(-1)


def _log(probs: torch.Tensor) -> torch.Tensor:
    """Logarithm in float64, finite for a probability of zero."""
    return probs.double().clamp_min(SMALLEST).log()


def ece(probs: torch.Tensor, targets: torch.Tensor, n_bins: int = 15) -> float:
    """Expected calibration error with equal bins and the ℓ1 norm.

    Examples
    --------
    >>> probs = torch.tensor([[0.8, 0.2]] * 5)
    >>> round(ece(probs, torch.tensor([0, 0, 0, 0, 1])), 4)  # 80 % sure, 80 % right
    0.0
    """
    _check_classification(probs, targets)
    # A sum of rounded probabilities can exceed one by an ulp; torchmetrics then takes
    # the input for logits.
    probs = probs.float().clamp(0.0, 1.0)
    return float(
        multiclass_calibration_error(
            probs, targets, probs.shape[-1], n_bins=n_bins, norm="l1"
        )
    )


def brier(probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean squared distance Σ_c (p_c − 1[y = c])² to the one-hot target, in [0, 2].

    Examples
    --------
    >>> round(brier(torch.tensor([[0.8, 0.2]]), torch.tensor([0])), 4)
    0.08
    """
    _check_classification(probs, targets)
    onehot = torch.nn.functional.one_hot(targets, probs.shape[-1]).double()
    # The mean over all N·C entries, times C: Brier's sum over the classes.
    return probs.shape[-1] * float(
        mean_squared_error(probs.double().flatten(), onehot.flatten())
    )


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """−Σ_c p_c log p_c in nats over the last dimension, with 0 log 0 = 0.

    In the dtype of its argument, and differentiable where p > 0.

    Examples
    --------
    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    return torch.special.entr(probs).sum(-1)


def binary_entropy(probs: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each label that is there with probability p, elementwise.

    Examples
    --------
    >>> binary_entropy(torch.tensor([1.0, 0.5]))
    tensor([0.0000, 0.6931])
    """
    return torch.special.entr(probs) + torch.special.entr(1 - probs)


def reliability_curve(
    probs: torch.Tensor, targets: torch.Tensor, n_bins: int = 15
) -> ReliabilityCurve:
    """The bins behind `ece`, for a reliability diagram.

    Examples
    --------
    >>> probs, targets = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])
    >>> reliability_curve(probs, targets, n_bins=5).accuracy
    [0.0, 1.0]
    """
    _check_classification(probs, targets)
    confidence, predicted = probs.double().max(-1)
    correct = (predicted == targets).double()
    index = (confidence * n_bins).long().clamp(0, n_bins - 1)
    count = torch.bincount(index, minlength=n_bins)
    filled = count > 0
    mean_confidence = torch.bincount(index, confidence, n_bins)[filled] / count[filled]
    mean_accuracy = torch.bincount(index, correct, n_bins)[filled] / count[filled]
    return ReliabilityCurve(
        mean_confidence.tolist(), mean_accuracy.tolist(), count[filled].tolist()
    )


def error_versus_confidence(
    probs: torch.Tensor,
    targets: torch.Tensor,
    ood_probs: torch.Tensor | None = None,
    thresholds: Sequence[float] | None = None,
    side: str = "below",
) -> ConfidenceCurve:
    """Error rate against a threshold τ on the confidence max_c p_c.

    Parameters
    ----------
    probs : torch.Tensor
        `(N, C)`, predictions on the test data
    targets : torch.Tensor
        `(N,)`
    ood_probs : torch.Tensor, optional
        `(N', C)`, predictions on out-of-distribution data; every one is an error
        (Deng et al. 2022, Fig. 4a: CIFAR-10 and SVHN together)
    thresholds : sequence of float, optional
        default 0, 0.02, …, 1
    side : {'below', 'above'}
        predictions with confidence ≤ τ, as in the paper, or ≥ τ, as in
        Lakshminarayanan et al. 2017

    Examples
    --------
    >>> probs, targets = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])
    >>> error_versus_confidence(probs, targets, thresholds=[0.7, 1.0]).error
    [1.0, 0.5]
    """
    _check_classification(probs, targets)
    if side not in ("below", "above"):
        raise ValueError(f"side must be 'below' or 'above', got {side!r}.")
    confidence, predicted = probs.double().max(-1)
    wrong = predicted != targets
    if ood_probs is not None:
        confidence = torch.cat([confidence, ood_probs.double().max(-1).values])
        always = torch.ones(len(ood_probs), dtype=torch.bool, device=wrong.device)
        wrong = torch.cat([wrong, always])
    if thresholds is None:
        thresholds = [i / 50 for i in range(51)]
    points: list[tuple[float, float, float]] = []
    for tau in thresholds:
        chosen = confidence <= tau if side == "below" else confidence >= tau
        if chosen.any():
            points.append(
                (
                    float(tau),
                    float(wrong[chosen].double().mean()),
                    float(chosen.double().mean()),
                )
            )
    return ConfidenceCurve(
        [tau for tau, _, _ in points],
        [error for _, error, _ in points],
        [fraction for _, _, fraction in points],
    )


def ood_auroc(score_in: torch.Tensor, score_ood: torch.Tensor) -> float:
    """AUROC of detecting out-of-distribution inputs by an uncertainty score.

    Parameters
    ----------
    score_in : torch.Tensor
        `(N,)`, larger means less certain (entropy, 1 − max p, predictive variance)
    score_ood : torch.Tensor
        `(N',)`, the same score on the out-of-distribution inputs

    Examples
    --------
    >>> ood_auroc(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.7, 0.9]))
    1.0
    """
    scores = torch.cat([score_in, score_ood]).double()
    if not scores.isfinite().all():
        raise ValueError("ood_auroc expects finite scores, got NaN or infinity.")
    labels = torch.cat(
        [torch.zeros_like(score_in).long(), torch.ones_like(score_ood).long()]
    )
    # torchmetrics squashes scores outside [0, 1] by a sigmoid, which ties large ones.
    # Ranks carry the same information and lie inside.
    ranks = scores.unique(return_inverse=True)[1].double()
    return float(binary_auroc(ranks / ranks.max().clamp_min(1.0), labels))


def classification_metrics(
    probs: torch.Tensor, targets: torch.Tensor, n_bins: int = 15
) -> dict[str, float]:
    """accuracy, nll, ece and brier of predictions `(N, C)`.

    Examples
    --------
    >>> probs, targets = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])
    >>> sorted(classification_metrics(probs, targets))
    ['accuracy', 'brier', 'ece', 'nll']
    """
    return {
        "accuracy": accuracy(probs, targets),
        "nll": nll(probs, targets),
        "ece": ece(probs, targets, n_bins),
        "brier": brier(probs, targets),
    }


# --- regression: mean (N, C), variance (N, C) or (N, C, C), targets (N, C) ----------


def rmse(mean: torch.Tensor, targets: torch.Tensor) -> float:
    """Root mean squared error over all N·C entries.

    Examples
    --------
    >>> rmse(torch.tensor([[0.0], [0.0]]), torch.tensor([[3.0], [3.0]]))
    3.0
    """
    _check_same_shape("mean", mean, "targets", targets)
    return float(
        mean_squared_error(
            mean.double().flatten(), targets.double().flatten(), squared=False
        )
    )


def gaussian_nll(
    mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
) -> float:
    """−log N(y; mean, variance), summed over the outputs, mean over N.

    Parameters
    ----------
    mean : torch.Tensor
        `(N, C)`
    variance : torch.Tensor
        variances `(N, C)` of independent outputs, or covariances `(N, C, C)`; with the
        observation noise in them
    targets : torch.Tensor
        `(N, C)`

    Examples
    --------
    >>> zero, one = torch.zeros(2, 1), torch.ones(2, 1)
    >>> round(gaussian_nll(mean=zero, variance=one, targets=one), 4)  # ½ log 2π + ½
    1.4189
    """
    return float(gaussian_nll_per_example(mean, variance, targets).mean())


def gaussian_nll_per_example(
    mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The terms of which `gaussian_nll` is the mean, `(N,)`, float64.

    Examples
    --------
    >>> zero, one = torch.zeros(2, 1), torch.ones(2, 1)
    >>> gaussian_nll_per_example(mean=zero, variance=one, targets=one).shape
    torch.Size([2])
    """
    _check_same_shape("mean", mean, "targets", targets)
    _check_gaussian(mean, variance)
    _check_some(mean)
    residual = targets.double() - mean.double()
    variance = variance.double()
    if variance.ndim == 2:
        squares = residual.square() / variance  # (N, C)
        log_det = variance.log().sum(-1)
    else:
        factor = torch.linalg.cholesky(variance)  # (N, C, C)
        whitened = torch.linalg.solve_triangular(
            factor, residual.unsqueeze(-1), upper=False
        )
        squares = whitened.squeeze(-1).square()
        log_det = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    constant = mean.shape[-1] * math.log(2.0 * math.pi)
    return 0.5 * (squares.sum(-1) + log_det + constant)


def interval_coverage(
    mean: torch.Tensor,
    std: torch.Tensor,
    targets: torch.Tensor,
    levels: Sequence[float] = COVERAGE_LEVELS,
) -> list[float]:
    """Share of the targets inside the central interval of each nominal level.

    mean, std, targets all `(N, C)`; each output counts by its marginal.

    Examples
    --------
    >>> mean, std = torch.zeros(4, 1), torch.ones(4, 1)
    >>> interval_coverage(mean, std, torch.tensor([[-3.0], [-0.1], [0.1], [1.0]]))
    [0.5, 0.75, 0.75]
    """
    _check_same_shape("mean", mean, "std", std)
    _check_same_shape("mean", mean, "targets", targets)
    # y lies in the central interval of level c when |Φ(z) − ½| ≤ c/2,
    # that is, erf(|z|/√2) ≤ c.
    z = (targets.double() - mean.double()).abs() / std.double()
    needed = torch.erf(z / math.sqrt(2.0))
    return [float((needed <= level).double().mean()) for level in levels]


def interval_calibration_error(
    mean: torch.Tensor,
    std: torch.Tensor,
    targets: torch.Tensor,
    levels: Sequence[float] = CALIBRATION_LEVELS,
) -> float:
    """Mean distance of observed from nominal coverage over the levels 5 %, …, 95 %.

    Examples
    --------
    >>> targets = torch.special.ndtri(torch.linspace(0.001, 0.999, 999)).unsqueeze(-1)
    >>> zero, one = torch.zeros(999, 1), torch.ones(999, 1)
    >>> interval_calibration_error(mean=zero, std=one, targets=targets) < 0.01
    True
    """
    observed = interval_coverage(mean, std, targets, levels)
    return sum(abs(o - c) for o, c in zip(observed, levels, strict=True)) / len(levels)


def gaussian_kl(
    mean: torch.Tensor,
    covariance: torch.Tensor,
    ref_mean: torch.Tensor,
    ref_covariance: torch.Tensor,
) -> float:
    """Mean over N of KL(N(mean, covariance) ‖ N(ref_mean, ref_covariance)).

    With exact linearised Laplace as the reference this is the approximation error of
    Deng et al. 2022, Table 7.

    Examples
    --------
    >>> mean, covariance = torch.zeros(1, 1), torch.ones(1, 1, 1)
    >>> gaussian_kl(mean, covariance, mean + 2, covariance)  # ½·2²
    2.0
    """
    _check_gaussian(mean, covariance, variances=False)
    _check_gaussian(ref_mean, ref_covariance, variances=False)
    _check_same_shape("mean", mean, "ref_mean", ref_mean)
    q = torch.distributions.MultivariateNormal(mean.double(), covariance.double())
    p = torch.distributions.MultivariateNormal(
        ref_mean.double(), ref_covariance.double()
    )
    return float(torch.distributions.kl_divergence(q, p).mean())


def regression_metrics(
    mean: torch.Tensor,
    variance: torch.Tensor,
    targets: torch.Tensor,
    levels: Sequence[float] = COVERAGE_LEVELS,
) -> dict[str, float]:
    """nll, rmse, coverage_50/90/95 and calibration of Gaussian predictives.

    Parameters
    ----------
    mean : torch.Tensor
        `(N, C)`
    variance : torch.Tensor
        `(N, C)` or `(N, C, C)` as for `gaussian_nll`, with the observation noise in it
    targets : torch.Tensor
        `(N, C)`
    levels : sequence of float
        nominal levels of the coverage columns

    Examples
    --------
    >>> zero, one = torch.zeros(2, 1), torch.ones(2, 1)
    >>> sorted(regression_metrics(mean=zero, variance=one, targets=zero))
    ['calibration', 'coverage_50', 'coverage_90', 'coverage_95', 'nll', 'rmse']
    """
    _check_gaussian(mean, variance)
    marginal = variance
    if variance.ndim == 3:
        marginal = variance.diagonal(dim1=-2, dim2=-1)
    std = marginal.double().sqrt()
    coverage = interval_coverage(mean, std, targets, levels)
    return {
        "nll": gaussian_nll(mean, variance, targets),
        "rmse": rmse(mean, targets),
        **{
            f"coverage_{round(100 * level)}": value
            for level, value in zip(levels, coverage, strict=True)
        },
        "calibration": interval_calibration_error(mean, std, targets),
    }


# --- checks --------------------------------------------------------------------------


def _check_classification(probs: torch.Tensor, targets: torch.Tensor) -> None:
    if probs.ndim != 2 or targets.shape != probs.shape[:1]:
        raise ValueError(
            "Expected probs (N, C) and integer targets (N,), got shapes "
            f"{tuple(probs.shape)} and {tuple(targets.shape)}."
        )
    _check_some(probs)


def _check_some(values: torch.Tensor, what: str = "prediction") -> None:
    if len(values) == 0:
        raise ValueError(f"Expected at least one {what}, got none.")


def _check_gaussian(
    mean: torch.Tensor, variance: torch.Tensor, variances: bool = True
) -> None:
    """Covariances (N, C, C) or, if they are allowed, variances (N, C) of a mean."""
    full = mean.ndim == 2 and variance.shape == (*mean.shape, mean.shape[-1])
    marginal = variances and mean.ndim == 2 and variance.shape == mean.shape
    if not (full or marginal):
        either = "variances (N, C) or " if variances else ""
        raise ValueError(
            f"Expected mean (N, C) and {either}covariance (N, C, C), got shapes "
            f"{tuple(mean.shape)} and {tuple(variance.shape)}."
        )


def _check_same_shape(a: str, x: torch.Tensor, b: str, y: torch.Tensor) -> None:
    if x.shape != y.shape:
        raise ValueError(
            f"{a} and {b} must have the same shape, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}."
        )
