"""What the benchmark measures: each task is one process, and returns one row."""

from __future__ import annotations

import math
import resource
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
from laplace import Laplace
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
import laplace_ella.metrics
from common.data import cifar10, imagenet_sample, read_images
from common.models import ScaledInput, cifar_resnet, imagenet_model
from common.runs import best_seconds, forward_seconds
from laplace_ella.derivatives.feature_passes import FeaturePasses
from laplace_ella.derivatives.features import FeatureMode
from laplace_ella.derivatives.folding import FoldFinder
from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.posterior.davidson import leading_eigenpairs
from laplace_ella.posterior.products import gram
from laplace_ella.support import heap

__all__ = [
    "COMPILED",
    "METHODS",
    "NETWORKS",
    "OPTIONS",
    "TASKS",
    "TOP",
    "forget_peak",
    "peak_bytes",
]

Task = Callable[[Namespace, dict[str, Any]], dict[str, Any]]


def once(work: Callable[[], object]) -> float:
    began = process_time()
    work()
    return process_time() - began


def loader(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


# Each side's classifier, by the same arguments


def ours(model: nn.Module, M: int, K: int, **kwargs: Any) -> laplace_ella.ELLALaplace:
    return Laplace(
        model,
        "classification",
        "all",
        "nystrom",
        subsample_size=M,
        n_eigenvalues=K,
        prior_precision=5.0,
        **kwargs,
    )


def theirs(model: nn.Module, M: int, K: int) -> Any:
    return Laplace(
        model,
        "classification",
        "all",
        "gp",
        functional_approximation="nystrom",
        subsample_size=M,
        n_eigenvalues=K,
        prior_precision=5.0,
    )


SIDES = {"ours": ours, "theirs": theirs}


# Tasks on the real ResNet-20


def resnet20(args: Namespace, n: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    images = cifar10(args.data_root, "train")[:n]
    x, y = images.x.clone(), images.y.clone()
    del images
    cifar10.cache_clear()
    forget_peak()
    return cifar_resnet("resnet20", args.data_root), x, y


def forget_peak() -> None:
    """What was read from files does not count for the peak of memory from here on."""
    with suppress(OSError):  # Linux has it
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The peak of resident memory since then, or of all."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Clock:
    """CPU seconds of a block, and those of them that the system took."""

    def __enter__(self) -> Clock:
        self._began = resource.getrusage(resource.RUSAGE_SELF)
        return self

    def __exit__(self, *_: object) -> None:
        now, began = resource.getrusage(resource.RUSAGE_SELF), self._began
        self.system = now.ru_stime - began.ru_stime
        self.seconds = now.ru_utime - began.ru_utime + self.system


def basis_row(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds per sampled gradient, without the decomposition that follows."""
    M = p["M"]
    model, x, y = resnet20(args, M)
    data = loader(x, y, p["batch"])
    la = SIDES[p["side"]](model, M, min(20, M))
    la.model.eval()
    if p["side"] == "ours":
        outputs = torch.nn.functional.one_hot(torch.arange(M) % 10, 10).float()
        rows = la.fitter.linearizer.row_chunks
        few = x[:64], torch.arange(min(64, M)), outputs[:64]
        _consume(rows(*few))  # finds out how, as at the start of a fit
        with Clock() as clock:
            _consume(rows(x, torch.arange(M), outputs))
    else:  # decomposes as well, a matrix of M×M; the first time gets the memory
        indices = la._indices(data, False)
        la._build_basis(data, indices)
        with Clock() as clock:
            la._build_basis(data, indices)
    return {
        "seconds": clock.seconds / M,
        "system": clock.system / M,
        "forward": forward_seconds(model, x[:64]),
    }


def basis(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds per sampled gradient of a whole basis: gradients of M images, their Gram
    matrix and its spectrum, and the directions."""
    model, x, y = resnet20(args, p["M"])
    data = loader(x, y, p["batch"])
    la = SIDES[p["side"]](model, p["M"], p["K"])
    la.model.eval()
    with Clock() as clock:
        if p["side"] == "ours":
            la.fit_basis(data)
        else:
            la._build_basis(data, la._indices(data, False))
    return {
        "seconds": clock.seconds / p["M"],
        "system": clock.system / p["M"],
        "forward": forward_seconds(model, x[:64]),
    }


def directions(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds of both ways from M gradients to the top K eigenvectors of their Gram
    matrix G, how well they solve Gu = λu, and how far the one is from the other."""
    M, K = p["M"], p["K"]
    model, x, _ = resnet20(args, M)
    la = ours(model, M, K)
    outputs = torch.nn.functional.one_hot(torch.arange(M) % 10, 10).float()
    with torch.no_grad():
        rows = la.fitter.linearizer.rows(x, torch.arange(M), outputs)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def by_davidson() -> None:
        pairs = leading_eigenpairs(rows, K)
        assert pairs is not None
        found["davidson"] = pairs

    def by_gram() -> None:
        values, U = torch.linalg.eigh(gram(rows))
        found["gram"] = values.flip(0)[:K], U.flip(1)[:, :K]

    seconds = {"davidson": once(by_davidson), "gram": once(by_gram)}
    G = gram(rows, torch.float64)
    row: dict[str, Any] = {"seconds": seconds["davidson"], "gram": seconds["gram"]}
    for way, (values, U) in found.items():
        residuals = torch.linalg.vector_norm(G @ U - U * values, dim=0) / values
        row[f"{way}_residual"] = float(residuals.max())
    (values, U), (others, W) = found["davidson"], found["gram"]
    apart = torch.linalg.vector_norm(U - W * (U * W).sum(0), dim=0)
    return {
        **row,
        "sine": float(apart.max()),
        "eigenvalues": float((values / others - 1).abs().max()),
    }


def _consume(iterator: Iterator[Any]) -> None:
    deque(iterator, maxlen=0)


def predict(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds per image of the probit predictive, with a fit on a few images."""
    n = p["images"]
    model, x, y = resnet20(args, max(n, p["M"]))
    la = SIDES[p["side"]](model, p["M"], p["K"])
    la.fit(loader(x[: p["M"]], y[: p["M"]], 8))
    kind = "glm" if p["side"] == "ours" else "gp"
    x = x[:n]
    seconds = best_seconds(lambda: la(x, pred_type=kind, link_approx="probit"), 2) / n
    row = {"seconds": seconds, "forward": forward_seconds(model, x)}
    if p["side"] == "ours":
        row["mode"] = la.modes.features.value
    return row


def grid_search(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a grid search; linear in candidates and images where it is said so."""
    model, x, y = resnet20(args, max(p["images"], 64))
    la = SIDES[p["side"]](model, 64, 20)
    la.fit(loader(x[:64], y[:64], 8))
    kind = "glm" if p["side"] == "ours" else "gp"
    val = loader(x[: p["images"]], y[: p["images"]], min(p["images"], 100))
    seconds = once(
        lambda: la.optimize_prior_precision(
            pred_type=kind,
            method="gridsearch",
            val_loader=val,
            grid_size=p["candidates"],
        )
    )
    scale = (100 / p["candidates"]) * (1000 / p["images"])
    return {"seconds": seconds * scale, "measured": seconds}


def fit(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """A whole fit; `memory_budget` makes ours summarise its gradients."""
    model, x, y = resnet20(args, p["N"])
    kwargs = {k: p[k] for k in ("memory_budget", "stochastic") if k in p}
    la = SIDES[p["side"]](model, p["M"], p["K"], **kwargs)
    seconds = once(lambda: la.fit(loader(x, y, p["batch"])))
    row = {"seconds": seconds}
    if p["side"] == "ours":
        row |= {"method": la.basis.method, "eigenvalues": la.basis.eigenvalues.tolist()}
        torch.save(la.basis.directions, args.cache_dir / f"directions_{p['tag']}.pt")
    return row


# Tasks that laplace-torch's ELLA cannot do


def efficientnet(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """EfficientNet-Lite0, 1,000 classes: fit on M images and predict."""
    model = imagenet_model("efficientnet_lite0")
    paths, classes = imagenet_sample(args.data_root)
    x = read_images(paths[:: 1000 // p["M"]][: p["M"]])
    y = classes[:: 1000 // p["M"]][: p["M"]]
    forget_peak()
    # Curvature from sampled labels: one backward pass per image instead of 2K + 1.
    la = ours(model, p["M"], p["K"], memory_budget=f"{p['budget']} GB", stochastic=True)
    seconds = once(lambda: la.fit(loader(x, y, 16)))
    la(x[:1])  # finds out how to compute features
    one = once(lambda: la(x[:4], link_approx="probit")) / 4
    return {
        "seconds": seconds,
        "image": one,
        "forward": forward_seconds(model, x[:4]),
        "method": la.basis.method,
        "mode": la.modes.features.value,
    }


def vit(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """ViT-B/16 of timm, 86 M parameters, 1,000 classes, with random weights: the cost
    does not depend on them."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", pretrained=False).eval()
    model = ScaledInput(model, [0.5] * 3, [0.5] * 3).eval()
    x, y = torch.rand(p["M"], 3, 224, 224), torch.arange(p["M"]) % 1000
    la = ours(model, p["M"], p["K"], memory_budget=f"{p['budget']} GB", stochastic=True)
    seconds = once(lambda: la.fit(loader(x, y, 1)))
    la(x[:1])  # finds out how to compute features
    one = once(lambda: la(x[:1], link_approx="probit"))
    return {
        "seconds": seconds,
        "image": one,
        "forward": forward_seconds(model, x[:1]),
        "method": la.basis.method,
        "mode": la.modes.features.value,
    }


# How the cost grows, on a synthetic network


def growth(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Fit a fully connected network of about P parameters, and features both ways."""
    torch.manual_seed(0)
    width = int((p["P"]) ** 0.5)
    model = nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, p["C"]),
    ).eval()
    x, y = torch.randn(p["N"], 64), torch.randint(p["C"], (p["N"],))
    la = ours(model, p["M"], p["K"])
    row: dict[str, Any] = {"seconds": once(lambda: la.fit(loader(x, y, 64)))}
    few, V = x[:64], la.basis.directions
    for mode in ("forward", "reverse"):
        linearizer = _linearizer(la, feature_mode=mode)
        row[mode] = best_seconds(lambda way=linearizer: _features(way, few, V), 4) / 64
    return {**row, "mode": la.modes.features.value, "method": la.basis.method}


def _linearizer(la: laplace_ella.ELLALaplace, **options: Any) -> Linearizer:
    """The same network with other options."""
    linearizer = la.fitter.linearizer
    changed = {"feature_mode": FeatureMode(options.pop("feature_mode")), **options}
    return linearizer.with_options(replace(linearizer.options, **changed))


def _features(linearizer: Linearizer, x: torch.Tensor, V: torch.Tensor) -> object:
    with torch.no_grad():
        return linearizer.features(x, V)


# What the options cost and change


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "`stochastic=True`": {"stochastic": True},
    "`stochastic=10`": {"stochastic": 10},
    "`basis_dtype=bfloat16`": {"basis_dtype": torch.bfloat16},
    "predictions under `torch.autocast`, bfloat16": {},
    "`feature_mode='forward'`": {"feature_mode": "forward"},
    "`feature_mode='forward', compile=True`": {
        "feature_mode": "forward",
        "compile": True,
    },
}


def options(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Fit and predict with one option; the predictions are kept for comparison."""
    model, x, y = resnet20(args, p["N"])
    new = cifar10(args.data_root, "test")[: p["images"]]
    la = ours(model, p["M"], p["K"], **OPTIONS[p["option"]])
    seconds = once(lambda: la.fit(loader(x, y, 64)))
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in p["option"]):
        few = new.x[:16]
        la(few)  # compiles, finds out how to compute features
        image = best_seconds(lambda: la(few), 1) / len(few)
        parts = [la(part).double() for part in new.x.split(len(few))]
    probs = torch.cat(parts)
    torch.save(probs, args.cache_dir / f"probs_{p['tag']}.pt")
    return {
        "seconds": seconds,
        "image": image,
        "nll": laplace_ella.metrics.nll(probs, new.y),
    }


# Where the passes go


def mlp() -> nn.Module:
    layers = (nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(50, 1))


class Encoder(nn.Module):
    """Two transformer layers over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(1))


def vit_base() -> nn.Module:
    import timm

    return timm.create_model("vit_base_patch16_224", pretrained=False)


#: Name: the network (those of the data folder by their own name), its inputs, C and K.
NETWORKS: dict[str, tuple[Any, tuple[int, ...], int, int]] = {
    "ResNet-20": ("resnet20", (24, 3, 32, 32), 10, 20),
    "MLP 2×50, 10,000 inputs": (mlp, (10_000, 10), 1, 20),
    "transformer encoder": (Encoder, (64, 32, 64), 10, 20),
    "EfficientNet-Lite0": ("efficientnet_lite0", (4, 3, 224, 224), 1000, 20),
    "ViT-B/16": (vit_base, (1, 3, 224, 224), 1000, 10),
}


def _network(
    args: Namespace, name: str
) -> tuple[laplace_ella.ELLALaplace, torch.Tensor, torch.Tensor]:
    """A posterior, fitted on a few inputs, with inputs, and its directions."""
    build, shape, C, K = NETWORKS[name]
    torch.manual_seed(0)
    if build == "resnet20":
        model = cifar_resnet(build, args.data_root)
    else:
        model = imagenet_model(build) if isinstance(build, str) else build().eval()
    x = torch.randn(*shape)
    M = math.ceil(1.2 * K)
    few = x[: math.ceil(M / C)]
    la = ours(model, M, K)
    la.fit(loader(few, torch.zeros(len(few), dtype=torch.long), len(few)))
    return la, x, la.basis.directions


def passes(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds per input of predictions and of their features; where normalisations are
    folded, without that; where memory is kept, with memory that goes back to the
    system; and the operators that take most of them."""
    la, x, V = _network(args, p["network"])
    linearizer = la.fitter.linearizer

    def features(inputs: torch.Tensor = x) -> object:
        return _features(linearizer, inputs, V)

    row: dict[str, Any] = {"seconds": best_seconds(lambda: la(x), 2) / len(x)}
    row["forward"] = forward_seconds(la.model, x)
    row["features"] = best_seconds(features, 2) / len(x)
    modes = linearizer.modes(len(V))
    row["mode"] = modes.features.value + ("" if modes.together else ", one by one")
    with patch.object(heap, "_reserve", return_value=None) as reserve:
        seconds = best_seconds(features, 2) / len(x)
    if reserve.called:
        row["returned"] = seconds
    if linearizer.probe(x).folds:
        folding = linearizer
        linearizer = linearizer.with_options(linearizer.options)
        linearizer.adopt(len(V), modes)
        with patch.object(FoldFinder, "folds", ()):
            row["unfolded"] = best_seconds(features, 2) / len(x)
        linearizer = folding
    few = x[: math.ceil(len(x) / 4)]  # the profiler's own memory grows with the calls
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        features(few)
    events = profiled.key_averages(group_by_input_shape=True)
    total = sum(e.self_cpu_time_total for e in events)
    largest = sorted(events, key=lambda e: -e.self_cpu_time_total)[:8]
    row["operators"] = [
        (
            e.key.removeprefix("aten::"),
            _shapes(e),
            e.count,
            e.self_cpu_time_total / total,
        )
        for e in largest
    ]
    return row


#: Networks, modes and numbers of inputs whose passes are compiled.
COMPILED = (
    ("MLP 2×50, 10,000 inputs", "reverse", 100),
    ("MLP 2×50, 10,000 inputs", "reverse", 10_000),
    ("transformer encoder", "reverse", 64),
    ("transformer encoder", "forward", 64),
    ("ResNet-20", "forward", 24),
)


def compiled(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds per input of the features in one mode, as they are and compiled."""
    la, x, V = _network(args, p["network"])
    x = x[: p["inputs"]]
    plain = _linearizer(la, feature_mode=p["mode"])
    faster = _linearizer(la, feature_mode=p["mode"], compile=True)
    row = {"plain": best_seconds(lambda: _features(plain, x, V)) / len(x)}
    row["compiling"] = once(lambda: _features(faster, x, V))
    row["seconds"] = best_seconds(lambda: _features(faster, x, V)) / len(x)
    return {**row, "forward": forward_seconds(la.model, x)}


#: Networks whose largest outputs are predicted, and how many of them: fewer than K,
#: with which reverse mode is the cheaper one.
TOP = {"EfficientNet-Lite0": (3, 10), "ViT-B/16": (3,)}


def top(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds per input of predictions with the variance of some outputs; and by whole
    gradients instead of one parameter's at a time."""
    la, x, _ = _network(args, p["network"])
    la.top_outputs = p["outputs"]
    row = {"seconds": best_seconds(lambda: la(x), 2) / len(x)}
    with patch.object(FeaturePasses, "_forgets", return_value=False):
        row["whole"] = best_seconds(lambda: la(x), 2) / len(x)
    return {**row, "forward": forward_seconds(la.model, x)}


def _shapes(event: Any) -> str:
    """Shapes of the first two arguments that are tensors."""
    shapes = [shape for shape in event.input_shapes if shape][:2]
    return " · ".join("×".join(map(str, shape)) for shape in shapes)


# Other posteriors of laplace-torch


METHODS: dict[str, dict[str, Any]] = {
    "last layer, KFAC": {"subset_of_weights": "last_layer"},
    "diag": {"hessian_structure": "diag"},
    "KFAC": {},
    "ELLA of laplace-torch": {
        "hessian_structure": "gp",
        "functional_approximation": "nystrom",
    },
    "ours": {"hessian_structure": "nystrom"},
    "ours, `top_outputs=3`": {"hessian_structure": "nystrom", "top_outputs": 3},
    "ours, last stage": {
        "hessian_structure": "nystrom",
        "parameter_names": ["layer3.*", "linear.*"],
    },
    "ours, last stage, `top_outputs=3`": {
        "hessian_structure": "nystrom",
        "parameter_names": ["layer3.*", "linear.*"],
        "top_outputs": 3,
    },
}


def plain_cnn() -> nn.Module:
    """About as many parameters as ResNet-20, without normalisations."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n_in, n_out in ((3, 32), (32, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers).eval()


def method(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Fit on N images, and predict some by the probit link."""
    settings = {"subset_of_weights": "all", "hessian_structure": "kron"}
    settings |= METHODS[p["method"]]
    if "nystrom" in settings.values():
        settings |= {"subsample_size": p["M"], "n_eigenvalues": p["K"]}
    model, x, y = resnet20(args, max(p["N"], p["images"]))
    model = plain_cnn() if p.get("plain") else model
    la = Laplace(model, "classification", prior_precision=5.0, **settings)
    seconds = once(lambda: la.fit(loader(x[: p["N"]], y[: p["N"]], 8)))
    kind = "gp" if settings["hessian_structure"] == "gp" else "glm"
    new = x[: p["images"]]
    image = best_seconds(lambda: la(new, pred_type=kind, link_approx="probit"), 2)
    return {
        "seconds": seconds,
        "image": image / len(new),
        "forward": forward_seconds(model, new),
    }


def batch_size(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds per image of predictions by batches of one size; forward passes have
    the same."""
    n_batches = math.ceil(p["images"] / p["batch"])
    model, x, y = resnet20(args, max(n_batches * p["batch"], p["M"]))
    la = SIDES[p["side"]](model, p["M"], p["K"])
    la.fit(loader(x[: p["M"]], y[: p["M"]], 8))
    kind = "glm" if p["side"] == "ours" else "gp"
    parts = x[: n_batches * p["batch"]].split(p["batch"])

    def predictions() -> None:
        for part in parts:
            la(part, pred_type=kind, link_approx="probit")

    return {
        "seconds": best_seconds(predictions, 2) / (n_batches * p["batch"]),
        "forward": forward_seconds(model, parts[0]),
    }


TASKS: dict[str, Task] = {
    task.__name__: task
    for task in (
        basis_row,
        basis,
        directions,
        predict,
        grid_search,
        fit,
        efficientnet,
        vit,
        growth,
        options,
        passes,
        compiled,
        top,
        method,
        batch_size,
    )
}
