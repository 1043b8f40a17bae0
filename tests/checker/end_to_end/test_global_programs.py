"""Random programs under check="global": what is accepted gives on ranks what one device gives."""

import itertools
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import pytest
import torch

from shardmap_torch import I, P, R
from shardmap_torch.checker.spmd.layout import Dim, UnrelatedError, axes_of, merged
from shardmap_torch.checker.spmd.ops import aten_rules, collective_rules
from shardmap_torch.checker.spmd.ops.collective_rules import Move
from tests.checker.support.global_programs import (
    FOREIGN,
    Program,
    Step,
    drawn_inputs,
    grown,
    mutants,
)
from tests.checker.support.global_score import fate_of, same
from tests.checker.support.kept import kept
from tests.checker.support.score import MISSED
from tests.support.fuzzing import sized

pytestmark = pytest.mark.usefixtures("quiet")


@cache
def drawn(seed: int) -> tuple[Program, int]:
    """An accepted program, and how many steps were refused on the way."""
    return grown(seed, drawn_inputs(seed))


def is_right(program: Program, seed: int) -> bool:
    inputs = drawn_inputs(seed)
    exits = program.exits(inputs)
    assert exits is not None
    return same(program.on_ranks(inputs, exits), program.on_one_device(inputs, exits))


@pytest.mark.parametrize("seed", range(2))
def test_accepted_programs_are_those_of_one_device(seed: int) -> None:
    program, refused = drawn(seed)
    assert len(program.steps) >= 4
    assert refused > 0
    assert is_right(program, seed)


def test_a_mutant_of_an_accepted_program_is_that_of_one_device_or_refused() -> None:
    tried = 0
    for seed in sized(range(2), range(100, 120)):
        inputs = drawn_inputs(seed)
        program, _ = drawn(seed)
        assert is_right(program, seed)
        rng = random.Random(seed)
        found = list(mutants(program, rng))  # as many as it has collectives
        for what, mutant in rng.sample(found, min(6, len(found))):
            assert fate_of(mutant, inputs) != MISSED, (what, mutant)
            tried += 1
    assert tried >= 10


def test_a_value_that_is_sharded_behind_its_leading_digit_leaves_as_several_dims() -> None:
    steps = (Step("column", (0,)), Step("tanh", (2,)), Step("all_gather", (0,), ("a", 1, R)))
    program = Program((2, 3), (P(None, "a"), P()), steps)
    exits = program.exits(drawn_inputs(0))
    assert exits is not None
    assert exits[3] is not None
    assert exits[3].digits == (((None, 12), ("a", 2), (None, 6)), ())
    assert exits[3].spec() == P(None, "a", None)
    assert is_right(program, 0)


@pytest.mark.parametrize("name", ["max", *FOREIGN])
def test_a_collective_that_means_nothing_on_one_device_is_refused(name: str) -> None:
    for spec, dst in itertools.product((P("a"), P()), (I, R)):
        steps = (Step("matmul", (0, 1)), Step(name, (2,), ("a", 0, dst)))
        assert Program((2, 3), (spec, P()), steps[:1]).exits(drawn_inputs(0)) is not None
        assert Program((2, 3), (spec, P()), steps).exits(drawn_inputs(0)) is None


def _same_dims(move: Move) -> tuple[Dim, ...]:
    return move.x.dims


def _lenient_sum(move: Move) -> frozenset[str]:
    return move.partial - set(move.axes)


def _still_pending(move: Move) -> frozenset[str]:
    return move.partial


def _in_any_order(move: Move) -> tuple[Dim, ...]:
    """Puts a dim together whatever the order in which the axes shard it."""
    dim = move.collective.dim
    joined = tuple((None if axis in move.axes else axis, n) for axis, n in move.x.dims[dim])
    if not set(move.axes) <= set(axes_of(move.x.dims[dim])):
        raise UnrelatedError("it is not sharded")
    return (*move.x.dims[:dim], tuple(merged(joined)), *move.x.dims[dim + 1 :])


_UNTOUCHED: Final = (_same_dims, _still_pending)


def _moves(**wrong: tuple[Callable[[Move], Any], Callable[[Move], Any]]) -> tuple[Any, str, Any]:
    return collective_rules, "_MOVES", {**collective_rules._MOVES, **wrong}


aten = torch.ops.aten
WRONG: Final[Mapping[str, tuple[Any, str, Any]]] = {
    "a sum of what is no sum": _moves(sum=(_same_dims, _lenient_sum)),
    "shards of other ranks": _moves(permute=_UNTOUCHED, broadcast=_UNTOUCHED),
    "parts put together in another order": _moves(gather=(_in_any_order, _still_pending)),
    "a maximum of shards": _moves(max=(_same_dims, _lenient_sum)),
    "softmax of a shard": (aten_rules, "RULES", {**aten_rules.RULES, aten._softmax.default: kept}),
}


QUICKLY_SEEN: Final = ("a sum of what is no sum", "shards of other ranks", "softmax of a shard")


@pytest.mark.parametrize("name", sized(QUICKLY_SEEN, tuple(WRONG)))
def test_random_programs_see_a_wrong_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[name])
    programs = ((grown(seed, drawn_inputs(seed))[0], seed) for seed in range(60))
    assert any(not is_right(*each) for each in programs)
