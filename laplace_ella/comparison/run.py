"""One method: fit it, tune it for every link, predict, compute its scores.

Index legend: N data, C outputs, B batch.
"""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from laplace import Laplace
from torch import nn

from laplace_ella import metrics
from laplace_ella.comparison.bootstrap import (
    auroc_replicates,
    classification_replicates,
    regression_replicates,
)
from laplace_ella.comparison.estimates import Sizes, batch_within, kfac_layers
from laplace_ella.comparison.grid_search import GridSearch, moments
from laplace_ella.comparison.methods import Kind, Method, Tuning
from laplace_ella.comparison.report import Result
from laplace_ella.derivatives.modes import ComputeOptions
from laplace_ella.errors import BorderWarning, NumericalWarning, RankWarning
from laplace_ella.fitting.early_stopping import EarlyStopping
from laplace_ella.posterior.observation import FunctionValues, class_probabilities
from laplace_ella.support.batches import (
    OutputLayout,
    batch_size,
    chunks,
    split_batch,
    take,
    to_device,
)
from laplace_ella.support.memory import human_bytes
from laplace_ella.support.preserve import random_states, seeded_iteration
from laplace_ella.tuning.temperature import temperature_scaling

__all__ = ["Task", "describe_error", "reproducible", "results", "split"]

#: Exponents of the prior precisions of every grid search, laplace-torch's own.
PRIOR_RANGE = (-4.0, 4.0)

#: What each tuning chooses, besides the noise of a regression.
CHOICES = {
    Tuning.DEFAULT: ("prior_precision",),
    Tuning.MARGLIK: ("prior_precision",),
    Tuning.GRIDSEARCH: ("prior_precision",),
    Tuning.EARLY_STOPPING: ("n_data",),
    Tuning.TEMPERATURE: ("prior_precision", "temperature"),
    Tuning.CALIBRATION: ("prior_precision", "temperature"),
}


class NotRun(Exception):
    """A method that was not tried; the message is the status of its row."""


@dataclass(frozen=True)
class Task:
    """The network, the data, and what all methods have in common.

    `sigma_noise` is None where each method chooses its own; `residual` is the root mean
    squared error of the network on the training data, from which they start.
    """

    model: nn.Module
    likelihood: str
    train: Any
    test: Any
    val: Any
    ood: dict[str, Any]
    sizes: Sizes
    links: tuple[str, ...]
    n_samples: int
    prior_precision: float
    sigma_noise: float | None
    residual: float
    grid_size: int
    n_steps: int
    n_bins: int
    reference: Method | None
    memory_budget: int | None
    limit: int | None
    dict_key_x: str
    dict_key_y: str
    layout: OutputLayout

    @property
    def is_regression(self) -> bool:
        return self.likelihood == "regression"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def noise(self) -> float:
        return self.residual if self.sigma_noise is None else self.sigma_noise

    def links_of(self, method: Method) -> tuple[str, ...]:
        """Return the links that make a difference for a method; '' if none does."""
        none = self.is_regression or method.kind is not Kind.LAPLACE
        return ("",) if none else self.links

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return outputs in the model's layout as rows `(B·S, C)`."""
        return self.layout.of(outputs.shape[1:]).rows(outputs.flatten(1))

    def targets(self, y: torch.Tensor) -> torch.Tensor:
        """Return classes `(B·S,)`, or regression targets `(B·S, C)`."""
        return self.rows(y) if self.is_regression else y.flatten()


@dataclass(frozen=True)
class Fitted:
    """A method that is ready to predict with the link that it was tuned for.

    Attributes
    ----------
    predict : callable
        x → class probabilities in the shape of the model's output, or for regression
        the mean in that shape and covariances `(B, ..., C, C)` without noise
    batch : int
        examples to predict at once
    noise : torch.Tensor
        standard deviation of the observation noise, `()` or `(C,)`
    fit_s, tune_s : float
        seconds
    settings : dict
        hyperparameters, how they were chosen and which
    note, left_out : str
        what a reader should know; types of layers without a posterior
    """

    predict: Callable[[Any], Any]
    batch: int
    noise: torch.Tensor
    fit_s: float = 0.0
    tune_s: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    left_out: str = ""


