"""Results of lax that meet what varies are cast, as in JAX, and only where that is needed."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_reduce,
    checkpoint,
    convert,
    lax,
    make_mesh,
    shard_map,
    typeof,
)
from shardmap_torch.types import AxisType
from tests.programs.support.harness import random
from tests.support.fuzzing import FUZZ
from tests.support.golden import hold_own
from tests.support.pool import Gloo

# Dynamo itself instantiates the class, and torch warns of that.
COMPILING = "ignore:.*should not be instantiated. Methods on autograd functions:DeprecationWarning"
MESH = make_mesh((2,), ("i",), kind="simulated")


def helper(value: Tensor) -> Tensor:
    return lax.psum(value, "i")


def test_a_helper_is_cast_for_one_caller_and_not_for_another() -> None:
    w, x = random((3,), 0), random((4, 3), 1)

    def loss_of(w: Tensor, x: Tensor, total: Any) -> Tensor:
        z = x @ w
        z = z - total(z.sum()) / 4
        result: Tensor = total((z**2).sum())
        return result

    def body(w: Tensor, x: Tensor) -> Any:
        return torch.func.grad(lambda w: loss_of(lax.pcast(w, "i", to="varying"), x, helper))(w)

    wanted = torch.func.grad(lambda w: loss_of(w, x, lambda value: value))(w)
    for check in ("local", "global"):
        f = shard_map(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P(), check=check)
        torch.testing.assert_close(f(w, x), wanted)


@pytest.mark.parametrize("cast", [False, True])
def test_a_result_stays_invariant_unless_it_meets_what_varies(cast: bool) -> None:
    seen: list[Mapping[str, AxisType]] = []

    def body(x: Tensor) -> Tensor:
        mean = lax.pmean(x, "i")
        seen.append(typeof(mean))
        return x * mean if cast else mean

    f = shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    f(torch.ones(2, requires_grad=True))
    assert seen[-1] == {"i": R if cast else I}


def test_a_result_in_recomputed_code_is_cast() -> None:
    x = random((4, 3), 0).requires_grad_()

    def body(x: Tensor) -> Tensor:
        def centered(x: Tensor) -> Tensor:
            return (x - lax.pmean(x.mean(0), "i")).exp()

        result: Tensor = checkpoint(centered, checkpoint(centered, x))
        return result

    f: Any = shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    (gradient,) = torch.autograd.grad(f(x).square().sum(), x)

    def alone(x: Tensor) -> Tensor:
        for _ in range(2):
            x = (x - x.mean(0)).exp()
        return x.square().sum()

    torch.testing.assert_close(gradient, torch.func.grad(alone)(x.detach()))


def first_line(body: Any) -> str:
    f: Any = shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(ShardTypeError) as told:
        f(torch.ones(2, requires_grad=True))
    return str(told.value).splitlines()[0]


def test_a_program_that_is_wrong_elsewhere_is_refused_for_that() -> None:
    def body(x: Tensor) -> Tensor:
        y = x - lax.pmean(x.mean(), "i")
        total = all_reduce(x.square().sum(), "i", dst=I)  # no result of lax: the user says I
        return y.exp() * total

    hold_own(first_line(body))
    f = shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(ShardTypeError, match=r"self: float32\[1\], V, from exp at"):
        f(torch.ones(2, requires_grad=True))


def test_a_program_that_casts_do_not_help_is_refused_as_it_is_written() -> None:
    def seeded(x: Tensor) -> Any:
        def loss(x: Tensor) -> Tensor:
            total = lax.psum(x.sum(), "i")
            return total + lax.psum((x * total).sum(), "i")

        return torch.func.grad(loss)(x)

    def converted(x: Tensor) -> Tensor:
        mean = lax.pmean(x, "i")
        return x * convert(mean, "i", src=I, dst=R) + x * mean

    for body in (seeded, converted):
        assert first_line(body) == (
            f"{body.__name__}: mul over axis 'i' of I and V: the I operand's gradient would differ "
            "between ranks and never be summed."
        )


def compiled() -> None:
    x = random((4, 3), 0)

    def body(x: Tensor) -> Tensor:
        x = x - lax.pmean(x.mean(0), "i")
        return lax.psum(x.exp().sum(), "i")

    f: Any = shard_map(body, mesh=make_mesh((2,), ("i",)), in_specs=P("i"), out_specs=P())
    wanted = torch.func.grad(lambda x: (x - x.mean(0)).exp().sum())(x)
    for run in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        run(leaf).backward()
        torch.testing.assert_close(leaf.grad, wanted)


@pytest.mark.filterwarnings(COMPILING)
@pytest.mark.skipif(not FUZZ, reason="compiles in two processes")
def test_a_compiled_call_casts_what_was_checked(gloo: Gloo) -> None:
    gloo(2).run(compiled, timeout=120)
