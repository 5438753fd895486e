"""Every rank from one fit: evidence, validation loss, truncation, automatic choice."""

import copy
import itertools
import warnings

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace, ELLALLLaplace, FeatureCache
from laplace_ella.derivatives import feature_passes as passes
from tests import dense
from tests.cases import CASES, PRIORS, Case, make, priors
from tests.fitting import assert_close, build, fit

REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"
both = pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])
kinds = pytest.mark.parametrize(
    ("structure", "complement"),
    [("scalar", "drop"), ("layerwise", "drop"), ("diag", "drop"), ("diag", "prior")],
)
K = 6
SAMPLES = {"subsample_size": 9, "n_eigenvalues": K}
"""Fewer samples than pairs, so that the seed matters."""


@pytest.fixture
def too_many_pairs(monkeypatch):
    """No problem is small enough for all of its gradients."""
    monkeypatch.setattr("laplace_ella.fitting.plan.AUTO_MAX_PAIRS", 0)


@pytest.fixture(params=CASES)
def case(request):
    return make(request.param)


def separate(case, k, **kwargs):
    """A fit of its own at rank k, with the same seed and samples."""
    return fit(case, **(SAMPLES | {"n_eigenvalues": k} | kwargs))


def validation(case):
    g = torch.Generator().manual_seed(8)
    x = 1.5 * torch.randn(20, *case.x.shape[1:], generator=g).double()
    f = case.model(x).detach()
    if case.likelihood == "regression":
        y = f + 0.6 * torch.randn(f.shape, generator=g).double()
    else:
        y = torch.multinomial((3 * f).softmax(-1), 1, generator=g).squeeze(1)
    return DataLoader(TensorDataset(x, y), batch_size=7)


def nll(la, loader, **kwargs):
    """Validation loss of the predictions, with distributions of torch."""
    x, y = loader.dataset.tensors
    prediction = la(x, **kwargs)
    if la.likelihood == "classification":
        # A probability of zero counts as the smallest positive float32.
        likely = prediction.clamp_min(torch.finfo(torch.float32).tiny)
        return torch.nn.functional.nll_loss(likely.log(), y).item()
    mean, var = prediction
    scale = (var.diagonal(dim1=1, dim2=2) + la.sigma_noise**2).sqrt()
    return -torch.distributions.Normal(mean, scale).log_prob(y).sum(-1).mean().item()


# --- every rank from one fit -------------------------------------------------------


@kinds
def test_evidence_of_every_rank(case, structure, complement):
    """One fit tells the evidence that a fit at each lower rank has."""
    options = {
        "prior_precision": priors(case)[structure],
        "complement": complement,
        "temperature": 1.3,
    }
    table = separate(case, K, **options).optimize_rank("marglik")
    assert [row["rank"] for row in table] == list(range(1, K + 1))
    for row in table:
        expected = separate(case, row["rank"], **options).log_marginal_likelihood()
        assert row["log_marginal_likelihood"] == pytest.approx(
            expected.item(), rel=1e-9
        )


