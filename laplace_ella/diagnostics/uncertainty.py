"""Where the uncertainty of a prediction comes from: the data or the parameters.

Classification: the entropy of the mean prediction is the mean entropy of the sampled
predictions (aleatoric: the classes overlap) plus their mutual information with the
parameters (epistemic: the samples disagree). Regression: variances add up.

Index legend: C outputs, B batch, S samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from laplace.utils.enums import Likelihood
from torch.utils.data import DataLoader

from laplace_ella import metrics
from laplace_ella.ella import ELLALaplace
from laplace_ella.posterior import predictive
from laplace_ella.posterior.likelihood import Family
from laplace_ella.support.batches import chunks, to_device
from laplace_ella.support.checks import check_generator, positive_int
from laplace_ella.support.layout import Positions
from laplace_ella.support.loaders import loader_batches
from laplace_ella.support.preserve import random_states

__all__ = [
    "Uncertainty",
    "UncertaintyMeasure",
    "decompose",
]


class UncertaintyMeasure(str, Enum):
    """In what the parts of an uncertainty are measured."""

    ENTROPY = "entropy"
    """Nats; one number per input, between 0 and log C, or one per label of several."""

    VARIANCE = "variance"
    """Squares of the targets' unit; one number per input and output."""


@dataclass(frozen=True)
class Uncertainty:
    """A decomposed prediction: total = aleatoric + epistemic, all non-negative.

    Attributes
    ----------
    mean : torch.Tensor
        predicted probabilities, or the mean of a regression, `(B, C)`
    total : torch.Tensor
        entropy of `mean` `(B,)`, or variance of an observation `(B, C)`. Of outputs at
        many positions: one entropy per position, variances in the shape of the output;
        with `multi_label` one entropy per output
    aleatoric : torch.Tensor
        mean entropy of the sampled predictions `(B,)`, or noise variance `(B, C)`
    epistemic : torch.Tensor
        mutual information of prediction and parameters `(B,)`, or variance of the
        function `(B, C)`
    measure : UncertaintyMeasure
        entropy or variance

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> data = TensorDataset(torch.randn(50, 2), torch.randn(50, 1))
    >>> la = Laplace(torch.nn.Linear(2, 1), "regression", "all", "nystrom")
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> parts = laplace_ella.decompose(la, torch.randn(4, 2))
    >>> torch.equal(parts.total, parts.aleatoric + parts.epistemic)
    True
    >>> parts.measure.value
    'variance'
    """

    mean: torch.Tensor
    total: torch.Tensor
    aleatoric: torch.Tensor
    epistemic: torch.Tensor
    measure: UncertaintyMeasure


