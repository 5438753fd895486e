"""Scores and batches against brute force: all configurations of labels, dense."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import acquisition
from tests.cases import make, mlp
from tests.fake_cuda import FakeCuda, fake
from tests.fitting import fit

SCORES = ("bald", "entropy", "least_confidence", "margin")


def probabilities(S=7, B=6, C=3, seed=0, scale=2.0):
    """Samples (S, B, C) that agree on some inputs and not on others."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(S, B, C, generator=generator, dtype=torch.float64)
    scales = scale * torch.linspace(0.1, 1.0, B, dtype=torch.float64)
    return (logits * scales[:, None]).softmax(-1)


def information(samples, chosen):
    """I(labels; sample) of a set of inputs, over all C^n configurations of labels."""
    p = samples.double().numpy()
    total = conditional = 0.0
    for labels in itertools.product(range(p.shape[-1]), repeat=len(chosen)):
        given = np.ones(len(p))  # p(labels | s)
        for i, c in zip(chosen, labels, strict=True):
            given = given * p[:, i, c]
        total -= given.mean() * np.log(given.mean())
        conditional -= (given * np.log(given)).mean()
    return total - conditional


def greedy(information_of, n_inputs, n):
    """The greedy batch and its gains, by any function of a set."""
    chosen, gains, before = [], [], 0.0
    for _ in range(n):
        values = {
            i: information_of([*chosen, i]) for i in range(n_inputs) if i not in chosen
        }
        best = max(values, key=values.__getitem__)
        gains.append(values[best] - before)
        before = values[best]
        chosen.append(best)
    return chosen, gains


# --- scores ---------------------------------------------------------------------------


def by_hand(p):
    mean = p.mean(0)
    first, second = np.sort(mean, -1)[:, ::-1][:, :2].T
    entropy = -(mean * np.log(mean)).sum(-1)
    return {
        "entropy": entropy,
        "bald": entropy + (p * np.log(p)).sum(-1).mean(0),
        "least_confidence": 1 - first,
        "margin": second - first,
    }


@pytest.mark.parametrize("budget", [1, 100, 2**24])
@pytest.mark.parametrize("score", SCORES)
def test_scores_by_hand(score, budget, monkeypatch):
    """Whatever chunks of inputs memory allows."""
    monkeypatch.setattr(acquisition, "BUDGET", budget)
    samples = probabilities()
    expected = torch.tensor(by_hand(samples.numpy())[score])
    torch.testing.assert_close(getattr(acquisition, score)(samples), expected)
    single = getattr(acquisition, score)(samples.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, expected.float(), atol=1e-6, rtol=1e-5)


def test_bald_is_the_information_of_one_label():
    samples = probabilities()
    expected = [information(samples, [i]) for i in range(samples.shape[1])]
    assert acquisition.bald(samples).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("score", SCORES)
def test_certain_predictions_score_lowest(score):
    certain = torch.eye(3).expand(4, 3, 3)
    values = getattr(acquisition, score)(certain)
    assert torch.equal(values, torch.full((3,), -1.0 if score == "margin" else 0.0))


# --- joint selection ------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2**24])
@pytest.mark.parametrize("C", [2, 3])
def test_joint_selection_is_that_of_all_configurations(C, budget, monkeypatch):
    """While configurations are enumerated, batch and gains are exact."""
    monkeypatch.setattr(acquisition, "BUDGET", budget)
    samples = probabilities(C=C)
    found = acquisition.select_joint(samples, 4)
    chosen, gains = greedy(lambda a: information(samples, a), samples.shape[1], 4)
    assert found.indices.tolist() == chosen
    assert found.gains.tolist() == pytest.approx(gains, abs=1e-12)
    assert sum(gains) < math.log(len(samples))


def test_drawn_configurations_are_near_all_of_them():
    """Beyond the limit gains are estimates; their mean over draws has no bias."""
    samples = probabilities(S=12, B=5)
    exact = acquisition.select_joint(samples, 5, n_configurations=3**4)
    runs = [
        acquisition.select_joint(
            samples, 5, n_configurations=27, generator=torch.Generator().manual_seed(i)
        )
        for i in range(200)
    ]
    # Three labels are enumerated in both, so the first four choices are the same.
    assert all(torch.equal(run.indices[:4], exact.indices[:4]) for run in runs)
    last = torch.stack([run.gains[4] for run in runs])
    error = float(last.std() / len(runs) ** 0.5)
    assert float(last.mean()) == pytest.approx(float(exact.gains[4]), abs=4 * error)
    many = acquisition.select_joint(samples, 5, n_configurations=80)
    torch.testing.assert_close(many.gains, exact.gains, rtol=0.02, atol=0)


