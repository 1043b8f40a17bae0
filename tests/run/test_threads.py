"""Calls on rank threads: what they keep, and what they refuse."""

import gc
import weakref

import torch
from torch import Tensor

from shardmap_torch import I, P, R, ShardTypeError, all_reduce, make_mesh
from tests.programs.support.everywhere import unchecked as shard_map
from tests.support.golden import told

MESH = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")


def test_the_graphs_of_the_ranks_are_freed_with_the_result() -> None:
    made: list[weakref.ref[Tensor]] = []

    def body(x: Tensor) -> Tensor:
        h = all_reduce(x * 2, "tp", dst=R)
        made.append(weakref.ref(h))
        return h * h * x

    gc.collect()
    gc.disable()  # without the collector, a cycle would keep them
    try:
        x = torch.ones(4, requires_grad=True)
        y = shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))(x)
        y.sum().backward()
        assert all(h() is not None for h in made)
        del y
        assert all(h() is None for h in made)
    finally:
        gc.enable()


def test_a_closure_with_different_gradients_on_the_ranks_is_an_error() -> None:
    w = torch.tensor(2.0, requires_grad=True)

    def scaled(x: Tensor) -> Tensor:
        return all_reduce((x * w).sum(), "tp", dst=I)

    y = shard_map(scaled, mesh=MESH, in_specs=P("tp"), out_specs=P())(torch.arange(4.0))
    with told(ShardTypeError):
        y.backward()


def test_ranks_show_a_missing_sum_of_the_gradient() -> None:
    """invariant= promises that all ranks repeat one computation; here each uses w for its rows."""
    x, w = torch.arange(6.0).reshape(2, 3), torch.ones(3, requires_grad=True)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce((x * w).sum(), "tp", dst=I)

    gradients: list[Tensor] = []
    for spec in (P(invariant="tp"), P(replicate="tp")):
        y = shard_map(loss, mesh=MESH, in_specs=(P("tp"), spec), out_specs=P())(x, w)
        gradients += torch.autograd.grad(y, w)
    assert gradients[0].tolist() == [0.0, 1.0, 2.0]  # that of the first rank alone
    assert gradients[1].tolist() == [3.0, 5.0, 7.0]
