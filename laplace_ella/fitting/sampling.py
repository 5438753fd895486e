"""Sample the gradients of a model, and compute the directions of the basis."""

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

from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.derivatives.trials import decide, linearize
from laplace_ella.errors import RankWarning, SoftmaxWarning, warn_caller
from laplace_ella.fitting.checkpoint import Progress, plain_inputs, remaining_batches
from laplace_ella.fitting.data import Pairs, TrainingData, draw_others, draw_pairs
from laplace_ella.fitting.plan import AUTO_ENERGY, FEW_OTHERS, FitPlan
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
    take,
)
from laplace_ella.support.checks import check_finite

if TYPE_CHECKING:
    from laplace_ella.fitting.checkpoint import Checkpoint
    from laplace_ella.fitting.distributed import Processes

__all__ = ["digested", "extend_basis", "first_look", "sample_basis", "targets_of"]

logger = logging.getLogger("laplace_ella")

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


# The basis


def sample_basis(
    plan: FitPlan,
    data: TrainingData,
    processes: Processes | None = None,
    checkpoint: Checkpoint | None = None,
    progress_bar: bool = False,
) -> tuple[Fit, Progress]:
    """Return a fit without data, and how far it read: draw M pairs (x, i), or take all,
    and compute the directions of their gradients.

    Taking all, outputs and targets of the same batches are kept as training rows.
    """
    batches = data.batches(plan.fn.device, "[Sampling gradients]", progress_bar)
    first = next(batches)
    _, x, y = first
    n_own = n_examples = data.n_examples or 0
    offset, labels = 0, data.labels
    if processes is not None:
        counts = processes.meet("numbers of examples", n_own)
        n_examples, offset = sum(counts), sum(counts[: processes.rank])
        if labels is not None:
            labels = np.concatenate(processes.meet("labels", labels))
    linearizer = first_look(plan, x, y)
    n_outputs = math.prod(linearizer.output_shape)
    n_pairs = n_examples * n_outputs
    exact = plan.takes_all(linearizer, n_pairs)
    if exact:
        linearizer = _in_double(plan, linearizer, x, n_pairs)
    else:
        rank = min(plan.rank_limit, plan.subsample_size, n_pairs)
        linearizer = decide(linearizer, x, rank)
    examples = take(x, slice(0, FEW_EXAMPLES), batch_size(x, plan.dict_key_x))
    fit = Fit(
        basis=_no_basis(linearizer),
        sums=CurvatureSum.zero(0, 1, linearizer.device),
        output_shape=tuple(linearizer.output_shape),
        mean=plan.fn.flat(),
        dtype=linearizer.dtype,
        complement=Complement.DROP,
        curvature_rows=plan.has_curvature_rows,
        linearizer=linearizer,
        examples=plain_inputs(examples),
    )
    batches = chain([first], batches)
    if exact:
        return _read_all(plan, fit, batches, n_own * n_outputs, processes, checkpoint)
    rng = np.random.default_rng(plan.seed)
    pairs = draw_pairs(n_examples, n_outputs, plan.subsample_size, rng, labels)
    capacity, keep = plan.buffer_sizes(linearizer, n_pairs)
    n_samples, sketch, others = len(pairs.examples), None, pairs.within(slice(0, 0))
    if plan.keeps_span and capacity > n_samples:
        sketch = Sketch.of(linearizer.n_params, n_samples, plan.seed, plan.home)
        others = draw_others(n_examples, n_outputs, pairs, FEW_OTHERS, rng)
    elif plan.complement is Complement.MATCHED:
        raise ValueError(UNKNOWN_SPAN)
    own = slice(offset, offset + n_own)
    basis, span = _gather(
        plan,
        linearizer,
        batches,
        RowBuffer(linearizer.fn.numels, capacity, keep, fit.dtype, plan.home),
        (pairs.within(own), others.within(own)),
        sketch,
        processes,
    )
    regression = plan.observation.family.is_regression
    complement = Complement.PRIOR if regression else Complement.DROP
    sums = CurvatureSum.zero(basis.rank, _n_noises(plan), linearizer.device)
    fit = replace(
        fit,
        basis=basis,
        sums=sums,
        complement=complement if span is None else Complement.MATCHED,
        span=span,
        complete=n_samples == n_pairs and fit.curvature_rows,
    )
    return fit, Progress(sums)


