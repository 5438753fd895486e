"""How good the approximation is: errors, spectrum, exact references, uncertainty."""

from laplace_ella.diagnostics.diagnose import (
    DiagnosticMethod,
    Diagnostics,
    ErrorBound,
    diagnose,
    effective_dof,
)
from laplace_ella.diagnostics.exact import ExactLaplace, dense_bytes, largest_curvature
from laplace_ella.diagnostics.nystrom_error import (
    NystromError,
    nystrom_error,
    relative_errors,
)
from laplace_ella.diagnostics.spectral import lanczos, residual_norms
from laplace_ella.diagnostics.uncertainty import Uncertainty, decompose

__all__ = [
    "DiagnosticMethod",
    "Diagnostics",
    "ErrorBound",
    "ExactLaplace",
    "NystromError",
    "Uncertainty",
    "decompose",
    "dense_bytes",
    "diagnose",
    "effective_dof",
    "lanczos",
    "largest_curvature",
    "nystrom_error",
    "relative_errors",
    "residual_norms",
]
