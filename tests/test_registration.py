"""`import laplace_ella` adds two keys to `Laplace(...)` and changes no other."""

import subprocess
import sys

import pytest
import torch
from laplace import (
    DiagLaplace,
    DiagLLLaplace,
    FullLaplace,
    FullLLLaplace,
    KronLaplace,
    KronLLLaplace,
    Laplace,
)
from laplace.utils.enums import HessianStructure, Likelihood, SubsetOfWeights

from laplace_ella import ELLALaplace, ELLALLLaplace, register_structure
from tests.cases import make, mlp
from tests.fitting import assert_close, fit

pytestmark = pytest.mark.filterwarnings("ignore::laplace_ella.RankWarning")


@pytest.mark.parametrize(
    ("subset", "cls"),
    [
        ("all", ELLALaplace),
        (SubsetOfWeights.ALL, ELLALaplace),
        ("last_layer", ELLALLLaplace),
        (SubsetOfWeights.LAST_LAYER, ELLALLLaplace),
    ],
)
@pytest.mark.parametrize("likelihood", ["regression", Likelihood.REGRESSION])
def test_builds_our_classes(subset, cls, likelihood):
    """Strings and enums, positional and by keyword."""
    model = mlp(3, 4, 2)
    la = Laplace(
        model, likelihood, subset_of_weights=subset, hessian_structure="nystrom"
    )
    assert type(la) is cls
    assert type(Laplace(model, likelihood, subset, "nystrom")) is cls


def test_last_layer_is_the_default():
    """`Laplace(model, lik, hessian_structure="nystrom")` is the last-layer class."""
    la = Laplace(mlp(3, 4, 2), "classification", hessian_structure="nystrom")
    assert type(la) is ELLALLLaplace


def test_keys_are_our_own():
    """No class inherits another's key."""
    assert ELLALaplace.__dict__["_key"] == ("all", "nystrom")
    assert ELLALLLaplace.__dict__["_key"] == ("last_layer", "nystrom")


def test_options_pass_through():
    """Every option reaches the class, and the results are those of the class."""
    case = make("classification_mlp")
    options = {
        "subsample_size": 9,
        "n_eigenvalues": 4,
        "seed": 7,
        "prior_precision": 2.0,
    }
    la = Laplace(case.model, "classification", "all", "nystrom", **options)
    la.fit(case.loader())
    direct = fit(case, **options)
    assert la.rank == 4
    assert_close(la(case.x_test), direct(case.x_test), rtol=0, atol=0)


def test_readme_lines():
    """The four lines of the design: build, fit, tune, predict."""
    case = make("classification_cnn")
    la = Laplace(
        case.model,
        "classification",
        subset_of_weights="all",
        hessian_structure="nystrom",
    )
    la.fit(case.loader())
    la.optimize_prior_precision(method="marglik")
    probs = la(case.x_test, pred_type="glm", link_approx="mc", n_samples=512)
    assert_close(probs.sum(-1), torch.ones(7).double())


OTHERS = {
    ("all", "full"): FullLaplace,
    ("all", "kron"): KronLaplace,
    ("all", "diag"): DiagLaplace,
    ("last_layer", "full"): FullLLLaplace,
    ("last_layer", "kron"): KronLLLaplace,
    ("last_layer", "diag"): DiagLLLaplace,
}


@pytest.mark.parametrize("key", OTHERS, ids="-".join)
def test_other_members_are_unchanged(key):
    """The other keys build and run the classes that they did."""
    case = make("classification_mlp")
    enums = (SubsetOfWeights(key[0]), HessianStructure(key[1]))
    for subset, structure in (key, enums):
        la = Laplace(case.model, "classification", subset, structure)
        assert type(la) is OTHERS[key]
    case.model.float()
    case.x, case.x_test = case.x.float(), case.x_test.float()
    la = Laplace(case.model, "classification", *key)
    la.fit(case.loader())
    la.optimize_prior_precision(n_steps=2)
    assert torch.isfinite(la(case.x_test)).all()


def test_unknown_structure_is_still_an_error():
    """A misspelt structure is refused, as before."""
    with pytest.raises((ValueError, KeyError)):
        Laplace(mlp(3, 4, 2), "classification", "all", "nystroem")
    with pytest.raises((ValueError, KeyError)):
        Laplace(mlp(3, 4, 2), "classification", "subnetwork", "nystrom")


SCRIPT = """
import random, warnings
warnings.simplefilter("ignore")
import numpy as np, torch, laplace
from laplace.baselaplace import BaseLaplace

def keys(cls=BaseLaplace):
    found = {cls._key: cls.__name__} if hasattr(cls, "_key") else {}
    for sub in cls.__subclasses__():
        found |= keys(sub)
    return found

def state():
    return (torch.get_rng_state().sum().item(), random.getstate(),
            np.random.get_state()[1].sum(), torch.get_default_dtype(),
            torch.get_num_threads())

before, found = state(), keys()
import laplace_ella
assert state() == before
added = keys()
assert {k: added[k] for k in found} == found, (found, added)
assert added.keys() - found.keys() == {("all", "nystrom"), ("last_layer", "nystrom")}
"""


def test_import_changes_nothing_else():
    """Importing adds two keys; random states, dtype and threads stay."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


# --- names for settings ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("subset", "cls"), [("all", ELLALaplace), ("last_layer", ELLALLLaplace)]
)
def test_a_name_stands_for_settings(subset, cls):
    """What is given goes first, by name or by place; the class is the one known."""
    name = register_structure("mine", n_eigenvalues=4, seed=7, prior_precision=2.0)
    assert name == "mine"
    la = Laplace(mlp(3, 4, 2), "classification", subset, name, seed=8)
    assert type(la) is cls
    assert (la.n_eigenvalues, la.seed) == (4, 8)
    case = make("classification_mlp")
    la = Laplace(case.model, "classification", subset, name, 1.0, 3.0)
    la.fit(case.loader())
    assert float(la.prior_precision) == 3.0
    register_structure(name, n_eigenvalues=5)
    la = Laplace(mlp(3, 4, 2), "classification", subset, name)
    assert (la.n_eigenvalues, la.seed) == (5, 1234)
    assert type(Laplace(mlp(3, 4, 2), "classification", subset, "nystrom")) is cls


@pytest.mark.parametrize("name", ["nystrom", "kron", "", 3])
def test_names_that_are_taken(name):
    with pytest.raises(ValueError, match="name must be a text other than"):
        register_structure(name, n_eigenvalues=4)


def test_names_for_settings_that_do_not_exist():
    with pytest.raises(TypeError, match=r"called \['rank'\].*n_eigenvalues"):
        register_structure("other", rank=4)
    with pytest.raises((ValueError, KeyError)):
        Laplace(mlp(3, 4, 2), "classification", "all", "other")
