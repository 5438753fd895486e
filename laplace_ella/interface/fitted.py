"""Settings, densities and checkpoints of a posterior that is fitted elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from laplace.utils.enums import (
    Likelihood,
)
from torch import nn

from laplace_ella.derivatives.backends import Curvature, resolve
from laplace_ella.derivatives.features import FeatureMode
from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.derivatives.model_function import (
    ModelFunction,
    matching_names,
    refuse_sharded,
    unwrap,
)
from laplace_ella.derivatives.modes import Modes
from laplace_ella.derivatives.options import ComputeOptions
from laplace_ella.derivatives.rows import RowMode
from laplace_ella.errors import NotFittedError, NumericalWarning, warn_caller
from laplace_ella.fitting.checkpoint import (
    check_identity,
    fit_from_state,
    identity,
    state_of_fit,
)
from laplace_ella.fitting.fit import Fitter
from laplace_ella.fitting.plan import BasisPlan
from laplace_ella.interface.attributes import from_fit, setting
from laplace_ella.interface.joint import short
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.fit import Fit
from laplace_ella.posterior.likelihood import Family
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.outside import Complement, EvidenceOf
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.checks import (
    check_positive,
    member,
    positive_int,
)
from laplace_ella.support.collective import Collective
from laplace_ella.support.fingerprint import digest
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.links import Link
from laplace_ella.support.preserve import undisturbed
from laplace_ella.support.presets import PAPER

__all__ = ["FittedLaplace"]

#: Relative error of an exact posterior's variances that is worth a warning.
LARGEST_ERROR = 0.01


def from_numpy(value: Any) -> Any:
    """Numpy arrays, which Laplace refuses, as a number or a tensor."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        return value
    return value.item() if value.size == 1 else torch.as_tensor(value)


def set_in_base(la: BaseLaplace, name: str, value: Any) -> None:
    """Set a property by the setter of laplace-torch's base class."""
    getattr(BaseLaplace, name).fset(la, value)


def checked_complement(complement: Any) -> Complement | float:
    """One of the names, or a positive number."""
    number = from_numpy(complement)
    if isinstance(number, torch.Tensor) and number.numel() == 1:
        number = number.item()
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        check_positive("complement", number)
        return float(number)
    try:
        return Complement(complement)
    except ValueError:
        raise ValueError(
            f"complement must be one of {[c.value for c in Complement]} or a positive "
            f"number, got {complement!r}."
        ) from None


def plain(complement: Complement | float | None) -> str | float | None:
    """As it is written to a checkpoint."""
    return complement.value if isinstance(complement, Complement) else complement


def warn_about_rounding(fit: Fit, posterior: SubspacePosterior) -> None:
    """Warn where an exact posterior lost more than a hundredth to rounding."""
    if not (fit.spans_all and fit.sums.n_data and posterior.needs_residual):
        return
    error = fit.variance_error(posterior)
    if error > LARGEST_ERROR:
        precision = str(fit.dtype).removeprefix("torch.")
        warn_caller(
            "Variances at inputs like the training data have a relative error of about "
            f"{error:.1g}: derivatives are in {precision}, and the smallest prior "
            f"precision is {float(posterior.prior.min()):.1g}. Use a float64 model "
            "(model.double()), a larger memory_budget if that is what kept derivatives "
            "from float64, or a larger prior precision.",
            NumericalWarning,
        )


