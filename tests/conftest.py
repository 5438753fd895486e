"""Fixtures and markers of the test-suite."""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.browser import browser  # noqa: F401, one browser for all tests

#: The scripts that repeat the paper's experiments.
PAPER = Path(__file__).resolve().parents[1] / "examples" / "paper"


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


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """The reproductions can be imported, and temporary folders are in `tmp_path`."""
    monkeypatch.syspath_prepend(PAPER)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield importlib.import_module
    for name in [n for n in sys.modules if n.split(".")[0] == "common"]:
        del sys.modules[name]
