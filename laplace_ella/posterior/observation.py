"""The observation model: likelihood family, noise, temperatures, and the links.

f_var = AAᵀ (+ a residual where the complement of the subspace is kept). Every link
needs row norms, row sums or samples of it: the C×C matrix is formed where the caller
asks for it, and nowhere else. Index legend: B rows, C outputs, K rank, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from laplace.utils.enums import Likelihood

from laplace_ella import metrics
from laplace_ella.derivatives.jacobians import accurate_product
from laplace_ella.support.batches import OutputLayout, Positions, chunks

#: Monte-Carlo samples where no number is given, as in laplace-torch.
N_SAMPLES = 100

#: Numbers that one chunk of Monte-Carlo samples may hold.
SAMPLE_BUDGET = 2**24


class Family(str, Enum):
    """Distribution of the targets given the outputs: real numbers (Λ = I, the noise is
    a factor of its own), one of C classes by the softmax (Λ = diag(p) − ppᵀ), or C
    labels by the sigmoid (Λ = diag(p(1 − p)))."""

    GAUSSIAN = "gaussian"
    CATEGORICAL = "categorical"
    BERNOULLI = "bernoulli"

    @classmethod
    def of(cls, likelihood: Likelihood | str, multi_label: bool = False) -> Family:
        """Return that of Laplace's likelihood; reward models are classifiers."""
        if likelihood == Likelihood.REGRESSION:
            return cls.GAUSSIAN
        return cls.BERNOULLI if multi_label else cls.CATEGORICAL

    @property
    def is_regression(self) -> bool:
        """Whether the targets are real numbers."""
        return self is Family.GAUSSIAN

    def probabilities(self, logits: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return probabilities of classes or labels."""
        if self is Family.BERNOULLI:
            return logits.sigmoid()
        return logits.softmax(dim)


class Link(str, Enum):
    """Approximations of E[softmax(f)] for Gaussian logits f. All but `PROBIT_CENTERED`
    are those of laplace-torch's `LinkApprox`, whose members are accepted as well.

    Examples
    --------
    >>> f = FunctionValues(torch.randn(4, 3), torch.randn(4, 3, 2))
    >>> a, b = class_probabilities(f, "probit_centered"), class_probabilities(f, "mc")
    >>> bool((a - b).abs().max() < 0.3)
    True
    """

    MC = "mc"
    """The mean over samples of f, with an error of order 1/√n_samples."""

    PROBIT = "probit"
    """Each logit divided by √(1 + π/8·var), as in laplace-torch. A shift that is common
    to all logits counts as uncertainty, although the softmax is invariant to it."""

    PROBIT_CENTERED = "probit_centered"
    """Probit of each logit's distance from the mean of the others. Costs as much as
    probit, and is closer to sampling where the logits vary together."""

    BRIDGE = "bridge"
    """The mean of the Dirichlet distribution of the Laplace bridge."""

    BRIDGE_NORM = "bridge_norm"
    """The same after normalising the variance and the scale of f. It does not depend
    on a softmax temperature."""


# A Gaussian over the outputs


@dataclass(frozen=True)
class FunctionValues:
    """Gaussian over the function values at B rows, independent between them: with mean
    `(B, C)` and covariance AAᵀ + residual, for a factor A `(B, C, K)` and a positive
    semi-definite residual `(B, C, C)`."""

    mean: torch.Tensor
    factor: torch.Tensor
    residual: torch.Tensor | None = None

    @classmethod
    def of_outputs(
        cls,
        mean: torch.Tensor,
        factor: torch.Tensor,
        residual: torch.Tensor | None,
        outputs: torch.Tensor,
    ) -> FunctionValues:
        """Return a Gaussian of which only c `outputs` `(B, c)` vary: those that factor
        `(B, c, K)` and residual `(B, c, c)` are of."""

        def wide(rows: torch.Tensor) -> torch.Tensor:
            zeros = rows.new_zeros(*mean.shape, rows.shape[-1])
            return zeros.scatter(1, outputs.unsqueeze(-1).expand_as(rows), rows)

        # Narrow first, then wide: C×K numbers of many classes would cost more than
        # the roots of small matrices. Those have no safe gradient.
        if not factor.requires_grad:
            factor, residual = cls(mean, factor, residual).root(), None
        if residual is not None:
            residual = wide(wide(residual).mT)
        return cls(mean, wide(factor), residual)

    def variance(self) -> torch.Tensor:
        """Return marginal variances `(B, C)`."""
        variance = self.factor.square().sum(-1)
        if self.residual is not None:
            variance = variance + self.residual.diagonal(dim1=-2, dim2=-1)
        return variance

    def covariance(self) -> torch.Tensor:
        """Return f_var `(B, C, C)`."""
        covariance = accurate_product(self.factor, self.factor)
        return covariance if self.residual is None else covariance + self.residual

    def divided_by(self, scale: float) -> FunctionValues:
        """Return the Gaussian of f/scale."""
        residual = None if self.residual is None else self.residual / scale**2
        return FunctionValues(self.mean / scale, self.factor / scale, residual)

    def centered(self) -> FunctionValues:
        """Return the Gaussian of f − mean_c f, which has the same softmax. The factor
        is centred: nothing cancels where the shift has nearly all of the variance."""
        mean = self.mean - self.mean.mean(-1, keepdim=True)
        factor = self.factor - self.factor.mean(-2, keepdim=True)
        residual = self.residual
        if residual is not None:
            residual = residual - residual.mean(-1, keepdim=True)
            residual = residual - residual.mean(-2, keepdim=True)
        return FunctionValues(mean, factor, residual)

    def root(self) -> torch.Tensor:
        """Return R `(B, C, min(K, C))` with RRᵀ = f_var: of the low-rank factor and
        the root of the C×C covariance the narrower one, which takes less noise."""
        if self.residual is None and self.factor.shape[-1] <= self.factor.shape[-2]:
            return self.factor
        return psd_root(self.covariance())


def psd_root(matrix: torch.Tensor) -> torch.Tensor:
    """Return symmetric roots of matrices `(..., n, n)` that may be singular.

    They are continuous in the matrix, so that the same noise gives samples that vary
    smoothly with prior and temperature. Where the diagonal is NaN, so is that row of
    the root, and the others are what they are without it.
    """
    bad = ~torch.isfinite(matrix.diagonal(dim1=-2, dim2=-1))
    known = matrix.masked_fill(bad.unsqueeze(-1) | bad.unsqueeze(-2), 0)
    eigenvalues, Q = torch.linalg.eigh(known.double())
    root = eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
    root = ((Q * root) @ Q.mT).to(matrix.dtype)
    return root.masked_fill(bad.unsqueeze(-1), torch.nan)


def draw(
    f: FunctionValues,
    n_samples: int,
    generator: torch.Generator | None,
    diagonal_output: bool = False,
) -> torch.Tensor:
    """Draw samples `(S, B, C)`, independent between rows.

    `diagonal_output` samples the outputs independently, by their marginal variances.
    """
    B, C = f.mean.shape
    drawn = {"generator": generator, "dtype": f.mean.dtype, "device": f.mean.device}
    if diagonal_output:
        noise = torch.randn(n_samples, B, C, **drawn)
        return f.mean + f.variance().sqrt() * noise
    root = f.root()
    noise = torch.randn(B, root.shape[-1], n_samples, **drawn)
    # (B, C, R) @ (B, R, S) → (B, C, S): one batched product for all samples
    return f.mean + accurate_product(root, noise.mT).permute(2, 0, 1)


# Links


def class_probabilities(
    f: FunctionValues,
    link: Link | str,
    n_samples: int = N_SAMPLES,
    diagonal_output: bool = False,
    generator: torch.Generator | None = None,
    family: Family = Family.CATEGORICAL,
) -> torch.Tensor:
    """Return probabilities `(B, C)` of classes or labels by one of the links.

    `diagonal_output` takes the logits for independent, by their marginal variances.
    """
    link = Link(link)
    if link is Link.PROBIT:
        return family.probabilities(f.mean / (1 + math.pi / 8 * f.variance()).sqrt())
    if link is Link.PROBIT_CENTERED:
        return _centered_probit(f, diagonal_output)
    if link is not Link.MC:
        return _bridge(f, normalize=link is Link.BRIDGE_NORM)
    if not diagonal_output:  # the root is taken once for all chunks
        f = FunctionValues(f.mean, f.root())
    total = torch.zeros_like(f.mean)
    per_sample = f.mean.shape[0] * max(f.factor.shape[1:])
    for part in chunks(n_samples, SAMPLE_BUDGET // max(1, per_sample)):
        samples = draw(f, part.stop - part.start, generator, diagonal_output)
        total = total + family.probabilities(samples).sum(0)
    return total / n_samples


def _centered_probit(f: FunctionValues, diagonal_output: bool) -> torch.Tensor:
    """Return the probit of f − mean_c f, with the variance of each logit's distance
    from the mean of the others, (f_c − mean f)·C/(C − 1): of two classes that of
    f₁ − f₂, with which MacKay's approximation of the sigmoid is met."""
    C, centered = f.mean.shape[-1], f.centered()
    variance = centered.variance()
    if diagonal_output:
        marginal = f.variance()
        variance = marginal * (1 - 2 / C) + marginal.sum(-1, keepdim=True) / C**2
    variance = variance * (C / max(C - 1, 1)) ** 2
    return (centered.mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)


def _bridge(f: FunctionValues, normalize: bool) -> torch.Tensor:
    """Return the mean of the Laplace bridge's Dirichlet; `normalize` corrects the
    variance first."""
    C = f.mean.shape[-1]
    tiny = torch.finfo(f.mean.dtype).tiny
    # Condition on Σ_c f_c = 0, from the row sums f_var·1 = A(Aᵀ1) alone.
    rows = accurate_product(f.factor, f.factor.sum(1, keepdim=True)).squeeze(-1)
    if f.residual is not None:
        rows = rows + f.residual.sum(-1)
    total = rows.sum(-1, keepdim=True).clamp_min(tiny)
    mean = f.mean - rows * f.mean.sum(-1, keepdim=True) / total
    var = (f.variance() - rows.square() / total).clamp_min(tiny)
    if normalize:
        c = var.mean(-1, keepdim=True) / math.sqrt(C / 2)
        mean, var = mean / c.sqrt(), var / c
    # α = (1 − 2/C + e^f Σ_j e^{-f_j} / C²) / var, in logarithms: e^f may overflow
    log_ratio = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(C)
    offset = torch.full_like(log_ratio, max(1 - 2 / C, 0.0)).log()
    return torch.softmax(torch.logaddexp(offset, log_ratio) - var.log(), dim=-1)


# What is assumed of the targets


@dataclass(frozen=True)
class ObservationModel:
    """How targets arise from the outputs of the model.

    Attributes
    ----------
    sigma_noise : torch.Tensor
        standard deviation of the noise: a scalar, or one per output `(C,)`
    temperature : float or torch.Tensor
        T, by which the log likelihood is divided
    softmax_temperature : float
        τ, by which the outputs are divided before the softmax or sigmoid of
        predictions; loss and curvature are those of the outputs as they are
    top_outputs : int, optional
        predicted probabilities know the variance of so many outputs, the largest ones
    """

    family: Family
    layout: OutputLayout
    sigma_noise: torch.Tensor
    temperature: float | torch.Tensor
    softmax_temperature: float = 1.0
    top_outputs: int | None = None

    def check_noise(self, positions: Positions) -> None:
        """Refuse a number of noises that is neither one nor that of the outputs."""
        n, C = self.sigma_noise.numel(), positions.n_channels
        if n not in (1, C):
            raise ValueError(
                f"sigma_noise has {n} values, the model {C} outputs"
                f"{' at each position' if positions.shape else ''}: pass one "
                "number, or one for each output."
            )

    def check_link(self, link: Link, n_channels: int | None = None) -> None:
        """Refuse a link that is not for predictions of C outputs, if C is known."""
        if self.family is Family.BERNOULLI and link not in (Link.PROBIT, Link.MC):
            raise ValueError(
                f"link_approx={link.value!r} is for one class of several: the Laplace "
                "bridge leads to a Dirichlet, and a common shift matters to sigmoids. "
                "With multi_label=True use link_approx='probit' or 'mc'."
            )
        top = self.top_outputs
        some = top is not None and (n_channels is None or top < n_channels)
        if some and link in (Link.BRIDGE, Link.BRIDGE_NORM):
            raise ValueError(
                f"link_approx={link.value!r} needs the variance of all classes, got "
                f"top_outputs={top}. Set top_outputs=None, or use 'probit', "
                "'probit_centered' or 'mc'."
            )

    def weigh(self, H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return curvature `(K, K)` and the factor f it is multiplied by.

        Curvature per output, `(C, K, K)`, is weighted by the output's noise.
        """
        precision = self.sigma_noise.square().reciprocal()
        if H.ndim == 2:
            return H, precision / self.temperature
        weights = self.sigma_noise.double().square().reciprocal().expand(len(H))
        one = precision.new_ones(())
        return torch.einsum("c,ckl->kl", weights, H), one / self.temperature

    def log_likelihood(
        self, loss: torch.Tensor, n_data: int, n_outputs: int
    ) -> torch.Tensor:
        """Return the log likelihood of N data, differentiable in the noise, from their
        loss, a sum over all outputs or one value per output `(C,)`."""
        sigma = self.sigma_noise
        factor = 1 / sigma.square() / self.temperature
        if not self.family.is_regression:
            return -(factor * loss).sum()
        loss = loss.reshape(-1)
        n_each = n_data * n_outputs / loss.numel()
        noise = sigma.reshape(-1).expand_as(loss)
        normalizer = n_each * (noise * math.sqrt(2 * math.pi)).log()
        return -(factor * loss + normalizer).sum()

    def logits(self, f: FunctionValues) -> FunctionValues:
        """Return f/τ, of which the probabilities are the softmax or sigmoid."""
        tau = self.softmax_temperature
        return f if tau == 1 else f.divided_by(tau)  # by 1 the very same numbers

    def probabilities(
        self,
        f: FunctionValues,
        link_approx: Link | str,
        n_samples: int,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return probabilities `(B, C)` of classes or labels by one of the links."""
        how = link_approx, n_samples, diagonal_output, generator
        return class_probabilities(self.logits(f), *how, self.family)

    def sampled_probabilities(self, samples: torch.Tensor) -> torch.Tensor:
        """Return probabilities of samples `(n, B, ...)` of the model's output."""
        dim = 2 if self.layout is OutputLayout.CHANNELS_FIRST else -1
        return self.family.probabilities(samples / self.softmax_temperature, dim)

    def example_losses(self) -> Callable[..., torch.Tensor]:
        """Return the negative log likelihood of every example `(N,)` as a function of
        probabilities and targets; for regression of means, variances of the function
        `(N, C)` and targets."""
        if self.family is Family.CATEGORICAL:
            return metrics.nll_per_example
        if self.family is Family.BERNOULLI:
            return metrics.bernoulli_nll_per_example
        noise = self.sigma_noise.detach().square()

        def nll(mean: torch.Tensor, var: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return metrics.gaussian_nll_per_example(mean, var + noise.to(var), y)

        return nll

    def default_loss(self) -> Callable[..., float]:
        """Return their mean as a function, the loss of every search."""
        losses = self.example_losses()
        return lambda *prediction: float(losses(*prediction).mean())
