"""Early stopping of the fit, and validation data where there is none.

The covariance shrinks like 1/N and, under misspecification, too fast: fitted on all
data, ELLA predicts like the network itself (Deng et al. 2022, Sec. 5.2). The remedy of
the paper is to stop adding data once the validation loss has passed its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella.fitting.data import training_data
from laplace_ella.posterior.observation import N_SAMPLES, Link
from laplace_ella.support.checks import member, positive_int
from laplace_ella.tuning.validation import check_loss


@dataclass(frozen=True)
class EarlyStopping:
    """When to evaluate the posterior while it is fitted, and when to stop.

    Parameters
    ----------
    every : int, optional
        examples between two evaluations; by default they are spaced geometrically,
        because the loss varies with the logarithm of the number of data
    start : int, default=32
        examples before the first evaluation, if they are spaced geometrically
    growth : float, default=1.25
        ratio of successive evaluations, if they are spaced geometrically
    patience : int, default=8
        evaluations without a new best value after which the fit ends
    loss : torchmetrics.Metric or callable, optional
        as for `optimize_prior_precision`; the negative log likelihood by default
    maximize : bool, default=False
        whether larger values of `loss` are better
    link_approx : Link or str, optional
        of the predictions that are judged, by default the posterior's `link_approx`;
        the paper's is 'mc'
    n_samples : int, default=100
        of the link 'mc'; the paper has 512

    Examples
    --------
    >>> import itertools
    >>> plan = EarlyStopping(start=100, growth=1.5, link_approx="mc")
    >>> list(itertools.islice(plan.checkpoints(), 4))
    [100, 150, 225, 338]

    `la.fit(train_loader, val_loader=val_loader, early_stopping=plan)` goes by it.
    """

    every: int | None = None
    start: int = 32
    growth: float = 1.25
    patience: int = 8
    loss: Any = None
    maximize: bool = False
    link_approx: Link | str | None = None
    n_samples: int = N_SAMPLES

    def __post_init__(self) -> None:
        for name in ("every", "start", "patience", "n_samples"):
            if name != "every" or self.every is not None:
                positive_int(name, getattr(self, name))
        if not (self.growth > 1 and math.isfinite(self.growth)):  # also refuses NaN
            raise ValueError(f"growth must exceed 1 and be finite, got {self.growth}.")
        check_loss(self.loss)
        if self.link_approx is not None:
            link = member(Link, "link_approx", self.link_approx)
            object.__setattr__(self, "link_approx", link)

    def checkpoints(self) -> Iterator[int]:
        """Yield numbers of examples at which the posterior is evaluated, increasing."""
        n = self.start if self.every is None else self.every
        while True:
            yield n
            n += self.every or math.ceil(n * (self.growth - 1))

    def waited(self, history: Sequence[Mapping[str, float]]) -> int:
        """Return how many evaluations there were since the best one."""
        sign = -1 if self.maximize else 1
        losses = [sign * point["loss"] for point in history]
        losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def augmented_validation(
    train_loader: DataLoader,
    n_examples: int = 1000,
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None,
    strength: float = 0.2,
    seed: int = 0,
    dict_key_y: str = "labels",
) -> DataLoader:
    """Return a substitute for a validation set: strongly augmented training images.

    Networks fit their training data too well for it to tell when to stop; strong
    augmentation makes a subset of it look new (Deng et al. 2022, Sec. 5.2).

    Parameters
    ----------
    train_loader : torch.utils.data.DataLoader
        over images `(3 or 1, H, W)` and labels
    n_examples : int, default=1000
    augment : callable, optional
        maps a batch of images `(B, channels, H, W)` to augmented ones; by default a
        random crop, rotation, flip, blur and erased rectangle, drawn for each image
    strength : float, default=0.2
        of the default augmentation, in (0, 1]; right if the network is about as
        accurate on the result as on new data, too strong if it is much worse (the
        posterior then comes out too wide)
    seed : int, default=0
        of the choice and the augmentation

    Returns
    -------
    torch.utils.data.DataLoader
        over a fixed set of augmented images

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> data = TensorDataset(torch.rand(40, 3, 8, 8), torch.randint(2, (40,)))
    >>> train_loader = DataLoader(data, batch_size=20)
    >>> val_loader = augmented_validation(train_loader, n_examples=16)
    >>> len(val_loader.dataset)
    16
    """
    positive_int("n_examples", n_examples)
    if not 0 < strength <= 1:
        raise ValueError(f"strength must lie in (0, 1], got {strength}.")
    augment = partial(_augmented, strength=strength) if augment is None else augment
    data = training_data(train_loader, "", dict_key_y)
    order = np.random.default_rng(seed).permutation(data.n_examples or 0)
    chosen = np.sort(order[:n_examples])
    images, targets = [], []
    for where, x, y, _ in data.batches(torch.device("cpu")):
        if not isinstance(x, torch.Tensor) or x.ndim != 4:
            raise ValueError(
                "augmented_validation() takes images (B, channels, H, W), got "
                f"{tuple(x.shape) if hasattr(x, 'shape') else type(x).__name__}; "
                "make a validation set of your own for other data."
            )
        here = chosen[(where.start <= chosen) & (chosen < where.stop)] - where.start
        images.append(x[here])
        targets.append(y[here])
        if where.stop > chosen[-1]:
            break
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        images = [augment(some) for some in images if len(some)]
    validation = TensorDataset(torch.cat(images), torch.cat(targets))
    return DataLoader(validation, batch_size=getattr(train_loader, "batch_size", 32))


def _augmented(images: torch.Tensor, strength: float) -> torch.Tensor:
    """Crop, rotate, flip, blur and erase, drawn for each image; keeps the shape."""
    from torchvision.transforms import v2

    size = tuple(images.shape[-2:])
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(1 - 0.7 * strength, 1), ratio=(1, 1)),
            v2.RandomRotation([-20 * strength, 20 * strength]),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.GaussianBlur(3, (0.1, 1.0))], p=0.5 * strength),
            v2.RandomErasing(p=0.5 * strength, scale=(0.02, 0.15)),
        ]
    )
    return torch.stack([transform(image) for image in images])
