"""`compare`: every row is what its method gives by hand, failures are rows, the cache
knows what is the same, and nothing of the user's is touched."""

from __future__ import annotations

import copy
import json
import math
import random
import sys

import numpy as np
import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace_ella import Method, available_methods, compare, metrics
from laplace_ella.comparison import bootstrap, grid_search, methods, run
from laplace_ella.tuning.temperature import temperature_scaling
from tests.dense import centered_probit
from tests.test_fit import OneByOne

KNOWN = available_methods()
pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning"),
    pytest.mark.filterwarnings("ignore::laplace_ella.errors.BorderWarning"),
]


class Task:
    """A trained network and its data."""

    def __init__(self, likelihood):
        torch.manual_seed(0)
        x, noise = torch.randn(170, 2), torch.randn(170, 2)
        self.likelihood = likelihood
        if likelihood == "classification":
            y = (x[:, 0] + 0.8 * noise[:, 0] > 0).long() + (x[:, 1] > 0).long()
            loss, n_out = nn.functional.cross_entropy, 3
        else:
            y = torch.stack([x.sum(-1), x[:, 0].sin()], -1) + 0.3 * noise
            loss, n_out = nn.functional.mse_loss, 2
        parts = slice(0, 30), slice(30, 90), slice(90, None)
        self.train, self.val, self.test = ((x[part], y[part]) for part in parts)
        self.model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, n_out))
        optimizer = torch.optim.Adam(self.model.parameters(), 2e-2)
        for _ in range(150):
            optimizer.zero_grad()
            loss(self.model(self.train[0]), self.train[1]).backward()
            optimizer.step()
        self.model.eval()

    def loaders(self, val=True):
        found = {"train_loader": self.train, "test_loader": self.test}
        found |= {"val_loader": self.val} if val else {}
        return {k: DataLoader(TensorDataset(*v), 20) for k, v in found.items()}

    def compare(self, methods, val=True, **kwargs):
        sizes = {"n_samples": 32, "n_steps": 10, "grid_size": 5}
        options = {"links": ["probit"], "reference": None, "progress_bar": False}
        options |= {**sizes, "model": self.model, **self.loaders(val), **kwargs}
        return compare(likelihood=self.likelihood, methods=methods, **options)

    def laplace(self, method, **kwargs):
        model = copy.deepcopy(self.model)
        la = Laplace(model, self.likelihood, **{**method.kwargs, **kwargs})
        la.fit(self.loaders()["train_loader"])
        return la

    def by_evidence(self, name, **kwargs):
        la = self.laplace(KNOWN[name], **kwargs)
        la.optimize_prior_precision("glm", n_steps=10, prior_structure="scalar")
        return la

    def scores(self, prediction, noise=0.0):
        y = self.test[1]
        if self.likelihood == "classification":
            return metrics.classification_metrics(prediction, y)
        mean, covariance = (part.detach() for part in prediction)
        variance = covariance.diagonal(dim1=-2, dim2=-1) + noise**2
        return metrics.regression_metrics(mean, variance, y)


@pytest.fixture(scope="module")
def classes():
    return Task("classification")


@pytest.fixture(scope="module")
def values():
    return Task("regression")


def settings_of(result, *names):
    return {name: result.settings[name] for name in names}


@pytest.mark.parametrize("likelihood", ["classes", "values"])
def test_every_method_is_a_row_with_finite_scores(likelihood, request):
    task = request.getfixturevalue(likelihood)
    report = task.compare(None)
    gone = {"gp-ella"}  # not in laplace-torch 0.2
    names = [m for m in KNOWN if likelihood == "classes" or m != "temperature"]
    assert [r.method for r in report] == names
    for row in report:
        assert row.ok or row.method in gone, (row.method, row.status)
        assert all(map(math.isfinite, row.metrics.values()))
    without = task.compare(None, val=False)
    assert not any(r.on_validation for r in without)
    assert {"map", "exact", "kron", "last-layer-full"} <= {r.method for r in without}


LAPLACE = ["full", "kron", "diag", "last-layer-full", "last-layer-kron"]


