"""How good the approximation is: spectrum, degrees of freedom, errors and their bound.

ε_Nyström and ε_ELLA are those of Deng et al. 2022, Sec. 5.1, the bound is that of their
Theorem 1 and Corollary 1. Dense numbers come from `exact`, estimates from products of
the Jacobian with vectors.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from laplace_ella.diagnostics import exact as exactly
from laplace_ella.diagnostics.exact import (
    MEMORY_BUDGET,
    ExactLaplace,
    NystromError,
    dense_bytes,
    largest_curvature,
    nystrom_error,
    relative_errors,
)
from laplace_ella.diagnostics.jacobians import count, working
from laplace_ella.diagnostics.spectral import (
    lanczos,
    orthonormal_directions,
    residual_norms,
)
from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.checks import check_generator
from laplace_ella.support.resources import parse_bytes

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace

__all__ = [
    "DiagnosticMethod",
    "Diagnostics",
    "ErrorBound",
    "ExactLaplace",
    "NystromError",
    "dense_bytes",
    "diagnose",
    "effective_dof",
    "lanczos",
    "largest_curvature",
    "nystrom_error",
    "relative_errors",
    "residual_norms",
]


class DiagnosticMethod(str, Enum):
    """How the error of the Nyström approximation is computed."""

    AUTO = "auto"
    """Dense where `dense_bytes` fits into `memory_budget`, stochastic elsewhere."""

    DENSE = "dense"
    """All Jacobians, or their P×P product: memory of min(N·C, P)², exact numbers."""

    STOCHASTIC = "stochastic"
    """Products Jv and Jᵀu only: memory of a few directions; one pass over the data for
    the trace and one for every Lanczos step."""


@dataclass(frozen=True)
class ErrorBound:
    """The bound on ℰ = ‖Σ' − Σ‖, ELLA's weight covariance against the exact one.

    Deng et al. 2022, Sec. 4, for a scalar prior. They take M = K; Theorem 1 needs only
    that VVᵀ is a projector, and Drineas and Mahoney's theorem behind Corollary 1 has
    the (K+1)-th eigenvalue for a rank K < M, so both are given for any K. Corollary 1
    is about independent draws; ELLA draws without replacement.

    Both covariances lie between 0 and σ0²I, so ℰ ≤ σ0² whatever the basis: Theorem 1 is
    true and never says more than that. The quantity that the basis controls is the
    error within the span of the gradients, see `complement`.

    Attributes
    ----------
    prior_variance : float
        σ0²
    c_lambda : float
        c_Λ, the largest spectral norm of Λ(x) over the data: 1/(σ²T) for regression
    nystrom_error : float
        ℰ' = ‖J(I − VVᵀ)Jᵀ‖
    kernel_norm : float
        ‖JJᵀ‖
    next_eigenvalue : float, optional
        λ̃_{K+1} of JJᵀ; dense only, and not for both N·C and K large
    c_kappa : float, optional
        c_κ, the largest diagonal entry of JJᵀ; dense only
    n_data, n_outputs, n_samples, rank : int
        N, C, M and K
    delta : float
        Corollary 1 holds with probability 1 − δ
    error : float, optional
        ℰ itself, where P is small enough for P×P matrices
    """

    prior_variance: float
    c_lambda: float
    nystrom_error: float
    kernel_norm: float
    next_eigenvalue: float | None
    c_kappa: float | None
    n_data: int
    n_outputs: int
    n_samples: int
    rank: int
    delta: float
    error: float | None = None

    @property
    def theorem_1(self) -> float:
        """σ0⁴ c_Λ ℰ' + σ0²."""
        return self._plug_in(self.nystrom_error)

    @property
    def nystrom_bound(self) -> float | None:
        """λ̃_{K+1} + NC/√M c_κ (2 + log 1/δ), which bounds ℰ' (Theorem 2)."""
        if self.next_eigenvalue is None or self.c_kappa is None:
            return None
        spread = self.n_data * self.n_outputs / math.sqrt(self.n_samples)
        return self.next_eigenvalue + spread * self.c_kappa * (
            2 + math.log(1 / self.delta)
        )

    @property
    def corollary_1(self) -> float | None:
        """σ0⁴ c_Λ (λ̃_{K+1} + NC/√M c_κ (2 + log 1/δ)) + σ0²."""
        bound = self.nystrom_bound
        return None if bound is None else self._plug_in(bound)

    def _plug_in(self, nystrom_error: float) -> float:
        return (
            self.prior_variance**2 * self.c_lambda * nystrom_error + self.prior_variance
        )

    @property
    def complement(self) -> float:
        """Bound on ‖Σ' − Σ‖ for `complement='prior'`: it goes to 0 with ℰ'.

        Keeping the complement at the prior removes the term σ0². What is left is
        σ0⁴‖B − VVᵀBVVᵀ‖ with B = JᵀΛJ, at most σ0⁴ c_Λ (ℰ' + √(ℰ'‖JJᵀ‖)). (The paper
        has σ0⁴ c_Λ ℰ', equating norms of matrices that only share their eigenvalues;
        the part of B that mixes the subspace and its complement is of order √ℰ'.)
        """
        mixed = math.sqrt(self.nystrom_error * self.kernel_norm)
        bound = self.prior_variance**2 * self.c_lambda * (self.nystrom_error + mixed)
        return min(self.prior_variance, bound)


