"""One posterior of the Laplace family: fitted once, tuned for one link after another.

Index legend: N data, C outputs, P parameters, B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from laplace_ella import metrics
from laplace_ella.comparison.loaders import rebatched
from laplace_ella.comparison.memory import (
    Estimate,
    Problem,
    preferred_batch,
    stored_floats,
)
from laplace_ella.comparison.methods import Method, Tuning
from laplace_ella.comparison.predictions import (
    Fitted,
    join_notes,
    link_probabilities,
    moments,
    with_noise,
)
from laplace_ella.comparison.search import Choice, GridSearch, at_border
from laplace_ella.comparison.settings import Settings
from laplace_ella.support.links import Link
from laplace_ella.support.resources import Stopwatch

__all__ = ["LaplaceRun", "NotRun", "build_laplace", "peak"]

#: Bytes of temporary memory that a batch may take before it is split for speed.
BATCH_TARGET = 5 * 10**7

#: Exponents of the prior precisions that grid searches look at, laplace-torch's own.
PRIOR_RANGE = (-4.0, 4.0)

#: What `tune_kwargs` may change about them; with others laplace-torch searches itself.
GRID_OPTIONS = {"log_prior_prec_min", "log_prior_prec_max", "grid_size"}


class NotRun(Exception):
    """A method that was not tried; the message is the status of its row."""


def build_laplace(
    method: Method,
    model: nn.Module,
    settings: Settings,
    problem: Problem,
    seed: int,
    **more: Any,
) -> Any:
    """`Laplace(...)` with the arguments of a method; `more` where it has none."""
    import laplace

    return laplace.Laplace(
        model,
        settings.likelihood,
        **{**more, **_laplace_arguments(method, settings, problem, seed)},
    )


def _laplace_arguments(
    method: Method, settings: Settings, problem: Problem, seed: int
) -> dict[str, Any]:
    """Keyword arguments for `Laplace`, sizes capped by the data, with the seed set."""
    kwargs = dict(method.kwargs)
    kwargs.setdefault("prior_precision", settings.prior_precision)
    kwargs.setdefault("dict_key_y", settings.dict_key_y)
    kwargs.setdefault("dict_key_x", settings.dict_key_x)
    if settings.is_regression:
        kwargs.setdefault("sigma_noise", settings.sigma_noise)
    if method.structure[1] in ("nystrom", "gp"):
        kwargs.setdefault("seed", seed)
    if method.is_ella:
        kwargs.setdefault("output_layout", settings.output_layout)
    if method.structure[1] == "gp":
        for name in ("n_subset", "subsample_size", "num_inducing"):
            if isinstance(kwargs.get(name), int):
                kwargs[name] = min(kwargs[name], problem.n_data)
        if "n_eigenvalues" in kwargs and "subsample_size" in kwargs:
            kwargs["n_eigenvalues"] = min(
                kwargs["n_eigenvalues"], kwargs["subsample_size"]
            )
    return kwargs


class LaplaceRun:
    """`Laplace(...)` of a method, fitted; `tuned_for(link)` makes it ready to predict.

    What does not depend on the link is done once: the fit (but for early stopping),
    the evidence, the features of validation data, and laplace-torch's passes over them.
    The seconds of such work count for every link, as if it were the only one.
    """

    def __init__(
        self,
        method: Method,
        tune: Tuning,
        model: nn.Module,
        settings: Settings,
        problem: Problem,
        needs: Estimate,
        train_loader: Any,
        val_loader: Any,
        seed: int,
    ) -> None:
        self.method, self.tune, self.model = method, tune, model
        self.settings, self.problem, self.seed = settings, problem, seed
        self.device = next(model.parameters()).device
        batch = preferred_batch(method, problem, BATCH_TARGET)
        self.batch = batch if needs.batch is None else min(needs.batch, batch)
        self.budget = {} if needs.budget is None else {"memory_budget": needs.budget}
        # KFAC averages its factors over a batch, so its fit keeps the user's batches.
        if method.structure[1] != "kron":
            train_loader = rebatched(train_loader, self.batch)
        self.train_loader = train_loader
        self.val_loader: Any = val_loader
        if val_loader is not None:
            self.val_loader = rebatched(val_loader, self.batch)
        self.by_sampled_weights = method.prediction_type == "nn"
        if not self._is_supported():
            raise NotRun("not supported: calibration needs Gaussian function values")
        if tune is not Tuning.EARLY_STOPPING:
            self._fit("")

    def _is_supported(self) -> bool:
        if self.tune is not Tuning.CALIBRATION:
            return True
        return not self.by_sampled_weights and (
            self.method.is_ella or self._is_searched_here()
        )

    def _is_searched_here(self) -> bool:
        """Whether laplace-torch's function values follow a changed prior at once, and
        nothing is asked for that only its own search knows."""
        follow = self.method.functional in (None, "nystrom")
        return follow and set(self.method.tune_kwargs) <= GRID_OPTIONS

    # --- fitting ---------------------------------------------------------------------

    def _fit(self, link: str) -> None:
        """Fit, and do what no link changes."""
        from laplace_ella import EarlyStopping

        method, tune = self.method, self.tune
        fit_kwargs = dict(method.fit_kwargs)
        if tune is Tuning.EARLY_STOPPING:
            plan = EarlyStopping(**self._link_options(link), **method.tune_kwargs)
            validation = {"val_loader": self.val_loader, "early_stopping": plan}
            fit_kwargs = {**validation, **fit_kwargs}
        with Stopwatch(self.device) as self.fitting:
            la = build_laplace(
                method,
                self.model,
                self.settings,
                self.problem,
                self.seed,
                **self.budget,
            )
            la.fit(self.train_loader, **fit_kwargs)
        self.la = la
        with Stopwatch(self.device) as self.preparing:
            if tune is Tuning.MARGLIK:
                la.optimize_prior_precision(
                    **{
                        "pred_type": method.prediction_type,
                        "method": "marglik",
                        "n_steps": self.settings.n_steps,
                        "prior_structure": "scalar",
                        **method.tune_kwargs,
                    }
                )
            self.validation: Any = self.val_loader
            self.choices: Mapping[str, Choice] = {}
            self.start = {name: getattr(la, name) for name in _hyperparameters(la)}
            if tune.needs_validation and tune is not Tuning.EARLY_STOPPING:
                self._prepare()

    def _prepare(self) -> None:
        """Passes over the validation data that serve all links."""
        if self.by_sampled_weights:
            return
        if self.method.is_ella:
            from laplace_ella import FeatureCache

            self.validation = FeatureCache.from_loader(self.la, self.val_loader)
        elif self._is_searched_here() and self.tune is not Tuning.TEMPERATURE:
            has_links = self.method.has_links and not self.settings.is_regression
            search = GridSearch(
                self.la,
                self.val_loader,
                self.settings.links if has_links else ("",),
                self.settings,
                self._grid(),
                self.seed,
            )
            calibrate = self.tune is Tuning.CALIBRATION
            self.choices = search.calibrations() if calibrate else search.priors()

    def _grid(self) -> list[float]:
        """The prior precisions of every grid search."""
        given = self.method.tune_kwargs
        low = given.get("log_prior_prec_min", PRIOR_RANGE[0])
        high = given.get("log_prior_prec_max", PRIOR_RANGE[1])
        size = given.get("grid_size", self.settings.grid_size)
        return torch.logspace(low, high, size, dtype=torch.float64).tolist()

    # --- tuning ----------------------------------------------------------------------

    def tuned_for(self, link: str) -> Fitted:
        """The posterior with the settings chosen for a link."""
        if self.tune is Tuning.EARLY_STOPPING:
            self._fit(link)
        with Stopwatch(self.device) as choosing:
            borders: tuple[str, ...] = ()
            tau = 1.0
            if link in self.choices:
                tau, borders = self._take(self.choices[link])
            elif self.tune.needs_validation:
                self._set(self.start)
                borders = self._search(link)
        settings = {**self._chosen(tau), **({"at_border": True} if borders else {})}
        return Fitted(
            self._predictor(link, tau),
            self.batch,
            torch.as_tensor(self.la.sigma_noise).detach().cpu().double(),
            {
                "fit_s": self.fitting.seconds,
                "tune_s": self.preparing.seconds + choosing.seconds,
                "floats": float(stored_floats(self.la)),
                **peak(self.fitting, self.preparing, choosing),
            },
            settings,
            join_notes(*borders),
        )

    def _set(self, values: Mapping[str, Any]) -> None:
        """Set hyperparameters, the prior last: with it laplace-torch forgets what it
        has factorised, with the temperature it does not."""
        for name, value in values.items():
            setattr(self.la, name, value)

    def _take(self, choice: Choice) -> tuple[float, tuple[str, ...]]:
        """Adopt settings that were found already; τ and the borders met."""
        regression = self.settings.is_regression
        self._set(
            {
                "temperature": choice.temperature,
                **({"sigma_noise": choice.scale} if regression else {}),
                "prior_precision": choice.prior_precision,
            }
        )
        return 1.0 if regression else choice.scale, choice.borders

    def _search(self, link: str) -> tuple[str, ...]:
        """Let the posterior search itself; the borders met that it does not tell of."""
        la, method, tune = self.la, self.method, self.tune
        options = self._link_options(link)
        if tune is Tuning.TEMPERATURE:
            la.optimize_temperature(
                self.validation, **{**options, **method.tune_kwargs}
            )
        elif tune is Tuning.CALIBRATION:
            la.optimize_calibration(
                self.validation, **{**options, **method.tune_kwargs}
            )
        elif tune is Tuning.GRIDSEARCH:
            grid = self._grid()
            # Laplace's own defaults do not tell priors apart: the MSE, which no prior
            # changes, and a running NLL that is never reset between the candidates.
            loss = (
                noisy_nll(la.sigma_noise)
                if self.settings.is_regression
                else categorical_nll
            )
            la.optimize_prior_precision(
                **{
                    "pred_type": method.prediction_type,
                    "method": "gridsearch",
                    "val_loader": self.validation,
                    "grid_size": self.settings.grid_size,
                    "loss": loss,
                    **options,
                    **method.tune_kwargs,
                }
            )
            prior = float(torch.as_tensor(la.prior_precision).mean())
            return at_border("prior precision", prior, (grid[0], grid[-1]))
        return ()

    def _link_options(self, link: str) -> dict[str, Any]:
        """Arguments of searches; regression needs none but for sampled weights."""
        if self.by_sampled_weights:  # averaged behind the link; Laplace calls that 'mc'
            return {"link_approx": "mc", "n_samples": self.settings.n_samples}
        if self.settings.is_regression:
            return {}
        return {"link_approx": link, "n_samples": self.settings.n_samples}

    # --- predictions -----------------------------------------------------------------

    def _predictor(self, link: str, tau: float) -> Callable[[Any], Any]:
        """x → what `la` predicts, its logits divided by τ; by links that laplace-torch
        does not have, too."""
        la, n_samples = self.la, self.settings.n_samples
        pred_type = self.method.prediction_type
        named = {"link_approx": "mc" if self.by_sampled_weights else link}

        def by_laplace(x: Any) -> Any:
            options = named if named["link_approx"] else {}
            return la(x, pred_type=pred_type, n_samples=n_samples, **options)

        def by_moments(x: Any) -> torch.Tensor:
            return link_probabilities(
                *moments(la, x), link, n_samples, softmax_temperature=tau
            )

        foreign = link == Link.PROBIT_CENTERED and not self.method.is_ella
        return by_moments if foreign or tau != 1.0 else by_laplace

    # --- the report ------------------------------------------------------------------

    def _chosen(self, tau: float) -> dict[str, Any]:
        """What the posterior ended up with, what of it was chosen, and how."""
        la, tune = self.la, self.tune
        prior = torch.as_tensor(la.prior_precision).detach().flatten()
        settings: dict[str, Any] = {
            "tuning": tune.value,
            "chosen": list(self._searched()),
            "prior_precision": float(prior.mean()),
            "temperature": float(la.temperature),
            "n_data": int(la.n_data),
        }
        if self.settings.is_regression:
            settings["sigma_noise"] = float(torch.as_tensor(la.sigma_noise).mean())
        else:
            own = float(getattr(la, "softmax_temperature", 1.0))
            settings["softmax_temperature"] = own * tau
        rank = getattr(la, "rank", None)
        return {**settings, "rank": int(rank)} if isinstance(rank, int) else settings

    def _searched(self) -> tuple[str, ...]:
        """Names of the settings that the tuning chose."""
        both = self.method.tune_kwargs.get("tune_prior", False)
        scale = "sigma_noise" if self.settings.is_regression else "softmax_temperature"
        return {
            Tuning.MARGLIK: ("prior_precision",),
            Tuning.GRIDSEARCH: ("prior_precision",),
            Tuning.EARLY_STOPPING: ("n_data",),
            Tuning.TEMPERATURE: ("prior_precision",) * both + ("temperature",),
            Tuning.CALIBRATION: ("prior_precision", "temperature", scale),
        }.get(self.tune, ())


def _hyperparameters(la: Any) -> tuple[str, ...]:
    """What searches change, the prior last."""
    names = ("softmax_temperature", "temperature", "sigma_noise", "prior_precision")
    return tuple(name for name in names if hasattr(la, name))


def categorical_nll(probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss for a grid search: the NLL of the report, as the tensor Laplace expects."""
    return torch.tensor(metrics.nll(probs, targets))


def noisy_nll(sigma: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Loss for a grid search: the NLL of the report, with the observation noise."""

    def loss(
        mean: torch.Tensor, variance: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        if variance.ndim == 3:
            variance = variance.diagonal(dim1=-2, dim2=-1)
        noisy = with_noise(variance, sigma)
        return torch.tensor(metrics.gaussian_nll(mean, noisy, targets))

    return loss


def peak(*watches: Stopwatch) -> dict[str, float]:
    """The largest peak of memory, in MB, where it is known."""
    peaks = [w.peak_bytes for w in watches if w.peak_bytes is not None]
    return {"peak_mb": max(peaks) / 1e6} if peaks else {}
