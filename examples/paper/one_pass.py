"""Can a head on the network's own activations predict ELLA's variance in one pass?

    python examples/paper/one_pass.py
    python examples/paper/one_pass.py --most    # one fit, with all images there are

Heads are fitted to the log of the variance of ResNet-20's logits on CIFAR-10 test
images, without their labels, from activations that a forward pass has anyhow. Other
test images, clean and corrupted, tell how much of the variance a head explains (R² of
the log of the mean variance over logits), whether rules that flag inputs 'unlike' the
fitted ones flag those with large errors, and what the predicted probabilities are worth
beside exact features, the exact posterior of the last layer and temperature scaling.

Prior, temperature and softmax temperature of the posteriors are calibrated on further
test images with their labels, with exact features; thresholds are chosen on the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from common import ella, runs
from common.cifar import HEAD_WEIGHTS, N_VALIDATION, PAPER_PRIOR
from common.corruptions import CORRUPTIONS, corrupt
from common.data import Images, cifar10, cifar10_pixels, normalize_cifar
from common.models import ResNet, cifar_resnet
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional as F

from laplace_ella import ELLALaplace, FeatureCache, metrics, temperature_scaling
from laplace_ella.posterior.predictive import FunctionValues

#: Share of clean images that a threshold lets pass.
PASSED = 0.95

#: Strengths of ridge; of kernel ridge, and widths in median distances.
RIDGES = [10.0**power for power in range(-2, 6)]
KERNEL_RIDGES = (1e-3, 1e-2, 1e-1)
WIDTHS = (1.0, 2.0, 4.0)

#: Images that the setting of a kernel is chosen with: choosing with all takes minutes.
N_CHOOSE = 2500

#: Standard deviations beyond which activations say no more.
FARTHEST = 8.0

SEVERITIES = (1, 3, 5)
TESTED = ("clean", *(f"severity {severity}" for severity in SEVERITIES))
LINK = "probit_centered"


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


RICHEST = "all layers, outputs, last gradients"


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


# Heads: each is fitted to scaled activations X (N, F) and centred targets Y (N, T)

Head = Callable[[torch.Tensor], torch.Tensor]


def split(n: int) -> tuple[slice, slice]:
    """Four fifths to fit with, one fifth to choose with."""
    return slice(0, 4 * n // 5), slice(4 * n // 5, n)


def ridge(X: torch.Tensor, Y: torch.Tensor) -> Head:
    fit, choose = split(len(X))

    def weights(part: slice, strength: float) -> torch.Tensor:
        x, y = X[part], Y[part]
        wide = len(x) < x.shape[1]  # (XᵀX + s)⁻¹Xᵀ = Xᵀ(XXᵀ + s)⁻¹
        A = x @ x.T if wide else x.T @ x
        A.diagonal().add_(strength)
        if wide:
            return x.T @ torch.linalg.solve(A, y)
        return torch.linalg.solve(A, x.T @ y)

    def error(strength: float) -> float:
        left = X[choose] @ weights(fit, strength) - Y[choose]
        return float(left[:, 0].square().mean())

    w = weights(slice(0, len(X)), min(RIDGES, key=error))
    return lambda new: new @ w


def kernel_ridge(X: torch.Tensor, Y: torch.Tensor) -> Head:
    fit, choose = split(min(len(X), N_CHOOSE))
    median = float(torch.cdist(X[:300], X[:300]).median())

    def kernel(a: torch.Tensor, b: torch.Tensor, width: float) -> torch.Tensor:
        return (-0.5 * (torch.cdist(a, b) / (width * median)).square()).exp()

    def weights(part: slice, width: float, strength: float) -> torch.Tensor:
        A = kernel(X[part], X[part], width)
        A.diagonal().add_(strength)
        return torch.cholesky_solve(Y[part], torch.linalg.cholesky(A))

    def error(setting: tuple[float, float]) -> float:
        width, strength = setting
        predicted = kernel(X[choose], X[fit], width) @ weights(fit, width, strength)
        return float((predicted - Y[choose])[:, 0].square().mean())

    width, strength = min(((w, s) for w in WIDTHS for s in KERNEL_RIDGES), key=error)
    w = weights(slice(0, len(X)), width, strength)
    return lambda new: kernel(new, X, width) @ w


def network(X: torch.Tensor, Y: torch.Tensor, epochs: int) -> Head:
    """Two hidden layers of 256 units, with dropout."""
    X, Y = X.float(), Y.float()
    scale = Y.std(0)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Sequential(
            *(nn.Linear(X.shape[1], 256), nn.GELU(), nn.Dropout(0.1)),
            *(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)),
            nn.Linear(256, Y.shape[1]),
        )
        optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.05)
        steps = epochs * max(len(X) // 128, 1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-3, total_steps=steps
        )
        for _ in range(steps):
            index = torch.randint(len(X), (128,), generator=generator)
            optimizer.zero_grad()
            (head(X[index]) - Y[index] / scale).square().mean().backward()
            optimizer.step()
            schedule.step()
    head.eval().requires_grad_(False)
    return lambda new: (head(new.float()) * scale).double()


@dataclass(frozen=True)
class Heads:
    """Heads of all kinds, on one set of activations.

    Attributes
    ----------
    mean, std : torch.Tensor
        of the activations that were fitted
    offset : torch.Tensor
        mean targets
    heads : dict
    """

    mean: torch.Tensor
    std: torch.Tensor
    offset: torch.Tensor
    heads: dict[str, Head]

    @classmethod
    def fit(
        cls, x: torch.Tensor, Y: torch.Tensor, epochs: int, ways: Sequence[str] = ()
    ) -> Heads:
        mean, std = x.double().mean(0), x.double().std(0).clamp_min(1e-4)
        whole = cls(mean, std, Y.mean(0), {})
        X, Y = whole.scaled(x), Y - Y.mean(0)
        makers: dict[str, Callable[[], Head]] = {
            "ridge": lambda: ridge(X, Y),
            "kernel ridge": lambda: kernel_ridge(X, Y),
            "network": lambda: network(X, Y, epochs),
        }
        for name in ways or makers:
            whole.heads[name] = makers[name]()
        return whole

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.double() - self.mean) / self.std).clamp(-FARTHEST, FARTHEST)

    def predict(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Predictions of each, and their mean."""
        X = self.scaled(x)
        found = {name: head(X) + self.offset for name, head in self.heads.items()}
        if len(found) > 1:
            found[MEAN] = torch.stack(list(found.values())).mean(0)
        return found