@pytest.mark.parametrize("name", LAPLACE)
def test_rows_of_laplace_torch_by_its_evidence(classes, values, name):
    for task, noise in ((classes, {}), (values, {"sigma_noise": 0.4})):
        (row,) = task.compare([name], val=False, **noise)
        la = task.by_evidence(name, **noise)
        expected = task.scores(la(task.test[0], link_approx="probit"), *noise.values())
        assert row.metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        chosen = row.settings["prior_precision"]
        assert chosen == pytest.approx(float(la.prior_precision))


def test_noise_of_a_regression_is_chosen_by_the_evidence(values):
    """Jointly with the prior, by each method; the network alone has its residual."""
    x, y = values.train
    residual = metrics.rmse(values.model(x).detach(), y)
    report = values.compare(["map", "full", "exact"], val=False, n_steps=200)
    rows = {r.method: r for r in report}
    assert rows["map"].settings["sigma_noise"] == pytest.approx(residual, rel=1e-5)
    alone = values.model(values.test[0]), torch.zeros(80, 2, 2)
    expected = values.scores(alone, noise=residual)
    assert rows["map"].metrics == pytest.approx(expected, rel=1e-5)
    la = values.laplace(KNOWN["full"])
    chosen = settings_of(rows["full"], "prior_precision", "sigma_noise")
    assert sorted(rows["full"].settings["chosen"]) == list(chosen)
    prior, noise = (torch.tensor(v).log().requires_grad_() for v in chosen.values())
    la.log_marginal_likelihood(prior.exp(), noise.exp()).backward()
    assert max(abs(float(prior.grad)), abs(float(noise.grad))) < 0.05
    # The same model by another way, and another optimiser.
    for name, value in chosen.items():
        assert rows["exact"].settings[name] == pytest.approx(value, rel=0.02)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_rows_of_this_package(classes, link):
    la = classes.laplace(KNOWN["exact"], seed=0)
    la.optimize_prior_precision(n_steps=10, link_approx=link, n_samples=32)
    torch.manual_seed(0)
    x = classes.test[0].split(20)
    probs = torch.cat([la(part, link_approx=link, n_samples=32) for part in x])
    (row,) = classes.compare(["exact"], val=False, links=[link])
    assert row.metrics == pytest.approx(classes.scores(probs), abs=1e-4)

    data = classes.loaders()["val_loader"]
    la = classes.laplace(KNOWN["ella-calibrated"], seed=0)
    found = la.optimize_calibration(data, link_approx=link, n_samples=32)
    (row,) = classes.compare(["ella-calibrated"], links=[link])
    for name in ("prior_precision", "temperature", "softmax_temperature"):
        assert row.settings[name] == pytest.approx(getattr(found, name), rel=1e-3)
        assert name in row.settings["chosen"]
    assert row.on_validation


def test_map_and_temperature_scaling(classes):
    far = {"far": DataLoader(TensorDataset(5 + torch.randn(24, 2)), 10)}
    network, scaled = classes.compare(["map", "temperature"], ood_loaders=far)
    with torch.no_grad():
        f, f_val = (classes.model(x) for x in (classes.test[0], classes.val[0]))
        f_far = classes.model(far["far"].dataset.tensors[0])
    tau = temperature_scaling(f_val, classes.val[1])
    assert scaled.settings["softmax_temperature"] == pytest.approx(tau)
    for row, t in ((network, 1.0), (scaled, tau)):
        p, p_far = (torch.softmax(each / t, -1) for each in (f, f_far))
        auroc = metrics.ood_auroc(metrics.entropy(p), metrics.entropy(p_far))
        expected = {**classes.scores(p), "auroc:far": auroc}
        assert row.metrics == pytest.approx(expected, abs=1e-6)
    curve = metrics.reliability_curve(f.softmax(-1), classes.test[1])
    assert network.curves["reliability"]["count"] == curve.count


