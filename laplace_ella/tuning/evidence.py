"""The evidence of a fit as a function of prior precision and noise, and its maximum.

log p(D) = log p(D|θ̂) − ½ log det ratio − ½ (θ̂ − μ₀)ᵀD(θ̂ − μ₀), a function of frozen
values: an optimiser that fails leaves the fit as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tqdm.auto import trange

from laplace_ella.posterior.fit import Fit
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.support.batches import has_values


@dataclass(frozen=True)
class Evidence:
    """Log marginal likelihood of a fit under any prior precision and noise.

    Attributes
    ----------
    fit : Fit
    observation : ObservationModel
    posterior : SubspacePosterior
        of the fit; rotated to the eigenbasis of its curvature where there is one noise
        and one prior precision, so that a value costs K operations instead of K³
    square_distance : torch.Tensor
        (θ̂ − μ₀)² summed up in the structure of the prior: `(1,)`, `(L,)` or `(P,)`,
        float64
    """

    fit: Fit
    observation: ObservationModel
    posterior: SubspacePosterior
    square_distance: torch.Tensor

    @classmethod
    def of(
        cls,
        fit: Fit,
        observation: ObservationModel,
        posterior: SubspacePosterior,
        prior_mean: torch.Tensor,
        many: bool = False,
    ) -> Evidence:
        """Return the evidence for priors structured like the posterior's.

        `many` prepares for many evaluations, by one eigendecomposition.
        """
        square = (fit.mean - prior_mean).double().square().expand_as(fit.mean)
        if posterior.prior.numel() == 1:
            square = square.sum().reshape(1)
            if many and fit.sums.H.ndim == 2:
                posterior = posterior.rotated()[0]
        elif posterior.prior.numel() != square.numel():
            pieces = square.split(list(posterior.basis.numels))
            square = torch.stack([piece.sum() for piece in pieces])
        return cls(fit, observation, posterior, square)

    def __call__(self, prior: torch.Tensor, sigma_noise: torch.Tensor) -> torch.Tensor:
        """Return the evidence, differentiable in both, float64."""
        observation = replace(self.observation, sigma_noise=sigma_noise)
        H, factor = observation.weigh(self.fit.sums.H)
        rotated = self.posterior.H.ndim == 1
        posterior = self.posterior.with_(
            H=self.posterior.H if rotated else H, factor=factor, prior=prior
        )
        sums = self.fit.sums
        fitted = observation.log_likelihood(
            sums.loss.double(), sums.n_data, self.fit.n_outputs
        )
        scatter = (self.square_distance * prior.double()).sum()
        return fitted - 0.5 * (posterior.log_det_ratio + scatter)


def climb(
    evidence: Evidence,
    prior: torch.Tensor,
    n_steps: int,
    lr: float,
    progress_bar: bool = False,
) -> torch.Tensor:
    """Return the prior precision after laplace-torch's steps of Adam on its log."""
    log_prior = prior.detach().log()
    sigma = evidence.observation.sigma_noise.detach()
    bar = trange(
        n_steps, desc="[Optimizing marginal likelihood]", disable=not progress_bar
    )
    with torch.enable_grad():
        adam = torch.optim.Adam([log_prior.requires_grad_()], lr=lr)
        for _ in bar:
            adam.zero_grad()
            (-evidence(log_prior.exp(), sigma)).backward()
            adam.step()
    chosen = log_prior.detach().exp()
    with torch.no_grad():
        value = evidence(chosen, sigma)
    if has_values(value) and not torch.isfinite(value):
        raise _undefined(evidence)
    return chosen


def _undefined(evidence: Evidence) -> ValueError:
    return ValueError(
        "The evidence is NaN or infinite: sigma_noise "
        f"{evidence.observation.sigma_noise.tolist()}, loss of the training data "
        f"{evidence.fit.sums.loss.tolist()}. Nothing was changed; check the targets "
        "and start from other values."
    )


def maximize(
    evidence: Evidence,
    prior: torch.Tensor,
    n_steps: int,
    lr: float,
    tune_prior: bool,
    progress_bar: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sigma_noise and prior precision that maximise the evidence.

    Adam on their logarithms, from their current values, finds the neighbourhood of the
    maximum, L-BFGS the maximum; whichever was better counts.
    """
    log_sigma = evidence.observation.sigma_noise.detach().double().log()
    log_prior = prior.detach().double().log()
    log_sigma.requires_grad_()
    log_prior.requires_grad_(tune_prior)
    variables = [log_sigma] + [log_prior] * tune_prior
    best: tuple[float, torch.Tensor, torch.Tensor] | None = None

    def closure() -> torch.Tensor:
        nonlocal best
        for variable in variables:
            variable.grad = None
        loss = -evidence(log_prior.exp(), log_sigma.exp())
        loss.backward()
        value = float(loss.detach())
        if value < (float("inf") if best is None else best[0]):
            best = value, log_sigma.detach().clone(), log_prior.detach().clone()
        return loss

    def best_so_far() -> tuple[torch.Tensor, torch.Tensor]:
        if best is None:
            raise _undefined(evidence)
        return best[1], best[2]

    with torch.enable_grad():
        adam = torch.optim.Adam(variables, lr=lr)
        for _ in trange(n_steps, desc="[Evidence]", disable=not progress_bar):
            adam.step(closure)
        start = best_so_far()
        with torch.no_grad():
            for variable, value in zip((log_sigma, log_prior), start, strict=True):
                variable.copy_(value)
        torch.optim.LBFGS(
            variables, max_iter=n_steps, line_search_fn="strong_wolfe"
        ).step(closure)
    log_sigma, log_prior = best_so_far()
    return log_sigma.exp(), log_prior.exp()
