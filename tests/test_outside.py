"""What is outside the basis: evidence over the whole spectrum, matched complement."""

import copy
import io
from math import log

import pytest
import torch
from laplace import FullLaplace, Laplace
from laplace.curvature import CurvlinopsEF
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace, FeatureCache
from laplace_ella.diagnostics import diagnose
from laplace_ella.posterior.spectrum import Spectrum
from laplace_ella.support.span import Sketch, Span
from tests import dense
from tests.cases import make, mlp
from tests.fitting import assert_close, build, fit

REGRESSION = ("regression_1", "regression_3")


class Matched:
    """Dense reference: every training gradient, explicit projections, float64."""

    def __init__(self, case, la, prior, temperature=1.0):
        _, J = dense.jacobians(case.model, case.x, case.params)
        self.case, self.J, V = case, J.flatten(0, 1), la.basis.vectors
        self.f = 1 / float(la.sigma_noise) ** 2 / temperature
        self.prior, self.V = prior, V
        eye = torch.eye(len(V), dtype=V.dtype)
        gram = self.J.T @ self.J
        self.eigenvalues = torch.linalg.eigvalsh(gram).flip(0)
        U, s, _ = torch.linalg.svd(self.J.T, full_matrices=False)
        U = U[:, s > 1e-6 * s[0]]
        # What the data know better than the prior, up to a power of four.
        largest = self.eigenvalues[0]
        level = torch.round((self.f * largest / prior).clamp_min(1).log() / log(4))
        known = (self.eigenvalues > largest * 4.0**-level)[: U.shape[1]]
        if 4.0**-level * largest < self.eigenvalues[U.shape[1] - 1]:
            known[:] = True
        self.known = int(known.sum())
        U = U[:, : self.known]
        span = U @ U.T
        tail = self.eigenvalues[la.rank : self.known]
        freedom = (tail / (self.f * tail + prior)).sum()
        self.alpha = tail.sum() / freedom if len(tail) else prior
        inside = (
            V
            @ torch.linalg.inv(
                self.f * V.T @ gram @ V + prior * eye[: la.rank, : la.rank]
            )
            @ V.T
        )
        outside = eye - V @ V.T
        rest = (eye - span) @ outside  # no direction of the basis
        within = outside - rest
        self.Sigma = inside + within / self.alpha + rest / prior


@pytest.mark.parametrize("name", REGRESSION)
def test_covariance(name):
    """Precision α in the directions that the data know, the prior's outside."""
    case = make(name)
    la = fit(case, prior_precision=0.3, complement="matched", n_eigenvalues=3)
    Sigma = Matched(case, la, 0.3).Sigma
    f, Js = dense.jacobians(case.model, case.x_test, case.params)
    close = {"rtol": 1e-6, "atol": 1e-9}
    assert_close(la.functional_variance(Js), dense.marginal(Js, Sigma), **close)
    assert_close(la.functional_covariance(Js), dense.joint(Js, Sigma), **close)
    mean, var = la(case.x_test)
    assert_close(mean, f)
    assert_close(var, dense.marginal(Js, Sigma), **close)
    assert_close(la(case.x_test, joint=True)[1], dense.joint(Js, Sigma), **close)
    samples = la.functional_samples(case.x_test, n_samples=40_000)
    expected = dense.marginal(Js, Sigma).diagonal(dim1=1, dim2=2)
    assert_close(samples.var(0), expected, rtol=0.1, atol=1e-6)


def test_recomputed_with_prior_noise_and_temperature():
    case = make("regression_1")
    la = fit(case, complement="matched", n_eigenvalues=3)
    cache = FeatureCache.from_loader(la, case.loader())
    _, Js = dense.jacobians(case.model, case.x, case.params)
    for la.prior_precision, la.sigma_noise, la.temperature in (
        (0.1, 0.5, 1.0),
        (3.0, 0.5, 1.0),
        (3.0, 0.1, 4.0),
    ):
        expected = Matched(case, la, float(la.prior_precision), la.temperature)
        var = dense.marginal(Js, expected.Sigma)
        assert_close(la.predict_from_cache(cache)[1], var, rtol=1e-5, atol=1e-8)
        assert_close(la(case.x)[1], var, rtol=1e-5, atol=1e-8)


