"""Which inputs to ask the labels of: scores, and batches chosen jointly.

Classification works on samples of class probabilities `(S, B, C)` of a pool of B
inputs, those of `la.predictive_samples(pool, n_samples=S, joint=True)` or of any other
posterior. A score `(B,)` is larger where a label is wanted more: `scores.topk(n)`.
`select_joint` chooses a batch whose labels together tell most about the function
(BatchBALD): near-duplicates, which every score ranks alike, are asked once.
Regression works on the joint covariance of `la(pool, joint=True)`, in closed form.

Which posterior, which score
----------------------------
Train with weight decay, and let the posterior have the prior that it stands for:

    la = Laplace(
        model, "classification", "all", "nystrom",
        n_eigenvalues="exact", prior_precision=1.0,
    )  # trained on Σ cross entropy + ½ prior_precision ‖θ‖²
    la.fit(labelled_loader)
    samples = la.predictive_samples(pool, n_samples=512, joint=True)
    batch = laplace_ella.acquisition.margin(samples).topk(10).indices

`margin` was the best score with every posterior on digits and MNIST, and no better
with a posterior than with the network alone. What labels tell about the function,
`bald` and `select_joint`, needs the exact posterior: with the K = 20 directions of
classification's default (whatever the prior) or the last layer, `bald` was worse than
chance. Figures: `examples/paper/RESULTS.md`, "Active learning".

Index legend: S samples, B inputs, C classes or outputs, M configurations of labels.

References
----------
Houlsby et al. 2011, Bayesian Active Learning by Disagreement; Kirsch et al. 2019,
BatchBALD; Krause et al. 2008, Near-Optimal Sensor Placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from laplace_ella import metrics
from laplace_ella.support.batches import chunks, has_values
from laplace_ella.support.checks import check_generator, check_positive, positive_int

__all__ = [
    "Selection",
    "bald",
    "entropy",
    "information_gain",
    "least_confidence",
    "margin",
    "select_information_gain",
    "select_joint",
]

#: Numbers that one step of a computation holds besides its arguments.
BUDGET = 2**24

#: How far the probabilities of one prediction may be from summing to one.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Selection:
    """Inputs chosen one after the other.

    Attributes
    ----------
    indices : torch.Tensor
        `(n,)`, positions in the pool, in the order in which they were chosen
    gains : torch.Tensor
        `(n,)`, what each tells about the function beyond those before it, in nats;
        their sum is what all of them tell

    Examples
    --------
    >>> import torch
    >>> covariance = torch.tensor([[2.0, 1.9, 0.0], [1.9, 2.0, 0.0], [0.0, 0.0, 1.0]])
    >>> chosen = select_information_gain(covariance, n_queries=2, sigma_noise=0.5)
    >>> chosen.indices  # the second tells little that the first has not told
    tensor([0, 2])
    """

    indices: torch.Tensor
    gains: torch.Tensor


# --- scores of classification: samples (S, B, C) → (B,) -----------------------------


def entropy(samples: torch.Tensor) -> torch.Tensor:
    """Entropy of the mean prediction, in nats: how uncertain the label is.

    Parameters
    ----------
    samples : torch.Tensor
        class probabilities `(S, B, C)`

    Returns
    -------
    torch.Tensor
        `(B,)`

    Examples
    --------
    >>> certain, torn = [1.0, 0.0], [0.5, 0.5]
    >>> entropy(torch.tensor([[certain, torn], [certain, torn]]))
    tensor([0.0000, 0.6931])
    """
    return _by_inputs(samples, lambda p: metrics.entropy(p.mean(0))).to(samples)


def bald(samples: torch.Tensor) -> torch.Tensor:
    """Mutual information of label and function, in nats: how much samples disagree.

    The entropy of the mean prediction less the mean entropy of the samples; what a
    label is expected to tell about the function, and not noise in it.

    Parameters
    ----------
    samples : torch.Tensor
        class probabilities `(S, B, C)`

    Returns
    -------
    torch.Tensor
        `(B,)`, from 0 to the logarithm of C or of S, whichever is smaller

    Examples
    --------
    An input that all samples are torn about, and one that they contradict each other
    about: the same entropy, but only the second can be learned.

    >>> torn, yes, no = [0.5, 0.5], [1.0, 0.0], [0.0, 1.0]
    >>> bald(torch.tensor([[torn, yes], [torn, no]]))
    tensor([0.0000, 0.6931])
    """

    def score(p: torch.Tensor) -> torch.Tensor:
        information = metrics.entropy(p.mean(0)) - metrics.entropy(p).mean(0)
        return information.clamp_min(0)  # Jensen: not negative, up to rounding

    return _by_inputs(samples, score).to(samples)


def least_confidence(samples: torch.Tensor) -> torch.Tensor:
    """1 − max_c p_c of the mean prediction p.

    Parameters
    ----------
    samples : torch.Tensor
        class probabilities `(S, B, C)`

    Returns
    -------
    torch.Tensor
        `(B,)`

    Examples
    --------
    >>> least_confidence(torch.tensor([[[0.75, 0.25]], [[0.25, 0.75]]]))
    tensor([0.5000])
    """
    return _by_inputs(samples, lambda p: 1 - p.mean(0).amax(-1)).to(samples)


def margin(samples: torch.Tensor) -> torch.Tensor:
    """Minus the distance of the two largest class probabilities of the mean prediction.

    Parameters
    ----------
    samples : torch.Tensor
        class probabilities `(S, B, C)`

    Returns
    -------
    torch.Tensor
        `(B,)`, from -1 to 0

    Examples
    --------
    >>> margin(torch.tensor([[[0.5, 0.25, 0.25], [0.375, 0.375, 0.25]]]))
    tensor([-0.2500,  0.0000])
    """

    def score(p: torch.Tensor) -> torch.Tensor:
        first, second = p.mean(0).topk(2, dim=-1).values.unbind(-1)
        return second - first

    return _by_inputs(samples, score).to(samples)


def _by_inputs(
    samples: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A score (B,) of samples (S, B, C), in double precision, by chunks of inputs."""
    S, B, C = _checked(samples)
    parts = chunks(B, BUDGET // (S * C))
    return torch.cat([score(samples[:, part].double()) for part in parts])


# --- batches of classification ------------------------------------------------------


def select_joint(
    samples: torch.Tensor,
    n_queries: int,
    *,
    n_configurations: int = 1024,
    generator: torch.Generator | None = None,
) -> Selection:
    """Inputs whose labels together tell most about the function (BatchBALD), greedily.

    Chosen one after the other, each by the mutual information of its label and the
    function given the labels of those before it, whatever these will be. Greedy choice
    is within 1 − 1/e of the best batch, for mutual information is submodular.

    All C^n configurations of n labels are taken while they are at most
    `n_configurations`: gains are those of the samples, exactly. From then on that many
    configurations stand for all; they are drawn by their probability (systematic
    resampling), and gains are unbiased estimates.

    S samples tell apart no more than S functions: all gains together stay below log S.
    Take more samples (512 and more) for larger batches.

    Parameters
    ----------
    samples : torch.Tensor
        class probabilities `(S, B, C)` of functions seen at all inputs at once,
        `la.predictive_samples(pool, n_samples=S, joint=True)`; of independent samples,
        without `joint`, the labels of different inputs would have nothing in common
    n_queries : int
        size of the batch, at most B
    n_configurations : int, default=1024
        M, configurations of labels that are kept; a step takes M·S·B·C multiplications
    generator : torch.Generator, optional
        source of the configurations, on the device of the samples; without it they are
        the same at every call

    Returns
    -------
    Selection

    Examples
    --------
    The first two inputs are copies of each other. By `bald` they are the best two; the
    batch has one of them and the third.

    >>> yes, no, maybe = [0.99, 0.01], [0.01, 0.99], [0.8, 0.2]
    >>> samples = torch.tensor([
    ...     [yes, yes, maybe], [yes, yes, no], [no, no, maybe], [no, no, no]
    ... ])
    >>> sorted(bald(samples).topk(2).indices.tolist())
    [0, 1]
    >>> sorted(select_joint(samples, 2).indices.tolist())
    [0, 2]
    """
    _, B, _ = _checked(samples)
    _check_queries(n_queries, B)
    positive_int("n_configurations", n_configurations)
    check_generator(generator, samples.device)
    if generator is None:
        generator = torch.Generator(samples.device).manual_seed(0)
    known = _by_inputs(samples, lambda p: metrics.entropy(p).mean(0))
    labels = _Configurations.none(samples)
    free = torch.ones(B, dtype=torch.bool, device=samples.device)
    indices, gains = [], []
    for _ in range(n_queries):
        gain = labels.entropy_of_another(samples) - known
        best = gain.where(free, -torch.inf).argmax()
        indices.append(best)
        gains.append(gain[best].clamp_min(0))
        free = free & (torch.arange(B, device=free.device) != best)
        p = samples[:, best].double()
        labels = labels.with_label(p, n_configurations, generator)
    return Selection(torch.stack(indices), torch.stack(gains).to(samples))


@dataclass(frozen=True)
class _Configurations:
    """Labels y of the inputs chosen so far: what they would tell of the samples.

    Attributes
    ----------
    probability : torch.Tensor
        p(y), or the weights of configurations that were drawn, `(M,)`
    posterior : torch.Tensor
        p(s | y), the weight of each sample after the labels, `(M, S)`
    """

    probability: torch.Tensor
    posterior: torch.Tensor

    @classmethod
    def none(cls, samples: torch.Tensor) -> _Configurations:
        """The one configuration of no label."""
        S = len(samples)
        one = samples.new_ones(1, dtype=torch.float64)
        return cls(one, one.expand(1, S) / S)

    def entropy_of_another(self, samples: torch.Tensor) -> torch.Tensor:
        """Entropy (B,) of the label of each input, given the labels so far: the mean
        of H(Σ_s p(s | y) p_s) over y."""
        _, B, C = samples.shape
        M = len(self.probability)
        parts = []
        for part in chunks(B, BUDGET // (C * max(M, len(samples)))):
            p = samples[:, part].double()  # (S, b, C)
            predicted = (self.posterior @ p.flatten(1)).view(M, -1, C)
            parts.append(self.probability @ metrics.entropy(predicted))
        return torch.cat(parts)

    def with_label(
        self, p: torch.Tensor, at_most: int, generator: torch.Generator
    ) -> _Configurations:
        """Every configuration with each label of one more input, p (S, C); if these are
        too many, as many as there may be, drawn by their probability."""
        predicted = self.posterior @ p  # p(c | y), (M, C)
        probability = (self.probability.unsqueeze(-1) * predicted).flatten()
        chosen = torch.arange(len(probability), device=p.device)
        if len(probability) > at_most:
            chosen = _systematic(probability, at_most, generator)
            probability = probability.new_full((at_most,), 1 / at_most)
        before = chosen // p.shape[1]
        # p(s | y, c); an impossible configuration tells nothing and weighs nothing
        joint = self.posterior[before] * p.mT[chosen % p.shape[1]]
        total = joint.sum(-1, keepdim=True).clamp_min(metrics.SMALLEST)
        return _Configurations(probability, joint / total)


def _systematic(
    probability: torch.Tensor, n: int, generator: torch.Generator
) -> torch.Tensor:
    """n indices in proportion to their probability, each as often as it should be up to
    less than one: the cumulative sums at n equidistant points with a random offset."""
    cumulative = probability.cumsum(0)
    offset = torch.rand(
        1, generator=generator, dtype=torch.float64, device=cumulative.device
    )
    points = (torch.arange(n, device=cumulative.device) + offset) / n * cumulative[-1]
    return torch.searchsorted(cumulative, points).clamp_max(len(cumulative) - 1)


# --- regression: covariance of function values (B·C, B·C) ---------------------------


def information_gain(
    covariance: torch.Tensor, sigma_noise: float | torch.Tensor
) -> torch.Tensor:
    """What observing each input tells about the function, ½ log det(I + Σ/σ²) in nats.

    For one output this ranks inputs like their variance.

    Parameters
    ----------
    covariance : torch.Tensor
        covariances of the C outputs at each of B inputs `(B, C, C)`, the second of
        `la(pool)`
    sigma_noise : float or torch.Tensor
        standard deviation of the observations, `la.sigma_noise`; one, or one per output

    Returns
    -------
    torch.Tensor
        `(B,)`

    Examples
    --------
    >>> information_gain(torch.tensor([[[0.0]], [[3.0]]]), sigma_noise=1.0)
    tensor([0.0000, 0.6931])
    """
    if covariance.ndim != 3 or covariance.shape[1] != covariance.shape[2]:
        raise ValueError(
            "Expected covariances (B, C, C), as la(x) gives them, got shape "
            f"{tuple(covariance.shape)}."
        )
    _check_finite(covariance, "covariance")
    precision = _noise_precision(sigma_noise, covariance, covariance.shape[-1])
    return _log_det_gain(covariance.double(), precision).to(covariance)


def select_information_gain(
    covariance: torch.Tensor,
    n_queries: int,
    sigma_noise: float | torch.Tensor,
    n_outputs: int = 1,
) -> Selection:
    """Inputs whose observations together tell most about the function, greedily.

    Each is the one with the largest ½ log det(I + Σ/σ²), Σ its covariance given the
    observations of those before it: for one output the largest conditional variance.
    The values to come play no part, so that the gains are exact, and their sum is the
    information gain of the batch.

    Parameters
    ----------
    covariance : torch.Tensor
        joint covariance of the pool `(B·C, B·C)`, the second of `la(pool, joint=True)`;
        it is not changed or copied
    n_queries : int
        size of the batch, at most B
    sigma_noise : float or torch.Tensor
        standard deviation of the observations, `la.sigma_noise`; one, or one per output
    n_outputs : int, default=1
        C, outputs that are observed together when an input is chosen

    Returns
    -------
    Selection

    Examples
    --------
    The first two inputs are nearly the same; one of them is enough.

    >>> covariance = torch.tensor([[4.0, 3.9, 0.0], [3.9, 3.9, 0.0], [0.0, 0.0, 1.0]])
    >>> select_information_gain(covariance, 2, sigma_noise=0.1).indices
    tensor([0, 2])
    """
    if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1]:
        raise ValueError(
            "Expected one joint covariance (B·C, B·C), as la(x, joint=True) gives it, "
            f"got shape {tuple(covariance.shape)}."
        )
    _check_finite(covariance, "covariance")
    C = positive_int("n_outputs", n_outputs)
    B, rest = divmod(len(covariance), C)
    if rest or not B:
        raise ValueError(
            f"The covariance has {len(covariance)} rows, which is no multiple of "
            f"n_outputs={C}."
        )
    _check_queries(n_queries, B)
    precision = _noise_precision(sigma_noise, covariance, C)
    grouped = covariance.view(B, C, B, C)
    # The covariance given what was chosen is the given one less RRᵀ; of it only the
    # blocks (B, C, C) of single inputs are kept, and R.
    remaining = grouped.diagonal(dim1=0, dim2=2).movedim(-1, 0).double()
    root = remaining.new_zeros(B, C, C * n_queries)
    noise = precision.reciprocal().diag()
    free = torch.ones(B, dtype=torch.bool, device=covariance.device)
    indices, gains = [], []
    for i in range(n_queries):
        gain = _log_det_gain(remaining, precision)
        best = gain.where(free, -torch.inf).argmax()
        indices.append(best)
        gains.append(gain[best])
        free = free & (torch.arange(B, device=free.device) != best)
        column = grouped[:, :, best].double() - root @ root[best].mT  # (B, C, C)
        factor = torch.linalg.cholesky(remaining[best] + noise)
        block = torch.linalg.solve_triangular(factor.mT, column, upper=True, left=False)
        root[:, :, i * C : (i + 1) * C] = block
        remaining = remaining - block @ block.mT
    return Selection(torch.stack(indices), torch.stack(gains).to(covariance))


def _log_det_gain(covariance: torch.Tensor, precision: torch.Tensor) -> torch.Tensor:
    """½ log det(I + Σ/σ²) (B,) of covariances (B, C, C), noise precisions (C,)."""
    if covariance.shape[-1] == 1:
        return 0.5 * (covariance[:, 0, 0].clamp_min(0) * precision).log1p()
    root = precision.sqrt()
    values = torch.linalg.eigvalsh(root.unsqueeze(-1) * covariance * root)
    return 0.5 * values.clamp_min(0).log1p().sum(-1)


# --- checks ---------------------------------------------------------------------------


def _checked(samples: torch.Tensor) -> torch.Size:
    """Shape (S, B, C) of samples of class probabilities."""
    if samples.ndim != 3 or not samples.numel() or samples.shape[-1] < 2:
        raise ValueError(
            "Expected samples of class probabilities (S, B, C), with at least two "
            f"classes, got shape {tuple(samples.shape)}. They come from "
            "la.predictive_samples(x, joint=True); of one position at a time where the "
            "model has outputs at many."
        )
    _check_finite(samples, "samples")
    if has_values(samples):
        off = (samples.sum(-1, dtype=torch.float64) - 1).abs().max()
        tolerance = max(TOLERANCE, 4 * torch.finfo(samples.dtype).eps)
        if bool((off > tolerance) | (samples < 0).any()):
            raise ValueError(
                "Expected probabilities that sum to one over the last dimension, got "
                f"sums up to {float(off):.3g} away from it or negative numbers. Of "
                "logits take samples.softmax(-1); of labels that are there or not "
                "(multi_label) torch.stack([p, 1 - p], -1), each label as an input."
            )
    return samples.shape


def _check_finite(values: torch.Tensor, what: str) -> None:
    if not values.is_floating_point():
        raise ValueError(f"Expected {what} of floating point, got {values.dtype}.")
    if has_values(values) and not bool(values.isfinite().all()):
        raise ValueError(f"NaN or infinity in the {what}; check the posterior's.")


def _check_queries(n_queries: int, n_inputs: int) -> None:
    if positive_int("n_queries", n_queries) > n_inputs:
        raise ValueError(
            f"n_queries must be at most the number of inputs, {n_inputs}, got "
            f"{n_queries}."
        )


def _noise_precision(
    sigma_noise: float | torch.Tensor, like: torch.Tensor, n_outputs: int
) -> torch.Tensor:
    """1/σ² of each of C outputs, (C,), float64 on the device of the covariance."""
    check_positive("sigma_noise", sigma_noise)
    sigma = torch.as_tensor(sigma_noise, dtype=torch.float64, device=like.device)
    if sigma.numel() not in (1, n_outputs):
        raise ValueError(
            f"sigma_noise must be one number or one per output ({n_outputs}), got "
            f"{sigma.numel()} numbers."
        )
    return sigma.detach().flatten().square().reciprocal().expand(n_outputs)
