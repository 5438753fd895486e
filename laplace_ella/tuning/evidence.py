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


def maximize(
    evidence: Evidence,
    prior: torch.Tensor,
    n_steps: int,
    lr: float,
    *,
    tune_prior: bool = True,
    tune_noise: bool = False,
    progress_bar: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sigma_noise and prior precision after laplace-torch's steps of Adam on
    their logarithms; where the noise is tuned, L-BFGS goes on to the maximum."""
    sigma = evidence.observation.sigma_noise
    start = sigma.detach().double().log(), prior.detach().double().log()
    tuned = (tune_noise, tune_prior)
    logs = [v.clone().requires_grad_(t) for v, t in zip(start, tuned, strict=True)]
    variables = [v for v in logs if v.requires_grad]
    best = [torch.full_like(logs[0].detach().sum(), -torch.inf), *start]

    def loss() -> torch.Tensor:
        for variable in variables:
            variable.grad = None
        value = evidence(logs[1].exp(), logs[0].exp())
        if value.requires_grad:
            (-value).backward()
        now = [value.detach(), *(v.detach() for v in logs)]
        better = now[0] > best[0]  # not for NaN; no wait for the device
        best[:] = [torch.where(better, a, b) for a, b in zip(now, best, strict=True)]
        return -value

    bar = trange(
        n_steps, desc="[Optimizing marginal likelihood]", disable=not progress_bar
    )
    with torch.enable_grad():
        adam = torch.optim.Adam(variables, lr=lr)
        for _ in bar:
            adam.step(loss)
        if not tune_noise:  # the last step counts, as in laplace-torch
            best[0] = torch.full_like(best[0], -torch.inf)
        loss()
        if tune_noise and bool(torch.isfinite(best[0])):
            with torch.no_grad():
                for variable, value in zip(logs, best[1:], strict=True):
                    variable.copy_(value)
            torch.optim.LBFGS(
                variables, max_iter=n_steps, line_search_fn="strong_wolfe"
            ).step(loss)
    if has_values(best[0]) and not bool(torch.isfinite(best[0])):
        raise ValueError(
            f"The evidence is NaN or infinite: sigma_noise {sigma.tolist()}, loss of "
            f"the training data {evidence.fit.sums.loss.tolist()}. Nothing was "
            "changed; check the targets and start from other values."
        )
    return best[1].exp(), best[2].exp()
