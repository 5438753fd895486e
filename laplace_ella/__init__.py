"""ELLA, the Nyström-NTK linearised Laplace, as a member of the laplace-torch family.

Importing the package registers `hessian_structure="nystrom"` with `laplace.Laplace`.
"""

from laplace_ella._errors import (
    BorderWarning,
    NotFittedError,
    NumericalWarning,
    RankWarning,
    UnsupportedLayerError,
)
from laplace_ella.cache import FeatureCache
from laplace_ella.compare import compare
from laplace_ella.diagnostics import Diagnostics, diagnose
from laplace_ella.ella import ELLALaplace
from laplace_ella.features import FeatureMode
from laplace_ella.last_layer import ELLALLLaplace
from laplace_ella.layout import OutputLayout
from laplace_ella.memory import InsufficientMemoryError, MemoryEstimate
from laplace_ella.methods import Method, available_methods, default_methods
from laplace_ella.nystrom import NystromBasis
from laplace_ella.posterior import Complement, SubspacePosterior
from laplace_ella.report import Report
from laplace_ella.rows import RowMode
from laplace_ella.stopping import EarlyStopping, augmented_validation
from laplace_ella.tuning import prior_precision_from_weight_decay
from laplace_ella.uncertainty import Uncertainty, decompose

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022, grouped by what they are
    # The posteriors
    "ELLALLLaplace",
    "ELLALaplace",
    # Their settings
    "Complement",
    "EarlyStopping",
    "FeatureMode",
    "OutputLayout",
    "RowMode",
    "augmented_validation",
    "prior_precision_from_weight_decay",
    # Their parts
    "FeatureCache",
    "MemoryEstimate",
    "NystromBasis",
    "SubspacePosterior",
    # Looking at them
    "Diagnostics",
    "Method",
    "Report",
    "Uncertainty",
    "available_methods",
    "compare",
    "decompose",
    "default_methods",
    "diagnose",
    # Errors and warnings
    "BorderWarning",
    "InsufficientMemoryError",
    "NotFittedError",
    "NumericalWarning",
    "RankWarning",
    "UnsupportedLayerError",
]
