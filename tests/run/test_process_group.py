"""Calls on processes: what they communicate, and that they fail cleanly."""

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shardmap_torch import (
    CommunicationError,
    I,
    Mesh,
    MeshError,
    P,
    R,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    convert,
    full,
    make_mesh,
    ppermute,
    reduce_scatter,
    shift,
)
from shardmap_torch.backends import process_group
from shardmap_torch.backends.communicator import Wire
from shardmap_torch.backends.traffic import counting_bytes
from tests.programs.support.everywhere import ON_REAL_RANKS, run_on, same
from tests.programs.support.everywhere import unchecked as shard_map
from tests.programs.support.harness import random
from tests.support.pool import Gloo

pytestmark = pytest.mark.slow


def counting(run: Callable[[], Any]) -> list[str]:
    """The moves that `run` sends over the wire, in order."""
    sent: list[str] = []

    def note(collective: Any, num_bytes: float, num_ranks: int) -> None:
        sent.append(collective.move)

    with counting_bytes(), mock.patch.object(process_group, "pass_door", note):
        run()
    return sent


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = torch.tanh(convert(x, "tp", src=I, dst=R) @ w1)
    return all_reduce((h @ w2).square(), "tp", dst=I)


def frozen(mesh: Mesh) -> None:
    f = shard_map(
        mlp, mesh=mesh, in_specs=(P(invariant="tp"), P(None, "tp"), P("tp")), out_specs=P()
    )
    for trained, expected in [
        ((), []),
        ((0,), ["sum"]),  # convert(I, R)
        ((1,), ["gather"]),  # the plain weight's gradient is global
        ((2,), ["gather"]),
        ((0, 1, 2), ["gather", "gather", "sum"]),
    ]:
        values = [random(shape, i) for i, shape in enumerate([(4, 3), (3, 6), (6, 2)])]
        for i in trained:
            values[i].requires_grad_()
        results: list[Tensor] = []
        assert counting(lambda: results.append(f(*values))) == ["sum"]  # noqa: B023
        if trained:
            assert sorted(counting(results[0].sum().backward)) == expected
        else:
            assert not results[0].requires_grad


def test_frozen_inputs_cause_no_collective_in_the_backward(gloo: Gloo) -> None:
    run_on("gloo", frozen, gloo)


def unused_output(mesh: Mesh) -> None:
    x = random((4, 3), 0).requires_grad_()

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return all_reduce(x, "tp", dst=R).sum(), all_reduce(x.sum(), "tp", dst=I)

    out_specs = (P(replicate="tp"), P())
    _, y = shard_map(two, mesh=mesh, in_specs=P("tp"), out_specs=out_specs)(x)
    assert counting(y.backward) == ["gather"]


def test_an_output_that_is_not_used_causes_no_collective_in_the_backward(gloo: Gloo) -> None:
    run_on("gloo", unused_output, gloo)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
    torch.complex128,
]
MOVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: all_reduce(x, "tp", dst=I),
    "gather": lambda x: all_gather(x, "tp", dim=1, dst=I),
    "scatter": lambda x: reduce_scatter(x, "tp", dim=1),
    "exchange": lambda x: all_to_all(x, "tp", split_dim=1, concat_dim=0),
    "permute": lambda x: ppermute(x, "tp", [(1, 0)]),
    "shift": lambda x: shift(x, "tp", 1),
    "broadcast": lambda x: broadcast(x, "tp", 1, dst=I),
}
ORDERED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: all_reduce(x, "tp", dst=I, op="max"),
    "min": lambda x: all_reduce(x, "tp", dst=I, op="min"),
}


def every_dtype(mesh: Mesh) -> None:
    simulated = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
    for dtype in DTYPES:
        movers = MOVERS if dtype.is_complex else MOVERS | ORDERED
        for name, move in movers.items():
            for x in (torch.arange(8).reshape(4, 2).t() % 3, torch.zeros(0, 4), torch.ones(2, 4)):
                given = x.to(dtype).conj()  # of complex values a view, conjugated later
                results = [
                    shard_map(move, mesh=on, in_specs=P("tp"), out_specs=P("tp"))(given)
                    for on in (mesh, simulated)
                ]
                assert results[0].dtype == results[1].dtype, name
                same(results[0].to(torch.complex128), results[1].to(torch.complex128))


def test_every_dtype_and_layout_travels_as_on_a_simulated_mesh(gloo: Gloo) -> None:
    run_on("gloo", every_dtype, gloo)