def test_mean_variance_of_the_training_data_is_exact_laplace():
    """What α is chosen for: Σ_n f·var_n is the effective number of parameters, but for
    directions that the data know less than the prior; there are none with a weak one.
    """
    case = make("regression_1")
    la = fit(case, complement="matched", n_eigenvalues=3)

    def ratio(prior):
        exact = FullLaplace(case.model, "regression", prior_precision=prior)
        exact.fit(case.loader())
        la.prior_precision = prior
        return float(la(case.x)[1].sum() / exact(case.x)[1].sum())

    for prior in (1e-6, 1e-3, 1e-2):
        la.complement = "matched"
        assert ratio(prior) == pytest.approx(1, rel=0.01)
        la.complement = "drop"
        assert ratio(prior) < 0.5
        la.complement = "prior"
        assert ratio(prior) > 5


@pytest.mark.parametrize("name", REGRESSION)
def test_evidence_of_few_directions_is_that_of_all(name):
    """With all pairs sampled the evidence equals FullLaplace's at every rank; that of
    the basis does not."""
    case = make(name)
    prior, sigma = torch.tensor([0.3]).double(), torch.tensor(0.7).double()
    full = FullLaplace(case.model, "regression", sigma_noise=0.7, prior_precision=0.3)
    full.fit(case.loader())
    for complement in ("drop", "prior", "matched"):
        la = fit(case, n_eigenvalues=4, complement=complement, evidence="whole")
        values = []
        for model in (full, la):
            p, s = prior.clone().requires_grad_(), sigma.clone().requires_grad_()
            value = model.log_marginal_likelihood(p, s)
            values.append((value.detach(), *torch.autograd.grad(value, (p, s))))
        for ours, theirs in zip(values[1], values[0], strict=True):
            assert_close(ours.reshape(-1), theirs.reshape(-1), rtol=1e-6)
        la.prior_precision, la.sigma_noise = 0.3, 0.7
        ranks = la.optimize_rank(share=1.0)
        by_rank = torch.tensor([row["log_marginal_likelihood"] for row in ranks])
        assert_close(by_rank, values[0][0].float().expand(4), rtol=1e-5)
        la.evidence = "basis"
        assert abs(la.log_marginal_likelihood() - values[0][0]) > 0.1


def test_tuned_as_exact_laplace():
    """Prior and noise by the whole evidence are those of the exact posterior."""
    case = make("regression_1")
    exact = fit(case, n_eigenvalues="exact", complement="prior")
    few = fit(case, n_eigenvalues=3, complement="matched", evidence="whole")
    paper = fit(case, n_eigenvalues=3)
    for la in (exact, few, paper):
        la.optimize_sigma_noise()
    assert_close(few.sigma_noise, exact.sigma_noise, rtol=1e-3)
    assert_close(few.prior_precision, exact.prior_precision, rtol=1e-3)
    assert paper.prior_precision < 0.95 * exact.prior_precision
    few.optimize_prior_precision(n_steps=50)
    exact.optimize_prior_precision(n_steps=50)
    assert_close(few.prior_precision, exact.prior_precision, rtol=1e-4)


def _rows(n, p, decay, generator):
    """Rows of a distribution whose second moment has eigenvalues i^-decay."""
    scales = torch.arange(1, p + 1).double() ** (-decay / 2)
    return torch.randn(n, p, generator=generator, dtype=torch.float64) * scales


