"""Recorded runs hide their messages: the same numbers, in another order on all ranks alike."""

import random as python_random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmap_torch import (
    CollectiveMismatchError,
    CommunicationError,
    I,
    Mesh,
    P,
    R,
    SpecError,
    V,
    all_gather,
    all_reduce,
    make_mesh,
    reduce_scatter,
    reinterpret,
    shard_map,
    value_and_grad,
)
from shardmap_torch.backends import communicator
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.backends.recorder import Sending
from shardmap_torch.optim import sync_gradients
from shardmap_torch.run.recorded import recordings, schedule
from shardmap_torch.run.recorded.simplify import Program, storage_of
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.run.recorded.support.replays import (
    assert_equal,
    compare,
    counting_replays,
    shuffled,
)
from tests.run.recorded.support.scheduled import AXES, delays, generated
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

LAYERS: Final = 4


def mean_of_squares(params: Sequence[Tensor], x: Tensor) -> Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return all_reduce(x.square().mean(), "dp", op="mean", dst=I)


def data_parallel(params: Sequence[Tensor], x: Tensor) -> Any:
    """One step of SGD, whose gradients are summed a layer a bucket."""
    value, grads = value_and_grad(partial(mean_of_squares, x=x))(params)
    grads = sync_gradients(grads, P(), "dp", bucket_bytes=1)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def two_microbatches(params: Sequence[Tensor], x: Tensor) -> Any:
    """Partial results that each collective of the other batch can hide."""
    found = []
    for rows in x.chunk(2):
        for w in params:
            rows = torch.tanh(all_reduce(rows @ w, "dp", dst=R))
            rows = reinterpret(rows, "dp", src=R, dst=V)
        found.append(rows)
    return torch.cat(found)


