"""Laplace on the last layer, by laplace-torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import metrics


@dataclass(eq=False)
class LastLayer:
    """Laplace on the last layer: the whole of a linear network on the embeddings."""

    head: nn.Linear
    embeddings: dict[str, torch.Tensor]
    targets: dict[str, torch.Tensor]
    smoke: bool = False

    @cache  # noqa: B019, lives as long as the script
    def fit(self, structure: str) -> tuple[Any, float]:
        """The posterior and the prior precision with the highest evidence."""
        la = Laplace(self.head, "classification", "all", structure)
        data = TensorDataset(self.embeddings["train"], self.targets["train"])
        la.fit(DataLoader(data, batch_size=500))
        la.optimize_prior_precision(
            method="marglik", link_approx="mc", n_steps=5 if self.smoke else 100
        )
        return la, float(la.prior_precision)

    def predict(self, la: Any, x: torch.Tensor, link: str, n: int = 512) -> Any:
        torch.manual_seed(0)
        parts = [la(b, link_approx=link, n_samples=n) for b in x.split(1000)]
        return torch.cat(parts).detach()

    def choose(
        self, structure: str, search: str, link: str, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[Any, dict[str, float]]:
        """The posterior with the prior of the highest evidence ('evidence') or with
        the prior and temperature of the lowest NLL on x and y ('both')."""
        la, evidence_prior = self.fit(structure)
        la.temperature, la.prior_precision = 1.0, evidence_prior
        if search == "evidence":
            return la, {"prior": evidence_prior}

        def loss(point: tuple[float, float]) -> float:
            # In this order: only the prior makes Laplace factorise again.
            la.temperature = 10 ** point[1]
            la.prior_precision = 10 ** point[0]
            return metrics.nll(self.predict(la, x, link, 128), y)

        priors = np.arange(-1, 3.1, 2 if self.smoke else 0.5)
        best = min(((p, t) for p in priors for t in range(-1, 4)), key=loss)
        near = [
            (best[0] + p, best[1] + t)
            for p in (-0.25, 0, 0.25)
            for t in (-0.5, -0.25, 0, 0.25, 0.5)
        ]
        loss(min(near, key=loss))
        n_data = len(self.embeddings["train"])
        return la, {
            "prior": float(la.prior_precision),
            "N_eff": n_data / la.temperature,
        }