@pytest.mark.parametrize("name", [*LAPLACE[:3], "last-layer-full"])
@pytest.mark.parametrize("link", ["probit", "bridge"])
def test_the_grid_search_is_laplace_torchs(classes, name, link):
    method = Method("m", KNOWN[name].kwargs, tune="gridsearch")
    (row,) = classes.compare([method], links=[link], grid_size=9)
    la = classes.laplace(method)
    la.optimize_prior_precision(
        pred_type="glm",
        method="gridsearch",
        val_loader=classes.loaders()["val_loader"],
        loss=lambda p, y: torch.tensor(metrics.nll(p, y)),
        link_approx=link,
        grid_size=9,
    )
    chosen = row.settings["prior_precision"]
    assert chosen == pytest.approx(float(la.prior_precision), rel=1e-4)
    expected = classes.scores(la(classes.test[0], link_approx=link))
    assert row.metrics == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", LAPLACE)
@pytest.mark.parametrize("link", ["probit", "probit_centered"])
def test_a_calibrated_row_is_what_its_settings_give(classes, name, link):
    method = Method("m", KNOWN[name].kwargs, tune="calibration")
    (row,) = classes.compare([method], links=[link])
    names = ("prior_precision", "temperature")
    assert set(row.settings["chosen"]) == {*names, "softmax_temperature"}
    la = classes.laplace(method, **settings_of(row, *names))
    mean, covariance = (t.double() for t in grid_search.moments(la, classes.test[0]))
    tau = row.settings["softmax_temperature"]
    if link == "probit":
        variance = covariance.diagonal(dim1=-2, dim2=-1) / tau**2
        p = torch.softmax(mean / tau / (1 + math.pi / 8 * variance).sqrt(), -1)
    else:
        p = centered_probit(mean / tau, covariance / tau**2)
    assert row.metrics["nll"] == pytest.approx(classes.scores(p)["nll"], rel=1e-3)


@pytest.mark.parametrize("name", ["kron", "last-layer-full"])
def test_a_calibrated_regression_is_what_its_settings_give(values, name):
    method = Method("m", KNOWN[name].kwargs, tune="calibration")
    (row,) = values.compare([method], sigma_noise=1.5)
    chosen = settings_of(row, *row.settings["chosen"])
    assert set(chosen) == {"prior_precision", "temperature", "sigma_noise"}
    assert 0.1 < chosen["sigma_noise"] < 1.0
    la = values.laplace(method, **chosen)
    expected = values.scores(la(values.test[0]), noise=chosen["sigma_noise"])
    assert row.metrics["nll"] == pytest.approx(expected["nll"], rel=1e-3)


@pytest.mark.parametrize("name", ["exact", "ella-paper", "diag-calibrated"])
def test_links_share_the_fit_and_are_tuned_apart(classes, name):
    links = ["mc", "probit", "probit_centered"]
    together = classes.compare([name], links=links)
    early = name == "ella-paper"
    assert all((r.settings["chosen"] == ["n_data"]) == early for r in together)
    assert len({r.metrics["nll"] for r in together}) == 3
    for link, row in zip(links, together, strict=True):
        (alone,) = classes.compare([name], links=[link])
        assert row.metrics == pytest.approx(alone.metrics, rel=1e-4)


def test_divergence_from_the_reference(values):
    kwargs = {"sigma_noise": 0.3, "val": False}
    names = ["map", "full", "kron", "exact"]
    report = values.compare(names, reference="full", **kwargs)
    kls = {r.method: r.metrics.get("kl_to_lla") for r in report}
    assert kls["map"] is None
    assert kls["full"] == pytest.approx(0, abs=1e-6)
    assert kls["exact"] == pytest.approx(0, abs=1e-2)
    posteriors = (values.by_evidence(name, sigma_noise=0.3) for name in names[2:0:-1])
    prediction = [t.detach().double() for la in posteriors for t in la(values.test[0])]
    expected = metrics.gaussian_kl(*prediction)
    assert kls["kron"] == pytest.approx(expected, rel=1e-3)
    (alone,) = values.compare(["kron"], reference="full", **kwargs)
    assert alone.metrics["kl_to_lla"] == pytest.approx(kls["kron"], rel=1e-4)
    broken = Method("broken", {"hessian_structure": "magic"})
    for wrong, note in ((broken, "broken failed"), ("map", "map has no covariance")):
        (row,) = values.compare(["kron"], reference=wrong, **kwargs)
        assert row.ok
        assert f"no KL: {note}" in row.note


