"""The user's model as a pure function of the parameters that Laplace treats."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from laplace_ella.support.batches import Batch, map_tensors

__all__ = [
    "ModelFunction",
    "clearer_error",
    "matching_names",
    "refuse_sharded",
    "unwrap",
]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module below `torch.compile` and `DataParallel` wrappers.

    Their parameters are the wrapped module's own; function transforms need the
    module itself.
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
            continue
        # A private name of torch.compile's wrapper, which has no public one.
        compiled = getattr(model, "_orig_mod", None)
        if not isinstance(compiled, nn.Module):
            return model
        model = compiled


def refuse_sharded(model: nn.Module) -> None:
    """Refuse models whose parameters are divided among processes: their gradients and
    directions would be, too."""
    # A DTensor, as `fully_shard` and tensor parallelism make them, has placements.
    parameters = unwrap(model).named_parameters()
    parts = [name for name, p in parameters if hasattr(p, "placements")]
    modules = unwrap(model).named_modules()
    parts += [n for n, m in modules if type(m).__name__ == "FullyShardedDataParallel"]
    if parts:
        raise TypeError(
            f"{parts[0] or 'The model'} is divided among processes (by fully_shard, "
            "FullyShardedDataParallel or tensor parallelism); every process needs all "
            "parameters. Collect them with torch.distributed.checkpoint.state_dict."
            "get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True)), load them into a plain copy of the model in every "
            "process, and pass that; the data may be divided."
        )


def matching_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that are, or match, one of the patterns, in their own order."""
    patterns = patterns if isinstance(patterns, str) else list(patterns)
    if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            "parameter_names must be a list of parameter names or patterns, got "
            f"{patterns!r}; names are those of model.named_parameters()."
        )
    unknown = [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]
    if unknown or not patterns:
        raise ValueError(
            f"parameter_names={patterns} must name parameters of the model; "
            f"{unknown or 'an empty list'} matches none of {list(names)}."
        )
    return [n for n in names if any(fnmatchcase(n, p) for p in patterns)]


class ModelFunction:
    """f(params, x): the model with chosen parameters replaced, all others constant.

    Pure: a model that writes to its buffers or its inputs writes to copies. Outputs
    come in their natural shape `(B, ...)`; of objects with logits (Hugging Face) the
    logits are taken.

    Parameters
    ----------
    model : torch.nn.Module
    names : sequence of str
        names of the P parameters in `model.named_parameters()`, in their order
    dtype : torch.dtype, optional
        in which the model is computed, whatever its own: parameters, buffers and
        inputs that are floating-point numbers are converted, at every call
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], dtype: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.names = tuple(names)
        self.asked_dtype = dtype

    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Return the current values, detached; they share the model's memory unless
        they are converted to another dtype."""
        named = dict(self.model.named_parameters())
        return tuple([self._cast(named[name].detach()) for name in self.names])

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of rows, features and basis: the parameters', float32 at
        least."""
        dtype, named = torch.float32, dict(self.model.named_parameters())
        for name in self.names:
            own = self.asked_dtype or named[name].dtype
            dtype = torch.promote_types(dtype, own)
        return dtype

    @property
    def device(self) -> torch.device:
        """Return the model's device."""
        return next(self.model.parameters()).device

    def numels(self) -> list[int]:
        """Return the number of entries of each of the parameters."""
        named = dict(self.model.named_parameters())
        return [named[name].numel() for name in self.names]

    @property
    def n_params(self) -> int:
        """Return P."""
        return sum(self.numels())

    def flat(self) -> torch.Tensor:
        """Return the current values as one vector `(P,)`."""
        # reshape, not view: parameters may be transposed or channels_last
        return torch.cat([p.reshape(-1) for p in self.parameters()])

    def split(self, vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return vectors `(..., P)` as parameters `(..., *shape)`; views where
        possible."""
        named, pieces, start = dict(self.model.named_parameters()), [], 0
        for name in self.names:
            p = named[name]
            piece = vectors[..., start : start + p.numel()]
            pieces.append(piece.reshape(*vectors.shape[:-1], *p.shape))
            start += p.numel()
        return tuple(pieces)

    def __call__(
        self, params: Sequence[torch.Tensor], x: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return the outputs `(B, ...)` with these parameters in place of the model's
        own."""
        # Copies, made inside any transform: a forward pass may count in place. The
        # inputs are copied always: they are small beside the activations.
        x, kwargs = map_tensors(self._copy, x), map_tensors(self._copy, kwargs)
        state: dict[str, Any] = dict(zip(self.names, params, strict=True))
        for name, p in self.model.named_parameters():
            if name not in state:  # detached: no graph through the layers below
                state[name] = self._cast(p.detach())
        for name, buffer in self.model.named_buffers():
            state.setdefault(name, self._copy(buffer))
        # Modules may share tensors and occur in several places: by `tie_weights` a
        # module that occurs twice would lose its parameters, so that every name of a
        # tensor is given. Parameters first: a buffer elsewhere may be one of them.
        first: dict[int, Any] = {}
        for kind in ("_parameters", "_buffers"):  # the public iterators skip repeats
            for prefix, module in self.model.named_modules():
                for own, tensor in getattr(module, kind).items():
                    if tensor is not None:
                        name = f"{prefix}.{own}" if prefix else own
                        state[name] = first.setdefault(id(tensor), state.get(name))
        f = functional_call(self.model, state, (x,), kwargs, tie_weights=False)
        return f if isinstance(f, torch.Tensor) else getattr(f, "logits", f)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.is_floating_point()
        return tensor.to(self.asked_dtype) if floating else tensor

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = self._cast(tensor)
        return cast.clone() if cast is tensor else cast


def clearer_error(
    model: nn.Module,
    batch: Batch,
    error: Exception,
    known: tuple[tuple[int, ...], ...],
) -> Exception | None:
    """Return a clearer error, where the inputs and not the model are at fault.

    `known` has the shapes of one example on which the model ran before.
    """
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
    if whole == known:
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
    """Return whether the model wants the entries of a mapping, not the mapping."""
    if isinstance(error, AttributeError) and not str(error):  # of Hugging Face
        return True
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
    return any(key in parameters for key in x)
