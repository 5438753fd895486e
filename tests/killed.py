"""Fits in processes that kill themselves, for `test_resume`.

Imported once by the server that the processes are forked from: importing torch takes
longer than the fits.
"""

from __future__ import annotations

import os
import random
import signal
import warnings

import numpy as np
import torch
from laplace.curvature import CurvlinopsEF
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from laplace_ella import Checkpoint, EarlyStopping, ELLALaplace, ELLALLLaplace
from laplace_ella.support import files

torch.set_num_threads(1)

N, D, C = 23, 3, 2

#: Ways of differentiating that are not chosen by a measurement, so that every run
#: rounds alike; few directions of a sample.
SETTINGS = {
    "feature_mode": "reverse",
    "row_mode": "loop",
    "n_eigenvalues": 4,
    "subsample_size": 16,
}


class Augmented(Dataset):
    """Examples with noise from all three global random states."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.randn(()) + np.random.randn() + random.random()  # noqa: NPY002
        return self.x[i] + 0.1 * noise, self.y[i]


class Shards(IterableDataset):
    """The same one after the other, in another order in every pass, by the global
    random state; without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in torch.randperm(len(self.data)).tolist())


class Pixels(nn.Module):
    """Outputs (B, C, 2) at two positions."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return torch.stack([self.net(x), self.net(-x)], -1)


def tensors(likelihood, n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g, dtype=torch.float64)
    if likelihood == "regression":
        return x, torch.randn(n, C, generator=g, dtype=torch.float64)
    return x, torch.randint(C, (n,), generator=g)


def network(seed=1):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)).double()


def posterior(likelihood="regression", cls=ELLALaplace, model=None, **settings):
    return cls(model or network(), likelihood, **(SETTINGS | settings))


def loader(likelihood="regression", size=5, **kwargs):
    return DataLoader(Augmented(*tensors(likelihood)), size, **kwargs)


# Each returns a posterior and the fit that is to be interrupted.


def regression():
    la = posterior()
    return la, lambda **kw: la.fit(loader(shuffle=True), **kw)


def stopping():
    la = posterior("classification")
    train = loader("classification", generator=torch.Generator(), shuffle=True)
    val = DataLoader(Augmented(*tensors("classification", 9, 7)), 4, shuffle=True)
    plan = EarlyStopping(every=3, patience=3)
    return la, lambda **kw: la.fit(train, val_loader=val, early_stopping=plan, **kw)


def stream():
    la = posterior("classification", subsample_size=9)
    data = DataLoader(Shards(Augmented(*tensors("classification"))), 5)
    return la, lambda **kw: la.fit(data, max_data=21, **kw)


def exact():
    la = posterior(model=network().float(), n_eigenvalues="exact")
    x, y = tensors("regression")
    data = DataLoader(TensorDataset(x.float(), y.float()), 5)
    return la, lambda **kw: la.fit(data, **kw)


def summary():
    """More gradients than there is room for."""
    la = posterior("classification", subsample_size=40, memory_budget="9 kB")
    return la, lambda **kw: la.fit(loader("classification"), **kw)


def stochastic():
    la = posterior("classification", ELLALLLaplace, stochastic=2, n_eigenvalues=3)
    return la, lambda **kw: la.fit(loader("classification"), balanced=True, **kw)


def fisher():
    la = posterior("classification", backend=CurvlinopsEF)
    return la, lambda **kw: la.fit(loader("classification"), **kw)


def positions():
    noise = torch.tensor([0.3, 0.4])
    model = Pixels(network())
    la = posterior(model=model, output_layout="channels_first", sigma_noise=noise)
    x, y = tensors("regression")
    data = DataLoader(TensorDataset(x, torch.stack([y, y + 1], -1)), 5)
    return la, lambda **kw: la.fit(data, **kw)


def more_data():
    la = posterior()
    la.fit_basis(loader())
    x, y = tensors("regression", 17, 3)
    la.fit(DataLoader(TensorDataset(x, y), 5), override=False)
    return la, lambda **kw: la.fit(loader(), override=False, **kw)


def only_basis():
    la = posterior()
    return la, lambda **kw: la.fit_basis(loader(shuffle=True), **kw)


CASES = {
    f.__name__: f
    for f in (
        regression,
        stopping,
        stream,
        exact,
        summary,
        stochastic,
        fisher,
        positions,
        more_data,
        only_basis,
    )
}


def seed_everything(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def often(path):
    """A save after every batch."""
    return Checkpoint(path, every=0, share=1)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def set_trap(la, trap, n):
    """Die at the n-th event of a kind."""
    left = [n]

    def count(*_):
        left[0] -= 1
        if left[0] == 0:
            die()

    replace, save = os.replace, torch.save

    def replace_and_count(*args):
        if trap == "before replacing":
            count()
        replace(*args)
        if trap == "after replacing":
            count()

    def save_and_count(state, file):
        if trap == "while writing":
            left[0] -= 1
            if left[0] == 0:
                file.write(b"PK\x03\x04 the first half")
                file.flush()
                die()
        save(state, file)

    if trap == "in the model":
        la.model.register_forward_hook(count)
    files.os.replace, torch.save = replace_and_count, save_and_count


def run(name, path, seed, trap, n):
    """Fit until the trap snaps."""
    warnings.simplefilter("ignore")
    seed_everything(4)  # for fits that come before
    la, fit = CASES[name]()
    seed_everything(seed)
    set_trap(la, trap, n)
    fit(checkpoint=often(path))
