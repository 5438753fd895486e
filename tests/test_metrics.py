"""Every metric against a value computed by hand or by another library."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics.classification import MulticlassCalibrationError

from laplace_ella import metrics

# Four predictions over three classes; the third is wrong.
PROBS = torch.tensor(
    [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]]
)
TARGETS = torch.tensor([0, 1, 1, 2])


def test_accuracy_by_hand():
    assert metrics.accuracy(PROBS, TARGETS) == pytest.approx(0.75)


def test_nll_by_hand():
    expected = -(math.log(0.7) + math.log(0.8) + math.log(0.3) + math.log(0.5)) / 4
    assert metrics.nll(PROBS, TARGETS) == pytest.approx(expected)


def test_nll_of_an_underflow_is_finite_and_large():
    probs = torch.tensor([[1.0, 0.0]])
    assert metrics.nll(probs, torch.tensor([1])) == pytest.approx(87.3365, abs=1e-3)


def test_nll_of_class_probabilities_is_the_cross_entropy():
    onehot = torch.nn.functional.one_hot(TARGETS, 3).float()
    assert metrics.nll(PROBS, onehot) == pytest.approx(metrics.nll(PROBS, TARGETS))
    mixed = torch.tensor([[0.5, 0.5, 0.0]])
    expected = -0.5 * (math.log(0.7) + math.log(0.2))
    assert metrics.nll(PROBS[:1], mixed) == pytest.approx(expected)


def test_nll_leaves_out_what_is_not_observed():
    targets = torch.tensor([0, -100, 1, -100])
    expected = -(math.log(0.7) + math.log(0.3)) / 2
    assert metrics.nll(PROBS, targets) == pytest.approx(expected)
    with pytest.raises(ValueError, match="at least one observed target, got none"):
        metrics.nll(PROBS, torch.full((4,), -100))


def test_bernoulli_nll_by_hand():
    probs = torch.tensor([[0.9, 0.2], [0.5, 0.0]])
    targets = torch.tensor([[1, 0], [1, 0]])
    expected = -(math.log(0.9) + math.log(0.8) + math.log(0.5)) / 2
    assert metrics.bernoulli_nll(probs, targets) == pytest.approx(expected)
    wrong = metrics.bernoulli_nll(torch.tensor([[0.0]]), torch.tensor([[1]]))
    assert wrong == pytest.approx(87.3365, abs=1e-3)
    with pytest.raises(ValueError, match="same shape"):
        metrics.bernoulli_nll(probs, targets[:, 0])


def test_brier_by_hand():
    rows = [
        0.3**2 + 0.2**2 + 0.1**2,
        0.1**2 + 0.2**2 + 0.1**2,
        0.5**2 + 0.7**2 + 0.2**2,
        0.25**2 + 0.25**2 + 0.5**2,
    ]
    assert metrics.brier(PROBS, TARGETS) == pytest.approx(sum(rows) / 4)


def test_ece_by_hand():
    # With two bins all confidences fall into (0.5, 1] except the two of 0.5:
    # torchmetrics' bins are closed on the right, so 0.5 is in the lower one.
    lower = abs((0.5 + 0.5) / 2 - (0 + 1) / 2) * 2 / 4
    upper = abs((0.7 + 0.8) / 2 - 1.0) * 2 / 4
    value = metrics.ece(PROBS, TARGETS, n_bins=2)
    assert value == pytest.approx(lower + upper, abs=1e-6)


def test_ece_default_is_torchmetrics_with_15_bins():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(500, 10, generator=generator), -1)
    targets = torch.randint(0, 10, (500,), generator=generator)
    reference = MulticlassCalibrationError(10, n_bins=15, norm="l1")
    assert metrics.ece(probs, targets) == pytest.approx(
        float(reference(probs, targets))
    )


def test_ece_takes_a_probability_that_rounding_pushed_above_one():
    probs = torch.tensor([[1.0 + 1e-7, 0.0], [0.0, 1.0]])
    assert metrics.ece(probs, torch.tensor([0, 1])) == pytest.approx(0.0, abs=1e-6)


def test_entropy_of_uniform_and_of_certainty():
    value = metrics.entropy(torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]))
    assert value.tolist() == pytest.approx([math.log(4), 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropies_keep_the_dtype_and_are_differentiable(dtype):
    probs = torch.tensor([[0.3, 0.7]], dtype=dtype, requires_grad=True)
    value = metrics.entropy(probs)
    assert value.dtype == dtype
    (gradient,) = torch.autograd.grad(value.sum(), probs)
    assert gradient.tolist()[0] == pytest.approx([-math.log(p) - 1 for p in (0.3, 0.7)])
    labels = metrics.binary_entropy(probs)
    assert labels.dtype == dtype
    assert labels.shape == probs.shape
    # both labels have the same entropy here, that of a coin with p = 0.3
    assert labels.tolist()[0] == pytest.approx([float(value.detach())] * 2)
    (gradient,) = torch.autograd.grad(labels.sum(), probs)
    expected = [math.log((1 - p) / p) for p in (0.3, 0.7)]
    assert gradient.tolist()[0] == pytest.approx(expected, rel=1e-5)


def test_reliability_curve_is_what_ece_averages():
    generator = torch.Generator().manual_seed(1)
    probs = torch.softmax(2 * torch.randn(400, 5, generator=generator), -1)
    targets = torch.randint(0, 5, (400,), generator=generator)
    curve = metrics.reliability_curve(probs, targets)
    assert sum(curve.count) == 400
    total = sum(
        n / 400 * abs(a - c)
        for a, c, n in zip(curve.accuracy, curve.confidence, curve.count, strict=True)
    )
    assert total == pytest.approx(metrics.ece(probs, targets), abs=1e-5)


@pytest.mark.parametrize(
    ("side", "tau", "error", "fraction"),
    [
        # confidences 0.7, 0.8, 0.5 (wrong), 0.5; the OOD ones 0.6 and 0.9 are wrong
        ("below", 0.5, 1 / 2, 2 / 6),
        ("below", 0.65, 2 / 3, 3 / 6),
        ("below", 1.0, 3 / 6, 1.0),
        ("above", 0.0, 3 / 6, 1.0),
        ("above", 0.75, 1 / 2, 2 / 6),
        ("above", 0.85, 1.0, 1 / 6),
    ],
)
def test_error_versus_confidence_by_hand(side, tau, error, fraction):
    ood = torch.tensor([[0.6, 0.3, 0.1], [0.05, 0.05, 0.9]])
    curve = metrics.error_versus_confidence(PROBS, TARGETS, ood, [tau], side)
    assert curve.error == pytest.approx([error])
    assert curve.fraction == pytest.approx([fraction])


def test_error_versus_confidence_leaves_out_empty_thresholds():
    curve = metrics.error_versus_confidence(PROBS, TARGETS, thresholds=[0.1, 0.9])
    assert curve.threshold == [0.9]
    none = metrics.error_versus_confidence(PROBS, TARGETS, thresholds=[0.1])
    assert none == metrics.ConfidenceCurve([], [], [])


def test_ood_auroc_by_hand_and_with_ties():
    # Pairs (in, ood): 4 in all; ood above in 2 of them, one tie counts half.
    value = metrics.ood_auroc(torch.tensor([0.1, 0.5]), torch.tensor([0.5, 0.3]))
    assert value == pytest.approx((1 + 0.5 + 1 + 0) / 4)


def test_ood_auroc_of_scores_outside_the_unit_interval():
    generator = torch.Generator().manual_seed(2)
    inside = 100 * torch.rand(50, generator=generator)
    outside = 100 * torch.rand(60, generator=generator) + 20
    expected = roc_auc_score([0] * 50 + [1] * 60, torch.cat([inside, outside]).numpy())
    assert metrics.ood_auroc(inside, outside) == pytest.approx(expected, abs=1e-6)


def test_ood_auroc_of_a_constant_score_is_one_half():
    assert metrics.ood_auroc(torch.ones(3), torch.ones(4)) == pytest.approx(0.5)


def test_ood_auroc_rejects_nan():
    with pytest.raises(ValueError, match="finite scores"):
        metrics.ood_auroc(torch.tensor([math.nan]), torch.ones(2))


def test_gaussian_nll_by_hand():
    mean, targets = torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])
    variance = torch.tensor([[[1.0]], [[4.0]]])
    rows = [0.5 * math.log(2 * math.pi) + 0.5, 0.5 * math.log(8 * math.pi) + 0.5]
    assert metrics.gaussian_nll(mean, variance, targets) == pytest.approx(sum(rows) / 2)


def test_gaussian_nll_uses_the_correlation_of_the_outputs():
    covariance = torch.tensor([[[2.0, 1.0], [1.0, 2.0]]])
    # det = 3, inverse = [[2, -1], [-1, 2]]/3, y = (1, -1): yᵀS⁻¹y = 2
    expected = math.log(2 * math.pi) + 0.5 * math.log(3) + 0.5 * 2
    value = metrics.gaussian_nll(
        torch.zeros(1, 2), covariance, torch.tensor([[1.0, -1.0]])
    )
    assert value == pytest.approx(expected)


def test_gaussian_nll_of_variances_is_that_of_a_diagonal_covariance():
    generator = torch.Generator().manual_seed(4)
    mean, targets = (torch.randn(6, 3, generator=generator) for _ in range(2))
    variance = 0.1 + torch.rand(6, 3, generator=generator)
    value = metrics.gaussian_nll(mean, variance, targets)
    assert value == pytest.approx(
        metrics.gaussian_nll(mean, torch.diag_embed(variance), targets)
    )
    normal = torch.distributions.Normal(mean.double(), variance.double().sqrt())
    expected = -normal.log_prob(targets.double()).sum(-1).mean()
    assert value == pytest.approx(float(expected))


def test_gaussian_nll_of_variances_forms_no_covariance(monkeypatch):
    """10,000 outputs: one C×C matrix in float64 would take 800 MB."""
    mean = torch.zeros(2, 10_000)
    largest = []
    original = torch.Tensor.double
    monkeypatch.setattr(
        torch.Tensor, "double", lambda t: (largest.append(t.numel()), original(t))[1]
    )
    value = metrics.gaussian_nll(mean, torch.ones_like(mean), mean)
    assert value == pytest.approx(5_000 * math.log(2 * math.pi))
    assert max(largest) == mean.numel()
    regression = metrics.regression_metrics(mean, torch.ones_like(mean), mean)
    assert regression["nll"] == pytest.approx(value)
    assert max(largest) == mean.numel()


def test_rmse_by_hand():
    value = metrics.rmse(torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert value == pytest.approx(math.sqrt(30 / 4))


def test_interval_coverage_by_hand():
    # |z| = 0.5, 1, 1.7, 3; the half-widths are 0.674 (50 %), 1.645, 1.960
    targets = torch.tensor([[0.5], [-1.0], [1.7], [3.0]])
    mean, std = torch.zeros(4, 1), torch.ones(4, 1)
    value = metrics.interval_coverage(mean, std, targets)
    assert value == pytest.approx([1 / 4, 2 / 4, 3 / 4])


def test_interval_calibration_error_is_small_for_a_calibrated_model():
    generator = torch.Generator().manual_seed(3)
    targets = torch.randn(20_000, 1, generator=generator)
    mean = torch.zeros_like(targets)
    right = metrics.interval_calibration_error(mean, torch.ones_like(mean), targets)
    wrong = metrics.interval_calibration_error(
        mean, 0.1 * torch.ones_like(mean), targets
    )
    assert right < 0.01
    assert wrong > 0.3


def test_interval_calibration_error_by_hand():
    # One target at the mean is in every interval: |1 − c| on average over the levels.
    one = torch.zeros(1, 1)
    expected = sum(1 - i / 20 for i in range(1, 20)) / 19
    value = metrics.interval_calibration_error(one, one + 1, one)
    assert value == pytest.approx(expected)


def test_gaussian_kl_by_hand():
    # KL(N(1, 4) ‖ N(0, 1)) = ½(4 + 1 − 1 − ln 4)
    value = metrics.gaussian_kl(
        torch.ones(1, 1),
        4 * torch.ones(1, 1, 1),
        torch.zeros(1, 1),
        torch.ones(1, 1, 1),
    )
    assert value == pytest.approx(0.5 * (4 + 1 - 1 - math.log(4)))


def test_gaussian_kl_of_equal_distributions_is_zero():
    mean, covariance = torch.randn(5, 2), torch.eye(2).expand(5, 2, 2)
    assert metrics.gaussian_kl(mean, covariance, mean, covariance) == pytest.approx(0)


def test_collections_have_the_documented_names():
    assert list(metrics.classification_metrics(PROBS, TARGETS)) == [
        "accuracy",
        "nll",
        "ece",
        "brier",
    ]
    names = metrics.regression_metrics(
        torch.zeros(3, 1), torch.ones(3, 1, 1), torch.zeros(3, 1)
    )
    assert list(names) == [
        "nll",
        "rmse",
        "coverage_50",
        "coverage_90",
        "coverage_95",
        "calibration",
    ]


def test_shape_errors_name_what_came():
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(3,\)"):
        metrics.nll(PROBS, TARGETS[:3])
    with pytest.raises(ValueError, match=r"covariance \(N, C, C\)"):
        metrics.gaussian_nll(torch.zeros(2, 1), torch.ones(2), torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"covariance \(N, C, C\), got .*\(2, 1\)"):
        metrics.gaussian_kl(*([torch.ones(2, 1)] * 4))
    with pytest.raises(ValueError, match="at least one"):
        metrics.accuracy(PROBS[:0], TARGETS[:0])
    with pytest.raises(ValueError, match="side"):
        metrics.error_versus_confidence(PROBS, TARGETS, side="left")
