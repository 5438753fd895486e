"""A fit in a file: as tensors and plain types, with a checksum, written as a whole."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
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
from laplace_ella.fitting.sampling import FEW_EXAMPLES, FitPlan, Progress
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.fit import CurvatureSum, Fit, TrainingRows
from laplace_ella.posterior.span import Sketch, Span
from laplace_ella.support.batches import OutputLayout, batch_size, take, tensors_of
from laplace_ella.support.identity import digest, model_identity, same_model

#: Seconds between two saves; more where a save takes long.
SAVE_EVERY = 60.0

OTHER_FILE = "Use another path, or, to start over, delete the file."

PLAIN = (type(None), bool, int, float, str, torch.dtype)

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
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return {**kind, "value": value.value}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.name not in _MODEL]
        return {**kind, **{name: _plain(getattr(value, name)) for name in names}}
    if not isinstance(value, PLAIN):
        raise TypeError(f"A file cannot hold a {kind['class']}.")
    return value


def _plain_fit(fit: Fit) -> dict[str, Any]:
    try:
        _plain(fit.examples)
    except TypeError:  # the model is then known by its state alone
        fit = replace(fit, examples=None)
    return _plain(fit)


def _value(state: Any, model: Mapping[str, Any], device: torch.device) -> Any:
    """Return the inverse of `_plain`, with the fields that are the model's."""
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if isinstance(state, (tuple, list)):
        return tuple(_value(item, model, device) for item in state)
    if not isinstance(state, Mapping):
        return state
    home = model["options"].basis_device or device
    values = {
        name: _value(item, model, home if name in _AT_HOME else device)
        for name, item in state.items()
    }
    kind: Any = _KINDS.get(str(state.get("class")))
    if kind is None:
        return values
    own = [] if issubclass(kind, Enum) else [field.name for field in fields(kind)]
    del values["class"]
    return kind(**values, **{name: model[name] for name in own if name in model})


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


def _identity(
    fn: ModelFunction, examples: Any, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return model and settings as plain values, or the digests of others."""
    known = {n: v if type(v) in PLAIN else digest(v) for n, v in values.items()}
    names = digest(list(fn.names))
    model = model_identity(fn.model, examples)
    return {**known, "the uncertain parameters": names, "model": model}


def _refuse_others(
    what: str, saved: Mapping[str, Any], now: Mapping[str, Any], remedy: str
) -> None:
    """Refuse what was made with another model or other settings, and name them."""
    models = same_model(saved["model"], now["model"])
    found = [f"another model, of which {'; '.join(models)}"] if models else []
    for name in {**now, **saved}:
        theirs, ours = saved.get(name), now.get(name)
        if name != "model" and theirs != ours:
            found.append(f"{name}={theirs!r}, where this is {ours!r}")
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(f"{what} has {'; '.join(found[:3])}{more}. {remedy}")


# The file of a fit


@dataclass
class Checkpoint:
    """The file of one fit.

    `identity` is of model, data and settings; `random` is torch's global random state,
    from which loaders make their order. The file is to be written when it is `due`.
    """

    path: Path
    identity: Mapping[str, Any]
    random: torch.Tensor
    due: float = 0.0

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
    size = path.stat().st_size - hashlib.sha256().digest_size
    with path.open("rb") as file:
        file.seek(max(0, size))
        found = file.read()
    if size <= 0 or _checksum(path, size) != found:
        raise ValueError(
            f"{path} is not a checkpoint, or is damaged: its checksum is not that of "
            f"its content. {OTHER_FILE}"
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def open_checkpoint(
    path: str | os.PathLike[str],
    plan: FitPlan,
    settings: Mapping[str, Any],
    start: Fit | None,
    val_loader: Any,
) -> tuple[Checkpoint, tuple[Fit, Progress, bool] | None]:
    """Return the checkpoint of a fit, and what its file holds if there is one: the fit,
    how far it got, and whether it is finished, which it is once the targets are found
    to be the same.

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
    path = Path(path)
    saved = _read(path)
    random = torch.get_rng_state() if saved is None else saved["random"]
    torch.set_rng_state(random)
    fn, device, data = plan.fn, plan.fn.device, plan.data
    _, x, y, _ = next(data.batches(device))
    validation = getattr(val_loader, "f_mu", None)
    if validation is None and val_loader is not None:
        validation = next(loader_batches(val_loader, device, data.dict_key_y))
    identity = {
        **plan.described(),
        "number of examples": data.n_examples,
        "dtype": fn.dtype,
        "device": device.type,
        **settings,
        "the first batch": [*tensors_of(x), y],
        "the validation data": tensors_of(validation),
        "the data before this fit": start and [start.sums.n_data, start.sums.H],
    }
    some = take(x, slice(0, FEW_EXAMPLES), batch_size(x, data.dict_key_x))
    known = _identity(fn, some, identity)
    checkpoint = Checkpoint(path, known, random)
    if saved is None:
        return checkpoint, None
    _refuse_others(
        f"{path} is of another fit: it", saved["identity"], known, OTHER_FILE
    )
    fit = _fit_of(saved["fit"], fn, plan.layout, data.dict_key_x, plan.options)
    state = saved["progress"]
    progress = _value(state, {"options": plan.options}, fit.sums.H.device)
    progress = replace(progress, generator=state["generator"])  # its state: on the CPU
    if saved["finished"]:
        done = {"n_done": progress.n_batches, "targets": progress.targets}
        next(data.batches(device, **done), None)
    return checkpoint, (fit, progress, saved["finished"])


# The state of a posterior


def state_of_posterior(
    fit: Fit, fn: ModelFunction, described: Mapping[str, Any], settings: Mapping
) -> dict[str, Any]:
    """Return a fit with its settings, known by the class and the model it is of, and a
    checksum over all."""
    state = _plain_fit(fit)
    examples = _value(state["examples"], {"options": ComputeOptions()}, fn.device)
    known = _identity(fn, examples, described)
    state = {**known, "fit": state, "settings": dict(settings)}
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
    fit = _fit_of(content.pop("fit"), fn, *how)
    settings = content.pop("settings")
    _refuse_others(
        "The checkpoint",
        content,
        _identity(fn, fit.examples, described),
        "Load the model's own weights before the posterior's, set requires_grad and "
        "parameter_names= as they were, and build the object with the same "
        "subset_of_weights, hessian_structure, likelihood, output_layout and "
        "multi_label.",
    )
    return fit, dict(settings)
