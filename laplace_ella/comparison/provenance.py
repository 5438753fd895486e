"""Where the numbers of a report come from: model, data, settings, versions.

>>> record = Provenance(model="Sequential", n_params=51, n_data={"training": 60})
>>> Provenance.from_dict(record.to_dict()) == record
True
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

import torch

__all__ = ["Provenance", "describe_device", "now", "versions"]


@dataclass(frozen=True)
class Provenance:
    """What a comparison was run on, and with what.

    Attributes
    ----------
    model : str
        name of its class
    n_params : int
        P, trainable
    output_shape : sequence of int
        of one example, (C,) for most models
    n_data : dict of str to int
        examples by role: 'training', 'validation', 'test', and the names of
        out-of-distribution sets
    options : dict
        arguments of `compare` that are numbers or texts, defaults among them
    versions : dict of str to str
    device : str
    date : str
        start of the run, UTC; two runs of the same thing are equal without it
    """

    model: str = ""
    n_params: int = 0
    output_shape: tuple[int, ...] = ()
    n_data: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    date: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "output_shape": list(self.output_shape)}

    @classmethod
    def from_dict(cls, data: Any) -> Provenance | None:
        """What `to_dict` returned; None for anything else: a report is readable without
        it, and one of an earlier version has none."""
        if not isinstance(data, Mapping):
            return None
        empty = cls()
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        if "output_shape" in values and isinstance(values["output_shape"], list):
            values["output_shape"] = tuple(values["output_shape"])
        for name, value in values.items():
            if not isinstance(value, type(getattr(empty, name))):
                return None
        return cls(**values)


def versions() -> dict[str, str]:
    """Of everything on which numbers depend, by the name of the distribution."""
    from laplace_ella import __version__

    try:
        laplace_torch = importlib.metadata.version("laplace-torch")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        laplace_torch = "unknown"
    return {
        "laplace-ella": __version__,
        "laplace-torch": laplace_torch,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def describe_device(device: torch.device) -> str:
    """What times were measured on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} (CUDA)"
    if device.type != "cpu":
        return device.type
    n = torch.get_num_threads()
    return f"CPU ({platform.machine()}), {n} thread{'s' * (n > 1)}"


def now() -> str:
    """The date and the time in UTC, to the minute."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
