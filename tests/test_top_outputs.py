"""Probabilities from the variance of the largest logits, against dense float64."""

import pickle

import pytest
import torch
from laplace import Laplace
from torch.utils.flop_counter import FlopCounterMode

import laplace_ella
from laplace_ella import ELLALLLaplace, FeatureCache
from tests import dense
from tests.cases import make, mlp
from tests.fitting import assert_close, fit
from tests.test_layouts import LAYOUTS, dense_jacobians, loader, problem

LINKS = {"probit": dense.probit, "probit_centered": dense.centered_probit}


def fitted(name="classification_cnn", **kwargs):
    case = make(name)
    return case, fit(case, **kwargs)


def only_largest(f, covariance, m):
    """Covariances with the rows and columns of all but the m largest logits zero."""
    rank = f.argsort(-1, descending=True).argsort(-1)
    kept = (rank < m).double()
    return covariance * kept.unsqueeze(-1) * kept.unsqueeze(-2)


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize(
    "how",
    [
        {"feature_mode": "forward"},
        {"feature_mode": "reverse", "row_mode": "vmap"},
        {"feature_mode": "reverse", "row_mode": "loop"},
        {"feature_mode": "double_vjp"},
        {"feature_mode": "reverse", "chunk_size": 1},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_probabilities_are_those_of_the_covariance_without_the_others(
    how, m, complement
):
    case, la = fitted(complement=complement, softmax_temperature=1.3, **how)
    covariance = la._glm_predictive_distribution(case.x_test)[1]
    f, _ = dense.jacobians(case.model, case.x_test, case.params)
    f, covariance = f / 1.3, only_largest(f, covariance, m) / 1.3**2
    la.top_outputs = m
    for link, reference in LINKS.items():
        actual = la(case.x_test, link_approx=link)
        assert_close(actual, reference(f, covariance), rtol=1e-7)
    samples = la(case.x_test, link_approx="mc", n_samples=20_000)
    expected = dense.sampled_probs(
        f, covariance + 1e-9 * torch.eye(f.shape[-1]).double(), 20_000
    )
    assert (samples - expected).abs().max() < 0.02


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_the_largest_of_each_position(layout, mode, complement):
    model, x, y, x_test = problem(layout, "classification")
    la = Laplace(
        model,
        "classification",
        "all",
        "nystrom",
        n_eigenvalues=6,
        output_layout=layout,
        feature_mode=mode,
        complement=complement,
        top_outputs=2,
    )
    la.fit(loader(x, y))
    f, J = (t.flatten(0, 1) for t in dense_jacobians(model, x_test, layout))
    V = la.basis.vectors
    covariance = V @ torch.linalg.inv(la.H + torch.eye(6).double()) @ V.T
    if complement == "prior":
        covariance = covariance + torch.eye(len(V)).double() - V @ V.T
    expected = dense.probit(f, only_largest(f, J @ covariance @ J.mT, 2))
    actual = la(x_test)
    actual = actual.movedim(1, -1) if layout == "channels_first" else actual
    assert_close(actual.reshape(expected.shape), expected)


@pytest.mark.parametrize("m", [4, 9])
def test_all_outputs_change_nothing(m):
    case, la = fitted()
    links = ("probit", "probit_centered", "mc")
    before = [la(case.x_test, link_approx=link) for link in links]
    la.top_outputs = m
    for link, expected in zip(links, before, strict=True):
        assert torch.equal(la(case.x_test, link_approx=link), expected)


def test_what_is_of_the_function_stays_of_all_outputs():
    case, la = fitted()
    g = torch.Generator

    def everything():
        return (
            *la._glm_predictive_distribution(case.x_test),
            *la.features(case.x_test),
            la.functional_samples(case.x_test, generator=g().manual_seed(0)),
            la.predictive_samples(
                case.x_test, generator=g().manual_seed(0), joint=True
            ),
            la.log_marginal_likelihood(),
        )

    before = everything()
    la.top_outputs = 1
    for a, b in zip(everything(), before, strict=True):
        assert torch.equal(a, b)
    # Samples of probabilities are of the predictions: the other logits do not vary.
    p = la.predictive_samples(case.x_test, n_samples=50).log()
    f = case.model(case.x_test).detach()
    others = f.argsort(-1)[:, :-1]
    differences = p.gather(2, others.expand(50, -1, -1)).diff(dim=-1)
    assert_close(differences, f.gather(1, others).diff(dim=-1).expand_as(differences))


@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_caches_and_searches(complement):
    """A cache of all outputs serves every m, one of m serves m and less."""
    case, la = fitted(complement=complement)
    every = FeatureCache.from_loader(la, case.loader())
    la.top_outputs = 3
    three = FeatureCache.from_loader(la, case.loader())
    assert three.phi.shape[1] == three.top_outputs == 3
    for m in (3, 1):
        la.top_outputs = m
        expected = la(case.x, link_approx="probit")
        for cache in (every, three, FeatureCache.from_loader(la, case.loader())):
            assert_close(la.predict_from_cache(cache), expected)
        chosen = []
        for data in (every, three, case.loader()):
            la.prior_precision = 1.0
            la.optimize_prior_precision(
                method="gridsearch", val_loader=data, grid_size=9
            )
            la.optimize_calibration(data, link_approx="mc", n_samples=20)
            chosen.append(
                (float(la.prior_precision), la.temperature, la.softmax_temperature)
            )
            la.temperature, la.softmax_temperature = 1.0, 1.0
        for other in chosen[1:]:
            assert chosen[0] == pytest.approx(other)
    for m in (None, 4):
        la.top_outputs = m
        with pytest.raises(ValueError, match=r"3 largest outputs.*all are needed"):
            la.predict_from_cache(three)
    with pytest.raises(ValueError, match="all are needed"):
        la.fit_features(three)
    with pytest.raises(ValueError, match="different top_outputs"):
        FeatureCache.concatenate([every, three])


def test_a_cache_is_saved_with_its_outputs(tmp_path):
    case, la = fitted(top_outputs=2)
    cache = FeatureCache.from_loader(la, case.loader())
    cache.save(tmp_path / "cache.pt")
    again = FeatureCache.load(tmp_path / "cache.pt")
    assert torch.equal(again.outputs, cache.outputs)
    assert len(again[:2].outputs) == 2


def test_decompose_tells_the_uncertainty_of_the_predictions():
    case, la = fitted(top_outputs=2)
    parts = laplace_ella.decompose(la, case.x_test, n_samples=4000)
    expected = la(case.x_test, link_approx="mc", n_samples=4000)
    assert (parts.mean - expected).abs().max() < 0.03


def test_last_layer():
    case = make("classification_mlp")
    la = fit(case, ELLALLLaplace, top_outputs=1)
    covariance = la._glm_predictive_distribution(case.x_test)[1]
    f = case.model(case.x_test).detach()
    expected = dense.probit(f, only_largest(f, covariance, 1))
    assert_close(la(case.x_test), expected)


def test_it_is_kept_by_checkpoints_and_copies():
    case, la = fitted(top_outputs=2)
    other = fit(case)
    other.load_state_dict(la.state_dict())
    assert other.top_outputs == pickle.loads(pickle.dumps(la)).top_outputs == 2
    state = la.state_dict()
    del state["top_outputs"]  # as of older checkpoints
    other.load_state_dict(state)
    assert other.top_outputs is None


def test_gradients_flow_to_the_inputs():
    case, la = fitted(top_outputs=2, enable_backprop=True)
    x = case.x_test.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: la(x, link_approx="probit"), x, atol=1e-6)


def multiplications(la, x):
    """Of one prediction, after the ways were chosen."""
    la(x)
    with FlopCounterMode(display=False) as counter:
        la(x)
    return counter.get_total_flops()


def test_the_work_goes_with_the_number_of_outputs():
    """Reverse mode: about 2m + 1 derivatives, counted in multiplications."""
    torch.manual_seed(0)
    model = mlp(20, 50, 50, 30)
    x, y = torch.randn(40, 20), torch.randint(30, (40,))
    la = Laplace(model, "classification", "all", "nystrom", feature_mode="reverse")
    la.fit(loader(x, y))
    everything = multiplications(la, x)
    la.top_outputs = 3
    assert multiplications(la, x) < 0.2 * everything


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_the_work_goes_with_the_layers(mode):
    """Below the first one that has a posterior there is the forward pass alone."""
    torch.manual_seed(0)
    model = mlp(50, 200, 200, 4, 3)  # the last layer is next to nothing
    x, y = torch.randn(40, 50), torch.randint(3, (40,))
    last = [name for name, _ in model.named_parameters()][-2:]
    settings = {"n_eigenvalues": 5, "feature_mode": mode, "parameter_names": last}
    la = Laplace(model, "classification", "all", "nystrom", **settings)
    la.fit(loader(x, y))
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert multiplications(la, x) < 1.1 * counter.get_total_flops()


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "all"])
def test_a_number_of_outputs_is_needed(n):
    _, la = fitted(top_outputs=2)
    with pytest.raises(ValueError, match="top_outputs must be a positive integer"):
        la.top_outputs = n
    assert la.top_outputs == 2


def test_what_it_is_not_for_is_refused_before_work():
    with pytest.raises(ValueError, match=r"one class of several.*regression"):
        fit(make("regression_3"), top_outputs=1)
    case, la = fitted(top_outputs=2)
    for call in (
        lambda: la(case.x_test, link_approx="bridge"),
        lambda: la.optimize_calibration(None, link_approx="bridge_norm"),
    ):
        with pytest.raises(ValueError, match=r"variance of all classes|val_loader"):
            call()
    expected = {}
    for la.top_outputs in (None, 4):  # all of them, in either way
        expected[la.top_outputs] = la(case.x_test, link_approx="bridge")
    assert_close(expected[4], expected[None])
    la.top_outputs = None
    with pytest.raises(ValueError, match="multi_label=True"):
        Laplace(
            mlp(2, 3),
            "classification",
            "all",
            "nystrom",
            multi_label=True,
            top_outputs=1,
        )


def test_no_examples():
    case, la = fitted(top_outputs=2)
    assert la(case.x_test[:0]).shape == (0, 4)
