"""Leave the user's model, random states and flags as they were found."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.backends import cuda, mha

from laplace_ella.support.batches import has_values


@dataclass
class _Use:
    """Whether a model is at work: modes are switched and parameters replaced while it
    is differentiated, so that two threads must not do so at the same time."""

    lock: Any = field(default_factory=threading.RLock)
    begun: bool = False


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
    grad_enabled, modules = torch.is_grad_enabled(), list(model.modules())
    # Of scripted modules attributes are no dict, and the mode is no attribute.
    own = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    tables: list[Any] = [vars(m) for m in own]
    tables += [table for m in modules for table in (m._parameters, m._buffers)]
    entries = [(table, dict(table.items())) for table in tables]
    training = [(module, module.training) for module in modules]
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    buffers = [(b, b._version, b.detach().clone()) for b in model.buffers()]

    def restore() -> None:
        for table, before in entries:
            now = dict(table.items())
            for name in now.keys() - before.keys():
                del table[name]
            for name, value in before.items():
                if now.get(name, now) is not value:
                    table[name] = value
        for module, mode in training:
            module.training = mode
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
    sources, n_global = _random_sources(loader), N_GLOBAL
    inside, batches = _read(sources), None
    if not has_values(inside[0]):  # below fake tensors there is no state to put back
        yield from loader
        return
    while True:
        outside, before = _read(sources), inside
        try:
            _write(sources, inside)
            batches = iter(loader) if batches is None else batches
            batch = next(batches)
        except StopIteration:
            return
        finally:
            try:
                inside = _write(sources, outside)
            except KeyboardInterrupt:
                _write(sources, outside)
                raise
        quiet = n_global and _same(before[:n_global], inside[:n_global])
        if quiet and threading.active_count() > 1:
            sources, inside, n_global = sources[n_global:], inside[n_global:], 0
        yield batch


#: How to read and write one random state.
_Source = tuple[Callable[[], Any], Callable[[Any], Any]]

#: How many of the random sources of a loader are global.
N_GLOBAL = 3


def _random_sources(loader: Any) -> list[_Source]:
    """Return each random state that a pass may draw from, the global ones first."""
    sources: list[_Source] = [
        (torch.get_rng_state, torch.set_rng_state),
        (np.random.get_state, np.random.set_state),
        (random.getstate, random.setstate),
    ]
    owners = [loader]
    for owner in islice(owners, 8):  # grows: samplers and data sets may be nested
        own = getattr(owner, "__dict__", {})
        within = map(own.get, ("dataset", "batch_sampler", "sampler"))
        owners += [owner for owner in within if owner is not None]
        for value in own.values():
            if isinstance(value, torch.Generator):
                sources.append((value.get_state, value.set_state))
            elif isinstance(value, np.random.Generator):
                state = value.bit_generator, "state"
                sources.append((partial(getattr, *state), partial(setattr, *state)))
            elif isinstance(value, random.Random):
                sources.append((value.getstate, value.setstate))
    return sources


def _read(sources: list[_Source]) -> list[Any]:
    return [read() for read, _ in sources]


def _write(sources: list[_Source], states: list[Any]) -> list[Any]:
    """Set the states that differ, and return what all of them were."""
    before = _read(sources)
    for (_, write), now, state in zip(sources, before, states, strict=True):
        if not _same(now, state):
            write(state)
    return before


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


_KERNELS = {"flash": False, "mem_efficient": False, "cudnn": False, "math": True}

#: How to read and set which attention kernels torch uses, and what they must be: the
#: one alone that has forward-mode and double derivatives.
_switches: list[tuple[Callable[[], bool], Callable[[bool], None], bool]] = [
    (getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"), wanted)
    for name, wanted in _KERNELS.items()
    if hasattr(cuda, f"enable_{name}_sdp")  # cudnn: not before torch 2.5
]
_switches.append((mha.get_fastpath_enabled, mha.set_fastpath_enabled, False))

#: One entry for each pass of any thread that is under way, and what the last puts back.
_passes: list[None] = []
_flags = ExitStack()
_flags_guard = threading.RLock()


@contextmanager
def differentiation() -> Iterator[None]:
    """Run one pass of differentiation, with attention kernels that have forward-mode
    and double derivatives; an interrupt (Ctrl-C) waits for its end.

    The flags of the kernels are the process's: the first pass of any thread sets them,
    the last one to end puts them back. Torch counts the levels of its transforms, and
    would go on from a wrong one after an interrupt. Python handles interrupts in its
    main thread alone.
    """
    waiting: list[Any] = []
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None
    if callable(handler):
        signal.signal(signal.SIGINT, lambda *args: waiting.append(args))
    try:
        with _flags_guard:
            if not _passes:
                for read, write, wanted in _switches:
                    _flags.callback(write, read())
                    write(wanted)
            _passes.append(None)
        yield
    finally:
        with _flags_guard:
            _passes.pop()
            if not _passes:
                _flags.close()
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            if waiting:
                handler(*waiting[0])
