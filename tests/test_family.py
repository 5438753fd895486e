"""What every member of the Laplace family does, `ELLALaplace` does."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from laplace import FullLaplace
from laplace.utils.enums import Likelihood, LinkApprox, PredType
from torch.distributions import Categorical, Normal
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace, ELLALLLaplace, RankWarning
from tests import dense
from tests.cases import (
    Batch,
    Case,
    DictModel,
    RewardModel,
    make,
    mapping_loader,
    mlp,
    priors,
)
from tests.fitting import assert_close, build, fit

FLAVOURS = [ELLALaplace, ELLALLLaplace]
flavours = pytest.mark.parametrize("cls", FLAVOURS)
REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"
both = pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.RankWarning")


def model_params(model, cls):
    layers = list(model.children())
    params = layers[-1].parameters() if cls is ELLALLLaplace else model.parameters()
    return [p.detach() for p in params]


# --- construction ------------------------------------------------------------------


@flavours
def test_init(cls):
    """Model and likelihood are enough, as strings or as enums."""
    model = mlp(3, 4, 2)
    for likelihood in ("classification", "regression", *list(Likelihood)[:2]):
        la = cls(model, likelihood)
        assert la.likelihood == likelihood


def test_positional_order_is_that_of_the_base():
    """The first arguments stand in the order of `ParametricLaplace`."""
    la = ELLALaplace(mlp(3, 4, 2), "regression", 0.3, 2.0, 0.5, 1.5, True, "x", "y")
    assert (la.sigma_noise, la.prior_precision, la.prior_mean) == (
        pytest.approx(0.3),
        pytest.approx(2.0),
        pytest.approx(0.5),
    )
    assert (la.temperature, la.enable_backprop) == (1.5, True)
    assert (la.dict_key_x, la.dict_key_y) == ("x", "y")


@flavours
@pytest.mark.parametrize(
    "noise",
    [1.2, torch.tensor(1.2), torch.tensor([1.2]), np.array(1.2)],
    ids=["float", "0d", "1d", "numpy"],
)
def test_noise(cls, noise):
    """The noise is a float or a scalar tensor, for regression alone."""
    la = cls(mlp(3, 4, 2), "regression", sigma_noise=noise)
    assert la.sigma_noise.item() == pytest.approx(1.2)
    with pytest.raises(ValueError):
        cls(mlp(3, 4, 2), "classification", sigma_noise=noise)


@flavours
def test_noise_of_each_output_by_numpy(cls):
    """Arrays serve as tensors do, in the model's dtype."""
    la = cls(mlp(3, 4, 2), "regression", sigma_noise=np.array([0.1, 0.2]))
    assert_close(la.sigma_noise, torch.tensor([0.1, 0.2]))
    la.sigma_noise = np.array([0.3, 0.4])
    assert_close(la.sigma_noise, torch.tensor([0.3, 0.4]))
    with pytest.raises(ValueError, match="one number per output"):
        la.sigma_noise = np.ones((2, 2))


@flavours
@pytest.mark.parametrize("noise", [torch.ones(1, 1), torch.ones(2, 2), "1.2"])
def test_noise_invalid(cls, noise):
    """Other noises are refused."""
    la = cls(mlp(3, 4, 2), "regression")
    with pytest.raises((ValueError, TypeError)):
        la.sigma_noise = noise


@flavours
@pytest.mark.parametrize("size", ["float", "0d", "1", "layerwise", "diag"])
def test_prior_precision_shapes(cls, size):
    """Scalar, layerwise and diagonal prior precisions are accepted and expanded."""
    model = mlp(3, 4, 2)
    params = model_params(model, cls)
    n = sum(p.numel() for p in params)
    prior = {
        "float": 1.7,
        "0d": torch.tensor(1.7),
        "1": torch.tensor([1.7]),
        "layerwise": torch.full((len(params),), 1.7),
        "diag": torch.full((n,), 1.7),
    }[size]
    la = (
        cls(model, "regression", prior_precision=prior, last_layer_name="2")
        if (cls is ELLALLLaplace)
        else cls(model, "regression", prior_precision=prior)
    )
    torch.testing.assert_close(la.prior_precision_diag, torch.full((n,), 1.7))


