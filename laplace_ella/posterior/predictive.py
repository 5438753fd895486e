"""Predictions of a posterior at new inputs: function values, probabilities, samples.

Inputs are cut into parts whose results fit the memory budget; only what is asked for
jointly over all inputs is computed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from laplace_ella.derivatives.complements import split_gradients
from laplace_ella.derivatives.linearizer import Features, Linearizer
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.observation import (
    FunctionValues,
    Link,
    ObservationModel,
    draw,
)
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.support.batches import OutputLayout, Positions, chunks
from laplace_ella.support.preserve import full_precision

__all__ = ["FunctionValues", "Predictor", "class_dim", "features_for"]

#: Numbers that samples of the weights, or the Jacobians of groups of inputs, have
#: together.
BUDGET = 2**24


def class_dim(layout: OutputLayout) -> int:
    """Return the dimension of the C classes in samples `(n, B, ...)`."""
    return 2 if layout is OutputLayout.CHANNELS_FIRST else -1


def features_for(
    posterior: SubspacePosterior,
    linearizer: Linearizer,
    x: Any,
    create_graph: bool = False,
    top: int | None = None,
    every_level: bool = False,
) -> Features:
    """Return outputs and features of inputs on the device and, where the complement is
    kept, the part of their gradients outside the basis; of the `top` outputs, or all.

    `every_level` is for use with other priors and noises than the posterior's."""
    directions = posterior.basis.directions
    if not posterior.needs_residual:
        return linearizer.features(x, directions, create_graph, top)
    span = posterior.levels if every_level else posterior.span
    return linearizer.features_and_residual(
        x, directions, posterior.metric, span, create_graph, top
    )


