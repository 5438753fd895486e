"""Add up the curvature of the data, up to the end or to the best validation loss."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from laplace_ella.fitting.checkpoint import Progress
from laplace_ella.fitting.sampling import digested, targets_of
from laplace_ella.posterior import likelihood
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.fit import CurvatureSum, Fit, TrainingRows
from laplace_ella.support.checks import check_finite

if TYPE_CHECKING:
    from laplace_ella.fitting.checkpoint import Checkpoint
    from laplace_ella.fitting.data import TrainingData
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.fitting.early_stopping import EarlyStopping
    from laplace_ella.fitting.plan import FitPlan
    from laplace_ella.posterior.posterior import SubspacePosterior
    from laplace_ella.tuning.cache import FeatureCache
    from laplace_ella.tuning.validation import Validator

__all__ = ["add_cache", "add_up"]

#: Examples of an exact fit that are added up at once.
ROWS_AT_ONCE = 512


def add_up(
    plan: FitPlan,
    data: TrainingData,
    start: Fit,
    done: Progress,
    *,
    validator: Validator | None = None,
    posterior: SubspacePosterior | None = None,
    schedule: EarlyStopping | None = None,
    stops: bool = False,
    generator: torch.Generator | None = None,
    processes: Processes | None = None,
    checkpoint: Checkpoint | None = None,
    progress_bar: bool = False,
) -> Fit:
    """Return the fit with the data added to its sums, from where it had got to.

    With a `validator` the loss of `posterior`, with the sums so far as its curvature,
    is recorded as data are added; if it `stops`, the sums are those of the best value.
    """
    if generator is not None and done.generator is not None:
        generator.set_state(done.generator)
    rows = start.training if start.spans_all else None
    if rows is not None:  # of all processes already
        processes, batches = None, _from_rows(plan, start, rows, generator)
    else:
        read = data.batches(plan.fn.device, "[Computing Hessian]", progress_bar)
        read = digested(read, done, checkpoint)
        batches = _from_loader(plan, start, read, generator)
    sums, seen, finite = done.sums, done.n_examples * (rows is None), []
    due, save_at, size = math.inf, 0.0, 1 if processes is None else processes.size
    if processes is not None:  # each adds up its own
        zero = torch.zeros_like
        sums = CurvatureSum(zero(sums.H), zero(sums.loss), 0)
    times = iter(()) if schedule is None else schedule.checkpoints()
    times = (-(-n // size) for n in times)
    due = next((n for n in times if n > seen), math.inf)

    def total() -> CurvatureSum:
        if processes is None:
            return sums
        return CurvatureSum(
            start.sums.H + processes.sum("curvature", sums.H),
            start.sums.loss + processes.sum("loss", sums.loss),
            start.sums.n_data + sum(processes.meet("numbers of data", sums.n_data)),
        )

    def evaluated() -> Progress:
        check_finite(finite, "outputs or derivatives", "of the data")
        now = total()
        if validator is None or posterior is None or schedule is None:
            return replace(done, sums=now)
        if done.history and done.history[-1]["n_data"] == now.n_data:
            return replace(done, sums=now)
        H, _ = plan.observation.weigh(now.H)
        tail = replace(start, sums=now).tail
        value = validator(posterior.with_(H=H, tail=tail))
        if processes is not None:
            value = processes.first("validation loss", value)
        signed = -value if schedule.maximize else value
        signed = signed if math.isfinite(value) else math.inf
        better = done.best is None or signed < done.best[0]
        return replace(
            done,
            sums=now,
            history=(*done.history, {"n_data": now.n_data, "loss": value}),
            best=(signed, now) if better else done.best,
            waited=0 if better else done.waited + 1,
        )

    def enough() -> bool:
        return stops and schedule is not None and done.waited >= schedule.patience

    for f, psi, y, running in batches:
        finite.append(torch.isfinite(f).all() & torch.isfinite(psi).all())
        first = 0
        while first < len(f) and not enough():
            part = slice(first, int(min(len(f), first + due - seen)))
            sums = sums.add(f[part], psi[part], y[part], plan.observation.family)
            seen, first = seen + part.stop - first, part.stop
            if seen == due:  # a batch that is divided is differentiated once
                done = evaluated()
                due = next((n for n in times if n > seen), math.inf)
        if enough():
            break
        if running is not None:
            state = None if generator is None else generator.get_state()
            done = replace(
                done,
                sums=sums,
                n_examples=seen,
                n_batches=done.n_batches + 1,
                targets=running,
                generator=state,
            )
            if checkpoint is not None and time.monotonic() >= save_at:
                check_finite(finite, "outputs or derivatives", "of the data")
                save_at = checkpoint.save(start, done)
    if processes is not None and schedule is not None:  # others may have more data
        longest = max(processes.meet("longest part", seen))
        while due <= longest and not enough():
            done = evaluated()
            due = next(times)
    done = evaluated()
    sums = done.sums
    if stops and done.best is not None:
        if not math.isfinite(done.best[0]):
            raise ValueError(
                f"The validation loss was NaN or infinite at all {len(done.history)} "
                "evaluations, so there is no best one to stop at. Check the loss and "
                "the validation data."
            )
        sums = done.best[1]
    if rows is not None:
        n = sums.n_data
        rows = TrainingRows(rows.f[:n], rows.phi[:n], rows.y[:n])
        rows = rows if rows.phi.nbytes <= plan.available() else None
    fit = replace(start, sums=sums, history=done.history, training=rows)
    if checkpoint is not None:
        checkpoint.save(fit, done, finished=True)
    return fit


#: Outputs (b, S, C), ψ (b, ..., K) whose squares add up to the curvature, targets
#: (b, S, ...), and the running digest of all targets at the end of a batch.
Added = tuple[torch.Tensor, torch.Tensor, torch.Tensor, str | None]


def _from_loader(
    plan: FitPlan,
    start: Fit,
    batches: Iterable[tuple[slice, Any, torch.Tensor, str]],
    generator: torch.Generator | None,
) -> Iterator[Added]:
    """Differentiate the batches of a loader, in parts that memory has room for."""
    linearizer, directions = start.linearizer, start.basis.directions
    expected = linearizer.layout.of(start.output_shape)
    sampled = plan.is_empirical or plan.stochastic
    for where, x, targets, running in batches:
        size, first = where.stop - where.start, 0
        rows = None
        for part in linearizer.parts(x, 2 * start.basis.rank):
            features = None
            if sampled:
                f, positions = linearizer.outputs(part)
            else:
                features = linearizer.features(part, directions)
                f, positions = features.f, features.positions
            if rows is None:
                rows = targets_of(plan, targets, size, positions, expected).to(f.device)
            y, first = rows[first : first + len(f)], first + len(f)
            if features is None:
                cotangents = _cotangents(plan, f, y, generator)
                cotangents = positions.outputs(cotangents).mT  # (b, n, O)
                psi = linearizer.project(part, cotangents, directions).double()
            else:
                psi = _curvature_root(plan, f, features.phi, y)
                psi = psi.unflatten(0, (-1, positions.n_positions))
            f, y = (t.unflatten(0, (-1, positions.n_positions)) for t in (f, y))
            yield f, psi, y, running if first == len(rows) else None


def _from_rows(
    plan: FitPlan, start: Fit, rows: TrainingRows, generator: torch.Generator | None
) -> Iterator[Added]:
    """Yield the same from the training rows of an exact fit."""
    positions = start.linearizer.layout.of(start.output_shape)
    parts = (t.split(ROWS_AT_ONCE) for t in (rows.f, rows.phi, rows.y))
    for f, phi, y in zip(*parts, strict=True):
        flat, targets, features = f.flatten(0, 1), y.flatten(0, 1), phi.flatten(0, 1)
        if plan.is_empirical or plan.stochastic:
            cotangents = _cotangents(plan, flat, targets, generator)
            cotangents = positions.outputs(cotangents).mT.double()  # (b, n, O)
            psi = cotangents @ positions.outputs(features)
        else:
            psi = _curvature_root(plan, flat, features, targets)
            psi = psi.unflatten(0, (len(f), -1))
        yield f, psi, y, None


def _cotangents(
    plan: FitPlan, f: torch.Tensor, y: torch.Tensor, generator: torch.Generator | None
) -> torch.Tensor:
    """Return cotangents `(R, C, n)` whose squares estimate the curvature; of the
    empirical Fisher the gradient of the loss, all positions together."""
    family = plan.observation.family
    if plan.is_empirical:
        cotangents = likelihood.target_cotangents(f, y, family).unsqueeze(-1)
    else:
        n = int(plan.stochastic)
        cotangents = likelihood.sample_cotangents(f, family, n, generator)
    known = likelihood.observed(y, family)
    return cotangents if known is None else cotangents * known[:, None, None]


def _curvature_root(
    plan: FitPlan, f: torch.Tensor, phi: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return ψ `(R, C, K)` of rows, zero where there is no target."""
    psi = likelihood.curvature_root(f, phi, plan.observation.family)
    known = likelihood.observed(y, plan.observation.family)
    return psi if known is None else psi * known[:, None, None]


def add_cache(
    plan: FitPlan, cache: FeatureCache, start: Fit, posterior: SubspacePosterior
) -> Fit:
    """Return the fit with cached features and their targets added to its sums."""
    plain = posterior.with_(complement=Complement.DROP)
    cache = cache.serving(plain).top(None).to(start.sums.H.device)
    family, sums = plan.observation.family, start.sums
    for part in cache.batches(ROWS_AT_ONCE):
        if plan.is_empirical:
            c = likelihood.target_cotangents(part.f_mu, part.targets, family)
            psi = c.unsqueeze(1) @ part.phi.double()  # (R, 1, K)
        else:
            psi = likelihood.curvature_root(part.f_mu, part.phi, family).unsqueeze(1)
        f, y = part.f_mu.unsqueeze(1), part.targets.unsqueeze(1)
        sums = sums.add(f, psi, y, family)
    return replace(start, sums=sums, history=(), training=None)
