"""The user's model as a pure function of the parameters that Laplace treats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from laplace_ella.support.batches import cast, map_tensors, tensors_of


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module below `torch.compile` and `DataParallel` wrappers.

    Their parameters are the wrapped module's own; function transforms need the
    module itself.
    """
    while True:
        # A private name of torch.compile's wrapper, which has no public one.
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


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
            "parameters. Collect them with get_model_state_dict(model, options="
            "StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint."
            "state_dict, and pass a plain copy of the model; the data may be divided."
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
    """f(params, x): the model with the parameters of some names replaced, all others
    constant.

    Names are those of `model.named_parameters()`, in their order. The model is computed
    in `dtype`, whatever its own: floating-point parameters, buffers and inputs are
    converted at every call. Pure: a model that writes to its buffers or its inputs
    writes to copies. Outputs come in their natural shape `(B, ...)`; of objects with
    logits (Hugging Face) the logits are taken.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], dtype: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.names = tuple(names)
        self.asked_dtype = dtype
        self.shapes = [p.shape for p in self.parameters()]
        self.numels = [shape.numel() for shape in self.shapes]
        self.n_params = sum(self.numels)

    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Return the current values, detached; they share the model's memory unless
        they are converted to another dtype."""
        named = dict(self.model.named_parameters())
        return tuple(
            [cast(named[name].detach(), self.asked_dtype) for name in self.names]
        )

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of rows, features and basis: the parameters', float32 at
        least."""
        dtype = torch.float32
        for p in self.parameters():
            dtype = torch.promote_types(dtype, p.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """Return the model's device."""
        return next(self.model.parameters()).device

    def flat(self) -> torch.Tensor:
        """Return the current values as one vector `(P,)`, in float32 at least."""
        return torch.cat(list(map(torch.flatten, self.parameters()))).to(self.dtype)

    def split(self, vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return vectors `(..., P)` as parameters `(..., *shape)`; views where
        possible."""
        pairs = zip(vectors.split(self.numels, dim=-1), self.shapes, strict=True)
        return tuple([v.reshape(*vectors.shape[:-1], *shape) for v, shape in pairs])

    def __call__(
        self, params: Sequence[torch.Tensor], x: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return the outputs `(B, ...)` with these parameters in place of the model's
        own."""
        # Copies, made inside any transform: a forward pass may count in place. The
        # inputs are copied always: they are small beside the activations.
        copy = partial(cast, dtype=self.asked_dtype, copy=True)
        x = map_tensors(copy, x)
        kwargs = map_tensors(copy, kwargs) if kwargs else {}
        given = dict(zip(self.names, params, strict=True))
        # Parameters first: a buffer of a module may be the parameter of another.
        values: dict[int, torch.Tensor] = {}
        for name, p in self.model.named_parameters():
            known = name in given
            values[id(p)] = given[name] if known else cast(p.detach(), self.asked_dtype)
        # Modules may share tensors and occur in several places: by `tie_weights` a
        # module that occurs twice would lose its parameters, so that every name of a
        # tensor is given.
        state: dict[str, torch.Tensor] = {}
        for prefix, module in self.model.named_modules():
            for tensors in (module.named_parameters, module.named_buffers):
                for name, t in tensors(prefix, recurse=False, remove_duplicate=False):
                    if id(t) not in values:
                        values[id(t)] = copy(t)
                    state[name] = values[id(t)]
        f = functional_call(self.model, state, (x,), kwargs, tie_weights=False)
        return f if isinstance(f, torch.Tensor) else getattr(f, "logits", f)

    def activation_bytes(self, x: Any) -> tuple[Any, int, int]:
        """Return the outputs, and bytes of the largest and of all results that their
        backward pass needs; weights do not count."""
        weights, kept = set(map(_place, self.model.parameters())), {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            place = _place(tensor)
            if place not in weights:
                kept[place] = max(kept.get(place, 0), tensor.nbytes)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.enable_grad(), hooks:
            f = self([p.requires_grad_() for p in self.parameters()], x)
        sizes = [f.nbytes if isinstance(f, torch.Tensor) else 1, *kept.values()]
        return f, max(sizes), sum(sizes)


def _place(tensor: torch.Tensor) -> int:
    """Return where a tensor and its views are in memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # fake ones and some subclasses have no place
        return id(tensor)


@contextmanager
def clearer_errors(x: Any, example_shapes: Any) -> Iterator[None]:
    """Say more about errors of a model where its inputs x are at fault.

    `example_shapes` has the shapes of one example on which the model ran before.
    """
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(x, Mapping) and isinstance(error, (TypeError, AttributeError)):
            first = str(next(iter(x), "input_ids"))
            raise TypeError(
                "The model was called with the whole mapping as its one argument and "
                f"raised {said}. If it takes a tensor, or the entries "
                f"{sorted(map(str, x))} as keywords, wrap it: a torch.nn.Module "
                "that holds it as self.net, whose forward(self, batch) returns "
                f"self.net(batch[{first!r}]) or self.net(**batch).logits."
            ) from error
        shapes = tuple(tuple(t.shape) for t in tensors_of(x))
        if shapes == example_shapes or all(len(shape) < 2 for shape in shapes):
            raise ValueError(
                f"Inputs of shape {', '.join(map(str, shapes))} have no other "
                "dimension than the batch, or are one example: for one example pass "
                f"x.unsqueeze(0). The model raised {said}"
            ) from error
        raise
