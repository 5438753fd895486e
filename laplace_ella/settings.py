"""What can be asked of a posterior: its constructor and its settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from laplace.utils.enums import Likelihood
from torch import nn

from laplace_ella.derivatives.backends import Curvature, resolve
from laplace_ella.derivatives.model_function import (
    ModelFunction,
    matching_names,
    refuse_sharded,
    unwrap,
)
from laplace_ella.derivatives.modes import ComputeOptions, FeatureMode, RowMode
from laplace_ella.fitting.sampling import check_plan
from laplace_ella.posterior.complement import UNKNOWN_SPAN, Complement, EvidenceScope
from laplace_ella.posterior.observation import Family, Link
from laplace_ella.support.batches import OutputLayout
from laplace_ella.support.checks import (
    check_positive,
    member,
    positive_int,
    unknown_argument,
)

if TYPE_CHECKING:
    from laplace_ella.posterior.fit import Fit

PAPER: dict[str, Any] = {
    "subsample_size": 2000,
    "n_eigenvalues": 20,
    "complement": "drop",
    "evidence": "basis",
}
"""ELLA as in Deng et al. 2022, Sec. 5, as keyword arguments: `Laplace(..., "nystrom",
**PAPER)`. `la.fit(train_loader, val_loader=val_loader, early_stopping=True)` stops as
the paper does."""


def from_numpy(value: Any) -> Any:
    """Return numpy arrays, which Laplace refuses, as a number or a tensor."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.item() if value.size == 1 else torch.as_tensor(value)
    return value


def single(name: str, value: Any) -> Any:
    """Return one positive number, also of an array or a tensor."""
    value = from_numpy(value)
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    if isinstance(value, bool) or not (one or isinstance(value, (int, float))):
        raise TypeError(f"{name} must be one number, got {value!r}.")
    check_positive(name, value)
    return value


def checked_complement(value: Any) -> Complement | float | None:
    """Return one of the names, or a positive number; None leaves it to the fit."""
    number = from_numpy(value)
    if isinstance(number, torch.Tensor) and number.numel() == 1:
        number = number.item()
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        check_positive("complement", number)
        return float(number)
    try:
        return None if value is None else Complement(value)
    except ValueError:
        raise ValueError(
            f"complement must be one of {[c.value for c in Complement]} or a positive "
            f"number, got {value!r}."
        ) from None


def refuse_unknown(cls: type, names: Iterable[str]) -> None:
    """Refuse keyword arguments that a class does not have, naming the nearest."""
    inits = [inspect.signature(c.__init__) for c in cls.__mro__ if c is not object]
    known = {p.name for init in inits for p in init.parameters.values()}
    known = known - {"self", "args", "settings", "kwargs", "unknown"}
    options = [field.name for field in fields(ComputeOptions)]
    for name in (name for name in names if name not in known):
        if name not in options:
            raise unknown_argument(cls.__name__, name, known)
        remedy = f"Pass compute=ComputeOptions({name}=...)."
        raise TypeError(f"{cls.__name__} has no argument {name!r}. {remedy}")


