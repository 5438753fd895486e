"""What practitioners reach for: loaders, intervals, moments, links, mistyped names."""

import inspect
import math

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
from laplace_ella import ELLALaplace, ELLALLLaplace
from laplace_ella.errors import LinkWarning
from tests.cases import DictModel, make, mapping_loader, mlp
from tests.fitting import assert_close, build, fit
from tests.test_fit import OneByOne

REGRESSION, CLASSIFICATION = "regression_3", "classification_mlp"


@pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])
def test_predict(name, capsys):
    """Batch after batch what one call gives, with targets, without, and of streams."""
    case = make(name)
    la = fit(case)
    expected = la(case.x)
    state = torch.get_rng_state()
    loaders = [
        case.loader(5),
        DataLoader(TensorDataset(case.x), batch_size=4),
        DataLoader(case.x, batch_size=4),
        case.x.split(3),
        (x for x in case.x.split(3)),
        case.x,
    ]
    for loader in loaders:
        assert_close(la.predict(loader), expected)
    for loader in (loaders[0], DataLoader(OneByOne(case.x, case.y))):
        la.predict(loader, progress_bar=True)
    assert "[Predicting]" in capsys.readouterr().err
    assert torch.equal(torch.get_rng_state(), state)


def test_predict_mappings_and_options():
    case = make(CLASSIFICATION)
    case.model = DictModel(case.model)
    data, batch = mapping_loader(case.x, case.y), {"input_ids": case.x}
    la = fit(case, loader=data)
    expected = la(batch, link_approx="bridge")
    for loader in (data, [batch]):
        assert_close(la.predict(loader, link_approx="bridge"), expected)
    assert la.predict(data, device="meta").device.type == "meta"
    assert la.predict(data, device=None).device == case.x.device


def test_predict_draws_once():
    """Batches have samples of their own, the same at every call."""
    case = make(CLASSIFICATION)
    la = fit(case)
    same = [case.x[:1], case.x[:1]]
    first = la.predict(same, link_approx="mc", n_samples=5)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, la.predict(same, link_approx="mc", n_samples=5))
    generator = torch.Generator().manual_seed(la.seed)
    again = la.predict(same, link_approx="mc", n_samples=5, generator=generator)
    assert torch.equal(first, again)


def test_predict_refuses():
    la = fit(make(REGRESSION))
    x = make(REGRESSION).x
    with pytest.raises(ValueError, match=r"joint=True.*la\(x, joint=True\)"):
        la.predict([x], joint=True)
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        la.predict(3)
    with pytest.raises(ValueError, match="no batch"):
        la.predict([])
    with pytest.raises(ValueError, match=r"\(inputs, targets\).*length 3"):
        la.predict([(x, x, x)])


