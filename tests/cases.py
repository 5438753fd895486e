"""Named small problems, all in float64, the models in eval mode."""

from __future__ import annotations

import itertools
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Case:
    """A fitted-looking model with its training and test data."""

    model: nn.Module
    likelihood: str
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def n_params(self):
        return sum(p.numel() for p in self.params)

    def loader(self, batch_size=5, **kwargs):
        return DataLoader(TensorDataset(self.x, self.y), batch_size, **kwargs)


def mlp(*sizes, act=nn.Tanh):
    layers = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), act()]
    return nn.Sequential(*layers[:-1])


class CNN(nn.Module):
    """Convolution, BatchNorm with statistics of its own, pooling, linear."""

    def __init__(self, n_out=4):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.fc = nn.Linear(12, n_out)
        nn.init.normal_(self.bn.running_mean, std=0.3)
        nn.init.uniform_(self.bn.running_var, 0.5, 2.0)

    def forward(self, x):
        h = torch.relu(self.bn(self.conv(x)))
        return self.fc(torch.nn.functional.avg_pool2d(h, 2).flatten(1))


class Sequence(nn.Module):
    """The last state of a recurrent or attention layer, then a linear head."""

    def __init__(self, body, width, n_out=2):
        super().__init__()
        self.body, self.head = body, nn.Linear(width, n_out)

    def forward(self, x):
        h = self.body(x)
        return self.head((h[0] if isinstance(h, tuple) else h)[:, -1])


class DictModel(nn.Module):
    """Takes a mapping, as Hugging Face models do."""

    def __init__(self, net, key="input_ids"):
        super().__init__()
        self.net, self.key = net, key

    def forward(self, data):
        return self.net(data[self.key])


class RewardModel(nn.Module):
    """Rewards (B, 2) of pairs (B, 2, D) when training, (B, 1) of inputs (B, D)."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x).squeeze(-1) if x.ndim == 3 else self.net(x)


class TiedModel(nn.Module):
    """One weight used twice."""

    def __init__(self, width=4):
        super().__init__()
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


def _frozen():
    model = mlp(3, 4, 4, 3)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def _case(model, likelihood, n, shape, n_out, **kwargs):
    x, x_test = torch.randn(n, *shape), torch.randn(7, *shape)
    regression = likelihood == "regression"
    y = torch.randn(n, n_out) if regression else torch.randint(n_out, (n,))
    return Case(model.eval(), likelihood, x, y, x_test, kwargs)


NOISE = {"sigma_noise": 0.4}
CASES = {
    "regression_1": lambda: _case(mlp(2, 5, 1), "regression", 12, (2,), 1),
    "regression_3": lambda: _case(mlp(3, 4, 3), "regression", 10, (3,), 3, **NOISE),
    "classification_mlp": lambda: _case(mlp(3, 5, 3), "classification", 12, (3,), 3),
    "classification_cnn": lambda: _case(CNN(), "classification", 11, (1, 6, 6), 4),
    "frozen": lambda: _case(_frozen(), "classification", 9, (3,), 3),
}
"""The cases that every comparison with the dense reference runs over."""


def _sequence(body, likelihood, width):
    return _case(Sequence(body, 4), likelihood, 6, (3, width), 2)


def _weight_norm():
    first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2))
    return _case(model, "regression", 6, (3,), 2)


def _attention():
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)


ARCHITECTURES = {
    "tied": lambda: _case(TiedModel(), "classification", 6, (4,), 3),
    "attention": lambda: _sequence(_attention(), "classification", 4),
    "lstm": lambda: _sequence(nn.LSTM(3, 4, batch_first=True), "regression", 3),
    "gru": lambda: _sequence(nn.GRU(3, 4, batch_first=True), "regression", 3),
    "weight_norm": _weight_norm,
}
"""Models on which some way of differentiating does not work."""


def make(name):
    """Build a case by name, in float64, the same one on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        case = (CASES | ARCHITECTURES)[name]()
    case.model.double()
    case.x, case.x_test = case.x.double(), case.x_test.double()
    if case.y.is_floating_point():
        case.y = case.y.double()
    return case


class Batch(UserDict):
    """A mapping that is not a dict, as the batches of Hugging Face are."""


def mapping_loader(x, y, key_x="input_ids", key_y="labels", batch_size=4, cls=dict):
    """Batches as mappings with the given keys."""
    items = [{key_x: a, key_y: b} for a, b in zip(x, y, strict=True)]

    def collate(batch):
        stacked = {key: torch.stack([item[key] for item in batch]) for key in batch[0]}
        return cls(stacked)

    return DataLoader(items, batch_size=batch_size, collate_fn=collate)


def priors(case):
    """A scalar, a layerwise and a diagonal prior precision."""
    generator = torch.Generator().manual_seed(3)

    def draw(n):
        return 0.2 + 3 * torch.rand(n, generator=generator, dtype=torch.float64)

    return {
        "scalar": torch.tensor([0.7], dtype=torch.float64),
        "layerwise": draw(len(case.params)),
        "diag": draw(case.n_params),
    }


PRIORS = ("scalar", "layerwise", "diag")
