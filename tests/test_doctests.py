"""Every example in a docstring of the package runs and shows what it says."""

import doctest
import importlib.util
import pkgutil
from pathlib import Path

import pytest

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
