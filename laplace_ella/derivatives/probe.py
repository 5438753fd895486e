"""The first look at a model with new inputs: does it run, and what does it return?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from laplace_ella.derivatives.folding import Fold
from laplace_ella.derivatives.sizes import Activations
from laplace_ella.support.batches import Batch
from laplace_ella.support.layout import OutputLayout, check_outputs

__all__ = ["Probe", "checked_outputs"]


@dataclass(frozen=True)
class Probe:
    """What a forward pass of one example tells.

    Attributes
    ----------
    output_shape : tuple of int
        shape of the model's output without the batch dimension
    activations : Activations
        bytes of its intermediate results
    folds : tuple of Fold
        normalisations that can be folded into the layers before them
    """

    output_shape: tuple[int, ...]
    activations: Activations
    folds: tuple[Fold, ...] = ()


def checked_outputs(
    model: nn.Module,
    batch: Batch,
    run: Callable[[], Any],
    layout: OutputLayout,
    known: Collection[tuple[Any, ...]] = (),
) -> torch.Tensor:
    """What `run` returns, the model's output `(B, ...)` for a batch, or an error that
    says what to change.

    `known` has the signatures of batches on which the model ran before.
    """
    try:
        return check_outputs(run(), layout, batch.size)
    except Exception as error:
        remedy = _remedy(model, batch, error, known)
        if remedy is None:
            raise
        raise remedy from error


def _remedy(
    model: nn.Module,
    batch: Batch,
    error: Exception,
    known: Collection[tuple[Any, ...]],
) -> Exception | None:
    """A clearer error, where the inputs and not the model are at fault."""
    x = batch.template
    if isinstance(x, Mapping) and _takes_keywords(model, x, error):
        return TypeError(
            "The model was called with the whole mapping as its one argument and "
            f"raised {type(error).__name__}: {error}. It seems to take the entries "
            f"{sorted(map(str, x))} as keywords. Wrap it: a torch.nn.Module that "
            "holds it as self.hf, whose forward(self, batch) returns "
            "self.hf(**batch).logits (without the labels, if there are any)."
        )
    if isinstance(x, Mapping) and isinstance(error, (TypeError, AttributeError)):
        return TypeError(
            "The model was called with the whole mapping as its one argument and "
            f"raised {type(error).__name__}: {error}. If it takes a tensor, wrap it: a "
            "torch.nn.Module that holds it as self.net, whose forward(self, batch) "
            f"returns self.net(batch[{str(next(iter(x), 'input_ids'))!r}])."
        )
    whole = tuple(tuple(t.shape) for t in batch.tensors)
    if any(whole == tuple(shape for _, shape, _ in example) for example in known):
        return ValueError(
            f"Inputs of shape {', '.join(map(str, whole))} are one example of those "
            "that the model saw before, without a batch dimension: pass "
            f"x.unsqueeze(0). The model raised {type(error).__name__}: {error}"
        )
    if batch.tensors and all(t.ndim < 2 for t in batch.tensors):
        return ValueError(
            "The inputs have no other dimension than the batch. If they were meant "
            "as one example, pass x.unsqueeze(0). With one number per example the "
            f"model raised {type(error).__name__}: {error}"
        )
    return None


def _takes_keywords(model: nn.Module, x: Mapping[str, Any], error: Exception) -> bool:
    """Whether the model wants the entries of a mapping, not the mapping."""
    if isinstance(error, AttributeError) and not str(error):  # of Hugging Face
        return True
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
    return any(key in parameters for key in x)
