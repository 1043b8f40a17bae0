"""One body sees the same ranks as several grids; types, values and gradients follow."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    S,
    ShardTypeError,
    SpecError,
    V,
    all_gather,
    all_reduce,
    assert_type,
    axis_index,
    axis_size,
    check_program,
    convert,
    device_put,
    full,
    local_region,
    make_mesh,
    nn,
    reshard,
    shard_map,
    visualize_sharding,
)
from shardmap_torch.optim import global_norm, sync_gradients
from tests.nn.support.cases import random
from tests.support.pool import Gloo

EXPERTS, WIDTH = 4, 6
SPECS = {"up": P(None, "tp"), "down": P("tp"), "router": P(), "experts": P("ep")}


def mesh_of(dp: int, cp: int, tp: int, edp: int, ep: int, **options: Any) -> Mesh:
    views = [{"edp": edp, "ep": ep, "tp": tp}, {"batch": dp * cp, "tp": tp}]
    return make_mesh((dp, cp, tp), ("dp", "cp", "tp"), views=views, **options)


def params() -> dict[str, Tensor]:
    return {
        "up": random(WIDTH, 8),
        "down": random(8, WIDTH),
        "router": random(WIDTH, EXPERTS),
        "experts": random(EXPERTS, WIDTH, WIDTH),
    }


def expert(weights: Tensor, rows: Tensor, sizes: Tensor) -> Tensor:
    return torch.tanh(nn.grouped_linear(rows, weights, sizes))


def layer(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """x [b/dp, t/cp, d]: a dense layer over "tp", then experts over "ep"."""
    up, down = convert((weights["up"], weights["down"]), "batch", src=I, dst=R)
    x = x + nn.row_linear(torch.tanh(nn.column_linear(x, up, "tp")), down, "tp")
    router, own = convert((weights["router"], weights["experts"]), "edp", src=I, dst=R)
    y, _ = nn.dropless_moe(x, router, own, "ep", expert=expert, num_selected=2, batch_axis="edp")
    return x + y


def layer_on_one_device(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    x = x + torch.tanh(x @ weights["up"]) @ weights["down"]
    values, chosen = (x @ weights["router"]).softmax(-1).topk(2, -1)
    made = torch.tanh(torch.einsum("btd,edf->btef", x, weights["experts"]))
    taken = made.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, WIDTH))
    return x + (taken * (values / values.sum(-1, keepdim=True)).unsqueeze(-1)).sum(-2)


def outcome(f: Callable[..., Tensor]) -> list[Tensor]:
    weights = {name: value.requires_grad_() for name, value in params().items()}
    x = random(4, 4, WIDTH, seed=3).requires_grad_()
    y = full(f(weights, x))  # on three axes torch takes seconds to square a DTensor
    grads = torch.autograd.grad(y.square().sum(), [*weights.values(), x])
    found: list[Tensor] = full([y.detach(), *grads])
    return found


def on(mesh: Mesh, check: Any = "global") -> list[Tensor]:
    lies = P("dp", "cp")
    f = shard_map(layer, mesh=mesh, in_specs=(SPECS, lies), out_specs=lies, check=check)
    return outcome(f)


FOLDED = {
    "split": (4, 2, 1, 2, 4),  # "ep" has a part of "dp", and all of "cp"
    "with tp": (2, 2, 2, 2, 2),
    "flat": (2, 2, 1, 1, 4),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("simulate", ["ranks", "auto"])
@pytest.mark.parametrize("name", FOLDED)
def test_a_folded_mixture_of_experts_equals_one_device(name: str, simulate: Any) -> None:
    mesh = mesh_of(*FOLDED[name], kind="simulated", simulate=simulate)
    for one, other in zip(on(mesh), outcome(layer_on_one_device), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=1e-10)


def test_on_processes_it_equals_one_device(gloo: Gloo) -> None:
    expected = outcome(layer_on_one_device)
    for found in gloo(4).run(_in_worker, timeout=200):
        for values in found:
            for one, other in zip(values, expected, strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=1e-10)


def _in_worker() -> list[list[Tensor]]:
    return [on(mesh_of(4, 1, 1, 2, 2)), on(mesh_of(2, 2, 1, 1, 4))]


SPLIT = mesh_of(4, 2, 1, 2, 4, kind="simulated")
X = random(8, 8)


def check(body: Callable[..., Any], in_spec: P, out_spec: P, check: Any = True) -> Tensor:
    f = shard_map(body, mesh=SPLIT, in_specs=in_spec, out_specs=out_spec, check=check)
    y: Tensor = f(X)
    return y


@pytest.mark.parametrize("strictness", [True, "global"])
def test_types_are_carried_where_axes_coincide(strictness: Any) -> None:
    def body(x: Tensor) -> Tensor:
        assert_type(x, {"dp": V, "edp": V, "ep": V, "cp": V})
        x = all_gather(x, "cp", dim=1, dst=I)
        assert_type(x, {"cp": I, "dp": V, "edp": V})
        return x

    check(body, P("dp", "cp"), P("dp"), strictness)


def test_shards_are_known_by_the_axes_of_each_view() -> None:
    check(lambda x: assert_type(x, {"dp": S(0), "edp": S(0), "tp": I}), P("dp"), P("dp"), "global")
    check(lambda x: x, P("batch"), P(("edp", "ep")), "global")
    with pytest.raises(ShardTypeError):
        check(lambda x: x, P("batch"), P(("ep", "edp")), "global")


def in_turn(x: Tensor, first: str, second: str) -> Tensor:
    return all_reduce(all_reduce(x.sum(0), first, dst=I), second, dst=I)


@pytest.mark.parametrize("strictness", [True, "global"])
def test_a_sum_over_a_part_of_an_axis_leaves_the_rest_varying(strictness: Any) -> None:
    with pytest.raises(ShardTypeError, match="dp&ep"):
        check(lambda x: all_reduce(x.sum(0), "edp", dst=I), P("dp"), P(), strictness)
    y = check(lambda x: all_reduce(x.sum(0), "dp", dst=I), P("dp"), P(), strictness)
    torch.testing.assert_close(y, X.sum(0))
    y = check(lambda x: in_turn(x, "edp", "dp&ep"), P("dp"), P())
    torch.testing.assert_close(y, X.sum(0))


def test_indices_and_sizes_are_those_of_the_view() -> None:
    def body() -> Tensor:
        sizes = [axis_size(axis) for axis in ("dp", "cp", "edp", "ep", "batch", "tp")]
        assert sizes == [4, 2, 2, 4, 8, 1]
        places = [axis_index(axis) for axis in ("dp", "cp", "edp", "ep", "batch")]
        return torch.stack(places).reshape(1, -1)

    f = shard_map(body, mesh=SPLIT, in_specs=(), out_specs=P("batch"))
    rank = torch.arange(8)
    expected = torch.stack([rank // 2, rank % 2, rank // 4, rank % 4, rank], 1)
    assert f().equal(expected)


def test_values_are_resharded_between_views() -> None:
    y = check(lambda x: reshard(x, P("dp", "cp"), P("ep", "edp")), P("dp", "cp"), P("ep", "edp"))
    assert y.equal(X)


def test_regions_and_inner_bodies_name_axes_of_views() -> None:
    double = local_region(lambda x: x * 2, in_types=(P("dp"),), out_types=P("dp"))
    assert check(double, P("dp"), P("dp"), "global").equal(2 * X)
    inner = shard_map(
        lambda x: all_reduce(x.sum(0), "ep", dst=I),
        in_specs=P("ep"),
        out_specs=P(),
        axis_names={"ep"},
    )
    outer = shard_map(inner, mesh=SPLIT, in_specs=P(), out_specs=P(), axis_names={"edp", "tp"})
    torch.testing.assert_close(outer(X), X.sum(0))


def test_gradients_are_summed_and_measured_by_specs_of_views() -> None:
    def body(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        used = convert(w, "edp", src=I, dst=R)
        (grad,) = torch.autograd.grad((used * x.sum(0)).sum(), used)
        total = sync_gradients(grad, P("ep"), axis="batch")
        return total, global_norm(total, P("ep"))

    f = shard_map(body, mesh=SPLIT, in_specs=(P("ep"), P("edp", "ep")), out_specs=(P("ep"), P()))
    total, norm = f(torch.ones(8, dtype=torch.float64).requires_grad_(), X)
    torch.testing.assert_close(total, X.sum(0))
    torch.testing.assert_close(norm, X.sum(0).norm())


@pytest.mark.parametrize("strictness", [True, "global"])
@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_a_view_s_axis_of_one_rank_asks_nothing_of_types(simulate: Any, strictness: Any) -> None:
    mesh = mesh_of(2, 2, 1, 1, 4, kind="simulated", simulate=simulate)

    def body(x: Tensor) -> Tensor:
        assert_type(x, {"edp": V, "ep": V})
        x = convert(all_reduce(x, "edp", dst=I), "edp", src=I, dst=R) * axis_size("edp")
        x = all_gather(x, "edp", dim=0, dst=R)
        return all_reduce(x.sum(), ("edp", "ep"), dst=I)

    f = shard_map(body, mesh=mesh, in_specs=P("dp", ("edp", "cp")), out_specs=P(), check=strictness)
    torch.testing.assert_close(f(X), X.sum())


def test_unknown_axes_are_named() -> None:
    with pytest.raises(SpecError, match="names 'pp'"):
        check(lambda x: x, P("pp"), P("pp"))


def test_placing_and_drawing_know_views(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_put(X, SPLIT, P("ep", "edp")).equal(X)
    visualize_sharding((8, 8), mesh=SPLIT, spec=P("ep"))
    assert "0, 4" in capsys.readouterr().out
    abstract = mesh_of(4, 2, 1, 2, 4, kind="abstract")
    check_program(
        shard_map(partial(torch.neg), mesh=abstract, in_specs=P("ep"), out_specs=P("ep")), X
    )
