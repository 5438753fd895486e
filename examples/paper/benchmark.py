"""Cost of ELLA: this package against laplace-torch 0.3's own `ELLA`.

    python examples/paper/benchmark.py --data-root DATA

Every measurement is a process of its own, so that peak memory is that of one side and
one task. Times are CPU seconds of one thread: a machine that also does other things
changes them little, and ratios within one run less. Costs are given in forward passes
of the same network in the same process. Finished measurements are kept in a JSON file;
a run that is started again goes on.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch
from common.benchmark_tasks import (
    COMPILED,
    METHODS,
    NETWORKS,
    OPTIONS,
    TASKS,
    TOP,
    peak_bytes,
)
from common.runs import Results, arguments, environment, start

#: What stands for the day of rows that do not have one.
UNDATED = "with an earlier version (peaks include reading the data)"

#: Memory that one measurement may take: more counts as failed.
LIMIT_GB = 8

#: Of the features of the growth table.
MODES = ("forward", "reverse")

#: Processes that measure what is compared most closely.
PROCESSES = 3


# One process per measurement


def typical(
    args: Namespace, task: str, p: dict[str, Any], processes: int
) -> dict[str, Any]:
    """The row of the process that took the median time of some: where memory comes to
    lie differs from one to the next, and with it what it costs."""
    rows = [measure(args, task, p) for _ in range(processes)]
    failed = [row for row in rows if "failed" in row]
    if failed:
        return failed[0]
    rows.sort(key=lambda row: row["seconds"])
    return {**rows[len(rows) // 2], "of": [row["seconds"] for row in rows]}


def measure(args: Namespace, task: str, p: dict[str, Any]) -> dict[str, Any]:
    """Run a task in a process of its own; its row, or what became of it."""
    command = [sys.executable, "-W", "ignore", __file__]
    command += ["--worker", task, json.dumps(p), "--data-root", str(args.data_root)]
    command += ["--cache-dir", str(args.cache_dir), "--out", str(args.out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines()
    raised = said and done.returncode > 0  # not killed by a signal
    last = said[-1][:120] if raised else f"exit code {done.returncode}"
    return {"failed": last, "limit_gb": p.get("limit_gb", LIMIT_GB)}


def work(args: Namespace, task: str, p: dict[str, Any]) -> None:
    """The other side of `measure`: print the row and the peak of memory as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    limit = int(p.get("limit_gb", LIMIT_GB) * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit + 10**10, limit + 10**10))
    row = TASKS[task](args, p)
    print(json.dumps({**row, "peak_gb": peak_bytes() / 1e9}))


# The table


