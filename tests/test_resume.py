"""Fits that are interrupted go on where they were; others and damage are refused."""

import multiprocessing
import os
import random
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_ella import ComputeOptions, EarlyStopping, ELLALaplace
from laplace_ella.errors import CheckpointWarning
from laplace_ella.fitting import checkpoint as checkpoint_module

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")

N, D, C = 23, 3, 2


def tensors(likelihood="regression", n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g, dtype=torch.float64)
    if likelihood == "regression":
        return x, torch.randn(n, C, generator=g, dtype=torch.float64)
    return x, torch.randint(C, (n,), generator=g)


def network(seed=1):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)).double()


def posterior(likelihood="regression", model=None, **settings):
    """Ways of differentiating that are not chosen by a measurement."""
    settings = {"n_eigenvalues": 4, "subsample_size": 16, **settings}
    settings["compute"] = ComputeOptions(feature_mode="reverse", row_mode="loop")
    return ELLALaplace(model or network(), likelihood, **settings)


def loader(likelihood="regression", **kwargs):
    return DataLoader(TensorDataset(*tensors(likelihood)), 5, **kwargs)


class Stream(IterableDataset):
    """In another order in every pass, by the global random state."""

    def __iter__(self):
        x, y = tensors("classification")
        return ((x[i], y[i]) for i in torch.randperm(N).tolist())


def regression(**settings):
    la = posterior(**settings)
    return la, lambda **kw: la.fit(loader(shuffle=True), **kw)


def stopping():
    la = posterior("classification")
    val = DataLoader(TensorDataset(*tensors("classification", 9, 7)), 4)
    plan = EarlyStopping(every=3, patience=4)
    train = loader("classification", shuffle=True, generator=torch.Generator())
    return la, lambda **kw: la.fit(train, val_loader=val, early_stopping=plan, **kw)


def stream():
    la = posterior("classification", stochastic=2)
    return la, lambda **kw: la.fit(DataLoader(Stream(), 5), max_data=21, **kw)


def more_data():
    la = posterior()
    la.fit(loader())
    data = TensorDataset(*tensors("regression", 17, 3))
    return la, lambda **kw: la.fit(DataLoader(data, 4), override=False, **kw)


CASES = {f.__name__: f for f in (regression, stopping, stream, more_data)}
CASES["exact"] = lambda: regression(n_eigenvalues="exact")


def die_at(la, trap, n):
    """Kill this process at the n-th event of a kind."""
    left, replace, save = [n], os.replace, torch.save

    def count(*_):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def replacing(*args):
        if trap == "before replacing":
            count()
        replace(*args)
        if trap == "after replacing":
            count()

    def saving(state, path):
        if trap == "while writing":
            path.write_bytes(b"PK\x03\x04 the first half")
            count()
        save(state, path)

    if trap == "in the model":
        la.model.register_forward_hook(count)
    os.replace, torch.save = replacing, saving


