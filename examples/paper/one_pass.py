"""Can a head on the network's own activations predict ELLA's variance in one pass?

    python examples/paper/one_pass.py
    python examples/paper/one_pass.py --most    # one fit, with all images there are

Heads are fitted to the log of the variance of ResNet-20's logits on CIFAR-10 test
images, without their labels, from activations that a forward pass has anyhow. Other
test images, clean and corrupted, tell how much of the variance a head explains (R² of
the log of the mean variance over logits), whether rules that flag inputs 'unlike' the
fitted ones flag those with large errors, and what the predicted probabilities are worth
beside exact features, the exact posterior of the last layer and temperature scaling.

Prior, temperature and softmax temperature of the posteriors are calibrated on further
test images with their labels, with exact features; thresholds are chosen on the same.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from common import runs
from common.models import ResNet, cifar_resnet
from common.one_pass_data import (
    LINK,
    RICHEST,
    SMOKE,
    TESTED,
    Sizes,
    activations,
    image_sets,
    last_layer_posterior,
)
from common.one_pass_heads import Heads, explained, fitted_line
from common.one_pass_study import study_of

from laplace_ella import ELLALaplace


def costs(
    model: ResNet, la: ELLALaplace, heads: Heads, x: torch.Tensor
) -> list[dict[str, Any]]:
    """Of predictions of a batch, in forward passes."""
    with torch.no_grad():
        one = runs.best_seconds(lambda: model(x))
        rich = activations(model, x)[RICHEST]
        work = {"forward pass": one}
        work["activations, with the pass"] = runs.best_seconds(
            lambda: activations(model, x)
        )
        scaled = heads.scaled(rich)
        for name, head in heads.heads.items():
            work[f"head: {name}"] = runs.best_seconds(lambda head=head: head(scaled))
    name = f"exact features, K = {la.basis.rank}"
    work[name] = runs.best_seconds(lambda: la(x, link_approx=LINK), 2)
    return [{"what": name, "passes": value / one} for name, value in work.items()]


def tables(args: Any, sizes: Sizes) -> dict[str, list[dict[str, Any]]]:
    model = cifar_resnet("resnet20", args.data_root)
    sets = image_sets(args.data_root, sizes)
    study, la = study_of(args, sizes, model, sets)
    if args.most:
        return {"most": study.most_images()}
    last_layer = last_layer_posterior(args, sizes, model, sets)
    heads = {posterior: study.fitted(posterior) for posterior in study.posteriors}
    found = {
        "costs": costs(model, la, heads[study.first], sets["clean"].x[:48]),
        "flags": study.flagged(heads),
        "probabilities": study.probabilities(heads, last_layer),
        "activations": study.by_activations(),
        "curve": study.learning_curve(),
        "unseen": study.unseen_types(),
    }
    own = {k: v[:, 0] for k, v in last_layer.logs.items()}
    for posterior, whole in study.posteriors.items():
        logs = {k: v[:, 0] for k, v in whole.logs.items()}
        line = fitted_line(own["calibration"], logs["calibration"])
        row = {"posterior": posterior, "kind": "exact variance of the last layer (1)"}
        row |= {k: explained(line(own[k]), logs[k]) for k in TESTED}
        found["activations"].append({**row, "way": "line", "logits": None})
    return found


#: Columns of the sets that are tested.
SETS = {name: name for name in TESTED}

#: Of each table the title, the columns and how their numbers are written.
HEADINGS = {
    "activations": (
        "Explained variance (R²) of the log of the mean variance of the logits, by "
        "activations; 'by logit': of each logit's variance in the centred link",
        {
            "posterior": "posterior",
            "kind": "activations (how many)",
            "way": "head",
            **SETS,
            "logits": "clean, by logit",
        },
        dict.fromkeys((*TESTED, "logits"), ".3f"),
    ),
    "curve": (
        "R² by the number of images fitted, most activations; beyond the test images "
        "with images that the network was trained on",
        {
            "n": "images",
            "way": "head",
            **SETS,
            "±": "standard error, clean",
        },
        dict.fromkeys((*TESTED, "±"), ".3f"),
    ),
    "most": (
        "R² with all images, test, training and corrupted ones; the types of half of "
        "the corrupted images that are tested are among them",
        {
            "posterior": "posterior",
            "n": "images",
            "way": "head",
            **SETS,
            "±": "standard error, clean",
        },
        dict.fromkeys((*TESTED, "±"), ".3f"),
    ),
    "unseen": (
        "R² of the mean of the heads on every second type of corruption, the others "
        "being among the images fitted in the second row; and shares flagged by the "
        "nearest neighbour",
        {
            "sources": "fitted on",
            **SETS,
            **{f"{name} flagged": f"{name}: flagged" for name in TESTED},
        },
        dict.fromkeys((*TESTED, *(f"{name} flagged" for name in TESTED)), ".3f"),
    ),
    "flags": (
        "Flags that let 95 % of clean calibration images pass, for the mean of the "
        "heads on most activations: R² of all and of those not flagged, RMS errors of "
        "the log variance, rank correlation of distance and absolute error",
        {
            "posterior": "posterior",
            "rule": "distance",
            "set": "images",
            "flagged": "flagged",
            "all": "R², all",
            "unflagged": "R², not flagged",
            "error": "error, not flagged",
            "error flagged": "error, flagged",
            "rank": "rank correlation",
        },
        dict.fromkeys(
            ("flagged", "all", "unflagged", "error", "error flagged", "rank"), ".3f"
        ),
    ),
    "probabilities": (
        "Probabilities by the centred probit link, with the softmax temperature that "
        "suits exact features; differences of the NLL with standard errors, and mean "
        "total variation from the probabilities by exact features",
        {
            "set": "images",
            "method": "method",
            "nll": "NLL",
            "ece": "ECE",
            "beyond scaling": "NLL beyond temperature scaling",
            "beyond exact": "NLL beyond exact",
            "distance": "distance from exact",
        },
        {"nll": ".4f", "ece": ".4f", "distance": ".4f"},
    ),
    "costs": (
        "Costs of a batch of 48 images, in forward passes",
        {"what": "what", "passes": "passes"},
        {"passes": ".2f"},
    ),
}


def page(found: dict[str, list[dict[str, Any]]], sizes: Sizes) -> str:
    note = (
        f"ResNet-20, M = {sizes.M:,}, {sizes.posterior:,} images fitted; heads fitted "
        f"on {sizes.head:,} test images unless said otherwise, calibrated on "
        f"{sizes.calibration:,}, tested on {sizes.clean:,} clean and "
        f"{sizes.corrupted:,} corrupted images for each severity, all types in turn.\n"
    )
    parts = [note]
    for name in (name for name in HEADINGS if name in found):
        title, columns, digits = HEADINGS[name]
        parts.append(f"**{title}**\n")
        parts.append(runs.markdown(found[name], columns, digits))
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = runs.arguments("one_pass", __doc__)
    parser.add_argument(
        "--most", action="store_true", help="only the heads of all images, most.md"
    )
    args = runs.start(parser, argv)
    sizes = SMOKE if args.smoke else Sizes()
    found = tables(args, sizes)
    name = "most" if args.most else "one_pass"
    text = page(found, sizes)
    (args.out / f"{name}.md").write_text(text)
    runs.write_environment(args.out / "environment.json", args)
    print(text)
    return found["most" if args.most else "activations"]


if __name__ == "__main__":
    main(sys.argv[1:])
