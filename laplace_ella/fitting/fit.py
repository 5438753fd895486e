"""Second half of a fit: add up the curvature, and keep the features of classifiers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from laplace_ella.derivatives.backends import Curvature
from laplace_ella.fitting.early_stopping import EarlyStopping
from laplace_ella.fitting.sampling import targets_of
from laplace_ella.posterior import likelihood
from laplace_ella.posterior.fit import CurvatureSum, Fit, TrainingRows
from laplace_ella.support.batches import Positions, chunks
from laplace_ella.support.checks import check_finite

if TYPE_CHECKING:
    from laplace_ella.fitting.checkpoint import Checkpoint
    from laplace_ella.fitting.sampling import FitPlan, Progress

#: Examples whose features are known that are added up at once.
ROWS_AT_ONCE = 512

#: Bytes of the features of training data that classifiers keep, to leave examples out:
#: at most, and at most this share of the memory budget.
KEPT_BYTES, KEPT_SHARE = 2**28, 0.05

#: Outputs (R, C), their features (R, C, K) or what multiplies cotangents (b, n, O) by
#: J(x)V, targets, positions, and the digest of all targets at the end of a batch.
Part = tuple[torch.Tensor, Any, torch.Tensor, Positions, str | None]


def check_stopping(stopping: Any, val_loader: Any) -> tuple[EarlyStopping | None, bool]:
    """Return when a fit evaluates its validation loss, and whether it stops by it."""
    if stopping is None or stopping is False:
        return (None if val_loader is None else EarlyStopping()), False
    if stopping is not True and not isinstance(stopping, EarlyStopping):
        raise TypeError(
            "early_stopping must be True, False or an EarlyStopping(...), got "
            f"{stopping!r}."
        )
    if val_loader is None:
        raise ValueError(
            "early_stopping needs val_loader=. Where there is no validation data, "
            "laplace_ella.augmented_validation(train_loader) makes some."
        )
    return (EarlyStopping() if stopping is True else stopping), True


def add_up(
    plan: FitPlan,
    start: Fit,
    done: Progress,
    *,
    schedule: EarlyStopping | None = None,
    validate: Callable[[Fit], float] | None = None,
    stops: bool = False,
    generator: torch.Generator | None = None,
    checkpoint: Checkpoint | None = None,
) -> Fit:
    """Return the fit with the data of the plan added to its sums, from where it had got
    to. An exact fit adds its training rows, whose features are known; other fits of
    classifiers keep the features, if memory allows, to leave examples out later.

    At the numbers of examples of a `schedule` the loss of the fit so far is recorded;
    if it `stops`, the sums are those of the best one.
    """
    start = replace(start, mode_curvature=None)  # of other data
    if generator is not None and done.generator is not None:
        generator.set_state(done.generator)
    rows = start.training if start.spans_all else None
    # The rows of an exact fit are of all processes already. Of other data each process
    # adds up its own, the first one to what was there.
    processes = plan.processes if rows is None else None
    first = processes is None or processes.rank == 0
    sums, finite = done.sums if first else done.sums.cleared(), []
    before = [start.training] if first and start.training is not None else []
    kept = [] if done.rows is None else [done.rows]
    if rows is None:
        seen = done.sums.n_data - start.sums.n_data
        parts = _keeping(plan, _from_loader(plan, start, done), kept, start.training)
    else:
        seen, parts = 0, _from_rows(plan, start, rows)

    def evaluated(ended: bool = False) -> tuple[Progress, bool]:
        # All processes evaluate together, until the data of all of them have ended.
        check_finite(finite, "outputs or derivatives", "of the data")
        now = sums
        if processes is not None:
            states = processes.meet("numbers of data", (sums.n_data, ended))
            ended = all(each for _, each in states)
            H, loss = processes.sum("H", sums.H), processes.sum("loss", sums.loss)
            now = CurvatureSum(H, loss, sum(n for n, _ in states))
        known = done.history and done.history[-1]["n_data"] == now.n_data
        if schedule is None or validate is None or known:
            return replace(done, sums=now), ended
        loss = validate(replace(start, sums=now))
        if processes is not None:
            loss = processes.first("validation loss", loss)
        history = (*done.history, {"n_data": now.n_data, "loss": loss})
        best = done.best if schedule.waited(history) else now
        return replace(done, sums=now, history=history, best=best), ended

    def enough() -> bool:
        if not stops or schedule is None:
            return False
        return schedule.waited(done.history) >= schedule.patience

    points: Iterator[int] = iter(())  # in numbers of this process
    if schedule is not None:
        size = 1 if processes is None else processes.size
        points = (-(-n // size) for n in schedule.checkpoints())
    for f, psi, y, running, due in _roots(plan, parts, generator, seen, points):
        finite.append(torch.isfinite(f).all() & torch.isfinite(psi).all())
        sums, seen = sums.add(f, psi, y, plan.observation.family), seen + len(f)
        if due:
            done, _ = evaluated()
            if enough():
                break
        if running is not None:
            n_batches = done.n_batches + 1
            done = replace(done, n_batches=n_batches, targets=running)
            if checkpoint is not None and time.monotonic() >= checkpoint.due:
                check_finite(finite, "outputs or derivatives", "of the data")
                state = None if generator is None else generator.get_state()
                now = {"sums": sums, "rows": TrainingRows.joined(kept)}
                checkpoint.save(start, replace(done, generator=state, **now))
    ended = False
    while not ended and not enough():
        done, ended = evaluated(ended=True)
    fit = replace(start, sums=done.sums, history=done.history, training=None)
    if stops and schedule is not None and done.best is not None:
        if not any(math.isfinite(point["loss"]) for point in done.history):
            raise ValueError(
                f"The validation loss was NaN or infinite at all {len(done.history)} "
                "evaluations, so there is no best one to stop at. Check the loss and "
                "the validation data."
            )
        fit = replace(fit, sums=done.best)
    if rows is None:
        rows = _of_all(plan, TrainingRows.joined([*before, *kept]), sums.n_data, stops)
    if rows is not None:
        rows = rows.first(fit.sums.n_data)
        fit = replace(fit, training=rows if rows.phi.nbytes <= plan.budget else None)
    if checkpoint is not None:
        checkpoint.save(fit, replace(done, rows=None), finished=True)
    return fit


def _keeping(
    plan: FitPlan,
    parts: Iterable[Part],
    kept: list[TrainingRows],
    before: TrainingRows | None,
) -> Iterator[Part]:
    """Yield the parts of a classifier's data, whose features are added to what is kept
    until they take too much memory, with those of all processes and from `before`."""
    room = min(KEPT_BYTES, int(KEPT_SHARE * plan.budget))
    room -= 0 if before is None else before.phi.nbytes
    room //= 1 if plan.processes is None else plan.processes.size
    room -= sum(rows.phi.nbytes for rows in kept)
    keeps = not plan.observation.family.is_regression
    for part in parts:
        f, of, y, here, _ = part
        if keeps and isinstance(of, torch.Tensor):
            tensors = (t.unflatten(0, (-1, here.n_positions)) for t in (f, of, y))
            kept.append(TrainingRows(*tensors))
            room -= of.nbytes
            if room < 0:
                keeps = False
                kept.clear()
        yield part


def _of_all(
    plan: FitPlan, own: TrainingRows | None, n_data: int, stops: bool
) -> TrainingRows | None:
    """Return the kept rows of all processes, None where some of the data were not kept
    or are not known to be in the sums."""
    complete, processes = own is not None and len(own.f) >= n_data, plan.processes
    if processes is None:
        return own if complete else None
    if stops or not all(processes.meet("kept features", complete)) or own is None:
        return None
    names = ("f", "phi", "y")
    return TrainingRows(*(processes.rows(n, getattr(own, n)) for n in names))


def _roots(
    plan: FitPlan,
    parts: Iterable[Part],
    generator: torch.Generator | None,
    seen: int,
    points: Iterator[int],
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, str | None, bool]]:
    """Yield outputs (b, S, C), ψ (b, ..., K) whose squares add up to the curvature, and
    targets (b, S, ...), cut where an evaluation is due; the digest of all targets at
    the end of a batch, and whether an evaluation is due.

    The squares of cotangents estimate the curvature; of the empirical Fisher there is
    one, the gradient of the loss, all positions together.
    """
    family, n = plan.observation.family, int(plan.stochastic)
    point = next((n for n in points if n > seen), math.inf)
    for flat, of, rows, positions, running in parts:
        known = likelihood.observed(rows, family)
        if isinstance(of, torch.Tensor):
            root = likelihood.curvature_root(flat, of, family)
        elif plan.curvature is Curvature.EMPIRICAL_FISHER:
            root = likelihood.target_cotangents(flat, rows, family).unsqueeze(-1)
        else:
            root = likelihood.sample_cotangents(flat, family, n, generator)
        root = root if known is None else root * known[:, None, None]
        if isinstance(of, torch.Tensor):
            psi = root.unflatten(0, (-1, positions.n_positions))
        else:
            psi = of(positions.outputs(root).mT).double()
        f, y = (t.unflatten(0, (-1, positions.n_positions)) for t in (flat, rows))
        at = 0
        while at < len(f):  # what is cut is differentiated once
            end = int(min(len(f), at + point - seen))
            part, at, seen = slice(at, end), end, seen + end - at
            due, last = seen == point, end == len(f)
            if due:
                point = next((n for n in points if n > seen), math.inf)
            yield f[part], psi[part], y[part], running if last else None, due


def _from_loader(plan: FitPlan, start: Fit, done: Progress) -> Iterator[Part]:
    """Differentiate the batches of a loader that are not done yet, in parts that memory
    has room for."""
    linearizer, V = start.linearizer, start.basis.directions
    expected = linearizer.layout.of(start.output_shape)
    how = start.mean.device, "[Computing Hessian]", plan.progress_bar
    batches = plan.data.batches(*how, done.n_batches, done.targets)
    for where, x, targets, running in batches:
        size, first, rows = where.stop - where.start, 0, None
        for part in linearizer.parts(x, 2 * len(V)):
            if plan.is_sampled:
                f, here = linearizer.outputs(part)
                of = partial(linearizer.project, part, directions=V)
            else:
                features = linearizer.features(part, V)
                f, of, here = features.f, features.phi, features.positions
            if rows is None:
                rows = targets_of(plan, targets, size, here, expected).to(f.device)
            y, first = rows[first : first + len(f)], first + len(f)
            yield f, of, y, here, running if first == len(rows) else None


def _from_rows(plan: FitPlan, start: Fit, rows: TrainingRows) -> Iterator[Part]:
    """Yield the same from rows whose features are known."""
    positions = start.linearizer.layout.of(start.output_shape)
    for part in chunks(len(rows.f), ROWS_AT_ONCE):
        f, of, y = (t[part].flatten(0, 1) for t in (rows.f, rows.phi, rows.y))
        if plan.is_sampled:
            of = partial(torch.matmul, other=positions.outputs(of).double())
        yield f, of, y, positions, None