def _n_noises(plan: FitPlan) -> int:
    return plan.observation.sigma_noise.numel()


def _no_basis(linearizer: Linearizer) -> NystromBasis:
    none = torch.zeros(0, linearizer.n_params, device=linearizer.device)
    return NystromBasis(none, none.double()[:, 0], 0, 0.0, "")


def _gather(
    plan: FitPlan,
    linearizer: Linearizer,
    batches: Iterable[tuple[slice, Any, torch.Tensor]],
    buffer: RowBuffer,
    drawn: tuple[Pairs, Pairs],
    sketch: Sketch | None,
    processes: Processes | None,
) -> tuple[NystromBasis, Span | None]:
    """Take the gradients of the drawn pairs, and sketches of the gradients of others,
    in one pass that ends at the last of them."""
    pairs, others = drawn
    both = np.concatenate([pairs.examples, others.examples])
    last = int(both.max()) if len(both) else -1
    finite, beyond, reached = [], [], -1
    for where, x, _ in batches:
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
        reached = where.stop - 1
    if reached < last:
        raise ValueError(
            f"The loader yielded {reached + 1} examples, and at least {last + 1} were "
            "expected from its length or a pass before. Pass a loader whose every pass "
            "starts anew."
        )
    check_finite(finite, "gradients", "while sampling the basis")
    if processes is not None:
        buffer = _of_all(processes, buffer)
        beyond = [processes.rows("other gradients", torch.cat(beyond))] * bool(beyond)
    groups = None if sketch is None else sketch.of_many(buffer.rows)
    accurate = plan.has_curvature_rows  # whose small eigenvalues are used
    with warnings.catch_warnings():
        if plan.n_eigenvalues == "auto":
            warnings.simplefilter("ignore", RankWarning)
        basis = nystrom_basis(buffer, plan.rank_limit, accurate)
    span = None
    if sketch is not None and groups is not None:
        span = sampled_span(groups, sketch, basis)
        if beyond:
            span = span.compared_with(torch.cat(beyond))
    if plan.n_eigenvalues == "auto":
        basis = basis.truncate(int((basis.explained < AUTO_ENERGY).sum()) + 1)
    return _converted(plan, basis), span


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


def _converted(plan: FitPlan, basis: NystromBasis) -> NystromBasis:
    """Return the basis in the dtype that was asked for."""
    dtype = plan.options.basis_dtype or basis.directions.dtype
    return replace(basis, directions=basis.directions.to(dtype))


# Exact fits: everything in one pass


def _in_double(
    plan: FitPlan, linearizer: Linearizer, x: Any, n_pairs: int
) -> Linearizer:
    """Return decided derivatives in float64, where the model runs in it and memory
    allows.

    With all gradients in the basis the variance at inputs like the training data is a
    small difference, which single precision loses under weak priors.
    """
    rank = min(n_pairs, linearizer.n_params)
    if linearizer.dtype != torch.float64 and plan.may_be_double():
        double = linearizer.in_dtype(torch.float64)
        try:
            if plan.estimate_exact(double, n_pairs).fits:
                return decide(double, x, rank)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            logger.info("derivatives stay in single precision: %s", error)
    return decide(linearizer, x, rank)


