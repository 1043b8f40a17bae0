"""Every example in a docstring of the package runs and shows what it says."""

import doctest
import importlib
import pkgutil

import pytest

import shardmap_torch

# Not pytest's --doctest-modules: it would import ops/ and kernels/ under the wrong names.
MODULES = [
    module.name for module in pkgutil.walk_packages(shardmap_torch.__path__, "shardmap_torch.")
]


@pytest.mark.parametrize("name", ["shardmap_torch", *MODULES])
def test_docstring_examples_show_what_they_print(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not failures, capsys.readouterr().out
