"""Other people's code that calls us: examples, training by evidence, wrappers."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import laplace
import pytest
import torch
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsEF, CurvlinopsGGN
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
from laplace_ella import ELLALaplace, ELLALLLaplace
from tests import launchers
from tests.cases import DictModel, make, mapping_loader, mlp
from tests.fitting import fit

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "examples" / "paper"

subsets = pytest.mark.parametrize("subset", ["last_layer", "all"])
likelihoods = pytest.mark.parametrize("likelihood", ["classification", "regression"])


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


def imported(module, name, package):
    """A name of a client library; skip where that does not import."""
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        pytest.skip(f"{package} does not import: {error}")


@needs("botorch")
def test_bayesopt_example(tmp_path):
    printed, report = run_example("bayesopt.py", tmp_path)
    for method in ("random", "GP", "exact", "KFAC", "last layer"):
        assert f"| Branin | {method} |" in printed
        assert f"| Branin | {method} |" in report
    assert (tmp_path / "regret.png").stat().st_size > 10_000


@needs("transformers", "peft", "vaderSentiment")
def test_huggingface_lora_example(tmp_path):
    printed, report = run_example("huggingface_lora.py", tmp_path)
    for method in ("MAP", "last-layer Laplace", "ELLA on the adapters"):
        assert f"| {method} |" in printed
        assert f"| {method} |" in report


# --- launchers of several processes --------------------------------------------------


def launched(launcher):
    """What a fit by two processes prints, and what a single one finds."""
    script = str(ROOT / "tests" / "launchers.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    by = torchrun if launcher == "accelerate" else []  # Fabric starts them itself
    done = subprocess.run(
        [sys.executable, *by, script, launcher],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loader = DataLoader(launchers.data(), batch_size=4)
    return done.stdout, launchers.report(launchers.fitted(launchers.model(), loader))


@needs("accelerate")
def test_accelerate():
    """Loaders and models as Accelerate prepares them, whose last batches it pads."""
    printed, expected = launched("accelerate")
    assert f"accelerate: 2 processes, {expected}" in printed


@needs("lightning")
def test_lightning_fabric():
    """Processes that Fabric starts, with loaders that it shards."""
    printed, expected = launched("fabric")
    assert f"fabric: 2 processes, {expected}" in printed


# --- BoTorch -----------------------------------------------------------------------


@pytest.fixture
def bayesopt(paper):
    return paper("bayesopt")


def fit_surrogate(bayesopt, method):
    x = torch.rand(6, 2, dtype=torch.float64)
    return bayesopt.fit_surrogate(x, x.sin().sum(-1, keepdim=True), 30, method)


networks = pytest.mark.parametrize("method", ["exact", "KFAC", "last layer"])


@needs("botorch")
@networks
def test_posteriors_of_groups_for_botorch(bayesopt, method):
    """Each group of q points has the joint posterior that it has alone."""
    surrogate = fit_surrogate(bayesopt, method)
    points = torch.rand(4, 5, 3, 2, dtype=torch.float64)  # b = (4, 5), q = 3
    posterior = surrogate.posterior(points)
    covariance = posterior.distribution.covariance_matrix
    assert posterior.mean.shape == (4, 5, 3, 1)
    assert covariance.shape == (4, 5, 3, 3)
    mean, joint = surrogate.la(points[2, 3], joint=True)
    torch.testing.assert_close(posterior.mean[2, 3].flatten(), mean.flatten())
    torch.testing.assert_close(covariance[2, 3], joint, rtol=1e-5, atol=1e-6)


@needs("botorch")
@networks
def test_acquisition_gradients_are_those_of_finite_differences(bayesopt, method):
    """Expected improvement of two points, through their joint posterior."""
    surrogate = fit_surrogate(bayesopt, method)
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
@likelihoods
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


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
@likelihoods
def test_marglik_training_exact_is_that_of_full(likelihood, structure):
    """Weights, prior and noise take the way that they take with laplace-torch's own."""
    x, y = (part.double() for part in data(likelihood))
    y = y if likelihood == "regression" else y.long()
    model = mlp(2, 6, 1 if likelihood == "regression" else 2).double()

    def train(hessian_structure):
        trained = copy.deepcopy(model)
        la, _, margliks, losses = laplace.marglik_training(
            trained,
            DataLoader(TensorDataset(x, y), batch_size=12),
            likelihood,
            hessian_structure=hessian_structure,
            prior_structure=structure,
            optimizer_kwargs={"lr": 0.02},
            n_epochs=5,
            n_hypersteps=3,
        )
        return la, torch.tensor(margliks), torch.tensor(losses)

    full, *expected = train("full")
    names = [laplace_ella.register_structure("exact", n_eigenvalues="exact")]
    if likelihood == "regression":
        names.append("nystrom")  # exact by default
    for name in names:
        la, *found = train(name)
        assert type(la) is ELLALaplace
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(la.prior_precision, full.prior_precision)
        torch.testing.assert_close(la.sigma_noise, full.sigma_noise)
        torch.testing.assert_close(
            la._glm_predictive_distribution(x), full._glm_predictive_distribution(x)
        )


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


