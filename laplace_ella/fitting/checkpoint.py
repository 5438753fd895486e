"""A fit in a file: as tensors and plain types, with a checksum, written as a whole."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from laplace_ella.derivatives.linearizer import ExampleBytes, Linearizer
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.modes import ComputeOptions, Modes
from laplace_ella.errors import CheckpointWarning, warn_caller
from laplace_ella.fitting.data import TrainingData, loader_batches
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

if TYPE_CHECKING:
    from laplace_ella.fitting.plan import FitPlan

__all__ = [
    "Checkpoint",
    "Progress",
    "check_sum",
    "digest",
    "fit_from_state",
    "plain_inputs",
    "posterior_from_state",
    "read_checkpoint",
    "remaining_batches",
    "state_of_fit",
    "state_of_posterior",
    "with_sum",
]

#: Seconds between two saves; more where a save takes long.
SAVE_EVERY = 60.0

START_OVER = "to start over, delete the file"


def with_sum(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors and plain types with a checksum over all of them."""
    return {**state, "checksum": digest(state)}


def check_sum(state: Mapping[str, Any], what: str, remedy: str) -> None:
    """Refuse what is not as it was written."""
    content = {name: value for name, value in state.items() if name != "checksum"}
    if state.get("checksum") != digest(content):
        raise ValueError(
            f"{what} is damaged or was changed: its checksum is "
            f"{state.get('checksum')}, that of its content {digest(content)}. {remedy}"
        )


@dataclass(frozen=True)
class Progress:
    """How far the curvature of a pass over the data is added up.

    Attributes
    ----------
    sums : CurvatureSum
    n_examples, n_batches : int
        of this pass that are in them
    targets : str
        running digest of their targets
    generator : torch.Tensor, optional
        state of the generator of sampled cotangents
    history : tuple of dict
        'n_data' and validation 'loss' so far
    best : tuple of float and CurvatureSum, optional
        the lowest loss, negative of what is maximised, and what it is the loss of
    waited : int
        evaluations since
    """

    sums: CurvatureSum
    n_examples: int = 0
    n_batches: int = 0
    targets: str = ""
    generator: torch.Tensor | None = None
    history: tuple[dict[str, float], ...] = ()
    best: tuple[float, CurvatureSum] | None = None
    waited: int = 0


def remaining_batches(
    batches: Iterator[tuple[slice, Any, torch.Tensor]], done: Progress
) -> Iterator[tuple[slice, Any, torch.Tensor, str]]:
    """Yield the batches after those that are done, with the running digest of their
    targets; refuse data whose targets are not those that were added up."""
    running, read = "", 0
    for where, x, y in batches:
        running, read = digest(running, y), read + 1
        if read > done.n_batches:
            yield where, x, y, running
        elif read == done.n_batches and running != done.targets:
            break
        elif read == done.n_batches:
            done = replace(done, targets=running)
    if read < done.n_batches or (read == done.n_batches and running != done.targets):
        raise ValueError(
            f"The targets of the first {done.n_batches} batches are not those that the "
            "checkpoint was made with. Pass the same data in the same order (a loader "
            f"that shuffles needs a generator with a seed), or, {START_OVER}."
        )


@dataclass(frozen=True)
class Checkpoint:
    """The file of one fit.

    Attributes
    ----------
    path : Path
    identity : dict
        model, data and settings, see `support.identity`
    random : torch.Tensor
        torch's global random state, from which loaders make their order
    """

    path: Path
    identity: Mapping[str, Any]
    random: torch.Tensor

    def load(self, saved: Mapping[str, Any], *how: Any) -> tuple[Fit, Progress, bool]:
        """Return the fit in a file of this one's identity, how far it got, and whether
        it is finished; `how` derivatives are taken, see `fit_from_state`."""
        before, now = saved["identity"], self.identity
        found = same_model(before["model"], now["model"])
        for name in {**now, **before}:
            old, new = before.get(name), now.get(name)
            if name == "model" or old == new:
                continue
            plain = name.startswith("the ")  # digests say nothing to a reader
            found.append(f"{name} differ" if plain else f"{name} was {old}, is {new}")
        if found:
            more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
            raise ValueError(
                f"{self.path} is the checkpoint of another fit: {'; '.join(found[:3])}"
                f"{more}. Use the model, data and settings that it was made with, or "
                f"another path, or, {START_OVER}."
            )
        fit = fit_from_state(saved["fit"], *how)
        state, device = saved["progress"], fit.sums.H.device
        best = state["best"]
        progress = Progress(
            _sums_from(state["sums"], device),
            best=None if best is None else (best[0], _sums_from(best[1], device)),
            **{name: state[name] for name in _PLAIN},
        )
        return replace(fit, history=progress.history), progress, saved["finished"]

    def save(self, fit: Fit, progress: Progress, finished: bool = False) -> float:
        """Write the file anew, or warn; return when to do so again."""
        begun = time.monotonic()
        best = progress.best
        state = {
            "identity": dict(self.identity),
            "random": self.random,
            "fit": state_of_fit(fit),
            "progress": {
                "sums": _state_of_sums(progress.sums),
                "best": None if best is None else [best[0], _state_of_sums(best[1])],
                **{name: getattr(progress, name) for name in _PLAIN},
            },
            "finished": finished,
        }
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            torch.save(with_sum(state), temporary)
            os.replace(temporary, self.path)
        except (
            OSError,
            RuntimeError,
        ) as error:  # torch says RuntimeError of a full disk
            warn_caller(
                f"The checkpoint {self.path} could not be written: {error}. The fit "
                "goes on without it.",
                CheckpointWarning,
            )
        finally:
            temporary.unlink(missing_ok=True)
        now = time.monotonic()
        return now + max(SAVE_EVERY, 20 * (now - begun))


