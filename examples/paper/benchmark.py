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
from collections import deque
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

import torch
from common.data import cifar10, imagenet_sample, read_images
from common.models import ScaledInput, cifar_resnet, imagenet_model
from common.runs import Results, arguments, environment, start
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_ella
import laplace_ella.metrics

Task = Callable[[Namespace, dict[str, Any]], dict[str, Any]]

#: Memory that one measurement may take: more counts as failed.
LIMIT_GB = 8


def best_time(work: Callable[[], object], repeats: int = 3) -> float:
    """CPU seconds of the quickest of some runs, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        began = process_time()
        work()
        times.append(process_time() - began)
    return min(times)


def once(work: Callable[[], object]) -> float:
    began = process_time()
    work()
    return process_time() - began


def loader(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


# Each side's classifier, by the same arguments


def ours(model: nn.Module, M: int, K: int, **kwargs: Any) -> laplace_ella.ELLALaplace:
    return Laplace(
        model,
        "classification",
        "all",
        "nystrom",
        subsample_size=M,
        n_eigenvalues=K,
        prior_precision=5.0,
        **kwargs,
    )


def theirs(model: nn.Module, M: int, K: int) -> Any:
    return Laplace(
        model,
        "classification",
        "all",
        "gp",
        functional_approximation="nystrom",
        subsample_size=M,
        n_eigenvalues=K,
        prior_precision=5.0,
    )


SIDES = {"ours": ours, "theirs": theirs}


# Tasks on the real ResNet-20


def resnet20(args: Namespace, n: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    images = cifar10(args.data_root, "train")[:n]
    return cifar_resnet("resnet20", args.data_root), images.x, images.y


def forward_seconds(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of one forward pass per image."""
    with torch.no_grad():
        return best_time(lambda: model(x)) / len(x)


