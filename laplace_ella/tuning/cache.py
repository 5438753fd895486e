"""Features of a data set, computed once and used for every hyperparameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from laplace_ella.derivatives.features import Features
from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.derivatives.selection import largest
from laplace_ella.posterior.inputs import features_for
from laplace_ella.posterior.likelihood import IGNORED
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.checks import check_finite
from laplace_ella.support.span import in_levels

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from laplace_ella.ella import ELLALaplace

__all__ = ["FeatureCache", "cache_loader", "cache_parts", "whole_cache"]

#: What belongs to the examples, one row each, and is sliced with them.
_PER_ROW = ("f_mu", "phi", "targets", "residual", "unseen", "outputs")


@dataclass(frozen=True)
class FeatureCache:
    """Outputs, features and targets of a data set.

    They depend on neither prior, noise, temperature nor link, and the features of a
    lower rank k are the first k columns: studies of all of these cost no further pass
    through the network. (With `complement="prior"` and a prior that is not scalar they
    do depend on the prior, and are refused under another one.)

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
    residual : torch.Tensor, optional
        the part of J(x)D⁻¹J(x)ᵀ outside the basis, `(N, C, C)`, for the complement;
        with D = 1 it holds for every scalar prior
    spectrum : torch.Tensor, optional
        eigenvalues of the basis `(K,)`, by which it is recognised
    prior : torch.Tensor, optional
        the prior precision that features and residual were made for, if it is not
        scalar
    unseen : torch.Tensor, optional
        the part of J(x)J(x)ᵀ outside each level of the span of the sampled gradients,
        `(N, L, C, C)`, for `complement="matched"`
    outputs : torch.Tensor, optional
        `(N, m)`, where features and residuals are of m of the C outputs: which ones,
        the largest first; see `ELLALaplace.top_outputs`

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> loader = DataLoader(TensorDataset(torch.randn(9, 2), torch.randn(9, 1)), 3)
    >>> la = Laplace(torch.nn.Linear(2, 1), "regression", "all", "nystrom",
    ...              n_eigenvalues=3)
    >>> la.fit(loader)
    >>> cache = FeatureCache.from_loader(la, loader)
    >>> for la.prior_precision in (0.1, 1.0, 10.0):
    ...     mean, variance = la.predict_from_cache(cache, diagonal_output=True)
    >>> variance.shape
    torch.Size([9, 1])
    """

    f_mu: torch.Tensor
    phi: torch.Tensor
    targets: torch.Tensor
    residual: torch.Tensor | None = None
    spectrum: torch.Tensor | None = None
    prior: torch.Tensor | None = None
    unseen: torch.Tensor | None = None
    outputs: torch.Tensor | None = None

    @classmethod
    def from_loader(
        cls, la: ELLALaplace, loader: DataLoader, progress_bar: bool = False
    ) -> FeatureCache:
        """Compute the features of every example of a loader, for the posterior of
        `la` as it is: its rank, its complement and the shape of its prior."""
        return la.cache_features(loader, progress_bar)

    @classmethod
    def of(
        cls,
        features: Features,
        targets: torch.Tensor,
        posterior: SubspacePosterior,
        observed: torch.Tensor | None = None,
    ) -> FeatureCache:
        """A batch of features with its targets, less the rows without one."""
        rows = {
            "f_mu": features.f,
            "phi": features.phi,
            "targets": targets.to(features.f.device),
            "residual": features.residual,
            "unseen": features.unseen,
            "outputs": features.outputs,
        }
        cache = cls.made_for(posterior, rows)
        if observed is None or not features.positions.shape:
            return cache
        return cache[observed.to(features.f.device)]

    @classmethod
    def made_for(
        cls, posterior: SubspacePosterior, rows: Mapping[str, torch.Tensor | None]
    ) -> FeatureCache:
        """What a posterior's features of every example are, by name."""
        prior = posterior.prior if posterior.weighs_gradients else None
        values: dict[str, Any] = dict(rows)
        return cls(spectrum=posterior.basis.eigenvalues, prior=prior, **values)

    @classmethod
    def concatenate(cls, caches: Sequence[FeatureCache]) -> FeatureCache:
        """One cache of several, made with the same basis and prior.

        Where some lack the residual, so does the whole.
        """
        if not caches:
            raise ValueError("There is nothing to concatenate: got no cache.")
        first = caches[0]
        for other in caches[1:]:
            if not _same(first.spectrum, other.spectrum):
                raise ValueError("The caches were made with different bases.")
            if not _same(first.prior, other.prior):
                raise ValueError("The caches were made for different priors.")
            if first.top_outputs != other.top_outputs:
                raise ValueError("The caches were made with different top_outputs.")

        def together(name: str) -> torch.Tensor | None:
            parts = [getattr(cache, name) for cache in caches]
            return None if any(p is None for p in parts) else torch.cat(parts)

        return replace(first, **{name: together(name) for name in _PER_ROW})

    def __len__(self) -> int:
        return len(self.f_mu)

    @property
    def rank(self) -> int:
        """K."""
        return self.phi.shape[-1]

    @property
    def top_outputs(self) -> int | None:
        """m, where the features are of the m largest outputs only."""
        return None if self.outputs is None else self.outputs.shape[-1]

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: t for name, t in named.items() if t is not None}

    def truncate(self, rank: int) -> FeatureCache:
        """The features of the first `rank` directions.

        What is cut off of the features lies outside the basis then.
        """
        if rank > self.rank:
            raise ValueError(
                f"The cache has the features of {self.rank} directions, {rank} were "
                "asked for; make it with the larger basis."
            )
        if rank == self.rank:
            return self
        residual = self.residual
        if residual is not None and self.prior is not None:
            raise ValueError(
                "Features for a prior that is not scalar cannot be truncated: make the "
                "cache again after truncating the posterior."
            )
        if residual is not None:
            beyond = self.phi[..., rank:]
            residual = residual + beyond @ beyond.mT
        spectrum = None if self.spectrum is None else self.spectrum[:rank]
        return replace(
            self,
            phi=self.phi[..., :rank],
            residual=residual,
            unseen=self._unseen_beyond(rank),
            spectrum=spectrum,
        )

    def _unseen_beyond(self, rank: int) -> torch.Tensor | None:
        """What is unseen once the directions after the first `rank` have left the
        basis: at each level those of them that do not belong to it as well."""
        if self.unseen is None or self.spectrum is None:
            return self.unseen
        known = in_levels(self.spectrum, self.unseen.shape[1])[:, rank:]  # (L, k)
        known[-1] = True
        beyond = self.phi[..., rank:].unsqueeze(1) * ~known.unsqueeze(1)
        return self.unseen + beyond @ beyond.mT

    def top(self, n: int | None) -> FeatureCache:
        """Features of the n largest outputs of each row, or of all for None."""
        has, C = self.top_outputs, self.f_mu.shape[-1]
        wanted = None if n is None or n >= C else n
        if wanted == has:
            return self
        if wanted is None or (has is not None and has < wanted):
            raise ValueError(
                f"The cache has the features of the {has} largest outputs, those of "
                f"{'all' if wanted is None else wanted} are needed. Make it again with "
                f"top_outputs={n}; or predict with top_outputs={has}."
            )
        outputs = largest(self.f_mu, wanted)
        # Of outputs that are selected already the first ones, which are the largest.
        at = outputs if has is None else torch.arange(wanted, device=outputs.device)
        at = at.expand_as(outputs)

        def square(matrix: torch.Tensor | None) -> torch.Tensor | None:
            if matrix is None:
                return None
            rows = matrix.take_along_dim(at.unsqueeze(-1), 1)
            return rows.take_along_dim(at.unsqueeze(1), 2)

        return replace(
            self,
            phi=self.phi.take_along_dim(at.unsqueeze(-1), 1),
            residual=square(self.residual),
            outputs=outputs,
        )

    def without_residual(self) -> FeatureCache:
        """For posteriors that drop their complement, in less memory.

        Features for a prior that is not scalar serve only with their residual.
        """
        if self.prior is not None:
            raise ValueError(
                "These features are for complement='prior' with a prior that is not "
                "scalar; make the cache again with complement='drop'."
            )
        return replace(self, residual=None, unseen=None)

    def serving(self, posterior: SubspacePosterior) -> FeatureCache:
        """What a posterior needs of this cache, or an error that says why it has not
        got it."""
        basis = posterior.basis.eigenvalues
        cache = self.truncate(posterior.rank)
        if cache.spectrum is not None and not _same(cache.spectrum, basis):
            raise ValueError(
                "The cache was made with another basis than the posterior has; make "
                "it again with this posterior."
            )
        needed = posterior.prior if posterior.weighs_gradients else None
        if not _same(cache.prior, needed):
            raise ValueError(
                "The cache was made for "
                f"{_describe(cache.prior)}, the posterior has {_describe(needed)}. "
                "With complement='prior' and a prior that is not scalar, features "
                "depend on the prior; make the cache again with this posterior."
            )
        if not posterior.needs_residual:
            return replace(cache, residual=None, unseen=None)
        return cache if posterior.levels is not None else replace(cache, unseen=None)

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        """What there is of every example, by name."""
        return {k: t for k, t in self._tensors().items() if k in _PER_ROW}

    def __getitem__(self, index: slice | torch.Tensor) -> FeatureCache:
        """Some of the examples."""
        return replace(self, **{k: t[index] for k, t in self.rows.items()})

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
        tensors = torch.load(path, map_location=device, weights_only=True)
        known = {field.name for field in fields(cls)}
        required = {"f_mu", "phi", "targets"}
        if not isinstance(tensors, dict) or not required <= tensors.keys() <= known:
            got = sorted(tensors) if isinstance(tensors, dict) else type(tensors)
            raise ValueError(
                f"{path} is not a feature cache: expected {sorted(required)} among its "
                f"entries and none but {sorted(known)}, got {got}. Make it again."
            )
        return cls(**tensors)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two recorded tensors are both missing, or equal on whatever device."""
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and torch.equal(a, b.to(a)))


def _describe(prior: torch.Tensor | None) -> str:
    return "any scalar prior" if prior is None else f"one prior of {len(prior)} values"


def cache_loader(
    posterior: SubspacePosterior,
    linearizer: Linearizer,
    observation: ObservationModel,
    batches: Iterable[tuple[Any, torch.Tensor]],
) -> FeatureCache:
    """Features and targets of all batches (inputs on the device, targets)."""
    parts, _ = cache_parts(posterior, linearizer, observation, batches)
    return whole_cache(parts)


def cache_parts(
    posterior: SubspacePosterior,
    linearizer: Linearizer,
    observation: ObservationModel,
    batches: Iterable[tuple[Any, torch.Tensor]],
) -> tuple[list[FeatureCache], torch.Tensor]:
    """The same batch by batch, and how many rows each example has, on the CPU."""
    parts, finite, counts = [], [], [torch.zeros(0, dtype=torch.int64)]
    for x, y in batches:
        features = features_for(
            posterior,
            linearizer,
            x,
            top=observation.top_outputs,
            every_level=True,
        )
        rows, known = observation.rows(y, len(features.f), features.positions)
        finite.append(features.is_finite())
        parts.append(FeatureCache.of(features, rows, posterior, known))
        if known is None or not features.positions.shape:
            known = torch.ones(len(features.f), dtype=torch.bool)
        known = known.view(-1, features.positions.n_positions)
        counts.append(known.sum(-1).cpu())
    check_finite(finite, "outputs or features", "of the validation data")
    return parts, torch.cat(counts)


def whole_cache(parts: Sequence[FeatureCache]) -> FeatureCache:
    """One cache of all batches, or an error where there is nothing in it."""
    if not parts:
        raise ValueError("The loader yielded no batch; there is nothing to cache.")
    cache = FeatureCache.concatenate(parts)
    if not len(cache):
        raise ValueError(
            f"No position has a target, all are {IGNORED}; there is nothing to cache "
            "or compare with."
        )
    return cache
