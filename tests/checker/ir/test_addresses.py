"""Bodies may not ask where a tensor lies in memory; torch's own code may."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, ShardTypeError, make_mesh, shard_map

Body = Callable[[Tensor], Tensor]


def by_offset(x: Tensor) -> Tensor:
    return x * int(x.storage_offset() + 1)


def by_pointer(x: Tensor) -> Tensor:
    return x * (x.data_ptr() % 7)


@pytest.mark.parametrize(
    ("body", "name"), [(by_offset, "storage_offset"), (by_pointer, "data_ptr")]
)
@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
@pytest.mark.parametrize("check", ["local", "global"])
def test_a_body_that_depends_on_a_place_in_memory_is_refused(
    body: Body, name: str, simulate: Literal["vmap", "ranks"], check: Literal["local", "global"]
) -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate=simulate)
    with pytest.raises(ShardTypeError) as error:
        shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=check)(torch.ones(4))
    head, fix = str(error.value).splitlines()
    assert head.startswith(f"{body.__name__}: {name}() at test_addresses.py:")
    assert head.endswith(
        "tells where a tensor lies in memory, which differs between ranks, and it would count as "
        "equal on all ranks."
    )
    assert fix == "Fix: leave it out of the body; to compare tensors, use `is`."


def test_torch_s_own_code_may_ask() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="ranks")
    lstm = torch.nn.LSTM(3, 3)  # it asks whether its weights share memory
    f = shard_map(lambda x: lstm(x)[0], mesh=mesh, in_specs=P(None, "dp"), out_specs=P(None, "dp"))
    with torch.no_grad():
        x = torch.ones(2, 4, 3)
        torch.testing.assert_close(f(x), lstm(x)[0])
