"""Nothing of the user's changes: weights, gradients, modes, hooks, flags, random
states; also where the model raises, a user interrupts, or other threads work."""

import copy
import io
import random
import signal
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from laplace_ella import ComputeOptions, ELLALaplace, ELLALLLaplace
from laplace_ella.errors import NotDifferentiableError
from laplace_ella.support.preserve import differentiation, seeded_iteration, undisturbed
from tests import dense
from tests.cases import Case, make, mlp
from tests.fitting import assert_close, build, fit


class Broken(RuntimeError):
    """What the model raises when it is told to."""


class Net(nn.Module):
    """Has everything that could be disturbed, and breaks after some calls."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.drop, self.frozen, self.out = (
            nn.Dropout(),
            nn.Linear(8, 6),
            nn.Linear(6, 3),
        )
        self.register_buffer("calls", torch.zeros(()))
        self.breaks_after, self.n_calls = None, 0
        self.remembers, self.last = True, None

    def forward(self, x):
        if self.breaks_after is not None:
            self.breaks_after -= 1
            if self.breaks_after < 0:
                raise Broken
        self.calls += 1
        self.n_calls += 1
        h = self.conv(x)
        if self.remembers:
            self.last = self.latest = h
        h = self.drop(torch.relu(self.bn(h))).flatten(1)
        return self.out(torch.tanh(self.frozen(h)))


def make_case(plain=False):
    """A model in mixed modes with gradients, hooks and a frozen layer; without what
    transforms or other libraries do not support if `plain`."""
    model = Net().double()
    x, y = torch.randn(9, 1, 4, 4).double(), torch.randint(3, (9,))
    model(x).square().sum().backward()
    del model.latest
    model.last = None
    model.drop.eval()
    model.frozen.requires_grad_(False)
    model.conv.bias.grad = None
    model.out.register_forward_hook(lambda *args: None)
    model.bn.register_forward_pre_hook(lambda *args: None)
    model.remembers = not plain
    if not plain:
        model.conv.register_full_backward_hook(lambda *args: None)
    return Case(model, "classification", x, y, x[:4])


SWITCHES = ("flash", "mem_efficient", "math", "cudnn")


def flags():
    """The process's attention kernels."""
    on = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in SWITCHES]
    return [*on, torch.backends.mha.get_fastpath_enabled()]


def snapshot(model):
    """Everything that must be the same, as values that compare."""
    found = {"flags": flags(), "grad": torch.is_grad_enabled()}
    found["dtype"] = torch.get_default_dtype(), torch.get_num_threads()
    found["rng"] = torch.get_rng_state().tolist(), random.getstate()
    found["numpy"] = str(np.random.get_state())  # noqa: NPY002
    for name, module in model.named_modules():
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
        own = {k: id(v) for k, v in vars(module).items() if k != "breaks_after"}
        found[name] = own, module.training, list(map(len, hooks))
        tensors = [*module._parameters.items(), *module._buffers.items()]
        found[name, "tensors"] = [(name, id(tensor)) for name, tensor in tensors]
    for name, p in model.named_parameters():
        grad = None if p.grad is None else (id(p.grad), p.grad.tolist())
        found["p", name] = p.tolist(), p.requires_grad, p.data_ptr(), grad
    found["buffers"] = {name: b.tolist() for name, b in model.named_buffers()}
    return found


MC = {"link_approx": "mc", "n_samples": 3}


def search(la, case, **kwargs):
    val_loader = case.loader(4, shuffle=True)
    kwargs = {"method": "gridsearch", "val_loader": val_loader, **kwargs}
    la.optimize_prior_precision(grid_size=3, **kwargs)


