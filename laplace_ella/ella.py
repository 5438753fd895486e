"""`ELLALaplace`: the Nyström-NTK member of the Laplace family.

The class only wires: sampling, gradients, features, algebra and links are the pure
functions of the other modules. What it does with training data, with new inputs, with
hyperparameters and with files stands in `_fit`, `_predict`, `_tune` and `_checkpoint`;
what it assumes of targets in `_observe`, its densities in `_evidence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from laplace.utils.enums import Likelihood
from torch import nn
from tqdm.auto import tqdm

from laplace_ella.derivatives.backends import resolve
from laplace_ella.derivatives.features import FeatureMode
from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.derivatives.model_function import (
    ModelFunction,
    matching_names,
    unwrap,
)
from laplace_ella.derivatives.rows import RowMode
from laplace_ella.errors import NotFittedError
from laplace_ella.fitting.checkpoint import Checkpointing
from laplace_ella.fitting.evidence import Evidence
from laplace_ella.fitting.fit import Fitting
from laplace_ella.fitting.memory import parse_bytes
from laplace_ella.fitting.observe import Observing, from_numpy
from laplace_ella.fitting.predict import Predicting
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.subspace import Complement, SubspacePosterior
from laplace_ella.support.batches import split_batch, to_device
from laplace_ella.support.checks import check_positive, member, positive_int
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.preserve import evaluation_mode, random_states
from laplace_ella.tuning.tune import Tuning

__all__ = ["ELLALaplace"]


class ELLALaplace(
    Observing,
    Fitting,
    Evidence,
    Predicting,
    Tuning,
    Checkpointing,
    ParametricLaplace,
):
    """Linearised Laplace with a Nyström approximation of the neural tangent kernel.

    ELLA (Deng, Zhou and Zhu, NeurIPS 2022) takes K directions V of parameter space,
    the top right singular vectors of M sampled gradients, and is a Laplace posterior
    on θ = θ̂ + Vz: z ~ N(0, G⁻¹), with the K×K precision G = Σ φᵀΛφ/(σ²T) + VᵀDV and
    the features φ(x) = J(x)V. Neither the Jacobian J nor any P×P matrix is formed.

    Predictions, samples, evidence and tuning have Laplace's interface and shapes; what
    Laplace gives as P×P (`H`, `posterior_precision`, `posterior_covariance`) is K×K
    here, in the coordinates z, and float64.

    Parameters
    ----------
    model, likelihood, sigma_noise, prior_precision, prior_mean, temperature, \
