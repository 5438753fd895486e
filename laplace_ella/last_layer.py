"""`ELLALLLaplace`: ELLA on the last layer, the default subset of `laplace.Laplace`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from os import PathLike
from typing import Any

import torch
from laplace.utils import FeatureExtractor
from laplace.utils.enums import Likelihood
from torch import nn
from torch.utils.data import DataLoader

from laplace_ella.derivatives.features import FeatureMode
from laplace_ella.derivatives.model_function import unwrap
from laplace_ella.derivatives.rows import RowMode
from laplace_ella.ella import ELLALaplace
from laplace_ella.fitting.data import TrainingData, check_data
from laplace_ella.fitting.fit import NO_BATCH
from laplace_ella.fitting.memory import MemoryEstimate
from laplace_ella.interface.joint import jointly
from laplace_ella.posterior.outside import Complement, EvidenceOf
from laplace_ella.support.layout import OutputLayout

__all__ = ["ELLALLLaplace"]


class ELLALLLaplace(ELLALaplace):
    """ELLA on the parameters of the last linear layer.

    Parameters are those of `ELLALaplace` and of Laplace's last-layer classes. The body
    of the network is run once and carries no tangents; the user's model is used as it
    is, not copied.

    Parameters
    ----------
    feature_reduction
        accepted for compatibility; not needed, because the model itself, with whatever
        reduction it does, is differentiated
    last_layer_name : str, optional
        name of the last layer; found by a forward pass at `fit` if None

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    ... )
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(model, "classification", "last_layer", "nystrom", n_eigenvalues=10)
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> la.n_params, la(torch.randn(4, 2)).shape
    (51, torch.Size([4, 3]))
    """

    # how Laplace(..., subset_of_weights, hessian_structure) finds this class
    _key = ("last_layer", "nystrom")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | torch.Tensor = 1.0,
        prior_precision: float | torch.Tensor = 1.0,
        prior_mean: float | torch.Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        feature_reduction: Any | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Any = None,
        last_layer_name: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
        *,  # named one by one: wrappers of Laplace read the names off the signature
        subsample_size: int = 2000,
        n_eigenvalues: int | str | None = None,
        seed: int = 1234,
        balanced: bool = False,
        complement: Complement | str | float | None = None,
        evidence: EvidenceOf | str = EvidenceOf.WHOLE,
        stochastic: bool | int = False,
        output_layout: OutputLayout | str = OutputLayout.FLAT,
        softmax_temperature: float = 1.0,
        top_outputs: int | None = None,
        multi_label: bool = False,
        feature_mode: FeatureMode | str = FeatureMode.AUTO,
        row_mode: RowMode | str = RowMode.AUTO,
        chunk_size: int | None = None,
        compile: bool | dict[str, Any] = False,
        memory_budget: int | float | str | None = None,
        basis_dtype: torch.dtype | None = None,
        basis_device: torch.device | str | None = None,
        scratch_dir: str | PathLike[str] | None = None,
        distributed: bool | None = None,
    ) -> None:
        if asdl_fisher_kwargs is not None:
            raise ValueError("Last-layer Laplace does not support asdl_fisher_kwargs.")
        super().__init__(
            model,
            likelihood,
            sigma_noise,
            1.0,
            0.0,
            temperature,
            enable_backprop,
            dict_key_x,
            dict_key_y,
            backend,
            backend_kwargs,
            subsample_size=subsample_size,
            n_eigenvalues=n_eigenvalues,
            seed=seed,
            balanced=balanced,
            complement=complement,
            evidence=evidence,
            stochastic=stochastic,
            output_layout=output_layout,
            softmax_temperature=softmax_temperature,
            top_outputs=top_outputs,
            multi_label=multi_label,
            feature_mode=feature_mode,
            row_mode=row_mode,
            chunk_size=chunk_size,
            compile=compile,
            memory_budget=memory_budget,
            basis_dtype=basis_dtype,
            basis_device=basis_device,
            scratch_dir=scratch_dir,
            distributed=distributed,
        )
        self.feature_reduction = feature_reduction
        self._last_layer_name = last_layer_name
        self.last_layer_name = last_layer_name
        self._asked_prior = (prior_precision, prior_mean)
        if last_layer_name is not None:
            self._set_last_layer(last_layer_name)
        else:  # like Laplace: known at fit, checked then
            unknown: dict[str, Any] = {
                "n_params": None,
                "n_layers": None,
                "_prior_precision": prior_precision,
                "_prior_mean": prior_mean,
            }
            self.__dict__.update(unknown)

    @staticmethod
    def _uncertain_names(
        model: nn.Module, patterns: Sequence[str] | None = None
    ) -> list[str]:
        # All for now; the last layer's are known once it is found.
        return [name for name, _ in unwrap(model).named_parameters()]

    def _set_last_layer(self, name: str) -> None:
        """Restrict the posterior to the parameters of one linear layer."""
        model = unwrap(self.model)
        layer = dict(model.named_modules()).get(name)
        if not isinstance(layer, nn.Linear):
            linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
            raise ValueError(
                f"last_layer_name={name!r} must name a torch.nn.Linear, got "
                f"{type(layer).__name__}; the linear layers are {linear}."
            )
        # By identity: a tied parameter is listed under another module's name.
        own = {id(p) for p in layer.parameters()}
        names = [n for n, p in model.named_parameters() if id(p) in own]
        self.last_layer_name = name
        self._restrict(names, *self._asked_prior)

    @jointly("train_loader")
    def estimate_memory(self, train_loader: DataLoader) -> MemoryEstimate:
        check_data(train_loader)
        with self._undisturbed(train_loader):
            self._know_parameters(self._training_data(train_loader))
        return super().estimate_memory(train_loader)

    def _know_parameters(self, data: TrainingData) -> None:
        """Find the last layer by a forward pass, if it is not known yet."""
        if self.last_layer_name is not None:
            return
        x, _ = next(self.fitter.batches(data.few(1, 1)), (None, None))
        if x is None:
            raise ValueError(NO_BATCH)
        self._linearizer.outputs(x)  # tells more clearly what is wrong than the search
        # Laplace's search hooks into the model, so it gets a copy.
        extractor = FeatureExtractor(deepcopy(unwrap(self.model)))
        extractor.find_last_layer(x)
        self._set_last_layer(extractor._last_layer_name)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last_layer_name": self.last_layer_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("last_layer_name")
        if saved is not None and self.last_layer_name not in (None, saved):
            raise ValueError(
                f"The checkpoint's last layer is {saved!r}, this object's "
                f"{self.last_layer_name!r}. Pass last_layer_name={saved!r}."
            )
        if self.last_layer_name is None:
            if saved in dict(unwrap(self.model).named_modules()):
                with self._all_or_nothing():
                    self._set_last_layer(saved)
                    super().load_state_dict(state_dict)
                return
        super().load_state_dict(state_dict)