@flavours
@pytest.mark.parametrize("prior", [torch.ones(1, 1), torch.ones(7), "1.5"])
def test_prior_precision_invalid(cls, prior):
    """Other prior precisions are refused, at the latest when fitting."""
    case = make(REGRESSION)
    with pytest.raises((ValueError, TypeError)):
        fit(case, cls, prior_precision=prior)


@both
@pytest.mark.parametrize("kind", ["float", "0d", "1", "full"])
def test_prior_mean_and_scatter(name, kind):
    """The scatter is (θ̂ − μ)ᵀ D (θ̂ − μ), for scalar and full prior means."""
    case = make(name)
    mean = {
        "float": 0.8,
        "0d": torch.tensor(0.8, dtype=torch.float64),
        "1": torch.tensor([0.8], dtype=torch.float64),
        "full": torch.full((case.n_params,), 0.8, dtype=torch.float64),
    }[kind]
    la = fit(case, prior_mean=mean, prior_precision=1e-2)
    theta = parameters_to_vector(case.params).detach()
    assert_close(la.scatter, 1e-2 * (theta - 0.8).square().sum())
    assert la.scatter.ndim == 0
    assert_close(
        la.log_marginal_likelihood(),
        dense.Reference(
            case, la.basis.vectors, sigma=la.sigma_noise, prior_mean=0.8
        ).evidence(1e-2),
    )


@pytest.mark.parametrize("mean", [torch.ones(5, 1), torch.ones(5), "72"])
def test_prior_mean_invalid(mean):
    """Prior means of another shape or type are refused."""
    with pytest.raises((ValueError, TypeError)):
        build(make(REGRESSION), prior_mean=mean)


@flavours
def test_temperature(cls):
    """The temperature is kept, and may be changed after the fit."""
    assert cls(mlp(3, 4, 2), "classification", temperature=1.1).temperature == 1.1


SETTINGS = {
    "prior_precision": 5.0,
    "prior_mean": 0.5,
    "sigma_noise": 2.0,
    "temperature": 3.0,
}


@flavours
@pytest.mark.parametrize("attribute", SETTINGS)
def test_changes_take_effect_at_once(cls, attribute):
    """A change after the fit gives what fitting with that value gives."""
    case = make(REGRESSION)
    la = fit(case, cls)
    la(case.x_test), la.log_marginal_likelihood(), la.posterior_covariance
    setattr(la, attribute, SETTINGS[attribute])
    other = fit(case, cls, **{attribute: SETTINGS[attribute]})
    assert_close(la.posterior_precision, other.posterior_precision)
    assert_close(la.posterior_covariance, other.posterior_covariance)
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    assert_close(la(case.x_test)[1], other(case.x_test)[1])
    if attribute != "prior_mean":
        assert not torch.allclose(la(case.x_test)[1], fit(case, cls)(case.x_test)[1])


def test_changes_reach_the_features_never():
    """Prior and noise changes cost K×K work: the model is not called."""
    case = make(CLASSIFICATION)
    la = fit(case)
    case.model.forward = None
    la.prior_precision = priors(case)["diag"]
    la.temperature = 2.0
    assert torch.isfinite(la.log_marginal_likelihood())
    assert la.posterior_covariance.shape == (la.rank, la.rank)


# --- likelihood and evidence -------------------------------------------------------


@flavours
def test_log_likelihood_regression(cls):
    """The log-likelihood is that of the Gaussian, and follows the noise."""
    case = make(REGRESSION)
    la = fit(case, cls)
    f = case.model(case.x).detach()
    assert_close(la.log_likelihood, Normal(f, 0.4).log_prob(case.y).sum())
    la.sigma_noise = 0.72
    assert_close(la.log_likelihood, Normal(f, 0.72).log_prob(case.y).sum())


