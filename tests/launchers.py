"""A fit in processes that Accelerate or Lightning Fabric set up.

    python -m torch.distributed.run --nproc_per_node 2 tests/launchers.py accelerate
    python tests/launchers.py fabric

Prints what the first process found.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import ELLALaplace
from tests.cases import mlp

N = 15


def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def model():
    torch.manual_seed(0)
    return mlp(3, 5, 2)


def fitted(net, loader):
    la = ELLALaplace(net, "classification", n_eigenvalues="exact")
    la.fit(loader, val_loader=loader)
    return la


def report(la):
    evidence = la.log_marginal_likelihood().item()
    return (
        f"n_data {la.n_data} evidence {evidence:.4f} loss {la.history[-1]['loss']:.4f}"
    )


def by_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    net, loader = accelerator.prepare(model(), loader)
    return fitted(net, loader)


def in_fabric(fabric):
    net = model()
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=4))
    return fitted(net, loader)


def main(launcher):
    if launcher == "accelerate":
        la = by_accelerate()
    else:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        la = in_fabric(fabric)
    if dist.get_rank() == 0:
        print(f"{launcher}: {dist.get_world_size()} processes, {report(la)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
