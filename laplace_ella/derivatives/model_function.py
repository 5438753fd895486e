"""The user's model as a pure function of the parameters that Laplace treats."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

__all__ = ["ModelFunction", "matching_names", "unwrap"]


def unwrap(model: nn.Module) -> nn.Module:
    """The module below `torch.compile` and `DataParallel` wrappers.

    Their parameters are the wrapped module's own; function transforms need the
    module itself.
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            return model


def matching_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that are, or match, one of the patterns, in their own order."""
    patterns = patterns if isinstance(patterns, str) else list(patterns)
    if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            "params must be a list of parameter names or patterns, got "
            f"{patterns!r}; names are those of model.named_parameters()."
        )
    unknown = [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]
    if unknown or not patterns:
        raise ValueError(
            f"params={patterns} must name parameters of the model; "
            f"{unknown or 'an empty list'} matches none of {list(names)}."
        )
    return [n for n in names if any(fnmatchcase(n, p) for p in patterns)]


class ModelFunction:
    """f(params, x): the model with chosen parameters replaced, all others constant.

    Outputs of any shape come as `(B, ·)`; `output_shape` has the shape of the last one,
    without the batch dimension.

    Parameters
    ----------
    model : torch.nn.Module
    names : sequence of str
        names of the P parameters in `model.named_parameters()`, in their order
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model = model
        self.names = tuple(names)
        self.output_shape: tuple[int, ...] = ()

    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The current values, detached; they share memory with the model."""
        named = dict(self.model.named_parameters())
        return tuple(named[name].detach() for name in self.names)

    def shapes(self) -> list[torch.Size]:
        named = dict(self.model.named_parameters())
        return [named[name].shape for name in self.names]

    def numels(self) -> list[int]:
        return [shape.numel() for shape in self.shapes()]

    def split(self, vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of `(..., P)` vectors as parameters `(..., *shape)`."""
        pieces = vectors.split(self.numels(), dim=-1)
        return tuple(
            piece.reshape(*vectors.shape[:-1], *shape)
            for piece, shape in zip(pieces, self.shapes(), strict=True)
        )

    def __call__(
        self, params: Sequence[torch.Tensor], x: Any, **kwargs: Any
    ) -> torch.Tensor:
        chosen = dict(zip(self.names, params, strict=True))
        # Detached, so that no graph is built through the layers below them.
        others = {
            name: p.detach()
            for name, p in self.model.named_parameters()
            if name not in chosen
        }
        # Copies, made inside any transform: a forward pass may count in place.
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        state = {**buffers, **others, **chosen}
        f = functional_call(self.model, state, (x,), kwargs)
        if isinstance(f, torch.Tensor):
            self.output_shape = tuple(f.shape[1:])
            f = f.flatten(1) if f.ndim > 2 else f
        return f