@dataclass(frozen=True)
class Predictor:
    """A posterior together with the model whose outputs it is about.

    Inputs are on the model's device; results have the shape of the model's output.

    Attributes
    ----------
    posterior : SubspacePosterior
    linearizer : Linearizer
    observation : ObservationModel
    dtype : torch.dtype
        of the results; derivatives and algebra may be more precise
    create_graph : bool
        whether results can be differentiated with respect to the inputs
    """

    posterior: SubspacePosterior
    linearizer: Linearizer
    observation: ObservationModel
    dtype: torch.dtype
    create_graph: bool = False

    def function_values(
        self, x: Any, top: int | None = None, n_results: int = 0
    ) -> Iterator[tuple[FunctionValues, Positions]]:
        """Yield the Gaussian over the outputs, rows `(b·S, C)`, and where the rows
        belong, for parts of the inputs; with `top`, so many outputs vary.

        `n_results` numbers per output are computed from it."""
        posterior, linearizer = self.posterior, self.linearizer
        numbers = 2 * posterior.rank + n_results
        for part in linearizer.parts(x, numbers):
            features = features_for(posterior, linearizer, part, self.create_graph, top)
            with full_precision(linearizer.device):
                values = posterior.function_values(
                    features.f,
                    features.phi,
                    features.residual,
                    features.outside_span,
                    features.outputs,
                )
            yield values, features.positions

    def marginal(
        self, x: Any, diagonal_output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean, and the covariance of the C outputs at each position;
        variances in the shape of the output if `diagonal_output`."""
        means, spreads = [], []
        n_results = 1 if diagonal_output else self._n_channels
        for values, positions in self.function_values(x, n_results=n_results):
            means.append(positions.restore(values.mean).to(self.dtype))
            with full_precision(self.linearizer.device):
                if diagonal_output:
                    spread = positions.restore(values.variance())
                else:
                    spread = positions.restore_positions(values.covariance())
            spreads.append(spread.to(self.dtype))
        return torch.cat(means), torch.cat(spreads)

    @property
    def _n_channels(self) -> int:
        """C."""
        return self.observation.layout.of(self.linearizer.output_shape).n_channels

    def probabilities(
        self,
        x: Any,
        link_approx: Link,
        n_samples: int,
        diagonal_output: bool,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        """Return probabilities of classes or labels, by one of the links."""
        parts = []
        top = self.observation.top_outputs
        for values, positions in self.function_values(x, top):
            with full_precision(self.linearizer.device):
                rows = self.observation.probabilities(
                    values, link_approx, n_samples, diagonal_output, generator
                )
            parts.append(positions.restore(rows).to(self.dtype))
        return torch.cat(parts)

    def samples(
        self,
        x: Any,
        n_samples: int,
        generator: torch.Generator | None,
        diagonal_output: bool = False,
        top: int | None = None,
    ) -> torch.Tensor:
        """Return function values `(n_samples, B, ...)`, independent between inputs."""
        parts = []
        for values, positions in self.function_values(x, top, 2 * n_samples):
            with full_precision(self.linearizer.device):
                rows = draw(values, n_samples, generator, diagonal_output)
            samples = positions.restore(rows.flatten(0, 1))
            parts.append(samples.unflatten(0, (n_samples, -1)).to(self.dtype))
        return torch.cat(parts, 1)

    # Jointly over all inputs

    def joint(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean `(n,)` and covariance `(n, n)` of all n = B·S·C values."""
        f, *parts = self._joint_parts(x)
        with full_precision(self.linearizer.device):
            covariance = self.posterior.joint_covariance(*parts)
        return f.flatten().to(self.dtype), covariance.to(self.dtype)

    def joint_groups(
        self, x: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(b, n)` and `(b, n, n)`: the same of b groups of `size` inputs."""
        at_once = len(x) // size
        if self.posterior.needs_residual:  # Jacobians of some groups at a time
            n_values = self.linearizer.n_values(x[:size])
            at_once = max(1, BUDGET // (n_values * self.linearizer.n_params))
        means, covariances = [], []
        for part in x.split(size * at_once):
            f, *products = self._joint_parts(part, len(part) // size)
            means.append(f.reshape(len(part) // size, -1))
            with full_precision(self.linearizer.device):
                covariances.append(self.posterior.joint_covariance(*products))
        return torch.cat(means).to(self.dtype), torch.cat(covariances).to(self.dtype)

    def _joint_parts(
        self, x: Any, n_groups: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return outputs as the model gives them, features `(n, K)` and, if needed,
        residuals `(n, n)` of all n = B·S·C function values, or of those of each group
        `(b, n, ...)`."""
        groups = () if n_groups is None else (n_groups,)
        if not self.posterior.needs_residual:
            features = features_for(
                self.posterior, self.linearizer, x, self.create_graph
            )
            phi = features.positions.outputs(features.phi)
            phi = phi.reshape(*groups, -1, phi.shape[-1])
            return features.positions.restore(features.f), phi
        f, J, positions = self.linearizer.jacobian(x, self.create_graph)
        J = J.reshape(*groups, -1, J.shape[-1])
        return f.unflatten(1, positions.output_shape), *self._products(J)

    def _products(self, J: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return features `(..., n, K)` of gradients `(..., n, P)` and, if needed, the
        products of their parts outside the basis and, `(..., 1, n, n)`, the span."""
        posterior = self.posterior
        with full_precision(J.device):
            phi, rest, *beyond = split_gradients(
                J, posterior.basis.directions.to(J), posterior.metric, posterior.span
            )
            if not posterior.needs_residual:
                return (phi,)
            return phi, rest @ rest.mT, *((b @ b.mT).unsqueeze(-3) for b in beyond)

    def joint_samples(
        self, x: Any, n_samples: int, generator: torch.Generator | None
    ) -> torch.Tensor:
        """Return samples `(n_samples, B, ...)` of one function each, at all inputs."""
        posterior, linearizer = self.posterior, self.linearizer
        drawn = {"generator": generator, "device": linearizer.device}
        # At the prior, weights have the covariance that function values have, and
        # samples of them are smaller than the gradients of many function values.
        at_prior = posterior.complement is Complement.PRIOR and not self.create_graph
        if at_prior and linearizer.n_values(x) > n_samples:
            samples, drawn["dtype"] = [], linearizer.dtype
            for part in chunks(n_samples, BUDGET // posterior.n_params):
                n = part.stop - part.start
                with full_precision(linearizer.device):
                    offsets = posterior.sample_offsets(
                        torch.randn(n, posterior.rank, **drawn),
                        torch.randn(n, posterior.n_params, **drawn),
                    )
                samples.append(self._values_at(x, offsets))
            return torch.cat(samples)
        f, *parts = self._joint_parts(x)
        with full_precision(linearizer.device):
            root = posterior.joint_root(*parts)  # (n, R)
            noise = torch.randn(n_samples, root.shape[1], **drawn, dtype=root.dtype)
            return (f + (noise @ root.mT).unflatten(-1, f.shape)).to(self.dtype)

    def _values_at(self, x: Any, offsets: torch.Tensor) -> torch.Tensor:
        """Return f + J(θ − θ̂) `(n, B, ...)` for offsets `(n, P)`, without J."""
        parts = []
        for part in self.linearizer.parts(x, 2 * len(offsets)):
            features = self.linearizer.features(part, offsets)
            values = features.f.unsqueeze(-1) + features.phi  # (b·S, C, n)
            values = features.positions.restore(values).movedim(-1, 0)
            parts.append(values.to(self.dtype))
        return torch.cat(parts, 1)

    def network_samples(
        self, x: Any, weights: Iterable[torch.Tensor], **model_kwargs: Any
    ) -> torch.Tensor:
        """Return outputs of the network with each of the weights `(P,)`."""
        fn = self.linearizer.fn
        dtypes = [p.dtype for p in fn.parameters()]
        outputs = []
        for theta in weights:  # one by one: a sample is as large as the model
            params = [t.to(d) for t, d in zip(fn.split(theta), dtypes, strict=True)]
            outputs.append(fn(params, x, **model_kwargs).to(self.dtype))
        return torch.stack(outputs)

    # From Jacobians that are given

    def covariance_of(self, J: torch.Tensor, joint: bool = False) -> torch.Tensor:
        """Return the covariance `(B, C, C)` of Jacobians `(B, C, P)`, or one matrix."""
        J = J.to(self.linearizer.dtype)
        parts = self._products(J.flatten(0, 1) if joint else J)
        return self.posterior.joint_covariance(*parts).to(self.dtype)
