"""The table against an independent per-rank meaning, row by row, on every kind of mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Literal
from unittest import mock

import pytest

from shardmap_torch import CollectiveError, Mesh, make_mesh
from shardmap_torch.collectives import operations
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.table import ROWS, TABLE, CollectiveRow, Key, lookup
from shardmap_torch.core.caching import Unguarded
from shardmap_torch.types import I, Partial, R, V
from tests.programs.support.harness import worker_mesh
from tests.programs.support.rows import (
    ADDENDS,
    BROKEN,
    COTANGENT,
    MEANINGS,
    breakable,
    cases_of,
    check_forward,
    check_transpose,
)
from tests.support.golden import told
from tests.support.pool import Gloo

EACH_ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.src}-{row.dst}")
MESHES = [
    ((1,), ("a",), ("a",)),
    ((3,), ("a",), ("a",)),
    ((2, 3), ("a", "b"), ("b",)),
    ((2, 3), ("a", "b"), ("b", "a")),  # not the order of the mesh
    ((2, 1, 2), ("a", "b", "c"), ("c", "a")),
    ((2, 1, 2), ("a", "b", "c"), ("b", "c", "a")),  # a cycle, which is not its own inverse
    ((2, 1, 2), ("a", "b", "c"), ("c", "a", "b")),
]


Names = tuple[str, ...]


def check(row: CollectiveRow, mesh: Mesh, axes: tuple[str, ...]) -> None:
    for case in cases_of(row, axes, mesh.num_ranks(axes)):
        check_forward(case, mesh)
        check_transpose(case, mesh)


def check_all_in_worker(
    shape: tuple[int, ...], names: tuple[str, ...], axes: tuple[str, ...]
) -> None:
    for row in ROWS:
        check(row, worker_mesh(shape, names), axes)


def test_every_row_has_a_meaning_and_a_wrong_transpose_here() -> None:
    assert set(MEANINGS) == set(TABLE)
    assert set(BROKEN) == set(TABLE)


@pytest.mark.sample(10)
@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
@EACH_ROW
def test_row_and_its_transpose_on_a_simulated_mesh(
    row: CollectiveRow, strategy: Literal["vmap", "ranks"]
) -> None:
    for shape, names, axes in MESHES:
        check(row, make_mesh(shape, names, kind="simulated", simulate=strategy), axes)


@pytest.mark.parametrize(
    ("shape", "names", "axes"),
    [
        ((3,), ("a",), ("a",)),
        ((2, 2), ("a", "b"), ("b", "a")),
        pytest.param((2,), ("a",), ("a",), marks=pytest.mark.fuzz),
        pytest.param((4,), ("a",), ("a",), marks=pytest.mark.fuzz),
        pytest.param((2, 2), ("a", "b"), ("b",), marks=pytest.mark.fuzz),
    ],
)
def test_rows_and_their_transposes_on_processes(
    shape: tuple[int, ...], names: Names, axes: Names, gloo: Gloo
) -> None:
    gloo(prod(shape)).run(check_all_in_worker, shape, names, axes)


# ----------------------------------------------------------------- the tests are themselves tested


@contextmanager
def broken(key: Key) -> Iterator[None]:
    """Replaces the transpose of one row by that of `BROKEN`."""
    wrong = replace(TABLE[key], transpose=BROKEN[key])
    rows = Unguarded(MappingProxyType({**TABLE, key: wrong}))
    with mock.patch.object(operations, "_ROWS", rows):
        yield


def is_caught(row: CollectiveRow, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Returns whether `check_transpose` sees that the transpose of `row` is wrong."""
    case = breakable(row, axes, mesh.num_ranks(axes))
    check_transpose(case, mesh)
    with broken(row.key):
        try:
            check_transpose(replace(case, collective=replace(case.collective)), mesh)
        except AssertionError:
            return True
    return False


def uncaught_in_worker() -> list[str]:
    mesh = worker_mesh((2,), ("a",))
    return [str(row.key) for row in ROWS if not is_caught(row, mesh, ("a",))]


@EACH_ROW
def test_a_wrong_transpose_gives_a_wrong_gradient_on_ranks(row: CollectiveRow) -> None:
    assert is_caught(row, make_mesh((3,), ("a",), kind="simulated", simulate="ranks"), ("a",))


def test_a_wrong_transpose_gives_a_wrong_gradient_on_processes(gloo: Gloo) -> None:
    assert gloo(2).run(uncaught_in_worker) == [[], []]


# ------------------------------------------------------------------------------- the rest of it


@EACH_ROW
def test_the_transpose_of_the_transpose_is_a_row_with_the_same_types(row: CollectiveRow) -> None:
    back = TABLE[row.transpose]
    src = V if row.key == ADDENDS else row.src
    assert (COTANGENT[back.src], COTANGENT[back.dst]) == (row.dst, src)


def test_a_collective_prints_its_axes_and_types() -> None:
    one = Collective("all_reduce", Partial, R, ("tp",))
    two = Collective("all_gather", V, I, ("dp", "tp"))
    assert str(one) == "all_reduce('tp', Partial -> R)"
    assert str(two) == "all_gather(('dp', 'tp'), V -> I)"


def test_lookup_lists_the_ways_that_there_are() -> None:
    with told(CollectiveError):
        lookup("reinterpret", I, V)
