"""The posterior of ELLA as one immutable value: basis, curvature, prior and noise.

ELLA is a Laplace posterior on the subspace θ = θ̂ + Vz (Deng et al. 2022, Eq. 8 in
weight space), with D the diagonal prior precision and f = 1/(σ²T):

- complement dropped: z ~ N(0, G⁻¹) with G = f·H + VᵀDV, and nothing else varies;
- complement kept at the prior: Σ = (D + f·VHVᵀ)⁻¹, so that z = Vᵀ(θ − θ̂) has the
  precision G = f·H + S⁻¹ with S = VᵀD⁻¹V, and what is left of θ that of the prior:
  Σ = D⁻¹ + W(G⁻¹ − S)Wᵀ with W = D⁻¹VS⁻¹.

For a scalar prior both are G = f·H + δI, and W = V. Hyperparameter searches make a new
posterior for each candidate, at the cost of K×K algebra; all of it is in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from laplace_ella.derivatives.jacobians import GradientSplit, accurate_product
from laplace_ella.errors import NumericalWarning, warn_caller
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.complement import UNKNOWN_SPAN, Complement, Precisions
from laplace_ella.posterior.observation import FunctionValues
from laplace_ella.posterior.span import Span
from laplace_ella.posterior.spectrum import Spectrum

#: Of more directions than these only those are predicted with of which the data know a
#: larger share than this.
MANY_DIRECTIONS, KNOWN = 256, 1e-4


def _cholesky(matrix: torch.Tensor) -> torch.Tensor:
    """Return the lower factor; a matrix that is not quite definite gets a jitter."""
    failed = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
    try:
        return torch.linalg.cholesky(matrix)
    except failed:
        scale = matrix.detach().diagonal().abs().mean()
    for exponent in range(-14, -3):
        jitter = (scale * 10.0**exponent).expand(len(matrix))
        factor, info = torch.linalg.cholesky_ex(matrix + jitter.diag())
        if not info.any():
            warn_caller(
                "The posterior precision was not positive definite; "
                f"{float(jitter[0]):.1e} was added to its diagonal. A larger prior "
                "precision avoids this.",
                NumericalWarning,
            )
            return factor
    raise failed(
        "The posterior precision is not positive definite, even after adding "
        f"{float(scale) * 1e-4:.1e} to its diagonal. Check the prior precision and the "
        "data."
    )


def _log_det(matrix: torch.Tensor) -> torch.Tensor:
    """Return log det of a positive definite matrix, or of a diagonal `(K,)`."""
    if matrix.ndim == 1:
        return matrix.log().sum()
    return torch.linalg.slogdet(matrix)[1]


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return rows `(..., K)` times a matrix, or a diagonal `(K,)`."""
    matrix = matrix.to(rows)
    return rows * matrix if matrix.ndim == 1 else accurate_product(rows, matrix.mT)


