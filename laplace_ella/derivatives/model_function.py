"""The user's model as a pure function of the parameters that Laplace treats."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from laplace_ella.support.batches import Batch, has_values, map_tensors

__all__ = ["ModelFunction", "matching_names", "refuse_sharded", "unwrap"]


def unwrap(model: nn.Module) -> nn.Module:
    """The module below `torch.compile` and `DataParallel` wrappers.

    Their parameters are the wrapped module's own; function transforms need the
    module itself.
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
            continue
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
    """The names that are, or match, one of the patterns, in their own order."""
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

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of rows, features and basis: the parameters', float32 at least."""
        dtype = torch.float32
        for p in self._chosen():
            dtype = torch.promote_types(dtype, self.asked_dtype or p.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def has_values(self) -> bool:
        """Not so for fake tensors, with which only shapes are computed."""
        return has_values(next(self.model.parameters()))

    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The current values, detached; without another dtype they share memory."""
        return tuple(self._cast(p.detach()) for p in self._chosen())

    def flat(self) -> torch.Tensor:
        """The current values as one vector `(P,)`."""
        # reshape, not view: parameters may be transposed or channels_last
        return torch.cat([p.reshape(-1) for p in self.parameters()])

    def shapes(self) -> list[torch.Size]:
        return [p.shape for p in self._chosen()]

    def numels(self) -> list[int]:
        return [shape.numel() for shape in self.shapes()]

    @property
    def n_params(self) -> int:
        """P, of the model's own parameters."""
        return sum(p.numel() for p in self._chosen())

    def split(self, vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Vectors `(..., P)` as parameters `(..., *shape)`; views where possible."""
        shapes = self.shapes()
        pieces = vectors.split([shape.numel() for shape in shapes], dim=-1)
        return tuple(
            piece.reshape(*vectors.shape[:-1], *shape)
            for piece, shape in zip(pieces, shapes, strict=True)
        )

    def push(self, directions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Directions `(K, P)` as changes of what this is a function of,
        `(K, *shape)` each."""
        return self.split(directions)

    def pull(self, gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """The transpose of `push`: gradients `(m, *shape)` with respect to what this is
        a function of, as rows `(m, P)` of the model's own parameters."""
        for piece, gradient in zip(self.split(out), gradients, strict=True):
            # As they are: flattened, those that are transposed would be copied twice.
            piece.copy_(gradient)

    def ordered(self, batch: Batch) -> Batch:
        """The same inputs, for gradients: in memory as the weights want them.

        Images that were turned from (H, W, C) keep their order in memory, and with it
        all activations; ResNet-20's features in reverse mode take a fifth longer.
        """
        weights = (p for p in self.model.parameters() if p.ndim > 3)
        channels_last = any(not p.is_contiguous() for p in weights)
        return batch if channels_last else batch.contiguous()

    def __call__(
        self, params: Sequence[torch.Tensor], x: Any, **kwargs: Any
    ) -> torch.Tensor:
        return self.prepare(params, x, **kwargs)()

    def prepare(
        self, params: Sequence[torch.Tensor], x: Any, **kwargs: Any
    ) -> Callable[[], torch.Tensor]:
        """The same in two steps: copy what the model may write to, then call it."""
        return self._prepared(dict(zip(self.names, params, strict=True)), x, kwargs)

    def watched(
        self, x: Any, watch: Callable[[dict[str, torch.Tensor]], AbstractContextManager]
    ) -> Callable[[], torch.Tensor]:
        """`prepare` with the current parameters, for a call in a context that knows
        the model's tensors by name."""
        chosen = dict(zip(self.names, self.parameters(), strict=True))
        return self._prepared(chosen, x, {}, watch)

    def _prepared(
        self,
        chosen: dict[str, torch.Tensor],
        x: Any,
        kwargs: dict[str, Any],
        context: Callable[
            [dict[str, torch.Tensor]], AbstractContextManager
        ] = nullcontext,
    ) -> Callable[[], torch.Tensor]:
        # Copies, made inside any transform: a forward pass may count in place. The
        # inputs are copied always: they are small beside the activations.
        buffers = {name: self._copy(b) for name, b in self.model.named_buffers()}
        x, kwargs = map_tensors(self._copy, x), map_tensors(self._copy, kwargs)
        state = {**buffers, **self._others(chosen), **chosen}
        everywhere = {name: state[first] for name, first in self._first_names().items()}

        def run() -> torch.Tensor:
            with context(state):
                # By `tie_weights` a module that occurs twice would lose its parameters.
                f = functional_call(
                    self.model, everywhere, (x,), kwargs, tie_weights=False
                )
            return f if isinstance(f, torch.Tensor) else getattr(f, "logits", f)

        return run

    def _first_names(self) -> dict[str, str]:
        """Of every parameter and buffer of every module, the name under which `state`
        has it: modules may share them, and occur in several places."""
        first: dict[int, str] = {}
        names: dict[str, str] = {}
        modules = list(self.model.named_modules())  # each module once
        # Parameters first: a buffer of another module may be one of them.
        tables = [(prefix, module._parameters) for prefix, module in modules]
        tables += [(prefix, module._buffers) for prefix, module in modules]
        for prefix, tensors in tables:
            for own, tensor in tensors.items():
                if tensor is not None:
                    name = f"{prefix}.{own}" if prefix else own
                    names[name] = first.setdefault(id(tensor), name)
        return names

    def constants(self) -> dict[str, torch.Tensor]:
        """All tensors of the model but the P parameters, by name."""
        buffers = {name: self._cast(b) for name, b in self.model.named_buffers()}
        return {**buffers, **self._others(self.names)}

    def _others(self, chosen: Container[str]) -> dict[str, torch.Tensor]:
        # Detached, so that no graph is built through the layers below them.
        return {
            name: self._cast(p.detach())
            for name, p in self.model.named_parameters()
            if name not in chosen
        }

    def _chosen(self) -> list[nn.Parameter]:
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.names]

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.is_floating_point()
        return tensor.to(self.asked_dtype) if floating else tensor

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = self._cast(tensor)
        return cast.clone() if cast is tensor else cast
