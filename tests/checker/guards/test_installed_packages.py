"""Code of installed packages is not followed; data in objects of their classes is."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import sympy  # type: ignore[import-untyped]

from shardmap_torch.checker.guards import state
from shardmap_torch.checker.guards.state import State as Walked
from tests.checker.support.states import State

PACKAGE: Final = """\
ON = True

class Options:
    def __init__(self): self.own = True

def read(): return ON

def decorated(function):
    def call(): return function()
    return call
"""
SEEN: Final = {
    "attribute of an object": State(
        "import shipped\no = shipped.Options()", "o.own", "o.own = False"
    ),
    "function of a user's in a decorator's": State(
        "import shipped\nbox = [True]\nf = shipped.decorated(lambda: box[0])",
        "f()",
        "box[0] = False",
    ),
}


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package whose files are where distributions are installed."""
    (tmp_path / "shipped.py").write_text(PACKAGE)
    monkeypatch.setattr(state, "_SITES", (f"{tmp_path}/",))
    monkeypatch.setattr(state, "_LIBRARIES", (*state._LIBRARIES, f"{tmp_path}/"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("shipped")
    del sys.modules["shipped"]


@pytest.mark.parametrize("kind", SEEN)
def test_data_in_objects_of_an_installed_package_is_seen(kind: str) -> None:
    read, change = SEEN[kind].script([])
    state = Walked(read)
    assert read()
    assert state.holds()
    change()
    assert not read()
    assert not state.holds()
    assert Walked(read).found != state.found


def test_code_of_an_installed_package_is_not_followed(shipped: Any) -> None:
    state = Walked(lambda: shipped.read())
    shipped.ON = False
    assert state.holds()


def test_a_mapped_function_s_own_package_is_followed_where_it_is_installed(shipped: Any) -> None:
    state = Walked(shipped.read)
    shipped.ON = False
    assert not state.holds()


def test_an_object_of_a_large_package_is_a_few_values() -> None:
    symbol = sympy.Symbol("x")
    assert len(Walked(lambda x: x * int(symbol.subs(symbol, sympy.sqrt(9)))).found) < 3_000
