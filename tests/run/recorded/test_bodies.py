"""Bodies that write memory, change geometry and read numbers, recorded."""

import gc
import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardmap_torch import I, Mesh, P, TransformError, make_mesh, shard_map
from shardmap_torch.errors import KernelError
from shardmap_torch.kernels import matmul_all_reduce
from shardmap_torch.run.recorded import simplify
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.run.recorded.support.replays import assert_equal, compare, counting_replays
from tests.support.pool import Gloo

ONE, TWO = (make_mesh((n,), ("tp",), kind="simulated") for n in (1, 2))
MESHES: Final = pytest.mark.parametrize("mesh", [ONE, TWO], ids=["one", "two"])
X: Final = random((4, 4), 0)
BACKENDS: Final[Any] = torch.backends


def constants(x: Tensor) -> Any:
    """The caller writes into all results."""
    c = torch.arange(4.0)
    return x * c, c, c[1:], torch.ones(3)


def transposed_in_place(x: Tensor) -> Any:
    h = x * 2
    view = h.t()
    before = view @ x
    h.t_()
    return before, h @ x


def constant_transposed_in_place(x: Tensor) -> Any:
    c = torch.arange(16.0, dtype=x.dtype).view(4, 4)
    before = x @ c
    c.t_()
    return before, x @ c


def squeezed_in_place(x: Tensor) -> Any:
    h = (x * 2)[:1]
    return h.squeeze_(0), h.unsqueeze_(1), h.transpose_(0, 1) * 3


def running_statistics(x: Tensor) -> Any:
    mean, var = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    functional.batch_norm(x, mean, var, training=True)
    return mean, var


def rows(x: Tensor) -> Any:
    return x[torch.tensor([2, 0])]


def row_of_constant(x: Tensor) -> Tensor:
    return x[torch.tensor(1)] + x[torch.arange(3)[2]]


def hot(x: Tensor) -> Any:
    return functional.one_hot((x > 0).long(), 3)


BODIES: Final = [
    constants,
    transposed_in_place,
    constant_transposed_in_place,
    squeezed_in_place,
    running_statistics,
    rows,
    hot,
]


@pytest.mark.sample(14)
@MESHES
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_a_body_is_recorded(body: Callable[..., Any], inference: bool, mesh: Mesh) -> None:
    with torch.inference_mode(inference):
        compare(body, mesh, (X,), in_specs=P(), out_specs=P())


@MESHES
def test_inputs_that_overlap_are_recorded(mesh: Mesh) -> None:
    f = shard_map(torch.sub, mesh=mesh, in_specs=P(), out_specs=P(), replay=True)
    row = random((1, 4), 1).expand(4, 4)
    for a, b in ((row, row), (row, row.t()), (X, X), (X[1:3], X[:2]), (X[:0], X[:0])):
        with counting_replays() as runs:
            for _ in range(2):
                assert torch.equal(f(a, b), a - b)
        assert runs


def with_constant(x: Tensor) -> Tensor:
    return x @ torch.arange(16.0).view(4, 4).sin() @ torch.ones(4, 4)


def attention(x: Tensor) -> Tensor:
    q = x.expand(2, 2, 4, 4)
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


@MESHES
@pytest.mark.parametrize("body", [with_constant, attention])
def test_switches_of_torch_are_noticed(body: Callable[..., Any], mesh: Mesh) -> None:
    """They decide which operators are recorded, and what constants are."""
    f = shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), replay=True)
    x, threads = X.float(), torch.get_num_threads()
    changes: list[Callable[[], Any]] = [
        nullcontext,
        partial(sdpa_kernel, [SDPBackend.MATH]),
        partial(switched, torch.set_float32_matmul_precision, "medium", "highest"),
        partial(
            switched, partial(setattr, BACKENDS.mkldnn.matmul, "fp32_precision"), "bf16", "ieee"
        ),
        partial(switched, torch.set_num_threads, threads + 1, threads),
        partial(switched, torch.backends.mha.set_fastpath_enabled, False, True),
    ]
    with counting_replays() as runs:
        for change in changes:
            with change():
                for _ in range(2):
                    assert torch.equal(f(x), body(x))
        assert len(runs) == len(changes)


@contextmanager
def switched(switch: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(before)


def numbered(xs: dict[str, Tensor]) -> Any:
    return sum([n * x for n, x in enumerate(xs.values())])


@MESHES
def test_dicts_in_another_order_are_other_arguments(mesh: Mesh) -> None:
    f = shard_map(numbered, mesh=mesh, in_specs=P(), out_specs=P(), replay=True)
    xs = {"a": X, "b": 2 * X}
    with counting_replays() as runs:
        for given in (xs, xs, dict(reversed(xs.items())), xs, xs):
            assert torch.equal(f(given), numbered(given))
    assert len(runs) >= 2


@MESHES
def test_results_are_objects_of_their_own(mesh: Mesh) -> None:
    weight = torch.nn.Parameter(X.clone())

    def body(x: Tensor) -> Any:
        h = x * 2
        return h, h.detach(), h[1:], h[1:], weight.detach()

    f = shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), replay=True)
    for _ in range(3):
        results = f(X)
        assert_equal(results, body(X))
        assert len({*map(id, results), id(weight)}) == 6
        assert not any([x.requires_grad for x in results])