_PLAIN = ("n_examples", "n_batches", "targets", "generator", "history", "waited")


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return what a checkpoint's file holds, None where there is none yet."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"checkpoint must be a path, got {type(path).__name__}.")
    path = Path(path)
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(
            f"checkpoint must be a file in a folder that exists, got {path}."
        )
    if not path.exists():
        return None
    remedy = f"Use another path, or, {START_OVER}."
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may fail in any way
        raise ValueError(
            f"{path} cannot be read as a checkpoint: {type(error).__name__}. {remedy}"
        ) from error
    if not isinstance(saved, dict) or "identity" not in saved:
        raise ValueError(f"{path} is not the checkpoint of a fit. {remedy}")
    check_sum(saved, f"The checkpoint {path}", remedy)
    return saved


def open_checkpoint(
    path: str | os.PathLike[str],
    plan: FitPlan,
    data: TrainingData,
    settings: Mapping[str, Any],
    start: Fit | None,
    val_loader: Any,
) -> tuple[Checkpoint, tuple[Fit, Progress, bool] | None]:
    """Return the checkpoint of a fit, and what its file holds if there is one; a
    finished fit is there once the targets are found to be the same.

    Loaders repeat what they did when the file was begun: torch's global random state is
    set to what it was, and to be restored by the caller.
    """
    saved = read_checkpoint(path)
    random = torch.get_rng_state() if saved is None else saved["random"]
    torch.set_rng_state(random)
    fn, device = plan.fn, plan.fn.device
    _, x, y = next(data.batches(device))
    examples = take(x, slice(0, 4), batch_size(x, plan.dict_key_x))
    complement = plan.complement
    identity = {
        **{name: str(value) for name, value in settings.items()},
        "model": model_identity(fn.model, examples),
        "uncertain parameters": digest(list(fn.names))[:8],
        "dtype": str(fn.dtype),
        "device": device.type,
        "autocast": str(autocast_enabled(device)),
        "subsample_size": str(plan.subsample_size),
        "n_eigenvalues": str(plan.n_eigenvalues),
        "seed": str(plan.seed),
        "curvature": plan.curvature.value,
        "stochastic": str(plan.stochastic),
        "complement": str(getattr(complement, "value", complement)),
        "the number of noises": str(plan.observation.sigma_noise.numel()),
        "basis_dtype": str(plan.options.basis_dtype),
        "number of examples": str(data.n_examples),
        "the first batch": digest(list(tensors_of(x)), y),
        "n_data before this fit": str(0 if start is None else start.sums.n_data),
        "the curvature before this fit": digest(
            None if start is None else start.sums.H
        ),
    }
    if hasattr(val_loader, "f_mu"):
        identity["the validation features"] = digest(val_loader.f_mu)
    elif val_loader is not None:
        first = next(loader_batches(val_loader, device, data.dict_key_y))
        identity["the validation data"] = digest(list(tensors_of(first[0])), first[1])
    checkpoint = Checkpoint(Path(path), identity, random)
    if saved is None:
        return checkpoint, None
    how = fn, plan.layout, plan.dict_key_x, plan.options
    fit, progress, finished = checkpoint.load(saved, *how)
    if finished:
        for _ in remaining_batches(data.batches(device), progress):
            break
    return checkpoint, (fit, progress, finished)


# A fit in tensors and plain types


