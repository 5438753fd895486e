"""What ELLA costs: this package against laplace-torch's own ELLA, and exact mode.

    python examples/paper/benchmark.py                     # all tables, about an hour
    python examples/paper/benchmark.py --only gradients predictions

Every measurement is a process of its own with one thread, so that peak memory is that
of one side and one task. Times are CPU seconds: other programs change them little, and
ratios within one run less. "Theirs" is laplace-torch 0.3's `hessian_structure="gp",
functional_approximation="nystrom"`. Finished measurements are kept in the cache folder;
--again measures anew.
"""

from __future__ import annotations

import inspect
import json
import resource
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import Any

import torch
from common import runs
from common.data import cifar10, imagenet_sample, mnist, read_images
from common.models import cifar_resnet, mlp
from laplace import Laplace
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import laplace_ella
from laplace_ella.posterior.observation import class_probabilities
from laplace_ella.posterior.predictive import features_for

Row = dict[str, Any]

#: Memory that a measurement may take besides what Python maps; more is a failure.
LIMIT_GB = 8


def seconds_of(work: Callable[[], object], repeats: int = 1, warm_up: int = 0) -> float:
    """Return CPU seconds of the quickest of some runs, after some that warm up."""
    times = []
    for _ in range(repeats + warm_up):
        began = process_time()
        work()
        times.append(process_time() - began)
    return min(times[warm_up:])


