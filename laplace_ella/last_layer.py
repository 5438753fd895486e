"""`ELLALLLaplace`: ELLA on the last layer, the default subset of `laplace.Laplace`."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from laplace.utils import FeatureExtractor
from laplace.utils.enums import Likelihood
from torch import nn

from laplace_ella.derivatives.model_function import ModelFunction, unwrap
from laplace_ella.ella import ELLALaplace
from laplace_ella.fitting.data import loader_batches
from laplace_ella.support.batches import batch_size, take

if TYPE_CHECKING:
    from laplace_ella.fitting.sampling import FitPlan


class ELLALLLaplace(ELLALaplace):
    """ELLA on the parameters of the last linear layer.

    Parameters are those of `ELLALaplace` and of Laplace's last-layer classes. The body
    of the network is run once and carries no tangents; the user's model is used as it
    is, not copied.

    Parameters
    ----------
    feature_reduction
        not needed, because the model itself, with whatever reduction it does, is
        differentiated
    last_layer_name : str, optional
        name of the last layer; found by a forward pass at `fit` if None
    **settings
        the keyword arguments of `ELLALaplace`, but for `parameter_names`
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
        **settings: Any,
    ) -> None:
        if "parameter_names" in settings:
            raise TypeError(
                f"{type(self).__name__} has no argument 'parameter_names'. Name the "
                "layer by last_layer_name, or use ELLALaplace."
            )
        super().__init__(
            model,
            likelihood,
            sigma_noise,
            temperature=temperature,
            enable_backprop=enable_backprop,
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
            backend=backend,
            backend_kwargs=backend_kwargs,
            asdl_fisher_kwargs=asdl_fisher_kwargs,
            parameter_names=["*"],  # until the last layer is known
            **settings,
        )
        self.feature_reduction, self.last_layer_name = feature_reduction, None
        # Like Laplace: of which length they may be is known, and checked, at fit.
        self.n_params: Any = None
        self.n_layers: Any = None
        self._prior_precision: Any = prior_precision
        self._prior_mean: Any = prior_mean
        if last_layer_name is not None:
            self._set_last_layer(last_layer_name)

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
        self._restrict(names, self._prior_precision, self._prior_mean)
        self.last_layer_name = name

    def _plan(self, train_loader: Any, *args: Any, **kwargs: Any) -> FitPlan:
        if self.last_layer_name is None:
            self._find_last_layer(train_loader)
        return super()._plan(train_loader, *args, **kwargs)

    def _find_last_layer(self, loader: Any) -> None:
        """Find the last layer by a forward pass."""
        with self._working("finding the last layer"):
            batch = next(loader_batches(loader, self._device, self.dict_key_y), None)
            if batch is None:
                raise ValueError("The loader yields no example to find the last layer.")
            x = take(batch[0], slice(0, 1), batch_size(batch[0], self.dict_key_x))
            # Tells more clearly what is wrong than the search.
            ModelFunction(unwrap(self.model), [])([], x)
            # Laplace's search hooks into the model, so it gets a copy.
            extractor = FeatureExtractor(deepcopy(unwrap(self.model)))
            extractor.find_last_layer(x)
        self._set_last_layer(extractor._last_layer_name)

    def _described(self) -> dict[str, Any]:
        return {**super()._described(), "last_layer_name": self.last_layer_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a fitted posterior, as `ELLALaplace.load_state_dict` does."""
        name = state_dict.get("last_layer_name")
        if self.last_layer_name is None and name is not None:
            self._set_last_layer(name)
        super().load_state_dict(state_dict)
