"""Calls of torch.distributed do the same, checked or not, on simulated ranks and on processes."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from shardmap_torch import CollectiveError, Mesh, P, axis_group, full, make_mesh, shard_map
from shardmap_torch.errors import ShardTypeError
from tests.programs.support.everywhere import KINDS, run_on, same
from tests.support.golden import unplaced
from tests.support.pool import Gloo

# torch 2.13 renames some of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*")

X: Final = torch.arange(32.0, dtype=torch.float64).sin().view(8, 4)
TOP, BOTTOM = X.chunk(2)


class Calls:
    """Programs over the group of two ranks along "tp"."""

    def __init__(self, mesh: Mesh) -> None:
        self.group: Any = axis_group(mesh, "tp")

    def gathered_list(self, x: Tensor) -> Tensor:
        out = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(out, x, group=self.group)
        return torch.cat(out, -1)

    def scattered_list(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.reduce_scatter(out, [x, 2 * x], group=self.group)
        return out

    def exchanged_list(self, x: Tensor) -> Tensor:
        sent = [part.contiguous() for part in x.chunk(2)]
        out = [torch.empty_like(part) for part in sent]
        dist.all_to_all(out, sent, group=self.group)
        return torch.cat(out)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.broadcast(x, group=self.group, group_src=1)
        return x

    def ring(self, x: Tensor) -> Tensor:
        rank, size, out = self.group.rank(), self.group.size(), torch.empty_like(x)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x.clone(), group=self.group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, out, group=self.group, group_peer=(rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()
        return out

    def ring_of_ranks(self, x: Tensor) -> Tensor:
        rank, size, out = dist.get_rank(self.group), self.group.size(), torch.empty_like(x)
        to, source = ((rank + by) % size for by in (1, -1))
        sent = dist.isend(x.clone(), dist.get_global_rank(self.group, to), group=self.group)
        work = dist.irecv(out, dist.get_global_rank(self.group, source), group=self.group)
        assert sent is not None
        assert work is not None
        dist.barrier(group=self.group)
        work.wait()
        sent.wait()
        return out

    def functional_gather(self, x: Tensor) -> Any:
        return functional.all_gather_tensor_autograd(x, 0, self.group) * x.sum()

    def functional_scatter(self, x: Tensor) -> Any:
        return functional.reduce_scatter_tensor_autograd(x * x, "sum", 0, self.group)

    def differentiable_sum(self, x: Tensor) -> Any:
        return differentiable.all_reduce(x * x, group=self.group) * x

    def differentiable_gather(self, x: Tensor) -> Tensor:
        return torch.cat(differentiable.all_gather(x, group=self.group)) * x.sum()

    def differentiable_exchange(self, x: Tensor) -> Tensor:
        sent = [part.contiguous() for part in (x * x).chunk(2)]
        out = [torch.empty_like(part) for part in sent]
        return torch.cat(differentiable.all_to_all(out, sent, group=self.group))


class CallsOfProcesses(Calls):
    """Programs that only processes run unchecked: operators by name, and the group of all ranks."""

    def operator(self, x: Tensor) -> Tensor:
        out = torch.ops._c10d_functional.all_reduce.default(x, "sum", self.group.group_name)
        made: Tensor = torch.ops._c10d_functional.wait_tensor.default(out)
        return made

    def sum_of_all(self, x: Tensor) -> Any:
        return differentiable.all_reduce(x * x) * x


EXCHANGED: Final = [0, 1, 4, 5, 2, 3, 6, 7]


def _gathered(x: Tensor) -> Tensor:
    return torch.cat([x * part.sum() for part in x.chunk(2)])


PROGRAMS: Final[dict[str, tuple[Callable[[Tensor], Tensor], P, bool]]] = {
    "gathered_list": (lambda x: torch.cat(x.chunk(2), -1), P(), False),
    "scattered_list": (lambda x: torch.cat([TOP + BOTTOM, 2 * (TOP + BOTTOM)]), P("tp"), False),
    "exchanged_list": (lambda x: x[EXCHANGED], P("tp"), False),
    "broadcast": (lambda x: x.chunk(2)[1], P(), False),
    "ring": (lambda x: x.roll(4, 0), P("tp"), False),
    "ring_of_ranks": (lambda x: x.roll(4, 0), P("tp"), False),
    "functional_gather": (_gathered, P("tp"), True),
    "functional_scatter": (lambda x: (x * x).view(2, 4, 4).sum(0), P("tp"), True),
    "differentiable_sum": (lambda x: (x * x).view(2, 4, 4).sum(0).repeat(2, 1) * x, P("tp"), True),
    "differentiable_gather": (_gathered, P("tp"), True),
    "differentiable_exchange": (lambda x: (x * x)[EXCHANGED], P("tp"), True),
}
OF_PROCESSES: Final = {
    "operator": (lambda x: x.view(2, 4, 4).sum(0), P(), False),
    "sum_of_all": PROGRAMS["differentiable_sum"],
}
"""Results of each program, their specs, and whether they have a gradient."""


def run(name: str, check: Any, mesh: Mesh) -> None:
    expected, spec, has_gradient = {**PROGRAMS, **OF_PROCESSES}[name]
    body = getattr(CallsOfProcesses(mesh), name)
    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=spec, check=check)
    values = []
    for function in (f, expected):
        x = X.clone().requires_grad_(has_gradient)
        y: Tensor = full(function(x))
        values.append([y.detach()])
        if has_gradient:
            values[-1] += torch.autograd.grad(y.square().sum(), x)
    same(*values)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_call_does_what_torch_does(kind: Any, check: Any, gloo: Gloo) -> None:
    for name in PROGRAMS if kind == "ranks" else (*PROGRAMS, *OF_PROCESSES):
        run_on(kind, partial(run, name, check), gloo)


def test_global_strictness_knows_the_order_of_a_gathered_list() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    group: Any = axis_group(mesh, "tp")

    def gathered(order: int, x: Tensor) -> Tensor:
        return torch.cat(differentiable.all_gather(x, group=group)[::order])

    specs: Any = {"mesh": mesh, "in_specs": P("tp"), "out_specs": P(), "check": "global"}
    x = X.clone().requires_grad_()
    same([shard_map(partial(gathered, 1), **specs)(x).detach()], [X])
    with pytest.raises(ShardTypeError, match="one device"):
        shard_map(partial(gathered, -1), **specs)(x)


def test_messages_that_do_not_meet_are_refused() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    group: Any = axis_group(mesh, "tp")

    def unreceived(x: Tensor) -> Tensor:
        dist.isend(x.clone(), group=group, group_dst=1 - group.rank())
        return x

    def unsent(x: Tensor) -> Tensor:
        work = dist.irecv(x.clone(), group=group, group_src=1 - group.rank())
        assert work is not None
        work.wait()
        return x

    def same_peer(x: Tensor) -> Tensor:
        dist.isend(x.clone(), group=group, group_dst=1)
        return x

    line = unreceived.__code__.co_firstlineno + 1
    texts = {
        unreceived: "send of torch.distributed is called in the body, and nothing receives what it "
        f"sends, or what receives is not waited for.\n  at test_raw_calls.py:{line}: "
        "dist.isend(x.clone(), group=group, group_dst=1 - group.rank())",
        unsent: "recv of torch.distributed is waited for, and no rank has sent such a tensor: "
        "ranks receive from [1, 0] with tag 0, and nothing is on its way.",
        same_peer: "send of torch.distributed is called with the same peer on several ranks: "
        "ranks 0, 1, ... to [1, 1], and each has to have one of its own, as (rank + 1) % size.",
    }
    for body, text in texts.items():
        with pytest.raises(CollectiveError) as caught:
            shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(X)
        assert text in (str(caught.value), unplaced(caught.value))
