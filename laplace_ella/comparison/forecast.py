"""How long fits and predictions of a model will take, from a few of its inputs.

What a fit does is counted: M gradients, the eigenvectors of their Gram matrix, features
of N inputs. What each of these costs is measured on a few inputs, with few directions,
and by small products of matrices; the rest is multiplication.

Index legend: N data, C outputs, P parameters, M Nyström samples, K rank, B batch.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella.comparison.memory import Problem
from laplace_ella.comparison.settings import Settings
from laplace_ella.posterior.basis import SVD_LIMIT, RowSketch, few_are_wanted
from laplace_ella.support import batches
from laplace_ella.support.span import Sketch

__all__ = [
    "RANKS",
    "Forecast",
    "Inputs",
    "Line",
    "Way",
    "choose",
    "forecast",
    "measure_way",
    "seconds",
]

#: Ranks at which features are timed; cost is a straight line through them.
FEW, MORE = 2, 8

#: Seconds that one measurement may take before fewer inputs have to do.
PATIENCE = 0.2

#: Inputs and gradients that are measured at most.
AT_MOST = 64

#: Ranks that are looked at where the exact posterior is out of reach, largest first.
RANKS = (512, 128, 20)

#: Rows of the matrices on which linear algebra is timed.
FEW_ROWS = 256

#: Products with all rows that a few directions take, by the block Davidson method: of
#: J̃J̃ᵀ with K vectors, and a sketch that takes as long as one.
DAVIDSON_PRODUCTS = 6

#: Gradients of pairs that were not sampled, which a regression looks at.
FEW_OTHERS = 256


# --- a few inputs --------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """A batch of the training data, of which some or all examples are used."""

    batch: Any
    settings: Settings

    @property
    def size(self) -> int:
        x, _ = batches.split_batch(self.batch, self.settings.dict_key_y)
        return batches.batch_size(x, self.settings.dict_key_x)

    def in_double(self) -> Inputs:
        """The same with all floating-point numbers in float64."""

        def double(t: torch.Tensor) -> torch.Tensor:
            return t.double() if t.is_floating_point() else t

        return Inputs(batches.map_tensors(double, self.batch), self.settings)

    def pick(self, index: slice | torch.Tensor) -> Any:
        """A batch of the examples `index`."""
        x, y = batches.split_batch(self.batch, self.settings.dict_key_y)
        some = batches.take(x, index, self.size)
        return some if isinstance(self.batch, Mapping) else (some, y[index])

    def x(self, n: int, device: torch.device) -> Any:
        """The inputs of the first `n` examples."""
        some = self.pick(slice(0, n))
        x, _ = batches.split_batch(some, self.settings.dict_key_y)
        return batches.to_device(x, device)

    def loader(self, n: int) -> DataLoader:
        """A loader of one batch, the first `n` examples."""
        return DataLoader(
            TensorDataset(torch.arange(n)),
            batch_size=n,
            collate_fn=lambda items: self.pick(torch.stack([i for (i,) in items])),
        )


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The shortest of a few times, after a first call that decides how it is done."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    times = [once()]
    while len(times) < 3 and sum(times) < PATIENCE:
        times.append(once())
    return min(times)


# --- what derivatives cost -----------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Seconds that grow with the number of directions."""

    start: float
    slope: float

    @classmethod
    def through(cls, low: tuple[int, float], high: tuple[int, float]) -> Line:
        """By two measurements, (directions, seconds); never negative."""
        (k, t), (more, u) = low, high
        slope = max(0.0, (u - t) / (more - k)) if more > k else 0.0
        return cls(max(0.0, t - k * slope), slope)


@dataclass(frozen=True)
class Way:
    """Seconds of one way to compute features.

    Attributes
    ----------
    features, predicting : Line
        of φ(x), and of a whole prediction, per input
    rows : float
        of one sampled gradient
    by_product : bool
        the Jacobian is formed, and multiplied by all directions: what these cost is
        that product, and the lines are flat
    dtype : torch.dtype
        of the derivatives
    """

    features: Line
    predicting: Line
    rows: float
    by_product: bool
    dtype: torch.dtype

    def seconds(self, line: Line, rank: int, product: float) -> float:
        """Of `rank` directions, whose product with a Jacobian takes `product`."""
        return line.start + (product if self.by_product else rank * line.slope)


