"""Every name that docs/porting.md tells people to write exists; every style of torch is there."""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.tensor.parallel as torch_parallel

import shardmap_torch

PAGE = (Path(__file__).parent.parent / "docs" / "porting.md").read_text()
ROWS = [
    (line, [cell.strip() for cell in line.strip("|").split(" | ")])
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("|---")
]
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[A-Za-z_][\w.]*")
NOT_OURS = {"report"}  # a method, told after the function that has it


def names_in(cell: str) -> set[str]:
    """The dotted names that code in the cell begins with, and the types that it passes."""
    found = set()
    for code in CODE.findall(cell):
        first = NAME.match(code)
        assert first is not None, code
        found.add(first[0])
        found.update(re.findall(r"(?:src|dst)=(\w+)", code))
    return found - NOT_OURS


NAMES = sorted({name for _, cells in ROWS if cells[-1] != "here" for name in names_in(cells[-1])})


def resolve(name: str) -> Any:
    value: Any = shardmap_torch
    for part in name.split("."):
        if isinstance(value, ModuleType) and not hasattr(value, part):
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", NAMES)
def test_a_name_to_write_exists_and_is_public(name: str) -> None:
    assert resolve(name) is not None
    module, _, last = name.rpartition(".")
    exported = resolve(module).__all__ if module else shardmap_torch.__all__
    assert last in exported


def test_the_page_has_names_of_every_module() -> None:
    assert len(NAMES) > 60
    assert {name.split(".")[0] for name in NAMES} >= {"nn", "optim", "lax", "random", "saving"}


@pytest.mark.parametrize("name", torch_parallel.__all__)
def test_every_entry_of_torchs_parallel_has_a_row(name: str) -> None:
    assert any(name in "".join(CODE.findall(cells[0])) for _, cells in ROWS)


def test_a_wrong_name_would_be_seen() -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("nn.column_linaer")
