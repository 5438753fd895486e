"""Memory of a CPU, while passes go on."""

import platform
import subprocess
import sys
import threading

import pytest
import torch

from laplace_ella.support import heap
from laplace_ella.support.heap import kept_memory, large_tensor

MB = 2**20
CPU = torch.device("cpu")

needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="about the C library of Linux"
)

PASSES = """
import resource, torch
from laplace_ella.support.heap import kept_memory
from laplace_ella.support.resources import _resident_bytes

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):  # as if layer after layer
        results = [torch.ones(9 * 2**20) for _ in range(3)]
        del results
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults()
before, resident = faults(), _resident_bytes()
with kept_memory(2**28):
    faults()
    within = faults()
print(before, within, _resident_bytes() - resident)
"""


@needs_glibc
def test_memory_is_kept():
    """In a process of its own, since other tests leave their marks on the heap."""
    command = [sys.executable, "-W", "ignore", "-c", PASSES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, within, left = map(int, done.stdout.split())
    assert before > 10_000  # pages of 4 kB: memory comes from the system every time
    assert within < before / 50
    assert left < 256 * MB  # some of it, while something small lies above


@needs_glibc
def test_what_is_kept_by_a_larger_context_is_not_kept_again(monkeypatch):
    reserved = []
    monkeypatch.setattr(heap, "_reserve", reserved.append)
    with kept_memory(256 * MB):
        with kept_memory(128 * MB), kept_memory(512 * MB), kept_memory(300 * MB):
            pass
        with pytest.raises(KeyError), kept_memory(512 * MB):
            raise KeyError
        with kept_memory(256 * MB):
            pass
        other = threading.Thread(target=kept_memory(100 * MB).__enter__)
        other.start()
        other.join()
    with kept_memory(heap.KEPT_ANYHOW):
        pass
    assert reserved == [n * MB for n in (256, 512, 512, 100)]


def test_without_room_all_goes_on(monkeypatch):
    monkeypatch.setattr(heap, "PIECE", 2**60)
    with kept_memory(256 * MB):
        assert heap._reserve(1) is None
        assert float(torch.ones(3).sum()) == 3


@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (7, 0), (41, 2**18)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_tensors_are_like_others(shape, dtype):
    tensor = large_tensor(shape, dtype, CPU)
    assert (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, CPU)
    tensor.fill_(2)
    assert tensor.is_contiguous()
    assert float(tensor.double().sum()) == 2 * shape[0] * shape[1]


def test_large_tensors_of_other_devices():
    assert large_tensor((4096, 4096), torch.float32, torch.device("meta")).is_meta


def test_no_memory_is_told():
    with pytest.raises((MemoryError, RuntimeError)):
        large_tensor((2**30, 2**30), torch.float64, CPU)
