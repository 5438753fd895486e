"""What a fit will do: for which model and data, with how many gradients, in what
memory."""

from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from laplace_ella.derivatives.backends import Curvature
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.span import Sketch
from laplace_ella.support.checks import positive_int
from laplace_ella.support.identity import digest
from laplace_ella.support.memory import (
    MemoryEstimate,
    budget_of,
    check_memory,
    estimate_memory,
    exact_memory,
    sketch_sizes,
    too_large_for_exact,
)

if TYPE_CHECKING:
    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.derivatives.model_function import ModelFunction
    from laplace_ella.derivatives.modes import ComputeOptions
    from laplace_ella.fitting.data import TrainingData
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.posterior.observation import ObservationModel
    from laplace_ella.support.batches import OutputLayout

__all__ = ["FitPlan", "check_plan"]

logger = logging.getLogger("laplace_ella")

#: n_eigenvalues="auto": at most so many directions of a sample; for classification the
#: paper's number.
REGRESSION_RANK, CLASSIFICATION_RANK = 128, 20

#: n_eigenvalues="auto": up to so many pairs of example and output all are taken, if
#: their gradients fit in memory.
AUTO_MAX_PAIRS = 4000


def check_plan(
    subsample_size: int,
    n_eigenvalues: int | str,
    seed: int,
    complement: Complement | float | None,
) -> None:
    """Refuse numbers that cannot be, before any work."""
    positive_int("subsample_size", subsample_size)
    if n_eigenvalues not in ("auto", "exact"):
        positive_int("n_eigenvalues", n_eigenvalues, "'auto' or 'exact'")
    natural = isinstance(seed, (int, np.integer)) and seed >= 0
    if isinstance(seed, bool) or not natural:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}.")
    if n_eigenvalues == "exact" and complement is Complement.DROP:
        raise ValueError(
            "n_eigenvalues='exact' keeps the prior outside the basis, got "
            "complement='drop'. Leave complement out, or give a number of directions."
        )


@dataclass(frozen=True)
class FitPlan:
    """The model, its data, and how many directions are wanted.

    The settings are those of `ELLALaplace`; `budget` is what all processes may use of
    memory, in bytes, where several fit together.
    """

    fn: ModelFunction
    layout: OutputLayout
    dict_key_x: str
    options: ComputeOptions
    observation: ObservationModel
    subsample_size: int
    n_eigenvalues: int | str
    seed: int
    curvature: Curvature
    stochastic: bool | int
    complement: Complement | float | None
    data: TrainingData
    processes: Processes | None = None
    progress_bar: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        check_plan(self.subsample_size, self.n_eigenvalues, self.seed, self.complement)

    def described(self) -> dict[str, Any]:
        """Return what must be the same in all processes, and after a crash."""
        names = ("subsample_size", "n_eigenvalues", "seed", "curvature", "stochastic")
        return {
            **{name: getattr(self, name) for name in (*names, "complement")},
            "basis_dtype": self.options.basis_dtype,
            "the number of noises": self.observation.sigma_noise.numel(),
            "the uncertain parameters": digest(list(self.fn.names)),
        }

    def agreed(self) -> FitPlan:
        """Return the plan with the budget that all processes have."""
        if self.processes is None:
            return self
        self.processes.check_same(self.described())
        budgets = self.processes.meet("memory budgets", self.available())
        return replace(self, budget=min(budgets))

    @property
    def home(self) -> torch.device:
        """Where gradients are gathered and directions stay."""
        return self.options.basis_device or self.fn.device

    @property
    def rank_limit(self) -> int:
        """K, or as many directions of a sample as are looked at to choose it."""
        K = self.n_eigenvalues
        if not isinstance(K, str):
            return K
        regression = self.observation.family.is_regression
        return REGRESSION_RANK if regression else CLASSIFICATION_RANK

    @property
    def has_curvature_rows(self) -> bool:
        """Whether gradients of pairs are the rows of the curvature's root."""
        regression = self.observation.family.is_regression
        return regression and self.curvature is Curvature.GGN

    @property
    def keeps_span(self) -> bool:
        """Whether the span of the sampled gradients may be asked for later."""
        return (
            self.complement in (None, Complement.MATCHED)
            and self.has_curvature_rows
            and self.observation.sigma_noise.numel() == 1
        )

    # Memory

    def available(self) -> int:
        """Return the bytes that may be used where the directions are."""
        if self.budget is not None:
            return self.budget
        return budget_of(self.home, self.options.memory_budget)

    def _pass_bytes(self, linearizer: Linearizer, rank: int, n_rows: int) -> int:
        # Passes are made where the model is; "cuda" without a number is the same.
        if self.home.type != self.fn.device.type:
            return 0
        return linearizer.pass_bytes(rank, n_rows)

    def estimate(self, linearizer: Linearizer, n_pairs: int) -> MemoryEstimate:
        """Return what a fit with gradients of at most `n_pairs` pairs would need."""
        n_samples = min(self.subsample_size, n_pairs)
        rank, P = min(self.rank_limit, n_samples), linearizer.n_params
        itemsize, basis_dtype = linearizer.dtype.itemsize, self.options.basis_dtype
        one_pass = self._pass_bytes(linearizer, rank, n_samples)
        span = 0
        if self.keeps_span:
            span = n_samples * Sketch.size_for(P, n_samples) * itemsize
        for extra in (span, 0):
            memory = estimate_memory(
                P,
                n_samples,
                rank,
                itemsize,
                one_pass + extra,
                self.available(),
                None if basis_dtype is None else basis_dtype.itemsize,
            )
            # A summary of the gradients does not tell their span: none beside it.
            if memory.method != "streaming" or not extra:
                break
        return memory

    def estimate_exact(self, linearizer: Linearizer, n_pairs: int) -> MemoryEstimate:
        """Return what a fit with the gradients of all pairs would need."""
        P = linearizer.n_params
        one_pass = self._pass_bytes(linearizer, min(n_pairs, P), n_pairs)
        itemsize = linearizer.dtype.itemsize
        return exact_memory(P, n_pairs, itemsize, one_pass, self.available())

    def buffer_sizes(self, linearizer: Linearizer, n_pairs: int) -> tuple[int, int]:
        """Return the rows that are gathered, and those that survive a full buffer;
        refuse a fit that cannot be within the budget."""
        memory = self.estimate(linearizer, n_pairs)
        check_memory(memory, self.home)
        logger.info("basis: %s\n%s", memory.method, memory)
        return sketch_sizes(memory, self.rank_limit)

    def takes_all(self, linearizer: Linearizer, n_pairs: int) -> bool:
        """Return whether all gradients are taken; raise where that was asked for and
        cannot be."""
        asked = self.n_eigenvalues
        if asked not in ("exact", "auto"):
            return False
        if asked == "auto" and n_pairs > AUTO_MAX_PAIRS:
            return False
        memory = self.estimate_exact(linearizer, n_pairs)
        if asked == "auto" or memory.fits:
            return memory.fits

        def too_many(rank: int) -> bool:
            fewer = replace(self, n_eigenvalues=rank)
            return not fewer.estimate(linearizer, n_pairs).fits

        ranks = range(1, min(self.subsample_size, n_pairs) + 1)
        largest = bisect.bisect_left(ranks, True, key=too_many)
        raise too_large_for_exact(memory, linearizer.n_params, largest, self.home)
