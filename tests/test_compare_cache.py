"""The cache of `compare`: what is the same is read, what differs is computed again."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import laplace_ella
from laplace_ella import Method, compare
from laplace_ella.comparison import evaluation
from laplace_ella.comparison.report import Report, Result


def make_model(activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), activation(), nn.Linear(6, 3)).eval()


def make_loaders():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(72, 2, generator=generator)
    y = torch.randint(3, (72,), generator=generator)

    def loader(a, b):
        return DataLoader(TensorDataset(x[a:b].clone(), y[a:b].clone()), batch_size=8)

    far = DataLoader(TensorDataset(5 + x[:16]), batch_size=8)
    return {
        "train_loader": loader(0, 24),
        "val_loader": loader(24, 48),
        "test_loader": loader(48, 72),
        "ood_loaders": {"far": far},
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Compare with a cache and tell which methods were fitted."""
    tried = []
    original = evaluation.fit_method

    def spy(method, *args):
        tried.append(method.name)
        return original(method, *args)

    monkeypatch.setattr(evaluation, "fit_method", spy)

    def call(
        model=None, methods=("map", "diag"), likelihood="classification", **kwargs
    ):
        tried.clear()
        report = compare(
            make_model() if model is None else model,
            likelihood,
            methods=methods,
            cache=tmp_path / "cache.json",
            progress_bar=False,
            **{
                **make_loaders(),
                "links": ["probit"],
                "n_steps": 2,
                "n_samples": 8,
                **kwargs,
            },
        )
        assert all(r.ok for r in report), [r.status for r in report]
        return list(tried), report

    return call


def test_the_same_again_is_read(run):
    assert run()[0] == ["map", "diag"]
    first = run()[1]
    torch.manual_seed(123)  # the user's generator plays no part
    model = copy.deepcopy(make_model()).train()
    tried, again = run(model)
    assert tried == []
    assert list(again.results) == list(first.results)
    renamed = {"another name": laplace_ella.available_methods()["diag"]}
    assert run(methods=renamed)[0] == []


@pytest.mark.parametrize("part", ["train_loader", "val_loader", "test_loader"])
@pytest.mark.parametrize("which", ["inputs", "targets"])
def test_data_that_differ_in_the_last_batch_are_other_data(run, part, which):
    run()
    changed = make_loaders()
    tensors = changed[part].dataset.tensors
    if which == "inputs":
        tensors[0][-1] += 1.0
    else:
        tensors[1][-1] = (tensors[1][-1] + 1) % 3
    assert run(**changed)[0] == ["map", "diag"]


def test_other_out_of_distribution_data(run):
    run()
    far = make_loaders()["ood_loaders"]["far"].dataset.tensors[0]
    far[-1] = 0.0
    other = {"far": DataLoader(TensorDataset(far), batch_size=8)}
    assert run(ood_loaders=other)[0] == ["map", "diag"]


def test_another_activation_with_the_same_weights(run):
    run(make_model(nn.Tanh))
    assert run(make_model(nn.ReLU))[0] == ["map", "diag"]


def test_a_frozen_layer(run):
    run()
    model = make_model()
    model[0].requires_grad_(False)
    assert run(model)[0] == ["map", "diag"]


class Scaled(nn.Module):
    """A configuration that is no tensor, and a buffer that no state dict has."""

    def __init__(self, factor=1.0, offset=0.0, power=None):
        super().__init__()
        self.inner = make_model()
        self.factor = factor
        self.register_buffer("offset", torch.tensor(offset), persistent=False)
        if power is not None:
            self.power = power

    def forward(self, x):
        f = self.factor * self.inner(x) + self.offset
        return self.power(f) if hasattr(self, "power") else f


@pytest.mark.parametrize(
    "changed",
    [{"factor": 2.0}, {"offset": 1.0}, {"power": torch.tanh}],
    ids=lambda changed: next(iter(changed)),
)
def test_configuration_and_buffers_of_a_module(run, changed):
    run(Scaled(), methods=["map"])
    assert run(Scaled(), methods=["map"])[0] == []
    assert run(Scaled(**changed), methods=["map"])[0] == ["map"]


CODE = """
from torch import nn
SLOPE = {slope}
def helper(x):
    return {helper}(x)
class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return SLOPE * helper(self.inner(x)){forward}
"""


@pytest.mark.parametrize(
    "changed",
    [{"slope": "2.0"}, {"helper": "nn.functional.gelu"}, {"forward": " + 1"}],
    ids=str,
)
def test_code_of_the_users_own_module(run, changed):
    def net(**parts):
        parts = {
            "slope": "1.0", "helper": "nn.functional.elu", "forward": "", **parts
        }  # fmt: skip
        scope = {"__name__": "users_module"}
        exec(CODE.format(**parts), scope)
        return scope["Net"](make_model())

    run(net(), methods=["map"])
    assert run(net(), methods=["map"])[0] == []
    assert run(net(**changed), methods=["map"])[0] == ["map"]


