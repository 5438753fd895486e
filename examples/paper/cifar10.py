"""CIFAR-10 with pretrained ResNets: Table 3 and Figures 2 to 4 of the paper.

    python examples/paper/cifar10.py                       # all studies, ResNet-20
    python examples/paper/cifar10.py --network resnet56 --n-test 2500 --only clean

Every study is a call of `compare` with the same cache: interrupt it and start it again,
finished rows are read. Settings are chosen on validation images, either new ones (other
test images) or training images changed by `augmented_validation`: these networks were
trained on the whole training set, and make hardly a mistake on it as it is.

- clean: all members of the family, with Fashion-MNIST as inputs of another kind
- ablations: K, M, the complement and what is chosen
- cheaper: the largest logits only (`top_outputs`), the last blocks only
- corruptions: eleven types of CIFAR-10-C by severity, settings chosen on clean images
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from common import runs
from common.corruptions import CORRUPTIONS, corrupt
from common.data import (
    Images,
    as_cifar,
    cifar10,
    cifar10_pixels,
    mnist,
    normalize_cifar,
)
from common.models import (
    CIFAR_RESNETS,
    CIFAR_TRAIN_SIZE,
    CIFAR_WEIGHT_DECAY,
    cifar_resnet,
)

import laplace_ella
from laplace_ella import (
    Report,
    augmented_validation,
    available_methods,
    compare,
    prior_precision_from_weight_decay,
)

KNOWN = available_methods()

#: 1/σ0² = N·(weight decay) = 5, the paper's prior.
PRIOR = prior_precision_from_weight_decay(CIFAR_WEIGHT_DECAY, CIFAR_TRAIN_SIZE)

COLUMNS = ("accuracy", "nll", "nll_to_best", "ece", "brier", "fit_s", "predict_s")

#: Parameters of parts of the network.
SCOPES = {
    "all layers": None,
    "last stage": ["layer3.*", "linear.*"],
    "last layer": ["linear.*"],
}

Methods = dict[str, Any]


def ella(tune: str = "calibration", **kwargs: Any) -> Any:
    """Return a row of this package, M = 2,000 and K = 20 unless told otherwise."""
    settings = {**KNOWN["ella-calibrated"].kwargs, "n_eigenvalues": 20, **kwargs}
    return replace(KNOWN["ella-calibrated"], kwargs=settings, tune=tune)


def without(method: str, tune: str) -> Any:
    """Return a row of laplace-torch that is tuned in another way."""
    return replace(KNOWN[method], tune=tune)


# Methods of the studies


def clean_methods(args: Any) -> Methods:
    paper = {**laplace_ella.PAPER, "subsample_size": args.n_samples}
    M = {"subsample_size": args.n_samples}
    return {
        "MAP": KNOWN["map"],
        "temperature scaling": KNOWN["temperature"],
        "last layer, full, evidence": without("last-layer-full", "marglik"),
        "last layer, KFAC, evidence": without("last-layer-kron", "marglik"),
        "last layer, full, calibrated": KNOWN["last-layer-full-calibrated"],
        "ELLA as in the paper": ella("early_stopping", **paper),
        "ELLA K=20, all data": ella("none", **paper),
        "ELLA K=20, calibrated": ella(complement="drop", **M),
        f"ELLA K={args.rank}, calibrated, complement": ella(
            n_eigenvalues=args.rank, complement="prior", **M
        ),
    }


def ablation_methods(args: Any) -> Methods:
    methods: Methods = {"temperature scaling": KNOWN["temperature"]}
    for rank in args.ranks:
        for tune in ("none", "early_stopping", "calibration"):
            for complement in ("drop", "prior"):
                if complement == "prior" and tune in ("none", "early_stopping"):
                    continue  # everything then depends on a prior that nobody chose
                methods[f"K={rank}, {complement}, {tune}"] = ella(
                    tune,
                    n_eigenvalues=rank,
                    complement=complement,
                    subsample_size=args.n_samples,
                )
    for n_samples in args.sample_sizes:
        methods[f"M={n_samples}, K=20, drop, calibration"] = ella(
            n_eigenvalues=min(20, n_samples),
            subsample_size=n_samples,
            complement="drop",
        )
    return methods


def cheaper_methods(args: Any) -> Methods:
    methods: Methods = {"temperature scaling": KNOWN["temperature"]}
    for scope, names in SCOPES.items():
        for top in (None, *args.tops):
            methods[f"{scope}, m={top or 'all'}"] = ella(
                parameter_names=names, top_outputs=top, subsample_size=args.n_samples
            )
    return methods


def corruption_methods(args: Any) -> Methods:
    names = ("MAP", "temperature scaling", "last layer, full, calibrated")
    kept = (*names, "ELLA as in the paper", f"ELLA K={args.rank}, calibrated, ")
    return {k: v for k, v in clean_methods(args).items() if k.startswith(kept)}


# Studies


class Study:
    """The network, its images, and `compare` with what all studies have in common."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.model = cifar_resnet(args.network, args.data_root)
        train = cifar10(args.data_root, "train")
        self.fit, self.kept = train[: args.n_fit], train[-args.n_val :]
        last = args.n_val + args.n_test
        test = cifar10(args.data_root, "test", last)
        self.new, self.test = test[: args.n_val], test[args.n_val :]

    def run(
        self,
        methods: Methods,
        validation: str = "new",
        test: Images | None = None,
        ood: dict[str, Images] | None = None,
    ) -> Report:
        args = self.args
        val = self.new.loader()
        if validation == "augmented":
            val = augmented_validation(self.kept.loader())
        return compare(
            self.model,
            "classification",
            self.fit.loader(),
            (test or self.test).loader(),
            val,
            {name: images.loader() for name, images in (ood or {}).items()},
            methods,
            links=args.links,
            seeds=args.seeds,
            prior_precision=PRIOR,
            cache=args.cache_dir / args.network,
            progress_bar=not args.smoke,
        )

    def sizes(self) -> str:
        args = self.args
        return (
            f"{args.network}: M = {args.n_samples}, {args.n_fit:,} images fitted, "
            f"{args.n_val:,} to choose settings on, {len(self.test):,} tested."
        )


