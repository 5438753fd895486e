"""Fit one method on a copy of the network, and tune it for each link.

Index legend: N data, C outputs, B batch, S positions.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from laplace import Laplace
from torch import nn

from laplace_ella.comparison import grid_search
from laplace_ella.comparison.doctor import Sizes, batch_within, plain_layers
from laplace_ella.comparison.methods import Method
from laplace_ella.derivatives.modes import ComputeOptions
from laplace_ella.fitting.early_stopping import EarlyStopping
from laplace_ella.posterior.observation import FunctionValues, class_probabilities
from laplace_ella.support import batches
from laplace_ella.support.batches import OutputLayout, split_batch
from laplace_ella.support.memory import human_bytes
from laplace_ella.support.preserve import random_states, seeded_iteration
from laplace_ella.tuning.temperature import temperature_scaling

#: Exponents of the prior precisions of every grid search, laplace-torch's own.
PRIOR_RANGE = (-4, 4)


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

    def on_validation(self, method: Method) -> bool:
        """Whether a method belongs to the rows that are tuned on validation data."""
        given = method.tune == "gridsearch" and self.val is None
        return method.needs_validation and not given


class Fitted(NamedTuple):
    """A method that is ready to predict with the link that it was tuned for.

    `predict` maps inputs to probabilities in the shape of the model's output, or for
    regression to means in that shape and covariances `(B, ..., C, C)` without noise.
    """

    predict: Callable[[Any], Any]
    batch: int
    noise: torch.Tensor
    fit_s: float
    tune_s: float
    settings: dict[str, Any]
    notes: Sequence[str] = ()
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


class SmallBatches:
    """The batches of a loader in parts of at most `size` examples, the same in every
    pass. laplace-torch takes N from the length of `dataset`."""

    def __init__(self, task: Task, loader: Any, size: int) -> None:
        self.loader, self.size, self.key = loader, size, task.dict_key_x
        self.dataset = range(task.sizes.n_data)

    def __iter__(self) -> Iterator[Any]:
        for batch in seeded_iteration(self.loader):
            x = batch if hasattr(batch, "keys") else batch[0]
            n = batches.batch_size(x, self.key)
            for part in batches.chunks(n, self.size):
                yield batches.take(batch, part, n) if n > self.size else batch


def validation_data(task: Task, size: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield inputs on the device and rows of targets."""
    for batch in SmallBatches(task, task.val, size):
        x, y = split_batch(batch, task.dict_key_y)
        yield batches.to_device(x, task.device), task.targets(y.to(task.device))


