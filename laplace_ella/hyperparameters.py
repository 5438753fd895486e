"""Choosing the other hyperparameters of a fitted posterior."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from laplace.utils.enums import TuningMethod

from laplace_ella.posterior.observation import N_SAMPLES, Link
from laplace_ella.prior import PriorTuning
from laplace_ella.support.checks import member
from laplace_ella.tuning.calibration import Calibration, search_calibration
from laplace_ella.tuning.validation import (
    Loss,
    Validator,
    lowest,
    search_temperature,
)


class TunableLaplace(PriorTuning):
    """A fitted posterior whose hyperparameters are chosen by evidence or validation."""

    def optimize_temperature(
        self,
        val_loader: Any,
        loss: Loss | None = None,
        link_approx: Link | str | None = None,
        n_samples: int = N_SAMPLES,
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
        link_approx : Link or str, optional
            of the predictions that are judged, and from now on the default of others
        n_samples : int, default=100
        """
        posterior = self.posterior
        posterior = posterior.with_(factor=posterior.factor * self.temperature)
        judged = val_loader, loss, link_approx, n_samples, progress_bar
        search = partial(search_temperature, posterior, self.n_data)
        what = "optimize_temperature()"
        self.temperature = self._search(what, posterior, search, *judged)

    def optimize_calibration(
        self,
        val_loader: Any,
        link_approx: Link | str | None = None,
        n_samples: int = N_SAMPLES,
        tune_complement: bool = False,
        progress_bar: bool = False,
    ) -> Calibration:
        """Choose all that calibrates predictions, by the validation NLL.

        Classification: `softmax_temperature`, `temperature` and a scalar
        `prior_precision`; regression: a common factor of `sigma_noise`,
        `temperature` and `prior_precision`. Features are computed once.

        The search starts from temperature scaling, which is the limit of a posterior
        without variance, and does not end above its loss (the links of the Laplace
        bridge have another limit, and may). See `Calibration` for which of many
        settings that do equally well is taken.

        Parameters
        ----------
        val_loader : DataLoader or FeatureCache
            data that the network was not trained on
        link_approx : Link or str, optional
            of the predictions that are judged, and from now on the default of others
        n_samples : int, default=100
            of the link 'mc'
        tune_complement : bool, default=False
            choose the precision outside the basis as well, which `complement` is then
            set to. Always, if `complement` is a number already

        Returns
        -------
        Calibration
            what was chosen, and the validation losses of the alternatives
        """
        posterior = self.posterior
        if posterior.prior.numel() > 1:
            posterior = self._posterior_with(torch.ones_like(posterior.H[0, :1]))
        if tune_complement:
            posterior = posterior.with_(complement=1.0)
        judged = val_loader, None, link_approx, n_samples, progress_bar
        search, what = partial(search_calibration, posterior), "optimize_calibration()"
        calibration = self._search(what, posterior, search, *judged)
        if calibration.kept:
            return calibration
        self.prior_precision = calibration.prior_precision
        self.temperature = calibration.temperature
        if calibration.complement is not None:
            self.complement = calibration.complement
        if self._family.is_regression:
            noise = torch.tensor(calibration.sigma_noise, dtype=self.mean.dtype)
            self.sigma_noise = noise if noise.numel() > 1 else noise.item()
        else:
            self.softmax_temperature = calibration.softmax_temperature
        return calibration

    def optimize_sigma_noise(
        self,
        n_steps: int = 200,
        lr: float = 0.1,
        tune_prior: bool = True,
        progress_bar: bool = False,
    ) -> None:
        """Choose the observation noise by the evidence, with the prior precision.

        Starts from the current values; the structure of the prior is kept, and so is
        that of the noise: one for all outputs, or one for each.
        """
        fit = self._checked_fit()
        if not self._family.is_regression:
            raise ValueError(
                f"sigma_noise is for regression; this likelihood is {self.likelihood}."
            )
        self.sigma_noise, self.prior_precision = self._maximize(
            fit,
            self._prior_precision,
            n_steps,
            lr,
            tune_prior=tune_prior,
            tune_noise=True,
            progress_bar=progress_bar,
        )

    def optimize_rank(
        self,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        val_loader: Any = None,
        ranks: Sequence[int] | None = None,
        loss: Loss | None = None,
        link_approx: Link | str | None = None,
        n_samples: int = N_SAMPLES,
        share: float = 0.95,
        progress_bar: bool = False,
    ) -> list[dict[str, float]]:
        """Choose the number of directions from one fit, and truncate to it.

        The basis is nested, so every k ≤ K is there already, as a leading block.

        Parameters
        ----------
        method : {'marglik', 'gridsearch'}
            'marglik' takes the smallest rank whose directions have `share` of the Occam
            factor: of that of all K directions, or of the whole spectrum's (at fixed
            weights the evidence itself falls with every direction or hardly depends on
            their number, see `evidence`);
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
            full = self.log_marginal_likelihood().detach().double()
            ratios = posterior.log_det_ratios()
            evidence = (full + 0.5 * (ratios[-1] - ratios)).tolist()
            # At fixed θ̂ every direction can only add to the Occam factor: where it
            # levels off, the directions beyond are ones the data say nothing about.
            within = posterior.with_(whole=False).log_det_ratios()
            reached = share * posterior.log_det_ratio
            self.truncate(min(int((within < reached).sum()) + 1, self.rank))
            return [
                {"rank": k, "log_marginal_likelihood": value}
                for k, value in enumerate(evidence, start=1)
            ]
        every = range(1, self.rank + 1)
        candidates = every if ranks is None else sorted(ranks)
        if not candidates or not set(candidates) <= set(every):
            raise ValueError(
                f"ranks must be some of 1..{self.rank}, got {list(candidates)}; fit "
                "with a larger n_eigenvalues for larger ones."
            )
        candidates = [k for k in every if k in candidates]  # 2 for 2.0
        judged = val_loader, loss, link_approx, n_samples, progress_bar

        def search(validator: Validator) -> tuple[int, list[float]]:
            losses = [validator(posterior.truncate(k)) for k in candidates]
            return lowest(candidates, losses), losses

        rank, losses = self._search("optimize_rank()", posterior, search, *judged)
        self.truncate(rank)
        return [
            {"rank": k, "loss": value}
            for k, value in zip(candidates, losses, strict=True)
        ]
