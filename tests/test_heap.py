"""Memory of a CPU, while passes go on."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from laplace_ella.derivatives.sizes import Activations, PassSizes
from laplace_ella.support import heap
from laplace_ella.support.heap import kept_memory, large_tensor, watched_passes

MB = 2**20
CPU = torch.device("cpu")

needs_glibc = pytest.mark.skipif(
    not heap.IS_GLIBC, reason="about the C library of Linux"
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
    assert within <= before / 50
    assert left < 256 * MB  # at most what it was; often nothing


@pytest.fixture
def reserved(monkeypatch):
    """What was reserved, in MB."""
    sizes, reserve = [], heap._reserve

    def record(n_bytes):
        sizes.append(n_bytes // MB)
        return reserve(n_bytes)

    monkeypatch.setattr(heap, "_reserve", record)
    return sizes


@needs_glibc
def test_what_a_larger_context_keeps_is_not_kept_again(reserved):
    with kept_memory(256 * MB):
        with kept_memory(128 * MB), kept_memory(512 * MB), kept_memory(300 * MB):
            pass
        with pytest.raises(KeyError), kept_memory(512 * MB):
            raise KeyError
        with kept_memory(256 * MB):
            pass
    with kept_memory(heap.LEAST - 1):
        pass
    assert reserved == [256, 512, 512]
    assert heap._active == []


@needs_glibc
def test_contexts_of_generators_end_in_any_order(reserved):
    def passes(n_bytes):
        with kept_memory(n_bytes):
            yield

    first, second = passes(100 * MB), passes(300 * MB)
    next(first), next(second)
    first.close()
    assert heap._active == [300 * MB]
    second.close()
    assert heap._active == []
    assert reserved == [100, 300]


@needs_glibc
def test_other_threads_have_other_heaps(reserved):
    def work():
        with kept_memory(256 * MB):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reserved == []


@needs_glibc
def test_limits_of_the_process_are_respected(reserved, monkeypatch):
    monkeypatch.setattr(heap, "_addresses_left", lambda: 800 * MB)
    with kept_memory(256 * MB):
        pass
    assert reserved == []
    with kept_memory(128 * MB):
        pass
    assert reserved == [128]


@needs_glibc
def test_without_room_all_goes_on(monkeypatch):
    monkeypatch.setattr(heap, "PIECE", 2**60)
    assert heap._reserve(1) is None
    with kept_memory(256 * MB):
        assert heap._active == []


@pytest.fixture
def system(monkeypatch):
    """Bytes that the process has got from the system, and nothing lost as yet."""
    taken = [1]
    monkeypatch.setattr(heap, "_bytes_from_system", lambda: taken[0])
    monkeypatch.setattr(heap, "_lost", [])
    return taken


@needs_glibc
def test_passes_that_lose_their_memory_keep_it(reserved, system):
    def run(lost, n_bytes=128 * MB):
        """Passes that lose so many MB each."""
        for mb in watched_passes(lost, n_bytes):
            system[0] += mb * MB

    run([99, 0, 99, 0, 1, 1])  # a first use is none, nor is what others leave
    assert reserved == []
    run([99, 99, 99, 99])
    assert reserved == [128]
    run([0])  # it is known from now on
    assert reserved == [128, 128]
    run([0], heap.LEAST - 1)
    assert reserved == [128, 128]
    assert heap._active == []


@needs_glibc
def test_passes_are_not_watched_where_memory_is_kept(reserved, system):
    with kept_memory(256 * MB):
        for _ in watched_passes(range(9), 128 * MB):
            system[0] += 99 * MB
    assert heap._lost == []
    assert reserved == [256]


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


def test_what_passes_keep():
    """Passes with large results are worth it; on a CPU only."""
    resnet = PassSizes(269_722, 4, Activations(2**16, 3 * 2**20))
    efficientnet = PassSizes(4_652_008, 4, Activations(4_903_296, 10**8))
    assert resnet.row_heap(1, 10) < resnet.row_heap(4, 10) == resnet.row_heap(99, 10)
    assert 0 < resnet.row_heap(128) <= resnet.heap_limit
    assert resnet.tangent_heap(1, 20) == 0
    assert efficientnet.tangent_heap(1, 10) > heap.LEAST
    limited = replace(efficientnet, budget=10**8)
    assert limited.heap_limit <= 10**8 / 4
    other = replace(efficientnet, device="cuda")
    assert other.row_heap(128) == other.tangent_heap(1, 10) == other.heap_limit == 0
