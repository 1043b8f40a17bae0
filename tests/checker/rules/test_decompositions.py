"""Custom operators that are interpreted as what they stand for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    Row,
    ShapeDtype,
    ShardTypeError,
    V,
    all_reduce,
    check_program,
    make_mesh,
    register_decomposition,
    register_rule,
    reinterpret,
    shard_map,
    trace,
)
from tests.support.golden import told

RANKS = make_mesh((2,), ("i",), kind="simulated", simulate="ranks")
MESH = make_mesh((2,), ("i",), kind="abstract")


def turned(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second, second * angle.cos() + first], -1)


def turned_back(grad: Tensor, angle: Tensor) -> Tensor:
    first, second = grad.chunk(2, -1)
    return torch.cat([first * angle.cos() + second, second * angle.cos() - first], -1)


@torch.library.custom_op("shardmap_test::turn", mutates_args=())
def turn(x: Tensor, angle: Tensor) -> Tensor:
    return turned(x, angle)


@torch.library.custom_op("shardmap_test::turn_back", mutates_args=())
def turn_back(grad: Tensor, angle: Tensor) -> Tensor:
    return turned_back(grad, angle)


@turn.register_fake
def _(x: Tensor, angle: Tensor) -> Tensor:
    return torch.empty_like(x)


@turn_back.register_fake
def _(grad: Tensor, angle: Tensor) -> Tensor:
    return torch.empty_like(grad)


turn.register_autograd(
    lambda ctx, grad: (turn_back(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
register_decomposition(torch.ops.shardmap_test.turn.default, turned)
register_decomposition(torch.ops.shardmap_test.turn_back.default, turned_back)


def fresh(name: str, f: Any) -> Any:
    """A new operator of one tensor, and its overload."""
    made = torch.library.custom_op(f"shardmap_test::{name}", f, mutates_args=())
    made.register_fake(torch.empty_like)
    return made, getattr(torch.ops.shardmap_test, name).default


def test_a_sum_still_to_be_taken_goes_through_as_it_does_in_the_decomposition() -> None:
    def body(x: Tensor, angle: Tensor) -> Tensor:
        y: Tensor = turn(reinterpret(x, "i", src=V, dst=Partial), angle)
        return all_reduce(y, "i", dst=I)

    f = shard_map(body, mesh=RANKS, in_specs=(P("i"), P()), out_specs=P())
    x, angle = torch.randn(8, dtype=torch.float64).requires_grad_(), torch.tensor(0.3).double()
    y = f(x, angle)
    torch.testing.assert_close(y, turned(x[:4] + x[4:], angle))
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(turned(x[:4] + x[4:], angle).square().sum(), x)
    torch.testing.assert_close(grad, expected)


def test_what_the_decomposition_may_not_do_is_refused_at_the_line_that_does_it() -> None:
    def body(x: Tensor, angle: Tensor) -> Tensor:
        x = reinterpret(x, "i", src=V, dst=Partial)
        y: Tensor = turn(x, x[:1])  # the cosine of a sum
        return all_reduce(y, "i", dst=R)

    f = shard_map(body, mesh=MESH, in_specs=(P("i"), P()), out_specs=P())
    line = turned.__code__.co_firstlineno + 2
    with pytest.raises(
        ShardTypeError, match=f"cos(?s:.)*test_decompositions.py:{line}: return torch"
    ):
        check_program(f, ShapeDtype((8,)), ShapeDtype(()))


def test_global_strictness_follows_shards_through_it() -> None:
    def body(x: Tensor, angle: Tensor) -> Tensor:
        y: Tensor = turn(x, angle)
        return y

    def check(spec: P) -> None:
        f = shard_map(body, mesh=MESH, in_specs=(spec, P()), out_specs=spec, check="global")
        check_program(f, ShapeDtype((4, 8), requires_grad=True), ShapeDtype(()))

    check(P("i"))
    with pytest.raises(ShardTypeError, match="check='global'"):  # halves of a sharded dim
        check(P(None, "i"))


def test_a_view_in_the_decomposition_is_no_view_of_the_operand() -> None:
    same, op = fresh("same", _same)
    register_decomposition(op, lambda x: x)

    def body(x: Tensor) -> Tensor:
        x = reinterpret(x, "i", src=V, dst=Partial)
        same(x).zero_()
        return all_reduce(x, "i", dst=I)

    f = shard_map(body, mesh=RANKS, in_specs=P("i"), out_specs=P())
    assert "all_reduce('i', Partial -> I)" in str(trace(f, torch.ones(4)))
    torch.testing.assert_close(f(torch.ones(4)), torch.full((2,), 2.0))


def test_two_results_share_no_memory_where_those_of_the_decomposition_do() -> None:
    torch.library.define("shardmap_test::twice", "(Tensor x) -> (Tensor, Tensor)")
    torch.library.impl("shardmap_test::twice", "cpu", lambda x: (x + 1, x + 1))
    torch.library.register_fake("shardmap_test::twice", lambda x: (x + 1, x + 1))
    op = torch.ops.shardmap_test.twice.default
    register_decomposition(op, lambda x: (x + 1,) * 2)

    def body(x: Tensor) -> Tensor:
        first, second = op(x)
        first.zero_()
        out: Tensor = second
        return out

    f = shard_map(body, mesh=RANKS, in_specs=P("i"), out_specs=P())
    with pytest.raises(ShardTypeError, match="varies"):
        f(torch.ones(4))


def _same(x: Tensor) -> Tensor:
    return x.clone()


def _halved(x: Tensor) -> Tensor:
    return x / 2


def test_another_shape_than_the_operators_is_an_error() -> None:
    halve, op = fresh("halve_wrongly", _halved)
    register_decomposition(op, lambda x: x.sum(-1).double())
    f = shard_map(lambda x: halve(x), mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    with told(ShardTypeError):
        check_program(f, ShapeDtype((2, 3)))


def test_an_operator_has_one_rule() -> None:
    with told(ShardTypeError):
        register_decomposition(torch.ops.shardmap_test.turn.default, turned)
    _, op = fresh("with_a_row", _same)
    register_rule(op, Row())
    with pytest.raises(ShardTypeError, match=r"with_a_row\.default has a rule already"):
        register_decomposition(op, _same)
    with pytest.raises(ShardTypeError, match=r"turn\.default has a rule already"):
        register_rule(torch.ops.shardmap_test.turn.default, Row())


def test_an_operator_that_writes_has_no_decomposition() -> None:
    op = _writing()
    with told(ShardTypeError):
        register_decomposition(op, lambda x: None)


def _writing() -> Any:
    @torch.library.custom_op("shardmap_test::clear", mutates_args=("x",))
    def clear(x: Tensor) -> None:
        x.zero_()

    return torch.ops.shardmap_test.clear.default
