"""The 19 corruptions of CIFAR-10-C at their published severities, for 32×32 images.

Types and strengths are those of Hendrycks and Dietterich (2019) for CIFAR-10; they are
written anew on numpy, scipy and Pillow, because the packages that offer them
(imagecorruptions 1.1.2) import modules that current numpy, scipy and setuptools no
longer have. Three differ in detail from the published files: frost takes a fractal
texture instead of photographs of ice, motion blur a one-sided Gaussian line instead of
ImageMagick's, and spatter's water has no embossed rim.

Every function takes images x `(N, 32, 32, 3)` in [0, 1], the severity 1–5 and a
generator, and returns images of the same form, which `corrupt` clips.
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


def _blur(x: Array, sigma: float) -> Array:
    """A Gaussian blur of rows and columns."""
    return ndimage.gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest", truncate=4)


def _filter(x: Array, kernel: Array) -> Array:
    return ndimage.convolve(x, kernel[None, :, :, None], mode="mirror")


def _line(length: int, sigma: float, angle: float) -> Array:
    """A motion-blur kernel: Gaussian weights along one direction."""
    kernel = np.zeros((2 * length + 1, 2 * length + 1))
    for step in np.arange(0, length + 0.5, 0.5):
        row = round(length + step * np.sin(angle))
        column = round(length + step * np.cos(angle))
        kernel[row, column] += np.exp(-(step**2) / (2 * sigma**2))
    return kernel / kernel.sum()


def _fractal(size: int, decay: float, rng: Rng) -> Array:
    """A cloud `(size, size)` in [0, 1]: noise of halving scales, amplitudes / decay."""
    total, amplitude = np.zeros((size, size)), 1.0
    cells = 1
    while cells < size:
        cells *= 2
        coarse = rng.uniform(-1, 1, (cells + 1, cells + 1))
        smooth = ndimage.zoom(coarse, size / (cells + 1), order=1)
        total += amplitude * smooth[:size, :size]
        amplitude /= decay
    return (total - total.min()) / np.ptp(total)


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


# --- noise ---------------------------------------------------------------------------


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


# --- blur ----------------------------------------------------------------------------


def gaussian_blur(x: Array, severity: int, rng: Rng) -> Array:
    return _blur(x, (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1])


def glass_blur(x: Array, severity: int, rng: Rng) -> Array:
    sigma = (0.05, 0.25, 0.4, 0.25, 0.4)[severity - 1]
    x = _blur(x, sigma)
    for _ in range(1 if severity <= 3 else 2):
        # Pixels change places with a neighbour up or left, or with themselves.
        for h in range(x.shape[1] - 1, 0, -1):
            for w in range(x.shape[2] - 1, 0, -1):
                dy, dx = rng.integers(-1, 1, 2)
                here, there = x[:, h, w].copy(), x[:, h + dy, w + dx].copy()
                x[:, h, w], x[:, h + dy, w + dx] = there, here
    return _blur(x, sigma)


def defocus_blur(x: Array, severity: int, rng: Rng) -> Array:
    radius, soft = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[
        severity - 1
    ]
    grid = np.arange(-4, 5)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(float)
    # Softened over the 3×3 neighbourhood only.
    edge = np.exp(-(np.arange(-1, 2) ** 2) / (2 * soft**2))
    edge /= edge.sum()
    kernel = ndimage.convolve(disk / disk.sum(), np.outer(edge, edge), mode="constant")
    return _filter(x, kernel)


def motion_blur(x: Array, severity: int, rng: Rng) -> Array:
    length, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[severity - 1]
    images = [
        _filter(image[None], _line(length, sigma, np.deg2rad(rng.uniform(-45, 45))))
        for image in x
    ]
    return np.concatenate(images)


def zoom_blur(x: Array, severity: int, rng: Rng) -> Array:
    last = 0.05 * severity
    factors = 1 + np.arange(0, last + 0.005, 0.01)
    return (x + sum(_zoom(x, f) for f in factors)) / (len(factors) + 1)


# --- weather -------------------------------------------------------------------------


def snow(x: Array, severity: int, rng: Rng) -> Array:
    mean, std, zoom, threshold, length, sigma, keep = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    flakes = rng.normal(mean, std, (*x.shape[:3], 1))
    flakes = _zoom(flakes, zoom)
    flakes = np.where(flakes < threshold, 0, flakes).clip(0, 1)
    fallen = [
        _filter(f[None], _line(length, sigma, np.deg2rad(rng.uniform(45, 135))))[0]
        for f in flakes
    ]
    flakes = np.stack(fallen)
    grey = x @ np.array([0.299, 0.587, 0.114])
    pale = np.maximum(x, grey[..., None] * 1.5 + 0.5)
    return keep * x + (1 - keep) * pale + flakes + flakes[:, ::-1, ::-1]


def frost(x: Array, severity: int, rng: Rng) -> Array:
    keep, add = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[
        severity - 1
    ]
    ice = np.stack([_fractal(32, 1.3, rng) for _ in x])[..., None]
    return keep * x + add * ice * np.array([0.85, 0.93, 1.0])


def fog(x: Array, severity: int, rng: Rng) -> Array:
    amount, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[severity - 1]
    cloud = np.stack([_fractal(32, decay, rng) for _ in x])[..., None]
    top = x.max((1, 2, 3), keepdims=True)
    return (x + amount * cloud) * top / (top + amount)


def spatter(x: Array, severity: int, rng: Rng) -> Array:
    mean, std, sigma, threshold, strength = (
        (0.62, 0.1, 0.7, 0.7, 0.5),
        (0.65, 0.1, 0.8, 0.7, 0.5),
        (0.65, 0.3, 1, 0.69, 0.5),
        (0.65, 0.1, 0.7, 0.69, 0.6),
        (0.65, 0.1, 0.5, 0.68, 0.6),
    )[severity - 1]
    liquid = _blur(rng.normal(mean, std, (*x.shape[:3], 1)), sigma)
    liquid = np.where(liquid < threshold, 0, liquid)
    if severity <= 3:  # water, pale turquoise
        top = liquid.max((1, 2, 3), keepdims=True)
        drops = strength * liquid / np.maximum(top, 1e-12)
        return x + drops * np.array([175, 238, 238]) / 255
    mud = _blur((liquid > 0).astype(float), strength)
    mud = np.where(mud < 0.8, 0, mud)
    return x * (1 - mud) + mud * np.array([63, 42, 20]) / 255


# --- digital -------------------------------------------------------------------------


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


def elastic_transform(x: Array, severity: int, rng: Rng) -> Array:
    size = x.shape[1]
    alpha, sigma, affine = (
        size * np.array(c)
        for c in zip(
            (0, 0, 0.08),
            (0.05, 0.2, 0.07),
            (0.08, 0.06, 0.06),
            (0.1, 0.04, 0.05),
            (0.1, 0.03, 0.03),
            strict=True,
        )
    )
    alpha, sigma, affine = (
        alpha[severity - 1],
        sigma[severity - 1],
        affine[severity - 1],
    )
    third, half = size // 3, size // 2
    corners = np.array(
        [[half + third, half + third], [half + third, half - third], [half - third] * 2]
    )
    grid = np.stack(np.meshgrid(*[np.arange(size)] * 2, indexing="ij"), -1)
    out = np.empty_like(x)
    for i, image in enumerate(x):
        moved = corners + rng.uniform(-affine, affine, corners.shape)
        # Where each pixel of the moved triangle's plane came from.
        solution = np.linalg.solve(np.c_[moved, np.ones(3)], corners)
        source = np.concatenate([grid, np.ones((size, size, 1))], -1) @ solution
        for axis in range(2):
            noise = rng.uniform(-1, 1, (size, size))
            if alpha:
                noise = ndimage.gaussian_filter(
                    noise, sigma, mode="reflect", truncate=3
                )
            source[..., axis] += alpha * noise
        for c in range(3):
            out[i, ..., c] = ndimage.map_coordinates(
                image[..., c], source.transpose(2, 0, 1), order=1, mode="mirror"
            )
    return out


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
        gaussian_noise,
        shot_noise,
        impulse_noise,
        speckle_noise,
        defocus_blur,
        gaussian_blur,
        glass_blur,
        motion_blur,
        zoom_blur,
        snow,
        frost,
        fog,
        spatter,
        brightness,
        contrast,
        elastic_transform,
        pixelate,
        jpeg_compression,
        saturate,
    )
}


def corrupt(pixels: Array, name: str, severity: int, seed: int = 0) -> Array:
    """uint8 images `(N, 32, 32, 3)`, corrupted; the same at every call."""
    if name not in CORRUPTIONS or severity not in range(1, 6):
        raise ValueError(f"Unknown corruption {name!r} or severity {severity}.")
    rng = np.random.default_rng([seed, severity, list(CORRUPTIONS).index(name)])
    x = CORRUPTIONS[name](pixels / 255.0, severity, rng)
    return (x.clip(0, 1) * 255).round().astype(np.uint8)
