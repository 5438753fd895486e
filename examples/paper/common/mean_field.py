"""Mean-field variational inference by fine-tuning a checkpoint, with bayesian-torch.

Every weight of a convolution or a linear layer has a Gaussian of its own, which begins
at the checkpoint's value. Batch normalisation stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from tqdm.auto import tqdm

from common.data import Images, normalize_cifar

#: Pixels on each side that a crop may move by, as in the training of the networks.
PADDING = 4


@dataclass(frozen=True)
class FineTuning:
    """How a posterior is fitted.

    Attributes
    ----------
    learning_rate : of the means, by gradient descent with momentum
    kl_weight : of the Kullback-Leibler divergence in the evidence bound; 1 is Bayes
    prior_precision : of the prior, a Gaussian with mean zero
    n_train : data that the bound counts
    initial_scale : first standard deviation of a weight, as a part of its size
    scale_learning_rate : of the standard deviations' logarithms (nearly), by Adam
    epochs, batch_size, seed : of the pass over the training images
    """

    learning_rate: float
    kl_weight: float
    prior_precision: float
    n_train: int
    initial_scale: float = 0.05
    scale_learning_rate: float = 0.03
    epochs: int = 1
    batch_size: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Weights:
    """The Gaussian of one weight tensor; `rho` is its deviation before softplus."""

    name: str
    mu: nn.Parameter
    rho: nn.Parameter

    @property
    def distribution(self) -> Normal:
        return Normal(self.mu, F.softplus(self.rho))


def mean_field(model: nn.Module, initial_scale: float) -> nn.Module:
    """A copy with the layers of bayesian-torch, Flipout, at the checkpoint."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    network = deepcopy(model)
    # The prior is not the library's: see `divergence`.
    settings = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": 0.0,
        "type": "Flipout",
        "moped_enable": True,  # means and deviations from the checkpoint
        "moped_delta": initial_scale,
    }
    with torch.random.fork_rng(devices=[]):  # layers draw values before they are set
        dnn_to_bnn(network, settings)
    return network.eval()  # of batch normalisation alone: Flipout has one mode


def gaussians(network: nn.Module) -> Iterator[Weights]:
    """The posterior, weight tensor after weight tensor, named as in the checkpoint."""
    for name, layer in network.named_modules():
        for ours, theirs in (
            ("weight", "kernel"),  # convolutions
            ("weight", "weight"),  # linear layers
            ("bias", "bias"),
        ):
            mu = getattr(layer, f"mu_{theirs}", None)
            if mu is not None:
                rho = getattr(layer, f"rho_{theirs}")
                yield Weights(f"{name}.{ours}", mu, rho)


def divergence(posterior: list[Weights], prior_precision: float) -> torch.Tensor:
    """Kullback-Leibler divergence from the prior, summed over all weights.

    bayesian-torch's own takes the mean over the weights of a layer, with which the
    loss is no bound on the evidence.
    """
    terms = []
    for weights in posterior:
        prior = Normal(torch.zeros_like(weights.mu), prior_precision**-0.5)
        terms.append(kl_divergence(weights.distribution, prior).sum())
    return torch.stack(terms).sum()


def augmented(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random crops of padded images and reflections, as in the networks' training."""
    _, _, height, width = x.shape
    black = normalize_cifar(torch.zeros(1, 1, 1, 3))
    padded = F.pad(x - black, (PADDING,) * 4) + black
    corners = torch.randint(0, 2 * PADDING + 1, (len(x), 2), generator=generator)
    crops = [
        image[:, top : top + height, left : left + width]
        for image, (top, left) in zip(padded, corners.tolist(), strict=True)
    ]
    out = torch.stack(crops)
    turned = torch.rand(len(x), generator=generator) < 0.5
    out[turned] = out[turned].flip(-1)
    return out


def fine_tune(model: nn.Module, train: Images, how: FineTuning) -> nn.Module:
    """The network whose weights have the posterior, from the checkpoint in `model`."""
    network = mean_field(model, how.initial_scale).to(memory_format=torch.channels_last)
    posterior = list(gaussians(network))
    network.requires_grad_(False)
    for weights in posterior:
        weights.mu.requires_grad_()
        weights.rho.requires_grad_()
    # The means go on as the networks were trained; the deviations, by Adam, can change
    # severalfold in one epoch however small their gradients are.
    optimizers = (
        torch.optim.SGD([w.mu for w in posterior], how.learning_rate, momentum=0.9),
        torch.optim.Adam([w.rho for w in posterior], how.scale_learning_rate),
    )
    generator = torch.Generator().manual_seed(how.seed)
    batches = [
        batch
        for _ in range(how.epochs)
        for batch in torch.randperm(len(train), generator=generator).split(
            how.batch_size
        )
    ]
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(o, len(batches)) for o in optimizers
    ]
    with torch.random.fork_rng(devices=[]):  # the layers draw from the global generator
        torch.manual_seed(how.seed)
        for batch in tqdm(batches, "fine-tuning", mininterval=10):
            x = augmented(train.x[batch], generator)
            logits = network(x.contiguous(memory_format=torch.channels_last))
            kl = divergence(posterior, how.prior_precision)
            loss = F.cross_entropy(logits, train.y[batch])
            network.zero_grad()
            (loss + how.kl_weight * kl / how.n_train).backward()
            for step in (*optimizers, *schedules):
                step.step()
    return network.requires_grad_(False)


@torch.no_grad()
def predict(
    model: nn.Module,
    network: nn.Module,
    x: torch.Tensor,
    n_samples: int,
    seed: int = 0,
    batch_size: int = 250,
) -> torch.Tensor:
    """Class probabilities `(N, C)`: the mean over weights drawn from the posterior.

    `model` is the network of the checkpoint, which runs with the weights drawn: one
    convolution per layer, where Flipout needs two.
    """
    model = deepcopy(model).to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(seed)
    posterior = list(gaussians(network))
    total = torch.zeros(())
    for _ in tqdm(range(n_samples), "samples", mininterval=10):
        drawn = {
            w.name: w.mu
            + F.softplus(w.rho) * torch.randn(w.mu.shape, generator=generator)
            for w in posterior
        }
        probs = [
            torch.func.functional_call(
                model, drawn, part.contiguous(memory_format=torch.channels_last)
            ).softmax(-1)
            for part in x.split(batch_size)
        ]
        total = total + torch.cat(probs)
    return total / n_samples
