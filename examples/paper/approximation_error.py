"""How far ELLA is from exact linearised Laplace: Fig. 2 (a) and (b) of the paper.

    python examples/paper/approximation_error.py

Deng, Zhou and Zhu (NeurIPS 2022), Sec. 5.1: their MNIST network with 29,034 parameters
and its checkpoint, here on 400 training images, so that all 4,000 gradients fit in
memory. For every M and K ≤ M, ε_Nyström is the relative error of the approximated
kernel matrix of the training data, ε_ELLA the mean relative error of the covariance
of other images, both in spectral norm. Exact matrices come from explicit Jacobians.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from common import runs
from common.data import Images, mnist
from common.models import mnist_convnet
from laplace import Laplace
from torch import nn
from torch.func import functional_call, jacrev, vmap

from laplace_ella import prior_precision_from_weight_decay

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import LogNorm

SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ERRORS = {"nystrom": "ε_Nyström", "ella": "ε_ELLA", "prior": "ε_ELLA, complement kept"}

#: Errors by (M, K).
Grid = dict[tuple[int, int], float]


def jacobians(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the Jacobians `(N, C, P)` of all parameters."""
    params = {k: v.detach() for k, v in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def output(params: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return functional_call(model, {**params, **buffers}, (one[None],))[0]

    parts = []
    for some in x.split(50):
        J = vmap(jacrev(output), (None, 0))(params, some)
        parts.append(torch.cat([v.flatten(2) for v in J.values()], 2))
    return torch.cat(parts)


@dataclass(frozen=True)
class Exact:
    """Kernel of the training data and predictive covariances of others, in float64.

    Attributes
    ----------
    kernel : torch.Tensor
        J Jᵀ of the training data `(N·C, N·C)`
    own : torch.Tensor
        J Jᵀ of each validation input `(V, C, C)`
    covariances : torch.Tensor
        exact linearised Laplace's, `(V, C, C)`
    roots : torch.Tensor
        Λ^{1/2} of the softmax at the training data `(N, C, C)`
    """

    kernel: torch.Tensor
    own: torch.Tensor
    covariances: torch.Tensor
    roots: torch.Tensor


def exact_posterior(
    model: nn.Module, train: Images, val: Images, prior: float
) -> Exact:
    """Compute what ELLA approximates from explicit Jacobians."""
    J, J_val = jacobians(model, train.x), jacobians(model, val.x)
    with torch.no_grad():
        p = model(train.x).double().softmax(-1)
    # Λ = diag(p) − ppᵀ = R Rᵀ
    roots = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    rows = J.flatten(0, 1)
    kernel = (rows @ rows.T).double()  # (N·C, N·C)
    cross = (J_val.flatten(0, 1) @ rows.T).double().unflatten(0, J_val.shape[:2])
    own = (J_val @ J_val.mT).double()
    # J_v (JᵀRRᵀJ + δ)⁻¹ J_vᵀ = (J_v J_vᵀ − B (δ + A)⁻¹ Bᵀ) / δ
    big = torch.block_diag(*roots)
    A = big.T @ kernel @ big
    B = cross @ big
    factor = torch.linalg.cholesky(A + prior * torch.eye(len(A), dtype=A.dtype))
    inner = torch.cholesky_solve(B.flatten(0, 1).T, factor).T.unflatten(0, B.shape[:2])
    return Exact(kernel, own, (own - inner @ B.mT) / prior, roots)


def norm(matrix: torch.Tensor) -> torch.Tensor:
    """Return spectral norms of symmetric matrices."""
    return torch.linalg.eigvalsh(matrix).abs().amax(-1)


def errors(
    model: nn.Module, train: Images, val: Images, sizes: list[int], prior: float
) -> dict[str, Grid]:
    """Return the errors at every M and K ≤ M of `sizes`."""
    exact = exact_posterior(model, train, val, prior)
    scale = norm(exact.kernel)
    found: dict[str, Grid] = {name: {} for name in ERRORS}
    for M in sizes:
        la = Laplace(
            model,
            "classification",
            "all",
            "nystrom",
            subsample_size=M,
            n_eigenvalues=M,
        )
        la.fit_basis(train.loader(100))
        phi, phi_val = (
            torch.cat([la.features(part)[1].double() for part in images.x.split(50)])
            for images in (train, val)
        )
        psi = exact.roots.mT @ phi  # (N, C, K)
        # The basis is nested: all K come from one fit.
        for K in sorted({min(K, la.rank) for K in sizes if K <= M}):
            at, some = phi_val[..., :K], phi[..., :K].flatten(0, 1)
            H = torch.einsum("nck,ncl->kl", psi[..., :K], psi[..., :K])
            inverse = torch.linalg.inv(H + prior * torch.eye(K, dtype=H.dtype))
            covariance = at @ inverse @ at.mT
            kept = covariance + (exact.own - at @ at.mT) / prior
            size = norm(exact.covariances)
            missed = exact.kernel - some @ some.T
            found["nystrom"][M, K] = float(norm(missed) / scale)
            for name, value in (("ella", covariance), ("prior", kept)):
                relative = norm(value - exact.covariances) / size
                found[name][M, K] = float(relative.mean())
        print(f"M = {M}: K = {la.rank}, ε_ELLA {found['ella'][M, la.rank]:.3g}")
    return found


def falls(grid: Grid, along: str) -> str:
    """Say in how many steps an error falls along growing K or growing M."""
    axis = "MK".index(along)
    ratios = []
    for cell, value in grid.items():
        smaller = [c for c in grid if c[1 - axis] == cell[1 - axis] and c < cell]
        smaller = [c for c in smaller if c[axis] < cell[axis]]
        if smaller:
            ratios.append(value / grid[max(smaller, key=lambda c: c[axis])])
    down = sum(ratio <= 1 for ratio in ratios)
    largest = f", largest rise {max(ratios) - 1:.1%}" if down < len(ratios) else ""
    return f"falls along {along} in {down} of {len(ratios)} steps{largest}"


def table(grid: Grid) -> str:
    Ms, Ks = (sorted({cell[axis] for cell in grid}) for axis in (0, 1))
    rows: list[dict[str, Any]] = []
    for K in Ks:
        values = {f"M = {M}": grid.get((M, K), "") for M in Ms}
        rows.append({"K": str(K), **values})
    return runs.markdown(rows, ".3g")


def draw(found: dict[str, Grid], path: Path) -> None:
    """Draw both panels of Fig. 2, each on its own logarithmic scale."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for axis, name in zip(axes, ("nystrom", "ella"), strict=True):
        grid = found[name]
        Ms, Ks = (sorted({cell[i] for cell in grid}) for i in (0, 1))
        values = np.array([[grid.get((M, K), np.nan) for M in Ms] for K in Ks])
        image = axis.imshow(values, "cividis", norm=LogNorm(), origin="lower")
        axis.set_xticks(range(len(Ms)), Ms, rotation=45)
        axis.set_yticks(range(len(Ks)), Ks)
        axis.set(xlabel="M, sampled gradients", ylabel="K, directions")
        axis.set_title(ERRORS[name])
        figure.colorbar(image, ax=axis, label="relative error")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("approximation_error", __doc__)
    parser.add_argument("--n-train", type=int, default=400)
    parser.add_argument("--n-val", type=int, default=128)
    parser.add_argument("--weight-decay", type=float, default=5e-4, help="γ")
    args = runs.start(parser, argv)
    if args.smoke:
        args.n_train, args.n_val = 6, 4
    n = args.n_train
    images = mnist(args.data_root, "train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, val = images[order[:n]], images[order[n : n + args.n_val]]
    prior = prior_precision_from_weight_decay(args.weight_decay, n)
    sizes = [size for size in SIZES if size <= 10 * n]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer usable directions than M
        found = errors(mnist_convnet(args.data_root), train, val, sizes, prior)
    draw(found, args.out / "errors.png")
    parts = [
        f"{n} training images, {args.n_val} others, prior precision {prior:g}; one "
        f"draw for each M. {runs.environment(args.threads)}.\n"
    ]
    for name, title in ERRORS.items():
        grid = found[name]
        steps = "; ".join(falls(grid, along) for along in "KM")
        parts.append(f"**{title}** {steps}.\n\n{table(grid)}")
    text = "\n".join(parts)
    (args.out / "errors.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
