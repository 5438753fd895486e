"""Data sets as tensors, from the shared folder or from torchvision's downloads.

The shared folder holds `cifar10/*.npz`, `mnist/*.gz`, `fashion_mnist/*.gz` and
`imagenet_sample/NNNN_wnid.jpg`; any other folder is handed to torchvision, which
downloads what it is allowed to.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

#: Normalisation of the CIFAR-10 networks of `common.models`.
CIFAR_MEAN = (0.485, 0.456, 0.406)
CIFAR_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Images:
    """Images `(N, channels, H, W)`, scaled for the network, and classes `(N,)`."""

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: slice | torch.Tensor) -> Images:
        return Images(self.x[index], self.y[index])

    def loader(self, batch_size: int = 48) -> DataLoader:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=batch_size)


def normalize_cifar(pixels: np.ndarray | torch.Tensor) -> torch.Tensor:
    """uint8 `(N, 32, 32, 3)` to what the CIFAR-10 networks take."""
    x = torch.as_tensor(pixels).permute(0, 3, 1, 2).float() / 255
    mean = torch.tensor(CIFAR_MEAN).view(3, 1, 1)
    return (x - mean) / torch.tensor(CIFAR_STD).view(3, 1, 1)


def cifar10_pixels(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """uint8 pixels `(N, 32, 32, 3)` and classes of 'train' or 'test'."""
    path = root / "cifar10" / {"train": "train_20k.npz", "test": "test_10k.npz"}[split]
    if path.exists():
        with np.load(path) as arrays:
            return arrays["x"], arrays["y"]
    from torchvision.datasets import CIFAR10

    data = CIFAR10(root, train=split == "train", download=True)
    # In a fixed random order: the first n are then a sample of all classes.
    order = np.random.default_rng(0).permutation(len(data.targets))
    return data.data[order], np.asarray(data.targets)[order]


@lru_cache(maxsize=2)  # both splits: set-ups of several seeds share them
def cifar10(root: Path, split: str) -> Images:
    """CIFAR-10, normalised, in random order; not to be changed in place."""
    pixels, classes = cifar10_pixels(root, split)
    return Images(normalize_cifar(pixels), torch.as_tensor(classes).long())


def _idx(path: Path) -> np.ndarray:
    """An array from MNIST's file format: magic number, dimensions, bytes."""
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">u4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def mnist(root: Path, split: str, fashion: bool = False) -> Images:
    """MNIST or Fashion-MNIST, pixels in [0, 1]."""
    folder = root / ("fashion_mnist" if fashion else "mnist")
    prefix = {"train": "train", "test": "t10k"}[split]
    path = folder / f"{prefix}-images-idx3-ubyte.gz"
    if path.exists():
        pixels = _idx(path)
        classes = _idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
    else:
        from torchvision.datasets import MNIST, FashionMNIST

        kind = FashionMNIST if fashion else MNIST
        data = kind(root, train=split == "train", download=True)
        pixels, classes = data.data.numpy(), data.targets.numpy()
    x = torch.tensor(pixels).unsqueeze(1).float() / 255
    return Images(x, torch.tensor(classes).long())


def svhn(root: Path) -> Images | None:
    """SVHN's test set in the form of CIFAR-10, if the user has or can download it."""
    from torchvision.datasets import SVHN

    try:
        data = SVHN(root, split="test", download=not (root / "cifar10").is_dir())
    except (RuntimeError, OSError):
        return None
    pixels = data.data.transpose(0, 2, 3, 1)
    return Images(normalize_cifar(pixels), torch.as_tensor(data.labels).long())


def as_cifar(images: Images) -> Images:
    """Grey 28×28 images as CIFAR-10 ones: resized to 32×32, three equal channels."""
    x = torch.nn.functional.interpolate(
        images.x, (32, 32), mode="bilinear", align_corners=False
    )
    pixels = x.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    return Images(normalize_cifar((pixels * 255).round().byte()), images.y)


def moved(images: Images, strength: float, seed: int = 0) -> Images:
    """Images turned (±10°), shifted (±10 %) and scaled (0.9–1.1), times `strength`."""
    if strength == 0:
        return images
    generator = torch.Generator().manual_seed(seed)
    n, _, height, width = images.x.shape
    unit = 2 * torch.rand(4, n, generator=generator) - 1
    angle = unit[0] * np.pi / 18 * strength
    shift = unit[1:3] * 0.2 * strength  # in units of half an image
    scale = 1 + 0.1 * strength * unit[3]
    cos, sin = angle.cos() / scale, angle.sin() / scale
    theta = torch.stack([cos, -sin, shift[0], sin, cos, shift[1]], -1).view(n, 2, 3)
    grid = torch.nn.functional.affine_grid(
        theta, (n, 1, height, width), align_corners=False
    )
    x = torch.nn.functional.grid_sample(
        images.x, grid, padding_mode="reflection", align_corners=False
    )
    return Images(x, images.y)


def imagenet_sample(root: Path, size: int = 224) -> tuple[list[Path], torch.Tensor]:
    """Paths and classes of `imagenet_sample/NNNN_wnid.jpg`, or of an ImageNet folder
    `val/<wnid>/*.JPEG` whose sorted class folders are the classes."""
    sample = sorted((root / "imagenet_sample").glob("*.jpg"))
    if sample:
        return sample, torch.tensor([int(p.name[:4]) for p in sample])
    folders = sorted(p for p in (root / "val").iterdir() if p.is_dir())
    paths = [(p, c) for c, f in enumerate(folders) for p in sorted(f.iterdir())]
    return [p for p, _ in paths], torch.tensor([c for _, c in paths])


def read_images(paths: list[Path], size: int = 224) -> torch.Tensor:
    """RGB images `(N, 3, size, size)` in [0, 1], the centre of a resized image."""
    from PIL import Image
    from torchvision.transforms.functional import center_crop, pil_to_tensor, resize

    images = []
    for path in paths:
        image = Image.open(path).convert("RGB")
        if image.size != (size, size):
            image = center_crop(resize(image, int(size / 0.875)), size)
        images.append(pil_to_tensor(image).float() / 255)
    return torch.stack(images)
