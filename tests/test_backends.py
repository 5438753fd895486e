"""`backend=`: laplace-torch's classes mean here what they mean there, rows by BackPACK
and ASDL are those of the dense reference, and what they cannot do is refused."""

import logging
import pickle
import sys

import pytest
import torch
from laplace import Laplace, curvature
from laplace.curvature import AsdlGGN, BackPackGGN, CurvatureInterface, CurvlinopsEF
from torch import nn

from laplace_ella import ComputeOptions, ELLALaplace, ELLALLLaplace
from laplace_ella.derivatives.backends import BACKENDS
from laplace_ella.derivatives.modes import RowMode
from laplace_ella.errors import UnsupportedLayerError
from tests import dense
from tests.cases import ARCHITECTURES, CASES, Case, make, mlp
from tests.fitting import assert_close, build, fit

pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning"),
    pytest.mark.filterwarnings("ignore:.*[Bb]ackward hook"),
]

LIBRARIES = {BackPackGGN: RowMode.BACKPACK, AsdlGGN: RowMode.ASDL}
libraries = pytest.mark.parametrize("backend", LIBRARIES)


@pytest.mark.parametrize("name", ["classification_mlp", "regression_3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_in_laplace_torch(backend, name):
    """With all directions and the same backend, everything is `FullLaplace`'s."""
    case, options = make(name), {"prior_precision": 0.7, "temperature": 1.3}
    backend = getattr(curvature, backend)
    options["backend"], of = backend, (case.model, case.likelihood, "all")
    everything = {"subsample_size": 10**6, "n_eigenvalues": 10**6}
    kept = {"complement": "prior", "evidence": "basis"}
    ours = Laplace(*of, "nystrom", **everything, **kept, **options)
    ours.fit(case.loader())
    # afterwards: BackPACK leaves its activations on the model
    theirs = Laplace(*of, "full", **options)
    theirs.fit(case.loader())
    assert ours._backend_cls is backend
    V = ours.basis.vectors
    assert_close(V @ ours.H @ V.T, theirs.H.to(V), rtol=1e-5, atol=1e-7)
    assert_close(ours.loss.to(V), torch.as_tensor(theirs.loss).to(V), rtol=1e-6)
    expected = theirs.log_marginal_likelihood()
    assert_close(ours.log_marginal_likelihood().to(expected), expected, rtol=1e-5)
    if backend is curvature.BackPackEF:
        return  # its Jacobians fail in laplace-torch, too
    for a, b in zip(
        ours._glm_predictive_distribution(case.x_test),
        theirs._glm_predictive_distribution(case.x_test),
        strict=True,
    ):
        assert_close(a, b.to(a), rtol=1e-5, atol=1e-7)


#: Cases with layers that a library has no gradients for.
UNSUPPORTED = {
    BackPackGGN: {"tied", "attention", "gru", "weight_norm"},
    AsdlGGN: {"tied", "attention", "gru", "weight_norm", "lstm"},
}


@libraries
@pytest.mark.parametrize("name", [*CASES, *ARCHITECTURES])
def test_rows(name, backend):
    """A fit takes its rows from the library, or says which layers are at fault; nothing
    is left on the model."""
    case = make(name)
    before = everything(case.model)
    la = build(case, backend=backend, compute=ComputeOptions(chunk_size=3))
    try:
        la.fit(case.loader())
    except UnsupportedLayerError as error:
        found = str(error)
    else:
        found = None
        assert la.modes.rows is LIBRARIES[backend]
        reference = dense.Reference(case, la.basis.vectors, sigma=la.sigma_noise)
        assert_close(la.H, reference.H)
        expected = fit(case)
        assert expected.modes.rows not in LIBRARIES.values()
        assert_close(la.basis.eigenvalues, expected.basis.eigenvalues)
        last = fit(case, ELLALLLaplace, backend=backend, n_eigenvalues=12)
        assert_close(
            last.H.trace(), fit(case, ELLALLLaplace, n_eigenvalues=12).H.trace()
        )
    assert everything(case.model) == before
    if found is not None:
        assert name in UNSUPPORTED[backend]
        assert "CurvlinopsGGN" in found
        assert la.basis is None


def everything(model):
    """All that a library could leave on a model: attributes, hooks, gradients."""
    found = {}
    for name, module in model.named_modules():
        hooks = [list(v) for k, v in vars(module).items() if "hooks" in k and v]
        found[name] = sorted(vars(module)), hooks
    for name, p in model.named_parameters():
        found["p", name] = id(p), sorted(vars(p)), p.grad is None, p.requires_grad
    return found


class TwoLayers(nn.Module):
    """Two linear layers; subclasses use them in ways that confuse the libraries."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)


class SequenceFirst(TwoLayers):
    """The first layer sees (T, B, 3): the first dimension is not the examples."""

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.transpose(0, 1))).mean(0))


class Bypassed(TwoLayers):
    """Uses the first layer's weight without calling the layer."""

    def forward(self, x):
        h = nn.functional.linear(x.mean(1), self.first.weight, self.first.bias)
        return self.second(torch.tanh(h))


@libraries
@pytest.mark.parametrize("model", [SequenceFirst, Bypassed])
def test_wrong_rows_do_not_pass(model, backend):
    """A layer that is used as the library does not expect is noticed."""
    x, y = torch.randn(7, 5, 3).double(), torch.randint(2, (7,))
    case = Case(model().double(), "classification", x, y, x)
    with pytest.raises(UnsupportedLayerError, match="does not support"):
        fit(case, backend=backend)


def test_nan_does_not_pass():
    """ASDL divides by the scale of a batch normalisation."""
    case = make("classification_cnn")
    with torch.no_grad():
        case.model.bn.weight[0] = 0
    with pytest.raises(UnsupportedLayerError, match="BatchNorm2d"):
        fit(case, backend=AsdlGGN)


class Unknown(CurvatureInterface):
    """A backend that ELLA has never heard of."""


REFUSED = {
    "unknown": ({"backend": Unknown}, "Unknown"),
    "no backend": ({"backend": nn.Linear}, "CurvlinopsGGN.*None"),
    "no class": ({"backend": "BackPackGGN"}, "laplace.curvature"),
    "Hessian": ({"backend": curvature.AsdlHessian}, "GGN.*got.*Hessian"),
    "options": ({"backend_kwargs": {"num": 3}}, "'stochastic'.*num"),
    "Fisher": ({"asdl_fisher_kwargs": {"seed": 3}}, "asdl_fisher_kwargs"),
    "EF": ({"backend": CurvlinopsEF, "stochastic": 2}, "CurvlinopsGGN"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """What would have no effect, or another than it says."""
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        ELLALaplace(mlp(2, 3, 1), "regression", **options)


PACKAGES = {"backpack": "backpack-for-pytorch", "asdl": "asdfghjkl"}


@pytest.mark.parametrize("mode", PACKAGES)
def test_missing_package(monkeypatch, mode):
    """The name on PyPI is not the name that is imported."""
    monkeypatch.setitem(sys.modules, mode, None)
    with pytest.raises(ImportError, match=f"pip install {PACKAGES[mode]}"):
        ELLALaplace(mlp(2, 3, 1), "regression", compute=ComputeOptions(row_mode=mode))


@libraries
def test_is_reported_and_survives(backend, caplog):
    """The log, checkpoints and pickles say who takes the rows; sampled curvature takes
    the same ones."""
    case, mode = make("classification_mlp"), LIBRARIES[backend]
    with caplog.at_level(logging.INFO, "laplace_ella"):
        la = fit(case, backend=backend)
    assert f"rows of the Jacobian by {mode.value}" in caplog.text
    loaded = build(case)
    loaded.load_state_dict(la.state_dict())
    for other in (loaded, pickle.loads(pickle.dumps(la))):
        assert other.modes.rows is mode
        assert_close(other(case.x_test), la(case.x_test))
    sampled = fit(case, backend=backend, backend_kwargs={"stochastic": 3})
    assert_close(sampled.H.trace(), fit(case, stochastic=3).H.trace())