def _read_all(
    plan: FitPlan,
    fit: Fit,
    batches: Iterable[tuple[slice, Any, torch.Tensor]],
    n_pairs: int,
    processes: Processes | None,
    checkpoint: Checkpoint | None,
) -> tuple[Fit, Progress]:
    """Return the fit with the directions of all gradients, and the rows of the same
    pass that its curvature is made of; what it spans already stays."""
    linearizer = fit.linearizer
    positions = linearizer.layout.of(fit.output_shape)
    n_outputs, done = positions.n_values, Progress(fit.sums)
    buffer = RowBuffer(
        linearizer.fn.numels, n_pairs + 1, n_pairs, linearizer.dtype, plan.home
    )
    f, y, finite = [], [], []
    for where, x, targets, running in digested(batches, done, checkpoint):
        size = where.stop - where.start
        outputs, here = linearizer.outputs(x)
        rows = targets_of(plan, targets, size, here, positions)
        pairs = Pairs(*np.divmod(np.arange(size * n_outputs), n_outputs))
        for some in _rows(linearizer, x, pairs, buffer.capacity):
            buffer.append(some.to(plan.home))
        finite.append(torch.isfinite(buffer.energy) & torch.isfinite(outputs).all())
        f.append(outputs.unflatten(0, (size, -1)))
        y.append(rows.to(outputs.device).unflatten(0, (size, -1)))
        done = replace(
            done,
            n_examples=where.stop,
            n_batches=done.n_batches + 1,
            targets=running,
        )
    check_finite(finite, "outputs or derivatives", "of the data")
    f, y = torch.cat(f), torch.cat(y)
    if processes is not None:
        buffer = _of_all(processes, buffer)
        f, y = processes.rows("outputs", f), processes.rows("targets", y)
    if fit.spans_all and fit.training is not None:
        before = fit.training
        coefficients = positions.outputs(before.phi.flatten(0, 1)).flatten(0, 1)
        coefficients = coefficients.to(plan.home)
        basis, coefficients = extend_exact(fit.basis, coefficients, buffer.rows)
        f, y = torch.cat([before.f, f]), torch.cat([before.y, y])
    else:
        basis, coefficients = exact_basis(buffer)
        logger.info(
            "exact linearised Laplace: all %d gradients, rank %d, in %s",
            basis.n_samples,
            basis.rank,
            str(linearizer.dtype).removeprefix("torch."),
        )
    phi = coefficients.to(f.device).unflatten(0, (len(f), n_outputs))
    phi = positions.rows(phi).unflatten(0, (len(f), -1))
    sums = CurvatureSum.zero(basis.rank, _n_noises(plan), linearizer.device)
    fit = replace(
        fit,
        basis=_converted(plan, basis),
        sums=sums,
        dtype=linearizer.dtype,
        complement=Complement.PRIOR,
        spans_all=True,
        training=TrainingRows(f, phi, y),
        complete=fit.curvature_rows,
    )
    return fit, replace(done, sums=sums)


def extend_basis(
    plan: FitPlan,
    data: TrainingData,
    start: Fit,
    processes: Processes | None = None,
    checkpoint: Checkpoint | None = None,
    progress_bar: bool = False,
) -> tuple[Fit, Progress]:
    """Return an exact fit that spans further data as well, with nothing added up."""
    if start.training is None:
        raise ValueError(
            "override=False of an exact fit extends its basis, which takes the "
            "features of the data that were fitted, and this fit has not kept them "
            "(there was no room within memory_budget, or features were added from a "
            "cache). Fit all data at once, or give a number of directions."
        )
    batches = data.batches(plan.fn.device, "[Sampling gradients]", progress_bar)
    n_pairs = (data.n_examples or 0) * math.prod(start.output_shape)
    return _read_all(plan, start, batches, n_pairs, processes, checkpoint)


# What passes over the data have in common


def digested(
    batches: Iterable[tuple[slice, Any, torch.Tensor]],
    done: Progress,
    checkpoint: Checkpoint | None,
) -> Iterator[tuple[slice, Any, torch.Tensor, str]]:
    """Yield the batches that are not done yet with the running digest of their
    targets, where there is a file to keep it."""
    if checkpoint is not None:
        yield from remaining_batches(iter(batches), done)
        return
    for where, x, y in batches:
        yield where, x, y, ""


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
