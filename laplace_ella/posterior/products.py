"""Products with all rows of J̃ (M, P), a block of columns at a time.

Index legend: M gradients, P parameters, K rank.
"""

from __future__ import annotations

import torch

from laplace_ella.support.batches import chunks, has_values
from laplace_ella.support.preserve import full_precision

__all__ = [
    "energy",
    "gram",
    "gram_times",
    "multiply",
    "orthonormalize_",
    "working_numbers",
]

#: Columns that enter one product with all rows, and rows of one block of it.
GRAM_WIDTH = 16_384
GRAM_HEIGHT = 256

#: Numbers of one product of all rows with a matrix.
PRODUCT = 2**22

#: Numbers whose squares are added up at once.
BLOCK = 2**14


def energy(rows: torch.Tensor, accurate: bool = False) -> torch.Tensor:
    """Σ of all squares, in float64: of a block in the rows' dtype, unless all are to be
    `accurate`, which takes five times as long."""
    parts = rows.reshape(-1).split(BLOCK)
    if accurate:
        parts = [part.double() for part in parts]
    return torch.stack([torch.dot(part, part) for part in parts]).double().sum()


def gram(rows: torch.Tensor, precision: torch.dtype | None = None) -> torch.Tensor:
    """J̃J̃ᵀ (M, M): products in the rows' dtype unless told, accumulated in float64.

    Only the blocks on and below the diagonal are multiplied.
    """
    converts = precision not in (None, rows.dtype)
    width = GRAM_WIDTH // 8 if converts else GRAM_WIDTH  # copies should be small
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    dtype = rows.dtype if precision is None else precision
    room = rows.new_empty(min(GRAM_HEIGHT, len(rows)) * len(rows), dtype=dtype)
    for columns in chunks(rows.shape[1], width):
        block = rows[:, columns].to(dtype)
        for part in chunks(len(rows), GRAM_HEIGHT):
            product = _product(block[part], block[: part.stop].T, room)
            total[part, : part.stop] += product
    for part in chunks(len(rows), GRAM_HEIGHT):  # in place: copies would be as large
        total[: part.start, part] = total[part, : part.start].T
        square = total[part, part]
        square.copy_(square.tril() + square.tril(-1).T)
    return total


def orthonormalize_(directions: torch.Tensor) -> None:
    """Make rows orthonormal in place, keeping their nested spans (Cholesky-QR).

    Dividing by √λ_k loses digits for small λ_k; this restores orthogonality.
    """
    factor, info = torch.linalg.cholesky_ex(gram(directions))
    if has_values(info) and info.any():  # too close to singular for a Gram matrix
        directions.copy_(torch.linalg.qr(directions.double().T)[0].T)
        return
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    multiply(inverse, directions, out=directions)


def _width(n_rows: int) -> int:
    """Columns of a product that are computed at once."""
    return max(1024, min(GRAM_WIDTH, PRODUCT // max(1, n_rows)))


def working_numbers(n_rows: int, n_columns: int) -> int:
    """Numbers that a decomposition of so many rows takes besides them and their Gram
    matrix: a block of columns in float64, or of a product."""
    return n_rows * min(n_columns, max(GRAM_WIDTH // 8, _width(n_rows)))


def multiply(matrix: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """matrix @ rows into the first rows of `out`, which may be `rows` itself."""
    matrix = matrix.to(rows.dtype)
    width = _width(len(matrix))
    room = rows.new_empty(len(matrix) * min(width, rows.shape[1]))
    for columns in chunks(rows.shape[1], width):
        out[: len(matrix), columns] = _product(matrix, rows[:, columns], room)


def _product(a: torch.Tensor, b: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """ab in memory that is used again, and not in low precision under autocast."""
    n, m = len(a), b.shape[1]
    return torch.mm(a, b, out=room[: n * m].view(n, m))


def gram_times(rows: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """J̃J̃ᵀu for vectors `(M, k)`: products in the rows' dtype, added up in float64."""
    u = vectors.T.to(rows.dtype)
    total = torch.zeros_like(vectors.T)
    for columns in chunks(rows.shape[1], _width(len(u))):
        block = rows[:, columns]
        with full_precision(rows.device):
            total += (u @ block) @ block.T
    return total.T
