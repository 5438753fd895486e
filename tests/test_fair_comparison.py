"""`compare` is fair: every link has its tuning, rows their settings, differences their
intervals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import Method, compare, metrics
from laplace_ella.comparison import resampling, search
from laplace_ella.comparison.memory import _has_functional_methods
from laplace_ella.comparison.predictions import moments
from laplace_ella.comparison.report import Report, Result
from laplace_ella.comparison.resampling import Difference, difference
from laplace_ella.tuning.calibration import temperature_scaling
from tests.dense import centered_probit

# --- a small overconfident network ---------------------------------------------------

N_TRAIN, N_VAL, N_TEST = 30, 60, 80


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N_TRAIN + N_VAL + N_TEST, 2, generator=generator)
    noise = 0.8 * torch.randn(len(x), generator=generator)
    y = (x[:, 0] + noise > 0).long() + (x[:, 1] > 0).long()
    return x, y


def loaders(x, y):
    cuts = {
        "train_loader": slice(0, N_TRAIN),
        "val_loader": slice(N_TRAIN, N_TRAIN + N_VAL),
        "test_loader": slice(N_TRAIN + N_VAL, None),
    }
    return {
        name: DataLoader(TensorDataset(x[part], y[part]), batch_size=20)
        for name, part in cuts.items()
    }


def trained(loss, x, y, n_outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, n_outputs))
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss(model(x[:N_TRAIN]), y[:N_TRAIN]).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def task():
    x, y = data()
    return trained(nn.functional.cross_entropy, x, y, 3), loaders(x, y)


@pytest.fixture(scope="module")
def regression_task():
    x, _ = data()
    y = torch.stack([x.sum(-1), x[:, 0].sin()], -1)
    y = y + 0.3 * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return trained(nn.functional.mse_loss, x, y, 2), loaders(x, y)


def run(task, methods, likelihood="classification", **kwargs):
    model, parts = task
    options = {
        "links": ["probit"],
        "n_samples": 32,
        "grid_size": 5,
        "tune": "gridsearch",
        "progress_bar": False,
        "reference": None,
    }
    report = compare(
        model, likelihood, methods=methods, **{**options, **parts, **kwargs}
    )
    for result in report:
        assert result.ok, (result.method, result.status)
    return report


def split(task, name):
    return task[1][name].dataset.tensors


def laplace(method, **kwargs):
    subset, structure = method
    return {"subset_of_weights": subset, "hessian_structure": structure, **kwargs}


FAMILY = [
    ("all", "full"),
    ("all", "kron"),
    ("all", "diag"),
    ("last_layer", "full"),
    ("last_layer", "kron"),
]


def built(task, kind, **kwargs):
    from laplace import Laplace

    la = Laplace(copy.deepcopy(task[0]), "classification", **laplace(kind, **kwargs))
    la.fit(task[1]["train_loader"])
    return la


# --- every link has its tuning -------------------------------------------------------

TUNED = [
    "exact", "exact-calibrated", "ella", "ella-calibrated", "ella-tempered",
    "diag", "diag-calibrated", "last-layer-full", "last-layer-kron-calibrated",
    *(["gp-ella"] if _has_functional_methods() else []),
]  # fmt: skip


@pytest.mark.parametrize("name", TUNED)
def test_rows_do_not_depend_on_the_other_links(task, name):
    links = ["mc", "probit", "probit_centered"]
    together = run(task, [name], links=links)
    assert [r.link for r in together] == links
    for link, row in zip(links, together, strict=True):
        (alone,) = run(task, [name], links=[link])
        # Ways to differentiate are chosen by their speed, and round differently.
        for setting, value in alone.settings.items():
            near = isinstance(value, float)
            value = pytest.approx(value, rel=1e-3) if near else value
            assert row.settings[setting] == value
        assert row.metrics == pytest.approx(alone.metrics, rel=1e-4)


def test_links_are_tuned_apart(task):
    """What is best for one link is not for the other."""
    report = run(task, ["exact", "diag"], links=["mc", "probit"], grid_size=41)
    for name in ("exact", "diag"):
        mc, probit = (r.settings["prior_precision"] for r in report[name])
        assert mc != probit


def test_passes_over_validation_data_serve_all_links(task, monkeypatch):
    counted = []

    def spy(la, x):
        counted.append(len(x))
        return moments(la, x)

    monkeypatch.setattr(search, "moments", spy)
    names = ["diag", "last-layer-full-calibrated"]
    run(task, names, links=["probit"])
    alone = list(counted)
    assert sum(alone) == 2 * 5 * N_VAL  # methods, candidates
    counted.clear()
    run(task, names, links=["probit", "mc", "bridge", "probit_centered"])
    assert counted == alone


@pytest.mark.parametrize("kind", FAMILY, ids="-".join)
@pytest.mark.parametrize("link", ["probit", "bridge"])
def test_the_grid_search_is_laplace_torchs(task, kind, link):
    """The same grid, loss and choice as its own method, which takes one link."""
    from laplace_ella.comparison.laplace_run import categorical_nll

    (row,) = run(task, {"m": laplace(kind)}, links=[link], grid_size=9)
    la = built(task, kind)
    la.optimize_prior_precision(
        pred_type="glm",
        method="gridsearch",
        val_loader=task[1]["val_loader"],
        loss=categorical_nll,
        link_approx=link,
        grid_size=9,
    )
    prior = float(la.prior_precision)
    assert row.settings["prior_precision"] == pytest.approx(prior, rel=1e-4)
    x, y = split(task, "test_loader")
    expected = metrics.nll(la(x, link_approx=link), y)
    assert row.metrics["nll"] == pytest.approx(expected, rel=1e-4)


# --- calibration ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILY, ids="-".join)
def test_temperature_is_a_scale_of_another_prior(task, kind):
    """On which the search rests: f_var(δ, T) = T·f_var(δT, 1)."""
    x, _ = split(task, "val_loader")
    tempered = built(task, kind, prior_precision=0.7, temperature=5.0)
    plain = built(task, kind, prior_precision=3.5)
    torch.testing.assert_close(
        moments(tempered, x)[1], 5.0 * moments(plain, x)[1], rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("kind", FAMILY, ids="-".join)
@pytest.mark.parametrize("link", ["probit", "probit_centered"])
def test_a_calibrated_row_is_what_its_settings_give(task, kind, link):
    method = Method("m", laplace(kind), tune="calibration")
    (row,) = run(task, [method], links=[link])
    chosen = row.settings
    assert chosen["chosen"] == ["prior_precision", "temperature", "softmax_temperature"]
    la = built(
        task,
        kind,
        prior_precision=chosen["prior_precision"],
        temperature=chosen["temperature"],
    )
    x, y = split(task, "test_loader")
    mean, covariance = (t.double() for t in moments(la, x))
    tau = chosen["softmax_temperature"]
    if link == "probit":
        variance = covariance.diagonal(dim1=-2, dim2=-1) / tau**2
        p = torch.softmax(mean / tau / (1 + math.pi / 8 * variance).sqrt(), -1)
    else:
        p = centered_probit(mean / tau, covariance / tau**2)
    expected = -p.gather(-1, y[:, None]).log().mean()
    assert row.metrics["nll"] == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("link", ["mc", "probit"])
def test_calibrated_rows_are_not_above_temperature_scaling(task, link):
    """On the data of the choice; with three settings against one."""
    validation = {"test_loader": task[1]["val_loader"]}
    names = ["temperature", "ella-calibrated", "diag-calibrated", "kron-calibrated"]
    report = run(task, names, links=[link], n_samples=256, **validation)
    x, y = split(task, "val_loader")
    with torch.no_grad():
        logits = task[0](x)
    tau = temperature_scaling(logits, y)
    scaled = metrics.nll(torch.softmax(logits / tau, -1), y)
    assert report["temperature"][0].metrics["nll"] == pytest.approx(scaled, rel=1e-6)
    # Random numbers of Monte-Carlo predictions are not those of the search.
    slack = 0.01 if link == "mc" else 1e-4
    for row in report:
        assert row.metrics["nll"] <= scaled + slack, row.method


@pytest.mark.parametrize("name", ["ella-calibrated", "diag-calibrated"])
def test_regression_is_calibrated_by_its_noise(regression_task, name):
    validation = {"test_loader": regression_task[1]["val_loader"]}
    plain = name.removesuffix("-calibrated")
    plain = "exact" if plain == "ella" else plain
    wrong = {"sigma_noise": 2.0}
    report = run(regression_task, [plain, name], "regression", **validation, **wrong)
    rows = {r.method: r for r in report}
    assert rows[name].settings["chosen"][-1] == "sigma_noise"
    assert 0.1 < rows[name].settings["sigma_noise"] < 1.0
    assert rows[plain].settings["sigma_noise"] == 2.0
    assert rows[name].metrics["nll"] < rows[plain].metrics["nll"] - 0.5


@pytest.mark.parametrize("kind", FAMILY, ids="-".join)
def test_a_calibrated_regression_is_what_its_settings_give(regression_task, kind):
    from laplace import Laplace

    method = Method("m", laplace(kind), tune="calibration")
    (row,) = run(regression_task, [method], "regression", sigma_noise=1.5)
    names = ("prior_precision", "temperature", "sigma_noise")
    chosen = {name: row.settings[name] for name in names}
    la = Laplace(
        copy.deepcopy(regression_task[0]), "regression", **laplace(kind), **chosen
    )
    la.fit(regression_task[1]["train_loader"])
    x, y = split(regression_task, "test_loader")
    mean, covariance = la(x)
    variance = covariance.diagonal(dim1=-2, dim2=-1) + chosen["sigma_noise"] ** 2
    expected = -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(-1)
    assert row.metrics["nll"] == pytest.approx(float(expected.mean()), rel=1e-3)


@pytest.mark.parametrize(
    "method",
    [
        Method("nn", laplace(("all", "diag")), tune="calibration", pred_type="nn"),
        Method("gp", laplace(("all", "gp"), n_subset=10), tune="calibration"),
        Method(
            "options",
            laplace(("all", "diag")),
            tune="calibration",
            tune_kwargs={"loss": metrics.nll},
        ),
    ],
    ids=lambda method: method.name,
)
def test_what_cannot_be_calibrated_says_so(task, method):
    model, parts = task
    (row,) = compare(
        model, "classification", methods=[method], progress_bar=False, **parts
    )
    assert row.status == "not supported: calibration needs Gaussian function values"


# --- the report ----------------------------------------------------------------------


def test_a_border_of_laplace_torchs_search_is_a_note_and_a_star(task):
    """The best prior lies outside of a grid between 1e3 and 1e4."""
    narrow = {"log_prior_prec_min": 3, "log_prior_prec_max": 4}
    method = Method("m", laplace(("all", "diag")), "laplace", "gridsearch", narrow)
    report = run(task, [method, "map"])
    row = report["m"][0]
    assert row.settings["at_border"]
    assert "The best prior precision, 1e+03, lies at the border" in row.note
    assert "δ = 1e+03*" in str(report)
    assert row.note in str(report)


def test_the_report_says_what_was_chosen(task):
    names = ["map", "temperature", "ella", "diag", "diag-calibrated", "ella-marglik"]
    report = run(task, names)
    lines = [line for line in str(report).splitlines() if " = " in line]
    shown = {line.split()[0]: line for line in lines}
    assert "validation NLL  τ = " in shown["temperature"]
    assert "validation NLL  N = " in shown["ella"]
    assert "validation NLL  δ = " in shown["diag"]
    assert "evidence        δ = " in shown["ella-marglik"]
    for symbol in ("δ", "T", "τ"):
        assert f"{symbol} = " in shown["diag-calibrated"]
    table = report.to_csv().splitlines()
    for column in ("nll_to_best", "nll_to_best_ci95", "tuning", "softmax_temperature"):
        assert column in table[0].split(",")
    assert "| method | link | NLL − best | chosen by | settings |" in (
        report.to_markdown()
    )


# --- differences ---------------------------------------------------------------------


def predictions(n=300, C=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(n, C, generator=generator).softmax(-1)
    return probs, torch.randint(C, (n,), generator=generator)


def drawn(n, seed=0):
    """The draws as indices of examples."""
    for weights in resampling._weights(n, seed):
        for row in weights:
            yield torch.arange(n).repeat_interleave(row.long())


def test_replicates_are_the_metrics_of_drawn_examples():
    probs, y = predictions()
    found = resampling.classification_replicates(probs, y, 15)
    for i, index in zip(range(5), drawn(len(y)), strict=False):
        expected = metrics.classification_metrics(probs[index], y[index], 15)
        assert {k: v[i] for k, v in found.items()} == pytest.approx(expected, abs=1e-6)


def test_replicates_of_a_regression_and_of_detection(monkeypatch):
    monkeypatch.setattr(resampling, "CHUNK", 1000)  # several chunks of draws
    mean, y = torch.randn(90, 2), torch.randn(90, 2)
    variance = 0.5 + torch.rand(90, 2)
    found = resampling.regression_replicates(mean, variance, y)
    assert {len(values) for values in found.values()} == {resampling.N_DRAWS}
    inside = torch.randint(6, (90,)) / 5  # with ties
    outside = torch.randint(1, 7, (40,)) / 5
    auroc = resampling.auroc_replicates(inside, outside)
    draws = zip(range(5), drawn(90), drawn(40, seed=1), strict=False)
    for i, index, other in draws:
        expected = metrics.regression_metrics(mean[index], variance[index], y[index])
        for name, values in found.items():
            assert values[i] == pytest.approx(expected[name], rel=1e-5)
        expected = metrics.ood_auroc(inside[index], outside[other])
        assert auroc[i] == pytest.approx(expected, abs=1e-6)


def test_the_interval_of_a_mean_is_that_of_paired_differences():
    probs, y = predictions()
    others = (probs.log() / 1.2).softmax(-1)
    both = [
        resampling.classification_replicates(p, y, 15)["nll"] for p in (probs, others)
    ]
    terms = [metrics.nll_per_example(p, y) for p in (probs, others)]
    error = float((terms[0] - terms[1]).std()) / math.sqrt(len(y))
    found = difference(metrics.nll(probs, y), metrics.nll(others, y), *both)
    assert found.value == pytest.approx(float((terms[0] - terms[1]).mean()))
    # The standard deviation of 200 draws is known to 5 %.
    assert found.half_width == pytest.approx(1.96 * error, rel=0.2)
    # Far narrower than the interval of either alone.
    alone = 1.96 * float(terms[0].std()) / math.sqrt(len(y))
    assert found.half_width < alone / 2


@pytest.mark.parametrize(
    ("found", "clear"),
    [
        (Difference(0.0, 0.0), False),
        (Difference(0.1, 0.2), False),
        (Difference(0.3, 0.2), True),
        (Difference(0.1, None), True),
    ],
)
def test_what_is_clear(found, clear):
    assert found.is_clear is clear


def result(method, nll, replicates, **kwargs):
    return Result(
        method, metrics={"nll": nll}, replicates={"nll": replicates}, **kwargs
    )


def test_all_that_cannot_be_told_from_the_best_are_marked():
    best = [0.0, 0.1, 0.2, 0.3]
    report = Report(
        [
            result("best", 0.15, best),
            result("close", 0.16, [0.02, 0.08, 0.24, 0.30]),
            # As far, but always: paired with the best it is worse on every draw.
            result("worse", 0.16, [v + 0.01 + 1e-4 * i for i, v in enumerate(best)]),
            Result("old", metrics={"nll": 0.17}),  # of an older report
        ]
    )
    lines = {line.split()[0]: line for line in str(report).splitlines()[2:6]}
    assert [name for name, line in lines.items() if "*" in line] == ["best", "close"]
    found = report.differences()
    assert found["best", ""] == Difference(0.0, 0.0)
    assert found["worse", ""].value == pytest.approx(0.01)
    assert found["worse", ""].half_width < 0.001
    assert found["old", ""].half_width is None
    with pytest.raises(KeyError, match="'ece'"):
        report.differences("ece")


def test_differences_survive_the_file_and_average_seeds(tmp_path):
    report = Report(
        [
            result("a", 0.1, [0.1, 0.3], seed=0),
            result("a", 0.3, [0.3, 0.5], seed=1),
            result("b", 0.1, [0.1, 0.2], seed=0),
        ]
    )
    report.save(tmp_path / "report.json")
    again = Report.load(tmp_path / "report.json")
    assert again == report
    assert again.rows()[0].replicates["nll"] == pytest.approx([0.2, 0.4])


def test_examples_are_paired_whatever_the_seed(task):
    """Shuffled test data come in one order for all rows and seeds."""
    shuffled = DataLoader(task[1]["test_loader"].dataset, batch_size=20, shuffle=True)
    report = run(task, ["map"], test_loader=shuffled, seeds=[0, 1])
    first, second = report
    assert first.replicates == second.replicates
