"""ImageNet classifiers with 1,000 classes (Tables 4 and 5 of the paper).

    cd examples/paper
    python imagenet.py --model efficientnet_lite0
    python imagenet.py --model resnet50 --data-root /data/imagenet
    python imagenet.py --model vit_base_patch16_224 --data-root /data/imagenet

--data-root holds `imagenet_sample/NNNN_wnid.jpg` or ImageNet's `val/<wnid>/*.JPEG`.
Half of the images is fitted, half tested; settings are chosen on one half of the test
images for the other, and the other way round. The sample has one image per
class, which says little about accuracy: with 500 test images one more is 0.2 %.

Features are computed in forward mode, K tangents whatever the number of classes; the
complement would need 1,000 backward passes per image and is dropped. Of the last layer
ELLA is shown: laplace-torch's structures form the Jacobian of 1,000 classes by 1.3
million weights for every image (5 GiB), its full posterior a matrix of 6 TiB.

Interrupt and start again at will: basis, features and rows are kept.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from common import ella, facts, models, runs
from common.data import Images, imagenet_sample, read_images
from common.ella import Setting
from common.evaluation import COLUMNS, Evaluation
from common.protocols import Outcome
from torch import nn

from laplace_ella import FeatureCache, prior_precision_from_weight_decay

WEIGHT_DECAY = {"efficientnet_lite0": 1e-5}  # as published; torchvision's is 1e-4
TRAIN_SIZE = 1_281_167
LINKS = ("mc", "probit")
CALIBRATED_LINKS = (*LINKS, "probit_centered")
SEARCHES = ("none", "stop", "temperature", "both", "calibrated")
SHARD = 20


def load_images(args: Any) -> dict[str, Images]:
    """Images to fit and to test, in a fixed random order."""
    paths, classes = imagenet_sample(args.data_root)
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))
    half = len(order) // 2
    pools = {"fit": order[:half][: args.n_fit], "test": order[half:][: args.n_test]}
    return {
        which: Images(read_images([paths[i] for i in rows]), classes[rows])
        for which, rows in pools.items()
    }


def prior_precision(model: str) -> float:
    """The paper's prior, from the weight decay of training."""
    decay = WEIGHT_DECAY.get(model, 1e-4)
    return prior_precision_from_weight_decay(decay, TRAIN_SIZE)


class Times:
    """CPU seconds of the stages, kept with the features that they made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.seconds = json.loads(path.read_text()) if path.exists() else {}

    def measure(self, stage: str, call: Any) -> Any:
        """What `call` returns.

        The longest run of a stage counts: later ones only read its files.
        """
        with runs.stopwatch() as watch:
            result = call()
        self.seconds[stage] = max(watch["cpu"], self.seconds.get(stage, 0.0))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.seconds["peak GiB"] = max(memory, self.seconds.get("peak GiB", 0.0))
        self.path.write_text(json.dumps(self.seconds, indent=1) + "\n")
        return result


def all_layers(
    args: Any, model: nn.Module, images: dict[str, Images], folder: Path, times: Times
) -> tuple[ella.Study, dict[str, FeatureCache]]:
    """ELLA of the whole network, and features."""
    sample = images["test"].x[:8]
    ella.forward(model, sample[:2])  # the first call sets things up
    times.measure("forward pass of 8 images", lambda: ella.forward(model, sample))
    one = times.seconds["forward pass of 8 images"] / len(sample)
    n_images = sum(len(part) for part in images.values())
    minutes = one * n_images * (2 * args.rank + 1) / 60
    print(
        f"forward pass {1000 * one:.0f} ms per image; features of {n_images} images "
        f"take about {minutes:.0f} min ({2 * args.rank + 1} forward passes each)",
        flush=True,
    )
    la = times.measure(
        "basis",
        lambda: ella.fit_basis(
            model,
            images["fit"],
            folder / "ella.pt",
            n_eigenvalues=args.rank,
            subsample_size=args.subsample_size,
            seed=args.seed,
            prior_precision=prior_precision(args.model),
            batch_size=2 if args.smoke else 10,
        ),
    )
    features = {
        which: times.measure(
            f"features of {len(part)} images to {which}",
            lambda which=which, part=part: ella.cached_features(
                la, part, folder / which, residual=False, batch_size=10, shard=SHARD
            ),
        )
        for which, part in images.items()
    }
    return ella.Study(la, features["fit"]), features


def last_layer(
    args: Any, model: nn.Module, images: dict[str, Images], folder: Path, times: Times
) -> tuple[ella.Study, dict[str, FeatureCache]]:
    """ELLA of the last layer, and features."""
    head = models.last_layer(model)
    embedded = {
        which: Images(embed(model, head, part.x), part.y)
        for which, part in images.items()
    }
    return times.measure(
        "last layer, basis and features",
        lambda: ella.last_layer_study(
            head,
            embedded,
            folder,
            residual=False,
            n_eigenvalues=args.rank,
            subsample_size=args.subsample_size,
            seed=args.seed,
            prior_precision=prior_precision(args.model),
        ),
    )


def embed(model: nn.Module, head: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What the last layer sees of images."""
    seen = []
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        ella.forward(model, x, batch=20)
    finally:
        handle.remove()
    return torch.cat(seen)


