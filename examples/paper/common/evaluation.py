"""Rows of a table, one method, link and protocol at a time, with their predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import ella, runs
from common.protocols import Fold, Outcome, folds
from laplace_ella import metrics

#: What the tables of methods show, and how it is called there.
COLUMNS = {
    "method": "method",
    "link": "link",
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "val_nll": "validation NLL",
    "chosen": "chosen",
}


@dataclass
class Evaluation:
    """Scores on test images and the files of their class probabilities.

    Attributes
    ----------
    results : runs.Results
        rows that are there already are not computed again
    folder : Path
        of the predictions
    targets : dict
        classes of 'test' images and of those that settings are chosen on
    protocols : list of str
        what `add` runs through unless told, and `best`
    """

    results: runs.Results
    folder: Path
    targets: dict[str, torch.Tensor]
    protocols: list[str]

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def folds(self, protocol: str) -> list[Fold]:
        return folds(protocol, {name: len(y) for name, y in self.targets.items()})

    def add(
        self,
        method: str,
        link: str,
        run: Callable[[Fold], Outcome],
        protocols: Iterable[str] | None = None,
    ) -> None:
        """A row for each protocol, unless it is there already."""
        for protocol in self.protocols if protocols is None else protocols:
            self.results.compute(
                f"{protocol} | {method} | {link}",
                lambda p=protocol: self._row(method, link, p, run),
            )

    def _row(
        self, method: str, link: str, protocol: str, run: Callable[[Fold], Outcome]
    ) -> dict[str, Any]:
        splits = self.folds(protocol)
        outcomes = [run(fold) for fold in splits]
        n_classes = outcomes[0].probs.shape[-1]
        probs = torch.empty(len(self.targets["test"]), n_classes)
        for fold, outcome in zip(splits, outcomes, strict=True):
            probs[fold.predict] = outcome.probs.float()
        torch.save(probs, self.path(method, link, protocol))
        scores = [o.val_nll for o in outcomes]
        return {
            "protocol": protocol,
            "method": method,
            "link": link,
            **metrics.classification_metrics(probs, self.targets["test"]),
            "val_nll": None if None in scores else float(np.mean(scores)),
            "fold_val_nll": scores,
            "chosen": "; ".join(ella.describe(o.chosen) for o in outcomes if o.chosen),
        }

    def path(self, method: str, link: str, protocol: str) -> Path:
        name = "".join(c if c.isalnum() else "_" for c in f"{protocol} {method} {link}")
        return self.folder / f"{name}.pt"

    def probs(self, method: str, link: str, protocol: str) -> torch.Tensor | None:
        """Stored class probabilities `(N, C)` of the test images."""
        path = self.path(method, link, protocol)
        return torch.load(path, weights_only=True) if path.exists() else None

    def best(
        self,
        family: str,
        among: set[tuple[str, str]] | None = None,
        prefixes: tuple[str, ...] = (),
    ) -> list[dict[str, Any]]:
        """The setting of a family with the lowest validation NLL, fold by fold.

        Methods belong to it if they begin with its name, or with one of `prefixes`.
        `among` restricts it to some methods and links.
        """
        rows = []
        for protocol in self.protocols:
            candidates = [
                r
                for r in self.results.rows.values()
                if r.get("protocol") == protocol
                and r["method"].startswith(prefixes or family)
                and (among is None or (r["method"], r["link"]) in among)
            ]
            if not candidates:
                continue
            probs, names, scores = None, [], []
            for i, fold in enumerate(self.folds(protocol)):
                best = min(candidates, key=lambda r, i=i: r["fold_val_nll"][i])
                stored = self.probs(best["method"], best["link"], protocol)
                probs = torch.empty_like(stored) if probs is None else probs
                probs[fold.predict] = stored[fold.predict]
                names.append(f"{best['method']}, {best['link']}")
                scores.append(best["fold_val_nll"][i])
            method = f"best {family} on validation"
            torch.save(probs, self.path(method, "chosen", protocol))
            rows.append(
                {
                    "protocol": protocol,
                    "method": method,
                    "link": "chosen",
                    **metrics.classification_metrics(probs, self.targets["test"]),
                    "val_nll": float(np.mean(scores)),
                    "chosen": "; ".join(dict.fromkeys(names)),
                }
            )
        return rows
