"""Keys derive from keys; what they are folded with is never used twice."""

from typing import Any

import pytest
import torch

from shardmap_torch import CollectiveError, Mesh, P, ShardMapError, make_mesh, random, shard_map
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on
from tests.programs.support.harness import global_value
from tests.support.golden import told
from tests.support.pool import Gloo


def test_seeds_of_any_size_give_keys() -> None:
    assert random.key(-1).item() == -1
    assert random.key(2**64 + 3).item() == 3
    assert random.key(2**63).item() == -(2**63)


def test_split_and_fold_in_agree() -> None:
    key = random.key(5)
    keys = random.split(key, 40)
    assert [random.fold_in(key, i).item() for i in range(40)] == keys.tolist()
    assert torch.equal(random.fold_in(key, torch.arange(40)), keys)
    assert len(set(keys.tolist())) == 40


def folded_keys(mesh: Mesh) -> None:
    axes = tuple(mesh.axis_names)
    every: list[int] = []
    groups: list[Any] = [*axes, axes, axes[::-1]]
    for axis in groups:
        keys = shard_map(
            lambda key, axis=axis: random.fold_axis(key, axis).reshape(1),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(axis),
        )(random.key(3))
        every += global_value(keys).tolist()
    # An axis has as many keys as ranks, and no two of all of these are equal.
    assert len(set(every)) == len(every) == 2 + 2 + 4 + 4
    plain = random.split(random.key(3), 16).tolist()
    assert not set(every) & {*plain, *random.bits(random.key(3), (64,)).tolist()}
    key = random.key(3)
    chained = shard_map(
        lambda key: random.fold_axis(random.fold_axis(key, axes[0]), axes[1]).reshape(1),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(axes),
    )(key)
    assert len(set(global_value(chained).tolist())) == 4


@ON_EVERY_MESH
def test_each_rank_of_an_axis_gets_a_key_of_its_own(kind: str, gloo: Gloo) -> None:
    run_on(kind, folded_keys, gloo, (2, 2), ("dp", "tp"))


def test_a_tensor_that_is_no_key_is_refused_by_name() -> None:
    with told(ShardMapError, 2):
        random.split(torch.ones(2))
    with told(ShardMapError):
        random.fold_in(3, 1)  # type: ignore[arg-type]


def test_folding_over_an_axis_needs_a_body() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    with pytest.raises(CollectiveError, match=r"axis_index was called outside shard_map"):
        random.fold_axis(random.key(0), "dp")
    f = shard_map(lambda k: random.fold_axis(k, "tp"), mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(CollectiveError, match=r"no axis 'tp'"):
        f(random.key(0))