@pytest.mark.parametrize("decay", [0.8, 1.5])
@pytest.mark.parametrize("share", [4, 2])
def test_spectrum_of_a_sample(decay, share):
    """From a part of the rows, log determinant and degrees of freedom of all."""
    J = _rows(600, 900, decay, torch.Generator().manual_seed(0))
    M, all_values = len(J) // share, torch.linalg.svdvals(J).square()
    spectrum = Spectrum(torch.linalg.svdvals(J[:M]).square(), M, *J.shape)
    for ridge in all_values[[10, 40, 150]]:
        exact = torch.log1p(all_values / ridge).sum()
        freedom = (all_values / (all_values + ridge)).sum()
        assert_close(spectrum.log_det(ridge), exact, rtol=0.06)
        assert_close(spectrum.degrees_of_freedom(ridge), freedom, rtol=0.1)
        naive = torch.log1p(spectrum.scaled / ridge).sum()
        assert (spectrum.log_det(ridge) - exact).abs() < (naive - exact).abs() / 3


def test_spectrum_is_smooth_and_consistent():
    """Its derivative is the degrees of freedom; far away it follows the trace; more
    rows than were there say the same as all of them."""
    J = _rows(80, 300, 1.0, torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(J).square()
    spectrum = Spectrum(values, 80, 400, 300)
    ridges = torch.logspace(-6, 8, 29, dtype=torch.float64)
    for ridge in ridges:
        log_ridge = ridge.log().requires_grad_()
        slope = torch.autograd.grad(spectrum.log_det(log_ridge.exp()), log_ridge)[0]
        assert_close(-slope, spectrum.degrees_of_freedom(ridge), rtol=1e-6)
        assert 0 < spectrum.degrees_of_freedom(ridge) < 300
    freedom = [float(spectrum.degrees_of_freedom(r)) for r in ridges]
    assert freedom == sorted(freedom, reverse=True)
    far = 1e7 * values[0]
    assert_close(spectrum.log_det(far), spectrum.trace / far, rtol=1e-3)
    same = Spectrum(values, 80, 80, 300)
    almost = Spectrum(torch.cat([values, values.new_zeros(1)]), 81, 80, 300)
    for ridge in ridges[10:20]:
        assert_close(almost.log_det(ridge), same.log_det(ridge), rtol=0.05)


def test_sketch_keeps_what_is_outside_a_span():
    """Norms outside the span of 60 rows of 5,000 parameters, from 180 groups."""
    generator = torch.Generator().manual_seed(0)
    rows = _rows(60, 5000, 0.5, generator)
    new = rows[:40] * 3 + 0.1 * _rows(40, 5000, 0.5, generator)
    Q = torch.linalg.qr(rows.T)[0]
    exact = (new - new @ Q @ Q.T).square().sum(1)
    sketch = Sketch.of(5000, Sketch.size_for(5000, 60), 0, torch.device("cpu"))
    assert sketch.size == 180
    directions = torch.linalg.qr(sketch(rows).T)[0].T
    span = Span(directions, sketch, (60,))
    estimate = next(span.outside(new)).square().sum(1)
    assert_close(estimate / exact, torch.ones(40).double(), rtol=0, atol=0.5)
    assert_close((estimate / exact).mean(), torch.ones(()).double(), rtol=0.15)
    within = next(span.outside(rows * 3)).square().sum(1)
    assert within.max() < 1e-20 * rows.square().sum(1).max()
    everything = Sketch.of(200, Sketch.size_for(200, 60), 0, torch.device("cpu"))
    assert everything.signs is None
    assert everything.size == 200
    assert_close(everything(rows[:, :200]), rows[:, :200])


def _problem(n=400, width=40):
    torch.manual_seed(3)
    x = torch.randn(n, 4).double()
    y = x[:, :1].sin() + x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(n, 1)
    model = mlp(4, width, width, 1).double()
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        adam.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        adam.step()
    return model.eval(), DataLoader(TensorDataset(x, y), 100), x


def test_near_exact_from_a_quarter_of_the_gradients():
    """K = 10 of M = 100 gradients of 400: noise and prior within 20 % of the exact
    ones, intervals at new inputs within a factor of 1.6 on the geometric mean, where
    dropping the complement and the prior are off by five and more."""
    model, loader, _ = _problem()
    new = torch.randn(200, 4).double()
    exact = Laplace(model, "regression", "all", "nystrom", n_eigenvalues="exact")
    exact.fit(loader)
    exact.optimize_sigma_noise()
    la = ELLALaplace(model, "regression", subsample_size=100, n_eigenvalues=10)
    la.fit(loader)
    la.optimize_sigma_noise()
    assert la.complement == "matched"
    assert_close(la.sigma_noise, exact.sigma_noise, rtol=0.2)
    assert_close(la.prior_precision, exact.prior_precision, rtol=0.2)
    expected = exact(new, diagonal_output=True)[1].log().mean()

    def difference():
        return abs(float(la(new, diagonal_output=True)[1].log().mean() - expected))

    matched = difference()
    assert matched < 0.9
    for la.complement in ("drop", "prior"):
        assert difference() > 3.2
    # Far from the data the prior holds, as for exact Laplace.
    la.complement = "matched"
    far = 30 * torch.randn(50, 4).double()
    ratio = la(far, diagonal_output=True)[1] / exact(far, diagonal_output=True)[1]
    assert 0.5 < float(ratio.log().mean().exp()) < 2


def test_joint_covariance_with_a_sample_is_positive():
    """Gradients whose part outside the span is scaled one by one stay a Gaussian, and
    the marginals are the joint's diagonal."""
    model, loader, _ = _problem(120, 20)
    la = ELLALaplace(model, "regression", subsample_size=30, n_eigenvalues=5)
    la.fit(loader)
    new = torch.cat([torch.randn(20, 4), 5 * torch.randn(20, 4)]).double()
    joint = la(new, joint=True)[1]
    assert torch.linalg.eigvalsh(joint).min() > -1e-9 * joint.diagonal().max()
    marginal = la(new, diagonal_output=True)[1]
    assert_close(joint.diagonal(), marginal.squeeze(1), rtol=1e-7)


@pytest.mark.parametrize("alpha", [0.5, 20.0])
@pytest.mark.parametrize("name", ["regression_1", "classification_mlp"])
def test_number_as_complement(name, alpha):
    """One precision outside the basis: predictions, samples and densities."""
    case = make(name)
    la = fit(case, prior_precision=0.3, complement=alpha)
    V = la.basis.vectors
    eye = torch.eye(len(V), dtype=V.dtype)
    Sigma = dense.Reference(case, V).covariance(0.3) + (eye - V @ V.T) / alpha
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    assert_close(la.functional_variance(Js), dense.marginal(Js, Sigma))
    noise = torch.eye(la.rank + la.n_params, dtype=Sigma.dtype)
    A = la.posterior.sample_offsets(*noise.split([la.rank, la.n_params], dim=1))
    assert_close(A.T @ A, Sigma)
    value = la.mean + torch.randn(la.n_params).double()
    expected = torch.distributions.MultivariateNormal(la.mean, Sigma).log_prob(value)
    assert_close(la.log_prob(value), expected, rtol=1e-6)
    assert la.complement == alpha


def test_weight_samples_have_one_precision_outside():
    case = make("regression_1")
    la = fit(case, prior_precision=0.3, complement="matched", n_eigenvalues=3)
    single = float(la.posterior.outside.single)
    matched = la.posterior
    number = matched.with_(complement=single)
    noise = torch.eye(la.rank + la.n_params).double()
    noise = noise.split([la.rank, la.n_params], dim=1)
    assert_close(matched.sample_offsets(*noise), number.sample_offsets(*noise))
    assert la.sample(3).shape == (3, la.n_params)
    assert_close(matched.log_det_precision, number.log_det_precision)


def test_diagnostics_tell_what_is_outside():
    """Degrees of freedom in and outside the basis add up to exact Laplace's."""
    case = make("regression_1")
    la = fit(case, complement="matched", n_eigenvalues=3, evidence="whole")
    la.prior_precision = 0.3
    values = Matched(case, la, 0.3).eigenvalues.clamp_min(0)
    report = diagnose(la, case.loader())
    total = (values / (values + 0.3)).sum()
    assert report.dof_outside == pytest.approx(float(total) - report.effective_dof)
    assert report.evidence_estimated == 0
    assert "outside" in str(report)
    sampled = fit(
        case,
        complement="matched",
        n_eigenvalues=3,
        subsample_size=6,
        evidence="whole",
    )
    assert 0 < diagnose(sampled, case.loader()).evidence_estimated < 1
    classes = make("classification_mlp")
    assert diagnose(fit(classes), classes.loader()).dof_outside is None


def test_default_of_regression_and_its_exceptions():
    """Matched where it can be; the prior for exact fits and priors of several values;
    classification as in the paper."""
    case = make("regression_3")
    loader = case.loader()
    la = ELLALaplace(case.model, "regression", n_eigenvalues=4)
    assert la.complement is None
    la.fit(loader)
    assert la.complement == "matched"
    assert la.evidence == "whole"
    la.prior_precision = torch.ones(la.n_layers)
    assert la.complement == "prior"
    assert torch.isfinite(la(case.x_test)[1]).all()
    la.optimize_prior_precision(prior_structure="layerwise", n_steps=3)
    for kwargs, expected in (
        ({"sigma_noise": torch.tensor([0.1, 0.2, 0.3])}, "prior"),
        ({"stochastic": True}, "matched"),
    ):
        other = ELLALaplace(case.model, "regression", n_eigenvalues=4, **kwargs)
        other.fit(loader)
        assert other.complement == expected
    exact = ELLALaplace(case.model, "regression")
    exact.fit(loader)
    assert exact.complement == "prior"
    classes = make("classification_mlp")
    plain = ELLALaplace(classes.model, "classification")
    plain.fit(classes.loader())
    assert plain.complement == "drop"


def test_before_the_data_the_prior_holds():
    """A basis without data knows nothing of the curvature."""
    case = make("regression_1")
    la = build(case, complement="matched", prior_precision=2.0)
    la.fit_basis(case.loader())
    _, Js = dense.jacobians(case.model, case.x_test, case.params)
    assert_close(la(case.x_test)[1], Js @ Js.mT / 2.0)


def test_checkpoints_caches_and_truncation():
    case = make("regression_1")
    la = fit(case, complement="matched", n_eigenvalues=6, prior_precision=0.3)
    la.evidence = "whole"
    buffer = io.BytesIO()
    torch.save(la.state_dict(), buffer)
    buffer.seek(0)
    again = build(case)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    assert again.complement == "matched"
    assert again.evidence == "whole"
    assert_close(again(case.x_test)[1], la(case.x_test)[1])
    assert_close(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    cache = FeatureCache.from_loader(la, case.loader())
    buffer = io.BytesIO()
    cache.save(buffer)
    buffer.seek(0)
    cache = FeatureCache.load(buffer)
    assert_close(la.predict_from_cache(cache)[1], la(case.x)[1])
    smaller = copy.deepcopy(la)
    smaller.truncate(3)
    refitted = fit(case, complement="matched", n_eigenvalues=3, prior_precision=0.3)
    assert_close(smaller(case.x_test)[1], refitted(case.x_test)[1], rtol=1e-6)
    assert_close(
        smaller.predict_from_cache(cache)[1], refitted(case.x)[1], rtol=1e-5, atol=1e-8
    )
    validation = case.loader()
    la.optimize_prior_precision(method="gridsearch", val_loader=validation, grid_size=5)
    by_cache = float(la.prior_precision)
    losses = []
    for la.prior_precision in torch.logspace(-4, 4, 5):
        mean, var = la(case.x)
        total = var[:, :, 0] + la.sigma_noise**2
        losses.append(float(((mean - case.y) ** 2 / total + total.log()).mean()))
    best = torch.logspace(-4, 4, 5)[torch.tensor(losses).argmin()]
    assert by_cache == pytest.approx(float(best), rel=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"complement": "matching"}, "complement"),
        ({"complement": -1.0}, "complement"),
        ({"complement": float("nan")}, "complement"),
        ({"complement": True}, "complement"),
        ({"evidence": "all"}, "evidence"),
    ],
)
def test_bad_values(kwargs, error):
    with pytest.raises((ValueError, TypeError), match=error):
        build(make("regression_1"), **kwargs)


