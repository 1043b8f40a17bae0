"""check="global": gradients of means over a rank's part, and other known multiples."""

from collections.abc import Callable
from typing import Any, Final, Literal

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    Function,
    I,
    P,
    Partial,
    R,
    ShardTypeError,
    V,
    all_gather,
    all_reduce,
    axis_size,
    check_program,
    explain,
    make_mesh,
    reduce_scatter,
    reinterpret,
    shard_map,
)
from tests.support.golden import told

Step = Callable[[Tensor, Tensor], Tensor]


def grad(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    found: Callable[[Tensor], Tensor] = torch.func.grad(f)
    return found


X: Final = torch.randn(12, 6, dtype=torch.float64)
W: Final = torch.randn(6, 4, dtype=torch.float64)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh().square().mean()


def gradient(w: Tensor, x: Tensor) -> Tensor:
    return grad(lambda w: loss(w, x))(w)


def mean(g: Tensor) -> Tensor:
    return all_reduce(g, "dp", op="mean", dst=I)


def averaged(w: Tensor, x: Tensor) -> Tensor:
    return mean(gradient(w, x))


def added_to_the_field(w: Tensor, x: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    loss(leaf, x).backward()
    loss(leaf.sin(), x).backward()
    assert leaf.grad is not None
    return mean(leaf.grad)


def scattered(w: Tensor, x: Tensor) -> Tensor:
    return all_gather(reduce_scatter(gradient(w, x), "dp", dim=1, op="mean"), "dp", dim=1, dst=I)


def of_shards(w: Tensor, x: Tensor) -> Tensor:
    def of(w: Tensor) -> Tensor:
        return loss(all_gather(w, "dp", dim=1, dst=R), x)

    return grad(of)(w) / axis_size("dp")


def twice_the_gradient_of_shards(w: Tensor, x: Tensor) -> Tensor:
    return of_shards(w, x) * axis_size("dp")


RIGHT: Final = [averaged, added_to_the_field]


def summed(w: Tensor, x: Tensor) -> Tensor:
    return all_reduce(gradient(w, x), "dp", dst=I)


def squared_before(w: Tensor, x: Tensor) -> Tensor:
    return mean(reinterpret(gradient(w, x), "dp", src=Partial, dst=V).square())


def other_loss_added_to_the_field(w: Tensor, x: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    loss(leaf, x).backward()
    (x @ leaf).square().sum().backward()
    assert leaf.grad is not None
    return mean(leaf.grad)


def finished_field_added_to(w: Tensor, x: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    (x @ leaf).square().sum().backward()
    assert leaf.grad is not None
    leaf.grad = all_reduce(leaf.grad, "dp", dst=R)
    (x @ leaf).square().sum().backward()
    return all_reduce(leaf.grad, "dp", dst=I)


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1e-3, 1e-3)


def through_a_backward_that_is_not_linear(w: Tensor, x: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    value: Tensor = Clipped.apply(x @ leaf)
    value.square().mean().backward()
    assert leaf.grad is not None
    return mean(leaf.grad)


WRONG: Final = [
    through_a_backward_that_is_not_linear,
    summed,
    squared_before,
    other_loss_added_to_the_field,
]


def mapped(step: Step, dp: int, **options: Any) -> Any:
    mesh = make_mesh((dp, 6), ("dp", "tp"), kind="simulated", simulate="ranks")
    specs = {"in_specs": (P(), P("dp")), "out_specs": P(), "check": "global", **options}
    return shard_map(step, mesh=mesh, **specs)


@pytest.mark.sample(6)
@pytest.mark.parametrize("step", RIGHT)
@pytest.mark.parametrize("dp", [2, 3])
def test_the_gradient_of_a_local_mean_averaged_over_the_ranks_is_that_of_one_device(
    step: Step, dp: int
) -> None:
    one = make_mesh((1, 1), ("dp", "tp"), kind="simulated", simulate="ranks")
    want = shard_map(step, mesh=one, in_specs=(P(), P("dp")), out_specs=P())(W, X)
    torch.testing.assert_close(mapped(step, dp)(W, X), want)


@pytest.mark.parametrize("step", WRONG)
def test_another_multiple_of_the_gradient_is_refused(step: Step) -> None:
    mapped(step, 2, check="local")(W, X)
    with told(ShardTypeError):
        mapped(step, 2)(W, X)


@pytest.mark.parametrize("check", ["local", "global"])
def test_addends_are_no_part_of_a_gradient_that_was_summed_before(check: str) -> None:
    with pytest.raises(ShardTypeError, match="before, which is R: equal on all ranks"):
        mapped(finished_field_added_to, 2, check=check)(W, X)


def test_the_gradient_of_a_gathered_shard_divided_by_the_ranks_is_that_of_one_device() -> None:
    specs = {"in_specs": (P(None, "dp"), P("dp"))}
    want = gradient(W, X)
    found = mapped(of_shards, 2, out_specs=P(None, "dp"), **specs)(W, X)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(mapped(scattered, 2)(W, X), want)
    with pytest.raises(ShardTypeError, match="it is 2 times that value"):
        mapped(twice_the_gradient_of_shards, 2, out_specs=P(None, "dp"), **specs)(W, X)


# ----------------------------------------------------------------------------- rounded addends


def cast(x: Tensor) -> Tensor:
    return all_reduce(x.sum(1).long(), "dp", dst=I)


def made_bool(x: Tensor) -> Tensor:
    return all_reduce((x > 0).sum(1).bool().long(), "dp", dst=I)


def copied_into_integers(x: Tensor) -> Tensor:
    whole = torch.zeros(x.shape[0], dtype=torch.int64)
    whole[:] = x.sum(1)
    return all_reduce(whole, "dp", dst=I)


def cast_mean(x: Tensor) -> Tensor:
    return all_reduce(x.mean(1).long().double(), "dp", op="mean", dst=I)


def cast_microbatches(x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for chunk in x.mT.chunk(2):
        total = total + chunk.sum().long()
    return all_reduce(total, "dp", dst=I)


def cast_bytes(x: Tensor) -> Tensor:
    return all_reduce((x * 100).byte().sum(1, dtype=torch.uint8).double(), "dp", dst=I)


def copied_bytes(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], dtype=torch.int8).copy_((x * 100).long().sum(1))
    return all_reduce(total + torch.zeros(x.shape[0]), "dp", dst=I)


def number_in_bytes(x: Tensor) -> Tensor:
    return all_reduce(torch.tensor(x.shape[1] * 60).byte().double(), "dp", dst=I)


def sum_of_bytes(x: Tensor) -> Tensor:
    return all_reduce((x * 100).byte().sum(1, dtype=torch.uint8), "dp", dst=I).double()


def rounded_entries(x: Tensor) -> Tensor:
    return all_reduce(x.round().sum(1, dtype=torch.int64), "dp", dst=I)


REFUSED: Final = r"a sum of rounded values|it is the mean of a rank's|split is not"


def on_ranks(
    body: Callable[[Tensor], Tensor], number: int, check: Literal["global"] | bool
) -> Callable[[Tensor], Tensor]:
    mesh = make_mesh((number,), ("dp",), kind="simulated")
    return shard_map(body, mesh=mesh, in_specs=P(None, "dp"), out_specs=P(), check=check)


@pytest.mark.parametrize(
    "body", [cast, made_bool, copied_into_integers, cast_mean, cast_microbatches]
)
def test_a_rank_s_addend_is_not_rounded(body: Callable[[Tensor], Tensor]) -> None:
    """The sum of what is rounded is not the rounded sum, as numbers show."""
    x = torch.tensor([0.7, 0.7, 1.7, 1.7, 2.7, 2.7, 3.7, 3.7]).double().repeat(8, 1)
    with pytest.raises(ShardTypeError, match=REFUSED):
        on_ranks(body, 4, "global")(x)
    assert not torch.equal(on_ranks(body, 4, False)(x), on_ranks(body, 1, False)(x))


@pytest.mark.parametrize("body", [cast_bytes, copied_bytes, number_in_bytes])
def test_a_rank_s_addend_that_may_wrap_is_not_cast(body: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(0.5, 2.5, 64).double().reshape(8, 8)
    with pytest.raises(ShardTypeError, match=r"as each wraps|it is 1/4 times that value"):
        on_ranks(body, 4, "global")(x)
    assert not torch.equal(on_ranks(body, 4, False)(x), on_ranks(body, 1, False)(x))


@pytest.mark.parametrize("body", [rounded_entries, sum_of_bytes])
def test_entries_that_are_rounded_before_their_sum_are_right(
    body: Callable[[Tensor], Tensor],
) -> None:
    x = torch.linspace(0.5, 2.5, 64).double().reshape(8, 8)
    assert torch.equal(on_ranks(body, 4, "global")(x), on_ranks(body, 1, False)(x))


def added_to_ones(x: Tensor) -> Tensor:
    total = torch.ones(x.shape[0], dtype=x.dtype)
    total += x.sum(1)
    return all_reduce(total, "dp", dst=I)


def written_beside_one(x: Tensor) -> Tensor:
    total = torch.zeros(2, x.shape[0], dtype=x.dtype)
    total[0] = 1
    total[1] += x.sum(1)
    return all_reduce(total, "dp", dst=I)


def mixed_into_ones(x: Tensor) -> Tensor:
    return all_reduce(x.new_ones(x.shape[0]).lerp_(x.sum(1), 0.5), "dp", dst=I)


@pytest.mark.parametrize("body", [added_to_ones, written_beside_one, mixed_into_ones])
def test_addends_are_not_written_into_what_is_equal_on_all_ranks(
    body: Callable[[Tensor], Tensor],
) -> None:
    x = torch.randn(8, 8).double()
    with pytest.raises(ShardTypeError, match="counted once per rank"):
        on_ranks(body, 4, "global")(x)
    assert not torch.equal(on_ranks(body, 4, False)(x), on_ranks(body, 1, False)(x))


def added_to_zeros(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], dtype=x.dtype)
    total.add_(x.sum(1)).mul_(2)
    return all_reduce(total, "dp", dst=I)


def test_addends_are_written_into_zeros() -> None:
    x = torch.randn(8, 8).double()
    there = on_ranks(added_to_zeros, 1, False)(x)
    torch.testing.assert_close(on_ranks(added_to_zeros, 4, "global")(x), there)


def test_a_sum_of_zeros_is_zeros() -> None:
    """Unless the ranks have parts of them, of which one device has as many as there are ranks."""

    def zeros(x: Tensor) -> Tensor:
        return all_reduce(torch.zeros_like(x), "dp", dst=I)

    mesh = make_mesh((2,), ("dp",), kind="abstract")
    whole, parts = (
        shard_map(zeros, mesh=mesh, in_specs=spec, out_specs=P(), check="global")
        for spec in (P(), P("dp"))
    )
    assert explain(whole, X).one_device == "proven"
    with pytest.raises(ShardTypeError, match="not a pending sum but sharded along dim 0"):
        check_program(parts, X)
