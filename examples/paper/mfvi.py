"""CIFAR-10: mean-field variational inference by fine-tuning (MFVI-BF, Table 3).

    pip install "laplace-ella[paper]"
    python examples/paper/mfvi.py --network resnet20
    python examples/paper/cifar10.py --network resnet20 --tables   # with the new row

From the checkpoint, every weight of a convolution or a linear layer gets a Gaussian of
its own, fitted to the training images by the evidence bound with bayesian-torch's
Flipout layers (Deng et al. 2022, Section 5.2). The learning rate of the means and the
weight of the Kullback-Leibler divergence are chosen by NLL, on the same images and by
the same protocols as the settings of the other methods (see `cifar10.py`). Predictions
are means over 20 draws of the weights, as in the paper.

Interrupt and start again at will: predictions of every setting are kept.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import runs
from common.cifar import PAPER_PRIOR, Cifar
from common.evaluation import Evaluation
from common.mean_field import FineTuning, fine_tune, predict
from common.models import CIFAR_RESNETS, CIFAR_TRAIN_SIZE
from common.protocols import Fold, Outcome

from laplace_ella import metrics

METHOD, LINK = "MFVI-BF", "mc"

#: Of every setting: class probabilities of 'validation' and 'test' images.
Predictions = dict[FineTuning, dict[str, torch.Tensor]]


def candidates(args: Any) -> list[FineTuning]:
    return [
        FineTuning(
            learning_rate,
            kl_weight,
            prior_precision=PAPER_PRIOR,
            n_train=CIFAR_TRAIN_SIZE,
            epochs=args.epochs,
            batch_size=args.batch_size,
            seed=args.seed,
        )
        for learning_rate, kl_weight in product(args.learning_rates, args.kl_weights)
    ]


def predictions(args: Any, setup: Cifar, how: FineTuning) -> dict[str, torch.Tensor]:
    """Class probabilities by the posterior of a setting, kept in a file."""
    n_fit = min(args.n_fit, len(setup.train))
    sizes = f"{n_fit}_{args.n_validation}_{args.n_test}_{args.n_samples}"
    name = "_".join(f"{value:g}" for value in asdict(how).values())
    path = setup.folder.parent / "mfvi" / f"{sizes}_{name}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"{how}", flush=True)
        network = fine_tune(setup.model, setup.train[:n_fit], how)
        images = {"validation": setup.validation, "test": setup.test}
        probs = {
            which: predict(setup.model, network, part.x, args.n_samples, how.seed)
            for which, part in images.items()
        }
        torch.save(probs, path)
    return torch.load(path, weights_only=True)


def choose(found: Predictions, targets: dict[str, torch.Tensor], fold: Fold) -> Outcome:
    """The setting with the lowest NLL on the fold's images, for its test images."""
    y = targets[fold.where][fold.choose]

    def loss(how: FineTuning) -> float:
        return metrics.nll(found[how][fold.where][fold.choose], y)

    best = min(found, key=loss)
    chosen = {"lr": best.learning_rate, "KL": best.kl_weight}
    return Outcome(found[best]["test"][fold.predict], loss(best), chosen)


def parse(argv: list[str] | None) -> Any:
    parser = runs.arguments("cifar10", __doc__)
    parser.add_argument("--network", default="resnet20", choices=CIFAR_RESNETS)
    parser.add_argument("--weights", help="path or URL, default in --data-root")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-4])
    parser.add_argument("--kl-weights", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--n-fit", type=int, default=CIFAR_TRAIN_SIZE, help="at most")
    parser.add_argument("--n-validation", type=int, default=1500)
    parser.add_argument("--n-test", type=int, default=10_000)
    parser.add_argument("--n-samples", type=int, default=20, help="of the weights")
    parser.add_argument("--seed", type=int, default=0)
    args = runs.start(parser, argv)
    if args.smoke:
        args.n_fit, args.n_validation, args.n_test = 8, 6, 6
        args.batch_size, args.n_samples = 4, 2
    return args


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    setup = Cifar(args, args.network, 0, 0, args.n_validation, args.n_test, args.seed)
    targets = {"validation": setup.validation.y, "test": setup.test.y}
    settings = candidates(args)
    found = {how: predictions(args, setup, how) for how in settings}
    results = runs.Results(
        args.out / f"{args.network}_mfvi.json",
        {
            "candidates": [asdict(how) for how in settings],
            "n_fit": min(args.n_fit, len(setup.train)),
            "n_validation": args.n_validation,
            "n_test": args.n_test,
            "n_samples": args.n_samples,
            "strength": setup.strength,
        },
    )
    folder = setup.folder.parent / "mfvi" / "predictions"
    evaluation = Evaluation(results, folder, targets, ["train", "halves"])
    evaluation.add(METHOD, LINK, lambda fold: choose(found, targets, fold))
    write_candidates(args.out / f"{args.network}_mfvi.md", found, targets)
    path = args.out / f"{args.network}_mfvi_environment.json"
    runs.write_environment(path, args, ("bayesian-torch",))
    return list(results.rows.values())


def write_candidates(
    path: Path, found: Predictions, targets: dict[str, torch.Tensor]
) -> None:
    """Scores of every setting, on the images that settings are chosen on."""
    columns = {
        "images": "images",
        "learning_rate": "learning rate",
        "kl_weight": "KL weight",
        "accuracy": "accuracy",
        "nll": "NLL",
        "ece": "ECE",
        "brier": "Brier",
    }
    rows = [
        {
            "images": which,
            "learning_rate": f"{how.learning_rate:g}",
            "kl_weight": f"{how.kl_weight:g}",
            **metrics.classification_metrics(probs[which], y),
        }
        for which, y in targets.items()
        for how, probs in found.items()
    ]
    path.write_text(runs.markdown(rows, columns, {}))


if __name__ == "__main__":
    main(sys.argv[1:])