def test_clear_errors_where_it_cannot_be():
    case = make("regression_1")
    la = fit(case, complement="matched", n_eigenvalues=3)
    la.prior_precision = torch.ones(la.n_layers)
    with pytest.raises(ValueError, match="one prior precision"):
        la(case.x_test)
    dropped = fit(case, n_eigenvalues=3)
    dropped.complement = "matched"
    with pytest.raises(ValueError, match="Fit again"):
        dropped(case.x_test)
    for other in (
        {"case": make("classification_mlp")},
        {"case": make("regression_3"), "sigma_noise": torch.tensor([0.1, 0.2, 0.3])},
        {"case": case, "backend": CurvlinopsEF},
    ):
        with pytest.raises(ValueError, match="needs the spectrum"):
            fit(complement="matched", **other)
    cache = FeatureCache.from_loader(fit(case, complement="prior"), case.loader())
    la = fit(case, complement="matched")
    with pytest.raises(ValueError, match="make the cache"):
        la.predict_from_cache(cache)


def test_small_eigenvalues_of_single_precision_are_not_noise():
    """Large samples go through a Gram matrix, whose rounding must not count as
    curvature, nor what it hides as unseen."""
    torch.manual_seed(0)
    x, y = torch.randn(900, 3), torch.randn(900, 1)
    model = mlp(3, 450, 1).float()
    loader = DataLoader(TensorDataset(x, y), 300)

    def fitted(net, data):
        la = ELLALaplace(net, "regression", subsample_size=900, n_eigenvalues=10)
        la.fit(data)
        la.sigma_noise, la.prior_precision = 0.05, 0.01
        return la

    single = fitted(model, loader)
    data = DataLoader(TensorDataset(x.double(), y.double()), 300)
    double = fitted(copy.deepcopy(model).double(), data)
    assert_close(
        single.log_marginal_likelihood().double(),
        double.log_marginal_likelihood(),
        rtol=1e-3,
    )
    ours, theirs = single(x[:50])[1].double(), double(x[:50].double())[1]
    assert_close(ours.mean(), theirs.mean(), rtol=0.5)