def loader(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def posterior(side: str, model: nn.Module, M: int, K: int, **options: Any) -> Any:
    """Return ELLA of ResNet-20 by one side, not yet fitted."""
    structure = {"hessian_structure": "nystrom"}
    if side == "theirs":
        structure = {"hessian_structure": "gp", "functional_approximation": "nystrom"}
    return Laplace(
        model,
        "classification",
        "all",
        **structure,
        subsample_size=M,
        n_eigenvalues=K,
        prior_precision=5.0,
        **options,
    )


def resnet20(args: Any, n: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the network and n training images; their file does not count for peaks."""
    images = cifar10(args.data_root, "train", n)
    with suppress(OSError):  # Linux has it
        Path("/proc/self/clear_refs").write_text("5")
    return cifar_resnet("resnet20", args.data_root), images.x, images.y


def peak_gb() -> float:
    """Return the peak of resident memory since `resnet20` was called, or of all."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


# Tasks: each runs in a process of its own and returns a row


def gradient(args: Any, p: Row) -> Row:
    """Seconds per sampled gradient, without the spectrum that follows."""
    M = p["M"]
    model, x, y = resnet20(args, M)
    la = posterior(p["side"], model, M, min(20, M))
    data = loader(x, y, p["batch"])
    if p["side"] == "ours":
        la.fit_basis(loader(x[:64], y[:64], 64))  # chooses how, as a fit begins
        examples, outputs = torch.arange(M), torch.arange(M) % 10

        def work() -> None:
            for batch, some in zip(
                x.split(p["batch"]), examples.split(p["batch"]), strict=True
            ):
                rows = la.linearizer.row_parts(
                    batch, torch.arange(len(some)), outputs[some]
                )
                deque(rows, maxlen=0)  # one part at a time, as a fit takes them
    else:  # decomposes as well, a matrix of M×M; the first time gets the memory
        la.model.eval()
        indices = la._indices(data, False)

        def work() -> None:
            la._build_basis(data, indices)

    return {"seconds": seconds_of(work, 1, warm_up=1) / M}


def basis(args: Any, p: Row) -> Row:
    """Seconds per sampled gradient of a whole basis, with its spectrum."""
    model, x, y = resnet20(args, p["M"])
    la = posterior(p["side"], model, p["M"], p["K"])
    data = loader(x, y, p["batch"])
    if p["side"] == "ours":
        return {"seconds": seconds_of(lambda: la.fit_basis(data)) / p["M"]}
    la.model.eval()
    indices = la._indices(data, False)
    return {"seconds": seconds_of(lambda: la._build_basis(data, indices)) / p["M"]}


def predict(args: Any, p: Row) -> Row:
    """Seconds per image of the probit predictive, and of a forward pass."""
    model, x, y = resnet20(args, max(p["batch"], p["M"], p["images"]))
    la = posterior(p["side"], model, p["M"], p["K"])
    la.fit(loader(x[: p["M"]], y[: p["M"]], 8))
    kind = "glm" if p["side"] == "ours" else "gp"
    n = max(p["batch"], p["images"])
    parts = x[:n].split(p["batch"])

    def predictions() -> None:
        for part in parts:
            la(part, pred_type=kind, link_approx="probit")

    @torch.no_grad()
    def forwards() -> None:
        for part in parts:
            model(part)

    return {
        "seconds": seconds_of(predictions, 2, warm_up=1) / n,
        "forward": seconds_of(forwards, 3, warm_up=1) / n,
    }


def grid_search(args: Any, p: Row) -> Row:
    """Seconds of 100 candidates on 1,000 images; cost is linear in both, and theirs is
    scaled up from fewer."""
    model, x, y = resnet20(args, max(p["images"], 64))
    la = posterior(p["side"], model, 64, 20)
    la.fit(loader(x[:64], y[:64], 8))
    val = loader(x[: p["images"]], y[: p["images"]], min(p["images"], 100))
    seconds = seconds_of(
        lambda: la.optimize_prior_precision(
            pred_type="glm" if p["side"] == "ours" else "gp",
            method="gridsearch",
            val_loader=val,
            grid_size=p["candidates"],
        )
    )
    scale = 1.0
    if p["side"] == "theirs":
        scale = (p["of"][0] / p["candidates"]) * (p["of"][1] / p["images"])
    return {"seconds": seconds * scale}


def fit(args: Any, p: Row) -> Row:
    """Seconds of a whole fit; its peak is that of the process."""
    model, x, y = resnet20(args, p["N"])
    options = {}
    if "budget" in p:
        options["compute"] = laplace_ella.ComputeOptions(memory_budget=p["budget"])
    la = posterior(p["side"], model, p["M"], p["K"], **options)
    seconds = seconds_of(lambda: la.fit(loader(x, y, p["batch"])))
    return {"seconds": seconds, "method": getattr(la.basis, "method", "")}


class JpegFolder(Dataset):
    """Images of the ImageNet sample, decoded when they are asked for."""

    def __init__(self, root: Path, n: int) -> None:
        paths, classes = imagenet_sample(root)
        self.paths, self.classes = paths[:n], classes[:n]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return read_images([self.paths[index]])[0], self.classes[index]


def loading(args: Any, p: Row) -> Row:
    """Seconds per 1,000 images of a pass that loads and computes nothing: what a fit
    pays once more where the number of examples is not known."""
    data: Dataset
    if p["data"] == "CIFAR-10":
        images = cifar10(args.data_root, "train", p["n"])
        data = TensorDataset(images.x, images.y)
    else:
        data = JpegFolder(args.data_root, p["n"])
    batches = DataLoader(data, batch_size=64)
    n = len(data)  # type: ignore[arg-type]
    seconds = seconds_of(lambda: deque(batches, maxlen=0))
    return {"images": n, "seconds": seconds / n * 1000}


#: Structures that are exact, of our package and of laplace-torch.
EXACT = {
    "exact (ours)": {"hessian_structure": "nystrom", "n_eigenvalues": "exact"},
    "full": {"hessian_structure": "full"},
    "gp": {"hessian_structure": "gp"},
}


def exact(args: Any, p: Row) -> Row:
    """Fit, evidence and predictions of exact Laplace in regression."""
    torch.manual_seed(0)
    model = mlp(10, 1, p["width"]).eval()
    n = p["N"]
    x, x_test = torch.randn(n, 10), torch.randn(p["inputs"], 10)
    with torch.no_grad():
        y = model(x) + 0.3 * torch.randn(n, 1)
    options: Row = {**EXACT[p["method"]]}
    if p["method"] == "gp":
        options["n_subset"] = n
    la = Laplace(model, "regression", "all", sigma_noise=0.3, **options)
    kind = "gp" if p["method"] == "gp" else "glm"
    found = {"fit": seconds_of(lambda: la.fit(loader(x, y, 100)))}
    steps = p["steps"] if p["method"] == "exact (ours)" else max(1, p["steps"] // 20)
    found["evidence"] = (p["steps"] / steps) * seconds_of(
        lambda: la.optimize_prior_precision(kind, method="marglik", n_steps=steps)
    )
    found["predict"] = seconds_of(
        lambda: deque((la(part, pred_type=kind) for part in x_test.split(100)), 0)
    )
    return {"P": sum(q.numel() for q in model.parameters()), **found}


#: Structures of classification whose predictions are compared with exact ones.
CLASSIFIERS = {
    **{name: EXACT[name] for name in ("exact (ours)", "full")},
    "kron": {"hessian_structure": "kron"},
    "K = 20 (ours)": {"hessian_structure": "nystrom", "n_eigenvalues": 20},
}


def classify(args: Any, p: Row) -> Row:
    """Predictions of small MNIST images by ten-class posteriors, and the largest
    difference that leaving out directions makes to exact ones."""
    torch.manual_seed(0)
    images = mnist(args.data_root, "train")
    n, n_test = p["N"], p["inputs"]
    x = F.avg_pool2d(images.x[: n + n_test], 4).flatten(1)
    y, model = images.y[:n], mlp(x.shape[1], 10, p["width"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:n]), y).backward()
        optimizer.step()
    la = Laplace(model.eval(), "classification", "all", **CLASSIFIERS[p["method"]])
    found = {"fit": seconds_of(lambda: la.fit(loader(x[:n], y, 100)))}
    found["first"] = seconds_of(lambda: la(x[:1]))  # factorises the posterior
    parts = x[n:].split(100)
    found["predict"] = seconds_of(lambda: deque(map(la, parts), 0)) / n_test * 1000
    row = {"P": sum(map(torch.numel, model.parameters())), **found}
    if p["method"] != "exact (ours)":
        return row
    few, difference = la.posterior.for_predictions, 0.0
    for part in parts:
        both = []
        for known in (few, la.posterior):
            at = features_for(known, la.linearizer, part)
            values = known.function_values(at.f, at.phi, at.residual)
            both.append(class_probabilities(values, "probit"))
        difference = max(difference, float((both[0] - both[1]).abs().max()))
    return {**row, "directions": f"{few.rank} of {la.rank}", "difference": difference}


TASKS = {f.__name__: f for f in (gradient, basis, predict, grid_search, fit, loading)}
TASKS |= {f.__name__: f for f in (exact, classify)}


# One process per measurement


class Bench:
    """Measured rows by task and sizes, kept in a file."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.path = args.cache_dir / "rows.json"
        self.rows: dict[str, Row] = {}
        if self.path.exists() and not args.again:
            self.rows = json.loads(self.path.read_text())

    def __call__(self, task: str, **p: Any) -> Row:
        """Return the row of a task, measured in a process unless it is known."""
        key = f"{task} {json.dumps(p)}"
        if key not in self.rows:
            self.rows[key] = self._measure(task, p)
            self.path.write_text(json.dumps(self.rows, indent=1))
            print(f"{key}: {self.rows[key]}", flush=True)
        return self.rows[key]

    def _measure(self, task: str, p: Row) -> Row:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", task]
        command += [json.dumps(p), "--data-root", str(self.args.data_root)]
        command += ["--cache-dir", str(self.args.cache_dir), "--out"]
        command += [str(self.args.out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            return json.loads(lines[-1])
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"failed": said[-1][:120]}


def work(args: Any, task: str, p: Row) -> None:
    """Print the row of a task, with its peak of memory, as the other side reads it."""
    warnings.simplefilter("ignore")
    limit = int((LIMIT_GB + 10) * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    row = TASKS[task](args, p)
    print(json.dumps({**row, "peak_gb": peak_gb()}))


# Tables


def against(what: str, theirs: Row, ours: Row, scale: float = 1e3) -> Row:
    """Return a line of both sides in milliseconds, or in seconds with scale 1."""
    if "failed" in theirs or "failed" in ours:
        return {"what": what, "theirs": str(theirs), "ours": str(ours)}
    unit = "ms" if scale == 1e3 else "s"
    return {
        "what": what,
        "theirs": f"{theirs['seconds'] * scale:.3g} {unit}",
        "ours": f"{ours['seconds'] * scale:.3g} {unit}",
        "ratio": f"{theirs['seconds'] / ours['seconds']:.3g}×",
        "theirs, peak": f"{theirs['peak_gb']:.2f} GB",
        "ours, peak": f"{ours['peak_gb']:.2f} GB",
    }


def gradients(bench: Bench, small: bool) -> str:
    """One sampled gradient and a basis, ResNet-20, K = 20."""
    M, their_M = (16, 8) if small else (512, 16)
    rows = [
        against(
            f"a gradient of {M} (theirs of {their_M}, batch 8)",
            bench("gradient", side="theirs", M=their_M, batch=8),
            bench("gradient", side="ours", M=M, batch=64),
        )
    ]
    K, M, their_M = (4, 16, 8) if small else (20, 2000, 128)
    rows.append(
        against(
            f"a gradient with the basis of M = {M:,} (theirs {their_M})",
            bench("basis", side="theirs", M=their_M, K=min(K, their_M), batch=8),
            bench("basis", side="ours", M=M, K=K, batch=128),
        )
    )
    return runs.markdown(rows)


def predictions(bench: Bench, small: bool) -> str:
    """One prediction of ResNet-20 by the probit link, K = 20, by batch size."""
    rows = []
    for batch in (1, 2) if small else (1, 8, 32):
        p = {"M": 4 if small else 24, "K": 4 if small else 20, "batch": batch}
        p["images"] = 2 if small else 32
        theirs, ours = (bench("predict", side=s, **p) for s in ("theirs", "ours"))
        row = against(f"an image, batches of {batch}", theirs, ours)
        if "seconds" in ours:
            passes = ours["seconds"] / ours["forward"]
            row["ours in forward passes"] = f"{passes:.0f}"
        rows.append(row)
    return runs.markdown(rows)


def search(bench: Bench, small: bool) -> str:
    """Grid search of the prior precision: 100 candidates, 1,000 images."""
    of = (2, 16) if small else (100, 1000)
    few = {"images": 4 if small else 16, "candidates": 2, "of": of}
    theirs = bench("grid_search", side="theirs", **few)
    whole = {"images": of[1], "candidates": of[0]}
    ours = bench("grid_search", side="ours", **whole)
    what = (
        f"theirs scaled up from {few['candidates']} candidates, {few['images']} images"
    )
    return runs.markdown([against(what, theirs, ours, 1.0)])


def memory(bench: Bench, small: bool) -> str:
    """A fit with M = 2,000 of 256 images: seconds and peak, theirs with M = 256."""
    N, M = (16, 32) if small else (256, 2000)
    theirs = bench("fit", side="theirs", N=N, M=N, K=20 if not small else 4, batch=16)
    rows = [{"fit": f"theirs, M = {N}", **theirs}]
    p = {"side": "ours", "N": N, "M": M, "K": 20, "batch": 128}
    rows.append({"fit": f"ours, M = {M:,}", **bench("fit", **p)})
    budget = "1 GB" if not small else "400 MB"
    rows.append(
        {"fit": f"ours, memory_budget={budget!r}", **bench("fit", **p, budget=budget)}
    )
    return runs.markdown(rows)


def loading_passes(bench: Bench, small: bool) -> str:
    """A pass that loads only, and a fit pays where a loader's length is unknown."""
    rows = []
    for data, n in (("CIFAR-10", 20_000), ("ImageNet sample", 1000)):
        row = bench("loading", data=data, n=8 if small else n)
        rows.append({"data": data, "s per 1,000 images": row.get("seconds"), **row})
        rows[-1].pop("seconds", None)
    return runs.markdown(rows)


def exact_mode(bench: Bench, small: bool) -> str:
    """Exact Laplace in regression: fit, 100 evidence steps, 1,000 predictions.

    Evidence steps of `full` and `gp` are scaled up from five."""
    rows = []
    sizes = [(20, 8)] if small else [(200, 25), (200, 50), (1000, 25), (1000, 94)]
    for N, width in sizes:
        p = {"N": N, "width": width, "inputs": 20 if small else 1000}
        p["steps"] = 20 if small else 100
        totals = {}
        for name in EXACT:
            if name == "full" and width > 50:
                continue  # 10,000 parameters: three hours
            row = bench("exact", method=name, **p)
            if "fit" in row:
                totals[name] = row["fit"] + row["evidence"] + row["predict"]
                row = {**row, "total": totals[name]}
                row["ratio"] = totals[name] / totals["exact (ours)"]
            rows.append({"N": N, "method": name, **row})
    return runs.markdown(rows, ".3g")


def classification(bench: Bench, small: bool) -> str:
    """Exact Laplace of ten classes: a fit, the first prediction, 1,000 predictions, and
    the largest difference of a probability to that with all directions."""
    p = {"N": 20, "width": 8, "inputs": 20} if small else {"N": 240, "width": 32}
    p = {"inputs": 1000, **p}
    methods = list(CLASSIFIERS)[: 2 if small else None]
    rows = [{"method": m, **bench("classify", method=m, **p)} for m in methods]
    of_full = next((r.get("predict") for r in rows if r["method"] == "full"), None)
    for row in rows:
        if of_full and "predict" in row:
            row["relative to full"] = row["predict"] / of_full
    return runs.markdown(rows, ".3g")


SECTIONS = {
    "gradients": gradients,
    "predictions": predictions,
    "search": search,
    "memory": memory,
    "loading": loading_passes,
    "exact": exact_mode,
    "classification": classification,
}


def main(argv: list[str] | None = None) -> None:
    parser = runs.arguments("benchmark", __doc__)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--again", action="store_true", help="measure all anew")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "JSON"), help="internal")
    args = runs.start(parser, argv)
    if args.worker:
        work(args, args.worker[0], json.loads(args.worker[1]))
        return
    bench = Bench(args)
    for name in args.only:
        title = inspect.cleandoc(SECTIONS[name].__doc__ or "")
        text = f"**{title}**\n\n{SECTIONS[name](bench, args.smoke)}\n"
        text += f"{runs.environment(args.threads)}; CPU seconds.\n"
        (args.out / f"{name}.md").write_text(text)
        print(text, flush=True)


if __name__ == "__main__":
    main()
