"""How `ELLALaplace` chooses prior, temperature, noise and rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchmetrics
from laplace.utils.enums import (
    LinkApprox,
    PredType,
    PriorStructure,
    TuningMethod,
)
from torch.utils.data import DataLoader

from laplace_ella.support.checks import member, positive_int
from laplace_ella.tuning import search as tuning
from laplace_ella.tuning.cache import FeatureCache

__all__ = ["Tuning"]


class Tuning:
    """The part of `ELLALaplace` that chooses hyperparameters."""

    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | torch.Tensor = 1.0,
        prior_structure: PriorStructure | str = PriorStructure.SCALAR,
        val_loader: DataLoader | None = None,
        loss: torchmetrics.Metric | Callable[..., torch.Tensor | float] | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
    ) -> None:
        """Choose the prior precision by the evidence or on validation data.

        The parameters are those of every Laplace class. Two things differ for
        `method='gridsearch'`: the features of the validation data are computed once
        for the whole grid, and the default loss of regression is the negative log
        likelihood, because the mean of a linearised predictive, and so its square
        error, does not depend on the prior.
        """
        self._check_fitted()
        pred_type = member(PredType, "pred_type", pred_type)
        method = member(TuningMethod, "method", method)
        link_approx = member(LinkApprox, "link_approx", link_approx)
        prior_structure = member(PriorStructure, "prior_structure", prior_structure)
        before = self.prior_precision
        try:
            if method == TuningMethod.MARGLIK:
                super().optimize_prior_precision(
                    pred_type=pred_type,
                    method=method,
                    n_steps=n_steps,
                    lr=lr,
                    init_prior_prec=init_prior_prec,
                    prior_structure=prior_structure,
                    val_loader=val_loader,
                    progress_bar=progress_bar,
                )
            else:
                self.prior_precision = self._search_prior(
                    torch.logspace(
                        log_prior_prec_min,
                        log_prior_prec_max,
                        grid_size,
                        base=log_prior_prec_base,
                    ),
                    pred_type,
                    val_loader,
                    loss,
                    link_approx,
                    n_samples,
                    progress_bar,
                )
        except BaseException:
            self.prior_precision = before
            raise
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    def _search_prior(
        self,
        grid: torch.Tensor,
        pred_type: PredType,
        val_loader: Any,
        loss: Any,
        link_approx: LinkApprox,
        n_samples: int,
        progress_bar: bool,
    ) -> torch.Tensor:
        """The best scalar prior precision of a grid, on validation data."""
        if val_loader is None:
            raise ValueError(
                "method='gridsearch' compares predictions on validation data: pass "
                "val_loader=, or use method='marglik'."
            )
        if pred_type == PredType.NN:
            return tuning.search_prior_by_sampling(
                self, grid, val_loader, loss, n_samples, progress_bar
            )
        # With a scalar prior, whose features hold for the whole grid.
        posterior = self.posterior.with_(prior=grid[:1].to(self.H))
        validator = tuning.Validator.for_laplace(
            self, val_loader, loss, link_approx, n_samples, progress_bar, posterior
        )
        return tuning.search_prior(posterior, grid, validator, progress_bar)

    @property
    def effective_n_data(self) -> float:
        """N/T: how many data the tempered likelihood weighs as much as."""
        return self.n_data / float(self.temperature)

    def optimize_temperature(
        self,
        val_loader: DataLoader | FeatureCache,
        loss: torchmetrics.Metric | Callable[..., torch.Tensor | float] | None = None,
        link_approx: LinkApprox | str = LinkApprox.MC,
        n_samples: int = 512,
        tune_prior: bool = False,
        log_prior_prec_min: float = -2,
        log_prior_prec_max: float = 4,
        progress_bar: bool = False,
    ) -> None:
        """Temper the likelihood to an effective number of data N/T.

        The posterior of N data is often too narrow (see `fit` with early stopping);
        scaling its curvature to that of fewer data is smoother than using fewer,
        needs no second pass over the training data, and averages over all of them.

        Parameters
        ----------
        val_loader : DataLoader or FeatureCache
        loss : torchmetrics.Metric or callable, optional
            as for `optimize_prior_precision`; the negative log likelihood by default
        link_approx : LinkApprox or str, default="mc"
            set it to the one you predict with
        n_samples : int, default=512
        tune_prior : bool, default=False
            choose a scalar prior precision, within 10**log_prior_prec_min and
            10**log_prior_prec_max, at the same time
        """
        link_approx = member(LinkApprox, "link_approx", link_approx)
        posterior = self.posterior
        posterior = posterior.with_(factor=posterior.factor * self.temperature)
        if tune_prior:
            posterior = posterior.with_(prior=torch.ones_like(posterior.H[0, :1]))
        validator = tuning.Validator.for_laplace(
            self, val_loader, loss, link_approx, n_samples, progress_bar, posterior
        )
        if tune_prior:
            temperature, prior = tuning.search_temperature_and_prior(
                posterior,
                self.n_data,
                validator,
                (log_prior_prec_min, log_prior_prec_max),
            )
            self.prior_precision = prior
        else:
            temperature = tuning.search_temperature(posterior, self.n_data, validator)
        self.temperature = temperature

    def optimize_sigma_noise(
        self, n_steps: int = 200, lr: float = 0.1, tune_prior: bool = True
    ) -> None:
        """Choose the observation noise by the evidence, with the prior precision.

        Starts from the current values; the structure of the prior is kept, and so is
        that of the noise: one for all outputs, or one for each.
        """
        if not self._family.is_regression:
            raise ValueError(
                f"sigma_noise is for regression; this likelihood is {self.likelihood}."
            )
        self._check_fitted()
        before = self.sigma_noise, self.prior_precision
        try:
            values = tuning.maximize_evidence(self, n_steps, lr, tune_prior)
        except BaseException:
            self.sigma_noise, self.prior_precision = before
            raise
        self.sigma_noise, self.prior_precision = values

    def truncate(self, rank: int) -> None:
        """Keep the first `rank` directions: the posterior that a fit with
        `n_eigenvalues=rank` gives, without fitting."""
        positive_int("rank", rank)
        if rank > self.rank:
            raise ValueError(
                f"rank={rank} exceeds the fitted rank {self.rank}; fit again with "
                f"n_eigenvalues={rank}."
            )
        if rank < self.rank:
            self._linearizer.feature_mode = None  # the fastest one depends on K
        self._set_basis(self.basis.truncate(rank))
        self.H = self.H[..., :rank, :rank]

    def optimize_rank(
        self,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        val_loader: DataLoader | FeatureCache | None = None,
        ranks: Sequence[int] | None = None,
        loss: torchmetrics.Metric | Callable[..., torch.Tensor | float] | None = None,
        link_approx: LinkApprox | str = LinkApprox.MC,
        n_samples: int = 512,
        share: float = 0.95,
        progress_bar: bool = False,
    ) -> list[dict[str, float]]:
        """Choose the number of directions from one fit, and truncate to it.

        The basis is nested, so every k ≤ K is there already, as a leading block.

        Parameters
        ----------
        method : {'marglik', 'gridsearch'}
            'marglik' takes the smallest rank at which the Occam factor of the evidence
            has reached `share` of its value at K (at fixed weights the evidence itself
            falls with every direction, so its maximum would always be rank 1);
            'gridsearch' takes the rank with the lowest validation loss
        val_loader : DataLoader or FeatureCache, optional
            for 'gridsearch'
        ranks : sequence of int, optional
            candidates for 'gridsearch'; all by default

        Returns
        -------
        list of dict
            rank and 'log_marginal_likelihood' or 'loss' of every candidate
        """
        method = member(TuningMethod, "method", method)
        if not 0 < share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {share}.")
        posterior = self.posterior
        if method == TuningMethod.MARGLIK:
            full = self.log_marginal_likelihood().double()
            ratios = posterior.log_det_ratios()
            evidence = (full + 0.5 * (ratios[-1] - ratios)).tolist()
            table = [
                {"rank": k, "log_marginal_likelihood": value}
                for k, value in enumerate(evidence, start=1)
            ]
            self.truncate(tuning.rank_by_evidence(posterior, share))
            return table
        candidates = sorted(ranks) if ranks is not None else range(1, self.rank + 1)
        if not candidates or candidates[0] < 1 or candidates[-1] > self.rank:
            raise ValueError(
                f"ranks must be some of 1..{self.rank}, got {list(candidates)}; fit "
                "with a larger n_eigenvalues for larger ones."
            )
        validator = tuning.Validator.for_laplace(
            self, val_loader, loss, link_approx, n_samples, progress_bar
        )
        best, losses = tuning.rank_by_validation(posterior, list(candidates), validator)
        self.truncate(best)
        return [
            {"rank": k, "loss": value}
            for k, value in zip(candidates, losses, strict=True)
        ]
