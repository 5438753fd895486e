"""Digests: equal for equal content, different for anything that changes numbers."""

from __future__ import annotations

import copy
import functools
import threading
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn

from laplace_ella.support.fingerprint import differences, digest, fingerprint
from laplace_ella.support.fingerprint import model_digest as digest_of_model


@dataclass
class Options:
    a: int = 1
    b: tuple = ()


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Colour(str, Enum):
    RED = "red"


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def closure(n):
    def multiply(x):
        return n * x

    return multiply


def zeros_but(i):
    values = torch.zeros(5000)
    values[i] = 1
    return values


DIFFERENT = [
    (1, 1.0),
    (1, True),
    ("a", b"a"),
    ("a", ["a"]),
    (["ab", "c"], ["a", "bc"]),
    ([1, [2]], [[1], 2]),
    ({"a": 1}, {"a": 2}),
    (Colour.RED, "red"),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (zeros_but(2500), zeros_but(2501)),
    (zeros_but(2500).numpy(), zeros_but(2501).numpy()),
    ([zeros_but(2500)], [zeros_but(2501)]),
    (torch.tensor([1.0]).bfloat16(), torch.tensor([2.0]).bfloat16()),
    (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    (Options(a=1), Options(a=2)),
    (Options(b=(zeros_but(1),)), Options(b=(zeros_but(2),))),
    (Slotted(1), Slotted(2)),
    (double, triple),
    (closure(2), closure(3)),
    (functools.partial(double, 1), functools.partial(double, 2)),
    (functools.lru_cache(double), functools.lru_cache(triple)),
    (torch.relu, torch.tanh),
    (torch.float32, torch.float64),
    (nn.Linear, nn.Conv2d),
    (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
]


@pytest.mark.parametrize(("a", "b"), DIFFERENT, ids=lambda v: type(v).__name__)
def test_what_differs_has_another_digest(a, b):
    assert digest(a) != digest(b)
    for value in (a, b):
        assert digest(value) == digest(value)
        assert len(digest(value)) == 32


def test_what_is_equal_has_the_same_digest():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"x", "y", "z"}) == digest({"z", "y", "x"})
    assert digest(closure(2)) == digest(closure(2))
    assert digest(Options(b=(zeros_but(1),))) == digest(Options(b=(zeros_but(1),)))
    strided = torch.arange(12.0).reshape(3, 4).T
    assert digest(strided) == digest(strided.contiguous())


def test_what_cannot_be_read_is_never_the_same():
    lock = threading.Lock()
    assert digest(lock) != digest(lock)


def test_a_structure_that_contains_itself_ends():
    own: list = [1]
    own.append(own)
    assert digest(own) == digest(own)


def test_a_long_chain_of_helpers_is_followed_to_its_end():
    def chain(last):
        scope = {"__name__": "users_module"}
        lines = [f"def f{i}(x): return f{i + 1}(x)" for i in range(2000)]
        exec("\n".join([*lines, f"def f2000(x): return {last}"]), scope)
        return scope["f0"]

    assert digest(chain("x")) == digest(chain("x"))
    assert digest(chain("x")) != digest(chain("-x"))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))


CHANGES = {
    "weights": lambda m: m[0].weight.data.add_(1e-6),
    "buffer": lambda m: m[2].running_mean.add_(1.0),
    "trainable": lambda m: m[0].bias.requires_grad_(False),
    "configuration": lambda m: setattr(m[2], "eps", 1e-3),
    "own forward": lambda m: setattr(m[1], "forward", double),
    "hook": lambda m: m[1].register_forward_hook(lambda module, x, out: out + 1),
    "pre-hook": lambda m: m[1].register_forward_pre_hook(lambda module, x: x),
    "module": lambda m: m.append(nn.Identity()),
    "dtype": lambda m: m.double(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_model_digest_sees(name):
    changed = model()
    with torch.no_grad():
        CHANGES[name](changed)
    assert digest_of_model(changed) != digest_of_model(model())


def test_model_digest_does_not_see_modes_and_copies():
    assert digest_of_model(model().eval()) == digest_of_model(model().train())
    assert digest_of_model(copy.deepcopy(model())) == digest_of_model(model())
    hooked = [model(), model()]
    for each in hooked:  # handles count all hooks of the process
        each[0].register_forward_hook(triple)
    assert digest_of_model(hooked[0]) == digest_of_model(hooked[1])


def test_model_digest_sees_shared_parameters():
    tied, untied = (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in "ab")
    tied[1].weight = tied[0].weight
    tied[1].bias = tied[0].bias
    untied.load_state_dict(tied.state_dict())
    assert digest_of_model(tied) != digest_of_model(untied)


def test_differences_in_words():
    saved = fingerprint(model())
    assert differences(saved, model()) is None
    other = model()
    with torch.no_grad():
        other[0].weight.add_(1.0)
    assert differences(saved, other) == "values of 0.weight differ"
