"""Where the uncertainty of a prediction comes from: the data or the parameters.

Classification: the entropy of the mean prediction is the mean entropy of the sampled
predictions (aleatoric: the classes overlap) plus their mutual information with the
parameters (epistemic: the samples disagree). Regression: variances add up.

Index legend: C outputs, B batch, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from laplace.utils.enums import Likelihood
from torch.utils.data import DataLoader

from laplace_ella import metrics
from laplace_ella.ella import ELLALaplace
from laplace_ella.fitting.data import loader_batches
from laplace_ella.posterior.observation import (
    N_SAMPLES,
    SAMPLE_BUDGET,
    Family,
    FunctionValues,
    draw,
)
from laplace_ella.support.batches import Positions, chunks, to_device
from laplace_ella.support.checks import check_generator, positive_int


@dataclass(frozen=True)
class Uncertainty:
    """A decomposed prediction: total = aleatoric + epistemic, all non-negative.

    Attributes
    ----------
    mean : torch.Tensor
        predicted probabilities, or the mean of a regression, `(B, C)`
    total : torch.Tensor
        entropy of `mean` in nats `(B,)`, or variance of an observation `(B, C)`. Of
        outputs at many positions: one entropy per position, variances in the shape of
        the output; with `multi_label` one entropy per output
    aleatoric : torch.Tensor
        mean entropy of the sampled predictions, or noise variance
    epistemic : torch.Tensor
        mutual information of prediction and parameters, or variance of the function
    measure : str
        "entropy" or "variance"
    """

    mean: torch.Tensor
    total: torch.Tensor
    aleatoric: torch.Tensor
    epistemic: torch.Tensor
    measure: str


def decompose(
    la: BaseLaplace,
    x: Any,
    n_samples: int = N_SAMPLES,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> Uncertainty:
    """Return total, aleatoric and epistemic uncertainty of the linearised predictive.

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
    n_samples : int, default=100
        S, drawn in chunks of bounded memory
    generator : torch.Generator, optional
        source of the samples; without it those of ELLA are made from `la.seed`, the
        same at every call
    progress_bar : bool, default=False
        of the batches of a loader

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
    >>> torch.allclose(parts.total, parts.aleatoric + parts.epistemic)
    True
    >>> parts.total.shape, parts.measure
    (torch.Size([4]), 'entropy')
    """
    positive_int("n_samples", n_samples)
    device = next(la.model.parameters()).device
    check_generator(generator, device)
    if isinstance(x, DataLoader):
        batches = loader_batches(
            x, device, la.dict_key_y, "[Uncertainty]", progress_bar
        )
        parts = [decompose(la, b, n_samples, generator) for b, _ in batches]
        if not parts:
            raise ValueError("The loader yielded no batch; there is nothing to tell.")
        return _concatenate(parts)
    if not isinstance(la, ELLALaplace):
        return _of_family(la, x, n_samples, generator)
    with la._predicting() as predictor:
        observation, parts = predictor.observation, []
        generator = generator or la._fresh_generator()
        values_of = predictor.function_values(
            to_device(x, device), observation.top_outputs
        )
        for values, positions in values_of:
            if la.likelihood == Likelihood.CLASSIFICATION:
                family, logits = observation.family, observation.logits(values)
                part = _of_classes(logits, n_samples, generator, family)
            else:
                part = _of_variance(la, values.mean, values.variance())
            parts.append(_restored(part, positions))
        return _concatenate(parts)


def _of_family(
    la: BaseLaplace, x: Any, n_samples: int, generator: torch.Generator | None
) -> Uncertainty:
    """Return the same by the interface that all of laplace-torch's classes have."""
    # Weight-space members predict by "glm", function-space members by "gp".
    pred_type = "glm" if isinstance(la, ParametricLaplace) else "gp"
    if la.likelihood == Likelihood.CLASSIFICATION:
        logits = la.functional_samples(
            x, pred_type=pred_type, n_samples=n_samples, generator=generator
        )
        p = logits.detach().double().softmax(-1)
        conditional = metrics.entropy(p).mean(0)
        return _of_entropies(p.mean(0), conditional, Family.CATEGORICAL, logits.dtype)
    mean, covariance = (part.detach() for part in la(x, pred_type=pred_type))
    return _of_variance(la, mean, covariance.diagonal(dim1=-2, dim2=-1))


def _of_variance(
    la: BaseLaplace, mean: torch.Tensor, variance: torch.Tensor
) -> Uncertainty:
    noise = torch.zeros_like(mean)
    if la.likelihood == Likelihood.REGRESSION:
        noise = noise + torch.as_tensor(la.sigma_noise).square().to(mean)
    epistemic = variance.clamp_min(0)
    return Uncertainty(mean, epistemic + noise, noise, epistemic, "variance")


def _entropies(p: torch.Tensor, family: Family) -> torch.Tensor:
    labels = family is Family.BERNOULLI
    return metrics.binary_entropy(p) if labels else metrics.entropy(p)


def _of_classes(
    values: FunctionValues,
    n_samples: int,
    generator: torch.Generator | None,
    family: Family,
) -> Uncertainty:
    f = FunctionValues(values.mean, values.root())  # one root for all chunks
    mean = torch.zeros_like(f.mean, dtype=torch.float64)
    conditional = torch.zeros_like(_entropies(mean, family))
    per_sample = max(1, len(mean) * max(f.factor.shape[1:]))
    for part in chunks(n_samples, max(1, SAMPLE_BUDGET // per_sample)):
        logits = draw(f, part.stop - part.start, generator)
        p = family.probabilities(logits).double()
        mean = mean + p.sum(0) / n_samples
        conditional = conditional + _entropies(p, family).sum(0) / n_samples
    return _of_entropies(mean, conditional, family, f.mean.dtype)


def _of_entropies(
    mean: torch.Tensor, conditional: torch.Tensor, family: Family, dtype: torch.dtype
) -> Uncertainty:
    """Return the parts from the mean prediction and the mean entropy of samples."""
    total = _entropies(mean, family)
    # Jensen: the mean entropy is not larger, up to rounding
    aleatoric = torch.minimum(conditional, total)
    mean, total, aleatoric = (part.to(dtype) for part in (mean, total, aleatoric))
    return Uncertainty(mean, total, aleatoric, total - aleatoric, "entropy")


def _restored(part: Uncertainty, positions: Positions) -> Uncertainty:
    """Return rows in the shape of the model's output, or of its positions."""
    mean, total, aleatoric, epistemic = (
        positions.restore(t) if t.ndim == 2 else positions.restore_positions(t)
        for t in (part.mean, part.total, part.aleatoric, part.epistemic)
    )
    return Uncertainty(mean, total, aleatoric, epistemic, part.measure)


def _concatenate(parts: list[Uncertainty]) -> Uncertainty:
    names = ("mean", "total", "aleatoric", "epistemic")
    tensors = {n: torch.cat([getattr(p, n) for p in parts]) for n in names}
    return Uncertainty(**tensors, measure=parts[0].measure)
