"""Several processes that work on one posterior, by `torch.distributed`.

Before every exchange each process tells the others what it is about to exchange, or why
it failed, so that all of them stop with the cause named and none waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from laplace_ella.errors import OtherProcessError

logger = logging.getLogger("laplace_ella")

CPU = torch.device("cpu")

#: Numbers that are sent at once.
STAGED = 2**22

#: Whether the caller is within joint work already.
_joined: ContextVar[bool] = ContextVar("joined", default=False)


def processes_of(distributed: bool | None, device: torch.device) -> Processes | None:
    """Return the processes of the default group, or None for a process that works
    alone: there is no group, or `distributed` is False."""
    if distributed is not None and not isinstance(distributed, bool):
        raise TypeError(
            f"distributed must be True, False or None, got {distributed!r}."
        )
    initialized = dist.is_available() and dist.is_initialized()
    if distributed and not initialized:
        raise RuntimeError(
            "distributed=True needs a process group: start with torchrun and call "
            "torch.distributed.init_process_group() first, or leave it out."
        )
    if distributed is False or not initialized or dist.get_world_size() == 1:
        return None
    # Where tensors must be for the backend.
    place = device
    if "gloo" in dist.get_backend() or dist.get_backend() == "mpi":
        place = CPU
    elif device.type == "cpu" and torch.cuda.is_available():
        place = torch.device("cuda", torch.cuda.current_device())
    return Processes(dist.get_rank(), dist.get_world_size(), place)


@dataclass(frozen=True)
class Processes:
    """Two or more processes that work together, seen from one of them.

    All of them must make the same calls in the same order. Results are the same in all.
    Tensors are on `device` while they are exchanged.
    """

    rank: int
    size: int
    device: torch.device

    @contextmanager
    def together(self, what: str) -> Iterator[bool]:
        """Do one piece of joint work: where it fails in one process it fails in all, in
        the others with an `OtherProcessError`. Yield whether it is part of another."""
        if _joined.get():
            yield True
            return
        token = _joined.set(True)
        try:
            yield False
            self.meet(f"the end of {what}")
        except OtherProcessError:
            raise  # of which the others know
        except BaseException as error:
            try:
                self._gather((what, f"{type(error).__name__}: {error}", None))
            except Exception as unreachable:  # nobody is there to be told
                logger.debug("the other processes could not be told: %s", unreachable)
            raise
        finally:
            _joined.reset(token)

    def _gather(self, message: tuple[str, str | None, Any]) -> list[Any]:
        messages: list[Any] = [None] * self.size
        dist.all_gather_object(messages, message)
        return messages

    def meet(self, what: str, value: Any = None) -> list[Any]:
        """Return the plain `value` of every process, once all are at the same point."""
        try:
            messages = self._gather((what, None, value))
        except Exception as error:
            raise _failed(what, error) from error
        for rank, (place, failure, _) in enumerate(messages):
            if failure is not None:
                raise OtherProcessError(f"Rank {rank} failed ({place}). {failure}")
        if len({place for place, _, _ in messages}) > 1:
            places = "; ".join(f"rank {i}: {m[0]}" for i, m in enumerate(messages))
            raise OtherProcessError(
                "The processes are at different points, and all must make the same "
                f"calls with a loader, in the same order: {places}."
            )
        return [value for _, _, value in messages]

    def first(self, what: str, value: Any) -> Any:
        """Return the value that the first process has."""
        return self.meet(what, value)[0]

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tensors of all processes."""
        total = tensor.detach().clone().contiguous()
        self._add_up(what, total)
        return total

    def rows(self, what: str, own: torch.Tensor) -> torch.Tensor:
        """Return the rows `(n, ...)` of all processes, in the order of their ranks."""
        kind = f"{what}, {tuple(own.shape[1:])} {own.dtype}"
        counts = self.meet(kind, len(own))
        everyones = own.new_zeros(sum(counts), *own.shape[1:])
        first = sum(counts[: self.rank])
        everyones[first : first + len(own)] = own
        self._add_up(what, everyones)
        return everyones

    def _add_up(self, what: str, tensor: torch.Tensor) -> None:
        """Put the sum of all processes' tensors in the place of this one.

        All memory is taken before the processes meet: one that has none fails there,
        and not between two exchanges, where the others would wait for it.
        """
        flat = tensor.view(-1)
        staged = flat.new_empty(min(STAGED, len(flat)), device=self.device)
        self.meet(what)
        for part in flat.split(STAGED):
            some = staged[: len(part)]
            some.copy_(part)
            try:
                dist.all_reduce(some)
            except Exception as error:
                raise _failed(what, error) from error
            part.copy_(some)

    def check_same(self, described: Mapping[str, Any]) -> None:
        """Refuse processes that differ in what is described, naming it."""
        found = self.meet("settings", [str(value) for value in described.values()])
        for name, first, *others in zip(described, *found, strict=True):
            for rank, other in enumerate(others, 1):
                if other != first:
                    raise ValueError(
                        f"{name} differs between the processes: rank 0 has {first}, "
                        f"rank {rank} has {other}. All must have the same; with "
                        "distributed=False each works alone."
                    )


def _failed(what: str, error: Exception) -> OtherProcessError:
    return OtherProcessError(
        f"The exchange with the other processes failed ({what}): "
        f"{type(error).__name__}: {error}"
    )
