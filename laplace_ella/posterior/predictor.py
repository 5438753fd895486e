"""Predictions of a posterior at new inputs: function values, links and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.posterior import predictive
from laplace_ella.posterior.inputs import features_for
from laplace_ella.posterior.observation import ObservationModel
from laplace_ella.posterior.outside import Complement
from laplace_ella.posterior.predictive import FunctionValues
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.layout import OutputLayout, Positions
from laplace_ella.support.links import Link
from laplace_ella.support.metric import split_gradients
from laplace_ella.support.preserve import full_precision

__all__ = ["Predictor", "class_dim"]

#: Numbers that the Jacobians of groups of inputs have together.
JACOBIAN_BUDGET = 2**24


def class_dim(layout: OutputLayout) -> int:
    """Dimension of the C classes in samples `(n, B, ...)`."""
    return 2 if layout is OutputLayout.CHANNELS_FIRST else -1


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
        self, x: Any, top: int | None = None
    ) -> tuple[FunctionValues, Positions]:
        """Gaussian over the outputs, rows `(B·S, C)`, and where the rows belong; with
        `top`, of which only so many outputs vary."""
        features = features_for(
            self.posterior, self.linearizer, x, self.create_graph, top
        )
        with full_precision(self.linearizer.device):
            values = self.posterior.function_values(
                features.f,
                features.phi,
                features.residual,
                features.unseen,
                features.outputs,
            )
        return values, features.positions

    def marginal(
        self, x: Any, diagonal_output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean, and covariance of the C outputs at each position; variances in the
        shape of the output if `diagonal_output`."""
        values, positions = self.function_values(x)
        mean = positions.restore(values.mean).to(self.dtype)
        with full_precision(self.linearizer.device):
            if diagonal_output:
                return mean, positions.restore(values.variance()).to(self.dtype)
            covariance = positions.restore_positions(values.covariance())
            return mean, covariance.to(self.dtype)

    def probabilities(
        self,
        x: Any,
        link_approx: Link,
        n_samples: int,
        diagonal_output: bool,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        """Probabilities of classes or labels, by one of the links."""
        values, positions = self.function_values(x, self.observation.top_outputs)
        with full_precision(self.linearizer.device):
            rows = self.observation.probabilities(
                values, link_approx, n_samples, diagonal_output, generator
            )
        return positions.restore(rows).to(self.dtype)

    def samples(
        self,
        x: Any,
        n_samples: int,
        generator: torch.Generator | None,
        diagonal_output: bool = False,
        top: int | None = None,
    ) -> torch.Tensor:
        """Function values `(n_samples, B, ...)`, independent between inputs."""
        values, positions = self.function_values(x, top)
        with full_precision(self.linearizer.device):
            rows = predictive.draw(values, n_samples, generator, diagonal_output)
        samples = positions.restore(rows.flatten(0, 1)).unflatten(0, (n_samples, -1))
        return samples.to(self.dtype)

    # Jointly over all inputs

    def _joint_parts(self, x: Any) -> tuple[torch.Tensor, ...]:
        """Outputs as the model gives them, features `(n, K)` and, if needed, residuals
        `(n, n)` of all n = B·S·C function values."""
        if not self.posterior.needs_residual:
            features = features_for(
                self.posterior, self.linearizer, x, self.create_graph
            )
            phi = features.positions.outputs(features.phi).flatten(0, 1)
            return features.positions.restore(features.f), phi
        f, J, positions = self.linearizer.jacobian(x, self.create_graph)
        return f.unflatten(1, positions.output_shape), *self.products(J.flatten(0, 1))

    def products(self, J: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Features `(..., n, K)` of gradients `(..., n, P)` and, if needed, the
        products `(..., n, n)` of their parts outside the basis."""
        posterior = self.posterior
        with full_precision(J.device):
            phi, *rests = split_gradients(
                J, posterior.basis.directions.to(J), posterior.metric, posterior.span
            )
            if not posterior.needs_residual:
                return (phi,)
            return phi, *(rest @ rest.mT for rest in rests)

    def joint(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean `(n,)` and covariance `(n, n)` of all n = B·S·C function values."""
        f, *parts = self._joint_parts(x)
        with full_precision(self.linearizer.device):
            covariance = self.posterior.joint_covariance(*parts)
            return f.flatten().to(self.dtype), covariance.to(self.dtype)

    def joint_groups(
        self, x: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for each of b groups of `size` inputs: `(b, n)` and `(b, n, n)`."""
        if self.posterior.needs_residual:  # Jacobians of some groups at a time
            n = self.linearizer.n_values(x[:size]) * self.linearizer.n_params
            at_once = max(1, JACOBIAN_BUDGET // n)
            parts = [self._jacobian_groups(g, size) for g in x.split(size * at_once)]
            mean, covariance = (torch.cat(part) for part in zip(*parts, strict=True))
        else:
            f, phi = self._joint_parts(x)
            mean = f.reshape(len(x) // size, -1)
            with full_precision(self.linearizer.device):
                grouped = phi.unflatten(0, (len(mean), -1))
                covariance = self.posterior.joint_covariance(grouped)
        return mean.to(self.dtype), covariance.to(self.dtype)

    def _jacobian_groups(
        self, x: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and covariance of groups whose Jacobians are in memory together."""
        f, J, _ = self.linearizer.jacobian(x, self.create_graph)
        mean = f.reshape(len(x) // size, -1)
        parts = self.products(J.reshape(*mean.shape, -1))
        with full_precision(self.linearizer.device):
            return mean, self.posterior.joint_covariance(*parts)

    def joint_samples(
        self, x: Any, n_samples: int, generator: torch.Generator | None
    ) -> torch.Tensor:
        """Samples `(n_samples, B, ...)` of one function each, seen at all inputs."""

        def noise(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(
                n_samples,
                size,
                generator=generator,
                dtype=dtype,
                device=self.linearizer.device,
            )

        if self._more_values_than(x, n_samples):
            return self._samples_by_weights(x, noise).to(self.dtype)
        f, *parts = self._joint_parts(x)
        with full_precision(self.linearizer.device):
            root = self.posterior.joint_root(*parts)  # (n, R)
            offsets = noise(root.shape[1], root.dtype) @ root.mT
            return (f + offsets.unflatten(-1, f.shape)).to(self.dtype)

    def _more_values_than(self, x: Any, n_samples: int) -> bool:
        """Whether samples of the weights are smaller than the gradients of all function
        values, where weights have the covariance that function values have."""
        posterior = self.posterior
        if posterior.complement is not Complement.PRIOR or self.create_graph:
            return False
        return self.linearizer.n_values(x) > n_samples

    def _samples_by_weights(
        self, x: Any, noise: Callable[[int, torch.dtype], torch.Tensor]
    ) -> torch.Tensor:
        """f + J(θ − θ̂) for samples θ: n·S·P operations and no matrix (n, n) or (n, P)
        for n function values."""
        posterior, dtype = self.posterior, self.linearizer.dtype
        with full_precision(self.linearizer.device):
            offsets = posterior.sample_offsets(
                noise(posterior.rank, dtype), noise(posterior.n_params, dtype)
            )
        features = self.linearizer.features(x, offsets)
        values = features.f.unsqueeze(-1) + features.phi  # (B·S, C, n_samples)
        return features.positions.restore(values).movedim(-1, 0)

    def network_samples(
        self, x: Any, weights: Iterable[torch.Tensor], **model_kwargs: Any
    ) -> torch.Tensor:
        """Outputs of the network with each of the weights `(P,)`; its own stay."""
        fn = self.linearizer.fn
        dtypes = [p.dtype for p in fn.parameters()]
        outputs = []
        for theta in weights:  # one by one: a sample is as large as the model
            params = [t.to(d) for t, d in zip(fn.split(theta), dtypes, strict=True)]
            outputs.append(fn(params, x, **model_kwargs).to(self.dtype))
        return torch.stack(outputs)

    # From Jacobians that are given

    def covariance_of(self, J: torch.Tensor, joint: bool = False) -> torch.Tensor:
        """Output covariance `(B, C, C)` for Jacobians `(B, C, P)`, or one matrix."""
        J = J.to(self.linearizer.dtype)
        parts = self.products(J.flatten(0, 1) if joint else J)
        if joint:
            return self.posterior.joint_covariance(*parts).to(self.dtype)
        mean = parts[0][..., 0]  # of the right shape; it plays no part here
        values = self.posterior.function_values(mean, *parts)
        return values.covariance().to(self.dtype)
