"""Bad input: each a clear error that says what was expected, what came, what to do."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import laplace_ella
from laplace_ella import ELLALaplace, ELLALLLaplace, NotFittedError, RankWarning
from tests.cases import make, mlp, priors
from tests.fitting import build, fit

flavours = pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])


def loader(x, y, batch_size=4):
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


# --- arguments ---------------------------------------------------------------------


@flavours
def test_likelihood(cls):
    """The wrong likelihood is named."""
    with pytest.raises(ValueError, match=r"(?i)likelihood.*poisson"):
        cls(mlp(3, 4, 2), "poisson")


@flavours
@pytest.mark.parametrize("name", ["subsample_size", "n_eigenvalues"])
@pytest.mark.parametrize("value", [0, -3, 2.5, "8", True])
def test_sizes(cls, name, value):
    """M and K must be positive integers; the message names argument and value."""
    with pytest.raises((ValueError, TypeError), match=rf"{name}.*positive.*{value}"):
        cls(mlp(3, 4, 2), "classification", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("feature_mode", "sideways"), ("chunk_size", 0), ("chunk_size", -2)],
)
def test_other_options(name, value):
    """Other options are checked when the object is built."""
    with pytest.raises(ValueError, match=rf"{name}.*{value}"):
        ELLALaplace(mlp(3, 4, 2), "classification", **{name: value})


def test_feature_mode_lists_the_choices():
    """The message for an unknown mode lists the known ones."""
    with pytest.raises(ValueError) as error:
        ELLALaplace(mlp(3, 4, 2), "classification", feature_mode="sideways")
    for mode in ("auto", "forward", "reverse", "double_vjp"):
        assert mode in str(error.value)


BAD_PRIORS = {
    "zero": 0.0,
    "negative": -2.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "tensor_zero": torch.tensor([0.0]),
    "tensor_negative": torch.tensor(-2.0),
}


@flavours
@pytest.mark.parametrize("prior", BAD_PRIORS.values(), ids=BAD_PRIORS)
def test_prior_precision(cls, prior):
    """A prior precision that is not positive is refused with its value."""
    case = make("regression_3")
    with pytest.raises(ValueError, match=r"prior_precision must be positive.*got"):
        fit(case, cls, prior_precision=prior)
    la = fit(case, cls)
    with pytest.raises(ValueError, match=r"prior_precision must be positive.*got"):
        la.prior_precision = prior
    assert la.prior_precision.item() == 1.0


def test_prior_precision_one_bad_entry():
    """One bad entry of a diagonal prior is enough, in the evidence too."""
    case = make("regression_3")
    la = fit(case)
    prior = priors(case)["diag"]
    prior[3] = -0.5
    with pytest.raises(ValueError, match=r"positive.*-0\.5"):
        la.prior_precision = prior
    with pytest.raises(ValueError, match=r"positive.*-0\.5"):
        la.log_marginal_likelihood(prior)


@pytest.mark.parametrize("name", ["sigma_noise", "temperature"])
@pytest.mark.parametrize("value", [0.0, -1.5])
def test_noise_and_temperature(name, value):
    """Noise and temperature must be positive, at once and later."""
    case = make("regression_3")
    with pytest.raises(ValueError, match=rf"{name} must be positive.*{value}"):
        build(case, **{name: value})
    la = fit(case)
    with pytest.raises(ValueError, match=rf"{name} must be positive.*{value}"):
        setattr(la, name, value)


# --- models ------------------------------------------------------------------------


def test_no_trainable_parameter():
    """A model with nothing to be uncertain about."""
    model = mlp(3, 4, 2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable parameter.*requires_grad"):
        ELLALaplace(model, "classification")


def test_no_parameter_at_all():
    """A model without parameters."""
    with pytest.raises(ValueError, match="no trainable parameter"):
        ELLALaplace(nn.Sequential(nn.Tanh()), "classification")


class Reshaped(nn.Module):
    """A linear layer whose output has another form than (B, C)."""

    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(3, 2), form

    def forward(self, x):
        return self.form(self.layer(x))


FORMS = {
    "(B,)": (lambda f: f[:, 0], r"\(B, C\).*\(\d,\)"),
    "(B, C, 1)": (lambda f: f[..., None], r"\(B, C\).*\(\d, 2, 1\)"),
    "scalar": (lambda f: f.sum(), r"\(B, C\).*\(\)"),
    "tuple": (lambda f: (f, f), r"\(B, C\).*tuple"),
    "dict": (lambda f: {"logits": f}, r"\(B, C\).*dict"),
}


@pytest.mark.parametrize("form", FORMS)
def test_output_form(form):
    """An output that is not (B, C): the message has what came."""
    reshape, match = FORMS[form]
    la = ELLALaplace(Reshaped(reshape), "regression")
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        la.fit(loader(torch.randn(6, 3), torch.randn(6, 2)))


def test_output_of_another_batch_size():
    """Outputs that are not one row per example."""
    la = ELLALaplace(Reshaped(lambda f: f.sum(0, keepdim=True)), "regression")
    with pytest.raises(ValueError):
        la.fit(loader(torch.randn(6, 3), torch.randn(6, 2)))


# --- data --------------------------------------------------------------------------


class Empty(Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


def _empty_loaders():
    data = TensorDataset(torch.randn(3, 3), torch.zeros(3, dtype=torch.long))
    return {
        "dataset": DataLoader(Empty(), batch_size=2),
        "drop_last": DataLoader(data, batch_size=5, drop_last=True),
        "sampler": DataLoader(data, batch_size=2, sampler=[]),
    }


@flavours
@pytest.mark.parametrize("kind", _empty_loaders())
def test_empty_loader(cls, kind):
    """A loader without data says so; the object stays unfitted."""
    la = cls(mlp(3, 4, 2), "classification")
    with pytest.raises(ValueError, match=r"(?i)no (example|batch|data)|empty"):
        la.fit(_empty_loaders()[kind])
    with pytest.raises(NotFittedError):
        la(torch.randn(2, 3))


TARGETS = {
    "regression_1d": ("regression", torch.randn(6), r"\(4, 2\).*\(4,\)"),
    "regression_wide": ("regression", torch.randn(6, 3), r"\(4, 2\).*\(4, 3\)"),
    "regression_narrow": ("regression", torch.randn(6, 1), r"\(4, 2\).*\(4, 1\)"),
    "class_2d": ("classification", torch.zeros(6, 2, 2).long(), r"\(4, 2, 2\)"),
    "class_float": ("classification", torch.rand(6), "(?i)float|integer|int64"),
    "class_range": ("classification", torch.full((6,), 5), r"5"),
    "class_negative": ("classification", torch.full((6,), -1), r"-1"),
}


@flavours
@pytest.mark.parametrize("kind", TARGETS)
def test_targets(cls, kind):
    """Targets that do not fit the outputs: expected and given shape or value."""
    likelihood, y, match = TARGETS[kind]
    la = cls(mlp(3, 4, 2), likelihood, n_eigenvalues=2)
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        la.fit(loader(torch.randn(6, 3), y))


def test_batch_form():
    """Batches that are neither (inputs, targets) nor a mapping."""
    data = TensorDataset(torch.randn(6, 3))
    la = ELLALaplace(mlp(3, 4, 2), "classification")
    with pytest.raises(ValueError, match=r"(?s)\(inputs, targets\).*length 1"):
        la.fit(DataLoader(data, batch_size=2))


def test_missing_key():
    """A mapping without the target key: the message has the keys and the option."""
    data = [{"input_ids": torch.randn(3), "y": torch.tensor(0)} for _ in range(4)]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2)

        def forward(self, batch):
            return self.net(batch["input_ids"])

    la = ELLALaplace(Model(), "classification", n_eigenvalues=2)
    with pytest.raises((KeyError, ValueError), match=r"(?s)labels.*dict_key_y"):
        la.fit(DataLoader(data, batch_size=2))


def test_not_a_loader():
    """A tensor in place of a loader."""
    la = ELLALaplace(mlp(3, 4, 2), "classification")
    with pytest.raises((TypeError, ValueError), match=r"(?i)DataLoader"):
        la.fit(torch.randn(4, 3))


# --- numbers that are none ---------------------------------------------------------


@flavours
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("m", [10**6, 1])
def test_non_finite_outputs(cls, value, m):
    """A NaN or infinity in the third batch: the message says which batch."""
    x = torch.randn(12, 3)
    x[9] = value
    la = cls(mlp(3, 4, 2), "classification", subsample_size=m, n_eigenvalues=2)
    with pytest.raises(ValueError, match=r"(?i)(nan|infinite|finite).*batch [23]\b"):
        la.fit(loader(x, torch.randint(2, (12,))))


class Root(nn.Module):
    """Finite outputs whose gradient is infinite where the input is zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return self.layer(x).square().sum(-1, keepdim=True).sqrt() * torch.ones(2)


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
def test_non_finite_gradients(mode):
    """Finite outputs with a gradient that is not: the message says which batch."""
    x = torch.randn(12, 3)
    x[9] = 0
    la = ELLALaplace(Root(), "classification", n_eigenvalues=2, feature_mode=mode)
    with pytest.raises(
        ValueError,
        match=r"(?is)(nan|infinite|finite).*(gradient|derivative).*batch [23]\b",
    ):
        la.fit(loader(x, torch.randint(2, (12,))))


