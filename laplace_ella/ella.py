"""`ELLALaplace`: the Nyström-NTK member of the Laplace family.

The class is the adapter to laplace-torch's interface. What it does is done by values
and functions of the rooms: `fitting` makes a `Fit`, `posterior` turns it into function
values and probabilities, `tuning` chooses hyperparameters, `derivatives`
differentiates.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from laplace.utils.enums import (
    PredType,
    PriorStructure,
    TuningMethod,
)
from torch.utils.data import DataLoader

from laplace_ella.fitting.data import TrainingData, check_data, training_data
from laplace_ella.fitting.identity import identity_of_fit
from laplace_ella.fitting.journal import Checkpoint
from laplace_ella.fitting.memory import MemoryEstimate
from laplace_ella.fitting.progress import Progress
from laplace_ella.fitting.shared import shared_data
from laplace_ella.fitting.stopping import EarlyStopping, check_stopping
from laplace_ella.interface.joint import Prediction, joint_predictions, jointly
from laplace_ella.interface.predicting import PredictingLaplace
from laplace_ella.posterior.fit import Fit, Sums
from laplace_ella.posterior.likelihood import Family
from laplace_ella.posterior.outside import Complement
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.batches import batch_size
from laplace_ella.support.checks import (
    check_positive,
    member,
    positive_int,
)
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.links import Link
from laplace_ella.support.preserve import full_precision
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.evidence import Evidence, climb, maximize
from laplace_ella.tuning.joint_calibration import Calibration, search_calibration
from laplace_ella.tuning.search import (
    rank_by_evidence,
    search_grid,
    search_prior,
    search_rank,
    search_temperature,
    search_temperature_and_prior,
)
from laplace_ella.tuning.softening import Candidates
from laplace_ella.tuning.validation import (
    DEFAULT_LINK,
    Loss,
    Validator,
    check_loss,
    score,
)

__all__ = ["ELLALaplace"]


class ELLALaplace(PredictingLaplace):
    """Linearised Laplace with a Nyström approximation of the neural tangent kernel.

    ELLA (Deng, Zhou and Zhu, NeurIPS 2022) takes K directions V of parameter space,
    the top right singular vectors of M sampled gradients, and is a Laplace posterior
    on θ = θ̂ + Vz: z ~ N(0, G⁻¹), with the K×K precision G = Σ φᵀΛφ/(σ²T) + VᵀDV and
    the features φ(x) = J(x)V. Neither the Jacobian J nor any P×P matrix is formed.

    Predictions, samples, evidence and tuning have Laplace's interface and shapes; what
    Laplace gives as P×P (`H`, `posterior_precision`, `posterior_covariance`) is K×K
    here, in the coordinates z, and float64.

    Parameters up to `dict_key_y` are those of every `laplace.ParametricLaplace`.

    Parameters
    ----------
    backend : CurvlinopsGGN, BackPackGGN, AsdlGGN, CurvlinopsEF, BackPackEF, AsdlEF \
