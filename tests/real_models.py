"""Real images and a real network, from the folder that LAPLACE_ELLA_DATA names."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Shortcut(nn.Module):
    """Every second pixel, and zeros for the new channels (He et al., option A)."""

    def __init__(self, channels):
        super().__init__()
        self.pad = channels // 4

    def forward(self, x):
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))


class Block(nn.Module):
    def __init__(self, n_in, n_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        same = stride == 1 and n_in == n_out
        self.shortcut = nn.Identity() if same else Shortcut(n_out)

    def forward(self, x):
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.shortcut(x))


class ResNet20(nn.Module):
    """The CIFAR-10 network of He et al. 2016 with 269,722 parameters."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(*(Block(n, 32, 32 // n) for n in (16, 32, 32)))
        self.layer3 = nn.Sequential(*(Block(n, 64, 64 // n) for n in (32, 64, 64)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(h))).mean((2, 3)))


def resnet20(folder):
    """The trained network, in eval mode; 91.7 % of the test images are right."""
    path = folder / "weights" / "resnet20-12fca82f.th"
    state = torch.load(path, map_location="cpu", weights_only=False)["state_dict"]
    model = ResNet20()
    model.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})
    return model.eval()


def cifar10(folder, split, stop, start=0):
    """Normalised images (N, 3, 32, 32) and labels (N,) of a shuffled split."""
    with np.load(folder / "cifar10" / f"{split}.npz") as data:
        x, y = data["x"][start:stop], data["y"][start:stop]
    x = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
    mean, std = mean.view(3, 1, 1), std.view(3, 1, 1)
    return (x - mean) / std, torch.from_numpy(y).long()
