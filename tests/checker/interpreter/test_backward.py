"""`torch.autograd.backward` in a body: seen, typed, and the same as on one device."""

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, Mesh, P, ShardTypeError, all_reduce, make_mesh, shard_map
from tests.programs.support.everywhere import ON_REAL_RANKS, run_on, same
from tests.programs.support.harness import random
from tests.support.golden import hold_own
from tests.support.pool import Gloo


def body(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of two losses of one weight, summed over the ranks."""
    w, x = w.clone().detach().requires_grad_(), x.detach().requires_grad_()
    first, second = (w * x).square(), w.exp() * x.sum(0)
    torch.autograd.backward([first, second.sum()], [torch.ones_like(first), None])
    assert w.grad is not None
    assert x.grad is not None
    return all_reduce(w.grad, "tp", dst=I), x.grad


def gradients(mesh: Mesh) -> None:
    w, x = random((3,), 0), random((2 * mesh.size, 3), 1)
    f = shard_map(body, mesh=mesh, in_specs=(P(), P("tp")), out_specs=(P(), P("tp")))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).square().sum() + (w.exp() * x.sum(0)).sum()

    same(f(w, x), torch.func.grad(loss, (0, 1))(w, x))


@ON_REAL_RANKS
def test_gradients_of_several_values_are_those_of_one_device(kind: str, gloo: Gloo) -> None:
    run_on(kind, gradients, gloo, (3,))


MESH = make_mesh((2,), ("tp",), kind="simulated")


def test_inputs_that_are_no_leaves_are_refused_and_others_limit_the_backward() -> None:
    def limited(w: Tensor, x: Tensor, of_leaf: bool) -> Tensor:
        leaf, other = (w.clone().detach().requires_grad_() for _ in range(2))
        inner = leaf * other
        torch.autograd.backward((inner * x).sum(), inputs=[leaf if of_leaf else inner])
        assert other.grad is None
        assert leaf.grad is not None
        return all_reduce(leaf.grad, "tp", dst=I)

    f = shard_map(limited, mesh=MESH, in_specs=(P(), P("tp"), None), out_specs=P())
    assert f(torch.tensor(2.0), torch.ones(4), True).item() == 8.0
    with pytest.raises(ShardTypeError) as caught:
        f(torch.tensor(2.0), torch.ones(4), False)
    hold_own(str(caught.value))