@flavours
def test_log_likelihood_classification(cls):
    """The log-likelihood is that of the categorical."""
    case = make(CLASSIFICATION)
    expected = Categorical(logits=case.model(case.x).detach()).log_prob(case.y).sum()
    assert_close(fit(case, cls).log_likelihood, expected)


@flavours
@both
def test_evidence_from_its_parts(cls, name):
    """log p(D|θ̂) − ½ (log det ratio + scatter)."""
    la = fit(make(name), cls, prior_precision=0.7)
    expected = la.log_likelihood - 0.5 * (la.log_det_ratio + la.scatter)
    assert_close(la.log_marginal_likelihood(), expected)


def test_evidence_sets_what_it_is_given():
    """Prior precision and noise passed to the evidence stay, as in the base class."""
    la = fit(make(REGRESSION))
    la.log_marginal_likelihood(torch.tensor([2.5]), torch.tensor(0.9))
    assert la.prior_precision.item() == pytest.approx(2.5)
    assert la.sigma_noise.item() == pytest.approx(0.9)


def test_evidence_noise_is_for_regression():
    """Passing a noise to the evidence of a classifier is an error."""
    with pytest.raises(ValueError, match="regression"):
        fit(make(CLASSIFICATION)).log_marginal_likelihood(sigma_noise=torch.tensor(2.0))


# --- predictions -------------------------------------------------------------------


@flavours
def test_regression_shapes(cls):
    """Shapes of all regression predictions."""
    case = make(REGRESSION)
    la = fit(case, cls)
    for pred_type in ("glm", "gp", PredType.GLM):
        f_mu, f_var = la(case.x_test, pred_type=pred_type)
        assert f_mu.shape == (7, 3)
        assert f_var.shape == (7, 3, 3)
        assert_close(f_mu, case.model(case.x_test).detach())
    f_mu, f_var = la(case.x_test, joint=True)
    assert (f_mu.shape, f_var.shape) == ((21,), (21, 21))
    f_mu, f_var = la(case.x_test, pred_type="nn", link_approx="mc", n_samples=10)
    assert f_mu.shape == f_var.shape == (7, 3)


@flavours
@both
@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"joint": True},
        {"diagonal_output": True},
        {"link_approx": "mc"},
        {"link_approx": "bridge"},
        {"pred_type": "nn", "link_approx": "mc"},
    ],
    ids=str,
)
def test_no_inputs(cls, name, complement, options):
    """An empty batch has empty predictions, of the shapes that `FullLaplace` gives."""
    case = make(name)
    full = FullLaplace(case.model, case.likelihood)
    full.fit(case.loader())
    nothing = case.x_test[:0]
    la = fit(case, cls, complement=complement)
    expected, found = full(nothing, **options), la(nothing, **options)
    if isinstance(expected, torch.Tensor):
        expected, found = (expected,), (found,)
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert la.functional_samples(nothing, n_samples=4).shape == (4, 0, 3)


@flavours
@pytest.mark.parametrize("link", ["mc", "probit", "bridge", "bridge_norm", *LinkApprox])
def test_classification_probabilities(cls, link):
    """Every link gives probabilities."""
    case = make(CLASSIFICATION)
    probs = fit(case, cls)(case.x_test, link_approx=link)
    assert probs.shape == (7, 3)
    assert (probs >= 0).all()
    assert_close(probs.sum(-1), torch.ones(7, dtype=torch.float64))


@flavours
def test_nn_predictive(cls):
    """Sampled weights in the network: at a tight posterior, the prediction of MAP."""
    case = make(CLASSIFICATION)
    la = fit(case, cls, prior_precision=1e10)
    probs = la(case.x_test, pred_type="nn", link_approx="mc", n_samples=20)
    expected = case.model(case.x_test).softmax(-1).detach()
    assert_close(probs, expected, rtol=0, atol=1e-3)


