"""Several processes that work on one posterior, by `torch.distributed`.

Every exchange begins with a meeting: each process tells what it is about to exchange,
and whether it is well. One that fails between two exchanges tells so at the next
meeting, whatever that is for, so that all stop with its cause named and none waits.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from laplace_ella.errors import OtherProcessError
from laplace_ella.support.batches import chunks

__all__ = ["ALONE", "Collective"]

logger = logging.getLogger("laplace_ella")

#: Numbers that are brought together in memory to be sent at once.
STAGED = 2**22

CPU = torch.device("cpu")

#: Whether the caller is within joint work already.
_joined: ContextVar[bool] = ContextVar("joined", default=False)


class Message(NamedTuple):
    """What a process says at a meeting.

    Attributes
    ----------
    what : str
        what it is about to do
    failure : str, optional
        what it raised
    value : Any
        a plain object for the others
    """

    what: str
    failure: str | None
    value: Any


@dataclass(frozen=True)
class Collective:
    """The processes that work together, seen from one of them; by default it is alone.

    All of them must make the same calls in the same order. Results are bitwise the same
    in all of them.

    Attributes
    ----------
    rank : int
    size : int
        W, the number of processes
    device : torch.device
        where tensors are while they are exchanged
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @classmethod
    def of(cls, distributed: bool | None, device: torch.device) -> Collective:
        """The processes of the default group, whose models are on such a device; this
        one alone where there is no group, or if `distributed` is False."""
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
            return ALONE
        place = _exchange_device(dist.get_backend(), device)
        return cls(dist.get_rank(), dist.get_world_size(), place)

    @property
    def alone(self) -> bool:
        return self.size == 1

    # Joint work

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """One piece of joint work: where it fails in one process it fails in all.

        That one raises what it met with, the others an `OtherProcessError`. Within
        another piece of joint work this is a part of it.
        """
        if self.alone or _joined.get():
            yield
            return
        token = _joined.set(True)
        try:
            yield
            self.meet(f"the end of {what}")
        except OtherProcessError:
            raise  # of which the others know
        except BaseException as error:
            self._tell(what, error)
            raise
        finally:
            _joined.reset(token)

    @property
    def joined(self) -> bool:
        """Whether this is within joint work of several processes."""
        return not self.alone and _joined.get()

    def meet(self, what: str, value: Any = None) -> list[Any]:
        """The plain `value` of every process, once all have come to the same point."""
        if self.alone:
            return [value]
        with self._exchange(what):
            messages = self._gather(Message(what, None, value))
        _check(messages)
        return [message.value for message in messages]

    def first(self, what: str, value: Any) -> Any:
        """The plain value that the first process has."""
        return self.meet(what, value if self.rank == 0 else None)[0]

    def _tell(self, what: str, error: BaseException) -> None:
        said = f"{type(error).__name__}: {error}"
        try:
            self._gather(Message(what, said, None))
        except Exception as unreachable:  # nobody is there to be told
            logger.debug("the other processes could not be told: %s", unreachable)

    def _gather(self, message: Message) -> list[Message]:
        messages: list[Any] = [None] * self.size
        # Plain tuples: the others need not have the same version of this class.
        dist.all_gather_object(messages, tuple(message))
        return [Message(*found) for found in messages]

    @contextmanager
    def _exchange(self, what: str, n_bytes: int = 0) -> Iterator[None]:
        """An exchange that fails has failed for all."""
        if n_bytes:
            logger.debug("exchange: %s, %d bytes", what, n_bytes)
        try:
            yield
        except Exception as error:
            raise OtherProcessError(
                f"The exchange with the other processes failed ({what}): "
                f"{type(error).__name__}: {error}"
            ) from error

    # Tensors

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device).contiguous()

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the processes, in the dtype of the tensor."""
        if self.alone:
            return tensor
        self.meet(what)
        # Every number is added up in one process and then sent to the others.
        total = self._placed(tensor).clone()
        with self._exchange(what, total.nbytes):
            dist.all_reduce(total)
        return total.to(tensor.device)

    def broadcast(
        self, what: str, tensor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        """The tensor of the first process, on a device of ours."""
        if self.alone:
            assert tensor is not None
            return tensor
        like = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        shape, dtype = self.first(what, like)
        if self.rank == 0:
            assert tensor is not None
            result = tensor.to(device)
        else:
            result = torch.empty(shape, dtype=dtype, device=device)
        self._broadcast(what, result, source=0)
        return result

    def _broadcast(self, what: str, tensor: torch.Tensor, source: int) -> None:
        """Fill the tensor with the source's, a few rows at a time."""
        rows = tensor if tensor.ndim else tensor.view(1)
        width = max(1, rows[:1].numel())
        for some in chunks(len(rows), STAGED // width):
            staged = self._placed(rows[some])
            with self._exchange(what, staged.nbytes * (self.rank == source)):
                dist.broadcast(staged, source)
            if self.rank != source:
                rows[some] = staged.to(rows.device)

    def everyones(
        self, what: str, tensor: torch.Tensor | None
    ) -> Iterator[torch.Tensor | None]:
        """The tensor of every process in turn, all `(n, ...)` of the same kind but for
        their number of rows; None stands for none, of a kind that is not known."""
        if self.alone:
            yield tensor
            return
        like = None
        if tensor is not None:
            like = tuple(tensor.shape), tensor.dtype, tensor.device.type
        for source, kind in enumerate(self.meet(what, like)):
            if kind is None:
                yield None
                continue
            if source == self.rank:
                assert tensor is not None
                part = tensor
            else:
                shape, dtype, place = kind
                here = tensor.device if tensor is not None else self._local(place)
                part = torch.empty(shape, dtype=dtype, device=here)
            self._broadcast(what, part, source)
            yield part

    def _local(self, kind: str) -> torch.device:
        """A device of ours of that kind."""
        return self.device if self.device.type == kind else torch.device(kind)

    def concatenated(self, what: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of all processes, in the order of their ranks."""
        own = torch.cat(list(parts)) if parts else None
        found = [part for part in self.everyones(what, own) if part is not None]
        return torch.cat(found)

    def to_first(self, what: str, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """In the first process, the rows `(n, width)` of the others, a few at a time;
        in those nothing."""
        counts = self.meet(what, len(rows))
        at_once = max(1, STAGED // max(1, rows.shape[1]))
        for source in range(1, self.size):
            for some in chunks(counts[source], at_once):
                if self.rank == source:
                    staged = self._placed(rows[some])
                    with self._exchange(what, staged.nbytes):
                        dist.send(staged, 0)
                elif self.rank == 0:
                    n = some.stop - some.start
                    staged = torch.empty(
                        n, rows.shape[1], dtype=rows.dtype, device=self.device
                    )
                    with self._exchange(what):
                        dist.recv(staged, source)
                    yield staged.to(rows.device)

    def columns(self, what: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(m, P)` of every process to all M rows of an own slice of columns,
        `(M, width)`; see `column_slices`."""
        counts = self.meet(what, len(rows))
        slices = self.column_slices(rows.shape[1])
        own = slices[self.rank]
        result = rows.new_empty(sum(counts), own.stop - own.start)
        widest = max(map(_width, slices))
        # The same in all processes, though each has another number of rows.
        at_once = max(1, STAGED // max(1, max(counts) * self.size, len(result)))
        n_pieces = -(-widest // at_once)
        for i in range(n_pieces):
            here = [_piece(s, i, n_pieces) for s in slices]
            sent = torch.cat([self._placed(rows[:, s]).flatten() for s in here])
            first, width = here[self.rank].start - own.start, _width(here[self.rank])
            got = sent.new_empty(len(result) * width)
            with self._exchange(what, sent.nbytes):
                dist.all_to_all_single(
                    got,
                    sent,
                    [n * width for n in counts],
                    [len(rows) * _width(s) for s in here],
                )
            got = got.view(len(result), width).to(result)
            result[:, first : first + width] = got
        return result

    def column_slices(self, width: int) -> list[slice]:
        """Which of so many columns each process has, about equally many."""
        return [_piece(slice(0, width), i, self.size) for i in range(self.size)]

    # Agreements

    def check_same(self, what: str, described: Mapping[str, str]) -> None:
        """Refuse processes that differ in what is described; the first difference is
        named."""
        found = self.meet(what, dict(described))
        for name in described:
            for rank, other in enumerate(found):
                if other.get(name) != found[0].get(name):
                    raise ValueError(
                        f"{name} differs between the processes: rank 0 has "
                        f"{found[0].get(name)}, rank {rank} has {other.get(name)}. All "
                        "must have the same; with distributed=False each works alone."
                    )

    def processes_here(self) -> int:
        """How many of the processes are on this machine."""
        names = self.meet("names of machines", socket.gethostname())
        return names.count(names[self.rank])


#: A single process.
ALONE = Collective()


def _width(columns: slice) -> int:
    return columns.stop - columns.start


def _piece(columns: slice, i: int, n: int) -> slice:
    """The i-th of n nearly equal parts."""
    first, width = columns.start, _width(columns)
    return slice(first + width * i // n, first + width * (i + 1) // n)


def _check(messages: Sequence[Message]) -> None:
    """Stop where a process failed, or is elsewhere."""
    for rank, message in enumerate(messages):
        if message.failure is not None:
            raise OtherProcessError(
                f"Rank {rank} failed ({message.what}). {message.failure}"
            )
    if len({message.what for message in messages}) > 1:
        places = "; ".join(f"rank {i}: {m.what}" for i, m in enumerate(messages))
        raise OtherProcessError(
            "The processes are at different points, and all must make the same calls "
            f"with a loader, in the same order: {places}."
        )


def _exchange_device(backend: str, device: torch.device) -> torch.device:
    """Where tensors must be for a backend: on the model's device if it can."""
    if ":" in backend:  # one for each kind of device
        kinds = [pair.split(":")[0] for pair in backend.split(",")]
        return device if device.type in kinds else CPU
    if backend in ("gloo", "mpi"):
        return CPU
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
