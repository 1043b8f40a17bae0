"""Values share memory on no mesh: writing into one must not change another."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

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
    checkpoint,
    convert,
    device_put,
    ppermute,
    reduce_scatter,
    reshard,
    shard_map,
    shift,
)
from shardmap_torch.types import Partial
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on, same, unchecked
from tests.programs.support.harness import global_value, random
from tests.support.pool import Gloo

COLLECTIVES: dict[str, tuple[Callable[[Tensor], Tensor], P]] = {
    "sum": (lambda x: all_reduce(x, "tp", dst=I), P()),
    "mean": (lambda x: all_reduce(x, "tp", dst=R, op="mean"), P(replicate="tp")),
    "gather": (lambda x: all_gather(x, "tp", dst=I), P()),
    "gather 1": (lambda x: all_gather(x, "tp", dst=R, dim=1), P(replicate="tp")),
    "gather untiled": (lambda x: all_gather(x, "tp", dst=R, tiled=False), P(replicate="tp")),
    "gather sizes": (lambda x: all_gather(x, "tp", dst=R, sizes=[2, 1]), P(replicate="tp")),
    "scatter": (lambda x: reduce_scatter(x, "tp"), P("tp")),
    "scatter 1": (lambda x: reduce_scatter(x, "tp", dim=1), P(None, "tp")),
    "exchange": (lambda x: all_to_all(x, "tp", split_dim=1, concat_dim=0), P(None, "tp")),
    "shift": (lambda x: shift(x, "tp", 1), P("tp")),
    "stay": (lambda x: ppermute(x, "tp", [(0, 0), (1, 1)]), P("tp")),
    "broadcast": (lambda x: broadcast(x, "tp", 1, dst=I), P()),
    "reshard": (lambda x: reshard(x, P("tp"), P(None, "tp")), P(None, "tp")),
    "checkpoint": (lambda x: checkpoint(lambda x: all_gather(x, "tp", dst=I), x + 0), P()),
}


def writing(collective: Callable[[Tensor], Tensor], x: Tensor, where: str) -> tuple[Tensor, Tensor]:
    h = x * 3
    y = collective(h)
    if where == "result":
        y.mul_(2)
        return y, h * 1
    h.mul_(2)
    return y * 1, h


def pure(collective: Callable[[Tensor], Tensor], x: Tensor, where: str) -> tuple[Tensor, Tensor]:
    h = x * 3
    y = collective(h)
    return (y * 2, h) if where == "result" else (y, h * 2)


def outcome(body: Any, mapping: Any, mesh: Mesh, name: str, where: str) -> list[Tensor]:
    collective, spec = COLLECTIVES[name]
    x = random((4, 4), 0).requires_grad_()
    specs = {"in_specs": (None, P("tp"), None), "out_specs": (spec, P("tp"))}
    outputs = mapping(body, mesh=mesh, **specs)(collective, x, where)
    grads = torch.autograd.grad(outputs, x, [torch.ones_like(y) for y in outputs])
    return [global_value(value) for value in (*outputs, *grads)]


def write_beside_collectives(mesh: Mesh) -> None:
    # What is checked does not run otherwise, and processes check slowly.
    mappings = (unchecked,) if mesh.kind == "process_group" else (unchecked, shard_map)
    for name, where, mapping in product(COLLECTIVES, ("result", "operand"), mappings):
        same(*(outcome(body, mapping, mesh, name, where) for body in (writing, pure)))


@ON_EVERY_MESH
def test_operand_and_result_of_a_collective_can_be_written_to(kind: str, gloo: Gloo) -> None:
    run_on(kind, write_beside_collectives, gloo)


def _made_partial(x: Tensor) -> tuple[Tensor, Tensor]:
    y = convert(x, "tp", src=I, dst=Partial)
    y.mul_(2)
    return y, x


def write_into_a_sum(mesh: Mesh) -> None:
    x = random((4,), 0)
    specs = P(invariant="tp"), (P(partial="tp"), P())
    f = unchecked(_made_partial, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    same(f(x.clone()), (2 * x, x))


def test_a_value_made_partial_is_a_copy_on_the_first_rank_too(gloo: Gloo) -> None:
    """On processes: a check refuses the write, and simulated ranks get read-only shards."""
    run_on("gloo", write_into_a_sum, gloo)


VIEWS: list[tuple[Any, P, P]] = [
    (lambda x: x, P(), P()),
    (lambda x: x, P("tp"), P("tp")),
    (lambda x: x.transpose(0, 1), P("tp"), P(None, "tp")),
    (lambda x: x[1:].detach(), P(None, "tp"), P(None, "tp")),
    (lambda x: convert(x, "tp", src=R, dst=V, dim=0), P(replicate="tp"), P("tp")),
]


def write_into_results(mesh: Mesh) -> None:
    """A plain argument stays one value on all ranks."""
    for body, in_spec, out_spec in VIEWS:
        for grad in (False, True):
            x = random((4, 4), 0)
            leaf = x.clone().requires_grad_(grad)
            mapped: Callable[..., Tensor] = shard_map(
                body, mesh=mesh, in_specs=in_spec, out_specs=out_spec
            )
            y = mapped(leaf)
            with torch.no_grad():
                y.add_(1)
            same(leaf.detach(), x)
    for spec in (P("tp"), P(None, "tp")):
        x = random((4, 4), 0)
        given = x.clone()
        if mesh.kind == "process_group":
            device_put(given, mesh, spec).add_(1)
        same(given, x)


@ON_EVERY_MESH
def test_writing_into_a_result_leaves_plain_arguments_alone(kind: str, gloo: Gloo) -> None:
    run_on(kind, write_into_results, gloo)


def _squared(x: Tensor) -> Tensor:
    return x * x


def _summed(x: Tensor) -> Tensor:
    return all_reduce(x * x, "tp", dst=I)


def write_under_autograd(mesh: Mesh) -> None:
    """Writes as `loss /= 2` does, which autograd forbids for views that Functions return."""
    x = random((4, 4), 0)
    for body, out_spec in ((_summed, P()), (_squared, P("tp"))):
        leaf = x.clone().requires_grad_()
        y = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=out_spec)(leaf)
        y /= 2
        ones = torch.ones_like(y)
        (grad,) = torch.autograd.grad(y, leaf, ones)
        same(grad, x)


@ON_EVERY_MESH
def test_a_result_can_be_written_to_under_autograd(kind: str, gloo: Gloo) -> None:
    run_on(kind, write_under_autograd, gloo)
