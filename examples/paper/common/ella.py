"""One basis, cached features, and every posterior that can be made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch import nn
from tqdm.auto import tqdm

from common.data import Images
from common.protocols import Fold, Outcome
from laplace_ella import (
    EarlyStopping,
    ELLALaplace,
    FeatureCache,
    metrics,
    temperature_scaling,
)

#: Images in one file of features: what an interruption can lose.
SHARD = 500


def fit_basis(
    model: nn.Module,
    train: Images,
    path: Path,
    *,
    n_eigenvalues: int,
    subsample_size: int = 2000,
    seed: int = 0,
    prior_precision: float = 1.0,
    batch_size: int = 48,
    **settings: Any,
) -> ELLALaplace:
    """ELLA with its directions, and no data in it yet; read from `path` if there.

    The curvature is added up from cached features, for any number of images.
    """
    la = Laplace(
        model,
        "classification",
        "all",
        "nystrom",
        n_eigenvalues=n_eigenvalues,
        subsample_size=subsample_size,
        seed=seed,
        prior_precision=prior_precision,
        **settings,
    )
    if path.exists():
        la.load_state_dict(torch.load(path, weights_only=True))
        la.prior_precision = prior_precision
    else:
        la.fit_basis(train.loader(batch_size), progress_bar=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(la.state_dict(), path)
    return la


def cached_features(
    la: ELLALaplace,
    images: Images,
    folder: Path,
    *,
    residual: bool = True,
    batch_size: int = 48,
    shard: int = SHARD,
    skipped_shards: int = 0,
    quiet: bool = False,
) -> FeatureCache:
    """Features of images, in files of `shard` images; files that exist are read.

    With `residual` the cache serves both settings of the complement. The images of the
    first `skipped_shards` files are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    complement, la.complement = la.complement, "prior" if residual else "drop"
    caches = []
    starts = range(skipped_shards * shard, len(images), shard)
    bar = tqdm(starts, f"features of {folder.name}", mininterval=5, disable=quiet)
    for start in bar:
        part = images[start : start + shard]
        path = folder / f"{start:06d}_{len(part)}.pt"
        if path.exists():
            cache = FeatureCache.load(path)
        else:
            cache = FeatureCache.from_loader(la, part.loader(batch_size))
            cache.save(path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
        caches.append(cache)
    la.complement = complement
    return FeatureCache.concatenate(caches)


@dataclass
class Study:
    """ELLA posteriors of one basis: any rank, any prefix of the data, any prior.

    Attributes
    ----------
    la : ELLALaplace
        with the directions; each posterior takes the place of the one before
    train : FeatureCache
        features of the data to fit, of which prefixes are used
    """

    la: ELLALaplace
    train: FeatureCache

    def __post_init__(self) -> None:
        self.train = self.train.without_residual()  # curvature needs features only
        self.la.fit_features(self.train[:0])  # whatever was fitted before is gone
        # Fits of prefixes at full rank, which contain those of every lower rank.
        self._fits: dict[int, dict[str, Any]] = {0: self.la.state_dict()}

    def posterior(
        self,
        rank: int,
        n_data: int | None = None,
        *,
        prior_precision: float = 1.0,
        complement: str = "drop",
        n_effective: float | None = None,
        softmax_temperature: float = 1.0,
    ) -> ELLALaplace:
        """The posterior of the first images, as `fit` on them would give it.

        `n_effective` scales its curvature to that of so many images.
        """
        n_data = len(self.train) if n_data is None else n_data
        la = self.la
        la.load_state_dict(self._fit(n_data))
        la.truncate(rank)
        la.prior_precision = prior_precision
        la.complement = complement
        la.temperature = 1.0 if n_effective is None else n_data / n_effective
        la.softmax_temperature = softmax_temperature
        return la

    def chosen(
        self, setting: Setting, chosen: dict[str, float], prior_precision: float
    ) -> ELLALaplace:
        """The posterior of a setting, with what `choose` chose for it."""
        return self.posterior(
            setting.rank,
            None if "N" not in chosen else int(chosen["N"]),
            prior_precision=chosen.get("prior", prior_precision),
            complement=setting.complement,
            n_effective=chosen.get("N_eff"),
            softmax_temperature=chosen.get("τ", 1.0),
        )

    def _fit(self, n_data: int) -> dict[str, Any]:
        """The state of the fit of the first images."""
        if n_data not in self._fits:
            # Go on from the longest prefix that is added up already.
            done = max(n for n in self._fits if n < n_data)
            self.la.load_state_dict(self._fits[done])
            self.la.fit_features(self.train[done:n_data], override=False)
            self._fits[n_data] = self.la.state_dict()
        return self._fits[n_data]

    def stop_early(
        self,
        validation: FeatureCache,
        rank: int,
        link: str,
        **settings: Any,
    ) -> tuple[int, list[dict[str, float]]]:
        """The number of images with the lowest validation NLL, as the paper stops.

        The checkpoints and the patience are those of `fit(..., early_stopping=True)`.
        """
        plan = EarlyStopping(link_approx=link)
        history: list[dict[str, float]] = []
        best, waited = (float("inf"), 0), 0
        for n in plan.checkpoints():
            if n > len(self.train) or waited >= plan.patience:
                return best[1] or len(self.train), history
            la = self.posterior(rank, n, **settings)
            value = metrics.nll(predict(la, validation, link), validation.targets)
            history.append({"n_data": n, "nll": value})
            best, waited = ((value, n), 0) if value < best[0] else (best, waited + 1)
        raise AssertionError("the checkpoints never end")


def last_layer_study(
    head: nn.Linear,
    embedded: dict[str, Images],
    folder: Path,
    *,
    residual: bool = True,
    **settings: Any,
) -> tuple[Study, dict[str, FeatureCache]]:
    """ELLA of the last layer, a linear network on the embeddings, and features.

    `embedded` holds what the last layer sees of the images to 'fit', and of others.
    """
    la = fit_basis(head, embedded["fit"], folder / "last_layer.pt", **settings)
    features = {
        which: cached_features(
            la, part, folder / f"last_layer_{which}", residual=residual
        )
        for which, part in embedded.items()
    }
    return Study(la, features["fit"]), features


@dataclass(frozen=True)
class Setting:
    """One way to use ELLA.

    `search` is 'stop' (as the paper: the number of data), 'none' (all training data),
    'temperature', 'prior' (all training data), 'both', 'evidence' or 'calibrated'
    (prior, temperature and softmax temperature).
    """

    rank: int
    search: str
    complement: str = "drop"

    def __str__(self) -> str:
        how = {
            "stop": "early stopping",
            "none": "all data",
            "temperature": "tempered",
            "prior": "all data, prior chosen",
            "both": "tempered, prior chosen",
            "evidence": "all data, prior by evidence",
            "calibrated": "calibrated",
        }[self.search]
        extra = ", complement" if self.complement == "prior" else ""
        return f"ELLA K={self.rank}, {how}{extra}"


def choose(
    study: Study,
    setting: Setting,
    link: str,
    validation: FeatureCache,
    prior_precision: float,
    n_train: int,
) -> tuple[ELLALaplace, dict[str, float]]:
    """The posterior of a setting, with what it leaves open chosen on validation data.

    `n_train` is the number of all training data, `prior_precision` the prior where it
    is not chosen.
    """
    k, complement = setting.rank, setting.complement
    validation = validation.truncate(k)  # once, for all that is tried
    search = {"link_approx": link, "n_samples": 128}
    if setting.search == "stop":
        n, _ = study.stop_early(
            validation, k, link, prior_precision=prior_precision, complement=complement
        )
        la = study.posterior(
            k, n, prior_precision=prior_precision, complement=complement
        )
        return la, {"N": n}
    la = study.posterior(
        k, prior_precision=prior_precision, n_effective=n_train, complement=complement
    )
    if setting.search == "evidence":
        la.optimize_prior_precision(method="marglik", n_steps=200)
    elif setting.search == "prior":
        la.optimize_prior_precision(
            method="gridsearch", val_loader=validation, grid_size=25, **search
        )
    elif setting.search in ("temperature", "both"):
        la.optimize_temperature(
            validation, tune_prior=setting.search == "both", **search
        )
    chosen = {}
    if setting.search == "calibrated":
        found = la.optimize_calibration(validation, **search)
        chosen = {"τ": found.softmax_temperature, "share": found.share}
    prior = {"prior": float(la.prior_precision), "N_eff": la.effective_n_data}
    return la, {**prior, **chosen}


def on_fold(
    study: Study,
    setting: Setting,
    link: str,
    fold: Fold,
    features: dict[str, FeatureCache],
    prior_precision: float,
    n_train: int,
) -> Outcome:
    """Choose on the fold's validation images, predict its test images."""
    chosen_on = features[fold.where][fold.choose]
    la, chosen = choose(study, setting, link, chosen_on, prior_precision, n_train)
    val_nll = metrics.nll(predict(la, chosen_on, link), chosen_on.targets)
    probs = predict(la, features["test"][fold.predict], link)
    return Outcome(probs, val_nll, chosen)


def describe(chosen: dict[str, float]) -> str:
    """What was chosen, in a word."""
    return " ".join(f"{name}={value:.3g}" for name, value in chosen.items())


def predict(
    la: ELLALaplace, cache: FeatureCache, link: str, n_samples: int = 512
) -> torch.Tensor:
    """Class probabilities `(N, C)` of cached images, by the posterior as it is."""
    return la.predict_from_cache(cache, link_approx=link, n_samples=n_samples)


def scale_on_fold(
    logits: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], fold: Fold
) -> Outcome:
    """Temperature scaling: choose on the fold's validation images, predict its test."""
    f, y = logits[fold.where][fold.choose], targets[fold.where][fold.choose]
    t = temperature_scaling(f, y)
    val_nll = metrics.nll((f / t).softmax(-1), y)
    probs = (logits["test"][fold.predict] / t).softmax(-1)
    return Outcome(probs, val_nll, {"τ": t})


@torch.no_grad()
def forward(model: nn.Module, x: torch.Tensor, batch: int = 100) -> torch.Tensor:
    """Outputs of a network, batch after batch."""
    parts = [model(part) for part in x.split(batch)]
    return torch.cat(parts)
