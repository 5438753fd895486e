"""Choosing the hyperparameters of a fitted posterior."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from laplace.utils.enums import PredType, PriorStructure, TuningMethod

from laplace_ella.fitting.data import check_loader, loader_batches
from laplace_ella.posterior.likelihood import observed, target_rows
from laplace_ella.posterior.observation import N_SAMPLES, Link
from laplace_ella.predictions import PredictingLaplace
from laplace_ella.support.checks import check_positive, member, positive_int
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.calibration import Calibration, search_calibration
from laplace_ella.tuning.evidence import Evidence, climb, maximize
from laplace_ella.tuning.search import (
    lowest,
    rank_by_evidence,
    search_prior,
    search_rank,
    search_temperature,
    search_temperature_and_prior,
)
from laplace_ella.tuning.validation import (
    Loss,
    Validator,
    check_loss,
    score,
)

if TYPE_CHECKING:
    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.posterior.posterior import SubspacePosterior

__all__ = ["TunableLaplace"]


class TunableLaplace(PredictingLaplace):
    """A fitted posterior whose hyperparameters are chosen by evidence or validation."""

    def _validator(
        self,
        posterior: SubspacePosterior,
        data: Any,
        loss: Loss | None,
        link_approx: Link | str | None,
        n_samples: int,
        progress_bar: bool,
        linearizer: Linearizer | None = None,
        processes: Processes | None = None,
    ) -> Validator:
        """Return the validation loss over features that are computed now, or were."""
        link = self.link_approx
        if link_approx is not None:
            link = member(Link, "link_approx", link_approx)
        positive_int("n_samples", n_samples)
        check_loss(loss)
        if data is None:
            raise ValueError(
                "method='gridsearch' compares predictions on validation data: pass "
                "val_loader=, or use method='marglik'."
            )
        self._check_link(link)
        if not isinstance(data, FeatureCache):
            linearizer = linearizer or self.linearizer
            data = self._cache(posterior, linearizer, data, progress_bar, processes)
        return Validator(
            self._served(data, posterior),
            loss,
            self._observation,
            link,
            n_samples,
            self._fresh_generator,
        )

    @torch.inference_mode(False)  # the evidence is differentiated
    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | torch.Tensor = 1.0,
        prior_structure: PriorStructure | str = PriorStructure.SCALAR,
        val_loader: Any = None,
        loss: Loss | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: Link | str | None = None,
        n_samples: int = N_SAMPLES,
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
        fit = self._checked_fit()
        pred_type = member(PredType, "pred_type", pred_type)
        method = member(TuningMethod, "method", method)
        structure = member(PriorStructure, "prior_structure", prior_structure)
        tuned_link = None
        if method == TuningMethod.MARGLIK:
            positive_int("n_steps", n_steps)
            check_positive("lr", lr)
            check_positive("init_prior_prec", init_prior_prec)
            init = torch.as_tensor(
                init_prior_prec, device=self._device, dtype=fit.mean.dtype
            ).reshape(-1)
            if len(init) == 1 and structure != PriorStructure.SCALAR:
                layerwise = structure == PriorStructure.LAYERWISE
                init = init.repeat(self.n_layers if layerwise else self.n_params)
            if len(init) not in (1, self.n_layers, self.n_params):
                raise ValueError(
                    f"init_prior_prec has {len(init)} values, expected 1, "
                    f"{self.n_layers} (layerwise) or {self.n_params} (diagonal)."
                )
            posterior = self._posterior_with(init)
            mean = torch.as_tensor(self._prior_mean)
            evidence = Evidence.of(fit, self._observation, posterior, mean, many=True)
            chosen = climb(evidence, init, n_steps, lr, progress_bar)
        else:
            positive_int("grid_size", grid_size)
            bounds = log_prior_prec_min, log_prior_prec_max
            grid = torch.logspace(*bounds, grid_size, base=log_prior_prec_base)
            with self._tuning("optimize_prior_precision()", val_loader) as processes:
                if pred_type == PredType.NN:
                    chosen = self._search_prior_by_sampling(
                        grid, val_loader, loss, n_samples, processes
                    )
                else:
                    # With a scalar prior, whose features hold for the whole grid.
                    posterior = self._posterior_with(grid[:1].to(self.H))
                    validator = self._validator(
                        posterior,
                        val_loader,
                        loss,
                        link_approx,
                        n_samples,
                        progress_bar,
                        processes=processes,
                    )
                    chosen = search_prior(posterior, grid, validator, progress_bar)
                    tuned_link = validator.link
                chosen = self._settled(processes, chosen)
        self.prior_precision = chosen
        if tuned_link is not None:
            self.link_approx = tuned_link
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    def _search_prior_by_sampling(
        self,
        grid: torch.Tensor,
        val_loader: Any,
        loss: Loss | None,
        n_samples: int,
        processes: Processes | None,
    ) -> torch.Tensor:
        """Return the best prior for predictions with sampled weights, which no features
        shorten."""
        positive_int("n_samples", n_samples)
        check_loss(loss)
        if val_loader is None or isinstance(val_loader, FeatureCache):
            raise ValueError(
                "pred_type='nn' runs the network with sampled weights: pass a "
                f"DataLoader as val_loader=, got {type(val_loader).__name__}."
            )
        before, losses = self.prior_precision, []
        loss = self._observation.default_loss() if loss is None else loss
        try:
            for prior in grid:
                self.prior_precision = prior
                predictions = self._sampled_predictions(val_loader, n_samples)
                if processes is not None:
                    whole = [torch.cat(part) for part in zip(*predictions, strict=True)]
                    predictions = [[processes.rows("nn", part) for part in whole]]
                batches = (
                    (tuple(parts) if len(parts) > 1 else parts[0], y)
                    for *parts, y in predictions
                )
                value = score(batches, loss)
                losses.append(math.inf if math.isnan(value) else value)
        finally:
            self.prior_precision = before
        return lowest(list(grid), losses)

    def _sampled_predictions(
        self, val_loader: Any, n_samples: int
    ) -> list[list[torch.Tensor]]:
        """Return predictions as rows, and targets, of every batch."""
        found = []
        check_loader(val_loader)
        for x, y in loader_batches(val_loader, self._device, self.dict_key_y):
            output = self(x, "nn", link_approx="mc", n_samples=n_samples, fitting=True)
            parts = output if isinstance(output, tuple) else (output,)
            positions = self._layout.of(tuple(parts[0].shape[1:]))
            y = target_rows(y, len(parts[0]), positions, self._family).to(self._device)
            rows = [*(positions.rows(part.flatten(1)) for part in parts), y]
            known = observed(y, self._family)
            if known is not None and positions.shape:
                rows = [part[known] for part in rows]
            found.append(rows)
        return found

    @contextmanager
    def _tuning(self, what: str, data: Any) -> Iterator[Processes | None]:
        """Preserve the user's state around a search, which the processes make together
        where they have data; with a cache, or none, each works alone."""
        if data is None or isinstance(data, FeatureCache):
            with torch.no_grad():
                yield None
            return
        with self._working(what) as processes:
            yield processes

    @staticmethod
    def _settled(processes: Processes | None, chosen: Any) -> Any:
        """Return what the first process chose, where several choose together: rounding
        may differ between machines."""
        return chosen if processes is None else processes.first("choice", chosen)

    def optimize_temperature(
        self,
        val_loader: Any,
        loss: Loss | None = None,
        link_approx: Link | str | None = None,
        n_samples: int = N_SAMPLES,
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
        link_approx : Link or str, optional
            of the predictions that are judged, and from now on the default of others
        n_samples : int, default=100
        tune_prior : bool, default=False
            choose a scalar prior precision, within 10**log_prior_prec_min and
            10**log_prior_prec_max, at the same time
        """
        bounds = (log_prior_prec_min, log_prior_prec_max)
        if tune_prior and not bounds[0] < bounds[1]:  # also refuses NaN
            raise ValueError(
                "log_prior_prec_min must be less than log_prior_prec_max, got "
                f"{bounds[0]} and {bounds[1]}."
            )
        posterior = self.posterior
        if tune_prior:
            posterior = self._posterior_with(torch.ones_like(posterior.H[0, :1]))
        posterior = posterior.with_(factor=posterior.factor * self.temperature)
        with self._tuning("optimize_temperature()", val_loader) as processes:
            validator = self._validator(
                posterior,
                val_loader,
                loss,
                link_approx,
                n_samples,
                progress_bar,
                processes=processes,
            )
            if tune_prior:
                found = search_temperature_and_prior(
                    posterior, self.n_data, validator, bounds
                )
            else:
                found = search_temperature(posterior, self.n_data, validator), None
            temperature, prior = self._settled(processes, found)
        self.temperature, self.link_approx = temperature, validator.link
        if prior is not None:
            self.prior_precision = prior

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
        with self._tuning("optimize_calibration()", val_loader) as processes:
            validator = self._validator(
                posterior,
                val_loader,
                None,
                link_approx,
                n_samples,
                progress_bar,
                processes=processes,
            )
            calibration = search_calibration(posterior, validator)
            calibration = self._settled(processes, calibration)
        self.link_approx = validator.link
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

    @torch.inference_mode(False)
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
        positive_int("n_steps", n_steps)
        check_positive("lr", lr)
        mean = torch.as_tensor(self._prior_mean)
        evidence = Evidence.of(fit, self._observation, self.posterior, mean, many=True)
        noise, prior = maximize(
            evidence, self.prior_precision, n_steps, lr, tune_prior, progress_bar
        )
        self.sigma_noise, self.prior_precision = noise, prior

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
            self.truncate(rank_by_evidence(posterior, share))
            return [
                {"rank": k, "log_marginal_likelihood": value}
                for k, value in enumerate(evidence, start=1)
            ]
        candidates = range(1, self.rank + 1) if ranks is None else sorted(ranks)
        whole = all(isinstance(k, (int, np.integer)) for k in candidates)
        within = whole and candidates and 1 <= candidates[0]
        if not within or candidates[-1] > self.rank:
            raise ValueError(
                f"ranks must be some of 1..{self.rank}, got {list(candidates)}; fit "
                "with a larger n_eigenvalues for larger ones."
            )
        with self._tuning("optimize_rank()", val_loader) as processes:
            validator = self._validator(
                posterior,
                val_loader,
                loss,
                link_approx,
                n_samples,
                progress_bar,
                processes=processes,
            )
            found = search_rank(posterior, candidates, validator)
            rank, losses = self._settled(processes, found)
        self.truncate(rank)
        self.link_approx = validator.link
        return [
            {"rank": k, "loss": value}
            for k, value in zip(candidates, losses, strict=True)
        ]
