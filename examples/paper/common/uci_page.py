"""The page about UCI regression, from the CSV files of `uci.py`."""

from __future__ import annotations

from pathlib import Path

from common.uci import UCI
from common.uci_figures import against_rank, against_samples
from common.uci_tables import (
    KINDS,
    Table,
    coverage,
    few,
    in_short,
    log_det_by_data,
    log_det_table,
    nll,
    read_csv,
    sample_table,
    sampled,
    times,
    what_was_run,
)

HEAD = """# UCI regression: random and gap splits

Written by `python examples/paper/uci.py`; every split's numbers are in `methods.csv`,
`samples.csv` and `log_dets.csv`. MLP with two hidden layers (tanh), 2,000 steps of
Adam; inputs and targets are standardised by the training data. Random splits: 90 % and
10 %. Gap splits (Foong et al. 2019): the middle third by one input is the test set. At
most 2,000 training and 2,000 test data, but for "all data". All methods have the same
network and mean, so one RMSE per split; prior precision and noise by each method's own
evidence, from 1 and 1, MAP's noise by maximum likelihood.

- **exact**: `n_eigenvalues="exact"`. **ELLA as in the paper**: `**laplace_ella.PAPER`,
  K = 20, the rest dropped, evidence of the K directions.
- **K = …, drop, prior, matched**: the complement; evidence over the whole spectrum;
  `subsample_size` N, at most 2,000. From one fit with the largest K. Where the
  gradients have a smaller rank, K is that.
- **KFAC, diag, last layer, gp**: laplace-torch's, 200 steps of Adam on both logarithms.
  The gradient of KFAC's evidence lacks the noise in the log determinant (laplace-torch
  0.3), so this leads to the noise of greatest likelihood; **KFAC, maximum** has the
  true maximum of its evidence, found by values. `gp` for up to 400 data, where float32
  is enough for its Cholesky factors; its evidence is another one, so it is not exact's
  equal here.

What was run, number of splits:

"""

SHORT = """## In short

Near the best (near exact): share of splits on which the NLL exceeds that of the best
method (of exact) by no more than one standard error of the paired difference over the
test data, or 0.01 nats; what is below exact counts as near. Coverage: of 95 %
intervals. `gp` on its own few splits.

"""

RANK = """Medians over splits; the axes end 1.5 nats above exact Laplace, or where
matched does: what is not seen is above.
"""

NLL = {
    "random": """Mean ± standard error over splits; bold: the best, or no more than one
standard error of the paired difference over splits, or 0.01 nats, above it. Last
columns: data sets in bold, and splits near the best.

""",
    "gap": """Mean ± standard error over splits (median). Few splits with a large loss
make most of some means and of their standard errors, so that bold says little there:
the median and the number of splits near the best say more.

""",
}

COVERAGE = """Means over splits; width: median of the mean width by that of exact.

"""

SAMPLES = """## Fewer sampled gradients

K = 20, matched, M of N gradients sampled: medians over splits.

"""

LOG_DET = """## Error of the log determinant

log det(I + JᵀJ/ridge) of all N rows by `Spectrum` from M of them, and by the sample's
eigenvalues times N/M; relative errors over all splits. δσ²: of the exact posterior.

"""

BY_DATA = """Median relative error at δσ², by data set, in per cent:

"""

TIMES = """## Time

CPU time of one thread by that of exact; medians over splits. The fit of all K is that
of the largest; the paper's shows what K = 20 costs. Prediction: all test data.

"""


def write_page(out: Path) -> None:
    """`README.md`, `short.md` and the figures, beside the CSV files."""
    everything = Table(read_csv(out / "methods.csv"))
    samples = Table(read_csv(out / "samples.csv"))
    log_dets = Table(read_csv(out / "log_dets.csv"))
    table = Table([row for row in everything.rows if row["study"] in UCI])
    studies = table.distinct("study")
    rows = sampled(table, samples)
    against_rank(table, out / "rank.png")
    against_samples(rows, out / "samples.png")
    short = in_short(table)
    (out / "short.md").write_text(short)
    sections = [
        HEAD + what_was_run(everything),
        SHORT + short,
        "![NLL against K](rank.png)\n\n" + RANK,
    ]
    for kind, name in KINDS.items():
        sections.append(f"## NLL, {name}\n\n{NLL[kind]}" + nll(table, kind, studies))
    for kind, name in KINDS.items():
        title = f"## Coverage of 95 % intervals, {name}\n\n"
        sections.append(title + COVERAGE + coverage(table, kind, studies))
    sections.append(SAMPLES + sample_table(rows) + "\n![NLL against M](samples.png)\n")
    sections.append(LOG_DET + log_det_table(log_dets))
    sections.append(BY_DATA + log_det_by_data(log_dets))
    for study in everything.distinct("study"):
        for kind, name in KINDS.items():
            if study not in UCI and everything.where(study=study, kind=kind).rows:
                title = f"## {study}, {name}\n\n"
                sections.append(title + few(everything, study, kind))
    timed = [study for study in ("concrete", "protein") if study in studies]
    sections.append(TIMES + times(table, timed or studies))
    (out / "README.md").write_text("\n".join(sections))