enable_backprop, dict_key_x, dict_key_y
        as for every `laplace.ParametricLaplace`
    backend : CurvlinopsGGN, BackPackGGN, AsdlGGN or None, default=None
        who takes the sampled gradients: torch.func (`CurvlinopsGGN` and None),
        BackPACK or ASDL. The numbers are the same; a layer that BackPACK or ASDL does
        not support is an error. Backends of the empirical Fisher and of the Hessian
        are refused: the curvature of ELLA is the GGN
    backend_kwargs : dict, optional
        only 'stochastic', as the argument of that name
    asdl_fisher_kwargs : dict, optional
        for compatibility: must be empty, there is no ASDL Fisher here
    subsample_size : int, default=2000
        M, the number of gradients from which the directions are computed; every
        (example, output) pair is used once if there are fewer
    n_eigenvalues : int or "auto", default=20
        K, the number of directions; "auto" takes as many as hold 90 % of the sampled
        gradients' energy, at most 128
    seed : int, default=1234
        of the sampled pairs and of Monte-Carlo predictions without a generator; torch's
        global random state is neither read nor changed
    balanced : bool, default=False
        draw the classes evenly
    feature_mode : FeatureMode or str, default="auto"
        direction of differentiation, see `FeatureMode`
    row_mode : RowMode or str, default="auto"
        how sampled gradients are taken, see `RowMode`; `backend` may set it
    complement : Complement or str, default="drop"
        what becomes of the directions outside the basis, see `Complement`; may be
        changed after the fit
    stochastic : bool or int, default=False
        estimate the curvature from targets sampled from the model, so many an example:
        one backward pass each, however many outputs and directions there are
    chunk_size : int, optional
        examples that are differentiated at once; chosen automatically
    memory_budget : int or str, optional
        bytes, or a text like "8 GB", that a fit may use; by default 70 % of what is
        free. Sampled gradients that do not fit are summarised as they come, see
        `RowSketch`; `estimate_memory` tells beforehand
    basis_dtype, basis_device : optional
        where and how precisely the directions are kept, for example torch.bfloat16 or
        "cpu" beside a model on a GPU
    compile : bool or dict, default=False
        compile the forward-mode pass with `torch.compile`, with these arguments
    output_layout : OutputLayout or str, default="flat"
        where the outputs of models that predict at many positions (tokens, pixels) have
        their channels, see `OutputLayout`; predictions come in the model's layout.
        Positions with class index -100 count for nothing
    multi_label : bool, default=False
        classification with C labels that are there or not, each by a sigmoid, instead
        of one class of C; targets are 0 or 1, in the shape of the output
    params : sequence of str, optional
        names of the parameters that get a posterior, or patterns like "encoder.*"; all
        that require gradients by default

    Attributes
    ----------
    basis : NystromBasis
        the directions and their spectrum, after `fit`
    H : torch.Tensor
        projected curvature Σ φᵀΛφ `(K, K)`, without noise and temperature; of each
        output `(C, K, K)` where `sigma_noise` has a value for each
    history : list of dict
        'n_data' and validation 'loss' in the course of the last fit

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
    >>> la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=10)
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> la(torch.randn(4, 2), link_approx="mc", n_samples=512).shape
    torch.Size([4, 3])
    """

    # how Laplace(..., subset_of_weights, hessian_structure) finds this class
    _key = ("all", "nystrom")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | torch.Tensor = 1.0,
        prior_precision: float | torch.Tensor = 1.0,
        prior_mean: float | torch.Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
        *,
        subsample_size: int = 2000,
        n_eigenvalues: int | str = 20,
        seed: int = 1234,
        balanced: bool = False,
        feature_mode: FeatureMode | str = FeatureMode.AUTO,
        row_mode: RowMode | str = RowMode.AUTO,
        complement: Complement | str = Complement.DROP,
        stochastic: bool | int = False,
        chunk_size: int | None = None,
        memory_budget: int | float | str | None = None,
        basis_dtype: torch.dtype | None = None,
        basis_device: torch.device | str | None = None,
        compile: bool | dict[str, Any] = False,
        output_layout: OutputLayout | str = OutputLayout.FLAT,
        multi_label: bool = False,
        params: Sequence[str] | None = None,
    ) -> None:
        self.subsample_size = positive_int("subsample_size", subsample_size)
        self.n_eigenvalues = n_eigenvalues
        if n_eigenvalues != "auto":
            self.n_eigenvalues = positive_int("n_eigenvalues", n_eigenvalues)
        if chunk_size is not None:
            positive_int("chunk_size", chunk_size)
        self.row_mode, stochastic = resolve(
            backend,
            backend_kwargs,
            asdl_fisher_kwargs,
            member(RowMode, "row_mode", row_mode),
            stochastic,
        )
        if not isinstance(stochastic, bool):
            positive_int("stochastic", stochastic)
        if memory_budget is not None:
            parse_bytes(memory_budget)
        self.stochastic = stochastic
        self.memory_budget = memory_budget
        self.basis_dtype = basis_dtype
        self.basis_device = None if basis_device is None else torch.device(basis_device)
        self.seed = seed
        self.balanced = balanced
        self.feature_mode = member(FeatureMode, "feature_mode", feature_mode)
        self.chunk_size = chunk_size
        self.compile = compile
        self.basis: NystromBasis | None = None
        self._layer_grams: list[torch.Tensor] = []
        self.complement = complement
        self._stream: torch.Generator | None = None
        self.history: list[dict[str, float]] = []
        self.output_layout = member(OutputLayout, "output_layout", output_layout)
        self.multi_label = multi_label
        names = self._laplace_parameters(model, params)
        sigma_noise = from_numpy(sigma_noise)
        several = isinstance(sigma_noise, torch.Tensor) and sigma_noise.numel() != 1
        super().__init__(
            model,
            likelihood,
            1.0 if several else sigma_noise,
            prior_precision if params is None else 1.0,
            prior_mean if params is None else 0.0,
            temperature,
            enable_backprop,
            dict_key_x,
            dict_key_y,
            None,  # Laplace refuses BackPACK with frozen layers, which work here
            backend_kwargs,
            asdl_fisher_kwargs,
        )
        if backend is not None:
            self._backend_cls = backend
        self._linearizer = Linearizer(
            ModelFunction(unwrap(model), names),
            dict_key_x,
            self.feature_mode,
            self.row_mode,
            chunk_size,
            compile,
        )
        self._check_multi_label()
        if several:
            self.sigma_noise = sigma_noise
        if params is not None:
            self._restrict(names, prior_precision, prior_mean)

    @staticmethod
    def _laplace_parameters(
        model: nn.Module, patterns: Sequence[str] | None = None
    ) -> list[str]:
        """Names of the parameters that get a posterior: those that were asked for, or
        all that require gradients."""
        named = list(unwrap(model).named_parameters())
        if patterns is not None:
            return matching_names([name for name, _ in named], patterns)
        names = [name for name, p in named if p.requires_grad]
        if not names:
            raise ValueError(
                "The model has no trainable parameter: expected at least one with "
                f"requires_grad=True, got {len(named)} parameters without. Call "
                "requires_grad_(True) on the layers that should be uncertain."
            )
        return names

    def _restrict(
        self,
        names: Sequence[str],
        prior_precision: float | torch.Tensor,
        prior_mean: float | torch.Tensor,
    ) -> None:
        """Give a posterior to these parameters only."""
        model = unwrap(self.model)
        named = dict(model.named_parameters())
        self._linearizer.fn = ModelFunction(model, names)
        self.params = [named[name] for name in names]
        self.n_params = sum(p.numel() for p in self.params)
        self.n_layers = len(self.params)
        self.prior_precision, self.prior_mean = prior_precision, prior_mean
        self.mean = self.prior_mean

    # Settings of the base class that must invalidate or check more here

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of results and hyperparameters: the model's, float32 at least."""
        dtype = next(self.model.parameters()).dtype
        return torch.promote_types(dtype, torch.float32)

    @property
    def temperature(self) -> float:
        """Temperature of the likelihood; setting it changes the posterior at once."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        if not (isinstance(temperature, torch.Tensor) or temperature > 0):
            raise ValueError(
                f"temperature must be positive, got {temperature}. Use a small "
                "positive value for a concentrated posterior."
            )
        self._temperature = temperature
        self._posterior_scale = None

    @property
    def complement(self) -> Complement:
        """What becomes of the directions outside the basis."""
        return self._complement

    @complement.setter
    def complement(self, complement: Complement | str) -> None:
        self._complement = member(Complement, "complement", complement)
        self._posterior_scale = None

    @property
    def prior_precision(self) -> torch.Tensor:
        """Prior precision: scalar `(1,)`, layerwise `(L,)` or diagonal `(P,)`."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, prior_precision: float | torch.Tensor) -> None:
        check_positive("prior_precision", prior_precision)
        BaseLaplace.prior_precision.fset(self, prior_precision)

    # Fitting

    def _init_H(self) -> None:
        rank = 0 if self.n_eigenvalues == "auto" else self.n_eigenvalues
        self.H = torch.zeros(rank, rank, device=self._device, dtype=torch.float64)

    @property
    def rank(self) -> int:
        """K as it came out: n_eigenvalues, or the usable rank if that is lower."""
        self._check_fitted()
        return self.basis.rank

    def _check_fitted(self) -> None:
        if self.basis is None:
            raise NotFittedError(
                f"This {type(self).__name__} is not fitted: call fit(train_loader) or "
                "load_state_dict() first."
            )

    _check_H_init = _check_fitted

    def _set_basis(self, basis: NystromBasis) -> None:
        self.basis = basis
        self._layer_grams = []
        self._posterior_scale = None

    @contextmanager
    def _undisturbed(self, *loaders: Any) -> Iterator[None]:
        """Eval mode, no graph, and everything of the user's restored on exit."""
        with (
            torch.inference_mode(False),  # derivatives need what it leaves out
            evaluation_mode(self.model),
            random_states(self._device, *loaders),
            torch.set_grad_enabled(self.enable_backprop and not loaders),
        ):
            yield

    def _batches(
        self, loader: Any, description: str, progress_bar: bool
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        bar = tqdm(loader, desc=description, disable=not progress_bar)
        for batch in bar:
            x, y = split_batch(batch, self.dict_key_y)
            yield to_device(x, self._device), y

    def _linearize(
        self, x: Any, basis: NystromBasis, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B·S, C) and features (B·S, C, K) of inputs on the device."""
        outputs = self._differentiate(x, basis, create_graph)
        f, phi = (self._positions.rows(t) for t in outputs)
        return f, phi

    def _differentiate(
        self, x: Any, basis: NystromBasis, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, S·C) and features (B, S·C, K) of inputs on the device."""
        f, phi = self._linearizer.features(x, basis.directions, create_graph)
        return f.to(self._dtype), phi.to(self._dtype)

    def _rows_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs (B, S·C) of the model as rows (B·S, C)."""
        return self._positions.rows(outputs.to(self._dtype))

    # Posterior

    @property
    def posterior(self) -> SubspacePosterior:
        """The current posterior; kept until a hyperparameter changes."""
        self._check_fitted()
        if self._posterior_scale is None:
            posterior = self._posterior_of(self.basis, self.H)
            self._posterior_scale = posterior.with_(
                H=posterior.H.detach(),
                factor=posterior.factor.detach(),
                prior=posterior.prior.detach(),
            )
        return self._posterior_scale

    def _build_posterior(self) -> SubspacePosterior:
        """The current posterior with the graph of its hyperparameters."""
        self._check_fitted()
        return self._posterior_of(self.basis, self.H)

    def _posterior_of(self, basis: NystromBasis, H: torch.Tensor) -> SubspacePosterior:
        """A posterior with the current hyperparameters."""
        H, factor = self._weighted(H)
        return SubspacePosterior(
            basis,
            H,
            factor,
            self.prior_precision,
            tuple(self._linearizer.fn.numels()),
            self.complement,
            self._layer_grams if basis is self.basis else [],
        )

    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Weights from the posterior, `(n_samples, P)`."""
        posterior = self.posterior
        self._check_generator(generator)
        generator = generator or self._own_stream()

        def noise(n: int) -> torch.Tensor:
            return torch.randn(
                n_samples,
                n,
                generator=generator,
                dtype=self._dtype,
                device=self._device,
            )

        inside = noise(self.rank)
        outside = noise(self.n_params) if posterior.needs_kernel else None
        return self.mean.to(self._dtype) + posterior.sample_offsets(inside, outside)

    def _own_stream(self) -> torch.Generator | None:
        """Generator of samples without one: goes on from call to call."""
        if self._stream is None:
            self._stream = self._fresh_generator()
        return self._stream

    def _fresh_generator(self) -> torch.Generator | None:
        """A generator on the model's device, made from `seed`."""
        if self._device.type == "cuda" and not torch.cuda.is_available():
            return None  # fake tensors: there is no device to draw on
        return torch.Generator(self._device).manual_seed(self.seed)

    def __getstate__(self) -> dict[str, Any]:
        # Generators do not move between devices; the posterior is made anew.
        return {**self.__dict__, "_stream": None, "_posterior_scale": None}
