"""Fits that are killed go on where they were, and give what they would have given."""

import multiprocessing
import os
import resource
import shutil
import signal
import warnings
from itertools import count, cycle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from laplace_ella import (
    Checkpoint,
    CheckpointWarning,
    EarlyStopping,
    ELLALaplace,
    ELLALLLaplace,
)
from laplace_ella.fitting import journal
from laplace_ella.support import files
from tests.fitting import assert_close
from tests.killed import (
    CASES,
    N,
    loader,
    network,
    often,
    posterior,
    run,
    seed_everything,
    tensors,
)
from tests.test_untouched import assert_same, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.RankWarning")

#: How the processes die, one after the other.
TRAPS = (
    ("after replacing", 1),
    ("while writing", 2),
    ("before replacing", 2),
    ("in the model", 25),
    ("after replacing", 2),
)


@pytest.fixture(scope="module")
def forks():
    """Processes forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.killed"])
    return context


def assert_same_fit(la, expected):
    fit, wanted = la.fitted, expected.fitted
    assert fit.sums.n_data == wanted.sums.n_data
    for ours, theirs in zip(fit.history, wanted.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert (fit.dtype, fit.complement) == (wanted.dtype, wanted.complement)
    assert fit.basis.method == wanted.basis.method
    for name in ("directions", "eigenvalues"):
        assert_close(getattr(fit.basis, name), getattr(wanted.basis, name), 0, 1e-13)
    assert_close(fit.sums.H, wanted.sums.H, 1e-13, 1e-13)
    assert_close(fit.sums.loss, wanted.sums.loss, 1e-13, 0)
    assert (fit.span is None) == (wanted.span is None)
    if fit.span is not None:
        assert fit.span.usual == pytest.approx(wanted.span.usual, rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_killed_again_and_again(name, forks, tmp_path):
    """Whenever the process is killed, the next one goes on, whatever its own random
    state; what comes out is the fit of an undisturbed process, without a checkpoint."""
    path = tmp_path / "fit.pt"
    stages, kills = [], 0
    for seed, (trap, n) in zip(count(5), cycle(TRAPS), strict=False):
        begun = path.exists()
        child = forks.Process(
            target=run, args=(name, path, seed if begun else 5, trap, n)
        )
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        kills += 1
        assert kills < 30
        if path.exists():
            stages.append(torch.load(path, weights_only=True)["stage"])
    assert kills >= 3
    assert "sampling" in stages or name == "more_data"
    assert "adding" in stages or name == "only_basis"
    assert os.listdir(tmp_path) == [path.name]  # leftovers are gone

    seed_everything(4)
    expected, fit = CASES[name]()
    seed_everything(5)
    fit()
    seed_everything(4)
    la, fit = CASES[name]()
    seed_everything(99)
    calls = []
    la.model.register_forward_hook(lambda *_: calls.append(1))
    before = snapshot(la.model)
    fit(checkpoint=path)  # is complete, and returned at once
    assert_same(snapshot(la.model), before)
    assert_same_fit(la, expected)
    # The last layer is searched for, and that is all.
    assert len(calls) <= (2 if isinstance(la, ELLALLLaplace) else 0)


#: Saves of the fit below until it has added the curvature of two batches.
TWO_BATCHES = 4 + 1 + 2


class Interrupted(Exception):
    """What is raised in place of a crash."""


def interrupted(path, saves=TWO_BATCHES, **settings):
    """Leave behind the checkpoint of a fit that is interrupted after some saves."""
    seed_everything(5)
    la = posterior(**settings)
    left, replace = count(saves - 1, -1), os.replace

    def replace_and_break(*args):
        replace(*args)
        if next(left) == 0:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(files.os, "replace", replace_and_break)
        la.fit(loader(shuffle=True), checkpoint=often(path))
    return la


def undisturbed(**settings):
    seed_everything(5)
    la = posterior(**settings)
    la.fit(loader(shuffle=True))
    return la


def test_same_object_goes_on(tmp_path):
    """After an exception the same object can go on; ways of differentiating that were
    measured are kept, and nothing of the user's is touched."""
    path = tmp_path / "fit.pt"
    la = interrupted(path, feature_mode="auto", row_mode="auto")
    assert la.fitted is None
    state = torch.load(path, weights_only=True)
    state["decisions"]["rows"] = [[False, "loop"]]
    torch.save(state, path)
    seed_everything(8)
    before = snapshot(la.model)
    other = posterior(model=la.model)
    other.options = la.options
    other.fit(loader(shuffle=True), checkpoint=path)
    assert_same(snapshot(la.model), before)
    assert other.modes.rows.value == "loop"
    assert_close(other.H, undisturbed().H)


# --- other fits ----------------------------------------------------------------------


def trained(model):
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-9
    return model


def relu():
    model = network()
    model[1] = nn.ReLU()
    return model