@pytest.mark.parametrize("noise", [0.4, torch.tensor([0.1, 0.5, 2.0])])
def test_std_and_intervals(noise):
    """Function and noise, each output with its own; quantiles are a Gaussian's."""
    case = make(REGRESSION)
    case.kwargs = {"sigma_noise": noise}
    la = fit(case)
    mean, variance = la(case.x_test, diagonal_output=True)
    std = (variance + la.sigma_noise.square()).sqrt()
    assert_close(la.predictive_std(case.x_test), std)
    assert_close(la.predictive_std(case.x_test.split(2), device="cpu"), std)
    for level, z in ((0.95, 1.959963985), (0.5, 0.674489750)):
        lower, upper = la.interval(case.x_test, level)
        torch.testing.assert_close(lower, mean - z * std, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(upper, mean + z * std, rtol=1e-6, atol=1e-6)
    for level in (0.0, 1.0, 95, math.nan):
        with pytest.raises(ValueError, match="level must lie between 0 and 1"):
            la.interval(case.x_test, level)


def test_std_of_pixels():
    """Of outputs (B, C, ...) every channel has its noise."""
    model, x = nn.Conv2d(1, 2, 1).double(), torch.randn(6, 1, 2, 3).double()
    noise, layout = torch.tensor([0.1, 3.0]), {"output_layout": "channels_first"}
    la = ELLALaplace(model, "regression", noise, n_eigenvalues=4, **layout)
    la.fit([(x, torch.randn(6, 2, 2, 3).double())])
    _, variance = la(x, diagonal_output=True)
    expected = (variance + noise.double().square()[:, None, None]).sqrt()
    assert_close(la.predictive_std(x), expected)
    parts = laplace_ella.decompose(la, x)
    assert_close(parts.total, expected.square())
    assert_close(parts.total - parts.epistemic, parts.aleatoric)


def test_intervals_are_for_regression():
    case = make(CLASSIFICATION)
    for ask in (fit(case).interval, fit(case).predictive_std):
        with pytest.raises(ValueError, match=r"for likelihood='regression'.*'classif"):
            ask(case.x)


@pytest.mark.parametrize("name", [REGRESSION, CLASSIFICATION])
def test_moments(name):
    """Mean and covariance of the outputs, as laplace-torch's ELLA names them."""
    case = make(name)
    la = fit(case, n_eigenvalues="exact", complement="prior")
    full = Laplace(case.model, case.likelihood, "all", "full", **case.kwargs)
    full.fit(case.loader())
    for joint in (False, True):
        expected = full._glm_predictive_distribution(case.x_test, joint=joint)
        found = la.predictive_moments(case.x_test, joint)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    variances = la.predictive_moments(case.x_test, diagonal_output=True)[1]
    covariance = la.predictive_moments(case.x_test)[1]
    assert_close(variances, covariance.diagonal(dim1=1, dim2=2))


SEARCHES = {
    "calibration": lambda la, val, **o: la.optimize_calibration(val, **o),
    "temperature": lambda la, val, **o: la.optimize_temperature(val, **o),
    "prior": lambda la, val, **o: la.optimize_prior_precision(
        method="gridsearch", val_loader=val, grid_size=5, **o
    ),
    "rank": lambda la, val, **o: la.optimize_rank("gridsearch", val, **o),
    "stopping": lambda la, val, **o: la.fit(
        val, val_loader=val, early_stopping=laplace_ella.EarlyStopping(**o)
    ),
}


@pytest.mark.filterwarnings("ignore::laplace_ella.errors.BorderWarning")
@pytest.mark.filterwarnings("ignore::laplace_ella.errors.RankWarning")
@pytest.mark.parametrize("search", SEARCHES)
def test_the_link_that_was_tuned_for(search, tmp_path):
    """It is the default of later predictions and searches; another one is a warning."""
    case = make(CLASSIFICATION)
    la = fit(case)
    assert la.link_approx == "probit"
    la(case.x, link_approx="mc")  # nothing was tuned: no warning
    SEARCHES[search](la, case.loader(), link_approx="probit_centered")
    assert la.link_approx == "probit_centered"
    centred = la(case.x)
    with pytest.warns(LinkWarning, match="'probit_centered'.*'mc'") as got:
        sampled = la(case.x, link_approx="mc")
    assert got[0].filename == __file__
    assert not torch.allclose(centred, sampled)
    cache = la.cache_features(case.loader())
    assert_close(la.predict_from_cache(cache), centred)
    SEARCHES[search](la, case.loader())  # judged by the same link
    assert la.link_approx == "probit_centered"
    la(case.x, "nn", n_samples=2)  # has one link, nothing to choose
    loaded = build(case)
    loaded.load_state_dict(la.state_dict())
    assert loaded.link_approx == "probit_centered"
    la.link_approx = "mc"
    assert_close(la(case.x), la(case.x, link_approx="mc"))
    la.link_approx = None
    assert_close(la(case.x), la(case.x, link_approx="probit"))
    with pytest.raises(ValueError, match=r"link_approx must be one of.*'soft'"):
        la.link_approx = "soft"


@pytest.mark.filterwarnings("error::laplace_ella.errors.LinkWarning")
def test_links_of_regression_do_not_matter():
    case = make(REGRESSION)
    la = fit(case)
    SEARCHES["prior"](la, case.loader())
    la(case.x, link_approx="mc")
    la.optimize_prior_precision()
    assert la.link_approx == "probit"


def test_one_default_number_of_samples():
    """Searches draw as many samples as predictions do."""
    owners = ELLALaplace, laplace_ella.EarlyStopping, laplace_ella.Method
    functions = [laplace_ella.decompose, ELLALaplace.__call__]
    functions += [f for cls in owners for f in vars(cls).values() if callable(f)]
    functions += [f for cls in ELLALaplace.__mro__[1:6] for f in vars(cls).values()]
    names = [inspect.signature(f).parameters for f in functions if callable(f)]
    defaults = {p["n_samples"].default for p in names if "n_samples" in p}
    assert defaults - {inspect.Parameter.empty} == {100}


def test_predictions_refuse_arguments_that_they_would_ignore():
    la, x = fit(make(CLASSIFICATION)), make(CLASSIFICATION).x
    for predict in (lambda **kw: la(x, **kw), lambda **kw: la.predict([x], **kw)):
        with pytest.raises(TypeError, match="Did you mean 'link_approx'"):
            predict(link_aprox="mc")


@pytest.mark.parametrize(
    ("subset", "cls"), [("all", "ELLALaplace"), ("last_layer", "ELLALLLaplace")]
)
def test_typing_errors(subset, cls):
    """The nearest valid name comes back, with the class that the user knows."""
    model = mlp(3, 4, 2)
    name = laplace_ella.register_structure("practical", n_eigenvalues=5)
    with pytest.raises(ValueError, match=f'"nystrom"\\).*{cls}'):
        Laplace(model, "classification", subset, "ella")
    for structure in ("nystrom", name):
        for option, match in {
            "n_eigenvalue": f"^{cls} has no argument 'n_eigenvalue'",
            "complemnt": r"mean 'complement'\?",
            "chunk_size": f"^{cls}.*ComputeOptions\\(chunk_size=",
            "zzz": r"It has .*'subsample_size'",
        }.items():
            with pytest.raises(TypeError, match=match):
                Laplace(model, "classification", subset, structure, **{option: 5})
        la = Laplace(model, "classification", subset, structure)
        with pytest.raises(AttributeError, match=f"This {cls} is not fitted"):
            la(torch.randn(2, 3))
        assert type(la).__name__ == cls
        assert isinstance(la, (ELLALaplace, ELLALLLaplace))
