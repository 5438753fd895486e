"""Errors, bound and degrees of freedom against explicit matrices in float64."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import NotFittedError
from laplace_ella.diagnostics import (
    DiagnosticMethod,
    ErrorBound,
    ExactLaplace,
    dense_bytes,
    diagnose,
    effective_dof,
    lanczos,
    largest_curvature,
    nystrom_error,
    relative_errors,
    residual_norms,
)
from tests import dense
from tests.cases import (
    CASES,
    PRIORS,
    Case,
    DictModel,
    make,
    mapping_loader,
    mlp,
    priors,
)
from tests.fitting import build, fit

TALL = "regression_1"  # N·C = 12 < P = 21: the kernel side


def norm(matrix):
    return torch.linalg.matrix_norm(matrix, 2)


def many(name, n=40):
    """A case with so much data that P < N·C: the weight side."""
    case = make(name)
    generator = torch.Generator().manual_seed(1)
    shape = (n, *case.x.shape[1:])
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.likelihood == "regression":
        y = torch.randn(n, case.y.shape[1], generator=generator, dtype=torch.float64)
    else:
        y = torch.randint(3, (n,), generator=generator)
    return Case(case.model, case.likelihood, x, y, case.x_test, case.kwargs)


SIDES = {
    "kernel_regression": lambda: make(TALL),
    "kernel_classification": lambda: make("classification_mlp"),
    "kernel_cnn": lambda: make("classification_cnn"),
    "weights_regression": lambda: many("regression_3"),
    "weights_classification": lambda: many("classification_mlp"),
}


class Truth:
    """Everything from J, Λ and D as explicit matrices."""

    def __init__(self, case, la, prior):
        f, Js = dense.jacobians(case.model, case.x, case.params)
        self.J = Js.flatten(0, 1)
        factor = 1 / float(la.sigma_noise) ** 2 / la.temperature
        blocks = dense.loss_hessian(f, case.likelihood) * factor
        self.Lam = torch.block_diag(*blocks)
        self.D = dense.expand_prior(prior, case.params)
        self.V = la.basis.vectors.double()
        self.case = case

    @property
    def kernel(self):
        return self.J @ self.J.T

    @property
    def residual(self):
        """JV VᵀJᵀ − JJᵀ, as in the paper."""
        phi = self.J @ self.V
        return phi @ phi.T - self.kernel

    def exact(self):
        return torch.linalg.inv(self.J.T @ self.Lam @ self.J + torch.diag(self.D))

    def ella(self, complement="drop"):
        H = self.V.T @ self.J.T @ self.Lam @ self.J @ self.V
        if complement == "prior":
            return torch.linalg.inv(torch.diag(self.D) + self.V @ H @ self.V.T)
        G = H + self.V.T @ torch.diag(self.D) @ self.V
        return self.V @ torch.linalg.inv(G) @ self.V.T

    def ella_errors(self, x, complement="drop"):
        _, Js = dense.jacobians(self.case.model, x, self.case.params)
        errors = []
        for J in Js:
            exact = J @ self.exact() @ J.T
            errors.append(norm(J @ self.ella(complement) @ J.T - exact) / norm(exact))
        return torch.stack(errors)


def val_loader(case):
    targets = torch.zeros(len(case.x_test), dtype=torch.long)
    return DataLoader(TensorDataset(case.x_test, targets), batch_size=3)


# Dense


@pytest.mark.parametrize("name", SIDES)
def test_nystrom_error(name):
    """ε_Nyström, ℰ' and the traces, by their definitions."""
    case = SIDES[name]()
    la = fit(case, n_eigenvalues=4, subsample_size=9)
    truth = Truth(case, la, 1.0)
    report = diagnose(la, case.loader())
    assert report.method is DiagnosticMethod.DENSE
    error = report.nystrom
    assert error.exact
    assert error.residual_norm == pytest.approx(float(norm(truth.residual)), rel=1e-8)
    assert error.norm == pytest.approx(float(norm(truth.kernel)), rel=1e-8)
    expected = norm(truth.residual) / norm(truth.kernel)
    assert error.relative == pytest.approx(float(expected), rel=1e-8)
    expected = truth.residual.trace().abs() / truth.kernel.trace()
    assert error.relative_trace == pytest.approx(float(expected), rel=1e-8)


