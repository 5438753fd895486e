"""`Fit`, the frozen value that a fit returns, with sums and features of the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.complement import Complement, EvidenceScope
from laplace_ella.posterior.likelihood import losses
from laplace_ella.posterior.observation import Family, ObservationModel
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.posterior.span import Span
from laplace_ella.posterior.spectrum import Spectrum
from laplace_ella.support.batches import has_values


@dataclass(frozen=True)
class CurvatureSum:
    """What a pass over the data adds up.

    Attributes
    ----------
    H : torch.Tensor
        Σ φᵀΛφ `(K, K)`, float64; per output `(C, K, K)` where their noises differ
    loss : torch.Tensor
        summed over the data, a scalar, or per output `(C,)`, float64
    n_data : int
        N
    """

    H: torch.Tensor
    loss: torch.Tensor
    n_data: int

    @classmethod
    def zero(cls, rank: int, n_noises: int, device: torch.device) -> CurvatureSum:
        """Return sums of nothing; output by output if there are several noises."""
        each = (n_noises,) if n_noises > 1 else ()
        H = torch.zeros(*each, rank, rank, dtype=torch.float64, device=device)
        return cls(H, H.new_zeros(each), 0)

    def cleared(self) -> CurvatureSum:
        """Return sums of nothing, of the same shape."""
        return CurvatureSum(torch.zeros_like(self.H), torch.zeros_like(self.loss), 0)

    def add(
        self, f: torch.Tensor, psi: torch.Tensor, y: torch.Tensor, family: Family
    ) -> CurvatureSum:
        """Return the sums with further examples: outputs `(b, S, C)`, curvature roots
        `(b, ..., K)`, or `(b, S, C, K)` where outputs are kept apart, and targets
        `(b, S, ...)`."""
        loss = losses(f.flatten(0, 1), y.flatten(0, 1), family)
        if self.H.ndim == 3:
            H = torch.einsum("bsck,bscl->ckl", psi, psi)
        else:
            flat = psi.flatten(0, -2)
            H, loss = flat.mT @ flat, loss.sum()
        return CurvatureSum(self.H + H, self.loss + loss, self.n_data + len(f))


@dataclass(frozen=True)
class TrainingRows:
    """Outputs, features and targets of the training data.

    Attributes
    ----------
    f : torch.Tensor
        `(N, S, C)`
    phi : torch.Tensor
        `(N, S, C, K)`, the coefficients of their gradients in the basis
    y : torch.Tensor
        checked targets `(N, S, ...)`
    """

    f: torch.Tensor
    phi: torch.Tensor
    y: torch.Tensor

    def first(self, n: int) -> TrainingRows:
        """Return those of the first n examples."""
        return TrainingRows(self.f[:n], self.phi[:n], self.y[:n])

    @classmethod
    def joined(cls, parts: Sequence[TrainingRows]) -> TrainingRows | None:
        """Return the rows of all parts in order, None where there are none."""
        if not parts:
            return None
        each = zip(*((part.f, part.phi, part.y) for part in parts), strict=True)
        return cls(*map(torch.cat, each))


@dataclass(frozen=True)
class Fit:
    """A fitted posterior up to the hyperparameters.

    Attributes
    ----------
    output_shape : tuple of int
        of one training example, all positions
    mean : torch.Tensor
        θ̂ `(P,)`
    dtype : torch.dtype
        in which derivatives are computed
    complement : Complement
        what suits the directions outside this basis, if nobody says otherwise
    history : tuple of dict
        'n_data' and validation 'loss' in the course of the fit
    spans_all : bool
        whether the basis has all usable directions of all training gradients
    curvature_rows : bool
        whether the gradients of pairs are the rows of the curvature's root, as for
        regression with the GGN: the spectrum of a sample of them tells that of all
    span, training : optional
        where they were kept; `training` by exact fits and classifiers, if memory allows
    examples : Any, optional
        a few inputs of the first batch, on the CPU
    mode_curvature : torch.Tensor, optional
        Σ φᵀΛφ `(K, K)` at the mode of the linearised model, if the posterior has that
    """

    basis: NystromBasis
    sums: CurvatureSum
    output_shape: tuple[int, ...]
    mean: torch.Tensor
    dtype: torch.dtype
    complement: Complement
    linearizer: Linearizer
    history: tuple[dict[str, float], ...] = ()
    spans_all: bool = False
    curvature_rows: bool = False
    span: Span | None = None
    training: TrainingRows | None = None
    examples: Any = None
    mode_curvature: torch.Tensor | None = None

    @property
    def H(self) -> torch.Tensor:
        """The curvature of the posterior."""
        return self.sums.H if self.mode_curvature is None else self.mode_curvature

    @cached_property
    def spectrum(self) -> Spectrum | None:
        """The spectrum of the curvature, where the sampled gradients tell it."""
        basis, n_rows = self.basis, self.sums.n_data * self.n_outputs
        if not self.curvature_rows or self.spans_all or self.sums.H.ndim > 2:
            return None
        if basis.tail is None or not has_values(basis.eigenvalues):
            return None
        with torch.inference_mode(False):  # it is kept, and differentiated later
            eigenvalues = basis.all_eigenvalues.to(self.sums.H.device)
        sizes = basis.n_samples, n_rows, len(self.mean)
        return Spectrum(eigenvalues, *sizes, self.complete)

    @property
    def complete(self) -> bool:
        """Whether the sampled gradients are the rows of the curvature that was added
        up, and not of other data: then VᵀJᵀJV has their eigenvalues."""
        basis, H = self.basis, self.sums.H
        if basis.n_samples != self.sums.n_data * self.n_outputs or not has_values(H):
            return False
        dtypes = self.dtype, basis.directions.dtype
        rounding = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
        off = (H.diagonal() - basis.eigenvalues.to(H)).abs().sum()
        return bool(off <= rounding * basis.trace)

    @property
    def n_outputs(self) -> int:
        """Outputs per example, at all positions."""
        return math.prod(self.output_shape)

    def truncate(self, rank: int) -> Fit:
        """Return the fit with the first `rank` directions: bases are nested."""
        training, at_mode = self.training, self.mode_curvature
        if training is not None:
            training = replace(training, phi=training.phi[..., :rank])
        return replace(
            self,
            basis=self.basis.truncate(rank),
            sums=replace(self.sums, H=self.sums.H[..., :rank, :rank]),
            spans_all=self.spans_all and rank == self.basis.rank,
            training=training,
            mode_curvature=None if at_mode is None else at_mode[:rank, :rank],
        )

    def check_noises(self, n_noises: int) -> None:
        """Refuse several noises of curvature that was not added up output by output."""
        has = 1 if self.sums.H.ndim == 2 else len(self.sums.H)
        if has != n_noises:
            raise ValueError(
                f"sigma_noise has {n_noises} values, and this posterior was fitted "
                f"with {has}. Set them before fit(), one or one for each output."
            )

    def complement_for(
        self, asked: Complement | float | None, prior: torch.Tensor
    ) -> Complement | float:
        """Return the complement for a prior precision: what was `asked` for, if
        anything."""
        if asked is Complement.MATCHED and self.spans_all:
            return Complement.PRIOR  # which is what it comes to
        if asked is None and self.complement is Complement.MATCHED:
            known = prior.numel() == 1 and self.spectrum is not None
            return Complement.MATCHED if known else Complement.PRIOR
        return self.complement if asked is None else asked

    def posterior(
        self,
        observation: ObservationModel,
        prior: torch.Tensor,
        complement: Complement | float,
        evidence: EvidenceScope,
    ) -> SubspacePosterior:
        """Return the posterior under given hyperparameters."""
        H, factor = observation.weigh(self.H)
        known = self.spectrum, self.span, evidence is EvidenceScope.WHOLE
        return SubspacePosterior(self.basis, H, factor, prior, complement, *known)

    def variance_error(self, posterior: SubspacePosterior) -> float:
        """Return the relative error of variances at training inputs by rounding.

        Exact variances there are Σ_k λ_k/(fλ_k + δ) on average, with the eigenvalues
        λ of JJᵀ. Directions below the rounding noise were given up and keep λ/δ, and
        the part of a gradient outside the basis, which is zero, comes out as about
        16 ε²|J|²: measured with networks of 10³ to 4·10⁴ parameters.
        """
        known, given_up, trace = (
            self.basis.eigenvalues,
            self.basis.tail,
            self.basis.trace,
        )
        if given_up is None or not has_values(known):
            return 0.0
        delta = posterior.prior.detach().double().min().to(known)
        weight = float(posterior.factor * posterior.H.trace()) / trace
        exact = given_up / (weight * given_up + delta)
        excess = (given_up / delta - exact).sum()
        excess = excess + 16 * torch.finfo(self.dtype).eps ** 2 * trace / delta
        total = exact.sum() + (known / (weight * known + delta)).sum()
        return float(excess / total)