def test_evidence_of_every_rank_is_the_dense_one(case):
    """The same numbers from the dense formula on the first k directions."""
    la = separate(case, K, prior_precision=priors(case)["layerwise"])
    V = la.basis.vectors
    for row in la.optimize_rank():
        reference = dense.Reference(case, V[:, : row["rank"]], la.sigma_noise)
        expected = reference.evidence(la.prior_precision).item()
        assert row["log_marginal_likelihood"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
@pytest.mark.parametrize("complement", ["drop", "prior"])
@both
def test_validation_loss_of_every_rank(name, complement, link):
    """One fit tells the validation loss that a fit at each lower rank has."""
    case = make(name)
    loader = validation(case)
    la = separate(case, K, complement=complement)
    options = {"link_approx": link, "n_samples": 50}
    table = la.optimize_rank("gridsearch", loader, **options)
    assert [row["rank"] for row in table] == list(range(1, K + 1))
    for row in table:
        single = separate(case, row["rank"], complement=complement)
        # The metric of the default loss sums in float32.
        expected = nll(single, loader, **options)
        assert row["loss"] == pytest.approx(expected, rel=1e-6)
    best = min(table, key=lambda row: row["loss"])
    assert la.rank == best["rank"]


@pytest.mark.parametrize("structure", PRIORS)
def test_evidence_falls_with_rank(case, structure):
    """At fixed weights no direction raises the evidence, as documented."""
    la = separate(case, K, prior_precision=priors(case)[structure])
    values = [row["log_marginal_likelihood"] for row in la.optimize_rank()]
    assert all(b <= a + 1e-10 for a, b in itertools.pairwise(values))
    assert values[-1] < values[0]


def test_evidence_falls_with_rank_beside_the_complement(case):
    """So it is for a scalar prior on all weights."""
    la = separate(case, K, complement="prior")
    values = [row["log_marginal_likelihood"] for row in la.optimize_rank()]
    assert all(b <= a + 1e-10 for a, b in itertools.pairwise(values))


# --- truncation --------------------------------------------------------------------


def assert_same_posterior(la, other, case):
    """Basis, curvature, evidence and predictions agree, signs of directions apart."""
    assert la.rank == other.rank
    V, W = la.basis.vectors, other.basis.vectors
    assert V.shape == W.shape == (la.n_params, la.rank)
    assert_close(V @ V.T, W @ W.T)
    assert_close(V @ la.H @ V.T, W @ other.H @ W.T)
    assert_close(la.basis.eigenvalues, other.basis.eigenvalues)
    assert la.basis.trace == pytest.approx(other.basis.trace)
    assert la.basis.n_samples == other.basis.n_samples
    assert la.H.shape == la.posterior_precision.shape == (la.rank, la.rank)
    assert la.posterior_covariance.shape == (la.rank, la.rank)
    assert_close(la.log_det_ratio, other.log_det_ratio)
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    for first, second in zip(
        _parts(la(case.x_test)), _parts(other(case.x_test)), strict=True
    ):
        assert_close(first, second)


def _parts(output):
    return output if isinstance(output, tuple) else (output,)


@kinds
@pytest.mark.parametrize("k", [1, 4])
def test_truncate_equals_a_fit(case, k, structure, complement):
    """truncate(k) gives what a fit with n_eigenvalues=k gives."""
    options = {"prior_precision": priors(case)[structure], "complement": complement}
    la = separate(case, K, **options)
    la.log_marginal_likelihood()  # products of the layers that must not be kept
    la(case.x_test)
    assert la.truncate(k) is None
    assert_same_posterior(la, separate(case, k, **options), case)


def test_truncate_of_the_last_layer():
    """The last-layer class truncates as well."""
    case = make(CLASSIFICATION)
    la = fit(case, ELLALLLaplace, **SAMPLES)
    la.truncate(2)
    other = fit(case, ELLALLLaplace, **(SAMPLES | {"n_eigenvalues": 2}))
    assert_same_posterior(la, other, case)


@both
def test_truncated_goes_on(name):
    """A truncated posterior takes more data, is tuned and saved as a fitted one."""
    case = make(name)
    la, other = separate(case, K), separate(case, 3)
    la.truncate(3)
    for posterior in (la, other):
        posterior.fit(case.loader(), override=False)
        posterior.optimize_prior_precision(n_steps=10, prior_structure="layerwise")
    assert la.n_data == 2 * len(case.x)
    assert_close(la.prior_precision, other.prior_precision, rtol=1e-6)
    assert_same_posterior(la, other, case)
    loaded = build(case)
    loaded.load_state_dict(la.state_dict())
    assert_same_posterior(loaded, la, case)
    f_mu, phi = la.features(case.x_test)
    assert phi.shape == (*f_mu.shape, 3)
    assert la.sample(5).shape == (5, case.n_params)


def test_truncate_takes_cached_features():
    """The cache of a larger rank serves the smaller one."""
    case = make(CLASSIFICATION)
    la, loader = separate(case, K), validation(case)
    cache = FeatureCache.from_loader(la, loader)
    la.truncate(4)
    small = cache.truncate(4)
    probs = la.predict_from_cache(small)
    assert_close(probs, la(loader.dataset.tensors[0]))


def test_truncate_twice():
    """Truncating step by step is truncating at once."""
    case = make(REGRESSION)
    la, other = separate(case, K), separate(case, K)
    la.truncate(5)
    la.truncate(2)
    other.truncate(2)
    assert_close(la.H, other.H, rtol=0, atol=0)


def test_truncate_looks_for_the_fastest_features_again(monkeypatch):
    """What is fastest for K directions need not be for fewer."""
    case = make(CLASSIFICATION)
    la = separate(case, K)
    trials, original = [], passes.attempt

    def attempt(*args, **kwargs):
        trials.append(la.rank)
        return original(*args, **kwargs)

    monkeypatch.setattr(passes, "attempt", attempt)
    la(case.x_test)
    la.truncate(K)  # as it is
    la(case.x_test)
    assert not trials
    la.truncate(2)
    la(case.x_test)
    first = len(trials)
    la(case.x_test)
    assert len(trials) == first > 0
    assert set(trials) == {2}


# --- the choice --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "share"),
    [("scalar", 0.3), ("scalar", 0.95), ("layerwise", 0.7), ("layerwise", 1.0)],
)
def test_rank_by_evidence(case, structure, share):
    """The smallest rank whose Occam factor has reached the share of rank K's."""
    options = {"prior_precision": priors(case)[structure]}
    ratios = [
        separate(case, k, **options).log_det_ratio.item() for k in range(1, K + 1)
    ]
    expected = next(
        k for k, r in enumerate(ratios, 1) if r >= share * ratios[-1] * (1 - 1e-12)
    )
    la = separate(case, K, **options)
    table = la.optimize_rank("marglik", share=share)
    assert len(table) == K
    assert la.rank == expected
    assert la.log_marginal_likelihood().item() == pytest.approx(
        table[expected - 1]["log_marginal_likelihood"], rel=1e-9
    )