def test_default_for_other_priors_and_back():
    """A layerwise search starts from a scalar prior, and the other way round: the
    complement is the one of the prior that is searched for."""
    case = make("regression_1")
    la = ELLALaplace(case.model, "regression", n_eigenvalues=4)
    la.fit(case.loader())
    for structure, n in (("layerwise", la.n_layers), ("diag", la.n_params)):
        la.prior_precision = 1.0
        la.optimize_prior_precision(prior_structure=structure, n_steps=3)
        assert la.prior_precision.numel() == n
        assert la.complement == "prior"
    la.prior_precision = torch.ones(la.n_layers)
    chosen = la.optimize_calibration(case.loader())
    assert la.complement == "matched"
    assert _nll(la, case) == pytest.approx(chosen.loss, rel=1e-3)


@pytest.mark.parametrize("subsample_size", [40, 10**6])
@pytest.mark.parametrize("prior", [1e-2, 1.0, 30.0, 300.0, 3000.0])
def test_truncated_caches_of_every_level(prior, subsample_size):
    """Directions that leave the basis are unseen where they belong to no level."""
    model, loader, x = _problem(60, 8)
    settings = {"n_eigenvalues": 12, "subsample_size": subsample_size}
    la = ELLALaplace(model, "regression", complement="matched", **settings)
    la.fit(loader)
    la.prior_precision = prior
    cache = FeatureCache.from_loader(la, loader)
    for rank in (12, 7, 2):
        la.truncate(rank)
        var = la(x, diagonal_output=True)[1]
        cached = la.predict_from_cache(cache, diagonal_output=True)[1]
        assert_close(cached, var, rtol=1e-6)


