"""Choosing hyperparameters on validation data whose features are computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torchmetrics
from laplace.utils.enums import LinkApprox, PredType
from laplace.utils.metrics import RunningNLLMetric
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from laplace_ella import likelihood
from laplace_ella._batch import split_batch

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace

__all__ = ["FeatureCache", "gaussian_nll", "grid_search", "score"]

Loss = torchmetrics.Metric | Callable[..., torch.Tensor | float]


@dataclass(frozen=True)
class FeatureCache:
    """Outputs, features and targets of a data set, computed once.

    They depend on neither prior, noise, temperature nor link, and the features of a
    lower rank k are the first k columns. Studies of all of these cost no further pass
    through the network.

    Attributes
    ----------
    f_mu : torch.Tensor
        `(N, C)`
    phi : torch.Tensor
        `(N, C, K)`
    targets : torch.Tensor
        `(N, ...)`
    """

    f_mu: torch.Tensor
    phi: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def from_loader(
        cls, la: ELLALaplace, loader: DataLoader, progress_bar: bool = False
    ) -> FeatureCache:
        """Compute the features of every example of a loader."""
        f_mu, phi, targets = [], [], []
        with la._undisturbed(loader):
            for x, y in la._batches(loader, "[Features]", progress_bar):
                f, p = la._linearize(x, la.basis)
                f_mu.append(f)
                phi.append(p)
                targets.append(likelihood.check_targets(f, y, la.likelihood))
        if not f_mu:
            raise ValueError("The loader yielded no batch; there is nothing to cache.")
        return cls(torch.cat(f_mu), torch.cat(phi), torch.cat(targets).to(la._device))

    def __len__(self) -> int:
        return len(self.f_mu)

    def truncate(self, rank: int) -> FeatureCache:
        """The features of the first `rank` directions."""
        return FeatureCache(self.f_mu, self.phi[..., :rank], self.targets)

    def batches(self, size: int = 1024) -> Iterator[FeatureCache]:
        """The cache in pieces, for link functions that need memory."""
        for part in zip(*(t.split(size) for t in vars(self).values()), strict=True):
            yield FeatureCache(*part)

    def save(self, path: str | PathLike[str]) -> None:
        """Write to a file that `load` reads, on any device."""
        torch.save(vars(self), path)

    @classmethod
    def load(
        cls, path: str | PathLike[str], device: torch.device | str = "cpu"
    ) -> FeatureCache:
        """Read what `save` wrote."""
        return cls(**torch.load(path, map_location=device, weights_only=True))


def gaussian_nll(
    f_mu: torch.Tensor, f_var: torch.Tensor, y: torch.Tensor, sigma_noise: torch.Tensor
) -> torch.Tensor:
    """Mean negative log likelihood of targets `(N, C)`, summed over the outputs.

    `f_var` holds covariances `(N, C, C)` or variances `(N, C)` of the function.
    """
    if f_var.ndim == 3:
        f_var = f_var.diagonal(dim1=-2, dim2=-1)
    normal = torch.distributions.Normal(f_mu, (f_var + sigma_noise**2).sqrt())
    return -normal.log_prob(y).sum(-1).mean()


def default_loss(la: ELLALaplace) -> Loss:
    """Negative log likelihood of whatever the likelihood is."""
    if likelihood.is_regression(la.likelihood):
        return lambda mean, var, y: gaussian_nll(mean, var, y, la.sigma_noise)
    return RunningNLLMetric().to(la._device)


def score(outputs: Iterator[tuple[Any, torch.Tensor]], loss: Loss) -> float:
    """A loss over batches (prediction, targets).

    As in Laplace, a metric is updated batch by batch (with mean and variance, or the
    mean alone if it takes only two arguments), a callable gets everything at once. A
    metric is cloned, so that the caller's keeps its state.
    """
    metric = None
    if isinstance(loss, torchmetrics.Metric):
        metric = loss.clone()
        metric.reset()
    collected = []
    for prediction, y in outputs:
        parts = prediction if isinstance(prediction, tuple) else (prediction,)
        if metric is None:
            collected.append((*parts, y))
            continue
        try:
            metric.update(*parts, y)
        except TypeError:
            metric.update(parts[0], y)
    if metric is not None:
        # some metrics give one value an output
        return float(torch.as_tensor(metric.compute()).sum())
    return float(loss(*(torch.cat(tensors) for tensors in zip(*collected, strict=True))))


def grid_search(
    la: ELLALaplace,
    grid: torch.Tensor,
    val_loader: DataLoader,
    loss: Loss | None,
    pred_type: PredType,
    link_approx: LinkApprox,
    n_samples: int,
    progress_bar: bool,
) -> torch.Tensor:
    """The prior precision of the grid with the lowest loss on validation data.

    Every candidate sees the same Monte-Carlo draws, so that they are compared by what
    differs. Sets `la.prior_precision` on the way.
    """
    loss = default_loss(la) if loss is None else loss
    if not callable(loss):
        raise TypeError(
            "loss must be a torchmetrics.Metric or a callable, got "
            f"{type(loss).__name__}."
        )
    regression = likelihood.is_regression(la.likelihood)
    cache = None
    if pred_type != PredType.NN:
        cache = FeatureCache.from_loader(la, val_loader, progress_bar)

    def predictions() -> Iterator[tuple[Any, torch.Tensor]]:
        if cache is None:
            for batch in val_loader:
                x, y = split_batch(batch, la.dict_key_y)
                yield (
                    la(x, "nn", link_approx="mc", n_samples=n_samples, fitting=True),
                    y.to(la._device),
                )
            return
        for part in cache.batches():
            prediction = la.predict_from_features(
                part.f_mu,
                part.phi,
                link_approx=link_approx,
                n_samples=n_samples,
                regression=regression,
            )
            yield prediction, part.targets

    losses = []
    bar = tqdm(grid.to(la._device), disable=not progress_bar)
    with la._undisturbed(val_loader):
        for prior_precision in bar:
            la.prior_precision = prior_precision
            losses.append(score(predictions(), loss))
            bar.set_description(
                f"[Grid search | prior_prec: {prior_precision:.3e}, "
                f"loss: {losses[-1]:.3f}]"
            )
    values = torch.tensor(losses).nan_to_num(nan=float("inf"))
    return grid[int(values.argmin())]