def test_zero_gradients():
    """Outputs that do not depend on the parameters."""

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return 0 * self.layer(x) + 1

    la = ELLALaplace(Constant(), "classification")
    with pytest.raises(ValueError, match=r"(?i)gradients.*zero"):
        la.fit(loader(torch.randn(6, 3), torch.randint(2, (6,))))


# --- order of calls ----------------------------------------------------------------

UNFITTED = {
    "call": lambda la, x: la(x),
    "nn": lambda la, x: la(x, pred_type="nn", link_approx="mc"),
    "features": lambda la, x: la.features(x),
    "sample": lambda la, x: la.sample(2),
    "functional_samples": lambda la, x: la.functional_samples(x),
    "predictive_samples": lambda la, x: la.predictive_samples(x),
    "functional_variance": lambda la, x: la.functional_variance(torch.ones(2, 2, 26)),
    "functional_covariance": lambda la, x: la.functional_covariance(
        torch.ones(2, 2, 26)
    ),
    "posterior_precision": lambda la, x: la.posterior_precision,
    "posterior_covariance": lambda la, x: la.posterior_covariance,
    "log_det": lambda la, x: la.log_det_posterior_precision,
    "log_marginal_likelihood": lambda la, x: la.log_marginal_likelihood(),
    "log_prob": lambda la, x: la.log_prob(torch.zeros(26)),
    "optimize_prior_precision": lambda la, x: la.optimize_prior_precision(),
    "state_dict": lambda la, x: la.state_dict(),
    "rank": lambda la, x: la.rank,
}


