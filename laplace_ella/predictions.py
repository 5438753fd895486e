"""Predictions and samples of a fitted posterior, in Laplace's shapes."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from laplace.utils.enums import Likelihood, PredType

from laplace_ella.base import EllaBase
from laplace_ella.fitting.data import check_loader, loader_batches
from laplace_ella.posterior.observation import Link
from laplace_ella.posterior.predictive import Predictor, class_dim
from laplace_ella.support.batches import to_device
from laplace_ella.support.checks import check_generator, member, positive_int
from laplace_ella.support.preserve import full_precision, undisturbed
from laplace_ella.tuning.cache import FeatureCache, cache_batches
from laplace_ella.tuning.validation import DEFAULT_LINK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.posterior.posterior import SubspacePosterior

__all__ = ["PredictingLaplace"]


class PredictingLaplace(EllaBase):
    """A fitted posterior that is asked about new inputs."""

    @contextmanager
    def _predicting(self) -> Iterator[Predictor]:
        """Make a predictor, with the user's state preserved around its use."""
        fit = self._checked_fit()
        # Under no_grad() nothing can be differentiated, as everywhere in torch.
        create_graph = self.enable_backprop and torch.is_grad_enabled()
        with undisturbed(self.model, create_graph=create_graph):
            yield Predictor(
                self.posterior,
                fit.linearizer,
                self._observation,
                fit.mean.dtype,
                create_graph,
            )

    def _generator(self, generator: torch.Generator | None) -> torch.Generator | None:
        """Return the user's generator, checked, or a fresh one made from `seed`."""
        if generator is None:
            return self._fresh_generator()
        check_generator(generator, self._device)
        return generator

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
        """Return the posterior predictive on inputs x.

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
        regression = self.likelihood == Likelihood.REGRESSION or (
            self.likelihood == Likelihood.REWARD_MODELING and not fitting
        )
        with self._predicting() as predictor:
            generator = self._generator(generator)
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
        """Return the inverse link of samples of the outputs, `(n, B, ...)`."""
        dim = class_dim(self._layout)
        return self._observation.sampled_probabilities(samples, dim)

    # Features

    def features(
        self, x: torch.Tensor | MutableMapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs f_mu `(B, C)` and features φ = J(x)V `(B, C, K)`.

        Of models with outputs at S positions: `(B·S, C)` and `(B·S, C, K)`.
        """
        with self._predicting() as predictor:
            linearizer, V = predictor.linearizer, predictor.posterior.basis.directions
            x = to_device(x, self._device)
            parts = [
                linearizer.features(part, V, predictor.create_graph)
                for part in linearizer.parts(x, 2 * len(V))
            ]
            f, phi = zip(*((part.f, part.phi) for part in parts), strict=True)
            return (
                torch.cat(f).to(predictor.dtype),
                torch.cat(phi).to(predictor.dtype),
            )

    def cache_features(
        self, loader: DataLoader, progress_bar: bool = False
    ) -> FeatureCache:
        """Return features and targets of every example, see `FeatureCache`; of those
        that all processes have, if several do (see `distributed`)."""
        self._checked_fit()
        with self._working("cache_features()") as processes:
            return self._cache(
                self.posterior, self.linearizer, loader, progress_bar, processes
            )

    def _cache(
        self,
        posterior: SubspacePosterior,
        linearizer: Linearizer,
        loader: Any,
        progress_bar: bool,
        processes: Processes | None = None,
    ) -> FeatureCache:
        """Return features for another posterior of this model: another prior or
        basis, with derivatives in another precision than this fit has."""
        check_loader(loader)
        batches = loader_batches(
            loader, self._device, self.dict_key_y, "[Features]", progress_bar
        )
        cache = cache_batches(posterior, linearizer, self._observation, batches)
        if processes is None:
            return cache
        shared: dict[str, Any] = {"spectrum": cache.spectrum, "prior": cache.prior}
        rows: dict[str, Any] = {
            field.name: getattr(cache, field.name)
            for field in fields(cache)
            if field.name not in shared
        }
        everyones = {
            name: processes.rows(name, own)
            for name, own in rows.items()
            if own is not None
        }
        return FeatureCache(**everyones, **shared)

    def _served(
        self, cache: FeatureCache, posterior: SubspacePosterior
    ) -> FeatureCache:
        """Return what predictions of a posterior need of a cache, on the device."""
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
        """Return what `la(x)` gives, from features that were computed before.

        Try priors, noises, temperatures and links at the cost of K×K algebra. Of
        models with outputs at many positions, one row per position.
        """
        link_approx = member(Link, "link_approx", link_approx)
        self._check_link(link_approx)
        positive_int("n_samples", n_samples)
        posterior, dtype = self.posterior, self.mean.dtype
        generator = self._generator(generator)
        parts = []
        with full_precision(self._device):
            for part in self._served(cache, posterior).batches():
                values = posterior.function_values(
                    part.f_mu, part.phi, part.residual, part.outside_span, part.outputs
                )
                if self._family.is_regression:
                    variance = values.variance if diagonal_output else values.covariance
                    parts.append((values.mean, variance()))
                    continue
                probabilities = self._observation.probabilities(
                    values, link_approx, n_samples, diagonal_output, generator
                )
                parts.append((probabilities,))
        found = tuple(torch.cat(p).to(dtype) for p in zip(*parts, strict=True))
        return found if self._family.is_regression else found[0]

    def joint_predictive(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and covariance of groups of inputs, as BoTorch's acquisition
        functions ask for them.

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
        with self._predicting() as predictor:
            flat = to_device(x, self._device).flatten(0, 1)
            return predictor.joint_groups(flat, x.shape[1])

    # Samples

    def functional_samples(
        self,
        x: torch.Tensor | MutableMapping[str, Any],
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> torch.Tensor:
        """Return samples of the function values `(n_samples, B, C)`.

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
        """Return samples of the function, in which the `top` outputs vary, or all."""
        pred_type = member(PredType, "pred_type", pred_type)
        positive_int("n_samples", n_samples)
        with self._predicting() as predictor:
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
        """Return `functional_samples` behind the inverse link, `(n_samples, B, C)`.

        Probabilities of inputs that are sampled independently are those of
        `top_outputs`.
        """
        top = self.top_outputs
        samples = self._samples(
            x, pred_type, n_samples, diagonal_output, generator, joint, top
        )
        if self.likelihood == Likelihood.CLASSIFICATION:
            return self._probabilities(samples)
        return samples

    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Return weights from the posterior, `(n_samples, P)`."""
        posterior, mean = self.posterior, self.mean
        check_generator(generator, self._device)
        generator = generator or self._own_stream()
        dtype = torch.promote_types(mean.dtype, posterior.basis.directions.dtype)
        like = {"generator": generator, "dtype": dtype, "device": self._device}
        inside, outside = torch.randn(n_samples, posterior.rank, **like), None
        if posterior.needs_residual:
            outside = torch.randn(n_samples, posterior.n_params, **like)
        return (mean + posterior.sample_offsets(inside, outside)).to(mean.dtype)

    def _network_samples(
        self,
        predictor: Predictor,
        x: Any,
        n_samples: int,
        generator: torch.Generator | None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Return outputs `(n_samples, B, ...)` of the network with sampled weights."""
        samples = [
            predictor.network_samples(x, self.sample(1, generator), **model_kwargs)
            for _ in range(n_samples)  # a sample is as large as the model
        ]
        return torch.cat(samples)

    # Names by which laplace-torch's own methods and clients call

    def predictive(
        self,
        x: torch.Tensor | MutableMapping[str, Any],
        pred_type: PredType | str = PredType.GLM,
        link_approx: Link | str = DEFAULT_LINK,
        n_samples: int = 100,
    ) -> Any:
        """Return `la(x, ...)`, by the name it had once."""
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
        with self._predicting() as predictor:
            x = to_device(X, self._device)
            return self._network_samples(
                predictor, x, n_samples, generator or self._own_stream(), **model_kwargs
            )

    def _nn_predictive_samples(self, X: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        samples = self._nn_functional_samples(X, *args, **kwargs)
        if self.likelihood == Likelihood.CLASSIFICATION:
            return self._probabilities(samples)
        return samples

    def _nn_predictive_classification(
        self, X: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        samples = self._nn_functional_samples(X, *args, **kwargs)
        return self._probabilities(samples).mean(0)

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._predicting() as predictor:
            x = to_device(X, self._device)
            if joint:
                return predictor.joint(x)
            return predictor.marginal(x, diagonal_output)

    def functional_variance(self, Js: torch.Tensor) -> torch.Tensor:
        """Return the output covariance `(B, C, C)` for Jacobians `(B, C, P)`."""
        self._checked_fit()
        self._check_jacobians(Js)
        with self._predicting() as predictor:
            return predictor.covariance_of(Js)

    def functional_covariance(self, Js: torch.Tensor) -> torch.Tensor:
        """Return the joint covariance `(B·C, B·C)` for Jacobians `(B, C, P)` or
        `(B·C, P)`."""
        self._checked_fit()
        Js = Js.unsqueeze(0) if Js.ndim == 2 else Js
        self._check_jacobians(Js)
        with self._predicting() as predictor:
            return predictor.covariance_of(Js, joint=True)
