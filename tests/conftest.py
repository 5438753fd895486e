"""Fixtures and markers of the test-suite."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch


def pytest_configure(config):
    """One thread: the tensors are tiny, and waiting threads cost more than they do."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skip what needs a real GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU: torch.cuda.is_available() is False")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded():
    """The same global random state and default dtype at the start of every test."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session")
def data_dir():
    """The folder with real data and weights."""
    path = os.environ.get("LAPLACE_ELLA_DATA")
    if not path:
        pytest.skip("LAPLACE_ELLA_DATA is not set: real data and weights are needed")
    if not Path(path).is_dir():
        pytest.skip(f"LAPLACE_ELLA_DATA={path} is not a folder")
    return Path(path)