def test_labels_of_other_data_are_ignored(values):
    far = {"far": [(5 + torch.randn(24, 2), torch.zeros(24))]}
    (row,) = values.compare(["map"], ood_loaders=far, sigma_noise=0.3)
    assert row.metrics["auroc:far"] == 0.5  # the same variance everywhere


def test_seeds_are_reproducible_and_data_paired(classes):
    shuffled = DataLoader(TensorDataset(*classes.test), 20, shuffle=True)
    kwargs = {"links": ["mc"], "test_loader": shuffled, "val": False}
    report = classes.compare(["map", "ella"], seeds=[0, 1], **kwargs)
    assert len({str(r.replicates) for r in report["map"]}) == 1
    assert len({r.metrics["nll"] for r in report["ella"]}) == 2
    (again,) = classes.compare(["ella"], seeds=1, **kwargs)
    assert again.metrics == pytest.approx(report["ella"][1].metrics, rel=1e-5)


def test_data_without_a_length_and_small_batches(classes, monkeypatch):
    names = ["map", "kron", "diag", "ella", "temperature"]
    expected = classes.compare(names)
    data = {"train": classes.train, "val": classes.val, "test": classes.test}
    streams = {f"{k}_loader": DataLoader(OneByOne(*v), 20) for k, v in data.items()}
    monkeypatch.setattr(methods, "FAST", 1)  # batches are split, too
    for row, want in zip(classes.compare(names, **streams), expected, strict=True):
        assert row.ok, row.status
        assert row.metrics == pytest.approx(want.metrics, abs=1e-5)


def test_outputs_at_positions():
    model = nn.Conv2d(1, 3, 1)
    x, y = torch.randn(8, 1, 2, 5), torch.randint(3, (8, 2, 5))
    y[0, 0] = -100
    loader = DataLoader(TensorDataset(x, y), 4)
    options = {"links": ["probit"], "output_layout": "channels_first", "n_steps": 3}
    options |= {"methods": ["map", "ella", "kron", "temperature"]}
    report = compare(model, "classification", loader, loader, loader, **options)
    assert [r.method for r in report if not r.ok] == ["kron"]
    p = model(x).softmax(1).permute(0, 2, 3, 1).reshape(-1, 3).detach()
    known = y.flatten() != -100
    expected = metrics.nll(p[known], y.flatten()[known])
    assert report["map"][0].metrics["nll"] == pytest.approx(expected, rel=1e-5)


def test_layers_that_a_method_does_not_support_are_left_out(classes):
    layers = nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
    model = nn.Sequential(*layers)
    report = classes.compare(["kron", "diag"], model=model, val=False)
    kron, diag = report
    assert (kron.left_out, diag.left_out) == ("BatchNorm1d", "")
    assert "Found parameters in un-supported layers" in kron.note
    assert "kron (without BatchNorm1d)" in str(report)
    assert all(p.requires_grad for p in model.parameters())
    model.eval()[1].requires_grad_(False)
    la = Laplace(copy.deepcopy(model), "classification", "all", "kron")
    la.fit(classes.loaders()["train_loader"])
    la.optimize_prior_precision("glm", n_steps=10, prior_structure="scalar")
    expected = classes.scores(la(classes.test[0]))
    assert kron.metrics == pytest.approx(expected, abs=1e-5)


