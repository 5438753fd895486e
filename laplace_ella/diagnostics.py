"""How good the approximation is: spectrum, effective parameters, errors of variances.

The yardstick is the exact posterior, `n_eigenvalues="exact"`: linearised Laplace with
the gradients of every (example, output) pair. ε_Nyström and ε_ELLA are those of Deng
et al. 2022, Sec. 5.1. Index legend: N data, C outputs, P parameters, M Nyström samples,
K rank, B validation inputs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from laplace_ella.ella import ELLALaplace
from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.predictions import inputs_of


@dataclass(frozen=True)
class ExactComparison:
    """A posterior beside the exact one with the same prior, noise and temperature.

    Attributes
    ----------
    rank : int
        directions that all gradients of the training data span
    effective_dof : float
        effective number of parameters of the exact posterior
    nystrom_error : float
        ε_Nyström = ‖J(I − VVᵀ)Jᵀ‖ / ‖JJᵀ‖ over the training data, spectral norms
    energy_missed : float
        tr J(I − VVᵀ)Jᵀ / tr JJᵀ
    errors : torch.Tensor
        ‖κ − κ*‖ / ‖κ*‖ of the output covariances, spectral norms `(B,)`; their mean is
        ε_ELLA. Of outputs at many positions one value per position
    variance_ratio : float
        mean variance of the outputs divided by the exact one
    """

    rank: int
    effective_dof: float
    nystrom_error: float
    energy_missed: float
    errors: torch.Tensor
    variance_ratio: float


@dataclass(frozen=True)
class Diagnostics:
    """The findings of `diagnose`; print it for a summary.

    Attributes
    ----------
    n_data, n_outputs, n_params, n_samples, rank : int
        N, outputs per example, P, M and K
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
    exact : ExactComparison, optional
    why_not_exact : str
        why there is no comparison with the exact posterior
    """

    n_data: int
    n_outputs: int
    n_params: int
    n_samples: int
    rank: int
    eigenvalues: torch.Tensor
    explained: torch.Tensor
    effective_dof: float
    dof_outside: float | None
    evidence_estimated: float
    exact: ExactComparison | None
    why_not_exact: str = ""

    def __str__(self) -> str:
        exact, freedom = self.exact, f"{self.effective_dof:.2f}"
        if self.dof_outside is not None:
            freedom += (
                f" in the basis, {self.dof_outside:.2f} outside; "
                f"{self.evidence_estimated:.0%} of the evidence's log det estimated"
            )
        first, last = float(self.eigenvalues[0]), float(self.eigenvalues[-1])
        share = float(self.explained[-1])
        rows = {
            "spectrum": f"λ₁ {first:.3g} … λ_K {last:.3g}, {share:.1%} of the sampled "
            "trace",
            "effective parameters": freedom,
        }
        if exact is None:
            rows["exact posterior"] = self.why_not_exact
        else:
            found = f"{exact.effective_dof:.2f}, rank {exact.rank}"
            rows["of the exact posterior"] = found
            rows["ε_Nyström"] = f"{exact.nystrom_error:.4g}"
            rows["share of the trace missed"] = f"{exact.energy_missed:.4g}"
            rows["ε_ELLA"] = f"{float(exact.errors.mean()):.4g}"
            rows["variance / exact variance"] = f"{exact.variance_ratio:.4g}"
        lines = [
            f"ELLA diagnostics: N={self.n_data}, C={self.n_outputs}, "
            f"P={self.n_params}, M={self.n_samples}, K={self.rank}"
        ]
        return "\n".join(lines + [f"  {k + ':':<27}{v}" for k, v in rows.items()])


def diagnose(
    la: ELLALaplace,
    train_loader: DataLoader,
    val_loader: DataLoader | None = None,
    *,
    progress_bar: bool = False,
) -> Diagnostics:
    """Return spectrum, effective parameters and approximation errors of a posterior.

    The exact posterior is fitted to the same data, which needs the gradients of all
    (example, output) pairs in memory; where they do not fit, the result says so.

    Parameters
    ----------
    la : ELLALaplace
        a fitted posterior
    train_loader : DataLoader
        the data that it was fitted to
    val_loader : DataLoader, optional
        inputs at which variances are compared, by default the training data
    progress_bar : bool, default=False

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> loader = DataLoader(data, batch_size=25)
    >>> model = torch.nn.Linear(2, 3)
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=2)
    >>> la.fit(loader)
    >>> found = laplace_ella.diagnose(la, loader)
    >>> found.rank, found.n_samples, 0 < found.effective_dof < found.exact.effective_dof
    (2, 150, True)
    """
    posterior, basis = la.posterior, la.posterior.basis
    exact, why = None, ""
    try:
        exact = _compare(la, train_loader, val_loader or train_loader, progress_bar)
    except InsufficientMemoryError as error:
        why = f"not affordable. {error}"
    sizes = la.n_data, la.n_outputs, la.n_params, basis.n_samples, la.rank
    spectrum = basis.eigenvalues, basis.explained
    with torch.no_grad():
        freedom = _effective_dof(posterior), *_outside(posterior)
    return Diagnostics(*sizes, *spectrum, *freedom, exact, why)


def _effective_dof(posterior: SubspacePosterior) -> float:
    """Return tr f·H G⁻¹, the number of directions that the data determine."""
    curvature = posterior.precision - posterior.prior_on_subspace
    return float(torch.linalg.solve(posterior.precision, curvature).trace())


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


def _compare(
    la: ELLALaplace, train_loader: DataLoader, loader: Any, progress_bar: bool
) -> ExactComparison:
    exact = copy.copy(la)
    exact.fitted, exact.n_eigenvalues = None, "exact"
    exact.complement = Complement.PRIOR
    exact.fit(train_loader, progress_bar=progress_bar)
    all_rows = exact.posterior.basis
    # JᵀJ = WᵀΛW with orthonormal rows W: what V misses of it is Λ^½(I − RRᵀ)Λ^½.
    own = la.posterior.basis.directions.to(all_rows.directions)
    R = (all_rows.directions @ own.T).double()
    root = all_rows.eigenvalues.clamp_min(0).sqrt()
    within = (root.unsqueeze(-1) * R) @ (root.unsqueeze(-1) * R).T
    missed = torch.diag(root.square()) - within
    covariances = []  # of the outputs at every position, (n, C, C)
    for posterior in (la, exact):
        batches = inputs_of(loader, la.dict_key_y)
        parts = [posterior.predictive_moments(x)[1].detach() for x in batches]
        covariances.append(torch.cat([c.flatten(0, -3) for c in parts]).double())
    ours, theirs = covariances
    errors = torch.linalg.matrix_norm(ours - theirs, 2)
    totals = [c.diagonal(dim1=1, dim2=2).sum() for c in covariances]
    return ExactComparison(
        rank=exact.rank,
        effective_dof=_effective_dof(exact.posterior),
        nystrom_error=float(torch.linalg.matrix_norm(missed, 2) / root[0].square()),
        energy_missed=max(float(missed.trace() / root.square().sum()), 0.0),
        errors=errors / torch.linalg.matrix_norm(theirs, 2),
        variance_ratio=float(totals[0] / totals[1]),
    )
