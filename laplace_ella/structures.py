"""Register names of `hessian_structure` that stand for settings of a posterior.

laplace-torch's `marglik_training`, and wrappers of other libraries, pass no others."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

from laplace.baselaplace import BaseLaplace
from laplace.utils.enums import HessianStructure

from laplace_ella.ella import ELLALaplace
from laplace_ella.last_layer import ELLALLLaplace
from laplace_ella.settings import refuse_unknown

_SETTINGS: dict[str, dict[str, Any]] = {}
_TAKEN = {"nystrom", "ella", *(structure.value for structure in HessianStructure)}


def register_structure(name: str, **settings: Any) -> str:
    """Let `Laplace(..., hessian_structure=name)` be "nystrom" with these settings.

    Parameters
    ----------
    name : str
        any that laplace-torch does not use itself, and what is returned; registering a
        name again replaces its settings
    **settings
        keyword arguments of `ELLALaplace`; arguments of `Laplace` override them

    Examples
    --------
    Online evidence training with exact linearised Laplace, also of classification:

    >>> import laplace, torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from laplace_ella import register_structure
    >>> data = TensorDataset(torch.randn(20, 2), torch.randint(3, (20,)))
    >>> la, model, margliks, losses = laplace.marglik_training(
    ...     torch.nn.Linear(2, 3),
    ...     DataLoader(data, batch_size=20),
    ...     hessian_structure=register_structure("exact", n_eigenvalues="exact"),
    ...     n_epochs=2,
    ... )
    >>> la.n_eigenvalues, len(margliks)
    ('exact', 20)
    """
    if not isinstance(name, str) or not name or name in _TAKEN:
        raise ValueError(
            f"name must be a text other than {sorted(_TAKEN)}, got {name!r}."
        )
    refuse_unknown(ELLALaplace, settings)
    if name not in _SETTINGS:
        _CLASSES.extend(_named(cls, name) for cls in (ELLALaplace, ELLALLLaplace))
    _SETTINGS[name] = settings
    return name


def _named(base: type[ELLALaplace], name: str) -> type:
    """Return a subclass that Laplace finds by the name."""
    order = list(inspect.signature(base).parameters)

    class Named(base):
        _key = (base._key[0], name)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = {*order[: len(args)], *kwargs}
            settings = {k: v for k, v in _SETTINGS[name].items() if k not in given}
            super().__init__(*args, **kwargs, **settings)

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            # Copies and pickles are of the class itself, which has all settings.
            return object.__new__, (base,), self.__getstate__()

    Named.__name__ = Named.__qualname__ = base.__name__  # the name that users know
    return Named


def _misnamed(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        'hessian_structure="ella" is called "nystrom": Laplace(model, likelihood, '
        f'"{self._key[0]}", "nystrom"), or laplace_ella.{type(self).__name__}.'
    )


#: Laplace finds classes by weak references, so they are kept here.
_CLASSES: list[type] = [
    type(name, (BaseLaplace,), {"_key": (subset, "ella"), "__init__": _misnamed})
    for name, subset in (("ELLALaplace", "all"), ("ELLALLLaplace", "last_layer"))
]