def test_failures_are_rows_with_a_reason(classes, values, monkeypatch):
    def row(method, task=classes, **kwargs):
        return task.compare([method], **kwargs).results[0]

    assert row("temperature", val=False).status == "skipped: needs a val_loader"
    assert row("diag-calibrated", val=False).status == "skipped: needs a val_loader"
    assert row("temperature", values).status.startswith("not supported")
    needs = "skipped: needs 187 kB, more than 10 kB"
    assert row("full", memory_budget=10_000).status == needs
    stopped = Method("m", KNOWN["diag"].kwargs, tune="early_stopping")
    assert "unexpected keyword argument 'val_loader'" in row(stopped).status
    broken = Method("m", {**KNOWN["diag"].kwargs, "nonsense": 1})
    assert row(broken).status.startswith("failed: TypeError")
    model = nn.Sequential(nn.Linear(2, 3), nn.Threshold(-math.inf, math.nan))
    model[0].bias.data[:] = math.nan
    assert row("map", model=model).status.startswith("failed: ValueError")
    grid = Method("m", KNOWN["diag"].kwargs, tune="gridsearch")
    given = row(grid, val=False, prior_precision=2.0)
    assert not given.on_validation
    assert given.settings["chosen"] == []
    assert given.settings["prior_precision"] == 2.0
    monkeypatch.setattr(
        run, "fit_method", lambda *_: (_ for _ in ()).throw(MemoryError("no room"))
    )
    assert row("diag").status == "out of memory: no room"


def test_warnings_of_a_row_are_its_note(classes):
    ours = {**KNOWN["ella"].kwargs, "n_eigenvalues": 500}
    border = Method("m", KNOWN["diag"].kwargs, tune="gridsearch")
    report = classes.compare([Method("many", ours), border], grid_size=2)
    assert "n_eigenvalues=500 exceeds the usable rank" in report["many"][0].note
    row = report["m"][0]
    assert row.settings["at_border"]
    assert "is at the border of the grid" in row.note
    assert f"δ = {row.settings['prior_precision']:.3g}*" in str(report)


@pytest.fixture
def cached(classes, tmp_path, monkeypatch):
    """Compare with a cache, and return which methods were fitted."""
    tried = []
    original = run.fit_method

    def spy(task, method, seed):
        tried.append(method.name)
        return original(task, method, seed)

    monkeypatch.setattr(run, "fit_method", spy)

    def call(methods=("map", "diag"), **kwargs):
        tried.clear()
        report = classes.compare(list(methods), cache=tmp_path / "rows", **kwargs)
        assert all(r.ok for r in report), [r.status for r in report]
        return list(tried), report

    return call


def test_interruption_keeps_what_is_finished(classes, cached, monkeypatch, tmp_path):
    original = run.fit_method

    def interrupted(task, method, seed):
        if method.name == "diag":
            raise KeyboardInterrupt
        return original(task, method, seed)

    names = ["map", "diag", "last-layer-diag"]
    with monkeypatch.context() as patch:
        patch.setattr(run, "fit_method", interrupted)
        report = classes.compare(names, cache=tmp_path / "rows")
    assert report.interrupted
    assert [r.status for r in report] == ["ok", "interrupted", "interrupted"]
    assert "Interrupted" in str(report)
    assert cached(names)[0] == names[1:]


def test_the_same_again_is_read(cached, classes):
    tried, first = cached()
    assert tried == ["map", "diag"]
    torch.manual_seed(123)
    tried, again = cached(model=copy.deepcopy(classes.model).train())
    assert tried == []
    assert list(again) == list(first)
    renamed = [Method("another name", KNOWN["diag"].kwargs)]
    tried, report = cached(methods=renamed)
    assert (tried, report.results[0].method) == ([], "another name")
    assert cached(links=["probit", "bridge"])[0] == ["diag"]