# Passes over the data


@contextmanager
def reproducible(seed: int, device: torch.device, *loaders: Any) -> Iterator[None]:
    """Seed all random states inside, and have them as before outside."""
    devices = [device] if device.type == "cuda" else []
    with random_states(*loaders), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002, augmentations draw from it
        random.seed(seed)
        yield


def split(batch: Any, dict_key_y: str) -> tuple[Any, torch.Tensor | None]:
    """Return inputs and targets of a batch; None for targets where there are none."""
    if isinstance(batch, torch.Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0], None
    if hasattr(batch, "keys") and dict_key_y not in batch:
        return batch, None
    return split_batch(batch, dict_key_y)


class _Counted:
    """A data set of which only the length is known."""

    def __init__(self, n_data: int) -> None:
        self.n_data = n_data

    def __len__(self) -> int:
        return self.n_data


class SmallBatches:
    """The batches of a loader in parts of at most `size` examples.

    Every pass is the same. laplace-torch takes N from the length of `dataset`, which is
    what the loader yields here, also where that has no length.
    """

    def __init__(self, loader: Any, n_data: int, size: int, dict_key_x: str) -> None:
        self.loader, self.size, self.dict_key_x = loader, size, dict_key_x
        self.dataset = _Counted(n_data)

    def __iter__(self) -> Iterator[Any]:
        for batch in seeded_iteration(self.loader):
            x = batch if hasattr(batch, "keys") else batch[0]
            n = batch_size(x, self.dict_key_x)
            for part in chunks(n, self.size):
                yield take(batch, part, n) if n > self.size else batch