@flavours
@pytest.mark.parametrize("call", UNFITTED)
def test_before_fit(cls, call):
    """Everything that needs a fit says so, in an error of both standard types."""
    la = cls(mlp(3, 4, 2), "classification")
    with pytest.raises(NotFittedError, match=r"fit\(.*first"):
        UNFITTED[call](la, torch.randn(2, 3))


def test_error_types():
    """`NotFittedError` is an AttributeError, as in Laplace, and a RuntimeError."""
    assert issubclass(NotFittedError, AttributeError)
    assert issubclass(NotFittedError, RuntimeError)
    assert issubclass(RankWarning, UserWarning)
    assert {"NotFittedError", "RankWarning"} <= set(laplace_ella.__all__)


def test_rank_warning_has_both_numbers():
    """A rank below K truncates with a warning that gives both numbers."""
    case = make("regression_1")
    la = build(case, subsample_size=4, n_eigenvalues=9)
    with pytest.warns(RankWarning, match=r"n_eigenvalues=9.*\b4\b"):
        la.fit(case.loader())
    assert la.rank == 4
    assert la.H.shape == (4, 4)
    assert la(case.x_test)[1].shape == (7, 1, 1)


def test_duplicated_data_truncates():
    """Identical examples give one direction an output, not noise."""
    case = make("regression_3")
    case.x = case.x[:1].expand(6, -1).contiguous()
    case.y = case.y[:6]
    la = build(case, n_eigenvalues=10)
    with pytest.warns(RankWarning, match=r"n_eigenvalues=10.*\b3\b"):
        la.fit(case.loader())
    assert la.rank == 3


# --- predictions -------------------------------------------------------------------


def test_generator_messages():
    """A seed in place of a generator."""
    case = make("classification_mlp")
    la = fit(case)
    with pytest.raises((ValueError, TypeError), match=r"torch\.Generator.*int"):
        la(case.x_test, link_approx="mc", generator=3)


@pytest.mark.parametrize("n_samples", [0, -1])
def test_number_of_samples(n_samples):
    """Numbers of samples must be positive."""
    case = make("classification_mlp")
    la = fit(case)
    with pytest.raises(ValueError, match=rf"n_samples.*{n_samples}"):
        la(case.x_test, link_approx="mc", n_samples=n_samples)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pred_type": "linear"}, r"(?s)pred_type.*glm.*nn.*gp.*linear"),
        ({"link_approx": "exact"}, r"(?s)link_approx.*mc.*probit.*exact"),
        ({"pred_type": "nn"}, r"(?s)nn.*mc.*probit"),
    ],
)
def test_prediction_options(options, match):
    """Unknown options are answered with the known ones."""
    case = make("classification_mlp")
    with pytest.raises(ValueError, match=match):
        fit(case)(case.x_test, **options)
