"""Batch normalisation that follows a convolution, folded into its weights.

In evaluation mode it is an affine map of every channel: with s = γ/√(σ² + ε),

    BN(Wa + b) = (sW)a + s(b − μ) + β,

a convolution with other weights W̃ = sW and b̃ = s(b − μ) + β. So J(x)V = J̃(x)Ṽ, with
the Jacobian J̃ in the folded parameters and the directions Ṽ that V is pushed to by the
map (W, b, γ, β) ↦ (W̃, b̃), once for all inputs of a batch; gradients go back by its
transpose. What is saved is the derivative of the normalisation at every position of
every channel, for each of K tangents or C outputs.

Which layers can be folded is seen in a forward pass, not guessed from the modules: the
output of the convolution goes into the normalisation and nowhere else. Every later pass
checks the same of what it does, and before features or gradients are used for the first
time one example's are compared with those of the model as it is: a mode cannot see
everything.

Index legend: K directions, P parameters.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from laplace_ella.derivatives.model_function import ModelFunction

__all__ = ["Fold", "FoldFinder", "FoldedFunction", "FoldingError"]

#: Layers with many positions per channel; after a linear one there is little to save.
LAYERS = frozenset([torch.conv1d, torch.conv2d, torch.conv3d])

#: What may be asked of a tensor without a look at its values.
METADATA = frozenset(
    [getattr(torch.Tensor, name) for name in ("dim", "size", "numel")]
    + [
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "requires_grad")
    ]
)

#: Instead of the name of a tensor that is no parameter or buffer.
_UNKNOWN = ""

_BATCH_NORM = inspect.signature(F.batch_norm)


class FoldingError(RuntimeError):
    """The model no longer uses a folded layer as it did when it was first seen."""


@dataclass(frozen=True)
class Fold:
    """A layer and the normalisation of its output, by the names of their tensors.

    Attributes
    ----------
    weight, bias : str
        W and b, which may be missing
    mean, variance : str
        μ and σ², buffers
    scale, shift : str, optional
        γ and β
    eps : float
        ε
    """

    weight: str
    bias: str | None
    mean: str
    variance: str
    scale: str | None
    shift: str | None
    eps: float

    @property
    def parameters(self) -> set[str]:
        """Names of all that are folded into one weight and one bias."""
        names = (self.weight, self.bias, self.scale, self.shift)
        return {name for name in names if name is not None}

    @property
    def tensors(self) -> set[str]:
        """Names of all that take part."""
        return {*self.parameters, self.mean, self.variance}

    def apply(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """W̃ and b̃ from tensors by their names."""
        s, centred = self._factor(tensors), self._centred(tensors)
        offset = s * centred
        if self.shift is not None:
            offset = offset + tensors[self.shift]
        W = tensors[self.weight]
        return W * _channels(s, W), offset

    def push(
        self,
        tensors: Mapping[str, torch.Tensor],
        tangents: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes `(K, *shape)` of W̃ and b̃ by those of some parameters, W among them.

        By hand, without transforms: this is done before every batch of predictions.
        """
        s, W = self._factor(tensors), tensors[self.weight]
        weight = tangents[self.weight] * _channels(s, W)
        offset = weight.new_zeros(len(weight), len(s))
        bias, scale, shift = (
            None if name is None else tangents.get(name)
            for name in (self.bias, self.scale, self.shift)
        )
        if bias is not None:
            offset += s * bias
        if scale is not None:
            change = self._spread(tensors) * scale
            weight.addcmul_(_channels(change, W), W)
            offset += change * self._centred(tensors)
        if shift is not None:
            offset += shift
        return weight, offset

    def pull(
        self,
        tensors: Mapping[str, torch.Tensor],
        gradients: tuple[torch.Tensor, torch.Tensor],
        rows: Mapping[str, torch.Tensor],
    ) -> None:
        """The transpose of `push`: gradients `(m, *shape)` with respect to W̃ and b̃,
        into those of some parameters, W among them."""
        weight, offset = gradients
        s, W = self._factor(tensors), tensors[self.weight]
        torch.mul(weight, _channels(s, W), out=rows[self.weight])
        bias, scale, shift = (
            None if name is None else rows.get(name)
            for name in (self.bias, self.scale, self.shift)
        )
        if bias is not None:
            torch.mul(offset, s, out=bias)
        if scale is not None:
            total = torch.linalg.vecdot(weight.flatten(2), W.flatten(1))
            total.addcmul_(offset, self._centred(tensors))
            torch.mul(total, self._spread(tensors), out=scale)
        if shift is not None:
            shift.copy_(offset)

    def _spread(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """1/√(σ² + ε)."""
        return (tensors[self.variance] + self.eps).rsqrt()

    def _factor(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """s."""
        spread = self._spread(tensors)
        return spread if self.scale is None else spread * tensors[self.scale]

    def _centred(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """b − μ."""
        mean = tensors[self.mean]
        return -mean if self.bias is None else tensors[self.bias] - mean


def _channels(values: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """Values `(..., channels)` to multiply weights `(..., *W.shape)` by."""
    return values.reshape(*values.shape, *(1,) * (W.ndim - 1))


# What the model calls


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (v for v in tree_leaves(values) if isinstance(v, torch.Tensor))


def _batch_norm_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Mapping[str, Any] | None:
    """Arguments by name, of a batch normalisation in evaluation mode."""
    if func is not F.batch_norm:
        return None
    call = _BATCH_NORM.bind(*args, **kwargs)
    call.apply_defaults()
    return None if call.arguments["training"] else call.arguments


@dataclass
class _Output:
    """Of a layer: the names of its weight and bias, and how often it is used."""

    weight: str
    bias: str | None
    uses: int = 0


class FoldFinder(TorchFunctionMode):
    """Watches a forward pass for layers whose output is normalised and used nowhere
    else.

    Parameters
    ----------
    state : mapping
        the model's parameters and buffers in this pass, by name
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in state.items()}
        self.batch_statistics = False  # whether something is normalised by them
        self._uses: Counter[str] = Counter()  # of parameters and buffers
        self._outputs: dict[int, _Output] = {}  # by identity, while they are alive
        self._candidates: list[tuple[_Output, Fold]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in METADATA:
            return result
        for tensor in _tensors((args, kwargs)):
            if (name := self._names.get(id(tensor))) is not None:
                self._uses[name] += 1
            elif (output := self._outputs.get(id(tensor))) is not None:
                output.uses += 1
        if (call := _batch_norm_call(func, args, kwargs)) is not None:
            self._watch_normalization(call)
        elif func is F.batch_norm:
            self.batch_statistics = True
        elif func in LAYERS and len(args) > 1:
            self._watch_layer(result, args[1], _bias(args, kwargs))
        return result

    def _watch_layer(
        self, output: torch.Tensor, W: torch.Tensor, b: torch.Tensor | None
    ) -> None:
        batched = output.ndim == W.ndim  # else other dimensions are normalised
        if batched and id(W) in self._names and (b is None or id(b) in self._names):
            bias = None if b is None else self._names[id(b)]
            self._outputs[id(output)] = _Output(self._names[id(W)], bias)
            # Another tensor may get the identity of one that is gone.
            weakref.finalize(output, self._outputs.pop, id(output), None)

    def _watch_normalization(self, call: Mapping[str, Any]) -> None:
        output = self._outputs.get(id(call["input"]))
        tensors = [call[k] for k in ("running_mean", "running_var", "weight", "bias")]
        known = all(t is None or id(t) in self._names for t in tensors)
        if output is None or not known or tensors[0] is None:
            return
        mean, variance, scale, shift = (
            None if t is None else self._names[id(t)] for t in tensors
        )
        assert mean is not None
        assert variance is not None  # the two come together
        names = (output.weight, output.bias, mean, variance, scale, shift)
        self._candidates.append((output, Fold(*names, call["eps"])))

    @property
    def folds(self) -> tuple[Fold, ...]:
        """What was found: everything that takes part is used once."""
        return tuple(
            fold
            for output, fold in self._candidates
            if output.uses == 1 and all(self._uses[name] == 1 for name in fold.tensors)
        )


def _bias(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return args[2] if len(args) > 2 else kwargs.get("bias")


class _Folding(TorchFunctionMode):
    """Runs layers with folded weights, and leaves out the normalisation after them.

    Whatever else the model does with a tensor that is folded, or with the output of
    such a layer, is an error: it would see other numbers than it should.
    """

    def __init__(
        self,
        folds: Sequence[Fold],
        state: Mapping[str, torch.Tensor],
        folded: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in state.items()}
        self._by_weight: dict[str | None, Fold] = {f.weight: f for f in folds}
        self._by_mean: dict[str | None, Fold] = {f.mean: f for f in folds}
        self._folded = folded
        self._not_to_use = {id(state[name]) for fold in folds for name in fold.tensors}
        # By the identity of an output that is to be normalised: what it becomes.
        self._waiting: dict[int, tuple[Fold, torch.Tensor]] = {}
        # Kept, so that no other tensor gets their identity.
        self._alive: list[Any] = [state]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        if (call := _batch_norm_call(func, args, kwargs)) is not None:
            fold = self._by_mean.get(self._name(call["running_mean"]))
            if fold is not None:
                return self._normalized(fold, call)
        if func in LAYERS and len(args) > 1:
            fold = self._by_weight.get(self._name(args[1]))
            if fold is not None:
                return self._output(fold, func, args, kwargs)
        self._check(not any(map(self._is_out_of_bounds, _tensors((args, kwargs)))))
        return func(*args, **kwargs)

    def _output(
        self,
        fold: Fold,
        func: Callable[..., torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        self._check(self._name(_bias(args, kwargs)) == fold.bias)
        self._check(all(fold != other for other, _ in self._waiting.values()))
        self._check(not self._is_out_of_bounds(args[0]))
        rest = {key: value for key, value in kwargs.items() if key != "bias"}
        normalized = func(args[0], *self._folded[fold.weight], *args[3:], **rest)
        # Another tensor stands for the layer's own output, which is not to be used even
        # after the normalisation. It is this one that is a view: in-place operations on
        # views, as they follow a normalisation, have no batched derivative.
        output = normalized.view_as(normalized)
        self._waiting[id(output)] = fold, normalized
        self._not_to_use.add(id(output))
        self._alive.append(output)
        return output

    def _normalized(self, fold: Fold, call: Mapping[str, Any]) -> torch.Tensor:
        names = [self._name(call[key]) for key in ("running_var", "weight", "bias")]
        self._check(names == [fold.variance, fold.scale, fold.shift])
        self._check(call["eps"] == fold.eps)
        waiting, normalized = self._waiting.pop(id(call["input"]), (None, None))
        self._check(waiting == fold)
        assert normalized is not None
        return normalized

    def _name(self, tensor: torch.Tensor | None) -> str | None:
        return None if tensor is None else self._names.get(id(tensor), _UNKNOWN)

    def _is_out_of_bounds(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._not_to_use

    def _check(self, as_before: bool) -> None:
        if not as_before:
            raise FoldingError(
                "the output of a convolution no longer goes into the batch "
                "normalisation after it, and nowhere else."
            )

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc, traceback)
        if exc_type is None:
            self._check(not self._waiting)


def _is_hooked(model: nn.Module, fold: Fold) -> bool:
    """Whether a hook may see what is between the layer and its normalisation: an output
    of a module that has the layer alone, or an input of one that has the other alone.
    """

    def owners(name: str) -> set[str]:
        parts = name.split(".")[:-1]
        return {".".join(parts[: n + 1]) for n in range(len(parts))}

    layer, normalization = owners(fold.weight), owners(fold.mean)
    before = [model.get_submodule(name) for name in layer - normalization]
    after = [model.get_submodule(name) for name in normalization - layer]
    hooks = [module._forward_hooks for module in (*before, *after)]
    hooks += [module._forward_pre_hooks for module in after]
    everywhere = nn.modules.module
    hooks += [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
    return any(hooks)


class FoldedFunction(ModelFunction):
    """f(params, x) in folded parameters: of every layer W̃ and b̃, and all others.

    Layers are left as they are whose weight is not one of the P parameters although
    its bias or normalisation is: a posterior of a few scales should not become one of
    all weights. So are those with a hook, which would see the output after the
    normalisation.

    Parameters
    ----------
    fn : ModelFunction
        the same in the parameters that the model has
    folds : sequence of Fold
    """

    def __init__(self, fn: ModelFunction, folds: Sequence[Fold]) -> None:
        super().__init__(fn.model, fn.names, fn.asked_dtype)
        self.unfolded = fn
        chosen = set(fn.names)
        self.folds = tuple(
            fold
            for fold in folds
            if (fold.weight in chosen or not chosen & fold.parameters)
            and not _is_hooked(fn.model, fold)
        )
        self._by_weight = {fold.weight: fold for fold in self.folds}
        self._absorbed = {
            name
            for fold in self.folds
            for name in fold.parameters
            if name != fold.weight
        }

    def in_dtype(self, dtype: torch.dtype) -> FoldedFunction:
        """The same, computed in another precision."""
        fn = ModelFunction(self.model, self.names, dtype)
        return FoldedFunction(fn, self.folds)

    def parameters(self) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return self._fold(self.unfolded.parameters())

    def shapes(self) -> list[torch.Size]:
        shapes = []
        for name, shape in zip(self.names, self.unfolded.shapes(), strict=True):
            if name in self._by_weight:
                shapes += [shape, shape[:1]]
            elif name not in self._absorbed:
                shapes.append(shape)
        return shapes

    def push(self, directions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Directions `(K, P)` of the model's own parameters as those of the folded
        ones, `(K, *shape)` each."""
        pieces = self.unfolded.split(directions)
        tangents = dict(zip(self.names, pieces, strict=True))
        tensors = self._tensors()
        return self._in_order(tangents, lambda fold: fold.push(tensors, tangents))

    def pull(self, gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        rows = dict(zip(self.names, self.unfolded.split(out), strict=True))
        remaining, tensors = iter(gradients), self._tensors()
        for name in self.names:
            if name in self._by_weight:
                both = next(remaining), next(remaining)
                self._by_weight[name].pull(tensors, both, rows)
            elif name not in self._absorbed:
                rows[name].copy_(next(remaining))

    def prepare(
        self, params: Sequence[torch.Tensor], x: Any, **kwargs: Any
    ) -> Callable[[], torch.Tensor]:
        remaining = iter(params)
        folded, chosen = {}, {}
        for name in self.names:
            if name in self._by_weight:
                folded[name] = next(remaining), next(remaining)
            elif name not in self._absorbed:
                chosen[name] = next(remaining)

        def folding(state: Mapping[str, torch.Tensor]) -> _Folding:
            constant = {
                fold.weight: fold.apply(state)
                for fold in self.folds
                if fold.weight not in folded
            }
            return _Folding(self.folds, state, {**folded, **constant})

        return self._prepared(chosen, x, kwargs, folding)

    def _fold(self, params: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The folded parameters of the model's own."""
        own = dict(zip(self.names, params, strict=True))
        tensors = {**self.constants(), **own}
        return self._in_order(own, lambda fold: fold.apply(tensors))

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the model, by name."""
        own = zip(self.names, self.unfolded.parameters(), strict=True)
        return {**self.constants(), **dict(own)}

    def _in_order(
        self,
        own: Mapping[str, torch.Tensor],
        folded: Callable[[Fold], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        """Of every parameter what it has of its own, or what it is folded into."""
        values: list[torch.Tensor] = []
        for name in self.names:
            if name in self._by_weight:
                values += folded(self._by_weight[name])
            elif name not in self._absorbed:
                values.append(own[name])
        return tuple(values)
