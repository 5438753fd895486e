"""Figures about UCI regression."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.figures import pyplot, save
from common.uci_tables import KINDS, SHARES, Row, Table, methods_of, ranks_of

COLOURS = {"drop": "tab:red", "prior": "tab:orange", "matched": "tab:blue"}
LINES = {
    "exact": ("black", "-"),
    "KFAC": ("tab:green", "--"),
    "KFAC, maximum": ("tab:green", ":"),
    "diag": ("tab:purple", "--"),
    "last layer": ("tab:brown", "--"),
}


def against_rank(table: Table, path: Path) -> None:
    """Median NLL by K, with the methods without a K as lines."""
    plt = pyplot()
    studies = table.distinct("study")
    figure, axes = plt.subplots(
        2, len(studies), figsize=(2.4 * len(studies) + 0.6, 5), squeeze=False
    )
    for line, (kind, name) in zip(axes, KINDS.items(), strict=True):
        for ax, study in zip(line, studies, strict=True):
            part = table.where(study=study, kind=kind)
            if not part.rows:
                continue
            middle = {
                method: float(np.median(part.where(method=method).values("nll")))
                for method in methods_of(part)
            }
            ranks = ranks_of(middle)
            for complement, colour in COLOURS.items():
                values = [middle[f"K={rank} {complement}"] for rank in ranks]
                ax.plot(ranks, values, "o-", ms=3, color=colour, label=complement)
            for method, (colour, style) in LINES.items():
                ax.axhline(middle[method], color=colour, ls=style, lw=1, label=method)
            # What is far above exact Laplace would hide everything else.
            exact = middle["exact"]
            shown = [middle[f"K={rank} matched"] for rank in ranks] + [exact]
            reach = max(1.5, 1.3 * (max(shown) - exact))
            ax.set_ylim(min(shown) - 0.15 * reach, exact + reach)
            ax.set_xscale("log")
            ax.set_xticks(ranks, [str(rank) for rank in ranks])
            ax.minorticks_off()
            ax.set_title(f"{study}, {name}", fontsize=8)
            ax.tick_params(labelsize=7)
    for ax in axes[-1]:
        ax.set_xlabel("K", fontsize=8)
    for ax in axes[:, 0]:
        ax.set_ylabel("median test NLL", fontsize=8)
    save(figure, path, columns=8)


def against_samples(rows: list[Row], path: Path) -> None:
    """NLL beyond exact, noise and prior by M."""
    plt = pyplot()
    names = {
        "excess": "median NLL beyond exact",
        "sigma": "σ by the exact one",
        "prior": "δ by the exact one",
    }
    figure, axes = plt.subplots(2, 3, figsize=(9, 5.4))
    for line, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for ax, (name, text) in zip(line, names.items(), strict=True):
            for study in dict.fromkeys(row["study"] for row in rows):
                here = [r for r in rows if r["study"] == study and r["kind"] == kind]
                shares = [row["share"] for row in here]
                values = [row[name] for row in here]
                ax.plot(shares, values, "o-", ms=3, label=study)
            ax.axhline(0.0 if name == "excess" else 1.0, color="black", lw=1)
            if name == "excess":
                ax.set_yscale("symlog", linthresh=0.1)
            ax.set_xscale("log", base=2)
            ax.set_xticks(SHARES, ["N/8", "N/4", "N/2", "N"])
            ax.set_title(f"{text}, {title}", fontsize=8)
            ax.tick_params(labelsize=7)
    for ax in axes[-1]:
        ax.set_xlabel("M, sampled gradients", fontsize=8)
    save(figure, path, columns=6)
