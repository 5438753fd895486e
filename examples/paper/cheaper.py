"""What cheaper predictions cost and lose: the largest outputs, the last blocks.

    python examples/paper/cheaper.py --network resnet20
    python examples/paper/cheaper.py --network efficientnet_lite0

A posterior of all parameters, of the last stage, of the last block or of the last layer
(`parameter_names`), and of each the variance of the m largest logits only
(`top_outputs`): softmax temperature, temperature and prior are chosen for each m on one
half of the test images and predict the other half, and the other way round. Costs are
CPU seconds of a prediction by those of a forward pass in the same run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import models, runs
from common.data import Images, cifar10, imagenet_sample, read_images
from laplace import Laplace
from torch import nn

from laplace_ella import ELLALaplace, FeatureCache, metrics
from laplace_ella.tuning.calibration import temperature_scaling


@dataclass(frozen=True)
class Network:
    """A network, and names of the parameters of its parts.

    Attributes
    ----------
    load : callable
        the network and its images to fit and to test
    scopes : dict
        patterns of parameter names; None for all
    ranks : tuple of int
        K
    tops : tuple of int
        m, beside all outputs
    n_fit, n_test : int
    subsample_size : int
        M
    batch : int
        images of a timed prediction
    link : str
        samples of 1,000 classes would take longer than their features
    """

    load: Callable[[Any, Network], tuple[nn.Module, Images, Images]]
    scopes: dict[str, tuple[str, ...] | None]
    ranks: tuple[int, ...]
    tops: tuple[int, ...]
    n_fit: int
    n_test: int
    subsample_size: int
    batch: int
    link: str


def load_cifar(args: Any, network: Network) -> tuple[nn.Module, Images, Images]:
    model = models.cifar_resnet(args.network, args.data_root)
    train, test = (cifar10(args.data_root, which) for which in ("train", "test"))
    return model, train[: network.n_fit], test[: network.n_test]


def load_imagenet(args: Any, network: Network) -> tuple[nn.Module, Images, Images]:
    paths, classes = imagenet_sample(args.data_root)
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))
    parts = order[: network.n_fit + network.n_test].split(
        [network.n_fit, network.n_test]
    )
    images = [Images(read_images([paths[i] for i in p]), classes[p]) for p in parts]
    return models.imagenet_model(args.network), images[0], images[1]


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


def predictions(la: ELLALaplace, cache: FeatureCache, link: str) -> torch.Tensor:
    """Probabilities by the settings that suit the other half."""
    order = torch.arange(len(cache))
    halves = order.split(math.ceil(len(order) / 2))
    probs = {}
    for half, other in zip(halves, reversed(halves), strict=True):
        la.optimize_calibration(cache[other], link_approx=link, n_samples=128)
        probs[int(half[0])] = la.predict_from_cache(
            cache[half], link_approx=link, n_samples=512
        )
    return torch.cat([probs[start] for start in sorted(probs)])


def scaled(cache: FeatureCache) -> torch.Tensor:
    """The same by temperature scaling."""
    halves = torch.arange(len(cache)).split(math.ceil(len(cache) / 2))
    parts = []
    for half, other in zip(halves, reversed(halves), strict=True):
        tau = temperature_scaling(cache.f_mu[other], cache.targets[other])
        parts.append((cache.f_mu[half] / tau).softmax(-1))
    return torch.cat(parts)


def distance(probs: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean total variation of the probabilities."""
    return float((probs - reference).abs().sum(-1).mean() / 2)


def score(probs: torch.Tensor, reference: torch.Tensor, y: torch.Tensor) -> Any:
    """Scores, and the loss beyond the reference's with its standard error."""
    scores = metrics.classification_metrics(probs, y)
    row = {k: scores[k] for k in ("nll", "ece", "brier")}
    beyond = metrics.nll_per_example(probs, y) - metrics.nll_per_example(reference, y)
    error = float(beyond.std() / len(y) ** 0.5)
    row["beyond"] = f"{float(beyond.mean()):+.4f} ± {error:.4f}"
    return {**row, "distance": distance(probs, reference)}


def rows_of(args: Any, network: Network) -> list[dict[str, Any]]:
    model, fit, test = network.load(args, network)
    x = test.x[: network.batch]
    with torch.no_grad():
        one = runs.best_seconds(lambda: model(x))
    rows: list[dict[str, Any]] = []
    everything: dict[int, torch.Tensor] = {}
    for scope, names in network.scopes.items():
        for rank in network.ranks:
            la = fitted(model, fit, network, rank, names)
            cache = FeatureCache.from_loader(la, test.loader(network.batch))
            y = cache.targets
            if not rows:
                tau = scaled(cache)
                own = {"scope": "temperature scaling", "passes": 1.0}
                rows.append({**own, **score(tau, tau, y), "distance": None})
            reference = all_plain = None
            for m in (None, *reversed(network.tops)):
                la.top_outputs = m
                la.prior_precision, la.temperature, la.softmax_temperature = 1, 1, 1
                settings = {"link_approx": network.link, "n_samples": 512}
                plain = la.predict_from_cache(cache, **settings)
                probs = predictions(la, cache, network.link)
                if m is None:
                    everything.setdefault(rank, probs)
                    reference, all_plain = probs, plain
                assert reference is not None
                assert all_plain is not None
                cost = runs.best_seconds(
                    lambda la=la: la(x, link_approx=network.link), 2
                )
                row = {
                    "scope": scope,
                    "P": f"{la.n_params:,}",
                    "K": rank,
                    "m": "all" if m is None else m,
                    "passes": cost / one,
                    "alike": None if m is None else distance(plain, all_plain),
                    **score(probs, everything[rank] if m is None else reference, y),
                }
                rows.append(row)
                print(row, flush=True)
    return rows


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
}

NOTE = (
    "{fit} images fitted, {test} tested, M = {M}; link {link}. Passes: time of a "
    "prediction of {batch} images by that of their forward pass. NLL beyond and "
    "distance (mean "
    "total variation of the probabilities): of m outputs, from all outputs; of all "
    "outputs, from all layers. With the same settings: before any were chosen, at "
    "prior precision 1.\n\n"
)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("cheaper", __doc__)
    parser.add_argument("--network", default="resnet20", choices=NETWORKS)
    args = runs.start(parser, argv)
    network = NETWORKS[args.network]
    if args.smoke:
        scopes = {k: network.scopes[k] for k in ("all layers", "last layer")}
        network = Network(network.load, scopes, (3,), (2,), 8, 12, 10, 4, network.link)
    rows = rows_of(args, network)
    note = NOTE.format(
        fit=f"{network.n_fit:,}",
        test=f"{network.n_test:,}",
        M=f"{network.subsample_size:,}",
        batch=network.batch,
        link=network.link,
    )
    digits = {"passes": ".1f", "distance": ".4f", "alike": ".4f"}
    table = note + runs.markdown(rows, COLUMNS, digits)
    (args.out / f"{args.network}.md").write_text(table)
    runs.write_environment(args.out / f"{args.network}_environment.json", args)
    print(table)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
