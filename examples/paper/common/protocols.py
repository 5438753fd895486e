"""How settings are chosen, and on which images they then predict.

train   on images of the training file that are kept from fitting. The networks were
        trained on them, so they are moved until they are as hard as new images (see
        `common.cifar.Cifar`).
halves  on new images: settings chosen on one half of the test images predict the other
        half, and the other way round, so that no image takes part in a choice that its
        own prediction depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

PROTOCOLS = ("train", "halves")

TITLES = {
    "train": "Settings chosen on training images made as hard as new ones",
    "halves": "Settings chosen on one half of the test images, for the other half",
}


@dataclass(frozen=True)
class Fold:
    """Positions to choose on and to predict: of validation and test, or of test."""

    choose: torch.Tensor
    predict: torch.Tensor
    on_test: bool

    @property
    def where(self) -> str:
        """The images that `choose` counts."""
        return "test" if self.on_test else "validation"


@dataclass(frozen=True)
class Outcome:
    """Predictions of one fold, and what was chosen how well."""

    probs: torch.Tensor
    val_nll: float | None = None
    chosen: dict[str, float] = field(default_factory=dict)


def folds(protocol: str, n_validation: int, n_test: int) -> list[Fold]:
    everything = torch.arange(n_test)
    if protocol == "train":
        return [Fold(torch.arange(n_validation), everything, False)]
    first, second = everything[: n_test // 2], everything[n_test // 2 :]
    return [Fold(first, second, True), Fold(second, first, True)]
