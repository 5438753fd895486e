"""Active learning: choose the examples to label next.

Shows `predictive_samples(..., joint=True)`, samples of the class probabilities over a
pool of unlabelled images, and two scores: the margin between the two most probable
classes, and the mutual information between label and weights (BALD). The network is
trained with weight decay; the posterior is exact linearised Laplace over all weights
with the prior precision of the weight decay. With few directions or the last layer,
BALD does worse.
"""

import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_ella import metrics

PRIOR_PRECISION = 1.0
N_START, N_ROUNDS, N_QUERIES = 20, 4, 10

images, classes = load_digits(return_X_y=True)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
x, y = torch.tensor(images).float()[order] / 16, torch.tensor(classes)[order]
x_test, y_test, x, y = x[:800], y[:800], x[800:], y[800:]


def train(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """The maximum a posteriori: weight decay that a prior precision stands for."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        norm = sum(p.square().sum() for p in model.parameters())
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        ((loss + PRIOR_PRECISION / 2 * norm) / len(x)).backward()
        optimizer.step()
    return model


def samples_of(model: nn.Module, labelled: torch.Tensor, pool: torch.Tensor):
    """Class probabilities (S, B, C): a sample is one function, seen at all inputs."""
    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="nystrom",
        n_eigenvalues="exact",
        prior_precision=PRIOR_PRECISION,
    )
    la.fit(DataLoader(TensorDataset(x[labelled], y[labelled]), batch_size=100))
    return la.predictive_samples(x[pool], n_samples=256, joint=True)


def margin(samples: torch.Tensor) -> torch.Tensor:
    """How close the two most probable classes are, (B,)."""
    best = samples.mean(0).topk(2).values
    return best[:, 1] - best[:, 0]


def bald(samples: torch.Tensor) -> torch.Tensor:
    """What the label tells about the function, in nats (B,) (Houlsby et al. 2011)."""
    total = metrics.entropy(samples.mean(0))
    return total - torch.stack([metrics.entropy(one) for one in samples]).mean(0)


STRATEGIES = {"random": None, "margin": margin, "bald": bald}
accuracy = {name: torch.zeros(N_ROUNDS + 1) for name in STRATEGIES}
SEEDS = range(3)
for seed in SEEDS:
    for name, select in STRATEGIES.items():
        torch.manual_seed(seed)
        labelled, pool = torch.randperm(len(x))[:420].split([N_START, 400])
        for round_ in range(N_ROUNDS + 1):
            model = train(x[labelled], y[labelled])
            probs = model(x_test).softmax(-1)
            accuracy[name][round_] += metrics.accuracy(probs, y_test) / len(SEEDS)
            batch = torch.arange(N_QUERIES)
            if select is not None:
                scores = select(samples_of(model, labelled, pool))
                batch = scores.topk(N_QUERIES).indices
            asked = torch.isin(torch.arange(len(pool)), batch)
            labelled, pool = torch.cat([labelled, pool[asked]]), pool[~asked]
for name, values in accuracy.items():
    print(f"{name:8}", " ".join(f"{value:.3f}" for value in values.tolist()))
