"""Choosing the prior precision of a fitted posterior, and leaving examples out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from laplace.utils.enums import PredType, PriorStructure, TuningMethod
from torch import nn

from laplace_ella.errors import NumericalWarning, warn_caller
from laplace_ella.fitting.data import loader_batches
from laplace_ella.posterior.likelihood import observed, target_rows
from laplace_ella.posterior.observation import N_SAMPLES, Link
from laplace_ella.predictions import PredictingLaplace
from laplace_ella.support.checks import check_positive, member, positive_int
from laplace_ella.support.memory import human_bytes
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.evidence import maximize_evidence
from laplace_ella.tuning.leave_one_out import (
    TRUSTED_TEMPERATURE,
    LeftOut,
    LinearModel,
    PriorChoice,
    PriorMethod,
    choose_prior,
    predict_left_out,
    scaled_probabilities,
)
from laplace_ella.tuning.validation import (
    Loss,
    Validator,
    check_loss,
    lowest,
    score,
    search_prior,
)

if TYPE_CHECKING:
    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.posterior.fit import Fit
    from laplace_ella.posterior.posterior import SubspacePosterior

logger = logging.getLogger("laplace_ella")

T = TypeVar("T")

#: Layers that the scale of the weights before them does not pass.
NORMALISATIONS = (
    nn.modules.batchnorm._NormBase,  # has no public name; batch and instance norms
    nn.GroupNorm,
    nn.LayerNorm,
)


class PriorTuning(PredictingLaplace):
    """A fitted posterior whose prior is chosen, by training or validation data."""

    # On validation data

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
        link = self._link(link_approx, tuning=True)
        positive_int("n_samples", n_samples)
        check_loss(loss)
        if data is None:
            raise ValueError(
                "method='gridsearch' compares predictions on validation data: pass "
                "val_loader=, or use method='marglik'."
            )
        if not isinstance(data, FeatureCache):
            linearizer = linearizer or self.linearizer
            data = self._cache(posterior, linearizer, data, progress_bar, processes)
        observation, generator = self._observation, self._fresh_generator
        cache = self._served(data, posterior)
        return Validator(cache, loss, observation, link, n_samples, generator)

    def _search(
        self,
        what: str,
        posterior: SubspacePosterior,
        search: Callable[[Validator], T],
        data: Any,
        *judged_by: Any,
    ) -> T:
        """Return what a search by the validation loss of a posterior finds, and keep
        the link. The processes search together; with a cache each works alone.

        `judged_by` are loss, link, number of samples and progress bar.
        """
        alone = data is None or isinstance(data, FeatureCache)
        with nullcontext() if alone else self._working(what) as processes:
            judged = posterior, data, *judged_by
            validator = self._validator(*judged, processes=processes)
            found = search(validator)
            if processes is not None:  # rounding may differ between machines
                found = processes.first("choice", found)
        self.link_approx = validator.link
        return found

    def _search_by_sampling(
        self, what: str, grid: torch.Tensor, loader: Any, loss: Loss, n_samples: int
    ) -> torch.Tensor:
        """Return the best prior for predictions with sampled weights, which no features
        shorten."""
        positive_int("n_samples", n_samples)
        check_loss(loss)
        before, losses = self.prior_precision, []
        with self._working(what) as processes:
            try:
                for self.prior_precision in grid:
                    batches = loader_batches(loader, self._device, self.dict_key_y)
                    rows = [self._sampled_rows(x, y, n_samples) for x, y in batches]
                    if processes is not None:
                        whole = map(torch.cat, zip(*rows, strict=True))
                        rows = [[processes.rows("rows", part) for part in whole]]
                    losses.append(score(rows, loss))
            finally:
                self.prior_precision = before
            best = lowest(list(grid), losses)
            return best if processes is None else processes.first("choice", best)

    def _sampled_rows(
        self, x: Any, y: torch.Tensor, n_samples: int
    ) -> list[torch.Tensor]:
        """Return predictions with sampled weights, and targets, where there are any."""
        found = self(x, "nn", n_samples=n_samples, fitting=True)
        found = found if isinstance(found, tuple) else (found,)
        positions = self._layout.of(tuple(found[0].shape[1:]))
        y = target_rows(y, len(found[0]), positions, self._family).to(self._device)
        rows = [*(positions.rows(part.flatten(1)) for part in found), y]
        known = observed(y, self._family)
        keep = known is not None and positions.shape
        return [part[known] for part in rows] if keep else rows

    # Prior precision

    def optimize_prior_precision(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        pred_type: PredType | str = PredType.GLM,
        method: PriorMethod | TuningMethod | str | None = None,
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
    ) -> PriorChoice | None:
        """Choose the prior precision from the training data, or on validation data.

        For classification the default sets the prior precision *and* the softmax
        temperature by leave-one-out predictions of the training data, and the curvature
        is taken at the mode of the linearised model, see `PriorMethod`. For regression,
        and where memory did not allow the fit to keep the features of the training
        data, the default is the evidence, as in laplace-torch. Of a layerwise or
        diagonal prior a common factor is chosen,
        unless `prior_structure` asks for the evidence of each value. For networks with
        normalisation layers precisions in inverse proportion to the mean square of
        each tensor's weights are tried beside a scalar one. Curvature and softmax
        temperature stay as they were chosen when the prior precision is changed
        afterwards; `method='marglik'` and `fit` return to the curvature at the
        network's parameters, and keep the temperature.

        The parameters are those of every Laplace class. Two things differ for
        `method='gridsearch'`: the features of the validation data are computed once
        for the whole grid, and the default loss of regression is the negative log
        likelihood, because the mean of a linearised predictive, and so its square
        error, does not depend on the prior.

        Returns
        -------
        PriorChoice, optional
            what the training data say, of the methods that leave examples out
        """
        fit, found = self._checked_fit(), None
        pred_type = member(PredType, "pred_type", pred_type)
        structure = member(PriorStructure, "prior_structure", prior_structure)
        check_positive("init_prior_prec", init_prior_prec)
        init = torch.as_tensor(
            init_prior_prec, device=self._device, dtype=fit.mean.dtype
        ).reshape(-1)
        if method is None:
            simple = structure == PriorStructure.SCALAR and len(init) == 1
            simple = simple and not self._family.is_regression
            leaves_out = simple and self._no_leave_one_out(fit) is None
            method = PriorMethod.AUTO if leaves_out else PriorMethod.MARGLIK
        method = member(PriorMethod, "method", method)
        if method is PriorMethod.GRIDSEARCH:
            positive_int("grid_size", grid_size)
            bounds = log_prior_prec_min, log_prior_prec_max, grid_size
            grid = torch.logspace(*bounds, base=log_prior_prec_base)
            what = "optimize_prior_precision()"
            if pred_type == PredType.NN:
                loss = self._observation.default_loss() if loss is None else loss
                judged = val_loader, loss, n_samples
                chosen = self._search_by_sampling(what, grid, *judged)
            else:  # with a scalar prior, whose features hold for the whole grid
                posterior = self._posterior_with(grid[:1].to(self.H))
                judged = val_loader, loss, link_approx, n_samples, progress_bar
                search = partial(search_prior, posterior, grid, progress_bar)
                chosen = self._search(what, posterior, search, *judged)
            self.prior_precision = chosen
        elif val_loader is not None:
            warn_caller(
                f"method={method.value!r} uses the training data alone and ignores "
                "val_loader. Pass method='gridsearch', or use "
                "optimize_calibration(val_loader).",
                UserWarning,
            )
        if method is PriorMethod.MARGLIK:
            if len(init) == 1 and structure != PriorStructure.SCALAR:
                layerwise = structure == PriorStructure.LAYERWISE
                init = init.repeat(self.n_layers if layerwise else self.n_params)
            if len(init) not in (1, self.n_layers, self.n_params):
                raise ValueError(
                    f"init_prior_prec has {len(init)} values, expected 1, "
                    f"{self.n_layers} (layerwise) or {self.n_params} (diagonal)."
                )
            fit = replace(fit, mode_curvature=None)  # it is the evidence at θ̂
            how = fit, init, n_steps, lr
            _, chosen = self._maximize(*how, progress_bar=progress_bar)
            self._adopt(fit)
            self.prior_precision = chosen
        elif method is not PriorMethod.GRIDSEARCH:
            if self._family.is_regression:
                raise ValueError(
                    f"method={method.value!r} is for classification. For regression "
                    "use method='marglik', or optimize_sigma_noise()."
                )
            judged_by = link_approx, n_samples
            with torch.inference_mode(False), torch.no_grad():
                found, scale = self._choose_left_out(method, float(init[0]), *judged_by)
            logger.info("chosen from the training data: %s", found)
            self._adopt(replace(fit, mode_curvature=found.H))
            self.prior_precision = found.prior_precision * scale.to(init)
            self.softmax_temperature = found.softmax_temperature
            self.link_approx = link_approx or self._link_approx
        if verbose:
            tau = self.softmax_temperature
            more = "" if found is None else f", softmax temperature {tau:.3g}"
            print(f"Optimized prior precision is {self.prior_precision}{more}.")
        return found

    @torch.inference_mode(False)  # the evidence is differentiated
    def _maximize(
        self, fit: Fit, prior: torch.Tensor, n_steps: int, lr: float, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noise and prior precision with the highest evidence."""
        positive_int("n_steps", n_steps)
        check_positive("lr", lr)
        how = torch.as_tensor(self._prior_mean), n_steps, lr
        posterior = self._posterior_of(fit, prior.detach())
        return maximize_evidence(fit, self._observation, posterior, *how, **options)

    def _no_leave_one_out(self, fit: Fit) -> str | None:
        """Return why examples cannot be left out, None where they can."""
        if self.curvature.value != "ggn":
            return "takes the GGN as curvature, got the empirical Fisher"
        rows = fit.training
        if rows is None and self.stochastic:
            return "takes features, and stochastic=True computes none"
        if rows is None or (self._family.is_regression and not fit.spans_all):
            return (
                "takes the features of the training data, which a fit keeps where "
                "memory_budget allows: of classification, and of regression with "
                "n_eigenvalues='exact', or 'auto' with at most 4,000 pairs of example "
                "and output, and no truncation"
            )
        N, S, C, K = rows.phi.shape
        needed, budget = 8 * N * S * C * (6 * S * C + 3 * K), fit.linearizer.budget
        if needed > budget:
            return (
                f"takes covariances of {N} examples with {S * C} outputs each, "
                f"{human_bytes(needed)}, and the budget is {human_bytes(budget)}"
            )
        return None if N else "takes data: call fit(train_loader)"

    def _linear_model(
        self,
        what: str,
        prior: torch.Tensor,
        link_approx: Link | str | None,
        n_samples: int,
    ) -> LinearModel:
        """Return the linearised model of the training data, with the link of its
        predictions; of a prior that is not scalar in coordinates in which it is."""
        link = self._link(link_approx, tuning=True)
        positive_int("n_samples", n_samples)
        fit = self._checked_fit()
        why, rows = self._no_leave_one_out(fit), fit.training
        if why is not None or rows is None:
            raise ValueError(
                f"{what} {why}. Fit again, or use validation data: "
                "optimize_calibration(val_loader)."
            )
        posterior = self._posterior_with(prior) if prior.numel() > 1 else None
        observation, generator = self._observation, self._fresh_generator
        how = partial(scaled_probabilities, observation, link, n_samples, generator)
        mean = torch.as_tensor(self._prior_mean)
        return LinearModel.of(fit, rows, mean, observation, how, posterior)

    def _choose_left_out(
        self, method: PriorMethod, start: float, *judged_by: Any
    ) -> tuple[PriorChoice, torch.Tensor]:
        """Return what is chosen by leaving examples out, and the prior precision that
        its factor multiplies; with normalisation layers see `_scales`."""
        name, prior = f"method={method.value!r}", self._prior_precision.detach()
        scales, ours, normalised = [prior], set(map(id, self.params)), False
        tries = method is PriorMethod.AUTO and self._checked_fit().spans_all
        for layer in self.model.modules() if tries else ():
            # One, also without parameters, in the part that has a posterior.
            inside = ours.issuperset(map(id, layer.parameters()))
            normalised |= isinstance(layer, NORMALISATIONS) and inside
        if prior.numel() == 1:
            scales = [torch.ones_like(prior), *(self._scales() if normalised else ())]
        found = []
        for scale in scales:  # one after the other: each has a copy of the features
            model = self._linear_model(name, scale, *judged_by)
            found.append(choose_prior(model, method, start))
        choice, scale = found[0], scales[0]
        if found[-1].rank < choice.rank:
            choice, scale = found[-1], scales[-1]
        if normalised and choice.rule is PriorMethod.LARGER:
            warn_caller(
                "Leave-one-out does not tell how this network with normalisation "
                "layers errs on new data: the best softmax temperature of its outputs "
                f"without each example is {choice.network_temperature:.3g}, trusted up "
                f"to {TRUSTED_TEMPERATURE:g}, and the mean loss of the linearised "
                f"model is {choice.linear_loss:.3g}. Predictions may be worse than the "
                "network's. Use optimize_calibration(val_loader), with validation data "
                "or laplace_ella.augmented_validation(train_loader).",
                NumericalWarning,
            )
        return choice, scale

    def _scales(self) -> list[torch.Tensor]:
        """Return the inverse mean square of each tensor's weights, less the prior mean,
        `(L,)`; nothing where there are none, or no memory for such a prior.

        Outputs hardly depend on the scale of weights in front of a normalisation, which
        weight decay makes small: one prior variance for all weights is far too large
        for these. A variance in proportion to their size is not.
        """
        fit = self._checked_fit()
        delta = (fit.mean - torch.as_tensor(self._prior_mean)).double().square()
        squares = torch.stack([part.mean() for part in delta.split(fit.basis.numels)])
        largest = float(squares.max())
        grams = 16 * len(squares) * fit.basis.rank**2  # bytes, and their stack
        if largest == 0 or len(squares) == 1 or grams > fit.linearizer.budget:
            return []
        return [1 / squares.clamp_min(1e-6 * largest)]

    def leave_one_out(
        self,
        link_approx: Link | str | None = None,
        n_samples: int = N_SAMPLES,
        network: bool = False,
    ) -> LeftOut:
        """Return what each training example is predicted without it.

        It is left out of the linearised model with the current prior, noise and
        temperatures, whose mode is found anew: exactly for regression, by one Newton
        step for classification. Of a fit with few directions the model has these alone;
        for regression an exact fit is needed (`n_eigenvalues="exact"`, or "auto" on up
        to 4,000 pairs of example and output).

        Parameters
        ----------
        link_approx : Link or str, optional
            of the probabilities, as for predictions
        n_samples : int, default=100
        network : bool, default=False
            take the means from the network instead: one Newton step from its own
            parameters, with the regulariser for which these are stationary. Predictions
            have the network's means as well; those of the linear model are far from
            them where the prior precision is large, as after the rule 'calibrated'

        Examples
        --------
        >>> import torch
        >>> from laplace import Laplace
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import laplace_ella
        >>> data = TensorDataset(torch.randn(30, 2), torch.randint(3, (30,)))
        >>> la = Laplace(torch.nn.Linear(2, 3), "classification", "all", "nystrom")
        >>> la.fit(DataLoader(data, batch_size=10))
        >>> choice = la.optimize_prior_precision()
        >>> la.leave_one_out().nll.shape
        torch.Size([30])
        """
        prior, fit = self._prior_precision.detach(), self._checked_fit()
        judged_by = "leave_one_out()", prior, link_approx, n_samples
        precision = float(prior) if prior.numel() == 1 else 1.0
        with torch.inference_mode(False), torch.no_grad():
            model = self._linear_model(*judged_by)
            how = self._layout.of(fit.output_shape), fit.mean.dtype, network
            return predict_left_out(model, precision, *how)
