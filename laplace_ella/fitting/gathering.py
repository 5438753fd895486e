"""Sampled gradients as they come, and what is known of their span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laplace_ella.posterior.basis import NystromBasis, RowSketch
from laplace_ella.support.span import Sketch, Span

__all__ = ["Gathered", "gathered_from_state", "state_of_gathered"]


@dataclass(frozen=True)
class Gathered:
    """What is kept of the sampled gradients until all of them are there.

    Attributes
    ----------
    rows : RowSketch
        the gradients, or a summary of them
    sketch : Sketch, optional
        groups of parameters by whose sums their span is known
    groups : RowSketch, optional
        the gradients in these groups, all of them
    """

    rows: RowSketch
    sketch: Sketch | None = None
    groups: RowSketch | None = None

    @classmethod
    def with_span(cls, rows: RowSketch, sketch: Sketch, n_samples: int) -> Gathered:
        """Room for the groups of M gradients as well."""
        return cls(rows, sketch, rows.empty((sketch.size,), n_samples))

    def add(self, rows: torch.Tensor) -> None:
        """Take in gradients `(m, P)`."""
        self.rows.add(rows)
        if self.sketch is not None and self.groups is not None:
            self.groups.add(self.sketch(rows))

    @property
    def n_bytes(self) -> int:
        """Bytes of what is gathered so far."""
        sketches = (self.rows, self.groups)
        return sum(s.buffer[: s.filled].nbytes for s in sketches if s is not None)

    def span(self, basis: NystromBasis) -> Span | None:
        """The span of all gradients, whose basis is known; None where it was not
        kept. Uses up the groups."""
        if self.sketch is None or self.groups is None:
            return None
        assert basis.tail is not None  # all rows were kept
        eigenvalues = torch.cat([basis.eigenvalues, basis.tail])
        return Span.of(self.groups.basis(None).directions, self.sketch, eigenvalues)


# In tensors and plain types


def state_of_gathered(gathered: Gathered) -> dict[str, Any]:
    """What is needed to go on; the rows are those in memory, not copies."""
    sketch, groups = gathered.sketch, gathered.groups
    return {
        "rows": _state_of_rows(gathered.rows),
        "groups": None if groups is None else _state_of_rows(groups),
        "signs": None if sketch is None else sketch.signs,
        "size": None if sketch is None else sketch.size,
    }


def gathered_from_state(
    state: Mapping[str, Any], home: torch.device, folder: Path | None = None
) -> Gathered:
    """The inverse, with the rows kept on `home`; those that were in a file, in a file
    of that folder."""
    rows = _rows_from_state(state["rows"], home, folder)
    if state["groups"] is None:
        return Gathered(rows)
    signs = state["signs"]
    sketch = Sketch(None if signs is None else signs.clone().to(home), state["size"])
    return Gathered(rows, sketch, _rows_from_state(state["groups"], home))


def _state_of_rows(sketch: RowSketch) -> dict[str, Any]:
    return {
        "numels": sketch.numels,
        "capacity": sketch.capacity,
        "keep": sketch.keep,
        "filled": sketch.buffer[: sketch.filled],
        "n_samples": sketch.n_samples,
        "compressed": sketch.compressed,
        "energy": sketch.energy,
        "on_disk": sketch.folder is not None,
    }


def _rows_from_state(
    state: Mapping[str, Any], home: torch.device, folder: Path | None = None
) -> RowSketch:
    filled = state["filled"]
    sketch = RowSketch(
        state["numels"],
        state["capacity"],
        state["keep"],
        filled.dtype,
        home,
        folder if state["on_disk"] else None,
    )
    sketch.buffer[: len(filled)] = filled
    sketch.filled, sketch.n_samples = len(filled), state["n_samples"]
    sketch.compressed = state["compressed"]
    sketch.energy = state["energy"].clone().to(home)
    return sketch
