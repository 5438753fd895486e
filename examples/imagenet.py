"""ImageNet classifiers with 1,000 classes (Tables 4 and 5 of the paper).

    python examples/imagenet.py --model efficientnet_lite0
    python examples/imagenet.py --model resnet50 --data-root /data/imagenet
    python examples/imagenet.py --model vit_base_patch16_224 --data-root /data/imagenet

--data-root holds `imagenet_sample/NNNN_wnid.jpg` or ImageNet's `val/<wnid>/*.JPEG`. The
images are split: the first half fits and validates, the second half tests. The sample
has one image a class, which says little about accuracy: one image more is 0.2 %.

Features are computed in forward mode, K tangents whatever the number of classes; the
complement would need 1,000 backward passes an image and is not used here.
"""

from __future__ import annotations

import resource
import sys
from functools import partial
from typing import Any

import torch
from common import ella, models, runs
from common.data import Images, imagenet_sample, read_images
from common.ella import Setting

from laplace_ella import metrics, prior_precision_from_weight_decay

WEIGHT_DECAY = {"efficientnet_lite0": 1e-5}  # as published; torchvision's is 1e-4
TRAIN_SIZE = 1_281_167

COLUMNS = {
    "method": "method",
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "chosen": "chosen",
}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("imagenet", __doc__)
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--weights", help="path or URL; default: the library's")
    parser.add_argument("--subsample-size", type=int, default=200)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--n-fit", type=int, default=250)
    parser.add_argument("--n-validation", type=int, default=250)
    parser.add_argument("--n-test", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = runs.start(parser, argv)
    if args.smoke:
        args.subsample_size, args.rank = 3, 2
        args.n_fit, args.n_validation, args.n_test = 4, 2, 2
    model = models.imagenet_model(args.model, args.weights)
    paths, classes = imagenet_sample(args.data_root)
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))
    half = len(order) // 2
    pools = {
        "fit": order[: half - args.n_validation][: args.n_fit],
        "validation": order[half - args.n_validation : half],
        "test": order[half:][: args.n_test],
    }
    images = {
        which: Images(read_images([paths[i] for i in rows]), classes[rows])
        for which, rows in pools.items()
    }
    name = f"{args.model}_M{args.subsample_size}_K{args.rank}_seed{args.seed}"
    folder = args.cache_dir / "imagenet" / name
    decay = WEIGHT_DECAY.get(args.model, 1e-4)
    prior = prior_precision_from_weight_decay(decay, TRAIN_SIZE)
    times: dict[str, float] = {}
    with runs.stopwatch() as watch:
        la = ella.fit_basis(
            model,
            images["fit"],
            folder / "ella.pt",
            n_eigenvalues=args.rank,
            subsample_size=args.subsample_size,
            seed=args.seed,
            prior_precision=prior,
            batch_size=2 if args.smoke else 12,
        )
    times["basis"] = watch["cpu"]
    features = {}
    for which, part in images.items():
        with runs.stopwatch() as watch:
            features[which] = ella.cached_features(
                la, part, folder / which, kernel=False, batch_size=12, shard=25
            )
        times[which] = watch["cpu"] / len(part)
    with runs.stopwatch() as watch:
        ella.forward(model, images["test"].x[:10], batch=10)
    times["forward"] = watch["cpu"] / len(images["test"].x[:10])
    rows = evaluate(args, la, features, prior)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    runs.write_csv(args.out / f"{args.model}.csv", rows)
    table = runs.markdown(rows, COLUMNS, {})
    table += "\nCPU seconds: " + ", ".join(f"{k} {v:.3g}" for k, v in times.items())
    table += " (basis in all, the rest an image; cached features cost nothing). "
    table += f"Peak memory {memory:.1f} GiB. {len(features['fit'])} images fitted, "
    table += (
        f"{len(features['validation'])} to choose, {len(features['test'])} tested.\n"
    )
    (args.out / f"{args.model}.md").write_text(table)
    runs.write_environment(args.out / f"{args.model}_environment.json", args)
    print(table)
    return rows


def evaluate(
    args: Any, la: Any, features: dict[str, Any], prior: float
) -> list[dict[str, Any]]:
    """One row a method and link."""
    test, validation = features["test"], features["validation"]
    score = partial(metrics.classification_metrics, targets=test.targets)
    t = ella.scaling_temperature(validation.f_mu, validation.targets)
    rows = [
        {"method": "MAP", **score(test.f_mu.softmax(-1))},
        {
            "method": "temperature scaling",
            **score((test.f_mu / t).softmax(-1)),
            "chosen": f"T={t:.3g}",
        },
    ]
    study = ella.Study(la, features["fit"])
    for search in ("none", "stop", "temperature", "both"):
        setting = Setting(args.rank, search)
        for link in ("mc", "probit"):
            la, chosen = ella.choose(
                study, setting, link, validation, prior, TRAIN_SIZE
            )
            rows.append(
                {
                    "method": f"{setting}, {link}",
                    **score(ella.predict(la, test, link)),
                    "chosen": ella.describe(chosen),
                }
            )
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
