"""Where the uncertainty of a prediction comes from: the data or the parameters.

Classification: the entropy of the mean prediction is the mean entropy of the sampled
predictions (aleatoric: the classes overlap) plus their mutual information with the
parameters (epistemic: the samples disagree). Regression: variances add up.

Index legend: C outputs, B batch, S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
from laplace_ella.predictions import inputs_of, noise_variance
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

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> import laplace_ella
    >>> la = Laplace(torch.nn.Linear(2, 3), "classification", "all", "nystrom")
    >>> la.fit([(torch.randn(50, 2), torch.randint(3, (50,)))])
    >>> parts = laplace_ella.decompose(la, torch.randn(4, 2))
    >>> parts.total.shape, parts.measure
    (torch.Size([4]), 'entropy')
    """
    positive_int("n_samples", n_samples)
    parameter = next(la.model.parameters())
    check_generator(generator, device := parameter.device)
    # Weight-space members predict by "glm", function-space members by "gp".
    how = {"pred_type": "glm" if isinstance(la, ParametricLaplace) else "gp"}
    classes, parts = la.likelihood == Likelihood.CLASSIFICATION, []
    if isinstance(la, ELLALaplace):
        generator = generator or la._fresh_generator()
    for batch in inputs_of(x, la.dict_key_y):
        if not classes:
            parts.append(_variances(la, to_device(batch, device), how))
        elif isinstance(la, ELLALaplace):
            parts += _entropies_of_parts(la, batch, n_samples, generator)
        else:
            how |= {"generator": generator}
            sample = partial(la.functional_samples, to_device(batch, device), **how)
            parts.append(_entropies(sample, [n_samples], parameter.dtype))
    if not parts:
        raise ValueError(
            "The loader yields no batch, so there is nothing to decompose."
        )
    whole = (torch.cat(part) for part in zip(*parts, strict=True))
    return Uncertainty(*whole, measure="entropy" if classes else "variance")


def _variances(la: Any, x: Any, how: dict[str, Any]) -> Parts:
    mean, variance = la(x, diagonal_output=True, **how)
    epistemic, noise = variance.clamp_min(0), torch.zeros_like(mean)
    if la.likelihood == Likelihood.REGRESSION:
        noise = noise + noise_variance(la, mean)
    return mean, epistemic + noise, noise, epistemic


def _entropies_of_parts(
    la: ELLALaplace, x: Any, n_samples: int, generator: torch.Generator | None
) -> Iterator[Parts]:
    """Yield the parts of some inputs each, in the shape of the model's output, from
    samples in chunks of bounded memory."""
    with la._predicting() as predictor:
        observation = predictor.observation
        for values, positions in predictor.function_values(x, observation.top_outputs):
            f = observation.logits(values)
            f = FunctionValues(f.mean, f.root())  # one root for all chunks
            per_sample = max(1, len(f.mean) * max(f.factor.shape[1:]))
            parts = chunks(n_samples, SAMPLE_BUDGET // per_sample)
            sizes = [part.stop - part.start for part in parts]
            sample = partial(draw, f, generator=generator)
            mean, total, aleatoric, epistemic = (
                positions.restore(t) if t.ndim == 2 else positions.restore_positions(t)
                for t in _entropies(sample, sizes, f.mean.dtype, observation.family)
            )
            yield mean, total, aleatoric, epistemic


def _entropies(
    sample: Callable[..., torch.Tensor],
    sizes: list[int],
    dtype: torch.dtype,
    family: Family = Family.CATEGORICAL,
) -> Parts:
    """Return the parts from so many samples of the logits `(n, B, C)` at a time."""
    labels = family is Family.BERNOULLI
    entropy = metrics.binary_entropy if labels else metrics.entropy
    mean: Any = 0
    conditional: Any = 0
    for n in sizes:
        p = family.probabilities(sample(n_samples=n).double())
        mean = mean + p.sum(0) / sum(sizes)
        conditional = conditional + entropy(p).sum(0) / sum(sizes)
    total = entropy(mean)
    # Jensen: the mean entropy is not larger, up to rounding
    aleatoric = torch.minimum(conditional, total)
    mean, total, aleatoric = (t.to(dtype) for t in (mean, total, aleatoric))
    return mean, total, aleatoric, total - aleatoric
