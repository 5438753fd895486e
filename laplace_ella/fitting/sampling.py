"""First half of a fit: its plan, its memory, the sampled gradients and the basis."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from laplace_ella.derivatives.trials import decide, linearize
from laplace_ella.errors import (
    InsufficientMemoryError,
    RankWarning,
    SoftmaxWarning,
    warn_caller,
)
from laplace_ella.fitting.data import draw_pairs, pairs_within
from laplace_ella.posterior import likelihood
from laplace_ella.posterior.basis import (
    NystromBasis,
    RowBuffer,
    exact_basis,
    extend_exact,
    nystrom_basis,
)
from laplace_ella.posterior.complement import UNKNOWN_SPAN, Complement
from laplace_ella.posterior.fit import CurvatureSum, Fit, TrainingRows
from laplace_ella.posterior.span import Sketch, sampled_span
from laplace_ella.support.batches import (
    Positions,
    batch_size,
    has_values,
    map_tensors,
    take,
)
from laplace_ella.support.checks import check_finite, positive_int
from laplace_ella.support.memory import MemoryEstimate, budget_of, human_bytes
from laplace_ella.support.preserve import autocast_enabled

if TYPE_CHECKING:
    from laplace_ella.derivatives.backends import Curvature
    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.derivatives.model_function import ModelFunction
    from laplace_ella.derivatives.modes import ComputeOptions
    from laplace_ella.fitting.data import TrainingData
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.posterior.observation import ObservationModel
    from laplace_ella.support.batches import OutputLayout

logger = logging.getLogger("laplace_ella")

#: n_eigenvalues="auto": at most so many directions of a sample (for classification the
#: paper's number), until this share of the trace; all pairs of example and output are
#: taken up to so many, if their gradients fit in memory.
REGRESSION_RANK, CLASSIFICATION_RANK = 128, 20
AUTO_ENERGY = 0.9
AUTO_MAX_PAIRS = 4000

#: Gradients of pairs that were not sampled, to see how much is outside the span.
FEW_OTHERS = 256

#: What to do where memory is short.
REMEDY = (
    "fewer n_eigenvalues, a smaller chunk_size, basis_dtype=torch.bfloat16 or "
    "basis_device='cpu'"
)
EXACT_REMEDY = "n_eigenvalues='auto' or a number, or fewer data"

#: Examples whose outputs are looked at first, and that a fit keeps to be known by.
FEW_OUTPUTS, FEW_EXAMPLES = 8, 4


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

    The settings are those of `ELLALaplace`; `budget` is what a process may use of
    memory where the directions are, in bytes.
    """

    fn: ModelFunction
    layout: OutputLayout
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
    budget: int = 0

    def described(self) -> dict[str, Any]:
        """Return what must be the same in all processes, and after a crash."""
        names = ("subsample_size", "n_eigenvalues", "seed", "curvature", "stochastic")
        return {
            **{name: getattr(self, name) for name in (*names, "complement")},
            "basis_dtype": self.options.basis_dtype,
            "autocast": autocast_enabled(self.fn.device),
            "the number of noises": self.observation.sigma_noise.numel(),
            "the uncertain parameters": ", ".join(self.fn.names),
        }

    def agreed(self) -> FitPlan:
        """Return the plan, checked, with the budget that all processes have."""
        check_plan(self.subsample_size, self.n_eigenvalues, self.seed, self.complement)
        budget = budget_of(self.home, self.options.memory_budget)
        if self.processes is not None:
            self.processes.check_same(self.described())
            budget = min(self.processes.meet("memory budgets", budget))
        return replace(self, budget=budget)

    @property
    def home(self) -> torch.device:
        """Where gradients are gathered and directions stay."""
        return self.options.basis_device or self.fn.device

    @property
    def rank_limit(self) -> int:
        """K, or as many directions of a sample as are looked at to choose it."""
        if not isinstance(self.n_eigenvalues, str):
            return self.n_eigenvalues
        regression = self.observation.family.is_regression
        return REGRESSION_RANK if regression else CLASSIFICATION_RANK

    @property
    def has_curvature_rows(self) -> bool:
        """Whether gradients of pairs are the rows of the curvature's root."""
        regression = self.observation.family.is_regression
        return regression and self.curvature == "ggn"

    @property
    def is_sampled(self) -> bool:
        """Whether few gradients per example make the curvature, not features."""
        return bool(self.stochastic) or self.curvature == "empirical_fisher"

    @property
    def keeps_span(self) -> bool:
        """Whether the span of the sampled gradients may be asked for later."""
        asked = self.complement in (None, Complement.MATCHED)
        one_noise = self.observation.sigma_noise.numel() == 1
        return asked and one_noise and self.has_curvature_rows

    def takes_all(self, linearizer: Linearizer, n_pairs: int) -> bool:
        """Return whether the gradients of all pairs are to be taken."""
        if self.n_eigenvalues == "auto" and n_pairs <= AUTO_MAX_PAIRS:
            return self.estimate(linearizer, n_pairs, exact=True).fits
        return self.n_eigenvalues == "exact"

    def estimate(
        self, linearizer: Linearizer, n_pairs: int, exact: bool
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
        memory = MemoryEstimate(basis, row, one_pass, self.budget, rank, n_samples)
        if self.keeps_span and not exact:
            span = n_samples * Sketch.size_for(P, n_samples) * dtype.itemsize
            wider = replace(memory, pass_=one_pass + span)
            # A summary of the gradients does not tell their span: none beside it.
            return memory if wider.method == "streaming" else wider
        return memory


@dataclass(frozen=True)
class Progress:
    """How far the curvature of a pass over the data is added up.

    Of this pass `n_batches` are in the sums; `targets` is the running digest of their
    targets. `generator` is the state of the generator of sampled cotangents, `history`
    has 'n_data' and validation 'loss' so far, and `best` the sums of the best loss.
    `rows` are features of training data that are kept to leave examples out.
    """

    sums: CurvatureSum
    n_batches: int = 0
    targets: str = ""
    generator: torch.Tensor | None = None
    history: tuple[dict[str, float], ...] = ()
    best: CurvatureSum | None = None
    rows: TrainingRows | None = None


def first_look(plan: FitPlan, x: Any, y: torch.Tensor) -> Linearizer:
    """Check model and targets on the first batch, before anything is differentiated."""
    family, key = plan.observation.family, plan.data.dict_key_x
    linearizer = linearize(plan.fn, plan.layout, key, plan.options, x)
    size = batch_size(x, key)
    f, positions = linearizer.outputs(take(x, slice(0, FEW_OUTPUTS), size))
    if plan.observation.sigma_noise.numel() > 1:
        plan.observation.check_noise(positions)
    likelihood.target_rows(y, size, positions, family)
    several = positions.n_channels > 1 and len(f) > 1 and has_values(f)
    if several and family is likelihood.Family.CATEGORICAL:
        off = (f.double().sum(-1) - 1).abs().amax()
        if bool((f >= 0).all() & (off < 1e-4)):
            warn_caller(
                "The outputs of the first examples are non-negative and sum to one, "
                "like probabilities. Laplace expects logits: remove the softmax at the "
                "end of the model.",
                SoftmaxWarning,
            )
    return linearizer


def sample_basis(plan: FitPlan, start: Fit | None = None) -> tuple[Fit, Progress]:
    """Return a fit without data, and how far it read: draw M pairs (x, i), or take all,
    and compute the directions of their gradients.

    Taking all, outputs and targets of the same batches are kept as training rows; those
    of `start`, an exact fit of other data, come before them.
    """
    if start is not None and start.training is None:
        raise ValueError(
            "override=False of an exact fit extends its basis, which takes the "
            "features of the data that were fitted, and this fit has not kept them "
            "(there was no room within memory_budget). Fit all data at once, or give "
            "a number of directions."
        )
    data, processes, rank = plan.data, plan.processes, 0
    batches = data.batches(plan.fn.device, "[Sampling gradients]", plan.progress_bar)
    first = next(batches)
    counts, labels = [data.n_examples or 0], data.labels
    if processes is not None:
        rank, counts = processes.rank, processes.meet("numbers of examples", *counts)
        if labels is not None:
            labels = np.concatenate(processes.meet("labels", labels))
    linearizer = start.linearizer if start else first_look(plan, first.x, first.y)
    n_outputs = math.prod(linearizer.output_shape)
    n_pairs = sum(counts) * n_outputs
    exact = start is not None or plan.takes_all(linearizer, n_pairs)
    memory = plan.estimate(linearizer, n_pairs, exact)
    if not memory.fits:
        raise InsufficientMemoryError(
            f"{f'A fit that keeps all {n_pairs} gradients' if exact else 'The fit'} "
            f"needs at least {human_bytes(memory.needed)} on {plan.home}, the budget "
            f"is {human_bytes(memory.budget)}. Use "
            f"{EXACT_REMEDY if exact else REMEDY}, freeze parameters, or raise "
            "memory_budget."
        )
    logger.info("basis: %s\n%s", memory.method, memory)
    M, sketch = memory.n_samples, None
    if exact:
        pairs = np.stack(np.divmod(np.arange(counts[rank] * n_outputs), n_outputs), 1)
        others = pairs[:0]
    else:
        if plan.keeps_span and memory.method == "exact":
            sketch = Sketch.of(linearizer.n_params, M, plan.seed, plan.home)
        elif plan.complement is Complement.MATCHED:
            raise ValueError(UNKNOWN_SPAN)
        n = M if sketch is None else M + FEW_OTHERS
        rng = np.random.default_rng(plan.seed)
        drawn = draw_pairs(sum(counts), n_outputs, n, rng, labels)
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        pairs, others = (
            pairs_within(some[some[:, 0].argsort(kind="stable")], own)
            for some in (drawn[:M], drawn[M:])
        )
    if start is None:
        linearizer = _decided(plan, linearizer, first.x, memory, exact)
    (capacity, keep), numels = memory.buffer, linearizer.fn.numels
    capacity = min(capacity, len(pairs) + 1)
    buffer = RowBuffer(numels, capacity, keep, linearizer.dtype, plan.home)

    # One pass, which ends at the last of the pairs.
    positions = linearizer.layout.of(tuple(linearizer.output_shape))
    last = max([-1, *pairs[-1:, 0], *others[-1:, 0]])
    finite, beyond, parts = [], [], []
    read: tuple[Any, ...] = ()
    for where, x, y, targets in chain([first], batches):
        if last < where.start:
            break
        good = True
        if exact:
            size = where.stop - where.start
            f, here = linearizer.outputs(x)
            y = targets_of(plan, y, size, here, positions).to(f.device)
            good = torch.isfinite(f).all()
            parts.append([t.unflatten(0, (size, -1)) for t in (f, y)])
            read = len(parts), targets
        try:
            for rows in _rows(linearizer, x, pairs, where, capacity):
                buffer.append(rows.to(plan.home))
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            finite.append(torch.isfinite(buffer.energy))
            check_finite(finite, "outputs or derivatives", "of the data")
            raise
        finite.append(torch.isfinite(buffer.energy) & good)
        if sketch is not None:
            for rows in _rows(linearizer, x, others, where, capacity):
                beyond.append(sketch(rows.to(plan.home)))
    check_finite(finite, "outputs or derivatives", "of the data")
    kept = [torch.cat(some) for some in zip(*parts, strict=True)]
    if sketch is not None:
        kept = [torch.cat([sketch(buffer.rows[:0]), *beyond])]
    if processes is not None:
        buffer = _of_all(processes, buffer)
        kept = [processes.rows("outputs and targets", some) for some in kept]
    if exact:
        basis, found = _exact(buffer, positions, kept, start)
    else:
        basis, found = _nystrom(plan, buffer, sketch, *kept)
    dtype = plan.options.basis_dtype or basis.directions.dtype
    n_noises = plan.observation.sigma_noise.numel()
    some = take(first.x, slice(0, FEW_EXAMPLES), batch_size(first.x, data.dict_key_x))
    fit = Fit(
        basis=replace(basis, directions=basis.directions.to(dtype)),
        sums=CurvatureSum.zero(basis.rank, n_noises, linearizer.device),
        output_shape=tuple(linearizer.output_shape),
        mean=plan.fn.flat(),
        dtype=linearizer.dtype,
        linearizer=linearizer,
        curvature_rows=plan.has_curvature_rows,
        examples=map_tensors(torch.clone, some),
        **found,
    )
    return fit, Progress(fit.sums, *read)


def _decided(
    plan: FitPlan, linearizer: Linearizer, x: Any, memory: MemoryEstimate, exact: bool
) -> Linearizer:
    """Return decided derivatives; for exact fits in float64, where the model runs in
    it and memory allows.

    With all gradients in the basis the variance at inputs like the training data is a
    small difference, which single precision loses under weak priors.
    """
    rank, device = min(memory.rank, linearizer.n_params), plan.fn.device
    possible = device.type in ("cpu", "cuda", "meta") and not autocast_enabled(device)
    if exact and possible and linearizer.dtype != torch.float64:
        double = linearizer.in_dtype(torch.float64)
        try:
            if plan.estimate(double, memory.n_samples, exact=True).fits:
                return decide(double, x, rank)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            logger.info("derivatives stay in single precision: %s", error)
    return decide(linearizer, x, rank)


def _rows(
    linearizer: Linearizer, x: Any, pairs: np.ndarray, where: slice, at_most: int
) -> Iterator[torch.Tensor]:
    """Return the gradients of the pairs of a batch, some at a time."""
    here = torch.as_tensor(pairs_within(pairs, where))
    return linearizer.row_parts(x, here[:, 0], here[:, 1], at_most)


def targets_of(
    plan: FitPlan, y: torch.Tensor, size: int, here: Positions, expected: Positions
) -> torch.Tensor:
    """Return checked targets as rows; refuse examples of another size."""
    if here.output_shape != expected.output_shape:
        raise ValueError(
            "All batches of the training data must have the same number of "
            f"positions, got {expected.n_positions} and {here.n_positions}. Pad "
            "all examples to one size, not each batch to its own; classification marks "
            f"the padding with class {likelihood.IGNORED}. With Hugging Face's "
            "collators: DataCollatorForTokenClassification(tokenizer, padding="
            "'max_length', max_length=...), with the length of the longest example."
        )
    return likelihood.target_rows(y, size, here, plan.observation.family)


def _of_all(processes: Processes, buffer: RowBuffer) -> RowBuffer:
    """Return the rows of all processes, or their summaries, in one buffer."""
    states = processes.meet("gradients", (buffer.n_samples, buffer.compressed))
    energy = processes.sum("energy", buffer.energy)
    rows = processes.rows("sampled gradients", buffer.rows)
    both = RowBuffer(buffer.numels, len(rows) + 1, len(rows), rows.dtype, rows.device)
    both.append(rows)
    both.n_samples = sum(n for n, _ in states)
    both.compressed = any(compressed for _, compressed in states)
    both.energy = energy
    return both


def _nystrom(
    plan: FitPlan, buffer: RowBuffer, sketch: Sketch | None, *others: torch.Tensor
) -> tuple[NystromBasis, dict[str, Any]]:
    """Return the top directions of the rows, and their span where it is kept, compared
    with sketches of other gradients."""
    groups = None if sketch is None else sketch(buffer.rows).clone()
    accurate = plan.has_curvature_rows  # whose small eigenvalues are used
    with warnings.catch_warnings():
        if plan.n_eigenvalues == "auto":
            warnings.simplefilter("ignore", RankWarning)
        basis = nystrom_basis(buffer, plan.rank_limit, accurate)
    regression = plan.observation.family.is_regression
    found: dict[str, Any] = {}
    found["complement"] = Complement.PRIOR if regression else Complement.DROP
    if sketch is not None and groups is not None:
        span = sampled_span(groups, sketch, basis)
        if len(others[0]):
            span = span.compared_with(others[0])
        found = {"complement": Complement.MATCHED, "span": span}
    if plan.n_eigenvalues == "auto":
        basis = basis.truncate(int((basis.explained < AUTO_ENERGY).sum()) + 1)
    return basis, found


def _exact(
    buffer: RowBuffer, positions: Positions, both: list[torch.Tensor], start: Fit | None
) -> tuple[NystromBasis, dict[str, Any]]:
    """Return the directions of all rows, and features of the same examples with `both`
    their outputs and targets; those of `start` come before them."""
    f, y = both
    if start is None or start.training is None:
        basis, phi = exact_basis(buffer)
    else:
        old = start.training
        coefficients = positions.outputs(old.phi.flatten(0, 1)).flatten(0, 1)
        coefficients = coefficients.to(buffer.rows.device)
        basis, phi = extend_exact(start.basis, coefficients, buffer.rows)
        f, y = torch.cat([old.f, f]), torch.cat([old.y, y])
    logger.info("exact: rank %d, in %s", basis.rank, basis.directions.dtype)
    phi = positions.rows(phi.to(f.device).unflatten(0, (len(f), -1)))
    training = TrainingRows(f, phi.unflatten(0, (len(f), -1)), y)
    complement = Complement.PRIOR
    return basis, {"complement": complement, "spans_all": True, "training": training}
