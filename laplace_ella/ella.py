"""`ELLALaplace`: the Nyström-NTK member of the Laplace family.

The classes here only wire: sampling, gradients, features, algebra and links are the
pure functions of the other modules.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchmetrics
from laplace.baselaplace import BaseLaplace, ParametricLaplace
from laplace.utils import FeatureExtractor
from laplace.utils.enums import (
    Likelihood,
    LinkApprox,
    PredType,
    PriorStructure,
    TuningMethod,
)
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from laplace_ella import _sampling, likelihood, predictive, tuning
from laplace_ella._batch import batch_size, has_values, split_batch, to_device
from laplace_ella._errors import NotFittedError, RankWarning
from laplace_ella._fingerprint import differences, fingerprint
from laplace_ella._functional import ModelFunction, unwrap
from laplace_ella._preserve import evaluation_mode, random_states
from laplace_ella.cache import FeatureCache
from laplace_ella.features import FeatureMode
from laplace_ella.linearize import Linearizer
from laplace_ella.memory import (
    MemoryEstimate,
    activation_bytes,
    budget_of,
    parse_bytes,
    sketch_sizes,
)
from laplace_ella.memory import check as check_memory
from laplace_ella.memory import estimate as estimate_memory
from laplace_ella.nystrom import NystromBasis, RowSketch
from laplace_ella.posterior import Complement, SubspacePosterior
from laplace_ella.rows import RowMode, row_dtype
from laplace_ella.stopping import EarlyStopping

__all__ = ["ELLALLLaplace", "ELLALaplace"]

logger = logging.getLogger("laplace_ella")

#: n_eigenvalues="auto": directions until this share of the trace, at most so many.
AUTO_ENERGY = 0.9
AUTO_MAX_RANK = 128


@dataclass(frozen=True)
class _Sums:
    """What a pass over the data adds up."""

    H: torch.Tensor
    loss: torch.Tensor
    n_data: int
    n_outputs: int

    @classmethod
    def zero(cls, rank: int, device: torch.device) -> _Sums:
        H = torch.zeros(rank, rank, dtype=torch.float64, device=device)
        return cls(H, H.new_zeros(()), 0, 0)

    def add(
        self, f: torch.Tensor, psi: torch.Tensor, y: torch.Tensor, lik: Any
    ) -> _Sums:
        """The sums with further outputs (B, C), curvature roots (B, C, K), targets."""
        return _Sums(
            self.H + torch.einsum("bck,bcl->kl", psi, psi),
            self.loss + likelihood.loss(f, y, lik),
            self.n_data + len(f),
            f.shape[-1],
        )


class ELLALaplace(ParametricLaplace):
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
enable_backprop, dict_key_x, dict_key_y, backend, backend_kwargs, asdl_fisher_kwargs
        as for every `laplace.ParametricLaplace`
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
        how sampled gradients are taken, see `RowMode`
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

    Attributes
    ----------
    basis : NystromBasis
        the directions and their spectrum, after `fit`
    H : torch.Tensor
        projected curvature Σ φᵀΛφ `(K, K)`, without noise and temperature
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
    ) -> None:
        self.subsample_size = _positive_int("subsample_size", subsample_size)
        self.n_eigenvalues = n_eigenvalues
        if n_eigenvalues != "auto":
            self.n_eigenvalues = _positive_int("n_eigenvalues", n_eigenvalues)
        for name, value in (("chunk_size", chunk_size), ("stochastic", stochastic)):
            if value not in (None, False, True):
                _positive_int(name, value)
        if memory_budget is not None:
            parse_bytes(memory_budget)
        self.stochastic = stochastic
        self.memory_budget = memory_budget
        self.basis_dtype = basis_dtype
        self.basis_device = None if basis_device is None else torch.device(basis_device)
        self.seed = seed
        self.balanced = balanced
        self.basis: NystromBasis | None = None
        self._layer_grams: list[torch.Tensor] = []
        self.complement = complement
        self._stream: torch.Generator | None = None
        self.history: list[dict[str, float]] = []
        if isinstance(sigma_noise, torch.Tensor) and sigma_noise.numel() != 1:
            raise ValueError(
                "sigma_noise must be one number for all outputs, got shape "
                f"{tuple(sigma_noise.shape)}."
            )
        names = self._laplace_parameters(model)
        super().__init__(
            model,
            likelihood,
            sigma_noise,
            prior_precision,
            prior_mean,
            temperature,
            enable_backprop,
            dict_key_x,
            dict_key_y,
            backend,
            backend_kwargs,
            asdl_fisher_kwargs,
        )
        self._linearizer = Linearizer(
            ModelFunction(unwrap(model), names),
            dict_key_x,
            feature_mode,
            row_mode,
            chunk_size,
            compile,
        )

    @staticmethod
    def _laplace_parameters(model: nn.Module) -> list[str]:
        """Names of the parameters that get a posterior: all that require gradients."""
        named = list(unwrap(model).named_parameters())
        names = [name for name, p in named if p.requires_grad]
        if not names:
            raise ValueError(
                "The model has no trainable parameter: expected at least one with "
                f"requires_grad=True, got {len(named)} parameters without. Call "
                "requires_grad_(True) on the layers that should be uncertain."
            )
        return names

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
        self._complement = _member(Complement, "complement", complement)
        self._posterior_scale = None

    @property
    def prior_precision(self) -> torch.Tensor:
        """Prior precision: scalar `(1,)`, layerwise `(L,)` or diagonal `(P,)`."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, prior_precision: float | torch.Tensor) -> None:
        _check_positive("prior_precision", prior_precision)
        BaseLaplace.prior_precision.fset(self, prior_precision)

    @property
    def sigma_noise(self) -> torch.Tensor:
        """Standard deviation of the observation noise, for regression."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, sigma_noise: float | torch.Tensor) -> None:
        _check_positive("sigma_noise", sigma_noise)
        BaseLaplace.sigma_noise.fset(self, sigma_noise)

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

    def fit(
        self,
        train_loader: DataLoader,
        override: bool = True,
        progress_bar: bool = False,
        *,
        val_loader: DataLoader | None = None,
        early_stopping: EarlyStopping | bool | None = None,
        balanced: bool | None = None,
    ) -> None:
        """Fit the posterior: sample the basis, then add up the curvature.

        Parameters
        ----------
        train_loader : torch.utils.data.DataLoader
            batches `(X, y)` or mappings, over a data set with indices; shuffled, if
            the fit may stop early
        override : bool, default=True
            False keeps the basis and what was added up so far, and adds this data
        progress_bar : bool, default=False
        val_loader : torch.utils.data.DataLoader, optional
            validation data; `history` records the loss on it as data are added
        early_stopping : EarlyStopping or bool, optional
            keep the posterior with the best validation loss, and end the pass when
            there has been no better one for long; True for the default settings
        balanced : bool, optional
            whether to draw the classes evenly; default as given to the constructor
        """
        balanced = self.balanced if balanced is None else balanced
        stopping = self._check_fit_arguments(
            train_loader, val_loader, early_stopping, balanced
        )
        keep = not override and self.basis is not None
        with self._undisturbed(train_loader, *([val_loader] if val_loader else [])):
            # Nothing is assigned before the end: a failed fit loses nothing.
            basis = self.basis
            if not keep:
                basis = self._sample_basis(train_loader, balanced, progress_bar)
            start = _Sums.zero(basis.rank, self._device)
            if keep:
                loss = torch.as_tensor(self.loss).double().to(self._device)
                start = _Sums(self.H, loss, self.n_data, self.n_outputs)
            sums, history = self._add_up(
                train_loader, basis, start, progress_bar, val_loader, stopping
            )
        if not keep:
            self._set_basis(basis)
        self.H, self.n_data, self.n_outputs = sums.H, sums.n_data, sums.n_outputs
        self.loss = sums.loss.to(self._dtype)
        self.history = history
        self.mean = parameters_to_vector(self._linearizer.fn.parameters())
        self._posterior_scale = None

    def _check_fit_arguments(
        self,
        train_loader: Any,
        val_loader: Any,
        early_stopping: EarlyStopping | bool | None,
        balanced: bool,
    ) -> EarlyStopping | None:
        """Refuse what cannot work, before anything is computed."""
        _sampling.check_loader(train_loader)
        if balanced and likelihood.is_regression(self.likelihood):
            raise ValueError(
                "balanced=True draws classes evenly and is for classification; this "
                "likelihood is regression. Use balanced=False."
            )
        if early_stopping and val_loader is None:
            raise ValueError(
                "early_stopping needs val_loader=. Where there is no validation data, "
                "laplace_ella.augmented_validation(train_loader) makes some."
            )
        if early_stopping is None or early_stopping is False:
            return None
        if early_stopping is True:
            return EarlyStopping()
        if not isinstance(early_stopping, EarlyStopping):
            raise TypeError(
                "early_stopping must be True, False or an EarlyStopping(...), got "
                f"{early_stopping!r}."
            )
        return early_stopping

    def _set_basis(self, basis: NystromBasis) -> None:
        self.basis = basis
        self._layer_grams = []
        self._posterior_scale = None

    @contextmanager
    def _undisturbed(self, *loaders: Any) -> Iterator[None]:
        """Eval mode, no graph, and everything of the user's restored on exit."""
        with (
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

    def _sample_basis(
        self, loader: Any, balanced: bool, progress_bar: bool
    ) -> NystromBasis:
        """Draw M pairs (x, i), take their gradients and compute the directions."""
        indices = _sampling.eligible_indices(loader)
        n_outputs = self._count_outputs(loader, indices)
        labels = None
        if balanced:
            labels = _sampling.read_labels(loader.dataset, indices, self.dict_key_y)
        examples, outputs = _sampling.draw_pairs(
            len(indices),
            n_outputs,
            self.subsample_size,
            np.random.default_rng(self.seed),
            labels,
        )
        memory = self._estimate(len(examples))
        check_memory(memory, self._device)
        logger.info("basis: %s\n%s", memory.method, memory)
        capacity, keep = sketch_sizes(memory, self._rank_limit)
        sketch = RowSketch(
            self.n_params,
            capacity,
            keep,
            row_dtype(self._linearizer.fn),
            self.basis_device or self._device,
        )
        self._sketch_rows(loader, sketch, indices, examples, outputs, progress_bar)
        return self._finish_basis(sketch)

    def _sketch_rows(
        self,
        loader: Any,
        sketch: RowSketch,
        indices: np.ndarray,
        examples: np.ndarray,
        outputs: np.ndarray,
        progress_bar: bool,
    ) -> None:
        """Take the gradients of the pairs, each example loaded once."""
        used, where = np.unique(examples, return_inverse=True)
        one_hot = torch.eye(self._linearizer.n_outputs, device=self._device)
        seen, finite = 0, []
        sampled = _sampling.subset(loader, indices[used])
        for x, _ in self._batches(sampled, "[Sampling gradients]", progress_bar):
            size = batch_size(x, self.dict_key_x)
            pairs = np.flatnonzero((where >= seen) & (where < seen + size))
            rows = self._linearizer.rows(
                x,
                torch.as_tensor(where[pairs] - seen, device=self._device),
                one_hot[torch.as_tensor(outputs[pairs], device=self._device)],
            )
            finite.append(torch.isfinite(rows).all())
            sketch.add(rows.to(sketch.buffer.device))
            seen += size
        if sketch.n_samples != len(examples):
            raise ValueError(
                f"The collate function returned {seen} examples for {len(used)} "
                "indices; ELLA needs one example an index."
            )
        _check_finite(finite, "gradients", "while sampling the basis")

    def _finish_basis(self, sketch: RowSketch) -> NystromBasis:
        """The directions, in the dtype that was asked for."""
        if self.n_eigenvalues != "auto":
            basis = sketch.basis(self.n_eigenvalues)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RankWarning)
                basis = sketch.basis(self._rank_limit)
            basis = basis.truncate(int((basis.explained < AUTO_ENERGY).sum()) + 1)
        if self.basis_dtype is not None:
            directions = basis.directions.to(self.basis_dtype)
            basis = dataclasses.replace(basis, directions=directions)
        return basis

    @property
    def _rank_limit(self) -> int:
        """K, or as many directions as are looked at to choose it."""
        return AUTO_MAX_RANK if self.n_eigenvalues == "auto" else self.n_eigenvalues

    def estimate_memory(self, train_loader: DataLoader) -> MemoryEstimate:
        """What `fit(train_loader)` would need, from one forward pass of one example."""
        _sampling.check_loader(train_loader)
        with self._undisturbed(train_loader):
            indices = _sampling.eligible_indices(train_loader)
            n_outputs = self._count_outputs(train_loader, indices)
        return self._estimate(min(self.subsample_size, len(indices) * n_outputs))

    def _estimate(self, n_samples: int) -> MemoryEstimate:
        linearizer = self._linearizer
        rank = min(self._rank_limit, n_samples)
        return estimate_memory(
            self.n_params,
            n_samples,
            rank,
            row_dtype(linearizer.fn).itemsize,
            linearizer.pass_bytes(rank),
            budget_of(self._device, self.memory_budget),
        )

    def _count_outputs(self, loader: Any, indices: np.ndarray) -> int:
        """C, from the output for one example, which also surfaces model errors."""
        for x, _ in self._batches(_sampling.subset(loader, indices[:1]), "", False):
            f, self._linearizer.activations = activation_bytes(self.model, x)
        likelihood.check_outputs(f)
        self._linearizer.n_outputs = f.shape[-1]
        return f.shape[-1]

    def _add_up(
        self,
        loader: Any,
        basis: NystromBasis,
        start: _Sums,
        progress_bar: bool,
        val_loader: Any,
        stopping: EarlyStopping | None,
    ) -> tuple[_Sums, list[dict[str, float]]]:
        """Sums over the data, all of it or up to the best validation loss."""
        if val_loader is None:
            (sums,) = self._running_sums(loader, basis, start, progress_bar)
            return sums, []
        plan = stopping or EarlyStopping()
        posterior = self._posterior_of(basis, start.H)
        validator = tuning.Validator.for_laplace(
            self,
            val_loader,
            plan.loss,
            plan.link_approx,
            plan.n_samples,
            progress_bar,
            posterior,
        )
        history, best, waited = [], None, 0
        checkpoints = plan.checkpoints()
        for sums in self._running_sums(loader, basis, start, progress_bar, checkpoints):
            value = validator.score(posterior.with_(H=sums.H))
            history.append({"n_data": sums.n_data, "loss": value})
            signed = -value if plan.maximize else value
            signed = math.inf if math.isnan(value) else signed
            if best is None or signed < best[0]:
                best, waited = (signed, sums), 0
            else:
                waited += 1
            if stopping is not None and waited >= plan.patience:
                break
        return (sums if stopping is None else best[1]), history

    def _running_sums(
        self,
        loader: Any,
        basis: NystromBasis,
        sums: _Sums,
        progress_bar: bool,
        checkpoints: Iterator[int] | None = None,
    ) -> Iterator[_Sums]:
        """The sums after as many new examples as each checkpoint says, and at the end.

        A batch that a checkpoint divides is linearised once and added in parts.
        """
        seen, finite, current = 0, [], True
        generator = self._fresh_generator()
        due = next(checkpoints) if checkpoints is not None else math.inf
        for x, y in self._batches(loader, "[Computing Hessian]", progress_bar):
            f, psi = self._curvature_root(x, basis, generator)
            y = likelihood.check_targets(f, y, self.likelihood)
            likelihood.check_classes(f, y)
            y = y.to(self._device)
            finite.append(torch.isfinite(f).all() & torch.isfinite(psi).all())
            first = 0
            while first < len(f):
                part = slice(first, int(min(len(f), first + due - seen)))
                sums = sums.add(f[part], psi[part], y[part], self.likelihood)
                seen, first, current = seen + part.stop - first, part.stop, False
                if seen == due:
                    _check_finite(finite, "outputs or derivatives", "of the data")
                    yield sums
                    due, current = next(checkpoints), True
        if seen == 0:
            raise ValueError(
                "The loader yielded no batch; ELLA needs at least one example."
            )
        if not current:
            _check_finite(finite, "outputs or derivatives", "of the data")
            yield sums

    def _curvature_root(
        self, x: Any, basis: NystromBasis, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, C) and ψ (B, ·, K) whose squares add up to the curvature."""
        if not self.stochastic:
            f, phi = self._linearize(x, basis)
            return f, likelihood.curvature_root(f, phi, self.likelihood)
        f = self.model(x)
        likelihood.check_outputs(f)
        cotangents = likelihood.sample_cotangents(
            f.to(self._dtype), self.likelihood, int(self.stochastic), generator
        )
        psi = self._linearizer.project(x, cotangents, basis.directions)
        return f.to(self._dtype), psi.double()

    def _linearize(
        self, x: Any, basis: NystromBasis, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, C) and features (B, C, K) of inputs on the device."""
        linearizer = self._linearizer
        if linearizer.feature_mode is None:
            with torch.no_grad():
                f = self.model(x)
                likelihood.check_outputs(f)
                linearizer.choose_feature_mode(x, f, basis.directions)
        f, phi = linearizer.features(x, basis.directions, create_graph)
        return f.to(self._dtype), phi.to(self._dtype)

    # Posterior

    @property
    def posterior(self) -> SubspacePosterior:
        """The current posterior; kept until a hyperparameter changes."""
        self._check_fitted()
        if self._posterior_scale is None:
            posterior = self._posterior_of(self.basis, self.H)
            self._posterior_scale = posterior.with_(
                factor=posterior.factor.detach(), prior=posterior.prior.detach()
            )
        return self._posterior_scale

    def _build_posterior(self) -> SubspacePosterior:
        """The current posterior with the graph of its hyperparameters."""
        self._check_fitted()
        return self._posterior_of(self.basis, self.H)

    def _posterior_of(self, basis: NystromBasis, H: torch.Tensor) -> SubspacePosterior:
        """A posterior with the current hyperparameters."""
        return SubspacePosterior(
            basis,
            H,
            torch.as_tensor(self._H_factor),
            self.prior_precision,
            tuple(self._linearizer.fn.numels()),
            self.complement,
            self._layer_grams if basis is self.basis else [],
        )

    @property
    def _H_factor(self) -> torch.Tensor:
        return 1 / self.sigma_noise.square() / self.temperature

    @property
    def posterior_precision(self) -> torch.Tensor:
        """G = H/(σ²T) + VᵀDV `(K, K)`, the precision of z in θ = θ̂ + Vz, float64."""
        return self._build_posterior().precision

    @property
    def posterior_scale(self) -> torch.Tensor:
        """S `(K, K)` with SSᵀ = G⁻¹, float64."""
        return self.posterior.scale

    @property
    def posterior_covariance(self) -> torch.Tensor:
        """Covariance of z = Vᵀ(θ − θ̂), `(K, K)`, float64."""
        return self.posterior.covariance

    @property
    def log_det_prior_precision(self) -> torch.Tensor:
        """log det VᵀDV; log det D where the complement is kept."""
        return self._build_posterior().log_det_prior.to(self._dtype)

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """log det G; of the whole D + VHVᵀ/(σ²T) where the complement is kept."""
        posterior = self._build_posterior()
        return (posterior.log_det_prior + posterior.log_det_ratio).to(self._dtype)

    @property
    def log_det_ratio(self) -> torch.Tensor:
        """log det of the posterior precision less that of the prior precision."""
        return self._build_posterior().log_det_ratio.to(self._dtype)

    @property
    def scatter(self) -> torch.Tensor:
        """(θ̂ − μ₀)ᵀD(θ̂ − μ₀), over all P parameters."""
        delta = (self.mean - self.prior_mean).double()
        return (delta.square() * self.prior_precision_diag).sum().to(self._dtype)

    def square_norm(self, value: torch.Tensor) -> torch.Tensor:
        """ΔᵀPΔ for Δ = value − θ̂ `(P,)` and the posterior precision P.

        With the complement dropped only the part of Δ within the subspace counts.
        """
        delta = value - self.mean
        return self._build_posterior().square_norm(delta).to(self._dtype)

    def log_prob(self, value: torch.Tensor, normalized: bool = True) -> torch.Tensor:
        """Log density at `value`: of z = Vᵀ(value − θ̂), or of all weights where the
        complement is kept."""
        log_prob = -self.square_norm(value) / 2
        if normalized:
            constant = self.posterior.dimension * math.log(2 * math.pi)
            log_prob = log_prob + (self.log_det_posterior_precision - constant) / 2
        return log_prob

    def log_marginal_likelihood(
        self,
        prior_precision: torch.Tensor | None = None,
        sigma_noise: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Evidence log p(D|θ̂) − ½ log det ratio − ½ scatter.

        Differentiable in `prior_precision` and `sigma_noise`; passing one sets it.
        """
        self._check_fitted()
        return super().log_marginal_likelihood(prior_precision, sigma_noise)

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

    # Predictive

    def features(
        self, x: torch.Tensor | MutableMapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs f_mu `(B, C)` and features φ = J(x)V `(B, C, K)`."""
        self._check_fitted()
        with self._undisturbed():
            return self._linearize(
                to_device(x, self._device), self.basis, self.enable_backprop
            )

    def _kernel_features(
        self, x: Any, posterior: SubspacePosterior, create_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What a posterior needs of inputs on the device: outputs `(B, C)`, features
        `(B, C, K)` and, where the complement is kept, the kernel `(B, C, C)`."""
        if not posterior.needs_kernel:
            return *self._linearize(x, posterior.basis, create_graph), None
        directions, weights = posterior.basis.directions, posterior.kernel_weights()
        f, phi, kernel = self._linearizer.features_and_kernel(
            x, directions, weights, create_graph
        )
        return f.to(self._dtype), phi.to(self._dtype), kernel.to(self._dtype)

    def __call__(
        self,
        x: torch.Tensor | MutableMapping[str, Any],
        pred_type: PredType | str = PredType.GLM,
        joint: bool = False,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Posterior predictive on inputs x.

        Parameters
        ----------
        x : torch.Tensor or MutableMapping
            B inputs
        pred_type : {'glm', 'nn', 'gp'}, default='glm'
            linearised predictive ('gp' is the same) or sampled weights
        joint : bool, default=False
            regression: one covariance over all B·C values
        link_approx : {'mc', 'probit', 'bridge', 'bridge_norm'}, default='probit'
            classification: link of the linearised predictive; only 'mc' for 'nn'
        n_samples : int, default=100
            samples for 'mc' and 'nn'
        diagonal_output : bool, default=False
            treat the outputs as independent
        generator : torch.Generator, optional
            source of the samples; without it they are made from `seed`, the same at
            every call
        fitting : bool, default=False
            reward modelling: predict as a classifier of pairs

        Returns
        -------
        probabilities `(B, C)`, or for regression the mean `(B, C)` and the covariance
        `(B, C, C)`; `(B·C,)` and `(B·C, B·C)` if joint; variances `(B, C)` if
        `diagonal_output` or `pred_type='nn'`
        """
        pred_type = _member(PredType, "pred_type", pred_type)
        link_approx = _member(LinkApprox, "link_approx", link_approx)
        if pred_type == PredType.NN and link_approx != LinkApprox.MC:
            raise ValueError(
                "pred_type='nn' samples weights, so it needs link_approx='mc', got "
                f"link_approx={link_approx.value!r}."
            )
        _positive_int("n_samples", n_samples)
        self._check_fitted()
        self._check_generator(generator)
        generator = generator or self._fresh_generator()
        regression = likelihood.is_regression(self.likelihood) or (
            self.likelihood == Likelihood.REWARD_MODELING and not fitting
        )
        if pred_type == PredType.NN:
            samples = self._nn_functional_samples(
                x, n_samples, generator, **model_kwargs
            )
            if regression:
                return samples.mean(0), samples.var(0)
            return samples.softmax(-1).mean(0)
        if joint and regression:
            return self._joint_distribution(x)
        with self._undisturbed():
            f_mu, phi, kernel = self._kernel_features(
                to_device(x, self._device), self.posterior, self.enable_backprop
            )
            return self.predict_from_features(
                f_mu,
                phi,
                kernel,
                link_approx=link_approx,
                n_samples=n_samples,
                diagonal_output=diagonal_output,
                generator=generator,
                regression=regression,
            )

    def predict_from_features(
        self,
        f_mu: torch.Tensor,
        phi: torch.Tensor,
        kernel: torch.Tensor | None = None,
        *,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        regression: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What `la(x)` gives, from outputs `(B, C)` and features `(B, C, K)` of x.

        Features do not depend on prior, noise, temperature or link: keep them (see
        `FeatureCache`) and try all of these at the cost of K×K algebra. Where the
        complement is kept, `kernel` is J(x)J(x)ᵀ `(B, C, C)`.
        """
        if regression is None:
            regression = likelihood.is_regression(self.likelihood)
        values = self.posterior.function_values(f_mu, phi, kernel)
        if regression:
            return f_mu, values.variance() if diagonal_output else values.covariance()
        return predictive.class_probabilities(
            values,
            link_approx,
            n_samples,
            diagonal_output,
            generator or self._fresh_generator(),
        )

    def _joint_distribution(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean `(B·C,)` and covariance `(B·C, B·C)` of all function values."""
        with self._undisturbed():
            f_mu, phi, kernel = self._joint_features(x)
            return f_mu.flatten(), self.posterior.joint_covariance(phi, kernel)

    def _joint_features(
        self, x: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Outputs `(B, C)`, features `(B·C, K)` and, if needed, kernel `(B·C, B·C)`."""
        x = to_device(x, self._device)
        if not self.posterior.needs_kernel:
            f_mu, phi = self._linearize(x, self.basis, self.enable_backprop)
            return f_mu, phi.flatten(0, 1), None
        f_mu, Js = self._linearizer.jacobian(x, self.enable_backprop)
        return f_mu.to(self._dtype), *self._jacobian_products(Js.flatten(0, 1))

    def _jacobian_products(
        self, Js: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Features and kernel of Jacobians `(..., C, P)`, in the prior's weights."""
        weights = self.posterior.kernel_weights()
        weighted = Js if weights is None else Js * weights.to(Js)
        phi = (weighted @ self.basis.vectors.to(Js)).to(self._dtype)
        kernel = (weighted @ Js.mT).to(self._dtype)
        return phi, kernel if self.posterior.needs_kernel else None

    def functional_samples(
        self,
        x: torch.Tensor | MutableMapping[str, Any],
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> torch.Tensor:
        """Samples of the function values `(n_samples, B, C)`.

        With `joint=True` each sample is one function seen at all inputs, as Thompson
        sampling needs; otherwise the inputs are sampled independently, as in Laplace.
        Samples of weights (`pred_type='nn'`) are always joint.
        """
        pred_type = _member(PredType, "pred_type", pred_type)
        self._check_fitted()
        self._check_generator(generator)
        _positive_int("n_samples", n_samples)
        generator = generator or self._own_stream()
        if pred_type == PredType.NN:
            return self._nn_functional_samples(x, n_samples, generator)
        if joint and not diagonal_output:
            with self._undisturbed():
                f_mu, phi, kernel = self._joint_features(x)
                root = self.posterior.joint_root(phi, kernel)  # (B·C, R)
            noise = torch.randn(
                n_samples,
                root.shape[1],
                generator=generator,
                dtype=root.dtype,
                device=root.device,
            )
            return f_mu + (noise @ root.mT).unflatten(-1, f_mu.shape)
        with self._undisturbed():
            x = to_device(x, self._device)
            posterior = self.posterior
            features = self._kernel_features(x, posterior, self.enable_backprop)
            values = posterior.function_values(*features)
            return predictive.draw(values, n_samples, generator, diagonal_output)

    def predictive_samples(
        self,
        x: torch.Tensor | MutableMapping[str, Any],
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> torch.Tensor:
        """`functional_samples` behind the inverse link, `(n_samples, B, C)`."""
        samples = self.functional_samples(
            x, pred_type, n_samples, diagonal_output, generator, joint
        )
        if self.likelihood == Likelihood.CLASSIFICATION:
            return samples.softmax(-1)
        return samples

    def _nn_functional_samples(
        self,
        X: torch.Tensor | MutableMapping[str, Any],
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Outputs of the network with sampled weights, never written to it."""
        fn, x = self._linearizer.fn, to_device(X, self._device)
        params = [p.dtype for p in fn.parameters()]
        samples = []
        with self._undisturbed():
            for _ in range(n_samples):  # one by one: a sample is as large as the model
                theta = fn.split(self.sample(1, generator)[0])
                theta = [t.to(d) for t, d in zip(theta, params, strict=True)]
                samples.append(fn(theta, x, **model_kwargs).to(self._dtype))
        return torch.stack(samples)

    def functional_variance(self, Js: torch.Tensor) -> torch.Tensor:
        """Output covariance `(B, C, C)` for Jacobians `(B, C, P)`."""
        self._check_fitted()
        self._check_jacobians(Js)
        phi, kernel = self._jacobian_products(Js)
        return self.posterior.function_values(phi[..., 0], phi, kernel).covariance()

    def functional_covariance(self, Js: torch.Tensor) -> torch.Tensor:
        """Joint covariance `(B·C, B·C)` for Jacobians `(B, C, P)` or `(B·C, P)`."""
        self._check_fitted()
        Js = Js.unsqueeze(0) if Js.ndim == 2 else Js
        self._check_jacobians(Js)
        phi, kernel = self._jacobian_products(Js.flatten(0, 1))
        return self.posterior.joint_covariance(phi, kernel)

    def _glm_predictive_distribution(
        self,
        X: torch.Tensor | MutableMapping[str, Any],
        joint: bool = False,
        diagonal_output: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if joint:
            return self._joint_distribution(X)
        with self._undisturbed():
            f_mu, phi, kernel = self._kernel_features(
                to_device(X, self._device), self.posterior, self.enable_backprop
            )
            return self.predict_from_features(
                f_mu, phi, kernel, diagonal_output=diagonal_output, regression=True
            )

    def _check_generator(self, generator: torch.Generator | None) -> None:
        if generator is None:
            return
        if not isinstance(generator, torch.Generator):
            raise ValueError(
                f"generator must be a torch.Generator, got {type(generator).__name__}."
            )
        if generator.device.type != self._device.type:
            raise ValueError(
                f"The generator is on {generator.device}, the model on {self._device}. "
                f"Use torch.Generator('{self._device}')."
            )

    # Tuning

    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | torch.Tensor = 1.0,
        prior_structure: PriorStructure | str = PriorStructure.SCALAR,
        val_loader: DataLoader | None = None,
        loss: torchmetrics.Metric | Callable[..., torch.Tensor | float] | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
    ) -> None:
        """Choose the prior precision by the evidence or on validation data.

        The parameters are those of every Laplace class. Two things differ for
        `method='gridsearch'`: the features of the validation data are computed once
        for the whole grid, and the default loss of regression is the negative log
        likelihood, because the mean of a linearised predictive, and so its square
        error, does not depend on the prior.
        """
        self._check_fitted()
        pred_type = _member(PredType, "pred_type", pred_type)
        method = _member(TuningMethod, "method", method)
        link_approx = _member(LinkApprox, "link_approx", link_approx)
        prior_structure = _member(PriorStructure, "prior_structure", prior_structure)
        before = self.prior_precision
        try:
            if method == TuningMethod.MARGLIK:
                super().optimize_prior_precision(
                    pred_type=pred_type,
                    method=method,
                    n_steps=n_steps,
                    lr=lr,
                    init_prior_prec=init_prior_prec,
                    prior_structure=prior_structure,
                    val_loader=val_loader,
                    progress_bar=progress_bar,
                )
            else:
                self.prior_precision = self._search_prior(
                    torch.logspace(
                        log_prior_prec_min,
                        log_prior_prec_max,
                        grid_size,
                        base=log_prior_prec_base,
                    ),
                    pred_type,
                    val_loader,
                    loss,
                    link_approx,
                    n_samples,
                    progress_bar,
                )
        except BaseException:
            self.prior_precision = before
            raise
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    def _search_prior(
        self,
        grid: torch.Tensor,
        pred_type: PredType,
        val_loader: Any,
        loss: Any,
        link_approx: LinkApprox,
        n_samples: int,
        progress_bar: bool,
    ) -> torch.Tensor:
        """The best scalar prior precision of a grid, on validation data."""
        if val_loader is None:
            raise ValueError(
                "method='gridsearch' compares predictions on validation data: pass "
                "val_loader=, or use method='marglik'."
            )
        if pred_type == PredType.NN:
            return tuning.search_prior_by_sampling(
                self, grid, val_loader, loss, n_samples, progress_bar
            )
        # With a scalar prior, whose features hold for the whole grid.
        posterior = self.posterior.with_(prior=grid[:1].to(self.H))
        validator = tuning.Validator.for_laplace(
            self, val_loader, loss, link_approx, n_samples, progress_bar, posterior
        )
        return tuning.search_prior(posterior, grid, validator, progress_bar)

    @property
    def effective_n_data(self) -> float:
        """N/T: how many data the tempered likelihood weighs as much as."""
        return self.n_data / float(self.temperature)

    def optimize_temperature(
        self,
        val_loader: DataLoader | FeatureCache,
        loss: torchmetrics.Metric | Callable[..., torch.Tensor | float] | None = None,
        link_approx: LinkApprox | str = LinkApprox.MC,
        n_samples: int = 512,
        tune_prior: bool = False,
        log_prior_prec_min: float = -2,
        log_prior_prec_max: float = 4,
        progress_bar: bool = False,
    ) -> None:
        """Temper the likelihood to an effective number of data N/T.

        The posterior of N data is often too narrow (see `fit` with early stopping);
        scaling its curvature to that of fewer data is smoother than using fewer,
        needs no second pass over the training data, and averages over all of them.

        Parameters
        ----------
        val_loader : DataLoader or FeatureCache
        loss : torchmetrics.Metric or callable, optional
            as for `optimize_prior_precision`; the negative log likelihood by default
        link_approx : LinkApprox or str, default="mc"
            set it to the one you predict with
        n_samples : int, default=512
        tune_prior : bool, default=False
            choose a scalar prior precision, within 10**log_prior_prec_min and
            10**log_prior_prec_max, at the same time
        """
        link_approx = _member(LinkApprox, "link_approx", link_approx)
        posterior = self.posterior.with_(factor=self._H_factor * self.temperature)
        if tune_prior:
            posterior = posterior.with_(prior=torch.ones_like(self.H[0, :1]))
        validator = tuning.Validator.for_laplace(
            self, val_loader, loss, link_approx, n_samples, progress_bar, posterior
        )
        if tune_prior:
            temperature, prior = tuning.search_temperature_and_prior(
                posterior,
                self.n_data,
                validator,
                (log_prior_prec_min, log_prior_prec_max),
            )
            self.prior_precision = prior
        else:
            temperature = tuning.search_temperature(posterior, self.n_data, validator)
        self.temperature = temperature

    def optimize_sigma_noise(
        self, n_steps: int = 200, lr: float = 0.1, tune_prior: bool = True
    ) -> None:
        """Choose the observation noise by the evidence, with the prior precision.

        Starts from the current values; the structure of the prior is kept.
        """
        if not likelihood.is_regression(self.likelihood):
            raise ValueError(
                f"sigma_noise is for regression; this likelihood is {self.likelihood}."
            )
        self._check_fitted()
        before = self.sigma_noise, self.prior_precision
        try:
            values = tuning.maximize_evidence(self, n_steps, lr, tune_prior)
        except BaseException:
            self.sigma_noise, self.prior_precision = before
            raise
        self.sigma_noise, self.prior_precision = values

    def truncate(self, rank: int) -> None:
        """Keep the first `rank` directions: the posterior that a fit with
        `n_eigenvalues=rank` gives, without fitting."""
        _positive_int("rank", rank)
        if rank > self.rank:
            raise ValueError(
                f"rank={rank} exceeds the fitted rank {self.rank}; fit again with "
                f"n_eigenvalues={rank}."
            )
        self._set_basis(self.basis.truncate(rank))
        self.H = self.H[:rank, :rank]

    def optimize_rank(
        self,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        val_loader: DataLoader | FeatureCache | None = None,
        ranks: Sequence[int] | None = None,
        loss: torchmetrics.Metric | Callable[..., torch.Tensor | float] | None = None,
        link_approx: LinkApprox | str = LinkApprox.MC,
        n_samples: int = 512,
        share: float = 0.95,
        progress_bar: bool = False,
    ) -> list[dict[str, float]]:
        """Choose the number of directions from one fit, and truncate to it.

        The basis is nested, so every k ≤ K is there already, as a leading block.

        Parameters
        ----------
        method : {'marglik', 'gridsearch'}
            'marglik' takes the smallest rank at which the Occam factor of the evidence
            has reached `share` of its value at K (at fixed weights the evidence itself
            falls with every direction, so its maximum would always be rank 1);
            'gridsearch' takes the rank with the lowest validation loss
        val_loader : DataLoader or FeatureCache, optional
            for 'gridsearch'
        ranks : sequence of int, optional
            candidates for 'gridsearch'; all by default

        Returns
        -------
        list of dict
            rank and 'log_marginal_likelihood' or 'loss' of every candidate
        """
        method = _member(TuningMethod, "method", method)
        posterior = self.posterior
        if method == TuningMethod.MARGLIK:
            full = self.log_marginal_likelihood().double()
            ratios = posterior.log_det_ratios()
            evidence = (full + 0.5 * (ratios[-1] - ratios)).tolist()
            table = [
                {"rank": k, "log_marginal_likelihood": value}
                for k, value in enumerate(evidence, start=1)
            ]
            self.truncate(tuning.rank_by_evidence(posterior, share))
            return table
        candidates = sorted(ranks) if ranks is not None else range(1, self.rank + 1)
        if candidates[0] < 1 or candidates[-1] > self.rank:
            raise ValueError(
                f"ranks must lie in 1..{self.rank}, got {candidates[0]}.."
                f"{candidates[-1]}; fit with a larger n_eigenvalues."
            )
        validator = tuning.Validator.for_laplace(
            self, val_loader, loss, link_approx, n_samples, progress_bar
        )
        best, losses = tuning.rank_by_validation(posterior, list(candidates), validator)
        self.truncate(best)
        return [
            {"rank": k, "loss": value}
            for k, value in zip(candidates, losses, strict=True)
        ]

    # Checkpoints

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
                state_dict["directions"].to(self.basis_device or self._device),
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
                "requires_grad as it was when the posterior was fitted."
            )


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
        backend: type | None = None,
        last_layer_name: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
        **nystrom_kwargs: Any,
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
            **nystrom_kwargs,
        )
        self.feature_reduction = feature_reduction
        self._last_layer_name = last_layer_name
        self.last_layer_name = last_layer_name
        self._asked_prior = (prior_precision, prior_mean)
        if last_layer_name is not None:
            self._set_last_layer(last_layer_name)
        else:  # like Laplace: known at fit, checked then
            self.n_params = self.n_layers = None
            self._prior_precision = prior_precision
            self._prior_mean = prior_mean

    @staticmethod
    def _laplace_parameters(model: nn.Module) -> list[str]:
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
        self._linearizer.fn = ModelFunction(model, names)
        self.params = [p for p in model.parameters() if id(p) in own]
        self.n_params = sum(p.numel() for p in self.params)
        self.n_layers = len(self.params)
        self.prior_precision, self.prior_mean = self._asked_prior
        self.mean = self.prior_mean

    def fit(
        self,
        train_loader: DataLoader,
        override: bool = True,
        progress_bar: bool = False,
        **kwargs: Any,
    ) -> None:
        if self.last_layer_name is None:
            _sampling.check_loader(train_loader)
            first = _sampling.subset(
                train_loader, _sampling.eligible_indices(train_loader)[:1]
            )
            with self._undisturbed(train_loader):
                for x, _ in self._batches(first, "", False):
                    # Laplace's search hooks into the model, so it gets a copy.
                    copy = FeatureExtractor(deepcopy(unwrap(self.model)))
                    copy.find_last_layer(x)
            self._set_last_layer(copy._last_layer_name)
        super().fit(train_loader, override, progress_bar, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last_layer_name": self.last_layer_name}

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("last_layer_name")
        if saved is not None and self.last_layer_name not in (None, saved):
            raise ValueError(
                f"The checkpoint's last layer is {saved!r}, this object's "
                f"{self.last_layer_name!r}. Pass last_layer_name={saved!r}."
            )
        if saved is not None and self.last_layer_name is None:
            if saved in dict(unwrap(self.model).named_modules()):
                self._set_last_layer(saved)
        super()._check_state(state_dict)


def _member(enum: type, name: str, value: Any) -> Any:
    """The member of a str enum, or an error that lists the valid values."""
    try:
        return enum(value)
    except ValueError:
        raise ValueError(
            f"{name} must be one of {[m.value for m in enum]}, got {value!r}."
        ) from None


def _positive_int(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)


def _check_positive(name: str, value: Any) -> None:
    """Numbers and tensors without a graph must be positive; Laplace checks the type."""
    if isinstance(value, torch.Tensor):
        # A tensor that is being optimised is the exponential of something.
        if value.requires_grad or not has_values(value) or value.is_complex():
            return
        good = bool((torch.isfinite(value) & (value > 0)).all())
        shown = f"values from {value.min():.3g} to {value.max():.3g}" * (not good)
    elif isinstance(value, (int, float)):
        good, shown = math.isfinite(value) and value > 0, str(value)
    else:
        return
    if not good:
        raise ValueError(f"{name} must be positive and finite, got {shown}.")


def _check_finite(flags: list[torch.Tensor], what: str, where: str) -> None:
    """Read the flags of all batches at once, so that no batch waits for the host."""
    if not flags or not has_values(flags[0]):
        return
    bad = torch.stack(flags).logical_not().nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"NaN or infinite {what} {where}, first in batch {bad[0]} (of "
            f"{len(flags)}, counted from 0). Check the inputs of that batch and the "
            "model's weights."
        )
