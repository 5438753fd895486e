"""How `ELLALaplace` is fitted: sample the basis, then add up the curvature."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import one_hot
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

from laplace_ella.derivatives.rows import row_dtype
from laplace_ella.errors import RankWarning
from laplace_ella.fitting import sampling
from laplace_ella.fitting.memory import (
    MemoryEstimate,
    activation_bytes,
    budget_of,
    sketch_sizes,
)
from laplace_ella.fitting.memory import check as check_memory
from laplace_ella.fitting.memory import estimate as estimate_memory
from laplace_ella.fitting.stopping import EarlyStopping
from laplace_ella.posterior import likelihood
from laplace_ella.posterior.basis import NystromBasis, RowSketch
from laplace_ella.posterior.likelihood import Family
from laplace_ella.support.batches import batch_size, take
from laplace_ella.support.checks import check_finite
from laplace_ella.support.layout import OutputLayout
from laplace_ella.tuning import search as tuning

__all__ = ["Fitting"]

logger = logging.getLogger("laplace_ella")

#: n_eigenvalues="auto": directions until this share of the trace, at most so many.
AUTO_ENERGY = 0.9
AUTO_MAX_RANK = 128


@dataclass(frozen=True)
class _Sums:
    """What a pass over the data adds up."""

    H: torch.Tensor
    loss: torch.Tensor
    n_data: int
    n_outputs: int

    @classmethod
    def zero(cls, rank: int, n_noises: int, device: torch.device) -> _Sums:
        """Nothing added up yet; output by output if there are several noises."""
        each = (n_noises,) if n_noises > 1 else ()
        H = torch.zeros(*each, rank, rank, dtype=torch.float64, device=device)
        return cls(H, H.new_zeros(each), 0, 0)

    def add(
        self, f: torch.Tensor, psi: torch.Tensor, y: torch.Tensor, family: Family
    ) -> _Sums:
        """The sums with further examples: outputs (b, S, C), targets (b, S, ...) and
        curvature roots (b, ..., K), or (b, S, C, K) where outputs are kept apart."""
        loss = likelihood.losses(f.flatten(0, 1), y.flatten(0, 1), family)
        if self.H.ndim == 3:
            H = torch.einsum("bsck,bscl->ckl", psi, psi)
        else:
            flat = psi.flatten(0, -2)
            H, loss = flat.mT @ flat, loss.sum()
        return _Sums(self.H + H, self.loss + loss, self.n_data + len(f), f[0].numel())


class Fitting:
    """The part of `ELLALaplace` that looks at training data."""

    def fit(
        self,
        train_loader: DataLoader,
        override: bool = True,
        progress_bar: bool = False,
        *,
        val_loader: DataLoader | None = None,
        early_stopping: EarlyStopping | bool | None = None,
        balanced: bool | None = None,
    ) -> None:
        """Fit the posterior: sample the basis, then add up the curvature.

        Parameters
        ----------
        train_loader : torch.utils.data.DataLoader
            batches `(X, y)` or mappings, over a data set with indices; shuffled, if
            the fit may stop early
        override : bool, default=True
            False keeps the basis and what was added up so far, and adds this data
        progress_bar : bool, default=False
        val_loader : torch.utils.data.DataLoader, optional
            validation data; `history` records the loss on it as data are added
        early_stopping : EarlyStopping or bool, optional
            keep the posterior with the best validation loss, and end the pass when
            there has been no better one for long; True for the default settings
        balanced : bool, optional
            whether to draw the classes evenly; default as given to the constructor
        """
        balanced = self.balanced if balanced is None else balanced
        stopping = self._check_fit_arguments(
            train_loader, val_loader, early_stopping, balanced
        )
        keep = not override and self.basis is not None
        with self._undisturbed(train_loader, *([val_loader] if val_loader else [])):
            # Nothing is assigned before the end: a failed fit loses nothing.
            basis = self.basis
            if not keep:
                basis = self._sample_basis(train_loader, balanced, progress_bar)
            start = _Sums.zero(basis.rank, self.sigma_noise.numel(), self._device)
            if keep:
                loss = torch.as_tensor(self.loss).double().to(self._device)
                start = _Sums(self.H, loss, self.n_data, self.n_outputs)
                self._linearizer.n_outputs = self.n_outputs
            sums, history = self._add_up(
                train_loader, basis, start, progress_bar, val_loader, stopping
            )
        if not keep:
            self._set_basis(basis)
        self.H, self.n_data, self.n_outputs = sums.H, sums.n_data, sums.n_outputs
        self.loss = sums.loss.to(self._dtype)
        self.history = history
        self.mean = parameters_to_vector(self._linearizer.fn.parameters())
        self._posterior_scale = None

    def _check_fit_arguments(
        self,
        train_loader: Any,
        val_loader: Any,
        early_stopping: EarlyStopping | bool | None,
        balanced: bool,
    ) -> EarlyStopping | None:
        """Refuse what cannot work, before anything is computed."""
        sampling.check_loader(train_loader)
        if balanced and self._family.is_regression:
            raise ValueError(
                "balanced=True draws classes evenly and is for classification; this "
                "likelihood is regression. Use balanced=False."
            )
        if balanced and self.multi_label:
            raise ValueError(
                "balanced=True draws classes evenly; with multi_label=True an example "
                "has no single class. Use balanced=False."
            )
        if early_stopping and val_loader is None:
            raise ValueError(
                "early_stopping needs val_loader=. Where there is no validation data, "
                "laplace_ella.augmented_validation(train_loader) makes some."
            )
        if early_stopping is None or early_stopping is False:
            return None
        if early_stopping is True:
            return EarlyStopping()
        if not isinstance(early_stopping, EarlyStopping):
            raise TypeError(
                "early_stopping must be True, False or an EarlyStopping(...), got "
                f"{early_stopping!r}."
            )
        return early_stopping

    def _sample_basis(
        self, loader: Any, balanced: bool, progress_bar: bool
    ) -> NystromBasis:
        """Draw M pairs (x, i), take their gradients and compute the directions."""
        indices = sampling.eligible_indices(loader)
        n_outputs = self._count_outputs(loader, indices)
        labels = None
        if balanced:
            labels = sampling.read_labels(loader.dataset, indices, self.dict_key_y)
        examples, outputs = sampling.draw_pairs(
            len(indices),
            n_outputs,
            self.subsample_size,
            np.random.default_rng(self.seed),
            labels,
        )
        memory = self._estimate(len(examples))
        check_memory(memory, self._home)
        logger.info("basis: %s\n%s", memory.method, memory)
        capacity, keep = sketch_sizes(memory, self._rank_limit)
        sketch = RowSketch(
            self.n_params,
            capacity,
            keep,
            row_dtype(self._linearizer.fn),
            self._home,
        )
        self._sketch_rows(loader, sketch, indices, examples, outputs, progress_bar)
        return self._finish_basis(sketch)

    def _sketch_rows(
        self,
        loader: Any,
        sketch: RowSketch,
        indices: np.ndarray,
        examples: np.ndarray,
        outputs: np.ndarray,
        progress_bar: bool,
    ) -> None:
        """Take the gradients of the pairs, each example loaded once."""
        used, where = np.unique(examples, return_inverse=True)
        seen, finite = 0, []
        sampled = sampling.subset(loader, indices[used])
        for x, _ in self._batches(sampled, "[Sampling gradients]", progress_bar):
            size = batch_size(x, self.dict_key_x)
            if self.output_layout is not OutputLayout.FLAT:
                self._outputs(take(x, slice(0, 1), size))
                self._check_positions()
            pairs = np.flatnonzero((where >= seen) & (where < seen + size))
            finite_rows = []
            for rows in self._linearizer.row_chunks(
                x,
                torch.as_tensor(where[pairs] - seen, device=self._device),
                # Of these pairs alone: all outputs by all outputs may be huge.
                one_hot(
                    torch.as_tensor(outputs[pairs], device=self._device),
                    self._linearizer.n_outputs,
                ).float(),
            ):
                sketch.add(rows.to(sketch.buffer.device))
                finite_rows.append(torch.isfinite(rows).all())
            finite.append(torch.stack(finite_rows).all())
            seen += size
        if sketch.n_samples != len(examples):
            raise ValueError(
                f"The collate function returned {seen} examples for {len(used)} "
                "indices; ELLA needs one example an index."
            )
        check_finite(finite, "gradients", "while sampling the basis")

    def _finish_basis(self, sketch: RowSketch) -> NystromBasis:
        """The directions, in the dtype that was asked for."""
        if self.n_eigenvalues != "auto":
            basis = sketch.basis(self.n_eigenvalues)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RankWarning)
                basis = sketch.basis(self._rank_limit)
            basis = basis.truncate(int((basis.explained < AUTO_ENERGY).sum()) + 1)
        if self.basis_dtype is not None:
            directions = basis.directions.to(self.basis_dtype)
            basis = dataclasses.replace(basis, directions=directions)
        return basis

    @property
    def _home(self) -> torch.device:
        """Where gradients are gathered and directions stay."""
        return self.basis_device or self._device

    @property
    def _rank_limit(self) -> int:
        """K, or as many directions as are looked at to choose it."""
        return AUTO_MAX_RANK if self.n_eigenvalues == "auto" else self.n_eigenvalues

    def estimate_memory(self, train_loader: DataLoader) -> MemoryEstimate:
        """What `fit(train_loader)` would need, from one forward pass of one example."""
        sampling.check_loader(train_loader)
        with self._undisturbed(train_loader):
            indices = sampling.eligible_indices(train_loader)
            n_outputs = self._count_outputs(train_loader, indices)
        return self._estimate(min(self.subsample_size, len(indices) * n_outputs))

    def _estimate(self, n_samples: int) -> MemoryEstimate:
        linearizer = self._linearizer
        rank = min(self._rank_limit, n_samples)
        # Passes are made where the model is; "cuda" without a number is the same.
        beside = self._home.type == self._device.type
        return estimate_memory(
            self.n_params,
            n_samples,
            rank,
            row_dtype(linearizer.fn).itemsize,
            linearizer.sizes.pass_bytes(rank) if beside else 0,
            budget_of(self._home, self.memory_budget),
            self.basis_dtype.itemsize if self.basis_dtype is not None else None,
        )

    def _count_outputs(self, loader: Any, indices: np.ndarray) -> int:
        """C, from the output for one example, which also surfaces model errors."""
        for x, _ in self._batches(sampling.subset(loader, indices[:1]), "", False):
            f, self._linearizer.activations = activation_bytes(self._outputs, x)
        self._linearizer.n_outputs = f.shape[-1]
        self._check_noise()
        return f.shape[-1]

    def _check_positions(self) -> None:
        """The last outputs have as many positions as those the fit began with."""
        positions, expected = self._positions, self._linearizer.n_outputs
        if positions.n_positions * positions.n_channels != expected:
            raise ValueError(
                "All batches of the training data must have the same number of "
                f"positions, got {expected // positions.n_channels} and "
                f"{positions.n_positions}. Pad all examples to one size, not each "
                "batch to its own; classification marks the padding with class "
                f"{likelihood.IGNORED}."
            )

    def _check_noise(self) -> None:
        """As many noises as there are outputs at a position, if not one for all."""
        n, C = self.sigma_noise.numel(), self._positions.n_channels
        if n not in (1, C):
            raise ValueError(
                f"sigma_noise has {n} values, the model {C} outputs"
                f"{' at each position' if self._positions.shape else ''}: pass one "
                "number, or one for each output."
            )

    def _add_up(
        self,
        loader: Any,
        basis: NystromBasis,
        start: _Sums,
        progress_bar: bool,
        val_loader: Any,
        stopping: EarlyStopping | None,
    ) -> tuple[_Sums, list[dict[str, float]]]:
        """Sums over the data, all of it or up to the best validation loss."""
        if val_loader is None:
            (sums,) = self._running_sums(loader, basis, start, progress_bar)
            return sums, []
        plan = stopping or EarlyStopping()
        posterior = self._posterior_of(basis, start.H)
        validator = tuning.Validator.for_laplace(
            self,
            val_loader,
            plan.loss,
            plan.link_approx,
            plan.n_samples,
            progress_bar,
            posterior,
        )
        history, best, waited = [], None, 0
        checkpoints = plan.checkpoints()
        for sums in self._running_sums(loader, basis, start, progress_bar, checkpoints):
            H, _ = self._weighted(sums.H)
            value = validator.score(posterior.with_(H=H))
            history.append({"n_data": sums.n_data, "loss": value})
            signed = -value if plan.maximize else value
            signed = math.inf if math.isnan(value) else signed
            if best is None or signed < best[0]:
                best, waited = (signed, sums), 0
            else:
                waited += 1
            if stopping is not None and waited >= plan.patience:
                break
        return (sums if stopping is None else best[1]), history

    def _running_sums(
        self,
        loader: Any,
        basis: NystromBasis,
        sums: _Sums,
        progress_bar: bool,
        checkpoints: Iterator[int] | None = None,
    ) -> Iterator[_Sums]:
        """The sums after as many new examples as each checkpoint says, and at the end.

        A batch that a checkpoint divides is linearised once and added in parts.
        """
        seen, finite, current = 0, [], True
        generator = self._fresh_generator()
        due = next(checkpoints) if checkpoints is not None else math.inf
        for x, y in self._batches(loader, "[Computing Hessian]", progress_bar):
            f, psi, y = self._curvature_root(x, y, basis, generator)
            self._check_positions()
            finite.append(torch.isfinite(f).all() & torch.isfinite(psi).all())
            first = 0
            while first < len(f):
                part = slice(first, int(min(len(f), first + due - seen)))
                sums = sums.add(f[part], psi[part], y[part], self._family)
                seen, first, current = seen + part.stop - first, part.stop, False
                if seen == due:
                    check_finite(finite, "outputs or derivatives", "of the data")
                    yield sums
                    due, current = next(checkpoints), True
        if seen == 0:
            raise ValueError(
                "The loader yielded no batch; ELLA needs at least one example."
            )
        if not current:
            check_finite(finite, "outputs or derivatives", "of the data")
            yield sums

    def _curvature_root(
        self,
        x: Any,
        y: torch.Tensor,
        basis: NystromBasis,
        generator: torch.Generator | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs (B, S, C), ψ (B, ..., K) whose squares add up to the curvature, and
        targets (B, S, ...)."""
        family = self._family
        if self.stochastic:
            f = self._rows_of(self._outputs(x))
        else:
            f, phi = self._linearize(x, basis)
        positions, y = self._positions, self._target_rows(f, y)
        known = likelihood.observed(y, family)
        if self.stochastic:
            cotangents = likelihood.sample_cotangents(
                f, family, int(self.stochastic), generator
            )
            if known is not None:
                cotangents = cotangents * known[:, None, None]
            psi = self._linearizer.project(
                x, positions.outputs(cotangents).mT, basis.directions
            ).double()
        else:
            psi = likelihood.curvature_root(f, phi, family)
            if known is not None:
                psi = psi * known[:, None, None]
            psi = psi.unflatten(0, (-1, positions.n_positions))
        f, y = (t.unflatten(0, (-1, positions.n_positions)) for t in (f, y))
        return f, psi, y
