"""Numbers that the results page speaks of, and that no table of methods has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common import ella
from common.cifar import Cifar
from laplace_ella import metrics, temperature_scaling

IMAGE_COLUMNS = {
    "images": "images",
    "n": "number",
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "T": "best softmax temperature",
}

PAIR_COLUMNS = {
    "first": "method",
    "second": "less",
    "difference": "difference of mean NLL",
    "error": "standard error",
    "ratio": "in standard errors",
    "relative": "in % of the second",
}

PAIR_DIGITS = {"ratio": "+.1f", "relative": "+.1f", "difference": "+.4f"}


def image_facts(setup: Cifar) -> list[dict[str, Any]]:
    """What the network makes of the images that settings could be chosen on."""
    sources = {
        "training file, kept from fitting": setup.kept,
        f"the same, moved (strength {setup.strength:g})": setup.validation,
        "of the same, by `augmented_validation`, defaults": setup.augmented,
        "test file (nothing is chosen on all of it)": setup.test,
    }
    rows = []
    for name, images in sources.items():
        logits = ella.forward(setup.model, images.x)
        rows.append(
            {
                "images": name,
                "n": len(images),
                **metrics.classification_metrics(logits.softmax(-1), images.y),
                "T": temperature_scaling(logits, images.y),
            }
        )
    return rows


def nll_by_image(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """−log p of the true classes, `(N,)` in double precision."""
    tiny = torch.finfo(torch.float32).tiny
    return -probs.gather(1, targets[:, None])[:, 0].clamp_min(tiny).log().double()


def mean_and_error(differences: torch.Tensor) -> tuple[float, float]:
    """The mean of differences `(N,)` between methods, and its standard error.

    The error is over images; differences between seeds of the basis are not in it.
    """
    error = differences.std().item() / len(differences) ** 0.5
    return differences.mean().item(), error


def paired_differences(
    probs: dict[str, torch.Tensor], targets: torch.Tensor, references: Sequence[str]
) -> list[dict[str, Any]]:
    """Differences of mean NLL between methods and references among them."""
    losses = {name: nll_by_image(p, targets) for name, p in probs.items()}
    rows = []
    for second in references:
        base = losses[second].mean().item()
        for first in losses:
            if first == second:
                continue
            mean, error = mean_and_error(losses[first] - losses[second])
            rows.append(
                {
                    "first": first,
                    "second": second,
                    "difference": mean,
                    "error": error,
                    "ratio": mean / error if error else None,
                    "relative": 100 * mean / base if base else None,
                }
            )
    return rows
