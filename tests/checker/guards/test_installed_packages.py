"""Installed packages count as libraries; what a user may set of them is compared all the same."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import sympy  # type: ignore[import-untyped]

from shardmap_torch.checker.guards import libraries
from shardmap_torch.checker.guards.captured_state import Surroundings
from shardmap_torch.checker.guards.walk import Walk
from tests.checker.support.states import State

PACKAGE: Final = """\
from torch import nn
from shipped import inner

ON = True

class Options:
    on = True
    def __init__(self): self.own = True

class Layer(nn.Module):
    def forward(self): return inner.deep()

def helper(): return True
def read(): return ON and inner.ON and helper()
def deep(): return inner.deep()
def aside(): return inner.ASIDE["on"]

def decorated(function):
    def call(): return function()
    return call
"""
INNER: Final = """\
ON = True
TABLE = {"on": True}
ASIDE = {"on": True}

def deep(): return TABLE["on"]
"""
DEEP: Final = "shipped.inner.TABLE['on'] = False"

SEEN: Final = {
    "flag": State("import shipped", "shipped.read()", "shipped.ON = False"),
    "flag of another module": State("import shipped", "shipped.read()", "shipped.inner.ON = False"),
    "function of a module": State(
        "import shipped", "shipped.read()", "shipped.helper = lambda: False"
    ),
    "attribute of an object": State(
        "import shipped\no = shipped.Options()", "o.own", "o.own = False"
    ),
    "attribute of a class": State(
        "import shipped\no = shipped.Options()", "o.on", "shipped.Options.on = False"
    ),
    "function of a user's in a decorator's": State(
        "import shipped\nbox = [True]\nf = shipped.decorated(lambda: box[0])",
        "f()",
        "box[0] = False",
    ),
    "table of a layer's package": State("import shipped\nf = shipped.Layer()", "f()", DEEP),
    "table of the package of a layer's base": State(
        "import shipped\nclass Own(shipped.Layer): pass\nf = Own()", "f()", DEEP
    ),
    "table of the package of a layer that comes later": State(
        "import shipped\nf = [[[shipped.Layer()]], shipped.aside]",
        "f[1]()",
        "shipped.inner.ASIDE['on'] = False",
    ),
}


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package whose files are where distributions are installed."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "inner.py").write_text(INNER)
    monkeypatch.setattr(libraries, "_SITES", (f"{tmp_path}/",))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("shipped")
    for name in ("shipped", "shipped.inner"):
        del sys.modules[name]


@pytest.mark.parametrize("kind", SEEN)
def test_what_a_user_sets_of_an_installed_package_is_seen(kind: str) -> None:
    read, change = SEEN[kind].script([])
    surroundings = Surroundings(read)
    before = surroundings.key()
    assert read()
    assert surroundings.key() == before
    change()
    assert not read()
    assert surroundings.key() != before


def test_a_mapped_function_of_an_installed_package_is_walked(shipped: Any) -> None:
    surroundings = Surroundings(shipped.deep)
    before = surroundings.key()
    shipped.inner.TABLE["on"] = False
    assert surroundings.key() != before


def test_the_code_of_an_installed_package_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    symbol = sympy.Symbol("x")
    assert Walk(lambda x: x * int(symbol.subs(symbol, sympy.sqrt(9)))).size < 5_000
