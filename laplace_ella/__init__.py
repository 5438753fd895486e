"""ELLA, the Nyström-NTK linearised Laplace, as a member of the laplace-torch family.

Importing the package registers `hessian_structure="nystrom"` with `laplace.Laplace`.
"""

from laplace_ella import acquisition
from laplace_ella.comparison.compare import compare
from laplace_ella.comparison.methods import Method, available_methods, default_methods
from laplace_ella.comparison.report import Report
from laplace_ella.derivatives.features import FeatureMode
from laplace_ella.derivatives.modes import Modes
from laplace_ella.derivatives.options import ComputeOptions
from laplace_ella.derivatives.rows import RowMode
from laplace_ella.diagnostics.diagnose import Diagnostics, diagnose
from laplace_ella.diagnostics.uncertainty import Uncertainty, decompose
from laplace_ella.ella import ELLALaplace
from laplace_ella.errors import (
    BorderWarning,
    CheckpointWarning,
    CompileWarning,
    InsufficientMemoryError,
    NotDifferentiableError,
    NotFittedError,
    NumericalWarning,
    OtherProcessError,
    RankWarning,
    SoftmaxWarning,
    UnsupportedLayerError,
)
from laplace_ella.fitting.journal import Checkpoint
from laplace_ella.fitting.memory import MemoryEstimate
from laplace_ella.fitting.stopping import EarlyStopping, augmented_validation
from laplace_ella.last_layer import ELLALLLaplace
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.outside import Complement, EvidenceOf
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.structures import register_structure
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.links import Link
from laplace_ella.support.presets import PAPER
from laplace_ella.tuning.cache import FeatureCache
from laplace_ella.tuning.calibration import temperature_scaling
from laplace_ella.tuning.joint_calibration import Calibration
from laplace_ella.tuning.search import prior_precision_from_weight_decay

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022, grouped by what they are
    # The posteriors
    "ELLALLLaplace",
    "ELLALaplace",
    # Their settings
    "PAPER",
    "Checkpoint",
    "Complement",
    "ComputeOptions",
    "EarlyStopping",
    "EvidenceOf",
    "FeatureMode",
    "Link",
    "OutputLayout",
    "RowMode",
    "augmented_validation",
    "prior_precision_from_weight_decay",
    "register_structure",
    "temperature_scaling",
    # Their parts
    "Calibration",
    "FeatureCache",
    "MemoryEstimate",
    "Modes",
    "NystromBasis",
    "SubspacePosterior",
    # Looking at them, deciding by them
    "Diagnostics",
    "Method",
    "Report",
    "Uncertainty",
    "acquisition",
    "available_methods",
    "compare",
    "decompose",
    "default_methods",
    "diagnose",
    # Errors and warnings
    "BorderWarning",
    "CheckpointWarning",
    "CompileWarning",
    "InsufficientMemoryError",
    "NotDifferentiableError",
    "NotFittedError",
    "NumericalWarning",
    "OtherProcessError",
    "RankWarning",
    "SoftmaxWarning",
    "UnsupportedLayerError",
]
