"""Laplace on the last layer, by laplace-torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common import covariances


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

    def predict(
        self, structure: str, x: torch.Tensor, link: str, chosen: dict[str, float]
    ) -> torch.Tensor:
        """Class probabilities of embeddings, by laplace-torch's own prediction."""
        la, _ = self.fit(structure)
        # In this order: only the prior makes Laplace factorise again.
        la.temperature = len(self.embeddings["train"]) / chosen["N_eff"]
        la.prior_precision = chosen["prior"]
        torch.manual_seed(0)
        parts = [la(b, link_approx=link, n_samples=512) for b in x.split(1000)]
        return torch.cat(parts).detach()

    def choose(
        self, structure: str, search: str, link: str, x: torch.Tensor, y: torch.Tensor
    ) -> dict[str, float]:
        """The prior of the highest evidence ('evidence'), or the prior and the
        effective number of data of the lowest NLL on x and y ('both')."""
        la, prior = self.fit(structure)
        n_data = len(self.embeddings["train"])
        if search == "evidence":
            return {"prior": prior, "N_eff": n_data}
        step = 2 if self.smoke else 0.5
        coarse = np.arange(-2, 5.1, step)
        f_mu = self.head(x).detach()
        gamma, t = covariances.choose(f_mu, self._f_vars(la, x, coarse), y, link)
        near = np.log10(gamma) + np.array([-0.25, 0, 0.25])
        gamma, t = covariances.choose(f_mu, self._f_vars(la, x, near), y, link)
        return {"prior": gamma / t, "N_eff": n_data / t}

    @staticmethod
    def _f_vars(
        la: Any, x: torch.Tensor, log_gammas: np.ndarray
    ) -> Iterator[tuple[float, torch.Tensor]]:
        """Output covariances of (H + γ)⁻¹, for every γ."""
        la.temperature = 1.0
        Js, _ = la.backend.jacobians(x)
        for gamma in 10**log_gammas:
            la.prior_precision = float(gamma)
            yield float(gamma), la.functional_variance(Js.detach()).detach()
