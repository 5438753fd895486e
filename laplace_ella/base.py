"""A Laplace posterior on a subspace of the weights: the fit, densities and state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from laplace_ella.derivatives.model_function import refuse_sharded, unwrap
from laplace_ella.derivatives.modes import Modes
from laplace_ella.errors import NotFittedError, NumericalWarning, warn_caller
from laplace_ella.fitting.checkpoint import posterior_from_state, state_of_posterior
from laplace_ella.fitting.distributed import Processes, processes_of
from laplace_ella.posterior.observation import Link, ObservationModel
from laplace_ella.settings import EllaSettings, refuse_mixed_noises
from laplace_ella.support.checks import positive_int
from laplace_ella.support.identity import model_identity, same_model
from laplace_ella.support.preserve import undisturbed

if TYPE_CHECKING:
    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.posterior.basis import NystromBasis
    from laplace_ella.posterior.fit import Fit
    from laplace_ella.posterior.posterior import SubspacePosterior

#: Relative error of an exact posterior's variances that is worth a warning.
LARGEST_ERROR = 0.01


#: Settings that may change after a fit, and are saved with it.
CHANGEABLE = ("prior_mean", "prior_precision", "sigma_noise", "temperature", "evidence")
CHANGEABLE += ("softmax_temperature", "top_outputs", "link_approx", "complement")


class EllaBase(EllaSettings):
    """A Laplace posterior on a subspace of the weights: its fit, densities and state.

    `fitted` is everything that was found; `H`, `loss`, `n_data`, `n_outputs` and `mean`
    repeat what laplace-torch's methods read of it.
    """

    #: The link that was tuned for, and the generator of draws that go on.
    _link_approx: Link | None = None
    _stream: torch.Generator | None = None

    @property
    def _observation(self) -> ObservationModel:
        return ObservationModel(
            self._family,
            self._layout,
            self._sigma_noise,
            self._temperature,
            self._softmax_temperature,
            self._top_outputs,
        )

    # Several processes, and the user's state

    @contextmanager
    def _working(self, what: str, **given: Any) -> Iterator[Processes | None]:
        """Preserve the user's state around work with data. Where there are several
        processes, let them fail together, and compare what they must have in common:
        the model, the settings and what is `given`, the arguments of the call."""
        processes = processes_of(self.distributed, self._device)
        if processes is None:
            with undisturbed(self.model):
                yield None
            return
        with processes.together(what) as within, undisturbed(self.model):
            if not within:
                refuse_sharded(self.model)
                processes.check_same({"the call": what, **self._described(), **given})
                own = model_identity(unwrap(self.model), None)
                models = processes.meet("weights", own)
                _check_same_weights(models)
            yield processes

    # What was fitted

    def _init_H(self) -> None:
        self.H = torch.zeros(0, 0, device=self._device, dtype=torch.float64)

    def _checked_fit(self) -> Fit:
        if self.fitted is None:
            raise NotFittedError(
                f"This {type(self).__name__} is not fitted: call fit(train_loader) or "
                "load_state_dict() first."
            )
        return self.fitted

    def _adopt(self, fit: Fit) -> None:
        """Become the posterior of a fit: the only place where one is assigned."""
        self._posterior_scale = None
        self.fitted = fit
        self.H, self.n_data = fit.H, fit.sums.n_data
        self.loss = fit.sums.loss.to(fit.mean.dtype)
        self.n_outputs, self.mean = fit.n_outputs, fit.mean

    @property
    def modes(self) -> Modes:
        """Which ways of differentiating the fit has chosen, see `Modes`."""
        return Modes() if self.fitted is None else self.fitted.linearizer.modes

    @property
    def linearizer(self) -> Linearizer:
        """The derivatives of the model, in the precision of the fit."""
        return self._checked_fit().linearizer

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

    @property
    def effective_n_data(self) -> float:
        """N/T, the effective number of data of the tempered likelihood."""
        return self.n_data / self._temperature

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

    @property
    def posterior(self) -> SubspacePosterior:
        """The current posterior; kept until a hyperparameter changes."""
        if self._posterior_scale is None:
            fit = self._checked_fit()
            self._posterior_scale = self._posterior_with(self._prior_precision.detach())
            if fit.spans_all and fit.sums.n_data:
                _warn_about_rounding(fit, self._posterior_scale)
        return self._posterior_scale

    def _posterior_with(self, prior: torch.Tensor) -> SubspacePosterior:
        """Return the current posterior with another prior precision."""
        with torch.no_grad():
            return self._posterior_of(self._checked_fit(), prior)

    def _posterior_of(
        self, fit: Fit, prior: torch.Tensor | None = None
    ) -> SubspacePosterior:
        """Return a posterior with the graph of the hyperparameters, or with another
        prior precision and the complement that it has then."""
        prior = self._prior_precision if prior is None else prior
        complement = fit.complement_for(self._complement, prior)
        return fit.posterior(self._observation, prior, complement, self._evidence)

    # Densities

    @property
    def _differentiable(self) -> SubspacePosterior:
        """The current posterior with the graph of prior precision and noise."""
        return self._posterior_of(self._checked_fit())

    @property
    def posterior_precision(self) -> torch.Tensor:
        """Precision of z = Vᵀ(θ − θ̂), `(K, K)`, float64."""
        return self._differentiable.precision

    @property
    def posterior_scale(self) -> torch.Tensor:
        """S `(K, K)` with SSᵀ = the covariance, float64."""
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
        return self._differentiable.log_det_prior.to(self._dtype)

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """log det of the posterior precision, over the directions that the evidence
        is of."""
        posterior = self._differentiable
        return (posterior.log_det_prior + posterior.log_det_ratio).to(self._dtype)

    @property
    def log_det_ratio(self) -> torch.Tensor:
        """log det of the posterior precision less that of the prior precision."""
        return self._differentiable.log_det_ratio.to(self._dtype)

    @property
    def scatter(self) -> torch.Tensor:
        """(θ̂ − μ₀)ᵀD(θ̂ − μ₀), over all P parameters."""
        delta = (self.mean - self._prior_mean).double()
        return (delta.square() * self.prior_precision_diag).sum().to(self._dtype)

    def square_norm(self, value: torch.Tensor) -> torch.Tensor:
        """Return ΔᵀPΔ for Δ = value − θ̂ `(P,)` and the posterior precision P.

        With the complement dropped only the part of Δ within the subspace counts.
        """
        offset = value - self._checked_fit().mean
        return self._differentiable.square_norm(offset).to(self._dtype)

    def log_prob(self, value: torch.Tensor, normalized: bool = True) -> torch.Tensor:
        """Return the log density at `value`: of z = Vᵀ(value − θ̂), or of all weights
        where the complement is kept."""
        log_prob = -self.square_norm(value) / 2
        if normalized:
            constant = self.posterior.dimension * math.log(2 * math.pi)
            log_det = self.posterior.log_det_precision.to(self._dtype)
            log_prob = log_prob + (log_det - constant) / 2
        return log_prob

    # Random numbers

    def _fresh_generator(self) -> torch.Generator | None:
        """Return a generator on the model's device, made from `seed`."""
        if self._device.type == "cuda" and not torch.cuda.is_available():
            return None  # fake tensors: there is no device to draw on
        return torch.Generator(self._device).manual_seed(self.seed)

    def __getstate__(self) -> dict[str, Any]:
        # Generators do not move between devices; the posterior is made anew.
        return {**self.__dict__, "_stream": None, "_posterior_scale": None}

    # State

    def _described(self) -> dict[str, Any]:
        """Return what must be the same where a state is loaded."""
        return {
            "cls_name": type(self).__name__,
            "likelihood": self.likelihood,
            "output_layout": self._layout.value,
            "multi_label": self.multi_label,
        }

    def _hyperparameters(self) -> dict[str, Any]:
        """Return the settings that may change after a fit, in plain types."""
        values = {name: getattr(self, f"_{name}") for name in CHANGEABLE}
        values |= {"enable_backprop": self.enable_backprop, "seed": self.seed}
        return {
            name: v.detach() if isinstance(v, torch.Tensor) else getattr(v, "value", v)
            for name, v in values.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain types: everything but the model, which is known by
        its weights and by what it computes of a few training inputs."""
        fit, how = self._checked_fit(), (self._described(), self._hyperparameters())
        with undisturbed(self.model):
            return state_of_posterior(fit, self._fn, *how)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a fitted posterior of the same model, likelihood and class.

        Everything is taken over, or nothing.
        """
        how = self._fn, self._layout, self.dict_key_x, self._compute
        with undisturbed(self.model):
            fit, settings = posterior_from_state(state_dict, self._described(), *how)
        refuse_mixed_noises(self, settings["sigma_noise"].numel())
        self._adopt(fit)
        for name, value in settings.items():  # checked when they were saved
            setattr(self, name, value)


def _warn_about_rounding(fit: Fit, posterior: SubspacePosterior) -> None:
    """Warn where an exact posterior lost more than a hundredth to rounding."""
    error = fit.variance_error(posterior) if posterior.needs_residual else 0.0
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


def _check_same_weights(models: list[dict[str, Any]]) -> None:
    """Refuse processes whose models are not the same, by their identities."""
    for rank, other in enumerate(models):
        if found := same_model(models[0], other):
            raise ValueError(
                f"The model of rank {rank} is not that of rank 0: {'; '.join(found)}. "
                "Load the same weights in all processes. After training with "
                "DistributedDataParallel the running statistics of batch normalisation "
                "differ: for b in model.buffers(): torch.distributed.broadcast(b, 0)."
            )
