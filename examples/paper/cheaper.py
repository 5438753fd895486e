"""What cheaper predictions cost and lose: the largest outputs, the last blocks.

    python examples/paper/cheaper.py --network resnet20
    python examples/paper/cheaper.py --network efficientnet_lite0

A posterior of all parameters, of the last stage, of the last block or of the last layer
(`parameter_names`), and of each the variance of the m largest logits only
(`top_outputs`): softmax temperature, temperature and prior are chosen for each m on one
half of the test images and predict the other half, and the other way round. CIFAR-10's
images are also predicted with corruptions of severity 3. Costs are CPU seconds of a
prediction by those of a forward pass in the same run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from common import models, runs
from common.corruptions import CORRUPTIONS
from common.data import (
    Images,
    cifar10,
    cifar10_pixels,
    imagenet_sample,
    normalize_cifar,
    read_images,
)
from common.one_pass_data import corrupted
from laplace import Laplace
from torch import nn

from laplace_ella import ELLALaplace, FeatureCache, metrics
from laplace_ella.tuning.calibration import temperature_scaling

#: Of the corruptions.
SEVERITY = 3


@dataclass(frozen=True)
class Network:
    """A network, and names of the parameters of its parts.

    Attributes
    ----------
    load : callable
        the network, its images to fit and to test, and corrupted ones
    scopes : dict
        patterns of parameter names; None for all
    ranks : tuple of int
        K
    tops : tuple of int
        m, beside all outputs
    n_fit, n_test, n_corrupted : int
    subsample_size : int
        M
    batch : int
        images of a timed prediction
    link : str
        samples of 1,000 classes would take longer than their features
    """

    load: Callable[[Any, Network], tuple[nn.Module, Images, Images, Images | None]]
    scopes: dict[str, tuple[str, ...] | None]
    ranks: tuple[int, ...]
    tops: tuple[int, ...]
    n_fit: int
    n_test: int
    n_corrupted: int
    subsample_size: int
    batch: int
    link: str


Loaded = tuple[nn.Module, Images, Images, Images | None]


def load_cifar(args: Any, network: Network) -> Loaded:
    model = models.cifar_resnet(args.network, args.data_root)
    train, test = (cifar10(args.data_root, which) for which in ("train", "test"))
    n, m = network.n_test, network.n_corrupted
    pixels, classes = cifar10_pixels(args.data_root, "test")
    changed = corrupted(pixels[n : n + m], list(CORRUPTIONS), (SEVERITY,))
    targets = torch.as_tensor(classes[n : n + m], dtype=torch.long)
    others = Images(normalize_cifar(changed), targets)
    return model, train[: network.n_fit], test[:n], others


def load_imagenet(args: Any, network: Network) -> Loaded:
    paths, classes = imagenet_sample(args.data_root)
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))
    parts = order[: network.n_fit + network.n_test].split(
        [network.n_fit, network.n_test]
    )
    images = [Images(read_images([paths[i] for i in p]), classes[p]) for p in parts]
    return models.imagenet_model(args.network), images[0], images[1], None


NETWORKS = {
    "resnet20": Network(
        load_cifar,
        {
            "all layers": None,
            "last stage": ("layer3.*", "linear.*"),
            "last block": ("layer3.2.*", "linear.*"),
            "last layer": ("linear.*",),
        },
        ranks=(20,),
        tops=(1, 2, 3, 5),
        n_fit=500,
        n_test=1500,
        n_corrupted=760,
        subsample_size=1000,
        batch=48,
        link="mc",
    ),
    "efficientnet_lite0": Network(
        load_imagenet,
        {
            "all layers": None,
            "last stage": (
                "model._blocks.1[1-5].*",
                "model._conv_head.*",
                "model._bn1.*",
                "model._fc.*",
            ),
            "last block": (
                "model._blocks.15.*",
                "model._conv_head.*",
                "model._bn1.*",
                "model._fc.*",
            ),
            "last layer": ("model._fc.*",),
        },
        ranks=(20,),
        tops=(1, 3, 10),
        n_fit=100,
        n_test=200,
        n_corrupted=0,
        subsample_size=300,
        batch=4,
        link="probit_centered",
    ),
}


def fitted(
    model: nn.Module, fit: Images, network: Network, rank: int, scope: Any
) -> ELLALaplace:
    names = {} if scope is None else {"parameter_names": list(scope)}
    la = Laplace(
        model,
        "classification",
        "all",
        "nystrom",
        n_eigenvalues=rank,
        subsample_size=network.subsample_size,
        **names,
    )
    la.fit(fit.loader(network.batch))
    return la


def predictions(
    la: ELLALaplace, cache: FeatureCache, others: FeatureCache | None, link: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities by the settings that suit the other half, and those of other
    images by the last of them."""
    order = torch.arange(len(cache))
    halves = order.split(math.ceil(len(order) / 2))
    probs = {}
    for half, other in zip(halves, reversed(halves), strict=True):
        la.optimize_calibration(cache[other], link_approx=link, n_samples=128)
        probs[int(half[0])] = la.predict_from_cache(
            cache[half], link_approx=link, n_samples=512
        )
    whole = torch.cat([probs[start] for start in sorted(probs)])
    if others is None:
        return whole, None
    return whole, la.predict_from_cache(others, link_approx=link, n_samples=512)


