"""From a loader to one frozen fit: sample the basis, then add up the curvature."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import one_hot

from laplace_ella.derivatives.backends import Curvature
from laplace_ella.derivatives.probe import Probe
from laplace_ella.derivatives.row_passes import Room, no_room
from laplace_ella.errors import RankWarning, SoftmaxWarning, warn_caller
from laplace_ella.fitting.data import TrainingData
from laplace_ella.fitting.gathering import Gathered
from laplace_ella.fitting.joint import (
    common_probe,
    joint_sums,
    own_generator,
)
from laplace_ella.fitting.memory import (
    check_memory,
    sketch_sizes,
)
from laplace_ella.fitting.plan import AUTO_ENERGY, FEW_OTHERS, Planner
from laplace_ella.fitting.progress import Added, Evaluations, Progress, Sampled
from laplace_ella.fitting.sampling import Pairs
from laplace_ella.fitting.shared import SharedData
from laplace_ella.fitting.stopping import EarlyStopping
from laplace_ella.posterior import likelihood
from laplace_ella.posterior.basis import NystromBasis, RowSketch
from laplace_ella.posterior.fit import Fit, Sums
from laplace_ella.posterior.likelihood import Family
from laplace_ella.posterior.outside import Complement
from laplace_ella.posterior.shared_basis import SharedRowSketch
from laplace_ella.posterior.subspace import UNKNOWN_SPAN, SubspacePosterior
from laplace_ella.support.batches import batch_size, has_values, take
from laplace_ella.support.checks import check_finite
from laplace_ella.support.disk import copy_on_disk
from laplace_ella.support.fingerprint import digest
from laplace_ella.support.layout import Positions
from laplace_ella.support.loaders import Rest, loader_batches
from laplace_ella.support.preserve import autocast_enabled
from laplace_ella.support.span import Sketch
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.validation import Validator

__all__ = ["Fitter"]

logger = logging.getLogger("laplace_ella")

#: Examples whose targets, and whose outputs, are looked at before anything expensive.
FIRST_LOOK, FEW_OUTPUTS = 32, 8

SAMPLING = "while sampling the basis"

#: Of fits that keep none.
NO_RECORD = Progress()

NO_BATCH = "The loader yielded no batch; ELLA needs at least one example."


@dataclass(frozen=True)
class Fitter(Planner):
    """Fits: from data to values.

    The methods take data and values and return values; nothing is remembered. They are
    to be called with the user's state preserved, see `support.preserve`.
    """

    def batches(
        self, loader: Any, description: str = "", progress_bar: bool = False
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        """Inputs on the device, and targets; memory is kept from batch to batch."""
        shown = progress_bar and self.collective.rank == 0
        with self.linearizer.kept_memory():
            yield from loader_batches(
                loader, self.linearizer.device, self.dict_key_y, description, shown
            )

    # A first look

    def probe(self, data: TrainingData) -> Probe:
        """Shape and memory of the outputs, from one forward pass of one example."""
        for x, _ in self.batches(data.few(1, 1)):
            return self.linearizer.probe(x)
        raise ValueError(NO_BATCH)

    def first_look(self, data: TrainingData, size: int | None = None) -> Probe:
        """The same, with model and targets checked on the first few examples: what is
        wrong is told before anything expensive."""
        size = min(size or FIRST_LOOK, FIRST_LOOK)
        first, outputs = None, []
        for x, y in self.batches(data.few(max(size, FEW_OUTPUTS), size)):
            probe = self.linearizer.probe(x)
            positions = self.linearizer.layout.of(probe.output_shape)
            self.observation.check_noise(positions)
            n = batch_size(x, self.linearizer.dict_key_x)
            self.observation.rows(y, n * positions.n_positions, positions)
            f, _ = self.linearizer.outputs(take(x, slice(0, FEW_OUTPUTS), n))
            first, outputs = first or probe, [*outputs, f]
        if first is None:
            raise ValueError(NO_BATCH)
        warn_about_probabilities(torch.cat(outputs), self.observation.family)
        return first

    # The basis

    def sample_basis(
        self,
        data: TrainingData,
        balanced: bool = False,
        progress_bar: bool = False,
        progress: Progress = NO_RECORD,
    ) -> Fit:
        """A fit without data: draw M pairs (x, i), or take all, and compute the
        directions of their gradients; from where `progress` got to."""
        probe = self.first_look(data, getattr(data.whole(), "batch_size", None))
        probe = common_probe(self.collective, probe)
        n_outputs = math.prod(probe.output_shape)
        rng = np.random.default_rng(self.plan.seed)
        data = data.counted(n_outputs, self._most_pairs(probe), rng)
        n_pairs = (data.n_examples or 0) * n_outputs
        done = progress.sampled(n_pairs, self.home, self._folder)
        if done is None:
            exact = self.takes_all(probe, n_pairs)
            fitter = self._in_double(data, n_pairs) if exact else self
        else:  # what is free now may be other than it was
            exact = done.exact
            linearizer = self.linearizer.in_dtype(done.dtype)
            fitter = dataclasses.replace(self, linearizer=linearizer)
        pairs = data.draw(
            n_outputs,
            n_pairs if exact else self.plan.subsample_size,
            rng,
            self.dict_key_y if balanced and not exact else None,
        )
        if done is None:
            n_own = len(data.own(pairs)[0])
            gathered = fitter._room(probe, n_pairs, len(pairs[0]), exact, n_own)
            done = Sampled(gathered, 0, exact, fitter.linearizer.dtype, n_pairs)
        gathered = done.gathered
        gradients = functools.partial(
            fitter._gradients,
            data,
            self.linearizer.layout.of(probe.output_shape),
            gathered.rows.capacity,
            progress_bar,
        )
        progress.begin_sampling()
        finite = [torch.isfinite(gathered.rows.energy)] * done.n_batches
        for batch in gradients("[Sampling gradients]", pairs, done, gathered.rows.room):
            for some in batch:
                add_rows(gathered, some, finite)
                del some  # which may be a copy, before the next ones are computed
            # The sum of all squares is finite as long as all rows are.
            finite.append(torch.isfinite(gathered.rows.energy))
            if progress.due(gathered):
                check_finite(finite, "gradients", SAMPLING)
                sampled = dataclasses.replace(done, n_batches=len(finite))
                progress.save_sampled(sampled)
        check_finite(finite, "gradients", SAMPLING)
        basis = self._finish_basis(gathered.rows, exact)
        span = gathered.span(basis)
        if span is not None:
            others = data.draw_others(n_outputs, pairs, FEW_OTHERS, rng)
            if len(others[0]):
                norms = [
                    torch.stack(
                        [o.double().square().sum(-1) for o in span.outside(some)], -1
                    )
                    for batch in gradients("[Other gradients]", others)
                    for some in batch
                ]
                norms = self.collective.concatenated("other gradients", norms)
                span = span.compared_with(norms)
        if exact:
            logger.info(
                "exact linearised Laplace: all %d gradients, rank %d, in %s",
                n_pairs,
                basis.rank,
                str(fitter.linearizer.fn.dtype).removeprefix("torch."),
            )
        n_noises = self.observation.sigma_noise.numel()
        regression = self.observation.family.is_regression
        complement = Complement.PRIOR if exact or regression else Complement.DROP
        return Fit(
            basis,
            Sums.zero(basis.rank, n_noises, self.linearizer.device),
            probe.output_shape,
            self.linearizer.fn.flat(),
            fitter.linearizer.fn.dtype,
            complement if span is None else Complement.MATCHED,
            spans_all=exact,
            curvature_rows=self._has_curvature_rows,
            span=span,
        )

    def _room(
        self, probe: Probe, n_pairs: int, n_samples: int, exact: bool, n_own: int
    ) -> Gathered:
        """Where so many of the gradients of all pairs are gathered, those of this
        process, or a summary of them, and what their span is known by, where it is
        kept."""
        fn = self.linearizer.fn
        if exact:
            memory = self.estimate_exact(probe, n_pairs)
        else:
            memory = self.estimate(probe, n_pairs)
            check_memory(memory, self.home)
        logger.info("basis: %s\n%s", memory.method, memory)
        capacity, keep = sketch_sizes(memory, self.plan.rank_limit)
        room = fn.numels(), capacity, keep, fn.dtype, self.home
        if self.collective.alone:
            rows = RowSketch(*room, self._folder if memory.disk else None)
        else:
            rows = SharedRowSketch(self.collective, n_own, *room)
        if not exact and self._keeps_span and capacity > n_samples:
            n_params = sum(fn.numels())
            size = Sketch.size_for(n_params, n_samples)
            sketch = Sketch.of(n_params, size, self.plan.seed, self.home)
            return Gathered.with_span(rows, sketch, n_own)
        if not exact and self.complement is Complement.MATCHED:
            raise ValueError(UNKNOWN_SPAN)
        return Gathered(rows)

    def _in_double(self, data: TrainingData, n_pairs: int) -> Fitter:
        """The same in float64, where the model runs in it and memory allows.

        With all gradients in the basis the variance at inputs like the training data
        is a small difference, which single precision loses under weak priors.
        """
        linearizer = self.linearizer
        supported = linearizer.device.type in ("cpu", "cuda", "meta")
        mixed = autocast_enabled(linearizer.device)
        if linearizer.dtype == torch.float64 or mixed or not supported:
            return self
        double = dataclasses.replace(
            self, linearizer=linearizer.in_dtype(torch.float64)
        )
        try:
            probe = double.probe(data)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            logger.info("derivatives stay in single precision: %s", error)
            return self
        return double if self.estimate_exact(probe, n_pairs, 8).fits else self

    def _gradients(
        self,
        data: TrainingData,
        positions: Positions,
        at_most: int,
        progress_bar: bool,
        description: str,
        pairs: Pairs,
        done: Sampled | None = None,
        room: Room = no_room,
    ) -> Iterator[Iterator[torch.Tensor]]:
        """The gradients of pairs, batch by batch, a few rows at a time, where the
        directions stay; without those of the batches that are `done`."""
        linearizer, device = self.linearizer, self.linearizer.device
        room = room if device == self.home else no_room
        n_outputs = math.prod(positions.output_shape)
        examples, outputs = data.own(pairs)
        used, where = np.unique(examples, return_inverse=True)
        seen, loader = 0, data.chosen(used)
        if done is not None and done.n_batches:
            loader = Rest(loader, done.n_batches)
            # Pairs are sorted by example, and every example has one at least.
            seen = int(where[done.gathered.rows.n_samples - 1]) + 1
        for x, _ in self.batches(loader, description, progress_bar):
            size = batch_size(x, linearizer.dict_key_x)
            if positions.shape:
                shape = linearizer.probe(x).output_shape
                check_positions(linearizer.layout.of(shape), positions)
            here = np.flatnonzero((where >= seen) & (where < seen + size))
            rows = linearizer.row_chunks(
                x,
                torch.as_tensor(where[here] - seen, device=device),
                # Of these pairs alone: all outputs by all outputs may be huge.
                one_hot(
                    torch.as_tensor(outputs[here], device=device), n_outputs
                ).float(),
                at_most=at_most,
                room=room,
            )
            yield (some.to(self.home) for some in rows)
            seen += size
        if seen != len(used):
            raise ValueError(
                f"The collate function did not return one example for each of "
                f"{len(used)} indices, which ELLA needs."
            )

    def _finish_basis(self, sketch: RowSketch, exact: bool) -> NystromBasis:
        """The directions, in the dtype that was asked for."""
        accurate = self._has_curvature_rows  # whose small eigenvalues are used
        if exact:
            basis = sketch.basis(None)
        elif self.plan.n_eigenvalues != "auto":
            basis = sketch.basis(self.plan.rank_limit, accurate)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RankWarning)
                basis = sketch.basis(self.plan.rank_limit, accurate)
            basis = basis.truncate(int((basis.explained < AUTO_ENERGY).sum()) + 1)
        dtype = self.linearizer.options.basis_dtype
        if dtype is not None and dtype != basis.directions.dtype:
            converted = basis.directions
            if sketch.folder is None or len(converted) < sketch.keep:
                converted = converted.to(dtype)
            else:  # all directions, which are in a file
                converted = copy_on_disk(converted, dtype, sketch.folder)
            basis = dataclasses.replace(basis, directions=converted)
        return basis

    # The curvature

    def add_up(
        self,
        data: TrainingData,
        start: Fit,
        progress_bar: bool = False,
        validator: Validator | None = None,
        posterior: SubspacePosterior | None = None,
        stopping: EarlyStopping | None = None,
        progress: Progress = NO_RECORD,
    ) -> Fit:
        """The fit with the data added to its sums, from where `progress` got to.

        With a `validator` the loss of `posterior`, with the sums so far as its
        curvature, is recorded as data are added; with `stopping` the sums are those of
        the best value.
        """
        plan = stopping or EarlyStopping()
        loader, done = progress.take_up(data.whole(), start, self.dict_key_y)
        running_sums = functools.partial(
            self._all_sums, data, loader, start, progress_bar, done, progress
        )
        if validator is None or posterior is None:
            (sums,) = running_sums()
            return dataclasses.replace(start, sums=sums, history=())
        sums, before = done.sums, done.evaluations
        history, best, waited = list(before.history), before.best, before.waited
        for sums in running_sums(plan.checkpoints()):
            H, _ = self.observation.weigh(sums.H)
            tail = dataclasses.replace(start, sums=sums).tail
            value = validator.score(posterior.with_(H=H, tail=tail))
            value = self.collective.first("validation loss", value)
            history.append({"n_data": sums.n_data, "loss": value})
            signed = -value if plan.maximize else value
            signed = math.inf if math.isnan(value) else signed
            if best is None or signed < best[0]:
                best, waited = (signed, sums), 0
            else:
                waited += 1
            progress.evaluated(Evaluations(tuple(history), best, waited))
            if stopping is not None and waited >= plan.patience:
                break
        if stopping is not None and best is not None:
            if not math.isfinite(best[0]):
                raise ValueError(
                    f"The validation loss was NaN or infinite at all {len(history)} "
                    "evaluations, so there is no best one to stop at. Check the loss "
                    "and the validation data."
                )
            sums = best[1]
        return dataclasses.replace(start, sums=sums, history=tuple(history))

    def _all_sums(
        self,
        data: TrainingData,
        loader: Any,
        start: Fit,
        progress_bar: bool,
        done: Added,
        progress: Progress,
        checkpoints: Iterator[int] | None = None,
    ) -> Iterator[Sums]:
        """The running sums over the data of all processes."""
        if self.collective.alone:
            return self._running_sums(
                loader, start, progress_bar, done, progress, checkpoints
            )
        return joint_sums(
            self.collective,
            cast(SharedData, data),
            start,
            lambda fit, due: self._running_sums(
                loader, fit, progress_bar, Added(fit.sums), NO_RECORD, due
            ),
            checkpoints,
        )

    def _running_sums(
        self,
        loader: Any,
        start: Fit,
        progress_bar: bool,
        done: Added,
        progress: Progress,
        checkpoints: Iterator[float] | None = None,
    ) -> Iterator[Sums]:
        """The sums after as many new examples as each checkpoint says, and at the end.

        A batch that a checkpoint divides is linearised once and added in parts.
        """
        sums, seen, current = done.sums, done.n_examples, done.evaluated
        finite = [torch.isfinite(sums.loss).all()] * done.n_batches
        generator = own_generator(self.collective, self.fresh_generator())
        if generator is not None and done.generator is not None:
            generator.set_state(done.generator)
        due: float = math.inf
        if checkpoints is not None:
            due = next(n for n in checkpoints if n > seen)
        for x, targets in self.batches(loader, "[Computing Hessian]", progress_bar):
            f, psi, y = self._curvature_root(x, targets, start, generator)
            finite.append(torch.isfinite(f).all() & torch.isfinite(psi).all())
            first = 0
            while first < len(f):
                part = slice(first, int(min(len(f), first + due - seen)))
                sums = sums.add(f[part], psi[part], y[part], self.observation.family)
                seen, first, current = seen + part.stop - first, part.stop, False
                if checkpoints is not None and seen == due:
                    check_finite(finite, "outputs or derivatives", "of the data")
                    yield sums
                    due, current = next(checkpoints), True
            if progress.due():
                check_finite(finite, "outputs or derivatives", "of the data")
                state = None if generator is None else generator.get_state()
                last = digest(targets)
                progress.save_added(
                    Added(sums, seen, len(finite), current, state, last)
                )
        if seen == 0 and self.collective.alone:
            raise ValueError(NO_BATCH)
        if not current:
            check_finite(finite, "outputs or derivatives", "of the data")
            yield sums

    def _curvature_root(
        self,
        x: Any,
        y: torch.Tensor,
        start: Fit,
        generator: torch.Generator | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs (B, S, C), ψ (B, ..., K) whose squares add up to the curvature, and
        targets (B, S, ...)."""
        linearizer = self.linearizer.in_dtype(start.dtype)
        family = self.observation.family
        directions = start.basis.directions
        expected = linearizer.layout.of(start.output_shape)
        empirical = self.curvature is Curvature.EMPIRICAL_FISHER
        if empirical or self.stochastic:
            f, positions = linearizer.outputs(x)
            y, known = self._targets(y, f, positions, expected)
            if empirical:  # the gradient of an example's loss, all positions together
                cotangents = likelihood.target_cotangents(f, y, family).unsqueeze(-1)
            else:
                cotangents = likelihood.sample_cotangents(
                    f, family, int(self.stochastic), generator
                )
            if known is not None:
                cotangents = cotangents * known[:, None, None]
            psi = linearizer.project(x, positions.outputs(cotangents).mT, directions)
            psi = psi.double()
        else:
            features = linearizer.features(x, directions)
            f, positions = features.f, features.positions
            y, known = self._targets(y, f, positions, expected)
            psi = likelihood.curvature_root(f, features.phi, family)
            if known is not None:
                psi = psi * known[:, None, None]
            psi = psi.unflatten(0, (-1, positions.n_positions))
        f, y = (t.unflatten(0, (-1, positions.n_positions)) for t in (f, y))
        return f, psi, y

    def _targets(
        self,
        y: torch.Tensor,
        f: torch.Tensor,
        positions: Positions,
        expected: Positions,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Targets as rows on the device, and which of them are observed."""
        check_positions(positions, expected)
        y, known = self.observation.rows(y, len(f), positions)
        return y.to(f.device), None if known is None else known.to(f.device)

    def add_cache(self, cache: FeatureCache, start: Fit) -> Fit:
        """The fit with cached features and their targets added to its sums."""
        family = self.observation.family
        sums = start.sums
        for part in cache.batches(512):
            if self.curvature is Curvature.EMPIRICAL_FISHER:
                c = likelihood.target_cotangents(part.f_mu, part.targets, family)
                psi = c.unsqueeze(1) @ part.phi.double()  # (R, 1, K)
            else:
                psi = likelihood.curvature_root(part.f_mu, part.phi, family)
                psi = psi.unsqueeze(1)
            f, y = part.f_mu.unsqueeze(1), part.targets.unsqueeze(1)
            sums = sums.add(f, psi, y, family)
        return dataclasses.replace(start, sums=sums, history=())


def add_rows(
    gathered: Gathered, rows: torch.Tensor, finite: list[torch.Tensor]
) -> None:
    """Add gradients; a full buffer with NaN in it is told as such, with the batch after
    those that were `finite`."""
    try:
        gathered.add(rows)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        energy = gathered.rows.energy
        check_finite([*finite, torch.isfinite(energy)], "gradients", SAMPLING)
        raise


def check_positions(positions: Positions, expected: Positions) -> None:
    """All training examples must have as many positions as the first."""
    if positions.output_shape != expected.output_shape:
        raise ValueError(
            "All batches of the training data must have the same number of "
            f"positions, got {expected.n_positions} and {positions.n_positions}. Pad "
            "all examples to one size, not each batch to its own; classification marks "
            f"the padding with class {likelihood.IGNORED}. With Hugging Face's "
            "collators: DataCollatorForTokenClassification(tokenizer, padding="
            "'max_length', max_length=...), with the length of the longest example."
        )


def warn_about_probabilities(f: torch.Tensor, family: Family) -> None:
    """Warn where a classifier seems to return probabilities instead of logits."""
    if family is not Family.CATEGORICAL or f.shape[-1] < 2 or len(f) < 2:
        return
    if not has_values(f):
        return
    normalized = (f.double().sum(-1) - 1).abs().amax() < 1e-4
    if bool((f >= 0).all() & normalized):
        warn_caller(
            "The outputs of the first examples are non-negative and sum to one, like "
            "probabilities. Laplace expects logits: remove the softmax at the end of "
            "the model.",
            SoftmaxWarning,
        )
