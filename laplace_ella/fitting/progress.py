"""How far a fit has come, so that it goes on after whatever ended it.

A fit has two stages that take long, and after each batch of them it can be saved:
gathering the gradients of the drawn pairs, and adding up the curvature. A rerun draws
the same pairs from the seed, starts each pass in the random state in which it started
before, and leaves out the derivatives of the batches that were worked on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.errors import CheckpointWarning, warn_caller
from laplace_ella.fitting.checkpoint import fit_from_state, state_of_fit
from laplace_ella.fitting.gathering import (
    Gathered,
    gathered_from_state,
    state_of_gathered,
)
from laplace_ella.fitting.identity import Identity
from laplace_ella.fitting.journal import START_OVER, Checkpoint, Journal
from laplace_ella.posterior.fit import Fit, Sums
from laplace_ella.support.batches import map_tensors, split_batch
from laplace_ella.support.fingerprint import digest
from laplace_ella.support.loaders import Rest
from laplace_ella.support.preserve import get_random_states, set_random_states

__all__ = ["Added", "Evaluations", "Progress", "Sampled"]

logger = logging.getLogger("laplace_ella")

CPU = torch.device("cpu")

#: Makes a copy of directions `(K, P)` that stays.
Copy = Callable[[torch.Tensor], torch.Tensor]

#: Stages, as they are called in a file.
START, SAMPLING, ADDING, FINISHED = "start", "sampling", "adding", "finished"


@dataclass(frozen=True)
class Sampled:
    """How far the gradients of the drawn pairs are gathered.

    Attributes
    ----------
    gathered : Gathered
    n_batches : int
        batches of the drawn examples that are in it
    exact : bool
        whether all pairs are drawn
    dtype : torch.dtype
        in which derivatives are computed
    n_pairs : int
        of the data, from which they were drawn
    """

    gathered: Gathered
    n_batches: int
    exact: bool
    dtype: torch.dtype
    n_pairs: int


@dataclass(frozen=True)
class Evaluations:
    """Validation losses while curvature is added up.

    Attributes
    ----------
    history : tuple of dict
        'n_data' and 'loss'
    best : tuple of float and Sums, optional
        the lowest loss, negative of what is maximised, and what it is the loss of
    waited : int
        evaluations since
    """

    history: tuple[dict[str, float], ...] = ()
    best: tuple[float, Sums] | None = None
    waited: int = 0


@dataclass(frozen=True)
class Added:
    """How far the curvature of a pass is added up.

    Attributes
    ----------
    sums : Sums
    n_examples, n_batches : int
        of this pass that are in them
    evaluated : bool
        whether these sums were evaluated on validation data, or are those from the
        start
    generator : torch.Tensor, optional
        state of the generator of sampled cotangents
    targets : str
        digest of the targets of the last batch
    evaluations : Evaluations
    """

    sums: Sums
    n_examples: int = 0
    n_batches: int = 0
    evaluated: bool = True
    generator: torch.Tensor | None = None
    targets: str = ""
    evaluations: Evaluations = Evaluations()


class Progress:
    """The progress of one fit, and the file in which it is kept, if there is one.

    Parameters
    ----------
    checkpoint : Checkpoint, optional
    device : torch.device
        of the model
    loaders : sequence
        whose generators belong to the random state; the user's is to be restored by
        the caller
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None = None,
        device: torch.device = CPU,
        loaders: Sequence[Any] = (),
    ) -> None:
        self._device, self._loaders = device, tuple(loaders)
        self._journal = None if checkpoint is None else Journal(checkpoint)
        self._saved: dict[str, Any] = {}
        self._common: dict[str, Any] = {"random": {}}  # of all files of this fit
        self._linearizer: Linearizer | None = None
        self._start: Fit | None = None
        self._evaluations = Evaluations()
        if self._journal is not None:
            self._saved = self._journal.load()
            self._common["random"] = _owned(self._saved.get("random", {}))
            self._begin(START)

    # Before anything is computed

    def check(self, identity: Identity, linearizer: Linearizer) -> None:
        """Refuse the file of another fit, naming the difference; go on with the ways of
        differentiating that were chosen."""
        if self._journal is None:
            return
        ours = identity.plain()
        if self._saved:
            saved, model = self._saved["identity"], linearizer.fn.model
            found = identity.differences(saved, ours, model)
            if found:
                more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
                raise ValueError(
                    f"{self._journal.path} is the checkpoint of another fit: "
                    f"{'; '.join(found[:3])}{more}. Use the model, data and settings "
                    f"that it was made with, or another path, or, {START_OVER}."
                )
            linearizer.adopt_decisions(self._saved["decisions"])
            path, stage = self._journal.path, self._saved["stage"]
            logger.info("the fit of %s goes on; stage: %s", path, stage)
        self._common["identity"] = ours
        self._linearizer = linearizer

    def _begin(self, stage: str) -> None:
        """Go back to the random state in which a stage began, or take it down."""
        if self._journal is None:
            return
        random = self._common["random"]
        here = get_random_states(self._device, *self._loaders)
        saved = random.setdefault(stage, here)
        same_kinds = len(saved["loaders"]) == len(here["loaders"])
        # Another device or loader is refused later, in words.
        if same_kinds and (saved["cuda"] is None) == (here["cuda"] is None):
            set_random_states(saved, self._device, *self._loaders)

    def _take(self, stage: str) -> dict[str, Any] | None:
        """What the file holds, if it was saved in that stage; once."""
        if self._saved.get("stage") != stage:
            return None
        return self._saved.pop("content", None)

    # Saving

    def due(self, gathered: Gathered | None = None) -> bool:
        """Whether it is time for a save, of gradients or of a basis with its sums."""
        if self._journal is None:
            return False
        if gathered is not None:
            return self._journal.due(gathered.n_bytes)
        directions = None if self._start is None else self._start.basis.directions
        return self._journal.due(0 if directions is None else directions.nbytes)

    def _save(self, stage: str, content: dict[str, Any]) -> None:
        if self._journal is None or self._linearizer is None:
            return
        self._journal.save(
            {
                **self._common,
                "decisions": self._linearizer.decisions(),
                "stage": stage,
                "content": content,
            }
        )

    # Gradients

    def sampled(
        self, n_pairs: int, home: torch.device, folder: Path | None = None
    ) -> Sampled | None:
        """What is gathered of a sample of so many pairs; None at the beginning."""
        content = self._take(SAMPLING)
        if content is None:
            return None
        if content["n_pairs"] != n_pairs:
            self._warn_about_repetition("sampling starts over")
            return None
        return Sampled(
            gathered_from_state(content["gathered"], home, folder),
            content["n_batches"],
            content["exact"],
            getattr(torch, content["dtype"]),
            n_pairs,
        )

    def begin_sampling(self) -> None:
        """Gradients are taken from here on."""
        self._begin(SAMPLING)

    def save_sampled(self, sampled: Sampled) -> None:
        self._save(
            SAMPLING,
            {
                "gathered": state_of_gathered(sampled.gathered),
                "n_batches": sampled.n_batches,
                "exact": sampled.exact,
                "dtype": str(sampled.dtype).removeprefix("torch."),
                "n_pairs": sampled.n_pairs,
            },
        )

    # Curvature

    def started(
        self, mean: torch.Tensor, home: torch.device, owned: Copy = torch.clone
    ) -> Fit | None:
        """The basis to which curvature is added, if it is there already; `owned` makes
        the copy of its directions that stays."""
        if self._saved.get("stage") != ADDING:
            return None
        return _owned_fit(self._saved["content"].pop("start"), mean, home, owned)

    def begin_adding(self, start: Fit) -> None:
        """Curvature is added to `start` from here on."""
        self._begin(ADDING)
        self._start = start
        # What a file of this stage holds is more.
        if self._saved.get("stage") != ADDING and self.due():
            self._save(ADDING, {"start": state_of_fit(start), "added": None})

    def take_up(self, loader: Any, start: Fit, dict_key_y: str) -> tuple[Any, Added]:
        """A loader over the batches that are left, and what the others added up to.

        Loaders that do not repeat themselves are read from the beginning.
        """
        content = self._take(ADDING)
        beginning = Added(start.sums)
        if content is None or content["added"] is None:
            return loader, beginning
        added = _added_from_state(content["added"], start.sums.H.device)
        states = get_random_states(self._device, *self._loaders)
        rest = Rest(loader, added.n_batches)
        if rest.last is not None:
            _, targets = split_batch(rest.last, dict_key_y)
            if digest(targets) == added.targets:
                self._evaluations = added.evaluations
                return rest, added
        set_random_states(states, self._device, *self._loaders)
        self._warn_about_repetition("the curvature is added up from the beginning")
        return loader, beginning

    def evaluated(self, evaluations: Evaluations) -> None:
        """Take down validation losses; the next save has them."""
        if self._journal is not None:
            self._evaluations = evaluations

    def save_added(self, added: Added) -> None:
        if self._start is None:
            return
        added = replace(added, evaluations=self._evaluations)
        self._save(
            ADDING,
            {"start": state_of_fit(self._start), "added": _state_of_added(added)},
        )

    # The end

    def finished(
        self, mean: torch.Tensor, home: torch.device, owned: Copy = torch.clone
    ) -> Fit | None:
        """The fit, if it is complete."""
        content = self._take(FINISHED)
        if content is None:
            return None
        fit = _owned_fit(content["fit"], mean, home, owned)
        return replace(fit, history=tuple(content["history"]))

    def finish(self, fit: Fit) -> None:
        """Save the complete fit."""
        content = {"fit": state_of_fit(fit), "history": list(fit.history)}
        self._save(FINISHED, content)

    def _warn_about_repetition(self, consequence: str) -> None:
        assert self._journal is not None
        warn_caller(
            "The loader gives other batches than when the checkpoint "
            f"{self._journal.path} was written, so {consequence}. Give it a generator "
            "with a seed, or a data set that repeats itself, to go on where a fit "
            "ended.",
            CheckpointWarning,
        )


