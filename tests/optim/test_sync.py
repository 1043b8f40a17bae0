"""Gradients and parameters that travel in buckets arrive as they would one by one."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    Mesh,
    P,
    ShardTypeError,
    SpecError,
    explain,
    full,
    make_mesh,
    shard_map,
    validate_rule,
)
from shardmap_torch.checker.region import local_region
from shardmap_torch.nn import fsdp_gather
from shardmap_torch.optim import buckets, clip_by_global_norm, sgd, shard_over, sync_gradients, zero
from shardmap_torch.optim.sync import added, reshard_params
from tests.optim.training import (
    AXES,
    MESH,
    SPECS,
    Params,
    assert_equal,
    batch,
    loss,
    loss_on_one_device,
    params,
)
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on
from tests.programs.support.harness import random
from tests.support.golden import told
from tests.support.pool import Gloo

BARE = {name: P(*spec.entries) for name, spec in SPECS.items()}


def shards(mesh: Mesh) -> dict[str, P]:
    sharded: dict[str, P] = shard_over(params(), BARE, "dp", mesh)
    return sharded


def gradients(mesh: Mesh, into: dict[str, P] | None, **options: Any) -> Params:
    """The synced gradients of the first batch, as plain global tensors."""

    @shard_map(
        mesh=mesh,
        in_specs=(BARE, P("dp", "tp")),
        out_specs=BARE if into is None else into,
        check="global",
    )
    def body(weights: Params, x: Tensor) -> Params:
        grads = torch.func.grad(loss)(weights, x)
        return sync_gradients(grads, SPECS, "dp", into=into, **options)

    return full(body(params(), batch(0)))


def on_one_device() -> Params:
    grads: Params = torch.func.grad(loss_on_one_device)(params(), batch(0))
    return grads


def sums(mesh: Mesh) -> None:
    for bucket_bytes in (1, 500, 10**9):
        assert_equal(gradients(mesh, None, bucket_bytes=bucket_bytes), on_one_device())


@ON_EVERY_MESH
def test_summed_gradients_are_those_of_one_device(kind: Any, gloo: Gloo) -> None:
    run_on(kind, sums, gloo, MESH, AXES)


def scatters(mesh: Mesh) -> None:
    for bucket_bytes in (1, 10**9):
        assert_equal(gradients(mesh, shards(mesh), bucket_bytes=bucket_bytes), on_one_device())


@ON_EVERY_MESH
def test_scattered_gradients_are_those_of_one_device(kind: Any, gloo: Gloo) -> None:
    run_on(kind, scatters, gloo, MESH, AXES)


def there_and_back(mesh: Mesh) -> None:
    into = shards(mesh)

    @shard_map(mesh=mesh, in_specs=(BARE,), out_specs=(into, BARE), check="global")
    def body(weights: Params) -> tuple[Params, Params]:
        own = reshard_params("slice", weights, BARE, into)
        return own, reshard_params("all_gather", own, BARE, into)

    for moved in body(params()):
        assert_equal(full(moved), params())


@ON_EVERY_MESH
def test_parameters_are_sharded_and_gathered_again(kind: Any, gloo: Gloo) -> None:
    run_on(kind, there_and_back, gloo, MESH, AXES)


SPECS_PARTIAL = {
    name: P(*spec.entries, partial={"dp", *spec.replicate}) for name, spec in SPECS.items()
}


def count(mesh: Mesh, into: bool, **options: Any) -> int:
    """Counts the collectives that a synchronisation of gradients runs."""
    target = shards(mesh) if into else BARE

    @shard_map(mesh=mesh, in_specs=(SPECS_PARTIAL,), out_specs=target)
    def body(grads: Params) -> Params:
        return sync_gradients(grads, SPECS, "dp", into=target if into else None, **options)

    lines = str(explain(body, params())).splitlines()
    return sum(line.strip().startswith(("all_reduce(", "reduce_scatter(")) for line in lines)


def test_leaves_that_are_summed_alike_travel_together() -> None:
    mesh = make_mesh(MESH, AXES, kind="abstract")
    # w1, b1 and w2 over dp; scale and gain over dp and tp.
    assert count(mesh, into=False) == 2
    # scale is scattered by itself, then summed over tp; gain has no dim to scatter.
    assert count(mesh, into=True) == 4
    assert count(mesh, into=False, bucket_bytes=1) == len(SPECS)


@pytest.mark.parametrize("spec", [P(), P(None, "tp"), P("tp", replicate={"dp"})])
@pytest.mark.parametrize("into", [False, True])
def test_the_zero_gradient_of_an_unused_parameter_is_summed_too(spec: P, into: bool) -> None:
    """Zeros are addends of any sum, in each microbatch too; layouts decide it."""
    mesh = make_mesh(MESH, AXES, kind="simulated")
    specs = SPECS | {"unused": spec}
    weights = params() | {"unused": torch.ones(4, 8, dtype=torch.float64)}
    scattered = shard_over(weights, {**BARE, "unused": P(*spec.entries)}, "dp", mesh)

    def body(weights: Params, x: Tensor) -> Params:
        optimizer = sgd(0.1)
        first, second = (torch.func.grad(loss)(weights, part) for part in x.unbind())
        grads = {name: (first[name] + second[name]) / 2 for name in weights}
        if into:
            return sync_gradients(grads, specs, "dp", into=scattered)
        grads = sync_gradients(grads, specs, "dp")
        grads, _ = clip_by_global_norm(grads, specs, max_norm=1.0)
        updated: Params = optimizer.update(weights, grads, optimizer.init(weights))[0]
        return updated

    plain = {name: P(*each.entries) for name, each in specs.items()}
    f = shard_map(
        body,
        mesh=mesh,
        in_specs=(plain, P(None, "dp", "tp")),
        out_specs=scattered if into else plain,
        check="global",
    )
    x = torch.stack([batch(0), batch(1)])
    assert explain(f, weights, x).one_device == "proven"
    assert f(weights, x)["unused"].unique().tolist() == [float(not into)]


def test_gradients_that_are_pending_otherwise_are_an_error_that_names_each_of_them() -> None:
    mesh = make_mesh(MESH, AXES, kind="abstract")

    @shard_map(mesh=mesh, in_specs=(BARE, P("dp", "tp")), out_specs=BARE)
    def forgotten(weights: Params, x: Tensor) -> Params:
        return sync_gradients(torch.func.grad(loss)(weights, x), BARE, "dp")

    @shard_map(mesh=mesh, in_specs=(BARE, P("dp", "tp")), out_specs=BARE)
    def twice(weights: Params, x: Tensor) -> Params:
        grads = sync_gradients(torch.func.grad(loss)(weights, x), SPECS, "dp")
        return sync_gradients({"w1": grads["w1"]}, SPECS["w1"], "dp")

    forgotten_fix = (
        "(P()): pending over 'tp' too; reduce over 'tp' what its layer returns, if that lacks it, "
        "or name it in axis=, or in replicate= of its spec"
    )
    done_fix = (
        f"({SPECS['w1']!r}): equal on all ranks of 'dp', complete already; sum it once, or, if its "
        "layer does, name 'dp' in invariant= of its spec"
    )
    for step, line, problems in (
        (forgotten, "BARE", [f"grads[{name!r}] {forgotten_fix}" for name in ("gain", "scale")]),
        (twice, "w1", [f"grads['w1'] {done_fix}"]),
    ):
        with pytest.raises(ShardTypeError) as caught:
            step(params(), batch(0))
        head, *found = str(caught.value).splitlines()
        assert head.startswith("sync_gradients at test_sync.py:")
        assert head.endswith(": the gradients are not pending over the axes named:")
        assert line in head
        assert [each.strip() for each in found] == problems


def test_the_promise_of_a_bucket_is_kept() -> None:
    """Simulated ranks compute what `check="global"` takes a bucket to be, backward included."""
    found: dict[str, tuple[Any, list[int]]] = {}

    def spy(move: Any, types: Any, *leaves: Tensor) -> Any:
        region: Callable[..., Any] = local_region(move, *types())
        found[move.__name__] = region, [leaf.ndim for leaf in leaves]
        return region(*leaves)

    mesh = make_mesh(MESH, AXES, kind="simulated", simulate="ranks")
    with mock.patch.object(buckets, "call_region", spy):
        there_and_back(mesh)
        gradients(mesh, None)
        gradients(mesh, shards(mesh))
        own = shard_map(
            lambda p: fsdp_gather(p, P("dp"), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()
        )
        own([random((8, 8), 0), random((8, 8), 1)])
    kinds = ["all_gather", "all_reduce", "gather", "reduce_scatter"]
    assert sorted(found) == [f"{kind}_buckets" for kind in kinds]
    for region, ndims in found.values():
        example = [random((8,) * ndim, seed) for seed, ndim in enumerate(ndims)]
        validate_rule(region, *example, num_ranks=2)


def test_leaves_of_one_rank_and_no_axis_stay_as_they_are() -> None:
    leaf = torch.ones(2)
    assert sync_gradients({"w": leaf}, P())["w"] is leaf


@pytest.mark.parametrize(
    ("spec", "shard", "expected"),
    [
        (P("tp"), P("tp"), None),
        (P(), P(None, "dp"), (1, ("dp",))),
        (P("tp"), P(("tp", "dp", "cp")), (0, ("dp", "cp"))),
    ],
)
def test_what_a_shard_has_more(spec: P, shard: P, expected: Any) -> None:
    assert added(spec, shard) == expected


X = {"w": torch.ones(4, 4)}
ERRORS: dict[str, Callable[[], Any]] = {
    "tree": lambda: sync_gradients(X, {"v": P()}, "dp"),
    "no tensor": lambda: sync_gradients({"w": 1.0}, P(), "dp"),
    "other shards": lambda: zero(sgd(), P("tp"), P("dp"), ()).update(X, X, sgd().init(X)),
    "not pending": lambda: sync_gradients(X, P(), "dp", into=P(("dp", "cp"))),
    "shard_over": lambda: shard_over(
        X, {"w": P("dp")}, "dp", make_mesh((2,), ("dp",), kind="abstract")
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_specs_that_do_not_match_are_an_error(name: str) -> None:
    make = ERRORS[name]
    with told(SpecError):
        make()


def test_axes_of_one_rank_pack_no_buffer() -> None:
    # w1, b1 and w2 over dp, one by one; scale and gain over dp and tp, together.
    assert count(make_mesh((1, 2), AXES, kind="abstract"), into=False) == 4
    assert_equal(
        gradients(make_mesh((1, 2), AXES, kind="simulated"), None),
        on_one_device(),
    )
