"""What a fit will do: for which model and data, with how many gradients, in what
memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from laplace_ella.derivatives.backends import Curvature
from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.span import Sketch
from laplace_ella.support.checks import positive_int
from laplace_ella.support.identity import digest
from laplace_ella.support.memory import MemoryEstimate, budget_of, human_bytes

if TYPE_CHECKING:
    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.derivatives.model_function import ModelFunction
    from laplace_ella.derivatives.modes import ComputeOptions
    from laplace_ella.fitting.data import TrainingData
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.posterior.observation import ObservationModel
    from laplace_ella.support.batches import OutputLayout

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

    def estimate(
        self, linearizer: Linearizer, n_pairs: int, exact: bool = False
    ) -> MemoryEstimate:
        """Return what a fit with gradients of at most `n_pairs` pairs would need, or
        an `exact` one with those of all."""
        n_samples = n_pairs if exact else min(self.subsample_size, n_pairs)
        rank = n_pairs if exact else min(self.rank_limit, n_samples)
        P, dtype, one_pass = linearizer.n_params, linearizer.dtype, 0
        # Passes are made where the model is; "cuda" without a number is the same.
        if self.home.type == self.fn.device.type:
            one_pass = linearizer.pass_bytes(min(rank, P), n_samples)
        stays = rank * P * (self.options.basis_dtype or dtype).itemsize
        basis, row = 0 if exact else stays, P * dtype.itemsize
        memory = MemoryEstimate(basis, row, one_pass, self.available(), rank, n_samples)
        if self.keeps_span and not exact:
            span = n_samples * Sketch.size_for(P, n_samples) * dtype.itemsize
            wider = replace(memory, pass_=one_pass + span)
            # A summary of the gradients does not tell their span: none beside it.
            return memory if wider.method == "streaming" else wider
        return memory

    def buffer_sizes(self, linearizer: Linearizer, n_pairs: int) -> tuple[int, int]:
        """Return the rows that are gathered, and those that survive a full buffer;
        refuse a fit that cannot be within the budget."""
        memory = self.estimate(linearizer, n_pairs)
        if not memory.fits:
            raise InsufficientMemoryError(
                f"The fit needs at least {human_bytes(memory.needed)} on {self.home}, "
                f"the budget is {human_bytes(memory.budget)}. Lower n_eigenvalues (the "
                f"basis takes {human_bytes(memory.basis)}) or chunk_size (one pass "
                f"takes {human_bytes(memory.pass_)}), freeze parameters, use "
                "basis_dtype=torch.bfloat16 or basis_device='cpu', or raise "
                "memory_budget."
            )
        logger.info("basis: %s\n%s", memory.method, memory)
        return memory.buffer

    def takes_all(self, linearizer: Linearizer, n_pairs: int) -> bool:
        """Return whether all gradients are taken; raise where that was asked for and
        cannot be."""
        asked = self.n_eigenvalues
        if asked not in ("exact", "auto"):
            return False
        if asked == "auto" and n_pairs > AUTO_MAX_PAIRS:
            return False
        memory = self.estimate(linearizer, n_pairs, exact=True)
        if asked == "exact" and not memory.fits:
            raise InsufficientMemoryError(
                f"n_eigenvalues='exact' keeps all {n_pairs} gradients of "
                f"{linearizer.n_params} parameters, {human_bytes(memory.needed)} on "
                f"{self.home}; the budget is {human_bytes(memory.budget)}. Use "
                "n_eigenvalues='auto' or a number, fewer data, freeze parameters, or "
                "raise memory_budget."
            )
        return memory.fits
