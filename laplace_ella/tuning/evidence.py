"""Prior precision and noise by the training data: with the highest evidence.

log p(D) = log p(D|θ̂) − ½ log det ratio − ½ (θ̂ − μ₀)ᵀD(θ̂ − μ₀), a function of frozen
values: an optimiser that fails leaves the fit as it was.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from tqdm.auto import trange

from laplace_ella.posterior.fit import Fit
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.support.batches import has_values


def prior_precision_from_weight_decay(weight_decay: float, n_data: int) -> float:
    """Return the Gaussian prior that weight decay γ stood for: 1/σ0² = Nγ.

    Training minimised the mean loss over N data plus γ/2·‖θ‖². Times N that is the
    negative log posterior with prior precision Nγ (Deng et al. 2022, Sec. 5.1).

    Examples
    --------
    >>> prior_precision_from_weight_decay(1e-4, 50_000)
    5.0
    """
    if not weight_decay > 0 or not n_data >= 1:  # also refuses NaN
        raise ValueError(
            "weight_decay must be positive and n_data at least 1, got "
            f"{weight_decay} and {n_data}."
        )
    return weight_decay * n_data


def maximize_evidence(
    fit: Fit,
    observation: ObservationModel,
    posterior: SubspacePosterior,
    prior_mean: torch.Tensor,
    n_steps: int,
    lr: float,
    *,
    tune_prior: bool = True,
    tune_noise: bool = False,
    progress_bar: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sigma_noise and prior precision, in the structure that the posterior has,
    after laplace-torch's steps of Adam on their logarithms from the current values;
    where the noise is tuned, L-BFGS goes on to the maximum."""
    sums, sigma, prior = fit.sums, observation.sigma_noise, posterior.prior
    square = (fit.mean - prior_mean).double().square().expand_as(fit.mean)
    rotated = prior.numel() == 1 and sums.H.ndim == 2
    if rotated:  # a value costs K operations instead of K³
        posterior = posterior.rotated()[0]
    if prior.numel() == 1:
        square = square.sum().reshape(1)
    elif prior.numel() != square.numel():
        pieces = square.split(list(posterior.basis.numels))
        square = torch.stack([piece.sum() for piece in pieces])

    start = sigma.detach().double().log(), prior.detach().double().log()
    tuned = (tune_noise, tune_prior)
    logs = [v.clone().requires_grad_(t) for v, t in zip(start, tuned, strict=True)]
    variables = [v for v in logs if v.requires_grad]
    best = [torch.full_like(logs[0].detach().sum(), -torch.inf), *start]

    def loss() -> torch.Tensor:
        for variable in variables:
            variable.grad = None
        noise, precision = (v.exp() for v in logs)
        given = replace(observation, sigma_noise=noise)
        H, factor = given.weigh(sums.H)
        H = posterior.H if rotated else H
        log_det_ratio = posterior.with_(
            H=H, factor=factor, prior=precision
        ).log_det_ratio
        fitted = given.log_likelihood(sums.loss.double(), sums.n_data, fit.n_outputs)
        value = fitted - 0.5 * (log_det_ratio + (square * precision).sum())
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
            f"the training data {sums.loss.tolist()}. Nothing was changed; check the "
            "targets and start from other values."
        )
    return best[1].exp(), best[2].exp()