def _owned(state: Any) -> Any:
    """Tensors in memory, which do not hold on to the file that they were read from."""
    return map_tensors(torch.clone, state)


def _owned_fit(
    state: Mapping[str, Any], mean: torch.Tensor, home: torch.device, owned: Copy
) -> Fit:
    others = {name: value for name, value in state.items() if name != "directions"}
    directions = owned(state["directions"])
    return fit_from_state({**_owned(others), "directions": directions}, mean, home)


def _state_of_added(added: Added) -> dict[str, Any]:
    evaluations = added.evaluations
    best = evaluations.best
    return {
        "sums": _state_of_sums(added.sums),
        "n_examples": added.n_examples,
        "n_batches": added.n_batches,
        "evaluated": added.evaluated,
        "generator": added.generator,
        "targets": added.targets,
        "history": list(evaluations.history),
        "best": None if best is None else [best[0], _state_of_sums(best[1])],
        "waited": evaluations.waited,
    }


def _added_from_state(state: Mapping[str, Any], device: torch.device) -> Added:
    best = state["best"]
    if best is not None:
        best = best[0], _sums_from_state(best[1], device)
    generator = state["generator"]
    return Added(
        _sums_from_state(state["sums"], device),
        state["n_examples"],
        state["n_batches"],
        state["evaluated"],
        None if generator is None else generator.clone(),
        state["targets"],
        Evaluations(tuple(state["history"]), best, state["waited"]),
    )


def _state_of_sums(sums: Sums) -> dict[str, Any]:
    return {"H": sums.H, "loss": sums.loss.detach(), "n_data": sums.n_data}


def _sums_from_state(state: Mapping[str, Any], device: torch.device) -> Sums:
    H, loss = (state[name].clone().to(device) for name in ("H", "loss"))
    return Sums(H, loss, state["n_data"])
