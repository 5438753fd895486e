"""Second half of a fit: add up the curvature, all or to the best validation loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from laplace_ella.derivatives.backends import Curvature
from laplace_ella.fitting.sampling import targets_of
from laplace_ella.posterior import likelihood
from laplace_ella.posterior.fit import CurvatureSum, Fit, TrainingRows
from laplace_ella.support.checks import check_finite

if TYPE_CHECKING:
    from laplace_ella.fitting.checkpoint import Checkpoint, Progress
    from laplace_ella.fitting.early_stopping import EarlyStopping
    from laplace_ella.fitting.plan import FitPlan
    from laplace_ella.support.batches import Positions

#: Examples whose features are known that are added up at once.
ROWS_AT_ONCE = 512

#: Outputs (b, S, C), ψ (b, ..., K) whose squares add up to the curvature, targets
#: (b, S, ...), and the running digest of all targets at the end of a batch.
Added = tuple[torch.Tensor, torch.Tensor, torch.Tensor, str | None]


def add_up(
    plan: FitPlan,
    start: Fit,
    done: Progress,
    rows: TrainingRows | None = None,
    *,
    schedule: EarlyStopping | None = None,
    validate: Callable[[Fit], float] | None = None,
    stops: bool = False,
    generator: torch.Generator | None = None,
    checkpoint: Checkpoint | None = None,
) -> Fit:
    """Return the fit with the data of the plan added to its sums, from where it had got
    to, or with `rows`, whose features are known.

    At the numbers of examples of a `schedule` the loss of the fit so far is recorded;
    if it `stops`, the sums are those of the best one.
    """
    start = replace(start, mode_curvature=None)  # of other data
    if generator is not None and done.generator is not None:
        generator.set_state(done.generator)
    if rows is None:
        processes, seen = plan.processes, done.n_examples
        batches = _from_loader(plan, start, done, generator)
    else:  # of all processes already
        processes, seen = None, 0
        batches = _from_rows(plan, start, rows, generator)
    size = 1 if processes is None else processes.size
    # Each process adds up its own data; the first one what was there.
    first = processes is None or processes.rank == 0
    sums, finite = done.sums if first else done.sums.cleared(), []
    times = iter(()) if schedule is None else schedule.checkpoints()
    times = (-(-n // size) for n in times)
    due = next((n for n in times if n > seen), math.inf)

    def evaluated(ended: bool = False) -> tuple[Progress, bool]:
        # All processes evaluate together, until the data of all of them have ended.
        check_finite(finite, "outputs or derivatives", "of the data")
        now, history = sums, done.history
        if processes is not None:
            states = processes.meet("numbers of data", (sums.n_data, ended))
            ended = all(each for _, each in states)
            H, loss = processes.sum("H", sums.H), processes.sum("loss", sums.loss)
            now = CurvatureSum(H, loss, sum(n for n, _ in states))
        if schedule is None or validate is None:
            return replace(done, sums=now), ended
        if history and history[-1]["n_data"] == now.n_data:
            return replace(done, sums=now), ended
        loss = validate(replace(start, sums=now))
        if processes is not None:
            loss = processes.first("validation loss", loss)
        history = (*history, {"n_data": now.n_data, "loss": loss})
        better = schedule.waited(history) == 0
        best = now if better else done.best
        return replace(done, sums=now, history=history, best=best), ended

    def enough() -> bool:
        if not stops or schedule is None:
            return False
        return schedule.waited(done.history) >= schedule.patience

    for f, psi, y, running in batches:
        finite.append(torch.isfinite(f).all() & torch.isfinite(psi).all())
        at = 0
        while at < len(f) and not enough():
            part = slice(at, int(min(len(f), at + due - seen)))
            sums = sums.add(f[part], psi[part], y[part], plan.observation.family)
            seen, at = seen + part.stop - at, part.stop
            if seen == due:  # a batch that is divided is differentiated once
                done, _ = evaluated()
                due = next((n for n in times if n > seen), math.inf)
        if enough():
            break
        if running is not None:
            n_batches = done.n_batches + 1
            done = replace(done, n_examples=seen, n_batches=n_batches, targets=running)
            if checkpoint is not None and time.monotonic() >= checkpoint.due:
                check_finite(finite, "outputs or derivatives", "of the data")
                state = None if generator is None else generator.get_state()
                checkpoint.save(start, replace(done, sums=sums, generator=state))
    ended = False
    while not ended and not enough():
        done, ended = evaluated(ended=True)
    fit = replace(start, sums=done.sums, history=done.history, training=None)
    if stops and schedule is not None and done.best is not None:
        if not math.isfinite(min(schedule.scores(done.history))):
            raise ValueError(
                f"The validation loss was NaN or infinite at all {len(done.history)} "
                "evaluations, so there is no best one to stop at. Check the loss and "
                "the validation data."
            )
        fit = replace(fit, sums=done.best)
    if rows is not None and rows is start.training:
        kept = rows.first(fit.sums.n_data)
        if kept.phi.nbytes <= plan.available():
            fit = replace(fit, training=kept)
    if checkpoint is not None:
        checkpoint.save(fit, done, finished=True)
    return fit


def _from_loader(
    plan: FitPlan, start: Fit, done: Progress, generator: torch.Generator | None
) -> Iterator[Added]:
    """Differentiate the batches of a loader that are not done yet, in parts that memory
    has room for."""
    linearizer, V = start.linearizer, start.basis.directions
    expected = linearizer.layout.of(start.output_shape)
    how = start.mean.device, "[Computing Hessian]", plan.progress_bar
    batches = plan.data.batches(*how, done.n_batches, done.targets)
    for where, x, targets, running in batches:
        size, first, rows = where.stop - where.start, 0, None
        for part in linearizer.parts(x, 2 * len(V)):
            phi = None
            if _is_sampled(plan):
                f, here = linearizer.outputs(part)
            else:
                features = linearizer.features(part, V)
                f, phi, here = features.f, features.phi, features.positions
            if rows is None:
                rows = targets_of(plan, targets, size, here, expected).to(f.device)
            y, first = rows[first : first + len(f)], first + len(f)
            if phi is None:
                cotangents = _cotangents(plan, f, y, here, generator)
                psi = linearizer.project(part, cotangents, V).double()
            else:
                psi = _curvature_root(plan, f, phi, y, here)
            f, y = (t.unflatten(0, (-1, here.n_positions)) for t in (f, y))
            yield f, psi, y, running if first == len(rows) else None


def _from_rows(
    plan: FitPlan, start: Fit, rows: TrainingRows, generator: torch.Generator | None
) -> Iterator[Added]:
    """Yield the same from rows whose features are known."""
    positions = start.linearizer.layout.of(start.output_shape)
    parts = (t.split(ROWS_AT_ONCE) for t in (rows.f, rows.phi, rows.y))
    for f, phi, y in zip(*parts, strict=True):
        flat, features, targets = f.flatten(0, 1), phi.flatten(0, 1), y.flatten(0, 1)
        if _is_sampled(plan):
            cotangents = _cotangents(plan, flat, targets, positions, generator)
            psi = cotangents.double() @ positions.outputs(features).double()
        else:
            psi = _curvature_root(plan, flat, features, targets, positions)
        yield f, psi, y, None


def _is_sampled(plan: FitPlan) -> bool:
    """Return whether few gradients per example make the curvature, not features."""
    empirical = plan.curvature is Curvature.EMPIRICAL_FISHER
    return empirical or bool(plan.stochastic)


def _cotangents(
    plan: FitPlan,
    f: torch.Tensor,
    y: torch.Tensor,
    positions: Positions,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Return cotangents `(b, n, O)` whose squares estimate the curvature; of the
    empirical Fisher the gradient of the loss, all positions together."""
    family = plan.observation.family
    if plan.curvature is Curvature.EMPIRICAL_FISHER:
        cotangents = likelihood.target_cotangents(f, y, family).unsqueeze(-1)
    else:
        n = int(plan.stochastic)
        cotangents = likelihood.sample_cotangents(f, family, n, generator)
    known = likelihood.observed(y, family)
    if known is not None:
        cotangents = cotangents * known[:, None, None]
    return positions.outputs(cotangents).mT


def _curvature_root(
    plan: FitPlan,
    f: torch.Tensor,
    phi: torch.Tensor,
    y: torch.Tensor,
    positions: Positions,
) -> torch.Tensor:
    """Return ψ `(b, S, C, K)`, zero where there is no target."""
    psi = likelihood.curvature_root(f, phi, plan.observation.family)
    known = likelihood.observed(y, plan.observation.family)
    psi = psi if known is None else psi * known[:, None, None]
    return psi.unflatten(0, (-1, positions.n_positions))
