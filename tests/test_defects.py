"""Uses that once gave wrong numbers, or an error far from its cause."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ComputeOptions, ELLALaplace, ELLALLLaplace
from laplace_ella.errors import InsufficientMemoryError
from tests.cases import make, mlp
from tests.fitting import assert_close, build, fit
from tests.test_basis import Largest
from tests.test_fit import OneByOne
from tests.test_state import described

pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning"),
    pytest.mark.filterwarnings("ignore::laplace_ella.errors.BorderWarning"),
]
flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])


def loader_of(x, y, size=5, **kwargs):
    return DataLoader(TensorDataset(x, y), size, **kwargs)


class Grid(nn.Module):
    """Outputs at every pixel, in either layout."""

    def __init__(self, layout, n_out=3):
        super().__init__()
        self.conv, self.layout = nn.Conv2d(1, n_out, 3, padding=1), layout

    def forward(self, x):
        f = self.conv(x)
        return f.movedim(1, -1) if self.layout == "channels_last" else f


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("mark", [255, -1])
def test_a_mark_of_ones_own_for_missing_pixels(layout, mark):
    """The remedy names the value that is out of range, at whichever end."""
    la = ELLALaplace(Grid(layout), "classification", output_layout=layout)
    y = torch.randint(3, (6, 4, 5))
    y[:, 0] = mark
    data = loader_of(torch.randn(6, 1, 4, 5), y)
    with pytest.raises(ValueError, match=rf"(?s)-100.*y\[y == {mark}\] = -100"):
        la.fit(data)


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize(
    ("layout", "dim"), [("flat", 1), ("channels_first", 1), ("channels_last", 3)]
)
def test_the_dimension_that_targets_lack(layout, dim, width):
    """The message says which one of the outputs it is, and that helps."""
    flat = layout == "flat"
    model = nn.Linear(3, 1) if flat else Grid(layout, 1)
    x = torch.randn(6, 3) if flat else torch.randn(6, 1, 4, width)
    y = torch.randn(6) if flat else torch.randn(6, 4, width)
    la = ELLALaplace(model, "regression", output_layout=layout)
    with pytest.raises(ValueError, match=rf"y\.unsqueeze\({dim}\)"):
        la.fit(loader_of(x, y))
    la.fit(loader_of(x, y.unsqueeze(dim)))


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_predictions_at_another_number_of_positions(layout, likelihood):
    """Fitted at 4 x 5, used at 8 x 8, and for no example."""
    model = Grid(layout).double()
    y = torch.randint(3, (6, 4, 5))
    if likelihood == "regression":
        y = torch.randn(6, *((3, 4, 5) if layout == "channels_first" else (4, 5, 3)))
    la = ELLALaplace(model, likelihood, output_layout=layout, n_eigenvalues=4)
    la.fit(loader_of(torch.randn(6, 1, 4, 5).double(), y))
    for n, *size in ((2, 4, 5), (0, 4, 5), (2, 8, 8)):
        x = torch.randn(n, 1, *size).double()
        assert tree_leaves(la(x))[0].shape == model(x).shape
        variances = la.predictive_moments(x, diagonal_output=True)[1]
        assert variances.shape == model(x).shape
        samples = la.functional_samples(x, n_samples=3)
        assert samples.shape == (3, *model(x).shape)


def test_regression_searches_take_variances():
    """300 outputs at 300 examples: no covariance (N, C, C) is formed."""
    N = C = 300
    x, y = torch.randn(N, 3), torch.randn(N, C)
    la = ELLALaplace(mlp(3, 2, C), "regression", n_eigenvalues=4, complement="drop")
    la.fit(loader_of(x, y, 100))
    cache = la.cache_features(loader_of(x, y, 100))
    with Largest() as largest:
        la.optimize_prior_precision(method="gridsearch", val_loader=cache, grid_size=3)
        la.optimize_temperature(cache)
        la.optimize_rank("gridsearch", cache)
        la.interval(x[:100])
    assert largest.numel <= N * C * 8


def test_the_complement_of_many_outputs_within_the_budget():
    """The gradients of one position are refused where they do not fit; those of some
    outputs do, and passes stay small where they all fit."""
    C = 1000  # P = 31,630: 127 MB
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, C))
    x, y = torch.randn(6, 20), torch.randint(C, (6,))
    compute = ComputeOptions(feature_mode="forward", memory_budget="100 MB")
    options = {"n_eigenvalues": 4, "subsample_size": 30, "complement": "prior"}
    la = ELLALaplace(model, "classification", compute=compute, **options)
    la.fit(loader_of(x, y, 3))
    with pytest.raises(InsufficientMemoryError, match="top_outputs, complement='drop'"):
        la(x[:1])
    la.top_outputs = 3
    assert la(x[:1]).shape == (1, C)
    la.top_outputs, la.compute = None, ComputeOptions(memory_budget="1 GB")
    with Largest() as largest:
        assert la(x[:4]).shape == (4, C)
    assert largest.numel <= C * la.n_params


@flavours
@pytest.mark.parametrize("first", [True, False])
def test_a_fit_that_fails_at_the_last_step(cls, first):
    """Everything is as before the call: of an unfitted object, and of a fitted one."""
    case = make("classification_mlp")
    la = build(case, cls, prior_precision=3.0)
    if not first:
        la.fit(case.loader())
        before = described(la)
    x, y = case.x.clone(), case.y.clone()
    y[-1] = 3  # out of range, in the last batch
    with pytest.raises(ValueError, match="Class indices"):
        la.fit(loader_of(x, y, 1))
    x[-1] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        la.fit(loader_of(x, case.y, 4))
    assert (la.fitted is None) == first
    assert first or described(la) == before


@pytest.mark.parametrize("name", ["classification_mlp", "regression_3"])
def test_streams_as_validation_data(name):
    """Data without a length serve as others do."""
    case, results = make(name), []
    for data in (case.loader(5), DataLoader(OneByOne(case.x, case.y), 5)):
        la = fit(case)
        la.optimize_temperature(data)
        la.optimize_prior_precision(method="gridsearch", val_loader=data, grid_size=5)
        la.optimize_rank("gridsearch", data)
        results.append(described(la))
    assert results[0] == results[1]


def test_evidence_under_no_grad():
    """Searches by evidence switch gradients on for themselves."""
    case = make("regression_3")
    expected, la = fit(case), fit(case)
    for search, kwargs in (
        ("prior_precision", {}),
        ("prior_precision", {"prior_structure": "diag"}),
        ("sigma_noise", {}),
    ):
        for posterior, enabled in ((expected, True), (la, False)):
            with torch.set_grad_enabled(enabled):
                getattr(posterior, f"optimize_{search}")(n_steps=5, **kwargs)
        assert_close(getattr(la, search), getattr(expected, search))
    with torch.inference_mode():
        la.optimize_prior_precision(n_steps=2)


def test_noise_of_each_output_in_exact_mode():
    """All gradients, and one noise per output, found by the evidence."""
    case = make("regression_3")
    case.kwargs = {"sigma_noise": torch.tensor([0.1, 0.2, 0.3]).double()}
    la = build(case, n_eigenvalues="exact", complement=None, evidence="whole")
    la.fit(case.loader())
    before = la.log_marginal_likelihood()
    la.optimize_sigma_noise(n_steps=5)
    assert la.log_marginal_likelihood() > before
    assert la.sigma_noise.shape == (3,)
    la.optimize_prior_precision(
        method="gridsearch", val_loader=case.loader(), grid_size=3
    )


SETTABLE = {
    "compute": ComputeOptions(feature_mode="reverse", row_mode="loop", chunk_size=3),
    "subsample_size": 7,
    "n_eigenvalues": 3,
    "seed": 5,
    "complement": "prior",
    "temperature": 2.0,
    "prior_precision": torch.tensor([2.0]).double(),
    "prior_mean": 0.1,
    "softmax_temperature": 2.0,
    "top_outputs": 2,
}


@pytest.mark.parametrize("name", SETTABLE)
@pytest.mark.parametrize("first", [True, False])
def test_attributes_that_can_be_set(name, first):
    """Set before the fit or after it, and used by the next one."""
    case = make("classification_mlp")
    la = build(case)
    if not first:
        la.fit(case.loader())
    setattr(la, name, SETTABLE[name])
    given = build(case, **{name: SETTABLE[name]})
    for posterior in (la, given):
        posterior.fit(case.loader())
    assert_close(la(case.x_test), given(case.x_test))
    for name in ("basis", "history", "rank", "modes", "posterior", "output_layout"):
        with pytest.raises(AttributeError):
            setattr(la, name, None)


@flavours
@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_small_problems(cls, complement):
    """One class, one example, batches of one, no bias, an incomplete last batch."""
    x, y = torch.randn(10, 3), torch.zeros(10, dtype=torch.long)
    la = cls(mlp(3, 5, 1), "classification", complement=complement)
    la.fit(loader_of(x, y))
    for link in ("probit", "mc", "bridge", "bridge_norm"):
        torch.testing.assert_close(la(x, link_approx=link), torch.ones(10, 1))
    la = cls(mlp(3, 5, 2), "classification", complement=complement)
    la.fit(loader_of(x[:1], y[:1]))
    la.optimize_prior_precision(n_steps=2)
    assert la(x).isfinite().all()
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False))
    la = cls(model, "classification", complement=complement)
    la.fit(loader_of(x, y, 1))
    assert la.n_data == 10
    la.fit(loader_of(x, y, 4, drop_last=True))
    assert la.n_data == 8


def test_the_basis_under_autocast():
    """The model runs in low precision, the algebra of the basis does not."""
    compute = ComputeOptions(memory_budget=10**9)
    options = {"n_eigenvalues": 6, "subsample_size": 400, "compute": compute}
    la = ELLALaplace(mlp(30, 60, 3), "classification", **options)
    with torch.autocast("cpu", torch.bfloat16):
        la.fit(loader_of(torch.randn(800, 30), torch.randint(3, (800,)), 100))
    V = la.basis.directions
    torch.testing.assert_close(V @ V.T, torch.eye(6), rtol=0, atol=1e-4)


def test_statistics_of_the_batch():
    """A model in which examples depend on each other is refused, before any work."""
    norm = nn.BatchNorm2d(2, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Flatten(), nn.Linear(32, 3))
    data = loader_of(torch.randn(10, 1, 6, 6), torch.randint(3, (10,)))
    with pytest.raises(ValueError, match=r"statistics of the batch.*GroupNorm"):
        ELLALaplace(model, "classification").fit(data)
