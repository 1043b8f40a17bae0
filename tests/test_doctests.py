"""Docstrings: their examples run and show what they print, and public ones say all they should."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import shardmap_torch


def has_examples(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and ">>>" in Path(spec.origin).read_text()


# Not pytest's --doctest-modules: it would import ops/ and kernels/ under the wrong names.
MODULES = [
    "shardmap_torch",
    *(each.name for each in pkgutil.walk_packages(shardmap_torch.__path__, "shardmap_torch.")),
]


@pytest.mark.parametrize("name", [name for name in MODULES if has_examples(name)])
def test_docstring_examples_show_what_they_print(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not failures, capsys.readouterr().out


PAGES: Final = sorted((Path(__file__).parent.parent / "docs/reference").glob("*.md"))
PUBLIC: Final = re.findall(r"autofunction:: (\S+)", "".join(page.read_text() for page in PAGES))
FAMILIES: Final = re.findall(r"automodule:: (\S+)", "".join(page.read_text() for page in PAGES))
"""Modules whose docstrings stand above those of their functions, and say what these share."""

PARTS: Final = {
    "errors": r"[Rr]aises?\b|[Ee]rrors",
    "source": r"Source: ",
    "example": r">>> |Example: in ",
    "shape": r"[Ss]hape|\[|scalar",  # these three of functions in a body
    "types": r"[Tt]ypes?\b",
    "bytes": r"[Ss]end|[Bb]ytes|ommunicates",
}
BODIES: Final = ("ops", "lax", "nn", "kernels", "random")
NEW: Final = "check_program explain find_divergence assert_bytes positions parallel_summary"
"""Those that have no counterpart elsewhere."""
PLAIN: Final = "axis_size axis_group last_plan gpipe_schedule one_forward_one_backward_schedule"
"""Those of a body that make no tensors."""
WITHOUT: Final = {
    "source": [*NEW.split(), "last_plan", "read_hardware"],
    "errors": [*PLAIN.split(), "assume_constant", "current_mesh", "full", "redistributions"],
    "example": ["this_machine"],  # it would measure for seconds
    **dict.fromkeys(("shape", "types", "bytes"), PLAIN.split()),
}


def said(function: Any) -> str:
    """Returns what a docstring says, with those of the functions and families that it refers to."""
    module, text = sys.modules[inspect.unwrap(function).__module__], inspect.getdoc(function) or ""
    names = {*re.findall(r"\b(?:as|as of|see) `(?:\w+\.)*(\w+)`", text)} - {function.__name__}
    others = [getattr(module, name, None) for name in names]
    families = [importlib.import_module(each) for each in FAMILIES]
    above = [each.__doc__ for each in families if module.__name__.startswith(each.__name__)]
    return "\n".join([text, *filter(None, above), *(said(each) for each in others if each)])


def public(name: str) -> tuple[Any, str]:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own), own


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_says_all_that_it_should(name: str) -> None:
    """Shapes, types and bytes (of functions in bodies), arguments, errors, source, an example."""
    function, own = public(name)
    is_of_bodies = inspect.unwrap(function).__module__.split(".")[1] in BODIES
    parts = [part for part in list(PARTS)[: 6 if is_of_bodies else 3] if own not in WITHOUT[part]]
    text = said(function)
    arguments = {*inspect.signature(function).parameters} - {"args", "kwargs"}
    missing = [part for part in parts if not re.search(PARTS[part], text)]
    missing += [each for each in arguments if not re.search(rf"\b{each}: |`[^`]*\b{each}\b", text)]
    assert missing == []


@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_needs_torch_and_what_it_is_of_alone(name: str) -> None:
    """So that it can be pasted: no other name of its module is there."""
    function, own = public(name)
    names = {"torch": torch, own: function}
    for example in doctest.DocTestFinder(recurse=False).find(function, own, globs=names):
        failures, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
        assert not failures