def simple_methods(evaluation: Evaluation, test: FeatureCache) -> None:
    evaluation.add(
        "MAP", "–", lambda fold: Outcome(test.f_mu[fold.predict].softmax(-1))
    )
    logits = {"test": test.f_mu}
    evaluation.add(
        "temperature scaling",
        "–",
        lambda fold: ella.scale_on_fold(logits, evaluation.targets, fold),
    )


def ella_methods(
    args: Any,
    evaluation: Evaluation,
    study: ella.Study,
    features: dict[str, FeatureCache],
    prefix: str = "",
) -> None:
    prior = prior_precision(args.model)
    searches = ("stop", "calibrated") if args.smoke else SEARCHES
    pairs = [
        (Setting(args.rank, search), link)
        for search in searches
        for link in (CALIBRATED_LINKS if search == "calibrated" else LINKS)
    ]
    evaluation.results.expect(f"halves | {prefix}{s} | {link}" for s, link in pairs)
    for setting, link in pairs:
        evaluation.add(
            f"{prefix}{setting}",
            link,
            lambda fold, s=setting, li=link: ella.on_fold(
                study, s, li, fold, features, prior, TRAIN_SIZE
            ),
        )


def differences(rank: int, evaluation: Evaluation) -> str:
    """Paired differences to temperature scaling and the best last layer."""
    references = "temperature scaling", "best last layer on validation"
    calibrated = str(Setting(rank, "calibrated"))
    names = [
        ("MAP", "–"),
        (references[0], "–"),
        (references[1], "chosen"),
        *((calibrated, link) for link in CALIBRATED_LINKS),
        ("best ELLA on validation", "chosen"),
    ]
    probs = {
        method if link in ("–", "chosen") else f"{method}, {link}": stored
        for method, link in names
        if (stored := evaluation.probs(method, link, "halves")) is not None
    }
    rows = facts.paired_differences(probs, evaluation.targets["test"], references)
    return runs.markdown(rows, facts.PAIR_COLUMNS, facts.PAIR_DIGITS)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("imagenet", __doc__)
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--weights", help="path or URL; default: the library's")
    parser.add_argument("--subsample-size", type=int, default=200)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--n-fit", type=int, default=500)
    parser.add_argument("--n-test", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = runs.start(parser, argv)
    if args.smoke:
        args.subsample_size, args.rank = 3, 2
        args.n_fit, args.n_test = 4, 4
    model = models.imagenet_model(args.model, args.weights)
    images = load_images(args)
    name = f"{args.model}_M{args.subsample_size}_K{args.rank}_seed{args.seed}"
    folder = args.cache_dir / "imagenet" / name
    times = Times(folder / "times.json")
    keep = ("model", "subsample_size", "rank", "n_fit", "n_test", "seed")
    settings = {k: getattr(args, k) for k in keep}
    results = runs.Results(args.out / f"{args.model}.json", settings)
    study, features = all_layers(args, model, images, folder, times)
    targets = {"test": images["test"].y}
    predictions = folder / f"predictions_{args.n_fit}_{args.n_test}"
    evaluation = Evaluation(results, predictions, targets, ["halves"])
    simple_methods(evaluation, features["test"])
    ella_methods(args, evaluation, study, features)
    study, features = last_layer(args, model, images, folder, times)
    ella_methods(args, evaluation, study, features, "last layer, ")
    rows = list(results.rows.values())
    rows += evaluation.best("ELLA") + evaluation.best("last layer")
    runs.write_csv(args.out / f"{args.model}.csv", rows)
    table = runs.markdown(rows, COLUMNS, {}) + "\n" + cost(times, images)
    (args.out / f"{args.model}.md").write_text(table)
    paired = differences(args.rank, evaluation)
    (args.out / f"{args.model}_differences.md").write_text(paired)
    runs.write_environment(args.out / f"{args.model}_environment.json", args)
    print(table)
    return rows


def cost(times: Times, images: dict[str, Images]) -> str:
    """What it took, in a sentence."""
    seconds = dict(times.seconds)
    memory = seconds.pop("peak GiB")
    stages = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items())
    sizes = " and ".join(f"{len(p)} images to {w}" for w, p in images.items())
    return f"CPU seconds: {stages}. Peak memory {memory:.1f} GiB. {sizes}.\n"


if __name__ == "__main__":
    main(sys.argv[1:])
