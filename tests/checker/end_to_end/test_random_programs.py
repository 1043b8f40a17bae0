"""Random programs that the checker accepts keep what their types promise, and their mutants too.

`make fuzz` takes many more, each time others; here they are the same each time.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardmap_torch import I, Partial, R
from shardmap_torch.checker.interpreter import collectives
from shardmap_torch.checker.rules import infer, lattice
from shardmap_torch.checker.rules.lattice import Refusal, join
from shardmap_torch.checker.verify import outputs
from shardmap_torch.types import AxisType, K, V, Z
from tests.checker.support.machines import Notes
from tests.checker.support.programs import (
    SHAPES,
    Outcome,
    Program,
    broken,
    differentiated,
    grown,
    is_tame,
    judged,
    programs,
    same,
)
from tests.checker.support.score import EQUAL, MISSED, REFUSED, fate_of, meant, wrongs_of
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.fuzzing import FUZZ, sampled, sized
from tests.support.pool import Gloo

X = TypeVar("X")
SEEDS: Final = st.integers(0, 2**32)


def examples(count: int, many: int) -> Callable[[X], X]:
    """Takes `count` examples, the same each time; `many` others in `make fuzz`."""
    chosen: Callable[[X], X] = settings(
        max_examples=sized(count, many),
        derandomize=not FUZZ,
        suppress_health_check=list(HealthCheck),
    )
    return chosen


@examples(6, 1_300)
@given(drawn=programs(10))
def test_an_accepted_program_is_right(drawn: tuple[Program, Any]) -> None:
    assert wrongs_of(*drawn) == []


@examples(3, 500)
@given(drawn=programs(), seed=SEEDS)
def test_a_step_against_the_rules_is_refused(drawn: tuple[Program, Any], seed: int) -> None:
    program, shape = drawn
    notes, _ = judged(program, shape)
    assert notes is not None
    rng = random.Random(seed)
    for _ in range(3):
        wrong = broken(rng, program, notes)
        assume(wrong is not None)
        assert wrong is not None
        assert judged(wrong, shape)[0] is None, wrong


@examples(2, 500)
@given(drawn=programs(6), seed=SEEDS)
def test_no_mutant_of_an_accepted_program_computes_wrong_gradients(
    drawn: tuple[Program, Any], seed: int
) -> None:
    program, shape = drawn
    mutants = list(program.mutants())
    for what, mutant in random.Random(seed).sample(mutants, min(len(mutants), 4)):
        fate = fate_of(program, mutant, shape)
        assert fate != MISSED, mutant
        # Only the type differs, so that a survivor has to be the same program.
        assert what not in ("wrong dst", "wrong src") or fate in (REFUSED, EQUAL), mutant


# ------------------------------------------------------------------------------- on processes


def on_processes(shape: Sequence[int], program: Program) -> Outcome:
    """For `Pool.run`: one process' part of a program."""
    mesh = worker_mesh(tuple(shape), program.axes)
    xs, closures = program.inputs(mesh), program.closures()
    ys = program.mapped(mesh, Notes(), closures)(*xs)
    leaves = [*(x for x in xs if x.requires_grad), *closures]
    gradients = differentiated([whole_with_gradient(y) for y in ys], leaves)
    return Outcome([global_value(y) for y in ys], [global_value(g) for g in gradients])


def whole_with_gradient(y: Any) -> torch.Tensor:
    """A global value, with the gradient that DTensor gives it."""
    return y.full_tensor() if hasattr(y, "full_tensor") else y  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", sampled([(2,), (3,), (2, 2)], (2, 2)))
@examples(2, 120)
@given(seed=SEEDS)
def test_an_accepted_program_is_right_on_processes(
    shape: tuple[int, ...], gloo: Gloo, seed: int
) -> None:
    program = grown(random.Random(seed), shape, 8).program
    promised = meant(program, shape)
    assert promised is not None
    assume(is_tame(promised))
    num_ranks = torch.Size(shape).numel()
    for outcome in gloo(num_ranks).run(on_processes, shape, program):
        assert same(outcome, promised), program


# -------------------------------------------------------------------- what the fuzzing can see


def test_the_generator_draws_every_collective_and_gradients_of_each_kind() -> None:
    """Refusing is no way out: most of the steps drawn find a type."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        growth = grown(random.Random(seed), SHAPES[seed % len(SHAPES)], 6)
        assert len(growth.program.steps) >= 2
        for step in growth.program.steps:
            seen[type(step).__name__] += 1
    assert {"Local", "Communicate", "Gradient"} <= set(seen)
    assert sum(seen.values()) >= 30


def _lenient_add(addends: Sequence[AxisType]) -> AxisType | Refusal:
    """An equal addend beside a P is counted once for every rank."""
    return Partial if Partial in addends else join([k for k in addends if k != Z])


def _lenient_join(types: Sequence[AxisType]) -> AxisType | Refusal:
    """An I meets a V, and its gradient is never summed."""
    seen = set(types)
    return V if I in seen and V in seen and Partial not in seen else join(types)


def _lenient_curve(types: Sequence[AxisType]) -> AxisType | Refusal:
    """Any operation acts on the addends of a sum."""
    return Partial if Partial in types else join(types)


def _lenient_product(factors: Sequence[AxisType]) -> AxisType | Refusal:
    """A sum is multiplied by what differs on the ranks."""
    types = [k for k in factors if k != Partial]
    return Partial if len(types) < len(factors) else join(types)


ALL: Final = frozenset({I, R, V, Partial, K, Z})
PLANTED: Final[dict[str, Callable[[], Any]]] = {
    "an equal addend beside P": lambda: patch.object(lattice, "add", _lenient_add),
    "I beside V": lambda: patch.object(infer, "join", _lenient_join),
    "P under any operation": lambda: patch.object(infer, "join", _lenient_curve),
    "P times V": lambda: patch.object(lattice, "multiply", _lenient_product),
    "sums of equal values": lambda: patch.dict(collectives.FORWARD, {Partial: ALL}),
    "R taken for I": lambda: patch.dict(collectives.FORWARD, {I: frozenset({I, R, K, Z})}),
    "I taken for R": lambda: patch.dict(collectives.FORWARD, {R: frozenset({I, R, K, Z})}),
    "any cotangent for a collective": lambda: patch.dict(
        collectives.BACKWARD, dict.fromkeys(collectives.BACKWARD, ALL)
    ),
    "V leaves as one value": lambda: patch.dict(outputs._EXITS, {("V", "I"): ()}),
    "P leaves as one value": lambda: patch.dict(outputs._EXITS, {("P", "I"): ()}),
}


QUICKLY_SEEN: Final = ("sums of equal values", "P under any operation")


@pytest.mark.parametrize("name", PLANTED if FUZZ else QUICKLY_SEEN)
def test_the_fuzzing_sees_a_wrong_rule(name: str) -> None:
    with PLANTED[name]():
        assert any(sees_wrong(seed) for seed in range(40))


def sees_wrong(seed: int) -> bool:
    """Returns whether a program, a step that must be refused, or a mutant shows it."""
    shape, rng = SHAPES[seed % len(SHAPES)], random.Random(seed)
    program = grown(rng, shape, 6).program
    if wrongs_of(program, shape):
        return True
    notes, _ = judged(program, shape)
    assert notes is not None
    for _ in range(8):
        wrong = broken(rng, program, notes)
        if wrong is not None and judged(wrong, shape)[0] is not None:
            return True
    mutants = [mutant for _, mutant in program.mutants()]
    return any(
        fate_of(program, mutant, shape) == MISSED
        for mutant in rng.sample(mutants, min(len(mutants), 4))
    )
