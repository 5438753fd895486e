"""`ELLALaplace`: the Nyström-NTK member of the Laplace family.

The class adapts the package to laplace-torch's interface. The work is done by values
and functions of the subpackages.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from laplace_ella.fitting.checkpoint import open_checkpoint
from laplace_ella.fitting.data import training_data
from laplace_ella.fitting.early_stopping import EarlyStopping
from laplace_ella.fitting.fit import add_up, check_stopping
from laplace_ella.fitting.sampling import (
    FitPlan,
    Progress,
    first_look,
    sample_basis,
)
from laplace_ella.hyperparameters import TunableLaplace
from laplace_ella.posterior.observation import Family
from laplace_ella.support.identity import digest

if TYPE_CHECKING:
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.posterior.fit import Fit
    from laplace_ella.support.memory import MemoryEstimate


class ELLALaplace(TunableLaplace):
    """Linearised Laplace with a Nyström approximation of the neural tangent kernel.

    ELLA (Deng, Zhou and Zhu, NeurIPS 2022) takes K directions V of parameter space,
    the top right singular vectors of M sampled gradients, and is a Laplace posterior
    on θ = θ̂ + Vz: z ~ N(0, G⁻¹), with the K×K precision G = Σ φᵀΛφ/(σ²T) + VᵀDV and
    the features φ(x) = J(x)V. Neither the Jacobian J nor any P×P matrix is formed.

    Methods and shapes are Laplace's; what Laplace gives as P×P (`H`,
    `posterior_precision`, `posterior_covariance`) is K×K here, in the coordinates z,
    and float64. Parameters up to `dict_key_y` are those of `ParametricLaplace`.

    Parameters
    ----------
    backend : CurvlinopsGGN, BackPackGGN, AsdlGGN, CurvlinopsEF, BackPackEF, AsdlEF \
