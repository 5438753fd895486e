"""The demonstration: two small experiments on embedded data, with figures.

`python -m laplace_ella demo` runs both; it needs the extra `laplace-ella[demo]`.

1. Regression: the paper's 1-D example (Deng et al. 2022, Sec. 5.3), each member of
   the Laplace family next to exact linearised Laplace.
2. Classification: scikit-learn's 8×8 digits, a small network with BatchNorm, two
   out-of-distribution sets, and the table of `compare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import metrics, plotting
from laplace_ella.comparison.compare import compare
from laplace_ella.comparison.loaders import reproducible
from laplace_ella.comparison.report import Report

if TYPE_CHECKING:
    import os

__all__ = [
    "Digits",
    "RegressionProblem",
    "compare_on_digits",
    "load_digits_problem",
    "make_regression_problem",
    "run_classification_demo",
    "run_regression_demo",
]

Printer = Callable[[str], None]

# --- 1-D regression ------------------------------------------------------------------

#: Standard deviation of the noise in y = sin 2x + ε.
NOISE = 0.2
PRIOR_PRECISION = 1.0

#: Title in the figure → keyword arguments of `Laplace(model, "regression", ...)`.
REGRESSION_METHODS: dict[str, dict[str, Any]] = {
    "laplace-torch's full": {"subset_of_weights": "all", "hessian_structure": "full"},
    "exact": {
        "subset_of_weights": "all",
        "hessian_structure": "nystrom",
        "n_eigenvalues": "exact",
    },
    "KFAC": {"subset_of_weights": "all", "hessian_structure": "kron"},
    "last layer": {"subset_of_weights": "last_layer", "hessian_structure": "full"},
    "ELLA as in the paper (K = 5)": {
        "subset_of_weights": "all",
        "hessian_structure": "nystrom",
        "subsample_size": 16,
        "n_eigenvalues": 5,
        "complement": "drop",
    },
    "ELLA (K = 5), complement kept": {
        "subset_of_weights": "all",
        "hessian_structure": "nystrom",
        "subsample_size": 16,
        "n_eigenvalues": 5,
        "complement": "prior",
    },
    "ELLA (K = 5), complement matched": {
        "subset_of_weights": "all",
        "hessian_structure": "nystrom",
        "subsample_size": 16,
        "n_eigenvalues": 5,
        "complement": "matched",
    },
    "diagonal": {"subset_of_weights": "all", "hessian_structure": "diag"},
}

#: What the others are compared with.
REFERENCE = "laplace-torch's full"


@contextmanager
def _one_thread() -> Iterator[None]:
    """These tensors are tiny: threads would wait for each other more than compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class RegressionProblem:
    """A trained network and its data: x, y `(16, 1)`, grid `(200, 1)`."""

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    grid: torch.Tensor

    @property
    def truth(self) -> torch.Tensor:
        return torch.sin(2 * self.grid)


