"""Where the uncertainty of a prediction comes from: the data or the parameters.

Classification: the entropy of the mean prediction is the mean entropy of the sampled
predictions (aleatoric: the classes overlap) plus their mutual information with the
parameters (epistemic: the samples disagree). Regression: variances add up.

Index legend: C outputs, B batch, S samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from laplace.utils.enums import Likelihood

from laplace_ella import metrics
from laplace_ella.ella import ELLALaplace
from laplace_ella.posterior.observation import (
    N_SAMPLES,
    SAMPLE_BUDGET,
    Family,
    FunctionValues,
    draw,
)
from laplace_ella.predictions import inputs_of
from laplace_ella.support.batches import chunks, to_device
from laplace_ella.support.checks import check_generator, positive_int

#: Mean, total, aleatoric and epistemic uncertainty.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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

    Classification averages over S Monte-Carlo samples of the logits, as the link 'mc'
    does, which underestimates the epistemic part by about its own spread over S.
    Regression needs no samples; rewards have no noise, and so no aleatoric part.

    Parameters
    ----------
    la : ELLALaplace, or another fitted member of the Laplace family
    x : torch.Tensor, MutableMapping or DataLoader
        B inputs, or batches of them as for `la.predict`
    n_samples : int, default=100
        S, drawn in chunks of bounded memory
    generator : torch.Generator, optional
        source of the samples; those of ELLA are otherwise made from `la.seed`
    progress_bar : bool, default=False

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
    >>> parts.total.shape, parts.measure
    (torch.Size([4]), 'entropy')
    """
    positive_int("n_samples", n_samples)
    check_generator(generator, next(la.model.parameters()).device)
    of_batch = _of_family
    if isinstance(la, ELLALaplace):
        of_batch, generator = _of_ella, generator or la._fresh_generator()
    parts: list[Parts] = []
    for batch in inputs_of(x, la.dict_key_y, "[Uncertainty]", progress_bar):
        parts += of_batch(la, batch, n_samples, generator)
    if not parts:
        raise ValueError(
            "The loader yields no batch, so there is nothing to decompose."
        )
    measure = "variance"
    if la.likelihood == Likelihood.CLASSIFICATION:
        measure = "entropy"
    whole = (torch.cat(part) for part in zip(*parts, strict=True))
    return Uncertainty(*whole, measure=measure)


def _of_ella(
    la: Any, x: Any, n_samples: int, generator: torch.Generator | None
) -> Iterator[Parts]:
    """Yield the parts of some inputs each, in the shape of the model's output."""
    with la._predicting() as predictor:
        observation = predictor.observation
        for values, positions in predictor.function_values(x, observation.top_outputs):
            if la.likelihood == Likelihood.CLASSIFICATION:
                logits = observation.logits(values)
                parts = _of_logits(logits, n_samples, generator, observation.family)
            else:
                parts = _of_variance(la, values.mean, values.variance())
            mean, total, aleatoric, epistemic = (
                positions.restore(t) if t.ndim == 2 else positions.restore_positions(t)
                for t in parts
            )
            yield mean, total, aleatoric, epistemic


def _of_family(
    la: Any, x: Any, n_samples: int, generator: torch.Generator | None
) -> Iterator[Parts]:
    """Yield the same by the interface that all of laplace-torch's classes have."""
    x = to_device(x, next(la.model.parameters()).device)
    # Weight-space members predict by "glm", function-space members by "gp".
    pred_type = "glm" if isinstance(la, ParametricLaplace) else "gp"
    if la.likelihood == Likelihood.CLASSIFICATION:
        logits = la.functional_samples(
            x, pred_type=pred_type, n_samples=n_samples, generator=generator
        )
        p = logits.detach().double().softmax(-1)
        conditional = metrics.entropy(p).mean(0)
        yield _of_entropies(p.mean(0), conditional, Family.CATEGORICAL, logits.dtype)
        return
    mean, covariance = (part.detach() for part in la(x, pred_type=pred_type))
    yield _of_variance(la, mean, covariance.diagonal(dim1=-2, dim2=-1))


def _of_variance(la: Any, mean: torch.Tensor, variance: torch.Tensor) -> Parts:
    noise = torch.zeros_like(mean)
    if la.likelihood == Likelihood.REGRESSION:
        noise = noise + torch.as_tensor(la.sigma_noise).square().to(mean)
    epistemic = variance.clamp_min(0)
    return mean, epistemic + noise, noise, epistemic


def _of_logits(
    values: FunctionValues,
    n_samples: int,
    generator: torch.Generator | None,
    family: Family,
) -> Parts:
    f = FunctionValues(values.mean, values.root())  # one root for all chunks
    mean = torch.zeros_like(f.mean, dtype=torch.float64)
    conditional = torch.zeros_like(_entropies(mean, family))
    per_sample = max(1, len(mean) * max(f.factor.shape[1:]))
    for part in chunks(n_samples, max(1, SAMPLE_BUDGET // per_sample)):
        p = family.probabilities(draw(f, part.stop - part.start, generator)).double()
        mean = mean + p.sum(0) / n_samples
        conditional = conditional + _entropies(p, family).sum(0) / n_samples
    return _of_entropies(mean, conditional, family, f.mean.dtype)


def _entropies(p: torch.Tensor, family: Family) -> torch.Tensor:
    labels = family is Family.BERNOULLI
    return metrics.binary_entropy(p) if labels else metrics.entropy(p)


def _of_entropies(
    mean: torch.Tensor, conditional: torch.Tensor, family: Family, dtype: torch.dtype
) -> Parts:
    """Return the parts from the mean prediction and the mean entropy of samples."""
    total = _entropies(mean, family)
    # Jensen: the mean entropy is not larger, up to rounding
    aleatoric = torch.minimum(conditional, total)
    mean, total, aleatoric = (part.to(dtype) for part in (mean, total, aleatoric))
    return mean, total, aleatoric, total - aleatoric
