"""What a fit produces: one frozen value, and the sums over data that lead to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from laplace_ella.posterior import likelihood
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.likelihood import Family
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.outside import Complement, EvidenceOf, Tail
from laplace_ella.posterior.spectrum import Spectrum
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.batches import has_values
from laplace_ella.support.span import Span

__all__ = ["Fit", "Sums"]


@dataclass(frozen=True)
class Sums:
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
    def zero(cls, rank: int, n_noises: int, device: torch.device) -> Sums:
        """Nothing added up yet; output by output if there are several noises."""
        each = (n_noises,) if n_noises > 1 else ()
        H = torch.zeros(*each, rank, rank, dtype=torch.float64, device=device)
        return cls(H, H.new_zeros(each), 0)

    def add(
        self, f: torch.Tensor, psi: torch.Tensor, y: torch.Tensor, family: Family
    ) -> Sums:
        """The sums with further examples: outputs (b, S, C), targets (b, S, ...) and
        curvature roots (b, ..., K), or (b, S, C, K) where outputs are kept apart."""
        loss = likelihood.losses(f.flatten(0, 1), y.flatten(0, 1), family)
        if self.H.ndim == 3:
            H = torch.einsum("bsck,bscl->ckl", psi, psi)
        else:
            flat = psi.flatten(0, -2)
            H, loss = flat.mT @ flat, loss.sum()
        return Sums(self.H + H, self.loss + loss, self.n_data + len(f))


@dataclass(frozen=True)
class Fit:
    """A fitted posterior up to the hyperparameters.

    Attributes
    ----------
    basis : NystromBasis
    sums : Sums
        curvature and loss of the data that were added up, none after `fit_basis`
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
    span : Span, optional
        of the sampled gradients, where it was kept
    """

    basis: NystromBasis
    sums: Sums
    output_shape: tuple[int, ...]
    mean: torch.Tensor
    dtype: torch.dtype
    complement: Complement
    history: tuple[dict[str, float], ...] = ()
    spans_all: bool = False
    curvature_rows: bool = False
    span: Span | None = None

    @cached_property
    def tail(self) -> Tail | None:
        """What the sampled gradients tell of the curvature outside the basis."""
        basis, n_rows = self.basis, self.sums.n_data * self.n_outputs
        if not self.curvature_rows or self.spans_all or self.sums.H.ndim > 2:
            return None
        if basis.tail is None or not has_values(basis.eigenvalues):
            return None
        with torch.inference_mode(False):  # it is kept, and differentiated later
            eigenvalues = torch.cat([basis.eigenvalues, basis.tail])
            eigenvalues = eigenvalues.to(self.sums.H.device)
        n_params = basis.directions.shape[1]
        spectrum = Spectrum(eigenvalues, basis.n_samples, n_rows, n_params)
        return Tail(spectrum, self.span)

    @property
    def n_outputs(self) -> int:
        """Outputs per example, at all positions."""
        return math.prod(self.output_shape)

    def truncate(self, rank: int) -> Fit:
        """The fit with the first `rank` directions: bases are nested."""
        sums = replace(self.sums, H=self.sums.H[..., :rank, :rank])
        spans_all = self.spans_all and rank == self.basis.rank
        basis = self.basis.truncate(rank)
        return replace(self, basis=basis, sums=sums, spans_all=spans_all)

    def check_noises(self, n_noises: int) -> None:
        """Several noises need curvature that was added up output by output."""
        H = self.sums.H
        if H.ndim == 2:
            raise ValueError(
                "This posterior was fitted with one sigma_noise for all outputs. Set "
                f"the {n_noises} values before fit()."
            )
        if len(H) != n_noises:
            raise ValueError(
                f"sigma_noise has {n_noises} values, the model {len(H)} outputs."
            )

    def posterior(
        self,
        observation: ObservationModel,
        prior: torch.Tensor,
        complement: Complement | float,
        evidence: EvidenceOf = EvidenceOf.BASIS,
    ) -> SubspacePosterior:
        """The posterior under given hyperparameters."""
        H, factor = observation.weigh(self.sums.H)
        whole = evidence is EvidenceOf.WHOLE
        return SubspacePosterior(
            self.basis, H, factor, prior, complement, self.tail, whole
        )

    def variance_error(self, posterior: SubspacePosterior) -> float:
        """Relative error of the variance at training inputs that rounding makes.

        Exact variances there are Σ_k λ_k/(fλ_k + δ) on average, with the eigenvalues
        λ of JJᵀ. Directions below the rounding noise were given up and keep λ/δ, and
        the part of a gradient outside the basis, which is zero, comes out as about
        16 ε²|J|²: measured with networks of 10³ to 4·10⁴ parameters.
        """
        basis = self.basis
        tail = basis.eigenvalues[:0] if basis.tail is None else basis.tail
        if not has_values(basis.eigenvalues):
            return 0.0
        delta = posterior.prior.detach().double().min().to(basis.eigenvalues)
        weight = float(posterior.factor * posterior.H.trace()) / basis.trace
        exact = torch.cat([basis.eigenvalues, tail])
        exact = (exact / (weight * exact + delta)).sum()
        given_up = (tail / delta - tail / (weight * tail + delta)).sum()
        eps = torch.finfo(self.dtype).eps
        return float((given_up + 16 * eps**2 * basis.trace / delta) / exact)
