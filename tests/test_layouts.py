"""Outputs at many positions, tokens and pixels, against dense posteriors of rows."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ComputeOptions, ELLALaplace
from tests import dense
from tests.cases import Case
from tests.fitting import EVERY_PAIR, assert_close, fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")

C, IGNORED, TAU = 3, -100, 2.3


class Tokens(nn.Module):
    """(B, T) numbers to (B, T, C): an embedding, a mixing layer, a head."""

    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(7, 4), nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, C)

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.words(x))[0]))


class Pixels(nn.Module):
    """(B, 2, H, W) images to (B, C, H, W)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.second = nn.Conv2d(3, C, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


LAYOUTS = {
    "channels_last": (Tokens, lambda n, size: torch.randint(7, (n, size))),
    "channels_first": (Pixels, lambda n, size: torch.randn(n, 2, size, 2).double()),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def make_case(layout, likelihood):
    """A model of tokens or pixels, with inputs of one size, and targets."""
    torch.manual_seed(1)
    make_model, inputs = LAYOUTS[layout]
    model, x = make_model().double().eval(), inputs(6, 3)
    f = model(x).detach()
    if likelihood == "regression":
        y = torch.randn_like(f)
    else:
        y = torch.randint(C, f.select(-1 if layout == "channels_last" else 1, 0).shape)
        y[::2, 0] = IGNORED
    kwargs = {"output_layout": layout, "complement": "prior", "n_eigenvalues": 10**6}
    if likelihood == "classification":
        kwargs["softmax_temperature"] = TAU
    return Case(model, likelihood, x, y, inputs(2, 3), kwargs)


def rows(t, layout):
    """(B, ..., C, ...) in the model's shape as rows (B·S, C, ...)."""
    t = t if layout == "channels_last" else t.movedim(1, 3)
    return t.flatten(0, 1) if layout == "channels_last" else t.flatten(0, 2)


def dense_rows(case, x):
    """Outputs (R, C) and Jacobians (R, C, P) of the rows of inputs."""
    layout, params = case.kwargs["output_layout"], list(case.model.parameters())
    shape = case.model(x).shape
    f, Js = dense.jacobians(nn.Sequential(case.model, nn.Flatten()), x, params)
    return rows(f.unflatten(1, shape[1:]), layout), rows(
        Js.unflatten(1, shape[1:]), layout
    )


@layouts
@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_the_exact_posterior(likelihood, mode, layout):
    """Curvature and covariance of rows with a target, at any number of positions."""
    case = make_case(layout, likelihood)
    la = fit(case, compute=ComputeOptions(mode), prior_precision=0.8)
    f, Js = dense_rows(case, case.x)
    if likelihood == "regression":
        Lambda = torch.eye(C).double().expand(len(f), C, C)
    else:
        p = f.softmax(-1)
        Lambda = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        Lambda = Lambda * (case.y.flatten() != IGNORED)[:, None, None]
    H = torch.einsum("rcp,rcd,rdq->pq", Js, Lambda, Js)
    V = la.basis.vectors
    assert_close(V @ la.H @ V.T, H)
    covariance = torch.linalg.inv(H + 0.8 * torch.eye(len(H)).double())
    _, inputs = LAYOUTS[layout]
    for x in (case.x_test, inputs(3, 4)):  # other sizes than in training as well
        f, Js = dense_rows(case, x)
        mean, variance = la._glm_predictive_distribution(x)
        assert_close(rows(mean, layout), f)
        expected = Js @ covariance @ Js.mT
        assert_close(variance.reshape(-1, C, C), expected, rtol=1e-7)
        joint = la.functional_samples(x, n_samples=4, joint=True)
        assert joint.shape == (4, *mean.shape)
        if likelihood == "classification":
            probs = la(x, link_approx="probit_centered")
            theirs = dense.centered_probit(f / TAU, expected / TAU**2)
            assert_close(rows(probs, layout), theirs, rtol=1e-7)
            for pred_type in ("glm", "nn"):
                samples = la.predictive_samples(x, pred_type, n_samples=2)
                assert samples.shape == (2, *probs.shape)
                total = rows(samples.flatten(0, 1), layout).sum(-1)
                assert_close(total, torch.ones_like(total))


@layouts
def test_sampled_curvature_and_searches(layout):
    """One backward pass per sample for all positions; tuning sees observed ones."""
    case = make_case(layout, "classification")
    exact = fit(case)
    total = 0
    for seed in range(6):
        la = fit(case, stochastic=30, seed=seed)
        total = total + la.basis.vectors @ la.H @ la.basis.vectors.T / 6
    expected = exact.basis.vectors @ exact.H @ exact.basis.vectors.T
    assert (total - expected).norm() < 0.3 * expected.norm()
    exact.optimize_prior_precision(
        method="gridsearch", val_loader=case.loader(4), grid_size=5
    )
    assert exact.prior_precision > 0
    state = exact.state_dict()
    loaded = ELLALaplace(case.model, "classification", output_layout=layout)
    loaded.load_state_dict(state)
    assert_close(loaded(case.x_test), exact(case.x_test))
    none = torch.full_like(case.y, IGNORED)
    loader = DataLoader(TensorDataset(case.x, none), 3)
    with pytest.raises(ValueError, match="target"):
        exact.optimize_prior_precision(method="gridsearch", val_loader=loader)


def test_gradients_in_the_inputs():
    """Predictions can be differentiated where inputs are numbers."""
    case = make_case("channels_first", "regression")
    la = fit(case, enable_backprop=True)
    x = case.x_test[:1].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: la(x)[1].square().sum(), (x,))


def test_wrong_shapes_are_named():
    """The layout, the shape that came and the remedy."""
    case = make_case("channels_last", "classification")
    options = {"subsample_size": EVERY_PAIR}
    with pytest.raises(ValueError, match=r"\(B, C\).*output_layout='channels_last'"):
        ELLALaplace(case.model, "classification", **options).fit(case.loader())
    la = ELLALaplace(
        case.model, "classification", output_layout="channels_last", **options
    )
    with pytest.raises(ValueError, match="targets"):
        la.fit(DataLoader(TensorDataset(case.x, case.y[:, :2]), 3))
    with pytest.raises(ValueError, match="output_layout"):
        ELLALaplace(case.model, "classification", output_layout="rows")
