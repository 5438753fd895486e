"""Other people's code that calls us: examples, training by evidence, wrappers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import laplace
import pytest
import torch
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace
from tests.cases import DictModel, mapping_loader, mlp

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "examples" / "paper"


# --- examples ----------------------------------------------------------------------


def run_example(name, out):
    """Run an example in smoke size; its output and its result file."""
    command = [sys.executable, "-W", "ignore", PAPER / name, "--smoke"]
    done = subprocess.run(
        [*command, "--out", out],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, (out / "results.md").read_text(encoding="utf-8")


def needs(*packages):
    """Skip where a package is missing, without importing it here."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")


@needs("botorch")
def test_bayesopt_example(tmp_path):
    printed, report = run_example("bayesopt.py", tmp_path)
    for text in (printed, report):
        assert "| Branin | random search |" in text
        assert "| Branin | ELLA + BoTorch |" in text


@needs("transformers", "peft", "vaderSentiment")
def test_huggingface_lora_example(tmp_path):
    printed, report = run_example("huggingface_lora.py", tmp_path)
    for method in ("MAP", "last-layer Laplace", "ELLA on the adapters"):
        assert f"| {method} |" in printed
        assert f"| {method} |" in report


# --- BoTorch -----------------------------------------------------------------------


@needs("botorch")
def test_acquisition_gradients_are_those_of_finite_differences():
    """Expected improvement of two points, through their joint posterior."""
    sys.path.insert(0, str(PAPER))
    try:
        import bayesopt
    finally:
        sys.path.remove(str(PAPER))
    x = torch.rand(6, 2, dtype=torch.float64)
    surrogate = bayesopt.fit_surrogate(x, x.sin().sum(-1, keepdim=True), 30)
    acquisition = bayesopt.qLogExpectedImprovement(
        surrogate,
        torch.tensor(1.2, dtype=torch.float64),
        sampler=bayesopt.SobolQMCNormalSampler(torch.Size([16]), seed=0),
    )
    points = torch.rand(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert acquisition(points).shape == (3,)
    assert torch.autograd.gradcheck(acquisition, points, atol=1e-5, rtol=1e-4)


# --- training by evidence ----------------------------------------------------------


def data(likelihood, n=24):
    x = torch.randn(n, 2)
    if likelihood == "regression":
        return x, (x.sin().sum(-1, keepdim=True) + 0.1 * torch.randn(n, 1))
    return x, (x.prod(-1) > 0).long()


@pytest.mark.parametrize("backend", [AsdlGGN, BackPackGGN, CurvlinopsGGN])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_marglik_training(likelihood, backend):
    """Laplace's joint training of weights and prior takes ELLA's evidence."""
    x, y = data(likelihood)
    loader = DataLoader(TensorDataset(x, y), batch_size=12)
    model = mlp(2, 8, 1 if likelihood == "regression" else 2)
    la, trained, margliks, losses = laplace.marglik_training(
        model,
        loader,
        likelihood,
        hessian_structure="nystrom",
        backend=backend,
        optimizer_kwargs={"lr": 0.02},
        n_epochs=12,
        n_hypersteps=5,
    )
    assert type(la) is ELLALaplace
    assert trained is model
    assert len(margliks) == 60
    assert torch.isfinite(torch.tensor(margliks)).all()
    assert losses[-1] < losses[0]
    assert margliks[-1] < margliks[0]  # negative log evidences
    # The posterior that comes back is that of the best network and prior.
    assert la.prior_precision.shape == (len(list(model.parameters())),)
    assert -la.log_marginal_likelihood().item() == pytest.approx(
        min(margliks[4::5]), rel=0.02
    )
    prediction = la(x)
    mean = prediction[0] if likelihood == "regression" else prediction
    assert torch.isfinite(mean).all()


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_marglik_training_with_every_prior(structure):
    x, y = data("classification")
    model = mlp(2, 6, 2)
    la, _, margliks, _ = laplace.marglik_training(
        model,
        DataLoader(TensorDataset(x, y), batch_size=24),
        hessian_structure="nystrom",
        prior_structure=structure,
        n_epochs=3,
        n_hypersteps=2,
    )
    sizes = {"scalar": 1, "layerwise": 4, "diag": la.n_params}
    assert la.prior_precision.shape == (sizes[structure],)
    assert torch.isfinite(torch.tensor(margliks)).all()


def test_marglik_training_on_mapping_batches():
    x, y = data("classification")
    la, *_ = laplace.marglik_training(
        DictModel(mlp(2, 6, 2)),
        mapping_loader(x, y, batch_size=12),
        hessian_structure="nystrom",
        n_epochs=2,
    )
    assert la({"input_ids": x}).shape == (24, 2)


# --- wrappers of other libraries ---------------------------------------------------


@needs("torch_uncertainty")
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_torch_uncertainty(subset):
    """Its post-processing passes the structure on, and needs nothing else."""
    try:
        from torch_uncertainty.post_processing import LaplaceApprox
    except ImportError as error:
        pytest.skip(f"torch-uncertainty does not import: {error}")
    x, y = data("classification")
    model = mlp(2, 6, 2)
    wrapper = LaplaceApprox(
        "classification", model, weight_subset=subset, hessian_struct="nystrom"
    )
    wrapper.fit(DataLoader(TensorDataset(x, y), batch_size=12))
    probs = wrapper(x)
    torch.testing.assert_close(probs.sum(-1), torch.ones(24))
    assert isinstance(wrapper.la, ELLALaplace)
    assert not torch.allclose(probs, model(x).softmax(-1))


@needs("lightning_uq_box")
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_lightning_uq_box(subset):
    """Its module builds the posterior anew, from the attributes of the one given."""
    try:
        from lightning_uq_box.uq_methods import LaplaceClassification
    except ImportError as error:
        pytest.skip(f"lightning-uq-box does not import: {error}")
    x, y = data("classification")
    la = laplace.Laplace(
        mlp(2, 6, 2), "classification", subset, "nystrom", n_eigenvalues=4
    )
    module = LaplaceClassification(la, link_approx="mc")
    module.laplace_model.fit(DataLoader(TensorDataset(x, y), batch_size=12))
    module.laplace_fitted = True
    assert module.laplace_model.rank == 4
    assert module.predict_step(x)["pred"].shape == (24, 2)


SETTINGS = {
    "subsample_size": 11,
    "n_eigenvalues": 4,
    "seed": 3,
    "balanced": True,
    "feature_mode": "reverse",
    "row_mode": "loop",
    "complement": "prior",
    "chunk_size": 5,
}


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_settings_can_be_read_back(subset):
    """Wrappers copy a posterior by its signature and attributes of the same names."""
    model = mlp(2, 6, 2)
    la = laplace.Laplace(model, "classification", subset, "nystrom", **SETTINGS)
    named = type(la).__init__.__code__.co_varnames
    assert set(SETTINGS) <= set(named)
    assert {name: getattr(la, name) for name in SETTINGS} == SETTINGS


@pytest.mark.parametrize("row_mode", ["vmap", "loop"])
@pytest.mark.parametrize("feature_mode", ["forward", "double_vjp", "reverse"])
def test_predicts_in_inference_mode(feature_mode, row_mode):
    """As Lightning's trainer calls it, also with inputs made there."""
    x, y = data("classification")
    loader = DataLoader(TensorDataset(x, y), batch_size=12)
    la = laplace.Laplace(
        mlp(2, 6, 2),
        "classification",
        "all",
        "nystrom",
        n_eigenvalues=4,
        feature_mode=feature_mode,
        row_mode=row_mode,
    )
    la.fit(loader)
    expected = la(x)
    with torch.inference_mode():
        torch.testing.assert_close(la(x), expected)
        torch.testing.assert_close(la(x + 0), expected)
        la.fit(loader)
    torch.testing.assert_close(la(x), expected)