def clean(study: Study) -> str:
    args, parts = study.args, []
    fashion = as_cifar(mnist(args.data_root, "test", fashion=True)[: args.n_ood])
    for validation in ("new", "augmented"):
        ood = {"Fashion-MNIST": fashion} if validation == "new" else None
        report = study.run(clean_methods(args), validation, ood=ood)
        aurocs = [name for name in report.columns if name.startswith("auroc")]
        parts.append(
            f"**Settings chosen on {validation} images**\n\n"
            + report.to_markdown(shown(report, (*COLUMNS, *aurocs)))
        )
    return "\n\n".join(parts)


def ablations(study: Study) -> str:
    report = study.run(ablation_methods(study.args))
    return report.to_markdown(shown(report))


def cheaper(study: Study) -> str:
    report = study.run(cheaper_methods(study.args))
    return report.to_markdown(shown(report))


def corruptions(study: Study) -> str:
    args, parts = study.args, []
    pixels, classes = cifar10_pixels(args.data_root, "test")
    rows = slice(args.n_val, args.n_val + args.n_corrupted)
    types = list(CORRUPTIONS)[: args.n_types]
    targets = torch.as_tensor(classes[rows]).long().repeat(len(types))
    for severity in args.severities:
        changed = [corrupt(pixels[rows], name, severity) for name in types]
        images = Images(normalize_cifar(np.concatenate(changed)), targets)
        report = study.run(corruption_methods(args), test=images)
        parts.append(
            f"**Severity {severity}, {len(types)} types of {args.n_corrupted} images "
            f"each**\n\n{report.to_markdown(shown(report))}"
        )
    return "\n\n".join(parts)


def shown(report: Report, columns: tuple[str, ...] = COLUMNS) -> list[str]:
    """Return those of the columns that the report has."""
    known = {*report.columns, "nll_to_best"}
    return [name for name in columns if name in known]


STUDIES: dict[str, Callable[[Study], str]] = {
    "clean": clean,
    "ablations": ablations,
    "cheaper": cheaper,
    "corruptions": corruptions,
}


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("cifar10", __doc__)
    parser.add_argument("--network", default="resnet20", choices=CIFAR_RESNETS)
    parser.add_argument("--only", nargs="*", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--rank", type=int, default=128, help="K of the largest basis")
    parser.add_argument("--ranks", type=int, nargs="*", default=[5, 20, 128, 512])
    parser.add_argument("--tops", type=int, nargs="*", default=[3, 1])
    parser.add_argument("--n-samples", type=int, default=2000, help="M")
    parser.add_argument("--sample-sizes", type=int, nargs="*", default=[125, 500])
    parser.add_argument("--n-fit", type=int, default=2000)
    parser.add_argument("--n-val", type=int, default=1000)
    parser.add_argument("--n-test", type=int, default=5000)
    parser.add_argument("--n-ood", type=int, default=2000)
    parser.add_argument("--n-corrupted", type=int, default=300)
    parser.add_argument("--n-types", type=int, default=len(CORRUPTIONS))
    parser.add_argument("--severities", type=int, nargs="*", default=[1, 3, 5])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--links", nargs="*", default=["mc", "probit"])
    args = runs.start(parser, argv)
    if args.smoke:
        args.rank, args.ranks, args.tops, args.n_samples = 4, [2], [1], 8
        args.sample_sizes, args.n_fit, args.n_val, args.n_test = [4], 8, 8, 8
        args.n_ood, args.n_corrupted, args.n_types, args.severities = 4, 2, 2, [3]
        args.links = ["probit"]
    study = Study(args)
    about = f"`python examples/paper/cifar10.py {' '.join(sys.argv[1:])}`".strip()
    for name in args.only:
        text = f"{study.sizes()}\n\n{STUDIES[name](study)}\n\n"
        text += f"{about}; {runs.environment(args.threads)}.\n"
        (args.out / f"{args.network}_{name}.md").write_text(text)
        print(text, flush=True)


if __name__ == "__main__":
    main()
