"""Gradients on one device are assumed where nothing reads more of them, and else computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardmap_torch as smt
from shardmap_torch import I, P, R, ShardTypeError, all_reduce, check_program, convert, make_mesh
from shardmap_torch.checker.spmd import assumed
from shardmap_torch.checker.verify import path
from shardmap_torch.collectives.autograd import TypedFunction

Body: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MESH = make_mesh((2,), ("tp",), kind="abstract")


def check(body: Body, *, differentiated: bool = False) -> None:
    """Checks a body of x, which is equal on all ranks, and of w, whose columns are sharded."""
    f = smt.shard_map(
        lambda x, w: body(x, w),  # has no verdicts
        mesh=MESH,
        in_specs=(P(), P(None, "tp")),
        out_specs=P(None, "tp"),
        check="global",
    )
    check_program(f, torch.ones(4, 4), torch.ones(4, 8, requires_grad=differentiated))


@contextmanager
def seeing() -> Iterator[tuple[list[bool], list[bool]]]:
    """Yields whether each differentiation is assumed, and whether each record may assume any."""
    assume, record = assumed.assume, path.interpret_on_one_device
    found: list[bool] = []
    records: list[bool] = []

    def seen(*args: Any) -> Any:
        made = assume(*args)
        found.append(made is not None)
        return made

    def recorded(request: Any, branches: Any) -> Any:
        records.append(request.reading.assumes)
        return record(request, branches)

    recording = patch.object(path, "interpret_on_one_device", recorded)
    with patch.object(assumed, "assume", seen), recording:
        yield found, records


def loss(w: Tensor, x: Tensor) -> Tensor:
    h = torch.relu(convert(x, "tp", src=I, dst=R) @ w)
    return all_reduce(h.square().sum(), "tp", dst=I)


def gradient(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    made: Tensor = smt.grad(f)(*args)
    return made


def step(x: Tensor, w: Tensor) -> Tensor:
    return w - 0.1 * gradient(loss, w, x)


def test_a_backward_that_autograd_derives_is_not_run_on_one_device() -> None:
    with seeing() as (found, records):
        check(step)
    assert found == [True]
    assert records == [True]


class Square(TypedFunction):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        made: Tensor = 2 * x * gradient
        return made


def of_own_function(x: Tensor, w: Tensor) -> Tensor:
    return gradient(lambda w: all_reduce(Square.apply(w).sum(), "tp", dst=I), w)


def of_a_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return gradient(lambda w: smt.checkpoint(loss, w, x), w)


def of_a_gradient(x: Tensor, w: Tensor) -> Tensor:
    def length(w: Tensor) -> Tensor:
        return all_reduce(gradient(loss, w, x).square().sum(), "tp", dst=I)

    return gradient(length, w)


def of_autograd(x: Tensor, w: Tensor) -> Tensor:
    def through(w: Tensor) -> Tensor:
        y = w * 2
        (made,) = torch.autograd.grad(loss(y, x), y, create_graph=True)
        return all_reduce(made.sum(), "tp", dst=I)

    return gradient(through, w)


@pytest.mark.parametrize(
    ("body", "are_assumed"),
    [
        (of_own_function, [False]),
        (of_a_checkpoint, [False]),
        (of_a_gradient, [False, True]),  # the inner one first
        (of_autograd, [False, True]),
    ],
)
def test_gradients_that_code_or_derivatives_read_are_computed(
    body: Body, are_assumed: list[bool]
) -> None:
    with seeing() as (found, records):
        check(body)
    assert found == are_assumed
    assert records == [True]


def test_gradients_of_what_is_differentiated_around_the_call_are_computed() -> None:
    with seeing() as (found, _):
        check(step, differentiated=True)
    assert found == [False]


def of_what_has_none(x: Tensor, w: Tensor) -> Tensor:
    """Returns a gradient that autograd leaves out, for which torch.func makes zeros."""
    return gradient(lambda w: all_reduce(torch.linalg.vector_norm(w, 0), "tp", dst=I), w)


def test_a_program_that_is_refused_with_assumed_gradients_is_compared_without() -> None:
    with seeing() as (found, records):
        check(of_what_has_none)
    assert found == [True]
    assert records == [True, False]


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return step(x, w) * w.shape[1]


def unsummed(x: Tensor, w: Tensor) -> Tensor:
    made = gradient(lambda x: (x @ w).square().sum(), convert(x, "tp", src=I, dst=R))
    return w + made.amax()


def of_an_average(x: Tensor, w: Tensor) -> Tensor:
    return gradient(lambda w: all_reduce((x @ w).mean(), "tp", dst=I), w)


@pytest.mark.parametrize("body", [scaled, unsummed, of_an_average])
def test_an_error_reads_as_it_does_where_gradients_are_computed(body: Body) -> None:
    with pytest.raises(ShardTypeError) as error:
        check(body)
    with (
        patch.object(assumed, "assume", lambda *args: None),
        pytest.raises(ShardTypeError) as computed,
    ):
        check(body)
    assert str(error.value) == str(computed.value)