def test_nystrom_error_is_the_papers_formula():
    """For K = M: JJ̃ᵀ(J̃J̃ᵀ)⁻¹J̃Jᵀ − JJᵀ from the sampled rows themselves."""
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(20, 30, generator=generator, dtype=torch.float64)
    rows = J[[1, 4, 7, 12]]
    V, _ = dense.nystrom(rows, 4)
    approximate = J @ rows.T @ torch.linalg.inv(rows @ rows.T) @ rows @ J.T
    expected = norm(approximate - J @ J.T) / norm(J @ J.T)
    assert nystrom_error(J, V.T).relative == pytest.approx(float(expected), rel=1e-8)


@pytest.mark.parametrize("name", ["kernel_regression", "weights_classification"])
def test_nested_ranks(name):
    """The errors of all ranks from one basis are those of each rank alone."""
    case = SIDES[name]()
    la = fit(case, n_eigenvalues=6)
    exact = ExactLaplace.from_loader(la, case.loader())
    together = exact.nystrom_errors(la.basis.directions, range(1, 7))
    for k, error in enumerate(together, 1):
        (alone,) = exact.nystrom_errors(la.basis.directions[:k])
        assert error.relative == pytest.approx(alone.relative, rel=1e-7)
        assert error.relative_trace == pytest.approx(alone.relative_trace, rel=1e-7)
    relative = [error.relative for error in together]
    assert relative == sorted(relative, reverse=True)


@pytest.mark.parametrize("complement", ["drop", "prior"])
@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("name", SIDES)
def test_ella_error(name, structure, complement):
    """ε_ELLA in every prior structure, on both sides of the Woodbury identity."""
    case = SIDES[name]()
    prior = priors(case)[structure]
    la = fit(
        case,
        n_eigenvalues=5,
        prior_precision=prior,
        complement=complement,
        temperature=1.7,
    )
    expected = Truth(case, la, prior).ella_errors(case.x_test, complement)
    report = diagnose(la, case.loader(), val_loader(case))
    torch.testing.assert_close(report.ella_errors, expected, rtol=1e-6, atol=1e-9)
    assert report.ella_error == pytest.approx(float(expected.mean()), rel=1e-6)


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("name", SIDES)
def test_exact_covariance(name, structure):
    """Σ and κ_LLA of the exact posterior."""
    case = SIDES[name]()
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior)
    exact = ExactLaplace.from_loader(la, case.loader())
    Sigma = Truth(case, la, prior).exact()
    torch.testing.assert_close(exact.covariance(), Sigma, rtol=1e-8, atol=1e-10)
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    expected = dense.marginal(Js, Sigma)
    torch.testing.assert_close(exact.kappa(Js), expected, rtol=1e-8, atol=1e-10)


def test_no_error_where_the_basis_spans_everything():
    """With all gradients and the complement at the prior, ELLA is exact LLA."""
    case = make("classification_mlp")
    la = fit(case, n_eigenvalues=40, complement="prior")
    report = diagnose(la, case.loader(), val_loader(case))
    assert report.nystrom.relative < 1e-10
    assert report.ella_error < 1e-6
    assert report.bound.error < 1e-6
    assert report.bound.complement < 1e-3 * report.bound.prior_variance


def test_float32_agrees_with_float64():
    """Blocks, chunks and single precision change the fifth digit, not more."""
    case = make(TALL)
    double = diagnose(fit(case), case.loader(), val_loader(case))
    case.model.float()
    single = Case(
        case.model, case.likelihood, case.x.float(), case.y.float(), case.x_test.float()
    )
    report = diagnose(fit(single), single.loader(), val_loader(single))
    case.model.double()
    assert report.nystrom.relative == pytest.approx(double.nystrom.relative, rel=1e-3)
    assert report.ella_error == pytest.approx(double.ella_error, rel=1e-3)


@pytest.mark.parametrize("method", ["dense", "stochastic"])
def test_basis_in_half_precision(method):
    """A basis stored in bfloat16 is measured by its span."""
    case = make(TALL)
    case.model.float()
    single = Case(
        case.model, case.likelihood, case.x.float(), case.y.float(), case.x_test.float()
    )
    expected = diagnose(fit(single), single.loader(), method=method)
    la = fit(single, basis_dtype=torch.bfloat16)
    report = diagnose(la, single.loader(), method=method)
    expected, found = expected.nystrom, report.nystrom
    assert found.relative == pytest.approx(expected.relative, rel=0.1, abs=1e-3)
    assert found.relative_trace == pytest.approx(
        expected.relative_trace, rel=0.1, abs=1e-3
    )


