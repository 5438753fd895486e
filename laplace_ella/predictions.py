"""Predictions and samples of a fitted posterior, in Laplace's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import contextmanager
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch
from laplace.utils.enums import Likelihood, PredType
from tqdm.auto import tqdm

from laplace_ella.base import EllaBase
from laplace_ella.errors import LinkWarning, warn_caller
from laplace_ella.fitting.data import loader_batches
from laplace_ella.posterior.observation import N_SAMPLES, Link
from laplace_ella.posterior.predictive import Predictor
from laplace_ella.support.batches import OutputLayout, split_batch
from laplace_ella.support.checks import (
    check_generator,
    member,
    positive_int,
    refuse_arguments,
)
from laplace_ella.support.preserve import (
    seeded_iteration,
    undisturbed,
)
from laplace_ella.tuning.cache import FeatureCache, cache_batches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

    from laplace_ella.derivatives.linearizer import Linearizer
    from laplace_ella.fitting.distributed import Processes
    from laplace_ella.posterior.posterior import SubspacePosterior

Inputs = torch.Tensor | MutableMapping[str, Any]


def inputs_of(
    loader: Any, dict_key_y: str, description: str = "", progress_bar: bool = False
) -> Iterator[Any]:
    """Yield the inputs of a loader's batches, whether these have targets or not."""
    if isinstance(loader, (torch.Tensor, Mapping)):
        loader = [loader]
    batches = seeded_iteration(loader)
    total, hidden = length_hint(loader) or None, not progress_bar
    for batch in tqdm(batches, description, total, disable=hidden):
        if isinstance(batch, (torch.Tensor, Mapping)):
            yield batch
        else:
            alone = isinstance(batch, (tuple, list)) and len(batch) == 1
            yield batch[0] if alone else split_batch(batch, dict_key_y)[0]


