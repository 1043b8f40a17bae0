"""Draws in a body: what ranks share is a type, and shards are those of the one-device draw."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    I,
    Mesh,
    P,
    ShapeDtype,
    ShardMapError,
    ShardTypeError,
    SpecError,
    all_reduce,
    assume_constant,
    check_program,
    explain,
    make_mesh,
    random,
    shard_map,
    typeof,
)
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on
from tests.programs.support.harness import global_value
from tests.support.golden import hold_own, told
from tests.support.pool import Gloo

SHAPE = (8, 4, 6)
SPECS = [P("dp"), P("tp", None, "dp"), P(None, ("tp", "dp"))]
DRAWS: list[Callable[..., Tensor]] = [
    random.bits,
    random.uniform,
    partial(random.normal, dtype=torch.float64),
    partial(random.randint, low=0, high=100),
]


def draw_bernoulli(key: Tensor, shape: tuple[int, ...], spec: P | None) -> Tensor:
    return random.bernoulli(key, 0.3, shape, spec=spec)


CASES: list[tuple[Callable[..., Tensor], P]] = [(random.bits, spec) for spec in SPECS] + [
    (draw, P("dp", "tp")) for draw in (*DRAWS[1:], draw_bernoulli)
]


def shards_are_slices(mesh: Mesh) -> None:
    key = random.key(11)
    expected = [draw(key, shape=SHAPE, spec=None) for draw, _ in CASES]
    for check in ("local", "global") if mesh.simulate == "vmap" else ("local",):
        mapped = shard_map(
            lambda key: tuple(draw(key, shape=SHAPE, spec=spec) for draw, spec in CASES),
            mesh=mesh,
            in_specs=P(),
            out_specs=tuple(spec for _, spec in CASES),
            check=check,
        )
        assert all(map(torch.equal, map(global_value, mapped(key)), expected))


@ON_EVERY_MESH
def test_shards_are_slices_of_the_draw_of_one_device(kind: str, gloo: Gloo) -> None:
    run_on(kind, shards_are_slices, gloo, (2, 2), ("dp", "tp"))


def draw_all(mesh: Mesh) -> list[Tensor]:
    """Draws with every sharing, stacked over all ranks."""
    everywhere = P(("dp", "tp"))

    def body(key: Tensor) -> tuple[Tensor, ...]:
        own = random.fold_axis(key, "dp")
        return (
            random.normal(key, (2, 3)),
            random.normal(own, (2, 3)),
            random.normal(random.fold_axis(own, "tp"), (2, 3)),
            random.normal(random.fold_axis(key, ("dp", "tp")), (2, 3)),
            random.normal(own, (2, 8), spec=P(None, "tp")),
        )

    mapped = shard_map(body, mesh=mesh, in_specs=P(), out_specs=everywhere)
    return [global_value(y) for y in mapped(random.key(9))]


def in_worker() -> list[Tensor]:
    return draw_all(make_mesh((2, 2), ("dp", "tp")))


def test_every_mesh_draws_the_same_bits(gloo: Gloo) -> None:
    vmap, ranks = (
        draw_all(make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate=strategy))
        for strategy in ("vmap", "ranks")
    )
    for others in (ranks, *gloo(4).run(in_worker)):
        assert all(map(torch.equal, vmap, others))
    shared, over_dp, over_both, together, sharded = (y.reshape(2, 2, 2, -1) for y in vmap)
    assert all(torch.equal(shared[0, 0], shared[i, j]) for i in range(2) for j in range(2))
    assert torch.equal(over_dp[:, 0], over_dp[:, 1])
    assert not torch.equal(over_dp[0], over_dp[1])
    for y in (over_both, together):
        assert len({tuple(rank.flatten().tolist()) for rank in y.flatten(0, 1)}) == 4
    assert len({tuple(rank.flatten().tolist()) for rank in sharded.flatten(0, 1)}) == 4


MESH = make_mesh((8, 1024), ("dp", "tp"), kind="abstract")
KEY = ShapeDtype((), torch.int64)


def types_in(body: Any, *args: Any, check: Any = True) -> dict[str, Any]:
    """The types of what `body` computes, on 8,192 ranks."""
    found: list[Any] = assume_constant([])  # else a check would leave it as it was

    def typed(*args: Any) -> Tensor:
        y = body(*args)
        found.append(typeof(y))
        same: Tensor = args[0]
        return same

    out = shard_map(typed, mesh=MESH, in_specs=P(), out_specs=P(), check=check)
    check_program(out, *args)
    return {axis: str(axis_type) for axis, axis_type in found[-1].items()}


def test_sharing_is_a_type() -> None:
    assert types_in(lambda key: random.normal(key, (4,)), KEY) == {"dp": "K", "tp": "K"}
    assert types_in(lambda key: random.uniform(random.fold_axis(key, "dp"), (4,)), KEY) == {
        "dp": "V",
        "tp": "K",
    }
    sharded = partial(random.normal, shape=(4, 2048), spec=P(None, "tp"))
    assert types_in(sharded, KEY) == {"dp": "K", "tp": "V"}
    assert types_in(sharded, KEY, check="global") == {"dp": "K", "tp": "S(1)"}
    assert types_in(lambda key: sharded(random.fold_axis(key, "dp")), KEY) == {"dp": "V", "tp": "V"}
    assert types_in(lambda key: random.split(key)[1], KEY) == {"dp": "K", "tp": "K"}


def test_a_folded_draw_may_not_leave_as_if_it_were_shared() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    f = shard_map(
        lambda key: random.normal(random.fold_axis(key, "dp"), (2,)),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(ShardTypeError, match=r"varies over it"):
        f(random.key(0))


def sharded_dropout(mesh: Mesh) -> None:
    """Values and gradients of a dropped-out product are those of one device, bit by bit."""
    key = random.key(4)
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)
    w = torch.linspace(2, 3, 8, dtype=torch.float64)

    def loss(key: Tensor, x: Tensor, w: Tensor, spec: P | None) -> Tensor:
        return random.dropout(key, x * w, 0.25, spec=spec)

    expected = [v.clone().requires_grad_() for v in (x, w)]
    y = loss(key, expected[0], expected[1], None)
    y.sum().backward()
    for check in ("local", "global"):
        mapped = shard_map(
            partial(loss, spec=P("dp", "tp")),
            mesh=mesh,
            in_specs=(P(), P("dp", "tp"), P("tp", replicate={"dp"})),
            out_specs=P("dp", "tp"),
            check=check,
        )
        actual = [v.clone().requires_grad_() for v in (x, w)]
        out = mapped(key, *actual)
        assert torch.equal(global_value(out), y.detach())
        out.sum().backward()
        for one, other in zip(actual, expected, strict=True):
            assert one.grad is not None
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


@ON_EVERY_MESH
def test_sharded_dropout_is_that_of_one_device(kind: str, gloo: Gloo) -> None:
    run_on(kind, sharded_dropout, gloo, (2, 2), ("dp", "tp"))


def test_dropout_scales_what_it_keeps_and_does_nothing_at_inference() -> None:
    x = torch.ones(1000)
    dropped = random.dropout(random.key(0), x, 0.2)
    assert set(dropped.tolist()) == {0.0, 1.25}
    assert abs((dropped > 0).float().mean() - 0.8) < 4 * (0.16 / 1000) ** 0.5
    assert random.dropout(random.key(0), x, 0.2, training=False) is x
    assert random.dropout(random.key(0), x, 0.0) is x
    half = random.dropout(random.key(0), x.bfloat16(), 0.5)
    assert half.dtype == torch.bfloat16
    with pytest.raises(ShardMapError) as error:
        random.dropout(random.key(0), x, 1.5)
    assert str(error.value) == "random.dropout: p is a probability in [0, 1), not 1.5."


def test_dropout_whose_mask_differs_where_the_value_is_invariant_is_refused() -> None:
    """The mask varies over tp and x does not: the gradient of x would miss a sum."""
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    f = shard_map(
        lambda key, x: all_reduce(
            random.dropout(random.fold_axis(key, "tp"), x).sum(), "tp", dst=I
        ),
        mesh=mesh,
        in_specs=(P(), P(invariant={"tp"})),
        out_specs=P(),
    )
    with pytest.raises(ShardTypeError, match=r"where"):
        f(random.key(0), torch.ones(4, requires_grad=True))


def test_global_strictness_refuses_masks_that_one_device_does_not_draw() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")

    def fold(key: Tensor, x: Tensor) -> Tensor:
        return random.dropout(random.fold_axis(key, "dp"), x)

    def run(body: Callable[[Tensor, Tensor], Tensor]) -> str:
        mapped = shard_map(
            body, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("dp"), check="global"
        )
        with pytest.raises(ShardTypeError) as error:
            mapped(random.key(0), torch.ones(4))
        return str(error.value)

    assert "over 'dp' every rank has a value of its own" in run(fold)
    refused = run(random.dropout)
    assert "each rank draws the first of the numbers that one device draws" in refused
    assert "spec=P('dp')" in refused


def test_specs_that_do_not_match_are_refused() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")

    def run(body: Any) -> str:
        mapped: Any = shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("dp"))
        with pytest.raises((SpecError, CollectiveError)) as error:
            mapped(random.key(0))
        return str(error.value)

    hold_own(run(lambda key: random.normal(key, (3, 2), spec=P("dp"))), 2)
    assert run(lambda key: random.normal(key, (4,), spec=P("dp", "tp"))).startswith(
        "axis_size: no axis 'tp' in the simulated mesh (dp=2)."
    )
    hold_own(run(lambda key: random.normal(key, (4,), spec=P(None, "dp"))), 3)
    hold_own(run(lambda key: random.dropout(key, torch.ones(4), spec=P(None, "dp"))), 4)
    two = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
    partly = shard_map(
        lambda key: random.normal(key, (4,), spec=P("dp", partial={"tp"})),
        mesh=two,
        in_specs=P(),
        out_specs=P("dp"),
    )
    with told(SpecError):
        partly(random.key(0))


def test_one_equation_draws() -> None:
    f = shard_map(
        partial(random.normal, shape=(8, 1024), spec=P("dp", "tp")),
        mesh=MESH,
        in_specs=P(),
        out_specs=P("dp", "tp"),
    )
    equations = [e.name for e in check_program(f, KEY).equations]
    assert equations.count("threefry") == 1
    assert len(equations) < 40


def test_shards_of_positions_put_together_are_those_of_one_device() -> None:
    mesh = make_mesh((2, 4), ("dp", "tp"), kind="simulated", simulate="ranks")
    for spec in (P("dp", "tp"), P(("tp", "dp")), P("tp", "dp")):
        mapped = shard_map(
            partial(random.iota, (8, 16), spec),
            mesh=mesh,
            in_specs=(),
            out_specs=spec,
            check="global",
        )
        assert torch.equal(mapped(), torch.arange(128).reshape(8, 16))


def test_draws_of_shards_are_proven_at_any_number_of_ranks() -> None:
    mesh = make_mesh((64, 128), ("dp", "tp"), kind="abstract")
    for spec in (P("dp"), P("dp", "tp"), P(("tp", "dp")), P(None, "tp")):
        f = shard_map(
            partial(random.normal, shape=(8192, 8192), spec=spec),
            mesh=mesh,
            in_specs=P(),
            out_specs=spec,
            check="global",
        )
        assert "tried with numbers" not in str(explain(f, KEY))
