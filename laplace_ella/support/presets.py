"""Settings that have a name."""

from __future__ import annotations

from typing import Any

__all__ = ["PAPER"]

#: ELLA as in Deng et al. 2022, Sec. 5: `Laplace(model, likelihood, "all", "nystrom",
#: **laplace_ella.PAPER)`, with early stopping on validation data.
PAPER: dict[str, Any] = {
    "subsample_size": 2000,
    "n_eigenvalues": 20,
    "complement": "drop",
    "evidence": "basis",
}