class FittedLaplace(ParametricLaplace):
    """A Laplace posterior on a subspace of the weights: its settings, the fit that it
    has, densities and checkpoints.

    What a fit found (`H`, `loss`, `mean`, ...) is read from it; hyperparameters can be
    set at any time.
    """

    # Of objects that were pickled before there was one.
    _softmax_temperature = 1.0
    _top_outputs: int | None = None
    distributed: bool | None = None

    #: Of objects that were pickled when there was no other.
    _evidence = EvidenceOf.BASIS

    H = from_fit(lambda fit: fit.sums.H)
    loss = from_fit(lambda fit: fit.sums.loss.to(fit.mean.dtype))
    n_data = from_fit(lambda fit: fit.sums.n_data)
    n_outputs = from_fit(lambda fit: fit.n_outputs)
    mean = from_fit(lambda fit: fit.mean)

    subsample_size = setting("plan")
    n_eigenvalues = setting("plan")
    seed = setting("plan")
    feature_mode = setting("options")
    row_mode = setting("options")
    chunk_size = setting("options")
    compile = setting("options")
    memory_budget = setting("options")
    basis_dtype = setting("options")
    basis_device = setting("options")
    scratch_dir = setting("options")

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
        balanced: bool = False,
        complement: Complement | str | float | None = None,
        evidence: EvidenceOf | str = EvidenceOf.WHOLE,
        stochastic: bool | int = False,
        output_layout: OutputLayout | str = OutputLayout.FLAT,
        softmax_temperature: float = 1.0,
        top_outputs: int | None = None,
        multi_label: bool = False,
        parameter_names: Sequence[str] | None = None,
        feature_mode: FeatureMode | str = FeatureMode.AUTO,
        row_mode: RowMode | str = RowMode.AUTO,
        chunk_size: int | None = None,
        compile: bool | dict[str, Any] = False,
        memory_budget: int | float | str | None = None,
        basis_dtype: torch.dtype | None = None,
        basis_device: torch.device | str | None = None,
        scratch_dir: str | PathLike[str] | None = None,
        distributed: bool | None = None,
    ) -> None:
        refuse_sharded(model)
        asked = resolve(
            backend,
            backend_kwargs,
            asdl_fisher_kwargs,
            member(RowMode, "row_mode", row_mode),
            stochastic,
            model,
        )
        self.curvature, self.stochastic = asked.curvature, asked.stochastic
        if not isinstance(self.stochastic, bool):
            positive_int("stochastic", self.stochastic, or_="a bool")
        how = ComputeOptions(
            member(FeatureMode, "feature_mode", feature_mode),
            asked.row_mode,
            chunk_size,
            compile,
            memory_budget,
            basis_dtype,
            None if basis_device is None else torch.device(basis_device),
            scratch_dir,
        )
        layout = member(OutputLayout, "output_layout", output_layout)
        if n_eigenvalues is None:
            regression = likelihood == Likelihood.REGRESSION
            n_eigenvalues = "auto" if regression else int(PAPER["n_eigenvalues"])
        self.plan = BasisPlan(subsample_size, n_eigenvalues, seed)
        self.balanced = balanced
        self.distributed = distributed
        self.multi_label = multi_label
        self.parameter_names = parameter_names
        self.fitted: Fit | None = None
        self._stream: torch.Generator | None = None
        self._evidence = member(EvidenceOf, "evidence", evidence)
        self._complement: Complement | float | None = None
        if complement is not None:
            self._complement = checked_complement(complement)
        if n_eigenvalues == "exact" and self._complement is Complement.DROP:
            raise ValueError(
                "n_eigenvalues='exact' keeps the prior outside the basis, got "
                "complement='drop'. Leave complement out, or give a number of "
                "directions."
            )
        names = self._uncertain_names(model, parameter_names)
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
        if asked.backend is not None:
            self._backend_cls = asked.backend
        self._linearizer = Linearizer(
            ModelFunction(unwrap(model), names), layout, dict_key_x, how
        )
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
        """Names of the parameters that get a posterior: those that were asked for, or
        all that require gradients."""
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
        model, linearizer = unwrap(self.model), self._linearizer
        named = dict(model.named_parameters())
        self._linearizer = Linearizer(
            ModelFunction(model, names),
            linearizer.layout,
            linearizer.dict_key_x,
            linearizer.options,
        )
        self.params = [named[name] for name in names]
        self.n_params = sum(p.numel() for p in self.params)
        self.n_layers = len(self.params)
        self.prior_precision, self.prior_mean = prior_precision, prior_mean
        if self.fitted is None:
            self.mean = torch.as_tensor(self.prior_mean)

    # Settings. Those that a posterior depends on forget the one that is kept.

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of results and hyperparameters: the model's, float32 at least."""
        dtype = next(self.model.parameters()).dtype
        return torch.promote_types(dtype, torch.float32)

    @property
    def options(self) -> ComputeOptions:
        """How derivatives are computed. May be replaced, by
        `la.options = dataclasses.replace(la.options, chunk_size=16)` for example."""
        return self._linearizer.options

    @options.setter
    def options(self, options: ComputeOptions) -> None:
        self._linearizer = self._linearizer.with_options(options)

    @property
    def modes(self) -> Modes:
        """Which ways of differentiating were chosen so far, see `Modes`."""
        rank = 0 if self.fitted is None else self.fitted.basis.rank
        return self.linearizer.modes(rank)

    @property
    def linearizer(self) -> Linearizer:
        """The derivatives of the model, in the precision of the fit."""
        if self.fitted is None:
            return self._linearizer
        return self._linearizer.in_dtype(self.fitted.dtype)

    @property
    def output_layout(self) -> OutputLayout:
        """Where the outputs of the model have their channels."""
        return self._linearizer.layout

    @property
    def temperature(self) -> float:
        """Temperature of the likelihood; setting it changes the posterior at once."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        temperature = from_numpy(temperature)
        one = isinstance(temperature, torch.Tensor) and temperature.numel() == 1
        if not one and not isinstance(temperature, (int, float)):
            raise TypeError(f"temperature must be one number, got {temperature!r}.")
        check_positive("temperature", temperature)
        self._temperature = temperature
        self._posterior_scale = None

    @property
    def softmax_temperature(self) -> float:
        """τ: predicted probabilities are those of f/τ; the posterior does not change.

        Distinct from `temperature`, which widens or narrows the posterior.
        """
        return self._softmax_temperature

    @softmax_temperature.setter
    def softmax_temperature(self, tau: float) -> None:
        tau = from_numpy(tau)
        if isinstance(tau, torch.Tensor) and tau.numel() == 1:
            tau = tau.item()
        if isinstance(tau, bool) or not isinstance(tau, (int, float)):
            raise TypeError(f"softmax_temperature must be one number, got {tau!r}.")
        check_positive("softmax_temperature", tau)
        if tau != 1 and self._family.is_regression:
            raise ValueError(
                "softmax_temperature is for classification; this likelihood is "
                f"{Likelihood(self.likelihood).value!r}, got {tau}. Scale sigma_noise."
            )
        self._softmax_temperature = float(tau)

    @property
    def top_outputs(self) -> int | None:
        """m: predicted probabilities know the variance of the m largest logits of each
        input, which are the ones that gradients are computed of; None for all.

        Function values, their covariances and joint samples are of all outputs. Choose
        temperature and prior with the m that is predicted with.
        """
        return self._top_outputs

    @top_outputs.setter
    def top_outputs(self, n: int | None) -> None:
        if n is not None:
            positive_int("top_outputs", n, or_="None for all")
            if self._family is not Family.CATEGORICAL:
                raise ValueError(
                    "top_outputs is for one class of several, where those that are out "
                    f"of the question do not matter; got {n} for "
                    f"likelihood={Likelihood(self.likelihood).value!r}"
                    f"{' with multi_label=True' if self.multi_label else ''}. Leave it "
                    "out."
                )
        self._top_outputs = None if n is None else int(n)

    @property
    def complement(self) -> Complement | float | None:
        """What becomes of the directions outside the basis, see `Complement`; a number
        is their precision.

        If it was not set, the fit decides, and it is None until then: matched for
        regression, at the prior where the basis holds all gradients or the prior has
        several values, dropped otherwise.
        """
        if self.fitted is None:
            return self._complement
        return self._complement_for(self.fitted)

    @complement.setter
    def complement(self, complement: Complement | str | float | None) -> None:
        self._complement = (
            None if complement is None else checked_complement(complement)
        )
        self._posterior_scale = None

    def _complement_for(
        self, fit: Fit, prior: torch.Tensor | None = None
    ) -> Complement | float:
        """The complement of a fit with the current prior precision, or another."""
        n_values = (self.prior_precision if prior is None else prior).numel()
        complement = self._complement
        if complement is Complement.MATCHED and fit.spans_all:
            return Complement.PRIOR  # which is what it comes to
        if complement is not None:
            return complement
        matched = fit.complement is Complement.MATCHED
        if matched and (n_values > 1 or fit.tail is None):
            return Complement.PRIOR
        return fit.complement

    def _posterior_with(self, prior: torch.Tensor) -> SubspacePosterior:
        """The posterior under another prior precision, with the complement that it has
        then."""
        complement = self._complement_for(self._checked_fit(), prior)
        return self.posterior.with_(prior=prior, complement=complement)

    @property
    def evidence(self) -> EvidenceOf:
        """Which directions the evidence is of, see `EvidenceOf`."""
        return self._evidence

    @evidence.setter
    def evidence(self, evidence: EvidenceOf | str) -> None:
        self._evidence = member(EvidenceOf, "evidence", evidence)
        self._posterior_scale = None

    @property
    def prior_precision(self) -> torch.Tensor:
        """Prior precision: scalar `(1,)`, layerwise `(L,)` or diagonal `(P,)`."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(
        self, prior_precision: float | torch.Tensor | np.ndarray
    ) -> None:
        prior_precision = from_numpy(prior_precision)
        check_positive("prior_precision", prior_precision)
        set_in_base(self, "prior_precision", prior_precision)

    @property
    def prior_mean(self) -> float | torch.Tensor:
        """Prior mean: one number for all weights, or one per weight `(P,)`."""
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, prior_mean: float | torch.Tensor | np.ndarray) -> None:
        set_in_base(self, "prior_mean", from_numpy(prior_mean))

    @property
    def sigma_noise(self) -> torch.Tensor:
        """Standard deviation of the observation noise, for regression: a scalar, or
        one for each of the C outputs."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, sigma_noise: float | torch.Tensor | np.ndarray) -> None:
        noise = from_numpy(sigma_noise)
        several = isinstance(noise, torch.Tensor) and noise.numel() != 1
        if several and (noise.ndim != 1 or not noise.numel()):
            raise ValueError(
                "sigma_noise must be a number or one number per output, (C,), got "
                f"shape {tuple(noise.shape)}."
            )
        check_positive("sigma_noise", noise)
        if not several:
            set_in_base(self, "sigma_noise", noise)
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

    @property
    def _family(self) -> Family:
        return Family.of(self.likelihood, self.multi_label)

    @property
    def _observation(self) -> ObservationModel:
        return ObservationModel(
            self._family,
            self.output_layout,
            self.sigma_noise,
            self.temperature,
            self.softmax_temperature,
            self.top_outputs,
        )

    def _check_link(self, link_approx: Link) -> None:
        """Refuse a link that is not for the predictions of this posterior."""
        n_channels = None
        if self.fitted is not None:
            n_channels = self.output_layout.of(self.fitted.output_shape).n_channels
        self._observation.check_link(link_approx, n_channels)

    @property
    def fitter(self) -> Fitter:
        """The model, its derivatives and its targets, as fits and diagnostics see
        them."""
        return Fitter(
            self._linearizer,
            self._observation,
            self.plan,
            self.curvature,
            self.stochastic,
            self.dict_key_y,
            self._fresh_generator,
            self._complement,
            self.collective,
        )

    # Several processes

    @property
    def collective(self) -> Collective:
        """The processes that fit and tune together, see `distributed`; this one alone
        where there is no process group."""
        return Collective.of(self.distributed, self._device)

    def common_settings(self) -> dict[str, str]:
        """What must be the same in all processes, in writing."""
        fit = self.fitted
        settings = {
            **self._described(),
            "model": type(unwrap(self.model)).__name__,
            "uncertain parameters": digest(list(self._linearizer.fn.names)),
            "subsample_size": self.subsample_size,
            "n_eigenvalues": self.n_eigenvalues,
            "seed": self.seed,
            "balanced": self.balanced,
            "curvature": self.curvature.value,
            "stochastic": self.stochastic,
            "complement": plain(self._complement),
            "evidence": self.evidence.value,
            "prior_precision": self._prior_precision,
            "prior_mean": self._prior_mean,
            "sigma_noise": self.sigma_noise,
            "temperature": float(self.temperature),
            "softmax_temperature": self.softmax_temperature,
            "top_outputs": self.top_outputs,
            "basis_dtype": self.basis_dtype,
            "the fit": None if fit is None else digest(fit.sums.H, fit.sums.n_data),
        }
        return {name: short(value) for name, value in settings.items()}

    def _settled(self, chosen: Any) -> Any:
        """What the first process chose, where several choose together: rounding may
        differ between machines."""
        collective = self.collective
        if not collective.joined:
            return chosen
        if isinstance(chosen, torch.Tensor):
            return collective.broadcast("choice", chosen, chosen.device)
        return collective.first("choice", chosen)

    def _undisturbed(self, *loaders: Any, create_graph: bool = False) -> Any:
        return undisturbed(self.model, *loaders, create_graph=create_graph)

    # What was fitted

    def _init_H(self) -> None:
        self.H = torch.zeros(0, 0, device=self._device, dtype=torch.float64)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Where the block fails, every attribute is what it was before."""
        before = self.__dict__.copy()
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _adopt(self, fit: Fit) -> None:
        """Become the posterior of a fit: the only place where one is assigned."""
        self.fitted = fit
        self._posterior_scale = None

    def _checked_fit(self) -> Fit:
        if self.fitted is None:
            raise NotFittedError(
                f"This {type(self).__name__} is not fitted: call fit(train_loader) or "
                "load_state_dict() first."
            )
        return self.fitted

    def _check_H_init(self) -> None:
        self._checked_fit()

    @property
    def basis(self) -> NystromBasis | None:
        """The directions and their spectrum, after `fit`."""
        return None if self.fitted is None else self.fitted.basis

    @property
    def history(self) -> list[dict[str, float]]:
        """'n_data' and validation 'loss' in the course of the last fit."""
        return [] if self.fitted is None else list(self.fitted.history)

    @property
    def rank(self) -> int:
        """K as it came out: n_eigenvalues, or the usable rank if that is lower."""
        return self._checked_fit().basis.rank

    def truncate(self, rank: int) -> None:
        """Keep the first `rank` directions: the posterior that a fit with
        `n_eigenvalues=rank` gives, without fitting."""
        positive_int("rank", rank)
        if rank > self.rank:
            raise ValueError(
                f"rank={rank} exceeds the fitted rank {self.rank}; fit again with "
                f"n_eigenvalues={rank}."
            )
        self._adopt(self._checked_fit().truncate(rank))

    # Laplace's setters clear this attribute, which holds whatever was factorised.
    _posterior_scale: Any

    @property
    def posterior(self) -> SubspacePosterior:
        """The current posterior; kept until a hyperparameter changes."""
        if self._posterior_scale is None:
            fit = self._checked_fit()
            posterior = self._posterior_of(fit)
            self._posterior_scale = posterior.with_(
                H=posterior.H.detach(),
                factor=posterior.factor.detach(),
                prior=posterior.prior.detach(),
            )
            warn_about_rounding(fit, self._posterior_scale)
        return self._posterior_scale

    def _posterior_of(self, fit: Fit) -> SubspacePosterior:
        """A posterior with the graph of the current hyperparameters."""
        return fit.posterior(
            self._observation,
            self.prior_precision,
            self._complement_for(fit),
            self.evidence,
        )

    # Densities

    @property
    def posterior_precision(self) -> torch.Tensor:
        """G = H/(σ²T) + VᵀDV `(K, K)`, the precision of z in θ = θ̂ + Vz, float64."""
        return self._posterior_of(self._checked_fit()).precision

    @property
    def posterior_scale(self) -> torch.Tensor:
        """S `(K, K)` with SSᵀ = G⁻¹, float64."""
        return self.posterior.scale

    @property
    def posterior_covariance(self) -> torch.Tensor:
        """Covariance of z = Vᵀ(θ − θ̂), `(K, K)`, float64."""
        return self.posterior.covariance

    @property
    def log_likelihood(self) -> torch.Tensor:
        """Log likelihood of the training data at θ̂, differentiable in the noise."""
        sums = self._checked_fit().sums
        value = self._observation.log_likelihood(sums.loss, sums.n_data, self.n_outputs)
        return value.to(self._dtype)

    @property
    def log_det_prior_precision(self) -> torch.Tensor:
        """log det VᵀDV; log det D where the complement is kept."""
        posterior = self._posterior_of(self._checked_fit())
        return posterior.log_det_prior.to(self._dtype)

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """log det of the posterior precision, over the directions that the evidence
        is of."""
        posterior = self._posterior_of(self._checked_fit())
        return (posterior.log_det_prior + posterior.log_det_ratio).to(self._dtype)

    @property
    def log_det_ratio(self) -> torch.Tensor:
        """log det of the posterior precision less that of the prior precision."""
        return self._posterior_of(self._checked_fit()).log_det_ratio.to(self._dtype)

    @property
    def scatter(self) -> torch.Tensor:
        """(θ̂ − μ₀)ᵀD(θ̂ − μ₀), over all P parameters."""
        delta = (self.mean - self.prior_mean).double()
        return (delta.square() * self.prior_precision_diag).sum().to(self._dtype)

    def square_norm(self, value: torch.Tensor) -> torch.Tensor:
        """ΔᵀPΔ for Δ = value − θ̂ `(P,)` and the posterior precision P.

        With the complement dropped only the part of Δ within the subspace counts.
        """
        posterior = self._posterior_of(self._checked_fit())
        return posterior.square_norm(value - self.mean).to(self._dtype)

    def log_prob(self, value: torch.Tensor, normalized: bool = True) -> torch.Tensor:
        """Log density at `value`: of z = Vᵀ(value − θ̂), or of all weights where the
        complement is kept."""
        log_prob = -self.square_norm(value) / 2
        if normalized:
            constant = self.posterior.dimension * math.log(2 * math.pi)
            log_det = self.posterior.log_det_precision.to(self._dtype)
            log_prob = log_prob + (log_det - constant) / 2
        return log_prob

    def log_marginal_likelihood(
        self,
        prior_precision: torch.Tensor | None = None,
        sigma_noise: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Evidence log p(D|θ̂) − ½ log det ratio − ½ scatter.

        Differentiable in `prior_precision` and `sigma_noise`; passing one sets it.
        """
        self._checked_fit()
        return super().log_marginal_likelihood(prior_precision, sigma_noise)

    # Random numbers

    def _own_stream(self) -> torch.Generator | None:
        """Generator of samples without one: goes on from call to call."""
        if self._stream is None:
            self._stream = self._fresh_generator()
        return self._stream

    def _fresh_generator(self) -> torch.Generator | None:
        """A generator on the model's device, made from `seed`."""
        if self._device.type == "cuda" and not torch.cuda.is_available():
            return None  # fake tensors: there is no device to draw on
        return torch.Generator(self._device).manual_seed(self.seed)

    def __getstate__(self) -> dict[str, Any]:
        # Generators do not move between devices; the posterior is made anew.
        return {**self.__dict__, "_stream": None, "_posterior_scale": None}

    # Checkpoints

    def _described(self) -> dict[str, Any]:
        """What must be the same where a checkpoint of this posterior is loaded."""
        return {
            "cls_name": type(self).__name__,
            "likelihood": Likelihood(self.likelihood).value,
            "output_layout": self.output_layout.value,
            "multi_label": self.multi_label,
        }

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types: everything but the model, which is fingerprinted."""
        fit = self._checked_fit()
        return {
            **identity(self._linearizer, **self._described()),
            **state_of_fit(fit),
            "prior_mean": self.prior_mean,
            "prior_precision": self.prior_precision.detach(),
            "sigma_noise": self.sigma_noise.detach(),
            "temperature": float(self.temperature),
            "softmax_temperature": self.softmax_temperature,
            "top_outputs": self.top_outputs,
            "complement": plain(self._complement),
            "evidence": self.evidence.value,
            "enable_backprop": self.enable_backprop,
            **{f"mode_{name}": mode for name, mode in self.modes.to_dict().items()},
            "seed": self.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a fitted posterior of the same model, likelihood and class.

        Everything is taken over, or nothing.
        """
        check_identity(state_dict, self._linearizer, **self._described())
        noises = state_dict["sigma_noise"].numel()
        if self.stochastic and noises > 1:
            raise ValueError(
                f"The checkpoint has {noises} values of sigma_noise, this object "
                f"stochastic={self.stochastic}, which needs one. Build it with "
                "stochastic=False."
            )
        mean = self._linearizer.fn.flat()
        fit = fit_from_state(state_dict, mean, self.fitter.home)
        decided = Modes().to_dict()
        modes = Modes.from_dict({name: state_dict[f"mode_{name}"] for name in decided})
        with self._all_or_nothing():
            self._adopt(fit)
            self.plan = replace(self.plan, seed=state_dict["seed"])
            for name in (
                "prior_mean",
                "prior_precision",
                "sigma_noise",
                "temperature",
                "complement",
                "enable_backprop",
            ):
                setattr(self, name, state_dict[name])
            # Older checkpoints have the evidence of their basis.
            self.evidence = state_dict.get("evidence", EvidenceOf.BASIS)
            # Checkpoints from before there was one have none.
            self.softmax_temperature = state_dict.get("softmax_temperature", 1.0)
            self.top_outputs = state_dict.get("top_outputs")
        self.linearizer.adopt(fit.basis.rank, modes)
