"""Full collections wait for the end of a check, and come back however it ends."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, ShardTypeError, check_program, make_mesh, shard_map
from shardmap_torch.run.safety.full_collections import postponing_full_collections
from tests.support.fuzzing import sampled


def check(body: Callable[[Tensor], Tensor], strictness: Any = True) -> None:
    mesh = make_mesh((2,), ("dp",), kind="abstract")
    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=strictness)
    check_program(f, torch.ones(4, requires_grad=True))


def is_postponed() -> bool:
    first, _, third = gc.get_threshold()
    return first > 10_000 and third > 1_000_000


@pytest.mark.parametrize("error", [None, ValueError, ShardTypeError])
def test_a_check_postpones_full_collections_until_it_ends(error: type[Exception] | None) -> None:
    before = gc.get_threshold()

    def body(x: Tensor) -> Tensor:
        assert is_postponed()
        assert gc.isenabled()
        if error is not None:
            raise error("as it should")
        return x * 2

    if error is None:
        check(body)
    else:
        with pytest.raises(error, match="as it should"):
            check(body)
    assert gc.get_threshold() == before


def test_the_first_of_several_checks_to_end_leaves_them_postponed() -> None:
    before = gc.get_threshold()
    first, second = postponing_full_collections(), postponing_full_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_postponed()
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_a_threshold_that_a_body_sets_stays() -> None:
    before = gc.get_threshold()
    try:
        with postponing_full_collections():
            gc.set_threshold(*before[:2], 77)
        assert gc.get_threshold() == (*before[:2], 77)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("first", [0, 1 << 20])
def test_a_threshold_that_is_higher_stays(first: int) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(first, *before[1:])
        with postponing_full_collections():
            assert gc.get_threshold()[0] == first
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("strictness", sampled(["local", "global"], "global"))
def test_a_check_leaves_no_equation_to_the_collector(strictness: str) -> None:
    def garbage_of(num_layers: int) -> int:
        def body(x: Tensor) -> Tensor:
            for _ in range(num_layers):
                x = torch.relu(x) * 2
            return x

        gc.collect()
        check(body, strictness)
        return gc.collect()

    garbage_of(1)  # torch's own, of a first check
    assert garbage_of(40) < garbage_of(2) + 38
