"""What `compare` takes (iterable data, positions, sampled weights) and refuses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_ella import Method, compare, metrics
from laplace_ella.comparison import evaluation

X = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
VALUES = torch.stack([X.sum(-1), X[:, 0].sin()], -1)


def make_model(n_outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, n_outputs)).eval()


def loader(a, b, y=CLASSES, size=8):
    return DataLoader(TensorDataset(X[a:b], y[a:b]), batch_size=size)


def run(methods, model=None, likelihood="classification", **kwargs):
    y = CLASSES if likelihood == "classification" else VALUES
    options = {
        "train_loader": loader(0, 24, y),
        "val_loader": loader(24, 32, y),
        "test_loader": loader(32, 48, y),
        "links": ["probit"],
        "n_samples": 16,
        "n_steps": 3,
        "grid_size": 3,
        "progress_bar": False,
    }
    if model is None:
        model = make_model(3 if likelihood == "classification" else 2)
    return compare(model, likelihood, methods=methods, **{**options, **kwargs})


# --- data without a length -----------------------------------------------------------


class Stream(IterableDataset):
    """The examples of a map-style data set, one after the other, without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


def streamed(loader):
    return DataLoader(Stream(loader.dataset), batch_size=loader.batch_size)


NEEDS_VALIDATION = ["map", "temperature", "last-layer-diag", "ella", "ella-tempered"]


@pytest.mark.parametrize("change", [streamed, list], ids=["stream", "list of batches"])
def test_iterable_test_validation_and_far_data(change):
    far = DataLoader(TensorDataset(5 + X[:16]), batch_size=8)
    parts = {"val_loader": loader(24, 32), "test_loader": loader(32, 48)}
    expected = run(NEEDS_VALIDATION, **parts, ood_loaders={"far": far})
    changed = {name: change(part) for name, part in parts.items()}
    report = run(NEEDS_VALIDATION, **changed, ood_loaders={"far": change(far)})
    for row, want in zip(report, expected, strict=True):
        assert row.ok, row.status
        assert row.metrics == pytest.approx(want.metrics, abs=1e-6)


@pytest.mark.parametrize("change", [streamed, list], ids=["stream", "list of batches"])
def test_iterable_training_data_are_counted_by_one_pass(change):
    names = ["map", "temperature", "diag", "last-layer-kron", "ella", "last-layer-ella"]
    names += ["gp-ella"]
    train = loader(0, 24)
    expected = {r.method: r for r in run(names)}
    report = run(names, train_loader=change(train))
    for row in report:
        if row.method == "gp-ella":
            assert row.status == (
                "not supported: laplace-torch's gp draws training examples by index "
                "and needs a map-style data set (with __getitem__ and __len__)"
            )
            continue
        assert row.ok, row.status
        want = expected[row.method]
        assert row.metrics == pytest.approx(want.metrics, abs=1e-6)
        assert row.settings.get("n_data") == want.settings.get("n_data")


def test_iterable_data_of_a_regression():
    """The noise is estimated from a loader that has no length, too."""
    parts = {
        name: streamed(loader(*span, VALUES))
        for name, span in {"val_loader": (24, 32), "test_loader": (32, 48)}.items()
    }
    expected = run(["map", "diag"], likelihood="regression")
    report = run(["map", "diag"], likelihood="regression", **parts)
    for row, want in zip(report, expected, strict=True):
        assert row.ok, row.status
        assert row.metrics == pytest.approx(want.metrics, abs=1e-6)


def test_an_iterator_is_refused():
    with pytest.raises(ValueError, match=r"test_loader is a .*iterated only once"):
        run(["map"], test_loader=iter(list(loader(32, 48))))


# --- regression ----------------------------------------------------------------------


def test_the_reported_nll_is_of_the_marginal_variances():
    from laplace import Laplace

    kwargs = {"subset_of_weights": "all", "hessian_structure": "full"}
    report = run(
        {"mine": kwargs}, likelihood="regression", tune="none", sigma_noise=0.5
    )
    la = Laplace(make_model(2), "regression", **kwargs, sigma_noise=0.5)
    la.fit(loader(0, 24, VALUES))
    mean, covariance = la(X[32:], pred_type="glm")
    variance = covariance.diagonal(dim1=-2, dim2=-1) + 0.25
    expected = metrics.gaussian_nll(mean, variance, VALUES[32:])
    assert report["mine"][0].metrics["nll"] == pytest.approx(expected, rel=1e-4)
    joint = covariance + 0.25 * torch.eye(2)
    assert expected != pytest.approx(
        metrics.gaussian_nll(mean, joint, VALUES[32:]), rel=1e-4
    )


