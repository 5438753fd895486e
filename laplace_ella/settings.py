"""What can be asked of a posterior: its constructor and its settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from laplace.baselaplace import ParametricLaplace
from laplace.utils.enums import Likelihood
from torch import nn

from laplace_ella.derivatives.backends import Curvature, resolve
from laplace_ella.derivatives.model_function import (
    ModelFunction,
    matching_names,
    refuse_sharded,
    unwrap,
)
from laplace_ella.derivatives.modes import ComputeOptions
from laplace_ella.fitting.sampling import check_plan
from laplace_ella.posterior.complement import UNKNOWN_SPAN, Complement, EvidenceScope
from laplace_ella.posterior.observation import Family
from laplace_ella.support.batches import OutputLayout
from laplace_ella.support.checks import (
    check_positive,
    member,
    positive_int,
    unknown_argument,
)

if TYPE_CHECKING:
    from laplace_ella.posterior.fit import Fit

T = TypeVar("T")

PAPER: dict[str, Any] = {
    "subsample_size": 2000,
    "n_eigenvalues": 20,
    "complement": "drop",
    "evidence": "basis",
}
"""ELLA as in Deng et al. 2022, Sec. 5, as keyword arguments: `Laplace(..., "nystrom",
**PAPER)`. `la.fit(train_loader, val_loader=val_loader, early_stopping=True)` stops as
the paper does."""


class Setting(Generic[T]):
    """An attribute that `check` looks at when it is set, and may convert; the posterior
    is made anew afterwards, if it depends on it."""

    def __init__(self, check: Callable[[Any, Any], T], in_posterior: bool = True):
        self.check, self.in_posterior = check, in_posterior

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, la: Any, owner: type) -> T:
        value: Any = self if la is None else getattr(la, self.name)
        return value

    def __set__(self, la: Any, value: Any) -> None:
        setattr(la, self.name, self.check(la, value))
        if self.in_posterior:
            la._posterior_scale = None


def number(name: str, value: Any) -> float:
    """Return one positive number, also of an array or a tensor."""
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        value = value.item() if value.shape in ((), (1,)) else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be one number, got {value!r}.")
    check_positive(name, value)
    return float(value)


def vector(name: str, value: Any, *lengths: int) -> torch.Tensor:
    """Return a number, an array or a tensor as a tensor, of one of the lengths."""
    if not isinstance(value, (int, float, np.generic, np.ndarray, torch.Tensor)):
        raise ValueError(f"{name} must be a number or a tensor, got {value!r}.")
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value, dtype=torch.float64)
    n = value.numel()
    if value.ndim > 1 or n == 0 or (lengths and n not in lengths):
        sizes = f" of length {' or '.join(map(str, lengths))}" if lengths else ""
        raise ValueError(
            f"{name} must be a number or a vector{sizes}, got shape "
            f"{tuple(value.shape)}."
        )
    return value


def checked_complement(value: Any) -> Complement | float | None:
    """Return one of the names, or a positive number; None leaves it to the fit."""
    if value is None or isinstance(value, str):
        name = "complement, if it is no positive number,"
        return None if value is None else member(Complement, name, value)
    return number("complement", value)


def checked_prior_precision(la: Any, value: Any) -> torch.Tensor:
    prior = vector("prior_precision", value, 1, la.n_layers, la.n_params)
    check_positive("prior_precision", prior)
    return prior.reshape(-1).to(la._device, la._dtype)


def checked_prior_mean(la: Any, value: Any) -> torch.Tensor:
    mean = vector("prior_mean", value, 1, la.n_params)
    if not bool(torch.isfinite(mean).all()):
        raise ValueError(f"prior_mean must be finite, got {value}.")
    return mean.to(la._device, la._dtype)


def checked_sigma_noise(la: Any, value: Any) -> torch.Tensor:
    if not la._family.is_regression and number("sigma_noise", value) != 1:
        raise ValueError(
            f"sigma_noise is for regression; this likelihood is {la.likelihood!r}."
        )
    noise = vector("sigma_noise", value)
    check_positive("sigma_noise", noise)
    n = noise.numel()
    refuse_mixed_noises(la, n)
    if n > 1 and la.fitted is not None:
        la.fitted.check_noises(n)
    return (noise if n > 1 else noise.reshape(())).to(la._device, la._dtype)


def refuse_mixed_noises(la: Any, n: int) -> None:
    """Refuse several noises where the outputs are not kept apart."""
    if n > 1 and (la.stochastic or la.curvature is Curvature.EMPIRICAL_FISHER):
        mixing = "stochastic=True" if la.stochastic else "The empirical Fisher"
        raise ValueError(
            f"{mixing} mixes the outputs, so it needs one sigma_noise for all of them, "
            f"got {n} values."
        )


def checked_softmax_temperature(la: Any, value: Any) -> float:
    tau = number("softmax_temperature", value)
    if tau != 1 and la._family.is_regression:
        raise ValueError(
            "softmax_temperature is for classification; this likelihood is "
            f"{la.likelihood!r}, got {tau}. Scale sigma_noise."
        )
    return tau


def checked_top_outputs(la: Any, value: Any) -> int | None:
    if value is None:
        return None
    n = positive_int("top_outputs", value, or_="None for all")
    if la._family is not Family.CATEGORICAL:
        raise ValueError(
            "top_outputs is for one class of several, where those that are out of the "
            f"question do not matter; got {n} for likelihood={la.likelihood!r}"
            f"{' with multi_label=True' * la.multi_label}. Leave it out."
        )
    return n


def checked_compute(la: Any, value: Any) -> ComputeOptions:
    if not isinstance(value, ComputeOptions):
        raise TypeError(
            f"compute must be a ComputeOptions(...), got {type(value).__name__}."
        )
    if la.fitted is not None:
        linearizer = la.fitted.linearizer
        asked = {"features": value.feature_mode, "rows": value.row_mode}
        asked = {k: mode for k, mode in asked.items() if mode.value != "auto"}
        modes = replace(linearizer.modes, **asked)
        linearizer = replace(linearizer, options=value, modes=modes)
        la.fitted = replace(la.fitted, linearizer=linearizer)
    return value


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


def uncertain_names(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Return the names of the parameters that get a posterior: those that were asked
    for, or all that require gradients."""
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


