"""ELLA, the Nyström-NTK linearised Laplace, as a member of the laplace-torch family.

Importing the package registers `hessian_structure="nystrom"` with `laplace.Laplace`.
"""

from laplace_ella._errors import NotFittedError, NumericalWarning, RankWarning
from laplace_ella.ella import ELLALaplace, ELLALLLaplace
from laplace_ella.features import FeatureMode
from laplace_ella.nystrom import NystromBasis
from laplace_ella.rows import RowMode
from laplace_ella.tuning import FeatureCache

__version__ = "0.1.0"

__all__ = [
    # The posteriors
    "ELLALLLaplace",
    "ELLALaplace",
    # Their parts
    "FeatureCache",
    "FeatureMode",
    "NystromBasis",
    "RowMode",
    # Errors and warnings
    "NotFittedError",
    "NumericalWarning",
    "RankWarning",
]
