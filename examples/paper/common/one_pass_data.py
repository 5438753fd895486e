"""Images, their activations and exact variances, which `one_pass.py` fits heads to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from common import ella
from common.cifar import HEAD_WEIGHTS, PAPER_PRIOR
from common.corruptions import CORRUPTIONS, corrupt
from common.data import Images, cifar10, cifar10_pixels, normalize_cifar
from common.models import ResNet
from laplace_ella import ELLALaplace, FeatureCache
from laplace_ella.posterior.predictive import FunctionValues

SEVERITIES = (1, 3, 5)
TESTED = ("clean", *(f"severity {severity}" for severity in SEVERITIES))
LINK = "probit_centered"

#: The largest set of activations.
RICHEST = "all layers, outputs, last gradients"


@dataclass(frozen=True)
class Sizes:
    """How much there is of everything.

    Attributes
    ----------
    posterior : int
        training images whose curvature is summed
    clean, corrupted : int
        test images held out; of the first so many each severity is made
    calibration : int
        test images with labels
    head, mixed, trained : int
        test images that heads are fitted on; so many of them with corruptions; and
        images that the network was trained on
    M, K : int
        gradients and directions
    few : int
        directions of the smaller posterior
    epochs : int
        of the small network
    """

    posterior: int = 500
    clean: int = 1500
    corrupted: int = 608
    calibration: int = 1000
    head: int = 7500
    mixed: int = 2500
    trained: int = 5000
    M: int = 2000
    K: int = 128
    few: int = 20
    epochs: int = 60


SMOKE = Sizes(20, 24, 19, 20, 60, 19, 10, M=20, K=4, few=3, epochs=2)


# Images and activations


def corrupted(
    pixels: np.ndarray, types: Sequence[str], severities: Sequence[int]
) -> np.ndarray:
    """Each image with one type and severity, all of them in turn."""
    changed = np.empty_like(pixels)
    for i, name in enumerate(types):
        for j, severity in enumerate(severities):
            at = slice(i + len(types) * j, None, len(types) * len(severities))
            if len(pixels[at]):
                changed[at] = corrupt(pixels[at], name, severity)
    return changed


def image_sets(root: Any, sizes: Sizes) -> dict[str, Images]:
    """The images by name; none is in two sets but for corruptions.

    Those 'mixed' have every second type, so that the others stay unseen.
    """
    pixels, classes = cifar10_pixels(root, "test")
    train, names = cifar10(root, "train"), list(CORRUPTIONS)
    ends = np.cumsum([0, sizes.clean, sizes.calibration, sizes.head])
    clean, calibration, head = (slice(a, b) for a, b in pairwise(ends))

    def images(part: slice, x: np.ndarray | None = None) -> Images:
        x = pixels[part] if x is None else x
        return Images(normalize_cifar(x), torch.as_tensor(classes[part]).long())

    few = slice(0, sizes.corrupted)
    some = slice(head.start, head.start + sizes.mixed)
    return {
        "posterior": train[: sizes.posterior],
        "clean": images(clean),
        **{
            f"severity {s}": images(few, corrupted(pixels[few], names, (s,)))
            for s in SEVERITIES
        },
        "calibration": images(calibration),
        "head": images(head),
        "mixed": images(some, corrupted(pixels[some], names[1::2], (1, 2, 3, 4, 5))),
        "trained": train[sizes.posterior : sizes.posterior + sizes.trained],
    }


def pooled(a: torch.Tensor) -> torch.Tensor:
    """Of each channel mean, root mean square and share of positions that are active."""
    active = (a > 0).to(a.dtype).mean((2, 3))
    return torch.cat([a.mean((2, 3)), a.square().mean((2, 3)).sqrt(), active], 1)


def gradient_norms(model: ResNet, inner: torch.Tensor, out: torch.Tensor) -> Any:
    """Logs of the squared gradients of the last convolution, without a backward pass:
    behind it there are a ReLU, a mean and the last layer only.

    With patches p and masks m of positions s and t, and weights w from channel o to
    logit c, ‖∂f_c‖² = Σ_o w_co² Σ_st m_os m_ot p_s·p_t.
    """
    block = model.layer3[-1]
    patches = F.unfold(inner, 3, padding=1)  # (B, 9·64, S)
    mask = (out > 0).to(out.dtype).flatten(2)  # (B, 64, S)
    products = mask @ (patches.mT @ patches) / mask.shape[-1] ** 2
    channels = (products * mask).sum(-1)  # (B, 64)
    scale = block.bn2.weight * (block.bn2.running_var + block.bn2.eps).rsqrt()
    logits = channels @ (model.linear.weight * scale).square().T
    spread = (model.linear.weight @ out.flatten(2)).var(-1)  # of class maps
    both = torch.cat([channels, logits, logits.mean(1, keepdim=True), spread], 1)
    return both.clamp_min(1e-8).log()


@torch.no_grad()
def activations(model: ResNet, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sets of activations `(B, features)` of one forward pass, ever more of them."""
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept.append(output.relu())

    blocks = [b for s in (model.layer1, model.layer2, model.layer3) for b in s]
    hooked = [m for b in blocks for m in (b.bn1, b)]
    handles = [m.register_forward_hook(keep) for m in hooked]
    try:
        f = model(x)
    finally:
        for handle in handles:
            handle.remove()
    ordered = f.log_softmax(-1).sort(-1, descending=True).values
    values = f.sort(-1, descending=True).values
    outputs = torch.cat([f, f.softmax(-1), ordered, ordered.exp(), values], 1)
    penultimate = kept[-1].mean((2, 3))
    outer = torch.cat([pooled(a) for a in kept[1::2]], 1)
    inner = torch.cat([pooled(a) for a in kept[::2]], 1)
    norms = gradient_norms(model, kept[-2], kept[-1])
    return {
        "logits and probabilities": outputs,
        "penultimate layer": penultimate,
        "penultimate layer and outputs": torch.cat([penultimate, outputs], 1),
        "all blocks and outputs": torch.cat([outer, outputs], 1),
        "all layers and outputs": torch.cat([outer, inner, outputs], 1),
        RICHEST: torch.cat([outer, inner, outputs, norms], 1),
    }