class Programs:
    """The programs that a mesh has recorded, in the body's order and as they run.

    And the memory that each takes at its peak, which later cannot be asked.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Program, Program]] = []
        self.peaks: list[tuple[int, int]] = []

    def watching(self) -> Any:
        original = schedule.overlapped

        def overlapped(program: Program) -> tuple[Program, bool]:
            found = original(program)
            self.pairs.append((program, found[0]))
            self.peaks.append((peak(program), peak(found[0])))
            return found

        return mock.patch.object(recordings, "overlapped", overlapped)


def weights() -> list[Tensor]:
    return [random((6, 6), seed) / 3 for seed in range(LAYERS)]


def names_of(program: Program) -> list[str]:
    """Names matmuls and messages in the order of a program."""
    return [
        each.function.move if isinstance(each.function, Sending) else "mm"
        for each in program.steps
        if isinstance(each.function, Sending) or "aten.mm." in str(each.function)
    ]


def sums_leave_early(mesh: Mesh) -> None:
    seen = Programs()
    with seen.watching():
        compare(
            data_parallel,
            mesh,
            (weights(), random((8, 6), 9)),
            in_specs=(P(), P("dp")),
            out_specs=P(),
        )
    before, after = map(names_of, seen.pairs[0])
    sums = [at for at, name in enumerate(before) if name == "sum"]
    assert before[sums[1] :] == ["sum"] * LAYERS  # the loss, the backward, then all gradients
    last = max(at for at, name in enumerate(after) if name == "mm")
    assert after[:last].count("sum") == LAYERS  # all but that of the layer that comes last
    started = [step for step in seen.pairs[0][1].steps if step.starts]
    assert len(started) >= LAYERS - 1


def test_sums_of_gradients_leave_while_the_backward_runs(gloo: Gloo) -> None:
    run_on("gloo", sums_leave_early, gloo, names=("dp",))


def halves_are_on_their_way(mesh: Mesh) -> None:
    """Two ranks gather addends in half precision, and add them once they are there."""
    begun: list[torch.dtype] = []
    start: Any = ProcessGroupBackend._start

    def counted(self: Any, move: str, collective: Any, x: Tensor) -> Any:
        found = start(self, move, collective, x)
        if found is not None and move == "sum":
            begun.append(x.dtype)
        return found

    args = [w.bfloat16() for w in weights()], random((8, 6), 9).bfloat16()
    with mock.patch.object(ProcessGroupBackend, "_start", counted):
        compare(data_parallel, mesh, args, in_specs=(P(), P("dp")), out_specs=P())
    assert begun.count(torch.bfloat16) >= LAYERS - 1


def test_sums_of_halves_are_on_their_way_too_and_have_the_same_bits(gloo: Gloo) -> None:
    run_on("gloo", halves_are_on_their_way, gloo, names=("dp",))


def microbatches_alternate(mesh: Mesh) -> None:
    seen = Programs()
    args = weights(), random((8, 6), 9)
    with seen.watching():
        compare(two_microbatches, mesh, args, in_specs=(P(), P("dp")), out_specs=P("dp"))
    before, after = map(names_of, seen.pairs[0])
    assert before == ["mm", "sum"] * (2 * LAYERS)
    assert after == ["mm", "sum"] * (2 * LAYERS)
    waited = [step.starts for step in seen.pairs[0][1].steps if isinstance(step.function, Sending)]
    assert waited == [True] * (2 * LAYERS)


def test_a_microbatch_computes_while_the_sums_of_the_other_are_on_their_way(gloo: Gloo) -> None:
    run_on("gloo", microbatches_alternate, gloo, names=("dp",))


def the_same_bits(mesh: Mesh, seeds: Sequence[int]) -> None:
    """Calls each program in both orders, on other values each time, while ranks are late."""
    specs: Any = {"in_specs": (P(AXES), P()), "out_specs": ([P(AXES)] * 5, P()), "replay": True}
    num_started = 0
    for seed in seeds:
        args = random((4 * mesh.size, 4), seed), random((4, 4), seed + 1)
        bound, seen = python_random.Random(seed).choice([0, 512, 2048, 2**26]), Programs()
        hidden = shard_map(generated(seed), mesh=mesh, **specs)
        in_order = shard_map(generated(seed), mesh=mesh, schedule="program", **specs)
        with (
            counting_replays() as runs,
            seen.watching(),
            delays(seed * mesh.size + mesh.rank),
            mock.patch.object(schedule, "_bound", return_value=bound),
        ):
            for call in range(5):  # the first is recorded
                given = [shuffled(args, call) for _ in range(2)]
                found, expected = hidden(*given[0]), in_order(*given[1])
                assert_equal((found, given[0]), (expected, given[1]))
        assert len(runs) == 2 * 4
        (before, after), ((_, program),) = seen.peaks[0], seen.pairs
        assert after <= before + 2 * bound  # taken earlier, and kept by what is under way
        orders: list[Any] = [None] * mesh.size
        dist.all_gather_object(orders, schedule.order_of(program))
        assert orders == orders[:1] * mesh.size
        num_started += sum([step.starts for step in program.steps])
    assert num_started > len(seeds)


@pytest.mark.parametrize(("shape", "few"), [((1, 2), 2), ((2, 2), 1)])
def test_generated_programs_are_the_same_bit_for_bit(
    shape: tuple[int, int], few: int, gloo: Gloo
) -> None:
    for first in sized([0], range(0, 64, 8)):
        seeds = range(first, first + sized(few, 8))
        run_on("gloo", partial(the_same_bits, seeds=seeds), gloo, shape, AXES)


def peak(program: Program) -> int:
    """Bytes of what is computed, at the most, if each tensor goes after it is read last."""
    tensors, outside = program.tensors, {*program.inputs, *program.captured, *program.computed}
    last: dict[int, int] = {}
    for at, step in enumerate(program.steps):
        last |= {storage_of(tensors[n]): at for n in (*step.operands, *step.results)}
    for at, step in enumerate(program.steps):
        if step.starts:  # what is under way keeps its operand
            sent = storage_of(tensors[step.operands[0]])
            last[sent] = max(last[sent], read_next(program, at))
    last |= {storage_of(tensors[n]): len(program.steps) for n in program.outputs}
    kept = {storage_of(tensors[n]) for n in outside}
    alive, most = dict[int, int](), 0
    for at, step in enumerate(program.steps):
        made = {storage_of(tensors[n]): tensors[n].untyped_storage().nbytes() for n in step.results}
        alive |= {key: size for key, size in made.items() if key not in kept}
        most = max(most, sum(alive.values()))
        alive = {key: size for key, size in alive.items() if last[key] > at}
    return most


def read_next(program: Program, at: int) -> int:
    """Returns the step that waits for what a step starts."""
    made = {*program.steps[at].results}
    for later in range(at + 1, len(program.steps)):
        if made & {program.sources[n] for n in program.steps[later].operands}:
            return later
    return len(program.steps)


def memory_is_bounded(mesh: Mesh) -> None:
    """Shards that could all be gathered at the start are gathered as far ahead as is allowed."""

    def body(shards: Sequence[Tensor], x: Tensor) -> Tensor:
        for shard in shards:
            x = torch.tanh(x @ all_gather(shard, "dp", dst=R))
        return all_reduce(x.sum(), "dp", dst=I)

    def scattering(weights: Sequence[Tensor], x: Tensor) -> Tensor:
        return torch.stack([reduce_scatter(x @ w, "dp") for w in weights]).sum(0)

    shards = [random((8, 8), seed) for seed in range(12)]
    for bound, ahead in ((0, 0), (4 * 8 * 8 * 8, 1)):
        for f, own in ((body, P("dp")), (scattering, P())):
            seen = Programs()
            specs: Any = {"in_specs": (own, P("dp")), "out_specs": P() if f is body else P("dp")}
            with seen.watching(), mock.patch.object(schedule, "_bound", return_value=bound):
                compare(f, mesh, (shards, random((4, 8), 20)), **specs)
            before, after = seen.peaks[0]
            assert after <= before + bound, (f, bound, before, after)
            assert any(step.starts for step in seen.pairs[0][1].steps) == bool(ahead)


def test_what_is_done_earlier_takes_no_more_memory_than_it_may(gloo: Gloo) -> None:
    run_on("gloo", memory_is_bounded, gloo, names=("dp",))


def raises_before_it_waits(mesh: Mesh) -> None:
    """Rank 1 raises while a message is on its way that rank 0, which is late, still needs."""

    def body(table: Tensor, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        far = all_gather(x, "dp", tiled=False, dst=I)
        return far.sum(0), table.index_select(0, rows)

    table, x = random((4, 4), 0), random((16, 2**14), 2)  # large parts go from rank to rank
    specs: Any = {"in_specs": (P(), P("dp"), P("dp")), "out_specs": (P(), P("dp"))}
    f = shard_map(body, mesh=mesh, replay=True, **specs)
    expected = f(table, torch.arange(4), x)
    begin = communicator._RECEIVE

    def late(*given: Any) -> Any:
        time.sleep(0.2 * (mesh.rank == 0))
        return begin(*given)

    with mock.patch.object(communicator, "_RECEIVE", late):
        for _ in range(2):
            with pytest.raises(IndexError) if mesh.rank == 1 else nullcontext():
                f(table, torch.tensor([0, 1, 0, 9]), x)
            assert_equal(f(table, torch.arange(4), x), expected)


def test_a_rank_that_raises_with_messages_on_their_way_takes_none_from_others(gloo: Gloo) -> None:
    run_on("gloo", raises_before_it_waits, gloo, names=("dp",))


def reordered(mesh: Mesh) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        far = all_reduce(x @ x.t(), "dp", dst=I)
        return far + all_gather(x, "dp", tiled=False, dst=I).sum(0)  # whose operand is there

    return shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P(), replay=True)


def calls_something_else(mesh: Mesh) -> None:
    """One rank alone forgets its recordings by the error, and all may call the function again."""
    f, x = reordered(mesh), random((8, 4), 0)
    g = shard_map(torch.sin, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    expected = [f(x), f(x)]
    with pytest.raises(CollectiveMismatchError, match=r"rank 0: body at .*\n.*rank 1: sin at"):
        (f, g)[mesh.rank](x)
    with counting_replays() as runs:
        assert_equal([f(x), f(x)], expected)
    assert len(runs) == 1


def test_after_a_rank_has_called_something_else_all_ranks_record_again(gloo: Gloo) -> None:
    run_on("gloo", calls_something_else, gloo, names=("dp",))


def other_order(mesh: Mesh) -> None:
    f = reordered(mesh)
    order = (
        schedule.order_of if mesh.rank == 0 else lambda program: schedule.order_of(program)[::-1]
    )
    with mock.patch.object(recordings, "order_of", order):
        f(random((8, 4), 0))
    with pytest.raises(
        CollectiveMismatchError, match=re.escape("rank 0: replays all_gather('dp', V -> I")
    ):
        f(random((8, 4), 1))


def test_ranks_that_would_run_in_other_orders_are_told_before_anything_is_sent(gloo: Gloo) -> None:
    run_on("gloo", other_order, gloo, names=("dp",))


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def bodies_instead(mesh: Mesh) -> None:
    f = shard_map(data_parallel, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), replay=True)
    args = weights(), random((8, 6), 9)
    expected = f(*args)
    assert_equal(f(*args), expected)
    with Watching():  # on all ranks
        assert_equal(f(*args), expected)
    assert_equal(f(*args), expected)


def test_all_ranks_may_run_the_body_in_place_of_a_recording(gloo: Gloo) -> None:
    run_on("gloo", bodies_instead, gloo, names=("dp",))


def one_body_instead(mesh: Mesh) -> None:
    mesh = make_mesh((2,), ("dp",), timeout=timedelta(seconds=3))
    f = shard_map(data_parallel, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), replay=True)
    args = weights(), random((8, 6), 9)
    for _ in range(2):
        f(*args)
    watching = Watching() if mesh.rank == 0 else nullcontext()
    with watching, pytest.raises((CommunicationError, CollectiveMismatchError)) as caught:
        f(*args)
    assert "rank 0" in str(caught.value)
    mesh.recover()
    assert_equal(f(*args), f(*args))


@pytest.mark.slow
def test_a_rank_that_alone_runs_the_body_is_an_error_and_no_wrong_number(gloo: Gloo) -> None:
    run_on("gloo", one_body_instead, gloo, names=("dp",))


def test_a_schedule_is_one_of_two() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    given: dict[str, Any] = {"replay": True, "schedule": "fast"}
    with pytest.raises(
        SpecError, match=re.escape("schedule is 'overlap' or 'program', not 'fast'.")
    ):
        shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P(), **given)
