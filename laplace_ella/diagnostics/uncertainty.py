"""Where the uncertainty of a prediction comes from: the data or the parameters.

Classification: the entropy of the mean prediction is the mean entropy of the sampled
predictions (aleatoric: the classes overlap) plus their mutual information with the
parameters (epistemic: the samples disagree). Regression: variances add up.

Index legend: C outputs, B batch, S samples.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from laplace.utils.enums import Likelihood

from laplace_ella.posterior import predictive
from laplace_ella.posterior.likelihood import Family
from laplace_ella.support.batches import chunks, to_device
from laplace_ella.support.layout import Positions

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace

__all__ = [
    "Uncertainty",
    "UncertaintyMeasure",
    "binary_entropy",
    "decompose",
    "entropy",
]


class UncertaintyMeasure(str, Enum):
    """In what the parts of an uncertainty are measured."""

    ENTROPY = "entropy"
    """Nats; one number an input, between 0 and log C, or one a label of several."""

    VARIANCE = "variance"
    """Squares of the targets' unit; one number an input and output."""


@dataclass(frozen=True)
class Uncertainty:
    """A decomposed prediction: total = aleatoric + epistemic, all non-negative.

    Attributes
    ----------
    mean : torch.Tensor
        predicted probabilities, or the mean of a regression, `(B, C)`
    total : torch.Tensor
        entropy of `mean` `(B,)`, or variance of an observation `(B, C)`. Of outputs at
        many positions: one entropy a position, variances in the shape of the output;
        with `multi_label` one entropy an output
    aleatoric : torch.Tensor
        mean entropy of the sampled predictions `(B,)`, or noise variance `(B, C)`
    epistemic : torch.Tensor
        mutual information of prediction and parameters `(B,)`, or variance of the
        function `(B, C)`
    measure : UncertaintyMeasure
        entropy or variance
    """

    mean: torch.Tensor
    total: torch.Tensor
    aleatoric: torch.Tensor
    epistemic: torch.Tensor
    measure: UncertaintyMeasure


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """−Σ_c p_c log p_c in nats over the last dimension, with 0 log 0 = 0."""
    return torch.special.entr(probabilities).sum(-1)


def binary_entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each label that is there with probability p."""
    return torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)


def decompose(
    la: ELLALaplace,
    x: torch.Tensor | MutableMapping[str, Any],
    n_samples: int = 512,
    generator: torch.Generator | None = None,
) -> Uncertainty:
    """Total, aleatoric and epistemic uncertainty of the linearised predictive.

    Classification averages over Monte-Carlo samples of the logits, as `la(x,
    link_approx="mc")` does; a finite S underestimates the epistemic part by about its
    own spread over S. Regression needs no samples. A reward model's rewards have no
    observation noise: their aleatoric part is 0.

    Parameters
    ----------
    la : ELLALaplace
        fitted
    x : torch.Tensor or MutableMapping
        B inputs
    n_samples : int, default=512
        S, drawn in chunks of bounded memory
    generator : torch.Generator, optional
        source of the samples; without it they are made from `la.seed`, the same at
        every call

    Returns
    -------
    Uncertainty

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> from laplace_ella.diagnostics.uncertainty import decompose
    >>> model = torch.nn.Linear(2, 3)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=5)
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> parts = decompose(la, torch.randn(4, 2))
    >>> bool((parts.epistemic >= 0).all()), parts.total.shape
    (True, torch.Size([4]))
    """
    la._check_fitted()
    la._check_generator(generator)
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 1:
        raise ValueError(f"n_samples must be a positive integer, got {n_samples!r}.")
    with la._undisturbed(), torch.set_grad_enabled(la.enable_backprop):
        posterior = la.posterior
        features = la._kernel_features(
            to_device(x, la._device), posterior, la.enable_backprop
        )
        values = posterior.function_values(*features)
        if la.likelihood == Likelihood.CLASSIFICATION:
            parts = _decompose_classes(
                values, n_samples, generator or la._fresh_generator(), la._family
            )
        else:
            parts = _decompose_variance(values, _noise_variance(la, values.mean))
        return _restore(parts, la._positions)


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


def _noise_variance(la: ELLALaplace, mean: torch.Tensor) -> torch.Tensor:
    """σ² of the observations `(B, C)`."""
    if not la._family.is_regression:
        return torch.zeros_like(mean)
    return la.sigma_noise.square().to(mean).expand_as(mean)


def _decompose_variance(
    values: predictive.FunctionValues, noise: torch.Tensor
) -> Uncertainty:
    epistemic = values.variance().clamp_min(0)
    return Uncertainty(
        mean=values.mean,
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
    entropies = binary_entropy if family is Family.BERNOULLI else entropy
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
    mean = probabilities / n_samples
    total = entropies(mean)
    # Jensen: the mean entropy is not larger, up to rounding
    aleatoric = torch.minimum(conditional / n_samples, total)
    return Uncertainty(
        mean=mean.to(dtype),
        total=total.to(dtype),
        aleatoric=aleatoric.to(dtype),
        epistemic=(total - aleatoric).to(dtype),
        measure=UncertaintyMeasure.ENTROPY,
    )