def measure_way(
    build: Callable[..., Any], inputs: Inputs, n_outputs: int, by_product: bool
) -> Way:
    """Time fits and predictions with few directions on a few inputs.

    Parameters
    ----------
    build : callable
        keyword arguments → an `ELLALaplace` that is not fitted
    inputs : Inputs
    n_outputs : int
        C, or S·C
    by_product : bool
        whether directions cost a product alone, as in reverse mode
    """
    weights = next(build().model.parameters())
    device, dtype = weights.device, weights.dtype

    def fitted(n: int, rank: int) -> Any:
        la = build(subsample_size=rank, n_eigenvalues=rank)
        la.fit(inputs.loader(n))
        return la

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few inputs have few directions
        # As many inputs as have the directions, and more where one is quick.
        least = min(inputs.size, -(-MORE // n_outputs))
        la = fitted(least, FEW)
        one = inputs.x(1, device)
        quick = int(PATIENCE / seconds(lambda: la(one), device))
        n = max(least, min(inputs.size, quick, AT_MOST))
        x = inputs.x(n, device)

        def timed(rank: int) -> tuple[tuple[int, float], tuple[int, float]]:
            la = fitted(n, rank)
            features = seconds(lambda: la.features(x), device) / n
            predicting = seconds(lambda: la(x), device) / n
            return (la.rank, features), (la.rank, predicting)

        few, more = timed(FEW), timed(FEW if by_product else MORE)
        rows = _row_seconds(build, inputs, n, n_outputs, device)
    features, predicting = (Line.through(few[i], more[i]) for i in (0, 1))
    return Way(features, predicting, rows, by_product, dtype)


def _row_seconds(
    build: Callable[..., Any],
    inputs: Inputs,
    n: int,
    n_outputs: int,
    device: torch.device,
) -> float:
    """Seconds of a sampled gradient: the slope over their number."""
    many = min(n * n_outputs, AT_MOST)

    def of(m: int) -> float:
        la = build(subsample_size=m, n_eigenvalues=1)
        return seconds(lambda: la.fit_basis(inputs.loader(n)), device)

    if many == 1:
        return of(1)
    return max(0.0, (of(many) - of(1)) / (many - 1))


# --- what matrices cost --------------------------------------------------------------


def product_seconds(
    m: int, k: int, n: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Seconds of (m, k) @ (k, n), from a product of the same kind and less work."""
    sizes = [m, k, n]
    while math.prod(sizes) > 2**27:
        largest = sizes.index(max(sizes))
        sizes[largest] = max(1, sizes[largest] // 2)
    a = torch.ones(sizes[0], sizes[1], dtype=dtype, device=device)
    b = torch.ones(sizes[2], sizes[1], dtype=dtype, device=device)
    share = m * k * n / math.prod(sizes)
    return share * seconds(lambda: a @ b.T, device)


def basis_seconds(
    n_rows: int,
    n_params: int,
    rank: int | None,
    accurate: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Seconds in which gradients `(M, P)` become a basis.

    That of fewer rows and parameters is timed. With both s times as many, all of it,
    M²P for products and M³ for eigenvectors, is s³ times as much. Where only a few
    directions are wanted, products with all rows are.
    """
    if rank and not accurate and few_are_wanted(n_rows, n_params, rank, dtype):
        product = product_seconds(rank, n_rows, n_params, dtype, device)
        return (2 * DAVIDSON_PRODUCTS + 1) * product
    size = n_rows * n_params
    # Not so few that another way of computing it would be taken.
    least = SVD_LIMIT + 1 if size > SVD_LIMIT else 1
    scale = max(1.0, min(n_rows / FEW_ROWS, math.sqrt(size / least)))
    m, p = max(2, round(n_rows / scale)), max(2, round(n_params / scale))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(m, p, generator=generator).to(device, dtype)
    k = None if rank is None else max(1, round(rank / scale))

    def once() -> None:
        sketch = RowSketch((p,), m + 1, m, dtype, device)
        sketch.add(rows)
        sketch.basis(k, accurate)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return n_rows * n_params * n_rows / (m * p * m) * seconds(once, device)


# --- the forecast --------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """What a choice of n_eigenvalues takes.

    Attributes
    ----------
    n_eigenvalues : int or "exact"
    memory : int
        bytes of the fit
    fits : bool
        whether that is within the budget
    fit_seconds, predict_seconds : float
        of the whole fit; of the prediction for one input
    """

    n_eigenvalues: int | str
    memory: int
    fits: bool
    fit_seconds: float
    predict_seconds: float

    @property
    def longest(self) -> float:
        """Seconds of the fit, or of a thousand predictions if they take longer."""
        return max(self.fit_seconds, 1000 * self.predict_seconds)


def forecast(
    n_eigenvalues: int | str,
    ways: Sequence[Way],
    problem: Problem,
    n_samples: int,
    is_regression: bool,
    device: torch.device,
    load_seconds: float = 0.0,
) -> tuple[float, float]:
    """Seconds of a fit and of the prediction for one input.

    Parameters
    ----------
    n_eigenvalues : int or "exact"
    ways : sequence of Way
        of computing features, in one dtype; the fastest counts
    problem : Problem
    n_samples : int
        M; of an exact fit all N·C pairs
    is_regression : bool
        whose gradients are the curvature's own, so that their spectrum is used whole
    device : torch.device
    load_seconds : float
        to read one example, once for its gradient and once for its features
    """
    N, P, C, B = problem.n_data, problem.n_params, problem.n_outputs, problem.batch
    exact = n_eigenvalues == "exact"
    M = N * C if exact else min(n_samples, N * C)
    K = min(M, P) if exact else min(int(n_eigenvalues), M)
    dtype = ways[0].dtype
    basis = basis_seconds(M, P, None if exact else K, is_regression, dtype, device)
    n_rows = M
    if is_regression and not exact:  # the span of all sampled gradients, and of others
        groups = Sketch.size_for(P, M)
        basis += basis_seconds(M, groups, None, True, dtype, device)
        n_rows += min(FEW_OTHERS, N * C - M)
    # J(x)V of every input where J is formed; φᵀΛφ; φ times the root of the covariance
    product = product_seconds(C * B, P, K, dtype, device) / B
    curvature = product_seconds(K, C * B, K, torch.float64, device) / B
    root = product_seconds(C * B, K, K, torch.float64, device) / B
    features = min(way.seconds(way.features, K, product) for way in ways)
    predicting = min(way.seconds(way.predicting, K, product) for way in ways)
    rows = min(way.rows for way in ways)
    reading = (N + min(N, M)) * load_seconds
    fit = reading + n_rows * rows + basis + N * (features + curvature)
    return fit, predicting + root


def choose(found: list[Forecast], time_budget: float) -> Forecast | None:
    """The first within memory and time; else the fastest that fits into memory at all.

    The time is that of a fit, or of a thousand predictions.
    """
    fitting = [f for f in found if f.fits]
    within = (f for f in fitting if f.longest <= time_budget)
    fastest = min(fitting, key=lambda f: f.longest, default=None)
    return next(within, fastest)
