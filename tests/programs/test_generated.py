"""Any value that enters by any spec leaves by any other, with its derivatives."""

from math import prod
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.programs.support.generated import programs
from tests.programs.support.harness import Program, assert_same, in_worker, one_device, simulated
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

# torch's own forward mode scripts some decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


@pytest.mark.parametrize("kind", ["vmap", "ranks"])
@settings(max_examples=sized(20, 300))
@given(program=programs())
def test_a_generated_program_equals_one_device(program: Program, kind: Any) -> None:
    (num_ranks,) = program.meshes
    assert_same(simulated(program, num_ranks, kind), one_device(program))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(2))
def test_generated_programs_on_two_processes_equal_one_device(program: Program, gloo: Gloo) -> None:
    check_processes(program, gloo)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(4))
def test_generated_programs_on_four_processes_equal_one(program: Program, gloo: Gloo) -> None:
    check_processes(program, gloo)


def check_processes(program: Program, gloo: Gloo) -> None:
    ((num_ranks, shape),) = program.meshes.items()
    assert prod(shape) == num_ranks
    for outcome in gloo(num_ranks).run(in_worker, program, num_ranks):
        assert_same(outcome, one_device(program))
