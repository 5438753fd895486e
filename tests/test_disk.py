"""Gradients and directions in a memory-mapped file."""

import errno
import gc
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace, InsufficientMemoryError
from laplace_ella.support import disk
from tests.cases import mlp
from tests.fitting import assert_close

N, D, C = 30, 4, 2
#: More than one pass and the Gram matrix take, and less than all rows besides.
BUDGET = 40_000_000
MANY = 100_000


def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


def fitted(**settings):
    torch.manual_seed(0)
    x, y = data()
    la = ELLALaplace(mlp(D, MANY // (D + C), C).double(), "regression", **settings)
    la.fit(DataLoader(TensorDataset(x, y), 10))
    return la


@pytest.mark.parametrize(
    "settings", [{"n_eigenvalues": "exact"}, {"n_eigenvalues": 7, "subsample_size": 50}]
)
def test_same_numbers_as_in_memory(settings, tmp_path):
    """The basis of all rows, not of a summary; the file is gone with the posterior."""
    x = data()[0]
    memory = fitted(**settings)
    filed = fitted(scratch_dir=tmp_path, memory_budget=BUDGET, **settings)
    estimate = filed.estimate_memory(DataLoader(TensorDataset(*data()), 10))
    assert estimate.method == "disk"
    assert estimate.disk > BUDGET
    assert str(estimate).count("on disk") == 1
    assert not list(tmp_path.iterdir())  # without a name: nothing is left behind
    assert_close(filed.basis.eigenvalues, memory.basis.eigenvalues)
    assert_close(filed.log_marginal_likelihood(), memory.log_marginal_likelihood())
    assert_close(filed(x, joint=True), memory(x, joint=True), rtol=1e-6)
    filed.load_state_dict(filed.state_dict())
    assert_close(filed(x)[1], memory(x)[1], rtol=1e-6)
    maps = Path("/proc/self/maps")
    if maps.exists() and settings["n_eigenvalues"] == "exact":
        assert str(tmp_path) in maps.read_text()
        del filed
        gc.collect()
        assert str(tmp_path) not in maps.read_text()


def test_memory_is_used_where_it_suffices(tmp_path):
    """A folder is for what does not fit."""
    la = fitted(scratch_dir=tmp_path, n_eigenvalues="exact")
    loader = DataLoader(TensorDataset(*data()), 10)
    assert la.estimate_memory(loader).method == "exact"
    with pytest.raises(InsufficientMemoryError, match="scratch_dir="):
        fitted(n_eigenvalues="exact", memory_budget=BUDGET)


def test_no_room_and_no_folder(tmp_path, monkeypatch):
    """A full disk, a missing folder and a GPU are told before any gradient."""
    with pytest.raises(ValueError, match="folder that can be written"):
        ELLALaplace(mlp(2, 2), "regression", scratch_dir=tmp_path / "none")
    with pytest.raises(TypeError, match="path of a folder"):
        ELLALaplace(mlp(2, 2), "regression", scratch_dir="")
    with pytest.raises(ValueError, match="basis_device='cuda"):
        ELLALaplace(
            mlp(2, 2), "regression", scratch_dir=tmp_path, basis_device="cuda:0"
        )
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage(1000))
    with pytest.raises(InsufficientMemoryError, match="folder with room"):
        fitted(scratch_dir=tmp_path, memory_budget=BUDGET, n_eigenvalues="exact")
    with pytest.raises(InsufficientMemoryError, match=r"(?s)on disk.*1 kB are free"):
        disk.tensor_on_disk((1000, 1000), torch.float64, tmp_path)
    few = {"n_eigenvalues": 7, "subsample_size": 50, "memory_budget": BUDGET}
    assert fitted(scratch_dir=tmp_path, **few).basis.method == "streaming"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage(10**12))
    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        fitted(scratch_dir=tmp_path, memory_budget=BUDGET, n_eigenvalues="exact")
    assert not list(tmp_path.iterdir())


def mapped_bytes(folder):
    """Bytes of files of a folder that are mapped into memory; None where unknown."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    lines = [line for line in maps.read_text().splitlines() if str(folder) in line]
    spans = [line.split()[0].split("-") for line in lines]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


def test_directions_stay_in_a_file(tmp_path):
    """Converted ones do, and those of a fit that was read from its checkpoint."""
    settings = {
        "n_eigenvalues": "exact",
        "scratch_dir": tmp_path,
        "memory_budget": BUDGET,
    }
    x, y = data()
    short = fitted(basis_dtype=torch.float32, **settings)
    assert short.basis.directions.dtype == torch.float32
    mapped = mapped_bytes(tmp_path)
    assert mapped is None or mapped >= short.basis.directions.nbytes
    expected = fitted(**settings)
    for _ in range(2):  # the second time it is finished already
        torch.manual_seed(0)
        net = mlp(D, MANY // (D + C), C).double()
        la = ELLALaplace(net, "regression", **settings)
        la.fit(DataLoader(TensorDataset(x, y), 10), checkpoint=tmp_path / "fit.pt")
        assert_close(la(x)[1], expected(x)[1], rtol=1e-6)
    del short, expected
    gc.collect()
    mapped = mapped_bytes(tmp_path)
    assert mapped is None or mapped >= la.basis.directions.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensor_on_disk(dtype, tmp_path):
    tensor = disk.tensor_on_disk((3, 5), dtype, tmp_path)
    tensor.copy_(torch.arange(15).view(3, 5))
    assert tensor.dtype == dtype
    assert torch.equal(tensor.flatten(), torch.arange(15).to(dtype))
