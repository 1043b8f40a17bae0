"""Tests that answers which the checker remembers are those that it would find anew."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.checker import check_step
from shardmap_torch import I, P, R, all_reduce, check_program, convert, make_mesh, shard_map
from shardmap_torch.checker.interpreter import operations
from shardmap_torch.checker.ir import fake_results
from shardmap_torch.checker.spmd.operations import Repeated
from tests.checker.support import position_programs, softmax_programs, vocabulary_programs
from tests.checker.support.remade import ForgottenError, remaking
from tests.support.fuzzing import FUZZ

MESH = make_mesh((2, 2), ("dp", "tp"), kind="abstract")


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = convert(x, "tp", src=I, dst=R)
    made: Tensor = x + all_reduce((h @ up).relu() @ down, "tp", dst=I)
    return made


def body(x: Tensor, up: Tensor, down: Tensor, ab: Tensor, ba: Tensor) -> Tensor:
    ab.relu()  # the other operand has the same shapes and types
    ba.relu()
    for _ in range(3):
        x = layer(x, up, down)
    x = x + convert(x, "tp", src=I, dst=R).relu().detach()  # of other types than those in a layer
    parts = torch._foreach_mul([x.detach(), x.detach(), down.detach()], 2.0)
    return layer(x + parts[0], up, down)


def check(strictness: Any = "global") -> None:
    f = shard_map(
        lambda *args: body(*args),  # has no verdicts
        mesh=MESH,
        in_specs=(P("dp"), P(None, "tp"), P("tp"), P("dp", "tp"), P("tp", "dp")),
        out_specs=P("dp"),
        check=strictness,
    )
    shapes = (8, 4), (4, 8), (8, 4), (8, 8), (8, 8)
    check_program(f, *(torch.zeros(shape, requires_grad=True) for shape in shapes))


@pytest.mark.parametrize("strictness", ["local", "global"])
def test_answers_on_equal_layers_are_those_made_anew(strictness: str) -> None:
    with remaking() as counts:
        check(strictness)
    known = {"calls", "results", "positions"}
    assert set(counts) == known | ({"comparisons", "layouts"} if strictness == "global" else set())


@pytest.mark.parametrize(
    ("forgetful", "name", "value"),
    [
        (Repeated, "_number", lambda self, shard: 0),
        (operations, "_situation", lambda *args: ()),
        (fake_results, "number_of", lambda *described: -1),
    ],
)
def test_a_key_that_does_not_say_all_is_found(forgetful: Any, name: str, value: Any) -> None:
    with patch.object(forgetful, name, value), remaking(), pytest.raises(ForgottenError):
        check()


RANDOM = (
    position_programs.outcome_of,
    softmax_programs.outcome_of,
    vocabulary_programs.outcome_of,
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("outcome_of", RANDOM)
def test_answers_on_random_programs_are_those_made_anew(outcome_of: Callable[[int], str]) -> None:
    with remaking() as counts:
        found = {outcome_of(seed) for seed in range(300 if FUZZ else 4)}
    assert "wrong" not in found
    assert counts["layouts"]


@pytest.mark.fuzz
@pytest.mark.parametrize("strictness", ["local", "global"])
def test_answers_on_a_train_step_are_those_made_anew(strictness: Any) -> None:
    with remaking() as counts:
        check_step((2, 4), 6, strictness)
    assert counts["calls"] > 1000