class Augmented(Dataset):
    """Inputs with noise that is drawn anew in every pass."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.randn(2) + random.random(), i % 3


SLOPE = 1.0


class Global(nn.Linear):
    """A model that computes with a number of its module."""

    def forward(self, x):
        return SLOPE * super().forward(x)


def test_what_differs_is_computed_again(cached, classes, monkeypatch):
    both = cached()[0]
    for name, index in (("train_loader", 0), ("val_loader", 1), ("test_loader", 1)):
        changed = {k: copy.deepcopy(v) for k, v in classes.loaders().items()}
        tensor = changed[name].dataset.tensors[index]
        tensor[-1] = tensor[-1] + 1 if index == 0 else (tensor[-1] + 1) % 3
        assert cached(**changed)[0] == both
    heavier, frozen = copy.deepcopy(classes.model), copy.deepcopy(classes.model)
    heavier[0].weight.data[0, 0] += 1e-6
    frozen[0].requires_grad_(False)
    other = nn.Sequential(classes.model[0], nn.ReLU(), classes.model[2])
    for model in (heavier, frozen, other):
        assert cached(model=model)[0] == both
    assert cached(prior_precision=2.0, methods=["map"])[0] == ["map"]
    assert cached(seeds=[0, 1], methods=["map"])[0] == ["map"]
    prior = Method("diag", {**KNOWN["diag"].kwargs, "prior_precision": 2.0})
    assert cached(methods=[prior])[0] == ["diag"]
    augmented = {"train_loader": DataLoader(Augmented(), 8, shuffle=True)}
    assert cached(**augmented)[0] == both
    assert cached(**augmented)[0] == []
    model = Global(2, 3)
    for slope, expected in ((1.0, ["map"]), (1.0, []), (2.0, ["map"])):
        monkeypatch.setattr(sys.modules[__name__], "SLOPE", slope)
        assert cached(model=model, methods=["map"])[0] == expected


def test_two_at_once_lose_nothing(classes, tmp_path, monkeypatch):
    """A second comparison with the same cache comes in between the first one's rows."""
    original, others = run.fit_method, [["map", "last-layer-diag"]]

    def interrupted(task, method, seed):
        if others:
            assert all(r.ok for r in classes.compare(others.pop(), cache=tmp_path))
        return original(task, method, seed)

    monkeypatch.setattr(run, "fit_method", interrupted)
    assert all(r.ok for r in classes.compare(["map", "diag"], cache=tmp_path))
    methods = [json.loads(path.read_text())["method"] for path in tmp_path.iterdir()]
    assert sorted(methods) == ["diag", "last-layer-diag", "map"]


def test_files_that_cannot_be_read_or_written(cached, classes, tmp_path, monkeypatch):
    cached()
    for path, text in zip((tmp_path / "rows").iterdir(), ("[1]", "{"), strict=True):
        path.write_text(text)
    assert cached()[0] == ["map", "diag"]
    assert cached()[0] == []
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="must be a folder"):
        classes.compare(["map"], cache=file)

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("laplace_ella.comparison.compare.write", full)
    with pytest.warns(UserWarning, match=r"map could not be stored .* No space left"):
        assert classes.compare(["map"], cache=tmp_path).results[0].ok


def test_nothing_of_the_users_is_touched(classes, capsys):
    model = copy.deepcopy(classes.model).train()
    nn.functional.cross_entropy(model(classes.train[0]), classes.train[1]).backward()
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(*classes.train)
    train = DataLoader(data, 20, shuffle=True, generator=generator)

    def state():
        return (
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002
            random.getstate(),
            generator.get_state().tolist(),
            [(p.data.tolist(), p.grad.tolist()) for p in model.parameters()],
            [(n, m.training, sorted(vars(m))) for n, m in model.named_modules()],
        )

    before = state()
    names = ["map", "last-layer-kron", "gp-ella", "ella", "diag-calibrated", "nope"]
    methods = {n: KNOWN.get(n, {"hessian_structure": "magic"}) for n in names}
    report = classes.compare(
        methods, model=model, train_loader=train, progress_bar=True
    )
    assert state() == before
    assert not report["nope"][0].ok
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()  # one for each row, which a log file keeps
    assert len(lines) == len(names)
    assert "2 of 6: last-layer-kron (probit): NLL" in lines[1]
    assert "\r" not in err


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"methods": ["nope"]}, "Unknown method 'nope'. Known: map"),
        ({"links": ["logit"]}, "links must be one of"),
        ({"seeds": []}, "seeds must differ and be at least one"),
        ({"n_samples": 0}, "n_samples must be a positive integer"),
        ({"test_loader": None}, "test_loader must be a DataLoader"),
        ({"test_loader": iter([])}, "test_loader must be a DataLoader"),
        ({"output_layout": "nhwc"}, "output_layout must be one of"),
        ({"test_loader": [(torch.randn(3, 2), torch.rand(3))]}, "integer class"),
        ({"test_loader": [(torch.randn(3, 2),)]}, "of shape (N), got none"),
        ({"model": nn.Flatten()}, "no trainable parameters"),
        ({"model": nn.Sequential(nn.Linear(2, 4), nn.Unflatten(1, (2, 2)))}, "(B, C)"),
        ({"model": 3}, "must be a torch.nn.Module"),
    ],
)
def test_mistakes_are_errors_before_any_fit(classes, kwargs, match, monkeypatch):
    monkeypatch.setattr(run, "fit_method", None)
    state = torch.get_rng_state()
    with pytest.raises((ValueError, TypeError)) as caught:
        classes.compare(**{"methods": ["map"], **kwargs})
    assert match in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


