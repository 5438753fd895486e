"""Is the automatic choice of mode and batch size as fast as the best fixed one?

For ten networks, C in {1, 10} outputs and K in {20, 100} directions, the features of N
inputs are computed with feature_mode × chunk_size fixed, and with both left to the
package. The table has the ratio of the automatic choice to the best fixed setting; both
are measured in turns, in one run, without the time of the trials.

    python examples/paper/benchmark_modes.py            # all networks
    python examples/paper/benchmark_modes.py mlp-101    # some
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from common.models import ResNet
from torch import nn

from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.derivatives.model_function import ModelFunction
from laplace_ella.derivatives.options import ComputeOptions

#: Fixed settings that the automatic choice is compared with.
MODES = ("forward", "reverse")
CHUNKS = (4, 16, 64, 256, 1024)

#: Runs of which the fastest counts.
REPEATS = 3


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def cnn(n_outputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * width, n_outputs),
    )


class Encoder(nn.Module):
    """One transformer layer over 16 tokens."""

    def __init__(self, n_outputs: int, width: int = 32) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True)
        self.head = nn.Linear(width, n_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(1))


Build = Callable[[int], nn.Module]

#: Name, network with C outputs, shape of one input, number of inputs.
NETWORKS: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "mlp-101": (lambda C: mlp(3, 20, C), (3,), 10_000),
    "mlp-3k": (lambda C: mlp(10, 50, 50, C), (10,), 4_000),
    "mlp-deep": (lambda C: mlp(8, *[32] * 8, C), (8,), 2_000),
    "mlp-13k": (lambda C: mlp(64, 128, 32, C), (64,), 2_000),
    "mlp-80k": (lambda C: mlp(50, 256, 256, C), (50,), 512),
    "mlp-500k": (lambda C: mlp(784, 512, 128, C), (784,), 128),
    "cnn-8": (lambda C: cnn(C, 8), (1, 14, 14), 512),
    "cnn-32": (lambda C: cnn(C, 32), (1, 28, 28), 64),
    "encoder": (Encoder, (16, 32), 128),
    "resnet20": (lambda C: ResNet(3, C), (3, 32, 32), 16),
}


def seconds(linearizer: Linearizer, x: torch.Tensor, V: torch.Tensor) -> float:
    start = time.perf_counter()
    linearizer.features(x, V)
    return time.perf_counter() - start


def compare(name: str, n_outputs: int, rank: int) -> tuple[str, float]:
    """One row of the table, and its ratio."""
    torch.manual_seed(0)
    build, shape, n = NETWORKS[name]
    model = build(n_outputs).eval()
    fn = ModelFunction(model, [name for name, _ in model.named_parameters()])
    x = torch.randn(n, *shape)
    V = torch.randn(rank, sum(fn.numels()))
    fixed = {
        (mode, chunk): Linearizer(
            fn, options=ComputeOptions(feature_mode=mode, chunk_size=chunk)
        )
        for mode in MODES
        for chunk in CHUNKS
        if chunk < 4 * n
    }
    auto = Linearizer(fn)
    trial = seconds(auto, x, V)
    times = {}
    for (mode, chunk), linearizer in fixed.items():
        few = x[: 4 * chunk]  # enough to see which may be the best
        linearizer.features(few, V)
        times[mode, chunk] = seconds(linearizer, few, V) * n / len(few)
    # Those that may be the best are measured again, in turns with `auto`.
    close = sorted(times, key=times.__getitem__)[:3]
    times = {setting: seconds(fixed[setting], x, V) for setting in close}
    chosen = seconds(auto, x, V)
    for _ in range(REPEATS):
        chosen = min(chosen, seconds(auto, x, V))
        for setting in close:
            times[setting] = min(times[setting], seconds(fixed[setting], x, V))
    best = min(times, key=times.__getitem__)
    modes = auto.modes(rank)
    ratio = chosen / times[best]
    features = modes.features.value if modes.features else "none"
    row = (
        f"{name:<9} {sum(fn.numels()):>7} {n_outputs:>3} {rank:>4}  "
        f"{features:<8} {chosen:>8.4f}  {best[0]:<8} {best[1]:>5} "
        f"{times[best]:>8.4f}  {ratio:>5.2f}  {trial - chosen:>6.2f}"
    )
    return row, ratio


def main(names: Sequence[str]) -> None:
    print(
        f"{'network':<9} {'P':>7} {'C':>3} {'K':>4}  {'auto':<8} {'s':>8}  "
        f"{'best':<8} {'chunk':>5} {'s':>8}  ratio  trials"
    )
    ratios = []
    with torch.no_grad():
        for name in names or NETWORKS:
            for n_outputs in (1, 10):
                for rank in (20, 100):
                    row, ratio = compare(name, n_outputs, rank)
                    ratios.append(ratio)
                    print(row, flush=True)
    print(f"largest ratio {max(ratios):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", choices=[[], *NETWORKS], default=[])
    main(parser.parse_args().networks)