def regression_or_classification(subset, likelihood, n_eigenvalues=4, **kwargs):
    """A posterior that is not fitted, and the loader to fit it on."""
    x, y = data(likelihood)
    model = mlp(2, 6, 1 if likelihood == "regression" else 2)
    la = laplace.Laplace(
        model, likelihood, subset, "nystrom", n_eigenvalues=n_eigenvalues, **kwargs
    )
    return la, DataLoader(TensorDataset(x, y), batch_size=12)


@needs("torch_uncertainty")
@subsets
@likelihoods
def test_torch_uncertainty(subset, likelihood):
    """Its post-processing passes the structure on, and needs nothing else."""
    LaplaceApprox = imported(
        "torch_uncertainty.post_processing", "LaplaceApprox", "torch-uncertainty"
    )
    x, y = data(likelihood)
    model = mlp(2, 6, 1 if likelihood == "regression" else 2)
    wrapper = LaplaceApprox(
        likelihood, model, weight_subset=subset, hessian_struct="nystrom"
    )
    wrapper.fit(DataLoader(TensorDataset(x, y), batch_size=12))
    prediction = wrapper(x)
    assert isinstance(wrapper.la, ELLALaplace)
    if likelihood == "regression":
        torch.testing.assert_close(prediction, model(x))
        return
    torch.testing.assert_close(prediction.sum(-1), torch.ones(24))
    assert not torch.allclose(prediction, model(x).softmax(-1))


@needs("lightning_uq_box")
@subsets
@likelihoods
@pytest.mark.parametrize(
    "backend", [None, CurvlinopsGGN, BackPackGGN, AsdlGGN, CurvlinopsEF]
)
def test_lightning_uq_box_copies_a_posterior(subset, likelihood, backend):
    """Its module builds the posterior anew, from the attributes of the one given,
    among them an instance of its backend."""
    wrap = imported(
        "lightning_uq_box.uq_methods",
        f"Laplace{likelihood.capitalize()}",
        "lightning-uq-box",
    )
    kwargs = {"row_mode": "loop", "complement": "prior", "prior_precision": 3.0}
    if backend not in (None, CurvlinopsGGN, CurvlinopsEF):
        del kwargs["row_mode"]
    la, loader = regression_or_classification(
        subset, likelihood, backend=backend, **kwargs
    )
    module = wrap(la, link_approx="mc")
    copied = module.laplace_model
    assert type(copied) is type(la)
    assert copied.model is not la.model
    for name in ("n_eigenvalues", "row_mode", "complement", "curvature"):
        assert getattr(copied, name) == getattr(la, name), name
    assert copied._backend_cls is la._backend_cls
    for posterior in (la, copied):
        posterior.fit(loader)
    torch.testing.assert_close(copied.H.cpu(), la.H.cpu())
    module.laplace_fitted = True
    x = loader.dataset.tensors[0]
    assert torch.isfinite(module.predict_step(x)["pred"]).all()


@subsets
@likelihoods
@pytest.mark.parametrize("n_eigenvalues", [None, "auto", "exact", 4])
def test_copied_by_attributes(subset, likelihood, n_eigenvalues):
    """A copy by the names of the signature decides as the original does."""
    la, loader = regression_or_classification(
        subset, likelihood, n_eigenvalues=n_eigenvalues
    )
    names = type(la).__init__.__code__.co_varnames
    copied = type(la)(
        la.model,
        **{
            name: getattr(la, name)
            for name in names
            if name != "model" and hasattr(la, name)
        },
    )
    for posterior in (la, copied):
        posterior.fit(loader)
    assert copied.complement is la.complement is not None
    x = 3 * torch.randn(5, 2)  # far from the data, where the complement matters
    torch.testing.assert_close(copied(x), la(x))