def test_what_is_tuned_is_what_is_reported():
    """The grid search on the test data finds the prior with the best reported NLL."""
    same = {"val_loader": loader(32, 48, VALUES), "sigma_noise": 0.3}
    common = {"likelihood": "regression", "reference": None, **same}
    grid = torch.logspace(-4, 4, 5).tolist()
    for method in ("diag", "ella-marglik"):
        scores = []
        for prior in grid:
            spec = {
                "subset_of_weights": "all",
                "hessian_structure": "diag" if method == "diag" else "nystrom",
            }
            (row,) = run({"m": spec}, tune="none", prior_precision=prior, **common)
            scores.append(row.metrics["nll"])
        (row,) = run({"m": spec}, tune="gridsearch", grid_size=5, **common)
        assert row.settings["prior_precision"] == pytest.approx(
            grid[int(np.argmin(scores))]
        )


def test_covariances_are_kept_for_the_divergence_only(monkeypatch):
    kept = []
    original = evaluation.predict

    def spy(*args):
        predictions = original(*args)
        kept.append(predictions.values.covariance is not None)
        return predictions

    monkeypatch.setattr(evaluation, "predict", spy)
    run(["map", "diag"], likelihood="regression", reference=None)
    assert kept == [False, False]
    kept.clear()
    (_, row) = run(["map", "diag"], likelihood="regression")
    assert kept == [False, True, True]  # the third is the reference
    assert row.metrics["kl_to_lla"] > 0


@pytest.mark.parametrize("structure", ["diag", "nystrom"])
@pytest.mark.parametrize("tune", ["none", "gridsearch"])
def test_sampled_weights_of_a_regression(structure, tune):
    kwargs = {"subset_of_weights": "all", "hessian_structure": structure}
    method = Method("nn", kwargs, pred_type="nn", tune=tune)
    (row,) = run([method], likelihood="regression", prior_precision=10.0)
    assert row.ok, row.status
    assert {"nll", "rmse", "coverage_90"} <= set(row.metrics)


@pytest.mark.parametrize("structure", ["diag", "nystrom"])
def test_sampled_weights_are_one_row_whatever_the_links(structure):
    kwargs = {"subset_of_weights": "all", "hessian_structure": structure}
    method = Method("nn", kwargs, pred_type="nn", tune="gridsearch")
    (row,) = run([method], links=["probit", "mc"])
    assert row.ok, row.status
    assert row.link == ""


def test_a_noise_per_output():
    kwargs = {
        "subset_of_weights": "all",
        "hessian_structure": "nystrom",
        "sigma_noise": torch.tensor([0.5, 2.0]),
    }
    model = make_model(2)
    (row,) = run({"ella": kwargs}, model, "regression", tune="none")
    assert row.ok, row.status


# --- notes ---------------------------------------------------------------------------


class Perfect(nn.Linear):
    """Right about every example."""

    def forward(self, x):
        classes = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        return super().forward(x) * 0 + 3 * nn.functional.one_hot(classes, 3)


def test_a_search_that_ends_at_its_border_is_a_note():
    (row,) = run(["temperature"], Perfect(2, 3))
    assert "The temperature is 0.001, the border of the range" in row.note


def test_a_border_of_ellas_search_is_a_note():
    """An untrained network: the best curvature is none."""
    (row,) = run(["ella-tempered"])
    assert row.ok, row.status
    assert "border" in row.note


# --- positions -----------------------------------------------------------------------


