"""A shard_map in the body of another: its open axes are inferred, and its results are checked.

What is accepted runs on ranks that are threads, batched, and on processes, and is compared with one
device, gradients included.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    SpecError,
    all_reduce,
    check_program,
    checkpoint,
    convert,
    make_mesh,
    shard_map,
    trace,
)
from shardmap_torch.mesh import Mesh
from tests.checker.support.rejections import numbers
from tests.programs.support.everywhere import ON_EVERY_MESH, SIMULATED, run_on, same
from tests.support.golden import hold_own
from tests.support.pool import Gloo

Body = Callable[..., Any]

X, W = numbers(8, 6), numbers(6, 4)
RANKS = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate="ranks")


def over_tp(f: Body, in_specs: Any, out_specs: Any) -> Body:
    return shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names={"tp"})


def over_dp(f: Body, mesh: Mesh, **options: Any) -> Body:
    """Rows of the first argument are sharded over dp; the others are whole, and so is the loss."""
    return shard_map(f, mesh=mesh, out_specs=P(), axis_names={"dp"}, **options)


def rows(x: Tensor, w: Tensor) -> Any:
    """Each rank of tp takes some rows of `x` and all of `w`, whose gradient wants a sum."""
    specs = (P("tp"), P())
    return over_tp(lambda x, w: torch.tanh(x @ w) @ w.T, specs, P("tp"))(x, w)


def columns(x: Tensor, w: Tensor) -> Any:
    """Each rank of tp takes some columns of `w` and all of `x`."""
    return over_tp(lambda x, w: torch.tanh(x @ w), (P(), P(None, "tp")), P(None, "tp"))(x, w)


def both(x: Tensor, w: Tensor) -> Any:
    """`x` is used whole and in parts, and each use is right by itself and beside the other."""

    def inner(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, torch.tanh(x @ w)

    equal, sharded = over_tp(inner, (P(), P(None, "tp")), (P(), P(None, "tp")))(x, w)
    return equal.sum() * sharded.square()


def repeated(x: Tensor, w: Tensor) -> Any:
    """All ranks of tp do the same."""
    return over_tp(lambda x, w: torch.tanh(x @ w), P(), P())(x, w)


def twice(x: Tensor, w: Tensor) -> Any:
    """An open value goes from one inner function to the next."""
    return columns(over_tp(lambda x: 2 * x, P(), P())(x), w)


def tiled(x: Tensor, w: Tensor) -> Any:
    """Returns shards of n copies: the form in which a value leaves that all ranks have."""
    return over_tp(lambda x, w: x @ w, P(), P("tp"))(x, w)


def zeros(x: Tensor, w: Tensor) -> Any:
    """Zeros like a varying value are equal on all ranks."""

    def inner(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x[:, :4]), torch.tanh(x @ w)

    nothing, some = over_tp(inner, (P("tp"), P()), (P(), P("tp")))(x, w)
    return nothing.sum() + some


def summed(x: Tensor, w: Tensor) -> Any:
    return over_tp(lambda x, w: x @ w, (P(None, "tp"), P("tp")), P(partial="tp"))(x, w)


def replicate(x: Tensor, w: Tensor) -> Any:
    """A result that is R leaves as I, whatever its spec says."""
    return over_tp(lambda x, w: all_reduce(x @ w, "tp", dst=R), (P(None, "tp"), P("tp")), P())(x, w)


def recomputed(x: Tensor, w: Tensor) -> Any:
    return torch.as_tensor(checkpoint(columns, x, w))


def branching(x: Tensor, w: Tensor) -> Any:
    total = w.square().sum()
    return columns(x, w) if total.item() > 1 else columns(2 * x, w)


BODIES = [
    rows,
    columns,
    both,
    repeated,
    twice,
    tiled,
    zeros,
    summed,
    replicate,
    recomputed,
    branching,
]

ONE: dict[Body, Callable[[Tensor, Tensor], Tensor]] = {
    rows: lambda x, w: torch.tanh(x @ w) @ w.T,
    both: lambda x, w: (2 * x).sum() * torch.tanh(x @ w).square(),
    twice: lambda x, w: torch.tanh(2 * x @ w),
    tiled: lambda x, w: torch.cat([x @ w, x @ w]),
    summed: lambda x, w: x @ w,
    replicate: lambda x, w: x @ w,
}


def plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def one_device(body: Body) -> Callable[[Tensor, Tensor], Tensor]:
    return ONE.get(body, plain)


def outer(body: Body) -> Body:
    """The loss, summed over dp."""

    def mapped(x: Tensor, w: Tensor) -> Any:
        total = body(x, w).square().sum()
        return all_reduce(total, "dp", dst=I)

    return mapped


def assert_right(body: Body, mesh: Mesh) -> None:
    specs = (P("dp"), P())
    loss = over_dp(outer(body), mesh, in_specs=specs)(X, W)
    expected = one_device(body)
    whole = expected(X, W).square().sum()
    if body is both:  # a product of sums, for each half of the rows
        whole = sum((expected(x, W).square().sum() for x in X.chunk(2)), torch.zeros(()))
    same(loss, whole)
    same(torch.autograd.grad(loss, (X, W)), torch.autograd.grad(whole, (X, W)))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@SIMULATED
def test_open_axes_of_an_inner_function_are_inferred(kind: str, body: Body, gloo: Gloo) -> None:
    run_on(kind, partial(assert_right, body), gloo, (2, 2), ("dp", "tp"))


def all_right(mesh: Mesh) -> None:
    for body in BODIES:
        assert_right(body, mesh)


def test_open_axes_of_an_inner_function_are_inferred_on_processes(gloo: Gloo) -> None:
    run_on("gloo", all_right, gloo, (2, 2), ("dp", "tp"))


def gradients_inside(mesh: Mesh) -> None:
    def gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        for_x, for_w = torch.func.grad(lambda x, w: columns(x, w).square().sum(), (0, 1))(x, w)
        return for_x, all_reduce(for_w, "dp", dst=I)

    specs: dict[str, Any] = {"in_specs": (P("dp"), P()), "out_specs": (P("dp"), P())}
    found = shard_map(gradients, mesh=mesh, axis_names={"dp"}, **specs)(X.detach(), W.detach())
    expected = torch.func.grad(lambda x, w: plain(x, w).square().sum(), (0, 1))
    same(found, expected(X.detach(), W.detach()))


@ON_EVERY_MESH
def test_gradients_taken_in_the_outer_body_pass_open_axes(kind: str, gloo: Gloo) -> None:
    run_on(kind, gradients_inside, gloo, (2, 2), ("dp", "tp"))


def test_inner_functions_are_the_same_program_on_one_device() -> None:
    specs: dict[str, Any] = {"in_specs": (P("dp"), P()), "check": "global"}
    for body in (rows, columns, repeated, twice, summed, replicate):
        loss = over_dp(outer(body), RANKS, **specs)(X, W)
        same(loss, one_device(body)(X, W).square().sum())


def test_tiles_of_an_inner_function_are_no_value_on_one_device() -> None:
    specs: dict[str, Any] = {"in_specs": (P("dp"), P()), "check": "global"}
    with pytest.raises(ShardTypeError, match="check='global'"):
        over_dp(outer(tiled), RANKS, **specs)(X, W)


# ------------------------------------------------------------------------------------ refused


def rejection(body: Body) -> str:
    with pytest.raises(ShardTypeError) as caught:
        check_program(over_dp(outer(body), RANKS, in_specs=(P("dp"), P())), X, W)
    return str(caught.value)


def test_a_result_that_varies_over_an_inner_axis_is_rejected() -> None:
    """Each rank would go on with its own shard, as if that were the global value."""

    def varying(x: Tensor, w: Tensor) -> Any:
        return over_tp(lambda x, w: x @ w, (P(), P(None, "tp")), P())(x, w)

    hold_own(rejection(varying))


def test_a_sum_still_to_be_taken_over_an_inner_axis_is_rejected() -> None:
    def unsummed(x: Tensor, w: Tensor) -> Any:
        def product(x: Tensor, w: Tensor) -> Tensor:
            return convert(x @ w, "tp", src="V", dst="P", dim=0)

        return over_tp(product, (P(None, "tp"), P("tp")), P())(x, w)

    assert "pending sum over 'tp'" in rejection(unsummed)


@pytest.mark.usefixtures("repairs")
def test_a_closed_over_value_of_the_outer_body_is_no_open_input() -> None:
    def closed(x: Tensor, w: Tensor) -> Any:
        y = 2 * x
        return over_tp(lambda w: y @ w, P(None, "tp"), P(None, "tp"))(w)

    text = rejection(closed)
    assert text.startswith("mapped: mm over axis 'tp' of I and V: ")
    # The specs of the outer function cannot name the axis.
    tried = "Tried, and accepted also by check='global': convert(y, 'tp', src=I, dst=R) in "
    assert text.splitlines()[-2].startswith(tried)


def test_an_input_that_two_gradients_need_in_different_ways_is_rejected() -> None:
    """One inner function, which a run meets once, and of which two gradients are taken."""

    def inner(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, x @ w

    def twofold(x: Tensor, w: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        equal, sharded = over_tp(inner, (P(), P(None, "tp")), (P(), P(None, "tp")))(x, w)
        (first,) = torch.autograd.grad(equal.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(sharded.sum(), x)
        return first + second

    hold_own(rejection(twofold))


def test_without_a_check_the_inner_spec_names_every_axis() -> None:
    f = over_dp(outer(columns), RANKS, in_specs=(P("dp"), P(replicate="dp")), check=False)
    with pytest.raises(SpecError, match=r"x: P\(\) needs replicate=\{'tp'\} or invariant="):
        f(X, W)


def test_the_typed_program_shows_the_sum_of_an_inner_gradient() -> None:
    program = trace(over_dp(outer(columns), RANKS, in_specs=(P("dp"), P())), X, W)
    lines = [line.strip() for line in str(program).splitlines()]
    assert any("input x of <lambda>" in line for line in lines)
    sums = [
        e for e in program.collectives if e.backward and e.name == "all_reduce('tp', Partial -> I)"
    ]
    assert [e.forward is not None and e.forward.name for e in sums] == ["input x of <lambda>"]
