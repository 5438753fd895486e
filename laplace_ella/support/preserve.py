"""Leave the user's model, random states and flags as they were found."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from laplace_ella.support.batches import has_values


class _Use:
    """Whether a model is at work: modes are switched and parameters replaced while it
    is differentiated, so that two threads must not do so at the same time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.begun = False


_uses: WeakKeyDictionary[nn.Module, _Use] = WeakKeyDictionary()
_uses_guard = threading.Lock()


@contextmanager
def undisturbed(model: nn.Module, *, create_graph: bool = False) -> Iterator[None]:
    """Run a block in eval mode and put back all that is the user's, on any exit.

    Parameters, buffers, `.grad`, `requires_grad`, modes and attributes of all modules
    are what they were, also after an interrupt (Ctrl-C) at any moment: transforms
    replace parameters while the model runs, and may not come to the end of it. The
    outermost of nested blocks puts them back, because an interrupt can delay the end
    of an inner one. Another thread that works with the same model waits.
    """
    with _uses_guard:
        use = _uses.setdefault(model, _Use())
    with use.lock:
        if use.begun:
            with torch.set_grad_enabled(create_graph):
                yield
            return
        with torch.inference_mode(False):  # derivatives need what it leaves out
            restore = _restoring(model)
            try:
                use.begun = True
                model.eval()
                torch.set_grad_enabled(create_graph)
                yield
            finally:  # in place: an interrupt may come before a function has begun
                try:
                    restore()
                except KeyboardInterrupt:
                    restore()
                    raise
                finally:
                    use.begun = False


def _restoring(model: nn.Module) -> Callable[[], None]:
    """Remember the state of a model and of autograd; return what puts it back.

    The tables of a module are private, but the public way to write them is the
    module's own `__setattr__`, which may do anything.
    """
    grad_enabled = torch.is_grad_enabled()
    modules = list(model.modules())
    training = [(module, module.training) for module in modules]
    attributes = [
        (vars(module), dict(vars(module)))
        for module in modules
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    tables: list[tuple[Any, dict[str, Any]]] = [
        (table, dict(table.items()))
        for module in modules
        for table in (module._parameters, module._buffers)
    ]
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    buffers = [(b, b._version, b.detach().clone()) for b in model.buffers()]

    def restore() -> None:
        for now, before in attributes:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for module, mode in training:  # of scripted modules it is no attribute
            module.training = mode
        for now, before in tables:
            current = dict(now.items())  # tables of scripted modules are no dicts
            for name in current.keys() - before.keys():
                del now[name]
            for name, tensor in before.items():
                if current.get(name, now) is not tensor:
                    now[name] = tensor
        for p, grad, requires_grad in parameters:
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)
            if p.grad is not grad:
                p.grad = grad
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)
        torch.set_grad_enabled(grad_enabled)

    return restore


# Random states


@contextmanager
def random_states(*loaders: Any) -> Iterator[None]:
    """Put back all random states that a block changes: the global ones of torch, NumPy
    and Python, and those of the loaders."""
    sources = [each for loader in (None, *loaders) for each in _random_sources(loader)]
    before = _read(sources)
    try:
        yield
    finally:
        try:
            _write(sources, before)
        except KeyboardInterrupt:
            _write(sources, before)
            raise


