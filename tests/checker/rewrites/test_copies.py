"""After a write, what may or may not share the memory, as strides decide, is not read."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, ShardTypeError, all_gather, make_mesh, shard_map
from shardmap_torch.types import R

Body = Callable[[Tensor], Tensor]


def write_into_reshaped(x: Tensor) -> Tensor:
    y = x * 2
    y.reshape(-1).add_(1)
    return y


def write_into_contiguous(x: Tensor) -> Tensor:
    y = x * 2
    z = y.contiguous()
    z.add_(1)
    return y + 1


def write_into_what_the_check_copies(x: Tensor) -> Tensor:
    y = x * 2
    z = y.t().contiguous()
    z.add_(1)
    return y


def write_into_a_view_of_flattened(x: Tensor) -> Tensor:
    y = x * 2
    torch.flatten(y).view(-1, 2).add_(1)
    return y


def write_into_the_source(x: Tensor) -> Tensor:
    y = x * 2
    z = y.ravel()
    y.detach().add_(1)
    return z.unsqueeze(0).reshape(x.shape)


def gather_the_source(x: Tensor) -> Tensor:
    y = x * 2
    z = y.reshape(-1)
    z.add_(1)
    return x * all_gather(y, "tp", dim=1, dst=R).sum()


STALE = (
    write_into_reshaped,
    write_into_contiguous,
    write_into_what_the_check_copies,
    write_into_a_view_of_flattened,
    write_into_the_source,
    gather_the_source,
)


@pytest.mark.parametrize("body", STALE)
@pytest.mark.parametrize("check", ["local", "global"])
def test_what_a_write_changes_only_by_strides_is_not_read(
    body: Body, check: Literal["local", "global"]
) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    mapped = shard_map(
        body, mesh=mesh, in_specs=P(None, "tp"), out_specs=P(None, "tp"), check=check
    )
    with pytest.raises(ShardTypeError) as error:
        mapped(torch.ones(4, 8, requires_grad=True))
    head, fix = str(error.value).splitlines()
    assert head.startswith(f"{body.__name__}: at test_copies.py:")
    assert head.endswith(
        "a tensor is read after a write into one that may share its memory: whether reshape, "
        "flatten and contiguous copy depends on strides, which differ between meshes."
    )
    assert fix == "Fix: take it again after the write, or clone it before."


def write_and_go_on(x: Tensor) -> Tensor:
    y = (x * 2).reshape(4, 2, -1)
    y.add_(1).transpose(0, 1)[0].mul_(2)
    y = y.transpose(1, 2).contiguous()
    y.relu_()
    return y.transpose(1, 2).reshape(x.shape)


def take_again(x: Tensor) -> Tensor:
    y = x * 2
    total = y.reshape(-1) * 3
    y.add_(1)
    return y.reshape(-1).reshape(x.shape) + total.reshape(x.shape)


def write_into_a_view(x: Tensor) -> Tensor:
    y = (x * 2).contiguous()
    y.view(-1).add_(1)
    return y


@pytest.mark.parametrize("body", [write_and_go_on, take_again, write_into_a_view])
@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_what_is_written_may_be_read(body: Body, simulate: Literal["vmap", "ranks"]) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=simulate)
    mapped = shard_map(body, mesh=mesh, in_specs=P(None, "tp"), out_specs=P(None, "tp"))
    x = torch.randn(4, 8, dtype=torch.float64).requires_grad_()
    one = x.detach().clone().requires_grad_()
    here, there = mapped(x), torch.cat([body(half) for half in one.chunk(2, 1)], 1)
    torch.testing.assert_close(here, there)
    for y in (here, there):
        y.square().sum().backward()
    torch.testing.assert_close(x.grad, one.grad)