def basis_row(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds per sampled gradient, without the decomposition that follows."""
    M = p["M"]
    model, x, y = resnet20(args, M)
    data = loader(x, y, p["batch"])
    la = SIDES[p["side"]](model, M, min(20, M))
    la.model.eval()
    if p["side"] == "ours":
        outputs = torch.nn.functional.one_hot(torch.arange(M) % 10, 10).float()
        rows = la.fitter.linearizer.row_chunks
        few = x[:64], torch.arange(min(64, M)), outputs[:64]
        _consume(rows(*few))  # finds out how, as at the start of a fit
        seconds = once(lambda: _consume(rows(x, torch.arange(M), outputs)))
    else:  # decomposes as well, a matrix of M×M
        seconds = once(lambda: la._build_basis(data, la._indices(data, False)))
    return {"seconds": seconds / M, "forward": forward_seconds(model, x[:64])}


def _consume(iterator: Iterator[Any]) -> None:
    deque(iterator, maxlen=0)


def predict(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds per image of the probit predictive, with a fit on a few images."""
    n = p["images"]
    model, x, y = resnet20(args, max(n, p["M"]))
    la = SIDES[p["side"]](model, p["M"], p["K"])
    la.fit(loader(x[: p["M"]], y[: p["M"]], 8))
    kind = "glm" if p["side"] == "ours" else "gp"
    x = x[:n]
    seconds = best_time(lambda: la(x, pred_type=kind, link_approx="probit"), 2) / n
    row = {"seconds": seconds, "forward": forward_seconds(model, x)}
    if p["side"] == "ours":
        row["mode"] = la.modes.features.value
    return row


def grid_search(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a grid search; linear in candidates and images where it is said so."""
    model, x, y = resnet20(args, max(p["images"], 64))
    la = SIDES[p["side"]](model, 64, 20)
    la.fit(loader(x[:64], y[:64], 8))
    kind = "glm" if p["side"] == "ours" else "gp"
    val = loader(x[: p["images"]], y[: p["images"]], min(p["images"], 100))
    seconds = once(
        lambda: la.optimize_prior_precision(
            pred_type=kind,
            method="gridsearch",
            val_loader=val,
            grid_size=p["candidates"],
        )
    )
    scale = (100 / p["candidates"]) * (1000 / p["images"])
    return {"seconds": seconds * scale, "measured": seconds}


def fit(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """A whole fit; `memory_budget` makes ours summarise its gradients."""
    model, x, y = resnet20(args, p["N"])
    kwargs = {k: p[k] for k in ("memory_budget", "stochastic") if k in p}
    la = SIDES[p["side"]](model, p["M"], p["K"], **kwargs)
    seconds = once(lambda: la.fit(loader(x, y, p["batch"])))
    row = {"seconds": seconds}
    if p["side"] == "ours":
        row |= {"method": la.basis.method, "eigenvalues": la.basis.eigenvalues.tolist()}
        torch.save(la.basis.directions, args.cache_dir / f"directions_{p['tag']}.pt")
    return row


# Tasks that laplace-torch's ELLA cannot do


def efficientnet(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """EfficientNet-Lite0, 1,000 classes: fit on M images and predict."""
    model = imagenet_model("efficientnet_lite0")
    paths, classes = imagenet_sample(args.data_root)
    x = read_images(paths[:: 1000 // p["M"]][: p["M"]])
    y = classes[:: 1000 // p["M"]][: p["M"]]
    # Curvature from sampled labels: one backward pass per image instead of 2K + 1.
    la = ours(model, p["M"], p["K"], memory_budget=f"{p['budget']} GB", stochastic=True)
    seconds = once(lambda: la.fit(loader(x, y, 16)))
    la(x[:1])  # finds out how to compute features
    one = once(lambda: la(x[:4], link_approx="probit")) / 4
    return {
        "seconds": seconds,
        "image": one,
        "forward": forward_seconds(model, x[:4]),
        "method": la.basis.method,
        "mode": la.modes.features.value,
    }


def vit(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """ViT-B/16 of timm, 86 M parameters, 1,000 classes, with random weights: the cost
    does not depend on them."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", pretrained=False).eval()
    model = ScaledInput(model, [0.5] * 3, [0.5] * 3).eval()
    x, y = torch.rand(p["M"], 3, 224, 224), torch.arange(p["M"]) % 1000
    la = ours(model, p["M"], p["K"], memory_budget=f"{p['budget']} GB", stochastic=True)
    seconds = once(lambda: la.fit(loader(x, y, 1)))
    la(x[:1])  # finds out how to compute features
    one = once(lambda: la(x[:1], link_approx="probit"))
    return {
        "seconds": seconds,
        "image": one,
        "forward": forward_seconds(model, x[:1]),
        "method": la.basis.method,
        "mode": la.modes.features.value,
    }


# How the cost grows, on a synthetic network


def growth(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Fit and predict with a fully connected network of about P parameters."""
    torch.manual_seed(0)
    width = int((p["P"]) ** 0.5)
    model = nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, p["C"]),
    ).eval()
    x, y = torch.randn(p["N"], 64), torch.randint(p["C"], (p["N"],))
    la = ours(model, p["M"], p["K"])
    seconds = once(lambda: la.fit(loader(x, y, 64)))
    image = best_time(lambda: la(x[:64]), 2) / 64
    return {
        "seconds": seconds,
        "image": image,
        "n_params": la.n_params,
        "mode": la.modes.features.value,
    }


# What the options cost and change


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "`stochastic=True`": {"stochastic": True},
    "`stochastic=10`": {"stochastic": 10},
    "`basis_dtype=bfloat16`": {"basis_dtype": torch.bfloat16},
    "predictions under `torch.autocast`, bfloat16": {},
    "`feature_mode='forward'`": {"feature_mode": "forward"},
    "`feature_mode='forward', compile=True`": {
        "feature_mode": "forward",
        "compile": True,
    },
}


def options(args: Namespace, p: dict[str, Any]) -> dict[str, Any]:
    """Fit and predict with one option; the predictions are kept for comparison."""
    model, x, y = resnet20(args, p["N"])
    new = cifar10(args.data_root, "test")[: p["images"]]
    la = ours(model, p["M"], p["K"], **OPTIONS[p["option"]])
    seconds = once(lambda: la.fit(loader(x, y, 64)))
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in p["option"]):
        few = new.x[:16]
        la(few)  # compiles, finds out how to compute features
        image = best_time(lambda: la(few), 1) / len(few)
        parts = [la(part).double() for part in new.x.split(len(few))]
    probs = torch.cat(parts)
    torch.save(probs, args.cache_dir / f"probs_{p['tag']}.pt")
    return {
        "seconds": seconds,
        "image": image,
        "nll": laplace_ella.metrics.nll(probs, new.y),
    }


TASKS: dict[str, Task] = {
    task.__name__: task
    for task in (
        basis_row,
        predict,
        grid_search,
        fit,
        efficientnet,
        vit,
        growth,
        options,
    )
}


# One process per measurement


def measure(args: Namespace, task: str, p: dict[str, Any]) -> dict[str, Any]:
    """Run a task in a process of its own; its row, or what became of it."""
    command = [sys.executable, "-W", "ignore", __file__]
    command += ["--worker", task, json.dumps(p), "--data-root", str(args.data_root)]
    command += ["--cache-dir", str(args.cache_dir), "--out", str(args.out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines()
    last = said[-1][:120] if said else f"exit code {done.returncode}"
    return {"failed": last, "limit_gb": p.get("limit_gb", LIMIT_GB)}


def work(args: Namespace, task: str, p: dict[str, Any]) -> None:
    """The other side of `measure`: print the row and the peak of memory as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit = int(p.get("limit_gb", LIMIT_GB) * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit + 10**10, limit + 10**10))
    row = TASKS[task](args, p)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**row, "peak_gb": peak / 1e6, "start_gb": before / 1e6}))