MEAN = "mean of the three"


# Scores


def explained(predicted: torch.Tensor, y: torch.Tensor) -> float:
    """R², the share of the variance of y that is explained."""
    if len(y) < 2:
        return float("nan")
    return float(1 - (predicted - y).square().mean() / y.var(unbiased=False))


def explained_error(predicted: torch.Tensor, y: torch.Tensor) -> float:
    """Standard error of R², by the bootstrap."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(len(y), (len(y),), generator=generator) for _ in range(200)]
    return float(np.std([explained(predicted[i], y[i]) for i in draws]))


def rms(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt()) if len(errors) else float("nan")


@dataclass
class Study:
    """Activations of all images, exact posteriors, and tables of heads on them.

    Attributes
    ----------
    sizes : Sizes
    inputs : dict
        activations by set of images and kind
    logits, targets : dict
        by set of images
    posteriors : dict
        by name, the smaller one first
    """

    sizes: Sizes
    inputs: dict[str, dict[str, torch.Tensor]]
    logits: dict[str, torch.Tensor]
    targets: dict[str, torch.Tensor]
    posteriors: dict[str, Exact]

    def fitted(
        self,
        posterior: str,
        kind: str = RICHEST,
        sources: Sequence[str] = ("head",),
        n: int | None = None,
        ways: Sequence[str] = (),
    ) -> Heads:
        """Heads of the first n images of some sets."""
        x = torch.cat([self.inputs[name][kind] for name in sources])[:n]
        Y = torch.cat([self.posteriors[posterior].logs[name] for name in sources])[:n]
        return Heads.fit(x, Y, self.sizes.epochs, ways)

    def scores(
        self, heads: Heads, posterior: str, kind: str = RICHEST
    ) -> list[dict[str, Any]]:
        """R² on every tested set, a row for each head."""
        rows: dict[str, dict[str, Any]] = {}
        for name in TESTED:
            y = self.posteriors[posterior].logs[name]
            for way, p in heads.predict(self.inputs[name][kind]).items():
                row = rows.setdefault(way, {"way": way})
                row[name] = explained(p[:, 0], y[:, 0])
                if name == "clean":
                    row["±"] = explained_error(p[:, 0], y[:, 0])
                    by_logit = [explained(p[:, c], y[:, c]) for c in range(1, len(y.T))]
                    row["logits"] = float(np.mean(by_logit))
        return list(rows.values())

    def by_activations(self) -> list[dict[str, Any]]:
        """Every kind of activations for the smaller posterior, the most for all."""
        rows = []
        for i, posterior in enumerate(self.posteriors):
            for kind, x in self.inputs["head"].items():
                if i and kind != RICHEST:
                    continue
                own = {"posterior": posterior, "kind": f"{kind} ({x.shape[1]:,})"}
                found = self.scores(self.fitted(posterior, kind), posterior, kind)
                rows += [{**own, **row} for row in found]
                print(*rows[-len(found) :], sep="\n", flush=True)
        first = next(iter(self.posteriors))
        return [*rows, {"posterior": first, **self.by_features(first)}]

    def by_features(self, posterior: str) -> dict[str, Any]:
        """Ridge that predicts features, whose squares are the variance.

        Predicted features are too small, so that a line through the logs follows.
        """
        found = self.posteriors[posterior]
        x, phi = self.inputs["head"][RICHEST], found.features["head"]
        heads = Heads.fit(x, phi, 0, ("ridge",))

        def log(name: str) -> torch.Tensor:
            p = heads.predict(self.inputs[name][RICHEST])["ridge"]
            return p.square().mean(1).log()

        line = fitted_line(log("calibration"), found.logs["calibration"][:, 0])
        row: dict[str, Any] = {"kind": f"{RICHEST} ({x.shape[1]:,})"}
        for name in TESTED:
            row[name] = explained(line(log(name)), found.logs[name][:, 0])
        return {**row, "way": "ridge of the features", "logits": None}

    def learning_curve(self) -> list[dict[str, Any]]:
        rows, posterior = [], next(iter(self.posteriors))
        head, more = self.sizes.head, self.sizes.trained
        for n in (max(head // 15, 8), head // 5, 2 * head // 5, head, head + more):
            sources = ("head",) if n <= head else ("head", "trained")
            heads = self.fitted(posterior, RICHEST, sources, n)
            rows += [{"n": f"{n:,}", **row} for row in self.scores(heads, posterior)]
            print(rows[-1], flush=True)
        return rows

    def most_images(self) -> list[dict[str, Any]]:
        """All images that there are, corrupted ones too, for every posterior: one fit
        to all targets, for it is the kernel matrix that takes time."""
        sources, rows = ("head", "trained", "mixed"), []
        x = torch.cat([self.inputs[name][RICHEST] for name in sources])
        every = list(self.posteriors.values())
        Y = torch.cat([torch.cat([p.logs[n] for n in sources]) for p in every], 1)
        heads = Heads.fit(x, Y, self.sizes.epochs)
        found = {n: heads.predict(self.inputs[n][RICHEST]) for n in TESTED}
        width = Y.shape[1] // len(every)
        for i, (posterior, own) in enumerate(self.posteriors.items()):
            for way in found["clean"]:
                row: dict[str, Any] = {"posterior": posterior, "n": f"{len(x):,}"}
                for name in TESTED:
                    p, y = found[name][way][:, width * i], own.logs[name][:, 0]
                    row[name] = explained(p, y)
                    if name == "clean":
                        row["±"] = explained_error(p, y)
                rows.append({**row, "way": way})
        return rows

    def unseen_types(self) -> list[dict[str, Any]]:
        """With corrupted images among those fitted, on the other types."""
        rows, posterior = [], next(iter(self.posteriors))
        types = torch.arange(self.sizes.corrupted) % len(CORRUPTIONS)
        for sources in (("head",), ("head", "mixed")):
            heads = self.fitted(posterior, RICHEST, sources)
            row: dict[str, Any] = {"sources": " and ".join(sources)}
            limit = self.flags(heads, sources)["nearest"]
            for name in TESTED:
                x = self.inputs[name][RICHEST]
                at = slice(None) if name == "clean" else types % 2 == 0
                y = self.posteriors[posterior].logs[name][at, 0]
                row[name] = explained(heads.predict(x[at])[MEAN][:, 0], y)
                row[f"{name} flagged"] = float(limit(x[at]).double().mean())
            rows.append(row)
            print(row, flush=True)
        return rows

    # Flags

    def distances(self, heads: Heads, sources: Sequence[str] = ("head",)) -> Any:
        """Ways to say how unlike the fitted ones an input is, `(N,)` each."""
        X = heads.scaled(torch.cat([self.inputs[name][RICHEST] for name in sources]))
        covariance = X.T @ X / len(X)
        # A tenth of white noise: directions without data would decide otherwise.
        whitened = covariance + 0.1 * torch.eye(len(covariance), dtype=X.dtype)
        root = torch.linalg.cholesky(whitened)

        def mahalanobis(x: torch.Tensor) -> torch.Tensor:
            new = heads.scaled(x).T
            return torch.linalg.solve_triangular(root, new, upper=False).norm(dim=0)

        def disagreement(x: torch.Tensor) -> torch.Tensor:
            found = heads.predict(x)
            return torch.stack([found[name][:, 0] for name in heads.heads]).std(0)

        return {
            "nearest": lambda x: torch.cdist(heads.scaled(x), X).min(1).values,
            "Mahalanobis": mahalanobis,
            "disagreement": disagreement,
        }

    def flags(self, heads: Heads, sources: Sequence[str] = ("head",)) -> Any:
        """Whether inputs are farther than most clean ones, for each distance."""

        def rule(distance: Head) -> Head:
            clean = distance(self.inputs["calibration"][RICHEST])
            limit = clean.quantile(PASSED)
            return lambda x: distance(x) > limit

        return {k: rule(d) for k, d in self.distances(heads, sources).items()}

    def flagged(self, heads: dict[str, Heads]) -> list[dict[str, Any]]:
        """What the flags are worth: errors with and without them."""
        rows = []
        for posterior, own in heads.items():
            distances, rules = self.distances(own), self.flags(own)
            logs = self.posteriors[posterior].logs
            for rule, flag in rules.items():
                for name in TESTED:
                    x, y = self.inputs[name][RICHEST], logs[name][:, 0]
                    p = own.predict(x)[MEAN][:, 0]
                    far, errors = flag(x), p - y
                    rank = spearmanr(distances[rule](x), errors.abs()).statistic
                    rows.append(
                        {
                            "posterior": posterior,
                            "rule": rule,
                            "set": name,
                            "flagged": float(far.double().mean()),
                            "all": explained(p, y),
                            "unflagged": explained(p[~far], y[~far]),
                            "error": rms(errors[~far]),
                            "error flagged": rms(errors[far]) if far.any() else None,
                            "rank": float(rank),
                        }
                    )
        return rows

    # Probabilities

    def probabilities(
        self, heads: dict[str, Heads], last_layer: Exact
    ) -> list[dict[str, Any]]:
        tau = temperature_scaling(
            self.logits["calibration"], self.targets["calibration"]
        )
        rows = []
        for name in TESTED:
            f, y = self.logits[name], self.targets[name]
            scaled = (f / tau).softmax(-1)
            methods = {
                "MAP": (f.softmax(-1), None),
                "temperature scaling": (scaled, None),
                "last layer, exact": (last_layer.probs[name], None),
            }
            for posterior, own in heads.items():
                found, x = self.posteriors[posterior], self.inputs[name][RICHEST]
                reference = found.probs[name]
                logs = own.predict(x)[MEAN][:, 1:].to(f)
                probs = linked(f, logs.exp(), found.tau)
                far = self.flags(own)["nearest"](x)
                either = torch.where(far.unsqueeze(-1), reference, probs)
                constant = own.offset[1:].to(f).exp().expand_as(f)
                methods |= {
                    f"{posterior}: exact": (reference, None),
                    f"{posterior}: one variance for all": (
                        linked(f, constant, found.tau),
                        reference,
                    ),
                    f"{posterior}: head": (probs, reference),
                    f"{posterior}: head, exact if flagged": (either, reference),
                }
            for method, (probs, reference) in methods.items():
                scores = metrics.classification_metrics(probs, y)
                row = {"set": name, "method": method}
                row |= {k: scores[k] for k in ("nll", "ece")}
                row["beyond scaling"] = difference(probs, scaled, y)
                if reference is not None:
                    row["beyond exact"] = difference(probs, reference, y)
                    moved = (probs - reference).abs().sum(-1).mean() / 2
                    row["distance"] = float(moved)
                rows.append(row)
        return rows


def difference(probs: torch.Tensor, other: torch.Tensor, y: torch.Tensor) -> str:
    """Mean difference of the NLL and its standard error."""
    beyond = metrics.nll_per_example(probs, y) - metrics.nll_per_example(other, y)
    return f"{float(beyond.mean()):+.4f} ± {float(beyond.std() / len(y) ** 0.5):.4f}"


def fitted_line(x: torch.Tensor, y: torch.Tensor) -> Head:
    """The least-squares line y(x)."""
    slope = ((x - x.mean()) * (y - y.mean())).mean() / x.var(unbiased=False)
    return lambda new: y.mean() + slope * (new - x.mean())


# Costs


def costs(
    model: ResNet, la: ELLALaplace, heads: Heads, x: torch.Tensor
) -> list[dict[str, Any]]:
    """Of predictions of a batch, in forward passes."""
    with torch.no_grad():
        one = runs.best_seconds(lambda: model(x))
        rich = activations(model, x)[RICHEST]
        work = {"forward pass": one}
        work["activations, with the pass"] = runs.best_seconds(
            lambda: activations(model, x)
        )
        scaled = heads.scaled(rich)
        for name, head in heads.heads.items():
            work[f"head: {name}"] = runs.best_seconds(lambda head=head: head(scaled))
    name = f"exact features, K = {la.basis.rank}"
    work[name] = runs.best_seconds(lambda: la(x, link_approx=LINK), 2)
    return [{"what": name, "passes": value / one} for name, value in work.items()]


# The whole


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


def study_of(
    args: Any, sizes: Sizes, model: ResNet, sets: dict[str, Images]
) -> tuple[Study, ELLALaplace]:
    """Activations and posteriors, and the smaller one as an ELLALaplace."""
    folder = args.cache_dir / "one_pass" / f"M{sizes.M}_K{sizes.K}"
    la = ella.fit_basis(
        model,
        cifar10(args.data_root, "train")[:-N_VALIDATION],
        folder / "ella.pt",
        n_eigenvalues=sizes.K,
        subsample_size=sizes.M,
        prior_precision=PAPER_PRIOR,
        feature_mode="reverse",
    )
    caches = {
        name: ella.cached_features(
            la, part, folder / name.replace(" ", "_"), residual=name != "posterior"
        )
        for name, part in sets.items()
    }
    fits = ella.Study(la, caches.pop("posterior"))
    posteriors = {}
    # The smaller posterior last: it is the one that is timed.
    for name, rank, complement, scaled in (
        (f"K = {sizes.few}, τ = 1", sizes.few, "drop", False),
        (f"K = {sizes.K}, complement", sizes.K, "prior", True),
        (f"K = {sizes.few}", sizes.few, "drop", True),
    ):
        chosen = fits.posterior(
            rank, prior_precision=PAPER_PRIOR, complement=complement
        )
        posteriors[name] = exact(chosen, caches, scaled)
    study = Study(
        sizes,
        {name: all_activations(model, sets[name].x) for name in caches},
        {name: cache.f_mu for name, cache in caches.items()},
        {name: cache.targets for name, cache in caches.items()},
        dict(reversed(posteriors.items())),
    )
    return study, la


def tables(args: Any, sizes: Sizes) -> dict[str, list[dict[str, Any]]]:
    model = cifar_resnet("resnet20", args.data_root)
    sets = image_sets(args.data_root, sizes)
    study, la = study_of(args, sizes, model, sets)
    if args.most:
        return {"most": study.most_images()}
    last_layer = last_layer_posterior(args, sizes, model, sets)
    first = next(iter(study.posteriors))
    heads = {posterior: study.fitted(posterior) for posterior in study.posteriors}
    found = {
        "costs": costs(model, la, heads[first], sets["clean"].x[:48]),
        "flags": study.flagged(heads),
        "probabilities": study.probabilities(heads, last_layer),
        "activations": study.by_activations(),
        "curve": study.learning_curve(),
        "unseen": study.unseen_types(),
    }
    for posterior, logs in ((k, p.logs) for k, p in study.posteriors.items()):
        own = {k: v[:, 0] for k, v in last_layer.logs.items()}
        line = fitted_line(own["calibration"], logs["calibration"][:, 0])
        row = {"posterior": posterior, "kind": "exact variance of the last layer (1)"}
        row |= {k: explained(line(own[k]), logs[k][:, 0]) for k in TESTED}
        found["activations"].append({**row, "way": "line", "logits": None})
    return found


HEADINGS = {
    "activations": (
        "Explained variance (R²) of the log of the mean variance of the logits, by "
        "activations; 'by logit': of each logit's variance in the centred link",
        {
            "posterior": "posterior",
            "kind": "activations (how many)",
            "way": "head",
            **dict(zip(TESTED, TESTED, strict=True)),
            "logits": "clean, by logit",
        },
        dict.fromkeys((*TESTED, "logits"), ".3f"),
    ),
    "curve": (
        "R² by the number of images fitted, most activations; beyond the test images "
        "with images that the network was trained on",
        {
            "n": "images",
            "way": "head",
            **dict(zip(TESTED, TESTED, strict=True)),
            "±": "standard error, clean",
        },
        dict.fromkeys((*TESTED, "±"), ".3f"),
    ),
    "most": (
        "R² with all images, test, training and corrupted ones; the types of half of "
        "the corrupted images that are tested are among them",
        {
            "posterior": "posterior",
            "n": "images",
            "way": "head",
            **dict(zip(TESTED, TESTED, strict=True)),
            "±": "standard error, clean",
        },
        dict.fromkeys((*TESTED, "±"), ".3f"),
    ),
    "unseen": (
        "R² of the mean of the heads on every second type of corruption, the others "
        "being among the images fitted in the second row; and shares flagged by the "
        "nearest neighbour",
        {
            "sources": "fitted on",
            **dict(zip(TESTED, TESTED, strict=True)),
            **{f"{name} flagged": f"{name}: flagged" for name in TESTED},
        },
        dict.fromkeys((*TESTED, *(f"{name} flagged" for name in TESTED)), ".3f"),
    ),
    "flags": (
        "Flags that let 95 % of clean calibration images pass, for the mean of the "
        "heads on most activations: R² of all and of those not flagged, RMS errors of "
        "the log variance, rank correlation of distance and absolute error",
        {
            "posterior": "posterior",
            "rule": "distance",
            "set": "images",
            "flagged": "flagged",
            "all": "R², all",
            "unflagged": "R², not flagged",
            "error": "error, not flagged",
            "error flagged": "error, flagged",
            "rank": "rank correlation",
        },
        dict.fromkeys(
            ("flagged", "all", "unflagged", "error", "error flagged", "rank"), ".3f"
        ),
    ),
    "probabilities": (
        "Probabilities by the centred probit link, with the softmax temperature that "
        "suits exact features; differences of the NLL with standard errors, and mean "
        "total variation from the probabilities by exact features",
        {
            "set": "images",
            "method": "method",
            "nll": "NLL",
            "ece": "ECE",
            "beyond scaling": "NLL beyond temperature scaling",
            "beyond exact": "NLL beyond exact",
            "distance": "distance from exact",
        },
        {"nll": ".4f", "ece": ".4f", "distance": ".4f"},
    ),
    "costs": (
        "Costs of a batch of 48 images, in forward passes",
        {"what": "what", "passes": "passes"},
        {"passes": ".2f"},
    ),
}


def page(found: dict[str, list[dict[str, Any]]], sizes: Sizes) -> str:
    note = (
        f"ResNet-20, M = {sizes.M:,}, {sizes.posterior:,} images fitted; heads fitted "
        f"on {sizes.head:,} test images unless said otherwise, calibrated on "
        f"{sizes.calibration:,}, tested on {sizes.clean:,} clean and "
        f"{sizes.corrupted:,} corrupted images for each severity, all types in turn.\n"
    )
    parts = [note]
    for name in (name for name in HEADINGS if name in found):
        title, columns, digits = HEADINGS[name]
        parts.append(f"**{title}**\n")
        parts.append(runs.markdown(found[name], columns, digits))
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("one_pass", __doc__)
    parser.add_argument(
        "--most", action="store_true", help="only the heads of all images, most.md"
    )
    args = runs.start(parser, argv)
    sizes = SMOKE if args.smoke else Sizes()
    found = tables(args, sizes)
    name = "most" if args.most else "one_pass"
    text = page(found, sizes)
    (args.out / f"{name}.md").write_text(text)
    runs.write_environment(args.out / "environment.json", args)
    print(text)
    return found["most" if args.most else "activations"]


if __name__ == "__main__":
    main(sys.argv[1:])