def make_regression_problem(seed: int = 0) -> RegressionProblem:
    """16 data with a gap in the middle and an MLP at its MAP estimate.

    Three hidden layers of 32 tanh units, 1,000 Adam steps on the negative log
    posterior, with the noise and the prior that the Laplace approximations use too.
    """
    with reproducible(seed, torch.device("cpu")):
        x = torch.cat([-2.6 + 1.6 * torch.rand(8, 1), 1.0 + 1.6 * torch.rand(8, 1)])
        y = torch.sin(2 * x) + NOISE * torch.randn_like(x)
        sizes = (1, 32, 32, 32)
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.Tanh()]
        model = nn.Sequential(*layers, nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(1000):
            optimizer.zero_grad()
            squares = (model(x) - y).square().sum() / (2 * NOISE**2)
            weights = sum(p.square().sum() for p in model.parameters())
            (squares + PRIOR_PRECISION / 2 * weights).backward()
            optimizer.step()
    return RegressionProblem(
        model.eval(), x, y, torch.linspace(-4.0, 4.0, 200).unsqueeze(1)
    )


@_one_thread()
def run_regression_demo(
    out: str | os.PathLike[str], echo: Printer = print
) -> dict[str, float]:
    """Draw the paper's Fig. 1 and print each method's KL to exact LLA (its Table 7).

    Returns
    -------
    dict of str to float
        title of the method → mean over the grid of KL(method ‖ exact LLA)
    """
    plt = _pyplot()
    problem = make_regression_problem()
    predictives = {
        name: _regression_predictive(problem, kwargs)
        for name, kwargs in REGRESSION_METHODS.items()
    }
    reference = predictives[REFERENCE]
    kls = {
        name: metrics.gaussian_kl(*predictive, *reference)
        for name, predictive in predictives.items()
        if name != REFERENCE
    }
    echo(
        "1-D regression, y = sin 2x + ε, 16 data: KL to exact linearised Laplace,\n"
        "averaged over 200 inputs in [-4, 4]; noise and prior are the same for all"
    )
    for name, kl in kls.items():
        echo(f"  {name:<33} {kl:7.3f}")
    rows = [f"| {name} | {kl:.3f} |" for name, kl in kls.items()]
    table = ["| method | KL to exact linearised Laplace |", "|---|---:|", *rows]
    _write(out, "regression.md", "\n".join(table), echo)

    figure, axes = plt.subplots(
        3, 3, figsize=(10, 7), sharex=True, sharey=True, layout="constrained"
    )
    for ax, (name, (mean, covariance)) in zip(
        axes.flat, predictives.items(), strict=False
    ):
        title = name if name not in kls else f"{name}\nKL to exact {kls[name]:.2f}"
        plotting.plot_regression(
            problem.grid,
            mean,
            covariance.flatten().clamp_min(0.0).sqrt(),
            ax,
            train=(problem.x, problem.y),
            truth=problem.truth,
        )
        ax.set_title(title, fontsize="medium")
        ax.label_outer()
    axes[0, 0].set_ylim(-4.2, 4.2)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[-1, -1].axis("off")
    axes[-1, -1].legend(handles, labels, frameon=False, loc="center")
    _save(figure, out, "regression.png", echo)
    plt.close(figure)
    return kls


def _regression_predictive(
    problem: RegressionProblem, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (N, 1) and covariance (N, 1, 1) of the function values on the grid."""
    from laplace import Laplace

    loader = DataLoader(TensorDataset(problem.x, problem.y), batch_size=16)
    la = Laplace(
        deepcopy(problem.model),
        "regression",
        sigma_noise=NOISE,
        prior_precision=PRIOR_PRECISION,
        **kwargs,
    )
    la.fit(loader)
    f_mu, f_var = la(problem.grid, pred_type="glm")
    return f_mu, f_var


# --- digits --------------------------------------------------------------------------

#: Classes that the network is trained on; the others are out-of-distribution data.
SEEN = tuple(range(8))

#: Standard deviation of the noise on the images, whose pixels lie in [0, 1].
PIXEL_NOISE = 0.35

CLASSIFICATION_METHODS = (
    "map",
    "temperature",
    "exact",
    "ella",
    "ella-calibrated",
    "kron",
    "diag",
    "diag-calibrated",
    "last-layer-full",
    "last-layer-full-calibrated",
    "gp-ella",
)

LINKS = ("mc", "probit")

#: The report as a page, in the folder of the figures.
PAGE = "report.html"

#: Columns of the short table.
SHORT = ("nll", "nll_to_best", "ece", "brier", "auroc:digits 8, 9")


@dataclass(frozen=True)
class Digits:
    """A trained network and its loaders."""

    model: nn.Module
    train: DataLoader
    val: DataLoader
    test: DataLoader
    ood: dict[str, DataLoader]
    weight_decay: float


def load_digits_problem(seed: int = 0) -> Digits:
    """Noisy digits 0–7 and a small CNN with BatchNorm, trained on 300 in seconds.

    Gaussian noise is added to all images once, since on the clean ones even the plain
    network is calibrated and there is nothing to compare.

    Out-of-distribution data, with the same noise, are the digits 8 and 9, which the
    network has never seen ('digits 8, 9'), and 8×8 patches of scikit-learn's two
    photographs ('photos').
    """
    x, y = _digits()
    photos = _photo_patches(300, seed)
    seen = torch.isin(y, torch.tensor(SEEN))
    with reproducible(seed, torch.device("cpu")):
        x = x + PIXEL_NOISE * torch.randn_like(x)
        photos = photos + PIXEL_NOISE * torch.randn_like(photos)
        order = torch.randperm(int(seen.sum()))
        inside, labels = x[seen][order], y[seen][order]
        cut = (0, 300, 500, len(inside))
        train, val, test = (
            TensorDataset(inside[a:b], labels[a:b]) for a, b in pairwise(cut)
        )
        weight_decay = 1e-3
        x_train, y_train = train.tensors
        model = _trained(_small_cnn(len(SEEN)), x_train, y_train, weight_decay)

    def loader(data: Any) -> DataLoader:
        return DataLoader(data, batch_size=50)

    return Digits(
        model,
        DataLoader(train, batch_size=50, shuffle=True),
        loader(val),
        loader(test),
        {
            "digits 8, 9": loader(TensorDataset(x[~seen])),
            "photos": loader(TensorDataset(photos)),
        },
        weight_decay,
    )


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) in [0, 1] and labels, from scikit-learn."""
    data = _sklearn_datasets().load_digits()
    x = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return x, torch.as_tensor(data.target)


def _photo_patches(n: int, seed: int) -> torch.Tensor:
    """Grey 8×8 patches `(n, 1, 8, 8)` of two photographs, stretched to [0, 1]."""
    photos = [
        torch.tensor(photo, dtype=torch.float32).mean(-1) / 255
        for photo in _sklearn_datasets().load_sample_images().images
    ]
    # Halved four times, so that a patch shows a part of the scene and not a flat spot.
    small = [nn.functional.avg_pool2d(p[None, None], 8)[0, 0] for p in photos]
    generator = torch.Generator().manual_seed(seed)
    patches = []
    for i in range(n):
        photo = small[i % len(small)]
        top, left = (
            int(torch.randint(0, side - 7, (), generator=generator))
            for side in photo.shape
        )
        patch = photo[top : top + 8, left : left + 8]
        patches.append((patch - patch.min()) / (patch.max() - patch.min() + 1e-6))
    return torch.stack(patches).unsqueeze(1)


def _small_cnn(n_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, n_classes),
    )


def _trained(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, weight_decay: float
) -> nn.Module:
    """SGD on the mean cross-entropy plus γ/2‖θ‖²."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=weight_decay
    )
    n_epochs = 40
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_epochs)
    for _ in range(n_epochs):
        for part in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def compare_on_digits(
    problem: Digits,
    methods: Sequence[str],
    links: Sequence[str],
    progress_bar: bool = False,
) -> Report:
    """`compare` with the settings of the demo."""
    from laplace_ella import prior_precision_from_weight_decay

    n_train = _n_examples(problem.train)
    return compare(
        problem.model,
        "classification",
        problem.train,
        problem.test,
        problem.val,
        problem.ood,
        methods,
        links=links,
        tune="gridsearch",
        grid_size=17,  # half decades
        prior_precision=prior_precision_from_weight_decay(
            problem.weight_decay, n_train
        ),
        progress_bar=progress_bar,
    )


@_one_thread()
def run_classification_demo(
    out: str | os.PathLike[str], echo: Printer = print, progress_bar: bool = True
) -> Report:
    """Compare the methods on the digits, print the tables and draw the figures."""
    plt = _pyplot()
    problem = load_digits_problem()
    n_train, n_val, n_test = (
        _n_examples(loader) for loader in (problem.train, problem.val, problem.test)
    )
    echo(
        f"Digits 0–7 with pixel noise {PIXEL_NOISE}; CNN with BatchNorm, "
        f"{_count(problem.model)} parameters;\n"
        f"{n_train} training, {n_val} validation, {n_test} test images.\n"
        "OOD: the unseen digits 8 and 9; 8×8 patches of two photographs."
    )
    report = compare_on_digits(problem, CLASSIFICATION_METHODS, LINKS, progress_bar)
    echo(str(report))
    _draw_classification(plt, report, out, echo)
    _write(out, "classification.md", report.to_markdown(), echo)
    if not report.interrupted:
        short = report.to_markdown(SHORT)
        _write(out, "classification_short.md", short, echo)
    report.save(Path(out) / "classification.json")
    echo(f"wrote {Path(out) / 'classification.json'}")
    page = report.to_html(Path(out) / PAGE, "Methods on noisy digits")
    echo(f"wrote {page}")
    return report


def _draw_classification(plt: Any, report: Report, out: Any, echo: Printer) -> None:
    shown = (
        "map",
        "temperature",
        "ella",
        "ella-calibrated",
        "diag-calibrated",
        "last-layer-full-calibrated",
    )
    few = Report([r for r in report if r.method in shown], report.likelihood)

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    plotting.plot_reliability(few, axes[0], link="mc", min_count=20)
    plotting.plot_error_versus_confidence(
        few, axes[1], link="mc", ood="digits 8, 9", side="above"
    )
    axes[0].get_legend().remove()  # the same lines as on the right
    axes[0].set_title("Calibration on the test set")
    axes[1].set_title("Errors on test set and unseen digits together")
    _save(figure, out, "calibration.png", echo)
    plt.close(figure)

    figure, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
    plotting.plot_cost_quality(report, ax, link="mc")
    ax.set_title("Quality against prediction time")
    _save(figure, out, "cost.png", echo)
    plt.close(figure)


def _n_examples(loader: DataLoader) -> int:
    assert isinstance(loader.dataset, TensorDataset)
    return len(loader.dataset)


def _count(model: nn.Module) -> str:
    return f"{sum(math.prod(p.shape) for p in model.parameters()):,}"


def _write(out: Any, name: str, text: str, echo: Printer) -> None:
    """A table in the folder of the demo, as Markdown."""
    path = Path(out) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    echo(f"wrote {path}")


def _save(figure: Any, out: Any, name: str, echo: Printer) -> None:
    path = Path(out) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    echo(f"wrote {path}")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            'The demo draws figures: pip install "laplace-ella[demo]"'
        ) from error
    # Files only: a demo must also run where there is no display.
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _sklearn_datasets() -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            'The demo uses scikit-learn\'s data: pip install "laplace-ella[demo]"'
        ) from error
    return datasets
