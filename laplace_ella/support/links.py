"""The ways from a Gaussian over logits to class probabilities."""

from __future__ import annotations

from enum import Enum

__all__ = ["Link"]


class Link(str, Enum):
    """E[softmax(f)] for Gaussian logits f, approximately.

    The first four are those of `laplace.utils.enums.LinkApprox`, whose members are
    accepted wherever these are.

    Examples
    --------
    >>> import torch
    >>> from laplace import Laplace
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import laplace_ella
    >>> _ = torch.manual_seed(0)
    >>> data = TensorDataset(torch.randn(50, 2), torch.randint(3, (50,)))
    >>> la = Laplace(
    ...     torch.nn.Linear(2, 3), "classification", "all", "nystrom", n_eigenvalues=9
    ... )
    >>> la.fit(DataLoader(data, batch_size=25))
    >>> x = torch.randn(4, 2)
    >>> a, b = la(x, link_approx=Link.PROBIT_CENTERED), la(x, link_approx="mc")
    >>> bool((a - b).abs().max() < 0.2)
    True
    """

    MC = "mc"
    """The mean over samples of f: right up to 1/√n_samples, for every covariance."""

    PROBIT = "probit"
    """Each logit divided by √(1 + π/8·var), as in laplace-torch. It takes a common
    shift of all logits, which the softmax does not see, for uncertainty."""

    PROBIT_CENTERED = "probit_centered"
    """The same for f less its mean over the classes, var being that of each logit's
    distance from the mean of the others: at the price of probit, closer to sampling
    wherever logits vary together, and right for two classes."""

    BRIDGE = "bridge"
    """The mean of the Dirichlet that the Laplace bridge leads to."""

    BRIDGE_NORM = "bridge_norm"
    """The same with the variance normalised first, and with it the scale of f: a
    softmax temperature changes nothing."""