def test_without_a_generator_the_choice_is_the_same_and_global_state_untouched():
    samples = probabilities(S=20, B=12, C=4)
    before = torch.get_rng_state()
    first, second = (
        acquisition.select_joint(samples, 6, n_configurations=16) for _ in range(2)
    )
    assert torch.equal(first.indices, second.indices)
    assert torch.equal(first.gains, second.gains)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(first.indices.tolist())) == 6


def test_a_whole_pool_of_certain_predictions():
    """Nothing to learn, and zeros among the probabilities."""
    certain = torch.eye(3).expand(4, 3, 3)
    found = acquisition.select_joint(certain, 3)
    assert sorted(found.indices.tolist()) == [0, 1, 2]
    assert not found.gains.any()


def test_copies_are_asked_once():
    samples = probabilities(S=64, B=4, scale=4.0)
    copies = samples.repeat_interleave(5, dim=1)
    batch = acquisition.select_joint(copies, 3).indices
    assert sorted((batch // 5).tolist()) == [1, 2, 3]
    by_score = acquisition.bald(copies).topk(3).indices
    assert len(set((by_score // 5).tolist())) == 1


# --- regression -----------------------------------------------------------------------


def covariance_of(B, C, seed=0):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(B * C, B * C // 2, generator=generator, dtype=torch.float64)
    return root @ root.mT


def gaussian_information(covariance, sigma, chosen):
    """½ log det(I + Σ/σ²) of the chosen inputs together."""
    C = len(sigma)
    rows = np.concatenate([np.arange(i * C, (i + 1) * C) for i in chosen])
    noise = np.tile(sigma**2, len(chosen))
    block = covariance.numpy()[np.ix_(rows, rows)]
    whitened = block / np.sqrt(noise[:, None] * noise)
    return 0.5 * np.linalg.slogdet(np.eye(len(rows)) + whitened)[1]


@pytest.mark.parametrize(
    ("C", "sigma"),
    [(1, 0.3), (1, torch.tensor([0.3])), (3, 0.3), (3, torch.tensor([0.1, 0.5, 2.0]))],
)
def test_information_gain_is_that_of_dense_algebra(C, sigma):
    covariance = covariance_of(8, C)
    noise = np.broadcast_to(np.asarray(sigma, dtype=np.float64), (C,))
    found = acquisition.select_information_gain(covariance, 5, sigma, C)
    chosen, gains = greedy(
        lambda a: gaussian_information(covariance, noise, a), len(covariance) // C, 5
    )
    assert found.indices.tolist() == chosen
    assert found.gains.tolist() == pytest.approx(gains)
    blocks = covariance.view(8, C, 8, C).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    single = acquisition.information_gain(blocks, sigma)
    expected = [gaussian_information(covariance, noise, [i]) for i in range(8)]
    assert single.tolist() == pytest.approx(expected)


# --- with a posterior -----------------------------------------------------------------


def test_with_posteriors():
    """What the docstrings say about where samples and covariances come from."""
    x = torch.randn(30, 2)
    pool = torch.randn(40, 2)
    loader = DataLoader(TensorDataset(x, (x.prod(-1) > 0).long()), batch_size=30)
    la = Laplace(mlp(2, 6, 2), "classification", "all", "nystrom")
    la.fit(loader)
    samples = la.predictive_samples(pool, n_samples=32, joint=True)
    for score in SCORES:
        assert getattr(acquisition, score)(samples).shape == (40,)
    assert acquisition.select_joint(samples, 5).indices.unique().numel() == 5
    la = Laplace(mlp(2, 6, 2), "regression", "all", "nystrom", sigma_noise=0.2)
    la.fit(DataLoader(TensorDataset(x, x.sin()), batch_size=30))
    single = acquisition.information_gain(la(pool)[1], la.sigma_noise)
    batch = acquisition.select_information_gain(
        la(pool, joint=True)[1], 5, la.sigma_noise, n_outputs=2
    )
    assert batch.indices[0] == single.argmax()
    assert float(batch.gains[0]) == pytest.approx(float(single.max()), rel=1e-4)


@pytest.mark.parametrize(
    "prior", [0.5, "layerwise"], ids=["one prior", "layerwise prior"]
)
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_samples_at_many_inputs_are_those_at_few(name, prior):
    """With more function values than samples they are made by sampled weights, and
    have the same joint covariance."""
    case = make(name)
    la = fit(case, n_eigenvalues=6, complement="prior")
    if prior == "layerwise":
        prior = torch.linspace(0.5, 2.0, len(list(case.model.parameters())))
    la.prior_precision = prior
    x = case.x_test
    mean, covariance = la._glm_predictive_distribution(x, joint=True)
    n_values = mean.numel()
    few = n_values - 1
    n = 40_000 // few
    samples = torch.cat(
        [la.functional_samples(x, n_samples=few, joint=True) for _ in range(n)]
    ).flatten(1)
    scale = covariance.diagonal().sqrt()
    bound = 6 / len(samples) ** 0.5
    assert ((samples.mean(0) - mean.flatten()).abs() < bound * scale).all()
    error = (samples.T.cov() - covariance).abs()
    assert (error < 2**0.5 * bound * scale[:, None] * scale).all()


# --- devices and bad input ------------------------------------------------------------


def test_on_the_device_of_the_samples():
    samples = probabilities(S=9, B=8).float()
    covariance = covariance_of(5, 2).float()
    expected = acquisition.select_joint(samples, 3).indices
    gaussian = acquisition.select_information_gain(covariance, 3, 0.3, 2)
    with FakeCuda():
        on_device = fake(samples)
        for score in SCORES:
            assert getattr(acquisition, score)(on_device).device.type == "cuda"
        found = acquisition.select_joint(on_device, 3)
        assert found.indices.device.type == found.gains.device.type == "cuda"
        assert found.indices.cpu().tolist() == expected.tolist()
        # the noise may be where it wants
        sigma = torch.tensor([0.3, 0.3])
        found = acquisition.select_information_gain(fake(covariance), 3, sigma, 2)
        assert found.indices.device.type == "cuda"
        assert found.indices.cpu().tolist() == gaussian.indices.tolist()
        with pytest.raises(ValueError, match="generator"):
            acquisition.select_joint(on_device, 3, generator=torch.Generator("cpu"))


GOOD = probabilities()

BAD_SAMPLES = {
    "a matrix": (GOOD[0], r"\(S, B, C\).*\(6, 3\)"),
    "one class": (torch.ones(4, 3, 1), "two classes"),
    "nothing": (torch.ones(0, 3, 2), "two classes"),
    "logits": (torch.randn(4, 3, 2), "softmax"),
    "labels": (torch.rand(4, 3, 2), "multi_label"),
    "NaN": (GOOD * float("nan"), "NaN"),
    "integers": (torch.ones(4, 3, 2, dtype=torch.long), "floating point"),
}


@pytest.mark.parametrize("what", BAD_SAMPLES)
def test_bad_samples(what):
    samples, message = BAD_SAMPLES[what]
    for call in (acquisition.bald, lambda s: acquisition.select_joint(s, 1)):
        with pytest.raises(ValueError, match=message):
            call(samples)


SQUARE = torch.eye(6)

BAD_CALLS = {
    "too many": (lambda: acquisition.select_joint(GOOD, 7), "at most .* 6, got 7"),
    "none": (lambda: acquisition.select_joint(GOOD, 0), "n_queries must be a positive"),
    "configurations": (
        lambda: acquisition.select_joint(GOOD, 1, n_configurations=0),
        "n_configurations",
    ),
    "generator": (lambda: acquisition.select_joint(GOOD, 1, generator=3), "generator"),
    "variances": (
        lambda: acquisition.information_gain(torch.ones(4, 2), 1.0),
        r"\(B, C, C\).*\(4, 2\)",
    ),
    "not joint": (
        lambda: acquisition.select_information_gain(torch.ones(4, 1, 1), 1, 1.0),
        "joint=True",
    ),
    "noise": (
        lambda: acquisition.select_information_gain(SQUARE, 1, 0.0),
        "sigma_noise must be positive",
    ),
    "noises": (
        lambda: acquisition.select_information_gain(SQUARE, 1, torch.ones(2)),
        r"one per output \(1\), got 2",
    ),
    "outputs": (
        lambda: acquisition.select_information_gain(SQUARE, 1, 1.0, 4),
        "no multiple of n_outputs=4",
    ),
    "batch": (
        lambda: acquisition.select_information_gain(SQUARE, 3, 1.0, 3),
        "at most .* 2, got 3",
    ),
    "infinite": (
        lambda: acquisition.select_information_gain(SQUARE / 0, 1, 1.0),
        "infinity in the covariance",
    ),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_calls(what):
    call, message = BAD_CALLS[what]
    with pytest.raises(ValueError, match=message):
        call()


def test_probabilities_of_low_precision():
    """bfloat16 rounds them by more than they are checked for in float32."""
    samples = (3 * torch.randn(64, 200, 10)).softmax(-1)
    scores = acquisition.bald(samples.to(torch.bfloat16)).float()
    torch.testing.assert_close(scores, acquisition.bald(samples), atol=0.02, rtol=0.05)