def noise_variance(la: Any, like: torch.Tensor) -> torch.Tensor:
    """Return the noise variance of a regression, for outputs `(B, ...)` like these."""
    noise = la.sigma_noise.detach().square().to(like)
    first = OutputLayout.CHANNELS_FIRST
    if getattr(la, "output_layout", None) is first and noise.ndim:
        noise = noise.reshape(-1, *[1] * (like.ndim - 2))
    return noise


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
                self.posterior.for_predictions,
                fit.linearizer,
                self._observation,
                fit.mean.dtype,
                create_graph,
            )

    def _generator(
        self, generator: torch.Generator | None, goes_on: bool = False
    ) -> torch.Generator | None:
        """Return the user's generator, checked; else a fresh one made from `seed`, or
        one that goes on from call to call."""
        check_generator(generator, self._device)
        if generator is None and goes_on:
            self._stream = self._stream or self._fresh_generator()
            return self._stream
        return generator or self._fresh_generator()

    @property
    def link_approx(self) -> Link:
        """Link of predictions that do not name one: the one that the last search on
        validation data used, or 'probit'. May be set; None forgets the search."""
        return self._link_approx or Link.PROBIT

    @link_approx.setter
    def link_approx(self, link: Link | str | None) -> None:
        self._link_approx = None if link is None else member(Link, "link_approx", link)

    def _link(self, link_approx: Link | str | None, tuning: bool = False) -> Link:
        """Return the link of a prediction; warn if another one was tuned for."""
        tuned = self.link_approx
        link = member(Link, "link_approx", link_approx or tuned)
        n_channels = None
        if self.fitted is not None:
            n_channels = self._layout.of(self.fitted.output_shape).n_channels
        self._observation.check_link(link, n_channels)
        judged = self._link_approx is not None and not self._family.is_regression
        if judged and link is not tuned and not tuning:
            warn_caller(
                "The settings of this posterior were chosen for link_approx="
                f"{tuned.value!r}, and this prediction uses {link.value!r}. Leave "
                "link_approx out, tune with the link that you predict with, or set "
                f"la.link_approx = {link.value!r}.",
                LinkWarning,
            )
        return link

    def __call__(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        joint: bool = False,
        link_approx: Link | str | None = None,
        n_samples: int = N_SAMPLES,
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
        link_approx : Link or str, optional
            classification: link of the linearised predictive, by default the attribute
            `link_approx`. Always 'mc' for 'nn'
        n_samples : int, default=100
            samples for 'mc' and 'nn'
        diagonal_output : bool, default=False
            treat the outputs as independent
        generator : torch.Generator, optional
            source of the samples, made from `seed` at every call by default
        fitting : bool, default=False
            reward modelling: predict as a classifier of pairs
        **model_kwargs
            of the model, for 'nn' alone

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            probabilities `(B, C)`, or for regression mean and covariance: `(B, C)` and
            `(B, C, C)`; `(B·C,)` and `(B·C, B·C)` if joint; variances `(B, C)` if
            `diagonal_output` or `pred_type='nn'`. Of models with outputs at many
            positions, covariances are `(B, *positions, C, C)`, and all else has the
            shape of the output.
        """
        pred_type = member(PredType, "pred_type", pred_type)
        positive_int("n_samples", n_samples)
        regression = self.likelihood == Likelihood.REGRESSION or (
            self.likelihood == Likelihood.REWARD_MODELING and not fitting
        )
        if pred_type == PredType.NN:
            if link_approx not in (None, Link.MC):
                raise ValueError(
                    "pred_type='nn' samples weights, so it needs link_approx='mc', got "
                    f"link_approx={link_approx!r}."
                )
            drawn = n_samples, self._generator(generator)
            samples = self._nn_functional_samples(x, *drawn, **model_kwargs)
            if regression:
                return samples.mean(0), samples.var(0)
            return self._observation.sampled_probabilities(samples).mean(0)
        if model_kwargs:
            refuse_arguments("la(x, ...)", type(self).__call__, model_kwargs)
        link = self._link(link_approx)
        if regression:
            return self.predictive_moments(x, joint, diagonal_output)
        generator = self._generator(generator) if link is Link.MC else None
        how = link, n_samples, diagonal_output, generator
        with self._predicting() as predictor:
            return predictor.probabilities(x, *how)

    def predictive_moments(
        self, x: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and covariance of the outputs, of the logits for classification.

        `(B, C)` and `(B, C, C)`, without noise; variances `(B, C)` if
        `diagonal_output`, and `(B·C,)` and `(B·C, B·C)` over all inputs if `joint`.
        """
        with self._predicting() as predictor:
            if joint:
                return predictor.joint(x)
            return predictor.marginal(x, diagonal_output)

    def _glm_predictive_distribution(
        self, X: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # what laplace-torch's own methods and other libraries call
        return self.predictive_moments(X, joint, diagonal_output)

    # Loaders and regression

    def predict(
        self,
        loader: Iterable[Any],
        *,
        device: torch.device | str | None = "cpu",
        progress_bar: bool = False,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Any:
        """Return what `la(x, ...)` returns, for all batches of a loader in order.

        Parameters
        ----------
        loader : torch.utils.data.DataLoader or iterable
            yields batches `(X, y)`, `(X,)`, tensors or mappings; targets play no part.
            A tensor or mapping is one batch
        device : torch.device or str, default="cpu"
            where results are collected, batch by batch; None is the model's
        progress_bar : bool, default=False
        generator, **options
            arguments of `la(x, ...)`; one generator serves all batches

        Examples
        --------
        >>> import torch
        >>> from laplace_ella import ELLALaplace
        >>> loader = 2 * [(torch.randn(25, 2), torch.randn(25, 1))]
        >>> la = ELLALaplace(torch.nn.Linear(2, 1), "regression", sigma_noise=0.3)
        >>> la.fit(loader)
        >>> mean, covariance = la.predict(loader)
        >>> covariance.shape
        torch.Size([50, 1, 1])
        """
        if options.get("joint"):
            raise ValueError(
                "joint=True is for inputs that are predicted together, and a loader's "
                "batches are not. Use la(x, joint=True) for one batch."
            )
        device = self._device if device is None else device
        generator, parts = self._generator(generator), []
        for x in inputs_of(loader, self.dict_key_y, "[Predicting]", progress_bar):
            found = self(x, generator=generator, **options)
            found = found if isinstance(found, tuple) else (found,)
            parts.append([part.to(device) for part in found])
        if not parts:
            raise ValueError("The loader yields no batch, so there is nothing to tell.")
        whole = [torch.cat(part) for part in zip(*parts, strict=True)]
        return tuple(whole) if len(whole) > 1 else whole[0]

    def predictive_std(self, x: Inputs | Iterable[Any], **options: Any) -> torch.Tensor:
        """Return the standard deviation of observations at x, with the noise.

        For regression, in the shape of the output; x may be a loader, and options are
        those of `predict`, but with device=None as the default.
        """
        return self._observed(x, options)[1]

    def interval(
        self, x: Inputs | Iterable[Any], level: float = 0.95, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lower and upper ends of central intervals of observations at x.

        For regression: under the predictive each output lies between its two ends with
        probability `level`. The other arguments are those of `predictive_std`.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level!r}.")
        mean, std = self._observed(x, options)
        half = std * torch.special.ndtri(torch.tensor((1 + level) / 2)).item()
        return mean - half, mean + half

    def _observed(
        self, x: Any, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of observations, of regressions."""
        if self.likelihood != Likelihood.REGRESSION:
            raise ValueError(
                "Standard deviations and intervals of observations are for "
                f"likelihood='regression', this one is {self.likelihood!r}. Use la(x), "
                "or laplace_ella.decompose(la, x)."
            )
        options = {"device": None, "diagonal_output": True, **options}
        mean, variance = self.predict(x, **options)
        return mean, (variance + noise_variance(self, mean)).sqrt()

    # Features

    def features(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs f_mu `(B, C)` and features φ = J(x)V `(B, C, K)`.

        Of models with outputs at S positions: `(B·S, C)` and `(B·S, C, K)`.
        """
        with self._predicting() as predictor:
            found = predictor.features(x, self.posterior.basis.directions)
        return found.f, found.phi

    def cache_features(
        self, loader: DataLoader, progress_bar: bool = False
    ) -> FeatureCache:
        """Return features and targets of every example, see `FeatureCache`; of those
        that all processes have, if several do (see `distributed`)."""
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
        batches = loader_batches(
            loader, self._device, self.dict_key_y, "[Features]", progress_bar
        )
        cache = cache_batches(posterior, linearizer, self._observation, batches)
        return cache if processes is None else cache.gathered(processes)

    def _served(
        self, cache: FeatureCache, posterior: SubspacePosterior
    ) -> FeatureCache:
        """Return what predictions of a posterior need of a cache, on the device."""
        return cache.serving(posterior).top(self._top_outputs).to(self._device)

    def predict_from_cache(
        self,
        cache: FeatureCache,
        *,
        link_approx: Link | str | None = None,
        n_samples: int = N_SAMPLES,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Return what `la(x)` gives, from features that were computed before.

        Try priors, noises, temperatures and links at the cost of K×K algebra. Of
        models with outputs at many positions, one row per position.
        """
        link = self._link(link_approx)
        positive_int("n_samples", n_samples)
        posterior, regression = self.posterior, self._family.is_regression
        how = n_samples, diagonal_output, self._generator(generator)
        parts = []
        for rows in self._served(cache, posterior).batches():
            f = posterior.function_values(
                rows.f_mu, rows.phi, rows.residual, rows.outputs
            )
            if regression:
                spread = f.variance() if diagonal_output else f.covariance()
                parts.append((f.mean, spread))
            else:
                parts.append((self._observation.probabilities(f, link, *how),))
        found = [torch.cat(p).to(self.mean.dtype) for p in zip(*parts, strict=True)]
        return tuple(found) if regression else found[0]

    def joint_predictive(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean `(b, q·C)` and covariance `(b, q·C, q·C)` of b groups of q
        inputs `(b, q, ...)`, without noise, as BoTorch's acquisition functions ask."""
        if not isinstance(x, torch.Tensor) or x.ndim < 3 or not x.numel():
            got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(
                "joint_predictive takes a tensor of b groups of q inputs, (b, q, ...), "
                f"got {got}. For one group use la(x, joint=True)."
            )
        with self._predicting() as predictor:
            return predictor.joint_groups(x.flatten(0, 1), x.shape[1])

    def functional_variance(self, Js: torch.Tensor) -> torch.Tensor:
        """Return the output covariance `(B, C, C)` for Jacobians `(B, C, P)`."""
        return self._covariance_of(Js)

    def functional_covariance(self, Js: torch.Tensor) -> torch.Tensor:
        """Return the joint covariance `(B·C, B·C)` for Jacobians `(B, C, P)` or
        `(B·C, P)`."""
        return self._covariance_of(Js[None] if Js.ndim == 2 else Js, joint=True)

    def _covariance_of(self, Js: torch.Tensor, joint: bool = False) -> torch.Tensor:
        with self._predicting() as predictor:
            self._check_jacobians(Js)
            return predictor.covariance_of(Js, joint)

    # Samples

    def functional_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = N_SAMPLES,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
        top_outputs: int | None = None,
    ) -> torch.Tensor:
        """Return samples of the function values `(n_samples, B, C)`.

        With `joint=True` each sample is one function seen at all inputs, as Thompson
        sampling needs; otherwise the inputs are sampled independently, as in Laplace.
        Samples of weights (`pred_type='nn'`) are always joint. With `top_outputs` only
        so many outputs of each input vary, the largest, unless sampled jointly.
        """
        pred_type = member(PredType, "pred_type", pred_type)
        positive_int("n_samples", n_samples)
        if pred_type == PredType.NN:
            return self._nn_functional_samples(x, n_samples, generator)
        drawn = n_samples, self._generator(generator, goes_on=True)
        with self._predicting() as predictor:
            if joint and not diagonal_output:
                return predictor.joint_samples(x, *drawn)
            return predictor.samples(x, *drawn, diagonal_output, top_outputs)

    def predictive_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = N_SAMPLES,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> torch.Tensor:
        """Return `functional_samples` behind the inverse link, `(n_samples, B, C)`.

        Of inputs that are sampled independently, only `top_outputs` vary.
        """
        how = n_samples, diagonal_output, generator, joint, self._top_outputs
        samples = self.functional_samples(x, pred_type, *how)
        if self.likelihood == Likelihood.CLASSIFICATION:
            return self._observation.sampled_probabilities(samples)
        return samples

    def sample(
        self, n_samples: int = N_SAMPLES, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Return weights from the posterior, `(n_samples, P)`."""
        posterior, mean = self.posterior, self.mean
        dtype = torch.promote_types(mean.dtype, posterior.basis.directions.dtype)
        generator = self._generator(generator, goes_on=True)
        like = {"generator": generator, "dtype": dtype, "device": self._device}
        inside, outside = torch.randn(n_samples, posterior.rank, **like), None
        if posterior.needs_residual:
            outside = torch.randn(n_samples, posterior.n_params, **like)
        return (mean + posterior.sample_offsets(inside, outside)).to(mean.dtype)

    def _nn_functional_samples(
        self,
        X: Any,
        n_samples: int = N_SAMPLES,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Return outputs `(n_samples, B, ...)` of the network with sampled weights."""
        with self._predicting() as predictor:
            samples = [
                predictor.network(X, self.sample(1, generator)[0], **model_kwargs)
                for _ in range(n_samples)  # a sample is as large as the model
            ]
        return torch.stack(samples)
