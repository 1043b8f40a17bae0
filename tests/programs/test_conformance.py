"""Every collective gives the same numbers on every mesh; docs/conformance.md says how far."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch

from shardmap_torch import make_mesh
from shardmap_torch.backends import communicator
from shardmap_torch.ops import reduce
from tests.programs.support.conformance import DTYPES, MEMORY, MODES, differences, refusals
from tests.programs.support.harness import worker_mesh
from tests.support.conformance_page import PAGE, page
from tests.support.fuzzing import FUZZ, sized
from tests.support.pool import Gloo

LAYOUTS = sized(("dense", "column"), tuple(MEMORY))
DERIVED = (torch.float32, torch.bfloat16, torch.complex64)
"""Dtypes whose derivatives `make test` tries; all have one code."""

MESHES = [
    pytest.param("vmap", 2, marks=pytest.mark.fuzz),
    ("vmap", 4),
    pytest.param("ranks", 2, marks=pytest.mark.fuzz),
    ("ranks", 4),
    pytest.param("gloo", 2, marks=pytest.mark.slow),
    pytest.param("gloo", 4, marks=pytest.mark.slow),
]


def test_the_page_says_what_is_tried() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.support.conformance_page"


def modes_of(dtype: torch.dtype) -> tuple[str, ...]:
    return MODES if FUZZ or dtype in DERIVED else MODES[:1]


def on_processes(size: int, dtype: torch.dtype) -> list[str]:
    return differences(worker_mesh((size,), ("tp",)), "gloo", dtype, LAYOUTS, modes_of(dtype))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's, for jvp
@pytest.mark.sample(18)
@pytest.mark.parametrize(("kind", "size"), MESHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_the_numbers_are_those_of_the_table(
    dtype: torch.dtype, kind: Any, size: int, gloo: Gloo
) -> None:
    if kind == "gloo":
        found = [*chain(*gloo(size).run(on_processes, size, dtype, timeout=90))]
    else:
        mesh = make_mesh((size,), ("tp",), kind="simulated", simulate=kind)
        found = differences(mesh, kind, dtype, LAYOUTS, modes_of(dtype))
    assert found == []


def refused_by_processes(check: bool) -> tuple[list[str], list[str]]:
    mesh = worker_mesh((2,), ("tp",))
    told = refusals(mesh, check)
    return told, differences(mesh, "gloo", torch.float32, ("dense",), ("forward",))


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_what_cannot_be_is_refused_alike_and_breaks_no_mesh(check: bool, gloo: Gloo) -> None:
    simulated = [
        refusals(make_mesh((2,), ("tp",), kind="simulated", simulate=kind), check)
        for kind in ("vmap", "ranks")
    ]
    assert simulated[0] == simulated[1]
    assert not [told for told in simulated[0] if told.endswith("accepted")]
    assert gloo(2).run(refused_by_processes, check) == [(simulated[0], [])] * 2


# ---------------------------------------------------------------- what the test would notice

FLOATS = communicator._WIDE | communicator._HALVES
MUTANTS: Mapping[str, tuple[Any, torch.dtype, Sequence[str]]] = {
    "the group's sum, which rounds at each hop": (
        lambda: mock.patch.dict(communicator.GlooWire.reduces, sum=FLOATS),
        torch.bfloat16,
        [
            "all_reduce('tp', Partial -> I) of [2, 3]",
            "all_reduce('tp', Partial -> R) of [2, 3]",
            "all_reduce(op='mean') of [2, 3]",
            "all_reduce(op='sum') of [2, 3]",
            "reduce('tp', Partial -> V) of [2, 3], source=3",
        ],
    ),
    "the group's maximum, which loses a NaN": (
        lambda: mock.patch.dict(communicator.GlooWire.reduces, max=FLOATS),
        torch.float32,
        ["all_reduce(op='max') of [2, 3]"],
    ),
    "a mean that is not divided": (
        lambda: mock.patch.object(reduce, "_mean_over", return_value=None),
        torch.float32,
        ["all_reduce(op='mean') of [2, 3]", "reduce_scatter(op='mean') of [8, 3]"],
    ),
}
"""Faults that a backend could have, for which dtype, and the cells that find them."""


def mutated(name: str) -> list[str]:
    mesh = make_mesh((4,), ("tp",))  # whose collectives were never read
    wrong, dtype, _ = MUTANTS[name]
    with wrong():
        return differences(mesh, "gloo", dtype, ("dense",), ("forward",))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_backend_that_does_otherwise_is_named_by_its_cells(name: str, gloo: Gloo) -> None:
    found = {line.split(", dense")[0] for line in chain(*gloo(4).run(mutated, name))}
    dtype = str(MUTANTS[name][1]).removeprefix("torch.")
    assert sorted(found) == [f"{dtype}, {cell}" for cell in MUTANTS[name][2]]
