"""laplace-torch's own posteriors over all layers, on as many images as it can serve.

Each prediction needs the Jacobian `(C, P)` of an image, so tuning as laplace-torch does
it, with new Jacobians for every candidate, is out of reach. Here the Jacobian of an
image is computed once, and `functional_variance` of each posterior is called on it for
a few priors; temperature and prior are chosen from these (`common.covariances`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch import nn
from tqdm.auto import tqdm

from common import covariances, runs
from common.data import Images
from common.protocols import Fold, Outcome
from laplace_ella import metrics

#: γ = prior precision · temperature for which covariances are computed.
GAMMAS = tuple(10.0**e for e in range(-3, 6))

#: Images in one file: what an interruption can lose.
SHARD = 50


@dataclass(frozen=True)
class Sizes:
    """What laplace-torch's all-layer posteriors are fitted on."""

    n_fit: int = 200
    subsample_size: int = 100
    n_eigenvalues: int = 20
    n_steps: int = 100


@dataclass
class AllLayers:
    """The diagonal posterior and laplace-torch's ELLA of one network.

    Attributes
    ----------
    model, train : the network and the images that may be fitted
    folder : Path
        for covariances
    n_train : int
        number of all training data, to which 'all data' scales the curvature
    prior : float
        prior precision where it is not chosen
    """

    model: nn.Module
    train: Images
    folder: Path
    sizes: Sizes
    n_train: int
    prior: float

    @cached_property
    def diag(self) -> Any:
        la = Laplace(self.model, "classification", "all", "diag")
        la.fit(self.train[: self.sizes.n_fit].loader(4), progress_bar=True)
        return la

    @cached_property
    def ella(self) -> Any:
        la = Laplace(
            self.model,
            "classification",
            "all",
            "gp",
            functional_approximation="nystrom",
            subsample_size=self.sizes.subsample_size,
            n_eigenvalues=self.sizes.n_eigenvalues,
        )
        la.fit(self.train[: self.sizes.n_fit].loader(4))
        return la

    @cached_property
    def all_data(self) -> float:
        """The temperature that scales the curvature to all training data."""
        return self.sizes.n_fit / self.n_train

    @cached_property
    def evidence_prior(self) -> float:
        """The prior precision with the highest evidence for all training data."""
        path = self.folder / "evidence_prior.pt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.diag.temperature = self.all_data
            self.diag.optimize_prior_precision(
                method="marglik", n_steps=self.sizes.n_steps
            )
            torch.save(float(self.diag.prior_precision), path)
        return torch.load(path, weights_only=True)

    @property
    def gammas(self) -> dict[str, list[float]]:
        """γ of each posterior; the first is that of all data and its own prior."""
        return {
            "diag": [self.evidence_prior * self.all_data, *GAMMAS],
            "ella": [self.prior * self.all_data, *GAMMAS],
        }

    def covariances(self, which: str, images: Images) -> dict[str, torch.Tensor]:
        """f_mu `(N, C)` and output covariances `(N, γ, C, C)` of both posteriors."""
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = []
        starts = range(0, len(images), SHARD)
        for start in tqdm(starts, desc=f"all-layer covariances of {which}"):
            x = images.x[start : start + SHARD]
            path = self.folder / f"{which}_{start:06d}_{len(x)}.pt"
            if not path.exists():
                torch.save(self._covariances(x), path.with_suffix(".tmp"))
                path.with_suffix(".tmp").replace(path)
            parts.append(torch.load(path, weights_only=True))
        return {k: torch.cat([p[k] for p in parts]) for k in parts[0]}

    def _covariances(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        posteriors = {"diag": self.diag, "ella": self.ella}
        out: dict[str, list[torch.Tensor]] = {"f_mu": [], "diag": [], "ella": []}
        gammas = self.gammas
        for part in x.split(2):
            Js, f_mu = self.diag.backend.jacobians(part)
            Js = Js.detach()
            out["f_mu"].append(f_mu.detach())
            for name, la in posteriors.items():
                la.temperature = 1.0
                f_vars = []
                for gamma in gammas[name]:
                    la.prior_precision = gamma
                    f_vars.append(la.functional_variance(Js).detach())
                out[name].append(torch.stack(f_vars, 1))
        return {k: torch.cat(v).float() for k, v in out.items()}

    def fixed(self, name: str, link: str, fold: Fold, data: dict[str, Any]) -> Outcome:
        """All data, with the prior of the highest evidence (diag) or the given one."""
        test = data["test"]
        values = covariances.root(
            test["f_mu"][fold.predict], test[name][fold.predict, 0]
        )
        probs = covariances.probabilities(values, self.all_data, link)
        prior = self.gammas[name][0] / self.all_data
        return Outcome(probs, None, {"prior": prior, "N_eff": float(self.n_train)})

    def tuned(
        self,
        name: str,
        link: str,
        fold: Fold,
        data: dict[str, Any],
        targets: dict[str, torch.Tensor],
    ) -> Outcome:
        """Temperature and prior with the lowest NLL on the fold's images."""
        given = data[fold.where]
        f_mu, y = given["f_mu"][fold.choose], targets[fold.where][fold.choose]
        gammas = self.gammas[name]

        def pairs() -> Iterator[tuple[float, torch.Tensor]]:
            for i, gamma in enumerate(gammas):
                yield gamma, given[name][fold.choose, i]

        gamma, t = covariances.choose(f_mu, pairs(), y, link)
        i = gammas.index(gamma)
        chosen_on = covariances.root(f_mu, given[name][fold.choose, i])
        val_nll = metrics.nll(covariances.probabilities(chosen_on, t, link), y)
        test = data["test"]
        values = covariances.root(
            test["f_mu"][fold.predict], test[name][fold.predict, i]
        )
        chosen = {"prior": gamma / t, "N_eff": self.sizes.n_fit / t}
        return Outcome(covariances.probabilities(values, t, link), val_nll, chosen)


def attempts(model: nn.Module, images: Images) -> list[dict[str, Any]]:
    """What laplace-torch's all-layer approximations say on a network with BatchNorm."""
    rows = []
    for structure in ("kron", "diag", "full", "gp"):
        name = {"gp": "laplace-torch's ELLA"}.get(structure, structure)
        extra = {}
        if structure == "gp":
            extra = {
                "functional_approximation": "nystrom",
                "subsample_size": len(images) // 2,
                "n_eigenvalues": max(1, len(images) // 4),
            }
        if structure == "full":
            n = sum(p.numel() for p in model.parameters())
            note = f"not run: {n:,}² floats are {4 * n**2 / 2**30:.0f} GiB"
            rows.append({"method": f"all layers, {name}", "outcome": note})
            continue
        try:
            with runs.stopwatch() as times:
                la = Laplace(model, "classification", "all", structure, **extra)
                la.fit(images.loader(4))
            with runs.stopwatch() as prediction:
                la(images.x[:2], pred_type="gp" if extra else "glm")
            note = (
                f"runs: fit {times['cpu'] / len(images):.2f} s per image, prediction "
                f"{prediction['cpu'] / 2:.2f} s per image (CPU time)"
            )
        except Exception as error:  # whatever it raises is the result
            text = str(error).strip().splitlines() or [""]
            note = f"fails: {type(error).__name__}: {text[0][:200]}"
        rows.append({"method": f"all layers, {name}", "outcome": note})
    return rows