def test_nn_predictive_is_the_network_at_sampled_weights():
    """`pred_type="nn"` has the moments of the network over `la.sample`'s weights."""
    case = make(REGRESSION)
    la = fit(case, prior_precision=2.0)
    outputs = []
    for w in la.sample(3000):
        named, start = {}, 0
        for name, p in case.model.named_parameters():
            named[name] = w[start : start + p.numel()].view_as(p)
            start += p.numel()
        outputs.append(torch.func.functional_call(case.model, named, case.x_test))
    outputs = torch.stack(outputs).detach()
    scale = outputs.std(0).max().item()
    mean, var = la(case.x_test, pred_type="nn", link_approx="mc", n_samples=3000)
    assert_close(mean, outputs.mean(0), rtol=0, atol=0.1 * scale)
    assert_close(var, outputs.var(0), rtol=0, atol=0.15 * scale**2)


def test_nn_predictive_equals_its_samples():
    """Mean and variance over the samples that the same generator gives."""
    case = make(REGRESSION)
    la = fit(case)
    g = torch.Generator()
    options = {"pred_type": "nn", "n_samples": 6, "generator": g}
    g.manual_seed(3)
    samples = la.functional_samples(case.x_test, **options)
    g.manual_seed(3)
    mean, var = la(case.x_test, link_approx="mc", **options)
    assert_close(mean, samples.mean(0))
    assert_close(var, samples.var(0))


@flavours
@both
@pytest.mark.parametrize("pred_type", ["glm", "gp", "nn"])
def test_samples(cls, name, pred_type):
    """functional_samples and predictive_samples are (S, B, C), the latter linked."""
    case = make(name)
    la = fit(case, cls)
    options = {"pred_type": pred_type, "n_samples": 9}
    g = torch.Generator()
    f = la.functional_samples(case.x_test, generator=g.manual_seed(1), **options)
    p = la.predictive_samples(case.x_test, generator=g.manual_seed(1), **options)
    assert f.shape == p.shape == (9, 7, 3)
    if case.likelihood == "classification":
        f = f.softmax(-1)
    assert_close(p, f)


@flavours
def test_invalid_prediction_arguments(cls):
    """Unknown prediction types and links are refused, and nn with a closed form."""
    case = make(CLASSIFICATION)
    la = fit(case, cls)
    for options in (
        {"pred_type": "linear"},
        {"link_approx": "exact"},
        {"pred_type": "nn", "link_approx": "probit"},
        {"generator": "seed", "link_approx": "mc"},
    ):
        with pytest.raises((ValueError, TypeError)):
            la(case.x_test, **options)
    with pytest.raises(ValueError):
        la.functional_samples(case.x_test, pred_type="linear")
    with pytest.raises(ValueError):
        la.predictive_samples(case.x_test, pred_type="linear")


def test_predictions_do_not_change_the_posterior():
    """No link changes its arguments: asking twice gives the same."""
    case = make(CLASSIFICATION)
    la = fit(case)
    for link in ("bridge", "bridge_norm", "probit", "mc"):
        first = la(case.x_test, link_approx=link)
        assert_close(la(case.x_test, link_approx=link), first, rtol=0, atol=0)


def test_functional_variance_checks_jacobians():
    """Jacobians of another number of parameters are refused."""
    la = fit(make(REGRESSION))
    with pytest.raises(ValueError):
        la.functional_variance(torch.ones(2, 3, 5).double())
    with pytest.raises((ValueError, TypeError)):
        la.functional_variance([1.0])


# --- random draws ------------------------------------------------------------------