def test_unknown_words(classes):
    with pytest.raises(ValueError, match="likelihood must be one of"):
        compare(classes.model, "poisson", None, None)
    for wrong in ({"tune": "bayes"}, {"kind": "magic"}):
        with pytest.raises(ValueError, match="must be one of"):
            Method("mine", **wrong)


def test_sizes_of_a_model_and_memory_of_a_method():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).eval()
    sizes = methods.measure(model, torch.randn(1, 3), 70, 7)
    layers = (5, 3), (2, 5)
    assert sizes == methods.Sizes(70, 7, (2,), 20 + 10 + 12, 12, layers, 4)
    layers = (1, 10**3), (10, 64)
    resnet = methods.Sizes(50_000, 128, (10,), 269_722, 565_000, layers, 4)
    assert KNOWN["full"].memory(resnet)[1] > 16 * 10**9
    batch, needed = KNOWN["diag"].memory(resnet)
    assert batch == 1  # two take more than is fast
    assert needed < 10**8
    assert KNOWN["last-layer-full"].memory(resnet) == (128, 4 * 650 * (4 * 650 + 2560))


def test_replicates_are_the_metrics_of_drawn_examples():
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(120, 4, generator=generator).softmax(-1)
    y = torch.randint(4, (120,), generator=generator)
    found = bootstrap.replicates(metrics.classification_terms(probs, y))
    softer = (probs.log() / 1.2).softmax(-1)
    others = bootstrap.replicates(metrics.classification_terms(softer, y))
    for i, index in zip(range(5), bootstrap.draws(120), strict=False):
        expected = metrics.classification_metrics(probs[index], y[index])
        assert {k: v[i] for k, v in found.items()} == pytest.approx(expected, abs=1e-6)
    # The interval of a mean is that of paired differences, known to 5 %.
    first, second = (metrics.nll_per_example(p, y) for p in (probs, softer))
    error = float((first - second).std()) / math.sqrt(len(y))
    difference = bootstrap.Difference.of(0.1, found["nll"], others["nll"])
    assert difference.half_width == pytest.approx(1.96 * error, rel=0.2)


def test_replicates_of_a_regression_and_of_detection():
    pair, variance = torch.randn(2, 90, 2), 0.5 + torch.rand(90, 2)
    mean, y = pair
    found = bootstrap.replicates(metrics.regression_terms(mean, variance, y))
    inside, outside = torch.randint(6, (90,)) / 5, torch.randint(1, 7, (40,)) / 5
    auroc = bootstrap.auroc_replicates(inside, outside)
    drawn = zip(range(5), bootstrap.draws(90), bootstrap.draws(40, 1), strict=False)
    for i, index, other in drawn:
        expected = metrics.regression_metrics(mean[index], variance[index], y[index])
        for name, draws in found.items():
            assert draws[i] == pytest.approx(expected[name], rel=1e-5)
        expected = metrics.ood_auroc(inside[index], outside[other])
        assert auroc[i] == pytest.approx(expected, abs=1e-6)