@pytest.mark.parametrize("ranks", [[2, 5], (6,), [4, 1, 3], range(2, 5)])
def test_candidates(ranks):
    """Only the ranks asked for are compared."""
    case = make(CLASSIFICATION)
    la, loader = separate(case, K), validation(case)
    options = {"link_approx": "probit", "ranks": ranks}
    table = la.optimize_rank("gridsearch", loader, **options)
    assert [row["rank"] for row in table] == sorted(ranks)
    losses = {k: nll(separate(case, k), loader) for k in ranks}
    assert la.rank == min(losses, key=losses.get)


def test_rank_by_a_callable():
    """Any loss can choose; a callable gets all data at once."""
    case = make(REGRESSION)
    la = separate(case, K)
    values = iter([5.0, 4.0, 1.0, 2.0, 0.0, 3.0])
    shapes = set()

    def loss(mean, var, y):
        shapes.add((tuple(mean.shape), tuple(var.shape), tuple(y.shape)))
        return next(values)

    table = la.optimize_rank("gridsearch", validation(case), loss=loss)
    assert la.rank == 5
    assert [row["loss"] for row in table] == [5.0, 4.0, 1.0, 2.0, 0.0, 3.0]
    assert shapes == {((20, 3), (20, 3, 3), (20, 3))}


def test_rank_by_a_metric():
    """A metric chooses and keeps its state; of equal ranks the smallest wins."""
    case = make(CLASSIFICATION)
    la = separate(case, K)
    metric = torchmetrics.CalibrationError("multiclass", num_classes=3)
    table = la.optimize_rank(
        "gridsearch", validation(case), loss=metric, link_approx="probit"
    )
    assert metric._update_count == 0
    least = min(row["loss"] for row in table)
    assert la.rank == next(row["rank"] for row in table if row["loss"] == least)


@both
def test_rank_from_a_cache(name):
    """Cached features choose the same rank without calling the model."""
    case = make(name)
    first, second, loader = separate(case, K), separate(case, K), validation(case)
    table = first.optimize_rank("gridsearch", loader, link_approx="probit")
    cache = FeatureCache.from_loader(second, loader)
    case.model.forward = None
    again = second.optimize_rank("gridsearch", cache, link_approx="probit")
    assert first.rank == second.rank
    assert [r["loss"] for r in again] == pytest.approx([r["loss"] for r in table])