def taken(x: Tensor) -> Any:
    return x * x[0].tolist()[0]


def data(x: Tensor) -> Tensor:
    return (x * 2).data


def row_of_written(x: Tensor) -> Tensor:
    number = torch.zeros((), dtype=torch.int64)
    number.add_((x[0, 0] > 0).long())
    return x[number]


def enlarged(x: Tensor) -> Tensor:
    h = x * 2
    return h.resize_(5, 8).zero_()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (taken, "it takes numbers out of tensors"),
        (enlarged, r"aten.resize_.default makes the memory of a tensor larger \(test_bodies"),
    ],
)
@MESHES
def test_a_body_is_refused(body: Callable[..., Any], why: str, mesh: Mesh) -> None:
    f = shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), replay=True)
    for _ in range(2):
        with pytest.raises(TransformError, match=why):
            f(X)


@pytest.mark.parametrize("simulate", ["ranks", "auto"])
def test_ranks_that_run_one_by_one_run_the_body(simulate: Any) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=simulate)
    compare(data, mesh, (X,), replays=(0,), in_specs=P(), out_specs=P())


def required(x: Tensor) -> Tensor:
    return matmul_all_reduce(x.mT, x, "tp", dst=I, overlap="require")


def asked(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return (x * 2).detach() + float((x * 1).requires_grad)


def on_processes(mesh: Mesh) -> None:
    cases: list[tuple[Callable[..., Any], P, str]] = [
        (taken, P(), "it takes numbers out of tensors"),
        (row_of_written, P(), r"takes a number out of a tensor \(test_bodies"),
    ]
    for body, spec, why in cases:
        f = shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, replay=True)
        with pytest.raises(TransformError, match=why):
            f(X)
    for each in (data, row_of_constant):
        compare(each, mesh, (X,), in_specs=P(), out_specs=P())
    f = shard_map(required, mesh=mesh, in_specs=P("tp"), out_specs=P(), replay=True)
    with pytest.raises(KernelError, match="cannot overlap: replay=True records the composition"):
        f(X)
    replayed, plain = (
        shard_map(asked, mesh=mesh, in_specs=P(), out_specs=P(), replay=replay)
        for replay in (True, False)
    )
    with torch.no_grad():
        for tracked in (False, True, False, True):
            x = X.clone().requires_grad_(tracked)
            assert_equal(replayed(x), plain(x))


def test_processes_read_constants_alone(gloo: Gloo) -> None:
    run_on("gloo", on_processes, gloo)


def looked_up(table: Tensor, ids: Tensor) -> Tensor:
    return functional.embedding(ids, table * 2)


def test_errors_of_later_runs_name_the_line_and_leave_the_recording_as_it_is() -> None:
    f = shard_map(looked_up, mesh=TWO, in_specs=P(), out_specs=P(), replay=True)
    good, bad = torch.tensor([0, 3]), torch.tensor([0, 9])
    f(X, good)
    with counting_replays(), pytest.raises(IndexError) as raised:
        f(X, bad)
    lines = "".join(traceback.format_exception(raised.value))
    assert ": return functional.embedding(ids, table * 2)\n" in lines
    assert torch.equal(f(X, good), looked_up(X, good))


def test_recordings_leave_no_lines_and_no_tensors_behind() -> None:
    def recorded() -> None:
        f = shard_map(constants, mesh=TWO, in_specs=P(), out_specs=P(), replay=True)
        f(X)

    recorded()
    gc.collect()
    before = len(linecache.cache)
    recorded()
    gc.collect()
    assert len(linecache.cache) == before


def test_a_recording_keeps_constants_up_to_their_sum() -> None:
    def kept(x: Tensor, limit: int) -> int:
        f = shard_map(positions, mesh=ONE, in_specs=P(), out_specs=P(), replay=True)
        with mock.patch.object(simplify, "_MOST", limit):
            assert torch.equal(f(x), positions(x))
        gc.collect()
        before = sum(type(each) is Tensor for each in gc.get_objects())
        assert torch.equal(f(x + 1), positions(x + 1))
        del f
        gc.collect()
        return before - sum(type(each) is Tensor for each in gc.get_objects())

    assert kept(X, 1 << 24) - kept(X, 9) == 1


def positions(x: Tensor) -> Tensor:
    for n in range(3):
        x = x * torch.arange(4 * n, 4 * n + 4)
    return x