def subspace_angle(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest angle between the spans of two orthonormal sets of rows, in degrees."""
    cosines = torch.linalg.svdvals(a.double() @ b.double().T)
    return float(torch.rad2deg(torch.acos(cosines.clamp(max=1)).max()))


def run(args: Namespace) -> str:
    """Measure what is not there yet, or was asked for again, and write the page."""
    small = args.smoke
    results = Results(args.out / "benchmark.json", {"smoke": small})
    for name in args.only or SECTIONS:
        days: set[str] = set()

        def get(
            key: str,
            task: str,
            processes: int = 1,
            name: str = name,
            days: set[str] = days,
            **p: Any,
        ) -> dict[str, Any]:
            if args.no_measurement and key not in results.rows:
                raise LookupError(key)

            def measured() -> dict[str, Any]:
                return {**typical(args, task, p, processes), "date": today()}

            row = results.compute(key, measured, again=name in args.again)
            days.add(row.get("date", UNDATED))
            return row

        text = SECTIONS[name](args, get, small)
        told = f"Measured: {', '.join(sorted(days))}."
        (args.out / f"{name}.md").write_text(f"{text}\n{told}\n")
    return write_page(args)


def write_page(args: Namespace) -> str:
    """Put the page together from the sections that are there."""
    told = "\n".join(f"- {k}: {v}" for k, v in environment(args).items())
    page = (
        "# What ELLA costs\n\n`python examples/paper/benchmark.py`, CPU seconds of one "
        "thread, peak resident memory of one process per measurement, of which the "
        f"least are Python and torch themselves.\n\n{told}\n\n"
    )
    files = {name: args.out / f"{name}.md" for name in SECTIONS}
    page += "\n".join(f.read_text() for f in files.values() if f.exists())
    if missing := [name for name, f in files.items() if not f.exists()]:
        page += f"\nNot measured yet: `--only {' '.join(missing)}`.\n"
    (args.out / "README.md").write_text(page)
    return page


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def ratio(a: dict[str, Any], b: dict[str, Any], key: str = "seconds") -> str:
    return f"{a[key] / b[key]:.1f}×" if key in a and key in b else "–"


def user_ratio(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Without what the system took."""
    if "failed" in a or "failed" in b:
        return "–"
    own = [row["seconds"] - row["system"] for row in (a, b)]
    return f"{own[0] / own[1]:.1f}×"


def passes(row: dict[str, Any], key: str = "seconds") -> str:
    return f"{row[key] / row['forward']:.0f}" if key in row else "–"


def shown(row: dict[str, Any], scale: float = 1e3, unit: str = "ms") -> str:
    if "failed" in row:
        return f"failed beyond {row['limit_gb']} GB"
    seconds = row["seconds"] * scale
    return f"{seconds:,.0f} {unit}" if seconds >= 1000 else f"{seconds:.3g} {unit}"


def peak(row: dict[str, Any]) -> str:
    return f"{row['peak_gb']:.2f} GB" if "peak_gb" in row else f"> {row['limit_gb']} GB"


def against_theirs(args: Namespace, get: Callable, small: bool) -> str:
    few = 8 if small else 32
    lines = [
        "## Against laplace-torch 0.3's ELLA: ResNet-20, C=10, K=20",
        "",
        "| what | theirs | ours | ratio | theirs, passes | ours, passes | theirs, "
        "peak | ours, peak |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def line(what: str, t: dict, o: dict, in_passes: bool = True, unit: str = "ms"):
        scale = 1e3 if unit == "ms" else 1.0
        cells = [what, shown(t, scale, unit), shown(o, scale, unit), ratio(t, o)]
        cells += [passes(t), passes(o)] if in_passes else ["", ""]
        lines.append(f"| {' | '.join([*cells, peak(t), peak(o)])} |")

    def both(
        key: str, task: str, theirs: dict[str, Any], ours: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        n = 1 if small else PROCESSES
        return (
            get(f"{key} theirs", task, n, side="theirs", **theirs),
            get(f"{key} ours", task, n, side="ours", **ours),
        )

    M = 16 if small else 512
    their_M = 8 if small else 16
    row_t, row_o = both(
        "row", "basis_row", {"M": their_M, "batch": 8}, {"M": M, "batch": 64}
    )
    line("one sampled gradient (theirs at batch 8)", row_t, row_o)
    K, M, their_M = (4, 16, 8) if small else (20, 2000, 256)
    basis_t, basis_o = both(
        "basis",
        "basis",
        {"batch": 8, "M": their_M, "K": K},
        {"batch": 128, "M": M, "K": K},
    )
    line(
        f"the same with the basis of M={M:,} of them (theirs M={their_M})",
        basis_t,
        basis_o,
    )
    predict_t, predict_o = both(
        "predict",
        "predict",
        {"M": 24, "K": 20, "images": 8},
        {"M": few, "K": 20, "images": few},
    )
    line("predict an image, probit, K=20", predict_t, predict_o)
    K = 64 if small else 256
    large = get(
        f"predict ours K={K}", "predict", side="ours", M=max(few, K), K=K, images=few
    )
    line(f"predict an image, probit, K={K} (theirs K=20)", predict_t, large)
    images, candidates = (8, 2) if small else (16, 2)
    grid_t = get(
        "grid theirs",
        "grid_search",
        side="theirs",
        images=images,
        candidates=candidates,
    )
    grid_o = get(
        "grid ours",
        "grid_search",
        side="ours",
        images=16 if small else 1000,
        candidates=2 if small else 100,
    )
    line(
        "grid search, 100 candidates, 1,000 images (theirs scaled up from "
        f"{candidates} candidates, {images} images)",
        grid_t,
        grid_o,
        in_passes=False,
        unit="s",
    )
    sizes = {"N": 32, "M": 32, "batch": 16} if small else {}
    sizes = {"N": 256, "M": 2000, "K": 20, "batch": 128} | sizes | {"K": 20}
    fit_o = get("fit ours", "fit", side="ours", tag="exact", **sizes)
    their_sizes = sizes | {"M": min(sizes["M"], sizes["N"])}
    fit_t = get("fit theirs", "fit", side="theirs", tag="theirs", **their_sizes)
    what = "fit, M={M}, batch {batch}, N={N}".format(**sizes)
    if their_sizes["M"] != sizes["M"]:
        what += f" (theirs M={their_sizes['M']})"
    line(what, fit_t, fit_o, in_passes=False, unit="s")
    if not small:
        lines += [
            "",
            f"The first three rows: the median of {PROCESSES} processes. Predictions "
            "are theirs in batches of 8 and ours of 32; in equal batches, which is the "
            "fair comparison, the ratio falls as they grow, see below.",
        ]
    lines += [
        "",
        f"Of the {basis_o['seconds'] * 1e3:.3g} ms of a gradient with its basis the "
        f"system takes {basis_o['system'] * 1e3:.2g} ms, for memory that is written to "
        f"for the first time; of theirs, {basis_t['system'] * 1e3:.3g} ms. Virtual "
        "machines whose host takes free memory back pay most for that. Without it the "
        f"ratio is {user_ratio(basis_t, basis_o)}, and of the gradient alone "
        f"{user_ratio(row_t, row_o)}.",
    ]
    return "\n".join(lines) + "\n"


def two_ways(args: Namespace, get: Callable, small: bool) -> str:
    M, K = (64, 2) if small else (2000, 20)
    row = get("directions", "directions", M=M, K=K)
    if "failed" in row:
        return f"## Top directions of ResNet-20's gradients\n\n{row['failed']}\n"
    lines = [
        f"## Top directions: ResNet-20, M={M:,}, K={K}",
        "",
        "A few products with all gradients (a block Davidson method), or all products "
        "of two of them (the Gram matrix) and its eigenvectors.",
        "",
        "| way | time | largest ‖Gu − λu‖/λ |",
        "|---|---|---|",
        f"| davidson | {row['seconds']:.1f} s | {row['davidson_residual']:.1e} |",
        f"| gram | {row['gram']:.1f} s | {row['gram_residual']:.1e} |",
        "",
        f"The largest angle between directions is {row['sine']:.1e}, the largest "
        f"relative difference of eigenvalues {row['eigenvalues']:.1e}.",
    ]
    return "\n".join(lines) + "\n"


def streaming(args: Namespace, get: Callable, small: bool) -> str:
    lines = [
        "## Bounded memory: gradients summarised as they come, K=20",
        "",
        "| M | way | peak | seconds | largest error of an eigenvalue | largest angle |",
        "|---|---|---|---|---|---|",
    ]
    samples = (24, 32) if small else (500, 1000, 2000)
    for M in samples:
        N = 32 if small else 256
        p = {"side": "ours", "N": N, "M": M, "K": 20, "batch": 64}
        exact = get(f"exact M={M}", "fit", tag=f"exact_{M}", **p)
        budget = "600 MB" if not small else "400 MB"
        stream = get(
            f"streaming M={M}", "fit", tag=f"stream_{M}", memory_budget=budget, **p
        )
        for way, row in (("exact", exact), ("streaming", stream)):
            error = angle = ""
            if way == "streaming" and "eigenvalues" in row:
                a, b = (
                    torch.tensor(row["eigenvalues"]),
                    torch.tensor(exact["eigenvalues"]),
                )
                k = min(len(a), len(b))
                error = f"{float((a[:k] / b[:k] - 1).abs().max()):.2%}"
                directions = [
                    torch.load(
                        args.cache_dir / f"directions_{tag}_{M}.pt", weights_only=True
                    )
                    for tag in ("stream", "exact")
                ]
                angle = f"{subspace_angle(*directions):.1f}°"
            method = row.get("method", way)
            seconds = shown(row, 1.0, "s")
            lines.append(
                f"| {M} | {method} | {peak(row)} | {seconds} | {error} | {angle} |"
            )
    return "\n".join(lines) + "\n"


def large_models(args: Namespace, get: Callable, small: bool) -> str:
    lines = [
        "## What laplace-torch's ELLA cannot do: a Jacobian of B·C·P numbers",
        "",
        "Fitted on M images with sampled curvature (`stochastic=True`).",
        "",
        "| network | P | C | M | K | budget | peak | fit | per image | passes | "
        "basis | features |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    M = 4 if small else 500
    rows = [
        (
            "EfficientNet-Lite0",
            "4.65 M",
            get(
                "efficientnet", "efficientnet", M=M, K=20 if not small else 2, budget=4
            ),
            (M, 20 if not small else 2, 4),
        )
    ]
    if not small:
        vit_row = get("vit", "vit", M=64, K=10, budget=14, limit_gb=20)
        rows.append(("ViT-B/16", "86.6 M", vit_row, (64, 10, 14)))
    for name, n_params, row, (m, k, budget) in rows:
        if "failed" in row:
            lines.append(
                f"| {name} | {n_params} | 1000 | {m} | {k} | {budget} GB | "
                f"{row['failed']} | | | | | |"
            )
            continue
        lines.append(
            f"| {name} | {n_params} | 1000 | {m} | {k} | {budget} GB | {peak(row)} | "
            f"{shown(row, 1.0, 's')} | {row['image']:.2f} s | {passes(row, 'image')} | "
            f"{row['method']} | {row['mode']} |"
        )
    return "\n".join(lines) + "\n"


def growth_table(args: Namespace, get: Callable, small: bool) -> str:
    base = {"M": 512, "K": 16, "C": 10, "P": 250_000, "N": 1024}
    if small:
        base |= {"M": 16, "K": 4, "P": 2_500, "N": 32}
    first = get("growth base", "growth", **base)
    lines = [
        "## Growth: each size doubled from a base case (fully connected, "
        + ", ".join(f"{k}={v:,}" for k, v in base.items())
        + ")",
        "",
        "Features of batches of 64 inputs by both modes, of which predictions take the "
        "faster.",
        "",
        "| doubled | fit | input, forward mode | input, reverse mode | peak | chosen |",
        "|---|---|---|---|---|---|",
        f"| – | {first['seconds']:.2f} s | {first['forward'] * 1e3:.2f} ms | "
        f"{first['reverse'] * 1e3:.2f} ms | {first['peak_gb']:.2f} GB | "
        f"{first['mode']} |",
    ]
    for name in base:
        row = get(f"growth {name}", "growth", **(base | {name: 2 * base[name]}))
        more = row["peak_gb"] - first["peak_gb"]
        cells = [name, *(ratio(row, first, k) for k in ("seconds", *MODES))]
        lines.append(f"| {' | '.join(cells)} | {more:+.2f} GB | {row['mode']} |")
    return "\n".join(lines) + "\n"


def cheaper_curvature(args: Namespace, get: Callable, small: bool) -> str:
    p = {"side": "ours", "N": 32 if small else 512, "M": 32, "K": 20, "batch": 32}
    exact = get("curvature exact", "fit", tag="curv_exact", **p)
    sampled = get("curvature sampled", "fit", tag="curv_mc", stochastic=True, **p)
    return (
        f"## Sampled curvature (`stochastic=True`), ResNet-20, N={p['N']}\n\n"
        f"Exact {exact['seconds']:.1f} s, sampled {sampled['seconds']:.1f} s: "
        f"{ratio(exact, sampled)} faster, with one backward pass per example.\n"
    )


def options_table(args: Namespace, get: Callable, small: bool) -> str:
    p = {"N": 512, "M": 500, "K": 20, "images": 256}
    if small:
        p = {"N": 8, "M": 8, "K": 2, "images": 8}
    lines = [
        f"## Options: ResNet-20, {', '.join(f'{k}={v}' for k, v in p.items())}",
        "",
        "Probit probabilities against those of the default: the largest difference, "
        "and the difference of the mean negative log likelihood.",
        "",
        "| option | fit | per image | peak | largest change of a probability | "
        "change of NLL |",
        "|---|---|---|---|---|---|",
    ]
    base = None
    for i, option in enumerate(OPTIONS):
        if small and "compile" in option:
            continue  # compiling takes longer than all the rest
        row = get(f"option {option}", "options", option=option, tag=f"option_{i}", **p)
        if "failed" in row:
            lines.append(f"| {option} | {row['failed']} | | | | |")
            continue
        probs = torch.load(args.cache_dir / f"probs_option_{i}.pt", weights_only=True)
        base = (probs, row) if base is None else base
        change = float((probs - base[0]).abs().max())
        lines.append(
            f"| {option} | {row['seconds']:.1f} s | {row['image'] * 1e3:.0f} ms | "
            f"{peak(row)} | {change:.1e} | {row['nll'] - base[1]['nll']:+.1e} |"
        )
    return "\n".join(lines) + "\n"


def where_passes_go(args: Namespace, get: Callable, small: bool) -> str:
    about = (
        "In forward passes of the same inputs. Derivatives: of the cheaper direction, "
        "2 min(C, K) + 1, each of which costs about a pass. Random inputs, and random "
        "weights but for ResNet-20 and EfficientNet. Not folded: features of the model "
        "as it is, normalisations and all. Memory returned: without keeping what the C "
        "library would give back to the system between layers. –: there is nothing to "
        f"fold or to keep. The median of {PROCESSES} processes; of one for ViT-B/16."
    )
    lines = [
        "| network | inputs | C | K | derivatives | a prediction | its features | "
        "not folded | memory returned | mode |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    details = []
    for name, (_, shape, C, K) in NETWORKS.items():
        if small and name != "transformer encoder":
            continue
        sizes = f"{name} | {shape[0]:,} | {C} | {K}"
        try:
            n = 1 if small or name.startswith("ViT") else PROCESSES
            limit = {"limit_gb": 20} if name.startswith("ViT") else {}
            row = get(f"passes {name}", "passes", n, network=name, **limit)
        except LookupError:
            lines.append(f"| {sizes} | | not measured yet | | | | |")
            continue
        if "failed" in row:
            lines.append(f"| {sizes} | | {row['failed']} | | | | |")
            continue
        lines.append(
            f"| {sizes} | {2 * min(C, K) + 1} | {passes(row)} | "
            f"{passes(row, 'features')} | {passes(row, 'unfolded')} | "
            f"{passes(row, 'returned')} | {row['mode']} |"
        )
        total = row["features"] / row["forward"]
        few = row["operators"][:6]
        details += [
            f"| {name} | {operator} | {shapes} | {count} | {share * total:.1f} |"
            for operator, shapes, count, share in few
        ]
        rest = total * (1 - sum(share for *_, share in few))
        details.append(f"| {name} | all others | | | {rest:.1f} |")
    # For the guide, which has no need of the operators.
    (args.out / "passes_short.md").write_text("\n".join(lines) + "\n")
    lines = [
        "## Where the passes go: predictions of five networks",
        "",
        about,
        "",
        *lines,
        "",
        "The operators that take most of the features, by the shapes of their "
        "arguments, for a quarter of the inputs:",
        "",
        "| network | operator | arguments | calls | passes |",
        "|---|---|---|---|---|",
        *details,
    ]
    return "\n".join(lines) + "\n"


def other_methods(args: Namespace, get: Callable, small: bool) -> str:
    p = {"N": 24, "M": 24, "K": 20, "images": 8}
    if small:
        p = {"N": 4, "M": 4, "K": 2, "images": 2}
    lines = [
        "## Against laplace-torch's other posteriors: "
        + ", ".join(f"{k}={v}" for k, v in p.items()),
        "",
        "Fits and predictions by batches of eight images, with which all ways fit in "
        "memory. A CNN without normalisations has KFAC, too. The last column is the "
        "time of a prediction, relative to ours.",
        "",
        "| network | posterior | fit | predict an image | passes | peak | relative |",
        "|---|---|---|---|---|---|---|",
    ]
    for network, plain in (("ResNet-20", False), ("plain CNN", True)):
        names = [name for name in METHODS if not (plain and "stage" in name)]
        rows = {
            name: get(
                f"method {network} {name}", "method", method=name, plain=plain, **p
            )
            for name in names
        }
        for name, row in rows.items():
            if "failed" in row:
                lines.append(f"| {network} | {name} | {row['failed']} | | | | |")
                continue
            lines.append(
                f"| {network} | {name} | {shown(row, 1.0, 's')} | "
                f"{row['image'] * 1e3:.3g} ms | {row['image'] / row['forward']:.1f} | "
                f"{peak(row)} | {row['image'] / rows['ours']['image']:.2g} |"
            )
    return "\n".join(lines) + "\n"


def batch_sizes(args: Namespace, get: Callable, small: bool) -> str:
    p = {"M": 24, "K": 20, "images": 32}
    if small:
        p = {"M": 4, "K": 2, "images": 4}
    lines = [
        "## Batch size: predictions of ResNet-20, K=20, and laplace-torch's ELLA",
        "",
        "Passes of the same batch, whose images get cheaper as it grows.",
        "",
        "| batch | theirs | ours | ratio | theirs, passes | ours, passes |",
        "|---|---|---|---|---|---|",
    ]
    for batch in (1, 4) if small else (1, 4, 8, 16, 32, 64):
        theirs, mine = (
            get(f"batch {batch} {side}", "batch_size", side=side, batch=batch, **p)
            for side in ("theirs", "ours")
        )
        cells = [shown(theirs), shown(mine), ratio(theirs, mine)]
        cells += [passes(theirs), passes(mine)]
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def compiled_passes(args: Namespace, get: Callable, small: bool) -> str:
    lines = [
        "## Compiled passes (`compile=True`)",
        "",
        "Features per input of the networks above, as they are and compiled, and the "
        "first call, which compiles.",
        "",
        "| network | inputs | mode | as it is | compiled | ratio | first call |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, mode, inputs in COMPILED[:1] if small else COMPILED:
        # Compilers start processes, which have the same limit.
        p = {"network": name, "mode": mode, "inputs": inputs, "limit_gb": 100}
        row = get(f"compiled {name} {mode} {inputs}", "compiled", **p)
        about = [name.split(",")[0], f"{inputs:,}", mode]
        if "failed" in row:
            lines.append(f"| {' | '.join(about)} | {row['failed']} | | | |")
            continue
        times = [f"{row[key] * 1e3:.3g} ms" for key in ("plain", "seconds")]
        cells = [*about, *times, f"{row['plain'] / row['seconds']:.1f}×"]
        lines.append(f"| {' | '.join(cells)} | {row['compiling']:.0f} s |")
    (args.out / "compiled_short.md").write_text("\n".join(lines[4:]) + "\n")
    return "\n".join(lines) + "\n"


def top_outputs(args: Namespace, get: Callable, small: bool) -> str:
    lines = [
        "## The largest outputs only (`top_outputs=m`), of networks with 1,000",
        "",
        "In forward passes, as above. A gradient is multiplied by the directions as "
        "soon as it is there, parameter by parameter; whole gradients leave room for "
        "one or two outputs in a pass.",
        "",
        "| network | m | derivatives | a prediction | by whole gradients | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for network, numbers in {} if small else TOP.items():
        for m in numbers:
            p = {"network": network, "outputs": m, "limit_gb": 20}
            row = get(f"top {network} {m}", "top", **p)
            cells = [network, str(m), str(2 * m + 1), passes(row), passes(row, "whole")]
            cells.append(
                "–" if "failed" in row else f"{row['whole'] / row['seconds']:.1f}×"
            )
            lines.append(f"| {' | '.join(cells)} |")
    (args.out / "top_short.md").write_text("\n".join(lines[4:]) + "\n")
    return "\n".join(lines) + "\n"


SECTIONS = {
    "theirs": against_theirs,
    "methods": other_methods,
    "passes": where_passes_go,
    "batch": batch_sizes,
    "top": top_outputs,
    "compiled": compiled_passes,
    "growth": growth_table,
    "options": options_table,
    "curvature": cheaper_curvature,
    "directions": two_ways,
    "streaming": streaming,
    "large": large_models,
}


def main(argv: list[str] | None = None) -> None:
    parser = arguments("benchmark", __doc__)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="some sections")
    parser.add_argument(
        "--again",
        nargs="*",
        default=[],
        choices=SECTIONS,
        help="sections that are measured again",
    )
    parser.add_argument(
        "--no-measurement", action="store_true", help="write what is there already"
    )
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "JSON"), help="internal")
    args = start(parser, argv)
    if args.worker:
        work(args, args.worker[0], json.loads(args.worker[1]))
        return
    print(run(args))


if __name__ == "__main__":
    main()