# --- the automatic choice ----------------------------------------------------------


def test_auto_takes_ninety_per_cent_of_the_energy(case, too_many_pairs):
    """The least rank with 90 % of the trace, without any warning."""
    la = build(case, n_eigenvalues="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.fit(case.loader())
    rows = dense.jacobians(case.model, case.x, case.params)[1].flatten(0, 1)
    energy = torch.linalg.svdvals(rows).square().cumsum(0)
    expected = int((energy < 0.9 * energy[-1]).sum()) + 1
    assert la.rank == expected
    assert la.H.shape == (expected, expected)
    assert_close(la.basis.explained[-1], energy[expected - 1] / energy[-1])
    assert_same_posterior(la, fit(case, n_eigenvalues=expected), case)


def test_auto_is_limited(too_many_pairs):
    """A flat spectrum does not give more than 128 directions."""
    x = torch.eye(200).double()
    y = torch.zeros(200, 1).double()
    case = Case(nn.Linear(200, 1).double(), "regression", x, y, x[:3])
    la = build(case, n_eigenvalues="auto")
    la.fit(case.loader(50))
    assert la.rank == 128


def test_auto_is_saved():
    """A checkpoint of an automatic rank loads into a fresh object."""
    case = make(CLASSIFICATION)
    la = fit(case, n_eigenvalues="auto")
    other = build(case, n_eigenvalues="auto")
    other.load_state_dict(copy.deepcopy(la.state_dict()))
    assert_same_posterior(other, la, case)


# --- errors ------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, -1, 2.5, "3", True, None])
def test_truncate_needs_a_positive_integer(rank):
    """Other values are refused by name and change nothing."""
    case = make(CLASSIFICATION)
    la = separate(case, K)
    with pytest.raises(ValueError, match="rank"):
        la.truncate(rank)
    assert la.rank == K


def test_truncate_cannot_extend():
    """A rank above the fitted one is refused with both numbers and the remedy."""
    case = make(CLASSIFICATION)
    la = separate(case, K)
    with pytest.raises(ValueError, match=r"rank=7 .*6.*n_eigenvalues=7"):
        la.truncate(7)
    assert la.rank == K


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "magic"}, r"method.*magic"),
        ({"method": "gridsearch"}, "val_loader"),
        ({"method": "gridsearch", "ranks": [0, 2]}, r"ranks.*1\.\.6"),
        ({"method": "gridsearch", "ranks": [2, 7]}, r"ranks.*1\.\.6"),
        ({"method": "gridsearch", "ranks": []}, "ranks"),
        ({"method": "marglik", "share": 1.5}, "share"),
        ({"method": "marglik", "share": 0.0}, "share"),
    ],
)
def test_invalid_arguments(options, match):
    """Each wrong argument is named, and nothing is truncated."""
    case = make(CLASSIFICATION)
    la = separate(case, K)
    if "ranks" in options:
        options = {**options, "val_loader": validation(case)}
    with pytest.raises(ValueError, match=match):
        la.optimize_rank(**options)
    assert la.rank == K


def test_a_failing_loss_truncates_nothing():
    """The rank is as fitted if the loss raises."""
    case = make(CLASSIFICATION)
    la = separate(case, K)

    def broken(*args):
        raise RuntimeError("broken loss")

    with pytest.raises(RuntimeError, match="broken loss"):
        la.optimize_rank("gridsearch", validation(case), loss=broken)
    assert la.rank == K


@pytest.mark.parametrize("call", ["truncate", "optimize_rank"])
def test_unfitted(call):
    """Before a fit there is no rank to choose."""
    case = make(CLASSIFICATION)
    la = ELLALaplace(case.model, "classification")
    with pytest.raises(AttributeError, match=r"fit\("):
        la.truncate(1) if call == "truncate" else la.optimize_rank()


@pytest.mark.parametrize("value", ["automatic", "20", 0, 1.5])
def test_n_eigenvalues(value):
    """Only "auto" and positive integers are taken."""
    case = make(CLASSIFICATION)
    with pytest.raises(ValueError, match="n_eigenvalues"):
        build(case, n_eigenvalues=value)
