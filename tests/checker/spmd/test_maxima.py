"""Gradients through maxima over a sharded dim, under global strictness, against one device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    make_mesh,
    random,
    shard_map,
)
from tests.checker.support.one_device import numbers
from tests.checker.support.softmax_programs import outcome_of, total


def beside_a_choice(x: Tensor) -> Tensor:
    """Takes any of equal entries by a topk, and the maximum over rows that ranks share."""
    x = x / total(x.square().sum()).sqrt()
    x = x * all_reduce((x > 0).all().long(), "a", op="min", dst=R) + x
    return all_reduce((x.topk(1, 1).values * x + 1).amax(0), "a", op="max", dst=I)


def of_zeros(x: Tensor) -> Tensor:
    """Shares a gradient in other parts where a row is zero, and is right for all other numbers."""
    x = x * (x == all_gather(x, "a", dim=1, dst=R).amax(1, keepdim=True))
    before = all_gather(x.sum(1, keepdim=True), "a", dim=1, dst=R)
    before = before * (torch.arange(axis_size("a")) < axis_index("a"))
    x = x.cumsum(1) + before.sum(1, keepdim=True)
    return all_reduce(functional.pad(x[:, 1:], (1, 0)).amax(1), "a", op="max", dst=I)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("body", "spec"), [(beside_a_choice, P("a")), (of_zeros, P(None, "a"))])
def test_equal_entries_of_maxima_are_tried_beside_choices_and_where_all_are_zero(
    body: Callable[[Tensor], Tensor], spec: P
) -> None:
    mesh = make_mesh((2,), ("a",), kind="simulated")
    specs = (spec, P("a"), P(), P())
    mapped = shard_map(
        lambda x, *_: body(x), mesh=mesh, in_specs=specs, out_specs=P(), check="global"
    )
    others = numbers(8, 3).requires_grad_(), torch.zeros(5, dtype=torch.int64), random.key(0)
    with pytest.raises(ShardTypeError, match=r"the maximum or minimum over|puts dim 1 together"):
        check_program(mapped, numbers(4, 6).requires_grad_(), *others)


@pytest.mark.parametrize("seed", [166, 237])
def test_equal_entries_stand_for_all_in_several_trials_and_numbers_of_parts(seed: int) -> None:
    """In one trial all are hidden; two axes of ranks are tried, of which one divides the dim."""
    assert outcome_of(seed) == "refused"