def _seconds(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _collected() -> Iterator[list[str]]:
    """Collect what this package warns of; laplace-torch's warnings are routine."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
    for warning in caught:
        if issubclass(warning.category, (BorderWarning, NumericalWarning, RankWarning)):
            lines.append(str(warning.message).splitlines()[0])
            if issubclass(warning.category, BorderWarning):
                lines[-1] += BORDER


#: Marks the note of a search that ended at the border of its range.
BORDER = "\0"


# Methods


def _fitted_methods(task: Task, method: Method, seed: int) -> Callable[[str], Fitted]:
    """Fit a method on a copy of the model; return what tunes it for a link."""
    if method.kind is Kind.LAPLACE:
        return _LaplaceRun(task, method, _tuning(task, method), seed).tuned
    model = copy.deepcopy(task.model).eval()
    tau, tune_s, settings = 1.0, 0.0, {}
    noise = torch.tensor(task.noise)
    if method.kind is Kind.TEMPERATURE:
        if task.is_regression:
            raise NotRun("not supported: temperature scaling is for classification")
        if task.val is None:
            raise NotRun("skipped: needs a val_loader")
        start = _seconds(task.device)
        with torch.no_grad():
            pairs = [(task.rows(model(x)), y) for x, y in _validation(task)]
        tau = temperature_scaling(
            *(torch.cat(part) for part in zip(*pairs, strict=True))
        )
        tune_s = _seconds(task.device) - start
        settings = {"softmax_temperature": tau, "chosen": ["softmax_temperature"]}
    elif task.is_regression:
        chosen = ["sigma_noise"] if task.sigma_noise is None else []
        settings = {"sigma_noise": task.noise, "chosen": chosen}
    class_dim = 1 if task.layout is OutputLayout.CHANNELS_FIRST else -1

    def predict(x: Any) -> Any:
        f = model(x)
        if not task.is_regression:
            return torch.softmax(f / tau, class_dim)
        C = task.layout.of(f.shape[1:]).n_channels
        return f, f.new_zeros(*task.rows(f).shape, C)

    tuning = "validation data" if tau != 1.0 else "training data"
    settings = {"tuning": tuning, **settings}
    fitted = Fitted(predict, task.sizes.batch, noise, 0.0, tune_s, settings)
    return lambda link: fitted


def _validation(task: Task, size: int | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield inputs on the device and rows of targets."""
    n, key_x = task.sizes.n_data, task.dict_key_x
    for batch in SmallBatches(task.val, n, size or task.sizes.batch, key_x):
        x, y = split_batch(batch, task.dict_key_y)
        yield to_device(x, task.device), task.targets(y).to(task.device)


def _tuning(task: Task, method: Method) -> Tuning:
    """Return the tuning that will be used; raise NotRun if there is none."""
    tune = Tuning(method.tune)
    if tune in (Tuning.EARLY_STOPPING, Tuning.TEMPERATURE) and not method.is_ella:
        raise NotRun(f"not supported: {tune.value} is for hessian_structure='nystrom'")
    if not tune.needs_validation or task.val is not None:
        return tune
    if tune is Tuning.GRIDSEARCH:
        return Tuning.NONE
    raise NotRun(f"skipped: tuning by {tune.value} needs a val_loader")


class _LaplaceRun:
    """`Laplace(...)` of a method, fitted once and tuned for one link after the other.

    What does not depend on the link is done once: the fit (but for early stopping) and
    the features of the validation data. The seconds of such work count for every link.
    """

    def __init__(self, task: Task, method: Method, tune: Tuning, seed: int) -> None:
        self.task, self.method, self.tune, self.seed = task, method, tune, seed
        if method.structure[1] != "nystrom" and task.layout is not OutputLayout.FLAT:
            raise NotRun("not supported: outputs at many positions (only ELLA)")
        self.batch, needed = batch_within(method, task.sizes, task.limit)
        if not self.batch:
            limit = human_bytes(task.limit or 0)
            raise NotRun(f"skipped: needs {human_bytes(needed)} (limit {limit})")
        self.left_out, self.notes = "", []
        if tune is not Tuning.EARLY_STOPPING:
            self._fit_supported({})
        self.prepare_s, self.validation = 0.0, cast("Any", None)
        if tune is not method.tune:
            self.notes.append("no val_loader: the prior precision is as given")

    # Fit

    def _fit_supported(self, options: dict[str, Any]) -> None:
        """Fit the model, or what of it the structure and its backend support."""
        start = _seconds(self.task.device)
        model = copy.deepcopy(self.task.model).eval()
        try:
            self._fit(model, options)
        except Exception as error:
            model = copy.deepcopy(self.task.model).eval()
            left_out = _freeze_others(model)
            if not left_out or describe_error(error) == "out of memory":
                raise
            try:
                self._fit(model, options)
            except Exception:
                raise error from None
            self.left_out = left_out
            self.notes.append(
                f"the parameters of {left_out} have no posterior, because this method "
                f"does not support them ({describe_error(error)})"
            )
        self.fit_s = _seconds(self.task.device) - start
        self.start = _hyperparameters(self.la)

    def _fit(self, model: nn.Module, options: dict[str, Any]) -> None:
        task, method = self.task, self.method
        self.la: Any = Laplace(model, task.likelihood, **self._arguments())
        train = task.train
        if not method.is_ella and method.structure[1] != "gp":  # which samples by index
            # KFAC averages over a batch, so that it keeps those of the user.
            size = task.sizes.batch if method.structure[1] == "kron" else self.batch
            train = SmallBatches(train, task.sizes.n_data, size, task.dict_key_x)
        self.la.fit(train, **options)

    def _arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `Laplace`, sizes capped by the data."""
        task, method = self.task, self.method
        names = ("prior_precision", "dict_key_x", "dict_key_y")
        kwargs: dict[str, Any] = {name: getattr(task, name) for name in names}
        if task.is_regression:
            kwargs["sigma_noise"] = task.noise
        if method.structure[1] in ("nystrom", "gp"):
            kwargs["seed"] = self.seed
        if method.is_ella:
            kwargs["output_layout"] = task.layout
        kwargs |= method.kwargs
        if method.is_ella and task.memory_budget is not None:
            compute = kwargs.get("compute") or ComputeOptions()
            if compute.memory_budget is None:
                compute = replace(compute, memory_budget=task.memory_budget)
            kwargs["compute"] = compute
        if method.structure[1] == "gp":
            caps = {"n_subset": task.sizes.n_data, "num_inducing": task.sizes.n_data}
            caps["subsample_size"] = task.sizes.n_data
            caps["n_eigenvalues"] = task.sizes.n_data
            for name, cap in caps.items():
                if isinstance(kwargs.get(name), int):
                    kwargs[name] = min(kwargs[name], cap)
        return kwargs

    # Tune

    def tuned(self, link: str) -> Fitted:
        """Return the posterior with the settings chosen for a link."""
        task, options = self.task, {}
        if link:
            options = {"link_approx": link, "n_samples": task.n_samples}
        start, tau = _seconds(task.device), 1.0
        if self.tune is Tuning.EARLY_STOPPING:
            plan = EarlyStopping(**options, **self.method.tune_kwargs)
            self._fit_supported({"val_loader": task.val, "early_stopping": plan})
            start = _seconds(task.device)
        else:
            self._set(self.start)
        if self.method.is_ella:
            self._tune_ella(options)
        elif self.tune in (Tuning.DEFAULT, Tuning.MARGLIK):
            self._maximise_evidence()
        elif self.tune is not Tuning.NONE:
            tau = self._search(link)
        tune_s = self.prepare_s + _seconds(task.device) - start
        return Fitted(
            self._predictor(link, tau),
            self.batch,
            torch.as_tensor(self.la.sigma_noise).detach().cpu().double(),
            self.fit_s,
            tune_s,
            self._chosen(tau),
            "; ".join(dict.fromkeys(self.notes)),
            self.left_out,
        )

    def _set(self, values: dict[str, Any]) -> None:
        """Set hyperparameters, the prior last: with it laplace-torch forgets what it
        has factorised, with the temperature it does not."""
        for name in sorted(values, key=lambda name: name == "prior_precision"):
            setattr(self.la, name, values[name])

    def _tune_ella(self, options: dict[str, Any]) -> None:
        """Let a posterior of this package tune itself."""
        task, la, more = self.task, self.la, dict(self.method.tune_kwargs)
        if self.tune in (Tuning.DEFAULT, Tuning.MARGLIK):
            if task.is_regression and task.sigma_noise is None:
                la.optimize_sigma_noise(**{"n_steps": task.n_steps, **more})
                return
            if self.tune is Tuning.MARGLIK:
                more = {"method": "marglik", **more}
            options = {"n_steps": task.n_steps, **options}
            la.optimize_prior_precision(**{**options, **more})
            return
        if self.tune in (Tuning.NONE, Tuning.EARLY_STOPPING):
            return
        if self.validation is None:
            start = _seconds(task.device)
            self.validation = la.cache_features(task.val)
            self.prepare_s = _seconds(task.device) - start
        if self.tune is Tuning.GRIDSEARCH:
            low, high = PRIOR_RANGE
            la.optimize_prior_precision(
                **{
                    "method": "gridsearch",
                    "val_loader": self.validation,
                    "log_prior_prec_min": low,
                    "log_prior_prec_max": high,
                    "grid_size": task.grid_size,
                    **options,
                    **more,
                }
            )
        elif self.tune is Tuning.TEMPERATURE:
            more = {"tune_prior": True, **more}
            la.optimize_temperature(self.validation, **options, **more)
        else:
            la.optimize_calibration(self.validation, **options, **more)

    def _maximise_evidence(self) -> None:
        """Choose prior and noise of laplace-torch's posterior as its README does."""
        task, la = self.task, self.la
        if not task.is_regression or task.sigma_noise is not None:
            la.optimize_prior_precision(
                **{
                    "pred_type": "gp" if self.method.structure[1] == "gp" else "glm",
                    "method": "marglik",
                    "n_steps": task.n_steps,
                    "prior_structure": "scalar",
                    **self.method.tune_kwargs,
                }
            )
            return
        start = torch.tensor([1.0, task.noise], device=task.device)
        logs = start.log().requires_grad_()
        optimizer = torch.optim.Adam([logs], lr=0.1)
        for _ in range(task.n_steps):
            optimizer.zero_grad()
            prior, noise = logs.exp()
            (-la.log_marginal_likelihood(prior, noise)).backward()
            optimizer.step()
        prior, noise = logs.detach().exp()
        self._set({"sigma_noise": noise, "prior_precision": prior})

    def _search(self, link: str) -> float:
        """Set what the grid search of laplace-torch's posterior finds; return τ."""
        task, la = self.task, self.la
        if self.validation is None:
            functional = self.method.kwargs.get("functional_approximation", "sod")
            if self.method.structure[1] == "gp" and functional != "nystrom":
                raise NotRun("not supported: its function values do not follow a prior")
            start = _seconds(task.device)
            bounds = {"log_prior_prec_min": -4, "log_prior_prec_max": 4}
            given = {**bounds, "grid_size": task.grid_size, **self.method.tune_kwargs}
            if len(given) > 3:
                raise NotRun(f"not supported: a search with {sorted(given)}")
            grid = torch.logspace(*given.values(), dtype=torch.float64).tolist()
            batches = _validation(task, self.batch)
            settings = task.n_samples, self.seed
            self.validation = GridSearch.of(la, batches, grid, *settings)
            self.prepare_s = _seconds(task.device) - start
            self._set(self.start)
        if self.tune is Tuning.GRIDSEARCH:
            prior, borders = self.validation.prior(link)
            self.notes += [line + BORDER for line in borders]
            self._set({"prior_precision": prior})
            return 1.0
        found = self.validation.calibration(link)
        if found.kept:
            return 1.0
        chosen = {
            "temperature": found.temperature,
            "prior_precision": found.prior_precision,
        }
        if task.is_regression:
            chosen["sigma_noise"] = found.sigma_noise[0]
        self._set(chosen)
        return found.softmax_temperature

    # Predict

    def _predictor(self, link: str, tau: float) -> Callable[[Any], Any]:
        """Return what predicts, with logits divided by τ; also for links that
        laplace-torch does not have."""
        la, n_samples = self.la, self.task.n_samples
        options: dict[str, Any] = {}
        if link:
            options = {"link_approx": link, "n_samples": n_samples}
        if self.method.structure[1] == "gp":
            options["pred_type"] = "gp"
        foreign = link == "probit_centered" and not self.method.is_ella

        def by_moments(x: Any) -> torch.Tensor:
            mean, covariance = moments(la, x)
            empty = mean.new_zeros(*mean.shape, 0)
            f = FunctionValues(mean, empty, covariance).divided_by(tau)
            return class_probabilities(f, link, n_samples)

        if foreign or tau != 1.0:
            return by_moments
        return lambda x: la(x, **options)

    def _chosen(self, tau: float) -> dict[str, Any]:
        """Return the settings, which of them were chosen, and on what data."""
        la, values = self.la, _hyperparameters(self.la)
        found = {k: float(torch.as_tensor(v).mean()) for k, v in values.items()}
        found["n_data"] = int(la.n_data)
        unused = "softmax_temperature" if self.task.is_regression else "sigma_noise"
        found.pop(unused, None)
        if not self.task.is_regression:
            found["softmax_temperature"] = found.get("softmax_temperature", 1.0) * tau
        chosen = [*CHOICES.get(self.tune, ())]
        calibrated = self.tune is Tuning.CALIBRATION
        by_evidence = self.tune in (Tuning.DEFAULT, Tuning.MARGLIK)
        if self.task.is_regression:
            free = by_evidence and self.task.sigma_noise is None
            chosen += ["sigma_noise"] * (calibrated or free)
        elif calibrated or (by_evidence and found["softmax_temperature"] != 1.0):
            chosen.append("softmax_temperature")
        tuning = "validation data" if self.tune.needs_validation else "training data"
        if self.tune is Tuning.NONE:
            tuning = "as given"
        rank = getattr(la, "rank", None)
        ranks = {"rank": rank} if isinstance(rank, int) else {}
        return {"tuning": tuning, "chosen": chosen, **found, **ranks}


def _hyperparameters(la: Any) -> dict[str, Any]:
    """Return what searches change."""
    names = ("softmax_temperature", "temperature", "sigma_noise", "prior_precision")
    return {name: copy.copy(getattr(la, name)) for name in names if hasattr(la, name)}


def _freeze_others(model: nn.Module) -> str:
    """Leave parameters to linear and convolutional layers alone; return the types of
    the others, '' where nothing or everything would be left out."""
    kept = {id(p) for layer in kfac_layers(model) for p in layer.parameters()}
    types: dict[str, None] = {}
    for module in model.modules():
        others = [p for p in module.parameters(recurse=False) if id(p) not in kept]
        for p in others:
            if p.requires_grad:
                types[type(module).__name__] = None
                p.requires_grad_(False)
    left = any(p.requires_grad for p in model.parameters())
    return ", ".join(types) if left else ""


def describe_error(error: BaseException) -> str:
    """Return one line for the status of a row."""
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if isinstance(error, NotRun):
        return text
    # The CPU allocator has no exception type of its own.
    exhausted = "can't allocate memory" in text or "out of memory" in text.lower()
    if isinstance(error, torch.cuda.OutOfMemoryError) or exhausted:
        return "out of memory"
    if isinstance(error, MemoryError):
        return f"out of memory: {text}"
    if isinstance(error, NotImplementedError):
        return f"not supported: {text}"
    return f"failed: {type(error).__name__}: {text}"


# Predictions and scores


@dataclass(frozen=True)
class Predictions:
    """Predictions over a whole loader, on the CPU, one row per example and position.

    `values` are probabilities `(N, C)`, or for regression means `(N, C)`, with
    `covariance` `(N, C, C)`; `targets` are None for data without labels.
    """

    values: torch.Tensor
    covariance: torch.Tensor | None
    targets: torch.Tensor | None
    seconds: float

    def uncertainty(self) -> torch.Tensor:
        """Return the entropy of the predictions `(N,)`, up to a constant."""
        if self.covariance is None:
            return metrics.entropy(self.values.double())
        # The entropy of each output's marginal; a network alone has none.
        return self.variance().clamp_min(1e-300).log().sum(-1)

    def variance(self) -> torch.Tensor:
        """Return variances of function values `(N, C)`, float64."""
        assert self.covariance is not None
        return self.covariance.diagonal(dim1=-2, dim2=-1).double()


@torch.no_grad()
def _predict(task: Task, fitted: Fitted, loader: Any, seed: int) -> Predictions:
    """Predict over a loader; only the predictions are timed, not the loading.

    The data and their order are the same for every seed, which is that of random
    numbers in predictions: rows are compared on the same examples.
    """
    values, covariances, targets, seconds = [], [], [], 0.0
    with reproducible(0, task.device, loader):
        for index, batch in enumerate(seeded_iteration(loader)):
            x, y = split(batch, task.dict_key_y)
            x = to_device(x, task.device)
            n = batch_size(x, task.dict_key_x)
            torch.manual_seed(seed + 1000 * index)
            for part in chunks(n, fitted.batch):
                start = _seconds(task.device)
                found = fitted.predict(take(x, part, n))
                seconds += _seconds(task.device) - start
                mean, *spread = found if isinstance(found, tuple) else (found,)
                values.append(task.rows(mean.detach()).cpu())
                covariances += [each.detach().flatten(0, -3).cpu() for each in spread]
            targets.append(None if y is None else task.targets(y).cpu())
    known = [y for y in targets if y is not None]
    y = torch.cat(known) if len(known) == len(targets) else None
    covariance = torch.cat(covariances) if covariances else None
    return Predictions(torch.cat(values), covariance, y, seconds)


def results(
    task: Task, method: Method, seed: int, links: Sequence[str], references: dict
) -> Iterator[Result]:
    """Yield a row per link; an error becomes the status of its row.

    `references` keeps the predictions to which divergences are measured, by seed.
    """
    tuning = Tuning(method.tune)
    on_validation = tuning.needs_validation or method.kind is Kind.TEMPERATURE
    empty = Result(method.name, seed=seed, on_validation=on_validation)
    if tuning is Tuning.GRIDSEARCH and task.val is None:
        empty = replace(empty, on_validation=False)
    loaders = [each for each in (task.train, task.val) if each is not None]
    try:
        with reproducible(seed, task.device, *loaders), _collected() as at_fit:
            tuned = _fitted_methods(task, method, seed)
    except Exception as error:
        status = describe_error(error)
        yield from (replace(empty, link=link, status=status) for link in links)
        return
    for link in links:
        row = replace(empty, link=link)
        try:
            with reproducible(seed, task.device, *loaders), _collected() as said:
                fitted = tuned(link)
                test = _predict(task, fitted, task.test, seed)
                row = _scored(task, fitted, test, row)
                row = _with_divergence(task, method, test, row, references)
            notes = "; ".join(dict.fromkeys([*at_fit, *said, row.note])).strip("; ")
            settings = {**row.settings, "at_border": BORDER in notes}
            yield replace(row, note=notes.replace(BORDER, ""), settings=settings)
        except Exception as error:
            yield replace(row, status=describe_error(error))


def _scored(task: Task, fitted: Fitted, test: Predictions, row: Result) -> Result:
    """Return the row with scores on test and out-of-distribution data."""
    y, probs = test.targets, test.values
    if y is None:
        raise ValueError("test_loader has batches without targets")
    if task.is_regression:
        variance = test.variance() + fitted.noise.square()
        observed = test.values.double(), variance, y.double()
        scores = metrics.regression_metrics(*observed)
        replicates = regression_replicates(*observed)
        levels = list(metrics.CALIBRATION_LEVELS)
        mean, std = observed[0], variance.sqrt()
        shares = metrics.interval_coverage(mean, std, observed[2], levels)
        curves: dict[str, Any] = {"coverage": {"nominal": levels, "observed": shares}}
    else:
        seen = y != metrics.IGNORED
        probs, y = test.values[seen], y[seen]
        scores = metrics.classification_metrics(probs, y, task.n_bins)
        replicates = classification_replicates(probs, y, task.n_bins)
        curve = metrics.reliability_curve(probs, y, task.n_bins)
        curves = {"reliability": asdict(curve), **_error_curves(probs, y)}
    for name, loader in task.ood.items():
        far = _predict(task, fitted, loader, row.seed)
        pair = test.uncertainty(), far.uncertainty()
        scores[f"auroc:{name}"] = metrics.ood_auroc(*pair)
        replicates[f"auroc:{name}"] = auroc_replicates(*pair)
        if not task.is_regression:
            curves |= _error_curves(probs, y, far.values, f":{name}")
    seconds = {"fit_s": fitted.fit_s, "tune_s": fitted.tune_s}
    return replace(
        row,
        metrics=scores,
        costs={**seconds, "predict_s": test.seconds},
        settings=fitted.settings,
        curves=curves,
        replicates={k: [float(f"{v:.6g}") for v in r] for k, r in replicates.items()},
        note=fitted.note,
        left_out=fitted.left_out,
    )


def _error_curves(
    probs: torch.Tensor,
    y: torch.Tensor,
    far: torch.Tensor | None = None,
    suffix: str = "",
) -> dict[str, Any]:
    """Return the curves of Deng et al. 2022, Fig. 4, by name."""
    return {
        f"error_{side}{suffix}": asdict(
            metrics.error_versus_confidence(probs, y, far, side=side)
        )
        for side in ("below", "above")
    }


def _with_divergence(
    task: Task, method: Method, test: Predictions, row: Result, references: dict
) -> Result:
    """Return the row of a regression with its KL to the reference, where both have
    covariances. A reference that does not run is named in the row's note."""
    wanted, seed = task.reference, row.seed
    if wanted is None or method.kind is not Kind.LAPLACE or not task.is_regression:
        return row
    if seed not in references:
        try:
            if (wanted.kwargs, wanted.tune) == (method.kwargs, method.tune):
                references[seed] = test
            else:
                fitted = _fitted_methods(task, wanted, seed)("")
                references[seed] = _predict(task, fitted, task.test, seed)
        except Exception as error:
            references[seed] = f"no KL: {wanted.name} {describe_error(error)}"
    reference = references[seed]
    if isinstance(reference, str):
        return replace(row, note=f"{row.note}; {reference}".strip("; "))
    parts = (test.values, test.covariance, reference.values, reference.covariance)
    kl = metrics.gaussian_kl(*(cast(Any, part).double() for part in parts))
    return replace(row, metrics={**row.metrics, "kl_to_lla": kl})
