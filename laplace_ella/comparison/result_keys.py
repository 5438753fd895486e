"""By what `compare` recognises results that its cache holds already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from laplace_ella.comparison.methods import Method
from laplace_ella.comparison.runner import Settings
from laplace_ella.support.fingerprint import digest, fingerprint

__all__ = ["base_key_of", "method_key"]


def base_key_of(
    model: nn.Module, loaders: Mapping[str, Any], settings: Settings
) -> str:
    """Digest of everything but the method on which a result depends."""
    # The list of links decides which rows there are; only the first, with which
    # methods are tuned, changes numbers.
    options = {**asdict(settings), "links": settings.links[0]}
    parts = [fingerprint(model), options]
    for name, loader in loaders.items():
        torch.manual_seed(0)
        first = next(iter(loader), None)
        parts.append([name, len(loader.dataset), digest(first)])
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def method_key(base_key: str, method: Method) -> str:
    """The key of a method's rows. Its name is not in it: renaming keeps results."""
    spec = {k: repr(v) for k, v in vars(method).items() if k not in ("name", "about")}
    text = base_key + json.dumps(spec, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
