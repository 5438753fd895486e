"""A fit by several processes: what they agree on, and sums over all of their data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat, tee

import torch

from laplace_ella.derivatives.probe import Probe
from laplace_ella.derivatives.sizes import Activations
from laplace_ella.fitting.shared import SharedData
from laplace_ella.posterior.fit import Fit, Sums
from laplace_ella.support.collective import Collective
from laplace_ella.support.resources import budget_of

__all__ = ["common_budget", "common_probe", "joint_sums", "own_generator"]

#: The pass of one process: from a fit to its sums, at so many own examples each time.
Pass = Callable[[Fit, Iterator[float] | None], Iterator[Sums]]


def common_probe(collective: Collective, probe: Probe) -> Probe:
    """What the model returns, which must be the same in all processes, and the most
    memory that it takes in one of them."""
    if collective.alone:
        return probe
    sizes = (probe.activations.largest, probe.activations.total)
    found = collective.meet("outputs of the model", (probe.output_shape, sizes))
    shapes = [tuple(shape) for shape, _ in found]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"An example has outputs of shape {shapes[0]} on rank 0 and {shape} on "
                f"rank {rank}. All processes must have the same kind of inputs."
            )
    largest, total = (
        max(values) for values in zip(*(s for _, s in found), strict=True)
    )
    return Probe(shapes[0], Activations(largest, total))


def common_budget(
    collective: Collective, device: torch.device, budget: int | float | str | None
) -> int:
    """Bytes that every process may use, so that all decide alike; what is free on a
    machine is divided among its processes."""
    own = budget_of(device, budget)
    here = collective.processes_here()
    if budget is None and device.type == "cpu":
        own //= here
    return min(collective.meet("memory budgets", own))


def own_generator(
    collective: Collective, generator: torch.Generator | None
) -> torch.Generator | None:
    """Random numbers that no other process draws."""
    if generator is not None and collective.rank:
        generator.manual_seed(generator.initial_seed() + collective.rank)
    return generator


def joint_sums(
    collective: Collective,
    data: SharedData,
    start: Fit,
    own_pass: Pass,
    checkpoints: Iterator[int] | None = None,
) -> Iterator[Sums]:
    """The sums over the data of all processes, after as many new examples as each
    checkpoint says, and at the end.

    Streams take turns, so that the first to end leaves the others behind: there are
    fewer examples than the checkpoint says then.
    """
    zero = Sums(
        torch.zeros_like(start.sums.H), torch.zeros_like(start.sums.loss), n_data=0
    )
    plan, shares = iter(()), None
    if checkpoints is not None:
        plan, again = tee(checkpoints)
        shares = _own_checkpoints(data, again)
    running = own_pass(replace(start, sums=zero), shares)
    own, seen, n_ended = zero, 0, 0
    while n_ended < collective.size:
        due = next(plan, math.inf)
        last = due == math.inf or (data.n_pass is not None and due >= data.n_pass)
        wanted = math.inf if last else data.share(int(due))
        ended = False
        while own.n_data < wanted and not ended:
            further = next(running, None)
            own, ended = (own, True) if further is None else (further, False)
        total, n_ended = _total(collective, own, ended)
        if total.n_data > seen:
            seen = total.n_data
            yield _plus(start.sums, total)
    if not seen:
        raise ValueError("No process had a batch; ELLA needs at least one example.")


def _own_checkpoints(data: SharedData, checkpoints: Iterator[int]) -> Iterator[float]:
    """How many examples of this process there are up to each checkpoint, without those
    where it has no new one."""
    last = 0
    for n in checkpoints:
        if (share := data.share(n)) > last:
            yield share
            last = share
        if data.n_pass is not None and n >= data.n_pass:
            break
    yield from repeat(math.inf)


def _total(collective: Collective, own: Sums, ended: bool) -> tuple[Sums, int]:
    """The sums of all processes, and how many of them are at their end."""
    flags = own.loss.new_tensor([own.n_data, ended])
    packed = torch.cat([own.H.flatten(), own.loss.detach().flatten(), flags])
    packed = collective.sum("curvature and loss", packed)
    H, loss, flags = packed.split([own.H.numel(), own.loss.numel(), 2])
    n_data, n_ended = (round(value) for value in flags.tolist())
    return Sums(H.view_as(own.H), loss.view_as(own.loss), n_data), n_ended


def _plus(a: Sums, b: Sums) -> Sums:
    return Sums(a.H + b.H, a.loss + b.loss, a.n_data + b.n_data)