def test_a_forward_hook(run):
    run(methods=["map"])
    model = make_model()
    model[1].register_forward_hook(lambda module, x, out: 2 * out)
    assert run(model, methods=["map"])[0] == ["map"]


def test_tensors_of_a_method_count_with_every_number(run):
    """A diagonal prior of more numbers than a `repr` shows."""
    wide = nn.Sequential(nn.Linear(2, 400), nn.Tanh(), nn.Linear(400, 3)).eval()
    P = sum(p.numel() for p in wide.parameters())

    def prior(value):
        diagonal = torch.ones(P)
        diagonal[P // 2] = value
        kwargs = {"subset_of_weights": "all", "hessian_structure": "diag"}
        return [Method("diag", {**kwargs, "prior_precision": diagonal}, tune="none")]

    run(wide, methods=prior(1.0))
    assert run(wide, methods=prior(1.0))[0] == []
    assert run(wide, methods=prior(50.0))[0] == ["diag"]


def regression(reference, **kwargs):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(24, 2, generator=generator)
    loader = DataLoader(TensorDataset(x, x.sum(-1, keepdim=True)), batch_size=8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).eval()
    loaders = dict.fromkeys(["train_loader", "val_loader", "test_loader"], loader)
    return {
        "model": model,
        "methods": ["diag"],
        "likelihood": "regression",
        "reference": reference,
        **loaders,
        "ood_loaders": None,
        **kwargs,
    }


def test_another_reference_is_another_divergence(run):
    _, first = run(**regression("full"))
    tried, second = run(**regression("kron"))
    assert "diag" in tried
    kls = [report["diag"][0].metrics["kl_to_lla"] for report in (first, second)]
    assert kls[0] != kls[1]
    tried, third = run(**regression(None))
    assert tried == ["diag"]
    assert "kl_to_lla" not in third["diag"][0].metrics


def test_versions_and_settings(run, monkeypatch):
    run(methods=["map"])
    assert run(methods=["map"], n_bins=10)[0] == ["map"]
    assert run(methods=["map"], memory_budget="1 GB")[0] == ["map"]
    monkeypatch.setattr(laplace_ella, "__version__", "99.0")
    assert run(methods=["map"])[0] == ["map"]


class Augmented(Dataset):
    """Inputs with noise that is drawn anew in every pass, and never twice the same."""

    def __init__(self, offset=0.0):
        self.offset = offset

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.randn(2) + self.offset, i % 3


def test_augmented_and_shuffled_data_are_recognised(run):
    def loaders(offset=0.0, generator=None):
        data = Augmented(offset)
        train = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
        return {"train_loader": train}

    run(**loaders())
    assert run(**loaders())[0] == []
    assert run(**loaders(1.0))[0] == ["map", "diag"]
    own = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    states = [generator.get_state() for generator in own]
    run(**loaders(generator=own[0]))
    assert run(**loaders(generator=own[1]))[0] == []  # seeded alike in a comparison
    for generator, state in zip(own, states, strict=True):
        assert torch.equal(generator.get_state(), state)


# --- the file ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "not a comparison report"),
        ("no json", "not a comparison report"),
        ('{"format": 1, "results": [{"method": "map", "li', "not a comparison report"),
        ("[]", "got list"),
        ("{}", "got a dict with the keys none"),
        ('{"format": 1}', "a list under 'results', got NoneType"),
        ('{"format": 1, "results": 3}', "got int"),
        ('{"format": 1, "results": [3]}', "results with a 'method', got int"),
        ('{"format": 1, "results": [{"link": "mc"}]}', "keys 'link'"),
        ('{"format": 1, "results": [{"method": "a", "metrics": 3}]}', "'metrics' of"),
        ('{"format": 99, "results": []}', "format 1, got 99, written by another"),
        (b"\x80\x81\xff", "not a comparison report"),
    ],
    ids=str,
)
def test_a_file_that_is_no_cache_is_refused_before_any_work(tmp_path, content, match):
    path = tmp_path / "cache.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()

    class Untouched(nn.Linear):
        def forward(self, x):
            raise AssertionError("was run")

    with pytest.raises(ValueError, match=match) as caught:
        compare(
            Untouched(2, 3),
            "classification",
            **make_loaders(),
            cache=path,
            progress_bar=False,
        )
    assert str(path) in str(caught.value)
    assert "Delete the file or choose another." in str(caught.value)
    assert path.read_bytes() == before


def test_a_folder_is_no_cache(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        compare(make_model(), "classification", **make_loaders(), cache=tmp_path)


def test_fields_of_a_later_version_are_left_out():
    data = json.loads(json.dumps(Report([Result("a")]).to_dict()))
    data["results"][0]["later"] = 1
    assert Report.from_dict(data)["a"][0].method == "a"
