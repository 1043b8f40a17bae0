"""The main claim: one program gives the same on every mesh, with all its derivatives."""

from dataclasses import replace
from typing import Literal

import pytest

from shardmap_torch import P, make_mesh
from tests.programs.support.bodies import PROGRAMS
from tests.programs.support.harness import (
    Program,
    assert_same,
    in_worker,
    on_mesh,
    one_device,
    simulated,
)
from tests.support.pool import Gloo

# torch's own forward mode scripts some decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

CASES = [pytest.param(program, id=name) for name, program in PROGRAMS.items()]


@pytest.mark.sample(8)
@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
@pytest.mark.parametrize("program", CASES)
def test_program_on_a_simulated_mesh_equals_one_device(
    program: Program, strategy: Literal["vmap", "ranks"]
) -> None:
    expected = one_device(program)
    for num_ranks in program.meshes:
        assert_same(simulated(program, num_ranks, strategy), expected)


@pytest.mark.sample(8)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("program", CASES)
def test_program_on_processes_equals_one_device(program: Program, size: int, gloo: Gloo) -> None:
    if size not in program.meshes:
        pytest.skip(f"this program has no mesh of {size} ranks")
    expected = one_device(program)
    for outcome in gloo(size).run(in_worker, program, size):
        assert_same(outcome, expected)


@pytest.mark.parametrize("program", CASES)
def test_the_checker_types_the_axes_that_no_spec_mentions(program: Program) -> None:
    """Gradients are the same without `replicate=` and `invariant=` on inputs."""
    num_ranks = max(program.meshes)
    mesh = make_mesh(program.meshes[num_ranks], program.axis_names, kind="simulated")
    untyped = tuple(P(*spec.entries, partial=spec.partial) for spec in program.in_specs)
    outcome = on_mesh(replace(program, in_specs=untyped, check=True), mesh, ("values", "backward"))
    assert_same(outcome, one_device(program))
