"""Tables of how well heads predict exact variances, for `one_pass.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from common import ella
from common.cifar import N_VALIDATION, PAPER_PRIOR
from common.corruptions import CORRUPTIONS
from common.data import Images, cifar10
from common.models import ResNet
from common.one_pass_data import (
    RICHEST,
    TESTED,
    Exact,
    Sizes,
    all_activations,
    exact,
    linked,
)
from common.one_pass_heads import (
    MEAN,
    Head,
    Heads,
    explained,
    explained_error,
    fitted_line,
    rms,
)
from laplace_ella import ELLALaplace, metrics, temperature_scaling

__all__ = ["Study", "study_of"]

#: Share of clean images that a threshold lets pass.
PASSED = 0.95


def difference(probs: torch.Tensor, other: torch.Tensor, y: torch.Tensor) -> str:
    """Mean difference of the NLL and its standard error."""
    beyond = metrics.nll_per_example(probs, y) - metrics.nll_per_example(other, y)
    return f"{float(beyond.mean()):+.4f} ± {float(beyond.std() / len(y) ** 0.5):.4f}"


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

    @property
    def first(self) -> str:
        """The name of the smaller posterior."""
        return next(iter(self.posteriors))

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
        return [*rows, {"posterior": self.first, **self.by_features(self.first)}]

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
        rows, posterior = [], self.first
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
        rows, posterior = [], self.first
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