@dataclass(frozen=True)
class SubspacePosterior:
    """θ = θ̂ + Vz with z ~ N(0, G⁻¹), and the complement dropped or kept.

    Attributes
    ----------
    H : torch.Tensor
        Σ φᵀΛφ `(K, K)`, float64; or its eigenvalues `(K,)`, in its eigenbasis, for a
        scalar prior: precision, covariance and scale are diagonals `(K,)` then
    factor : torch.Tensor
        f = 1/(σ²T), a scalar
    prior : torch.Tensor
        prior precision: scalar `(1,)`, layerwise `(L,)` or diagonal `(P,)`
    complement : Complement or float
        a number is the precision of all directions outside the basis
    spectrum, span : optional
        of the curvature in all directions, and of the sampled gradients
    whole : bool
        whether the evidence is of the whole spectrum, where it is known, or of the
        directions in the basis

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=5)
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> wider = la.posterior.with_(prior=torch.tensor([0.5]))  # la stays as it is
    >>> wider.precision.shape, float(wider.prior), float(la.prior_precision)
    (torch.Size([5, 5]), 0.5, 1.0)
    """

    basis: NystromBasis
    H: torch.Tensor
    factor: torch.Tensor
    prior: torch.Tensor
    complement: Complement | float = Complement.DROP
    spectrum: Spectrum | None = None
    span: Span | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if self.complement in (Complement.DROP, Complement.PRIOR):
            return
        matched = self.complement is Complement.MATCHED
        if matched and (self.spectrum is None or self.span is None):
            raise ValueError(UNKNOWN_SPAN)
        if not self.is_scalar:
            asked = "matched" if matched else self.complement
            raise ValueError(
                f"complement={asked!r} needs one prior precision for all weights, got "
                f"{self.prior.numel()}. Use complement='prior', or set one number as "
                "prior_precision."
            )

    @property
    def rank(self) -> int:
        """K."""
        return self.H.shape[-1]

    @property
    def n_params(self) -> int:
        """P."""
        return self.basis.directions.shape[1]

    # Variants, each a new posterior

    def with_(self, **changes: Any) -> SubspacePosterior:
        """Return the same posterior with other curvature, prior or factor."""
        return replace(self, **changes)

    def truncate(self, rank: int) -> SubspacePosterior:
        """Return the posterior of the first `rank` directions: bases are nested."""
        return replace(self, basis=self.basis.truncate(rank), H=self.H[:rank, :rank])

    def rotated(self) -> tuple[SubspacePosterior, torch.Tensor]:
        """Return the same in the eigenbasis of H = QΛQᵀ, for a scalar prior, and Q.

        With features turned to φQ once, a candidate costs K products per output where
        it costs K² otherwise, and its evidence K operations where a factorisation takes
        K³. There are no directions: for function values and evidence only.
        """
        eigenvalues, Q = torch.linalg.eigh(self.H.double())
        basis = replace(self.basis, directions=self.basis.directions[:0])
        return replace(self, basis=basis, H=eigenvalues.clamp_min(0)), Q

    @cached_property
    def for_predictions(self) -> SubspacePosterior:
        """The same with few directions, for predictions in a third of the time or less.

        Where the complement is kept at a scalar prior, eigenvectors of the curvature
        with fλ/(fλ + δ) below a tolerance may as well lie outside the basis: no
        variance changes by more than this share. On a digits MLP 615 to 868 of 2,400
        directions stay. The basis of the curvature takes O(K³ + K²P).
        """
        at_prior = self.complement is Complement.PRIOR and self.is_scalar
        if self.rank <= MANY_DIRECTIONS or self.H.ndim == 1 or not at_prior:
            return self
        eigenvalues, Q = torch.linalg.eigh(self.H.detach().double())
        eigenvalues, Q = eigenvalues.flip(0).clamp_min(0), Q.flip(1)
        known = self.factor * eigenvalues
        rank = max(1, int((known > KNOWN * (known + self.prior.double())).sum()))
        V, eigenvalues = self.basis.directions, eigenvalues[:rank]
        V = Q[:, :rank].mT.to(V) @ V
        basis = replace(self.basis, directions=V, eigenvalues=eigenvalues, tail=None)
        return replace(self, basis=basis, H=eigenvalues, whole=False)

    # The prior

    @property
    def is_scalar(self) -> bool:
        """Whether all weights have one prior precision."""
        return self.prior.numel() == 1

    def prior_diagonal(self) -> torch.Tensor:
        """Return D as a vector `(P,)`, or `(1,)` for a scalar prior."""
        if self.prior.numel() in (1, self.n_params):
            return self.prior
        sizes = torch.as_tensor(self.basis.numels, device=self.prior.device)
        return self.prior.repeat_interleave(sizes, output_size=self.n_params)

    @cached_property
    def prior_on_subspace(self) -> torch.Tensor:
        """The prior precision of z `(K, K)`: VᵀDV, or (VᵀD⁻¹V)⁻¹ where the complement
        varies as well. For a scalar prior δI, its diagonal in the eigenbasis."""
        prior = self.prior.double()
        if self.is_scalar:  # V is orthonormal
            diagonal = prior.expand(self.rank)
            return diagonal if self.H.ndim == 1 else diagonal.diag()
        weights = 1 / prior if self.needs_residual else prior
        if len(prior) == self.n_params:
            V = self.basis.directions.to(prior)
            gram = (V * weights) @ V.T
        else:
            gram = torch.einsum("l,lij->ij", weights, self.basis.layer_grams)
        return torch.cholesky_inverse(_cholesky(gram)) if self.needs_residual else gram

    # The posterior of z = Vᵀ(θ − θ̂)

    @cached_property
    def precision(self) -> torch.Tensor:
        """G `(K, K)`."""
        return self.factor.double() * self.H + self.prior_on_subspace

    @cached_property
    def scale(self) -> torch.Tensor:
        """S `(K, K)` with SSᵀ = G⁻¹: S = L⁻ᵀ for G = LLᵀ."""
        G = self.precision
        if G.ndim == 1:
            return G.rsqrt()
        eye = torch.eye(self.rank, dtype=G.dtype, device=G.device)
        return torch.linalg.solve_triangular(_cholesky(G), eye, upper=False).mT

    @property
    def covariance(self) -> torch.Tensor:
        """G⁻¹ `(K, K)`."""
        scale = self.scale
        return scale.square() if scale.ndim == 1 else scale @ scale.mT

    # Evidence

    @property
    def log_det_prior(self) -> torch.Tensor:
        """log det of the prior precision: on the subspace, or of all of D."""
        if self.complement is Complement.DROP:
            return _log_det(self.prior_on_subspace)
        prior = self.prior_diagonal().double()
        return prior.log().sum() * (self.n_params / prior.numel())

    @property
    def log_det_ratio(self) -> torch.Tensor:
        """log det of the posterior precision less that of the prior precision, over
        the directions that the evidence is of."""
        within = _log_det(self.precision) - _log_det(self.prior_on_subspace)
        return within + self._log_det_beyond(self.rank)

    def _log_det_beyond(self, rank: int) -> torch.Tensor:
        """Return what directions after the first `rank` add to it."""
        if self.spectrum is None or not self.whole or not self.is_scalar:
            return self.factor.new_zeros((), dtype=torch.float64)
        ridge = self.prior.double() / self.factor.double()
        return self.spectrum.log_det_beyond(rank, ridge.reshape(()))

    def log_det_ratios(self) -> torch.Tensor:
        """Return the same for every rank k = 1..K, `(K,)`, from one factorisation: the
        Cholesky factor of a leading block is the leading block of the factor."""
        ranks = range(1, self.rank + 1)
        if not self.is_scalar and self.complement is not Complement.DROP:
            return torch.stack([self.truncate(k).log_det_ratio for k in ranks])
        G, prior = _cholesky(self.precision), _cholesky(self.prior_on_subspace)
        within = 2 * (G.diagonal() / prior.diagonal()).log().cumsum(0)
        return within + torch.stack([self._log_det_beyond(k) for k in ranks])

    # Weight space

    @property
    def dimension(self) -> int:
        """Dimension of the space the posterior has a density on."""
        return self.rank if self.complement is Complement.DROP else self.n_params

    @property
    def log_det_precision(self) -> torch.Tensor:
        """log det of the precision that `square_norm` and samples have."""
        if self.complement in (Complement.DROP, Complement.PRIOR):
            return self.log_det_prior + replace(self, whole=False).log_det_ratio
        outside = self.n_params - self.rank
        return _log_det(self.precision) + outside * self.outside_precision.log()

    def square_norm(self, delta: torch.Tensor) -> torch.Tensor:
        """Return ΔᵀPΔ for Δ `(P,)` under the posterior precision P."""
        z = (self.basis.directions.to(delta) @ delta).double()
        square = delta.double().square()
        if self.complement is Complement.PRIOR:
            outside = (square * self.prior_diagonal()).sum()
            return self.factor * (_times(z, self.H) @ z) + outside
        inside = _times(z, self.precision) @ z
        if self.complement is Complement.DROP:
            return inside
        return inside + (square.sum() - z.square().sum()) * self.outside_precision

    def sample_offsets(
        self, noise: torch.Tensor, outside: torch.Tensor | None
    ) -> torch.Tensor:
        """Return θ − θ̂ `(n, P)` from normal noise `(n, K)` and, for the complement,
        `(n, P)`."""
        V, scale = self.basis.directions.to(noise), self.scale
        z = _times(noise, scale if scale.ndim == 1 else scale.mT)
        if outside is None:
            return _times(z, V)
        if self.is_scalar:
            # One precision outside: single weights do not tell the parts apart.
            outside = outside * self.outside_precision.to(noise).rsqrt()
            return outside + _times(z - accurate_product(outside, V), V)
        # A draw ε from the prior, its z replaced by one of the posterior.
        variance = 1 / self.prior_diagonal().to(noise)
        outside = outside * variance.sqrt()
        shift = _times(z - accurate_product(outside, V), self.prior_on_subspace)
        return outside + _times(shift, V) * variance

    # Function space

    @property
    def needs_residual(self) -> bool:
        """Whether predictions need the part of J(x) outside the basis."""
        return self.complement is not Complement.DROP

    @property
    def prior_of_gradients(self) -> torch.Tensor | None:
        """The prior that features and residuals depend on; None where they serve every
        scalar one."""
        return self.prior if self.needs_residual and not self.is_scalar else None

    @property
    def gradient_split(self) -> GradientSplit:
        """Splits gradients into features and what else predictions need of them."""
        V, span = self.basis.directions, self.span
        if self.prior_of_gradients is not None:
            weights = (1 / self.prior_diagonal()).detach()
            return GradientSplit(V, weights, self.prior_on_subspace.detach())
        if self.complement is Complement.MATCHED and span is not None:
            return GradientSplit(V, parts=span.parts, n_parts=len(span.sizes) + 1)
        return GradientSplit(V)

    @cached_property
    def _matched(self) -> Precisions | None:
        """Matched precisions, where they are asked for."""
        spectrum, span = self.spectrum, self.span
        matched = self.complement is Complement.MATCHED
        if not matched or spectrum is None or span is None:
            return None
        variances = self.scale.square().sum()
        freedom = self.rank - (self.prior.double() * variances).squeeze()
        trace = self.H.trace() if self.H.ndim > 1 else self.H.sum()
        known = spectrum, span, self.factor, self.prior
        return Precisions.matched(*known, self.rank, freedom, trace)

    @property
    def outside_precision(self) -> torch.Tensor:
        """One precision for all directions outside the basis, for a scalar prior."""
        if self._matched is not None:
            return self._matched.single
        prior, asked = self.prior.double().reshape(()), self.complement
        return prior if isinstance(asked, Complement) else torch.full_like(prior, asked)

    def function_values(
        self,
        f: torch.Tensor,
        phi: torch.Tensor,
        residual: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
    ) -> FunctionValues:
        """Return the Gaussian over f(x), outputs `(..., C)` with features
        `(..., c, K)`, and products `(..., n, c, c)` of the n parts of their gradients
        outside the basis; of all outputs, or of c `outputs` `(B, c)`."""
        root, matched = self.scale, self._matched
        if not self.needs_residual:
            residual = None
        elif residual is None or (matched is not None and residual.shape[-3] == 1):
            raise ValueError(
                "This complement needs the part of J(x) outside the basis besides the "
                "features; make the cache with this posterior, after setting the "
                "complement."
            )
        elif not self.is_scalar:  # φ = JD⁻¹V, the factor is JW G^{-1/2}
            root, residual = self.prior_on_subspace @ root, residual.sum(-3)
        elif matched is not None:
            residual = matched.covariance(residual)
        else:
            residual = residual.sum(-3) / self.outside_precision.to(residual)
        factor = _times(phi, root)
        if outputs is not None:
            return FunctionValues.of_outputs(f, factor, residual, outputs)
        return FunctionValues(f, factor, residual)
