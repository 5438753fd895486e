"""CIFAR-10 and a trained ResNet-20: the curve of the paper, and what repairs it.

Training images for the posterior, validation images for every choice, and test images
that took no part in any.
"""

from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import (
    EarlyStopping,
    ELLALaplace,
    FeatureCache,
    prior_precision_from_weight_decay,
)
from tests.real_models import cifar10, resnet20

N_TRAIN, N_VAL, N_TEST = 1000, 200, 300
MC = {"link_approx": "mc", "n_samples": 512}


def loader(x, y):
    return DataLoader(TensorDataset(x, y), batch_size=100)


def scores(probs, y):
    """NLL and expected calibration error in ten bins."""
    ece = torchmetrics.CalibrationError("multiclass", num_classes=10, n_bins=10)
    nll = torch.nn.functional.nll_loss(probs.log(), y)
    return SimpleNamespace(nll=nll.item(), ece=float(ece(probs, y)))


@pytest.fixture(scope="module")
def results(data_dir):
    """One study: the curve, and the test scores of MAP, stopping and tempering."""
    train = cifar10(data_dir, "train_20k", N_TRAIN)
    val = loader(*cifar10(data_dir, "test_10k", N_VAL))
    test = loader(*cifar10(data_dir, "test_10k", N_VAL + N_TEST, start=N_VAL))
    la = ELLALaplace(
        resnet20(data_dir),
        "classification",
        prior_precision=prior_precision_from_weight_decay(1e-4, 50_000),
        subsample_size=300,
        n_eigenvalues=20,
        row_mode="vmap",
        feature_mode="reverse",
    )
    stopping = EarlyStopping(start=50, growth=1.25, patience=100, link_approx="mc")
    la.fit(loader(*train), val_loader=val, early_stopping=stopping)
    history, n_stopped = la.history, la.n_data
    cache = FeatureCache.from_loader(la, test)
    y = cache.targets

    def predict():
        return la.predict_from_cache(cache, **MC)

    found = SimpleNamespace(history=history, n_stopped=n_stopped)
    found.map = scores(cache.f_mu.softmax(-1), y)
    found.stopped = scores(predict(), y)
    assert n_stopped < N_TRAIN, history
    # The images after the stop complete the posterior, which is then tempered.
    rest = (tensor[n_stopped:] for tensor in train)
    la.fit(loader(*rest), override=False)
    found.n_data, found.full = la.n_data, scores(predict(), y)
    la.optimize_temperature(val, **MC)
    found.n_effective, found.tempered = la.effective_n_data, scores(predict(), y)
    print(found)
    return found


def test_v_shape(results):
    """The validation loss falls with the number of data, then rises again."""
    n = [entry["n_data"] for entry in results.history]
    losses = [entry["loss"] for entry in results.history]
    best = losses.index(min(losses))
    assert n[-1] == results.n_data == N_TRAIN
    assert 0 < best < len(losses) - 1
    assert n[best] == results.n_stopped
    # All entries share their Monte-Carlo noise; what differs is the posterior.
    assert losses[0] > 1.3 * losses[best]
    assert losses[-1] > 1.05 * losses[best]


@pytest.mark.parametrize("way", ["stopped", "tempered"])
def test_well_below_map(results, way):
    """Stopping and tempering each lower NLL and ECE on images never used before."""
    ours = getattr(results, way)
    assert ours.nll < 0.85 * results.map.nll
    assert ours.ece < 0.8 * results.map.ece


def test_tempering_is_not_worse_than_stopping(results):
    """The smoother way does at least about as well as the prefix it replaces."""
    # Paired on the same images; both are estimates from 200 validation images.
    assert results.tempered.nll < 1.05 * results.stopped.nll
    assert results.n_effective < results.n_data


@pytest.mark.parametrize("way", ["stopped", "tempered"])
def test_below_the_posterior_of_all_data(results, way):
    """Each is better than the untouched posterior of all the data."""
    assert getattr(results, way).nll < results.full.nll
