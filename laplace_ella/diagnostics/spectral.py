"""Spectral norms: dense, and by Lanczos iteration from products alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = [
    "Apply",
    "lanczos",
    "orthonormal_directions",
    "residual_norms",
    "spectral_norms",
]

#: Vectors `(S, n)`, one for each of S operators, to their images `(S, n)`.
Apply = Callable[[torch.Tensor], torch.Tensor]


def spectral_norms(matrices: torch.Tensor) -> torch.Tensor:
    """Spectral norms of symmetric matrices."""
    return torch.linalg.eigvalsh((matrices + matrices.mT) / 2).abs().amax(-1)


def orthonormal_directions(
    directions: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Vᵀ `(K, P)` on a device, orthonormal also where it is stored in half precision.

    Orthonormalising keeps the spans of the first k directions, for every k.
    """
    directions = directions.to(device)
    if directions.dtype.itemsize >= 4:
        return directions
    return torch.linalg.qr(directions.float().T).Q.T.contiguous()


def lanczos(
    apply: Apply,
    start: torch.Tensor,
    n_values: int = 1,
    n_steps: int = 100,
    tol: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest eigenvalues of S positive semi-definite operators at once.

    Lanczos iteration with full reorthogonalisation; Ritz values are never too large.

    Parameters
    ----------
    apply : callable
        vectors `(S, n)`, one for each operator, to their images `(S, n)`
    start : torch.Tensor
        random vectors `(S, n)`; their dtype is that of the iteration, and
        `n_steps` times their size is the memory
    n_values : int
        how many eigenvalues
    n_steps : int
        calls of `apply` at most
    tol : float
        stop once every residual is below `tol` times the eigenvalue

    Returns
    -------
    values, errors : torch.Tensor
        `(S, n_values)` float64, descending, and the norms of their residuals: an
        eigenvalue of the operator lies within that distance
    """
    n_steps = min(n_steps, start.shape[1])
    q = start / start.norm(dim=1, keepdim=True).clamp_min(1e-300)
    basis, diagonal, off = [q], [], []
    values = errors = torch.zeros(len(start), 0, dtype=torch.float64, device=q.device)
    for _ in range(n_steps):
        w = apply(q).to(q)
        diagonal.append((w.double() * q.double()).sum(1))
        for _ in range(2):  # twice is enough
            for old in basis:
                w = w - (w * old).sum(1, keepdim=True) * old
        beta = w.double().norm(dim=1)
        T = torch.diag_embed(torch.stack(diagonal, 1))
        if off:
            between = torch.diag_embed(torch.stack(off, 1), offset=1)
            T = T + between + between.mT
        ritz, vectors = torch.linalg.eigh(T)
        k = min(n_values, ritz.shape[1])
        values = ritz[:, -k:].flip(1).clamp_min(0)
        errors = beta[:, None] * vectors[:, -1, -k:].flip(1).abs()
        # An exhausted Krylov space goes on with zeros, which add zero eigenvalues.
        noise = 100 * torch.finfo(q.dtype).eps * ritz.abs().amax(1)
        live = beta > noise
        if k == n_values and bool((errors <= tol * values + noise[:, None]).all()):
            break
        if not live.any():
            break
        q = torch.where(live[:, None], w / beta.clamp_min(1e-300).to(w)[:, None], 0)
        off.append(torch.where(live, beta, 0))
        basis.append(q)
    missing = n_values - values.shape[1]
    pad = torch.nn.functional.pad
    return pad(values, (0, missing)), pad(errors, (0, missing))


def residual_norms(
    apply: Apply,
    directions: torch.Tensor,
    ranks: Sequence[int],
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    n_steps: int = 100,
    tol: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """‖J(I − V_kV_kᵀ)Jᵀ‖ for several ranks k of one nested basis; ‖JJᵀ‖ for k = 0.

    Parameters
    ----------
    apply : callable
        v ↦ JᵀJv for rows `(S, P)`
    directions : torch.Tensor
        Vᵀ `(K, P)`, orthonormal rows
    ranks : sequence of int
        between 0 and K
    generator : torch.Generator, optional
        source of the start vectors; the same ones at every call without it
    dtype, n_steps, tol
        of the iteration, see `lanczos`

    Returns
    -------
    norms, errors : torch.Tensor
        `(len(ranks),)`, float64
    """
    K, P = directions.shape
    inside = torch.arange(K, device=directions.device) < torch.as_tensor(
        ranks, device=directions.device
    ).unsqueeze(1)

    def project(v: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # the second time removes the rounding of the first
            z = torch.where(inside, v.to(directions) @ directions.T, 0)
            v = v - (z @ directions).to(v)
        return v

    if generator is None:
        generator = torch.Generator(directions.device).manual_seed(0)
    start = torch.randn(
        len(ranks), P, generator=generator, dtype=dtype, device=directions.device
    )
    values, errors = lanczos(
        # v → (I − VVᵀ)v → JᵀJ(I − VVᵀ)v → (I − VVᵀ)JᵀJ(I − VVᵀ)v
        lambda v: project(apply(project(v)).to(v)),
        project(start),
        n_steps=n_steps,
        tol=tol,
    )
    return values[:, 0], errors[:, 0]
