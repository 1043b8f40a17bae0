"""Layers' regions take the types of the other axes from their arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    all_reduce,
    axis_index,
    checkpoint,
    explain,
    make_mesh,
    shard_map,
)
from shardmap_torch.nn.region import per_rank, region_types


def test_letters_carry_the_other_axes_from_arguments_to_results() -> None:
    found = region_types(
        "...kv,...->...v,k", {"v": "tp"}, (), [P("dp", None, "cp"), P("dp")], [4, 2]
    )
    assert found == (
        (P("dp", None, "cp", "tp"), P("dp", None)),
        (P("dp", None, "tp"), P("cp")),
    )


def test_several_axes_of_one_dimension_are_one_entry() -> None:
    found = region_types("vd->d", {"v": ("a", "b")}, ("a", "b"), [P(("a", "b"))], [2])
    assert found == ((P(("a", "b"), None),), P(None, partial={"a", "b"}))


@per_rank("n,vd->nd", over={"v": "tp"}, partial="tp")
def rows(ids: Tensor, table: Tensor) -> Tensor:
    local = ids - axis_index("tp") * table.shape[0]
    owned = (local >= 0) & (local < table.shape[0])
    return table[local * owned] * owned.unsqueeze(1)


IDS, TABLE = torch.tensor([3, 0, 1, 2]), torch.arange(8.0).reshape(4, 2)


@pytest.mark.parametrize("check", ["local", "global"])
@pytest.mark.parametrize("batch", [P(), P("dp")])
def test_one_function_serves_programs_with_and_without_another_axis(batch: P, check: Any) -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
    f = shard_map(
        lambda i, t: all_reduce(rows(i, t), "tp", dst=I),
        mesh=mesh,
        in_specs=(batch, P("tp")),
        out_specs=batch,
        check=check,
    )
    assert f(IDS, TABLE).equal(TABLE[IDS])
    assert "  local_region rows" in str(explain(f, IDS, TABLE))


@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_may_compute_it_again(inside: bool) -> None:
    """Nothing is known there about how the other axes shard."""
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")

    def scaled(scale: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        found: Tensor = all_reduce(rows(ids, table), "tp", dst=I) * scale.unsqueeze(1)
        return found

    def total(scale: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        found: Tensor = checkpoint(scaled, scale, ids, table).square().sum()
        return found

    def body(scale: Tensor, ids: Tensor, table: Tensor) -> Any:
        if inside:
            return torch.func.grad(total)(scale, ids, table)
        return all_reduce(total(scale, ids, table), "dp", dst=I)

    specs, out = (P("dp"), P("dp"), P("tp")), P("dp") if inside else P()
    f: Any = shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check="global")
    scale = torch.arange(1.0, 5.0)
    found = (f if inside else torch.func.grad(f))(scale, IDS, TABLE)
    assert found.equal(2 * scale * TABLE[IDS].square().sum(1))


def test_an_argument_that_the_layers_own_axis_shards_in_another_dimension_is_refused() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    f = shard_map(
        lambda i, t: all_reduce(rows(i, t), "tp", dst=I),
        mesh=mesh,
        in_specs=(P("tp"), P("tp")),
        out_specs=P(),
        check="global",
    )
    with pytest.raises(ShardTypeError, match="rows is not what it is on one device: dim 0 is"):
        f(IDS, TABLE)