def scaled(
    cache: FeatureCache, others: FeatureCache | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same by temperature scaling."""
    halves = torch.arange(len(cache)).split(math.ceil(len(cache) / 2))
    parts, tau = [], 1.0
    for half, other in zip(halves, reversed(halves), strict=True):
        tau = temperature_scaling(cache.f_mu[other], cache.targets[other])
        parts.append((cache.f_mu[half] / tau).softmax(-1))
    return torch.cat(parts), None if others is None else (others.f_mu / tau).softmax(-1)


def distance(probs: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean total variation of the probabilities."""
    return float((probs - reference).abs().sum(-1).mean() / 2)


def beyond(probs: torch.Tensor, reference: torch.Tensor, y: torch.Tensor) -> str:
    """The loss beyond the reference's with its standard error."""
    more = metrics.nll_per_example(probs, y) - metrics.nll_per_example(reference, y)
    return f"{float(more.mean()):+.4f} ± {float(more.std() / len(y) ** 0.5):.4f}"


def score(probs: torch.Tensor, reference: torch.Tensor, y: torch.Tensor) -> Any:
    """Scores, and how far they are from the reference's."""
    scores = metrics.classification_metrics(probs, y)
    row = {k: scores[k] for k in ("nll", "ece", "brier")}
    row["beyond"] = beyond(probs, reference, y)
    return {**row, "distance": distance(probs, reference)}


def rows_of(args: Any, network: Network) -> list[dict[str, Any]]:
    model, fit, test, corrupted_images = network.load(args, network)
    x = test.x[: network.batch]
    one = runs.forward_seconds(model, x) * len(x)
    rows: list[dict[str, Any]] = []
    all_layers: dict[int, Any] = {}
    for (scope, names), rank in product(network.scopes.items(), network.ranks):
        la = fitted(model, fit, network, rank, names)
        cache = FeatureCache.from_loader(la, test.loader(network.batch))
        others = None
        if corrupted_images is not None:
            loader = corrupted_images.loader(network.batch)
            others = FeatureCache.from_loader(la, loader)
        y = cache.targets
        tau, tau_others = scaled(cache, others)
        if not rows:
            own = {"scope": "temperature scaling", "passes": 1.0}
            row = {**own, **score(tau, tau, y), "distance": None, "beyond": None}
            rows.append({**row, **under_shift(tau_others, tau_others, others)})
        reference = None
        for m in (None, *reversed(network.tops)):
            la.top_outputs = m
            la.prior_precision, la.temperature, la.softmax_temperature = 1, 1, 1
            settings = {"link_approx": network.link, "n_samples": 512}
            plain = la.predict_from_cache(cache, **settings)
            probs, probs_others = predictions(la, cache, others, network.link)
            found = probs, probs_others, plain
            # All outputs are compared with those of all layers, the others with them.
            other = reference or all_layers.setdefault(rank, found)
            reference = reference or found
            cost = runs.best_seconds(lambda la=la: la(x, link_approx=network.link), 2)
            row = {
                "scope": scope,
                "P": f"{la.n_params:,}",
                "K": rank,
                "m": "all" if m is None else m,
                "passes": cost / one,
                "alike": distance(plain, other[2]),
                "scaling": distance(probs, tau),
                **score(probs, other[0], y),
                **under_shift(probs_others, other[1], others),
            }
            rows.append(row)
            print(row, flush=True)
    return rows


def under_shift(
    probs: torch.Tensor | None,
    reference: torch.Tensor | None,
    others: FeatureCache | None,
) -> dict[str, Any]:
    """The loss on corrupted images, where there are some."""
    if probs is None or reference is None or others is None:
        return {}
    y = others.targets
    nll = metrics.classification_metrics(probs, y)["nll"]
    return {"shifted": nll, "shifted_beyond": beyond(probs, reference, y)}


COLUMNS = {
    "scope": "posterior of",
    "P": "P",
    "K": "K",
    "m": "m",
    "passes": "passes",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "beyond": "NLL beyond",
    "distance": "distance",
    "alike": "distance, same settings",
    "scaling": "from temperature scaling",
}

SHIFTED = {
    "shifted": f"NLL, severity {SEVERITY}",
    "shifted_beyond": "beyond",
}

NOTE = (
    "{fit} images fitted, {test} tested, M = {M}; link {link}. Passes: time of a "
    "prediction of {batch} images by that of their forward pass. NLL beyond and "
    "distance (mean total variation of the probabilities): of m outputs, from all "
    "outputs; of all outputs, from all layers. With the same settings: before any were "
    "chosen, at prior precision 1. From temperature scaling: the distance to its "
    "probabilities, next to nothing where no variance is best.{more}\n\n"
)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("cheaper", __doc__)
    parser.add_argument("--network", default="resnet20", choices=NETWORKS)
    args = runs.start(parser, argv)
    network = NETWORKS[args.network]
    if args.smoke:
        scopes = {k: network.scopes[k] for k in ("all layers", "last layer")}
        sizes = {"n_fit": 8, "n_test": 12, "subsample_size": 10, "batch": 4}
        sizes["n_corrupted"] = min(network.n_corrupted, 4)
        network = replace(network, scopes=scopes, ranks=(3,), tops=(2,), **sizes)
    rows = rows_of(args, network)
    note = NOTE.format(
        fit=f"{network.n_fit:,}",
        test=f"{network.n_test:,}",
        M=f"{network.subsample_size:,}",
        batch=network.batch,
        link=network.link,
        more=f" Corrupted: {network.n_corrupted} others."
        if network.n_corrupted
        else "",
    )
    digits = dict.fromkeys(("distance", "alike", "scaling", "shifted"), ".4f")
    columns = COLUMNS | SHIFTED if network.n_corrupted else COLUMNS
    table = note + runs.markdown(rows, columns, {"passes": ".1f", **digits})
    (args.out / f"{args.network}.md").write_text(table)
    runs.write_environment(args.out / f"{args.network}_environment.json", args)
    print(table)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
