"""UCI regression data, split at random or with a gap in one input.

The folder `uci` holds `NAME.csv.gz`, the target in the last column.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

UCI = ("yacht", "energy", "concrete", "wine", "autompg", "protein")


class Split(NamedTuple):
    """Inputs `(N, D)` and targets `(N, 1)`, standardised by the training data."""

    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor


@lru_cache
def load(root: Path, name: str) -> np.ndarray:
    """The table `(N, D + 1)`; not to be changed in place."""
    return np.loadtxt(root / "uci" / f"{name}.csv.gz", delimiter=",")


def random_split(table: np.ndarray, seed: int, most: int | None = None) -> Split:
    """Training and test data, 90 % and 10 %, of each at most so many."""
    order = np.random.default_rng(seed).permutation(len(table))
    n = round(0.9 * len(table))
    return _standardised(table[order[:n][:most]], table[order[n:][:most]])


def gap_split(table: np.ndarray, column: int, most: int | None = None) -> Split:
    """Test data are the middle third by one input (Foong et al. 2019), training data
    what is below and above; of each at most so many, drawn at random."""
    low, gap, high = np.array_split(np.argsort(table[:, column], kind="stable"), 3)
    rng = np.random.default_rng(column)
    outside = rng.permutation(np.concatenate([low, high]))
    return _standardised(table[outside[:most]], table[rng.permutation(gap)[:most]])


def _standardised(train: np.ndarray, test: np.ndarray) -> Split:
    mean, std = train.mean(0), train.std(0)
    parts = (
        torch.tensor((part - mean) / np.where(std > 0, std, 1)).float()
        for part in (train, test)
    )
    return Split(*(side for part in parts for side in (part[:, :-1], part[:, -1:])))
