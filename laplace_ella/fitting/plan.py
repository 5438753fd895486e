"""What a fit will do: gradients for how many directions, and in what memory."""

from __future__ import annotations

import bisect
import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from laplace_ella.derivatives.backends import Curvature
from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.derivatives.probe import Probe
from laplace_ella.fitting.joint import common_budget
from laplace_ella.fitting.memory import (
    MemoryEstimate,
    estimate_memory,
    exact_memory,
    on_disk,
    too_large_for_exact,
)
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.outside import Complement
from laplace_ella.support.checks import positive_int
from laplace_ella.support.collective import ALONE, Collective
from laplace_ella.support.disk import copy_on_disk
from laplace_ella.support.resources import budget_of
from laplace_ella.support.span import Sketch

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = ["AUTO_ENERGY", "FEW_OTHERS", "BasisPlan", "Planner"]

#: n_eigenvalues="auto": directions until this share of the trace, at most so many.
AUTO_ENERGY = 0.9
AUTO_MAX_RANK = 128

#: n_eigenvalues="auto": up to so many pairs of example and output all are taken, if
#: their gradients fit in memory.
AUTO_MAX_PAIRS = 4000

#: More pairs than any fit takes.
MOST_PAIRS = 10**9

#: Gradients of pairs that were not sampled, to see how much is outside the span.
FEW_OTHERS = 256


@dataclass(frozen=True)
class BasisPlan:
    """How many gradients make how many directions.

    Attributes
    ----------
    subsample_size : int
        M
    n_eigenvalues : int, "auto" or "exact"
        K; "exact" takes the gradients of all pairs and all their directions, "auto"
        does so where that is affordable and else goes by the spectrum
    seed : int
        of the sampled pairs
    """

    subsample_size: int
    n_eigenvalues: int | str
    seed: int

    def __post_init__(self) -> None:
        positive_int("subsample_size", self.subsample_size)
        if self.n_eigenvalues not in ("auto", "exact"):
            positive_int("n_eigenvalues", self.n_eigenvalues, "'auto' or 'exact'")
        natural = isinstance(self.seed, (int, np.integer)) and self.seed >= 0
        if isinstance(self.seed, bool) or not natural:
            raise ValueError(
                f"seed must be an integer of at least 0, got {self.seed!r}."
            )

    @property
    def rank_limit(self) -> int:
        """K, or as many directions of a sample as are looked at to choose it."""
        if isinstance(self.n_eigenvalues, str):
            return AUTO_MAX_RANK
        return self.n_eigenvalues