def test_pure_functions_leave_the_random_state():
    before = torch.get_rng_state()
    J = torch.eye(4, 6, dtype=torch.float64)
    nystrom_error(J, J[:2])
    assert torch.equal(torch.get_rng_state(), before)


def test_blocks(monkeypatch):
    """Matrices assembled from many blocks equal those from one."""
    case = make("classification_cnn")
    la = fit(case, prior_precision=0.3)
    whole = diagnose(la, case.loader(), val_loader(case))
    monkeypatch.setattr("laplace_ella.diagnostics.exact.BLOCK_ROWS", 9)
    monkeypatch.setattr("laplace_ella.diagnostics.exact.BLOCK_COLUMNS", 7)
    monkeypatch.setattr("laplace_ella.diagnostics.exact.EIGH_LIMIT", 0)
    parts = diagnose(la, case.loader(), val_loader(case))
    assert parts.ella_error == pytest.approx(whole.ella_error, rel=1e-8)
    assert parts.nystrom.relative == pytest.approx(whole.nystrom.relative, rel=1e-8)
    assert parts.bound.next_eigenvalue == pytest.approx(
        whole.bound.next_eigenvalue, rel=1e-3
    )


def test_loader_of_a_part_of_the_data():
    """Both posteriors get the curvature of the loader's data."""
    case = make("classification_mlp")
    la = fit(case, prior_precision=0.4)
    part = Case(case.model, case.likelihood, case.x[:6], case.y[:6], case.x_test)
    report = diagnose(la, part.loader(), val_loader(case))
    expected = Truth(part, la, 0.4).ella_errors(case.x_test).mean()
    assert report.n_data == 6
    assert report.ella_error == pytest.approx(float(expected), rel=1e-6)


# The bound


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["regression_1", "regression_3", "classification_mlp"])
def test_bound_holds(name, seed):
    """ℰ ≤ σ0⁴c_Λℰ' + σ0² and ℰ' ≤ its own bound, whatever M, K and the prior."""
    case = make(name)
    for M, K in ((2, 2), (4, 4), (8, 8), (8, 3), (10**6, 5)):
        la = fit(case, n_eigenvalues=K, subsample_size=M, seed=seed)
        for prior in (0.01, 1.0, 100.0):
            la.prior_precision = prior
            truth = Truth(case, la, prior)
            bound = diagnose(la, case.loader()).bound
            error = float(norm(truth.ella() - truth.exact()))
            assert bound.error == pytest.approx(error, rel=1e-6)
            assert bound.error <= bound.theorem_1
            assert bound.error <= bound.corollary_1
            assert bound.nystrom_error <= bound.nystrom_bound
            assert bound.error <= bound.prior_variance * (1 + 1e-9)
            T = truth.ella("prior")
            assert float(norm(T - truth.exact())) <= bound.complement * (1 + 1e-9)


def test_constants_of_the_bound():
    """Every constant from its definition, and both formulas from the constants."""
    case = make("classification_mlp")
    la = fit(case, n_eigenvalues=4, prior_precision=2.5, temperature=0.5)
    truth = Truth(case, la, 2.5)
    b = diagnose(la, case.loader(), delta=0.1).bound
    eigenvalues = torch.linalg.eigvalsh(truth.kernel).flip(0)
    assert b.prior_variance == pytest.approx(0.4)
    assert b.c_lambda == pytest.approx(float(norm(truth.Lam)), rel=1e-10)
    assert b.nystrom_error == pytest.approx(float(norm(truth.residual)), rel=1e-8)
    assert b.next_eigenvalue == pytest.approx(float(eigenvalues[4]), rel=1e-8)
    assert b.c_kappa == pytest.approx(float(truth.kernel.diagonal().max()), rel=1e-10)
    assert (b.n_data, b.n_outputs, b.n_samples, b.rank) == (12, 3, 36, 4)
    first = b.prior_variance**2 * b.c_lambda
    assert b.theorem_1 == pytest.approx(first * b.nystrom_error + b.prior_variance)
    spread = 12 * 3 / 36**0.5 * b.c_kappa * (2 + np.log(10))
    assert b.nystrom_bound == pytest.approx(b.next_eigenvalue + spread)
    assert b.corollary_1 == pytest.approx(first * b.nystrom_bound + b.prior_variance)


def test_regression_constant_is_the_noise():
    """c_Λ = 1/σ²."""
    case = make("regression_3")
    assert diagnose(fit(case), case.loader()).bound.c_lambda == pytest.approx(1 / 0.16)


