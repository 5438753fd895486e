"""Names of `hessian_structure` for settings, where only a name can be passed on.

laplace-torch's `marglik_training`, and wrappers of other libraries, build their
posterior themselves and hand no further arguments to it.
"""

from __future__ import annotations

import inspect
from typing import Any

from laplace.baselaplace import BaseLaplace
from laplace.utils.enums import HessianStructure

from laplace_ella.ella import ELLALaplace
from laplace_ella.last_layer import ELLALLLaplace

__all__ = ["register_structure"]

#: Settings by name. Laplace finds classes by weak references: they are kept here.
_SETTINGS: dict[str, dict[str, Any]] = {}
_CLASSES: list[type] = []

_TAKEN = {"nystrom", "ella", *(structure.value for structure in HessianStructure)}


def register_structure(name: str, **settings: Any) -> str:
    """Let `Laplace(..., hessian_structure=name)` be "nystrom" with these settings.

    Parameters
    ----------
    name : str
        any that laplace-torch does not use itself; a name that was registered before
        has the new settings from now on
    **settings
        keyword arguments of `ELLALaplace`, by name; those given to `Laplace` go first

    Returns
    -------
    str
        the name

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
    known = set(inspect.signature(ELLALaplace).parameters)
    known -= {"model", "likelihood", "unknown"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TypeError(
            f"ELLALaplace has no settings called {unknown}; it has {sorted(known)}."
        )
    if name not in _SETTINGS:
        _CLASSES.extend(_named(cls, name) for cls in (ELLALaplace, ELLALLLaplace))
    _SETTINGS[name] = dict(settings)
    return name


def _named(cls: type[ELLALaplace], name: str) -> type:
    """Return a class that Laplace finds by the name, and that makes a `cls`."""

    def build(_: type, *args: Any, **kwargs: Any) -> ELLALaplace:
        given = inspect.signature(cls).bind_partial(*args, **kwargs).arguments
        given |= given.pop("settings", {})
        defaults = {k: v for k, v in _SETTINGS[name].items() if k not in given}
        return cls(*args, **kwargs, **defaults)

    namespace = {"_key": (cls._key[0], name), "__new__": build}
    return type(f"{cls.__name__}_{name}", (cls,), namespace)


class _Misnamed(BaseLaplace):
    """What `hessian_structure="ella"` finds: an error with the right name."""

    _key = ("all", "ella")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            'hessian_structure="ella" is called "nystrom": Laplace(model, likelihood, '
            f'"{self._key[0]}", "nystrom"), or laplace_ella.ELLALaplace.'
        )


class _MisnamedLastLayer(_Misnamed):
    _key = ("last_layer", "ella")
