"""Bad input: each a clear error that says what was expected, what came, what to do."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace_ella import ComputeOptions, EarlyStopping, ELLALaplace, ELLALLLaplace
from laplace_ella.errors import (
    BorderWarning,
    NotFittedError,
    RankWarning,
    SoftmaxWarning,
)
from tests.cases import make, mlp, priors
from tests.fitting import build, fit
from tests.test_state import described

flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
NAN, INF = math.nan, math.inf


def loader(x, y, batch_size=4):
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


ARGUMENTS = [
    *(
        ({name: value}, rf"{name}.*positive.*{value}")
        for name in ("subsample_size", "n_eigenvalues")
        for value in (0, -3, 2.5, True)
    ),
    ({"n_eigenvalues": "8"}, "n_eigenvalues.*exact.*8"),
    ({"seed": -1}, "seed.*-1"),
    ({"seed": 1.5}, "seed.*1.5"),
    ({"stochastic": 0.5}, "stochastic.*0.5"),
    ({"temperature": 0.0}, "temperature must be positive.*0.0"),
    ({"temperature": torch.ones(2)}, "temperature must be one number"),
    ({"softmax_temperature": "warm"}, "softmax_temperature.*one number.*warm"),
    ({"softmax_temperature": True}, "softmax_temperature.*one number.*True"),
    ({"top_outputs": 0}, "top_outputs.*positive integer or None.*0"),
    ({"complement": "sideways"}, "complement.*drop.*prior.*sideways"),
    ({"complement": -2.0}, "complement must be positive.*-2"),
    ({"complement": "all"}, "complement, if it is no positive number, .*'all'"),
    ({"evidence": "all"}, "evidence.*whole.*basis.*all"),
    ({"output_layout": "last"}, "output_layout.*channels_last.*last"),
    ({"compute": {"chunk_size": 3}}, r"compute must be a ComputeOptions\(.*dict"),
]


@flavours
@pytest.mark.parametrize(("options", "match"), ARGUMENTS, ids=str)
def test_arguments_of_the_constructor(cls, options, match):
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        cls(mlp(3, 4, 2), "classification", **options)


def test_likelihood():
    for cls in (ELLALaplace, ELLALLLaplace):
        with pytest.raises(ValueError, match=r"(?i)likelihood.*poisson"):
            cls(mlp(3, 4, 2), "poisson")
    with pytest.raises(ValueError, match=r"multi_label=True.*regression"):
        ELLALaplace(mlp(3, 4, 2), "regression", multi_label=True)
    with pytest.raises(ValueError, match=r"is for classification.*sigma_noise"):
        ELLALaplace(mlp(3, 4, 2), "regression", softmax_temperature=2.0)
    with pytest.raises(ValueError, match=r"is for regression.*'classification'"):
        ELLALaplace(mlp(3, 4, 2), "classification", sigma_noise=2.0)


BAD_NUMBERS = [0.0, -2.0, NAN, INF, torch.tensor([0.0]), torch.tensor(-2.0)]


@flavours
@pytest.mark.parametrize("value", BAD_NUMBERS, ids=str)
@pytest.mark.parametrize(
    "name", ["prior_precision", "sigma_noise", "temperature", "softmax_temperature"]
)
def test_numbers_that_are_not_positive(cls, name, value):
    """At construction, or at the latest by fit; and later, where nothing changes."""
    case = make("regression_3")
    with pytest.raises(ValueError, match=rf"{name} must be positive.*got"):
        fit(case, cls, **{name: value})
    la = fit(case, cls)
    before = described(la)
    with pytest.raises(ValueError, match=rf"{name} must be positive.*got"):
        setattr(la, name, value)
    assert described(la) == before


def test_one_bad_entry_of_a_prior():
    case = make("regression_3")
    la, prior = fit(case), priors(case)["diag"]
    prior[3] = -0.5
    for use in (
        lambda p: setattr(la, "prior_precision", p),
        la.log_marginal_likelihood,
    ):
        with pytest.raises(ValueError, match=r"positive.*-0\.5"):
            use(prior)
    for value in (NAN, torch.full((case.n_params,), NAN), INF):
        with pytest.raises(ValueError, match=r"prior_mean must be finite, got"):
            build(case, prior_mean=value)
        with pytest.raises(ValueError, match=r"prior_mean must be finite, got"):
            la.prior_mean = value
    for value in (torch.ones(5), torch.ones(5, 1), "72"):
        with pytest.raises((ValueError, TypeError), match=r"(?i)prior.mean"):
            build(case, prior_mean=value)
    with pytest.raises(ValueError, match=r"a number or a vector, got shape \(2, 2\)"):
        la.sigma_noise = torch.ones(2, 2)


CALLS = {
    "noise steps": (lambda la: la.optimize_sigma_noise(n_steps=0), "n_steps.*0"),
    "noise lr": (lambda la: la.optimize_sigma_noise(lr=0), "lr.*0"),
    "every": (lambda la: EarlyStopping(every=10.5), "every.*10.5"),
    "link": (lambda la: EarlyStopping(link_approx="best"), "link_approx.*best"),
    "truncate": (lambda la: la.truncate(0), "rank.*0"),
    "truncate more": (lambda la: la.truncate(99), r"rank=99 exceeds.*n_eigenvalues=99"),
    "jacobians": (lambda la: la.functional_variance(torch.ones(2, 3, 5)), "shape"),
    "mode": (lambda la: ComputeOptions(feature_mode="a"), "feature_mode.*auto.*'a'"),
    "rows": (lambda la: ComputeOptions(row_mode="sideways"), "row_mode.*sideways"),
    "dtype": (lambda la: ComputeOptions(basis_dtype=torch.int64), "basis_dtype.*int64"),
    "chunk": (lambda la: ComputeOptions(chunk_size=0), "chunk_size.*0"),
    "budget": (lambda la: ComputeOptions(memory_budget="many"), "memory_budget.*many"),
    "no budget": (lambda la: ComputeOptions(memory_budget=-1), "memory_budget.*-1"),
    "groups": (lambda la: la.joint_predictive(torch.ones(2, 3)), r"\(b, q, .*\(2, 3\)"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_arguments_of_methods(kind):
    la = fit(make("regression_3"))
    before = described(la)
    call, match = CALLS[kind]
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        call(la)
    assert described(la) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pred_type": "linear"}, r"pred_type.*glm.*nn.*gp.*linear"),
        ({"link_approx": "exact"}, r"link_approx.*mc.*probit.*exact"),
        ({"pred_type": "nn", "link_approx": "probit"}, r"nn.*mc.*probit"),
        ({"link_approx": "mc", "n_samples": 0}, r"n_samples.*positive integer.*0"),
        ({"link_approx": "mc", "generator": 3}, r"torch\.Generator.*int"),
    ],
)
def test_arguments_of_predictions(options, match):
    case = make("classification_mlp")
    la = fit(case)
    for ask in (la, la.predict):
        with pytest.raises(ValueError, match=f"(?s){match}"):
            ask(case.x_test, **options)


def test_nothing_to_be_uncertain_about():
    frozen = mlp(3, 4, 2).requires_grad_(False)
    for model in (frozen, nn.Sequential(nn.Tanh())):
        with pytest.raises(ValueError, match=r"no trainable parameter.*requires_grad"):
            ELLALaplace(model, "classification")
    with pytest.raises(ValueError, match=r"'1'.*must name.*Linear.*Tanh.*\['0', '2'\]"):
        ELLALLLaplace(mlp(3, 4, 2), "classification", last_layer_name="1")


class Reshaped(nn.Module):
    """A linear layer whose output has another form than (B, C)."""

    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(3, 2), form

    def forward(self, x):
        return self.form(self.layer(x))


FORMS = {
    "(B,)": (lambda f: f[:, 0], r"\(B, C\).*\(\d,\)"),
    "(B, C, 1)": (lambda f: f[..., None], r"\(B, C\).*\(\d, 2, 1\).*output_layout"),
    "scalar": (lambda f: f.sum(), r"\(B, C\).*\(\)"),
    "tuple": (lambda f: (f, f), r"\(B, C\).*tuple.*Wrap"),
    "dict": (lambda f: {"logits": f}, r"\(B, C\).*dict.*Wrap"),
    "one row": (lambda f: f.sum(0, keepdim=True), r"one output per example.*\(1, 2\)"),
    "constant": (lambda f: 0 * f + 1, r"(?i)gradients.*zero"),
}


@pytest.mark.parametrize("form", FORMS)
def test_output_form(form):
    reshape, match = FORMS[form]
    la = ELLALaplace(Reshaped(reshape), "regression")
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        la.fit(loader(torch.randn(6, 3), torch.randn(6, 2)))
    assert la.fitted is None


def test_probabilities_for_logits(recwarn):
    """A softmax at the end of a classifier is told of, at the line of the call."""
    for end in (nn.LogSoftmax(-1), nn.Softmax(-1)):
        la = ELLALaplace(nn.Sequential(mlp(3, 4, 3), end), "classification")
        la.fit(loader(torch.randn(6, 3), torch.randint(3, (6,))))
        told = [w for w in recwarn if w.category is SoftmaxWarning]
        assert [w.filename for w in told] == [__file__] * isinstance(end, nn.Softmax)


class Empty(Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


DATA = TensorDataset(torch.randn(3, 3), torch.zeros(3, dtype=torch.long))
X, Y = torch.randn(6, 3), torch.zeros(6, dtype=torch.long)

LOADERS = {
    "no example": (DataLoader(Empty(), batch_size=2), "no example"),
    "drop_last": (DataLoader(DATA, batch_size=5, drop_last=True), "no example"),
    "sampler": (DataLoader(DATA, batch_size=2, sampler=[]), "no example"),
    "tensor": (X, "DataLoader.*Tensor"),
    "number": (3, "DataLoader.*int"),
    "iterator": (iter(DataLoader(DATA)), "only once"),
    "no targets": (DataLoader(TensorDataset(X), 2), r"\(inputs, targets\).*length 1"),
    "no key": ([{"input_ids": X, "y": Y}], "labels.*dict_key_y"),
    "shape": (loader(X, torch.zeros(6, 2, 2).long()), r"\(4, 2, 2\)"),
    "dtype": (loader(X, torch.rand(6)), "(?i)float|integer|int64"),
    "high": (loader(X, Y + 5), r"0\.\.1.*5\.\.5"),
    "negative": (loader(X, Y - 1), "-1"),
    "soft": (loader(X, torch.full((6, 2), 0.2)), r"sum to one.*0\.6"),
    "soft nan": (loader(X, torch.full((6, 2), NAN)), "NaN"),
}


@flavours
@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_and_classes(cls, kind):
    """Told before anything is differentiated; the object stays unfitted."""
    model = mlp(3, 4, 2)
    model.register_forward_hook(refuse_derivatives)
    name = {"last_layer_name": "2"} if cls is ELLALLLaplace else {}
    la = cls(model, "classification", n_eigenvalues=2, **name)
    data, match = LOADERS[kind]
    with pytest.raises((ValueError, TypeError, KeyError), match=f"(?s){match}"):
        la.fit(data)
    with pytest.raises(NotFittedError):
        la(X)


def refuse_derivatives(module, inputs, output):
    assert torch.autograd.forward_ad.unpack_dual(output).tangent is None
    if output.requires_grad:
        output.register_hook(lambda gradient: pytest.fail("differentiated"))


def test_regression_targets():
    la = ELLALaplace(mlp(3, 4, 2), "regression")
    for y, match in (
        (torch.randn(6), r"\(4, 2\).*\(4,\)"),
        (torch.randn(6, 3), r"\(4, 2\).*\(4, 3\)"),
        (torch.full((6, 2), NAN), "NaN"),
        (torch.full((6, 2), INF), "infinite"),
    ):
        with pytest.raises(ValueError, match=f"(?s){match}"):
            la.fit(loader(X, y))
    assert la.fitted is None


@flavours
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("m", [10**6, 1])
def test_non_finite_outputs(cls, value, m):
    """A NaN or infinity in the third batch: the message says which batch."""
    x = torch.randn(12, 3)
    x[9] = value
    la = cls(mlp(3, 4, 2), "classification", subsample_size=m, n_eigenvalues=2)
    with pytest.raises(ValueError, match=r"(?i)(nan|infinite|finite).*batch [23]\b"):
        la.fit(loader(x, torch.randint(2, (12,))))


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
def test_non_finite_gradients(mode):
    """Finite outputs with a gradient that is not: the message says which batch."""
    x = torch.randn(12, 3)
    x[9] = 0
    model = Reshaped(lambda f: f.square().sum(-1, keepdim=True).sqrt() * torch.ones(2))
    nn.init.zeros_(model.layer.bias)
    compute = ComputeOptions(feature_mode=mode)
    la = ELLALaplace(model, "classification", n_eigenvalues=2, compute=compute)
    match = r"(?is)(nan|infinite|finite).*(gradient|derivative).*batch [23]\b"
    with pytest.raises(ValueError, match=match):
        la.fit(loader(x, torch.randint(2, (12,))))


def test_ranks_below_the_request():
    case = make("regression_1")
    la = build(case, subsample_size=4, n_eigenvalues=9)
    with pytest.warns(RankWarning, match=r"n_eigenvalues=9.*\b4\b"):
        la.fit(case.loader())
    assert la.H.shape == (4, 4)
    case = make("regression_3")  # one example, repeated: a direction for each output
    case.x, case.y = case.x[:1].expand(6, -1).contiguous(), case.y[:6]
    with pytest.warns(RankWarning, match=r"n_eigenvalues=10.*\b3\b"):
        build(case, n_eigenvalues=10).fit(case.loader())


UNFITTED = [
    lambda la, x: la(x),
    lambda la, x: la(x, pred_type="nn"),
    lambda la, x: la.predict([x]),
    lambda la, x: la.predictive_moments(x),
    lambda la, x: la.features(x),
    lambda la, x: la.sample(2),
    lambda la, x: la.functional_samples(x),
    lambda la, x: la.predictive_samples(x),
    lambda la, x: la.functional_variance(torch.ones(2, 2, 26)),
    lambda la, x: la.functional_covariance(torch.ones(2, 2, 26)),
    lambda la, x: la.posterior_precision,
    lambda la, x: la.log_det_posterior_precision,
    lambda la, x: la.log_marginal_likelihood(),
    lambda la, x: la.log_prob(torch.zeros(26)),
    lambda la, x: la.optimize_prior_precision(),
    lambda la, x: la.optimize_calibration([x]),
    lambda la, x: la.cache_features([x]),
    lambda la, x: la.state_dict(),
    lambda la, x: la.rank,
]


@flavours
def test_before_fit(cls):
    la = cls(mlp(3, 4, 2), "classification")
    for call in UNFITTED:
        with pytest.raises(NotFittedError, match=rf"{cls.__name__} .*fit\(.*first"):
            call(la, torch.randn(2, 3))
    assert issubclass(NotFittedError, AttributeError)
    assert issubclass(NotFittedError, RuntimeError)
    assert issubclass(BorderWarning, UserWarning)