class EllaSettings(ParametricLaplace):
    """The constructor of a posterior, and its settings, which can be changed."""

    #: What was fitted, and the posterior that is kept until a setting changes.
    fitted: Fit | None = None
    _posterior_scale: Any

    # Where settings are kept
    _temperature: float
    _softmax_temperature: float
    _top_outputs: int | None
    _evidence: EvidenceScope
    _compute: ComputeOptions

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
        likelihood = member(Likelihood, "likelihood", likelihood).value
        if multi_label and likelihood != Likelihood.CLASSIFICATION:
            raise ValueError(
                "multi_label=True is for likelihood='classification', got "
                f"{likelihood!r}."
            )
        self.compute = ComputeOptions() if compute is None else compute
        given = backend, backend_kwargs, asdl_fisher_kwargs, self.compute.row_mode
        backend, row_mode, self.curvature, self.stochastic = resolve(*given, stochastic)
        if not isinstance(self.stochastic, bool):
            positive_int("stochastic", self.stochastic, or_="a bool")
        self.compute = replace(self.compute, row_mode=row_mode)
        self._layout = member(OutputLayout, "output_layout", output_layout)
        self.subsample_size, self.seed = subsample_size, seed
        self.n_eigenvalues = "auto" if n_eigenvalues is None else n_eigenvalues
        self._complement = checked_complement(complement)
        check_plan(subsample_size, self.n_eigenvalues, seed, self._complement)
        self.evidence, self.distributed = evidence, distributed
        self.multi_label = multi_label
        self._family = Family.of(likelihood, multi_label)
        names = uncertain_names(model, parameter_names)
        super().__init__(
            model,
            likelihood,
            temperature=temperature,
            enable_backprop=enable_backprop,
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
            # No backend: Laplace refuses BackPACK with frozen layers, which work here.
            backend_kwargs=backend_kwargs,
            asdl_fisher_kwargs=asdl_fisher_kwargs,
        )
        self._backend_cls = backend or self._backend_cls
        self.sigma_noise = sigma_noise
        self.softmax_temperature, self.top_outputs = softmax_temperature, top_outputs
        self._restrict(names, prior_precision, prior_mean)

    def _restrict(self, names: Sequence[str], precision: Any, mean: Any) -> None:
        """Give a posterior to these parameters only, with this prior."""
        model = unwrap(self.model)
        named = dict(model.named_parameters())
        self._fn = ModelFunction(model, names)
        self.params = [named[name] for name in names]
        self.n_params, self.n_layers = self._fn.n_params, len(names)
        self.prior_precision, self.prior_mean = precision, mean
        self.mean = self.prior_mean

    prior_precision: Setting[torch.Tensor] = Setting(checked_prior_precision)  # pyright: ignore
    """Prior precision: scalar `(1,)`, layerwise `(L,)` or diagonal `(P,)`."""

    prior_mean: Setting[torch.Tensor] = Setting(checked_prior_mean, in_posterior=False)  # pyright: ignore
    """Prior mean: one number for all weights, or one per weight `(P,)`."""

    sigma_noise: Setting[torch.Tensor] = Setting(checked_sigma_noise)  # pyright: ignore
    """Standard deviation of the observation noise, for regression: a scalar, or one for
    each of the C outputs."""

    temperature = Setting(lambda la, value: number("temperature", value))
    """Temperature of the likelihood; setting it changes the posterior at once."""

    softmax_temperature = Setting(checked_softmax_temperature, in_posterior=False)
    """τ: predicted probabilities are those of f/τ; the posterior does not change."""

    top_outputs = Setting(checked_top_outputs, in_posterior=False)
    """m: predicted probabilities use the variance of the m largest logits alone; None
    for all. Tune temperature and prior with the m that predictions use."""

    evidence = Setting(lambda la, value: member(EvidenceScope, "evidence", value))
    """Directions included in the marginal likelihood, see `EvidenceScope`."""

    compute = Setting(checked_compute, in_posterior=False)
    """How derivatives are computed; may be replaced after the fit."""

    @property
    def complement(self) -> Complement | float | None:
        """How directions outside the basis are treated, see `Complement`; a number is
        their precision. By default the fit decides, and it is None until then."""
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
    def output_layout(self) -> OutputLayout:
        """Where the outputs of the model have their channels."""
        return self._layout

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of results and hyperparameters: the model's, float32 at least."""
        dtype = next(self.model.parameters()).dtype
        return torch.promote_types(dtype, torch.float32)
