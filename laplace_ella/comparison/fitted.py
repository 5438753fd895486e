"""Fit one method on a copy of the network, and tune it for each link.

Index legend: N data, C outputs, B batch, S positions.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from laplace import Laplace
from torch import nn

from laplace_ella.comparison import grid_search
from laplace_ella.comparison.methods import PLAIN, Method, Sizes
from laplace_ella.derivatives.modes import ComputeOptions
from laplace_ella.fitting.early_stopping import EarlyStopping
from laplace_ella.posterior.observation import FunctionValues, class_probabilities
from laplace_ella.support import batches
from laplace_ella.support.batches import OutputLayout
from laplace_ella.support.memory import human_bytes
from laplace_ella.support.preserve import random_states, seeded_iteration
from laplace_ella.tuning.temperature import temperature_scaling

#: Exponents of the prior precisions of every grid search, laplace-torch's own.
PRIOR_RANGE = (-4, 4)

#: What a search may choose.
SETTINGS = ("softmax_temperature", "temperature", "sigma_noise", "prior_precision")


class NotRun(Exception):
    """A method that was not tried; the message is the status of its row."""


@dataclass(frozen=True)
class Task:
    """The network, the data, and what all methods have in common: the arguments of
    `compare`.

    A regression starts from `noise`, and keeps it if it is `fixed_noise`; a method may
    need `limit` bytes.
    """

    model: nn.Module
    likelihood: str
    train: Any
    test: Any
    val: Any
    ood: dict[str, Any]
    sizes: Sizes
    layout: OutputLayout
    n_samples: int
    prior_precision: float
    noise: float
    fixed_noise: bool
    grid_size: int
    n_steps: int
    reference: Method | None
    limit: int
    dict_key_x: str
    dict_key_y: str

    @property
    def is_regression(self) -> bool:
        return self.likelihood == "regression"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return outputs in the model's layout as rows `(B·S, C)`."""
        return self.layout.of(outputs.shape[1:]).rows(outputs.flatten(1))

    def targets(self, y: torch.Tensor) -> torch.Tensor:
        """Return classes `(B·S,)`, or regression targets `(B·S, C)`."""
        return self.rows(y) if self.is_regression else y.flatten()


class Fitted(NamedTuple):
    """A method that is ready to predict with the link that it was tuned for.

    `predict` maps inputs to probabilities or means in the shape of the model's output;
    posteriors of a regression return means and covariances `(B, ..., C, C)` without
    noise. `row` has fields of the `Result`: costs, settings and notes.
    """

    predict: Callable[[Any], Any]
    batch: int
    noise: torch.Tensor
    row: dict[str, Any]


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


def split(batch: Any, dict_key_y: str) -> tuple[Any, Any]:
    """Return inputs and targets of a batch; None for targets where there are none."""
    if isinstance(batch, torch.Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0], None
    if isinstance(batch, Mapping) and dict_key_y not in batch:
        return batch, None
    return batches.split_batch(batch, dict_key_y)


def parts(task: Task, loader: Any, size: int) -> Iterator[tuple[Any, Any]]:
    """Yield inputs and targets on the device, of at most `size` examples at once, the
    same in every pass."""
    for batch in seeded_iteration(loader):
        x, y = batches.to_device(split(batch, task.dict_key_y), task.device)
        n = batches.batch_size(x, task.dict_key_x)
        for part in batches.chunks(n, size):
            yield batches.take(x, part, n), None if y is None else y[part]


class SmallBatches:
    """Parts of the training data as laplace-torch expects them: N is the length of a
    data set, and mappings have their targets in them."""

    def __init__(self, task: Task, size: int) -> None:
        self.task, self.size, self.dataset = task, size, range(task.sizes.n_data)

    def __iter__(self) -> Iterator[Any]:
        for x, y in parts(self.task, self.task.train, self.size):
            yield x if isinstance(x, Mapping) else (x, y)


