"""`compare`: rows, failures, skips, interruption, cache, and what it leaves alone."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import compare, metrics
from laplace_ella.comparison import evaluation, laplace_run, loaders, memory, methods
from laplace_ella.comparison.memory import Problem
from laplace_ella.comparison.methods import Kind, Method, Tuning
from laplace_ella.comparison.report import Report
from laplace_ella.support import resources
from laplace_ella.support.resources import Stopwatch, available_memory, human_bytes

# --- problems ------------------------------------------------------------------------


class Task:
    """A trained network and its loaders."""

    def __init__(self, model, train, val, test, ood):
        self.model, self.train, self.val, self.test = model, train, val, test
        self.ood = {"far": ood}

    def compare(self, methods, **kwargs):
        options = {"progress_bar": False, "n_samples": 32, "n_steps": 5, "grid_size": 3}
        return compare(
            self.model,
            self.likelihood,
            self.train,
            self.test,
            methods=methods,
            **{**options, **kwargs},
        )


def _fit(model, loss, x, y):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def _loaders(x, y):
    def loader(a, b, shuffle=False):
        data = TensorDataset(x[a:b], y[a:b])
        return DataLoader(data, batch_size=16, shuffle=shuffle)

    far = DataLoader(TensorDataset(5 + torch.randn(24, x.shape[1])), batch_size=16)
    return loader(0, 40, True), loader(40, 64), loader(64, 96, True), far


@pytest.fixture(scope="module")
def classification():
    torch.manual_seed(0)
    x = torch.randn(96, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    _fit(model, nn.functional.cross_entropy, x[:40], y[:40])
    task = Task(model, *_loaders(x, y))
    task.likelihood = "classification"
    return task


@pytest.fixture(scope="module")
def regression():
    torch.manual_seed(0)
    x = 2 * torch.randn(96, 1)
    y = torch.sin(x) + 0.1 * torch.randn_like(x)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    _fit(model, nn.functional.mse_loss, x[:40], y[:40])
    task = Task(model, *_loaders(x, y))
    task.likelihood = "regression"
    return task


ALL_CLASSIFICATION = list(methods.available_methods())

#: What laplace-torch 0.2 does not have.
FUNCTIONAL = {"gp-ella", "gp-valla"}


# --- what it reports -----------------------------------------------------------------


def test_every_method_is_a_row_that_is_ok(classification):
    report = classification.compare(
        ALL_CLASSIFICATION,
        val_loader=classification.val,
        ood_loaders=classification.ood,
        links=["probit"],
    )
    status = {r.method: r.status for r in report}
    assert list(status) == ALL_CLASSIFICATION
    missing = {m for m, s in status.items() if "laplace-torch 0.2" in s}
    assert all(s == "ok" for m, s in status.items() if m not in missing), status
    assert missing in (set(), FUNCTIONAL)
    for result in report:
        if result.ok:
            assert set(result.metrics) == {
                "accuracy", "nll", "ece", "brier", "auroc:far",
            }  # fmt: skip
            costs = {"fit_s", "tune_s", "predict_s", "floats"}
            assert costs <= set(result.costs)


def test_valla_runs_for_regression_and_learns_its_prior(regression):
    """The one method that is fitted by gradient steps: its prior comes from them."""
    (result,) = regression.compare(["gp-valla"], prior_precision=1.0, reference=None)
    if result.status == "not available in laplace-torch 0.2":
        return
    assert result.ok, result.status
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.settings["tuning"] == "none"
    assert result.settings["prior_precision"] != 1.0
    assert result.costs["fit_s"] > 0


def test_valla_that_fails_is_a_row_that_says_why(classification):
    """For example inducing inputs of a shape that the network does not take."""
    wrong = {
        "subset_of_weights": "all",
        "hessian_structure": "gp",
        "functional_approximation": "variational",
        "inducing_locations": torch.zeros(4, 7),
    }
    mine = {"wrong": wrong, "map": Method("map", kind="map")}
    failed, fine = classification.compare(mine, links=["probit"])
    assert fine.ok
    if failed.status != "not available in laplace-torch 0.2":
        assert failed.status.startswith("failed: RuntimeError")
        assert "shapes cannot be multiplied" in failed.status


def test_metrics_of_map_are_those_of_the_network(classification):
    (result,) = classification.compare(["map"], ood_loaders=classification.ood)
    x, y = classification.test.dataset.tensors
    far = classification.ood["far"].dataset.tensors[0]
    with torch.no_grad():
        probs = torch.softmax(classification.model(x), -1)
        far_probs = torch.softmax(classification.model(far), -1)
    for name, value in metrics.classification_metrics(probs, y).items():
        assert result.metrics[name] == pytest.approx(value, abs=1e-6)
    expected = metrics.ood_auroc(1 - probs.max(-1)[0], 1 - far_probs.max(-1)[0])
    assert result.metrics["auroc:far"] == pytest.approx(expected)
    curve = metrics.error_versus_confidence(probs, y, far_probs)
    assert result.curves["error_below:far"]["error"] == pytest.approx(curve.error)
    assert sum(result.curves["reliability"]["count"]) == len(y)


def test_laplace_rows_are_what_laplace_gives(classification):
    from laplace import Laplace

    report = classification.compare(
        {"mine": {"subset_of_weights": "all", "hessian_structure": "full"}},
        tune="none",
        prior_precision=3.0,
        links=["probit"],
    )
    la = Laplace(
        copy.deepcopy(classification.model),
        "classification",
        "all",
        "full",
        prior_precision=3.0,
    )
    la.fit(classification.train)
    x, y = classification.test.dataset.tensors
    expected = metrics.nll(la(x, link_approx="probit"), y)
    assert report["mine"][0].metrics["nll"] == pytest.approx(expected, abs=1e-5)
    assert report["mine"][0].settings["prior_precision"] == 3.0
    assert report["mine"][0].costs["floats"] == la.n_params**2


def test_links_are_rows_and_share_the_fit(classification):
    report = classification.compare(["map", "last-layer-kron"], links=["mc", "probit"])
    assert [(r.method, r.link) for r in report] == [
        ("map", ""),
        ("last-layer-kron", "mc"),
        ("last-layer-kron", "probit"),
    ]
    first, second = report["last-layer-kron"]
    assert first.costs["fit_s"] == second.costs["fit_s"]
    assert first.metrics["nll"] != second.metrics["nll"]


def test_seeds_are_reproducible_and_differ(classification):
    def values(**kwargs):
        report = classification.compare(["ella-marglik"], links=["mc"], **kwargs)
        return [r.metrics["nll"] for r in report]

    two = values(seeds=[0, 1])
    assert len(set(two)) == 2
    # Up to rounding, which the way of differentiating decides that was faster.
    assert values(seeds=[1]) == pytest.approx(two[1:], rel=1e-6)


def test_temperature_scaling_is_at_the_minimum(classification):
    report = classification.compare(["temperature"], val_loader=classification.val)
    x, y = classification.val.dataset.tensors
    with torch.no_grad():
        logits = classification.model(x)
    best = report["temperature"][0].settings["softmax_temperature"]

    def loss(t):
        return metrics.nll(torch.softmax(logits / t, -1), y)

    assert loss(best) <= min(loss(0.97 * best), loss(1.03 * best))


def test_grid_search_finds_the_prior_with_the_best_validation_nll(classification):
    def result(**kwargs):
        return compare(
            classification.model,
            "classification",
            classification.train,
            classification.val,
            classification.val,
            methods=["last-layer-full"],
            links=["probit"],
            progress_bar=False,
            **kwargs,
        ).results[0]

    grid = torch.logspace(-4, 4, 5).tolist()
    scores = [result(tune="none", prior_precision=p).metrics["nll"] for p in grid]
    chosen = result(tune="gridsearch", grid_size=5).settings["prior_precision"]
    assert chosen == pytest.approx(grid[scores.index(min(scores))])


def test_regression_metrics_and_kl_to_exact_lla(regression):
    report = regression.compare(
        ["map", "kron", "full", "ella-marglik"],
        tune="none",
        sigma_noise=0.1,
        ood_loaders=regression.ood,
    )
    names = {"nll", "rmse", "coverage_50", "coverage_90", "coverage_95", "calibration"}
    assert names <= set(report["map"][0].metrics)
    assert "kl_to_lla" not in report["full"][0].metrics
    assert "kl_to_lla" not in report["map"][0].metrics
    assert report["kron"][0].metrics["kl_to_lla"] > 0
    assert report["full"][0].metrics["auroc:far"] > 0.9
    rmses = {round(r.metrics["rmse"], 6) for r in report}
    assert len(rmses) == 1  # linearised methods keep the mean of the network


def test_reference_is_fitted_when_it_is_not_in_the_list(regression):
    listed = regression.compare(["full", "kron"], tune="none")
    alone = regression.compare(["kron"], tune="none")
    assert [r.method for r in alone] == ["kron"]
    expected = listed["kron"][0].metrics["kl_to_lla"]
    assert alone["kron"][0].metrics["kl_to_lla"] == pytest.approx(expected, rel=1e-4)
    without = regression.compare(["kron"], tune="none", reference=None)
    assert "kl_to_lla" not in without["kron"][0].metrics


def test_full_nystrom_with_complement_equals_exact_lla(regression):
    exact = {
        "subset_of_weights": "all",
        "hessian_structure": "nystrom",
        "n_eigenvalues": 25,
        "complement": "prior",
    }
    report = regression.compare({"ella": exact}, tune="none", sigma_noise=0.1)
    assert report["ella"][0].metrics["kl_to_lla"] == pytest.approx(0, abs=1e-3)


def test_noise_is_estimated_from_residuals(regression):
    (result,) = regression.compare(["map"], val_loader=regression.val)
    x, y = regression.val.dataset.tensors
    with torch.no_grad():
        sigma = metrics.rmse(regression.model(x), y)
    x, y = regression.test.dataset.tensors
    with torch.no_grad():
        mean = regression.model(x)
    covariance = torch.full((len(x), 1, 1), sigma**2)
    expected = metrics.gaussian_nll(mean, covariance, y)
    assert result.metrics["nll"] == pytest.approx(expected, rel=1e-4)


def test_grid_search_of_a_regression_prior_is_not_blind(regression):
    # Laplace's default loss is the MSE, which the prior does not change: every
    # candidate ties, and the first one, 1e-4, wins.
    report = regression.compare(
        ["last-layer-full"],
        val_loader=regression.val,
        tune="gridsearch",
        sigma_noise=1.0,
    )
    # With noise far above the residuals any further variance hurts: 1e4 is best.
    prior = report["last-layer-full"][0].settings["prior_precision"]
    assert prior == pytest.approx(1e4)


# --- failures are rows ---------------------------------------------------------------


def _conv_model():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2)),
        nn.Conv1d(1, 4, 1),
        nn.BatchNorm1d(4),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).eval()


def test_kfac_names_the_layers_that_it_does_not_support(classification):
    report = compare(
        _conv_model(),
        "classification",
        classification.train,
        classification.test,
        methods=["kron", "last-layer-kron"],
        links=["probit"],
        n_steps=2,
        progress_bar=False,
    )
    status = {r.method: r.status for r in report}
    assert status["kron"] == "not supported: BatchNorm1d, Conv1d (KFAC)"
    assert status["last-layer-kron"] == "ok"


def test_a_method_that_would_not_fit_is_skipped_before_the_attempt(
    classification, monkeypatch
):
    def forbidden(*args, **kwargs):
        raise AssertionError("was tried")

    monkeypatch.setattr(evaluation, "fit_method", forbidden)
    (result,) = classification.compare(["full"], memory_budget=1000)
    assert result.status == "skipped: would need 43 kB (limit 1 kB)"


def test_out_of_memory_and_unknown_errors_are_rows(classification, monkeypatch):
    import laplace

    class Broken:
        def __init__(self, model, likelihood, error, **kwargs):
            raise error

    monkeypatch.setattr(
        laplace, "Laplace", lambda model, lik, **k: Broken(model, lik, k["error"])
    )
    errors = {
        "oom": torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        "cpu": RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory"
        ),
        "no": NotImplementedError("no such layer\nmore"),
        "gone": ImportError("No module named 'x'"),
        "bug": ZeroDivisionError("division by zero"),
    }
    report = classification.compare(
        [Method(name, {"error": error}) for name, error in errors.items()]
    )
    assert {r.method: r.status for r in report} == {
        "oom": "out of memory",
        "cpu": "out of memory",
        "no": "not supported: no such layer",
        "gone": "not available: No module named 'x'",
        "bug": "failed: ZeroDivisionError: division by zero",
    }


def test_a_failure_of_one_link_keeps_the_others(classification, monkeypatch):
    original = evaluation.Evaluation.evaluate

    def failing(self, fitted, empty, method):
        if empty.link == "mc":
            raise RuntimeError("not positive definite")
        return original(self, fitted, empty, method)

    monkeypatch.setattr(evaluation.Evaluation, "evaluate", failing)
    report = classification.compare(["last-layer-diag"], links=["mc", "probit"])
    assert [r.status for r in report] == [
        "failed: RuntimeError: not positive definite",
        "ok",
    ]


def test_nan_predictions_are_a_failure(classification):
    class Broken(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * math.nan

    model = Broken(nn.Linear(2, 3))
    report = compare(
        model,
        "classification",
        classification.train,
        classification.test,
        methods=["map"],
        progress_bar=False,
    )
    assert report["map"][0].status == (
        "failed: ValueError: 32 of 32 predictions are NaN or infinite"
    )


def test_without_validation_data(classification):
    report = classification.compare(
        ["temperature", "ella", "ella-tempered"], links=["probit"]
    )
    rows = {r.method: r for r in report}
    assert rows["temperature"].status == "skipped: needs a val_loader"
    assert (
        rows["ella-tempered"].status
        == "skipped: tuning by temperature needs a val_loader"
    )
    assert rows["ella"].ok
    assert rows["ella"].note.endswith("no val_loader, so early_stopping was left out")


def test_temperature_scaling_does_not_apply_to_regression(regression):
    (result,) = regression.compare(["temperature"], val_loader=regression.val)
    assert result.status.startswith("not supported")


def test_methods_of_laplace_03_on_laplace_02(classification, monkeypatch):
    monkeypatch.setattr(memory, "_has_functional_methods", lambda: False)
    report = classification.compare(["gp-ella", "gp-valla"])
    assert {r.status for r in report} == {"not available in laplace-torch 0.2"}


def test_rank_warning_becomes_a_note(classification):
    spec = {
        "subset_of_weights": "all",
        "hessian_structure": "nystrom",
        "n_eigenvalues": 500,
    }
    report = classification.compare({"ella": spec}, links=["probit"])
    assert "n_eigenvalues=500 exceeds the usable rank" in report["ella"][0].note


# --- interruption and cache ----------------------------------------------------------


def test_interruption_keeps_what_is_finished(classification, monkeypatch):
    original = evaluation.fit_method

    def interrupted(method, *args):
        if method.name == "diag":
            raise KeyboardInterrupt
        return original(method, *args)

    monkeypatch.setattr(evaluation, "fit_method", interrupted)
    report = classification.compare(["map", "diag", "last-layer-diag"])
    assert report.interrupted
    assert {r.method: r.status for r in report} == {
        "map": "ok",
        "diag": "interrupted",
        "last-layer-diag": "interrupted",
    }
    assert "Interrupted" in str(report)


def test_cache_adds_only_new_methods(classification, monkeypatch, tmp_path):
    path = tmp_path / "cache.json"
    first = classification.compare(["map", "last-layer-diag"], cache=path)
    tried = []
    original = evaluation.fit_method

    def spy(method, *args):
        tried.append(method.name)
        return original(method, *args)

    monkeypatch.setattr(evaluation, "fit_method", spy)
    second = classification.compare(["map", "last-layer-diag", "diag"], cache=path)
    assert tried == ["diag"]
    assert second.results[: len(first)] == list(first.results)
    # Another prior is another result; other data too.
    classification.compare(["last-layer-diag"], cache=path, prior_precision=2.0)
    assert tried == ["diag", "last-layer-diag"]
    compare(
        classification.model,
        "classification",
        classification.train,
        classification.val,
        methods=["map"],
        progress_bar=False,
        cache=path,
    )
    assert tried == ["diag", "last-layer-diag", "map"]
    assert {r.method for r in Report.load(path)} == {"map", "last-layer-diag", "diag"}


def test_cache_tries_failed_methods_again(classification, monkeypatch, tmp_path):
    path = tmp_path / "cache.json"
    (result,) = classification.compare(["full"], memory_budget=1000, cache=path)
    assert not result.ok
    report = classification.compare(["full"], cache=path, links=["probit"])
    assert report["full"][0].ok


def test_interrupted_run_resumes_from_its_cache(classification, monkeypatch, tmp_path):
    path = tmp_path / "cache.json"
    original = evaluation.fit_method

    def interrupted(method, *args):
        if method.name == "diag":
            raise KeyboardInterrupt
        return original(method, *args)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "fit_method", interrupted)
        classification.compare(["map", "diag"], cache=path)
    report = classification.compare(["map", "diag"], cache=path, links=["probit"])
    assert all(r.ok for r in report)


# --- what it leaves alone ------------------------------------------------------------


def test_model_random_states_and_modes_are_unchanged(classification):
    model = classification.model.train()
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    states = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),  # noqa: NPY002
        random.getstate(),
    )
    classification.compare(
        ["map", "last-layer-kron", "gp-subset", "ella-marglik"],
        ood_loaders=classification.ood,
    )
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert random.getstate() == states[2]
    model.eval()


def test_progress_goes_to_stderr_row_by_row(classification, capsys):
    classification.compare(["map", "kron"], progress_bar=True, links=["probit"])
    out, err = capsys.readouterr()
    assert out == ""
    assert "map" in err
    assert "kron (probit)" in err
    assert "NLL" in err


# --- arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"methods": ["nope"]}, "Unknown method 'nope'. Known: map"),
        ({"methods": ["map", "map"]}, "more than once"),
        ({"methods": ["map"], "links": ["logit"]}, "links must be among"),
        ({"methods": ["map"], "tune": "gridsearch"}, "pass val_loader"),
        ({"methods": ["map"], "tune": "bayes"}, "tune must be one of"),
    ],
)
def test_mistakes_are_errors_with_a_remedy(classification, kwargs, match):
    with pytest.raises(ValueError, match=match):
        classification.compare(**kwargs)


def test_likelihood_is_checked(classification):
    with pytest.raises(ValueError, match="'classification' or 'regression'"):
        compare(classification.model, "poisson", None, None)


def test_resolve_methods_forms():
    own = Method("own", {"hessian_structure": "diag"})
    assert methods.resolve_methods([own, "map"], "classification")[0] is own
    (named,) = methods.resolve_methods({"new name": own}, "classification")
    assert named.name == "new name"
    assert methods.resolve_methods("map", "regression")[0].kind is Kind.MAP
    with pytest.raises(TypeError, match="name, a Method"):
        methods.resolve_methods([3], "classification")
    with pytest.raises(TypeError, match="mapping of keyword arguments"):
        methods.resolve_methods({"a": 3}, "classification")


def test_default_methods_are_the_rows_that_matter():
    names = [m.name for m in methods.default_methods("classification")]
    assert names == [
        "map", "temperature", "exact", "exact-calibrated", "ella", "ella-calibrated",
        "kron", "kron-calibrated", "diag", "diag-calibrated",
        "last-layer-kron", "last-layer-kron-calibrated",
        "last-layer-full", "last-layer-full-calibrated", "gp-ella",
    ]  # fmt: skip
    regression = [m.name for m in methods.default_methods("regression")]
    assert regression == [name for name in names if name != "temperature"]
    assert set(names) < set(methods.available_methods())


# --- estimates -----------------------------------------------------------------------

RESNET = Problem(
    n_data=50_000,
    output_shape=(10,),
    n_params=269_722,
    n_params_last=650,
    n_activations=565_000,
    batch=128,
    itemsize=4,
    kron_floats=1_000_000,
    kron_floats_last=4_196,
)


def known(name):
    return methods.available_methods()[name]


def test_estimate_of_full_is_terabytes_for_a_resnet():
    needs = memory.estimate(known("full"), RESNET, 16 * 10**9)
    assert needs.batch is None
    assert needs.bytes > 4 * 4 * 269_722**2
    assert human_bytes(needs.bytes) == "1.2 TB"


def test_estimate_splits_batches_before_giving_up():
    needs = memory.estimate(known("diag"), RESNET, 16 * 10**9)
    assert needs.batch == 16
    assert needs.bytes <= 16 * 10**9
    assert memory.estimate(known("diag"), RESNET, None).batch == 128


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"n_eigenvalues": "exact"},
        {"subset_of_weights": "last_layer"},
        {"n_eigenvalues": 3, "chunk_size": 1, "basis_dtype": torch.bfloat16},
        {"memory_budget": "20 kB", "n_eigenvalues": 3, "chunk_size": 1},
    ],
    ids=str,
)
def test_the_row_of_ella_follows_its_own_estimate(classification, kwargs):
    """It runs within the limit that it says it needs, and is skipped below."""
    from laplace import Laplace

    kwargs = {"subset_of_weights": "all", "hessian_structure": "nystrom", **kwargs}
    one = {"links": ["probit"], "tune": "none"}
    name = {"last_layer_name": "2"} if kwargs["subset_of_weights"] != "all" else {}
    la = Laplace(classification.model, "classification", **kwargs, **name)
    estimate = la.estimate_memory(classification.train)
    own = "memory_budget" in kwargs
    needed = estimate.total if own else estimate.needed
    (result,) = classification.compare({"ella": kwargs}, memory_budget=needed, **one)
    assert result.ok, result.status
    below = needed - 100 if own else 1000
    if not own:  # passes are smaller within a small budget, and so is what is needed
        la.memory_budget = below
        needed = la.estimate_memory(classification.train).needed
    (result,) = classification.compare({"ella": kwargs}, memory_budget=below, **one)
    assert result.status == (
        f"skipped: would need {human_bytes(needed)} (limit {human_bytes(below)})"
    )


def test_ella_is_fitted_within_the_limit_of_memory(classification, monkeypatch):
    from laplace_ella import ELLALaplace

    seen = []
    original = ELLALaplace.fit

    def spy(self, loader, *args, **kwargs):
        seen.append(self.estimate_memory(loader))
        return original(self, loader, *args, **kwargs)

    monkeypatch.setattr(ELLALaplace, "fit", spy)
    kwargs = {"subset_of_weights": "all", "hessian_structure": "nystrom"}
    options = {"mine": {**kwargs, "n_eigenvalues": 3, "chunk_size": 1}}
    one = {"links": ["probit"]}
    (result,) = classification.compare(options, memory_budget="10 kB", **one)
    assert result.ok, result.status
    assert seen[-1].budget == 10_000
    assert seen[-1].method == "streaming"
    (result,) = classification.compare(options, memory_budget=1000, **one)
    assert result.status.startswith("skipped: would need")
    assert len(seen) == 1


def test_estimate_of_jacobian_memory_is_near_what_is_measured():
    if resources._resident_bytes() is None:
        pytest.skip("this system does not report the resident set size")
    from laplace import Laplace

    layers = [nn.Conv2d(1, 16, 3, padding=1)]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 144, 10)).eval()
    x = torch.randn(12, 1, 12, 12)
    problem = memory.describe_problem(model, x, 100)
    expected = memory.estimate(known("diag"), problem, None).bytes
    la = Laplace(model, "classification", "all", "diag")
    with Stopwatch(torch.device("cpu")) as watch:
        la.backend.jacobians(x)
    assert 0.3 * expected < watch.peak_bytes < 1.5 * expected


def test_outputs_at_positions_are_refused_before_any_fit():
    """And the outputs of all positions are counted, as `doctor` prints them."""
    model = nn.Sequential(nn.Conv2d(1, 3, 1)).eval()
    x, y = torch.randn(4, 1, 2, 5), torch.randint(3, (4, 2, 5))
    loader = DataLoader(TensorDataset(x, y), 2)
    with pytest.raises(ValueError, match=r"\(B, C\), got shape \(1, 3, 2, 5\)"):
        compare(model, "classification", loader, loader, progress_bar=False)
    assert memory.describe_problem(model, x, 4).n_outputs == 30


def test_describe_problem_counts():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).eval()
    problem = memory.describe_problem(model, torch.randn(7, 3), 70)
    assert problem == Problem(
        n_data=70,
        output_shape=(2,),
        n_params=20 + 10 + 12,
        n_params_last=12,
        n_activations=5 + 5 + 2,
        batch=7,
        itemsize=4,
        kron_floats=25 + 9 + 4 + 25,
        kron_floats_last=4 + 25,
        kron_unsupported=("BatchNorm1d",),
        last_layer="2",
    )
    assert problem.n_outputs == 2


def test_rebatching_only_where_it_changes_nothing_else():
    data = TensorDataset(torch.arange(10.0))
    loader = DataLoader(data, batch_size=5)
    assert [len(b[0]) for b in loaders.rebatched(loader, 4)] == [4, 4, 2]
    assert loaders.rebatched(loader, 8) is loader
    dropping = DataLoader(data, batch_size=6, drop_last=True)
    assert loaders.rebatched(dropping, 2) is dropping


def test_splitting_batches_does_not_change_predictions(classification, monkeypatch):
    def run():
        report = classification.compare(["diag", "ella-marglik"], links=["probit"])
        return [r.metrics["nll"] for r in report]

    whole = run()
    monkeypatch.setattr(laplace_run, "BATCH_TARGET", 1)
    assert run() == pytest.approx(whole, abs=1e-5)


def test_tuning_enum_says_what_needs_validation_data():
    assert [t for t in Tuning if t.needs_validation] == [
        Tuning.GRIDSEARCH,
        Tuning.EARLY_STOPPING,
        Tuning.TEMPERATURE,
        Tuning.CALIBRATION,
    ]


def test_available_memory_is_positive():
    free = available_memory(torch.device("cpu"))
    assert free is None or free > 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.1e12, "7.1 TB"), (16e9, "16.0 GB"), (2.5e6, "2.5 MB"), (812e3, "812 kB")],
)
def test_human_bytes(value, text):
    assert human_bytes(value) == text