#: Public calls, most of which run the model.
CALLS = {
    "init": lambda la, case: type(la)(case.model, "classification"),
    "fit": lambda la, case: la.fit(case.loader(4, shuffle=True)),
    "fit_balanced": lambda la, case: la.fit(case.loader(4), balanced=True),
    "fit_online": lambda la, case: la.fit(case.loader(4), override=False),
    "features": lambda la, case: la.features(case.x_test),
    "probit": lambda la, case: la(case.x_test),
    "mc": lambda la, case: la(case.x_test, **MC),
    "nn": lambda la, case: la(case.x_test, pred_type="nn", **MC),
    "samples": lambda la, case: la.functional_samples(case.x_test, n_samples=3),
    "gridsearch": search,
    "gridsearch_nn": lambda la, case: search(la, case, pred_type="nn", **MC),
    "sample": lambda la, case: la.sample(3),
    "marglik": lambda la, case: la.optimize_prior_precision(n_steps=2),
    "state": lambda la, case: la.load_state_dict(la.state_dict()),
}

MODES = {
    "auto": {},
    "forward": {"feature_mode": "forward", "row_mode": "vmap"},
    "reverse": {"feature_mode": "reverse", "row_mode": "loop"},
    "double": {"feature_mode": "double_vjp"},
    "backpack": {"row_mode": "backpack"},
    "asdl": {"row_mode": "asdl"},
}


@pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")
@pytest.mark.parametrize("breaks_after", [None, 0, 1, 2, 4])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_calls(cls, call, breaks_after):
    """The snapshot of model and process is the same after every public call, also when
    the model raises in its n-th call, whose error comes out."""
    case = make_case()
    la = fit(case, cls)
    before, expected = snapshot(case.model), la(case.x_test)
    assert snapshot(case.model) == before
    case.model.breaks_after = breaks_after
    raised = None
    try:
        CALLS[call](la, case)
    except (Broken, NotDifferentiableError) as error:
        raised = repr(error)
    assert raised is None or (breaks_after is not None and "Broken" in raised)
    case.model.breaks_after = None
    assert snapshot(case.model) == before
    if call in ("features", "probit", "fit") and breaks_after == 0:
        assert_close(la(case.x_test), expected)  # a failed fit keeps the posterior


@pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")
@pytest.mark.parametrize("breaks_after", [None, 3, 6])
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, breaks_after):
    case = make_case(plain=mode in ("forward", "backpack", "asdl"))
    la = build(case, compute=ComputeOptions(**MODES[mode]))
    before = snapshot(case.model)
    case.model.breaks_after = breaks_after
    with nullcontext() if breaks_after is None else pytest.raises(Exception) as error:
        la.fit(case.loader(4))
        la(case.x_test)
        la(case.x_test, "nn", link_approx="mc", n_samples=2)
    case.model.breaks_after = None
    assert snapshot(case.model) == before
    # What tries several ways tells what each of them said.
    assert error is None or "Broken" in f"{error.type.__name__} {error.value}"
    torch.save(case.model.state_dict(), io.BytesIO())


def test_state_outside():
    """Without gradients, in inference mode, and with another default dtype."""
    case = make("classification_mlp")
    expected = fit(case)(case.x_test)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_close(fit(case)(case.x_test).clone(), expected)
    torch.set_default_dtype(torch.float64)
    case.model.float()
    case.x, case.x_test = case.x.float(), case.x_test.float()
    assert fit(case)(case.x_test).dtype == torch.float32
    copy.deepcopy(fit(case))


@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_submodules(how):
    part = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    x, y = torch.randn(9, 3), torch.randint(2, (9,))
    scripted = torch.jit.script(part) if how == "script" else torch.jit.trace(part, x)
    model = nn.Sequential(scripted, nn.Tanh(), nn.Linear(4, 2)).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    la = fit(Case(model, "classification", x, y, x[:4]))
    _, Js = dense.jacobians(nn.Sequential(part, *model[1:]), x)
    phi = la.features(x)[1]
    assert_close(phi, Js @ la.basis.vectors, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
@pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")
@pytest.mark.parametrize(
    ("call", "times"), [("nn", 100), ("fit", 100), ("mc", 50), ("gridsearch_nn", 50)]
)
def test_interruptions(call, times):
    """At any moment; nothing is lost, and afterwards everything works."""
    armed = False

    def interrupt(*_):
        if armed:  # and not when the call has just ended
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does

    case = make_case(plain=True)
    la = fit(case, compute=ComputeOptions("forward", "vmap"))
    before = snapshot(case.model)
    duration = min(timeit.repeat(lambda: CALLS[call](la, case), number=1, repeat=3))
    # Processes that a shell starts in the background ignore SIGINT.
    handlers = {signal.SIGALRM: interrupt, signal.SIGINT: signal.default_int_handler}
    before_it = {number: signal.signal(number, f) for number, f in handlers.items()}
    chance, interrupted = random.Random(0), 0
    try:
        for _ in range(times):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, duration * chance.random() + 1e-6)
                CALLS[call](la, case)
                armed = False
            except KeyboardInterrupt:
                interrupted += 1
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            # An interrupt within torch's own no_grad() can leave that on.
            torch.set_grad_enabled(True)
            assert snapshot(case.model) == before
    finally:
        for number, handler in before_it.items():
            signal.signal(number, handler)
    assert interrupted > times / 10
    CALLS[call](la, case)


