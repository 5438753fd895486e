"""Leave the user's model, random states and flags as they were found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "differentiable_kernels",
    "evaluation_mode",
    "full_precision",
    "random_states",
]


def full_precision(device: torch.device) -> torch.autocast:
    """Algebra of ours as it is written, where the model runs under autocast."""
    return torch.autocast(device.type, enabled=False)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode; modes and buffers are restored on any exit."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(b, b._version, b.detach().clone()) for b in model.buffers()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


@contextmanager
def random_states(device: torch.device, *loaders: Any) -> Iterator[None]:
    """Restore the random states of torch, numpy, python and of the loaders.

    Merely iterating over a `DataLoader` draws a seed from torch's global generator,
    and augmentations draw from all three.
    """
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    generators = [
        generator
        for loader in loaders
        for owner in (loader, getattr(loader, "sampler", None))
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator)
    ]
    with _disable_current_modes():  # a state is bytes, also below fake tensors
        torch_state = torch.get_rng_state()
        cuda_state = torch.cuda.get_rng_state(device) if on_gpu else None
        loader_states = [generator.get_state() for generator in generators]
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        with _disable_current_modes():
            torch.set_rng_state(torch_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state, device)
            for generator, state in zip(generators, loader_states, strict=True):
                generator.set_state(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


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
