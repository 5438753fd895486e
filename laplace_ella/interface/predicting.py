"""Predictions and samples of a fitted posterior, in Laplace's shapes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from laplace.utils.enums import (
    Likelihood,
    PredType,
)
from torch.utils.data import DataLoader

from laplace_ella.fitting.shared import arranged, shared_data
from laplace_ella.interface.fitted import FittedLaplace
from laplace_ella.interface.joint import jointly
from laplace_ella.posterior.predictor import Predictor, class_dim
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.batches import to_device
from laplace_ella.support.checks import (
    check_generator,
    member,
    positive_int,
)
from laplace_ella.support.links import Link
from laplace_ella.support.preserve import full_precision
from laplace_ella.tuning.cache import (
    FeatureCache,
    cache_loader,
    cache_parts,
    whole_cache,
)
from laplace_ella.tuning.validation import (
    DEFAULT_LINK,
)

__all__ = ["PredictingLaplace"]


class PredictingLaplace(FittedLaplace):
    """A fitted posterior that is asked about new inputs."""

    def _predictor(self, create_graph: bool = False) -> Predictor:
        return Predictor(
            self.posterior,
            self.linearizer,
            self._observation,
            self._dtype,
            create_graph,
        )

    @contextmanager
    def predicting(self) -> Iterator[Predictor]:
        """A predictor, with the user's state preserved around its use."""
        self._checked_fit()
        # Under no_grad() nothing can be differentiated, as everywhere in torch.
        create_graph = self.enable_backprop and torch.is_grad_enabled()
        with self._undisturbed(create_graph=create_graph):
            yield self._predictor(create_graph)

    def __call__(
        self,
        x: torch.Tensor | MutableMapping[str, Any],
        pred_type: PredType | str = PredType.GLM,
        joint: bool = False,
        link_approx: Link | str = DEFAULT_LINK,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Posterior predictive on inputs x.

        Parameters
        ----------
        x : torch.Tensor or MutableMapping
            B inputs
        pred_type : {'glm', 'nn', 'gp'}, default='glm'
            linearised predictive ('gp' is the same) or sampled weights
        joint : bool, default=False
            regression: one covariance over all B·C values
        link_approx : Link or str, default='probit'
            classification: link of the linearised predictive, one of 'mc', 'probit',
            'probit_centered', 'bridge' and 'bridge_norm'; only 'mc' for 'nn'
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
        `diagonal_output` or `pred_type='nn'`. Of models with outputs at many positions,
        probabilities, means and variances have the shape of the output and covariances
        are those of the C outputs at each position, `(B, *positions, C, C)`.
        """
        pred_type = member(PredType, "pred_type", pred_type)
        link_approx = member(Link, "link_approx", link_approx)
        if pred_type == PredType.NN and link_approx != Link.MC:
            raise ValueError(
                "pred_type='nn' samples weights, so it needs link_approx='mc', got "
                f"link_approx={link_approx.value!r}."
            )
        self._check_link(link_approx)
        positive_int("n_samples", n_samples)
        regression = self._family.is_regression or (
            self.likelihood == Likelihood.REWARD_MODELING and not fitting
        )
        with self.predicting() as predictor:
            check_generator(generator, self._device)
            generator = generator or self._fresh_generator()
            x = to_device(x, self._device)
            if pred_type == PredType.NN:
                samples = self._network_samples(
                    predictor, x, n_samples, generator, **model_kwargs
                )
                if regression:
                    return samples.mean(0), samples.var(0)
                return self._probabilities(samples).mean(0)
            if regression:
                return (
                    predictor.joint(x)
                    if joint
                    else predictor.marginal(x, diagonal_output)
                )
            return predictor.probabilities(
                x, link_approx, n_samples, diagonal_output, generator
            )

    def _probabilities(self, samples: torch.Tensor) -> torch.Tensor:
        """The inverse link of samples of the outputs, `(n, B, ...)`."""
        dim = class_dim(self.output_layout)
        return self._observation.sampled_probabilities(samples, dim)

    def features(
        self, x: torch.Tensor | MutableMapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs f_mu `(B, C)` and features φ = J(x)V `(B, C, K)`.

        Of models with outputs at S positions: `(B·S, C)` and `(B·S, C, K)`.
        """
        basis = self._checked_fit().basis
        with self.predicting() as predictor:
            features = self.linearizer.features(
                to_device(x, self._device), basis.directions, predictor.create_graph
            )
        return features.f.to(self._dtype), features.phi.to(self._dtype)

    @jointly("loader")
    def cache_features(
        self, loader: DataLoader, progress_bar: bool = False
    ) -> FeatureCache:
        """Features and targets of every example, see `FeatureCache`; of those that all
        processes have, if several do (see `distributed`)."""
        return self._cache(self.posterior, loader, progress_bar)

    def _cache(
        self,
        posterior: SubspacePosterior,
        loader: Any,
        progress_bar: bool,
        dtype: torch.dtype | None = None,
    ) -> FeatureCache:
        """Features for another posterior of this model: another prior or basis, with
        derivatives in another precision than this fit has."""
        linearizer = self.linearizer
        if dtype is not None:
            linearizer = self._linearizer.in_dtype(dtype)

        def batches(loader: Any) -> Iterator[tuple[Any, torch.Tensor]]:
            return self.fitter.batches(loader, "[Features]", progress_bar)

        made_by = posterior, linearizer, self._observation
        with self._undisturbed(loader):
            if self.collective.alone:
                return cache_loader(*made_by, batches(loader))
            data = shared_data(loader, self.collective, self.dict_key_x)
            parts, counts = cache_parts(*made_by, batches(data.whole()))
            own = FeatureCache.concatenate(parts).rows if parts else {}
            rows = arranged(data, self.collective, own, counts.numpy())
            return whole_cache([FeatureCache.made_for(posterior, rows)] if rows else [])

    def _served(
        self, cache: FeatureCache, posterior: SubspacePosterior
    ) -> FeatureCache:
        """What predictions of a posterior need of a cache, on the device."""
        return cache.serving(posterior).top(self.top_outputs).to(self._device)

    def predict_from_cache(
        self,
        cache: FeatureCache,
        *,
        link_approx: Link | str = DEFAULT_LINK,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Any:
        """What `la(x)` gives, from features that were computed before.

        Try priors, noises, temperatures and links at the cost of K×K algebra. Of
        models with outputs at many positions, one row per position.
        """
        link_approx = member(Link, "link_approx", link_approx)
        self._check_link(link_approx)
        positive_int("n_samples", n_samples)
        check_generator(generator, self._device)
        generator = generator or self._fresh_generator()
        posterior = self.posterior
        parts = []
        with full_precision(self._device):
            for part in self._served(cache, posterior).batches():
                values = posterior.function_values(
                    part.f_mu, part.phi, part.residual, part.unseen, part.outputs
                )
                if self._family.is_regression:
                    variance = values.variance if diagonal_output else values.covariance
                    parts.append((values.mean, variance()))
                    continue
                parts.append(
                    self._observation.probabilities(
                        values, link_approx, n_samples, diagonal_output, generator
                    )
                )
        if self._family.is_regression:
            mean, variance = zip(*parts, strict=True)
            return torch.cat(mean).to(self._dtype), torch.cat(variance).to(self._dtype)
        return torch.cat(parts).to(self._dtype)

    def joint_predictive(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and covariance of groups of inputs, as BoTorch's acquisition functions
        ask for them.

        Parameters
        ----------
        x : torch.Tensor
            b groups of q inputs, `(b, q, ...)`

        Returns
        -------
        tuple of torch.Tensor
            `(b, q·C)` and `(b, q·C, q·C)`, without observation noise; inputs of
            different groups are not related to each other
        """
        if not isinstance(x, torch.Tensor) or x.ndim < 3 or not x.numel():
            got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(
                "joint_predictive takes a tensor of b groups of q inputs, (b, q, ...), "
                f"got {got}. For one group use la(x, joint=True)."
            )
        with self.predicting() as predictor:
            flat = to_device(x, self._device).flatten(0, 1)
            return predictor.joint_groups(flat, x.shape[1])

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
        return self._samples(x, pred_type, n_samples, diagonal_output, generator, joint)

    def _samples(
        self,
        x: Any,
        pred_type: PredType | str,
        n_samples: int,
        diagonal_output: bool,
        generator: torch.Generator | None,
        joint: bool,
        top: int | None = None,
    ) -> torch.Tensor:
        """Samples of the function, in which the `top` outputs vary, or all."""
        pred_type = member(PredType, "pred_type", pred_type)
        positive_int("n_samples", n_samples)
        with self.predicting() as predictor:
            check_generator(generator, self._device)
            generator = generator or self._own_stream()
            x = to_device(x, self._device)
            if pred_type == PredType.NN:
                return self._network_samples(predictor, x, n_samples, generator)
            if joint and not diagonal_output:
                return predictor.joint_samples(x, n_samples, generator)
            return predictor.samples(x, n_samples, generator, diagonal_output, top)

    def predictive_samples(
        self,
        x: torch.Tensor | MutableMapping[str, Any],
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> torch.Tensor:
        """`functional_samples` behind the inverse link, `(n_samples, B, C)`.

        Probabilities of inputs that are sampled independently are those of
        `top_outputs`.
        """
        samples = self._samples(
            x, pred_type, n_samples, diagonal_output, generator, joint, self.top_outputs
        )
        if self.likelihood == Likelihood.CLASSIFICATION:
            return self._probabilities(samples)
        return samples

    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Weights from the posterior, `(n_samples, P)`."""
        posterior = self.posterior
        check_generator(generator, self._device)
        generator = generator or self._own_stream()

        dtype = torch.promote_types(self._dtype, posterior.basis.directions.dtype)

        def noise(n: int) -> torch.Tensor:
            return torch.randn(
                n_samples, n, generator=generator, dtype=dtype, device=self._device
            )

        inside = noise(posterior.rank)
        outside = noise(posterior.n_params) if posterior.needs_residual else None
        offsets = posterior.sample_offsets(inside, outside)
        return (self.mean + offsets).to(self._dtype)

    def _network_samples(
        self,
        predictor: Predictor,
        x: Any,
        n_samples: int,
        generator: torch.Generator | None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Outputs `(n_samples, B, ...)` of the network with sampled weights."""
        weights = (self.sample(1, generator)[0] for _ in range(n_samples))
        return predictor.network_samples(x, weights, **model_kwargs)

    # Names by which laplace-torch's own methods and clients call

    def predictive(
        self,
        x: torch.Tensor | MutableMapping[str, Any],
        pred_type: PredType | str = PredType.GLM,
        link_approx: Link | str = DEFAULT_LINK,
        n_samples: int = 100,
    ) -> Any:
        """`la(x, ...)`, by the name it had once."""
        return self(
            x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples
        )

    def _nn_functional_samples(
        self,
        X: Any,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        with self.predicting() as predictor:
            x = to_device(X, self._device)
            return self._network_samples(
                predictor, x, n_samples, generator or self._own_stream(), **model_kwargs
            )

    def _nn_predictive_samples(
        self,
        X: Any,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        samples = self._nn_functional_samples(X, n_samples, generator, **model_kwargs)
        if self.likelihood == Likelihood.CLASSIFICATION:
            return self._probabilities(samples)
        return samples

    def _nn_predictive_classification(
        self,
        X: Any,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        samples = self._nn_functional_samples(X, n_samples, generator, **model_kwargs)
        return self._probabilities(samples).mean(0)

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self.predicting() as predictor:
            x = to_device(X, self._device)
            if joint:
                return predictor.joint(x)
            return predictor.marginal(x, diagonal_output)

    def functional_variance(self, Js: torch.Tensor) -> torch.Tensor:
        """Output covariance `(B, C, C)` for Jacobians `(B, C, P)`."""
        self._checked_fit()
        self._check_jacobians(Js)
        return self._predictor().covariance_of(Js)

    def functional_covariance(self, Js: torch.Tensor) -> torch.Tensor:
        """Joint covariance `(B·C, B·C)` for Jacobians `(B, C, P)` or `(B·C, P)`."""
        self._checked_fit()
        Js = Js.unsqueeze(0) if Js.ndim == 2 else Js
        self._check_jacobians(Js)
        return self._predictor().covariance_of(Js, joint=True)