DRAWS = {
    "mc": lambda la, x, g: la(x, link_approx="mc", n_samples=7, generator=g),
    "nn": lambda la, x, g: la(
        x, pred_type="nn", link_approx="mc", n_samples=7, generator=g
    ),
    "sample": lambda la, x, g: la.sample(7, generator=g),
    "functional": lambda la, x, g: la.functional_samples(x, n_samples=7, generator=g),
    "joint": lambda la, x, g: la.functional_samples(
        x, n_samples=7, generator=g, joint=True
    ),
    "predictive": lambda la, x, g: la.predictive_samples(x, n_samples=7, generator=g),
    "diagonal": lambda la, x, g: la.functional_samples(
        x, n_samples=7, generator=g, diagonal_output=True
    ),
}


@flavours
@pytest.mark.parametrize("draw", DRAWS)
def test_generator(cls, draw):
    """The generator decides the draws: same state, same draws; it advances."""
    case = make(CLASSIFICATION)
    la = fit(case, cls)
    g = torch.Generator()
    first = DRAWS[draw](la, case.x_test, g.manual_seed(1))
    second = DRAWS[draw](la, case.x_test, g)
    again = DRAWS[draw](la, case.x_test, g.manual_seed(1))
    assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("draw", ["mc", "nn"])
def test_predictions_without_generator_are_deterministic(draw):
    """Without a generator predictions come from `seed`, not from the global state."""
    case = make(CLASSIFICATION)
    la = fit(case)
    first = DRAWS[draw](la, case.x_test, None)
    torch.manual_seed(77)
    assert_close(DRAWS[draw](la, case.x_test, None), first, rtol=0, atol=0)


# --- online fitting ----------------------------------------------------------------


@both
def test_online_fit(name):
    """`override=False` keeps the basis and adds data."""
    case = make(name)
    half = len(case.x) // 2
    parts = [
        Case(case.model, case.likelihood, x, y, case.x_test, case.kwargs)
        for x, y in (
            (case.x[:half], case.y[:half]),
            (case.x[half:], case.y[half:]),
        )
    ]
    la = fit(parts[0])
    V = la.basis.vectors.clone()
    la.fit(parts[1].loader(), override=False)
    expected = dense.Reference(case, V, sigma=la.sigma_noise)
    assert_close(la.basis.vectors, V, rtol=0, atol=0)
    assert_close(la.H, expected.H)
    assert_close(torch.as_tensor(la.loss).double(), expected.loss)
    assert la.n_data == len(case.x)
    assert_close(la.log_marginal_likelihood(), expected.evidence(1.0))


def test_online_fit_twice_doubles():
    """The same data twice doubles H, loss and n_data; overriding resets them."""
    case = make(CLASSIFICATION)
    la = fit(case)
    H, loss = la.H.clone(), float(la.loss)
    covariance = la.posterior_covariance.clone()
    la.fit(case.loader(), override=False)
    assert_close(la.H, 2 * H)
    assert float(la.loss) == pytest.approx(2 * loss)
    assert la.n_data == 2 * len(case.x)
    assert (la.posterior_covariance.trace() < covariance.trace()).item()
    la.fit(case.loader(), override=True)
    assert_close(la.H, H)
    assert la.n_data == len(case.x)


def test_online_fit_of_an_unfitted():
    """`override=False` on an unfitted object fits it."""
    case = make(CLASSIFICATION)
    la = build(case)
    la.fit(case.loader(), override=False)
    assert_close(la.H, fit(case).H)


# --- inputs ------------------------------------------------------------------------


@flavours
@pytest.mark.parametrize("mapping", [dict, Batch])
@pytest.mark.parametrize("keys", [("input_ids", "labels"), ("x", "target")])
@both
def test_mapping_inputs(cls, mapping, keys, name):
    """Mapping batches, with the usual keys or others, give what tensors give."""
    case = make(name)
    plain = fit(case, cls)
    expected = plain(case.x_test)
    case.model = DictModel(case.model, keys[0])
    data = mapping_loader(case.x, case.y, *keys, cls=mapping)
    options = {"dict_key_x": keys[0], "dict_key_y": keys[1]}
    la = fit(case, cls, loader=data, **options)
    query = mapping({keys[0]: case.x_test})
    result = la(query)
    torch.testing.assert_close(result, expected, rtol=1e-7, atol=1e-9)
    if name == REGRESSION:
        assert la(query, joint=True)[1].shape == (21, 21)
    samples = la.predictive_samples(query, pred_type="nn", n_samples=3)
    assert samples.shape == (3, 7, 3)
    assert list(query) == [keys[0]]