def seeded_iteration(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, drawing from random states of its own.

    Making an iterator, shuffling and augmentation draw from the global states of torch,
    NumPy and Python, and from the generators of the loader. Each of these goes on from
    where it was, and is for the caller what it was, whenever a batch is yielded and in
    the end. Every pass over the same loader is therefore the same, as long as the
    caller draws nothing.

    The global states are other threads' as well. Where there are any, they are left
    alone as soon as the loader draws nothing for a batch.
    """
    sources = _random_sources(loader)
    inside, batches = _read(sources), None
    if not has_values(inside[0]):  # below fake tensors there is no state to put back
        yield from loader
        return
    watched = True

    def put_back(outside: list[Any], before: list[Any]) -> list[Any]:
        """Write the states outside, and return those inside."""
        after = _read(sources)
        if not (_same(outside, before) and _same(before, after)):
            _write(sources, outside)
        return after

    while True:
        outside, before = _read(sources), inside
        try:
            if not _same(inside, outside):
                _write(sources, inside)
            batches = iter(loader) if batches is None else batches
            batch = next(batches)
        except StopIteration:
            return
        finally:
            try:
                inside = put_back(outside, before)
            except KeyboardInterrupt:
                _write(sources, outside)
                raise
        quiet = _same(before[:N_GLOBAL], inside[:N_GLOBAL])
        if watched and quiet and threading.active_count() > 1:
            watched, sources, inside = False, sources[N_GLOBAL:], inside[N_GLOBAL:]
        yield batch


#: How to read and write one random state.
_Source = tuple[Callable[[], Any], Callable[[Any], Any]]

#: How many of the random sources of a loader are global.
N_GLOBAL = 3


def _random_sources(loader: Any) -> list[_Source]:
    """Return each random state that a pass may draw from, the global ones first."""
    sources: dict[int, _Source] = {
        0: (torch.get_rng_state, torch.set_rng_state),
        1: (np.random.get_state, np.random.set_state),
        2: (random.getstate, random.setstate),
    }
    owners = [loader, getattr(loader, "dataset", None)]
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None:  # no `or`: samplers of streams have no length
        sampler = getattr(loader, "sampler", None)
    while sampler is not None and len(owners) < 8:  # samplers may be nested
        owners.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    for owner in owners:
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, torch.Generator):
                sources[id(value)] = value.get_state, value.set_state
            elif isinstance(value, np.random.Generator):
                bits = value.bit_generator
                sources[id(value)] = (
                    partial(getattr, bits, "state"),
                    partial(setattr, bits, "state"),
                )
            elif isinstance(value, random.Random):
                sources[id(value)] = value.getstate, value.setstate
    return list(sources.values())


def _read(sources: list[_Source]) -> list[Any]:
    return [read() for read, _ in sources]


def _write(sources: list[_Source], states: list[Any]) -> None:
    for (_, write), state in zip(sources, states, strict=True):
        write(state)


def _same(a: Any, b: Any) -> bool:
    """Return whether two random states are equal, whatever they are made of."""
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return bool((a == b).all())
    if isinstance(a, Mapping):
        return all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


# Precision and kernels


def autocast_enabled(device: torch.device) -> bool:
    """Return whether models on this device run in mixed precision at the moment."""
    try:
        return torch.is_autocast_enabled(device.type)
    except TypeError:  # torch 2.3 has a function for each kind of device
        if device.type == "cpu":
            return torch.is_autocast_cpu_enabled()
        return torch.is_autocast_enabled()


def full_precision(device: torch.device) -> torch.autocast:
    """Run algebra of ours as it is written, where the model runs under autocast."""
    return torch.autocast(device.type, enabled=False)


#: Attention kernels without forward-mode and double derivatives, and the one with: how
#: to read and set the flags of torch, and what they must be.
_switches = [
    (
        getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
        getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        name == "math",
    )
    for name in ("flash", "mem_efficient", "cudnn", "math")
    if hasattr(torch.backends.cuda, f"enable_{name}_sdp")  # cudnn: not before 2.5
]
_switches.append(
    (
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
        False,
    )
)

#: The blocks of all threads that need these now, and the flags before the first one.
_blocks: set[object] = set()
_flags: list[bool] = []
_flags_guard = threading.RLock()


@contextmanager
def differentiation() -> Iterator[None]:
    """Run one pass of differentiation, with attention kernels that have forward-mode
    and double derivatives; an interrupt (Ctrl-C) waits for its end.

    The flags of the kernels are the process's: the first pass of any thread sets them,
    the last one to end puts them back. Torch counts the levels of its transforms, and
    would go on from a wrong one after an interrupt.
    """
    block = object()
    with _interrupts_wait():
        try:
            with _flags_guard:
                if not _blocks:
                    _flags[:] = [read() for read, _, _ in _switches]
                _blocks.add(block)
                for _, write, flag in _switches:
                    write(flag)
            yield
        finally:
            with _flags_guard:
                _blocks.discard(block)
                if not _blocks:
                    for (_, write, _), flag in zip(_switches, _flags, strict=True):
                        write(flag)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hand interrupts of a block to their handler after it. Python handles them in its
    main thread alone."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None
    if not callable(handler):
        yield
        return
    waiting: list[Any] = []
    signal.signal(signal.SIGINT, lambda *args: waiting.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting[0])