def images(last=False):
    """8 images of 1×3×4 pixels, a class per pixel, some of them not observed."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 1, 3, 4, generator=generator)
    y = torch.randint(3, (8, 3, 4), generator=generator)
    y[:, 0, 0] = -100
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 1))
    return model.eval(), x, y


def test_every_position_counts_as_one_prediction():
    model, x, y = images()
    data = DataLoader(TensorDataset(x, y), batch_size=4)
    loaders = dict.fromkeys(["train_loader", "val_loader", "test_loader"], data)
    report = run(
        ["map", "temperature", "ella", "ella-complement", "diag", "last-layer-full"],
        model,
        **loaders,
        ood_loaders={"far": DataLoader(TensorDataset(5 + x), batch_size=4)},
        output_layout="channels_first",
    )
    rows = {r.method: r for r in report}
    for name in ("map", "temperature", "ella", "ella-complement"):
        assert rows[name].ok, rows[name].status
    for name in ("diag", "last-layer-full"):
        assert rows[name].status.startswith("not supported: outputs at many positions")
    with torch.no_grad():
        probs = model(x).softmax(1).permute(0, 2, 3, 1).flatten(0, -2)
    known = y.flatten() != -100
    expected = metrics.classification_metrics(probs[known], y.flatten()[known])
    for name, value in expected.items():
        assert rows["map"].metrics[name] == pytest.approx(value, abs=1e-6)
    assert sum(rows["ella"].curves["reliability"]["count"]) == int(known.sum())


def test_positions_of_a_regression():
    model, x, _ = images()
    y = model(x).detach() + 0.1
    data = DataLoader(TensorDataset(x, y), batch_size=4)
    loaders = dict.fromkeys(["train_loader", "val_loader", "test_loader"], data)
    report = run(
        ["map", "ella"], model, "regression", **loaders, output_layout="channels_first"
    )
    for row in report:
        assert row.ok, row.status
        assert row.metrics["rmse"] == pytest.approx(0.1, abs=1e-5)


# --- mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"links": ["mc", "probit", "mc"]}, "links must differ, got 'mc'"),
        ({"links": []}, "links must be among .* got none"),
        ({"seeds": [0, 1, 0]}, "seeds must differ, got 0 more than once"),
        ({"seeds": []}, "seeds must be one integer or more, got none"),
        ({"seeds": [0.5]}, "seeds must be one integer or more, got 0.5"),
        ({"grid_size": 0}, "grid_size must be a positive integer, got 0"),
        ({"n_steps": 0}, "n_steps must be a positive integer, got 0"),
        ({"n_samples": 0}, "n_samples must be a positive integer, got 0"),
        ({"n_bins": -1}, "n_bins must be a positive integer, got -1"),
        ({"prior_precision": 0.0}, "prior_precision must be positive"),
        ({"prior_precision": "big"}, "prior_precision must be one positive number"),
        ({"sigma_noise": -1.0}, "sigma_noise must be positive"),
        ({"memory_budget": "lots"}, "memory_budget must be bytes or a text"),
        ({"output_layout": "sideways"}, "output_layout must be one of"),
        ({"test_loader": DataLoader(TensorDataset(X), 8)}, "test_loader has batches"),
        ({"val_loader": DataLoader(TensorDataset(X), 8)}, "val_loader has batches"),
        ({"train_loader": DataLoader(TensorDataset(X), 8)}, "train_loader has batches"),
        ({"test_loader": []}, "test_loader yielded no batch"),
        ({"test_loader": None}, "test_loader is needed"),
        ({"train_loader": None}, "train_loader is needed"),
        ({"test_loader": loader(0, 24, VALUES)}, r"class indices of shape \(N\), got"),
        ({"val_loader": loader(0, 24, CLASSES[:, None])}, r"val_loader .*\(8, 1\)"),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, dict) else "",
)
def test_mistakes_are_found_before_any_fit(kwargs, match, monkeypatch):
    def forbidden(*args):
        raise AssertionError("was tried")

    monkeypatch.setattr(evaluation, "fit_method", forbidden)
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=match):
        run(["map"], model, **kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_targets_of_a_regression_have_the_shape_of_the_output():
    flat = loader(0, 24, VALUES[:, 0])
    with pytest.raises(ValueError, match=r"values of shape \(N, 2\), got .* \(8,\)"):
        run(["map"], likelihood="regression", test_loader=flat)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"tune": "bayes"}, "tune must be one of"),
        ({"kind": "magic"}, "kind must be one of"),
        ({"pred_type": "laplace"}, "pred_type must be one of"),
    ],
)
def test_a_method_is_checked_when_it_is_made(kwargs, match):
    with pytest.raises(ValueError, match=match):
        Method("mine", **kwargs)


def test_a_single_seed_and_a_numpy_seed():
    assert [r.seed for r in run(["map"], seeds=3)] == [3]
    assert [r.seed for r in run(["map"], seeds=np.arange(2))] == [0, 1]