def test_mapping_input_tuning():
    """Grid search over a validation loader of mappings."""
    case = make(CLASSIFICATION)
    case.model = DictModel(case.model)
    data = mapping_loader(case.x, case.y)
    la = fit(case, loader=data)
    la.optimize_prior_precision(method="gridsearch", val_loader=data, grid_size=5)
    assert la.prior_precision.item() > 0


# --- dtypes ------------------------------------------------------------------------

OUT_DTYPE = {
    torch.float64: (torch.float64, 1e-8),
    torch.float32: (torch.float32, 1e-3),
    torch.bfloat16: (torch.float32, 0.3),
    torch.float16: (torch.float32, 0.05),
}


@flavours
@pytest.mark.parametrize("dtype", OUT_DTYPE, ids=str)
@both
def test_dtypes(cls, dtype, name):
    """The algebra stays in float32 or better; outputs in the model's, at least that."""
    case = make(name)
    expected = fit(case, cls, prior_precision=3.0)(case.x_test)
    case.model.to(dtype)
    case.x, case.x_test = case.x.to(dtype), case.x_test.to(dtype)
    if case.y.is_floating_point():
        case.y = case.y.to(dtype)
    out_dtype, tol = OUT_DTYPE[dtype]
    la = fit(case, cls, prior_precision=3.0)
    assert la.H.dtype == torch.float64
    results = la(case.x_test)
    for a, b in zip(
        results if isinstance(results, tuple) else (results,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    ):
        assert a.dtype == out_dtype
        scale = b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tol * scale)
    link = {"link_approx": "mc", "n_samples": 5}
    for pred_type in ("glm", "nn"):
        out = la(case.x_test, pred_type=pred_type, **link)
        for tensor in out if isinstance(out, tuple) else (out,):
            assert torch.isfinite(tensor).all()
    assert torch.isfinite(la.log_marginal_likelihood())
    la.optimize_prior_precision(method="marglik", n_steps=3)
    assert torch.isfinite(la.prior_precision).all()


# --- backpropagation ---------------------------------------------------------------


@flavours
@pytest.mark.parametrize("joint", [False, True])
def test_backprop_regression(cls, joint):
    """Gradients of mean and (co)variance in the input, by finite differences."""
    case = make(REGRESSION)
    la = fit(case, cls, enable_backprop=True)
    x = case.x_test[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: la(x, joint=joint), (x,))


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse", "double_vjp"])
def test_backprop_feature_modes(mode):
    """Gradients are right by every way of computing the features."""
    case = make("regression_1")
    la = fit(case, enable_backprop=True, feature_mode=mode)
    x = case.x_test[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: la(x), (x,))


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm", "mc"])
def test_backprop_classification(link):
    """Gradients through every link."""
    case = make(CLASSIFICATION)
    la = fit(case, enable_backprop=True)
    x = case.x_test[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: la(x, link_approx=link, n_samples=5), (x,)
    )


def test_backprop_samples():
    """Functional samples are differentiable in the input (Thompson sampling)."""
    case = make("regression_1")
    la = fit(case, enable_backprop=True)
    x = case.x_test[:2].clone().requires_grad_()
    for pred_type in ("glm", "nn"):
        g = torch.Generator()

        def draw(x, pred_type=pred_type, g=g):
            return la.functional_samples(
                x, pred_type=pred_type, n_samples=3, generator=g.manual_seed(0)
            )

        assert torch.autograd.gradcheck(draw, (x,))


