"""Does the spectrum outside the basis help classification? A dense study on digits.

    python examples/paper/outside_classification.py

Explicit Jacobians of a small network, float64, K = 20 directions of the rows Λ^{1/2}J,
which have the curvature's weight. Prior by the evidence, of the basis and of the whole
spectrum; then prior and temperature on validation data, for every complement. Writes
`results/calibrated/spectrum.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from calibrated import PUBLISHED, noisy_digits, small_network
from common.data import Images
from torch import nn
from torch.func import functional_call, jacrev, vmap

RANK = 20
NONE = 1e14


@dataclass
class Inputs:
    """Logits, their gradients in the basis, in the span outside it, and outside."""

    f: torch.Tensor
    y: torch.Tensor
    phi: torch.Tensor
    mid: torch.Tensor
    outside: torch.Tensor


def jacobians(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    params = {k: v.detach() for k, v in model.named_parameters()}

    def output(params: dict, one: torch.Tensor) -> torch.Tensor:
        return functional_call(model, params, (one[None],))[0]

    parts = []
    for some in x.double().split(100):
        J = vmap(jacrev(output), (None, 0))(params, some)
        parts.append(torch.cat([v.flatten(2) for v in J.values()], 2))
    return torch.cat(parts)


class Study:
    def __init__(self, steps: int, seed: int = 0) -> None:
        train, val, test = noisy_digits()
        self.model = small_network(train, steps, nn.Tanh).double()
        with torch.no_grad():
            f = self.model(train.x.double())
        p = f.softmax(-1)
        root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
        rows = (root.mT @ jacobians(self.model, train.x)).flatten(0, 1)
        _, s, V = torch.linalg.svd(rows, full_matrices=False)
        self.values, self.V = s.square(), V
        self.loss = float(nn.functional.cross_entropy(f, train.y, reduction="sum"))
        self.norm = float(sum(p.square().sum() for p in self.model.parameters()))
        self.val, self.test = self.inputs(val), self.inputs(test)
        generator = torch.Generator().manual_seed(seed)
        self.noise = torch.randn(256, 10, generator=generator).double()

    def inputs(self, images: Images) -> Inputs:
        J = jacobians(self.model, images.x)
        phi, mid = (J @ self.V.T).tensor_split([RANK], dim=-1)
        with torch.no_grad():
            f = self.model(images.x.double())
        outside = J @ J.mT - phi @ phi.mT - mid @ mid.mT
        return Inputs(f, images.y, phi, mid, outside)

    def evidence(self, prior: float, values: torch.Tensor) -> float:
        occam = float(torch.log1p(values / prior).sum())
        return -self.loss - 0.5 * occam - 0.5 * prior * self.norm

    def covariance(
        self, at: Inputs, prior: float, T: float, within: float | None, beyond: float
    ) -> torch.Tensor:
        """`within` the span outside the basis, None for its own curvature."""
        top, tail = self.values[:RANK] / T, self.values[RANK:] / T
        weights = 1 / (tail + prior) if within is None else torch.ones(()) / within
        inside = (at.phi / (top + prior)) @ at.phi.mT
        return inside + (at.mid * weights) @ at.mid.mT + at.outside / beyond

    def nll(self, at: Inputs, covariance: torch.Tensor) -> float:
        values, Q = torch.linalg.eigh(covariance)
        root = Q * values.clamp_min(0).sqrt()[:, None, :]
        samples = at.f + torch.einsum("bcd,sd->sbc", root, self.noise)
        p = samples.softmax(-1).mean(0)
        return float(-p.gather(1, at.y[:, None]).log().mean())

    def matched(self, prior: float, T: float) -> float:
        tail = self.values[RANK:] / T
        return float(tail.sum() / (tail / (tail + prior)).sum())

    def ways(self) -> dict[str, Callable[[Inputs, float, float], torch.Tensor]]:
        return {
            "dropped": lambda at, d, T: self.covariance(at, d, T, NONE, NONE),
            "at the prior": lambda at, d, T: self.covariance(at, d, T, d, d),
            "matched": lambda at, d, T: self.covariance(
                at, d, T, self.matched(d, T), d
            ),
            "exact": lambda at, d, T: self.covariance(at, d, T, None, d),
        }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PUBLISHED)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--grid", type=int, default=13)
    args = parser.parse_args(argv)
    study = Study(args.steps)
    priors = np.logspace(-3, 4, 60)
    by_evidence = {
        name: priors[np.argmax([study.evidence(d, values) for d in priors])]
        for name, values in (
            ("basis", study.values[:RANK]),
            ("whole", study.values),
        )
    }
    grid = np.logspace(-1, 5, args.grid)
    lines = [
        "| complement | evidence of the basis | of the whole spectrum | on validation "
        "data (prior, T) |",
        "|---|---|---|---|",
    ]
    plain = study.nll(study.test, 0 * study.test.outside)
    lines.append(f"| MAP | {plain:.4f} | | |")
    for name, way in study.ways().items():
        tuned = [
            study.nll(study.test, way(study.test, d, 1)) for d in by_evidence.values()
        ]
        pairs = [(d, T) for d in grid for T in grid]
        losses = [study.nll(study.val, way(study.val, *pair)) for pair in pairs]
        best = pairs[int(np.argmin(losses))]
        tuned.append(study.nll(study.test, way(study.test, *best)))
        lines.append(f"| {name} | " + " | ".join(f"{v:.4f}" for v in tuned) + " |")
    args.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n"
    (args.out / "spectrum.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
