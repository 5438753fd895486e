"""How settings are chosen, and on which images they then predict.

train      on images of the training file that are kept from fitting. The networks were
           trained on them, so they are moved until they are as hard as new images (see
           `common.cifar.Cifar`).
halves     on new images: settings chosen on one half of the test images predict the
           other half, and the other way round, so that no image takes part in a choice
           that its own prediction depends on.
augmented  on the kept images as `augmented_validation` changes them by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

PROTOCOLS = ("train", "halves", "augmented")

TITLES = {
    "train": "Settings chosen on training images made as hard as new ones",
    "halves": "Settings chosen on one half of the test images, for the other half",
    "augmented": "Settings chosen on training images by `augmented_validation`",
}

#: The images that settings are chosen on, where these are not test images.
CHOSEN_ON = {"train": "validation", "augmented": "augmented"}


@dataclass(frozen=True)
class Fold:
    """Positions to choose on, among the images `where`, and to predict, of test."""

    where: str
    choose: torch.Tensor
    predict: torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """Predictions of one fold, and what was chosen how well."""

    probs: torch.Tensor
    val_nll: float | None = None
    chosen: dict[str, float] = field(default_factory=dict)


def sources(protocols: Iterable[str]) -> list[str]:
    """Names of all images that the protocols use."""
    return [*(CHOSEN_ON[p] for p in protocols if p in CHOSEN_ON), "test"]


def folds(protocol: str, sizes: dict[str, int]) -> list[Fold]:
    """The folds of a protocol; `sizes` are numbers of images by their name."""
    everything = torch.arange(sizes["test"])
    if protocol in CHOSEN_ON:
        where = CHOSEN_ON[protocol]
        return [Fold(where, torch.arange(sizes[where]), everything)]
    first, second = everything.tensor_split(2)
    return [Fold("test", first, second), Fold("test", second, first)]
