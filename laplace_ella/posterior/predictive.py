"""Predictions of a posterior at new inputs, in parts that fit in the memory budget.

Only what is asked for jointly over all inputs is computed at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from laplace_ella.derivatives.jacobians import accurate_product
from laplace_ella.derivatives.linearizer import Features, Linearizer
from laplace_ella.posterior.complement import Complement
from laplace_ella.posterior.observation import (
    FunctionValues,
    Link,
    ObservationModel,
    draw,
    psd_root,
)
from laplace_ella.posterior.posterior import SubspacePosterior
from laplace_ella.support.batches import Positions, chunks, to_device

#: Numbers that samples of the weights, or the Jacobians of groups of inputs, have
#: together.
BUDGET = 2**24


def features_for(
    posterior: SubspacePosterior,
    linearizer: Linearizer,
    x: Any,
    create_graph: bool = False,
    top: int | None = None,
) -> Features:
    """Return outputs and features of inputs on the device and, where the complement is
    kept, the part of their gradients outside the basis; of the `top` outputs, or all.
    """
    if not posterior.needs_residual:
        return linearizer.features(x, posterior.basis.directions, create_graph, top)
    split = posterior.gradient_split
    return linearizer.features_and_residual(x, split, create_graph, top)


@dataclass(frozen=True)
class Predictor:
    """A posterior together with the model whose outputs it is about.

    Inputs are moved to the model's device. Results have the shape of its output and
    this `dtype`, and can be differentiated by the inputs with `create_graph`.
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
        for part in linearizer.parts(to_device(x, linearizer.device), numbers):
            found = features_for(posterior, linearizer, part, self.create_graph, top)
            values = posterior.function_values(
                found.f, found.phi, found.residual, found.outputs
            )
            yield values, found.positions

    def features(self, x: Any, directions: torch.Tensor) -> Features:
        """Return outputs and features in directions Vᵀ `(K, P)`."""
        linearizer, K = self.linearizer, len(directions)
        parts = linearizer.parts(to_device(x, linearizer.device), 2 * K)
        how = directions, self.create_graph
        found = [linearizer.features(part, *how) for part in parts]
        f, phi = torch.cat([p.f for p in found]), torch.cat([p.phi for p in found])
        return Features(f.to(self.dtype), phi.to(self.dtype), found[0].positions)

    def marginal(
        self, x: Any, diagonal_output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean, and the covariance of the C outputs at each position;
        variances in the shape of the output if `diagonal_output`."""
        means, spreads = [], []
        layout, shape = self.observation.layout, self.linearizer.output_shape
        n_results = 1 if diagonal_output else layout.of(shape).n_channels
        for values, positions in self.function_values(x, n_results=n_results):
            means.append(positions.restore(values.mean).to(self.dtype))
            if diagonal_output:
                spread = positions.restore(values.variance())
            else:
                spread = positions.restore_positions(values.covariance())
            spreads.append(spread.to(self.dtype))
        return torch.cat(means), torch.cat(spreads)

    def probabilities(
        self,
        x: Any,
        link_approx: Link,
        n_samples: int,
        diagonal_output: bool,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        """Return probabilities of classes or labels, by one of the links."""
        parts, how = [], (link_approx, n_samples, diagonal_output, generator)
        for values, positions in self.function_values(x, self.observation.top_outputs):
            rows = self.observation.probabilities(values, *how)
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
            rows = draw(values, n_samples, generator, diagonal_output)
            samples = positions.restore(rows.flatten(0, 1))
            parts.append(samples.unflatten(0, (n_samples, -1)).to(self.dtype))
        return torch.cat(parts, 1)

    # Jointly over all inputs

    def joint(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean `(n,)` and covariance `(n, n)` of all n = B·S·C values."""
        values = self._joint_values(to_device(x, self.linearizer.device))
        return values.mean.flatten().to(self.dtype), values.covariance().to(self.dtype)

    def joint_groups(
        self, x: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(b, n)` and `(b, n, n)`: the same of b groups of `size` inputs."""
        x, at_once = to_device(x, self.linearizer.device), len(x) // size
        if self.posterior.needs_residual:  # Jacobians of some groups at a time
            n_values = self.linearizer.n_values(x[:size])
            at_once = max(1, BUDGET // (n_values * self.linearizer.n_params))
        parts = x.split(size * at_once)
        found = [self._joint_values(part, len(part) // size) for part in parts]
        means = [f.mean.flatten().unflatten(0, f.factor.shape[:2]) for f in found]
        covariances = [f.covariance() for f in found]
        return torch.cat(means).to(self.dtype), torch.cat(covariances).to(self.dtype)

    def _joint_values(self, x: Any, *groups: int) -> FunctionValues:
        """Return the Gaussian over all n = B·S·C function values, or over those of each
        of some groups; its mean as the model gives it."""
        if self.posterior.needs_residual:
            f, J, positions = self.linearizer.jacobian(x, self.create_graph)
            f = f.unflatten(1, positions.output_shape)
            return self._values_of(f, J.reshape(*groups, -1, J.shape[-1]))
        found = features_for(self.posterior, self.linearizer, x, self.create_graph)
        phi = found.positions.outputs(found.phi).reshape(
            *groups, -1, found.phi.shape[-1]
        )
        return self.posterior.function_values(found.positions.restore(found.f), phi)

    def _values_of(self, f: torch.Tensor, J: torch.Tensor) -> FunctionValues:
        """Return the Gaussian over values f whose gradients are J `(..., n, P)`."""
        phi, *rests = self.posterior.gradient_split(J)
        residual = torch.stack([accurate_product(rest, rest) for rest in rests], -3)
        return self.posterior.function_values(f, phi, residual)

    def joint_samples(
        self, x: Any, n_samples: int, generator: torch.Generator | None
    ) -> torch.Tensor:
        """Return samples `(n_samples, B, ...)` of one function each, at all inputs."""
        posterior, linearizer = self.posterior, self.linearizer
        x = to_device(x, linearizer.device)
        drawn = {"generator": generator, "device": linearizer.device}
        # At the prior, weights have the covariance that function values have, and
        # samples of them are smaller than the gradients of many function values.
        at_prior = posterior.complement is Complement.PRIOR and not self.create_graph
        if at_prior and linearizer.n_values(x) > n_samples:
            samples, drawn["dtype"] = [], linearizer.dtype
            for part in chunks(n_samples, BUDGET // posterior.n_params):
                n = part.stop - part.start
                offsets = posterior.sample_offsets(
                    torch.randn(n, posterior.rank, **drawn),
                    torch.randn(n, posterior.n_params, **drawn),
                )
                found = self.features(x, offsets)  # J(θ − θ̂), without J
                values = found.f.unsqueeze(-1) + found.phi  # (B·S, C, n)
                samples.append(found.positions.restore(values).movedim(-1, 0))
            return torch.cat(samples)
        values = self._joint_values(x)
        f, root = values.mean, values.factor  # (n, R)
        if values.residual is not None:
            root = psd_root(values.covariance())
        noise = torch.randn(n_samples, root.shape[1], **drawn, dtype=root.dtype)
        return (f + accurate_product(noise, root).unflatten(-1, f.shape)).to(self.dtype)

    def network(self, x: Any, theta: torch.Tensor, **model_kwargs: Any) -> torch.Tensor:
        """Return outputs of the network with other weights θ `(P,)`."""
        fn, x = self.linearizer.fn, to_device(x, self.linearizer.device)
        pairs = zip(fn.split(theta), fn.parameters(), strict=True)
        params = [t.to(p.dtype) for t, p in pairs]
        return fn(params, x, **model_kwargs).to(self.dtype)

    def covariance_of(self, J: torch.Tensor, joint: bool = False) -> torch.Tensor:
        """Return the covariance `(B, C, C)` of Jacobians `(B, C, P)`, or one matrix."""
        J = J.to(self.linearizer.dtype)
        J = J.flatten(0, 1) if joint else J
        return self._values_of(J[..., 0], J).covariance().to(self.dtype)  # any mean
