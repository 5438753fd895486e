"""Adapters of peers that are written in JAX, or are run from a checkout of theirs.

As in `common.adapters`; checkouts are used as they are, nothing of them is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from common.adapters import (
    Adapter,
    Choose,
    Fitted,
    Problem,
    by_samples,
    count,
    of_posterior,
    tuned,
)


def as_jax(model: nn.Module) -> tuple[Callable, dict[str, Any]]:
    """Return a function (input, params) and the weights of a network of tanh layers."""
    import jax.numpy as jnp

    if not isinstance(model, nn.Sequential):
        raise TypeError("needs a JAX network; the torch ResNet was not translated")
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    params = {
        f"{i}.{name}": jnp.asarray(value.detach().numpy())
        for i, layer in enumerate(layers)
        for name, value in layer.named_parameters()
    }

    def function(input: Any, params: dict[str, Any]) -> Any:
        for i in range(len(layers)):
            input = jnp.tanh(input) if i else input
            input = input @ params[f"{i}.weight"].T + params[f"{i}.bias"]
        return input

    return function, params


def laplax(curvature: str, **options: Any) -> Adapter:
    """Return the adapter of laplax: prior on a grid of 13 by its own evidence."""

    def adapt(problem: Problem) -> Choose:
        import jax
        import jax.numpy as jnp
        from laplax import laplace
        from laplax.eval import marginal_log_likelihood, pushforward

        function, params = as_jax(problem.model)
        x, y = problem.train
        y = y if problem.regression else F.one_hot(y)
        data = {"input": jnp.asarray(x), "target": jnp.asarray(y)}

        # Its square error has no ½, and its cross entropy is one of sigmoids.
        def loss(f: Any, y: Any) -> Any:
            if problem.regression:
                return 0.5 * ((f - y) ** 2).sum()
            return -(y * jax.nn.log_softmax(f)).sum()

        known: Any = {"loss_fn": loss, "curv_type": curvature}
        if curvature == "lanczos":
            options["key"] = jax.random.key(0)
        posterior, estimate = laplace(function, params, data, **known, **options)
        noise = problem.noise()
        fixed = {"sigma": noise / 2, "sigma_squared": 1 / noise}

        def evidence(prior: float) -> float:
            arguments = {"prior_prec": prior, **fixed}
            return float(
                marginal_log_likelihood(
                    estimate, arguments, data, function, params, **known
                )
            )

        def choose(prior: float | None) -> Fitted:
            if prior is None:
                prior = max((10 ** (i / 2) for i in range(-6, 7)), key=evidence)
            steps = [pushforward.lin_setup, pushforward.lin_pred_mean]
            steps.append(pushforward.lin_pred_var)
            arguments = {"prior_prec": prior, **fixed}
            single = pushforward.set_lin_pushforward(
                function, params, posterior, arguments, pushforward_fns=steps
            )
            batched = jax.jit(jax.vmap(single))

            def predict(x: Tensor) -> Any:
                found = batched(jnp.asarray(x))
                mean, var = (
                    torch.tensor(jax.device_get(found[k])) for k in ("map", "pred_var")
                )
                var = var.reshape(mean.shape)
                if problem.regression:
                    return mean, var
                return (mean / (1 + torch.pi / 8 * var).sqrt()).softmax(-1)

            stored = count(torch.empty(v.shape) for v in jax.tree.leaves(estimate))
            return Fitted(predict, stored)

        return choose

    return adapt


def checkout(problem: Problem, folder: str) -> None:
    """Make a checkout importable, before what is installed."""
    path = problem.checkouts / folder
    if not path.is_dir():
        raise FileNotFoundError(f"no checkout {folder} in --checkouts")
    sys.path.insert(0, str(path))


def suq(problem: Problem) -> Choose:
    checkout(problem, "SUQ")
    from suq.diag_suq_mlp import SUQ_MLP_Diag

    if not isinstance(problem.model, nn.Sequential):
        raise TypeError("converts a Sequential of Linear and activations")
    posterior = tuned(problem, "all", "diag")

    def choose(prior: float | None) -> Fitted:
        la = posterior(prior)
        variance, noise = la.posterior_variance, float(la.sigma_noise)
        net = SUQ_MLP_Diag(
            problem.network(), variance, problem.likelihood, sigma_noise=noise
        )
        net.fit_scale_factor(problem.loader(), 20, 1e-2, speedup=False)

        def predict(x: Tensor) -> Any:
            found = net(x)
            if not problem.regression:
                return found.detach()
            return found[0].detach(), (found[1] - noise**2).detach()

        fitted = of_posterior(la)
        return Fitted(predict, fitted.stored, fitted.noise)

    return choose


def nuqls(problem: Problem) -> Choose:
    checkout(problem, "NuqlsPackage")
    from nuqls.posterior import Nuqls  # sets the default dtype to float64

    x, y = problem.train
    train = TensorDataset(x.double(), y.double() if problem.regression else y)

    def choose(scale: float | None) -> Fitted:
        few = {"full_dataset": True} if problem.regression else {}
        posterior = Nuqls(problem.network().double(), problem.likelihood, **few)
        if problem.regression:
            posterior.train(train, scale=scale or 1.0, S=10, epochs=1000, lr=1e-3)
        else:
            bs, epochs = (problem.n, 1000) if problem.fresh else (10, 2)
            how = {"S": 10, "epochs": epochs, "lr": 1e-2, "mu": 0.9}
            C = len(y.unique())
            posterior.train(train, bs, C, scale=scale or 0.0025, **how)

        def draw(x: Tensor) -> Tensor:
            f = posterior.eval(x.double())
            return f.T.unsqueeze(-1) if problem.regression else f

        return by_samples(problem, draw, 10 * count(problem.model.parameters()))

    return choose


def valla(problem: Problem) -> Choose:
    checkout(problem, "Variational-LLA")
    from scipy.cluster.vq import kmeans2
    from src.valla import VaLLAMultiClass, VaLLARegression
    from utils.models import create_ad_hoc_mlp

    torch.pi = torch.tensor(torch.pi)  # its scripts redefine it, too
    x, y = (part.double() for part in problem.train)
    Z = kmeans2(x.numpy(), min(50, problem.n), minit="points", seed=0)[0]
    kind = VaLLARegression if problem.regression else VaLLAMultiClass

    def choose(prior: float | None) -> Fitted:
        net = create_ad_hoc_mlp(problem.network().double())
        outputs = problem.model[-1].out_features
        posterior = kind(net, Z, (prior or 1.0) ** -0.5, problem.n, outputs)
        optimizer = torch.optim.Adam(posterior.parameters(recurse=False), lr=1e-2)
        for _ in range(300):
            some = torch.randperm(problem.n)[:100]
            posterior.train_step(optimizer, x[some], y[some])

        @torch.no_grad()
        def predict(x: Tensor) -> Any:
            mean, covariance = posterior.predict_f(x.double())
            var = covariance.diagonal(dim1=-2, dim2=-1)
            if problem.regression:
                return mean, var
            return (mean / (1 + torch.pi / 8 * var).sqrt()).softmax(-1)

        noise = posterior.log_variance.exp().item() if problem.regression else None
        return Fitted(predict, count(posterior.parameters(recurse=False)), noise)

    return choose


def slu(problem: Problem) -> Choose:
    checkout(problem, "uncertainty_quantification")
    import jax
    import jax.numpy as jnp
    from src.models import Model
    from src.ood_scores.lm_lanczos import low_memory_lanczos_score_fun

    function, params = as_jax(problem.model)
    apply = lambda params, x: function(x, params)  # noqa: E731
    net = Model(None, apply, apply, False, False, False)
    arguments = {
        "subsample_trainset": int(problem.n / 0.9),
        "serialize_ggn_on_batches": False,
        "use_hessian": False,
        "likelihood": problem.likelihood,
        "prior_std": 0.1,
        "sketch": "dense",
        "sketch_size": 1000,
        "sketch_seed": 0,
        "sketch_density": None,
        "lanczos_seed": 0,
        "lanczos_lm_iter": 50,
        "n_eigenvec_lm": 25,
        "output_dim": problem.model[-1].out_features,
    }

    def choose(setting: float | None) -> Fitted:
        loader = problem.loader()
        weights = {"params": params}
        score, *_ = low_memory_lanczos_score_fun(net, weights, loader, arguments)

        def scores(x: Tensor) -> Tensor:
            return torch.tensor(jax.device_get(score(jnp.asarray(x))))

        return Fitted(None, 25 * 1000, score=scores)

    return choose
