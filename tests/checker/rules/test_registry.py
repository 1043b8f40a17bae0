"""Rules for custom operators."""

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    Row,
    ShardTypeError,
    V,
    all_reduce,
    make_mesh,
    register_rule,
    reinterpret,
    shard_map,
)
from shardmap_torch.checker.rules.registry import row_of
from tests.support.golden import hold_own, told

aten = torch.ops.aten
MESH = make_mesh((2,), ("i",), kind="simulated", simulate="ranks")


@torch.library.custom_op("shardmap_test::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return 2 * x


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def body(x: Tensor) -> Tensor:
    y: Tensor = double(reinterpret(x, "i", src=V, dst=Partial))
    return all_reduce(y, "i", dst=I)


def test_a_custom_operator_is_refused_until_it_has_a_rule() -> None:
    op = torch.ops.shardmap_test.double.default
    f = shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P())
    with pytest.raises(ShardTypeError) as caught:
        f(torch.ones(2))
    hold_own(str(caught.value))
    with told(ShardTypeError, 2) as caught:
        register_rule(op, Row(linear=(("y",),)))
    register_rule(op, Row(linear=(("x",),)))
    torch.testing.assert_close(f(torch.ones(2)), torch.tensor([4.0]))
    with pytest.raises(ShardTypeError) as caught:
        register_rule(op, Row())
    assert str(caught.value) == ("register_rule: shardmap_test.double.default has a rule already.")


ON_LISTS = {
    aten._foreach_add.ScalarList: Row(linear=(("self",), ("scalars",)), zipped=True),
    aten._foreach_mul_.Scalar: Row(linear=(("self", "scalar"),), zipped=True),
    aten._foreach_lerp.List: Row(linear=(("self",), ("tensors1",)), zipped=True),
    aten._foreach_copy_.default: Row(linear=(("src",),), unread=("self",), zipped=True),
    aten._foreach_zero_.default: Row(zero=True, unread=("self",), zipped=True),
    aten._foreach_sqrt.default: Row(zipped=True),
}


def test_operators_on_lists_have_the_rows_of_those_on_their_items() -> None:
    assert {op: row_of(op) for op in ON_LISTS} == ON_LISTS
