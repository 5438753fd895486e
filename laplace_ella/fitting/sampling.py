"""First half of a fit: sample gradients, and compute the directions of the basis."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from laplace_ella.derivatives.trials import decide, linearize
from laplace_ella.errors import RankWarning, SoftmaxWarning, warn_caller
from laplace_ella.fitting.checkpoint import Progress
from laplace_ella.fitting.data import Pairs, Read, draw_pairs
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
from laplace_ella.posterior.span import Sketch, Span, sampled_span
from laplace_ella.support.batches import (
    Positions,
    batch_size,
    has_values,
    map_tensors,
    take,
)
from laplace_ella.support.checks import check_finite
from laplace_ella.support.preserve import autocast_enabled

if TYPE_CHECKING:
    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.fitting.plan import FitPlan

logger = logging.getLogger("laplace_ella")

#: n_eigenvalues="auto": directions until this share of the trace.
AUTO_ENERGY = 0.9

#: Gradients of pairs that were not sampled, to see how much is outside the span.
FEW_OTHERS = 256

#: Examples whose outputs are looked at first, and that a fit keeps to be known by.
FEW_OUTPUTS, FEW_EXAMPLES = 8, 4


def first_look(plan: FitPlan, x: Any, y: torch.Tensor) -> Linearizer:
    """Check model and targets on the first batch, before anything is differentiated."""
    fn, family = plan.fn, plan.observation.family
    linearizer = linearize(fn, plan.layout, plan.dict_key_x, plan.options, x)
    size = batch_size(x, plan.dict_key_x)
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
    data, processes = plan.data, plan.processes
    batches = data.batches(plan.fn.device, "[Sampling gradients]", plan.progress_bar)
    first = next(batches)
    x = first.x
    batches = chain([first], batches)
    n_own = n_examples = data.n_examples or 0
    offset, labels = 0, data.labels
    if processes is not None:
        counts = processes.meet("numbers of examples", n_own)
        n_examples, offset = sum(counts), sum(counts[: processes.rank])
        if labels is not None:
            labels = np.concatenate(processes.meet("labels", labels))
    linearizer = first_look(plan, x, first.y) if start is None else start.linearizer
    n_outputs = math.prod(linearizer.output_shape)
    n_pairs = n_examples * n_outputs
    if start is not None or plan.takes_all(linearizer, n_pairs):
        if start is None:
            linearizer = _in_double(plan, linearizer, x, n_pairs)
        return _read_all(plan, linearizer, x, batches, n_own * n_outputs, start)
    rank = min(plan.rank_limit, plan.subsample_size, n_pairs)
    capacity, keep = plan.buffer_sizes(linearizer, n_pairs)  # before any derivative
    linearizer = decide(linearizer, x, rank)
    rng, n_samples = np.random.default_rng(plan.seed), min(plan.subsample_size, n_pairs)
    few, sketch = 0, None
    if plan.keeps_span and capacity > n_samples:
        few = FEW_OTHERS
        sketch = Sketch.of(linearizer.n_params, n_samples, plan.seed, plan.home)
    elif plan.complement is Complement.MATCHED:
        raise ValueError(UNKNOWN_SPAN)
    drawn = draw_pairs(n_examples, n_outputs, n_samples + few, rng, labels)
    own = slice(offset, offset + n_own)
    pairs, others = (
        drawn[part].by_example().within(own)
        for part in (slice(n_samples), slice(n_samples, None))
    )
    buffer = RowBuffer(
        linearizer.fn.numels, capacity, keep, linearizer.dtype, plan.home
    )
    basis, span = _gather(plan, linearizer, batches, buffer, pairs, others, sketch)
    regression = plan.observation.family.is_regression
    complement = Complement.PRIOR if regression else Complement.DROP
    if span is not None:
        complement = Complement.MATCHED
    fit = _fit_of(plan, linearizer, x, basis, complement=complement, span=span)
    return fit, Progress(fit.sums)


def _fit_of(
    plan: FitPlan, linearizer: Linearizer, x: Any, basis: NystromBasis, **found: Any
) -> Fit:
    """Return a fit without data, its directions in the dtype that was asked for."""
    dtype = plan.options.basis_dtype or basis.directions.dtype
    n_noises = plan.observation.sigma_noise.numel()
    some = take(x, slice(0, FEW_EXAMPLES), batch_size(x, plan.dict_key_x))
    return Fit(
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


def _gather(
    plan: FitPlan,
    linearizer: Linearizer,
    batches: Iterable[Read],
    buffer: RowBuffer,
    pairs: Pairs,
    others: Pairs,
    sketch: Sketch | None,
) -> tuple[NystromBasis, Span | None]:
    """Take the gradients of the drawn pairs, and sketches of the gradients of others,
    in one pass that ends at the last of them."""
    last = max([-1, *pairs.examples[-1:], *others.examples[-1:]])
    finite, beyond = [], []
    for where, x, _, _ in batches:
        if last < where.start:
            break
        for rows in _rows(linearizer, x, pairs.within(where), buffer.capacity):
            try:
                buffer.append(rows.to(plan.home))
            except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
                flags = [*finite, torch.isfinite(buffer.energy)]
                check_finite(flags, "gradients", "while sampling the basis")
                raise
        if sketch is not None:
            for rows in _rows(linearizer, x, others.within(where), buffer.capacity):
                beyond.append(sketch(rows.to(plan.home)))
        finite.append(torch.isfinite(buffer.energy))
    check_finite(finite, "gradients", "while sampling the basis")
    if plan.processes is not None:
        buffer = _of_all(plan.processes, buffer)
        if sketch is not None:
            own = torch.cat([sketch(buffer.rows[:0]), *beyond])
            beyond = [plan.processes.rows("other gradients", own)]
    groups = None if sketch is None else sketch(buffer.rows).clone()
    accurate = plan.has_curvature_rows  # whose small eigenvalues are used
    with warnings.catch_warnings():
        if plan.n_eigenvalues == "auto":
            warnings.simplefilter("ignore", RankWarning)
        basis = nystrom_basis(buffer, plan.rank_limit, accurate)
    span = None
    if sketch is not None and groups is not None:
        span = sampled_span(groups, sketch, basis)
        if sum(map(len, beyond)):
            span = span.compared_with(torch.cat(beyond))
    if plan.n_eigenvalues == "auto":
        basis = basis.truncate(int((basis.explained < AUTO_ENERGY).sum()) + 1)
    return basis, span


def _rows(
    linearizer: Linearizer, x: Any, pairs: Pairs, at_most: int
) -> Iterator[torch.Tensor]:
    """Return the gradients of pairs of a batch, some at a time."""
    if not len(pairs.examples):
        return iter(())
    examples = torch.as_tensor(pairs.examples, device=linearizer.device)
    outputs = torch.as_tensor(pairs.outputs, device=linearizer.device)
    return linearizer.row_parts(x, examples, outputs, at_most)


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


# Exact fits: everything in one pass


def _in_double(
    plan: FitPlan, linearizer: Linearizer, x: Any, n_pairs: int
) -> Linearizer:
    """Return decided derivatives in float64, where the model runs in it and memory
    allows.

    With all gradients in the basis the variance at inputs like the training data is a
    small difference, which single precision loses under weak priors.
    """
    rank, device = min(n_pairs, linearizer.n_params), plan.fn.device
    possible = device.type in ("cpu", "cuda", "meta") and not autocast_enabled(device)
    if linearizer.dtype != torch.float64 and possible:
        double = linearizer.in_dtype(torch.float64)
        try:
            if plan.estimate(double, n_pairs, exact=True).fits:
                return decide(double, x, rank)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            logger.info("derivatives stay in single precision: %s", error)
    return decide(linearizer, x, rank)


def _read_all(
    plan: FitPlan,
    linearizer: Linearizer,
    first: Any,
    batches: Iterable[Read],
    n_pairs: int,
    start: Fit | None,
) -> tuple[Fit, Progress]:
    """Return the fit with the directions of all gradients, and the rows of the same
    pass that its curvature is made of; what `start` spans stays."""
    before = None if start is None else start.training
    if start is not None and before is None:
        raise ValueError(
            "override=False of an exact fit extends its basis, which takes the "
            "features of the data that were fitted, and this fit has not kept them "
            "(there was no room within memory_budget). Fit all data at once, or give "
            "a number of directions."
        )
    positions = linearizer.layout.of(tuple(linearizer.output_shape))
    n_outputs, numels = positions.n_values, linearizer.fn.numels
    buffer = RowBuffer(numels, n_pairs + 1, n_pairs, linearizer.dtype, plan.home)
    parts, finite, n_examples, digest = [], [], 0, ""
    for where, x, targets, digest in batches:  # noqa: B007
        size = where.stop - where.start
        outputs, here = linearizer.outputs(x)
        y = targets_of(plan, targets, size, here, positions)
        pairs = Pairs(*np.divmod(np.arange(size * n_outputs), n_outputs))
        for some in _rows(linearizer, x, pairs, buffer.capacity):
            buffer.append(some.to(plan.home))
        finite.append(torch.isfinite(buffer.energy) & torch.isfinite(outputs).all())
        both = outputs, y.to(outputs.device)
        parts.append([t.unflatten(0, (size, -1)) for t in both])
        n_examples = where.stop
    check_finite(finite, "outputs or derivatives", "of the data")
    f, y = (torch.cat(some) for some in zip(*parts, strict=True))
    if plan.processes is not None:
        buffer = _of_all(plan.processes, buffer)
        f, y = plan.processes.rows("outputs", f), plan.processes.rows("targets", y)
    if start is not None and before is not None:
        old = positions.outputs(before.phi.flatten(0, 1)).flatten(0, 1)
        basis, phi = extend_exact(start.basis, old.to(plan.home), buffer.rows)
        f, y = torch.cat([before.f, f]), torch.cat([before.y, y])
    else:
        basis, phi = exact_basis(buffer)
        dtype = str(linearizer.dtype).removeprefix("torch.")
        logger.info(
            "exact linearised Laplace: all %d gradients, rank %d, in %s",
            *(basis.n_samples, basis.rank, dtype),
        )
    phi = positions.rows(phi.to(f.device).unflatten(0, (len(f), n_outputs)))
    rows = TrainingRows(f, phi.unflatten(0, (len(f), -1)), y)
    found = {"complement": Complement.PRIOR, "spans_all": True, "training": rows}
    fit = _fit_of(plan, linearizer, first, basis, **found)
    done = Progress(fit.sums, n_examples, len(parts), digest)
    return fit, done


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