@dataclass(frozen=True)
class Planner:
    """What fits have in common, the model and its derivatives, targets and plan; and
    what they will take of memory.

    Attributes
    ----------
    linearizer : Linearizer
    observation : ObservationModel
    plan : BasisPlan
    curvature : Curvature
    stochastic : bool or int
        sampled cotangents per example, instead of the exact curvature
    dict_key_y : str
        where a mapping holds its targets
    fresh_generator : callable
        a generator on the model's device, always in the same state
    complement : Complement or float, optional
        what was asked for; None leaves it to the fit
    collective : Collective
        the processes that fit together
    agreed_budget : int, optional
        bytes that each of them may use
    """

    linearizer: Linearizer
    observation: ObservationModel
    plan: BasisPlan
    curvature: Curvature
    stochastic: bool | int
    dict_key_y: str
    fresh_generator: Callable[[], torch.Generator | None]
    complement: Complement | float | None = None
    collective: Collective = ALONE
    agreed_budget: int | None = None

    def agreed(self) -> Self:
        """The same with a memory budget that is that of all processes."""
        if self.collective.alone:
            return self
        asked = self.linearizer.options.memory_budget
        budget = common_budget(self.collective, self.home, asked)
        return dataclasses.replace(self, agreed_budget=budget)

    @property
    def home(self) -> torch.device:
        """Where gradients are gathered and directions stay."""
        options = self.linearizer.options
        if options.basis_device is None and options.scratch_dir is not None:
            return torch.device("cpu")
        return options.basis_device or self.linearizer.device

    # What is taken

    @property
    def _has_curvature_rows(self) -> bool:
        """Whether gradients of pairs are the rows of the curvature's root."""
        regression = self.observation.family.is_regression
        return regression and self.curvature is Curvature.GGN

    @property
    def _keeps_span(self) -> bool:
        """Whether the span of the sampled gradients may be asked for later."""
        return (
            self.complement in (None, Complement.MATCHED)
            and self._has_curvature_rows
            and not self.observation.has_several_noises
        )

    def takes_all(self, probe: Probe, n_pairs: int) -> bool:
        """Whether all gradients are taken; an error where that was asked for and
        cannot be."""
        asked = self.plan.n_eigenvalues
        if asked not in ("exact", "auto"):
            return False
        memory = self.estimate_exact(probe, n_pairs)
        if asked == "exact":
            if not memory.fits:
                raise too_large_for_exact(
                    memory,
                    self.linearizer.n_params,
                    self._largest_rank(probe, n_pairs),
                    self.home,
                )
            return True
        return n_pairs <= AUTO_MAX_PAIRS and memory.fits

    @property
    def _folder(self) -> Path | None:
        """Where a file with gradients may be made."""
        folder = self.linearizer.options.scratch_dir
        return None if folder is None else Path(folder)

    def _most_pairs(self, probe: Probe) -> int:
        """Pairs of a stream that are worth keeping until its length is known."""
        sampled = self.plan.subsample_size + FEW_OTHERS
        if self.plan.n_eigenvalues == "exact":
            # One more than fit tells that they do not.
            return 1 + self._largest(
                MOST_PAIRS, lambda n: self.estimate_exact(probe, n).fits
            )
        if self.plan.n_eigenvalues == "auto":
            return max(sampled, AUTO_MAX_PAIRS)
        return sampled

    def owned(self, directions: torch.Tensor) -> torch.Tensor:
        """A copy that stays: in memory where it has room, else in a file, if there is a
        folder for one."""
        if self._folder is not None and directions.nbytes > self.budget:
            return copy_on_disk(directions, directions.dtype, self._folder)
        return directions.clone()

    # Memory

    def estimate(self, probe: Probe, n_pairs: int) -> MemoryEstimate:
        """What a fit with gradients of at most `n_pairs` pairs would need."""
        options = self.linearizer.options
        n_samples = min(self.plan.subsample_size, n_pairs)
        rank = min(self.plan.rank_limit, n_samples)

        def with_span(span_bytes: int) -> MemoryEstimate:
            return estimate_memory(
                self.linearizer.n_params,
                n_samples,
                rank,
                self.linearizer.dtype.itemsize,
                self._pass_bytes(probe, rank, n_samples) + span_bytes,
                self.budget,
                None if options.basis_dtype is None else options.basis_dtype.itemsize,
                self.collective.size,
            )

        memory = self._or_on_disk(with_span(self._span_bytes(n_samples)))
        # A summary of the gradients does not tell their span: none is kept beside it.
        return memory if memory.method != "streaming" else with_span(0)

    def _largest_rank(self, probe: Probe, n_pairs: int) -> int:
        """The largest number of directions whose fit is within the budget."""

        def fits(rank: int) -> bool:
            plan = dataclasses.replace(self.plan, n_eigenvalues=rank)
            return dataclasses.replace(self, plan=plan).estimate(probe, n_pairs).fits

        return self._largest(min(self.plan.subsample_size, n_pairs), fits)

    @staticmethod
    def _largest(at_most: int, fits: Callable[[int], bool]) -> int:
        """The largest number of at least 1 that fits, or 0."""
        return bisect.bisect_left(
            range(1, at_most + 1), True, key=lambda n: not fits(n)
        )

    def estimate_exact(
        self, probe: Probe, n_pairs: int, itemsize: int | None = None
    ) -> MemoryEstimate:
        """What a fit with the gradients of all pairs would need, in the model's
        precision unless told."""
        P = self.linearizer.n_params
        itemsize = itemsize or self.linearizer.dtype.itemsize
        memory = exact_memory(
            P,
            n_pairs,
            itemsize,
            self._pass_bytes(probe, min(n_pairs, P), n_pairs),
            self.budget,
            self.collective.size,
        )
        return self._or_on_disk(memory, itemsize)

    def _or_on_disk(
        self, memory: MemoryEstimate, itemsize: int | None = None
    ) -> MemoryEstimate:
        """The same in a file, where there is a folder for one and memory does not
        suffice."""
        if self._folder is None or not self.collective.alone:
            return memory
        if memory.method == "exact" and memory.fits:
            return memory
        itemsize = itemsize or self.linearizer.dtype.itemsize
        filed = on_disk(memory, self.linearizer.n_params, itemsize)
        has_room = shutil.disk_usage(self._folder).free >= filed.disk
        return filed if filed.fits and has_room else memory

    @property
    def budget(self) -> int:
        """Bytes that a fit may use where its directions are."""
        if self.agreed_budget is not None:
            return self.agreed_budget
        return budget_of(self.home, self.linearizer.options.memory_budget)

    def _span_bytes(self, n_samples: int) -> int:
        """The sketches of the sampled gradients, where they are kept."""
        if not self._keeps_span:
            return 0
        size = Sketch.size_for(self.linearizer.n_params, n_samples)
        return n_samples * size * self.linearizer.dtype.itemsize

    def _pass_bytes(self, probe: Probe, rank: int, n_rows: int) -> int:
        # Passes are made where the model is; "cuda" without a number is the same.
        if self.home.type != self.linearizer.device.type:
            return 0
        return self.linearizer.sizes(probe).pass_bytes(rank, n_rows)
