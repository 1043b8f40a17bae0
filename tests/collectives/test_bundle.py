"""Trees travel in one message, nothing travels over one rank, and each value is as if by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    convert,
    make_mesh,
    ppermute,
    reduce_scatter,
    shard_map,
    value_and_grad,
)
from shardmap_torch.backends.communicator import GlooWire
from shardmap_torch.collectives import bundle
from tests.support.pool import Gloo, run_alone

Tree = Any


class Messages:
    """Counts the sums that are sent, by their number of elements."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        own = GlooWire.reduce

        def reduce(wire: GlooWire, x: Tensor, op: str) -> Tensor:
            self.sizes.append(x.numel())
            return own(wire, x, op)

        patch.setattr(GlooWire, "reduce", reduce)


def run_body(mesh: Mesh, body: Callable[[Tensor], Tree]) -> tuple[list[Tree], list[int]]:
    """Returns the body's results on this rank, unchecked, and the messages that it sent."""
    found: list[Tree] = []

    def keeping(x: Tensor) -> Tensor:
        found.append(body(x))
        return x

    with pytest.MonkeyPatch.context() as patch:
        messages = Messages(patch)
        shard_map(keeping, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check=False)(
            torch.arange(2.0, dtype=torch.float64)
        )
    return found, messages.sizes


def tree(x: Tensor) -> Tree:
    """Different on each rank; the tensors have 2, 3, 4 and 1 elements."""
    own = x.item()
    return {
        "a": torch.full((2,), 1.0 + own),
        "b": [torch.full((3, 1), 2.0 + own), torch.full((4,), 3 + int(own))],
        "c": torch.tensor(own == 0),
    }


def add_trees() -> None:
    mesh = make_mesh((2,), ("tp",))
    (total,), sizes = run_body(mesh, lambda x: all_reduce(tree(x), "tp", dst=R))
    assert sizes == [5, 5]  # float32, and int64 with the bool among them
    assert total["a"].tolist() == [3.0, 3.0]
    assert total["b"][0].tolist() == [[5.0]] * 3
    assert total["b"][1].tolist() == [7] * 4
    assert total["c"].item() == 1
    total["a"].add_(1)
    assert total["b"][0].tolist() == [[5.0]] * 3
    assert total["a"]._version == 1
    assert total["b"][0]._version == 0
    (mean,), sizes = run_body(mesh, lambda x: all_reduce(tree(x)["b"][:1], "tp", dst=R, op="mean"))
    assert mean[0].tolist() == [[2.5]] * 3


def test_a_tree_is_summed_in_one_message_a_dtype(gloo: Gloo) -> None:
    gloo(2).run(add_trees)


def pull_back(x: Tensor) -> tuple[Tensor, ...]:
    """Gradients of 3 parameters, and second derivatives with respect to them."""
    params = [torch.full((n,), 2.0, dtype=torch.float64, requires_grad=True) for n in (2, 3, 4)]
    resting = torch.ones(5, dtype=torch.float64)
    *shared, same = convert([*params, resting], "tp", src=I, dst=R)
    assert not same.requires_grad
    loss = torch.stack([(p**3).sum() * (x.sum() + 1) for p in shared[:2]]).sum()
    grads = torch.autograd.grad(loss, params[:2], create_graph=True)
    total = torch.stack([g.sum() for g in grads]).sum()
    return (*grads, *torch.autograd.grad(total, params[:2]))


def differentiate_trees() -> None:
    mesh = make_mesh((2,), ("tp",))
    (grads,), sizes = run_body(mesh, pull_back)
    # Ranks scale by 1 and 2: first derivatives 3 p^2 * 3, second ones 6 p * 3.
    assert [g.unique().tolist() for g in grads] == [[36.0], [36.0], [36.0], [36.0]]
    assert 5 in sizes
    assert sum(sizes) <= 15


def test_the_gradients_of_a_converted_tree_are_summed_together(gloo: Gloo) -> None:
    gloo(2).run(differentiate_trees)


def add_large() -> None:
    mesh = make_mesh((2,), ("tp",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "SMALL", 12)  # bytes; the integers have 32
        _, sizes = run_body(mesh, lambda x: all_reduce(tree(x), "tp", dst=R))
    assert sorted(sizes) == [1, 4, 5]


def test_a_large_tensor_travels_by_itself(gloo: Gloo) -> None:
    gloo(2).run(add_large)


ALONE: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda x: all_reduce(x, "dp", dst=R), lambda x: x),
    (lambda x: all_reduce(x, "dp", dst=I, op="max"), lambda x: x),
    (lambda x: all_gather(x, "dp", dim=1, dst=R), lambda x: x),
    (lambda x: all_gather(x, "dp", dim=1, dst=R, tiled=False), lambda x: x.unsqueeze(1)),
    (lambda x: reduce_scatter(x, "dp", dim=1), lambda x: x),
    (lambda x: reduce_scatter(x, "dp", dim=1, sizes=[3]), lambda x: x),
    (lambda x: all_to_all(x, "dp", split_dim=0, concat_dim=1), lambda x: x),
    (lambda x: ppermute(x, "dp", [(0, 0)]), lambda x: x),
    (lambda x: ppermute(x, "dp", []), torch.zeros_like),
    (lambda x: broadcast(x, "dp", 0, dst=R), lambda x: x),
    (lambda x: convert(x, "dp", src=V, dst="P", dim=0), lambda x: x),
]


def be_alone() -> None:
    mesh = make_mesh((1, 2), ("dp", "tp"))
    for move, wanted in ALONE:

        def body(_: Tensor, move: Callable[[Tensor], Tensor] = move) -> tuple[Tensor, ...]:
            x = torch.arange(6.0).reshape(3, 2).mT.requires_grad_()
            y = move(x)
            (grad,) = torch.autograd.grad(y.square().sum(), x)
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            return x.detach(), y.detach(), grad

        with pytest.MonkeyPatch.context() as patch:
            for sending in ("_wait", "_start_swap"):  # whatever is sent fails
                patch.setattr(GlooWire, sending, None)
            ((x, y, grad),), _ = run_body(mesh, body)
        assert y.equal(wanted(x))
        assert grad.equal(2 * wanted(x).reshape(x.shape))


def test_nothing_is_sent_over_an_axis_of_one_rank(gloo: Gloo) -> None:
    gloo(2).run(be_alone)


def cast_alone() -> None:
    mesh = make_mesh((1, 2), ("dp", "tp"))

    def body(_: Tensor) -> Tensor:
        x = torch.ones(2, requires_grad=True)
        shared = convert(x, "dp", src=I, dst=R)
        assert shared is x
        return shared

    run_body(mesh, body)


def test_a_cast_over_one_rank_costs_no_autograd_function(gloo: Gloo) -> None:
    gloo(2).run(cast_alone)


def shapes_on_a_fake_group() -> tuple[torch.Size, torch.Size]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = make_mesh((2, 4), ("dp", "tp"))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return all_reduce((x @ w).sum(), ("dp", "tp"), dst=I)

    in_specs, out_specs = (P("tp"), P("dp", "tp")), (P(), P("tp", partial={"dp"}))
    step = shard_map(value_and_grad(loss), mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    for _ in range(2):
        value, gradient = step(torch.ones(4, 3), torch.ones(2, 4))
    return value.shape, gradient.shape


@pytest.mark.slow
def test_a_checked_step_runs_on_the_fake_process_group_of_torch() -> None:
    assert run_alone(shapes_on_a_fake_group) == ((), (4, 3))
