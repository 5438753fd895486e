"""How good the approximation is: its spectrum, and effective numbers of parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laplace_ella.ella import ELLALaplace
from laplace_ella.posterior.posterior import SubspacePosterior


@dataclass(frozen=True)
class Diagnostics:
    """The findings of `diagnose`; print it for a summary.

    Attributes
    ----------
    n_samples, rank : int
        M sampled gradients and K directions
    eigenvalues : torch.Tensor
        spectrum of the sampled gradients' Gram matrix in the basis `(K,)`, descending
    explained : torch.Tensor
        share of its trace in the first k directions `(K,)`
    effective_dof : float
        effective number of parameters in the basis, between 0 and K
    dof_outside : float, optional
        outside the basis, by the spectrum of the sampled gradients; None where that
        does not tell, see `ELLALaplace.evidence`
    evidence_estimated : float
        share of the evidence's log determinant that is estimated from a sample: that
        of the directions outside the basis, unless all gradients were sampled
    """

    n_samples: int
    rank: int
    eigenvalues: torch.Tensor
    explained: torch.Tensor
    effective_dof: float
    dof_outside: float | None
    evidence_estimated: float

    def __str__(self) -> str:
        first, last = float(self.eigenvalues[0]), float(self.eigenvalues[-1])
        outside = ""
        if self.dof_outside is not None:
            estimated = f"{self.evidence_estimated:.0%} of the evidence's log det"
            outside = f", {self.dof_outside:.2f} outside; {estimated} estimated"
        return (
            f"ELLA with {self.rank} directions of {self.n_samples} gradients\n"
            f"  spectrum: λ₁ {first:.3g} … λ_K {last:.3g}, "
            f"{float(self.explained[-1]):.1%} of the sampled trace\n"
            f"  effective parameters: {self.effective_dof:.2f} in the basis{outside}"
        )


def diagnose(la: ELLALaplace) -> Diagnostics:
    """Return the spectrum and the effective numbers of parameters of a fit.

    To see what the approximation costs, compare with a fit of
    `n_eigenvalues="exact"`, linearised Laplace with all gradients.

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=2)
    >>> la.fit([(torch.randn(50, 2), torch.randint(3, (50,)))])
    >>> found = laplace_ella.diagnose(la)
    >>> found.rank, found.n_samples, 0 < found.effective_dof < 2
    (2, 150, True)
    """
    posterior, basis = la.posterior, la.posterior.basis
    with torch.no_grad():
        curvature = posterior.precision - posterior.prior_on_subspace
        # tr f·H G⁻¹, the number of directions that the data determine
        inside = torch.linalg.solve(posterior.precision, curvature).trace()
        freedom = float(inside), *_outside(posterior)
    return Diagnostics(
        basis.n_samples, la.rank, basis.eigenvalues, basis.explained, *freedom
    )


def _outside(posterior: SubspacePosterior) -> tuple[float | None, float]:
    """Return effective parameters outside the basis, and the estimated share of the
    evidence's log determinant."""
    spectrum = posterior.spectrum
    if spectrum is None or posterior.prior.numel() > 1:
        return None, 0.0
    ridge = posterior.prior.double() / posterior.factor.double()
    top = spectrum.scaled[: posterior.rank]
    freedom = spectrum.degrees_of_freedom(ridge) - (top / (top + ridge)).sum()
    share = 0.0
    if posterior.whole and not spectrum.complete:
        beyond = spectrum.log_det_beyond(posterior.rank, ridge)
        share = float(beyond / posterior.log_det_ratio)
    return max(float(freedom), 0.0), share
