"""A fit in a file: as tensors and plain types, with a checksum, written as a whole."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.modes import ComputeOptions, FeatureMode, Modes, RowMode
from laplace_ella.errors import CheckpointWarning, warn_caller
from laplace_ella.fitting.data import loader_batches
from laplace_ella.fitting.sampling import FitPlan, Progress
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.fit import CurvatureSum, Fit, TrainingRows
from laplace_ella.posterior.span import Sketch, Span
from laplace_ella.support.batches import (
    OutputLayout,
    batch_size,
    take,
    tensors_of,
    to_device,
)
from laplace_ella.support.identity import digest, model_identity, same_model
from laplace_ella.support.preserve import autocast_enabled

#: Seconds between two saves; more where a save takes long.
SAVE_EVERY = 60.0

START_OVER = "to start over, delete the file"


# Values as tensors and plain types

_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Fit, CurvatureSum, TrainingRows, NystromBasis, Span, Sketch, Progress),
        *(Linearizer, Modes, FeatureMode, RowMode, Complement),
    )
}

#: Fields that are the model's or chosen anew, and those that are where directions are.
_MODEL = ("mean", "fn", "layout", "dict_key_x", "options")
_AT_HOME = ("directions", "signs")


def _plain(value: Any) -> Any:
    """Return a value as tensors and plain types: dataclasses and enums as mappings with
    the name of their class."""
    kind = {"class": type(value).__name__}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return {**kind, "value": value.value}
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.name not in _MODEL]
        return {**kind, **{name: _plain(getattr(value, name)) for name in names}}
    return value.detach() if isinstance(value, torch.Tensor) else value


def _value(state: Any, model: Mapping[str, Any], device: torch.device) -> Any:
    """Return the inverse of `_plain`, with the fields that are the model's."""
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if isinstance(state, (tuple, list)):
        return tuple(_value(item, model, device) for item in state)
    if not isinstance(state, Mapping):
        return state
    home = model["options"].basis_device or device
    named = {
        name: _value(item, model, home if name in _AT_HOME else device)
        for name, item in state.items()
    }
    kind: Any = _KINDS.get(str(named.pop("class", None)))
    if kind is None:
        return state
    if issubclass(kind, Enum):
        return kind(**named)
    names = [field.name for field in fields(kind)]
    return kind(**named, **{name: model[name] for name in names if name in model})


def _plain_fit(fit: Fit) -> dict[str, Any]:
    return {**_plain(fit), "examples": plain_inputs(fit.examples)}


def _fit_of(
    state: Any,
    fn: ModelFunction,
    layout: OutputLayout,
    dict_key_x: str,
    options: ComputeOptions,
) -> Fit:
    """Return a fit with θ̂ and derivatives of the model."""
    own = ModelFunction(fn.model, fn.names, state["dtype"])
    model = fn.flat(), own, layout, dict_key_x, options
    return _value(state, dict(zip(_MODEL, model, strict=True)), fn.device)


def plain_inputs(x: Any) -> Any:
    """Return inputs as copies on the CPU in plain containers, which a file may hold;
    None where there is anything else in them."""
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().clone()
    if isinstance(x, Mapping):
        items = {key: plain_inputs(value) for key, value in x.items()}
        return None if any(value is None for value in items.values()) else items
    if isinstance(x, (tuple, list)):
        parts = [plain_inputs(value) for value in x]
        return None if any(part is None for part in parts) else tuple(parts)
    return x if isinstance(x, (bool, int, float, str)) else None


# The file of a fit


@dataclass
class Checkpoint:
    """The file of one fit.

    Attributes
    ----------
    path : Path
    identity : dict
        model, data and settings, see `support.identity`
    random : torch.Tensor
        torch's global random state, from which loaders make their order
    due : float
        when the file is to be written next
    """

    path: Path
    identity: Mapping[str, Any]
    random: torch.Tensor
    due: float = 0.0

    def load(self, saved: Mapping[str, Any], *how: Any) -> tuple[Fit, Progress, bool]:
        """Return the fit in a file of this one's identity, how far it got, and whether
        it is finished; `how` derivatives are taken, see `_fit_of`."""
        before, now = saved["identity"], self.identity
        found = same_model(before["model"], now["model"])
        names = (name for name in {**now, **before} if name != "model")
        found += [f"{n} differs" for n in names if before.get(n) != now.get(n)]
        if found:
            more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
            raise ValueError(
                f"{self.path} is the checkpoint of another fit: {'; '.join(found[:3])}"
                f"{more}. Use the model, data and settings that it was made with, or "
                f"another path, or, {START_OVER}."
            )
        fit = _fit_of(saved["fit"], *how)
        state = dict(saved["progress"])
        generator = state.pop("generator")  # of which the state is on the CPU
        given = {"options": fit.linearizer.options, "generator": generator}
        return fit, _value(state, given, fit.sums.H.device), saved["finished"]

    def save(self, fit: Fit, progress: Progress, finished: bool = False) -> None:
        """Write the file anew, or warn."""
        begun = time.monotonic()
        state = {
            "identity": dict(self.identity),
            "random": self.random,
            "fit": _plain_fit(fit),
            "progress": _plain(progress),
            "finished": finished,
        }
        temporary = self.path.with_name(f".{self.path.name}.partial")
        try:
            torch.save(state, temporary)
            checksum = _checksum(temporary, temporary.stat().st_size)
            with temporary.open("ab") as file:
                file.write(checksum)
            os.replace(temporary, self.path)
        except (OSError, RuntimeError) as error:  # torch's own, of a full disk
            warn_caller(
                f"The checkpoint {self.path} could not be written: {error}. The fit "
                "goes on without it.",
                CheckpointWarning,
            )
        finally:
            temporary.unlink(missing_ok=True)
        now = time.monotonic()
        self.due = now + max(SAVE_EVERY, 20 * (now - begun))


