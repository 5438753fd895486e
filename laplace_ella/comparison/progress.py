"""How much of a comparison is left: the expected work of each method.

Times of methods differ a thousandfold, so a bar that counts them would say nothing of
the time that is left. Work is counted in forward passes of one example, a gradient as
two; it decides nothing but the bar.

Index legend: N data, C outputs, M Nyström samples, K rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from laplace_ella.comparison.methods import Kind, Method, Tuning

__all__ = ["BAR_FORMAT", "Sizes", "expected_work"]

#: Of bars with the time left, in `tqdm`'s notation.
BAR_FORMAT = "{desc:<32} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"


@dataclass(frozen=True)
class Sizes:
    """Examples of a comparison, and outputs of its model.

    `n_predicted` are those of the test set and of all out-of-distribution sets.
    """

    n_train: int
    n_val: int
    n_predicted: int
    n_outputs: int


def expected_work(
    method: Method, tune: Tuning, sizes: Sizes, grid_size: int, n_links: int
) -> float:
    """Forward passes that fitting, tuning and predicting with a method may take.

    >>> from laplace_ella.comparison.methods import available_methods
    >>> methods, sizes = available_methods(), Sizes(1000, 100, 500, 10)
    >>> for name in ("map", "last-layer-kron", "diag"):
    ...     print(name, expected_work(methods[name], Tuning.GRIDSEARCH, sizes, 21, 2))
    map 500
    last-layer-kron 4100
    diag 86100
    """
    n = sizes
    if method.kind is Kind.MAP:
        return n.n_predicted
    if method.kind is Kind.TEMPERATURE:
        return n.n_val + n.n_predicted
    jacobian = 1 + 2 * n.n_outputs
    if method.is_ella:
        rank = method.kwargs.get("n_eigenvalues")
        by_forward = 1 + 2 * rank if isinstance(rank, int) else jacobian
        features = min(jacobian, by_forward)
        pairs = n.n_train * n.n_outputs
        sampled = (
            pairs if rank == "exact" else method.kwargs.get("subsample_size", 2000)
        )
        fit = 3 * min(sampled, pairs) + n.n_train * features
        passes = 1  # over the validation data, whatever is tried on them
    else:
        features = 1 if method.structure[0] == "last_layer" else jacobian
        fit = n.n_train * features
        passes = grid_size
    tuning = n.n_val * features * passes if tune.needs_validation else 0
    return fit + tuning + n_links * n.n_predicted * features