# The table


def subspace_angle(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest angle between the spans of two orthonormal sets of rows, in degrees."""
    cosines = torch.linalg.svdvals(a.double() @ b.double().T)
    return float(torch.rad2deg(torch.acos(cosines.clamp(max=1)).max()))


def run(args: Namespace) -> str:
    """Measure what is not there yet and write the page."""
    small = args.smoke
    results = Results(args.out / "benchmark.json", {"smoke": small})

    def get(key: str, task: str, **p: Any) -> dict[str, Any]:
        return results.compute(key, lambda: measure(args, task, p))

    sections = []
    wanted = set(args.only) if args.only else set(SECTIONS)
    for name, section in SECTIONS.items():
        if name in wanted:
            sections.append(section(args, get, small))
    head = environment(args)
    told = "\n".join(f"- {k}: {v}" for k, v in head.items())
    page = (
        "# What ELLA costs\n\n`python examples/paper/benchmark.py`, CPU seconds of one "
        f"thread, peak resident memory of one process per measurement.\n\n{told}\n\n"
    )
    page += "\n".join(sections)
    if missing := [name for name in SECTIONS if name not in wanted]:
        page += f"\nNot measured yet: `--only {' '.join(missing)}`.\n"
    (args.out / "README.md").write_text(page)
    return page


def ratio(a: dict[str, Any], b: dict[str, Any], key: str = "seconds") -> str:
    return f"{a[key] / b[key]:.1f}×" if key in a and key in b else "–"


def passes(row: dict[str, Any], key: str = "seconds") -> str:
    return f"{row[key] / row['forward']:.0f}" if key in row else "–"


def shown(row: dict[str, Any], scale: float = 1e3, unit: str = "ms") -> str:
    if "failed" in row:
        return f"failed beyond {row['limit_gb']} GB"
    return f"{row['seconds'] * scale:.3g} {unit}"


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

    M = 16 if small else 512
    row_t = get("row theirs", "basis_row", side="theirs", M=8, batch=8)
    row_o = get("row ours", "basis_row", side="ours", M=M, batch=64)
    line("one sampled gradient (theirs at batch 8)", row_t, row_o)
    predict_t = get("predict theirs", "predict", side="theirs", M=24, K=20, images=8)
    predict_o = get("predict ours", "predict", side="ours", M=few, K=20, images=few)
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
    base = {"M": 256, "K": 16, "C": 10, "P": 250_000, "N": 512}
    if small:
        base |= {"M": 16, "K": 4, "P": 2_500, "N": 32}
    first = get("growth base", "growth", **base)
    lines = [
        "## Growth: each size doubled from a base case (fully connected, "
        + ", ".join(f"{k}={v}" for k, v in base.items())
        + ")",
        "",
        "| doubled | fit | per image | peak | features |",
        "|---|---|---|---|---|",
        f"| – | {first['seconds']:.2f} s | {first['image'] * 1e3:.2f} ms | "
        f"{first['peak_gb']:.2f} GB | {first['mode']} |",
    ]
    for name in base:
        row = get(f"growth {name}", "growth", **(base | {name: 2 * base[name]}))
        more = row["peak_gb"] - first["peak_gb"]
        lines.append(
            f"| {name} | {ratio(row, first)} | {ratio(row, first, 'image')} | "
            f"{more:+.2f} GB | {row['mode']} |"
        )
    return "\n".join(lines) + "\n"


def cheaper_curvature(args: Namespace, get: Callable, small: bool) -> str:
    p = {"side": "ours", "N": 32 if small else 512, "M": 32, "K": 20, "batch": 32}
    exact = get("curvature exact", "fit", tag="curv_exact", **p)
    sampled = get("curvature sampled", "fit", tag="curv_mc", stochastic=True, **p)
    return (
        f"## Sampled curvature (`stochastic=True`), ResNet-20, N={p['N']}\n\n"
        f"Exact {exact['seconds']:.1f} s, sampled {sampled['seconds']:.1f} s: "
        f"{ratio(exact, sampled)} less, with one backward pass per example.\n"
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


SECTIONS = {
    "theirs": against_theirs,
    "streaming": streaming,
    "curvature": cheaper_curvature,
    "options": options_table,
    "large": large_models,
    "growth": growth_table,
}


def main(argv: list[str] | None = None) -> None:
    parser = arguments("benchmark", __doc__)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="some sections")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "JSON"), help="internal")
    args = start(parser, argv)
    if args.worker:
        work(args, args.worker[0], json.loads(args.worker[1]))
        return
    print(run(args))


if __name__ == "__main__":
    main()
