"""Leave the user's model, random states and flags as they were found."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "autocast_enabled",
    "differentiable_kernels",
    "evaluation_mode",
    "full_precision",
    "get_random_states",
    "random_states",
    "set_random_states",
    "undisturbed",
]

#: One lock per model: modes, buffers and global random states are switched while it is
#: differentiated, so that two threads must not do so at the same time.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()  # type: ignore[type-arg]
_locks_guard = threading.Lock()


def _lock_of(model: nn.Module) -> Any:
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


@contextmanager
def undisturbed(
    model: nn.Module, *loaders: Any, create_graph: bool = False
) -> Iterator[None]:
    """Eval mode, no graph unless asked for, and all of the user's restored on exit.

    One thread at a time: another one that works with the same model waits.
    """
    device = next(model.parameters()).device
    with (
        _lock_of(model),
        torch.inference_mode(False),  # derivatives need what it leaves out
        evaluation_mode(model),
        random_states(device, *loaders),
        torch.set_grad_enabled(create_graph),
    ):
        yield


def autocast_enabled(device: torch.device) -> bool:
    """Whether models on this device run in mixed precision at the moment."""
    try:
        return torch.is_autocast_enabled(device.type)
    except TypeError:  # torch 2.3 has a function for each kind of device
        if device.type == "cpu":
            return torch.is_autocast_cpu_enabled()
        return torch.is_autocast_enabled()


def full_precision(device: torch.device) -> torch.autocast:
    """Algebra of ours as it is written, where the model runs under autocast."""
    return torch.autocast(device.type, enabled=False)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode; modes, buffers and attributes are restored on any
    exit.

    A forward pass may write into a buffer or put another tensor in its place. What it
    stores in an attribute is a tensor of a transform, which is of no use afterwards.
    """
    attributes = [
        (module, dict(module.__dict__))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer._version, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    model.eval()
    try:
        yield
    finally:
        for module, values in attributes:
            for name in module.__dict__.keys() - values.keys():
                del module.__dict__[name]
            module.__dict__.update(values)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)
                # Those of scripted modules are no dictionary.
                if dict(module._buffers.items()).get(name) is not buffer:
                    module._buffers[name] = buffer


def _generators(loaders: tuple[Any, ...]) -> list[torch.Generator]:
    """Generators that a pass over the loaders may draw from, wherever they are kept."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        owners = (
            loader,
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "dataset", None),
        )
        for owner in owners:
            for value in getattr(owner, "__dict__", {}).values():
                if isinstance(value, torch.Generator):
                    found[id(value)] = value
    return list(found.values())


@contextmanager
def random_states(device: torch.device, *loaders: Any) -> Iterator[None]:
    """Restore the random states of torch, numpy, python and of the loaders.

    Merely iterating over a `DataLoader` draws a seed from torch's global generator,
    and augmentations draw from all three.
    """
    before = get_random_states(device, *loaders)
    try:
        yield
    finally:
        set_random_states(before, device, *loaders)


def get_random_states(device: torch.device, *loaders: Any) -> dict[str, Any]:
    """The random states of torch, numpy, python and of the loaders, in tensors and
    plain types."""
    with _disable_current_modes():  # a state is bytes, also below fake tensors
        name, key, *position = np.random.get_state()  # noqa: NPY002
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(device) if _on_gpu(device) else None,
            "loaders": [generator.get_state() for generator in _generators(loaders)],
            "numpy": (
                name,
                torch.from_numpy(np.asarray(key, dtype=np.int64)),
                position,
            ),
            "python": random.getstate(),
        }


def set_random_states(
    states: dict[str, Any], device: torch.device, *loaders: Any
) -> None:
    """Put back what `get_random_states` returned, of the same device and loaders."""
    with _disable_current_modes():
        torch.set_rng_state(states["torch"])
        if states["cuda"] is not None:
            torch.cuda.set_rng_state(states["cuda"], device)
        generators = _generators(loaders)
        for generator, state in zip(generators, states["loaders"], strict=True):
            generator.set_state(state)
        name, key, position = states["numpy"]
        np.random.set_state((name, key.numpy(), *position))  # noqa: NPY002
    random.setstate(states["python"])


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


@contextmanager
def differentiable_kernels() -> Iterator[None]:
    """Attention by the kernels that have forward-mode and double derivatives.

    Fused scaled-dot-product kernels and the fused encoder layer have neither. The
    switches are global flags of torch, so they are set only while we differentiate.
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        mha = getattr(torch.backends, "mha", None)
        if mha is not None and mha.get_fastpath_enabled():
            mha.set_fastpath_enabled(False)
            stack.callback(mha.set_fastpath_enabled, True)
        yield