or None, default=None
        who takes the sampled gradients: torch.func (`Curvlinops...` and None), BackPACK
        or ASDL. The numbers are the same; a layer that BackPACK or ASDL does not
        support is an error. `...GGN` and None have the GGN as curvature, `...EF` the
        empirical Fisher, at one backward pass per example; `...Hessian` is refused. Of
        an instance its class is used
    backend_kwargs : dict, optional
        only 'stochastic', as the argument of that name
    asdl_fisher_kwargs : dict, optional
        for compatibility: must be empty, there is no ASDL Fisher here
    subsample_size : int, default=2000
        M, the number of gradients from which the directions are computed; every
        (example, output) pair is used once if there are fewer
    n_eigenvalues : int, "exact" or "auto", optional
        K, the number of directions. "exact" takes the gradients of every (example,
        output) pair, all directions that they span, and keeps the prior outside: exact
        linearised Laplace, with derivatives in float64 where memory allows. "auto" is
        exact for up to 4,000 pairs that fit in memory, and beyond takes as many
        directions as hold 90 % of the sampled gradients' energy, at most 128. The
        default is "auto" for regression and the paper's 20 for classification, where
        the evidence is no guide to the exact posterior
    seed : int, default=1234
        of the sampled pairs and of Monte-Carlo predictions without a generator; torch's
        global random state is neither read nor changed
    balanced : bool, default=False
        draw the classes evenly
    feature_mode : FeatureMode or str, default="auto"
        direction of differentiation, see `FeatureMode`
    row_mode : RowMode or str, default="auto"
        how sampled gradients are taken, see `RowMode`; `backend` may set it
    complement : Complement, str or float, optional
        what becomes of the directions outside the basis, see `Complement`; a number is
        their precision. May be changed after the fit, except to "matched", which the
        fit must know of. By default matched for regression, at the prior for exact
        fits and priors of several values, dropped otherwise
    evidence : EvidenceOf or str, default="whole"
        which directions the evidence is of, see `EvidenceOf`
    stochastic : bool or int, default=False
        estimate the curvature from targets sampled from the model, so many per example:
        one backward pass each, however many outputs and directions there are
    chunk_size : int, optional
        examples that are differentiated at once; chosen automatically
    memory_budget : int, float or str, optional
        bytes, or a text like "8 GB", that a fit may use; by default 70 % of what is
        free. Sampled gradients that do not fit are summarised as they come, see
        `RowSketch`; `estimate_memory` tells beforehand
    basis_dtype, basis_device : optional
        where and how precisely the directions are kept, for example torch.bfloat16 or
        "cpu" beside a model on a GPU
    scratch_dir : str or PathLike, optional
        folder for a memory-mapped file with the gradients, and for "exact" with the
        directions, where they do not fit in memory_budget; the directions are then used
        from the CPU. Several processes divide the gradients among them instead
    compile : bool or dict, default=False
        compile the forward-mode pass with `torch.compile`, with these arguments; with
        `feature_mode="reverse"` that of reverse mode, which takes long for deep
        networks. With "auto" reverse mode is not compiled
    output_layout : OutputLayout or str, default="flat"
        where the outputs of models that predict at many positions (tokens, pixels) have
        their channels, see `OutputLayout`; predictions come in the model's layout.
        Positions with class index -100 count for nothing
    softmax_temperature : float, default=1
        τ: predicted probabilities are those of f/τ. Unlike `temperature` it changes
        neither the fit nor the variance of f, and below 1 it makes predictions more
        confident; for `multi_label` the sigmoid's
    top_outputs : int, optional
        m: predicted probabilities, in searches too, know the variance of the m largest
        logits only. In reverse mode their gradients are all that is computed, 2m + 1
        derivatives however many directions and classes there are; the classes that are
        out of the question keep their logits. All by default
    multi_label : bool, default=False
        classification with C labels that are there or not, each by a sigmoid, instead
        of one class of C; targets are 0 or 1, in the shape of the output
    parameter_names : sequence of str, optional
        names of the parameters that get a posterior, or patterns like "encoder.*"; all
        that require gradients by default. No derivative is taken below the first of
        them: the last blocks of a network make predictions several times cheaper
    distributed : bool, optional
        whether the processes of `torch.distributed`'s default group fit and tune one
        posterior, each with its part of the data; by default if there is a group.
        Methods that take a loader are then to be called in all of them, and give the
        same in all. False lets each process work alone

    Attributes
    ----------
    basis : NystromBasis
        the directions and their spectrum, after `fit`
    H : torch.Tensor
        projected curvature Σ φᵀΛφ `(K, K)`, without noise and temperature; of each
        output `(C, K, K)` where `sigma_noise` has a value for each
    history : list of dict
        'n_data' and validation 'loss' in the course of the last fit

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    ... )
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=10)
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> la(torch.randn(4, 2), link_approx="mc", n_samples=512).shape
    torch.Size([4, 3])
    """

    # how Laplace(..., subset_of_weights, hessian_structure) finds this class
    _key = ("all", "nystrom")

    # Fitting

    @jointly("train_loader")
    def fit(
        self,
        train_loader: DataLoader,
        override: bool = True,
        progress_bar: bool = False,
        *,
        val_loader: DataLoader | None = None,
        early_stopping: EarlyStopping | bool | None = None,
        balanced: bool | None = None,
        max_data: int | None = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    ) -> None:
        """Fit the posterior: sample the basis, then add up the curvature.

        Parameters
        ----------
        train_loader : torch.utils.data.DataLoader
            batches `(X, y)` or mappings; shuffled, if the fit may stop early. Data
            without indices, an iterable data set or whatever else yields batches each
            time it is iterated over, are read twice: first to draw the basis from a
            reservoir, then for the curvature
        override : bool, default=True
            False keeps the basis and what was added up so far, and adds this data
        progress_bar : bool, default=False
        val_loader : torch.utils.data.DataLoader, optional
            validation data; `history` records the loss on it as data are added
        early_stopping : EarlyStopping or bool, optional
            keep the posterior with the best validation loss, and end the pass when
            there has been no better one for long; True for the default settings
        balanced : bool, optional
            whether to draw the classes evenly; default as given to the constructor
        max_data : int, optional
            use the first so many examples of the loader, all by default. Of a data set
            with indices the basis is drawn from all
        checkpoint : Checkpoint, str or path-like, optional
            a file in which progress is kept as the fit goes on. The same call after a
            crash continues with the result of an undisturbed run; after the end it
            returns the complete fit at once. The file of another fit is refused.
            Delete it to start over
        """
        balanced = self._check_balanced(train_loader, balanced)
        stopping = check_stopping(early_stopping, val_loader)
        checkpoint = self._checked_checkpoint(checkpoint)
        loaders = [train_loader] if val_loader is None else [train_loader, val_loader]
        with self._undisturbed(*loaders), self._all_or_nothing():
            progress = Progress(checkpoint, self._device, loaders)
            data = self._training_data(train_loader, max_data, progress_bar)
            self._know_parameters(data)
            start = None if override else self.fitted
            if checkpoint is not None:
                identity = identity_of_fit(
                    self.fitter,
                    {**self._described(), "balanced": balanced, "max_data": max_data},
                    (train_loader, data),
                    start,
                    val_loader,
                    stopping,
                    self.prior_precision,
                )
                progress.check(identity, self._linearizer)
            mean, home = self._linearizer.fn.flat(), self.fitter.home
            fit = progress.finished(mean, home, self.fitter.owned)
            if fit is None:
                if start is None:
                    start = progress.started(mean, home, self.fitter.owned)
                if start is None:
                    start = self._without_data(data, balanced, progress_bar, progress)
                progress.begin_adding(start)
                fit = self._with_data(
                    data, start, progress_bar, val_loader, stopping, progress
                )
                progress.finish(fit)
        self._adopt(fit)

    @jointly("train_loader")
    def fit_basis(
        self,
        train_loader: DataLoader,
        progress_bar: bool = False,
        balanced: bool | None = None,
        max_data: int | None = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    ) -> None:
        """Sample the directions, and no data yet.

        The posterior is the prior on them; `fit(..., override=False)` or
        `fit_features` adds data. The parameters are those of `fit`.
        """
        balanced = self._check_balanced(train_loader, balanced)
        checkpoint = self._checked_checkpoint(checkpoint)
        with self._undisturbed(train_loader), self._all_or_nothing():
            progress = Progress(checkpoint, self._device, [train_loader])
            data = self._training_data(train_loader, max_data, progress_bar)
            self._know_parameters(data)
            if checkpoint is not None:
                asked = {"balanced": balanced, "max_data": max_data, "fit": "fit_basis"}
                identity = identity_of_fit(
                    self.fitter, {**self._described(), **asked}, (train_loader, data)
                )
                progress.check(identity, self._linearizer)
            mean, home = self._linearizer.fn.flat(), self.fitter.home
            fit = progress.finished(mean, home, self.fitter.owned)
            if fit is None:
                fit = self._without_data(data, balanced, progress_bar, progress)
                progress.finish(fit)
        self._adopt(fit)

    def fit_features(self, cache: FeatureCache, override: bool = True) -> None:
        """Add up the curvature of cached features, which `fit` would compute.

        Parameters
        ----------
        cache : FeatureCache
            of the training data, made with this basis: after `fit_basis` for example
        override : bool, default=True
            False adds to the data that are there
        """
        start = self._checked_fit()
        if self.output_layout is not OutputLayout.FLAT:
            raise ValueError(
                "fit_features is for outputs (B, C): a cache does not say which "
                f"positions belong to one example, got output_layout="
                f"{self.output_layout.value!r}. Use fit(train_loader, override=False)."
            )
        plain = self._posterior_of(start).with_(complement=Complement.DROP)
        cache = cache.serving(plain).top(None)  # curvature is that of all outputs
        if override:
            n_noises = self.sigma_noise.numel()
            sums = Sums.zero(start.basis.rank, n_noises, self._device)
            start = replace(start, sums=sums)
        with torch.no_grad(), full_precision(self._device):
            fit = self.fitter.add_cache(cache.to(self._device), start)
        self._adopt(fit)

    def _training_data(
        self, train_loader: Any, max_data: int | None = None, progress_bar: bool = False
    ) -> TrainingData:
        """The data of a loader as a fit sees them, those of all processes."""
        if not self.collective.alone:
            return shared_data(
                train_loader, self.collective, self.dict_key_x, max_data, progress_bar
            )
        return training_data(train_loader, self.dict_key_x, max_data, progress_bar)

    def _know_parameters(self, data: TrainingData) -> None:
        """Find out which parameters get a posterior, where data must tell."""

    def _without_data(
        self,
        data: TrainingData,
        balanced: bool,
        progress_bar: bool,
        progress: Progress,
    ) -> Fit:
        """A new basis, and sums of nothing."""
        return self.fitter.agreed().sample_basis(data, balanced, progress_bar, progress)

    def _with_data(
        self,
        data: TrainingData,
        start: Fit,
        progress_bar: bool,
        val_loader: Any,
        stopping: EarlyStopping | None,
        progress: Progress,
    ) -> Fit:
        """The fit with data added to it, validated if there is something to do so."""
        validator = posterior = None
        if val_loader is not None:
            plan = stopping or EarlyStopping()
            posterior = self._posterior_of(start)
            validator = self._validator(
                posterior,
                val_loader,
                plan.loss,
                plan.link_approx,
                plan.n_samples,
                progress_bar,
                start.dtype,
            )
        return self.fitter.add_up(
            data, start, progress_bar, validator, posterior, stopping, progress
        )

    def _checked_checkpoint(
        self, checkpoint: Checkpoint | str | os.PathLike[str] | None
    ) -> Checkpoint | None:
        """Where the progress of one process is kept."""
        checkpoint = Checkpoint.of(checkpoint)
        if checkpoint is not None and not self.collective.alone:
            raise ValueError(
                "checkpoint= is for a fit by one process, and "
                f"{self.collective.size} fit together here. Leave it out, save "
                "la.state_dict() after fit_basis(), or pass distributed=False."
            )
        return checkpoint

    def _check_balanced(self, train_loader: Any, balanced: bool | None) -> bool:
        """Refuse what cannot work, before anything is computed."""
        balanced = self.balanced if balanced is None else balanced
        check_data(train_loader, balanced)
        if balanced and self._family is not Family.CATEGORICAL:
            why = (
                "with multi_label=True an example has no single class"
                if self.multi_label
                else "this likelihood is regression"
            )
            raise ValueError(
                f"balanced=True draws classes evenly and is for classification; {why}. "
                "Use balanced=False."
            )
        return balanced

    @jointly("train_loader")
    def estimate_memory(self, train_loader: DataLoader) -> MemoryEstimate:
        """What `fit(train_loader)` would need, from one forward pass of one example; a
        stream is read once if it is for an exact fit."""
        check_data(train_loader)
        with self._undisturbed(train_loader):
            data, fitter = self._training_data(train_loader), self.fitter.agreed()
            probe = fitter.probe(data)
            n_data = data.n_examples
            if n_data is None and self.n_eigenvalues != "exact":
                # Of a stream, as if there were enough.
                return fitter.estimate(probe, self.subsample_size)
            if n_data is None:  # all of it counts
                batches = fitter.batches(data.whole())
                n_data = sum(batch_size(x, self.dict_key_x) for x, _ in batches)
            n_pairs = n_data * math.prod(probe.output_shape)
            if self.n_eigenvalues == "exact" or fitter.takes_all(probe, n_pairs):
                return fitter.estimate_exact(probe, n_pairs)
            return fitter.estimate(probe, n_pairs)

    # Hyperparameters

    def _validator(
        self,
        posterior: SubspacePosterior,
        data: DataLoader | FeatureCache | None,
        loss: Loss | None,
        link_approx: Link | str,
        n_samples: int,
        progress_bar: bool,
        dtype: torch.dtype | None = None,
    ) -> Validator:
        """Validation loss over features that are computed now, or were before."""
        link_approx = member(Link, "link_approx", link_approx)
        positive_int("n_samples", n_samples)
        check_loss(loss)
        if data is None:
            raise ValueError(
                "method='gridsearch' compares predictions on validation data: pass "
                "val_loader=, or use method='marglik'."
            )
        self._check_link(link_approx)
        if not isinstance(data, FeatureCache):
            data = self._cache(posterior, data, progress_bar, dtype)
        return Validator(
            self._served(data, posterior),
            loss,
            self._observation,
            link_approx,
            n_samples,
            self._fresh_generator,
        )

    @jointly("val_loader", optional=True)
    @torch.inference_mode(False)  # the evidence is differentiated
    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | torch.Tensor = 1.0,
        prior_structure: PriorStructure | str = PriorStructure.SCALAR,
        val_loader: DataLoader | FeatureCache | None = None,
        loss: Loss | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: Link | str = DEFAULT_LINK,
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
        fit = self._checked_fit()
        pred_type = member(PredType, "pred_type", pred_type)
        method = member(TuningMethod, "method", method)
        structure = member(PriorStructure, "prior_structure", prior_structure)
        if method == TuningMethod.MARGLIK:
            positive_int("n_steps", n_steps)
            check_positive("lr", lr)
            check_positive("init_prior_prec", init_prior_prec)
            init = torch.as_tensor(
                init_prior_prec, device=self._device, dtype=self._dtype
            ).reshape(-1)
            if len(init) == 1 and structure != PriorStructure.SCALAR:
                layerwise = structure == PriorStructure.LAYERWISE
                init = init.repeat(self.n_layers if layerwise else self.n_params)
            if len(init) not in (1, self.n_layers, self.n_params):
                raise ValueError(
                    f"init_prior_prec has {len(init)} values, expected 1, "
                    f"{self.n_layers} (layerwise) or {self.n_params} (diagonal)."
                )
            evidence = Evidence.of(
                fit,
                self._observation,
                self._posterior_with(init),
                torch.as_tensor(self.prior_mean),
                many=True,
            )
            chosen = climb(evidence, init, n_steps, lr, progress_bar)
        else:
            positive_int("grid_size", grid_size)
            grid = torch.logspace(
                log_prior_prec_min,
                log_prior_prec_max,
                grid_size,
                base=log_prior_prec_base,
            )
            if pred_type == PredType.NN:
                chosen = self._search_prior_by_sampling(
                    grid, val_loader, loss, n_samples, progress_bar
                )
            else:
                # With a scalar prior, whose features hold for the whole grid.
                posterior = self._posterior_with(grid[:1].to(self.H))
                validator = self._validator(
                    posterior, val_loader, loss, link_approx, n_samples, progress_bar
                )
                chosen = search_prior(posterior, grid, validator, progress_bar)
            chosen = self._settled(chosen)
        self.prior_precision = chosen
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    def _search_prior_by_sampling(
        self,
        grid: torch.Tensor,
        val_loader: Any,
        loss: Loss | None,
        n_samples: int,
        progress_bar: bool,
    ) -> torch.Tensor:
        """The best prior for predictions with sampled weights, which no features
        shorten."""
        positive_int("n_samples", n_samples)
        check_loss(loss)
        if val_loader is None or isinstance(val_loader, FeatureCache):
            raise ValueError(
                "pred_type='nn' runs the network with sampled weights: pass a "
                f"DataLoader as val_loader=, got {type(val_loader).__name__}."
            )
        observation = self._observation
        loss = observation.default_loss() if loss is None else loss
        before = self.prior_precision

        def predictions(loader: Any) -> Iterator[Prediction]:
            for x, y in self.fitter.batches(loader):
                output = self(
                    x, "nn", link_approx="mc", n_samples=n_samples, fitting=True
                )
                parts = output if isinstance(output, tuple) else (output,)
                positions = self.output_layout.of(tuple(parts[0].shape[1:]))
                rows = [positions.rows(part.flatten(1)) for part in parts]
                y, known = observation.rows(y, len(rows[0]), positions)
                y = y.to(self._device)
                counts = np.full(len(output[0]), positions.n_positions)
                if known is not None and positions.shape:
                    known = known.to(self._device)
                    rows, y = [part[known] for part in rows], y[known]
                    counts = known.view(len(counts), -1).sum(-1).cpu().numpy()
                yield Prediction(tuple(rows), y, counts)

        def evaluate(prior: torch.Tensor) -> float:
            self.prior_precision = prior
            found = predictions(val_loader)
            if data is not None:
                found = joint_predictions(
                    data, self.collective, predictions(data.whole())
                )
            value = score(((p.output, p.targets) for p in found), loss)
            return math.inf if math.isnan(value) else value

        try:
            with self._undisturbed(val_loader):
                data = None
                if self.collective.joined:
                    data = shared_data(val_loader, self.collective, self.dict_key_x)
                return search_grid(grid, evaluate, progress_bar)
        finally:
            self.prior_precision = before

    @property
    def effective_n_data(self) -> float:
        """N/T: how many data the tempered likelihood weighs as much as."""
        return self.n_data / float(self.temperature)

    @jointly("val_loader", optional=True)
    def optimize_temperature(
        self,
        val_loader: DataLoader | FeatureCache,
        loss: Loss | None = None,
        link_approx: Link | str = DEFAULT_LINK,
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
        link_approx : Link or str, default="probit"
            set it to the one you predict with
        n_samples : int, default=512
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
        validator = self._validator(
            posterior, val_loader, loss, link_approx, n_samples, progress_bar
        )
        if not tune_prior:
            found = search_temperature(posterior, self.n_data, validator)
            self.temperature = self._settled(found)
            return
        temperature, prior = self._settled(
            search_temperature_and_prior(posterior, self.n_data, validator, bounds)
        )
        self.temperature, self.prior_precision = temperature, prior

    @jointly("val_loader", optional=True)
    def optimize_calibration(
        self,
        val_loader: DataLoader | FeatureCache,
        link_approx: Link | str = DEFAULT_LINK,
        n_samples: int = 512,
        tune_complement: bool = False,
        progress_bar: bool = False,
    ) -> Calibration:
        """Choose all that calibrates predictions, by the validation NLL.

        Classification: `softmax_temperature`, `temperature` and a scalar
        `prior_precision`; regression: a common factor of `sigma_noise`,
        `temperature` and `prior_precision`. Features are computed once.

        The search starts from temperature scaling, which is the limit of a posterior
        without variance, and does not end above its loss (the links of the Laplace
        bridge have another limit, and may). Many settings do equally well on
        validation data. Of those within one standard error of the best, the ones are
        taken in which the posterior does a tenth of the softening and τ the rest, or
        as near to that as they come, and of these the temperature nearest to 1.

        Parameters
        ----------
        val_loader : DataLoader or FeatureCache
            data that the network was not trained on
        link_approx : Link or str, default="probit"
            set it to the one you predict with
        n_samples : int, default=512
            of the link 'mc'
        tune_complement : bool, default=False
            choose the precision outside the basis as well, which `complement` is then
            set to. Always, if `complement` is a number already
        progress_bar : bool, default=False

        Returns
        -------
        Calibration
            what was chosen, and the validation losses of the alternatives
        """
        one = torch.ones_like(self.posterior.H[0, :1])
        posterior = self._posterior_with(one)
        if tune_complement:
            posterior = posterior.with_(complement=1.0)
        validator = self._validator(
            posterior, val_loader, None, link_approx, n_samples, progress_bar
        )
        with full_precision(self._device):
            calibration = search_calibration(
                Candidates.of(posterior, validator),
                float(posterior.factor * self.temperature),
            )
        calibration = self._settled(calibration)
        with self._all_or_nothing():
            self.prior_precision = calibration.prior_precision
            self.temperature = calibration.temperature
            if calibration.complement is not None:
                self.complement = calibration.complement
            if self._family.is_regression:
                noise = torch.tensor(calibration.sigma_noise, dtype=self._dtype)
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
        evidence = Evidence.of(
            fit,
            self._observation,
            self.posterior,
            torch.as_tensor(self.prior_mean),
            many=True,
        )
        noise, prior = maximize(
            evidence, self.prior_precision, n_steps, lr, tune_prior, progress_bar
        )
        self.sigma_noise, self.prior_precision = noise, prior

    @jointly("val_loader", optional=True)
    def optimize_rank(
        self,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        val_loader: DataLoader | FeatureCache | None = None,
        ranks: Sequence[int] | None = None,
        loss: Loss | None = None,
        link_approx: Link | str = DEFAULT_LINK,
        n_samples: int = 512,
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
        validator = self._validator(
            posterior, val_loader, loss, link_approx, n_samples, progress_bar
        )
        rank, losses = self._settled(search_rank(posterior, candidates, validator))
        self.truncate(rank)
        return [
            {"rank": k, "loss": value}
            for k, value in zip(candidates, losses, strict=True)
        ]