def clock(device: torch.device) -> float:
    """Return seconds, when all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# Methods


def fit_method(task: Task, method: Method, seed: int) -> Callable[[str], Fitted]:
    """Fit a method on a copy of the model; return what tunes it for a link."""
    if method.needs_validation and task.val is None:
        raise NotRun("skipped: needs a val_loader")
    if method.kind == "laplace":
        return Posterior(task, method, seed).tuned
    if method.kind == "temperature" and task.is_regression:
        raise NotRun("not supported: temperature scaling is for classification")
    fitted = fit_network(task, scaled=method.kind == "temperature")
    return lambda link: fitted


@torch.no_grad()
def fit_network(task: Task, scaled: bool) -> Fitted:
    """Return the network as it is, or with its logits divided by a number."""
    model, tau = copy.deepcopy(task.model), 1.0
    start, seconds, settings = clock(task.device), 0.0, {}
    if scaled:
        data = parts(task, task.val, task.sizes.batch)
        pairs = [(task.rows(model(x)), task.targets(y)) for x, y in data]
        f, y = (torch.cat(each) for each in zip(*pairs, strict=True))
        tau = temperature_scaling(f, y)
        seconds = clock(task.device) - start
        settings = {"softmax_temperature": tau, "tuning": "validation data"}
    elif task.is_regression and not task.fixed_noise:
        settings = {"sigma_noise": task.noise, "tuning": "training data"}
    settings["chosen"] = list(settings)[:1]
    class_dim = 1 if task.layout is OutputLayout.CHANNELS_FIRST else -1

    def predict(x: Any) -> torch.Tensor:
        f = model(x)
        return f if task.is_regression else torch.softmax(f / tau, class_dim)

    row = {"costs": {"fit_s": 0.0, "tune_s": seconds}, "settings": settings}
    return Fitted(predict, task.sizes.batch, torch.tensor(task.noise).double(), row)


class Posterior:
    """`Laplace(...)` of a method, fitted once and tuned for one link after the other.

    What does not depend on the link is done once: the fit (but for early stopping) and
    the passes over the validation data. The seconds of such work count for every link.
    """

    def __init__(self, task: Task, method: Method, seed: int) -> None:
        self.task, self.method, self.seed = task, method, seed
        self.ours, self.structure = method.is_ella, method.structure[1]
        if not self.ours and task.layout is not OutputLayout.FLAT:
            raise NotRun("not supported: outputs at many positions (only ELLA)")
        self.batch, needed = method.memory(task.sizes)
        if needed > task.limit:
            text = f"{human_bytes(needed)}, more than {human_bytes(task.limit)}"
            raise NotRun(f"skipped: needs {text}")
        self.note, self.left_out, self.shared_s = "", "", 0.0
        self.validation: Any = None
        if method.tune != "early_stopping":
            self.fit()

    def fit(self, **options: Any) -> None:
        """Fit to what of the model the structure and its backend support."""
        start, model = clock(self.task.device), copy.deepcopy(self.task.model)
        try:
            self.la = self.laplace(model, options)
        except Exception as error:
            model = copy.deepcopy(self.task.model)
            self.left_out = freeze_others(model)
            if not self.left_out or isinstance(error, MemoryError):
                raise
            self.la = self.laplace(model, options)
            self.note = (
                f"no posterior of the parameters of {self.left_out}, which this method "
                f"does not support ({type(error).__name__}: {error})"
            )
        self.fit_s, self.start = clock(self.task.device) - start, self.values()

    def laplace(self, model: nn.Module, options: dict[str, Any]) -> Any:
        """Return the fitted `Laplace`; sizes are capped by the number of data."""
        task, train, sizes = self.task, self.task.train, self.task.sizes
        names = ("prior_precision", "dict_key_x", "dict_key_y")
        kwargs: dict[str, Any] = {name: getattr(task, name) for name in names}
        if task.is_regression:
            kwargs["sigma_noise"] = task.noise
        if self.structure in ("nystrom", "gp"):
            kwargs["seed"] = self.seed
        kwargs |= self.method.kwargs
        if self.ours:
            budget = ComputeOptions(memory_budget=task.limit)
            kwargs = {"output_layout": task.layout, "compute": budget, **kwargs}
        elif self.structure == "gp":  # which draws examples by their index
            for name in {"n_subset", "subsample_size", "n_eigenvalues"} & kwargs.keys():
                kwargs[name] = min(kwargs[name], sizes.n_data)
        else:  # KFAC averages over a batch, so that it keeps those of the user
            size = sizes.batch if self.structure == "kron" else self.batch
            train = SmallBatches(task, size)
        la: Any = Laplace(model, task.likelihood, **kwargs)
        la.fit(train, **options)
        return la

    def values(self) -> dict[str, Any]:
        """Return the hyperparameters that searches change."""
        known = [name for name in SETTINGS if hasattr(self.la, name)]
        return {name: copy.copy(getattr(self.la, name)) for name in known}

    def set(self, values: dict[str, Any]) -> None:
        """Set hyperparameters, the prior last: with it laplace-torch forgets what it
        has factorised, with the temperature it does not."""
        for name in sorted(values, key=SETTINGS.index):
            setattr(self.la, name, values[name])

    def tuned(self, link: str) -> Fitted:
        """Return the posterior with the settings chosen for a link."""
        task, tune, tau = self.task, self.method.tune, 1.0
        options: dict[str, Any] = {}
        if link:
            options = {"link_approx": link, "n_samples": task.n_samples}
        if tune == "early_stopping":
            self.fit(val_loader=task.val, early_stopping=EarlyStopping(**options))
        start, shared = clock(task.device), self.shared_s
        if tune in ("default", "marglik"):
            self.set(self.start)
            self.tune_on_training(options)
        elif tune in ("gridsearch", "calibration"):
            tau = self.tune_on_validation(options)
        tune_s = shared + clock(task.device) - start
        row = {"settings": self.settings(tau), "note": self.note}
        row |= {"costs": {"fit_s": self.fit_s, "tune_s": tune_s}}
        row |= {"left_out": self.left_out}
        noise = torch.as_tensor(self.la.sigma_noise).detach().cpu().double()
        return Fitted(self.predictor(options, tau), self.batch, noise, row)

    def tune_on_training(self, options: dict[str, Any]) -> None:
        """Choose the prior, and the noise if it is not fixed, without other data."""
        task, la = self.task, self.la
        noisy = task.is_regression and not task.fixed_noise
        if noisy and self.ours:
            la.optimize_sigma_noise(n_steps=task.n_steps)
        elif noisy:  # as in laplace-torch's README, for want of a method
            logs = torch.tensor([task.noise, 1.0], device=task.device).log()
            optimizer = torch.optim.Adam([logs.requires_grad_()], lr=0.1)
            for _ in range(task.n_steps):
                optimizer.zero_grad()
                noise, prior = logs.exp()
                (-la.log_marginal_likelihood(prior, noise)).backward()
                optimizer.step()
            la.sigma_noise, la.prior_precision = logs.detach().exp()
        else:
            if not self.ours:
                pred_type = "gp" if self.structure == "gp" else "glm"
                options = {"pred_type": pred_type, "prior_structure": "scalar"}
            if self.method.tune == "marglik":
                options = {**options, "method": "marglik"}
            la.optimize_prior_precision(n_steps=task.n_steps, **options)

    def tune_on_validation(self, options: dict[str, Any]) -> float:
        """Search, after passes over the validation data that serve all links; return
        the softmax temperature of a posterior that has none of its own."""
        task, la, start = self.task, self.la, clock(self.task.device)
        calibrated = self.method.tune == "calibration"
        if self.validation is None:
            self.validation = la.cache_features(task.val) if self.ours else self.grid()
            self.shared_s = clock(task.device) - start
        self.set(self.start)
        if not self.ours:
            search = grid_search.calibrate if calibrated else grid_search.search_prior
            found = search(self.validation, options.get("link_approx", "probit"))
            tau = found.pop("softmax_temperature", 1.0)
            self.set(found)
            return tau
        if calibrated:
            la.optimize_calibration(self.validation, **options)
        else:
            names = ("log_prior_prec_min", "log_prior_prec_max", "grid_size")
            grid = zip(names, (*PRIOR_RANGE, task.grid_size), strict=True)
            options = {**options, **dict(grid), "val_loader": self.validation}
            la.optimize_prior_precision(method="gridsearch", **options)
        return 1.0

    def grid(self) -> grid_search.GridValidator:
        """Return the validation losses of a posterior of laplace-torch."""
        task = self.task
        functional = self.method.kwargs.get("functional_approximation", "sod")
        if self.structure == "gp" and functional != "nystrom":
            raise NotRun("not supported: its function values do not follow its prior")
        grid = torch.logspace(*PRIOR_RANGE, task.grid_size, dtype=torch.float64)
        data = parts(task, task.val, self.batch)
        rest = grid.tolist(), task.n_samples, self.seed
        return grid_search.compute_grid(self.la, data, *rest)

    def predictor(self, options: dict[str, Any], tau: float) -> Callable[[Any], Any]:
        """Return what predicts, with logits divided by τ; also by the links that
        laplace-torch does not have."""
        la, link = self.la, options.get("link_approx", "")

        def by_moments(x: Any) -> torch.Tensor:
            mean, covariance = grid_search.moments(la, x)
            f = FunctionValues(mean, mean.new_zeros(*mean.shape, 0), covariance)
            return class_probabilities(f.divided_by(tau), link, self.task.n_samples)

        if link and (tau != 1.0 or (link == "probit_centered" and not self.ours)):
            return by_moments
        if self.structure == "gp":
            options = {**options, "pred_type": "gp"}
        return partial(la, **options)

    def settings(self, tau: float) -> dict[str, Any]:
        """Return the hyperparameters, which of them were chosen, and on what data."""
        tune, n_data = self.method.tune, self.task.sizes.n_data
        start = {"softmax_temperature": 1.0, **self.start, "n_data": n_data}
        found = {"softmax_temperature": tau, **self.values(), "n_data": self.la.n_data}
        certain = {"early_stopping": "n_data", "none": ""}.get(tune, "prior_precision")
        for name, old in start.items():
            start[name], found[name] = (
                float(torch.as_tensor(v).double().mean()) for v in (old, found[name])
            )
        chosen = [k for k in found if found[k] != start[k] or k == certain]
        where = "validation" if self.method.needs_validation else "training"
        return {"tuning": f"{where} data", "chosen": chosen, **found}


def freeze_others(model: nn.Module) -> str:
    """Leave parameters to linear and convolutional layers alone; return the types of
    the others, '' where nothing or everything would be left out."""
    plain = [module for module in model.modules() if isinstance(module, PLAIN)]
    kept = {id(p) for module in plain for p in module.parameters()}
    types: dict[str, None] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.requires_grad and id(p) not in kept:
                types[type(module).__name__] = None
                p.requires_grad_(False)
    left = any(p.requires_grad for p in model.parameters())
    return ", ".join(types) if left else ""
