"""Two processes with one posterior: that of a single process with all their data.

The scenarios run in a group of two processes, which is started once, and in this
process alone; what they return is compared.
"""

import multiprocessing
import os
import socket
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace_ella import ComputeOptions, EarlyStopping, ELLALaplace, ELLALLLaplace
from tests.cases import mlp

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)

N, D, C, SIZE = 25, 3, 2, 2


def regression():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    return x, torch.randn(N, C, generator=g, dtype=torch.float64)


def classification():
    x, noise = regression()
    return x, (x[:, 0] + noise[:, 0] > 0).long()


def padded(tensors, rank, size):
    """A part of the data by a DistributedSampler, which repeats an example."""
    data = TensorDataset(*tensors)
    sampler = DistributedSampler(data, size, rank, shuffle=False)
    return DataLoader(data, 4, sampler=sampler)


def shard(tensors, rank, size):
    """The first ten of the data, and the others."""
    part = slice(None) if size == 1 else (slice(0, 10), slice(10, N))[rank]
    return DataLoader(TensorDataset(*(t[part] for t in tensors)), 4)


def sparse(tensors, rank, size):
    """Shards whose first, middle and last examples are equal."""
    x, y = (t[:5] for t in tensors)
    first, second = ([(x * 0, y), (x * n, y), (x * 0, y)] for n in (2, 3))
    return (first, second)[rank] if size > 1 else first + second


def ella(likelihood="regression", cls=ELLALaplace, seed=0, **settings):
    torch.manual_seed(seed)
    compute = ComputeOptions(feature_mode="reverse", row_mode="vmap")  # no trials
    return cls(mlp(D, 6, 5, C).double(), likelihood, compute=compute, **settings)


def found(la):
    """What does not depend on the signs of directions; "bits" must be the same in both
    processes to the last bit."""
    x = torch.linspace(-2, 2, 4 * D, dtype=torch.float64).view(1, 4, D)
    kept = la.likelihood == "classification" and not la.stochastic
    return {
        "left out": la.leave_one_out().nll.sort().values if kept else None,
        "n_data": la.n_data,
        "ranks": (la.rank, la.basis.n_samples),
        "fit": (la.basis.eigenvalues, la.loss, la.joint_predictive(x)[1]),
        "evidence": la.log_marginal_likelihood().detach(),
        "settings": (la.prior_precision, la.temperature, la.softmax_temperature),
        "history": la.history,
        "bits": (la.basis.directions, la.H),
    }


EXACT = {"n_eigenvalues": "exact"}
ALL_PAIRS = {"n_eigenvalues": 6, "subsample_size": 10**6}


def fits(kind, data, cls=ELLALaplace, fit=None, **settings):
    def run(rank, size):
        likelihood = data.__name__
        la = ella(likelihood, cls, **settings)
        la.fit(kind(data(), rank, size), **(fit or {}))
        return found(la)

    return run


def further_data(rank, size):
    la = ella(**EXACT)
    x, y = regression()
    la.fit(shard((x, y), rank, size))
    la.fit(shard((x + 1, y), rank, size), override=False)
    first = found(la)
    la = ella(**ALL_PAIRS, complement="prior")
    la.fit_basis(shard((x, y), rank, size))
    la.fit(shard((x + 1, y), rank, size), override=False)
    return {"exact": first, "sampled": found(la)}


def stopping(rank, size):
    """The longer part goes on alone, evaluated by both."""
    la, val = ella("classification", **ALL_PAIRS), shard(classification(), rank, size)
    plan = EarlyStopping(every=2 * size, patience=100)
    loader = shard(classification(), rank, size)
    la.fit(loader, val_loader=val, early_stopping=plan)
    return {"last": la.history[-1], "enough": len(la.history) > 5}


def tuning(rank, size):
    la = ella("classification", **ALL_PAIRS, complement="prior")
    loader = shard(classification(), rank, size)
    la.fit(loader)
    la.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=7)
    la.optimize_temperature(loader)
    return found(la)


def summaries(rank, size):
    """Each process has room for a part of its gradients only; a float32 model."""
    options = {
        "n_eigenvalues": 3,
        "compute": ComputeOptions("reverse", "vmap", 4, "18 kB"),
    }
    la = ELLALaplace(ella().model, "classification", **options)
    la.fit(shard(classification(), rank, size))
    return {"streaming": la.basis.method == "streaming", "M": la.basis.n_samples}


SCENARIOS = {
    "exact padded": fits(padded, regression, **EXACT),
    "exact shard": fits(shard, classification, **EXACT),
    "equal rows": fits(sparse, regression, **EXACT),
    "all pairs": fits(padded, classification, **ALL_PAIRS),
    "matched": fits(shard, regression, **ALL_PAIRS),
    "summaries": summaries,
    "last layer": fits(shard, classification, ELLALLLaplace, **EXACT),
    "max_data": fits(
        shard, regression, fit={"max_data": 50}, complement="prior", **ALL_PAIRS
    ),
    "further data": further_data,
    "early stopping": stopping,
    "tuning": tuning,
}


class Broken(TensorDataset):
    def __getitem__(self, index):
        if index == 23:
            raise OSError("a disk is gone")
        return super().__getitem__(index)


