"""What `ELLALaplace` assumes of the targets: their distribution, layout and noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from laplace.baselaplace import BaseLaplace
from laplace.utils.enums import Likelihood

from laplace_ella.posterior import likelihood
from laplace_ella.posterior.likelihood import Family
from laplace_ella.support.checks import check_positive
from laplace_ella.support.layout import Positions

__all__ = ["Observing", "from_numpy"]


def from_numpy(value: Any) -> Any:
    """Numpy arrays, which Laplace refuses, as a number or a tensor."""
    if not isinstance(value, np.ndarray):
        return value
    return value.item() if value.size == 1 else torch.as_tensor(value)


class Observing:
    """The part of `ELLALaplace` that relates outputs to targets."""

    @property
    def _family(self) -> Family:
        return Family.of(self.likelihood, self.multi_label)

    def _check_multi_label(self) -> None:
        if self.multi_label and self.likelihood != Likelihood.CLASSIFICATION:
            raise ValueError(
                "multi_label=True is for likelihood='classification', got "
                f"{Likelihood(self.likelihood).value!r}."
            )

    # Layout

    @property
    def _positions(self) -> Positions:
        """Positions and channels of the output that was computed last."""
        return self.output_layout.of(self._linearizer.fn.output_shape)

    def _outputs(self, x: Any) -> torch.Tensor:
        """f `(B, S·C)` by a plain forward pass."""
        f = self.model(x)
        likelihood.check_outputs(f, self.output_layout)
        self._linearizer.fn.output_shape = tuple(f.shape[1:])
        return f.flatten(1)

    def _target_rows(self, f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Targets of outputs in rows `(B·S, C)`, checked and on the device."""
        positions = self._positions
        size = len(f) // positions.n_positions
        y = likelihood.check_targets(y, size, positions, self._family)
        likelihood.check_classes(f, y, self._family, may_ignore=bool(positions.shape))
        return y.to(self._device)

    # Noise

    @property
    def sigma_noise(self) -> torch.Tensor:
        """Standard deviation of the observation noise, for regression: a scalar, or
        one for each of the C outputs."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, sigma_noise: float | torch.Tensor | np.ndarray) -> None:
        sigma_noise = from_numpy(sigma_noise)
        several = isinstance(sigma_noise, torch.Tensor) and sigma_noise.numel() != 1
        if several and (sigma_noise.ndim != 1 or not sigma_noise.numel()):
            raise ValueError(
                "sigma_noise must be a number or one number an output, (C,), got "
                f"shape {tuple(sigma_noise.shape)}."
            )
        check_positive("sigma_noise", sigma_noise)
        if not several:
            BaseLaplace.sigma_noise.fset(self, sigma_noise)
            return
        if not self._family.is_regression:
            raise ValueError(
                "sigma_noise is for regression; this likelihood is "
                f"{Likelihood(self.likelihood).value!r}."
            )
        if self.stochastic:
            raise ValueError(
                "stochastic=True mixes the outputs, so it needs one sigma_noise for "
                f"all of them, got {sigma_noise.numel()} values."
            )
        if self.basis is not None:
            self._check_per_output(self.H, sigma_noise)
        self._sigma_noise = sigma_noise.to(self._device, self._dtype)
        self._posterior_scale = None

    @staticmethod
    def _check_per_output(H: torch.Tensor, sigma_noise: torch.Tensor) -> None:
        """The curvature must have been added up output by output."""
        if H.ndim == 2:
            raise ValueError(
                "This posterior was fitted with one sigma_noise for all outputs. Set "
                f"the {sigma_noise.numel()} values before fit()."
            )
        if len(H) != sigma_noise.numel():
            raise ValueError(
                f"sigma_noise has {sigma_noise.numel()} values, the model "
                f"{len(H)} outputs."
            )

    @property
    def _H_factor(self) -> torch.Tensor:
        return 1 / self.sigma_noise.square() / self.temperature

    def _weighted(self, H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Curvature `(K, K)` and the factor it is multiplied by.

        Curvature of each output, `(C, K, K)`, is weighted by the output's noise.
        """
        if H.ndim == 2:
            return H, torch.as_tensor(self._H_factor)
        precisions = self.sigma_noise.double().square().reciprocal().expand(len(H))
        temperature = torch.as_tensor(self.temperature, dtype=H.dtype, device=H.device)
        return torch.einsum("c,ckl->kl", precisions, H), 1 / temperature

    @property
    def log_likelihood(self) -> torch.Tensor:
        """Log likelihood of the training data at θ̂, differentiable in the noise."""
        if torch.as_tensor(self.loss).ndim == 0:
            return super().log_likelihood
        n_each = self.n_data * self.n_outputs / len(self.loss)
        noise = self.sigma_noise.expand_as(self.loss)
        normalizer = n_each * (noise * math.sqrt(2 * math.pi)).log()
        return -(self._H_factor * self.loss + normalizer).sum()