def fit_with(*args, settings=None, cls=ELLALaplace, **kwargs):
    def fit(path):
        data = args[0] if args else loader("classification")
        la = posterior("classification", cls, **(settings or {}))
        la.fit(data, checkpoint=path, **kwargs)

    return fit


def with_other_data(path):
    data = loader("classification").dataset
    data.x = data.x + 1
    fit_with(DataLoader(data, 5))(path)


def add_to(path):
    la = posterior("classification")
    la.fit(loader("classification"))
    la.fit(loader("classification"), override=False, checkpoint=path)


DATA = loader("classification").dataset
OTHERS = {
    "seed was 1234 and is 7": fit_with(settings={"seed": 7}),
    "n_eigenvalues was 4 and is 'auto'": fit_with(settings={"n_eigenvalues": "auto"}),
    "subsample_size was 16 and is 15": fit_with(settings={"subsample_size": 15}),
    "stochastic was False and is 2": fit_with(settings={"stochastic": 2}),
    "complement was None and is 'prior'": fit_with(settings={"complement": "prior"}),
    "basis_dtype": fit_with(settings={"basis_dtype": torch.bfloat16}),
    "multi_label": fit_with(settings={"multi_label": True}),
    "parameter_names differ by|parameter_names was": fit_with(
        settings={"parameter_names": ["0.*"]}
    ),
    "cls_name": fit_with(cls=ELLALLLaplace),
    "values of 0.weight differ": fit_with(settings={"model": trained(network())}),
    "dtype of": fit_with(settings={"model": network().float()}),
    "modules of the model differ": fit_with(settings={"model": relu()}),
    "balanced was False and is True": fit_with(balanced=True),
    "max_data was None and is 9": fit_with(max_data=9),
    "batch_size of the training data was 5 and is 6": fit_with(
        loader("classification", 6)
    ),
    "RandomSampler": fit_with(loader("classification", shuffle=True)),
    "number of examples of the training data was 23 and is 22": fit_with(
        DataLoader(Subset(DATA, range(22)), 5)
    ),
    "first examples of the training data differ": with_other_data,
    "early_stopping": fit_with(
        val_loader=loader("classification"), early_stopping=True
    ),
    "n_data before this fit was None and is 23": add_to,
    "'fit_basis'": lambda path: posterior("classification").fit_basis(
        loader("classification"), checkpoint=path
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The checkpoint of a complete fit."""
    path = tmp_path_factory.mktemp("fit") / "fit.pt"
    fit_with()(path)
    return path


@pytest.mark.parametrize("difference", OTHERS)
def test_other_fits_are_refused(difference, finished):
    """With the difference in words and the remedy; the file stays as it is."""
    before = finished.read_bytes()
    with pytest.raises(ValueError, match=rf"(?s){difference}.*delete the file"):
        OTHERS[difference](finished)
    assert finished.read_bytes() == before


def test_refusal_changes_nothing(finished):
    """Neither the object nor its model; and without the checkpoint it fits."""
    la = posterior("classification", seed=3)
    before, settings = snapshot(la.model), dict(vars(la))
    with pytest.raises(ValueError, match="seed"):
        la.fit(loader("classification"), checkpoint=finished)
    assert_same(snapshot(la.model), before)
    assert vars(la) == settings
    assert la.fitted is None


def test_computation_may_change(tmp_path):
    """Smaller chunks or less memory continue the same fit, after a crash for lack of
    memory for example; so do hyperparameters, which a fit does not depend on."""
    path = tmp_path / "fit.pt"
    interrupted(path)
    la = posterior(chunk_size=2, memory_budget="1 GB", prior_precision=3.0)
    la.fit(loader(shuffle=True), checkpoint=path)
    assert_close(la.H, undisturbed().H)


# --- files ---------------------------------------------------------------------------


def test_damaged_and_foreign_files(finished, tmp_path):
    """Are refused and stay as they are; what killed processes left is removed."""
    path, whole = tmp_path / "fit.pt", finished.read_bytes()
    foreign = tmp_path / "weights.pt"
    torch.save(network().state_dict(), foreign)
    for content in (whole[:-100], whole[:64], b"", b"text", foreign.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"fit\.pt is not the checkpoint"):
            fit_with()(path)
        assert path.read_bytes() == content
    state = torch.load(finished, weights_only=True)
    torch.save({**state, "format": 99}, path)
    with pytest.raises(ValueError, match=r"version 99.*reads version 1.*delete"):
        fit_with()(path)
    shutil.copy(finished, path)
    (tmp_path / ".fit.pt.0123abcd.tmp").write_bytes(whole[:99])
    fit_with()(path)
    assert sorted(os.listdir(tmp_path)) == ["fit.pt", "weights.pt"]


def test_paths(tmp_path):
    """What cannot be written to is told before anything is computed."""
    for path, error in (
        (tmp_path / "no" / "fit.pt", FileNotFoundError),
        (tmp_path, IsADirectoryError),
        (3, TypeError),
    ):
        with pytest.raises(error):
            fit_with()(path)
    with pytest.raises(ValueError, match="every"):
        Checkpoint(tmp_path / "fit.pt", every=float("nan"))
    with pytest.raises(ValueError, match="share"):
        Checkpoint(tmp_path / "fit.pt", share=0)


def test_full_disk(tmp_path):
    """One warning with the cause; what was saved before stays, and the fit goes on."""
    path = tmp_path / "fit.pt"
    interrupted(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    la = posterior()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        try:
            la.fit(loader(shuffle=True), checkpoint=often(path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (warning,) = (w for w in caught if w.category is CheckpointWarning)
    assert "File too large" in str(warning.message)
    assert "saved before stays" in str(warning.message)
    assert warning.filename == __file__
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
    assert_same_fit(la, undisturbed())


def test_rows_are_saved_without_room_to_spare(tmp_path):
    """A file has the rows that are there, not the room for those to come."""
    path = tmp_path / "fit.pt"
    buffer = torch.randn(1000, 1000)
    writer = journal.Journal(often(path))
    half = buffer.bfloat16()[:3]
    writer.save({"rows": buffer[:10], "none": buffer[:0], "half": half})
    assert path.stat().st_size < 60_000
    state = writer.load()
    assert torch.equal(state["rows"], buffer[:10])
    assert state["half"].dtype == torch.bfloat16


def test_intervals(tmp_path, monkeypatch):
    """Not before `every` seconds; saves that take long, by their size or like the last
    one, so rarely that they take `share` of the time."""
    now = [0.0]

    def slow(*_):
        now[0] += 10

    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(journal, "replace_file", slow)
    writer = journal.Journal(Checkpoint(tmp_path / "fit.pt"))

    def first_due(n_bytes):
        start = now[0]
        while not writer.due(n_bytes):
            now[0] += 1
        waited, now[0] = now[0] - start, start
        return waited

    assert first_due(0) == 60
    assert first_due(4 * journal.USUAL_SPEED) == 4 * 19
    numbers = torch.zeros(2**22)
    writer.save({"numbers": numbers})
    assert first_due(0) == 10 * 19
    assert first_due(2 * numbers.nbytes) == 20 * 19


# --- data ----------------------------------------------------------------------------


class Unrepeatable(IterableDataset):
    """Draws its order from a state of its own, which nobody else knows."""

    def __init__(self):
        self.data = TensorDataset(*tensors("classification"))
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        g = torch.Generator().manual_seed(os.getpid() + self.passes)
        return (self.data[i] for i in torch.randperm(N, generator=g).tolist())


def test_data_that_do_not_repeat(tmp_path):
    """No example is counted twice: the pass starts over, with a warning."""
    path = tmp_path / "fit.pt"
    data = DataLoader(Unrepeatable(), 5)
    la = posterior("classification", n_eigenvalues=6, subsample_size=60)
    la.fit(data, checkpoint=often(path))
    state = torch.load(path, weights_only=True)
    fit = state["content"]["fit"]
    added = {
        "sums": {name: fit[name] for name in ("H", "loss", "n_data")},
        "n_examples": 15,
        "n_batches": 3,
        "evaluated": False,
        "generator": None,
        "targets": "others",
        "history": [],
        "best": None,
        "waited": 0,
    }
    start = {**fit, "H": 0 * fit["H"], "loss": 0 * fit["loss"], "n_data": 0}
    content = {"start": start, "added": added}
    torch.save({**state, "stage": "adding", "content": content}, path)
    again = posterior("classification", n_eigenvalues=6, subsample_size=60)
    with pytest.warns(CheckpointWarning, match="from the beginning"):
        again.fit(data, checkpoint=path)
    assert again.n_data == N
    assert_close(again.H, la.H)


# --- the progress bar ----------------------------------------------------------------


def test_progress_bar(tmp_path, capsys):
    """Starts where the fit goes on, of so many batches; counts those of a stream."""
    path = tmp_path / "fit.pt"
    interrupted(path)
    state = torch.load(path, weights_only=True)
    assert state["content"]["added"]["n_batches"] == 2
    posterior().fit(loader(shuffle=True), progress_bar=True, checkpoint=path)
    shown = capsys.readouterr().err
    assert " 2/5 [00:00<" in shown
    assert " 5/5 [" in shown
    assert "Sampling" not in shown
    data = DataLoader(Unrepeatable(), 5)
    la = ELLALaplace(network(), "classification", n_eigenvalues=2)
    la.fit(data, progress_bar=True)
    assert "5it [" in capsys.readouterr().err


def test_history_of_a_finished_fit(tmp_path):
    """Validation losses are kept in the file."""
    path, val = tmp_path / "fit.pt", loader("classification")
    fits = []
    for _ in range(2):
        seed_everything(1)
        la = posterior("classification")
        la.fit(
            loader("classification"),
            val_loader=val,
            early_stopping=EarlyStopping(every=5),
            checkpoint=path,
        )
        fits.append(la)
    assert fits[0].history == fits[1].history != []
