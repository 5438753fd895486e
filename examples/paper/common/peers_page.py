"""The page of `peers.py`: a table per task, and quality against price."""

from __future__ import annotations

import math
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np

from common import runs
from common.adapters import NEEDS_VALIDATION

matplotlib.use("Agg")
import matplotlib.pyplot as plt

plt.rcParams["svg.fonttype"] = "none"  # text, not outlines
plt.rcParams["svg.hashsalt"] = "peers"  # the same file from the same numbers

#: Per task: its heading, and the columns of its table by their keys.
TASKS = {
    "uci": (
        "UCI regression",
        {
            "test nll": "NLL",
            "test coverage_95": "coverage of 95 %",
            "test crps": "CRPS",
        },
    ),
    "few data": (
        "Classification from few data",
        {"test nll": "NLL", "test ece": "ECE", "test brier": "Brier"},
    ),
    "cifar": (
        "ResNet-20 on CIFAR-10",
        {
            "test nll": "NLL",
            "test ece": "ECE",
            "test brier": "Brier",
            "corrupted nll": "corrupted: NLL",
            "corrupted ece": "ECE of these",
        },
    ),
}
PRICES = {
    "auroc": "AUROC",
    "fit_s": "fit and choose, s",
    "predict_ms": "prediction, ms",
    "memory_mb": "memory, MB",
    "stored": "numbers stored",
}
Rows = list[dict[str, Any]]


def digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(found: Rows, methods: Any, task: str) -> str:
    """Return a row per method: means over the problems, or why there are none."""
    best: dict[str, float] = {}
    for row in found:
        name, value = row["case"].name, row.get("test nll", math.inf)
        best[name] = min(best.get(name, math.inf), value)
    lines = []
    for name in methods:
        mine = [r for r in found if r["method"] == name]
        good = [r for r in mine if "failed" not in r]
        bad = [r["failed"] for r in mine if "failed" in r]
        if bad[:1] == [f"ValueError: {NEEDS_VALIDATION}"]:
            continue
        line: dict[str, Any] = {"method": name}
        for key, title in {**TASKS[task][1], **PRICES}.items():
            values = [r[key] for r in good if r.get(key) is not None]
            line[title] = digits(sum(values) / len(values)) if values else "–"
            if key == "test nll" and values:
                above = [r[key] - best[r["case"].name] for r in good]
                line["above the best, median"] = digits(median(above))
            elif key == "test nll":
                line["above the best, median"] = "–"
        share = f"{len(bad)} of {len(mine)}: " if good and bad else ""
        line["remark"] = share + bad[0].replace("|", "/") if bad else ""
        lines.append(line)
    return runs.markdown(lines)


def draw(found: Rows, methods: Any, path: Path) -> None:
    """Draw NLL against CPU seconds, a panel per task; filled with validation data."""
    figure, panels = plt.subplots(1, 3, figsize=(14, 5), layout="tight")
    for ax, (task, (title, _)) in zip(panels, TASKS.items(), strict=True):
        for name, held_out in product(methods, (False, True)):
            mine = [
                r
                for r in found
                if (r["method"], r["case"].task) == (name, task)
                and r["case"].held_out == held_out
            ]
            if not mine or any("test nll" not in r for r in mine):
                continue
            x, y = (
                float(np.mean([max(r[key], floor) for r in mine]))
                for key, floor in (("fit_s", 1e-3), ("test nll", -math.inf))
            )
            color = "C3" if name.startswith("ours") else "C0"
            ax.plot(x, y, "o", color=color, mfc=color if held_out else "none", ms=5)
            place = {"xytext": (3, 3), "textcoords": "offset points"}
            ax.annotate(name.replace("laplace-torch ", ""), (x, y), fontsize=6, **place)
        ax.set(xscale="log", xlabel="CPU seconds to fit and choose", title=title)
        ax.set_yscale("symlog" if task == "uci" else "log")
    panels[0].set_ylabel("test NLL")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


ABOUT = """# Peers: what else could be picked

`python examples/paper/peers.py --checkouts DIR`. {environment}.

On each problem all methods have the same trained network and data. *Training data
only*: a method chooses its settings on the training data, or keeps its defaults. *With
validation data*: the network is trained on 80 % of the same data; each setting of the
last table is tried on the other 20 %, and the NLL of these data then also chooses one
number that every method gets: the noise in regression; in classification a softmax
temperature of the predictions, one of seven from ½ to 4 (of the network alone this is
temperature scaling). The noise of methods without one is the mean square of the
training residuals. *Calibrated*: our own choice of all settings on validation data.

- UCI: {data}, at most {most} rows; {splits} random and {splits} gap split each, MLP
  2×50 trained for {steps} steps.
- Few data: {few}; MLP 2×32; at most 1,000 others are tested on.
- CIFAR-10: the pretrained ResNet-20, fitted to {images} training images; settings
  chosen on {twice} test images, {four} others tested on, and {images} of these with
  three corruptions of severity 4 each. Prior precisions are those of the last table
  times 100: few images are fitted. A row may take {seconds} CPU seconds.

*Above the best, median*: the NLL less that of the best method of the same problem.
AUROC: telling foreign inputs (columns of the test data shuffled, and doubled;
Fashion-MNIST) by variance or entropy. Times are CPU seconds of one thread (0: below the
clock's resolution); memory is what the process grew by, imports and compilation
included; numbers are stored besides the network.

![NLL against the price of a fit](price.svg)

*Open: training data only, filled: with validation data; red: this package.*
"""


def version_of(args: Any, source: str) -> str:
    """Return the commit of a checkout, or the version of a package."""
    folder = args.checkouts / source
    if folder.is_dir():
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True)
        return f"{source}, commit {done.stdout.strip()}"
    with suppress(PackageNotFoundError):
        return f"{source} {version(source)}"
    return source


def write(args: Any, methods: Any, found: Rows) -> None:
    draw(found, methods, args.out / "price.svg")
    told = {
        **vars(args),
        "data": ", ".join(args.data),
        "twice": 2 * args.images,
        "four": 4 * args.images,
        "few": ", ".join(f"{n} of {name}" for name, n in args.sizes.items()),
        "environment": runs.environment(args.threads).split(", ", 1)[1],
    }
    parts = [ABOUT.format(**told)]
    for (task, (title, _)), held_out in product(TASKS.items(), (False, True)):
        mine = [r for r in found if r["case"].task == task]
        mine = [r for r in mine if r["case"].held_out == held_out]
        if mine:
            kind = "with validation data" if held_out else "training data only"
            names = ", ".join(dict.fromkeys(r["case"].name for r in mine))
            scores = table(mine, methods, task)
            parts.append(f"## {title}, {kind}\n\nMeans over {names}.\n\n{scores}")
    settings = [
        {
            "method": name,
            "source": version_of(args, method.source),
            "on training data": method.alone,
            "on validation data": f"{method.knob} "
            + ", ".join(str(s) for s in method.settings if s is not None),
        }
        for name, method in methods.items()
    ]
    parts.append(f"## What was tried\n\n{runs.markdown(settings)}")
    notes = args.out / "notes.md"  # written by hand
    parts += [notes.read_text()] if notes.exists() else []
    (args.out / "README.md").write_text("\n".join(parts))
