"""ELLA, the Nyström-NTK linearised Laplace, as a member of the laplace-torch family.

Importing the package registers `hessian_structure="nystrom"` with `laplace.Laplace`.
"""

from laplace_ella import errors, metrics, plotting
from laplace_ella.comparison.compare import compare
from laplace_ella.comparison.methods import Method, available_methods, default_methods
from laplace_ella.comparison.report import Report
from laplace_ella.derivatives.modes import ComputeOptions
from laplace_ella.diagnostics import diagnose
from laplace_ella.ella import ELLALaplace
from laplace_ella.fitting.early_stopping import EarlyStopping, augmented_validation
from laplace_ella.last_layer import ELLALLLaplace
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.settings import PAPER
from laplace_ella.structures import register_structure
from laplace_ella.support.memory import MemoryEstimate
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.calibration import Calibration
from laplace_ella.tuning.evidence import prior_precision_from_weight_decay
from laplace_ella.tuning.temperature import temperature_scaling
from laplace_ella.uncertainty import decompose

__version__ = "0.1.0"

# Posteriors and their settings, their parts, and what looks at them
__all__ = ["PAPER", "ComputeOptions", "ELLALLLaplace", "ELLALaplace", "EarlyStopping"]
__all__ += ["augmented_validation", "prior_precision_from_weight_decay"]
__all__ += ["register_structure", "temperature_scaling"]
__all__ += ["Calibration", "FeatureCache", "MemoryEstimate", "NystromBasis"]
__all__ += ["SubspacePosterior"]
__all__ += ["Method", "Report", "available_methods", "compare", "decompose"]
__all__ += ["default_methods", "diagnose", "errors", "metrics", "plotting"]
