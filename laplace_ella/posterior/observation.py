"""What is assumed of the targets: their distribution, their layout and their noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from laplace_ella import metrics
from laplace_ella.posterior import likelihood, predictive
from laplace_ella.posterior.likelihood import Family
from laplace_ella.posterior.predictive import FunctionValues
from laplace_ella.support.layout import OutputLayout, Positions
from laplace_ella.support.links import Link

__all__ = ["ObservationModel"]


@dataclass(frozen=True)
class ObservationModel:
    """How targets arise from the outputs of the model.

    Attributes
    ----------
    family : Family
        distribution of the targets at one position
    layout : OutputLayout
        where the outputs have their channels
    sigma_noise : torch.Tensor
        standard deviation of the noise, for regression: a scalar, or one per output
        `(C,)`
    temperature : float or torch.Tensor
        T, by which the log likelihood is divided
    softmax_temperature : float
        τ, by which the outputs are divided before the softmax or sigmoid of
        predictions; loss and curvature are those of the outputs as they are
    top_outputs : int, optional
        predicted probabilities know the variance of so many outputs, the largest ones;
        of all by default
    """

    family: Family
    layout: OutputLayout
    sigma_noise: torch.Tensor
    temperature: float | torch.Tensor
    softmax_temperature: float = 1.0
    top_outputs: int | None = None

    @property
    def has_several_noises(self) -> bool:
        """Whether the outputs differ in their noise."""
        return self.sigma_noise.numel() > 1

    def check_noise(self, positions: Positions) -> None:
        """As many noises as there are outputs at a position, if not one for all."""
        n, C = self.sigma_noise.numel(), positions.n_channels
        if n not in (1, C):
            raise ValueError(
                f"sigma_noise has {n} values, the model {C} outputs"
                f"{' at each position' if positions.shape else ''}: pass one "
                "number, or one for each output."
            )

    def rows(
        self, y: torch.Tensor, n_rows: int, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Checked targets as rows, and which of these are observed (None for all)."""
        size = n_rows // positions.n_positions
        y = likelihood.target_rows(y, size, positions, self.family)
        known = likelihood.observed(y, self.family)
        return y, known

    def weigh(self, H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Curvature `(K, K)` and the factor f it is multiplied by.

        Curvature per output, `(C, K, K)`, is weighted by the output's noise.
        """
        sigma = self.sigma_noise
        temperature = torch.as_tensor(
            self.temperature, dtype=sigma.dtype, device=sigma.device
        )
        if H.ndim == 2:
            return H, 1 / sigma.square() / temperature
        precisions = sigma.double().square().reciprocal().expand(len(H))
        return torch.einsum("c,ckl->kl", precisions, H), 1 / temperature

    def log_likelihood(
        self, loss: torch.Tensor, n_data: int, n_outputs: int
    ) -> torch.Tensor:
        """Log likelihood of N data from their loss, differentiable in the noise.

        `loss` is a sum over all outputs, or one value per output `(C,)`.
        """
        sigma = self.sigma_noise
        factor = 1 / sigma.square() / self.temperature
        if not self.family.is_regression:
            return -(factor * loss).sum()
        loss = loss.reshape(-1)
        n_each = n_data * n_outputs / loss.numel()
        noise = sigma.reshape(-1).expand_as(loss)
        normalizer = n_each * (noise * math.sqrt(2 * math.pi)).log()
        return -(factor * loss + normalizer).sum()

    def check_link(self, link_approx: Link, n_channels: int | None = None) -> None:
        """Refuse a link that is not for predictions of C outputs, if C is known."""
        bridges = (Link.BRIDGE, Link.BRIDGE_NORM)
        if self.family is Family.BERNOULLI and link_approx not in (
            Link.PROBIT,
            Link.MC,
        ):
            raise ValueError(
                f"link_approx={link_approx.value!r} is for one class of several: the "
                "Laplace bridge leads to a Dirichlet, and a common shift matters to "
                "sigmoids. With multi_label=True use link_approx='probit' or 'mc'."
            )
        top = self.top_outputs
        some = top is not None and (n_channels is None or top < n_channels)
        if some and link_approx in bridges:
            raise ValueError(
                f"link_approx={link_approx.value!r} needs the variance of all classes, "
                f"got top_outputs={top}. Set top_outputs=None, or use "
                "'probit', 'probit_centered' or 'mc'."
            )

    def logits(self, f: FunctionValues) -> FunctionValues:
        """f/τ, of which the predicted probabilities are the softmax or sigmoid."""
        return f.divided_by(self.softmax_temperature)

    def probabilities(
        self,
        f: FunctionValues,
        link_approx: Link | str,
        n_samples: int,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Probabilities (B, C) of classes or labels by one of the links."""
        return predictive.class_probabilities(
            self.logits(f),
            link_approx,
            n_samples,
            diagonal_output,
            generator,
            self.family,
        )

    def sampled_probabilities(
        self, samples: torch.Tensor, dim: int = -1
    ) -> torch.Tensor:
        """Probabilities of sampled outputs, whose classes are in dimension `dim`."""
        tau = self.softmax_temperature
        return self.family.probabilities(samples if tau == 1 else samples / tau, dim)

    def example_losses(self) -> Callable[..., torch.Tensor]:
        """Negative log likelihood of every example `(N,)`, from probabilities and
        targets; regression takes means, variances of the function `(N, C)` and targets.
        """
        if self.family is Family.CATEGORICAL:
            return metrics.nll_per_example
        if self.family is Family.BERNOULLI:
            return metrics.bernoulli_nll_per_example
        noise = self.sigma_noise.detach().square()

        def nll(mean: torch.Tensor, var: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return metrics.gaussian_nll_per_example(mean, var + noise.to(var), y)

        return nll

    def default_loss(self) -> Callable[..., float]:
        """Their mean, the loss of every search."""
        losses = self.example_losses()
        return lambda *prediction: float(losses(*prediction).mean())