class EllaSettings(ParametricLaplace):
    """The constructor of a posterior, and its settings, which can be changed."""

    #: What was fitted, and the posterior that is kept until a setting changes.
    fitted: Fit | None
    _posterior_scale: Any

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | torch.Tensor = 1.0,
        prior_precision: float | torch.Tensor = 1.0,
        prior_mean: float | torch.Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Any = None,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
        *,
        subsample_size: int = 2000,
        n_eigenvalues: int | str | None = None,
        seed: int = 1234,
        complement: Complement | str | float | None = None,
        evidence: EvidenceScope | str = EvidenceScope.WHOLE,
        stochastic: bool | int = False,
        output_layout: OutputLayout | str = OutputLayout.FLAT,
        softmax_temperature: float = 1.0,
        top_outputs: int | None = None,
        multi_label: bool = False,
        parameter_names: Sequence[str] | None = None,
        compute: ComputeOptions | None = None,
        distributed: bool | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        refuse_sharded(model)
        compute = ComputeOptions() if compute is None else compute
        if not isinstance(compute, ComputeOptions):
            raise TypeError(
                f"compute must be a ComputeOptions(...), got {type(compute).__name__}."
            )
        backend, row_mode, self.curvature, self.stochastic = resolve(
            backend, backend_kwargs, asdl_fisher_kwargs, compute.row_mode, stochastic
        )
        if not isinstance(self.stochastic, bool):
            positive_int("stochastic", self.stochastic, or_="a bool")
        self._compute = replace(compute, row_mode=row_mode)
        self._layout = member(OutputLayout, "output_layout", output_layout)
        self.subsample_size, self.seed = subsample_size, seed
        self.n_eigenvalues = "auto" if n_eigenvalues is None else n_eigenvalues
        self.distributed = distributed
        self.multi_label = multi_label
        self._family = Family.of(likelihood, multi_label)
        self.parameter_names = parameter_names
        self.fitted: Fit | None = None
        self._stream: torch.Generator | None = None
        self._tuned_link: Link | None = None
        self._evidence = member(EvidenceScope, "evidence", evidence)
        self._complement = checked_complement(complement)
        check_plan(subsample_size, self.n_eigenvalues, seed, self._complement)
        names = self._uncertain_names(model, parameter_names)
        self._fn = ModelFunction(unwrap(model), names)
        sigma_noise = from_numpy(sigma_noise)
        several = isinstance(sigma_noise, torch.Tensor) and sigma_noise.numel() != 1
        super().__init__(
            model,
            likelihood,
            1.0 if several else sigma_noise,
            prior_precision if parameter_names is None else 1.0,
            prior_mean if parameter_names is None else 0.0,
            temperature,
            enable_backprop,
            dict_key_x,
            dict_key_y,
            None,  # Laplace refuses BackPACK with frozen layers, which work here
            backend_kwargs,
            asdl_fisher_kwargs,
        )
        if backend is not None:
            self._backend_cls = backend
        if multi_label and self.likelihood != Likelihood.CLASSIFICATION:
            raise ValueError(
                "multi_label=True is for likelihood='classification', got "
                f"{Likelihood(self.likelihood).value!r}."
            )
        self.softmax_temperature = softmax_temperature
        self.top_outputs = top_outputs
        if several:
            self.sigma_noise = sigma_noise
        if parameter_names is not None:
            self._restrict(names, prior_precision, prior_mean)

    @staticmethod
    def _uncertain_names(
        model: nn.Module, patterns: Sequence[str] | None = None
    ) -> list[str]:
        """Return the names of the parameters that get a posterior: those that were
        asked for, or all that require gradients."""
        named = list(unwrap(model).named_parameters())
        if patterns is not None:
            return matching_names([name for name, _ in named], patterns)
        names = [name for name, p in named if p.requires_grad]
        if not names:
            raise ValueError(
                "The model has no trainable parameter: expected at least one with "
                f"requires_grad=True, got {len(named)} parameters without. Call "
                "requires_grad_(True) on the layers that should be uncertain."
            )
        return names

    def _restrict(
        self,
        names: Sequence[str],
        prior_precision: float | torch.Tensor,
        prior_mean: float | torch.Tensor,
    ) -> None:
        """Give a posterior to these parameters only."""
        model = unwrap(self.model)
        named = dict(model.named_parameters())
        self._fn = ModelFunction(model, names)
        self.params = [named[name] for name in names]
        self.n_params = sum(p.numel() for p in self.params)
        self.n_layers = len(self.params)
        self.prior_precision, self.prior_mean = prior_precision, prior_mean
        if self.fitted is None:
            self.mean = torch.as_tensor(self.prior_mean)

    @property
    def compute(self) -> ComputeOptions:
        """How derivatives are computed. May be replaced, by
        `la.compute = dataclasses.replace(la.compute, chunk_size=16)` for example."""
        return self._compute

    @compute.setter
    def compute(self, compute: ComputeOptions) -> None:
        fit = self.fitted
        if fit is not None:
            modes, asked = fit.linearizer.modes, compute.feature_mode
            if asked is not FeatureMode.AUTO:
                modes = replace(modes, features=asked)
            if compute.row_mode is not RowMode.AUTO:
                modes = replace(modes, rows=compute.row_mode)
            linearizer = replace(fit.linearizer, options=compute, modes=modes)
            self.fitted = replace(fit, linearizer=linearizer)
        self._compute = compute

    @property
    def output_layout(self) -> OutputLayout:
        """Where the outputs of the model have their channels."""
        return self._layout

    @property
    def temperature(self) -> float:
        """Temperature of the likelihood; setting it changes the posterior at once."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        self._temperature = single("temperature", temperature)
        self._posterior_scale = None

    @property
    def softmax_temperature(self) -> float:
        """τ: predicted probabilities are those of f/τ; the posterior does not change.

        Distinct from `temperature`, which widens or narrows the posterior.
        """
        return self._softmax_temperature

    @softmax_temperature.setter
    def softmax_temperature(self, tau: float) -> None:
        tau = float(single("softmax_temperature", tau))
        if tau != 1 and self._family.is_regression:
            raise ValueError(
                "softmax_temperature is for classification; this likelihood is "
                f"{Likelihood(self.likelihood).value!r}, got {tau}. Scale sigma_noise."
            )
        self._softmax_temperature = tau

    @property
    def top_outputs(self) -> int | None:
        """m: predicted probabilities use the variance of the m largest logits of each
        input, and gradients of no others are computed; None for all.

        Function values, their covariances and joint samples are of all outputs. Tune
        temperature and prior with the m that predictions use.
        """
        return self._top_outputs

    @top_outputs.setter
    def top_outputs(self, n: int | None) -> None:
        if n is not None:
            n = positive_int("top_outputs", n, or_="None for all")
            if self._family is not Family.CATEGORICAL:
                raise ValueError(
                    "top_outputs is for one class of several, where those that are out "
                    f"of the question do not matter; got {n} for "
                    f"likelihood={Likelihood(self.likelihood).value!r}"
                    f"{' with multi_label=True' if self.multi_label else ''}. Leave it "
                    "out."
                )
        self._top_outputs = n

    @property
    def complement(self) -> Complement | float | None:
        """How directions outside the basis are treated, see `Complement`; a number is
        their precision.

        By default the fit decides, and it is None until then: matched for regression,
        at the prior where the basis spans all gradients or the prior has several
        values, dropped otherwise.
        """
        if self.fitted is None:
            return self._complement
        return self.fitted.complement_for(self._complement, self._prior_precision)

    @complement.setter
    def complement(self, complement: Complement | str | float | None) -> None:
        complement, fit = checked_complement(complement), self.fitted
        if complement is Complement.MATCHED and fit is not None and not fit.spans_all:
            if fit.spectrum is None or fit.span is None:
                raise ValueError(UNKNOWN_SPAN)
        self._complement = complement
        self._posterior_scale = None

    @property
    def evidence(self) -> EvidenceScope:
        """Directions included in the marginal likelihood, see `EvidenceScope`."""
        return self._evidence

    @evidence.setter
    def evidence(self, evidence: EvidenceScope | str) -> None:
        self._evidence = member(EvidenceScope, "evidence", evidence)
        self._posterior_scale = None

    @property
    def prior_precision(self) -> torch.Tensor:
        """Prior precision: scalar `(1,)`, layerwise `(L,)` or diagonal `(P,)`."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | torch.Tensor | np.ndarray) -> None:
        value = from_numpy(value)
        check_positive("prior_precision", value)
        BaseLaplace.prior_precision.fset(self, value)  # type: ignore[attr-defined]

    @property
    def prior_mean(self) -> float | torch.Tensor:
        """Prior mean: one number for all weights, or one per weight `(P,)`."""
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: float | torch.Tensor | np.ndarray) -> None:
        value = from_numpy(value)
        number = isinstance(value, (int, float, torch.Tensor))
        if number and not bool(torch.isfinite(torch.as_tensor(value)).all()):
            raise ValueError(f"prior_mean must be finite, got {value}.")
        BaseLaplace.prior_mean.fset(self, value)  # type: ignore[attr-defined]
        self._posterior_scale = None

    @property
    def sigma_noise(self) -> torch.Tensor:
        """Standard deviation of the observation noise, for regression: a scalar, or
        one for each of the C outputs."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: float | torch.Tensor | np.ndarray) -> None:
        noise = from_numpy(value)
        several = isinstance(noise, torch.Tensor) and noise.numel() != 1
        if several and (noise.ndim != 1 or not noise.numel()):
            raise ValueError(
                "sigma_noise must be a number or one number per output, (C,), got "
                f"shape {tuple(noise.shape)}."
            )
        check_positive("sigma_noise", noise)
        if not several:
            BaseLaplace.sigma_noise.fset(self, noise)  # type: ignore[attr-defined]
            return
        if not self._family.is_regression:
            raise ValueError(
                "sigma_noise is for regression; this likelihood is "
                f"{Likelihood(self.likelihood).value!r}."
            )
        if self.stochastic or self.curvature is Curvature.EMPIRICAL_FISHER:
            mixing = "stochastic=True" if self.stochastic else "The empirical Fisher"
            raise ValueError(
                f"{mixing} mixes the outputs, so it needs one sigma_noise for all of "
                f"them, got {noise.numel()} values."
            )
        if self.fitted is not None:
            self.fitted.check_noises(noise.numel())
        self._sigma_noise = noise.to(self._device, self._dtype)
        self._posterior_scale = None

    # What the rest of the package reads

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of results and hyperparameters: the model's, float32 at least."""
        dtype = next(self.model.parameters()).dtype
        return torch.promote_types(dtype, torch.float32)
