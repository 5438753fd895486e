"""Segmentation: what is where, and a map of what the network cannot know.

Landscapes of sky, meadow, houses and trees. The scene below has a balloon in it, which
no training image had. `decompose` tells edges, which could be either (aleatoric), from
what was never seen (epistemic).

    python examples/gallery/segmentation.py"""

import style
import torch
from laplace import Laplace
from matplotlib.colors import ListedColormap
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella

SIDE, BALLOON = 48, (0.55, 0.2, 0.6)
KINDS = {"sky": (0.62, 0.8, 0.95), "meadow": (0.74, 0.78, 0.48),
         "house": (0.75, 0.35, 0.25), "tree": (0.12, 0.38, 0.25)}  # fmt: skip
row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")


def disc(middle: int, centre: int, radius: int) -> torch.Tensor:
    return (row - middle) ** 2 + (column - centre) ** 2 < radius**2


def scene(balloon: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A noisy image (3, SIDE, SIDE), and what each pixel shows (SIDE, SIDE)."""
    ranges = ((30, 36), (8, 16), (30, 42))
    horizon, house, tree = (int(torch.randint(*ends, ())) for ends in ranges)
    kinds = (row > horizon).long()
    below_roof = row - horizon + 16 > (column - house).abs()
    kinds[below_roof & ((column - house).abs() < 7) & (row < horizon + 3)] = 2
    kinds[disc(horizon - 8, tree, 7)] = 3
    kinds[(row > horizon - 4) & (row < horizon + 4) & ((column - tree).abs() < 2)] = 3
    colours = torch.tensor([*KINDS.values()])[kinds]
    if balloon:
        colours[disc(8, 24, 6)] = torch.tensor(BALLOON)
    light = 0.8 + 0.2 * torch.rand(())
    image = light * colours + 0.06 * torch.randn_like(colours)
    return 4 * (image.permute(2, 0, 1) - 0.5), kinds  # about zero, as networks like it


def convolution(n_in: int, n_out: int) -> nn.Module:
    return nn.Conv2d(n_in, n_out, 5, padding=2, padding_mode="replicate")


args = style.arguments()
torch.manual_seed(0)
scenes = [scene() for _ in range(4 if args.smoke else 30)]
x, y = map(torch.stack, zip(*scenes, strict=True))
model = nn.Sequential(convolution(3, 10), nn.ReLU(), convolution(10, 10), nn.ReLU(),
                      nn.Conv2d(10, 4, 1))  # fmt: skip
loss = nn.functional.cross_entropy
style.train(model, lambda: loss(model(x), y), steps=5 if args.smoke else 150)
la = Laplace(
    model, "classification", "all", "nystrom", output_layout="channels_first",
    subsample_size=50 if args.smoke else 500, n_eigenvalues=5 if args.smoke else 100,
)  # fmt: skip
la.fit(DataLoader(TensorDataset(x, y), batch_size=10))

image = scene(balloon=True)[0].unsqueeze(0)
seen, parts = model(image).argmax(1)[0], laplace_ella.decompose(la, image)
with style.drawing(args.out / "segmentation.png", size=(7.2, 7.8)) as figure:
    panels = figure.subplots(2, 2)
    panels[0, 0].imshow((image[0].permute(1, 2, 0) / 4 + 0.5).clamp(0, 1))
    panels[0, 1].imshow(seen, cmap=ListedColormap([*KINDS.values()]), vmin=0, vmax=3)
    panels[1, 0].imshow(parts.aleatoric[0], cmap="inferno", vmin=0)
    panels[1, 1].imshow(parts.epistemic[0], cmap="inferno", vmin=0)
    style.bare(panels[0, 0], "image", "a balloon: never seen in training")
    style.bare(panels[0, 1], "segmentation", "it has to call the balloon something")
    style.bare(panels[1, 0], "could be either", "aleatoric: edges and guesses")
    style.bare(panels[1, 1], "never seen", "epistemic: the balloon")
