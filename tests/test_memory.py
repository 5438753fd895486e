"""Memory: what a budget means, and that fits and predictions keep to it."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ComputeOptions, ELLALaplace
from laplace_ella.errors import InsufficientMemoryError
from laplace_ella.support.memory import free_bytes, human_bytes, parse_bytes
from tests.cases import make, mlp
from tests.fitting import build

STATUS = Path("/proc/self/status")


def convolution(C):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, C),
    )


IMAGE = (3, 32, 32)
MODELS = {
    # model, shape of an example, C, K, budget in MB, mode, batch size
    "many outputs": (mlp(20, 200, 1000), (20,), 1000, 100, 300, "auto", 300),
    "forward": (mlp(20, 200, 1000), (20,), 1000, 40, 200, "forward", 300),
    "many parameters": (mlp(20, 400, 400, 10), (20,), 10, 100, 400, "reverse", 100),
    "images": (convolution(10), IMAGE, 10, 20, 200, "reverse", 300),
    "images, many outputs": (convolution(200), IMAGE, 200, 8, 200, "forward", 300),
    "images, double": (convolution(10), IMAGE, 10, 4, 200, "double_vjp", 300),
}


def resident(key):
    """Bytes of this process: now (VmRSS), or at most since the last reset (VmHWM)."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


@pytest.mark.skipif(not STATUS.exists(), reason="no /proc here")
@pytest.mark.parametrize("name", MODELS)
def test_peaks(name):
    """A fit and predictions of a batch of many examples stay within the budget, up to
    a tenth: features in double precision are counted, too."""
    model, shape, C, K, budget, mode, n = MODELS[name]
    x, y = torch.randn(n, *shape), torch.randint(C, (n,))
    compute = ComputeOptions(mode, memory_budget=f"{budget} MB")
    options = {"subsample_size": 120, "n_eigenvalues": 5, "compute": compute}
    la = ELLALaplace(model, "classification", **options)
    la.fit([(x[:8], y[:8])])  # what is built once is not of the fit
    la(x[:4])
    la = ELLALaplace(model, "classification", **{**options, "n_eigenvalues": K})
    for work in (
        lambda: la.fit([(x, y)]),
        lambda: la(x, link_approx="mc", n_samples=20),
    ):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        work()
        assert resident("VmHWM") - before < 1.1e6 * budget


def test_budgets():
    """Numbers and texts; what cannot be a budget is refused."""
    found = [parse_bytes(b) for b in ("8 GB", "2KiB", "1.5M", 10)]
    assert found == [8 * 10**9, 2048, 1_500_000, 10]
    for wrong in ("much", "-1 GB", 0, float("nan"), "inf", None):
        with pytest.raises(ValueError, match="memory_budget"):
            parse_bytes(wrong)
    shown = [human_bytes(n) for n in (7.1e12, 1.6e10, 8.12e5)]
    assert shown == ["7.1 TB", "16.0 GB", "812 kB"]
    free = free_bytes(torch.device("cpu"))
    assert free is None or 0 < free < 2**50


def test_what_cannot_fit_is_refused_first():
    """Before any derivative, with numbers and remedies; what is needed is enough."""
    case = make("classification_cnn")
    calls = []
    case.model.register_forward_hook(lambda *args: calls.append(len(args[1][0])))
    little = build(case, compute=ComputeOptions(memory_budget=1000))
    with pytest.raises(InsufficientMemoryError, match=r"(?s)budget is.*n_eigenvalues"):
        little.fit(case.loader())
    assert len(calls) <= 8
    assert little.fitted is None
    needed = little.estimate_memory(case.loader())
    assert not needed.fits
    assert "budget" in str(needed)
    enough = build(case, compute=ComputeOptions(memory_budget=2 * needed.needed))
    enough.fit(case.loader())
    assert enough.estimate_memory(case.loader()).fits
    compute = ComputeOptions(memory_budget=20_000)
    exact = build(case, n_eigenvalues="exact", complement="prior", compute=compute)
    remedy = r"keeps all.*n_eigenvalues='auto'"
    with pytest.raises(InsufficientMemoryError, match=remedy):
        exact.fit(case.loader())


def test_the_estimate_follows_the_options():
    """Directions in another precision or place, frozen layers."""
    case = make("classification_mlp")
    loader = DataLoader(TensorDataset(case.x, case.y), 4)

    def of(**options):
        return build(case, compute=ComputeOptions(**options)).estimate_memory(loader)

    plain = of()
    assert plain.method == "exact"
    assert plain.basis == 6 * case.n_params * 8
    assert 4 * of(basis_dtype=torch.bfloat16).basis == plain.basis
    assert plain.needed <= plain.total <= plain.budget
    case.model[0].requires_grad_(False)
    assert of().basis < plain.basis