def test_why_the_bound_with_complement_has_a_root():
    """The paper's first term alone does not bound ‖T − Σ‖, ours does."""
    J = torch.tensor([[10.0, 0.0], [10.0, 0.1]], dtype=torch.float64)
    V, variance = torch.tensor([[1.0], [0.0]], dtype=torch.float64), 1e-5
    eye = torch.eye(2, dtype=torch.float64) / variance
    phi = J @ V
    T = torch.linalg.inv(eye + V @ phi.T @ phi @ V.T)
    error = float(norm(T - torch.linalg.inv(eye + J.T @ J)))
    nystrom = nystrom_error(J, V.T)
    bound = ErrorBound(
        variance, 1.0, nystrom.residual_norm, nystrom.norm, None, None, 2, 1, 1, 1, 0.05
    )
    assert error > variance**2 * nystrom.residual_norm
    assert error <= bound.complement < variance
    assert bound.corollary_1 is None


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("C", [2, 3, 10])
def test_largest_curvature(C, scale):
    """c_Λ of the softmax by bisection equals the eigenvalue of the matrix."""
    f = scale * torch.randn(20, C, dtype=torch.float64)
    for row in f:
        expected = float(norm(dense.loss_hessian(row[None], "classification")[0]))
        found = largest_curvature(row[None], "classification")
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert largest_curvature(f, "classification") <= 0.5


def test_largest_curvature_of_equal_logits():
    assert largest_curvature(torch.zeros(1, 4), "classification") == pytest.approx(0.25)
    assert largest_curvature(torch.zeros(1, 2), "classification") == pytest.approx(0.5)


# Degrees of freedom and spectrum


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("name", CASES)
def test_effective_dof(name, structure):
    case = make(name)
    prior = priors(case)[structure]
    la = fit(case, prior_precision=prior)
    reference = dense.Reference(case, la.basis.vectors, sigma=la.sigma_noise)
    H = reference.factor * reference.H
    expected = float((H @ torch.linalg.inv(reference.precision(prior))).trace())
    report = diagnose(la, case.loader())
    assert report.effective_dof == pytest.approx(expected, rel=1e-8)
    assert 0 < report.effective_dof < la.rank


def test_effective_dof_limits():
    H = torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64))
    eye = torch.eye(2, dtype=torch.float64)
    assert effective_dof(H, eye) == pytest.approx(0.8 + 0.5)
    assert effective_dof(H, 1e-9 * eye) == pytest.approx(2)
    assert effective_dof(H, 1e9 * eye) == pytest.approx(0, abs=1e-8)


def test_spectrum():
    case = make("classification_mlp")
    la = fit(case)
    report = diagnose(la, case.loader())
    rows = Truth(case, la, 1.0).J  # every pair was sampled
    eigenvalues = torch.linalg.eigvalsh(rows @ rows.T).flip(0)
    torch.testing.assert_close(report.eigenvalues, eigenvalues[: la.rank])
    explained = eigenvalues.cumsum(0)[: la.rank] / eigenvalues.sum()
    torch.testing.assert_close(report.explained, explained)
    # and what is not explained is what the Nyström approximation misses
    assert report.nystrom.relative_trace == pytest.approx(1 - float(explained[-1]))


# Stochastic


@pytest.mark.parametrize("mode", ["forward", "reverse", "double_vjp"])
@pytest.mark.parametrize("name", ["kernel_cnn", "weights_regression"])
def test_stochastic_estimates(name, mode):
    """Trace within four standard errors, norms within the stated residual."""
    case = SIDES[name]()
    la = fit(case, n_eigenvalues=3, feature_mode=mode)
    truth = diagnose(la, case.loader(), method="dense")
    found = diagnose(la, case.loader(), method="stochastic", n_probes=64, tol=1e-4)
    assert found.method is DiagnosticMethod.STOCHASTIC
    a, b = found.nystrom, truth.nystrom
    assert not a.exact
    assert abs(a.residual_trace - b.residual_trace) < 4 * a.trace_error
    assert abs(a.relative_trace - b.relative_trace) < 4 * a.relative_trace_error
    assert a.trace_error < 0.3 * a.residual_trace
    assert abs(a.residual_norm - b.residual_norm) <= a.norm_error + 1e-9
    assert a.residual_norm <= b.residual_norm * (1 + 1e-9)
    assert a.norm == pytest.approx(b.norm, rel=1e-3)
    assert a.relative == pytest.approx(b.relative, rel=1e-3)
    assert found.effective_dof == truth.effective_dof
    assert found.bound.c_lambda == pytest.approx(truth.bound.c_lambda)
    assert found.bound.theorem_1 == pytest.approx(truth.bound.theorem_1, rel=1e-3)
    assert found.bound.corollary_1 is None
    assert found.bound.error is None


