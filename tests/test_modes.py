"""Every way of differentiating gives the same numbers, and the way is chosen once."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import (
    CompileWarning,
    ELLALaplace,
    ELLALLLaplace,
    FeatureMode,
    RowMode,
)
from laplace_ella.derivatives import feature_passes, jacobian_passes, row_passes
from laplace_ella.derivatives.selection import Selection
from tests import dense
from tests.cases import ARCHITECTURES, CASES, make, mlp
from tests.fitting import assert_close, build, fit

FEATURE_MODES = ("forward", "reverse", "double_vjp")
ROW_MODES = ("vmap", "loop")
UNSUPPORTED = {("weight_norm", "forward"), ("lstm", "vmap"), ("gru", "vmap")}
"""What torch has no derivative or batching rule for, in float64."""


def supported(names, modes):
    return [(n, m) for n in names for m in modes if (n, m) not in UNSUPPORTED]


def single(name):
    """A case in float32, as networks are."""
    case = make(name)
    case.model.float()
    case.x, case.x_test = case.x.float(), case.x_test.float()
    if case.y.is_floating_point():
        case.y = case.y.float()
    return case


# --- agreement ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode"), supported([*CASES, *ARCHITECTURES], FEATURE_MODES)
)
def test_features(name, mode):
    """f and φ = J V are the dense ones to float64 accuracy, and so is H."""
    case = make(name)
    la = fit(case, feature_mode=mode, row_mode="loop")
    assert la.modes.features is FeatureMode(mode)
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    f_mu, phi = la.features(case.x_test)
    assert_close(f_mu, f)
    assert_close(phi, Js @ la.basis.vectors)
    assert_close(la.H, dense.Reference(case, la.basis.vectors).H)


@pytest.mark.parametrize(("name", "mode"), supported(CASES, ROW_MODES))
def test_rows(name, mode):
    """Eigenvalues, span and trace are those of the dense gradients."""
    case = make(name)
    la = fit(case, row_mode=mode, feature_mode="reverse", n_eigenvalues=5)
    assert la.modes.rows is RowMode(mode)
    rows = dense.jacobians(case.model, case.x, case.params)[1].flatten(0, 1)
    V, eigenvalues = dense.nystrom(rows, 5)
    assert_close(la.basis.eigenvalues, eigenvalues[:5])
    assert_close(la.basis.vectors @ la.basis.vectors.T, V @ V.T, rtol=1e-6, atol=1e-8)
    assert la.basis.trace == pytest.approx(eigenvalues.sum().item(), rel=1e-12)


@pytest.mark.parametrize("mode", ROW_MODES)
@pytest.mark.parametrize("name", CASES)
def test_single_rows(name, mode):
    """Any combination of outputs of any example, in any order, repeated or not."""
    case = make(name)
    la = fit(case, row_mode=mode)
    Js = dense.jacobians(case.model, case.x, case.params)[1]
    examples = torch.tensor([3, 0, 0, 5, 3])
    g = torch.Generator().manual_seed(1)
    cotangents = torch.randn(5, Js.shape[1], generator=g).double()
    rows = la.linearizer.rows(case.x, examples, cotangents)
    assert_close(rows, torch.einsum("mc,mcp->mp", cotangents, Js[examples]))


@pytest.mark.parametrize("mode", ROW_MODES)
@pytest.mark.parametrize("name", ["classification_mlp", "classification_cnn"])
def test_jacobian(name, mode):
    """J(x) by batched or by single backward passes."""
    case = make(name)
    la = fit(case, row_mode=mode)
    f, Js, positions = la.linearizer.jacobian(case.x_test)
    assert positions.output_shape == tuple(f.shape[1:])
    expected = dense.jacobians(case.model, case.x_test, case.params)
    assert_close(f, expected[0])
    assert_close(Js, expected[1])


@pytest.mark.parametrize("cls", [ELLALaplace, ELLALLLaplace])
@pytest.mark.parametrize("mode", FEATURE_MODES)
def test_predictions_do_not_depend_on_the_mode(cls, mode):
    """The whole way to probabilities and evidence is the same."""
    case = make("classification_cnn")
    # The last layer has every eigenvalue once for each of four classes.
    settings = {"cls": cls, "n_eigenvalues": 8}
    la = fit(case, **settings, feature_mode=mode, row_mode="loop")
    expected = fit(case, **settings, feature_mode="reverse", row_mode="vmap")
    assert_close(la(case.x_test), expected(case.x_test))
    assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 100])
@pytest.mark.parametrize("mode", FEATURE_MODES)
def test_chunks(mode, chunk_size):
    """chunk_size bounds how many examples run at once, and changes no value."""
    case = make("classification_mlp")
    sizes = []
    la = fit(case, feature_mode=mode, row_mode="loop", chunk_size=chunk_size)
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    handle = case.model.register_forward_pre_hook(
        lambda module, args: sizes.append(len(args[0]))
    )
    f_mu, phi = la.features(case.x_test)
    handle.remove()
    assert_close(f_mu, f)
    assert_close(phi, Js @ la.basis.vectors)
    assert_close(la.H, dense.Reference(case, la.basis.vectors).H)
    assert max(sizes) <= chunk_size


# --- the choice --------------------------------------------------------------------


def count_calls(model):
    """A list that gets one entry for every call of the model."""
    calls = []
    forward = model.forward

    def counted(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    model.forward = counted
    return calls


@pytest.mark.parametrize("name", ["classification_mlp", *ARCHITECTURES])
def test_auto_decides_once(name):
    """Later calls of the model are those of the way that was chosen, no trials."""
    case = make(name)
    la = fit(case)
    chosen = la.modes
    assert FeatureMode.AUTO not in (chosen.features, chosen.rows)
    asked = fit(case, feature_mode=chosen.features.value, row_mode=chosen.rows.value)
    calls = count_calls(case.model)
    numbers = []
    for posterior in (la, la, asked):
        calls.clear()
        posterior.features(case.x_test)
        numbers.append(len(calls))
    assert numbers[0] == numbers[1] == numbers[2] > 0
    assert la.modes == chosen


def test_auto_decides_on_the_first_batch_only():
    """A fit of twice the batches makes as many trials as a fit of the first ones."""
    case = make("classification_mlp")
    case.x, case.y = case.x.repeat(4, 1), case.y.repeat(4)
    la = build(case, subsample_size=5, chunk_size=12)
    calls = count_calls(case.model)
    la.fit(case.loader(12))
    first = len(calls)
    calls.clear()
    la.fit(case.loader(12))
    second = len(calls)
    calls.clear()
    la.fit(case.loader(12))
    assert len(calls) == second <= first


def test_a_later_fit_keeps_the_way(monkeypatch):
    """Neither a refit nor a prediction tries other ways again."""
    case = make("lstm")
    la = fit(case)
    chosen = la.modes.features
    attempts = []
    for passes in (feature_passes, jacobian_passes, row_passes):
        monkeypatch.setattr(passes, "attempt", lambda *a: attempts.append(a))
    la.fit(case.loader())
    la(case.x_test)
    la.features(case.x_test)
    assert not attempts
    assert la.modes.features is chosen


@pytest.mark.parametrize("name", ["lstm", "gru", "weight_norm", "attention"])
def test_auto_falls_back(name):
    """Where forward mode or batching fails another way is found, silently."""
    case = make(name)
    la = build(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        la.fit(case.loader())
    if (name, "forward") in UNSUPPORTED:
        assert la.modes.features is not FeatureMode.FORWARD
    if (name, "vmap") in UNSUPPORTED:
        assert la.modes.rows is RowMode.LOOP
    Js = dense.jacobians(case.model, case.x_test, case.params)[1]
    assert_close(la.features(case.x_test)[1], Js @ la.basis.vectors)


def test_auto_falls_back_from_a_fused_operator():
    """An LSTM in float32 has no forward mode; the default finds another way."""
    case = single("lstm")
    la = fit(case)
    assert la.modes.features is not FeatureMode.FORWARD
    Js = dense.jacobians(case.model, case.x_test, case.params)[1]
    expected = Js @ la.basis.vectors
    torch.testing.assert_close(
        la.features(case.x_test)[1], expected, rtol=1e-4, atol=1e-5
    )


def test_auto_prefers_the_cheaper_direction():
    """Many outputs and few directions go forward, the reverse goes backward."""
    torch.manual_seed(0)
    convolution = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 1),
    )
    # Costs that differ more than threefold, so that no timing decides.
    problems = {
        FeatureMode.FORWARD: (mlp(6, 16, 400), torch.randn(30, 6), 2),
        FeatureMode.REVERSE: (convolution, torch.randn(30, 1, 16, 16), 25),
    }
    for mode, (model, x, k) in problems.items():
        y = torch.zeros(30, model[-1].out_features)
        la = ELLALaplace(model, "regression", n_eigenvalues=k, subsample_size=100)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.fit(DataLoader(TensorDataset(x, y), 15))
        assert la.modes.features is mode


@pytest.mark.parametrize("name", ["lstm", "weight_norm"])
def test_unsupported_feature_mode(name):
    """The error names the operator and what else to do, and nothing is fitted."""
    case = single(name)  # in float32 an LSTM runs as one fused operator
    la = build(case, feature_mode="forward", row_mode="loop")
    operator = {"lstm": "rnn", "weight_norm": "weight_norm"}[name]
    with pytest.raises(RuntimeError, match=rf"(?s)forward.*{operator}") as error:
        la.fit(case.loader())
    message = str(error.value)
    for option in ("feature_mode", "double_vjp", "reverse", "last_layer", "freez"):
        assert option in message
    assert la.basis is None
    assert error.value.__cause__ is not None


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_unsupported_row_mode(name):
    """So does that of rows, which names row_mode among the options."""
    case = make(name)
    la = build(case, row_mode="vmap")
    with pytest.raises(RuntimeError, match=r"(?s)vmap.*row_mode"):
        la.fit(case.loader())


@pytest.mark.parametrize("option", ["feature_mode", "row_mode"])
def test_unknown_mode(option):
    """An unknown mode is refused with its value."""
    case = make("classification_mlp")
    with pytest.raises(ValueError, match="sideways"):
        build(case, **{option: "sideways"})


# --- compiled, low precision, placement --------------------------------------------


@pytest.mark.parametrize("top", [None, 2])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_compile(mode, top):
    """A compiled pass gives the same features and curvature."""
    case = make("classification_mlp")
    la = fit(case, feature_mode=mode, compile={"backend": "aot_eager"})
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    expected = Js @ la.basis.vectors
    f_mu, phi = la.features(case.x_test)
    assert_close(f_mu, f)
    assert_close(phi, expected)
    assert_close(la.H, dense.Reference(case, la.basis.vectors).H)
    some = la.fitter.linearizer.features(case.x_test, la.basis.directions, top=top)
    if top is not None:
        assert some.outputs is not None
        expected = expected.take_along_dim(some.outputs.unsqueeze(-1), 1)
    assert_close(some.phi, expected)


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
def test_compile_and_folding(mode, monkeypatch):
    """What is not compiled has its normalisations folded, whatever `compile` says: with
    "auto" reverse mode is not compiled."""
    monkeypatch.setattr(torch, "compile", lambda way: functools.partial(way))
    case = single("classification_cnn")
    la = fit(case, feature_mode=mode, compile=True, n_eigenvalues=12)
    linearizer = la.fitter.linearizer
    batch = linearizer._batch(case.x_test)
    passes = linearizer._passes(batch, Selection(linearizer._positions(batch)))
    for way in (FeatureMode.FORWARD, FeatureMode.REVERSE):
        compiles = way is FeatureMode.FORWARD or mode == "reverse"
        assert passes.folds(way, True) is not compiles
        assert passes.folds(way, False)
    expected = dense.jacobians(case.model, case.x_test, case.params)[1]
    phi = la.features(case.x_test)[1]
    torch.testing.assert_close(phi, expected @ la.basis.vectors, rtol=1e-4, atol=1e-4)


def test_every_posterior_is_compiled():
    """However many there are: dynamo gives up after eight models for one function."""
    compiled = set()

    def backend(number, graph, inputs):
        compiled.add(number)
        return graph.forward

    case = make("classification_mlp")
    for number in range(12):
        numbered = functools.partial(backend, number)
        fit(case, feature_mode="forward", compile={"backend": numbered})
    assert compiled == set(range(12))


def test_what_cannot_be_compiled():
    """It is computed as it is, and the reason is told."""

    def backend(graph, inputs):
        raise RuntimeError("no compiler here")

    case = make("classification_mlp")
    for mode in ("forward", "reverse"):
        with pytest.warns(CompileWarning, match=f"(?s){mode}-mode.*no compiler here"):
            la = fit(case, feature_mode=mode, compile={"backend": backend})
        assert la.modes.together
        expected = dense.jacobians(case.model, case.x_test, case.params)[1]
        assert_close(la.features(case.x_test)[1], expected @ la.basis.vectors)


def relative(actual, expected):
    """Relative error in the Frobenius norm."""
    difference = actual.double() - expected.double()
    return (difference.norm() / expected.double().norm()).item()


BFLOAT16 = 2**-8
"""Relative spacing of bfloat16 numbers; a rounding errs by half of it at most."""


@pytest.mark.parametrize("mode", FEATURE_MODES)
@pytest.mark.parametrize("name", ["classification_mlp", "classification_cnn"])
def test_autocast(name, mode):
    """Features under autocast are close: a few roundings to bfloat16 in each layer."""
    case = single(name)
    la = fit(case, feature_mode=mode, row_mode="loop")
    f, phi = la.features(case.x_test)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        f_low, phi_low = la.features(case.x_test)
    assert phi_low.dtype == f_low.dtype == torch.float32
    # Two or three layers with input, weight and result rounded, and no cancellation.
    assert 0 < relative(f_low, f) < 8 * BFLOAT16
    assert 0 < relative(phi_low, phi) < 8 * BFLOAT16


@pytest.mark.parametrize("complement", ["drop", "prior"])
def test_predict_under_autocast_after_a_fit_without(complement):
    """Batch normalisation: `vmap` works without autocast, and not with it."""
    case = single("classification_cnn")
    la = fit(case, complement=complement)
    expected = la(case.x_test)
    for mode in ("forward", "reverse", "double_vjp"):
        la.feature_mode = mode
        with torch.autocast("cpu", dtype=torch.bfloat16):
            probs = la(case.x_test)
        assert probs.dtype == torch.float32
        torch.testing.assert_close(probs, expected, atol=0.02, rtol=0.05)
        torch.testing.assert_close(la(case.x_test), expected, atol=1e-4, rtol=1e-4)


def test_fit_under_autocast():
    """A whole fit under autocast gives about the same predictions, in float32."""
    case = single("classification_cnn")
    expected = fit(case)(case.x_test)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        la = fit(case)
        probs = la(case.x_test)
    assert la.H.dtype == torch.float64
    assert probs.dtype == torch.float32
    assert (probs - expected).abs().max() < 8 * BFLOAT16


@pytest.mark.parametrize("mode", FEATURE_MODES)
@pytest.mark.parametrize("name", CASES)
def test_basis_in_bfloat16(name, mode):
    """Rounded directions give features within the rounding, and close predictions."""
    case = single(name)
    la = fit(case, feature_mode=mode, row_mode="loop")
    low = fit(case, feature_mode=mode, row_mode="loop", basis_dtype=torch.bfloat16)
    assert low.basis.directions.dtype == torch.bfloat16
    assert torch.equal(low.basis.directions, la.basis.directions.bfloat16())
    phi, phi_low = la.features(case.x_test)[1], low.features(case.x_test)[1]
    assert phi_low.dtype == torch.float32
    # Each entry of V is off by at most half a spacing, and products add up.
    assert relative(phi_low, phi) < 2 * BFLOAT16
    assert relative(low.H, la.H) < 4 * BFLOAT16
    for first, second in zip(
        _parts(low(case.x_test)), _parts(la(case.x_test)), strict=True
    ):
        assert relative(first, second) < 8 * BFLOAT16


def _parts(output):
    return output if isinstance(output, tuple) else (output,)


def test_basis_in_bfloat16_everything_else_works():
    """Samples, evidence, tuning and checkpoints take a rounded basis."""
    case = single("classification_mlp")
    la = fit(case, basis_dtype=torch.bfloat16)
    assert la.sample(3).dtype == torch.float32
    assert torch.isfinite(la.log_marginal_likelihood())
    la.optimize_prior_precision(n_steps=5, prior_structure="diag")
    la.truncate(3)
    other = build(case, basis_dtype=torch.bfloat16)
    other.load_state_dict(la.state_dict())
    torch.testing.assert_close(other(case.x_test), la(case.x_test))


@pytest.mark.parametrize("mode", FEATURE_MODES)
def test_basis_on_the_cpu(mode):
    """basis_device='cpu' beside a model on the CPU changes nothing."""
    case = make("classification_mlp")
    la = fit(case, feature_mode=mode, basis_device="cpu")
    assert la.basis.directions.device == torch.device("cpu")
    expected = fit(case, feature_mode=mode)
    assert_close(la(case.x_test), expected(case.x_test))
    assert_close(la.H, expected.H)


# --- sampled curvature -------------------------------------------------------------

SAMPLED = ("regression_3", "classification_mlp")


def in_weight_space(la):
    """V H Vᵀ (P, P), which does not depend on the signs of the directions."""
    V = la.basis.vectors
    return V @ la.H @ V.T


def sampled_error(case, n_samples, seeds):
    """Root mean square error of the sampled curvature, relative to the exact one."""
    exact = in_weight_space(fit(case, row_mode="vmap"))
    errors = []
    for seed in range(seeds):
        la = fit(case, stochastic=n_samples, seed=seed, row_mode="vmap")
        errors.append((in_weight_space(la) - exact).square().sum())
    return (torch.stack(errors).mean().sqrt() / exact.norm()).item()


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_curvature_error(name):
    """The error falls like 1/√S: 64 times the samples, an eighth of the error."""
    case = make(name)
    ratio = sampled_error(case, 4, 12) / sampled_error(case, 256, 12)
    # Of 12 draws in many dimensions a root mean square is known to about 15 %, so
    # their ratio to about 20 %: two of these around 8.
    assert 8 / 1.5 < ratio < 8 * 1.5


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_curvature_is_unbiased(name):
    """Averaged over seeds the curvature is the exact one, within its own error."""
    case = make(name)
    exact = in_weight_space(fit(case, row_mode="vmap"))
    draws = torch.stack(
        [
            in_weight_space(fit(case, stochastic=True, seed=s, row_mode="vmap"))
            for s in range(40)
        ]
    )
    bias = (draws.mean(0) - exact).square().sum()
    variance = draws.var(0).sum() / len(draws)
    # E[bias²] is the variance of the mean; a bias of its size would double it.
    assert bias < 2 * variance


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_curvature_is_reproducible(name):
    """The same seed, the same curvature; loss and basis are the exact ones."""
    case = make(name)
    first, second = (fit(case, stochastic=2, row_mode="vmap") for _ in range(2))
    exact = fit(case, row_mode="vmap")
    assert_close(first.H, second.H)
    assert_close(first.loss, exact.loss)
    assert_close(first.basis.vectors, exact.basis.vectors)
    assert first.n_data == exact.n_data
    assert (torch.linalg.eigvalsh(first.H) > -1e-10).all()


@pytest.mark.parametrize("mode", ROW_MODES)
def test_sampled_curvature_takes_one_backward_pass_a_sample(mode):
    """Its cost does not depend on the number of outputs or directions."""
    case = make("classification_cnn")
    la = fit(case, stochastic=2, row_mode=mode)
    counted = []
    original = la.linearizer.row_chunks

    def rows(x, examples, cotangents, **options):
        counted.append(len(examples))
        return original(x, examples, cotangents, **options)

    la.linearizer.row_chunks = rows
    la.subsample_size = 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit(case.loader())
    assert sum(counted) == 5 + 2 * len(case.x)


@pytest.mark.parametrize("value", [-1, 1.5, "yes"])
def test_invalid_number_of_samples(value):
    """stochastic is a bool or a positive integer."""
    case = make("classification_mlp")
    with pytest.raises(ValueError, match="stochastic"):
        build(case, stochastic=value)


@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_invalid_chunk_size(value):
    """chunk_size is a positive integer."""
    case = make("classification_mlp")
    with pytest.raises(ValueError, match="chunk_size"):
        build(case, chunk_size=value)
