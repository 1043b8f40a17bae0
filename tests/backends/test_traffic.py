"""Bytes are counted at one door: the same on every kind of mesh, and as the table says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    make_mesh,
    ppermute,
    reduce_scatter,
    shard_map,
)
from shardmap_torch.backends.traffic import counting_bytes
from tests.support.pool import Gloo


def program(x: Tensor) -> Tensor:
    total = all_reduce(x, "tp", dst=R) + all_reduce(x.amax(), "tp", dst=R, op="max").detach()
    full = all_gather(x, "tp", dim=0, dst=R).sum(0, keepdim=True)
    own = reduce_scatter(x, "tp", dim=0).sum(0, keepdim=True)
    swapped = all_to_all(x, "tp", split_dim=1, concat_dim=0).reshape(4, 6)
    moved = ppermute(x, "tp", [(0, 1)]) + broadcast(x, "tp", 1, dst=I).detach()
    return total * x + full + own + swapped * moved


def counted(**options: Any) -> dict[str, int]:
    mesh = make_mesh((2,), ("tp",), **options)
    f = shard_map(program, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    x = torch.arange(48.0).reshape(8, 6)
    f(x)
    with counting_bytes() as sent:
        y = f(x)
    assert y is not None
    return dict(sent)


def on_processes() -> dict[str, int]:
    return counted(kind="process_group")


def test_every_kind_of_mesh_counts_the_same_bytes(gloo: Gloo) -> None:
    batched = counted(kind="simulated", simulate="vmap")
    threads = counted(kind="simulated", simulate="ranks")
    assert threads == {name: 2 * num_bytes for name, num_bytes in batched.items()}  # both ranks
    assert gloo(2).run(on_processes) == [batched, batched]


def test_bytes_are_those_of_the_table() -> None:
    forward: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": lambda x: all_reduce(x, "tp", dst=I),
        "all_gather": lambda x: all_gather(x, "tp", dst=I),
    }
    mesh = make_mesh((4,), ("tp",), kind="simulated", simulate="vmap")
    x = torch.arange(8.0)
    for name, factor in (("all_reduce", 2 * 3 / 4), ("all_gather", 3)):
        f = shard_map(forward[name], mesh=mesh, in_specs=P("tp"), out_specs=P())
        with counting_bytes() as sent:
            f(x)
        assert sent == {name: round(factor * 2 * x.element_size())}
