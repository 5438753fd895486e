"""How `ELLALaplace` predicts: function values, links and samples."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from laplace.utils.enums import (
    Likelihood,
    LinkApprox,
    PredType,
)

from laplace_ella.posterior import likelihood, predictive
from laplace_ella.posterior.subspace import SubspacePosterior
from laplace_ella.support.batches import to_device
from laplace_ella.support.checks import member, positive_int
from laplace_ella.support.layout import OutputLayout
from laplace_ella.support.preserve import full_precision

__all__ = ["Predicting"]


class Predicting:
    """The part of `ELLALaplace` that looks at new inputs."""

    def features(
        self, x: torch.Tensor | MutableMapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs f_mu `(B, C)` and features φ = J(x)V `(B, C, K)`.

        Of models with outputs at S positions: `(B·S, C)` and `(B·S, C, K)`.
        """
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
            x, directions, weights, create_graph, lambda J: self._positions.rows(J)
        )
        return (
            self._positions.rows(f.to(self._dtype)),
            self._positions.rows(phi.to(self._dtype)),
            kernel.to(self._dtype),
        )

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
        `diagonal_output` or `pred_type='nn'`. Of models with outputs at many positions,
        probabilities, means and variances have the shape of the output and covariances
        are those of the C outputs at each position, `(B, *positions, C, C)`.
        """
        pred_type = member(PredType, "pred_type", pred_type)
        link_approx = member(LinkApprox, "link_approx", link_approx)
        if pred_type == PredType.NN and link_approx != LinkApprox.MC:
            raise ValueError(
                "pred_type='nn' samples weights, so it needs link_approx='mc', got "
                f"link_approx={link_approx.value!r}."
            )
        positive_int("n_samples", n_samples)
        self._check_fitted()
        self._check_generator(generator)
        generator = generator or self._fresh_generator()
        regression = self._family.is_regression or (
            self.likelihood == Likelihood.REWARD_MODELING and not fitting
        )
        if pred_type == PredType.NN:
            samples = self._nn_functional_samples(
                x, n_samples, generator, **model_kwargs
            )
            if regression:
                return samples.mean(0), samples.var(0)
            return self._family.probabilities(samples, self._class_dim).mean(0)
        if joint and regression:
            return self._joint_distribution(x)
        with self._undisturbed():
            f_mu, phi, kernel = self._kernel_features(
                to_device(x, self._device), self.posterior, self.enable_backprop
            )
            prediction = self.predict_from_features(
                f_mu,
                phi,
                kernel,
                link_approx=link_approx,
                n_samples=n_samples,
                diagonal_output=diagonal_output,
                generator=generator,
                regression=regression,
            )
            return self._restore_prediction(prediction)

    def _restore_prediction(
        self, prediction: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rows `(B·S, C)` in the shape of the model's output."""
        positions = self._positions
        if not isinstance(prediction, tuple):
            return positions.restore(prediction)
        mean, var = prediction
        if var.ndim == 3:  # covariances
            return positions.restore(mean), positions.restore_positions(var)
        return positions.restore(mean), positions.restore(var)

    def _prediction_rows(
        self,
        prediction: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        y: torch.Tensor,
    ) -> tuple[Any, torch.Tensor]:
        """Predictions with variances and targets as rows that are observed."""
        parts = prediction if isinstance(prediction, tuple) else (prediction,)
        rows = [self._positions.rows(part.flatten(1)) for part in parts]
        y = self._target_rows(rows[0], y)
        known = likelihood.observed(y, self._family)
        if known is not None and self._positions.shape:
            rows, y = [part[known] for part in rows], y[known]
        return tuple(rows) if isinstance(prediction, tuple) else rows[0], y

    @property
    def _class_dim(self) -> int:
        """Dimension of the C classes in samples `(n, B, ...)`."""
        return 2 if self.output_layout is OutputLayout.CHANNELS_FIRST else -1

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

        Of models with outputs at many positions, one row a position.

        Features do not depend on prior, noise, temperature or link: keep them (see
        `FeatureCache`) and try all of these at the cost of K×K algebra. Where the
        complement is kept, `kernel` is J(x)J(x)ᵀ `(B, C, C)`.
        """
        if regression is None:
            regression = self._family.is_regression
        with full_precision(self._device):
            values = self.posterior.function_values(f_mu, phi, kernel)
            if regression:
                variance = values.variance if diagonal_output else values.covariance
                return f_mu, variance()
            return predictive.class_probabilities(
                values,
                link_approx,
                n_samples,
                diagonal_output,
                generator or self._fresh_generator(),
                self._family,
            )

    def _joint_distribution(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean `(B·C,)` and covariance `(B·C, B·C)` of all function values."""
        with self._undisturbed():
            f_mu, phi, kernel = self._joint_features(x)
            return f_mu.flatten(), self.posterior.joint_covariance(phi, kernel)

    def _joint_features(
        self, x: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Outputs as the model gives them, features `(B·C, K)` and, if needed, kernel
        `(B·C, B·C)`; C stands for all outputs of an example."""
        x = to_device(x, self._device)
        if not self.posterior.needs_kernel:
            f_mu, phi = self._differentiate(x, self.basis, self.enable_backprop)
            products = phi.flatten(0, 1), None
        else:
            f_mu, Js = self._linearizer.jacobian(x, self.enable_backprop)
            products = self._jacobian_products(Js.flatten(0, 1))
        f_mu = f_mu.to(self._dtype).unflatten(1, self._positions.output_shape)
        return f_mu, *products

    def _jacobian_products(
        self, Js: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Features and kernel of Jacobians `(..., C, P)`, in the prior's weights."""
        weights = self.posterior.kernel_weights()
        weighted = Js if weights is None else Js * weights.to(Js)
        phi = (weighted @ self.basis.vectors.to(Js)).to(self._dtype)
        if not self.posterior.needs_kernel:
            return phi, None
        return phi, (weighted @ Js.mT).to(self._dtype)

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
        pred_type = member(PredType, "pred_type", pred_type)
        self._check_fitted()
        self._check_generator(generator)
        positive_int("n_samples", n_samples)
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
            samples = predictive.draw(values, n_samples, generator, diagonal_output)
            restored = self._positions.restore(samples.flatten(0, 1))
            return restored.unflatten(0, (n_samples, -1))

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
            return self._family.probabilities(samples, self._class_dim)
        return samples

    def _nn_functional_samples(
        self,
        X: torch.Tensor | MutableMapping[str, Any],
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Outputs of the network with sampled weights, never written to it."""
        fn = self._linearizer.fn
        params = [p.dtype for p in fn.parameters()]
        samples = []
        with self._undisturbed():
            x = to_device(X, self._device)
            for _ in range(n_samples):  # one by one: a sample is as large as the model
                theta = fn.split(self.sample(1, generator)[0])
                theta = [t.to(d) for t, d in zip(theta, params, strict=True)]
                samples.append(fn(theta, x, **model_kwargs).to(self._dtype))
        return torch.stack(samples).unflatten(2, fn.output_shape)

    def functional_variance(self, Js: torch.Tensor) -> torch.Tensor:
        """Output covariance `(B, C, C)` for Jacobians `(B, C, P)`."""
        self._check_fitted()
        self._check_jacobians(Js)
        phi, kernel = self._jacobian_products(Js)
        mean = phi[..., 0]  # of the right shape; it plays no part in the covariance
        return self.posterior.function_values(mean, phi, kernel).covariance()

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
            prediction = self.predict_from_features(
                f_mu, phi, kernel, diagonal_output=diagonal_output, regression=True
            )
            return self._restore_prediction(prediction)

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
