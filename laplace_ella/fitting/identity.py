"""Whether a rerun is the same fit: what must be equal, and what differs, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from laplace_ella.fitting.checkpoint import identity
from laplace_ella.fitting.data import IndexedData, TrainingData, training_data
from laplace_ella.fitting.stopping import EarlyStopping
from laplace_ella.posterior.fit import Fit
from laplace_ella.support.fingerprint import differences, digest
from laplace_ella.support.preserve import get_random_states, random_states
from laplace_ella.tuning.cache import FeatureCache

if TYPE_CHECKING:
    from laplace_ella.fitting.fit import Fitter

__all__ = ["Identity", "identity_of_fit"]

#: Examples that stand for all data.
FEW_EXAMPLES = 4

PLAIN = (bool, int, float, str, list, type(None))

#: What the values start with that say nothing to a reader.
DIGEST = "digest "


@dataclass(frozen=True)
class Identity:
    """What a fit is known by.

    Attributes
    ----------
    settings : dict
        plain values by name; digests stand for what is larger
    examples : callable
        digests of the first examples of the data by name, read anew at every call
    """

    settings: dict[str, Any]
    examples: Callable[[], dict[str, str]]

    def plain(self) -> dict[str, Any]:
        """As it is saved."""
        return {**self.settings, **self.examples()}

    def differences(
        self, saved: Mapping[str, Any], ours: Mapping[str, Any], model: nn.Module
    ) -> list[str]:
        """How our values, as `plain` returned them, differ from saved ones, in words.

        Data that are others whenever they are read tell nothing.
        """
        names = [
            name for name in {**ours, **saved} if saved.get(name) != ours.get(name)
        ]
        if not self.settings.keys() >= set(names):
            again = {**ours, **self.examples()}
            names = [name for name in names if again.get(name) == ours.get(name)]
        found = []
        for name in names:
            if name == "fingerprint":
                found.append(f"the model's {differences(saved[name], model)}")
            else:
                found.append(_difference(name, saved.get(name), ours.get(name)))
        return found


def _difference(name: str, saved: Any, ours: Any) -> str:
    if str(saved).startswith(DIGEST) or str(ours).startswith(DIGEST):
        return f"{name} differ"
    if isinstance(saved, list) and isinstance(ours, list) and len(saved) > 4:
        others = sorted(set(saved) ^ set(ours))
        return f"{name} differ by {others[:3]}"
    return f"{name} was {saved!r} and is {ours!r}"


def _digest(*values: Any) -> str:
    return DIGEST + digest(*values)


def identity_of_fit(
    fitter: Fitter,
    described: Mapping[str, Any],
    training: tuple[Any, TrainingData],
    start: Fit | None = None,
    val_loader: Any = None,
    stopping: EarlyStopping | None = None,
    prior_precision: torch.Tensor | None = None,
) -> Identity:
    """Model, data and settings that determine a fit.

    How derivatives are computed is not among them: a fit may go on in smaller chunks
    or with less memory. Neither are hyperparameters, unless validation losses depend on
    them.

    Parameters
    ----------
    fitter : Fitter
    described : mapping
        what else determines the fit, in plain types
    training : tuple
        the user's loader, and the data as a fit sees them
    start : Fit, optional
        the one that data are added to
    val_loader, stopping, prior_precision
        of a fit that is validated
    """
    device, key = fitter.linearizer.device, fitter.linearizer.dict_key_x
    parts = [_identity_of_data(*training, "training", device)]
    settings = {
        **_identity_of_settings(fitter),
        **described,
        **_identity_of_start(start),
    }
    if val_loader is not None:
        settings |= _identity_of_validation(fitter, stopping, prior_precision)
        if isinstance(val_loader, FeatureCache):
            values = val_loader.f_mu, val_loader.targets
            settings["the validation features"] = _digest(*values)
        else:
            with random_states(device, val_loader):
                data = training_data(val_loader, key)
            parts += [_identity_of_data(val_loader, data, "validation", device)]
    for part in parts:
        settings |= part.settings
    return Identity(
        {name: _plain(value) for name, value in settings.items()},
        lambda: {name: d for part in parts for name, d in part.examples().items()},
    )


def _plain(value: Any) -> Any:
    """Without types that a file of tensors and plain types cannot hold."""
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, PLAIN) else str(value)


def _identity_of_settings(fitter: Fitter) -> dict[str, Any]:
    """Model and settings."""
    linearizer, complement = fitter.linearizer, fitter.complement
    # Addresses of objects are others in every process.
    modules = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(linearizer.fn.model))
    device = linearizer.device.type
    autocast = torch.is_autocast_enabled(device)
    basis_dtype = linearizer.options.basis_dtype
    return {
        **identity(linearizer),
        "the modules of the model": _digest(modules),
        "dtype": str(linearizer.dtype),
        "device": device,
        "autocast": str(torch.get_autocast_dtype(device)) if autocast else None,
        **asdict(fitter.plan),
        "curvature": fitter.curvature.value,
        "stochastic": fitter.stochastic,
        "complement": getattr(complement, "value", complement),
        "the number of noises": fitter.observation.sigma_noise.numel(),
        "basis_dtype": None if basis_dtype is None else str(basis_dtype),
    }


def _identity_of_start(start: Fit | None) -> dict[str, Any]:
    """The posterior that data are added to."""
    if start is None:
        return {"n_data before this fit": None}
    sums = start.sums
    values = sums.H, sums.loss, start.basis.eigenvalues
    return {
        "n_data before this fit": sums.n_data,
        "curvature and basis before this fit": _digest(*values),
    }


def _identity_of_validation(
    fitter: Fitter,
    stopping: EarlyStopping | None,
    prior_precision: torch.Tensor | None,
) -> dict[str, Any]:
    """When to stop, and what losses depend on."""
    plan = {} if stopping is None else dict(vars(stopping))
    if (loss := plan.get("loss")) is not None:
        plan["loss"] = getattr(loss, "__qualname__", type(loss).__qualname__)
    observation = fitter.observation
    numbers = {
        "prior_precision": prior_precision,
        "sigma_noise": observation.sigma_noise,
        "temperature": observation.temperature,
        "softmax_temperature": observation.softmax_temperature,
    }
    return {
        "early_stopping": stopping is not None,
        **{f"early_stopping.{n}": getattr(v, "value", v) for n, v in plan.items()},
        **{name: _number(value) for name, value in numbers.items()},
        "top_outputs": observation.top_outputs,
    }


def _number(value: Any) -> float | str:
    """The number, or a digest of several."""
    tensor = torch.as_tensor(value).detach()
    return tensor.item() if tensor.numel() == 1 else _digest(tensor)


def _identity_of_data(
    loader: Any, data: TrainingData, what: str, device: torch.device
) -> Identity:
    """How many data in which order, and their first examples."""
    indexed = isinstance(data, IndexedData)
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    settings = {
        "loader": [type(loader).__name__, *(type(s).__name__ for s in samplers)],
        "batch_size": getattr(loader, "batch_size", None),
        "drop_last": getattr(loader, "drop_last", None),
        # A stream is cut up among its workers.
        "num_workers": None if indexed else getattr(loader, "num_workers", None),
        "number of examples": data.n_examples,
        "indices": _digest(data.indices) if indexed else None,
        "number of generators": len(get_random_states(device, loader)["loaders"]),
    }

    def examples() -> dict[str, str]:
        with random_states(device, loader):
            few = list(data.few(FEW_EXAMPLES, FEW_EXAMPLES))
        return {f"the first examples of the {what} data": _digest(few)}

    named = {f"{name} of the {what} data": value for name, value in settings.items()}
    return Identity(named, examples)
