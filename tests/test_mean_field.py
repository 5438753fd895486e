"""Mean-field variational inference from a checkpoint: examples/paper/mfvi.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("bayesian_torch", reason="needs the extra 'paper'")

PRECISION = 4.0


@pytest.fixture
def mean_field(paper):
    return paper("common.mean_field")


@pytest.fixture
def model():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    network[1].running_mean.normal_()
    return network.eval()


@pytest.fixture
def images(paper):
    return paper("common.data").Images(torch.randn(12, 3, 8, 8), torch.arange(12) % 3)


def fine_tuned(mean_field, model, images, **settings):
    settings = {"learning_rate": 0.05, "kl_weight": 1.0, "epochs": 3} | settings
    how = mean_field.FineTuning(
        prior_precision=PRECISION, n_train=50, batch_size=5, **settings
    )
    return mean_field.fine_tune(model, images, how)


def snapshot(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_the_posterior_begins_at_the_checkpoint(mean_field, model):
    """Means are its weights, deviations a part of their sizes; names are its own."""
    posterior = {
        w.name: w for w in mean_field.gaussians(mean_field.mean_field(model, 0.1))
    }
    weights = dict(model.named_parameters())
    assert set(posterior) == {"0.weight", "5.weight", "5.bias"}
    for name, gaussian in posterior.items():
        scale = gaussian.distribution.scale
        assert torch.equal(gaussian.mu, weights[name])
        assert torch.allclose(scale, 0.1 * weights[name].abs(), atol=1e-6)


def test_the_divergence_is_a_sum_over_weights(mean_field, model):
    posterior = list(mean_field.gaussians(mean_field.mean_field(model, 0.3)))
    expected = 0.0
    for weights in posterior:
        mu = weights.mu.detach().double().numpy()
        sigma = np.log1p(np.exp(weights.rho.detach().double().numpy()))
        terms = PRECISION * (sigma**2 + mu**2) - 1 - np.log(PRECISION * sigma**2)
        expected += terms.sum() / 2
    found = mean_field.divergence(posterior, PRECISION).item()
    assert found == pytest.approx(expected, rel=1e-5)


def test_predictions_are_means_over_draws(mean_field, model, images):
    """Against the same draws, put into the network by hand."""
    network = mean_field.mean_field(model, 0.5)
    found = mean_field.predict(model, network, images.x, 3, seed=7, batch_size=5)
    generator = torch.Generator().manual_seed(7)
    expected = torch.zeros(12, 3)
    before = snapshot(model)
    for _ in range(3):
        drawn = dict(before)
        for name in ("0.weight", "5.weight", "5.bias"):
            mu = before[name]
            noise = torch.randn(mu.shape, generator=generator)
            drawn[name] = mu + 0.5 * mu.abs() * noise
        model.load_state_dict(drawn)
        expected += model(images.x).softmax(-1).detach() / 3
    assert torch.allclose(found, expected, atol=1e-5)


def test_fine_tuning_is_seeded_and_touches_nothing(mean_field, model, images):
    before, state = snapshot(model), torch.get_rng_state()
    first = fine_tuned(mean_field, model, images)
    assert torch.equal(torch.get_rng_state(), state)
    again = snapshot(fine_tuned(mean_field, model, images))
    other = snapshot(fine_tuned(mean_field, model, images, seed=1))
    for name, value in snapshot(first).items():
        assert torch.equal(value, again[name])
        moved = name.split(".")[1].startswith(("mu_", "rho_"))
        assert torch.equal(value, other[name]) != moved
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        if name.startswith("1."):  # batch normalisation
            assert torch.equal(first.state_dict()[name], value)
    assert not model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_heavier_divergence_widens_the_posterior(mean_field, model, images):
    """Up to the prior's width, which is all that is left where data do not count."""

    def scales(kl_weight):
        network = fine_tuned(
            mean_field,
            model,
            images,
            kl_weight=kl_weight,
            learning_rate=1e-3,
            scale_learning_rate=0.3,
            epochs=60,
        )
        found = [w.distribution.scale.flatten() for w in mean_field.gaussians(network)]
        return torch.cat(found)

    wide = scales(1e3)
    assert scales(1e-3).mean() < wide.mean() / 2
    assert torch.allclose(wide, torch.full_like(wide, PRECISION**-0.5), rtol=0.1)


