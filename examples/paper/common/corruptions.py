"""Eleven of the 19 corruptions of CIFAR-10-C at their published severities.

Types and strengths are those of Hendrycks and Dietterich (2019) for 32×32 images,
written anew on numpy, scipy and Pillow; those that need a texture or a warp per image
are left out. Every function takes images x `(N, 32, 32, 3)` in [0, 1], the severity 1–5
and a generator, and returns images of the same form, which `corrupt` clips.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import numpy as np
from PIL import Image
from scipy import ndimage

__all__ = ["CORRUPTIONS", "corrupt"]

Array = np.ndarray
Rng = np.random.Generator


def _zoom(x: Array, factor: float) -> Array:
    """The centre of images, enlarged by a factor."""
    size = x.shape[1]
    centre = (size - 1) / 2
    grid = centre + (np.arange(size) - centre) / factor
    coordinates = np.meshgrid(grid, grid, indexing="ij")
    planes = [
        ndimage.map_coordinates(image[..., c], coordinates, order=1, mode="nearest")
        for image in x
        for c in range(x.shape[3])
    ]
    stacked = np.stack(planes).reshape(x.shape[0], x.shape[3], size, size)
    return stacked.transpose(0, 2, 3, 1)


def _hsv(x: Array) -> tuple[Array, Array]:
    """Value max_c x and saturation 1 − min_c x / max_c x, each `(N, 32, 32, 1)`."""
    value = x.max(-1, keepdims=True)
    return value, 1 - x.min(-1, keepdims=True) / np.maximum(value, 1e-12)


def gaussian_noise(x: Array, severity: int, rng: Rng) -> Array:
    scale = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    return x + rng.normal(size=x.shape, scale=scale)


def shot_noise(x: Array, severity: int, rng: Rng) -> Array:
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return rng.poisson(x * photons) / photons


def impulse_noise(x: Array, severity: int, rng: Rng) -> Array:
    amount = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    hit = rng.random(x.shape) < amount
    return np.where(hit, rng.random(x.shape) < 0.5, x)


def speckle_noise(x: Array, severity: int, rng: Rng) -> Array:
    scale = (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1]
    return x * (1 + rng.normal(size=x.shape, scale=scale))


def gaussian_blur(x: Array, severity: int, rng: Rng) -> Array:
    sigma = (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    return ndimage.gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest", truncate=4)


def zoom_blur(x: Array, severity: int, rng: Rng) -> Array:
    last = 0.05 * severity
    factors = 1 + np.arange(0, last + 0.005, 0.01)
    return (x + sum(_zoom(x, f) for f in factors)) / (len(factors) + 1)


def brightness(x: Array, severity: int, rng: Rng) -> Array:
    value, _ = _hsv(x)
    new = (value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]).clip(0, 1)
    # The hue stays; black has none and becomes grey.
    return np.where(value > 0, x * new / np.maximum(value, 1e-12), new)


def saturate(x: Array, severity: int, rng: Rng) -> Array:
    times, plus = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[severity - 1]
    value, saturation = _hsv(x)
    new = (saturation * times + plus).clip(0, 1)
    ratio = new / np.maximum(saturation, 1e-12)
    grey_red = np.concatenate([value, value * (1 - new), value * (1 - new)], -1)
    return np.where(saturation > 0, value - (value - x) * ratio, grey_red)


def contrast(x: Array, severity: int, rng: Rng) -> Array:
    mean = x.mean((1, 2), keepdims=True)
    return (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] + mean


def _through_pillow(x: Array, change: Callable[[Image.Image], Image.Image]) -> Array:
    images = [Image.fromarray(i) for i in (x * 255).round().astype(np.uint8)]
    return np.stack([np.asarray(change(i)) for i in images]) / 255


def pixelate(x: Array, severity: int, rng: Rng) -> Array:
    small = int(x.shape[1] * (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1])

    def change(image: Image.Image) -> Image.Image:
        low = image.resize((small, small), Image.Resampling.BOX)
        return low.resize(image.size, Image.Resampling.BOX)

    return _through_pillow(x, change)


def jpeg_compression(x: Array, severity: int, rng: Rng) -> Array:
    quality = (80, 65, 58, 50, 40)[severity - 1]

    def change(image: Image.Image) -> Image.Image:
        file = BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file).convert("RGB")

    return _through_pillow(x, change)


CORRUPTIONS = {
    function.__name__: function
    for function in (
        gaussian_noise, shot_noise, impulse_noise, speckle_noise, gaussian_blur,
        zoom_blur, brightness, contrast, saturate, pixelate, jpeg_compression,
    )
}  # fmt: skip


def corrupt(pixels: Array, name: str, severity: int, seed: int = 0) -> Array:
    """Return uint8 images `(N, 32, 32, 3)`, corrupted; the same at every call."""
    if name not in CORRUPTIONS or severity not in range(1, 6):
        raise ValueError(f"Unknown corruption {name!r} or severity {severity}.")
    rng = np.random.default_rng([seed, severity, list(CORRUPTIONS).index(name)])
    x = CORRUPTIONS[name](pixels / 255.0, severity, rng)
    return (x.clip(0, 1) * 255).round().astype(np.uint8)
