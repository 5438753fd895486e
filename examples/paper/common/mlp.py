"""The small networks of the regression studies, and their training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def mlp(n_in: int, n_out: int, width: int = 50) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(n_in, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, n_out),
    )


def train(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    steps: int,
    most: int = 5000,
) -> None:
    """Adam with all data at once, or with `most` of them drawn for each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = slice(None)
        if len(x) > most:
            batch = torch.randint(len(x), (most,))
        optimizer.zero_grad()
        loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
