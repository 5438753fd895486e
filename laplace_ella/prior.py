"""`optimize_prior_precision` and `leave_one_out` of a fitted posterior."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.evidence import Evidence, maximize
from laplace_ella.tuning.leave_one_out import (
    TRUSTED_TEMPERATURE,
    LeftOut,
    LinkLoss,
    PriorChoice,
    PriorMethod,
    choose_prior,
    predict_left_out,
)
from laplace_ella.tuning.linear_model import LinearModel
from laplace_ella.tuning.search import lowest, search_prior
from laplace_ella.tuning.validation import Loss, Validator, check_loss, score

if TYPE_CHECKING:
    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.posterior.fit import Fit
    from laplace_ella.posterior.posterior import SubspacePosterior

__all__ = ["PriorTuning"]

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
        return Validator(
            self._served(data, posterior),
            loss,
            self._observation,
            link,
            n_samples,
            self._fresh_generator,
        )

    def _search(
        self,
        what: str,
        posterior: SubspacePosterior,
        judged: tuple[Any, Loss | None, Link | str | None, int, bool],
        search: Callable[[Validator], T],
    ) -> tuple[T, Link]:
        """Return what a search by the validation loss of a posterior found, and the
        link of the predictions that it judged.

        `judged` are data, loss, link, number of samples and progress bar.
        """
        with self._tuning(what, judged[0]) as processes:
            validator = self._validator(posterior, *judged, processes=processes)
            return self._settled(processes, search(validator)), validator.link

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
        is taken at the mode of the linearised model, see `PriorMethod`. This needs an
        exact fit (`n_eigenvalues="exact"`, or "auto" on up to 4,000 pairs of example
        and output). For regression, and other fits, the default is the evidence, as in
        laplace-torch. Of a layerwise or diagonal prior a common factor is chosen,
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
        fit = self._checked_fit()
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
        method, found, tuned_link = member(PriorMethod, "method", method), None, None
        if method is not PriorMethod.GRIDSEARCH and val_loader is not None:
            warn_caller(
                f"method={method.value!r} uses the training data alone and ignores "
                "val_loader. Pass method='gridsearch', or use "
                "optimize_calibration(val_loader).",
                UserWarning,
            )
        if method is PriorMethod.MARGLIK:
            positive_int("n_steps", n_steps)
            check_positive("lr", lr)
            fit = replace(fit, mode_curvature=None)  # it is the evidence at θ̂
            chosen = self._climb(fit, init, structure, n_steps, lr, progress_bar)
        elif method is PriorMethod.GRIDSEARCH:
            bounds = log_prior_prec_min, log_prior_prec_max, log_prior_prec_base
            judged = val_loader, loss, link_approx, n_samples, progress_bar
            chosen, tuned_link = self._search_prior(
                bounds, grid_size, pred_type, judged
            )
        else:
            if self._family.is_regression:
                raise ValueError(
                    f"method={method.value!r} is for classification. For regression "
                    "use method='marglik', or optimize_sigma_noise()."
                )
            with torch.inference_mode(False), torch.no_grad():
                judged_by = link_approx, n_samples
                found, scale = self._left_out_choice(method, judged_by, float(init[0]))
            if link_approx is not None:
                tuned_link = self._link(link_approx, tuning=True)
            logger.info("chosen from the training data: %s", found)
            chosen = found.prior_precision * scale.to(init)
            fit = replace(fit, mode_curvature=found.H)
        self._adopt(fit)
        self.prior_precision = chosen
        if found is not None:
            self.softmax_temperature = found.softmax_temperature
        if tuned_link is not None:
            self.link_approx = tuned_link
        if verbose:
            tau = self.softmax_temperature
            more = "" if found is None else f", softmax temperature {tau:.3g}"
            print(f"Optimized prior precision is {self.prior_precision}{more}.")
        return found

    @torch.inference_mode(False)  # the evidence is differentiated
    def _climb(
        self,
        fit: Fit,
        init: torch.Tensor,
        structure: PriorStructure,
        n_steps: int,
        lr: float,
        progress_bar: bool,
    ) -> torch.Tensor:
        """Return the prior precision by the evidence at the network's parameters."""
        if len(init) == 1 and structure != PriorStructure.SCALAR:
            layerwise = structure == PriorStructure.LAYERWISE
            init = init.repeat(self.n_layers if layerwise else self.n_params)
        if len(init) not in (1, self.n_layers, self.n_params):
            raise ValueError(
                f"init_prior_prec has {len(init)} values, expected 1, "
                f"{self.n_layers} (layerwise) or {self.n_params} (diagonal)."
            )
        posterior = self._posterior_of(fit, init)
        mean = torch.as_tensor(self._prior_mean)
        evidence = Evidence.of(fit, self._observation, posterior, mean, many=True)
        return maximize(evidence, init, n_steps, lr, progress_bar=progress_bar)[1]

    def _search_prior(
        self,
        range_: tuple[float, float, float],
        grid_size: int,
        pred_type: PredType,
        judged: tuple[Any, Loss | None, Link | str | None, int, bool],
    ) -> tuple[torch.Tensor, Link | None]:
        """Return the prior precision with the lowest validation loss, and the link of
        the predictions that were judged."""
        positive_int("grid_size", grid_size)
        low, high, base = range_
        grid = torch.logspace(low, high, grid_size, base=base)
        what, (data, loss, _, n_samples, bar) = "optimize_prior_precision()", judged
        if pred_type == PredType.NN:
            with self._tuning(what, data) as processes:
                chosen = self._search_prior_by_sampling(
                    grid, data, loss, n_samples, processes
                )
                return self._settled(processes, chosen), None
        # With a scalar prior, whose features hold for the whole grid.
        posterior = self._posterior_with(grid[:1].to(self.H))
        return self._search(
            what, posterior, judged, lambda v: search_prior(posterior, grid, v, bar)
        )

    # Leaving out training examples

    def _no_leave_one_out(self, fit: Fit) -> str | None:
        """Return why examples cannot be left out, None where they can."""
        if self.curvature.value != "ggn":
            return "takes the GGN as curvature, got the empirical Fisher"
        if fit.training is None or not fit.spans_all:
            return (
                "takes an exact fit with the features of its training data: "
                "n_eigenvalues='exact', or 'auto' with at most 4,000 pairs of example "
                "and output, a memory_budget that holds them, and no truncation"
            )
        return None if len(fit.training.f) else "takes data: call fit(train_loader)"

    def _left_out_choice(
        self,
        method: PriorMethod,
        judged_by: tuple[Link | str | None, int],
        start: float,
    ) -> tuple[PriorChoice, torch.Tensor]:
        """Return what is chosen by leaving examples out, and the prior precision that
        its factor multiplies; with normalisation layers see `_scales`."""
        name, prior = f"method={method.value!r}", self._prior_precision.detach()
        found = choose_prior(self._link_loss(name, *judged_by), method, start)
        scale = prior if prior.numel() > 1 else torch.ones_like(prior)
        if method is not PriorMethod.AUTO or not self._normalises:
            return found, scale
        if prior.numel() == 1 and (scales := self._scales()) is not None:
            loss = self._link_loss(name, *judged_by, scales)
            other = choose_prior(loss, method, start)
            if other.surpasses(found):
                found, scale = other, scales
        if found.rule is PriorMethod.LARGER:
            warn_caller(
                "Leave-one-out does not tell how this network with normalisation "
                "layers errs on new data: the best softmax temperature of its outputs "
                f"without each example is {found.network_temperature:.3g}, trusted up "
                f"to {TRUSTED_TEMPERATURE:g}, and the mean loss of the linearised "
                f"model is {found.linear_loss:.3g}. Predictions may be worse than the "
                "network's. Use optimize_calibration(val_loader), with validation data "
                "or laplace_ella.augmented_validation(train_loader).",
                NumericalWarning,
            )
        return found, scale

    @property
    def _normalises(self) -> bool:
        """Whether a normalisation layer, or one without parameters, is in the part of
        the network that has a posterior."""
        ours = {id(p) for p in self.params}
        layers = (m for m in self.model.modules() if isinstance(m, NORMALISATIONS))
        return any({id(p) for p in layer.parameters()} <= ours for layer in layers)

    def _scales(self) -> torch.Tensor | None:
        """Return the inverse mean square of each tensor's weights, less the prior mean,
        `(L,)`; None where there are none, or no memory for such a prior.

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
            return None
        return 1 / squares.clamp_min(1e-6 * largest)

    def _link_loss(
        self,
        what: str,
        link_approx: Link | str | None,
        n_samples: int,
        prior: torch.Tensor | None = None,
    ) -> LinkLoss:
        """Return the linearised model with the training data, and the loss of its
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
        delta = (fit.mean - torch.as_tensor(self._prior_mean)).double()
        square, precision = delta.square(), None
        prior = self._prior_precision.detach() if prior is None else prior
        if prior.numel() > 1:
            posterior = self._posterior_with(prior)
            precision = posterior.prior_on_subspace
            square = square * posterior.prior_diagonal().double()
        model = LinearModel.of(
            rows,
            fit.basis.directions.to(delta) @ delta,
            float(square.sum()),
            self._observation,
            precision,
        )
        return LinkLoss(model, link, n_samples, self._fresh_generator)

    def leave_one_out(
        self,
        link_approx: Link | str | None = None,
        n_samples: int = N_SAMPLES,
        network: bool = False,
    ) -> LeftOut:
        """Return what each training example is predicted without it.

        It is left out of the linearised model with the current prior, noise and
        temperatures, whose mode is found anew: exactly for regression, by one Newton
        step for classification. It takes an exact fit (`n_eigenvalues="exact"`, or
        "auto" on up to 4,000 pairs of example and output).

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
        prior = self._prior_precision
        precision = float(prior) if prior.numel() == 1 else 1.0
        with torch.inference_mode(False), torch.no_grad():
            loss = self._link_loss("leave_one_out()", link_approx, n_samples)
            fit = self._checked_fit()
            positions = self._layout.of(fit.output_shape)
            return predict_left_out(loss, precision, positions, fit.mean.dtype, network)

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