def failures(rank, size):
    """What each process is told when something is wrong in the last one."""
    last, messages, (x, y) = rank == size - 1, {}, regression()

    def told(name, la, loader, **kwargs):
        try:
            la.fit(loader, **kwargs)
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        messages[name + " left"] = la.fitted is None

    loader = shard((x, y), rank, size)
    data = DataLoader(Broken(x, y), 4, sampler=range(rank * 13, (rank + 1) * 12))
    told("raise", ella(), data)
    told("raise exact", ella(**EXACT), data)
    nan = x.clone()
    nan[-1] = float("nan")
    told("nan", ella(**ALL_PAIRS), shard((nan, y), rank, size))
    told("targets", ella(), shard((x, y[:, : 2 - last]), rank, size))
    told("nothing", ella(), [] if last else loader)
    told("weights", ella(seed=int(last)), loader)
    other = ella(**ALL_PAIRS)
    other.seed = 2 if last else other.seed
    told("seed", other, loader)
    told("argument", ella(), loader, max_data=5 + last)
    told("validation", ella(), loader, val_loader=loader if last else None)
    told("checkpoint", ella(), loader, checkpoint="never.pt")
    la = ella()
    with pytest.raises(Exception) as error:
        la.fit_basis(loader) if last else la.fit(loader)
    messages["call"] = str(error.value)
    la.fit(loader)
    alone = ella(distributed=False)
    alone.fit(loader)
    afterwards = {"n_data": la.n_data, "training": la.model.training}
    return {**messages, **afterwards, "alone": alone.n_data}


def outcomes(rank, size):
    results = {}
    failing = {"failures": failures} if size > 1 else {}
    for name, run in {**SCENARIOS, **failing}.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results[name] = run(rank, size)
            except Exception:
                results[name] = traceback.format_exc()
    return results


def process(rank, port, folder):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=SIZE)
    torch.save(outcomes(rank, SIZE), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Outcomes of the two processes."""
    context = multiprocessing.get_context("fork")
    folder = tmp_path_factory.mktemp("group")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started = []
    for rank in range(SIZE):
        started.append(context.Process(target=process, args=(rank, port, folder)))
        started[-1].start()
    for one in started:
        one.join(300)
    hang = [one for one in started if one.is_alive()]
    for one in hang:
        one.kill()
    assert not hang, "a process hangs"
    files = [folder / f"{rank}.pt" for rank in range(SIZE)]
    return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def single():
    return outcomes(0, 1)


def without_bits(outcome):
    if not isinstance(outcome, dict):
        return outcome
    return {k: without_bits(v) for k, v in outcome.items() if k != "bits"}


def bits(outcome):
    for name, value in outcome.items():
        if name == "bits":
            yield from value
        elif isinstance(value, dict):
            yield from bits(value)


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_as_one_process(group, single, name):
    assert name != "equal rows" or single[name]["n_data"] == 30
    for outcome in (single, *group):
        assert not isinstance(outcome[name], str), outcome[name]
        pair = without_bits(outcome[name]), without_bits(single[name])
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-8)
    pairs = zip(*(bits(outcome[name]) for outcome in group), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


FAILING = {
    "raise": "OSError: a disk is gone",
    "raise exact": "OSError: a disk is gone",
    "nan": "NaN or infinite outputs",
    "targets": "targets must have the shape",
    "nothing": "The loader yields no example",
}
DIFFERING = {
    "weights": "The model of rank 1 is not that of rank 0: 0",
    "seed": "seed differs between the processes: rank 0 has 1234, rank 1 has 2",
    "argument": "max_data differs between the processes: rank 0 has 5, rank 1",
    "validation": "the validation differs between the processes",
    "checkpoint": "checkpoint= is for a fit by one process",
    "call": "the call differs between the processes: rank 0 has fit()",
}


@pytest.mark.parametrize("name", FAILING)
def test_one_failing_process_stops_both(group, name):
    """The failing one with its own error, the other with rank and cause."""
    first, last = (outcome["failures"] for outcome in group)
    assert FAILING[name] in last[name]
    assert not last[name].startswith("OtherProcessError")
    assert first[name].startswith("OtherProcessError: Rank 1 failed")
    assert FAILING[name] in first[name]
    assert first[name + " left"]
    assert last[name + " left"]


@pytest.mark.parametrize("name", DIFFERING)
def test_both_must_do_the_same(group, name):
    for outcome in group:
        assert DIFFERING[name] in outcome["failures"][name]


def test_afterwards_both_work(group):
    """Together and, with distributed=False, each by itself; modes are as they were."""
    for rank, outcome in enumerate(group):
        assert outcome["failures"]["n_data"] == N
        assert outcome["failures"]["alone"] == (10, 15)[rank]
        assert outcome["failures"]["training"]


def test_refusals_without_processes():
    loader = shard(regression(), 0, 1)
    with pytest.raises(RuntimeError, match=r"(?s)distributed=True.*torchrun"):
        ella(distributed=True).fit(loader)
    with pytest.raises(TypeError, match="distributed must be"):
        ella(distributed="yes").fit(loader)
    assert not os.path.exists("never.pt")
