"""ImageNet classifiers with 1,000 classes (Tables 4 and 5 of the paper).

    python examples/paper/imagenet.py                  # EfficientNet-Lite0, the sample
    python examples/paper/imagenet.py --model resnet50 --data-root /data/imagenet

--data-root holds `imagenet_sample/NNNN_wnid.jpg` or ImageNet's `val/<wnid>/*.JPEG`.
Other images choose the settings than are fitted or tested. The sample has one image per
class, which says little about accuracy: with 250 test images one more is 0.4 %.

Features are computed in forward mode, 2K + 1 passes whatever the number of classes, or
for the m largest logits only. The complement would need a backward pass per class and
is dropped. Of the last layer ELLA is shown: laplace-torch's structures form a Jacobian
of 1,000 classes by 1.3 million weights for every image (5 GiB).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from common import runs
from common.data import Images, imagenet_sample, read_images
from common.models import imagenet_model

from laplace_ella import (
    available_methods,
    compare,
    prior_precision_from_weight_decay,
)

KNOWN = available_methods()
WEIGHT_DECAY = {"efficientnet_lite0": 1e-5}  # as published; torchvision's is 1e-4
TRAIN_SIZE = 1_281_167


def load_images(args: Any) -> list[Images]:
    """Return images to fit, to choose settings on and to test, in a random order."""
    paths, classes = imagenet_sample(args.data_root)
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))
    sizes = [args.n_fit, args.n_val, args.n_test]
    return [
        Images(read_images([paths[i] for i in rows]), classes[rows])
        for rows in order[: sum(sizes)].split(sizes)
    ]


def methods(args: Any) -> dict[str, Any]:
    """Return MAP, temperature scaling, and ELLA of the network and its last layer."""
    calibrated = KNOWN["ella-calibrated"]
    sizes = {"subsample_size": args.n_samples, "n_eigenvalues": args.rank}
    network = {**calibrated.kwargs, **sizes, "complement": "drop"}
    last = {**network, "subset_of_weights": "last_layer"}
    prior = replace(calibrated, kwargs=network, tune="none")
    return {
        "MAP": KNOWN["map"],
        "temperature scaling": KNOWN["temperature"],
        "ELLA, given prior": prior,
        "ELLA, calibrated": replace(calibrated, kwargs=network),
        "ELLA, calibrated, m=3": replace(
            calibrated, kwargs={**network, "top_outputs": 3}
        ),
        "last layer, ELLA, calibrated": replace(calibrated, kwargs=last),
    }


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("imagenet", __doc__)
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--n-samples", type=int, default=200, help="M")
    parser.add_argument("--rank", type=int, default=5, help="K")
    parser.add_argument("--n-fit", type=int, default=100)
    parser.add_argument("--n-val", type=int, default=250)
    parser.add_argument("--n-test", type=int, default=250)
    args = runs.start(parser, argv)
    if args.smoke:
        args.n_samples, args.rank = 3, 2
        args.n_fit, args.n_val, args.n_test = 4, 4, 4
    model = imagenet_model(args.model)
    fit, val, test = (images.loader(10) for images in load_images(args))
    decay = WEIGHT_DECAY.get(args.model, 1e-4)
    report = compare(
        model,
        "classification",
        fit,
        test,
        val,
        methods=methods(args),
        links=["probit"],
        prior_precision=prior_precision_from_weight_decay(decay, TRAIN_SIZE),
        cache=args.cache_dir / args.model,
        progress_bar=not args.smoke,
    )
    columns = ["accuracy", "nll", "nll_to_best", "ece", "brier", "fit_s", "predict_s"]
    text = (
        f"{args.model}, K = {args.rank}, M = {args.n_samples}: {args.n_fit} images "
        f"fitted, {args.n_val} to choose settings on, {args.n_test} tested. "
        f"{runs.environment(args.threads)}.\n\n{report.to_markdown(columns)}\n"
    )
    (args.out / f"{args.model}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