@dataclass(frozen=True)
class Diagnostics:
    """What `diagnose` found; print it for a summary.

    Attributes
    ----------
    n_data, n_outputs, n_params, n_samples, rank : int
        N (of the loader), C, P, M and K
    eigenvalues : torch.Tensor
        spectrum of the sampled J̃J̃ᵀ in the basis `(K,)`, descending
    explained : torch.Tensor
        share of the trace of J̃J̃ᵀ in the first k directions `(K,)`
    effective_dof : float
        of the fitted posterior, between 0 and K
    nystrom : NystromError
        over the data of the loader
    dof_outside : float, optional
        effective degrees of freedom outside the basis, by the spectrum of the sampled
        gradients; None where that does not tell, see `EvidenceOf`
    evidence_estimated : float
        share of the evidence's log determinant that is estimated from a sample: that
        of the directions outside the basis, unless all gradients were sampled
    ella_error : float, optional
        ε_ELLA over the validation data
    ella_errors : torch.Tensor, optional
        its terms, one a validation input `(N_val,)`
    bound : ErrorBound, optional
        None for a prior that is not scalar, for which the paper has no bound
    method : DiagnosticMethod
        dense or stochastic

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> loader = DataLoader(data, batch_size=25)
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=9)
    >>> la.fit(loader)
    >>> diagnostics = laplace_ella.diagnose(la, loader)
    >>> diagnostics.rank, diagnostics.n_samples
    (9, 150)
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
    nystrom: NystromError
    ella_error: float | None
    ella_errors: torch.Tensor | None
    bound: ErrorBound | None
    method: DiagnosticMethod

    def __str__(self) -> str:
        error, how = self.nystrom, self.method.value
        lines = [
            f"ELLA diagnostics ({how}): N={self.n_data}, C={self.n_outputs}, "
            f"P={self.n_params}, M={self.n_samples}, K={self.rank}",
            _line(
                "spectrum",
                f"λ₁ {self.eigenvalues[0]:.3g} … λ_K {self.eigenvalues[-1]:.3g}, "
                f"{self.explained[-1]:.1%} of the sampled trace",
            ),
            _line("effective degrees of freedom", self._freedom()),
            _line(
                "ε_Nyström (spectral norm)",
                f"{error.relative:.4g}" + ("" if error.exact else ", estimated"),
            ),
            _line(
                "share of the trace missed",
                f"{error.relative_trace:.4g}"
                + ("" if error.exact else f" ± {error.relative_trace_error:.1g}"),
            ),
        ]
        if self.ella_error is not None:
            lines.append(_line("ε_ELLA", f"{self.ella_error:.4g}"))
        if self.bound is None:
            lines.append(_line("bound", "none: the prior is not scalar"))
            return "\n".join(lines)
        b = self.bound
        lines += [
            _line(
                "bound: σ0², c_Λ, ℰ'",
                _numbers(b.prior_variance, b.c_lambda, b.nystrom_error),
            ),
            _line("Theorem 1", f"ℰ ≤ {b.theorem_1:.4g}"),
        ]
        if b.corollary_1 is not None:
            lines.append(
                _line(
                    "Corollary 1",
                    f"ℰ ≤ {b.corollary_1:.4g} with probability {1 - b.delta:.2f} "
                    f"(λ̃_K+1 {b.next_eigenvalue:.3g}, c_κ {b.c_kappa:.3g})",
                )
            )
        if b.error is not None:
            lines.append(_line("ℰ itself", f"{b.error:.4g}"))
        return "\n".join(lines)

    def _freedom(self) -> str:
        within = f"{self.effective_dof:.2f}"
        if self.dof_outside is None:
            return within
        share = f"{self.evidence_estimated:.0%} of the evidence's log det estimated"
        return f"{within} in the basis, {self.dof_outside:.2f} outside; {share}"


def _line(name: str, value: str) -> str:
    return f"  {name + ':':<31}{value}"


def _numbers(*values: float) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def effective_dof(H: torch.Tensor, prior: torch.Tensor) -> float:
    """tr(H (H + D)⁻¹), the number of directions that the data determine.

    Parameters
    ----------
    H : torch.Tensor
        curvature with noise and temperature `(K, K)`
    prior : torch.Tensor
        prior precision on the subspace VᵀDV `(K, K)`
    """
    return float(torch.linalg.solve(H + prior, H).trace())


def _outside(posterior: SubspacePosterior) -> tuple[float | None, float]:
    """Degrees of freedom outside the basis, and the estimated share of the evidence's
    log determinant."""
    tail = posterior.tail
    if tail is None or not posterior.is_scalar:
        return None, 0.0
    spectrum = tail.spectrum
    ridge = posterior.prior.double() / posterior.factor.double()
    top = spectrum.scaled[: posterior.rank]
    freedom = spectrum.degrees_of_freedom(ridge) - (top / (top + ridge)).sum()
    if spectrum.is_exact or not posterior.whole:
        return max(float(freedom), 0.0), 0.0
    share = posterior.log_det_outside / posterior.log_det_ratio
    return max(float(freedom), 0.0), float(share)


def _estimate(
    la: ELLALaplace,
    loader: DataLoader,
    n_probes: int,
    n_steps: int,
    tol: float,
    generator: torch.Generator | None,
    progress_bar: bool = False,
) -> tuple[NystromError, float]:
    """Stochastic estimate of the Nyström error, and the largest ‖Λ(x)‖."""
    linearizer = la.fitter.linearizer
    directions = orthonormal_directions(
        la.posterior.basis.directions, la.fitter.linearizer.device
    )
    # Hutchinson: E‖J(I − VVᵀ)z‖² = tr J(I − VVᵀ)Jᵀ. The rest of the trace is ‖JV‖².
    probes = torch.randn(
        n_probes,
        directions.shape[1],
        generator=generator,
        dtype=directions.dtype,
        device=directions.device,
    ).sign()
    probes = probes - (probes @ directions.T) @ directions
    squares = torch.zeros(n_probes, dtype=torch.float64, device=directions.device)
    within, curvature = 0.0, 0.0
    tangents = torch.cat([probes, directions])
    for x, _ in la.fitter.batches(loader, "[Trace]", progress_bar):
        features = linearizer.features(x, tangents)
        products = features.phi.double().square().sum((0, 1))
        squares += products[:n_probes]
        within += float(products[n_probes:].sum())
        curvature = max(
            curvature, largest_curvature(features.f, la.fitter.observation.family)
        )
    del probes, tangents

    def apply(v: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(v)
        for x, _ in la.fitter.batches(loader, "[Lanczos]", progress_bar):
            u = linearizer.features(x, v).phi  # v → Jv
            total += linearizer.pull_back(x, u.to(v))  # Jv → JᵀJv
        return total

    ranks = [len(directions), 0]
    norms, errors = residual_norms(
        apply, directions, ranks, generator, directions.dtype, n_steps, tol
    )
    residual = float(squares.mean())
    spread = float(squares.std()) / math.sqrt(n_probes) if n_probes > 1 else math.inf
    error = NystromError(
        float(norms[0]),
        float(norms[1]),
        residual,
        residual + within,
        float(errors[0]),
        spread,
        exact=False,
    )
    return error, curvature


def diagnose(
    la: ELLALaplace,
    loader: DataLoader,
    val_loader: DataLoader | None = None,
    *,
    method: DiagnosticMethod | str = DiagnosticMethod.AUTO,
    delta: float = 0.05,
    memory_budget: int | float | str = MEMORY_BUDGET,
    n_probes: int = 32,
    n_steps: int = 20,
    tol: float = 1e-3,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> Diagnostics:
    """Spectrum, degrees of freedom and approximation errors of a fitted posterior.

    Parameters
    ----------
    la : ELLALaplace
        fitted
    loader : torch.utils.data.DataLoader
        the training data, or a part of them: ε_Nyström is that of their kernel matrix,
        and for ε_ELLA and ℰ both posteriors get the curvature of these data
    val_loader : torch.utils.data.DataLoader, optional
        inputs for ε_ELLA, which needs dense work
    method : DiagnosticMethod or str, default="auto"
        see `DiagnosticMethod`
    delta : float, default=0.05
        Corollary 1 holds with probability 1 − δ
    memory_budget : int, float or str, default="2 GiB"
        memory that dense work may take, in bytes or as a text
    n_probes : int, default=32
        stochastic: probes of the trace, one tangent each
    n_steps, tol : int and float
        stochastic: passes over the data for the spectral norms, and the relative
        residual at which they end; memory of 2·n_steps parameter vectors
    generator : torch.Generator, optional
        stochastic: source of the probes; made from `la.seed` without it
    progress_bar : bool, default=False
        of the passes over the data

    Returns
    -------
    Diagnostics

    Raises
    ------
    InsufficientMemoryError
        if dense work was asked for, by `method` or by `val_loader`, and needs more than
        `memory_budget`

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> from laplace_ella.diagnostics.diagnose import diagnose
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    ... )
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> loader = DataLoader(data, batch_size=25)
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=10)
    >>> la.fit(loader)
    >>> report = diagnose(la, loader, val_loader=loader)
    >>> report.bound.error <= report.bound.theorem_1
    True
    """
    check_generator(generator, la.fitter.linearizer.device)
    try:
        method = DiagnosticMethod(method)
    except ValueError:
        raise ValueError(
            f"method must be one of {[m.value for m in DiagnosticMethod]}, got "
            f"{method!r}."
        ) from None
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}.")
    for name, value in (("n_probes", n_probes), ("n_steps", n_steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if method is DiagnosticMethod.STOCHASTIC and val_loader is not None:
        raise ValueError(
            "ε_ELLA compares with the exact posterior and is dense: leave out "
            "val_loader, or use method='dense'."
        )
    budget = parse_bytes(memory_budget)
    n_data = count(la, loader)
    n_val = 0 if val_loader is None else count(la, val_loader, "val_loader")
    needed = exactly.needed_bytes(la, n_data, n_val)
    dense = method is DiagnosticMethod.DENSE or val_loader is not None
    if dense and needed > budget:
        raise InsufficientMemoryError(exactly.too_large(la, n_data, needed, budget))
    dense = method is not DiagnosticMethod.STOCHASTIC and needed <= budget

    with torch.no_grad():
        posterior = la.posterior
        prior = posterior.prior_on_subspace
        dof = effective_dof(posterior.precision - prior, prior)
        dof_outside, estimated = _outside(posterior)
    exact, errors, weight_error = None, None, None
    if dense:
        exact = ExactLaplace.from_loader(la, loader, budget, progress_bar)
        (error,) = exact.nystrom_errors(posterior.basis.directions)
        curvature = exact.curvature
        posterior = exact.refit(posterior)
        if val_loader is not None:
            errors = exact.ella_errors(posterior, la, val_loader, progress_bar)
        small = la.n_params <= exactly.EIGH_LIMIT and 5 * 8 * la.n_params**2 <= budget
        if small:
            weight_error = exact.weight_error(posterior)
    else:
        with working(la, loader):
            error, curvature = _estimate(
                la,
                loader,
                n_probes,
                n_steps,
                tol,
                generator or la.fitter.fresh_generator(),
                progress_bar,
            )
    bound = None
    if posterior.is_scalar:
        bound = ErrorBound(
            prior_variance=1 / float(posterior.prior),
            c_lambda=float(posterior.factor) * curvature,
            nystrom_error=error.residual_norm,
            kernel_norm=error.norm,
            next_eigenvalue=None if exact is None else exact.eigenvalue(la.rank),
            c_kappa=None if exact is None else exact.c_kappa,
            n_data=n_data,
            n_outputs=la.n_outputs,
            n_samples=posterior.basis.n_samples,
            rank=la.rank,
            delta=delta,
            error=weight_error,
        )
    return Diagnostics(
        n_data=n_data,
        n_outputs=la.n_outputs,
        n_params=la.n_params,
        n_samples=posterior.basis.n_samples,
        rank=la.rank,
        eigenvalues=posterior.basis.eigenvalues,
        explained=posterior.basis.explained,
        effective_dof=dof,
        dof_outside=dof_outside,
        evidence_estimated=estimated,
        nystrom=error,
        ella_error=None if errors is None else float(errors.mean()),
        ella_errors=errors,
        bound=bound,
        method=DiagnosticMethod.DENSE if dense else DiagnosticMethod.STOCHASTIC,
    )
