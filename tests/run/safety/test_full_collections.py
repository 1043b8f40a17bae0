"""Full collections wait for the end of a check, and come back however it ends."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, ShardTypeError, check_program, make_mesh, shard_map
from shardmap_torch.run.safety.full_collections import postponing_full_collections


def check(body: Callable[[Tensor], Tensor]) -> None:
    mesh = make_mesh((2,), ("dp",), kind="abstract")
    check_program(shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")), torch.ones(4))


def is_postponed() -> bool:
    return gc.get_threshold()[2] > 1_000_000


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
