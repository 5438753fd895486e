"""Features of a data set, computed once and used for every hyperparameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from laplace_ella.posterior import likelihood

if TYPE_CHECKING:
    from laplace_ella.ella import ELLALaplace
    from laplace_ella.posterior.subspace import SubspacePosterior

__all__ = ["FeatureCache"]


@dataclass(frozen=True)
class FeatureCache:
    """Outputs, features and targets of a data set.

    They depend on neither prior, noise, temperature nor link, and the features of a
    lower rank k are the first k columns: studies of all of these cost no further pass
    through the network. (With `complement="prior"` and a prior that is not scalar they
    do depend on the prior.)

    Models with outputs at many positions have a row for each position of each example,
    less those whose target is not observed.

    Attributes
    ----------
    f_mu : torch.Tensor
        `(N, C)`
    phi : torch.Tensor
        `(N, C, K)`
    targets : torch.Tensor
        `(N, ...)`
    kernel : torch.Tensor, optional
        J(x)J(x)ᵀ `(N, C, C)`, where the complement is kept

    Examples
    --------
    >>> cache = FeatureCache.from_loader(la, test_loader)     # doctest: +SKIP
    >>> for la.prior_precision in (0.1, 1.0, 10.0):           # doctest: +SKIP
    ...     probs = la.predict_from_features(cache.f_mu, cache.phi)
    """

    f_mu: torch.Tensor
    phi: torch.Tensor
    targets: torch.Tensor
    kernel: torch.Tensor | None = None

    @classmethod
    def from_loader(
        cls,
        la: ELLALaplace,
        loader: DataLoader,
        progress_bar: bool = False,
        posterior: SubspacePosterior | None = None,
    ) -> FeatureCache:
        """Compute the features of every example of a loader.

        `posterior` stands in for `la.posterior`, for another prior or basis.
        """
        posterior = la.posterior if posterior is None else posterior
        parts = []
        with la._undisturbed(loader):
            for x, y in la._batches(loader, "[Features]", progress_bar):
                f, phi, kernel = la._kernel_features(x, posterior)
                y = la._target_rows(f, y)
                part = (f, phi, y) if kernel is None else (f, phi, y, kernel)
                known = likelihood.observed(y, la._family)
                if known is not None and la._positions.shape:
                    part = tuple(tensor[known] for tensor in part)
                parts.append(part)
        if not parts:
            raise ValueError("The loader yielded no batch; there is nothing to cache.")
        if not any(len(f) for f, *_ in parts):
            raise ValueError(
                f"No position has a target, all are {likelihood.IGNORED}; there is "
                "nothing to cache or compare with."
            )
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def __len__(self) -> int:
        return len(self.f_mu)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in vars(self).items() if t is not None}

    def truncate(self, rank: int) -> FeatureCache:
        """The features of the first `rank` directions."""
        return FeatureCache(self.f_mu, self.phi[..., :rank], self.targets, self.kernel)

    def __getitem__(self, index: slice | torch.Tensor) -> FeatureCache:
        """Some of the examples."""
        return FeatureCache(**{k: t[index] for k, t in self._tensors().items()})

    def batches(self, size: int = 1024) -> Iterator[FeatureCache]:
        """The cache in pieces, for links that need memory."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def to(self, device: torch.device | str) -> FeatureCache:
        """The cache on another device."""
        return FeatureCache(**{k: t.to(device) for k, t in self._tensors().items()})

    def save(self, path: str | PathLike[str]) -> None:
        """Write to a file that `load` reads, on any device."""
        torch.save(self._tensors(), path)

    @classmethod
    def load(
        cls, path: str | PathLike[str], device: torch.device | str = "cpu"
    ) -> FeatureCache:
        """Read what `save` wrote."""
        return cls(**torch.load(path, map_location=device, weights_only=True))