def all_activations(model: ResNet, x: torch.Tensor) -> dict[str, torch.Tensor]:
    parts = [activations(model, part) for part in x.split(250)]
    return {kind: torch.cat([part[kind] for part in parts]) for kind in parts[0]}


# Posteriors


@dataclass(frozen=True)
class Exact:
    """What a calibrated posterior says of every set of images.

    Attributes
    ----------
    logs : dict
        `(N, 1 + C)`: log of the mean variance of the logits, and logs of the variances
        that the centred probit link takes
    features : dict
        the roots of the covariance in the basis `(N, C·K)`
    probs : dict
        `(N, C)`
    tau : float
        softmax temperature
    """

    logs: dict[str, torch.Tensor]
    features: dict[str, torch.Tensor]
    probs: dict[str, torch.Tensor]
    tau: float


def link_variances(values: FunctionValues) -> torch.Tensor:
    """Of each logit's distance from the mean of the others, `(N, C)`."""
    C = values.mean.shape[-1]
    return values.centered().variance() * (C / (C - 1)) ** 2


def linked(f: torch.Tensor, variances: torch.Tensor, tau: float) -> torch.Tensor:
    """The centred probit link, from variances instead of a covariance."""
    f = (f - f.mean(-1, keepdim=True)) / tau
    return (f * torch.rsqrt(1 + math.pi / 8 * variances / tau**2)).softmax(-1)


def exact(
    la: ELLALaplace, caches: dict[str, FeatureCache], scaled: bool = True
) -> Exact:
    """Calibrate, then predict everything; with τ = 1 unless `scaled`, so that all of
    the softening is the posterior's."""
    if scaled:
        la.optimize_calibration(caches["calibration"], link_approx=LINK)
    else:
        la.optimize_temperature(
            caches["calibration"], tune_prior=True, link_approx=LINK
        )
    logs, features, probs = {}, {}, {}
    for name, whole in caches.items():
        cache = whole.serving(la.posterior)
        values = la.posterior.function_values(cache.f_mu, cache.phi, cache.residual)
        mean = values.variance().mean(1, keepdim=True)
        logs[name] = torch.cat([mean, link_variances(values)], 1).log().double()
        features[name] = values.factor.flatten(1).double()
        probs[name] = la.predict_from_cache(cache, link_approx=LINK)
    return Exact(logs, features, probs, la.softmax_temperature)


def last_layer_posterior(
    args: Any, sizes: Sizes, model: ResNet, sets: dict[str, Images]
) -> Exact:
    """The posterior of the last layer alone, which one pass gives exactly."""
    embedded = {
        "fit" if name == "posterior" else name: Images(
            ella.forward(model.embed, sets[name].x), sets[name].y
        )
        for name in ("posterior", "calibration", *TESTED)
    }
    folder = args.cache_dir / "one_pass" / f"last_layer_M{sizes.M}_N{sizes.posterior}"
    study, caches = ella.last_layer_study(
        model.linear,
        embedded,
        folder,
        residual=False,
        n_eigenvalues=min(HEAD_WEIGHTS, sizes.M),
        subsample_size=sizes.M,
        prior_precision=PAPER_PRIOR,
    )
    rank = study.la.basis.rank
    del caches["fit"]
    return exact(study.posterior(rank, prior_precision=PAPER_PRIOR), caches)
