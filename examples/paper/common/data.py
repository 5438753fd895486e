"""Data sets as tensors, from the shared folder or from torchvision's downloads.

The shared folder holds `cifar10/*.npz`, `mnist/*.gz`, `fashion_mnist/*.gz`,
`uci/NAME.csv.gz` (the target in the last column) and `imagenet_sample/NNNN_wnid.jpg`.
Without `cifar10` or `mnist` in it, torchvision downloads them into the folder.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

#: Normalisation of the CIFAR-10 networks of `common.models`.
CIFAR_MEAN = (0.485, 0.456, 0.406)
CIFAR_STD = (0.229, 0.224, 0.225)

UCI = ("yacht", "energy", "concrete", "wine", "autompg", "protein")


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
    """Return what the CIFAR-10 networks take, from uint8 `(N, 32, 32, 3)`."""
    x = torch.as_tensor(pixels).permute(0, 3, 1, 2).float() / 255
    mean = torch.tensor(CIFAR_MEAN).view(3, 1, 1)
    return (x - mean) / torch.tensor(CIFAR_STD).view(3, 1, 1)


def cifar10_pixels(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 pixels `(N, 32, 32, 3)` and classes of 'train' or 'test'."""
    path = root / "cifar10" / {"train": "train_20k.npz", "test": "test_10k.npz"}[split]
    if path.exists():
        with np.load(path) as arrays:
            return arrays["x"], arrays["y"]
    from torchvision.datasets import CIFAR10

    data = CIFAR10(root, train=split == "train", download=True)
    # In a fixed random order: the first n are then a sample of all classes.
    order = np.random.default_rng(0).permutation(len(data.targets))
    return data.data[order], np.asarray(data.targets)[order]


def cifar10(root: Path, split: str, n: int | None = None) -> Images:
    """Return the first n images of CIFAR-10, normalised, in random order."""
    pixels, classes = cifar10_pixels(root, split)
    return Images(normalize_cifar(pixels[:n]), torch.as_tensor(classes[:n]).long())


def mnist(root: Path, split: str, fashion: bool = False) -> Images:
    """Return MNIST or Fashion-MNIST, pixels in [0, 1]."""
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


def _idx(path: Path) -> np.ndarray:
    """Return an array from MNIST's format: magic number, dimensions, bytes."""
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">u4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def as_cifar(images: Images) -> Images:
    """Return grey 28×28 images as CIFAR-10 ones: 32×32, three equal channels."""
    x = torch.nn.functional.interpolate(
        images.x, (32, 32), mode="bilinear", align_corners=False
    )
    pixels = x.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    return Images(normalize_cifar((pixels * 255).round().byte()), images.y)


def imagenet_sample(root: Path) -> tuple[list[Path], torch.Tensor]:
    """Return paths and classes of `imagenet_sample/NNNN_wnid.jpg`, or of an ImageNet
    folder `val/<wnid>/*.JPEG` whose sorted class folders are the classes."""
    sample = sorted((root / "imagenet_sample").glob("*.jpg"))
    if sample:
        return sample, torch.tensor([int(p.name[:4]) for p in sample])
    folders = sorted(p for p in (root / "val").iterdir() if p.is_dir())
    paths = [(p, c) for c, f in enumerate(folders) for p in sorted(f.iterdir())]
    return [p for p, _ in paths], torch.tensor([c for _, c in paths])


def read_images(paths: list[Path], size: int = 224) -> torch.Tensor:
    """Return RGB images `(N, 3, size, size)` in [0, 1], centres of resized ones."""
    from PIL import Image
    from torchvision.transforms.functional import center_crop, pil_to_tensor, resize

    images = []
    for path in paths:
        image = Image.open(path).convert("RGB")
        if image.size != (size, size):
            image = center_crop(resize(image, int(size / 0.875)), size)
        images.append(pil_to_tensor(image).float() / 255)
    return torch.stack(images)


class Split(NamedTuple):
    """Inputs `(N, D)` and targets `(N, 1)`, standardised by the training data."""

    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor


@lru_cache
def uci_table(root: Path, name: str) -> np.ndarray:
    """Return the table `(N, D + 1)`; not to be changed in place."""
    return np.loadtxt(root / "uci" / f"{name}.csv.gz", delimiter=",")


def random_split(table: np.ndarray, seed: int, most: int | None = None) -> Split:
    """Return training and test data, 90 % and 10 %, of each at most so many."""
    order = np.random.default_rng(seed).permutation(len(table))
    n = round(0.9 * len(table))
    return _standardised(table[order[:n][:most]], table[order[n:][:most]])


def gap_split(table: np.ndarray, column: int, most: int | None = None) -> Split:
    """Return as test data the middle third by one input (Foong et al. 2019), as
    training data what is below and above; of each at most so many, drawn at random."""
    low, gap, high = np.array_split(np.argsort(table[:, column], kind="stable"), 3)
    rng = np.random.default_rng(column)
    outside = rng.permutation(np.concatenate([low, high]))
    return _standardised(table[outside[:most]], table[rng.permutation(gap)[:most]])


def _standardised(train: np.ndarray, test: np.ndarray) -> Split:
    mean, std = train.mean(0), train.std(0)
    parts = (
        torch.tensor((part - mean) / np.where(std > 0, std, 1)).float()
        for part in (train, test)
    )
    return Split(*(side for part in parts for side in (part[:, :-1], part[:, -1:])))