def clock(device: torch.device) -> float:
    """Return seconds, when all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# Methods


def fit_method(task: Task, method: Method, seed: int) -> Callable[[str], Fitted]:
    """Fit a method on a copy of the model; return what tunes it for a link."""
    if task.on_validation(method) and task.val is None:
        raise NotRun("skipped: needs a val_loader")
    if method.kind == "laplace":
        given = method.needs_validation and task.val is None
        return Posterior(task, method, "none" if given else method.tune, seed).tuned
    if method.kind == "temperature" and task.is_regression:
        raise NotRun("not supported: temperature scaling is for classification")
    fitted = fit_network(task, method.kind == "temperature")
    return lambda link: fitted


def fit_network(task: Task, scaled: bool) -> Fitted:
    """Return the network as it is, or with its logits divided by a number."""
    model, tau = copy.deepcopy(task.model).eval(), 1.0
    start, settings = clock(task.device), {}
    if scaled:
        with torch.no_grad():
            data = validation_data(task, task.sizes.batch)
            pairs = [(task.rows(model(x)), y) for x, y in data]
        f, y = (torch.cat(part) for part in zip(*pairs, strict=True))
        tau = temperature_scaling(f, y)
        settings = {"softmax_temperature": tau, "tuning": "validation data"}
    elif task.is_regression and not task.fixed_noise:
        settings = {"sigma_noise": task.noise, "tuning": "training data"}
    settings["chosen"] = list(settings)[:1]
    class_dim = 1 if task.layout is OutputLayout.CHANNELS_FIRST else -1

    def predict(x: Any) -> Any:
        f = model(x)
        if not task.is_regression:
            return torch.softmax(f / tau, class_dim)
        rows = task.rows(f)
        return f, f.new_zeros(*rows.shape, rows.shape[-1])

    seconds = scaled * (clock(task.device) - start)
    noise = torch.tensor(task.noise).double()
    return Fitted(predict, task.sizes.batch, noise, 0.0, seconds, settings)


class Posterior:
    """`Laplace(...)` of a method, fitted once and tuned for one link after the other.

    What does not depend on the link is done once: the fit (but for early stopping) and
    the passes over the validation data. The seconds of such work count for every link.
    """

    def __init__(self, task: Task, method: Method, tune: str, seed: int) -> None:
        self.task, self.method, self.tune, self.seed = task, method, tune, seed
        self.ours, self.structure = method.is_ella, method.structure[1]
        if tune in ("early_stopping", "temperature") and not self.ours:
            raise NotRun(f"not supported: {tune} is for 'nystrom' only")
        if not self.ours and task.layout is not OutputLayout.FLAT:
            raise NotRun("not supported: outputs at many positions (only ELLA)")
        self.batch, needed = batch_within(method, task.sizes, task.limit)
        if not self.batch:
            text = f"{human_bytes(needed)}, more than {human_bytes(task.limit)}"
            raise NotRun(f"skipped: needs {text}")
        self.notes = ["the prior precision is as given"] * (tune != method.tune)
        self.left_out, self.seen_s, self.validation = "", 0.0, None
        if tune != "early_stopping":
            self.fit({})

    # Fit

    def fit(self, options: dict[str, Any]) -> None:
        """Fit to what of the model the structure and its backend support."""
        start, model = clock(self.task.device), copy.deepcopy(self.task.model).eval()
        try:
            self.la = self.laplace(model, options)
        except Exception as error:
            model = copy.deepcopy(self.task.model).eval()
            self.left_out = freeze_others(model)
            if not self.left_out or isinstance(error, MemoryError):
                raise
            try:
                self.la = self.laplace(model, options)
            except Exception:
                raise error from None
            self.notes.append(
                f"no posterior of the parameters of {self.left_out}, which this method "
                f"does not support ({type(error).__name__}: {error})"
            )
        self.fit_s, self.start = clock(self.task.device) - start, self.values()

    def values(self) -> dict[str, Any]:
        """Return the hyperparameters that searches change."""
        names = ("softmax_temperature", "temperature", "sigma_noise", "prior_precision")
        known = [name for name in names if hasattr(self.la, name)]
        return {name: copy.copy(getattr(self.la, name)) for name in known}

    def laplace(self, model: nn.Module, options: dict[str, Any]) -> Any:
        """Return the fitted `Laplace`; sizes are capped by the number of data."""
        task, n_data = self.task, self.task.sizes.n_data
        names = ("prior_precision", "dict_key_x", "dict_key_y")
        kwargs: dict[str, Any] = {name: getattr(task, name) for name in names}
        if task.is_regression:
            kwargs["sigma_noise"] = task.noise
        if self.ours:
            budget = ComputeOptions(memory_budget=task.limit)
            kwargs |= {"output_layout": task.layout, "compute": budget}
        if self.structure in ("nystrom", "gp"):
            kwargs["seed"] = self.seed
        kwargs |= self.method.kwargs
        for name in ("n_subset", "subsample_size", "n_eigenvalues"):
            if self.structure == "gp" and name in kwargs:
                kwargs[name] = min(kwargs[name], n_data)
        la: Any = Laplace(model, task.likelihood, **kwargs)
        train = task.train
        if not self.ours and self.structure != "gp":  # which draws examples by index
            # KFAC averages over a batch, so that it keeps those of the user.
            size = task.sizes.batch if self.structure == "kron" else self.batch
            train = SmallBatches(task, train, size)
        la.fit(train, **options)
        return la

    # Tune

    def tuned(self, link: str) -> Fitted:
        """Return the posterior with the settings chosen for a link."""
        task, tau, options = self.task, 1.0, {}
        if link:
            options = {"link_approx": link, "n_samples": task.n_samples}
        if self.tune == "early_stopping":
            plan = EarlyStopping(**options)
            self.fit({"val_loader": task.val, "early_stopping": plan})
        start = clock(task.device)
        if self.tune in ("default", "marglik"):
            self.set(self.start)
            self.tune_by_training(options)
        elif self.tune not in ("none", "early_stopping"):
            if self.validation is None:
                self.validation = self.see_validation_data()
                self.seen_s = clock(task.device) - start
                start = clock(task.device)
            self.set(self.start)
            tau = (self.search_ella if self.ours else self.search_grid)(options)
        seconds = self.fit_s, self.seen_s + clock(task.device) - start
        noise = torch.as_tensor(self.la.sigma_noise).detach().cpu().double()
        last = self.settings(tau), self.notes, self.left_out
        predict = self.predictor(options, tau)
        return Fitted(predict, self.batch, noise, *seconds, *last)

    def set(self, values: dict[str, Any]) -> None:
        """Set hyperparameters, the prior last: with it laplace-torch forgets what it
        has factorised, with the temperature it does not."""
        for name in sorted(values, key="prior_precision".__eq__):
            setattr(self.la, name, values[name])

    def tune_by_training(self, options: dict[str, Any]) -> None:
        """Choose the prior, and the noise if it is not fixed, without other data."""
        task, la = self.task, self.la
        noisy = task.is_regression and not task.fixed_noise
        if noisy and self.ours:
            la.optimize_sigma_noise(n_steps=task.n_steps)
        elif noisy:  # as in laplace-torch's README, for want of a method
            logs = torch.tensor([1.0, task.noise], device=task.device).log()
            optimizer = torch.optim.Adam([logs.requires_grad_()], lr=0.1)
            for _ in range(task.n_steps):
                optimizer.zero_grad()
                (-la.log_marginal_likelihood(*logs.exp())).backward()
                optimizer.step()
            prior, noise = logs.detach().exp()
            self.set({"sigma_noise": noise, "prior_precision": prior})
        else:
            if not self.ours:
                pred_type = "gp" if self.structure == "gp" else "glm"
                options = {"pred_type": pred_type, "prior_structure": "scalar"}
            if self.tune == "marglik":
                options = {**options, "method": "marglik"}
            la.optimize_prior_precision(n_steps=task.n_steps, **options)
            note = (
                "one prior precision per parameter tensor was chosen; δ is their mean"
            )
            several = la.prior_precision.numel() > self.start["prior_precision"].numel()
            if several and note not in self.notes:
                self.notes.append(note)

    def see_validation_data(self) -> Any:
        """Make the passes over the validation data that serve all links."""
        task = self.task
        if self.ours:
            return self.la.cache_features(task.val)
        functional = self.method.kwargs.get("functional_approximation", "sod")
        if self.structure == "gp" and functional != "nystrom":
            raise NotRun("not supported: its function values do not follow its prior")
        grid = torch.logspace(*PRIOR_RANGE, task.grid_size, dtype=torch.float64)
        data, rest = validation_data(task, self.batch), (task.n_samples, self.seed)
        return grid_search.compute_grid(self.la, data, grid.tolist(), *rest)

    def search_ella(self, options: dict[str, Any]) -> float:
        """Let a posterior of this package search; τ is its own then, so return 1."""
        la, data = self.la, self.validation
        if self.tune == "temperature":
            la.optimize_temperature(data, tune_prior=True, **options)
        elif self.tune == "calibration":
            la.optimize_calibration(data, **options)
        else:
            names = ("log_prior_prec_min", "log_prior_prec_max", "grid_size")
            grid = dict(zip(names, (*PRIOR_RANGE, self.task.grid_size), strict=True))
            options = {**options, **grid, "val_loader": data}
            la.optimize_prior_precision(method="gridsearch", **options)
        return 1.0

    def search_grid(self, options: dict[str, Any]) -> float:
        """Set what a search on the grid finds for a posterior of laplace-torch, and
        return the softmax temperature."""
        values: Any = self.validation
        link = options.get("link_approx", "probit")
        if self.tune == "gridsearch":
            self.set({"prior_precision": grid_search.search_prior(values, link)})
            return 1.0
        found = grid_search.calibrate(values, link)
        if found.kept:
            return 1.0
        noise = {"sigma_noise": found.sigma_noise[0]} if found.sigma_noise else {}
        names = ("temperature", "prior_precision")
        self.set(noise | {name: getattr(found, name) for name in names})
        return found.softmax_temperature

    # Use

    def predictor(self, options: dict[str, Any], tau: float) -> Callable[[Any], Any]:
        """Return what predicts, with logits divided by τ; also by the links that
        laplace-torch does not have."""
        la, link = self.la, options.get("link_approx")

        def by_moments(x: Any) -> torch.Tensor:
            mean, covariance = grid_search.moments(la, x)
            f = FunctionValues(mean, mean.new_zeros(*mean.shape, 0), covariance)
            link = options["link_approx"]
            return class_probabilities(f.divided_by(tau), link, self.task.n_samples)

        foreign = link == "probit_centered" and not self.ours
        if link and (foreign or tau != 1.0):
            return by_moments
        if self.structure == "gp":
            options = {**options, "pred_type": "gp"}
        return lambda x: la(x, **options)

    def settings(self, tau: float) -> dict[str, Any]:
        """Return the hyperparameters, which of them were chosen, and on what data."""
        before = {"softmax_temperature": 1.0, "n_data": self.task.sizes.n_data}
        found = {**before, **self.values(), "n_data": self.la.n_data}
        early, none = self.tune == "early_stopping", self.tune == "none"
        certain = "n_data" if early else None if none else "prior_precision"
        chosen = []
        for name, value in found.items():
            start = {**before, **self.start}[name]
            old, new = (
                float(torch.as_tensor(v).double().mean()) for v in (start, value)
            )
            found[name] = new * tau if name == "softmax_temperature" else new
            changed = found[name] != old or name == certain
            chosen += [name] * changed
        where = "validation" if self.task.on_validation(self.method) else "training"
        return {"tuning": f"{where} data", "chosen": chosen, **found}


def freeze_others(model: nn.Module) -> str:
    """Leave parameters to linear and convolutional layers alone; return the types of
    the others, '' where nothing or everything would be left out."""
    kept = {id(p) for layer in plain_layers(model) for p in layer.parameters()}
    types: dict[str, None] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.requires_grad and id(p) not in kept:
                types[type(module).__name__] = None
                p.requires_grad_(False)
    left = any(p.requires_grad for p in model.parameters())
    return ", ".join(types) if left else ""
