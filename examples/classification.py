"""Classification: fit ELLA to a trained network, tune it, and compare it with MAP.

Shows the four lines that most programs need: `Laplace(..., "nystrom")`, `fit`, tuning
on validation data, and the prediction. The network classifies noisy handwritten digits
and is overconfident. Images of a digit that it was not trained on show whether its
uncertainty detects unknown classes.
"""

import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
from laplace_ella import metrics

# Digits 0 to 8, with noise; 9 is kept as something the network does not know.
torch.manual_seed(0)
images, classes = load_digits(return_X_y=True)
x = torch.tensor(images).float() / 16
x = x + 0.3 * torch.randn_like(x)
y = torch.tensor(classes)
unknown, x, y = x[y == 9], x[y < 9], y[y < 9]
order = torch.randperm(len(x))
x, y = x[order], y[order]
train = TensorDataset(x[:500], y[:500])
train_loader = DataLoader(train, batch_size=100)
val_loader = DataLoader(TensorDataset(x[500:900], y[500:900]), batch_size=100)
x_test, y_test = x[900:], y[900:]

# Any trained network will do.
model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 9))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(30):
    for inputs, targets in DataLoader(train, batch_size=100, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

# The posterior over all its weights, with K = 20 directions from M = 2,000 gradients,
# which is the default for more than 4,000 pairs of an image and a class.
la = Laplace(
    model, "classification", subset_of_weights="all", hessian_structure="nystrom"
)
la.fit(train_loader)

# Features of the validation data serve for every prior, temperature and link.
cache = laplace_ella.FeatureCache.from_loader(la, val_loader)
la.optimize_prior_precision(method="gridsearch", val_loader=cache)
print(f"prior precision {la.prior_precision.item():.3g}\n")

with torch.no_grad():
    methods = {
        "MAP": lambda inputs: model(inputs).softmax(-1),
        "ELLA": la,
    }
    print(f"{'':6}{'accuracy':>9}{'NLL':>8}{'ECE':>8}{'AUROC of an unknown digit':>28}")
    scores = {}
    for name, predict in methods.items():
        probs = predict(x_test)
        scores[name] = metrics.classification_metrics(probs, y_test)
        scores[name]["auroc"] = metrics.ood_auroc(
            metrics.entropy(probs), metrics.entropy(predict(unknown))
        )
        accuracy, nll, ece, auroc = (
            scores[name][key] for key in ("accuracy", "nll", "ece", "auroc")
        )
        print(f"{name:6}{accuracy:9.3f}{nll:8.3f}{ece:8.3f}{auroc:28.3f}")