@pytest.mark.parametrize("rank", [5, 20, 50])
def test_a_strong_prior_and_few_sampled_gradients(rank):
    """Where the data know less than the prior its variance is that of exact Laplace,
    also far away: what other gradients usually have is not counted twice."""
    model, loader, x = _problem()
    exact = ELLALaplace(model, "regression", n_eigenvalues="exact")
    la = ELLALaplace(model, "regression", n_eigenvalues=rank, subsample_size=100)
    for each in (exact, la):
        each.fit(loader)
        each.prior_precision = 3000.0
    assert la.posterior.span.ranks[0] >= rank
    for inputs in (x[:50], 6 * x[:50]):
        ratio = la(inputs)[1].mean() / exact(inputs)[1].mean()
        assert 0.9 < float(ratio) < 1.1


def _nll(la, case):
    mean, var = la(case.x, diagonal_output=True)
    normal = torch.distributions.Normal(mean, (var + la.sigma_noise**2).sqrt())
    return float(-normal.log_prob(case.y).mean())


def test_history_is_of_the_posterior_that_is_fitted():
    """The last validation loss of a fit is that of its predictions, also where data
    are added to a fit."""
    case = make("regression_1")
    la = build(case, complement="matched", n_eigenvalues=3, sigma_noise=0.3)
    for override in (True, False):
        la.fit(case.loader(), override=override, val_loader=case.loader())
        assert la.history[-1]["loss"] == pytest.approx(_nll(la, case), rel=1e-6)


