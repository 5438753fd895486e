"""What was found, in one screenful: results/in_short.md from the other result files.

    python examples/paper/in_short.py
    python examples/paper/update_results.py    # copies it to the top of RESULTS.md

Computes nothing anew. The goals that the tables judge by: on clean images, the NLL of
calibrated ELLA is at most that of temperature scaling and of the last layer with the
lowest validation NLL, within one standard error of the paired difference; under
corruption, its NLL, ECE and Brier score are the lowest of all methods.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from common import runs
from common.protocols import TITLES

Row = dict[str, str]

SCALING = "temperature scaling"
LAST_LAYER = "best last layer on validation"
NETWORKS = {"resnet20": "ResNet-20", "resnet56": "ResNet-56"}

#: Protocols by the images that settings are chosen on, the closest to use first.
CHOSEN_ON = {"halves": "new", "augmented": "augmented", "train": "moved"}

SCORES = {"nll": "NLL", "ece": "ECE", "brier": "Brier"}

#: Methods of the table of corruptions, by the beginnings and ends of their names.
CORRUPTED = {
    "network alone": ("MAP", ""),
    SCALING: (SCALING, ""),
    "last layer, calibrated": ("last layer, full, calibrated", ""),
    "ELLA as in the paper": ("ELLA", "early stopping, mc"),
    "ELLA without τ": ("ELLA", "tempered, prior chosen, complement, mc"),
    "ELLA, calibrated": ("ELLA", "calibrated, complement, mc"),
}

#: A row of paired differences: two methods, the mean and its standard error.
DIFFERENCE = re.compile(r"\| (.+?) \| (.+?) \| ([+-][\d.]+) \| ([\d.]+) \|")


# --- result files ---------------------------------------------------------------------


def read_csv(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_differences(path: Path) -> dict[str, dict[tuple[str, str], tuple[float, ...]]]:
    """Mean and standard error of paired differences, by title and pair of methods."""
    found: dict[str, dict[tuple[str, str], tuple[float, ...]]] = {}
    title = ""
    for line in path.read_text().splitlines():
        if line.startswith("**"):
            title = line.strip("*")
        elif row := DIFFERENCE.match(line):
            pair = row[1], row[2]
            found.setdefault(title, {})[pair] = float(row[3]), float(row[4])
    return found


def named(methods: Iterable[str], begin: str, end: str) -> str | None:
    """The method with this beginning and end; of several the last, of largest K."""
    found = [m for m in methods if m.startswith(begin) and m.endswith(end)]
    return found[-1] if found else None


# --- tables ---------------------------------------------------------------------------


def clean(results: Path) -> str:
    """Clean CIFAR-10 images: NLL by method, and the differences that count."""
    lines = []
    for network, name in NETWORKS.items():
        rows = read_csv(results / "cifar10" / f"{network}.csv")
        pairs = read_differences(results / "cifar10" / f"{network}_facts.md")
        stored = json.loads((results / "cifar10" / f"{network}.json").read_text())
        title = f"{name}, {stored['settings']['n_test']:,} images"
        for protocol, images in CHOSEN_ON.items():
            mine = [row for row in rows if row["protocol"] == protocol]
            found = {(r["method"], r["link"]): float(r["nll"]) for r in mine}
            for row in stored["rows"].values():  # with all their digits
                if row.get("protocol") == protocol:
                    found[row["method"], row["link"]] = row["nll"]
            methods = list(dict.fromkeys(row["method"] for row in mine))
            ours = named(methods, "ELLA", "calibrated, complement")
            paper = named(methods, "ELLA", "early stopping")
            if ours is None or paper is None:  # of a run without calibration
                continue
            differences = pairs[f"Paired differences: {TITLES[protocol].lower()}"]
            to = [differences[f"{ours}, mc", ref] for ref in (SCALING, LAST_LAYER)]
            lines.append(
                {
                    "network": title,
                    "images": images,
                    "map": found["MAP", "–"],
                    "scaling": found[SCALING, "–"],
                    "last": found[LAST_LAYER, "chosen"],
                    "paper": stopped(mine, paper, stored["settings"]["n_fit"]),
                    "ours": found[ours, "mc"],
                    "to scaling": signed(*to[0]),
                    "to last": signed(*to[1]),
                    "goal": "yes" if all(m <= error for m, error in to) else "no",
                }
            )
    columns = {
        "network": "network, tested on",
        "images": "validation images",
        "map": "network alone",
        "scaling": SCALING,
        "last": "last layer",
        "paper": "ELLA as in the paper",
        "ours": "ELLA, calibrated",
        "to scaling": f"less {SCALING}",
        "to last": "less last layer",
        "goal": "goal",
    }
    return runs.markdown(lines, columns, {})


def stopped(rows: list[Row], method: str, n_fit: int) -> str:
    """The NLL of early stopping, in brackets if it took all that could be fitted."""
    row = next(r for r in rows if (r["method"], r["link"]) == (method, "mc"))
    chosen = [float(part.split("=")[1]) for part in row["chosen"].split("; ")]
    nll = f"{float(row['nll']):.4f}"
    # The next checkpoint is a quarter of the number of images further on.
    return f"({nll})" if 1.25 * max(chosen) > n_fit else nll


def signed(mean: float, error: float) -> str:
    return f"{mean:+.4f} ± {error:.4f}".replace("-", "−")


def corrupted(results: Path, protocol: str = "halves") -> str:
    """Means over types of corruption by severity: NLL / ECE / Brier."""
    rows = read_csv(results / "corruptions" / "resnet20.csv")
    rows = [row for row in rows if row["protocol"] == protocol]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for severity in sorted({row["severity"] for row in rows}):
        here = [row for row in rows if row["severity"] == severity]
        means = {
            method: {
                key: np.mean([float(r[key]) for r in here if r["method"] == method])
                for key in SCORES
            }
            for method in methods
        }
        lowest = {key: min(methods, key=lambda m, k=key: means[m][k]) for key in SCORES}
        line = {"severity": severity}
        for title, name in CORRUPTED.items():
            method = named(methods, *name) or ""
            words = [
                f"**{value:.3f}**" if lowest[key] == method else f"{value:.3f}"
                for key, value in means.get(method, {}).items()
            ]
            line[title] = " / ".join(words)
        ours = named(methods, *CORRUPTED["ELLA, calibrated"])
        line["goal"] = "yes" if set(lowest.values()) == {ours} else "no"
        lines.append(line)
    columns = {"severity": "severity", **{name: name for name in CORRUPTED}}
    return runs.markdown(lines, {**columns, "goal": "goal"}, {})


def outside(results: Path) -> str:
    """AUROC by entropy, and the share of confident predictions, for both pairs."""
    titles = {
        "cifar10": "CIFAR-10 and Fashion-MNIST",
        "mnist": "MNIST and Fashion-MNIST",
    }
    lines = []
    for pair, title in titles.items():
        rows = {row["method"]: row for row in read_csv(results / "ood" / f"{pair}.csv")}
        line = {"pair": title}
        for column, name in {
            "network alone": ("MAP", ""),
            SCALING: (SCALING, ""),
            "last layer, prior by evidence": ("last layer", "evidence, probit"),
            "ELLA as in the paper": ("ELLA", "early stopping, mc"),
            "ELLA, calibrated": ("ELLA", "calibrated, complement, mc"),
        }.items():
            method = named(rows, *name)
            if method is None:
                line[column] = "not run"
                continue
            auroc = float(rows[method]["auroc_entropy"])
            confident = float(rows[method]["confident_ood"])
            line[column] = f"{auroc:.3f}, {100 * confident:.0f} %"
        lines.append(line)
    columns = {name: name for name in lines[0]}
    return runs.markdown(lines, {**columns, "pair": "data"}, {})


def page(results: Path) -> str:
    """The text of results/in_short.md."""
    return "\n".join(
        [
            "NLL on clean CIFAR-10 images; the goal is to be at or below temperature "
            "scaling and the last layer, within one standard error (in brackets: "
            "stopping ran out of fitted images):\n",
            clean(results),
            "NLL / ECE / Brier score of ResNet-20 on corrupted images, settings chosen "
            "on other, clean test images; bold is the lowest of all methods, and the "
            "goal is to be that in all three:\n",
            corrupted(results),
            "Inputs of another kind: AUROC by entropy, and how many of them are "
            "predicted with a confidence above 0.9:\n",
            outside(results),
        ]
    )


def main() -> None:
    (runs.RESULTS / "in_short.md").write_text(page(runs.RESULTS))


if __name__ == "__main__":
    main()
