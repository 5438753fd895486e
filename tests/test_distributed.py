"""Several processes with one posterior: that of a single process with all their data.

The scenarios run in groups of 2 and 3 processes, each of which is started once, and in
this process alone. What they return is compared.
"""

import multiprocessing
import os
import socket
import traceback
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from laplace_ella import EarlyStopping, ELLALaplace, ELLALLLaplace, RankWarning
from laplace_ella.fitting.shared import joint_order
from laplace_ella.posterior import basis
from laplace_ella.support import collective
from tests.cases import mlp

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)

N, D, C = 25, 3, 2
SIZES = (2, 3)

#: Scenarios by name: functions of rank and number of processes.
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


# --- data and models -----------------------------------------------------------------


def regression(n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g, dtype=torch.float64)
    return x, torch.randn(n, C, generator=g, dtype=torch.float64)


def classification(n=N, seed=0):
    x, noise = regression(n, seed)
    return x, (x[:, 0] + noise[:, 0] > 0).long()


def padded(tensors, rank, size, batch_size=4):
    """A part of the data by a DistributedSampler, which repeats some examples."""
    data = TensorDataset(*tensors)
    sampler = DistributedSampler(data, size, rank, shuffle=False)
    return DataLoader(data, batch_size, sampler=sampler)


def shard(tensors, rank, size, batch_size=4):
    """An own data set in each process, of different lengths."""
    n = len(tensors[0])
    bounds = [0, *(n * (i + 1) // (size + 1) for i in range(1, size)), n]
    part = slice(bounds[rank], bounds[rank + 1])
    return DataLoader(TensorDataset(*(t[part] for t in tensors)), batch_size)


class Examples(IterableDataset):
    """Every size-th example, one after the other."""

    def __init__(self, tensors, rank, size):
        self.tensors = [t[rank::size] for t in tensors]

    def __iter__(self):
        return zip(*self.tensors, strict=True)


def stream(tensors, rank, size, batch_size=4):
    return DataLoader(Examples(tensors, rank, size), batch_size)


def full(tensors, rank, size, batch_size=4):
    """All of the data in all processes."""
    return DataLoader(TensorDataset(*tensors), batch_size)


def ella(likelihood="regression", cls=ELLALaplace, wrap=None, **settings):
    torch.manual_seed(0)
    model = mlp(D, 6, 5, C).double()
    settings = {"feature_mode": "reverse", "row_mode": "vmap", **settings}  # no trials
    return cls(model if wrap is None else wrap(model), likelihood, **settings)


def found(la):
    """What does not depend on the signs of directions, and what must be the same
    in all processes to the last bit."""
    x = torch.linspace(-2, 2, 4 * D, dtype=torch.float64).view(4, D)
    prediction = la(x)
    mean, variance = prediction if isinstance(prediction, tuple) else (prediction, x)
    return {
        "n_data": la.n_data,
        "rank": la.rank,
        "n_samples": la.basis.n_samples,
        "eigenvalues": la.basis.eigenvalues,
        "trace": la.basis.trace,
        "loss": la.loss,
        "evidence": la.log_marginal_likelihood().detach(),
        "mean": mean,
        "variance": variance,
        "prior": la.prior_precision,
        "temperatures": (float(la.temperature), la.softmax_temperature),
        "history": [(point["n_data"], point["loss"]) for point in la.history],
        "bits": (la.basis.directions, la.H),
    }


# --- the same posterior --------------------------------------------------------------

KINDS = {"padded": padded, "shard": shard, "stream": stream, "full": full}


def fit_scenario(kind, likelihood, cls=ELLALaplace, fit=None, **settings):
    def run(rank, size):
        tensors = {"regression": regression, "classification": classification}
        la = ella(likelihood, cls, **settings)
        la.fit(KINDS[kind](tensors[likelihood](), rank, size), **(fit or {}))
        return found(la)

    return run


for kind in KINDS:
    SCENARIOS[f"exact {kind}"] = fit_scenario(kind, "regression", n_eigenvalues="exact")
for kind in ("padded", "full"):
    SCENARIOS[f"sampled and matched {kind}"] = fit_scenario(
        kind, "regression", n_eigenvalues=5, subsample_size=30
    )
SCENARIOS |= {
    "exact classification": fit_scenario(
        "shard", "classification", n_eigenvalues="exact"
    ),
    "last layer": fit_scenario("padded", "classification", ELLALLLaplace),
    "balanced": fit_scenario(
        "shard", "classification", balanced=True, subsample_size=8, n_eigenvalues=4
    ),
    "first examples": fit_scenario(
        "padded", "regression", fit={"max_data": 11}, n_eigenvalues=5
    ),
    "first of streams": fit_scenario(
        "stream", "regression", fit={"max_data": 11}, n_eigenvalues=5
    ),
    "several noises": fit_scenario(
        "full", "regression", sigma_noise=torch.tensor([0.5, 2.0])
    ),
}


@scenario
def wrapped_in_ddp(rank, size):
    wrap = None if size == 1 else nn.parallel.DistributedDataParallel
    la = ella("regression", wrap=wrap, n_eigenvalues=5)
    la.fit(padded(regression(), rank, size))
    return found(la)


@scenario
def data_added(rank, size):
    la = ella("regression", n_eigenvalues=5)
    la.fit(padded(regression(), rank, size))
    la.fit(shard(regression(8, seed=1), rank, size), override=False)
    return found(la)


@scenario
def early_stopping(rank, size):
    la = ella("classification", n_eigenvalues=6)
    la.fit(
        padded(classification(60), rank, size),
        val_loader=padded(classification(20, seed=1), rank, size),
        early_stopping=EarlyStopping(every=5, patience=3, link_approx="mc"),
    )
    return found(la)


@scenario
def early_stopping_of_streams(rank, size):
    la = ella("classification", n_eigenvalues=6)
    la.fit(
        stream(classification(60), rank, size),
        val_loader=stream(classification(20, seed=1), rank, size),
        early_stopping=EarlyStopping(start=1, patience=20),
    )
    return found(la)


@scenario
def calibration(rank, size):
    la = ella("classification", n_eigenvalues=6)
    la.fit(padded(classification(), rank, size))
    la.optimize_calibration(shard(classification(21, seed=1), rank, size))
    return found(la)


@scenario
def tuning(rank, size):
    la = ella("classification", n_eigenvalues=6)
    la.fit(padded(classification(), rank, size))
    val = classification(21, seed=1)
    la.optimize_temperature(full(val, rank, size), tune_prior=True, link_approx="mc")
    la.optimize_rank("gridsearch", padded(val, rank, size), link_approx="mc")
    la.optimize_prior_precision(
        method="gridsearch", val_loader=stream(val, rank, size), grid_size=5
    )
    la.optimize_prior_precision()  # by the evidence, each process for itself
    return found(la)


@scenario
def tuning_by_sampled_weights(rank, size):
    la = ella("regression", n_eigenvalues=6)
    la.fit(padded(regression(), rank, size))
    la.optimize_prior_precision(
        "nn",
        "gridsearch",
        val_loader=shard(regression(9, seed=1), rank, size),
        grid_size=4,
        n_samples=3,
    )
    return {"prior": la.prior_precision}


@scenario
def features_in_order(rank, size):
    """Of outputs at three positions, of which some have no target."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(1, 4, C).double()

        def forward(self, x):
            return self.net(x.unsqueeze(-1))

    torch.manual_seed(0)
    la = ELLALaplace(
        Tokens(), "classification", output_layout="channels_last", n_eigenvalues=4
    )
    x, _ = regression()
    y = (x > 0).long()
    y[::3, 1] = -100
    la.fit(padded((x, y), rank, size))
    caches = [
        la.cache_features(kind((x, y), rank, size)) for kind in (padded, full, stream)
    ]
    return {
        "f_mu": [cache.f_mu for cache in caches],
        "lengths": [len(cache) for cache in caches],
        "targets": [cache.targets for cache in caches],
        "norms": [cache.phi.square().sum(-1) for cache in caches],
    }


@scenario
def rank_without_data(rank, size):
    """The last of several processes has nothing."""
    results = []
    for kind in (TensorDataset, Examples):
        tensors, val = regression(), regression(9, seed=1)
        if size > 1:
            n = 0 if rank == size - 1 else N
            part = slice(rank, n, size - 1)
            tensors, val = ([t[part] for t in data] for data in (tensors, val))
        few = kind(*tensors) if kind is TensorDataset else kind(tensors, 0, 1)
        la = ella("regression", n_eigenvalues="exact")
        loader = DataLoader(few, 4)
        la.fit(loader, val_loader=DataLoader(TensorDataset(*val), 4))
        result = found(la)
        result.pop("history")  # the order of the examples is another
        results.append(result)
    return results


@scenario
def large_bases(rank, size):
    """The ways that many gradients take: slices, in small pieces, and products of
    parameters."""
    results = {}
    limits = basis.SVD_LIMIT, collective.STAGED
    basis.SVD_LIMIT, collective.STAGED = 0, 1000
    try:
        for name, settings in {
            "slices": {"n_eigenvalues": 5, "subsample_size": 30},
            "all directions": {"n_eigenvalues": "exact"},
            "many rows": {"n_eigenvalues": 5, "subsample_size": 10**6},
        }.items():
            n = 200 if name == "many rows" else N
            la = ella("regression", **settings)
            la.fit(shard(regression(n), rank, size))
            eye = torch.eye(la.rank, dtype=torch.float64)
            directions = la.basis.directions
            torch.testing.assert_close(directions @ directions.T, eye)
            results[name] = found(la)
    finally:
        basis.SVD_LIMIT, collective.STAGED = limits
    return results


@scenario
def summaries(rank, size):
    """Gradients that do not fit are summarised in each process, and then together."""
    x, _ = regression(240)
    y = x[:, :C].contiguous()
    la = ella("regression", n_eigenvalues=3, complement="drop", chunk_size=4)
    la.memory_budget = "72 kB"
    la.fit(padded((x, y), rank, size, 40))
    return {
        "method": la.basis.method,
        "n_samples": la.basis.n_samples,
        "trace": la.basis.trace,
        "roughly": la.basis.eigenvalues,
        "bits": (la.basis.directions, la.H),
    }


@scenario
def state_of_the_user(rank, size):
    la = ella("classification", n_eigenvalues=4, stochastic=True)
    loader = padded(classification(), rank, size)
    val = DataLoader(TensorDataset(*classification(9)), 3, shuffle=True)
    la.model.train()
    states = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    la.fit(loader, val_loader=val)
    la.optimize_temperature(val)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    return {"training": la.model.training, "n_data": la.n_data}


# --- what one process may do wrong ---------------------------------------------------


def raised(function):
    """What a call raises, as text."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Broken(Dataset):
    """Fails, or has NaN, at one example."""

    def __init__(self, tensors, how):
        self.tensors, self.how = tensors, how

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, i):
        x, y = (t[i] for t in self.tensors)
        if i == 23 and self.how == "raise":
            raise OSError("a disk is gone")
        return (x * float("nan"), y) if i == 23 and self.how == "nan" else (x, y)


@scenario
def failures(rank, size):
    """The causes that all processes name, after each of which they work on."""
    last = rank == size - 1
    messages = {}
    for how in ("raise", "nan"):
        data = Broken(regression(), how)
        sampler = DistributedSampler(data, size, rank, shuffle=False)
        loader = DataLoader(data, 4, sampler=sampler)
        la = ella("regression", n_eigenvalues=4, subsample_size=8)
        messages[how] = raised(lambda la=la, loader=loader: la.fit(loader))
        messages[f"{how} in validation"] = raised(
            lambda la=la, loader=loader: la.fit(
                padded(regression(), rank, size), val_loader=loader
            )
        )
        assert la.fitted is None
    la = ella("regression")
    if last:
        with torch.no_grad():
            next(la.model.parameters()).add_(1)
    loader = padded(regression(), rank, size)
    messages["weights"] = raised(lambda: la.fit(loader))
    la = ella("regression", seed=1 + last)
    messages["seed"] = raised(lambda: la.fit(loader))
    la = ella("regression")
    messages["argument"] = raised(lambda: la.fit(loader, max_data=5 + last))
    kind = stream if last else padded
    messages["kind"] = raised(lambda: la.fit(kind(regression(), rank, size)))
    x, y = regression()
    wrong = TensorDataset(x, y[:, :1] if last else y)
    messages["targets"] = raised(lambda: la.fit(DataLoader(wrong, 4)))
    empty = DataLoader(TensorDataset(x[:0], y[:0]), 4)
    messages["nothing"] = raised(lambda: la.fit(empty))
    messages["call"] = raised(lambda: la.fit_basis(loader) if last else la.fit(loader))
    la.fit(loader)
    messages["n_data"] = la.n_data
    return messages


@scenario
def alone(rank, size):
    """With distributed=False each process has a posterior of its own data."""
    la = ella("regression", distributed=False)
    x, y = regression()
    n = 10 + rank
    la.fit(DataLoader(TensorDataset(x[:n], y[:n]), 4))
    return {"n_data": la.n_data}


# --- running them --------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def outcomes(rank, size):
    results = {}
    for name, run in SCENARIOS.items():
        torch.manual_seed(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)
            try:
                results[name] = run(rank, size)
            except Exception:
                results[name] = traceback.format_exc()
    return results


def process(rank, size, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    torch.save(outcomes(rank, size), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Outcomes of the processes, by the size of their group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = {}
    for size in SIZES:
        folder, port = tmp_path_factory.mktemp("group"), free_port()
        started = [
            context.Process(target=process, args=(rank, size, port, str(folder)))
            for rank in range(size)
        ]
        for one in started:
            one.start()
        for one in started:
            one.join(600)
            hangs = one.is_alive()
            if hangs:
                one.kill()
            assert not hangs, "a process hangs"
        results[size] = [
            torch.load(folder / f"{rank}.pt", weights_only=False)
            for rank in range(size)
        ]
    return results


@pytest.fixture(scope="module")
def single():
    """Outcomes of this process alone."""
    return outcomes(0, 1)


def close(ours, expected, where=""):
    """Equal up to rounding, the bits left aside."""
    if isinstance(expected, dict):
        for name in expected.keys() - {"bits"}:
            if name == "roughly":
                torch.testing.assert_close(ours[name], expected[name], rtol=0.1, atol=0)
            else:
                close(ours[name], expected[name], f"{where} {name}")
    elif isinstance(expected, (list, tuple)):
        assert len(ours) == len(expected), where
        for a, b in zip(ours, expected, strict=True):
            close(a, b, where)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(
            ours, expected, rtol=1e-6, atol=1e-8, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(expected, float):
        assert ours == pytest.approx(expected, rel=1e-6), where
    else:
        assert ours == expected, where


def bits(outcome):
    """The tensors that must be the same to the last bit."""
    if isinstance(outcome, dict):
        for name, value in outcome.items():
            yield from value if name == "bits" else bits(value)
    elif isinstance(outcome, list):
        for value in outcome:
            yield from bits(value)


OTHER = {"failures", "alone", "state_of_the_user"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in OTHER])
def test_same_as_one_process(groups, single, size, name):
    assert not isinstance(single[name], str), single[name]
    for outcome in groups[size]:
        assert not isinstance(outcome[name], str), outcome[name]
        close(outcome[name], single[name])
    first = list(bits(groups[size][0][name]))
    for outcome in groups[size][1:]:
        for a, b in zip(first, bits(outcome[name]), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("size", SIZES)
def test_one_failing_process_stops_all(groups, size):
    """The failing one with its own exception, the others with rank and cause."""
    outcomes = [group["failures"] for group in groups[size]]
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome
    owner = 23 % size  # of the broken example
    causes = {
        "raise": ("OSError", "a disk is gone"),
        "raise in validation": ("OSError", "a disk is gone"),
        "nan": ("ValueError", "NaN or infinite gradients"),
        "nan in validation": ("ValueError", "NaN or infinite outputs or features"),
        "targets": ("ValueError", "targets"),
    }
    for name, (kind, cause) in causes.items():
        failing = size - 1 if name == "targets" else owner
        for rank, outcome in enumerate(outcomes):
            message = outcome[name]
            assert cause in message
            if rank == failing:
                assert message.startswith(kind)
            else:
                assert message.startswith("OtherProcessError")
                assert f"Rank {failing} failed" in message
    last = size - 1
    for outcome in outcomes:
        assert f"model of rank {last} is not that of rank 0" in outcome["weights"]
        assert "values of 0.weight differ" in outcome["weights"]
        assert (
            f"seed differs between the processes: rank 0 has 1, rank {last} has 2"
            in (outcome["seed"])
        )
        assert (
            f"max_data differs between the processes: rank 0 has 5, rank {last}"
            in (outcome["argument"])
        )
        assert "rank 0 has indexed data" in outcome["kind"]
        assert "no example" in outcome["nothing"]
        assert "call differs between the processes: rank 0 has fit()" in outcome["call"]
        assert outcome["n_data"] == N


@pytest.mark.parametrize("size", SIZES)
def test_each_alone_and_undisturbed(groups, size):
    """`distributed=False`; random states and modes as they were."""
    for rank, outcome in enumerate(groups[size]):
        assert outcome["alone"] == {"n_data": 10 + rank}
        assert outcome["state_of_the_user"] == {"training": True, "n_data": N}


def test_stops_early(single):
    """The scenario of early stopping has something to stop."""
    assert single["early_stopping"]["n_data"] < 60
    assert len(single["early_stopping_of_streams"]["history"]) > 5


def test_examples_belong_to_one_process_each():
    """Turns, padding, and data that all have."""
    order, owner = joint_order([np.arange(7), np.arange(7), np.arange(7)])
    assert order.tolist() == list(range(7))
    assert np.bincount(owner).tolist() == [3, 2, 2]
    order, owner = joint_order([np.array([5, 1]), np.array([]), np.array([3, 9, 5, 4])])
    assert order.tolist() == [5, 3, 1, 9, 4]
    assert owner.tolist()[1:] == [2, 0, 2, 2]


def test_refusals_without_processes():
    """What needs a process group, and parameters that are divided."""
    la = ella("regression", distributed=True)
    with pytest.raises(RuntimeError, match=r"(?s)distributed=True.*torchrun"):
        la.fit(full(regression(), 0, 1))
    with pytest.raises(TypeError, match="distributed must be"):
        ella("regression", distributed="yes").fit(full(regression(), 0, 1))


def test_divided_parameters_are_refused(tmp_path):
    """FSDP2's, before any work."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        model = fsdp.fully_shard(mlp(D, 4, C), mesh=mesh)
        with pytest.raises(TypeError, match=r"(?s)0\.weight is divided.*plain copy"):
            ELLALaplace(model, "regression")
    finally:
        dist.destroy_process_group()
