"""Several devices: every process fits and tunes with its part of the data.

    python examples/distributed.py                              # one process
    torchrun --nproc_per_node 2 examples/distributed.py         # two, the same numbers

Only the sampler changes: with a process group, `fit` and all methods that take a loader
use the data of all processes, and every process holds the whole posterior.
"""

import os

import torch
import torch.distributed as dist
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import laplace_ella  # noqa: F401, registers hessian_structure="nystrom"

rank, size = 0, 1
if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)

# Three spirals; the network is trained here in every process alike, yours comes from
# wherever you trained it. A model in DistributedDataParallel may be passed as it is.
torch.manual_seed(0)
y = torch.arange(600) % 3
t = torch.rand(600) * 4
angle = t + 2 * torch.pi / 3 * y + 0.25 * torch.randn(600)
x = torch.stack([t * angle.cos(), t * angle.sin()], 1)
parts = zip(x.split(200), y.split(200), strict=True)
train, val, test = (TensorDataset(*part) for part in parts)

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x_train, y_train = (tensor.to(device) for tensor in train.tensors)
for _ in range(200):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x_train), y_train).backward()
    optimizer.step()


def loader(data: TensorDataset) -> DataLoader:
    """The part of this process."""
    return DataLoader(data, 32, sampler=DistributedSampler(data, size, rank))


la = Laplace(model, "classification", "all", "nystrom", n_eigenvalues=20)
la.fit(loader(train))  # gradients and curvature of all parts
la.optimize_prior_precision(method="gridsearch", val_loader=loader(val))

# Predictions are made by every process for itself, of its own inputs.
inputs, labels = (tensor[rank::size].to(device) for tensor in test.tensors)
probabilities = la(inputs)
nll = -probabilities[torch.arange(len(labels)), labels].log().sum().double()
if size > 1:
    dist.all_reduce(nll)
if rank == 0:
    print(f"{size} process(es), {la.n_data} training data, rank {la.rank}")
    print(f"prior precision {la.prior_precision.item():.4g}, ", end="")
    print(f"test NLL {nll.item() / len(test):.4f}")
if size > 1:
    dist.destroy_process_group()