def aliasing(mesh: Mesh) -> None:
    x = torch.arange(4.0)
    for move in (*MOVERS.values(), lambda x: ppermute(x, "tp", [(0, 0), (1, 1)])):

        def write(x: Tensor, move: Any = move) -> Tensor:
            move(x.reshape(1, 2)).add_(1)
            return x

        same(shard_map(write, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(x), x)
    for borrow in (from_dlpack, lambda x: torch.from_numpy(x.numpy()[1:]), Tensor.detach):
        shard_map(borrow, mesh=mesh, in_specs=P(), out_specs=P())(x).zero_()
    same(x, torch.arange(4.0))


@ON_REAL_RANKS
def test_a_result_that_travelled_or_is_borrowed_shares_no_memory_with_the_operand(
    kind: str, gloo: Gloo
) -> None:
    run_on(kind, aliasing, gloo)


def failure(mesh: Mesh) -> None:
    def lost(wire: Wire, x: Tensor, op: str) -> Tensor:
        raise RuntimeError("connection closed by peer")

    x = torch.arange(4.0)
    f = shard_map(lambda x: all_reduce(x, "tp", dst=I), mesh=mesh, in_specs=P("tp"), out_specs=P())
    with mock.patch.object(Wire, "reduce", lost), pytest.raises(CommunicationError) as caught:
        f(x)
    rank = torch.distributed.get_rank()
    site = f"test_process_group.py:{failure.__code__.co_firstlineno + 5}"
    head, *_ = str(caught.value).splitlines()
    assert head == (
        f"all_reduce('tp', Partial -> I) on the process_group mesh (tp=2), at {site}, failed "
        f"on rank {rank}: connection closed by peer"
    )
    with pytest.raises(MeshError, match=r"broken since an error: all_reduce\('tp', Partial -> I\)"):
        f(x)
    mesh.recover()
    same(f(x), x[:2] + x[2:])


def test_what_torch_distributed_raises_names_collective_and_rank(gloo: Gloo) -> None:
    run_on("gloo", failure, gloo)


def compiled_after_a_recovery() -> float:
    mesh, axes = make_mesh((2, 2), ("dp", "tp")), ("dp", "tp")
    mesh.recover()
    f = shard_map(lambda x: all_reduce(x, axes, dst=I), mesh=mesh, in_specs=P(axes), out_specs=P())
    y: Tensor = torch.compile(f, backend="eager")(torch.ones(4))
    return y.item()


def test_after_a_recovery_what_is_compiled_finds_the_new_groups(gloo: Gloo) -> None:
    assert gloo(4).run(compiled_after_a_recovery) == [4.0] * 4


def freed() -> list[bool]:
    """Returns whether a mesh that has been used is there, before and after it is dropped."""
    gc.collect()
    gc.disable()
    try:
        mesh = make_mesh((2,), ("tp",))
        f = shard_map(lambda x: all_reduce(x, "tp", dst=I), mesh=mesh, in_specs=P(), out_specs=P())
        f(torch.ones(2).requires_grad_(False))
        state = weakref.ref(mesh._state)
        found = [state() is not None]
        del mesh, f
        return [*found, state() is not None]
    finally:
        gc.enable()


def test_a_mesh_that_is_dropped_is_freed_at_once(gloo: Gloo) -> None:
    assert gloo(2).run(freed) == [[True, False]] * 2


def gathers_what_a_transform_wraps(mesh: Mesh) -> None:
    """`full` under torch.func, where a DTensor looks like a plain tensor."""
    square = shard_map(
        lambda x: x * x,
        mesh=mesh,
        in_specs=P("tp", replicate={"dp"}),
        out_specs=P("tp", replicate={"dp"}),
    )
    x = random((8,), 0)
    weights = torch.arange(8.0, dtype=x.dtype)
    y, pull_back = torch.func.vjp(lambda x: full(square(x)), x)  # type: ignore[misc]  # torch
    assert type(y) is Tensor
    same(y, x * x)
    same(pull_back(weights)[0], 2 * weights * x)
    same(torch.func.grad(lambda x: (full(square(x)) * weights).sum())(x), 2 * weights * x)


def test_full_gathers_what_a_transform_of_torch_func_wraps(gloo: Gloo) -> None:
    run_on("gloo", gathers_what_a_transform_wraps, gloo, (1, 2), ("dp", "tp"))