def decompose(
    la: BaseLaplace,
    x: Any,
    n_samples: int = 512,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> Uncertainty:
    """Total, aleatoric and epistemic uncertainty of the linearised predictive.

    Classification averages over Monte-Carlo samples of the logits, as `la(x,
    link_approx="mc")` does; a finite S underestimates the epistemic part by about its
    own spread over S. Regression needs no samples. A reward model's rewards have no
    observation noise: their aleatoric part is 0.

    Parameters
    ----------
    la : ELLALaplace, or another member of the Laplace family
        fitted
    x : torch.Tensor, MutableMapping or DataLoader
        B inputs, or a loader of batches `(inputs, targets)`, whose targets play no
        part
    n_samples : int, default=512
        S, drawn in chunks of bounded memory
    generator : torch.Generator, optional
        source of the samples; without it those of ELLA are made from `la.seed`, the
        same at every call
    progress_bar : bool, default=False
        of the batches of a loader

    Returns
    -------
    Uncertainty

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Linear(2, 3)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=5)
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> parts = laplace_ella.decompose(la, torch.randn(4, 2))
    >>> bool((parts.epistemic >= 0).all()), parts.total.shape
    (True, torch.Size([4]))
    """
    positive_int("n_samples", n_samples)
    check_generator(generator, next(la.model.parameters()).device)
    if isinstance(x, DataLoader):
        device = next(la.model.parameters()).device
        with random_states(device, x):
            batches = loader_batches(
                x, device, la.dict_key_y, "[Uncertainty]", progress_bar
            )
            parts = [decompose(la, b, n_samples, generator) for b, _ in batches]
        if not parts:
            raise ValueError("The loader yielded no batch; there is nothing to tell.")
        return _concatenate(parts)
    if isinstance(la, ELLALaplace):
        return _decompose_ella(la, x, n_samples, generator)
    return _decompose_other(la, x, n_samples, generator)


def _decompose_ella(
    la: ELLALaplace, x: Any, n_samples: int, generator: torch.Generator | None
) -> Uncertainty:
    with la.predicting() as predictor:
        values, positions = predictor.function_values(
            to_device(x, predictor.linearizer.device),
            predictor.observation.top_outputs,
        )
        if la.likelihood == Likelihood.CLASSIFICATION:
            generator = generator or la.fitter.fresh_generator()
            observation = predictor.observation
            parts = _decompose_classes(
                observation.logits(values), n_samples, generator, observation.family
            )
        else:
            noise = _noise_variance(la, values.mean)
            parts = _decompose_variance(values.mean, values.variance(), noise)
        return _restore(parts, positions)


def _decompose_other(
    la: BaseLaplace, x: Any, n_samples: int, generator: torch.Generator | None
) -> Uncertainty:
    """The same by the interface that all of laplace-torch's classes have."""
    if la.likelihood == Likelihood.CLASSIFICATION:
        logits = la.functional_samples(
            x, pred_type=_pred_type(la), n_samples=n_samples, generator=generator
        )
        p = logits.detach().double().softmax(-1)
        mean, conditional = p.mean(0), metrics.entropy(p).mean(0)
        return _entropies(mean, conditional, metrics.entropy, logits.dtype)
    mean, covariance = la(x, pred_type=_pred_type(la))
    mean, covariance = mean.detach(), covariance.detach()
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return _decompose_variance(mean, variance, _noise_variance(la, mean))


def _pred_type(la: BaseLaplace) -> str:
    """Weight-space members predict by "glm", function-space members by "gp"."""
    return "glm" if isinstance(la, ParametricLaplace) else "gp"


def _concatenate(parts: list[Uncertainty]) -> Uncertainty:
    def together(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return Uncertainty(
        together("mean"),
        together("total"),
        together("aleatoric"),
        together("epistemic"),
        parts[0].measure,
    )


def _restore(parts: Uncertainty, positions: Positions) -> Uncertainty:
    """Rows in the shape of the model's output, or of its positions."""

    def shaped(rows: torch.Tensor) -> torch.Tensor:
        restore = positions.restore if rows.ndim == 2 else positions.restore_positions
        return restore(rows)

    return Uncertainty(
        shaped(parts.mean),
        shaped(parts.total),
        shaped(parts.aleatoric),
        shaped(parts.epistemic),
        parts.measure,
    )


def _noise_variance(la: BaseLaplace, mean: torch.Tensor) -> torch.Tensor:
    """σ² of the observations `(B, C)`."""
    if la.likelihood != Likelihood.REGRESSION:
        return torch.zeros_like(mean)
    return torch.as_tensor(la.sigma_noise).square().to(mean).expand_as(mean)


def _decompose_variance(
    mean: torch.Tensor, variance: torch.Tensor, noise: torch.Tensor
) -> Uncertainty:
    epistemic = variance.clamp_min(0)
    return Uncertainty(
        mean=mean,
        total=epistemic + noise,
        aleatoric=noise.clone(),
        epistemic=epistemic,
        measure=UncertaintyMeasure.VARIANCE,
    )


def _decompose_classes(
    values: predictive.FunctionValues,
    n_samples: int,
    generator: torch.Generator | None,
    family: Family,
) -> Uncertainty:
    bernoulli = family is Family.BERNOULLI
    entropies = metrics.binary_entropy if bernoulli else metrics.entropy
    f = predictive.FunctionValues(values.mean, values.root())  # one root for all chunks
    dtype = f.mean.dtype
    B, C = f.mean.shape
    probabilities = torch.zeros_like(f.mean, dtype=torch.float64)
    conditional = torch.zeros_like(entropies(probabilities))
    per_sample = max(1, B * max(C, f.factor.shape[-1]))
    for part in chunks(n_samples, predictive.SAMPLE_BUDGET // per_sample):
        logits = predictive.draw(f, part.stop - part.start, generator)
        p = family.probabilities(logits)
        probabilities = probabilities + p.double().sum(0)
        conditional = conditional + entropies(p).double().sum(0)
    return _entropies(
        probabilities / n_samples, conditional / n_samples, entropies, dtype
    )


def _entropies(
    mean: torch.Tensor,
    conditional: torch.Tensor,
    entropies: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> Uncertainty:
    """Parts from the mean prediction and the mean entropy of the samples."""
    total = entropies(mean)
    # Jensen: the mean entropy is not larger, up to rounding
    aleatoric = torch.minimum(conditional, total)
    return Uncertainty(
        mean=mean.to(dtype),
        total=total.to(dtype),
        aleatoric=aleatoric.to(dtype),
        epistemic=(total - aleatoric).to(dtype),
        measure=UncertaintyMeasure.ENTROPY,
    )