def in_threads(*works):
    """Run functions at the same time, and raise what they raise."""
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result(60)


def test_flags_of_several_threads():
    """Whoever comes first and whoever leaves last, the flags are as before."""
    before, steps = flags(), threading.Barrier(2, timeout=30)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    changed = flags()

    def first():
        with differentiation():
            steps.wait()
            steps.wait()

    def second():
        steps.wait()
        with differentiation(), differentiation():
            steps.wait()
            time.sleep(0.05)
            assert flags() == [False, False, True, False, False]

    try:
        in_threads(first, second)
        assert flags() == changed
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(before[1])
    cases = [make(name) for name in ("attention", "classification_mlp", "attention")]
    fits = [fit(case, complement="prior") for case in cases]
    expected = [la(case.x_test) for la, case in zip(fits, cases, strict=True)]

    def predict(i):
        for _ in range(20):
            assert_close(fits[i](cases[i].x_test), expected[i])

    in_threads(*(lambda i=i: predict(i) for i in range(3)))
    assert flags() == before


def test_one_model_at_a_time():
    """A thread waits while another one works with the same model."""
    model, order = mlp(2, 3), []

    def work(name):
        with undisturbed(model), undisturbed(model):
            order.append(name)
            time.sleep(0.02)
            order.append(name)

    in_threads(lambda: work("a"), lambda: work("b"))
    assert order in (list("aabb"), list("bbaa"))


def test_random_numbers_of_other_threads():
    """They are all different while this one predicts and reads a loader."""
    case = make("classification_mlp")
    la, drawn, done = fit(case), [], threading.Event()

    def draw():
        while not done.is_set():
            drawn.append(float(torch.rand(())))
            time.sleep(0.001)

    def work():
        try:
            for _ in range(30):
                la(case.x_test)
            for batch in seeded_iteration([torch.zeros(1)] * 60):
                time.sleep(0.001 * float(batch) + 0.001)
        finally:
            done.set()

    in_threads(draw, work)
    assert len(drawn) > 20
    # The two states that a loader is watched for are read and written at its start.
    assert len(set(drawn)) >= len(drawn) - 2


def test_every_pass_draws_the_same():
    """Shuffling and augmentation go on within a pass, and start anew with the next."""

    def augmented(batch):
        x = torch.stack([x for (x,) in batch])
        noise = random.random() + np.random.rand()  # noqa: NPY002
        return x + torch.rand(()) + noise

    data = TensorDataset(torch.arange(12.0))
    own = torch.Generator().manual_seed(3)
    nested = BatchSampler(RandomSampler(data, generator=own), 3, False)
    shuffled = {"batch_size": 3, "shuffle": True}
    for how in (shuffled, {**shuffled, "generator": own}, {"batch_sampler": nested}):
        loader = DataLoader(data, collate_fn=augmented, **how)
        state = torch.get_rng_state(), own.get_state(), random.getstate()
        first, second = [list(seeded_iteration(loader)) for _ in range(2)]
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(torch.get_rng_state(), state[0])
        assert torch.equal(own.get_state(), state[1])
        assert random.getstate() == state[2]
        parts = torch.stack(first)
        assert len({float(x.frac()[0]) for x in parts}) == 4  # new noise in each batch
        partial = seeded_iteration(loader)
        next(partial)
        assert torch.equal(torch.get_rng_state(), state[0])