def run(name, path, seed, trap, n):
    """Fit until the trap snaps, with a save after every batch."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    checkpoint_module.SAVE_EVERY = -1e9
    la, fit = CASES[name]()
    torch.manual_seed(seed)
    die_at(la, trap, n)
    fit(checkpoint=path)


@pytest.mark.parametrize("name", CASES)
def test_killed_again_and_again(name, tmp_path):
    """Whenever the process is killed the next one goes on, whatever its own random
    state; what comes out is, bit by bit, the fit of an undisturbed process."""
    context = multiprocessing.get_context("fork")
    path, kills, seed = tmp_path / "fit.pt", 0, 5
    traps = [("after replacing", 1), ("while writing", 2), ("before replacing", 2)]
    for trap, n in [*traps, ("in the model", 40), *traps, ("nowhere", 0)]:
        child = context.Process(target=run, args=(name, path, seed, trap, n))
        child.start()
        child.join(120)
        assert child.exitcode in (0, -signal.SIGKILL)
        kills += child.exitcode != 0
        seed = 99  # the state of the first run is in the file
    assert kills >= (1 if name == "exact" else 3)
    assert os.listdir(tmp_path) == [path.name]
    expected, fit = CASES[name]()
    torch.manual_seed(5)
    fit()
    la, fit = CASES[name]()
    calls = []
    la.model.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    fit(checkpoint=path)  # is complete, and returned at once
    assert torch.equal(torch.get_rng_state(), state)
    assert len(calls) == 1  # to know the model by its outputs
    assert la.state_dict()["checksum"] == expected.state_dict()["checksum"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "fit.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior().fit(loader(), checkpoint=path)
    return path


class Doubled(nn.Sequential):
    """The parameters and names of a network, with other outputs."""

    def forward(self, x):
        return 2 * super().forward(x)


def changed(which, by):
    x, y = tensors()
    y[which] += by
    return DataLoader(TensorDataset(x, y), 5)


def other_weights():
    model = network()
    model[2].bias.data += 1e-6
    return model


OTHERS = {
    "targets from the fifth on": (posterior, lambda: changed(slice(4, None), 1), {}),
    "the last target": (posterior, lambda: changed(-1, 1e-9), {}),
    "inputs": (posterior, lambda: [(tensors()[0] + 1e-6, tensors()[1])], {}),
    "order": (posterior, lambda: [tuple(t.flip(0) for t in tensors())], {}),
    "fewer": (posterior, loader, {"max_data": 20}),
    "forward": (lambda: posterior(model=Doubled(*network())), loader, {}),
    "weights": (lambda: posterior(model=other_weights()), loader, {}),
    "seed": (lambda: posterior(seed=3), loader, {}),
    "rank": (lambda: posterior(n_eigenvalues=3), loader, {}),
    "noise": (lambda: posterior(sigma_noise=torch.ones(C)), loader, {}),
    "complement": (lambda: posterior(complement="drop"), loader, {}),
    "stopping": (posterior, loader, {"val_loader": loader()}),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_other_fits_are_refused(difference, finished):
    make, data, settings = OTHERS[difference]
    before, la = finished.read_bytes(), make()
    with pytest.raises(ValueError, match=r"delete the file"):
        la.fit(data(), checkpoint=finished, **settings)
    assert la.fitted is None
    assert finished.read_bytes() == before


def test_damage_is_refused(finished, tmp_path):
    """A block of zeros, ten flipped bits, an end that is missing, other files."""
    content, rng = finished.read_bytes(), random.Random(0)
    damaged = [b"", content[: len(content) // 2], b"x" * 999, content + b"\0"]
    for start in range(64, len(content) - 512, len(content) // 8):
        damaged.append(content[:start] + bytes(512) + content[start + 512 :])
    for _ in range(10):
        some = bytearray(content)
        some[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(some))
    path, la = tmp_path / "fit.pt", posterior()
    for some in damaged:
        if some == content:  # the block was zero
            continue
        path.write_bytes(some)
        with pytest.raises(ValueError, match=r"(?s)checksum.*delete the file"):
            la.fit(loader(), checkpoint=path)
        assert la.fitted is None
    path.write_bytes(content)
    la.fit(loader(), checkpoint=path)
    assert la.n_data == N


def test_the_same_call_of_the_same_object(tmp_path):
    """After a fit that stopped early as well, whose link is the default then."""
    (la, fit), path = stopping(), tmp_path / "fit.pt"
    fit(checkpoint=path)
    first = la.fitted
    fit(checkpoint=path)
    assert torch.equal(la.fitted.sums.H, first.sums.H)
    assert la.history == list(first.history)


def test_paths_and_full_disks(tmp_path, monkeypatch):
    la = posterior()
    for path in (3, tmp_path, tmp_path / "no" / "fit.pt"):
        with pytest.raises((TypeError, ValueError), match="checkpoint must be a"):
            la.fit(loader(), checkpoint=path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.warns(CheckpointWarning, match="No space left"):
        la.fit(loader(), checkpoint=str(tmp_path / "fit.pt"))
    assert la.n_data == N
    assert os.listdir(tmp_path) == []
