"""Features of a data set, computed once and used for every hyperparameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from laplace_ella.derivatives.jacobians import largest
from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.posterior.likelihood import IGNORED, observed, target_rows
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.posterior.predictive import features_for
from laplace_ella.posterior.span import decades
from laplace_ella.support.checks import check_finite

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

#: The fields with one row per example.
_ROWS = ("f_mu", "phi", "targets", "residual", "outputs")


@dataclass(frozen=True)
class FeatureCache:
    """Outputs, features and targets of a data set.

    They depend on neither prior, noise, temperature nor link, and the features of a
    lower rank k are the first k columns: studies of all of these cost no further pass
    through the network. (With `complement="prior"` and a prior that is not scalar they
    do depend on the prior, and are refused under another one.) Models with outputs at
    many positions have a row for each position whose target is observed.

    Attributes
    ----------
    f_mu : torch.Tensor
        outputs `(N, C)`
    phi : torch.Tensor
        features `(N, C, K)`
    targets : torch.Tensor
        `(N, ...)`
    residual : torch.Tensor, optional
        the part of J(x)D⁻¹J(x)ᵀ outside the basis, for the complement; with D = 1 it
        holds for every scalar prior. For `complement="matched"` in n parts, else in one
        `(N, n, C, C)`
    spectrum : torch.Tensor, optional
        eigenvalues of the basis `(K,)`, by which it is recognised
    prior : torch.Tensor, optional
        the prior precision that features and residual were made for, if not scalar
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
    >>> la = Laplace(torch.nn.Linear(2, 1), "regression", "all", "nystrom")
    >>> la.fit(loader)
    >>> cache = FeatureCache.from_loader(la, loader)
    >>> for la.prior_precision in (0.1, 1.0, 10.0):
    ...     mean, variance = la.predict_from_cache(cache, diagonal_output=True)
    >>> variance.shape
    torch.Size([9, 1])
    >>> torch.save(vars(cache), "cache.pt")  # doctest: +SKIP
    >>> cache = FeatureCache(**torch.load("cache.pt"))  # doctest: +SKIP
    """

    f_mu: torch.Tensor
    phi: torch.Tensor
    targets: torch.Tensor
    residual: torch.Tensor | None = None
    spectrum: torch.Tensor | None = None
    prior: torch.Tensor | None = None
    outputs: torch.Tensor | None = None

    @classmethod
    def from_loader(
        cls, la: Any, loader: DataLoader, progress_bar: bool = False
    ) -> FeatureCache:
        """Return the features of a loader's examples under the posterior of `la`."""
        return la.cache_features(loader, progress_bar)

    def _with(
        self,
        change: Callable[[str, torch.Tensor], torch.Tensor],
        names: Iterable[str] = _ROWS,
    ) -> FeatureCache:
        """Return the cache with other tensors, by their names and what they were."""
        tensors = {name: getattr(self, name) for name in names}
        known = {name: t for name, t in tensors.items() if t is not None}
        return replace(self, **{name: change(name, t) for name, t in known.items()})

    def gathered(self, processes: Any) -> FeatureCache:
        """Return the features of all processes, in the order of their ranks."""
        return self._with(processes.rows)

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

    def truncate(self, rank: int) -> FeatureCache:
        """Return the features of the first `rank` directions.

        The part of the features that is cut off lies outside the basis then.
        """
        if rank > self.rank:
            raise ValueError(
                f"The cache has the features of {self.rank} directions, {rank} were "
                "asked for; make it again."
            )
        if rank == self.rank:
            return self
        residual, beyond = self.residual, self.phi[..., rank:]
        if residual is not None and self.prior is not None:
            raise ValueError(
                "Features for a prior that is not scalar cannot be truncated: make the "
                "cache again after truncating the posterior."
            )
        if residual is not None:
            # Each direction that is cut off belongs to one part of the residual.
            parts = residual.new_zeros(residual.shape[1], beyond.shape[-1])
            at, n_known = 0, len(parts) - 1
            if n_known and self.spectrum is not None:
                at = decades(self.spectrum[rank:], self.spectrum[0])
                at = at.clamp_max(n_known - 1)
            parts[at, torch.arange(beyond.shape[-1])] = 1
            weighted = beyond.unsqueeze(1) * parts.unsqueeze(1)
            residual = residual + weighted @ weighted.mT
        return replace(
            self,
            phi=self.phi[..., :rank],
            residual=residual,
            spectrum=None if self.spectrum is None else self.spectrum[:rank],
        )

    def top(self, n: int | None) -> FeatureCache:
        """Return the features of the n largest outputs per row, or of all for None."""
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
        residual = self.residual
        if residual is not None:
            rows, columns = at[:, None, :, None], at[:, None, None]
            residual = residual.take_along_dim(rows, 2).take_along_dim(columns, 3)
        phi = self.phi.take_along_dim(at.unsqueeze(-1), 1)
        return replace(self, phi=phi, residual=residual, outputs=outputs)

    def serving(self, posterior: SubspacePosterior) -> FeatureCache:
        """Return what a posterior needs, or say why the cache has not got it."""
        basis = posterior.basis.eigenvalues
        cache = self.truncate(posterior.rank)
        if cache.spectrum is not None and not _same(cache.spectrum, basis):
            raise ValueError(
                "The cache was made with another basis than the posterior has; make "
                "it again with this posterior."
            )
        needed = posterior.prior_of_gradients
        if not _same(cache.prior, needed):
            had, has = (
                "any scalar prior" if p is None else f"one prior of {len(p)} values"
                for p in (cache.prior, needed)
            )
            raise ValueError(
                f"The cache was made for {had}, the posterior has {has}, on which "
                "features depend with complement='prior'; make the cache again."
            )
        return cache if posterior.needs_residual else replace(cache, residual=None)

    def __getitem__(self, index: slice | torch.Tensor) -> FeatureCache:
        """Return some of the examples."""
        return self._with(lambda _, t: t[index])

    def batches(self, size: int = 1024) -> Iterator[FeatureCache]:
        """Return the cache in pieces, for links that need memory."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def to(self, device: torch.device | str) -> FeatureCache:
        """Return the cache on another device."""
        return self._with(lambda _, t: t.to(device), vars(self))


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether two tensors are both missing, or equal on whatever device."""
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and torch.equal(a, b.to(a)))


