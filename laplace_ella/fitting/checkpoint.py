"""How `ELLALaplace` is saved and loaded."""

from __future__ import annotations

from typing import Any

import torch
from laplace.utils.enums import (
    Likelihood,
)
from torch.nn.utils import parameters_to_vector

from laplace_ella.derivatives.model_function import unwrap
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.support.fingerprint import differences, fingerprint

__all__ = ["Checkpointing"]


class Checkpointing:
    """The part of `ELLALaplace` that becomes a file, and comes back."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types: everything but the model, which is fingerprinted."""
        self._check_fitted()
        linearizer = self._linearizer
        return {
            "cls_name": type(self).__name__,
            "likelihood": Likelihood(self.likelihood).value,
            "fingerprint": fingerprint(unwrap(self.model)),
            "parameter_names": list(linearizer.fn.names),
            "H": self.H,
            "loss": torch.as_tensor(self.loss).detach(),
            "n_data": self.n_data,
            "n_outputs": self.n_outputs,
            "prior_mean": self.prior_mean,
            "prior_precision": self.prior_precision.detach(),
            "sigma_noise": self.sigma_noise.detach(),
            "temperature": float(self.temperature),
            "complement": self.complement.value,
            "output_layout": self.output_layout.value,
            "output_shape": linearizer.fn.output_shape,
            "multi_label": self.multi_label,
            "enable_backprop": self.enable_backprop,
            "directions": self.basis.directions,
            "eigenvalues": self.basis.eigenvalues,
            "basis_n_samples": self.basis.n_samples,
            "basis_trace": self.basis.trace,
            "basis_method": self.basis.method,
            **linearizer.state(),
            "seed": self.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a fitted posterior of the same model, likelihood and class."""
        self._check_state(state_dict)
        to_here = {"device": self._device}
        self._set_basis(
            NystromBasis(
                state_dict["directions"].to(self._home),
                state_dict["eigenvalues"].to(**to_here),
                state_dict["basis_n_samples"],
                state_dict["basis_trace"],
                state_dict["basis_method"],
            )
        )
        self.H = state_dict["H"].to(**to_here)
        self.loss = state_dict["loss"].to(**to_here)
        self.n_data = state_dict["n_data"]
        self.n_outputs = state_dict["n_outputs"]
        self.mean = parameters_to_vector(self._linearizer.fn.parameters())
        self.prior_mean = state_dict["prior_mean"]
        self.prior_precision = state_dict["prior_precision"]
        self.sigma_noise = state_dict["sigma_noise"]
        self._linearizer.fn.output_shape = tuple(state_dict["output_shape"])
        self.temperature = state_dict["temperature"]
        self.complement = state_dict["complement"]
        self.enable_backprop = state_dict["enable_backprop"]
        self.seed = state_dict["seed"]
        self._linearizer.n_outputs = self.n_outputs
        self._linearizer.load_state(state_dict)

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        name = type(self).__name__
        if state_dict.get("cls_name") != name:
            raise ValueError(
                f"The checkpoint is of class {state_dict.get('cls_name')}, this is "
                f"{name}. Build it with the same subset_of_weights and "
                "hessian_structure."
            )
        ours = Likelihood(self.likelihood).value
        if state_dict["likelihood"] != ours:
            raise ValueError(
                f"The checkpoint has likelihood {state_dict['likelihood']!r}, this "
                f"object {ours!r}. Build it with the same likelihood."
            )
        for name in ("output_layout", "multi_label"):
            ours, saved = getattr(self, name), state_dict[name]
            if saved != ours:
                raise ValueError(
                    f"The checkpoint has {name}={saved!r}, this object "
                    f"{getattr(ours, 'value', ours)!r}. Build it with the same."
                )
        noises = state_dict["sigma_noise"].numel()
        if self.stochastic and noises > 1:
            raise ValueError(
                f"The checkpoint has {noises} values of sigma_noise, this object "
                f"stochastic={self.stochastic}, which needs one. Build it with "
                "stochastic=False."
            )
        different = differences(state_dict["fingerprint"], unwrap(self.model))
        if different is not None:
            raise ValueError(
                f"The checkpoint belongs to another model: {different}. Load the "
                "model's own weights before the posterior's."
            )
        if state_dict["parameter_names"] != list(self._linearizer.fn.names):
            raise ValueError(
                f"The checkpoint has {len(state_dict['parameter_names'])} uncertain "
                f"parameters, this object {len(self._linearizer.fn.names)}. Set "
                "requires_grad and params= as they were when the posterior was fitted."
            )