def test_standard_error_is_honest():
    """Over many seeds the errors of the trace are one standard error large."""
    case = make("classification_mlp")
    la = fit(case, n_eigenvalues=3)
    truth = diagnose(la, case.loader()).nystrom.residual_trace
    ratios = []
    for seed in range(25):
        error = diagnose(
            la,
            case.loader(),
            method="stochastic",
            n_steps=1,
            generator=torch.Generator().manual_seed(seed),
        ).nystrom
        ratios.append((error.residual_trace - truth) / error.trace_error)
    ratios = torch.tensor(ratios)
    assert abs(float(ratios.mean())) < 0.6
    assert 0.7 < float(ratios.std()) < 1.4


def test_stochastic_is_reproducible():
    case = make("classification_mlp")
    la = fit(case)
    first, second = (
        diagnose(la, case.loader(), method="stochastic").nystrom for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("n_values", [1, 3])
def test_lanczos(n_values):
    """Top eigenvalues of several matrices at once."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(4, 25, 18, generator=generator, dtype=torch.float64)
    matrices = half @ half.mT
    start = torch.randn(4, 25, generator=generator, dtype=torch.float64)
    values, errors = lanczos(
        lambda v: (matrices @ v.unsqueeze(-1)).squeeze(-1), start, n_values, tol=1e-10
    )
    expected = torch.linalg.eigvalsh(matrices).flip(1)[:, :n_values]
    torch.testing.assert_close(values, expected)
    assert (errors <= 1e-8 * expected).all()


def test_lanczos_of_low_rank():
    """An exhausted Krylov space ends the iteration; missing eigenvalues are 0."""
    v = torch.arange(1.0, 6, dtype=torch.float64)
    values, _ = lanczos(lambda x: (x @ v)[:, None] * v, torch.ones(1, 5).double(), 3)
    torch.testing.assert_close(values, torch.tensor([[55.0, 0, 0]]).double())
    values, _ = lanczos(torch.zeros_like, torch.ones(2, 5).double())
    assert (values == 0).all()


def test_residual_norms_of_a_full_basis():
    """Nothing is left where the basis spans all gradients."""
    J = torch.randn(3, 8, dtype=torch.float64)
    V = torch.linalg.svd(J, full_matrices=False)[2]
    norms, _ = residual_norms(lambda v: (v @ J.T) @ J, V, [3, 0])
    assert float(norms[0]) < 1e-12 * float(norms[1])


def test_relative_errors():
    exact = torch.diag_embed(torch.tensor([[2.0, 1.0], [4.0, 4.0]]))
    wrong = torch.diag_embed(torch.tensor([[2.0, 0.5], [1.0, 4.0]]))
    expected = torch.tensor([0.25, 0.75], dtype=torch.float64)
    torch.testing.assert_close(relative_errors(wrong, exact), expected)


# Behaviour


def test_memory_is_checked_before_the_work():
    case = make("classification_mlp")
    la = fit(case)
    needed = dense_bytes(12, 3, case.n_params, 8)
    with pytest.raises(
        MemoryError, match=rf"{needed} bytes.*memory_budget=1000 .*fewer"
    ):
        diagnose(la, case.loader(), method="dense", memory_budget=1000)
    with pytest.raises(MemoryError, match="val_loader"):
        diagnose(la, case.loader(), val_loader(case), memory_budget=1000)
    with pytest.raises(MemoryError, match="bytes"):
        ExactLaplace.from_loader(la, case.loader(), memory_budget=1000)
    report = diagnose(la, case.loader(), memory_budget=1000)
    assert report.method is DiagnosticMethod.STOCHASTIC


def test_memory_estimate_of_the_papers_study():
    """2,000 MNIST images: Jacobians of 2.3 GB and a kernel matrix of 3.2 GB."""
    assert 5.5e9 < dense_bytes(2000, 10, 29_034) < 8e9
    assert dense_bytes(60_000, 10, 1000) < 4e8


@pytest.mark.parametrize("method", ["dense", "stochastic"])
def test_user_state_is_untouched(method):
    """Model, gradients, random states and loader are as before."""
    case = make("classification_cnn")
    la = fit(case)
    case.model.train()
    case.model.bn.eval()
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    H, n_data = la.H.clone(), la.n_data
    generator = torch.Generator().manual_seed(5)
    loader = case.loader(shuffle=True, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    diagnose(la, loader, method=method)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy[1])  # noqa: NPY002
    assert case.model.training
    assert not case.model.bn.training
    for key, value in case.model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(p.grad is None for p in case.model.parameters())
    assert all(p.requires_grad for p in case.model.parameters())
    assert torch.equal(la.H, H)
    assert la.n_data == n_data


def test_shuffled_loader_gives_the_same():
    case = make("classification_mlp")
    la = fit(case)
    plain = diagnose(la, case.loader(), val_loader(case))
    shuffled = diagnose(la, case.loader(shuffle=True), val_loader(case))
    assert shuffled.ella_error == pytest.approx(plain.ella_error, rel=1e-8)


def test_prior_without_a_bound():
    case = make("classification_mlp")
    la = fit(case, prior_precision=priors(case)["layerwise"])
    report = diagnose(la, case.loader())
    assert report.bound is None
    assert "not scalar" in str(report)


def test_summary():
    """The text has the numbers."""
    case = make("classification_mlp")
    la = fit(case)
    report = diagnose(la, case.loader(), val_loader(case))
    text = str(report)
    for value in (
        report.nystrom.relative,
        report.ella_error,
        report.bound.theorem_1,
        report.bound.corollary_1,
        report.bound.error,
    ):
        assert f"{value:.4g}" in text
    assert "N=12, C=3, P=38, M=36, K=6" in text
    text = str(diagnose(la, case.loader(), method="stochastic"))
    assert "estimated" in text
    assert "±" in text


def test_clear_errors():
    case = make("classification_mlp")
    with pytest.raises(NotFittedError):
        diagnose(build(case), case.loader())
    la = fit(case)
    with pytest.raises(ValueError, match=r"\['auto', 'dense', 'stochastic'\]"):
        diagnose(la, case.loader(), method="guess")
    with pytest.raises(ValueError, match="between 0 and 1, got 2"):
        diagnose(la, case.loader(), delta=2)
    with pytest.raises(ValueError, match="n_probes must be at least 1, got 0"):
        diagnose(la, case.loader(), n_probes=0)
    with pytest.raises(ValueError, match="leave out val_loader"):
        diagnose(la, case.loader(), val_loader(case), method="stochastic")
    with pytest.raises(TypeError, match="DataLoader"):
        diagnose(la, [(case.x, case.y)])
    twice = DataLoader(
        TensorDataset(case.x, case.y), sampler=[0, 0, 1, 2], batch_size=2
    )
    with pytest.raises(ValueError, match="once"):
        diagnose(la, twice)


def test_models_that_vmap_refuses():
    """Recurrent layers, whose Jacobian takes one backward pass per output."""
    case = make("gru")
    la = fit(case, n_eigenvalues=4)
    report = diagnose(la, case.loader(), val_loader(case))
    truth = Truth(case, la, 1.0)
    expected = norm(truth.residual) / norm(truth.kernel)
    assert report.nystrom.relative == pytest.approx(float(expected), rel=1e-7)
    found = diagnose(la, case.loader(), method="stochastic", n_steps=30, tol=1e-6)
    assert found.nystrom.relative == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("method", ["dense", "stochastic"])
def test_mapping_batches(method):
    """Batches as Hugging Face has them give the same numbers."""
    case = make("classification_mlp")
    la = fit(case)
    expected = diagnose(la, case.loader(), method=method).nystrom.relative
    case.model = DictModel(case.model)
    loader = mapping_loader(case.x, case.y, batch_size=5)
    la = fit(case, loader=loader)
    found = diagnose(la, loader, method=method).nystrom.relative
    assert found == pytest.approx(expected, rel=1e-6)


def test_one_output_and_one_example():
    """The smallest problem there is."""
    case = Case(
        mlp(2, 1).double(),
        "regression",
        torch.randn(1, 2, dtype=torch.float64),
        torch.randn(1, 1, dtype=torch.float64),
        torch.randn(2, 2, dtype=torch.float64),
    )
    la = fit(case, n_eigenvalues=1)
    report = diagnose(la, case.loader(), val_loader(case))
    assert report.nystrom.relative < 1e-12
    assert report.bound.next_eigenvalue == 0
    assert str(report)