def cache_batches(
    posterior: SubspacePosterior,
    linearizer: Linearizer,
    observation: ObservationModel,
    batches: Iterable[tuple[Any, torch.Tensor]],
) -> FeatureCache:
    """Return features and targets of all batches (inputs on the device, targets)."""
    rows: list[tuple[Any, ...]] = []
    finite: list[torch.Tensor] = []
    spectrum, prior = posterior.basis.eigenvalues, posterior.prior_of_gradients
    for x, y in batches:
        parts = [
            features_for(posterior, linearizer, part, top=observation.top_outputs)
            for part in linearizer.parts(x, posterior.rank)
        ]
        positions, sizes = parts[0].positions, [len(part.f) for part in parts]
        n_examples = sum(sizes) // positions.n_positions
        targets = target_rows(y, n_examples, positions, observation.family)
        targets = targets.to(parts[0].f.device)
        for part, own in zip(parts, targets.split(sizes), strict=True):
            tensors = [t for t in (part.f, part.phi, part.residual) if t is not None]
            finite.append(torch.stack([t.isfinite().all() for t in tensors]).all())
            row = (part.f, part.phi, own, part.residual, part.outputs)
            known = observed(own, observation.family)
            if known is not None and positions.shape:
                row = tuple(None if t is None else t[known] for t in row)
            rows.append(row)
    check_finite(finite, "outputs or features", "of the validation data")
    if not rows:
        raise ValueError("The loader yielded no batch; there is nothing to cache.")
    whole: list[Any] = [
        None if column[0] is None else torch.cat(column)
        for column in zip(*rows, strict=True)
    ]
    f, phi, y, residual, outputs = whole
    if not len(f):
        raise ValueError(
            f"No position has a target, all are {IGNORED}; there is nothing to cache "
            "or compare with."
        )
    return FeatureCache(f, phi, y, residual, spectrum, prior, outputs)