@flavours
def test_no_graph_without_backprop(cls):
    """Without `enable_backprop` nothing keeps a graph."""
    case = make(REGRESSION)
    la = fit(case, cls)
    x = case.x_test.clone().requires_grad_()
    for out in (la(x), la(x, joint=True), la.features(x)):
        assert not any(t.requires_grad for t in out)
    assert not la.H.requires_grad
    assert not la.basis.vectors.requires_grad


# --- reward modelling --------------------------------------------------------------


def reward_case():
    torch.manual_seed(4)
    model = RewardModel(mlp(3, 4, 1)).double().eval()
    x, y = torch.randn(9, 2, 3).double(), torch.randint(2, (9,))
    return Case(model, "reward_modeling", x, y, torch.randn(7, 3).double())


def test_reward_modeling():
    """Fitted as a classifier of pairs, asked as a regression of single inputs."""
    case = reward_case()
    la = fit(case, prior_precision=0.6)
    as_classifier = Case(case.model, "classification", case.x, case.y, case.x_test)
    expected = dense.Reference(as_classifier, la.basis.vectors)
    assert la.n_outputs == 2
    assert_close(la.H, expected.H)
    assert_close(la.log_marginal_likelihood(), expected.evidence(0.6))
    f, f_var = expected.predict(case.x_test, 0.6)
    for joint in (False, True):
        f_mu, _var = la(case.x_test, joint=joint)
        assert_close(f_mu, f.flatten() if joint else f)
    assert_close(la(case.x_test)[1], f_var)
    probs = la(case.x[:4], fitting=True)
    assert_close(probs, dense.probit(*expected.predict(case.x[:4], 0.6)))
    samples = la.functional_samples(case.x_test, n_samples=5)
    assert samples.shape == (5, 7, 1)


def test_reward_modeling_tuning():
    """Both ways of tuning the prior work on preferences."""
    case = reward_case()
    la = fit(case)
    la.optimize_prior_precision(method="marglik", n_steps=5)
    la.optimize_prior_precision(
        method="gridsearch", val_loader=case.loader(), grid_size=5
    )
    assert la.prior_precision.item() > 0


# --- frozen parameters -------------------------------------------------------------


def test_frozen_parameters():
    """Parameters without gradient are constants, as if they were buffers."""
    case = make("frozen")
    assert case.n_params < sum(p.numel() for p in case.model.parameters())
    la = fit(case, prior_precision=0.5)
    assert la.n_params == case.n_params == len(la.mean)
    assert la.basis.vectors.shape == (case.n_params, la.rank)
    f, f_var = dense.Reference(case, la.basis.vectors).predict(case.x_test, 0.5)
    assert_close(la(case.x_test), dense.probit(f, f_var))
    assert la(case.x_test, pred_type="nn", link_approx="mc").shape == (7, 3)


# --- persistence of the object -----------------------------------------------------


@flavours
@both
def test_save_the_object(cls, name, tmp_path):
    """`torch.save(la)` and plain pickle keep the predictions."""
    case = make(name)
    la = fit(case, cls)
    expected = la(case.x_test)
    torch.save(la, tmp_path / "la.pt")
    loaded = torch.load(tmp_path / "la.pt", weights_only=False)
    torch.testing.assert_close(loaded(case.x_test), expected, rtol=0, atol=0)
    again = pickle.loads(pickle.dumps(la))
    torch.testing.assert_close(again(case.x_test), expected, rtol=0, atol=0)


# --- defaults ----------------------------------------------------------------------


@flavours
def test_defaults_on_float32(cls):
    """Defaults, float32, ten data points: fit, tune, predict."""
    model = mlp(3, 20, 2)
    x, y = torch.randn(10, 3), torch.randint(2, (10,))
    la = cls(model, "classification")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=3))
    la.optimize_prior_precision()
    assert la(x).shape == (10, 2)
    assert la(x).dtype == torch.float32
