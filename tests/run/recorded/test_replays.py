"""Programs that the project already has, replayed: bit for bit what plain calls compute."""

from math import prod
from random import Random
from typing import Final

import pytest

from shardmap_torch import P, ShardTypeError, TransformError, make_mesh
from tests.autodiff.support.random_bodies import AXES, SIZES, SPECS, Body, operand
from tests.programs.support.bodies import PROGRAMS as BODIES
from tests.run.recorded.support.everyday import (
    PROGRAMS,
    try_bodies_on_processes,
    try_body,
    try_daily,
    try_daily_on_processes,
)
from tests.run.recorded.support.replays import compare
from tests.support.fuzzing import sampled, sized
from tests.support.pool import Gloo

SHAPES: Final = [(1, 1), (2, 1), (1, 2), (2, 2)]
FEW: Final = ("mixtral_loop", "lstm_module", "experts_capacity", "fsdp_flat")
NAMES: Final = sized(FEW, tuple(PROGRAMS))


@pytest.mark.parametrize("shape", sampled(SHAPES, (1, 1), (2, 2)))
def test_daily_programs_on_simulated_ranks(shape: tuple[int, int]) -> None:
    try_daily(make_mesh(shape, ("dp", "tp"), kind="simulated"), NAMES)


@pytest.mark.parametrize("shape", sampled(SHAPES[1:], (1, 2)))
def test_daily_programs_on_processes(shape: tuple[int, int], gloo: Gloo) -> None:
    for name in NAMES:
        gloo(prod(shape)).run(try_daily_on_processes, shape, [name])


@pytest.mark.parametrize("name", BODIES)
def test_programs_of_collectives_on_simulated_ranks(name: str) -> None:
    program = BODIES[name]
    shape = max(program.meshes.values())
    try_body(name, make_mesh(shape, program.axis_names, kind="simulated"))


@pytest.mark.parametrize("size", sampled([2, 4], 2))
def test_programs_of_collectives_on_processes(size: int, gloo: Gloo) -> None:
    gloo(size).run(try_bodies_on_processes, size)


@pytest.mark.parametrize("seed", sampled(range(300), 0, 5, 9))
def test_random_bodies_on_simulated_ranks(seed: int) -> None:
    specs = tuple(Random(seed).choices(SPECS, k=3))
    mesh = make_mesh(tuple(SIZES.values()), AXES, kind="simulated")
    operands = tuple(operand(spec, at) for at, spec in enumerate(specs))
    refusal = "replay=True"
    try:
        by = {"in_specs": specs, "out_specs": P(AXES)}
        compare(lambda *xs: Body(seed)(*xs), mesh, operands, (0, 2), **by)
    except ShardTypeError:
        return
    except TransformError as error:
        refusal = str(error)
    assert "replay=True" in refusal
