"""A fit and its hyperparameters as tensors and plain types, and back.

The model itself is not in a checkpoint: it is recognised by a fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from laplace_ella.derivatives.linearizer import Linearizer
from laplace_ella.posterior.basis import NystromBasis
from laplace_ella.posterior.fit import Fit, Sums
from laplace_ella.posterior.outside import Complement
from laplace_ella.support.fingerprint import differences, fingerprint
from laplace_ella.support.span import Sketch, Span

__all__ = ["check_identity", "fit_from_state", "identity", "state_of_fit"]


def identity(linearizer: Linearizer, **described: Any) -> dict[str, Any]:
    """What must be the same where a checkpoint is loaded: the model, and whatever
    else is `described` in plain types."""
    return {
        **described,
        "fingerprint": fingerprint(linearizer.fn.model),
        "parameter_names": list(linearizer.fn.names),
    }


def check_identity(
    state: Mapping[str, Any], linearizer: Linearizer, **described: Any
) -> None:
    """Refuse the checkpoint of another class, likelihood or model."""
    if not isinstance(state, Mapping) or "cls_name" not in state:
        got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"Expected the state_dict() of a fitted posterior, got {got}. Save "
            "la.state_dict() and load that."
        )
    for name, ours in described.items():
        saved = state.get(name)
        if saved != ours:
            what = "is of class" if name == "cls_name" else f"has {name}"
            remedy = (
                "subset_of_weights and hessian_structure"
                if name == "cls_name"
                else f"{name}={saved!r}"
            )
            raise ValueError(
                f"The checkpoint {what} {saved!r}, this object {ours!r}. Build it with "
                f"the same {remedy}."
            )
    different = differences(state["fingerprint"], linearizer.fn.model)
    if different is not None:
        raise ValueError(
            f"The checkpoint belongs to another model: {different}. Load the "
            "model's own weights before the posterior's."
        )
    if state["parameter_names"] != list(linearizer.fn.names):
        raise ValueError(
            f"The checkpoint has {len(state['parameter_names'])} uncertain "
            f"parameters, this object {len(linearizer.fn.names)}. Set requires_grad "
            "and parameter_names= as they were when the posterior was fitted."
        )


def state_of_fit(fit: Fit) -> dict[str, Any]:
    """A fit in tensors and plain types; θ̂ is the model's."""
    return {
        "H": fit.sums.H,
        "loss": fit.sums.loss.detach(),
        "n_data": fit.sums.n_data,
        "output_shape": tuple(fit.output_shape),
        "dtype": str(fit.dtype).removeprefix("torch."),
        "fit_complement": fit.complement.value,
        "spans_all": fit.spans_all,
        "curvature_rows": fit.curvature_rows,
        "span": _state_of_span(fit.span),
        "directions": fit.basis.directions,
        "eigenvalues": fit.basis.eigenvalues,
        "basis_tail": fit.basis.tail,
        "basis_n_samples": fit.basis.n_samples,
        "basis_trace": fit.basis.trace,
        "basis_method": fit.basis.method,
        "basis_numels": tuple(fit.basis.numels),
    }


def fit_from_state(
    state: Mapping[str, Any], mean: torch.Tensor, home: torch.device
) -> Fit:
    """The inverse, with θ̂ `(P,)` and the directions kept on `home`."""
    _check_shapes(state, len(mean))
    here = mean.device
    tail = state["basis_tail"]
    basis = NystromBasis(
        state["directions"].to(home),
        state["eigenvalues"].to(here),
        state["basis_n_samples"],
        state["basis_trace"],
        state["basis_method"],
        tuple(state["basis_numels"]),
        None if tail is None else tail.to(here),
    )
    sums = Sums(state["H"].to(here), state["loss"].to(here), state["n_data"])
    return Fit(
        basis,
        sums,
        tuple(state["output_shape"]),
        mean,
        getattr(torch, state["dtype"]),
        Complement(state["fit_complement"]),
        spans_all=state["spans_all"],
        # Older checkpoints have neither.
        curvature_rows=state.get("curvature_rows", False),
        span=_span_from_state(state.get("span"), home),
    )


def _state_of_span(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {
        "directions": span.directions,
        "signs": span.sketch.signs,
        "size": span.sketch.size,
        "ranks": span.ranks,
        "usual": span.usual,
        "largest": span.largest,
    }


def _span_from_state(
    state: Mapping[str, Any] | None, home: torch.device
) -> Span | None:
    if state is None:
        return None
    signs = state["signs"]
    sketch = Sketch(None if signs is None else signs.to(home), state["size"])
    directions = state["directions"].to(home)
    levels = (tuple(state[name]) for name in ("ranks", "usual", "largest"))
    return Span(directions, sketch, *levels)


def _check_shapes(state: Mapping[str, Any], n_params: int) -> None:
    """Refuse what does not belong together, before anything is taken over."""
    rank, width = state["directions"].shape
    good = {
        "directions": width == n_params,
        "eigenvalues": state["eigenvalues"].shape == (rank,),
        "H": state["H"].shape[-2:] == (rank, rank),
        "loss": state["loss"].shape == state["H"].shape[:-2],
        "basis_numels": sum(state["basis_numels"]) == n_params,
        "output_shape": len(state["output_shape"]) > 0,
        "dtype": isinstance(getattr(torch, state["dtype"], None), torch.dtype),
    }
    wrong = [name for name, fits in good.items() if not fits]
    if wrong:
        raise ValueError(
            f"The checkpoint does not fit together: {', '.join(wrong)} (rank {rank}, "
            f"{n_params} parameters). Was it changed after la.state_dict()?"
        )
