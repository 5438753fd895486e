"""Temperature scaling: the minimum, every kind of target, borders and mistakes."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from laplace_ella import metrics
from laplace_ella.errors import BorderWarning
from laplace_ella.tuning.calibration import temperature_scaling


@pytest.fixture
def overconfident():
    """Logits (300, 4) that are three times what the labels were drawn from."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    return 3 * logits, labels


@pytest.fixture(autouse=True)
def _no_border_unless_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error", BorderWarning)
        yield


def minimum(loss):
    """An independent search, in numpy's floats."""
    found = minimize_scalar(
        loss, bounds=(-6, 6), method="bounded", options={"xatol": 1e-10}
    )
    return math.exp(found.x)


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
def test_it_is_the_minimum_of_the_nll(overconfident, scale):
    logits, labels = overconfident
    logits = scale * logits
    f, y = logits.double().numpy(), labels.numpy()

    def loss(log_tau):
        z = f / np.exp(log_tau)
        norm = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
        return (norm - z[np.arange(len(y)), y]).mean()

    tau = temperature_scaling(logits, labels)
    assert tau == pytest.approx(minimum(loss), rel=1e-5)
    assert tau == pytest.approx(3 * scale, rel=0.2)
    assert temperature_scaling(logits, labels) == tau  # to the last digit


def test_class_probabilities_and_ignored_targets(overconfident):
    logits, labels = overconfident
    expected = temperature_scaling(logits, labels)
    onehot = torch.nn.functional.one_hot(labels, 4).float()
    assert temperature_scaling(logits, onehot) == pytest.approx(expected)
    more = torch.cat([logits, 100 * torch.ones(5, 4)])
    padded = torch.cat([labels, torch.full((5,), -100)])
    assert temperature_scaling(more, padded) == pytest.approx(expected)
    # probabilities that the logits have at τ = 2 are met exactly there
    soft = torch.softmax(logits.double() / 2, -1)
    assert temperature_scaling(logits, soft) == pytest.approx(2, rel=1e-6)


def test_multi_label_is_the_minimum_of_the_bernoulli_nll(overconfident):
    logits, _ = overconfident
    generator = torch.Generator().manual_seed(1)
    labels = torch.bernoulli(torch.sigmoid(logits / 3), generator=generator)

    def loss(log_tau):
        return metrics.bernoulli_nll(
            torch.sigmoid(logits.double() / math.exp(log_tau)), labels
        )

    tau = temperature_scaling(logits, labels, multi_label=True)
    assert tau == pytest.approx(minimum(loss), rel=1e-4)


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_a_common_shift_of_the_logits_changes_nothing(overconfident, shift):
    logits, labels = overconfident
    expected = temperature_scaling(logits, labels)
    shifted = temperature_scaling(logits.double() + shift, labels)
    assert shifted == pytest.approx(expected, rel=1e-6)


def test_arguments_are_left_alone(overconfident):
    logits, labels = overconfident
    logits.requires_grad_()
    before = logits.detach().clone()
    assert isinstance(temperature_scaling(logits, labels), float)
    assert torch.equal(logits.detach(), before)
    assert logits.grad is None


def test_borders_warn_with_the_value():
    logits = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    with pytest.warns(BorderWarning, match=r"0\.001, the border"):
        assert temperature_scaling(logits, torch.tensor([0, 1])) == 1e-3
    with pytest.warns(BorderWarning, match="1000, the border"):
        assert temperature_scaling(logits, torch.tensor([1, 0])) == 1e3
    labels = (logits > 0).float()
    with pytest.warns(BorderWarning):
        temperature_scaling(logits - 1, labels, multi_label=True)


def test_equal_logits_give_one():
    assert temperature_scaling(torch.full((3, 2), 7.0), torch.tensor([0, 1, 1])) == 1.0


LOGITS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("logits", "targets", "multi_label", "match"),
    [
        (LOGITS[0], torch.tensor([0]), False, r"numbers \(N, C\), got .* \(2,\)"),
        (LOGITS.long(), torch.tensor([0, 1]), False, r"got torch\.int64"),
        (LOGITS, torch.tensor([0]), False, r"got shape \(1,\)"),
        (LOGITS, torch.tensor([0, 1]), True, r"must be labels \(N, C\)"),
        (LOGITS, torch.tensor([0.0, 1.0]), False, "must be integers"),
        (LOGITS, torch.tensor([0, 2]), False, "between 0 and 1"),
        (LOGITS * math.nan, torch.tensor([0, 1]), False, "2 of 2 examples are NaN"),
        (LOGITS, LOGITS * math.nan, False, "probabilities between 0 and 1"),
        (LOGITS, torch.ones(2, 2), False, "pass multi_label=True"),
        (LOGITS[:0], torch.tensor([], dtype=torch.long), False, "at least one"),
        (LOGITS, torch.tensor([-100, -100]), False, "at least one observed"),
    ],
)
def test_mistakes_say_what_came(logits, targets, multi_label, match):
    with pytest.raises(ValueError, match=match):
        temperature_scaling(logits, targets, multi_label=multi_label)
