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


def test_classification_by_hand():
    terms = [math.log(p) for p in (0.7, 0.8, 0.3, 0.5)]
    brier = [0.09 + 0.04 + 0.01, 0.01 + 0.04 + 0.01, 0.25 + 0.49 + 0.04]
    brier += [0.25**2 + 0.25**2 + 0.5**2]
    found = metrics.classification_metrics(PROBS, TARGETS, n_bins=2)
    assert list(found) == ["accuracy", "nll", "ece", "brier"]
    assert found["accuracy"] == 0.75
    assert found["nll"] == pytest.approx(-sum(terms) / 4)
    assert found["brier"] == pytest.approx(sum(brier) / 4)
    # All confidences are in the upper bin, [0.5, 1].
    assert found["ece"] == pytest.approx(0.75 - (0.7 + 0.8 + 0.5 + 0.5) / 4, abs=1e-6)
    each = metrics.nll_per_example(PROBS, TARGETS)
    assert each.tolist() == pytest.approx([-t for t in terms])
    assert each.dtype == torch.float64


def test_nll_of_underflows_class_probabilities_and_missing_targets():
    probs = torch.tensor([[1.0, 0.0]])
    assert metrics.nll(probs, torch.tensor([1])) == pytest.approx(87.3365, abs=1e-3)
    onehot = torch.nn.functional.one_hot(TARGETS, 3).float()
    assert metrics.nll(PROBS, onehot) == pytest.approx(metrics.nll(PROBS, TARGETS))
    mixed = torch.tensor([[0.5, 0.5, 0.0]])
    expected = -0.5 * (math.log(0.7) + math.log(0.2))
    assert metrics.nll(PROBS[:1], mixed) == pytest.approx(expected)
    targets = torch.tensor([0, -100, 1, -100])
    expected = metrics.classification_metrics(PROBS[[0, 2]], targets[[0, 2]])
    assert metrics.classification_metrics(PROBS, targets) == pytest.approx(expected)
    with pytest.raises(ValueError, match="at least one observed target, got none"):
        metrics.nll(PROBS, torch.full((4,), -100))


def test_bernoulli_nll_by_hand():
    probs = torch.tensor([[0.9, 0.2], [0.5, 0.0], [1.0, 0.0]])
    targets = torch.tensor([[1, 0], [1, 0], [0, 0]])
    found = metrics.bernoulli_nll_per_example(probs, targets)
    expected = [-math.log(0.9) - math.log(0.8), -math.log(0.5), 87.3365]
    assert found.tolist() == pytest.approx(expected, abs=1e-3)
    with pytest.raises(ValueError, match="same shape"):
        metrics.bernoulli_nll_per_example(probs, targets[:, 0])


def test_ece_is_that_of_torchmetrics_and_of_the_reliability_curve():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(500, 10, generator=generator), -1)
    targets = torch.randint(0, 10, (500,), generator=generator)
    reference = MulticlassCalibrationError(10, n_bins=15, norm="l1")
    found = metrics.ece(probs, targets)
    assert found == pytest.approx(float(reference(probs, targets)), abs=1e-5)
    curve = metrics.reliability_curve(probs, targets)
    assert sum(curve.count) == 500
    bins = zip(curve.accuracy, curve.confidence, curve.count, strict=True)
    assert found == pytest.approx(sum(n / 500 * abs(a - c) for a, c, n in bins))
    rounded = torch.tensor([[1.0 + 1e-7, 0.0], [0.0, 1.0]])  # above one
    assert metrics.ece(rounded, torch.tensor([0, 1])) == pytest.approx(0.0, abs=1e-6)
    half = torch.randn(20, 100).softmax(-1).to(torch.bfloat16)
    assert metrics.nll(half, torch.zeros(20).long()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropies_keep_the_dtype_and_are_differentiable(dtype):
    limits = metrics.entropy(torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]))
    assert limits.tolist() == pytest.approx([math.log(4), 0.0])
    probs = torch.tensor([[0.3, 0.7]], dtype=dtype, requires_grad=True)
    value = metrics.entropy(probs)
    assert value.dtype == dtype
    (gradient,) = torch.autograd.grad(value.sum(), probs)
    assert gradient.tolist()[0] == pytest.approx([-math.log(p) - 1 for p in (0.3, 0.7)])
    labels = metrics.binary_entropy(probs)
    assert labels.dtype == dtype
    # both labels have the same entropy here, that of a coin with p = 0.3
    assert labels.tolist()[0] == pytest.approx([float(value.detach())] * 2)


def test_ood_auroc():
    # Pairs (in, ood): 4 in all; ood above in 2 of them, one tie counts half.
    value = metrics.ood_auroc(torch.tensor([0.1, 0.5]), torch.tensor([0.5, 0.3]))
    assert value == pytest.approx((1 + 0.5 + 1 + 0) / 4)
    inside, outside = 100 * torch.rand(50), 100 * torch.rand(60) + 20
    expected = roc_auc_score([0] * 50 + [1] * 60, torch.cat([inside, outside]).numpy())
    assert metrics.ood_auroc(inside, outside) == pytest.approx(expected, abs=1e-6)
    assert metrics.ood_auroc(torch.ones(3), torch.ones(4)) == 0.5


def test_gaussian_nll_by_hand():
    mean, targets = torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])
    variance = torch.tensor([[[1.0]], [[4.0]]])
    rows = [0.5 * math.log(2 * math.pi) + 0.5, 0.5 * math.log(8 * math.pi) + 0.5]
    assert metrics.gaussian_nll(mean, variance, targets) == pytest.approx(sum(rows) / 2)
    # Correlated outputs: det = 3, inverse = [[2, -1], [-1, 2]]/3, y = (1, -1).
    covariance, y = torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]), torch.tensor([[1.0, -1]])
    expected = math.log(2 * math.pi) + 0.5 * math.log(3) + 0.5 * 2
    found = metrics.gaussian_nll(torch.zeros(1, 2), covariance, y)
    assert found == pytest.approx(expected)


