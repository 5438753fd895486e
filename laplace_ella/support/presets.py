"""Settings that have a name."""

from __future__ import annotations

from typing import Any

__all__ = ["PAPER"]

PAPER: dict[str, Any] = {
    "subsample_size": 2000,
    "n_eigenvalues": 20,
    "complement": "drop",
    "evidence": "basis",
}
"""ELLA as in Deng et al. 2022, Sec. 5, with early stopping on validation data.

Examples
--------
>>> import torch
>>> from laplace import Laplace
>>> import laplace_ella
>>> la = Laplace(
...     torch.nn.Linear(2, 3), "classification", "all", "nystrom", **laplace_ella.PAPER
... )
>>> la.subsample_size, la.n_eigenvalues
(2000, 20)

`la.fit(train_loader, val_loader=val_loader, early_stopping=True)` stops as the paper
does.
"""
