"""A call is taken for the one before only if its leaves have the same signature."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from shardmap_torch import Mesh, P, device_put, make_mesh
from shardmap_torch.boundary.matching import SignatureCache


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield make_mesh((1,), ("i",), kind="process_group")
    finally:
        dist.destroy_process_group()


def placed(mesh: Mesh, x: Tensor, spec: P, grad: bool = False) -> Tensor:
    y: Tensor = device_put(x, mesh, spec, as_dtensor=True)
    return y.detach().requires_grad_(grad)


def test_a_call_is_recognised_by_the_specs_of_its_dtensors(mesh: Mesh) -> None:
    ones, rows, columns = torch.ones(2, 2), P("i"), P(None, "i")
    calls: list[list[Any]] = [
        [placed(mesh, ones, rows)],
        [placed(mesh, ones * 2, rows)],  # as the first: other values
        [placed(mesh, ones, columns)],
        [placed(mesh, torch.ones(4, 2), columns)],
        [placed(mesh, torch.ones(4, 2), columns, grad=True)],
        [ones],
        [ones.double()],
        [ones.double(), ones],
        [3],
        [4],  # as before: a number is compared by others
    ]
    cache: SignatureCache[int] = SignatureCache()
    found = [cache.get(("f",), call, partial(int, at)) for at, call in enumerate(calls)]
    assert found == [0, 0, 2, 3, 4, 5, 6, 7, 8, 8]
    assert cache.get(("g",), calls[-1], lambda: -1) == -1
