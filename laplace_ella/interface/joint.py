"""Methods that several processes call together, each with its part of the data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch

from laplace_ella.derivatives.model_function import refuse_sharded, unwrap
from laplace_ella.fitting.shared import SharedData, arranged
from laplace_ella.support.collective import Collective
from laplace_ella.support.fingerprint import differences, digest, fingerprint
from laplace_ella.tuning.cache import FeatureCache

__all__ = [
    "Prediction",
    "check_processes",
    "joint_predictions",
    "jointly",
    "plain_settings",
    "short",
]

Method = TypeVar("Method", bound=Callable[..., Any])


def jointly(loader: str, optional: bool = False) -> Callable[[Method], Method]:
    """Let all processes of a group call a method together: what they must have in
    common is compared first, and one that fails stops all of them.

    Parameters
    ----------
    loader : str
        the argument with the data of this process
    optional : bool, default=False
        whether it may be missing or a cache, with which every process works alone
    """

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def joint(la: Any, *args: Any, **kwargs: Any) -> Any:
            collective = la.collective
            if collective.alone or collective.joined:
                return method(la, *args, **kwargs)
            bound = signature.bind(la, *args, **kwargs)
            bound.apply_defaults()
            data = bound.arguments[loader]
            if optional and (data is None or isinstance(data, FeatureCache)):
                return method(la, *args, **kwargs)
            name = f"{method.__name__}()"
            with collective.together(name):
                settings = {"the call": name, **la.common_settings()}
                given = plain_settings(bound.arguments)
                check_processes(collective, la.model, {**settings, **given})
                return method(la, *args, **kwargs)

        return joint  # type: ignore[return-value]

    return decorate


def plain_settings(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that are numbers or words, in writing."""
    plain = (bool, int, float, str, type(None), Enum)
    return {
        name: str(value.value if isinstance(value, Enum) else value)
        for name, value in arguments.items()
        if isinstance(value, plain) and name not in ("progress_bar", "verbose")
    }


def check_processes(
    collective: Collective, model: Any, settings: Mapping[str, str]
) -> None:
    """Refuse processes with different models or settings, before any work."""
    refuse_sharded(model)
    collective.check_same("settings", settings)
    model = unwrap(model)
    first = fingerprint(model) if collective.rank == 0 else None
    first = collective.first("weights", first)
    own = None if collective.rank == 0 else differences(first, model)
    for rank, different in enumerate(collective.meet("weights, compared", own)):
        if different is not None:
            raise ValueError(
                f"The model of rank {rank} is not that of rank 0: {different}. Load "
                "the same weights in all processes. After training with "
                "DistributedDataParallel the running statistics of batch normalisation "
                "differ: for b in model.buffers(): torch.distributed.broadcast(b, 0)."
            )


@dataclass(frozen=True)
class Prediction:
    """Predictions of a batch, with its targets.

    Attributes
    ----------
    parts : tuple of torch.Tensor
        probabilities, or means and variances, `(R, C)` each
    targets : torch.Tensor
        `(R, ...)`
    counts : np.ndarray
        how many of the R rows belong to each example
    """

    parts: tuple[torch.Tensor, ...]
    targets: torch.Tensor
    counts: np.ndarray

    @property
    def output(self) -> Any:
        """As a loss takes it."""
        first, *others = self.parts
        return self.parts if others else first


def joint_predictions(
    data: SharedData, collective: Collective, own: Iterable[Prediction]
) -> Iterator[Prediction]:
    """The predictions of all processes in the common order, in one batch."""
    batches = list(own)
    tensors, counts = {}, [np.zeros(0, dtype=np.int64)]
    if batches:
        parts = zip(*(batch.parts for batch in batches), strict=True)
        tensors = {f"part {i}": torch.cat(part) for i, part in enumerate(parts)}
        tensors["targets"] = torch.cat([batch.targets for batch in batches])
        counts = [batch.counts for batch in batches]
    found = arranged(data, collective, tensors, np.concatenate(counts))
    if found:
        targets = found.pop("targets")
        yield Prediction(tuple(found.values()), targets, np.zeros(0))


def short(value: Any) -> str:
    """A setting in writing: as it is where it is short, else recognisably."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    text = str(value)
    many = isinstance(value, torch.Tensor) or len(text) > 40
    return text if not many else f"one with the digest {digest(value)[:8]}"