def test_augmented_images_are_crops(paper, mean_field):
    """Every one is a window of the image on black, as it is or reflected."""
    pixels = torch.randint(0, 256, (6, 10, 10, 3), dtype=torch.uint8)
    normalize = paper("common.data").normalize_cifar
    out = mean_field.augmented(normalize(pixels), torch.Generator().manual_seed(0))
    framed = normalize(F.pad(pixels, (0, 0, 4, 4, 4, 4)))
    for image, found in zip(framed, out, strict=True):
        windows = [
            image[:, top : top + 10, left : left + 10]
            for top in range(9)
            for left in range(9)
        ]
        windows += [window.flip(-1) for window in windows]
        assert any(torch.allclose(window, found, atol=1e-5) for window in windows)


def test_settings_are_chosen_on_the_images_of_the_fold(paper):
    """One setting is good on the first half of the test images, one on all others."""
    mfvi, protocols = paper("mfvi"), paper("common.protocols")
    good, bad = torch.tensor([[0.9, 0.1]] * 2), torch.tensor([[0.2, 0.8]] * 2)
    first = mfvi.FineTuning(1e-2, 1.0, 5.0, 10)
    others = mfvi.FineTuning(1e-3, 1.0, 5.0, 10)
    found = {
        first: {"validation": bad, "test": torch.cat([good, bad])},
        others: {"validation": good, "test": torch.cat([bad, good])},
    }
    targets = {w: torch.zeros(n).long() for w, n in (("validation", 2), ("test", 4))}
    for protocol, chosen in (("train", [others]), ("halves", [first, others])):
        folds = protocols.folds(protocol, 2, 4)
        for fold, best in zip(folds, chosen, strict=True):
            outcome = mfvi.choose(found, targets, fold)
            assert outcome.chosen == {"lr": best.learning_rate, "KL": 1.0}
            assert outcome.val_nll == pytest.approx(-np.log(0.9))
            assert torch.equal(outcome.probs, found[best]["test"][fold.predict])


def test_the_row_goes_into_the_table(paper, data_dir, tmp_path):
    """The script in smoke size, and the table written again with its row."""
    out, cache = tmp_path / "out", tmp_path / "cache"
    places = [f"--data-root={data_dir}", f"--cache-dir={cache}", f"--out={out}"]
    options = ["--smoke", *places, "--kl-weights", "1", "--learning-rates", "0.001"]
    rows = paper("mfvi").main(options)
    assert [row["protocol"] for row in rows] == ["train", "halves"]
    assert all(row["chosen"].startswith("lr=0.001 KL=1") for row in rows)
    best = {"protocol": "train", "method": "best ELLA on validation", "link": "chosen"}
    scores = {"accuracy": 0.5, "nll": 1.0, "ece": 0.1, "brier": 0.5, "val_nll": 1.0}
    paper("common.runs").write_csv(out / "resnet20.csv", [{**best, **scores}])
    table = paper("cifar10").main(["--smoke", "--tables", *places])
    assert [row["method"] for row in table] == ["MFVI-BF", "MFVI-BF", best["method"]]
    for name in ("resnet20.md", "resnet20_summary.md"):
        assert "| MFVI-BF | mc |" in (out / name).read_text()
    # Again: the table is the same, also from its own file.
    text = (out / "resnet20.csv").read_text()
    paper("cifar10").main(["--smoke", "--tables", *places])
    assert (out / "resnet20.csv").read_text() == text