def state_of_fit(fit: Fit) -> dict[str, Any]:
    """Return a fit in tensors and plain types; θ̂ is the model's."""
    span, rows, linearizer = fit.span, fit.training, fit.linearizer
    return {
        **_state_of_sums(fit.sums),
        "output_shape": tuple(fit.output_shape),
        "dtype": str(fit.dtype).removeprefix("torch."),
        "fit_complement": fit.complement.value,
        "spans_all": fit.spans_all,
        "curvature_rows": fit.curvature_rows,
        "complete": fit.complete,
        "span": None if span is None else {**_fields(span), **_fields(span.sketch)},
        "training": None if rows is None else _fields(rows),
        "examples": fit.examples,
        "mode_curvature": fit.mode_curvature,
        "history": fit.history,
        "modes": linearizer.modes.to_dict(),
        "autocast": linearizer.autocast,
        "example_bytes": _fields(linearizer.example_bytes),
        "example_shapes": linearizer.example_shapes,
        "directions": fit.basis.directions,
        "eigenvalues": fit.basis.eigenvalues,
        "basis_tail": fit.basis.tail,
        "basis_n_samples": fit.basis.n_samples,
        "basis_trace": fit.basis.trace,
        "basis_method": fit.basis.method,
        "basis_numels": tuple(fit.basis.numels),
    }


def fit_from_state(
    state: Mapping[str, Any],
    fn: ModelFunction,
    layout: OutputLayout,
    dict_key_x: str,
    options: ComputeOptions,
) -> Fit:
    """Return the fit of `state_of_fit`, with θ̂ and derivatives of the model."""
    mean = fn.flat()
    home, here = options.basis_device or mean.device, mean.device
    dtype = getattr(torch, state["dtype"])
    span = state["span"]
    if span is not None:
        signs = span["signs"]
        sketch = Sketch(None if signs is None else signs.to(home), span["size"])
        directions = span["directions"].to(home)
        known = span["sizes"], span["usual"], span["largest"]
        span = Span(directions, sketch, *known)
    rows, at_mode = state["training"], state["mode_curvature"]
    if rows is not None:
        rows = TrainingRows(**{name: t.to(here) for name, t in rows.items()})
    tail = state["basis_tail"]
    basis = NystromBasis(
        state["directions"].to(home),
        state["eigenvalues"].to(here),
        state["basis_n_samples"],
        state["basis_trace"],
        state["basis_method"],
        tuple(state["basis_numels"]),
        None if tail is None else tail.to(here),
    )
    if basis.directions.shape[1] != len(mean):
        raise ValueError(
            f"The saved directions are of {basis.directions.shape[1]} parameters, the "
            f"model has {len(mean)}."
        )
    linearizer = Linearizer(
        ModelFunction(fn.model, fn.names, dtype),
        layout,
        dict_key_x,
        options,
        tuple(state["output_shape"]),
        ExampleBytes(**state["example_bytes"]),
        state["example_shapes"],
        Modes.from_dict(state["modes"]),
        state["autocast"],
    )
    return Fit(
        basis,
        _sums_from(state, here),
        tuple(state["output_shape"]),
        mean,
        dtype,
        Complement(state["fit_complement"]),
        history=tuple(state["history"]),
        spans_all=state["spans_all"],
        curvature_rows=state["curvature_rows"],
        complete=state["complete"],
        span=span,
        linearizer=linearizer,
        training=rows,
        examples=state["examples"],
        mode_curvature=None if at_mode is None else at_mode.to(here),
    )


def state_of_posterior(
    fit: Fit, fn: ModelFunction, described: Mapping[str, Any], settings: Mapping
) -> dict[str, Any]:
    """Return a fit with its settings, known by the class and the model it is of."""
    return with_sum(
        {
            **described,
            "parameter_names": list(fn.names),
            "model": _identity(fn, fit.examples),
            **state_of_fit(fit),
            "settings": dict(settings),
        }
    )


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
    check_sum(state, "The state_dict", "Save la.state_dict() anew.")
    for name, ours in described.items():
        saved = state.get(name)
        if saved != ours:
            what, remedy = f"has {name}", f"{name}={saved!r}"
            if name == "cls_name":
                what, remedy = "is of class", "subset_of_weights and hessian_structure"
            raise ValueError(
                f"The checkpoint {what} {saved!r}, this object {ours!r}. Build it with "
                f"the same {remedy}."
            )
    found = same_model(state["model"], _identity(fn, state["examples"]))
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
    return fit_from_state(state, fn, *how), dict(state["settings"])


def _identity(fn: ModelFunction, examples: Any) -> dict[str, Any]:
    """Return what the model is known by, with its outputs where there are inputs."""
    x = None if examples is None else to_device(examples, fn.device)
    return model_identity(fn.model, x)


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; of those that are one themselves nothing."""
    named = {field.name: getattr(value, field.name) for field in fields(value)}
    return {k: v for k, v in named.items() if not isinstance(v, Sketch)}


def _state_of_sums(sums: CurvatureSum) -> dict[str, Any]:
    return {"H": sums.H, "loss": sums.loss.detach(), "n_data": sums.n_data}


def _sums_from(state: Mapping[str, Any], device: torch.device) -> CurvatureSum:
    H, loss = (state[name].to(device) for name in ("H", "loss"))
    return CurvatureSum(H, loss, state["n_data"])


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