def test_unset_complement_is_that_of_the_fit_in_progress():
    """Losses in the course of a fit are those of the posterior that it leads to."""
    la, loader = regression_or_classification(
        "all", "classification", n_eigenvalues="auto"
    )
    assert la.complement is None
    la.fit(loader, val_loader=loader)
    assert la.complement == "prior"
    explicit, _ = regression_or_classification(
        "all", "classification", n_eigenvalues="auto", complement="prior"
    )
    explicit.model.load_state_dict(la.model.state_dict())
    explicit.fit(loader, val_loader=loader)
    losses = [[entry["loss"] for entry in p.history] for p in (la, explicit)]
    assert losses[0] == pytest.approx(losses[1])


@needs("lightning_uq_box", "lightning")
@subsets
@likelihoods
@pytest.mark.parametrize("num_samples", [None, 5])
def test_lightning_uq_box_tests_a_posterior(subset, likelihood, num_samples, tmp_path):
    """`Trainer.test` fits, tunes by evidence and predicts in inference mode."""
    wrap = imported(
        "lightning_uq_box.uq_methods",
        f"Laplace{likelihood.capitalize()}",
        "lightning-uq-box",
    )
    from lightning import LightningDataModule, Trainer

    x, y = data(likelihood)
    items = [{"input": a, "target": b} for a, b in zip(x, y, strict=True)]

    class Data(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(items, batch_size=12)

        test_dataloader = train_dataloader

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    la, _ = regression_or_classification(subset, likelihood)
    module = wrap(la, num_samples=num_samples)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    (result,) = trainer.test(module, datamodule=Data(), verbose=False)
    assert result["test_loss"] == pytest.approx(result["test_loss"])  # no NaN
    assert module.laplace_model.rank == 4
    assert la.fitted is None
    if likelihood == "regression":
        assert float(module.laplace_model.prior_precision) != 1.0
    assert len((tmp_path / "preds.csv").read_text().splitlines()) == 25


@subsets
def test_backend_instances(subset, caplog):
    """`la.backend` is one; its class and `stochastic` are what counts."""
    model = mlp(2, 6, 2)
    options = {"subset_of_weights": subset, "hessian_structure": "nystrom"}
    la = laplace.Laplace(
        model,
        "classification",
        backend=AsdlGGN,
        backend_kwargs={"stochastic": True},
        **options,
    )
    instance = la.backend
    assert isinstance(instance, AsdlGGN)
    with caplog.at_level(logging.INFO, "laplace_ella"):
        same = laplace.Laplace(model, "classification", backend=instance, **options)
        assert not caplog.records
        laplace.Laplace(mlp(2, 6, 2), "classification", backend=instance, **options)
    assert "another model" in caplog.text
    assert same._backend_cls is AsdlGGN
    assert same.stochastic is True
    assert same.row_mode == "asdl"


def test_named_parameters_can_be_read_back():
    names = ["2.*"]
    model = mlp(2, 6, 2)
    la = ELLALaplace(model, "classification", parameter_names=names)
    copied = ELLALaplace(model, "classification", parameter_names=la.parameter_names)
    assert la.n_params == copied.n_params == 14


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


@subsets
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


# --- names that laplace-torch's own clients call -----------------------------------

CALLS = {
    "distribution": lambda la, x: la._glm_predictive_distribution(x),
    "joint": lambda la, x: la._glm_predictive_distribution(x, joint=True),
    "diagonal": lambda la, x: la._glm_predictive_distribution(x, False, True),
    "forward": lambda la, x: la._glm_forward_call(x, la.likelihood),
    "forward_diagonal": lambda la, x: la._glm_forward_call(
        x, la.likelihood, False, "probit", 10, True
    ),
    "call": lambda la, x: la(x, "glm", False, "probit", 10, False),
    "prior": lambda la, x: la.prior_precision_diag,
    "factor": lambda la, x: la._H_factor,
    "scatter": lambda la, x: la.scatter,
    "log_det_ratio": lambda la, x: la.log_det_ratio,
    "log_det": lambda la, x: la.log_det_posterior_precision,
    "log_prob": lambda la, x: la.log_prob(la.mean + 0.1),
    "evidence": lambda la, x: la.log_marginal_likelihood(torch.tensor(0.5)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_called_like_full_laplace(name, call):
    """With every gradient in the basis, all of it is FullLaplace's."""
    case = make(name)
    kwargs = {"prior_precision": 0.7} | case.kwargs
    ours = fit(case, n_eigenvalues=10**4, complement="prior", **kwargs)
    theirs = laplace.FullLaplace(
        copy.deepcopy(case.model), case.likelihood, backend=BackPackGGN, **kwargs
    )
    theirs.fit(case.loader())
    torch.testing.assert_close(
        CALLS[call](ours, case.x_test),
        CALLS[call](theirs, case.x_test),
        rtol=1e-6,
        atol=1e-8,
        check_dtype=False,
    )


@pytest.mark.parametrize("name", ["regression_3", "classification_mlp"])
def test_predictive(name):
    """Laplace's other name of a call, which laplace-torch 0.2.2 passes on wrongly."""
    case = make(name)
    la = fit(case)
    expected = la(case.x_test, link_approx="bridge", n_samples=10)
    by_name = {"pred_type": "glm", "link_approx": "bridge", "n_samples": 10}
    torch.testing.assert_close(la.predictive(x=case.x_test, **by_name), expected)
    actual = la.predictive(case.x_test, "glm", "bridge", 10)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
def test_network_samples_by_private_names(cls):
    """Sampled weights never enter the model, whatever it raises."""
    case = make("classification_mlp")
    la = fit(case, cls)
    before = [p.detach().clone() for p in case.model.parameters()]

    def generator():
        return torch.Generator().manual_seed(0)

    samples = la._nn_predictive_samples(case.x_test, 5, generator())
    mean = la._nn_predictive_classification(case.x_test, 5, generator())
    torch.testing.assert_close(samples.mean(0), mean)
    torch.testing.assert_close(
        mean,
        la(case.x_test, "nn", link_approx="mc", n_samples=5, generator=generator()),
    )
    with pytest.raises(TypeError, match="unknown"):
        la._nn_predictive_classification(case.x_test, 5, unknown=1)
    for p, value in zip(case.model.parameters(), before, strict=True):
        assert torch.equal(p, value)


def test_labels_by_private_names():
    """The inverse link is the sigmoid's where an example has several labels."""
    case = make("classification_mlp")
    case.y = torch.nn.functional.one_hot(case.y, 3).double()
    la = fit(case, multi_label=True)
    samples = la._nn_predictive_samples(case.x_test, 4)
    assert not torch.allclose(samples.sum(-1), torch.ones_like(samples[..., 0]))


# --- groups of inputs ----------------------------------------------------------------


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_joint_predictive_of_groups(n_outputs, complement):
    """Each group has the joint distribution that it has alone, with its gradients."""
    torch.manual_seed(0)
    model = mlp(2, 6, n_outputs).double()
    x, y = torch.randn(20, 2).double(), torch.randn(20, n_outputs).double()
    la = laplace.Laplace(
        model,
        "regression",
        "all",
        "nystrom",
        n_eigenvalues=7,
        complement=complement,
        enable_backprop=True,
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=10))
    groups = torch.randn(4, 3, 2).double().requires_grad_()
    mean, covariance = la.joint_predictive(groups)
    assert mean.shape == (4, 3 * n_outputs)
    assert covariance.shape == (4, 3 * n_outputs, 3 * n_outputs)
    for i in range(4):
        one_mean, one_covariance = la(groups[i], joint=True)
        torch.testing.assert_close(mean[i], one_mean)
        torch.testing.assert_close(covariance[i], one_covariance)
    (gradient,) = torch.autograd.grad(covariance[1].sum(), groups)
    assert gradient[1].abs().sum() > 0
    assert not gradient[[0, 2, 3]].any()
    with pytest.raises(ValueError, match=r"\(b, q, ...\).*\(3, 2\).*joint=True"):
        la.joint_predictive(groups[0])