or None, default=None
        what computes the sampled gradients: torch.func (`Curvlinops...` and None),
        BackPACK or ASDL. `...GGN` and None have the GGN as curvature, `...EF` the
        empirical Fisher, at one backward pass per example. Of an instance its class is
        used
    backend_kwargs : dict, optional
        only 'stochastic', as the argument of that name
    asdl_fisher_kwargs : dict, optional
        must be empty, there is no ASDL Fisher here
    subsample_size : int, default=2000
        M, the number of gradients from which the directions are computed; every
        (example, output) pair is used once if there are fewer
    n_eigenvalues : int, "exact" or "auto", optional
        K, the number of directions. "exact" takes the gradients of every (example,
        output) pair, all directions that they span, and keeps the prior outside: exact
        linearised Laplace, with derivatives in float64 where memory allows. "auto", the
        default, is exact for up to 4,000 pairs that fit in memory, and beyond takes as
        many directions as hold 90 % of the sampled gradients' energy, at most 128 for
        regression and the paper's 20 for classification
    seed : int, default=1234
        of the sampled pairs and of Monte-Carlo predictions without a generator
    complement : Complement, str or float, optional
        variance of the directions outside the basis, see `Complement`; a number is
        their precision. May be changed after the fit, except to "matched", which has to
        be set before. By default matched for regression, at the prior for exact fits
        and priors of several values, dropped otherwise
    evidence : EvidenceScope or str, default="whole"
        directions included in the marginal likelihood, see `EvidenceScope`
    stochastic : bool or int, default=False
        estimate the curvature from targets that are sampled from the model, so many per
        example: one backward pass each for any number of outputs and directions
    output_layout : OutputLayout or str, default="flat"
        where the outputs of models that predict at many positions (tokens, pixels) have
        their channels. Positions with class index -100 count for nothing
    softmax_temperature : float, default=1
        τ: predicted probabilities are those of f/τ. Unlike `temperature` it changes
        neither the fit nor the variance of f, and values below 1 make predictions more
        confident. With `multi_label` it divides the inputs of the sigmoids
    top_outputs : int, optional
        m: predictions, also those of searches, use the variance of the m largest logits
        only; the other logits are kept as they are. In reverse mode this takes 2m + 1
        derivatives for any number of directions and classes
    multi_label : bool, default=False
        classification with C labels, each present or absent by a sigmoid, instead of
        one of C classes; targets are 0 or 1, in the shape of the output
    parameter_names : sequence of str, optional
        names of the parameters that get a posterior, or patterns like "encoder.*"; all
        that require gradients by default. No derivative is taken below the first of
        them: the last blocks of a network make predictions several times cheaper
    compute : ComputeOptions, optional
        how derivatives are computed: modes, chunk size and memory, precision and device
        of the directions
    distributed : bool, optional
        whether the processes of `torch.distributed`'s default group fit and tune one
        posterior, each with its part of the data; by default if there is a group.
        Methods that take a loader must then be called in all processes

    Attributes
    ----------
    basis : NystromBasis
        the directions and their spectrum, after `fit`
    H : torch.Tensor
        projected curvature Σ φᵀΛφ `(K, K)`, without noise and temperature; of each
        output `(C, K, K)` where `sigma_noise` has a value for each

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> import laplace_ella
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    ... )
    >>> loader = 2 * [(torch.randn(25, 2), torch.randint(3, (25,)))]
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=10)
    >>> la.fit(loader)
    >>> la(torch.randn(4, 2)).shape
    torch.Size([4, 3])
    """

    # how Laplace(..., subset_of_weights, hessian_structure) finds this class
    _key = ("all", "nystrom")

    def fit(
        self,
        train_loader: Any,
        override: bool = True,
        progress_bar: bool = False,
        *,
        val_loader: Any = None,
        early_stopping: EarlyStopping | bool | None = None,
        balanced: bool = False,
        max_data: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        """Fit the posterior: sample the basis, then add up the curvature.

        Parameters
        ----------
        train_loader : torch.utils.data.DataLoader or iterable
            yields batches `(X, y)` or mappings, whenever it is iterated over; shuffled,
            if the fit may stop early. What it yields is what is fitted. A loader that
            does not announce how many examples it has is read once more to count them
        override : bool, default=True
            False keeps the basis and what was added up so far, and adds this data; an
            exact fit extends its basis
        progress_bar : bool, default=False
        val_loader : DataLoader or FeatureCache, optional
            validation data; `history` records the loss on it as data are added
        early_stopping : EarlyStopping or bool, optional
            keep the posterior with the best validation loss, and end the pass when
            there has been no better one for long; True for the default settings
        balanced : bool, default=False
            draw the classes evenly
        max_data : int, optional
            use the first so many examples of the loader, all by default
        checkpoint : str or path-like, optional
            a file in which progress is kept. The same call after a crash continues with
            the result of an undisturbed run; after the end it returns the complete fit,
            once the targets have been read and compared. The file of another fit, and a
            damaged one, are refused. Delete it to start over
        """
        schedule, stops = None, False
        if early_stopping or val_loader is not None:
            schedule, stops = check_stopping(early_stopping, val_loader)
        if schedule is not None:
            link = schedule.link_approx or self.link_approx
            schedule = replace(schedule, link_approx=link)
        given = {
            "override": override,
            "balanced": balanced,
            "max_data": max_data,
            "early_stopping": stops,
            "the validation": schedule and digest(vars(schedule)),
        }
        before = None if override else self.fitted
        new_basis = before is None or before.spans_all
        with ExitStack() as stack:
            processes = stack.enter_context(self._working("fit()", **given))
            counts = balanced, new_basis, processes
            plan = self._plan(train_loader, max_data, *counts, progress_bar)
            file, saved = None, None
            if checkpoint is not None:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                plan = replace(plan, data=replace(plan.data, digested=True))
                settings = {**self._described(), **given}
                if schedule is not None:  # which has the link
                    settings |= {**self._hyperparameters(), "link_approx": None}
                file, saved = open_checkpoint(
                    checkpoint, plan, settings, before, val_loader
                )
            if saved is not None:
                fit, progress, finished = saved
            elif before is None or before.spans_all:
                fit, progress, finished = *sample_basis(plan, before), False
            else:
                fit, progress, finished = before, Progress(before.sums), False
            if not finished:
                validate = schedule and self._validation(
                    schedule, fit, val_loader, plan
                )
                fit = add_up(
                    plan,
                    fit,
                    progress,
                    schedule=schedule,
                    validate=validate,
                    stops=stops,
                    generator=self._fresh_generator() if self.stochastic else None,
                    checkpoint=file,
                )
        self._adopt(fit)
        if stops and schedule is not None:
            self.link_approx = schedule.link_approx

    def _validation(
        self, schedule: EarlyStopping, fit: Fit, val_loader: Any, plan: FitPlan
    ) -> Callable[[Fit], float]:
        """Return the validation loss of fits with the directions of this one."""
        validator = self._validator(
            self._posterior_of(fit),
            val_loader,
            schedule.loss,
            schedule.link_approx,
            schedule.n_samples,
            plan.progress_bar,
            fit.linearizer,
            plan.processes,
        )
        return lambda fit: validator(self._posterior_of(fit))

    def fit_basis(
        self,
        train_loader: Any,
        progress_bar: bool = False,
        balanced: bool = False,
        max_data: int | None = None,
    ) -> None:
        """Sample the directions, and no data yet: the posterior is the prior on them,
        and `fit(..., override=False)` adds data. The parameters are those of `fit`."""
        given = {"balanced": balanced, "max_data": max_data}
        with self._working("fit_basis()", **given) as processes:
            plan = self._plan(
                train_loader, max_data, balanced, True, processes, progress_bar
            )
            fit, _ = sample_basis(plan)
        if fit.training is not None:
            fit = replace(fit, training=fit.training.first(0))
        self._adopt(fit)

    def _plan(
        self,
        train_loader: Any,
        max_data: int | None = None,
        balanced: bool = False,
        counted: bool = False,
        processes: Processes | None = None,
        progress_bar: bool = False,
    ) -> FitPlan:
        """Return what a fit of this posterior will do, its data `counted` or not."""
        if balanced and self._family is not Family.CATEGORICAL:
            raise ValueError(
                "balanced=True draws classes evenly, and is for classification where "
                "an example has one class, which is not this likelihood's "
                f"{self.likelihood!r}{' with multi_label=True' * self.multi_label}. "
                "Leave it out."
            )
        keys = self.dict_key_x, self.dict_key_y
        data = training_data(
            train_loader, *keys, max_data, balanced, counted, progress_bar
        )
        return FitPlan(
            fn=self._fn,
            layout=self._layout,
            options=self._compute,
            observation=self._observation,
            subsample_size=self.subsample_size,
            n_eigenvalues=self.n_eigenvalues,
            seed=self.seed,
            curvature=self.curvature,
            stochastic=self.stochastic,
            complement=self._complement,
            data=data,
            processes=processes,
            progress_bar=progress_bar,
        ).agreed()

    def estimate_memory(self, train_loader: Any) -> MemoryEstimate:
        """Return what `fit(train_loader)` would need, from its first batch; a loader of
        unknown length is counted if it is for an exact fit."""
        with self._working("estimate_memory()") as processes:
            exact = self.n_eigenvalues == "exact"
            plan = self._plan(train_loader, counted=exact, processes=processes)
            _, x, y, _ = next(plan.data.batches(self._device))
            known, linearizer = plan.data.n_examples, first_look(plan, x, y)
            n = known or self.subsample_size  # as if there were enough
            n_pairs = n * math.prod(linearizer.output_shape)
            if processes is not None:
                n_pairs = sum(processes.meet("numbers of pairs", n_pairs))
            if not exact and known:
                exact = plan.takes_all(linearizer, n_pairs)
            return plan.estimate(linearizer, n_pairs, exact)