def _checksum(path: Path, size: int) -> bytes:
    """Return the digest of the first bytes of a file; it stands after them."""
    content = np.memmap(path, np.uint8, "r", shape=(size,))
    return hashlib.sha256(content.data).digest()


def _read(path: Path) -> dict[str, Any] | None:
    """Return what a checkpoint's file holds, None where there is none yet."""
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(
            f"checkpoint must be a file in a folder that exists, got {path}."
        )
    if not path.exists():
        return None
    remedy = f"Use another path, or, {START_OVER}."
    size = path.stat().st_size - hashlib.sha256().digest_size
    with path.open("rb") as file:
        file.seek(max(0, size))
        found = file.read()
    if size <= 0 or _checksum(path, size) != found:
        raise ValueError(
            f"{path} is not a checkpoint, or is damaged: its checksum is not that of "
            f"its content. {remedy}"
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def open_checkpoint(
    path: str | os.PathLike[str],
    plan: FitPlan,
    settings: Mapping[str, Any],
    start: Fit | None,
    val_loader: Any,
) -> tuple[Checkpoint, tuple[Fit, Progress, bool] | None]:
    """Return the checkpoint of a fit, and what its file holds if there is one; a
    finished fit is there once the targets are found to be the same.

    Loaders repeat what they did when the file was begun: torch's global random state is
    set to what it was, and to be restored by the caller.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"checkpoint must be a path, got {type(path).__name__}.")
    if plan.processes is not None:
        raise ValueError(
            "checkpoint= is for a fit by one process, and "
            f"{plan.processes.size} fit together here. Leave it out, save "
            "la.state_dict() after fit_basis(), or pass distributed=False."
        )
    saved = _read(Path(path))
    random = torch.get_rng_state() if saved is None else saved["random"]
    torch.set_rng_state(random)
    fn, device, data = plan.fn, plan.fn.device, plan.data
    _, x, y, _ = next(data.batches(device))
    examples = take(x, slice(0, 4), batch_size(x, plan.data.dict_key_x))
    identity = {
        **plan.described(),
        "number of examples": data.n_examples,
        "dtype": fn.dtype,
        "device": device.type,
        "autocast": autocast_enabled(device),
        **settings,
        "the first batch": [*tensors_of(x), y],
    }
    if start is not None:
        identity["the data before this fit"] = [start.sums.n_data, start.sums.H]
    if hasattr(val_loader, "f_mu"):
        identity["the validation data"] = val_loader.f_mu
    elif val_loader is not None:
        some, y = next(loader_batches(val_loader, device, data.dict_key_y))
        identity["the validation data"] = [*tensors_of(some), y]
    known: dict[str, Any] = {name: digest(v) for name, v in identity.items()}
    known["model"] = model_identity(fn.model, examples)
    checkpoint = Checkpoint(Path(path), known, random)
    if saved is None:
        return checkpoint, None
    how = fn, plan.layout, plan.data.dict_key_x, plan.options
    fit, progress, finished = checkpoint.load(saved, *how)
    if finished:
        done = {"n_done": progress.n_batches, "targets": progress.targets}
        next(data.batches(device, **done), None)
    return checkpoint, (fit, progress, finished)


# The state of a posterior


def state_of_posterior(
    fit: Fit, fn: ModelFunction, described: Mapping[str, Any], settings: Mapping
) -> dict[str, Any]:
    """Return a fit with its settings, known by the class and the model it is of, and a
    checksum over all."""
    state = {
        **described,
        "parameter_names": list(fn.names),
        "model": model_identity(fn.model, to_device(fit.examples, fn.device)),
        "fit": _plain_fit(fit),
        "settings": dict(settings),
    }
    return {**state, "checksum": digest(state)}


def posterior_from_state(
    state: Any, described: Mapping[str, Any], fn: ModelFunction, *how: Any
) -> tuple[Fit, dict[str, Any]]:
    """Return fit and settings; refuse those of another class or model, and damage."""
    if not isinstance(state, Mapping) or "cls_name" not in state:
        got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"Expected the state_dict() of a fitted posterior, got {got}. Save "
            "la.state_dict() and load that."
        )
    content = {name: value for name, value in state.items() if name != "checksum"}
    if state.get("checksum") != digest(content):
        raise ValueError(
            "The state_dict is damaged or was changed: its checksum is not that of its "
            "content. Save la.state_dict() anew."
        )
    for name, ours in described.items():
        if state.get(name) != ours:
            raise ValueError(
                f"The checkpoint has {name}={state.get(name)!r}, this object {ours!r}. "
                "Build it with the same subset_of_weights, hessian_structure, "
                "likelihood, output_layout and multi_label."
            )
    examples = to_device(state["fit"]["examples"], fn.device)
    found = same_model(state["model"], model_identity(fn.model, examples))
    if found:
        raise ValueError(
            f"The checkpoint belongs to another model: {'; '.join(found)}. Load the "
            "model's own weights before the posterior's."
        )
    if state["parameter_names"] != list(fn.names):
        raise ValueError(
            f"The checkpoint has {len(state['parameter_names'])} uncertain "
            f"parameters, this object {len(fn.names)}. Set requires_grad "
            "and parameter_names= as they were when the posterior was fitted."
        )
    return _fit_of(state["fit"], fn, *how), dict(state["settings"])