def test_gaussian_nll_of_variances_is_that_of_a_diagonal_covariance():
    mean, targets = torch.randn(2, 6, 3)
    variance = 0.1 + torch.rand(6, 3)
    value = metrics.gaussian_nll(mean, variance, targets)
    full = metrics.gaussian_nll(mean, torch.diag_embed(variance), targets)
    assert value == pytest.approx(full)
    normal = torch.distributions.Normal(mean.double(), variance.double().sqrt())
    expected = -normal.log_prob(targets.double()).sum(-1).mean()
    assert value == pytest.approx(float(expected))
    # 100,000 outputs: one C×C matrix would take 80 GB
    mean = torch.zeros(1, 100_000)
    found = metrics.regression_metrics(mean, torch.ones_like(mean), mean)
    assert found["nll"] == pytest.approx(50_000 * math.log(2 * math.pi))


def test_regression_metrics_by_hand():
    # |z| = 0.5, 1, 1.7, 3; the half-widths are 0.674 (50 %), 1.645, 1.960
    targets = torch.tensor([[0.5], [-1.0], [1.7], [3.0]])
    mean, variance = torch.zeros(4, 1), torch.ones(4, 1)
    found = metrics.regression_metrics(mean, variance, targets)
    names = "nll rmse coverage_50 coverage_90 coverage_95 width_95 calibration"
    assert list(found) == names.split()
    coverage = [found[f"coverage_{level}"] for level in (50, 90, 95)]
    assert coverage == pytest.approx([1 / 4, 2 / 4, 3 / 4])
    assert found["rmse"] == pytest.approx(math.sqrt((0.25 + 1 + 1.7**2 + 9) / 4))
    assert found["width_95"] == pytest.approx(2 * 1.96, rel=1e-4)
    # One target at the mean is in every interval: |1 − c| on average over the levels.
    one = torch.zeros(1, 1)
    expected = sum(1 - i / 20 for i in range(1, 20)) / 19
    found = metrics.regression_metrics(one, one + 1, one)
    assert found["calibration"] == pytest.approx(expected)


def test_gaussian_kl_by_hand():
    # KL(N(1, 4) ‖ N(0, 1)) = ½(4 + 1 − 1 − ln 4)
    one, unit = torch.ones(1, 1), torch.ones(1, 1, 1)
    found = metrics.gaussian_kl(one, 4 * unit, 0 * one, unit)
    assert found == pytest.approx(0.5 * (4 + 1 - 1 - math.log(4)))
    mean, covariance = torch.randn(5, 2), torch.eye(2).expand(5, 2, 2)
    assert metrics.gaussian_kl(mean, covariance, mean, covariance) == pytest.approx(0)


BAD_PROBS = (PROBS * math.nan, 10 * PROBS, PROBS - 0.2, PROBS / 2)
NAMES = "accuracy nll nll_per_example ece brier reliability_curve"


@pytest.mark.parametrize("name", [*NAMES.split(), "classification_metrics"])
def test_bad_predictions_and_classes_are_refused(name):
    metric = getattr(metrics, name)
    for probs in BAD_PROBS:
        with pytest.raises(ValueError, match=r"probs must be prob.*of 4 rows are not"):
            metric(probs, TARGETS)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=r"classes 0\.\.2.*got"):
            metric(PROBS, torch.tensor([0, 1, 1, wrong]))
    for match, arguments in (
        (r"\(4, 3\) and \(3,\)", (PROBS, TARGETS[:3])),
        ("integer targets", (PROBS, TARGETS.float())),
        ("at least one", (PROBS[:0], TARGETS[:0])),
    ):
        with pytest.raises(ValueError, match=match):
            metric(*arguments)


def test_bad_labels_and_scores_are_refused():
    with pytest.raises(ValueError, match="targets must be probabilities"):
        metrics.nll(PROBS, PROBS * math.nan)
    for bad, what in ((PROBS * math.nan, "finite"), (PROBS + 1, "probabilities betw")):
        for name, pair in (("probs", (bad, PROBS)), ("targets", (PROBS, bad))):
            with pytest.raises(ValueError, match=f"{name} must be {what}"):
                metrics.bernoulli_nll_per_example(*pair)
    with pytest.raises(ValueError, match="score_in must be finite"):
        metrics.ood_auroc(torch.tensor([math.nan]), torch.ones(2))


def test_bad_gaussians_are_refused():
    zero, one = torch.zeros(2, 1), torch.ones(2, 1)
    for name, values in (
        ("mean", (zero * math.nan, one, zero)),
        ("variance", (zero, one * math.inf, zero)),
        ("targets", (zero, one, zero * math.nan)),
    ):
        for metric in (metrics.gaussian_nll, metrics.regression_metrics):
            with pytest.raises(ValueError, match=f"{name} must be finite"):
                metric(*values)
    shapes = r"covariance \(N, C, C\), got .*\("
    for match, arguments in (
        ("variance must be positive, got 0", (zero, zero, zero)),
        ("2 of 2 covariances are not positive", (zero, -one.unsqueeze(-1), zero)),
        (shapes + r"2,\)", (zero, torch.ones(2), zero)),
        (shapes + r"2, 1, 2\)", (zero, torch.ones(2, 1, 2), zero)),
    ):
        with pytest.raises(ValueError, match=match):
            metrics.gaussian_nll(*arguments)
    with pytest.raises(ValueError, match=shapes + r"1,\)"):
        metrics.gaussian_kl(*([one[0]] * 4))
