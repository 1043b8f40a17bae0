"""Mistakes planted in the kernels' own forward and backward, which the checker has to catch."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, Partial, R, ShardTypeError
from shardmap_torch.kernels import (
    algorithms,
    all_gather_matmul,
    autograd,
    engine,
    matmul_all_reduce,
)
from tests.kernels.support.typed import (
    COLUMN,
    GATHER,
    ROW,
    SCATTER,
    SHAPES,
    SUM,
    WHOLE,
    Body,
    Forget,
    column,
    float32,
    held_in,
    reduced,
    row,
    told,
)

Kernel = Callable[..., Any]


def forgets_the_scatter(kernel: Kernel, transport: Any, *rest: Any) -> Any:
    dx, dws = yield from kernel(transport, *rest)
    _, ws, dys, _, dim, _ = rest
    whole = dys[0] @ ws[0].t()
    return whole.narrow(dim, 0, dx.shape[dim]), dws


def sums_twice(kernel: Kernel, transport: Any, *rest: Any) -> Any:
    dx, dws = yield from kernel(transport, *rest)
    return transport.run("all_reduce", Partial, R, dx), dws


def takes_the_shard(kernel: Kernel, transport: Any, x: Any, *rest: Any) -> Any:
    dx, dws = yield from kernel(transport, x, *rest)
    _, (dy,), _, dim, *_ = rest
    own = dy.narrow(dim, 0, x.shape[dim])
    return dx, [x.flatten(0, 1).t() @ own.flatten(0, 1)] * len(dws)


def forgets_the_gather(kernel: Kernel, transport: Any, x: Any, w: Any, dy: Any, *rest: Any) -> Any:
    yield from ()
    whole = dy.repeat(1, transport.num_ranks, 1)
    return whole @ w.t(), x.flatten(0, 1).t() @ whole.flatten(0, 1)


def forgets_the_sum(kernel: Kernel, transport: Any, x: Any, w: Any, dy: Any, *rest: Any) -> Any:
    yield from ()
    return dy @ w.t(), x.flatten(0, 1).t() @ dy.flatten(0, 1)


def swaps(kernel: Kernel, *args: Any) -> Any:
    dx, dw = yield from kernel(*args)
    return dw, dx


def repeats(kernel: Kernel, transport: Any, x: Any, ws: Any, biases: Any, dim: int, _: Any) -> Any:
    _, gathered = yield from kernel(transport, x, ws, biases, dim, _)
    return [x.repeat(1, transport.num_ranks, 1) @ ws[0]], gathered


@pytest.mark.parametrize(
    ("name", "mistake", "body", "specs", "what"),
    [
        pytest.param(
            "gather_backward",
            forgets_the_scatter,
            column(),
            COLUMN,
            f"all_gather_matmul, overlapped: the gradient of operand 0 is made by no collective, "
            f"and by {SCATTER}",
            id="the reduce-scatter is forgotten",
        ),
        pytest.param(
            "gather_backward",
            sums_twice,
            column(),
            COLUMN,
            f"all_gather_matmul, overlapped: the gradient of operand 0 is made by {SUM}, "
            f"{SCATTER}, and by {SCATTER}",
            id="summed twice",
        ),
        pytest.param(
            "gather_backward_again",
            takes_the_shard,
            column(save_gathered=False),
            COLUMN,
            f"all_gather_matmul, overlapped: the gradient of operand 1 is made by no collective, "
            f"and by {GATHER}",
            id="the shard in place of the gathered",
        ),
        pytest.param(
            "gather_forward",
            repeats,
            column(),
            COLUMN,
            f"all_gather_matmul, overlapped: result 0 is made by no collective, and by {GATHER}",
            id="nothing is gathered",
        ),
        pytest.param(
            "scatter_backward",
            forgets_the_gather,
            row,
            ROW,
            "matmul_reduce_scatter, overlapped: the gradient of operand 0 is made by no "
            f"collective, and by {GATHER}",
            id="the gather is forgotten",
        ),
        pytest.param(
            "reduce_backward",
            forgets_the_sum,
            reduced(R),
            WHOLE,
            "matmul_all_reduce, overlapped: it fails (ShardTypeError: body: mm over axis 'tp' "
            "of Partial "
            "and V: a sum over ranks can only be multiplied by what is equal on all ranks, R or "
            "K.), which nothing does",
            id="the sum is forgotten",
        ),
    ],
)
def test_a_mistake_in_a_kernel_is_caught(
    name: str, mistake: Kernel, body: Body, specs: Any, what: str, forget: Forget
) -> None:
    kernel = getattr(engine, name)
    assert held_in(body, *specs, *SHAPES)
    forget()
    with (
        mock.patch.object(engine, name, lambda *args: mistake(kernel, *args)),
        pytest.raises(ShardTypeError) as caught,
    ):
        held_in(body, *specs, *SHAPES)
    first, site, _ = str(caught.value).splitlines()
    assert first.endswith(f": {what} in the composition.")
    assert site.startswith("  at typed.py:")


def test_swapped_gradients_of_one_shape_are_caught(forget: Forget) -> None:
    kernel = algorithms.reduce_backward
    body = lambda x, w: matmul_all_reduce(x, w, "tp", dst=R)  # noqa: E731
    specs = (P("tp"), P(replicate="tp")), P(partial="tp")
    shapes = float32(64, 16), float32(16, 16)
    assert held_in(body, *specs, *shapes)
    forget()
    with (
        mock.patch.object(engine, "reduce_backward", lambda *args: swaps(kernel, *args)),
        pytest.raises(ShardTypeError, match=r"the gradient of operand [01] is"),
    ):
        held_in(body, *specs, *shapes)


def test_summing_cotangents_that_are_whole_is_caught(forget: Forget) -> None:
    forget()
    with (
        mock.patch.object(autograd, "I", R),  # The backward for R is taken where it is for I.
        pytest.raises(ShardTypeError) as caught,
    ):
        held_in(reduced(I), *WHOLE, *SHAPES)
    assert "matmul_all_reduce, overlapped: it fails (ShardTypeError: " in str(caught.value)


def test_a_forgotten_gradient_of_a_bias_is_caught(forget: Forget) -> None:
    pull_back = autograd.GatherMatmul.pull_back

    def forgetful(*args: Any) -> Any:
        return [*pull_back(*args)[:-1], None]

    def body(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return all_gather_matmul(x, w, "tp", dim=1, bias=b)

    specs = ((*COLUMN[0], P("tp")), COLUMN[1])
    (equation,) = held_in(body, *specs, *SHAPES, float32(32))
    assert told(equation) == [GATHER, f"back: {SCATTER}"]
    forget()
    with (
        mock.patch.object(autograd.GatherMatmul, "pull_back", forgetful),
        pytest.raises(ShardTypeError) as caught,
    ):
        held_in(body, *specs, *SHAPES, float32(32))
    assert "the gradient of operand 2 is missing, and there in the composition." in str(
        caught.value
    )


def test_a_gradient_that_goes_to_another_weight_where_one_result_is_used_is_caught(
    forget: Forget,
) -> None:
    pull_back = autograd.GatherMatmul.pull_back

    def mistaken(self: Any, operands: Any, needed: Any, grads: Any) -> Any:
        dx, *dws = pull_back(self, operands, needed, grads)
        return [dx, *dws] if None not in grads[:2] else [dx, *sorted(dws, key=lambda d: d is None)]

    def body(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        first, second = all_gather_matmul(x, (w, v), "tp", dim=1)
        return first * second

    specs = ((*COLUMN[0], COLUMN[0][1]), COLUMN[1])
    assert held_in(body, *specs, *SHAPES, SHAPES[1])
    forget()
    with (
        mock.patch.object(autograd.GatherMatmul, "pull_back", mistaken),
        pytest.raises(ShardTypeError, match="operand 1 is there, and missing in the composition"),
    ):
        held_in(body, *specs, *SHAPES, SHAPES[1])


def test_a_mistake_where_an_inner_gradient_needs_less_is_caught(forget: Forget) -> None:
    """Only dw is asked for inside, and dx as well outside of the function."""
    right = autograd.GatherMatmulBackward._weights_only

    def takes_the_shard(self: Any, x: Any, full: Any, dys: Any, needs_grad: Any) -> Any:
        right(self, x, full, dys, needs_grad)
        return (x.flatten(0, 1).t() @ dys[0].narrow(1, 0, x.shape[1]).flatten(0, 1),)

    def body(x: Tensor, w: Tensor) -> Tensor:
        call = lambda w: all_gather_matmul(x, w, "tp", dim=1).square().sum()  # noqa: E731
        found: Tensor = torch.func.grad(call)(w)
        return found

    specs = COLUMN[0], P(None, "tp", partial="dp")
    assert held_in(body, *specs, *SHAPES)
    forget()
    with (
        mock.patch.object(autograd.GatherMatmulBackward, "_weights_only", takes_the_shard),
        pytest.raises(ShardTypeError, match="overlapped: the gradient of operand 1 is made by no"),
    ):
        held_in(body, *specs, *SHAPES)
