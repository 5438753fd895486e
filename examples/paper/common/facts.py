"""Numbers that the results page speaks of, and that no table of methods has."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

from common import ella
from common.cifar import Cifar
from laplace_ella import augmented_validation, metrics

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


def image_facts(setup: Cifar) -> list[dict[str, Any]]:
    """What the network makes of the images that settings could be chosen on."""
    kept = setup.kept
    augmented = augmented_validation(kept.loader(), n_examples=len(kept)).dataset
    sources = {
        "training file, kept from fitting": (kept.x, kept.y),
        f"the same, moved (strength {setup.strength:g})": (
            setup.validation.x,
            setup.validation.y,
        ),
        "the same by `augmented_validation`, defaults": augmented.tensors,
        "test file (nothing is chosen on all of it)": (setup.test.x, setup.test.y),
    }
    rows = []
    for name, (x, y) in sources.items():
        logits = ella.forward(setup.model, x)
        rows.append(
            {
                "images": name,
                "n": len(y),
                **metrics.classification_metrics(logits.softmax(-1), y),
                "T": ella.temperature_scaling(logits, y),
            }
        )
    return rows


def paired_differences(
    probs: dict[str, torch.Tensor], targets: torch.Tensor
) -> list[dict[str, Any]]:
    """Differences of mean NLL between methods, image by image.

    The standard error is that of the mean over images; differences between seeds of
    the basis are not in it.
    """
    tiny = torch.finfo(torch.float32).tiny
    losses = {
        name: -p.gather(1, targets[:, None])[:, 0].clamp_min(tiny).log().double()
        for name, p in probs.items()
    }
    rows = []
    for first, second in combinations(losses, 2):
        difference = losses[first] - losses[second]
        mean = difference.mean().item()
        error = difference.std().item() / len(difference) ** 0.5
        rows.append(
            {
                "first": first,
                "second": second,
                "difference": mean,
                "error": error,
                "ratio": mean / error if error else None,
                "relative": 100 * mean / losses[second].mean().item(),
            }
        )
    return rows