def test_more_directions_of_a_sample_are_not_worse():
    """With all M directions of a sample in the basis the rest is still matched."""
    model, loader, _ = _problem(300, 20)
    new = torch.randn(100, 4).double()
    exact = ELLALaplace(model, "regression", sigma_noise=0.1)
    exact.fit(loader)
    expected = exact(new, diagonal_output=True)[1].log().mean()
    for rank in (10, 28, 30):
        la = ELLALaplace(
            model,
            "regression",
            sigma_noise=0.1,
            subsample_size=30,
            n_eigenvalues=rank,
        )
        la.fit(loader)
        difference = la(new, diagonal_output=True)[1].log().mean() - expected
        assert abs(float(difference)) < 1.2


def test_the_default_survives_a_checkpoint():
    """A default that was not set is none in a checkpoint either."""
    case = make("regression_1")
    la = ELLALaplace(case.model, "regression", n_eigenvalues=3)
    la.fit_basis(case.loader())
    again = ELLALaplace(case.model, "regression")
    again.load_state_dict(la.state_dict())
    for each in (la, again):
        each.fit(case.loader(), override=False)
    assert again.complement == la.complement == "matched"
    assert_close(again(case.x_test)[1], la(case.x_test)[1])
    again.prior_precision = torch.ones(again.n_layers)
    assert again.complement == "prior"
    la.complement = torch.tensor(2.0)
    assert la.complement == 2.0
    la.complement = None
    assert la.complement == "matched"


def test_exact_is_what_matched_comes_to():
    case = make("regression_1")
    la = ELLALaplace(case.model, "regression", complement="matched")
    la.fit(case.loader())
    assert la.complement == "prior"
    exact = ELLALaplace(case.model, "regression", n_eigenvalues="exact")
    exact.fit(case.loader())
    assert_close(la(case.x_test)[1], exact(case.x_test)[1])


def test_evidence_after_inference_mode_and_features_before_data():
    case = make("regression_1")
    la = build(case, complement="matched", subsample_size=6, evidence="whole")
    la.n_eigenvalues = 3
    la.fit_basis(case.loader())
    cache = FeatureCache.from_loader(la, case.loader())
    la.fit_features(cache)
    with torch.inference_mode():
        la.log_marginal_likelihood()
        la(case.x_test)
    la.optimize_prior_precision(n_steps=2)
    assert_close(la.predict_from_cache(cache)[1], la(case.x)[1], rtol=1e-6)
